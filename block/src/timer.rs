//! Time on a worker: the current time and sleeps.
//!
//! Both come from a [`Clock`], so that a simulated world can have its own. The host's is the monotonic clock and a
//! timerfd that the worker's ring watches like any other event. An alarm ends the ring's wait. `Timers::fire`, which
//! the executor calls before it looks for tasks, wakes the sleeps that have expired.
//!
//! Invariant: while any task sleeps, the alarm is set for the earliest expiry or before it.

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

/// The sleeps of one worker, ordered by expiry.
#[derive(Debug)]
pub(crate) struct Timers {
    clock: Rc<dyn Clock>,
    sleepers: RefCell<BTreeMap<(Duration, u64), Waker>>,
    next: Cell<u64>,
    /// The time for which the alarm is set.
    armed: Cell<Option<Duration>>,
}

impl Timers {
    pub(crate) fn new(clock: Rc<dyn Clock>) -> Rc<Self> {
        Rc::new(Self {
            clock,
            sleepers: RefCell::default(),
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

    /// Wakes the sleeps that have expired.
    #[inline]
    pub(crate) fn fire(&self, ring: &Ring) {
        if !self.sleepers.borrow().is_empty() {
            self.wake(ring);
        }
    }

    #[cold]
    fn wake(&self, ring: &Ring) {
        let now = self.clock.now();
        if self.armed.get().is_some_and(|at| at <= now) {
            // It has expired, or will expire to no effect.
            self.armed.set(None);
        }
        loop {
            let mut sleepers = self.sleepers.borrow_mut();
            let Some(first) = sleepers.first_entry() else {
                return;
            };
            let at = first.key().0;
            if at > now {
                drop(sleepers);
                if let Err(error) = self.arm(ring, at) {
                    tracing::error!(%error, "a worker's alarm cannot be set");
                }
                return;
            }
            let waker = first.remove();
            drop(sleepers);
            waker.wake();
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
        let key = self.key.unwrap_or_else(|| {
            let number = self.timers.next.get();
            self.timers.next.set(number + 1);
            (self.at, number)
        });
        self.key = Some(key);
        let first = {
            let mut sleepers = self.timers.sleepers.borrow_mut();
            sleepers.insert(key, cx.waker().clone());
            sleepers.first_key_value().is_some_and(|(first, _)| *first == key)
        };
        if first && let Err(error) = self.timers.arm(&self.ring, self.at) {
            return Poll::Ready(Err(error));
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.timers.sleepers.borrow_mut().remove(&key);
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
}
