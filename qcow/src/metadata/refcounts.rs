//! Reference counts in memory: the refcount table, cached slices of its blocks, and the allocator.
//!
//! The allocator hands out host clusters in three ways, in this order: runs that were freed and
//! have passed every stage of freeing; clusters below the end of the file that a forward scan finds with a
//! count of zero; and new clusters past the end. The scan's cursor never goes back, so that a cluster is
//! found by one of the three only. Tables of several clusters get theirs from a search of their own ([`run`]).
//!
//! What must stay true: a count goes from 0 to 1 here before anything can point at the cluster, and the
//! count is durable before that pointer is (see `engine::flush`). A new refcount block is counted by itself or
//! by a block that is made at the same instant, and these are durable before the refcount table points at them. The
//! table in memory never has more entries than its place on disk has room for. A cluster that counts zero and is known to be
//! in use all the same is never handed out: it fails whoever asked ([`Stuck::InUse`]).

mod run;

use block::IoError;
use rustc_hash::{FxHashMap, FxHashSet};

use super::extents::FreeRuns;
use super::slices::SliceCache;
use super::structures::{InUse, Structure, Structures};
use crate::format::{Geometry, HostCluster, HostOffset, RefcountTableEntry};

/// Why the allocator cannot go on under the lock.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Stuck {
    /// This refcount slice must be loaded first.
    Load(u64),
    /// A count is wrong: the image is corrupt.
    InUse(InUse),
    /// It failed.
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
    /// How many.
    pub(crate) count: u64,
    /// They are known to read as zeros.
    pub(crate) zero: bool,
}

/// Where the refcount table was before it moved, until the header says so on disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct TablePlace {
    /// Where it begins.
    pub(crate) offset: HostOffset,
    /// Length in clusters.
    pub(crate) clusters: u64,
}

/// Counts, table and allocator.
#[derive(Debug)]
pub(crate) struct Refcounts {
    pub(super) geometry: Geometry,
    table: Vec<RefcountTableEntry>,
    pub(crate) place: TablePlace,
    /// The table has moved and the header does not know it yet; what was left behind.
    pub(crate) moved_from: Vec<TablePlace>,
    /// 512-byte parts of the table that differ from the disk.
    pub(crate) dirty_parts: FxHashSet<usize>,
    /// Blocks the table on disk does not point at yet, by table index.
    pub(crate) fresh: FxHashSet<usize>,
    pub(crate) slices: SliceCache,
    /// What clusters are known to be used for, whatever they count; empty unless the image is written.
    pub(crate) structures: Structures,
    /// Logarithm of the counts per slice.
    slice_bits: u32,
    cursor: HostCluster,
    /// From here on no byte was ever written: clusters read as zeros.
    virgin: HostCluster,
    /// How far the searches for runs of so many clusters, behind the end or anywhere, have come: they begin anew when a
    /// slice that they lack has been loaded.
    searches: FxHashMap<(u64, bool), HostCluster>,
    /// The first cluster there is no room for; [`NO_LIMIT`] for a file that grows.
    limit: HostCluster,
    free: FreeRuns,
    /// The cluster after the last one ever handed out or counted.
    end: HostCluster,
    /// Up to here the host has space reserved past `end`.
    reserved: HostCluster,
    /// Somebody is reserving more, or it was found to be of no use.
    reserving: bool,
}

/// The end of a file that grows.
pub(crate) const NO_LIMIT: HostCluster = HostCluster::new(u64::MAX);

/// The least and the most that is reserved at once, in bytes.
const RESERVE_BYTES_MIN: u64 = 4 << 20;
const RESERVE_BYTES_MAX: u64 = 64 << 20;

/// Table entries in a 512-byte part.
pub(crate) const PART_ENTRIES: usize = 64;

impl Refcounts {
    /// Takes over the refcount table as it is on disk. `file_end` is the first cluster wholly past the
    /// end of the file; `limit` the first there is no room for.
    pub(crate) fn new(
        geometry: Geometry,
        table: Vec<RefcountTableEntry>,
        place: TablePlace,
        file_end: HostCluster,
        limit: HostCluster,
        cache_bytes: u64,
    ) -> Self {
        let slice_bytes = geometry.cluster_size().min(4096) as usize;
        let slice_bits = (slice_bytes as u64 * 8 / u64::from(geometry.refcount_bits())).trailing_zeros();
        Self {
            geometry,
            table,
            place,
            moved_from: Vec::new(),
            dirty_parts: FxHashSet::default(),
            fresh: FxHashSet::default(),
            slices: SliceCache::new(slice_bytes, cache_bytes.max(4 * run::count_bytes_max(&geometry))),
            structures: Structures::default(),
            slice_bits,
            cursor: HostCluster::new(0),
            virgin: if limit == NO_LIMIT { file_end } else { NO_LIMIT },
            searches: FxHashMap::default(),
            limit,
            free: FreeRuns::default(),
            end: file_end,
            reserved: file_end,
            reserving: limit != NO_LIMIT,
        }
    }

    fn block_index(&self, cluster: HostCluster) -> usize {
        self.geometry.refcount_table_index(cluster)
    }

    /// The refcount block that a slice is part of.
    fn block_of(&self, slice: u64) -> usize {
        self.block_index(self.slice_start(slice))
    }

    /// The first cluster that a slice counts.
    fn slice_start(&self, slice: u64) -> HostCluster {
        HostCluster::new(slice << self.slice_bits)
    }

    /// The entry, within its slice, that counts a cluster.
    fn index_in_slice(&self, cluster: HostCluster) -> usize {
        (cluster.index() & ((1 << self.slice_bits) - 1)) as usize
    }

    /// The slice that holds a cluster's count.
    pub(crate) fn slice_of(&self, cluster: HostCluster) -> u64 {
        cluster.index() >> self.slice_bits
    }

    /// Where a slice is on disk; `None` if its block does not exist.
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

    /// Where block `index` of the table is on disk.
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

    /// The slices of block `index`.
    pub(crate) fn block_slices(&self, index: usize) -> std::ops::Range<u64> {
        let per_block = self.geometry.cluster_size() / self.slices.slice_bytes() as u64;
        let first = index as u64 * per_block;
        first..first + per_block
    }

    /// Whether the block that a slice belongs to is not reachable on disk yet.
    pub(crate) fn is_fresh(&self, slice: u64) -> bool {
        self.fresh.contains(&self.block_of(slice))
    }

    /// The cluster after the last one in use or in the file.
    #[inline]
    pub(crate) fn end(&self) -> HostCluster {
        self.end
    }

    /// Whether more space should be reserved past the end: from which cluster, and how many. The caller
    /// does it and reports to [`Refcounts::reserved`].
    pub(crate) fn reserve_ahead(&mut self) -> Option<(HostCluster, u64)> {
        let size = self.geometry.cluster_size();
        // An eighth of the file, within bounds: as much is left over after a crash.
        let step = (self.end.index() * size / 8).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX) / size;
        if self.reserving || self.end + step / 2 <= self.reserved {
            return None;
        }
        self.reserving = true;
        let from = self.reserved.max(self.end);
        Some((from, step.max(1)))
    }

    /// Where the file ends if what was reserved and not used is cut off; `None` if nothing is.
    pub(crate) fn unused_reserve(&self) -> Option<HostCluster> {
        (self.limit == NO_LIMIT && self.reserved > self.end).then_some(self.end)
    }

    /// Space is reserved up to cluster `end`; `None` if it cannot be had, and is not asked for again.
    pub(crate) fn reserved(&mut self, end: Option<HostCluster>) {
        if let Some(end) = end {
            self.reserved = self.reserved.max(end);
            self.reserving = false;
        }
    }

    /// The block device that holds the image ends before cluster `limit` now. Returns true if that is further on.
    pub(crate) fn extend(&mut self, limit: HostCluster) -> bool {
        let more = self.limit != NO_LIMIT && limit > self.limit;
        if more {
            self.limit = limit;
        }
        more
    }

    /// The table's entries in 512-byte part `part`, as they are on disk.
    pub(crate) fn table_part(&self, part: usize) -> Vec<u8> {
        let entries = self.table.iter().skip(part * PART_ENTRIES).take(PART_ENTRIES);
        let mut bytes: Vec<u8> = entries.flat_map(|entry| entry.raw().to_be_bytes()).collect();
        bytes.resize(PART_ENTRIES * 8, 0);
        bytes
    }

    /// How many 512-byte parts the table has.
    pub(crate) fn table_parts(&self) -> usize {
        self.table.len().div_ceil(PART_ENTRIES)
    }

    /// A cluster's count.
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

    /// Sets a cluster's count. Its block exists.
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
            self.structures.freed(cluster);
        }
        Ok(())
    }

    /// Counts a cluster that counts zero, for whoever gets it.
    ///
    /// # Errors
    ///
    /// [`Stuck`]; [`Stuck::InUse`] if it is not free, whatever it counts.
    fn claim(&mut self, cluster: HostCluster) -> Result<(), Stuck> {
        self.structures.check_free(cluster)?;
        self.set(cluster, 1)?;
        self.structures.given(cluster);
        Ok(())
    }

    /// Hands out at most `count` neighbouring clusters, each with a count of one.
    pub(crate) fn allocate(&mut self, count: u64) -> Result<Run, Stuck> {
        if let Some((first, found, zero)) = self.free.take(count) {
            return self.claim_freed(first, found, zero);
        }
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
                    // What was claimed so far is handed out; whoever asks next hears of the rest.
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

    /// Counts clusters that were free; gives them back if their slice must be loaded first.
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
                // What was claimed so far is handed out; the rest goes back.
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

    /// Makes the refcount block of table entry `index` in cluster `cluster`, which is counted by a block that is as
    /// new: otherwise the table could point at the block before its own count is durable.
    fn new_block_at(&mut self, index: usize, cluster: HostCluster) -> Result<(), Stuck> {
        self.structures.check_free(cluster)?;
        let host = self.geometry.host_offset(cluster);
        let entry = self.table.get_mut(index).ok_or(IoError::Corrupt)?;
        *entry = RefcountTableEntry::encode(host);
        self.fresh.insert(index);
        self.dirty_parts.insert(index / PART_ENTRIES);
        Ok(())
    }

    /// Counts and notes a refcount block of [`Refcounts::new_block_at`].
    fn claim_block(&mut self, cluster: HostCluster) -> Result<(), Stuck> {
        self.claim(cluster)?;
        self.structures.made(Structure::RefcountBlock, cluster, 1);
        self.end = self.end.max(cluster + 1);
        Ok(())
    }

    /// Takes back a cluster that nothing ever pointed at.
    pub(crate) fn give_back(&mut self, cluster: HostCluster) -> Result<(), Stuck> {
        self.set(cluster, 0)?;
        self.release(cluster, 1, false);
        Ok(())
    }

    /// Makes clusters whose count is zero, and which are past every stage of freeing, usable again.
    pub(crate) fn release(&mut self, first: HostCluster, count: u64, zero: bool) {
        // Those the cursor has yet to pass it will find by itself.
        let below = count.min(self.cursor.max(first) - first);
        self.free.insert(first, below, zero);
    }
}

fn no_space() -> Stuck {
    const ENOSPC: i32 = 28;
    Stuck::Failed(IoError::Host { errno: ENOSPC })
}

#[cfg(test)]
mod tests;
