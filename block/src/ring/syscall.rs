//! The system-call driver, for image tools and for systems that refuse io_uring.
//!
//! Every op is performed in `push` and its completion waits to be reaped. So the code above runs as on
//! io_uring, only one op at a time. Watches are polled when there is nothing else to do.
//!
//! It has no registered buffers: the bytes of one go through its [door](super::copy_through).
//!
//! For the model checker shuttle an op is performed some time after `push` and in any order, so that
//! other threads find it in flight.

#![expect(unsafe_code, reason = "passes on the memory contract of Driver::push")]

use std::io;
use std::os::fd::RawFd;

use super::copy_through::ScratchCopies;
use super::driver::{Completion, Driver, FileSlot, KernelOp, Kind, QueueFull, Wait};
use super::sys;

#[derive(Debug, Default)]
pub(crate) struct SyscallDriver {
    done: Vec<Completion>,
    copies: ScratchCopies,
    #[cfg(shuttle)]
    pending: Vec<(KernelOp, u64)>,
    watches: Vec<(RawFd, u64)>,
}

impl SyscallDriver {
    /// Performs the op and records its completion.
    ///
    /// # Safety
    ///
    /// As for [`Driver::push`].
    unsafe fn perform(&mut self, op: &KernelOp, user_data: u64) {
        let result = match op.fixed {
            // SAFETY: the caller's contract is the same and lasts longer.
            None => unsafe { sys::perform(op) },
            // SAFETY: as above, of the list alone.
            Some(fixed) => unsafe { self.copies.transfer(op, fixed) },
        };
        self.done.push(Completion {
            user_data,
            result,
            more: false,
        });
    }

    /// Performs some of the pushed ops, at least one with `wait`; other threads run before each.
    #[cfg(shuttle)]
    fn perform_some(&mut self, wait: bool) {
        use shuttle::rand::{Rng, thread_rng};
        while !self.pending.is_empty() && ((wait && self.done.is_empty()) || thread_rng().r#gen()) {
            crate::sync::thread::yield_now();
            let index = thread_rng().gen_range(0..self.pending.len());
            let (op, user_data) = self.pending.swap_remove(index);
            // SAFETY: the op has not been reaped, so the contract of `push` still holds.
            unsafe { self.perform(&op, user_data) };
        }
    }
}

// SAFETY: an op has been performed when its one completion is recorded.
unsafe impl Driver for SyscallDriver {
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
            self.perform(op, user_data);
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

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        let wait = wait != Wait::No;
        #[cfg(shuttle)]
        self.perform_some(wait);
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

    fn next_hole(&self, file: FileSlot, offset: u64) -> Option<u64> {
        sys::next_hole(file.fd, offset)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }
}
