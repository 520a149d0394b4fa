//! Time on a worker: the current time and sleeps.
//!
//! Both come from a [`Clock`], so that a simulated world can have its own. The host's is the monotonic clock and a
//! timerfd that the worker's ring watches like any other event. An alarm ends the ring's wait. `Timers::fire`, which
//! the executor calls before it looks for tasks, wakes the sleeps that have expired.
//!
//! A call ([`Context::call_after`](crate::Context::call_after)) expires as a sleep does, but is no task: a worker does not wait
//! for it before it ends.
//!
//! Invariant: while a sleep or a call is due, the alarm is set for the earliest expiry or before it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::ring::{Ring, Watch, set_timer, timer};

/// A worker's time.
pub trait Clock: fmt::Debug {
    /// Returns the time since an instant that is the same for all workers of a process; it never goes back.
    fn now(&self) -> Duration;

    /// Makes `ring` end a wait at time `at`, or soon after. Replaces the previous alarm.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    fn wake_at(&self, ring: &Ring, at: Duration) -> io::Result<()>;
}

/// The host's monotonic clock.
#[derive(Default)]
pub struct HostClock {
    alarm: RefCell<Option<(OwnedFd, Watch)>>,
}

impl fmt::Debug for HostClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostClock")
    }
}

impl Clock for HostClock {
    fn now(&self) -> Duration {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }

    fn wake_at(&self, ring: &Ring, at: Duration) -> io::Result<()> {
        let mut alarm = self.alarm.borrow_mut();
        if alarm.is_none() {
            let fd = timer()?;
            let watch = ring.watch(fd.try_clone()?, u64::MAX)?;
            *alarm = Some((fd, watch));
        }
        let Some((fd, _)) = &*alarm else { return Ok(()) };
        // Never zero, which would disarm it.
        let left = at.saturating_sub(self.now()).max(Duration::from_nanos(1));
        set_timer(fd.as_raw_fd(), left)
    }
}

/// The effect of an expiry.
enum Due {
    /// A sleep ends.
    Wake(Waker),
    /// A function is called.
    Call(Box<dyn FnOnce()>),
}

impl fmt::Debug for Due {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wake(_) => "Wake",
            Self::Call(_) => "Call",
        })
    }
}

/// The sleeps and calls of one worker, ordered by expiry.
#[derive(Debug)]
pub(crate) struct Timers {
    clock: Rc<dyn Clock>,
    due: RefCell<BTreeMap<(Duration, u64), Due>>,
    next: Cell<u64>,
    /// The time for which the alarm is set.
    armed: Cell<Option<Duration>>,
}

impl Timers {
    pub(crate) fn new(clock: Rc<dyn Clock>) -> Rc<Self> {
        Rc::new(Self {
            clock,
            due: RefCell::default(),
            next: Cell::new(0),
            armed: Cell::new(None),
        })
    }

    /// Sets the alarm for `at`, unless it is set for that time already.
    fn arm(&self, ring: &Ring, at: Duration) -> io::Result<()> {
        if self.armed.get() == Some(at) {
            return Ok(());
        }
        self.clock.wake_at(ring, at)?;
        self.armed.set(Some(at));
        Ok(())
    }

    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Calls `call` after `time`.
    pub(crate) fn call_after(&self, ring: &Ring, time: Duration, call: Box<dyn FnOnce()>) -> io::Result<()> {
        let key = self.key(self.now() + time);
        if self.insert(key, Due::Call(call)) {
            self.arm(ring, key.0)?;
        }
        Ok(())
    }

    /// Returns the key of something that is due at `at`.
    fn key(&self, at: Duration) -> (Duration, u64) {
        let number = self.next.get();
        self.next.set(number + 1);
        (at, number)
    }

    /// Inserts something that is due. Returns true if nothing is due before it.
    fn insert(&self, key: (Duration, u64), due: Due) -> bool {
        let mut all = self.due.borrow_mut();
        let _replaced = all.insert(key, due);
        all.first_key_value().is_some_and(|(first, _)| *first == key)
    }

    /// Ends the sleeps, and makes the calls, that have expired.
    #[inline]
    pub(crate) fn fire(&self, ring: &Ring) {
        if !self.due.borrow().is_empty() {
            self.expire(ring);
        }
    }

    #[cold]
    fn expire(&self, ring: &Ring) {
        let now = self.clock.now();
        if self.armed.get().is_some_and(|at| at <= now) {
            // It has expired, or will expire to no effect.
            self.armed.set(None);
        }
        loop {
            let mut all = self.due.borrow_mut();
            let Some(first) = all.first_entry() else {
                return;
            };
            let at = first.key().0;
            if at > now {
                drop(all);
                if let Err(error) = self.arm(ring, at) {
                    tracing::error!(%error, "a worker's alarm cannot be set");
                }
                return;
            }
            let due = first.remove();
            drop(all);
            match due {
                Due::Wake(waker) => waker.wake(),
                Due::Call(call) => call(),
            }
        }
    }
}

/// A sleep. It ends at its expiry; an error means that the alarm could not be set.
#[derive(Debug)]
#[must_use = "a sleep that is not awaited does nothing"]
pub struct Sleep {
    timers: Rc<Timers>,
    ring: Ring,
    at: Duration,
    key: Option<(Duration, u64)>,
}

impl Sleep {
    pub(crate) fn new(timers: &Rc<Timers>, ring: &Ring, time: Duration) -> Self {
        Self {
            timers: Rc::clone(timers),
            ring: ring.clone(),
            at: timers.now() + time,
            key: None,
        }
    }
}

impl Future for Sleep {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.timers.now() >= self.at {
            return Poll::Ready(Ok(()));
        }
        let key = self.key.unwrap_or_else(|| self.timers.key(self.at));
        self.key = Some(key);
        let first = self.timers.insert(key, Due::Wake(cx.waker().clone()));
        if first && let Err(error) = self.timers.arm(&self.ring, self.at) {
            return Poll::Ready(Err(error));
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.timers.due.borrow_mut().remove(&key);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ring::RingKind;
    use crate::task;

    #[test]
    fn sleepers_wake_in_order_and_not_early() {
        for kind in [RingKind::IoUring, RingKind::Syscalls] {
            let cx = task::Context::new(kind, 16).expect("these tests need io_uring");
            let begin = cx.now();
            let order = Rc::new(RefCell::new(Vec::new()));
            for millis in [40, 10, 25] {
                let (inner, order) = (cx.clone(), Rc::clone(&order));
                cx.spawn(async move {
                    let time = Duration::from_millis(millis);
                    inner.sleep(time).await.expect("an alarm");
                    assert!(inner.now() >= begin + time);
                    order.borrow_mut().push(millis);
                });
            }
            // One that is given up must not keep the others from waking.
            drop(cx.sleep(Duration::from_millis(1)));
            cx.block_on(cx.sleep(Duration::from_millis(60)))
                .expect("the ring turns")
                .expect("an alarm");
            assert_eq!(*order.borrow(), [10, 25, 40]);
            assert_eq!(cx.tasks(), 0);
        }
    }

    /// A clock that stands still until its time is set, and the time of its last alarm.
    #[derive(Debug, Default)]
    pub(crate) struct Still(pub(crate) Cell<Duration>, Cell<Option<Duration>>);

    impl Clock for Still {
        fn now(&self) -> Duration {
            self.0.get()
        }

        fn wake_at(&self, _: &Ring, at: Duration) -> io::Result<()> {
            self.1.set(Some(at));
            Ok(())
        }
    }

    #[test]
    fn context_takes_time_from_its_clock() {
        let clock = Rc::new(Still::default());
        let ring = Ring::new(RingKind::Syscalls, 16).expect("no kernel support is needed");
        let cx = task::Context::with_clock(ring, Rc::clone(&clock) as Rc<dyn Clock>);
        let slept = Rc::new(Cell::new(false));
        let (inner, done) = (cx.clone(), Rc::clone(&slept));
        cx.spawn(async move {
            inner.sleep(Duration::from_secs(3600)).await.expect("an alarm");
            done.set(true);
        });
        cx.run_ready();
        assert_eq!(clock.1.get(), Some(Duration::from_secs(3600)));
        assert!(!slept.get());
        clock.0.set(Duration::from_secs(3600));
        cx.run_ready();
        assert!(slept.get());
    }

    #[test]
    fn call_is_made_when_due_and_is_no_task() {
        let clock = Rc::new(Still::default());
        let ring = Ring::new(RingKind::Syscalls, 16).expect("no kernel support is needed");
        let cx = task::Context::with_clock(ring, Rc::clone(&clock) as Rc<dyn Clock>);
        let calls = Rc::new(RefCell::new(Vec::new()));
        for seconds in [2, 1, 3] {
            let (calls, again) = (Rc::clone(&calls), cx.clone());
            cx.call_after(Duration::from_secs(seconds), move || {
                calls.borrow_mut().push(seconds);
                // A call may ask for another one.
                again
                    .call_after(Duration::from_secs(60), || ())
                    .expect("an alarm");
            })
            .expect("an alarm");
        }
        cx.run_ready();
        assert_eq!((calls.borrow().len(), cx.tasks()), (0, 0));
        assert_eq!(clock.1.get(), Some(Duration::from_secs(1)));
        clock.0.set(Duration::from_secs(2));
        cx.run_ready();
        assert_eq!(*calls.borrow(), [1, 2]);
        assert_eq!(clock.1.get(), Some(Duration::from_secs(3)));
    }
}
