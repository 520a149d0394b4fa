//! The metadata of an empty image, for tests.

use super::refcounts::NO_LIMIT;
use super::*;
use crate::format::{ClusterBits, HostCluster, L2EntryWidth, RefcountOrder, RefcountTableEntry, Version};

/// The cluster size in bytes.
pub(super) const CLUSTER: u64 = 1 << 16;

/// An empty image of 1 GiB: header, refcount table, refcount block.
pub(super) fn metadata() -> Metadata {
    metadata_of(L2EntryWidth::Standard)
}

/// The same with L2 entries of this width.
pub(super) fn metadata_of(width: L2EntryWidth) -> Metadata {
    let geometry = Geometry::new(Version::V3, ClusterBits::DEFAULT, RefcountOrder::DEFAULT, 1 << 30)
        .with_l2_entry_width(width);
    let mut table = vec![RefcountTableEntry::UNALLOCATED; geometry.table_entries_per_cluster()];
    table[0] = RefcountTableEntry::encode(HostOffset::new(2 * CLUSTER));
    let place = TablePlace {
        offset: HostOffset::new(CLUSTER),
        clusters: 1,
    };
    let mut refcounts = Refcounts::new(geometry, table, place, HostCluster::new(3), NO_LIMIT, 1 << 20);
    refcounts.slices.insert(0, vec![0; 4096].into(), false);
    for cluster in 0..3 {
        refcounts
            .set(HostCluster::new(cluster), 1)
            .expect("the slice is cached");
    }
    let l1 = vec![L1Entry::UNALLOCATED; ((1 << 30) / geometry.l2_table_span()) as usize];
    Metadata::new(geometry, l1, HostOffset::new(0), refcounts, 1 << 20, 0)
}
