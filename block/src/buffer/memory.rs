//! Copies to and from the bytes of a buffer that have addresses in this process.
//!
//! A guest may write its memory at any time, so there is never a Rust reference to it: bytes are copied through raw
//! pointers.
//!
//! Invariant: every access lies inside the buffer that the [`Memory`] borrows, which keeps it mapped.

#![expect(unsafe_code, reason = "copies through raw pointers")]

use super::io_slice::IoSlice;

/// Panics unless `offset..offset + len` lies inside a buffer of `whole` bytes.
#[inline]
pub(super) fn check_range(whole: usize, offset: usize, len: usize) {
    let end = offset
        .checked_add(len)
        .expect("a range inside a buffer does not wrap");
    assert!(end <= whole, "bytes {offset}..{end} of a buffer of {whole}");
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Stretches<'a> {
    One(IoSlice),
    Many(&'a [IoSlice]),
}

/// The bytes of a [`Buffer`](super::Buffer) that this process can reach, its own or a guest's.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    pub(super) stretches: Stretches<'a>,
    pub(super) len: usize,
}

impl Memory<'_> {
    /// Calls `f` with each stretch of bytes `offset..offset + len`.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    #[inline]
    pub(crate) fn for_each(self, offset: usize, len: usize, mut f: impl FnMut(IoSlice)) {
        check_range(self.len, offset, len);
        if len == 0 {
            return;
        }
        match self.stretches {
            Stretches::One(slice) => f(IoSlice::new(slice.ptr().wrapping_add(offset), len)),
            Stretches::Many(slices) => {
                let (mut skip, mut left) = (offset, len);
                for slice in slices {
                    if skip >= slice.len() {
                        skip -= slice.len();
                        continue;
                    }
                    let part = left.min(slice.len() - skip);
                    f(IoSlice::new(slice.ptr().wrapping_add(skip), part));
                    skip = 0;
                    left -= part;
                    if left == 0 {
                        break;
                    }
                }
            }
        }
    }

    /// Fills bytes `offset..offset + len` with `byte`.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    pub fn fill(self, offset: usize, len: usize, byte: u8) {
        // SAFETY: `for_each` names only memory the borrowed buffer owns or holds mapped, of that length.
        // Owned memory is reached through `&Buffer` only by ops and by this module's copies, which
        // make no reference to it; guest memory is shared with the guest by nature.
        self.for_each(offset, len, |slice| unsafe {
            std::ptr::write_bytes(slice.ptr(), byte, slice.len());
        });
    }

    /// Copies `bytes` into the buffer, from `offset` on.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    pub fn write(self, offset: usize, bytes: &[u8]) {
        let mut at = 0;
        self.for_each(offset, bytes.len(), |slice| {
            let from = bytes.as_ptr().wrapping_add(at);
            // SAFETY: source: `at + slice.len() <= bytes.len()`, as the stretches add up to it.
            // Destination: as in `fill`. They do not overlap unless the guest maps our own memory,
            // which it cannot.
            unsafe { std::ptr::copy_nonoverlapping(from, slice.ptr(), slice.len()) };
            at += slice.len();
        });
    }

    /// Copies bytes of the buffer, from `offset` on, into all of `out`.
    ///
    /// # Panics
    ///
    /// If the buffer does not have that many.
    pub fn read(self, offset: usize, out: &mut [u8]) {
        let (base, len, mut at) = (out.as_mut_ptr(), out.len(), 0);
        self.for_each(offset, len, |slice| {
            // SAFETY: destination: `at + slice.len() <= len`. Source: as in `fill`.
            unsafe { std::ptr::copy_nonoverlapping(slice.ptr(), base.wrapping_add(at), slice.len()) };
            at += slice.len();
        });
    }

    /// Copies `len` bytes to another buffer in small steps, as neither may be borrowed as a slice.
    ///
    /// # Panics
    ///
    /// If a range is not inside its buffer.
    pub fn copy_to(self, from_offset: usize, to: Memory<'_>, to_offset: usize, len: usize) {
        let mut chunk = [0u8; 4096];
        let mut done = 0;
        while done < len {
            let part = chunk.len().min(len - done);
            self.read(from_offset + done, &mut chunk[..part]);
            to.write(to_offset + done, &chunk[..part]);
            done += part;
        }
    }
}

/// Fills the stretches of an op that has ended, and still owns their memory, with zeros.
pub(crate) fn zero_slices(slices: &[IoSlice]) {
    for slice in slices {
        // SAFETY: called by the slot that holds the op's memory, before it releases it: the stretch
        // is mapped and writable, as the read it belonged to required.
        unsafe { std::ptr::write_bytes(slice.ptr(), 0, slice.len()) };
    }
}
