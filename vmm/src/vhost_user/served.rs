//! One disk that is served: from its configuration to its server, and to its close.
//!
//! Invariant: the image's lock is released last, when nothing of the disk lives in this process any more.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;

use block::lock::LockSet;
use block::worker::{StartHook, WorkerConfig};
use virtio_devices::stats::DiskStats;
use virtio_devices::vhost_user::{PausedClient, VhostUserConfig, VhostUserServer, descriptors_max};

use crate::disk_config::DiskConfig;
use crate::error::CommandFailure;
use crate::exchange::ServedDisk;
use crate::metrics::{DiskReport, Source};
use crate::open::{OpenedDisk, Opening};
use crate::sandbox::{self, AllowedFiles, SandboxError, Task};
use crate::socket::{Access, Socket, folder_of};

/// The options of `ringdisk vhost-user`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Guests can continue with a new server when this one is killed.
    pub restartable: bool,
    /// Take over from the server that serves these sockets.
    pub takeover: bool,
    /// Give up, before the first client is looked at, every right that serving does not take.
    pub sandbox: bool,
    /// This is the process in the background, which says when it is ready.
    pub detached: bool,
    /// Those who may connect to the sockets that are created.
    pub access: Access,
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
    pub(super) config: DiskConfig,
    /// The client that is connected, while the server is not serving.
    pub(super) client: Option<PausedClient>,
    pub(super) server: VhostUserServer,
    /// The disk, for requests of the control socket.
    pub(super) disk: Arc<ServedDisk>,
    pub(super) socket: Socket,
    /// `None` while the image is closed, in a takeover.
    pub(super) opened: Option<OpenedDisk>,
}

/// Returns the purpose for which images are opened.
pub(super) fn opening(options: Options, lock_set: &LockSet) -> Opening {
    Opening {
        persist_mappings: options.restartable,
        lock_set: lock_set.clone(),
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
pub(super) fn allowed(opened: &[(Socket, DiskConfig, OpenedDisk)]) -> AllowedFiles {
    let mut allowed = AllowedFiles::default();
    for (socket, _, disk) in opened {
        let disk = disk.disk();
        let written = disk.written_files();
        let files = disk.files().into_iter();
        allowed
            .readable
            .extend(files.filter(|file| !written.contains(file)));
        allowed.writable.extend(written);
        allowed.removable_in.push(folder_of(socket.path()));
    }
    allowed
}

/// Gives up what threads of `task` do not need.
pub(super) fn confine(task: Task, options: Options) -> Result<(), SandboxError> {
    if options.sandbox {
        sandbox::restrict_calls(task)?;
    }
    Ok(())
}

/// Starts the workers of one disk.
pub(super) fn serve(
    socket: Socket,
    config: DiskConfig,
    opened: OpenedDisk,
    options: Options,
) -> Result<Served, CommandFailure> {
    let name = config.name();
    let server = VhostUserServer::start(opened.disk(), &server_config(&config, options))
        .map_err(|error| CommandFailure::about(&name, error))?;
    let (path, driver) = (socket.path().display(), server.driver_name());
    tracing::info!(disk = %name, socket = %path, driver, "waiting for a client");
    Ok(Served {
        disk: ServedDisk::of(format!("disk {name}"), &config, server.stats(), &opened),
        name,
        config,
        client: None,
        server,
        socket,
        opened: Some(opened),
    })
}

/// Returns what gives the statistics of these disks, as long as this process serves them.
pub(super) fn reports(served: &[Served]) -> Arc<Source> {
    let disks = served.iter().map(|served| {
        let stats = Arc::clone(served.server.stats());
        (served.name.clone(), stats, Arc::clone(&served.disk))
    });
    let disks: Vec<_> = disks.collect();
    let report = |(name, stats, disk): &(String, Arc<DiskStats>, Arc<ServedDisk>)| {
        DiskReport::new(name.clone(), stats.snapshot(), disk.engine_counts())
    };
    Arc::new(move || disks.iter().map(report).collect())
}

/// Returns the server's part of the disk's configuration.
fn server_config(config: &DiskConfig, options: Options) -> VhostUserConfig {
    let worker = WorkerConfig {
        on_start: Some(StartHook::new(move || Ok(confine(Task::Queue, options)?))),
        ..WorkerConfig::default()
    };
    VhostUserConfig {
        name: config.name(),
        num_queues: config.num_queues,
        queue_size: config.queue_size,
        serial: config.serial.clone().unwrap_or_default(),
        workers: config.workers(&worker),
        restartable: options.restartable,
    }
}

/// Drains and flushes one disk and closes its image; then others may have it.
pub(super) fn close(disk: Served) -> Result<(), CommandFailure> {
    let Served {
        name,
        client,
        server,
        socket,
        opened,
        disk,
        ..
    } = disk;
    disk.detach();
    drop((client, socket));
    let closed = server.close();
    drop(opened);
    match &closed {
        Ok(()) => tracing::info!(disk = %name, "the image was closed cleanly"),
        Err(error) => tracing::error!(disk = %name, %error, "the image was not closed cleanly"),
    }
    closed.map_err(|error| CommandFailure::about(name, error))
}
