//! Delays of a disk's requests that a drain ends: waits for the host's space, if configured (`werror=wait`), and for
//! the tokens of a rate limit ([`crate::throttle`]).
//!
//! A write that the host has no space for is then not answered but retried after a delay, which grows from
//! [`RETRY_MIN`] to [`RETRY_MAX`]. To drain a disk's queues, the caller takes a [`HoldOff`]. While one exists nothing
//! waits, and a write without space fails with the host's error. A disk that closes takes one for good.
//!
//! Invariant: only operations that the host refused *whole or in part* are retried, never those whose data it may
//! have lost: a failed sync is never held (see [`mod@crate::file`]).

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use crate::sync::Monitor;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::task::Context;

/// The delay before the first retry.
pub const RETRY_MIN: Duration = Duration::from_millis(50);
/// The longest delay between two tries.
pub const RETRY_MAX: Duration = Duration::from_secs(2);

/// The delays of one image or disk, shared by all its workers.
#[derive(Debug, Default)]
pub(crate) struct Delays {
    wanted: AtomicBool,
    off: Monitor<Off>,
}

#[derive(Debug, Default)]
struct Off {
    /// The number of live [`HoldOff`]s, and of those made permanent.
    holders: usize,
    /// The number of hold-offs so far. A wait that began before the last of them is over, even if that one has
    /// been dropped by the time the waiter looks.
    ended: u64,
}

/// The beginning of a wait: the number of hold-offs before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beginning(u64);

impl Off {
    /// Returns true if a wait is over that began when `ended` was `began`.
    fn ends(&self, began: u64) -> bool {
        self.holders > 0 || self.ended != began
    }
}

impl Delays {
    /// Lets writes wait for space from now on.
    pub(crate) fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }

    /// Returns true if writes are to wait for space when no hold-off is in effect.
    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Ends every wait, and lets none begin until [`Delays::turn_on`].
    fn turn_off(&self) {
        self.off.change(|off| {
            off.holders += 1;
            off.ended += 1;
        });
    }

    fn turn_on(&self) {
        self.off.with(|off| off.holders -= 1);
    }

    /// Waits for `time`. Returns false, perhaps at once, if waits are not wanted or have been ended, or if the timer
    /// fails.
    pub(crate) async fn wait(&self, cx: &Context, time: Duration) -> bool {
        self.wait_from(self.begin(), cx, time).await
    }

    /// Returns the beginning of a wait, for [`Delays::wait_from`]: taken before what decides how long it is to be.
    pub(crate) fn begin(&self) -> Beginning {
        Beginning(self.off.with(|off| off.ended))
    }

    /// As [`Delays::wait`], of a wait that has begun before: it is over also if it was ended since.
    pub(crate) async fn wait_from(&self, Beginning(began): Beginning, cx: &Context, time: Duration) -> bool {
        if !self.is_wanted() {
            return false;
        }
        let mut over = pin!(self.off.wait(|off| off.ends(began).then_some(())));
        let mut sleep = cx.sleep(time);
        poll_fn(|task| {
            if over.as_mut().poll(task).is_ready() {
                return Poll::Ready(false);
            }
            let slept = Pin::new(&mut sleep).poll(task);
            slept.map(|slept| slept.is_ok() && !self.off.with(|off| off.ends(began)))
        })
        .await
    }
}

/// Guard: while it lives, no request of a disk waits. See [`Disk::hold_off`](crate::Disk::hold_off).
#[derive(Debug)]
#[must_use = "waits may begin again when this is dropped"]
pub struct HoldOff {
    delays: SmallVec<[Arc<Delays>; 2]>,
}

impl HoldOff {
    pub(crate) fn new(delays: Arc<Delays>) -> Self {
        delays.turn_off();
        Self {
            delays: smallvec![delays],
        }
    }

    /// Adds the waits that `other` holds off to this one.
    pub fn join(&mut self, mut other: Self) {
        self.delays.append(&mut other.delays);
    }

    /// Makes the hold-off permanent.
    pub fn for_good(self) {
        self.delays.iter().for_each(|delays| delays.turn_off());
    }
}

impl Drop for HoldOff {
    fn drop(&mut self) {
        self.delays.iter().for_each(|delays| delays.turn_on());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    /// A drain may end before a waiter on another worker is polled.
    #[test]
    fn delay_wait_stays_ended_after_turn_on() {
        let cx = Context::syscalls();
        let delays = Rc::new(Delays::default());
        delays.want();
        let ended = Rc::new(Cell::new(None));
        let (inner, mine, answer) = (cx.clone(), Rc::clone(&delays), Rc::clone(&ended));
        cx.spawn(async move { answer.set(Some(mine.wait(&inner, Duration::from_secs(3600)).await)) });
        cx.run_ready();
        assert_eq!(ended.get(), None);
        delays.turn_off();
        delays.turn_on();
        cx.run_ready();
        assert_eq!(ended.get(), Some(false));
        let again = cx.block_on(delays.wait(&cx, Duration::from_millis(1)));
        assert!(again.expect("the ring turns"), "a new wait is one");
        assert_eq!(
            delays.off.waiting(),
            0,
            "a wait that is over leaves nothing behind"
        );
    }
}
