//! `ringdisk image compact`.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::world::World;

/// An image of 4 MiB whose first half has become free.
fn half_free(world: &World) {
    world.qemu_create("a.qcow2", "cluster_size=4k", "4M");
    let written = world.io(
        "path=a.qcow2",
        &["write -P 17 0 2M", "write -P 34 2M 2M", "discard 0 2M", "flush"],
    );
    written.success();
}

fn len(world: &World) -> u64 {
    std::fs::metadata(world.path("a.qcow2")).expect("an image").len()
}

#[track_caller]
fn assert_same_disk(world: &World) {
    world.assert_flawless("a.qcow2");
    let read = world.io(
        "path=a.qcow2,readonly=on",
        &["read -P 0 0 2M", "read -P 34 2M 2M"],
    );
    let read = read.success();
    assert!(!read.contains("failed"), "{read}");
}

#[test]
fn image_compact_makes_the_file_shorter_and_says_how_much() {
    let world = World::new();
    half_free(&world);
    let before = len(&world);
    assert!(before > 4 << 20);
    let said = world.ringdisk(&["image", "compact", "a.qcow2"]).success();
    assert!(
        said.starts_with("a.qcow2: ") && said.contains(" MiB before, ") && said.ends_with(" MiB moved\n"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        len(&world) < (2 << 20) + (100 << 10),
        "{} of {before}",
        len(&world)
    );
    assert_same_disk(&world);
    let again = world.ringdisk(&["image", "compact", "a.qcow2"]).success();
    assert!(again.ends_with(" 0 B moved\n"), "{again}");
}

#[test]
fn image_compact_moves_what_snapshots_use() {
    let world = World::new();
    half_free(&world);
    world
        .ringdisk(&["image", "snapshot", "create", "a.qcow2", "one"])
        .success();
    let said = world.ringdisk(&["image", "compact", "a.qcow2"]).success();
    assert!(said.ends_with(" MiB moved\n"), "{said}");
    assert!(len(&world) < (2 << 20) + (200 << 10), "{said}");
    assert_same_disk(&world);
    world
        .ringdisk(&["image", "snapshot", "apply", "a.qcow2", "one"])
        .success();
    assert_same_disk(&world);
}

#[test]
fn image_compact_refuses_what_it_cannot_do() {
    let world = World::new();
    world.sparse_file("raw.img", 1 << 20);
    for (arguments, code, why) in [
        (&["raw.img"][..], 1, "raw.img"),
        (&["none.qcow2"], 1, "none.qcow2"),
        (&["--rate", "0", "raw.img"], 2, "at least one byte"),
        (&["--rate", "fast", "raw.img"], 2, "not a number"),
    ] {
        let ended = world.ringdisk(&[&["image", "compact"], arguments].concat());
        assert_eq!(ended.code, Some(code), "{ended:?}");
        assert!(ended.stderr.contains(why), "{ended:?}");
    }
}

/// A stop signal ends the compaction after the step under way. The next one goes on.
#[test]
fn image_compact_is_interrupted_by_a_signal_and_goes_on_later() {
    let world = World::new();
    half_free(&world);
    let mut command = world.ringdisk_command();
    command.args(["image", "compact", "--rate", "64K", "a.qcow2"]);
    let running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let running = running.expect("run ringdisk");
    // It takes half a minute.
    std::thread::sleep(Duration::from_secs(2));
    let sent = Command::new("kill")
        .args(["-TERM", &running.id().to_string()])
        .status();
    assert!(sent.expect("run kill").success());
    let ended = running.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.ends_with("; interrupted: run it again to go on\n"), "{said}");
    assert!(!said.contains(" 0 B moved"), "{said}");
    assert!(ended.stderr.is_empty(), "no terminal, no progress");
    assert_same_disk(&world);
    world.ringdisk(&["image", "compact", "a.qcow2"]).success();
    assert!(len(&world) < (2 << 20) + (100 << 10), "{}", len(&world));
    assert_same_disk(&world);
}
