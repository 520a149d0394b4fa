//! Moves of bytes that nobody writes in place: clusters that several tables lead to, or tables of snapshots alone, and
//! compressed data.
//!
//! They may be copied at any time, and references may lead to the old place and to the copy side by side. References move
//! one after the other, and the counts follow them.
//!
//! Invariants:
//!
//! - a copy counts as many references as there are to move, durably, before the first leads to it;
//! - the disk's own reference moves first, or none does: as the last one to a cluster at either place it would have to be
//!   COPIED;
//! - a reference that has moved is dropped from the old place once; those that nobody has any more are dropped from the
//!   copy.

use std::collections::BTreeMap;

use super::moves::moved;
use super::refcounts::{Run, Stuck};
use super::{Blocked, Dropped, Metadata, corrupt};
use crate::format::{
    ClusterUse, Geometry, GuestCluster, HostCluster, HostOffset, L1Entry, L2Entry, L2Mapping, L2TableRef,
};
use crate::invariant::invariant;

/// Bytes that an entry leads to: a cluster, or those of compressed data.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct StoredBytes {
    pub(crate) host: HostOffset,
    pub(crate) len: u64,
}

impl StoredBytes {
    /// Returns the bytes that a mapping leads to.
    pub(crate) fn of(mapping: &L2Mapping, geometry: &Geometry) -> Option<Self> {
        match mapping {
            L2Mapping::Compressed(extent) => Some(Self {
                host: extent.host,
                len: u64::from(extent.len_max),
            }),
            _ => Some(Self {
                host: mapping.cluster()?.0,
                len: geometry.cluster_size(),
            }),
        }
    }

    pub(crate) fn of_cluster(cluster: HostCluster, geometry: &Geometry) -> Self {
        Self {
            host: geometry.host_offset(cluster),
            len: geometry.cluster_size(),
        }
    }

    /// Returns the offset after the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.host.bytes().saturating_add(self.len)
    }

    /// Returns the first cluster that the bytes touch, and the number of clusters.
    pub(crate) fn clusters(&self, geometry: &Geometry) -> (HostCluster, u64) {
        let first = geometry.host_cluster(self.host);
        let last = geometry.host_cluster(HostOffset::new(self.end().saturating_sub(1)));
        (first, last.index().saturating_sub(first.index()) + 1)
    }
}

/// Bytes that move, with the references to them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct SharedMove {
    to: HostOffset,
    /// The references that were found, and that the copy counts.
    counted: u64,
    /// The references that lead to the copy.
    moved: u64,
    /// Those of them that were the disk's own: they are dropped from the old place already.
    dropped: u64,
}

/// Bytes that move, by their old places.
#[derive(Debug, Default)]
pub(crate) struct SharedMoves(BTreeMap<StoredBytes, SharedMove>);

impl SharedMoves {
    /// Adds neighbouring clusters from `first` on, whose copies are a run that counts `references` for each.
    pub(crate) fn add_run(&mut self, geometry: &Geometry, first: HostCluster, run: &Run, references: u64) {
        for index in 0..run.count {
            let from = StoredBytes::of_cluster(first + index, geometry);
            self.add(from, geometry.host_offset(run.first + index), references);
        }
    }

    /// Adds bytes whose copy is at `to`.
    pub(crate) fn add(&mut self, from: StoredBytes, to: HostOffset, references: u64) {
        let planned = SharedMove {
            to,
            counted: references,
            moved: 0,
            dropped: 0,
        };
        self.0.insert(from, planned);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains(&self, from: StoredBytes) -> bool {
        self.0.contains_key(&from)
    }

    /// Returns the copy for an entry that is changed to lead to it, and that stands for `references`. `None` if the bytes
    /// do not move, or the copy does not count as many.
    pub(crate) fn lead(&mut self, from: StoredBytes, references: u64) -> Option<HostOffset> {
        let planned = self.0.get_mut(&from)?;
        let moved = planned.moved.checked_add(references)?;
        if moved > planned.counted {
            return None;
        }
        planned.moved = moved;
        Some(planned.to)
    }

    /// As [`SharedMoves::lead`], for the disk's own entry, whose change drops its reference to the old place.
    fn lead_disk(&mut self, from: StoredBytes) -> Option<HostOffset> {
        let to = self.lead(from, 1)?;
        if let Some(planned) = self.0.get_mut(&from) {
            planned.dropped += 1;
        }
        Some(to)
    }
}

impl Metadata {
    /// Returns true if a cluster has `references`, is counted as often, and is part of nothing but one of `structures`.
    ///
    /// # Errors
    ///
    /// [`Stuck`], if its count has to be loaded first.
    pub(crate) fn is_counted(
        &mut self,
        cluster: HostCluster,
        references: u64,
        structures: &[ClusterUse],
    ) -> Result<bool, Stuck> {
        let structure = self.refcounts.uses.find(cluster);
        let is_known = structure.is_none_or(|structure| structures.contains(&structure));
        Ok(is_known && self.refcounts.get(cluster)? == references)
    }

    /// Takes at most `count` clusters before `bound`, each of which counts `references`. `None` without room.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn allocate_shared(
        &mut self,
        count: u64,
        references: u64,
        bound: HostCluster,
    ) -> Result<Option<Run>, Stuck> {
        let Some(run) = self.refcounts.allocate_below(count, bound)? else {
            return Ok(None);
        };
        for cluster in run.first.until(run.first + run.count) {
            // The slice has changed a moment ago, and stays in memory.
            self.refcounts.set(cluster, references)?;
        }
        Ok(Some(run))
    }

    /// Points the entries of the disk's own in a slice at copies. A cluster that a request is remapping does not move.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if something must happen first. Then some may lead there already, and a second call changes the others.
    pub(crate) fn lead_to_copies(&mut self, slice: u64, moves: &mut SharedMoves) -> Result<(), Blocked> {
        let geometry = self.geometry;
        let mut found = Vec::new();
        self.for_each_mapped(slice, |guest: GuestCluster, mapping| {
            if mapping.owned().is_none()
                && let Some(from) = StoredBytes::of(&mapping, &geometry)
                && moves.contains(from)
            {
                found.push((guest, from));
            }
        })?;
        for (guest, from) in found {
            if self.in_flight.touches(&self.bytes_of(guest)) {
                // The request is about to give the old place up.
                self.give_up(from, moves);
                continue;
            }
            self.own_slice(guest)?;
            let old = self.mapping(slice, guest)?;
            let Some(to) = moves.lead_disk(from) else { continue };
            let new = L2Entry::encode(moved(old, to), &geometry);
            let new = new.ok_or(Blocked::Failed(block::IoError::Corrupt))?;
            self.set_mapping(slice, guest, new)?;
        }
        Ok(())
    }

    /// Points an L1 entry of the disk at the copy of the table that it shares with snapshots.
    ///
    /// # Errors
    ///
    /// [`Blocked::Failed`] if the entry is damaged.
    pub(crate) fn lead_to_table(&mut self, l1_index: usize, moves: &mut SharedMoves) -> Result<(), Blocked> {
        let table = self.l1_entry(l1_index).map_err(corrupt)?;
        let Some(table) = table.filter(|table| !table.copied) else {
            return Ok(());
        };
        let from = self.geometry.host_cluster(table.host);
        if let Some(host) = moves.lead_disk(StoredBytes::of_cluster(from, &self.geometry)) {
            self.set_l1_entry(l1_index, L1Entry::encode(L2TableRef { host, copied: false }));
            self.drop_clusters(Dropped::one(from), false);
        }
        Ok(())
    }

    /// Ends a move before any reference has moved.
    fn give_up(&mut self, from: StoredBytes, moves: &mut SharedMoves) {
        if moves.0.get(&from).is_some_and(|planned| planned.moved == 0)
            && let Some(planned) = moves.0.remove(&from)
        {
            let copy = StoredBytes {
                host: planned.to,
                ..from
            };
            self.drop_references(copy, planned.counted, true);
        }
    }

    /// Drops the copies, to which nothing leads and nothing is written any more.
    pub(crate) fn abandon_shared(&mut self, moves: SharedMoves) {
        let none_moved = moves.0.values().all(|planned| planned.moved == 0);
        invariant!(none_moved, "copies are dropped that entries lead to");
        self.end_shared(moves);
    }

    /// Drops the references that have left the old places, and those that none came for from the copies. The entries that
    /// are not in memory are in the file.
    pub(crate) fn end_shared(&mut self, moves: SharedMoves) {
        for (from, planned) in moves.0 {
            let copy = StoredBytes {
                host: planned.to,
                ..from
            };
            let is_sole = planned.moved == planned.counted;
            self.drop_references(from, planned.moved - planned.dropped, is_sole);
            self.drop_references(copy, planned.counted - planned.moved, planned.moved == 0);
        }
    }

    /// Drops references to the clusters of some bytes. `is_sole`: these have no others.
    fn drop_references(&mut self, bytes: StoredBytes, references: u64, is_sole: bool) {
        // Compressed data shares its clusters.
        let is_cluster = bytes.host.is_aligned_to(self.geometry.cluster_size())
            && bytes.len == self.geometry.cluster_size();
        let (first, count) = bytes.clusters(&self.geometry);
        for index in 0..references {
            self.drop_clusters(Dropped { first, count }, is_sole && is_cluster && index == 0);
        }
    }
}
