//! `ringdisk vhost-user`: serves disks to other programs' virtual machines until told to stop.
//!
//! Every disk has a socket and a thread that speaks with its client; the queues run on workers of their own.
//! Nothing is served before every socket is made and every disk is open and locked.
//!
//! What must stay true: after a stop signal no request that was taken is lost. Clients are disconnected,
//! their requests drained, and each image is closed cleanly, whatever became of the others.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use block::worker::StartHook;
use virtio_devices::vhost_user::{StopToken, VhostUserConfig, VhostUserServer, descriptors_max};

use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};
use crate::limits;
use crate::open::{self, OpenedDisk};
use crate::sandbox::{self, AllowedFiles, SandboxError, Task};
use crate::signals::StopSignals;
use crate::socket::Socket;
use crate::takeover::{self, Door, Keeper, Successor};

/// How disks are served.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Guests can go on with a new server when this one is killed.
    pub restartable: bool,
    /// Take over from the server that serves these sockets.
    pub takeover: bool,
    /// Give up, before the first client is looked at, every right that serving does not take.
    pub sandbox: bool,
}

/// One disk being served. Dropped in this order: the image's lock goes last.
struct Served {
    name: String,
    server: VhostUserServer,
    socket: Socket,
    opened: OpenedDisk,
}

/// Serves each disk on its socket until a stop signal, then closes all of them cleanly.
///
/// # Errors
///
/// A failure that names the socket or disk it is about: the first one, if there are several. Disks that
/// could be closed cleanly have been.
pub fn run(disks: Vec<(PathBuf, DiskConfig)>, options: Options) -> Result<u8, CommandFailure> {
    let start = |error: std::io::Error| CommandFailure::about("cannot wait for signals", error);
    let signals = StopSignals::block().map_err(start)?;
    let stop = StopToken::new().map_err(start)?;

    let failed = CommandFailure::Failed;
    limits::prepare_descriptors(disks.iter().map(|(_, config)| descriptors(config)).sum());
    let (paths, configs): (Vec<PathBuf>, Vec<DiskConfig>) = disks.into_iter().unzip();
    let (began, sockets) = if options.takeover {
        // The old server closes its images before these can be locked. What else could be wrong shows now.
        for config in &configs {
            open::rehearse(config).map_err(|error| failed(error.into()))?;
        }
        let began = Instant::now();
        let listeners = takeover::take_over(&paths).map_err(|error| failed(error.into()))?;
        let adopted = listeners.into_iter().zip(&paths);
        let sockets = adopted.map(|(listener, path)| Socket::adopt(listener, path));
        (Some(began), sockets.collect::<Result<Vec<_>, _>>())
    } else {
        (None, paths.iter().map(|path| Socket::listen(path)).collect())
    };
    let sockets = sockets.map_err(|error| failed(error.into()))?;
    let door = open_door(&paths);
    let waiting = sockets.into_iter().zip(configs);
    let mut opened = Vec::new();
    for (socket, config) in waiting {
        let disk = open::open_as(&config, options.restartable);
        opened.push((
            socket,
            config,
            disk.map_err(|error| CommandFailure::Failed(error.into()))?,
        ));
    }
    let fence = |error: SandboxError| CommandFailure::Failed(error.into());
    if options.sandbox {
        // Threads that are started later are inside.
        sandbox::restrict_files(&allowed(&opened)).map_err(fence)?;
    }
    let served = opened
        .into_iter()
        .map(|(socket, config, disk)| serve(socket, &config, disk, options))
        .collect::<Result<Vec<_>, _>>()?;

    stop_on_signal(signals, stop.clone(), options).map_err(start)?;
    let successor = Arc::new(Mutex::new(None));
    if let Some(door) = &door {
        let keeper = door.keeper().map_err(start)?;
        stop_on_takeover(keeper, stop.clone(), Arc::clone(&successor), options).map_err(start)?;
    }
    if let Some(began) = began {
        let (count, ms) = (served.len(), began.elapsed().as_secs_f64() * 1000.0);
        writeln!(std::io::stdout(), "took over {count} disks in {ms:.1} ms")?;
    }
    let mut first_failure = serve_all(&served, &stop, options).err();
    drop(door);
    let successor = successor.lock().unwrap_or_else(PoisonError::into_inner).take();
    let mut listeners = Vec::new();
    for disk in served {
        match close(disk, successor.is_some()) {
            Ok(listener) => listeners.extend(listener),
            Err(failure) => {
                first_failure.get_or_insert(failure);
            }
        }
    }
    if let Some(successor) = successor {
        if let Some(failure) = first_failure {
            successor.refuse("it has failed, and its images may need repair");
            return Err(failure);
        }
        successor
            .hand_over(&listeners)
            .map_err(|error| CommandFailure::about("cannot hand over to the new server", error))?;
    }
    first_failure.map_or(Ok(EXIT_OK), Err)
}

/// How many descriptors serving one disk may take: its clients', and for each queue the files of a chain that is not
/// too long.
fn descriptors(config: &DiskConfig) -> u64 {
    const FILES: u64 = 8;
    descriptors_max(config.num_queues) + FILES * (1 + u64::from(config.num_queues))
}

/// The door for a takeover; without one, where the socket's name is too long for it, only that is missing.
fn open_door(sockets: &[PathBuf]) -> Option<Door> {
    Door::open(sockets)
        .inspect_err(|error| tracing::warn!(%error, "this server cannot be taken over from"))
        .ok()
}

/// What has to stay accessible: the images, and the sockets to be removed in the end.
fn allowed(opened: &[(Socket, DiskConfig, OpenedDisk)]) -> AllowedFiles {
    let mut allowed = AllowedFiles::default();
    for (socket, config, disk) in opened {
        let mut files = disk.disk().files().into_iter();
        let own = files.next();
        if config.readonly {
            allowed.readable.extend(own);
        } else {
            allowed.writable.extend(own);
        }
        allowed.readable.extend(files);
        let folder = socket
            .path()
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        allowed
            .removable_in
            .push(folder.unwrap_or(Path::new(".")).to_owned());
    }
    allowed
}

/// Gives up what threads of `task` do not need.
fn confine(task: Task, options: Options) -> Result<(), SandboxError> {
    if options.sandbox {
        sandbox::restrict_calls(task)?;
    }
    Ok(())
}

/// Starts the workers of one disk.
fn serve(
    socket: Socket,
    config: &DiskConfig,
    opened: OpenedDisk,
    options: Options,
) -> Result<Served, CommandFailure> {
    let name = config.name();
    let server = VhostUserServer::start(opened.disk(), &server_config(config, options))
        .map_err(|error| CommandFailure::about(&name, error))?;
    let (path, driver) = (socket.path().display(), server.driver_name());
    tracing::info!(disk = %name, socket = %path, driver, "waiting for a client");
    Ok(Served {
        name,
        server,
        socket,
        opened,
    })
}

/// What the server needs to know of the disk's configuration.
fn server_config(config: &DiskConfig, options: Options) -> VhostUserConfig {
    let mut server = VhostUserConfig {
        name: config.name(),
        num_queues: config.num_queues,
        queue_size: config.queue_size,
        serial: config.serial.clone().unwrap_or_default(),
        queue_affinity: (0..config.num_queues)
            .map(|queue| config.cpus_of(queue).map(<[usize]>::to_vec).unwrap_or_default())
            .collect(),
        restartable: options.restartable,
        worker_hook: Some(StartHook::new(move || Ok(confine(Task::Queue, options)?))),
        ..VhostUserConfig::default()
    };
    if let Some(poll_us) = config.poll_us {
        server.poll_max = Duration::from_micros(poll_us.into());
    }
    server
}

/// Serves until stopped. A server that fails stops the others, so that the failure is seen.
fn serve_all(served: &[Served], stop: &StopToken, options: Options) -> Result<(), CommandFailure> {
    let serve = |disk: &Served| -> Result<(), CommandFailure> {
        let about =
            |error: Box<dyn std::error::Error + Send + Sync>| CommandFailure::about(&disk.name, error);
        confine(Task::Control, options).map_err(|error| about(error.into()))?;
        let served = disk.server.serve(disk.socket.listener(), stop);
        served.map_err(|error| about(error.into()))
    };
    let results: Vec<Result<(), CommandFailure>> = std::thread::scope(|scope| {
        let threads: Vec<_> = served
            .iter()
            .map(|disk| {
                scope.spawn(move || {
                    let result = serve(disk);
                    if result.is_err() {
                        stop.stop();
                    }
                    result
                })
            })
            .collect();
        if let Err(error) = confine(Task::Control, options) {
            stop.stop();
            return vec![Err(CommandFailure::Failed(error.into()))];
        }
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    });
    results.into_iter().collect()
}

/// Drains and flushes one disk and closes its image; then others may have it. With `hand_over`, gives its
/// listening socket, on which clients may wait.
fn close(disk: Served, hand_over: bool) -> Result<Option<UnixListener>, CommandFailure> {
    let Served {
        name,
        server,
        socket,
        opened,
    } = disk;
    let listener = if hand_over {
        let given = socket.give_up();
        Some(given.map_err(|error| CommandFailure::about(&name, error))?)
    } else {
        drop(socket);
        None
    };
    let closed = server.close();
    drop(opened);
    match &closed {
        Ok(()) => tracing::info!(disk = %name, "closed cleanly"),
        Err(error) => tracing::error!(disk = %name, %error, "not closed cleanly"),
    }
    closed.map_err(|error| CommandFailure::about(name, error))?;
    Ok(listener)
}

/// Starts the thread that stops the server when a new one wants to take over.
fn stop_on_takeover(
    keeper: Keeper,
    stop: StopToken,
    successor: Arc<Mutex<Option<Successor>>>,
    options: Options,
) -> std::io::Result<()> {
    let wait_and_stop = move || -> std::io::Result<()> {
        confine(Task::Control, options)?;
        let new = keeper.wait()?;
        tracing::info!("handing over to a new server");
        *successor.lock().unwrap_or_else(PoisonError::into_inner) = Some(new);
        stop.stop();
        Ok(())
    };
    let report = move || {
        if let Err(error) = wait_and_stop() {
            tracing::error!(%error, "cannot wait for a takeover");
        }
    };
    std::thread::Builder::new()
        .name("takeover".to_owned())
        .spawn(report)?;
    Ok(())
}

/// Starts the thread that turns the first stop signal into a stop, and the second into the end.
fn stop_on_signal(signals: StopSignals, stop: StopToken, options: Options) -> std::io::Result<()> {
    let wait_and_stop = move || {
        confine(Task::Control, options)?;
        let signal = signals.wait()?;
        tracing::info!(signal, "stopping");
        stop.stop();
        let signal = signals.wait()?;
        tracing::error!(signal, "giving up before everything was drained");
        std::process::exit(EXIT_FAILURE.into());
    };
    let report = move || {
        let result: std::io::Result<()> = wait_and_stop();
        if let Err(error) = result {
            tracing::error!(%error, "cannot wait for signals");
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(report)?;
    Ok(())
}
