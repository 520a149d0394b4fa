//! The plain-syscalls driver: where io_uring is refused, and for image tools.
//!
//! Every op is carried out while it is pushed and its completion waits to be reaped, so the code above
//! runs as on io_uring, only one op at a time. Watches are polled when there is nothing else to do.
//!
//! It has no registered buffers: the bytes of one go through memory of its own and the buffer's door.
//!
//! For the model checker shuttle an op is carried out some time after it was pushed and in any order, so that
//! other threads find it in flight.

#![expect(unsafe_code, reason = "passes on the memory contract of Driver::push")]

use std::io;
use std::os::fd::RawFd;

use super::driver::{Completion, Driver, FileSlot, FixedOp, KernelOp, Kind, QueueFull};
use super::sys;
use crate::buffer::{AlignedBuf, IoSlice};

/// How much of a registered buffer goes through our memory at a time. A longer op continues like a short one.
const SCRATCH_BYTES: usize = 256 << 10;

#[derive(Debug, Default)]
pub(crate) struct SyscallDriver {
    done: Vec<Completion>,
    scratch: Option<AlignedBuf>,
    #[cfg(shuttle)]
    pending: Vec<(KernelOp, u64)>,
    watches: Vec<(RawFd, u64)>,
}

impl SyscallDriver {
    /// Does the op and notes how it ended.
    ///
    /// # Safety
    ///
    /// As for [`Driver::push`].
    unsafe fn carry_out(&mut self, op: &KernelOp, user_data: u64) {
        let result = match op.fixed {
            // SAFETY: the caller's contract is the same and lasts longer.
            None => unsafe { sys::carry_out(op) },
            // SAFETY: as above, of the list alone.
            Some(fixed) => match unsafe { self.carry_out_fixed(op, fixed) } {
                Ok(bytes) => bytes,
                Err(errno) => -errno,
            },
        };
        self.done.push(Completion {
            user_data,
            result,
            more: false,
        });
    }

    /// Moves bytes between a file and a registered buffer: how many, or the errno.
    ///
    /// # Safety
    ///
    /// As for [`Driver::push`], until this returns.
    unsafe fn carry_out_fixed(&mut self, op: &KernelOp, fixed: FixedOp) -> Result<i32, i32> {
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
            let result = unsafe { sys::carry_out(&op) };
            usize::try_from(result).map_err(|_| result.saturating_neg())
        };
        // All of it or an error: the door has every byte of a buffer.
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

    /// Carries out some of the ops that were pushed, at least one to `wait` for; other threads run before each.
    #[cfg(shuttle)]
    fn carry_out_some(&mut self, wait: bool) {
        use shuttle::rand::{Rng, thread_rng};
        while !self.pending.is_empty() && ((wait && self.done.is_empty()) || thread_rng().r#gen()) {
            crate::sync::thread::yield_now();
            let index = thread_rng().gen_range(0..self.pending.len());
            let (op, user_data) = self.pending.swap_remove(index);
            // SAFETY: the op has not been reaped, so the contract of `push` still holds.
            unsafe { self.carry_out(&op, user_data) };
        }
    }
}

impl Driver for SyscallDriver {
    fn name(&self) -> &'static str {
        "syscalls"
    }

    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot> {
        Ok(FileSlot { fd, fixed: None })
    }

    fn unregister_file(&mut self, _file: FileSlot) {}

    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull> {
        if op.kind == Kind::Watch {
            self.watches.push((op.file.fd, user_data));
            return Ok(());
        }
        #[cfg(shuttle)]
        self.pending.push((*op, user_data));
        // SAFETY: the caller's contract is the same and lasts longer.
        #[cfg(not(shuttle))]
        unsafe {
            self.carry_out(op, user_data);
        }
        Ok(())
    }

    fn cancel(&mut self, user_data: u64) -> Result<(), QueueFull> {
        if let Some(index) = self.watches.iter().position(|&(_, watch)| watch == user_data) {
            self.watches.swap_remove(index);
            self.done.push(Completion {
                user_data,
                result: -libc::ECANCELED,
                more: false,
            });
        }
        Ok(())
    }

    fn enter(&mut self, wait: bool) -> io::Result<()> {
        #[cfg(shuttle)]
        self.carry_out_some(wait);
        if !self.done.is_empty() || self.watches.is_empty() {
            return Ok(());
        }
        let fds: Vec<RawFd> = self.watches.iter().map(|&(fd, _)| fd).collect();
        let readable = sys::poll_readable(&fds, wait)?;
        for (&(fd, user_data), _) in self
            .watches
            .iter()
            .zip(readable)
            .filter(|(_, readable)| *readable)
        {
            sys::take_event(fd);
            self.done.push(Completion {
                user_data,
                result: libc::POLLIN.into(),
                more: true,
            });
        }
        Ok(())
    }

    fn file_len(&self, file: FileSlot) -> io::Result<u64> {
        sys::file_len(file.fd)
    }

    fn next_data(&self, file: FileSlot, offset: u64) -> Option<u64> {
        sys::next_data(file.fd, offset)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }
}
