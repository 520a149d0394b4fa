//! Counts of what the engine does to answer requests: of tables it had to read, clusters it has allocated and freed, and so on.
//!
//! Each is counted where something else is done anyway that costs far more: no request that finds all it needs in memory counts
//! anything.

use block::sync::atomic::{AtomicU64, Ordering};
use serde::{Deserialize, Serialize};

use super::{QcowDisk, Shared};

/// The work of one open image's engine since the image was opened.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct EngineCounts {
    /// Slices of L2 tables, of up to 4 KiB, that were not in the cache and were read.
    pub l2_slices_read: u64,
    /// Slices of refcount blocks that were not in the cache and were read.
    pub refcount_slices_read: u64,
    /// Host clusters that were allocated, for data and for tables.
    pub clusters_allocated: u64,
    /// Host clusters that were freed.
    pub clusters_freed: u64,
    /// Rounds that made changes durable, each for one or more FLUSHes, or for none.
    pub flush_rounds: u64,
    /// Compressed clusters that were read and inflated.
    pub clusters_inflated: u64,
}

/// The counters of [`Shared`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) l2_slices_read: AtomicU64,
    pub(super) refcount_slices_read: AtomicU64,
    pub(super) flush_rounds: AtomicU64,
    pub(super) clusters_inflated: AtomicU64,
}

/// Counts one.
pub(super) fn count(counter: &AtomicU64) {
    count_many(counter, 1);
}

pub(super) fn count_many(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Shared {
    fn counts(&self) -> EngineCounts {
        let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        // With a poisoned lock nothing is allocated any more.
        let clusters = self.read().map(|metadata| metadata.refcounts.traffic);
        let clusters = clusters.unwrap_or_default();
        EngineCounts {
            l2_slices_read: counted(&counters.l2_slices_read),
            refcount_slices_read: counted(&counters.refcount_slices_read),
            clusters_allocated: clusters.allocated,
            clusters_freed: clusters.freed,
            flush_rounds: counted(&counters.flush_rounds),
            clusters_inflated: counted(&counters.clusters_inflated),
        }
    }
}

impl QcowDisk {
    /// Returns what the engine has done since the image was opened.
    #[must_use]
    pub fn counts(&self) -> EngineCounts {
        self.shared.counts()
    }
}
