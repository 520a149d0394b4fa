//! Memory that the client shares with a server: an anonymous file, mapped here and passed on.
//!
//! The mapping lives as long as this object; the server's ends when it unmaps it or dies. Bytes in it
//! may change at any time, so nothing here hands out references to them.
#![expect(unsafe_code, reason = "maps memory that another process writes")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

/// A mapped memory file.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    file: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the object is an address and a length; it never dereferences the one or changes the other.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; whoever reads or writes the bytes does so through raw pointers and argues for it.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `len` zeroed bytes, present from the start so that no page fault lands in a measurement.
    ///
    /// # Errors
    ///
    /// Those of `memfd_create`, `ftruncate` and `mmap`.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        // SAFETY: the name is a NUL-terminated literal; the call touches nothing else.
        let fd = unsafe { libc::memfd_create(c"bench-data".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just created and nobody else owns it.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: changes the length of a file we own; no mapping exists yet.
        if unsafe { libc::ftruncate(fd, len as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice; `fd` is open and `len` long.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mmap answered address 0"))?;
        Ok(Self { file, base, len })
    }

    /// The first byte.
    #[must_use]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the number of bytes mapped.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The file behind the memory, to be sent to the server.
    #[must_use]
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are those of the mapping made in `new`, unmapped only here.
        let _failed_is_a_leak = unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
