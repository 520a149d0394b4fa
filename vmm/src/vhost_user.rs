//! `ringdisk vhost-user` and `ringdisk serve`: serve disks to other programs' virtual machines.
//!
//! Every disk has a socket; a few threads talk to the clients of all. The queues run on workers of their own, or on shared ones.
//! A client is served only after every socket is created and every disk is open and locked. Then disks come and go (`roster`), as
//! requests or a configuration file say (`reload`). Here are the steps of a server's life in their order; `begin` has those up to the first
//! guest, `serving` the rest.
//!
//! Invariants: after a stop signal no request that was taken is lost. Clients are disconnected, their requests drained, and
//! each image is closed cleanly, even if another one fails.

pub(crate) mod arguments;
mod begin;
mod desk;
mod file;
mod hand_over;
mod heed;
mod image;
mod moves;
mod orders;
mod pause;
mod reload;
mod roster;
mod served;
mod serving;
mod wanted;
mod watchdog;
pub(crate) mod workers;

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use block::lock::LockSet;
use virtio_devices::vhost_user::{Pulse, Reception};

pub use crate::config_file::FileError;
use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, EXIT_OK};
use crate::metrics::{DiskReport, Metrics};
use crate::open;
use crate::pid_file::PidFile;
use crate::sandbox::Task;
use crate::{background, image_folders, limits, sd_notify};
use begin::{Entrance, confine_files, find_all, keep_sockets, take_over};
use desk::{Door, Doors, VhostUserDesk};
pub(crate) use file::KIND;
pub use file::{ConfigFile, Start};
use heed::Heard;
use orders::Orders;
use roster::{Roster, Setup};
pub use served::{Options, Place};
use served::{Served, Workers, confine, descriptors, failure_hook, queue_hook, serve};
use serving::serve_until_stopped;
pub use wanted::{Disks, Places, Wanted};
pub use workers::SharedWorkers;

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
    image_folders::check(&places.images)?;
    if options.detached {
        background::leave_session().map_err(not_started)?;
    }
    let mut pid_file = places.pid_file.as_deref().map(PidFile::open).transpose()?;
    let manager = Arc::new(sd_notify::Manager::find());
    // Opening images may take minutes: a signal is heard from the beginning.
    let heard = Heard::start(file.is_some(), options).map_err(not_started)?;
    let stop = &heard.stop;
    open::table_memory().set_limit_bytes(options.table_cache_bytes);
    // Before anything is taken over or opened: the address may be in use.
    let metrics = places.metrics.as_ref();
    let metrics = metrics.map(|address| Metrics::start(address, options.sandbox, options.takeover));
    let metrics = metrics.transpose().map_err(failed)?;
    limits::prepare_descriptors(disks.iter().map(|(_, config)| descriptors(config)).sum());
    let (listening, configs): (Vec<Place>, Vec<DiskConfig>) = disks.into_iter().unzip();
    let began = Instant::now();
    // Bound first, as it is to be dropped last, whatever fails: then the old server opens its images again.
    let Entrance {
        offer,
        sockets,
        takeover_socket,
        control,
    } = Entrance::open(&listening, &configs, &places, options)?;
    let lock_set = LockSet::default();
    // Those that an old server has until they move are only looked at.
    let finding = Options {
        incoming: options.incoming || options.takeover,
        ..options
    };
    let waiting = listening.into_iter().zip(sockets).zip(configs).collect();
    let Some(found) = find_all(waiting, finding, &lock_set, stop)? else {
        return Ok(EXIT_OK);
    };
    if options.sandbox {
        // Threads that are started later are inside.
        let doors: Vec<&Door> = takeover_socket.iter().chain(&control).collect();
        confine_files(&found, &places, &doors, file.as_ref())?;
    }
    let queues: usize = found
        .iter()
        .map(|(_, config, _)| usize::from(config.num_queues))
        .sum();
    let queues = queues.max(if places.images.is_empty() { 0 } else { LATER_QUEUES });
    let reception = Arc::new(Reception::new(stop.clone()).map_err(not_started)?);
    let on_failure = failure_hook(&reception);
    let shared =
        (!workers.is_empty()).then(|| workers::start(&workers, queues, &queue_hook(options), &on_failure));
    let shared = shared.transpose().map_err(failed)?.map(Arc::new);
    let (mut served, mut coming) = (Vec::new(), Vec::new());
    for (at, config, image) in found {
        if options.takeover {
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
    heard.is_served();
    let taken = control.iter().map(|control| control.path().to_owned());
    let setup = Setup {
        options,
        shared,
        images: places.images,
        taken: taken.collect(),
        file,
        manager: Arc::clone(&manager),
    };
    let roster = Roster::new(served, reception, stop, lock_set, groups, setup);
    let orders = Orders::start(&roster).map_err(not_started)?;
    let mut ahead = None;
    if let Some(offer) = &offer {
        let takes_control = control.as_ref().is_some_and(|control| control.is_adopted);
        let pid_file = pid_file.as_mut();
        ahead = take_over(offer, &roster, &orders, coming, takes_control, stop, pid_file)?;
        if ahead.is_none() {
            return Ok(EXIT_OK);
        }
        let (count, ms) = (roster.served().len(), began.elapsed().as_secs_f64() * 1000.0);
        let disks = if count == 1 { "disk" } else { "disks" };
        // Guests are served as well if nobody reads this.
        writeln!(std::io::stdout(), "took over {count} {disks} in {ms:.1} ms").unwrap_or_default();
    }
    let doors: Vec<&Door> = takeover_socket.iter().chain(&control).collect();
    keep_sockets(&roster, &doors, offer.is_some())?;
    drop(offer);
    if let Some(metrics) = &metrics {
        let roster = Arc::clone(&roster);
        metrics.report(Arc::new(move || reports(&roster)));
    }
    heard.follow(&orders);
    let doors = Arc::new(Doors::default());
    let desk = Arc::new(VhostUserDesk {
        roster: Arc::clone(&roster),
        orders: orders.clone(),
        stop: stop.clone(),
        doors: Arc::clone(&doors),
    });
    // Clients could connect before; from here on nothing keeps them from being served.
    if let Some(file) = &mut pid_file {
        file.keep();
    }
    manager.ready();
    // With it ends who waits for us to be in the background, and finds all of that.
    announce(&roster.served(), options);
    let watched = Arc::clone(&roster);
    watchdog::start(manager, move || pulses(&watched), options).map_err(not_started)?;
    // Threads that are started from here on are inside.
    let confined = confine(Task::Control, options).map_err(failed);
    let begun = confined.and_then(|()| {
        for (place, door) in [(&doors.own, takeover_socket), (&doors.chosen, control)] {
            let served = door.map(|door| door.serve(&desk)).transpose();
            *place.lock() = served.map_err(failed)?;
        }
        Ok(())
    });
    serve_until_stopped(&roster, &orders, stop, &doors, ahead, begun)
}

/// The failure of a server that does not start because the kernel refuses it something.
fn not_started(error: std::io::Error) -> CommandFailure {
    CommandFailure::about("cannot wait for signals", error)
}

/// The failure of something that its error names.
fn failed(error: impl Into<Box<dyn Error + Send + Sync>>) -> CommandFailure {
    CommandFailure::Failed(error.into())
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
