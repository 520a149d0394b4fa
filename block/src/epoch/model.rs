//! Every order in which a request can begin, a mapping be dropped, and the epochs move on.

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;
use crate::sync::modelled::check;

/// The host cluster, the mapping that leads to it, and the list of what waits to be freed.
struct World {
    epochs: Arc<Epochs>,
    /// Used by requests that saw the mapping; changed by who reuses it. Loom sees when both can happen at once.
    cluster: UnsafeCell<u32>,
    mapped: Mutex<bool>,
    freeing: Mutex<Option<u64>>,
}

// SAFETY: whether threads share the cell as they may is what these tests are about; loom checks each access.
#[expect(unsafe_code, reason = "loom's cell is not Sync, and is checked instead")]
unsafe impl Sync for World {}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            epochs: Epochs::new(),
            cluster: UnsafeCell::new(0),
            mapped: Mutex::new(true),
            freeing: Mutex::new(None),
        })
    }

    /// A request, as a queue serves it.
    fn request(&self, queue: &EpochQueue) {
        let guard = queue.enter();
        let mapped = *self.mapped.lock();
        if mapped {
            self.cluster.with(|_| ());
        }
        drop(guard);
    }

    /// A discard and the FLUSH that makes it durable.
    fn discard(&self) {
        *self.mapped.lock() = false;
        let mut freeing = self.freeing.lock();
        *freeing = Some(self.epochs.now());
    }

    /// One look of a reclaiming pass.
    fn reclaim(&self) {
        let now = self.epochs.advance();
        let mut freeing = self.freeing.lock();
        if freeing.is_some_and(|epoch| is_past_grace(epoch, now)) {
            *freeing = None;
            self.cluster.with_mut(|_| ());
        }
    }
}

/// Fails if a request looks at the mapping before it is counted, if the epoch advances without a check of the counts, if
/// grace ends an epoch early, and if a drop's epoch is read during an advance ([`Epochs::now`] without the lock).
#[test]
fn cluster_is_reused_only_after_requests_that_saw_it() {
    check(5, || {
        let world = World::new();
        let requests = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.request(&world.epochs.register()))
        };
        let discards = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.discard())
        };
        world.reclaim();
        world.reclaim();
        requests.join().unwrap();
        discards.join().unwrap();
        // Nobody is left to hold it back.
        world.reclaim();
        world.reclaim();
        assert_eq!(*world.freeing.lock(), None);
    });
}

/// Fails if a dropped queue takes a nonzero count with it, or leaves a count behind.
#[test]
fn dropped_queues_delay_grace_only_for_their_requests() {
    check(5, || {
        let world = World::new();
        let requests = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let queue = world.epochs.register();
                let guard = queue.enter();
                drop(queue);
                let mapped = *world.mapped.lock();
                if mapped {
                    world.cluster.with(|_| ());
                }
                drop(guard);
            })
        };
        world.discard();
        world.reclaim();
        requests.join().unwrap();
        world.reclaim();
        assert_eq!(*world.freeing.lock(), None);
        assert!(world.epochs.queues.lock().is_empty());
    });
}

/// Fails if a request's end is neither seen by a watch nor counted for it: without the fences, and if the watch begins
/// after the check of the counts.
#[test]
fn epoch_watch_misses_no_request_end() {
    check(5, || {
        let world = World::new();
        let requests = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.request(&world.epochs.register()))
        };
        world.discard();
        let watch = world.epochs.watch();
        world.reclaim();
        let is_free = world.freeing.lock().is_none();
        requests.join().unwrap();
        // Who was held back by the request is woken by its end.
        assert!(is_free || world.epochs.ends.with(|ends| *ends) != watch.seen);
    });
}
