//! One pass over everything that refers to clusters: header, L1 and L2 tables of the disk and of its snapshots, the
//! snapshot table, bitmaps, the encryption header.
//!
//! It counts the references to the clusters of its window. It also finds faults that do not depend on the refcounts:
//! entries that do not decode, references past the end of the file, metadata that something else also refers to.
//!
//! Invariants:
//! - The memory of a pass is bounded. The maps' memory is checked at every reference ([`Walk::is_over_budget`]); they
//!   have the part of the budget that lists leave. L2 tables are listed a bounded number at a time, and all other
//!   tables are read in parts.
//! - A table that is read whole is read once: L1 tables and bitmap tables that overlap would multiply the file.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::bitmaps::{consistent_bitmaps, for_each_bitmap};
use super::super::counts::CountMap;
use super::super::read::{SnapshotTableError, for_each_entry, for_each_snapshot, read};
use super::claims::Claims;
use super::{Findings, Remedy, Subject, refblocks};
use crate::format::l1::{L1_TABLE_MAX_BYTES, OFFSET_MASK};
use crate::format::{
    BitmapCluster, BitmapDirectoryEntry, BitmapTableEntry, ClusterUse, EntryError, HostOffset, L1Entry,
    L2Entry, L2Mapping, L2Table,
};

/// The number of references to a table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct References {
    /// References from all L1 tables together.
    pub(crate) all: u64,
    /// References from the active L1 table.
    pub(crate) active: u64,
}

/// Guest clusters by kind, over the active L1 table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) allocated: u64,
    pub(crate) compressed: u64,
    pub(crate) fragmented: u64,
}

/// An L1 table.
#[derive(Clone, Copy, Debug)]
struct L1Table {
    structure: ClusterUse,
    offset: u64,
    entries: u64,
    references: References,
    /// Its bytes also belong to another L1 table.
    overlaps: bool,
}

/// The most L2 tables that are listed at once.
const TABLES_MAX: usize = 1 << 18;
/// The memory of such a list for each table, in bytes: the nodes of the tree are half full.
const TABLE_LISTED_BYTES: usize = 2 * size_of::<(u64, References)>();
/// The most entries of a bitmap table that are checked together.
const BITMAP_PART: u64 = 1 << 15;

/// The state of a pass.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    pub(crate) subject: &'a Subject<'a>,
    /// The clusters whose references are counted.
    pub(crate) window: Range<u64>,
    /// The number of references to each cluster.
    pub(crate) expected: CountMap,
    /// The refcounts on disk, if they were read.
    pub(crate) on_disk: CountMap,
    /// The refcount blocks by table entry, if they were read.
    pub(crate) blocks: Vec<(u64, HostOffset)>,
    /// True if the refcount structure itself is damaged, so that mending counts in place is not enough.
    pub(crate) refcounts_damaged: bool,
    pub(crate) findings: Findings,
    pub(crate) stats: Stats,
    memory_max_bytes: usize,
    /// The part of the memory that is left for the maps.
    maps_max_bytes: usize,
    claims: Claims,
    with_on_disk: bool,
    /// True in the first pass, which reports the findings that are not about a cluster.
    first: bool,
    l1_tables: Vec<L1Table>,
    /// A part of the file that is known to be a hole.
    hole: Range<u64>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(subject: &'a Subject<'a>, window: Range<u64>, first: bool, findings: Findings) -> Self {
        let map = || CountMap::new(window.clone());
        Self {
            subject,
            expected: map(),
            on_disk: map(),
            claims: Claims::new(window.clone()),
            blocks: Vec::new(),
            refcounts_damaged: false,
            findings,
            stats: Stats::default(),
            memory_max_bytes: usize::MAX,
            maps_max_bytes: usize::MAX,
            with_on_disk: false,
            first,
            l1_tables: Vec::new(),
            hole: 0..0,
            window,
        }
    }

    /// Returns true if the window is the whole file.
    pub(crate) fn is_whole(&self) -> bool {
        self.window == (0..u64::MAX)
    }

    /// Returns true if the maps have outgrown their budget; then nothing in them is valid.
    pub(super) fn is_over_budget(&self) -> bool {
        let maps = [&self.expected, &self.on_disk, self.claims.map()];
        maps.iter().map(|map| map.memory_bytes()).sum::<usize>() > self.maps_max_bytes
    }

    /// Reserves the memory of a list that is kept during the pass. At least half of the budget stays for the maps.
    pub(super) fn set_aside(&mut self, bytes: usize) {
        let left = self.maps_max_bytes.saturating_sub(bytes);
        self.maps_max_bytes = left.max(self.memory_max_bytes / 2);
    }

    /// Sets the budget of the pass, in bytes; it has none to begin with.
    pub(super) fn limit_memory(&mut self, max_bytes: usize) {
        (self.memory_max_bytes, self.maps_max_bytes) = (max_bytes, max_bytes);
    }

    /// Records a corruption that is not about a cluster's count.
    pub(super) fn note(
        &mut self,
        structure: ClusterUse,
        offset: u64,
        remedy: Remedy,
        message: impl FnOnce() -> String,
    ) {
        if self.first {
            self.findings.corruption(structure, offset, remedy, message);
        }
    }

    /// Records that a structure could not be read.
    pub(super) fn note_error(
        &mut self,
        structure: ClusterUse,
        offset: u64,
        remedy: Remedy,
        message: impl FnOnce() -> String,
    ) {
        if self.first {
            self.findings.error(structure, offset, remedy, message);
        }
    }

    /// Walks everything. With the refcounts as they are on disk, COPIED flags are checked against them.
    pub(super) async fn run(&mut self, with_on_disk: bool) {
        self.with_on_disk = with_on_disk;
        let Subject { header, geometry, .. } = *self.subject;
        self.claim(ClusterUse::Header, 0, geometry.cluster_size(), 1, Remedy::None);
        if with_on_disk {
            refblocks::load(self).await;
        }
        self.list_l1_tables().await;
        let l1_tables = std::mem::take(&mut self.l1_tables);
        for table in &l1_tables {
            self.claim(
                table.structure,
                table.offset,
                table.entries * 8,
                table.references.all,
                Remedy::None,
            );
        }
        self.l1_tables = l1_tables;
        if self.is_over_budget() {
            return;
        }
        self.walk_tables().await;
        if self.is_over_budget() {
            return;
        }
        if let Some((offset, len)) = header.crypto_header() {
            self.claim(ClusterUse::EncryptionHeader, offset.bytes(), len, 1, Remedy::None);
        }
        self.walk_bitmaps().await;
        self.find_shared_metadata();
    }

    /// Walks the L2 tables.
    async fn walk_tables(&mut self) {
        let cluster_size = self.subject.geometry.cluster_size();
        let mut after = None;
        loop {
            let tables = self.tables_behind(after).await;
            if after.is_none() {
                // The first list is the longest.
                self.set_aside(tables.len() * TABLE_LISTED_BYTES);
            }
            for (&offset, &references) in &tables {
                self.claim(
                    ClusterUse::L2Table,
                    offset,
                    cluster_size,
                    references.all,
                    Remedy::None,
                );
                self.walk_l2(offset, references).await;
                if self.is_over_budget() {
                    return;
                }
            }
            after = tables.last_key_value().map(|(&last, _)| last);
            if tables.len() < TABLES_MAX {
                return;
            }
        }
    }

    /// Finds every L1 table and its number of references.
    async fn list_l1_tables(&mut self) {
        let Subject {
            file,
            header,
            geometry,
            file_len,
        } = *self.subject;
        let mut tables: BTreeMap<(u64, u64), References> = BTreeMap::new();
        let active = (header.l1_offset.bytes(), u64::from(header.l1_entries));
        if active.1 > 0 {
            tables.insert(active, References { all: 1, active: 1 });
        }
        let table_at = header.snapshot_table_offset.bytes();
        if header.snapshot_count > 0 {
            let each = |index: u32, snapshot: crate::format::SnapshotEntry| {
                let (offset, entries) = (snapshot.l1_offset, u64::from(snapshot.l1_entries));
                let problem = if !offset.is_aligned_to(geometry.cluster_size()) {
                    Some(format!("its L1 table, at {offset}, is not cluster-aligned"))
                } else if entries * 8 > L1_TABLE_MAX_BYTES {
                    Some(format!(
                        "its L1 table has {entries} entries; expected at most 32 MiB"
                    ))
                } else {
                    None
                };
                if !snapshot.is_complete(header.version) {
                    let extra = snapshot.extra.len();
                    self.note(ClusterUse::SnapshotTable, table_at, Remedy::None, || {
                        format!("snapshot {index} has {extra} bytes of extra data; expected at least 16")
                    });
                }
                if let Some(problem) = problem {
                    let message = || format!("snapshot {index}: {problem}");
                    self.note(ClusterUse::SnapshotTable, table_at, Remedy::None, message);
                } else if entries > 0 {
                    tables.entry((offset.bytes(), entries)).or_default().all += 1;
                }
            };
            match for_each_snapshot(file, header, file_len, each).await {
                Ok(len) => {
                    self.claim(ClusterUse::SnapshotTable, table_at, len, 1, Remedy::None);
                }
                Err(error) => {
                    let message = || error.to_string();
                    match error {
                        SnapshotTableError::Read(_) => {
                            self.note_error(ClusterUse::SnapshotTable, table_at, Remedy::None, message);
                        }
                        _ => self.note(ClusterUse::SnapshotTable, table_at, Remedy::None, message),
                    }
                    // Entries before the damage prove nothing about those after it.
                    tables.retain(|&key, _| key == active);
                }
            }
        }
        self.l1_tables = lay_out(&tables, active);
        self.set_aside(self.l1_tables.capacity() * size_of::<L1Table>());
    }

    /// Stops reporting: the faults are known and are being repaired.
    pub(crate) fn hush(&mut self) {
        self.first = false;
        self.with_on_disk = false;
    }

    /// Returns the first L2 tables, by offset, after `after`; fewer than [`TABLES_MAX`] if these are the last. Faults
    /// of L1 tables are reported when listing begins.
    pub(crate) async fn tables_behind(&mut self, after: Option<u64>) -> BTreeMap<u64, References> {
        let mut tables = BTreeMap::new();
        let l1_tables = std::mem::take(&mut self.l1_tables);
        for table in l1_tables.iter().filter(|table| !table.overlaps) {
            self.walk_l1(*table, after, &mut tables).await;
        }
        self.l1_tables = l1_tables;
        tables
    }

    async fn walk_l1(&mut self, l1: L1Table, after: Option<u64>, tables: &mut BTreeMap<u64, References>) {
        let Subject { file, geometry, .. } = *self.subject;
        let structure = l1.structure;
        let (tell, table_at) = (after.is_none(), HostOffset::new(l1.offset));
        // Its clusters were claimed; missing ones have been reported.
        if !self.ends_in_file(l1.offset, l1.entries * 8) {
            return;
        }
        self.find_missing_part(structure, l1.offset, l1.entries * 8);
        // The last table there is room for; those after it are for the next time.
        let mut largest = u64::MAX;
        if tables.len() == TABLES_MAX {
            largest = tables.last_key_value().map_or(u64::MAX, |(&last, _)| last);
        }
        let each = |index: u64, raw: u64| {
            if raw == 0 {
                return;
            }
            // Most entries of a long list are for another time: the cheapest test comes first.
            let place = raw & OFFSET_MASK;
            let is_listed = after.is_some_and(|after| place <= after);
            let is_too_far = place > largest;
            if (is_listed || is_too_far) && !tell {
                return;
            }
            let entry_at = table_at.bytes() + index * 8;
            let entry = L1Entry::from_raw(raw);
            let table = entry.decode(&geometry);
            if let (Err(error), true) = (&table, tell) {
                self.note(structure, entry_at, Remedy::None, || error.to_string());
            }
            let offset = match table {
                Ok(Some(table)) => table.host.bytes(),
                Err(EntryError::ReservedBits { .. }) => place,
                Ok(None) | Err(_) => 0,
            };
            if offset == 0 || geometry.offset_in_cluster(offset) != 0 {
                return;
            }
            if !self.is_inside(structure, entry_at, offset, geometry.cluster_size(), tell) {
                return;
            }
            if l1.references.active > 0 && tell {
                self.check_copied(structure, entry_at, raw, offset);
            }
            if is_listed || is_too_far {
                return;
            }
            let known: &mut References = tables.entry(offset).or_default();
            known.all = known.all.saturating_add(l1.references.all);
            known.active += l1.references.active;
            if tables.len() > TABLES_MAX {
                tables.pop_last();
            }
            if tables.len() == TABLES_MAX {
                largest = tables.last_key_value().map_or(u64::MAX, |(&last, _)| last);
            }
        };
        let walked = for_each_entry(file, structure, table_at, l1.entries, each).await;
        if let (Err(error), true) = (walked, tell) {
            self.note_error(structure, table_at.bytes(), Remedy::None, || error.to_string());
        }
    }

    async fn walk_l2(&mut self, table_at: u64, references: References) {
        let Subject { file, geometry, .. } = *self.subject;
        self.find_missing_part(ClusterUse::L2Table, table_at, geometry.cluster_size());
        if self.is_in_hole(table_at, geometry.cluster_size()) {
            return;
        }
        let table = match read(
            file,
            ClusterUse::L2Table,
            table_at,
            geometry.cluster_size() as usize,
        )
        .await
        {
            Ok(table) => table,
            Err(error) => {
                self.note_error(ClusterUse::L2Table, table_at, Remedy::None, || error.to_string());
                return;
            }
        };
        let mut next_contiguous = None;
        let entries = L2Table::new(&table, &geometry).iter().enumerate();
        for (index, entry) in entries.filter(|(_, entry)| *entry != L2Entry::UNALLOCATED) {
            let entry_at = table_at + L2Table::offset_of(&geometry, index);
            let mapping = entry.decode(&geometry);
            if let Err(error) = mapping {
                let remedy = match error {
                    EntryError::CompressedCopied { .. } => Remedy::Rebuild,
                    _ => Remedy::None,
                };
                self.note(ClusterUse::L2Table, entry_at, remedy, || error.to_string());
            }
            if let Some(extent) = entry.compressed_extent(&geometry) {
                let (start, len) = (extent.host.bytes(), u64::from(extent.len_max));
                self.count(entry_at, start, len, references.all);
                self.stats.allocated += references.active;
                self.stats.compressed += references.active;
                self.stats.fragmented += references.active;
                continue;
            }
            let host = match mapping {
                Ok(L2Mapping::Data { host, .. } | L2Mapping::Zero { host: Some(host), .. }) => host.bytes(),
                Err(EntryError::ReservedBits { .. } | EntryError::ZeroFlagInVersion2 { .. })
                    if !entry.is_compressed() =>
                {
                    entry.raw() & OFFSET_MASK
                }
                _ => continue,
            };
            if host == 0 || geometry.offset_in_cluster(host) != 0 {
                continue;
            }
            self.stats.allocated += references.active;
            if next_contiguous.is_some_and(|next| next != host) {
                self.stats.fragmented += references.active;
            }
            next_contiguous = host.checked_add(geometry.cluster_size());
            let inside = self.count(entry_at, host, geometry.cluster_size(), references.all);
            if inside && references.active > 0 {
                self.check_copied(ClusterUse::L2Table, entry_at, entry.raw(), host);
            }
        }
    }

    /// Checks an entry's COPIED flag against the refcount of its cluster, if that is in the window.
    fn check_copied(&mut self, structure: ClusterUse, entry_at: u64, raw: u64, host: u64) {
        let cluster = host / self.subject.geometry.cluster_size();
        if !self.with_on_disk || !self.window.contains(&cluster) {
            return;
        }
        let refcount = self.on_disk.get(cluster);
        let copied = L2Entry::from_raw(raw).is_copied();
        if copied != (refcount == 1) {
            self.findings
                .corruption(structure, entry_at, Remedy::Rebuild, || {
                    let state = if copied { "set" } else { "clear" };
                    format!("entry {raw:#018x} has COPIED {state}, but its cluster's refcount is {refcount}")
                });
        }
    }

    async fn walk_bitmaps(&mut self) {
        let Subject {
            file,
            header,
            geometry,
            file_len,
        } = *self.subject;
        let Some(extension) = consistent_bitmaps(header) else {
            return;
        };
        let directory_at = extension.directory_offset.bytes();
        let mut tables = Vec::new();
        let each = |entry_at: u64, entry: BitmapDirectoryEntry| match entry.validate(&geometry) {
            Ok(()) => tables.push((entry.table_offset, u64::from(entry.table_entries))),
            Err(error) => self.note(ClusterUse::BitmapDirectory, entry_at, Remedy::None, || {
                error.to_string()
            }),
        };
        if let Err(error) = for_each_bitmap(file, header, &extension, file_len, each).await {
            self.note(ClusterUse::BitmapDirectory, directory_at, Remedy::None, || {
                error.to_string()
            });
            return;
        }
        let len = extension.directory_size;
        self.claim(ClusterUse::BitmapDirectory, directory_at, len, 1, Remedy::None);
        tables.sort_unstable();
        let mut read_until = 0;
        for (table_at, count) in tables {
            let inside = self.claim(
                ClusterUse::BitmapTable,
                table_at.bytes(),
                count * 8,
                1,
                Remedy::None,
            );
            if !inside || table_at.bytes() < read_until {
                continue;
            }
            read_until = table_at.bytes() + count * 8;
            if self.is_over_budget() {
                return;
            }
            for first in (0..count).step_by(BITMAP_PART as usize) {
                let part_at = HostOffset::new(table_at.bytes() + first * 8);
                self.walk_bitmap_part(part_at, (count - first).min(BITMAP_PART))
                    .await;
            }
        }
    }

    async fn walk_bitmap_part(&mut self, part_at: HostOffset, count: u64) {
        let Subject { file, geometry, .. } = *self.subject;
        let cluster_size = geometry.cluster_size();
        let each = |index: u64, raw: u64| {
            let at = part_at.bytes() + index * 8;
            match BitmapTableEntry::from_raw(raw).decode(&geometry) {
                Ok(BitmapCluster::Data(host)) => {
                    if self.is_inside(ClusterUse::BitmapTable, at, host.bytes(), cluster_size, true) {
                        self.claim(
                            ClusterUse::BitmapData,
                            host.bytes(),
                            cluster_size,
                            1,
                            Remedy::None,
                        );
                    }
                }
                Ok(BitmapCluster::Zeros | BitmapCluster::Ones) => {}
                Err(error) => self.note(ClusterUse::BitmapTable, at, Remedy::None, || error.to_string()),
            }
        };
        let walked = for_each_entry(file, ClusterUse::BitmapTable, part_at, count, each).await;
        if let Err(error) = walked {
            self.note_error(ClusterUse::BitmapTable, part_at.bytes(), Remedy::None, || {
                error.to_string()
            });
        }
    }

    /// Returns true if a range ends in the file. Like QEMU, allows the last cluster of the file to be there only in
    /// part.
    fn ends_in_file(&self, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len);
        end.saturating_sub(self.subject.file_len) < self.subject.geometry.cluster_size()
    }

    /// Returns true if `len` bytes at `offset` are in a hole, and so zeros that need no reading. A hole costs nothing
    /// to make, so it must cost nothing to check. Finding a hole's far end takes long: it is found once.
    pub(crate) fn is_in_hole(&mut self, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len);
        if self.hole.start <= offset && end <= self.hole.end {
            return true;
        }
        let data = self.subject.file.next_data(offset).unwrap_or(u64::MAX);
        if data < end {
            return false;
        }
        self.hole = offset..data;
        true
    }

    /// Finds a table that the file's end cuts off. It reads as zeros from there on, and QEMU finds no fault. But the
    /// clusters it referred to would look leaked, so nothing may be repaired.
    fn find_missing_part(&mut self, structure: ClusterUse, offset: u64, len: u64) {
        let file_len = self.subject.file_len;
        if offset.saturating_add(len) > file_len {
            self.findings.block(structure, offset, || {
                format!("has {len:#x} bytes; the file ends at {file_len:#x}")
            });
        }
    }

    /// Returns true if `len` bytes at `offset` are in the file; reports them otherwise, if `tell` is set.
    fn is_inside(&mut self, structure: ClusterUse, entry_at: u64, offset: u64, len: u64, tell: bool) -> bool {
        let inside = self.ends_in_file(offset, len);
        if !inside && tell {
            let file_len = self.subject.file_len;
            self.note(structure, entry_at, Remedy::None, || {
                format!("refers to {offset:#x} and {len:#x} bytes on; the file ends at {file_len:#x}")
            });
        }
        inside
    }

    /// Counts references from an L2 entry to a range of the file. Returns `false` if the range is not in the file.
    fn count(&mut self, entry_at: u64, offset: u64, len: u64, references: u64) -> bool {
        if !self.is_inside(ClusterUse::L2Table, entry_at, offset, len, true) {
            return false;
        }
        let geometry = self.subject.geometry;
        let max = geometry.refcount_max();
        let last = offset.saturating_add(len.saturating_sub(1));
        let clusters = offset / geometry.cluster_size()..=last / geometry.cluster_size();
        for cluster in clusters {
            if self.is_over_budget() {
                break;
            }
            if !self.expected.add(cluster, references, max) {
                self.findings
                    .corruption(ClusterUse::L2Table, entry_at, Remedy::None, || {
                        format!("cluster {cluster} has more references than a refcount can hold, {max}")
                    });
            }
        }
        true
    }

    /// Counts a range as metadata that nothing else may refer to. Returns `false` if it is not in the file.
    pub(super) fn claim(
        &mut self,
        structure: ClusterUse,
        offset: u64,
        len: u64,
        references: u64,
        remedy: Remedy,
    ) -> bool {
        if len == 0 {
            return false;
        }
        let geometry = self.subject.geometry;
        if !self.ends_in_file(offset, len) {
            let file_len = self.subject.file_len;
            self.note(structure, offset, remedy, || {
                format!("has {len:#x} bytes; the file ends at {file_len:#x}")
            });
            return false;
        }
        let (first, end) = (
            offset / geometry.cluster_size(),
            (offset + len).div_ceil(geometry.cluster_size()),
        );
        let max = geometry.refcount_max();
        for cluster in first.max(self.window.start)..end.min(self.window.end) {
            if self.is_over_budget() {
                break;
            }
            let at = cluster * geometry.cluster_size();
            if !self.expected.add(cluster, references, max) {
                self.findings.corruption(structure, at, Remedy::None, || {
                    format!("has more references than a refcount can hold, {max}")
                });
            }
            let other = self.claims.add(cluster, structure, references);
            if let Some(other) = other {
                let remedy = if other.is_refcounts() {
                    Remedy::Rebuild
                } else {
                    remedy
                };
                self.refcounts_damaged |= remedy == Remedy::Rebuild;
                self.findings
                    .corruption(structure, at, remedy, || format!("is also the {other}"));
            }
        }
        true
    }

    /// Finds metadata that guest data also refers to.
    fn find_shared_metadata(&mut self) {
        let cluster_size = self.subject.geometry.cluster_size();
        for (cluster, structure, claimed) in self.claims.all() {
            if self.expected.get(cluster) > claimed {
                let offset = cluster * cluster_size;
                let remedy = if structure.is_refcounts() {
                    Remedy::Rebuild
                } else {
                    Remedy::None
                };
                self.refcounts_damaged |= remedy == Remedy::Rebuild;
                self.findings.corruption(structure, offset, remedy, || {
                    "guest data also refers to it".into()
                });
            }
        }
    }
}

/// Returns the L1 tables in order, the active one first. Those that overlap it, or one before them, are marked.
fn lay_out(tables: &BTreeMap<(u64, u64), References>, active: (u64, u64)) -> Vec<L1Table> {
    let end = |(offset, entries): (u64, u64)| offset.saturating_add(entries * 8);
    let mut read_until = 0;
    let mut list = Vec::new();
    for (&key, &references) in tables {
        let is_active = references.active > 0;
        let over_active = key.0 < end(active) && active.0 < end(key);
        let overlaps = !is_active && (key.0 < read_until || over_active);
        if !overlaps {
            read_until = read_until.max(end(key));
        }
        let structure = if is_active {
            ClusterUse::L1Table
        } else {
            ClusterUse::SnapshotL1Table
        };
        list.push(L1Table {
            structure,
            offset: key.0,
            entries: key.1,
            references,
            overlaps,
        });
    }
    list.sort_by_key(|table| table.references.active == 0);
    list
}
