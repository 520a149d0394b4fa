//! A reader-writer lock whose readers write no cache line of one another.
//!
//! ```text
//!  ShardedReader ──▶ shard ─┐           a reader locks its own shard
//!  ShardedReader ──▶ shard ─┼─▶ value
//!  ShardedLock ──▶ every shard ─┘       a writer locks them all, the first one first
//! ```
//!
//! Each queue has a [`ShardedReader`]. A new one takes a shard that no other reader has, or adds one. So a lock has as
//! many shards as it ever had readers at a time, at most 16, and a writer locks no more than these.
//! Callers without a reader of their own read through the first shard.
//!
//! A panic of a writer poisons the lock for good: the value may be half-changed.
//!
//! Invariants:
//!
//! - The shards are a list that only grows, under all their locks. So a writer that has reached the end holds them all.
//! - Writers lock the shards in the order of the list, so that two of them do not wait for each other.
//! - Whoever waits for a shard of this lock holds no shard for reading.

#![expect(
    unsafe_code,
    reason = "the shards' locks, not the value's own, say who may reach it"
)]

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock, Weak};

use smallvec::SmallVec;

use super::{CachePadded, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The most shards of a lock. With more readers some share one: a writer locks all shards one after the other, and
/// everybody waits for that.
const SHARDS_MAX: usize = 16;

/// A writer panicked, and the value may be half-changed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Poisoned;

/// The part of a lock that one reader locks; a cache line of its own, and the one that is prefetched with it.
type Shard = CachePadded<Links>;

struct Links {
    /// Locked by readers and writers; true once a writer has panicked.
    is_poisoned: RwLock<bool>,
    next: OnceLock<Arc<Shard>>,
}

impl Links {
    fn new(is_poisoned: bool) -> Arc<Shard> {
        Arc::new(CachePadded::new(Self {
            is_poisoned: RwLock::new(is_poisoned),
            next: OnceLock::new(),
        }))
    }
}

/// The locks of all shards, in the order of the list.
type AllShards<'a> = SmallVec<[RwLockWriteGuard<'a, bool>; SHARDS_MAX]>;

struct Inner<T> {
    first: Arc<Shard>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a `ReadGuard` by several threads at once (`T: Sync`), and through a `WriteGuard`,
// which may move it out, by one thread at a time (`T: Send`). The guards exclude each other: see there.
unsafe impl<T: Send + Sync> Sync for Inner<T> {}

impl<T> Inner<T> {
    /// Returns the shards in order, for a caller that has locked them all.
    fn shards(&self) -> impl Iterator<Item = &Arc<Shard>> {
        std::iter::successors(Some(&self.first), |shard| shard.next.get())
    }

    fn lock_all(&self) -> AllShards<'_> {
        let mut locked = AllShards::new();
        let mut next = Some(&self.first);
        while let Some(shard) = next {
            locked.push(shard.is_poisoned.write());
            // Under the lock: whoever held it until now may have added a shard.
            next = shard.next.get();
        }
        locked
    }

    fn try_lock_all(&self) -> Option<AllShards<'_>> {
        let mut locked = AllShards::new();
        let mut next = Some(&self.first);
        while let Some(shard) = next {
            locked.push(shard.is_poisoned.try_write()?);
            next = shard.next.get();
        }
        Some(locked)
    }

    fn write_guard<'a>(&'a self, shards: AllShards<'a>) -> Result<WriteGuard<'a, T>, Poisoned> {
        let is_poisoned = shards.first().is_none_or(|first| **first);
        let guard = WriteGuard {
            lock: self,
            shards,
            was_panicking: std::thread::panicking(),
        };
        if is_poisoned { Err(Poisoned) } else { Ok(guard) }
    }

    fn read_guard<'a>(&'a self, shard: RwLockReadGuard<'a, bool>) -> Result<ReadGuard<'a, T>, Poisoned> {
        if *shard {
            return Err(Poisoned);
        }
        Ok(ReadGuard {
            lock: self,
            _shard: shard,
        })
    }
}

/// A reader-writer lock for a value that is read far more often than it is changed.
pub struct ShardedLock<T> {
    inner: Arc<Inner<T>>,
}

impl<T> ShardedLock<T> {
    /// Makes an unlocked lock with one shard.
    pub fn new(value: T) -> Self {
        Self {
            inner: Arc::new(Inner {
                first: Links::new(false),
                value: UnsafeCell::new(value),
            }),
        }
    }

    /// Makes a reader on the shard that fewest others use, or on a new one. Waits for readers and writers, so the caller
    /// must not hold a guard.
    #[must_use]
    pub fn reader(&self) -> ShardedReader<T> {
        let locked = self.inner.lock_all();
        // The list has one share of each. Readers that go meanwhile are counted, which at worst adds a shard.
        let fewest = self.inner.shards().min_by_key(|shard| Arc::strong_count(shard));
        let free = fewest.filter(|shard| Arc::strong_count(shard) == 1 || locked.len() == SHARDS_MAX);
        let shard = free.cloned().unwrap_or_else(|| {
            let new = Links::new(locked.first().is_some_and(|first| **first));
            let last = self.inner.shards().last().unwrap_or(&self.inner.first);
            Arc::clone(last.next.get_or_init(|| new))
        });
        ShardedReader {
            shard,
            inner: Arc::clone(&self.inner),
        }
    }

    /// Returns a handle that does not keep the value.
    #[must_use]
    pub fn downgrade(&self) -> WeakLock<T> {
        WeakLock(Arc::downgrade(&self.inner))
    }

    /// Waits until no writer has the lock, and reads through the first shard.
    ///
    /// # Errors
    ///
    /// If a writer has panicked.
    pub fn read(&self) -> Result<ReadGuard<'_, T>, Poisoned> {
        self.inner.read_guard(self.inner.first.is_poisoned.read())
    }

    /// Reads through the first shard, unless a writer has the lock or has panicked.
    #[must_use]
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        let shard = self.inner.first.is_poisoned.try_read()?;
        self.inner.read_guard(shard).ok()
    }

    /// Waits until nobody else has the lock.
    ///
    /// # Errors
    ///
    /// If a writer has panicked.
    pub fn write(&self) -> Result<WriteGuard<'_, T>, Poisoned> {
        self.inner.write_guard(self.inner.lock_all())
    }

    /// Locks to change the value, unless somebody has the lock or a writer has panicked.
    #[must_use]
    pub fn try_write(&self) -> Option<WriteGuard<'_, T>> {
        self.inner.write_guard(self.inner.try_lock_all()?).ok()
    }
}

impl<T> fmt::Debug for ShardedLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedLock").finish_non_exhaustive()
    }
}

/// A handle of a [`ShardedLock`] whose value may be gone.
pub struct WeakLock<T>(Weak<Inner<T>>);

impl<T> WeakLock<T> {
    /// Returns the lock, unless the value is gone.
    #[must_use]
    pub fn upgrade(&self) -> Option<ShardedLock<T>> {
        let inner = self.0.upgrade()?;
        Some(ShardedLock { inner })
    }

    /// Returns true if it is a handle of this lock.
    #[must_use]
    pub fn is_of(&self, lock: &ShardedLock<T>) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&lock.inner))
    }

    /// Returns true if the value is gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl<T> fmt::Debug for WeakLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakLock").finish_non_exhaustive()
    }
}

/// One queue's way to the value. It should have one thread only, as two would share its shard's cache line.
pub struct ShardedReader<T> {
    /// One of the lock's list.
    shard: Arc<Shard>,
    inner: Arc<Inner<T>>,
}

impl<T> ShardedReader<T> {
    /// Reads, unless a writer has the lock or has panicked.
    #[inline]
    #[must_use]
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        self.inner.read_guard(self.shard.is_poisoned.try_read()?).ok()
    }

    /// Waits until no writer has the lock.
    ///
    /// # Errors
    ///
    /// If a writer has panicked.
    pub fn read(&self) -> Result<ReadGuard<'_, T>, Poisoned> {
        self.inner.read_guard(self.shard.is_poisoned.read())
    }
}

impl<T> fmt::Debug for ShardedReader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedReader").finish_non_exhaustive()
    }
}

/// The value, which nobody changes while this lives.
#[must_use = "the value is unlocked at once"]
pub struct ReadGuard<'a, T> {
    lock: &'a Inner<T>,
    /// A shard of `lock`.
    _shard: RwLockReadGuard<'a, bool>,
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: a shard of the lock is locked for reading as long as `self` lives, and a `WriteGuard` has them all.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> fmt::Debug for ReadGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadGuard").finish_non_exhaustive()
    }
}

/// The value, which nobody else reaches while this lives.
#[must_use = "the value is unlocked at once"]
pub struct WriteGuard<'a, T> {
    lock: &'a Inner<T>,
    /// Every shard of `lock`.
    shards: AllShards<'a>,
    /// The thread was panicking when it took the lock, so that its panic says nothing about the value.
    was_panicking: bool,
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: every shard of the lock is locked for writing as long as `self` lives: no other guard exists.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: every shard of the lock is locked for writing as long as `self` lives, so no other guard exists, and
        // `self` is borrowed for as long as the reference lives.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        if !self.was_panicking && std::thread::panicking() {
            self.shards
                .iter_mut()
                .for_each(|is_poisoned| **is_poisoned = true);
        }
        // The first one last: the next writer waits there, and finds the others free.
        while self.shards.pop().is_some() {}
    }
}

impl<T> fmt::Debug for WriteGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteGuard").finish_non_exhaustive()
    }
}

#[cfg(all(test, any(loom, shuttle)))]
mod model;
#[cfg(test)]
mod tests;
