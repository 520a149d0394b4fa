//! Disks that become smaller while requests are under way, in the simulated world: one operation is held while others end,
//! tasks are dropped, steps fail. The disk is what it was or what it becomes, whole.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, IoError, Op};
use qcow::image::check;
use qcow::{QcowDisk, ShrinkError, SnapshotError};
use simulator::{Profile, SimWorld};

use crate::snapshot_bench::{BASE, Bench, DISK, byte_of, content_of, is_ok};
use crate::snapshot_content::content;
use crate::workers::Slot;

/// Of 24 KiB over a base of half as much.
const CLUSTER: u64 = 2048;
const LARGE: u64 = 24 << 10;
/// In the fifth cluster.
const SMALL: u64 = 4 * CLUSTER + 1024;

async fn shrink(disk: &QcowDisk, cx: &Context) -> Result<(), ShrinkError> {
    disk.shrink(cx, SMALL).await
}

/// A disk of 0x11 with a snapshot, and 0x22 in some clusters since, durably.
fn bench(seed: u64) -> Bench {
    let bench = Bench::with_clusters(seed, CLUSTER);
    let write = |sectors: std::ops::Range<u64>, byte: u8| {
        for sector in sectors {
            is_ok(&bench.write(1, sector * 512, byte));
        }
    };
    write(0..LARGE / 512, 0x11);
    let taken = bench.create(0, "one");
    taken.take().expect("an answer").expect("a snapshot");
    write(12..24, 0x22);
    is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
    bench
}

fn known() -> Vec<u8> {
    let sectors = 0..LARGE / 512;
    sectors
        .map(|sector| if (12..24).contains(&sector) { 0x22 } else { 0x11 })
        .collect()
}

/// The disk in the world's image, a byte for each sector; the image has no error.
fn disk_of(world: &SimWorld, what: &str) -> Vec<u8> {
    let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
    judge.set_contents(BASE, world.contents(BASE));
    judge.set_contents(DISK, world.contents(DISK));
    let cx = judge.context(64);
    let view = judge.file(DISK, false).view(&cx).expect("a view");
    let report = cx.block_on(check(&view)).expect("it turns").expect("a check");
    assert_eq!(report.corruptions, 0, "{what}: {:?}", report.findings);
    content(&judge, &cx, &world.contents(DISK).to_bytes())
}

#[track_caller]
fn assert_snapshot(world: &SimWorld, what: &str) {
    assert!(content_of(world, "one") == [0x11; 48], "{what}: the snapshot");
}

/// The operation itself is under way, at each of its I/Os: no request gets through, and those past the new end fail then.
#[test]
fn no_request_is_served_while_shrink_is_under_way() {
    let mut ios = 0;
    for io in 0.. {
        let bench = bench(io);
        let shrunk = bench.hold(io, async |disk, cx| shrink(&disk, &cx).await);
        if shrunk.borrow().is_some() {
            shrunk.take().expect("an answer").expect("a smaller disk");
            ios = io;
            break;
        }
        let wide = AlignedBuf::from_slice(&[0x33; 1024]).into();
        let late = [
            bench.write(1, SMALL, 0x31),
            bench.write(0, LARGE - 512, 0x32),
            bench
                .workers
                .ask(1, Op::Write { fua: false }, SMALL - 512, 1024, wide),
            bench.read(1, SMALL),
            bench
                .workers
                .ask(1, Op::Discard, SMALL, CLUSTER, Buffer::default()),
        ];
        let (inside, read) = (bench.write(1, 0, 0x34), bench.read(0, SMALL - 512));
        for answer in late.iter().chain([&inside, &read]) {
            assert!(answer.borrow().is_none(), "I/O {io}: let through");
        }
        bench.world.release();
        bench.workers.settle();
        shrunk.take().expect("an answer").expect("a smaller disk");
        for answer in late {
            let result = answer.take().expect("an answer").result;
            assert_eq!(result, Err(IoError::OutOfRange), "I/O {io}");
        }
        is_ok(&inside);
        assert_eq!(byte_of(&read), 0x22, "I/O {io}");
        assert_eq!(bench.disk.info().size_bytes, SMALL);
        let world = bench.close();
        assert_snapshot(&world, "in the end");
        let mut expected = known();
        expected.truncate(SMALL as usize / 512);
        expected[0] = 0x34;
        assert_eq!(disk_of(&world, "in the end"), expected, "I/O {io}");
    }
    assert!(ios > 6, "only {ios} I/Os");
}

/// A write past the new end is in flight: the shrink waits for it, and its cluster is freed after it.
#[test]
fn shrink_waits_for_requests_in_flight() {
    let bench = bench(1);
    bench.world.hold_next();
    let held = bench.write(1, LARGE - 512, 0x77);
    let shrunk: Slot<_> = {
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        bench.workers.run(0, async move { shrink(&disk, &cx).await })
    };
    assert!(shrunk.borrow().is_none(), "a write is in flight");
    bench.world.release();
    bench.workers.settle();
    shrunk.take().expect("an answer").expect("a smaller disk");
    is_ok(&held);
    let world = bench.close();
    assert_snapshot(&world, "in the end");
    assert_eq!(disk_of(&world, "in the end"), known()[..SMALL as usize / 512]);
}

/// The task is dropped half-way, at each of its I/Os: the requests that it held off go on, and the disk is the old one or
/// the new one.
#[test]
fn requests_go_on_when_the_task_of_a_shrink_is_dropped() {
    let (mut old, mut new, mut refused) = (0, 0, 0);
    for io in 0..40 {
        let bench = bench(io);
        let cx = bench.world.context(64);
        let disk = Arc::clone(&bench.disk);
        let is_over = Rc::new(Cell::new(false));
        let mut task = Box::pin({
            let (cx, is_over) = (cx.clone(), Rc::clone(&is_over));
            async move {
                let shrunk = shrink(&disk, &cx).await;
                is_over.set(true);
                shrunk
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
        let late = bench.write(1, 0, 0x51);
        drop(task);
        for _ in 0..64 {
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            bench.world.step();
        }
        bench.workers.settle();
        let result = late.take().expect("it waits for ever").result;
        drop(cx);
        if result.is_err() {
            assert_eq!(result, Err(IoError::Corrupt), "I/O {io}");
            refused += 1;
            continue;
        }
        let size = bench.disk.info().size_bytes;
        assert!([SMALL, LARGE].contains(&size), "I/O {io}: {size}");
        *(if size == SMALL { &mut new } else { &mut old }) += 1;
        let world = bench.close();
        assert_snapshot(&world, "after the drop");
        let mut expected = known();
        expected.truncate(size as usize / 512);
        expected[0] = 0x51;
        assert_eq!(disk_of(&world, "after the drop"), expected, "I/O {io}");
    }
    assert!(old > 5 && new > 0 && refused > 0, "{old} {new} {refused}");
}

/// One step fails, whichever, with or without its effect. The image is the old one or the new one, and sound. If the
/// header's write failed the guest's changes are refused; after any other fault they go on.
#[test]
fn shrink_that_fails_at_any_step_leaves_a_sound_image() {
    let failing = Profile {
        read_error: 1000,
        write_error: 1000,
        sync_error: 1000,
        allocate_error: 1000,
        ..Profile::default()
    };
    let (mut failures, mut refusals) = (0, 0);
    for step in 0.. {
        let bench = bench(step);
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let shrunk = Slot::default();
        let put = Rc::clone(&shrunk);
        let own = cx.clone();
        cx.spawn(async move {
            *put.borrow_mut() = Some(shrink(&disk, &own).await);
        });
        let steps = bench.run_failing(&shrunk, failing, step);
        let shrunk = shrunk.take().expect("an answer");
        if steps <= step {
            shrunk.expect("nothing failed");
            break;
        }
        failures += u64::from(shrunk.is_err());
        let now = if shrunk.is_ok() { SMALL } else { LARGE };
        assert_eq!(bench.disk.info().size_bytes, now, "step {step}");
        let written = bench.write(1, 512, 0x51).take().expect("an answer").result;
        let is_refused = written == Err(IoError::Corrupt);
        if is_refused {
            refusals += 1;
            assert!(shrunk.is_err(), "step {step}");
        } else {
            assert_eq!(written, Ok(()), "step {step}");
        }
        bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default());
        let world = bench.world.clone();
        drop(bench);
        world.settle();
        let what = format!("step {step}");
        let found = disk_of(&world, &what);
        let size = found.len() as u64 * 512;
        assert!(size == now || is_refused && size == SMALL, "{what}: {size}");
        let mut expected = known();
        expected.truncate(found.len());
        // Without a FLUSH that succeeds nobody knows of the write.
        expected[1] = found[1];
        assert_eq!(found, expected, "{what}");
        assert_snapshot(&world, &what);
    }
    assert!(
        failures > 5 && refusals > 0,
        "{failures} failures, {refusals} refusals"
    );
}

/// The host has no space at any step: the disk stays as it was, and the queues go on.
#[test]
fn shrink_fails_without_space_and_the_disk_stays() {
    let mut failures = 0;
    for space in 0.. {
        let bench = bench(1);
        bench.world.limit_space(Some(space));
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let shrunk = bench.workers.run(0, async move { shrink(&disk, &cx).await });
        bench.world.limit_space(None);
        let size = match shrunk.take().expect("it waits for space") {
            Err(ShrinkError::Metadata(SnapshotError::Io(error))) if error.is_no_space() => {
                failures += 1;
                LARGE
            }
            shrunk => {
                shrunk.expect("a smaller disk");
                SMALL
            }
        };
        assert_eq!(bench.disk.info().size_bytes, size, "space for {space}");
        is_ok(&bench.write(1, 0, 0x22));
        if size == SMALL {
            assert_snapshot(&bench.close(), "in the end");
            break;
        }
    }
    assert!(failures > 3, "{failures} failures");
}
