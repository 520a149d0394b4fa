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
#[cfg(test)]
mod restart_tests;
mod sigbus;
#[cfg(test)]
mod state_tests;
mod stop_token;
#[cfg(test)]
mod tests;
mod vring;

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use block::report::LogLimit;
use block::worker::{StartWorkerError, WorkerConfig, WorkerGone, WorkerHandle, WorkerPool};
use block::{Disk, IoError};
use vhost::vhost_user::{BackendReqHandler, Error as MessageError};

use crate::blk::{BlockDevice, BlockDeviceConfig, CacheMode, SerialTooLong};
use crate::stats::DiskStats;
use backend::Backend;
pub use config_channel::ConfigChannel;
pub use handover::{ClientState, HandOverError, Message, PausedClient};
use image::Image;
pub use image::{DetachedDisk, ImageOwner};
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

    /// Returns the statistics of its disk's queues.
    #[must_use]
    pub fn stats(&self) -> &Arc<DiskStats> {
        self.device.stats()
    }

    /// Serves the clients that connect to `listener`, one after another, until `stop` is asked to stop.
    /// What a client asked for before it went, or before the stop, has been answered and published when
    /// this returns. A client's mistakes end its connection, not the server.
    ///
    /// # Errors
    ///
    /// [`ServeError`]: the listener or a worker failed.
    pub fn serve(&self, listener: &UnixListener, stop: &StopToken) -> Result<(), ServeError> {
        self.serve_on(listener, stop, None).map(drop)
    }

    /// As [`VhostUserServer::serve`], beginning with a client that is connected already, if there is one. Returns
    /// also when `stop` is asked to pause, with the client that is connected then; its queues have drained and kept
    /// their places, and it has not noticed.
    ///
    /// # Errors
    ///
    /// [`ServeError`]: the listener or a worker failed.
    pub fn serve_on(
        &self,
        listener: &UnixListener,
        stop: &StopToken,
        client: Option<PausedClient>,
    ) -> Result<Option<PausedClient>, ServeError> {
        let mut short = false;
        if let Some(client) = client
            && let Some(paused) = self.serve_client(self.go_on(client)?, listener, stop)?
        {
            return Ok(Some(paused));
        }
        while !stop.is_called() {
            let (connecting, _) =
                event::wait_readable(listener.as_fd(), stop.event()).map_err(ServeError::Accept)?;
            if stop.is_called() || !connecting {
                continue;
            }
            match listener.accept() {
                Ok((stream, _)) => {
                    short = false;
                    // An accepted socket may have inherited this from a listener that polls.
                    if let Err(error) = stream.set_nonblocking(false) {
                        tracing::warn!(disk = %self.name, %error, "cannot serve a client");
                        continue;
                    }
                    if let Some(held_back) = self.log_limit.admit() {
                        tracing::info!(event = "client-connected", disk = %self.name, held_back, "a client has connected");
                    }
                    if let Some(paused) = self.serve_client(self.receive(stream), listener, stop)? {
                        return Ok(Some(paused));
                    }
                }
                Err(error) if is_short(&error) => {
                    if !std::mem::replace(&mut short, true) {
                        tracing::warn!(disk = %self.name, %error, "cannot accept a connection now");
                    }
                    // The client goes on waiting; a stop does not.
                    event::wait_readable_for(stop.event(), SHORTAGE).map_err(ServeError::Accept)?;
                }
                Err(error) if is_passing(&error) => {
                    tracing::debug!(disk = %self.name, %error, "a connection was closed before it was accepted");
                }
                Err(error) => return Err(ServeError::Accept(error)),
            }
        }
        Ok(None)
    }

    /// A client of whom nothing is known yet.
    fn receive(&self, stream: UnixStream) -> PausedClient {
        self.look_at_image();
        let backend = Arc::new(Mutex::new(Backend::new(
            Arc::clone(&self.device),
            Arc::clone(&self.workers),
            self.restartable,
            self.channel.clone(),
            self.image.clone(),
        )));
        PausedClient::new(
            BackendReqHandler::from_stream(stream, Arc::clone(&backend)),
            backend,
        )
    }

    /// Shows the image that another server has as it is now.
    fn look_at_image(&self) {
        let image = self.image.as_ref().filter(|image| image.is_away());
        if let Some(info) = image.and_then(|image| image.owner().look()) {
            self.device.set_disk(Arc::new(DetachedDisk::new(info)));
        }
    }

    /// Serves one client until it goes, errs or `stop` is asked to stop; or to pause, and then gives it back.
    fn serve_client(
        &self,
        client: PausedClient,
        listener: &UnixListener,
        stop: &StopToken,
    ) -> Result<Option<PausedClient>, ServeError> {
        let PausedClient {
            mut messages,
            backend,
            ..
        } = client;
        let (guard, connection) = match messages
            .try_clone_connection()
            .and_then(|connection| Ok((stop.watch(connection.try_clone()?), connection)))
        {
            Ok(watched) => watched,
            Err(error) => {
                tracing::warn!(disk = %self.name, %error, "cannot serve a client");
                lock(&backend).disconnect()?;
                return Ok(None);
            }
        };
        // Looked at until somebody waits there, who then does so for as long as this client is served.
        let mut others = Some(listener.as_fd());
        let mut report_at: Option<Instant> = None;
        let result = loop {
            // A pause comes between two messages, and what was not read is for whoever goes on.
            let watched = [Some(connection.as_fd()), Some(stop.event()), others];
            let waits_for_image = lock(&backend).waits_for_image();
            let try_again = waits_for_image.then_some(IMAGE_RETRY);
            let report = report_at.map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = try_again.into_iter().chain(report).min();
            match event::wait_any(watched, timeout) {
                Ok(_) if stop.is_paused() => {
                    drop(guard);
                    lock(&backend).stop_all()?;
                    return Ok(Some(PausedClient::new(messages, backend)));
                }
                Ok([true, ..]) => {}
                Ok([false, ..]) if stop.is_stopped() => break MessageError::Disconnected,
                Ok([false, _, true]) => {
                    others = None;
                    report_at = Some(Instant::now() + WAITING_MIN);
                    continue;
                }
                Ok(_) => {
                    if waits_for_image && lock(&backend).try_again().is_err() {
                        break MessageError::BackendInternalError;
                    }
                    if report_at.take_if(|at| *at <= Instant::now()).is_some() {
                        self.report_waiting(&connection);
                    }
                    continue;
                }
                Err(error) => break MessageError::SocketError(error),
            }
            guard.reading(true);
            let watched = self.channel.watch(&connection).map_err(MessageError::SocketError);
            let handled = watched.and_then(|()| messages.handle_request());
            guard.reading(false);
            // The answer has been sent, and is the client's even if this process dies now.
            lock(&backend).note_cache_mode();
            match handled {
                Ok(()) | Err(MessageError::SocketRetry(_)) => {}
                // The backend refused something and the client was told, if it wanted to know.
                Err(MessageError::ReqHandlerError(error)) if lock(&backend).answers_errors() => {
                    if let Some(held_back) = self.device.log_limit().admit() {
                        tracing::warn!(disk = %self.name, %error, held_back, "refused a message of the client");
                    }
                }
                Err(error) => break error,
            }
            if lock(&backend).worker_gone() {
                break MessageError::BackendInternalError;
            }
        };
        match result {
            _ if stop.is_stopped() => {
                tracing::info!(event = "client-gone", disk = %self.name, "disconnecting the client")
            }
            MessageError::Disconnected => {
                if let Some(held_back) = self.log_limit.admit() {
                    tracing::info!(event = "client-gone", disk = %self.name, held_back, "the client has disconnected");
                }
            }
            error => {
                if let Some(held_back) = self.device.log_limit().admit() {
                    tracing::warn!(event = "client-gone", disk = %self.name, %error, held_back, "disconnecting the client");
                }
            }
        }
        let mut backend = lock(&backend);
        backend.disconnect()?;
        Ok(None)
    }

    /// Logs that another client waits for this one to go: neither of them can know.
    fn report_waiting(&self, connection: &UnixStream) {
        if let Some(held_back) = self.device.log_limit().admit() {
            let connected = event::peer_process(connection.as_fd());
            tracing::warn!(
                disk = %self.name, connected_process = connected, held_back,
                "another client has connected and waits until the current one disconnects: one client is served at a time"
            );
        }
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
    /// Waits until every worker has come to the end of a round: for ever, if one hangs. Those of a server that has ended are passed over.
    ///
    /// # Errors
    ///
    /// If a worker has ended by itself.
    pub fn beat(&self) -> Result<(), WorkerGone> {
        let workers = self.0.upgrade();
        let mut workers = workers.iter().flat_map(|workers| workers.iter());
        workers.try_for_each(|worker| worker.run(|_| ()))
    }
}

/// Closes a disk as a clean shutdown should, on one of its workers.
fn close_on(workers: &[Arc<WorkerHandle>], disk: Arc<dyn Disk>) -> Result<(), CloseError> {
    if let Some(worker) = workers.first() {
        worker.block_on(move |cx| disk.close(cx))??;
    }
    Ok(())
}

/// The time after which the log names a waiting client and the connected one. The latter may be about to disconnect,
/// and a process that it forked may keep its connection open for a moment.
const WAITING_MIN: Duration = Duration::from_secs(1);

/// The delay before an image is tried again that another process has.
const IMAGE_RETRY: Duration = Duration::from_millis(20);

/// The delay before accepting is tried again after a lack of descriptors or memory.
const SHORTAGE: Duration = Duration::from_millis(100);

/// Returns true if accepting may work later, when resources are free again.
fn is_short(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS)
    )
}

/// Returns true if another connection can still be accepted.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ECONNABORTED | libc::EINTR | libc::EAGAIN)
    )
}

/// The backend, also if a message's handler panicked: then it is only torn down. The mutex is the standard library's, because
/// `vhost` implements its trait for a handler in that one.
fn lock(backend: &Mutex<Backend>) -> MutexGuard<'_, Backend> {
    backend.lock().unwrap_or_else(PoisonError::into_inner)
}
