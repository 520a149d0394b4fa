//! Requests to the subclusters of one cluster while one of them is under way: in the simulated world its operation is held.

use std::sync::Arc;

use block::{AlignedBuf, Buffer, Done, IoError, Op};
use qcow::image::{CreateOptions, create};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimImage, SimWorld};

use crate::workers::{Slot, Workers};

const DISK: &str = "disk";
const BASE: &str = "base";
const WRITE: Op = Op::Write { fua: false };
const CLUSTER: u64 = 64 << 10;
const SUBCLUSTER: u64 = CLUSTER / 32;
const BYTES: u64 = 4 * CLUSTER;

/// A disk with subclusters above a raw file of 0xBB, and two workers with a queue each.
struct Bench {
    world: SimWorld,
    disk: Arc<QcowDisk>,
    workers: Workers,
}

fn options() -> OpenOptions {
    OpenOptions {
        backing_files: true,
        lock: None,
        ..OpenOptions::default()
    }
}

impl Bench {
    /// The first subcluster is written, so that the first cluster is the disk's own.
    fn new() -> Self {
        let world = SimWorld::new(1, Profile::IMMEDIATE);
        let base = SimImage::from_bytes(&world.store(), &vec![0xBB; BYTES as usize]);
        world.set_contents(BASE, base);
        let cx = world.context(64);
        let view = world.file(DISK, true).view(&cx).expect("a view");
        let mut shape = CreateOptions::new(BYTES);
        shape.extended_l2 = true;
        shape.backing_file = Some(BASE.to_owned());
        shape.backing_format = Some("raw".to_owned());
        let made = cx.block_on(create(&view, &shape));
        made.expect("nothing waits for ever").expect("an image");
        let (disk, workers) = Workers::open(&world, DISK, &options());
        let bench = Self { world, disk, workers };
        assert_eq!(result(&bench.write(0, 0, SUBCLUSTER, 0x10)), Ok(()));
        bench
    }

    fn write(&self, worker: usize, offset: u64, len: u64, byte: u8) -> Slot<Done> {
        let buffer = AlignedBuf::from_slice(&vec![byte; len as usize]).into();
        self.workers.ask(worker, WRITE, offset, len, buffer)
    }

    fn clear(&self, worker: usize, op: Op, offset: u64, len: u64) -> Slot<Done> {
        self.workers.ask(worker, op, offset, len, Buffer::default())
    }

    #[track_caller]
    fn assert_reads(&self, expected: &[(u64, u64, u8)]) {
        for &(offset, len, byte) in expected {
            let buffer = AlignedBuf::from_slice(&vec![0xEE; len as usize]).into();
            let done = self.workers.ask(0, Op::Read, offset, len, buffer).take();
            let bytes = done.expect("an answer").buffer.into_owned().expect("our own");
            let wrong = bytes.iter().position(|&found| found != byte);
            assert_eq!(wrong, None, "{offset:#x}: {:#x?}", wrong.map(|at| bytes[at]));
        }
    }

    /// Checks the contents, and again when the disk was closed and opened.
    #[track_caller]
    fn end(self, expected: &[(u64, u64, u8)]) {
        self.assert_reads(expected);
        let world = self.workers.close(&self.disk, DISK);
        world.set_profile(Profile::IMMEDIATE);
        let (disk, workers) = Workers::open(&world, DISK, &options());
        let again = Self { world, disk, workers };
        again.assert_reads(expected);
        again.workers.close(&again.disk, DISK);
    }
}

#[track_caller]
fn result(answer: &Slot<Done>) -> Result<(), IoError> {
    answer.take().expect("an answer").result
}

const ZEROES: Op = Op::WriteZeroes {
    unmap: true,
    fua: false,
};

/// Each sets the bits of its own subclusters: what others have published meanwhile stays.
#[test]
fn writes_to_subclusters_of_one_cluster_go_on_side_by_side() {
    let bench = Bench::new();
    bench.world.hold_next();
    let held = bench.write(0, 3 * SUBCLUSTER, 512, 0x33);
    assert!(held.borrow().is_none());
    assert_eq!(result(&bench.write(1, 5 * SUBCLUSTER, SUBCLUSTER, 0x55)), Ok(()));
    assert_eq!(result(&bench.write(1, 4 * SUBCLUSTER + 512, 512, 0x44)), Ok(()));
    assert_eq!(
        result(&bench.clear(1, ZEROES, 9 * SUBCLUSTER, 2 * SUBCLUSTER)),
        Ok(())
    );
    // Its own subcluster, after it and in the middle of more.
    let other = bench.write(1, 3 * SUBCLUSTER + 1024, 512, 0x34);
    let across = bench.write(1, 2 * SUBCLUSTER + 512, SUBCLUSTER, 0x23);
    let zeroes = bench.clear(1, ZEROES, 3 * SUBCLUSTER, SUBCLUSTER);
    for answer in [&other, &across, &zeroes] {
        assert!(
            answer.borrow().is_none(),
            "it fills a subcluster that another fills"
        );
    }
    bench.world.release();
    bench.workers.settle();
    for answer in [&held, &other, &across, &zeroes] {
        assert_eq!(result(answer), Ok(()));
    }
    assert_eq!(result(&bench.write(0, 3 * SUBCLUSTER, SUBCLUSTER, 0x35)), Ok(()));
    bench.end(&[
        (0, SUBCLUSTER, 0x10),
        (SUBCLUSTER, SUBCLUSTER + 512, 0xBB),
        (2 * SUBCLUSTER + 512, SUBCLUSTER - 512, 0x23),
        (3 * SUBCLUSTER, SUBCLUSTER, 0x35),
        (4 * SUBCLUSTER, 512, 0xBB),
        (4 * SUBCLUSTER + 512, 512, 0x44),
        (4 * SUBCLUSTER + 1024, 1024, 0xBB),
        (5 * SUBCLUSTER, SUBCLUSTER, 0x55),
        (6 * SUBCLUSTER, 3 * SUBCLUSTER, 0xBB),
        (9 * SUBCLUSTER, 2 * SUBCLUSTER, 0),
        (11 * SUBCLUSTER, BYTES - 11 * SUBCLUSTER, 0xBB),
    ]);
}

/// The host cluster of a subcluster that is being filled is not given up meanwhile.
#[test]
fn discard_of_a_cluster_waits_for_its_subclusters() {
    for op in [Op::Discard, ZEROES] {
        let bench = Bench::new();
        bench.world.hold_next();
        let held = bench.write(0, 3 * SUBCLUSTER, SUBCLUSTER, 0x33);
        assert!(held.borrow().is_none());
        let cleared = bench.clear(1, op, 0, CLUSTER);
        assert!(cleared.borrow().is_none(), "{op:?} gives the cluster up");
        bench.world.release();
        bench.workers.settle();
        assert_eq!(result(&held), Ok(()));
        assert_eq!(result(&cleared), Ok(()));
        bench.end(&[(0, CLUSTER, 0), (CLUSTER, CLUSTER, 0xBB)]);
    }
}

/// A new host cluster is reserved for all of a guest cluster: nobody else fills another part of it.
#[test]
fn write_waits_for_the_first_allocation_of_its_cluster() {
    let bench = Bench::new();
    bench.world.hold_next();
    let held = bench.write(0, CLUSTER + 3 * SUBCLUSTER, SUBCLUSTER, 0x33);
    let other = bench.write(1, CLUSTER + 5 * SUBCLUSTER, SUBCLUSTER, 0x55);
    let zeroes = bench.clear(1, ZEROES, CLUSTER + 7 * SUBCLUSTER, SUBCLUSTER);
    assert!(
        [&held, &other, &zeroes]
            .iter()
            .all(|answer| answer.borrow().is_none())
    );
    bench.world.release();
    bench.workers.settle();
    for answer in [&held, &other, &zeroes] {
        assert_eq!(result(answer), Ok(()));
    }
    let at = |index: u64| CLUSTER + index * SUBCLUSTER;
    bench.end(&[
        (at(0), 3 * SUBCLUSTER, 0xBB),
        (at(3), SUBCLUSTER, 0x33),
        (at(4), SUBCLUSTER, 0xBB),
        (at(5), SUBCLUSTER, 0x55),
        (at(7), SUBCLUSTER, 0),
        (at(8), 24 * SUBCLUSTER, 0xBB),
    ]);
}
