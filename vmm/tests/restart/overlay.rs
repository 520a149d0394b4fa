//! A temporary overlay: the guest's writes end with the server, however it ends, and the image stays as it is.

use std::fs;
use std::time::Duration;

use ringdisk_gen::Random;

use crate::client::{Ask, BLOCK, Client};
use crate::server::{Server, World};

const BLOCKS: usize = 512;
const OVERLAY: &str = "poll_us=0,overlay=temporary,overlay_dir=overlays";

/// An image with a guest's data, and a folder for overlays.
struct Scene {
    world: World,
    model: Vec<u64>,
    image: Vec<u8>,
}

impl Scene {
    fn new() -> Self {
        let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
        fs::create_dir(world.path("overlays")).expect("a folder");
        let server = world.serve(&[]);
        let mut client = Client::new(BLOCKS, false);
        client.connect(&world.path("socket"));
        work(&mut client, 1);
        assert_eq!(server.stop(), Some(0), "{}", world.log());
        let image = fs::read(world.path("disk.qcow2")).expect("the image");
        Self {
            world,
            model: client.model,
            image,
        }
    }

    /// Starts a server of the image with an overlay.
    fn serve(&self, arguments: &[&str]) -> Server {
        let disk = format!("path=disk.qcow2,{OVERLAY}");
        self.world
            .serve_disk(&["env", "--default-signal"], &disk, arguments)
    }

    /// Connects a client that expects the image's contents.
    fn client(&self, world: &World) -> Client {
        let mut client = Client::new(BLOCKS, false);
        client.model.clone_from(&self.model);
        client.connect(&world.path("socket"));
        client
    }

    /// Fails the test if the image has changed, or an overlay can be seen.
    fn assert_untouched(&self) {
        let image = fs::read(self.world.path("disk.qcow2")).expect("the image");
        assert!(image == self.image, "the image has changed");
        let left: Vec<_> = fs::read_dir(self.world.path("overlays"))
            .expect("a folder")
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Changes the disk, flushes it, and compares all of it with the model.
fn work(client: &mut Client, seed: u64) {
    let before = client.model.clone();
    let random = &mut Random::new(seed);
    while client.answered < 500 || client.model == before {
        client.work(random, Duration::from_millis(20));
    }
    client.drain();
    assert!(client.submit(Ask::Flush, 0));
    client.drain();
    read_all(client);
}

fn read_all(client: &mut Client) {
    for block in 0..BLOCKS {
        while !client.submit(Ask::Read, block) {
            client.take_answers();
        }
    }
    client.drain();
}

#[test]
fn writes_to_an_overlay_end_with_the_server_also_when_it_is_killed() {
    let scene = Scene::new();
    let world = &scene.world;
    for (round, kill) in [(2, false), (3, true), (4, false)] {
        let server = scene.serve(&["--sandbox", "on"]);
        let mut client = scene.client(world);
        read_all(&mut client);
        work(&mut client, round);
        assert!(client.model != scene.model, "the disk has changed");
        scene.assert_untouched();
        if kill {
            server.kill();
        } else {
            assert_eq!(server.stop(), Some(0), "{}", world.log());
        }
        scene.assert_untouched();
    }
}

#[test]
fn servers_share_an_image_below_their_overlays_and_a_writer_is_refused() {
    let scene = Scene::new();
    let other = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let image = scene.world.path("disk.qcow2");
    let folder = scene.world.path("overlays");
    let disk = format!(
        "path={},poll_us=0,overlay=temporary,overlay_dir={}",
        image.display(),
        folder.display()
    );
    let one = scene.serve(&[]);
    let two = other.serve_disk(&["env", "--default-signal"], &disk, &[]);
    let (mut first, mut second) = (scene.client(&scene.world), scene.client(&other));
    work(&mut first, 5);
    work(&mut second, 6);
    assert!(first.model != second.model);
    read_all(&mut first);
    scene.assert_untouched();
    let third = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let plain = format!("path={},poll_us=0", image.display());
    let writer = third.serve_disk(&["env", "--default-signal"], &plain, &[]);
    assert_eq!(writer.wait(), Some(1));
    assert!(third.log().contains("is locked"), "{}", third.log());
    assert_eq!((one.stop(), two.stop()), (Some(0), Some(0)));
    scene.assert_untouched();

    // And the other way round.
    let writer = third.serve_disk(&["env", "--default-signal"], &plain, &[]);
    let mut client = scene.client(&third);
    read_all(&mut client);
    let refused = other.serve_disk(&["env", "--default-signal"], &disk, &[]);
    assert_eq!(refused.wait(), Some(1));
    assert!(other.log().contains("is locked"), "{}", other.log());
    assert_eq!(writer.stop(), Some(0), "{}", third.log());
}

#[test]
fn server_with_an_overlay_is_neither_restarted_nor_taken_over() {
    let scene = Scene::new();
    let world = &scene.world;
    for option in ["--restartable", "--takeover"] {
        assert_eq!(scene.serve(&[option]).wait(), Some(2));
        let said = format!("`overlay=temporary` contradicts `{option}`: the overlay ends with its process");
        assert!(world.log().contains(&said), "{}", world.log());
    }
    let mut server = scene.serve(&[]);
    let mut client = scene.client(world);
    work(&mut client, 7);
    assert_eq!(world.serve(&["--takeover"]).wait(), Some(1));
    let said = "its disk disk.qcow2 has overlay=temporary, which ends with its process";
    assert_eq!(
        world.log().matches(said).count(),
        2,
        "both say so: {}",
        world.log()
    );
    assert!(server.is_running() && client.is_connected());
    client.answered = 0;
    work(&mut client, 8);
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    scene.assert_untouched();
}
