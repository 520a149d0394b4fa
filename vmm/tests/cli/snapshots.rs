//! `ringdisk image snapshot` beside `qemu-img`.

use qcow::{OpenOptions, QcowDisk};
use ringdisk_gen::costly::Costly;
use ringdisk_gen::fingerprint::Fingerprint;
use ringdisk_gen::image::{put, u64_in};
use serde_json::Value;

use crate::world::World;

/// The IDs and names that `qemu-img` lists.
fn qemu_lists(world: &World) -> Vec<(String, String)> {
    let info = world
        .qemu("qemu-img", &["info", "--output=json", "a.qcow2"])
        .success();
    let info: Value = serde_json::from_str(&info).expect("JSON");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    info["snapshots"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|snapshot| (text(&snapshot["id"]), text(&snapshot["name"])))
        .collect()
}

fn qemu_io(world: &World, command: &str) {
    world
        .qemu("qemu-io", &["-f", "qcow2", "-c", command, "a.qcow2"])
        .success();
}

#[test]
fn snapshots_are_created_listed_and_deleted_as_qemu_sees_them() {
    let world = World::new();
    world.sparse_file("base.img", 1 << 20);
    let options = "backing_file=base.img,backing_fmt=raw";
    world
        .ringdisk(&["image", "create", "-o", options, "a.qcow2", "4M"])
        .success();
    // The backing file is not needed, and not opened.
    std::fs::rename(world.path("base.img"), world.path("away.img")).expect("a renamed file");
    assert_eq!(
        world
            .ringdisk(&["image", "snapshot", "create", "a.qcow2", "first"])
            .success(),
        "1\n"
    );
    std::fs::rename(world.path("away.img"), world.path("base.img")).expect("a renamed file");
    qemu_io(&world, "write -P 17 0 1M");
    assert_eq!(
        world
            .ringdisk(&["image", "snapshot", "create", "a.qcow2", "2"])
            .success(),
        "2\n"
    );
    qemu_io(&world, "write -P 34 0 1M");
    world.assert_flawless("a.qcow2");
    let pair = |id: &str, name: &str| (id.to_owned(), name.to_owned());
    assert_eq!(qemu_lists(&world), [pair("1", "first"), pair("2", "2")]);

    let list = world
        .ringdisk(&["image", "snapshot", "list", "a.qcow2"])
        .success();
    let lines: Vec<Vec<&str>> = list
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0], ["ID", "DATE", "(UTC)", "VM", "STATE", "NAME"]);
    assert_eq!(
        (lines.len(), lines[1][0], lines[1].last()),
        (3, "1", Some(&"first"))
    );
    assert!(lines[1][1].starts_with("20") && lines[1][2].len() == 8, "{list}");
    let list = world
        .ringdisk(&["image", "snapshot", "list", "--json", "a.qcow2"])
        .success();
    let theirs = world
        .qemu("qemu-img", &["info", "--output=json", "a.qcow2"])
        .success();
    let (ours, theirs): (Value, Value) = (
        serde_json::from_str(&list).expect("JSON"),
        serde_json::from_str(&theirs).expect("JSON"),
    );
    assert_eq!(ours, theirs["snapshots"]);

    world
        .qemu("qemu-img", &["snapshot", "-a", "2", "a.qcow2"])
        .success();
    qemu_io(&world, "read -P 17 0 1M");
    world
        .ringdisk(&["image", "snapshot", "delete", "a.qcow2", "id=1"])
        .success();
    world
        .ringdisk(&["image", "snapshot", "delete", "a.qcow2", "name=2"])
        .success();
    assert_eq!(qemu_lists(&world), []);
    world.assert_flawless("a.qcow2");
    qemu_io(&world, "read -P 17 0 1M");
    assert_eq!(
        world
            .ringdisk(&["image", "snapshot", "list", "--json", "a.qcow2"])
            .success(),
        "[]\n"
    );
}

#[test]
fn apply_makes_the_disk_what_it_was_also_in_size() {
    let world = World::new();
    world.qemu_create("a.qcow2", "cluster_size=64k", "1M");
    qemu_io(&world, "write -P 17 0 1M");
    let snapshot = |arguments: &[&str]| {
        world
            .ringdisk(&[&["image", "snapshot"][..], arguments].concat())
            .success()
    };
    snapshot(&["create", "a.qcow2", "before"]);
    qemu_io(&world, "write -P 34 0 64k");
    world
        .qemu("qemu-img", &["resize", "-q", "a.qcow2", "2M"])
        .success();
    qemu_io(&world, "write -P 51 1M 1M");
    snapshot(&["create", "a.qcow2", "after"]);
    for (which, size, reads) in [
        ("before", 1 << 20, &["read -P 17 0 1M"][..]),
        (
            "id=2",
            2 << 20,
            &["read -P 34 0 64k", "read -P 17 64k 960k", "read -P 51 1M 1M"],
        ),
        ("name=before", 1 << 20, &["read -P 17 0 1M"]),
    ] {
        assert_eq!(snapshot(&["apply", "a.qcow2", which]), "");
        let info = world
            .qemu("qemu-img", &["info", "--output=json", "a.qcow2"])
            .success();
        let info: Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["virtual-size"], size, "{which}");
        assert_eq!(info["snapshots"].as_array().map(Vec::len), Some(2), "{which}");
        world.assert_flawless("a.qcow2");
        reads.iter().for_each(|command| qemu_io(&world, command));
    }
}

#[test]
fn snapshot_is_shown_read_only_in_place_of_the_disk() {
    let world = World::new();
    world.qemu_create("a.qcow2", "cluster_size=64k", "1M");
    qemu_io(&world, "write -P 17 0 1M");
    for name in ["before", "before"] {
        world
            .qemu("qemu-img", &["snapshot", "-c", name, "a.qcow2"])
            .success();
        qemu_io(&world, "write -P 34 0 64k");
    }
    world
        .qemu("qemu-img", &["resize", "-q", "a.qcow2", "2M"])
        .success();
    let before = std::fs::read(world.path("a.qcow2")).expect("an image");
    world
        .io("path=a.qcow2,snapshot=id=1", &["read -P 17 0 1M"])
        .success();
    world
        .io(
            "path=a.qcow2,snapshot=2",
            &["read -P 34 0 64k", "read -P 17 64k 960k"],
        )
        .success();
    let refused = |disk: &str, command: &str, said: &str| {
        let ended = world.io(disk, &[command]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(
            ended.stderr.contains(said) || ended.stdout.contains(said),
            "{ended:?}"
        );
    };
    refused("path=a.qcow2,snapshot=id=1", "write -P 51 0 64k", "read-only");
    refused(
        "path=a.qcow2,snapshot=id=1",
        "read 1M 64k",
        "does not lie inside the disk",
    );
    refused(
        "path=a.qcow2,snapshot=before",
        "read 0 64k",
        "may mean 2 snapshots; select one by id=, such as id=1",
    );
    refused(
        "path=a.qcow2,snapshot=id=3",
        "read 0 64k",
        "a.qcow2: there is no snapshot id=3",
    );
    let after = std::fs::read(world.path("a.qcow2")).expect("an image");
    assert!(after == before, "the image has changed");
}

/// Images that are made to cost very much, or that name a cluster more often than it counts.
#[test]
fn snapshots_of_costly_and_damaged_images_are_refused_unchanged() {
    let world = World::new();
    let path = world.path("a.qcow2");
    let refused = |arguments: [&str; 3], said: &str| {
        let before = Fingerprint::of(&path).expect("an image");
        let line = world
            .ringdisk(&[&["image", "snapshot"][..], &arguments].concat())
            .refused(1);
        assert!(
            line.contains("a.qcow2: ") && line.contains(said),
            "{arguments:?}: {line}"
        );
        let after = Fingerprint::of(&path).expect("an image");
        assert!(after == before, "{line}: the image has changed");
    };
    Costly::Counts(257).write(&path).expect("an image");
    refused(["create", "a.qcow2", "s"], "536870912 bytes");
    Costly::Tables(4097, false).write(&path).expect("an image");
    refused(["create", "a.qcow2", "s"], "expected at most 8589934592");
    Costly::Tables(4097, true).write(&path).expect("an image");
    refused(["delete", "a.qcow2", "s"], "expected at most 8589934592");
    refused(["apply", "a.qcow2", "s"], "expected at most 8589934592");

    world.qemu_create("a.qcow2", "cluster_size=512", "64k");
    qemu_io(&world, "write -P 17 0 64k");
    world
        .qemu("qemu-img", &["snapshot", "-c", "s", "a.qcow2"])
        .success();
    qemu_io(&world, "write -P 34 0 64k");
    let mut image = std::fs::read(&path).expect("an image");
    let offset = |bytes: &[u8], at: u64| u64_in(bytes, at) & 0x00ff_ffff_ffff_fe00;
    let l1 = u64_in(&image, u64_in(&image, 64));
    let l2 = offset(&image, l1);
    let (host, entry) = (offset(&image, l2), u64_in(&image, l2));
    put(&mut image, l2 + 8, &entry.to_be_bytes());
    std::fs::write(&path, &image).expect("an image");
    refused(
        ["delete", "a.qcow2", "s"],
        &format!("the cluster at {host:#x} has more references than its refcount"),
    );
    let table = u64_in(&image, l1);
    put(&mut image, l2 + 8, &[0; 8]);
    put(&mut image, l1 + 8, &table.to_be_bytes());
    std::fs::write(&path, &image).expect("an image");
    refused(
        ["delete", "a.qcow2", "s"],
        &format!("two of its entries lead to the L2 table at {l2:#x}"),
    );
}

#[test]
fn refused_changes_say_what_would_be_right_and_change_nothing() {
    let world = World::new();
    world.qemu_create("a.qcow2", "refcount_bits=2", "1M");
    qemu_io(&world, "write -P 17 0 64k");
    for name in ["b", "b"] {
        world
            .qemu("qemu-img", &["snapshot", "-c", name, "a.qcow2"])
            .success();
    }
    let before = std::fs::read(world.path("a.qcow2")).expect("an image");
    for (arguments, said) in [
        (["create", "a.qcow2", "c"], "refcount_bits=2"),
        (["create", "a.qcow2", "b"], "choose another name"),
        (["create", "a.qcow2", ""], "has 0 bytes; expected 1 to 255"),
        (
            ["delete", "a.qcow2", "b"],
            "may mean 2 snapshots; select one by id=, such as id=1",
        ),
        (["delete", "a.qcow2", "name=1"], "there is no snapshot name=1"),
        (
            ["apply", "a.qcow2", "name=b"],
            "name=b may mean 2 snapshots; select one by id=, such as id=1",
        ),
        (
            ["apply", "a.qcow2", "c"],
            "there is no snapshot with the ID or name \"c\"",
        ),
    ] {
        let line = world
            .ringdisk(&[&["image", "snapshot"][..], &arguments].concat())
            .refused(1);
        assert!(
            line.contains("a.qcow2: ") && line.contains(said),
            "{arguments:?}: {line}"
        );
    }
    let after = std::fs::read(world.path("a.qcow2")).expect("an image");
    assert!(after == before, "the image has changed");
    world.assert_flawless("a.qcow2");
    let served = QcowDisk::open(&world.path("a.qcow2"), &OpenOptions::default()).expect("a disk");
    for arguments in [["create", "a.qcow2", "c"], ["apply", "a.qcow2", "id=1"]] {
        let line = world
            .ringdisk(&[&["image", "snapshot"][..], &arguments].concat())
            .refused(1);
        assert!(line.contains("a.qcow2 is locked"), "{line}");
    }
    drop(served);

    // What a snapshot says of itself.
    let path = world.path("a.qcow2");
    let (entry, len) = (u64_in(&before, 64), before.len() as u64);
    for (at, value, said) in [
        (
            entry + 48,
            1_u64 << 62,
            "its disk has 4611686018427387904 bytes; expected at most",
        ),
        (
            entry,
            (len.div_ceil(64 << 10) + 1) << 16,
            "is damaged: it has 1 entries, and the file",
        ),
    ] {
        let mut image = before.clone();
        put(&mut image, at, &value.to_be_bytes());
        std::fs::write(&path, &image).expect("an image");
        let line = world
            .ringdisk(&["image", "snapshot", "apply", "a.qcow2", "id=1"])
            .refused(1);
        assert!(line.contains("a.qcow2: ") && line.contains(said), "{line}");
        let after = std::fs::read(&path).expect("an image");
        assert!(after == image, "{line}: the image has changed");
    }
}
