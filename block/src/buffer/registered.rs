//! Registered buffers, whose bytes only the kernel reaches, and the door beside each.
//!
//! A driver like ublk puts a request's pages into the buffer table of a worker's ring; they have no address in this
//! process. The kernel moves file bytes straight to and from them ([`Kind::Read`](crate::ring) and write ops that
//! name a slot of the table instead of memory). Other bytes go through a *door*: a file, at some position of which
//! the very same bytes are read and written.
//!
//! Use by a driver's frontend:
//!
//! 1. Its worker asks for as many slots as it has requests
//!    ([`WorkerConfig::registered_buffers`](crate::worker::WorkerConfig)), and registers the driver's device with its
//!    ring as the [`Door`].
//! 2. For each request it [leases](crate::ring::Ring::lease_fixed) the slot into which the driver puts the pages, and
//!    makes the buffer: `base` 0, from which the kernel counts registered pages, and the request's position at the
//!    device. A slot that is [in use](crate::ring::LeaseError::InUse) is still named by an op; its pages must not be
//!    given back.
//! 3. When the request is answered it drops the buffer, and only then completes the request to the driver.
//!
//! If a request's pages could not be registered, or it is too small for that to pay, it gets memory, and the frontend
//! itself copies to and from the device.
//!
//! Invariants: a slot of the table is leased to one buffer, and stays so until the last op, part or clone that names
//! it is gone; an op names the ring that the slot belongs to.

use std::fmt;
use std::rc::Rc;

use super::MemoryHold;
use crate::door::{Door, FixedBuffer};

/// Parameters of a [registered buffer](super::Buffer::registered).
pub struct Registration {
    /// The lease on its slot in the ring's buffer table.
    pub fixed: FixedBuffer,
    /// The kernel's name for the first byte: its address if memory of a process was registered, 0 if a driver
    /// registered pages.
    pub base: u64,
    /// The length in bytes.
    pub len: usize,
    /// The file through which the bytes are read and written otherwise.
    pub door: Door,
    /// The position of the first byte at the door.
    pub door_offset: u64,
    /// The alignment of the beginning and the length of each stretch of pages, in bytes: a power of two. For a block
    /// device its DMA alignment; if direct I/O demands more, the transfer is bounced.
    pub align: usize,
    /// Dropped when no op or buffer names the bytes any more.
    pub hold: MemoryHold,
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({:?}, {} bytes)", self.fixed, self.len)
    }
}

/// Error: invalid parameters of a registered buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RegistrationError {
    /// The alignment is no power of two.
    #[error("the alignment of a registered buffer is {align} bytes; expected a power of two")]
    Alignment {
        /// The alignment given, in bytes.
        align: usize,
    },
    /// Its end is past the largest position that the kernel can name.
    #[error("a registered buffer of {len} bytes at {start:#x} ends past {:#x}", i64::MAX)]
    TooLong {
        /// Its first byte, as the table or the door counts.
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

/// Position of bytes of a registered buffer, for an op.
pub(crate) struct FixedRange<'a> {
    pub(crate) fixed: &'a FixedBuffer,
    /// The kernel's name for the first byte.
    pub(crate) address: u64,
    pub(crate) door: &'a Door,
    /// The position of the first byte at the door.
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

    /// Makes a part of `len` bytes from `offset` on, which must lie inside; `hold` keeps the whole alive.
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

    /// Returns the alignment of the stretches from `offset` on.
    pub(super) fn align_at(&self, offset: usize) -> usize {
        match offset {
            0 => self.align,
            _ => self.align.min(1 << offset.trailing_zeros()),
        }
    }

    /// Returns the position of the bytes from `offset` on, which must lie inside.
    pub(crate) fn range(&self, offset: usize) -> FixedRange<'_> {
        FixedRange {
            fixed: &self.fixed,
            address: self.base + offset as u64,
            door: &self.door,
            door_offset: self.door_offset + offset as u64,
        }
    }
}
