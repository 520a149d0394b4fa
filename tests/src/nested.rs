//! A machine inside a guest: what `ringdisk run` needs, on a disk for the guest that runs it.
//!
//! The guest is emulated, with AMD's virtualization extensions, so its KVM is a real one; a machine that it runs is
//! the second level. The lab's own initramfs and root serve there too: the disk carries the kernel, our binary and
//! an initramfs for each script, and the base image is a disk of its own, to be a backing file.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::guest::fails;
use crate::heartbeat::{Pulse, STOPPED};
use crate::results::RESTARTED;
use crate::{
    Error, Guest, Lab, Outcome, Scratch, Server, begun_again, fault, image, initramfs, prepare, process,
};

/// The memory a guest needs that runs a machine, in MiB.
pub const MEMORY_MIB: u32 = 2048;

/// Loads KVM so that the guest can run machines. QEMU 10.0's emulation of SVM loses interrupts and makes some up under load: with
/// KVM's defaults a guest stood still, or restarted without a word, in about every third run of `make demo`, and so it did with QEMU
/// in the place of `ringdisk run`. Without virtual GIF and early timers that is rare. A kernel of the lab without KVM does without.
const KVM: &str =
    "! modprobe kvm lapic_timer_advance=0 2>/dev/null || modprobe kvm-amd vgif=0 nested=0 avic=0\n";
/// The most starts of a guest in all, where each time it was the emulated processor that failed.
const ATTEMPTS: u32 = 3;

/// The name that the guest's files begin with.
const OUTER: &str = "outer";

/// The disk, before it is made.
#[derive(Debug)]
pub struct Toolbox {
    folder: PathBuf,
    image: PathBuf,
}

impl Toolbox {
    /// A disk with `vmlinuz` and `ringdisk`, to be made in `scratch`.
    ///
    /// # Errors
    ///
    /// [`Error::RingdiskNotBuilt`] or [`Error::File`].
    pub fn new(lab: &Lab, scratch: &Scratch) -> Result<Self, Error> {
        Self::with(lab, scratch, &prepare::ringdisk_binary()?)
    }

    /// As [`Toolbox::new`], with this binary of ours.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn with(lab: &Lab, scratch: &Scratch, ringdisk: &Path) -> Result<Self, Error> {
        let folder = scratch.file("tools");
        let toolbox = Self {
            image: scratch.file("tools.raw"),
            folder,
        };
        let failed = |path: &PathBuf| {
            let path = path.clone();
            move |source| Error::File {
                action: "write",
                path,
                source,
            }
        };
        fs::create_dir(&toolbox.folder).map_err(failed(&toolbox.folder))?;
        for (from, name) in [
            (lab.kernel().to_owned(), "vmlinuz"),
            (ringdisk.to_owned(), "ringdisk"),
        ] {
            let to = toolbox.folder.join(name);
            fs::copy(from, &to).map_err(failed(&to))?;
        }
        // What only a debugger reads.
        let mut strip = Command::new("strip");
        strip.arg(toolbox.folder.join("ringdisk"));
        process::run_ok(strip)?;
        Ok(toolbox)
    }

    /// Adds the initramfs `name` of an inner guest that runs `script`.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn script(self, lab: &Lab, name: &str, script: &str) -> Result<Self, Error> {
        initramfs::with_script(lab.initramfs(), script, &self.folder.join(name))?;
        Ok(self)
    }

    /// Adds a program of this machine under `name`, with the libraries it needs: a script `name` starts it where the disk
    /// is mounted at `/mnt`.
    ///
    /// # Errors
    ///
    /// [`Error`], if it cannot be read.
    pub fn program(self, program: &Path, name: &str) -> Result<Self, Error> {
        let folder = self.folder.join(format!("{name}.d"));
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::File {
                action: "copy",
                path,
                source,
            }
        };
        fs::create_dir(&folder).map_err(failed(&folder))?;
        let mut command = Command::new("ldd");
        command.arg(program);
        let (status, said) = process::run(command)?;
        // `name => /path (address)`, and the loader itself by its path alone; a static program has neither.
        let libraries = said.lines().filter(|_| status.success());
        let libraries: Vec<&str> = libraries
            .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
            .collect();
        for file in libraries.iter().map(Path::new).chain([program]) {
            let to = folder.join(file.file_name().unwrap_or_default());
            fs::copy(file, &to).map_err(failed(file))?;
        }
        let at = |file: &Path| {
            let file = file.file_name().unwrap_or_default().to_string_lossy();
            format!("/mnt/{name}.d/{file}")
        };
        let loader = libraries.iter().find(|library| library.contains("/ld-linux"));
        let loader = loader.map_or(String::new(), |loader| {
            format!("{} --library-path /mnt/{name}.d ", at(Path::new(loader)))
        });
        let script = format!("#!/bin/sh\nexec {loader}{} \"$@\"\n", at(program));
        let to = self.folder.join(name);
        fs::write(&to, script).map_err(failed(&to))?;
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&to, mode).map_err(failed(&to))?;
        Ok(self)
    }

    /// Adds a file of this machine, under its own name.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn file(self, file: &Path) -> Result<Self, Error> {
        let to = self.folder.join(file.file_name().unwrap_or_default());
        fs::copy(file, &to).map_err(|source| Error::File {
            action: "copy",
            path: file.to_owned(),
            source,
        })?;
        Ok(self)
    }

    /// Makes the disk, with `bytes` of room, and answers its image: raw, with an ext4 file system.
    ///
    /// # Errors
    ///
    /// [`Error`], if `mke2fs` fails.
    pub fn make(&self, bytes: u64) -> Result<PathBuf, Error> {
        // A second attempt begins with what the first one began with.
        if self.image.exists() {
            fs::remove_file(&self.image).map_err(|source| Error::File {
                action: "remove",
                path: self.image.clone(),
                source,
            })?;
        }
        let mut command = Command::new("mke2fs");
        command.args(["-q", "-t", "ext4", "-d"]).arg(&self.folder);
        command.arg(&self.image).arg(format!("{}k", bytes / 1024));
        process::run_ok(command)?;
        Ok(self.image.clone())
    }
}

/// A guest that runs machines. It sees its root, the disk of the toolbox as `/dev/lab/tools`, and the lab's
/// root as the read-only `/dev/lab/base`. KVM is there when its script starts, if the kernel has it.
#[derive(Clone, Copy, Debug)]
pub struct Nested<'a> {
    /// The lab that the guest is made of.
    pub lab: &'a Lab,
    /// The folder of its files.
    pub scratch: &'a Scratch,
    /// The contents of the disk.
    pub toolbox: &'a Toolbox,
    /// The size of that disk.
    pub bytes: u64,
    /// The script that the guest runs.
    pub script: &'a str,
    /// The longest time for that, from start to power-off.
    pub patience: Duration,
    /// Its CPUs and memory.
    pub size: Size,
}

/// The size of a guest.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// The number of its CPUs.
    pub cpus: u16,
    /// The number of CPUs that its kernel provides for, if that is more.
    pub possible_cpus: u16,
    /// Its memory in MiB.
    pub memory_mib: u32,
}

impl Size {
    /// The size of a guest with so many CPUs.
    #[must_use]
    pub const fn of_cpus(cpus: u16) -> Self {
        Self {
            cpus,
            possible_cpus: 0,
            memory_mib: MEMORY_MIB,
        }
    }
}

impl Default for Size {
    /// One CPU, whatever the machine in it has. With two, QEMU 10.0 failed 8 of 11 times in the nested test of the demo, on a slow host
    /// with two CPUs: an interrupt that KVM injects is delivered once more in the middle of other code (`VMRUN` leaves its vector in
    /// `exception_index`, and the next kick by another thread takes it for an exception), or the nested page tables stay in use after
    /// an exit (`HF2_NPT_MASK`). With one CPU it failed in none of 6 runs.
    fn default() -> Self {
        Self::of_cpus(1)
    }
}

impl Nested<'_> {
    /// The file with what the guest's script has printed, whether or not it ended well.
    #[must_use]
    pub fn results(&self) -> PathBuf {
        self.scratch.file(&format!("{OUTER}.results"))
    }

    /// Runs the guest, and returns what its script printed, and the toolbox's disk.
    ///
    /// If the emulated processor fails, all of it is done again, up to twice, which counts as [begun again](begun_again): the guest
    /// itself stops ticking, or restarts by itself, or the machine in it does so without a word. If it ticks on, what hangs in it is a
    /// fault, and the error says where its processes are.
    ///
    /// # Errors
    ///
    /// [`Error`], if anything else fails, or the emulated processor does every time.
    pub fn run(&self) -> Result<(Outcome, PathBuf), Error> {
        let mut attempt = 1;
        loop {
            match self.run_once() {
                Ok(result) => return Ok(result),
                Err((Some(reason), failure)) if attempt < ATTEMPTS => {
                    begun_again(&reason, &failure.to_string());
                }
                Err((_, failure)) => return Err(failure),
            }
            attempt += 1;
        }
    }

    /// Runs the guest once. A failure comes with the reason to try again, if there is one.
    fn run_once(&self) -> Result<(Outcome, PathBuf), (Option<String>, Error)> {
        let own = |failure| (None, failure);
        let tools = self.toolbox.make(self.bytes).map_err(own)?;
        let root = self.scratch.file("outer.qcow2");
        image::overlay(&root, self.lab.base()).map_err(own)?;
        // The guest's CPUs are this machine's: nobody else takes their time.
        let disks = [
            ("root", format!("path={},backing_files=on", root.display())),
            ("tools", format!("path={},image_type=raw", tools.display())),
            ("base", format!("path={},readonly=on", self.lab.base().display())),
        ];
        let mut guest = Guest::new(self.lab)
            .cpus(self.size.cpus)
            .possible_cpus(self.size.possible_cpus)
            .memory_mib(self.size.memory_mib)
            .periodic_timer()
            .heartbeat()
            .patience(self.patience)
            .script(&format!("{KVM}{}", self.script));
        let mut servers = Vec::new();
        for (name, disk) in disks {
            let socket = self.scratch.file(&format!("{name}.sock"));
            servers.push(Server::ringdisk(&socket, &format!("{disk},poll_us=0")).map_err(own)?);
            guest = guest.disk(name, &socket, 1);
        }
        let mut guest = guest.boot(self.scratch, OUTER).map_err(own)?;
        let outcome = guest.outcome();
        let said = process::read_lossy(&self.results());
        if let Some(reason) = fault::of_machine(said.lines(), fails) {
            let failure = guest.failed(reason);
            return Err((Some(reason.to_owned()), failure));
        }
        let outcome = outcome.map_err(|failure| {
            let pulse = guest.pulse(STOPPED);
            let reason = reason_to_try_again(&failure, pulse);
            match failure {
                Error::Timeout { what, seconds, log } if reason.is_none() => {
                    let servers: String = servers.iter().map(Server::evidence).collect();
                    let evidence = guest.evidence();
                    let log = format!(
                        "{log}\n--- the guest itself ({pulse:?}):\n{evidence}\n--- its servers:\n{servers}"
                    );
                    (None, Error::Timeout { what, seconds, log })
                }
                failure => (reason, failure),
            }
        })?;
        for server in servers {
            server.stop().map_err(own)?;
        }
        Ok((outcome, tools))
    }
}

/// Returns why the emulated processor must be what failed, if so: the outer guest has stopped, or restarted, as a whole.
fn reason_to_try_again(failure: &Error, pulse: Pulse) -> Option<String> {
    match (failure, pulse) {
        (Error::Timeout { .. }, Pulse::Stopped(age)) => {
            Some(format!("its guest has not ticked for {} s", age.as_secs()))
        }
        (Error::Guest { what, .. }, _) if what == RESTARTED => Some(format!("its guest {what}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_needs_an_outer_guest_that_stopped_or_restarted() {
        let guest = |what: &str, lines: &str| Error::Guest {
            what: what.to_owned(),
            lines: lines.to_owned(),
            console: String::new(),
            kernels_fault: None,
        };
        let again = |failure: &Error, pulse| reason_to_try_again(failure, pulse).is_some();
        let stopped = Pulse::Stopped(STOPPED);
        assert!(again(&guest("restarted by itself", ""), Pulse::Beats));
        let inner = "It did NOT work: the guest restarted by itself; its script said:";
        assert!(!again(&guest("script ended with 1", inner), Pulse::Beats));
        assert!(!again(
            &guest("script ended with 1", "fio: verify failed"),
            Pulse::Beats
        ));
        assert!(!again(&guest("panicked", ""), stopped));
        let still = Error::Timeout {
            what: "what the guest had to do".to_owned(),
            seconds: 300,
            log: String::new(),
        };
        assert!(again(&still, stopped));
        assert!(!again(&still, Pulse::Beats), "what hangs is in the guest");
        assert!(!again(&still, Pulse::Never), "it hangs before its script");
    }
}
