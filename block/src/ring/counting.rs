//! A driver for tests that counts the calls of the kernel; ops end when the ring waits for them, and syncs in place as the
//! test has them end. The kernel may fail it for good.

#![expect(unsafe_code, reason = "implements Driver::push")]

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use super::driver::{Completion, Driver, FileSlot, KernelOp, QueueFull, Wait};

#[derive(Default)]
pub(crate) struct CountingDriver {
    begun: Vec<Completion>,
    started: Vec<Completion>,
    ended: Vec<Completion>,
    /// The calls that the kernel would have got, each by what it waited for.
    pub(crate) calls: Rc<RefCell<Vec<Wait>>>,
    /// The events during a sync in place, and its result; without it there is none.
    pub(crate) sync_now: Option<Box<dyn FnMut() -> i32>>,
    /// From now on each call fails, and no op ends.
    pub(crate) fails: Rc<Cell<bool>>,
}

impl fmt::Debug for CountingDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CountingDriver").finish_non_exhaustive()
    }
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

    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull> {
        self.begun.push(Completion {
            user_data,
            result: i32::try_from(op.len).unwrap_or(i32::MAX),
            more: false,
        });
        Ok(())
    }

    fn cancel(&mut self, _user_data: u64) -> Result<(), QueueFull> {
        Ok(())
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        if self.fails.get() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
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

    fn sync_now(&mut self, _file: FileSlot) -> Option<i32> {
        Some(self.sync_now.as_mut()?())
    }

    fn file_len(&self, _file: FileSlot) -> io::Result<u64> {
        Ok(0)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.ended);
    }
}
