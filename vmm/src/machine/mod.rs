//! A machine of our own on KVM: CPUs, memory, a serial port, and disks on a PCI bus.
//!
//! ```text
//! Machine ── KvmMachine (memory, interrupts)
//!    ├────── Cpus (a thread each) ──exits──▶ Bus ──▶ serial port, power, hot-plug, PCI configuration
//!    ├────── disks: VirtioPciBlock, whose workers hear kicks from KVM itself
//!    └────── network interfaces and entropy: VirtioPciDevice
//! ```
//!
//! Module `x86_64` has everything specific to x86, behind the functions that it lists.
//!
//! Invariants: memory outlives every CPU and every worker; a pause has stopped the CPUs before it drains the disks,
//! so that what the guest believes done is in the image when it returns.

mod bus;
mod console;
mod hotplug;
mod kvm;
mod kvm_error;
mod memory;
mod vcpu;
mod x86_64;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use block::Disk;
use block::worker::StartHook;
use parking_lot::{Condvar, Mutex};
use virtio_devices::transport::{
    BAR_BYTES, Machine as BusMachine, PciDiskConfig, PciFunction, PciNetworkConfig, PlugError,
    VhostUserBackend, VirtioPciBlock, VirtioPciDevice,
};
use vm_memory::GuestMemoryMmap;

pub use bus::SLOTS;
pub use console::{Console, ConsoleConfig, ConsoleError, restore_terminal};
pub use kvm::{KvmBus, KvmMachine};
pub use kvm_error::KvmError;
pub use memory::{MemoryConfig, MemoryError};
pub use vcpu::Exits;
pub use x86_64::BootError;

use bus::{Bus, Function, Slots};
use hotplug::{Hotplug, HotplugPorts};
use vcpu::Cpus;
use x86_64 as arch;

/// The most CPUs of a machine.
pub const CPUS_MAX: u16 = arch::CPUS_MAX;

/// The software that a machine starts: a kernel, or firmware.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Payload {
    /// A Linux kernel.
    Kernel {
        /// A bzImage, or an ELF file with a PVH note.
        kernel: PathBuf,
        /// The initial RAM file system.
        initramfs: Option<PathBuf>,
        /// The kernel's command line.
        command_line: String,
    },
    /// Firmware, which finds what to boot on the disks: an ELF file with a PVH note.
    Firmware(PathBuf),
}

impl Payload {
    /// Returns the role of the file that the first CPU starts in, and its path.
    fn boot_file(&self) -> (&'static str, &Path) {
        match self {
            Self::Kernel { kernel, .. } => ("kernel", kernel),
            Self::Firmware(path) => ("firmware", path),
        }
    }

    fn initramfs(&self) -> Option<&Path> {
        match self {
            Self::Kernel { initramfs, .. } => initramfs.as_deref(),
            Self::Firmware(_) => None,
        }
    }

    fn command_line(&self) -> &str {
        match self {
            Self::Kernel { command_line, .. } => command_line,
            Self::Firmware(_) => "",
        }
    }

    /// Refuses a command line that kernels cut.
    ///
    /// # Errors
    ///
    /// [`BootError::CommandLine`].
    pub fn check_command_line(&self) -> Result<(), BootError> {
        arch::check_command_line(self.command_line())
    }

    /// Fails if there is nothing to boot, as far as that can be checked without a machine.
    ///
    /// # Errors
    ///
    /// [`BootError`], naming the file.
    pub fn check(&self) -> Result<(), BootError> {
        arch::check(self)
    }
}

/// A machine.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MachineConfig {
    /// The kernel or firmware to start.
    pub payload: Payload,
    /// The number of CPUs: 1 to [`CPUS_MAX`].
    pub cpus: u16,
    /// Its memory.
    pub memory: MemoryConfig,
    /// True if the CPUs' threads give up what CPUs do not need, before the guest's first instruction.
    pub sandbox: bool,
}

impl MachineConfig {
    /// Refuses numbers that no machine can have, before anything is opened.
    ///
    /// # Errors
    ///
    /// [`MachineError`].
    pub fn check(&self) -> Result<(), MachineError> {
        let found = self.cpus;
        if found == 0 || found > CPUS_MAX {
            return Err(MachineError::Cpus { found });
        }
        self.memory.check()?;
        Ok(self.payload.check_command_line()?)
    }
}

/// An error of creating a machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// There is no memory for it.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Nothing to run.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A disk or another device cannot be plugged in.
    #[error(transparent)]
    Plug(#[from] PlugError),
    /// There is no slot for a disk.
    #[error("all {} slots of the PCI bus are in use; remove a disk first", SLOTS - 1)]
    NoSlot,
    /// The slot that was asked for is taken.
    #[error("slot {slot} of the PCI bus is in use; choose another pci_device_id, from 1 to {}", SLOTS - 1)]
    SlotTaken {
        /// The slot.
        slot: usize,
    },
    /// The number of CPUs is out of range.
    #[error("the number of CPUs is {found}; expected 1 to {CPUS_MAX}")]
    Cpus {
        /// The number asked for.
        found: u16,
    },
    /// The host has no more threads, or one could not be confined.
    #[error("cannot start a CPU thread")]
    Threads(#[source] io::Error),
    /// The host has no more descriptors.
    #[error("cannot create an eventfd")]
    Events(#[source] io::Error),
}

/// An error of a resize; the disk keeps its size.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// There is none in the slot.
    #[error("there is no such disk")]
    NoDisk,
    /// The disk refuses, or its worker has ended.
    #[error(transparent)]
    Disk(#[from] virtio_devices::transport::ResizeError),
}

/// The reason for a machine's end.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reason {
    /// The guest has switched itself off.
    PowerOff,
    /// The guest wants to start again.
    Reset,
    /// A signal or a key, by name.
    Signal(&'static str),
    /// A failure.
    Failed(String),
}

/// Collects requests to stop or restart a machine. The first one counts, but a stop outranks a restart.
#[derive(Debug, Default)]
pub struct Stop {
    reason: Mutex<Option<Reason>>,
    asked: Condvar,
}

impl Stop {
    /// Asks the machine to end.
    pub fn ask(&self, reason: Reason) {
        let mut place = self.reason.lock();
        if matches!(*place, None | Some(Reason::Reset)) {
            *place = Some(reason);
        }
        self.asked.notify_all();
    }

    fn fail(&self, message: String) {
        self.ask(Reason::Failed(message));
    }

    /// Returns true if a stop or restart was requested.
    pub fn is_asked(&self) -> bool {
        self.reason.lock().is_some()
    }

    /// Returns the current request, if any.
    pub fn asked(&self) -> Option<Reason> {
        self.reason.lock().clone()
    }

    /// Waits until it is asked, and for what.
    pub fn wait(&self) -> Reason {
        let mut reason = self.reason.lock();
        loop {
            if let Some(reason) = &*reason {
                return reason.clone();
            }
            self.asked.wait(&mut reason);
        }
    }

    /// Waits until it is asked, or for so long. Returns true if it was asked.
    pub fn wait_for(&self, time: Duration) -> bool {
        let mut reason = self.reason.lock();
        let is_missing = |reason: &mut Option<Reason>| reason.is_none();
        self.asked.wait_while_for(&mut reason, is_missing, time);
        reason.is_some()
    }

    /// Completes a restart. Returns `false` if a stop was requested meanwhile.
    pub fn restarted(&self) -> bool {
        let mut reason = self.reason.lock();
        let again = *reason == Some(Reason::Reset);
        if again {
            *reason = None;
        }
        again
    }
}

/// The properties of a disk that `info` reports.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// Its size in bytes, as the guest sees it.
    pub size_bytes: u64,
    /// True if the guest may only read.
    pub read_only: bool,
    /// The name of its I/O driver.
    pub driver_name: &'static str,
}

impl Shown {
    fn of(function: &VirtioPciBlock) -> Self {
        Self {
            size_bytes: function.size_bytes(),
            read_only: function.is_read_only(),
            driver_name: function.driver_name(),
        }
    }
}

/// A disk in its slot.
#[derive(Debug)]
struct Plugged {
    function: Arc<Mutex<VirtioPciBlock>>,
    /// As it was when it was looked at last.
    shown: Mutex<Shown>,
}

impl Plugged {
    /// Returns the disk's properties; while it is busy, such as draining, the last known ones.
    fn shown(&self) -> Shown {
        let mut shown = self.shown.lock();
        if let Some(function) = self.function.try_lock() {
            *shown = Shown::of(&function);
        }
        *shown
    }
}

/// Called with the slot of a disk that the guest has released, on the CPU's thread, so it must return soon. The
/// machine no longer uses the disk.
pub type Ejected = Arc<dyn Fn(usize) + Send + Sync>;

/// All disks, as those who plug see them and as the bus does.
#[derive(Debug, Default)]
struct Disks {
    plugged: Mutex<BTreeMap<usize, Arc<Plugged>>>,
    slots: Arc<Slots>,
}

impl Disks {
    /// Takes a disk out of its slot and drains it. `false`: there was none.
    fn unplug(&self, slot: usize) -> bool {
        let Some(disk) = self.plugged.lock().remove(&slot) else {
            return false;
        };
        self.slots.unplug(slot);
        // The map is not locked meanwhile: a drain takes as long as the host's disk does.
        if let Err(error) = disk.function.lock().unplug() {
            tracing::error!(slot, %error, "cannot drain the queues of a disk");
        }
        true
    }
}

/// A machine, from its first instruction to its end.
#[derive(Debug)]
pub struct Machine {
    kvm: Arc<KvmMachine>,
    cpus: Cpus,
    hotplug: Arc<Hotplug>,
    disks: Arc<Disks>,
    /// The devices that are no disks, by slot.
    others: Mutex<BTreeMap<usize, Arc<Mutex<VirtioPciDevice>>>>,
}

impl Machine {
    /// Returns a machine that is ready to run, paused. `ejected` is called for disks that the guest releases.
    ///
    /// # Errors
    ///
    /// [`MachineError`].
    pub fn new(
        config: &MachineConfig,
        console: &Console,
        stop: &Arc<Stop>,
        ejected: Ejected,
    ) -> Result<Self, MachineError> {
        config.check()?;
        let memory = memory::make(&config.memory, arch::memory_layout)?;
        let kvm = KvmMachine::new(memory)?;
        let disks = Arc::new(Disks::default());
        let hotplug = Arc::new(make_hotplug(&kvm, &disks, ejected));
        let mut bus = Bus::new(Arc::clone(&disks.slots));
        bus.add_ports(
            arch::HOTPLUG_PORT,
            hotplug::REGISTER_BYTES,
            Box::new(HotplugPorts(Arc::clone(&hotplug))),
        );
        let serial = console.attach(kvm.pin(arch::SERIAL_PIN)?);
        bus.add_ports(arch::SERIAL_PORT, arch::SERIAL_PORTS, Box::new(serial));
        bus.add_ports(
            arch::SLEEP_PORT,
            arch::POWER_PORTS,
            Box::new(arch::Power(Arc::clone(stop))),
        );
        bus.add_ports(
            arch::KEYBOARD_PORT,
            arch::KEYBOARD_PORTS,
            Box::new(arch::Keyboard(Arc::clone(stop))),
        );
        bus.add_ports(
            arch::TIMER_PORT,
            arch::TIMER_PORTS,
            Box::new(arch::AcpiTimer::new()),
        );
        bus.add_ports(arch::CMOS_PORT, arch::CMOS_PORTS, Box::new(arch::Cmos::new()));
        let bus = Arc::new(bus);
        let entry = arch::load(kvm.memory(), &config.payload, config.cpus)?;
        let cpus = arch::make_cpus(&kvm, config.cpus, &entry)?;
        let cpus = Cpus::start(cpus, &bus, stop, config.sandbox)?;
        Ok(Self {
            kvm,
            cpus,
            hotplug,
            disks,
            others: Mutex::default(),
        })
    }

    /// Plugs a disk into `slot`, or the lowest free one, and returns the slot. A running guest finds it after
    /// [`Machine::announce`].
    ///
    /// # Errors
    ///
    /// [`MachineError`].
    pub fn plug(
        &self,
        slot: Option<usize>,
        disk: Arc<dyn Disk>,
        config: PciDiskConfig,
    ) -> Result<usize, MachineError> {
        self.plug_with(slot, |memory, bus, window| {
            VirtioPciBlock::new(disk, memory, bus, window, config)
        })
    }

    /// As [`Machine::plug`], a disk that another program serves and is connected to.
    ///
    /// # Errors
    ///
    /// [`MachineError`].
    pub fn plug_vhost_user(
        &self,
        slot: Option<usize>,
        backend: VhostUserBackend,
    ) -> Result<usize, MachineError> {
        self.plug_with(slot, |memory, bus, window| {
            VirtioPciBlock::vhost_user(backend, memory, bus, window)
        })
    }

    fn plug_with(
        &self,
        slot: Option<usize>,
        make: impl FnOnce(GuestMemoryMmap, Arc<dyn BusMachine>, u32) -> Result<VirtioPciBlock, PlugError>,
    ) -> Result<usize, MachineError> {
        let mut disks = self.disks.plugged.lock();
        let slot = slot
            .or_else(|| self.disks.slots.free())
            .ok_or(MachineError::NoSlot)?;
        let function = self.plug_function(slot, make)?;
        let shown = Mutex::new(Shown::of(&function.lock()));
        disks.insert(slot, Arc::new(Plugged { function, shown }));
        Ok(slot)
    }

    /// Plugs a network interface into `slot` of a machine that does not run yet.
    ///
    /// # Errors
    ///
    /// [`MachineError`].
    pub fn plug_network(&self, slot: usize, config: PciNetworkConfig) -> Result<(), MachineError> {
        let function = self.plug_function(slot, |memory, bus, window| {
            VirtioPciDevice::network(config, memory, bus, window)
        })?;
        self.others.lock().insert(slot, function);
        Ok(())
    }

    /// Plugs a source of entropy into `slot` of a machine that does not run yet. Its thread runs `on_start` first.
    ///
    /// # Errors
    ///
    /// [`MachineError`].
    pub fn plug_entropy(&self, slot: usize, on_start: Option<StartHook>) -> Result<(), MachineError> {
        let function = self.plug_function(slot, |memory, bus, window| {
            VirtioPciDevice::entropy(on_start, memory, bus, window)
        })?;
        self.others.lock().insert(slot, function);
        Ok(())
    }

    /// Makes a function, and plugs it into `slot`.
    fn plug_function<T: PciFunction + 'static>(
        &self,
        slot: usize,
        make: impl FnOnce(GuestMemoryMmap, Arc<dyn BusMachine>, u32) -> Result<T, PlugError>,
    ) -> Result<Arc<Mutex<T>>, MachineError> {
        if slot == 0 || slot >= SLOTS || self.disks.slots.is_taken(slot) {
            return Err(MachineError::SlotTaken { slot });
        }
        let window = arch::WINDOWS.start as u32 + slot as u32 * BAR_BYTES;
        let bus = Arc::new(KvmBus(Arc::clone(&self.kvm)));
        let function = make(self.kvm.memory().clone(), bus, window)?;
        let function = Arc::new(Mutex::new(function));
        self.disks.slots.plug(slot, Arc::clone(&function) as Function);
        Ok(function)
    }

    /// Tells the guest that there is a new disk in `slot`.
    pub fn announce(&self, slot: usize) {
        self.hotplug.insert(slot);
    }

    /// Asks the guest to release the disk in `slot`. The guest may do so at any time, or never.
    pub fn ask_for(&self, slot: usize) {
        self.hotplug.ask(slot);
    }

    /// Presses the power button. What the guest makes of it, and when, is up to the guest.
    pub fn press_power_button(&self) {
        self.hotplug.press_power_button();
    }

    /// Lets the guest run.
    pub fn resume(&self) {
        self.disks
            .plugged
            .lock()
            .values()
            .for_each(|disk| disk.function.lock().resume());
        let others = self.others.lock();
        others.values().for_each(|other| other.lock().resume());
        self.cpus.resume();
    }

    /// Stops the guest, and makes durable what its disks have answered. When this returns the images hold every
    /// write that the guest believes done.
    ///
    /// # Errors
    ///
    /// The error of the first disk that cannot make its writes durable; the guest is paused in any case.
    pub fn pause(&self) -> io::Result<()> {
        self.cpus.pause();
        for (slot, other) in &*self.others.lock() {
            if let Err(error) = other.lock().pause() {
                tracing::error!(slot, %error, "cannot stop the queues of a device");
            }
        }
        let mut result = Ok(());
        for disk in self.disks.plugged.lock().values() {
            result = result.and(disk.function.lock().pause());
        }
        result
    }

    /// Returns true if the guest is paused.
    pub fn is_paused(&self) -> bool {
        self.cpus.is_paused()
    }

    /// Enlarges the disk in `slot`, notifies the guest, and returns the new size in bytes.
    ///
    /// # Errors
    ///
    /// [`ResizeError`]; the disk has its old size then.
    pub fn resize(&self, slot: usize, size_bytes: u64) -> Result<u64, ResizeError> {
        let plugged = self.disks.plugged.lock().get(&slot).cloned();
        let plugged = plugged.ok_or(ResizeError::NoDisk)?;
        let size_bytes = plugged.function.lock().resize(size_bytes)?;
        Ok(size_bytes)
    }

    /// Returns the properties of the disk in `slot`, if there is one. Does not wait for a disk that is busy.
    #[must_use]
    pub fn shown(&self, slot: usize) -> Option<Shown> {
        let plugged = self.disks.plugged.lock().get(&slot).cloned();
        plugged.map(|disk| disk.shown())
    }

    /// Returns how often the CPUs have exited from the guest to this program.
    pub fn exits(&self) -> Exits {
        self.cpus.exits()
    }

    /// Ends the machine: no CPU runs any more, every disk's requests are answered, and nothing comes from a network. The disks stay open.
    pub fn end(&self) {
        self.cpus.end();
        for slot in 0..SLOTS {
            self.disks.unplug(slot);
        }
        for (slot, other) in std::mem::take(&mut *self.others.lock()) {
            self.disks.slots.unplug(slot);
            if let Err(error) = other.lock().unplug() {
                tracing::error!(slot, %error, "cannot stop the queues of a device");
            }
        }
    }
}

fn make_hotplug(kvm: &Arc<KvmMachine>, disks: &Arc<Disks>, ejected: Ejected) -> Hotplug {
    let (machine, disks) = (Arc::clone(kvm), Arc::clone(disks));
    Hotplug::new(
        move |high| {
            if let Err(error) = machine.set_line(arch::HOTPLUG_PIN, high) {
                tracing::error!(%error, "cannot notify the guest of a disk change");
            }
        },
        move |slot| {
            if disks.unplug(slot) {
                ejected(slot);
            }
        },
    )
}
