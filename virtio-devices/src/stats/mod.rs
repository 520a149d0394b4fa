//! Statistics of a disk's queues: how many requests of each kind, how many bytes, how many failed, and how long they took.
//!
//! A queue's worker writes its [`QueueStats`], and anybody may read it meanwhile. Counts are exact. Latencies are sampled: the
//! clock is read for few of the reads and writes, so that statistics are always on and cost a request a dozen instructions
//! (`docs/decisions/statistics.md`).
//!
//! ```text
//!  worker ──Meter──▶ QueueStats (one per queue) ──▶ DiskStats ──snapshot──▶ DiskSnapshot: counts, quantiles, JSON
//! ```
//!
//! Units: bytes, and nanoseconds from the taking of a request out of its queue to its answer.
//!
//! Invariants: each `QueueStats` has one writer at a time, so that counting takes no locked instruction. Counts never fall
//! while a process serves the disk, also when its guest restarts. What is read beside a running queue may be a few requests
//! old, and its parts of different moments, but no count is ever torn.

mod histogram;
mod meter;
mod snapshot;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::Op;
use parking_lot::Mutex;

use histogram::Histogram;
pub(crate) use meter::Meter;
pub use snapshot::{DiskSnapshot, KindSnapshot, Latency, LatencyBucket, QueueSnapshot};

/// The kind of a request, as statistics tell them apart.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum RequestKind {
    /// A read.
    Read = 0,
    /// A write.
    Write = 1,
    /// A flush.
    Flush = 2,
    /// A discard.
    Discard = 3,
    /// A write of zeros without data.
    WriteZeroes = 4,
    /// A question that the disk is not asked, such as that for the serial number, and a request that was refused because it makes no
    /// sense. Their latencies are not measured.
    Other = 5,
}

impl RequestKind {
    /// The kinds, in the order of their numbers.
    pub const ALL: [Self; 6] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Discard,
        Self::WriteZeroes,
        Self::Other,
    ];

    /// Returns the kind of an operation.
    #[must_use]
    #[inline]
    pub fn of(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write { .. } => Self::Write,
            Op::Flush => Self::Flush,
            Op::Discard => Self::Discard,
            Op::WriteZeroes { .. } => Self::WriteZeroes,
        }
    }

    /// Returns true if requests of this kind have data.
    #[must_use]
    #[inline]
    pub fn has_data(self) -> bool {
        self as u8 <= Self::Write as u8
    }

    /// Returns its name, as in a [`QueueSnapshot`] in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
            Self::Other => "other",
        }
    }
}

/// The counts of one kind.
#[derive(Debug, Default)]
struct Counters {
    /// Requests answered.
    requests: AtomicU64,
    /// The bytes that those which succeeded have moved, discarded or zeroed.
    bytes: AtomicU64,
    /// Those answered with an error.
    errors: AtomicU64,
}

/// Sums of all kinds.
pub(crate) struct Totals {
    pub(crate) requests: u64,
    /// Of reads and writes.
    pub(crate) bytes_moved: u64,
    pub(crate) errors: u64,
}

/// The statistics of one queue, which its worker writes.
// Two cache lines, which the processor fetches in pairs: another queue's counters are not among them.
#[derive(Default)]
#[repr(align(128))]
pub struct QueueStats {
    /// By kind.
    kinds: [Counters; RequestKind::ALL.len()],
    /// Requests taken from the queue.
    begun: AtomicU64,
    /// By kind; [`RequestKind::Other`] has none.
    latencies: [Histogram; RequestKind::ALL.len() - 1],
}

impl fmt::Debug for QueueStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueStats")
            .field("kinds", &self.kinds)
            .field("begun", &self.begun)
            .finish_non_exhaustive()
    }
}

/// Adds to a counter that no other thread writes: a load and a store do, without a locked instruction.
#[inline]
fn add(counter: &AtomicU64, count: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(count),
        Ordering::Relaxed,
    );
}

impl QueueStats {
    /// Counts requests that were taken from the queue.
    #[inline]
    fn begin(&self, count: usize) {
        add(&self.begun, count as u64);
    }

    /// Counts one request less that was taken.
    fn take_back(&self) {
        let begun = self.begun.load(Ordering::Relaxed);
        self.begun.store(begun.saturating_sub(1), Ordering::Relaxed);
    }

    /// Counts a request that succeeded.
    #[inline]
    fn succeed(&self, kind: RequestKind, bytes: u64) {
        let counters = &self.kinds[kind as usize];
        add(&counters.requests, 1);
        add(&counters.bytes, bytes);
    }

    /// Counts a request that failed.
    #[cold]
    fn fail(&self, kind: RequestKind) {
        let counters = &self.kinds[kind as usize];
        add(&counters.requests, 1);
        add(&counters.errors, 1);
    }

    /// Returns the sums of all kinds.
    pub(crate) fn totals(&self) -> Totals {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [read, write, ..] = &self.kinds;
        Totals {
            requests: self.kinds.iter().map(|kind| get(&kind.requests)).sum(),
            bytes_moved: get(&read.bytes) + get(&write.bytes),
            errors: self.kinds.iter().map(|kind| get(&kind.errors)).sum(),
        }
    }

    /// Returns what it counts now.
    #[must_use]
    pub fn snapshot(&self) -> QueueSnapshot {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut snapshot = QueueSnapshot::default();
        let mut answered = 0;
        for kind in RequestKind::ALL {
            let counters = &self.kinds[kind as usize];
            let out = snapshot.kind_mut(kind);
            out.requests = get(&counters.requests);
            out.bytes = get(&counters.bytes);
            out.errors = get(&counters.errors);
            if let Some(histogram) = self.latencies.get(kind as usize) {
                out.latency = histogram.snapshot();
            }
            answered += out.requests;
        }
        // Of a later moment than the answers, so that there are as many or more.
        snapshot.in_flight = get(&self.begun).saturating_sub(answered);
        snapshot
    }
}

/// The statistics of a disk: those of each of its queues.
#[derive(Debug, Default)]
pub struct DiskStats {
    queues: Mutex<Vec<Arc<QueueStats>>>,
}

impl DiskStats {
    /// Returns the statistics of queue number `index`. They go on when the queue is started again; two queues of the same
    /// number must not run at the same time.
    #[must_use]
    pub fn queue(&self, index: u16) -> Arc<QueueStats> {
        let mut queues = self.queues.lock();
        while queues.len() <= usize::from(index) {
            queues.push(Arc::default());
        }
        Arc::clone(&queues[usize::from(index)])
    }

    /// Returns what each queue counts now. A queue that has never run, and none with a higher number has, is missing.
    #[must_use]
    pub fn snapshot(&self) -> DiskSnapshot {
        let queues = self.queues.lock();
        DiskSnapshot {
            queues: queues.iter().map(|queue| queue.snapshot()).collect(),
        }
    }
}
