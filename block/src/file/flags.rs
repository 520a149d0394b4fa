//! Flags of descriptors.

#![expect(unsafe_code, reason = "fcntl")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// Calls `fcntl(2)` for descriptor flags; `argument` is for commands that set some.
pub(super) fn fcntl_flags(fd: RawFd, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    assert!([libc::F_GETFD, libc::F_GETFL, libc::F_SETFL].contains(&command));
    // SAFETY: these commands are passed no memory, and close and make no descriptor.
    let result = unsafe { libc::fcntl(fd, command, argument) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Makes I/O on a file block again (`O_NONBLOCK`), and reads leave its access time alone (`O_NOATIME`) if it is ours.
pub(super) fn set_for_io(file: &File) -> io::Result<()> {
    let fd = file.as_raw_fd();
    let flags = fcntl_flags(fd, libc::F_GETFL, 0)? & !libc::O_NONBLOCK;
    // The kernel looks at the access time at each read, which costs as much as finding the page. Only the owner of a
    // file, or root, may do without.
    if fcntl_flags(fd, libc::F_SETFL, flags | libc::O_NOATIME).is_err() {
        fcntl_flags(fd, libc::F_SETFL, flags)?;
    }
    Ok(())
}
