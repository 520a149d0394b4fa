//! Files in memory, mapped, so that bytes of a registered buffer are copied once.
//!
//! io_uring gives every op on such a file to a thread of the kernel, and a hand-over costs more than copying a few pages.
//! Without it the bytes would be copied twice, to memory of ours and from there to the buffer's door. The door takes and gives
//! them at the file's own pages instead.
//!
//! What must stay true: nothing here is ever read or written by this process, only named to the kernel. A page that cannot
//! be had, because the file was cut short or its file system is full, is then an error of the call (`EFAULT`) and no signal, and
//! the op goes the long way, which tells why. And nobody makes an image shorter and then writes behind its new end while it is
//! served: in the last page such a write would succeed here, and be no part of the file.

#![expect(unsafe_code, reason = "maps files and names the mapping to system calls")]

use std::os::fd::RawFd;
use std::ptr::NonNull;

use super::driver::{FixedOp, KernelOp, Kind};

/// Of so many ops that lie outside the mapping, one looks whether there is more to map. Each such look costs a system call, and a
/// new mapping every page's place in the old one: an image that grows with every other request must not pay that each time.
const MISSES_PER_LOOK: u32 = 256;

/// A file in memory and, unless it is sparse, its mapping.
#[derive(Debug)]
pub(super) struct MappedFile {
    fd: RawFd,
    map: Option<(NonNull<u8>, usize)>,
    /// Ops that did not lie in the mapping.
    misses: u32,
}

impl MappedFile {
    /// Maps the file of this descriptor, which stays open as long as this lives.
    pub(super) fn new(fd: RawFd) -> Self {
        let mut file = Self {
            fd,
            map: None,
            misses: 0,
        };
        file.map_anew();
        file
    }

    /// Maps the file as long as it is now. A hole that is looked at through a mapping becomes memory, so a file that is mostly
    /// holes is not mapped.
    fn map_anew(&mut self) {
        self.unmap();
        // What the sandbox leaves; `fstat` is another system call with each C library.
        // SAFETY: an all-zero `statx` is a valid value of that plain C struct.
        let mut stat: libc::statx = unsafe { std::mem::zeroed() };
        let wanted = libc::STATX_SIZE | libc::STATX_BLOCKS;
        let path = c"".as_ptr();
        // SAFETY: the path is an empty C string and `stat` lives across the call.
        let result = unsafe { libc::statx(self.fd, path, libc::AT_EMPTY_PATH, wanted, &raw mut stat) };
        let Ok(bytes) = usize::try_from(stat.stx_size) else {
            return;
        };
        if result != 0 || stat.stx_mask & wanted != wanted {
            return;
        }
        if bytes == 0 || stat.stx_blocks.saturating_mul(2 * 512) < stat.stx_size {
            return;
        }
        // A file that was opened, or sealed, for reading is mapped for that.
        for protection in [libc::PROT_READ | libc::PROT_WRITE, libc::PROT_READ] {
            // SAFETY: a new mapping at an address of the kernel's choice, of an open file.
            let map = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    bytes,
                    protection,
                    libc::MAP_SHARED,
                    self.fd,
                    0,
                )
            };
            if map != libc::MAP_FAILED {
                self.map = NonNull::new(map.cast()).map(|map| (map, bytes));
                return;
            }
        }
    }

    fn unmap(&mut self) {
        if let Some((map, bytes)) = self.map.take() {
            // SAFETY: the mapping was made with this length, and no call that names it is under way.
            let unmapped = unsafe { libc::munmap(map.as_ptr().cast(), bytes) };
            debug_assert_eq!(unmapped, 0);
        }
    }

    /// Whether ops may be carried out here.
    pub(super) fn is_mapped(&self) -> bool {
        self.map.is_some()
    }

    /// Reads or writes at once: how many bytes, at least one. `None` if it has to go another way, and then nothing happened.
    pub(super) fn carry_out(&mut self, op: &KernelOp, fixed: FixedOp, len: usize) -> Option<i32> {
        let start = usize::try_from(op.offset).ok()?;
        let end = start.checked_add(len).filter(|_| len > 0)?;
        if self.map.is_none_or(|(_, bytes)| end > bytes) {
            // It may have grown.
            let look = self.misses.is_multiple_of(MISSES_PER_LOOK);
            self.misses = self.misses.wrapping_add(1);
            if look {
                self.map_anew();
            }
        }
        let (map, _) = self.map.filter(|&(_, bytes)| end <= bytes)?;
        let place = map.as_ptr().wrapping_add(start);
        let at_door = libc::off_t::try_from(fixed.door_offset).ok()?;
        let moved = match op.kind {
            // SAFETY: the range lies in the mapping, which no Rust reference covers. Its pages are the file's, and others may
            // write them meanwhile, as they may the bytes of any file that is read.
            Kind::Read => unsafe { libc::pwrite(fixed.door.fd, place.cast(), len, at_door) },
            // SAFETY: as for the read.
            Kind::Write { .. } => unsafe { libc::pread(fixed.door.fd, place.cast(), len, at_door) },
            _ => return None,
        };
        i32::try_from(moved).ok().filter(|&moved| moved > 0)
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        self.unmap();
    }
}
