//! The table cache and what shares its memory.

use super::*;
use crate::format::{ClusterBits, HostCluster, L2Entry, L2TableMut, L2TableRef, RefcountOrder, Version};
use cluster_use::UseMap;
use refcounts::NO_LIMIT;

const CACHE_BYTES: u64 = 1 << 20;
const CLUSTER: u64 = 1 << 16;

/// An image of so many L2 tables, each of which maps 512 MiB.
fn metadata(tables: u64) -> Metadata {
    let size = tables << 29;
    let geometry = Geometry::new(Version::V3, ClusterBits::DEFAULT, RefcountOrder::DEFAULT, size);
    let place = TablePlace {
        offset: HostOffset::new(CLUSTER),
        clusters: 1,
    };
    let end = HostCluster::new(1 << 40);
    let mut refcounts = Refcounts::new(geometry, Vec::new(), place, end, NO_LIMIT, CACHE_BYTES);
    refcounts.uses = UseMap::without_structures(CACHE_BYTES);
    let table = |index| {
        L1Entry::encode(L2TableRef {
            host: HostOffset::new((3 + index) * CLUSTER),
            copied: true,
        })
    };
    let l1 = (0..tables).map(table).collect();
    Metadata::new(geometry, l1, HostOffset::new(0), refcounts, CACHE_BYTES, 0)
}

/// Loads slices whose entries lead to clusters far apart, so that the use of each slice's is in a page of its own.
/// Returns how many of them are cached then.
fn load(metadata: &mut Metadata, slices: u64) -> u64 {
    for slice in 0..slices {
        let mut bytes = vec![0; metadata.l2.slice_bytes()].into_boxed_slice();
        let mut entries = L2TableMut::new(&mut bytes, &metadata.geometry);
        for index in 0..512 {
            let cluster = (1 + slice) * 4096 + index as u64;
            let host = HostOffset::new(cluster * CLUSTER);
            entries.set(index, L2Entry::data(host, true, &metadata.geometry));
        }
        assert!(metadata.adopt_slice(slice, bytes.into()).is_empty());
    }
    (0..slices).filter(|&slice| metadata.l2.contains(slice)).count() as u64
}

#[test]
fn known_uses_count_towards_the_table_cache() {
    let mut metadata = metadata(64);
    let cached = load(&mut metadata, 400);
    let known = metadata.refcounts.uses.memory_bytes() as u64;
    assert!(known > 400 * 512, "{known}");
    let slices = CACHE_BYTES - known;
    assert_eq!(cached, slices / 4096);
    // Past its share, no more is known.
    load(&mut metadata, 1000);
    let known = metadata.refcounts.uses.memory_bytes() as u64;
    assert!(known <= CACHE_BYTES / cluster_use::CACHE_PARTS + 4096, "{known}");
}

#[test]
fn table_cache_that_holds_every_slice_goes_on_holding_it() {
    let slices = CACHE_BYTES / 4096;
    let mut metadata = metadata(slices / 16);
    assert_eq!(load(&mut metadata, slices), slices);
}
