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

    /// Returns the number of clusters that wait.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::metadata;

    /// Metadata whose next data cluster makes a file of `clusters` longer.
    fn growing(clusters: u64) -> Metadata {
        let mut metadata = metadata();
        metadata.refcounts.end = HostCluster::new(clusters);
        metadata.refcounts.cursor = HostCluster::new(clusters);
        metadata
    }

    /// Drops so many clusters that nothing else refers to.
    fn drop_sole(metadata: &mut Metadata, count: u64) {
        let first = HostCluster::new(8);
        metadata.drop_clusters(Dropped { first, count }, true);
    }

    #[test]
    fn drops_count_only_clusters_that_they_free() {
        let mut drops = Drops::default();
        assert!(drops.is_empty());
        let (first, second) = (HostCluster::new(3), HostCluster::new(20));
        drops.push(Dropped { first, count: 2 }, true);
        drops.push(Dropped::one(second), false);
        assert!(!drops.is_empty());
        assert_eq!((drops.len(), drops.sole()), (2, 2));
        assert_eq!(drops.list(), [Dropped { first, count: 2 }, Dropped::one(second)]);
        let mut later = Drops::default();
        later.push(
            Dropped {
                first: second,
                count: 4,
            },
            true,
        );
        drops.append(&mut later);
        assert_eq!((drops.len(), drops.sole()), (3, 6));
        assert_eq!((later.is_empty(), later.sole()), (true, 0));
    }

    #[test]
    fn growth_is_held_while_a_sixteenth_of_the_file_waits() {
        for (file, most) in [(16, 16), (256, 16), (640, 40)] {
            let mut metadata = growing(file);
            drop_sole(&mut metadata, most);
            assert!(!metadata.holds_growth(), "{most} of {file} may wait");
            drop_sole(&mut metadata, 1);
            assert!(metadata.holds_growth(), "{most} + 1 of {file} wait");
            metadata.returning.end(1);
            assert!(!metadata.holds_growth(), "{most} of {file} wait again");
        }
    }

    #[test]
    fn growth_is_not_held_for_what_was_given_up() {
        let mut metadata = growing(16);
        drop_sole(&mut metadata, 20);
        metadata.returning.give_up();
        drop_sole(&mut metadata, 16);
        assert!(!metadata.holds_growth());
        drop_sole(&mut metadata, 1);
        assert!(metadata.holds_growth());
        // A batch that was freed after all: the next ones may be, too.
        metadata.returning.end(20);
        assert!(metadata.holds_growth());
    }

    #[test]
    fn drops_want_a_round_before_growth_is_held() {
        for (file, most) in [(16, 8), (640, 20)] {
            let mut metadata = growing(file);
            drop_sole(&mut metadata, most);
            assert!(!metadata.wants_return(), "{most} of {file} may wait");
            drop_sole(&mut metadata, 1);
            assert!(metadata.wants_return(), "{most} + 1 of {file} wait");
        }
    }

    #[test]
    fn nothing_is_held_while_the_file_has_space() {
        let mut metadata = growing(16);
        drop_sole(&mut metadata, 64);
        metadata.refcounts.free.insert(HostCluster::new(4), 1, true);
        assert!(!metadata.holds_growth() && !metadata.wants_return());
        let mut metadata = growing(16);
        metadata.refcounts.cursor = HostCluster::new(15);
        drop_sole(&mut metadata, 64);
        assert!(!metadata.holds_growth() && !metadata.wants_return());
    }

    #[test]
    fn space_is_mostly_dropped_until_a_round_takes_half() {
        let mut metadata = growing(16);
        drop_sole(&mut metadata, 4);
        assert!(metadata.is_mostly_dropped());
        metadata.returning.begin(4);
        assert!(metadata.is_mostly_dropped(), "half of it");
        metadata.returning.begin(1);
        assert!(!metadata.is_mostly_dropped(), "less than half");
    }
}
