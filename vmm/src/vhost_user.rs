//! `ringdisk vhost-user` and `ringdisk serve`: serve disks to other programs' virtual machines.
//!
//! Every disk has a socket; a few threads talk to the clients of all. The queues run on workers of their own, or on shared ones.
//! A client is served only after every socket is created and every disk is open and locked. Then disks come and go (`roster`), as
//! requests or a configuration file say (`reload`).
//!
//! Invariants: after a stop signal no request that was taken is lost. Clients are disconnected, their requests drained, and
//! each image is closed cleanly, even if another one fails.

pub(crate) mod arguments;
mod desk;
mod file;
mod hand_over;
mod image;
mod moves;
mod orders;
mod pause;
mod reload;
mod roster;
mod served;
mod wanted;
mod watchdog;
pub(crate) mod workers;

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use virtio_devices::vhost_user::{Pulse, Reception, StopToken};

use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK, chain};
use crate::metrics::{Address, DiskReport, Metrics};
use crate::open;
use crate::pid_file::PidFile;
use crate::sandbox::{self, SandboxError, Task};
use crate::signals::{StopSignals, is_log_read};
use crate::socket::{Socket, SocketError, folder_of};
use crate::takeover::{self, TakeoverSocket};
use crate::{background, limits, parallel, sd_notify};
use desk::{ControlPlace, ServedControl, VhostUserDesk};
pub use file::{ConfigFile, FileError, Start};
use hand_over::{
    HandOverFailure, Takeover, accept, adopt_sockets, give_up_control, hand_over, lost, names,
    open_takeover_socket, pause_control, reopen, stop_on_takeover,
};
use moves::take_in_all;
use orders::Orders;
use roster::{Roster, Setup};
pub use served::{Options, Place};
use served::{
    Served, Workers, allowed, close, confine, descriptors, failure_hook, find, listen, queue_hook, serve,
};
pub use wanted::{Disks, Places, Wanted};
pub use workers::SharedWorkers;

/// The longest time that a start interrupted by a signal may take to end by itself, between two images.
const START_END_MAX: Duration = Duration::from_secs(1);

/// The queues that shared workers are prepared for, where disks can be added.
const LATER_QUEUES: usize = 1024;

/// Serves each disk on its socket until a stop signal or request, then closes all of them cleanly.
///
/// # Errors
///
/// A failure that names the socket or disk it is about: the first one, if there are several. Disks that
/// could be closed cleanly have been.
pub fn run(wanted: Wanted) -> Result<u8, CommandFailure> {
    let Wanted {
        disks: Disks {
            served: disks,
            groups,
        },
        places,
        workers,
        options,
        file,
    } = wanted;
    let images = &places.images;
    let control = places.control.as_deref();
    let metrics = places.metrics.as_ref();
    if let Some(folder) = images.iter().find(|folder| !folder.is_dir()) {
        let folder = folder.display();
        return Err(CommandFailure::Usage(format!(
            "--images {folder}: it is no folder; expected one with images, or for them"
        )));
    }
    let start = |error: std::io::Error| CommandFailure::about("cannot wait for signals", error);
    if options.detached {
        background::leave_session().map_err(start)?;
    }
    let mut pid_file = places.pid_file.as_deref().map(PidFile::open).transpose()?;
    let manager = Arc::new(sd_notify::Manager::find());
    let signals = if file.is_some() {
        StopSignals::block_with_reload()
    } else {
        StopSignals::block()
    };
    let signals = signals.map_err(start)?;
    let stop = StopToken::new().map_err(start)?;

    open::table_memory().set_limit_bytes(options.table_cache_bytes);

    // Opening images may take minutes: a signal is heard from the beginning.
    let serving = Arc::new(AtomicBool::new(false));
    let reloads = Arc::new(OnceLock::new());
    let heard = Heard {
        stop: stop.clone(),
        serving: Arc::clone(&serving),
        reloads: file.is_some().then(|| Arc::clone(&reloads)),
    };
    heed_signals(signals, heard, options).map_err(start)?;
    let failed = CommandFailure::Failed;
    // Before anything is taken over or opened: the address may be in use.
    let metrics_folder = metrics.and_then(Address::folder);
    let metrics = metrics.map(|address| Metrics::start(address, options.sandbox, options.takeover));
    let metrics = metrics.transpose().map_err(|error| failed(error.into()))?;
    limits::prepare_descriptors(disks.iter().map(|(_, config)| descriptors(config)).sum());
    let (listening, configs): (Vec<Place>, Vec<DiskConfig>) = disks.into_iter().unzip();
    let mut offer = None;
    let began = Instant::now();
    let sockets = if options.takeover {
        // The old server closes its images before these can be locked. What else could be wrong shows now.
        for config in &configs {
            open::rehearse(config).map_err(|error| failed(error.into()))?;
        }
        let paths = paths(&listening)?;
        let offered = takeover::take_over(&paths, control).map_err(|error| failed(error.into()))?;
        let offered = offer.insert(offered);
        offered.begin().map_err(|error| failed(error.into()))?;
        adopt_sockets(&paths, offered)
    } else {
        let listened = listening.iter().map(|place| listen(place, options.access));
        listened.collect()
    };
    // As long as this server may still fail, the sockets are the old one's.
    let sockets: Vec<Socket> = sockets.map_err(|error| failed(error.into()))?;
    let paths: Vec<PathBuf> = sockets.iter().map(|socket| socket.path().to_owned()).collect();
    let takeover_socket = match &offer {
        Some(offer) => {
            let listener = offer.takeover_socket.try_clone().map_err(start)?;
            TakeoverSocket::adopt(listener, &offer.takeover_path, &paths).ok()
        }
        // Where disks come and go, none of them gives it its name.
        None => open_takeover_socket(control.filter(|_| !images.is_empty()), &paths),
    };
    let control = control.map(|path| ControlPlace::take(path, offer.as_mut()));
    let control = control.transpose().map_err(|error| failed(error.into()))?;
    let lock_set = offer
        .as_ref()
        .map(|offer| offer.lock_set.clone())
        .unwrap_or_default();
    let waiting = listening.into_iter().zip(sockets).zip(configs);
    // Dropped before the offer, whatever fails: then the old server opens its images again.
    let come_one_by_one = offer.as_ref().is_some_and(|offer| offer.moves().is_some());
    // Those that come one by one are only looked at: the old server has them until then.
    let finding = Options {
        incoming: options.incoming || come_one_by_one,
        ..options
    };
    let found = parallel::each(waiting.collect(), |(_, config)| {
        let wanted = !stop.is_stopped();
        wanted.then(|| find(config, finding, &lock_set)).transpose()
    });
    let found = found.map_err(|error| failed(error.into()))?;
    let opened = found
        .into_iter()
        .map(|((socket, config), image)| Some((socket, config, image?)));
    let Some(opened) = opened.collect::<Option<Vec<_>>>() else {
        return Ok(EXIT_OK);
    };
    let not_confined = |error: SandboxError| CommandFailure::Failed(error.into());
    if options.sandbox {
        // Threads that are started later are inside.
        let mut allowed = allowed(&opened);
        allowed.removable_in.extend(metrics_folder);
        let folder = control.as_ref().map(|control| folder_of(control.path()));
        allowed.removable_in.extend(folder);
        allowed
            .removable_in
            .extend(places.pid_file.as_deref().map(folder_of));
        allowed.open.extend(images.iter().cloned());
        if let Some(file) = &file {
            allowed.readable.extend(file.folders());
        }
        sandbox::restrict_files(&allowed).map_err(not_confined)?;
    }
    let queues: usize = opened
        .iter()
        .map(|(_, config, _)| usize::from(config.num_queues))
        .sum();
    let queues = queues.max(if images.is_empty() { 0 } else { LATER_QUEUES });
    let reception = Arc::new(Reception::new(stop.clone()).map_err(start)?);
    let on_failure = failure_hook(&reception);
    let shared =
        (!workers.is_empty()).then(|| workers::start(&workers, queues, &queue_hook(options), &on_failure));
    let shared = shared
        .transpose()
        .map_err(|error| failed(error.into()))?
        .map(Arc::new);
    let (mut served, mut coming) = (Vec::new(), Vec::new());
    for (at, config, image) in opened {
        if come_one_by_one {
            coming.push(Some((at, config)));
            continue;
        }
        let workers = Workers {
            shared: shared.as_ref(),
            on_failure: &on_failure,
        };
        served.push(serve(at, config, image, options, workers)?);
    }

    // From here on a stop closes what is open.
    serving.store(true, Ordering::SeqCst);
    let taken = control.iter().map(|control| control.path().to_owned());
    let setup = Setup {
        options,
        shared,
        images: images.clone(),
        taken: taken.collect(),
        file,
        manager: Arc::clone(&manager),
    };
    let roster = Roster::new(served, reception, &stop, lock_set, groups, setup);
    let orders = Orders::start(&roster).map_err(start)?;
    // Serves what has come while the rest comes.
    let mut ahead = None;
    if let Some(offer) = &mut offer {
        let takes_control = control.as_ref().is_some_and(|control| control.is_adopted);
        // Before the old one ends, so that its end is not taken for that of the service.
        let mut tell = || {
            manager.main(std::process::id());
            pid_file.iter_mut().for_each(PidFile::write);
        };
        let accepted = if stop.is_stopped() {
            Ok(false)
        } else if come_one_by_one {
            ahead = Some(serve_ahead(&roster, &orders, options).map_err(start)?);
            take_in_all(&roster, offer, coming).map(|()| {
                tell();
                offer
                    .finish(takes_control)
                    .unwrap_or_else(|error| tracing::warn!(error = chain(&error), "the old server has gone"));
                true
            })
        } else {
            tell();
            accept(offer, &roster.served(), takes_control).map(|()| true)
        };
        if !matches!(accepted, Ok(true)) {
            offer.pid().iter().for_each(|&pid| manager.main(pid));
            if let Some(ahead) = ahead {
                stop.stop();
                joined(ahead).unwrap_or_default();
            }
            // As they were found; the old server wants them back, and has them when the offer is dropped.
            for disk in roster.end().0 {
                close(&disk).unwrap_or_default();
            }
            return accepted.map(|_| EXIT_OK);
        }
        let (count, ms) = (roster.served().len(), began.elapsed().as_secs_f64() * 1000.0);
        let disks = if count == 1 { "disk" } else { "disks" };
        // Guests are served as well if nobody reads this.
        writeln!(std::io::stdout(), "took over {count} {disks} in {ms:.1} ms").unwrap_or_default();
    }
    let keep = |kept: Result<(), SocketError>| match kept {
        // Guests that were taken over go on; only nobody else can connect.
        Err(error) if offer.is_some() => {
            tracing::error!(error = chain(&error), "nobody can connect to a socket any more");
            Ok(())
        }
        kept => kept.map_err(|error| failed(error.into())),
    };
    let served = roster.served();
    served.iter().try_for_each(|disk| keep(disk.socket.keep()))?;
    control.iter().try_for_each(|control| keep(control.keep()))?;
    drop(offer);
    drop(served);
    if let Some(metrics) = &metrics {
        let roster = Arc::clone(&roster);
        metrics.report(Arc::new(move || reports(&roster)));
    }
    reloads.set(orders.clone()).unwrap_or_default();
    let desk = VhostUserDesk::new(&roster, &orders, &stop);
    let (mut takeover, passed_on) = (None, Arc::new(Mutex::new(None)));
    if let Some(takeover_socket) = takeover_socket {
        takeover_socket.keep().map_err(|error| failed(error.into()))?;
        let listener = takeover_socket.listener_for_thread().map_err(start)?;
        roster.set_takeover_socket(takeover_socket);
        let stopping = stop_on_takeover(
            listener,
            Arc::clone(&roster),
            stop.clone(),
            Arc::clone(&passed_on),
        );
        takeover = Some(stopping.map_err(start)?);
    }
    // Clients could connect before; from here on nothing keeps them from being served.
    if let Some(file) = &mut pid_file {
        file.keep();
    }
    manager.ready();
    // With it ends who waits for us to be in the background, and finds all of that.
    announce(&roster.served(), options);
    let watched = Arc::clone(&roster);
    watchdog::start(manager, move || pulses(&watched), options).map_err(start)?;
    // Threads that are started from here on are inside.
    let confined = confine(Task::Control, options).map_err(|error| failed(error.into()));
    let begun = confined.and_then(|()| {
        let served = control.map(|control| control.serve(&desk)).transpose();
        *passed_on.lock() = served.map_err(|error| failed(error.into()))?;
        Ok(())
    });
    serve_until_stopped(&roster, &orders, &stop, takeover, &passed_on, ahead, begun)
}

/// A thread that serves already, while the rest is prepared.
type Ahead = JoinHandle<Result<(), CommandFailure>>;

/// Begins to serve what enters the reception.
fn serve_ahead(roster: &Arc<Roster>, orders: &Orders, options: Options) -> std::io::Result<Ahead> {
    let (roster, orders) = (Arc::clone(roster), orders.clone());
    let serve = move || {
        confine(Task::Control, options).map_err(|error| CommandFailure::Failed(error.into()))?;
        roster.serve_those_who_enter(&orders)
    };
    std::thread::Builder::new()
        .name("serving".to_owned())
        .spawn(serve)
}

/// Waits for the end of serving.
fn joined(ahead: Ahead) -> Result<(), CommandFailure> {
    ahead
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Returns the statistics of the disks that are served now.
fn reports(roster: &Roster) -> Vec<DiskReport> {
    let report = |disk: &Arc<Served>| {
        let counted = disk.server.stats().snapshot();
        DiskReport::new(disk.name.clone(), counted, disk.disk.engine_counts())
    };
    roster.served().iter().map(report).collect()
}

/// Returns what tells of each worker whether it hangs.
fn pulses(roster: &Roster) -> Vec<Pulse> {
    match &roster.setup.shared {
        Some(workers) => vec![Pulse::of_pool(workers)],
        None => roster.served().iter().map(|disk| disk.server.pulse()).collect(),
    }
}

/// Returns the paths of the sockets to take over.
fn paths(places: &[Place]) -> Result<Vec<PathBuf>, CommandFailure> {
    let path = |place: &Place| match place {
        Place::Path(path) => Ok(path.clone()),
        Place::Descriptor(descriptor) => Err(CommandFailure::Usage(format!(
            "--takeover of descriptor {descriptor}: expected --socket, the path that the old server listens on"
        ))),
    };
    places.iter().map(path).collect()
}

/// Prints which disk is served on which socket, and notifies the process that waits in the foreground.
fn announce(served: &[Arc<Served>], options: Options) {
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

/// Serves until a stop, or until a new server has taken over, and closes what is open then; `ahead` serves already. So it does at once
/// if serving has not `begun`.
fn serve_until_stopped(
    roster: &Roster,
    orders: &Orders,
    stop: &StopToken,
    takeover: Option<Takeover>,
    control: &Mutex<Option<ServedControl>>,
    mut ahead: Option<Ahead>,
    begun: Result<(), CommandFailure>,
) -> Result<u8, CommandFailure> {
    let mut not_begun = begun.err();
    if not_begun.is_some() {
        stop.stop();
    }
    let first_failure = loop {
        let failure = match ahead.take() {
            Some(ahead) => joined(ahead).err(),
            None if not_begun.is_none() => roster.serve(orders).err(),
            None => None,
        };
        let failure = not_begun.take().or(failure);
        let Some(wanted) = &takeover else {
            break failure;
        };
        if let Some(taken) = wanted.finished.lock().take() {
            give_up_control(control, taken);
            roster.give_up();
            return Ok(EXIT_OK);
        }
        let successor = wanted.successor.lock().take();
        let Some(successor) = successor else {
            break failure;
        };
        if failure.is_some() || stop.is_stopped() {
            successor.refuse("it is stopping, and its images may need repair");
            break failure;
        }
        let offered = pause_control(control);
        let served = roster.served();
        match hand_over(roster, &served, offered.as_ref(), successor) {
            Ok(taken) => {
                give_up_control(control, taken);
                roster.give_up();
                return Ok(EXIT_OK);
            }
            Err(HandOverFailure::Close(failure)) => break Some(failure),
            Err(HandOverFailure::NotTaken(error)) => {
                let disks = names(&served);
                let error = lost(error);
                tracing::warn!(disks, %error, "the takeover failed; this server continues to serve");
                if let Err(failure) = reopen(&served, &roster.lock_set()) {
                    break Some(failure);
                }
                stop.resume();
                control.lock().iter().for_each(ServedControl::resume);
                roster.resume();
                // The thread that waits for a new server ends with the process only.
                wanted.again.send(()).unwrap_or_default();
            }
        }
    };
    // Whoever waits for the end of a takeover need not.
    roster.resume();
    // The last disk may have moved when the stop came: then all is the new server's, also the files of the sockets.
    drop(roster.moving.lock());
    if let Some(taken) = takeover.as_ref().and_then(|wanted| wanted.finished.lock().take()) {
        give_up_control(control, taken);
        roster.give_up();
        return Ok(EXIT_OK);
    }
    let (served, failed) = roster.end();
    drop(takeover);
    drop(control.lock().take());
    let mut first_failure = first_failure.or(failed);
    for disk in served {
        if let Err(failure) = close(&disk) {
            first_failure.get_or_insert(failure);
        }
    }
    first_failure.map_or(Ok(EXIT_OK), Err)
}

/// The stop and the reload that signals ask for.
struct Heard {
    stop: StopToken,
    /// True while stops are noticed by those who serve.
    serving: Arc<AtomicBool>,
    /// Those who follow the configuration file on SIGHUP, as soon as there are some; without a file that is a stop, too.
    reloads: Option<Arc<OnceLock<Orders>>>,
}

impl Heard {
    /// Waits for a stop signal. Has the configuration file followed meanwhile.
    fn next_stop(&self, signals: StopSignals) -> std::io::Result<&'static str> {
        loop {
            let signal = signals.wait()?;
            match &self.reloads {
                Some(reloads) if signal == "SIGHUP" => {
                    // Whoever starts reads the file just now, or has; and nobody waits for what came of this.
                    if let Some(orders) = reloads.get() {
                        orders.reload();
                    }
                }
                _ => return Ok(signal),
            }
        }
    }
}

/// Starts the thread that turns the first stop signal into a stop, and the second into the end. So is the first one, if
/// what is to be serving does not notice the stop because it is still being opened.
fn heed_signals(signals: StopSignals, heard: Heard, options: Options) -> std::io::Result<()> {
    let wait_and_stop = move || {
        if options.sandbox {
            sandbox::confine_thread(Task::Control)?;
        }
        let signal = heard.next_stop(signals)?;
        heard.stop.stop();
        if is_log_read() {
            tracing::info!(event = "stopping", signal, "stopping");
        }
        if !heard.serving.load(Ordering::SeqCst) {
            std::thread::sleep(START_END_MAX);
            if !heard.serving.load(Ordering::SeqCst) {
                give_up(signal, "exiting before all images were open");
            }
        }
        let signal = heard.next_stop(signals)?;
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
