//! The rings of the crate `virtio-queue` with the interface of [`super::Virtqueue`], for the benchmark that compares the two
//! behind one block queue ([decision](../../../docs/decisions/virtqueue.md)).
//!
//! The comparison favours `virtio-queue`: it takes, follows, gives back and notifies, and a queue of ours does beside it what it
//! has no interface for: translating buffers to a [`block::Buffer`], prefetching, and following a chain by its head.

use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::GuestMemoryMmap;

use super::chain::Chain;
use super::memory::QueueMemory;
use super::{QueueError, QueueLog, QueueSetup, SetupError};

/// A split virtqueue of `virtio-queue`.
#[derive(Debug)]
pub(crate) struct Virtqueue {
    map: GuestMemoryMmap,
    queue: Queue,
    /// Takes no chain and gives none back.
    ours: super::ring::Virtqueue,
    /// The used index at the last [`Virtqueue::publish`]. The guest sees each entry at once.
    published: u16,
}

impl Virtqueue {
    pub(crate) fn new(map: GuestMemoryMmap, setup: &QueueSetup) -> Result<Self, SetupError> {
        // Refuses what ours refuses, in its words.
        let ours = super::ring::Virtqueue::new(map.clone(), setup)?;
        let published = ours.used_index();
        let refused = SetupError::Size {
            size: setup.size.into(),
        };
        let state = QueueState {
            max_size: 1 << 15,
            next_avail: setup.next_available,
            next_used: published,
            event_idx_enabled: setup.event_idx,
            size: setup.size,
            ready: true,
            desc_table: setup.addresses.descriptors,
            avail_ring: setup.addresses.available,
            used_ring: setup.addresses.used,
        };
        let mut queue = Self {
            map,
            ours,
            queue: Queue::try_from(state).map_err(|_| refused)?,
            published,
        };
        queue.disable_notifications();
        Ok(queue)
    }

    pub(crate) fn log_writes(&mut self, log: QueueLog) {
        self.ours.log_writes(log);
    }

    #[inline]
    pub(crate) fn memory(&self) -> &QueueMemory {
        self.ours.memory()
    }

    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    pub(crate) fn next_available(&self) -> u16 {
        self.queue.next_avail()
    }

    #[inline]
    pub(crate) fn used_index(&self) -> u16 {
        self.published
    }

    pub(crate) fn set_next_available(&mut self, index: u16) {
        self.queue.set_next_avail(index);
    }

    #[inline]
    pub(crate) fn available(&self) -> Result<u16, QueueError> {
        let (expected, size) = (self.queue.next_avail(), self.queue.size());
        let found = self.queue.avail_idx(&self.map, Ordering::Acquire);
        let found = found.map_err(|_| QueueError::MemoryLost)?.0;
        let count = found.wrapping_sub(expected);
        if count > size {
            return Err(QueueError::AvailableIndex {
                found,
                expected,
                size,
            });
        }
        Ok(count)
    }

    #[inline]
    pub(crate) fn prefetch(&mut self, left: u16) {
        self.ours.set_next_available(self.queue.next_avail());
        self.ours.prefetch(left);
    }

    #[inline]
    pub(crate) fn take(&mut self, chain: &mut Chain) -> Result<u16, QueueError> {
        let mut iter = self.queue.iter(&self.map).map_err(|_| QueueError::MemoryLost)?;
        let followed = iter.next().ok_or(QueueError::MemoryLost)?;
        let head = followed.head_index();
        chain.clear();
        let mut ended = false;
        for descriptor in followed {
            let (address, len) = (descriptor.addr().0, descriptor.len());
            chain.add(self.ours.memory(), address, len, descriptor.is_write_only());
            ended = !descriptor.has_next();
        }
        if ended {
            return Ok(head);
        }
        // It does not say why.
        self.queue.go_to_previous_position();
        let limit = self.queue.size();
        Err(QueueError::TooLong { head, limit })
    }

    pub(crate) fn take_again(&self, head: u16, chain: &mut Chain) -> Result<(), QueueError> {
        self.ours.take_again(head, chain)
    }

    #[inline]
    pub(crate) fn give_back(&mut self, head: u16, len: u32) {
        let added = self.queue.add_used(&self.map, head, len);
        debug_assert!(added.is_ok(), "{added:?}");
    }

    #[inline]
    pub(crate) fn unpublished(&self) -> u16 {
        self.queue.next_used().wrapping_sub(self.published)
    }

    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        if self.unpublished() == 0 {
            return false;
        }
        self.published = self.queue.next_used();
        self.ours.mark_used_ring();
        self.queue.needs_notification(&self.map).unwrap_or(true)
    }

    pub(crate) fn enable_notifications(&mut self) -> Result<bool, QueueError> {
        let enabled = self.queue.enable_notification(&self.map);
        enabled.map_err(|_| QueueError::MemoryLost)?;
        self.ours.mark_used_ring();
        Ok(self.available()? > 0)
    }

    #[inline]
    pub(crate) fn disable_notifications(&mut self) {
        let disabled = self.queue.disable_notification(&self.map);
        debug_assert!(disabled.is_ok(), "{disabled:?}");
        self.ours.mark_used_ring();
    }
}
