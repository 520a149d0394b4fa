//! Tests of syncs that are not needed: one is made for whatever may have changed a file, and for nothing else.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use block::buffer::{AlignedBuf, Buffer, Piece};
use block::error::IoError;
use block::file::{Alignment, FileOptions, FileView, ImageFile, OpenFiles};
use block::lock::{LockGranularity, LockMode, LockSet};
use block::raw::RawDisk;
use block::request::{Op, Request};
use block::{Context, Disk};
use smallvec::smallvec;

use super::trace::What;
use super::*;

const BYTES: usize = 4096;

/// A file that one process has open, with what it counts on.
struct Bench {
    world: SimWorld,
    cx: Context,
    file: Arc<ImageFile>,
    view: FileView,
}

impl Bench {
    fn new() -> Self {
        Self::aligned(Alignment::NONE)
    }

    fn aligned(alignment: Alignment) -> Self {
        let world = SimWorld::new(7, Profile::default());
        world.set_contents("disk", SimImage::from_bytes(&world.store(), &[1; 16 * BYTES]));
        world.set_alignment("disk", alignment);
        world.record();
        let cx = world.context(64);
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let file = world.open("disk".as_ref(), options).expect("a file");
        let view = file.view(&cx).expect("a view");
        Self {
            world,
            cx,
            file,
            view,
        }
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        self.cx.block_on(future).expect("something is always in flight")
    }

    /// The number of operations that the disk was asked for so far.
    fn ops(&self) -> usize {
        let events = self.world.trace();
        let submitted = events.iter().filter(|event| event.what == What::Submitted);
        submitted.count()
    }

    /// A sync through `view`. Returns the number of operations that it asks of the disk.
    fn sync_by(&self, view: &FileView) -> usize {
        let before = self.ops();
        self.run(view.sync()).expect("a sync");
        self.ops() - before
    }

    fn sync(&self) -> usize {
        self.sync_by(&self.view)
    }

    fn write(&self, view: &FileView, dsync: bool) -> Result<(), IoError> {
        self.run(view.write(0, pieces(), dsync))
    }
}

fn pieces() -> block::ring::Pieces {
    smallvec![Piece::whole(&Rc::new(Buffer::from(AlignedBuf::from_slice(
        &[2; BYTES]
    ))))]
}

/// A way in which a view may change its file, with its name.
type Change = (&'static str, fn(&Bench));

/// Every such way.
fn changes() -> [Change; 9] {
    const AT: u64 = BYTES as u64;
    [
        ("a write", |bench| {
            bench.write(&bench.view, false).expect("a write");
        }),
        ("a write through another view that is gone", |bench| {
            let view = bench.file.view(&bench.world.context(64)).expect("a view");
            let written = view.context().block_on(view.write(0, pieces(), false));
            written.expect("the ring turns").expect("a write");
        }),
        ("a whole request", |bench| {
            let buffer = AlignedBuf::from_slice(&[3; BYTES]).into();
            let (request, answer) = Request::local(Op::Write { fua: false }, AT, AT, buffer);
            bench.view.submit(AT, request).expect("room");
            bench.run(answer).result.expect("a write");
        }),
        ("a write that nobody waits for", |bench| {
            drop(bench.view.start_write(0, pieces()));
            while bench.cx.ring().in_flight() > 0 {
                bench.cx.ring().turn(true).expect("the ring turns");
            }
        }),
        ("a write that fails", |bench| {
            bench.world.set_profile(Profile {
                write_error: 1000,
                ..Profile::default()
            });
            bench.write(&bench.view, false).expect_err("a failed write");
            bench.world.set_profile(Profile::default());
        }),
        ("zeros", |bench| {
            bench.run(bench.view.zero(AT, AT)).expect("zeros");
        }),
        ("a hole", |bench| {
            assert!(bench.run(bench.view.punch(AT, AT)).expect("a hole"));
        }),
        ("more space", |bench| {
            bench.run(bench.view.preallocate(16 * AT, AT)).expect("space");
        }),
        ("a new length", |bench| {
            bench.run(bench.view.set_len(15 * AT)).expect("a new length");
        }),
    ]
}

#[test]
fn whatever_may_have_changed_a_file_takes_one_sync() {
    let bench = Bench::new();
    assert_eq!(bench.sync(), 1, "others may have written before this process");
    for (what, change) in changes() {
        assert_eq!(bench.sync(), 0, "before {what}");
        change(&bench);
        assert_eq!(bench.sync(), 1, "after {what}");
        let space = bench.world.crash_space("disk");
        assert_eq!(space.count(), 1, "all is durable after {what}");
    }
    bench.run(bench.view.read_at(0, BYTES)).expect("a read");
    assert_eq!(bench.sync(), 0, "a read changes nothing");
}

/// With direct I/O a forced write is durable, and what else has ended is not.
#[test]
fn forced_write_covers_nothing_but_itself() {
    let bench = Bench::aligned(Alignment {
        memory: 512,
        offset: 512,
    });
    assert_eq!(bench.sync(), 1);
    bench.write(&bench.view, false).expect("a write");
    let forced = bench.view.write(BYTES as u64, pieces(), true);
    bench.run(forced).expect("a forced write");
    assert_eq!(bench.sync(), 1);
    assert_eq!(bench.world.crash_space("disk").count(), 1);
}

/// A write ends while a sync is under way, which began before.
#[test]
fn write_that_ends_during_a_sync_takes_another() {
    let bench = Bench::new();
    assert_eq!(bench.sync(), 1);
    let other = bench.file.view(&bench.cx).expect("a view");
    bench.write(&bench.view, false).expect("a write");
    bench.world.hold_next();
    let is_synced = Rc::new(Cell::new(false));
    let (view, done) = (bench.view.clone(), Rc::clone(&is_synced));
    bench.cx.spawn(async move {
        view.sync().await.expect("a sync");
        done.set(true);
    });
    bench.cx.run_ready();
    bench.write(&other, false).expect("a write");
    assert!(!is_synced.get());
    bench.world.release();
    let is_done = async {
        while !is_synced.get() {
            bench.view.read_at(0, 512).await.expect("a read");
        }
    };
    bench.run(is_done);
    assert_eq!(bench.sync(), 1, "the sync had begun before the write ended");
    assert_eq!(bench.sync(), 0);
}

#[test]
fn after_a_failed_sync_every_sync_fails_though_nothing_was_written() {
    let bench = Bench::new();
    assert_eq!(bench.sync(), 1);
    bench.write(&bench.view, false).expect("a write");
    bench.world.set_profile(Profile {
        sync_error: 1000,
        ..Profile::default()
    });
    for _ in 0..3 {
        bench.run(bench.view.sync()).expect_err("data may be lost");
    }
    // Nor does what was durable before help.
    let bench = Bench::new();
    assert_eq!(bench.sync(), 1);
    let other = bench.file.view(&bench.cx).expect("a view");
    bench.world.set_profile(Profile {
        write_error: 1000,
        ..Profile::default()
    });
    bench.write(&other, false).expect_err("a failed write");
    bench.world.set_profile(Profile {
        sync_error: 1000,
        ..Profile::default()
    });
    bench.run(other.sync()).expect_err("a failed sync");
    bench.run(bench.view.sync()).expect_err("data may be lost");
}

/// A file that others may write to: their writes are nowhere counted.
#[test]
fn file_without_a_write_lock_takes_every_sync() {
    let bench = Bench::new();
    let shared = bench.world.file("disk", true);
    let view = shared.view(&bench.cx).expect("a view");
    let syncs = || bench.sync_by(&view);
    assert_eq!([syncs(), syncs()], [1, 1]);
    // The other one's write is durable by this one's sync.
    bench.write(&bench.view, false).expect("a write");
    assert_eq!(syncs(), 1);
    assert_eq!(bench.world.crash_space("disk").count(), 1);
    let lock = |mode| shared.lock(&LockSet::default(), mode, LockGranularity::ByteRange);
    lock(LockMode::Write).expect("a lock");
    assert_eq!([syncs(), syncs()], [1, 0]);
}

/// A close syncs only what no FLUSH has covered, and so does what any queue of a raw disk asks for.
#[test]
fn raw_disk_answers_a_flush_without_changes_at_once() {
    let bench = Bench::new();
    let disk = RawDisk::open(Arc::clone(&bench.file), true, &bench.cx).expect("a disk");
    let queues = [0, 1].map(|_| Arc::clone(&disk).open_queue(&bench.cx).expect("a queue"));
    let ask = |queue: usize, op: Op| {
        let before = bench.ops();
        let bytes = match op {
            Op::Write { .. } => AlignedBuf::from_slice(&[4; 512]).into(),
            _ => Buffer::default(),
        };
        let (request, answer) = Request::local(op, 0, bytes.len() as u64, bytes);
        queues[queue].submit(request);
        bench.run(answer).result.expect("an answer");
        bench.ops() - before
    };
    let write = Op::Write { fua: false };
    assert_eq!(ask(0, Op::Flush), 1);
    for queue in [0, 1] {
        assert_eq!(ask(queue, write), 1);
        assert_eq!(ask(1, Op::Flush), 1);
        assert_eq!([ask(0, Op::Flush), ask(1, Op::Flush)], [0, 0]);
    }
    let before = bench.ops();
    drop(queues);
    bench.run(disk.close(&bench.cx)).expect("a close");
    assert_eq!(bench.ops() - before, 0);
}
