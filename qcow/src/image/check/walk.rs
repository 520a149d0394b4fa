//! The walk over everything that refers to clusters: header, L1 and L2 tables of the disk and of
//! its snapshots, the snapshot table, bitmaps, the encryption header.
//!
//! It counts references, and notices what must not be whatever the refcounts say: entries that do
//! not decode, references behind the end of the file, metadata that something else also refers to.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::super::bitmaps::{consistent_bitmaps, read_directory};
use super::super::counts::CountMap;
use super::super::read::{SnapshotTableError, for_each_entry, read, read_snapshots};
use super::{CheckError, Findings, Remedy, Subject};
use crate::format::l1::{L1_TABLE_MAX_BYTES, OFFSET_MASK};
use crate::format::{BitmapCluster, BitmapTableEntry, EntryError, HostOffset, L1Entry, L2Entry, L2Mapping};

/// How often a table is referred to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct References {
    /// By all L1 tables together.
    pub(crate) all: u64,
    /// By the active L1 table.
    pub(crate) active: u64,
}

/// Guest clusters by kind, over the active L1 table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) allocated: u64,
    pub(crate) compressed: u64,
    pub(crate) fragmented: u64,
}

/// Who uses a cluster of metadata, and how often that may be.
#[derive(Clone, Copy, Debug)]
struct Claim {
    structure: &'static str,
    count: u64,
}

/// The state of a walk.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    pub(crate) subject: &'a Subject<'a>,
    /// How many references each cluster has.
    pub(crate) expected: CountMap,
    pub(crate) findings: Findings,
    pub(crate) stats: Stats,
    /// The L2 tables, by where they start. Filled by [`Self::run`].
    pub(crate) l2_tables: BTreeMap<u64, References>,
    claims: FxHashMap<u64, Claim>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(subject: &'a Subject<'a>) -> Self {
        let mut walk = Self {
            subject,
            expected: CountMap::default(),
            findings: Findings::default(),
            stats: Stats::default(),
            l2_tables: BTreeMap::new(),
            claims: FxHashMap::default(),
        };
        walk.claim("header", 0, subject.geometry.cluster_size(), 1, Remedy::None);
        walk
    }

    /// Walks everything but the refcount structures. With `on_disk`, the refcounts as they are on
    /// disk, COPIED flags are checked against them.
    pub(crate) async fn run(&mut self, on_disk: Option<&CountMap>) -> Result<(), CheckError> {
        let l1_tables = self.list_l1_tables().await?;
        for ((offset, entries), references) in l1_tables {
            let structure = if references.active > 0 {
                "L1 table"
            } else {
                "snapshot's L1 table"
            };
            if self.claim(structure, offset, entries * 8, references.all, Remedy::None) {
                self.walk_l1(structure, HostOffset::new(offset), entries, references, on_disk)
                    .await;
            }
        }
        for (offset, references) in self.l2_tables.clone() {
            if self.claim(
                "L2 table",
                offset,
                self.subject.geometry.cluster_size(),
                references.all,
                Remedy::None,
            ) {
                self.walk_l2(offset, references, on_disk).await;
            }
        }
        if let Some((offset, len)) = self.subject.header.crypto_header() {
            self.claim("encryption header", offset.bytes(), len, 1, Remedy::None);
        }
        self.walk_bitmaps().await?;
        self.find_shared_metadata();
        Ok(())
    }

    /// Every L1 table by place and entries, with how often it is referred to.
    async fn list_l1_tables(&mut self) -> Result<BTreeMap<(u64, u64), References>, CheckError> {
        let Subject {
            file,
            header,
            geometry,
            file_len,
        } = *self.subject;
        let mut tables: BTreeMap<(u64, u64), References> = BTreeMap::new();
        if header.l1_entries > 0 {
            let key = (header.l1_offset.bytes(), u64::from(header.l1_entries));
            tables.insert(key, References { all: 1, active: 1 });
        }
        if header.snapshot_count == 0 {
            return Ok(tables);
        }
        let table_at = header.snapshot_table_offset.bytes();
        let snapshots = match read_snapshots(file, header, file_len).await {
            Ok(snapshots) => snapshots,
            Err(SnapshotTableError::Read(error)) => {
                self.findings
                    .error("snapshot table", table_at, Remedy::None, || error.to_string());
                return Ok(tables);
            }
            Err(error) => {
                self.findings
                    .corruption("snapshot table", table_at, Remedy::None, || error.to_string());
                return Ok(tables);
            }
        };
        self.claim("snapshot table", table_at, snapshots.len, 1, Remedy::None);
        for (index, snapshot) in snapshots.entries.iter().enumerate() {
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
                self.findings
                    .corruption("snapshot table", table_at, Remedy::None, || {
                        format!("snapshot {index} has {extra} bytes of extra data; expected at least 16")
                    });
            }
            if let Some(problem) = problem {
                let message = || format!("snapshot {index}: {problem}");
                self.findings
                    .corruption("snapshot table", table_at, Remedy::None, message);
            } else if entries > 0 {
                tables.entry((offset.bytes(), entries)).or_default().all += 1;
            }
        }
        Ok(tables)
    }

    async fn walk_l1(
        &mut self,
        structure: &'static str,
        table_at: HostOffset,
        entries: u64,
        references: References,
        on_disk: Option<&CountMap>,
    ) {
        let Subject { file, geometry, .. } = *self.subject;
        let each = |index: u64, raw: u64| {
            if raw == 0 {
                return;
            }
            let entry_at = table_at.bytes() + index * 8;
            let entry = L1Entry::from_raw(raw);
            let table = entry.decode(&geometry);
            if let Err(error) = table {
                self.findings
                    .corruption(structure, entry_at, Remedy::None, || error.to_string());
            }
            let offset = match table {
                Ok(Some(table)) => table.host.bytes(),
                Err(EntryError::ReservedBits { .. }) => raw & OFFSET_MASK,
                Ok(None) | Err(_) => 0,
            };
            if offset == 0 || geometry.offset_in_cluster(offset) != 0 {
                return;
            }
            if !self.is_inside(structure, entry_at, offset, geometry.cluster_size()) {
                return;
            }
            if let (Some(counts), 1..) = (on_disk, references.active) {
                self.check_copied(
                    structure,
                    entry_at,
                    raw,
                    counts.get(offset / geometry.cluster_size()),
                );
            }
            let known = self.l2_tables.entry(offset).or_default();
            known.all = known.all.saturating_add(references.all);
            known.active += references.active;
        };
        let walked = for_each_entry(file, "an L1 table", table_at, entries, each).await;
        if let Err(error) = walked {
            self.findings
                .error(structure, table_at.bytes(), Remedy::None, || error.to_string());
        }
    }

    async fn walk_l2(&mut self, table_at: u64, references: References, on_disk: Option<&CountMap>) {
        let Subject { file, geometry, .. } = *self.subject;
        let table = match read(file, "an L2 table", table_at, geometry.cluster_size() as usize).await {
            Ok(table) => table,
            Err(error) => {
                self.findings
                    .error("L2 table", table_at, Remedy::None, || error.to_string());
                return;
            }
        };
        let mut next_contiguous = None;
        for (entry_at, raw) in (table_at..).step_by(8).zip(table.as_chunks::<8>().0) {
            let raw = u64::from_be_bytes(*raw);
            if raw == 0 {
                continue;
            }
            let entry = L2Entry::from_raw(raw);
            let mapping = entry.decode(&geometry);
            if let Err(error) = mapping {
                let remedy = match error {
                    EntryError::CompressedCopied { .. } => Remedy::Rebuild,
                    _ => Remedy::None,
                };
                self.findings
                    .corruption("L2 table", entry_at, remedy, || error.to_string());
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
                    raw & OFFSET_MASK
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
            if let (true, Some(counts), 1..) = (inside, on_disk, references.active) {
                self.check_copied(
                    "L2 table",
                    entry_at,
                    raw,
                    counts.get(host / geometry.cluster_size()),
                );
            }
        }
    }

    fn check_copied(&mut self, structure: &'static str, entry_at: u64, raw: u64, refcount: u64) {
        let copied = L2Entry::from_raw(raw).is_copied();
        if copied != (refcount == 1) {
            self.findings
                .corruption(structure, entry_at, Remedy::Rebuild, || {
                    let state = if copied { "set" } else { "clear" };
                    format!("entry {raw:#018x} has COPIED {state}, but its cluster's refcount is {refcount}")
                });
        }
    }

    async fn walk_bitmaps(&mut self) -> Result<(), CheckError> {
        let Subject {
            file,
            header,
            geometry,
            file_len,
        } = *self.subject;
        let Some(extension) = consistent_bitmaps(header) else {
            return Ok(());
        };
        let directory_at = extension.directory_offset.bytes();
        let entries = match read_directory(file, header, &extension, file_len).await {
            Ok(entries) => entries,
            Err(error) => {
                self.findings
                    .corruption("bitmap directory", directory_at, Remedy::None, || {
                        error.to_string()
                    });
                return Ok(());
            }
        };
        self.claim(
            "bitmap directory",
            directory_at,
            extension.directory_size,
            1,
            Remedy::None,
        );
        for (entry_at, entry) in entries {
            if let Err(error) = entry.validate(&geometry) {
                self.findings
                    .corruption("bitmap directory", entry_at, Remedy::None, || error.to_string());
                continue;
            }
            let (table_at, count) = (entry.table_offset, u64::from(entry.table_entries));
            if !self.claim("bitmap table", table_at.bytes(), count * 8, 1, Remedy::None) {
                continue;
            }
            let mut data = Vec::new();
            let findings = &mut self.findings;
            let each = |index: u64, raw: u64| {
                let at = table_at.bytes() + index * 8;
                match BitmapTableEntry::from_raw(raw).decode(&geometry) {
                    Ok(BitmapCluster::Data(host)) => data.push((at, host)),
                    Ok(BitmapCluster::Zeros | BitmapCluster::Ones) => {}
                    Err(error) => {
                        findings.corruption("bitmap table", at, Remedy::None, || error.to_string());
                    }
                }
            };
            let walked = for_each_entry(file, "a bitmap table", table_at, count, each).await;
            if let Err(error) = walked {
                self.findings
                    .error("bitmap table", table_at.bytes(), Remedy::None, || {
                        error.to_string()
                    });
            }
            for (at, host) in data {
                if self.is_inside("bitmap table", at, host.bytes(), geometry.cluster_size()) {
                    self.claim(
                        "bitmap data",
                        host.bytes(),
                        geometry.cluster_size(),
                        1,
                        Remedy::None,
                    );
                }
            }
        }
        Ok(())
    }

    /// Whether `len` bytes at `offset` are in the file. Like QEMU, allows the last cluster of the
    /// file to be there only in part.
    fn is_inside(&mut self, structure: &'static str, entry_at: u64, offset: u64, len: u64) -> bool {
        let Subject {
            geometry, file_len, ..
        } = *self.subject;
        let end = offset.saturating_add(len);
        if end.saturating_sub(file_len) < geometry.cluster_size() {
            return true;
        }
        self.findings.corruption(structure, entry_at, Remedy::None, || {
            format!("refers to {offset:#x} and {len:#x} bytes on; the file ends at {file_len:#x}")
        });
        false
    }

    /// Counts references from an L2 entry to a range of the file. `false` if it is not there.
    fn count(&mut self, entry_at: u64, offset: u64, len: u64, references: u64) -> bool {
        if !self.is_inside("L2 table", entry_at, offset, len) {
            return false;
        }
        let geometry = self.subject.geometry;
        let max = geometry.refcount_max();
        let last = offset.saturating_add(len.saturating_sub(1));
        let clusters = offset / geometry.cluster_size()..=last / geometry.cluster_size();
        for cluster in clusters {
            if !self.expected.add(cluster, references, max) {
                self.findings.corruption("L2 table", entry_at, Remedy::None, || {
                    format!("cluster {cluster} has more references than a refcount can hold, {max}")
                });
            }
        }
        true
    }

    /// Counts a range as metadata that nothing else may refer to. `false` if it is not in the
    /// file, or something else claimed part of it before.
    pub(crate) fn claim(
        &mut self,
        structure: &'static str,
        offset: u64,
        len: u64,
        references: u64,
        remedy: Remedy,
    ) -> bool {
        if len == 0 {
            return false;
        }
        let geometry = self.subject.geometry;
        let (end, file_len) = (offset.saturating_add(len), self.subject.file_len);
        if end.saturating_sub(file_len) >= geometry.cluster_size() {
            self.findings.corruption(structure, offset, remedy, || {
                format!("has {len:#x} bytes; the file ends at {file_len:#x}")
            });
            return false;
        }
        let mut alone = true;
        for cluster in offset / geometry.cluster_size()..end.div_ceil(geometry.cluster_size()) {
            let at = cluster * geometry.cluster_size();
            if !self.expected.add(cluster, references, geometry.refcount_max()) {
                self.findings.corruption(structure, at, Remedy::None, || {
                    format!(
                        "has more references than a refcount can hold, {}",
                        geometry.refcount_max()
                    )
                });
            }
            match self.claims.get_mut(&cluster) {
                None => {
                    self.claims.insert(
                        cluster,
                        Claim {
                            structure,
                            count: references,
                        },
                    );
                }
                Some(claim) => {
                    let other = claim.structure;
                    claim.count = claim.count.saturating_add(references);
                    alone = false;
                    self.findings
                        .corruption(structure, at, remedy, || format!("is also the {other}"));
                }
            }
        }
        alone
    }

    /// Finds metadata that guest data also refers to.
    fn find_shared_metadata(&mut self) {
        let geometry = self.subject.geometry;
        let mut shared: Vec<_> = (self.claims.iter())
            .filter(|&(&cluster, claim)| self.expected.get(cluster) > claim.count)
            .map(|(&cluster, claim)| (cluster * geometry.cluster_size(), claim.structure))
            .collect();
        shared.sort_unstable();
        for (offset, structure) in shared {
            self.findings.corruption(structure, offset, Remedy::None, || {
                "guest data also refers to it".into()
            });
        }
    }
}
