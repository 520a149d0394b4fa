//! Command lines that make no sense, files that are not there, and what is said about them.

use crate::world::{World, exists};

#[test]
fn help_and_version_succeed() {
    let world = World::new();
    let version = world.ringdisk(&["--version"]).success();
    assert!(version.starts_with("ringdisk "));
    for command in [
        &["vhost-user"][..],
        &["run"],
        &["io"],
        &["image"],
        &["image", "check"],
        &["ublk", "add"],
    ] {
        let said = world.ringdisk(&[command, &["--version"]].concat()).success();
        let version = version.trim_start_matches("ringdisk ");
        assert!(said.ends_with(version), "{command:?}: {said}");
    }
    for level in ["error", "INFO", "off", "debug,qcow=trace"] {
        world.ringdisk(&["--log", level, "--version"]).success();
    }
    for command in [
        &["--help"][..],
        &["vhost-user", "--help"],
        &["io", "--help"],
        &["image", "create", "--help"],
        &["image", "bitmap", "--help"],
        &["image", "bitmap", "merge", "--help"],
        &["image", "snapshot", "--help"],
        &["image", "key", "--help"],
        &["image", "key", "remove", "--help"],
        &["image", "snapshot", "delete", "--help"],
        &["ctl", "snapshot-create", "--help"],
        &["ctl", "snapshot-apply", "--help"],
        &["ublk", "snapshot", "--help"],
        &["ublk", "snapshot", "apply", "--help"],
    ] {
        assert!(
            world.ringdisk(command).success().contains("Usage: ringdisk"),
            "{command:?}"
        );
    }
    let of_machines = ["vhost_user", "socket", "pci_device_id", "iommu"];
    for (command, machine) in [
        (&["vhost-user", "--help"][..], false),
        (&["io", "--help"], false),
        (&["run", "--help"], true),
        (&["ctl", "disk-add", "--help"], true),
    ] {
        let help = world.ringdisk(command).success();
        for key in ["path", "queue_affinity", "l2_cache", "lock_granularity"] {
            assert!(help.contains(&format!("\n  {key} ")), "{key} is not in the help");
        }
        for key in of_machines {
            let found = help.contains(&format!("\n  {key} "));
            assert_eq!(found, machine, "{command:?}: {key}");
        }
    }
}

#[test]
fn invalid_command_line_is_one_line_and_exit_code_2() {
    let world = World::new();
    for (arguments, said) in [
        (&[][..], "a command is missing"),
        (&["frobnicate"], "frobnicate"),
        (&["io"], "--disk"),
        (&["io", "--dsk", "path=x"], "--disk"),
        (
            &["io", "--disk", "path=x,sprase=on"],
            "unknown key `sprase` (did you mean `sparse`?)",
        ),
        (
            &["io", "--disk", "path=x,num_queues=0"],
            "num_queues takes a number from 1 to 256",
        ),
        (
            &["io", "--disk", "path=x,iommu=off"],
            "`iommu` does not apply here",
        ),
        (
            &["io", "--disk", "vhost_user=on,socket=s"],
            "`vhost_user` does not apply here: it names the vhost-user backend of a disk of `ringdisk run`",
        ),
        (
            &["vhost-user", "--socket", "s", "--disk", "vhost_user=on,socket=t"],
            "pass a server its socket with --socket",
        ),
        (&["io", "--disk", "readonly=on"], "`path` is missing"),
        (&["io", "--disk", "path=x", "--queues", "0"], "--queues"),
        (
            &["io", "--disk", "path=x", "-c", "frob 0 1"],
            "command \"frob\" not found",
        ),
        (
            &["io", "--disk", "path=x", "-c", "length", "-c", "read 0"],
            "bad argument count 1",
        ),
        (&["--log", "x=y", "io", "--disk", "path=x"], "not a log filter"),
        (
            &["--log", "banana", "io", "--disk", "path=x"],
            "--log: `banana` is not a log filter (there is no level `banana`)",
        ),
        (
            &["io", "--disk", "path=a,b.qcow2"],
            "`b.qcow2`: expected key=value; a value with a comma goes in double quotes",
        ),
        (
            &["io", "--disk", "path=a,,b.qcow2"],
            "a value with a comma goes in double quotes",
        ),
        (
            &["io", "--disk", "path=a,vhost_user=on"],
            "`vhost_user=on` is for `ringdisk run`",
        ),
        (
            &["image", "check", "-U", "--repair", "all", "x"],
            "cannot be used with",
        ),
        (
            &[
                "vhost-user",
                "--socket",
                "s",
                "--disk",
                "path=a",
                "--disk",
                "path=b",
            ],
            "1 --socket for 2 --disk",
        ),
        (&["vhost-user", "--disk", "path=a"], "--socket"),
        (
            &[
                "vhost-user",
                "--socket",
                "s",
                "--disk",
                "path=a,poll_us=0",
                "--workers",
                "2",
            ],
            "--workers with poll_us of disk a: it is a setting of a worker that serves one queue",
        ),
        (
            &[
                "vhost-user",
                "--socket",
                "s",
                "--disk",
                "path=a",
                "--workers",
                "2@",
            ],
            "`` names no CPUs; expected a list such as 0-3,8",
        ),
        (
            &[
                "vhost-user",
                "--socket",
                "s",
                "--disk",
                "path=a",
                "--workers",
                "0",
            ],
            "`0` is no number of workers; expected 1 to 1024",
        ),
        (&["image"], "missing"),
        (&["image", "create", "x.qcow2"], "the size is missing"),
        (&["image", "create", "x.qcow2", "1MB"], "size `1MB`"),
        (
            &["image", "create", "-o", "foo=1", "x.qcow2", "1M"],
            "unknown option `foo`",
        ),
        (
            &["image", "create", "-o", "cluster_size=3", "x.qcow2", "1M"],
            "cluster_size=3",
        ),
        (
            &[
                "image",
                "create",
                "-o",
                "compat=0.10,refcount_bits=8",
                "x.qcow2",
                "1M",
            ],
            "refcount_bits",
        ),
        (
            &["image", "create", "-o", "backing_file=b", "x.qcow2", "1M"],
            "backing_fmt",
        ),
        (&["image", "check"], "<PATH>"),
        (&["image", "bitmap", "add", "x.qcow2"], "<NAME>"),
        (&["image", "bitmap", "merge", "x.qcow2", "a"], "<SOURCE>"),
        (
            &["image", "bitmap", "add", "x.qcow2", "a", "--granularity", "much"],
            "--granularity",
        ),
        (&["image", "snapshot", "create", "x.qcow2"], "<NAME>"),
        (&["image", "snapshot", "apply", "x.qcow2"], "<SNAPSHOT>"),
        (
            &["image", "key", "add", "--secret-file", "s", "x.qcow2"],
            "--new-secret-file",
        ),
        (&["image", "key", "remove", "x.qcow2"], "--secret-file"),
        (
            &["image", "create", "-o", "encrypt.format=luks", "x.qcow2", "1M"],
            "--secret-file is missing",
        ),
        (
            &["image", "create", "--secret-file", "s", "x.qcow2", "1M"],
            "pass -o encrypt.format=luks",
        ),
        (
            &["image", "create", "-o", "encrypt.format=aes", "x.qcow2", "1M"],
            "encrypt.format takes luks",
        ),
        (&["ctl", "--socket", "s", "snapshot-create", "a"], "<NAME>"),
        (&["ctl", "--socket", "s", "snapshot-apply", "a"], "<SNAPSHOT>"),
        (
            &["ctl", "--socket", "s", "snapshot-delete", "a", "b", "--force"],
            "--force",
        ),
        (&["ublk", "snapshot", "create", "0"], "<NAME>"),
        (&["ublk", "snapshot", "delete", "x", "a"], "/dev/ublkb"),
        (&["ublk", "snapshot", "apply", "0"], "<SNAPSHOT>"),
    ] {
        let line = world.ringdisk(arguments).refused(2);
        assert!(line.contains(said), "{arguments:?}: {line}");
    }
    assert!(!exists(&world.path("x.qcow2")), "a refused command left a file");
}

#[test]
fn failed_open_names_the_file_with_exit_code_1() {
    let world = World::new();
    world.sparse_file("raw.img", 1 << 20);
    std::fs::create_dir(world.path("folder")).expect("a folder");
    for (arguments, said) in [
        (
            &["io", "--disk", "path=none"][..],
            "cannot open none: No such file",
        ),
        (
            &["io", "--disk", "path=none,image_type=raw"],
            "cannot open none: No such file",
        ),
        (&["io", "--disk", "path=folder"], "folder"),
        (&["io", "--disk", "path=raw.img"], "image_type=raw"),
        (&["io", "--disk", "path=raw.img,image_type=qcow2"], "raw.img"),
        (&["image", "info", "none"], "cannot open none: No such file"),
        (&["image", "info", "raw.img"], "not a QCOW2 image"),
        (&["image", "key", "list", "raw.img"], "not a QCOW2 image"),
        (&["image", "check", "raw.img"], "cannot check raw.img"),
        (
            &["image", "bitmap", "add", "none", "a"],
            "cannot open none: No such file",
        ),
        (&["image", "bitmap", "clear", "raw.img", "a"], "not a QCOW2 image"),
        (
            &["image", "snapshot", "create", "none", "a"],
            "cannot open none: No such file",
        ),
        (
            &["image", "snapshot", "delete", "raw.img", "a"],
            "not a QCOW2 image",
        ),
        (
            &["image", "snapshot", "list", "raw.img"],
            "raw.img: not a QCOW2 image",
        ),
        (
            &["image", "create", "nowhere/x.qcow2", "1M"],
            "cannot create nowhere/x.qcow2: No such file",
        ),
        (
            &[
                "image",
                "create",
                "-o",
                "backing_file=none,backing_fmt=raw",
                "x",
                "1M",
            ],
            "backing file none",
        ),
        (
            &["vhost-user", "--socket", "nowhere/s", "--disk", "path=none"],
            "cannot bind socket nowhere/s",
        ),
        (
            &["vhost-user", "--socket", "raw.img", "--disk", "path=none"],
            "raw.img exists and is not a socket",
        ),
        (
            &["vhost-user", "--socket", "s", "--disk", "path=none"],
            "cannot open none: No such file",
        ),
    ] {
        let line = world.ringdisk(arguments).refused(1);
        assert!(line.contains(said), "{arguments:?}: {line}");
    }
    assert!(
        !exists(&world.path("x")) && !exists(&world.path("s")),
        "a failed command left something"
    );
}

#[test]
fn missing_cpu_is_refused_with_the_allowed_list() {
    let world = World::new();
    world.sparse_file("raw.img", 1 << 20);
    let disk = "path=raw.img,image_type=raw,queue_affinity=[0@[1023]]";
    let line = world.ringdisk(&["io", "--disk", disk]).refused(1);
    let status = std::fs::read_to_string("/proc/self/status").expect("our status");
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .expect("our CPUs")
        .trim();
    let expected = format!("cannot run a worker on CPUs [1023]; it may run on CPUs {allowed}: ");
    assert!(line.contains(&expected), "{line}");
    let shared = [
        "vhost-user",
        "--socket",
        "s",
        "--disk",
        "path=raw.img,image_type=raw",
        "--workers",
        "1@1023",
    ];
    let line = world.ringdisk(&shared).refused(1);
    assert!(line.contains(&expected), "{line}");
    assert!(!exists(&world.path("s")), "the socket is left");
}

/// It refuses before it asks the driver, which may be missing here, and before the image's lock names this process.
#[test]
fn ublk_add_refuses_an_image_given_twice() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    std::os::unix::fs::symlink("a.qcow2", world.path("b.qcow2")).expect("a link");
    let line = world
        .ringdisk(&["ublk", "add", "--disk", "path=a.qcow2", "--disk", "path=b.qcow2"])
        .refused(2);
    assert!(
        line.starts_with("--disk path=a.qcow2 and --disk path=b.qcow2 are the same file"),
        "{line}"
    );
}

#[test]
fn ublk_add_refuses_images_in_no_folder() {
    let world = World::new();
    let line = world.ringdisk(&["ublk", "add", "--images", "nowhere"]).refused(2);
    assert_eq!(
        line,
        "--images nowhere: it is no folder; expected one with images, or for them"
    );
}

#[test]
fn ublk_add_needs_a_number_to_find_a_device_by() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let line = world
        .ringdisk(&["ublk", "add", "--or-recover", "--disk", "path=a.qcow2"])
        .refused(2);
    assert!(line.starts_with("--or-recover needs --id N"), "{line}");
}

#[test]
fn character_device_is_refused_as_an_image() {
    let world = World::new();
    let line = world
        .ringdisk(&["io", "--disk", "path=/dev/null,image_type=raw"])
        .refused(1);
    assert!(
        line.contains("/dev/null is neither a regular file nor a block device"),
        "{line}"
    );
}

#[test]
fn backing_file_is_refused_unless_allowed() {
    let world = World::new();
    world.qemu_create("base.qcow2", "compat=1.1", "1M");
    world.qemu_create("top.qcow2", "backing_file=base.qcow2,backing_fmt=qcow2", "1M");
    let line = world.ringdisk(&["io", "--disk", "path=top.qcow2"]).refused(1);
    assert!(
        line.contains("top.qcow2") && line.contains("backing_files=on"),
        "{line}"
    );
    world
        .io("path=top.qcow2,backing_files=on", &["read -P 0 0 1M"])
        .success();
}

#[test]
fn failed_open_changes_nothing() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    // An incompatible feature bit that nobody has defined.
    world.patch("a.qcow2", 72, &(1_u64 << 40).to_be_bytes());
    let before = world.bytes("a.qcow2");
    let line = world.ringdisk(&["io", "--disk", "path=a.qcow2"]).refused(1);
    assert!(line.contains("a.qcow2") && line.contains("40"), "{line}");
    assert!(world.bytes("a.qcow2") == before, "the image was changed");
}

#[test]
fn readme_lists_every_key_and_is_short() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = std::fs::read_to_string(path).expect("the README");
    assert!(readme.lines().count() <= 120);
    for key in ringdisk::disk_config::KEYS {
        if !matches!(key.scope, ringdisk::disk_config::Scope::Elsewhere(_)) {
            assert!(
                readme.contains(&format!("`{}`", key.name)),
                "{} is not in the README",
                key.name
            );
        }
    }
}
