//! The available and used rings: taking chains, giving them back, and who notifies whom.
//!
//! Indices count entries modulo 65536 and are ahead of ring positions; `position = index & mask`. Used
//! entries are written as answers come and become visible together, with [`Virtqueue::publish`].
//! Spec: virtio 1.2, 2.7.6 to 2.7.10.

#![expect(
    unsafe_code,
    reason = "ring words are shared with the guest and reached through raw pointers"
)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use block::canary::may_store;
use virtio_bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};
use vm_memory::GuestMemoryMmap;

use super::chain::{Chain, DescriptorTable};
use super::memory::QueueMemory;
use super::{QueueError, QueueLog, SetupError};

/// The guest addresses of a queue's parts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RingAddresses {
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring.
    pub available: u64,
    /// The used ring.
    pub used: u64,
}

/// All that is needed to start a queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QueueSetup {
    /// Entries: a power of two up to 32768.
    pub size: u16,
    /// The guest addresses of its parts.
    pub addresses: RingAddresses,
    /// The available index of the first chain to take.
    pub next_available: u16,
    /// True if `VIRTIO_RING_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// True if `VIRTIO_RING_F_INDIRECT_DESC` was negotiated.
    pub indirect: bool,
}

/// Byte offsets in both rings: flags, index, entries.
const INDEX: usize = 2;
const ENTRIES: usize = 4;
/// The number of chains ahead whose descriptors, and then whose buffers, are prefetched.
const DESCRIPTORS_AHEAD: u16 = 6;
const TARGETS_AHEAD: u16 = 3;

/// The length in bytes of a used ring of so many entries, `avail_event` included.
#[must_use]
pub(crate) const fn used_bytes(size: u16) -> u64 {
    6 + 8 * size as u64
}

/// A split virtqueue that runs.
pub struct Virtqueue {
    memory: QueueMemory,
    table: DescriptorTable,
    /// The available ring: mapped, for as long as `memory` lives, with its `used_event`.
    available: NonNull<u8>,
    /// The used ring: mapped, for as long as `memory` lives, with its `avail_event`.
    used: NonNull<u8>,
    size: u16,
    mask: u16,
    event_idx: bool,
    next_available: u16,
    /// The used index with the entries that are not published yet.
    next_used: u16,
    /// The used index as the guest sees it.
    published: u16,
    /// True if the guest was notified since the start: until then it may expect more than we know.
    notified_once: bool,
    notifications: bool,
    /// The guest's log of written pages, while it migrates.
    log: Option<QueueLog>,
}

impl fmt::Debug for Virtqueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Virtqueue")
            .field("size", &self.size)
            .field("next_available", &self.next_available)
            .field("next_used", &self.next_used)
            .field("published", &self.published)
            .finish_non_exhaustive()
    }
}

impl Virtqueue {
    /// Starts a queue in `memory`, with the guest's notifications off where it can be asked for that.
    ///
    /// # Errors
    ///
    /// [`SetupError`], naming the part that is not where it may be.
    pub fn new(memory: GuestMemoryMmap, setup: &QueueSetup) -> Result<Self, SetupError> {
        let size = setup.size;
        if !size.is_power_of_two() || size > 1 << 15 {
            return Err(SetupError::Size { size: size.into() });
        }
        let memory = QueueMemory::new(memory);
        let entries = u32::from(size);
        let place = |part, address: u64, len: u32, align: u64| {
            if address & (align - 1) != 0 {
                return Err(SetupError::Misaligned { part, address, align });
            }
            let outside = SetupError::OutsideMemory {
                part,
                address,
                len: len.into(),
            };
            let slice = memory.contiguous(address, len).ok_or(outside)?;
            // A region may begin at an odd guest address, so the host's address is looked at as well.
            if memory.pointer(slice, 0, len).addr().get() as u64 & (align - 1) != 0 {
                return Err(SetupError::Misaligned { part, address, align });
            }
            Ok(slice)
        };
        let RingAddresses {
            descriptors,
            available,
            used,
        } = setup.addresses;
        let table = place("descriptor table", descriptors, 16 * entries, 16)?;
        let available = place("available ring", available, 6 + 2 * entries, 2)?;
        let used = place("used ring", used, used_bytes(size) as u32, 4)?;
        let mut queue = Self {
            available: memory.pointer(available, 0, available.len()),
            used: memory.pointer(used, 0, used.len()),
            memory,
            table: DescriptorTable {
                table,
                size,
                indirect: setup.indirect,
            },
            size,
            mask: size - 1,
            event_idx: setup.event_idx,
            next_available: setup.next_available,
            next_used: 0,
            published: 0,
            notified_once: false,
            notifications: true,
            log: None,
        };
        queue.published = u16::from_le(queue.used_word(INDEX).load(Ordering::Acquire));
        queue.next_used = queue.published;
        queue.disable_notifications();
        Ok(queue)
    }

    /// From now on the pages that are written, those of the used ring too, are marked in a log. What was written to the ring before
    /// is marked at once.
    pub fn log_writes(&mut self, log: QueueLog) {
        self.memory.log_writes(Arc::clone(&log.log));
        self.log = Some(log);
        self.mark_used_ring();
    }

    /// Marks the used ring, which was written.
    #[inline]
    pub(super) fn mark_used_ring(&self) {
        if let Some(log) = &self.log {
            Self::mark_ring_in(log, self.size);
        }
    }

    #[cold]
    fn mark_ring_in(log: &QueueLog, size: u16) {
        log.log.mark(log.used_ring, used_bytes(size));
    }

    /// The 16-bit word at byte `offset` of the available ring.
    #[inline]
    fn available_word(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset & 1 == 0 && offset < ENTRIES + 2 * usize::from(self.size) + 2);
        // SAFETY: `new` placed the ring: it is aligned to 2 and, from its first byte to the end of
        // `used_event`, mapped while `self.memory` lives, and so while `&self` does. The callers' offsets
        // are even and inside (flags, index, an entry below `size`, `used_event`). This process reaches
        // the word only as an atomic.
        unsafe { AtomicU16::from_ptr(self.available.add(offset).cast().as_ptr()) }
    }

    /// The 16-bit word at byte `offset` of the used ring.
    #[inline]
    fn used_word(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset & 1 == 0 && offset < ENTRIES + 8 * usize::from(self.size) + 2);
        // SAFETY: as in `available_word`, up to the end of `avail_event`; the offsets used are flags,
        // index and `avail_event`.
        unsafe { AtomicU16::from_ptr(self.used.add(offset).cast().as_ptr()) }
    }

    fn used_event(&self) -> &AtomicU16 {
        self.available_word(ENTRIES + 2 * usize::from(self.size))
    }

    fn avail_event(&self) -> &AtomicU16 {
        self.used_word(ENTRIES + 8 * usize::from(self.size))
    }

    /// The memory the queue lives in.
    #[must_use]
    #[inline]
    pub fn memory(&self) -> &QueueMemory {
        &self.memory
    }

    /// The entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The available index of the next chain to take.
    #[must_use]
    pub fn next_available(&self) -> u16 {
        self.next_available
    }

    /// The used index as the guest sees it.
    #[must_use]
    #[inline]
    pub fn used_index(&self) -> u16 {
        self.published
    }

    /// From now on chains are taken from this available index on.
    pub fn set_next_available(&mut self, index: u16) {
        self.next_available = index;
    }

    /// Returns the number of available chains that were not taken.
    ///
    /// # Errors
    ///
    /// If the guest's index moved by more than the queue can hold.
    #[inline]
    pub fn available(&self) -> Result<u16, QueueError> {
        // Acquire: the entries and descriptors before the index are read after it.
        let found = u16::from_le(self.available_word(INDEX).load(Ordering::Acquire));
        let count = found.wrapping_sub(self.next_available);
        if count > self.size {
            return Err(QueueError::AvailableIndex {
                found,
                expected: self.next_available,
                size: self.size,
            });
        }
        Ok(count)
    }

    /// The head that is `ahead` entries after the next one to be taken.
    #[inline]
    fn head(&self, ahead: u16) -> u16 {
        let position = usize::from(self.next_available.wrapping_add(ahead) & self.mask);
        let word = self.available_word(ENTRIES + 2 * position);
        u16::from_le(word.load(Ordering::Relaxed))
    }

    /// Has parts of the chains after the next one brought nearer, `left` of which are available: the
    /// guest wrote them on another processor, and waiting for each in turn would cost more than all the
    /// rest.
    #[inline]
    pub fn prefetch(&self, left: u16) {
        let table = self.table.table;
        for (ahead, target) in [(DESCRIPTORS_AHEAD, false), (TARGETS_AHEAD, true)] {
            if ahead >= left {
                continue;
            }
            // What the entry says may change until it is taken; as a hint it need not be right.
            let head = self.head(ahead);
            if head >= self.size {
                continue;
            }
            if target {
                self.memory.prefetch_target(table, head);
            } else {
                self.memory.prefetch_descriptor(table, head);
            }
        }
    }

    /// Takes the next chain, follows it into `chain`, and returns its first descriptor's number. At most
    /// as many may be taken as [`Virtqueue::available`] said.
    ///
    /// # Errors
    ///
    /// If the chain cannot be followed to its end.
    #[inline]
    pub fn take(&mut self, chain: &mut Chain) -> Result<u16, QueueError> {
        let head = self.head(0);
        chain.follow(&self.memory, self.table, head)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(head)
    }

    /// Follows a chain again that was taken before, perhaps by another process.
    ///
    /// # Errors
    ///
    /// As for [`Virtqueue::take`].
    pub fn take_again(&self, head: u16, chain: &mut Chain) -> Result<(), QueueError> {
        chain.follow(&self.memory, self.table, head)
    }

    /// Gives a chain back, with `len` bytes written to it. The guest sees it at the next
    /// [`Virtqueue::publish`].
    #[inline]
    pub fn give_back(&mut self, head: u16, len: u32) {
        let position = usize::from(self.next_used & self.mask);
        let entry = (u64::from(len) << 32 | u64::from(head)).to_le();
        // SAFETY: `position` is below `size`, so the entry's 8 bytes are inside the used ring that `new`
        // placed. The ring is aligned to 4 only, hence the unaligned write. The guest does not look at
        // the entry before the index says so.
        unsafe {
            self.used
                .add(ENTRIES + 8 * position)
                .cast::<u64>()
                .write_unaligned(entry)
        };
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Returns the number of chains that were returned but not published.
    #[must_use]
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Lets the guest see what was given back. Returns whether it wants a notification.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return false;
        }
        // Release: status bytes and entries are visible before the index.
        if may_store() {
            self.used_word(INDEX).store(new.to_le(), Ordering::Release);
        }
        self.published = new;
        self.mark_used_ring();
        // The guest writes what it wants and then looks at the index; we write the index and then look
        // at what it wants. One of the two sees the other.
        fence(Ordering::SeqCst);
        let first = !std::mem::replace(&mut self.notified_once, true);
        if self.event_idx {
            let event = u16::from_le(self.used_event().load(Ordering::Relaxed));
            first || new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            let flags = u16::from_le(self.available_word(0).load(Ordering::Relaxed));
            flags & VRING_AVAIL_F_NO_INTERRUPT as u16 == 0
        }
    }

    /// Asks the guest to notify when it makes a chain available. Returns whether there is one already:
    /// then the notification may never come.
    ///
    /// # Errors
    ///
    /// As for [`Virtqueue::available`].
    pub fn enable_notifications(&mut self) -> Result<bool, QueueError> {
        if self.event_idx {
            self.avail_event()
                .store(self.next_available.to_le(), Ordering::Relaxed);
        } else if !self.notifications {
            self.used_word(0).store(0, Ordering::Relaxed);
        }
        self.notifications = true;
        self.mark_used_ring();
        // We say that we want to know and then look at the index; the guest writes the index and then
        // looks whether we want to know.
        fence(Ordering::SeqCst);
        Ok(self.available()? > 0)
    }

    /// Tells the guest that it need not notify.
    #[inline]
    pub fn disable_notifications(&mut self) {
        if !std::mem::replace(&mut self.notifications, false) {
            return;
        }
        if self.event_idx {
            // The index that was asked for may be the next chain's. One that the guest has passed asks for nothing.
            let passed = self.next_available.wrapping_sub(1);
            self.avail_event().store(passed.to_le(), Ordering::Relaxed);
        } else {
            let flags = VRING_USED_F_NO_NOTIFY as u16;
            self.used_word(0).store(flags.to_le(), Ordering::Relaxed);
        }
        self.mark_used_ring();
    }
}

#[cfg(test)]
impl Virtqueue {
    /// Leaves out a chain that could not be followed.
    pub(crate) fn skip_for_test(&mut self) {
        self.next_available = self.next_available.wrapping_add(1);
    }
}
