//! Snapshots while requests are under way, in the simulated world: one operation is held while others end, tasks are
//! dropped, writes fail, and the power may go at any step.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use block::{Buffer, Disk, IoError, Op};
use qcow::image::check;
use qcow::{OpenOptions, QcowDisk, SnapshotError, SnapshotSelector};
use simulator::{Profile, SimWorld};

use crate::snapshot_bench::{BASE, Bench, DISK, byte_of, content_of, is_ok, options, world};
use crate::snapshot_content::{as_disk, content, entries};
use crate::workers::{Slot, Workers};

/// A write is in flight: the snapshot waits for it and has it. Requests that come meanwhile wait, are answered before the snapshot
/// is made, and are in it.
#[test]
fn create_waits_for_requests_in_flight_and_holds_later_ones_off() {
    let bench = Bench::new(1);
    is_ok(&bench.write(1, 0, 0x11));
    is_ok(&bench.write(1, 512, 0x12));
    bench.world.hold_next();
    let held = bench.write(1, 1024, 0x13);
    let created = bench.create(0, "one");
    assert!(created.borrow().is_none(), "a write is in flight");
    let in_place = bench.write(1, 0, 0x21);
    let (read, flushed) = (
        bench.read(1, 512),
        bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()),
    );
    let zeroes = Op::WriteZeroes {
        unmap: true,
        fua: false,
    };
    let zeroed = bench.workers.ask(0, zeroes, 512, 512, Buffer::default());
    for answer in [&held, &in_place, &read, &flushed, &zeroed] {
        assert!(answer.borrow().is_none(), "it was let through");
    }
    bench.world.release();
    bench.workers.settle();
    created.take().expect("an answer").expect("a snapshot");
    for answer in [&held, &in_place, &flushed, &zeroed] {
        is_ok(answer);
    }
    assert!([0, 0x12].contains(&byte_of(&read)));
    assert_eq!([0, 512, 1024].map(|at| bench.reads(1, at)), [0x21, 0, 0x13]);
    let world = bench.close();
    assert_eq!(content_of(&world, "one")[..4], [0x21, 0, 0x13, 0xBB]);
}

/// The operation itself is under way, at each of its I/Os: requests of both queues are answered while it copies tables, and held off
/// when it ends. It begins without an I/O, as everything is durable. The snapshot has what was answered before it ends.
#[test]
fn requests_are_served_while_create_copies_tables_and_held_off_while_it_switches() {
    let (mut ios, mut changes) = (0, Vec::new());
    for io in 0.. {
        let bench = Bench::new(io);
        for (at, byte) in [(0, 0x11), (512, 0x12), (1024, 0x13)] {
            is_ok(&bench.write(0, at, byte));
        }
        is_ok(&bench.workers.ask(0, Op::Flush, 0, 0, Buffer::default()));
        let created = bench.hold(io, async |disk, cx| {
            disk.create_snapshot(&cx, "one", UNIX_EPOCH).await
        });
        if created.borrow().is_some() {
            created.take().expect("an answer").expect("a snapshot");
            ios = io;
            break;
        }
        let discard = |at| bench.workers.ask(1, Op::Discard, at, 512, Buffer::default());
        let answers = [bench.write(1, 0, 0x21), bench.write(1, 4096, 0x24), discard(512)];
        let (read, other) = (bench.read(1, 0), bench.read(0, 1024));
        let is_served = read.borrow().is_some();
        assert_eq!(is_served, other.borrow().is_some(), "I/O {io}");
        for answer in &answers {
            assert_eq!(answer.borrow().is_some(), is_served, "I/O {io}");
        }
        if changes.last() != Some(&is_served) {
            changes.push(is_served);
        }
        bench.world.release();
        bench.workers.settle();
        created.take().expect("an answer").expect("a snapshot");
        answers.iter().for_each(is_ok);
        assert_eq!(byte_of(&other), 0x13);
        read.take().expect("an answer").result.expect("a read");
        assert_eq!([0, 4096, 512].map(|at| bench.reads(0, at)), [0x21, 0x24, 0]);
        is_ok(&bench.write(1, 0, 0x31));
        let world = bench.close();
        let found = content_of(&world, "one");
        let expected = match is_served {
            true => [0x21, 0, 0x13, 0x24],
            false => [0x11, 0x12, 0x13, 0xBB],
        };
        assert_eq!([0, 1, 2, 8].map(|sector| found[sector]), expected, "I/O {io}");
    }
    assert!(ios > 6, "only {ios} I/Os");
    assert_eq!(changes, [true, false]);
}

/// A deletion likewise, at each of its I/Os: what requests change meanwhile shares clusters with the snapshot, and frees them.
#[test]
fn requests_are_served_while_delete_follows_tables_and_held_off_while_it_switches() {
    let mut changes = Vec::new();
    let mut ios = 0;
    for io in 0.. {
        let bench = Bench::new(io);
        for (at, byte) in [(0, 0x11), (512, 0x12), (1024, 0x13), (1536, 0x14)] {
            is_ok(&bench.write(0, at, byte));
        }
        bench
            .create(0, "one")
            .take()
            .expect("an answer")
            .expect("a snapshot");
        is_ok(&bench.write(0, 1536, 0x15));
        is_ok(&bench.workers.ask(0, Op::Flush, 0, 0, Buffer::default()));
        let deleted = bench.hold(io, async |disk, cx| {
            let one = SnapshotSelector::Name("one".to_owned());
            disk.delete_snapshot(&cx, &one).await
        });
        if deleted.borrow().is_some() {
            deleted.take().expect("an answer").expect("a deletion");
            ios = io;
            break;
        }
        let discard = |at| bench.workers.ask(1, Op::Discard, at, 512, Buffer::default());
        let answers = [bench.write(1, 0, 0x21), bench.write(1, 4096, 0x24), discard(512)];
        let (read, other) = (bench.read(1, 0), bench.read(0, 1024));
        let is_served = read.borrow().is_some();
        assert_eq!(is_served, other.borrow().is_some(), "I/O {io}");
        if changes.last() != Some(&is_served) {
            changes.push(is_served);
        }
        bench.world.release();
        bench.workers.settle();
        deleted.take().expect("an answer").expect("a deletion");
        answers.iter().for_each(is_ok);
        assert_eq!(byte_of(&other), 0x13);
        read.take().expect("an answer").result.expect("a read");
        let found = [0, 512, 1024, 1536, 4096].map(|at| bench.reads(0, at));
        assert_eq!(found, [0x21, 0, 0x13, 0x15, 0x24], "I/O {io}");
        is_ok(&bench.write(1, 1024, 0x31));
        is_ok(&bench.write(1, 1536, 0x35));
        let world = bench.close();
        assert!(entries(&world.contents(DISK).to_bytes()).is_empty(), "I/O {io}");
    }
    assert!(ios > 6, "only {ios} I/Os");
    // What the write has replaced is counted before requests are held off to begin.
    assert_eq!(changes, [true, false]);
}

/// Requests are held off for no more I/Os, however many tables the disk has.
#[test]
fn requests_are_not_held_off_for_longer_by_more_tables() {
    let held_off = |tables: u64, deletes: bool| {
        let mut held_off = 0;
        for io in 0.. {
            let bench = Bench::of_bytes(io, 4 << 20);
            for table in 0..tables {
                is_ok(&bench.write(0, table * (32 << 10), 0x11));
            }
            if deletes {
                bench
                    .create(0, "one")
                    .take()
                    .expect("an answer")
                    .expect("a snapshot");
            }
            is_ok(&bench.workers.ask(0, Op::Flush, 0, 0, Buffer::default()));
            let done = bench.hold(io, async move |disk, cx| {
                if deletes {
                    let one = SnapshotSelector::Name("one".to_owned());
                    disk.delete_snapshot(&cx, &one).await
                } else {
                    disk.create_snapshot(&cx, "one", UNIX_EPOCH).await.map(drop)
                }
            });
            if done.take().is_some() {
                return held_off;
            }
            held_off += u64::from(bench.read(1, 0).borrow().is_none());
            bench.world.release();
        }
        held_off
    };
    for deletes in [false, true] {
        let (few, many) = (held_off(2, deletes), held_off(100, deletes));
        // Each table is read and written, and what counts it.
        assert!(
            many <= few + 16,
            "{few} I/Os with 2 tables, {many} with 100 ({deletes})"
        );
    }
}

/// The task of an operation is dropped half-way, at each of its I/Os: the requests that it held off go on, and the image
/// is the old one or the new one.
#[test]
fn requests_go_on_when_the_task_of_a_create_is_dropped() {
    for io in 0..24 {
        let bench = Bench::new(io);
        for (at, byte) in [(0, 0x11), (512, 0x12)] {
            is_ok(&bench.write(1, at, byte));
        }
        let cx = bench.world.context(64);
        let disk = Arc::clone(&bench.disk);
        let is_over = Rc::new(Cell::new(false));
        let mut task = Box::pin({
            let (cx, is_over) = (cx.clone(), Rc::clone(&is_over));
            async move {
                let created = disk.create_snapshot(&cx, "one", UNIX_EPOCH).await;
                is_over.set(true);
                created
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
        let late = bench.write(1, 0, 0x21);
        drop(task);
        for _ in 0..64 {
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            bench.world.step();
        }
        bench.workers.settle();
        let result = late.take().expect("I/O {io}: it waits for ever").result;
        assert!(
            result == Ok(()) || result == Err(IoError::Corrupt),
            "I/O {io}: {result:?}"
        );
        let expected = if result.is_ok() { 0x21 } else { 0x11 };
        assert_eq!(bench.reads(1, 0), expected, "I/O {io}");
        drop(cx);
        if result.is_ok() {
            let world = bench.close();
            if !entries(&world.contents(DISK).to_bytes()).is_empty() {
                assert_eq!(content_of(&world, "one")[..2], [0x11, 0x12], "I/O {io}");
            }
        }
    }
}

/// A request that does not end, because the host has no answer: the operation gives up, and the queues go on.
#[test]
fn create_gives_up_when_a_request_in_flight_does_not_end() {
    let bench = Bench::new(1);
    is_ok(&bench.write(1, 0, 0x11));
    bench.world.hold_next();
    let held = bench.write(1, 512, 0x12);
    let created = bench.create(0, "one");
    let read = bench.read(1, 0);
    let mut turns = 0;
    while created.borrow().is_none() {
        bench.workers.settle();
        bench.world.pass(std::time::Duration::from_millis(50));
        turns += 1;
        assert!(turns < 400, "it waits for ever");
    }
    assert!(matches!(created.take(), Some(Err(SnapshotError::Busy))));
    bench.workers.settle();
    assert_eq!(byte_of(&read), 0x11);
    bench.world.release();
    bench.workers.settle();
    is_ok(&held);
    bench.close();
}

/// Clusters are being freed, and the host has no answer: as above.
#[test]
fn create_gives_up_when_background_work_does_not_end() {
    let bench = Bench::new(1);
    let ask = |op, len| bench.workers.ask(1, op, 512, len, Buffer::default());
    is_ok(&bench.write(1, 0, 0x11));
    is_ok(&bench.write(1, 512, 0x12));
    is_ok(&ask(Op::Flush, 0));
    is_ok(&ask(Op::Discard, 512));
    // After the entry and its sync, the hole.
    bench.world.hold_after(2);
    is_ok(&ask(Op::Flush, 0));
    assert!(!bench.world.is_to_hold(), "nothing is held");
    let created = bench.create(0, "one");
    let read = bench.read(1, 0);
    let mut turns = 0;
    while created.borrow().is_none() {
        assert!(read.borrow().is_none(), "the queues are held off");
        bench.workers.settle();
        bench.world.pass(std::time::Duration::from_millis(50));
        turns += 1;
        assert!(turns < 400, "it waits for ever");
    }
    assert!(turns > 90, "it had {turns} times 50 ms");
    assert!(matches!(created.take(), Some(Err(SnapshotError::Busy))));
    bench.workers.settle();
    assert_eq!(byte_of(&read), 0x11);
    bench.world.release();
    bench.workers.settle();
    let created = bench.create(0, "two");
    created.take().expect("an answer").expect("a snapshot");
    bench.close();
}

/// One step of a creation fails, whichever, with or without its effect. The image is the old one or the new one. If the
/// header's write failed nobody knows which, and the guest's changes are refused; after any other fault they go on, and
/// what was written for the snapshot does not show in clusters that are new.
#[test]
fn create_that_fails_at_any_step_leaves_a_sound_image() {
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
        let bench = Bench::with_clusters(step, LARGE);
        for (at, byte) in [(0, 0x11), (LARGE, 0x12), (6 * LARGE, 0x13)] {
            is_ok(&bench.write(1, at, byte));
        }
        is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let created = Slot::default();
        let put = Rc::clone(&created);
        let own = cx.clone();
        cx.spawn(async move {
            *put.borrow_mut() = Some(disk.create_snapshot(&own, "one", UNIX_EPOCH).await);
        });
        let steps = bench.run_failing(&created, failing, step);
        if steps <= step {
            created.take().expect("an answer").expect("nothing failed");
            break;
        }
        let created = created.take().expect("an answer");
        failures += u64::from(created.is_err());
        let mut last = 0x13;
        for (at, byte) in [
            (8 * LARGE, 0x21),
            (9 * LARGE, 0x22),
            (10 * LARGE, 0x23),
            (6 * LARGE, 0x24),
        ] {
            let written = bench.write(1, at + 512, byte).take().expect("an answer").result;
            if written == Err(IoError::Corrupt) {
                refusals += 1;
                assert!(created.is_err(), "step {step}");
                continue;
            }
            assert_eq!(written, Ok(()), "step {step}");
            assert_eq!(bench.reads(1, at + 512), byte);
            if at == 6 * LARGE {
                last = 0x24;
            } else {
                assert_eq!(
                    [0, 1024, 1536].map(|more| bench.reads(1, at + more)),
                    [0; 3],
                    "step {step}"
                );
            }
        }
        bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default());
        let world = bench.world.clone();
        drop(bench);
        world.settle();
        let image = world.contents(DISK).to_bytes();
        let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
        judge.set_contents(BASE, world.contents(BASE));
        judge.set_contents(DISK, world.contents(DISK));
        let cx = judge.context(64);
        let view = judge.file(DISK, false).view(&cx).expect("a view");
        let report = cx.block_on(check(&view)).expect("it turns").expect("a check");
        assert_eq!(report.corruptions, 0, "step {step}: {:?}", report.findings);
        let sector = |bytes: &[u8], at: u64| bytes[(at / 512) as usize];
        let found = content(&judge, &cx, &image);
        assert_eq!(
            [0, LARGE, 6 * LARGE].map(|at| sector(&found, at)),
            [0x11, 0x12, 0x13],
            "step {step}"
        );
        let beside = sector(&found, 6 * LARGE + 512);
        assert!(beside == 0 || beside == last, "step {step}: {beside:#x}");
        for entry in entries(&image) {
            let found = content(&judge, &cx, &as_disk(&image, &entry));
            assert_eq!(
                [0, LARGE, 6 * LARGE].map(|at| sector(&found, at)),
                [0x11, 0x12, 0x13],
                "step {step}"
            );
            assert_eq!(
                sector(&found, 6 * LARGE + 512),
                0,
                "step {step}: the snapshot has changed"
            );
        }
        assert!(created.is_err() || entries(&image).len() == 1, "step {step}");
    }
    assert!(
        failures > 5 && refusals > 0,
        "{failures} failures, {refusals} refusals"
    );
}

/// The host has no space at any step, and writes wait for it: the operation does not, and the queues go on.
#[test]
fn create_fails_without_space_and_does_not_wait_for_it() {
    let mut failures = 0;
    for space in 0.. {
        let world = world(1, 512);
        let waiting = OpenOptions {
            wait_for_space: true,
            ..options()
        };
        let (disk, workers) = Workers::open(&world, DISK, &waiting);
        let bench = Bench { world, disk, workers };
        for at in 0..8 {
            is_ok(&bench.write(1, at * 512, 0x11));
        }
        is_ok(&bench.workers.ask(1, Op::Flush, 0, 0, Buffer::default()));
        bench.world.limit_space(Some(space));
        let created = bench.create(0, "one");
        bench.world.limit_space(None);
        match created.take().expect("it waits for space") {
            Err(SnapshotError::Io(error)) if error.is_no_space() => failures += 1,
            created => assert_eq!(created.expect("a snapshot"), "1"),
        }
        assert_eq!(bench.reads(1, 0), 0x11, "space for {space}");
        is_ok(&bench.write(1, 0, 0x22));
        if !bench.world.is_starved() {
            break;
        }
    }
    assert!(failures > 3, "{failures} failures");
}

/// A block device without room for the next state: the operation fails, and the image is as it was.
#[test]
fn create_on_a_full_block_device_leaves_the_image_as_it_was() {
    let bench = Bench::new(1);
    for at in 0..8 {
        is_ok(&bench.write(1, at * 512, 0x11));
    }
    let world = bench.close();
    world.fix_size(DISK);
    let before = world.contents(DISK).to_bytes();
    let cx = world.context(64);
    let disk = cx.block_on(QcowDisk::open_on(&cx, &world, Path::new(DISK), &options()));
    let disk = disk.expect("nothing waits for ever").expect("a disk");
    let created = cx.block_on(disk.create_snapshot(&cx, "one", UNIX_EPOCH));
    let error = created
        .expect("nothing waits for ever")
        .expect_err("there is no room");
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
