//! The configuration of a worker's thread, and the reasons why it cannot start.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::ring::{RingError, RingKind};

/// Last step of a worker's thread before it serves, such as dropping privileges that only its setup needs.
#[derive(Clone)]
pub struct StartHook(Arc<dyn Fn() -> io::Result<()> + Send + Sync>);

impl StartHook {
    /// Makes a hook that calls `f` once on each worker's thread.
    pub fn new(f: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    /// Calls it, on a thread that is about to serve.
    ///
    /// # Errors
    ///
    /// The error of the hook.
    pub fn run(&self) -> io::Result<()> {
        (self.0)()
    }
}

impl fmt::Debug for StartHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StartHook")
    }
}

/// Called when a worker's thread has ended without being asked to: its ring has failed, or it has panicked.
#[derive(Clone)]
pub struct FailureHook(Arc<dyn Fn() + Send + Sync>);

impl FailureHook {
    /// Makes a hook that calls `f` on the thread of each worker that fails.
    pub fn new(f: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    pub(super) fn run(&self) {
        (self.0)();
    }
}

impl fmt::Debug for FailureHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FailureHook")
    }
}

/// Configuration of a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The thread's name.
    pub name: String,
    /// The ring's driver.
    pub ring: RingKind,
    /// The number of ops that may be in flight.
    pub depth: u32,
    /// The number of slots in the ring's table for buffers that a kernel driver registers.
    pub registered_buffers: u16,
    /// The CPUs to run on; empty for all.
    pub cpus: Vec<usize>,
    /// The longest time to poll before sleeping; zero never polls.
    pub poll_max: Duration,
    /// The thread's last step before it serves.
    pub on_start: Option<StartHook>,
    /// The thread's last step where it ends by itself.
    pub on_failure: Option<FailureHook>,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            name: "ringdisk".to_owned(),
            ring: RingKind::Auto,
            depth: 256,
            registered_buffers: 0,
            cpus: Vec::new(),
            poll_max: Duration::from_micros(50),
            on_start: None,
            on_failure: None,
        }
    }
}

/// Error: a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartWorkerError {
    /// The thread could not be made.
    #[error("cannot start a worker thread")]
    Thread(#[source] io::Error),
    /// The ring could not be made.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The wake-up could not be watched.
    #[error("cannot set up the worker's wake-up")]
    Wake(#[source] io::Error),
    /// The worker's hook failed.
    #[error("cannot prepare the worker's thread")]
    Hook(#[source] io::Error),
    /// The CPUs cannot be used.
    #[error("cannot run a worker on CPUs {cpus:?}; it may run on CPUs {allowed}")]
    Affinity {
        /// The requested CPUs.
        cpus: Vec<usize>,
        /// The CPUs it may use, such as `0-3,6`.
        allowed: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
}
