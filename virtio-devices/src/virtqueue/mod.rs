//! The split virtqueue, made for speed and for hostile guests.
//!
//! Ring addresses are checked and translated once, when the queue starts; descriptors are read once,
//! checked, and turned into slices of guest memory; used entries of a round are published together with
//! at most one notification. Nothing is allocated per request. Spec: virtio 1.2, 2.7.
//!
//! Invariants:
//! - each word a guest could change is read once, and only the copy is used;
//! - no access leaves the memory map the queue was started with, which the queue holds;
//! - after asking for notifications the available ring is looked at once more.

mod chain;
mod dirty_log;
mod inflight;
mod memory;
mod ring;
#[cfg(feature = "virtio-queue")]
mod rust_vmm;
#[cfg(test)]
pub(crate) mod tests;

pub use chain::Chain;
pub use dirty_log::{DirtyLog, QueueLog};
pub(crate) use inflight::InflightQueue;
pub use inflight::{InflightError, InflightRegion};
pub use memory::{QueueMemory, Slice};
pub(crate) use ring::used_bytes;
pub use ring::{QueueSetup, RingAddresses, Virtqueue};

/// The rings that block queues are served from.
#[cfg(not(feature = "virtio-queue"))]
pub(crate) use ring::Virtqueue as ServedQueue;
#[cfg(feature = "virtio-queue")]
pub(crate) use rust_vmm::Virtqueue as ServedQueue;

/// The longest chain that is followed, in descriptors: no I/O takes more memory ranges at once, and it is
/// QEMU's limit too.
pub const CHAIN_MAX: u16 = 1024;

/// A queue that cannot be started.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SetupError {
    /// The number of entries cannot be a split queue's.
    #[error("queue size is {size}; expected a power of two up to 32768")]
    Size {
        /// The size asked for.
        size: u32,
    },
    /// A part of the queue is not where it may be.
    #[error("the {part} at {address:#x} is not a multiple of {align} bytes")]
    Misaligned {
        /// The part.
        part: &'static str,
        /// Its guest address.
        address: u64,
        /// The alignment it needs, in bytes.
        align: u64,
    },
    /// A part of the queue is not inside one region of guest memory.
    #[error("the {part} at {address:#x}, {len} bytes, is not inside guest memory")]
    OutsideMemory {
        /// The part.
        part: &'static str,
        /// Its guest address.
        address: u64,
        /// Its length in bytes.
        len: u64,
    },
}

/// A guest's mistake that breaks its queue, because what follows cannot be known or answered.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum QueueError {
    /// A page of the guest's memory is gone.
    #[error(
        "guest memory is gone (SIGBUS): it failed, or the client truncated it; requests may have read zeros instead"
    )]
    MemoryLost,
    /// The available index moved by more entries than the queue has.
    #[error("the available index jumped from {expected} to {found} in a queue of {size}")]
    AvailableIndex {
        /// The index in the ring.
        found: u16,
        /// The next entry to be taken.
        expected: u16,
        /// The queue's entries.
        size: u16,
    },
    /// A descriptor number is not in its table.
    #[error("descriptor {index} is not in a table of {size}")]
    DescriptorIndex {
        /// The number.
        index: u16,
        /// The table's entries.
        size: u32,
    },
    /// A chain is longer than it may be, perhaps endless.
    #[error("the chain at {head} has more than {limit} descriptors")]
    TooLong {
        /// The first descriptor.
        head: u16,
        /// The most it may have.
        limit: u16,
    },
    /// An indirect table although the feature was not negotiated.
    #[error("the chain at {head} uses an indirect table, which was not negotiated")]
    IndirectNotNegotiated {
        /// The first descriptor.
        head: u16,
    },
    /// An indirect table in an indirect table.
    #[error("the chain at {head} has an indirect table in an indirect table")]
    IndirectNested {
        /// The first descriptor.
        head: u16,
    },
    /// An indirect descriptor that has a successor.
    #[error("the chain at {head} continues after an indirect table")]
    IndirectHasNext {
        /// The first descriptor.
        head: u16,
    },
    /// An indirect table that is empty or holds part of a descriptor.
    #[error("the chain at {head} has an indirect table of {len} bytes")]
    IndirectLength {
        /// The first descriptor.
        head: u16,
        /// The table's length in bytes.
        len: u32,
    },
    /// An indirect table outside memory.
    #[error("the chain at {head} has an indirect table at {address:#x}, outside guest memory")]
    IndirectOutsideMemory {
        /// The first descriptor.
        head: u16,
        /// The table's address.
        address: u64,
    },
    /// There is nowhere to put an answer.
    #[error("the chain at {head} has no writable status byte ({})", reason(*defect))]
    NoStatus {
        /// The first descriptor.
        head: u16,
        /// Another defect of the chain.
        defect: Option<ChainDefect>,
    },
    /// A chain was made available again before it was used.
    #[error("the chain at {head} was made available again while in flight")]
    HeadInFlight {
        /// The first descriptor.
        head: u16,
    },
}

/// A defect of a chain whose end is known, so that it can still be answered with an error.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ChainDefect {
    /// A buffer outside memory.
    #[error("{len} bytes at {address:#x} are outside guest memory")]
    OutsideMemory {
        /// The guest address.
        address: u64,
        /// The length in bytes.
        len: u32,
    },
    /// A buffer of no bytes.
    #[error("a buffer is empty")]
    ZeroLength,
    /// A buffer to read from after one to write to.
    #[error("a readable buffer follows a writable one")]
    ReadableAfterWritable,
}

fn reason(defect: Option<ChainDefect>) -> String {
    defect.map_or_else(|| "it is not writable".to_owned(), |defect| defect.to_string())
}
