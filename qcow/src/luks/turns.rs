//! Turns for deriving keys: a process that opens many images does not use all processors, nor memory, for it.
//!
//! Callers are threads that may block, never workers.

use std::sync::{Condvar, Mutex, PoisonError};

/// The most threads that derive keys at once.
const AT_ONCE: usize = 4;

static TURNS: Turns = Turns::new();

/// Calls `derive` when fewer than [`AT_ONCE`] others run.
pub(super) fn in_turn<T>(derive: impl FnOnce() -> T) -> T {
    TURNS.take(derive)
}

struct Turns {
    running: Mutex<usize>,
    ended: Condvar,
}

impl Turns {
    const fn new() -> Self {
        Self {
            running: Mutex::new(0),
            ended: Condvar::new(),
        }
    }

    fn take<T>(&self, derive: impl FnOnce() -> T) -> T {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = self
            .ended
            .wait_while(running, |running| *running >= AT_ONCE)
            .unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        drop(running);
        let _turn = Turn(self);
        derive()
    }
}

/// A turn, which ends also if the work panics.
struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn few_threads_derive_at_once_and_all_get_their_turn() {
        let (turns, running, most, done) = (
            Turns::new(),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        std::thread::scope(|threads| {
            for _ in 0..4 * AT_ONCE {
                threads.spawn(|| {
                    turns.take(|| {
                        most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(5));
                        running.fetch_sub(1, Ordering::SeqCst);
                        done.fetch_add(1, Ordering::SeqCst);
                    });
                });
            }
        });
        assert_eq!(done.into_inner(), 4 * AT_ONCE);
        assert!(most.into_inner() <= AT_ONCE);
    }

    #[test]
    fn turn_ends_if_its_work_panics() {
        let turns = Turns::new();
        for _ in 0..=AT_ONCE {
            let panicked = catch_unwind(AssertUnwindSafe(|| turns.take(|| panic!("on purpose"))));
            assert!(panicked.is_err());
        }
        assert_eq!(turns.take(|| 7), 7);
    }
}
