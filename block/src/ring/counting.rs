//! A driver for tests that counts the calls of the kernel; ops end when the ring waits for them.

#![expect(unsafe_code, reason = "implements Driver::push")]

use std::cell::RefCell;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use super::driver::{Completion, Driver, FileSlot, KernelOp, QueueFull, Wait};

#[derive(Debug, Default)]
pub(crate) struct CountingDriver {
    begun: Vec<u64>,
    started: Vec<u64>,
    ended: Vec<u64>,
    /// The calls that the kernel would have got, each by what it waited for.
    pub(crate) calls: Rc<RefCell<Vec<Wait>>>,
}

// SAFETY: no op's memory is touched, and each op has one completion.
unsafe impl Driver for CountingDriver {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot> {
        Ok(FileSlot { fd, fixed: None })
    }

    fn unregister_file(&mut self, _file: FileSlot) {}

    unsafe fn push(&mut self, _op: &KernelOp, user_data: u64) -> Result<(), QueueFull> {
        self.begun.push(user_data);
        Ok(())
    }

    fn cancel(&mut self, _user_data: u64) -> Result<(), QueueFull> {
        Ok(())
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        let waits = wait != Wait::No;
        if !waits && self.begun.is_empty() {
            return Ok(());
        }
        self.calls.borrow_mut().push(wait);
        self.started.append(&mut self.begun);
        if waits {
            self.ended.append(&mut self.started);
            assert!(!self.ended.is_empty(), "it would wait for what never comes");
        }
        Ok(())
    }

    fn file_len(&self, _file: FileSlot) -> io::Result<u64> {
        Ok(0)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.extend(self.ended.drain(..).map(|user_data| Completion {
            user_data,
            result: 0,
            more: false,
        }));
    }
}
