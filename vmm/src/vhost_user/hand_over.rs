//! Takeovers as the server does them: it hands its disks over, or takes an old server's; [`crate::takeover`] is the protocol. Here are all
//! disks at once, as with a server of the version before; `moves` has them one at a time.
//!
//! Invariants: an image is closed before it is offered. If the new server does not take what is offered, the images are opened
//! again, and the same clients are served.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use block::lock::LockSet;
use parking_lot::Mutex;
use virtio_devices::vhost_user::{PausedClient, StopToken};

use super::desk::ServedControl;
use super::moves::move_all;
use super::roster::Roster;
use super::served::{Served, confine};
use crate::error::CommandFailure;
use crate::parallel;
use crate::sandbox::Task;
use crate::socket::{Socket, SocketError};
use crate::takeover::{self, ControlSocket, Offer, Successor, Taken, TakeoverListener, TakeoverSocket};

/// The longest time that a client may take to complete a message, and its thread to execute it, during a takeover. It
/// is long enough for a busy machine, because slower clients are disconnected.
const MESSAGE_MAX: Duration = Duration::from_secs(1);
/// The longest wait for the image locks after a failed takeover: the new server may still be exiting.
const REOPEN_MAX: Duration = Duration::from_secs(20);

/// The state of a pending takeover.
pub(super) struct Takeover {
    pub(super) successor: Arc<Mutex<Option<Successor>>>,
    /// What a new server has taken that has all disks.
    pub(super) finished: Arc<Mutex<Option<Taken>>>,
    /// Reopens the takeover socket after a failed takeover.
    pub(super) again: mpsc::Sender<()>,
}

/// Lets no client of the control socket in, and returns it for a new server.
pub(super) fn pause_control(control: &Mutex<Option<ServedControl>>) -> Option<ControlSocket> {
    let offered = control.lock().as_ref().map(ServedControl::pause).transpose();
    offered
        .inspect_err(|error| tracing::warn!(%error, "cannot pass the control socket to the new server"))
        .unwrap_or_default()
}

/// Leaves the control socket to a new server that has taken it. Otherwise it ends with its file: the new server has none, or one of its
/// own.
pub(super) fn give_up_control(control: &Mutex<Option<ServedControl>>, taken: Taken) {
    let control = control.lock().take();
    if let Some(control) = control.filter(|_| taken.control) {
        control.give_up();
    }
}

/// The sockets that an old server offers, in order.
pub(super) fn adopt_sockets(paths: &[PathBuf], offer: &mut Offer) -> Result<Vec<Socket>, SocketError> {
    let listeners = offer.disks.iter().zip(paths);
    let adopted = listeners.map(|(disk, path)| {
        let listener = disk.listener.try_clone().map_err(|source| SocketError::Os {
            action: "take over",
            path: path.clone(),
            source,
        })?;
        Socket::adopt(listener, path, disk.is_managers)
    });
    adopted.collect()
}

/// Adopts the clients of an old server, and its control socket if this one `takes_control`. Until the new server confirms, the
/// old one can continue with them.
pub(super) fn accept(
    offer: &mut Offer,
    served: &[Arc<Served>],
    takes_control: bool,
) -> Result<(), CommandFailure> {
    for (disk, handed) in served.iter().zip(std::mem::take(&mut offer.disks)) {
        let client = handed.client.map(|state| disk.server.adopt(state)).transpose();
        *disk.client.lock() = client.map_err(|error| takeover::not_adopted(&disk.name, error))?;
    }
    offer
        .accept(takes_control)
        .map_err(|error| CommandFailure::Failed(error.into()))
}

/// Returns the reason why no other server can continue with the disks now, if there is one.
fn obstacle(served: &[Arc<Served>]) -> Option<String> {
    if let Some(kept) = served.iter().find(|disk| disk.image.config().overlay.is_some()) {
        let name = &kept.name;
        return Some(format!(
            "its disk {name} has overlay=temporary, which ends with its process"
        ));
    }
    served.iter().find_map(|disk| {
        let obstacle = disk.image.obstacle()?;
        Some(format!("the image of its disk {} {obstacle}", disk.name))
    })
}

/// The sockets of these disks, by absolute paths.
pub(super) fn sockets<'a>(served: impl IntoIterator<Item = &'a Arc<Served>>) -> Vec<PathBuf> {
    let paths = served.into_iter().map(|disk| disk.socket.absolute().to_owned());
    paths.collect()
}

/// The names of these disks, for the log.
pub(super) fn names(served: &[Arc<Served>]) -> String {
    let names: Vec<&str> = served.iter().map(|disk| disk.name.as_str()).collect();
    names.join(", ")
}

/// Explains a failure of a takeover's connection.
pub(super) fn lost(error: std::io::Error) -> std::io::Error {
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
pub(super) enum HandOverFailure {
    /// An image was not closed cleanly, and must be checked before another server opens it.
    Close(CommandFailure),
    /// The new server has exited, or refused. The images are closed and sound.
    NotTaken(std::io::Error),
}

/// Closes the images and offers everything to a new server. If that does not take it, `lock_set` has what
/// is to be opened again with.
pub(super) fn hand_over(
    roster: &Roster,
    served: &[Arc<Served>],
    control: Option<&ControlSocket>,
    successor: Successor,
) -> Result<Taken, HandOverFailure> {
    // A guest may have migrated since the new server was let in.
    if let Some(reason) = obstacle(served) {
        successor.refuse(&reason);
        return Err(HandOverFailure::NotTaken(std::io::Error::other(reason)));
    }
    // Requests of operators end first.
    served.iter().for_each(|disk| disk.disk.detach());
    let lock_set = roster.lock_set();
    let mut locks = Vec::new();
    match lock_set.descriptors() {
        Ok(held) => {
            locks = held;
            lock_set.leave();
        }
        // Given back, and taken again by whoever opens the images.
        Err(error) => tracing::warn!(%error, "cannot pass the image locks to the new server"),
    }
    let mut failed = None;
    let images: Vec<_> = served.iter().map(|disk| (&disk.server, &disk.image)).collect();
    let Ok(closed) = parallel::each(images, |(server, image)| {
        let closed = server.close_disk();
        image.close();
        Ok::<_, Infallible>(closed)
    });
    for (disk, (_, closed)) in served.iter().zip(closed) {
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
        .map(|disk| disk.client.lock().as_ref().map(PausedClient::state).transpose());
    let states = states.collect::<std::io::Result<Vec<_>>>();
    let sockets = served.iter().map(|disk| &disk.socket);
    let handed = states.and_then(|states| {
        let takeover = roster.takeover_listener().ok_or(std::io::ErrorKind::NotFound)?;
        successor.hand_over(&takeover, control, &locks, sockets.zip(states))
    });
    handed.map_err(|error| {
        roster.set_lock_set(LockSet::inherit(locks));
        match successor.take_back(REOPEN_MAX) {
            Ok(()) => HandOverFailure::NotTaken(error),
            Err(error) => {
                let message = "the new server has neither taken over nor released the images";
                HandOverFailure::Close(CommandFailure::about(message, error))
            }
        }
    })
}

/// Opens the images again that were closed for a new server, which did not take them.
pub(super) fn reopen(served: &[Arc<Served>], lock_set: &LockSet) -> Result<(), CommandFailure> {
    let deadline = Instant::now() + REOPEN_MAX;
    for disk in served.iter().filter(|disk| disk.image.is_closed()) {
        let opened = disk.image.reopen_until(lock_set, deadline);
        disk.server
            .reopen(opened.map_err(|error| CommandFailure::Failed(error.into()))?);
    }
    lock_set.keep();
    Ok(())
}

/// Opens the takeover socket beside this one, or beside the first of those that are served. Without one, because its name is too
/// long, the server only cannot be taken over.
pub(super) fn open_takeover_socket(
    named_after: Option<&Path>,
    sockets: &[PathBuf],
) -> Option<TakeoverSocket> {
    let named_after = named_after.or_else(|| sockets.first().map(PathBuf::as_path))?;
    TakeoverSocket::open(named_after, sockets)
        .inspect_err(|error| tracing::warn!(%error, "no new server can take over from this one"))
        .ok()
}

/// Starts the thread that pauses the server when a new one wants to take over.
///
/// The server continues instead if something is in the way: the new one is told what it is.
pub(super) fn stop_on_takeover(
    listener: TakeoverListener,
    roster: Arc<Roster>,
    stop: StopToken,
    control: Arc<Mutex<Option<ServedControl>>>,
) -> std::io::Result<Takeover> {
    let (successor, finished) = (Arc::new(Mutex::new(None)), Arc::new(Mutex::new(None)));
    let (shared, all) = (Arc::clone(&successor), Arc::clone(&finished));
    let (again, resumed) = mpsc::channel();
    let wait_and_pause = move || -> std::io::Result<()> {
        confine(Task::Control, roster.setup.options)?;
        loop {
            let new = listener.wait()?;
            // What comes or goes just now, the new server does not know of.
            roster.pause();
            let served = roster.served();
            let refused = new.mismatch(&sockets(&served));
            if let Some(reason) = refused.or_else(|| obstacle(&served)) {
                tracing::warn!(reason, "a takeover was refused");
                new.refuse(&reason);
                roster.resume();
                continue;
            }
            tracing::info!(event = "handing-over", "handing over to a new server");
            if let Some(moves) = new.moves() {
                let offered = pause_control(&control);
                let moving = roster.moving.lock();
                let moved = move_all(&roster, &new, moves, offered.as_ref());
                let moved = moved.map(|taken| *all.lock() = Some(taken));
                drop(moving);
                match moved {
                    Ok(()) => {
                        stop.pause(Duration::ZERO);
                        return Ok(());
                    }
                    Err(error) => {
                        tracing::warn!(
                            disks = names(&served),
                            error,
                            "the takeover failed; this server continues to serve"
                        );
                        control.lock().iter().for_each(ServedControl::resume);
                        roster.resume();
                        continue;
                    }
                }
            }
            *shared.lock() = Some(new);
            // Their guests need not wait for the end of a compaction.
            served.iter().for_each(|disk| disk.disk.prepare_to_detach());
            drop(served);
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
        successor,
        finished,
        again,
    })
}
