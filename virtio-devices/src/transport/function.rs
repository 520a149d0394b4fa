//! The state of a PCI function that its device's threads change, too.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use super::msix::Vectors;
use block::report::LogLimit;

/// The most queues of a function.
pub(super) const QUEUES_MAX: u16 = 256;

/// The status bit by which a device says that only a reset helps.
pub(super) const STATUS_NEEDS_RESET: u8 = 64;
const ISR_CONFIG: u8 = 2;

/// Signals an eventfd. It cannot fail but by a counter at its limit, which is a signal too.
pub(super) fn signal(event: BorrowedFd<'_>) {
    rustix::io::write(event, &1u64.to_ne_bytes()).unwrap_or_default();
}

/// The state of a function that other threads change, too.
#[derive(Debug)]
pub(super) struct FunctionState {
    pub(super) name: String,
    /// The rate limiter of log messages about its guest and its backend.
    pub(super) log_limit: Arc<LogLimit>,
    pub(super) status: AtomicU8,
    pub(super) isr: AtomicU8,
    pub(super) generation: AtomicU8,
    pub(super) config_vector: AtomicU16,
    pub(super) vectors: Vectors,
}

impl FunctionState {
    /// Reports to the guest that a queue is broken and the device needs a reset.
    pub(super) fn needs_reset(&self) {
        self.status.fetch_or(STATUS_NEEDS_RESET, Ordering::SeqCst);
        self.config_changed();
    }

    /// Tells the guest that the configuration space has changed.
    pub(super) fn config_changed(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.isr.fetch_or(ISR_CONFIG, Ordering::SeqCst);
        let vector = self.config_vector.load(Ordering::SeqCst);
        if let Some(interrupt) = self.vectors.get(usize::from(vector)) {
            signal(interrupt.event());
        }
    }
}
