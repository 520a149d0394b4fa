//! Reads of the tables that refer to clusters: those of the disk, of snapshots and of bitmaps.
//!
//! [`format::references`](crate::format::references) knows the bytes that an entry refers to; this module knows the
//! tables. A check follows all of them ([`Walk`](super::check::Walk)). An image that is opened for writing lists those
//! that its own tables do not lead to ([`guarded_tables`](mod@super::guarded_tables)).
//!
//! Invariant: memory and time are bounded by the constants here, whatever an image claims. Whoever gathers references
//! stops at its bound, or goes on with another list.

use std::collections::BTreeMap;

use block::file::FileView;

use super::read::{ReadError, SnapshotTableError, for_each_entry, for_each_snapshot};
use crate::format::l1::L1_TABLE_MAX_BYTES;
use crate::format::references::Entry;
use crate::format::{ClusterUse, Header, HostOffset, SnapshotEntry};

/// The most L2 tables that a check lists at once. Those after them are listed when these have been checked.
pub(crate) const L2_TABLES_LISTED_MAX: usize = 1 << 18;
/// The most entries of a bitmap table that a check reads between two looks at its memory.
pub(crate) const BITMAP_PART_ENTRIES: u64 = 1 << 15;
/// The most entries of snapshots' L1 tables that are read to guard what they lead to: 8 MiB of them.
pub(crate) const GUARDED_ENTRIES_MAX: u64 = 1 << 20;
/// The most clusters of snapshots' and bitmaps' tables that are guarded.
pub(crate) const GUARDED_CLUSTERS_MAX: u64 = 1 << 20;

/// A table of 8-byte entries in an image.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Table {
    /// The kind of table.
    pub(crate) kind: ClusterUse,
    /// Its offset.
    pub(crate) offset: HostOffset,
    /// The number of its entries.
    pub(crate) entries: u64,
}

impl Table {
    /// Returns the length, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.saturating_mul(8)
    }

    /// Returns the offset after the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.offset.bytes().saturating_add(self.bytes())
    }

    /// Returns the offset of an entry, in bytes.
    pub(crate) fn entry_at(&self, index: u64) -> u64 {
        self.offset.bytes().saturating_add(index.saturating_mul(8))
    }

    /// Returns the part of the table from entry `first` on, `entries` long or up to the end.
    pub(crate) fn part(&self, first: u64, entries: u64) -> Self {
        Self {
            kind: self.kind,
            offset: HostOffset::new(self.entry_at(first)),
            entries: entries.min(self.entries.saturating_sub(first)),
        }
    }
}

/// Calls `each(offset in bytes, entry)` for the entries of `table` that are not zero, in order.
///
/// # Errors
///
/// [`ReadError`]; calls made before it are valid.
pub(crate) async fn for_each_reference<E: Entry>(
    file: &FileView,
    table: Table,
    mut each: impl FnMut(u64, E),
) -> Result<(), ReadError> {
    let each = |index, raw| {
        if raw != 0 {
            each(table.entry_at(index), E::from_raw(raw));
        }
    };
    for_each_entry(file, table.kind, table.offset, table.entries, each).await
}

/// The snapshot table, and the tables that it leads to.
#[derive(Debug, Default)]
pub(crate) struct SnapshotTables {
    /// The length of the snapshot table, in bytes.
    pub(crate) bytes: u64,
    /// The snapshots' L1 tables by offset and number of entries, with the number of snapshots that use each.
    pub(crate) l1: BTreeMap<(u64, u64), u64>,
}

/// Reads the snapshot table. Snapshots whose L1 table breaks the format's rules are left out; `fault` gets the faults
/// of these and others in words.
///
/// # Errors
///
/// [`SnapshotTableError`] if the table cannot be read as a whole: entries before the damage prove nothing about those
/// after it.
pub(crate) async fn snapshot_tables(
    file: &FileView,
    header: &Header,
    file_len: u64,
    mut fault: impl FnMut(String),
) -> Result<SnapshotTables, SnapshotTableError> {
    let mut tables = SnapshotTables::default();
    if header.snapshot_count == 0 {
        return Ok(tables);
    }
    let cluster_size = header.cluster_bits.size();
    let l1 = &mut tables.l1;
    let each = |index: u32, snapshot: SnapshotEntry| {
        if !snapshot.is_complete(header.version) {
            let extra = snapshot.extra.len();
            fault(format!(
                "snapshot {index} has {extra} bytes of extra data; expected at least 16"
            ));
        }
        let (offset, entries) = (snapshot.l1_offset, u64::from(snapshot.l1_entries));
        if !offset.is_aligned_to(cluster_size) {
            fault(format!(
                "snapshot {index}: its L1 table, at {offset}, is not cluster-aligned"
            ));
        } else if entries * 8 > L1_TABLE_MAX_BYTES {
            fault(format!(
                "snapshot {index}: its L1 table has {entries} entries; expected at most 32 MiB"
            ));
        } else if entries > 0 {
            *l1.entry((offset.bytes(), entries)).or_default() += 1;
        }
    };
    tables.bytes = for_each_snapshot(file, header, file_len, each).await?;
    Ok(tables)
}
