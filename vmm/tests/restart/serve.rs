//! A server that follows a configuration file, while its disks are used.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_gen::Random;
use ringdisk_gen::patience::SetOnDrop;
use serde_json::{Value, json};

use crate::client::{BLOCK, Client};
use crate::metrics::scrape_at;
use crate::server::{Server, World};

const BLOCKS: usize = 512;

const SETTINGS: &str = "control = \"control\"\nimages = \"images\"\n";

/// A folder with three images.
fn world() -> World {
    World::with_images(
        BLOCKS * BLOCK,
        &["images/a.qcow2", "images/b.qcow2", "images/c.qcow2"],
    )
}

fn disk(name: &str, more: &str) -> String {
    format!(
        "[[disk]]\nsocket = \"images/{name}.sock\"\npath = \"images/{name}.qcow2\"\nid = \"{name}\"\n{more}\n"
    )
}

/// Puts a file in the place of the one before, as editors do.
fn write(world: &World, text: &str) {
    std::fs::write(world.path("disks.new"), text).expect("a file");
    std::fs::rename(world.path("disks.new"), world.path("disks.toml")).expect("a name");
}

fn serve(world: &World, more: &[&str]) -> Server {
    world.command(
        &["env", "--default-signal"],
        &[&["serve", "--config", "disks.toml"], more].concat(),
    )
}

fn client(world: &World, name: &str) -> Client {
    let mut client = Client::new(BLOCKS, true);
    client.connect(&world.path(&format!("images/{name}.sock")));
    client
}

fn work(client: &mut Client, random: &mut Random) {
    client.work(random, Duration::from_millis(50));
    client.drain();
}

fn names(world: &World) -> Vec<String> {
    let (ok, said) = world.ctl("control", &["disk-list"]);
    assert!(ok, "{said}");
    let list: Value = serde_json::from_str(&said).expect("JSON");
    let disks = list["disks"].as_array().expect("disks");
    let names = disks
        .iter()
        .map(|disk| disk["id"].as_str().expect("an id").to_owned());
    names.collect()
}

/// Returns what a reload says, while these clients work.
fn reload(world: &World, clients: &mut [&mut Client], random: &mut Random) -> (bool, String) {
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reloading = scope.spawn(|| {
            let said = world.ctl("control", &["reload"]);
            has_ended.store(true, Ordering::Release);
            said
        });
        while !has_ended.load(Ordering::Acquire) {
            for client in &mut *clients {
                client.work(random, Duration::from_millis(5));
            }
        }
        clients.iter_mut().for_each(|client| client.drain());
        reloading.join().expect("no panic")
    })
}

/// Returns what a reload that succeeds says.
fn followed(world: &World, clients: &mut [&mut Client], random: &mut Random) -> Value {
    let (ok, said) = reload(world, clients, random);
    assert!(ok, "{said}");
    assert!(clients.iter().all(|client| client.is_connected()));
    serde_json::from_str(&said).expect("JSON")
}

/// The bound for the tables of all images is the one setting that follows the file.
#[test]
fn table_cache_follows_the_file() {
    let world = world();
    let settings = |cache: &str| {
        let metrics = "metrics = \"unix:metrics.sock\"\n";
        [SETTINGS, metrics, cache, &disk("a", "")[..]].concat()
    };
    let bounds = || {
        let samples = scrape_at(&world.path("metrics.sock"));
        let bound = samples.get("ringdisk_table_cache_limit_bytes").copied();
        (samples["ringdisk_table_cache_bytes"] > 0.0, bound)
    };
    write(&world, &settings("table_cache = \"2M\"\n"));
    let server = serve(&world, &[]);
    let mut random = Random::new(3);
    let mut a = client(&world, "a");
    work(&mut a, &mut random);
    assert_eq!(bounds(), (true, Some(2_097_152.0)));
    write(&world, &settings("table_cache = \"3M\"\n"));
    followed(&world, &mut [&mut a], &mut random);
    assert_eq!(bounds(), (true, Some(3_145_728.0)));
    write(&world, &settings("table_cache = \"1k\"\n"));
    let (ok, said) = reload(&world, &mut [&mut a], &mut random);
    assert!(!ok && said.contains("expected 1M or more"), "{said}");
    write(&world, &settings(""));
    followed(&world, &mut [&mut a], &mut random);
    assert_eq!(bounds(), (true, None));
    stop(server);
}

fn stop(server: Server) {
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
}

/// Tries to write to an image as another program would, until told to end. Returns how often, if it never could.
fn try_to_take(image: &std::path::Path, end: &AtomicBool) -> u32 {
    let mut tries = 0;
    while !end.load(Ordering::Acquire) {
        let tried = std::process::Command::new("qemu-io")
            .args(["-f", "qcow2", "-c", "write 0 512"])
            .arg(image)
            .output()
            .expect("qemu-io is needed by this test (apt-get install qemu-utils)");
        assert!(!tried.status.success(), "somebody else has the image: {tried:?}");
        tries += 1;
    }
    tries
}

fn disks_come_go_and_change(settings: &str) {
    let world = world();
    let settings = format!("{SETTINGS}{settings}");
    write(
        &world,
        &[&settings, &disk("a", "")[..], &disk("b", "num_queues = 2")].concat(),
    );
    let server = serve(&world, &[]);
    let mut random = Random::new(17);
    let mut a = client(&world, "a");
    let mut b = client(&world, "b");
    work(&mut a, &mut random);
    work(&mut b, &mut random);
    assert_eq!(names(&world), ["a", "b"]);

    let done = followed(&world, &mut [&mut a, &mut b], &mut random);
    assert_eq!(
        done,
        json!({"ok": true, "added": [], "removed": [], "changed": []})
    );
    // One comes while the others work.
    let with_c = [
        &settings,
        &disk("a", "")[..],
        &disk("b", "num_queues = 2"),
        &disk("c", ""),
    ]
    .concat();
    write(&world, &with_c);
    let done = followed(&world, &mut [&mut a, &mut b], &mut random);
    assert_eq!(done["added"], json!(["c"]));
    let mut c = client(&world, "c");
    work(&mut c, &mut random);
    // One goes, another changes again and again under its guest, and its image is never anybody else's.
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let tries = scope.spawn(|| try_to_take(&world.path("images/a.qcow2"), &end));
        let trying = SetOnDrop(&end);
        for round in 0..6 {
            let key = [
                "werror = \"wait\"",
                "l2_cache = \"128K\"",
                "discard_no_unref = true",
            ][round % 3];
            write(&world, &[&settings, &disk("a", key)[..], &disk("c", "")].concat());
            let done = followed(&world, &mut [&mut a, &mut c], &mut random);
            assert_eq!(done["changed"], json!(["a"]), "{round}");
            assert_eq!(done["removed"], if round == 0 { json!(["b"]) } else { json!([]) });
        }
        drop(trying);
        assert!(tries.join().expect("no panic") > 0);
    });
    assert!(!b.is_connected() && !world.path("images/b.sock").exists());
    world.assert_image_sound("images/b.qcow2", false);
    b.assert_contents(&world.contents_of("images/b.qcow2"));
    // Limits change at once: of the disk, and of a group that it joins.
    let (limit, group) = (
        "ops_size = 100000\nops_refill_time = 1000",
        "[[rate_limit_group]]\nid = \"g\"\nops_size = 90000\nops_refill_time = 1000\n",
    );
    let limits = |said: u64| {
        let (ok, answer) = world.ctl("control", &["disk-limits", "a"]);
        assert!(ok, "{answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["limits"]["ops_size"], said, "{answer}");
    };
    write(
        &world,
        &[&settings, &disk("a", limit)[..], &disk("c", "")].concat(),
    );
    assert_eq!(
        followed(&world, &mut [&mut a, &mut c], &mut random)["changed"],
        json!(["a"])
    );
    limits(100_000);
    let member = disk("a", "rate_limit_group = \"g\"");
    write(&world, &[&settings, group, &member, &disk("c", "")].concat());
    assert_eq!(
        followed(&world, &mut [&mut a, &mut c], &mut random)["changed"],
        json!(["a"])
    );
    limits(90_000);
    // Those that an operator has set last until the file says others.
    let (ok, answer) = world.ctl(
        "control",
        &["group-limits", "g", "ops_size=70000,ops_refill_time=1000"],
    );
    assert!(ok, "{answer}");
    assert_eq!(
        followed(&world, &mut [&mut a, &mut c], &mut random)["changed"],
        json!([])
    );
    limits(70_000);
    let other = group.replace("90000", "80000");
    write(&world, &[&settings, &other[..], &member, &disk("c", "")].concat());
    assert_eq!(
        followed(&world, &mut [&mut a, &mut c], &mut random)["changed"],
        json!([])
    );
    limits(80_000);
    // A signal does the same; nobody waits for it.
    write(&world, &[&settings, &disk("a", "")[..], &disk("b", "")].concat());
    server.signal("HUP");
    let deadline = Instant::now() + Duration::from_secs(20);
    while names(&world) != ["a", "b"] {
        assert!(Instant::now() < deadline, "{:?}\n{}", names(&world), world.log());
        work(&mut a, &mut random);
    }
    work(&mut a, &mut random);
    stop(server);
    for (client, image) in [(&mut a, "images/a.qcow2"), (&mut c, "images/c.qcow2")] {
        world.assert_image_sound(image, false);
        client.assert_contents(&world.contents_of(image));
    }
}

#[test]
fn disks_come_go_and_change_as_the_file_says_while_guests_work() {
    disks_come_go_and_change("");
}

#[test]
fn disks_come_go_and_change_on_shared_workers_and_restartable() {
    disks_come_go_and_change("workers = 2\nrestartable = true\n");
}

#[test]
fn wrong_line_changes_nothing() {
    let world = world();
    let outside = |name: &str| disk(name, "").replace("images/", "");
    let good = [SETTINGS, &disk("a", "num_queues = 2")].concat();
    // Nothing begins with one, either.
    write(&world, &good.replace("id =", "ID ="));
    assert_eq!(serve(&world, &[]).wait(), Some(2));
    assert!(
        world.log().contains("disks.toml:6: unknown key `ID`"),
        "{}",
        world.log()
    );
    assert_eq!(serve(&world, &["--check"]).wait(), Some(2));
    write(&world, &good);
    assert_eq!(serve(&world, &["--check"]).wait(), Some(0));
    assert!(!world.path("images/a.sock").exists());

    let server = serve(&world, &[]);
    let mut random = Random::new(19);
    let mut a = client(&world, "a");
    for (text, said) in [
        (
            good.replace("num_queues = 2", "num_queues = 1"),
            "disks.toml:7: `num_queues` of disk a cannot change while it is served",
        ),
        (
            good.replace("a.qcow2", "b.qcow2"),
            "disks.toml:5: `path` of disk a cannot change while it is served",
        ),
        (
            good.replace("a.sock", "b.sock"),
            "disks.toml:4: the socket of disk a cannot change while it is served; expected ",
        ),
        (
            good.replace("images = \"images\"", "images = \".\""),
            "disks.toml:2: `images` cannot change while the server runs",
        ),
        (
            good.replace("control = \"control\"\n", ""),
            "disks.toml:1: `control` cannot change while the server runs; expected control",
        ),
        (
            [&good, &disk("b", "")[..], &disk("c", "readonly = 7")].concat(),
            "disks.toml:17: `readonly=7`: readonly takes on or off",
        ),
        (
            [&good, &disk("b", "")[..], &disk("none", "")].concat(),
            "disks.toml:15: ",
        ),
        (
            [&good, &disk("b", "")[..], &outside("disk")].concat(),
            "disks.toml:13: its sandbox allows no image at ",
        ),
        (
            [&good, &disk("b", "")[..], &disk("b", "")].concat(),
            "disks.toml:16: the disk of line 8 is called b, too",
        ),
        ("[[disk]".to_owned(), "disks.toml:1: "),
        (
            good.replace("num_queues", "secret_file = \"none\"\nnum_queues"),
            "disks.toml:5: ",
        ),
    ] {
        write(&world, &text);
        let (ok, answer) = reload(&world, &mut [&mut a], &mut random);
        assert!(
            !ok && answer.contains(said),
            "{text}\nsays: {answer}\nexpected: {said}"
        );
        assert_eq!(names(&world), ["a"]);
        assert!(
            a.is_connected() && !world.path("images/b.sock").exists(),
            "{text}"
        );
    }
    std::fs::remove_file(world.path("disks.toml")).expect("a file");
    let (ok, answer) = reload(&world, &mut [&mut a], &mut random);
    assert!(!ok && answer.contains("disks.toml: No such file"), "{answer}");
    write(&world, &good);
    followed(&world, &mut [&mut a], &mut random);
    stop(server);
    world.assert_image_sound("images/a.qcow2", false);
    a.assert_contents(&world.contents_of("images/a.qcow2"));
    let log = world.log();
    assert!(log.contains("cannot follow the configuration file"), "{log}");
}

/// What requests have added stays, and what they have removed comes back with the file; a new server takes over what the file says.
#[test]
fn requests_and_takeovers_go_with_the_file() {
    let world = world();
    write(&world, &[SETTINGS, &disk("a", ""), &disk("b", "")].concat());
    let server = serve(&world, &[]);
    let mut random = Random::new(23);
    let mut a = client(&world, "a");
    work(&mut a, &mut random);
    let ctl = |arguments: &[&str]| {
        let (ok, said) = world.ctl("control", arguments);
        assert!(ok, "{arguments:?}: {said}");
    };
    ctl(&["disk-remove", "b"]);
    ctl(&[
        "disk-add",
        "--disk",
        "path=images/c.qcow2,id=c",
        "--listen",
        "images/c.sock",
    ]);
    let mut c = client(&world, "c");
    assert_eq!(names(&world), ["a", "c"]);
    let done = followed(&world, &mut [&mut a, &mut c], &mut random);
    assert_eq!(done["added"], json!(["b"]));
    assert_eq!(names(&world), ["a", "c", "b"]);
    // It is the file's from now on, and goes with its line.
    write(&world, &[SETTINGS, &disk("a", ""), &disk("c", "")].concat());
    let (ok, said) = reload(&world, &mut [&mut a, &mut c], &mut random);
    assert!(
        !ok && said.contains("the socket of disk c cannot change")
            || said.contains("`path` of disk c cannot change"),
        "{said}"
    );
    ctl(&["disk-remove", "c"]);
    let done = followed(&world, &mut [&mut a], &mut random);
    assert_eq!((&done["added"], &done["removed"]), (&json!(["c"]), &json!(["b"])));
    c.connect(&world.path("images/c.sock"));
    work(&mut c, &mut random);

    let new = serve(&world, &["--takeover"]);
    assert_eq!(server.wait(), Some(0), "{}", world.log());
    work(&mut a, &mut random);
    world.wait_for_control("control");
    write(&world, &[SETTINGS, &disk("a", "werror = \"wait\"")].concat());
    let done = followed(&world, &mut [&mut a], &mut random);
    assert_eq!(
        (&done["changed"], &done["removed"]),
        (&json!(["a"]), &json!(["c"]))
    );
    stop(new);
    for (client, image) in [(&a, "images/a.qcow2"), (&c, "images/c.qcow2")] {
        world.assert_image_sound(image, false);
        client.assert_contents(&world.contents_of(image));
    }
}
