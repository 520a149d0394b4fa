//! The function against backends over real sockets: our own server, QEMU's storage daemon, and some that are none.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Instant;

use block::ring::RingKind;
use block::worker::WorkerConfig;
use block::{Disk, Op};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_MQ;

use super::super::tests::{Behind, Board, Plugged, RING_RESET, VERSION_1, wait_used, write};
use super::agreement::PROTOCOL_FEATURES;
use super::*;
use crate::conformance::{self, QUEUE_SIZE, SERIAL, wait};
use crate::testing::{DATA, DISK_BYTES, MemDisk, fill_backlog, guest_memory};
use crate::transport::PlugError;
use crate::vhost_user::{StopToken, VhostUserConfig, VhostUserServer};
use ringdisk_driver::{Driver, blk};

const SIZE: u64 = DISK_BYTES / 512;
const NEEDS_RESET: u64 = 64;
const READY: u64 = 15;

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    (folder, socket)
}

/// Our server in a thread of its own.
struct Server {
    stop: StopToken,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(socket: &Path, disk: &MemDisk, num_queues: u16) -> Self {
        Self::start_as(socket, disk, num_queues, false)
    }

    fn start_as(socket: &Path, disk: &MemDisk, num_queues: u16, restartable: bool) -> Self {
        Self::start_on(socket, disk.disk(), num_queues, RingKind::Auto, restartable)
    }

    fn start_on(
        socket: &Path,
        disk: Arc<dyn Disk>,
        num_queues: u16,
        ring: RingKind,
        restartable: bool,
    ) -> Self {
        std::fs::remove_file(socket).unwrap_or_default();
        let listener = UnixListener::bind(socket).expect("a socket");
        let stop = StopToken::new().expect("a token");
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
        let server = VhostUserServer::start(disk, &config).expect("a server");
        let token = stop.clone();
        let thread = std::thread::spawn(move || {
            server.serve(&listener, &token).expect("no failure");
            server.close().expect("a clean close");
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

/// A function with `queues` queues, a server behind it, and a driver that is ready.
fn ready(queues: u16) -> (tempfile::TempDir, Server, Board, Vec<Driver>) {
    let (folder, socket) = folder();
    let disk = MemDisk::new();
    let server = Server::start(&socket, &disk, queues);
    let mut board = Board::foreign(&socket, queues, disk).expect("a function");
    board.negotiate(VERSION_1 | RING_RESET);
    let drivers = (0..queues).map(|index| board.enable(index)).collect();
    board.set(20, 1, READY);
    assert_eq!(board.get(20, 1), READY);
    (folder, server, board, drivers)
}

/// Writes a sector of `fill` through queue `index`, and sees it arrive and raise its interrupt.
fn work(board: &mut Board, driver: &mut Driver, index: u64, fill: u8) {
    let head = write(driver, fill);
    board.kick(index);
    assert_eq!(wait_used(driver).0, u32::from(head));
    assert_eq!(driver.status(head), 0);
    assert!(board.bench.was_raised(index as usize + 1), "the interrupt");
    assert_eq!(board.disk.bytes(1024, 512), vec![fill; 512]);
}

/// Our server, in whose function the conformance suite looks for a disk.
struct There {
    _server: Server,
    _folder: tempfile::TempDir,
}

impl Behind for There {
    fn plug(disk: Arc<dyn Disk>, queues: u16, ring: RingKind) -> (Board, Self) {
        let (folder, socket) = folder();
        let server = Server::start_on(&socket, disk, queues, ring, false);
        let board = Board::foreign(&socket, queues, MemDisk::new()).expect("a function");
        let there = Self {
            _server: server,
            _folder: folder,
        };
        (board, there)
    }
}

mod conformance_suite {
    use super::{Plugged, There, conformance};

    conformance::suite!(Plugged<There>);
    conformance::suite!(Plugged<There>: device::reset_restores_writeback);
}

#[test]
fn function_offers_the_backends_disk_and_interrupts() {
    let (_folder, _server, mut board, mut drivers) = ready(2);
    assert_eq!(board.function.driver_name(), "vhost-user");
    assert_eq!(board.function.size_bytes(), DISK_BYTES);
    assert!(!board.function.is_read_only());
    assert_eq!(board.get(0x2000, 8), SIZE);
    assert_eq!(board.get(0x2000 + 34, 2), 2, "queues");
    assert_eq!(board.get(0x2000 + 60, 4), 0, "nothing past its end");
    board.set(0, 4, 1);
    assert_eq!(
        board.get(4, 4) << 32 & !(VERSION_1 | RING_RESET),
        0,
        "no more of the transport than it carries"
    );
    board.set(0, 4, 0);
    let offered = board.get(4, 4);
    assert_eq!(
        offered & PROTOCOL_FEATURES,
        0,
        "the protocol's own bit is no guest's"
    );
    assert_ne!(offered & 1 << VIRTIO_BLK_F_MQ, 0);
    for (index, driver) in drivers.iter_mut().enumerate() {
        work(&mut board, driver, index as u64, 0x50 + index as u8);
    }
    // A machine that watches nothing brings the write here.
    let head = write(&mut drivers[0], 0x77);
    board.set(0x3000, 2, 0);
    assert_eq!(wait_used(&mut drivers[0]).0, u32::from(head));
}

#[test]
fn function_shows_read_only_and_its_own_queue_count() {
    let (_folder, socket) = folder();
    let disk = MemDisk::with(|info| info.read_only = true);
    let _server = Server::start(&socket, &disk, 4);
    let mut board = Board::foreign(&socket, 1, disk).expect("a function");
    assert!(board.function.is_read_only());
    assert_eq!(board.get(4, 4) & 1 << VIRTIO_BLK_F_MQ, 0);
    assert_eq!(
        board.get(0x2000 + 34, 2),
        1,
        "as many as there are here, not as there are there"
    );
}

#[test]
fn interrupt_is_kept_while_masked_and_follows_its_vector() {
    let (_folder, _server, mut board, mut drivers) = ready(2);
    let driver = &mut drivers[0];
    board.set(0x4000 + 16 + 12, 4, 1);
    assert!(!board.bench.connected.lock().contains_key(&1), "masked");
    let head = write(driver, 1);
    board.kick(0);
    assert_eq!(wait_used(driver).0, u32::from(head));
    wait("the pending bit", || board.get(0x6000, 8) & 2 == 2);
    board.set(0x4000 + 16 + 12, 4, 0);
    assert!(board.bench.was_raised(1), "the signal was kept");
    // Queue 0 moves to the configuration's vector while it runs.
    board.set(22, 2, 0);
    board.set(26, 2, 0);
    let head = write(driver, 2);
    board.kick(0);
    assert_eq!(wait_used(driver).0, u32::from(head));
    assert!(board.bench.was_raised(0));
    // And to none: nobody is told, and nothing is lost.
    board.set(26, 2, 0xFFFF);
    let head = write(driver, 3);
    board.kick(0);
    assert_eq!(wait_used(driver).0, u32::from(head));
    assert_eq!(board.get(20, 1), READY);
}

#[test]
fn queues_stop_on_pause_or_reset_and_serve_again() {
    let (_folder, _server, mut board, mut drivers) = ready(2);
    for round in 0..3 {
        work(&mut board, &mut drivers[0], 0, 10 + round);
        board.function.pause().expect("a pause");
        let head = write(&mut drivers[0], 20 + round);
        board.kick(0);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(drivers[0].take_used(), None, "paused");
        board.function.resume();
        assert_eq!(
            wait_used(&mut drivers[0]).0,
            u32::from(head),
            "what waited is not forgotten"
        );
        assert!(board.bench.was_raised(1));
    }
    // One queue alone; the other goes on.
    board.set(22, 2, 0);
    board.set(58, 2, 1);
    assert_eq!(board.get(28, 2), 0);
    write(&mut drivers[0], 1);
    board.kick(0);
    work(&mut board, &mut drivers[1], 1, 2);
    assert_eq!(drivers[0].take_used(), None, "reset");
    drivers[0] = board.enable(0);
    work(&mut board, &mut drivers[0], 0, 3);
    // All of it; a new driver begins anew.
    board.set(20, 1, 0);
    board.negotiate(VERSION_1);
    for (index, driver) in (0..).zip(&mut drivers) {
        *driver = board.enable(index);
    }
    board.set(20, 1, READY);
    work(&mut board, &mut drivers[1], 1, 4);
    assert_eq!(board.get(20, 1), READY);
}

#[test]
fn cache_mode_follows_the_driver_until_reset() {
    let (_folder, socket) = folder();
    let disk = MemDisk::new();
    let _server = Server::start(&socket, &disk, 1);
    let mut board = Board::foreign(&socket, 1, disk).expect("a function");
    let place = 0x2000 + WRITEBACK_OFFSET as u64;
    board.negotiate(VERSION_1);
    board.enable(0);
    board.set(20, 1, READY);
    board.set(place, 1, 0);
    assert_eq!(board.get(place, 1), 1, "it was not agreed upon");
    board.set(20, 1, 0);
    board.negotiate(VERSION_1 | 1 << VIRTIO_BLK_F_CONFIG_WCE);
    let mut driver = board.enable(0);
    board.set(20, 1, READY);
    board.set(place, 1, 0);
    assert_eq!(board.get(place, 1), 0);
    work(&mut board, &mut driver, 0, 1);
    let last = board.disk.log().last().map(|entry| entry.0);
    assert_eq!(last, Some(Op::Write { fua: true }), "the backend knows");
    board.set(20, 1, 0);
    assert_eq!(board.get(place, 1), 1);
    assert_eq!(board.get(20, 1), 0);
}

#[test]
fn queue_outside_memory_sets_needs_reset() {
    let (_folder, socket) = folder();
    let disk = MemDisk::new();
    let _server = Server::start(&socket, &disk, 1);
    let mut board = Board::foreign(&socket, 1, disk).expect("a function");
    board.negotiate(VERSION_1);
    board.set(22, 2, 0);
    board.set(32, 8, u64::MAX - 15);
    board.set(28, 2, 1);
    board.set(20, 1, READY);
    assert_eq!(board.get(20, 1), READY | NEEDS_RESET);
    board.set(20, 1, 0);
    board.negotiate(VERSION_1);
    let mut driver = board.enable(0);
    board.set(20, 1, READY);
    work(&mut board, &mut driver, 0, 1);
}

#[test]
fn lost_backend_sets_needs_reset_until_a_reset_reconnects() {
    let (folder, server, mut board, mut drivers) = ready(2);
    board.set(16, 2, 0);
    work(&mut board, &mut drivers[0], 0, 1);
    drop(server);
    wait("the status", || board.get(20, 1) == READY | NEEDS_RESET);
    assert!(board.bench.was_raised(0), "the configuration's interrupt");
    assert_eq!(board.get(0x2000, 8), SIZE, "what is known of it stays");
    // Whatever a guest or the machine does now returns at once.
    write(&mut drivers[0], 2);
    board.kick(0);
    board.function.pause().expect("nothing to wait for");
    board.function.resume();
    board.set(20, 1, 0);
    assert_eq!(board.get(20, 1), 0);
    board.negotiate(VERSION_1);
    board.enable(0);
    board.set(20, 1, READY);
    assert_eq!(board.get(20, 1), READY | NEEDS_RESET, "there is none yet");

    let socket = folder.path().join("socket");
    let _server = Server::start(&socket, &board.disk.clone(), 2);
    board.set(20, 1, 0);
    board.negotiate(VERSION_1);
    for (index, driver) in (0..).zip(&mut drivers) {
        *driver = board.enable(index);
    }
    board.set(20, 1, READY);
    assert_eq!(board.get(20, 1), READY);
    work(&mut board, &mut drivers[1], 1, 3);
    board.function.unplug().expect("a drain");
}

/// The driver works while its server comes and goes. It notices only that answers take longer.
#[test]
fn lost_backend_is_waited_for_if_it_tracks_inflight() {
    let (_folder, socket) = folder();
    let disk = MemDisk::new();
    let mut server = Server::start_as(&socket, &disk, 2, true);
    let mut board = Board::foreign(&socket, 2, disk.clone()).expect("a function");
    board.negotiate(VERSION_1 | 1 << VIRTIO_BLK_F_CONFIG_WCE);
    board.set(16, 2, 0);
    let mut drivers: Vec<Driver> = (0..2).map(|index| board.enable(index)).collect();
    board.set(20, 1, READY);
    let place = 0x2000 + WRITEBACK_OFFSET as u64;
    board.set(place, 1, 0);
    for round in 0..12_u8 {
        for (index, driver) in drivers.iter_mut().enumerate() {
            work(&mut board, driver, index as u64, 16 * round + index as u8 + 1);
        }
        drop(server);
        // Another vector, and another cache mode, when the loss may not have been noticed yet.
        match round {
            0..4 => {}
            round if round % 2 == 0 => {
                board.set(22, 2, 1);
                board.set(26, 2, 0xFFFF);
                board.set(26, 2, 2);
            }
            _ => {
                board.set(place, 1, 1);
                board.set(place, 1, 0);
            }
        }
        assert_eq!(board.get(20, 1), READY, "round {round}");
        let heads = [0, 1].map(|index| write(&mut drivers[index], 0xA0 + round));
        board.kick(0);
        board.kick(1);
        match round {
            // A pause and its end meanwhile.
            1 => {
                board.function.pause().expect("nothing to wait for");
                board.function.resume();
            }
            // Another vector, and another cache mode.
            2 => {
                board.set(22, 2, 1);
                board.set(26, 2, 0xFFFF);
                board.set(26, 2, 2);
            }
            3 => {
                board.set(place, 1, 1);
                board.set(place, 1, 0);
            }
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(board.get(20, 1), READY, "round {round}");
        assert_eq!((drivers[0].take_used(), drivers[1].take_used()), (None, None));
        server = Server::start_as(&socket, &disk, 2, true);
        for (index, (driver, head)) in drivers.iter_mut().zip(heads).enumerate() {
            assert_eq!(wait_used(driver).0, u32::from(head), "round {round}");
            assert_eq!(driver.status(head), 0);
            assert!(board.bench.was_raised(index + 1));
        }
        assert_eq!(
            (board.get(20, 1), board.get(place, 1)),
            (READY, 0),
            "round {round}"
        );
        let last = disk.log().last().map(|entry| entry.0);
        assert_eq!(
            last,
            Some(Op::Write { fua: true }),
            "the new one knows the cache mode"
        );
    }
    // A reset while it is there.
    board.set(20, 1, 0);
    board.negotiate(VERSION_1);
    for (index, driver) in (0..).zip(&mut drivers) {
        *driver = board.enable(index);
    }
    board.set(20, 1, READY);
    for (index, driver) in drivers.iter_mut().enumerate() {
        work(&mut board, driver, index as u64, 0xB0 + index as u8);
    }
    // A reset while there is none; the driver that comes next is served when there is one.
    drop(server);
    wait("the loss", || board.function.pause().is_ok());
    board.function.resume();
    board.set(20, 1, 0);
    board.negotiate(VERSION_1);
    for (index, driver) in (0..).zip(&mut drivers) {
        *driver = board.enable(index);
    }
    board.set(20, 1, READY);
    assert_eq!(board.get(20, 1), READY);
    let head = write(&mut drivers[1], 0xBB);
    board.kick(1);
    let server = Server::start_as(&socket, &disk, 2, true);
    assert_eq!(wait_used(&mut drivers[1]).0, u32::from(head));

    // One that cannot go on where the last one was.
    drop(server);
    let _less = Server::start_as(&socket, &disk, 2, false);
    wait("the status", || board.get(20, 1) == READY | NEEDS_RESET);
    board.get(0x1000, 1);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(board.get(0x1000, 1), 0, "it is told once");
    board.set(20, 1, 0);
    board.negotiate(VERSION_1);
    for (index, driver) in (0..).zip(&mut drivers) {
        *driver = board.enable(index);
    }
    board.set(20, 1, READY);
    work(&mut board, &mut drivers[0], 0, 0xCC);
}

/// A backend that connects while the machine is paused gets the cache mode before a queue runs again.
#[test]
fn backend_reconnected_in_a_pause_gets_the_cache_mode() {
    let (_folder, socket) = folder();
    let disk = MemDisk::new();
    let server = Server::start_as(&socket, &disk, 1, true);
    let mut board = Board::foreign(&socket, 1, disk.clone()).expect("a function");
    board.negotiate(VERSION_1 | 1 << VIRTIO_BLK_F_CONFIG_WCE);
    let mut driver = board.enable(0);
    board.set(20, 1, READY);
    let place = 0x2000 + WRITEBACK_OFFSET as u64;
    board.set(place, 1, 0);
    work(&mut board, &mut driver, 0, 1);
    board.function.pause().expect("a pause");
    drop(server);
    let _server = Server::start_as(&socket, &disk, 1, true);
    // Nothing tells that they have met again; if they have not by then, they do when the machine goes on.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(board.get(place, 1), 0, "the driver's choice");
    board.function.resume();
    work(&mut board, &mut driver, 0, 2);
    let last = disk.log().last().map(|entry| entry.0);
    assert_eq!(last, Some(Op::Write { fua: true }), "it was told");
    assert_eq!((board.get(20, 1), board.get(place, 1)), (READY, 0));
}

fn refused(socket: &Path, queues: u16) -> String {
    match Board::foreign(socket, queues, MemDisk::new()) {
        Ok(_) => panic!("there is a function"),
        Err(PlugError::Backend(error)) => match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        },
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn connect_names_a_backend_that_is_missing_or_too_small() {
    let (_folder, socket) = folder();
    let place = socket.display();
    assert_eq!(
        refused(&socket, 1),
        format!(
            "cannot connect to the vhost-user backend at {place}: No such file or directory (os error 2)"
        )
    );
    let server = Server::start(&socket, &MemDisk::new(), 2);
    assert_eq!(
        refused(&socket, 3),
        format!("the vhost-user backend at {place} has 2 queues; expected at least 3")
    );
    drop(server);
    assert_eq!(
        refused(&socket, 1),
        format!("cannot connect to the vhost-user backend at {place}: Connection refused (os error 111)")
    );
    // One that hangs up in the middle.
    std::fs::remove_file(&socket).expect("the socket");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let hangs_up = std::thread::spawn(move || drop(listener.accept()));
    let line = refused(&socket, 1);
    assert!(
        line.starts_with(&format!("the vhost-user backend at {place} ")),
        "{line}"
    );
    hangs_up.join().expect("no panic");
}

const PATIENCE: Duration = Duration::from_millis(500);

/// Connects to a backend that does not let itself be used; how that ended.
fn given_up(socket: &Path, patience: Duration, cancel: &Cancel) -> BackendError {
    let began = Instant::now();
    let config = VhostUserDiskConfig {
        name: "disk".to_owned(),
        socket: socket.to_owned(),
        num_queues: 1,
        queue_size: 64,
        on_start: None,
    };
    let error = VhostUserBackend::connect_within(patience, config, cancel).expect_err("no backend");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    error
}

#[test]
fn connect_times_out_on_a_silent_backend() {
    let (_folder, socket) = folder();
    // It listens, and serves another.
    let listener = UnixListener::bind(&socket).expect("a socket");
    let place = socket.display();
    assert_eq!(
        given_up(&socket, PATIENCE, &Cancel::never()).to_string(),
        format!("the vhost-user backend at {place} has not answered GET_FEATURES within 500ms")
    );
    // Connections that were given up stay in the backlog until it is full.
    let _waiting = fill_backlog(&listener, &socket);
    assert_eq!(
        given_up(&socket, PATIENCE, &Cancel::never()).to_string(),
        format!("the vhost-user backend at {place} has not accepted a connection within 500ms")
    );
}

/// Each answer comes in time, but all of them together come too late.
#[test]
fn connect_has_one_deadline_for_a_slow_backend() {
    const ANSWERED: [u8; 3] = [1, 15, 17];
    let (_folder, socket) = folder();
    let listener = UnixListener::bind(&socket).expect("a socket");
    let backend = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a client");
        let mut header = [0; 12];
        while client.read_exact(&mut header).is_ok() {
            let mut body = vec![0; usize::from(header[8])];
            client.read_exact(&mut body).expect("a message");
            if ANSWERED.contains(&header[0]) {
                std::thread::sleep(PATIENCE * 2 / 5);
                // Version 1, a reply, of 8 bytes: every feature that is needed.
                (header[4], header[8]) = (5, 8);
                let features = PROTOCOL_FEATURES | VERSION_1 | 1 | 1 << 9;
                let answer = [&header[..], &features.to_le_bytes()].concat();
                // It has hung up by then, in the end.
                client.write_all(&answer).unwrap_or_default();
            }
        }
    });
    let error = given_up(&socket, PATIENCE, &Cancel::never());
    assert!(matches!(error, BackendError::Silent { .. }), "{error}");
    backend.join().expect("no panic");
}

#[test]
fn connect_can_be_cancelled() {
    let (_folder, socket) = folder();
    let listener = UnixListener::bind(&socket).expect("a socket");
    for full in [false, true] {
        let _waiting = full.then(|| fill_backlog(&listener, &socket));
        let began = Instant::now();
        let cancel = Cancel::when(move || began.elapsed() > Duration::from_millis(200));
        let error = given_up(&socket, Duration::from_secs(3600), &cancel);
        assert!(matches!(error, BackendError::Cancelled { .. }), "{full}: {error}");
    }
}

/// The disk of a lost backend is dropped at once, although a reconnect is under way.
#[test]
fn drop_does_not_wait_for_a_reconnect() {
    for full in [false, true] {
        let (_folder, socket) = folder();
        let disk = MemDisk::new();
        let server = Server::start_as(&socket, &disk, 1, true);
        let board = Board::foreign(&socket, 1, disk).expect("a function");
        // In the place of the first one, and not asked to accept anybody.
        std::fs::remove_file(&socket).expect("the socket");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let _waiting = full.then(|| fill_backlog(&listener, &socket));
        drop(server);
        std::thread::sleep(Duration::from_millis(500));
        let began = Instant::now();
        drop(board);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(3), "full {full}: it took {took:?}");
    }
}

#[test]
fn set_up_refuses_memory_that_cannot_be_shared() {
    let (_folder, socket) = folder();
    let _server = Server::start(&socket, &MemDisk::new(), 1);
    let config = VhostUserDiskConfig {
        name: "disk".to_owned(),
        socket,
        num_queues: 1,
        queue_size: 64,
        on_start: None,
    };
    let backend = VhostUserBackend::connect(config, &Cancel::never()).expect("a backend");
    let foreign = Foreign::new(backend, guest_memory(None)).expect("a device");
    let error = foreign.state.lock().set_up().expect_err("it has no files");
    assert!(
        error
            .to_string()
            .contains("is outside the guest memory that can be shared"),
        "{error}"
    );
}

/// `qemu-storage-daemon` with a raw disk of 1 MiB behind a socket.
struct Daemon {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Daemon {
    fn start(folder: &Path, socket: &Path) -> Self {
        let image = folder.join("disk.img");
        let file = std::fs::File::create(&image).expect("an image");
        file.set_len(DISK_BYTES).expect("its length");
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=2,addr.type=unix,addr.path={}",
            socket.display()
        );
        let mut child = Command::new("qemu-storage-daemon")
            .args([
                "--blockdev",
                &format!("driver=file,node-name=disk,filename={}", image.display()),
            ])
            .args(["--export", &export])
            .args(["--chardev", "stdio,id=monitor", "--monitor", "chardev=monitor"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-storage-daemon is needed by this test (apt-get install qemu-utils)");
        let answers = BufReader::new(child.stdout.take().expect("its output"));
        let mut daemon = Self { child, answers };
        daemon.ask(r#"{"execute": "qmp_capabilities"}"#);
        daemon
    }

    /// Tells it something, and waits until it is done.
    fn ask(&mut self, request: &str) {
        let input = self.child.stdin.as_mut().expect("its input");
        writeln!(input, "{request}").expect("a request");
        let mut line = String::new();
        while !line.contains("\"return\"") {
            assert!(!line.contains("\"error\""), "{request}: {line}");
            line.clear();
            assert_ne!(
                self.answers.read_line(&mut line).expect("an answer"),
                0,
                "it has ended"
            );
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().expect("a process");
        self.child.wait().expect("a process");
    }
}

#[test]
fn qemu_storage_daemon_serves_and_reports_growth() {
    let (folder, socket) = folder();
    let mut daemon = Daemon::start(folder.path(), &socket);
    let mut board = Board::foreign(&socket, 2, MemDisk::new()).expect("a function");
    board.negotiate(VERSION_1);
    board.set(16, 2, 0);
    let mut drivers: Vec<Driver> = (0..2).map(|index| board.enable(index)).collect();
    board.set(20, 1, READY);
    assert_eq!(board.get(0x2000, 8), SIZE);
    let on_disk = || std::fs::read(folder.path().join("disk.img")).expect("the image");
    for round in 0..4_u8 {
        for (index, driver) in drivers.iter_mut().enumerate() {
            let fill = 16 * round + index as u8 + 1;
            let head = write(driver, fill);
            board.kick(index as u64);
            assert_eq!(wait_used(driver).0, u32::from(head));
            assert_eq!(driver.status(head), 0);
            assert!(board.bench.was_raised(index + 1));
            assert_eq!(on_disk()[1024..1536], [fill; 512]);
        }
        // Between the rounds, and with something made available meanwhile.
        board.function.pause().expect("a pause");
        let heads = [0, 1].map(|index| write(&mut drivers[index], 0xEE));
        board.function.resume();
        for (driver, head) in drivers.iter_mut().zip(heads) {
            assert_eq!(wait_used(driver).0, u32::from(head));
        }
        assert!(board.bench.was_raised(1) && board.bench.was_raised(2));
    }
    let generation = board.get(21, 1);
    daemon.ask(r#"{"execute": "block_resize", "arguments": {"node-name": "disk", "size": 4194304}}"#);
    assert!(board.bench.was_raised(0), "the configuration's interrupt");
    assert_eq!(board.get(0x2000, 8), 4 * SIZE);
    assert_ne!(board.get(21, 1), generation);
    assert_eq!(board.function.size_bytes(), 4 * DISK_BYTES);
    drivers[0].write(DATA, &[0x99; 512]);
    let head = drivers[0].request(blk::OUT, 3 * SIZE, &[(DATA, 512, false)]);
    drivers[0].publish();
    board.kick(0);
    assert_eq!(wait_used(&mut drivers[0]).0, u32::from(head));
    assert_eq!(drivers[0].status(head), 0, "what is new can be written");

    drop(daemon);
    wait("the status", || board.get(20, 1) == READY | NEEDS_RESET);
}
