//! Clusters nearer the start of the file for what lies near its end, and a nearer end.
//!
//! A bound takes the place of the end of the space while clusters are looked for: the file does not become longer, and
//! no cluster from the bound on is handed out.

use block::IoError;

use super::{ClusterUse, HostCluster, NO_LIMIT, NO_SPACE, PART_ENTRIES, Refcounts, Run, Stuck, TablePlace};
use crate::format::RefcountTableEntry;
use crate::invariant::invariant;

impl Refcounts {
    /// As [`Refcounts::allocate`], of the clusters before `bound`. `None` if there is no free one.
    pub(crate) fn allocate_below(&mut self, count: u64, bound: HostCluster) -> Result<Option<Run>, Stuck> {
        if let Some((first, found, zero)) = self.free.take_below(count, bound) {
            return self.claim_freed(first, found, zero).map(Some);
        }
        self.within(bound, |refcounts| refcounts.allocate_by_scan(count))
    }

    /// As [`Refcounts::allocate_run`], of the clusters before `bound`. `None` if no run of free ones is long enough.
    pub(crate) fn allocate_run_below(
        &mut self,
        count: u64,
        bound: HostCluster,
    ) -> Result<Option<HostCluster>, Stuck> {
        self.within(bound, |refcounts| refcounts.take_run(count))
    }

    /// Hands out clusters before `bound` first from now on, and others only when there is none; `None` ends that. The end of
    /// the file is being cut off.
    pub(crate) fn prefer_below(&mut self, bound: Option<HostCluster>) {
        self.preferred = bound;
    }

    /// Looks for clusters before `bound`.
    fn within<T>(
        &mut self,
        bound: HostCluster,
        allocate: impl FnOnce(&mut Self) -> Result<T, Stuck>,
    ) -> Result<Option<T>, Stuck> {
        let limit = self.limit;
        self.limit = bound.min(limit);
        let allocated = allocate(self);
        self.limit = limit;
        match allocated {
            Ok(allocated) => Ok(Some(allocated)),
            Err(Stuck::Failed(error)) if error == NO_SPACE => Ok(None),
            Err(stuck) => Err(stuck),
        }
    }

    /// Moves the refcount table before `bound`, if it ends after it. The header records the move at the next FLUSH.
    /// Returns false if there is no room.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn move_table_below(&mut self, bound: HostCluster) -> Result<bool, Stuck> {
        let clusters = self.place.clusters;
        if self.geometry.host_cluster(self.place.offset) + clusters <= bound {
            return Ok(true);
        }
        let Some(first) = self.allocate_run_below(clusters, bound)? else {
            return Ok(false);
        };
        self.uses.made(ClusterUse::RefcountTable, first, clusters);
        let offset = self.geometry.host_offset(first);
        let place = TablePlace { offset, clusters };
        self.moved_from.push(std::mem::replace(&mut self.place, place));
        Ok(true)
    }

    /// Moves block `index` to cluster `to`, whose count is durable, and returns the cluster that it leaves. `None` if the
    /// block is not in the file as a whole yet, or not any more.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed: [`Stuck::Load`] unless all slices of the block are in memory.
    pub(crate) fn move_block(&mut self, index: usize, to: HostCluster) -> Result<Option<HostCluster>, Stuck> {
        let Some(old) = self.block_offset(index)? else {
            return Ok(None);
        };
        // A round that writes it to its old place would end that it is new.
        if self.fresh.contains(&index) {
            return Ok(None);
        }
        if let Some(missing) = self
            .block_slices(index)
            .find(|&slice| !self.slices.contains(slice))
        {
            return Err(Stuck::Load(missing));
        }
        invariant!(
            self.is_given(to),
            "refcount block {index} moves to a cluster in use"
        );
        // Dirty, they stay in the cache until the block is written whole.
        for slice in self.block_slices(index) {
            self.slices.get_mut(slice);
        }
        self.point_at_block(index, RefcountTableEntry::encode(self.geometry.host_offset(to)))?;
        self.fresh.insert(index);
        self.uses.made(ClusterUse::RefcountBlock, to, 1);
        Ok(Some(self.geometry.host_cluster(old)))
    }

    fn point_at_block(&mut self, index: usize, entry: RefcountTableEntry) -> Result<(), IoError> {
        *self.table.get_mut(index).ok_or(IoError::Corrupt)? = entry;
        self.dirty_parts.insert(index / PART_ENTRIES);
        Ok(())
    }

    /// Takes block `index` out of the table. It counts its own cluster and no other, and nothing of it is dirty.
    /// [`Refcounts::restore_block`] undoes it.
    ///
    /// # Errors
    ///
    /// [`IoError::Corrupt`] if there is no such block.
    pub(crate) fn remove_block(&mut self, index: usize) -> Result<HostCluster, IoError> {
        let old = self.block_offset(index)?.ok_or(IoError::Corrupt)?;
        let cluster = self.geometry.host_cluster(old);
        invariant!(
            !self.fresh.contains(&index) && self.block_of(self.slice_of(cluster)) == index,
            "refcount block {index} is removed and does not count itself"
        );
        for slice in self.block_slices(index) {
            self.slices.discard(slice);
        }
        self.point_at_block(index, RefcountTableEntry::UNALLOCATED)?;
        self.uses.freed(cluster);
        Ok(cluster)
    }

    /// Puts block `index` back into the table, at `cluster`.
    pub(crate) fn restore_block(&mut self, index: usize, cluster: HostCluster) {
        let entry = RefcountTableEntry::encode(self.geometry.host_offset(cluster));
        if self.point_at_block(index, entry).is_ok() {
            self.uses.made(ClusterUse::RefcountBlock, cluster, 1);
        }
    }

    /// Returns the number of entries of the refcount table.
    pub(crate) fn table_entries(&self) -> usize {
        self.table.len()
    }

    /// Calls `each` for the clusters of a slice that are in use, in order.
    ///
    /// # Errors
    ///
    /// [`Stuck`], before any call.
    pub(crate) fn for_each_used(
        &mut self,
        slice: u64,
        mut each: impl FnMut(HostCluster),
    ) -> Result<(), Stuck> {
        let first = self.slice_start(slice);
        // Loads the slice, unless there is no block, or nothing was counted in a new one.
        self.get(first)?;
        let Some(bytes) = self.slices.peek(slice) else {
            return Ok(());
        };
        let order = self.geometry.refcount_order();
        for (index, cluster) in first.until(self.slice_start(slice + 1)).enumerate() {
            if order.read(bytes, index).is_some_and(|count| count > 0) {
                each(cluster);
            }
        }
        Ok(())
    }

    /// Records that the file ends before cluster `end`: no cluster from there on is in use, and what is written there later
    /// lies in a hole.
    pub(crate) fn cut(&mut self, end: HostCluster) {
        invariant!(
            self.limit == NO_LIMIT && self.uses.last().is_none_or(|last| last.cluster < end),
            "the file is cut at cluster {end}, before {:?}",
            self.uses.last()
        );
        self.free.cut(end);
        self.cursor = self.cursor.min(end);
        self.searches.clear();
        self.end = end;
        self.virgin = end;
        self.reserved = end;
    }
}
