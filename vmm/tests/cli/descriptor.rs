//! Images handed over as an open descriptor, `path=/dev/fd/N`: what the descriptor allows is the limit, though our
//! user may open the file for more.

use crate::world::{Ended, World};

/// Runs `ringdisk` with descriptor 7 as the shell's `redirection` says.
fn run_with(world: &World, redirection: &str, arguments: &[&str]) -> Ended {
    let ringdisk = world.ringdisk_command();
    let script = format!("exec {redirection}; exec \"$0\" \"$@\"");
    let mut command = std::process::Command::new("bash");
    command
        .args(["-c", &script])
        .arg(ringdisk.get_program())
        .args(arguments)
        .current_dir(world.path(""))
        .env_remove("RINGDISK_LOG");
    command.output().expect("bash").into()
}

/// A QCOW2 and a raw disk of 1 MiB, and how each is named by descriptor 7.
fn disks(world: &World) -> [(&'static str, String); 2] {
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    world.sparse_file("b.img", 1 << 20);
    [
        ("a.qcow2", "path=/dev/fd/7".to_owned()),
        ("b.img", "path=/dev/fd/7,image_type=raw".to_owned()),
    ]
}

#[test]
fn fd_disk_works_after_its_file_is_unlinked() {
    let world = World::new();
    for (file, disk) in disks(&world) {
        let commands = [
            "-c",
            "write -P 5 64k 64k",
            "-c",
            "flush",
            "-c",
            "read -P 5 64k 64k",
        ];
        let arguments = [&["io", "--disk", &disk][..], &commands].concat();
        let redirection = format!("7<>{file}; mv {file} kept");
        run_with(&world, &redirection, &arguments).success();
        let format = if file == "b.img" { "raw" } else { "qcow2" };
        let theirs = world.qemu_io(&["-f", format, "kept"], &["read -P 5 64k 64k"]);
        assert!(!theirs.success().contains("failed"), "{file}");

        let redirection = "7<>kept; rm kept".to_owned();
        run_with(&world, &redirection, &arguments).success();
    }
}

#[test]
fn read_only_fd_is_never_opened_for_writing() {
    let world = World::new();
    for (file, disk) in disks(&world) {
        let before = world.bytes(file);
        let proc = disk.replace("/dev/fd", "/proc/self/fd");
        let redirection = format!("7<{file}");
        for disk in [&disk, &proc] {
            for command in [
                &["io", "--disk", disk, "-c", "write -P 1 0 4k"][..],
                &["vhost-user", "--socket", "s", "--disk", disk],
                &["vhost-user", "--sandbox", "off", "--socket", "s", "--disk", disk],
            ] {
                let line = run_with(&world, &redirection, command).refused(1);
                assert!(
                    line.contains("descriptor 7 is open for reading only") && line.contains("readonly=on"),
                    "{line}"
                );
            }
        }
        let readonly = format!("{disk},readonly=on");
        let arguments = ["io", "--disk", &readonly, "-c", "read -P 0 0 1M"];
        run_with(&world, &redirection, &arguments).success();
        assert_eq!(world.bytes(file), before, "{file}");
    }
    let line = run_with(
        &world,
        "<b.img",
        &["io", "--disk", "path=/dev/stdin,image_type=raw"],
    )
    .refused(1);
    assert!(line.contains("descriptor 0 is open for reading only"), "{line}");
    let repair = ["image", "check", "--repair", "all", "/dev/fd/7"];
    let line = run_with(&world, "7<a.qcow2", &repair).refused(1);
    assert!(line.contains("descriptor 7 is open for reading only"), "{line}");
    run_with(&world, "7<a.qcow2", &["image", "check", "/dev/fd/7"]).success();
}

#[test]
fn write_only_fd_is_refused() {
    let world = World::new();
    for (file, disk) in disks(&world) {
        for readonly in ["", ",readonly=on"] {
            let disk = format!("{disk}{readonly}");
            let line = run_with(&world, &format!("7>>{file}"), &["io", "--disk", &disk]).refused(1);
            assert!(line.contains("descriptor 7 is not open for reading"), "{line}");
        }
    }
}

/// The number may be any that the process has opened by then, such as another disk's.
#[test]
fn fd_that_was_not_inherited_is_refused() {
    let world = World::new();
    disks(&world);
    // What we ourselves were started with is not handed on.
    let none = (3..20).map(|number| format!("{number}>&- ")).collect::<String>();
    for number in (3..20).chain([12_345]) {
        let disk = format!("path=/dev/fd/{number},image_type=raw");
        let arguments = [
            "vhost-user",
            "--socket",
            "s",
            "--disk",
            "path=b.img,image_type=raw,readonly=on",
            "--socket",
            "t",
            "--disk",
            &format!("{disk},readonly=on"),
        ];
        for arguments in [&arguments[..], &["io", "--disk", &disk]] {
            let line = run_with(&world, &none, arguments).refused(1);
            let expected = format!("cannot open /dev/fd/{number}: no descriptor {number} was inherited");
            assert!(line.contains(&expected), "{line}");
        }
    }
}

#[test]
fn fd_that_is_no_file_or_block_device_is_refused() {
    let world = World::new();
    for redirection in ["7</dev/null", "7< <(echo)", "7<."] {
        let disk = "path=/dev/fd/7,image_type=raw,readonly=on";
        let line = run_with(&world, redirection, &["io", "--disk", disk]).refused(1);
        assert!(
            line.contains("/dev/fd/7 is neither a regular file nor a block device"),
            "{line}"
        );
    }
}
