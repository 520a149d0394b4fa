//! A guest: a stock Debian kernel under QEMU, on disks served over vhost-user-blk.
//!
//! The guest boots from its first disk, runs one shell script as root, and stops. What the script prints
//! comes back line by line through a serial port of its own; the kernel's console is kept apart from it.
//!
//! In the script, `set -eu` holds, the disk added as `NAME` is `/dev/lab/NAME`, and `lab-reboot` makes the
//! machine restart after the script has ended well, so that the script runs again (it can tell by a file
//! it left on a disk). In the end every file system is unmounted and the root made read-only.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::again::begun_again;
use crate::heartbeat::{self, Heartbeat, Pulse};
use crate::process::{GLANCE, Process, read_lossy, tail};
use crate::results::{PANICKED, RESTARTED, boots, scripts_part};
use crate::{Error, Lab, Scratch, fault, initramfs};

/// The PCI slot of the first disk; the next ones follow. Below are QEMU's own devices.
const FIRST_SLOT: usize = 5;
/// The longest time of a guest to its script: half a minute is seen on a machine with six others.
const BOOT_MAX: Duration = Duration::from_secs(120);
/// The longest run of a guest unless told otherwise: emulated, on a machine busy with other things.
const PATIENCE: Duration = Duration::from_secs(300);

/// All that QEMU can emulate, virtualization among it, except for a fifth level of page tables, which costs a fifth of all time to
/// walk, and for fast strings: where a CPU has them the kernel copies and clears pages with `rep movsb`, which QEMU emulates byte by
/// byte. That costs a sixth.
const CPU: &str = "max,la57=off,erms=off,fsrm=off,fzrm=off,fsrs=off";

/// The options of a kernel with a periodic timer. QEMU 10.0's emulation of SVM seems to lose an interrupt that one thread raises while
/// another leaves a machine (`interrupt_request &= …`, not atomic). Where the timer is armed for one tick after the other, a lost tick is
/// the last one, and the CPU stands still. A periodic timer raises again what is pending.
const TICKS: &str = " nohz=off highres=off";

/// Texts that the kernel's console must not show after a good run.
const COMPLAINTS: [&str; 14] = [
    "I/O error",
    "EXT4-fs error",
    "EXT4-fs warning",
    "Aborting journal",
    "Corruption",
    "Internal error",
    "Shutting down filesystem",
    "BUG:",
    "KASAN",
    "WARNING:",
    "Oops",
    "general protection",
    "blocked for more than",
    "rcu: INFO",
];

/// The words of a kernel that gives up.
const PANIC: &str = "Kernel panic";

/// The first line of the initramfs on the console. Up to it a guest has used no disk of ours.
const INITRAMFS: &str = "lab: init";

/// A guest to be started: what it has, and what it runs.
#[derive(Debug, Clone)]
#[must_use = "a guest does nothing before it is started"]
pub struct Guest<'lab> {
    lab: &'lab Lab,
    cpus: u16,
    possible_cpus: u16,
    memory_mib: u32,
    disks: Vec<Disk>,
    script: String,
    patience: Duration,
    reconnects: bool,
    heartbeat: bool,
    migrates: bool,
    periodic_timer: bool,
}

#[derive(Debug, Clone)]
struct Disk {
    name: String,
    from: Source,
}

/// The place of a disk's contents.
#[derive(Debug, Clone)]
enum Source {
    /// With a vhost-user-blk server.
    Server { socket: PathBuf, queues: u16 },
    /// In a file that QEMU itself serves, in this way.
    File {
        file: PathBuf,
        drive: &'static str,
        queues: u16,
    },
}

impl<'lab> Guest<'lab> {
    /// A guest with two CPUs, 512 MiB of shared memory, no disk and an empty script.
    pub fn new(lab: &'lab Lab) -> Self {
        Self {
            lab,
            cpus: 2,
            possible_cpus: 0,
            memory_mib: 512,
            disks: Vec::new(),
            script: String::new(),
            patience: PATIENCE,
            reconnects: false,
            heartbeat: false,
            migrates: false,
            periodic_timer: false,
        }
    }

    /// Has its kernel use a periodic timer, which a guest needs that runs others.
    pub fn periodic_timer(mut self) -> Self {
        self.periodic_timer = true;
        self
    }

    /// Has QEMU connect again, and again, to a server that has gone.
    pub fn reconnects(mut self) -> Self {
        self.reconnects = true;
        self
    }

    /// Has QEMU listen to [`RunningGuest::migrate`].
    pub fn migrates(mut self) -> Self {
        self.migrates = true;
        self
    }

    /// Has it tick on a serial port of its own while its script runs, and answer there when it hangs.
    pub fn heartbeat(mut self) -> Self {
        self.heartbeat = true;
        self
    }

    /// Sets the number of CPUs.
    pub fn cpus(mut self, cpus: u16) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets how many CPUs its kernel provides for. Those past [`cpus`](Self::cpus) are never started, and take no time of this
    /// machine.
    pub fn possible_cpus(mut self, cpus: u16) -> Self {
        self.possible_cpus = cpus;
        self
    }

    /// Sets the size of the memory, in MiB.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Adds a vhost-user-blk disk that a server offers at `socket`. The first one is the root.
    pub fn disk(mut self, name: &str, socket: &Path, queues: u16) -> Self {
        self.disks.push(Disk {
            name: name.to_owned(),
            from: Source::Server {
                socket: socket.to_owned(),
                queues,
            },
        });
        self
    }

    /// Adds a disk whose contents are a raw file: QEMU serves it, with a volatile cache that the guest sees, and with
    /// discards. What a guest has written is in the file when QEMU has ended.
    pub fn raw_disk(mut self, name: &str, file: &Path) -> Self {
        self.disks.push(Disk {
            name: name.to_owned(),
            from: Source::File {
                file: file.to_owned(),
                drive: "format=raw,cache=unsafe,discard=unmap",
                queues: self.cpus,
            },
        });
        self
    }

    /// Adds a disk whose contents are a QCOW2 image: QEMU serves it, past the page cache, with discards.
    pub fn image_disk(mut self, name: &str, image: &Path, queues: u16) -> Self {
        self.disks.push(Disk {
            name: name.to_owned(),
            from: Source::File {
                file: image.to_owned(),
                drive: "format=qcow2,cache=none,aio=io_uring,discard=unmap",
                queues,
            },
        });
        self
    }

    /// Sets the shell script the guest runs.
    pub fn script(mut self, script: &str) -> Self {
        script.clone_into(&mut self.script);
        self
    }

    /// Sets how long the guest may run, from start to power-off. The default is five minutes.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Starts QEMU, with its logs and the initramfs in `scratch` under names that begin with `name`.
    ///
    /// # Errors
    ///
    /// [`Error::File`] or [`Error::Spawn`]. What happens later shows in the methods of [`RunningGuest`].
    pub fn start(&self, scratch: &Scratch, name: &str) -> Result<RunningGuest, Error> {
        let initrd = scratch.file(&format!("{name}.initramfs"));
        let heartbeat = if self.heartbeat {
            Some(Heartbeat::new(scratch, name)?)
        } else {
            None
        };
        let before = if self.heartbeat { heartbeat::SCRIPT } else { "" };
        initramfs::with_script(self.lab.initramfs(), &format!("{before}{}", self.script), &initrd)?;
        let console = scratch.file(&format!("{name}.console"));
        let results = scratch.file(&format!("{name}.results"));
        let mut command = self.command(&initrd, &console, &results, "off");
        let monitor = self.monitor(scratch, name, &mut command);
        if let Some(heartbeat) = &heartbeat {
            heartbeat.add_to(&mut command);
        }
        let process = Process::start(command, scratch.file(&format!("{name}.qemu")))?;
        Ok(RunningGuest {
            process,
            console,
            results,
            deadline: Instant::now() + self.patience,
            patience: self.patience,
            one_port: false,
            heartbeat,
            monitor,
        })
    }

    /// Adds a monitor to QEMU's command line, if there is to be one.
    fn monitor(&self, scratch: &Scratch, name: &str, command: &mut Command) -> Option<PathBuf> {
        let monitor = self.migrates.then(|| scratch.file(&format!("{name}.qmp")))?;
        let argument = format!("unix:{},server=on,wait=off", monitor.display());
        command.args(["-qmp", &argument]);
        Some(monitor)
    }

    /// Starts the guest and waits for its good end: [`boot`](Self::boot), then [`RunningGuest::finish`].
    ///
    /// # Errors
    ///
    /// As those two.
    pub fn run(&self, scratch: &Scratch, name: &str) -> Result<Outcome, Error> {
        self.boot(scratch, name)?.finish()
    }

    /// [Starts](Self::start) the guest and waits until it has booted, or has failed to.
    ///
    /// On a busy machine an emulated kernel has been seen to loop before its first process, and the emulator to fail. Such a
    /// guest is started once more, which counts as [begun again](begun_again). From the first line of its initramfs on it uses
    /// its disks, and is never started again.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn boot(&self, scratch: &Scratch, name: &str) -> Result<RunningGuest, Error> {
        let mut guest = self.start(scratch, name)?;
        if !guest.boots_within(BOOT_MAX) {
            let reason = format!(
                "its guest did not reach its initramfs within {} s",
                BOOT_MAX.as_secs()
            );
            begun_again(&reason, &guest.timeout("the boot", BOOT_MAX).to_string());
            drop(guest);
            guest = self.start(scratch, name)?;
        } else if let Some(fault) = guest.emulator_failed_at_boot() {
            begun_again(fault, &guest.last_words());
            drop(guest);
            guest = self.start(scratch, name)?;
        }
        Ok(guest)
    }

    /// QEMU's command line. What is said is added to what the files hold if `append` is `on`.
    fn command(&self, initrd: &Path, console: &Path, results: &Path, append: &str) -> Command {
        let memory = self.memory_mib;
        // On a busy machine the emulated timer may be too late for the kernel's test of it, and the kernel panics.
        // An emulator does not see what a vhost-user server writes into the guest's memory, and would run code that it translated
        // from what was there before: the kernel itself must clear each page that it takes.
        let mut line = String::from(
            "console=ttyS0 loglevel=5 no_timer_check init_on_alloc=1 lab.results=ttyS1 lab.root=",
        );
        line.push_str(&pci_address(0));
        if self.periodic_timer {
            line.push_str(TICKS);
        }
        if self.possible_cpus > self.cpus {
            line.push_str(&format!(" maxcpus={}", self.cpus));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            line.push_str(&format!(" lab.disk={}@{}", disk.name, pci_address(index)));
        }
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        command.args([
            "-machine",
            "q35,memory-backend=mem",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            CPU,
        ]);
        let cpus = self.cpus.max(self.possible_cpus);
        command.args(["-smp", &cpus.to_string(), "-m", &format!("{memory}M")]);
        command.args([
            "-object",
            &format!("memory-backend-memfd,id=mem,size={memory}M,share=on"),
        ]);
        for (id, file) in [("console", console), ("results", results)] {
            let chardev = format!("file,id={id},append={append},path=");
            command.arg("-chardev").arg(prefixed(&chardev, file));
            command.arg("-serial").arg(format!("chardev:{id}"));
        }
        command
            .arg("-kernel")
            .arg(self.lab.kernel())
            .arg("-initrd")
            .arg(initrd)
            .args(["-append", &line]);
        for (index, disk) in self.disks.iter().enumerate() {
            let slot = FIRST_SLOT + index;
            match &disk.from {
                Source::Server { socket, queues } => {
                    let again = if self.reconnects { "reconnect-ms=50," } else { "" };
                    let chardev = format!("socket,id=chardev{index},{again}path=");
                    command.arg("-chardev").arg(prefixed(&chardev, socket));
                    command.arg("-device").arg(format!(
                        "vhost-user-blk-pci,chardev=chardev{index},num-queues={queues},addr={slot:#x}"
                    ));
                }
                Source::File { file, drive, queues } => {
                    let drive = format!("if=none,id=drive{index},{drive},file=");
                    command.arg("-drive").arg(prefixed(&drive, file));
                    command.arg("-device").arg(format!(
                        "virtio-blk-pci,drive=drive{index},num-queues={queues},addr={slot:#x}"
                    ));
                }
            }
        }
        command
    }
}

/// A guest whose QEMU has been started. Dropping it kills it.
#[derive(Debug)]
pub struct RunningGuest {
    process: Process,
    console: PathBuf,
    results: PathBuf,
    deadline: Instant,
    patience: Duration,
    /// True if the kernel speaks where the script does.
    one_port: bool,
    heartbeat: Option<Heartbeat>,
    /// The socket of QEMU's monitor.
    monitor: Option<PathBuf>,
}

/// The output of a guest whose script ended well, at every boot.
#[derive(Debug, Clone)]
pub struct Outcome {
    boots: Vec<Vec<String>>,
    console: String,
}

impl RunningGuest {
    /// A guest whose kernel and script speak on one serial port, which goes to `console`.
    pub(crate) fn on_one_port(
        process: Process,
        console: PathBuf,
        deadline: Instant,
        patience: Duration,
    ) -> Self {
        Self {
            process,
            results: console.clone(),
            console,
            deadline,
            patience,
            one_port: true,
            heartbeat: None,
            monitor: None,
        }
    }

    /// The socket of QEMU's monitor, if the guest [migrates](Guest::migrates).
    pub(crate) fn monitor(&self) -> Option<&Path> {
        self.monitor.as_deref()
    }

    /// The file that its script prints to.
    pub(crate) fn results(&self) -> &Path {
        &self.results
    }

    /// Starts a QEMU like `to` that waits for this guest, whose output goes on where it is.
    pub(crate) fn continued(&self, to: &Guest<'_>, scratch: &Scratch, name: &str) -> Result<Self, Error> {
        let initrd = scratch.file(&format!("{name}.initramfs"));
        initramfs::with_script(to.lab.initramfs(), &to.script, &initrd)?;
        let mut command = to.command(&initrd, &self.console, &self.results, "on");
        command.args(["-incoming", "defer"]);
        let monitor = to.monitor(scratch, name, &mut command);
        Ok(Self {
            process: Process::start(command, scratch.file(&format!("{name}.qemu")))?,
            console: self.console.clone(),
            results: self.results.clone(),
            deadline: self.deadline,
            patience: self.patience,
            one_port: false,
            heartbeat: None,
            monitor,
        })
    }

    /// Waits until QEMU has ended with 0.
    pub(crate) fn ended_well(mut self) -> Result<(), Error> {
        self.exit().map(drop)
    }

    /// Returns the script's output so far, with its markers.
    fn said(&self) -> String {
        let said = read_lossy(&self.results);
        if self.one_port { scripts_part(&said) } else { said }
    }

    /// The complete lines the script has printed so far, over all boots.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let said = self.said();
        let complete = said.rfind('\n').map_or("", |end| &said[..end]);
        complete
            .lines()
            .filter(|line| !line.starts_with("@@"))
            .map(str::to_owned)
            .collect()
    }

    /// Waits until the script has printed a line for which `wanted` holds, and gives it.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] if the guest ends, fails or panics first; [`Error::Timeout`].
    pub fn wait_for(&mut self, wanted: impl Fn(&str) -> bool) -> Result<String, Error> {
        self.wait_for_within(wanted, self.patience)
    }

    /// As [`RunningGuest::wait_for`], for so long.
    ///
    /// # Errors
    ///
    /// As [`RunningGuest::wait_for`].
    pub fn wait_for_within(
        &mut self,
        wanted: impl Fn(&str) -> bool,
        limit: Duration,
    ) -> Result<String, Error> {
        let until = Instant::now() + limit;
        loop {
            let ended = self.process.ended();
            if let Some(line) = self.lines().into_iter().find(|line| wanted(line)) {
                return Ok(line);
            }
            if let Some(status) = ended {
                return Err(self.failed(&format!("stopped early (QEMU ended with {status})")));
            }
            self.check_alive()?;
            if Instant::now() >= until {
                return Err(self.timeout("what was waited for", limit));
            }
            thread::sleep(GLANCE);
        }
    }

    /// Waits until the guest's initramfs has begun, or cannot any more; false if neither happens for so long.
    fn boots_within(&mut self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        while !self.has_begun() && self.process.ended().is_none() && self.check_alive().is_ok() {
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(GLANCE);
        }
        true
    }

    /// Returns what failed, if the emulator has ended by a fault of its own before the guest's initramfs began.
    fn emulator_failed_at_boot(&mut self) -> Option<&'static str> {
        let status = self.process.ended()?.to_string();
        if self.has_begun() {
            return None;
        }
        fault::of_emulator("qemu-system", &status, &self.process.log())
    }

    fn has_begun(&self) -> bool {
        !self.said().is_empty() || read_lossy(&self.console).contains(INITRAMFS)
    }

    /// Its pulse, where no tick for `limit` means that it has stopped. [`Pulse::Never`] without a heartbeat.
    pub(crate) fn pulse(&self, limit: Duration) -> Pulse {
        let heartbeat = self.heartbeat.as_ref();
        heartbeat.map_or(Pulse::Never, |heartbeat| heartbeat.pulse(limit))
    }

    /// True if it has a heartbeat, which was last heard less than `limit` ago.
    #[must_use]
    pub fn ticks(&self, limit: Duration) -> bool {
        self.pulse(limit) == Pulse::Beats
    }

    /// Returns where its processes are, as the guest itself says on its heartbeat's port. Empty without a heartbeat.
    #[must_use]
    pub fn evidence(&self) -> String {
        let heartbeat = self.heartbeat.as_ref();
        heartbeat.map_or(String::new(), Heartbeat::evidence)
    }

    /// Returns the output of the program that runs the guest.
    #[must_use]
    pub fn last_words(&self) -> String {
        self.process.log()
    }

    /// Waits for the power-off, and checks that the script ended with 0 at every boot.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] if the kernel panicked or [failed in a known way](Error::reason_to_begin_again), the script failed
    /// or the guest stopped without saying so;
    /// [`Error::Ended`] if QEMU failed; [`Error::Timeout`].
    pub fn finish(mut self) -> Result<Outcome, Error> {
        self.outcome()
    }

    /// As [`finish`](Self::finish), and leaves a guest that hangs as it is, to be looked at.
    pub(crate) fn outcome(&mut self) -> Result<Outcome, Error> {
        self.exit()?;
        let boots = boots(&self.said()).map_err(|what| self.failed(&what))?;
        let console = read_lossy(&self.console);
        if fault::of_kernel(&console, complains).is_some() {
            return Err(self.failed("did what it had to, but its kernel failed"));
        }
        Ok(Outcome { boots, console })
    }

    fn exit(&mut self) -> Result<(), Error> {
        let status = loop {
            if let Some(status) = self.process.ended() {
                break status;
            }
            self.check_alive()?;
            thread::sleep(GLANCE);
        };
        if !status.success() {
            return Err(Error::Ended {
                command: self.process.command().to_owned(),
                status: status.to_string(),
                expected: "not 0",
                log: self.process.log_tail(),
            });
        }
        Ok(())
    }

    /// Kills QEMU as a crash would (SIGKILL), and gives what the script had printed.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] if it had ended before the blow.
    pub fn kill(mut self) -> Result<Vec<String>, Error> {
        if let Some(status) = self.process.ended() {
            return Err(self.failed(&format!(
                "had stopped before it was killed (QEMU ended with {status})"
            )));
        }
        self.process.kill();
        Ok(self.lines())
    }

    /// The process id of QEMU.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    fn check_alive(&self) -> Result<(), Error> {
        if read_lossy(&self.console).contains(PANIC) {
            return Err(self.failed(PANICKED));
        }
        if Instant::now() < self.deadline {
            return Ok(());
        }
        Err(self.timeout("what the guest had to do", self.patience))
    }

    fn timeout(&self, what: &str, limit: Duration) -> Error {
        let log = format!(
            "{}\n--- console:\n{}\n--- script:\n{}",
            self.process.log_tail(),
            tail(&read_lossy(&self.console)),
            tail(&read_lossy(&self.results)),
        );
        Error::Timeout {
            what: what.to_owned(),
            seconds: limit.as_secs(),
            log,
        }
    }

    /// The processors' state of a guest that restarted by itself.
    fn state_at_reset(&self, what: &str) -> String {
        let heartbeat = self.heartbeat.as_ref().filter(|_| what == RESTARTED);
        heartbeat.map_or_else(String::new, |heartbeat| {
            format!(
                "\n--- its processors at that time:\n{}",
                heartbeat.state_at_reset()
            )
        })
    }

    pub(crate) fn failed(&self, what: &str) -> Error {
        let console = read_lossy(&self.console);
        Error::Guest {
            what: what.to_owned(),
            lines: tail(&read_lossy(&self.results)),
            kernels_fault: fault::of_kernel(&console, complains),
            console: tail(&format!("{}{console}", self.process.log())) + &self.state_at_reset(what),
        }
    }
}

impl Outcome {
    /// Returns the number of boots: 1, and 1 more for each `lab-reboot`.
    #[must_use]
    pub fn boots(&self) -> usize {
        self.boots.len()
    }

    /// The lines the script printed, boot after boot.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.boots.iter().flatten().map(String::as_str)
    }

    /// Returns the text after `key` in the last line that starts with it: `value("sum ")` of `sum 1234` is `1234`.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&str> {
        self.lines().filter_map(|line| line.strip_prefix(key)).last()
    }

    /// The kernel's console over all boots.
    #[must_use]
    pub fn console(&self) -> &str {
        &self.console
    }

    /// The lines of the console in which the kernel complains of a disk, a file system or itself.
    #[must_use]
    pub fn complaints(&self) -> Vec<&str> {
        self.console.lines().filter(|line| complains(line)).collect()
    }
}

/// Returns true if this line of a console is a complaint, or the kernel's last.
pub(crate) fn fails(line: &str) -> bool {
    complains(line) || line.contains(PANIC)
}

/// Returns true if this line of a console is a complaint.
fn complains(line: &str) -> bool {
    COMPLAINTS.iter().any(|complaint| line.contains(complaint))
}

/// The PCI address of the disk number `index`.
fn pci_address(index: usize) -> String {
    format!("0000:00:{:02x}.0", FIRST_SLOT + index)
}

/// A QEMU option that ends with a path.
fn prefixed(prefix: &str, path: &Path) -> OsString {
    let mut option = OsString::from(prefix);
    option.push(path);
    option
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emulator_failed_at_boot_only_by_its_own_fault_before_the_initramfs() {
        let scratch = Scratch::new().unwrap();
        let failed = |console: &str, said: &str| {
            let path = scratch.file("console");
            std::fs::write(&path, console).unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", &format!("echo '{said}' >&2; kill -ABRT $$")]);
            let process = Process::start(command, scratch.file("log")).unwrap();
            let patience = Duration::from_secs(60);
            let mut guest = RunningGuest::on_one_port(process, path, Instant::now() + patience, patience);
            assert!(guest.boots_within(patience));
            guest.emulator_failed_at_boot().is_some()
        };
        let assertion = "qemu: iotlb_to_section: Assertion failed.";
        assert!(failed("[ 1.6] mtrr\n", assertion));
        assert!(
            !failed("[ 1.6] mtrr\nlab: init\n", assertion),
            "it uses its disks"
        );
        assert!(!failed("[ 1.6] mtrr\n", "vhost_user_read: Assertion failed."));
    }

    #[test]
    fn boots_within_is_false_only_for_a_live_guest_not_begun() {
        let scratch = Scratch::new().unwrap();
        let boots = |says: &str, does: &str| {
            let console = scratch.file("console");
            std::fs::write(&console, says).unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", does]);
            let process = Process::start(command, scratch.file("log")).unwrap();
            let patience = Duration::from_secs(60);
            let mut guest = RunningGuest::on_one_port(process, console, Instant::now() + patience, patience);
            guest.boots_within(Duration::from_millis(300))
        };
        assert!(!boots("[ 1.6] mtrr\n", "exec sleep 100"), "it turns in circles");
        assert!(boots("[ 1.6] mtrr\n@@begin\n", "exec sleep 100"), "it works");
        assert!(
            boots("[ 1.6] mtrr\n@@failed no disk\n", "exec sleep 100"),
            "it has failed"
        );
        assert!(
            boots("[ 1.6] mtrr\nlab: init\n", "exec sleep 100"),
            "it uses its disks: what hangs now may be the server's fault"
        );
        assert!(
            boots("[ 1.6] Kernel panic - not syncing\n", "exec sleep 100"),
            "it has panicked"
        );
        assert!(boots("", "exit 1"), "it has ended");
    }
}
