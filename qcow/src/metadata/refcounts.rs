//! Reference counts in memory: the refcount table, cached slices of its blocks, and the allocator.
//!
//! The allocator hands out host clusters from three sources, in this order: freed runs that have passed every stage
//! of freeing; clusters below the end of the file that a forward scan finds with a count of zero; and new clusters
//! past the end. The scan's cursor never goes back, so that only one of the three finds a cluster. A separate search
//! allocates tables of several clusters ([`run`]). While a compaction runs, all of them are
//! first asked for clusters before its bound.
//!
//! Invariants:
//! - a count goes from 0 to 1 here before anything can point at the cluster, and the count is durable before that
//!   pointer is (see `engine::flush`);
//! - a new refcount block is counted by itself or by a block that is made at the same instant, and these are durable
//!   before the refcount table points at them; a block that moves is counted in its new place, durably, before it does;
//! - the table in memory never has more entries than its place on disk has room for;
//! - a cluster that counts zero and is known to be in use all the same is never handed out: the allocation fails
//!   ([`Stuck::InUse`]).

mod below;
mod run;

use block::IoError;
use rustc_hash::{FxHashMap, FxHashSet};

use super::cluster_use::{InUse, UseMap};
use super::free_runs::FreeRuns;
use super::slices::{SliceCache, slice_bytes_of};
use crate::format::{ClusterUse, Geometry, HostCluster, HostOffset, RefcountTableEntry};
use crate::invariant::invariant;

/// The reason that the allocator cannot go on under the lock.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Stuck {
    /// This refcount slice must be loaded first.
    Load(u64),
    /// A count is wrong: the image is corrupt.
    InUse(InUse),
    /// The allocation failed.
    Failed(IoError),
}

impl From<InUse> for Stuck {
    fn from(cluster: InUse) -> Self {
        Self::InUse(cluster)
    }
}

impl From<IoError> for Stuck {
    fn from(error: IoError) -> Self {
        Self::Failed(error)
    }
}

/// Host clusters handed out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Run {
    /// The first cluster.
    pub(crate) first: HostCluster,
    /// The number of clusters.
    pub(crate) count: u64,
    /// True if they are known to read as zeros.
    pub(crate) zero: bool,
}

/// The place of a table in the file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct TablePlace {
    /// The offset of its first byte.
    pub(crate) offset: HostOffset,
    /// Length in clusters.
    pub(crate) clusters: u64,
}

/// The number of clusters that were handed out, and of those that became free, since the image was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) allocated: u64,
    pub(crate) freed: u64,
}

/// Counts, table and allocator.
#[derive(Debug)]
pub(crate) struct Refcounts {
    pub(super) geometry: Geometry,
    pub(super) table: Vec<RefcountTableEntry>,
    pub(crate) place: TablePlace,
    /// The places that the table has left while the header does not record the move yet.
    pub(crate) moved_from: Vec<TablePlace>,
    /// 512-byte parts of the table that differ from the disk.
    pub(crate) dirty_parts: FxHashSet<usize>,
    /// Blocks the table on disk does not point at yet, by table index.
    pub(crate) fresh: FxHashSet<usize>,
    pub(crate) slices: SliceCache,
    /// The known use of clusters, whatever they count; empty unless the image is written.
    pub(crate) uses: UseMap,
    /// Logarithm of the counts per slice.
    pub(super) slice_bits: u32,
    pub(super) cursor: HostCluster,
    /// From here on no byte was ever written: clusters read as zeros.
    pub(super) virgin: HostCluster,
    /// The progress of the searches for runs, by (clusters, past the end only). A search continues when a slice
    /// that it lacked has been loaded.
    pub(super) searches: FxHashMap<(u64, bool), HostCluster>,
    /// The first cluster past the end of the space; [`NO_LIMIT`] for a file that grows.
    pub(super) limit: HostCluster,
    /// Clusters before this one are handed out first.
    pub(super) preferred: Option<HostCluster>,
    pub(super) free: FreeRuns,
    /// The cluster after the last one ever handed out or counted.
    pub(super) end: HostCluster,
    /// The end of the space that the host has reserved past `end`.
    pub(super) reserved: HostCluster,
    /// A task is reserving more, or reserving was found to be of no use.
    pub(super) reserving: bool,
    pub(crate) traffic: Traffic,
}

/// The limit of a file that grows.
pub(crate) const NO_LIMIT: HostCluster = HostCluster::new(u64::MAX);

/// The least and the most that is reserved at once, in bytes.
const RESERVE_BYTES_MIN: u64 = 4 << 20;
const RESERVE_BYTES_MAX: u64 = 64 << 20;

/// Table entries in a 512-byte part.
pub(crate) const PART_ENTRIES: usize = 64;

impl Refcounts {
    /// Takes over the refcount table as it is on disk. `file_end` is the first cluster wholly past the end of the
    /// file; `limit` is the first past the end of the space.
    pub(crate) fn new(
        geometry: Geometry,
        table: Vec<RefcountTableEntry>,
        place: TablePlace,
        file_end: HostCluster,
        limit: HostCluster,
        cache_bytes: u64,
    ) -> Self {
        let slice_bytes = slice_bytes_of(&geometry);
        let slice_bits = (slice_bytes as u64 * 8 / u64::from(geometry.refcount_bits())).trailing_zeros();
        let least_bytes = 4 * run::count_bytes_max(&geometry);
        let mut slices = SliceCache::new(slice_bytes, cache_bytes.max(least_bytes));
        slices.keep_at_least(least_bytes);
        Self {
            geometry,
            table,
            place,
            moved_from: Vec::new(),
            dirty_parts: FxHashSet::default(),
            fresh: FxHashSet::default(),
            slices,
            uses: UseMap::default(),
            slice_bits,
            cursor: HostCluster::new(0),
            virgin: if limit == NO_LIMIT { file_end } else { NO_LIMIT },
            searches: FxHashMap::default(),
            limit,
            preferred: None,
            free: FreeRuns::default(),
            end: file_end,
            reserved: file_end,
            reserving: limit != NO_LIMIT,
            traffic: Traffic::default(),
        }
    }

    fn block_index(&self, cluster: HostCluster) -> usize {
        self.geometry.refcount_table_index(cluster)
    }

    /// Returns the index of the refcount block that a slice is part of.
    pub(crate) fn block_of(&self, slice: u64) -> usize {
        self.block_index(self.slice_start(slice))
    }

    /// Returns the first cluster that a slice counts.
    pub(crate) fn slice_start(&self, slice: u64) -> HostCluster {
        HostCluster::new(slice << self.slice_bits)
    }

    /// Returns the index, within its slice, of the entry that counts a cluster.
    fn index_in_slice(&self, cluster: HostCluster) -> usize {
        (cluster.index() & ((1 << self.slice_bits) - 1)) as usize
    }

    /// Returns the slice that holds a cluster's count.
    pub(crate) fn slice_of(&self, cluster: HostCluster) -> u64 {
        cluster.index() >> self.slice_bits
    }

    /// Returns the offset of a slice on disk; `None` if its block does not exist.
    pub(crate) fn slice_offset(&self, slice: u64) -> Result<Option<HostOffset>, IoError> {
        let index = self.block_of(slice);
        let Some(block) = self.block_offset(index)? else {
            return Ok(None);
        };
        let slices_per_block = self.geometry.cluster_size() / self.slices.slice_bytes() as u64;
        Ok(Some(
            block + (slice & (slices_per_block - 1)) * self.slices.slice_bytes() as u64,
        ))
    }

    /// Returns the offset of block `index` of the table on disk.
    pub(crate) fn block_offset(&self, index: usize) -> Result<Option<HostOffset>, IoError> {
        let Some(entry) = self.table.get(index) else {
            return Ok(None);
        };
        match entry.decode(&self.geometry) {
            Ok(host) => Ok(host),
            Err(error) => {
                tracing::error!(%error, index, "the refcount table is corrupt");
                Err(IoError::Corrupt)
            }
        }
    }

    /// Returns the slices of block `index`.
    pub(crate) fn block_slices(&self, index: usize) -> std::ops::Range<u64> {
        let per_block = self.geometry.cluster_size() / self.slices.slice_bytes() as u64;
        let first = index as u64 * per_block;
        first..first + per_block
    }

    /// As [`SliceCache::begin_loads_ahead`], in the block of `slice`.
    pub(crate) fn begin_loads_ahead(&mut self, slice: u64) -> u64 {
        let end = self.block_slices(self.block_of(slice)).end;
        self.slices.begin_loads_ahead(slice, end)
    }

    /// Returns true if the block that a slice belongs to is not reachable on disk yet.
    pub(crate) fn is_fresh(&self, slice: u64) -> bool {
        self.fresh.contains(&self.block_of(slice))
    }

    /// Returns the cluster after the last one in use or in the file.
    #[inline]
    pub(crate) fn end(&self) -> HostCluster {
        self.end
    }

    /// Returns true if the next cluster that is handed out makes the file longer.
    pub(super) fn is_growing(&self) -> bool {
        self.limit == NO_LIMIT && self.cursor >= self.end && self.free.is_empty()
    }

    /// Returns the first cluster and the number of clusters to reserve past the end, if more space should be
    /// reserved. The caller does it and reports to [`Refcounts::reserved`].
    pub(crate) fn reserve_ahead(&mut self) -> Option<(HostCluster, u64)> {
        let size = self.geometry.cluster_size();
        // An eighth of the file, within bounds: a crash leaves as much behind.
        let step = (self.end.index() * size / 8).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX) / size;
        if self.reserving || self.end + step / 2 <= self.reserved {
            return None;
        }
        self.reserving = true;
        let from = self.reserved.max(self.end);
        Some((from, step.max(1)))
    }

    /// Returns the file's end after unused reserved space is cut off; `None` if there is none.
    pub(crate) fn unused_reserve(&self) -> Option<HostCluster> {
        (self.limit == NO_LIMIT && self.reserved > self.end).then_some(self.end)
    }

    /// Records that space is reserved up to cluster `end`. `None` if that failed; it is not tried again.
    pub(crate) fn reserved(&mut self, end: Option<HostCluster>) {
        if let Some(end) = end {
            self.reserved = self.reserved.max(end);
            self.reserving = false;
        }
    }

    /// Records that the block device that holds the image now ends before cluster `limit`. Returns true if it has
    /// grown.
    pub(crate) fn extend(&mut self, limit: HostCluster) -> bool {
        let more = self.limit != NO_LIMIT && limit > self.limit;
        if more {
            self.limit = limit;
        }
        more
    }

    /// Returns the table's entries in 512-byte part `part`, as they are on disk.
    pub(crate) fn table_part(&self, part: usize) -> Vec<u8> {
        let entries = self.table.iter().skip(part * PART_ENTRIES).take(PART_ENTRIES);
        let mut bytes: Vec<u8> = entries.flat_map(|entry| entry.raw().to_be_bytes()).collect();
        bytes.resize(PART_ENTRIES * 8, 0);
        bytes
    }

    /// Returns the number of 512-byte parts of the table.
    pub(crate) fn table_parts(&self) -> usize {
        self.table.len().div_ceil(PART_ENTRIES)
    }

    /// Returns a cluster's count.
    pub(crate) fn get(&mut self, cluster: HostCluster) -> Result<u64, Stuck> {
        let slice = self.slice_of(cluster);
        if !self.slices.contains(slice) {
            let index = self.block_index(cluster);
            if self.block_offset(index)?.is_none() {
                return Ok(0);
            }
            if !self.fresh.contains(&index) {
                return Err(Stuck::Load(slice));
            }
            return Ok(0);
        }
        let index = self.index_in_slice(cluster);
        let order = self.geometry.refcount_order();
        let count = self.slices.get(slice).and_then(|bytes| order.read(bytes, index));
        count.ok_or(Stuck::Failed(IoError::Corrupt))
    }

    /// Returns a cluster's count if it is in memory.
    pub(crate) fn peek(&self, cluster: HostCluster) -> Option<u64> {
        let bytes = self.slices.peek(self.slice_of(cluster))?;
        let index = self.index_in_slice(cluster);
        self.geometry.refcount_order().read(bytes, index)
    }

    /// Returns true if a cluster may be one that was handed out to one user: its count is 1, as far as it is in memory,
    /// and it is no structure.
    pub(super) fn is_given(&self, cluster: HostCluster) -> bool {
        self.peek(cluster).is_none_or(|count| count == 1) && self.uses.find(cluster).is_none()
    }

    /// Sets a cluster's count. Its block must exist.
    pub(crate) fn set(&mut self, cluster: HostCluster, count: u64) -> Result<(), Stuck> {
        let slice = self.slice_of(cluster);
        if !self.slices.contains(slice) {
            if !self.is_fresh(slice) {
                return Err(Stuck::Load(slice));
            }
            // A fresh block's slices are zeros until something is counted in them.
            self.slices
                .insert(slice, vec![0; self.slices.slice_bytes()].into(), true);
        }
        let index = self.index_in_slice(cluster);
        let order = self.geometry.refcount_order();
        let bytes = self.slices.get_mut(slice).ok_or(IoError::Corrupt)?;
        order.write(bytes, index, count).map_err(|error| {
            tracing::error!(%error, %cluster, "a reference count cannot be changed");
            Stuck::Failed(IoError::Corrupt)
        })?;
        if count == 0 {
            self.uses.freed(cluster);
        }
        Ok(())
    }

    /// Counts a cluster whose count is zero, for a new user.
    ///
    /// # Errors
    ///
    /// [`Stuck`]; [`Stuck::InUse`] if it is not free, whatever it counts.
    fn claim(&mut self, cluster: HostCluster) -> Result<(), Stuck> {
        self.uses.check_free(cluster)?;
        // All three sources of clusters look at the count themselves.
        invariant!(
            self.peek(cluster).is_none_or(|count| count == 0),
            "cluster {cluster} is handed out and has a user"
        );
        self.set(cluster, 1)?;
        self.uses.given(cluster);
        self.traffic.allocated += 1;
        Ok(())
    }

    /// Hands out at most `count` neighbouring clusters, each with a count of one.
    pub(crate) fn allocate(&mut self, count: u64) -> Result<Run, Stuck> {
        if let Some(bound) = self.preferred
            && let Some(run) = self.allocate_below(count, bound)?
        {
            return Ok(run);
        }
        if let Some((first, found, zero)) = self.free.take(count) {
            return self.claim_freed(first, found, zero);
        }
        self.allocate_by_scan(count)
    }

    /// Hands out at most `count` neighbouring clusters from the cursor on, each with a count of one.
    fn allocate_by_scan(&mut self, count: u64) -> Result<Run, Stuck> {
        loop {
            if self.cursor >= self.limit {
                return Err(no_space());
            }
            let block = self.block_index(self.cursor);
            if block >= self.table.len() {
                self.grow_table(block)?;
                continue;
            }
            if self.block_offset(block)?.is_none() {
                self.new_block_at(block, self.cursor)?;
                self.claim_block(self.cursor)?;
                self.cursor += 1;
                continue;
            }
            let Some((first, found)) = self.scan(count)? else {
                continue;
            };
            let mut claimed = 0;
            for cluster in first.until(first + found) {
                match self.claim(cluster) {
                    Ok(()) => claimed += 1,
                    // The clusters claimed so far are handed out; the next caller gets the error.
                    Err(_) if claimed > 0 => break,
                    Err(stuck) => return Err(stuck),
                }
            }
            self.cursor = first + claimed;
            self.end = self.end.max(self.cursor);
            return Ok(Run {
                first,
                count: claimed,
                zero: first >= self.virgin,
            });
        }
    }

    /// Looks for free clusters from the cursor to the end of its slice, at most `count` neighbours.
    /// Without any, moves the cursor past the slice.
    fn scan(&mut self, count: u64) -> Result<Option<(HostCluster, u64)>, Stuck> {
        let slice = self.slice_of(self.cursor);
        let entries = 1u64 << self.slice_bits;
        if !self.slices.contains(slice) {
            if !self.is_fresh(slice) {
                return Err(Stuck::Load(slice));
            }
            self.slices
                .insert(slice, vec![0; self.slices.slice_bytes()].into(), true);
        }
        let order = self.geometry.refcount_order();
        let bytes = self.slices.get(slice).ok_or(IoError::Corrupt)?;
        let free = |index: &u64| order.read(bytes, *index as usize) == Some(0);
        let from = self.cursor - self.slice_start(slice);
        let Some(start) = (from..entries).find(free) else {
            self.cursor = self.slice_start(slice + 1);
            return Ok(None);
        };
        let first = self.slice_start(slice) + start;
        if first >= self.limit {
            return Err(no_space());
        }
        let most = count.min(entries - start).min(self.limit - first);
        let found = (start..start + most).take_while(free).count() as u64;
        Ok(Some((first, found)))
    }

    /// Counts clusters that were free; returns them to the set if their slice must be loaded first.
    fn claim_freed(&mut self, first: HostCluster, count: u64, zero: bool) -> Result<Run, Stuck> {
        for cluster in first.until(first + count) {
            let claimed = match self.get(cluster) {
                Ok(0) => self.claim(cluster),
                Ok(found) => {
                    tracing::error!(%cluster, found, "a freed cluster is in use");
                    return Err(Stuck::Failed(IoError::Corrupt));
                }
                Err(stuck) => Err(stuck),
            };
            if let Err(stuck) = claimed {
                // The clusters claimed so far are handed out; the rest goes back.
                self.free.insert(cluster, first + count - cluster, zero);
                if cluster == first {
                    return Err(stuck);
                }
                return Ok(Run {
                    first,
                    count: cluster - first,
                    zero,
                });
            }
        }
        Ok(Run { first, count, zero })
    }

    /// Makes the refcount block of table entry `index` in cluster `cluster`. A block that is as new must count that
    /// cluster: otherwise the table could point at the block before its own count is durable.
    fn new_block_at(&mut self, index: usize, cluster: HostCluster) -> Result<(), Stuck> {
        self.uses.check_free(cluster)?;
        let host = self.geometry.host_offset(cluster);
        let entry = self.table.get_mut(index).ok_or(IoError::Corrupt)?;
        // Its counts would be lost.
        invariant!(
            *entry == RefcountTableEntry::UNALLOCATED,
            "refcount table entry {index} has a block"
        );
        *entry = RefcountTableEntry::encode(host);
        self.fresh.insert(index);
        self.dirty_parts.insert(index / PART_ENTRIES);
        Ok(())
    }

    /// Counts and records a refcount block of [`Refcounts::new_block_at`].
    fn claim_block(&mut self, cluster: HostCluster) -> Result<(), Stuck> {
        self.claim(cluster)?;
        self.uses.made(ClusterUse::RefcountBlock, cluster, 1);
        self.end = self.end.max(cluster + 1);
        Ok(())
    }

    /// Frees a cluster that nothing ever pointed at.
    pub(crate) fn give_back(&mut self, cluster: HostCluster) -> Result<(), Stuck> {
        self.lower(cluster, 0, false)
    }

    /// Lowers a cluster's count. At zero the cluster is usable again: it is past every stage of freeing, and if `zero`,
    /// it reads as zeros. Both are one step, or the scan could find a cluster that comes to the freed ones afterwards.
    pub(crate) fn lower(&mut self, cluster: HostCluster, count: u64, zero: bool) -> Result<(), Stuck> {
        self.set(cluster, count)?;
        if count == 0 {
            self.release(cluster, 1, zero);
        }
        Ok(())
    }

    /// Makes clusters whose count is zero, and which are past every stage of freeing, usable again.
    fn release(&mut self, first: HostCluster, count: u64, zero: bool) {
        // A cluster that the scan has found meanwhile would be handed out twice.
        invariant!(
            first
                .until(first + count)
                .all(|cluster| self.peek(cluster).is_none_or(|count| count == 0)
                    && self.uses.find(cluster).is_none()),
            "a cluster in {count} from {first} on is released and in use"
        );
        self.traffic.freed += count;
        // The cursor will find the clusters that it has yet to pass.
        let below = count.min(self.cursor.max(first) - first);
        self.free.insert(first, below, zero);
    }
}

/// The error of an allocation without room: `ENOSPC`.
pub(crate) const NO_SPACE: IoError = IoError::Host { errno: 28 };

fn no_space() -> Stuck {
    Stuck::Failed(NO_SPACE)
}

#[cfg(test)]
mod tests;
