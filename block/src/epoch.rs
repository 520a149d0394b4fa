//! Grace periods: the end of every request that could have seen an old mapping.
//!
//! A host cluster that was dropped from the mapping may still be read or written by requests that looked
//! it up before. It may be reused only once they have all ended. Each queue counts its requests in two
//! cells, chosen by the parity of the epoch in which the request began. The epoch advances only when
//! the cell that the new epoch will use is zero. A cluster dropped in epoch `e` is past grace in `e + 2`
//! ([`is_past_grace`]): in `e + 1` requests that began in `e`, before the drop, may still be in flight.
//!
//! Invariants:
//!
//! - A request takes its guard *before* it reads the mapping, and the mapping's lock orders that against the drop.
//!   Then an advance of the epoch after the drop sees the count.
//! - The drop's epoch is read under the lock in which epochs advance: an advance that has read the counts before the
//!   drop must not complete after it.
//!
//! A task that needs a dropped cluster may wait for it ([`Epochs::watch`]): the end of the last request of a cell
//! wakes it. That end looks for waiters after it has counted, and a waiter registers before it reads the counts, both
//! with a fence between. So one of the two sees the other.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use crate::canary::{Rule, broken};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use crate::sync::{CachePadded, Monitor, Mutex};

/// Returns true if a cluster dropped in epoch `dropped_in` may be reused in epoch `now`, as [`Epochs::now`] and
/// [`Epochs::advance`] returned them.
#[must_use]
pub fn is_past_grace(dropped_in: u64, now: u64) -> bool {
    let epochs = if broken(Rule::GraceEndsEarly) { 1 } else { 2 };
    dropped_in + epochs <= now
}

/// The two counts of one queue, written by its worker only, at the begin and end of each request. With another queue's
/// counts in the same cache line, each request would take the line from another CPU.
#[derive(Debug, Default)]
struct Counts {
    in_flight: [AtomicU64; 2],
}

/// The epochs of one disk, shared by its queues.
#[derive(Debug, Default)]
pub struct Epochs {
    now: AtomicU64,
    queues: Mutex<Vec<Arc<CachePadded<Counts>>>>,
    /// The number of watches; without any, a request's end does not take the lock below.
    watching: AtomicUsize,
    /// The number of ends that came while a watch existed.
    ends: Monitor<u64>,
}

/// A waiter for the advance of an epoch. Ends are counted for it until it is dropped.
#[derive(Debug)]
#[must_use = "what ends after this is dropped wakes nobody"]
pub struct Watch {
    epochs: Arc<Epochs>,
    seen: u64,
}

impl Watch {
    /// Waits until a request has ended since the watch began, or since the last wait. [`Epochs::advance`] may then
    /// succeed where it could not before.
    pub async fn ended(&mut self) {
        let before = self.seen;
        let ends = &self.epochs.ends;
        self.seen = ends.wait(|ends| (*ends != before).then_some(*ends)).await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.epochs.watching.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Epochs {
    /// Starts at epoch zero, without queues.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Returns the current epoch, to tag a drop with. Waits for an advance in progress.
    #[must_use]
    pub fn now(&self) -> u64 {
        let _queues = self.queues.lock();
        self.now.load(Ordering::Relaxed)
    }

    /// Advances as far as the requests in flight allow, at most two epochs, and returns the current epoch.
    ///
    /// [`is_past_grace`] tells if that ends the grace period of a drop.
    pub fn advance(&self) -> u64 {
        let queues = self.queues.lock();
        let mut now = self.now.load(Ordering::Relaxed);
        for _ in 0..2 {
            let next = ((now + 1) & 1) as usize;
            if queues
                .iter()
                .any(|queue| queue.in_flight[next].load(Ordering::SeqCst) != 0)
            {
                break;
            }
            now += 1;
            self.now.store(now, Ordering::SeqCst);
        }
        now
    }

    /// Starts to watch for the ends of requests. An [`Epochs::advance`] from now on sees those that ended before.
    pub fn watch(self: &Arc<Self>) -> Watch {
        self.watching.fetch_add(1, Ordering::Relaxed);
        // Before the counts are read: see the module's head.
        fence(Ordering::SeqCst);
        let seen = self.ends.with(|ends| *ends);
        Watch {
            epochs: Arc::clone(self),
            seen,
        }
    }

    /// Wakes the waiters, if any: a request has ended that may have held an epoch back, or another task has reused what
    /// they wait for.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.watching.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.ends.change(|ends| *ends += 1);
    }

    /// Adds a queue with counts of its own.
    #[must_use]
    pub fn register(self: &Arc<Self>) -> EpochQueue {
        let counts = Arc::<CachePadded<Counts>>::default();
        self.queues.lock().push(Arc::clone(&counts));
        EpochQueue {
            inner: Rc::new(Inner {
                epochs: Arc::clone(self),
                counts,
            }),
        }
    }
}

struct Inner {
    epochs: Arc<Epochs>,
    counts: Arc<CachePadded<Counts>>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EpochQueue")
            .field("counts", &self.counts)
            .finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The last guard is gone, so both counts are zero.
        self.epochs
            .queues
            .lock()
            .retain(|counts| !Arc::ptr_eq(counts, &self.counts));
    }
}

/// One queue's part in the epochs. Not `Send`: only the queue's worker counts.
#[derive(Clone, Debug)]
pub struct EpochQueue {
    inner: Rc<Inner>,
}

impl EpochQueue {
    /// Returns true if a request of this queue is in flight.
    #[must_use]
    pub fn is_entered(&self) -> bool {
        let counts = &self.inner.counts.in_flight;
        counts.iter().any(|count| count.load(Ordering::Relaxed) != 0)
    }

    /// Marks a request as in flight until the guard is dropped.
    #[must_use]
    #[inline]
    pub fn enter(&self) -> EpochGuard {
        let parity = (self.inner.epochs.now.load(Ordering::Relaxed) & 1) as usize;
        let cell = &self.inner.counts.in_flight[parity];
        // Only this thread writes the cell, so a load and a store do; the lock that the request takes
        // next publishes them.
        cell.store(cell.load(Ordering::Relaxed) + 1, Ordering::Release);
        EpochGuard {
            inner: Rc::clone(&self.inner),
            parity,
        }
    }
}

/// Guard of a request in flight. Clusters that it may have seen in the mapping are not reused while this lives.
#[derive(Debug)]
pub struct EpochGuard {
    inner: Rc<Inner>,
    parity: usize,
}

impl Drop for EpochGuard {
    #[inline]
    fn drop(&mut self) {
        let cell = &self.inner.counts.in_flight[self.parity];
        let left = cell.load(Ordering::Relaxed) - 1;
        cell.store(left, Ordering::Release);
        if left == 0 {
            self.inner.epochs.wake();
        }
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::task::{Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }

    #[test]
    fn epoch_watch_wakes_when_last_request_of_cell_ends() {
        let epochs = Epochs::new();
        let queue = epochs.register();
        let (first, last) = (queue.enter(), queue.enter());
        let dropped_in = epochs.now();
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut cx = std::task::Context::from_waker(&waker);
        let woken = || count.0.load(std::sync::atomic::Ordering::Relaxed);
        let mut watch = epochs.watch();
        assert!(!is_past_grace(dropped_in, epochs.advance()));
        let mut ended = Box::pin(watch.ended());
        assert!(ended.as_mut().poll(&mut cx).is_pending());
        drop(first);
        assert_eq!(woken(), 0, "another is in flight");
        drop(last);
        assert_eq!(woken(), 1);
        assert!(ended.as_mut().poll(&mut cx).is_ready());
        assert!(is_past_grace(dropped_in, epochs.advance()));
        drop(ended);
        assert!(
            Box::pin(watch.ended()).as_mut().poll(&mut cx).is_pending(),
            "an end counts once"
        );
        drop(watch);
        drop(queue.enter());
        assert_eq!(epochs.ends.with(|ends| *ends), 1, "nobody watches");
    }

    #[test]
    fn queues_count_in_cache_lines_of_their_own() {
        let epochs = Epochs::new();
        let queues: Vec<_> = (0..64).map(|_| epochs.register()).collect();
        let line = |cell: &AtomicU64| std::ptr::from_ref(cell).addr() / 64;
        let lines: std::collections::HashSet<_> = queues
            .iter()
            .flat_map(|queue| queue.inner.counts.in_flight.each_ref().map(line))
            .collect();
        assert_eq!(lines.len(), 64);
        // Nor is anything else of the heap in them.
        let begins = |cell: &AtomicU64| std::ptr::from_ref(cell).addr().is_multiple_of(128);
        assert!(
            queues
                .iter()
                .all(|queue| begins(&queue.inner.counts.in_flight[0]))
        );
    }

    #[test]
    fn drop_is_not_past_grace_while_older_request_runs() {
        let epochs = Epochs::new();
        let queue = epochs.register();
        let guard = queue.enter();
        let dropped_in = epochs.now();
        assert!(!is_past_grace(dropped_in, epochs.advance()));
        assert!(!is_past_grace(dropped_in, epochs.advance()));
        drop(guard);
        assert!(is_past_grace(dropped_in, epochs.advance()));
    }

    #[test]
    fn drop_is_past_grace_though_younger_request_runs() {
        let epochs = Epochs::new();
        let queue = epochs.register();
        let old = queue.enter();
        let dropped_in = epochs.now();
        epochs.advance();
        let young = queue.enter();
        drop(old);
        assert!(is_past_grace(dropped_in, epochs.advance()));
        drop(young);
    }

    #[test]
    fn dropped_queue_delays_grace_only_for_its_requests() {
        let epochs = Epochs::new();
        let queue = epochs.register();
        let guard = queue.enter();
        drop(queue);
        let dropped_in = epochs.now();
        assert!(!is_past_grace(dropped_in, epochs.advance()));
        drop(guard);
        assert!(is_past_grace(dropped_in, epochs.advance()));
    }
}
