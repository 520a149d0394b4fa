//! Workers that the queues of several disks share.
//!
//! A disk of its own workers has the shortest way to its requests. Hundreds of disks that are mostly idle need few threads instead:
//! each worker serves queues of many disks, and passes over those which have nothing to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::config::{StartWorkerError, WorkerConfig};
use super::handle::WorkerHandle;

/// Running workers, each of which serves queues of several disks. They end with the last handle of them.
#[derive(Debug)]
pub struct WorkerPool {
    workers: Arc<[Arc<WorkerHandle>]>,
    next: AtomicUsize,
}

impl WorkerPool {
    /// Starts a worker for each configuration.
    ///
    /// # Errors
    ///
    /// If one of them cannot be started.
    pub fn start(configs: impl IntoIterator<Item = WorkerConfig>) -> Result<Self, StartWorkerError> {
        let workers = configs
            .into_iter()
            .map(|config| WorkerHandle::spawn(config).map(Arc::new));
        Ok(Self {
            workers: workers.collect::<Result<_, _>>()?,
            next: AtomicUsize::new(0),
        })
    }

    /// Returns the worker for another queue: each that has not failed in turn, so that the queues of a disk have different ones. `None`
    /// if there is none.
    #[must_use]
    pub fn next(&self) -> Option<Arc<WorkerHandle>> {
        let turn = || self.next.fetch_add(1, Ordering::Relaxed);
        let worker = |turn: usize| self.workers.get(turn.checked_rem(self.workers.len())?);
        let mut tried = self.workers.iter().filter_map(|_| worker(turn()));
        tried.find(|worker| !worker.has_ended()).cloned()
    }

    /// Returns all workers.
    #[must_use]
    pub fn workers(&self) -> &Arc<[Arc<WorkerHandle>]> {
        &self.workers
    }
}
