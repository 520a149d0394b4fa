//! The driver's side of one split virtqueue, as lean as it can be made.
//!
//! `virtio-driver` connects and places the rings; its own queue object publishes every request on its own and calls
//! through two trait objects per descriptor, which at a million requests a second would measure the client; so would
//! [`ringdisk_driver::Driver`], which allocates. Here each slot owns three descriptors for good (header, data, status),
//! a request is five stores, a batch is published with one store and at most one kick, and nothing is allocated.
//!
//! Both sides negotiate EVENT_IDX, as a Linux guest does. While the client polls, `used_event` is kept half the index
//! space away, so the server has no reason to interrupt; a sleeping client arms it.
#![expect(unsafe_code, reason = "shares rings and buffers with another process")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering, fence};
use std::time::Duration;

use ringdisk_driver::{NEXT, WRITE, blk, crossed};
use virtio_driver::QueueNotifier;

/// Entries in each queue: 85 requests of three descriptors.
pub(crate) const QUEUE_SIZE: u16 = 256;
/// The most requests that one queue can hold.
pub(crate) const SLOTS_MAX: u16 = QUEUE_SIZE / 3;

/// The parts of a request, besides its data, that the device reads and writes. A cache line each, so that two requests
/// never share one.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestBuf {
    kind: u32,
    reserved: u32,
    sector: u64,
    status: u8,
}

/// One descriptor, as virtio 1.2 has it ("2.7.5").
#[repr(C)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

const _: () = assert!(size_of::<Descriptor>() == 16);
const _: () = assert!(size_of::<RequestBuf>() == 64);

/// The operation asked of a slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// Fill the slot's buffer.
    Read,
    /// Store the slot's buffer.
    Write,
    /// Make what completed durable.
    Flush,
}

/// The addresses of a queue's parts in this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingMemory {
    /// The descriptor table: [`QUEUE_SIZE`] × 16 bytes.
    pub(crate) descriptors: *mut u8,
    /// The available ring: 6 + 2 × [`QUEUE_SIZE`] bytes.
    pub(crate) available: *mut u8,
    /// The used ring: 6 + 8 × [`QUEUE_SIZE`] bytes.
    pub(crate) used: *mut u8,
    /// One [`RequestBuf`] for every slot.
    pub(crate) requests: *mut RequestBuf,
    /// The slots' data buffers, one after another.
    pub(crate) data: *mut u8,
    /// The size of one data buffer.
    pub(crate) block_bytes: u32,
}

/// The driver's side of one queue.
pub(crate) struct Ring {
    memory: RingMemory,
    /// Keeps all of `memory` mapped.
    _hold: Arc<dyn Send + Sync>,
    kick: Box<dyn QueueNotifier>,
    call: File,
    available_next: u16,
    available_published: u16,
    used_next: u16,
    used_seen: u16,
    used_event: u16,
}

// SAFETY: the pointers lead into mappings that `_hold` keeps alive; one `Ring` exists per queue and
// it is used from one thread at a time.
unsafe impl Send for Ring {}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("memory", &self.memory)
            .field("used_next", &self.used_next)
            .finish()
    }
}

impl Ring {
    /// Takes over a queue that no request has been put on yet.
    ///
    /// # Safety
    ///
    /// The parts in `memory` must be as large as [`RingMemory`] says for [`SLOTS_MAX`] slots, aligned
    /// for their types, stay mapped as long as `hold` lives, and be used by no other `Ring`.
    #[must_use]
    pub(crate) unsafe fn new(
        memory: RingMemory,
        hold: Arc<dyn Send + Sync>,
        kick: Box<dyn QueueNotifier>,
        call: File,
    ) -> Self {
        let mut ring = Self {
            memory,
            _hold: hold,
            kick,
            call,
            available_next: 0,
            available_published: 0,
            used_next: 0,
            used_seen: 0,
            used_event: 0,
        };
        for slot in 0..SLOTS_MAX {
            ring.lay_out(slot);
        }
        ring.set_used_event(0x8000);
        ring
    }

    /// Writes the parts of a slot's descriptors that never change.
    fn lay_out(&mut self, slot: u16) {
        let head = slot * 3;
        let request = self.request(slot);
        // SAFETY: `status` is a field of the slot's own request buffer.
        let status = unsafe { &raw mut (*request).status };
        let parts = [
            (request as u64, 16, NEXT, head + 1),
            (self.data(slot) as u64, self.memory.block_bytes, NEXT, head + 2),
            (status as u64, 1, WRITE, 0),
        ];
        for (index, (address, len, flags, next)) in (head..).zip(parts) {
            // SAFETY: `index` < 3 × SLOTS_MAX ≤ QUEUE_SIZE, inside the table; the device has not been
            // told of any descriptor of this slot yet.
            unsafe {
                self.descriptor(index).write(Descriptor {
                    address,
                    len,
                    flags,
                    next,
                })
            };
        }
    }

    fn descriptor(&self, index: u16) -> *mut Descriptor {
        debug_assert!(index < QUEUE_SIZE);
        // SAFETY: `new` was promised QUEUE_SIZE descriptors here.
        unsafe {
            self.memory
                .descriptors
                .cast::<Descriptor>()
                .add(usize::from(index))
        }
    }

    fn request(&self, slot: u16) -> *mut RequestBuf {
        assert!(slot < SLOTS_MAX, "slot {slot} of {SLOTS_MAX}");
        // SAFETY: `new` was promised one buffer for each slot.
        unsafe { self.memory.requests.add(usize::from(slot)) }
    }

    /// The first byte of a slot's data.
    #[must_use]
    pub(crate) fn data(&self, slot: u16) -> *mut u8 {
        assert!(slot < SLOTS_MAX, "slot {slot} of {SLOTS_MAX}");
        // SAFETY: `new` was promised a data buffer for each slot.
        unsafe {
            self.memory
                .data
                .add(usize::from(slot) * self.memory.block_bytes as usize)
        }
    }

    /// Copies what a finished read left in a slot.
    pub(crate) fn copy_data(&self, slot: u16, out: &mut [u8]) {
        let len = out.len().min(self.memory.block_bytes as usize);
        // SAFETY: the slot's buffer has `len` bytes, `out` too, and one is shared memory and the other
        // not. The caller has reaped the read, so an honest server no longer writes; a dishonest one
        // spoils bytes, which have no invalid values.
        unsafe { std::ptr::copy_nonoverlapping(self.data(slot), out.as_mut_ptr(), len) };
    }

    /// Puts a request into the queue; the device sees it at the next [`Ring::publish`].
    /// The slot must be idle. `offset` is in bytes, a multiple of 512.
    #[inline]
    pub(crate) fn push(&mut self, slot: u16, kind: Kind, offset: u64) {
        let head = slot * 3;
        let request = self.request(slot);
        let (number, next, data_flags) = match kind {
            Kind::Read => (blk::IN, head + 1, NEXT | WRITE),
            Kind::Write => (blk::OUT, head + 1, NEXT),
            Kind::Flush => (blk::FLUSH, head + 2, NEXT),
        };
        // SAFETY: the slot is idle, so the device neither reads nor writes its request buffer and
        // descriptors; the indices are those of the slot. The device sees the stores after `publish`.
        unsafe {
            (&raw mut (*request).kind).write(number);
            (&raw mut (*request).sector).write(offset / 512);
            (&raw mut (*request).status).write(blk::NO_STATUS);
            (&raw mut (*self.descriptor(head)).next).write(next);
            (&raw mut (*self.descriptor(head + 1)).flags).write(data_flags);
        }
        let entry = 4 + 2 * usize::from(self.available_next % QUEUE_SIZE);
        // SAFETY: the entry lies in the available ring, which has QUEUE_SIZE of them after 4 bytes.
        unsafe { field(self.memory.available, entry) }.store(head, Ordering::Relaxed);
        self.available_next = self.available_next.wrapping_add(1);
    }

    /// Shows the device everything pushed, and kicks it if it asks to be.
    ///
    /// # Errors
    ///
    /// That of writing the kick eventfd.
    #[inline]
    pub(crate) fn publish(&mut self) -> io::Result<()> {
        if self.available_next == self.available_published {
            return Ok(());
        }
        // SAFETY: bytes 2..4 of the available ring are its index.
        unsafe { field(self.memory.available, 2) }.store(self.available_next, Ordering::Release);
        // The device stores its event index before it looks at ours a last time; we the other way round.
        fence(Ordering::SeqCst);
        let event_at = 4 + 8 * usize::from(QUEUE_SIZE);
        // SAFETY: the event index follows the used ring's entries.
        let event = unsafe { field(self.memory.used, event_at) }.load(Ordering::Relaxed);
        let wanted = crossed(event, self.available_next, self.available_published);
        self.available_published = self.available_next;
        if wanted {
            self.kick.notify()?;
        }
        Ok(())
    }

    /// The next request that has ended: its slot and its status byte. `None` if there is none.
    ///
    /// # Errors
    ///
    /// If the device names a descriptor that heads no request.
    #[inline]
    pub(crate) fn pop(&mut self) -> io::Result<Option<(u16, u8)>> {
        if self.used_next == self.used_seen {
            // SAFETY: bytes 2..4 of the used ring are its index.
            self.used_seen = unsafe { field(self.memory.used, 2) }.load(Ordering::Acquire);
            if self.used_next == self.used_seen {
                return Ok(None);
            }
            let ahead = self.used_event.wrapping_sub(self.used_next);
            if !(0x4000..=0x8000).contains(&ahead) {
                self.set_used_event(self.used_next.wrapping_add(0x8000));
            }
        }
        let entry = 4 + 8 * usize::from(self.used_next % QUEUE_SIZE);
        // SAFETY: the entry lies in the used ring, 4-aligned; the index above told us it is complete.
        let id = unsafe { AtomicU32::from_ptr(self.memory.used.add(entry).cast()) }.load(Ordering::Relaxed);
        self.used_next = self.used_next.wrapping_add(1);
        if id % 3 != 0 || id / 3 >= u32::from(SLOTS_MAX) {
            return Err(io::Error::other(format!(
                "the device finished request {id}, which was never made"
            )));
        }
        let slot = (id / 3) as u16;
        // SAFETY: `status` is a byte of the slot's request buffer that the device may write.
        let status = unsafe { AtomicU8::from_ptr(&raw mut (*self.request(slot)).status) };
        Ok(Some((slot, status.load(Ordering::Relaxed))))
    }

    /// Returns true if [`Ring::pop`] has something to answer.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        // SAFETY: bytes 2..4 of the used ring are its index.
        unsafe { field(self.memory.used, 2) }.load(Ordering::Acquire) != self.used_next
    }

    /// Sleeps until something has ended, or `timeout` has passed.
    ///
    /// # Errors
    ///
    /// Those of `poll` and of reading the eventfd.
    pub(crate) fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.set_used_event(self.used_next);
        fence(Ordering::SeqCst);
        if self.has_ended() {
            return Ok(());
        }
        let mut poll = libc::pollfd {
            fd: self.call.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let milliseconds = libc::c_int::try_from(timeout.as_millis()).unwrap_or(libc::c_int::MAX);
        // SAFETY: one valid pollfd, ours for the duration of the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
        match ready {
            0 => Ok(()),
            n if n > 0 => self.call.read_exact(&mut [0; 8]),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
                error => Err(error),
            },
        }
    }

    fn set_used_event(&mut self, index: u16) {
        self.used_event = index;
        let at = 4 + 2 * usize::from(QUEUE_SIZE);
        // SAFETY: the event index follows the available ring's entries.
        unsafe { field(self.memory.available, at) }.store(index, Ordering::Relaxed);
    }
}

/// An index or flags field of a ring.
///
/// # Safety
///
/// `base + offset` must lie in a mapped part of a ring, and be even.
#[inline]
pub(crate) unsafe fn field<'a>(base: *mut u8, offset: usize) -> &'a AtomicU16 {
    // SAFETY: mapped and 2-aligned by the caller's promise; both sides only ever access it whole.
    unsafe { AtomicU16::from_ptr(base.add(offset).cast()) }
}
