//! The ops in flight of one ring: they are pushed to the driver, reaped, continued, answered, and drained at the end.
//!
//! A slot owns the memory of its op. So an op is pushed only from a slot, a slot is released only when its completion
//! has been reaped, and dropping the state cancels and drains first.
//!
//! Invariant: nothing here calls out while the slots or the driver are borrowed.

#![expect(unsafe_code, reason = "pushes ops whose memory the slots own")]

use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::io;
use std::rc::Rc;

use super::driver::{Completion, Driver, FileSlot, Wait};
use super::slots::{EventToken, Owner, Slots, Step, user_data};
use crate::door::Leases;
use crate::error::IoError;
use crate::handle::{Kind, Registry};

/// The state of a ring: its driver, its slots, and counts of the ops in flight.
pub(super) struct InFlight {
    pub(super) driver: RefCell<Box<dyn Driver>>,
    pub(super) slots: RefCell<Slots>,
    reaped: RefCell<Vec<Completion>>,
    pub(super) events: RefCell<Vec<EventToken>>,
    /// Slots whose op the submission queue had no room for.
    unpushed: RefCell<Vec<u32>>,
    /// Ops in flight, watches and commands not counted.
    ops: Cell<usize>,
    /// The leases on registered buffers.
    pub(super) leases: Rc<Leases>,
    /// Commands in flight; they may never complete.
    pub(super) commands: Cell<usize>,
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight")
            .field("ops", &self.ops.get())
            .finish_non_exhaustive()
    }
}

impl Registry for InFlight {
    fn unregister(&self, slot: FileSlot) {
        // A file dropped while the driver is borrowed stays registered as long as the ring lives.
        if let Ok(mut driver) = self.driver.try_borrow_mut() {
            driver.unregister_file(slot);
        }
    }
}

impl InFlight {
    /// Makes the state of a ring on `driver` with room for `depth` ops and a table of `places` registered buffers.
    pub(super) fn new(driver: Box<dyn Driver>, depth: u32, places: usize) -> Self {
        Self {
            driver: RefCell::new(driver),
            slots: RefCell::new(Slots::new(depth)),
            reaped: RefCell::default(),
            events: RefCell::default(),
            unpushed: RefCell::default(),
            ops: Cell::new(0),
            leases: Leases::new(places),
            commands: Cell::new(0),
        }
    }

    /// Returns the number of ops in flight, without watches and commands.
    #[inline]
    pub(super) fn ops(&self) -> usize {
        self.ops.get()
    }

    /// Starts the op that was put into a slot.
    pub(super) fn start(&self, index: u32) {
        self.ops.set(self.ops.get() + 1);
        self.push(index);
    }

    /// Passes a slot's op to the driver, now or, if that has no room, at the next turn.
    pub(super) fn push(&self, index: u32) {
        if !self.try_push(index) {
            self.unpushed.borrow_mut().push(index);
        }
    }

    fn try_push(&self, index: u32) -> bool {
        let slots = self.slots.borrow();
        let Some(slot) = slots.get(index) else { return true };
        let Some(op) = slot.kernel_op() else { return true };
        let user_data = user_data(index, slot.generation);
        let mut driver = self.driver.borrow_mut();
        // SAFETY: `op` points into the slot, which does not move and is released only once its
        // completion was reaped (`reap`); until then the slot also holds the memory named by the
        // slices (its owner's request or `keep`) and the registered file.
        if unsafe { driver.push(&op, user_data) }.is_ok() {
            return true;
        }
        if driver.enter(Wait::No).is_err() {
            return false;
        }
        // SAFETY: as above.
        unsafe { driver.push(&op, user_data) }.is_ok()
    }

    /// Starts the pushed ops and reaps completions: see [`Ring::turn`](super::Ring::turn).
    pub(super) fn turn(&self, wait: bool) -> io::Result<usize> {
        let unpushed = std::mem::take(&mut *self.unpushed.borrow_mut());
        for index in unpushed {
            self.push(index);
        }
        let wait = match wait {
            false => Wait::No,
            true if self.ops.get() > 0 => Wait::Io,
            true => Wait::Event,
        };
        self.driver.borrow_mut().enter(wait)?;
        Ok(self.reap())
    }

    fn reap(&self) -> usize {
        let mut reaped = self.reaped.take();
        self.driver.borrow_mut().reap(&mut reaped);
        let count = reaped.len();
        for completion in reaped.drain(..) {
            self.complete(completion);
        }
        self.reaped.replace(reaped);
        count
    }

    #[inline]
    fn complete(&self, completion: Completion) {
        let (index, generation) = (
            (completion.user_data & 0xffff_ffff) as u32,
            completion.user_data >> 32,
        );
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(index) else { return };
        if u64::from(slot.generation) != generation {
            tracing::error!(index, "a completion for a slot that has ended");
            return;
        }
        if matches!(slot.kind, Kind::Watch | Kind::Command { .. }) {
            drop(slots);
            return self.complete_special(index, completion);
        }
        match slot.advance(completion.result) {
            Step::Again => {
                drop(slots);
                self.push(index);
            }
            Step::End(result) => {
                self.ops.set(self.ops.get() - 1);
                slot.count_change();
                let mut slots = match result {
                    Ok(()) => slots,
                    Err(error) => self.report(slots, index, error),
                };
                let Some(slot) = slots.get_mut(index) else { return };
                if let Owner::Waiting(waker) = &mut slot.owner {
                    let waker = waker.take();
                    slot.owner = Owner::Finished(result);
                    drop(slots);
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                    return;
                }
                let owner = slots.release(index);
                drop(slots);
                if let Owner::Request(request) = owner {
                    request.finish(result);
                }
            }
        }
    }

    /// Processes a completion of a watch or a command.
    #[inline(never)]
    fn complete_special(&self, index: u32, completion: Completion) {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(index) else { return };
        if slot.kind == Kind::Watch {
            let token = match slot.owner {
                Owner::Watch(token) => Some(token),
                _ => None,
            };
            if let Some(token) = token
                && completion.result >= 0
            {
                self.events.borrow_mut().push(token);
            }
            if !completion.more {
                let again = token.is_some() && completion.result >= 0;
                if again {
                    drop(slots);
                    self.push(index);
                } else {
                    let ended = slots.release(index);
                    drop(slots);
                    drop(ended);
                }
            }
            return;
        }
        debug_assert!(
            matches!(slot.owner, Owner::Command(..)),
            "a command without a sink"
        );
        if let Owner::Command(sink, tag) = &slot.owner {
            self.commands.set(self.commands.get() - 1);
            sink.push(*tag, completion.result);
            slots.free(index);
        }
    }

    /// Calls the observer of a failed op's file, with the slots not borrowed.
    #[cold]
    fn report<'a>(&'a self, slots: RefMut<'a, Slots>, index: u32, error: IoError) -> RefMut<'a, Slots> {
        let failed = slots.get(index).and_then(|slot| {
            let observer = Rc::clone(slot.file.as_ref()?.observer()?);
            Some((observer, slot.kind, slot.offset))
        });
        drop(slots);
        if let Some((observer, kind, offset)) = failed {
            observer.failed(kind, offset, error);
        }
        self.slots.borrow_mut()
    }

    /// Requests cancellation of every op in flight. Their completions still come.
    pub(super) fn cancel_all(&self) {
        let slots = self.slots.borrow();
        let mut driver = self.driver.borrow_mut();
        for (index, slot) in slots.busy().filter(|(_, slot)| slot.kind.ends_when_cancelled()) {
            let user_data = user_data(index, slot.generation);
            if driver.cancel(user_data).is_err() && driver.enter(Wait::No).is_ok() {
                // After a second refusal this op is not cancelled, only waited for.
                driver.cancel(user_data).unwrap_or_default();
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.ops.get() > 0 {
            self.cancel_all();
        }
        while self.ops.get() > 0 {
            if let Err(error) = self.turn(true) {
                tracing::error!(%error, ops = self.ops.get(), "a ring cannot drain; leaking its memory");
                let slots = std::mem::replace(&mut *self.slots.borrow_mut(), Slots::new(0));
                // The kernel may still write there: leaking is the only safe end. With the ops their files stay, and the images' locks.
                Box::leak(Box::new(slots));
                return;
            }
        }
        // A command waits for an event of its driver, and cannot be cancelled. It ends with the kernel's
        // ring, some time after this. Until then its driver may write to the memory it was given.
        if self.commands.get() > 0 {
            for memory in self.slots.borrow_mut().abandon() {
                Box::leak(Box::new(memory));
            }
        }
    }
}
