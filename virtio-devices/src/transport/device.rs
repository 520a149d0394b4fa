//! The device behind a PCI function: the seam between the function's registers and the queues.
//!
//! The function keeps the registers; a [`Device`] gives them their meaning.
//!
//! Invariants: when [`Device::stop`] returns, nothing touches the queue or a buffer of its requests any more.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use block::IoError;

use super::error::ResizeError;
use super::msix::{NO_VECTOR, Vectors};
use crate::virtqueue::RingAddresses;

/// The interrupt of one queue, as the driver has chosen it.
#[derive(Clone)]
pub(super) struct QueueInterrupt {
    vector: Arc<AtomicU16>,
    vectors: Vectors,
}

impl fmt::Debug for QueueInterrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QueueInterrupt").field(&self.vector).finish()
    }
}

impl QueueInterrupt {
    /// No interrupt, until one is chosen.
    pub(super) fn new(vectors: &Vectors) -> Self {
        Self {
            vector: Arc::new(AtomicU16::new(NO_VECTOR)),
            vectors: Arc::clone(vectors),
        }
    }

    pub(super) fn vector(&self) -> u16 {
        self.vector.load(Ordering::Relaxed)
    }

    pub(super) fn set_vector(&self, vector: u16) {
        self.vector.store(vector, Ordering::Relaxed);
    }

    /// The eventfd that raises it, if there is one; what is signalled while it is masked stays there.
    pub(super) fn event(&self) -> Option<BorrowedFd<'_>> {
        let vector = self.vectors.get(usize::from(self.vector()))?;
        Some(vector.event())
    }
}

/// The parameters with which a queue is started.
pub(super) struct QueueStart<'a> {
    /// Its entries.
    pub(super) size: u16,
    /// The guest addresses of its rings.
    pub(super) addresses: RingAddresses,
    /// The available index of the first chain to take.
    pub(super) next_available: u16,
    /// The features that the driver accepted.
    pub(super) features: u64,
    /// The eventfd that says that there are chains.
    pub(super) kick: BorrowedFd<'a>,
    /// The interrupt that notifies the guest.
    pub(super) interrupt: &'a QueueInterrupt,
}

/// An error of a request of the driver or the machine to a device.
pub(super) type DeviceError = Box<dyn std::error::Error + Send + Sync>;

/// A virtio device without its transport.
pub(super) trait Device: Send + fmt::Debug {
    /// The features it offers; the transport's own are not among them.
    fn features(&self) -> u64;

    /// Reads the configuration space at `offset`, as a driver that negotiated `features` finds it; zeros past its end.
    fn read_config(&self, offset: u64, data: &mut [u8], features: u64);

    /// Writes the configuration space. A write that the driver may not do is ignored; an error is one that only a
    /// reset helps against.
    fn write_config(&mut self, offset: u64, data: &[u8], features: u64) -> Result<(), DeviceError>;

    /// Runs queue `index`, which does not run.
    fn start(&mut self, index: u16, start: &QueueStart<'_>) -> Result<(), DeviceError>;

    /// Drains queue `index`, which runs. Answers the available index of the first chain that was not taken.
    fn stop(&mut self, index: u16) -> Result<u16, DeviceError>;

    /// The driver has chosen another interrupt for queue `index`, which runs.
    fn rewire(&mut self, index: u16, interrupt: &QueueInterrupt) -> Result<(), DeviceError>;

    /// Back to how a new driver expects it. No queue runs.
    fn reset(&mut self);

    /// Makes durable what was answered, as far as that is in this process's hands.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Makes the disk larger, if it is one. Answers its new size in bytes.
    fn resize(&mut self, _size_bytes: u64) -> Result<u64, ResizeError> {
        Err(ResizeError::Disk(IoError::Unsupported))
    }

    /// Returns the name of its I/O driver.
    fn driver_name(&self) -> &'static str;
}
