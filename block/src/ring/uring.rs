//! The io_uring driver, for production.
//!
//! Each worker thread makes one ring and uses it alone (`SINGLE_ISSUER`), with completions delivered only
//! when it asks (`DEFER_TASKRUN`), if the kernel has these; on older kernels `COOP_TASKRUN` or neither is
//! used. Files are registered. Before it is used a ring is restricted to the ops of disk I/O, so that an
//! attacker who controls it cannot open or connect anything through it. Sources: `io_uring_setup(2)`,
//! `io_uring_enter(2)`, `linux/io_uring.h`.

#![expect(
    unsafe_code,
    reason = "submission entries name memory that the kernel reads and writes"
)]

use std::fmt;
use std::io;
use std::os::fd::RawFd;

use io_uring::register::Restriction;
use io_uring::types::{Fd, Fixed, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};

use super::copy_through::ScratchCopies;
use super::driver::{Completion, Driver, FileSlot, FixedOp, KernelOp, Kind, QueueFull, Wait};
use super::fixed::FixedTable;
use super::sys::{self, DetachedOp};
use super::write_threads::WriteThreads;
use crate::buffer::IoSlice;

/// The least number of files that a ring can have registered; past that, plain descriptors are used.
const FIXED_FILES_MIN: u32 = 128;

/// The number of ops on files with direct I/O that are started together. A disk that gets all ops of a round
/// at once idles while they are prepared and again when they have ended together, which costs a tenth of its
/// throughput. I/O through the page cache mostly completes at submission, and gains by larger batches.
const DIRECT_START_MAX: usize = 8;

/// The longest read or write of a file on tmpfs that the worker performs itself, in bytes. A longer one is worth a
/// kernel thread, and the worker continues meanwhile.
const IN_MEMORY_BYTES_MAX: usize = 32 << 10;

/// Way in which a registered file performs ops.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Nature {
    /// Through the page cache; it may have to wait for a disk, which the kernel decides. Not written yet.
    Cached,
    /// Through the page cache of a file system that takes writes without waiting, if it can.
    CachedWrites,
    /// Through the page cache of a file system that takes no write without waiting (ext4). io_uring punts each to a
    /// kernel thread; here the file's own thread performs them, many at a time.
    WaitingWrites,
    /// Bypassing the page cache.
    Direct,
    /// On tmpfs, where io_uring assumes that ops block and punts each to a kernel thread: a copy of 4 KiB costs a
    /// thread switch there and one back.
    InMemory,
}

/// The only ops that a ring allows.
const OPS: [u8; 10] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
];

/// The further op of a ring that serves a device's driver.
const COMMAND_OP: u8 = opcode::UringCmd16::CODE;

/// `IORING_REGISTER_FILES_UPDATE` of `linux/io_uring.h`: the only registration while a ring is in use.
const REGISTER_FILES_UPDATE: u8 = 6;

/// `IORING_ENTER_NO_IOWAIT` of `linux/io_uring.h` (Linux 6.15): waiting in the call does not count as I/O wait.
const NO_IOWAIT: u32 = 1 << 7;

/// Completions of cancel requests themselves carry this.
const CANCEL_USER_DATA: u64 = u64::MAX;

/// Reports of the eventfd of the write threads carry this.
const WRITES_USER_DATA: u64 = u64::MAX - 1;

pub(crate) struct UringDriver {
    ring: IoUring,
    fixed_free: Vec<u32>,
    /// The natures of the registered files, by index.
    natures: Vec<Nature>,
    /// Performs ops between files on tmpfs and registered buffers.
    copies: ScratchCopies,
    /// Ops pushed since the last enter, and the number of them on files that bypass the page cache.
    unstarted: usize,
    unstarted_direct: usize,
    /// Completions of ops that were performed in `push`.
    done: Vec<Completion>,
    /// Perform buffered writes of files whose file system takes none without waiting.
    writes: WriteThreads,
    /// True if the ring watches the eventfd of the write threads.
    watches_writes: bool,
    /// `IORING_ENTER_NO_IOWAIT` if the kernel has it, else no flag.
    no_iowait: u32,
}

impl fmt::Debug for UringDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UringDriver").finish_non_exhaustive()
    }
}

impl UringDriver {
    /// Makes a ring with `entries` submission and four times as many completion entries, and this table of registered
    /// buffers.
    pub(crate) fn new(entries: u32, table: &FixedTable) -> io::Result<Self> {
        Self::with_ops(entries, table, &OPS)
    }

    /// As [`UringDriver::new`], for commands of drivers too.
    pub(crate) fn with_commands(entries: u32, table: &FixedTable) -> io::Result<Self> {
        let mut ops = OPS.to_vec();
        ops.push(COMMAND_OP);
        Self::with_ops(entries, table, &ops)
    }

    fn with_ops(entries: u32, table: &FixedTable, ops: &[u8]) -> io::Result<Self> {
        let ring = Self::build(entries)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ops.iter().any(|&code| !probe.is_supported(code)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring is too old",
            ));
        }
        // A ring with room for more ops is one of more disks.
        let files = FIXED_FILES_MIN.max(entries / 2);
        let fixed = ring.submitter().register_files_sparse(files).is_ok();
        register_buffers(&ring, table)?;
        restrict(&ring, ops)?;
        let no_iowait = supported_enter_flag(&ring, NO_IOWAIT);
        let fixed_free = if fixed {
            (0..files).rev().collect()
        } else {
            Vec::new()
        };
        Ok(Self {
            ring,
            fixed_free,
            natures: vec![Nature::Cached; files as usize],
            copies: ScratchCopies::default(),
            unstarted: 0,
            unstarted_direct: 0,
            done: Vec::new(),
            writes: WriteThreads::default(),
            watches_writes: false,
            no_iowait,
        })
    }

    fn build(entries: u32) -> io::Result<IoUring> {
        let completions = entries.saturating_mul(4);
        let mut newest = IoUring::builder();
        newest
            .setup_cqsize(completions)
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_r_disabled();
        match newest.build(entries) {
            Ok(ring) => return Ok(ring),
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
            Err(_) => {}
        }
        let mut older = IoUring::builder();
        older
            .setup_cqsize(completions)
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_r_disabled();
        match older.build(entries) {
            Ok(ring) => return Ok(ring),
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
            Err(_) => {}
        }
        let mut oldest = IoUring::builder();
        oldest.setup_cqsize(completions).setup_r_disabled();
        oldest.build(entries)
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
                if let Some(FixedOp { index, .. }) = op.fixed {
                    if let Kind::Write { dsync } = op.kind {
                        return on_file!(|file| opcode::WriteFixed::new(file, slice.ptr(), len, index)
                            .offset(op.offset)
                            .rw_flags(rw_flags(dsync))
                            .build());
                    }
                    return on_file!(|file| opcode::ReadFixed::new(file, slice.ptr(), len, index)
                        .offset(op.offset)
                        .build());
                }
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
            // Performed by `push`; a no-op would be harmless.
            Kind::Truncate => opcode::Nop::new().build(),
            Kind::Watch => on_file!(|file| opcode::PollAdd::new(file, sys::POLL_IN).multi(true).build()),
            Kind::Command { code, data } => {
                on_file!(|file| opcode::UringCmd16::new(file, code)
                    .cmd(data)
                    .addr(Some(op.offset))
                    .build())
            }
        }
    }

    fn push_entry(&mut self, entry: squeue::Entry) -> Result<(), QueueFull> {
        // SAFETY: the memory that `entry` names stays valid until its completion is reaped, by the
        // contract of `Driver::push`; cancel entries name none.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| QueueFull)?;
        self.unstarted += 1;
        Ok(())
    }

    /// Submits what is queued; waits for `wait_for` completions if `flags` ask for events.
    fn start(&mut self, wait_for: u32, flags: u32) -> io::Result<()> {
        let to_submit = u32::try_from(self.ring.submission().len()).unwrap_or(u32::MAX);
        // SAFETY: without an extended argument nothing is passed to the kernel but numbers.
        let entered = unsafe {
            self.ring
                .submitter()
                .enter::<libc::sigset_t>(to_submit, wait_for, flags, None)
        };
        self.unstarted = self.ring.submission().len();
        self.unstarted_direct = self.unstarted_direct.min(self.unstarted);
        entered.map(drop)
    }

    /// Starts a write through the page cache without the ring: at once, or by the file's own thread. Returns false if the
    /// ring must do it.
    ///
    /// # Safety
    ///
    /// As for [`Driver::push`].
    unsafe fn push_buffered_write(
        &mut self,
        nature: Nature,
        file: u32,
        op: &KernelOp,
        user_data: u64,
    ) -> bool {
        if nature == Nature::Cached {
            // SAFETY: the caller's contract is the same and lasts longer.
            let result = unsafe { sys::write_without_waiting(op) };
            let found = if result == -libc::EOPNOTSUPP {
                Nature::WaitingWrites
            } else {
                Nature::CachedWrites
            };
            if let Some(nature) = self.natures.get_mut(file as usize) {
                *nature = found;
            }
            if result >= 0 {
                self.done.push(Completion {
                    user_data,
                    result,
                    more: false,
                });
                return true;
            }
            if found == Nature::CachedWrites {
                return false;
            }
        }
        if !self.writes.serves(file)
            && let Err(error) = self.writes.start(file)
        {
            tracing::debug!(%error, "a thread that writes cannot be started");
            return false;
        }
        if !self.watch_writes() {
            return false;
        }
        // SAFETY: the caller's contract is the same and lasts longer.
        let op = unsafe { DetachedOp::new(op) };
        self.writes.push(file, op, user_data);
        true
    }

    /// Has the ring watch the eventfd of the write threads, if there are any. Returns false if it cannot now.
    fn watch_writes(&mut self) -> bool {
        if let Some(fd) = self.writes.wake_fd()
            && !self.watches_writes
        {
            let watch = opcode::PollAdd::new(Fd(fd), sys::POLL_IN).multi(true).build();
            self.watches_writes = self.push_entry(watch.user_data(WRITES_USER_DATA)).is_ok();
            return self.watches_writes;
        }
        true
    }

    /// Returns true if completions wait in the kernel for an enter that asks for them; never true if the kernel
    /// does not defer any.
    fn has_deferred(&mut self) -> bool {
        let submission = self.ring.submission();
        submission.taskrun() || submission.cq_overflow()
    }
}

/// Registers a ring's table of buffers, which is final: a restricted ring takes no other memory.
fn register_buffers(ring: &IoUring, table: &FixedTable) -> io::Result<()> {
    if table.places.is_empty() {
        return Ok(());
    }
    let places = u32::try_from(table.places.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    ring.submitter().register_buffers_sparse(places)?;
    if table.places.iter().all(IoSlice::is_empty) {
        return Ok(());
    }
    let memory: Vec<libc::iovec> = table
        .places
        .iter()
        .map(|place| libc::iovec {
            iov_base: place.ptr().cast(),
            iov_len: place.len(),
        })
        .collect();
    // SAFETY: the kernel pins the pages for as long as the ring has them, so they are never reused; the maker of the
    // table guarantees that no Rust reference covers the memory (`FixedTable::of_memory`).
    unsafe { ring.submitter().register_buffers_update(0, &memory, None) }
}

/// Returns `flag` if the kernel knows it, else zero: an otherwise empty call fails only for an unknown flag.
fn supported_enter_flag(ring: &IoUring, flag: u32) -> u32 {
    // SAFETY: without an extended argument nothing is passed to the kernel but numbers.
    let entered = unsafe { ring.submitter().enter::<libc::sigset_t>(0, 0, flag, None) };
    if entered.is_ok() { flag } else { 0 }
}

/// Restricts the ring to `ops`, on registered files or others, and enables it (Linux 5.10).
fn restrict(ring: &IoUring, ops: &[u8]) -> io::Result<()> {
    let mut allowed: Vec<Restriction> = ops.iter().copied().map(Restriction::sqe_op).collect();
    allowed.push(Restriction::register_op(REGISTER_FILES_UPDATE));
    allowed.push(Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()));
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()
}

impl Nature {
    fn of(fd: RawFd) -> Self {
        if sys::is_in_memory(fd) {
            Self::InMemory
        } else if sys::is_direct(fd) {
            Self::Direct
        } else {
            Self::Cached
        }
    }
}

/// Returns true if an op on a file on tmpfs is a sync, which is a no-op there, or moves few bytes.
fn is_short(op: &KernelOp) -> bool {
    match op.kind {
        Kind::Read | Kind::Write { .. } => {
            // SAFETY: `slices` points at `slice_count` valid entries (contract of `push`).
            let slices = unsafe { std::slice::from_raw_parts(op.slices, op.slice_count) };
            let bytes = slices.iter().map(IoSlice::len);
            bytes.fold(0, usize::saturating_add) <= IN_MEMORY_BYTES_MAX
        }
        Kind::DataSync => true,
        _ => false,
    }
}

fn rw_flags(dsync: bool) -> i32 {
    if dsync { libc::RWF_DSYNC } else { 0 }
}

// SAFETY: the kernel posts the completion of an op when it has ended. Ops performed in `push` have ended by then, and those
// of a write thread before it reports them. Cancellations and the watch of those threads, which are no ops of the ring,
// are not reported.
unsafe impl Driver for UringDriver {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot> {
        let Some(index) = self.fixed_free.pop() else {
            return Ok(FileSlot { fd, fixed: None });
        };
        match self.ring.submitter().register_files_update(index, &[fd]) {
            Ok(_) => {
                if let Some(nature) = self.natures.get_mut(index as usize) {
                    *nature = Nature::of(fd);
                }
                Ok(FileSlot {
                    fd,
                    fixed: Some(index),
                })
            }
            Err(error) => {
                self.fixed_free.push(index);
                Err(error)
            }
        }
    }

    fn unregister_file(&mut self, file: FileSlot) {
        if let Some(index) = file.fixed {
            if let Some(nature) = self.natures.get_mut(index as usize) {
                *nature = Nature::Cached;
            }
            self.writes.end(index);
            if self.ring.submitter().register_files_update(index, &[-1]).is_ok() {
                self.fixed_free.push(index);
            }
        }
    }

    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull> {
        let nature = op.file.fixed.and_then(|index| self.natures.get(index as usize));
        let nature = nature.copied().unwrap_or(Nature::Cached);
        let at_once = op.kind == Kind::Truncate || op.at_door || nature == Nature::InMemory && is_short(op);
        if at_once {
            // Truncation is rare, and io_uring has it only since Linux 6.9. The others are copies in memory, which
            // io_uring would punt to a kernel thread: tmpfs, memfds and ublk's device do not declare that they
            // never block.
            let result = match op.fixed {
                // SAFETY: a truncation and a sync name no memory; the caller vouches for that of a copy, for longer
                // than it takes.
                None => unsafe { sys::perform(op) },
                // SAFETY: the caller's contract is the same and lasts longer.
                Some(fixed) => unsafe { self.copies.transfer(op, fixed) },
            };
            self.done.push(Completion {
                user_data,
                result,
                more: false,
            });
            return Ok(());
        }
        if matches!(nature, Nature::Cached | Nature::WaitingWrites)
            && op.kind == (Kind::Write { dsync: false })
            && op.fixed.is_none()
            && let Some(file) = op.file.fixed
            // SAFETY: the caller's contract is the same.
            && unsafe { self.push_buffered_write(nature, file, op, user_data) }
        {
            return Ok(());
        }
        self.push_entry(Self::entry(op).user_data(user_data))?;
        if nature == Nature::Direct {
            self.unstarted_direct += 1;
            if self.unstarted_direct >= DIRECT_START_MAX {
                // An op that cannot be started now stays queued, and the next `Driver::enter` reports the error.
                self.start(0, 0).unwrap_or_default();
            }
        }
        Ok(())
    }

    fn cancel(&mut self, user_data: u64) -> Result<(), QueueFull> {
        self.push_entry(
            opcode::AsyncCancel::new(user_data)
                .build()
                .user_data(CANCEL_USER_DATA),
        )
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        self.writes.hand_over();
        // Without the watch nothing would end the sleep.
        let may_sleep = wait != Wait::No && self.done.is_empty() && self.watch_writes();
        let wait = if may_sleep && self.writes.prepare_sleep() {
            wait
        } else {
            Wait::No
        };
        if wait == Wait::No && self.unstarted == 0 && !self.has_deferred() {
            return Ok(());
        }
        // With DEFER_TASKRUN completions are only delivered to an enter that asks for events.
        let mut flags = io_uring::EnterFlags::GETEVENTS.bits();
        if wait == Wait::Event {
            flags |= self.no_iowait;
        }
        let entered = self.start(u32::from(wait != Wait::No), flags);
        if wait != Wait::No {
            self.writes.end_sleep();
        }
        match entered {
            Ok(()) => Ok(()),
            // A signal came, or the completion queue must be reaped first: the caller does that next.
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

    fn sync_now(&mut self, file: FileSlot) -> Option<i32> {
        if self.unstarted > 0 {
            // Answers, commands and watches do not wait for a sync. An error comes again with the next `Driver::enter`.
            self.start(0, 0).unwrap_or_default();
        }
        Some(sys::data_sync(file.fd))
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
        for entry in self.ring.completion() {
            match entry.user_data() {
                CANCEL_USER_DATA => continue,
                WRITES_USER_DATA => {
                    self.watches_writes = io_uring::cqueue::more(entry.flags());
                    continue;
                }
                _ => {}
            }
            out.push(Completion {
                user_data: entry.user_data(),
                result: entry.result(),
                more: io_uring::cqueue::more(entry.flags()),
            });
        }
        out.append(&mut self.done);
        self.writes.take(out);
    }
}

#[cfg(test)]
mod tests;
