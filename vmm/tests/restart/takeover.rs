//! A planned takeover: the client keeps its connection, and finds nothing lost and little time gone by; a takeover that
//! fails, wherever it does, leaves the old server serving.
#![expect(clippy::print_stdout, reason = "a number that was measured is worth a line")]

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::client::{BLOCK, Client};
use crate::server::World;
use crate::several::Disks;
use ringdisk_gen::Random;
use ringdisk_gen::patience::SetOnDrop;

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
        let watched = SetOnDrop(&over);
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
        drop(watched);
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
            // The new one had it already: the old one has it again, without a client.
            if !client.is_connected() {
                // It may be about to end, as it has handed everything over.
                std::thread::sleep(Duration::from_millis(200));
                if old.is_running() {
                    client.take_answers();
                    client.connect(&world.path("socket"));
                }
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

/// What the new server prints is read by nobody any more.
#[test]
fn takeover_goes_on_when_its_output_is_closed() {
    let world = World::new("cluster_size=65536", 64 * BLOCK);
    let mut random = Random::new(0x9199);
    let mut client = Client::new(64, false);
    let mut old = world.serve(&[]);
    client.connect(&world.path("socket"));
    let closed = ["env", "--default-signal", "sh", "-c", "\"$@\" | true", "sh"];
    let new = world.serve_in(&closed, &["--takeover", "--pidfile", "pid"]);
    work_until(&mut client, &mut random, || !old.is_running());
    assert_eq!(old.wait(), Some(0), "{}", world.log());
    client.work(&mut random, Duration::from_millis(20));
    client.drain();
    assert!(client.is_connected(), "{}", world.log());
    let pid = std::fs::read_to_string(world.path("pid")).expect("a process id");
    let sent = std::process::Command::new("kill").arg(pid.trim_end()).status();
    assert!(sent.expect("run kill").success());
    assert_eq!(new.wait(), Some(0), "{}", world.log());
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}

/// The last disk cannot be moved, because its client uses what the new server does not offer: those that have moved come back, with
/// their clients. Then all move.
#[test]
fn disks_come_back_when_one_cannot_move() {
    let mut all = Disks::new(4);
    let mut old = all.serve(&["--control", "control"]);
    all.connect();
    let able = all.disks.clone();
    for round in 0..3 {
        all.disks[3] += ",sparse=off";
        let mut less = all.serve(&["--takeover", "--control", "control"]);
        while less.is_running() {
            all.work(Duration::from_millis(1));
        }
        assert_eq!(less.wait(), Some(1), "round {round}");
        assert!(old.is_running() && all.are_connected(), "{}", all.world.log());
        all.work(Duration::from_millis(10));
        // They are where they were, and can be changed.
        let (ok, said) = all.world.ctl("control", &["disk-list"]);
        assert!(ok && said.matches("\"open\":true").count() == 4, "{said}");
        all.disks.clone_from(&able);
        let new = all.serve(&["--takeover", "--control", "control"]);
        while old.is_running() {
            all.work(Duration::from_millis(1));
        }
        assert_eq!(old.wait(), Some(0), "round {round}: {}", all.world.log());
        assert!(all.are_connected(), "{}", all.world.log());
        old = new;
    }
    let log = all.world.log();
    assert!(
        log.contains("were not offered")
            && log.contains("the takeover failed; this server continues to serve"),
        "{log}"
    );
    all.work(Duration::from_millis(10));
    all.drain();
    assert_eq!(old.stop(), Some(0), "{}", all.world.log());
    all.assert_contents(false);
}

/// Either server dies in the middle of a takeover of several disks. The other one serves all of them, or there was nothing to serve
/// yet, or any more; clients that lose their server go on with what was in flight.
#[test]
fn disks_are_served_by_the_server_that_is_left_of_a_takeover() {
    let mut all = Disks::new(6);
    let mut old = all.serve(&["--restartable", "--pidfile", "pid"]);
    all.connect();
    let pid = |world: &World| -> Option<u32> {
        let id = std::fs::read_to_string(world.path("pid")).ok()?;
        id.trim_end().parse().ok()
    };
    let failures = |world: &World| world.log().matches("the takeover failed").count();
    let (mut went_on, mut anew) = ([0, 0], [0, 0]);
    for round in 0..24u64 {
        all.work(Duration::from_millis(5));
        let failed = failures(&all.world);
        let mut new = all.serve(&["--takeover", "--restartable", "--pidfile", "pid"]);
        all.work(Duration::from_micros(3000 + (round / 2) * 5000));
        let kills_new = round % 2 == 0;
        let deadline = Instant::now() + Duration::from_secs(40);
        let left = if kills_new {
            new.kill();
            // It says so if a takeover was under way, and ends if that was through.
            let soon = Instant::now() + Duration::from_millis(500);
            while old.is_running() && failures(&all.world) == failed && Instant::now() < soon {
                std::thread::sleep(Duration::from_millis(1));
            }
            old.is_running().then_some(old)
        } else {
            old.kill();
            while new.is_running() && pid(&all.world) != Some(new.pid()) {
                assert!(Instant::now() < deadline, "round {round}: {}", all.world.log());
                std::thread::sleep(Duration::from_millis(1));
            }
            new.is_running().then_some(new)
        };
        let which = usize::from(kills_new);
        old = match left {
            Some(left) => {
                went_on[which] += 1;
                left
            }
            None => {
                anew[which] += 1;
                all.serve(&["--restartable", "--pidfile", "pid"])
            }
        };
        all.connect();
        all.work(Duration::from_millis(5));
        all.drain();
        assert!(all.are_connected(), "round {round}: {}", all.world.log());
    }
    println!(
        "the old one was killed: {} went on, {} began anew",
        went_on[0], anew[0]
    );
    println!(
        "the new one was killed: {} went on, {} began anew",
        went_on[1], anew[1]
    );
    assert!(
        went_on[0] > 0 && went_on[1] > 0,
        "every kill came too soon or too late"
    );
    assert_eq!(old.stop(), Some(0), "{}", all.world.log());
    all.assert_contents(true);
}

/// The old server is told to stop in the middle of a takeover: it hands all over, or stops and takes the takeover with it. A server that
/// is left has its sockets.
#[test]
fn stop_in_a_takeover_leaves_one_server_or_none() {
    let mut all = Disks::new(6);
    let arguments = ["--restartable", "--control", "control"];
    let takeover = [&arguments[..], &["--takeover"]].concat();
    let mut old = all.serve(&arguments);
    all.connect();
    let mut took_over = 0;
    for round in 0..16u64 {
        all.work(Duration::from_millis(5));
        let mut new = all.serve(&takeover);
        all.work(Duration::from_millis(5 + round * 8));
        if old.is_running() {
            old.signal("TERM");
        }
        assert_eq!(old.wait(), Some(0), "round {round}: {}", all.world.log());
        // It ends at once if it has not taken over.
        let deadline = Instant::now() + Duration::from_secs(20);
        while new.is_running() && !all.world.ctl("control", &["info"]).0 {
            assert!(Instant::now() < deadline, "round {round}: {}", all.world.log());
        }
        old = if new.is_running() {
            took_over += 1;
            for socket in &all.sockets {
                assert!(all.world.path(socket).exists(), "round {round}: {socket}");
            }
            new
        } else {
            assert_eq!(new.wait(), Some(1), "round {round}: {}", all.world.log());
            all.serve(&arguments)
        };
        all.connect();
        all.work(Duration::from_millis(2));
        all.drain();
    }
    println!("took over {took_over} times of 16");
    assert_eq!(old.stop(), Some(0), "{}", all.world.log());
    all.assert_contents(false);
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
