//! Foreign tables: the L2 tables that snapshots' L1 tables lead to. The disk may share them.
//!
//! A cluster that snapshots and the disk share has one guest offset in all of them. So whatever leads to it is in the L2
//! tables of one L1 index, and nobody has to search the others for it. What is counted more often than these tables lead to
//! it stays where it is.
//!
//! Invariant: memory is bounded by [`WINDOW_ENTRIES`] and [`TABLES_BYTES`], whatever an image claims. The caller has the
//! turn to change the image as a whole: no snapshot is made or deleted meanwhile.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use block::{AlignedBuf, IoError};

use super::CompactError;
use crate::engine::Queue;
use crate::engine::switch::read_clusters;
use crate::format::{ClusterUse, HostCluster, HostOffset, L1Entry};
use crate::image::references::{Table, snapshot_tables};

/// The most entries of L1 tables that are looked at together.
const WINDOW_ENTRIES: usize = 1 << 16;
/// The most L1 indices that are looked at together.
const WINDOW_MAX: usize = 4096;
/// The most bytes of L2 tables that are read at once.
const TABLES_BYTES: u64 = 2 << 20;

/// The L1 tables of the image's snapshots.
#[derive(Debug)]
pub(super) struct SnapshotL1s {
    /// Each table, with the number of snapshots that use it.
    tables: Vec<(Table, u64)>,
}

/// The foreign tables of some L1 indices.
#[derive(Debug)]
pub(super) struct Foreign {
    pub(super) indices: Range<usize>,
    /// L1 index and L2 table → the number of snapshots that lead from one to the other.
    tables: BTreeMap<(usize, HostCluster), u64>,
}

impl SnapshotL1s {
    pub(super) async fn read(queue: &Queue) -> Result<Self, CompactError> {
        let header = queue.shared.header.decode()?;
        let file_len = queue.file.len()?;
        let found = snapshot_tables(&queue.file, &header, file_len, |_| ()).await?;
        let tables = found.l1.into_iter();
        let tables = tables.filter(|((offset, _), _)| (1..file_len).contains(offset));
        let tables = tables.map(|((offset, entries), uses)| {
            let table = Table {
                kind: ClusterUse::SnapshotL1Table,
                offset: HostOffset::new(offset),
                entries,
            };
            (table, uses)
        });
        Ok(Self {
            tables: tables.collect(),
        })
    }

    /// Returns the tables, each with the number of snapshots that use it.
    pub(super) fn tables(&self) -> impl Iterator<Item = (Table, u64)> {
        self.tables.iter().copied()
    }

    /// Returns the L1 index after the last one that a snapshot has.
    pub(super) fn end(&self) -> usize {
        let entries = self.tables.iter().map(|(table, _)| table.entries);
        entries.max().unwrap_or(0) as usize
    }

    /// Returns the foreign tables of some L1 indices from `first` on, before `end`; `None` if there are none.
    pub(super) async fn foreign(
        &self,
        queue: &Queue,
        first: usize,
        end: usize,
    ) -> Result<Option<Foreign>, IoError> {
        if first >= end {
            return Ok(None);
        }
        let most = (WINDOW_ENTRIES / self.tables.len().max(1)).clamp(1, WINDOW_MAX);
        let indices = first..end.min(first + most);
        let mut tables: BTreeMap<(usize, HostCluster), u64> = BTreeMap::new();
        for &(table, uses) in &self.tables {
            let part = table.part(first as u64, indices.len() as u64);
            if part.entries == 0 {
                continue;
            }
            let bytes = queue.file.read_at(part.offset.bytes(), part.bytes() as usize);
            let bytes = bytes.await?;
            for (index, raw) in indices.clone().zip(bytes.as_chunks::<8>().0) {
                let entry = L1Entry::from_raw(u64::from_be_bytes(*raw));
                // What a damaged entry leads to stays where it is: it is counted once more than it is found.
                if let Ok(Some(found)) = entry.decode(&queue.shared.geometry) {
                    let found = queue.shared.geometry.host_cluster(found.host);
                    *tables.entry((index, found)).or_default() += uses;
                }
            }
        }
        Ok(Some(Foreign { indices, tables }))
    }
}

impl Foreign {
    /// Returns the foreign tables of an L1 index, each with the number of L1 entries that lead to it, with the disk's own.
    pub(super) fn at(&self, queue: &Queue, index: usize) -> Result<Vec<(HostCluster, u64)>, IoError> {
        let shown = shown(queue, index)?;
        let own = queue.metadata()?.own_table(index).ok().flatten();
        let tables = self
            .tables
            .range((index, HostCluster::new(0))..(index + 1, HostCluster::new(0)));
        // A table that the disk claims for itself changes in its cache: what it leads to stays.
        let tables = tables.filter(|((_, table), _)| own != Some(*table));
        let tables = tables.map(|(&(_, table), uses)| (table, uses + u64::from(shown == Some(table))));
        Ok(tables.collect())
    }
}

/// Returns the table that the disk shares with snapshots at an L1 index.
pub(super) fn shown(queue: &Queue, index: usize) -> Result<Option<HostCluster>, IoError> {
    let table = queue.metadata()?.l1_entry(index);
    let table = table.map_err(|_| IoError::Corrupt)?;
    let shared = table.filter(|table| !table.copied);
    Ok(shared.map(|table| queue.shared.geometry.host_cluster(table.host)))
}

/// Calls `each` with the bytes of L2 tables, in order.
pub(super) async fn for_each_table(
    queue: &Rc<Queue>,
    tables: &[(HostCluster, u64)],
    mut each: impl FnMut((HostCluster, u64), &AlignedBuf),
) -> Result<(), IoError> {
    let geometry = queue.shared.geometry;
    let at_once = (TABLES_BYTES / geometry.cluster_size()).clamp(1, 64) as usize;
    for some in tables.chunks(at_once) {
        let places = some.iter().map(|table| geometry.host_offset(table.0));
        let places: Vec<HostOffset> = places.collect();
        let bytes = read_clusters(queue, &places).await?;
        for (&table, bytes) in some.iter().zip(&bytes) {
            each(table, bytes);
        }
    }
    Ok(())
}
