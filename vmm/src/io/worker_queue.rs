//! One queue of the disk on a worker of its own, fed with jobs from the session's thread.
//!
//! To the worker a queue is a frontend like a virtqueue: it is kicked through an eventfd, takes all jobs that are available,
//! and is removed when none is in flight.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use block::event::eventfd;
use block::status::StatusRange;
use block::worker::{Frontend, FrontendId, StartWorkerError, WorkerConfig, WorkerGone, WorkerHandle};
use block::{Context, Disk, DiskQueue, IoError, OpenQueueError};

use super::command::{Range, Transfer};
use super::transfer;

/// A kind of job for a queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// A transfer.
    Transfer(Transfer, Range),
    /// A flush.
    Flush,
}

/// A numbered piece of work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// The number its outcome carries.
    pub(super) number: u64,
    /// The kind of the job.
    pub(super) work: Work,
}

/// A block status, or the disk's error.
pub(super) type Status = Result<Vec<StatusRange>, IoError>;

/// An order to a queue.
enum Order {
    Job(Job),
    Status(Range, mpsc::Sender<Status>),
}

/// The result of a job.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The job's number.
    pub(super) number: u64,
    /// The bytes read, if it read; or why it failed.
    pub(super) result: Result<Vec<u8>, IoError>,
    /// From the start of the job on its worker to its end.
    pub(super) took: Duration,
}

/// An error of starting a queue.
#[derive(Debug, thiserror::Error)]
pub enum WorkerQueueError {
    /// The worker did not start.
    #[error(transparent)]
    Start(#[from] StartWorkerError),
    /// The worker ended before its time.
    #[error(transparent)]
    Gone(#[from] WorkerGone),
    /// The disk gave no queue.
    #[error(transparent)]
    Queue(#[from] OpenQueueError),
    /// The process has no descriptor left for the kick, or the worker cannot watch it.
    #[error("cannot create a queue's eventfd")]
    Kick(#[source] std::io::Error),
}

/// A queue of the disk on its worker.
#[derive(Debug)]
pub(super) struct WorkerQueue {
    worker: WorkerHandle,
    frontend: FrontendId,
    orders: mpsc::Sender<Order>,
    /// An eventfd that the worker watches.
    kick: File,
}

impl WorkerQueue {
    /// Starts a worker and opens a queue of `disk` on it. Outcomes go to `outcomes`.
    pub(super) fn open(
        disk: &Arc<dyn Disk>,
        config: WorkerConfig,
        outcomes: mpsc::Sender<Outcome>,
    ) -> Result<Self, WorkerQueueError> {
        let worker = WorkerHandle::spawn(config)?;
        tracing::debug!(driver = worker.driver_name(), "a queue is served");
        let (orders, receiver) = mpsc::channel();
        let kick = eventfd().map_err(WorkerQueueError::Kick)?;
        let kicked = kick.try_clone().map_err(WorkerQueueError::Kick)?;
        let disk = Arc::clone(disk);
        let frontend = worker.run(move |worker| {
            let disk_bytes = disk.info().size_bytes;
            let queue = Rc::from(disk.open_queue(worker.context())?);
            let frontend = JobFrontend {
                cx: worker.context().clone(),
                queue,
                disk_bytes,
                orders: receiver,
                outcomes,
                in_flight: Rc::default(),
            };
            worker
                .add(Box::new(frontend), vec![kicked])
                .map_err(WorkerQueueError::Kick)
        })??;
        Ok(Self {
            worker,
            frontend,
            orders,
            kick: File::from(kick),
        })
    }

    /// Starts a job.
    ///
    /// # Errors
    ///
    /// If the worker has ended.
    pub(super) fn start(&self, job: Job) -> Result<(), WorkerQueueError> {
        self.order(Order::Job(job))
    }

    /// Returns the block status of `range`, or of its first part.
    ///
    /// # Errors
    ///
    /// If the worker has ended.
    pub(super) fn status(&self, range: Range) -> Result<Status, WorkerQueueError> {
        let (answer, answers) = mpsc::channel();
        self.order(Order::Status(range, answer))?;
        Ok(answers.recv().map_err(|_| WorkerGone)?)
    }

    fn order(&self, order: Order) -> Result<(), WorkerQueueError> {
        self.orders.send(order).map_err(|_| WorkerGone)?;
        // Adding one to an eventfd's count can only fail, or wait, near 2^64 unread kicks.
        (&self.kick)
            .write_all(&1_u64.to_ne_bytes())
            .map_err(WorkerQueueError::Kick)
    }

    /// Closes the queue when its jobs have ended, and returns the worker it ran on.
    pub(super) fn close(self) -> Result<WorkerHandle, WorkerGone> {
        self.worker.remove(self.frontend)?;
        Ok(self.worker)
    }
}

/// The queue's end on the worker.
struct JobFrontend {
    cx: Context,
    queue: Rc<dyn DiskQueue>,
    disk_bytes: u64,
    orders: mpsc::Receiver<Order>,
    outcomes: mpsc::Sender<Outcome>,
    in_flight: Rc<Cell<usize>>,
}

async fn run(queue: &dyn DiskQueue, disk_bytes: u64, job: Job) -> Outcome {
    let started = Instant::now();
    let result = match job.work {
        Work::Transfer(transfer, range) => transfer::run(queue, disk_bytes, transfer, range).await,
        Work::Flush => transfer::flush(queue).await.map(|()| Vec::new()),
    };
    Outcome {
        number: job.number,
        result,
        took: started.elapsed(),
    }
}

impl Frontend for JobFrontend {
    fn poll(&mut self) -> bool {
        let mut any = false;
        for order in self.orders.try_iter() {
            any = true;
            self.in_flight.set(self.in_flight.get() + 1);
            let queue = Rc::clone(&self.queue);
            let (outcomes, in_flight) = (self.outcomes.clone(), Rc::clone(&self.in_flight));
            let disk_bytes = self.disk_bytes;
            self.cx.spawn(async move {
                // A session that is gone wants no answer.
                match order {
                    Order::Job(job) => {
                        let outcome = run(queue.as_ref(), disk_bytes, job).await;
                        outcomes.send(outcome).unwrap_or_default();
                    }
                    Order::Status(range, answer) => {
                        let status = queue.status(range.offset, range.len).await;
                        answer.send(status).unwrap_or_default();
                    }
                }
                in_flight.set(in_flight.get() - 1);
            });
        }
        any
    }

    fn publish(&mut self) -> bool {
        // Each job sends its own outcome when it ends.
        false
    }

    fn prepare_sleep(&mut self) -> bool {
        self.poll()
    }

    fn end_sleep(&mut self) {}

    fn in_flight(&self) -> usize {
        self.in_flight.get()
    }
}
