//! `ringdisk ublk add`, `recover` and `upgrade`, and `ringdisk serve` of devices: the server's process, from its start to its end.
//!
//! Invariants: after a stop signal every device is stopped, drained and deleted, and each image closed cleanly,
//! even if another one fails. A device with a broken queue does no more I/O, and is left untouched until this process
//! exits: then it can be recovered.

use std::io::Write;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use virtio_devices::ublk::{QueueEvent, block_path};

use super::additions::{Additions, DisksThread};
use super::arguments::{AddArguments, RecoverArguments, ServeArguments, UpgradeArguments};
use super::bring_up::{self, bring_up, open_disk};
use super::file::DevicesFile;
use super::groups::Groups;
use super::reload::Followed;
use super::served::{Event, Server, ServerState, close};
use super::upgrade::{self, Predecessor};
use super::wanted::{self, NewDevices, Wanted};
use super::{command_process, configured, devices, io_timeout, requests, sandbox, served};
use crate::control::{Control as ControlSocket, Server as ControlServer};
use crate::error::{CommandFailure, EXIT_OK};
use crate::exchange;
use crate::heed::{self, Reactions, give_up};
use crate::image_folders;
use crate::metrics::Metrics;
use crate::open;
use crate::parallel;
use crate::pid_file::PidFile;
use crate::saved_devices::state;
use crate::socket::Socket;
use crate::takeover::{TakeoverArguments, WITHIN};
use crate::{background, limits, sd_notify};

/// The devices that descriptors are prepared for where others may be added.
const LATER_DEVICES: u64 = 1024;

/// `ringdisk ublk add`.
///
/// # Errors
///
/// A failure that names the disk; no device of this call is left then.
pub(super) fn add(arguments: &AddArguments) -> Result<u8, CommandFailure> {
    let new = NewDevices::of(arguments)?;
    let mut groups = Groups::parse(&arguments.serve.rate_limit_group)?;
    let wanted = wanted::added(arguments, &new, &mut groups)?;
    if arguments.serve.daemonize {
        return background::start();
    }
    serve(Begin {
        wanted,
        predecessors: Vec::new(),
        within: WITHIN,
        arguments: &arguments.serve,
        new,
        groups,
        file: None,
    })
}

/// `ringdisk ublk recover`.
///
/// # Errors
///
/// A failure that names the device or the disk; the device waits for another server then.
pub(super) fn recover(arguments: &RecoverArguments) -> Result<u8, CommandFailure> {
    let ids = if arguments.all {
        devices::waiting()?
    } else {
        devices::refuse_served(&arguments.devices)?;
        arguments.devices.clone()
    };
    if !arguments.disk.is_empty() && arguments.disk.len() != ids.len() {
        let message = format!("{} --disk for {} devices", arguments.disk.len(), ids.len());
        return Err(CommandFailure::Usage(message));
    }
    if ids.is_empty() {
        writeln!(std::io::stderr(), "no device waits for a server")?;
        return Ok(EXIT_OK);
    }
    let mut groups = Groups::parse(&arguments.serve.rate_limit_group)?;
    let wanted = wanted::again(&ids, &arguments.disk, &arguments.serve, &mut groups)?;
    if arguments.serve.daemonize {
        return background::start();
    }
    serve(Begin {
        wanted,
        predecessors: Vec::new(),
        within: WITHIN,
        arguments: &arguments.serve,
        new: NewDevices::default(),
        groups,
        file: None,
    })
}

/// `ringdisk ublk upgrade`.
///
/// # Errors
///
/// A failure that names the device, the disk or its server. Unless it says otherwise, that server continues.
pub(super) fn upgrade(arguments: &UpgradeArguments) -> Result<u8, CommandFailure> {
    let predecessors = match arguments.server {
        Some(pid) => match devices::served_by(pid) {
            Ok(ids) => upgrade::find(&ids, false)?,
            // One that takes devices may have none just now.
            Err(failure) => vec![upgrade::find_at(&state::socket(pid)).map_err(|_| failure)?],
        },
        None => upgrade::find(&arguments.devices, arguments.all)?,
    };
    let ids: Vec<u32> = predecessors.iter().flat_map(Predecessor::devices).collect();
    if predecessors.is_empty() {
        writeln!(std::io::stderr(), "no device has a server to take over from")?;
        return Ok(EXIT_OK);
    }
    let mut groups = Groups::parse(&arguments.serve.rate_limit_group)?;
    let wanted = wanted::again(&ids, &[], &arguments.serve, &mut groups)?;
    for wanted in &wanted {
        open::rehearse(&wanted.disk).map_err(|error| CommandFailure::Failed(error.into()))?;
    }
    if arguments.serve.daemonize {
        return background::start();
    }
    serve(Begin {
        wanted,
        predecessors,
        within: arguments.within(),
        arguments: &arguments.serve,
        new: NewDevices::default(),
        groups,
        file: None,
    })
}

/// How a server of a configuration file starts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Start {
    /// It takes over from the server of the file.
    pub(crate) takeover: TakeoverArguments,
    /// It is to go on in the background.
    pub(crate) daemonize: bool,
    /// As [`ServeArguments::detached`].
    pub(crate) detached: u8,
}

/// `ringdisk serve`, of a file with devices.
///
/// # Errors
///
/// A failure that names the line, the device or the disk. Devices that were there wait for another server then, or have theirs.
pub(crate) fn follow(mut file: DevicesFile, start: Start) -> Result<u8, CommandFailure> {
    let mut groups = Groups::parse(&file.arguments.rate_limit_group)?;
    file.arguments.detached = start.detached;
    let (wanted, predecessors) = configured::begin(&file, &start.takeover, &mut groups)?;
    if start.daemonize {
        return background::start();
    }
    serve(Begin {
        wanted,
        predecessors,
        within: start.takeover.within(),
        arguments: &file.arguments.clone(),
        new: NewDevices::default(),
        groups,
        file: Some(file),
    })
}

/// What a server begins with.
struct Begin<'a> {
    wanted: Vec<Wanted>,
    /// The servers that some of it is taken over from.
    predecessors: Vec<Predecessor>,
    /// The time that they have to leave it.
    within: Duration,
    arguments: &'a ServeArguments,
    /// The properties of devices that are added later.
    new: NewDevices,
    groups: Groups,
    /// The file that it follows.
    file: Option<DevicesFile>,
}

/// Serves until the end.
fn serve(begin: Begin<'_>) -> Result<u8, CommandFailure> {
    let Begin {
        mut wanted,
        predecessors,
        within,
        arguments,
        new,
        groups,
        file,
    } = begin;
    let start = |error: std::io::Error| CommandFailure::about("cannot wait for signals", error);
    image_folders::check(&arguments.images)?;
    // Without one, which may have been deleted, relative paths of later disks lead nowhere, and that is all.
    let directory = wanted::here().unwrap_or_default();
    if arguments.detached > 0 {
        background::leave_session().map_err(start)?;
    }
    let pid_file = arguments.pidfile.as_deref();
    let mut pid_file = pid_file.map(PidFile::open).transpose()?;
    let (sender, events) = mpsc::channel();
    // An upgrade that is broken off would leave the devices without a server: there the second signal ends it.
    let may_end = Arc::new(Mutex::new(predecessors.is_empty()));
    let reloads = file.as_ref().map(|_| Arc::<OnceLock<DisksThread>>::default());
    heed_signals(&sender, &may_end, reloads.clone(), arguments.is_confined()).map_err(start)?;
    open::table_memory().set_limit_bytes(arguments.table_cache);
    // Files, rings and wake-ups of each queue.
    let needed = |queues: u16| 32 + 16 * u64::from(queues);
    let needed_now: u64 = wanted.iter().map(|disk| needed(disk.disk.num_queues)).sum();
    let others_may_come = !arguments.images.is_empty() || file.is_some();
    let needed_later = if others_may_come {
        LATER_DEVICES * needed(1)
    } else {
        0
    };
    limits::prepare_descriptors(needed_now + needed_later);
    // Before anything is taken over or opened: the address may be in use. That of an old server is ours when it has gone.
    let (confined, takeover) = (arguments.is_confined(), !predecessors.is_empty());
    let metrics = arguments.metrics.as_ref();
    let metrics = metrics.map(|address| Metrics::start(address, confined, takeover));
    let metrics = metrics
        .transpose()
        .map_err(|error| CommandFailure::Failed(error.into()))?;
    let control = command_process::control()?;
    state::make_folder().map_err(|error| CommandFailure::about(state::folder().display(), error))?;
    let server: Server = Arc::new(Mutex::new(ServerState::new(control)));
    if let Some(metrics) = &metrics {
        metrics.report(served::reports(&server));
    }
    state::sweep(&state::folder());
    let socket = state::socket(std::process::id());
    let answered = sender.clone();
    // If nobody listens any more, the process is ending.
    let after_answer = move || answered.send(Event::Answered).unwrap_or_default();
    // Who connects before the devices are there is answered then.
    let listening = Socket::listen(&socket).map_err(|error| CommandFailure::Failed(error.into()))?;
    // One that a server has which is about to be taken over is free when that has ended.
    let mut chosen = None;
    if predecessors.is_empty()
        && let Some(path) = &arguments.control
    {
        chosen = Some(Socket::listen(path).map_err(|error| CommandFailure::Failed(error.into()))?);
    }
    let manager = Arc::new(sd_notify::Manager::find());
    let followed = file.map(|file| Followed::begin(file, &wanted));
    let has_leftovers = followed.as_ref().is_some_and(Followed::has_leftovers);

    let before = predecessors.first().map(Predecessor::pid);
    if before.is_some() {
        // If we fail with what others have left, the manager is to start again what recovers it.
        manager.main(std::process::id());
        pid_file.iter_mut().for_each(PidFile::write);
    }
    let taken = upgrade::take(predecessors, within)
        .inspect_err(|_| before.iter().for_each(|&pid| manager.main(pid)))?;
    wanted.retain(|disk| disk.recover.is_none_or(|id| !taken.was_refused(id)));

    // What is wrong with an image shows before the first device is there.
    let orphaned = |failure| taken.orphaned(failure);
    let lock_set = taken.lock_set.clone();
    let opened = parallel::each(wanted, |disk| open_disk(disk, &lock_set)).map_err(orphaned)?;
    // Those who had them have ended.
    lock_set.keep();
    *may_end.lock() = false;
    let (mut first_failure, mut brought) = match bring_up(&server, opened, &sender, &socket) {
        Ok((ids, failure)) => (
            failure.map(orphaned),
            Some(bring_up::lines(&server, &ids, arguments.json)),
        ),
        Err(failure) => (Some(orphaned(failure)), None),
    };
    first_failure = taken.end().or(first_failure);
    server.lock().devices.keys().copied().for_each(io_timeout::mend);
    if chosen.is_none()
        && let Some(path) = &arguments.control
    {
        chosen = Socket::listen(path)
            .inspect_err(|error| tracing::error!(%error, "cannot create the control socket; the devices are served without it"))
            .ok();
    }
    if let (Some(_), Some(file)) = (&brought, &mut pid_file) {
        file.keep();
    }
    let additions = DisksThread::start(Additions {
        server: Arc::clone(&server),
        events: sender.clone(),
        socket: socket.clone(),
        arguments: arguments.clone(),
        new,
        groups: Mutex::new(groups),
        directory,
        lock_set: lock_set.clone(),
        followed: followed.map(Mutex::new),
        manager: Arc::clone(&manager),
    });
    let additions = additions
        .inspect_err(|error| tracing::error!(%error, "no device can be added: its thread cannot be started"))
        .unwrap_or_default();
    if brought.is_some() && arguments.is_confined() {
        let devices: Vec<String> = server.lock().devices.keys().map(|&id| block_path(id)).collect();
        // Threads that are started from here on are inside.
        let metrics = arguments.metrics.as_ref();
        let pid_file = arguments.pidfile.as_deref();
        if let Err(failure) = sandbox::confine(devices, arguments.control.as_deref(), metrics, pid_file) {
            first_failure = Some(failure);
            brought = None;
        }
    }
    if let (Some(reloads), Some(disks)) = (&reloads, &additions) {
        reloads.set(disks.clone()).unwrap_or_default();
    }
    let leftovers = additions.clone().filter(|_| has_leftovers);
    let desk = Arc::new(requests::UblkDesk {
        server: Arc::clone(&server),
        events: sender,
        lock_set,
        socket,
        additions,
    });
    let asked = ControlServer {
        after_answer: Arc::new(after_answer),
        ..exchange::server(&desk)
    };
    let _chosen = chosen.map(|socket| {
        ControlSocket::serve_on(socket, &asked)
            .inspect_err(|error| tracing::error!(%error, "cannot serve the control socket of --control"))
    });
    let _socket = ControlSocket::serve_on(listening, &asked)
        .inspect_err(|error| tracing::error!(%error, "cannot serve the control socket; `ublk info` and `ublk upgrade` will fail"));
    if let Some(mut lines) = brought {
        if arguments.detached > 0 {
            lines += background::READY;
            lines.push('\n');
        }
        // Before whoever waits for us to be in the background ends.
        manager.ready();
        // Whoever does not read this is served as well.
        std::io::stdout().write_all(lines.as_bytes()).unwrap_or_default();
        leftovers.iter().for_each(DisksThread::begin_reload);
        let failure = wait(&server, &events, others_may_come);
        first_failure = first_failure.or(failure);
    } else {
        server.lock().leave_recovered();
    }
    let mut shared = server.lock();
    shared.has_ended = true;
    let served = std::mem::take(&mut shared.devices).into_values();
    if let Err(failure) = close(&mut shared.control, served) {
        first_failure.get_or_insert(failure);
    }
    first_failure.map_or(Ok(EXIT_OK), Err)
}

/// Waits for a stop or, unless others may come, the end of every device. The failure is the first there was.
fn wait(server: &Server, events: &mpsc::Receiver<Event>, others_may_come: bool) -> Option<CommandFailure> {
    let mut first_failure = None;
    while let Ok(event) = events.recv() {
        let mut shared = server.lock();
        match event {
            Event::Stop(signal) => {
                tracing::info!(event = "stopping", signal, "stopping");
                return first_failure;
            }
            Event::Answered => {}
            Event::Queue(QueueEvent::Ended { device }) => {
                let ended = shared.devices.get(&device);
                if !ended.is_some_and(|served| served.device.is_ended()) {
                    // It was removed by a request, which is to be answered before the end.
                    continue;
                }
                tracing::info!(device, "the device was deleted");
                let served = shared.devices.remove(&device);
                if let Err(failure) = close(&mut shared.control, served) {
                    first_failure.get_or_insert(failure);
                }
            }
            Event::Queue(QueueEvent::Broken { device, what }) => {
                if let Some(served) = shared.devices.remove(&device) {
                    let message = format!("{}: {what}; run `ringdisk ublk recover`", block_path(device));
                    tracing::error!(device, %what, "detaching from a broken device");
                    shared.leave(served);
                    first_failure.get_or_insert(CommandFailure::Failed(message.into()));
                }
            }
        }
        // One that is left can be recovered when this process has ended.
        if shared.devices.is_empty() && (!others_may_come || !shared.left.is_empty()) {
            break;
        }
    }
    first_failure
}

/// Heeds signals from now on: the first stop ends the process as long as it `may_end`, because nothing is made yet; then it is an event.
/// SIGHUP has the configuration file followed, if there is one, by whoever does so as soon as the devices are ready.
fn heed_signals(
    events: &mpsc::Sender<Event>,
    may_end: &Arc<Mutex<bool>>,
    reloads: Option<Arc<OnceLock<DisksThread>>>,
    is_confined: bool,
) -> std::io::Result<()> {
    let (events, may_end) = (events.clone(), Arc::clone(may_end));
    heed::start(Reactions {
        confine: move || {
            if is_confined {
                sandbox::confine_early()?;
            }
            Ok(())
        },
        reload: reloads.map(|reloads| {
            move || {
                if let Some(disks) = reloads.get() {
                    disks.begin_reload();
                }
            }
        }),
        stop: move |signal| {
            let may_end = may_end.lock();
            if *may_end {
                give_up(signal, "stopped before the devices were ready");
            }
            drop(may_end);
            events.send(Event::Stop(signal)).unwrap_or_default();
        },
    })
}
