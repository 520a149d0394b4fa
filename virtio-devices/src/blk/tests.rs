//! The device and one queue of it without a transport and without a worker: errors of the interface, rounds, random requests.
//!
//! The guest's view of each request is in `crate::conformance`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use block::ring::RingKind;
use block::worker::Frontend;
use block::{Context, Disk};
use vm_memory::MmapRegion;

use super::*;
use crate::conformance::{ALL, SERIAL};
use crate::stats::RequestKind;
use crate::testing::{DATA, MemDisk, TABLE, driver, guest_memory};
use crate::virtqueue::InflightRegion;
use crate::virtqueue::tests::nearly_right;
use ringdisk_driver::blk::{
    DISCARD, F_CONFIG_WCE, F_FLUSH, FLUSH, GET_ID, IN, OK, OUT, WRITE_ZEROES, header, segment,
};
use ringdisk_driver::{Desc, Driver, INDIRECT, NEXT, WRITE};
use ringdisk_gen::Random;

#[derive(Clone, Default)]
struct Seen {
    used: Arc<AtomicU32>,
    broken: Arc<AtomicU32>,
}

impl Notify for Seen {
    fn used(&self) {
        self.used.fetch_add(1, Relaxed);
    }

    fn broken(&self) {
        self.broken.fetch_add(1, Relaxed);
    }
}

/// A device with one queue, its driver, and the worker's part played by the test.
struct World {
    cx: Context,
    device: Arc<BlockDevice>,
    queue: BlockQueue,
    driver: Driver,
    seen: Seen,
    report: Arc<QueueReport>,
}

impl World {
    fn new(disk: &MemDisk) -> Self {
        Self::with(disk.disk(), ALL, 64)
    }

    fn with(disk: Arc<dyn Disk>, features: u64, size: u16) -> Self {
        let driver = driver(guest_memory(None), 0, size);
        driver.set_used_event(0);
        Self::start(disk, features, driver, None)
    }

    fn start(disk: Arc<dyn Disk>, features: u64, driver: Driver, inflight: Option<InflightRegion>) -> Self {
        let size = driver.size;
        let cx = Context::new(RingKind::Auto, 64).expect("a ring");
        let config = BlockDeviceConfig {
            num_queues: 1,
            queue_size: size,
            serial: SERIAL,
        };
        let device = Arc::new(BlockDevice::new(disk, &config).expect("a device"));
        let (seen, report) = (Seen::default(), Arc::new(QueueReport::default()));
        let config = BlockQueueConfig {
            memory: driver.memory.clone(),
            size,
            addresses: driver.rings.into(),
            next_available: 0,
            inflight,
            log: None,
            features,
            notify: Box::new(seen.clone()),
            polled: false,
            report: Arc::clone(&report),
            stats: device.stats().queue(0),
        };
        let queue = BlockQueue::start(Arc::clone(&device), &cx, config).expect("a queue");
        Self {
            cx,
            device,
            queue,
            driver,
            seen,
            report,
        }
    }

    /// One round of the worker. Returns whether anything was taken or published.
    fn round(&mut self) -> bool {
        let taken = self.queue.poll();
        self.cx.run_ready();
        self.cx.ring().turn(false).expect("the ring turns");
        self.queue.publish() || taken
    }

    fn run(&mut self) {
        self.driver.publish();
        for _ in 0..1000 {
            if !self.round() && self.queue.in_flight() == 0 {
                return;
            }
            if self.cx.ring().in_flight() > 0 {
                self.cx.ring().turn(true).expect("the ring turns");
            }
        }
        panic!("{:?} does not come to rest", self.queue);
    }

    /// Runs one request and returns its status and used length.
    fn ask(&mut self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> (u8, u32) {
        let head = self.driver.request(kind, sector, data);
        self.run();
        let (id, len) = self.driver.take_used().expect("an answer");
        assert_eq!(id, u32::from(head));
        assert_eq!(self.driver.take_used(), None, "one answer");
        (self.driver.status(head), len)
    }
}

#[test]
fn write_config_takes_only_a_negotiated_cache_mode() {
    let disk = MemDisk::new();
    let world = World::new(&disk);
    let read_only = |offset, len| Err(ConfigWriteError::ReadOnly { offset, len });
    assert_eq!(world.device.write_config(0, &[1], ALL), read_only(0, 1));
    assert_eq!(world.device.write_config(32, &[1, 0], ALL), read_only(32, 2));
    assert_eq!(world.device.write_config(32, &[], ALL), read_only(32, 0));
    assert_eq!(
        world.device.write_config(32, &[0], ALL & !F_CONFIG_WCE),
        read_only(32, 1)
    );
    assert_eq!(
        world.device.write_config(32, &[2], ALL),
        Err(ConfigWriteError::Writeback { value: 2 })
    );
    assert_eq!(world.device.read_config(32, 1, ALL), [1]);
    // One that cannot flush has no cache that it would have to (virtio 1.2, 5.2.5.2).
    assert_eq!(world.device.read_config(32, 1, ALL & !F_FLUSH), [0]);
    assert_eq!(
        world.device.read_config(32, 1, ALL & !F_FLUSH & !F_CONFIG_WCE),
        [1]
    );
}

#[test]
fn read_config_past_the_end_returns_zeros() {
    let world = World::new(&MemDisk::new());
    assert_eq!(world.device.read_config(56, 8, 0), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(world.device.read_config(u64::MAX, 2, 0), [0, 0]);
}

#[test]
fn device_refuses_a_serial_over_20_bytes() {
    let config = BlockDeviceConfig {
        num_queues: 1,
        queue_size: 128,
        serial: "123456789012345678901",
    };
    let error = BlockDevice::new(MemDisk::new().disk(), &config).expect_err("21 bytes");
    assert_eq!(
        error.to_string(),
        "serial `123456789012345678901` has 21 bytes; at most 20 fit"
    );
}

#[test]
fn queue_notifies_once_per_round() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    for sector in 0..8 {
        world.driver.request(IN, sector, &[(DATA, 512, true)]);
    }
    world.run();
    assert_eq!(world.driver.used_index(), 8);
    assert_eq!(world.seen.used.load(Relaxed), 1);
}

#[test]
fn queue_takes_nothing_and_sleeps_when_full() {
    let disk = MemDisk::new();
    let mut world = World::with(disk.disk(), ALL, 4);
    disk.hold();
    // A chain per descriptor, all the same one-descriptor request in an indirect table.
    let driver = &mut world.driver;
    driver.write(DATA, &[0; 16]);
    driver.descriptor_in(TABLE, 0, Desc(DATA, 16, NEXT, 1));
    driver.descriptor_in(TABLE, 1, Desc(DATA + 4096, 513, WRITE, 0));
    for head in 0..4 {
        driver.descriptor(head, Desc(TABLE, 32, INDIRECT, 0));
        driver.stage(head);
    }
    driver.publish();
    assert!(world.round());
    assert_eq!((world.queue.in_flight(), disk.held()), (4, 4));
    world.driver.make_available(0);
    assert!(!world.queue.poll(), "nothing is taken");
    assert!(!world.queue.prepare_sleep(), "nothing to stay awake for");
    disk.release();
    // The chain that came while all were in flight was taken too early by the driver: it is still
    // there, and its descriptor is free again by now.
    world.run();
    assert_eq!(world.driver.used_index(), 5);
    assert_eq!(world.seen.broken.load(Relaxed), 0);
}

#[test]
fn removed_queue_reports_its_next_indices() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    world.ask(FLUSH, 0, &[]);
    world.ask(FLUSH, 0, &[]);
    world.queue.removed();
    assert_eq!(world.report.next_available(), 2);
    assert_eq!(world.report.next_used(), 2);
}

/// No content of rings and headers makes the device panic or hang, and every chain it took is returned.
#[test]
fn random_requests_are_answered_or_break_the_queue() {
    for seed in 1..=200 {
        let mut random = Random::new(seed);
        let disk = MemDisk::new();
        let mut world = World::with(disk.disk(), ALL, 16);
        let mut made = 0u16;
        for _ in 0..50 {
            for index in 0..16 {
                world.driver.descriptor(index, nearly_right(&mut random));
                world
                    .driver
                    .descriptor_in(TABLE, index, nearly_right(&mut random));
            }
            // Headers wherever data may be.
            for _ in 0..16 {
                let kind = random.pick(&[IN, OUT, FLUSH, GET_ID, DISCARD, WRITE_ZEROES]);
                let header = header(kind, random.below(2048));
                world.driver.write(DATA + random.below(65536), &header);
            }
            for _ in 0..random.below(4) {
                world.driver.stage(random.below(16) as u16);
                made += 1;
            }
            world.run();
            if world.report.is_broken() {
                break;
            }
            assert_eq!(world.driver.used_index(), made, "seed {seed}");
        }
        assert_eq!(world.queue.in_flight(), 0, "seed {seed}");
    }
}

/// A request of a random kind, well formed or not: its type, its sector, its data, and how statistics should count it.
type Asked = (u32, u64, Vec<(u64, u32, bool)>, RequestKind, u64);

fn random_request(random: &mut Random, driver: &Driver, place: u64) -> Asked {
    let sectors = 1 + random.below(8);
    let (bytes, sector) = (sectors * 512, random.below(2048 - 8));
    // Some reach past the end of the disk.
    let sector = if random.one_in(8) {
        2048 - 1 + random.below(2)
    } else {
        sector
    };
    match random.below(7) {
        0 | 1 => (
            IN,
            sector,
            vec![(place, bytes as u32, true)],
            RequestKind::Read,
            bytes,
        ),
        2 | 3 => (
            OUT,
            sector,
            vec![(place, bytes as u32, false)],
            RequestKind::Write,
            bytes,
        ),
        4 => (FLUSH, 0, vec![], RequestKind::Flush, 0),
        5 => {
            let zero = random.one_in(2);
            let kind = if zero {
                RequestKind::WriteZeroes
            } else {
                RequestKind::Discard
            };
            let segments = [(sector, sectors as u32, 0), (8, 1, 0)];
            let bytes_of = |&(sector, count, flags): &(u64, u32, u32)| segment(sector, count, flags);
            driver.write(place, &segments.iter().flat_map(bytes_of).collect::<Vec<_>>());
            let number = if zero { WRITE_ZEROES } else { DISCARD };
            (number, 0, vec![(place, 32, false)], kind, bytes + 512)
        }
        _ => {
            let number = random.pick(&[GET_ID, 77]);
            (number, 0, vec![(place, 20, true)], RequestKind::Other, 0)
        }
    }
}

#[test]
fn statistics_agree_with_what_the_driver_did() {
    let mut shares = 0.0;
    for seed in 1..=40 {
        let mut random = Random::new(seed);
        let disk = MemDisk::new();
        let mut world = World::new(&disk);
        // By kind: requests, bytes, errors.
        let mut expected = [[0u64; 3]; RequestKind::ALL.len()];
        for _ in 0..200 {
            disk.fail(random.one_in(6).then_some(block::IoError::Corrupt));
            let mut asked = Vec::new();
            for index in 0..1 + random.below(8) {
                let place = DATA + index * 4096;
                let (number, sector, data, kind, bytes) = random_request(&mut random, &world.driver, place);
                let head = world.driver.request(number, sector, &data);
                asked.push((head, kind, bytes));
            }
            world.run();
            while world.driver.take_used().is_some() {}
            for (head, kind, bytes) in asked {
                let [requests, moved, errors] = &mut expected[kind as usize];
                *requests += 1;
                match world.driver.status(head) {
                    OK => *moved += bytes,
                    _ => *errors += 1,
                }
            }
        }
        let stats = world.device.stats().snapshot().sum();
        assert_eq!(stats.in_flight, 0);
        for kind in RequestKind::ALL {
            let found = stats.kind(kind);
            let found = [found.requests, found.bytes, found.errors];
            assert_eq!(found, expected[kind as usize], "seed {seed}: {kind:?}");
            assert!(found[0] > 0, "seed {seed}: {kind:?}");
        }
        let errors: u64 = expected.iter().map(|[.., errors]| errors).sum();
        assert!(errors > 10, "seed {seed}");
        assert_eq!(stats.flush.latency.count(), stats.flush.requests, "seed {seed}");
        let share = stats.read.latency.count() as f64 / stats.read.requests as f64;
        shares += share / 40.0;
    }
    // What was measured stands for all.
    assert!((0.8..1.2).contains(&shares), "{shares}");
}

#[test]
fn statistics_count_requests_in_flight() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    disk.hold();
    for sector in 0..5 {
        world.driver.request(IN, sector, &[(DATA, 512, true)]);
    }
    world.driver.publish();
    assert!(world.round());
    let stats = world.device.stats().snapshot().sum();
    assert_eq!((stats.in_flight, stats.read.requests), (5, 0));
    disk.release();
    world.run();
    let stats = world.device.stats().snapshot().sum();
    assert_eq!((stats.in_flight, stats.read.requests), (0, 5));
}

/// A worker polls a removed queue no more. Chains that a killed server left would stay unanswered, and their marks be lost.
#[test]
fn queue_answers_recovered_chains_when_stopped_early() {
    const SIZE: u16 = 16;
    let map = Arc::new(MmapRegion::new(InflightRegion::bytes(SIZE)).expect("memory"));
    let marks = |recover| InflightRegion::new(&map, 0, SIZE, recover);
    let disk = MemDisk::new();
    let driver = driver(guest_memory(None), 0, SIZE);
    let mut first = World::start(disk.disk(), ALL, driver, marks(false));
    disk.hold();
    let head = first.driver.request(OUT, 3, &[(DATA, 512, false)]);
    first.driver.publish();
    assert!(first.round());
    let memory = first.driver.memory.clone();
    let driver = first.driver.in_memory(&memory);
    // Killed: nothing that it does from here on counts.
    disk.release();

    let mut second = World::start(MemDisk::new().disk(), ALL, driver, marks(true));
    assert_eq!(second.queue.in_flight(), 1, "removal waits for it");
    for _ in 0..10 {
        second.cx.run_ready();
        second.cx.ring().turn(false).expect("the ring turns");
        second.queue.publish();
    }
    assert_eq!(second.queue.in_flight(), 0);
    assert_eq!(second.driver.take_used(), Some((u32::from(head), 1)));
    assert_eq!(second.driver.status(head), OK);
    second.queue.removed();
    assert_eq!(second.report.next_available(), 1);
    // A context whose tasks have not ended goes with nobody.
    first.cx.run_ready();
}
