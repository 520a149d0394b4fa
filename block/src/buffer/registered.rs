//! Bytes that only the kernel reaches: a registered buffer, and the door beside it.
//!
//! A driver like ublk puts a request's pages into the table of a worker's ring and gives them no address here.
//! The kernel moves file bytes straight to and from them ([`Kind::Read`](crate::ring) and write ops that name a
//! place in the table instead of memory). What is not a file's bytes goes through a *door*: a file, at some
//! position of which the very same bytes are read and written.
//!
//! How a driver's frontend uses it:
//!
//! 1. Its worker asks for as many places as it has requests
//!    ([`WorkerConfig::registered_buffers`](crate::worker::WorkerConfig)), and registers the driver's device with its ring
//!    as the [`Door`].
//! 2. For each request it [leases](crate::ring::Ring::lease_fixed) the place that the driver puts the pages into, and makes
//!    the buffer: `base` 0, as the kernel counts registered pages from there, and the request's position at the device. A
//!    place that is [in use](crate::ring::LeaseError::InUse) is still named by an op; its pages must not be given back.
//! 3. When the request is answered it drops the buffer, and only then tells the driver.
//!
//! A request whose pages could not be registered, or which is too small for that to pay, gets memory and is copied to and
//! from the device by the frontend itself.
//!
//! What must stay true: a place in the table is leased to one buffer, and stays so until the last op, part or
//! clone that names it is gone; an op names the ring that the place belongs to.

use std::fmt;
use std::rc::Rc;

use super::MemoryHold;
use crate::door::{Door, FixedBuffer};

/// What a [registered buffer](super::Buffer::registered) is made of.
pub struct Registration {
    /// The place in the ring's table.
    pub fixed: FixedBuffer,
    /// What the kernel calls the first byte: its address, where memory of a process was registered; 0, where a
    /// driver registered pages.
    pub base: u64,
    /// The length in bytes.
    pub len: usize,
    /// Where the bytes are read and written otherwise.
    pub door: Door,
    /// The position of the first byte there.
    pub door_offset: u64,
    /// What the beginning and the length of each stretch of pages is a multiple of, in bytes: a power of two. For a
    /// block device its DMA alignment; what direct I/O demands beyond that goes through memory of ours.
    pub align: usize,
    /// Dropped when nothing names the bytes any more.
    pub hold: MemoryHold,
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({:?}, {} bytes)", self.fixed, self.len)
    }
}

/// Why there can be no such registered buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RegistrationError {
    /// The alignment is no power of two.
    #[error("the alignment of a registered buffer is {align} bytes; expected a power of two")]
    Alignment {
        /// What was given.
        align: usize,
    },
    /// Its end is past all that the kernel can name.
    #[error("a registered buffer of {len} bytes at {start:#x} ends past {:#x}", i64::MAX)]
    TooLong {
        /// Where it begins, in the table's terms or the door's.
        start: u64,
        /// Its length in bytes.
        len: usize,
    },
}

/// A registered buffer, or a part of one.
pub(crate) struct Registered {
    fixed: Rc<FixedBuffer>,
    base: u64,
    len: usize,
    door: Door,
    door_offset: u64,
    align: usize,
    _hold: MemoryHold,
}

/// Bytes of a registered buffer, as an op names them.
pub(crate) struct FixedRange<'a> {
    pub(crate) fixed: &'a FixedBuffer,
    /// What the kernel calls the first byte.
    pub(crate) address: u64,
    pub(crate) door: &'a Door,
    /// The position of the first byte there.
    pub(crate) door_offset: u64,
}

impl Registered {
    pub(super) fn new(of: Registration) -> Result<Self, RegistrationError> {
        let Registration {
            fixed,
            base,
            len,
            door,
            door_offset,
            align,
            hold,
        } = of;
        if !align.is_power_of_two() {
            return Err(RegistrationError::Alignment { align });
        }
        for start in [base, door_offset] {
            let end = start.checked_add(len as u64);
            if end.is_none_or(|end| end > i64::MAX.cast_unsigned()) {
                return Err(RegistrationError::TooLong { start, len });
            }
        }
        Ok(Self {
            fixed: Rc::new(fixed),
            base,
            len,
            door,
            door_offset,
            align,
            _hold: hold,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes from `offset` on, which lie inside; `hold` keeps the whole.
    pub(super) fn part(&self, offset: usize, len: usize, hold: MemoryHold) -> Self {
        Self {
            fixed: Rc::clone(&self.fixed),
            base: self.base + offset as u64,
            len,
            door: self.door.clone(),
            door_offset: self.door_offset + offset as u64,
            align: self.align_at(offset),
            _hold: hold,
        }
    }

    /// What the stretches of the bytes from `offset` on begin at a multiple of.
    pub(super) fn align_at(&self, offset: usize) -> usize {
        match offset {
            0 => self.align,
            _ => self.align.min(1 << offset.trailing_zeros()),
        }
    }

    /// The bytes from `offset` on, which lies inside.
    pub(crate) fn range(&self, offset: usize) -> FixedRange<'_> {
        FixedRange {
            fixed: &self.fixed,
            address: self.base + offset as u64,
            door: &self.door,
            door_offset: self.door_offset + offset as u64,
        }
    }
}
