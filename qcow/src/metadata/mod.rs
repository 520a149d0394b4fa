//! An image's metadata in memory, and the lookups and plans that requests need.
//!
//! One [`Metadata`] is shared by all queues behind a lock. Nothing here does I/O or waits. An operation that needs a
//! slice that is not cached returns its number, and the engine loads it with the lock released.
//!
//! Invariants:
//! - an L2 entry is set only once the data it exposes is written;
//! - guest bytes in the in-flight table are remapped only by the request that entered them;
//! - a cluster that left the mapping is in `drops` until a FLUSH has made that durable;
//! - once the metadata was found corrupt no change of the mapping is planned any more, and a slice with a refused
//!   entry ([`L2Entry::REFUSED`]) is never written.

#[cfg(test)]
mod cache_tests;
pub(crate) mod clear;
pub(crate) mod cluster_use;
mod data_run;
pub(crate) mod dirty_bits;
mod drops;
pub(crate) mod free_runs;
mod in_flight;
#[cfg(all(test, debug_assertions, not(feature = "canary")))]
mod invariant_tests;
pub(crate) mod mapping;
pub(crate) mod moves;
mod next;
pub(crate) mod plan;
pub(crate) mod refcounts;
mod released;
pub(crate) mod shared_moves;
pub(crate) mod slices;
pub(crate) mod table_budget;
mod tables;
#[cfg(test)]
mod testing;
pub(crate) mod write_back;

use std::ops::Range;
use std::sync::Arc;

use block::IoError;
use block::sync::SingleFlight;
use rustc_hash::FxHashSet;

use crate::format::l1::L1_ENTRY_SIZE;
use crate::format::{EntryError, Geometry, GuestCluster, GuestOffset, HostOffset, L1Entry};
use cluster_use::InUse;
use dirty_bits::DirtyBitmaps;
pub(crate) use drops::{Dropped, Drops, Growth, Returning};
use in_flight::InFlight;
pub(crate) use mapping::{Extent, Lookup};
pub(crate) use next::{COUNTS_BYTES_MAX, Counted, Relocation};
use refcounts::{Refcounts, Stuck, TablePlace};
pub(crate) use released::Released;
use slices::{SliceCache, slice_bytes_of};
use table_budget::TableBudget;

/// The reason that a change cannot be planned under the lock.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Blocked {
    /// This L2 slice must be loaded.
    LoadL2(u64),
    /// This cached L2 slice must be checked before anything is written through it.
    CheckL2(u64),
    /// This refcount slice must be loaded.
    LoadRefcounts(u64),
    /// The L2 table of this L1 entry is shared with a snapshot and must be copied.
    CopyTable(usize),
    /// Another request is remapping this guest byte.
    InFlight(GuestOffset),
    /// A change of these guest bytes in place waits until persistent bitmaps have it.
    Unstored(Range<u64>),
    /// The file would grow while much space waits to be freed.
    Growth,
    /// A count is wrong: the image is corrupt.
    InUse(InUse),
    /// The change failed.
    Failed(IoError),
}

impl From<Stuck> for Blocked {
    fn from(stuck: Stuck) -> Self {
        match stuck {
            Stuck::Load(slice) => Self::LoadRefcounts(slice),
            Stuck::InUse(cluster) => Self::InUse(cluster),
            Stuck::Failed(error) => Self::Failed(error),
        }
    }
}

/// The metadata of one open image.
#[derive(Debug)]
pub(crate) struct Metadata {
    geometry: Geometry,
    l1: Vec<L1Entry>,
    pub(crate) l1_place: TablePlace,
    /// The places that the L1 table has left while the header does not record the move yet.
    pub(crate) l1_moved_from: Vec<TablePlace>,
    /// The header's size and L1 fields are to be written.
    pub(crate) header_dirty: bool,
    /// The disk's size as the header has it, or is to have it, in bytes.
    pub(crate) size_bytes: u64,
    pub(crate) l1_dirty_parts: FxHashSet<usize>,
    /// L1 entries whose tables are not reachable on disk yet: written whole at the next FLUSH.
    pub(crate) fresh_tables: FxHashSet<usize>,
    pub(crate) l2: SliceCache,
    pub(crate) refcounts: Refcounts,
    /// Something is corrupt: no change is planned any more.
    pub(crate) corrupt: bool,
    /// Logarithm of the entries per L2 slice.
    slice_bits: u32,
    /// A hole of the file reads as zeros, as the guest sees it: not so if its bytes are encrypted.
    pub(crate) holes_are_zeros: bool,
    /// Below this guest byte there are bytes in the backing file that must not show where they are hidden.
    covered_bytes: u64,
    pub(crate) in_flight: InFlight,
    /// L1 entries whose tables are being copied.
    copying: SingleFlight<usize>,
    pub(crate) drops: Drops,
    pub(crate) returning: Returning,
    /// The persistent bitmaps that record changes, once something changes.
    pub(crate) bitmaps: Option<Arc<DirtyBitmaps>>,
    /// Queues are held off: an operation runs alone.
    pub(crate) held_off: bool,
    /// A FLUSH is writing the metadata that was dirty when it began.
    pub(crate) flushing: bool,
}

impl Metadata {
    /// Takes over an image's metadata as it is on disk. The backing file, if there is one, has `covered_bytes` bytes.
    pub(crate) fn new(
        geometry: Geometry,
        l1: Vec<L1Entry>,
        l1_offset: HostOffset,
        refcounts: Refcounts,
        l2_cache_bytes: u64,
        covered_bytes: u64,
    ) -> Self {
        let slice_bytes = slice_bytes_of(&geometry);
        let clusters = geometry.clusters_for(l1.len() as u64 * L1_ENTRY_SIZE);
        Self {
            geometry,
            l1,
            l1_place: TablePlace {
                offset: l1_offset,
                clusters,
            },
            l1_moved_from: Vec::new(),
            header_dirty: false,
            holes_are_zeros: true,
            size_bytes: geometry.virtual_size(),
            l1_dirty_parts: FxHashSet::default(),
            fresh_tables: FxHashSet::default(),
            l2: SliceCache::new(slice_bytes, l2_cache_bytes),
            refcounts,
            corrupt: false,
            slice_bits: slice_bytes.trailing_zeros() - geometry.l2_entry_width().bits(),
            covered_bytes,
            in_flight: InFlight::default(),
            copying: SingleFlight::default(),
            drops: Drops::default(),
            returning: Returning::default(),
            bitmaps: None,
            held_off: false,
            flushing: false,
        }
    }

    /// Counts what its caches hold to a budget that is shared with other images.
    pub(crate) fn share_budget(&mut self, together: &TableBudget) {
        self.l2.share(together);
        self.refcounts.slices.share(together);
    }

    /// Looks at the next `count` slices of each of its caches, and drops those that nobody used since the last look. Returns their number.
    pub(crate) fn drop_unused_slices(&mut self, count: usize) -> usize {
        self.l2.drop_unused(count) + self.refcounts.slices.drop_unused(count)
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns true if a request is remapping any of the guest's bytes from `offset` on.
    #[inline]
    pub(crate) fn is_in_flight(&self, offset: GuestOffset, len: u64) -> bool {
        self.in_flight.touches(&(offset..offset + len))
    }

    /// Returns the guest bytes of a cluster.
    #[inline]
    fn bytes_of(&self, cluster: GuestCluster) -> Range<GuestOffset> {
        self.geometry.guest_offset(cluster)..self.geometry.guest_offset(cluster + 1)
    }

    /// Returns true if the mapping in memory is the durable one, and nothing waits to be freed.
    pub(crate) fn is_clean(&self) -> bool {
        !self.flushing
            && self.l2.dirty_count() == 0
            && self.refcounts.slices.dirty_count() == 0
            && self.refcounts.dirty_parts.is_empty()
            && self.refcounts.moved_from.is_empty()
            && self.l1_dirty_parts.is_empty()
            && self.fresh_tables.is_empty()
            && !self.header_dirty
            && self.refcounts.fresh.is_empty()
            && self.drops.is_empty()
    }
}

fn corrupt(error: EntryError) -> Blocked {
    tracing::error!(%error, "the mapping is corrupt");
    Blocked::Failed(IoError::Corrupt)
}
