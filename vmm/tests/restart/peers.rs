//! Peers that mean ill harm the disk that they are connected to, and nothing else: another disk of the same server
//! goes on under load meanwhile, and the server stops cleanly whatever they do.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::client::{Ask, BLOCK, Client};
use crate::server::{Server, World};
use ringdisk_gen::Random;
use ringdisk_gen::patience::{SetOnDrop, wait_until};

const BLOCKS: usize = 1024;
/// The most lines of the log that may mention one disk's peers in a minute, whatever they do.
const LINES_MAX: usize = 60;

/// A header: the code, version 1, the size of the body.
fn header(code: u32, size: u32) -> Vec<u8> {
    [code, 1, size]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect()
}

fn moment() {
    std::thread::sleep(Duration::from_millis(20));
}

fn connect(path: &Path) -> UnixStream {
    UnixStream::connect(path).expect("a connection")
}

/// Sends without minding whether anybody listens any more.
fn say(mut stream: &UnixStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap_or_default();
}

/// Asks for the features, and waits for the answer.
fn ask(mut peer: &UnixStream) {
    say(peer, &header(1, 0));
    peer.set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a timeout");
    peer.read_exact(&mut [0; 20]).expect("it is served");
}

fn silence(path: &Path) {
    let _peer = connect(path);
    moment();
}

fn half_a_message(path: &Path) {
    for bytes in [
        &header(5, 8)[..5],
        &header(5, 8)[..],
        &[header(8, 8), vec![0; 3]].concat(),
    ] {
        let peer = connect(path);
        say(&peer, bytes);
        moment();
    }
}

fn garbage(path: &Path) {
    let mut random = Random::new(0x6a5b);
    for _ in 0..50 {
        let bytes: Vec<u8> = (0..4096).map(|_| random.below(256) as u8).collect();
        say(&connect(path), &bytes);
    }
}

fn connections(path: &Path) {
    for _ in 0..200 {
        drop(connect(path));
    }
    let waiting: Vec<UnixStream> = (0..10).map(|_| connect(path)).collect();
    moment();
    drop(waiting);
}

fn descriptors(path: &Path) {
    let file = tempfile::tempfile().expect("a file");
    for code in [1, 5, 8, 12, 37] {
        let peer = connect(path);
        let fds = vec![file.as_raw_fd(); 253];
        // The server may be gone by the second.
        peer.send_with_fds(&[&header(code, 0)[..]], &fds).ok();
        peer.send_with_fds(&[&header(code, 0)[..]], &fds).ok();
    }
}

/// Asks and asks, and reads no answer, until the server cannot answer any more.
fn deaf(path: &Path) -> UnixStream {
    let peer = connect(path);
    peer.set_nonblocking(true).expect("a socket that does not block");
    let questions = header(1, 0).repeat(100);
    let full = Instant::now() + Duration::from_millis(300);
    while Instant::now() < full {
        match (&peer).write(&questions) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => moment(),
            other => drop(other.expect("the server listens")),
        }
    }
    peer
}

/// Adds small regions of memory until that is refused; how many were added. It stays connected.
fn fill_memory(path: &Path, max: usize) -> (Frontend, usize) {
    let mut frontend = Frontend::connect(path, 1).expect("a connection");
    frontend.set_owner().expect("SET_OWNER");
    let features = frontend.get_features().expect("GET_FEATURES");
    frontend.set_features(features | 1 << 30).expect("SET_FEATURES");
    let protocol = frontend.get_protocol_features().expect("GET_PROTOCOL_FEATURES");
    frontend
        .set_protocol_features(protocol)
        .expect("SET_PROTOCOL_FEATURES");
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let file = tempfile::tempfile().expect("a file");
    file.set_len(4096).expect("its length");
    let mut count = 0;
    while count < max {
        let at = count as u64 * 0x1_0000;
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: at,
            memory_size: 4096,
            userspace_addr: at,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        if frontend.add_mem_region(&region).is_err() {
            break;
        }
        count += 1;
    }
    (frontend, count)
}

fn regions(path: &Path) {
    let (_frontend, count) = fill_memory(path, 600);
    assert_eq!(count, 509);
}

/// A line of `/proc/PID/status`, in KiB.
fn status(server: &Server, key: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).expect("a process");
    let line = text.lines().find(|line| line.starts_with(key)).expect("the line");
    let number = line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    number.expect("a number")
}

fn descriptors_of(server: &Server) -> usize {
    let folder = format!("/proc/{}/fd", server.pid());
    std::fs::read_dir(folder).expect("a process").count()
}

/// Clock ticks (10 ms) that it has run.
fn ticks(server: &Server) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", server.pid())).expect("a process");
    let behind = text.rsplit(')').next().expect("the name ends");
    let fields: Vec<&str> = behind.split_whitespace().collect();
    [11, 12]
        .iter()
        .map(|&at| fields[at].parse::<u64>().expect("a number"))
        .sum()
}

/// Keeps a disk busy until so many requests have been answered in all.
fn work_on(client: &mut Client, random: &mut Random, answered: u64) {
    wait_until("answers: does the disk stand still?", || {
        client.work(random, Duration::from_millis(20));
        client.answered > answered
    });
}

fn work_a_little(path: &Path) {
    let mut client = Client::new(16, false);
    client.connect(path);
    for _ in 0..20 {
        assert!(client.submit(Ask::Flush, 0));
    }
    client.drain();
}

#[test]
fn hostile_peers_harm_only_their_own_disk() {
    type Attack = fn(&Path);
    const ATTACKS: [(&str, Attack); 7] = [
        ("regions", regions),
        ("silence", silence),
        ("half a message", half_a_message),
        ("garbage", garbage),
        ("connections", connections),
        ("descriptors", descriptors),
        ("questions without end", |path| drop(deaf(path))),
    ];
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    world.qemu_img(&["create", "-q", "-f", "qcow2", "other.qcow2", "1M"]);
    let begun = Instant::now();
    let mut server = world.serve(&["--socket", "other", "--disk", "path=other.qcow2,poll_us=0"]);
    let mut client = Client::new(BLOCKS, false);
    let mut random = Random::new(0x9ee2);
    client.connect(&world.path("socket"));
    client.work(&mut random, Duration::from_millis(50));
    client.drain();
    let other = world.path("other");
    work_a_little(&other);
    wait_until("the first peer to go", || world.log().is_empty());
    moment();
    let (open, resident) = (descriptors_of(&server), status(&server, "VmRSS:"));
    // What is refused is told while the log has room for it: what follows uses that up.
    let said: [(Attack, &[&str]); 2] = [
        (
            regions,
            &["refused a message of the client", "more than 509 regions"],
        ),
        (half_a_message, &["disconnecting the client"]),
    ];
    for (attack, lines) in said {
        attack(&other);
        for line in lines {
            wait_until(line, || world.log().contains(line));
        }
    }
    for (name, attack) in ATTACKS {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let peer = scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    attack(&other);
                }
            });
            let attacked = SetOnDrop(&over);
            let before = client.answered;
            client.work(&mut random, Duration::from_millis(400));
            work_on(&mut client, &mut random, before + 100);
            client.drain();
            drop(attacked);
            peer.join().expect("the peer");
        });
        assert!(server.is_running(), "{name}: {}", world.log());
        work_a_little(&other);
        wait_until(name, || descriptors_of(&server) <= open);
    }
    let grown = status(&server, "VmRSS:").saturating_sub(resident);
    assert!(grown < 64 << 10, "{grown} KiB more than before");
    let lines = world.log().lines().count();
    let minutes = begun.elapsed().as_secs() as usize / 60 + 1;
    assert!(lines <= LINES_MAX * minutes, "{lines} lines in {minutes} minutes");

    // Neither a client that says nothing nor one that does not listen holds a stop up.
    let deaf = deaf(&other);
    let begun = Instant::now();
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    drop(deaf);
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}

/// One client holds every descriptor of the server. Other disks go on; a new client waits at no cost for room.
#[test]
fn server_out_of_descriptors_serves_on_without_spinning() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    for name in ["hog.qcow2", "late.qcow2"] {
        world.qemu_img(&["create", "-q", "-f", "qcow2", name, "1M"]);
    }
    let more = [
        ["--socket", "hog", "--disk", "path=hog.qcow2,poll_us=0"],
        ["--socket", "late", "--disk", "path=late.qcow2,poll_us=0"],
    ]
    .concat();
    let server = world.serve_in(
        &[
            "sh",
            "-c",
            "ulimit -n 120; exec env --default-signal \"$0\" \"$@\"",
        ],
        &more,
    );
    let mut client = Client::new(BLOCKS, false);
    let mut random = Random::new(0xf11e);
    client.connect(&world.path("socket"));
    client.work(&mut random, Duration::from_millis(20));
    client.drain();
    assert!(
        world.log().contains("the file descriptor limit is low"),
        "{}",
        world.log()
    );
    let open = descriptors_of(&server);
    let (hog, late) = (world.path("hog"), world.path("late"));
    work_a_little(&hog);
    work_a_little(&late);
    wait_until("the first clients to go", || descriptors_of(&server) == open);
    // What it gets before it asks for too much and loses all; then just that.
    let (frontend, count) = fill_memory(&hog, 600);
    assert!((10..500).contains(&count), "{count}");
    drop(frontend);
    wait_until("the descriptors", || descriptors_of(&server) == open);
    let (frontend, again) = fill_memory(&hog, count);
    assert_eq!(again, count);

    let newcomer = connect(&late);
    wait_until("the warning", || {
        world.log().contains("cannot accept a connection now")
    });
    let before = ticks(&server);
    std::thread::sleep(Duration::from_millis(1500));
    let spent = ticks(&server) - before;
    assert!(spent < 30, "{spent} ticks of CPU for waiting");
    let answered = client.answered;
    work_on(&mut client, &mut random, answered + 100);
    client.drain();
    let warnings = world.log().matches("cannot accept a connection now").count();
    assert_eq!(warnings, 1, "{}", world.log());

    drop(frontend);
    ask(&newcomer);
    drop(newcomer);
    work_a_little(&late);
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    world.assert_sound(false);
}

/// Neither the client nor the user behind it can know why nothing happens.
#[test]
fn waiting_second_client_is_logged_once() {
    let world = World::new("cluster_size=65536", 64 * BLOCK);
    let server = world.serve(&[]);
    let mut first = Client::new(64, false);
    first.connect(&world.path("socket"));
    let mut random = Random::new(3);
    first.work(&mut random, Duration::from_millis(5));
    assert!(!world.log().contains("another client"), "{}", world.log());
    let second = connect(&world.path("socket"));
    wait_until("a line in the log", || {
        first.work(&mut random, Duration::from_millis(5));
        world.log().contains("another client has connected and waits")
    });
    let ours = format!("connected_process={}", std::process::id());
    assert!(world.log().contains(&ours), "{}", world.log());
    // Once, however long it waits.
    first.work(&mut random, Duration::from_millis(100));
    first.drain();
    assert_eq!(
        world.log().matches("another client").count(),
        1,
        "{}",
        world.log()
    );
    drop(second);
    assert_eq!(server.stop(), Some(0), "{}", world.log());
}

/// A connection may end a moment after the next one was made: a child that its process forked shares it until exec(2).
#[test]
fn briefly_waiting_second_client_is_not_logged() {
    const QUICK: Duration = Duration::from_millis(900);
    let world = World::new("cluster_size=65536", 64 * BLOCK);
    let server = world.serve(&[]);
    wait_until("the server", || UnixStream::connect(world.path("socket")).is_ok());
    let named = || world.log().matches("another client").count();
    // On a busy machine the moment may be long, and the client is named rightly: that says nothing, and is done again.
    let quick = (0..20).any(|_| {
        let first = connect(&world.path("socket"));
        ask(&first);
        let before = named();
        let begun = Instant::now();
        let second = connect(&world.path("socket"));
        std::thread::sleep(Duration::from_millis(100));
        drop(first);
        let quick = begun.elapsed() < QUICK;
        ask(&second);
        drop(second);
        assert!(!quick || named() == before, "{}", world.log());
        quick
    });
    assert!(quick, "this machine is too busy for this test");
    assert_eq!(server.stop(), Some(0), "{}", world.log());
}

/// A monitor whose guest memory is not shared passes no regions, or only those of its firmware.
#[test]
fn unshared_client_memory_is_explained_in_the_log() {
    let world = World::new("cluster_size=65536", 64 * BLOCK);
    let server = world.serve(&[]);
    wait_until("the server", || UnixStream::connect(world.path("socket")).is_ok());
    let (mut frontend, count) = fill_memory(&world.path("socket"), 1);
    assert_eq!(count, 1);
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend.set_vring_num(0, 128).expect("SET_VRING_NUM");
    let config = vhost::VringConfigData {
        queue_max_size: 128,
        queue_size: 128,
        flags: 0,
        desc_table_addr: 0x7f18_57dd_d000,
        used_ring_addr: 0x7f18_57dd_e000,
        avail_ring_addr: 0x7f18_57dd_f000,
        log_addr: None,
    };
    frontend.set_vring_addr(0, &config).expect("SET_VRING_ADDR");
    frontend.set_vring_enable(0, true).expect("SET_VRING_ENABLE");
    let kick = vmm_sys_util::eventfd::EventFd::new(0).expect("an eventfd");
    assert!(frontend.set_vring_kick(0, &kick).is_err(), "it runs nowhere");
    drop(frontend);
    wait_until("a line in the log", || {
        let log = world.log();
        log.contains("none of its 1 memory regions") && log.contains("share=on")
    });
    assert_eq!(server.stop(), Some(0), "{}", world.log());
}
