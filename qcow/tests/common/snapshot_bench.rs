//! A disk over a base in the simulated world, with two workers, for operations on snapshots beside requests.

#![allow(dead_code, reason = "each test uses its part of this module")]

use std::rc::Rc;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use block::{AlignedBuf, Context, Done, Op};
use qcow::image::{CreateOptions, create};
use qcow::{OpenOptions, QcowDisk, SnapshotError};
use simulator::{Profile, SimImage, SimWorld};

use crate::snapshot_content::{as_disk, content, entries};
use crate::workers::{Slot, Workers};

pub(crate) const DISK: &str = "disk";
pub(crate) const BASE: &str = "base";
const WRITE: Op = Op::Write { fua: false };
const BYTES: u64 = 24 << 10;

pub(crate) fn options() -> OpenOptions {
    OpenOptions {
        backing_files: true,
        lock: None,
        ..OpenOptions::default()
    }
}

/// A world with an empty image over a base of 0xBB, half as long.
pub(crate) fn world(seed: u64, cluster: u64) -> SimWorld {
    world_of(seed, cluster, BYTES)
}

fn world_of(seed: u64, cluster: u64, bytes: u64) -> SimWorld {
    let world = SimWorld::new(seed, Profile::IMMEDIATE);
    world.set_contents(
        BASE,
        SimImage::from_bytes(&world.store(), &[0xBB; BYTES as usize / 2]),
    );
    let cx = world.context(64);
    let view = world.file(DISK, true).view(&cx).expect("a view");
    let mut options = CreateOptions::new(bytes);
    options.cluster_size = cluster;
    options.backing_file = Some(BASE.to_owned());
    options.backing_format = Some("raw".to_owned());
    let made = cx.block_on(create(&view, &options));
    made.expect("nothing waits for ever").expect("an image");
    world
}

pub(crate) struct Bench {
    pub(crate) world: SimWorld,
    pub(crate) disk: Arc<QcowDisk>,
    pub(crate) workers: Workers,
}

impl Bench {
    pub(crate) fn new(seed: u64) -> Self {
        Self::with_clusters(seed, 512)
    }

    pub(crate) fn with_clusters(seed: u64, cluster: u64) -> Self {
        Self::of_world(world(seed, cluster))
    }

    /// A disk of `bytes`.
    pub(crate) fn of_bytes(seed: u64, bytes: u64) -> Self {
        Self::of_world(world_of(seed, 512, bytes))
    }

    fn of_world(world: SimWorld) -> Self {
        let (disk, workers) = Workers::open(&world, DISK, &options());
        Self { world, disk, workers }
    }

    /// Runs until there is an answer, one step of the first worker after the other, with the host failing as `failing` says at
    /// the step of that number. Returns the number of steps that it took.
    pub(crate) fn run_failing<T>(&self, answer: &Slot<T>, failing: Profile, step: u64) -> u64 {
        let cx = self.workers.context(0);
        let mut steps = 0;
        while answer.borrow().is_none() {
            self.world.set_profile(match steps == step {
                true => failing,
                false => Profile::default(),
            });
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            self.world.step();
            steps += 1;
        }
        self.world.set_profile(Profile::default());
        self.workers.settle();
        steps
    }

    pub(crate) fn write(&self, worker: usize, offset: u64, byte: u8) -> Slot<Done> {
        let buffer = AlignedBuf::from_slice(&[byte; 512]).into();
        self.workers.ask(worker, WRITE, offset, 512, buffer)
    }

    pub(crate) fn read(&self, worker: usize, offset: u64) -> Slot<Done> {
        let buffer = AlignedBuf::from_slice(&[0xEE; 512]).into();
        self.workers.ask(worker, Op::Read, offset, 512, buffer)
    }

    #[track_caller]
    pub(crate) fn reads(&self, worker: usize, offset: u64) -> u8 {
        byte_of(&self.read(worker, offset))
    }

    pub(crate) fn create(&self, worker: usize, name: &'static str) -> Slot<Result<String, SnapshotError>> {
        let (cx, disk) = (self.workers.context(worker).clone(), Arc::clone(&self.disk));
        self.workers.run(worker, async move {
            disk.create_snapshot(&cx, name, UNIX_EPOCH).await
        })
    }

    /// Starts an operation on the first worker and holds its I/O number `io`; if it has fewer, it has ended.
    pub(crate) fn hold<T: 'static>(
        &self,
        io: u64,
        operation: impl AsyncFnOnce(Arc<QcowDisk>, Context) -> T + 'static,
    ) -> Slot<T> {
        let (cx, disk) = (self.workers.context(0).clone(), Arc::clone(&self.disk));
        let place = Slot::default();
        let put = Rc::clone(&place);
        cx.clone().spawn(async move {
            *put.borrow_mut() = Some(operation(disk, cx).await);
        });
        let cx = self.workers.context(0);
        for _ in 0..io {
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            self.world.step();
        }
        self.world.hold_next();
        self.workers.settle();
        place
    }

    #[track_caller]
    pub(crate) fn close(self) -> SimWorld {
        self.workers.close(&self.disk, DISK)
    }
}

#[track_caller]
pub(crate) fn byte_of(answer: &Slot<Done>) -> u8 {
    let done = answer.take().expect("an answer");
    done.result.expect("a read");
    let bytes = done.buffer.into_owned().expect("our own buffer");
    assert!(bytes.iter().all(|&byte| byte == bytes[0]), "a torn sector");
    bytes[0]
}

#[track_caller]
pub(crate) fn is_ok(answer: &Slot<Done>) {
    answer.take().expect("an answer").result.expect("success");
}

pub(crate) fn content_of(world: &SimWorld, name: &str) -> Vec<u8> {
    let image = world.contents(DISK).to_bytes();
    let entry = entries(&image)
        .into_iter()
        .find(|entry| entry.name == name.as_bytes());
    let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
    judge.set_contents(BASE, world.contents(BASE));
    let cx = judge.context(64);
    content(&judge, &cx, &as_disk(&image, &entry.expect("the snapshot")))
}
