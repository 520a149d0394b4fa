//! `ringdisk run`, as far as it goes without a KVM that works: what it refuses, and what it says.

use std::fs;
use std::process::Stdio;

use ringdisk_gen::kvm;
use ringdisk_gen::patience::wait_for;

use crate::machine::Running;
use crate::world::{World, be_u64};

/// A world with an image and something that passes for a kernel until it is loaded.
fn world() -> World {
    let world = World::new();
    world.ringdisk(&["image", "create", "disk.qcow2", "1M"]).success();
    world
        .ringdisk(&["image", "create", "other.qcow2", "1M"])
        .success();
    fs::write(world.path("kernel"), vec![0x5A; 4096]).expect("a file");
    world
}

const BASE: [&str; 5] = ["run", "--kernel", "kernel", "--serial", "off"];

fn refused(world: &World, more: &[&str], code: i32) -> String {
    world.ringdisk(&[&BASE, more].concat()).refused(code)
}

#[test]
fn run_refuses_invalid_options_before_opening_anything() {
    let world = world();
    let taps: Vec<String> = (0..31).map(|index| format!("tap=tap{index}")).collect();
    let taps: Vec<&str> = ["--rng", "--net"]
        .into_iter()
        .chain(taps.iter().map(String::as_str))
        .collect();
    for (arguments, said) in [
        (
            &["--disk", "path=disk.qcow2", "--disk", "path=./disk.qcow2"][..],
            "--disk path=disk.qcow2 and --disk path=./disk.qcow2 are the same file; expected one writer",
        ),
        (
            &["--disk", "path=disk.qcow2,id=a", "path=other.qcow2,id=a"],
            "two disks have the id `a`",
        ),
        (
            &[
                "--disk",
                "path=disk.qcow2,pci_device_id=3",
                "path=other.qcow2,pci_device_id=3",
            ],
            "two disks have pci_device_id=3; expected a different slot for each",
        ),
        (
            &["--disk", "path=disk.qcow2,num_queues=2"],
            "disk disk.qcow2 has num_queues=2 for 1 CPUs; expected at most one queue per CPU",
        ),
        (
            &[
                "--disk",
                "vhost_user=on,socket=s",
                "--disk",
                "vhost_user=on,socket=s",
            ],
            "socket s is given more than once; each disk needs its own socket",
        ),
        (
            &["--disk", "vhost_user=on,socket=s,bw_size=1M,bw_refill_time=1"],
            "`bw_size` contradicts `vhost_user=on`: `vhost_user=on` is for `ringdisk run`",
        ),
        (
            &["--disk", "path=disk.qcow2,id=cloud-init", "--cloud-init", "none"],
            "two disks have the id `cloud-init`",
        ),
        (
            &["--net", "tap=a,mac=1"],
            "--net: `1` is no MAC address of one interface",
        ),
        (&taps[..], "32 devices by --net and --rng; expected 31 at most"),
        (&["--memory", "lots"], "--memory lots: "),
        (
            &["--memory", "size=1G,sise=2G"],
            "--memory size=1G,sise=2G: `sise=2G`: expected SIZE, or size=SIZE",
        ),
        (
            &["--memory", "1G,hugepage_size=2M"],
            "hugepage_size needs hugepages=on",
        ),
        (
            &["--memory", "1G,hugepages=on,hugepage_size=3M"],
            "hugepage_size is 3145728 bytes; expected a power of two",
        ),
        (
            &["--serial", "nowhere"],
            "--serial nowhere: expected tty, off, file=PATH or socket=PATH",
        ),
        (&["--cpus", "many"], "--cpus"),
        (&["--cpus", "64"], "the number of CPUs is 64; expected 1 to 32"),
        (
            &["--control", &"x".repeat(200)],
            "xxx is longer than 107 bytes; choose a shorter one",
        ),
        (
            &["--serial", &format!("socket={}", "x".repeat(200))],
            "xxx is longer than 107 bytes; choose a shorter one",
        ),
    ] {
        let line = world.ringdisk(&[&BASE[..3], arguments].concat()).refused(2);
        assert!(line.contains(said), "{arguments:?}: {line}");
    }
    assert!(world.ringdisk(&["run"]).refused(2).contains("--kernel"));
    let both = refused(&world, &["--firmware", "kernel"], 2);
    assert!(
        both.contains("'--kernel <FILE>' cannot be used with '--firmware <FILE>'"),
        "{both}"
    );
}

#[test]
fn run_names_missing_files_and_invalid_values() {
    let world = world();
    let line = world
        .ringdisk(&["run", "--kernel", "vmlinuz", "--serial", "off"])
        .refused(1);
    assert_eq!(
        line,
        "cannot read the kernel vmlinuz: No such file or directory (os error 2)"
    );
    let line = world
        .ringdisk(&["run", "--kernel", ".", "--serial", "off"])
        .refused(1);
    assert_eq!(line, "cannot read the kernel .: it is not a regular file");
    let firmware = |path| {
        world
            .ringdisk(&["run", "--firmware", path, "--serial", "off"])
            .refused(1)
    };
    assert_eq!(
        firmware("CLOUDHV.fd"),
        "cannot read the firmware CLOUDHV.fd: No such file or directory (os error 2)"
    );
    assert_eq!(
        firmware("kernel"),
        "kernel is not firmware for this machine: it is no ELF file; expected an ELF file with a PVH note, such as EDK II's `CLOUDHV.fd` \
         (Debian: cloudhv-efi-x86-64)"
    );
    let line = refused(&world, &["--initramfs", "initrd"], 1);
    assert_eq!(
        line,
        "cannot read the initramfs initrd: No such file or directory (os error 2)"
    );
    let line = refused(&world, &["--cmdline", &"x".repeat(2048)], 2);
    assert_eq!(line, "the kernel's command line has 2048 bytes; at most 2047 fit");
    let line = refused(&world, &["--disk", "path=missing.qcow2"], 1);
    assert!(line.contains("missing.qcow2"), "{line}");
    let line = refused(&world, &["--cpus", "0"], 2);
    assert_eq!(line, "the number of CPUs is 0; expected 1 to 32");
    let line = refused(&world, &["--memory", "1M"], 2);
    assert!(
        line.contains("the guest's memory is 1048576 bytes; expected a multiple of 4096"),
        "{line}"
    );
    let line = refused(&world, &["--memory", "100000T"], 1);
    assert!(
        line.starts_with("cannot allocate 109951162777600000 bytes of guest memory"),
        "{line}"
    );
}

/// Without KVM the machine says how to get it; with it, that the file is no kernel. Both close the images cleanly.
#[test]
fn failed_start_closes_the_images() {
    let world = world();
    let line = refused(&world, &["--disk", "path=disk.qcow2"], 1);
    let no_kvm = kvm::runs_tiny_kernels().is_err() && line.to_lowercase().contains("kvm");
    assert!(
        no_kvm || line.contains("kernel is not a bootable kernel"),
        "{line}"
    );
    let checked = world.ringdisk(&["image", "check", "disk.qcow2"]).success();
    assert!(checked.contains("No errors"), "{checked}");
    // Nobody has it locked any more.
    world
        .ringdisk(&["io", "--disk", "path=disk.qcow2", "-c", "write 0 4k"])
        .success();
}

/// Method: opening rebuilds the reference counts of an unclosed image, here from 65,536 tables of 64 KiB, all holes.
#[test]
fn signal_ends_a_machine_while_it_opens_images() {
    const TABLES: u64 = 1 << 16;
    const CLUSTER: u64 = 1 << 16;
    const COPIED: u64 = 1 << 63;
    let world = world();
    world.qemu_create("dirty.qcow2", "lazy_refcounts=on", "32T");
    let first = 1 << 30;
    let l1_at = be_u64(&world.bytes("dirty.qcow2"), 40);
    let entries = (0..TABLES).flat_map(|index| (COPIED | (first + index * CLUSTER)).to_be_bytes());
    world.patch("dirty.qcow2", l1_at, &entries.collect::<Vec<_>>());
    world.patch("dirty.qcow2", 79, &[1]);
    let file = fs::OpenOptions::new()
        .write(true)
        .open(world.path("dirty.qcow2"))
        .expect("the image");
    file.set_len(first + TABLES * CLUSTER).expect("its length");
    drop(file);

    let mut command = world.ringdisk_command();
    command.args(BASE).args(["--disk", "path=dirty.qcow2"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut machine = Running::start(command);
    let files = format!("/proc/{}/fd", machine.child().id());
    let image = world.path("dirty.qcow2").canonicalize().expect("the image");
    wait_for("open image", || {
        let mut files = fs::read_dir(&files).ok()?.flatten();
        files
            .any(|file| fs::read_link(file.path()).is_ok_and(|target| target == image))
            .then_some(())
    });
    machine.signal("TERM");
    let ended = machine.ended();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended.stderr.contains("exiting before all images were open"),
        "{ended:?}"
    );
}

#[test]
fn run_help_lists_the_disk_keys() {
    let world = World::new();
    let help = world.ringdisk(&["run", "--help"]).success();
    assert!(
        help.contains("--initramfs") && help.contains("\n  queue_affinity "),
        "{help}"
    );
}

/// The example of `docs/embedding.md`; its queue continues where it was taken back. Cargo builds it with the tests.
#[test]
fn embed_example_reads_a_disk_through_its_own_transport() {
    let world = world();
    world
        .ringdisk(&["io", "--disk", "path=disk.qcow2", "-c", "write -P 0xab 0 512"])
        .success();
    let ringdisk = std::path::Path::new(env!("CARGO_BIN_EXE_ringdisk"));
    let example = ringdisk.with_file_name("examples").join("embed");
    let output = std::process::Command::new(example)
        .arg(world.path("disk.qcow2"))
        .output()
        .expect("the example, which `cargo build --examples` brings");
    let said = String::from_utf8_lossy(&output.stdout);
    let expected = [1, 2].map(|count| {
        format!(
            "status 0, 1048576 bytes, the disk begins with [ab, ab, ab, ab, ab, ab, ab, ab]; taken {count}, used {count}\n"
        )
    });
    assert_eq!(said, expected.concat(), "{output:?}");
    let checked = world.ringdisk(&["image", "check", "disk.qcow2"]).success();
    assert!(checked.contains("No errors"), "{checked}");
}
