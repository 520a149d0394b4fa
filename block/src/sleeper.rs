//! Falling asleep without missing what others leave: the announcement of a sleep, and the eventfd that ends it.
//!
//! Invariant: a wake-up is never lost. The sleeper announces its sleep *before* it looks for the last time at what
//! others may have left; a waker leaves it *before* it looks for a sleeper. Both have a fence between.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::event::signal_event;
use crate::sync::atomic::{AtomicBool, Ordering, fence};

/// A thread that sleeps on an eventfd now and then, as others see it.
#[derive(Debug)]
pub(crate) struct Sleeper {
    sleeping: AtomicBool,
    wake: OwnedFd,
}

impl Sleeper {
    /// Makes an awake thread's, woken by the eventfd `wake`.
    pub(crate) fn new(wake: OwnedFd) -> Self {
        Self {
            sleeping: AtomicBool::new(false),
            wake,
        }
    }

    /// Wakes the thread if it sleeps or is about to. What it is woken for must have been left before.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) && self.sleeping.swap(false, Ordering::SeqCst) {
            signal_event(self.wake.as_raw_fd());
        }
    }

    /// Announces a sleep. The thread must look for work once more before it sleeps.
    pub(crate) fn announce(&self) {
        self.set(true);
        fence(Ordering::SeqCst);
    }

    /// Ends an announced sleep.
    pub(crate) fn end(&self) {
        self.set(false);
    }

    /// Returns true if a sleep is announced, and nobody has woken the thread since.
    pub(crate) fn is_sleeping(&self) -> bool {
        self.sleeping.load(Ordering::SeqCst)
    }

    /// Returns a duplicate of the eventfd.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub(crate) fn wake_fd(&self) -> io::Result<OwnedFd> {
        self.wake.try_clone()
    }

    fn set(&self, sleeping: bool) {
        // An exchange costs as much as a store here, and orders all changes of the flag in a way that loom models too.
        self.sleeping.swap(sleeping, Ordering::SeqCst);
    }
}
