//! A machine of the host's KVM: memory, interrupt controllers, events. What is x86 of it is in [`super::x86_64`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry};
use kvm_ioctls::{Cap, Error, IoEventAddress, Kvm, NoDatamatch, VmFd};
use parking_lot::Mutex;
use virtio_devices::transport::{Interrupt, Machine, MsiMessage};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::kvm_error::{API_VERSION, KvmError, refuses};
use super::{MachineError, memory, x86_64 as arch};

/// The first interrupt number that is no pin of a controller.
const FIRST_MSI: u32 = arch::PINS;
/// The most interrupts KVM routes.
const ROUTES_MAX: u32 = 1024;

/// One virtual machine.
#[derive(Debug)]
pub struct KvmMachine {
    pub(super) kvm: Kvm,
    vm: VmFd,
    memory: GuestMemoryMmap,
    routes: Mutex<Routes>,
}

/// The meaning of interrupt numbers beyond the pins.
#[derive(Debug, Default)]
struct Routes {
    messages: Vec<Option<MsiMessage>>,
    free: Vec<u32>,
}

impl Routes {
    /// Sets the message of interrupt `gsi`, once `apply` has passed the whole table to KVM. A failure changes
    /// nothing: KVM would refuse a refused message again with every later table.
    fn set(
        &mut self,
        gsi: u32,
        message: MsiMessage,
        apply: impl FnOnce(&Self) -> io::Result<()>,
    ) -> io::Result<()> {
        let index = (gsi - FIRST_MSI) as usize;
        let before = self.messages.get(index).copied().flatten();
        let put = |routes: &mut Self, message| {
            if let Some(place) = routes.messages.get_mut(index) {
                *place = message;
            }
        };
        put(self, Some(message));
        let applied = apply(self);
        if applied.is_err() {
            put(self, before);
        }
        applied
    }
}

fn open() -> Result<Kvm, KvmError> {
    Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => KvmError::Missing,
        libc::EACCES | libc::EPERM => KvmError::Forbidden,
        errno => KvmError::Refuses {
            what: "opening /dev/kvm",
            source: io::Error::from_raw_os_error(errno),
        },
    })
}

/// The number of times that a call may be interrupted before it has failed.
const INTERRUPTED_MAX: usize = 100;

/// Calls again what a signal interrupts: `KVM_CREATE_VM` takes long, and does not start again by itself.
fn uninterrupted<T>(mut call: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    for _ in 1..INTERRUPTED_MAX {
        match call() {
            Err(error) if error.errno() == libc::EINTR => {}
            result => return result,
        }
    }
    call()
}

impl KvmMachine {
    /// A machine with this memory and interrupt controllers, and no CPU yet.
    ///
    /// # Errors
    ///
    /// [`MachineError`].
    pub fn new(memory: GuestMemoryMmap) -> Result<Arc<Self>, MachineError> {
        let kvm = open()?;
        if kvm.get_api_version() != API_VERSION {
            return Err(KvmError::Strange.into());
        }
        let needed = [
            (Cap::UserMemory, "user memory"),
            (Cap::Irqchip, "interrupt controllers in the kernel"),
            (Cap::Irqfd, "irqfd"),
            (Cap::Ioeventfd, "ioeventfd"),
            (Cap::ImmediateExit, "immediate exits"),
        ];
        for (cap, what) in needed {
            if !kvm.check_extension(cap) {
                return Err(KvmError::Lacks { what }.into());
            }
        }
        let vm = uninterrupted(|| kvm.create_vm()).map_err(refuses("creating a machine"))?;
        arch::before_cpus(&vm)?;
        memory::plug(&vm, &memory).map_err(refuses("the guest's memory"))?;
        let machine = Self {
            kvm,
            vm,
            memory,
            routes: Mutex::default(),
        };
        machine
            .apply(&machine.routes.lock())
            .map_err(|source| KvmError::Refuses {
                what: "interrupt routing",
                source,
            })?;
        Ok(Arc::new(machine))
    }

    pub(super) fn vm(&self) -> &VmFd {
        &self.vm
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// An event that raises a pin of the interrupt controllers, edge by edge.
    pub(super) fn pin(&self, pin: u32) -> Result<EventFd, MachineError> {
        let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(MachineError::Events)?;
        let refused = refuses("an interrupt line");
        self.vm.register_irqfd(&event, pin).map_err(refused)?;
        Ok(event)
    }

    /// Sets the level of a pin of the interrupt controllers.
    pub(super) fn set_line(&self, pin: u32, high: bool) -> io::Result<()> {
        let done = self.vm.set_irq_line(pin, high);
        done.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    /// Gives KVM the whole table: it cannot be changed in part.
    fn apply(&self, routes: &Routes) -> io::Result<()> {
        let mut entries = arch::pin_routes();
        for (message, gsi) in routes.messages.iter().zip(FIRST_MSI..) {
            let Some(message) = message else { continue };
            let mut entry = kvm_irq_routing_entry {
                gsi,
                type_: KVM_IRQ_ROUTING_MSI,
                ..Default::default()
            };
            entry.u.msi.address_lo = message.address as u32;
            entry.u.msi.address_hi = (message.address >> 32) as u32;
            entry.u.msi.data = message.data;
            entries.push(entry);
        }
        let table = KvmIrqRouting::from_entries(&entries).map_err(io::Error::other)?;
        self.vm
            .set_gsi_routing(&table)
            .map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }
}

/// An interrupt beyond the pins.
#[derive(Debug)]
struct Message {
    machine: Arc<KvmMachine>,
    gsi: u32,
    /// The same eventfd twice: one for the device to signal, one for KVM.
    fd: OwnedFd,
    event: EventFd,
    connected: Mutex<bool>,
}

impl Interrupt for Message {
    fn event(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn connect(&self, message: MsiMessage) -> io::Result<()> {
        let mut connected = self.connected.lock();
        self.machine
            .routes
            .lock()
            .set(self.gsi, message, |routes| self.machine.apply(routes))?;
        if !*connected {
            let done = self.machine.vm.register_irqfd(&self.event, self.gsi);
            done.map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
            *connected = true;
        }
        Ok(())
    }

    fn disconnect(&self) -> io::Result<()> {
        let mut connected = self.connected.lock();
        if *connected {
            let done = self.machine.vm.unregister_irqfd(&self.event, self.gsi);
            done.map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
            *connected = false;
        }
        Ok(())
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        self.disconnect().unwrap_or_default();
        let mut routes = self.machine.routes.lock();
        if let Some(place) = routes.messages.get_mut((self.gsi - FIRST_MSI) as usize) {
            *place = None;
        }
        routes.free.push(self.gsi);
    }
}

/// The eventfd behind a borrowed descriptor, as `kvm-ioctls` wants it.
fn as_event(event: BorrowedFd<'_>) -> io::Result<EventFd> {
    let raw = event.try_clone_to_owned()?.into_raw_fd();
    #[expect(
        unsafe_code,
        reason = "the only way to make an EventFd of an owned descriptor"
    )]
    // SAFETY: the descriptor was owned, and is the new value's alone.
    let event = unsafe { EventFd::from_raw_fd(raw) };
    Ok(event)
}

/// The implementation of [`Machine`] for devices: the machine itself, shared.
#[derive(Clone, Debug)]
pub struct KvmBus(pub Arc<KvmMachine>);

impl Machine for KvmBus {
    fn watch(&self, address: u64, kick: BorrowedFd<'_>) -> io::Result<()> {
        let event = as_event(kick)?;
        let done = self
            .0
            .vm
            .register_ioevent(&event, &IoEventAddress::Mmio(address), NoDatamatch);
        done.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    fn unwatch(&self, address: u64, kick: BorrowedFd<'_>) -> io::Result<()> {
        let event = as_event(kick)?;
        let done = self
            .0
            .vm
            .unregister_ioevent(&event, &IoEventAddress::Mmio(address), NoDatamatch);
        done.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    fn interrupt(&self) -> io::Result<Box<dyn Interrupt>> {
        let fd = block::event::eventfd()?;
        let event = as_event(fd.as_fd())?;
        let mut routes = self.0.routes.lock();
        let gsi = match routes.free.pop() {
            Some(gsi) => gsi,
            None => {
                let gsi = FIRST_MSI + routes.messages.len() as u32;
                if gsi >= ROUTES_MAX {
                    return Err(io::Error::other(
                        "a machine has 1000 interrupts, and all are in use",
                    ));
                }
                routes.messages.push(None);
                gsi
            }
        };
        Ok(Box::new(Message {
            machine: Arc::clone(&self.0),
            gsi,
            fd,
            event,
            connected: Mutex::new(false),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uninterrupted_retries_only_eintr_and_not_forever() {
        let after = |interrupts: usize, last: Result<u8, i32>| {
            let mut calls = 0;
            let result = uninterrupted(|| {
                calls += 1;
                if calls <= interrupts {
                    Err(Error::new(libc::EINTR))
                } else {
                    last.map_err(Error::new)
                }
            });
            (calls, result.map_err(|error| error.errno()))
        };
        assert_eq!(after(0, Ok(7)), (1, Ok(7)));
        assert_eq!(after(3, Ok(7)), (4, Ok(7)));
        assert_eq!(after(2, Err(libc::EBUSY)), (3, Err(libc::EBUSY)));
        assert_eq!(after(usize::MAX, Ok(7)), (INTERRUPTED_MAX, Err(libc::EINTR)));
    }

    #[test]
    fn routes_keep_no_refused_message() {
        let message = |data| MsiMessage {
            address: 0xFEE0_0000,
            data,
        };
        let mut routes = Routes {
            messages: vec![Some(message(1)), None],
            free: Vec::new(),
        };
        for (gsi, before) in [(FIRST_MSI, Some(message(1))), (FIRST_MSI + 1, None)] {
            let refuses = |routes: &Routes| {
                assert_eq!(
                    routes.messages[(gsi - FIRST_MSI) as usize],
                    Some(message(7)),
                    "it is told"
                );
                Err(io::ErrorKind::InvalidInput.into())
            };
            routes.set(gsi, message(7), refuses).expect_err("it is refused");
            assert_eq!(routes.messages[(gsi - FIRST_MSI) as usize], before);
        }
        routes
            .set(FIRST_MSI + 1, message(2), |_| Ok(()))
            .expect("it is taken");
        assert_eq!(routes.messages, [Some(message(1)), Some(message(2))]);
    }
}
