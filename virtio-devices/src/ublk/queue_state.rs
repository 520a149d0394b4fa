//! The state that a queue shares with its device: its duty, its events and its counters.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use crate::stats::{QueueStats, Totals};

/// An event that a queue reports to its owner.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum QueueEvent {
    /// The driver has ended every tag of a queue: the device was stopped.
    Ended {
        /// The device.
        device: u32,
    },
    /// The driver sent an impossible answer. The queue continues with the requests that it has, and must be taken
    /// down.
    Broken {
        /// The device.
        device: u32,
        /// A description of the failure.
        what: String,
    },
}

/// Receives the events of a device's queues, on their workers.
pub type Events = Arc<dyn Fn(QueueEvent) + Send + Sync>;

/// Counters of a queue, or of all queues of a device.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counts {
    /// Requests answered.
    pub requests: u64,
    /// The bytes that reads and writes have moved.
    pub bytes: u64,
    /// The number of those that failed.
    pub errors: u64,
    /// Requests with data whose registered pages went to the disk.
    pub zero_copied: u64,
    /// Requests with data that was copied.
    pub copied: u64,
    /// The number of the latter that were copied because the driver could not register their pages.
    pub fallbacks: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.zero_copied += other.zero_copied;
        self.copied += other.copied;
        self.fallbacks += other.fallbacks;
    }
}

/// A queue's duty towards requests: to serve them all, or fewer and fewer before another server continues.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Duty {
    /// It serves them.
    Serve,
    /// As [`Duty::Serve`], and it counts those that are not answered.
    Finish,
    /// As [`Duty::Finish`], but what fails is kept, for the next server to try.
    FinishWell,
    /// Nothing goes to the disk any more. What comes is kept, and so is what the disk still answers.
    Keep,
}

/// The state that a queue and its owner share.
pub struct QueueState {
    /// The tags that have not ended.
    pub(super) tags: AtomicUsize,
    /// Set to let the queue go although the driver has not ended its tags.
    pub(super) abandoned: AtomicBool,
    /// A [`Duty`].
    duty: AtomicU8,
    /// Requests that are not done, if its duty is not to serve; `usize::MAX` until they are counted.
    pub(super) unfinished: AtomicUsize,
    pub(super) stats: Arc<QueueStats>,
    pub(super) zero_copied: AtomicU64,
    pub(super) copied: AtomicU64,
    pub(super) fallbacks: AtomicU64,
    events: Events,
    pub(super) device: u32,
}

impl fmt::Debug for QueueState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueState")
            .field("device", &self.device)
            .field("tags", &self.tags)
            .finish_non_exhaustive()
    }
}

impl QueueState {
    /// The state of a queue of `device` that has not begun.
    #[must_use]
    pub fn new(device: u32, events: Events) -> Arc<Self> {
        Self::with_stats(device, events, Arc::default())
    }

    /// As [`QueueState::new`], with statistics that the queue writes.
    #[must_use]
    pub fn with_stats(device: u32, events: Events, stats: Arc<QueueStats>) -> Arc<Self> {
        Arc::new(Self {
            tags: AtomicUsize::new(0),
            abandoned: AtomicBool::new(false),
            duty: AtomicU8::new(Duty::Serve as u8),
            unfinished: AtomicUsize::new(usize::MAX),
            stats,
            zero_copied: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            fallbacks: AtomicU64::new(0),
            events,
            device,
        })
    }

    /// Tags that the driver has not ended.
    #[must_use]
    pub fn tags(&self) -> usize {
        self.tags.load(Ordering::Acquire)
    }

    /// Lets the queue go without its tags' ends. Its ring must be closed then: that makes the driver end them.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    /// Gives the queue another duty. On its worker's thread the queue does nothing by the old one from then on.
    pub fn set_duty(&self, duty: Duty) {
        self.unfinished.store(usize::MAX, Ordering::Release);
        self.duty.store(duty as u8, Ordering::Release);
    }

    pub(super) fn duty(&self) -> Duty {
        match self.duty.load(Ordering::Acquire) {
            0 => Duty::Serve,
            1 => Duty::Finish,
            2 => Duty::FinishWell,
            _ => Duty::Keep,
        }
    }

    /// Returns the number of requests that the disk has or, unless they are kept, that are not committed; `None`
    /// until the queue has counted them. With another duty than to serve, it counts in each round of its worker.
    #[must_use]
    pub fn unfinished(&self) -> Option<usize> {
        Some(self.unfinished.load(Ordering::Acquire)).filter(|&count| count != usize::MAX)
    }

    /// Returns the statistics that the queue writes.
    #[must_use]
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// Returns its counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Totals {
            requests,
            bytes_moved,
            errors,
        } = self.stats.totals();
        Counts {
            requests,
            bytes: bytes_moved,
            errors,
            zero_copied: get(&self.zero_copied),
            copied: get(&self.copied),
            fallbacks: get(&self.fallbacks),
        }
    }

    pub(super) fn send_event(&self, event: QueueEvent) {
        (self.events)(event);
    }
}
