//! The clusters that metadata refers to.

use std::ops::Range;

use super::super::counts::CountMap;
use crate::format::ClusterUse;

/// The number of references to each cluster, and the first use that is known of it, packed into one integer.
#[derive(Debug)]
pub(super) struct Claims(CountMap);

impl Claims {
    /// More than all tables together can refer to any cluster.
    const COUNT_MAX: u64 = u64::MAX >> ClusterUse::BITS;

    pub(super) fn new(window: Range<u64>) -> Self {
        Self(CountMap::new(window))
    }

    /// Returns the map behind it, to measure its memory.
    pub(super) fn map(&self) -> &CountMap {
        &self.0
    }

    /// Counts references. Returns the use of the cluster that is known already, if any.
    pub(super) fn add(&mut self, cluster: u64, structure: ClusterUse, references: u64) -> Option<ClusterUse> {
        let (other, count) = Self::split(self.0.get(cluster));
        let first = other.unwrap_or(structure);
        let count = count.saturating_add(references).min(Self::COUNT_MAX);
        self.0.set(cluster, count << ClusterUse::BITS | first.number());
        other
    }

    fn split(packed: u64) -> (Option<ClusterUse>, u64) {
        let number = packed & ((1 << ClusterUse::BITS) - 1);
        (ClusterUse::from_number(number), packed >> ClusterUse::BITS)
    }

    /// Returns every cluster that metadata refers to, its first use, and the number of references.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, ClusterUse, u64)> + '_ {
        let claims = self.0.nonzero();
        claims.filter_map(|(cluster, packed)| {
            let (first, count) = Self::split(packed);
            Some((cluster, first?, count))
        })
    }
}
