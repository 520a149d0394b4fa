//! A folder with one image in it, and programs that are given little to work on it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ringdisk_gen::fingerprint::Fingerprint;
use ringdisk_gen::watch::Watch;

/// The address space of a command, in KiB.
const ADDRESS_SPACE_KIB: u64 = 256 << 10;
/// QEMU's: it needs much to begin with.
const QEMU_ADDRESS_SPACE_KIB: u64 = 4 << 20;
/// The longest time for a command, in seconds.
const SECONDS_MAX: u32 = 30;
/// The exit code of `timeout` if it had to end a command.
const TIMED_OUT: i32 = 124;

/// The image under test.
pub(crate) const CASE: &str = "case.qcow2";

pub(crate) struct World {
    folder: tempfile::TempDir,
    watch: Watch,
    shadow: Watch,
}

/// The end of a command: its exit code and its output.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit code; more than 128 if a signal ended it.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// Returns the message of a command that did nothing but refuse: one line that begins with its name.
    pub(crate) fn refusal(&self) -> Option<&str> {
        let line = self.stderr.strip_prefix("ringdisk: ")?;
        let one = self.code == 1 && self.stdout.is_empty() && line.lines().count() == 1;
        one.then_some(line)
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("sentinel"), vec![7; 1 << 20]).expect("a file");
        Self {
            watch: Watch::new(folder.path()).expect("a watch"),
            shadow: Watch::new(Path::new("/etc/shadow")).expect("a watch on /etc/shadow"),
            folder,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Puts the image there, in place of the last one.
    pub(crate) fn put(&self, bytes: &[u8]) {
        let _none = std::fs::remove_file(self.path(CASE));
        std::fs::write(self.path(CASE), bytes).expect("the image");
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.path(CASE)).expect("the image")
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path(CASE)).expect("the image")
    }

    fn run(&self, what: &str, kib: u64, program: &Path, arguments: &[&str]) -> Ended {
        let limits =
            format!("ulimit -v {kib} && ulimit -c 0 && exec timeout -k 1 {SECONDS_MAX} \"$0\" \"$@\"");
        let output = Command::new("sh")
            .args(["-c", &limits])
            .arg(program)
            .args(arguments)
            .current_dir(self.folder.path())
            .env_remove("RINGDISK_LOG")
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .output()
            .expect("a shell");
        let ended = Ended {
            code: output.status.code().unwrap_or(128),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        assert_ne!(
            ended.code,
            127,
            "{what}: {} cannot be run: {ended:?}",
            program.display()
        );
        ended
    }

    /// Runs `ringdisk`, which must end by itself, in time, within its memory, having opened nothing but the image.
    pub(crate) fn ringdisk(&self, what: &str, arguments: &[&str]) -> Ended {
        self.watch.opened().expect("events");
        let program = Path::new(env!("CARGO_BIN_EXE_ringdisk"));
        let ended = self.run(what, ADDRESS_SPACE_KIB, program, arguments);
        assert_ne!(ended.code, TIMED_OUT, "{what} does not end: {ended:?}");
        assert!((0..=3).contains(&ended.code), "{what}: {ended:?}");
        assert!(!ended.stderr.contains("panicked"), "{what}: {ended:?}");
        let opened = self.watch.opened().expect("events");
        assert!(opened.contains(CASE), "{what}: the watch has missed it");
        let strange: Vec<_> = opened
            .iter()
            .filter(|name| *name != CASE && *name != ".")
            .collect();
        assert!(strange.is_empty(), "{what}: {strange:?} were opened");
        let shadow = self.shadow.opened().expect("events");
        assert!(shadow.is_empty(), "{what}: /etc/shadow was opened");
        ended
    }

    /// Runs `qemu-img`, which may do anything: `None` if it did not end by itself with one of `codes`.
    pub(crate) fn qemu_img(&self, codes: &[i32], arguments: &[&str]) -> Option<Ended> {
        let ended = self.run(
            "qemu-img",
            QEMU_ADDRESS_SPACE_KIB,
            Path::new("qemu-img"),
            arguments,
        );
        codes.contains(&ended.code).then_some(ended)
    }
}
