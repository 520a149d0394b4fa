//! Starting and stopping queues on workers, and operations on a disk beside its queues.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use block::worker::{FrontendId, WorkerGone, WorkerHandle};
use block::{Buffer, Disk, IoError, Op, ask};

use super::{BlockDevice, BlockQueue, BlockQueueConfig, QueueReport, StartQueueError};

/// An error of starting a queue on its worker.
#[derive(Debug, thiserror::Error)]
pub enum RunQueueError {
    /// It cannot be started as it was described.
    #[error(transparent)]
    Start(#[from] StartQueueError),
    /// The worker's ring does not take the kick.
    #[error("cannot watch the kick eventfd")]
    Kick(#[source] io::Error),
    /// The worker has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
}

/// A queue that runs on a worker. Dropping it leaves it running there.
#[derive(Debug)]
pub struct RunningQueue {
    device: Arc<BlockDevice>,
    id: FrontendId,
    report: Arc<QueueReport>,
}

impl RunningQueue {
    /// Starts a queue of `device` on `worker`. It is served when `kick` is signalled; without one, all the time.
    ///
    /// # Errors
    ///
    /// [`RunQueueError`]; nothing runs then.
    pub fn start(
        worker: &WorkerHandle,
        device: &Arc<BlockDevice>,
        kick: Option<OwnedFd>,
        mut config: BlockQueueConfig,
    ) -> Result<Self, RunQueueError> {
        config.polled = kick.is_none();
        let (report, device) = (Arc::clone(&config.report), Arc::clone(device));
        let shown = Arc::clone(&device);
        let id = worker.run(move |worker| -> Result<FrontendId, RunQueueError> {
            let queue = BlockQueue::start(shown, worker.context(), config)?;
            let kicks = kick.into_iter().collect();
            worker.add(Box::new(queue), kicks).map_err(RunQueueError::Kick)
        })??;
        Ok(Self { device, id, report })
    }

    /// Ends the queue as [`RunningQueue::stop`] does, but leaves requests that wait for a rate limit unanswered in its inflight
    /// records, for whoever goes on with the queue. Without such records it answers all.
    ///
    /// # Errors
    ///
    /// As for [`RunningQueue::stop`].
    pub fn suspend(self, worker: &WorkerHandle) -> Result<Arc<QueueReport>, WorkerGone> {
        let id = self.id;
        worker.run(move |worker| worker.suspend(id))?;
        self.stop(worker)
    }

    /// Drains the queue, and returns the position at which it would continue. When this returns, the queue no longer
    /// touches guest memory.
    ///
    /// # Errors
    ///
    /// If `worker`, which must be the one it was started on, has ended.
    pub fn stop(self, worker: &WorkerHandle) -> Result<Arc<QueueReport>, WorkerGone> {
        // What waits for space or for a rate limit, on whichever queue, would hold the drain up for as long.
        let disk = self.device.disk();
        let _off = disk.hold_off();
        worker.remove(self.id)?;
        Ok(self.report)
    }
}

/// An error of a flush.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FlushError {
    #[error(transparent)]
    Worker(#[from] WorkerGone),
    #[error(transparent)]
    Disk(#[from] IoError),
}

/// Makes all answered writes durable. The caller may be a guest's CPU, so nothing waits for space or for a rate limit
/// meanwhile.
pub(crate) fn flush(worker: &WorkerHandle, disk: Arc<dyn Disk>) -> Result<(), FlushError> {
    let _off = disk.hold_off();
    worker.block_on(move |cx| {
        let queue = disk.open_queue(cx);
        Box::pin(async move {
            let queue = queue.map_err(|error| IoError::from(error.source))?;
            ask(&*queue, Op::Flush, 0, 0, Buffer::default()).await.map(drop)
        })
    })??;
    Ok(())
}
