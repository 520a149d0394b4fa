//! Memory of our own for I/O, aligned for direct I/O.
//!
//! The standard allocator's collections align to their elements. Direct I/O needs addresses, offsets and lengths that
//! are multiples of a device's block, so this allocates by hand.
//!
//! Invariant: all of the capacity is initialised, because it is zeroed when it is allocated.

#![expect(unsafe_code, reason = "allocates and maps memory by hand")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::io;
use std::ptr::NonNull;

use super::io_slice::IoSlice;

/// The alignment of every [`AlignedBuf`], in bytes: enough for direct I/O on any block device.
pub const BUFFER_ALIGN: usize = 4096;

/// Zeroed memory of our own, aligned for direct I/O.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
    capacity: usize,
    /// True if the memory is a mapping of its own, and not the allocator's.
    mapped: bool,
}

// SAFETY: `AlignedBuf` owns its allocation alone, like a `Vec<u8>`; nothing in it is tied to a thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access is only through `&[u8]`; there is no interior mutability.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Allocates `len` zero bytes.
    ///
    /// # Panics
    ///
    /// If `len` is larger than `isize::MAX` minus the alignment.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let capacity = len.next_multiple_of(BUFFER_ALIGN).max(BUFFER_ALIGN);
        let layout = Self::layout(capacity);
        // SAFETY: `layout` has a non-zero size: `capacity` is at least BUFFER_ALIGN.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else {
            handle_alloc_error(layout)
        };
        Self {
            ptr,
            len,
            capacity,
            mapped: false,
        }
    }

    /// Maps `len` zero bytes (`mmap`): pages that are never touched take no memory. [`AlignedBuf::zeroed`] may write
    /// every byte, because the allocator may reuse memory.
    ///
    /// # Errors
    ///
    /// If the mapping fails for lack of memory.
    ///
    /// # Panics
    ///
    /// If `len` is larger than `isize::MAX` minus the alignment.
    pub fn untouched(len: usize) -> io::Result<Self> {
        let capacity = Self::layout(len.next_multiple_of(BUFFER_ALIGN).max(BUFFER_ALIGN)).size();
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping of no file at an address of the kernel's choice.
        let ptr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                capacity,
                access,
                kind | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if ptr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Otherwise one byte could cost 2 MiB. A kernel without huge pages refuses, which has the same effect.
        // SAFETY: the range is the new mapping, and the advice changes no byte of it.
        unsafe { libc::madvise(ptr, capacity, libc::MADV_NOHUGEPAGE) };
        let ptr = NonNull::new(ptr.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            ptr,
            len,
            capacity,
            mapped: true,
        })
    }

    /// Allocates a copy of `bytes`.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut buf = Self::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, BUFFER_ALIGN)
            .expect("a buffer is far smaller than the address space")
    }

    /// Shortens the buffer to `len` bytes, or lengthens it up to its capacity (a multiple of
    /// [`BUFFER_ALIGN`]). Bytes that reappear keep their last contents.
    ///
    /// # Panics
    ///
    /// If `len` is larger than the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(
            len <= self.capacity,
            "a buffer of {} bytes cannot hold {len}",
            self.capacity
        );
        self.len = len;
    }

    /// Returns the number of bytes allocated.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the bytes as a stretch for an op. Its pointer is the allocation's own, good for all of it.
    #[inline]
    pub(super) fn io_slice(&self) -> IoSlice {
        IoSlice::new(self.ptr.as_ptr(), self.len)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.mapped {
            // SAFETY: `ptr` came from `mmap` with this very length, and is unmapped only here.
            let unmapped = unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.capacity) };
            debug_assert_eq!(unmapped, 0);
            return;
        }
        // SAFETY: `ptr` came from `alloc_zeroed` with this very layout, and is freed only here.
        unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.capacity)) }
    }
}

impl std::ops::Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len <= capacity` bytes from `ptr` are allocated and initialised (zeroed at first),
        // and borrowed through `&self`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untouched_buffer_is_resident_only_where_written() {
        // Room for several huge pages, none of which is to come.
        const PAGES: usize = 2048;
        let mut buffer = AlignedBuf::untouched(PAGES * BUFFER_ALIGN - 1).expect("room");
        assert_eq!(buffer.len(), PAGES * BUFFER_ALIGN - 1);
        assert_eq!(buffer.as_ptr().addr() % BUFFER_ALIGN, 0);
        let there = |buffer: &AlignedBuf| {
            let mut pages = [0u8; PAGES];
            let (start, bytes) = (buffer.as_ptr().cast_mut().cast(), buffer.capacity());
            // SAFETY: the range is the buffer's, and there is a byte for each of its pages, which have 4 KiB at least.
            let asked = unsafe { libc::mincore(start, bytes, pages.as_mut_ptr()) };
            assert_eq!(asked, 0, "{}", io::Error::last_os_error());
            pages.iter().filter(|&&page| page & 1 == 1).count()
        };
        assert_eq!(there(&buffer), 0);
        // In the middle, where a huge page would fit.
        buffer[PAGES / 2 * BUFFER_ALIGN + 5] = 7;
        // A page may be larger than 4 KiB.
        assert!((1..=16).contains(&there(&buffer)));
        assert_eq!(buffer.iter().map(|&byte| u32::from(byte)).sum::<u32>(), 7);
        buffer.set_len(0);
        drop(buffer);
        assert!(AlignedBuf::untouched(1 << 60).is_err(), "there is no such room");
    }
}
