//! Taking turns at what only one task may do at a time, on whichever worker: a mutex whose waiters are tasks.
//!
//! What must stay true: a turn ends however its task ends, and whoever waits is woken then.

use std::future::poll_fn;
use std::task::{Poll, Waker};

use block::sync::Mutex;

#[derive(Debug, Default)]
struct State {
    taken: bool,
    waiters: Vec<Waker>,
}

/// Turns that tasks take one after the other, in no particular order.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<State>);

/// One task's turn, until it is dropped.
#[derive(Debug)]
#[must_use = "the turn ends when this is dropped"]
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits until nobody else has the turn, and takes it.
    pub(super) async fn take(&self) -> Turn<'_> {
        poll_fn(|cx| {
            let mut state = self.0.lock();
            if state.taken {
                state.waiters.push(cx.waker().clone());
                return Poll::Pending;
            }
            state.taken = true;
            Poll::Ready(())
        })
        .await;
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.taken = false;
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        waiters.into_iter().for_each(Waker::wake);
    }
}
