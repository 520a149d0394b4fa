//! Primitives for state that threads share: locks, atomics, channels, and sleeping until a descriptor is ready.
//!
//! In production they are re-exports of parking_lot's and the standard library's types. Under
//! `--cfg loom` or `--cfg shuttle` they are those of the model checker, which schedules the threads at each use.
//! Loom tries every order of small parts, as far as memory orderings allow. Shuttle tries many random orders of whole
//! workers. The tests are the `model` modules and `qcow/tests/threads.rs`; `make models` runs them.
//!
//! Invariant: every primitive that two threads use at once comes from here, or the checkers do not see it.
//! Reference counts ([`std::sync::Arc`]) and wakers are exempt.

mod padded;
mod sharded;
mod wait;

pub use padded::CachePadded;
pub use sharded::{Poisoned, ReadGuard, ShardedLock, ShardedReader, WeakLock, WriteGuard};
pub use wait::{ChangeOnDrop, Monitor, SingleFlight, WaitList};

#[cfg(not(any(loom, shuttle)))]
mod real {
    pub use parking_lot::{Mutex, MutexGuard};
    pub(super) use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub use std::sync::{atomic, mpsc};
    pub use std::thread;
}

#[cfg(loom)]
mod real {
    pub use loom::sync::atomic;
    pub use std::sync::mpsc;
    pub use std::thread;

    pub use super::modelled::Mutex;
    pub(super) use super::modelled::RwLock;
    pub(super) use loom::lazy_static;
    pub(super) use loom::sync::{Condvar, RwLock as CheckedRwLock, RwLockReadGuard, RwLockWriteGuard};
    pub use loom::sync::{Mutex as Checked, MutexGuard};
}

#[cfg(shuttle)]
mod real {
    pub use shuttle::sync::{atomic, mpsc};
    pub use shuttle::thread;

    pub use super::modelled::Mutex;
    pub(super) use super::modelled::RwLock;
    pub(super) use shuttle::lazy_static;
    pub(super) use shuttle::sync::{Condvar, RwLock as CheckedRwLock, RwLockReadGuard, RwLockWriteGuard};
    pub use shuttle::sync::{Mutex as Checked, MutexGuard};
}

pub use real::*;

#[cfg(any(loom, shuttle))]
pub(crate) mod modelled {
    #[cfg(all(test, loom))]
    use super::Condvar;
    use super::{Checked, CheckedRwLock, MutexGuard, RwLockReadGuard, RwLockWriteGuard};

    /// The model checker's mutex with the interface of parking_lot's.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(Checked<T>);

    impl<T> Mutex<T> {
        /// Makes an unlocked mutex.
        pub fn new(value: T) -> Self {
            Self(Checked::new(value))
        }

        /// Waits for the mutex and takes it.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0
                .lock()
                .unwrap_or_else(|_| panic!("a thread panicked with the lock held"))
        }
    }

    /// The model checker's reader-writer lock with the interface of parking_lot's.
    #[derive(Debug, Default)]
    pub(super) struct RwLock<T>(CheckedRwLock<T>);

    impl<T> RwLock<T> {
        pub(super) fn new(value: T) -> Self {
            Self(CheckedRwLock::new(value))
        }

        pub(super) fn read(&self) -> RwLockReadGuard<'_, T> {
            let read = self.0.read();
            read.unwrap_or_else(|_| panic!("a thread panicked with the lock held"))
        }

        pub(super) fn write(&self) -> RwLockWriteGuard<'_, T> {
            let write = self.0.write();
            write.unwrap_or_else(|_| panic!("a thread panicked with the lock held"))
        }

        pub(super) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
            self.0.try_read().ok()
        }

        pub(super) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
            self.0.try_write().ok()
        }
    }

    /// Tries every order of `model` with at most this many preemptions.
    #[cfg(all(test, loom))]
    pub(crate) fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(model);
    }

    /// Runs `future` on this thread, which sleeps between its polls. Loom fails if no thread is left to wake it.
    #[cfg(all(test, loom))]
    pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
        struct Flag(Mutex<bool>, Condvar);
        impl std::task::Wake for Flag {
            fn wake(self: std::sync::Arc<Self>) {
                *self.0.lock() = true;
                self.1.notify_one();
            }
        }
        let flag = std::sync::Arc::new(Flag(Mutex::new(false), Condvar::new()));
        let waker = std::sync::Arc::clone(&flag).into();
        let mut future = std::pin::pin!(future);
        loop {
            let polled = future.as_mut().poll(&mut std::task::Context::from_waker(&waker));
            if let std::task::Poll::Ready(output) = polled {
                return output;
            }
            let mut woken = flag.0.lock();
            while !std::mem::take(&mut *woken) {
                woken = (flag.1.wait(woken)).unwrap_or_else(|_| panic!("a waker panicked"));
            }
        }
    }
}

/// Sleeping on descriptors, in a way that a model checker sees sleepers and wake-ups.
#[cfg(any(loom, shuttle))]
pub(crate) mod park {
    use super::{Checked, Condvar};

    #[derive(Debug)]
    struct Signals {
        lock: Checked<()>,
        changed: Condvar,
    }

    super::lazy_static! {
        static ref SIGNALS: Signals = Signals { lock: Checked::new(()), changed: Condvar::new() };
    }

    /// Makes a descriptor ready, and wakes the threads that wait for one.
    pub(crate) fn signal(make_ready: impl FnOnce()) {
        let guard = SIGNALS
            .lock
            .lock()
            .unwrap_or_else(|_| panic!("a signal panicked"));
        make_ready();
        SIGNALS.changed.notify_all();
        drop(guard);
    }

    /// Sleeps until `look`, which is called after every signal, returns `Some`.
    pub(crate) fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
        let mut guard = SIGNALS
            .lock
            .lock()
            .unwrap_or_else(|_| panic!("a signal panicked"));
        loop {
            if let Some(found) = look() {
                return found;
            }
            guard = (SIGNALS.changed.wait(guard)).unwrap_or_else(|_| panic!("a signal panicked"));
        }
    }
}
