//! A planned takeover: the client keeps its connection, and finds nothing lost and little time gone by; a takeover that
//! fails, wherever it does, leaves the old server serving.
#![expect(clippy::print_stdout, reason = "a number that was measured is worth a line")]

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::client::{BLOCK, Client};
use crate::server::World;
use ringdisk_gen::Random;

/// The longest interruption by a takeover that the machine does not hold up.
const INTERRUPTION_MAX: Duration = Duration::from_millis(100);

/// Keeps the disk busy until `over`; the longest time without an answer.
fn work_until(client: &mut Client, random: &mut Random, mut over: impl FnMut() -> bool) -> Duration {
    let mut longest = Duration::ZERO;
    let mut last = Instant::now();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !over() {
        let answered = client.answered;
        client.work(random, Duration::from_micros(200));
        if client.answered != answered {
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        assert!(Instant::now() < deadline, "it does not end");
    }
    longest
}

/// Looks at the kernel's list of locks until `over`. Returns how often it looked, and how often nobody had `image` locked
/// for writing. The list comes page by page: where a lock of somebody else's goes meanwhile, one is left out. So only
/// what is missing three times in a row is.
fn watch_lock(image: &Path, over: &AtomicBool) -> (u64, u64) {
    // Byte 101 says that its holder writes, as QEMU's tools have it; the kernel shows it with its neighbour.
    let held = format!(":{} 100 101", std::fs::metadata(image).expect("an image").ino());
    let is_held = || {
        let locks = std::fs::read_to_string("/proc/locks").expect("/proc/locks");
        locks.lines().any(|line| line.contains(&held))
    };
    let (mut looks, mut unlocked) = (0, 0);
    while !over.load(Ordering::Relaxed) {
        looks += 1;
        unlocked += u64::from(!(0..3).any(|_| is_held()));
    }
    (looks, unlocked)
}

#[test]
fn image_stays_locked_across_takeovers() {
    const BLOCKS: usize = 1024;
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let mut random = Random::new(0x10c4);
    let mut client = Client::new(BLOCKS, false);
    let mut old = world.serve(&["--restartable", "--pidfile", "pid"]);
    client.connect(&world.path("socket"));
    client.work(&mut random, Duration::from_millis(20));
    let over = AtomicBool::new(false);
    let image = world.path("disk.qcow2");
    let pid = || -> u32 {
        let id = std::fs::read_to_string(world.path("pid")).expect("a process id");
        id.trim_end().parse().expect("a process id")
    };
    let old = std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch_lock(&image, &over));
        for round in 0..5 {
            // One that cannot take over, so that the old one takes back what it had handed over; and one that can.
            let mut less = world.serve(&["--takeover", "--pidfile", "pid"]);
            work_until(&mut client, &mut random, || !less.is_running());
            assert_eq!(less.wait(), Some(1), "round {round}");
            assert!(old.is_running(), "round {round}: {}", world.log());
            assert_eq!(pid(), old.pid(), "round {round}");
            let new = world.serve(&["--takeover", "--restartable", "--pidfile", "pid"]);
            work_until(&mut client, &mut random, || !old.is_running());
            assert_eq!(old.wait(), Some(0), "round {round}: {}", world.log());
            assert_eq!(pid(), new.pid(), "round {round}");
            old = new;
        }
        client.drain();
        over.store(true, Ordering::Relaxed);
        let (looks, unlocked) = watch.join().expect("no panic");
        println!("the image was locked at {} of {looks} looks", looks - unlocked);
        assert!(looks >= 100, "{looks}");
        assert_eq!(unlocked, 0, "of {looks}");
        old
    });
    assert!(client.is_connected());
    assert_eq!(old.stop(), Some(0), "{}", world.log());
    assert!(!world.path("pid").exists());
    // And given back in the end.
    let over = AtomicBool::new(false);
    let (looks, unlocked) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch_lock(&image, &over));
        std::thread::sleep(Duration::from_millis(50));
        over.store(true, Ordering::Relaxed);
        watch.join().expect("no panic")
    });
    assert_eq!(looks, unlocked);
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}

#[test]
fn takeover_under_load_keeps_the_connection() {
    const BLOCKS: usize = 4096;
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let mut random = Random::new(0x7a4e);
    let mut client = Client::new(BLOCKS, false);
    let mut old = world.serve(&[]);
    client.connect(&world.path("socket"));
    let mut interruptions = Vec::new();
    for round in 0..10 {
        client.work(&mut random, Duration::from_millis(100));
        let new = world.serve(&["--takeover"]);
        let longest = work_until(&mut client, &mut random, || !old.is_running());
        assert_eq!(old.wait(), Some(0), "round {round}: {}", world.log());
        let after = work_until(&mut client, &mut random, {
            let end = Instant::now() + Duration::from_millis(50);
            move || Instant::now() > end
        });
        interruptions.push(longest.max(after));
        client.drain();
        // The same connection: nothing was set up again.
        assert!(client.is_connected(), "round {round}: {}", world.log());
        old = new;
    }
    interruptions.sort();
    println!("interruptions by takeovers: {interruptions:?}");
    // A loaded machine holds most of them up; what a takeover itself waits for is in every one.
    assert!(interruptions[0] <= INTERRUPTION_MAX, "{interruptions:?}");
    client.drain();
    assert_eq!(old.stop(), Some(0), "{}", world.log());
    assert!(!world.path("socket").exists() && !world.path("socket.takeover").exists());
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}

/// A server without in-flight tracking cannot take over a client that uses it; one with tracking can.
#[test]
fn less_capable_takeover_leaves_the_old_server_serving() {
    const BLOCKS: usize = 1024;
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let mut random = Random::new(0x1e55);
    let mut client = Client::new(BLOCKS, false);
    let mut old = world.serve(&["--restartable"]);
    client.connect(&world.path("socket"));
    for round in 0..3 {
        let mut less = world.serve(&["--takeover"]);
        work_until(&mut client, &mut random, || !less.is_running());
        assert_eq!(less.wait(), Some(1), "round {round}");
        assert!(old.is_running(), "round {round}: {}", world.log());
        client.drain();
        assert!(client.is_connected());
        let new = world.serve(&["--takeover", "--restartable"]);
        work_until(&mut client, &mut random, || !old.is_running());
        assert_eq!(old.wait(), Some(0), "round {round}: {}", world.log());
        old = new;
    }
    assert!(world.log().contains("needs --restartable too"), "{}", world.log());
    assert!(
        world
            .log()
            .contains("the takeover failed; this server continues to serve"),
        "{}",
        world.log()
    );
    client.drain();
    assert!(client.is_connected());
    assert_eq!(old.stop(), Some(0), "{}", world.log());
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}

/// The server that is alive after the kill serves everything. If none is, a third one finds all that was answered and flushed.
#[test]
fn takeover_is_all_or_nothing_when_the_new_server_dies() {
    const BLOCKS: usize = 1024;
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let mut random = Random::new(0xdead);
    let mut client = Client::new(BLOCKS, false);
    // What was answered outlives a kill.
    let mut old = world.serve(&["--restartable"]);
    client.connect(&world.path("socket"));
    let (mut stayed, mut went) = (0, 0);
    for round in 0..24u64 {
        client.work(&mut random, Duration::from_millis(10));
        let new = world.serve(&["--takeover", "--restartable"]);
        client.work(&mut random, Duration::from_micros(500 + round * 1500));
        new.kill();
        // What the new one published before it died; from here on only the old one can answer.
        client.take_answers();
        let (before, deadline) = (client.answered, Instant::now() + Duration::from_secs(20));
        let serves = loop {
            client.work(&mut random, Duration::from_millis(1));
            if client.answered > before {
                break true;
            }
            if !old.is_running() {
                break false;
            }
            assert!(
                Instant::now() < deadline,
                "round {round}: it neither serves nor ends: {}",
                world.log()
            );
        };
        if serves {
            stayed += 1;
        } else {
            assert_eq!(old.wait(), Some(0), "round {round}: {}", world.log());
            went += 1;
            client.take_answers();
            old = world.serve(&["--restartable"]);
            client.connect(&world.path("socket"));
        }
        client.drain();
        assert!(client.is_connected(), "round {round}: {}", world.log());
    }
    println!("killed before they had taken over: {stayed}; after: {went}");
    assert!(stayed > 0, "every kill came too late");
    assert_eq!(old.stop(), Some(0), "{}", world.log());
    world.assert_sound(true);
    client.assert_contents(&world.contents());
}

#[test]
fn impossible_takeover_is_refused_before_anything_stops() {
    let world = World::new("cluster_size=65536", 16 * BLOCK);
    // Nobody is there to take over from.
    assert_eq!(world.serve(&["--takeover"]).wait(), Some(1));
    assert!(
        world.log().contains("no server to take over from"),
        "{}",
        world.log()
    );

    let server = world.serve(&[]);
    let mut client = Client::new(16, false);
    client.connect(&world.path("socket"));
    // More sockets than it serves; then an image that cannot be opened.
    world.qemu_img(&["create", "-q", "-f", "qcow2", "other.qcow2", "1M"]);
    let more = ["--takeover", "--socket", "other", "--disk", "path=other.qcow2"];
    assert_eq!(world.serve(&more).wait(), Some(1));
    assert!(
        world.log().contains("the running server refuses"),
        "{}",
        world.log()
    );
    std::fs::write(world.path("other.qcow2"), "not an image").expect("a file");
    assert_eq!(world.serve(&more).wait(), Some(1));
    client.work(&mut Random::new(5), Duration::from_millis(20));
    client.drain();
    assert!(client.is_connected());
    assert_eq!(server.stop(), Some(0));
    world.assert_sound(false);
}
