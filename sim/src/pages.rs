//! Stand-ins for a kernel driver that registers the pages of requests, as ublk does.
//!
//! [`Pages`] is a mapped memfd. Registered with a ring, its bytes are reached by the ops that name a slot of the
//! ring's buffer table; as a file, it is their door. That is all that a disk engine sees of ublk's zero copy and
//! USER_COPY. [`Tags`] hands out the pages as a driver does, a slot for each request.
//!
//! It works on real rings and in a simulated world alike.
//!
//! Invariant: the mapping outlives every op that names it, and no Rust reference covers it.

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
use block::buffer::{Buffer, IoSlice, MemoryHold, Registration, RegistrationError};
use block::ring::{Door, FixedTable, LeaseError, Ring, RingError, RingKind, driver_of};
use block::task::Context;

/// Makes a new memfd.
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

/// Returns the bytes of a tag's place among the pages.
pub(super) fn place(tag: u16, place_bytes: usize) -> Range<usize> {
    let start = usize::from(tag) * place_bytes;
    start..start + place_bytes
}

/// A mapped memfd.
pub struct Pages {
    file: File,
    memory: NonNull<u8>,
    len: usize,
    /// Ranges that ops may only write, or only read.
    limits: RefCell<Vec<(Range<usize>, Way)>>,
}

/// Direction in which a request uses its pages.
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
    /// Makes `len` zero bytes.
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

    /// Returns the memory of a range, for ops only.
    pub(super) fn stretch(&self, offset: usize, len: usize) -> IoSlice {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "{len} bytes at {offset} of {} bytes of pages",
            self.len
        );
        IoSlice::new(self.memory.as_ptr().wrapping_add(offset), len)
    }

    /// Returns the kernel's name for the first byte of a place at `offset`.
    pub(super) fn base(&self, offset: usize, from_zero: bool) -> u64 {
        if from_zero {
            0
        } else {
            (self.memory.addr().get() + offset) as u64
        }
    }

    /// Limits ops in a range to one direction from now on.
    fn limit(&self, range: Range<usize>, way: Way) {
        let mut limits = self.limits.borrow_mut();
        limits.retain(|(other, _)| *other != range);
        limits.push((range, way));
    }

    /// Returns true if ops may go this way in a range.
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

    /// Returns the op of this thread's simulated worlds that uses a range, if one does.
    fn holder(&self, range: Range<usize>) -> Option<u64> {
        let start = self.memory.addr().get();
        memory::holder(start + range.start..start + range.end)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Some(op) = self.holder(0..self.len) {
            // The op will still touch them: leak them.
            memory::report(MemoryFault::Unmapped { op });
            return;
        }
        // SAFETY: the mapping is this one's alone and is `len` bytes long; a real ring has pinned what it uses, and
        // no op of a simulated one does.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.len) };
    }
}

/// Error: a tag's buffer cannot be made.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum TagError {
    /// The tag cannot be leased.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The buffer's parameters are invalid.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

/// The tags of a driver: places for requests among the pages that are registered with a ring.
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

    /// Makes a worker's context on a ring of this kind, with `places` places of `place_bytes` each. With `short`, a
    /// seed, ops of that ring are sometimes cut short or must be retried.
    ///
    /// # Errors
    ///
    /// If the ring cannot be made.
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
        // SAFETY: the pages are mapped until `pages` and every buffer of them are gone, and only raw pointers reach them.
        let table = unsafe { FixedTable::of_memory(stretches.collect()) };
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

    /// Returns the size of each place in bytes.
    #[must_use]
    pub fn place_bytes(&self) -> usize {
        self.place_bytes
    }

    /// Makes the buffer of a tag's request: `len` bytes, the first of them `skip` into its place. `align` is the
    /// alignment that the driver reports for the pages.
    ///
    /// # Errors
    ///
    /// [`TagError`] if an op or a buffer still names the tag's slot, or if the parameters are invalid.
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

    /// Sets the direction in which the pages of a tag's place are used. In a simulated world ops in the other direction
    /// are refused, as by a driver: with `EFAULT` if they name the slot, with `EACCES` at the door.
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

    /// Returns the op of a simulated world that still uses a tag's place, if one does. A driver that completed the
    /// request now would free the pages under it.
    #[must_use]
    pub fn holder(&self, tag: u16) -> Option<u64> {
        self.pages.holder(place(tag, self.place_bytes))
    }
}
