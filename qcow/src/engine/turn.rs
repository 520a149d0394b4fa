//! Taking turns at what only one task may do at a time, on whichever worker: a mutex whose waiters are tasks.
//!
//! What must stay true: a turn ends however its task ends, and whoever waits is woken then.

use block::sync::{ChangeOnDrop, Monitor};

/// Turns that tasks take one after the other, in no particular order.
#[derive(Debug, Default)]
pub(super) struct Turns(Monitor<bool>);

impl Turns {
    /// Waits until nobody else has the turn, and takes it until the answer is dropped.
    pub(super) async fn take(&self) -> ChangeOnDrop<'_, bool, impl FnOnce(&mut bool)> {
        let free = |taken: &mut bool| (!std::mem::replace(taken, true)).then_some(());
        self.0.wait(free).await;
        self.0.change_on_drop(|taken| *taken = false)
    }
}
