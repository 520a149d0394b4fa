//! Disks that grow while requests are under way: in the simulated world one operation is held while others end.

use std::sync::Arc;

use block::{AlignedBuf, Buffer, Disk, Done, IoError, Op};
use qcow::image::{CreateOptions, create};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimImage, SimWorld};

use crate::workers::{Slot, Workers};

const DISK: &str = "disk";
const BASE: &str = "base";
const WRITE: Op = Op::Write { fua: false };

/// An image with clusters of 1 KiB, and two workers with a queue each. An L2 table maps 128 KiB.
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

/// A world with an empty image of `bytes`, above a raw file of `backing` bytes of 0xBB unless that is 0.
fn world(bytes: u64, backing: usize) -> SimWorld {
    let world = SimWorld::new(1, Profile::IMMEDIATE);
    let cx = world.context(64);
    let view = world.file(DISK, true).view(&cx).expect("a view");
    let mut options = CreateOptions::new(bytes);
    options.cluster_size = 1024;
    if backing > 0 {
        world.set_contents(BASE, SimImage::from_bytes(&world.store(), &vec![0xBB; backing]));
        options.backing_file = Some(BASE.to_owned());
        options.backing_format = Some("raw".to_owned());
    }
    let made = cx.block_on(create(&view, &options));
    made.expect("nothing waits for ever").expect("an image");
    world
}

impl Bench {
    fn open(world: SimWorld) -> Self {
        let (disk, workers) = Workers::open(&world, DISK, &options());
        Self { world, disk, workers }
    }

    /// Submits a request, and turns until only what is held is under way.
    fn ask(&self, worker: usize, op: Op, offset: u64, len: u64, buffer: Buffer) -> Slot<Done> {
        self.workers.ask(worker, op, offset, len, buffer)
    }

    #[track_caller]
    fn write(&self, worker: usize, offset: u64, len: usize, byte: u8) {
        let buffer = AlignedBuf::from_slice(&vec![byte; len]).into();
        result(&self.ask(worker, WRITE, offset, len as u64, buffer)).expect("a write");
    }

    fn discard(&self, worker: usize, offset: u64, len: u64) -> Slot<Done> {
        self.ask(worker, Op::Discard, offset, len, Buffer::default())
    }

    #[track_caller]
    fn flush(&self, worker: usize) {
        result(&self.ask(worker, Op::Flush, 0, 0, Buffer::default())).expect("a FLUSH");
    }

    #[track_caller]
    fn read(&self, worker: usize, offset: u64, len: usize) -> Vec<u8> {
        let buffer = AlignedBuf::from_slice(&vec![0xEE; len]).into();
        let answer = self.ask(worker, Op::Read, offset, len as u64, buffer);
        let done = answer.take().expect("an answer");
        done.result.expect("a read");
        done.buffer.into_owned().expect("our own buffer").to_vec()
    }

    /// Makes the disk larger, and turns until only what is held is under way.
    fn grow(&self, worker: usize, bytes: u64) -> Slot<Result<(), IoError>> {
        let (cx, disk) = (self.workers.context(worker).clone(), Arc::clone(&self.disk));
        self.workers
            .run(worker, async move { disk.grow(&cx, bytes).await })
    }

    fn host(&self, offset: u64) -> Option<u64> {
        self.disk.cached_host_offset(offset)
    }

    #[track_caller]
    fn close(self) -> SimWorld {
        self.workers.close(&self.disk, DISK)
    }
}

#[track_caller]
fn result(answer: &Slot<Done>) -> Result<(), IoError> {
    answer.take().expect("an answer").result
}

/// The zeros that hide a longer backing file's bytes are written in place. While that write is under way, the guest
/// discards the cluster: its place on the host is not given to another guest cluster before the write has ended.
#[test]
fn growth_write_in_place_delays_reuse_of_its_cluster() {
    let bench = Bench::open(world(8 << 10 | 512, 64 << 10));
    bench.write(0, 8 << 10, 512, 0x11);
    bench.flush(0);
    let host = bench.host(8 << 10).expect("it is mapped");

    bench.world.hold_next();
    let grown = bench.grow(0, 9 << 10);
    assert!(grown.borrow().is_none(), "its write is held");
    result(&bench.discard(1, 8 << 10, 512)).expect("a discard");
    for _ in 0..4 {
        bench.flush(1);
    }
    let mut reused = None;
    for cluster in 0..8 {
        bench.write(1, cluster << 10, 1024, 0xD0);
        reused = reused.or(Some(cluster << 10).filter(|&at| bench.host(at) == Some(host)));
    }
    bench.world.release();
    bench.workers.settle();
    grown.take().expect("it has ended").expect("growth");
    assert_eq!(reused, None, "the cluster was reused under the write");
    assert!(bench.read(1, 0, 8 << 10) == [0xD0; 8 << 10]);
    assert!(bench.read(1, 8 << 10, 1024) == [0; 1024]);
    bench.close();
}

/// A discard or write-zeroes up to the disk's end clears the last cluster, of which the disk has a part. When it
/// comes to that cluster the disk has grown, and the guest has written behind the old end.
#[test]
fn clear_up_to_old_end_keeps_writes_behind_it() {
    const END: u64 = 128 << 10 | 512;
    let zeroes = |unmap| Op::WriteZeroes { unmap, fua: false };
    for (op, zero) in [(Op::Discard, false), (zeroes(true), true), (zeroes(false), true)] {
        let bench = Bench::open(world(END, 0));
        bench.write(0, 127 << 10, 1536, 0x11);
        // The last cluster's slice is cached, the one before it has to be loaded.
        let bench = Bench::open(bench.close());
        bench.read(1, 128 << 10, 512);
        bench.world.hold_next();
        let cleared = bench.ask(0, op, 127 << 10, 1536, Buffer::default());
        assert!(cleared.borrow().is_none(), "it waits for the slice");
        let grown = bench.grow(1, 130 << 10);
        grown.take().expect("it has ended").expect("growth");
        bench.write(1, END, 512, 0x22);
        bench.world.release();
        bench.workers.settle();
        result(&cleared).expect("an answer");
        assert!(
            bench.read(1, END, 512) == [0x22; 512],
            "{op:?}: what was written is gone"
        );
        assert!(bench.read(1, 127 << 10, 1024) == [0; 1024], "{op:?}");
        let last = bench.read(1, 128 << 10, 512);
        assert!(last == [0; 512] || !zero && last == [0x11; 512], "{op:?}");
        bench.close();
    }
}

/// Two growths run at once. As soon as one has ended the guest writes to the new space, and the other, which began when
/// that space was behind the end, does not zero it.
#[test]
fn earlier_growth_does_not_zero_space_another_exposed() {
    const END: u64 = 8 << 10 | 512;
    let bench = Bench::open(world(END, 64 << 10));
    bench.write(0, 8 << 10, 512, 0x11);
    bench.world.hold_next();
    let held = bench.grow(0, 32 << 10);
    assert!(held.borrow().is_none(), "its write of zeros is held");
    let other = bench.grow(1, 16 << 10);
    let is_shown = other.borrow().is_some();
    if is_shown {
        bench.write(1, END, 512, 0x33);
    }
    bench.world.release();
    bench.workers.settle();
    let expected = if is_shown { 0x33 } else { 0 };
    assert!(
        bench.read(1, END, 512) == [expected; 512],
        "zeroed behind the guest's back"
    );
    held.take().expect("it has ended").expect("growth");
    // It was its turn when the disk was larger than what it is to be.
    assert_eq!(other.take().expect("it has ended"), Err(IoError::OutOfRange));
    assert!(bench.read(1, END + 512, (23 << 10) - 512) == [0; (23 << 10) - 512]);
    assert_eq!(bench.disk.info().size_bytes, 32 << 10);
    bench.close();
}
