//! `ringdisk vhost-user`: serves disks to other programs' virtual machines.
//!
//! Every disk has a socket and a thread for its client; the queues run on workers of their own.
//! A client is served only after every socket is created and every disk is open and locked.
//!
//! Invariants: after a stop signal no request that was taken is lost. Clients are disconnected, their requests drained, and
//! each image is closed cleanly, even if another one fails.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use block::lock::LockSet;
use block::worker::{StartHook, WorkerConfig};
use parking_lot::Mutex;
use virtio_devices::vhost_user::{
    PausedClient, StopToken, VhostUserConfig, VhostUserServer, descriptors_max,
};

use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};
use crate::open::{self, OpenedDisk, Opening};
use crate::sandbox::{self, AllowedFiles, SandboxError, Task};
use crate::signals::{StopSignals, is_log_read};
use crate::socket::{Socket, SocketError};
use crate::takeover::{self, Door, Offer, Successor};
use crate::{background, limits, sd_notify};

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
}

/// The longest time that a client may take to complete a message, and its thread to execute it, during a takeover. It
/// is long enough for a busy machine, because slower clients are disconnected.
const MESSAGE_MAX: Duration = Duration::from_secs(1);
/// The longest wait for the image locks after a failed takeover: the new server may still be exiting.
const REOPEN_MAX: Duration = Duration::from_secs(20);

/// The longest time that a start interrupted by a signal may take to end by itself, between two images.
const START_END_MAX: Duration = Duration::from_secs(1);

/// One disk being served. Dropped in this order: the image's lock goes last.
struct Served {
    name: String,
    config: DiskConfig,
    /// The client that is connected, while the server is not serving.
    client: Option<PausedClient>,
    server: VhostUserServer,
    socket: Socket,
    /// `None` while the image is closed, in a takeover.
    opened: Option<OpenedDisk>,
}

/// The state of a pending takeover.
struct Takeover {
    door: Door,
    successor: Arc<Mutex<Option<Successor>>>,
    /// Reopens the takeover socket after a failed takeover.
    again: mpsc::Sender<()>,
}

/// Serves each disk on its socket until a stop signal, then closes all of them cleanly.
///
/// # Errors
///
/// A failure that names the socket or disk it is about: the first one, if there are several. Disks that
/// could be closed cleanly have been.
pub fn run(disks: Vec<(PathBuf, DiskConfig)>, options: Options) -> Result<u8, CommandFailure> {
    let start = |error: std::io::Error| CommandFailure::about("cannot wait for signals", error);
    if options.detached {
        background::leave_session().map_err(start)?;
    }
    let manager = sd_notify::Manager::find();
    let signals = StopSignals::block().map_err(start)?;
    let stop = StopToken::new().map_err(start)?;

    // Opening images may take minutes: a signal is heard from the beginning.
    let serving = Arc::new(AtomicBool::new(false));
    stop_on_signal(signals, stop.clone(), Arc::clone(&serving), options).map_err(start)?;
    let failed = CommandFailure::Failed;
    limits::prepare_descriptors(disks.iter().map(|(_, config)| descriptors(config)).sum());
    let (paths, configs): (Vec<PathBuf>, Vec<DiskConfig>) = disks.into_iter().unzip();
    let mut offer = None;
    let began = Instant::now();
    let sockets = if options.takeover {
        // The old server closes its images before these can be locked. What else could be wrong shows now.
        for config in &configs {
            open::rehearse(config).map_err(|error| failed(error.into()))?;
        }
        let offered = takeover::take_over(&paths).map_err(|error| failed(error.into()))?;
        let offered = offer.insert(offered);
        offered.begin().map_err(|error| failed(error.into()))?;
        adopt_sockets(&paths, offered)
    } else {
        paths.iter().map(|path| Socket::listen(path)).collect()
    };
    // As long as this server may still fail, the sockets are the old one's.
    let sockets = sockets.map_err(|error| failed(error.into()))?;
    let door = match &offer {
        Some(offer) => Door::adopt(offer.door.try_clone().map_err(start)?, &paths).ok(),
        None => open_door(&paths),
    };
    let mut lock_set = offer
        .as_ref()
        .map(|offer| offer.lock_set.clone())
        .unwrap_or_default();
    let waiting = sockets.into_iter().zip(configs);
    // Dropped before the offer, whatever fails: then the old server opens its images again.
    let mut opened = Vec::new();
    for (socket, config) in waiting {
        if stop.is_stopped() {
            return Ok(EXIT_OK);
        }
        let disk = open::open_as(&config, &opening(options, &lock_set));
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
    let mut served = opened
        .into_iter()
        .map(|(socket, config, disk)| serve(socket, config, disk, options))
        .collect::<Result<Vec<_>, _>>()?;

    // From here on a stop closes what is open.
    serving.store(true, Ordering::SeqCst);
    if let Some(offer) = &mut offer {
        let accepted = if stop.is_stopped() {
            Ok(false)
        } else {
            accept(offer, &mut served).map(|()| true)
        };
        if !matches!(accepted, Ok(true)) {
            // As they were found; the old server wants them back, and has them when the offer is dropped.
            for disk in served {
                close(disk).unwrap_or_default();
            }
            return accepted.map(|_| EXIT_OK);
        }
        let (count, ms) = (served.len(), began.elapsed().as_secs_f64() * 1000.0);
        let disks = if count == 1 { "disk" } else { "disks" };
        writeln!(std::io::stdout(), "took over {count} {disks} in {ms:.1} ms")?;
    }
    drop(offer);
    for disk in &mut served {
        disk.socket.keep().map_err(|error| failed(error.into()))?;
    }
    let mut takeover = None;
    if let Some(mut door) = door {
        door.keep().map_err(|error| failed(error.into()))?;
        takeover = Some(stop_on_takeover(door, stop.clone(), options).map_err(start)?);
    }
    // Clients could connect before; from here on nothing keeps them from being served.
    manager.ready();
    announce(&served, options);
    serve_until_stopped(served, &stop, takeover, options, &mut lock_set)
}

/// Prints which disk is served on which socket, and notifies the process that waits in the foreground.
fn announce(served: &[Served], options: Options) {
    let mut lines = String::new();
    for disk in served {
        let (name, socket, process) = (&disk.name, disk.socket.path().display(), std::process::id());
        lines += &format!("serving {name} on {socket} (process {process})\n");
    }
    if options.detached {
        lines = lines + background::READY + "\n";
    }
    // Guests are served as well if nobody reads this.
    std::io::stdout().write_all(lines.as_bytes()).unwrap_or_default();
}

/// The sockets that an old server offers, in order.
fn adopt_sockets(paths: &[PathBuf], offer: &mut Offer) -> Result<Vec<Socket>, SocketError> {
    let listeners = offer.disks.iter().zip(paths);
    let adopted = listeners.map(|(disk, path)| {
        let listener = disk.listener.try_clone().map_err(|source| SocketError::Os {
            action: "take over",
            path: path.clone(),
            source,
        })?;
        Socket::adopt(listener, path)
    });
    adopted.collect()
}

/// Adopts the clients of an old server. Until the new server confirms, the old one can continue with them.
fn accept(offer: &mut Offer, served: &mut [Served]) -> Result<(), CommandFailure> {
    for (disk, handed) in served.iter_mut().zip(std::mem::take(&mut offer.disks)) {
        let client = handed.client.map(|state| disk.server.adopt(state)).transpose();
        disk.client = client.map_err(|error| takeover::not_adopted(&disk.name, error))?;
    }
    offer
        .accept()
        .map_err(|error| CommandFailure::Failed(error.into()))
}

/// Serves until a stop, or until a new server has taken over, and closes what is open then.
fn serve_until_stopped(
    mut served: Vec<Served>,
    stop: &StopToken,
    takeover: Option<Takeover>,
    options: Options,
    lock_set: &mut LockSet,
) -> Result<u8, CommandFailure> {
    let mut takeover = takeover;
    // Threads that are started from here on are inside.
    let confined = confine(Task::Control, options);
    let confined = confined.map_err(|error| CommandFailure::Failed(error.into()));
    let mut unconfined = confined.err();
    let mut first_failure = loop {
        if unconfined.is_some() {
            break unconfined.take();
        }
        let failure = serve_all(&mut served, stop).err();
        let Some(wanted) = &takeover else {
            break failure;
        };
        let successor = wanted.successor.lock().take();
        let Some(successor) = successor else {
            break failure;
        };
        if failure.is_some() || stop.is_stopped() {
            successor.refuse("it is stopping, and its images may need repair");
            break failure;
        }
        match hand_over(&mut served, &wanted.door, successor, lock_set) {
            Ok(()) => {
                served.into_iter().for_each(|disk| disk.socket.give_up());
                if let Some(Takeover { door, .. }) = takeover.take() {
                    door.give_up();
                }
                return Ok(EXIT_OK);
            }
            Err(HandOverFailure::Close(failure)) => break Some(failure),
            Err(HandOverFailure::NotTaken(error)) => {
                let disks = names(&served);
                let error = lost(error);
                tracing::warn!(disks, %error, "the takeover failed; this server continues to serve");
                if let Err(failure) = reopen(&mut served, options, lock_set) {
                    break Some(failure);
                }
                stop.resume();
                // The thread at the door ends with the process only.
                wanted.again.send(()).unwrap_or_default();
            }
        }
    };
    drop(takeover);
    for disk in served {
        if let Err(failure) = close(disk) {
            first_failure.get_or_insert(failure);
        }
    }
    first_failure.map_or(Ok(EXIT_OK), Err)
}

/// The names of these disks, for the log.
fn names(served: &[Served]) -> String {
    let names: Vec<&str> = served.iter().map(|disk| disk.name.as_str()).collect();
    names.join(", ")
}

/// Explains a failure of a takeover's connection.
fn lost(error: std::io::Error) -> std::io::Error {
    use std::io::{Error, ErrorKind};
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            Error::new(error.kind(), "it has exited or given up; see its own output")
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::new(error.kind(), "it did not answer in time"),
        _ => error,
    }
}

/// The failure of a handover.
enum HandOverFailure {
    /// An image was not closed cleanly, and must be checked before another server opens it.
    Close(CommandFailure),
    /// The new server has exited, or refused. The images are closed and sound.
    NotTaken(std::io::Error),
}

/// Closes the images and offers everything to a new server. If that does not take it, `lock_set` has what
/// is to be opened again with.
fn hand_over(
    served: &mut [Served],
    door: &Door,
    successor: Successor,
    lock_set: &mut LockSet,
) -> Result<(), HandOverFailure> {
    let mut locks = Vec::new();
    if successor.takes_locks() {
        match lock_set.descriptors() {
            Ok(held) => {
                locks = held;
                lock_set.leave();
            }
            // Given back, as by a server that takes none, and taken again by whoever opens the images.
            Err(error) => tracing::warn!(%error, "cannot pass the image locks to the new server"),
        }
    }
    let mut failed = None;
    for disk in served.iter_mut() {
        let closed = disk.server.close_disk(disk.client.as_ref());
        disk.opened = None;
        if let Err(error) = closed {
            tracing::error!(disk = %disk.name, %error, "the image was not closed cleanly");
            failed.get_or_insert(CommandFailure::about(&disk.name, error));
        }
    }
    if let Some(failure) = failed {
        successor.refuse("it failed to close an image, which may need repair");
        return Err(HandOverFailure::Close(failure));
    }
    let states = served
        .iter()
        .map(|disk| disk.client.as_ref().map(PausedClient::state).transpose());
    let states = states.collect::<std::io::Result<Vec<_>>>();
    let listeners = served.iter().map(|disk| disk.socket.listener());
    let handed =
        states.and_then(|states| successor.hand_over(door.listener(), &locks, listeners.zip(states)));
    handed.map_err(|error| {
        *lock_set = LockSet::inherit(locks);
        match successor.take_back(REOPEN_MAX) {
            Ok(()) => HandOverFailure::NotTaken(error),
            Err(error) => {
                let told = "the new server has neither taken over nor released the images";
                HandOverFailure::Close(CommandFailure::about(told, error))
            }
        }
    })
}

/// Opens the images again that were closed for a new server, which did not take them.
fn reopen(served: &mut [Served], options: Options, lock_set: &LockSet) -> Result<(), CommandFailure> {
    let deadline = Instant::now() + REOPEN_MAX;
    for disk in served {
        let opened = loop {
            match open::open_as(&disk.config, &opening(options, lock_set)) {
                Err(error) if error.is_locked() && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                opened => break opened.map_err(|error| CommandFailure::Failed(error.into()))?,
            }
        };
        disk.server.reopen(opened.disk(), disk.client.as_ref());
        disk.opened = Some(opened);
    }
    lock_set.keep();
    Ok(())
}

/// Returns the purpose for which images are opened.
fn opening(options: Options, lock_set: &LockSet) -> Opening {
    Opening {
        persist_mappings: options.restartable,
        lock_set: lock_set.clone(),
        ..Opening::default()
    }
}

/// Returns the number of descriptors that serving one disk may take: those of its clients, and for each queue the
/// files of a chain of limited length.
fn descriptors(config: &DiskConfig) -> u64 {
    const FILES: u64 = 8;
    descriptors_max(config.num_queues) + FILES * (1 + u64::from(config.num_queues))
}

/// Opens the takeover socket. Without one, because the socket's name is too long for it, the server only cannot be
/// taken over.
fn open_door(sockets: &[PathBuf]) -> Option<Door> {
    Door::open(sockets)
        .inspect_err(|error| tracing::warn!(%error, "no new server can take over from this one"))
        .ok()
}

/// Returns the files that stay accessible: the images, and the sockets to remove at the end.
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
        name,
        config,
        client: None,
        server,
        socket,
        opened: Some(opened),
    })
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

/// Serves until stopped or paused. A server that fails stops the others, so that the failure is seen.
fn serve_all(served: &mut [Served], stop: &StopToken) -> Result<(), CommandFailure> {
    let serve = |disk: &mut Served| -> Result<(), CommandFailure> {
        let about =
            |error: Box<dyn std::error::Error + Send + Sync>| CommandFailure::about(&disk.name, error);
        let client = disk.client.take();
        let served = disk.server.serve_on(disk.socket.listener(), stop, client);
        disk.client = served.map_err(|error| about(error.into()))?;
        Ok(())
    };
    let results: Vec<Result<(), CommandFailure>> = std::thread::scope(|scope| {
        let threads: Vec<_> = served
            .iter_mut()
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

/// Drains and flushes one disk and closes its image; then others may have it.
fn close(disk: Served) -> Result<(), CommandFailure> {
    let Served {
        name,
        client,
        server,
        socket,
        opened,
        ..
    } = disk;
    drop((client, socket));
    let closed = server.close();
    drop(opened);
    match &closed {
        Ok(()) => tracing::info!(disk = %name, "the image was closed cleanly"),
        Err(error) => tracing::error!(disk = %name, %error, "the image was not closed cleanly"),
    }
    closed.map_err(|error| CommandFailure::about(name, error))
}

/// Starts the thread that pauses the server when a new one wants to take over.
fn stop_on_takeover(door: Door, stop: StopToken, options: Options) -> std::io::Result<Takeover> {
    let keeper = door.keeper()?;
    let successor = Arc::new(Mutex::new(None));
    let shared = Arc::clone(&successor);
    let (again, resumed) = mpsc::channel();
    let wait_and_pause = move || -> std::io::Result<()> {
        confine(Task::Control, options)?;
        loop {
            let new = keeper.wait()?;
            tracing::info!("handing over to a new server");
            *shared.lock() = Some(new);
            stop.pause(MESSAGE_MAX);
            if resumed.recv().is_err() {
                return Ok(());
            }
        }
    };
    let report = move || {
        if let Err(error) = wait_and_pause() {
            tracing::error!(%error, "cannot wait for a takeover");
        }
    };
    std::thread::Builder::new()
        .name("takeover".to_owned())
        .spawn(report)?;
    Ok(Takeover {
        door,
        successor,
        again,
    })
}

/// Starts the thread that turns the first stop signal into a stop, and the second into the end. So is the first one, if
/// what is to be `serving` does not notice the stop because it is still being opened.
fn stop_on_signal(
    signals: StopSignals,
    stop: StopToken,
    serving: Arc<AtomicBool>,
    options: Options,
) -> std::io::Result<()> {
    let wait_and_stop = move || {
        if options.sandbox {
            sandbox::confine_thread(Task::Control)?;
        }
        let signal = signals.wait()?;
        stop.stop();
        if is_log_read() {
            tracing::info!(signal, "stopping");
        }
        if !serving.load(Ordering::SeqCst) {
            std::thread::sleep(START_END_MAX);
            if !serving.load(Ordering::SeqCst) {
                give_up(signal, "exiting before all images were open");
            }
        }
        let signal = signals.wait()?;
        give_up(signal, "exiting with requests in flight")
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

/// Ends the process as it is.
fn give_up(signal: &str, why: &str) -> ! {
    if is_log_read() {
        tracing::error!(signal, "{why}");
    }
    std::process::exit(EXIT_FAILURE.into());
}
