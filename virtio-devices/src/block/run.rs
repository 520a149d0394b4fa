//! What frontends do with a disk beside their queues.

use std::sync::Arc;

use block::worker::{WorkerGone, WorkerHandle};
use block::{Buffer, Disk, IoError, Op, Request};

/// Why what was answered is not durable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FlushError {
    #[error(transparent)]
    Worker(#[from] WorkerGone),
    #[error(transparent)]
    Disk(#[from] IoError),
}

/// Makes durable what the disk has answered before. Whoever asks may be a guest's CPU: nothing waits for space or for
/// a rate limit meanwhile.
pub(crate) fn flush(worker: &WorkerHandle, disk: Arc<dyn Disk>) -> Result<(), FlushError> {
    let _off = disk.hold_off();
    worker.block_on(move |cx| {
        let queue = disk.open_queue(cx);
        Box::pin(async move {
            let queue = queue.map_err(|error| IoError::from(error.source))?;
            let (request, answer) = Request::local(Op::Flush, 0, 0, Buffer::default());
            queue.submit(request);
            answer.await.result
        })
    })??;
    Ok(())
}
