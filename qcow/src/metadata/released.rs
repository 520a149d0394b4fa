//! Sets of clusters, above all of those that lose their last reference in an operation that changes the metadata as a whole.

use rustc_hash::FxHashMap;

use super::Dropped;
use crate::format::HostCluster;

/// The most runs of clusters that an operation may free: 256 MiB of [`Dropped`].
const RUNS_MAX: u64 = 1 << 24;

/// Clusters whose last reference is given up once the next state is in force, each once. A bit for each.
#[derive(Debug, Default)]
pub(crate) struct Released {
    /// By cluster / 64.
    words: FxHashMap<u64, u64>,
    runs: u64,
}

fn place(index: u64) -> (u64, u64) {
    (index / 64, 1 << (index % 64))
}

impl Released {
    /// Returns true if no cluster is in the set.
    pub(crate) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns true if the cluster is in the set.
    pub(crate) fn contains(&self, cluster: HostCluster) -> bool {
        self.has(cluster.index())
    }

    fn has(&self, index: u64) -> bool {
        let (key, bit) = place(index);
        self.words.get(&key).is_some_and(|word| word & bit != 0)
    }

    /// Adds a cluster. Returns false if it was there before.
    pub(crate) fn insert(&mut self, cluster: HostCluster) -> bool {
        let index = cluster.index();
        if self.has(index) {
            return false;
        }
        let before = index.checked_sub(1).is_some_and(|index| self.has(index));
        let behind = self.has(index.saturating_add(1));
        match (before, behind) {
            (false, false) => self.runs += 1,
            (true, true) => self.runs -= 1,
            _ => {}
        }
        let (key, bit) = place(index);
        *self.words.entry(key).or_default() |= bit;
        true
    }

    /// Creates a set that has room for one more run.
    #[cfg(test)]
    pub(super) fn nearly_full() -> Self {
        Self {
            runs: RUNS_MAX - 1,
            ..Self::default()
        }
    }

    /// Returns true if the clusters are in more runs than an operation may free.
    pub(crate) fn is_full(&self) -> bool {
        self.runs > RUNS_MAX
    }

    /// Returns one reference to each cluster, in order.
    pub(crate) fn into_drops(self) -> Vec<Dropped> {
        let mut words: Vec<(u64, u64)> = self.words.into_iter().collect();
        words.sort_unstable();
        let mut drops: Vec<Dropped> = Vec::new();
        for (key, mut word) in words {
            while word != 0 {
                let start = word.trailing_zeros();
                let count = u64::from((word >> start).trailing_ones());
                let first = HostCluster::new(key * 64 + u64::from(start));
                match drops.last_mut() {
                    Some(last) if last.first + last.count == first => last.count += count,
                    _ => drops.push(Dropped { first, count }),
                }
                // A whole word has no bit left to shift out.
                let taken = u64::MAX.checked_shr(64 - count as u32).unwrap_or_default();
                word &= !(taken << start);
            }
        }
        drops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_clusters_are_dropped_once_and_in_runs() {
        let mut released = Released::default();
        let clusters = [200, 0, 63, 64, 65, 1, 300, 302, 301];
        for cluster in clusters.into_iter().chain(1024..1024 + 192) {
            assert!(released.insert(HostCluster::new(cluster)));
        }
        for cluster in clusters {
            assert!(released.contains(HostCluster::new(cluster)));
            assert!(!released.insert(HostCluster::new(cluster)), "{cluster} is there");
        }
        assert!(!released.contains(HostCluster::new(66)));
        assert_eq!(released.runs, 5);
        let drops = released.into_drops();
        let runs: Vec<(u64, u64)> = drops.iter().map(|run| (run.first.index(), run.count)).collect();
        assert_eq!(runs, [(0, 2), (63, 3), (200, 1), (300, 3), (1024, 192)]);
    }
}
