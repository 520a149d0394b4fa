//! The executor of one worker, and the context for code that runs on it.
//!
//! `async` code runs here next to the ring. Tasks stay on their worker. A wake-up may come from any
//! thread, and reaches a sleeping worker through an eventfd that its ring watches.
//!
//! Invariant: a wake-up is never lost (`Sleeper`). The worker announces its sleep *before* its last check of the
//! queue; a waker queues *before* it checks if the worker sleeps.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

use async_task::Runnable;

use crate::buffer::BufferPool;
use crate::event::eventfd;
use crate::ring::{Ring, RingError, RingKind};
use crate::sleeper::Sleeper;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync_history::SyncHistory;
use crate::timer::{Clock, HostClock, Sleep, Timers};

/// A future that stays on the worker that made it.
pub type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The ready tasks, and the wake-up of the worker that runs them.
pub(crate) struct RunQueue {
    ready: Mutex<VecDeque<Runnable>>,
    len: AtomicUsize,
    sleeper: Sleeper,
}

impl fmt::Debug for RunQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunQueue")
            .field("ready", &self.len)
            .finish_non_exhaustive()
    }
}

impl RunQueue {
    fn schedule(&self, runnable: Runnable) {
        {
            let mut ready = self.ready.lock();
            ready.push_back(runnable);
            self.len.store(ready.len(), Ordering::SeqCst);
        }
        self.wake();
    }

    /// Wakes the worker if it sleeps or is about to.
    pub(crate) fn wake(&self) {
        self.sleeper.wake();
    }

    /// Marks the worker as about to sleep. Returns false if a task is ready after all.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.sleeper.announce();
        if self.len.load(Ordering::SeqCst) != 0 {
            self.sleeper.end();
            return false;
        }
        true
    }

    /// Returns true if the worker sleeps, or is about to, and has not been woken.
    pub(crate) fn is_sleeping(&self) -> bool {
        self.sleeper.is_sleeping()
    }

    /// Marks the worker as awake.
    pub(crate) fn end_sleep(&self) {
        self.sleeper.end();
    }

    pub(crate) fn wake_fd(&self) -> io::Result<OwnedFd> {
        self.sleeper.wake_fd()
    }
}

struct Inner {
    ring: Ring,
    timers: Rc<Timers>,
    queue: Arc<RunQueue>,
    tasks: Cell<usize>,
    background: Cell<usize>,
    pool: BufferPool,
    sync_history: SyncHistory,
    /// Spare list, so that running tasks does not hold the lock.
    batch: RefCell<VecDeque<Runnable>>,
}

/// Context of code on a worker: the ring, the executor, the buffer pool. Cheap to clone.
#[derive(Clone)]
pub struct Context {
    inner: Rc<Inner>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("ring", &self.inner.ring)
            .field("tasks", &self.inner.tasks.get())
            .finish()
    }
}

impl Context {
    /// Makes a context with a ring of its own.
    ///
    /// # Errors
    ///
    /// If the ring cannot be made, or the process has no file descriptor left.
    pub fn new(kind: RingKind, depth: u32) -> Result<Self, RingError> {
        Self::try_on(Ring::new(kind, depth)?)
    }

    /// Makes a context on an existing ring.
    ///
    /// # Errors
    ///
    /// If the process has no file descriptor left.
    pub fn try_on(ring: Ring) -> Result<Self, RingError> {
        let wake = eventfd().map_err(|source| RingError::Wake { source })?;
        Ok(Self::woken_by(wake, ring, Rc::new(HostClock::default())))
    }

    /// Makes a context on plain system calls, for image tools.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor left.
    #[must_use]
    pub fn syscalls() -> Self {
        Self::new(RingKind::Syscalls, 64).expect("the system-call driver needs nothing of the kernel")
    }

    /// Makes a context on an existing ring.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor left.
    #[must_use]
    pub fn on(ring: Ring) -> Self {
        Self::with_clock(ring, Rc::new(HostClock::default()))
    }

    /// Makes a context on an existing ring, with a clock of its own.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor left.
    #[must_use]
    pub fn with_clock(ring: Ring, clock: Rc<dyn Clock>) -> Self {
        let wake = eventfd().expect("a descriptor for the worker's wake-up");
        Self::woken_by(wake, ring, clock)
    }

    fn woken_by(wake: OwnedFd, ring: Ring, clock: Rc<dyn Clock>) -> Self {
        let queue = RunQueue {
            ready: Mutex::new(VecDeque::new()),
            len: AtomicUsize::new(0),
            sleeper: Sleeper::new(wake),
        };
        Self {
            inner: Rc::new(Inner {
                ring,
                timers: Timers::new(clock),
                queue: Arc::new(queue),
                tasks: Cell::new(0),
                background: Cell::new(0),
                pool: BufferPool::default(),
                sync_history: SyncHistory::default(),
                batch: RefCell::default(),
            }),
        }
    }

    /// Returns the worker's ring.
    #[must_use]
    #[inline]
    pub fn ring(&self) -> &Ring {
        &self.inner.ring
    }

    /// Returns the worker's buffer pool.
    #[must_use]
    pub fn pool(&self) -> &BufferPool {
        &self.inner.pool
    }

    /// Returns the number of tasks that have not ended.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.inner.tasks.get()
    }

    /// Returns the time since an instant that is the same for all workers of the process.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.inner.timers.now()
    }

    /// Returns a sleep on this worker that ends after `time`.
    pub fn sleep(&self, time: Duration) -> Sleep {
        Sleep::new(&self.inner.timers, &self.inner.ring, time)
    }

    /// Calls `call` on this worker after `time`, between two tasks. It is no task: nothing waits for it, and it is dropped
    /// uncalled with the worker. It must not own a `Context`, which would keep the worker's ring for ever.
    ///
    /// # Errors
    ///
    /// If the alarm cannot be set; then `call` is late, or never made.
    pub fn call_after(&self, time: Duration, call: impl FnOnce() + 'static) -> io::Result<()> {
        self.inner
            .timers
            .call_after(&self.inner.ring, time, Box::new(call))
    }

    pub(crate) fn timers(&self) -> &Rc<Timers> {
        &self.inner.timers
    }

    /// Returns the history of the syncs on this worker.
    #[inline]
    pub(crate) fn sync_history(&self) -> &SyncHistory {
        &self.inner.sync_history
    }

    pub(crate) fn run_queue(&self) -> &Arc<RunQueue> {
        &self.inner.queue
    }

    /// Starts a task. It runs when the worker next runs tasks, and to its end.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        // Boxed at once: a future of a request is kilobytes, and is copied at every step from here to the run queue.
        self.spawn_boxed(Box::pin(future));
    }

    /// As [`Context::spawn`]: the same code for all futures.
    fn spawn_boxed(&self, future: LocalBoxFuture<'static, ()>) {
        struct Counted(Rc<Inner>);
        impl Drop for Counted {
            fn drop(&mut self) {
                self.0.tasks.set(self.0.tasks.get() - 1);
            }
        }
        self.inner.tasks.set(self.inner.tasks.get() + 1);
        let counted = Counted(Rc::clone(&self.inner));
        let queue = Arc::clone(&self.inner.queue);
        let future = async move {
            let _counted = counted;
            future.await;
        };
        let (runnable, task) = async_task::spawn_local(future, move |runnable| queue.schedule(runnable));
        task.detach();
        runnable.schedule();
    }

    /// Starts a background task that must run to its end: [`Context::block_on`] does not return before it.
    pub fn spawn_background(&self, future: impl Future<Output = ()> + 'static) {
        struct Counted(Rc<Inner>);
        impl Drop for Counted {
            fn drop(&mut self) {
                self.0.background.set(self.0.background.get() - 1);
            }
        }
        self.inner.background.set(self.inner.background.get() + 1);
        let counted = Counted(Rc::clone(&self.inner));
        self.spawn(async move {
            let _counted = counted;
            future.await;
        });
    }

    /// Runs every ready task, including those that become ready meanwhile, up to a bound.
    /// Returns true if there were any.
    pub fn run_ready(&self) -> bool {
        self.inner.timers.fire(&self.inner.ring);
        let mut any = false;
        for _ in 0..16 {
            if self.inner.queue.len.load(Ordering::SeqCst) == 0 {
                break;
            }
            any = true;
            let mut batch = self.inner.batch.take();
            {
                let mut ready = self.inner.queue.ready.lock();
                std::mem::swap(&mut batch, &mut ready);
                self.inner.queue.len.store(0, Ordering::SeqCst);
            }
            for runnable in batch.drain(..) {
                runnable.run();
            }
            self.inner.batch.replace(batch);
        }
        any
    }

    /// Runs `future`, and every task of this context meanwhile, until `future` has its output and no background task
    /// ([`Context::spawn_background`]) is left. The context may be dropped then.
    ///
    /// # Errors
    ///
    /// If the ring has failed.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> io::Result<T> {
        let mut output = None;
        self.drive(pin!(async { output = Some(future.await) }))?;
        match output {
            Some(output) => Ok(output),
            None => unreachable!("it was driven to its end"),
        }
    }

    /// As [`Context::block_on`]: the same code for all futures.
    fn drive(&self, mut future: Pin<&mut dyn Future<Output = ()>>) -> io::Result<()> {
        struct Flag {
            woken: AtomicBool,
            queue: Arc<RunQueue>,
        }
        impl Wake for Flag {
            fn wake(self: Arc<Self>) {
                self.woken.store(true, Ordering::SeqCst);
                self.queue.wake();
            }
        }
        let flag = Arc::new(Flag {
            // Set, so that the loop begins with a poll even if an earlier wake-up was consumed.
            woken: AtomicBool::new(true),
            queue: Arc::clone(&self.inner.queue),
        });
        let waker = Waker::from(Arc::clone(&flag));
        let mut poll = || {
            let context = &mut std::task::Context::from_waker(&waker);
            future.as_mut().poll(context).is_ready()
        };
        // A watch keeps its slot of the ring until a turn. A future that is ready at once needs no watch.
        let mut is_ready = poll();
        if is_ready && self.inner.background.get() == 0 {
            return Ok(());
        }
        let _watch = self.ring().watch(self.inner.queue.wake_fd()?, u64::MAX)?;
        let mut events = Vec::new();
        loop {
            let woken = flag.woken.swap(false, Ordering::SeqCst);
            is_ready = is_ready || woken && poll();
            if is_ready && self.inner.background.get() == 0 {
                return Ok(());
            }
            let ran = self.run_ready();
            let idle = !ran && !flag.woken.load(Ordering::SeqCst);
            let sleep = idle && self.inner.queue.prepare_sleep() && !flag.woken.load(Ordering::SeqCst);
            self.ring().turn(sleep)?;
            self.inner.queue.end_sleep();
            self.ring().take_events(&mut events);
            events.clear();
        }
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;

    #[test]
    fn block_on_returns_ready_futures_any_number_of_times() {
        for kind in [RingKind::Auto, RingKind::Syscalls] {
            let cx = Context::new(kind, 16).expect("a ring");
            for number in 0..1000 {
                let answer = cx.block_on(std::future::ready(number));
                assert_eq!(answer.expect("a slot of the ring"), number);
            }
        }
    }

    #[test]
    fn wake_from_another_thread_reaches_sleeping_worker() {
        for kind in [RingKind::Auto, RingKind::Syscalls] {
            let cx = Context::new(kind, 16).expect("a ring");
            let shared = Arc::new((AtomicBool::new(false), Mutex::new(None::<Waker>)));
            let other = Arc::clone(&shared);
            let thread = std::thread::spawn(move || {
                loop {
                    let waker = other.1.lock().take();
                    if let Some(waker) = waker {
                        other.0.store(true, Ordering::SeqCst);
                        waker.wake();
                        return;
                    }
                    std::thread::yield_now();
                }
            });
            let done = Rc::new(Cell::new(false));
            let (flag, seen) = (Arc::clone(&shared), Rc::clone(&done));
            cx.spawn(async move {
                std::future::poll_fn(|cx| {
                    if flag.0.load(Ordering::SeqCst) {
                        return Poll::Ready(());
                    }
                    *flag.1.lock() = Some(cx.waker().clone());
                    Poll::Pending
                })
                .await;
                seen.set(true);
            });
            let waited = Rc::clone(&done);
            let inner = cx.clone();
            cx.block_on(std::future::poll_fn(move |cx| {
                if waited.get() {
                    return Poll::Ready(());
                }
                let waker = cx.waker().clone();
                inner.spawn(async move { waker.wake() });
                Poll::Pending
            }))
            .expect("the ring turns");
            thread.join().expect("the other thread");
            assert!(done.get());
            assert_eq!(cx.tasks(), 0);
        }
    }
}
