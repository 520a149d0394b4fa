//! Background work that no request waits for: write-back of accumulated changes, freeing, reserving space ahead, the
//! corrupt mark.
//!
//! Invariants:
//!
//! - An image is not closed while background work is under way on any worker, or changes would be lost.
//! - A worker that ran a single operation ([`Context::block_on`](block::Context::block_on)) exits after its
//!   background work.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use block::IoError;
use block::sync::WaitList;

use super::{Queue, Shared, space};

/// The background work of an image, on all workers.
#[derive(Debug, Default)]
pub(super) struct Background {
    under_way: usize,
    waiters: WaitList,
}

/// One piece of background work, until it has ended or was dropped.
#[must_use = "the work counts until this is dropped"]
pub(super) struct Task(Arc<Shared>);

impl Drop for Task {
    fn drop(&mut self) {
        let mut background = self.0.background.lock();
        background.under_way -= 1;
        let ended = (background.under_way == 0).then(|| background.waiters.take());
        drop(background);
        drop(ended);
    }
}

/// Counts a task that is under way without a request in flight as background work, until the guard is dropped.
pub(super) fn enter(shared: &Arc<Shared>) -> Task {
    shared.background.lock().under_way += 1;
    Task(Arc::clone(shared))
}

/// Starts background work on the queue's worker.
pub(super) fn start(queue: &Rc<Queue>, work: impl AsyncFnOnce(Rc<Queue>) + 'static) {
    let task = enter(&queue.shared);
    let worker = Rc::clone(queue);
    queue.cx.spawn_background(async move {
        let _task = task;
        work(worker).await;
    });
}

/// Waits until no background work is under way on any worker. Returns false if some has not ended within `limit`.
///
/// # Errors
///
/// If there can be no timer.
pub(super) async fn is_ended_within(queue: &Queue, limit: Option<Duration>) -> Result<bool, IoError> {
    let ended = ended(&queue.shared);
    let Some(limit) = limit else {
        ended.await;
        return Ok(true);
    };
    let timeout = pin!(queue.cx.sleep(limit));
    space::is_ended_before(ended, timeout).await
}

async fn ended(shared: &Shared) {
    poll_fn(|cx| {
        let mut background = shared.background.lock();
        if background.under_way == 0 {
            return Poll::Ready(());
        }
        background.waiters.register(cx.waker());
        Poll::Pending
    })
    .await;
}
