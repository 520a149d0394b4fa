//! Sets of host clusters kept as runs: freed clusters that may be used again.

use std::collections::BTreeMap;

use crate::format::HostCluster;
use crate::invariant::invariant;

/// Free runs of host clusters. Each run records whether it is known to read as zeros.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeRuns {
    /// First cluster → (number of clusters, known to be zero).
    runs: BTreeMap<HostCluster, (u64, bool)>,
}

impl FreeRuns {
    /// Returns the number of clusters in the set.
    #[cfg(test)]
    pub(crate) fn total(&self) -> u64 {
        self.runs.values().map(|run| run.0).sum()
    }

    /// Returns true if there is no cluster in the set.
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Takes no run to be zeros from now on.
    pub(crate) fn forget_zeros(&mut self) {
        self.runs.values_mut().for_each(|(_, zero)| *zero = false);
    }

    /// Adds `count` clusters from `first` on, which are not in the set.
    pub(crate) fn insert(&mut self, first: HostCluster, count: u64, zero: bool) {
        if count == 0 {
            return;
        }
        let (mut first, mut count) = (first, count);
        if let Some((&before, &(len, kind))) = self.runs.range(..first).next_back() {
            // It would be handed out twice.
            invariant!(before + len <= first, "cluster {first} is freed twice");
            if before + len == first && kind == zero {
                self.runs.remove(&before);
                first = before;
                count += len;
            }
        }
        invariant!(
            self.runs
                .range(first..)
                .next()
                .is_none_or(|(&behind, _)| first + count <= behind),
            "a cluster in {count} from {first} on is freed twice"
        );
        if let Some(&(len, kind)) = self.runs.get(&(first + count))
            && kind == zero
        {
            self.runs.remove(&(first + count));
            count += len;
        }
        self.runs.insert(first, (count, zero));
    }

    /// Takes at most `count` neighbouring clusters. Returns the first cluster, their number, and true if they are
    /// known to be zero. A run that is long enough is preferred among the first few.
    pub(crate) fn take(&mut self, count: u64) -> Option<(HostCluster, u64, bool)> {
        let fits = self.runs.iter().take(32).find(|(_, run)| run.0 >= count);
        let (&first, &(len, zero)) = fits.or_else(|| self.runs.iter().next())?;
        self.runs.remove(&first);
        let taken = len.min(count);
        if taken < len {
            self.runs.insert(first + taken, (len - taken, zero));
        }
        Some((first, taken, zero))
    }

    /// As [`FreeRuns::take`], of the clusters before `bound`.
    pub(crate) fn take_below(&mut self, count: u64, bound: HostCluster) -> Option<(HostCluster, u64, bool)> {
        let below = self.runs.range(..bound);
        let mut below = below.map(|(&first, &(len, zero))| (first, len.min(bound - first), zero));
        let nearest = below.next()?;
        let fits = std::iter::once(nearest)
            .chain(below.take(31))
            .find(|run| run.1 >= count);
        let (first, len, zero) = fits.unwrap_or(nearest);
        let taken = len.min(count);
        self.remove(first, taken);
        Some((first, taken, zero))
    }

    /// Forgets the clusters from `end` on.
    pub(crate) fn cut(&mut self, end: HostCluster) {
        drop(self.runs.split_off(&end));
        if let Some((&first, run)) = self.runs.iter_mut().next_back() {
            run.0 = run.0.min(end - first);
        }
    }

    /// Returns the first cluster of a run of at least `count`.
    pub(crate) fn find(&self, count: u64) -> Option<HostCluster> {
        let mut runs = self.runs.iter();
        runs.find(|(_, run)| run.0 >= count).map(|(&first, _)| first)
    }

    /// Takes `count` clusters from `first` on; a run of at least that many must begin there.
    pub(crate) fn remove(&mut self, first: HostCluster, count: u64) {
        // The caller has found the run, and its clusters are counted already.
        invariant!(
            self.runs.get(&first).is_some_and(|run| run.0 >= count),
            "no run of {count} clusters begins at {first}"
        );
        if let Some((len, zero)) = self.runs.remove(&first) {
            self.insert(first + count, len.saturating_sub(count), zero);
        }
    }
}

/// Gathers clusters into runs: sorted, neighbours joined.
pub(crate) fn runs_of(mut clusters: Vec<HostCluster>) -> Vec<(HostCluster, u64)> {
    clusters.sort_unstable();
    clusters.dedup();
    let mut runs: Vec<(HostCluster, u64)> = Vec::new();
    for cluster in clusters {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == cluster => *count += 1,
            _ => runs.push((cluster, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(index: u64) -> HostCluster {
        HostCluster::new(index)
    }

    #[test]
    fn free_runs_join_neighbours_if_alike() {
        let mut free = FreeRuns::default();
        free.insert(at(10), 2, true);
        free.insert(at(14), 2, true);
        free.insert(at(12), 2, true);
        assert_eq!(free.take(6), Some((at(10), 6, true)));
        free.insert(at(10), 2, true);
        free.insert(at(12), 2, false);
        assert_eq!(free.take(4), Some((at(10), 2, true)));
        assert_eq!(free.total(), 2);
    }

    #[test]
    fn free_runs_are_empty_until_a_cluster_is_freed() {
        let mut free = FreeRuns::default();
        assert!(free.is_empty());
        free.insert(at(10), 1, true);
        assert!(!free.is_empty());
        assert_eq!(free.take(1), Some((at(10), 1, true)));
        assert!(free.is_empty());
    }

    #[test]
    fn free_runs_forget_that_they_are_zeros() {
        let mut free = FreeRuns::default();
        free.insert(at(10), 2, true);
        free.insert(at(20), 1, true);
        free.forget_zeros();
        assert_eq!(free.take(2), Some((at(10), 2, false)));
        assert_eq!(free.take(1), Some((at(20), 1, false)));
    }

    #[test]
    fn free_runs_keep_the_rest_of_what_is_removed() {
        let mut free = FreeRuns::default();
        free.insert(at(10), 5, true);
        assert_eq!(free.find(2), Some(at(10)));
        free.remove(at(10), 2);
        assert_eq!(free.total(), 3);
        assert_eq!(free.take(5), Some((at(12), 3, true)));
        assert_eq!(free.total(), 0);
    }

    #[test]
    fn free_runs_prefer_a_run_long_enough() {
        let mut free = FreeRuns::default();
        free.insert(at(10), 1, true);
        free.insert(at(20), 8, true);
        assert_eq!(free.take(4), Some((at(20), 4, true)));
        assert_eq!(free.take(9), Some((at(10), 1, true)));
        assert_eq!(free.take(9), Some((at(24), 4, true)));
        assert_eq!(free.take(1), None);
    }

    #[test]
    fn free_runs_below_a_bound_leave_the_others() {
        let mut free = FreeRuns::default();
        free.insert(at(10), 1, true);
        free.insert(at(20), 8, false);
        free.insert(at(40), 8, true);
        assert_eq!(free.take_below(3, at(23)), Some((at(20), 3, false)));
        assert_eq!(free.take_below(3, at(24)), Some((at(10), 1, true)));
        assert_eq!(free.take_below(3, at(24)), Some((at(23), 1, false)));
        assert_eq!(free.take_below(1, at(24)), None);
        assert_eq!(free.total(), 12);
    }

    #[test]
    fn free_runs_are_cut_within_a_run_and_before_one() {
        let mut free = FreeRuns::default();
        free.insert(at(10), 2, true);
        free.insert(at(20), 8, false);
        free.insert(at(40), 8, true);
        free.cut(at(23));
        assert_eq!(free.total(), 5);
        free.cut(at(12));
        assert_eq!((free.total(), free.find(2)), (2, Some(at(10))));
        free.cut(at(10));
        assert!(free.is_empty());
    }

    #[test]
    fn runs_of_sorts_and_joins_scattered_clusters() {
        assert_eq!(
            runs_of([5, 3, 4, 9, 3].map(at).into()),
            vec![(at(3), 3), (at(9), 1)]
        );
    }
}
