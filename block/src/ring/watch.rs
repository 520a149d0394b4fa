//! Watched eventfds: kicks and wake-ups that reach a worker as completions of its ring.
//!
//! Invariant: a watch takes a slot that ops do not take, so that a full ring can still be woken.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};

use super::Ring;
use super::driver::Wait;
use super::in_flight::InFlight;
use super::slots::{EventToken, Owner, user_data};
use crate::handle::Kind;

/// A watched descriptor; dropping it ends the watch.
pub struct Watch {
    ring: Weak<InFlight>,
    index: u32,
    generation: u32,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch(slot {})", self.index)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(ring) = self.ring.upgrade() else { return };
        let mut slots = ring.slots.borrow_mut();
        let Some(slot) = slots.get_mut(self.index) else {
            return;
        };
        if slot.generation != self.generation {
            return;
        }
        slot.owner = Owner::Orphan;
        drop(slots);
        let mut driver = ring.driver.borrow_mut();
        let user_data = user_data(self.index, self.generation);
        if driver.cancel(user_data).is_err() && driver.enter(Wait::No).is_ok() {
            // Refused twice: the watch ends with the ring instead.
            driver.cancel(user_data).unwrap_or_default();
        }
    }
}

impl Ring {
    /// Reports `token` from [`Ring::take_events`] whenever `fd` (an eventfd) is signalled, until the
    /// returned watch is dropped.
    ///
    /// # Errors
    ///
    /// If every slot is taken, or the file cannot be registered.
    pub fn watch(&self, fd: OwnedFd, token: EventToken) -> io::Result<Watch> {
        let file = self.register(fd)?;
        let mut slots = self.in_flight.slots.borrow_mut();
        let Some(index) = slots.take_for_watch() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let Some(slot) = slots.get_mut(index) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        slot.kind = Kind::Watch;
        slot.file = Some(file);
        slot.owner = Owner::Watch(token);
        let generation = slot.generation;
        drop(slots);
        self.in_flight.push(index);
        Ok(Watch {
            ring: Rc::downgrade(&self.in_flight),
            index,
            generation,
        })
    }

    /// Returns true if a watch has fired, and [`Ring::take_events`] has something to take.
    #[inline]
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.in_flight.events.borrow().is_empty()
    }

    /// Appends the tokens of watches that fired to `out`.
    pub fn take_events(&self, out: &mut Vec<EventToken>) {
        out.append(&mut self.in_flight.events.borrow_mut());
    }
}
