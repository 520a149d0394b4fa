//! One disk that is served: from its configuration to its server, and to its close.
//!
//! Invariant: the image's lock is released last, when nothing of the disk lives in this process any more.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use block::lock::LockSet;
use block::worker::{FailureHook, StartHook, WorkerConfig, WorkerPool};
use parking_lot::Mutex;
use virtio_devices::vhost_user::{
    DetachedDisk, PausedClient, Reception, VhostUserConfig, VhostUserServer, descriptors_max,
};

use super::image::{Found, Look, ServedImage};
use crate::disk_config::DiskConfig;
use crate::error::CommandFailure;
use crate::exchange::ServedDisk;
use crate::open::{self, Opening};
use crate::sandbox::{self, AllowedFiles, SandboxError, Task};
use crate::socket::{Access, Socket, SocketError, folder_of};

/// The options of `ringdisk vhost-user`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Guests can continue with a new server when this one is killed.
    pub restartable: bool,
    /// Take over from the server that serves these sockets.
    pub takeover: bool,
    /// The longest time that disks may move in then.
    pub takeover_within: Duration,
    /// Another server has the images, until the guests come from there.
    pub incoming: bool,
    /// Give up, before the first client is looked at, every right that serving does not take.
    pub sandbox: bool,
    /// The time within which the service manager wants to hear that the workers work, if it does not say so itself.
    pub watchdog: Option<Duration>,
    /// The bytes that the tables of all images may take in memory together, if they are bounded.
    pub table_cache_bytes: Option<u64>,
    /// This is the process in the background, which says when it is ready.
    pub detached: bool,
    /// Those who may connect to the sockets that are created.
    pub access: Access,
}

impl Options {
    /// Those by which another process continues with the disks, and whether they are given.
    pub(super) fn outliving(&self) -> [(bool, &'static str); 3] {
        [
            (self.restartable, "--restartable"),
            (self.takeover, "--takeover"),
            (self.incoming, "--incoming"),
        ]
    }
}

/// The place of the socket that a disk is served on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Place {
    /// One to be created at this path.
    Path(PathBuf),
    /// One that listens already, as this descriptor of the process.
    Descriptor(RawFd),
}

/// One disk being served. Dropped in this order: the image's lock goes last.
pub(super) struct Served {
    pub(super) name: String,
    /// The place of its socket, as it was asked for.
    pub(super) place: Place,
    /// The client that is connected, while the server is not serving.
    pub(super) client: Mutex<Option<PausedClient>>,
    pub(super) server: Arc<VhostUserServer>,
    /// The disk, for requests of the control socket.
    pub(super) disk: Arc<ServedDisk>,
    pub(super) socket: Socket,
    pub(super) image: Arc<ServedImage>,
}

/// Opens the image of a disk, or looks at the one that another server has.
///
/// # Errors
///
/// [`open::OpenError`], naming the file.
pub(super) fn find(
    config: &DiskConfig,
    options: Options,
    lock_set: &LockSet,
) -> Result<Found, open::OpenError> {
    if options.incoming {
        return Ok(Found::Away(Look::new(config)?, opening(options, lock_set)));
    }
    let opening = opening(options, lock_set);
    let opened = open::open_as(config, &opening)?;
    Ok(Found::Here(opened, opening))
}

/// Returns the purpose for which an image is opened, with locks of its own among those of `lock_set`.
fn opening(options: Options, lock_set: &LockSet) -> Opening {
    Opening {
        persist_mappings: options.restartable,
        lock_set: lock_set.part(),
        ..Opening::default()
    }
}

/// Returns the number of descriptors that serving one disk may take: those of its clients, and for each queue the
/// files of a chain of limited length.
pub(super) fn descriptors(config: &DiskConfig) -> u64 {
    const FILES: u64 = 8;
    descriptors_max(config.num_queues) + FILES * (1 + u64::from(config.num_queues))
}

/// Returns the files that stay accessible: the images, and the sockets to remove at the end.
pub(super) fn allowed(found: &[((Place, Socket), DiskConfig, Found)]) -> AllowedFiles {
    let mut allowed = AllowedFiles::default();
    for ((_, socket), _, image) in found {
        let (read, written) = image.files();
        allowed.readable.extend(read);
        allowed.writable.extend(written);
        allowed.removable_in.push(folder_of(socket.path()));
    }
    allowed
}

/// Listens at a place.
///
/// # Errors
///
/// [`SocketError`], naming it.
pub(super) fn listen(place: &Place, access: Access) -> Result<Socket, SocketError> {
    match place {
        Place::Path(path) => Socket::listen_for(path, access),
        Place::Descriptor(descriptor) => Socket::inherit(*descriptor),
    }
}

/// Gives up what threads of `task` do not need.
pub(super) fn confine(task: Task, options: Options) -> Result<(), SandboxError> {
    if options.sandbox {
        sandbox::restrict_calls(task)?;
    }
    Ok(())
}

/// Starts the server of one disk, at `place`.
pub(super) fn serve(
    (place, socket): (Place, Socket),
    config: DiskConfig,
    found: Found,
    options: Options,
    workers: Workers<'_>,
) -> Result<Served, CommandFailure> {
    let name = config.name();
    let disk = match &found {
        Found::Here(opened, _) => opened.disk(),
        Found::Away(..) => Arc::new(DetachedDisk::new(found.info())),
    };
    let mut server = VhostUserServer::start(disk, &server_config(&config, options, workers))
        .map_err(|error| CommandFailure::about(&name, error))?;
    let disk = ServedDisk::new(format!("disk {name}"), &config, server.stats());
    let is_lasting = config.overlay.is_none();
    let image = ServedImage::new(config, Arc::clone(&disk), found);
    if is_lasting {
        let is_away = image.is_away();
        server.share_image(Arc::clone(&image) as _, is_away);
    }
    let (path, driver) = (socket.path().display(), server.driver_name());
    tracing::info!(disk = %name, socket = %path, driver, "waiting for a client");
    Ok(Served {
        disk,
        name,
        place,
        client: Mutex::default(),
        server: Arc::new(server),
        socket,
        image,
    })
}

/// The workers of a disk's queues.
#[derive(Clone, Copy)]
pub(super) struct Workers<'a> {
    /// Those of all disks; without them each queue has its own.
    pub(super) shared: Option<&'a Arc<WorkerPool>>,
    /// Called by each that fails.
    pub(super) on_failure: &'a FailureHook,
}

/// Returns what has disks let go of whose workers have failed.
pub(super) fn failure_hook(reception: &Arc<Reception>) -> FailureHook {
    // Workers end with the disks, which the reception has.
    let reception = Arc::downgrade(reception);
    FailureHook::new(move || reception.upgrade().iter().for_each(|reception| reception.look()))
}

/// Returns a worker's last step before it serves.
pub(super) fn queue_hook(options: Options) -> StartHook {
    StartHook::new(move || Ok(confine(Task::Queue, options)?))
}

/// Returns the server's part of the disk's configuration.
fn server_config(config: &DiskConfig, options: Options, workers: Workers<'_>) -> VhostUserConfig {
    let Workers { shared, on_failure } = workers;
    let worker = WorkerConfig {
        on_start: Some(queue_hook(options)),
        on_failure: Some(on_failure.clone()),
        ..WorkerConfig::default()
    };
    VhostUserConfig {
        name: config.name(),
        num_queues: config.num_queues,
        queue_size: config.queue_size,
        serial: config.serial.clone().unwrap_or_default(),
        workers: config.workers(&worker),
        pool: shared.cloned(),
        restartable: options.restartable,
    }
}

/// Drains and flushes one disk, which is served no longer, and closes its image; then others may have it.
///
/// # Errors
///
/// If that was not possible cleanly.
pub(super) fn close(disk: &Served) -> Result<(), CommandFailure> {
    let name = &disk.name;
    disk.disk.detach();
    drop(disk.client.lock().take());
    disk.socket.remove();
    let closed = disk.server.close_disk();
    disk.image.close();
    match &closed {
        Ok(()) => tracing::info!(disk = %name, "the image was closed cleanly"),
        Err(error) => tracing::error!(disk = %name, %error, "the image was not closed cleanly"),
    }
    closed.map_err(|error| CommandFailure::about(name, error))
}
