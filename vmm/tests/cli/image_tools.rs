//! `ringdisk image` beside `qemu-img`.

use serde_json::Value;

use crate::world::{World, be_u64};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

#[test]
fn image_create_makes_flawless_images_as_requested() {
    let world = World::new();
    world.sparse_file("base.img", 3 << 20);
    for (options, size) in [
        ("", "64M"),
        ("cluster_size=512,refcount_bits=1", "4M"),
        ("cluster_size=2M,refcount_bits=64", "1T"),
        ("compat=0.10", "0"),
        ("lazy_refcounts=on,compression_type=zstd", "1.5M"),
        ("preallocation=metadata", "10M"),
        ("preallocation=falloc,cluster_size=4k", "1M"),
        ("preallocation=full,refcount_bits=8", "1M"),
        ("backing_file=base.img,backing_fmt=raw", "5M"),
        ("extended_l2=on,cluster_size=128k", "64M"),
        ("extended_l2=on,preallocation=metadata", "10M"),
        ("extended_l2=on,backing_file=base.img,backing_fmt=raw", "5M"),
    ] {
        let created = match options {
            "" => world.ringdisk(&["image", "create", "a.qcow2", size]),
            options => world.ringdisk(&["image", "create", "-o", options, "a.qcow2", size]),
        };
        assert!(
            created
                .success()
                .starts_with("Formatting 'a.qcow2', fmt=qcow2 cluster_size=")
        );
        world.assert_flawless("a.qcow2");
        world.ringdisk(&["image", "check", "a.qcow2"]).success();
        let theirs = world
            .qemu("qemu-img", &["info", "--output=json", "a.qcow2"])
            .success();
        let ours = world.ringdisk(&["image", "info", "--json", "a.qcow2"]).success();
        assert_same_facts(&json(&ours), &json(&theirs), options);
        world
            .qemu("qemu-img", &["compare", "-f", "qcow2", "a.qcow2", "a.qcow2"])
            .success();
    }
}

#[test]
fn image_create_prints_what_qemu_img_prints() {
    let world = World::new();
    for name in ["base.qcow2", "a,b.qcow2"] {
        world.qemu_create(name, "compat=1.1", "1M");
    }
    for (options, size) in [
        ("cluster_size=64k", Some("64M")),
        ("compat=1.1", Some("1000")),
        ("compat=v3,cluster_size=4k", Some("1M")),
        ("compat=0.10,refcount_bits=16", Some("1M")),
        ("preallocation=off,lazy_refcounts=on", Some("1M")),
        ("extended_l2=on", Some("1M")),
        ("lazy_refcounts=on,extended_l2=on,cluster_size=16k", Some("1M")),
        ("compat=1.1,preallocation=metadata", Some("1M")),
        (
            "preallocation=full,compression_type=zstd,refcount_bits=8",
            Some("1M"),
        ),
        ("backing_file=base.qcow2,backing_fmt=qcow2", None),
        ("compat=1.1,backing_fmt=qcow2,backing_file=base.qcow2", Some("2M")),
    ] {
        let size = size.as_slice();
        let theirs = [&["create", "-f", "qcow2", "-o", options, "x y.qcow2"], size].concat();
        let theirs = world.qemu("qemu-img", &theirs).success();
        let ours = [&["image", "create", "-o", options, "x y.qcow2"], size].concat();
        assert_eq!(world.ringdisk(&ours).success(), theirs, "{options}");
    }
    let theirs = "backing_file=a,,b.qcow2,backing_fmt=qcow2";
    let theirs = world.qemu("qemu-img", &["create", "-f", "qcow2", "-o", theirs, "x.qcow2"]);
    let ours = "backing_file=\"a,b.qcow2\",backing_fmt=qcow2";
    let ours = world.ringdisk(&["image", "create", "-o", ours, "x.qcow2"]);
    assert_eq!(ours.success(), theirs.success());
}

/// The command that makes an overlay resolves the name as the one that opens it.
#[test]
fn backing_file_name_may_have_only_the_file_protocol() {
    let world = World::new();
    world.qemu_create("base.qcow2", "compat=1.1", "7M");
    let absolute = world.path("base.qcow2");
    for name in ["file:base.qcow2", &format!("file:{}", absolute.display())] {
        let options = format!("backing_file={name},backing_fmt=qcow2");
        let made = world.ringdisk(&["image", "create", "--json", "-o", &options, "top.qcow2"]);
        let made = json(&made.success());
        assert_eq!(made["virtual-size"], 7 << 20);
        assert_eq!(made["backing-filename"], name);
        world
            .io("path=top.qcow2,backing_files=on", &["read -P 0 0 7M"])
            .success();
        world
            .qemu_io(&["-f", "qcow2", "top.qcow2"], &["read -P 0 0 7M"])
            .success();
        std::fs::remove_file(world.path("top.qcow2")).expect("the overlay");
    }
    for name in ["nbd:localhost:10809", "json:{}", "file:"] {
        let options = format!("backing_file={name},backing_fmt=qcow2");
        let line = world
            .ringdisk(&["image", "create", "-o", &options, "top.qcow2", "1M"])
            .refused(2);
        assert!(
            line.contains(name) && line.contains("path of a local file"),
            "{line}"
        );
    }
}

/// The data file's name counts from the image's folder for the command that makes it, too.
#[test]
fn create_makes_or_adopts_a_data_file() {
    let world = World::new();
    std::fs::create_dir(world.path("sub")).expect("a folder");
    let create = |options: &str, image: &str, size: &[&str]| {
        let args = [&["image", "create", "-o", options, image], size].concat();
        world.ringdisk(&args)
    };
    let said = create("data_file=d.raw,data_file_raw=on", "sub/a.qcow2", &["1M"]).success();
    assert!(said.contains(" data_file=d.raw data_file_raw=on "), "{said}");
    let line = world.io("path=sub/a.qcow2", &["length"]).refused(1);
    assert!(line.contains("data_file=on") && line.contains("d.raw"), "{line}");
    world
        .io(
            "path=sub/a.qcow2,data_file=on",
            &["write -P 7 64k 64k", "read -P 7 64k 64k"],
        )
        .success();
    let mut disk = vec![0; 1 << 20];
    disk[64 << 10..128 << 10].fill(7);
    let raw = world.path("sub/d.raw");
    assert!(std::fs::read(&raw).expect("the data file") == disk);
    let line = create("data_file=d.raw", "sub/b.qcow2", &["1M"]).refused(2);
    assert!(line.contains("data_file_keep=on"), "{line}");
    assert!(!world.path("sub/b.qcow2").exists(), "no image is left behind");
    create("data_file=d.raw,data_file_keep=on", "sub/b.qcow2", &[]).success();
    world
        .io(
            "path=sub/b.qcow2,data_file=on",
            &["length", "read -P 7 64k 64k", "read -P 0 128k 64k"],
        )
        .success();
    assert!(std::fs::read(&raw).expect("the data file") == disk);
    for (options, image) in [
        ("data_file=c.raw", "c.raw"),
        ("data_file=b.qcow2,data_file_keep=on", "sub/b.qcow2"),
        (
            "data_file=a.qcow2,backing_file=a.qcow2,backing_fmt=raw,data_file_keep=on",
            "sub/c.qcow2",
        ),
    ] {
        let line = create(options, image, &["1M"]).refused(1);
        assert!(line.contains("it is the new image itself"), "{options}: {line}");
    }
    assert!(!world.path("c.raw").exists());
    let line = create("data_file=nbd:x", "sub/c.qcow2", &["1M"]).refused(2);
    assert!(line.contains("path of a local file"), "{line}");
}

/// Everything `qemu-img info` says, we say with the same words; ours may say more.
fn assert_same_facts(ours: &Value, theirs: &Value, about: &str) {
    let (Value::Object(ours), Value::Object(theirs)) = (ours, theirs) else {
        return assert_eq!(ours, theirs, "{about}");
    };
    for (key, value) in theirs {
        match key.as_str() {
            // The node below is QEMU's own affair.
            "children" => {}
            "data" | "format-specific" => {
                assert_same_facts(ours.get(key).unwrap_or(&Value::Null), value, about);
            }
            _ => assert_eq!(ours.get(key), Some(value), "{about}: {key}"),
        }
    }
}

#[test]
fn overlay_without_a_size_takes_its_backing_files() {
    let world = World::new();
    world.qemu_create("base.qcow2", "compat=1.1", "7M");
    std::fs::create_dir(world.path("sub")).expect("a folder");
    // The name is relative to the image's folder, not to ours.
    let options = "backing_file=../base.qcow2,backing_fmt=qcow2";
    let made = world
        .ringdisk(&["image", "create", "--json", "-o", options, "sub/top.qcow2"])
        .success();
    let made = json(&made);
    assert_eq!(made["virtual-size"], 7 << 20);
    assert_eq!(made["backing-filename"], "../base.qcow2");
    world
        .qemu_io(&["-f", "qcow2", "base.qcow2"], &["write -P 3 0 1M"])
        .success();
    world
        .qemu_io(&["-f", "qcow2", "sub/top.qcow2"], &["read -P 3 0 1M"])
        .success();
    world
        .io(
            "path=sub/top.qcow2,backing_files=on",
            &["read -P 3 0 1M", "read -P 0 1M 6M"],
        )
        .success();
}

#[test]
fn image_create_refuses_an_image_backed_by_itself() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let before = world.bytes("a.qcow2");
    let options = "backing_file=./a.qcow2,backing_fmt=qcow2";
    let line = world
        .ringdisk(&["image", "create", "-o", options, "a.qcow2", "1M"])
        .refused(1);
    assert!(line.contains("it is the new image itself"), "{line}");
    assert!(world.bytes("a.qcow2") == before, "the image was changed");
}

#[test]
fn image_info_prints_the_lines_of_qemu_img() {
    let world = World::new();
    world.qemu_create("base.qcow2", "compat=1.1", "1M");
    world.qemu_create(
        "a.qcow2",
        "backing_file=base.qcow2,backing_fmt=qcow2,lazy_refcounts=on",
        "20M",
    );
    world
        .qemu("qemu-img", &["snapshot", "-c", "before", "a.qcow2"])
        .success();
    let ours = world.ringdisk(&["image", "info", "a.qcow2"]).success();
    let theirs = world.qemu("qemu-img", &["info", "a.qcow2"]).success();
    for line in theirs.lines().take_while(|line| !line.starts_with("Child node")) {
        // The list of snapshots is a table there.
        if !line.contains("VM_SIZE") && !line.contains("before") {
            assert!(
                ours.lines().any(|found| found == line),
                "{line:?} is not in:\n{ours}"
            );
        }
    }
    assert!(ours.contains("    1: before (VM state 0 B)\n"), "{ours}");
}

/// The offset of the refcount of host cluster `cluster` in an image with 64 KiB clusters and 16 bits.
fn refcount_offset(image: &[u8], cluster: u64) -> u64 {
    let table = be_u64(image, 48) as usize;
    be_u64(image, table) + cluster * 2
}

#[test]
fn image_check_tells_clean_leaked_corrupt_and_unreadable_apart() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "16M");
    world
        .qemu_io(&["-f", "qcow2", "a.qcow2"], &["write 0 1M"])
        .success();
    let clean = world.ringdisk(&["image", "check", "a.qcow2"]).success();
    let theirs = world.qemu("qemu-img", &["check", "a.qcow2"]).success();
    assert_eq!(clean, theirs);

    let image = world.bytes("a.qcow2");
    let clusters = image.len() as u64 / 65536;
    // One more cluster in the file, with a refcount and no reference: a leak.
    world.patch("a.qcow2", clusters * 65536, &[0; 65536]);
    world.patch("a.qcow2", refcount_offset(&image, clusters), &1_u16.to_be_bytes());
    let leaking = world.ringdisk(&["image", "check", "a.qcow2"]);
    assert_eq!(leaking.code, Some(3), "{leaking:?}");
    assert!(
        leaking
            .stdout
            .contains("1 leaked clusters were found on the image."),
        "{leaking:?}"
    );
    assert_eq!(world.qemu("qemu-img", &["check", "a.qcow2"]).code, Some(3));

    // A data cluster that counts as free: corrupt.
    world.patch(
        "a.qcow2",
        refcount_offset(&image, clusters - 1),
        &0_u16.to_be_bytes(),
    );
    let corrupt = world.ringdisk(&["image", "check", "--json", "a.qcow2"]);
    assert_eq!(corrupt.code, Some(2), "{corrupt:?}");
    let theirs = world.qemu("qemu-img", &["check", "--output=json", "a.qcow2"]);
    assert_eq!(theirs.code, Some(2));
    let (ours, theirs) = (json(&corrupt.stdout), json(&theirs.stdout));
    for count in [
        "corruptions",
        "leaks",
        "check-errors",
        "total-clusters",
        "allocated-clusters",
    ] {
        assert_eq!(ours[count], theirs[count], "{count}");
    }

    assert_eq!(world.ringdisk(&["image", "check", "none"]).code, Some(1));
}

/// QEMU says "Header extension too large": the name of the backing file begins in the middle of it.
#[test]
fn header_extension_over_the_backing_file_name_is_refused() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    world.patch("a.qcow2", 112, &[0x12, 0x34, 0x56, 0x78, 0x7f, 0xff, 0xff, 0xff]);
    world.patch("a.qcow2", 8, &0x74_u64.to_be_bytes());
    assert_eq!(world.qemu("qemu-img", &["info", "a.qcow2"]).code, Some(1));
    for arguments in [
        &["image", "info", "a.qcow2"][..],
        &["io", "--disk", "path=a.qcow2,backing_files=on"],
    ] {
        let line = world.ringdisk(arguments).refused(1);
        assert!(
            line.contains("header extension at header byte 112 has 4 bytes"),
            "{line}"
        );
    }
}

#[test]
fn check_info_and_read_only_open_change_nothing() {
    let world = World::new();
    world.qemu_create("a.qcow2", "lazy_refcounts=on", "16M");
    // The dirty bit: a writable open would rebuild refcounts.
    world.patch("a.qcow2", 72, &1_u64.to_be_bytes());
    let before = world.bytes("a.qcow2");
    world.ringdisk(&["image", "check", "a.qcow2"]);
    let info = world.ringdisk(&["image", "info", "a.qcow2"]).success();
    assert!(info.contains("cleanly shut down: no"), "{info}");
    world
        .io("path=a.qcow2,readonly=on", &["read -P 0 0 1M"])
        .success();
    assert!(world.bytes("a.qcow2") == before, "the image was changed");
}

/// An image with a leaked cluster and, if `corrupt`, a data cluster that counts as free.
fn damaged(world: &World, corrupt: bool) {
    world.qemu_create("a.qcow2", "compat=1.1", "16M");
    world
        .qemu_io(&["-f", "qcow2", "a.qcow2"], &["write -P 7 0 1M"])
        .success();
    let image = world.bytes("a.qcow2");
    let clusters = image.len() as u64 / 65536;
    world.patch("a.qcow2", clusters * 65536, &[0; 65536]);
    world.patch("a.qcow2", refcount_offset(&image, clusters), &1_u16.to_be_bytes());
    if corrupt {
        let last = refcount_offset(&image, clusters - 1);
        world.patch("a.qcow2", last, &0_u16.to_be_bytes());
    }
}

#[test]
fn repair_fixes_and_reports_only_what_was_requested() {
    for (corrupt, what, code, leaks, corruptions) in [
        (false, "leaks", 0, 1, 0),
        (false, "all", 0, 1, 0),
        (true, "leaks", 2, 1, 0),
        (true, "all", 0, 1, 2),
    ] {
        let world = World::new();
        damaged(&world, corrupt);
        std::fs::copy(world.path("a.qcow2"), world.path("b.qcow2")).expect("a copy");
        let ours = world.ringdisk(&["image", "check", "-r", what, "--json", "a.qcow2"]);
        assert_eq!(ours.code, Some(code), "{ours:?}");
        let ours = json(&ours.stdout);
        for (key, value) in [("leaks-fixed", leaks), ("corruptions-fixed", corruptions)] {
            assert_eq!(ours[key], value, "{what}: {key}");
        }
        let theirs = world.qemu("qemu-img", &["check", "-r", what, "--output=json", "b.qcow2"]);
        if corrupt {
            // QEMU mends no leaks where it would have to rebuild, and rebuilds where we mend in place.
            let code = if what == "all" { 0 } else { 1 };
            assert_eq!(theirs.code, Some(code), "{theirs:?}");
        } else {
            assert_eq!(theirs.code, Some(code), "{theirs:?}");
            assert_eq!(json(&theirs.stdout)["leaks-fixed"], leaks, "{what}");
        }
        assert_eq!(world.qemu("qemu-img", &["check", "a.qcow2"]).code, Some(code));
        world
            .qemu_io(&["-f", "qcow2", "a.qcow2"], &["read -P 7 0 1M"])
            .success();
    }
    let world = World::new();
    damaged(&world, false);
    let said = world
        .ringdisk(&["image", "check", "--repair", "leaks", "a.qcow2"])
        .success();
    let expected = "The following inconsistencies were found and repaired:\n\n    1 leaked clusters\n    0 corruptions\n";
    assert!(said.starts_with(expected), "{said}");
    assert!(said.contains("No errors were found on the image."), "{said}");
}

#[test]
fn repair_leaves_damage_beyond_refcounts_and_says_why() {
    let world = World::new();
    damaged(&world, true);
    let image = world.bytes("a.qcow2");
    let l2 = be_u64(&image, be_u64(&image, 40) as usize) & 0x00ff_ffff_ffff_fe00;
    world.patch("a.qcow2", l2 + 8, &(1_u64 << 40).to_be_bytes());
    let before = world.bytes("a.qcow2");
    for what in ["leaks", "all"] {
        let said = world.ringdisk(&["image", "check", "-r", what, "a.qcow2"]);
        assert_eq!(said.code, Some(2), "{said:?}");
        let last = said.stdout.lines().last().unwrap_or_default();
        assert!(
            last.starts_with("Nothing was repaired, the image was not changed: L2 table at 0x")
                && last.contains("restore a backup"),
            "{said:?}"
        );
        assert!(world.bytes("a.qcow2") == before, "the image was changed");
    }
}

#[test]
fn repair_leaks_says_when_only_corruption_is_left() {
    let world = World::new();
    damaged(&world, true);
    let repair = |what| world.ringdisk(&["image", "check", "-r", what, "a.qcow2"]);
    assert!(!repair("leaks").stdout.contains("Nothing was repaired"));
    let before = world.bytes("a.qcow2");
    let said = repair("leaks");
    assert_eq!(said.code, Some(2), "{said:?}");
    let last = "Nothing was repaired, the image was not changed: no cluster is leaked; use --repair all to \
                repair corruption.";
    assert_eq!(said.stdout.lines().last(), Some(last), "{said:?}");
    assert!(world.bytes("a.qcow2") == before, "the image was changed");
    repair("all").success();
}

/// An entry with 8 bytes of extra data, where version 3 demands 16. QEMU rewrites the table; see the page of differences.
#[test]
fn repair_leaves_snapshot_table_entries_to_qemu_img() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    world
        .qemu("qemu-img", &["snapshot", "-c", "a", "a.qcow2"])
        .success();
    let image = world.bytes("a.qcow2");
    let table = be_u64(&image, 64) as usize;
    let mut entry = image[table..table + 48].to_vec();
    entry[36..40].copy_from_slice(&8_u32.to_be_bytes());
    // QEMU writes 24 bytes of extra data; id and name follow.
    entry.extend_from_slice(&image[table + 64..table + 66]);
    entry.resize(128, 0);
    world.patch("a.qcow2", table as u64, &entry);
    let before = world.bytes("a.qcow2");
    let said = world.ringdisk(&["image", "check", "-r", "all", "a.qcow2"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(
        said.stdout.contains("snapshot 0 has 8 bytes of extra data"),
        "{said:?}"
    );
    let last = said.stdout.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("Nothing was repaired, the image was not changed: ")
            && last.contains("`qemu-img check -r all`"),
        "{last}"
    );
    assert!(world.bytes("a.qcow2") == before, "the image was changed");
    world
        .qemu("qemu-img", &["check", "-r", "all", "a.qcow2"])
        .success();
    world.ringdisk(&["image", "check", "a.qcow2"]).success();
}

#[test]
fn image_info_describes_an_unsupported_image() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    world.patch("a.qcow2", 72, &(1_u64 << 63).to_be_bytes());
    assert_eq!(world.qemu("qemu-img", &["info", "a.qcow2"]).code, Some(1));
    let info = json(&world.ringdisk(&["image", "info", "--json", "a.qcow2"]).success());
    assert!(
        info["unsupported"]
            .as_str()
            .is_some_and(|why| why.contains("bit 63")),
        "{info}"
    );
}

/// Follows howto-trouble for a truncated image: extend it by the size of the disk.
#[test]
fn truncated_image_is_sound_once_extended() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "16M");
    world
        .qemu_io(&["-f", "qcow2", "a.qcow2"], &["write -P 7 0 1M"])
        .success();
    let len = world.bytes("a.qcow2").len() as u64;
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(world.path("a.qcow2"));
    let file = file.expect("the image");
    file.set_len(len - (100 << 10)).expect("cut");
    let said = world.ringdisk(&["image", "check", "--repair", "all", "a.qcow2"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stdout.contains("Nothing was repaired"), "{said:?}");
    file.set_len(len + (16 << 20))
        .expect("longer by the size of the disk");
    world.ringdisk(&["image", "check", "a.qcow2"]).success();
    world
        .io("path=a.qcow2", &["read -P 7 0 896k", "read -P 0 960k 64k"])
        .success();
    world.assert_flawless("a.qcow2");
}
