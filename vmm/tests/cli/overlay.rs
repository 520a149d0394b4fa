//! `overlay=temporary` on the command line: what is refused, and that it keeps an image of every kind as it is.

use std::fs;

use crate::world::World;

#[test]
fn image_snapshot_and_raw_file_stay_as_they_are_below_an_overlay() {
    let world = World::new();
    world.qemu_create("a.qcow2", "cluster_size=64k", "1M");
    world
        .qemu_io(&["-f", "qcow2", "a.qcow2"], &["write -P 17 0 1M"])
        .success();
    world
        .qemu("qemu-img", &["snapshot", "-c", "s", "a.qcow2"])
        .success();
    world
        .qemu_io(&["-f", "qcow2", "a.qcow2"], &["write -P 34 0 1M"])
        .success();
    fs::write(world.path("a.img"), vec![51; 1 << 20]).expect("a raw image");
    fs::create_dir(world.path("overlays")).expect("a folder");
    for (disk, byte) in [
        ("path=a.qcow2", 34),
        ("path=a.qcow2,snapshot=name=s", 17),
        ("path=a.qcow2,snapshot=s,readonly=off", 17),
        ("path=a.img,image_type=raw,l2_cache=1M", 51),
    ] {
        let disk = format!("{disk},overlay=temporary,overlay_dir=overlays");
        let name = disk["path=".len()..].split(',').next().expect("a name");
        let before = world.bytes(name);
        // Twice, as nothing is left of the first time.
        for _ in 0..2 {
            let read = |byte: u64, rest: &str| format!("read -P {byte} {rest}");
            let commands = [
                read(byte, "0 1M"),
                "write -P 68 4k 8k".to_owned(),
                "discard 256k 256k".to_owned(),
                "flush".to_owned(),
                read(68, "4k 8k"),
                read(byte, "12k 244k"),
                read(0, "256k 256k"),
                read(byte, "512k 512k"),
            ];
            let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
            let said = world.io(&disk, &commands).success();
            assert!(!said.contains("verification failed"), "{disk}: {said}");
        }
        assert!(world.bytes(name) == before, "{disk}: the image has changed");
        let mut left = fs::read_dir(world.path("overlays")).expect("a folder");
        assert!(left.next().is_none(), "{disk}: something is left");
    }
}

#[test]
fn overlay_lies_in_the_folder_that_was_given_or_that_of_the_environment() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let before = world.bytes("a.qcow2");
    let refused = |keys: &str, folder: &str| {
        let disk = format!("path=a.qcow2,overlay=temporary{keys}");
        let mut command = world.ringdisk_command();
        command
            .env("TMPDIR", folder)
            .args(["io", "--disk", &disk, "-c", "read 0 512"]);
        let ended: crate::world::Ended = command.output().expect("run ringdisk").into();
        ended.refused(1)
    };
    assert_eq!(
        refused("", "/nowhere/t"),
        "cannot make a temporary file in /nowhere/t: No such file or directory (os error 2)"
    );
    let given = refused(",overlay_dir=/nowhere/d", "/var/tmp");
    assert!(given.contains("temporary file in /nowhere/d"), "{given}");
    let unfit = refused(",overlay_dir=/proc", "/var/tmp");
    assert!(
        unfit.contains("/proc has no unnamed files (O_TMPFILE); choose a folder on ext4"),
        "{unfit}"
    );
    assert!(world.bytes("a.qcow2") == before, "the image has changed");
}

#[test]
fn overlay_beside_what_needs_it_to_last_is_refused_before_anything_is_opened() {
    let world = World::new();
    let overlay = "path=none,overlay=temporary";
    let readonly = format!("{overlay},readonly=on");
    for (arguments, said) in [
        (
            &["io", "--disk", "path=none,overlay_dir=/var/tmp"][..],
            "`overlay_dir` is given without `overlay`, which takes temporary",
        ),
        (
            &["io", "--disk", "path=none,overlay=off"],
            "`overlay=off`: overlay takes temporary",
        ),
        (
            &["io", "--disk", &readonly],
            "`overlay=temporary` contradicts `readonly=on`",
        ),
        (
            &["vhost-user", "--restartable", "--socket", "s", "--disk", overlay],
            "`overlay=temporary` contradicts `--restartable`",
        ),
        (
            &["vhost-user", "--takeover", "--socket", "s", "--disk", overlay],
            "`overlay=temporary` contradicts `--takeover`",
        ),
        (
            &[
                "ublk",
                "add",
                "--id",
                "7",
                "--or-recover",
                "--recovery",
                "off",
                "--disk",
                overlay,
            ],
            "`overlay=temporary` contradicts `--or-recover`",
        ),
    ] {
        let line = world.ringdisk(arguments).refused(2);
        assert!(line.contains(said), "{arguments:?}: {line}");
    }
    // Without the rights to administer devices there is no recovery to be refused.
    if virtio_devices::ublk::may_administer() {
        let line = world.ringdisk(&["ublk", "add", "--disk", overlay]).refused(2);
        assert!(
            line.contains("contradicts `--recovery reissue`") && line.contains("pass --recovery off"),
            "{line}"
        );
    }
}

/// Both are only read; a disk that writes the image itself is not let beside them.
#[test]
fn one_process_serves_several_overlays_of_an_image_and_no_writer_beside_them() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let overlay = "path=a.qcow2,overlay=temporary";
    let arguments = |second: &'static str| {
        let sockets = ["vhost-user", "--socket", "s", "--socket", "nowhere/t"];
        [&sockets[..], &["--disk", overlay, "--disk", second]].concat()
    };
    let line = world.ringdisk(&arguments("path=a.qcow2")).refused(2);
    assert!(
        line.contains("are the same file") && line.contains("overlay=temporary for each"),
        "{line}"
    );
    for shared in ["path=a.qcow2,overlay=temporary", "path=a.qcow2,readonly=on"] {
        // It gets as far as the second socket.
        let line = world.ringdisk(&arguments(shared)).refused(1);
        assert!(line.contains("cannot bind socket nowhere/t"), "{line}");
    }
}
