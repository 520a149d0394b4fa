//! Every order in which tasks of two workers can wait, be woken and give up.

use std::sync::Arc;
use std::task::Context;

use loom::thread;

use super::*;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::modelled::{block_on, check};

/// Fails (a task sleeps for ever) if a wait joins the list after it has released the lock, and if a change is made after the
/// list was taken.
#[test]
fn monitor_wait_sees_changes_of_other_threads() {
    check(3, || {
        let monitor = Arc::new(Monitor::new(0));
        let others: Vec<_> = (0..2)
            .map(|_| {
                let monitor = Arc::clone(&monitor);
                thread::spawn(move || monitor.change(|value| *value += 1))
            })
            .collect();
        block_on(monitor.wait(|value| (*value == 2).then_some(())));
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(monitor.waiting(), 0);
    });
}

#[derive(Default)]
struct Turns {
    taken: Monitor<bool>,
    /// A task is in its turn.
    entered: AtomicBool,
}

impl Turns {
    async fn take(&self) -> ChangeOnDrop<'_, bool, impl FnOnce(&mut bool)> {
        let free = |taken: &mut bool| (!std::mem::replace(taken, true)).then_some(());
        self.taken.wait(free).await;
        assert!(!self.entered.swap(true, Ordering::Relaxed), "a turn was not over");
        self.taken.change_on_drop(|taken| {
            self.entered.store(false, Ordering::Relaxed);
            *taken = false;
        })
    }
}

/// Fails if one change ends two waits, if a guard's change wakes nobody, and if a dropped wait takes another off the list.
#[test]
fn monitor_keeps_turns_when_a_wait_is_dropped() {
    check(3, || {
        let turns = Arc::new(Turns::default());
        let first = block_on(turns.take());
        let other = {
            let turns = Arc::clone(&turns);
            thread::spawn(move || drop(block_on(turns.take())))
        };
        let mut given_up = Box::pin(turns.take());
        let polled = given_up.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        drop(given_up);
        drop(first);
        drop(block_on(turns.take()));
        other.join().unwrap();
        assert_eq!(turns.taken.waiting(), 0);
        assert!(!turns.taken.with(|taken| *taken));
    });
}
