//! Grace periods: when has every request that could have seen an old mapping ended?
//!
//! A host cluster that was dropped from the mapping may still be read or written by requests that looked
//! it up before. It may be reused only once they have all ended. Each queue counts its requests in two
//! cells, chosen by the parity of the epoch in which the request began; the epoch moves on only when
//! the cell that the new epoch will use has emptied. Something dropped in epoch `e` is past grace in `e + 2`
//! ([`is_past_grace`]): in `e + 1` requests that began in `e`, before the drop, may still be in flight.
//!
//! What must stay true: a request takes its guard *before* it looks at the mapping, and the mapping's
//! lock orders that against the drop. Then whoever advances the epoch after the drop sees the count. The drop's
//! epoch is read under the lock in which epochs advance: an advance that has looked at the counts before the drop
//! must not move on after it.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use crate::canary::{Rule, broken};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Returns true if what was dropped in epoch `dropped_in` may be reused in epoch `now`, as [`Epochs::now`] and
/// [`Epochs::advance`] returned them.
#[must_use]
pub fn is_past_grace(dropped_in: u64, now: u64) -> bool {
    let epochs = if broken(Rule::GraceEndsEarly) { 1 } else { 2 };
    dropped_in + epochs <= now
}

/// The two counts of one queue, written by its worker only.
#[derive(Debug, Default)]
struct Counts {
    in_flight: [AtomicU64; 2],
}

/// The epochs of one disk, shared by its queues.
#[derive(Debug, Default)]
pub struct Epochs {
    now: AtomicU64,
    queues: Mutex<Vec<Arc<Counts>>>,
}

impl Epochs {
    /// Epoch zero, without queues.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// The current epoch, to tag a drop with. Waits for an advance that is under way.
    #[must_use]
    pub fn now(&self) -> u64 {
        let _queues = self.queues.lock();
        self.now.load(Ordering::Relaxed)
    }

    /// Moves on as far as the requests in flight allow, at most two epochs, and returns the epoch now.
    ///
    /// [`is_past_grace`] says what that means for a drop.
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

    /// A queue's own counts.
    #[must_use]
    pub fn register(self: &Arc<Self>) -> EpochQueue {
        let counts = Arc::new(Counts::default());
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
    counts: Arc<Counts>,
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

/// A request in flight. What it may have seen in the mapping is not reused while this lives.
#[derive(Debug)]
pub struct EpochGuard {
    inner: Rc<Inner>,
    parity: usize,
}

impl Drop for EpochGuard {
    #[inline]
    fn drop(&mut self) {
        let cell = &self.inner.counts.in_flight[self.parity];
        cell.store(cell.load(Ordering::Relaxed) - 1, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drop_is_not_past_grace_while_an_older_request_is_in_flight() {
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
    fn requests_that_began_after_the_drop_do_not_hold_it_back_for_ever() {
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
    fn a_queue_that_is_gone_holds_nothing_back() {
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
