//! The clusters that are structures: a sorted list of those that an image was opened with, and the changes since.
//!
//! An image may claim millions, scattered at will: the list takes eight bytes for each. Changes are kept apart until
//! there are many, and are then merged into it.

use std::cmp::Ordering;

use rustc_hash::FxHashMap;

use super::place;
use crate::format::{ClusterUse, HostCluster};

/// The number of changes that are kept apart before they are merged into the list.
const CHANGES_MAX: usize = 1 << 18;

/// A cluster's number and its structure, as one number that sorts by cluster.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Packed(u64);

impl Packed {
    fn new(cluster: HostCluster, structure: ClusterUse) -> Self {
        Self((cluster.index() << ClusterUse::BITS) | structure.number())
    }

    fn cluster(self) -> HostCluster {
        HostCluster::new(self.0 >> ClusterUse::BITS)
    }

    fn structure(self) -> Option<ClusterUse> {
        ClusterUse::from_number(self.0 & ((1 << ClusterUse::BITS) - 1))
    }
}

/// The changes of 64 neighbouring clusters.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    made: u64,
    gone: u64,
}

/// The clusters of structures.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    sorted: Vec<Packed>,
    /// By cluster / 64.
    changes: FxHashMap<u64, Change>,
    /// The structures that were made since.
    made: FxHashMap<HostCluster, ClusterUse>,
}

impl Known {
    /// Creates a list with room for `count` clusters, to be added with [`Known::push`].
    pub(super) fn with_capacity(count: u64) -> Self {
        Self {
            sorted: Vec::with_capacity(usize::try_from(count).unwrap_or(0)),
            ..Self::default()
        }
    }

    /// Returns the memory of the list and of the changes since, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        // A hash map has an eighth more places than its capacity, and a byte beside each.
        let places = |capacity: usize, entry: usize| (capacity * 8).div_ceil(7) * (entry + 1);
        self.sorted.capacity() * size_of::<Packed>()
            + places(self.changes.capacity(), size_of::<(u64, Change)>())
            + places(self.made.capacity(), size_of::<(HostCluster, ClusterUse)>())
    }

    /// Adds a cluster, in any order; [`Known::sort`] makes it known.
    pub(super) fn push(&mut self, structure: ClusterUse, cluster: HostCluster) {
        self.sorted.push(Packed::new(cluster, structure));
    }

    /// Sorts the pushed clusters. A shared cluster keeps its first structure.
    ///
    /// # Errors
    ///
    /// A cluster, and two structures that claim it and may not share it.
    pub(super) fn sort(&mut self) -> Result<(), (HostCluster, ClusterUse, ClusterUse)> {
        self.sorted.sort_unstable();
        let mut overlap = None;
        self.sorted.dedup_by(|next, first| {
            if next.cluster() != first.cluster() {
                return false;
            }
            if let (Some(next), Some(other)) = (next.structure(), first.structure())
                && !next.is_shared_with(other)
            {
                overlap.get_or_insert((first.cluster(), next, other));
            }
            true
        });
        overlap.map_or(Ok(()), Err)
    }

    /// Returns the clusters of the list, without the changes since.
    pub(super) fn iter(&self) -> impl Iterator<Item = (HostCluster, ClusterUse)> {
        let known = self.sorted.iter();
        known.filter_map(|packed| Some((packed.cluster(), packed.structure()?)))
    }

    /// Returns the structure that a cluster is part of.
    pub(super) fn find(&self, cluster: HostCluster) -> Option<ClusterUse> {
        let (key, bit) = place(cluster.index());
        if let Some(change) = self.changes.get(&key) {
            if change.made & bit != 0 {
                return self.made.get(&cluster).copied();
            }
            if change.gone & bit != 0 {
                return None;
            }
        }
        let found = self
            .sorted
            .binary_search_by_key(&cluster, |packed| packed.cluster());
        self.sorted.get(found.ok()?)?.structure()
    }

    /// Returns the last cluster that is a structure.
    pub(super) fn last(&self) -> Option<HostCluster> {
        let mut listed = self.sorted.iter().rev().map(|packed| packed.cluster());
        let listed = listed.find(|&cluster| self.find(cluster).is_some());
        listed.max(self.made.keys().copied().max())
    }

    /// Returns a bit for each of the 64 clusters of `key`, set for structures.
    pub(super) fn bits(&self, key: u64) -> u64 {
        let key_of = |packed: &Packed| packed.cluster().index() / 64;
        let from = self.sorted.partition_point(|packed| key_of(packed) < key);
        let here = self.sorted.get(from..).unwrap_or_default().iter();
        let listed = here
            .take_while(|packed| key_of(packed) == key)
            .fold(0, |bits, packed| bits | place(packed.cluster().index()).1);
        let change = self.changes.get(&key).copied().unwrap_or_default();
        (listed & !change.gone) | change.made
    }

    /// Records that a cluster is a structure from now on.
    pub(super) fn insert(&mut self, cluster: HostCluster, structure: ClusterUse) {
        let (key, bit) = place(cluster.index());
        let change = self.changes.entry(key).or_default();
        change.made |= bit;
        change.gone &= !bit;
        self.made.insert(cluster, structure);
        self.merge_if_many();
    }

    /// Records that a cluster is no structure any more.
    pub(super) fn remove(&mut self, cluster: HostCluster) {
        if self.find(cluster).is_none() {
            return;
        }
        let (key, bit) = place(cluster.index());
        let change = self.changes.entry(key).or_default();
        change.made &= !bit;
        change.gone |= bit;
        self.made.remove(&cluster);
        self.merge_if_many();
    }

    fn merge_if_many(&mut self) {
        if self.changes.len() < CHANGES_MAX && self.made.len() < CHANGES_MAX {
            return;
        }
        let changes = std::mem::take(&mut self.changes);
        let made = std::mem::take(&mut self.made);
        let mut made: Vec<Packed> = made.into_iter().map(|(at, kind)| Packed::new(at, kind)).collect();
        made.sort_unstable();
        let mut made = made.into_iter().peekable();
        let mut sorted = Vec::with_capacity(self.sorted.len() + made.len());
        for &packed in &self.sorted {
            let is_before = |next: &Packed| next.cluster().cmp(&packed.cluster()) == Ordering::Less;
            while let Some(next) = made.next_if(is_before) {
                sorted.push(next);
            }
            let (key, bit) = place(packed.cluster().index());
            let change = changes.get(&key).copied().unwrap_or_default();
            if (change.gone | change.made) & bit == 0 {
                sorted.push(packed);
            }
        }
        sorted.extend(made);
        self.sorted = sorted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Method: the same changes in a plain map, with few enough clusters that each is made and freed often, and more
    /// changes than are kept apart.
    #[test]
    fn known_changes_and_merges_like_a_plain_map() {
        let mut known = Known::default();
        let mut model = FxHashMap::default();
        for cluster in (0..5000).rev() {
            known.push(ClusterUse::L2Table, HostCluster::new(cluster * 7));
            model.insert(HostCluster::new(cluster * 7), ClusterUse::L2Table);
        }
        known.sort().expect("each cluster once");
        let mut random = ringdisk_gen::Random::new(1);
        for round in 0..3 * CHANGES_MAX as u64 {
            let state = random.draw();
            let cluster = HostCluster::new(state % (1 << 40) * u64::from(round % 5 < 3) + state % 40_000);
            if round % 5 == 4 {
                known.remove(cluster);
                model.remove(&cluster);
            } else {
                known.insert(cluster, ClusterUse::RefcountBlock);
                model.insert(cluster, ClusterUse::RefcountBlock);
            }
        }
        assert!(known.changes.len() < CHANGES_MAX && known.made.len() < CHANGES_MAX);
        assert!(known.sorted.len() > CHANGES_MAX);
        for (&cluster, &structure) in &model {
            assert_eq!(known.find(cluster), Some(structure));
        }
        for index in 0..40_100 {
            let cluster = HostCluster::new(index);
            assert_eq!(known.find(cluster), model.get(&cluster).copied(), "{cluster}");
            let bit = known.bits(index / 64) >> (index % 64) & 1;
            assert_eq!(bit == 1, model.contains_key(&cluster), "{cluster}");
        }
    }

    #[test]
    fn known_sort_reports_forbidden_sharing_of_a_cluster() {
        let mut known = Known::default();
        for structure in [
            ClusterUse::SnapshotL2Table,
            ClusterUse::L2Table,
            ClusterUse::SnapshotL2Table,
        ] {
            known.push(structure, HostCluster::new(9));
        }
        assert_eq!(known.sort(), Ok(()));
        assert_eq!(known.find(HostCluster::new(9)), Some(ClusterUse::L2Table));
        known.push(ClusterUse::RefcountBlock, HostCluster::new(9));
        assert_eq!(
            known.sort(),
            Err((
                HostCluster::new(9),
                ClusterUse::RefcountBlock,
                ClusterUse::L2Table
            ))
        );
    }
}
