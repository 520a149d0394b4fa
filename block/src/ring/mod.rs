//! The ring, the only code that submits I/O to the kernel.
//!
//! A [`Ring`] belongs to one worker. Ops are started on it either for a whole [`Request`](crate::Request) (the fast path:
//! no task, no allocation; the request is answered when the op ends) or as a future. Either way the op
//! owns its memory through its slot until its completion has been reaped. Dropping a future frees
//! nothing early, and dropping the ring cancels and drains first.
//!
//! ```text
//!  Ring ── ops, fill_and_copy, watch, command ──▶ slots ──▶ in_flight ──▶ Driver: uring, syscall, null, or the simulator's
//!  (this file)   put an op into a slot            own memory  push, reap   start ops, report results
//! ```
//!
//! An op moves bytes between a file and memory or, if only the kernel reaches a request's bytes, a
//! [registered buffer](crate::Buffer::registered); [`Ring::fill_zeros`] and [`Ring::copy`] hide the difference.
//!
//! Invariants:
//! - memory named by a started op is held by its slot;
//! - a short transfer is continued, a read past the end of the file is completed with zeros, and only
//!   then is an op successful;
//! - the ring never calls out while its state is borrowed: answers and wake-ups only queue work.

mod choose_driver;
mod command;
mod command_sink;
mod control;
mod copy_through;
#[cfg(test)]
pub(crate) mod counting;
#[doc(hidden)]
pub mod driver;
mod fill_and_copy;
mod fixed;
mod in_flight;
mod null;
mod ops;
mod slots;
mod sys;
mod syscall;
mod uring;
mod watch;
mod write_threads;

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};

use crate::changes::ChangeCounter;
use crate::handle::Observer;
use choose_driver::depth_within_bounds;
use driver::Driver;
use in_flight::InFlight;

#[doc(hidden)]
pub use choose_driver::driver_of;
pub use choose_driver::{RingError, RingKind};
pub use command::{DeviceCommand, Direction, NoSlot};
pub use command_sink::CommandSink;
pub use control::{ControlError, ControlRing, start_and_end};
pub use fixed::FixedTable;
pub use ops::{OpFuture, Pieces};
pub use slots::EventToken;
pub(crate) use sys::{set_timer, timer};
pub use watch::Watch;

pub use crate::door::{Door, FixedBuffer, LeaseError};
pub use crate::handle::FileHandle;

/// A worker's ring. Cheap to clone; all clones are the same ring.
#[derive(Clone)]
pub struct Ring {
    in_flight: Rc<InFlight>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("driver", &self.driver_name())
            .field("in_flight", &self.in_flight())
            .finish()
    }
}

impl Ring {
    /// Makes a ring with room for `depth` ops in flight (at least 16).
    ///
    /// # Errors
    ///
    /// If io_uring was requested and is refused.
    pub fn new(kind: RingKind, depth: u32) -> Result<Self, RingError> {
        Self::with_fixed(kind, depth, &FixedTable::default())
    }

    /// Makes a ring with a table of registered buffers. Drivers other than io_uring reach their bytes through doors.
    ///
    /// # Errors
    ///
    /// If io_uring was requested and is refused, or has no such tables (Linux 5.19).
    pub fn with_fixed(kind: RingKind, depth: u32, table: &FixedTable) -> Result<Self, RingError> {
        let depth = depth_within_bounds(depth);
        Ok(Self::with_driver(
            driver_of(kind, depth, table)?,
            depth,
            table.len(),
        ))
    }

    /// Makes a ring on `driver`, with room for `depth` ops and a table of `places` registered buffers.
    #[doc(hidden)]
    #[must_use]
    pub fn with_driver(driver: Box<dyn Driver>, depth: u32, places: usize) -> Self {
        Self {
            in_flight: Rc::new(InFlight::new(driver, depth, places)),
        }
    }

    /// Returns the driver's name: `"io_uring"`, `"syscalls"`, `"null"` or `"sim"`.
    #[must_use]
    pub fn driver_name(&self) -> &'static str {
        self.in_flight.driver.borrow().name()
    }

    /// Returns the number of ops in flight, without watches and commands.
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight.ops()
    }

    /// Registers a file with the ring.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to register it.
    pub fn register(&self, fd: OwnedFd) -> io::Result<FileHandle> {
        self.register_as(fd, None)
    }

    /// Registers the file of a view: its observer is called for every op on it that fails, and every op that may have
    /// changed it is counted.
    pub(crate) fn register_view(
        &self,
        fd: OwnedFd,
        observer: Rc<dyn Observer>,
        changes: ChangeCounter,
    ) -> io::Result<FileHandle> {
        self.register_as(fd, Some((observer, changes)))
    }

    fn register_as(
        &self,
        fd: OwnedFd,
        view: Option<(Rc<dyn Observer>, ChangeCounter)>,
    ) -> io::Result<FileHandle> {
        let slot = self.in_flight.driver.borrow_mut().register_file(fd.as_raw_fd())?;
        let ring: Weak<InFlight> = Rc::downgrade(&self.in_flight);
        Ok(FileHandle::new(fd, slot, view, ring))
    }

    /// Returns the length of a file, or the size of a block device, in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel does not report it.
    pub fn file_len(&self, file: &FileHandle) -> io::Result<u64> {
        self.in_flight.driver.borrow().file_len(file.slot())
    }

    /// Returns the first byte offset at or after `offset` where a file may hold data; bytes before it read as zeros.
    /// Returns `None` if all the rest does.
    #[must_use]
    pub fn next_data(&self, file: &FileHandle, offset: u64) -> Option<u64> {
        self.in_flight.driver.borrow().next_data(file.slot(), offset)
    }

    /// Returns the first byte offset at or after `offset` where a file has a hole; `None` if there is none before its end.
    #[must_use]
    pub fn next_hole(&self, file: &FileHandle, offset: u64) -> Option<u64> {
        self.in_flight.driver.borrow().next_hole(file.slot(), offset)
    }

    /// Starts the submitted ops and reaps completions: answers requests, wakes futures, records events. With
    /// `wait`, returns only when an op ended or a signal came. Without, makes no system call unless an op is
    /// to be started or has ended. Returns the number of completions.
    ///
    /// # Errors
    ///
    /// If the kernel fails the call as a whole.
    pub fn turn(&self, wait: bool) -> io::Result<usize> {
        self.in_flight.turn(wait)
    }

    /// Requests cancellation of every op in flight. Their completions still come.
    pub fn cancel_all(&self) {
        self.in_flight.cancel_all();
    }
}

#[cfg(test)]
mod tests;
