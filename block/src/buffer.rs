//! Memory of an I/O, owned until the I/O has ended.
//!
//! A [`Buffer`] is memory of our own ([`AlignedBuf`]), slices of guest memory together with a hold on their mapping,
//! or a [registered](Registration) buffer, whose bytes only the kernel reaches. It never exposes a reference to
//! guest memory: a guest may write it at any time. Its bytes are only copied, through raw pointers, by way of a
//! [`Memory`], which a registered buffer does not have.
//!
//! Invariant: as long as a `Buffer` (or an op that shares it) lives, every address it names is mapped and is not
//! freed, and every registered buffer that it names stays leased to it.

#![expect(unsafe_code, reason = "takes guest memory by its addresses")]

mod aligned;
mod io_slice;
mod memory;
mod piece;
mod pool;
mod registered;

use std::any::Any;
use std::fmt;
use std::rc::Rc;

use smallvec::SmallVec;

pub use aligned::{AlignedBuf, BUFFER_ALIGN};
pub use io_slice::IoSlice;
pub(crate) use io_slice::IoSlices;
pub use memory::Memory;
pub(crate) use memory::zero_slices;
use memory::{Stretches, check_range};
pub use piece::Piece;
pub(crate) use piece::append_zeros;
pub use pool::BufferPool;
pub(crate) use registered::{FixedRange, Registered};
pub use registered::{RegisteredSlot, Registration, RegistrationError};

/// Keeps a guest's memory mapped. Cloned per buffer, so its count is not atomic: make one per worker and
/// memory map.
pub type MemoryHold = Rc<dyn Any>;

#[derive(Default)]
enum Repr {
    #[default]
    Empty,
    Owned(AlignedBuf),
    Guest {
        slices: SmallVec<[IoSlice; 2]>,
        len: usize,
        _hold: MemoryHold,
    },
    Registered(Registered),
}

/// The memory of one request.
#[derive(Default)]
pub struct Buffer {
    repr: Repr,
}

impl Buffer {
    /// Starts a buffer over guest memory that `hold` keeps mapped; add memory with
    /// [`GuestBufferBuilder::push`].
    #[must_use]
    pub fn guest(hold: MemoryHold) -> GuestBufferBuilder {
        GuestBufferBuilder {
            slices: SmallVec::new(),
            len: 0,
            hold,
        }
    }

    /// Makes a buffer over `len` bytes of `whole` from `offset` on, and keeps `whole` alive.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    #[must_use]
    pub fn part(whole: &Rc<Self>, offset: usize, len: usize) -> Self {
        whole.check_range(offset, len);
        let repr = match whole.place() {
            Place::Memory(memory) => {
                let mut slices = SmallVec::new();
                memory.for_each(offset, len, |slice| slices.push(slice));
                Repr::Guest {
                    slices,
                    len,
                    _hold: Rc::clone(whole) as MemoryHold,
                }
            }
            Place::Registered(registered) => Repr::Registered(registered.part(offset, len)),
        };
        Self { repr }
    }

    /// Makes a buffer whose bytes only the kernel reaches, by its slot in a ring's buffer table and through a
    /// file.
    ///
    /// # Errors
    ///
    /// [`RegistrationError`] if no op could name all of it.
    pub fn registered(of: Registration) -> Result<Self, RegistrationError> {
        Ok(Self {
            repr: Repr::Registered(Registered::new(of)?),
        })
    }

    /// Returns the length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        match &self.repr {
            Repr::Empty => 0,
            Repr::Owned(buf) => buf.len(),
            Repr::Guest { len, .. } => *len,
            Repr::Registered(registered) => registered.len(),
        }
    }

    /// Returns true if it holds no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes if this process owns them.
    #[must_use]
    pub fn as_owned(&self) -> Option<&AlignedBuf> {
        match &self.repr {
            Repr::Owned(buf) => Some(buf),
            _ => None,
        }
    }

    /// Returns the bytes for changing if this process owns them.
    #[must_use]
    pub fn as_owned_mut(&mut self) -> Option<&mut AlignedBuf> {
        match &mut self.repr {
            Repr::Owned(buf) => Some(buf),
            _ => None,
        }
    }

    /// Returns the memory itself if this process owns it.
    #[must_use]
    pub fn into_owned(self) -> Option<AlignedBuf> {
        match self.repr {
            Repr::Owned(buf) => Some(buf),
            _ => None,
        }
    }

    /// Returns the bytes, if this process can reach them.
    ///
    /// `None` for a [registered](Buffer::registered) buffer: the [ring](crate::ring::Ring::copy) copies to and from it.
    #[must_use]
    #[inline]
    pub fn memory(&self) -> Option<Memory<'_>> {
        match self.place() {
            Place::Memory(memory) => Some(memory),
            Place::Registered(_) => None,
        }
    }

    /// Calls `f` with each stretch of its memory in order; a registered buffer has none. What the memory holds may change meanwhile.
    pub fn for_each_slice(&self, f: impl FnMut(IoSlice)) {
        if let Place::Memory(memory) = self.place() {
            memory.for_each(0, self.len(), f);
        }
    }

    /// Returns the location of its bytes: memory, or a ring's buffer table.
    #[inline]
    pub(crate) fn place(&self) -> Place<'_> {
        let stretches = match &self.repr {
            Repr::Empty => Stretches::Many(&[]),
            Repr::Owned(buf) => Stretches::One(buf.io_slice()),
            Repr::Guest { slices, .. } => Stretches::Many(slices),
            Repr::Registered(registered) => return Place::Registered(registered),
        };
        Place::Memory(Memory {
            stretches,
            len: self.len(),
        })
    }

    #[inline]
    fn check_range(&self, offset: usize, len: usize) {
        check_range(self.len(), offset, len);
    }

    /// Returns true if every stretch starts at a multiple of `address_align` and is a multiple of `len_align`
    /// bytes long (powers of two).
    #[must_use]
    #[inline]
    pub fn is_aligned(&self, address_align: usize, len_align: usize) -> bool {
        self.is_range_aligned(0, self.len(), address_align, len_align)
    }

    /// As [`Buffer::is_aligned`], for bytes `offset..offset + len` alone.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    #[must_use]
    #[inline]
    pub fn is_range_aligned(
        &self,
        offset: usize,
        len: usize,
        address_align: usize,
        len_align: usize,
    ) -> bool {
        match self.place() {
            Place::Memory(memory) => {
                let mut fits = true;
                memory.for_each(offset, len, |slice| {
                    fits &=
                        slice.ptr().addr() & (address_align - 1) == 0 && slice.len() & (len_align - 1) == 0;
                });
                fits
            }
            Place::Registered(registered) => {
                self.check_range(offset, len);
                let align = registered.align_at(offset);
                address_align <= align && len_align <= align && len & (len_align - 1) == 0
            }
        }
    }
}

/// Location of a buffer's bytes.
pub(crate) enum Place<'a> {
    /// Addresses of this process.
    Memory(Memory<'a>),
    /// A slot of a ring's buffer table.
    Registered(&'a Registered),
}

impl From<AlignedBuf> for Buffer {
    fn from(buf: AlignedBuf) -> Self {
        Self {
            repr: Repr::Owned(buf),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.repr {
            Repr::Empty => "empty",
            Repr::Owned(_) => "owned",
            Repr::Guest { .. } => "guest",
            Repr::Registered(_) => "registered",
        };
        write!(f, "Buffer({kind}, {} bytes)", self.len())
    }
}

/// Gathers the guest memory of one request.
#[derive(Debug)]
pub struct GuestBufferBuilder {
    slices: SmallVec<[IoSlice; 2]>,
    len: usize,
    hold: MemoryHold,
}

impl GuestBufferBuilder {
    /// Adds `len` bytes at `ptr`. Neighbours are joined.
    ///
    /// # Safety
    ///
    /// `ptr..ptr + len` must be memory that stays mapped, readable and writable (readable alone, if
    /// the request only reads from it), for as long as the builder's hold lives, and that no Rust
    /// reference covers.
    pub unsafe fn push(&mut self, ptr: *mut u8, len: usize) {
        if len == 0 {
            return;
        }
        self.len += len;
        if let Some(last) = self.slices.last_mut()
            && last.ptr().wrapping_add(last.len()) == ptr
        {
            *last = IoSlice::new(last.ptr(), last.len() + len);
            return;
        }
        self.slices.push(IoSlice::new(ptr, len));
    }

    /// Returns the number of bytes gathered so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if no bytes were gathered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the finished buffer.
    #[must_use]
    pub fn build(self) -> Buffer {
        Buffer {
            repr: Repr::Guest {
                slices: self.slices,
                len: self.len,
                _hold: self.hold,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(parts: &mut [Vec<u8>]) -> Buffer {
        let mut builder = Buffer::guest(Rc::new(()));
        for part in parts {
            // SAFETY: the test keeps the vectors alive, and reads them only after the buffer's use.
            unsafe { builder.push(part.as_mut_ptr(), part.len()) };
        }
        builder.build()
    }

    #[test]
    fn buffer_reads_writes_and_fills_across_slices() {
        let mut parts = [vec![0u8; 5], vec![0u8; 7], vec![0u8; 3]];
        let buffer = guest(&mut parts);
        assert_eq!(buffer.len(), 15);
        let memory = buffer.memory().expect("memory");
        memory.write(3, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let mut out = [0; 8];
        memory.read(4, &mut out);
        assert_eq!(out, [2, 3, 4, 5, 6, 7, 8, 9]);
        memory.fill(0, 4, 0xff);
        assert_eq!(parts[0], [0xff, 0xff, 0xff, 0xff, 2]);
        assert_eq!(parts[2], [10, 0, 0]);
    }

    #[test]
    fn buffer_merges_adjacent_slices() {
        let mut memory = vec![0u8; 64];
        let mut builder = Buffer::guest(Rc::new(()));
        // SAFETY: `memory` outlives the buffer and is not used meanwhile.
        unsafe { builder.push(memory.as_mut_ptr(), 32) };
        // SAFETY: as above.
        unsafe { builder.push(memory.as_mut_ptr().wrapping_add(32), 32) };
        let mut slices = IoSlices::new();
        let buffer = builder.build();
        let memory = buffer.memory().expect("memory");
        memory.for_each(0, 64, |slice| slices.push(slice));
        assert_eq!(slices.len(), 1);
    }

    #[test]
    fn is_aligned_checks_address_and_length_separately() {
        let mut memory = AlignedBuf::zeroed(8192);
        let base = memory.as_mut_ptr();
        for (offset, len, address_ok, len_ok) in [
            (0, 4096, true, true),
            (512, 4096, false, true),
            (0, 1000, true, false),
        ] {
            let mut builder = Buffer::guest(Rc::new(()));
            // SAFETY: inside `memory`, which outlives the buffer.
            unsafe { builder.push(base.wrapping_add(offset), len) };
            let buffer = builder.build();
            assert_eq!(buffer.is_aligned(4096, 1), address_ok);
            assert_eq!(buffer.is_aligned(1, 512), len_ok);
        }
    }
}
