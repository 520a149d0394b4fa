//! Real threads on one disk: workers that sleep and wake, whose requests share clusters but never sectors.
//!
//! On each worker run several actors, one request at a time each. An actor owns every n-th sector of the shared half of
//! the disk, so that every cluster there is everybody's, and whole clusters of its own in the other half,
//! where it also discards. It checks what it reads against what it last wrote. At the end the whole disk is
//! compared, by us and by QEMU, and the image must be flawless. A failure names its seed; the threads'
//! interleaving is the machine's, so a seed repeats the requests and not their timing.

#![expect(clippy::print_stderr, reason = "a hang must name its seed too")]

mod common;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::ring::RingKind;
use block::worker::{WorkerConfig, WorkerHandle};
use block::{AlignedBuf, Buffer, Disk, DiskQueue, IoError, Op};
use common::{Folder, Lane, assert_same, close, join, open};
use qcow::{OpenOptions, QcowDisk, TableMemory};
use ringdisk_gen::Random;
use ringdisk_gen::array::{Array, Ask};
use simulator::pages::Tags;

const DISK: u64 = 8 << 20;
const SECTOR: u64 = 512;
const WORKERS: u64 = 3;
const ACTORS_PER_WORKER: u64 = 4;
const ACTORS: u64 = WORKERS * ACTORS_PER_WORKER;
/// The fewest requests of each: all together, enough to be in each other's way.
const REQUESTS_MIN: u64 = 50;

/// A variant: the way its image is made and opened.
#[derive(Clone, Debug)]
struct Variant {
    name: &'static str,
    cluster: u64,
    backing: bool,
    compressed: bool,
    /// Requests have registered pages.
    registered: bool,
    ring: RingKind,
    options: OpenOptions,
}

impl Variant {
    fn new(name: &'static str, cluster: u64) -> Self {
        Self {
            name,
            cluster,
            backing: false,
            compressed: false,
            registered: false,
            ring: RingKind::IoUring,
            options: OpenOptions::default(),
        }
    }
}

/// The sectors one actor writes, and what it believes is in them.
struct Actor {
    random: Random,
    cluster: u64,
    /// The first sector of the shared half that is this actor's; the others follow at distance [`ACTORS`].
    first: u64,
    /// Its part of the other half: first sector and how many.
    own: (u64, u64),
    model: Array,
    /// The number of requests it has made.
    requests: u64,
}

/// The bytes of an actor's place among registered pages.
const PLACE_BYTES: usize = 200 * SECTOR as usize + 4096;
/// The byte that fills a place beside a request's bytes.
const BESIDE: u8 = 0xA5;

/// The storage of an actor's request bytes: memory, or registered pages.
#[derive(Default)]
struct Bytes {
    /// The worker's pages, and the place among them that is this actor's.
    pages: Option<(Rc<Tags>, u16)>,
    /// The offset in it at which the bytes begin.
    skip: usize,
}

impl Bytes {
    fn buffer(&mut self, bytes: &[u8], random: &mut Random) -> Result<Buffer, String> {
        let Some((tags, tag)) = &self.pages else {
            return Ok(AlignedBuf::from_slice(bytes).into());
        };
        self.skip = random.pick(&[0, 512, 4096]);
        let align = if self.skip == 0 { 4096 } else { self.skip };
        let buffer = tags.buffer(*tag, self.skip, bytes.len(), align);
        tags.write(*tag, 0, &vec![BESIDE; PLACE_BYTES]);
        tags.write(*tag, self.skip, bytes);
        buffer.map_err(|error| error.to_string())
    }

    /// Returns the bytes of a request that has ended. Fails if any beside them have changed.
    fn found(&self, buffer: Buffer) -> Result<Vec<u8>, String> {
        let Some((tags, tag)) = &self.pages else {
            return Ok(buffer.into_owned().ok_or("no buffer")?.to_vec());
        };
        let mut place = vec![0; PLACE_BYTES];
        tags.read(*tag, 0, &mut place);
        let found = place[self.skip..self.skip + buffer.len()].to_vec();
        place[self.skip..self.skip + buffer.len()].fill(BESIDE);
        match place.iter().all(|&byte| byte == BESIDE) {
            true => Ok(found),
            false => Err("what lies beside a request's pages has changed".to_owned()),
        }
    }
}

async fn ask(
    queue: &dyn DiskQueue,
    op: Op,
    sector: u64,
    count: u64,
    buffer: Buffer,
) -> Result<Buffer, IoError> {
    block::ask(queue, op, sector * SECTOR, count * SECTOR, buffer).await
}

impl Actor {
    fn new(index: u64, seed: u64, variant: &Variant, disk: &[u8]) -> Self {
        let half = DISK / SECTOR / 2;
        let share = half / ACTORS * SECTOR / variant.cluster * variant.cluster / SECTOR;
        let mut model = Array::new(disk.to_vec(), variant.cluster, 1);
        model.discards = variant.options.sparse;
        Self {
            random: Random::new(seed * 1000 + index),
            cluster: variant.cluster / SECTOR,
            first: index,
            own: (half + index * share, share),
            model,
            requests: 0,
        }
    }

    fn shared_sector(&mut self) -> u64 {
        let most = (DISK / SECTOR / 2 - self.first).div_ceil(ACTORS);
        // Often among few clusters, to meet the others there.
        let most = if self.random.one_in(2) { most.min(24) } else { most };
        self.first + self.random.below(most) * ACTORS
    }

    fn own_range(&mut self) -> (u64, u64) {
        let (first, len) = self.own;
        let start = self.random.below(len);
        let most = self.random.pick(&[1, 8, 16, 200]).min(len - start);
        (first + start, 1 + self.random.below(most))
    }

    async fn run(
        mut self,
        queue: Rc<dyn DiskQueue>,
        mut bytes: Bytes,
        until: Instant,
    ) -> Result<Self, String> {
        // On a busy machine the time alone may be that of a few.
        while Instant::now() < until || self.requests < REQUESTS_MIN {
            self.requests += 1;
            let (sector, count) = if self.random.one_in(2) {
                (self.shared_sector(), 1)
            } else {
                self.own_range()
            };
            let what = self.random.below(20);
            let (op, sector, count, ask) = match what {
                0..=5 => (Op::Read, sector, count, Ask::Read),
                6..=14 => {
                    let fill = content(&mut self.random, self.requests, count);
                    let fua = what == 6 && self.random.one_in(8);
                    (Op::Write { fua }, sector, count, Ask::Write(fill))
                }
                15..=16 => {
                    let (unmap, fua) = (what == 15, false);
                    (Op::WriteZeroes { unmap, fua }, sector, count, Ask::Zeroes)
                }
                17..=18 => {
                    let (first, len) = self.own;
                    let cluster = self.cluster;
                    let start = first + self.random.below(len / cluster) * cluster;
                    let count = cluster * (1 + self.random.below(((first + len - start) / cluster).min(8)));
                    (Op::Discard, start, count, Ask::Discard)
                }
                _ => (Op::Flush, 0, 0, Ask::Flush),
            };
            let carried = match &ask {
                Ask::Read => vec![0xCC; (count * SECTOR) as usize],
                Ask::Write(fill) => fill.clone(),
                _ => Vec::new(),
            };
            let buffer = match carried.is_empty() {
                true => Buffer::default(),
                false => bytes.buffer(&carried, &mut self.random)?,
            };
            let range = sector * SECTOR..(sector + count) * SECTOR;
            assert!(self.model.begin(0, range, ask), "one request at a time");
            let failed = |error| format!("{op:?} of {count} sectors at {sector}: {error}");
            let buffer = self::ask(&*queue, op, sector, count, buffer).await;
            let buffer = buffer.map_err(failed)?;
            let found = match carried.is_empty() {
                true => Vec::new(),
                false => bytes.found(buffer)?,
            };
            if matches!(op, Op::Write { .. }) && found != carried {
                return Err(format!(
                    "a write of {count} sectors at {sector} changed what it writes"
                ));
            }
            self.model.end(0, &found)?;
        }
        Ok(self)
    }
}

/// Sectors no two of which are alike.
fn content(random: &mut Random, version: u64, count: u64) -> Vec<u8> {
    let mut bytes = vec![random.draw() as u8; (count * SECTOR) as usize];
    for sector in bytes.chunks_exact_mut(SECTOR as usize) {
        sector[..8].copy_from_slice(&random.draw().to_le_bytes());
        sector[504..].copy_from_slice(&version.to_le_bytes());
    }
    bytes
}

/// Makes the image; returns what is in it.
fn make(folder: &Folder, variant: &Variant, random: &mut Random) -> Vec<u8> {
    let options = format!("cluster_size={}", variant.cluster);
    let size = DISK.to_string();
    if !variant.backing && !variant.compressed {
        folder.qemu_img(&["create", "-f", "qcow2", "-o", &options, "disk.qcow2", &size]);
        return vec![0; DISK as usize];
    }
    let model = content(random, 0, DISK / SECTOR);
    std::fs::write(folder.path("plain.raw"), &model).expect("a plain image");
    let name = if variant.backing {
        "base.qcow2"
    } else {
        "disk.qcow2"
    };
    let mut args = vec![
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-o",
        &options,
        "plain.raw",
        name,
    ];
    if variant.compressed {
        args.insert(1, "-c");
    }
    folder.qemu_img(&args);
    if variant.backing {
        let args = ["-b", "base.qcow2", "-F", "qcow2", "disk.qcow2", &size];
        folder.qemu_img(&[&["create", "-f", "qcow2", "-o", &options], &args[..]].concat());
    }
    model
}

/// As [`start`], in this thread on a ring with registered pages, whose ops end short now and then.
fn start_registered(
    disk: &Arc<QcowDisk>,
    ring: RingKind,
    actors: Vec<Actor>,
    until: Instant,
) -> Vec<Result<Actor, String>> {
    let made = Tags::on_ring(ring, 64, ACTORS_PER_WORKER as u16, PLACE_BYTES, Some(1));
    let (cx, tags) = made.expect("these tests need io_uring: kernel.io_uring_disabled=0");
    let tags = Rc::new(tags);
    let queue: Rc<dyn DiskQueue> = Rc::from(Arc::clone(disk).open_queue(&cx).expect("a queue"));
    let running = (0..).zip(actors).map(|(tag, actor)| {
        let bytes = Bytes {
            pages: Some((Rc::clone(&tags), tag)),
            skip: 0,
        };
        actor.run(Rc::clone(&queue), bytes, until)
    });
    let ended = cx.block_on(join(running.collect())).expect("the ring turns");
    drop(queue);
    common::drain(&cx);
    ended
}

fn start(
    disk: &Arc<QcowDisk>,
    worker: &WorkerHandle,
    actors: Vec<Actor>,
    until: Instant,
) -> Vec<Result<Actor, String>> {
    let disk = Arc::clone(disk);
    let ran = worker.block_on(move |cx| {
        let queue: Rc<dyn DiskQueue> = Rc::from(disk.open_queue(cx).expect("a queue"));
        let running = actors
            .into_iter()
            .map(|actor| actor.run(Rc::clone(&queue), Bytes::default(), until))
            .collect();
        Box::pin(join(running))
    });
    ran.expect("the worker lives")
}

/// Works one image with all threads for a while, and checks all of it.
fn stress(variant: Variant) {
    let seed = std::env::var("STRESS_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |now| u64::from(now.subsec_nanos()))
    });
    eprintln!("{}: STRESS_SEED={seed}", variant.name);
    let folder = Folder::new();
    let mut model = make(&folder, &variant, &mut Random::new(seed));
    let options = OpenOptions {
        backing_files: variant.backing,
        ..variant.options.clone()
    };
    let disk = open(&folder.path("disk.qcow2"), &options);
    let until = Instant::now() + Duration::from_millis(1200);
    let workers: Vec<WorkerHandle> = (0..WORKERS)
        .map(|_| {
            let config = WorkerConfig {
                ring: variant.ring,
                ..WorkerConfig::default()
            };
            WorkerHandle::spawn(config).expect("a worker")
        })
        .collect();
    let ended: Vec<Result<Actor, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WORKERS)
            .map(|index| {
                let first = index * ACTORS_PER_WORKER;
                let actors = (first..first + ACTORS_PER_WORKER)
                    .map(|actor| Actor::new(actor, seed, &variant, &model))
                    .collect();
                let (disk, worker) = (&disk, &workers[index as usize]);
                let (registered, ring) = (variant.registered, variant.ring);
                scope.spawn(move || match registered {
                    true => start_registered(disk, ring, actors, until),
                    false => start(disk, worker, actors, until),
                })
            })
            .collect();
        let ended = threads.into_iter().map(|thread| thread.join().expect("a thread"));
        ended.flatten().collect()
    });
    let mut requests = 0;
    for actor in ended {
        let actor = actor.unwrap_or_else(|error| panic!("{variant:?}, STRESS_SEED={seed}: {error}"));
        requests += actor.requests;
        let (own, len) = actor.own;
        for (sector, count) in (actor.first..DISK / SECTOR / 2)
            .step_by(ACTORS as usize)
            .map(|sector| (sector, 1))
            .chain([(own, len)])
        {
            let range = (sector * SECTOR) as usize..((sector + count) * SECTOR) as usize;
            model[range.clone()].copy_from_slice(&actor.model.bytes()[range]);
        }
    }
    workers.into_iter().for_each(WorkerHandle::stop);
    let what = format!("{}, STRESS_SEED={seed}, {requests} requests", variant.name);
    eprintln!("{what}");
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert_same(&lane.read(0, DISK), &model, &what);
    lane.settle();
    drop(lane);
    close(disk);
    folder.assert_flawless("disk.qcow2", false);
    assert_same(&folder.qemu_reads("disk.qcow2"), &model, &what);
}

#[test]
fn threads_sharing_clusters_of_a_plain_image_agree() {
    stress(Variant::new("plain", 65536));
}

#[test]
fn threads_copying_from_a_backing_image_agree() {
    stress(Variant {
        backing: true,
        ..Variant::new("backing", 65536)
    });
}

#[test]
fn threads_overwriting_compressed_clusters_agree() {
    stress(Variant {
        compressed: true,
        ..Variant::new("compressed", 16384)
    });
}

#[test]
fn threads_on_direct_io_agree() {
    let mut variant = Variant {
        backing: true,
        ..Variant::new("direct", 4096)
    };
    variant.options.direct = true;
    stress(variant);
}

#[test]
fn threads_evicting_each_others_tables_agree() {
    let mut variant = Variant::new("tiny cache", 512);
    variant.options.l2_cache_bytes = Some(4096);
    stress(variant);
}

#[test]
fn threads_evicting_the_tables_of_another_image_agree() {
    let mut variant = Variant {
        backing: true,
        ..Variant::new("little memory for two images", 512)
    };
    variant.options.table_memory = TableMemory::new(24 << 10);
    stress(variant);
}

#[test]
fn threads_on_a_disk_that_is_not_sparse_agree() {
    let mut variant = Variant::new("not sparse", 65536);
    variant.options.sparse = false;
    stress(variant);
}

#[test]
fn threads_with_discard_no_unref_agree() {
    let mut variant = Variant::new("discard, no unref", 4096);
    variant.options.discard_no_unref = true;
    stress(variant);
}

#[test]
fn threads_on_plain_system_calls_agree() {
    stress(Variant {
        ring: RingKind::Syscalls,
        compressed: true,
        backing: true,
        ..Variant::new("system calls", 4096)
    });
}

#[test]
fn threads_with_registered_pages_agree() {
    stress(Variant {
        backing: true,
        registered: true,
        ..Variant::new("registered", 16384)
    });
}

#[test]
fn threads_with_registered_pages_direct_compressed_agree() {
    let mut variant = Variant {
        compressed: true,
        registered: true,
        ..Variant::new("registered, direct, compressed", 4096)
    };
    variant.options.direct = true;
    stress(variant);
}

#[test]
fn threads_with_registered_pages_on_system_calls_agree() {
    stress(Variant {
        backing: true,
        registered: true,
        ring: RingKind::Syscalls,
        ..Variant::new("registered, system calls", 4096)
    });
}
