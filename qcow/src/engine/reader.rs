//! A queue's way to the metadata: a shard of their lock that is the queue's own.

use block::IoError;
use block::sync::{ReadGuard, ShardedLock, ShardedReader};

use crate::format::GuestOffset;
use crate::metadata::{Extent, Lookup, Metadata};

/// A reader of an image's mapping. Lookups of two readers write no cache line of one another.
#[derive(Debug)]
pub struct MappingReader(ShardedReader<Metadata>);

impl MappingReader {
    /// Makes a reader. Waits for the lock.
    pub(super) fn new(metadata: &ShardedLock<Metadata>) -> Self {
        Self(metadata.reader())
    }

    /// Locks the metadata to read. Returns `None` if a task is changing it, or queues are held off: the hot path does
    /// not wait.
    #[inline]
    pub(super) fn try_read(&self) -> Option<ReadGuard<'_, Metadata>> {
        self.0.try_read().filter(|metadata| !metadata.held_off)
    }

    /// Locks the metadata to read. Never keep the guard across an await.
    pub(super) fn read(&self) -> Result<ReadGuard<'_, Metadata>, IoError> {
        // Poisoned: a panic left it half-changed, and nothing in it can be trusted.
        self.0.read().map_err(|_| IoError::Corrupt)
    }

    /// Returns the offset of a guest byte in the image file, in bytes, if its mapping is cached and it has a host
    /// cluster. Never waits and does no I/O: the lookup of the fast path.
    #[must_use]
    #[inline]
    pub fn cached_host_offset(&self, guest_offset: u64) -> Option<u64> {
        host_offset(&*self.0.try_read()?, guest_offset)
    }
}

#[inline]
pub(super) fn host_offset(metadata: &Metadata, guest_offset: u64) -> Option<u64> {
    if metadata.held_off {
        return None;
    }
    match metadata.lookup(GuestOffset::new(guest_offset), 512) {
        Lookup::Found {
            extent: Extent::Data { at, .. },
            ..
        } => Some(at.bytes()),
        _ => None,
    }
}
