//! Operations on a request's bytes other than file I/O: filling with zeros, and copies to and from an engine's memory.
//!
//! On memory they are done at once. On a registered buffer they are an op at the buffer's door, which keeps both
//! sides until it has ended. The interface is the same for both.

use std::rc::Rc;

use smallvec::smallvec;

use super::driver::Kind;
use super::ops::PendingOp;
use super::slots::Owner;
use super::{OpFuture, Pieces, Ring};
use crate::buffer::{Buffer, FixedRange, Piece, Place, append_zeros};
use crate::error::IoError;
use crate::request::Request;

impl Ring {
    /// Fills `len` bytes of `buffer` from `offset` on with zeros. Returns `None` if that is done already, as in memory.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    pub fn fill_zeros(&self, buffer: &Rc<Buffer>, offset: usize, len: usize) -> Option<OpFuture> {
        match buffer.place() {
            Place::Memory(memory) => {
                memory.fill(offset, len, 0);
                None
            }
            Place::Registered(_) if len == 0 => None,
            Place::Registered(registered) => {
                assert!(offset + len <= buffer.len(), "zeros inside the buffer");
                let zeros = smallvec![Piece::Zeros(len)];
                let write = Kind::Write { dsync: false };
                Some(self.at_door(&registered.range(offset), write, len, zeros, buffer))
            }
        }
    }

    /// Copies `len` bytes of `from` to `to`. Returns `None` if that is done already, as between memory and memory.
    /// Between two registered buffers it fails with [`IoError::Unsupported`].
    ///
    /// # Panics
    ///
    /// If a range is not inside its buffer.
    pub fn copy(
        &self,
        from: &Rc<Buffer>,
        from_offset: usize,
        to: &Rc<Buffer>,
        to_offset: usize,
        len: usize,
    ) -> Option<OpFuture> {
        let piece = |buffer: &Rc<Buffer>, offset| {
            assert!(offset + len <= buffer.len(), "a copy inside the buffer");
            smallvec![Piece::Bytes {
                buffer: Rc::clone(buffer),
                offset,
                len,
            }]
        };
        match (from.place(), to.place()) {
            (Place::Memory(source), Place::Memory(target)) => {
                source.copy_to(from_offset, target, to_offset, len);
                None
            }
            _ if len == 0 => None,
            (Place::Memory(_), Place::Registered(registered)) => {
                let (range, write) = (registered.range(to_offset), Kind::Write { dsync: false });
                Some(self.at_door(&range, write, len, piece(from, from_offset), to))
            }
            (Place::Registered(registered), Place::Memory(_)) => {
                let range = registered.range(from_offset);
                Some(self.at_door(&range, Kind::Read, len, piece(to, to_offset), from))
            }
            (Place::Registered(_), Place::Registered(_)) => Some(self.refuse(IoError::Unsupported)),
        }
    }

    /// Starts an op between memory and the door of bytes of `registered`.
    fn at_door(
        &self,
        range: &FixedRange<'_>,
        kind: Kind,
        len: usize,
        pieces: Pieces,
        registered: &Rc<Buffer>,
    ) -> OpFuture {
        self.start(PendingOp {
            kind,
            file: range.door.file.clone(),
            offset: range.door_offset,
            len: len as u64,
            pieces,
            // Bytes missing at the door must not read as zeros: a guest's data would be lost silently.
            at_door: true,
            keep: Some(Rc::clone(registered)),
        })
    }

    /// Answers a read request with zeros: at once if its buffer is memory, else when the op has ended.
    ///
    /// # Errors
    ///
    /// Returns the request if the ring is full.
    #[inline]
    pub fn answer_with_zeros(&self, request: Request) -> Result<(), Request> {
        match request.buffer.memory() {
            Some(memory) => {
                memory.fill(0, request.buffer.len(), 0);
                request.finish(Ok(()));
                Ok(())
            }
            None => self.submit_zeros(request),
        }
    }

    fn submit_zeros(&self, request: Request) -> Result<(), Request> {
        let mut slots = self.in_flight.slots.borrow_mut();
        let Some(index) = slots.take() else {
            return Err(request);
        };
        let Some(slot) = slots.get_mut(index) else {
            return Err(request);
        };
        if let Place::Registered(registered) = request.buffer.place() {
            let range = registered.range(0);
            slot.file = Some(range.door.file.clone());
            slot.offset = range.door_offset;
        }
        slot.kind = Kind::Write { dsync: false };
        slot.at_door = true;
        slot.left = request.buffer.len() as u64;
        append_zeros(request.buffer.len(), &mut slot.slices);
        // The slot owns the request, and the request the registered buffer.
        slot.owner = Owner::Request(request);
        drop(slots);
        self.in_flight.start(index);
        Ok(())
    }
}
