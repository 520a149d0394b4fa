//! `ringdisk image resize` beside `qemu-img`.

use serde_json::Value;

use crate::world::World;

fn resize(world: &World, arguments: &[&str]) {
    let said = world
        .ringdisk(&[&["image", "resize"][..], arguments].concat())
        .success();
    assert_eq!(said, "", "{arguments:?}");
}

fn refused(world: &World, code: i32, arguments: &[&str]) -> String {
    world
        .ringdisk(&[&["image", "resize"][..], arguments].concat())
        .refused(code)
}

/// The size of an image's disk, which has no flaw, as QEMU sees it.
fn size(world: &World, name: &str) -> u64 {
    world.assert_flawless(name);
    let info = world.qemu("qemu-img", &["info", "--output=json", name]).success();
    let info: Value = serde_json::from_str(&info).expect("JSON");
    info["virtual-size"].as_u64().expect("a size")
}

fn reads(world: &World, name: &str, commands: &[&str]) {
    let said = world.qemu_io(&["-f", "qcow2", name], commands).success();
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn resize_takes_sizes_and_differences_in_both_directions() {
    let world = World::new();
    world.qemu_create("a.qcow2", "cluster_size=64k", "1M");
    reads(&world, "a.qcow2", &["write -P 17 0 1M"]);
    for (arguments, bytes) in [
        (&["a.qcow2", "2M"][..], 2 << 20),
        (&["a.qcow2", "+1M"], 3 << 20),
        (&["a.qcow2", "0x300200"], (3 << 20) + 512),
        (&["a.qcow2", "3146240"], (3 << 20) + 512),
        (&["--shrink", "a.qcow2", "-2M"], (1 << 20) + 512),
        (&["a.qcow2", "--shrink", "-1k"], (1 << 20) - 512),
        (&["--shrink", "a.qcow2", "100k"], 100 << 10),
    ] {
        resize(&world, arguments);
        assert_eq!(size(&world, "a.qcow2"), bytes, "{arguments:?}");
    }
    reads(&world, "a.qcow2", &["read -P 17 0 100k"]);
    // QEMU's growth shows no byte that was there before, nor does ours.
    world
        .qemu("qemu-img", &["resize", "-q", "a.qcow2", "300k"])
        .success();
    reads(&world, "a.qcow2", &["read -P 17 0 100k", "read -P 0 100k 200k"]);
    resize(&world, &["a.qcow2", "+700k"]);
    reads(&world, "a.qcow2", &["read -P 17 0 100k", "read -P 0 100k 900k"]);
}

#[test]
fn resize_refuses_bad_sizes_and_says_what_would_be_lost() {
    let world = World::new();
    world.qemu_create("a.qcow2", "cluster_size=64k", "1M");
    reads(&world, "a.qcow2", &["write -P 17 0 256k", "write -P 17 960k 64k"]);
    let before = world.bytes("a.qcow2");
    let said = |text: &str| refused(&world, 1, &["a.qcow2", text]);
    for text in ["0", "513", "+1", "-1M", "-2M", "-1"] {
        let bytes = crate_size(text);
        assert_eq!(
            said(text),
            format!(
                "a.qcow2: the disk has 1048576 bytes, and the new size is {bytes}; expected more than 0 bytes and a multiple of 512"
            )
        );
    }
    assert!(said("7E").contains("expected at most 2251799813685248, which is what an L1 table can map"));
    assert_eq!(
        said("100k"),
        "a.qcow2: the disk has 1048576 bytes and would become smaller; 225280 bytes of data past 102400 would be lost; shrink \
         the file systems and partitions in it first, then pass --shrink"
    );
    for text in ["", "x", "+-1", "1.0001k"] {
        let said = refused(&world, 2, &["a.qcow2", text]);
        assert!(
            said.starts_with(&format!("the size {text:?} is not a ")),
            "{said}"
        );
    }
    assert!(world.bytes("a.qcow2") == before);
    // An image with errors: the L2 entry of the first cluster is not aligned.
    let l2 =
        crate::world::be_u64(&before, crate::world::be_u64(&before, 40) as usize) & 0x00ff_ffff_ffff_fe00;
    world.patch("a.qcow2", l2 + 6, &[0x02]);
    let damaged = world.bytes("a.qcow2");
    for arguments in [&["a.qcow2", "2M"][..], &["--shrink", "a.qcow2", "512k"]] {
        let said = refused(&world, 1, arguments);
        assert!(said.contains("the check of the image found"), "{said}");
    }
    assert!(world.bytes("a.qcow2") == damaged);
}

/// The text of a difference or a size in bytes.
fn crate_size(text: &str) -> String {
    text.replace("1M", "1048576").replace("2M", "2097152")
}

/// What a longer backing file has behind the disk's end does not show in the part that is new.
#[test]
fn growth_hides_a_longer_backing_file_in_every_version() {
    for compat in ["0.10", "1.1"] {
        let world = World::new();
        world.ringdisk(&["image", "create", "base.qcow2", "2M"]).success();
        reads(&world, "base.qcow2", &["write -P 51 0 2M"]);
        let options = format!("compat={compat},backing_file=base.qcow2,backing_fmt=qcow2");
        world.qemu_create("a.qcow2", &options, "1000k");
        resize(&world, &["a.qcow2", "3M"]);
        assert_eq!(size(&world, "a.qcow2"), 3 << 20);
        reads(
            &world,
            "a.qcow2",
            &["read -P 51 0 1000k", "read -P 0 1000k 2072k"],
        );
        resize(&world, &["--shrink", "a.qcow2", "500k"]);
        resize(&world, &["a.qcow2", "1M"]);
        reads(&world, "a.qcow2", &["read -P 51 0 500k", "read -P 0 500k 524k"]);
    }
}

#[test]
fn resize_of_images_of_every_kind() {
    let world = World::new();
    std::fs::write(world.path("key"), "open sesame").expect("a secret");
    let create = ["image", "create", "--secret-file", "key", "-o"];
    let luks = "encrypt.format=luks,encrypt.iter-time=10,extended_l2=on";
    world
        .ringdisk(&[&create[..], &[luks, "luks.qcow2", "1M"]].concat())
        .success();
    world
        .io("path=luks.qcow2,secret_file=key", &["write -P 17 0 1M"])
        .success();
    let said = refused(&world, 1, &["luks.qcow2", "2M"]);
    assert_eq!(said, "luks.qcow2: it is encrypted (luks); pass --secret-file");
    resize(
        &world,
        &["--secret-file", "key", "--shrink", "luks.qcow2", "100k"],
    );
    resize(&world, &["--secret-file", "key", "luks.qcow2", "200k"]);
    world
        .io(
            "path=luks.qcow2,secret_file=key",
            &["read -P 17 0 100k", "read -P 0 100k 100k"],
        )
        .success();
    world.ringdisk(&["image", "check", "luks.qcow2"]).success();

    for raw in ["on", "off"] {
        let name = format!("{raw}.qcow2");
        let options = format!("data_file={raw}.raw,data_file_raw={raw}");
        world
            .ringdisk(&["image", "create", "-o", &options, &name, "1M"])
            .success();
        reads(&world, &name, &["write -P 17 0 1M"]);
        let said = refused(&world, 1, &["--shrink", &name, "100k"]);
        let expected = format!(
            "{name}: it keeps its data in the external file \"{raw}.raw\"; pass --data-file to resize both"
        );
        assert_eq!(said, expected);
        let len = || {
            world
                .path(&format!("{raw}.raw"))
                .metadata()
                .expect("a file")
                .len()
        };
        resize(&world, &["--data-file", "--shrink", &name, "100k"]);
        assert_eq!((size(&world, &name), len()), (100 << 10, 100 << 10));
        resize(&world, &["--data-file", &name, "2M"]);
        assert_eq!((size(&world, &name), len()), (2 << 20, 2 << 20));
        reads(&world, &name, &["read -P 17 0 100k", "read -P 0 100k 1948k"]);
    }

    // Snapshots of version 2 do not say how large their disks are.
    world.qemu_create("old.qcow2", "compat=0.10", "1M");
    world
        .ringdisk(&["image", "snapshot", "create", "old.qcow2", "s"])
        .success();
    for arguments in [&["old.qcow2", "2M"][..], &["--shrink", "old.qcow2", "512k"]] {
        let said = refused(&world, 1, arguments);
        assert!(
            said.contains("an image of version 2 keeps its size while it has snapshots"),
            "{said}"
        );
    }
    world
        .ringdisk(&["image", "snapshot", "delete", "old.qcow2", "s"])
        .success();
    resize(&world, &["old.qcow2", "2M"]);
    assert_eq!(size(&world, "old.qcow2"), 2 << 20);
}
