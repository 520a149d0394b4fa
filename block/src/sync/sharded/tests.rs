//! Shards by need, their reuse, poisoning, and threads that read and change a value.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

fn shards<T>(lock: &ShardedLock<T>) -> usize {
    lock.inner.lock_all().len()
}

fn is_same<T>(one: &ShardedReader<T>, other: &ShardedReader<T>) -> bool {
    Arc::ptr_eq(&one.shard, &other.shard)
}

#[test]
fn readers_have_shards_of_their_own_up_to_a_bound() {
    let lock = ShardedLock::new(7);
    assert_eq!(shards(&lock), 1);
    let readers: Vec<_> = (0..SHARDS_MAX).map(|_| lock.reader()).collect();
    assert_eq!(shards(&lock), SHARDS_MAX);
    for (number, reader) in readers.iter().enumerate() {
        assert!(readers[..number].iter().all(|other| !is_same(reader, other)));
        assert_eq!(reader.read().map(|value| *value), Ok(7));
    }
    // One more for each shard before any has three.
    let more: Vec<_> = (0..SHARDS_MAX).map(|_| lock.reader()).collect();
    assert_eq!(shards(&lock), SHARDS_MAX);
    for reader in &readers {
        assert_eq!(more.iter().filter(|other| is_same(reader, other)).count(), 1);
    }
}

#[test]
fn new_reader_takes_the_shard_of_one_that_has_gone() {
    let lock = ShardedLock::new(());
    let kept = lock.reader();
    for _ in 0..100 {
        assert!(!is_same(&kept, &lock.reader()));
        assert_eq!(shards(&lock), 2);
    }
    drop(kept);
    let pair = [lock.reader(), lock.reader()];
    assert!(!is_same(&pair[0], &pair[1]));
    assert_eq!(shards(&lock), 2);
}

#[test]
fn shard_is_alone_in_its_lines() {
    let lock = ShardedLock::new(());
    let readers = [lock.reader(), lock.reader()];
    let at = |reader: &ShardedReader<()>| Arc::as_ptr(&reader.shard).addr();
    assert_eq!((at(&readers[0]) % 128, at(&readers[1]) % 128), (0, 0));
    assert_eq!(size_of::<Shard>(), 128);
}

#[test]
fn try_calls_fail_beside_a_writer_and_beside_any_reader() {
    let lock = ShardedLock::new(1);
    let readers = [lock.reader(), lock.reader(), lock.reader()];
    {
        let mut value = lock.try_write().expect("nobody has it");
        *value = 2;
        assert!(readers.iter().all(|reader| reader.try_read().is_none()));
        assert!(lock.try_read().is_none() && lock.try_write().is_none());
    }
    for reader in &readers {
        let value = reader.try_read().expect("no writer");
        assert_eq!(*value, 2);
        assert!(lock.try_write().is_none());
        assert!(
            readers.iter().all(|other| other.try_read().is_some()),
            "readers share"
        );
    }
    assert!(lock.try_write().is_some(), "every shard was unlocked");
}

#[test]
fn panic_of_a_writer_poisons_every_shard() {
    let lock = ShardedLock::new(1);
    let readers = [lock.reader(), lock.reader()];
    let read = catch_unwind(AssertUnwindSafe(|| {
        let _value = readers[1].read();
        panic!("a reader leaves the value whole");
    }));
    assert!(read.is_err() && lock.write().is_ok());
    let written = catch_unwind(AssertUnwindSafe(|| {
        let mut value = lock.write().expect("not poisoned");
        *value = 2;
        panic!("in the middle of a change");
    }));
    assert!(written.is_err());
    let late = [lock.reader(), lock.reader(), lock.reader()];
    for reader in readers.iter().chain(&late) {
        assert!(reader.try_read().is_none());
        assert_eq!(reader.read().map(|value| *value), Err(Poisoned));
    }
    assert!(lock.try_read().is_none() && lock.try_write().is_none());
    assert_eq!(lock.read().map(|value| *value), Err(Poisoned));
    assert_eq!(lock.write().map(|value| *value), Err(Poisoned));
}

/// A value may be changed by who cleans up after a panic that has nothing to do with it.
#[test]
fn writer_that_begins_during_a_panic_poisons_nothing() {
    struct CleanUp(Arc<ShardedLock<u32>>);
    impl Drop for CleanUp {
        fn drop(&mut self) {
            *self.0.write().expect("not poisoned") += 1;
        }
    }
    let lock = Arc::new(ShardedLock::new(1));
    let clean = CleanUp(Arc::clone(&lock));
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _clean = clean;
        panic!("elsewhere");
    }));
    assert!(panicked.is_err());
    assert_eq!(lock.read().map(|value| *value), Ok(2));
}

#[test]
fn threads_lose_no_change_and_see_whole_ones() {
    const ROUNDS: u64 = 2000;
    let lock = Arc::new(ShardedLock::new([0u64; 2]));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    let reader = lock.reader();
                    let value = *reader.read().expect("not poisoned");
                    assert_eq!(value[0], value[1]);
                    if round % 4 == 0 {
                        let mut value = lock.write().expect("not poisoned");
                        value[0] += 1;
                        value[1] += 1;
                    }
                }
            });
        }
    });
    assert_eq!(*lock.read().expect("not poisoned"), [3 * ROUNDS / 4; 2]);
    assert!(shards(&lock) <= 3);
}
