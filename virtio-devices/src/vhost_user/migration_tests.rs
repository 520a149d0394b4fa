//! Guests that migrate: the pages that are logged, and the image, which one server has at a time.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use block::{Disk, DiskInfo, IoError};
use parking_lot::Mutex;
use vhost::vhost_user::message::{VhostTransferStateDirection, VhostTransferStatePhase};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserDirtyLogRegion};

use super::tests::{Client, LOG_ALL, PROTOCOL_FEATURES, World, wait};
use super::{DetachedDisk, ImageOwner};
use crate::testing::{BASE, DATA, DISK_BYTES, END, MemDisk, REGION_BYTES};
use ringdisk_driver::blk::{F_MQ, FLUSH, GET_ID, IN, OK, OUT};
use ringdisk_gen::Random;

const PAGE: u64 = 4096;

/// Images on shared storage: one disk in memory, which one of some servers has.
#[derive(Debug)]
struct Shelf {
    disk: MemDisk,
    /// The number of the server that has it; 0: none.
    holder: AtomicUsize,
    /// Held by a test to make whoever opens the disk wait.
    door: Mutex<()>,
}

/// A server's side of it.
#[derive(Debug)]
struct Owner {
    shelf: Arc<Shelf>,
    number: usize,
}

impl Owner {
    fn new(shelf: &Arc<Shelf>, number: usize) -> Arc<Self> {
        Arc::new(Self {
            shelf: Arc::clone(shelf),
            number,
        })
    }
}

impl Shelf {
    /// A disk that server 1 has.
    fn new() -> Arc<Self> {
        Arc::new(Self {
            disk: MemDisk::new(),
            holder: AtomicUsize::new(1),
            door: Mutex::new(()),
        })
    }

    fn holder(&self) -> usize {
        self.holder.load(Ordering::SeqCst)
    }
}

impl ImageOwner for Owner {
    fn detach(&self) {}

    fn release(&self) {
        let released = self.shelf.holder.swap(0, Ordering::SeqCst);
        assert_eq!(released, self.number, "who releases it has it");
    }

    fn keep(&self) {
        assert_eq!(self.shelf.holder(), self.number, "who keeps it has it");
    }

    fn open(&self) -> Result<Arc<dyn Disk>, Box<dyn Error + Send + Sync>> {
        let holder = &self.shelf.holder;
        let _open = self.shelf.door.lock();
        match holder.compare_exchange(0, self.number, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Ok(self.shelf.disk.disk()),
            Err(holder) => Err(format!("server {holder} has it").into()),
        }
    }

    fn look(&self) -> Option<DiskInfo> {
        Some(self.shelf.disk.disk().info())
    }
}

/// Two servers of one image, which the first one has.
fn worlds(shelf: &Arc<Shelf>, queues: u16) -> [World; 2] {
    let absent = DetachedDisk::new(shelf.disk.disk().info());
    [
        World::sharing(shelf.disk.disk(), queues, Owner::new(shelf, 1), false),
        World::sharing(Arc::new(absent), queues, Owner::new(shelf, 2), true),
    ]
}

/// A log of all pages, as clients share one.
struct Log {
    file: File,
    bytes: u64,
}

impl Log {
    fn new(end: u64) -> Self {
        let file = tempfile::tempfile().expect("a file");
        let bytes = end.div_ceil(PAGE).div_ceil(8);
        file.set_len(bytes).expect("its length");
        Self { file, bytes }
    }

    fn region(&self) -> VhostUserDirtyLogRegion {
        VhostUserDirtyLogRegion {
            mmap_size: self.bytes,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Takes the marked pages out.
    fn take(&self) -> BTreeSet<u64> {
        let mut bits = vec![0; self.bytes as usize];
        self.file.read_exact_at(&mut bits, 0).expect("the log");
        self.file
            .write_all_at(&vec![0; bits.len()], 0)
            .expect("an empty log");
        let is_marked = |page: &u64| bits[(page / 8) as usize] & 1 << (page % 8) != 0;
        (0..8 * self.bytes).filter(is_marked).collect()
    }
}

/// Has the server log, as QEMU begins a migration.
fn begin_logging(client: &Client, offered: u64, log: &Log) {
    let frontend = &client.frontend;
    frontend
        .set_log_base(0, Some(log.region()))
        .expect("SET_LOG_BASE");
    let features = offered & !F_MQ | LOG_ALL | PROTOCOL_FEATURES;
    frontend.set_features(features).expect("SET_FEATURES");
}

fn memory_of(client: &Client) -> Vec<u8> {
    let mut bytes = vec![0; 2 * REGION_BYTES as usize];
    client.file.read_exact_at(&mut bytes, 0).expect("the memory");
    bytes
}

/// The pages in which two contents of memory differ.
fn changed(before: &[u8], after: &[u8]) -> BTreeSet<u64> {
    let pages = before.chunks(PAGE as usize).zip(after.chunks(PAGE as usize));
    let differ = pages.enumerate().filter(|(_, (before, after))| before != after);
    differ.map(|(index, _)| BASE / PAGE + index as u64).collect()
}

fn offered(world: &World) -> u64 {
    Client::greet(&world.path, 1).1
}

/// Stops every queue, as a client does whose guest continues elsewhere. Returns where each would continue.
fn stop(client: &Client) -> Vec<u16> {
    let base = |queue| client.frontend.get_vring_base(queue).expect("GET_VRING_BASE");
    let bases = 0..client.drivers.len();
    bases
        .map(|queue| base(queue).try_into().expect("a base"))
        .collect()
}

/// The same guest behind a client of another server. Its queues are to run there, and may have to wait.
fn migrate(client: &Client, bases: &[u16], to: &World) -> Client {
    let mut moved = client.copied();
    let (frontend, features) = Client::greet(&to.path, bases.len() as u64);
    frontend
        .set_features(features & !F_MQ & !LOG_ALL | PROTOCOL_FEATURES)
        .expect("SET_FEATURES");
    moved.frontend = frontend;
    moved.config();
    assert!(moved.set_up(bases));
    moved
}

#[test]
fn every_page_that_the_server_changes_is_logged_and_no_other() {
    let shelf = Shelf::new();
    let random_disk: Vec<u8> = {
        let mut random = Random::new(7);
        (0..DISK_BYTES).map(|_| random.below(256) as u8).collect()
    };
    shelf.disk.set_bytes(0, &random_disk);
    let [world, _] = worlds(&shelf, 1);
    let all = offered(&world);
    assert_ne!(all & LOG_ALL, 0);
    let mut client = world.client(1);
    let log = Log::new(END);
    begin_logging(&client, all, &log);
    log.take();
    let mut random = Random::new(1);
    let mut seen = 0;
    for round in 0..300 {
        // Pieces anywhere, across the border of the two regions too, each with pages of its own on both sides.
        let mut parts = Vec::new();
        let mut at = DATA + random.below(24) * PAGE + random.below(4096);
        if random.below(4) == 0 {
            at = BASE + REGION_BYTES - random.below(3 * PAGE);
        }
        let (kind, writable) = match random.below(6) {
            0 => (OUT, false),
            1 => (FLUSH, false),
            2 => (GET_ID, true),
            _ => (IN, true),
        };
        let sizes: Vec<u32> = match kind {
            FLUSH => vec![],
            GET_ID => vec![20],
            _ => (0..=random.below(3))
                .map(|_| 512 * (1 + random.below(16)) as u32)
                .collect(),
        };
        for size in &sizes {
            parts.push((at, *size, writable));
            at += u64::from(*size) + random.below(2 * PAGE);
        }
        // Some are past the disk's end, and fail.
        let sector = random.below(DISK_BYTES / 512 + 20);
        let head = client.drivers[0].request(kind, sector, &parts);
        // A worker that is still awake answers as soon as the request is published: what it changes and marks comes after both.
        log.take();
        let mut before = memory_of(&client);
        client.drivers[0].publish();
        let index = (client.drivers[0].rings.available_index() - BASE) as usize;
        before[index..index + 2].copy_from_slice(&memory_of(&client)[index..index + 2]);
        // What is marked when a request is taken is copied before it has ended.
        let is_held = kind == IN && random.below(4) == 0;
        if is_held {
            shelf.disk.hold();
        }
        client.kick(0);
        if is_held {
            wait("the request", || shelf.disk.held() == 1);
            log.take();
            shelf.disk.release();
        }
        wait("an answer", || client.drivers[0].used_index() == round + 1);
        // A worker that goes to sleep says so in the used ring.
        wait("the marks", || {
            log_settles(&client, &before, &log, head, &parts, &mut seen)
        });
        assert!(client.drivers[0].take_used().is_some());
    }
    assert!(seen > 300, "{seen} pages were changed");
}

/// Compares what has changed with what is logged; `false` if something is not logged yet.
fn log_settles(
    client: &Client,
    before: &[u8],
    log: &Log,
    head: u16,
    parts: &[(u64, u32, bool)],
    seen: &mut usize,
) -> bool {
    let changed = changed(before, &memory_of(client));
    let mut bits = vec![0; log.bytes as usize];
    log.file.read_exact_at(&mut bits, 0).expect("the log");
    let marked: BTreeSet<u64> = (0..8 * log.bytes)
        .filter(|page| bits[(page / 8) as usize] & 1 << (page % 8) != 0)
        .collect();
    if !changed.is_subset(&marked) {
        return false;
    }
    let pages = |address: u64, len: u64| address / PAGE..=(address + len - 1) / PAGE;
    let driver = &client.drivers[0];
    let mut may: BTreeSet<u64> = pages(driver.rings.used, 6 + 8 * u64::from(driver.size)).collect();
    may.extend(pages(driver.status_address(head), 1));
    for &(address, len, _) in parts.iter().filter(|part| part.2) {
        may.extend(pages(address, len.into()));
    }
    let others: Vec<u64> = marked.difference(&may).copied().collect();
    assert!(others.is_empty(), "{others:?} marked, {may:?} written");
    *seen += changed.len();
    true
}

#[test]
fn log_is_neither_offered_nor_taken_where_the_image_cannot_be_shared() {
    let world = World::new(MemDisk::new().disk(), 1);
    let (mut frontend, features) = Client::greet(&world.path, 1);
    assert_eq!(features & LOG_ALL, 0);
    let protocol = frontend.get_protocol_features().expect("GET_PROTOCOL_FEATURES");
    assert!(!protocol.contains(VhostUserProtocolFeatures::LOG_SHMFD));
    assert!(frontend.set_features(features | LOG_ALL).is_err());
}

#[test]
fn log_must_have_a_bit_for_all_memory_and_may_be_missing() {
    let shelf = Shelf::new();
    let [world, _] = worlds(&shelf, 1);
    let all = offered(&world);
    let mut client = world.client(1);
    // A client that accepts all that is offered, and means nothing by it.
    let features = all & !F_MQ | LOG_ALL | PROTOCOL_FEATURES;
    client.frontend.set_features(features).expect("SET_FEATURES");
    assert_eq!(client.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
    stop(&client);
    assert_eq!(shelf.holder(), 1, "it does not migrate");
    drop(client);
    // The last bit is that of the last page.
    for (end, is_well) in [(END, true), (END - 8 * PAGE, false)] {
        let client = world.client(1);
        let log = Log::new(end);
        let set = client.frontend.set_log_base(0, Some(log.region()));
        assert_eq!(set.is_ok(), is_well, "{end:#x}");
    }
    // Nothing is mapped that is not there.
    let client = world.client(1);
    let log = Log::new(END);
    let mut region = log.region();
    region.mmap_size += 1;
    assert!(client.frontend.set_log_base(0, Some(region)).is_err());
}

/// A FLUSH elsewhere would succeed, although what was written before it is lost.
#[test]
fn image_that_cannot_be_closed_goes_to_nobody() {
    let shelf = Shelf::new();
    let [first, second] = worlds(&shelf, 1);
    let all = offered(&second);
    let mut client = first.client(1);
    begin_logging(&client, all, &Log::new(END));
    assert_eq!(client.ask(0, OUT, 0, &[(DATA, 512, false)]), OK);
    shelf.disk.fail_to_close(IoError::Host { errno: libc::EIO });
    let base = client.drivers[0].used_index();
    assert!(client.frontend.get_vring_base(0).is_err(), "the client is told");
    assert_eq!(shelf.holder(), 1);
    // Neither there nor here.
    for world in [&second, &first] {
        let mut moved = migrate(&client, &[base], world);
        moved.submit(0, FLUSH, 0, &[]);
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert_eq!(moved.drivers[0].used_index(), base, "it waits");
        assert_eq!(shelf.holder(), 1);
    }
    // Whoever ends the server is told again.
    let error = first.end().expect_err("it was not closed");
    assert!(matches!(
        error,
        super::CloseError::Disk(IoError::Host { errno: libc::EIO })
    ));
}

#[test]
fn guest_migrates_back_and_forth_and_the_image_has_one_owner() {
    let shelf = Shelf::new();
    let worlds = worlds(&shelf, 2);
    let all = offered(&worlds[0]);
    let mut client = worlds[0].client(2);
    for round in 0..6_usize {
        let (from, to) = (round % 2, 1 - round % 2);
        assert_eq!(shelf.holder(), from + 1);
        client.drivers[0].write(DATA, &[round as u8 + 1; 512]);
        assert_eq!(
            client.ask(0, OUT, round as u64, &[(DATA, 512, false)]),
            OK,
            "{round}"
        );
        let log = Log::new(END);
        begin_logging(&client, all, &log);
        // The first queue that stops releases nothing.
        let mut bases = vec![client.frontend.get_vring_base(0).expect("GET_VRING_BASE")];
        assert_eq!(shelf.holder(), from + 1);
        bases.push(client.frontend.get_vring_base(1).expect("GET_VRING_BASE"));
        assert_eq!(shelf.holder(), 0, "released before the answer");
        let bases: Vec<u16> = bases.into_iter().map(|base| base as u16).collect();
        let moved = migrate(&client, &bases, &worlds[to]);
        drop(std::mem::replace(&mut client, moved));
        assert_eq!(
            client.ask(1, IN, round as u64, &[(DATA + 512, 512, true)]),
            OK,
            "{round}"
        );
        assert_eq!(
            client.drivers[1].read(DATA + 512, 512),
            [round as u8 + 1; 512],
            "{round}"
        );
        assert_eq!(shelf.holder(), to + 1);
    }
}

#[test]
fn guest_continues_at_the_source_when_its_migration_fails() {
    let shelf = Shelf::new();
    let [world, _other] = worlds(&shelf, 1);
    let all = offered(&world);
    let mut client = world.client(1);
    let log = Log::new(END);
    begin_logging(&client, all, &log);
    let bases = stop(&client);
    assert_eq!(shelf.holder(), 0);
    client.start(0, bases[0]);
    assert_eq!(client.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
    assert_eq!(shelf.holder(), 1);
    // Without a migration, a stop releases nothing.
    let features = all & !F_MQ & !LOG_ALL | PROTOCOL_FEATURES;
    client.frontend.set_features(features).expect("SET_FEATURES");
    stop(&client);
    assert_eq!(shelf.holder(), 1);
}

#[test]
fn queue_waits_for_the_image_and_its_client_is_not_kept_waiting() {
    let shelf = Shelf::new();
    let [first, second] = worlds(&shelf, 1);
    let mut early = second.client(1);
    let head = early.submit(0, IN, 0, &[(DATA, 512, true)]);
    // It is answered while its queue waits, and finds the disk as it is.
    shelf.disk.grow(2 * DISK_BYTES);
    let config = early.config();
    assert_eq!(config[..8], (DISK_BYTES / 512).to_le_bytes());
    assert_eq!(early.drivers[0].used_index(), 0);
    let all = offered(&second_of(&shelf));
    let client = first.client(1);
    begin_logging(&client, all, &Log::new(END));
    stop(&client);
    assert_eq!(early.answer(0).0, u32::from(head));
    assert_eq!(shelf.holder(), 2);
    assert_eq!(early.config()[..8], (2 * DISK_BYTES / 512).to_le_bytes());
    // A client that comes while the image is away sees it as it is now.
    drop(client);
    shelf.disk.grow(3 * DISK_BYTES);
    let mut late = first.client(1);
    assert_eq!(late.config()[..8], (3 * DISK_BYTES / 512).to_le_bytes());
}

#[test]
fn client_is_answered_while_its_image_opens_and_leaves_no_opening_behind() {
    let shelf = Shelf::new();
    let [first, second] = worlds(&shelf, 1);
    let all = offered(&first);
    let client = first.client(1);
    begin_logging(&client, all, &Log::new(END));
    let bases = stop(&client);

    let door = shelf.door.lock();
    let mut moved = migrate(&client, &bases, &second);
    begin_logging(&moved, all, &Log::new(END));
    moved.config();
    assert_eq!(shelf.holder(), 0, "it opens");
    // The guest goes back before it has begun: the image is free when its client learns of it.
    let bases = std::thread::scope(|scope| {
        let stopped = scope.spawn(|| stop(&moved));
        std::thread::sleep(Duration::from_millis(50));
        drop(door);
        stopped.join().expect("no panic")
    });
    drop(client);
    let mut back = migrate(&moved, &bases, &first);
    drop(moved);
    assert_eq!(back.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
    assert_eq!(shelf.holder(), 1);

    // A client that goes meanwhile leaves an image that is here, as if it had gone after, and is closed as such.
    begin_logging(&back, all, &Log::new(END));
    let bases = stop(&back);
    let door = shelf.door.lock();
    drop(migrate(&back, &bases, &second));
    // Its server has noticed that it is gone.
    std::thread::sleep(Duration::from_millis(50));
    drop(door);
    shelf.disk.fail_to_close(IoError::Host { errno: libc::EIO });
    assert!(second.end().is_err());
}

/// One more server, which has the image away.
fn second_of(shelf: &Arc<Shelf>) -> World {
    let absent = DetachedDisk::new(shelf.disk.disk().info());
    World::sharing(Arc::new(absent), 1, Owner::new(shelf, 3), true)
}

#[test]
fn state_carries_the_cache_mode_to_the_next_server() {
    let shelf = Shelf::new();
    let [first, second] = worlds(&shelf, 1);
    let transfer = |frontend: &Frontend, direction, end: OwnedFd| {
        let phase = VhostTransferStatePhase::STOPPED;
        frontend.set_device_state_fd(direction, phase, end)
    };
    let (save, load) = (
        VhostTransferStateDirection::SAVE,
        VhostTransferStateDirection::LOAD,
    );
    let mut client = first.client(1);
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
    client.frontend.set_config(32, flags, &[0]).expect("SET_CONFIG");
    let (_, end) = std::io::pipe().expect("a pipe");
    assert!(transfer(&client.frontend, save, end.into()).is_err(), "it runs");
    stop(&client);
    let (_full, mut end) = std::io::pipe().expect("a pipe");
    end.write_all(&[0; 65536]).expect("as much as it holds");
    assert!(
        transfer(&client.frontend, save, end.into()).is_err(),
        "it has no room"
    );
    let (mut reader, end) = std::io::pipe().expect("a pipe");
    assert!(
        transfer(&client.frontend, save, end.into())
            .expect("saved")
            .is_none()
    );
    client.frontend.check_device_state().expect("CHECK_DEVICE_STATE");
    let mut state = Vec::new();
    reader.read_to_end(&mut state).expect("the state");
    assert_eq!(state.len(), 8);
    for (state, is_well) in [
        (&b""[..], true),
        (b"12345678", false),
        (b"123", false),
        (&state, true),
    ] {
        let (frontend, _) = Client::greet(&second.path, 1);
        let (end, mut writer) = std::io::pipe().expect("a pipe");
        transfer(&frontend, load, end.into()).expect("LOAD");
        writer.write_all(state).expect("written");
        drop(writer);
        assert_eq!(frontend.check_device_state().is_ok(), is_well, "{state:?}");
    }
    let mut client = second.client(1);
    assert_eq!(client.config()[32], 0, "writethrough");
}

/// An unhandled SIGBUS would end the server of every client, and marks that go nowhere would cost the guest its data.
#[test]
fn log_that_its_client_truncates_breaks_the_queue_and_not_the_server() {
    let shelf = Shelf::new();
    let [world, _] = worlds(&shelf, 1);
    let all = offered(&world);
    let mut client = world.client(1);
    let log = Log::new(END);
    begin_logging(&client, all, &log);
    assert_eq!(client.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
    log.file.set_len(0).expect("a shorter file");
    let error = vmm_sys_util::eventfd::EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd");
    client.frontend.set_vring_err(0, &error).expect("SET_VRING_ERR");
    client.submit(0, IN, 0, &[(DATA, 512, true)]);
    client.answer(0);
    // What is lost is noticed at the next batch of answers.
    client.submit(0, IN, 0, &[(DATA, 512, true)]);
    wait("the queue to break", || error.read().is_ok());
    drop(client);
    let mut next = world.client(1);
    assert_eq!(next.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
}
