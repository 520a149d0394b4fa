//! A descriptor chain: the buffers of a request and of its answer.
//!
//! The virtio specification lets a driver split a request into buffers anywhere, so this module does not interpret the
//! bytes: a chain is some bytes to read, then some bytes to write, and the very last byte
//! to write is the block device's status.
//!
//! Invariants: following a chain takes a bounded number of steps, whatever the guest wrote.

use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use super::memory::{DESCRIPTOR_BYTES, QueueMemory, Slice};
use super::{CHAIN_MAX, ChainDefect, QueueError};

const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// A chain that was followed to its end. Kept and filled again, so that nothing is allocated per request.
#[derive(Debug, Default)]
pub struct Chain {
    segments: Vec<Slice>,
    /// So many segments at the front have been taken.
    taken: usize,
    /// So many segments at the front, those taken included, are to be read; the others to be written.
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
    defect: Option<ChainDefect>,
    /// True if the last descriptor is writable.
    ends_writable: bool,
}

/// The descriptor table of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DescriptorTable {
    pub(crate) table: Slice,
    /// The entries.
    pub(crate) size: u16,
    /// True if indirect tables were negotiated.
    pub(crate) indirect: bool,
}

impl Chain {
    pub(super) fn clear(&mut self) {
        self.segments.clear();
        self.taken = 0;
        self.readable = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
        self.defect = None;
        self.ends_writable = false;
    }

    /// Follows the chain that begins at descriptor `head`, in place of what `self` held.
    #[inline]
    pub(super) fn follow(
        &mut self,
        memory: &QueueMemory,
        descriptors: DescriptorTable,
        head: u16,
    ) -> Result<(), QueueError> {
        self.clear();
        let mut table = descriptors.table;
        let mut entries = u32::from(descriptors.size);
        let mut limit = descriptors.size.min(CHAIN_MAX);
        let mut index = head;
        let mut indirect = false;
        let mut steps = 0;
        loop {
            if u32::from(index) >= entries {
                return Err(QueueError::DescriptorIndex { index, size: entries });
            }
            if steps == limit {
                return Err(QueueError::TooLong { head, limit });
            }
            let descriptor = memory.descriptor(table, index);
            if descriptor.flags & INDIRECT != 0 {
                if indirect {
                    return Err(QueueError::IndirectNested { head });
                }
                if !descriptors.indirect {
                    return Err(QueueError::IndirectNotNegotiated { head });
                }
                if descriptor.flags & NEXT != 0 {
                    return Err(QueueError::IndirectHasNext { head });
                }
                let len = descriptor.len;
                if len == 0 || !len.is_multiple_of(DESCRIPTOR_BYTES) {
                    return Err(QueueError::IndirectLength { head, len });
                }
                let address = descriptor.address;
                let Some(found) = memory.contiguous(address, len) else {
                    return Err(QueueError::IndirectOutsideMemory { head, address });
                };
                (table, entries, limit) = (found, len / DESCRIPTOR_BYTES, CHAIN_MAX);
                (index, indirect) = (0, true);
                continue;
            }
            steps += 1;
            self.add(
                memory,
                descriptor.address,
                descriptor.len,
                descriptor.flags & WRITE != 0,
            );
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
    }

    #[inline]
    pub(super) fn add(&mut self, memory: &QueueMemory, address: u64, len: u32, writable: bool) {
        self.ends_writable = false;
        let segments = &mut self.segments;
        let result = if len == 0 {
            Err(ChainDefect::ZeroLength)
        } else if !writable && segments.len() > self.readable {
            Err(ChainDefect::ReadableAfterWritable)
        } else {
            memory.translate(address, len, |slice| segments.push(slice))
        };
        if let Err(defect) = result {
            self.defect.get_or_insert(defect);
        } else if writable {
            self.writable_bytes += u64::from(len);
            self.ends_writable = true;
        } else {
            self.readable_bytes += u64::from(len);
            self.readable = self.segments.len();
        }
    }

    /// Returns the chain's defect, if it has one.
    #[must_use]
    #[inline]
    pub fn defect(&self) -> Option<ChainDefect> {
        self.defect
    }

    /// Takes the chain's last byte, where the status goes; `None` if it cannot be written to.
    #[inline]
    pub(crate) fn take_status(&mut self) -> Option<Slice> {
        if !self.ends_writable {
            return None;
        }
        let (rest, status) = self.segments.pop()?.split_last()?;
        if rest.len() > 0 {
            self.segments.push(rest);
        }
        self.writable_bytes -= 1;
        Some(status)
    }

    /// Takes the first 16 bytes, the header, as two little-endian words; `None` if there are fewer.
    #[inline]
    pub(crate) fn take_header(&mut self, memory: &QueueMemory) -> Option<[u64; 2]> {
        let header = memory.load_16_across(self.readable(), 0)?;
        self.readable_bytes -= 16;
        let mut skip = 16;
        for segment in &mut self.segments[self.taken..self.readable] {
            if segment.len() > skip {
                *segment = segment.skip(skip);
                break;
            }
            skip -= segment.len();
            self.taken += 1;
        }
        Some(header)
    }

    /// Returns the readable bytes that are left.
    #[must_use]
    #[inline]
    pub fn readable(&self) -> &[Slice] {
        &self.segments[self.taken..self.readable]
    }

    /// Returns the number of readable bytes that are left.
    #[must_use]
    #[inline]
    pub fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// Returns the writable bytes that are left.
    #[must_use]
    #[inline]
    pub fn writable(&self) -> &[Slice] {
        &self.segments[self.readable..]
    }

    /// Returns the number of writable bytes that are left.
    #[must_use]
    #[inline]
    pub fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }
}
