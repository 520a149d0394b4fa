//! Errors of a PCI function and its device.

use std::io;

use block::IoError;
use block::worker::{StartWorkerError, WorkerGone};

use super::foreign::link::BackendError;
use super::function::QUEUES_MAX;
use super::vhost_net::VhostNetError;
use crate::blk::SerialTooLong;

/// An error of creating a PCI function.
#[derive(Debug, thiserror::Error)]
pub enum PlugError {
    /// The number of queues is out of range, or not that of the workers.
    #[error("{queues} queues with {workers} workers; expected 1 to {QUEUES_MAX}, the same number of both")]
    Queues {
        /// The queues asked for.
        queues: u16,
        /// The workers described.
        workers: usize,
    },
    /// The serial number is too long.
    #[error(transparent)]
    Serial(#[from] SerialTooLong),
    /// A worker could not be started.
    #[error("cannot start the worker of a queue")]
    Worker(#[from] StartWorkerError),
    /// The backend that was to run the queues cannot be used.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The kernel cannot run the queues of a network interface.
    #[error(transparent)]
    Network(#[from] VhostNetError),
    /// The thread of a device could not be started.
    #[error("cannot start the thread of a device")]
    Thread(#[source] io::Error),
    /// The machine or the host has no interrupt or descriptor left.
    #[error("cannot create an interrupt or an eventfd")]
    Events(#[from] io::Error),
}

/// An error of a resize; the disk keeps its size.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// Its worker has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
    /// The disk refuses.
    #[error(transparent)]
    Disk(#[from] IoError),
}
