//! The alignment that a file's I/O must have.
//!
//! Offset, length and address alignment of direct I/O are separate conditions, found with `statx(2)`
//! (`STATX_DIOALIGN`). I/O through the page cache has none.

#![expect(unsafe_code, reason = "statx")]

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::buffer::BUFFER_ALIGN;

/// Alignment that I/O on a file requires, in bytes (powers of two).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Alignment {
    /// Addresses of memory.
    pub memory: usize,
    /// Offsets and lengths, of the whole op and of each stretch of memory.
    pub offset: u64,
}

impl Alignment {
    /// No condition: I/O through the page cache.
    pub const NONE: Self = Self { memory: 1, offset: 1 };
}

/// Returns the alignment that direct I/O on `file` requires; 4096 if the kernel does not report one.
pub(super) fn direct_alignment(file: &File) -> Alignment {
    let careful = Alignment {
        memory: BUFFER_ALIGN,
        offset: BUFFER_ALIGN as u64,
    };
    // SAFETY: an all-zero `statx` is a valid value of that plain C struct.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string and `stat` lives across the call.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    if result != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return careful;
    }
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    if !memory.is_power_of_two() || !offset.is_power_of_two() || memory as usize > BUFFER_ALIGN {
        return careful;
    }
    Alignment {
        memory: memory as usize,
        offset: u64::from(offset),
    }
}
