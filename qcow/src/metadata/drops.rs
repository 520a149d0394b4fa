//! Drops: references that left the mapping, and the space that waits to be freed with them.
//!
//! A file grows only while little space waits ([`Metadata::holds_growth`]). Otherwise a discard and a write in turns would
//! let it grow to twice its size, because a dropped cluster is usable only after a FLUSH round and a grace period.
//!
//! Invariant: a cluster counts as waiting from its drop until its batch has been freed or has failed to be.

use super::Metadata;
use crate::format::HostCluster;

/// References to neighbouring host clusters, one to each, that left the mapping.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Dropped {
    pub(crate) first: HostCluster,
    pub(crate) count: u64,
}

impl Dropped {
    /// Returns one reference to one cluster.
    pub(crate) const fn one(cluster: HostCluster) -> Self {
        Self {
            first: cluster,
            count: 1,
        }
    }
}

/// A list of drops.
#[derive(Debug, Default)]
pub(crate) struct Drops {
    list: Vec<Dropped>,
    /// The number of clusters that had no other reference.
    sole: u64,
}

impl Drops {
    /// Adds a drop. `is_sole`: nothing else refers to its clusters, which it frees.
    pub(crate) fn push(&mut self, dropped: Dropped, is_sole: bool) {
        if is_sole {
            self.sole += dropped.count;
        }
        self.list.push(dropped);
    }

    /// Moves all drops of `later` to the end of this list.
    pub(crate) fn append(&mut self, later: &mut Self) {
        self.list.append(&mut later.list);
        self.sole += std::mem::take(&mut later.sole);
    }

    /// Returns true if there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the number of drops.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns the number of clusters that these drops free.
    pub(crate) fn sole(&self) -> u64 {
        self.sole
    }

    /// Returns the drops.
    pub(crate) fn list(&self) -> &[Dropped] {
        &self.list
    }
}

/// The clusters that wait to be freed: in drops, in a write-back set, or past that.
#[derive(Debug, Default)]
pub(crate) struct Returning {
    clusters: u64,
    /// The number of clusters that could not be freed in time: growth is not held back for them.
    given_up: u64,
}

impl Returning {
    /// Records that `clusters` more wait.
    pub(super) fn begin(&mut self, clusters: u64) {
        self.clusters += clusters;
    }

    /// Records that `clusters` do not wait any more.
    pub(crate) fn end(&mut self, clusters: u64) {
        self.clusters = self.clusters.saturating_sub(clusters);
        self.given_up = 0;
    }

    /// Records that the clusters that wait now are not freed in time.
    pub(crate) fn give_up(&mut self) {
        self.given_up = self.clusters;
    }
}

/// The permission of a write to let the file grow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Growth {
    /// Not while much space waits to be freed.
    Held,
    /// At any time.
    Free,
}

/// The number of clusters that may wait in the smallest file before growth is held back.
const WAITING_MIN: u64 = 16;
/// The part of a larger file that may wait: one in so many clusters.
const WAITING_SHARE: u64 = 16;

impl Metadata {
    /// Adds a drop. `is_sole`: nothing else refers to its clusters, which it frees.
    pub(crate) fn drop_clusters(&mut self, dropped: Dropped, is_sole: bool) {
        if is_sole {
            self.returning.begin(dropped.count);
        }
        self.drops.push(dropped, is_sole);
    }

    /// Returns the number of clusters that may wait before growth is held back.
    fn waiting_max(&self) -> u64 {
        (self.refcounts.end().index() / WAITING_SHARE).max(WAITING_MIN)
    }

    /// Returns true if the next data cluster would make the file longer although much space waits to be freed.
    #[inline]
    pub(crate) fn holds_growth(&self) -> bool {
        // The first condition decides where nothing is discarded.
        self.returning.clusters > WAITING_MIN
            && self.refcounts.is_growing()
            && self.returning.clusters > self.returning.given_up + self.waiting_max()
    }

    /// Returns true if a FLUSH round should begin for the drops: the file grows, and growth is going to be held back.
    #[inline]
    pub(crate) fn wants_return(&self) -> bool {
        self.drops.sole > WAITING_MIN / 2
            && self.refcounts.is_growing()
            && self.drops.sole > self.waiting_max() / 2
    }

    /// Returns true if most of the space that waits to be freed is in drops that no round has taken.
    pub(crate) fn is_mostly_dropped(&self) -> bool {
        2 * self.drops.sole >= self.returning.clusters
    }
}
