//! Machines that run, with a kernel of a few bytes: its console, its CPUs, disks it never lets go, and how it fails.
#![expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringdisk_gen::kernel::{self, GREETING};
use ringdisk_gen::kvm;
use ringdisk_gen::patience::{PATIENCE, wait_for, wait_for_end, wait_until};

use crate::world::{Ended, World, exists};

/// A world with the kernel `tiny` and an image, if this host's KVM runs as much as that. If not, it is said and counted.
/// The program under test has no part in finding out.
pub(crate) fn machines(test: &str) -> Option<World> {
    if let Err(why) = kvm::runs_tiny_kernels() {
        println!("cannot run here: {test}, because {why}");
        return None;
    }
    let world = World::new();
    fs::write(world.path("tiny"), kernel::tiny()).expect("a file");
    world.ringdisk(&["image", "create", "disk.qcow2", "1M"]).success();
    Some(world)
}

pub(crate) const TINY: [&str; 5] = ["run", "--kernel", "tiny", "--memory", "32M"];

/// A command line that asks the kernel for nothing; the default one has letters that it obeys.
pub(crate) const IDLE: [&str; 2] = ["--cmdline", " "];

/// A machine; killed when dropped.
pub(crate) struct Running(Option<Child>);

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        Self(Some(command.spawn().expect("run ringdisk")))
    }

    fn machine(world: &World, arguments: &[&str]) -> Self {
        let mut command = world.ringdisk_command();
        command.args(TINY).args(arguments);
        if !arguments.contains(&"--cmdline") {
            command.args(IDLE);
        }
        Self::start_piped(command)
    }

    fn start_piped(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::start(command)
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("a child")
    }

    pub(crate) fn signal(&mut self, name: &str) {
        let pid = self.child().id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), &pid]).status();
        assert!(sent.expect("run kill").success());
    }

    /// Waits for its end.
    pub(crate) fn ended(mut self) -> Ended {
        wait_for_end(self.child());
        let child = self.0.take().expect("a child");
        child.wait_with_output().expect("its output").into()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let ended = child.try_wait();
            let threads = threads(child.id());
            child.kill().expect("kill the machine");
            let output = child.wait_with_output().expect("reap the machine");
            if std::thread::panicking() {
                let said = String::from_utf8_lossy(&output.stderr);
                println!(
                    "the machine, before the test failed: {ended:?}; its log:\n{said}\nits threads:\n{threads}"
                );
            }
        }
    }
}

/// Where each thread of a process waits: its name, the kernel's function and the system call.
fn threads(process: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{process}/task"));
    let lines = tasks.into_iter().flatten().flatten().map(|task| {
        let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        format!(
            "{} {} {}\n",
            read("comm").trim(),
            read("wchan"),
            read("syscall").trim()
        )
    });
    lines.collect()
}

/// The console's client: what it says is obeyed.
fn client(path: &Path) -> UnixStream {
    let stream = wait_for("console", || UnixStream::connect(path).ok());
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Reads until a letter comes.
fn read_until(mut stream: &UnixStream, letter: u8) {
    let mut byte = [0];
    while byte != [letter] {
        stream.read_exact(&mut byte).expect("it answers");
    }
}

/// Says a letter until it comes back: the guest reads then. One that restarts loses what it has not read.
fn hear(mut stream: &UnixStream, letter: u8) {
    let until = Instant::now() + PATIENCE;
    stream
        .set_read_timeout(Some(Duration::from_secs(3)))
        .expect("a timeout");
    let mut byte = [0];
    stream.write_all(&[letter]).expect("it reads");
    while byte != [letter] {
        match stream.read_exact(&mut byte) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                stream.write_all(&[letter]).expect("it reads");
            }
            Err(error) => panic!("it does not answer: {error}"),
        }
    }
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
}

/// Has the guest restart, and reads its greeting.
fn restart(mut stream: &UnixStream) {
    stream.write_all(b"r").expect("it reads");
    let mut said = vec![0; GREETING.len()];
    stream.read_exact(&mut said).expect("it starts again");
    assert_eq!(said, GREETING.as_bytes());
}

#[test]
fn pvh_kernel_runs_and_powers_off_on_any_number_of_cpus() {
    let Some(world) = machines("a kernel that begins by PVH") else {
        return;
    };
    for cpus in ["1", "4", "32"] {
        // What was in the file before goes.
        fs::write(world.path("console"), vec![b'x'; 4096]).expect("a file");
        let arguments = [
            &TINY[..],
            &["--cpus", cpus, "--serial", "file=console", "--cmdline", "ab cq"],
        ];
        world.ringdisk(&arguments.concat()).success();
        let said = fs::read_to_string(world.path("console")).expect("text");
        assert_eq!(said, format!("{GREETING}ab c"), "{cpus} CPUs");
    }
    let refused = world.ringdisk(&[&TINY[..], &["--cpus", "33", "--serial", "off"]].concat());
    assert_eq!(refused.refused(2), "the number of CPUs is 33; expected 1 to 32");
}

/// Firmware begins as a PVH kernel does, without a command line, and again when the guest restarts.
#[test]
fn firmware_begins_and_begins_again_at_a_restart() {
    let Some(world) = machines("firmware") else {
        return;
    };
    let mut command = world.ringdisk_command();
    command.args([
        "run",
        "--firmware",
        "tiny",
        "--memory",
        "32M",
        "--serial",
        "socket=console",
    ]);
    command.args(["--disk", "path=disk.qcow2"]);
    let machine = Running::start_piped(command);
    let console = client(&world.path("console"));
    hear(&console, b'1');
    restart(&console);
    hear(&console, b'2');
    (&console).write_all(b"q").expect("it reads");
    machine.ended().success();
}

#[test]
fn socket_console_serves_in_turn_and_never_blocks_the_guest() {
    let Some(world) = machines("a console on a socket") else {
        return;
    };
    let path = world.path("console");
    // A leftover of one that was killed.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    let machine = Running::machine(&world, &["--serial", "socket=console"]);
    wait_for("socket of our own", || {
        let mode = path.metadata().ok()?.permissions().mode();
        (mode & 0o777 == 0o600).then_some(())
    });
    let first = client(&path);
    hear(&first, b'1');
    drop(first);
    // One that does not read loses what there is no room for, and the guest goes on at once.
    let mut deaf = client(&path);
    hear(&deaf, b'2');
    deaf.write_all(b"l").expect("it reads");
    std::thread::sleep(Duration::from_millis(500));
    drop(deaf);
    let begun = Instant::now();
    let third = client(&path);
    hear(&third, b'3');
    let took = begun.elapsed();
    assert!(
        took < Duration::from_secs(20),
        "the guest stood still for {took:?}"
    );
    // A restart keeps the client.
    restart(&third);
    hear(&third, b'4');
    // One that never reads while much is printed does not hold the guest's end up.
    (&third).write_all(b"lq").expect("it reads");
    machine.ended().success();
    assert!(!exists(&path), "the socket was left behind");
    let mut rest = Vec::new();
    (&third).read_to_end(&mut rest).expect("its end");
}

#[test]
fn console_error_names_its_path() {
    let Some(world) = machines("consoles that cannot be had") else {
        return;
    };
    fs::write(world.path("plain"), b"").expect("a file");
    for (serial, said) in [
        (
            "socket=plain",
            "plain exists and is not a socket; choose another path",
        ),
        (
            "socket=missing/s",
            "cannot bind socket missing/s: No such file or directory (os error 2)",
        ),
        (
            "file=missing/f",
            "cannot set up the console at missing/f: No such file or directory (os error 2)",
        ),
    ] {
        let ended = world.ringdisk(&[&TINY[..], &["--serial", serial]].concat());
        assert_eq!(ended.refused(1), said);
    }
}

/// Method: the guest ejects its disk when its console says so, not when it is asked to.
#[test]
fn disk_remove_waits_for_eject_or_restart() {
    let Some(world) = machines("disks that a guest does not let go") else {
        return;
    };
    world
        .ringdisk(&["image", "create", "other.qcow2", "1M"])
        .success();
    let machine = Running::machine(
        &world,
        &[
            "--serial",
            "socket=console",
            "--control",
            "control",
            "--disk",
            "path=disk.qcow2,id=one",
        ],
    );
    let console = client(&world.path("console"));
    hear(&console, b'1');
    let ctl =
        |arguments: &[&str]| world.ringdisk(&[&["ctl", "--json", "--socket", "control"], arguments].concat());
    let read = |disk: &str| world.io(&format!("path={disk}"), &["read 0 512"]);
    let is_free = |disk: &str| read(disk).code == Some(0);
    let begun = Instant::now();
    let line = ctl(&["disk-remove", "one"]).refused(1);
    assert_eq!(
        line,
        "the guest has not released disk one within 10 s; the request stays pending, and the disk is removed when it does"
    );
    assert!(begun.elapsed() >= Duration::from_secs(10));
    assert!(ctl(&["info"]).success().contains(r#""removing":true"#));
    assert!(!is_free("disk.qcow2"), "the guest has it");
    // Who asks again is heard and waits again, and is answered when it happens.
    (&console).write_all(b"w").expect("it reads");
    read_until(&console, b'w');
    let asked = ctl(&["disk-remove", "one"]);
    assert_eq!(asked.success(), "{\"id\":\"one\",\"ok\":true}\n");
    // It is closed when it is answered.
    read("disk.qcow2").success();
    assert_eq!(
        ctl(&["disk-remove", "one"]).refused(1),
        "there is no disk `one`; there are: none"
    );
    // A slot with nothing in it: the guest may say what it likes.
    (&console).write_all(b"e").expect("it reads");
    hear(&console, b'2');

    // Unasked: that is a removal too.
    ctl(&["disk-add", "--disk", "path=disk.qcow2,id=one"]).success();
    (&console).write_all(b"e").expect("it reads");
    wait_for("closed disk", || is_free("disk.qcow2").then_some(()));
    let info = ctl(&["info"]).success();
    assert!(info.contains(r#""disks":[]"#), "{info}");

    // One that was asked for is gone after a restart, the other one is there.
    ctl(&["disk-add", "--disk", "path=disk.qcow2,id=one"]).success();
    ctl(&["disk-add", "--disk", "path=other.qcow2"]).success();
    ctl(&["pause"]).success();
    let line = ctl(&["disk-remove", "one"]).refused(1);
    assert_eq!(
        line,
        "the guest is paused; disk one is removed after `resume`, when the guest releases it"
    );
    ctl(&["resume"]).success();
    (&console).write_all(b"r").expect("it reads");
    wait_for("closed disk", || is_free("disk.qcow2").then_some(()));
    hear(&console, b'3');
    let info = wait_for("machine", || {
        let info = ctl(&["info"]);
        (info.code == Some(0)).then_some(info.stdout)
    });
    assert!(
        info.contains("other.qcow2") && !info.contains("\"one\""),
        "{info}"
    );
    (&console).write_all(b"q").expect("it reads");
    machine.ended().success();
    for disk in ["disk.qcow2", "other.qcow2"] {
        world.assert_flawless(disk);
        read(disk).success();
    }
}

#[test]
fn disk_add_says_when_slots_run_out_and_leaves_no_trace() {
    let Some(world) = machines("slots that run out") else {
        return;
    };
    let machine = Running::machine(
        &world,
        &["--serial", "off", "--control", "control", "--cmdline", "h"],
    );
    let ctl =
        |arguments: &[&str]| world.ringdisk(&[&["ctl", "--json", "--socket", "control"], arguments].concat());
    wait_until("machine", || ctl(&["info"]).code == Some(0));
    for index in 0..32 {
        world.sparse_file(&format!("d{index}"), 1 << 20);
        let disk = format!("path=d{index},image_type=raw,id={index}");
        let added = ctl(&["disk-add", "--disk", &disk]);
        if index < 31 {
            let address = format!("0000:00:{:02x}.0", index + 1);
            assert!(added.success().contains(&address), "{address}");
        } else {
            let line = added.refused(1);
            assert_eq!(
                line,
                "cannot add disk 31: all 31 slots of the PCI bus are in use; remove a disk first"
            );
        }
    }
    // Nobody has the one that found no slot.
    world.io("path=d31,image_type=raw", &["write 0 512"]).success();
    // A raw disk grows here, too.
    ctl(&["disk-resize", "7", "2M"]).success();
    assert_eq!(world.path("d7").metadata().expect("a file").len(), 2 << 20);
    let mut machine = machine;
    machine.signal("TERM");
    machine.ended().success();
}

#[test]
fn snapshots_of_a_machines_disk_are_those_of_its_image() {
    let Some(world) = machines("snapshots of a machine's disk") else {
        return;
    };
    let disk = "path=disk.qcow2,id=one";
    world.io("path=disk.qcow2", &["write -P 1 0 64k"]).success();
    let mut machine = Running::machine(
        &world,
        &["--serial", "off", "--control", "control", "--disk", disk],
    );
    let ctl =
        |arguments: &[&str]| world.ringdisk(&[&["ctl", "--json", "--socket", "control"], arguments].concat());
    wait_until("machine", || ctl(&["info"]).code == Some(0));
    let created = ctl(&["snapshot-create", "one", "first"]).success();
    assert_eq!(created, "{\"ok\":true,\"snapshot\":\"1\"}\n");
    ctl(&["pause"]).success();
    ctl(&["snapshot-create", "one", "second"]).success();
    let listed = ctl(&["snapshot-list", "one"]).success();
    assert!(
        listed.contains("\"first\"") && listed.contains("\"second\""),
        "{listed}"
    );
    // A pause does not take the disk from its guest.
    let line = ctl(&["snapshot-apply", "one", "first"]).refused(1);
    assert!(
        line.starts_with("cannot apply a snapshot to disk one: the disk may be in use"),
        "{line}"
    );
    ctl(&["snapshot-apply", "one", "first", "--force"]).success();
    ctl(&["resume"]).success();
    ctl(&["snapshot-delete", "one", "name=first"]).success();
    let line = ctl(&["snapshot-delete", "one", "name=first"]).refused(1);
    assert_eq!(
        line,
        "cannot delete a snapshot of disk one: there is no snapshot name=first"
    );
    let line = ctl(&["snapshot-create", "two", "a"]).refused(1);
    assert_eq!(line, "there is no disk `two`; there are: one");
    machine.signal("TERM");
    machine.ended().success();
    world.assert_flawless("disk.qcow2");
    let shown = "path=disk.qcow2,readonly=on,snapshot=name=second";
    world.io(shown, &["read -P 1 0 64k"]).success();
}

/// The disk becomes smaller and larger; the machine shows its size, and what was given up is zeros.
#[test]
fn disk_of_a_machine_is_resized_in_both_directions() {
    let Some(world) = machines("disks that are resized") else {
        return;
    };
    world.io("path=disk.qcow2", &["write -P 1 0 1M"]).success();
    world.sparse_file("raw", 1 << 20);
    let mut machine = Running::machine(
        &world,
        &[
            "--serial",
            "off",
            "--control",
            "control",
            "--disk",
            "path=disk.qcow2,id=one",
            "path=raw,image_type=raw,id=raw",
        ],
    );
    let ctl =
        |arguments: &[&str]| world.ringdisk(&[&["ctl", "--json", "--socket", "control"], arguments].concat());
    wait_until("machine", || ctl(&["info"]).code == Some(0));
    let line = ctl(&["disk-resize", "one", "100k"]).refused(1);
    assert_eq!(
        line,
        "cannot resize disk one to 102400 bytes: it has 1048576 bytes and would become smaller; 946176 bytes of data past \
         102400 would be lost; shrink the file systems and partitions in it first, then use force"
    );
    let line = ctl(&["disk-resize", "raw", "512k", "--force"]).refused(1);
    assert_eq!(
        line,
        "cannot resize disk raw to 524288 bytes: its image is raw; only QCOW2 images become smaller while they are served"
    );
    let line = ctl(&["disk-resize", "one", "0", "--force"]).refused(1);
    assert!(
        line.contains("the new size is 0 bytes; expected a multiple of 512"),
        "{line}"
    );
    let sizes = [("100k", 102_400), ("200k", 204_800), ("300k", 307_200)];
    for ((size, bytes), more) in sizes.into_iter().zip([&["--force"][..], &["--force"], &[]]) {
        let answer = ctl(&[&["disk-resize", "one", size], more].concat()).success();
        assert_eq!(
            answer,
            format!("{{\"id\":\"one\",\"ok\":true,\"size\":{bytes}}}\n")
        );
        let info = ctl(&["info"]).success();
        assert!(info.contains(&format!("\"size\":{bytes}")), "{info}");
    }
    machine.signal("TERM");
    machine.ended().success();
    world.assert_flawless("disk.qcow2");
    world
        .io("path=disk.qcow2", &["read -P 1 0 100k", "read -P 0 100k 200k"])
        .success();
}

#[test]
fn disks_get_their_given_slot_or_a_free_one() {
    let Some(world) = machines("disks in slots") else {
        return;
    };
    for name in ["a", "b", "c", "d"] {
        world.sparse_file(name, 1 << 20);
    }
    let raw = |name: &str, more: &str| format!("path={name},image_type=raw{more}");
    let disks = [
        raw("a", ""),
        raw("b", ",pci_device_id=1"),
        raw("c", ",pci_device_id=9"),
    ];
    let mut arguments = vec!["--serial", "off", "--control", "control", "--cmdline", "h"];
    for disk in &disks {
        arguments.extend(["--disk", disk]);
    }
    let mut machine = Running::machine(&world, &arguments);
    let ctl =
        |arguments: &[&str]| world.ringdisk(&[&["ctl", "--json", "--socket", "control"], arguments].concat());
    wait_until("machine", || ctl(&["info"]).code == Some(0));
    let info = ctl(&["info"]).success();
    for (name, slot) in [("a", "02"), ("b", "01"), ("c", "09")] {
        let disk = info
            .split("{\"address\"")
            .find(|disk| disk.contains(&format!("\"id\":\"{name}\"")));
        let disk = disk.unwrap_or_default();
        assert!(disk.contains(&format!("0000:00:{slot}.0")), "{name}: {info}");
    }
    let taken = ctl(&["disk-add", "--disk", &raw("d", ",pci_device_id=9")]).refused(1);
    assert_eq!(
        taken,
        "cannot add disk d: slot 9 of the PCI bus is in use; choose another pci_device_id, from 1 to 31"
    );
    let added = ctl(&["disk-add", "--disk", &raw("d", ",pci_device_id=31")]);
    assert!(added.success().contains("0000:00:1f.0"));
    machine.signal("TERM");
    machine.ended().success();
}

/// Each queue takes descriptors; the machine raises its soft limit to the hard one.
#[test]
fn machine_raises_its_descriptor_limit_for_many_queues() {
    let Some(world) = machines("machines with many queues") else {
        return;
    };
    world
        .ringdisk(&["image", "create", "other.qcow2", "1M"])
        .success();
    let mut command = Command::new("prlimit");
    command
        .arg("--nofile=128:4096")
        .arg(env!("CARGO_BIN_EXE_ringdisk"));
    command
        .args(TINY)
        .args(["--cpus", "32", "--serial", "off", "--cmdline", "q"]);
    for disk in ["disk", "other"] {
        command.args(["--disk", &format!("path={disk}.qcow2,num_queues=32")]);
    }
    let output = command.current_dir(world.path(".")).stdin(Stdio::null()).output();
    Ended::from(output.expect("prlimit, of util-linux")).success();
}

/// The machine, its disks and its control socket go on. Method: one limit after the other, so that each step misses one.
#[test]
fn disk_add_fails_cleanly_when_descriptors_run_out() {
    let Some(world) = machines("machines without descriptors") else {
        return;
    };
    for index in 0..8 {
        let name = format!("d{index}.qcow2");
        world.ringdisk(&["image", "create", &name, "1M"]).success();
    }
    let ctl =
        |arguments: &[&str]| world.ringdisk(&[&["ctl", "--json", "--socket", "control"], arguments].concat());
    for limit in 64..80 {
        let mut command = Command::new("prlimit");
        command
            .arg(format!("--nofile={limit}:{limit}"))
            .arg(env!("CARGO_BIN_EXE_ringdisk"));
        command
            .args(TINY)
            .args(["--serial", "off", "--control", "control", "--cmdline", "h"]);
        command.current_dir(world.path(".")).stdin(Stdio::null());
        let mut machine = Running::start_piped(command);
        wait_until("machine", || ctl(&["info"]).code == Some(0));
        let refused = (0..8).find_map(|index| {
            let added = ctl(&["disk-add", "--disk", &format!("path=d{index}.qcow2,id={index}")]);
            (added.code != Some(0)).then(|| (index, added.refused(1)))
        });
        let (index, line) = refused.expect("none has room for eight");
        assert!(line.contains("Too many open files"), "{limit}: {line}");
        // It is not there, it was closed as it should be, and nobody has it.
        let name = format!("d{index}.qcow2");
        assert!(!ctl(&["info"]).success().contains(&name));
        world.io(&format!("path={name}"), &["write 0 512"]).success();
        machine.signal("TERM");
        let ended = machine.ended();
        assert_eq!(
            (ended.code, ended.stderr.contains("panicked")),
            (Some(0), false),
            "{limit}: {ended:?}"
        );
    }
}

/// Method: `Seccomp` and `NoNewPrivs` of each thread in `/proc`.
#[test]
fn sandbox_option_decides_if_guest_threads_are_confined() {
    let Some(world) = machines("confined machines") else {
        return;
    };
    for (sandbox, filtered) in [("on", "2"), ("off", "0")] {
        let arguments = [
            "--serial",
            "socket=console",
            "--control",
            "control",
            "--cpus",
            "2",
            "--sandbox",
            sandbox,
        ];
        let mut machine =
            Running::machine(&world, &[&arguments[..], &["--disk", "path=disk.qcow2"]].concat());
        let console = client(&world.path("console"));
        hear(&console, b'1');
        world.sparse_file("later", 1 << 20);
        let disk = "path=later,image_type=raw,num_queues=2";
        world
            .ringdisk(&["ctl", "--socket", "control", "disk-add", "--disk", disk])
            .success();
        let mut found = Vec::new();
        let tasks = format!("/proc/{}/task", machine.child().id());
        for task in fs::read_dir(tasks).expect("its threads") {
            let status = task.expect("a thread").path().join("status");
            // Those that answer the control socket's clients come and go.
            let Ok(status) = fs::read_to_string(status) else {
                continue;
            };
            let field = |name: &str| {
                let line = status
                    .lines()
                    .find_map(|line| line.strip_prefix(name))
                    .expect("a field");
                line.trim().to_owned()
            };
            let name = field("Name:");
            if name.starts_with("cpu ") || name.starts_with("queue ") {
                let state = (field("Seccomp:"), field("NoNewPrivs:"));
                assert_eq!(state.0, filtered, "{name}, --sandbox {sandbox}");
                assert_eq!(state.1, if filtered == "2" { "1" } else { "0" }, "{name}");
                found.push(name);
            }
        }
        found.sort();
        assert_eq!(found, ["cpu 0", "cpu 1", "queue 0", "queue 0", "queue 1"]);
        // They do what they are for.
        (&console).write_all(b"e").expect("it reads");
        hear(&console, b'2');
        wait_for("closed disk", || {
            (world.io("path=disk.qcow2", &["read 0 512"]).code == Some(0)).then_some(())
        });
        (&console).write_all(b"q").expect("it reads");
        machine.ended().success();
    }
}

#[test]
fn unrunnable_code_is_reported_and_a_triple_fault_restarts() {
    let Some(world) = machines("guests that KVM cannot run") else {
        return;
    };
    let arguments = [
        "--serial",
        "file=console",
        "--cmdline",
        "j",
        "--disk",
        "path=disk.qcow2",
    ];
    let line = world.ringdisk(&[&TINY[..], &arguments].concat()).refused(1);
    assert!(
        line.starts_with("KVM stopped CPU 0: it cannot run this guest's code"),
        "{line}"
    );
    world.assert_flawless("disk.qcow2");
    let mut machine = Running::machine(&world, &["--serial", "file=again", "--cmdline", "f"]);
    wait_for("restarts", || {
        let said = fs::read_to_string(world.path("again")).ok()?;
        (said.matches(GREETING).count() >= 3).then_some(())
    });
    machine.signal("TERM");
    let ended = machine.ended();
    let said = format!("{ended:?}");
    ended.success();
    assert!(said.contains("a triple fault"), "{said}");
    assert!(said.contains("restarts within a second of its start"), "{said}");
}

/// A guest that fails at once must not occupy a CPU of the host, and a signal is heard between two machines.
#[test]
fn fast_restarts_are_slowed_down_or_end_with_no_reboot() {
    let Some(world) = machines("guests that restart at once") else {
        return;
    };
    let greetings = |name: &str| {
        let said = fs::read_to_string(world.path(name)).unwrap_or_default();
        said.matches(GREETING).count()
    };
    for letter in ["f", "r"] {
        let arguments = ["--serial", "file=once", "--no-reboot", "--cmdline", letter];
        world.ringdisk(&[&TINY[..], &arguments].concat()).success();
        assert_eq!(greetings("once"), 1, "{letter}");
    }
    let mut machine = Running::machine(&world, &["--serial", "file=console", "--cmdline", "f"]);
    wait_for("restarts", || (greetings("console") >= 4).then_some(()));
    let counting = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    let restarts = greetings("console");
    // One that a busy host makes run for a second is none that restarts at once, and four after it are not waited for.
    let most = 4 * (1 + counting.elapsed().as_secs() as usize);
    assert!(restarts <= most, "{restarts} restarts");
    let begun = Instant::now();
    machine.signal("TERM");
    machine.ended().success();
    assert!(begun.elapsed() < Duration::from_secs(20));
}

/// Also a guest that is paused, or that never listens to its button.
#[test]
fn reset_restarts_the_guest_or_ends_it_with_no_reboot() {
    let Some(world) = machines("guests that are reset") else {
        return;
    };
    let serial = ["--serial", "socket=console", "--control", "control"];
    let ctl = |what: &str| {
        let done = world.ringdisk(&["ctl", "--json", "--socket", "control", what]);
        assert_eq!(done.success(), "{\"ok\":true}\n", "{what}");
    };
    let mut machine = Running::machine(&world, &serial);
    let mut console = client(&world.path("console"));
    hear(&console, b'1');
    ctl("power-button");
    hear(&console, b'2');
    for pauses in [false, true] {
        if pauses {
            world
                .ringdisk(&["ctl", "--json", "--socket", "control", "pause"])
                .success();
        }
        ctl("reset");
        // What was said before may be on its way.
        let mut said = String::new();
        while !said.ends_with(GREETING) {
            let mut byte = [0];
            console.read_exact(&mut byte).expect("it starts again");
            said.push(char::from(byte[0]));
        }
        hear(&console, b'3');
    }
    machine.signal("TERM");
    machine.ended().success();

    let machine = Running::machine(&world, &[&serial[..], &["--no-reboot"]].concat());
    hear(&client(&world.path("console")), b'1');
    ctl("reset");
    machine.ended().success();
}

/// Otherwise the guest takes the time of a pause for a hang.
#[test]
fn pause_is_reported_to_the_guest_clock() {
    const STOPPED: u8 = 2;
    let Some(world) = machines("the clock of a guest that was paused") else {
        return;
    };
    for sandbox in ["on", "off"] {
        let mut machine = Running::machine(
            &world,
            &[
                "--serial",
                "socket=console",
                "--control",
                "control",
                "--sandbox",
                sandbox,
            ],
        );
        let mut console = client(&world.path("console"));
        hear(&console, b'1');
        let mut flags = |letters: &[u8]| {
            let mut digit = [0];
            console.write_all(letters).expect("it reads");
            console.read_exact(&mut digit).expect("it answers");
            digit[0] - b'0'
        };
        let ctl = |what: &str| {
            world
                .ringdisk(&["ctl", "--json", "--socket", "control", what])
                .success()
        };
        assert_eq!(flags(b"s"), 0, "no clock yet");
        ctl("pause");
        ctl("resume");
        assert_eq!(flags(b"s"), 0, "no clock to be told");
        assert_eq!(flags(b"ks") & STOPPED, 0, "sandbox {sandbox}");
        ctl("pause");
        ctl("resume");
        assert_eq!(flags(b"s") & STOPPED, STOPPED, "sandbox {sandbox}");
        machine.signal("TERM");
        machine.ended().success();
    }
}

#[test]
fn memory_error_names_missing_huge_pages_and_nodes() {
    let Some(world) = machines("memory that the host does not have") else {
        return;
    };
    let memory = |text: &str| {
        let arguments = [
            "run",
            "--kernel",
            "tiny",
            "--serial",
            "off",
            "--cmdline",
            "q",
            "--memory",
            text,
        ];
        world.ringdisk(&arguments)
    };
    let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free.map_or(0, |text| text.trim().parse().expect("a number"));
    let bytes = (free + 32) * (2 << 20);
    let line = memory(&format!("size={bytes},hugepages=on")).refused(1);
    let said =
        format!("cannot allocate {bytes} bytes of guest memory in huge pages of 2097152 bytes; the host has");
    assert!(line.starts_with(&said), "{line}");
    assert!(line.ends_with("Cannot allocate memory (os error 12)"), "{line}");
    let line = memory("size=64M,hugepages=on,hugepage_size=64K").refused(1);
    assert!(
        line.contains("in huge pages of 65536 bytes; the host has none of them free"),
        "{line}"
    );
    let line = memory("size=64M,host_numa_node=1023").refused(1);
    assert!(
        line.starts_with("cannot allocate guest memory on the host's NUMA node 1023"),
        "{line}"
    );
    memory("size=64M,host_numa_node=0").success();
}

/// Method: a mount namespace whose `/dev` holds what a host may have in place of KVM.
#[test]
fn kvm_error_tells_missing_forbidden_and_foreign_devices_apart() {
    let world = World::new();
    fs::write(world.path("tiny"), kernel::tiny()).expect("a file");
    world.ringdisk(&["image", "create", "disk.qcow2", "1M"]).success();
    // Others may come here, too.
    fs::copy(env!("CARGO_BIN_EXE_ringdisk"), world.path("ringdisk")).expect("a copy");
    fs::set_permissions(world.path("."), fs::Permissions::from_mode(0o755)).expect("its mode");
    let script = |setup: &str, become_other: &str| {
        format!(
            "mount -t tmpfs none /dev && mknod /dev/null c 1 3 && {setup} && \
             exec {become_other} ./ringdisk run --kernel tiny --serial off --memory 32M"
        )
    };
    let run = |script: &str| -> Ended {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", script])
            .current_dir(world.path("."));
        command
            .stdin(Stdio::null())
            .output()
            .expect("unshare, of util-linux")
            .into()
    };
    let probe = run("mount -t tmpfs none /dev && mknod /dev/null c 1 3");
    if probe.code != Some(0) {
        println!(
            "cannot run here: KVM missing, forbidden or something else, because only root can play it: {}",
            probe.stderr.trim()
        );
        return;
    }
    let other = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    for (setup, become_other, said) in [
        (
            "true",
            "",
            "/dev/kvm is missing: load the module kvm-intel or kvm-amd",
        ),
        // A device that no driver answers for.
        (
            "mknod /dev/kvm c 10 253",
            "",
            "/dev/kvm is missing: load the module kvm-intel or kvm-amd",
        ),
        (
            "mknod -m 600 /dev/kvm c 10 232",
            other,
            "/dev/kvm cannot be opened by this user: join the group kvm",
        ),
        (
            "mknod -m 666 /dev/kvm c 1 3",
            "",
            "/dev/kvm is not the KVM device",
        ),
    ] {
        let line = run(&script(setup, become_other)).refused(1);
        assert!(line.starts_with(said), "{setup}: {line}");
    }
}
