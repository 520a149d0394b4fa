//! Stretches of memory as the kernel takes them.
//!
//! Invariant: a stretch is only a name. Whoever makes one keeps its memory mapped as long as something may use it.

use std::fmt;

use smallvec::SmallVec;

/// One stretch of memory: an address and a length in bytes.
///
/// Laid out as the kernel's `struct iovec`, so that a list of them can be handed to it.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct IoSlice(libc::iovec);

impl IoSlice {
    /// Names `len` bytes at `ptr`.
    #[must_use]
    pub fn new(ptr: *mut u8, len: usize) -> Self {
        Self(libc::iovec {
            iov_base: ptr.cast(),
            iov_len: len,
        })
    }

    /// Returns the length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Returns true if its length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }

    /// Returns the address.
    #[must_use]
    #[inline]
    pub fn ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Undoes [`IoSlice::skip`] of `bytes`.
    pub(crate) fn unskip(&self, bytes: usize) -> Self {
        Self::new(self.ptr().wrapping_sub(bytes), self.len() + bytes)
    }

    /// Returns the rest after the first `bytes`.
    pub(crate) fn skip(&self, bytes: usize) -> Self {
        Self::new(self.ptr().wrapping_add(bytes), self.len().saturating_sub(bytes))
    }
}

impl fmt::Debug for IoSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}+{}", self.0.iov_base, self.0.iov_len)
    }
}

/// The list of stretches an op reads into or writes from.
pub(crate) type IoSlices = SmallVec<[IoSlice; 4]>;
