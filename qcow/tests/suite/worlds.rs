//! Faults that the simulated world found, each made small: one thread, no kernel, and a worker that would wait for ever
//! is an error.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, IoError, Op};
use qcow::image::{CreateOptions, check, create};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimImage, SimWorld};

const DISK: &str = "disk";

/// A world in which everything happens at once, with an empty image of clusters of 512 bytes.
fn world(bytes: u64) -> SimWorld {
    let world = SimWorld::new(1, Profile::IMMEDIATE);
    let cx = world.context(64);
    let view = world.file(DISK, true).view(&cx).expect("a view");
    let mut options = CreateOptions::new(bytes);
    options.cluster_size = 512;
    cx.block_on(create(&view, &options))
        .expect("nothing waits for ever")
        .expect("an image");
    world
}

async fn open(world: &SimWorld, cx: &Context) -> (Arc<QcowDisk>, Box<dyn DiskQueue>) {
    let options = OpenOptions {
        lock: None,
        ..OpenOptions::default()
    };
    let disk = QcowDisk::open_on(cx, world, Path::new(DISK), &options)
        .await
        .expect("a disk");
    let queue = Arc::clone(&disk).open_queue(cx).expect("a queue");
    (disk, queue)
}

async fn ask(queue: &dyn DiskQueue, op: Op, offset: u64, buffer: Buffer) -> Result<Buffer, IoError> {
    let len = buffer.len() as u64;
    block::ask(queue, op, offset, len, buffer).await
}

/// An L2 table of 16 slices that was just made: one of them is in memory, and nothing of it on disk.
#[test]
fn new_l2_table_reads_as_zeros_in_unwritten_slices() {
    const CLUSTER: u64 = 64 << 10;
    /// The bytes that a slice of 512 entries maps.
    const SLICE: u64 = 512 * CLUSTER;
    let world = SimWorld::new(1, Profile::IMMEDIATE);
    let cx = world.context(64);
    let view = world.file(DISK, true).view(&cx).expect("a view");
    let ended = cx.block_on(async {
        create(&view, &CreateOptions::new(16 * SLICE))
            .await
            .expect("an image");
        let (_disk, queue) = open(&world, &cx).await;
        for slice in [0, 2] {
            let bytes = AlignedBuf::from_slice(&vec![slice as u8 + 1; CLUSTER as usize]);
            let written = ask(&*queue, Op::Write { fua: false }, slice * SLICE, bytes.into()).await;
            written.expect("a write");
        }
        for (offset, expected) in [
            (0, [1, 0]),
            (SLICE - CLUSTER, [0, 0]),
            (SLICE, [0, 0]),
            (2 * SLICE - CLUSTER, [0, 3]),
            (2 * SLICE, [3, 0]),
            (15 * SLICE, [0, 0]),
        ] {
            let buffer = AlignedBuf::from_slice(&vec![0xEE; 2 * CLUSTER as usize]);
            let read = ask(&*queue, Op::Read, offset, buffer.into())
                .await
                .expect("a read");
            let bytes = read.into_owned().expect("our own");
            for (half, byte) in bytes.chunks_exact(CLUSTER as usize).zip(expected) {
                assert!(half.iter().all(|found| *found == byte), "at {offset:#x}");
            }
        }
    });
    ended.expect("nothing waits for ever");
}

/// A read whose pieces fill every slot of the ring needs a second table. If it did not wait for its pieces first, their
/// slots would stay taken, and the table's read would wait for one for ever.
#[test]
fn many_piece_read_leaves_slots_for_table_load() {
    const BYTES: u64 = 128 << 10;
    let world = world(BYTES);
    let cx = world.context(64);
    cx.block_on(async {
        let (disk, queue) = open(&world, &cx).await;
        // Every other cluster, so that no two pieces join.
        for offset in (0..BYTES).step_by(1024) {
            let bytes = AlignedBuf::from_slice(&[(offset >> 10) as u8; 512]);
            let write = Op::Write { fua: false };
            ask(&*queue, write, offset, bytes.into()).await.expect("a write");
        }
        drop(queue);
        disk.close(&cx).await.expect("a clean close");
    })
    .expect("nothing waits for ever");

    let cx = world.context(16);
    let read = cx.block_on(async {
        let (_disk, queue) = open(&world, &cx).await;
        ask(&*queue, Op::Read, 0, AlignedBuf::zeroed(BYTES as usize).into()).await
    });
    let read = read.expect("nothing waits for ever").expect("a read");
    let bytes = read.into_owned().expect("our own buffer");
    for (at, cluster) in bytes.chunks(512).enumerate() {
        let expected = if at % 2 == 0 { (at / 2) as u8 } else { 0 };
        assert!(cluster.iter().all(|&byte| byte == expected), "cluster {at}");
    }
}

/// Steps until `done`, and calls `look` before each step of the disk.
fn drive(world: &SimWorld, cx: &Context, done: &Cell<bool>, mut look: impl FnMut()) {
    while !done.get() {
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
        cx.run_ready();
        look();
        world.step();
    }
}

/// A FLUSH, and how it ended.
fn flush(queue: &Rc<Box<dyn DiskQueue>>, cx: &Context) -> (Rc<Cell<bool>>, Rc<Cell<bool>>) {
    let (done, well) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
    let (queue, set_done, set_well) = (Rc::clone(queue), Rc::clone(&done), Rc::clone(&well));
    cx.spawn(async move {
        set_well.set(ask(&**queue, Op::Flush, 0, Buffer::default()).await.is_ok());
        set_done.set(true);
    });
    (done, well)
}

/// A failed write may have had its effect. After the write of an L1 entry is reported as failed, its L2 table may be
/// reachable, and the next FLUSH must not write it before the refcounts it needs are durable.
#[test]
fn table_counts_as_reachable_after_failed_l1_write() {
    let image = world(32 << 10).contents(DISK).to_bytes();
    let mut header = [0; 8];
    header.copy_from_slice(&image[40..48]);
    let l1 = u64::from_be_bytes(header);
    let mut effects = 0;
    for seed in 0..16 {
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        world.set_contents(DISK, SimImage::from_bytes(&world.store(), &image));
        let cx = world.context(64);
        let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
        let judge_cx = judge.context(64);
        let write = |at: u64| (Op::Write { fua: false }, at, AlignedBuf::zeroed(512).into());
        let (disk, queue) = cx.block_on(open(&world, &cx)).expect("nothing waits for ever");
        let queue = Rc::new(queue);
        world.set_profile(Profile::default());
        world.record();
        let (op, at, bytes) = write(0);
        cx.block_on(ask(&**queue, op, at, bytes))
            .expect("it turns")
            .expect("a write");

        let (done, well) = flush(&queue, &cx);
        drive(&world, &cx, &done, || {
            let trace = world.trace();
            let to_l1 = trace
                .last()
                .is_some_and(|event| event.offset == l1 && event.len == 512);
            world.set_profile(Profile {
                write_error: if to_l1 { 1000 } else { 0 },
                ..Profile::default()
            });
        });
        assert!(!well.get(), "the L1 entry was not written");
        world.set_profile(Profile::default());
        effects += usize::from(world.contents(DISK).to_bytes()[l1 as usize..][..8] != [0; 8]);

        let (op, at, bytes) = write(1024);
        cx.block_on(ask(&**queue, op, at, bytes))
            .expect("it turns")
            .expect("a write");
        let (done, well) = flush(&queue, &cx);
        drive(&world, &cx, &done, || {
            let space = world.crash_space(DISK);
            for number in 0..space.count().min(256) {
                judge.set_contents(DISK, space.nth(number));
                let view = judge.file(DISK, false).view(&judge_cx).expect("a view");
                let report = judge_cx
                    .block_on(check(&view))
                    .expect("it turns")
                    .expect("a check");
                assert_eq!(report.corruptions, 0, "seed {seed}: {:?}", report.findings);
            }
        });
        assert!(well.get());
        drop((disk, queue));
    }
    assert!(effects > 0, "the write never had an effect");
}

/// One op of a FLUSH fails, whichever, with or without its effect; more is written, and a FLUSH follows. At every step a
/// cut leaves an image without corruptions. After a failed sync no FLUSH succeeds; after any other fault the next one does.
#[test]
fn fault_at_any_flush_step_leaves_a_sound_image() {
    let image = world(64 << 10).contents(DISK).to_bytes();
    let mut faults = 0;
    for step in 0.. {
        let world = SimWorld::new(step, Profile::IMMEDIATE);
        world.set_contents(DISK, SimImage::from_bytes(&world.store(), &image));
        let cx = world.context(64);
        let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
        let judge_cx = judge.context(64);
        let look = || {
            let space = world.crash_space(DISK);
            for number in 0..space.count().min(64) {
                judge.set_contents(DISK, space.nth(number));
                let view = judge.file(DISK, false).view(&judge_cx).expect("a view");
                let report = judge_cx.block_on(check(&view));
                let report = report.expect("it turns").expect("a check");
                assert_eq!(report.corruptions, 0, "step {step}: {:?}", report.findings);
            }
        };
        // Two tables, one of them new in the second round, and clusters that are freed.
        let (disk, queue) = cx.block_on(filled(&world, &cx, 8)).expect("it turns");
        let queue = Rc::new(queue);
        cx.block_on(discard(&**queue, 1024)).expect("it turns");
        world.set_profile(Profile::default());
        let failing = Profile {
            read_error: 1000,
            write_error: 1000,
            sync_error: 1000,
            allocate_error: 1000,
            ..Profile::default()
        };
        let (done, well) = flush(&queue, &cx);
        let mut steps = 0;
        drive(&world, &cx, &done, || {
            world.set_profile(if steps == step {
                failing
            } else {
                Profile::default()
            });
            steps += 1;
            look();
        });
        world.set_profile(Profile::default());
        if steps <= step {
            assert!(well.get(), "nothing failed");
            break;
        }
        faults += 1;
        let lost = world.faults().sync.is_some();
        cx.block_on(async {
            let bytes = AlignedBuf::from_slice(&[9; 512]);
            let write = Op::Write { fua: false };
            ask(&**queue, write, 40 << 10, bytes.into()).await
        })
        .expect("it turns")
        .expect("a write");
        let (done, well) = flush(&queue, &cx);
        drive(&world, &cx, &done, look);
        assert_eq!(well.get(), !lost, "step {step}");
        drop((disk, queue));
    }
    assert!(faults > 3, "only {faults} steps");
}

/// Of two concurrent growths, the smaller one does not cut the disk back.
#[test]
fn concurrent_growths_end_with_the_larger_size() {
    let world = world(32 << 10);
    world.set_profile(Profile::default());
    let cx = world.context(64);
    let (disk, queue) = cx.block_on(open(&world, &cx)).expect("nothing waits for ever");
    drop(queue);
    let left = Rc::new(Cell::new(2));
    for bytes in [96 << 10, 64 << 10] {
        let (disk, cx, left) = (Arc::clone(&disk), cx.clone(), Rc::clone(&left));
        cx.clone().spawn(async move {
            match disk.grow(&cx, bytes).await {
                Ok(()) | Err(IoError::OutOfRange) => left.set(left.get() - 1),
                Err(error) => panic!("{error}"),
            }
        });
    }
    while left.get() > 0 {
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
        world.step();
    }
    assert_eq!(disk.info().size_bytes, 96 << 10);
    let mut size = [0; 8];
    world.contents(DISK).read(24, &mut size);
    assert_eq!(u64::from_be_bytes(size), 96 << 10);
}

/// The disk, with its first `clusters` written.
async fn filled(world: &SimWorld, cx: &Context, clusters: u64) -> (Arc<QcowDisk>, Box<dyn DiskQueue>) {
    let (disk, queue) = open(world, cx).await;
    for cluster in 0..clusters {
        let bytes = AlignedBuf::from_slice(&[7; 512]);
        let write = Op::Write { fua: false };
        ask(&*queue, write, cluster * 512, bytes.into())
            .await
            .expect("a write");
    }
    (disk, queue)
}

async fn discard(queue: &dyn DiskQueue, len: u64) {
    let discard = block::ask(queue, Op::Discard, 0, len, Buffer::default());
    discard.await.expect("a discard");
}

/// A FLUSH leaves freeing to the background. A close right after it must wait for that: what would be counted down after
/// the last write-back is leaked.
#[test]
fn close_right_after_flush_leaks_nothing() {
    for seed in 0..50 {
        let image = world(64 << 10).contents(DISK).to_bytes();
        let slow = Profile {
            reorder: true,
            linger: 500,
            late: 100,
            ..Profile::default()
        };
        let world = SimWorld::new(seed, slow);
        world.set_contents(DISK, SimImage::from_bytes(&world.store(), &image));
        let cx = world.context(64);
        cx.block_on(async {
            let (disk, queue) = filled(&world, &cx, 40).await;
            discard(&*queue, 40 * 512).await;
            ask(&*queue, Op::Flush, 0, Buffer::default())
                .await
                .expect("a flush");
            drop(queue);
            disk.close(&cx).await.expect("a clean close");
        })
        .expect("nothing waits for ever");
        world.settle();
        let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
        judge.set_contents(DISK, world.contents(DISK));
        let judge_cx = judge.context(64);
        let view = judge.file(DISK, false).view(&judge_cx).expect("a view");
        let report = judge_cx
            .block_on(check(&view))
            .expect("it turns")
            .expect("a check");
        assert!(report.findings.is_empty(), "seed {seed}: {:?}", report.findings);
    }
}

/// A worker that ends after one FLUSH leaves no pass unfinished: a close would wait for it for ever.
#[test]
fn short_lived_worker_leaves_no_unfinished_pass() {
    let world = world(64 << 10);
    world.set_profile(Profile::default());
    let cx = world.context(64);
    // What is not answered yet when the block ends is still with the host.
    let disk = cx
        .block_on(async {
            let (disk, queue) = filled(&world, &cx, 40).await;
            discard(&*queue, 40 * 512).await;
            ask(&*queue, Op::Flush, 0, Buffer::default())
                .await
                .expect("a flush");
            disk
        })
        .expect("nothing waits for ever");
    assert_eq!(cx.tasks(), 0, "something was left under way");
    drop(cx);
    let cx = world.context(64);
    cx.block_on(disk.close(&cx))
        .expect("nothing waits for ever")
        .expect("a clean close");
}
