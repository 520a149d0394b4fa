//! A directory for one test, and the programs that run in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory that goes away with the test.
pub(crate) struct World {
    directory: tempfile::TempDir,
}

/// The end of a program: its exit code and its output.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("UTF-8 on stdout"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8 on stderr"),
        }
    }
}

impl Ended {
    /// Fails the test unless the program exited with 0. Returns its standard output.
    pub(crate) fn success(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.stdout
    }

    /// Fails the test unless the program exited with `code` and said one line that starts with its name.
    /// Returns the rest of the line.
    pub(crate) fn refused(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        let lines: Vec<&str> = self.stderr.lines().collect();
        match lines[..] {
            [line] => line
                .strip_prefix("ringdisk: ")
                .unwrap_or_else(|| panic!("{line:?}"))
                .to_owned(),
            _ => panic!("not one line: {self:?}"),
        }
    }
}

impl World {
    pub(crate) fn new() -> Self {
        Self {
            directory: tempfile::tempdir().expect("a temporary directory"),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// `ringdisk`, in this directory, with an environment that does not change what it does.
    pub(crate) fn ringdisk_command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command
            .current_dir(self.directory.path())
            .env_remove("RINGDISK_LOG")
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn ringdisk(&self, arguments: &[&str]) -> Ended {
        self.ringdisk_command()
            .args(arguments)
            .output()
            .expect("run ringdisk")
            .into()
    }

    /// `ringdisk io` on `disk` with the commands given.
    pub(crate) fn io(&self, disk: &str, commands: &[&str]) -> Ended {
        let mut command = self.ringdisk_command();
        command.args(["io", "--disk", disk]);
        for line in commands {
            command.args(["-c", line]);
        }
        command.output().expect("run ringdisk").into()
    }

    /// One of QEMU's tools, in this directory.
    pub(crate) fn qemu(&self, program: &str, arguments: &[&str]) -> Ended {
        Command::new(program)
            .args(arguments)
            .current_dir(self.directory.path())
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| {
                panic!("{program} is needed by this test (apt-get install qemu-utils): {error}")
            })
            .into()
    }

    /// `qemu-io` on `image` with the commands given.
    pub(crate) fn qemu_io(&self, image: &[&str], commands: &[&str]) -> Ended {
        let commands = commands.iter().flat_map(|line| ["-c", line]);
        let arguments: Vec<&str> = commands.chain(image.iter().copied()).collect();
        self.qemu("qemu-io", &arguments)
    }

    /// Makes a QCOW2 image with `qemu-img`.
    pub(crate) fn qemu_create(&self, name: &str, options: &str, size: &str) {
        self.qemu(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", options, name, size],
        )
        .success();
    }

    /// Fails the test unless `qemu-img check` finds neither errors nor leaks.
    pub(crate) fn assert_flawless(&self, name: &str) {
        self.qemu("qemu-img", &["check", "-f", "qcow2", name]).success();
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).expect("read a file")
    }

    /// Writes `bytes` at `offset` of a file.
    pub(crate) fn patch(&self, name: &str, offset: u64, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(self.path(name))
            .expect("open a file");
        file.write_all_at(bytes, offset).expect("patch a file");
    }

    /// Makes an empty file of a size.
    pub(crate) fn sparse_file(&self, name: &str, bytes: u64) {
        let file = std::fs::File::create(self.path(name)).expect("create a file");
        file.set_len(bytes).expect("set its length");
    }
}

/// The big-endian number of eight bytes at `offset`.
pub(crate) fn be_u64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_be_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
}

/// Returns true if `path` exists, symbolic links not followed.
pub(crate) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
