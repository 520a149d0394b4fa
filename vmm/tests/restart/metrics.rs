//! Statistics beside a client that works: what `--metrics` says agrees with what the client did.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::client::{Ask, BLOCK, Client};
use crate::server::World;
use ringdisk_gen::Random;
use ringdisk_gen::patience::{SetOnDrop, wait_for};

/// The samples of a scrape, by name with labels.
pub(crate) type Samples = BTreeMap<String, f64>;

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Parses an answer; `None` if it is none.
fn parse(answer: &str) -> Option<Samples> {
    let body = answer
        .strip_prefix("HTTP/1.1 200 OK\r\n")?
        .split_once("\r\n\r\n")?
        .1;
    let samples = body.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect()
}

fn scrape(mut stream: impl Read + Write) -> Option<Samples> {
    stream.write_all(GET).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    parse(&answer)
}

/// Scrapes a Unix socket, which may not be there yet.
pub(crate) fn scrape_at(path: &Path) -> Samples {
    wait_for("statistics of a queue", || {
        let found = UnixStream::connect(path).ok().and_then(scrape);
        found.filter(|samples| samples.keys().any(|name| name.contains("queue=")))
    })
}

fn name_of(ask: Ask) -> &'static str {
    match ask {
        Ask::Read => "read",
        Ask::Write(_) => "write",
        Ask::Flush => "flush",
        Ask::Discard => "discard",
        Ask::WriteZeroes => "write_zeroes",
    }
}

fn series(family: &str, kind: &str) -> String {
    format!("ringdisk_{family}{{disk=\"disk.qcow2\",queue=\"0\",kind=\"{kind}\"}}")
}

/// Scrapes until `over`, and checks that no count falls. Returns the number of scrapes.
fn watch(path: &Path, over: &AtomicBool) -> u32 {
    let (mut scrapes, mut last) = (0, Samples::new());
    while !over.load(Ordering::Relaxed) {
        let samples = scrape_at(path);
        let counters = last
            .iter()
            .filter(|(name, _)| name.contains("_total") || name.contains("latency"));
        for (name, before) in counters {
            assert!(
                samples[name] >= *before,
                "{name} falls from {before} to {}",
                samples[name]
            );
        }
        scrapes += 1;
        last = samples;
    }
    scrapes
}

#[test]
fn metrics_agree_with_what_a_client_did() {
    const BLOCKS: usize = 256;
    let world = World::new("cluster_size=4096", BLOCKS * BLOCK);
    let mut client = Client::new(BLOCKS, true);
    // Not beside the disk's socket: the sandbox lets it be removed.
    std::fs::create_dir(world.path("m")).expect("a folder");
    let server = world.serve(&["--metrics", "unix:m/metrics"]);
    client.connect(&world.path("socket"));
    let (over, path) = (AtomicBool::new(false), world.path("m/metrics"));
    let mut random = Random::new(0x57a7);
    let mut asked: BTreeMap<&str, u64> = BTreeMap::new();
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch(&path, &over));
        let watched = SetOnDrop(&over);
        let end = Instant::now() + Duration::from_secs(1);
        while Instant::now() < end {
            let ask = match random.below(8) {
                0..3 => Ask::Write(random.below(u64::MAX) | 1),
                3..5 => Ask::Read,
                5 => Ask::Discard,
                6 => Ask::WriteZeroes,
                _ => Ask::Flush,
            };
            if client.submit(ask, random.below(BLOCKS as u64) as usize) {
                *asked.entry(name_of(ask)).or_default() += 1;
            } else if client.take_answers() == 0 {
                std::thread::yield_now();
            }
        }
        client.drain();
        drop(watched);
        assert!(watch.join().expect("no panic") > 3);
    });
    let samples = scrape_at(&path);
    assert_eq!(asked.len(), 5);
    for (kind, count) in asked {
        assert_eq!(samples[&series("requests_total", kind)], count as f64, "{kind}");
        let bytes = if kind == "flush" { 0 } else { count * BLOCK as u64 };
        assert_eq!(
            samples[&series("request_bytes_total", kind)],
            bytes as f64,
            "{kind}"
        );
        assert_eq!(samples[&series("request_errors_total", kind)], 0.0, "{kind}");
        let latencies =
            format!("ringdisk_request_latency_seconds_count{{disk=\"disk.qcow2\",kind=\"{kind}\"}}");
        let timed = samples[&latencies];
        if matches!(kind, "read" | "write") {
            assert!(timed > 0.0, "{kind}");
        } else {
            assert_eq!(timed, count as f64, "{kind}");
        }
    }
    assert_eq!(
        samples["ringdisk_requests_in_flight{disk=\"disk.qcow2\",queue=\"0\"}"],
        0.0
    );
    assert!(samples["process_resident_memory_bytes"] > 1e6);
    assert!(samples["process_open_fds"] > 10.0);
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    assert!(!path.exists(), "the socket was left behind");
    assert_eq!(world.log(), "");
    world.assert_sound(false);
}

#[test]
fn takeover_keeps_the_address_of_metrics() {
    const BLOCKS: usize = 256;
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let mut client = Client::new(BLOCKS, false);
    let mut random = Random::new(7);
    let old = world.serve(&["--metrics", "unix:metrics"]);
    client.connect(&world.path("socket"));
    client.work(&mut random, Duration::from_millis(50));
    let before = scrape_at(&world.path("metrics"))[&series("requests_total", "write")];
    assert!(before > 0.0);
    let new = world.serve(&["--takeover", "--metrics", "unix:metrics"]);
    assert_eq!(old.wait(), Some(0), "{}", world.log());
    // Its counts begin anew.
    let _first = scrape_at(&world.path("metrics"));
    client.drain();
    let first = scrape_at(&world.path("metrics"))[&series("requests_total", "write")];
    client.work(&mut random, Duration::from_millis(50));
    client.drain();
    let second = scrape_at(&world.path("metrics"))[&series("requests_total", "write")];
    assert!(second > first, "{first} and {second}");
    assert_eq!(new.stop(), Some(0), "{}", world.log());
    assert_eq!(world.log(), "");
}

#[test]
fn port_in_use_is_one_error_and_no_disk_is_served() {
    let world = World::new("cluster_size=65536", 1 << 20);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let server = world.serve(&["--metrics", &address]);
    assert_eq!(server.wait(), Some(1));
    let expected = format!(
        "ringdisk: --metrics {address}: the address is in use; stop its server or choose another one\n"
    );
    assert_eq!(world.log(), expected);
    assert!(!world.path("socket").exists());
    drop(taken);
    let server = world.serve(&["--metrics", &address]);
    wait_for("statistics", || {
        TcpStream::connect(&address).ok().and_then(scrape)
    });
    assert_eq!(server.stop(), Some(0));
}
