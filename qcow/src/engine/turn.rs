//! Turns for work that only one task may do at a time, across workers: a mutex whose waiters are tasks.
//!
//! Invariant: a turn ends however its task ends, and its waiters are woken then.

use block::sync::{ChangeOnDrop, Monitor};

/// Turns that tasks take one after the other, in no particular order.
#[derive(Debug, Default)]
pub(super) struct Turns(Monitor<bool>);

impl Turns {
    /// Waits until no other task has the turn, and takes it. The turn ends when the returned guard is dropped.
    pub(super) async fn take(&self) -> ChangeOnDrop<'_, bool, impl FnOnce(&mut bool)> {
        let free = |taken: &mut bool| (!std::mem::replace(taken, true)).then_some(());
        self.0.wait(free).await;
        self.0.change_on_drop(|taken| *taken = false)
    }
}
