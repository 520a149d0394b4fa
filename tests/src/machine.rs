//! A machine of `ringdisk run`: the same Linux as a [`Guest`](crate::Guest)'s, on KVM, its disks in the same process.
//!
//! It has one serial port, so what its script says comes among what its kernel says there.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::Process;
use crate::{Error, Lab, RunningGuest, Scratch, initramfs, prepare};

/// A machine to be started: what it has, and what it runs.
#[derive(Debug, Clone)]
#[must_use = "a machine does nothing before it is started"]
pub struct Machine<'lab> {
    lab: &'lab Lab,
    disks: Vec<String>,
    script: String,
    patience: Duration,
}

impl<'lab> Machine<'lab> {
    /// A machine with two CPUs and 512 MiB of memory that runs `script` for at most `patience`.
    pub fn new(lab: &'lab Lab, script: &str, patience: Duration) -> Self {
        Self {
            lab,
            disks: Vec::new(),
            script: script.to_owned(),
            patience,
        }
    }

    /// Adds the disk of this `--disk` value, as `/dev/lab/NAME`. The first one is the root.
    pub fn disk(mut self, name: &str, disk: &str) -> Self {
        self.disks.push(format!("{name} {disk}"));
        self
    }

    /// Starts it, with its logs and the initramfs in `scratch` under names that begin with `name`.
    ///
    /// # Errors
    ///
    /// [`Error`], if it cannot be started. What happens later shows in the methods of [`RunningGuest`].
    pub fn start(&self, scratch: &Scratch, name: &str) -> Result<RunningGuest, Error> {
        let initramfs = scratch.file(&format!("{name}.initramfs"));
        initramfs::with_script(self.lab.initramfs(), &self.script, &initramfs)?;
        let console = scratch.file(&format!("{name}.console"));
        let command = self.command(&initramfs, &console)?;
        let process = Process::start(command, scratch.file(&format!("{name}.machine")))?;
        Ok(RunningGuest::on_one_port(
            process,
            console,
            Instant::now() + self.patience,
            self.patience,
        ))
    }

    fn command(&self, initramfs: &Path, console: &Path) -> Result<Command, Error> {
        let mut command = Command::new(prepare::ringdisk_binary()?);
        command.arg("run").arg("--kernel").arg(self.lab.kernel());
        command.arg("--initramfs").arg(initramfs);
        command.args(["--cpus", "2", "--memory", "512M", "--serial"]);
        command.arg(format!("file={}", console.display()));
        let mut line = String::from("console=ttyS0 loglevel=4 panic=1 lab.root=0000:00:01.0");
        for (slot, disk) in (1..).zip(&self.disks) {
            let (name, disk) = disk.split_once(' ').unwrap_or((disk, ""));
            line.push_str(&format!(" lab.disk={name}@0000:00:{slot:02x}.0"));
            command.args(["--disk", disk]);
        }
        command.args(["--cmdline", &line]);
        Ok(command)
    }
}
