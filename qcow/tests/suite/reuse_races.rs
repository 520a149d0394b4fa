//! Reuse of dropped clusters before the file grows, in the simulated world: the round that makes them free is held at each
//! of its operations, fails, or meets requests in flight, snapshots and the close; and time passes without a guest's FLUSH.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use block::{AlignedBuf, Buffer, Disk, Done, IoError, Op};
use qcow::image::{CreateOptions, create};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimWorld};

use crate::closing::assert_flawless;
use crate::workers::{Slot, Workers};

const DISK: &str = "disk";
const CLUSTER: u64 = 512;
const WRITE: Op = Op::Write { fua: false };
/// Clusters that are written before a test begins.
const LIVE: u64 = 48;
/// Those of them that are discarded: far more than may wait in so small a file.
const DISCARDED: u64 = 40;
/// The time that a write waits for freed clusters.
const GROWTH_MAX: Duration = Duration::from_millis(500);
/// The time after which drops are freed without a FLUSH, and between two attempts.
const FLUSH_AFTER: Duration = Duration::from_secs(1);
const PASS_AFTER: Duration = Duration::from_millis(100);

/// An image whose first clusters hold their number plus one, durably, and two workers with a queue each.
struct Bench {
    world: SimWorld,
    disk: Arc<QcowDisk>,
    workers: Workers,
}

fn options() -> OpenOptions {
    OpenOptions {
        lock: None,
        ..OpenOptions::default()
    }
}

impl Bench {
    fn new() -> Self {
        let world = SimWorld::new(1, Profile::IMMEDIATE);
        let cx = world.context(64);
        let made = cx.block_on(async {
            let view = world.file(DISK, true).view(&cx).expect("a view");
            let mut shape = CreateOptions::new(128 << 10);
            shape.cluster_size = CLUSTER;
            create(&view, &shape).await.expect("an image");
        });
        made.expect("nothing waits for ever");
        let bench = Self::open(world);
        for cluster in 0..LIVE {
            bench.write(0, cluster, cluster as u8 + 1);
        }
        bench.flush(0);
        bench
    }

    fn open(world: SimWorld) -> Self {
        let (disk, workers) = Workers::open(&world, DISK, &options());
        Self { world, disk, workers }
    }

    /// Submits a request of `count` clusters, and turns until only what is held is under way.
    fn ask(&self, worker: usize, op: Op, cluster: u64, count: u64, byte: Option<u8>) -> Slot<Done> {
        let len = count * CLUSTER;
        let buffer = byte.map_or_else(Buffer::default, |byte| {
            AlignedBuf::from_slice(&vec![byte; len as usize]).into()
        });
        self.workers.ask(worker, op, cluster * CLUSTER, len, buffer)
    }

    fn start_write(&self, worker: usize, cluster: u64, byte: u8) -> Slot<Done> {
        self.ask(worker, WRITE, cluster, 1, Some(byte))
    }

    #[track_caller]
    fn write(&self, worker: usize, cluster: u64, byte: u8) {
        take(&self.start_write(worker, cluster, byte)).expect("a write");
    }

    #[track_caller]
    fn discard(&self, worker: usize, cluster: u64, count: u64) {
        take(&self.ask(worker, Op::Discard, cluster, count, None)).expect("a discard");
    }

    #[track_caller]
    fn flush(&self, worker: usize) {
        take(&self.ask(worker, Op::Flush, 0, 0, None)).expect("a FLUSH");
    }

    #[track_caller]
    fn assert_reads(&self, cluster: u64, byte: u8) {
        let read = take(&self.ask(1, Op::Read, cluster, 1, Some(0xEE))).expect("a read");
        let bytes = read.into_owned().expect("our own buffer");
        assert!(
            bytes.iter().all(|&found| found == byte),
            "cluster {cluster}: {}",
            bytes[0]
        );
    }

    /// The clusters that were written and not discarded are as they were, the others zeros.
    #[track_caller]
    fn assert_old_content(&self) {
        for cluster in 0..LIVE {
            let byte = if cluster < DISCARDED { 0 } else { cluster as u8 + 1 };
            self.assert_reads(cluster, byte);
        }
    }

    fn pass(&self, time: Duration) {
        self.world.pass(time);
        self.workers.settle();
    }

    fn release(&self) {
        self.world.release();
        self.workers.settle();
    }

    /// The length of the file in clusters.
    fn length(&self) -> u64 {
        self.world.contents(DISK).len().div_ceil(CLUSTER)
    }

    /// The number of operations of a kind that were submitted since the world was told to record.
    fn count(&self, kind: &str) -> usize {
        let trace = self.world.trace();
        let submitted = trace.iter().filter(|event| {
            let text = event.to_string();
            let what = text
                .strip_suffix(", submitted")
                .and_then(|text| text.split(": ").nth(1));
            what.is_some_and(|what| what.starts_with(kind))
        });
        submitted.count()
    }

    /// Starts to close the disk.
    fn start_close(&self) -> Slot<Result<(), IoError>> {
        let (cx, disk) = (self.workers.context(1).clone(), Arc::clone(&self.disk));
        self.workers.run(1, async move { disk.close(&cx).await })
    }

    /// Closes the disk and demands that its image is flawless.
    fn close(self) {
        self.workers.close(&self.disk, DISK);
    }

    fn assert_flawless(&self) {
        assert_flawless(&self.world, &self.world.context(64), DISK, "closed");
    }
}

#[track_caller]
fn take(answer: &Slot<Done>) -> Result<Buffer, IoError> {
    let done = answer.take().expect("an answer");
    done.result.map(|()| done.buffer)
}

/// Calls `test` with the round of a discard held at each of its operations, until it has no more. Returns how often.
fn at_each_operation(mut test: impl FnMut(Bench)) -> u64 {
    for ops in 0.. {
        let bench = Bench::new();
        bench.world.hold_after(ops);
        bench.discard(0, 0, DISCARDED);
        let is_held = !bench.world.is_to_hold();
        test(bench);
        if !is_held {
            return ops;
        }
    }
    unreachable!("a round ends")
}

/// A write that would make the file longer waits for the round, and at most for a time for what comes after it; what was
/// dropped is used in the end.
#[test]
fn write_waits_for_dropped_clusters_whichever_operation_is_late() {
    let (mut waited, mut grown) = (0, 0);
    let rounds = at_each_operation(|bench| {
        let before = bench.length();
        let write = bench.start_write(1, 60, 0x60);
        if write.borrow().is_none() {
            waited += 1;
            bench.pass(GROWTH_MAX);
            grown += u64::from(write.borrow().is_some());
        }
        bench.release();
        take(&write).expect("a write");
        bench.assert_reads(60, 0x60);
        bench.assert_old_content();
        // As many as were dropped, but for the write that did not wait for ever and one table.
        for cluster in 70..70 + DISCARDED - 2 {
            bench.write(0, cluster, 0x77);
        }
        assert!(bench.length() <= before + 1, "{before} → {}", bench.length());
        bench.assert_old_content();
        bench.close();
    });
    // The entries, their sync, and the hole.
    assert!(rounds >= 3 && waited >= rounds, "{waited} of {rounds}");
    assert!((1..rounds).contains(&grown), "{grown} of {rounds}");
}

/// Many writes at once wait for one round, not for one each.
#[test]
fn waiting_writes_share_one_round() {
    let bench = Bench::new();
    let before = bench.length();
    bench.world.record();
    bench.world.hold_next();
    bench.discard(0, 0, DISCARDED);
    let writes: Vec<_> = (0..12)
        .map(|index| bench.start_write(index as usize % 2, 64 + index, 0x60))
        .collect();
    assert!(
        writes.iter().all(|write| write.borrow().is_none()),
        "one did not wait"
    );
    bench.release();
    writes
        .iter()
        .for_each(|write| drop(take(write).expect("a write")));
    assert_eq!(bench.length(), before);
    assert!(bench.count("sync") <= 2, "{} syncs", bench.count("sync"));
    bench.close();
}

/// A request in flight keeps dropped clusters from being used. A write waits for its end, and not longer than it may.
#[test]
fn write_waits_for_requests_in_flight_and_not_for_ever() {
    for is_late in [false, true] {
        let bench = Bench::new();
        let before = bench.length();
        bench.world.hold_next();
        let read = bench.ask(0, Op::Read, 3, 1, Some(0xEE));
        bench.discard(1, 0, DISCARDED);
        let write = bench.start_write(1, 60, 0x60);
        assert!(write.borrow().is_none(), "it did not wait");
        bench.pass(GROWTH_MAX - Duration::from_millis(1));
        assert!(write.borrow().is_none(), "it did not wait long enough");
        if is_late {
            bench.pass(Duration::from_millis(1));
            take(&write).expect("a write");
            assert_eq!(bench.length(), before + 1);
            // The others know that there is nothing to wait for.
            bench.write(1, 61, 0x61);
            assert_eq!(bench.length(), before + 2);
            bench.release();
            bench.pass(PASS_AFTER);
        } else {
            bench.release();
            take(&write).expect("a write");
            assert_eq!(bench.length(), before);
        }
        let read = take(&read).expect("a read").into_owned().expect("our own");
        assert!(
            read.iter().all(|&byte| byte == 4),
            "the host cluster was used: {}",
            read[0]
        );
        let before = bench.length();
        for cluster in 70..70 + DISCARDED / 2 {
            bench.write(1, cluster, 0x77);
        }
        assert_eq!(bench.length(), before, "late {is_late}");
        bench.assert_old_content();
        bench.close();
    }
}

/// The sync of the engine's own round fails: writes succeed, and the file grows. A FLUSH fails, as after any failed sync.
#[test]
fn write_succeeds_when_the_round_it_waits_for_fails() {
    for is_waiting in [false, true] {
        let bench = Bench::new();
        let before = bench.length();
        bench.world.set_profile(Profile {
            sync_error: 1000,
            ..Profile::default()
        });
        if is_waiting {
            bench.world.hold_next();
        }
        bench.discard(0, 0, DISCARDED);
        let write = bench.start_write(1, 60, 0x60);
        assert_eq!(write.borrow().is_none(), is_waiting);
        bench.release();
        take(&write).expect("a write");
        assert_eq!(bench.length(), before + 1);
        bench.write(0, 61, 0x61);
        assert_eq!(bench.length(), before + 2);
        bench.assert_old_content();
        bench.assert_reads(60, 0x60);
        let failed = Some(IoError::Host { errno: 5 });
        assert_eq!(take(&bench.ask(0, Op::Flush, 0, 0, None)).err(), failed);
    }
}

/// The close, after which another process may have the image, waits for the engine's own round and finishes it.
#[test]
fn close_finishes_the_round_that_is_under_way() {
    let mut waited = 0;
    at_each_operation(|bench| {
        let closed = bench.start_close();
        waited += u64::from(closed.borrow().is_none());
        bench.release();
        closed.take().expect("it ends").expect("a clean close");
        bench.world.record();
        bench.pass(FLUSH_AFTER);
        assert_eq!(bench.world.trace().len(), 0, "a closed image is written");
        bench.assert_flawless();
        let Bench { world, disk, workers } = bench;
        drop((disk, workers));
        let bench = Bench::open(world);
        bench.assert_old_content();
        bench.close();
    });
    assert!(waited >= 4, "{waited}");
}

/// A disk becomes smaller while a write waits for the round: past the new end the write is refused, also if it had begun at the old size.
#[test]
fn write_that_waits_does_not_go_on_past_the_end_of_a_smaller_disk() {
    let mut refused = 0;
    at_each_operation(|bench| {
        let end = 60 * CLUSTER;
        let write = bench.start_write(1, 60, 0x60);
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let shrunk = bench.workers.run(0, async move { disk.shrink(&cx, end).await });
        let is_waiting = write.borrow().is_none();
        bench.release();
        shrunk.take().expect("it ends").expect("a smaller disk");
        let written = take(&write).map(drop);
        if is_waiting {
            refused += u64::from(written == Err(IoError::OutOfRange));
        }
        assert!(
            written.is_ok() || written == Err(IoError::OutOfRange),
            "{written:?}"
        );
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let grown = bench
            .workers
            .run(0, async move { disk.grow(&cx, 128 << 10).await });
        grown.take().expect("it ends").expect("a larger disk");
        bench.assert_reads(60, 0);
        bench.assert_old_content();
        bench.close();
    });
    assert!(refused > 1, "{refused}");
}

/// A snapshot waits for the round and the write that waits for it, and they for each other at no operation.
#[test]
fn snapshot_and_waiting_write_do_not_wait_for_each_other() {
    at_each_operation(|bench| {
        let write = bench.start_write(1, 60, 0x60);
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let created = bench.workers.run(
            0,
            async move { disk.create_snapshot(&cx, "one", UNIX_EPOCH).await },
        );
        bench.release();
        created.take().expect("it ends").expect("a snapshot");
        take(&write).expect("a write");
        bench.assert_old_content();
        bench.assert_reads(60, 0x60);
        bench.close();
    });
}

/// The timer of a discard expires at each operation of a snapshot, which runs alone.
#[test]
fn timer_begins_no_work_while_an_operation_runs_alone() {
    for ops in 0.. {
        let bench = Bench::new();
        bench.discard(0, 0, 4);
        bench.world.hold_after(ops);
        let (cx, disk) = (bench.workers.context(1).clone(), Arc::clone(&bench.disk));
        let created = bench.workers.run(
            1,
            async move { disk.create_snapshot(&cx, "one", UNIX_EPOCH).await },
        );
        let is_held = !bench.world.is_to_hold();
        bench.pass(FLUSH_AFTER);
        bench.release();
        created.take().expect("it ends").expect("a snapshot");
        bench.pass(FLUSH_AFTER);
        bench.close();
        if !is_held {
            assert!(ops > 8, "{ops} operations");
            return;
        }
    }
}

/// Nobody asks for a FLUSH, and the space returns: after a bounded time, in one round for all discards. That takes one sync,
/// of the entries: nothing was written before them.
#[test]
fn idle_disk_returns_discarded_space() {
    let bench = Bench::new();
    let before = bench.length();
    bench.world.record();
    for cluster in 0..4 {
        bench.discard(cluster as usize % 2, cluster, 1);
    }
    bench.pass(FLUSH_AFTER - Duration::from_millis(1));
    assert_eq!((bench.count("punch"), bench.count("sync")), (0, 0));
    bench.pass(Duration::from_millis(1));
    assert_eq!((bench.count("punch"), bench.count("sync")), (1, 1));
    for cluster in 60..64 {
        bench.write(1, cluster, 0x60);
    }
    assert_eq!(bench.length(), before);
    bench.pass(FLUSH_AFTER);
    assert_eq!(bench.count("sync"), 1, "it flushes without a reason");
    // And again.
    bench.discard(0, 10, 1);
    bench.pass(FLUSH_AFTER);
    assert_eq!(bench.count("punch"), 2);
    bench.close();
}

/// As above, while a request is in flight that may use the space.
#[test]
fn idle_disk_returns_space_after_the_last_request_on_it() {
    let bench = Bench::new();
    bench.world.record();
    bench.world.hold_next();
    let read = bench.ask(0, Op::Read, 3, 1, Some(0xEE));
    bench.discard(1, 0, 8);
    bench.pass(FLUSH_AFTER);
    bench.pass(PASS_AFTER);
    assert_eq!((bench.count("punch"), bench.count("sync")), (0, 1));
    bench.release();
    take(&read).expect("a read");
    bench.pass(PASS_AFTER);
    assert_eq!((bench.count("punch"), bench.count("sync")), (1, 1));
    bench.close();
}

/// The cost of reuse: a round for many discards, and not one for each.
#[test]
fn steady_discards_share_rounds() {
    let bench = Bench::new();
    let before = bench.length();
    bench.world.record();
    for turn in 0..200 {
        bench.discard(0, turn % LIVE, 1);
        bench.write(0, turn % LIVE, turn as u8 | 1);
    }
    let syncs = bench.count("sync");
    assert!((10..=70).contains(&syncs), "{syncs} syncs");
    assert!(bench.length() <= before + 17, "{before} → {}", bench.length());
    bench.close();
}

/// Copy-on-write of a cluster that a snapshot holds drops a reference and frees nothing: no round is worth it.
#[test]
fn drops_of_shared_clusters_begin_no_round() {
    let bench = Bench::new();
    let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
    let created = bench.workers.run(
        0,
        async move { disk.create_snapshot(&cx, "one", UNIX_EPOCH).await },
    );
    created.take().expect("it ends").expect("a snapshot");
    bench.world.record();
    for cluster in 0..LIVE {
        bench.write(1, cluster, 0x99);
    }
    assert_eq!(bench.count("sync"), 0);
    bench.close();
}

/// The largest file that loops of discards and writes make, in clusters: what they hold at most, and a sixteenth.
#[test]
fn file_grows_by_a_sixteenth_in_loops_without_flushes() {
    let bench = Bench::new();
    let before = bench.length();
    for turn in 0..20 {
        bench.discard(turn as usize % 2, 0, LIVE);
        for cluster in 0..LIVE {
            bench.write(turn as usize % 2, cluster, cluster as u8 + 1);
        }
        assert!(
            bench.length() <= before + 17,
            "turn {turn}: {before} → {}",
            bench.length()
        );
    }
    for cluster in 0..LIVE {
        bench.assert_reads(cluster, cluster as u8 + 1);
    }
    bench.close();
}
