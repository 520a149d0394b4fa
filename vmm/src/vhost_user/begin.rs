//! The steps of a server's begin: its sockets, its images, its sandbox, and what it takes over from an old server.
//!
//! Invariants: until a takeover is through, the sockets' files are the old server's, and whatever fails gives all back to it; what could
//! be wrong shows before the old server is asked for anything.

use std::path::PathBuf;
use std::sync::Arc;

use block::lock::LockSet;
use virtio_devices::vhost_user::StopToken;

use super::desk::Door;
use super::file::ConfigFile;
use super::hand_over::{adopt_sockets, open_takeover_socket};
use super::image::Found;
use super::moves::take_in_all;
use super::orders::Orders;
use super::roster::Roster;
use super::served::{Options, Place, allowed, close, find, listen};
use super::serving::{Ahead, joined, serve_ahead};
use super::wanted::Places;
use super::{failed, not_started};
use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, chain};
use crate::metrics::Address;
use crate::pid_file::PidFile;
use crate::saved_devices::claim;
use crate::socket::{Socket, SocketError, folder_of};
use crate::takeover::{Offer, Wish};
use crate::{config_file, open, parallel, sandbox};

/// Disks whose images were found, with their sockets.
pub(super) type FoundDisks = Vec<((Place, Socket), DiskConfig, Found)>;

/// Disks of an old server that come one by one.
pub(super) type Coming = Vec<Option<((Place, Socket), DiskConfig)>>;

/// The sockets of a server, created, or adopted from an old one.
pub(super) struct Entrance {
    /// All that the old server offers.
    pub(super) offer: Option<Offer>,
    /// By disk, in the order in which they were asked for.
    pub(super) sockets: Vec<Socket>,
    pub(super) takeover_socket: Option<Door>,
    pub(super) control: Option<Door>,
}

impl Entrance {
    /// Creates the sockets, or asks an old server for them.
    ///
    /// # Errors
    ///
    /// A failure that names the socket or image. The old server goes on.
    pub(super) fn open(
        listening: &[Place],
        configs: &[DiskConfig],
        places: &Places,
        options: Options,
    ) -> Result<Self, CommandFailure> {
        let control = places.control.as_deref();
        let mut offer = None;
        let sockets = if options.takeover {
            // The old server closes its images before these can be locked. What else could be wrong shows now.
            for config in configs {
                open::rehearse(config).map_err(failed)?;
            }
            let paths = paths(listening)?;
            let wish = Wish {
                from: places.takeover_from.as_deref(),
                sockets: &paths,
                control,
                within: options.takeover_within,
            };
            adopt_sockets(&paths, offer.insert(wish.ask().map_err(failed)?))
        } else {
            let listened = listening.iter().map(|place| listen(place, options.access));
            listened.collect()
        };
        let sockets: Vec<Socket> = sockets.map_err(failed)?;
        let paths: Vec<PathBuf> = sockets.iter().map(|socket| socket.path().to_owned()).collect();
        let (own, chosen) = match &mut offer {
            Some(offer) => (offer.takeover_socket.take(), offer.control.take()),
            None => (None, None),
        };
        // Where disks come and go, none of them gives it its name.
        let named_after = control.filter(|_| !places.images.is_empty());
        let takeover_socket = open_takeover_socket(named_after, &paths, own);
        let control = control.map(|path| Door::take(path, chosen)).transpose();
        Ok(Self {
            offer,
            sockets,
            takeover_socket,
            control: control.map_err(failed)?,
        })
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

/// Opens the images, or looks at those that another server has, in parallel. Returns nothing if a stop comes before the last one.
///
/// # Errors
///
/// The first image's that cannot be opened.
pub(super) fn find_all(
    waiting: Vec<((Place, Socket), DiskConfig)>,
    options: Options,
    lock_set: &LockSet,
    stop: &StopToken,
) -> Result<Option<FoundDisks>, CommandFailure> {
    let found = parallel::each(waiting, |(_, config)| {
        let wanted = !stop.is_stopped();
        wanted.then(|| find(config, options, lock_set)).transpose()
    });
    let found = found.map_err(failed)?.into_iter();
    Ok(found
        .map(|((socket, config), image)| Some((socket, config, image?)))
        .collect())
}

/// Gives up all files but those that are served, listened to, or named as to be used later.
///
/// # Errors
///
/// If the kernel refuses it.
pub(super) fn confine_files(
    found: &FoundDisks,
    places: &Places,
    doors: &[&Door],
    file: Option<&ConfigFile>,
) -> Result<(), CommandFailure> {
    let mut allowed = allowed(found);
    let removable_in = &mut allowed.removable_in;
    removable_in.extend(places.metrics.as_ref().and_then(Address::folder));
    removable_in.extend(doors.iter().map(|door| folder_of(door.path())));
    removable_in.extend(places.pid_file.as_deref().map(folder_of));
    allowed.open.extend(places.images.iter().cloned());
    if !places.images.is_empty() {
        claim::make_folder();
    }
    // An image may also be opened when its guest comes from another server, or returns.
    allowed.readable_in.extend(claim::folders());
    allowed.readable.extend(
        file.into_iter()
            .flat_map(|file| config_file::folders(file.path())),
    );
    sandbox::restrict_files(&allowed).map_err(failed)
}

/// Takes over the disks of an old server, which are `coming`. Returns the thread that serves them already, or nothing if a stop comes
/// first.
///
/// # Errors
///
/// The failure. As after a stop, the old server has all disks as they were.
pub(super) fn take_over(
    offer: &Offer,
    roster: &Arc<Roster>,
    orders: &Orders,
    coming: Coming,
    takes_control: bool,
    stop: &StopToken,
    pid_file: Option<&mut PidFile>,
) -> Result<Option<Ahead>, CommandFailure> {
    if stop.is_stopped() {
        return Ok(None);
    }
    let manager = &roster.setup.manager;
    // Serves what has come while the rest comes.
    let ahead = serve_ahead(roster, orders, roster.setup.options).map_err(not_started)?;
    match take_in_all(roster, offer, coming) {
        Ok(()) => {
            // Before the old one ends, so that its end is not taken for that of the service.
            manager.main(std::process::id());
            pid_file.into_iter().for_each(PidFile::write);
            offer
                .finish(takes_control)
                .unwrap_or_else(|error| tracing::warn!(error = chain(&error), "the old server has gone"));
            Ok(Some(ahead))
        }
        Err(failure) => {
            offer.pid().iter().for_each(|&pid| manager.main(pid));
            stop.stop();
            joined(ahead).unwrap_or_default();
            // What could not be given back is served nowhere else.
            for disk in roster.end().0 {
                close(&disk).unwrap_or_default();
            }
            Err(failure)
        }
    }
}

/// Takes ownership of the sockets' files.
///
/// # Errors
///
/// If one is gone, unless the disks `were_taken_over`.
pub(super) fn keep_sockets(
    roster: &Roster,
    doors: &[&Door],
    were_taken_over: bool,
) -> Result<(), CommandFailure> {
    let keep = |kept: Result<(), SocketError>| match kept {
        // Guests that were taken over go on; only nobody else can connect.
        Err(error) if were_taken_over => {
            tracing::error!(error = chain(&error), "nobody can connect to a socket any more");
            Ok(())
        }
        kept => kept.map_err(failed),
    };
    roster
        .served()
        .iter()
        .try_for_each(|disk| keep(disk.socket.keep()))?;
    doors.iter().try_for_each(|door| keep(door.keep()))
}
