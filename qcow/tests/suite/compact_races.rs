//! Compaction while requests are under way, in the simulated world: operations are held, tasks are dropped, any step fails,
//! and the host has no space.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use block::{AlignedBuf, Buffer, Disk, IoError, Op, ask};
use qcow::image::{check, rebuild_refcounts};
use qcow::{CompactError, CompactOptions, Compacted, QcowDisk, SnapshotSelector};
use simulator::{Profile, SimWorld};

use crate::snapshot_bench::{BASE, Bench, DISK, is_ok, options, world};
use crate::snapshot_content::{as_disk, content, entries};
use crate::used_clusters::used;
use crate::workers::{Slot, Workers};

const SECTORS: u64 = 48;
/// The sectors from here on are mapped, at the end of the file.
const FIRST: u64 = 30;
/// The snapshot of [`shared_bench`].
const NAME: &str = "kept";

/// A disk whose first sectors have left free clusters, of 512 bytes, before those of the last ones.
fn bench(seed: u64) -> Bench {
    let world = world(seed, 512);
    let cx = world.context(64);
    let prepared = cx.block_on(async {
        let disk = QcowDisk::open_on(&cx, &world, Path::new(DISK), &options()).await;
        let disk = disk.expect("a disk");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        for at in 0..SECTORS {
            let bytes = AlignedBuf::from_slice(&[at as u8 + 1; 512]).into();
            let write = Op::Write { fua: false };
            ask(&*queue, write, at * 512, 512, bytes).await.expect("a write");
        }
        ask(&*queue, Op::Flush, 0, 0, Buffer::default())
            .await
            .expect("a FLUSH");
        let zeros = Op::WriteZeroes {
            unmap: true,
            fua: false,
        };
        ask(&*queue, zeros, 0, FIRST * 512, Buffer::default())
            .await
            .expect("zeros");
        drop(queue);
        disk.close(&cx).await.expect("a clean close");
    });
    prepared.expect("nothing waits for ever");
    world.settle();
    world.set_profile(Profile::IMMEDIATE);
    let (disk, workers) = Workers::open(&world, DISK, &options());
    Bench { world, disk, workers }
}

/// As [`bench`], with two snapshots after one another; the first is deleted. What the other shares with the disk, and its
/// tables, lie at the end of the file.
fn shared_bench(seed: u64) -> Bench {
    let bench = bench(seed);
    for name in ["gone", NAME] {
        let created = bench.create(0, name).take().expect("an answer");
        created.expect("a snapshot");
    }
    let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
    let deleted = bench.workers.run(0, async move {
        let which = SnapshotSelector::Name("gone".to_owned());
        disk.delete_snapshot(&cx, &which).await
    });
    deleted.take().expect("an answer").expect("a deletion");
    is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
    let world = bench.close();
    world.settle();
    let (disk, workers) = Workers::open(&world, DISK, &options());
    Bench { world, disk, workers }
}

/// The benches that each test of many I/Os goes through.
const BENCHES: [fn(u64) -> Bench; 2] = [bench, shared_bench];

/// The snapshots of an image have the content that they were created with.
#[track_caller]
fn assert_snapshots(world: &SimWorld, image: &[u8], what: &str) {
    let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
    judge.set_contents(BASE, world.contents(BASE));
    for entry in entries(image) {
        let found = content(&judge, &judge.context(64), &as_disk(image, &entry));
        assert_eq!(found, expected(), "{what}: the snapshot");
    }
}

/// The first byte of each sector of the disk of [`bench`].
fn expected() -> Vec<u8> {
    (0..SECTORS)
        .map(|at| if at < FIRST { 0 } else { at as u8 + 1 })
        .collect()
}

async fn compact(disk: &QcowDisk, cx: &block::Context) -> Result<Compacted, CompactError> {
    let go_on = |_: &_| ControlFlow::Continue(());
    disk.compact(cx, &CompactOptions::default(), go_on).await
}

/// Starts a compaction on the first worker.
fn start(bench: &Bench) -> Slot<Result<Compacted, CompactError>> {
    let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
    bench.workers.run(0, async move { compact(&disk, &cx).await })
}

/// The first byte of each sector of an image's disk, in a world of its own.
fn content_of_image(world: &SimWorld, image: &[u8]) -> Vec<u8> {
    let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
    judge.set_contents(BASE, world.contents(BASE));
    content(&judge, &judge.context(64), image)
}

/// Returns the number of corruptions that a check of an image finds.
fn corruptions(world: &SimWorld, image: simulator::SimImage) -> u64 {
    let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
    judge.set_contents(DISK, image);
    let cx = judge.context(64);
    let view = judge.file(DISK, false).view(&cx).expect("a view");
    let report = cx.block_on(check(&view)).expect("it turns").expect("a check");
    report.corruptions + report.check_errors
}

/// A write in place is in flight: its cluster is copied after it, and not before.
#[test]
fn compaction_waits_for_writes_in_flight() {
    let bench = bench(1);
    bench.world.hold_next();
    let at = SECTORS - 1;
    // Its mapping is loaded before.
    bench.world.release();
    bench.reads(1, at * 512);
    bench.world.hold_next();
    let held = bench.write(1, at * 512, 0x77);
    assert!(!bench.world.is_to_hold(), "nothing is held");
    let compacting = start(&bench);
    assert!(compacting.borrow().is_none(), "a write is in flight");
    bench.world.release();
    bench.workers.settle();
    is_ok(&held);
    let compacted = compacting.take().expect("an answer").expect("a compaction");
    assert!(compacted.moved_bytes > 0);
    assert_eq!(bench.reads(1, at * 512), 0x77);
    let world = bench.close();
    let image = world.contents(DISK).to_bytes();
    assert_eq!(image.len() as u64, used(&image).1);
}

/// A snapshot is created beside a compaction that is held at each of its I/Os, among them those with which it frees what the guest has
/// discarded. Whichever comes first, each cluster is counted as often as it is used when the image is closed.
#[test]
fn snapshot_beside_each_io_of_a_compaction_counts_every_cluster() {
    let mut ios = 0;
    for io in 0.. {
        let bench = bench(io);
        is_ok(
            &bench
                .workers
                .ask(1, Op::Discard, FIRST * 512, 512, Buffer::default()),
        );
        let compacting = bench.hold(io, async |disk, cx| compact(&disk, &cx).await);
        let is_over = compacting.borrow().is_some();
        let taken = bench.create(1, "one");
        bench.world.release();
        bench.workers.settle();
        compacting.take().expect("an answer").expect("a compaction");
        taken.take().expect("an answer").expect("a snapshot");
        bench.close();
        if is_over {
            ios = io;
            break;
        }
    }
    assert!(ios > 10, "only {ios} I/Os");
}

/// A snapshot fails at any step. If that was the write of the header either state may be in force, and a compaction changes nothing in
/// the file; after any other fault it goes on.
#[test]
fn compaction_changes_nothing_after_a_failed_write_of_the_header() {
    let failing = Profile {
        read_error: 1000,
        write_error: 1000,
        sync_error: 1000,
        ..Profile::default()
    };
    let (mut refusals, mut others) = (0, 0);
    for step in 0.. {
        let bench = bench(step);
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let taken = Slot::default();
        let (put, own) = (Rc::clone(&taken), cx.clone());
        cx.spawn(async move {
            *put.borrow_mut() = Some(disk.create_snapshot(&own, "one", UNIX_EPOCH).await);
        });
        let steps = bench.run_failing(&taken, failing, step);
        let is_over = taken.take().expect("an answer").is_ok() && steps <= step;
        let written = bench.write(1, 0, 0x51);
        bench.workers.settle();
        let is_refused = written.take().expect("an answer").result == Err(IoError::Corrupt);
        let before = bench.world.contents(DISK).fingerprint();
        let compacting = start(&bench);
        bench.workers.settle();
        let compacted = compacting.take().expect("an answer");
        if is_refused {
            refusals += 1;
            let refused = matches!(compacted, Err(CompactError::Io(IoError::Corrupt)));
            assert!(refused, "step {step}: {compacted:?}");
            let after = bench.world.contents(DISK).fingerprint();
            assert_eq!(before, after, "step {step}: the file has changed");
        } else {
            others += 1;
        }
        let world = bench.world.clone();
        drop((bench, cx));
        world.settle();
        assert_eq!(corruptions(&world, world.contents(DISK)), 0, "step {step}");
        if is_over {
            break;
        }
    }
    assert!(refusals > 0 && others > 5, "{refusals} refusals, {others} others");
}

/// The compaction is under way, at each of its I/Os: what the guest writes, zeroes and discards then is not lost.
#[test]
fn changes_beside_each_io_of_a_compaction_are_kept() {
    BENCHES.into_iter().for_each(keeps_changes_beside_each_io);
}

fn keeps_changes_beside_each_io(bench: fn(u64) -> Bench) {
    let mut ios = 0;
    for io in 0.. {
        let bench = bench(io);
        let compacting = bench.hold(io, async |disk, cx| compact(&disk, &cx).await);
        if compacting.borrow().is_some() {
            compacting.take().expect("an answer").expect("a compaction");
            ios = io;
            break;
        }
        let written: Vec<_> = (FIRST..SECTORS)
            .filter(|at| at % 3 == 0)
            .map(|at| bench.write(1, at * 512, 0x80 + at as u8))
            .collect();
        let zeroes = Op::WriteZeroes {
            unmap: true,
            fua: false,
        };
        let zeroed: Vec<_> = (FIRST..SECTORS)
            .filter(|at| at % 3 == 1)
            .map(|at| {
                let (at, len) = (at * 512, 512);
                bench.workers.ask(1, zeroes, at, len, Buffer::default())
            })
            .collect();
        // New clusters, where the compaction looks for some, too.
        let others: Vec<_> = (0..4)
            .map(|at| bench.write(1, at * 512, 0x71 + at as u8))
            .collect();
        bench.world.release();
        bench.workers.settle();
        let compacted = compacting.take().expect("an answer");
        compacted.unwrap_or_else(|error| panic!("I/O {io}: {error}"));
        written.iter().chain(&zeroed).chain(&others).for_each(is_ok);
        let mut expected = expected();
        for at in FIRST..SECTORS {
            match at % 3 {
                0 => expected[at as usize] = 0x80 + at as u8,
                1 => expected[at as usize] = 0,
                _ => {}
            }
        }
        (0..4).for_each(|at| expected[at] = 0x71 + at as u8);
        let read: Vec<u8> = (0..SECTORS).map(|at| bench.reads(1, at * 512)).collect();
        assert_eq!(read, expected, "I/O {io}");
        let world = bench.close();
        let image = world.contents(DISK).to_bytes();
        assert_eq!(content_of_image(&world, &image), expected, "I/O {io}: closed");
        assert_snapshots(&world, &image, &format!("I/O {io}"));
    }
    assert!(ios > 20, "only {ios} I/Os");
}

/// The task is dropped half-way, at each of its I/Os: requests go on, and nothing is lost.
#[test]
fn requests_go_on_when_the_task_of_a_compaction_is_dropped() {
    BENCHES.into_iter().for_each(goes_on_when_the_task_is_dropped);
}

fn goes_on_when_the_task_is_dropped(bench: fn(u64) -> Bench) {
    let mut is_whole = false;
    for io in 0..800 {
        let bench = bench(io);
        let cx = bench.world.context(64);
        let disk = Arc::clone(&bench.disk);
        let is_over = Rc::new(Cell::new(false));
        let mut task = Box::pin({
            let (cx, is_over) = (cx.clone(), Rc::clone(&is_over));
            async move {
                let compacted = compact(&disk, &cx).await;
                is_over.set(true);
                compacted
            }
        });
        for _ in 0..io {
            let waker = std::task::Waker::noop();
            if !is_over.get() {
                let polled = task.as_mut().poll(&mut std::task::Context::from_waker(waker));
                assert_eq!(polled.is_ready(), is_over.get());
            }
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            bench.world.step();
        }
        drop(task);
        let late = bench.write(1, FIRST * 512, 0x21);
        for _ in 0..64 {
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            bench.world.step();
        }
        bench.workers.settle();
        let result = late.take().expect("it waits for ever").result;
        assert!(
            result == Ok(()) || result == Err(IoError::Corrupt),
            "I/O {io}: {result:?}"
        );
        let mut expected = expected();
        if result.is_ok() {
            expected[FIRST as usize] = 0x21;
        }
        let read: Vec<u8> = (0..SECTORS).map(|at| bench.reads(1, at * 512)).collect();
        assert_eq!(read, expected, "I/O {io}");
        if result.is_ok() {
            is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
        }
        let world = bench.world.clone();
        drop((bench, cx));
        world.settle();
        let image = world.contents(DISK);
        assert_eq!(
            content_of_image(&world, &image.to_bytes()),
            expected,
            "I/O {io}: after"
        );
        assert_snapshots(&world, &image.to_bytes(), &format!("I/O {io}"));
        assert_eq!(corruptions(&world, image), 0, "I/O {io}");
        is_whole = is_over.get();
        if is_whole {
            break;
        }
    }
    assert!(is_whole, "it does not end");
}

/// Any step fails, with or without its effect: nothing is lost, now and after a cut.
#[test]
fn compaction_that_fails_at_any_step_loses_nothing() {
    BENCHES.into_iter().for_each(loses_nothing_at_any_failure);
}

fn loses_nothing_at_any_failure(bench: fn(u64) -> Bench) {
    let failing = Profile {
        read_error: 1000,
        write_error: 1000,
        sync_error: 1000,
        allocate_error: 1000,
        ..Profile::default()
    };
    let mut failures = 0;
    for step in 0.. {
        let bench = bench(step);
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let compacted = Slot::default();
        let put = Rc::clone(&compacted);
        let own = cx.clone();
        cx.spawn(async move {
            *put.borrow_mut() = Some(compact(&disk, &own).await);
        });
        let steps = bench.run_failing(&compacted, failing, step);
        let compacted = compacted.take().expect("an answer");
        failures += u64::from(compacted.is_err());
        let mut expected = expected();
        let read: Vec<u8> = (0..SECTORS).map(|at| bench.reads(1, at * 512)).collect();
        assert_eq!(read, expected, "step {step}: {compacted:?}");
        let cut = bench
            .world
            .crash_space(DISK)
            .draw(&mut simulator::Random::new(step));
        assert_eq!(
            content_of_image(&bench.world, &cut.to_bytes()),
            expected,
            "step {step}: cut"
        );
        assert_snapshots(&bench.world, &cut.to_bytes(), &format!("step {step}: cut"));
        assert_eq!(corruptions(&bench.world, cut), 0, "step {step}: cut");
        // The guest goes on, unless a sync has failed.
        for (at, byte) in [(1, 0x41), (SECTORS - 2, 0x42), (3, 0x43)] {
            let written = bench.write(1, at * 512, byte).take().expect("an answer").result;
            assert_eq!(written, Ok(()), "step {step}: {compacted:?}");
            expected[at as usize] = byte;
        }
        let read: Vec<u8> = (0..SECTORS).map(|at| bench.reads(1, at * 512)).collect();
        assert_eq!(read, expected, "step {step}: written");
        let flushed = bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default());
        let flushed = flushed.take().expect("an answer").result;
        let world = bench.world.clone();
        drop((bench, cx));
        world.settle();
        let image = world.contents(DISK);
        if flushed.is_ok() {
            assert_eq!(
                content_of_image(&world, &image.to_bytes()),
                expected,
                "step {step}: after"
            );
        }
        assert_snapshots(&world, &image.to_bytes(), &format!("step {step}: after"));
        assert_eq!(corruptions(&world, image), 0, "step {step}: after");
        if steps <= step {
            break;
        }
    }
    assert!(failures > 10, "{failures}");
}

/// A repair has put the refcount blocks at the end of the file: they move, and the power may go at any step.
#[test]
fn refcount_blocks_move_and_survive_a_cut_at_any_step() {
    for seed in 0..40 {
        let bench = bench(seed);
        let world = bench.close();
        let cx = world.context(64);
        let view = world.file(DISK, true).view(&cx).expect("a view");
        let rebuilt = cx.block_on(rebuild_refcounts(&view));
        rebuilt.expect("nothing waits for ever").expect("a repair");
        drop(view);
        world.settle();
        let before = world.contents(DISK).len();
        let (disk, workers) = Workers::open(&world, DISK, &options());
        let bench = Bench { world, disk, workers };
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let compacted = Slot::default();
        let (put, own) = (Rc::clone(&compacted), cx.clone());
        cx.spawn(async move {
            *put.borrow_mut() = Some(compact(&disk, &own).await);
        });
        let random = &mut simulator::Random::new(seed);
        while compacted.borrow().is_none() {
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            bench.world.step();
            if random.one_in(2) {
                let cut = bench.world.crash_space(DISK).draw(random);
                let found = content_of_image(&bench.world, &cut.to_bytes());
                assert_eq!(found, expected(), "seed {seed}");
                assert_eq!(corruptions(&bench.world, cut), 0, "seed {seed}");
            }
        }
        compacted.take().expect("an answer").expect("a compaction");
        drop(cx);
        let world = bench.close();
        let image = world.contents(DISK).to_bytes();
        assert_eq!(image.len() as u64, used(&image).1, "seed {seed}");
        assert!((image.len() as u64) < before, "seed {seed}");
    }
}

/// The host has space for so many operations only: the compaction fails, and nothing is lost.
#[test]
fn compaction_without_space_on_the_host_loses_nothing() {
    loses_nothing_without_space(bench, false);
    loses_nothing_without_space(shared_bench, true);
}

/// `leaks`: what the host has failed may be leaked. A table of a snapshot that was written in part leads to either place.
fn loses_nothing_without_space(bench: fn(u64) -> Bench, leaks: bool) {
    let mut is_whole = false;
    for ops in 0..400 {
        let bench = bench(ops);
        bench.world.limit_space(Some(ops));
        let compacting = start(&bench);
        let compacted = compacting.take().expect("an answer");
        if let Err(error) = &compacted {
            assert!(
                matches!(error, CompactError::Io(error) if error.is_no_space()),
                "{ops} operations: {error}"
            );
        }
        let read: Vec<u8> = (0..SECTORS).map(|at| bench.reads(1, at * 512)).collect();
        assert_eq!(read, expected(), "{ops} operations");
        bench.world.limit_space(None);
        is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
        let world = match leaks {
            false => bench.close(),
            true => {
                let world = bench.world.clone();
                drop(bench);
                world.settle();
                assert_eq!(corruptions(&world, world.contents(DISK)), 0, "{ops} operations");
                world
            }
        };
        let image = world.contents(DISK).to_bytes();
        assert_eq!(content_of_image(&world, &image), expected(), "{ops} operations");
        assert_snapshots(&world, &image, &format!("{ops} operations"));
        is_whole = compacted.is_ok();
        if is_whole {
            break;
        }
    }
    assert!(is_whole, "it always lacks space");
}

/// A write gives a cluster up that it shares with a snapshot, and fails. The disk keeps its reference, which counts for both.
#[test]
fn cluster_stays_shared_when_a_write_in_flight_fails() {
    let bench = shared_bench(1);
    let at = SECTORS - 1;
    bench.reads(1, at * 512);
    // What it needs of counts and tables is in memory, then.
    is_ok(&bench.write(1, 2 * 512, 0x11));
    let mut expected = expected();
    expected[2] = 0x11;
    bench.world.hold_next();
    let held = bench.write(1, at * 512, 0x77);
    assert!(held.borrow().is_none(), "it is in flight");
    let compacting = start(&bench);
    let mut turns = 0;
    while compacting.borrow().is_none() {
        bench.workers.settle();
        bench.world.pass(std::time::Duration::from_millis(50));
        turns += 1;
        assert!(turns < 1000, "it waits for ever");
    }
    bench.world.set_profile(Profile {
        write_error: 1000,
        ..Profile::IMMEDIATE
    });
    bench.world.release();
    bench.workers.settle();
    bench.world.set_profile(Profile::IMMEDIATE);
    let failed = held.take().expect("an answer").result;
    assert!(failed.is_err(), "{failed:?}");
    for _ in 0..2 {
        is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
        bench.workers.settle();
    }
    let world = bench.close();
    let image = world.contents(DISK).to_bytes();
    assert_eq!(content_of_image(&world, &image), expected);
    assert_snapshots(&world, &image, "after");
}

/// A request that does not end, because the host has no answer: the compaction gives up, and the queues go on.
#[test]
fn compaction_gives_up_when_a_request_in_flight_does_not_end() {
    let bench = bench(1);
    bench.reads(1, (SECTORS - 1) * 512);
    bench.world.hold_next();
    let held = bench.write(1, (SECTORS - 1) * 512, 0x12);
    let compacting = start(&bench);
    let mut turns = 0;
    while compacting.borrow().is_none() {
        bench.workers.settle();
        bench.world.pass(std::time::Duration::from_millis(50));
        turns += 1;
        assert!(turns < 1000, "it waits for ever");
    }
    let given_up = compacting.take().expect("an answer");
    assert!(matches!(given_up, Err(CompactError::Busy)), "{given_up:?}");
    assert_eq!(bench.reads(1, FIRST * 512), FIRST as u8 + 1);
    bench.world.release();
    bench.workers.settle();
    is_ok(&held);
    start(&bench)
        .take()
        .expect("an answer")
        .expect("the next one succeeds");
    bench.close();
}
