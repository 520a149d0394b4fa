//! The device against a driver, with a disk in memory and with a raw file.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use block::file::{FileOptions, ImageFile};
use block::raw::RawDisk;
use block::ring::RingKind;
use block::worker::Frontend;
use block::{Context, Disk, IoError, Op};
use vm_memory::MmapRegion;

use super::*;
use crate::testing::{DATA, DISK_BYTES, END, MemDisk, RING_FEATURES, TABLE, driver, guest_memory};
use crate::virtqueue::InflightRegion;
use crate::virtqueue::tests::nearly_right;
use ringdisk_driver::blk::{
    DISCARD, F_CONFIG_WCE, F_DISCARD, F_FLUSH, F_WRITE_ZEROES, FLUSH, GET_ID, IN, IOERR, OK, OUT, UNSUPP,
    WRITE_ZEROES, header, segment,
};
use ringdisk_driver::{Desc, Driver, INDIRECT, NEXT, WRITE};
use ringdisk_gen::Random;

const ALL: u64 = RING_FEATURES | F_FLUSH | F_CONFIG_WCE | F_DISCARD | F_WRITE_ZEROES;

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
            serial: "serial-1",
        };
        let device = Arc::new(BlockDevice::new(disk, &config).expect("a device"));
        let (seen, report) = (Seen::default(), Arc::new(QueueReport::default()));
        let config = BlockQueueConfig {
            memory: driver.memory.clone(),
            size,
            addresses: driver.rings.into(),
            next_available: 0,
            inflight,
            features,
            notify: Box::new(seen.clone()),
            polled: false,
            report: Arc::clone(&report),
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

    /// Writes discard or write-zeroes segments and returns their buffer.
    fn segments(&self, segments: &[(u64, u32, u32)]) -> (u64, u32, bool) {
        let each = segments.iter();
        let bytes: Vec<u8> = each
            .flat_map(|&(sector, count, flags)| segment(sector, count, flags))
            .collect();
        self.driver.write(DATA, &bytes);
        (DATA, bytes.len() as u32, false)
    }
}

#[test]
fn what_is_written_is_read_back_whatever_way_the_buffers_are_cut() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    let data: Vec<u8> = (0..2048u32).map(|byte| (byte % 251) as u8).collect();
    world.driver.write(DATA, &data);
    let cut = [(DATA, 3, false), (DATA + 3, 1, false), (DATA + 4, 2044, false)];
    assert_eq!(world.ask(OUT, 2, &cut), (OK, 1));
    assert_eq!(disk.bytes(1024, 2048), data);
    let cut = [(DATA + 8192, 1000, true), (DATA + 16384, 1048, true)];
    assert_eq!(world.ask(IN, 2, &cut), (OK, 2049));
    assert_eq!(world.driver.read(DATA + 8192, 1000), data[..1000]);
    assert_eq!(world.driver.read(DATA + 16384, 1048), data[1000..]);
}

#[test]
fn a_request_in_one_indirect_table_with_the_status_behind_the_data_is_served() {
    let disk = MemDisk::new();
    disk.set_bytes(512, &[7; 512]);
    let mut world = World::new(&disk);
    let driver = &mut world.driver;
    driver.write(DATA, &[0; 16]);
    driver.write(DATA + 8, &1u64.to_le_bytes());
    driver.write(DATA + 4096 + 512, &[0xff]);
    driver.descriptor(9, Desc(TABLE, 32, INDIRECT, 0));
    driver.descriptor_in(TABLE, 0, Desc(DATA, 16, NEXT, 1));
    driver.descriptor_in(TABLE, 1, Desc(DATA + 4096, 513, WRITE, 0));
    driver.stage(9);
    world.run();
    assert_eq!(world.driver.take_used(), Some((9, 513)));
    let mut expected = vec![7; 512];
    expected.push(OK);
    assert_eq!(world.driver.read(DATA + 4096, 513), expected);
}

#[test]
fn a_flush_is_passed_on_and_the_serial_number_is_told() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    assert_eq!(world.ask(FLUSH, 0, &[]), (OK, 1));
    assert_eq!(disk.log(), [(Op::Flush, 0, 0)]);
    world.driver.write(DATA, &[0xee; 32]);
    assert_eq!(world.ask(GET_ID, 0, &[(DATA, 20, true)]), (OK, 21));
    let mut expected = b"serial-1".to_vec();
    expected.resize(20, 0);
    expected.push(0xee);
    assert_eq!(world.driver.read(DATA, 21), expected);
    assert_eq!(world.ask(GET_ID, 0, &[(DATA, 4, true)]), (OK, 5));
    assert_eq!(world.ask(GET_ID, 0, &[]), (IOERR, 1));
}

#[test]
fn requests_that_cannot_be_meant_get_an_error_and_never_reach_the_disk() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    let read = |len| (DATA, len, true);
    let write = |len| (DATA, len, false);
    type Case = (&'static str, u32, u64, Vec<(u64, u32, bool)>, u8);
    let cases: &[Case] = &[
        ("no data to read", IN, 0, vec![], IOERR),
        ("no data to write", OUT, 0, vec![], IOERR),
        ("half a sector", IN, 0, vec![read(256)], IOERR),
        ("a sector and a byte", OUT, 0, vec![write(513)], IOERR),
        ("a sector that wraps around", IN, u64::MAX, vec![read(512)], IOERR),
        ("data in the wrong direction", IN, 0, vec![write(512)], IOERR),
        ("data to write that is writable", OUT, 0, vec![read(512)], IOERR),
        ("data outside memory", IN, 0, vec![(END, 512, true)], IOERR),
        ("data at zero", OUT, 0, vec![(0, 512, false)], IOERR),
        ("an empty buffer", IN, 0, vec![read(512), read(0)], IOERR),
        ("an unknown type", 77, 0, vec![read(512)], UNSUPP),
        ("an SCSI command", 2, 0, vec![read(512)], UNSUPP),
        ("a secure erase", 14, 0, vec![write(16)], UNSUPP),
        ("a discard of nothing", DISCARD, 0, vec![], IOERR),
        ("half a segment", WRITE_ZEROES, 0, vec![write(8)], IOERR),
        ("too many segments", DISCARD, 0, vec![write(33 * 16)], IOERR),
    ];
    world.driver.write(DATA, &[0; 1024]);
    for (name, kind, sector, data, status) in cases {
        assert_eq!(world.ask(*kind, *sector, data), (*status, 1), "{name}");
    }
    assert_eq!(disk.log(), []);
    assert_eq!(world.seen.broken.load(Relaxed), 0);
    // The disk itself refuses what lies behind its end.
    let end = DISK_BYTES / 512;
    assert_eq!(world.ask(IN, end, &[read(512)]), (IOERR, 1));
    assert_eq!(world.ask(IN, end - 1, &[read(512)]), (OK, 513));
}

#[test]
fn a_header_that_is_too_short_is_an_error() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    let head = world.driver.chain(&[(DATA, 15, false), (DATA + 64, 513, true)]);
    world.driver.stage(head);
    world.run();
    assert_eq!(world.driver.take_used(), Some((head.into(), 1)));
    assert_eq!(world.driver.read(DATA + 64 + 512, 1), [IOERR]);
    assert_eq!(disk.log(), []);
}

#[test]
fn segments_are_carried_out_each_and_answered_once() {
    let disk = MemDisk::new();
    disk.set_bytes(0, &[9; 8192]);
    let mut world = World::new(&disk);
    let segments = world.segments(&[(0, 1, 0), (4, 2, 1), (8, 0, 0)]);
    assert_eq!(world.ask(WRITE_ZEROES, 0, &[segments]), (OK, 1));
    let zero = |unmap| Op::WriteZeroes { unmap, fua: false };
    assert_eq!(disk.log(), [(zero(false), 0, 512), (zero(true), 2048, 1024)]);
    let segments = world.segments(&[(8, 4, 0), (1, 1, 0)]);
    assert_eq!(world.ask(DISCARD, 0, &[segments]), (OK, 1));
    assert_eq!(
        disk.log()[2..],
        [(Op::Discard, 4096, 2048), (Op::Discard, 512, 512)]
    );
    let segments = world.segments(&[(8, 0, 0)]);
    assert_eq!(world.ask(DISCARD, 0, &[segments]), (OK, 1));
    assert_eq!(disk.log().len(), 4, "a segment of nothing asks for nothing");
}

#[test]
fn one_failed_segment_fails_the_request_and_only_when_all_have_ended() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    disk.hold();
    let segments = world.segments(&[(0, 1, 0), (4, 2, 0), (8, 8, 0)]);
    let head = world.driver.request(DISCARD, 0, &[segments]);
    world.driver.publish();
    world.round();
    assert_eq!(world.queue.in_flight(), 1);
    assert_eq!(world.driver.status(head), 0xff);
    disk.fail(Some(IoError::Host { errno: libc::ENOSPC }));
    disk.release();
    world.run();
    assert_eq!(world.driver.take_used(), Some((head.into(), 1)));
    assert_eq!(world.driver.take_used(), None);
    assert_eq!(world.driver.status(head), IOERR);
}

#[test]
fn segments_are_all_checked_before_the_first_is_carried_out() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    let end = DISK_BYTES / 512;
    for (segment, status) in [
        ((end, 1, 0), IOERR),
        ((end - 1, 2, 0), IOERR),
        ((u64::MAX, 1, 0), IOERR),
        ((u64::MAX / 512, 1, 0), IOERR),
        ((0, u32::MAX, 0), IOERR),
        ((0, 1, 2), UNSUPP),
        ((0, 1, 1), UNSUPP),
    ] {
        let segments = world.segments(&[(0, 8, 0), segment]);
        assert_eq!(world.ask(DISCARD, 0, &[segments]), (status, 1), "{segment:?}");
    }
    assert_eq!(disk.log(), []);
}

#[test]
fn what_was_not_negotiated_is_not_supported() {
    let disk = MemDisk::new();
    let mut world = World::with(disk.disk(), RING_FEATURES | F_FLUSH, 64);
    let segments = world.segments(&[(0, 1, 0)]);
    assert_eq!(world.ask(DISCARD, 0, &[segments]), (UNSUPP, 1));
    assert_eq!(world.ask(WRITE_ZEROES, 0, &[segments]), (UNSUPP, 1));
    assert_eq!(disk.log(), []);
}

#[test]
fn writes_are_durable_at_once_unless_the_driver_flushes_and_chose_writeback() {
    let write = |fua| (Op::Write { fua }, 0, 512);
    let data = [(DATA, 512, false)];
    for (features, fua) in [
        (ALL, false),
        (ALL & !F_CONFIG_WCE, false),
        (ALL & !F_CONFIG_WCE & !F_FLUSH, true),
        // It chose nothing and cannot flush.
        (ALL & !F_FLUSH, true),
    ] {
        let disk = MemDisk::new();
        let mut world = World::with(disk.disk(), features, 64);
        assert_eq!(world.ask(OUT, 0, &data), (OK, 1));
        assert_eq!(disk.log(), [write(fua)], "features {features:#x}");
    }
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    assert_eq!(world.device.write_config(32, &[0], ALL), Ok(true));
    assert_eq!(world.ask(OUT, 0, &data), (OK, 1));
    let segments = world.segments(&[(0, 1, 0)]);
    assert_eq!(world.ask(WRITE_ZEROES, 0, &[segments]), (OK, 1));
    assert_eq!(world.device.write_config(32, &[1], ALL), Ok(false));
    assert_eq!(world.ask(OUT, 0, &data), (OK, 1));
    let zero = (
        Op::WriteZeroes {
            unmap: false,
            fua: true,
        },
        0,
        512,
    );
    assert_eq!(disk.log(), [write(true), zero, write(false)]);
}

#[test]
fn features_and_configuration_follow_the_disk() {
    let disk = MemDisk::new();
    let world = World::new(&disk);
    let features = world.device.features();
    assert_eq!(features & ALL, ALL);
    assert_eq!(
        features & (1 << 5 | 1 << 12),
        0,
        "neither read-only nor several queues"
    );
    let config = world.device.read_config(0, 60, 0);
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().expect("four bytes"));
    assert_eq!(word(0), (DISK_BYTES / 512) as u32, "capacity");
    assert_eq!(word(12), 62, "seg_max");
    assert_eq!(word(20), 512, "blk_size");
    assert_eq!(config[24], 3, "physical_block_exp of 4096 bytes");
    assert_eq!(config[26..28], [8, 0], "min_io_size");
    assert_eq!(word(28), 128, "opt_io_size of 64 KiB");
    assert_eq!(config[32], 1, "writeback");
    assert_eq!(config[34..36], [1, 0], "num_queues");
    assert_eq!((word(36), word(40), word(44)), (1 << 20, 32, 128), "discard");
    assert_eq!((word(48), word(52), config[56]), (1 << 20, 32, 1), "write-zeroes");
    assert_eq!(world.device.read_config(56, 8, 0), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(world.device.read_config(u64::MAX, 2, 0), [0, 0]);

    let poor = MemDisk::with(|info| {
        info.read_only = true;
        info.discard = false;
    });
    let config = BlockDeviceConfig {
        num_queues: 4,
        queue_size: 128,
        serial: "",
    };
    let device = BlockDevice::new(poor.disk(), &config).expect("a device");
    let features = device.features();
    assert_eq!(features & (1 << 5 | 1 << 12), 1 << 5 | 1 << 12);
    assert_eq!(features & (F_DISCARD | F_WRITE_ZEROES), 0);
    assert_eq!(device.read_config(36, 12, 0), [0; 12]);
}

#[test]
fn only_the_cache_mode_can_be_written_and_only_if_negotiated() {
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
fn a_serial_number_that_does_not_fit_is_refused() {
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
fn answers_of_a_round_come_with_one_notification() {
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
fn a_queue_whose_requests_are_all_in_flight_sleeps_and_takes_no_more() {
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
fn a_chain_made_available_twice_breaks_the_queue_but_what_is_in_flight_is_answered() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    disk.hold();
    let head = world.driver.request(IN, 0, &[(DATA, 512, true)]);
    world.driver.stage(head);
    world.driver.publish();
    assert!(world.round());
    assert_eq!(world.seen.broken.load(Relaxed), 1);
    assert!(world.report.is_broken());
    assert!(!world.queue.poll());
    assert!(!world.queue.prepare_sleep());
    disk.release();
    world.run();
    assert_eq!(world.driver.take_used(), Some((head.into(), 513)));
    assert_eq!(world.driver.take_used(), None);
    assert_eq!(world.seen.broken.load(Relaxed), 1, "told once");
}

#[test]
fn an_index_that_jumps_and_a_chain_without_a_status_break_the_queue() {
    let jumps: fn(&mut Driver) = |driver| driver.available = 1000;
    let mute: fn(&mut Driver) = |driver| {
        let head = driver.chain(&[(DATA, 16, false)]);
        driver.stage(head);
    };
    for break_it in [jumps, mute] {
        let disk = MemDisk::new();
        let mut world = World::new(&disk);
        assert_eq!(world.ask(FLUSH, 0, &[]), (OK, 1));
        break_it(&mut world.driver);
        world.run();
        assert_eq!(world.seen.broken.load(Relaxed), 1);
        world.driver.request(FLUSH, 0, &[]);
        world.run();
        assert_eq!(world.driver.take_used(), None);
    }
}

#[test]
fn a_removed_queue_reports_where_to_go_on() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk);
    world.ask(FLUSH, 0, &[]);
    world.ask(FLUSH, 0, &[]);
    world.queue.removed();
    assert_eq!(world.report.next_available(), 2);
    assert_eq!(world.report.next_used(), 2);
}

#[test]
fn a_raw_file_serves_everything_a_driver_can_ask() {
    for ring in [RingKind::IoUring, RingKind::Syscalls] {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(DISK_BYTES).expect("its length");
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let raw = RawDisk::new(
            ImageFile::from_fd("raw".as_ref(), file, options),
            DISK_BYTES,
            true,
        );
        let mut world = World::with(raw, ALL, 64);
        world.cx = Context::new(ring, 64).expect("a ring");
        let config = BlockQueueConfig {
            memory: world.driver.memory.clone(),
            size: 64,
            addresses: world.driver.rings.into(),
            next_available: 0,
            inflight: None,
            features: ALL,
            notify: Box::new(world.seen.clone()),
            polled: false,
            report: Arc::clone(&world.report),
        };
        world.queue = BlockQueue::start(Arc::clone(&world.device), &world.cx, config).expect("a queue");
        world.driver.write(DATA, &[5; 4096]);
        assert_eq!(world.ask(OUT, 8, &[(DATA, 4096, false)]), (OK, 1));
        assert_eq!(world.ask(FLUSH, 0, &[]), (OK, 1));
        let segments = world.segments(&[(8, 1, 0), (15, 1, 1)]);
        assert_eq!(world.ask(WRITE_ZEROES, 0, &[segments]), (OK, 1));
        assert_eq!(world.ask(IN, 8, &[(DATA + 8192, 4096, true)]), (OK, 4097));
        let mut expected = vec![5; 4096];
        expected[..512].fill(0);
        expected[3584..].fill(0);
        assert_eq!(world.driver.read(DATA + 8192, 4096), expected);
        let segments = world.segments(&[(0, 64, 0)]);
        assert_eq!(world.ask(DISCARD, 0, &[segments]), (OK, 1));
    }
}

/// Whatever the guest writes into its rings and headers, the device neither panics nor hangs, and what
/// it took it gives back.
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

/// Removal is asked for before the worker's first round, from which on it polls the queue no more: what a killed
/// server left would never be answered, and the marks would be gone with the next start.
#[test]
fn a_queue_that_is_stopped_before_its_first_round_answers_what_a_killed_server_left() {
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
