//! Bounds on what is known, and what it takes.

use super::*;

#[test]
fn pages_of_known_uses_take_their_share_of_the_cache_at_most() {
    for cache in [4 << 20, 5_000_000, 32 << 20, 1 << 40] {
        let bytes = pages_max(cache) as u64 * PAGE_BYTES as u64;
        assert!(bytes <= cache / CACHE_PARTS && bytes > cache / CACHE_PARTS - PAGE_BYTES as u64);
    }
    assert_eq!(pages_max(64 << 10), PAGES_MIN);
    // Both bits of each cluster of a disk whose tables fill the cache, eight bytes for a cluster.
    for cache in [1 << 20, 32 << 20] {
        assert!(pages_max(cache) as u64 >= 2 * cache.div_ceil(8 * 4096));
    }
}

#[test]
fn use_map_records_no_cluster_past_its_pages() {
    let mut uses = UseMap {
        pages_max: 2,
        ..UseMap::without_structures(0)
    };
    for cluster in [0, 4095, 4096, 8192] {
        uses.given(HostCluster::new(cluster));
    }
    for cluster in [0, 4095, 4096] {
        assert!(uses.check_free(HostCluster::new(cluster)).is_err());
    }
    assert!(
        uses.check_free(HostCluster::new(8192)).is_ok(),
        "there is no page"
    );
    uses.freed(HostCluster::new(4096));
    uses.given(HostCluster::new(8192));
    assert!(
        uses.check_free(HostCluster::new(8192)).is_err(),
        "a page was given up"
    );
}

#[test]
fn use_map_takes_a_page_for_the_neighbours_of_a_cluster() {
    let mut uses = UseMap::without_structures(1 << 20);
    assert_eq!(uses.memory_bytes(), 0);
    for cluster in 0..8 * 4096 {
        uses.given(HostCluster::new(cluster));
    }
    assert_eq!(uses.memory_bytes(), 8 * PAGE_BYTES);
    uses.saw_slice(1);
    assert_eq!(uses.memory_bytes(), 9 * PAGE_BYTES);
    uses.made(ClusterUse::L2Table, HostCluster::new(1), 1);
    assert!(uses.memory_bytes() > 9 * PAGE_BYTES);
}

#[test]
fn use_map_counts_slices_past_its_limit_as_seen() {
    let mut uses = UseMap::without_structures(1 << 20);
    for page in 0..SEEN_PAGES_MAX as u64 {
        assert!(!uses.saw_slice(page * 4096));
    }
    assert!(!uses.saw_slice(1), "there is a page for it");
    assert!(uses.saw_slice(1) && uses.has_seen(1));
    assert!(uses.saw_slice(SEEN_PAGES_MAX as u64 * 4096), "there is none");
    assert_eq!(uses.seen.pages(), SEEN_PAGES_MAX);
}
