//! The server against clients over a real socket, with real workers.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block::file::{FileOptions, ImageFile};
use block::raw::RawDisk;
use block::ring::RingKind;
use block::worker::WorkerConfig;
use block::{IoError, Op};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::*;
pub(super) use crate::conformance::wait;
use crate::conformance::{self, Grows, QUEUE_SIZE, SERIAL, Transport, holds_within};
use crate::testing::{BASE, DATA, DISK_BYTES, MemDisk, REGION_BYTES, RING_FEATURES, driver, guest_memory};
use ringdisk_driver::Driver;
use ringdisk_driver::blk::{F_CONFIG_WCE, F_EVENT_IDX, F_MQ, FLUSH, IN, IOERR, OK, OUT};
use ringdisk_gen::Random;

pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VHOST_F_LOG_ALL`.
pub(super) const LOG_ALL: u64 = 1 << 26;
/// The start of the second region.
pub(super) const SECOND: u64 = BASE + REGION_BYTES;

/// A server in a thread of its own.
pub(super) struct World {
    _directory: tempfile::TempDir,
    pub(super) path: PathBuf,
    pub(super) channel: ConfigChannel,
    stop: StopToken,
    /// The result of the disk's close, if it served to the end.
    thread: Option<JoinHandle<Result<Result<(), CloseError>, ServeError>>>,
}

impl World {
    pub(super) fn new(disk: Arc<dyn Disk>, num_queues: u16) -> Self {
        Self::on(RingKind::Auto, disk, num_queues, false)
    }

    pub(super) fn restartable(disk: Arc<dyn Disk>, num_queues: u16) -> Self {
        Self::on(RingKind::Auto, disk, num_queues, true)
    }

    /// A server that gives its image to others, and has it `away` at first.
    pub(super) fn sharing(
        disk: Arc<dyn Disk>,
        num_queues: u16,
        owner: Arc<dyn ImageOwner>,
        is_away: bool,
    ) -> Self {
        Self::start(RingKind::Auto, disk, num_queues, false, Some((owner, is_away)))
    }

    fn on(ring: RingKind, disk: Arc<dyn Disk>, num_queues: u16, restartable: bool) -> Self {
        Self::start(ring, disk, num_queues, restartable, None)
    }

    fn start(
        ring: RingKind,
        disk: Arc<dyn Disk>,
        num_queues: u16,
        restartable: bool,
        image: Option<(Arc<dyn ImageOwner>, bool)>,
    ) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).expect("a socket");
        let stop = StopToken::new().expect("a token");
        let token = stop.clone();
        let worker = WorkerConfig {
            ring,
            ..WorkerConfig::default()
        };
        let config = VhostUserConfig {
            num_queues,
            queue_size: QUEUE_SIZE,
            serial: SERIAL.to_owned(),
            workers: vec![worker; num_queues.into()],
            restartable,
            ..VhostUserConfig::default()
        };
        let mut server = VhostUserServer::start(disk, &config).expect("a server");
        if let Some((owner, is_away)) = image {
            server.share_image(owner, is_away);
        }
        let channel = server.config_channel().clone();
        let thread = std::thread::spawn(move || {
            server.serve(&listener, &token)?;
            Ok(server.close())
        });
        Self {
            _directory: directory,
            path,
            channel,
            stop,
            thread: Some(thread),
        }
    }

    pub(super) fn client(&self, queues: u64) -> Client {
        Client::connect(&self.path, queues)
    }

    fn stop(self) {
        self.end().expect("a clean close");
    }

    /// Stops the server. Returns how its disk was closed.
    pub(super) fn end(mut self) -> Result<(), CloseError> {
        self.stop.stop();
        let thread = self.thread.take().expect("a thread");
        thread.join().expect("no panic").expect("no failure")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.stop();
            let result = thread.join();
            if !std::thread::panicking() {
                result
                    .expect("no panic")
                    .expect("no failure")
                    .expect("a clean close");
            }
        }
    }
}

fn memory_file() -> File {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(2 * REGION_BYTES).expect("its length");
    file
}

/// The client's address of a guest address.
fn user(memory: &GuestMemoryMmap, guest: u64) -> u64 {
    let region = memory
        .find_region(GuestAddress(guest))
        .expect("inside guest memory");
    region.as_ptr() as u64 + (guest - region.start_addr().0)
}

/// Region `index` of `memory`, backed by `file`.
fn region(memory: &GuestMemoryMmap, file: &File, index: u64) -> VhostUserMemoryRegionInfo {
    let guest = BASE + index * REGION_BYTES;
    VhostUserMemoryRegionInfo {
        guest_phys_addr: guest,
        memory_size: REGION_BYTES,
        userspace_addr: user(memory, guest),
        mmap_offset: index * REGION_BYTES,
        mmap_handle: file.as_raw_fd(),
    }
}

/// A connected client with its queues running.
pub(super) struct Client {
    pub(super) frontend: Frontend,
    pub(super) memory: GuestMemoryMmap,
    pub(super) file: File,
    pub(super) drivers: Vec<Driver>,
    pub(super) kicks: Vec<EventFd>,
    pub(super) calls: Vec<EventFd>,
}

impl Client {
    /// Connects as a client that begins anew: it reads the configuration.
    fn connect(path: &Path, queues: u64) -> Self {
        let mut client = Self::connect_unread(path, queues);
        client.config();
        client
    }

    /// Connects without a look at the configuration.
    pub(super) fn connect_unread(path: &Path, queues: u64) -> Self {
        let mut client = Self::on(Self::negotiate(path, queues), queues);
        assert!(client.set_up(&vec![0; queues as usize]), "SET_VRING_ENABLE");
        client
    }

    /// A client of memory that its server does not know yet.
    fn on(frontend: Frontend, queues: u64) -> Self {
        let file = memory_file();
        let memory = guest_memory(Some(&file));
        let event = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        Self {
            frontend,
            drivers: (0..queues)
                .map(|index| driver(memory.clone(), index, 64))
                .collect(),
            kicks: (0..queues).map(|_| event()).collect(),
            calls: (0..queues).map(|_| event()).collect(),
            memory,
            file,
        }
    }

    /// A connection on which the features have been agreed upon.
    fn negotiate(path: &Path, queues: u64) -> Frontend {
        let (frontend, features) = Self::greet(path, queues);
        frontend
            .set_features(features & !F_MQ & !LOG_ALL | PROTOCOL_FEATURES)
            .expect("SET_FEATURES");
        frontend
    }

    /// A connection on which the protocol's own features have been agreed upon, and the device's that are offered.
    pub(super) fn greet(path: &Path, queues: u64) -> (Frontend, u64) {
        let mut frontend = Frontend::connect(path, queues).expect("a connection");
        frontend.set_owner().expect("SET_OWNER");
        let features = frontend.get_features().expect("GET_FEATURES");
        let protocol = frontend.get_protocol_features().expect("GET_PROTOCOL_FEATURES");
        frontend
            .set_protocol_features(protocol)
            .expect("SET_PROTOCOL_FEATURES");
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        (frontend, features)
    }

    /// Returns true if its server has disconnected it.
    pub(super) fn is_gone(&self) -> bool {
        self.frontend.get_features().is_err()
    }

    /// Reads the configuration.
    pub(super) fn config(&mut self) -> Vec<u8> {
        let flags = VhostUserConfigFlags::WRITABLE;
        let answer = self.frontend.get_config(0, 60, flags, &[0; 60]);
        answer.expect("GET_CONFIG").1
    }

    /// Gives the memory, and starts each queue at its base. `false` if one was refused.
    pub(super) fn set_up(&mut self, bases: &[u16]) -> bool {
        let regions = [
            region(&self.memory, &self.file, 0),
            region(&self.memory, &self.file, 1),
        ];
        self.frontend.set_mem_table(&regions).expect("SET_MEM_TABLE");
        let mut enabled = true;
        for (index, base) in bases.iter().enumerate() {
            self.start(index, *base);
            enabled &= self.frontend.set_vring_enable(index, true).is_ok();
        }
        enabled
    }

    /// This client with a copy of its memory, as it is now; still connected to the same server.
    pub(super) fn copied(&self) -> Self {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; 2 * REGION_BYTES as usize];
        self.file.read_exact_at(&mut bytes, 0).expect("the memory");
        let file = memory_file();
        file.write_all_at(&bytes, 0).expect("a copy");
        let memory = guest_memory(Some(&file));
        let event = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        Self {
            frontend: self.frontend.clone(),
            drivers: self
                .drivers
                .iter()
                .map(|driver| driver.in_memory(&memory))
                .collect(),
            kicks: self.drivers.iter().map(|_| event()).collect(),
            calls: self.drivers.iter().map(|_| event()).collect(),
            memory,
            file,
        }
    }

    /// Connects to another server, with what an earlier one left in flight, as QEMU does it. `false` if the
    /// server refuses to go on with that.
    pub(super) fn reconnect(&mut self, path: &Path, inflight: Option<(&VhostUserInflight, &File)>) -> bool {
        self.frontend = Self::negotiate(path, self.drivers.len() as u64);
        if let Some((shape, file)) = inflight {
            self.frontend
                .set_inflight_fd(shape, file.as_raw_fd())
                .expect("SET_INFLIGHT_FD");
        }
        let bases: Vec<u16> = self.drivers.iter().map(Driver::used_index).collect();
        self.set_up(&bases)
    }

    /// Makes a request available of which no server is told.
    pub(super) fn frozen_submit(&mut self, queue: usize, kind: u32, sector: u64, data: &[(u64, u32, bool)]) {
        self.drivers[queue].request(kind, sector, data);
        self.drivers[queue].publish();
    }

    pub(super) fn start(&mut self, index: usize, base: u16) {
        self.start_uncalled(index, base);
        self.frontend
            .set_vring_call(index, &self.calls[index])
            .expect("SET_VRING_CALL");
    }

    /// Starts a queue and does not say whom to call.
    pub(super) fn start_uncalled(&mut self, index: usize, base: u16) {
        let driver = &self.drivers[index];
        let frontend = &self.frontend;
        frontend.set_vring_num(index, driver.size).expect("SET_VRING_NUM");
        frontend.set_vring_base(index, base).expect("SET_VRING_BASE");
        let config = VringConfigData {
            queue_max_size: driver.size,
            queue_size: driver.size,
            flags: 0,
            desc_table_addr: user(&self.memory, driver.rings.descriptors),
            used_ring_addr: user(&self.memory, driver.rings.used),
            avail_ring_addr: user(&self.memory, driver.rings.available),
            log_addr: None,
        };
        frontend.set_vring_addr(index, &config).expect("SET_VRING_ADDR");
        frontend
            .set_vring_kick(index, &self.kicks[index])
            .expect("SET_VRING_KICK");
    }

    pub(super) fn kick(&self, queue: usize) {
        self.drivers[queue].publish();
        self.kicks[queue].write(1).expect("a kick");
    }

    pub(super) fn submit(&mut self, queue: usize, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> u16 {
        let head = self.drivers[queue].request(kind, sector, data);
        self.kick(queue);
        head
    }

    pub(super) fn answer(&mut self, queue: usize) -> (u32, u32) {
        let mut answer = None;
        wait("an answer", || {
            answer = self.drivers[queue].take_used();
            answer.is_some()
        });
        answer.expect("an answer")
    }

    /// Runs one request on a queue and returns its status.
    pub(super) fn ask(&mut self, queue: usize, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> u8 {
        let head = self.submit(queue, kind, sector, data);
        assert_eq!(self.answer(queue).0, u32::from(head));
        self.drivers[queue].status(head)
    }
}

/// A client of a server, as a transport of the conformance suite.
struct Served {
    // Hangs up first.
    client: Client,
    offered: u64,
    errors: Vec<EventFd>,
    _world: World,
}

impl Transport for Served {
    fn new(disk: Arc<dyn Disk>, queues: u16, ring: RingKind) -> Self {
        let world = World::on(ring, disk, queues, false);
        let (mut frontend, offered) = Client::greet(&world.path, queues.into());
        assert_eq!(
            frontend.get_queue_num().expect("GET_QUEUE_NUM"),
            u64::from(queues)
        );
        let mut client = Client::on(frontend, queues.into());
        // As a client that begins anew: it learns the cache mode.
        client.config();
        Self {
            client,
            offered: offered & !PROTOCOL_FEATURES,
            errors: (0..queues)
                .map(|_| EventFd::new(EFD_NONBLOCK).expect("an eventfd"))
                .collect(),
            _world: world,
        }
    }

    fn offered(&mut self) -> u64 {
        self.offered
    }

    fn start(&mut self, features: u64) -> bool {
        let client = &mut self.client;
        if client
            .frontend
            .set_features(features | PROTOCOL_FEATURES)
            .is_err()
        {
            return false;
        }
        for (index, own) in client.drivers.iter_mut().enumerate() {
            *own = driver(client.memory.clone(), index as u64, QUEUE_SIZE);
            own.clear_rings();
            own.event_idx = features & F_EVENT_IDX != 0;
            let told = client.frontend.set_vring_err(index, &self.errors[index]);
            told.expect("SET_VRING_ERR");
        }
        let bases = vec![0; client.drivers.len()];
        client.set_up(&bases)
    }

    fn driver(&mut self, queue: usize) -> &mut Driver {
        &mut self.client.drivers[queue]
    }

    fn kick(&mut self, queue: usize) {
        self.client.kicks[queue].write(1).expect("a kick");
    }

    fn is_interrupted(&mut self, queue: usize, patience: Duration) -> bool {
        holds_within(patience, || self.client.calls[queue].read().is_ok())
    }

    fn is_broken(&mut self, queue: usize, patience: Duration) -> bool {
        holds_within(patience, || self.errors[queue].read().is_ok())
    }

    fn config(&mut self) -> Vec<u8> {
        self.client.config()
    }

    fn write_config(&mut self, offset: u32, bytes: &[u8]) {
        let flags = VhostUserConfigFlags::empty();
        // What a driver may not write is refused, and a client does not tell its guest.
        self.client
            .frontend
            .set_config(offset, flags, bytes)
            .unwrap_or_default();
    }

    fn reset(&mut self) {
        self.client.frontend.reset_device().expect("RESET_DEVICE");
    }
}

/// The protocol's own announcement is not offered: a client that asks finds the new size.
impl Grows for Served {
    fn grow(&mut self, disk: &MemDisk, bytes: u64) {
        disk.grow(bytes);
    }
}

mod conformance_suite {
    use super::{Served, conformance};

    conformance::suite!(Served);
    conformance::suite!(Served: device::grown_disk_is_shown_and_writable);
}

#[test]
fn vanished_client_is_drained_before_the_next_is_served() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    disk.set_bytes(0, &[3; 512]);
    for round in 0..5 {
        let mut client = world.client(1);
        disk.hold();
        for _ in 0..10 {
            client.submit(0, IN, 0, &[(DATA, 512, true)]);
        }
        wait("the requests", || disk.held() == 10);
        // The next client knocks while the disk still works for this one.
        let Client {
            frontend,
            mut drivers,
            ..
        } = client;
        drop(frontend);
        let path = world.path.clone();
        let next = std::thread::spawn(move || {
            let mut client = Client::connect(&path, 1);
            assert_eq!(client.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
            assert_eq!(client.drivers[0].read(DATA, 512), [3; 512]);
        });
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(
            drivers[0].used_index(),
            0,
            "round {round}: nothing can have been answered"
        );
        assert!(!next.is_finished(), "round {round}: one client after another");
        disk.release();
        next.join().expect("the next client is served");
        assert_eq!(
            drivers[0].used_index(),
            10,
            "round {round}: the first one's requests have ended"
        );
        assert_eq!(drivers[0].take_used().map(|(_, len)| len), Some(513));
    }
}

#[test]
fn rem_mem_reg_waits_for_requests_in_flight() {
    let disk = MemDisk::new();
    disk.set_bytes(0, &[4; 512]);
    let world = World::new(disk.disk(), 1);
    let mut client = world.client(1);
    disk.hold();
    client.submit(0, IN, 0, &[(SECOND, 512, true)]);
    wait("the request", || disk.held() == 1);

    // The removal is answered only when nothing can touch the region any more.
    let second = region(&client.memory, &client.file, 1);
    let mut frontend = client.frontend.clone();
    let removal = std::thread::spawn(move || frontend.remove_mem_region(&second));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!removal.is_finished());
    disk.release();
    removal.join().expect("no panic").expect("REM_MEM_REG");
    assert_eq!(client.drivers[0].used_index(), 1);
    client.answer(0);
    assert_eq!(client.drivers[0].read(SECOND, 512), [4; 512]);

    // Gone is gone, the rest works, and what is added again works again.
    assert_eq!(client.ask(0, IN, 0, &[(SECOND, 512, true)]), IOERR);
    assert_eq!(client.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
    let second = region(&client.memory, &client.file, 1);
    assert!(
        client.frontend.remove_mem_region(&second).is_err(),
        "it is not there"
    );
    client.frontend.add_mem_region(&second).expect("ADD_MEM_REG");
    assert!(client.frontend.add_mem_region(&second).is_err(), "it is there");
    assert_eq!(client.ask(0, IN, 0, &[(SECOND, 512, true)]), OK);
}

#[test]
fn set_mem_table_applies_only_to_new_requests() {
    let disk = MemDisk::new();
    disk.set_bytes(0, &[6; 512]);
    let world = World::new(disk.disk(), 2);
    let mut client = world.client(2);
    for round in 0..10u64 {
        disk.hold();
        client.submit(0, IN, 0, &[(SECOND, 512, true)]);
        wait("the request", || disk.held() == 1);
        let old_second = client.memory.clone();
        // The second region moves to another file; the first, with the rings, stays.
        let other = memory_file();
        let other_memory = guest_memory(Some(&other));
        let regions = [
            region(&client.memory, &client.file, 0),
            region(&other_memory, &other, 1),
        ];
        let frontend = client.frontend.clone();
        let table = std::thread::spawn(move || frontend.set_mem_table(&regions).map(|_| ()));
        std::thread::sleep(Duration::from_millis(5));
        disk.release();
        table.join().expect("no panic").expect("SET_MEM_TABLE");
        client.answer(0);
        assert_eq!(
            client.ask(1, IN, 0, &[(SECOND + 4096, 512, true)]),
            OK,
            "round {round}"
        );
        assert_eq!(
            client.ask(0, IN, 0, &[(SECOND + 4096, 512, true)]),
            OK,
            "round {round}"
        );
        let mut bytes = [0; 512];
        let read = |file: &File, offset, bytes: &mut [u8]| {
            std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset).expect("the file")
        };
        read(&other, REGION_BYTES + 4096, &mut bytes);
        assert_eq!(bytes, [6; 512], "round {round}: in the new file");
        read(&other, REGION_BYTES, &mut bytes);
        assert_eq!(
            bytes, [0; 512],
            "round {round}: the old request went to the old file"
        );
        read(&client.file, REGION_BYTES, &mut bytes);
        assert_eq!(bytes, [6; 512], "round {round}");
        drop(old_second);
    }
}

#[test]
fn get_vring_base_drains_and_returns_where_to_continue() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 2);
    let mut client = world.client(2);
    for _ in 0..3 {
        assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
    }
    disk.hold();
    client.submit(0, FLUSH, 0, &[]);
    wait("the request", || disk.held() == 1);
    let frontend = client.frontend.clone();
    let base = std::thread::spawn(move || frontend.get_vring_base(0));
    std::thread::sleep(Duration::from_millis(10));
    assert!(!base.is_finished(), "it waits for the request");
    disk.release();
    assert_eq!(base.join().expect("no panic").expect("GET_VRING_BASE"), 4);
    assert_eq!(client.drivers[0].used_index(), 4);
    client.answer(0);

    // Stopped: nothing is taken, whatever is kicked; the other queue runs on.
    client.submit(0, FLUSH, 0, &[]);
    assert_eq!(client.ask(1, FLUSH, 0, &[]), OK);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(client.drivers[0].used_index(), 4);
    client.start(0, 4);
    client.answer(0);
    assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
}

#[test]
fn disabled_queue_rests_until_enabled() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    let mut client = world.client(1);
    client
        .frontend
        .set_vring_enable(0, false)
        .expect("SET_VRING_ENABLE");
    client.submit(0, FLUSH, 0, &[]);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(disk.log(), []);
    client
        .frontend
        .set_vring_enable(0, true)
        .expect("SET_VRING_ENABLE");
    client.answer(0);
}

#[test]
fn writethrough_flushes_and_makes_writes_durable() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    let mut client = world.client(1);
    let data = [(DATA, 512, false)];
    assert_eq!(client.ask(0, OUT, 0, &data), OK);
    let flags = VhostUserConfigFlags::empty();
    client.frontend.set_config(32, flags, &[0]).expect("SET_CONFIG");
    assert_eq!(client.ask(0, OUT, 0, &data), OK);
    assert!(
        client.frontend.set_config(0, flags, &[0; 8]).is_err(),
        "read-only"
    );
    let write = |fua| (Op::Write { fua }, 0, 512);
    assert_eq!(disk.log(), [write(false), (Op::Flush, 0, 0), write(true)]);
    disk.fail(Some(IoError::Host { errno: libc::EIO }));
    client.frontend.set_config(32, flags, &[1]).expect("SET_CONFIG");
    assert!(
        client.frontend.set_config(32, flags, &[0]).is_err(),
        "the flush failed"
    );
    disk.fail(None);
    // The next client may be the same, and its guest in writethrough.
    drop(client);
    let mut client = world.client(1);
    assert_eq!(client.config()[32], 0);
    assert_eq!(client.ask(0, OUT, 0, &data), OK);
    assert_eq!(disk.log().last(), Some(&write(true)));
}

#[test]
fn broken_queue_signals_its_client_and_others_run_on() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 2);
    let mut client = world.client(2);
    let error = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
    client.frontend.set_vring_err(0, &error).expect("SET_VRING_ERR");
    client.drivers[0].available = 5000;
    client.kick(0);
    wait("the error", || error.read().is_ok());
    assert_eq!(client.ask(1, FLUSH, 0, &[]), OK);
    // Nothing but a new start helps: neither enabling it again nor new memory.
    client
        .frontend
        .set_vring_enable(0, true)
        .expect("SET_VRING_ENABLE");
    let regions = [
        region(&client.memory, &client.file, 0),
        region(&client.memory, &client.file, 1),
    ];
    client.frontend.set_mem_table(&regions).expect("SET_MEM_TABLE");
    assert_eq!(client.ask(1, FLUSH, 0, &[]), OK);
    assert!(error.read().is_err());
    client.drivers[0].available = 0;
    client.drivers[0].publish();
    client.start(0, 0);
    assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
}

#[test]
fn invalid_messages_are_refused_on_a_live_connection() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    let mut client = world.client(1);
    let frontend = &client.frontend;
    assert!(frontend.set_vring_num(0, 3).is_err(), "not a power of two");
    frontend.set_vring_num(0, 64).expect("SET_VRING_NUM");
    assert!(frontend.set_features(1 << 60 | PROTOCOL_FEATURES).is_err());
    let mut addresses = VringConfigData {
        queue_max_size: 64,
        queue_size: 64,
        flags: 0,
        desc_table_addr: 0x1000,
        used_ring_addr: 0x2000,
        avail_ring_addr: 0x3000,
        log_addr: None,
    };
    assert!(
        frontend.set_vring_addr(0, &addresses).is_err(),
        "not the client's memory"
    );
    // The descriptor table would end behind its region.
    addresses.desc_table_addr = user(&client.memory, SECOND + REGION_BYTES - 16);
    addresses.used_ring_addr = user(&client.memory, BASE);
    addresses.avail_ring_addr = user(&client.memory, BASE);
    frontend
        .set_vring_addr(0, &addresses)
        .expect("the queue is not started any more");
    assert!(frontend.set_vring_kick(0, &client.kicks[0]).is_err());
    client.start(0, 0);
    // A region beyond its file's end; one that wraps around; one over another.
    let mut bad = region(&client.memory, &client.file, 1);
    bad.guest_phys_addr = 1 << 40;
    bad.mmap_offset = 2 * REGION_BYTES - 4096;
    assert!(client.frontend.add_mem_region(&bad).is_err());
    bad.mmap_offset = 0;
    bad.guest_phys_addr = u64::MAX - 4095;
    assert!(client.frontend.add_mem_region(&bad).is_err());
    bad.guest_phys_addr = BASE + 4096;
    assert!(client.frontend.add_mem_region(&bad).is_err());
    assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
}

#[test]
fn stop_drains_requests_and_disconnects() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    let mut client = world.client(1);
    disk.hold();
    client.submit(0, FLUSH, 0, &[]);
    wait("the request", || disk.held() == 1);
    world.stop.stop();
    std::thread::sleep(Duration::from_millis(10));
    assert!(!world.thread.as_ref().expect("a thread").is_finished());
    disk.release();
    world.stop();
    assert_eq!(client.drivers[0].used_index(), 1);
    assert!(client.is_gone(), "disconnected");
}

#[test]
fn stop_does_not_wait_for_idle_or_silent_clients() {
    World::new(MemDisk::new().disk(), 3).stop();
    let world = World::new(MemDisk::new().disk(), 1);
    // A client that connects and says nothing, or half a message, does not hold the server up.
    let silent = UnixStream::connect(&world.path).expect("a connection");
    (&silent).write_all(&[1, 0, 0]).expect("half a header");
    std::thread::sleep(Duration::from_millis(10));
    world.stop();
    let mut rest = Vec::new();
    (&silent).read_to_end(&mut rest).unwrap_or_default();
    assert!(rest.is_empty());
}

/// A message as bytes: code, flags (version 1, and whether an answer is wanted), size, body.
pub(super) fn message(code: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = code.to_ne_bytes().to_vec();
    bytes.extend(0x9u32.to_ne_bytes());
    bytes.extend((body.len() as u32).to_ne_bytes());
    bytes.extend(body);
    bytes
}

/// Sends what may be the last message: the server may have hung up.
pub(super) fn send(stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> bool {
    let (header, body) = bytes.split_at(bytes.len().min(12));
    stream.send_with_fds(&[header], fds).is_ok() && (&*stream).write_all(body).is_ok()
}

#[test]
fn garbage_messages_cost_at_most_their_connection() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 2);
    for seed in 1..=150 {
        let mut random = Random::new(seed * 7919);
        let stream = UnixStream::connect(&world.path).expect("a connection");
        stream
            .set_nonblocking(true)
            .expect("a socket that does not block");
        let file = memory_file();
        // Begin as a client should, so that the rest gets somewhere.
        send(&stream, &message(3, &[]), &[]);
        send(&stream, &message(1, &[]), &[]);
        send(
            &stream,
            &message(2, &(RING_FEATURES | PROTOCOL_FEATURES).to_ne_bytes()),
            &[],
        );
        send(
            &stream,
            &message(16, &(1u64 << 0 | 1 << 3 | 1 << 9 | 1 << 15).to_ne_bytes()),
            &[],
        );
        for _ in 0..30 {
            let code = random.below(46) as u32;
            let body: Vec<u8> = match random.below(4) {
                0 => Vec::new(),
                1 => (0..random.below(300)).map(|_| random.draw() as u8).collect(),
                _ => {
                    let words = random.pick(&[1, 1, 2, 2, 5, 5, 9]);
                    let word =
                        |random: &mut Random| random.pick(&[0, 1, 2, 64, 0x100, 0x1000, BASE, u64::MAX]);
                    (0..words).flat_map(|_| word(&mut random).to_ne_bytes()).collect()
                }
            };
            let mut bytes = message(code, &body);
            if random.below(16) == 0 {
                let at = random.below(12) as usize;
                bytes[at] = random.draw() as u8;
            }
            let fds = vec![file.as_raw_fd(); random.pick(&[0, 0, 0, 1, 2])];
            if !send(&stream, &bytes, &fds) {
                break;
            }
        }
    }
    let mut client = world.client(2);
    assert_eq!(client.ask(1, FLUSH, 0, &[]), OK);
}

#[test]
fn client_without_kicks_and_replies_is_polled() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    let stream = UnixStream::connect(&world.path).expect("a connection");
    let file = memory_file();
    let memory = guest_memory(Some(&file));
    let mut driver = driver(memory.clone(), 0, 64);
    // Without PROTOCOL_FEATURES queues are enabled from the start.
    send(&stream, &message(3, &[]), &[]);
    send(
        &stream,
        &message(2, &(RING_FEATURES | F_CONFIG_WCE).to_ne_bytes()),
        &[],
    );
    let mut body = [1u32.to_ne_bytes(), [0; 4]].concat();
    for word in [BASE, REGION_BYTES, user(&memory, BASE), 0] {
        body.extend(word.to_ne_bytes());
    }
    send(&stream, &message(5, &body), &[file.as_raw_fd()]);
    send(
        &stream,
        &message(8, &[0u32, 64].map(u32::to_ne_bytes).concat()),
        &[],
    );
    let mut body = [0u32, 0].map(u32::to_ne_bytes).concat();
    for address in [
        driver.rings.descriptors,
        driver.rings.used,
        driver.rings.available,
    ] {
        body.extend(user(&memory, address).to_ne_bytes());
    }
    body.extend([0; 8]);
    send(&stream, &message(9, &body), &[]);
    // Neither a kick descriptor nor one to call.
    send(&stream, &message(12, &0x100u64.to_ne_bytes()), &[]);
    send(&stream, &message(13, &0x100u64.to_ne_bytes()), &[]);
    for _ in 0..3 {
        let head = driver.request(FLUSH, 0, &[]);
        driver.publish();
        wait("an answer without a kick", || driver.take_used().is_some());
        assert_eq!(driver.status(head), OK);
    }
}

#[test]
fn start_error_names_the_cause() {
    let start = |change: fn(&mut VhostUserConfig)| {
        let mut config = VhostUserConfig::default();
        change(&mut config);
        let error = VhostUserServer::start(MemDisk::new().disk(), &config).map(|_| ());
        error.expect_err("refused").to_string()
    };
    assert_eq!(
        start(|config| config.num_queues = 0),
        "the number of queues is 0; expected 1 to 256"
    );
    assert_eq!(
        start(|config| config.serial = "x".repeat(21)),
        format!("serial `{}` has 21 bytes; at most 20 fit", "x".repeat(21))
    );
    assert_eq!(
        start(|config| {
            let cpus = vec![1000];
            config.workers = vec![WorkerConfig {
                cpus,
                ..WorkerConfig::default()
            }];
        }),
        "cannot start the worker of queue 0"
    );
}

/// A disk whose host never has space, and that waits for it.
#[derive(Debug)]
struct Full(Arc<RawDisk>);

impl Full {
    fn disk() -> Arc<dyn Disk> {
        let file = File::options().read(true).write(true).open("/dev/full");
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let image = ImageFile::from_fd("full".as_ref(), file.expect("/dev/full"), options);
        image.wait_for_space();
        Arc::new(Self(RawDisk::new(image, DISK_BYTES, true)))
    }
}

impl Disk for Full {
    fn info(&self) -> block::DiskInfo {
        self.0.info()
    }

    fn open_queue(
        self: Arc<Self>,
        cx: &block::Context,
    ) -> std::result::Result<Box<dyn block::DiskQueue>, block::OpenQueueError> {
        Arc::clone(&self.0).open_queue(cx)
    }

    // The device cannot be synced, and nothing was written.
    fn close(
        self: Arc<Self>,
        _cx: &block::Context,
    ) -> block::LocalBoxFuture<'static, std::result::Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn hold_off(&self) -> Option<block::delay::HoldOff> {
        self.0.hold_off()
    }
}

#[test]
fn get_vring_base_ends_waits_for_space() {
    for ring in [RingKind::IoUring, RingKind::Syscalls] {
        let world = World::on(ring, Full::disk(), 2, false);
        let mut client = world.client(2);
        let held: Vec<u16> = (0..2)
            .map(|queue| client.submit(queue, OUT, 8, &[(DATA, 4096, false)]))
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        for queue in 0..2 {
            assert_eq!(
                client.ask(queue, IN, 8, &[(DATA, 4096, true)]),
                OK,
                "a read waits"
            );
            assert_eq!(client.drivers[queue].take_used(), None, "the write did not wait");
        }
        // Stopping one queue ends the waits of both, as one may wait for the other; the other goes on.
        let begin = Instant::now();
        assert_eq!(client.frontend.get_vring_base(0).expect("GET_VRING_BASE"), 2);
        assert!(begin.elapsed() < Duration::from_secs(20));
        for (queue, head) in held.into_iter().enumerate() {
            assert_eq!(client.answer(queue).0, u32::from(head));
            assert_eq!(client.drivers[queue].status(head), IOERR);
        }
        client.submit(1, OUT, 8, &[(DATA, 4096, false)]);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(client.drivers[1].take_used(), None, "it did not wait again");
        let begin = Instant::now();
        world.stop();
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "the stop waits for space"
        );
        assert!(client.drivers[1].take_used().is_some());
    }
}
