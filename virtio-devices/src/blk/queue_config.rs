//! The configuration of a queue, the errors of its start, and the state that it leaves when it ends.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use block::OpenQueueError;
use vm_memory::GuestMemoryMmap;

use crate::stats::QueueStats;
use crate::virtqueue::{InflightError, InflightRegion, QueueLog, RingAddresses, SetupError};

/// The way from a queue to its guest, beside the memory that they share.
pub trait Notify {
    /// Chains were given back, and the guest wants to know.
    fn used(&self);

    /// The guest broke the queue, which has stopped. Called once at most.
    fn broken(&self);

    /// Returns true if memory was lost since the last call: what was read from it may not be what the guest wrote, and
    /// what was written to it may not reach the guest. Called before each batch of answers.
    fn is_memory_lost(&self) -> bool {
        false
    }
}

/// The final state of a queue, with which it can be started again.
#[derive(Debug, Default)]
pub struct QueueReport {
    pub(super) next_available: AtomicU16,
    pub(super) next_used: AtomicU16,
    pub(super) left: AtomicU16,
    pub(super) broken: AtomicBool,
}

impl QueueReport {
    /// The available index of the first chain that was not taken. Valid once the queue was removed.
    #[must_use]
    pub fn next_available(&self) -> u16 {
        self.next_available.load(Ordering::Acquire)
    }

    /// The used index: as many chains were given back, modulo 65536. Valid once the queue was removed.
    #[must_use]
    pub fn next_used(&self) -> u16 {
        self.next_used.load(Ordering::Acquire)
    }

    /// The number of chains that were taken, and are left in the inflight records: see [`RunningQueue::suspend`]. Valid once the queue
    /// was removed.
    ///
    /// [`RunningQueue::suspend`]: super::RunningQueue::suspend
    #[must_use]
    pub fn left(&self) -> u16 {
        self.left.load(Ordering::Acquire)
    }

    /// Returns true if the guest broke the queue.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }
}

/// An error of starting a queue.
#[derive(Debug, thiserror::Error)]
pub enum StartQueueError {
    /// The rings cannot be used.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The disk cannot be used on this worker.
    #[error(transparent)]
    Open(#[from] OpenQueueError),
    /// The inflight region of a killed server is inconsistent.
    #[error(transparent)]
    Inflight(#[from] InflightError),
}

/// The configuration of a [`BlockQueue`](super::BlockQueue).
pub struct BlockQueueConfig {
    /// The guest's memory; the queue and each of its requests keep it mapped.
    pub memory: GuestMemoryMmap,
    /// The entries: a power of two up to 32768.
    pub size: u16,
    /// The guest addresses of the rings.
    pub addresses: RingAddresses,
    /// The available index of the first chain to take, unless `inflight` knows better.
    pub next_available: u16,
    /// The inflight region, perhaps with records of a killed server.
    pub inflight: Option<InflightRegion>,
    /// The log of written guest pages, if the guest is migrating.
    pub log: Option<QueueLog>,
    /// The feature bits the driver accepted.
    pub features: u64,
    /// Notifies the guest.
    pub notify: Box<dyn Notify + Send>,
    /// True if the guest sends no kicks, so that the worker never sleeps.
    pub polled: bool,
    /// Receives the state of the queue when it ends.
    pub report: Arc<QueueReport>,
    /// Receives its statistics; no other queue may write them at the same time.
    pub stats: Arc<QueueStats>,
}

impl BlockQueueConfig {
    /// A queue of `size` entries that runs from its beginning, in a guest that kicks.
    #[must_use]
    pub fn new(
        memory: GuestMemoryMmap,
        size: u16,
        addresses: RingAddresses,
        features: u64,
        notify: Box<dyn Notify + Send>,
    ) -> Self {
        Self {
            memory,
            size,
            addresses,
            next_available: 0,
            inflight: None,
            log: None,
            features,
            notify,
            polled: false,
            report: Arc::default(),
            stats: Arc::default(),
        }
    }
}

impl fmt::Debug for BlockQueueConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockQueueConfig")
            .field("size", &self.size)
            .field("addresses", &self.addresses)
            .field("next_available", &self.next_available)
            .field("features", &format_args!("{:#x}", self.features))
            .finish_non_exhaustive()
    }
}
