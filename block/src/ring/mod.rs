//! The ring, the only code that submits I/O to the kernel.
//!
//! A [`Ring`] belongs to one worker. Ops are started on it either for a whole [`Request`] (the fast path:
//! no task, no allocation; the request is answered when the op ends) or as a future. Either way the op
//! owns its memory through its slot until its completion has been reaped. Dropping a future frees
//! nothing early, and dropping the ring cancels and drains first.
//!
//! An op moves bytes between a file and memory or, if only the kernel reaches a request's bytes, a
//! [registered buffer](Buffer::registered); [`Ring::fill_zeros`] and [`Ring::copy`] hide the difference.
//!
//! Invariants:
//! - memory named by a started op is held by its slot;
//! - a short transfer is continued, a read past the end of the file is completed with zeros, and only
//!   then is an op successful;
//! - the ring never calls out while its state is borrowed: answers and wake-ups only queue work.

#![expect(unsafe_code, reason = "starts ops whose memory the slots own")]

mod at_door;
mod bytes;
mod command;
mod command_sink;
mod control;
pub(crate) mod driver;
mod fixed;
mod null;
#[cfg(test)]
pub(crate) mod patient;
mod slots;
mod sys;
mod syscall;
mod uring;

use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

use smallvec::SmallVec;

use crate::buffer::{Buffer, Piece, Place, append_zeros};
use crate::canary::{Rule, broken, strikes};
use crate::door::Leases;
use crate::error::IoError;
use crate::handle::{Observer, Registry};
use crate::request::{Op, Request};
use driver::{Completion, Driver, FileSlot, Kind, Wait};
use slots::{Owner, Slots, Step, user_data};

pub use command::{DeviceCommand, Direction, NoSlot};
pub use command_sink::CommandSink;
pub use control::{ControlError, ControlRing, start_and_end};

pub use crate::door::{Door, FixedBuffer, LeaseError};
pub use crate::handle::FileHandle;
pub use fixed::FixedTable;
pub(crate) use sys::{set_timer, signal_event, timer};

/// Driver of a ring.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum RingKind {
    /// io_uring if the kernel allows it, plain system calls otherwise.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// io_uring that can submit driver commands too, or an error.
    IoUringCommands,
    /// Plain system calls, one op at a time.
    Syscalls,
    /// Ops that succeed at once and do nothing, for measuring.
    Null,
}

/// Error: a ring could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel refuses io_uring to this process.
    #[error(
        "io_uring is refused here (is kernel.io_uring_disabled set, or a seccomp filter in force?); use the \
         system-call driver"
    )]
    Refused {
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The process has no descriptor left for a wake-up.
    #[error("a worker cannot be woken: no descriptor for that")]
    Wake {
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl From<RingError> for io::Error {
    fn from(error: RingError) -> Self {
        match error {
            RingError::Refused { source } | RingError::Wake { source } => source,
        }
    }
}

/// Token that a watch reports.
pub type EventToken = u64;

/// A worker's ring. Cheap to clone; all clones are the same ring.
#[derive(Clone)]
pub struct Ring {
    inner: Rc<Inner>,
}

struct Inner {
    driver: RefCell<Box<dyn Driver>>,
    slots: RefCell<Slots>,
    reaped: RefCell<Vec<Completion>>,
    events: RefCell<Vec<EventToken>>,
    /// Slots whose op the submission queue had no room for.
    unpushed: RefCell<Vec<u32>>,
    /// Ops in flight, watches and commands not counted.
    in_flight: Cell<usize>,
    /// The leases on registered buffers.
    leases: Rc<Leases>,
    /// Commands in flight; they may never complete.
    commands: Cell<usize>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("driver", &self.driver_name())
            .field("in_flight", &self.inner.in_flight.get())
            .finish()
    }
}

impl Registry for Inner {
    fn unregister(&self, slot: FileSlot) {
        // A file dropped while the driver is borrowed stays registered as long as the ring lives.
        if let Ok(mut driver) = self.driver.try_borrow_mut() {
            driver.unregister_file(slot);
        }
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

    /// Makes a ring on `driver` with a table of `places` registered buffers.
    pub(crate) fn with_driver(driver: Box<dyn Driver>, depth: u32, places: usize) -> Self {
        Self {
            inner: Rc::new(Inner {
                driver: RefCell::new(driver),
                slots: RefCell::new(Slots::new(depth)),
                reaped: RefCell::default(),
                events: RefCell::default(),
                unpushed: RefCell::default(),
                in_flight: Cell::new(0),
                leases: Leases::new(places),
                commands: Cell::new(0),
            }),
        }
    }

    /// Returns the driver's name: `"io_uring"`, `"syscalls"`, `"null"` or `"sim"`.
    #[must_use]
    pub fn driver_name(&self) -> &'static str {
        self.inner.driver.borrow().name()
    }

    /// Returns the number of ops in flight, without watches and commands.
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.inner.in_flight.get()
    }

    /// Registers a file with the ring.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to register it.
    pub fn register(&self, fd: OwnedFd) -> io::Result<FileHandle> {
        self.register_observed(fd, None)
    }

    /// Registers a file with the ring; `observer` is called for every op on it that fails.
    pub(crate) fn register_observed(
        &self,
        fd: OwnedFd,
        observer: Option<Rc<dyn Observer>>,
    ) -> io::Result<FileHandle> {
        let slot = self.inner.driver.borrow_mut().register_file(fd.as_raw_fd())?;
        let ring: Weak<Inner> = Rc::downgrade(&self.inner);
        Ok(FileHandle::new(fd, slot, observer, ring))
    }

    /// Starts a read or write request as one op, at `host_offset` of `file`, or a flush request as a sync of
    /// `file`. The request is answered when the op ends.
    ///
    /// # Errors
    ///
    /// Returns the request if no slot is free, or if it is another operation.
    #[inline]
    pub fn submit_request(
        &self,
        file: &FileHandle,
        host_offset: u64,
        request: Request,
    ) -> Result<(), Request> {
        let kind = match request.op {
            Op::Read => Kind::Read,
            Op::Write { fua } => Kind::Write { dsync: fua },
            Op::Flush => Kind::DataSync,
            _ => return Err(request),
        };
        if let Place::Registered(registered) = request.buffer.place()
            && !registered.range(0).fixed.is_of(&self.inner.leases)
        {
            request.finish(Err(IoError::ForeignBuffer));
            return Ok(());
        }
        let mut slots = self.inner.slots.borrow_mut();
        let Some(index) = slots.take() else {
            return Err(request);
        };
        let Some(slot) = slots.get_mut(index) else {
            return Err(request);
        };
        slot.kind = kind;
        slot.file = Some(file.clone());
        slot.offset = host_offset;
        slot.left = request.len;
        let len = request.buffer.len();
        match request.buffer.place() {
            Place::Memory(memory) => slot.name_memory(memory, 0, len),
            Place::Registered(registered) => slot.name_fixed(&registered.range(0), len),
        }
        // The slot owns the request, and the request its memory.
        slot.owner = Owner::Request(request);
        drop(slots);
        self.inner.start(index);
        Ok(())
    }

    fn op(&self, file: &FileHandle, kind: Kind, offset: u64, len: u64, pieces: Pieces) -> OpFuture {
        self.start(PendingOp {
            kind,
            file: file.clone(),
            offset,
            len,
            pieces,
            at_door: false,
            keep: None,
        })
    }

    fn start(&self, pending: PendingOp) -> OpFuture {
        let state = match self.inner.check_registered(&pending.pieces) {
            Ok(()) => self.try_start(pending),
            Err(error) => OpState::Refused(error),
        };
        OpFuture {
            ring: self.clone(),
            state,
        }
    }

    fn try_start(&self, pending: PendingOp) -> OpState {
        let mut slots = self.inner.slots.borrow_mut();
        let Some(index) = slots.take() else {
            return OpState::Pending(Some(pending));
        };
        let Some(slot) = slots.get_mut(index) else {
            return OpState::Gone;
        };
        slot.kind = pending.kind;
        slot.file = Some(pending.file);
        slot.offset = pending.offset;
        slot.left = pending.len;
        slot.at_door = pending.at_door;
        slot.keep.extend(pending.keep);
        for piece in pending.pieces {
            match piece {
                Piece::Bytes { buffer, offset, len } => {
                    match buffer.place() {
                        Place::Memory(memory) => slot.name_memory(memory, offset, len),
                        Place::Registered(registered) => slot.name_fixed(&registered.range(offset), len),
                    }
                    if !broken(Rule::MemoryFreedEarly) {
                        slot.keep.push(buffer);
                    }
                }
                Piece::Zeros(len) => append_zeros(len, &mut slot.slices),
            }
        }
        slot.owner = Owner::Waiting(None);
        let generation = slot.generation;
        drop(slots);
        self.inner.start(index);
        OpState::Started(index, generation)
    }

    /// Reads into the pieces. Bytes past the end of the file read as zeros.
    ///
    /// Bytes of a registered buffer need an op of their own. With other pieces beside them the op fails with
    /// [`IoError::Unsupported`], and on a ring that they are not registered with, with [`IoError::ForeignBuffer`].
    ///
    /// # Panics
    ///
    /// If a piece is [`Piece::Zeros`], which cannot be read into.
    pub fn read(&self, file: &FileHandle, offset: u64, pieces: Pieces) -> OpFuture {
        assert!(
            pieces.iter().all(|piece| matches!(piece, Piece::Bytes { .. })),
            "only bytes of a buffer can be read into"
        );
        let len = pieces_len(&pieces);
        self.op(file, Kind::Read, offset, len, pieces)
    }

    /// Writes the pieces; with `dsync`, durably before it ends. Registered buffers are limited as in [`Ring::read`].
    pub fn write(&self, file: &FileHandle, offset: u64, pieces: Pieces, dsync: bool) -> OpFuture {
        let len = pieces_len(&pieces);
        self.op(file, Kind::Write { dsync }, offset, len, pieces)
    }

    /// Starts an `fdatasync(2)`.
    pub fn sync(&self, file: &FileHandle) -> OpFuture {
        self.op(file, Kind::DataSync, 0, 0, Pieces::new())
    }

    /// Starts an `fallocate(2)` with mode bits `mode`.
    pub fn allocate(&self, file: &FileHandle, mode: i32, offset: u64, len: u64) -> OpFuture {
        self.op(file, Kind::Allocate { mode }, offset, len, Pieces::new())
    }

    /// Sets the length of a file.
    pub fn truncate(&self, file: &FileHandle, len: u64) -> OpFuture {
        self.op(file, Kind::Truncate, 0, len, Pieces::new())
    }

    /// Returns the length of a file, or the size of a block device, in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel does not report it.
    pub fn file_len(&self, file: &FileHandle) -> io::Result<u64> {
        self.inner.driver.borrow().file_len(file.slot())
    }

    /// Returns the first byte offset at or after `offset` where a file may hold data; bytes before it read as zeros.
    /// Returns `None` if all the rest does.
    #[must_use]
    pub fn next_data(&self, file: &FileHandle, offset: u64) -> Option<u64> {
        self.inner.driver.borrow().next_data(file.slot(), offset)
    }

    /// Returns the first byte offset at or after `offset` where a file has a hole; `None` if there is none before its end.
    #[must_use]
    pub fn next_hole(&self, file: &FileHandle, offset: u64) -> Option<u64> {
        self.inner.driver.borrow().next_hole(file.slot(), offset)
    }

    /// Reports `token` from [`Ring::take_events`] whenever `fd` (an eventfd) is signalled, until the
    /// returned watch is dropped.
    ///
    /// # Errors
    ///
    /// If every slot is taken, or the file cannot be registered.
    pub fn watch(&self, fd: OwnedFd, token: EventToken) -> io::Result<Watch> {
        let file = self.register(fd)?;
        let mut slots = self.inner.slots.borrow_mut();
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
        self.inner.push(index);
        Ok(Watch {
            ring: Rc::downgrade(&self.inner),
            index,
            generation,
        })
    }

    /// Appends the tokens of watches that fired to `out`.
    pub fn take_events(&self, out: &mut Vec<EventToken>) {
        out.append(&mut self.inner.events.borrow_mut());
    }

    /// Starts the submitted ops and reaps completions: answers requests, wakes futures, records events. With
    /// `wait`, returns only when an op ended or a signal came. Without, makes no system call unless an op is
    /// to be started or has ended. Returns the number of completions.
    ///
    /// # Errors
    ///
    /// If the kernel fails the call as a whole.
    pub fn turn(&self, wait: bool) -> io::Result<usize> {
        self.inner.turn(wait)
    }

    /// Requests cancellation of every op in flight. Their completions still come.
    pub fn cancel_all(&self) {
        self.inner.cancel_all();
    }
}

impl Inner {
    /// Fails unless one op can name these pieces: bytes of one buffer registered here, or of no registered buffer.
    fn check_registered(&self, pieces: &Pieces) -> Result<(), IoError> {
        for piece in pieces {
            let Piece::Bytes { buffer, offset, len } = piece else {
                continue;
            };
            let Place::Registered(registered) = buffer.place() else {
                continue;
            };
            if pieces.len() != 1 {
                return Err(IoError::Unsupported);
            }
            if !registered.range(0).fixed.is_of(&self.leases) {
                return Err(IoError::ForeignBuffer);
            }
            if offset.checked_add(*len).is_none_or(|end| end > buffer.len()) {
                return Err(IoError::BufferLength);
            }
        }
        Ok(())
    }

    fn start(&self, index: u32) {
        self.in_flight.set(self.in_flight.get() + 1);
        self.push(index);
    }

    fn push(&self, index: u32) {
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

    fn turn(&self, wait: bool) -> io::Result<usize> {
        let unpushed = std::mem::take(&mut *self.unpushed.borrow_mut());
        for index in unpushed {
            self.push(index);
        }
        let wait = match wait {
            false => Wait::No,
            true if self.in_flight.get() > 0 => Wait::Io,
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
        if matches!(slot.owner, Owner::Command(..)) {
            self.commands.set(self.commands.get() - 1);
            let owner = slots.release(index);
            drop(slots);
            if let Owner::Command(sink, tag) = owner {
                sink.push(tag, completion.result);
            }
            return;
        }
        match slot.advance(completion.result) {
            Step::Again => {
                drop(slots);
                self.push(index);
            }
            Step::End(_) if strikes(Rule::LostCompletion, 50) => {}
            Step::End(result) => {
                self.in_flight.set(self.in_flight.get() - 1);
                if let Err(error) = result {
                    slots = self.tell(slots, index, error);
                }
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

    /// Calls the observer of a failed op's file, with the slots not borrowed.
    #[cold]
    fn tell<'a>(&'a self, slots: RefMut<'a, Slots>, index: u32, error: IoError) -> RefMut<'a, Slots> {
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

    fn cancel_all(&self) {
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

impl Drop for Inner {
    fn drop(&mut self) {
        if self.in_flight.get() > 0 {
            self.cancel_all();
        }
        while self.in_flight.get() > 0 {
            if let Err(error) = self.turn(true) {
                tracing::error!(%error, ops = self.in_flight.get(), "a ring cannot drain; leaking its memory");
                let slots = std::mem::replace(&mut *self.slots.borrow_mut(), Slots::new(0));
                // The kernel may still write there: leaking is the only safe end.
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

fn depth_within_bounds(depth: u32) -> u32 {
    depth.clamp(16, 16384)
}

/// Makes the driver of a ring with room for `depth` ops.
pub(crate) fn driver_of(
    kind: RingKind,
    depth: u32,
    table: &FixedTable,
) -> Result<Box<dyn Driver>, RingError> {
    let entries = depth_within_bounds(depth).next_power_of_two();
    Ok(match kind {
        RingKind::IoUring => {
            Box::new(uring::UringDriver::new(entries, table).map_err(|source| RingError::Refused { source })?)
        }
        RingKind::IoUringCommands => {
            let driver = uring::UringDriver::with_commands(entries, table);
            Box::new(driver.map_err(|source| RingError::Refused { source })?)
        }
        RingKind::Auto => match uring::UringDriver::new(entries, table) {
            Ok(driver) => Box::new(driver),
            Err(error) => {
                // Every worker finds this out again; log it once.
                static TOLD: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
                if !TOLD.swap(true, std::sync::atomic::Ordering::Relaxed) {
                    tracing::warn!(%error, "io_uring is refused here; using plain system calls");
                }
                Box::new(syscall::SyscallDriver::default())
            }
        },
        RingKind::Syscalls => Box::new(syscall::SyscallDriver::default()),
        RingKind::Null => Box::new(null::NullDriver::default()),
    })
}

/// The parts of a vectored op.
pub type Pieces = SmallVec<[Piece; 3]>;

fn pieces_len(pieces: &Pieces) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

#[derive(Debug)]
struct PendingOp {
    kind: Kind,
    file: FileHandle,
    offset: u64,
    len: u64,
    pieces: Pieces,
    /// The file is the door of registered buffers.
    at_door: bool,
    /// A buffer that must live as long as the op.
    keep: Option<Rc<Buffer>>,
}

#[derive(Debug)]
enum OpState {
    /// Waits for a free slot.
    Pending(Option<PendingOp>),
    Started(u32, u32),
    /// The op was not started.
    Refused(IoError),
    Gone,
}

/// An op in flight. It was started when it was made, unless no slot was free. Dropping it neither
/// stops the op nor frees its memory early.
#[derive(Debug)]
#[must_use = "the result of an op says whether it happened"]
pub struct OpFuture {
    ring: Ring,
    state: OpState,
}

impl Future for OpFuture {
    type Output = Result<(), IoError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let OpState::Pending(pending) = &mut self.state {
            let Some(pending) = pending.take() else {
                return Poll::Ready(Err(IoError::Dropped));
            };
            let ring = self.ring.clone();
            self.state = ring.try_start(pending);
            if matches!(self.state, OpState::Pending(_)) {
                ring.inner.slots.borrow_mut().wait(cx.waker());
                return Poll::Pending;
            }
        }
        let index = match self.state {
            OpState::Started(index, _) => index,
            OpState::Refused(error) => return Poll::Ready(Err(error)),
            _ => return Poll::Ready(Err(IoError::Dropped)),
        };
        let inner = Rc::clone(&self.ring.inner);
        let mut slots = inner.slots.borrow_mut();
        let Some(slot) = slots.get_mut(index) else {
            return Poll::Ready(Err(IoError::Dropped));
        };
        if let Owner::Finished(result) = slot.owner {
            let ended = slots.release(index);
            drop(slots);
            drop(ended);
            self.state = OpState::Gone;
            return Poll::Ready(result);
        }
        slot.owner = Owner::Waiting(Some(cx.waker().clone()));
        Poll::Pending
    }
}

impl Drop for OpFuture {
    fn drop(&mut self) {
        match self.state {
            OpState::Started(index, generation) => {
                let mut slots = self.ring.inner.slots.borrow_mut();
                let Some(slot) = slots.get_mut(index) else { return };
                if slot.generation != generation {
                    return;
                }
                if matches!(slot.owner, Owner::Finished(_)) {
                    let ended = slots.release(index);
                    drop(slots);
                    drop(ended);
                } else {
                    slot.owner = Owner::Orphan;
                }
            }
            OpState::Pending(_) | OpState::Refused(_) | OpState::Gone => {}
        }
    }
}

/// A watched descriptor; dropping it ends the watch.
pub struct Watch {
    ring: Weak<Inner>,
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

#[cfg(test)]
mod registered_tests;
#[cfg(test)]
mod tests;
