//! Rate limits of a real server, in its sandbox: what a client gets is what was asked for, disks of a group share it,
//! and a limit that would last for hours holds up neither a stop nor a takeover.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Ask, BLOCK, Client, SLOTS};
use crate::server::{Server, World};

const BLOCKS: usize = 256;
/// One request an hour.
const HOURS: &str = "path=disk.qcow2,poll_us=0,ops_size=1,ops_refill_time=3600000";
const SIGNALS: [&str; 2] = ["env", "--default-signal"];

/// Keeps `client` at work until `until`. Returns how many answers came.
fn read(client: &mut Client, until: Instant) -> u64 {
    let before = client.answered;
    let mut block = 0;
    while Instant::now() < until {
        while client.submit(Ask::Read, block) {
            block = (block + 1) % BLOCKS;
        }
        client.take_answers();
        std::thread::sleep(Duration::from_micros(200));
    }
    client.answered - before
}

/// Checks that `counts` answers of disks that share a limit came in the time since `began`, by whose rate `rate` a second flow into a
/// bucket that holds `burst`. Never more; but a client that gets no CPU does not ask for all that it could have.
fn check_limit(counts: &[u64], began: Instant, burst: f64, rate: f64) {
    let elapsed = began.elapsed().as_secs_f64();
    let total = counts.iter().sum::<u64>() as f64;
    // Some may have passed before, and nobody had taken their answers.
    let most = burst + rate * elapsed + (counts.len() * SLOTS) as f64;
    assert!(total <= most, "{counts:?} requests, at most {most}");
    // If each wait for an empty bucket took 100 ms more, it would be two thirds.
    let least = 0.75 * (burst + rate * elapsed);
    assert!(total >= least, "{counts:?} requests, at least {least}");
}

/// Returns what `ringdisk ctl` said of the limits of the group `both`.
fn group_limits(world: &World, limits: &str) -> (bool, String) {
    let limits = if limits.is_empty() { &[][..] } else { &[limits] };
    world.ctl("control", &[&["group-limits", "both"], limits].concat())
}

#[test]
fn rate_limit_group_is_shared_also_when_it_has_others() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let bytes = (BLOCKS * BLOCK).to_string();
    world.qemu_img(&["create", "-q", "-f", "qcow2", "second.qcow2", &bytes]);
    let disk = "path=disk.qcow2,rate_limit_group=both";
    let more = [
        "--socket",
        "second",
        "--disk",
        "path=second.qcow2,rate_limit_group=both",
        "--rate-limit-group",
        "id=both,ops_size=300,ops_refill_time=200",
        "--control",
        "control",
    ];
    let server = world.serve_disk(&SIGNALS, disk, &more);
    let mut clients = ["socket", "second"].map(|socket| {
        let mut client = Client::new(BLOCKS, false);
        client.connect(&world.path(socket));
        client
    });
    let mut shared = |burst: f64, rate: f64| {
        let began = Instant::now();
        let until = began + Duration::from_millis(2500);
        let counts = std::thread::scope(|scope| {
            let threads = clients
                .each_mut()
                .map(|client| scope.spawn(move || read(client, until)));
            threads.map(|thread| thread.join().expect("a client"))
        });
        check_limit(&counts, began, burst, rate);
        // A worker that gets no CPU when its turn comes loses it to the other.
        let total: u64 = counts.iter().sum();
        assert!(counts.iter().all(|count| count * 10 > total * 3), "{counts:?}");
    };
    shared(300.0, 1500.0);
    let told = |limits: &str| {
        let (is_done, said) = group_limits(&world, limits);
        assert!(is_done, "{said}");
        let said: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!(said["disks"], json!(["disk.qcow2", "second.qcow2"]), "{said}");
        said["limits"].clone()
    };
    assert_eq!(told(""), json!({"ops_size": 300, "ops_refill_time": 200}));
    // What waits for an hour, on either disk, does not once the limits are others.
    told("ops_size=1,ops_refill_time=3600000");
    std::thread::sleep(Duration::from_millis(100));
    let others = json!({"ops_size": 100, "ops_refill_time": 100});
    assert_eq!(told("ops_size=100,ops_refill_time=100"), others);
    shared(100.0, 1000.0);
    assert_eq!(told(""), others);
    assert_eq!(told("none"), json!({}));
    clients.iter_mut().for_each(Client::drain);
    for (arguments, why) in [
        (
            &["group-limits", "bath"][..],
            "no disk is in the rate limit group bath; the groups with disks are: both",
        ),
        (
            &["disk-limits", "disk.qcow2", "none"],
            "shares the limits of the group both with other disks; `group-limits` gives them others",
        ),
    ] {
        let (is_done, said) = world.ctl("control", arguments);
        assert!(!is_done && said.contains(why), "{said}");
    }
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    assert_eq!(world.log(), "");
}

/// A server with one request an hour, and a client that has as many in flight as it can.
fn throttled(world: &World) -> (Server, Client) {
    let server = world.serve_disk(&SIGNALS, HOURS, &[]);
    let mut client = Client::new(BLOCKS, false);
    client.connect(&world.path("socket"));
    for slot in 0..SLOTS {
        assert!(client.submit(Ask::Write(slot as u64 + 1), slot));
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while client.take_answers() == 0 {
        assert!(Instant::now() < deadline, "not even one: {}", world.log());
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(200));
    client.take_answers();
    assert_eq!(client.in_flight(), SLOTS - 1, "one passes, the others wait");
    (server, client)
}

#[test]
fn stop_answers_everything_despite_a_rate_limit() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let (server, mut client) = throttled(&world);
    let asked = Instant::now();
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    client.drain();
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}

#[test]
fn takeover_does_not_wait_for_a_rate_limit() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let (mut old, mut client) = throttled(&world);
    let asked = Instant::now();
    let new = world.serve(&["--takeover"]);
    while old.is_running() {
        assert!(asked.elapsed() < Duration::from_secs(10), "{}", world.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(old.wait(), Some(0), "{}", world.log());
    client.drain();
    // The new server was told of no limit.
    assert!(client.submit(Ask::Write(77), 200));
    client.drain();
    assert_eq!(new.stop(), Some(0), "{}", world.log());
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}

/// Returns what `ringdisk ctl` said of the disk's limits, and whether it succeeded.
fn disk_limits(world: &World, arguments: &[&str]) -> (bool, String) {
    world.ctl("control", &[&["disk-limits", "disk.qcow2"], arguments].concat())
}

#[test]
fn limits_of_a_disk_in_use_are_set_told_and_removed() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let server = world.serve_disk(&SIGNALS, "path=disk.qcow2,poll_us=0", &["--control", "control"]);
    let mut client = Client::new(BLOCKS, false);
    client.connect(&world.path("socket"));
    world.wait_for_control("control");
    assert!(disk_limits(&world, &[]).1.contains("\"limits\":{}"));
    let second = || Instant::now() + Duration::from_secs(1);
    assert!(read(&mut client, second()) > 2000, "nothing is limited");
    let (is_done, said) = disk_limits(&world, &["ops_size=100,ops_refill_time=100"]);
    let told = "\"limits\":{\"ops_refill_time\":100,\"ops_size\":100}";
    assert!(is_done && said.contains(told), "{said}");
    assert!(disk_limits(&world, &[]).1.contains(told));
    let began = Instant::now();
    let limited = read(&mut client, second());
    check_limit(&[limited], began, 100.0, 1000.0);
    // What waits for an hour does not once the limit is gone.
    assert!(disk_limits(&world, &["ops_size=1,ops_refill_time=3600000"]).0);
    let waiting = read(&mut client, second());
    assert!(waiting <= 2 * SLOTS as u64, "{waiting} in a second");
    assert!(disk_limits(&world, &["none"]).0);
    client.drain();
    assert!(read(&mut client, second()) > 2000);
    for (wrong, why) in [
        ("ops_size=1", "`ops_size` is given without `ops_refill_time`"),
        (
            "path=a",
            "`path` does not apply here: only the keys bw_… and ops_… are limits",
        ),
        ("ops_size=0,ops_refill_time=1", "takes a number, at least 1"),
        ("nonsense", "nonsense"),
    ] {
        let (is_done, said) = disk_limits(&world, &[wrong]);
        assert!(!is_done && said.contains(why), "{said}");
    }
    assert_eq!(server.stop(), Some(0), "{}", world.log());
}
