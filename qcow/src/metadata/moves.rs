//! Moves of clusters towards the start of the file: guest clusters, L2 tables, the L1 table.
//!
//! A guest cluster moves as it is written to a new place: it is in flight while its bytes are copied, and only then its
//! entry leads to the copy. Only what the disk alone refers to moves.
//!
//! Invariant: from the plan until it is published or abandoned, the guest clusters of a move are in flight, the slice that
//! maps them is pinned, and the new clusters are reserved. No request writes the old ones meanwhile: none was under way
//! when the move was planned, and later ones see that they are in flight.

use std::ops::Range;

use block::IoError;
use block::sync::WaitList;

use super::refcounts::{Stuck, TablePlace};
use super::{Blocked, Dropped, Metadata, corrupt};
use crate::format::{
    ClusterUse, CompressedExtent, GuestCluster, GuestOffset, HostCluster, HostOffset, L1Entry, L2Entry,
    L2Mapping, L2Table, L2TableRef,
};
use crate::invariant::invariant;

/// A move of neighbouring guest clusters to other host clusters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Move {
    /// The first guest cluster.
    pub(crate) guest: GuestCluster,
    /// The number of clusters.
    pub(crate) count: u64,
    /// The old place of the first.
    pub(crate) from: HostOffset,
    /// The new place of the first.
    pub(crate) to: HostOffset,
    /// The guest may see bytes of the clusters: they have to be copied.
    pub(crate) has_data: bool,
    /// The new clusters are known to read as zeros.
    pub(crate) is_zero: bool,
    /// The L2 slice that maps them, pinned.
    slice: u64,
}

/// The result of a look for the next guest clusters to move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Planned {
    /// These are in flight now.
    Move(Move),
    /// None before this one.
    Until(GuestCluster),
    /// There is no room before the bound.
    Full,
}

/// Returns a mapping that leads to the host's bytes at `to` in place of its own.
pub(crate) fn moved(old: L2Mapping, to: HostOffset) -> L2Mapping {
    match old {
        L2Mapping::Data { copied, .. } => L2Mapping::Data { host: to, copied },
        L2Mapping::Zero { copied, .. } => L2Mapping::Zero {
            host: Some(to),
            copied,
        },
        L2Mapping::Subclusters { copied, bitmap, .. } => L2Mapping::Subclusters {
            host: Some(to),
            copied,
            bitmap,
        },
        L2Mapping::Compressed(extent) => L2Mapping::Compressed(CompressedExtent { host: to, ..extent }),
        L2Mapping::Unallocated => old,
    }
}

impl Metadata {
    /// Returns the guest cluster after the last one that the L1 table may map.
    pub(crate) fn mapped_end(&self) -> GuestCluster {
        let slices = self.table_slices(self.l1_entries());
        GuestCluster::new(slices.start << self.slice_bits)
    }

    /// Returns the number of guest clusters that a slice describes.
    fn slice_entries(&self) -> u64 {
        1 << self.slice_bits
    }

    /// Returns the place of an L2 table that is the disk's alone.
    ///
    /// # Errors
    ///
    /// [`Blocked::Failed`] if its L1 entry is damaged.
    pub(crate) fn own_table(&self, l1_index: usize) -> Result<Option<HostCluster>, Blocked> {
        let table = self.l1_entry(l1_index).map_err(corrupt)?;
        let own = table.filter(|table| table.copied);
        Ok(own.map(|table| self.geometry.host_cluster(table.host)))
    }

    /// Calls `each` for the mapped guest clusters that a slice of a table of the disk's own describes, in order.
    ///
    /// # Errors
    ///
    /// [`Blocked::LoadL2`] before any call; [`Blocked::Failed`] for a damaged entry.
    pub(crate) fn for_each_mapped(
        &self,
        slice: u64,
        mut each: impl FnMut(GuestCluster, L2Mapping),
    ) -> Result<(), Blocked> {
        let Some(bytes) = self.l2.get(slice) else {
            // Nothing was mapped there yet.
            return match self.fresh_tables.contains(&self.table_of(slice)) {
                true => Ok(()),
                false => Err(Blocked::LoadL2(slice)),
            };
        };
        let first = self.slice_end(slice).index() - self.slice_entries();
        for (guest, entry) in (first..).zip(L2Table::new(bytes, &self.geometry).iter()) {
            match entry.decode(&self.geometry).map_err(corrupt)? {
                L2Mapping::Unallocated => {}
                mapping => each(GuestCluster::new(guest), mapping),
            }
        }
        Ok(())
    }

    /// Looks for a guest cluster to move from `cluster` on, in its slice. Returns `None` if there is one, and otherwise the
    /// guest cluster to go on from.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if a slice has to be loaded first, or is damaged.
    pub(crate) fn none_to_move_before(
        &self,
        cluster: GuestCluster,
        bound: HostCluster,
    ) -> Result<Option<GuestCluster>, Blocked> {
        let slice = self.slice_of(cluster);
        let l1_index = self.table_of(slice);
        if self.own_table(l1_index)?.is_none() {
            return Ok(Some(self.slice_end(self.table_slices(l1_index).end - 1)));
        }
        let mut found = false;
        self.for_each_mapped(slice, |guest, mapping| {
            found |= guest >= cluster && self.to_move(&mapping, bound).is_some();
        })?;
        Ok((!found).then_some(self.slice_end(slice)))
    }

    /// Returns the host cluster that a mapping owns, if that is to move before `bound`.
    fn to_move(&self, mapping: &L2Mapping, bound: HostCluster) -> Option<HostOffset> {
        let host = mapping.owned()?;
        let is_there = !self.geometry.has_data_file() && self.past_end(mapping).is_none();
        (is_there && self.geometry.host_cluster(host) >= bound).then_some(host)
    }

    /// Plans to move the next guest clusters from `cluster` on that lie from `bound` on: at most `most`, neighbours on the
    /// host as for the guest, in one slice. The caller has seen all requests end since queues were held off.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if something must happen first.
    pub(crate) fn plan_move(
        &mut self,
        cluster: GuestCluster,
        bound: HostCluster,
        most: u64,
    ) -> Result<Planned, Blocked> {
        invariant!(
            self.held_off,
            "a write in place may be under way where guest clusters move"
        );
        let slice = self.slice_of(cluster);
        let l1_index = self.table_of(slice);
        if self.own_table(l1_index)?.is_none() {
            return Ok(Planned::Until(
                self.slice_end(self.table_slices(l1_index).end - 1),
            ));
        }
        self.own_slice(cluster)?;
        for guest in cluster.until(self.slice_end(slice)) {
            let old = self.mapping(slice, guest)?;
            let Some(from) = self.to_move(&old, bound) else {
                continue;
            };
            if let Some(taken) = self.in_flight.find(&self.bytes_of(guest)) {
                return Err(Blocked::InFlight(taken));
            }
            // The flag lies: whoever else refers to the cluster would lose it.
            if self.refcounts.get(self.geometry.host_cluster(from))? != 1 {
                tracing::error!(%from, "a cluster that an entry claims for itself is not counted once");
                return Err(Blocked::Failed(IoError::Corrupt));
            }
            let has_data = !matches!(old, L2Mapping::Zero { .. });
            let count = self.run_to_move(slice, guest, from, has_data, most)?;
            let Some(run) = self.refcounts.allocate_below(count, bound)? else {
                return Ok(Planned::Full);
            };
            let planned = Move {
                guest,
                count: run.count,
                from,
                to: self.geometry.host_offset(run.first),
                has_data,
                is_zero: run.zero && self.holes_are_zeros,
                slice,
            };
            self.in_flight.enter(&self.bytes_moved(&planned));
            self.l2.pin(slice);
            return Ok(Planned::Move(planned));
        }
        Ok(Planned::Until(self.slice_end(slice)))
    }

    /// Returns the number of clusters, `most` at most, that can move together with `guest`, which lies at `from`.
    fn run_to_move(
        &mut self,
        slice: u64,
        guest: GuestCluster,
        from: HostOffset,
        has_data: bool,
        most: u64,
    ) -> Result<u64, Blocked> {
        let mut count = 1;
        let end = self.slice_end(slice);
        while count < most && guest + count < end {
            let next = self.mapping(slice, guest + count)?;
            let host = from + count * self.geometry.cluster_size();
            let is_alike = next.owned() == Some(host)
                && has_data != matches!(next, L2Mapping::Zero { .. })
                && self.past_end(&next).is_none()
                && !self.in_flight.touches(&self.bytes_of(guest + count))
                && self.refcounts.peek(self.geometry.host_cluster(host)) == Some(1);
            if !is_alike {
                break;
            }
            count += 1;
        }
        Ok(count)
    }

    fn bytes_moved(&self, planned: &Move) -> Range<GuestOffset> {
        self.geometry.guest_offset(planned.guest)..self.geometry.guest_offset(planned.guest + planned.count)
    }

    /// Maps guest clusters to the clusters that their bytes were copied to. The old ones are dropped. Returns the waiters
    /// to wake, also on failure; drop the list without the lock.
    ///
    /// # Errors
    ///
    /// If the metadata is not as planned, which is a corruption.
    pub(crate) fn publish_move(&mut self, planned: &Move) -> (WaitList, Result<(), IoError>) {
        let size = self.geometry.cluster_size();
        invariant!(
            self.in_flight.is_entered(&self.bytes_moved(planned)),
            "{planned:?} is not in flight"
        );
        self.l2.unpin(planned.slice);
        let result = (0..planned.count).try_for_each(|index| {
            let guest = planned.guest + index;
            let old = self.mapping(planned.slice, guest)?;
            // Whoever has remapped it meanwhile would be undone.
            invariant!(
                old.owned() == Some(planned.from + index * size),
                "{planned:?} is not as it was planned: {old:?}"
            );
            let new = L2Entry::encode(moved(old, planned.to + index * size), &self.geometry);
            let new = new.ok_or(Blocked::Failed(IoError::Corrupt))?;
            self.set_mapping(planned.slice, guest, new)
        });
        let waiters = self.in_flight.leave(self.bytes_moved(planned).start);
        (waiters, result.map_err(|_| IoError::Corrupt))
    }

    /// Undoes a move that was not published. `is_over`: nothing is written to the new clusters any more. Otherwise they
    /// stay counted, and are leaked. Returns the waiters to wake; drop the list without the lock.
    pub(crate) fn abandon_move(&mut self, planned: &Move, is_over: bool) -> WaitList {
        self.l2.unpin(planned.slice);
        if is_over {
            let first = self.geometry.host_cluster(planned.to);
            let count = planned.count;
            self.drop_clusters(Dropped { first, count }, true);
        }
        self.in_flight.leave(self.bytes_moved(planned).start)
    }

    /// Moves an L2 table of the disk's own before `bound`, if it lies after it: it is written there as a new table is.
    /// Returns false if there is no room.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if something must happen first: all slices of the table have to be in memory.
    pub(crate) fn move_table(&mut self, l1_index: usize, bound: HostCluster) -> Result<bool, Blocked> {
        if self.corrupt {
            return Err(Blocked::Failed(IoError::Corrupt));
        }
        let old = self.own_table(l1_index)?.filter(|&table| table >= bound);
        // A round that writes it to its old place would end that it is new.
        let Some(old) = old.filter(|_| !self.fresh_tables.contains(&l1_index)) else {
            return Ok(true);
        };
        for slice in self.table_slices(l1_index) {
            match self.l2.get_with_state(slice) {
                Some(cached) if cached.checked => {}
                Some(_) => return Err(Blocked::CheckL2(slice)),
                None => return Err(Blocked::LoadL2(slice)),
            }
        }
        let Some(run) = self.refcounts.allocate_below(1, bound)? else {
            return Ok(false);
        };
        // Dirty, they stay in the cache until the table is written whole.
        for slice in self.table_slices(l1_index) {
            self.l2.change(slice);
        }
        self.point_at_table(l1_index, run.first);
        self.drop_clusters(Dropped::one(old), true);
        Ok(true)
    }

    /// Points an L1 entry at a table in host cluster `cluster` that is not on disk yet.
    pub(super) fn point_at_table(&mut self, l1_index: usize, cluster: HostCluster) {
        invariant!(
            self.refcounts.is_given(cluster),
            "the L2 table of L1 entry {l1_index} is made in a cluster in use"
        );
        self.refcounts.uses.made(ClusterUse::L2Table, cluster, 1);
        let entry = L1Entry::encode(L2TableRef {
            host: self.geometry.host_offset(cluster),
            copied: true,
        });
        self.set_l1_entry(l1_index, entry);
        self.fresh_tables.insert(l1_index);
    }

    /// Moves the L1 table before `bound`, if it ends after it. The header records the move at the next FLUSH. Returns false
    /// if there is no room.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn move_l1(&mut self, bound: HostCluster) -> Result<bool, Stuck> {
        let clusters = self.l1_place.clusters;
        if clusters == 0 || self.geometry.host_cluster(self.l1_place.offset) + clusters <= bound {
            return Ok(true);
        }
        let Some(first) = self.refcounts.allocate_run_below(clusters, bound)? else {
            return Ok(false);
        };
        self.refcounts.uses.made(ClusterUse::L1Table, first, clusters);
        let offset = self.geometry.host_offset(first);
        self.l1_moved_from.push(self.l1_place);
        self.l1_place = TablePlace { offset, clusters };
        self.header_dirty = true;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::metadata;
    use super::*;

    /// A round that is under way ends that the table is new, with the table at the place that it had. Had it moved meanwhile,
    /// no round would write it whole before an entry leads to its new place.
    #[test]
    fn new_table_stays_while_a_round_writes_it() {
        let mut metadata = metadata();
        let free = metadata.refcounts.allocate(2).expect("an empty image");
        for slice in metadata.table_slices(0) {
            let first = GuestCluster::new(slice << metadata.slice_bits);
            metadata.own_slice(first).expect("an empty image");
        }
        for cluster in free.first.until(free.first + free.count) {
            metadata.refcounts.give_back(cluster).expect("it is counted");
        }
        let table = |metadata: &Metadata| metadata.own_table(0).expect("an entry").expect("a table");
        let bound = table(&metadata);

        let round = metadata.take_write_back_set();
        let mut written: Vec<HostOffset> = round.new_tables.iter().map(|place| place.0).collect();
        assert!(metadata.move_table(0, bound).expect("it is all in memory"));
        metadata.end_write_back(round, true);
        let next = metadata.take_write_back_set();
        written.extend(next.new_tables.iter().map(|place| place.0));
        let place = metadata.geometry.host_offset(table(&metadata));
        assert!(
            written.contains(&place),
            "no round writes the table whole to {place}"
        );
        metadata.end_write_back(next, true);

        assert!(metadata.move_table(0, bound).expect("it is all in memory"));
        assert!(table(&metadata) < bound, "it moves when it is in the file");
    }
}
