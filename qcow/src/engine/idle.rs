//! The return of dropped clusters that no guest's FLUSH comes for: an operator who looks at the file's blocks sees a
//! discard after a bounded time.
//!
//! A discard sets a timer on its worker. When it expires, a FLUSH round begins for the drops that no other round has taken.
//! If a request in flight keeps dropped clusters from being freed, another timer begins the next pass.
//!
//! Invariants:
//!
//! - A timer owns neither its queue nor the image, and a worker that ends does not wait for it.
//! - Its work is background work from before it looks whether queues are held off. So an operation that runs alone, or
//!   the close, waits for it, or it sees these and ends.

use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use block::sync::atomic::{AtomicBool, Ordering};

use super::{Queue, Shared, background, flush, reclaim};

/// The longest time that drops wait for a FLUSH.
const FLUSH_AFTER: Duration = Duration::from_secs(1);
/// The time between two passes while drops wait for requests in flight.
const PASS_AFTER: Duration = Duration::from_millis(100);

/// The timers of an image.
#[derive(Debug, Default)]
pub(super) struct Later {
    /// By [`Timer`].
    is_set: [AtomicBool; 2],
    is_stopped: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
enum Timer {
    /// For drops that no FLUSH has made durable.
    Flush,
    /// For drops that requests in flight held back.
    Pass,
}

impl Later {
    /// Sets no timer any more, and begins no work: the image closes.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
    }

    /// Returns true if the image closes, or is closed.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::SeqCst)
    }
}

/// A timer is set while this lives.
struct Due(Weak<Shared>, Timer);

impl Drop for Due {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.later.is_set[self.1 as usize].store(false, Ordering::SeqCst);
        }
    }
}

/// Begins a FLUSH round for the drops after a while, if none has taken them.
#[inline]
pub(super) fn return_later(queue: &Rc<Queue>) {
    after(queue, Timer::Flush, FLUSH_AFTER);
}

/// Begins a pass for the drops that requests in flight held back, after a while.
pub(super) fn look_again(queue: &Rc<Queue>) {
    after(queue, Timer::Pass, PASS_AFTER);
}

fn after(queue: &Rc<Queue>, timer: Timer, time: Duration) {
    let is_set = &queue.shared.later.is_set[timer as usize];
    if is_set.load(Ordering::SeqCst) || is_set.swap(true, Ordering::SeqCst) {
        return;
    }
    let due = Due(Arc::downgrade(&queue.shared), timer);
    let queue_then = Rc::downgrade(queue);
    let set = queue.cx.call_after(time, move || {
        drop(due);
        if let Some(queue) = queue_then.upgrade() {
            begin(&queue);
        }
    });
    if let Err(error) = set {
        // The next FLUSH frees them.
        let image = queue.shared.file.path().display();
        tracing::debug!(%image, %error, "no timer for discarded space");
    }
}

fn begin(queue: &Rc<Queue>) {
    background::start(queue, async |queue: Rc<Queue>| {
        let shared = &queue.shared;
        let Ok((is_held, is_dropping)) = shared
            .read()
            .map(|metadata| (metadata.held_off, !metadata.drops.is_empty()))
        else {
            return;
        };
        if shared.later.is_stopped() {
            return;
        }
        if is_held {
            // The operation that runs alone writes everything back, if it gets that far.
            return return_later(&queue);
        }
        if !is_dropping {
            return reclaim::in_background(&queue);
        }
        if let Err(error) = flush::flush(&queue).await {
            let image = shared.file.path().display();
            tracing::warn!(%image, %error, "discarded space could not be returned");
        }
    });
}
