//! The writer of a queue's statistics: it decides whose latency is measured.
//!
//! Of all requests one in sixty-four is picked, at intervals of random length: a guest's pattern, such as a flush after each
//! write, cannot hide a kind. If it is a read or write it is measured, and stands in the histogram for all requests since the
//! last one that was picked, so that the histogram's number of a kind is an estimate of the kind's requests. Flushes,
//! discards and write-zeroes are all measured, and so is the first request after a queue was idle; each of these stands for
//! itself. Beside a sync, or a sleep and its wake-up, the clock costs nothing, and a disk that is rarely used need not wait for
//! sixty-four requests.
//!
//! A request that is not measured pays a share of one call for all that are taken together: [`Meter::pick`]. The clock is read once at
//! most for all requests that are taken together, and once for all that are answered together.

use std::sync::Arc;

use block::Context;

use super::{QueueStats, RequestKind};

/// The shortest interval from one picked request to the next. No virtqueue takes as many requests together.
const INTERVAL_MIN: u32 = 33;
/// The number of lengths of an interval, so that the mean is 64.
const INTERVALS: u32 = 63;

/// A request that is measured.
#[derive(Clone, Copy, Default)]
struct Mark {
    /// When it was taken.
    ns: u64,
    /// So many it stands for.
    weight: u64,
}

/// A queue's statistics as its worker writes them.
pub(crate) struct Meter {
    stats: Arc<QueueStats>,
    clock: Context,
    /// Requests up to the next one that is picked, that one included.
    countdown: u32,
    /// So many requests the next one that is picked stands for.
    interval: u32,
    /// The countdown to go on with, if the next request is picked because the queue was idle.
    held: Option<u32>,
    random: u32,
    /// When the requests that are taken now were taken, and when those that are answered now were answered, in
    /// nanoseconds; `None` until the clock is read.
    taken_ns: Option<u64>,
    answered_ns: Option<u64>,
    /// So many the request that was picked last stands for.
    weight: u64,
    /// By tag.
    marks: Box<[Mark]>,
}

impl Meter {
    /// Writes `stats` for a queue whose requests have `tags` tags.
    pub(crate) fn new(stats: Arc<QueueStats>, clock: Context, tags: usize) -> Self {
        Self {
            stats,
            clock,
            countdown: INTERVAL_MIN,
            interval: INTERVAL_MIN,
            held: None,
            random: 0x9E37_79B9,
            taken_ns: None,
            answered_ns: None,
            weight: 0,
            marks: vec![Mark::default(); tags].into_boxed_slice(),
        }
    }

    /// Begins to take `count` requests together. Returns the place among them of the one that is to be measured, if any.
    #[inline]
    pub(crate) fn pick(&mut self, count: usize) -> Option<usize> {
        self.taken_ns = None;
        // A queue has less than 2^32 entries.
        let count = count as u32;
        if count < self.countdown {
            self.countdown -= count;
            return None;
        }
        Some(self.pick_now(count))
    }

    #[cold]
    #[inline(never)]
    fn pick_now(&mut self, count: u32) -> usize {
        self.read_taken();
        if count > INTERVAL_MIN && self.held.is_none() {
            // More than one may be due: one stands for all of them, and for those before that no other one stood for.
            self.weight = u64::from(self.interval - self.countdown + count);
            self.interval = self.next_interval();
            self.countdown = self.interval;
            return (self.random() % count) as usize;
        }
        let place = self.countdown - 1;
        let rest = count - 1 - place;
        self.countdown = match self.held.take() {
            Some(held) => {
                self.weight = 1;
                held
            }
            None => {
                self.weight = self.interval.into();
                self.interval = self.next_interval();
                self.interval
            }
        };
        if self.countdown <= rest {
            // Not a second one of these: the one after them.
            self.interval += rest + 1 - self.countdown;
            self.countdown = rest + 1;
        }
        self.countdown -= rest;
        place as usize
    }

    /// Returns the length of another interval.
    fn next_interval(&mut self) -> u32 {
        INTERVAL_MIN + self.random() % INTERVALS
    }

    /// Returns the next number of a xorshift generator.
    fn random(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random
    }

    /// The request that was picked has this tag, and is a read or write: its latency will be measured.
    pub(crate) fn mark_picked(&mut self, tag: u16) {
        let (ns, weight) = (self.read_taken(), self.weight);
        self.marks[usize::from(tag)] = Mark { ns, weight };
    }

    /// The latency of a request that is about to be submitted will be measured, and it stands for itself.
    #[cold]
    pub(crate) fn mark(&mut self, tag: u16) {
        let ns = self.read_taken();
        self.marks[usize::from(tag)] = Mark { ns, weight: 1 };
    }

    fn read_taken(&mut self) -> u64 {
        let clock = &self.clock;
        *self.taken_ns.get_or_insert_with(|| nanoseconds(clock))
    }

    /// Counts requests that were taken.
    #[inline]
    pub(crate) fn taken(&self, count: usize) {
        self.stats.begin(count);
    }

    /// Takes the last one of these back: it was no request.
    #[cold]
    pub(crate) fn not_taken(&self) {
        self.stats.take_back();
    }

    /// The queue is idle, and its worker is about to sleep: the next request is picked.
    pub(crate) fn idle(&mut self) {
        if self.held.is_none() {
            self.held = Some(self.countdown);
            self.countdown = 1;
        }
    }

    /// Begins to answer requests together.
    #[inline]
    pub(crate) fn begin_answering(&mut self) {
        self.answered_ns = None;
    }

    /// Counts a request that was answered well.
    #[inline]
    pub(crate) fn succeed(&self, kind: RequestKind, bytes: u64) {
        self.stats.succeed(kind, bytes);
    }

    /// Counts a request that was answered with an error.
    #[cold]
    pub(crate) fn fail(&self, kind: RequestKind) {
        self.stats.fail(kind);
    }

    /// Counts the latency of a request that was marked, well answered or not.
    #[cold]
    #[inline(never)]
    pub(crate) fn measured(&mut self, tag: u16, kind: RequestKind) {
        let clock = &self.clock;
        let now = *self.answered_ns.get_or_insert_with(|| nanoseconds(clock));
        let Mark { ns, weight } = self.marks[usize::from(tag)];
        if let Some(latencies) = self.stats.latencies.get(kind as usize) {
            latencies.count(now.saturating_sub(ns), weight);
        }
    }
}

/// Reads the clock. In 584 years the number no longer fits.
fn nanoseconds(clock: &Context) -> u64 {
    clock.now().as_nanos() as u64
}
