//! Interface between a ring and its driver.
//!
//! The three rings of the design differ only behind this trait: io_uring, plain system calls, and the
//! simulated world (the crate `ringdisk-simulator`). The ring handles short results, retries, ownership and waking,
//! the same way for all. A driver only starts ops and reports their results.
//!
//! It is public for the simulator alone, hidden from the documentation and free to change
//! ([decision](https://github.com/ringdisk/ringdisk/blob/main/docs/decisions/simulator.md)).
//!
//! Invariant: memory that an op names belongs to the driver from [`Driver::push`] until the op's last completion.

#![expect(unsafe_code, reason = "an op names memory by its address")]

use std::fmt;
use std::io;
use std::os::fd::RawFd;

use crate::buffer::IoSlice;
pub use crate::handle::{FileSlot, Kind};

/// One op for a driver to start.
#[derive(Clone, Copy, Debug)]
pub struct KernelOp {
    /// The operation.
    pub kind: Kind,
    /// The file, registered with the driver.
    pub file: FileSlot,
    /// Byte offset in the file; for a [`Kind::Command`], its address field.
    pub offset: u64,
    /// Length in bytes, for [`Kind::Allocate`] and [`Kind::Truncate`].
    pub len: u64,
    /// The memory of a read or write: `slice_count` stretches.
    pub slices: *const IoSlice,
    /// The number of stretches.
    pub slice_count: usize,
    /// If set, there is one stretch, and it is not this process's memory but a registered buffer's.
    pub fixed: Option<FixedOp>,
    /// True if the file is a door, and the op only a copy in memory.
    pub at_door: bool,
}

/// The registered buffer that a read or write moves bytes to or from.
#[derive(Clone, Copy, Debug)]
pub struct FixedOp {
    /// The slot in the ring's buffer table; the op's stretch begins at the kernel's name for its first byte.
    pub index: u16,
    /// The file in which a driver without such a table finds the same bytes.
    pub door: FileSlot,
    /// The position of the first byte at the door.
    pub door_offset: u64,
}

/// Completion of an op, or one report of a watch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Completion {
    /// The value passed to [`Driver::push`].
    pub user_data: u64,
    /// A byte count, or minus the errno.
    pub result: i32,
    /// More completions follow for this op (watches only).
    pub more: bool,
}

/// The submission queue is full: enter, and push again.
#[derive(Clone, Copy, Debug)]
pub struct QueueFull;

/// The kind of completion that a [`Driver::enter`] waits for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Wait {
    /// Nothing: it returns at once.
    No,
    /// A completion, while an image's I/O is in flight. The kernel may count the time as I/O wait.
    Io,
    /// A completion of a watch or a command, perhaps for ever. An idle server is no slow disk: the time must not
    /// count as I/O wait, which enters load averages, `/proc/pressure/io` and `iowait` of `/proc/stat`.
    Event,
}

/// Driver of a ring: starts ops and reports completions.
///
/// # Safety
///
/// The ring frees an op's memory, or lends it to somebody else, as soon as its completion is reaped. An implementation
/// must report a completion (one without [`Completion::more`]) once for each op that was pushed, for no other `user_data`,
/// and only when neither it nor the kernel will touch the op's memory any more.
pub unsafe trait Driver: fmt::Debug {
    /// Returns the driver's name for logs.
    fn name(&self) -> &'static str;

    /// Registers a descriptor. The caller must keep it open until [`Driver::unregister_file`].
    ///
    /// # Errors
    ///
    /// If the kernel refuses to register it.
    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot>;

    /// Unregisters a descriptor that no op uses any more.
    fn unregister_file(&mut self, file: FileSlot);

    /// Queues an op; it starts at the next [`Driver::enter`] or earlier.
    ///
    /// # Errors
    ///
    /// [`QueueFull`]; the op was not queued then.
    ///
    /// # Safety
    ///
    /// - The list at `op.slices` must stay valid until the op's completion has been reaped, and so must
    ///   the memory its entries name, unless `op.fixed`; for reads that memory must be writable.
    /// - `op.file` must be registered until then.
    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull>;

    /// Requests cancellation of the op `user_data`. Its completion still comes.
    ///
    /// # Errors
    ///
    /// [`QueueFull`]; the op is not cancelled then.
    fn cancel(&mut self, user_data: u64) -> Result<(), QueueFull>;

    /// Starts the pushed ops. Unless `wait` is [`Wait::No`], returns only when a completion is there or a signal came.
    /// With [`Wait::No`] it must cost nothing if no op was pushed and none has ended: workers poll with it.
    ///
    /// # Errors
    ///
    /// If the kernel fails the call as a whole.
    fn enter(&mut self, wait: Wait) -> io::Result<()>;

    /// Performs an `fdatasync(2)` before it returns, with the pushed ops under way. Returns zero or minus the errno, or
    /// `None` if a sync of this driver gains nothing by blocking.
    fn sync_now(&mut self, _file: FileSlot) -> Option<i32> {
        None
    }

    /// Returns the length of a file, or the size of a block device, in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel does not report it.
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
