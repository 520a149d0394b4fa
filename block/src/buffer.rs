//! Memory of an I/O, owned until the I/O has ended.
//!
//! A [`Buffer`] is memory of our own ([`AlignedBuf`]), slices of guest memory together with a hold on their mapping,
//! or a [registered](Registration) buffer, whose bytes only the kernel reaches. It never exposes a reference to
//! guest memory: a guest may write it at any time. Its bytes are only copied, through raw pointers, by way of a
//! [`Memory`], which a registered buffer does not have.
//!
//! Invariant: as long as a `Buffer` (or an op that shares it) lives, every address it names is mapped and is not
//! freed, and every registered buffer that it names stays leased to it.

#![expect(
    unsafe_code,
    reason = "guest memory is reached through raw pointers, and aligned memory is allocated by hand"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;

use smallvec::SmallVec;

mod registered;

pub(crate) use registered::{FixedRange, Registered};
pub use registered::{Registration, RegistrationError};

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

/// One stretch of memory: an address and a length in bytes.
///
/// Laid out as the kernel's `struct iovec`, so that a list of them can be handed to it.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct IoSlice(libc::iovec);

impl IoSlice {
    pub(crate) fn new(ptr: *mut u8, len: usize) -> Self {
        Self(libc::iovec {
            iov_base: ptr.cast(),
            iov_len: len,
        })
    }

    /// Returns the length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Returns true if its length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }

    #[inline]
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Undoes [`IoSlice::skip`] of `bytes`.
    pub(crate) fn unskip(&self, bytes: usize) -> Self {
        Self::new(self.ptr().wrapping_sub(bytes), self.len() + bytes)
    }

    /// Returns the rest after the first `bytes`.
    pub(crate) fn skip(&self, bytes: usize) -> Self {
        Self::new(self.ptr().wrapping_add(bytes), self.len().saturating_sub(bytes))
    }
}

impl fmt::Debug for IoSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}+{}", self.0.iov_base, self.0.iov_len)
    }
}

/// The list of stretches an op reads into or writes from.
pub(crate) type IoSlices = SmallVec<[IoSlice; 4]>;

/// Keeps a guest's memory mapped. Cloned per buffer, so its count is not atomic: make one per worker and
/// memory map.
pub type MemoryHold = Rc<dyn Any>;

#[derive(Default)]
enum Repr {
    #[default]
    Empty,
    Owned(AlignedBuf),
    Guest {
        slices: SmallVec<[IoSlice; 2]>,
        len: usize,
        _hold: MemoryHold,
    },
    Registered(Registered),
}

/// A registered buffer must not make the others larger.
const _: () = assert!(size_of::<Registered>() <= size_of::<(SmallVec<[IoSlice; 2]>, usize, MemoryHold)>());

/// The memory of one request.
#[derive(Default)]
pub struct Buffer {
    repr: Repr,
}

impl Buffer {
    /// Starts a buffer over guest memory that `hold` keeps mapped; add memory with
    /// [`GuestBufferBuilder::push`].
    #[must_use]
    pub fn guest(hold: MemoryHold) -> GuestBufferBuilder {
        GuestBufferBuilder {
            slices: SmallVec::new(),
            len: 0,
            hold,
        }
    }

    /// Makes a buffer over `len` bytes of `whole` from `offset` on, and keeps `whole` alive.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    #[must_use]
    pub fn part(whole: &Rc<Self>, offset: usize, len: usize) -> Self {
        whole.check_range(offset, len);
        let hold = Rc::clone(whole) as MemoryHold;
        let repr = match whole.place() {
            Place::Memory(memory) => {
                let mut slices = SmallVec::new();
                memory.for_each(offset, len, |slice| slices.push(slice));
                Repr::Guest {
                    slices,
                    len,
                    _hold: hold,
                }
            }
            Place::Registered(registered) => Repr::Registered(registered.part(offset, len, hold)),
        };
        Self { repr }
    }

    /// Makes a buffer whose bytes only the kernel reaches, by its slot in a ring's buffer table and through a
    /// file.
    ///
    /// # Errors
    ///
    /// [`RegistrationError`] if no op could name all of it.
    pub fn registered(of: Registration) -> Result<Self, RegistrationError> {
        Ok(Self {
            repr: Repr::Registered(Registered::new(of)?),
        })
    }

    /// Returns the length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        match &self.repr {
            Repr::Empty => 0,
            Repr::Owned(buf) => buf.len,
            Repr::Guest { len, .. } => *len,
            Repr::Registered(registered) => registered.len(),
        }
    }

    /// Returns true if it holds no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes if this process owns them.
    #[must_use]
    pub fn as_owned(&self) -> Option<&AlignedBuf> {
        match &self.repr {
            Repr::Owned(buf) => Some(buf),
            _ => None,
        }
    }

    /// Returns the bytes for changing if this process owns them.
    #[must_use]
    pub fn as_owned_mut(&mut self) -> Option<&mut AlignedBuf> {
        match &mut self.repr {
            Repr::Owned(buf) => Some(buf),
            _ => None,
        }
    }

    /// Returns the memory itself if this process owns it.
    #[must_use]
    pub fn into_owned(self) -> Option<AlignedBuf> {
        match self.repr {
            Repr::Owned(buf) => Some(buf),
            _ => None,
        }
    }

    /// Returns the bytes, if this process can reach them.
    ///
    /// `None` for a [registered](Buffer::registered) buffer: the [ring](crate::ring::Ring::copy) copies to and from it.
    #[must_use]
    #[inline]
    pub fn memory(&self) -> Option<Memory<'_>> {
        match self.place() {
            Place::Memory(memory) => Some(memory),
            Place::Registered(_) => None,
        }
    }

    /// Returns the location of its bytes: memory, or a ring's buffer table.
    #[inline]
    pub(crate) fn place(&self) -> Place<'_> {
        let stretches = match &self.repr {
            Repr::Empty => Stretches::Many(&[]),
            // The pointer is the allocation's own, good for all of it.
            Repr::Owned(buf) => Stretches::One(IoSlice::new(buf.ptr.as_ptr(), buf.len)),
            Repr::Guest { slices, .. } => Stretches::Many(slices),
            Repr::Registered(registered) => return Place::Registered(registered),
        };
        Place::Memory(Memory {
            stretches,
            len: self.len(),
        })
    }

    #[inline]
    fn check_range(&self, offset: usize, len: usize) {
        check_range(self.len(), offset, len);
    }

    /// Returns true if every stretch starts at a multiple of `address_align` and is a multiple of `len_align`
    /// bytes long (powers of two).
    #[must_use]
    #[inline]
    pub fn is_aligned(&self, address_align: usize, len_align: usize) -> bool {
        self.is_range_aligned(0, self.len(), address_align, len_align)
    }

    /// As [`Buffer::is_aligned`], for bytes `offset..offset + len` alone.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    #[must_use]
    #[inline]
    pub fn is_range_aligned(
        &self,
        offset: usize,
        len: usize,
        address_align: usize,
        len_align: usize,
    ) -> bool {
        match self.place() {
            Place::Memory(memory) => {
                let mut fits = true;
                memory.for_each(offset, len, |slice| {
                    fits &=
                        slice.ptr().addr() & (address_align - 1) == 0 && slice.len() & (len_align - 1) == 0;
                });
                fits
            }
            Place::Registered(registered) => {
                self.check_range(offset, len);
                let align = registered.align_at(offset);
                address_align <= align && len_align <= align && len & (len_align - 1) == 0
            }
        }
    }
}

fn check_range(whole: usize, offset: usize, len: usize) {
    let end = offset
        .checked_add(len)
        .expect("a range inside a buffer does not wrap");
    assert!(end <= whole, "bytes {offset}..{end} of a buffer of {whole}");
}

/// Location of a buffer's bytes.
pub(crate) enum Place<'a> {
    /// Addresses of this process.
    Memory(Memory<'a>),
    /// A slot of a ring's buffer table.
    Registered(&'a Registered),
}

#[derive(Clone, Copy, Debug)]
enum Stretches<'a> {
    One(IoSlice),
    Many(&'a [IoSlice]),
}

/// The bytes of a [`Buffer`] that this process can reach, its own or a guest's.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    stretches: Stretches<'a>,
    len: usize,
}

impl Memory<'_> {
    /// Calls `f` with each stretch of bytes `offset..offset + len`.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    #[inline]
    pub(crate) fn for_each(self, offset: usize, len: usize, mut f: impl FnMut(IoSlice)) {
        check_range(self.len, offset, len);
        if len == 0 {
            return;
        }
        match self.stretches {
            Stretches::One(slice) => f(IoSlice::new(slice.ptr().wrapping_add(offset), len)),
            Stretches::Many(slices) => {
                let (mut skip, mut left) = (offset, len);
                for slice in slices {
                    if skip >= slice.len() {
                        skip -= slice.len();
                        continue;
                    }
                    let part = left.min(slice.len() - skip);
                    f(IoSlice::new(slice.ptr().wrapping_add(skip), part));
                    skip = 0;
                    left -= part;
                    if left == 0 {
                        break;
                    }
                }
            }
        }
    }

    /// Fills bytes `offset..offset + len` with `byte`.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer.
    pub fn fill(self, offset: usize, len: usize, byte: u8) {
        // SAFETY: `for_each` names only memory the borrowed buffer owns or holds mapped, of that length.
        // Owned memory is reached through `&Buffer` only by ops and by this module's copies, which
        // make no reference to it; guest memory is shared with the guest by nature.
        self.for_each(offset, len, |slice| unsafe {
            std::ptr::write_bytes(slice.ptr(), byte, slice.len());
        });
    }

    /// Copies `bytes` into the buffer, from `offset` on.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    pub fn write(self, offset: usize, bytes: &[u8]) {
        let mut at = 0;
        self.for_each(offset, bytes.len(), |slice| {
            let from = bytes.as_ptr().wrapping_add(at);
            // SAFETY: source: `at + slice.len() <= bytes.len()`, as the stretches add up to it.
            // Destination: as in `fill`. They do not overlap unless the guest maps our own memory,
            // which it cannot.
            unsafe { std::ptr::copy_nonoverlapping(from, slice.ptr(), slice.len()) };
            at += slice.len();
        });
    }

    /// Copies bytes of the buffer, from `offset` on, into all of `out`.
    ///
    /// # Panics
    ///
    /// If the buffer does not have that many.
    pub fn read(self, offset: usize, out: &mut [u8]) {
        let (base, len, mut at) = (out.as_mut_ptr(), out.len(), 0);
        self.for_each(offset, len, |slice| {
            // SAFETY: destination: `at + slice.len() <= len`. Source: as in `fill`.
            unsafe { std::ptr::copy_nonoverlapping(slice.ptr(), base.wrapping_add(at), slice.len()) };
            at += slice.len();
        });
    }

    /// Copies `len` bytes to another buffer in small steps, as neither may be borrowed as a slice.
    ///
    /// # Panics
    ///
    /// If a range is not inside its buffer.
    pub fn copy_to(self, from_offset: usize, to: Memory<'_>, to_offset: usize, len: usize) {
        let mut chunk = [0u8; 4096];
        let mut done = 0;
        while done < len {
            let part = chunk.len().min(len - done);
            self.read(from_offset + done, &mut chunk[..part]);
            to.write(to_offset + done, &chunk[..part]);
            done += part;
        }
    }
}

impl From<AlignedBuf> for Buffer {
    fn from(buf: AlignedBuf) -> Self {
        Self {
            repr: Repr::Owned(buf),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.repr {
            Repr::Empty => "empty",
            Repr::Owned(_) => "owned",
            Repr::Guest { .. } => "guest",
            Repr::Registered(_) => "registered",
        };
        write!(f, "Buffer({kind}, {} bytes)", self.len())
    }
}

/// Gathers the guest memory of one request.
#[derive(Debug)]
pub struct GuestBufferBuilder {
    slices: SmallVec<[IoSlice; 2]>,
    len: usize,
    hold: MemoryHold,
}

impl GuestBufferBuilder {
    /// Adds `len` bytes at `ptr`. Neighbours are joined.
    ///
    /// # Safety
    ///
    /// `ptr..ptr + len` must be memory that stays mapped, readable and writable (readable alone, if
    /// the request only reads from it), for as long as the builder's hold lives, and that no Rust
    /// reference covers.
    pub unsafe fn push(&mut self, ptr: *mut u8, len: usize) {
        if len == 0 {
            return;
        }
        self.len += len;
        if let Some(last) = self.slices.last_mut()
            && last.ptr().wrapping_add(last.len()) == ptr
        {
            *last = IoSlice::new(last.ptr(), last.len() + len);
            return;
        }
        self.slices.push(IoSlice::new(ptr, len));
    }

    /// Returns the number of bytes gathered so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if no bytes were gathered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the finished buffer.
    #[must_use]
    pub fn build(self) -> Buffer {
        Buffer {
            repr: Repr::Guest {
                slices: self.slices,
                len: self.len,
                _hold: self.hold,
            },
        }
    }
}

/// A part of what a vectored op reads or writes: some bytes of a shared buffer, or zeros.
#[derive(Clone, Debug)]
pub enum Piece {
    /// `len` bytes of `buffer` from `offset` on.
    Bytes {
        /// The memory; the op keeps it until it has ended.
        buffer: Rc<Buffer>,
        /// The first byte.
        offset: usize,
        /// The length in bytes.
        len: usize,
    },
    /// This number of zero bytes; only for writes.
    Zeros(usize),
}

impl Piece {
    /// Makes a piece of a whole buffer.
    #[must_use]
    pub fn whole(buffer: &Rc<Buffer>) -> Self {
        Self::Bytes {
            buffer: Rc::clone(buffer),
            offset: 0,
            len: buffer.len(),
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes { len, .. } => *len,
            Self::Zeros(len) => *len,
        }
    }

    /// Returns true if its length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if its bytes are a registered buffer's. An op can name no other piece beside it.
    pub(crate) fn is_registered(&self) -> bool {
        matches!(self, Self::Bytes { buffer, .. } if matches!(buffer.repr, Repr::Registered(_)))
    }

    /// Returns its first `at` bytes and the rest. If it is not longer than that, the rest is empty.
    #[must_use]
    pub fn split_at(&self, at: usize) -> (Self, Self) {
        let at = at.min(self.len());
        match self {
            Self::Bytes { buffer, offset, len } => {
                let part = |offset, len| Self::Bytes {
                    buffer: Rc::clone(buffer),
                    offset,
                    len,
                };
                (part(*offset, at), part(offset + at, len - at))
            }
            Self::Zeros(len) => (Self::Zeros(at), Self::Zeros(len - at)),
        }
    }
}

/// A read-only stretch of zeros for ops to write from.
const ZERO_BLOCK_BYTES: usize = 64 * 1024;

#[repr(align(4096))]
struct ZeroBlock([u8; ZERO_BLOCK_BYTES]);

static ZERO_BLOCK: ZeroBlock = ZeroBlock([0; ZERO_BLOCK_BYTES]);

/// Appends `len` zero bytes, as the source of a write, to `out`.
pub(crate) fn append_zeros(mut len: usize, out: &mut IoSlices) {
    while len > 0 {
        let part = len.min(ZERO_BLOCK_BYTES);
        // Never written through: pieces of zeros are refused for reads.
        out.push(IoSlice::new(ZERO_BLOCK.0.as_ptr().cast_mut(), part));
        len -= part;
    }
}

/// Fills the stretches of an op that has ended, and still owns their memory, with zeros.
pub(crate) fn zero_slices(slices: &[IoSlice]) {
    for slice in slices {
        // SAFETY: called by the slot that holds the op's memory, before it releases it: the stretch
        // is mapped and writable, as the read it belonged to required.
        unsafe { std::ptr::write_bytes(slice.ptr(), 0, slice.len()) };
    }
}

/// Pool of one worker's buffers for reuse.
///
/// A buffer taken from it has arbitrary contents.
#[derive(Debug, Default)]
pub struct BufferPool {
    free: RefCell<Vec<AlignedBuf>>,
}

/// The largest number of buffers in a pool, none larger than [`POOLED_BYTES_MAX`].
const POOLED_BUFFERS_MAX: usize = 32;
/// The largest buffer a pool keeps.
const POOLED_BYTES_MAX: usize = 256 * 1024;

impl BufferPool {
    /// Returns a buffer of `len` bytes with arbitrary contents.
    #[must_use]
    pub fn take(&self, len: usize) -> AlignedBuf {
        let mut free = self.free.borrow_mut();
        let fits = |buf: &AlignedBuf| buf.capacity >= len && buf.capacity / 4 <= len.max(BUFFER_ALIGN);
        if let Some(index) = free.iter().rposition(fits) {
            let mut buf = free.swap_remove(index);
            buf.set_len(len);
            return buf;
        }
        drop(free);
        AlignedBuf::zeroed(len)
    }

    /// Returns a buffer to the pool.
    pub fn put(&self, buf: AlignedBuf) {
        let mut free = self.free.borrow_mut();
        if buf.capacity <= POOLED_BYTES_MAX && free.len() < POOLED_BUFFERS_MAX {
            free.push(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(parts: &mut [Vec<u8>]) -> Buffer {
        let mut builder = Buffer::guest(Rc::new(()));
        for part in parts {
            // SAFETY: the test keeps the vectors alive, and reads them only after the buffer's use.
            unsafe { builder.push(part.as_mut_ptr(), part.len()) };
        }
        builder.build()
    }

    #[test]
    fn untouched_memory_is_there_only_where_it_was_used() {
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

    #[test]
    fn bytes_go_to_and_come_from_every_slice() {
        let mut parts = [vec![0u8; 5], vec![0u8; 7], vec![0u8; 3]];
        let buffer = guest(&mut parts);
        assert_eq!(buffer.len(), 15);
        let memory = buffer.memory().expect("memory");
        memory.write(3, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let mut out = [0; 8];
        memory.read(4, &mut out);
        assert_eq!(out, [2, 3, 4, 5, 6, 7, 8, 9]);
        memory.fill(0, 4, 0xff);
        assert_eq!(parts[0], [0xff, 0xff, 0xff, 0xff, 2]);
        assert_eq!(parts[2], [10, 0, 0]);
    }

    #[test]
    fn neighbouring_slices_become_one() {
        let mut memory = vec![0u8; 64];
        let mut builder = Buffer::guest(Rc::new(()));
        // SAFETY: `memory` outlives the buffer and is not used meanwhile.
        unsafe { builder.push(memory.as_mut_ptr(), 32) };
        // SAFETY: as above.
        unsafe { builder.push(memory.as_mut_ptr().wrapping_add(32), 32) };
        let mut slices = IoSlices::new();
        let buffer = builder.build();
        let memory = buffer.memory().expect("memory");
        memory.for_each(0, 64, |slice| slices.push(slice));
        assert_eq!(slices.len(), 1);
    }

    #[test]
    fn alignment_is_checked_for_address_and_length_apart() {
        let mut memory = AlignedBuf::zeroed(8192);
        let base = memory.as_mut_ptr();
        for (offset, len, address_ok, len_ok) in [
            (0, 4096, true, true),
            (512, 4096, false, true),
            (0, 1000, true, false),
        ] {
            let mut builder = Buffer::guest(Rc::new(()));
            // SAFETY: inside `memory`, which outlives the buffer.
            unsafe { builder.push(base.wrapping_add(offset), len) };
            let buffer = builder.build();
            assert_eq!(buffer.is_aligned(4096, 1), address_ok);
            assert_eq!(buffer.is_aligned(1, 512), len_ok);
        }
    }

    #[test]
    fn a_pool_gives_back_what_fits() {
        let pool = BufferPool::default();
        let mut buf = pool.take(4096);
        buf[0] = 9;
        pool.put(buf);
        assert_eq!(pool.take(100)[0], 9);
        assert_eq!(pool.take(65536).len(), 65536);
    }
}
