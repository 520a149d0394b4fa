//! Every order in which callers on several threads can ask for rounds.

use std::sync::Arc;

use loom::thread;

use super::*;
use crate::sync::modelled::{block_on, check};

/// Something that is changed in memory and made durable by rounds.
#[derive(Default)]
struct Image {
    rounds: Mutex<Rounds>,
    changes: Mutex<u32>,
    durable: Mutex<u32>,
}

impl Image {
    /// A change, and the FLUSH that makes it durable.
    async fn change(&self) {
        let mine = {
            let mut changes = self.changes.lock();
            *changes += 1;
            *changes
        };
        let flushed = Rounds::share(&self.rounds, async || {
            let seen = *self.changes.lock();
            let mut durable = self.durable.lock();
            *durable = seen.max(*durable);
            Ok(())
        });
        assert_eq!(flushed.await, Ok(()));
        assert!(
            *self.durable.lock() >= mine,
            "the round began before it was asked for"
        );
    }
}

/// Fails if a caller joins a running round, if two rounds run at once, and (a task sleeps for ever) if the end of a round
/// does not wake its waiters.
#[test]
fn round_covers_changes_made_before_it_was_requested() {
    check(3, || {
        let image = Arc::new(Image::default());
        let others: Vec<_> = (0..2)
            .map(|_| {
                let image = Arc::clone(&image);
                thread::spawn(move || block_on(image.change()))
            })
            .collect();
        block_on(image.change());
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(*image.durable.lock(), 3);
        let rounds = image.rounds.lock();
        assert!(!rounds.is_running() && rounds.waiters.is_empty() && rounds.begun <= 3);
    });
}
