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
//! 2. It [leases](crate::ring::Ring::lease_fixed) each slot into which the driver puts pages once, and makes a
//!    [`RegisteredSlot`] of it: `base` 0, from which the kernel counts registered pages, and the position of the slot's
//!    requests at the device.
//! 3. For each request it takes a [buffer](RegisteredSlot::buffer) of the slot. A slot that is
//!    [in use](crate::ring::LeaseError::InUse) is still named by an op; its pages must not be given back.
//! 4. When the request is answered it drops the buffer, and only then completes the request to the driver.
//!
//! If a request's pages could not be registered, or it is too small for that to pay, it gets memory, and the frontend
//! itself copies to and from the device.
//!
//! Invariants: a slot of the table is one buffer's at a time, and stays so until the last op or part that names it is
//! gone; an op names the ring that the slot belongs to.

use std::fmt;
use std::rc::Rc;

use super::memory::check_range;
use super::{Buffer, MemoryHold, Repr};
use crate::door::{Door, FixedBuffer, LeaseError};

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

/// The bytes that a slot of a ring's buffer table names. Shared by everything that names some of them, and so their lease.
struct Bytes {
    // Dropped in this order: the lease has ended when the hold goes.
    fixed: FixedBuffer,
    base: u64,
    len: usize,
    door: Door,
    door_offset: u64,
    align: usize,
    _hold: MemoryHold,
}

impl Bytes {
    fn new(of: Registration) -> Result<Rc<Self>, RegistrationError> {
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
        Ok(Rc::new(Self {
            fixed,
            base,
            len,
            door,
            door_offset,
            align,
            _hold: hold,
        }))
    }
}

/// A slot of a ring's buffer table for one request after another, as a driver's tag has it: leased once, and a buffer of it
/// costs no allocation.
pub struct RegisteredSlot {
    bytes: Rc<Bytes>,
}

impl fmt::Debug for RegisteredSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Bytes { fixed, len, .. } = &*self.bytes;
        write!(f, "RegisteredSlot({fixed:?}, {len} bytes)")
    }
}

impl RegisteredSlot {
    /// Makes a slot for requests of at most `of.len` bytes.
    ///
    /// # Errors
    ///
    /// [`RegistrationError`] if no op could name all of it.
    pub fn new(of: Registration) -> Result<Self, RegistrationError> {
        Ok(Self {
            bytes: Bytes::new(of)?,
        })
    }

    /// Returns true if no buffer or op names its bytes.
    #[must_use]
    #[inline]
    pub fn is_free(&self) -> bool {
        // This process's threads share no slot, so nobody else counts meanwhile.
        Rc::strong_count(&self.bytes) == 1
    }

    /// Makes the buffer of the next request: the first `len` bytes.
    ///
    /// # Errors
    ///
    /// [`LeaseError::InUse`] if a buffer or an op still names some of them.
    ///
    /// # Panics
    ///
    /// If the slot is not for so many bytes.
    #[inline]
    pub fn buffer(&self, len: usize) -> Result<Buffer, LeaseError> {
        check_range(self.bytes.len, 0, len);
        if !self.is_free() {
            return Err(LeaseError::InUse {
                index: self.bytes.fixed.index(),
            });
        }
        Ok(Buffer {
            repr: Repr::Registered(Registered {
                bytes: Rc::clone(&self.bytes),
                offset: 0,
                len,
            }),
        })
    }
}

/// A registered buffer, or a part of one.
pub(crate) struct Registered {
    bytes: Rc<Bytes>,
    /// The first byte, among those of the slot.
    offset: usize,
    len: usize,
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
        let len = of.len;
        Ok(Self {
            bytes: Bytes::new(of)?,
            offset: 0,
            len,
        })
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Makes a part of `len` bytes from `offset` on, which must lie inside.
    pub(super) fn part(&self, offset: usize, len: usize) -> Self {
        Self {
            bytes: Rc::clone(&self.bytes),
            offset: self.offset + offset,
            len,
        }
    }

    /// Returns the alignment of the stretches from `offset` on.
    #[inline]
    pub(super) fn align_at(&self, offset: usize) -> usize {
        match self.offset + offset {
            0 => self.bytes.align,
            offset => self.bytes.align.min(1 << offset.trailing_zeros()),
        }
    }

    /// Returns the lease on the slot.
    #[inline]
    pub(crate) fn fixed(&self) -> &FixedBuffer {
        &self.bytes.fixed
    }

    /// Returns the position of the bytes from `offset` on, which must lie inside.
    #[inline]
    pub(crate) fn range(&self, offset: usize) -> FixedRange<'_> {
        let offset = (self.offset + offset) as u64;
        FixedRange {
            fixed: &self.bytes.fixed,
            address: self.bytes.base + offset,
            door: &self.bytes.door,
            door_offset: self.bytes.door_offset + offset,
        }
    }
}
