//! The memory of requests: however many a guest has under way, what they copy, encrypt and decrypt stays in a budget, and each
//! of them ends.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{AlignedBuf, Buffer, CompletionSink, Context, Disk, DiskQueue, Done, Op, Request};
use qcow::image::{CreateOptions, create};
use qcow::luks::{self, LuksOptions, Secret};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimImage, SimWorld};

const DISK: &str = "disk";
const BASE: &str = "base";
/// The requests that a guest has under way at once.
const REQUESTS: u64 = 1024;
/// The bytes of each.
const LEN: u64 = 128 << 10;
/// The budget of bytes that are encrypted, and of those that are decrypted (`engine/room.rs`).
const BOUNCE_BYTES: u64 = 4 << 20;
/// The budget of copies of old clusters.
const COPIES_BYTES: u64 = 8 << 20;
/// Tables that are read or written meanwhile.
const TABLES: u64 = 256 << 10;

struct Bench {
    world: SimWorld,
    cx: Context,
    disk: Arc<QcowDisk>,
    queue: Box<dyn DiskQueue>,
    sink: Rc<CompletionSink>,
}

impl Bench {
    /// Makes an image, over a raw one of so many bytes if it names one, and opens it.
    fn new(create_options: &CreateOptions, secret: Option<Secret>, below: u64) -> Self {
        let world = SimWorld::new(1, Profile::IMMEDIATE);
        // Room for all ops at once: no other limit hides the one that is tested.
        let cx = world.context(4096);
        let disk = cx.block_on(async {
            let view = world.file(DISK, true).view(&cx).expect("a view");
            if below > 0 {
                let base = SimImage::from_bytes(&world.store(), &[0xBB; 4096]);
                world.set_contents(BASE, base);
                let base = world.file(BASE, true).view(&cx).expect("a view");
                base.set_len(below).await.expect("a longer file");
            }
            create(&view, create_options).await.expect("an image");
            let options = OpenOptions {
                secret,
                backing_files: true,
                lock: None,
                ..OpenOptions::default()
            };
            let disk = QcowDisk::open_on(&cx, &world, Path::new(DISK), &options).await;
            disk.expect("a disk")
        });
        let disk = disk.expect("nothing waits for ever");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        Self {
            world,
            cx,
            disk,
            queue,
            sink: CompletionSink::new(),
        }
    }

    fn submit(&self, op: Op, offset: u64, len: u64, tag: u64) {
        let buffer: Buffer = AlignedBuf::zeroed(len as usize).into();
        let request = Request::new(op, offset, len, buffer, &self.sink, tag);
        self.queue.submit(request);
    }

    fn turn(&self, done: &mut Vec<Done>) {
        self.cx.run_ready();
        self.cx.ring().turn(false).expect("the ring turns");
        self.cx.run_ready();
        self.sink.drain_into(done);
    }

    /// Steps until all of the requests have ended, well, and returns the most bytes that ops moved at any time.
    fn run(&self, requests: u64) -> u64 {
        let (mut done, mut most, mut idle) = (Vec::new(), 0, 0);
        while done.len() < requests as usize {
            self.turn(&mut done);
            most = most.max(self.world.bytes_in_flight());
            idle = if self.world.step() { 0 } else { idle + 1 };
            assert!(
                idle < 100,
                "{} of {requests} requests wait for ever",
                requests - done.len() as u64
            );
        }
        assert!(done.iter().all(|done| done.result == Ok(())));
        let mut tags: Vec<u64> = done.iter().map(|done| done.tag).collect();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len() as u64, requests, "each is answered once");
        most
    }

    fn close(self) {
        drop(self.queue);
        crate::closing::close(&self.world, &self.cx, &self.disk, DISK, "memory of requests");
    }
}

/// The guest has 128 MiB under way in each direction.
#[test]
fn memory_of_encrypted_requests_stays_in_its_budget_and_all_end() {
    let size = 4 << 20;
    let cheap = LuksOptions {
        iter_time: Duration::from_millis(1),
        ..LuksOptions::default()
    };
    let secret = Secret::new(b"open sesame".to_vec());
    let (header, _) = luks::create(&secret, &cheap).expect("a header");
    let bench = Bench::new(
        &CreateOptions {
            luks_header: Some(header),
            ..CreateOptions::new(size)
        },
        Some(secret),
        0,
    );
    for tag in 0..size / LEN {
        bench.submit(Op::Write { fua: false }, tag * LEN, LEN, tag);
    }
    bench.run(size / LEN);
    bench.world.set_profile(Profile::default());
    for (op, what) in [(Op::Write { fua: false }, "writes"), (Op::Read, "reads")] {
        for tag in 0..REQUESTS {
            bench.submit(op, tag * LEN % size, LEN, tag);
        }
        let most = bench.run(REQUESTS);
        assert!(most >= BOUNCE_BYTES / 2, "{what}: the budget is used, not {most}");
        assert!(most <= BOUNCE_BYTES + TABLES, "{what}: {most} bytes at once");
    }
    bench.close();
}

/// Each small write copies a cluster of 2 MiB from the image below.
#[test]
fn memory_of_copied_clusters_stays_in_its_budget_and_all_end() {
    let (clusters, cluster) = (96, 2 << 20);
    let bench = Bench::new(
        &CreateOptions {
            cluster_size: cluster,
            backing_file: Some(BASE.to_owned()),
            backing_format: Some("raw".to_owned()),
            ..CreateOptions::new(clusters * cluster)
        },
        None,
        clusters * cluster,
    );
    bench.world.set_profile(Profile::default());
    for tag in 0..clusters {
        bench.submit(Op::Write { fua: false }, tag * cluster + 4096, 512, tag);
    }
    let most = bench.run(clusters);
    assert!(most >= COPIES_BYTES / 2, "the budget is used, not {most}");
    assert!(most <= COPIES_BYTES + TABLES, "{most} bytes at once");
    bench.close();
}

/// With encryption, a write needs room for what it copies, then for what it decrypts and for what it encrypts.
#[test]
fn writes_that_need_room_of_each_kind_do_not_wait_for_each_other() {
    let (clusters, cluster) = (24, 2 << 20);
    let cheap = LuksOptions {
        iter_time: Duration::from_millis(1),
        ..LuksOptions::default()
    };
    let secret = Secret::new(b"open sesame".to_vec());
    let (header, _) = luks::create(&secret, &cheap).expect("a header");
    let bench = Bench::new(
        &CreateOptions {
            luks_header: Some(header),
            cluster_size: cluster,
            ..CreateOptions::new(clusters * cluster)
        },
        Some(secret),
        0,
    );
    bench.world.set_profile(Profile {
        reorder: true,
        linger: 300,
        ..Profile::default()
    });
    // Fresh clusters, most of which are zeros that have to be encrypted.
    for tag in 0..clusters {
        bench.submit(Op::Write { fua: false }, tag * cluster + 4096, 512, tag);
    }
    bench.run(clusters);
    let snapshot = bench
        .disk
        .create_snapshot(&bench.cx, "before", std::time::SystemTime::UNIX_EPOCH);
    let taken = bench.cx.block_on(snapshot);
    taken.expect("it turns").expect("a snapshot");
    // Each copies a cluster, which is decrypted and encrypted; reads and writes in place come between.
    for tag in 0..clusters {
        bench.submit(Op::Write { fua: false }, tag * cluster + (1 << 20), 512, 3 * tag);
        bench.submit(Op::Read, tag * cluster, LEN, 3 * tag + 1);
        bench.submit(Op::Write { fua: false }, tag * cluster + 8192, LEN, 3 * tag + 2);
    }
    let most = bench.run(3 * clusters);
    assert!(most <= 2 * BOUNCE_BYTES + TABLES, "{most} bytes at once");
    bench.close();
}
