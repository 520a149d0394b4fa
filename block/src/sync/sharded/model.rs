//! Readers with shards of their own, readers that come later, and writers of one value.

#![cfg_attr(
    loom,
    expect(unsafe_code, reason = "loom's cell is not Sync, and is checked instead")
)]

use super::*;

/// The value of a lock: loom sees when a reader and a writer, or two writers, can reach the cell at once.
#[cfg(loom)]
struct Value(loom::cell::UnsafeCell<u32>);

// SAFETY: whether threads share the cell as they may is what these tests are about; loom checks each access.
#[cfg(loom)]
unsafe impl Sync for Value {}

#[cfg(loom)]
impl Value {
    fn new() -> Self {
        Self(loom::cell::UnsafeCell::new(0))
    }

    fn check(&self) -> u32 {
        // SAFETY: loom fails if another thread writes meanwhile.
        self.0.with(|value| unsafe { *value })
    }

    fn change(&mut self) {
        // SAFETY: loom fails if another thread reads or writes meanwhile.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }
}

/// The value of a lock, in two halves that are equal unless a writer is at work. Shuttle stops threads between them.
#[cfg(shuttle)]
struct Value([u32; 2]);

#[cfg(shuttle)]
impl Value {
    fn new() -> Self {
        Self([0; 2])
    }

    fn check(&self) -> u32 {
        let first = self.0[0];
        crate::sync::thread::yield_now();
        assert_eq!(first, self.0[1], "a reader beside a writer");
        first
    }

    fn change(&mut self) {
        let next = self.check() + 1;
        self.0[0] = next;
        crate::sync::thread::yield_now();
        self.0[1] = next;
    }
}

#[cfg(loom)]
fn every_order(model: impl Fn() + Sync + Send + 'static) {
    crate::sync::modelled::check(3, model);
}

#[cfg(shuttle)]
fn every_order(model: impl Fn() + Sync + Send + 'static) {
    let model = Arc::new(model);
    let same = Arc::clone(&model);
    shuttle::check_random(move || model(), 3000);
    shuttle::check_pct(move || same(), 3000, 3);
}

#[cfg(loom)]
use loom::thread;
#[cfg(shuttle)]
use shuttle::thread;

fn reads(reader: &ShardedReader<Value>) {
    if let Some(value) = reader.try_read() {
        value.check();
    }
    reader.read().unwrap().check();
}

/// Fails if a writer skips a shard: also one that was added while it waited for the one before.
#[test]
fn writer_excludes_readers_also_new_ones() {
    every_order(|| {
        let lock = Arc::new(ShardedLock::new(Value::new()));
        let (old, other) = (lock.reader(), Arc::clone(&lock));
        let threads = [
            thread::spawn(move || reads(&old)),
            // The first shard is the other reader's, so this one adds its own.
            thread::spawn(move || reads(&other.reader())),
        ];
        lock.write().unwrap().change();
        assert_eq!(lock.read().unwrap().check(), 1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Fails if writers do not exclude each other, or wait for each other: loom and shuttle find threads that nobody wakes.
#[test]
fn writers_exclude_each_other() {
    every_order(|| {
        let lock = Arc::new(ShardedLock::new(Value::new()));
        let _readers = [lock.reader(), lock.reader()];
        let other = Arc::clone(&lock);
        let thread = thread::spawn(move || {
            other.write().unwrap().change();
            if let Some(mut value) = other.try_write() {
                value.change();
                return 2;
            }
            1
        });
        lock.write().unwrap().change();
        let theirs: u32 = thread.join().unwrap();
        assert_eq!(lock.read().unwrap().check(), 1 + theirs);
    });
}
