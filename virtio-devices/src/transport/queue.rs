//! One queue of a function: its registers and its running state.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::device::{Device, DeviceError, QueueInterrupt, QueueStart};
use super::msix::{NO_VECTOR, Vectors};
use crate::virtqueue::RingAddresses;

/// A queue.
#[derive(Debug)]
pub(super) struct PciQueue {
    index: u16,
    pub(super) size_max: u16,
    pub(super) size: u16,
    pub(super) addresses: RingAddresses,
    pub(super) enabled: bool,
    interrupt: QueueInterrupt,
    kick: OwnedFd,
    next_available: u16,
    running: bool,
}

const NOWHERE: RingAddresses = RingAddresses {
    descriptors: 0,
    available: 0,
    used: 0,
};

impl PciQueue {
    pub(super) fn new(index: u16, size_max: u16, vectors: &Vectors) -> io::Result<Self> {
        Ok(Self {
            index,
            size_max,
            size: size_max,
            addresses: NOWHERE,
            enabled: false,
            interrupt: QueueInterrupt::new(vectors),
            kick: block::event::eventfd()?,
            next_available: 0,
            running: false,
        })
    }

    /// The eventfd that says that there are chains.
    pub(super) fn kick(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    pub(super) fn vector(&self) -> u16 {
        self.interrupt.vector()
    }

    pub(super) fn set_vector(&self, vector: u16, device: &mut dyn Device) -> Result<(), DeviceError> {
        if vector == self.vector() {
            return Ok(());
        }
        self.interrupt.set_vector(vector);
        if self.running {
            device.rewire(self.index, &self.interrupt)?;
        }
        Ok(())
    }

    /// Drains the queue, if it runs.
    pub(super) fn stop(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.running) {
            self.next_available = device.stop(self.index)?;
        }
        Ok(())
    }

    /// As a driver finds it that has just reset the device. The queue does not run.
    pub(super) fn reset(&mut self) {
        self.size = self.size_max;
        self.addresses = NOWHERE;
        self.enabled = false;
        self.next_available = 0;
        self.interrupt.set_vector(NO_VECTOR);
    }

    /// Runs the queue, if it is enabled and does not.
    pub(super) fn start(&mut self, device: &mut dyn Device, features: u64) -> Result<(), DeviceError> {
        if !self.enabled || self.running {
            return Ok(());
        }
        let start = QueueStart {
            size: self.size,
            addresses: self.addresses,
            next_available: self.next_available,
            features,
            kick: self.kick.as_fd(),
            interrupt: &self.interrupt,
        };
        device.start(self.index, &start)?;
        self.running = true;
        Ok(())
    }
}
