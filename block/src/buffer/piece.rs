//! The parts of a vectored op: bytes of shared buffers, and zeros.
//!
//! Invariant: zeros come from a block that nothing writes. Pieces of zeros are refused for reads.

use std::rc::Rc;

use super::io_slice::{IoSlice, IoSlices};
use super::{Buffer, Place};

/// A part of what a vectored op reads or writes: some bytes of a shared buffer, or zeros.
#[derive(Clone, Debug)]
pub enum Piece {
    /// `len` bytes of `buffer` from `offset` on.
    Bytes {
        /// The memory; the op keeps it until it has ended.
        buffer: Rc<Buffer>,
        /// The first byte.
        offset: usize,
        /// The length in bytes.
        len: usize,
    },
    /// This number of zero bytes; only for writes.
    Zeros(usize),
}

impl Piece {
    /// Makes a piece of a whole buffer.
    #[must_use]
    pub fn whole(buffer: &Rc<Buffer>) -> Self {
        Self::Bytes {
            buffer: Rc::clone(buffer),
            offset: 0,
            len: buffer.len(),
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes { len, .. } => *len,
            Self::Zeros(len) => *len,
        }
    }

    /// Returns true if its length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if its bytes are a registered buffer's. An op can name no other piece beside it.
    pub(crate) fn is_registered(&self) -> bool {
        matches!(self, Self::Bytes { buffer, .. } if matches!(buffer.place(), Place::Registered(_)))
    }

    /// Returns its first `at` bytes and the rest. If it is not longer than that, the rest is empty.
    #[must_use]
    pub fn split_at(&self, at: usize) -> (Self, Self) {
        let at = at.min(self.len());
        match self {
            Self::Bytes { buffer, offset, len } => {
                let part = |offset, len| Self::Bytes {
                    buffer: Rc::clone(buffer),
                    offset,
                    len,
                };
                (part(*offset, at), part(offset + at, len - at))
            }
            Self::Zeros(len) => (Self::Zeros(at), Self::Zeros(len - at)),
        }
    }
}

/// A read-only stretch of zeros for ops to write from.
const ZERO_BLOCK_BYTES: usize = 64 * 1024;

#[repr(align(4096))]
struct ZeroBlock([u8; ZERO_BLOCK_BYTES]);

static ZERO_BLOCK: ZeroBlock = ZeroBlock([0; ZERO_BLOCK_BYTES]);

/// Appends `len` zero bytes, as the source of a write, to `out`.
pub(crate) fn append_zeros(mut len: usize, out: &mut IoSlices) {
    while len > 0 {
        let part = len.min(ZERO_BLOCK_BYTES);
        // Never written through: pieces of zeros are refused for reads.
        out.push(IoSlice::new(ZERO_BLOCK.0.as_ptr().cast_mut(), part));
        len -= part;
    }
}
