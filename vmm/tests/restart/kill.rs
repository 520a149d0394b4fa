//! `kill -9` of the server under load: the client goes on with a new one as if nothing had happened.

use std::time::{Duration, Instant};

use crate::client::{Ask, BLOCK, Client};
use crate::server::World;
use ringdisk_gen::Random;

const KILLS: u64 = 20;

/// Serves, works, kills, `KILLS` times. Every request must be answered exactly once and rightly, also those
/// that were answered and not flushed when the kill came: the guest goes on running and would notice.
fn goes_on(clusters: usize, blocks: usize, seed: u64) {
    let world = World::new(&format!("cluster_size={clusters}"), blocks * BLOCK);
    let arguments = ["--restartable"];
    let mut random = Random::new(seed);
    let mut client = Client::new(blocks, clusters == BLOCK);
    let mut in_flight = 0;
    for kill in 0..KILLS {
        let server = world.serve(&arguments);
        client.connect(&world.path("socket"));
        let how_long = Duration::from_micros(10_000 + random.below(150_000));
        let before = client.answered;
        client.work(&mut random, how_long);
        // A busy machine may take longer to begin.
        let deadline = Instant::now() + Duration::from_secs(20);
        while client.answered == before && Instant::now() < deadline {
            client.work(&mut random, Duration::from_millis(1));
        }
        server.kill();
        // What it published before it died counts.
        client.take_answers();
        in_flight += client.in_flight();
        assert!(
            client.answered > before,
            "seed {seed}, life {kill}: nothing was answered"
        );
    }
    assert!(in_flight > 0, "no kill hit a request in flight");
    let server = world.serve(&arguments);
    client.connect(&world.path("socket"));
    client.drain();
    for block in 0..blocks {
        while !client.submit(Ask::Read, block) {
            client.take_answers();
        }
    }
    client.drain();
    assert!(client.is_connected());
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    world.assert_sound(true);
    client.assert_contents(&world.contents());
}

#[test]
fn killed_server_loses_and_repeats_no_request() {
    goes_on(1 << 16, 2048, 0x5eed);
}

/// Small clusters and much space: nearly every write allocates, and tables are made all the time.
#[test]
fn server_killed_while_allocating_loses_no_mapping() {
    goes_on(BLOCK, 16384, 0xa110c);
}
