//! Finding clusters for data and runs of clusters for tables: on files that grow, on devices that do not.

use super::super::{Counted, Released, Relocation};
use super::*;
use crate::format::{ClusterBits, RefcountOrder, Version};

/// Clusters of 512 bytes and counts of 16 bits: 256 counts in a block.
fn geometry() -> Geometry {
    let bits = ClusterBits::parse(9).expect("a cluster size");
    let order = RefcountOrder::from_bits(16).expect("a width");
    Geometry::new(Version::V3, bits, order, 1 << 20)
}

const fn at(cluster: u64) -> HostCluster {
    HostCluster::new(cluster)
}

/// Counts of an image that begins with a header, a refcount table of one cluster and its first block. The file has
/// `file_end` clusters, and room for `limit`.
fn refcounts(file_end: u64, limit: u64) -> Refcounts {
    let mut table = vec![RefcountTableEntry::UNALLOCATED; 64];
    table[0] = RefcountTableEntry::encode(geometry().host_offset(HostCluster::new(2)));
    let place = TablePlace {
        offset: HostOffset::new(512),
        clusters: 1,
    };
    let mut refcounts = Refcounts::new(geometry(), table, place, at(file_end), at(limit), 1 << 20);
    refcounts.slices.insert(0, vec![0; 512].into(), false);
    for cluster in 0..3 {
        refcounts.set(at(cluster), 1).expect("the first block is loaded");
    }
    refcounts
}

const ENOSPC: Stuck = Stuck::Failed(IoError::Host { errno: 28 });

/// Takes single clusters until there are none; returns how many there were.
#[track_caller]
fn fill(refcounts: &mut Refcounts) -> u64 {
    for taken in 0.. {
        match refcounts.allocate(1) {
            Ok(run) => assert_eq!(refcounts.get(run.first), Ok(1)),
            Err(stuck) => {
                assert_eq!(stuck, ENOSPC);
                return taken;
            }
        }
    }
    0
}

#[test]
fn allocate_run_takes_space_at_cursor_within_the_device() {
    let mut refcounts = refcounts(4096, 4096);
    let run = refcounts.allocate(2).expect("an empty device");
    assert_eq!((run.first, run.count), (at(3), 2));
    assert_eq!(refcounts.allocate_run(2), Ok(at(5)));
    assert_eq!(refcounts.allocate(1).map(|run| run.first), Ok(at(7)));
}

#[test]
fn allocate_hands_out_what_it_claimed_before_a_cluster_with_a_wrong_count() {
    let mut refcounts = refcounts(4096, 4096);
    refcounts.uses = UseMap::without_structures(1 << 20);
    refcounts.uses.made(ClusterUse::L2Table, at(5), 1);
    let run = refcounts.allocate(4).expect("two free clusters");
    assert_eq!((run.first, run.count), (at(3), 2));
    let in_use = InUse {
        cluster: at(5),
        by: ClusterUse::L2Table,
    };
    assert_eq!(refcounts.allocate(1), Err(Stuck::InUse(in_use)));
}

/// A device with room for 300 clusters, all in use but a gap: the run does not fit, and everything else goes on.
#[test]
fn allocate_run_without_room_leaves_free_space_usable() {
    let mut refcounts = refcounts(300, 300);
    for cluster in (3..250).step_by(2) {
        refcounts.set(at(cluster), 1).expect("the first block is loaded");
    }
    assert_eq!(refcounts.allocate_run(100), Err(ENOSPC));
    assert_eq!(refcounts.allocate(1).map(|run| run.first), Ok(at(4)));
    // Behind the last one in use there are six in the first block, and 43 and a block of their own in the next.
    assert_eq!(refcounts.allocate_run(44), Err(ENOSPC));
    assert_eq!(refcounts.allocate_run(43), Ok(at(257)));
    assert_eq!(fill(&mut refcounts), 122 + 6);
    assert_eq!(refcounts.end(), at(300));
}

/// The end of the file is being cut off: what is there is used only when there is nothing before it.
#[test]
fn allocate_takes_clusters_before_the_preferred_bound_first() {
    let mut refcounts = refcounts(200, 200);
    fill(&mut refcounts);
    let free = |refcounts: &mut Refcounts, clusters: &[u64]| {
        for &cluster in clusters {
            refcounts.lower(at(cluster), 0, false).expect("it is counted");
        }
    };
    free(&mut refcounts, &[5, 100, 101]);
    refcounts.prefer_below(Some(at(50)));
    let next = |refcounts: &mut Refcounts| refcounts.allocate(2).map(|run| (run.first, run.count));
    assert_eq!(next(&mut refcounts), Ok((at(5), 1)));
    assert_eq!(next(&mut refcounts), Ok((at(100), 2)));
    free(&mut refcounts, &[120, 121, 7, 8, 9]);
    assert_eq!(refcounts.allocate_run(2), Ok(at(7)));
    assert_eq!(refcounts.allocate_run(2), Ok(at(120)));
    free(&mut refcounts, &[100, 101]);
    refcounts.prefer_below(None);
    assert_eq!(
        next(&mut refcounts),
        Ok((at(100), 2)),
        "the one that is long enough"
    );
}

/// A compaction may end while an operation that runs alone builds the next state.
#[test]
fn preferred_bound_that_ended_does_not_come_back_with_the_next_state() {
    let mut refcounts = refcounts(200, 200);
    refcounts.prefer_below(Some(at(50)));
    let mut next = refcounts.next();
    refcounts.prefer_below(None);
    next.switched(&refcounts);
    assert_eq!(next.preferred, None);
}

#[test]
fn allocate_run_reuses_freed_clusters_when_full() {
    let mut refcounts = refcounts(200, 200);
    assert_eq!(fill(&mut refcounts), 197);
    assert_eq!(refcounts.allocate_run(3), Err(ENOSPC));
    for cluster in [20, 50, 51, 52, 53] {
        refcounts.set(at(cluster), 0).expect("the first block is loaded");
        refcounts.release(at(cluster), 1, true);
    }
    assert_eq!(refcounts.allocate_run(3), Ok(at(50)));
    assert_eq!(fill(&mut refcounts), 2);
}

/// A freed run with a slice that is not in memory: its cached part is handed out, and the rest waits. Nothing behind
/// the run goes with it.
#[test]
fn allocate_takes_cached_part_of_a_freed_run() {
    let mut refcounts = refcounts(4096, 4096);
    refcounts.table[1] = RefcountTableEntry::encode(geometry().host_offset(HostCluster::new(3)));
    refcounts.cursor = at(4096);
    refcounts.release(at(250), 10, false);
    let run = |first, count| {
        Ok(Run {
            first: at(first),
            count,
            zero: false,
        })
    };
    assert_eq!(refcounts.allocate(10), run(250, 6));
    assert_eq!(refcounts.allocate(10), Err(Stuck::Load(1)));
    refcounts.slices.insert(1, vec![0; 512].into(), false);
    assert_eq!(refcounts.allocate(10), run(256, 4));
    assert_eq!(refcounts.allocate(10), Err(ENOSPC));
}

/// 64 entries count 16384 clusters. The table grows in time; if it cannot, nothing is left half done.
#[test]
fn refcount_table_on_device_grows_or_stays() {
    for (room, moves) in [(16_384, 0), (16_384 + 2, 0), (16_384 + 3, 1), (20_000, 1)] {
        let mut refcounts = refcounts(room, room);
        let taken = fill(&mut refcounts);
        assert_eq!(refcounts.moved_from.len(), moves, "{room}");
        assert_eq!(
            refcounts.table.len() as u64 * 8,
            refcounts.place.clusters * 512,
            "{room}: the table fits its place"
        );
        let blocks = refcounts
            .table
            .iter()
            .filter(|entry| **entry != RefcountTableEntry::UNALLOCATED);
        let tables = if moves > 0 {
            refcounts.place.clusters + 1
        } else {
            1
        };
        let used = 1 + tables + blocks.count() as u64 + taken;
        let lost = if moves > 0 { 0 } else { room - 16_384 };
        assert_eq!(used + lost, room, "every cluster is in use");
        // What is freed is as good as ever.
        refcounts.set(at(1000), 0).expect("a slice in memory");
        refcounts.release(at(1000), 1, false);
        assert_eq!(fill(&mut refcounts), 1, "{room}");
    }
}

/// The last cluster that the longest table counts is in use: the file cannot grow, and its free space can be allocated
/// all the same.
#[test]
fn allocate_run_reuses_free_space_when_table_is_largest() {
    let mut refcounts = refcounts((1 << 20) * 256, u64::MAX);
    assert_eq!(refcounts.allocate_run(7), Ok(at(3)));
    assert_eq!(refcounts.allocate(1).map(|run| run.first), Ok(at(10)));
    let mut refcounts = self::refcounts((1 << 20) * 256 - 20_000, u64::MAX);
    refcounts.cursor = at((1 << 20) * 256);
    assert_eq!(refcounts.allocate(1), Err(Stuck::Failed(IoError::OutOfRange)));
    assert_eq!(refcounts.allocate(1), Err(Stuck::Failed(IoError::OutOfRange)));
    assert_eq!((refcounts.table.len(), refcounts.place.clusters), (64, 1));
}

/// A run that crosses into ranges without a block: each new block is counted by one that is made with it, never by
/// one that is in use.
#[test]
fn allocate_run_counts_new_blocks_by_new_blocks() {
    for end in [3, 200, 250, 255, 256, 300, 511] {
        for count in [1, 2, 6, 56, 57, 255, 256, 300, 20_000] {
            let mut refcounts = refcounts(end, u64::MAX);
            let first = refcounts.allocate_run(count).expect("a file that grows");
            for (index, entry) in refcounts.table.iter().enumerate().skip(1) {
                let Ok(Some(host)) = entry.decode(&geometry()) else {
                    continue;
                };
                let block = geometry().host_cluster(host);
                let counted_by = refcounts.block_index(block);
                assert!(
                    counted_by > 0,
                    "block {index} is counted by an old one: {end}, {count}"
                );
                assert!(refcounts.fresh.contains(&counted_by));
                assert!(block < first || block >= first + count);
                let last = refcounts.block_index(first + (count - 1));
                assert!(index <= last, "block {index} counts nothing: {end}, {count}");
            }
            for cluster in first.until(first + count) {
                assert_eq!(refcounts.get(cluster), Ok(1), "{end}, {count}");
            }
            assert!(first + count <= at(refcounts.table.len() as u64 * 256));
            assert_eq!(refcounts.end(), first + count);
            // The scan finds what the run left out, and nothing of the run.
            let mut taken = 0;
            while taken < 3 {
                let run = refcounts.allocate(1).expect("a file that grows");
                assert!(run.first < first || run.first >= first + count, "{end}, {count}");
                taken += 1;
            }
        }
    }
}

/// A slice that must be loaded stops the search, which then goes on from there: it never needs all slices at once.
#[test]
fn allocate_run_search_resumes_after_a_slice_load() {
    let mut table = vec![RefcountTableEntry::UNALLOCATED; 4096];
    for (index, entry) in table.iter_mut().enumerate() {
        *entry = RefcountTableEntry::encode(geometry().host_offset(HostCluster::new(100 + index as u64)));
    }
    let place = TablePlace {
        offset: HostOffset::new(512),
        clusters: 64,
    };
    let limit = 4096 * 256;
    let mut refcounts = Refcounts::new(geometry(), table, place, at(limit), at(limit), 0);
    let mut loads = 0;
    let first = loop {
        match refcounts.allocate_run(400) {
            Ok(first) => break first,
            Err(Stuck::Load(slice)) => {
                loads += 1;
                assert!(loads < 5000, "the search begins anew each time");
                // One in ten is used, up to far behind what the cache holds.
                let mut bytes = vec![0; 512];
                if slice < 4000 {
                    bytes.chunks_exact_mut(20).for_each(|some| some[1] = 1);
                }
                refcounts.slices.insert(slice, bytes.into(), false);
            }
            Err(stuck) => panic!("{stuck:?}"),
        }
    };
    assert!((at(3999 * 256)..=at(4000 * 256)).contains(&first), "{first}");
}

/// Clusters of 64 KiB: a block has 16 slices of 4096 bytes.
#[test]
fn refcount_block_slices_are_contiguous() {
    let bits = ClusterBits::parse(16).expect("a cluster size");
    let order = RefcountOrder::from_bits(16).expect("a width");
    let geometry = Geometry::new(Version::V3, bits, order, 1 << 40);
    let mut table = vec![RefcountTableEntry::UNALLOCATED; 8192];
    for (index, cluster) in [(0, 2), (2, 9)] {
        table[index] = RefcountTableEntry::encode(geometry.host_offset(HostCluster::new(cluster)));
    }
    let place = TablePlace {
        offset: HostOffset::new(1 << 16),
        clusters: 1,
    };
    let refcounts = Refcounts::new(geometry, table, place, at(10), NO_LIMIT, 0);
    for (index, block) in [(0, Some(2 << 16)), (1, None), (2, Some(9 << 16))] {
        let slices = refcounts.block_slices(index);
        assert_eq!(slices, index as u64 * 16..(index as u64 + 1) * 16);
        for (number, slice) in slices.enumerate() {
            let offset = block.map(|block: u64| HostOffset::new(block + number as u64 * 4096));
            assert_eq!(refcounts.slice_offset(slice), Ok(offset), "{index}, {number}");
        }
    }
}

#[test]
fn allocate_run_fails_on_corrupt_table_entry_past_end() {
    let mut refcounts = refcounts(300, u64::MAX);
    refcounts.table[1] = RefcountTableEntry::from_raw(1);
    let corrupt = Err(Stuck::Failed(IoError::Corrupt));
    assert_eq!(refcounts.allocate_run(2), corrupt);
    assert_eq!(refcounts.allocate_run(2), corrupt);
    assert_eq!(refcounts.allocate(1).map(|run| run.first), Ok(at(3)));
}

/// The last cluster of a device becomes the block that would count those behind it.
#[test]
fn refcounts_end_includes_block_in_last_cluster() {
    let mut refcounts = refcounts(200, 257);
    assert_eq!(fill(&mut refcounts), 253);
    assert_eq!(refcounts.end(), at(257));
}

#[test]
fn reserve_ahead_takes_a_bounded_eighth_of_the_file() {
    const MIB: u64 = (1 << 20) / 512;
    for (file, step) in [(1, 4), (32, 4), (64, 8), (160, 20), (512, 64), (4096, 64)] {
        let mut refcounts = refcounts(file * MIB, u64::MAX);
        assert_eq!(refcounts.unused_reserve(), None);
        assert_eq!(
            refcounts.reserve_ahead(),
            Some((at(file * MIB), step * MIB)),
            "{file}"
        );
        assert_eq!(refcounts.reserve_ahead(), None, "it is under way");
        refcounts.reserved(Some(at((file + step) * MIB)));
        assert_eq!(refcounts.reserve_ahead(), None, "there is enough");
        assert_eq!(refcounts.unused_reserve(), Some(at(file * MIB)));
        // An eighth of a longer file is more.
        let is_at_bound = !(32..512).contains(&file);
        refcounts.end += step * MIB / 2;
        assert_eq!(
            refcounts.reserve_ahead().is_none(),
            is_at_bound,
            "half of it is left"
        );
        if !is_at_bound {
            continue;
        }
        refcounts.end += 1;
        let (from, _) = refcounts.reserve_ahead().expect("less than half is left");
        assert_eq!(from, at((file + step) * MIB));
        refcounts.reserved(None);
        assert_eq!(refcounts.reserve_ahead(), None, "it cannot be had");
    }
    let mut device = refcounts(300, 300);
    assert_eq!((device.reserve_ahead(), device.unused_reserve()), (None, None));
}

/// The longest possible run needs more slices at once than a small cache would hold.
#[test]
fn allocate_run_finds_longest_run_with_smallest_cache() {
    let count = geometry().clusters_for(crate::format::l1::L1_TABLE_MAX_BYTES);
    // 32 MiB of L1 table and 8 MiB of refcount table, counted by two bytes for each cluster of 512.
    assert_eq!(run::count_bytes_max(&geometry()), (32 + 8) * 2048 * 2);
    let mut table = vec![RefcountTableEntry::UNALLOCATED; 1024];
    for (index, entry) in table.iter_mut().enumerate() {
        *entry = RefcountTableEntry::encode(geometry().host_offset(HostCluster::new(100 + index as u64)));
    }
    let place = TablePlace {
        offset: HostOffset::new(512),
        clusters: 16,
    };
    let limit = 1024 * 256;
    let mut refcounts = Refcounts::new(geometry(), table, place, at(limit), at(limit), 0);
    for _ in 0..2000 {
        match refcounts.allocate_run(count) {
            Ok(first) => {
                assert_eq!(first, at(0));
                return;
            }
            Err(Stuck::Load(slice)) => refcounts.slices.insert(slice, vec![0; 512].into(), false),
            Err(stuck) => panic!("{stuck:?}"),
        }
    }
    panic!("slices are dropped before the last one is there");
}

/// Each time by half, so that what is copied stays in proportion to what is counted.
#[test]
fn refcount_table_grows_by_half() {
    let mut refcounts = refcounts(640 * 256, u64::MAX);
    refcounts.table.resize(640, RefcountTableEntry::UNALLOCATED);
    assert_eq!(refcounts.entries_for(639), Ok(640));
    assert_eq!(refcounts.entries_for(640), Ok(1024));
    assert_eq!(refcounts.entries_for(2000), Ok(2048));
    let max = (crate::format::refcount::REFCOUNT_TABLE_MAX_BYTES / 8) as usize;
    assert_eq!(refcounts.entries_for(max - 1), Ok(max));
    assert_eq!(
        refcounts.entries_for(max),
        Err(Stuck::Failed(IoError::OutOfRange))
    );
}

#[cfg(all(debug_assertions, not(feature = "canary")))]
mod invariants {
    use super::*;

    #[test]
    #[should_panic(expected = "is released and in use")]
    fn release_panics_when_cluster_is_in_use() {
        refcounts(200, 200).release(at(2), 1, true);
    }

    #[test]
    #[should_panic(expected = "is freed twice")]
    fn give_back_panics_when_cluster_is_free() {
        let mut refcounts = refcounts(200, 200);
        assert_eq!(fill(&mut refcounts), 197);
        refcounts.give_back(at(50)).expect("the first block is loaded");
        refcounts.give_back(at(50)).expect("the first block is loaded");
    }

    #[test]
    #[should_panic(expected = "is handed out and has a user")]
    fn claim_panics_when_cluster_is_in_use() {
        assert!(refcounts(200, 200).claim(at(2)).is_err());
    }

    #[test]
    #[should_panic(expected = "refcount table entry 0 has a block")]
    fn new_block_at_panics_when_entry_has_a_block() {
        assert!(refcounts(200, 200).new_block_at(0, at(9)).is_err());
    }

    #[test]
    #[should_panic(expected = "no run of 3 clusters begins at 50")]
    fn free_runs_remove_panics_when_run_is_not_free() {
        let mut refcounts = refcounts(200, 200);
        assert_eq!(fill(&mut refcounts), 197);
        refcounts.give_back(at(50)).expect("the first block is loaded");
        refcounts.free.remove(at(50), 3);
    }
}

#[test]
fn release_references_drops_each_cluster_once_and_in_bounded_runs() {
    let mut refcounts = refcounts(4096, 4096);
    for (cluster, count) in [(10, 1), (11, 2), (12, 1), (14, 1)] {
        refcounts.set(at(cluster), count).expect("it is loaded");
    }
    let mut released = Released::nearly_full();
    let mut release =
        |first, end, released: &mut _| refcounts.release_references(at(first), at(end), |_| false, released);
    assert_eq!(release(10, 12, &mut released), Ok(Counted::Until(at(12))));
    assert!(released.contains(at(10)) && !released.contains(at(11)));
    assert_eq!(
        release(11, 13, &mut released),
        Ok(Counted::Until(at(13))),
        "neighbours"
    );
    assert_eq!(release(11, 12, &mut released), Ok(Counted::Undercounted(at(11))));
    assert_eq!(release(14, 15, &mut released), Ok(Counted::Scattered(at(14))));
    assert_eq!(release(20, 21, &mut released), Ok(Counted::Uncounted(at(20))));
}

/// A file whose first block is full, and each other but for one cluster: each block that moves changes the next one.
#[test]
fn relocate_looks_at_each_changed_block_once() {
    const BLOCKS: u64 = 1000;
    let mut table = vec![RefcountTableEntry::UNALLOCATED; 1024];
    for (index, entry) in table.iter_mut().enumerate().take(BLOCKS as usize) {
        *entry = RefcountTableEntry::encode(geometry().host_offset(at(100 + index as u64)));
    }
    let place = TablePlace {
        offset: HostOffset::new(512),
        clusters: 16,
    };
    let mut old = Refcounts::new(geometry(), table, place, at(BLOCKS * 256), NO_LIMIT, 1 << 20);
    let mut refcounts = old.next();
    let mut bytes = [0, 1].repeat(256);
    bytes[511] = 0;
    refcounts.insert_block(0, &[0, 1].repeat(256));
    refcounts.set(at(3), 2).expect("it is loaded");
    let (mut relocation, mut left, mut loads) = (Relocation::default(), Vec::new(), 0);
    while let Err(stuck) = refcounts.relocate(&mut relocation, &mut left) {
        let Stuck::Load(slice) = stuck else {
            panic!("{stuck:?}")
        };
        refcounts.insert_block(slice as usize, &bytes);
        loads += 1;
    }
    assert_eq!(loads, BLOCKS - 1, "each but the first is loaded once");
    assert_eq!(left.len() as u64, BLOCKS);
    let looked_at = relocation.looked_at as u64;
    assert!(looked_at <= 4 * BLOCKS, "{looked_at} slices were looked at");
}

/// The clusters that are left out stay free: nothing is counted.
#[test]
fn search_at_end_leaves_free_clusters_and_works_once() {
    let mut refcounts = refcounts(200, NO_LIMIT.index());
    refcounts.set(at(199), 1).expect("it is loaded");
    assert!(refcounts.search_at_end());
    assert_eq!(refcounts.allocate(1).map(|run| run.first), Ok(at(200)));
    assert_eq!(refcounts.get(at(3)), Ok(0));
    assert!(!refcounts.search_at_end());
    let mut device = self::refcounts(200, 200);
    assert!(!device.search_at_end());
}
