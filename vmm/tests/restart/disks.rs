//! Disks that come and go while a server serves others.
#![expect(clippy::print_stdout, reason = "a number that was measured is worth a line")]

use std::time::{Duration, Instant};

use ringdisk_gen::Random;
use serde_json::Value;

use crate::client::{Ask, BLOCK, Client};
use crate::server::{Server, World};

const BLOCKS: usize = 512;
const CONTROL: [&str; 4] = ["--control", "control", "--images", "images"];

/// A folder with an image of a disk that is served from the beginning, and two for disks that come later.
fn world() -> World {
    World::with_images(
        BLOCKS * BLOCK,
        &["images/a.qcow2", "images/b.qcow2", "outside.qcow2"],
    )
}

/// What `ctl` says, which must succeed; it may have to wait for the socket.
fn ctl(world: &World, arguments: &[&str]) -> Value {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let (ok, said) = world.ctl("control", arguments);
        if ok {
            return serde_json::from_str(&said).unwrap_or_else(|error| panic!("{said:?}: {error}"));
        }
        let is_early = said.contains("No such file") || said.contains("Connection refused");
        assert!(is_early && Instant::now() < deadline, "{arguments:?}: {said}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What `ctl` says, which must fail.
fn refused(world: &World, arguments: &[&str]) -> String {
    let (ok, said) = world.ctl("control", arguments);
    assert!(!ok, "{arguments:?}: {said}");
    said
}

fn add<'a>(disk: &'a str, socket: &'a str) -> [&'a str; 5] {
    ["disk-add", "--disk", disk, "--listen", socket]
}

fn names(world: &World) -> Vec<String> {
    let list = ctl(world, &["disk-list"]);
    let disks = list["disks"].as_array().expect("disks");
    let names = disks
        .iter()
        .map(|disk| disk["id"].as_str().expect("an id").to_owned());
    names.collect()
}

fn client(world: &World, socket: &str) -> Client {
    let mut client = Client::new(BLOCKS, true);
    client.connect(&world.path(socket));
    client
}

fn work(client: &mut Client, random: &mut Random) {
    client.work(random, Duration::from_millis(100));
    client.drain();
}

fn stop(server: Server) {
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
}

fn disks_come_and_go(more: &[&str]) {
    let world = world();
    let disk = "path=disk.qcow2,id=first,poll_us=0"
        .replace(",poll_us=0", if more.is_empty() { ",poll_us=0" } else { "" });
    let server = world.serve_disk(&["env", "--default-signal"], &disk, &[&CONTROL, more].concat());
    let mut random = Random::new(7);
    let mut first = client(&world, "socket");
    work(&mut first, &mut random);
    let mut later = Client::new(BLOCKS, true);
    for round in 0..3 {
        ctl(&world, &["info"]);
        let began = Instant::now();
        let added = ctl(
            &world,
            &add("path=images/a.qcow2,id=a,num_queues=2", "images/a.sock"),
        );
        assert_eq!(
            (&added["id"], &added["socket"]),
            (&"a".into(), &"images/a.sock".into())
        );
        later.connect(&world.path("images/a.sock"));
        assert!(later.submit(Ask::Read, 3));
        later.drain();
        println!(
            "round {round}: {:?} from the order to the first answer, with the start of `ctl`",
            began.elapsed()
        );
        assert_eq!(names(&world), ["first", "a"]);
        for _ in 0..3 {
            work(&mut first, &mut random);
            work(&mut later, &mut random);
        }
        // It is counted, grown and looked at like any other.
        let counted = ctl(&world, &["stats", "a"]);
        assert_eq!(counted["disks"][0]["id"], "a");
        let locked = world.ctl(
            "control",
            &add("path=images/a.qcow2,id=again", "images/again.sock"),
        );
        assert!(!locked.0 && locked.1.contains("are the same file"), "{locked:?}");
        ctl(&world, &["disk-remove", "a"]);
        assert!(!later.is_connected());
        assert!(!world.path("images/a.sock").exists());
        assert_eq!(names(&world), ["first"]);
        // Others may have the image at once.
        world.assert_image_sound("images/a.qcow2", false);
        later.assert_contents(&world.contents_of("images/a.qcow2"));
        work(&mut first, &mut random);
    }
    assert!(first.is_connected());
    // The first one goes, and comes back elsewhere.
    ctl(&world, &["disk-remove", "first"]);
    assert!(names(&world).is_empty());
    world.assert_sound(false);
    first.assert_contents(&world.contents());
    ctl(&world, &add("path=images/b.qcow2", "images/b.sock"));
    let mut last = client(&world, "images/b.sock");
    work(&mut last, &mut random);
    stop(server);
    world.assert_image_sound("images/b.qcow2", false);
    last.assert_contents(&world.contents_of("images/b.qcow2"));
}

#[test]
fn disks_come_and_go_while_others_work() {
    disks_come_and_go(&[]);
}

#[test]
fn disks_come_and_go_on_shared_workers_and_restartable() {
    disks_come_and_go(&["--workers", "2", "--restartable"]);
}

#[test]
fn disk_that_cannot_be_added_leaves_all_as_it_was() {
    let world = world();
    let server = world.serve(&CONTROL);
    let mut random = Random::new(8);
    let mut first = client(&world, "socket");
    ctl(&world, &add("path=images/a.qcow2,id=a", "images/a.sock"));
    let before = names(&world);
    for (disk, socket, reason) in [
        (
            "path=images/b.qcow2,id=a",
            "images/b.sock",
            "cannot add disk a: there is a disk of this name; expected another id",
        ),
        ("path=images/a.qcow2,id=b", "images/b.sock", "are the same file"),
        (
            "path=images/b.qcow2",
            "images/a.sock",
            "socket images/a.sock is in use by this server; expected another path",
        ),
        (
            "path=images/b.qcow2",
            "b.sock",
            "cannot add disk images/b.qcow2: its sandbox allows no socket at b.sock; expected one in a folder of --images: images",
        ),
        (
            "path=outside.qcow2",
            "images/b.sock",
            "its sandbox allows no image at outside.qcow2; expected one in a folder of --images: images",
        ),
        ("path=images/none.qcow2", "images/b.sock", "No such file"),
        ("path=images,image_type=raw", "images/b.sock", "images"),
        ("path=images/b.qcow2,num_queues=0", "images/b.sock", "num_queues"),
        (
            "path=images/b.qcow2,pci_device_id=3",
            "images/b.sock",
            "`pci_device_id` does not apply here",
        ),
        (
            "path=images/b.qcow2,rate_limit_group=none",
            "images/b.sock",
            "rate_limit_group=none",
        ),
        ("path=images/b.qcow2", "images/none/b.sock", "images/none/b.sock"),
    ] {
        let said = refused(&world, &add(disk, socket));
        assert!(said.contains(reason), "{disk} {socket}: {said}");
        assert!(!world.path("images/b.sock").exists(), "{disk} {socket}");
    }
    // The kernel itself keeps the server from what a name in the folder leads to.
    std::os::unix::fs::symlink("../outside.qcow2", world.path("images/link.qcow2")).expect("a link");
    let said = refused(&world, &add("path=images/link.qcow2", "images/b.sock"));
    assert!(said.contains("Permission denied"), "{said}");
    let said = refused(&world, &["disk-add", "--disk", "path=images/b.qcow2"]);
    assert!(
        said.contains("`socket` is missing; expected the path of a socket"),
        "{said}"
    );
    let said = refused(&world, &["disk-remove", "b"]);
    assert!(
        said.contains("there is no disk `b`; there are: disk.qcow2, a"),
        "{said}"
    );
    assert_eq!(names(&world), before);
    // What is served by somebody else is not taken.
    let other = world.serve_at("images/other.sock", "path=images/b.qcow2", &[]);
    let mut others = client(&world, "images/other.sock");
    let said = refused(&world, &add("path=images/b.qcow2", "images/b.sock"));
    assert!(said.contains("images/b.qcow2") && said.contains("lock"), "{said}");
    let said = refused(&world, &add("path=outside.qcow2", "images/other.sock"));
    assert!(
        said.contains("outside.qcow2") || said.contains("in use"),
        "{said}"
    );
    work(&mut others, &mut random);
    stop(other);
    work(&mut first, &mut random);
    stop(server);

    // One that was not told of folders.
    let server = world.serve(&CONTROL[..2]);
    client(&world, "socket");
    ctl(&world, &["info"]);
    let said = refused(&world, &add("path=images/b.qcow2", "images/b.sock"));
    assert!(
        said.contains("its sandbox lets no further image be opened; start it with --images FOLDER, or with --sandbox off"),
        "{said}"
    );
    stop(server);
}

/// A server that begins without a disk; the end of one that was killed; and a new server that finds what has come, in whatever
/// order, and not what has gone.
#[test]
fn takeover_finds_disks_that_came_and_not_those_that_went() {
    let world = world();
    let server = world.serve(&CONTROL);
    let mut random = Random::new(9);
    drop(client(&world, "socket"));
    ctl(&world, &add("path=images/a.qcow2,id=a", "images/a.sock"));
    ctl(&world, &add("path=images/b.qcow2,id=b", "images/b.sock"));
    let mut clients = [client(&world, "images/a.sock"), client(&world, "images/b.sock")];
    ctl(&world, &["disk-remove", "disk.qcow2"]);

    let takeover = |sockets: &[&str], disks: &[&str]| {
        let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        world.serve_all(
            &owned(sockets),
            &owned(disks),
            &[&CONTROL[..], &["--takeover"]].concat(),
        )
    };
    let (a, b) = ("path=images/a.qcow2,id=a", "path=images/b.qcow2,id=b");
    let wrong = takeover(&["images/a.sock"], &[a]);
    assert_eq!(wrong.wait(), Some(1));
    assert!(
        world.log().contains("the running server refuses: it serves "),
        "{}",
        world.log()
    );
    clients.iter_mut().for_each(|client| work(client, &mut random));
    let new = takeover(&["images/b.sock", "images/a.sock"], &[b, a]);
    assert_eq!(server.wait(), Some(0));
    clients.iter_mut().for_each(|client| work(client, &mut random));
    world.wait_for_control("control");
    assert_eq!(names(&world), ["b", "a"]);
    // The new one is asked the same things.
    ctl(&world, &["disk-remove", "b"]);
    assert!(clients[0].is_connected() && !clients[1].is_connected());
    ctl(&world, &add(b, "images/b.sock"));
    clients[1].connect(&world.path("images/b.sock"));
    clients.iter_mut().for_each(|client| work(client, &mut random));
    stop(new);
    for (client, image) in clients.iter().zip(["images/a.qcow2", "images/b.qcow2"]) {
        world.assert_image_sound(image, false);
        client.assert_contents(&world.contents_of(image));
    }
}
