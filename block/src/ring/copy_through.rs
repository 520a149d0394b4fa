//! Synchronous ops between a file and a registered buffer, for drivers without registered buffers: through scratch
//! memory and the buffer's door.

#![expect(unsafe_code, reason = "passes on the memory contract of Driver::push")]

use super::driver::{FileSlot, FixedOp, KernelOp, Kind};
use super::sys;
use crate::buffer::{AlignedBuf, IoSlice};

/// The most bytes copied through the scratch memory at a time. A longer op continues like a short one.
const SCRATCH_BYTES: usize = 256 << 10;

/// Scratch memory for such copies, allocated at the first use.
#[derive(Debug, Default)]
pub(super) struct ScratchCopies {
    scratch: Option<AlignedBuf>,
}

impl ScratchCopies {
    /// Performs a read or write. Returns a byte count, or minus the errno.
    ///
    /// # Safety
    ///
    /// As for [`Driver::push`](super::driver::Driver::push), until this returns.
    pub(super) unsafe fn transfer(&mut self, op: &KernelOp, fixed: FixedOp) -> i32 {
        // SAFETY: the caller's contract is the same.
        match unsafe { self.moved(op, fixed) } {
            Ok(bytes) => bytes,
            Err(errno) => -errno,
        }
    }

    /// Moves bytes between a file and a registered buffer. Returns their number, or the errno.
    ///
    /// # Safety
    ///
    /// As for [`Driver::push`](super::driver::Driver::push), until this returns.
    unsafe fn moved(&mut self, op: &KernelOp, fixed: FixedOp) -> Result<i32, i32> {
        if op.slice_count != 1 {
            return Err(libc::EINVAL);
        }
        // SAFETY: `slices` points at one valid entry (contract of `push`), whose address is not used.
        let len = unsafe { (*op.slices).len() }.min(SCRATCH_BYTES);
        let scratch = self
            .scratch
            .get_or_insert_with(|| AlignedBuf::zeroed(SCRATCH_BYTES));
        let memory = scratch.as_mut_ptr();
        let moved = |kind, file: FileSlot, offset: u64, from: usize, len: usize| {
            let slice = IoSlice::new(memory.wrapping_add(from), len);
            let op = KernelOp {
                kind,
                file,
                offset,
                len: 0,
                slices: &raw const slice,
                slice_count: 1,
                fixed: None,
                at_door: false,
            };
            // SAFETY: the one stretch lies in the scratch memory, which nothing else uses meanwhile.
            let result = unsafe { sys::perform(&op) };
            usize::try_from(result).map_err(|_| result.saturating_neg())
        };
        // All bytes or an error: the door has every byte of a buffer.
        let at_door = |kind, len: usize| {
            let mut done = 0;
            while done < len {
                match moved(
                    kind,
                    fixed.door,
                    fixed.door_offset + done as u64,
                    done,
                    len - done,
                )? {
                    0 => return Err(libc::EIO),
                    part => done += part,
                }
            }
            Ok(())
        };
        let bytes = match op.kind {
            Kind::Read => {
                let bytes = moved(Kind::Read, op.file, op.offset, 0, len)?;
                at_door(Kind::Write { dsync: false }, bytes)?;
                bytes
            }
            Kind::Write { .. } => {
                at_door(Kind::Read, len)?;
                moved(op.kind, op.file, op.offset, 0, len)?
            }
            _ => return Err(libc::EINVAL),
        };
        i32::try_from(bytes).map_err(|_| libc::EINVAL)
    }
}
