//! A client that migrates its guest: another server of the same image continues, and each has the image in its turn.
#![expect(clippy::print_stdout, reason = "a number that was measured is worth a line")]

use std::time::{Duration, Instant};

use crate::client::{BLOCK, Client};
use crate::server::World;
use ringdisk_gen::Random;

const BLOCKS: usize = 1024;

#[test]
fn client_migrates_back_and_forth_and_nothing_is_lost() {
    for options in ["cluster_size=65536", "cluster_size=65536,extended_l2=on"] {
        let world = World::new(options, BLOCKS * BLOCK);
        let first = world.serve_at("a", "path=disk.qcow2,poll_us=0", &[]);
        let mut client = Client::new(BLOCKS, false);
        client.connect(&world.path("a"));
        let second = world.serve_at("b", "path=disk.qcow2,poll_us=0", &["--incoming"]);
        let mut random = Random::new(0x316);
        let mut times = Vec::new();
        for round in 0..20 {
            client.work(&mut random, Duration::from_millis(20));
            assert!(client.answered > 0);
            // With requests in flight.
            let to = if round % 2 == 0 { "b" } else { "a" };
            let begin = Instant::now();
            client.migrate(&world.path(to));
            // The image opens meanwhile.
            let before = client.answered;
            while client.answered == before {
                client.work(&mut random, Duration::from_micros(50));
                assert!(begin.elapsed() < Duration::from_secs(20), "{}", world.log());
            }
            times.push(begin.elapsed());
        }
        times.sort_unstable();
        println!("interruptions by migrations: {times:?}");
        client.work(&mut random, Duration::from_millis(20));
        client.drain();
        assert_eq!(second.stop(), Some(0), "{}", world.log());
        assert_eq!(first.stop(), Some(0), "{}", world.log());
        world.assert_sound(false);
        client.assert_contents(&world.contents());
    }
}

#[test]
fn server_waits_for_its_image_and_is_not_taken_over_meanwhile() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let disk = "path=disk.qcow2,poll_us=0,id=data";
    let first = world.serve_at("a", disk, &["--control", "a.control"]);
    world.wait_for_control("a.control");
    let mut second = world.serve_at("b", disk, &["--incoming", "--control", "b.control"]);
    world.wait_for_control("b.control");
    let (_, listed) = world.ctl("b.control", &["disk-list"]);
    let size = format!("\"size\":{}", BLOCKS * BLOCK);
    assert!(
        listed.contains("\"open\":false") && listed.contains(&size),
        "{listed}"
    );
    assert!(listed.contains("\"format\":\"qcow2\""), "{listed}");
    let (_, listed) = world.ctl("a.control", &["disk-list"]);
    assert!(listed.contains("\"open\":true"), "{listed}");
    let (is_done, said) = world.ctl("b.control", &["snapshot-create", "data", "one"]);
    assert!(!is_done && said.contains("closed"), "{said}");
    let heir = world.serve_at("b", disk, &["--takeover"]);
    assert_eq!(heir.wait(), Some(1));
    assert!(world.log().contains("is with another server"), "{}", world.log());
    assert!(second.is_running());

    // It is somebody else's as long as its server lives, and a client is not served before.
    let mut client = Client::new(BLOCKS, false);
    client.connect(&world.path("b"));
    let mut random = Random::new(1);
    client.work(&mut random, Duration::from_millis(100));
    assert_eq!(client.answered, 0);
    assert!(client.is_connected());
    assert_eq!(first.stop(), Some(0), "{}", world.log());
    client.drain();
    assert!(client.answered > 0);
    let (_, listed) = world.ctl("b.control", &["disk-list"]);
    assert!(listed.contains("\"open\":true"), "{listed}");

    // A client that is about to migrate is taken over with its log, and migrates then.
    client.begin_migration();
    client.work(&mut random, Duration::from_millis(20));
    let heir = world.serve_at("b", disk, &["--takeover"]);
    let deadline = Instant::now() + Duration::from_secs(20);
    while second.is_running() {
        client.work(&mut random, Duration::from_millis(1));
        assert!(Instant::now() < deadline, "{}", world.log());
    }
    let third = world.serve_at("c", disk, &["--incoming", "--control", "c.control"]);
    client.migrate(&world.path("c"));
    client.work(&mut random, Duration::from_millis(20));
    client.drain();
    assert_eq!(heir.stop(), Some(0), "{}", world.log());
    assert_eq!(third.stop(), Some(0), "{}", world.log());
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}

#[test]
fn image_is_not_awaited_with_what_stays_behind() {
    let world = World::new("cluster_size=65536", BLOCK);
    for (disk, arguments, why) in [
        (
            "path=disk.qcow2,overlay=temporary",
            &["--incoming"][..],
            "--incoming",
        ),
        ("path=disk.qcow2", &["--incoming", "--takeover"], "--takeover"),
    ] {
        assert_eq!(world.serve_at("socket", disk, arguments).wait(), Some(2));
        assert!(world.log().contains(why), "{}", world.log());
    }
    assert_eq!(
        world
            .serve_at("socket", "path=missing.qcow2", &["--incoming"])
            .wait(),
        Some(1)
    );
    assert!(world.log().contains("missing.qcow2"), "{}", world.log());
}
