//! An op in flight in a world, and the memory that it names.
//!
//! Invariant: its memory is touched only between its submission and its completion.

#![expect(unsafe_code, reason = "touches the memory of ops, as a kernel would")]

use block::buffer::IoSlice;
use block::ring::driver::Kind;

/// Outcome of an op.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fate {
    /// The number of bytes that take effect.
    pub(super) bytes: u64,
    /// The error, if the result is not the number of bytes.
    pub(super) errno: Option<i32>,
}

#[derive(Debug)]
pub(super) struct SimOp {
    pub(super) id: u64,
    pub(super) ring: u32,
    pub(super) user_data: u64,
    pub(super) kind: Kind,
    pub(super) file: usize,
    pub(super) offset: u64,
    /// The number of bytes of the operation.
    pub(super) len: u64,
    pub(super) slices: *const IoSlice,
    pub(super) slice_count: usize,
    /// The one stretch that replaces the slices, if it is a registered buffer's.
    pub(super) fixed: Option<IoSlice>,
    pub(super) submitted: u64,
    pub(super) not_before: u64,
    pub(super) fate: Option<Fate>,
    /// The number of bytes that have taken effect.
    pub(super) done: u64,
    /// The result, once its effect is over and only the completion is to come.
    pub(super) result: Option<i32>,
    pub(super) cancelled: bool,
    /// The bytes that it had to write when it was completed, if that was before its effect.
    pub(super) completed_with: Option<Vec<u8>>,
}

/// The turn of an op that is held: never, until it is released.
pub(super) const HELD: u64 = u64::MAX;

impl SimOp {
    /// Calls `f` with each stretch of the next `len` bytes of the op's memory, and the position of the stretch
    /// in those bytes.
    pub(super) fn copy(&self, mut f: impl FnMut(&mut [u8], usize), len: u64) {
        if self.slice_count == 0 || len == 0 {
            return;
        }
        let slices = match &self.fixed {
            Some(stretch) => std::slice::from_ref(stretch),
            // SAFETY: the op has not completed, so the list is there (contract of `submit`).
            None => unsafe { std::slice::from_raw_parts(self.slices, self.slice_count) },
        };
        let mut skip = self.done as usize;
        let (mut at, mut left) = (0, len as usize);
        for slice in slices {
            if skip >= slice.len() {
                skip -= slice.len();
                continue;
            }
            let part = left.min(slice.len() - skip);
            let start = slice.ptr().wrapping_add(skip);
            if self.kind == Kind::Read {
                // SAFETY: the op has not completed, so its memory is there and writable, and nobody else
                // has a reference to it (contract of `submit`); this thread is the only one.
                f(unsafe { std::slice::from_raw_parts_mut(start, part) }, at);
            } else {
                // SAFETY: as above, for reading; a copy, as the memory may be read-only.
                let mut copy = unsafe { std::slice::from_raw_parts(start, part) }.to_vec();
                f(&mut copy, at);
            }
            skip = 0;
            at += part;
            left -= part;
            if left == 0 {
                break;
            }
        }
    }
}
