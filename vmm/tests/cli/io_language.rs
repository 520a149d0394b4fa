//! `ringdisk io` and `qemu-io`, given the same lines on the same images, must say the same and leave the
//! same disk behind.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::world::{Ended, World};

/// Returns the lines that were printed, without those about speed.
fn without_speed(output: &str) -> Vec<&str> {
    output.lines().filter(|line| !line.contains(" ops; ")).collect()
}

/// Runs the lines with both programs, each on an image of its own, and compares everything.
fn compare(disk: &str, qemu: &[&str], create: impl Fn(&World, &str), lines: &[&str]) {
    let world = World::new();
    create(&world, "ours");
    create(&world, "theirs");
    let ours = world.io(&format!("path=ours,{disk}"), lines);
    let theirs = world.qemu_io(&[qemu, &["theirs"]].concat(), lines);
    assert_eq!(without_speed(&ours.stdout), without_speed(&theirs.stdout));
    assert_eq!(ours.code, theirs.code, "{}", ours.stderr);
    let format = qemu.last().expect("-f FORMAT");
    world
        .qemu(
            "qemu-img",
            &["compare", "-f", format, "-F", format, "ours", "theirs"],
        )
        .success();
    if *format == "qcow2" {
        world.assert_flawless("ours");
    }
}

const SCRIPT: [&str; 28] = [
    "length",
    "map",
    "write -P 0xaa 0 64k",
    "read -P 0xaa 0 64k",
    "read -P 0xab 1 100",
    "read -P 0xaa -s 100 -l 50 0 200",
    "read -P 1 -s 100 0 200",
    "read -v 65520 48",
    "read -v -q 3 20",
    "write 1M 0x200",
    "read -v 1M 16",
    "write -P 5 100 1000",
    "map",
    "read -P 5 100 1000",
    "read -P 0xaa 1100 512",
    "write -z 10 20",
    "write -z -u 128k 128k",
    "write -q -P 7 3M 1.5k",
    "readv -P 7 3M 512 1k",
    "writev -P 8 3M 512 512",
    "read -P 8 3M 1k",
    "write -f -P 9 2M 4k",
    "flush",
    "aio_write -q -P 10 256k 64k",
    "aio_write -q -z 320k 64k",
    "aio_flush",
    "read -P 10 256k 64k",
    "read 4194303 1",
];

#[test]
fn io_matches_qemu_io_on_qcow2_images() {
    for options in [
        "cluster_size=64k",
        "cluster_size=512,refcount_bits=64",
        "cluster_size=2M,compat=0.10",
    ] {
        let create = |world: &World, name: &str| world.qemu_create(name, options, "4M");
        compare("image_type=qcow2", &["-f", "qcow2"], create, &SCRIPT);
    }
}

/// A read of every byte value, on a disk whose size is no multiple of a cluster.
#[test]
fn io_dumps_and_odd_sizes_match_qemu_io() {
    let script: Vec<String> = (0..256)
        .map(|byte| format!("write -q -P {byte} {byte} 1"))
        .chain(["length", "read -v 0 256"].map(str::to_owned))
        .collect();
    let script: Vec<&str> = script.iter().map(String::as_str).collect();
    let create = |world: &World, name: &str| world.qemu_create(name, "cluster_size=64k", "67109376");
    compare("image_type=qcow2", &["-f", "qcow2"], create, &script);
}

#[test]
fn io_failures_are_named_like_qemu_io() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    for (line, name) in [
        ("read 1M 512", "read"),
        ("readv 1M 512 512", "readv"),
        ("aio_read 1M 512", "readv"),
        ("write 1M 512", "write"),
        ("write -z 1M 512", "write"),
        ("writev 1M 512", "writev"),
        ("aio_write 1M 512", "aio_write"),
        ("aio_write -z 1M 512", "aio_write"),
        ("discard 1M 512", "discard"),
    ] {
        let lines = [line, "aio_flush"];
        let ours = world.io("path=a.qcow2", &lines).stdout;
        let theirs = world.qemu_io(&["-f", "qcow2", "a.qcow2"], &lines).stdout;
        let start = |said: &str| said.split_once(" failed: ").map(|(start, _)| start.to_owned());
        assert_eq!(start(&ours).as_deref(), Some(name), "{line}: {ours}");
        assert_eq!(start(&ours), start(&theirs), "{line}: {theirs}");
    }
}

#[test]
fn io_matches_qemu_io_on_raw_images() {
    compare(
        "image_type=raw",
        &["-f", "raw"],
        |world, name| world.sparse_file(name, 4 << 20),
        &SCRIPT,
    );
}

#[test]
fn io_matches_qemu_io_with_direct_io() {
    let world = World::new();
    world.sparse_file("raw", 4 << 20);
    let probe = world.io("path=raw,image_type=raw,direct=on", &["length"]);
    assert_eq!(
        probe.code,
        Some(0),
        "the temporary directory needs direct I/O, set TMPDIR: {probe:?}"
    );
    let create = |world: &World, name: &str| world.qemu_create(name, "cluster_size=4k", "4M");
    compare("direct=on", &["-f", "qcow2"], create, &SCRIPT);
}

#[test]
fn aio_writes_over_several_queues_all_arrive() {
    let world = World::new();
    world.qemu_create("a.qcow2", "cluster_size=4k", "16M");
    // Each cluster is written in part by two neighbours, so that queues meet in clusters.
    let writes: Vec<String> = (0..256)
        .map(|n| format!("aio_write -q -P {} {} 6k", n % 255 + 1, n * 6144))
        .collect();
    let mut lines: Vec<&str> = writes.iter().map(String::as_str).collect();
    lines.extend(["aio_flush", "flush"]);
    world.io("path=a.qcow2,num_queues=4", &lines).success();

    let reads: Vec<String> = (0..256)
        .map(|n| format!("read -q -P {} {} 6k", n % 255 + 1, n * 6144))
        .collect();
    let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
    assert_eq!(world.qemu_io(&["-f", "qcow2", "a.qcow2"], &reads).success(), "");
    assert_eq!(world.io("path=a.qcow2,readonly=on", &reads).success(), "");
    world.assert_flawless("a.qcow2");
}

#[test]
fn aio_write_of_partial_sectors_keeps_neighbours() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let writes: Vec<String> = (0..100)
        .map(|n| format!("aio_write -q -P {} {} 100", n + 1, n * 100))
        .collect();
    let reads: Vec<String> = (0..100)
        .map(|n| format!("aio_read -q -P {} {} 100", n + 1, n * 100))
        .collect();
    let lines: Vec<&str> = writes
        .iter()
        .map(String::as_str)
        .chain(["aio_flush"])
        .chain(reads.iter().map(String::as_str))
        .collect();
    assert_eq!(world.io("path=a.qcow2,num_queues=4", &lines).success(), "");
    world.assert_flawless("a.qcow2");
}

#[test]
fn discard_zeroes_its_range_and_leaks_nothing() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "4M");
    let lines = [
        "write -P 1 0 4M",
        "discard 1M 2M",
        "flush",
        "read -P 0 1M 2M",
        "read -P 1 0 1M",
    ];
    world.io("path=a.qcow2", &lines).success();
    world.assert_flawless("a.qcow2");
    world
        .qemu_io(
            &["-f", "qcow2", "a.qcow2"],
            &["read -P 0 1M 2M", "read -P 1 3M 1M"],
        )
        .success();
}

#[test]
fn io_reports_a_failed_command_and_runs_the_rest() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let ended = world.io(
        "path=a.qcow2",
        &["read 1M 1", "read -P 1 0 512", "write -q -P 3 0 1k", "length"],
    );
    assert_eq!(ended.code, Some(1));
    assert_eq!(
        without_speed(&ended.stdout),
        [
            "read failed: the range does not lie inside the disk",
            "Pattern verification failed at offset 0, 512 bytes",
            "read 512/512 bytes at offset 0",
            "1 MiB",
        ]
    );
    let ended = world.io(
        "path=a.qcow2,readonly=on",
        &["write 0 512", "read -q -P 3 0 1k", "aio_read -q -P 4 0 1k"],
    );
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(
        ended.stdout,
        "write failed: the disk is read-only\nPattern verification failed at offset 0, 1024 bytes\n"
    );
}

#[test]
fn io_reads_standard_input_without_commands() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let with_input = |input: &str| -> Ended {
        let mut child = world
            .ringdisk_command()
            .args(["io", "--disk", "path=a.qcow2"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("run ringdisk");
        child
            .stdin
            .take()
            .expect("its input")
            .write_all(input.as_bytes())
            .expect("write to it");
        child.wait_with_output().expect("its output").into()
    };
    assert_eq!(
        with_input("length\n\nwrite -q 0 512\nquit\nlength\n").success(),
        "1 MiB\n"
    );
    let ended = with_input("frob\nlength");
    assert_eq!(
        (ended.code, ended.stdout.lines().last()),
        (Some(1), Some("1 MiB"))
    );
    assert!(ended.stdout.contains("\"frob\" not found"), "{ended:?}");
}

/// A `qemu-io` that has the image open until dropped.
struct QemuHolds(Child);

impl QemuHolds {
    fn new(world: &World, image: &str) -> Self {
        let mut child = Command::new("qemu-io")
            .arg(world.path(image))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("qemu-io is needed by this test (apt-get install qemu-utils)");
        let deadline = Instant::now() + Duration::from_secs(20);
        // The last byte that QEMU locks. To look is not to lock: trying to open could keep it out.
        let lock = format!(":{} 203 203", world.path(image).metadata().expect("stat").ino());
        while !std::fs::read_to_string("/proc/locks")
            .expect("the list of locks")
            .contains(&lock)
        {
            assert!(Instant::now() < deadline, "qemu-io took no lock within 20 s");
            assert!(child.try_wait().expect("wait").is_none(), "qemu-io ended at once");
            std::thread::yield_now();
        }
        Self(child)
    }
}

impl Drop for QemuHolds {
    fn drop(&mut self) {
        self.0.kill().expect("kill qemu-io");
        self.0.wait().expect("reap qemu-io");
    }
}

#[test]
fn every_command_refuses_an_image_locked_by_qemu() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let holder = QemuHolds::new(&world, "a.qcow2");
    let who = format!("qemu-io (process {})", holder.0.id());
    for arguments in [
        &["io", "--disk", "path=a.qcow2"][..],
        &["io", "--disk", "path=a.qcow2,readonly=on"],
        &["image", "info", "a.qcow2"],
        &["image", "check", "a.qcow2"],
        &["image", "create", "a.qcow2", "1M"],
        &["vhost-user", "--socket", "s", "--disk", "path=a.qcow2"],
    ] {
        let line = world.ringdisk(arguments).refused(1);
        assert!(
            line.contains("a.qcow2 is locked") && line.contains(&who),
            "{arguments:?}: {line}"
        );
    }
    for command in ["info", "check"] {
        world
            .ringdisk(&["image", command, "--force-share", "a.qcow2"])
            .success();
    }
    // An overlay can be made beside the writer, which then moves to it; it cannot be used as long as that writes.
    let options = "backing_file=a.qcow2,backing_fmt=qcow2";
    for size in [None, Some("2M")] {
        let create = ["image", "create", "-o", options, "b.qcow2"];
        let create = [&create[..], size.as_slice()].concat();
        world.ringdisk(&create).success();
    }
    let line = world.io("path=b.qcow2,backing_files=on", &["length"]).refused(1);
    assert!(line.contains("a.qcow2 is locked"), "{line}");
    drop(holder);
    assert_eq!(
        world.io("path=b.qcow2,backing_files=on", &["length"]).success(),
        "2 MiB\n"
    );
    world.assert_flawless("a.qcow2");
}

/// The kernel's SIGXFSZ (`ulimit -f`) would end all guests of the process. It comes with system calls, sometimes with io_uring.
#[test]
fn file_size_limit_fails_the_request_not_the_process() {
    let world = World::new();
    let limited = |arguments: &[&str]| -> Ended {
        let mut command = Command::new("prlimit");
        command.arg("--fsize=2097152").arg(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).current_dir(world.path("."));
        command.output().expect("prlimit, of util-linux").into()
    };
    let ended = limited(&["image", "create", "-o", "preallocation=full", "full.qcow2", "16M"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("File too large"), "{ended:?}");
    world
        .ringdisk(&["image", "create", "disk.qcow2", "16M"])
        .success();
    let mut arguments = vec!["io", "--disk", "path=disk.qcow2,direct=on"];
    for line in ["write -P 1 0 4M", "write -P 2 0 64k", "flush", "read -P 2 0 64k"] {
        arguments.extend(["-c", line]);
    }
    let ended = limited(&arguments);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let said = &ended.stdout;
    assert!(
        said.contains("write failed: host I/O failed: File too large"),
        "{ended:?}"
    );
    assert!(said.contains("read 65536/65536 bytes at offset 0"), "{ended:?}");
    assert!(!said.contains("verification failed"), "{ended:?}");
    world.qemu("qemu-img", &["check", "disk.qcow2"]).success();
}
