//! Interface between a ring and its driver.
//!
//! The three rings of the design differ only behind this trait: io_uring, plain system calls, and the
//! [simulated world](crate::sim). The ring handles short results, retries, ownership and waking, the same
//! way for all. A driver only starts ops and reports their results.

#![expect(unsafe_code, reason = "an op names memory by its address")]

use std::fmt;
use std::io;
use std::os::fd::RawFd;

use crate::buffer::IoSlice;
pub(crate) use crate::handle::{FileSlot, Kind};

/// One op for a driver to start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelOp {
    pub(crate) kind: Kind,
    pub(crate) file: FileSlot,
    /// Byte offset in the file; for a [`Kind::Command`], its address field.
    pub(crate) offset: u64,
    /// Length in bytes, for [`Kind::Allocate`] and [`Kind::Truncate`].
    pub(crate) len: u64,
    /// The memory of a read or write: `slice_count` stretches at `slices`.
    pub(crate) slices: *const IoSlice,
    pub(crate) slice_count: usize,
    /// If set, there is one stretch, and it is not this process's memory but a registered buffer's.
    pub(crate) fixed: Option<FixedOp>,
    /// True if the file is a door, and the op only a copy in memory.
    pub(crate) at_door: bool,
}

/// The registered buffer that a read or write moves bytes to or from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedOp {
    /// The slot in the ring's buffer table; the op's stretch begins at the kernel's name for its first byte.
    pub(crate) index: u16,
    /// The file in which a driver without such a table finds the same bytes.
    pub(crate) door: FileSlot,
    /// The position of the first byte at the door.
    pub(crate) door_offset: u64,
}

/// Completion of an op, or one report of a watch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Completion {
    /// The value passed to [`Driver::push`].
    pub(crate) user_data: u64,
    /// A byte count, or minus the errno.
    pub(crate) result: i32,
    /// More completions follow for this op (watches only).
    pub(crate) more: bool,
}

/// The submission queue is full: enter, and push again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueFull;

/// The kind of completion that a [`Driver::enter`] waits for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Wait {
    /// Nothing: it returns at once.
    No,
    /// A completion, while an image's I/O is in flight. The kernel may count the time as I/O wait.
    Io,
    /// A completion of a watch or a command, perhaps for ever. An idle server is no slow disk: the time must not
    /// count as I/O wait, which enters load averages, `/proc/pressure/io` and `iowait` of `/proc/stat`.
    Event,
}

/// Driver of a ring: starts ops and reports completions.
pub(crate) trait Driver: fmt::Debug {
    /// Returns the driver's name for logs.
    fn name(&self) -> &'static str;

    /// Registers a descriptor. The caller must keep it open until [`Driver::unregister_file`].
    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot>;

    /// Unregisters a descriptor that no op uses any more.
    fn unregister_file(&mut self, file: FileSlot);

    /// Queues an op; it starts at the next [`Driver::enter`] or earlier.
    ///
    /// # Safety
    ///
    /// - The list at `op.slices` must stay valid until the op's completion has been reaped, and so must
    ///   the memory its entries name, unless `op.fixed`; for reads that memory must be writable.
    /// - `op.file` must be registered until then.
    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull>;

    /// Requests cancellation of the op `user_data`. Its completion still comes.
    fn cancel(&mut self, user_data: u64) -> Result<(), QueueFull>;

    /// Starts the pushed ops. Unless `wait` is [`Wait::No`], returns only when a completion is there or a signal came.
    /// With [`Wait::No`] it must cost nothing if no op was pushed and none has ended: workers poll with it.
    fn enter(&mut self, wait: Wait) -> io::Result<()>;

    /// Returns the length of a file, or the size of a block device, in bytes.
    fn file_len(&self, file: FileSlot) -> io::Result<u64>;

    /// Returns the first byte offset at or after `offset` where a file may hold data; bytes before it read as zeros.
    /// Returns `None` if all the rest does. A driver that cannot tell returns `offset`.
    fn next_data(&self, _file: FileSlot, offset: u64) -> Option<u64> {
        Some(offset)
    }

    /// Returns the first byte offset at or after `offset` where a file has a hole, which reads as zeros. Returns `None` if
    /// there is none before the end of the file, or if the driver cannot tell.
    fn next_hole(&self, _file: FileSlot, _offset: u64) -> Option<u64> {
        None
    }

    /// Appends all available completions to `out`.
    fn reap(&mut self, out: &mut Vec<Completion>);
}
