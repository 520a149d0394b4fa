//! Host clusters under operations in flight: in the simulated world one operation is held while its cluster is
//! discarded, the discard made durable, and the space wanted again.

use std::sync::Arc;

use block::{AlignedBuf, Buffer, Done, IoError, Op};
use qcow::image::{CreateOptions, create};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimWorld};

use crate::workers::{Slot, Workers};

const DISK: &str = "disk";
const CLUSTER: u64 = 512;
const WRITE: Op = Op::Write { fua: false };

/// A request's answer, once it has one.
type Answer = Slot<Done>;

/// An image of which the first eight clusters hold their number plus one, and two workers with a queue each.
struct Bench {
    world: SimWorld,
    disk: Arc<QcowDisk>,
    workers: Workers,
}

impl Bench {
    fn new(options: &OpenOptions) -> Self {
        let world = SimWorld::new(1, Profile::IMMEDIATE);
        let cx = world.context(64);
        let view = world.file(DISK, true).view(&cx).expect("a view");
        let mut shape = CreateOptions::new(64 << 10);
        shape.cluster_size = CLUSTER;
        let made = cx.block_on(create(&view, &shape));
        made.expect("nothing waits for ever").expect("an image");
        let (disk, workers) = Workers::open(&world, DISK, options);
        let bench = Self { world, disk, workers };
        for cluster in 0..8 {
            bench.write(0, cluster, cluster as u8 + 1);
        }
        bench.flush(0);
        bench
    }

    /// Submits a request of one cluster, and turns until only what is held is under way.
    fn ask(&self, worker: usize, op: Op, cluster: u64, bytes: Option<u8>) -> Answer {
        let buffer = bytes.map_or_else(Buffer::default, |byte| {
            AlignedBuf::from_slice(&[byte; CLUSTER as usize]).into()
        });
        let (offset, len) = match op {
            Op::Flush => (0, 0),
            _ => (cluster * CLUSTER, CLUSTER),
        };
        self.workers.ask(worker, op, offset, len, buffer)
    }

    #[track_caller]
    fn write(&self, worker: usize, cluster: u64, byte: u8) {
        take(&self.ask(worker, WRITE, cluster, Some(byte))).expect("a write");
    }

    #[track_caller]
    fn flush(&self, worker: usize) {
        take(&self.ask(worker, Op::Flush, 0, None)).expect("a FLUSH");
    }

    #[track_caller]
    fn discard(&self, worker: usize, cluster: u64) {
        take(&self.ask(worker, Op::Discard, cluster, None)).expect("a discard");
    }

    #[track_caller]
    fn read(&self, worker: usize, cluster: u64) -> u8 {
        let read = take(&self.ask(worker, Op::Read, cluster, Some(0xEE)));
        one_byte(read.expect("a read"))
    }

    fn host(&self, cluster: u64) -> Option<u64> {
        self.disk.cached_host_offset(cluster * CLUSTER)
    }

    /// Writes clusters that were never written, from `first` on, of the one L2 table. Returns the first of them that was given `host`.
    fn find_reuse(&self, first: u64, count: u64, host: u64) -> Option<u64> {
        (first..first + count).find(|&cluster| {
            self.write(1, cluster, 0xD0);
            self.host(cluster) == Some(host)
        })
    }

    /// Closes the disk and demands that its image is flawless.
    fn close(self) {
        self.workers.close(&self.disk, DISK);
    }
}

#[track_caller]
fn take(answer: &Answer) -> Result<Buffer, IoError> {
    let done = answer.borrow_mut().take().expect("an answer");
    done.result.map(|()| done.buffer)
}

/// The byte that a buffer repeats.
#[track_caller]
fn one_byte(buffer: Buffer) -> u8 {
    let bytes = buffer.into_owned().expect("our own buffer");
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mixture");
    bytes[0]
}

/// An operation on cluster 0 is held by the host after its lookup. Meanwhile the other queue discards that cluster,
/// makes that durable and writes clusters that were never written: none of them may be given the host cluster under the
/// operation, as long as it is there. `earlier` rounds that free other clusters lie between, so that the epoch has moved on as far
/// as it can.
fn hold(op: Op, bytes: u8, earlier: u64) -> (Bench, Answer) {
    let bench = Bench::new(&OpenOptions::default());
    let host = bench.host(0).expect("a host cluster");
    bench.world.hold_next();
    let held = bench.ask(0, op, 0, Some(bytes));
    assert!(held.borrow().is_none(), "it is held");
    for cluster in 1..=earlier {
        bench.discard(1, cluster);
        bench.flush(1);
    }
    bench.discard(1, 0);
    bench.flush(1);
    bench.flush(1);
    let early = bench.find_reuse(32, 16, host);
    assert_eq!(early, None, "a cluster was reused under an operation in flight");
    bench.flush(1);
    bench.world.release();
    bench.workers.settle();
    // Now it is free, and the test would have seen that it was handed out.
    bench.flush(1);
    let reused = bench.find_reuse(48, 16, host);
    assert!(reused.is_some(), "the cluster is lost");
    (bench, held)
}

#[test]
fn cluster_is_not_reused_under_a_read() {
    for earlier in 0..4 {
        let (bench, held) = hold(Op::Read, 0xEE, earlier);
        let read = one_byte(take(&held).expect("a read"));
        // Before the discard or after it.
        assert!([0, 1].contains(&read), "{read:#x} of another cluster");
        bench.close();
    }
}

#[test]
fn cluster_is_not_reused_under_a_write_in_place() {
    for earlier in 0..4 {
        let (bench, held) = hold(WRITE, 0xAA, earlier);
        take(&held).expect("a write");
        for cluster in 32..48 {
            assert_eq!(
                bench.read(0, cluster),
                0xD0,
                "a late write landed in cluster {cluster}"
            );
        }
        assert!([0, 0xAA].contains(&bench.read(0, 0)));
        bench.close();
    }
}

/// An allocating write delays requests to its guest cluster, and no others.
#[test]
fn remap_delays_only_requests_to_its_cluster() {
    let bench = Bench::new(&OpenOptions::default());
    for cluster in [39, 41] {
        bench.write(1, cluster, 0xBB);
    }
    bench.world.hold_next();
    let held = bench.ask(0, WRITE, 40, Some(0xAA));
    assert!(held.borrow().is_none(), "it is held");
    for cluster in [39, 41] {
        assert_eq!(bench.read(1, cluster), 0xBB);
        bench.write(1, cluster, 0xCC);
        bench.discard(1, cluster);
    }
    let waits = bench.ask(1, WRITE, 40, Some(0xDD));
    assert!(waits.borrow().is_none(), "two writes have the cluster at once");
    bench.world.release();
    bench.workers.settle();
    take(&held).expect("a write");
    take(&waits).expect("a write");
    assert_eq!(bench.read(0, 40), 0xDD);
    bench.flush(0);
    bench.close();
}

/// A discard that keeps the host cluster punches it. A write in place must wait for the punch: else it is answered, lands in
/// the hole, and disappears when the cluster is marked as zeros.
#[test]
fn write_in_place_waits_for_punch_of_its_cluster() {
    let options = OpenOptions {
        discard_no_unref: true,
        ..OpenOptions::default()
    };
    let bench = Bench::new(&options);
    bench.world.hold_next();
    let discard = bench.ask(0, Op::Discard, 3, None);
    assert!(discard.borrow().is_none(), "the punch is held");
    let write = bench.ask(1, WRITE, 3, Some(0xAA));
    let neighbour = bench.ask(1, WRITE, 4, Some(0xBB));
    assert!(write.borrow().is_none(), "a write was answered under a punch");
    take(&neighbour).expect("a write beside the punch");
    bench.world.release();
    bench.workers.settle();
    take(&discard).expect("a discard");
    take(&write).expect("a write");
    assert_eq!(bench.read(0, 3), 0xAA);
    assert_eq!(bench.read(0, 4), 0xBB);
    bench.flush(0);
    bench.close();
}

/// The host may have lost any earlier write at a failed sync: a later round must not build on them.
#[test]
fn flush_after_failed_sync_fails_and_writes_nothing() {
    let bench = Bench::new(&OpenOptions::default());
    bench.write(0, 40, 1);
    bench.world.set_profile(Profile {
        sync_error: 1000,
        ..Profile::default()
    });
    let failed = IoError::Host { errno: 5 };
    assert_eq!(take(&bench.ask(0, Op::Flush, 0, None)).err(), Some(failed));
    bench.world.set_profile(Profile::default());
    bench.world.record();
    for worker in 0..2 {
        let again = take(&bench.ask(worker, Op::Flush, 0, None));
        assert_eq!(again.err(), Some(failed));
    }
    let trace = bench.world.trace();
    assert!(trace.is_empty(), "{trace:?}");
}
