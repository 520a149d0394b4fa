//! Stand-ins for a driver of the kernel that registers the pages of requests, as ublk does.
//!
//! [`Pages`] is memory that is mapped here and is a file, too: registered with a ring, its bytes are reached by the
//! ops that name a place in the ring's table; as a file, it is their door. That is all that a disk engine sees of
//! ublk's zero copy and USER_COPY. [`Tags`] hands out the pages as a driver does, a place for each request.
//!
//! It works on real rings and in a simulated world alike.
//!
//! What must stay true: the mapping outlives every op that was told of it, and no Rust reference covers it.

#![expect(unsafe_code, reason = "maps memory, and copies to and from it")]

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;

use super::memory::{self, MemoryFault};
use super::short::ShortDriver;
use crate::buffer::{Buffer, IoSlice, MemoryHold, Registration, RegistrationError};
use crate::ring::{Door, FixedTable, LeaseError, Ring, RingError, RingKind, driver_of};
use crate::task::Context;

/// A new file in memory.
pub(super) fn memfd() -> File {
    // SAFETY: the name is a C string, and no other memory is passed.
    let fd = unsafe { libc::memfd_create(c"simulated".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(
        fd >= 0,
        "a descriptor for a simulated file: {}",
        io::Error::last_os_error()
    );
    // SAFETY: `fd` was just made and nobody else owns it.
    unsafe { File::from_raw_fd(fd) }
}

/// The bytes of a place among pages.
pub(super) fn place(tag: u16, place_bytes: usize) -> Range<usize> {
    let start = usize::from(tag) * place_bytes;
    start..start + place_bytes
}

/// Memory that is a file, too.
pub struct Pages {
    file: File,
    memory: NonNull<u8>,
    len: usize,
    /// Ranges that ops only write, or only read.
    limits: RefCell<Vec<(Range<usize>, Way)>>,
}

/// What a request's pages are there for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// They are filled: the request reads.
    Filled,
    /// They are taken from: the request writes.
    Taken,
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({} bytes)", self.len)
    }
}

impl Pages {
    /// `len` zero bytes.
    ///
    /// # Panics
    ///
    /// If `len` is zero, or the process has no descriptor or memory left.
    #[must_use]
    pub fn new(len: usize) -> Rc<Self> {
        let file = memfd();
        file.set_len(len as u64).expect("memory for pages");
        // SAFETY: a new mapping, at an address of the kernel's choice, of a file that is `len` bytes long.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert!(
            memory != libc::MAP_FAILED,
            "memory for pages: {}",
            io::Error::last_os_error()
        );
        let memory = NonNull::new(memory.cast()).expect("a mapping is not at address zero");
        Rc::new(Self {
            file,
            memory,
            len,
            limits: RefCell::default(),
        })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn descriptor(&self) -> File {
        self.file.try_clone().expect("a descriptor for pages")
    }

    /// The memory of a range, for ops alone.
    pub(super) fn stretch(&self, offset: usize, len: usize) -> IoSlice {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "{len} bytes at {offset} of {} bytes of pages",
            self.len
        );
        IoSlice::new(self.memory.as_ptr().wrapping_add(offset), len)
    }

    /// What the first byte of a place at `offset` is called.
    pub(super) fn base(&self, offset: usize, from_zero: bool) -> u64 {
        if from_zero {
            0
        } else {
            (self.memory.addr().get() + offset) as u64
        }
    }

    /// From here on, ops go only this way in a range.
    fn limit(&self, range: Range<usize>, way: Way) {
        let mut limits = self.limits.borrow_mut();
        limits.retain(|(other, _)| *other != range);
        limits.push((range, way));
    }

    /// Whether ops may go this way somewhere.
    pub(super) fn allows(&self, range: &Range<usize>, way: Way) -> bool {
        let limits = self.limits.borrow();
        let meets = |other: &Range<usize>| other.start < range.end && range.start < other.end;
        limits
            .iter()
            .all(|(other, allowed)| !meets(other) || *allowed == way)
    }

    /// Copies bytes out.
    ///
    /// # Panics
    ///
    /// If they are not inside the pages.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.stretch(offset, out.len());
        // SAFETY: `stretch` checked the range, which stays mapped as long as `self`.
        unsafe { std::ptr::copy_nonoverlapping(from.ptr(), out.as_mut_ptr(), out.len()) };
    }

    /// Copies bytes in.
    ///
    /// # Panics
    ///
    /// If they are not inside the pages.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.stretch(offset, bytes.len());
        // SAFETY: as for `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.ptr(), bytes.len()) };
    }

    /// The op of this thread's simulated worlds that uses a range, if one does.
    fn holder(&self, range: Range<usize>) -> Option<u64> {
        let start = self.memory.addr().get();
        memory::holder(start + range.start..start + range.end)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Some(op) = self.holder(0..self.len) {
            // The op will still touch them: they stay.
            memory::report(MemoryFault::Unmapped { op });
            return;
        }
        // SAFETY: the mapping is this one's alone and is `len` bytes long; a real ring has pinned what it uses, and
        // no op of a simulated one does.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.len) };
    }
}

/// Why there is no buffer for a tag.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum TagError {
    /// The tag cannot be had.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// It makes no buffer.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

/// Places for requests among the pages that are registered with a ring: what the tags of a driver are.
#[derive(Debug)]
pub struct Tags {
    ring: Ring,
    pages: Rc<Pages>,
    door: Door,
    place_bytes: usize,
    from_zero: bool,
}

impl Tags {
    pub(super) fn new(ring: &Ring, pages: &Rc<Pages>, place_bytes: usize, from_zero: bool) -> Self {
        let door = ring.register(OwnedFd::from(pages.descriptor()));
        Self {
            ring: ring.clone(),
            pages: Rc::clone(pages),
            door: Door::new(door.expect("a descriptor for pages")),
            place_bytes,
            from_zero,
        }
    }

    /// A worker's context on a ring of this kind, with so many places of `place_bytes` each. With `short`, a seed, ops
    /// of that ring do less than they were asked now and then, or ask to be repeated.
    ///
    /// # Errors
    ///
    /// If there is no such ring.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor or no memory left.
    pub fn on_ring(
        kind: RingKind,
        depth: u32,
        places: u16,
        place_bytes: usize,
        short: Option<u64>,
    ) -> Result<(Context, Self), RingError> {
        let pages = Pages::new(usize::from(places) * place_bytes);
        let stretches = (0..places).map(|tag| {
            let range = place(tag, place_bytes);
            pages.stretch(range.start, range.len())
        });
        let table = FixedTable::of_memory(stretches.collect());
        let ring = match short {
            None => Ring::with_fixed(kind, depth, &table)?,
            Some(seed) => {
                let driver = ShortDriver::new(driver_of(kind, depth, &table)?, seed);
                Ring::with_driver(Box::new(driver), depth, places.into())
            }
        };
        let tags = Self::new(&ring, &pages, place_bytes, false);
        Ok((Context::on(ring), tags))
    }

    /// The bytes of each place.
    #[must_use]
    pub fn place_bytes(&self) -> usize {
        self.place_bytes
    }

    /// The buffer of a tag's request: `len` bytes, the first of them `skip` into its place, where the driver says that
    /// its pages are aligned to `align`.
    ///
    /// # Errors
    ///
    /// [`TagError`] if something still names the tag's place.
    ///
    /// # Panics
    ///
    /// If the bytes do not fit into the place.
    pub fn buffer(&self, tag: u16, skip: usize, len: usize, align: usize) -> Result<Buffer, TagError> {
        assert!(skip + len <= self.place_bytes, "{len} bytes at {skip} of a place");
        let start = place(tag, self.place_bytes).start;
        Ok(Buffer::registered(Registration {
            fixed: self.ring.lease_fixed(tag)?,
            base: self.pages.base(start, self.from_zero) + skip as u64,
            len,
            door: self.door.clone(),
            door_offset: (start + skip) as u64,
            align,
            hold: Rc::clone(&self.pages) as MemoryHold,
        })?)
    }

    /// Says what the pages of a tag's place are there for. In a simulated world ops that go the other way are refused, as
    /// by a driver: with `EFAULT` if they name the place, with `EACCES` at the door.
    pub fn limit(&self, tag: u16, way: Way) {
        self.pages.limit(place(tag, self.place_bytes), way);
    }

    /// Copies bytes of a tag's place out.
    ///
    /// # Panics
    ///
    /// If they are not inside it.
    pub fn read(&self, tag: u16, skip: usize, out: &mut [u8]) {
        assert!(skip + out.len() <= self.place_bytes);
        self.pages.read(place(tag, self.place_bytes).start + skip, out);
    }

    /// Copies bytes into a tag's place.
    ///
    /// # Panics
    ///
    /// If they are not inside it.
    pub fn write(&self, tag: u16, skip: usize, bytes: &[u8]) {
        assert!(skip + bytes.len() <= self.place_bytes);
        self.pages.write(place(tag, self.place_bytes).start + skip, bytes);
    }

    /// The op of a simulated world that still uses a tag's place, if one does: a driver that heard of the request's end
    /// would give the pages back under it.
    #[must_use]
    pub fn holder(&self, tag: u16) -> Option<u64> {
        self.pages.holder(place(tag, self.place_bytes))
    }
}
