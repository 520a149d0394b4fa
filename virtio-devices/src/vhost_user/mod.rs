//! A disk for another process's virtual machine, over a vhost-user socket.
//!
//! The messages are the `vhost` crate's; the queues run on our own workers, a thread for each queue or a few threads for the queues of
//! many disks, which live as long as the server and serve one client after another. The caller owns the listening socket
//! and the disk.
//!
//! ```text
//! client ──messages──▶ serve() (caller's thread) ──start, stop──▶ worker 0: queue 0
//!    └────────────────── memory, kicks, calls ──────────────────▶ worker 1: queue 1
//! ```
//!
//! A [`Reception`] talks to the clients of many disks, with a thread for each that has something to say just now.
//!
//! Invariants: a queue is changed only while it does not run. It stops by draining, so when a message that takes
//! memory or a queue away has been answered, nothing touches either any more.

mod backend;
mod config_channel;
#[cfg(test)]
mod config_channel_tests;
mod device_state;
pub(crate) mod event;
mod handover;
mod image;
mod inflight;
#[cfg(test)]
mod limits_tests;
mod log_memory;
mod memory;
#[cfg(test)]
mod migration_tests;
mod reception;
#[cfg(test)]
mod reception_tests;
#[cfg(test)]
mod restart_tests;
mod session;
mod sigbus;
#[cfg(test)]
mod state_tests;
mod stop_token;
#[cfg(test)]
mod tests;
mod vring;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use block::report::LogLimit;
use block::worker::{StartWorkerError, WorkerConfig, WorkerGone, WorkerHandle, WorkerPool};
use block::{Disk, IoError};

use crate::blk::{BlockDevice, BlockDeviceConfig, CacheMode, SerialTooLong};
use crate::stats::DiskStats;
use backend::Backend;
pub use config_channel::ConfigChannel;
pub use handover::{ClientState, HandOverError, Message, PausedClient};
use image::Image;
pub use image::{DetachedDisk, ImageOwner};
pub use reception::{Reception, Seat};
pub use stop_token::StopToken;

/// The most queues a vhost-user device can have: what its messages can number.
pub const QUEUES_MAX: u16 = 256;

/// The most descriptors that a server of `num_queues` queues and its client can make this process hold, those of
/// image files not counted: the client's memory, the events, inflight memory and those of one message, and what a
/// worker has.
#[must_use]
pub const fn descriptors_max(num_queues: u16) -> u64 {
    const MESSAGE: u64 = 32;
    const SERVER: u64 = 8;
    const QUEUE: u64 = 10;
    memory::REGIONS_MAX as u64 + MESSAGE + SERVER + QUEUE * num_queues as u64
}

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct VhostUserConfig {
    /// The name of the disk, for logs and threads.
    pub name: String,
    /// The number of queues offered, 1 to [`QUEUES_MAX`].
    pub num_queues: u16,
    /// The expected number of entries of a queue, which determines how many segments a request may have. A client may
    /// set up longer or shorter queues.
    pub queue_size: u16,
    /// The serial number that the guest reads: at most 20 bytes.
    pub serial: String,
    /// The settings of the queues' workers, in order; the defaults for a queue without an entry.
    pub workers: Vec<WorkerConfig>,
    /// Workers that serve queues of other disks too, instead of one for each queue.
    pub pool: Option<Arc<WorkerPool>>,
    /// Offer inflight tracking, so that a client can connect to a new server after this one was killed. Only
    /// right if what the disk has answered survives that: see [`VhostUserServer::start`].
    pub restartable: bool,
}

impl Default for VhostUserConfig {
    fn default() -> Self {
        Self {
            name: "disk".to_owned(),
            num_queues: 1,
            queue_size: 128,
            serial: String::new(),
            workers: Vec::new(),
            pool: None,
            restartable: false,
        }
    }
}

/// An error of starting a server.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The number of queues is out of range.
    #[error("the number of queues is {found}; expected 1 to {QUEUES_MAX}")]
    Queues {
        /// The number asked for.
        found: u16,
    },
    /// The serial number is too long.
    #[error(transparent)]
    Serial(#[from] SerialTooLong),
    /// A worker could not be started.
    #[error("cannot start the worker of queue {queue}")]
    Worker {
        /// The queue.
        queue: u16,
        /// The reason.
        #[source]
        source: StartWorkerError,
    },
}

/// An error that ends a server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The listening socket failed.
    #[error("cannot accept vhost-user connections")]
    Accept(#[source] io::Error),
    /// A worker has ended, after its ring failed.
    #[error("a worker has ended")]
    Worker(#[from] WorkerGone),
}

/// An error of closing a disk.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// The worker that should have closed it has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
    /// The disk says so.
    #[error("cannot close the disk cleanly")]
    Disk(#[from] IoError),
}

/// Offers one disk to one client after another. Dropping it stops its own workers; no client is connected
/// then, because [`VhostUserServer::serve`] borrows it.
pub struct VhostUserServer {
    name: String,
    device: Arc<BlockDevice>,
    workers: Arc<[Arc<WorkerHandle>]>,
    restartable: bool,
    /// The connected client's.
    channel: ConfigChannel,
    /// The image, if it can be given to another server.
    image: Option<Arc<Image>>,
    /// The rate limiter of log messages about clients that connect and disconnect.
    log_limit: LogLimit,
}

impl fmt::Debug for VhostUserServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUserServer")
            .field("name", &self.name)
            .field("device", &self.device)
            .field("workers", &self.workers.len())
            .finish()
    }
}

impl VhostUserServer {
    /// Starts the workers that will serve `disk`.
    ///
    /// If `config` says that clients outlive this server, a write that `disk` has answered must be in the image when
    /// it is opened again after a kill of this process: a guest that keeps running would notice. A disk that keeps
    /// mappings in memory until the next flush does not suffice.
    ///
    /// # Errors
    ///
    /// [`StartError`]: a value of `config` is out of range, or a worker cannot be started.
    pub fn start(disk: Arc<dyn Disk>, config: &VhostUserConfig) -> Result<Self, StartError> {
        sigbus::prepare();
        let found = config.num_queues;
        if found == 0 || found > QUEUES_MAX {
            return Err(StartError::Queues { found });
        }
        let shown = BlockDeviceConfig {
            num_queues: config.num_queues,
            queue_size: config.queue_size,
            serial: &config.serial,
        };
        let device = Arc::new(BlockDevice::new(disk, &shown)?);
        // The first client may have been another server's before.
        device.set_cache_mode(CacheMode::Unknown);
        let workers = (0..config.num_queues)
            .map(|queue| {
                if let Some(worker) = config.pool.as_ref().and_then(|pool| pool.next()) {
                    return Ok(worker);
                }
                let own = config.workers.get(usize::from(queue));
                let worker = WorkerHandle::spawn(own.cloned().unwrap_or_default());
                worker
                    .map(Arc::new)
                    .map_err(|source| StartError::Worker { queue, source })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: config.name.clone(),
            device,
            workers,
            restartable: config.restartable,
            channel: ConfigChannel::default(),
            image: None,
            log_limit: LogLimit::default(),
        })
    }

    /// Returns the name of the I/O driver: `"io_uring"`, `"syscalls"` or `"null"`.
    #[must_use]
    pub fn driver_name(&self) -> &'static str {
        self.workers.first().map_or("none", |worker| worker.driver_name())
    }

    /// Returns the channel on which whoever is connected learns that the disk has grown.
    #[must_use]
    pub fn config_channel(&self) -> &ConfigChannel {
        &self.channel
    }

    /// Lets guests migrate to and from other servers of the same image, which `owner` closes and opens. With `is_away`, another one
    /// has it now: the disk that was passed to [`VhostUserServer::start`] is a [`DetachedDisk`].
    pub fn share_image(&mut self, owner: Arc<dyn ImageOwner>, is_away: bool) {
        self.image = Some(Arc::new(Image::new(self.name.clone(), owner, is_away)));
    }

    /// Returns what tells whether its workers still work, which does not keep them alive.
    #[must_use]
    pub fn pulse(&self) -> Pulse {
        Pulse(Arc::downgrade(&self.workers))
    }

    /// Returns true if a worker of its queues has ended by itself. A [`Reception`] that is asked to [look](Reception::look) serves it no
    /// longer.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.workers.iter().any(|worker| worker.has_ended())
    }

    /// Returns the statistics of its disk's queues.
    #[must_use]
    pub fn stats(&self) -> &Arc<DiskStats> {
        self.device.stats()
    }

    /// Closes the disk as a clean shutdown should, on a worker, and ends the workers.
    ///
    /// # Errors
    ///
    /// [`CloseError`]: the image may need repair on its next open, as after a power cut.
    pub fn close(self) -> Result<(), CloseError> {
        self.close_on_worker()
    }

    fn close_on_worker(&self) -> Result<(), CloseError> {
        close_on(&self.workers, self.device.disk())
    }
}

/// Tells whether the workers of a server still work.
#[derive(Clone, Debug)]
pub struct Pulse(Weak<[Arc<WorkerHandle>]>);

impl Pulse {
    /// Tells whether the workers work that servers share.
    #[must_use]
    pub fn of_pool(pool: &WorkerPool) -> Self {
        Self(Arc::downgrade(pool.workers()))
    }

    /// Waits until every worker has come to the end of a round: for ever, if one hangs. Those that have ended are passed over: their
    /// disks are served no longer.
    pub fn beat(&self) {
        let workers = self.0.upgrade();
        for worker in workers.iter().flat_map(|workers| workers.iter()) {
            worker.run(|_| ()).unwrap_or_default();
        }
    }
}

/// Closes a disk as a clean shutdown should, on one of its workers.
fn close_on(workers: &[Arc<WorkerHandle>], disk: Arc<dyn Disk>) -> Result<(), CloseError> {
    if let Some(worker) = workers.first() {
        worker.block_on(move |cx| disk.close(cx))??;
    }
    Ok(())
}

/// The backend, also if a message's handler panicked: then it is only torn down. The mutex is the standard library's, because
/// `vhost` implements its trait for a handler in that one.
fn lock(backend: &Mutex<Backend>) -> MutexGuard<'_, Backend> {
    backend.lock().unwrap_or_else(PoisonError::into_inner)
}
