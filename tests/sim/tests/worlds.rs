//! Runs that `cargo test` makes by itself: few, and not optimised. `make test` explores many more.

use std::collections::BTreeMap;
use std::time::Duration;

use ringdisk_sim::bitmaps::Counts;
use ringdisk_sim::explore::{Goal, Limit, Source, explore};
use ringdisk_sim::judge::Tally;
use ringdisk_sim::plan::{Ask, Planned};
use ringdisk_sim::record::Reached;
use ringdisk_sim::run::run;
use ringdisk_sim::{kept_lines, replay, scenario};

/// Two runs of one seed are equal up to the last event and the last crash state.
#[test]
fn seed_repeats_its_trace_and_crash_states() {
    for seed in 500..512 {
        let case = Source::of_number(seed).case().expect("a number has a run");
        let (mut first, mut second) = (Tally::default(), Tally::default());
        let one = run(&case, true, &mut first);
        // Memory is elsewhere the second time, and must not matter.
        let _shift: Vec<Vec<u8>> = (1..200).map(|n| vec![0; n * 37]).collect();
        let two = run(&case, true, &mut second);
        assert!(one.failure.is_none(), "seed {seed}: {:?}", one.failure);
        assert_eq!(one.trace_hash, two.trace_hash, "seed {seed}");
        assert_eq!(one.trace, two.trace, "seed {seed}");
        assert_eq!(first.images, second.images, "seed {seed}");
        assert!(!one.trace.is_empty() && !first.images.is_empty());
    }
}

/// Threads that meet the same states count them once, and continue until there are enough.
#[test]
fn explore_reaches_its_goal_despite_shared_states() {
    for states in [300, 500, 700] {
        let goal = Goal {
            states,
            seeds: 0,
            limit: Limit::Cpu(Duration::from_secs(60)),
        };
        let explored = explore(700, goal, false, 4, 0, &|_| {});
        assert!(explored.failed.is_none(), "{:?}", explored.failed);
        let found = explored.tally.images.len() as u64;
        assert!(found >= states, "{found} of {states}");
    }
}

#[test]
fn kept_runs_do_not_fail_again() {
    for line in kept_lines() {
        let (_, case) = replay::parse(line).unwrap_or_else(|error| panic!("{error}"));
        let failure = run(&case, false, &mut Tally::default()).failure;
        assert!(failure.is_none(), "{line}: {failure:?}");
    }
}

/// Each kind of metadata change, in submission order, cut at every step.
#[test]
fn scenarios_survive_a_cut_at_every_step() {
    for mut scenario in scenario::all() {
        scenario.all_up_to = 16;
        let mut tally = Tally::default();
        let outcome = run(&scenario.case(0), false, &mut tally);
        assert!(
            outcome.failure.is_none(),
            "{}: {:?}",
            scenario.name,
            outcome.failure
        );
        assert!(outcome.cuts > 3, "{}: only {} cuts", scenario.name, outcome.cuts);
    }
}

/// The seeds reach every kind of end, longer L1 tables, every refcount width, and discards of the old end during growth.
#[test]
fn growth_seeds_reach_every_end_and_refcount_width() {
    let mut widths = BTreeMap::new();
    let (mut in_sector, mut in_block, mut in_cluster, mut longer_l1, mut devices) = (0, 0, 0, 0, 0);
    let mut growths = 0;
    for seed in 0..320 {
        let case = Source::Growth(seed).case().expect("a seed has a run");
        let cluster = case.shape.cluster();
        // What one cluster of an L1 table maps.
        let l1 = cluster * (cluster / 8) * (cluster / 8);
        let mut size = case.shape.size();
        for planned in &case.plan {
            let Ask::Grow(bytes) = planned.ask else { continue };
            assert!(bytes > size, "growth {seed}: {size} bytes become {bytes}");
            longer_l1 += u64::from(bytes.div_ceil(l1) > size.div_ceil(l1));
            size = bytes;
            in_sector += u64::from(!size.is_multiple_of(512));
            in_block += u64::from(!size.is_multiple_of(4096));
            in_cluster += u64::from(!size.is_multiple_of(cluster));
        }
        *widths.entry(case.shape.refcount_bits).or_insert(0) += 1;
        devices += u64::from(case.shape.device > 0);
        if seed % 16 == 0 {
            let outcome = run(&case, false, &mut Tally::default());
            assert!(outcome.failure.is_none(), "growth {seed}: {:?}", outcome.failure);
            growths += outcome.growths;
        }
    }
    for count in [in_sector, in_block, in_cluster, longer_l1, devices] {
        assert!(
            count > 40,
            "{in_sector} {in_block} {in_cluster} {longer_l1} {devices}"
        );
    }
    assert_eq!(widths.len(), 7, "{widths:?}");
    assert!(widths.values().all(|&count| count > 10), "{widths:?}");
    assert!(growths > 30, "only {growths} growths");
}

/// The seeds create, apply and delete snapshots beside requests of every kind, and cuts show them in every state.
#[test]
fn snapshots_seeds_create_apply_delete_and_cut() {
    let (mut operations, mut applied, mut beside, mut narrow) = (0, 0, 0, 0);
    let mut tally = Tally::default();
    for seed in 0..64 {
        let case = Source::Snapshots(seed).case().expect("a seed has a run");
        let outcome = run(&case, false, &mut tally);
        assert!(
            outcome.failure.is_none(),
            "snapshots {seed}: {:?}",
            outcome.failure
        );
        operations += outcome.snapshots;
        applied += outcome.applied;
        beside += u64::from(case.lanes > 1);
        narrow += u64::from(case.shape.refcount_bits < 8);
    }
    assert!(
        operations > 100 && applied > 30,
        "only {operations} operations, {applied} applications"
    );
    assert!(beside > 30 && narrow > 4, "{beside} {narrow}");
    let (with, all) = (tally.with_snapshots, tally.images.len());
    assert!(with > 2000, "only {with} of {all} images have snapshots");
}

/// The seeds make disks of every kind smaller, to every kind of end, with snapshots beside.
#[test]
fn resize_seeds_make_disks_of_every_kind_smaller() {
    let (mut shrunk, mut in_cluster, mut snapshots) = (0, 0, 0);
    let (mut encrypted, mut data_files, mut extended) = (0, 0, 0);
    for seed in 0..96 {
        let case = Source::Resize(seed).case().expect("a seed has a run");
        let shape = case.shape;
        in_cluster += case
            .plan
            .iter()
            .filter(
                |planned| matches!(planned.ask, Ask::Shrink(bytes) if !bytes.is_multiple_of(shape.cluster())),
            )
            .count();
        encrypted += u64::from(shape.encrypted);
        data_files += u64::from(shape.data_file.is_some());
        extended += u64::from(shape.extended);
        if seed % 2 == 0 {
            let outcome = run(&case, false, &mut Tally::default());
            assert!(outcome.failure.is_none(), "resize {seed}: {:?}", outcome.failure);
            shrunk += outcome.shrunk;
            snapshots += outcome.snapshots;
        }
    }
    assert!(
        shrunk > 60 && in_cluster > 20 && snapshots > 10,
        "{shrunk} {in_cluster} {snapshots}"
    );
    for count in [encrypted, data_files, extended] {
        assert!(count > 4, "{encrypted} {data_files} {extended}");
    }
}

/// The seeds compact images whose tables lie at the end, beside requests; some are stopped.
#[test]
fn compact_seeds_move_clusters_beside_requests() {
    let (mut moved, mut blocks, mut stopped, mut beside) = (0, 0, 0, 0);
    for seed in 0..64 {
        let case = Source::Compact(seed).case().expect("a seed has a run");
        let outcome = run(&case, false, &mut Tally::default());
        assert!(outcome.failure.is_none(), "compact {seed}: {:?}", outcome.failure);
        moved += u64::from(outcome.moved_bytes > 0);
        blocks += u64::from(case.shape.dirty || outcome.snapshots > 0);
        beside += u64::from(case.lanes > 1);
        let stops = |planned: &&Planned| matches!(planned.ask, Ask::Compact { reports, .. } if reports > 0);
        stopped += case.plan.iter().filter(stops).count();
    }
    assert!(
        moved > 30 && blocks > 10 && stopped > 20 && beside > 20,
        "{moved} {blocks} {stopped} {beside}"
    );
}

/// The seeds compare bitmaps of both kinds of storage with what has changed, after cuts, applied snapshots and added bitmaps.
#[test]
fn bitmaps_seeds_compare_bits_of_both_storages() {
    let mut by_storage = [Counts::default(); 2];
    let (mut added, mut applied) = (0, 0);
    for seed in 0..64 {
        let case = Source::Bitmaps(seed).case().expect("a seed has a run");
        let mut tally = Tally::default();
        let outcome = run(&case, false, &mut tally);
        assert!(outcome.failure.is_none(), "bitmaps {seed}: {:?}", outcome.failure);
        let durable = case.shape.bitmaps.is_some_and(|bitmaps| bitmaps.durable);
        by_storage[usize::from(durable)].add(tally.bitmaps);
        added += outcome.bitmaps;
        applied += outcome.applied;
    }
    assert!(added > 30 && applied > 10, "{added} added, {applied} applied");
    let [close, durable] = by_storage;
    for counts in [close, durable] {
        assert!(
            counts.trusted > 1000 && counts.set > counts.extra,
            "{by_storage:?}"
        );
    }
    assert!(close.in_use > 1000, "{close:?}");
    assert!(durable.in_use < durable.trusted / 4, "{durable:?}");
}

/// The seeds reach each transport, workers of one queue and of several, and servers that die or hand over with requests.
#[test]
fn ublk_seeds_reach_every_transport_and_server_end() {
    let mut sum = Reached::default();
    // By transport: requests with data on workers of their own, and on workers that several queues share.
    let mut moved: BTreeMap<String, [u64; 2]> = BTreeMap::new();
    // By how the driver takes it: servers that handed over, and what they left to the next one.
    let mut handed: BTreeMap<String, [u64; 2]> = BTreeMap::new();
    for seed in 0..64 {
        let case = Source::Ublk(seed).case().expect("a seed has a run");
        let outcome = run(&case, false, &mut Tally::default());
        assert!(outcome.failure.is_none(), "ublk {seed}: {:?}", outcome.failure);
        let ublk = case.ublk.expect("a ublk device");
        let reached = outcome.reached;
        let shared = ublk.queues_per_worker > 1 && case.lanes > 1;
        moved.entry(ublk.transport.to_string()).or_default()[usize::from(shared)] +=
            reached.zero_copied + reached.copied;
        let [handovers, kept] = handed.entry(format!("{:?}", ublk.quiesce)).or_default();
        *handovers += reached.handovers;
        *kept += reached.kept;
        sum.kills += reached.kills;
        sum.refused += reached.refused;
        sum.lost += reached.lost;
        sum.by_driver += reached.by_driver;
        sum.split += reached.split;
        sum.zero_copied += reached.zero_copied;
        sum.copied += reached.copied;
        sum.fallbacks += reached.fallbacks;
    }
    for count in [
        sum.kills,
        sum.refused,
        sum.lost,
        sum.by_driver,
        sum.split,
        sum.zero_copied,
        sum.copied,
        sum.fallbacks,
    ] {
        assert!(count > 2, "{sum:?}");
    }
    assert_eq!(moved.len(), 3);
    assert!(moved.values().flatten().all(|&count| count > 2), "{moved:?}");
    assert_eq!(handed.len(), 3);
    assert!(handed.values().all(|[handovers, _]| *handovers > 2), "{handed:?}");
    // Others answer all they have, unless the disk fails.
    assert!(handed["Lacking"][1] > 10, "{handed:?}");
}
