//! The null driver: every op succeeds at once and touches nothing.
//!
//! It measures what a request costs above the kernel (`benches/`). Reads leave their memory as it was.

#![expect(unsafe_code, reason = "implements Driver::push and reads the op's slice list")]

use std::io;
use std::os::fd::RawFd;

use super::driver::{Completion, Driver, FileSlot, KernelOp, Kind, QueueFull, Wait};

#[derive(Debug, Default)]
pub(crate) struct NullDriver {
    done: Vec<Completion>,
}

// SAFETY: no op's memory is touched, and each op has one completion.
unsafe impl Driver for NullDriver {
    fn name(&self) -> &'static str {
        "null"
    }

    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot> {
        Ok(FileSlot { fd, fixed: None })
    }

    fn unregister_file(&mut self, _file: FileSlot) {}

    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull> {
        let bytes: usize = match op.kind {
            Kind::Watch => return Ok(()),
            Kind::Read | Kind::Write { .. } => {
                // SAFETY: `slices` points at `slice_count` valid entries (contract of `push`).
                let slices = unsafe { std::slice::from_raw_parts(op.slices, op.slice_count) };
                slices.iter().map(crate::buffer::IoSlice::len).sum()
            }
            Kind::DataSync | Kind::Allocate { .. } | Kind::Truncate | Kind::Command { .. } => 0,
        };
        self.done.push(Completion {
            user_data,
            result: i32::try_from(bytes).unwrap_or(i32::MAX),
            more: false,
        });
        Ok(())
    }

    fn cancel(&mut self, _user_data: u64) -> Result<(), QueueFull> {
        Ok(())
    }

    fn enter(&mut self, _wait: Wait) -> io::Result<()> {
        Ok(())
    }

    fn file_len(&self, file: FileSlot) -> io::Result<u64> {
        super::sys::file_len(file.fd)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }
}
