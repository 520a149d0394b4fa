//! The terminal is as it was found, however a machine ends that had it in raw mode.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ringdisk_gen::kernel::GREETING;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

use ringdisk_gen::patience::wait_for;

use crate::machine::{IDLE, Running, TINY, machines};
use crate::world::World;

/// A terminal: its far end, where a person would sit, and its near one, which programs have.
struct Terminal {
    far: File,
    near: OwnedFd,
}

impl Terminal {
    fn new() -> Self {
        let far = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
        grantpt(&far).expect("its near end");
        unlockpt(&far).expect("its near end");
        let name = ptsname(&far, Vec::new()).expect("its name");
        let near = rustix::fs::open(&*name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty());
        Self {
            far: far.into(),
            near: near.expect("its near end"),
        }
    }

    fn near(&self) -> OwnedFd {
        self.near.try_clone().expect("a descriptor")
    }

    /// The modes as text.
    fn modes(&self) -> String {
        format!("{:?}", tcgetattr(self.near.as_fd()).expect("its modes"))
    }

    fn is_raw(&self) -> bool {
        let modes = tcgetattr(self.near.as_fd()).expect("its modes").local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    fn type_in(&self, keys: &[u8]) {
        (&self.far).write_all(keys).expect("a terminal");
    }

    /// Returns the output of programs, as a person reads it.
    fn read(&self) -> Receiver<Vec<u8>> {
        let (sender, receiver) = channel();
        let mut far = self.far.try_clone().expect("a descriptor");
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = far.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        receiver
    }
}

/// A machine with this terminal.
fn machine(world: &World, terminal: &Terminal, arguments: &[&str], stderr: Stdio) -> Running {
    let mut command = world.ringdisk_command();
    command.args(arguments);
    command
        .stdin(terminal.near())
        .stdout(terminal.near())
        .stderr(stderr);
    Running::start(command)
}

/// Waits until `wanted` was printed.
fn wait_said(said: &Receiver<Vec<u8>>, wanted: &[u8]) {
    let mut all: Vec<u8> = Vec::new();
    while !all.windows(wanted.len()).any(|part| part == wanted) {
        let more = said.recv_timeout(Duration::from_secs(60));
        all.extend(more.unwrap_or_else(|_| panic!("only {:?} was printed", String::from_utf8_lossy(&all))));
    }
}

#[test]
fn terminal_passes_every_key_and_is_restored_at_every_end() {
    let Some(world) = machines("machines on a terminal") else {
        return;
    };
    let greeting = GREETING.trim_end().as_bytes();
    // By itself; by the keys; by each signal.
    for (end, code) in [("itself", 0), ("keys", 0), ("TERM", 0), ("INT", 0), ("HUP", 0)] {
        let terminal = Terminal::new();
        let before = terminal.modes();
        let said = terminal.read();
        let arguments = [&["--log", "info"], &TINY[..], &IDLE].concat();
        let mut machine = machine(&world, &terminal, &arguments, Stdio::piped());
        wait_said(&said, greeting);
        assert!(terminal.is_raw(), "{end}");
        // ^C, ^Z and ^\ reach the guest, and a ^A that was typed twice; nothing is echoed but by it.
        terminal.type_in(b"\x03\x1a\x1c\x01\x01.");
        wait_said(&said, b"\x03\x1a\x1c\x01.");
        match end {
            "itself" => terminal.type_in(b"q"),
            "keys" => terminal.type_in(b"\x01x"),
            signal => machine.signal(signal),
        }
        assert_eq!(machine.ended().code, Some(code), "{end}");
        assert_eq!(terminal.modes(), before, "{end}");
    }
}

#[test]
fn end_keys_work_when_the_guest_reads_nothing() {
    let Some(world) = machines("machines whose guest hears nothing") else {
        return;
    };
    let terminal = Terminal::new();
    let before = terminal.modes();
    let said = terminal.read();
    let machine = machine(
        &world,
        &terminal,
        &[&TINY[..], &["--cmdline", "h"]].concat(),
        Stdio::null(),
    );
    wait_said(&said, GREETING.trim_end().as_bytes());
    for _ in 0..8 {
        terminal.type_in(&[b'.'; 1000]);
    }
    terminal.type_in(b"\x01x");
    assert_eq!(machine.ended().code, Some(0));
    assert_eq!(terminal.modes(), before);
}

#[test]
fn terminal_is_restored_when_a_machine_fails() {
    let Some(world) = machines("failing machines on a terminal") else {
        return;
    };
    std::fs::write(world.path("garbage"), vec![0x5A; 4096]).expect("a file");
    world.sparse_file("large", 64 << 20);
    let start = ["run", "--memory", "32M", "--kernel"];
    for arguments in [
        &["garbage"][..],
        &["tiny", "--initramfs", "large"],
        &["tiny", "--control", "missing/control"],
        &["tiny", "--cmdline", "j"],
    ] {
        let terminal = Terminal::new();
        let before = terminal.modes();
        let _said = terminal.read();
        let machine = machine(&world, &terminal, &[&start, arguments].concat(), Stdio::null());
        assert_eq!(machine.ended().code, Some(1), "{arguments:?}");
        assert_eq!(terminal.modes(), before, "{arguments:?}");
    }
}

/// Nobody reads the guest's output: its CPU waits in a write to the terminal.
#[test]
fn full_terminal_does_not_prevent_a_clean_end() {
    let Some(world) = machines("machines on a terminal that nobody reads") else {
        return;
    };
    let terminal = Terminal::new();
    let before = terminal.modes();
    let arguments = [
        "--cmdline",
        "l",
        "--disk",
        "path=disk.qcow2",
        "--control",
        "control",
    ];
    let mut machine = machine(
        &world,
        &terminal,
        &[&TINY, &arguments[..]].concat(),
        Stdio::null(),
    );
    // It prints until there is no room.
    let mut exits = String::new();
    wait_for("full terminal", || {
        let now = world.ringdisk(&["ctl", "--socket", "control", "info"]).stdout;
        std::thread::sleep(Duration::from_millis(100));
        let still = !now.is_empty() && now == exits;
        exits = now;
        still.then_some(())
    });
    machine.signal("TERM");
    assert_eq!(machine.ended().code, Some(0));
    assert_eq!(terminal.modes(), before);
    world.assert_flawless("disk.qcow2");
}

/// Method: a log that nobody reads blocks the clean end.
#[test]
fn second_signal_ends_a_stuck_machine_and_restores_the_terminal() {
    let Some(world) = machines("machines that cannot end") else {
        return;
    };
    let terminal = Terminal::new();
    let before = terminal.modes();
    let said = terminal.read();
    let (log, full) = std::io::pipe().expect("a pipe");
    let arguments = [&["--log", "info"], &TINY[..], &IDLE].concat();
    let stderr = full.try_clone().expect("a descriptor");
    let mut machine = machine(&world, &terminal, &arguments, stderr.into());
    wait_said(&said, GREETING.trim_end().as_bytes());
    fill(&full);
    machine.signal("TERM");
    // Two that wait are one.
    wait_for("signal that is heard", || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", machine.child().id())).ok()?;
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"))?;
        let pending = u64::from_str_radix(pending.trim(), 16).expect("a mask");
        (pending & 1 << (libc::SIGTERM - 1) == 0).then_some(())
    });
    std::thread::sleep(Duration::from_millis(500));
    assert!(
        machine.child().try_wait().expect("wait").is_none(),
        "it waits for its log"
    );
    assert!(terminal.is_raw());
    machine.signal("TERM");
    assert_eq!(machine.ended().code, Some(1));
    assert_eq!(terminal.modes(), before);
    drop(log);
}

/// Fills a pipe to the last byte.
fn fill(pipe: &std::io::PipeWriter) {
    let fd = pipe.as_fd();
    let flags = rustix::fs::fcntl_getfl(fd).expect("its flags");
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK).expect("its flags");
    for len in [4096, 1] {
        while rustix::io::write(fd, &vec![b'.'; len]).is_ok() {}
    }
    rustix::fs::fcntl_setfl(fd, flags).expect("its flags");
}
