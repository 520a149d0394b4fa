//! Eventfds: counts that a thread, a guest or the kernel adds to, and that wake whoever watches them.

#![expect(unsafe_code, reason = "makes an eventfd, and writes to it")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Makes a new eventfd, blocking, close-on-exec.
///
/// # Errors
///
/// If the process has no descriptor left.
pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one to an eventfd.
pub(crate) fn signal_event(fd: RawFd) {
    #[cfg(any(loom, shuttle))]
    crate::sync::park::signal(|| add_one(fd));
    #[cfg(not(any(loom, shuttle)))]
    add_one(fd);
}

#[inline]
fn add_one(fd: RawFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the buffer has the eight bytes an eventfd write needs. It fails only when the count is
    // at its ceiling, and then the reader is being woken anyway.
    let _written = unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
}
