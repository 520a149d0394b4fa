//! What the simulated world found, each made small: one thread, no kernel, and a worker that would wait for ever
//! is an error.

use std::path::Path;
use std::sync::Arc;

use block::sim::{Profile, SimWorld};
use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, IoError, Op, Request};
use qcow::image::{CreateOptions, create};
use qcow::{OpenOptions, QcowDisk};

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
    let (request, answer) = Request::local(op, offset, buffer.len() as u64, buffer);
    queue.submit(request);
    let done = answer.await;
    done.result.map(|()| done.buffer)
}

/// A read whose pieces fill every slot of the ring needs a second table. Were its pieces not waited for first,
/// their slots would stay taken, and the table's read would wait for one for ever.
#[test]
fn a_read_of_many_pieces_leaves_the_ring_room_to_load_a_table() {
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
