//! The place and size of a new refcount structure, which counts itself.

use std::collections::BTreeSet;
use std::ops::Range;

use super::counts::CountMap;
use crate::format::refcount::REFCOUNT_TABLE_MAX_BYTES;
use crate::format::{Geometry, HostCluster, HostOffset};

/// A refcount structure to be written into unused clusters: blocks first, then the table.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct RefcountLayout {
    /// The first cluster of the structure.
    pub(crate) start: HostCluster,
    /// The refcount table entries that have a block; block number `i` counts from zero in here.
    pub(crate) blocks: Vec<u64>,
    /// The number of clusters that the table fills.
    pub(crate) table_clusters: u64,
}

impl RefcountLayout {
    /// Plans a structure that starts at `start`, after everything that is counted. It holds the counts, which need
    /// the table entries `blocks`, and itself. Returns `None` if the table would be larger than QEMU accepts.
    pub(crate) fn plan(mut blocks: BTreeSet<u64>, start: HostCluster, geometry: &Geometry) -> Option<Self> {
        let index = |cluster| geometry.refcount_table_index(HostCluster::new(cluster)) as u64;
        let mut table_clusters = 0;
        loop {
            let end = start.index() + blocks.len() as u64 + table_clusters;
            blocks.extend(index(start.index())..=index(end.saturating_sub(1).max(start.index())));
            let entries = blocks.last().map_or(0, |last| last + 1);
            let needed = geometry.clusters_for(entries * 8).max(1);
            if needed * geometry.cluster_size() > REFCOUNT_TABLE_MAX_BYTES {
                return None;
            }
            let new_end = start.index() + blocks.len() as u64 + needed;
            table_clusters = needed;
            if new_end == end {
                break;
            }
        }
        Some(Self {
            start,
            blocks: blocks.into_iter().collect(),
            table_clusters,
        })
    }

    /// Returns all clusters of the structure.
    pub(crate) fn clusters(&self) -> std::ops::Range<u64> {
        let start = self.start.index();
        start..start + self.blocks.len() as u64 + self.table_clusters
    }

    /// Returns the offset of block number `i` of [`Self::blocks`].
    pub(crate) fn block_at(&self, i: u64, geometry: &Geometry) -> HostOffset {
        geometry.host_offset(HostCluster::new(self.start.index() + i))
    }

    /// Returns the offset of the table.
    pub(crate) fn table_at(&self, geometry: &Geometry) -> HostOffset {
        self.block_at(self.blocks.len() as u64, geometry)
    }

    /// Returns the length of the table in bytes, whole clusters.
    pub(crate) fn table_bytes(&self, geometry: &Geometry) -> u64 {
        self.table_clusters * geometry.cluster_size()
    }

    /// Returns bytes `part` of the table, which are whole entries.
    pub(crate) fn table_part(&self, part: Range<u64>, geometry: &Geometry) -> Vec<u8> {
        let mut bytes = vec![0; (part.end - part.start) as usize];
        let entries = part.start / 8..part.end / 8;
        let first = self.blocks.partition_point(|&index| index < entries.start);
        for (i, &index) in (first as u64..).zip(self.blocks.iter().skip(first)) {
            if index >= entries.end {
                break;
            }
            let entry = self.block_at(i, geometry).bytes().to_be_bytes();
            bytes[(index - entries.start) as usize * 8..][..8].copy_from_slice(&entry);
        }
        bytes
    }

    /// Returns the part of block number `i` that counts clusters of `window`: its offset in the block, and its bytes.
    /// `None` if there is no such part. A window begins and ends at a chunk, so a part is whole sectors.
    pub(crate) fn block_part(
        &self,
        i: usize,
        counts: &CountMap,
        window: &Range<u64>,
        geometry: &Geometry,
    ) -> Option<(u64, Vec<u8>)> {
        let per_block = geometry.refcount_block_entries() as u64;
        let first = self.blocks[i] << geometry.refcount_block_bits();
        let (from, to) = (window.start.max(first), window.end.min(first + per_block));
        if from >= to {
            return None;
        }
        let bytes_of = |entries: u64| entries * u64::from(geometry.refcount_bits()) / 8;
        let mut part = vec![0; bytes_of(to - from) as usize];
        for (cluster, count) in counts.nonzero_in(from..to) {
            let at = (cluster - from) as usize;
            let written = geometry.refcount_order().write(&mut part, at, count);
            assert_eq!(written, Ok(()), "counts are kept within the refcount width");
        }
        Some((bytes_of(from - first), part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ClusterBits, RefcountOrder, Version};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn refcount_plan_counts_used_clusters_and_itself(
            bits in 9u32..=16, order in 0u32..=6, used in prop::collection::btree_set(0u64..200_000, 0..50),
        ) {
            let geometry = Geometry::new(
                Version::V3,
                ClusterBits::parse(bits).unwrap(),
                RefcountOrder::parse(order).unwrap(),
                0,
            );
            let blocks = used.iter().map(|&used| geometry.refcount_table_index(HostCluster::new(used)) as u64);
            let start = HostCluster::new(used.last().map_or(0, |last| last + 1));
            let plan = RefcountLayout::plan(blocks.collect(), start, &geometry).unwrap();
            for cluster in used.iter().copied().chain(plan.clusters()) {
                let index = geometry.refcount_table_index(HostCluster::new(cluster)) as u64;
                prop_assert!(plan.blocks.contains(&index));
                prop_assert!(index * 8 < plan.table_clusters * geometry.cluster_size());
            }
            prop_assert!(plan.blocks.is_sorted_by(|a, b| a < b));
        }
    }
}
