//! The few system calls and limits the drivers share.

#![expect(unsafe_code, reason = "system calls on memory named by an op")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use super::driver::{KernelOp, Kind};

/// The most slices one vectored call takes (`UIO_MAXIOV`). A longer op continues like a short one.
pub(crate) const IOV_MAX: u32 = 1024;

/// The most bytes one op is started with; a longer one continues like a short one.
pub(crate) const TRANSFER_BYTES_MAX: u32 = 1 << 30;

/// `POLLIN` in the type of the kernel's poll ops.
pub(crate) const POLL_IN: u32 = libc::POLLIN as u32;

/// Performs a read, write, sync, allocation or truncation now. Returns a byte count, or minus the errno.
///
/// # Safety
///
/// As for [`super::driver::Driver::push`], until this returns.
pub(crate) unsafe fn perform(op: &KernelOp) -> i32 {
    let fd = op.file.fd;
    let count = i32::try_from(op.slice_count)
        .unwrap_or(i32::MAX)
        .min(IOV_MAX.cast_signed());
    let Ok(offset) = libc::off_t::try_from(op.offset) else {
        return -libc::EINVAL;
    };
    let result = match op.kind {
        // The plain calls copy no list.
        Kind::Read if count == 1 => {
            // SAFETY: the list has one entry; the caller vouches for list and memory.
            unsafe { libc::pread(fd, (*op.slices).ptr().cast(), (*op.slices).len(), offset) }
        }
        Kind::Write { dsync: false } if count == 1 => {
            // SAFETY: as for the read.
            unsafe { libc::pwrite(fd, (*op.slices).ptr().cast(), (*op.slices).len(), offset) }
        }
        Kind::Read => {
            // SAFETY: `IoSlice` is laid out as `iovec`; the caller vouches for list and memory.
            unsafe { libc::preadv(fd, op.slices.cast(), count, offset) }
        }
        Kind::Write { dsync } => {
            let flags = if dsync { libc::RWF_DSYNC } else { 0 };
            // SAFETY: as for the read.
            unsafe { libc::pwritev2(fd, op.slices.cast(), count, offset, flags) }
        }
        Kind::DataSync => return data_sync(fd),
        Kind::Allocate { mode } => {
            let Ok(len) = libc::off_t::try_from(op.len) else {
                return -libc::EINVAL;
            };
            // SAFETY: no memory is passed.
            unsafe { libc::fallocate(fd, mode, offset, len) as isize }
        }
        Kind::Truncate => {
            let Ok(len) = libc::off_t::try_from(op.len) else {
                return -libc::EINVAL;
            };
            // SAFETY: no memory is passed.
            unsafe { libc::ftruncate(fd, len) as isize }
        }
        Kind::Watch => return -libc::EINVAL,
        // There is no such system call.
        Kind::Command { .. } => return -libc::EOPNOTSUPP,
    };
    if result < 0 {
        return last_error();
    }
    i32::try_from(result).unwrap_or(i32::MAX)
}

/// Performs an `fdatasync(2)` now. Returns zero, or minus the errno.
pub(crate) fn data_sync(fd: RawFd) -> i32 {
    // SAFETY: no memory is passed.
    if unsafe { libc::fdatasync(fd) } < 0 {
        return last_error();
    }
    0
}

/// Returns minus the errno of the call that has just failed.
fn last_error() -> i32 {
    -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// An op that another thread may perform.
#[derive(Debug)]
pub(crate) struct DetachedOp(KernelOp);

// SAFETY: whoever makes one vouches for its memory until it has been performed, by whatever thread; the op is only passed
// to the kernel.
unsafe impl Send for DetachedOp {}

impl DetachedOp {
    /// Makes a copy of `op` for another thread.
    ///
    /// # Safety
    ///
    /// As for [`super::driver::Driver::push`], until [`DetachedOp::perform`] has returned.
    pub(crate) unsafe fn new(op: &KernelOp) -> Self {
        Self(*op)
    }

    /// Makes an op that names no memory, for model checkers.
    #[cfg(all(test, shuttle))]
    pub(crate) fn truncation(file: super::driver::FileSlot, len: u64) -> Self {
        Self(KernelOp {
            kind: Kind::Truncate,
            file,
            offset: 0,
            len,
            slices: std::ptr::null(),
            slice_count: 0,
            fixed: None,
            at_door: false,
        })
    }

    /// Performs the op. Returns a byte count, or minus the errno.
    pub(crate) fn perform(self) -> i32 {
        // SAFETY: the contract of `DetachedOp::new` is the same.
        unsafe { perform(&self.0) }
    }
}

/// Performs a write if that needs no waiting (`RWF_NOWAIT` in `writev(2)`). Returns a byte count, or minus the errno:
/// `EAGAIN` if it would have to wait, `EOPNOTSUPP` if the file takes no write in this way.
///
/// # Safety
///
/// As for [`super::driver::Driver::push`], until this returns.
pub(crate) unsafe fn write_without_waiting(op: &KernelOp) -> i32 {
    let count = i32::try_from(op.slice_count)
        .unwrap_or(i32::MAX)
        .min(IOV_MAX.cast_signed());
    let Ok(offset) = libc::off_t::try_from(op.offset) else {
        return -libc::EINVAL;
    };
    // SAFETY: `IoSlice` is laid out as `iovec`; the caller vouches for list and memory.
    let result = unsafe { libc::pwritev2(op.file.fd, op.slices.cast(), count, offset, libc::RWF_NOWAIT) };
    if result < 0 {
        return last_error();
    }
    i32::try_from(result).unwrap_or(i32::MAX)
}

/// Returns the length of a file, or the size of a block device, in bytes.
pub(crate) fn file_len(fd: RawFd) -> io::Result<u64> {
    // SAFETY: no memory is passed. Positional I/O only: nothing depends on the offset this moves.
    let end = unsafe { libc::lseek(fd, 0, libc::SEEK_END) };
    u64::try_from(end).map_err(|_| io::Error::last_os_error())
}

/// Returns true if a file was opened with `O_DIRECT`; false if the kernel does not tell.
pub(crate) fn is_direct(fd: RawFd) -> bool {
    // SAFETY: no memory is passed.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_DIRECT != 0
}

/// Returns true for a file on tmpfs (or a memfd) that does not promise the kernel that I/O on it never blocks
/// (`RWF_NOWAIT` in `readv(2)`); false if the kernel does not tell. Reading it may still wait for swap.
pub(crate) fn is_in_memory(fd: RawFd) -> bool {
    // SAFETY: an all-zero `statfs` is a valid value of that plain C struct.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` lives across the call.
    if unsafe { libc::fstatfs(fd, &raw mut stat) } != 0 || stat.f_type != libc::TMPFS_MAGIC {
        return false;
    }
    let mut byte = 0_u8;
    let slice = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // SAFETY: the one stretch is `byte`, which lives across the call.
    let read = unsafe { libc::preadv2(fd, &raw const slice, 1, 0, libc::RWF_NOWAIT) };
    read < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP)
}

/// Returns the first byte offset at or after `offset` where the file may hold data; `None` if the rest is a hole.
pub(crate) fn next_data(fd: RawFd, offset: u64) -> Option<u64> {
    // A file that cannot tell counts as all data.
    seek(fd, offset, libc::SEEK_DATA).unwrap_or(Some(offset))
}

/// Returns the first byte offset at or after `offset` where the file has a hole; `None` if the rest of it is data.
pub(crate) fn next_hole(fd: RawFd, offset: u64) -> Option<u64> {
    let found = seek(fd, offset, libc::SEEK_HOLE).ok().flatten()?;
    // Every file has a hole at its end.
    (found < file_len(fd).ok()?).then_some(found)
}

/// Looks for data or a hole from `offset` on. Returns `Ok(None)` if there is none, an error if the file cannot tell.
fn seek(fd: RawFd, offset: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let start = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: no memory is passed. Positional I/O only: nothing depends on the offset this moves.
    let found = unsafe { libc::lseek(fd, start, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

/// Returns for each of `fds` if it is readable; with `wait`, waits until one is. An interrupted wait finds none.
pub(crate) fn poll_readable(fds: &[RawFd], wait: bool) -> io::Result<Vec<bool>> {
    #[cfg(any(loom, shuttle))]
    return crate::sync::park::until(|| match poll_now(fds, false) {
        Ok(readable) if wait && !readable.contains(&true) => None,
        result => Some(result),
    });
    #[cfg(not(any(loom, shuttle)))]
    poll_now(fds, wait)
}

fn poll_now(fds: &[RawFd], wait: bool) -> io::Result<Vec<bool>> {
    let mut list: Vec<libc::pollfd> = fds
        .iter()
        .map(|&fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let count = libc::nfds_t::try_from(list.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `list` has `count` entries and lives across the call.
    let ready = unsafe { libc::poll(list.as_mut_ptr(), count, if wait { -1 } else { 0 }) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        return Ok(vec![false; fds.len()]);
    }
    Ok(list.iter().map(|entry| entry.revents != 0).collect())
}

/// Reads the count out of an eventfd that `poll` reported as readable.
pub(crate) fn take_event(fd: RawFd) {
    // The signal happened before the code that follows; the model checker learns that only from its own lock.
    #[cfg(any(loom, shuttle))]
    crate::sync::park::until(|| Some(take_count(fd)));
    #[cfg(not(any(loom, shuttle)))]
    take_count(fd);
}

#[inline]
fn take_count(fd: RawFd) {
    let mut count = [0u8; 8];
    // SAFETY: the buffer has the eight bytes an eventfd read needs. A failure leaves the event set,
    // and it is reported again.
    let _read = unsafe { libc::read(fd, count.as_mut_ptr().cast(), count.len()) };
}

/// Makes a timerfd, which becomes readable at its expiry.
pub(crate) fn timer() -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets a timerfd to expire once, `left` from now; not zero.
pub(crate) fn set_timer(fd: RawFd, left: Duration) -> io::Result<()> {
    let seconds = libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX);
    let zero = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let value = libc::itimerspec {
        it_interval: zero,
        it_value: libc::timespec {
            tv_sec: seconds,
            tv_nsec: left.subsec_nanos().into(),
        },
    };
    // SAFETY: the new value lives across the call and is only read; a null old one is allowed.
    if unsafe { libc::timerfd_settime(fd, 0, &raw const value, std::ptr::null_mut()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
