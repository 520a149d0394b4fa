//! What a ring asks of whatever carries out its ops.
//!
//! The three rings of the design differ only behind this trait: io_uring, plain system calls, and the
//! [simulated world](crate::sim). Short results, retries, ownership and waking are the ring's business and
//! the same for all; a driver only starts ops and tells how they ended.

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
    /// Byte offset in the file; of a [`Kind::Command`], what it has for an address.
    pub(crate) offset: u64,
    /// Length in bytes, for [`Kind::Allocate`] and [`Kind::Truncate`].
    pub(crate) len: u64,
    /// The memory of a read or write: `slice_count` stretches at `slices`.
    pub(crate) slices: *const IoSlice,
    pub(crate) slice_count: usize,
    /// If there is this, there is one stretch, and it is none of this process's memory but of a registered buffer.
    pub(crate) fixed: Option<FixedOp>,
    /// The file is a door, and the op no more than a copy in memory.
    pub(crate) at_door: bool,
}

/// What a read or write moves bytes of a file to or from, where that is a registered buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedOp {
    /// The place in the ring's table; the op's stretch begins at what the kernel calls its first byte.
    pub(crate) index: u16,
    /// Where a driver that has no such table finds the same bytes.
    pub(crate) door: FileSlot,
    /// The position of the first byte there.
    pub(crate) door_offset: u64,
}

/// How an op, or one report of a watch, ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Completion {
    /// What was given to [`Driver::push`].
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
    /// count as I/O wait, in which load averages, `/proc/pressure/io` and `iowait` of `/proc/stat` believe.
    Event,
}

/// Something that carries out ops.
pub(crate) trait Driver: fmt::Debug {
    /// A name for logs.
    fn name(&self) -> &'static str;

    /// Makes a descriptor known. The caller keeps it open until [`Driver::unregister_file`].
    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot>;

    /// Forgets a descriptor no op uses any more.
    fn unregister_file(&mut self, file: FileSlot);

    /// Queues an op; it starts at the next [`Driver::enter`] or earlier.
    ///
    /// # Safety
    ///
    /// - The list at `op.slices` must stay valid until the op's completion has been reaped, and so must
    ///   the memory its entries name, unless `op.fixed`; for reads that memory must be writable.
    /// - `op.file` must be registered until then.
    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull>;

    /// Asks for the op `user_data` to be cancelled. Its completion still comes.
    fn cancel(&mut self, user_data: u64) -> Result<(), QueueFull>;

    /// Starts what was pushed; unless `wait` is [`Wait::No`], returns only when a completion is there or a signal came.
    /// With [`Wait::No`] it costs nothing where nothing was pushed and nothing has ended: workers poll with it.
    fn enter(&mut self, wait: Wait) -> io::Result<()>;

    /// The length of a file, or the size of a block device, in bytes.
    fn file_len(&self, file: FileSlot) -> io::Result<u64>;

    /// The first place at or behind `offset` where a file may hold data; what is before it reads as zeros. `None`
    /// if all the rest does. A driver that cannot tell says `offset`.
    fn next_data(&self, _file: FileSlot, offset: u64) -> Option<u64> {
        Some(offset)
    }

    /// Moves all completions that are there to the end of `out`.
    fn reap(&mut self, out: &mut Vec<Completion>);
}
