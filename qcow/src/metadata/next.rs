//! The next state of an image's metadata, built beside the one in use, while an operation runs alone.
//!
//! Everything that the next state changes lies in clusters that are free in the state in use: new L2 tables, a new L1
//! table, new refcount blocks, a new refcount table. So a single write of the header switches between them: a crash
//! before it leaves the old state as it was, and a crash after it the new one, with the old tables leaked. If the
//! operation fails, the next state is dropped, and the one in use goes on.

use super::refcounts::{NO_LIMIT, Refcounts, Stuck, TablePlace};
use super::released::Released;
use super::slices::{Before, SliceCache};
use super::{Dropped, Drops, Metadata, Returning};
use crate::format::l1::L1_ENTRY_SIZE;
use crate::format::{ClusterUse, HostCluster, HostOffset, L1Entry, RefcountTableEntry};
use crate::invariant::invariant;

/// The most bytes of refcount blocks whose counts an operation may follow references to; it keeps them in memory. They
/// count 16 TiB of 64 KiB clusters with 16 bits each.
pub(crate) const COUNTS_BYTES_MAX: u64 = 512 << 20;

/// The progress of [`Refcounts::relocate`], which is called again when counts that it lacked are loaded. Without it each
/// call would look for changed blocks from the start.
#[derive(Debug, Default)]
pub(crate) struct Relocation {
    /// Blocks that have changed and perhaps not moved, by table index.
    changed: Vec<usize>,
    /// True if every changed block has moved.
    is_settled: bool,
    /// The number of dirty slices looked at.
    #[cfg(test)]
    pub(super) looked_at: usize,
}

/// The result of a change of the counts of neighbouring clusters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Counted {
    /// The counts of all clusters before this one have changed.
    Until(HostCluster),
    /// This cluster has the largest count that the image can hold.
    Full(HostCluster),
    /// This cluster is in use and counts zero.
    Uncounted(HostCluster),
    /// This cluster has more references than it counts.
    Undercounted(HostCluster),
    /// Up to this cluster so many were released, in so many places, that no more can be.
    Scattered(HostCluster),
    /// This cluster lost a reference and is part of a structure that must not be freed.
    Structure(HostCluster, ClusterUse),
}

impl Metadata {
    /// Returns the next state, as yet with the tables of this one. Nothing is dirty or in flight. From now on this state
    /// takes no free cluster to be zeros: the operation may write to it and fail.
    pub(crate) fn next(&mut self) -> Self {
        invariant!(
            self.held_off && self.is_clean(),
            "metadata is changing while its next state is made"
        );
        let refcounts = self.refcounts.next();
        self.with(refcounts)
    }

    /// Returns this state once more, to follow its references while this one goes on. No cluster may be taken in it.
    pub(crate) fn beside(&self) -> Self {
        self.with(self.refcounts.beside())
    }

    fn with(&self, refcounts: Refcounts) -> Self {
        Self {
            geometry: self.geometry,
            l1: self.l1.clone(),
            l1_place: self.l1_place,
            l1_moved_from: Vec::new(),
            header_dirty: false,
            size_bytes: self.size_bytes,
            l1_dirty_parts: Default::default(),
            fresh_tables: Default::default(),
            l2: self.l2.emptied(),
            refcounts,
            corrupt: self.corrupt,
            slice_bits: self.slice_bits,
            holes_are_zeros: self.holes_are_zeros,
            covered_bytes: self.covered_bytes,
            in_flight: Default::default(),
            copying: Default::default(),
            drops: Drops::default(),
            returning: Returning::default(),
            bitmaps: self.bitmaps.clone(),
            held_off: true,
            flushing: false,
        }
    }

    /// Keeps tables that change from now on as they are now, until [`Metadata::end_watch`].
    pub(crate) fn watch(&mut self) {
        invariant!(
            self.held_off && self.is_clean(),
            "metadata is changing when it begins to be watched"
        );
        self.l2.watch();
        self.refcounts.slices.watch();
    }

    /// Ends the watch, if there is one. Returns the slices of L2 tables, and of refcounts, that have changed, as they were.
    pub(crate) fn end_watch(&mut self) -> (Before, Before) {
        (self.l2.end_watch(), self.refcounts.slices.end_watch())
    }

    /// Returns the L1 table.
    pub(crate) fn l1(&self) -> &[L1Entry] {
        &self.l1
    }

    /// Replaces the L1 table by another, in a new place. Returns the old place.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn replace_l1(&mut self, l1: &[L1Entry]) -> Result<TablePlace, Stuck> {
        let clusters = self.geometry.clusters_for(l1.len() as u64 * L1_ENTRY_SIZE);
        let first = self.refcounts.allocate_run(clusters)?;
        self.refcounts.uses.made(ClusterUse::L1Table, first, clusters);
        self.l1 = l1.to_vec();
        let place = TablePlace {
            offset: self.geometry.host_offset(first),
            clusters,
        };
        Ok(std::mem::replace(&mut self.l1_place, place))
    }

    /// Returns the bytes of the L1 table, as they are on disk.
    pub(crate) fn l1_bytes(&self) -> Vec<u8> {
        self.l1
            .iter()
            .flat_map(|entry| entry.raw().to_be_bytes())
            .collect()
    }
}

impl Refcounts {
    pub(super) fn next(&mut self) -> Self {
        let next = self.beside();
        self.virgin = NO_LIMIT;
        self.free.forget_zeros();
        next
    }

    fn beside(&self) -> Self {
        Self {
            geometry: self.geometry,
            table: self.table.clone(),
            place: self.place,
            moved_from: Vec::new(),
            dirty_parts: Default::default(),
            fresh: Default::default(),
            // What is loaded stays in memory: looked up in any order, it would be read again and again. The operation
            // bounds what it loads.
            slices: SliceCache::new(self.slices.slice_bytes(), u64::MAX),
            uses: self.uses.clone(),
            slice_bits: self.slice_bits,
            cursor: self.cursor,
            virgin: self.virgin,
            searches: Default::default(),
            limit: self.limit,
            free: self.free.clone(),
            end: self.end,
            reserved: self.reserved,
            reserving: self.reserving,
            preferred: self.preferred,
            traffic: self.traffic,
        }
    }

    /// Changes the counts from `first` up to `end`, as far as they are in one slice. `change` gets a cluster and its
    /// count, and returns the new one.
    fn change(
        &mut self,
        first: HostCluster,
        end: HostCluster,
        mut change: impl FnMut(&super::cluster_use::UseMap, HostCluster, u64) -> Result<u64, Counted>,
    ) -> Result<Counted, Stuck> {
        // Loads the slice, unless there is no block.
        if self.get(first)? == 0 {
            return Ok(Counted::Uncounted(first));
        }
        let slice = self.slice_of(first);
        let until = end.min(self.slice_start(slice + 1));
        let order = self.geometry.refcount_order();
        let bytes = self.slices.get_mut(slice).ok_or(block::IoError::Corrupt)?;
        for (index, cluster) in (first.index() & ((1 << self.slice_bits) - 1)..).zip(first.until(until)) {
            let index = index as usize;
            let counted = match order.read(bytes, index) {
                None | Some(0) => Err(Counted::Uncounted(cluster)),
                Some(count) => change(&self.uses, cluster, count),
            };
            let stored = counted.map(|count| order.write(bytes, index, count));
            match stored {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Ok(Counted::Full(cluster)),
                Err(stop) => return Ok(stop),
            }
        }
        Ok(Counted::Until(until))
    }

    /// Counts one more reference to each cluster from `first` up to `end`, as far as their counts are in one slice.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn raise(&mut self, first: HostCluster, end: HostCluster) -> Result<Counted, Stuck> {
        let max = self.geometry.refcount_order().max();
        self.change(first, end, |_, cluster, count| {
            if count == max {
                Err(Counted::Full(cluster))
            } else {
                Ok(count + 1)
            }
        })
    }

    /// Undoes one [`Refcounts::raise`] of each cluster from `first` up to `end`, as far as their counts are in one slice.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn undo_raise(&mut self, first: HostCluster, end: HostCluster) -> Result<Counted, Stuck> {
        self.change(first, end, |_, cluster, count| match count {
            0 | 1 => Err(Counted::Undercounted(cluster)),
            _ => Ok(count - 1),
        })
    }

    /// Adds to the counts of a slice, which is in memory, what was added to them elsewhere, where they were `before` (zeros, if there is
    /// none) and are `now`. A cluster that is counted there and would not be here keeps a count of 1 and is added to `released`.
    ///
    /// # Errors
    ///
    /// [`block::IoError::Corrupt`] if a count does not fit.
    pub(crate) fn add_difference(
        &mut self,
        slice: u64,
        before: Option<&[u8]>,
        now: &[u8],
        released: &mut Released,
    ) -> Result<(), block::IoError> {
        let order = self.geometry.refcount_order();
        let first = self.slice_start(slice);
        let bytes = self.slices.get_mut(slice).ok_or(block::IoError::Corrupt)?;
        for index in 0..1 << self.slice_bits {
            let was = before.map_or(Some(0), |before| order.read(before, index));
            let (Some(was), Some(is), Some(count)) = (was, order.read(now, index), order.read(bytes, index))
            else {
                return Err(block::IoError::Corrupt);
            };
            if was == is {
                continue;
            }
            let mut count = (count + is).checked_sub(was).ok_or(block::IoError::Corrupt)?;
            if count == 0 && is > 0 {
                released.insert(first + index as u64);
                count = 1;
            }
            order
                .write(bytes, index, count)
                .map_err(|_| block::IoError::Corrupt)?;
        }
        Ok(())
    }

    /// Points the table at a block's new place. Returns the old place.
    ///
    /// # Errors
    ///
    /// [`block::IoError::Corrupt`] if there is no such block.
    pub(crate) fn replace_block(
        &mut self,
        index: usize,
        to: HostOffset,
    ) -> Result<HostOffset, block::IoError> {
        let old = self.block_offset(index)?.ok_or(block::IoError::Corrupt)?;
        let entry = self.table.get_mut(index).ok_or(block::IoError::Corrupt)?;
        *entry = RefcountTableEntry::encode(to);
        Ok(old)
    }

    /// Counts one reference less to each cluster from `first` up to `end`, as far as their counts are in one slice. A
    /// cluster that loses its last one keeps its count and is added to `released`. `known` tells if such a cluster may
    /// be this structure.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn release_references(
        &mut self,
        first: HostCluster,
        end: HostCluster,
        known: impl Fn(ClusterUse) -> bool,
        released: &mut Released,
    ) -> Result<Counted, Stuck> {
        self.change(first, end, |uses, cluster, count| {
            if let Some(structure) = uses.find(cluster)
                && !known(structure)
            {
                return Err(Counted::Structure(cluster, structure));
            }
            if count > 1 {
                return Ok(count - 1);
            }
            if !released.insert(cluster) {
                return Err(Counted::Undercounted(cluster));
            }
            if released.is_full() {
                return Err(Counted::Scattered(cluster));
            }
            Ok(1)
        })
    }

    /// Gives each refcount block that has changed, and the refcount table, a new place. Adds the old places to `left`.
    ///
    /// # Errors
    ///
    /// [`Stuck`]; then the call may be repeated with the same `relocation`.
    pub(crate) fn relocate(
        &mut self,
        relocation: &mut Relocation,
        left: &mut Vec<Dropped>,
    ) -> Result<(), Stuck> {
        loop {
            if !relocation.is_settled {
                self.relocate_blocks(relocation, left)?;
                relocation.is_settled = true;
            }
            if !self.moved_from.is_empty() {
                return Ok(());
            }
            // The counts of its new clusters change blocks in turn.
            let clusters = self.place.clusters;
            let first = self.allocate_run(clusters)?;
            relocation.is_settled = false;
            if !self.moved_from.is_empty() {
                // It has become longer, and has moved with that.
                for cluster in first.until(first + clusters) {
                    self.give_back(cluster)?;
                }
                continue;
            }
            self.uses.made(ClusterUse::RefcountTable, first, clusters);
            let offset = self.geometry.host_offset(first);
            let place = TablePlace { offset, clusters };
            self.moved_from.push(std::mem::replace(&mut self.place, place));
        }
    }

    fn relocate_blocks(&mut self, relocation: &mut Relocation, left: &mut Vec<Dropped>) -> Result<(), Stuck> {
        loop {
            let Some(&index) = relocation.changed.last() else {
                relocation.changed = self.changed_blocks();
                #[cfg(test)]
                {
                    relocation.looked_at += self.slices.dirty_count();
                }
                if relocation.changed.is_empty() {
                    return Ok(());
                }
                continue;
            };
            if self.fresh.contains(&index) {
                relocation.changed.pop();
                continue;
            }
            for slice in self.block_slices(index) {
                // Dirty, it stays in the cache until the block is written whole.
                if self.slices.get_mut(slice).is_none() {
                    return Err(Stuck::Load(slice));
                }
            }
            let new = self.allocate(1)?.first;
            let old = self.replace_block(index, self.geometry.host_offset(new))?;
            self.fresh.insert(index);
            self.uses.made(ClusterUse::RefcountBlock, new, 1);
            left.push(Dropped::one(self.geometry.host_cluster(old)));
            // The block that counts it has changed in turn.
            relocation.changed.push(self.block_of(self.slice_of(new)));
        }
    }

    /// Returns the table indices of the blocks that have changed and are in their old places.
    pub(crate) fn changed_blocks(&self) -> Vec<usize> {
        let dirty = self.slices.dirty_keys().map(|slice| self.block_of(slice));
        let mut changed: Vec<usize> = dirty.filter(|index| !self.fresh.contains(index)).collect();
        changed.sort_unstable();
        changed.dedup();
        changed
    }

    /// Adds the counts of block `index`, as they are on disk, but for those that are in memory.
    pub(crate) fn insert_block(&mut self, index: usize, bytes: &[u8]) {
        for (slice, bytes) in self
            .block_slices(index)
            .zip(bytes.chunks_exact(self.slices.slice_bytes()))
        {
            if !self.slices.contains(slice) {
                self.slices.insert(slice, bytes.into(), false);
            }
        }
    }

    /// Returns the table indices of the blocks that are not on disk yet.
    pub(crate) fn fresh_blocks(&self) -> Vec<usize> {
        self.fresh.iter().copied().collect()
    }

    /// Returns the place and the bytes of a block that is in memory.
    ///
    /// # Errors
    ///
    /// [`block::IoError::Corrupt`] if there is no such block.
    pub(crate) fn fresh_block(&self, index: usize) -> Result<(HostOffset, Vec<u8>), block::IoError> {
        let offset = self.block_offset(index)?.ok_or(block::IoError::Corrupt)?;
        let mut bytes = Vec::with_capacity(self.geometry.cluster_size() as usize);
        for slice in self.block_slices(index) {
            let len = bytes.len() + self.slices.slice_bytes();
            bytes.extend_from_slice(self.slices.peek(slice).unwrap_or_default());
            bytes.resize(len, 0);
        }
        Ok((offset, bytes))
    }

    /// Returns the bytes of the refcount table, as they are on disk.
    pub(crate) fn table_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self
            .table
            .iter()
            .flat_map(|entry| entry.raw().to_be_bytes())
            .collect();
        let room = self.place.clusters * self.geometry.cluster_size();
        invariant!(
            bytes.len() as u64 <= room,
            "the refcount table is longer than its place"
        );
        bytes.resize(room as usize, 0);
        bytes
    }

    /// Has the search for free clusters go on at the end of a file that grows. Free clusters before are found again when
    /// the image is next opened. Returns false if the search is there, or space is limited.
    pub(crate) fn search_at_end(&mut self) -> bool {
        if self.limit != NO_LIMIT || self.cursor >= self.end {
            return false;
        }
        self.cursor = self.end;
        self.free = Default::default();
        self.searches.clear();
        true
    }

    /// Records that the state is in the file, and in force in place of `old`. Returns the places that the refcount table
    /// has left.
    pub(crate) fn switched(&mut self, old: &Self) -> Vec<Dropped> {
        self.fresh.clear();
        self.dirty_parts.clear();
        self.slices = old.slices.emptied();
        // A compaction may have ended meanwhile.
        self.preferred = old.preferred;
        let geometry = self.geometry;
        let left = self.moved_from.drain(..).map(|place| Dropped {
            first: geometry.host_cluster(place.offset),
            count: place.clusters,
        });
        left.collect()
    }

    /// Keeps the file as long as it is or as `other` needs it: it may be the state that is in force.
    pub(crate) fn keep_tail_of(&mut self, other: &Self) {
        self.end = self.end.max(other.end);
        self.reserved = self.end;
        self.reserving = true;
    }
}
