//! Syncs in place: an `fdatasync(2)` by the worker itself, where nobody else needs the worker meanwhile.
//!
//! io_uring punts every sync to a kernel thread: a thread switch there, one back, and a third runnable thread on a machine with
//! few CPUs. A worker that performs the call spares them, but serves nobody until it returns. So a worker blocks only
//!
//! - for the one request in flight of its one frontend, with no op in flight;
//! - after a run of syncs that were short and during which no request came;
//! - soon after the last of them, with few requests in between: a sync after a burst of writes is long.
//!
//! A sync in place during which a request came, or that was long, ends the run, and the next run must be twice as long.
//!
//! Invariant: only a worker's round lets a sync block ([`SyncHistory::arrived`]); other users of a context never do.

use std::cell::Cell;
use std::time::Duration;

/// The longest sync that a worker performs again. Longer ones gain little by it.
const SHORT: Duration = Duration::from_micros(500);
/// The longest time since the last sync after which its duration predicts the next one's.
const RECENT: Duration = Duration::from_millis(10);
/// The most batches of requests since the last sync after which its duration predicts the next one's.
const BATCHES_MAX: u32 = 8;
/// The bounds of the number of quiet syncs before one in place.
const RUN_MIN: u32 = 8;
const RUN_MAX: u32 = 4096;

/// The history of one worker's syncs, by which it decides if the next one blocks it.
#[derive(Debug)]
pub(crate) struct SyncHistory {
    /// The only request in flight is the only frontend's; set when requests arrive.
    alone: Cell<bool>,
    /// The number of batches of requests so far.
    batches: Cell<u32>,
    /// The batches and the time at the end of the last sync.
    last: Cell<(u32, Duration)>,
    /// The syncs in a row that were short and not disturbed, and the number of them before one in place.
    quiet: Cell<u32>,
    needed: Cell<u32>,
    /// The time that syncs in place took since it was last asked for.
    blocked: Cell<Duration>,
}

/// A sync that has begun.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct BegunSync {
    alone: bool,
    batches: u32,
    at: Duration,
    /// The worker may perform the sync itself.
    pub(crate) may_block: bool,
}

impl Default for SyncHistory {
    fn default() -> Self {
        Self {
            alone: Cell::default(),
            batches: Cell::default(),
            last: Cell::default(),
            quiet: Cell::default(),
            needed: Cell::new(RUN_MIN),
            blocked: Cell::default(),
        }
    }
}

impl SyncHistory {
    /// Records that requests were taken. `alone`: there is one frontend, with one request in flight.
    #[inline]
    pub(crate) fn arrived(&self, alone: bool) {
        self.batches.set(self.batches.get().wrapping_add(1));
        self.alone.set(alone);
    }

    /// Begins a sync at time `now`; `idle`: the worker's ring has no op in flight.
    pub(crate) fn begin(&self, idle: bool, now: Duration) -> BegunSync {
        let (last_batches, last_end) = self.last.get();
        let alone = idle && self.alone.get();
        let batches = self.batches.get();
        let is_recent = now.saturating_sub(last_end) <= RECENT;
        let are_few = batches.wrapping_sub(last_batches) <= BATCHES_MAX;
        BegunSync {
            alone,
            batches,
            at: now,
            may_block: alone && is_recent && are_few && self.quiet.get() >= self.needed.get(),
        }
    }

    /// Ends a sync at time `now`; `in_place`: the worker performed it.
    pub(crate) fn end(&self, begun: BegunSync, now: Duration, in_place: bool) {
        let batches = self.batches.get();
        self.last.set((batches, now));
        let took = now.saturating_sub(begun.at);
        if in_place {
            // Never zero, which stands for none.
            let took = took.max(Duration::from_nanos(1));
            self.blocked.set(self.blocked.get() + took);
        }
        if !begun.alone || batches != begun.batches {
            self.quiet.set(0);
        } else if took > SHORT {
            self.end_run(in_place);
        } else {
            self.quiet.set(self.quiet.get().saturating_add(1));
            if self.quiet.get() >= self.needed.get().saturating_mul(2) {
                self.needed.set(RUN_MIN);
            }
        }
    }

    /// Returns the time for which syncs in place blocked the worker since the last call.
    #[inline]
    pub(crate) fn take_blocked(&self) -> Duration {
        self.blocked.take()
    }

    /// Records that a request came during a sync in place.
    pub(crate) fn disturbed(&self) {
        self.end_run(true);
    }

    fn end_run(&self, in_place: bool) {
        self.quiet.set(0);
        if in_place {
            self.needed.set((self.needed.get() * 2).min(RUN_MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_micros(50);

    /// A worker with one frontend, whose only request at any time is a FLUSH.
    #[derive(Default)]
    struct Flushes {
        history: SyncHistory,
        now: Duration,
    }

    impl Flushes {
        /// One more, which takes `took`. Returns true if it may block.
        fn one(&mut self, took: Duration) -> bool {
            self.history.arrived(true);
            self.begun_after(took)
        }

        fn begun_after(&mut self, took: Duration) -> bool {
            let begun = self.history.begin(true, self.now);
            self.now += took;
            self.history.end(begun, self.now, begun.may_block);
            assert_eq!(!self.history.take_blocked().is_zero(), begun.may_block);
            begun.may_block
        }

        /// The number of short ones until one may block; at most `limit`.
        fn until_one_blocks(&mut self, limit: u32) -> u32 {
            (0..limit).find(|_| self.one(SOON)).unwrap_or(limit)
        }
    }

    #[test]
    fn sync_blocks_after_a_run_of_quiet_ones() {
        let mut flushes = Flushes::default();
        assert_eq!(flushes.until_one_blocks(100), RUN_MIN);
        assert!((0..100).all(|_| flushes.one(SOON)));
    }

    #[test]
    fn request_during_a_sync_in_place_doubles_the_next_run() {
        let mut flushes = Flushes::default();
        for run in [RUN_MIN, 2 * RUN_MIN, 4 * RUN_MIN] {
            assert_eq!(flushes.until_one_blocks(1000), run);
            flushes.history.arrived(false);
            flushes.history.disturbed();
        }
        for _ in 0..20 {
            flushes.history.disturbed();
        }
        assert_eq!(flushes.until_one_blocks(10_000), RUN_MAX);
        // As many in place as it took to get there make up for it.
        assert!((0..RUN_MAX).all(|_| flushes.one(SOON)));
        flushes.history.disturbed();
        assert_eq!(flushes.until_one_blocks(1000), 2 * RUN_MIN);
    }

    #[test]
    fn request_during_a_sync_on_the_ring_ends_the_run() {
        let mut flushes = Flushes::default();
        for _ in 0..RUN_MIN - 1 {
            assert!(!flushes.one(SOON));
        }
        flushes.history.arrived(true);
        let begun = flushes.history.begin(true, flushes.now);
        flushes.history.arrived(true);
        flushes.history.end(begun, flushes.now, false);
        assert_eq!(flushes.until_one_blocks(100), RUN_MIN);
    }

    #[test]
    fn long_sync_ends_the_run() {
        let mut flushes = Flushes::default();
        assert_eq!(flushes.until_one_blocks(100), RUN_MIN);
        assert!(flushes.one(SHORT));
        assert!(flushes.one(SHORT + SOON));
        assert_eq!(flushes.until_one_blocks(100), 2 * RUN_MIN);
        let mut slow = Flushes::default();
        assert!((0..100).all(|_| !slow.one(SHORT + SOON)));
    }

    #[test]
    fn sync_never_blocks_beside_other_requests_or_ops() {
        let mut flushes = Flushes::default();
        assert_eq!(flushes.until_one_blocks(100), RUN_MIN);
        flushes.history.arrived(false);
        assert!(
            !flushes.begun_after(SOON),
            "several requests, or several frontends"
        );
        assert_eq!(flushes.until_one_blocks(100), RUN_MIN);
        flushes.history.arrived(true);
        assert!(
            !flushes.history.begin(false, flushes.now).may_block,
            "an op is in flight"
        );
        assert!(flushes.history.begin(true, flushes.now).may_block);
    }

    #[test]
    fn sync_after_a_burst_or_a_pause_does_not_block() {
        let mut flushes = Flushes::default();
        assert_eq!(flushes.until_one_blocks(100), RUN_MIN);
        for _ in 0..BATCHES_MAX {
            flushes.history.arrived(true);
        }
        assert!(!flushes.one(SOON), "much may have been written");
        assert!(flushes.one(SOON));
        flushes.now += RECENT + SOON;
        assert!(!flushes.one(SOON), "others may have written much");
        assert!(flushes.one(SOON));
    }
}
