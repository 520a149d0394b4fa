//! Reads, writes, syncs and allocations: how an op is put into a slot, and the future of its result.
//!
//! A whole [`Request`] becomes an op that is answered when it ends, without a future or an allocation. Everything else is
//! an [`OpFuture`].
//!
//! Invariants: a slot holds the memory of its op before the op is started; dropping a future neither stops its op nor frees
//! memory early.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use smallvec::SmallVec;

use super::Ring;
use super::in_flight::InFlight;
use super::slots::Owner;
use crate::buffer::{Buffer, Piece, Place, append_zeros};
use crate::error::IoError;
use crate::handle::{FileHandle, Kind};
use crate::request::{Op, Request};

/// The parts of a vectored op.
pub type Pieces = SmallVec<[Piece; 3]>;

fn pieces_len(pieces: &Pieces) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

#[derive(Debug)]
pub(super) struct PendingOp {
    pub(super) kind: Kind,
    pub(super) file: FileHandle,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) pieces: Pieces,
    /// The file is the door of registered buffers.
    pub(super) at_door: bool,
    /// A buffer that must live as long as the op.
    pub(super) keep: Option<Rc<Buffer>>,
}

#[derive(Debug)]
pub(super) enum OpState {
    /// Waits for a free slot.
    Pending(Option<PendingOp>),
    Started(u32, u32),
    /// The op was not started.
    Refused(IoError),
    Gone,
}

impl Ring {
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
            && !registered.fixed().is_of(&self.in_flight.leases)
        {
            refuse_foreign(request);
            return Ok(());
        }
        let mut slots = self.in_flight.slots.borrow_mut();
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
        self.in_flight.start(index);
        Ok(())
    }

    pub(super) fn op(
        &self,
        file: &FileHandle,
        kind: Kind,
        offset: u64,
        len: u64,
        pieces: Pieces,
    ) -> OpFuture {
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

    /// Starts an op, or lets it wait for a free slot. One that no op can name is refused.
    pub(super) fn start(&self, pending: PendingOp) -> OpFuture {
        let state = match check_registered(&self.in_flight, &pending.pieces) {
            Ok(()) => try_start(&self.in_flight, pending),
            Err(error) => OpState::Refused(error),
        };
        self.op_future(state)
    }

    /// Returns the future of an op that is refused.
    pub(super) fn refuse(&self, error: IoError) -> OpFuture {
        self.op_future(OpState::Refused(error))
    }

    fn op_future(&self, state: OpState) -> OpFuture {
        OpFuture {
            ring: Rc::clone(&self.in_flight),
            state,
        }
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

    /// Performs an `fdatasync(2)` before it returns. Returns `None` if it did not: [`Ring::sync`] does it then.
    ///
    /// A failure reaches the file's observer as that of an op does.
    pub(crate) fn sync_now(&self, file: &FileHandle) -> Option<Result<(), IoError>> {
        let result = self.in_flight.driver.borrow_mut().sync_now(file.slot())?;
        match result.saturating_neg() {
            libc::EINTR | libc::EAGAIN => None,
            errno @ 1.. => {
                let error = IoError::from_errno(errno);
                if let Some(observer) = file.observer() {
                    observer.failed(Kind::DataSync, 0, error);
                }
                Some(Err(error))
            }
            _ => Some(Ok(())),
        }
    }

    /// Starts an `fallocate(2)` with mode bits `mode`.
    pub fn allocate(&self, file: &FileHandle, mode: i32, offset: u64, len: u64) -> OpFuture {
        self.op(file, Kind::Allocate { mode }, offset, len, Pieces::new())
    }

    /// Sets the length of a file.
    pub fn truncate(&self, file: &FileHandle, len: u64) -> OpFuture {
        self.op(file, Kind::Truncate, 0, len, Pieces::new())
    }
}

#[cold]
fn refuse_foreign(request: Request) {
    request.finish(Err(IoError::ForeignBuffer));
}

/// Fails unless one op can name these pieces: bytes of one buffer registered here, or of no registered buffer.
fn check_registered(ring: &InFlight, pieces: &Pieces) -> Result<(), IoError> {
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
        if !registered.fixed().is_of(&ring.leases) {
            return Err(IoError::ForeignBuffer);
        }
        if offset.checked_add(*len).is_none_or(|end| end > buffer.len()) {
            return Err(IoError::BufferLength);
        }
    }
    Ok(())
}

/// Starts an op, unless no slot is free.
fn try_start(ring: &InFlight, pending: PendingOp) -> OpState {
    let mut slots = ring.slots.borrow_mut();
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
                slot.keep.push(buffer);
            }
            Piece::Zeros(len) => append_zeros(len, &mut slot.slices),
        }
    }
    slot.owner = Owner::Waiting(None);
    let generation = slot.generation;
    drop(slots);
    ring.start(index);
    OpState::Started(index, generation)
}

/// An op in flight. It was started when it was made, unless no slot was free. Dropping it neither
/// stops the op nor frees its memory early.
#[derive(Debug)]
#[must_use = "the result of an op says whether it happened"]
pub struct OpFuture {
    ring: Rc<InFlight>,
    state: OpState,
}

impl Future for OpFuture {
    type Output = Result<(), IoError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let OpState::Pending(pending) = &mut self.state {
            let Some(pending) = pending.take() else {
                return Poll::Ready(Err(IoError::Dropped));
            };
            self.state = try_start(&self.ring, pending);
            if matches!(self.state, OpState::Pending(_)) {
                self.ring.slots.borrow_mut().wait(cx.waker());
                return Poll::Pending;
            }
        }
        let index = match self.state {
            OpState::Started(index, _) => index,
            OpState::Refused(error) => return Poll::Ready(Err(error)),
            _ => return Poll::Ready(Err(IoError::Dropped)),
        };
        let ring = Rc::clone(&self.ring);
        let mut slots = ring.slots.borrow_mut();
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
                let mut slots = self.ring.slots.borrow_mut();
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
