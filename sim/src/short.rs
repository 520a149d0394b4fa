//! A driver for a real ring that sometimes cuts ops short or lets them fail with a request to retry.
//!
//! Files on a quiet host hardly ever do that, and code that continues after a short result can lose data.

#![expect(unsafe_code, reason = "implements Driver::push with a list of its own")]

use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;

use super::random::Random;
use block::buffer::IoSlice;
use block::ring::driver::{Completion, Driver, FileSlot, KernelOp, Kind, QueueFull, Wait};

/// Unit to which ops are cut short, in bytes: direct I/O ends inside a block only at a file's end.
const UNIT: usize = 4096;

/// A driver whose ops are cut short or refused.
#[derive(Debug)]
pub(super) struct ShortDriver {
    inner: Box<dyn Driver>,
    random: Random,
    /// The slice lists of ops that were cut short, until they have ended.
    lists: HashMap<u64, Vec<IoSlice>>,
    /// Completions of ops that must be retried.
    refused: Vec<Completion>,
}

impl ShortDriver {
    pub(super) fn new(inner: Box<dyn Driver>, seed: u64) -> Self {
        Self {
            inner,
            random: Random::new(seed),
            lists: HashMap::new(),
            refused: Vec::new(),
        }
    }

    /// Returns the first part of an op's slice list; `None` if the op is not cut short.
    fn cut(&mut self, slices: &[IoSlice]) -> Option<Vec<IoSlice>> {
        let bytes: usize = slices.iter().map(IoSlice::len).sum();
        if bytes <= UNIT || !self.random.one_in(3) {
            return None;
        }
        let units = (bytes - 1) / UNIT;
        let mut left = UNIT * (1 + self.random.below(units as u64) as usize);
        let mut list = Vec::new();
        for slice in slices {
            let part = left.min(slice.len());
            if part > 0 {
                list.push(IoSlice::new(slice.ptr(), part));
            }
            left -= part;
        }
        Some(list)
    }
}

// SAFETY: completions are those of the driver below, and one for each op that is not passed on to it.
unsafe impl Driver for ShortDriver {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot> {
        self.inner.register_file(fd)
    }

    fn unregister_file(&mut self, file: FileSlot) {
        self.inner.unregister_file(file);
    }

    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull> {
        let mut op = *op;
        if matches!(op.kind, Kind::Read | Kind::Write { .. }) && op.slice_count > 0 {
            if self.random.one_in(16) {
                self.refused.push(Completion {
                    user_data,
                    result: -self.random.pick(&[libc::EAGAIN, libc::EINTR]),
                    more: false,
                });
                return Ok(());
            }
            // SAFETY: `slices` points at `slice_count` valid entries (contract of `push`).
            let slices = unsafe { std::slice::from_raw_parts(op.slices, op.slice_count) };
            if let Some(list) = self.cut(slices) {
                (op.slices, op.slice_count) = (list.as_ptr(), list.len());
                self.lists.insert(user_data, list);
            }
        }
        // SAFETY: the caller's contract; a list of our own stays until the op's completion has been reaped.
        unsafe { self.inner.push(&op, user_data) }
    }

    fn cancel(&mut self, user_data: u64) -> Result<(), QueueFull> {
        self.inner.cancel(user_data)
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        let wait = if self.refused.is_empty() { wait } else { Wait::No };
        self.inner.enter(wait)
    }

    fn file_len(&self, file: FileSlot) -> io::Result<u64> {
        self.inner.file_len(file)
    }

    fn next_data(&self, file: FileSlot, offset: u64) -> Option<u64> {
        self.inner.next_data(file, offset)
    }

    fn next_hole(&self, file: FileSlot, offset: u64) -> Option<u64> {
        self.inner.next_hole(file, offset)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        let before = out.len();
        out.append(&mut self.refused);
        self.inner.reap(out);
        for completion in &out[before..] {
            self.lists.remove(&completion.user_data);
        }
    }
}
