//! The function as a driver finds it: through its configuration space, registers, kicks and interrupts.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use block::Disk;
use block::ring::RingKind;
use block::worker::WorkerConfig;
use parking_lot::Mutex;

use super::*;
use crate::conformance::{self, Grows, QUEUE_SIZE, SERIAL, Transport, holds_within};
use crate::connect::Cancel;
use crate::testing::{DATA, MemDisk, driver, guest_memory};
use ringdisk_driver::{Driver, blk};

const WINDOW: u32 = 0xC000_8000;
pub(super) const VERSION_1: u64 = blk::F_VERSION_1;
/// The transport's own feature: one queue can be reset alone.
pub(super) const RING_RESET: u64 = 1 << 40;

/// A machine that notes what is asked of it.
#[derive(Debug, Default)]
pub(super) struct Bench {
    watched: Mutex<BTreeMap<u64, OwnedFd>>,
    pub(super) connected: Arc<Mutex<BTreeMap<usize, MsiMessage>>>,
    interrupts: Mutex<Vec<OwnedFd>>,
    /// Kicks are not to be watched for.
    refuses: AtomicBool,
}

#[derive(Debug)]
struct BenchInterrupt {
    index: usize,
    event: OwnedFd,
    connected: Arc<Mutex<BTreeMap<usize, MsiMessage>>>,
}

impl Interrupt for BenchInterrupt {
    fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn connect(&self, message: MsiMessage) -> io::Result<()> {
        self.connected.lock().insert(self.index, message);
        Ok(())
    }

    fn disconnect(&self) -> io::Result<()> {
        self.connected.lock().remove(&self.index);
        Ok(())
    }
}

impl Machine for Bench {
    fn watch(&self, address: u64, kick: BorrowedFd<'_>) -> io::Result<()> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let other = self.watched.lock().insert(address, kick.try_clone_to_owned()?);
        assert!(other.is_none(), "{address:#x} is watched twice");
        Ok(())
    }

    fn unwatch(&self, address: u64, _: BorrowedFd<'_>) -> io::Result<()> {
        let found = self.watched.lock().remove(&address).is_some();
        assert!(found || self.refuses.load(Ordering::SeqCst));
        Ok(())
    }

    fn interrupt(&self) -> io::Result<Box<dyn Interrupt>> {
        let event = block::event::eventfd()?;
        let mut interrupts = self.interrupts.lock();
        interrupts.push(event.try_clone()?);
        Ok(Box::new(BenchInterrupt {
            index: interrupts.len() - 1,
            event,
            connected: Arc::clone(&self.connected),
        }))
    }
}

impl Bench {
    /// Returns true if an interrupt was signalled within a moment, and clears it.
    pub(super) fn was_raised(&self, index: usize) -> bool {
        self.is_raised_within(index, Duration::from_secs(5))
    }

    fn is_raised_within(&self, index: usize, patience: Duration) -> bool {
        let event = self.interrupts.lock()[index].try_clone().expect("a descriptor");
        let raised = holds_within(patience, || super::msix::is_signalled(event.as_fd()));
        if raised {
            rustix::io::read(&event, &mut [0; 8]).expect("a signal");
        }
        raised
    }
}

/// A function in a machine, and the disk in memory that may be behind it.
pub(super) struct Board<F = VirtioPciBlock> {
    pub(super) bench: Arc<Bench>,
    pub(super) disk: MemDisk,
    pub(super) function: F,
    memory: vm_memory::GuestMemoryMmap,
}

impl<F> Board<F> {
    /// With the function that `make` makes, which has no disk.
    pub(super) fn of(
        make: impl FnOnce(vm_memory::GuestMemoryMmap, Arc<dyn Machine>, u32) -> Result<F, PlugError>,
    ) -> Self {
        let (bench, memory) = (Arc::new(Bench::default()), guest_memory(None));
        let machine = Arc::clone(&bench) as Arc<dyn Machine>;
        Self {
            function: make(memory.clone(), machine, WINDOW).expect("a function"),
            bench,
            disk: MemDisk::new(),
            memory,
        }
    }
}

impl Board {
    fn new(queues: u16) -> Self {
        Self::with(queues, RingKind::Auto, |disk| disk)
    }

    /// With what `wrap` makes of a disk in memory.
    fn with(queues: u16, ring: RingKind, wrap: impl FnOnce(Arc<dyn Disk>) -> Arc<dyn Disk>) -> Self {
        let bench = Arc::new(Bench::default());
        let disk = MemDisk::new();
        let memory = guest_memory(None);
        let worker = || WorkerConfig {
            ring,
            ..WorkerConfig::default()
        };
        let config = PciDiskConfig {
            name: "disk".to_owned(),
            num_queues: queues,
            queue_size: QUEUE_SIZE,
            serial: SERIAL.to_owned(),
            workers: (0..queues).map(|_| worker()).collect(),
            stats: Arc::default(),
        };
        let machine = Arc::clone(&bench) as Arc<dyn Machine>;
        let function = VirtioPciBlock::new(wrap(disk.disk()), memory.clone(), machine, WINDOW, config)
            .expect("a function");
        Self {
            bench,
            disk,
            function,
            memory,
        }
    }

    /// With `queues` queues of the backend at `socket`, and memory that it can map.
    pub(super) fn foreign(socket: &std::path::Path, queues: u16, disk: MemDisk) -> Result<Self, PlugError> {
        let bench = Arc::new(Bench::default());
        let file = tempfile::tempfile().expect("a file");
        file.set_len(2 * crate::testing::REGION_BYTES)
            .expect("its length");
        let memory = guest_memory(Some(&file));
        let config = VhostUserDiskConfig {
            name: "disk".to_owned(),
            socket: socket.to_owned(),
            num_queues: queues,
            queue_size: QUEUE_SIZE,
            on_start: None,
        };
        let machine = Arc::clone(&bench) as Arc<dyn Machine>;
        let backend = VhostUserBackend::connect(config, &Cancel::never())?;
        Ok(Self {
            function: VirtioPciBlock::vhost_user(backend, memory.clone(), machine, WINDOW)?,
            bench,
            disk,
            memory,
        })
    }
}

impl<F: PciFunction> Board<F> {
    pub(super) fn config<const N: usize>(&mut self, offset: u16) -> [u8; N] {
        let mut bytes = [0; N];
        self.function.read_config(offset, &mut bytes);
        bytes
    }

    pub(super) fn config_u32(&mut self, offset: u16) -> u32 {
        u32::from_le_bytes(self.config(offset))
    }

    pub(super) fn get(&mut self, offset: u64, len: usize) -> u64 {
        let mut bytes = [0; 8];
        self.function.read(offset, &mut bytes[..len]);
        u64::from_le_bytes(bytes)
    }

    pub(super) fn set(&mut self, offset: u64, len: usize, value: u64) {
        self.function.write(offset, &value.to_le_bytes()[..len]);
    }

    /// The capabilities by where they are: identifier and, for virtio's, kind.
    fn capabilities(&mut self) -> Vec<(u16, u8, u8)> {
        let mut found = Vec::new();
        let [mut at] = self.config(0x34);
        while at != 0 {
            let [id, next, _, kind] = self.config(u16::from(at));
            found.push((u16::from(at), id, kind));
            at = next;
        }
        found
    }

    fn capability(&mut self, id: u8, kind: u8) -> u16 {
        let found = self.capabilities();
        let wanted = |capability: &&(u16, u8, u8)| capability.1 == id && (id != 9 || capability.2 == kind);
        found.iter().find(wanted).expect("the capability").0
    }

    /// Sets the device up as a driver does before it uses queues: memory on, MSI-X on, features, a vector for each
    /// queue.
    pub(super) fn negotiate(&mut self, features: u64) {
        self.function.write_config(4, &6u16.to_le_bytes());
        let msix = self.capability(0x11, 0);
        self.function.write_config(msix + 2, &0x8000u16.to_le_bytes());
        self.set(20, 1, 0);
        self.set(20, 1, 3);
        for half in 0..2 {
            self.set(8, 4, half);
            self.set(12, 4, features >> (32 * half) & 0xFFFF_FFFF);
        }
        self.set(20, 1, 11);
    }

    /// Sets a queue up at the driver's place, in empty rings, with vector `index + 1`, and enables it.
    pub(super) fn enable(&mut self, index: u16) -> Driver {
        let driver = driver(self.memory.clone(), index.into(), QUEUE_SIZE);
        driver.clear_rings();
        self.set(22, 2, index.into());
        self.set(24, 2, 64);
        let vector = u64::from(index) + 1;
        self.set(26, 2, vector);
        assert_eq!(self.get(26, 2), vector);
        // Address, data, not masked.
        self.set(0x4000 + vector * 16, 4, 0xFEE0_0000);
        self.set(0x4000 + vector * 16 + 8, 4, 0x40 + vector);
        self.set(0x4000 + vector * 16 + 12, 4, 0);
        self.set(32, 8, driver.rings.descriptors);
        self.set(40, 4, driver.rings.available & 0xFFFF_FFFF);
        self.set(44, 4, driver.rings.available >> 32);
        self.set(48, 8, driver.rings.used);
        self.set(28, 2, 1);
        driver
    }

    /// Signals the eventfd that the machine would signal for a write to the queue's place.
    pub(super) fn kick(&mut self, index: u64) {
        let watched = self.bench.watched.lock();
        let kick = &watched[&(u64::from(WINDOW) + 0x3000 + index * 4)];
        rustix::io::write(kick, &1u64.to_ne_bytes()).expect("a kick");
    }
}

pub(super) fn wait_used(driver: &mut Driver) -> (u32, u32) {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        if let Some(used) = driver.take_used() {
            return used;
        }
        assert!(Instant::now() < until, "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A write of one sector of `fill` to sector 2; its status.
pub(super) fn write(driver: &mut Driver, fill: u8) -> u16 {
    driver.write(DATA, &[fill; 512]);
    let head = driver.request(blk::OUT, 2, &[(DATA, 512, false)]);
    driver.publish();
    head
}

/// The backend behind the function on a board of the conformance suite.
pub(super) trait Behind: Sized {
    /// Plugs a function with `queues` queues for `disk` into a board.
    fn plug(disk: Arc<dyn Disk>, queues: u16, ring: RingKind) -> (Board, Self);
}

/// Workers of this process.
struct Workers;

impl Behind for Workers {
    fn plug(disk: Arc<dyn Disk>, queues: u16, ring: RingKind) -> (Board, Self) {
        (Board::with(queues, ring, |_| disk), Self)
    }
}

/// A function as a transport of the conformance suite.
pub(super) struct Plugged<B> {
    // Ends first: it uses what is behind it.
    board: Board,
    _behind: B,
    queues: u16,
    drivers: Vec<Driver>,
}

impl<B: Behind> Transport for Plugged<B> {
    fn new(disk: Arc<dyn Disk>, queues: u16, ring: RingKind) -> Self {
        let (board, behind) = B::plug(disk, queues, ring);
        Self {
            board,
            _behind: behind,
            queues,
            drivers: Vec::new(),
        }
    }

    fn offered(&mut self) -> u64 {
        let halves = [0, 1].map(|half| {
            self.board.set(0, 4, half);
            self.board.get(4, 4) << (32 * half)
        });
        (halves[0] | halves[1]) & !RING_RESET
    }

    fn start(&mut self, features: u64) -> bool {
        self.board.negotiate(features);
        if self.board.get(20, 1) != 11 {
            return false;
        }
        self.board.set(16, 2, 0);
        self.drivers = (0..self.queues).map(|index| self.board.enable(index)).collect();
        for driver in &mut self.drivers {
            driver.event_idx = features & blk::F_EVENT_IDX != 0;
        }
        self.board.set(20, 1, 15);
        self.board.get(20, 1) == 15
    }

    fn driver(&mut self, queue: usize) -> &mut Driver {
        &mut self.drivers[queue]
    }

    fn kick(&mut self, queue: usize) {
        self.board.kick(queue as u64);
    }

    fn is_interrupted(&mut self, queue: usize, patience: Duration) -> bool {
        self.board.bench.is_raised_within(queue + 1, patience)
    }

    fn is_broken(&mut self, _: usize, patience: Duration) -> bool {
        let broken = holds_within(patience, || self.board.get(20, 1) == 15 | 64);
        assert!(
            !broken || self.board.bench.was_raised(0),
            "the configuration's interrupt"
        );
        broken
    }

    fn config(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; blk::CONFIG_BYTES];
        self.board.function.read(0x2000, &mut bytes);
        bytes
    }

    fn write_config(&mut self, offset: u32, bytes: &[u8]) {
        self.board.function.write(0x2000 + u64::from(offset), bytes);
    }

    fn reset(&mut self) {
        self.board.set(20, 1, 0);
        assert_eq!(self.board.get(20, 1), 0);
    }
}

impl Grows for Plugged<Workers> {
    fn grow(&mut self, _: &MemDisk, bytes: u64) {
        assert_eq!(self.board.function.resize(bytes).expect("a resize"), bytes);
        assert!(self.board.bench.was_raised(0), "the configuration's interrupt");
    }
}

mod conformance_suite {
    use super::{Plugged, Workers, conformance};

    conformance::suite!(Plugged<Workers>);
    conformance::suite!(Plugged<Workers>:
        device::reset_restores_writeback
        device::grown_disk_is_shown_and_writable
    );
}

#[test]
fn config_space_describes_the_function() {
    let mut board = Board::new(2);
    assert_eq!(board.config_u32(0), 0x1042_1AF4);
    assert_eq!(board.config_u32(8) >> 8, 0x01_80_00);
    // The window's size is what cannot be written.
    assert_eq!(board.config_u32(0x10), WINDOW);
    board.function.write_config(0x10, &[0xFF; 4]);
    assert_eq!(board.config_u32(0x10), !(BAR_BYTES - 1));
    // No vendor has written to itself.
    board.function.write_config(0, &[0; 4]);
    assert_eq!(board.config_u32(0), 0x1042_1AF4);
    let kinds: Vec<_> = board
        .capabilities()
        .iter()
        .map(|found| (found.1, found.2))
        .collect();
    let virtio: Vec<u8> = kinds
        .iter()
        .filter(|kind| kind.0 == 9)
        .map(|kind| kind.1)
        .collect();
    assert_eq!(virtio, [1, 3, 4, 2, 5]);
    let msix = board.capability(0x11, 0);
    assert_eq!(u16::from_le_bytes(board.config(msix + 2)), 2, "three vectors");
    for (at, id, _) in board.capabilities() {
        assert!(at % 4 == 0 && (id == 9 || id == 0x11), "{at:#x}");
    }
}

#[test]
fn driver_negotiates_writes_and_is_interrupted() {
    let mut board = Board::new(2);
    board.negotiate(VERSION_1);
    let mut drivers = [board.enable(0), board.enable(1)];
    let connected = board.bench.connected.lock().clone();
    assert_eq!(connected.len(), 2);
    assert_eq!(
        connected[&2],
        MsiMessage {
            address: 0xFEE0_0000,
            data: 0x42
        }
    );
    board.set(20, 1, 15);
    for (index, driver) in drivers.iter_mut().enumerate() {
        let head = write(driver, 0x50 + index as u8);
        board.kick(index as u64);
        assert_eq!(wait_used(driver).0, u32::from(head));
        assert_eq!(driver.status(head), 0);
        assert!(board.bench.was_raised(index + 1));
        assert_eq!(board.disk.bytes(1024, 512), vec![0x50 + index as u8; 512]);
    }
    // A machine that watches nothing brings the write here.
    let head = write(&mut drivers[0], 0x77);
    board.set(0x3000, 2, 0);
    assert_eq!(wait_used(&mut drivers[0]).0, u32::from(head));
}

#[test]
fn driver_without_version_1_is_not_accepted() {
    let mut board = Board::new(1);
    board.negotiate(0);
    assert_eq!(board.get(20, 1), 3, "FEATURES_OK");
    board.set(0, 4, 1);
    assert_eq!(board.get(4, 4) & 1, 1, "VERSION_1 is offered");
    board.set(0, 4, 2);
    assert_eq!(board.get(4, 4), 0);
}

#[test]
fn queue_runs_only_while_driver_is_ready_and_not_paused() {
    let mut board = Board::new(1);
    board.negotiate(VERSION_1);
    let mut driver = board.enable(0);
    let head = write(&mut driver, 1);
    board.kick(0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(driver.take_used(), None, "not ready");
    board.set(20, 1, 15);
    assert_eq!(wait_used(&mut driver).0, u32::from(head));

    board.function.pause().expect("a flush");
    let head = write(&mut driver, 2);
    board.kick(0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(driver.take_used(), None, "paused");
    let flushed = board.disk.log().last().map(|entry| entry.0);
    assert_eq!(
        flushed,
        Some(block::Op::Flush),
        "a pause makes durable what was answered"
    );
    board.function.resume();
    assert_eq!(
        wait_used(&mut driver).0,
        u32::from(head),
        "what waited is not forgotten"
    );

    board.set(20, 1, 0);
    assert_eq!(board.get(20, 1), 0);
    write(&mut driver, 3);
    board.kick(0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(driver.take_used(), None, "reset");
    assert_eq!(board.get(28, 2), 0, "the queue is not enabled any more");
}

/// One request an hour: neither a pause with its flush nor a reset may wait until the guest has tokens again.
#[test]
fn pause_and_reset_do_not_wait_for_a_rate_limit() {
    use block::throttle::{Limiter, Rate, RateLimits, ThrottledDisk};
    let hourly = Rate {
        size: 1,
        refill: Duration::from_secs(3600),
        one_time_burst: 0,
    };
    let limiter = Limiter::new(&RateLimits {
        bandwidth: None,
        ops: Some(hourly),
    });
    let mut board = Board::with(1, RingKind::Auto, |disk| ThrottledDisk::new(disk, limiter));
    board.negotiate(VERSION_1);
    let mut driver = board.enable(0);
    board.set(20, 1, 15);
    let took_one = |board: &mut Board, driver: &mut Driver| {
        let heads = [1, 2, 3].map(|fill| write(driver, fill));
        board.kick(0);
        std::thread::sleep(Duration::from_millis(50));
        (heads, driver.take_used().is_some())
    };
    let began = Instant::now();
    let (_, one) = took_one(&mut board, &mut driver);
    assert!(one, "a bucket begins full");
    assert_eq!(driver.take_used(), None, "the others wait");
    board.function.pause().expect("a flush");
    assert!(driver.take_used().is_some() && driver.take_used().is_some());
    let flushed = board.disk.log().last().map(|entry| entry.0);
    assert_eq!(flushed, Some(block::Op::Flush));
    board.function.resume();
    let (heads, one) = took_one(&mut board, &mut driver);
    assert!(!one, "what passed is owed");
    board.set(20, 1, 0);
    for head in heads {
        assert_eq!(driver.take_used().map(|used| used.0), Some(u32::from(head)));
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn masked_interrupt_sets_its_pending_bit_and_is_kept() {
    let mut board = Board::new(1);
    board.negotiate(VERSION_1);
    let mut driver = board.enable(0);
    board.set(20, 1, 15);
    board.set(0x4000 + 16 + 12, 4, 1);
    assert!(board.bench.connected.lock().is_empty(), "masked");
    assert_eq!(board.get(0x6000, 8), 0);
    write(&mut driver, 1);
    board.kick(0);
    wait_used(&mut driver);
    let until = Instant::now() + Duration::from_secs(5);
    while board.get(0x6000, 8) != 2 {
        assert!(Instant::now() < until, "the pending bit is not set");
    }
    board.set(0x4000 + 16 + 12, 4, 0);
    assert!(board.bench.connected.lock().contains_key(&1));
    assert!(board.bench.was_raised(1), "the signal was kept");
    // The function's own mask is over them all.
    let msix = board.capability(0x11, 0);
    board.function.write_config(msix + 2, &0xC000u16.to_le_bytes());
    assert!(board.bench.connected.lock().is_empty());
}

#[test]
fn kick_watch_follows_the_bar() {
    let mut board = Board::new(1);
    assert!(board.bench.watched.lock().is_empty(), "memory accesses are off");
    board.function.write_config(4, &2u16.to_le_bytes());
    let places = |board: &Board| board.bench.watched.lock().keys().copied().collect::<Vec<_>>();
    assert_eq!(places(&board), [u64::from(WINDOW) + 0x3000]);
    board.function.write_config(0x10, &0xD000_0000u32.to_le_bytes());
    assert_eq!(places(&board), [0xD000_3000]);
    let window = board.function.window();
    assert_eq!(window.range(), Some(0xD000_0000..0xD000_8000));
    board.function.write_config(4, &0u16.to_le_bytes());
    assert!(places(&board).is_empty() && window.range().is_none());
}

/// Counts the lines of this thread that are in a log unless somebody asks for less.
#[derive(Clone, Default)]
struct Lines(Arc<AtomicU64>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// A guest that makes errors as fast as it can gets a fixed number of log lines a minute.
#[test]
fn log_of_guest_errors_is_rate_limited() {
    let most = u64::from(block::report::CLIENT_LINES_MAX);
    // Queues that cannot run, and windows at which cannot watch for kicks.
    for kicks in [false, true] {
        let mut board = Board::new(1);
        board.bench.refuses.store(kicks, Ordering::SeqCst);
        let lines = Lines::default();
        tracing::subscriber::with_default(lines.clone(), || {
            for round in 0..4 * most as u32 {
                if kicks {
                    let window = 0xD000_0000 + round % 2 * BAR_BYTES;
                    board.function.write_config(4, &2u16.to_le_bytes());
                    board.function.write_config(0x10, &window.to_le_bytes());
                } else {
                    board.negotiate(VERSION_1);
                    board.set(22, 2, 0);
                    board.set(32, 8, u64::MAX - 15);
                    board.set(28, 2, 1);
                    board.set(20, 1, 15);
                }
            }
        });
        let lines = lines.0.load(Ordering::SeqCst);
        assert!((1..=most).contains(&lines), "kicks {kicks}: {lines} lines");
    }
}

/// A CPU may have found the function just before it was unplugged.
#[test]
fn unplugged_function_registers_nothing() {
    let mut board = Board::new(1);
    board.negotiate(VERSION_1);
    board.enable(0);
    board.function.unplug().expect("workers that live");
    assert_eq!(board.function.window().range(), None);
    board.function.write_config(4, &0u16.to_le_bytes());
    board.negotiate(VERSION_1);
    board.enable(0);
    board.set(20, 1, 15);
    board.function.resume();
    assert!(board.bench.watched.lock().is_empty() && board.bench.connected.lock().is_empty());
    assert_eq!(board.function.window().range(), None);
}

#[test]
fn queue_that_cannot_run_sets_needs_reset_and_interrupts() {
    let mut board = Board::new(1);
    board.negotiate(VERSION_1);
    board.set(16, 2, 0);
    board.set(22, 2, 0);
    board.set(24, 2, 32768);
    assert_eq!(board.get(24, 2), 64, "no more entries than were offered");
    board.set(32, 8, u64::MAX - 15);
    board.set(28, 2, 1);
    board.set(20, 1, 15);
    assert_eq!(board.get(20, 1), 15 | 64);
    assert!(board.bench.was_raised(0), "the configuration's interrupt");
    assert_eq!(board.get(0x1000, 1), 2, "the reason");
    assert_eq!(board.get(0x1000, 1), 0, "reading takes it away");
    board.set(20, 1, 0);
    assert_eq!(board.get(20, 1), 0);
}

#[test]
fn access_capability_reads_and_writes_the_window() {
    let mut board = Board::new(3);
    let access = board.capability(9, 5);
    board.function.write_config(access + 8, &18u32.to_le_bytes());
    board.function.write_config(access + 12, &2u32.to_le_bytes());
    assert_eq!(u16::from_le_bytes(board.config(access + 16)), 3, "queues");
    board.function.write_config(access + 8, &22u32.to_le_bytes());
    board.function.write_config(access + 16, &2u16.to_le_bytes());
    assert_eq!(board.get(22, 2), 2, "the selected queue");
    // Nonsense reaches nothing.
    board.function.write_config(access + 12, &3u32.to_le_bytes());
    board.function.write_config(access + 16, &[0xFF; 4]);
    assert_eq!(board.get(22, 2), 2);
}

/// No write of a guest makes the function panic or changes its identity.
#[test]
fn function_survives_random_writes() {
    let mut board = Board::new(2);
    let mut random = ringdisk_gen::Random::new(11);
    for _ in 0..20_000 {
        let len = random.pick(&[1usize, 2, 4, 8]);
        let value = if random.below(2) == 0 {
            random.below(16)
        } else {
            random.draw()
        };
        let bytes = &value.to_le_bytes()[..len];
        match random.below(8) {
            0 => board
                .function
                .write_config((random.below(64) * 4) as u16, &bytes[..len.min(4)]),
            1 => {
                board.get(random.below(u64::from(BAR_BYTES) - 8), len);
            }
            2 => board
                .function
                .write(random.below(u64::from(BAR_BYTES) - 8), bytes),
            3 => board.function.write(0x4000 + random.below(80) * 4, bytes),
            _ => board.function.write(random.below(0x40), bytes),
        }
    }
    assert_eq!(board.config_u32(0), 0x1042_1AF4);
    board.function.unplug().expect("workers that live");
    assert!(board.bench.watched.lock().is_empty() && board.bench.connected.lock().is_empty());
    assert!(board.bench.interrupts.lock()[0].as_raw_fd() >= 0);
}
