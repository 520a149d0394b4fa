//! Waits of a disk that end when it is to drain: for the host's space, where that was asked for (`werror=wait`), and for
//! the tokens of a rate limit ([`crate::throttle`]).
//!
//! A write that the host has no space for is then not answered but tried again after a moment, which grows from
//! [`WAIT_MIN`] to [`WAIT_MAX`]. A wait ends early when the disk's queues are to drain: whoever drains takes a
//! [`HoldOff`], and as long as there is one nothing waits, and a write for which there is no space fails with
//! the host's error as it would without all this. A disk that closes takes one for good.
//!
//! What must stay true: only what the host refused *whole or in part* is tried again, never what it may have
//! forgotten: a failed sync is never held (see [`mod@crate::file`]).

use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::fmt;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use crate::sync::Mutex;
use crate::task::Context;

/// How long to wait before the first further try.
pub const WAIT_MIN: Duration = Duration::from_millis(50);
/// The longest wait between two tries.
pub const WAIT_MAX: Duration = Duration::from_secs(2);

/// The waits of one image or disk, shared by all its workers.
#[derive(Default)]
pub(crate) struct Holds {
    wanted: AtomicBool,
    /// How many want that nothing waits.
    off: AtomicUsize,
    /// How many have wanted it so far: who began to wait before the last of them waits no more, even if that one
    /// has what it wanted by the time the waiter looks.
    ended: AtomicU64,
    next: AtomicU64,
    waiters: Mutex<Vec<(u64, Waker)>>,
}

impl fmt::Debug for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holds")
            .field("wanted", &self.wanted)
            .field("off", &self.off)
            .field("waiting", &self.waiters.lock().len())
            .finish()
    }
}

impl Holds {
    /// From now on writes wait for space.
    pub(crate) fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }

    /// Whether writes wait for space, unless they are not to just now.
    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    fn is_off(&self) -> bool {
        self.off.load(Ordering::SeqCst) > 0
    }

    /// Ends every wait, and lets none begin until [`Holds::turn_on`].
    fn turn_off(&self) {
        self.off.fetch_add(1, Ordering::SeqCst);
        self.ended.fetch_add(1, Ordering::SeqCst);
        let waiters = std::mem::take(&mut *self.waiters.lock());
        waiters.into_iter().for_each(|(_, waker)| waker.wake());
    }

    fn turn_on(&self) {
        self.off.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits for `time`. `false`, perhaps at once, if nobody is to wait.
    pub(crate) async fn wait(&self, cx: &Context, time: Duration) -> bool {
        if !self.is_wanted() {
            return false;
        }
        let began = self.ended.load(Ordering::SeqCst);
        let is_over = || self.is_off() || self.ended.load(Ordering::SeqCst) != began;
        let mut sleep = cx.sleep(time);
        let place = Place {
            holds: self,
            number: self.next.fetch_add(1, Ordering::Relaxed),
        };
        std::future::poll_fn(|task| {
            // First a place on the list, then a look: who turns it off counts first and looks at the list then.
            place.take(task.waker());
            if is_over() {
                return Poll::Ready(false);
            }
            std::pin::Pin::new(&mut sleep)
                .poll(task)
                .map(|slept| slept.is_ok() && !is_over())
        })
        .await
    }
}

/// One waiter's place on the list.
struct Place<'a> {
    holds: &'a Holds,
    number: u64,
}

impl Place<'_> {
    fn take(&self, waker: &Waker) {
        let mut waiters = self.holds.waiters.lock();
        match waiters.iter_mut().find(|(number, _)| *number == self.number) {
            Some((_, place)) => place.clone_from(waker),
            None => waiters.push((self.number, waker.clone())),
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.holds
            .waiters
            .lock()
            .retain(|(number, _)| *number != self.number);
    }
}

/// As long as this lives, nothing of a disk waits: see [`Disk::hold_off`](crate::Disk::hold_off).
#[derive(Debug)]
#[must_use = "waits may begin again when this is dropped"]
pub struct HoldOff {
    holds: SmallVec<[Arc<Holds>; 2]>,
}

impl HoldOff {
    pub(crate) fn new(holds: Arc<Holds>) -> Self {
        holds.turn_off();
        Self {
            holds: smallvec![holds],
        }
    }

    /// This one holds off what `other` does, too.
    pub(crate) fn join(&mut self, mut other: Self) {
        self.holds.append(&mut other.holds);
    }

    /// Nothing waits from here on.
    pub fn for_good(self) {
        self.holds.iter().for_each(|holds| holds.turn_off());
    }
}

impl Drop for HoldOff {
    fn drop(&mut self) {
        self.holds.iter().for_each(|holds| holds.turn_on());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    /// Who drains may have finished before a waiter on another worker has come to look.
    #[test]
    fn a_wait_that_was_ended_is_over_though_waits_may_begin_again() {
        let cx = Context::syscalls();
        let holds = Rc::new(Holds::default());
        holds.want();
        let ended = Rc::new(Cell::new(None));
        let (inner, mine, answer) = (cx.clone(), Rc::clone(&holds), Rc::clone(&ended));
        cx.spawn(async move { answer.set(Some(mine.wait(&inner, Duration::from_secs(3600)).await)) });
        cx.run_ready();
        assert_eq!(ended.get(), None);
        holds.turn_off();
        holds.turn_on();
        cx.run_ready();
        assert_eq!(ended.get(), Some(false));
        let again = cx.block_on(holds.wait(&cx, Duration::from_millis(1)));
        assert!(again.expect("the ring turns"), "a new wait is one");
    }
}
