//! A device on the PCI bus of a machine in the same process.
//!
//! [`VirtioPciBlock`] is a whole PCI function: configuration space, MSI-X and the virtio registers, for a disk
//! whose queues run on workers of its own. [`VirtioPciDevice`] is one for a network interface, whose queues the host's kernel
//! runs, or for a source of entropy. Each needs a [`Machine`], which turns a guest's write into an event and an event into an
//! interrupt. Spec: virtio 1.2, 4.1; PCI 3.0, 6.
//!
//! ```text
//! guest ──kick──▶ ioeventfd ──▶ worker ──▶ disk
//!       ◀──MSI──── irqfd ◀──────┘
//! ```
//!
//! Invariants: registers are accessed by one thread at a time. Kicks and interrupts go directly between guest and
//! worker, without a thread of the machine.

mod config_space;
mod device;
mod disk;
mod entropy;
mod error;
mod foreign;
mod function;
mod in_process;
mod memory;
mod msix;
mod network;
mod others;
mod pci;
mod queue;
mod tap;
#[cfg(test)]
mod tests;
mod vhost_net;

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use disk::{PciDiskConfig, VirtioPciBlock};
pub use error::{PlugError, ResizeError};
pub use foreign::{BackendError, VhostUserBackend, VhostUserDiskConfig};
pub use network::{MacAddress, MacAddressError, PciNetworkConfig};
pub use others::VirtioPciDevice;
pub use pci::BAR_BYTES;
pub use tap::{Tap, TapError};
pub use vhost_net::VhostNetError;

/// A message that raises an interrupt when it is written: what MSI-X puts in a table entry.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct MsiMessage {
    /// The guest physical address to write to.
    pub address: u64,
    /// The value to write.
    pub data: u32,
}

/// One interrupt of a machine.
pub trait Interrupt: Send + Sync + fmt::Debug {
    /// The eventfd whose signal raises it. What is signalled while it is not connected is raised when it is.
    fn event(&self) -> BorrowedFd<'_>;

    /// From now on it is raised as `message`.
    ///
    /// # Errors
    ///
    /// The error of the machine's host.
    fn connect(&self, message: MsiMessage) -> io::Result<()>;

    /// From now on it is not raised.
    ///
    /// # Errors
    ///
    /// The error of the machine's host.
    fn disconnect(&self) -> io::Result<()>;
}

/// The services that a device needs from its machine.
pub trait Machine: Send + Sync + fmt::Debug {
    /// From now on a guest's write to `address` signals the eventfd `kick` and does nothing else.
    ///
    /// # Errors
    ///
    /// The error of the machine's host.
    fn watch(&self, address: u64, kick: BorrowedFd<'_>) -> io::Result<()>;

    /// Ends [`Machine::watch`] for the same address and eventfd.
    ///
    /// # Errors
    ///
    /// The error of the machine's host.
    fn unwatch(&self, address: u64, kick: BorrowedFd<'_>) -> io::Result<()>;

    /// A new interrupt, not connected.
    ///
    /// # Errors
    ///
    /// If the machine has no more of them.
    fn interrupt(&self) -> io::Result<Box<dyn Interrupt>>;
}

/// The guest addresses at which a function answers. Clones show the same window.
///
/// A function may be busy for as long as a drain takes, and a bus asks each for its window to find out whom a guest's
/// access is for. So the window is read without locking the function.
#[derive(Clone, Debug)]
pub struct Window {
    base: Arc<AtomicU64>,
    bytes: u64,
}

impl Window {
    /// In place of an address: the function does not answer.
    const NOWHERE: u64 = u64::MAX;

    /// A window of `bytes` bytes that is nowhere yet.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self {
            base: Arc::new(AtomicU64::new(Self::NOWHERE)),
            bytes,
        }
    }

    /// The addresses at which the function answers now, if it does.
    #[must_use]
    pub fn range(&self) -> Option<Range<u64>> {
        let base = self.base.load(Ordering::SeqCst);
        (base != Self::NOWHERE).then(|| base..base.saturating_add(self.bytes))
    }

    /// Moves the window to `base`, or to nowhere.
    pub fn set(&self, base: Option<u64>) {
        self.base.store(base.unwrap_or(Self::NOWHERE), Ordering::SeqCst);
    }
}

/// A function on a PCI bus, as the bus sees it.
pub trait PciFunction: Send + fmt::Debug {
    /// Reads the configuration space: 1, 2 or 4 bytes, not across a multiple of 4.
    fn read_config(&mut self, offset: u16, data: &mut [u8]);

    /// Writes to the configuration space: 1, 2 or 4 bytes, not across a multiple of 4.
    fn write_config(&mut self, offset: u16, data: &[u8]);

    /// Returns the function's window, without access to the function.
    fn window(&self) -> Window;

    /// Reads at `offset` of the window.
    fn read(&mut self, offset: u64, data: &mut [u8]);

    /// Writes at `offset` of the window.
    fn write(&mut self, offset: u64, data: &[u8]);
}
