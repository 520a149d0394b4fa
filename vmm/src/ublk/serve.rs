//! `ringdisk ublk add`, `recover` and `upgrade`: the server's process, from its start to its end.
//!
//! Invariants: after a stop signal every device is stopped, drained and deleted, and each image closed cleanly,
//! even if another one fails. A device with a broken queue does no more I/O, and is left untouched until this process
//! exits: then it can be recovered.

use std::io::Write;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use virtio_devices::ublk::{QueueEvent, block_path};

use super::additions::Additions;
use super::arguments::{AddArguments, RecoverArguments, ServeArguments, UpgradeArguments};
use super::bring_up::{self, bring_up, open_disk};
use super::groups::Groups;
use super::served::{Event, Server, ServerState, close};
use super::upgrade::{self, Predecessor};
use super::wanted::{self, NewDevices, Wanted};
use super::{additions, command_process, devices, hand_over, requests, sandbox, served, state};
use crate::control::{Control as ControlSocket, Server as ControlServer};
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};
use crate::exchange;
use crate::image_folders;
use crate::metrics::Metrics;
use crate::open;
use crate::parallel;
use crate::pid_file::PidFile;
use crate::signals::StopSignals;
use crate::socket::Socket;
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
    serve(wanted, Vec::new(), &arguments.serve, (new, groups))
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
    let later = (NewDevices::default(), groups);
    serve(wanted, Vec::new(), &arguments.serve, later)
}

/// `ringdisk ublk upgrade`.
///
/// # Errors
///
/// A failure that names the device, the disk or its server. Unless it says otherwise, that server continues.
pub(super) fn upgrade(arguments: &UpgradeArguments) -> Result<u8, CommandFailure> {
    let ids = match arguments.server {
        Some(pid) => devices::served_by(pid)?,
        None => arguments.devices.clone(),
    };
    let predecessors = upgrade::find(&ids, arguments.all)?;
    let ids: Vec<u32> = predecessors.iter().flat_map(Predecessor::devices).collect();
    if ids.is_empty() {
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
    let later = (NewDevices::default(), groups);
    serve(wanted, predecessors, &arguments.serve, later)
}

/// Serves all of them until the end, some of them instead of others who do so now; and devices that are `later` added, like these.
fn serve(
    mut wanted: Vec<Wanted>,
    predecessors: Vec<Predecessor>,
    arguments: &ServeArguments,
    later: (NewDevices, Groups),
) -> Result<u8, CommandFailure> {
    let start = |error: std::io::Error| CommandFailure::about("cannot wait for signals", error);
    image_folders::check(&arguments.images)?;
    // Without one, which may have been deleted, relative paths of later disks lead nowhere, and that is all.
    let directory = wanted::here().unwrap_or_default();
    if arguments.detached > 0 {
        background::leave_session().map_err(start)?;
    }
    let pid_file = arguments.pidfile.as_deref();
    let mut pid_file = pid_file.map(PidFile::open).transpose()?;
    let signals = StopSignals::block().map_err(start)?;
    let (sender, events) = mpsc::channel();
    // An upgrade that is broken off would leave the devices without a server: there the second signal ends it.
    let may_end = Arc::new(Mutex::new(predecessors.is_empty()));
    let early = Early {
        may_end: Arc::clone(&may_end),
        confined: arguments.is_confined(),
    };
    stop_on_signal(signals, sender.clone(), early).map_err(start)?;
    open::table_memory().set_limit_bytes(arguments.table_cache);
    // Files, rings and wake-ups of each queue.
    let needed = |queues: u16| 32 + 16 * u64::from(queues);
    let needed_now: u64 = wanted.iter().map(|disk| needed(disk.disk.num_queues)).sum();
    let needed_later = if arguments.images.is_empty() {
        0
    } else {
        LATER_DEVICES * needed(1)
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
    let (shared, own, answered) = (Arc::clone(&server), socket.clone(), sender.clone());
    let after_answer = move || {
        if shared.lock().handed_over {
            hand_over::end(&own);
        }
        // If nobody listens any more, the process is ending.
        answered.send(Event::Answered).unwrap_or_default();
    };
    // Who connects before the devices are there is answered then.
    let listening = Socket::listen(&socket).map_err(|error| CommandFailure::Failed(error.into()))?;
    // One that a server has which is about to be taken over is free when that has ended.
    let mut chosen = None;
    if predecessors.is_empty()
        && let Some(path) = &arguments.control
    {
        chosen = Some(Socket::listen(path).map_err(|error| CommandFailure::Failed(error.into()))?);
    }
    let manager = sd_notify::Manager::find();

    let before = predecessors.first().map(Predecessor::pid);
    if before.is_some() {
        // If we fail with what others have left, the manager is to start again what recovers it.
        manager.main(std::process::id());
        pid_file.iter_mut().for_each(PidFile::write);
    }
    let taken =
        upgrade::take(predecessors).inspect_err(|_| before.iter().for_each(|&pid| manager.main(pid)))?;
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
    server.lock().devices.keys().copied().for_each(upgrade::mend);
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
    let (new, groups) = later;
    let additions = additions::DisksThread::start(Additions {
        server: Arc::clone(&server),
        events: sender.clone(),
        socket: socket.clone(),
        arguments: arguments.clone(),
        new,
        groups: Mutex::new(groups),
        directory,
        lock_set: lock_set.clone(),
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
    let desk = Arc::new(requests::UblkDesk {
        server: Arc::clone(&server),
        events: sender,
        additions,
    });
    let asked = ControlServer {
        after_answer: Arc::new(after_answer),
        locks: Arc::new(move || lock_set.descriptors()),
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
        let failure = wait(&server, &events, !arguments.images.is_empty());
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
        if shared.handed_over {
            continue;
        }
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

/// The state that a stop signal needs before the devices are ready.
struct Early {
    /// Nothing is made yet: the process may just end.
    may_end: Arc<Mutex<bool>>,
    confined: bool,
}

/// Starts the thread that turns the first stop signal into a stop, and the second into the end. The first one is the end
/// already while images are opened and their locks are waited for.
fn stop_on_signal(signals: StopSignals, events: mpsc::Sender<Event>, early: Early) -> std::io::Result<()> {
    let wait_and_stop = move || -> std::io::Result<()> {
        if early.confined {
            sandbox::confine_early()?;
        }
        let signal = signals.wait()?;
        let may_end = early.may_end.lock();
        if *may_end {
            tracing::error!(signal, "stopped before the devices were ready");
            std::process::exit(EXIT_FAILURE.into());
        }
        drop(may_end);
        events.send(Event::Stop(signal)).unwrap_or_default();
        let signal = signals.wait()?;
        tracing::error!(signal, "exiting with requests in flight");
        std::process::exit(EXIT_FAILURE.into());
    };
    let report = move || {
        if let Err(error) = wait_and_stop() {
            tracing::error!(%error, "cannot wait for signals");
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(report)?;
    Ok(())
}
