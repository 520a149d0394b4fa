//! Each piece of state that a client may assume, after each way in which a device begins anew.
//!
//! |                    | RESET_DEVICE | reconnect | kill      | takeover |
//! |--------------------|--------------|-----------|-----------|----------|
//! | cache mode         | stays        | stays     | stays [^] | stays    |
//! | configuration      | stays        | stays     | stays     | stays    |
//! | features           | gone         | gone      | gone      | stay     |
//! | rings              | gone         | gone      | gone      | stay     |
//! | memory             | stays        | gone      | gone      | stays    |
//! | call, error events | stay         | gone      | gone      | stay     |
//! | channel for growth | stays        | gone      | gone      | stays    |
//! | in flight          | answered     | answered  | again     | answered |
//!
//! [^]: With inflight tracking. Otherwise writethrough, until the client reads the configuration.

use std::fs::File;
use std::io::Read;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use block::Op;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::event::duplicate;
use super::restart_tests::{copy, inflight};
use super::tests::{Client, wait};
use super::{ConfigChannel, PausedClient, StopToken, VhostUserConfig, VhostUserServer};
use crate::testing::{DATA, MemDisk};
use ringdisk_driver::blk::{FLUSH, OK, OUT};

const PROTOCOL_FEATURES: u64 = 1 << 30;
/// The offset of the cache mode in the configuration space.
const WRITEBACK: usize = 32;
const QUEUES: u16 = 2;

/// A way to begin anew.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    Reset,
    Reconnect,
    Kill,
    Takeover,
}

/// The client's idea of its guest's cache mode.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Mode {
    /// It has not read the configuration.
    Unread,
    /// It has read it, as writeback.
    Writeback,
    /// Its guest chose this.
    Writethrough,
}

/// The part of a client's state that survives an event.
struct Row {
    event: Event,
    features: bool,
    rings: bool,
    memory: bool,
    /// Also the channel.
    events: bool,
    /// Writeback is remembered, with inflight tracking and without.
    writeback: [bool; 2],
}

const MATRIX: [Row; 4] = [
    Row {
        event: Event::Reset,
        features: false,
        rings: false,
        memory: true,
        events: true,
        writeback: [true, true],
    },
    Row {
        event: Event::Reconnect,
        features: false,
        rings: false,
        memory: false,
        events: false,
        writeback: [true, true],
    },
    Row {
        event: Event::Kill,
        features: false,
        rings: false,
        memory: false,
        events: false,
        writeback: [true, false],
    },
    Row {
        event: Event::Takeover,
        features: true,
        rings: true,
        memory: true,
        events: true,
        writeback: [true, true],
    },
];

/// A server in a thread of its own that gives its client back.
struct Server {
    channel: ConfigChannel,
    stop: StopToken,
    thread: JoinHandle<Option<PausedClient>>,
}

impl Server {
    fn config(restartable: bool) -> VhostUserConfig {
        VhostUserConfig {
            num_queues: QUEUES,
            restartable,
            ..VhostUserConfig::default()
        }
    }

    fn made(disk: &MemDisk, restartable: bool) -> VhostUserServer {
        VhostUserServer::start(disk.disk(), &Self::config(restartable)).expect("a server")
    }

    fn run(server: VhostUserServer, listener: &Arc<UnixListener>, client: Option<PausedClient>) -> Self {
        let stop = StopToken::new().expect("a token");
        let (token, listener) = (stop.clone(), Arc::clone(listener));
        let channel = server.config_channel().clone();
        let thread = std::thread::spawn(move || {
            let paused = server.serve_on(&listener, &token, client);
            let paused = paused.expect("it serves");
            if paused.is_none() {
                server.close().expect("a clean close");
            }
            paused
        });
        Self {
            channel,
            stop,
            thread,
        }
    }

    fn pause(self) -> Option<PausedClient> {
        self.stop.pause(Duration::from_secs(10));
        self.thread.join().expect("no panic")
    }

    fn stop(self) {
        self.stop.stop();
        self.thread.join().expect("no panic");
    }
}

/// One client, and the server that it is connected to.
struct World {
    directory: tempfile::TempDir,
    tracked: bool,
    disk: MemDisk,
    listener: Arc<UnixListener>,
    server: Server,
    client: Client,
    inflight: Option<(VhostUserInflight, File)>,
    error: EventFd,
    /// The client's end of the channel on which it learns that the disk has grown.
    told: UnixStream,
}

fn bind(directory: &Path, name: &str) -> (PathBuf, Arc<UnixListener>) {
    let path = directory.join(name);
    let listener = UnixListener::bind(&path).expect("a socket");
    (path, Arc::new(listener))
}

impl World {
    fn new(mode: Mode, tracked: bool) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, listener) = bind(directory.path(), "first");
        let disk = MemDisk::new();
        let server = Server::run(Server::made(&disk, tracked), &listener, None);
        let mut client = Client::connect_unread(&path, QUEUES.into());
        match mode {
            Mode::Unread => {}
            Mode::Writeback => assert_eq!(client.config()[WRITEBACK], 1),
            Mode::Writethrough => {
                let flags = VhostUserConfigFlags::empty();
                let set = client.frontend.set_config(WRITEBACK as u32, flags, &[0]);
                set.expect("SET_CONFIG");
            }
        }
        let inflight = tracked.then(|| inflight(&mut client));
        let error = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        client.frontend.set_vring_err(0, &error).expect("SET_VRING_ERR");
        let (told, theirs) = UnixStream::pair().expect("sockets");
        let given = client.frontend.set_backend_request_fd(&theirs);
        given.expect("SET_BACKEND_REQ_FD");
        Self {
            told,
            directory,
            tracked,
            disk,
            listener,
            server,
            client,
            inflight,
            error,
        }
    }

    /// Begins anew while one write is in flight; the client does nothing that the event does not demand.
    fn begin_anew(mut self, event: Event) -> Self {
        for _ in 0..3 {
            assert_eq!(self.client.ask(0, FLUSH, 0, &[]), OK);
        }
        self.disk.hold();
        self.client.submit(0, OUT, 9, &[(DATA, 512, false)]);
        wait("the request", || self.disk.held() == 1);
        match event {
            Event::Reset => {
                let mut frontend = self.client.frontend.clone();
                let reset = std::thread::spawn(move || frontend.reset_device());
                self.disk.release();
                reset.join().expect("no panic").expect("RESET_DEVICE");
                self
            }
            Event::Reconnect => {
                let connection = duplicate(self.client.frontend.as_raw_fd()).expect("a duplicate");
                let connection = UnixStream::from(connection);
                connection.shutdown(Shutdown::Both).expect("a connection");
                self.disk.release();
                self
            }
            Event::Kill => self.killed(),
            Event::Takeover => self.taken_over(),
        }
    }

    /// A copy of all shared memory is what a kill leaves; another server finds it.
    fn killed(self) -> Self {
        let inflight = self
            .inflight
            .as_ref()
            .map(|(shape, file)| (*shape, copy(shape, file)));
        let client = self.client.copied();
        self.disk.release();
        self.server.stop();
        let (_, listener) = bind(self.directory.path(), "second");
        let disk = MemDisk::new();
        let server = Server::run(Server::made(&disk, self.tracked), &listener, None);
        Self {
            disk,
            listener,
            server,
            client,
            inflight,
            ..self
        }
    }

    fn taken_over(self) -> Self {
        self.disk.release();
        let paused = self.server.pause().expect("a client");
        let state = paused.state().expect("its state");
        drop(paused);
        let next = Server::made(&self.disk, self.tracked);
        let client = next.adopt(state).expect("a client");
        let server = Server::run(next, &self.listener, Some(client));
        Self { server, ..self }
    }

    fn socket(&self, event: Event) -> PathBuf {
        let name = if event == Event::Kill { "second" } else { "first" };
        self.directory.path().join(name)
    }

    /// Sets up what the event has taken away, as QEMU does, and nothing else.
    fn set_up(&mut self, row: &Row) {
        if row.rings {
            return;
        }
        if !row.memory {
            let path = self.socket(row.event);
            let inflight = self.inflight.as_ref().map(|(shape, file)| (shape, file));
            assert!(self.client.reconnect(&path, inflight));
            self.client
                .frontend
                .set_vring_err(0, &self.error)
                .expect("SET_VRING_ERR");
            return;
        }
        let features = self.client.frontend.get_features().expect("GET_FEATURES");
        let features = features & !(1 << 12) | PROTOCOL_FEATURES;
        self.client.frontend.set_features(features).expect("SET_FEATURES");
        if self.tracked {
            self.inflight = Some(inflight(&mut self.client));
        }
        for queue in 0..usize::from(QUEUES) {
            let base = self.client.drivers[queue].used_index();
            self.client.start_uncalled(queue, base);
            let enabled = self.client.frontend.set_vring_enable(queue, true);
            enabled.expect("SET_VRING_ENABLE");
        }
    }

    /// Writes, and says whether the write was made durable.
    fn write_is_forced(&mut self) -> bool {
        assert_eq!(self.client.ask(1, OUT, 7, &[(DATA, 512, false)]), OK);
        let log = self.disk.log();
        let write = log.iter().rev().find(|(_, offset, _)| *offset == 7 * 512);
        matches!(write, Some((Op::Write { fua: true }, ..)))
    }
}

fn check(row: &Row, mode: Mode, tracked: bool) {
    let case = format!("{:?}, {mode:?}, inflight tracking {tracked}", row.event);
    let mut world = World::new(mode, tracked);
    assert_eq!(world.write_is_forced(), mode != Mode::Writeback, "{case}: before");
    let config = (mode != Mode::Unread).then(|| world.client.config());
    let mut world = world.begin_anew(row.event);

    if row.event == Event::Reset {
        let set = world
            .client
            .frontend
            .set_config(WRITEBACK as u32, VhostUserConfigFlags::empty(), &[1]);
        assert!(set.is_err(), "{case}: the features are still there");
        wait("the drain", || world.client.drivers[0].used_index() == 4);
        world.client.kick(0);
        std::thread::sleep(Duration::from_millis(5));
    }
    while world.client.calls[0].read().is_ok() {}
    let told = || world.server.channel.notify().expect("room for a message");
    if row.events {
        assert!(told(), "{case}: the channel");
        world.told.read_exact(&mut [0; 12]).expect("a message");
    } else {
        wait("the end of the channel", || !told());
    }
    world.set_up(row);
    assert_eq!(world.client.answer(0).1, 1, "{case}: in flight");
    assert_eq!(world.client.ask(0, FLUSH, 0, &[]), OK, "{case}");
    assert_eq!(
        world.client.drivers[0].take_used(),
        None,
        "{case}: answered twice"
    );
    assert_eq!(world.client.drivers[0].used_index(), 5, "{case}: the ring");
    wait("the call", || world.client.calls[0].read().is_ok());

    let kept = mode == Mode::Writeback && row.writeback[usize::from(!tracked)];
    assert_eq!(world.write_is_forced(), !kept, "{case}: the guest's writes");
    if let Some(mut before) = config {
        if row.event == Event::Kill && !tracked {
            // A client that reads the mode is told the default, and has it.
            before[WRITEBACK] = 1;
        }
        assert_eq!(world.client.config(), before, "{case}: the configuration");
        assert_eq!(
            world.write_is_forced(),
            before[WRITEBACK] == 0,
            "{case}: as shown"
        );
    }

    assert!(world.error.read().is_err(), "{case}: an error");
    world.client.drivers[0].available += 5000;
    world.client.kick(0);
    wait("the error event", || world.error.read().is_ok());
    let World { server, client, .. } = world;
    drop(client);
    server.stop();
}

fn check_all(event: Event) {
    let row = MATRIX.iter().find(|row| row.event == event).expect("a row");
    assert!(
        row.events || !row.memory,
        "what comes back with a connection goes with it"
    );
    assert_eq!(row.features, row.rings);
    for mode in [Mode::Unread, Mode::Writeback, Mode::Writethrough] {
        for tracked in [false, true] {
            check(row, mode, tracked);
        }
    }
}

#[test]
fn reset_clears_only_features_and_rings() {
    check_all(Event::Reset);
}

#[test]
fn reconnect_keeps_the_cache_mode() {
    check_all(Event::Reconnect);
}

#[test]
fn new_server_finds_the_cache_mode_or_forces_durable_writes() {
    check_all(Event::Kill);
}

#[test]
fn takeover_keeps_all_state() {
    check_all(Event::Takeover);
}

/// Inflight memory that another server made ends behind its queues and has no room for the mode.
#[test]
fn inflight_memory_without_a_cache_mode_is_accepted() {
    let mut world = World::new(Mode::Writeback, true);
    let (shape, file) = world.inflight.take().expect("tracked");
    let short = VhostUserInflight::new(shape.mmap_size - 64, 0, QUEUES, shape.queue_size);
    let given = world.client.frontend.set_inflight_fd(&short, file.as_raw_fd());
    given.expect("SET_INFLIGHT_FD");
    assert!(!world.write_is_forced());
    world.inflight = Some((short, file));
    let mut world = world.begin_anew(Event::Kill);
    world.set_up(&MATRIX[2]);
    assert!(world.write_is_forced());
    let World { server, client, .. } = world;
    drop(client);
    server.stop();
}
