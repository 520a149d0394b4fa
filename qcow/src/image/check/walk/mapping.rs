//! L1 and L2 tables, of the disk and of its snapshots.

use std::collections::BTreeMap;

use super::{L1Table, References, Walk};
use crate::format::l1::{L1_ENTRY_SIZE, OFFSET_MASK};
use crate::format::references::Entry;
use crate::format::{ClusterUse, EntryError, GuestCluster, HostOffset, L1Entry, L2Entry, L2Table};
use crate::image::check::{Remedy, Subject};
use crate::image::read::{SnapshotTableError, read};
use crate::image::references::{L2_TABLES_LISTED_MAX, Table, for_each_reference, snapshot_tables};

/// The memory of a list of L2 tables for each, in bytes: the nodes of the tree are half full.
const TABLE_LISTED_BYTES: usize = 2 * size_of::<(u64, References)>();

impl Walk<'_> {
    /// Finds every L1 table and its number of references.
    pub(super) async fn list_l1_tables(&mut self) {
        let Subject {
            file,
            header,
            file_len,
            ..
        } = *self.subject;
        let mut tables: BTreeMap<(u64, u64), References> = BTreeMap::new();
        let active = (header.l1_offset.bytes(), u64::from(header.l1_entries));
        if active.1 > 0 {
            let references = References {
                all: 1,
                active: 1,
                l1_index: 0,
            };
            tables.insert(active, references);
        }
        let (structure, table_at) = (ClusterUse::SnapshotTable, header.snapshot_table_offset.bytes());
        let fault = |message| self.report(structure, table_at, Remedy::None, || message);
        match snapshot_tables(file, header, file_len, fault).await {
            Ok(found) => {
                self.claim(structure, table_at, found.bytes, 1, Remedy::None);
                for (place, snapshots) in found.l1 {
                    tables.entry(place).or_default().all += snapshots;
                }
            }
            Err(error) => {
                let message = || error.to_string();
                match error {
                    SnapshotTableError::Read(_) => {
                        self.report_unreadable(structure, table_at, Remedy::None, message);
                    }
                    _ => self.report(structure, table_at, Remedy::None, message),
                }
            }
        }
        self.l1_tables = lay_out(&tables, active);
        self.set_aside(self.l1_tables.capacity() * size_of::<L1Table>());
    }

    /// Walks the L2 tables.
    pub(super) async fn walk_tables(&mut self) {
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
            if tables.len() < L2_TABLES_LISTED_MAX {
                return;
            }
        }
    }

    /// Returns the first L2 tables, by offset, after `after`; fewer than [`L2_TABLES_LISTED_MAX`] if these are the
    /// last. Faults of L1 tables are reported when listing begins.
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
        let L1Table {
            table, references, ..
        } = l1;
        let report = after.is_none();
        // Its clusters were claimed; missing ones have been reported.
        if !self.ends_in_file(table.offset.bytes(), table.bytes()) {
            return;
        }
        self.find_missing_part(table.kind, table.offset.bytes(), table.bytes());
        // The last table there is room for; those after it are for the next time.
        let mut largest = u64::MAX;
        if tables.len() == L2_TABLES_LISTED_MAX {
            largest = tables.last_key_value().map_or(u64::MAX, |(&last, _)| last);
        }
        let each = |entry_at: u64, entry: L1Entry| {
            // Most entries of a long list are for another time: the cheapest test comes first.
            let place = entry.raw() & OFFSET_MASK;
            let is_listed = after.is_some_and(|after| place <= after);
            let is_too_far = place > largest;
            if (is_listed || is_too_far) && !report {
                return;
            }
            let referred = entry.referred(&geometry);
            if let (Some(error), true) = (referred.fault, report) {
                self.report(table.kind, entry_at, Remedy::None, || error.to_string());
            }
            let Some(l2) = referred.reference else {
                return;
            };
            let offset = l2.host.bytes();
            if !self.is_inside(table.kind, entry_at, offset, l2.len, report) {
                return;
            }
            if references.active > 0 && report {
                self.check_copied(table.kind, entry_at, entry.raw(), l2.host);
            }
            if is_listed || is_too_far {
                return;
            }
            let known: &mut References = tables.entry(offset).or_default();
            known.all = known.all.saturating_add(references.all);
            known.active += references.active;
            known.l1_index = (entry_at - table.offset.bytes()) / L1_ENTRY_SIZE;
            if tables.len() > L2_TABLES_LISTED_MAX {
                tables.pop_last();
            }
            if tables.len() == L2_TABLES_LISTED_MAX {
                largest = tables.last_key_value().map_or(u64::MAX, |(&last, _)| last);
            }
        };
        let walked = for_each_reference(file, table, each).await;
        if let (Err(error), true) = (walked, report) {
            self.report_unreadable(table.kind, table.offset.bytes(), Remedy::None, || {
                error.to_string()
            });
        }
    }

    async fn walk_l2(&mut self, table_at: u64, references: References) {
        let Subject { file, geometry, .. } = *self.subject;
        let structure = ClusterUse::L2Table;
        self.find_missing_part(structure, table_at, geometry.cluster_size());
        if self.is_in_hole(table_at, geometry.cluster_size()) {
            return;
        }
        let table = match read(file, structure, table_at, geometry.cluster_size() as usize).await {
            Ok(table) => table,
            Err(error) => {
                self.report_unreadable(structure, table_at, Remedy::None, || error.to_string());
                return;
            }
        };
        let mut next_contiguous = None;
        let entries = L2Table::new(&table, &geometry).iter().enumerate();
        for (index, entry) in entries.filter(|(_, entry)| *entry != L2Entry::UNALLOCATED) {
            let entry_at = table_at + L2Table::offset_of(&geometry, index);
            let referred = entry.referred(&geometry);
            if let Some(error) = referred.fault {
                let remedy = match error {
                    EntryError::CompressedCopied { .. } => Remedy::Rebuild,
                    _ => Remedy::None,
                };
                self.report(structure, entry_at, remedy, || error.to_string());
            }
            let bitmap = entry.bitmap().raw();
            if entry.is_compressed() && bitmap != 0 {
                self.report(structure, entry_at, Remedy::Rebuild, || {
                    format!(
                        "entry {:#018x} is compressed and has the subcluster bitmap {bitmap:#018x}; expected none",
                        entry.raw()
                    )
                });
            }
            if geometry.has_data_file() {
                let first = references.l1_index.saturating_mul(geometry.l2_entries() as u64);
                let guest = GuestCluster::new(first.saturating_add(index as u64));
                self.check_place(entry_at, entry, guest);
                continue;
            }
            let Some(data) = referred.reference else {
                continue;
            };
            self.stats.allocated += references.active;
            if entry.is_compressed() {
                self.count(entry_at, data, references.all);
                self.stats.compressed += references.active;
                self.stats.fragmented += references.active;
                continue;
            }
            let host = data.host.bytes();
            if next_contiguous.is_some_and(|next| next != host) {
                self.stats.fragmented += references.active;
            }
            next_contiguous = host.checked_add(data.len);
            let inside = self.count(entry_at, data, references.all);
            if inside && references.active > 0 {
                self.check_copied(structure, entry_at, entry.raw(), data.host);
            }
        }
    }

    /// Checks the entry of a guest cluster in an image with a data file: it has its own place there, and for itself.
    fn check_place(&mut self, entry_at: u64, entry: L2Entry, guest: GuestCluster) {
        let geometry = self.subject.geometry;
        let mapping = entry.decode(&geometry).ok();
        let Some((host, copied)) = mapping.and_then(|mapping| mapping.cluster()) else {
            return;
        };
        self.stats.allocated += 1;
        let (structure, own) = (ClusterUse::L2Table, geometry.data_file_offset(guest));
        if host != own {
            self.report(structure, entry_at, Remedy::None, || {
                format!("leads to {host} in the data file; expected {own}, the guest cluster's own place")
            });
        } else if !copied {
            let raw = entry.raw();
            self.report(structure, entry_at, Remedy::Rebuild, || {
                format!("entry {raw:#018x} has COPIED clear; expected it set in an image with a data file")
            });
        }
    }

    /// Checks an entry's COPIED flag against the refcount of its cluster, if that is in the window.
    fn check_copied(&mut self, structure: ClusterUse, entry_at: u64, raw: u64, host: HostOffset) {
        let cluster = self.subject.geometry.host_cluster(host).index();
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
}

/// Returns the L1 tables in order, the active one first. Those that overlap it, or one before them, are marked.
fn lay_out(tables: &BTreeMap<(u64, u64), References>, active: (u64, u64)) -> Vec<L1Table> {
    let table = |kind: ClusterUse, (offset, entries): (u64, u64)| Table {
        kind,
        offset: HostOffset::new(offset),
        entries,
    };
    let active = table(ClusterUse::L1Table, active);
    let mut read_until = 0;
    let mut list = Vec::new();
    for (&place, &references) in tables {
        let is_active = references.active > 0;
        let table = if is_active {
            active
        } else {
            table(ClusterUse::SnapshotL1Table, place)
        };
        let over_active = place.0 < active.end() && active.offset.bytes() < table.end();
        let overlaps = !is_active && (place.0 < read_until || over_active);
        if !overlaps {
            read_until = read_until.max(table.end());
        }
        list.push(L1Table {
            table,
            references,
            overlaps,
        });
    }
    list.sort_by_key(|table| table.references.active == 0);
    list
}
