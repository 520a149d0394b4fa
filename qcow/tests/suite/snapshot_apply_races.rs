//! The application of a snapshot while requests are under way, in the simulated world: one operation is held while others
//! end, tasks are dropped, writes fail, and there is no space. The disk is what it was or what it becomes, whole.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use block::{AlignedBuf, Buffer, Disk, IoError, Op};
use qcow::image::{CreateOptions, check, create};
use qcow::{DiskSize, OpenOptions, QcowDisk, SnapshotError, SnapshotSelector};
use simulator::{Profile, SimWorld};

use crate::snapshot_bench::{BASE, Bench, DISK, byte_of, content_of, is_ok, options, world};
use crate::snapshot_content::{as_disk, content, entries};
use crate::workers::{Slot, Workers};

/// The first sectors of clusters before and after a snapshot of them.
const BEFORE: [u8; 4] = [0x11, 0x12, 0xBB, 0x14];
const AFTER: [u8; 4] = [0x31, 0x12, 0x33, 0x34];

async fn apply(disk: &QcowDisk, cx: &block::Context) -> Result<(), SnapshotError> {
    let which = SnapshotSelector::Name("one".to_owned());
    disk.apply_snapshot(cx, &which, DiskSize::Fixed).await
}

/// A disk of clusters of a size that holds `AFTER`, durably, with a snapshot that holds `BEFORE`.
fn bench(bench: Bench, cluster: u64) -> Bench {
    let write = |at: u64, byte: u8| is_ok(&bench.write(1, at * cluster, byte));
    for at in [0, 1, 3] {
        write(at, BEFORE[at as usize]);
    }
    bench
        .create(0, "one")
        .take()
        .expect("an answer")
        .expect("a snapshot");
    for at in [0, 2, 3] {
        write(at, AFTER[at as usize]);
    }
    is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
    bench
}

fn small(seed: u64) -> Bench {
    bench(Bench::new(seed), 512)
}

/// The first sectors of the clusters as a worker reads them.
#[track_caller]
fn disk_of(bench: &Bench, cluster: u64) -> [u8; 4] {
    [0, 1, 2, 3].map(|at| bench.reads(1, at * cluster))
}

#[track_caller]
fn assert_snapshot(world: &SimWorld, what: &str) {
    assert_eq!(content_of(world, "one")[..4], BEFORE, "{what}: the snapshot");
}

/// The operation itself is under way, at each of its I/Os: no request of either queue gets through.
#[test]
fn no_request_is_served_while_apply_is_under_way() {
    let mut ios = 0;
    for io in 0.. {
        let bench = small(io);
        let applied = bench.hold(io, async |disk, cx| apply(&disk, &cx).await);
        if applied.borrow().is_some() {
            applied.take().expect("an answer").expect("an application");
            assert_eq!(disk_of(&bench, 512), BEFORE);
            ios = io;
            break;
        }
        let written = bench.write(1, 0, 0x51);
        let (read, other) = (bench.read(1, 3 * 512), bench.read(0, 2 * 512));
        for answer in [&written, &read, &other] {
            assert!(answer.borrow().is_none(), "I/O {io}: let through");
        }
        bench.world.release();
        bench.workers.settle();
        applied.take().expect("an answer").expect("an application");
        is_ok(&written);
        assert_eq!(
            [byte_of(&read), byte_of(&other)],
            [BEFORE[3], BEFORE[2]],
            "I/O {io}"
        );
        assert_eq!(disk_of(&bench, 512), [0x51, BEFORE[1], BEFORE[2], BEFORE[3]]);
        assert_snapshot(&bench.close(), "in the end");
    }
    assert!(ios > 6, "only {ios} I/Os");
}

/// A write is in flight: the application waits for it, and it is lost with the rest.
#[test]
fn apply_waits_for_requests_in_flight() {
    let bench = small(1);
    bench.world.hold_next();
    let held = bench.write(1, 1024, 0x77);
    let applied: Slot<_> = {
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        bench.workers.run(0, async move { apply(&disk, &cx).await })
    };
    assert!(applied.borrow().is_none(), "a write is in flight");
    bench.world.release();
    bench.workers.settle();
    applied.take().expect("an answer").expect("an application");
    is_ok(&held);
    assert_eq!(disk_of(&bench, 512), BEFORE);
    assert_snapshot(&bench.close(), "in the end");
}

/// The task is dropped half-way, at each of its I/Os: the requests that it held off go on, and the disk is the old one or
/// the new one.
#[test]
fn requests_go_on_when_the_task_of_an_apply_is_dropped() {
    let (mut old, mut new, mut refused) = (0, 0, 0);
    for io in 0..40 {
        let bench = small(io);
        let cx = bench.world.context(64);
        let disk = Arc::clone(&bench.disk);
        let is_over = Rc::new(Cell::new(false));
        let mut task = Box::pin({
            let (cx, is_over) = (cx.clone(), Rc::clone(&is_over));
            async move {
                let applied = apply(&disk, &cx).await;
                is_over.set(true);
                applied
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
        let late = bench.write(1, 8 * 512, 0x51);
        drop(task);
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
        let found = disk_of(&bench, 512);
        assert!([BEFORE, AFTER].contains(&found), "I/O {io}: {found:x?}");
        drop(cx);
        if result.is_err() {
            refused += 1;
            assert_eq!(found, AFTER, "I/O {io}: nobody knows which is in force");
            continue;
        }
        *(if found == BEFORE { &mut new } else { &mut old }) += 1;
        assert_eq!(bench.reads(1, 8 * 512), 0x51, "I/O {io}");
        let world = bench.close();
        assert_snapshot(&world, "after the drop");
        let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
        judge.set_contents(BASE, world.contents(BASE));
        let bytes = content(&judge, &judge.context(64), &world.contents(DISK).to_bytes());
        assert_eq!((&bytes[..4], bytes[8]), (&found[..], 0x51), "I/O {io}");
    }
    assert!(old > 5 && new > 0 && refused > 0, "{old} {new} {refused}");
}

/// One step fails, whichever, with or without its effect. The image is the old one or the new one, and sound. If the
/// header's write failed the guest's changes are refused; after any other fault they go on.
#[test]
fn apply_that_fails_at_any_step_leaves_a_sound_image() {
    const LARGE: u64 = 2048;
    let failing = Profile {
        read_error: 1000,
        write_error: 1000,
        sync_error: 1000,
        allocate_error: 1000,
        ..Profile::default()
    };
    let (mut failures, mut refusals) = (0, 0);
    for step in 0.. {
        let bench = bench(Bench::with_clusters(step, LARGE), LARGE);
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let applied = Slot::default();
        let put = Rc::clone(&applied);
        let own = cx.clone();
        cx.spawn(async move {
            *put.borrow_mut() = Some(apply(&disk, &own).await);
        });
        let steps = bench.run_failing(&applied, failing, step);
        let applied = applied.take().expect("an answer");
        if steps <= step {
            applied.expect("nothing failed");
            break;
        }
        failures += u64::from(applied.is_err());
        let now = if applied.is_ok() { BEFORE } else { AFTER };
        assert_eq!(disk_of(&bench, LARGE), now, "step {step}");
        let written = bench
            .write(1, 8 * LARGE + 512, 0x51)
            .take()
            .expect("an answer")
            .result;
        let is_refused = written == Err(IoError::Corrupt);
        if is_refused {
            refusals += 1;
            assert!(applied.is_err(), "step {step}");
        } else {
            assert_eq!(written, Ok(()), "step {step}");
            // What was written for the operation does not show in clusters that are new.
            let around = [0, 512, 1024, 1536].map(|more| bench.reads(1, 8 * LARGE + more));
            assert_eq!(around, [0, 0x51, 0, 0], "step {step}");
            is_ok(&bench.write(1, 3 * LARGE + 512, 0x52));
        }
        bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default());
        let world = bench.world.clone();
        drop(bench);
        world.settle();
        let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
        judge.set_contents(BASE, world.contents(BASE));
        judge.set_contents(DISK, world.contents(DISK));
        let cx = judge.context(64);
        let view = judge.file(DISK, false).view(&cx).expect("a view");
        let report = cx.block_on(check(&view)).expect("it turns").expect("a check");
        assert_eq!(report.corruptions, 0, "step {step}: {:?}", report.findings);
        let image = world.contents(DISK).to_bytes();
        let clusters = |bytes: &[u8]| [0, 1, 2, 3].map(|at| bytes[(at * LARGE / 512) as usize]);
        let found = clusters(&content(&judge, &cx, &image));
        assert!(
            found == now || is_refused && found == BEFORE,
            "step {step}: {found:x?}"
        );
        let [entry] = &entries(&image)[..] else {
            panic!("step {step}: the snapshot is gone")
        };
        let kept = content(&judge, &cx, &as_disk(&image, entry));
        assert_eq!(clusters(&kept), BEFORE, "step {step}: the snapshot has changed");
        assert_eq!(
            kept[(3 * LARGE / 512) as usize + 1],
            0xBB,
            "step {step}: it has changed"
        );
    }
    assert!(
        failures > 5 && refusals > 0,
        "{failures} failures, {refusals} refusals"
    );
}

/// The host has no space at any step, and writes wait for it: the operation does not, and the queues go on.
#[test]
fn apply_fails_without_space_and_does_not_wait_for_it() {
    let mut failures = 0;
    for space in 0.. {
        let world = world(1, 512);
        let waiting = OpenOptions {
            wait_for_space: true,
            ..options()
        };
        let (disk, workers) = Workers::open(&world, DISK, &waiting);
        let bench = bench(Bench { world, disk, workers }, 512);
        bench.world.limit_space(Some(space));
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let applied = bench.workers.run(0, async move { apply(&disk, &cx).await });
        bench.world.limit_space(None);
        let now = match applied.take().expect("it waits for space") {
            Err(SnapshotError::Io(error)) if error.is_no_space() => {
                failures += 1;
                AFTER
            }
            applied => {
                applied.expect("an application");
                BEFORE
            }
        };
        assert_eq!(disk_of(&bench, 512), now, "space for {space}");
        is_ok(&bench.write(1, 0, 0x22));
        if !bench.world.is_starved() {
            assert_snapshot(&bench.close(), "in the end");
            break;
        }
    }
    assert!(failures > 3, "{failures} failures");
}

/// The application makes the disk smaller while requests past its new end are held off. They fail, and no mapping is left
/// there.
#[test]
fn requests_past_the_end_fail_when_apply_has_made_the_disk_smaller() {
    let (small, large) = (8 << 10, 64 << 10);
    let world = SimWorld::new(1, Profile::IMMEDIATE);
    let cx = world.context(64);
    let view = world.file(DISK, true).view(&cx).expect("a view");
    let mut made = CreateOptions::new(small);
    made.cluster_size = 512;
    cx.block_on(create(&view, &made))
        .expect("it turns")
        .expect("an image");
    drop(view);
    let (disk, workers) = Workers::open(&world, DISK, &options());
    let bench = Bench { world, disk, workers };
    is_ok(&bench.write(1, small - 512, 0x11));
    bench
        .create(0, "one")
        .take()
        .expect("an answer")
        .expect("a snapshot");
    {
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let grown = bench.workers.run(0, async move { disk.grow(&cx, large).await });
        grown.take().expect("an answer").expect("growth");
    }
    // In place if it were let through, and not.
    is_ok(&bench.write(1, small, 0x21));
    is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
    let applied = bench.hold(2, async |disk, cx| {
        let which = SnapshotSelector::Id("1".to_owned());
        disk.apply_snapshot(&cx, &which, DiskSize::MayChange).await
    });
    assert!(applied.borrow().is_none(), "it is held");
    let wide = AlignedBuf::from_slice(&[0x33; 1024]).into();
    let late = [
        bench.write(1, small, 0x31),
        bench.write(0, large - 512, 0x32),
        bench
            .workers
            .ask(1, Op::Write { fua: false }, small - 512, 1024, wide),
        bench.read(1, small),
        bench.workers.ask(1, Op::Discard, small, 512, Buffer::default()),
    ];
    let inside = bench.write(1, 0, 0x34);
    bench.world.release();
    bench.workers.settle();
    applied.take().expect("an answer").expect("an application");
    for answer in late {
        assert_eq!(answer.take().expect("an answer").result, Err(IoError::OutOfRange));
    }
    is_ok(&inside);
    assert_eq!(bench.disk.info().size_bytes, small);
    assert_eq!([0, small - 512].map(|at| bench.reads(1, at)), [0x34, 0x11]);
    let image = bench.close().contents(DISK).to_bytes();
    assert_eq!(image[24..32], small.to_be_bytes(), "the header's size");
}

/// A block device without room for the next state: the operation fails, and the image is as it was.
#[test]
fn apply_on_a_full_block_device_leaves_the_image_as_it_was() {
    let world = small(1).close();
    world.fix_size(DISK);
    let before = world.contents(DISK).to_bytes();
    let cx = world.context(64);
    let disk = cx.block_on(QcowDisk::open_on(&cx, &world, Path::new(DISK), &options()));
    let disk = disk.expect("nothing waits for ever").expect("a disk");
    let mut names = 0;
    // It has room for some tables yet.
    let error = loop {
        match cx.block_on(disk.create_snapshot(&cx, &names.to_string(), UNIX_EPOCH)) {
            Ok(Ok(_)) => names += 1,
            failed => break failed.expect("nothing waits for ever").expect_err("no room"),
        }
    };
    assert!(
        matches!(error, SnapshotError::Io(error) if error.is_no_space()),
        "{error}"
    );
    let before = if names == 0 {
        before
    } else {
        world.contents(DISK).to_bytes()
    };
    let applied = cx.block_on(apply(&disk, &cx)).expect("nothing waits for ever");
    let error = applied.expect_err("there is no room");
    assert!(
        matches!(error, SnapshotError::Io(error) if error.is_no_space()),
        "{error}"
    );
    cx.block_on(disk.close(&cx))
        .expect("it turns")
        .expect("a clean close");
    world.settle();
    assert!(world.contents(DISK).to_bytes() == before, "the image has changed");
}
