//! The io_uring driver: production.
//!
//! One ring per worker thread, made by that thread and used by it alone (`SINGLE_ISSUER`), with
//! completions delivered only when it asks (`DEFER_TASKRUN`) where the kernel has these; older kernels
//! fall back to `COOP_TASKRUN` or to none. Files are registered. Sources: `io_uring_setup(2)`,
//! `io_uring_enter(2)`, `linux/io_uring.h`.

#![expect(
    unsafe_code,
    reason = "submission entries name memory that the kernel reads and writes"
)]

use std::fmt;
use std::io;
use std::os::fd::RawFd;

use io_uring::types::{Fd, Fixed, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};

use super::driver::{Completion, Driver, FileSlot, KernelOp, Kind, QueueFull};
use super::sys;

/// How many files a ring can have registered; past that, plain descriptors are used.
const FIXED_FILES: u32 = 128;

/// Completions of cancel requests themselves carry this.
const CANCEL_USER_DATA: u64 = u64::MAX;

pub(crate) struct UringDriver {
    ring: IoUring,
    deferred: bool,
    fixed_free: Vec<u32>,
    /// Pushed since the last enter.
    unstarted: usize,
    /// Ops that were carried out while they were pushed.
    done: Vec<Completion>,
}

impl fmt::Debug for UringDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UringDriver")
            .field("deferred", &self.deferred)
            .finish_non_exhaustive()
    }
}

impl UringDriver {
    /// A ring with `entries` submission and four times as many completion entries.
    pub(crate) fn new(entries: u32) -> io::Result<Self> {
        let (ring, deferred) = Self::build(entries)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
            opcode::PollAdd::CODE,
            opcode::AsyncCancel::CODE,
        ];
        if needed.iter().any(|&code| !probe.is_supported(code)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring is too old",
            ));
        }
        let fixed = ring.submitter().register_files_sparse(FIXED_FILES).is_ok();
        let fixed_free = if fixed {
            (0..FIXED_FILES).rev().collect()
        } else {
            Vec::new()
        };
        Ok(Self {
            ring,
            deferred,
            fixed_free,
            unstarted: 0,
            done: Vec::new(),
        })
    }

    fn build(entries: u32) -> io::Result<(IoUring, bool)> {
        let completions = entries.saturating_mul(4);
        let mut newest = IoUring::builder();
        newest
            .setup_cqsize(completions)
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_submit_all();
        match newest.build(entries) {
            Ok(ring) => return Ok((ring, true)),
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
            Err(_) => {}
        }
        let mut older = IoUring::builder();
        older
            .setup_cqsize(completions)
            .setup_coop_taskrun()
            .setup_taskrun_flag();
        match older.build(entries) {
            Ok(ring) => return Ok((ring, false)),
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
            Err(_) => {}
        }
        let mut oldest = IoUring::builder();
        oldest.setup_cqsize(completions);
        Ok((oldest.build(entries)?, false))
    }

    fn entry(op: &KernelOp) -> squeue::Entry {
        let count = u32::try_from(op.slice_count)
            .unwrap_or(u32::MAX)
            .min(sys::IOV_MAX);
        // The crate's opcodes take `Fd` or `Fixed`, by a trait that cannot be named.
        macro_rules! on_file {
            ($make:expr) => {
                match op.file.fixed {
                    Some(index) => {
                        let make = $make;
                        make(Fixed(index))
                    }
                    None => {
                        let make = $make;
                        make(Fd(op.file.fd))
                    }
                }
            };
        }
        match op.kind {
            Kind::Read | Kind::Write { .. } if op.slice_count == 1 => {
                // SAFETY: `slices` points at `slice_count` valid entries (contract of `push`).
                let slice = unsafe { *op.slices };
                let len = u32::try_from(slice.len())
                    .unwrap_or(u32::MAX)
                    .min(sys::TRANSFER_BYTES_MAX);
                if let Kind::Write { dsync } = op.kind {
                    on_file!(|file| opcode::Write::new(file, slice.ptr(), len)
                        .offset(op.offset)
                        .rw_flags(rw_flags(dsync))
                        .build())
                } else {
                    on_file!(|file| opcode::Read::new(file, slice.ptr(), len)
                        .offset(op.offset)
                        .build())
                }
            }
            Kind::Read => {
                on_file!(|file| opcode::Readv::new(file, op.slices.cast(), count)
                    .offset(op.offset)
                    .build())
            }
            Kind::Write { dsync } => on_file!(|file| opcode::Writev::new(file, op.slices.cast(), count)
                .offset(op.offset)
                .rw_flags(rw_flags(dsync))
                .build()),
            Kind::DataSync => on_file!(|file| opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build()),
            Kind::Allocate { mode } => on_file!(|file| opcode::Fallocate::new(file, op.len)
                .offset(op.offset)
                .mode(mode)
                .build()),
            // Carried out by `push`; a no-op would be harmless.
            Kind::Truncate => opcode::Nop::new().build(),
            Kind::Watch => on_file!(|file| opcode::PollAdd::new(file, sys::POLL_IN).multi(true).build()),
        }
    }

    fn push_entry(&mut self, entry: squeue::Entry) -> Result<(), QueueFull> {
        // SAFETY: the memory that `entry` names stays valid until its completion is reaped, by the
        // contract of `Driver::push`; cancel entries name none.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| QueueFull)?;
        self.unstarted += 1;
        Ok(())
    }
}

fn rw_flags(dsync: bool) -> i32 {
    if dsync { libc::RWF_DSYNC } else { 0 }
}

impl Driver for UringDriver {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot> {
        let Some(index) = self.fixed_free.pop() else {
            return Ok(FileSlot { fd, fixed: None });
        };
        match self.ring.submitter().register_files_update(index, &[fd]) {
            Ok(_) => Ok(FileSlot {
                fd,
                fixed: Some(index),
            }),
            Err(error) => {
                self.fixed_free.push(index);
                Err(error)
            }
        }
    }

    fn unregister_file(&mut self, file: FileSlot) {
        if let Some(index) = file.fixed
            && self.ring.submitter().register_files_update(index, &[-1]).is_ok()
        {
            self.fixed_free.push(index);
        }
    }

    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull> {
        if op.kind == Kind::Truncate {
            // Rare, and io_uring has it only since Linux 6.9.
            // SAFETY: a truncation names no memory.
            let result = unsafe { sys::carry_out(op) };
            self.done.push(Completion {
                user_data,
                result,
                more: false,
            });
            return Ok(());
        }
        self.push_entry(Self::entry(op).user_data(user_data))
    }

    fn cancel(&mut self, user_data: u64) -> Result<(), QueueFull> {
        self.push_entry(
            opcode::AsyncCancel::new(user_data)
                .build()
                .user_data(CANCEL_USER_DATA),
        )
    }

    fn enter(&mut self, wait: bool) -> io::Result<()> {
        let wait = wait && self.done.is_empty();
        let to_submit = u32::try_from(self.ring.submission().len()).unwrap_or(u32::MAX);
        // With DEFER_TASKRUN completions are only delivered to an enter that asks for events.
        let flags = io_uring::EnterFlags::GETEVENTS.bits();
        // SAFETY: without an extended argument nothing is passed to the kernel but numbers.
        let entered = unsafe {
            self.ring
                .submitter()
                .enter::<libc::sigset_t>(to_submit, u32::from(wait), flags, None)
        };
        self.unstarted = self.ring.submission().len();
        match entered {
            Ok(_) => Ok(()),
            // A signal came, or the completion queue wants reaping first: the caller does that next.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn has_unstarted(&self) -> bool {
        self.unstarted != 0
    }

    fn file_len(&self, file: FileSlot) -> io::Result<u64> {
        sys::file_len(file.fd)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
        for entry in self.ring.completion() {
            if entry.user_data() != CANCEL_USER_DATA {
                out.push(Completion {
                    user_data: entry.user_data(),
                    result: entry.result(),
                    more: io_uring::cqueue::more(entry.flags()),
                });
            }
        }
    }
}
