//! Bounds on a client's requests: excess is refused, with an answer where there is room for one.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

use super::memory::{BYTES_MAX, REGIONS_MAX};
use super::tests::{Client, World, message, send, wait};
use super::{VhostUserConfig, VhostUserServer};
use crate::blk::IN_FLIGHT_MAX;
use crate::conformance::holds_within;
use crate::testing::{BASE, MemDisk, REGION_BYTES, allow_descriptors};
use ringdisk_driver::blk::{FLUSH, OK};
use ringdisk_driver::{Driver, Rings};

/// A guest may make its queue long; requests that wait in it must cost the server nothing.
#[test]
fn long_queue_bounds_requests_in_flight() {
    const ENTRIES: u16 = 8192;
    const REQUESTS: u16 = ENTRIES / 2;
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    let mut client = world.client(1);
    client.frontend.get_vring_base(0).expect("GET_VRING_BASE");
    let second = BASE + REGION_BYTES;
    let rings = Rings {
        descriptors: second,
        available: second + 0x2_0000,
        used: second + 0x3_0000,
    };
    let memory = client.drivers[0].memory.clone();
    client.drivers[0] = Driver::new(memory, rings, ENTRIES, second + 0x5_0000);
    client.start(0, 0);
    disk.hold();
    let heads: Vec<u16> = (0..REQUESTS)
        .map(|_| client.drivers[0].request(FLUSH, 0, &[]))
        .collect();
    client.drivers[0].publish();
    client.kicks[0].write(1).expect("a kick");
    wait("the requests", || disk.held() >= IN_FLIGHT_MAX);
    std::thread::sleep(Duration::from_millis(50));
    let held = disk.held();
    disk.release();
    assert_eq!(held, IN_FLIGHT_MAX);
    // The rest follows without a further kick.
    for _ in 0..REQUESTS {
        client.answer(0);
    }
    assert!(heads.iter().all(|&head| client.drivers[0].status(head) == OK));
    assert_eq!(disk.log().len(), usize::from(REQUESTS));
}

fn sparse(bytes: u64) -> File {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(bytes).expect("its length");
    file
}

fn region(file: &File, at: u64, bytes: u64) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: at,
        memory_size: bytes,
        userspace_addr: at,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

/// Two clients at their limit: neither is refused because of the other.
#[test]
fn memory_regions_are_bounded_in_number_per_client() {
    allow_descriptors(2 * REGIONS_MAX as u64);
    let disk = MemDisk::new();
    let worlds = [World::new(disk.disk(), 1), World::new(disk.disk(), 1)];
    let mut clients: Vec<Client> = worlds.iter().map(|world| world.client(1)).collect();
    let file = sparse(4096);
    let place = |index: usize| (1 << 40) + (index as u64) * 0x1_0000;
    for client in &mut clients {
        let slots = client.frontend.get_max_mem_slots().expect("GET_MAX_MEM_SLOTS");
        assert_eq!(slots, REGIONS_MAX as u64);
        // Two are there already.
        for index in 2..REGIONS_MAX {
            let added = client.frontend.add_mem_region(&region(&file, place(index), 4096));
            added.unwrap_or_else(|error| panic!("region {index}: {error}"));
        }
        let more = region(&file, place(REGIONS_MAX), 4096);
        assert!(client.frontend.add_mem_region(&more).is_err(), "one more");
        assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
        let last = region(&file, place(REGIONS_MAX - 1), 4096);
        client.frontend.remove_mem_region(&last).expect("REM_MEM_REG");
        client.frontend.add_mem_region(&more).expect("room again");
    }
    assert_eq!(clients[0].ask(0, FLUSH, 0, &[]), OK);
}

/// The address space belongs to the process, and so to the other clients too.
#[test]
fn memory_regions_are_bounded_in_total_size() {
    let world = World::new(MemDisk::new().disk(), 1);
    let mut client = world.client(1);
    let half = sparse(BYTES_MAX / 2);
    client
        .frontend
        .add_mem_region(&region(&half, BYTES_MAX, BYTES_MAX / 2))
        .expect("half of it");
    let other = region(&half, 2 * BYTES_MAX, BYTES_MAX / 2);
    assert!(
        client.frontend.add_mem_region(&other).is_err(),
        "more than all of it"
    );
    assert!(
        client
            .frontend
            .set_mem_table(&[region(&half, 0, BYTES_MAX / 2), other])
            .is_ok()
    );
    let third = region(&half, BYTES_MAX, 4096);
    assert!(
        client
            .frontend
            .set_mem_table(&[region(&half, 0, BYTES_MAX / 2), other, third])
            .is_err()
    );
}

/// The longest wait for an answer or for the end of a connection, where one is certain to come.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// A connection on which features have been agreed upon, message by message.
struct Raw(UnixStream);

impl Raw {
    fn connect(world: &World) -> Self {
        let stream = UnixStream::connect(&world.path).expect("a connection");
        stream.set_read_timeout(Some(ANSWER_MAX)).expect("a timeout");
        let mut raw = Self(stream);
        let words = |code, word: u64| message(code, &word.to_ne_bytes());
        // Owner, features (asked for, then chosen) with PROTOCOL_FEATURES, protocol features MQ, REPLY_ACK, CONFIG and CONFIGURE_MEM_SLOTS.
        assert!(send(&raw.0, &message(3, &[]), &[]));
        assert!(raw.ask(1, &[], &[]).is_some());
        assert!(raw.ask(15, &[], &[]).is_some());
        assert!(send(&raw.0, &words(2, 1 << 30 | 1 << 32), &[]));
        assert!(send(&raw.0, &words(16, 1 | 1 << 3 | 1 << 9 | 1 << 15), &[]));
        // From here on each message is answered; the last one was already.
        assert_eq!(raw.answer(), Some(0));
        raw
    }

    /// The answer's number; `None` if the server has hung up.
    fn answer(&mut self) -> Option<u64> {
        let mut bytes = [0; 20];
        self.0.read_exact(&mut bytes).ok()?;
        let word: [u8; 8] = bytes[12..].try_into().expect("eight bytes");
        Some(u64::from_ne_bytes(word))
    }

    /// Returns true if the server has hung up.
    fn is_over(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }

    fn ask(&mut self, code: u32, body: &[u8], fds: &[RawFd]) -> Option<u64> {
        send(&self.0, &message(code, body), fds);
        self.answer()
    }
}

fn pair(first: u32, second: u32) -> Vec<u8> {
    [first.to_ne_bytes(), second.to_ne_bytes()].concat()
}

#[test]
fn vring_messages_refuse_unknown_queues_and_bad_sizes() {
    const NUM: u32 = 8;
    const BASE_OF: u32 = 10;
    const ENABLE: u32 = 18;
    let world = World::new(MemDisk::new().disk(), 2);
    let mut raw = Raw::connect(&world);
    for (code, index, value) in [
        (NUM, 2, 64),
        (NUM, 255, 64),
        (NUM, u32::MAX, 64),
        (NUM, 0, 0x1_0000),
        (NUM, 0, u32::MAX),
        (NUM, 0, 3),
        (BASE_OF, 2, 0),
        (BASE_OF, 0, 0x1_0000),
        (ENABLE, 2, 1),
        (ENABLE, u32::MAX, 1),
    ] {
        let answer = raw.ask(code, &pair(index, value), &[]);
        assert!(
            answer.is_some_and(|code| code != 0),
            "{code}: {index} {value}: {answer:?}"
        );
    }
    for index in 0..2 {
        assert_eq!(raw.ask(NUM, &pair(index, 0x8000), &[]), Some(0));
    }
    // A kick, a call and an error event for a queue that is not there.
    for code in 12..15 {
        let none = (2u64 | 0x100).to_ne_bytes();
        let answer = raw.ask(code, &none, &[]);
        assert!(answer.is_some_and(|code| code != 0), "{code}: {answer:?}");
    }
}

#[test]
fn messages_with_wrong_size_or_descriptors_are_refused() {
    const TABLE: u32 = 5;
    const NUM: u32 = 8;
    const KICK: u32 = 12;
    const ADD: u32 = 37;
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 2);
    let file = sparse(1 << 20);
    let fd = file.as_raw_fd();
    let table = |count: u32| {
        let mut body = pair(count, 0);
        for index in 0..u64::from(count) {
            for word in [index << 20, 4096, index << 20, 0] {
                body.extend(word.to_ne_bytes());
            }
        }
        body
    };
    let one = {
        let mut body = vec![0; 8];
        for word in [0u64, 4096, 0, 0] {
            body.extend(word.to_ne_bytes());
        }
        body
    };
    assert_eq!(Raw::connect(&world).ask(TABLE, &table(8), &[fd; 8]), Some(0));
    assert_eq!(Raw::connect(&world).ask(ADD, &one, &[fd]), Some(0));
    for (what, code, body, fds) in [
        ("a body of more than a page", NUM, vec![0; 4097], vec![]),
        ("a body of gigabytes", NUM, vec![], vec![]),
        (
            "more regions than descriptors can come with",
            TABLE,
            table(33),
            vec![fd; 33],
        ),
        (
            "more regions than are described",
            TABLE,
            pair(u32::MAX, 0),
            vec![fd],
        ),
        ("fewer descriptors than regions", TABLE, table(8), vec![fd; 7]),
        ("no descriptor for a region", ADD, one.clone(), vec![]),
        ("two descriptors for a region", ADD, one, vec![fd; 2]),
        (
            "descriptors that nobody asked for",
            NUM,
            pair(0, 64),
            vec![fd; 200],
        ),
        ("two events", KICK, 0u64.to_ne_bytes().to_vec(), vec![fd; 2]),
    ] {
        let mut raw = Raw::connect(&world);
        let mut bytes = message(code, &body);
        if body.is_empty() {
            bytes[8..12].copy_from_slice(&0xffff_fff0u32.to_ne_bytes());
        }
        send(&raw.0, &bytes, &fds);
        if fds.len() > 32 {
            // With more descriptors than a message may have, the message is gone: its sender would wait in vain.
            raw.0.shutdown(Shutdown::Write).expect("a connection");
        }
        // It is told, where the message has got that far.
        assert!(raw.answer() != Some(0), "{what} was accepted");
        assert!(raw.is_over(), "{what}: the connection goes on");
        drop(raw);
        assert_eq!(world.client(2).ask(1, FLUSH, 0, &[]), OK, "{what}");
    }
}

#[test]
fn pulse_waits_for_a_worker_that_hangs_and_keeps_none_alive() {
    let config = VhostUserConfig {
        num_queues: 2,
        ..VhostUserConfig::default()
    };
    let server = VhostUserServer::start(MemDisk::new().disk(), &config).expect("a server");
    let pulse = server.pulse();
    pulse.beat();
    let (free, hangs) = std::sync::mpsc::channel::<()>();
    let (begins, begun) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let worker = &server.workers[1];
        scope.spawn(move || {
            worker.run(move |_| {
                begins.send(()).unwrap_or_default();
                hangs.recv().unwrap_or_default();
            })
        });
        begun.recv().expect("it hangs");
        let beat = scope.spawn(|| pulse.beat());
        assert!(!holds_within(Duration::from_millis(100), || beat.is_finished()));
        drop(free);
        beat.join().expect("no panic");
    });
    server.close().expect("a clean close");
    pulse.beat();
}
