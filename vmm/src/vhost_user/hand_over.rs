//! Handing disks over to a new server, as its request to a control socket asks; [`crate::takeover`] is the protocol, `moves` how disks go.
//!
//! Invariants: disks neither come nor go meanwhile; what the new server does not take for good is served here as before, with the
//! same clients.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::desk::{Door, Doors, VhostUserDesk};
use super::moves::move_all;
use super::served::Served;
use crate::control::Request;
use crate::socket::{Socket, SocketError};
use crate::takeover::{self, Asked, ControlSocket, Offer, Successor, Taken};

/// A disk, with its number in the roster.
pub(super) type Entry = (u64, Arc<Served>);

impl VhostUserDesk {
    /// Hands disks over. Returns when the new server has them, or has not.
    ///
    /// # Errors
    ///
    /// The reason for a refusal. Nothing was said or changed then.
    pub(super) fn hand_disks_over(&self, connection: &UnixStream, request: Request) -> Result<(), String> {
        let refuse = |reason: String| {
            tracing::warn!(reason, "a takeover was refused");
            reason
        };
        let asked = Asked::understand(connection, request).map_err(refuse)?;
        let alone = self.roster.handing_over.try_lock();
        let _alone = alone.ok_or_else(|| refuse("another server takes disks over just now".to_owned()))?;
        // What comes or goes just now, the new server does not know of.
        self.roster.pause();
        let going = wanted(&self.roster.entries(), &asked).and_then(|going| match obstacle(&going) {
            Some(reason) => Err(reason),
            None => Ok(going),
        });
        let handed = match going {
            Ok(going) => self.hand_over(connection, asked, going),
            Err(reason) => Err(refuse(reason)),
        };
        // With the last disks everything has gone, and this server ends.
        if handed != Ok(Rest::Nothing) {
            self.doors.resume();
            self.roster.resume();
        }
        handed.map(drop)
    }

    /// Hands these disks over.
    fn hand_over(&self, connection: &UnixStream, asked: Asked, going: Vec<Entry>) -> Result<Rest, String> {
        let (roster, doors) = (&self.roster, &self.doors);
        let new = Successor::new(connection, asked).map_err(|error| error.to_string())?;
        let are_all = going.len() == roster.entries().len();
        let names = names(&going);
        tracing::info!(
            event = "handing-over",
            disks = names,
            "handing over to a new server"
        );
        let named_after =
            |(_, disk): &Entry| doors.is_own_at(&takeover::takeover_path(disk.socket.absolute()));
        // What keeps disks keeps the sockets by which they can be asked for.
        let goes_along = are_all || going.iter().any(named_after);
        let own = goes_along.then(|| Doors::pause(&doors.own)).flatten();
        let chosen = are_all.then(|| Doors::pause(&doors.chosen)).flatten();
        let moving = roster.moving.lock();
        match move_all(roster, &new, going.clone(), own.as_ref(), chosen.as_ref()) {
            Ok(_) if !are_all => {
                for (number, disk) in going {
                    disk.socket.give_up();
                    roster.forget(number);
                }
                if own.is_some() {
                    Doors::give_up(&doors.own);
                    warn_of_no_takeover(doors);
                }
                tracing::info!(
                    event = "handed-over",
                    disks = names,
                    "these disks are served by a new server"
                );
                Ok(Rest::Served)
            }
            Ok(taken) => {
                *roster.taken.lock() = Some(taken);
                drop(moving);
                self.stop.pause(Duration::ZERO);
                Ok(Rest::Nothing)
            }
            Err(error) => {
                tracing::warn!(
                    disks = names,
                    error,
                    "the takeover failed; this server continues to serve"
                );
                Ok(Rest::Served)
            }
        }
    }
}

/// The disks that this server has after a takeover.
#[derive(Debug, Eq, PartialEq)]
enum Rest {
    /// Some, or all; or none, and it waits for the next ones.
    Served,
    /// None, and no socket either.
    Nothing,
}

/// Returns the disks that are asked for, as the new server lists them.
fn wanted(served: &[Entry], asked: &Asked) -> Result<Vec<Entry>, String> {
    let sockets = || served.iter().map(|(_, disk)| disk.socket.absolute());
    let find = |wanted: &Path| served.iter().find(|(_, disk)| disk.socket.absolute() == wanted);
    let mut found: Vec<Entry> = Vec::new();
    for path in &asked.disks {
        let Some((number, disk)) = find(path) else {
            let sockets: Vec<&Path> = sockets().collect();
            return Err(format!("it serves {sockets:?}, not {path:?}"));
        };
        if found.iter().any(|(other, _)| other == number) {
            return Err(format!("{path:?} is asked for twice"));
        }
        found.push((*number, Arc::clone(disk)));
    }
    if found.len() < served.len() && (!asked.partly || found.is_empty()) {
        let sockets: Vec<&Path> = sockets().collect();
        return Err(format!("it serves {sockets:?}, not {:?} only", asked.disks));
    }
    Ok(found)
}

/// Returns the reason why no other server can continue with these disks now, if there is one.
fn obstacle(going: &[Entry]) -> Option<String> {
    going.iter().find_map(|(_, disk)| {
        let name = &disk.name;
        if disk.image.config().overlay.is_some() {
            return Some(format!(
                "its disk {name} has overlay=temporary, which ends with its process"
            ));
        }
        let obstacle = disk.image.obstacle()?;
        Some(format!("the image of its disk {name} {obstacle}"))
    })
}

/// The names of these disks, for the log.
fn names(disks: &[Entry]) -> String {
    let names: Vec<&str> = disks.iter().map(|(_, disk)| disk.name.as_str()).collect();
    names.join(", ")
}

/// Says that the takeover socket has gone with its disk, and what is left.
pub(super) fn warn_of_no_takeover(doors: &Doors) {
    match &*doors.chosen.lock() {
        Some(_) => tracing::info!(
            "a new server takes over from this one by its control socket only: --takeover=SOCKET"
        ),
        None => tracing::warn!(
            "no new server can take over from this one: its socket for that was named after a disk that has gone; start a \
             server whose disks change with --control"
        ),
    }
}

/// The sockets of these disks, by absolute paths.
pub(super) fn sockets<'a>(served: impl IntoIterator<Item = &'a Arc<Served>>) -> Vec<PathBuf> {
    let paths = served.into_iter().map(|disk| disk.socket.absolute().to_owned());
    paths.collect()
}

/// The sockets that an old server offers, in order.
pub(super) fn adopt_sockets(paths: &[PathBuf], offer: &mut Offer) -> Result<Vec<Socket>, SocketError> {
    let listeners = std::mem::take(&mut offer.disks).into_iter().zip(paths);
    let adopted = listeners.map(|(disk, path)| Socket::adopt(disk.listener, path, disk.is_managers));
    adopted.collect()
}

/// Leaves the control sockets to a new server that has taken all disks. The one of `--control` ends with its file, unless that was taken,
/// too: the new server has none, or one of its own.
pub(super) fn give_up(doors: &Doors, taken: Taken) {
    Doors::give_up(&doors.own);
    if taken.control {
        Doors::give_up(&doors.chosen);
    }
    doors.close();
}

/// Explains a failure of a takeover's connection.
pub(super) fn lost(error: io::Error) -> io::Error {
    use io::{Error, ErrorKind};
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            Error::new(error.kind(), "it has exited or given up; see its own output")
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::new(error.kind(), "it did not answer in time"),
        _ => error,
    }
}

/// Opens the takeover socket beside this one, or beside the first of those that are served; or continues with that of an old server.
/// Without one, because its name is too long, the server can be taken over by its control socket only.
pub(super) fn open_takeover_socket(
    named_after: Option<&Path>,
    sockets: &[PathBuf],
    offered: Option<ControlSocket>,
) -> Option<Door> {
    let path = match &offered {
        Some(offered) => offered.path.clone(),
        None => takeover::takeover_path(named_after.or_else(|| sockets.first().map(PathBuf::as_path))?),
    };
    Door::take(&path, offered)
        .inspect_err(|error| tracing::warn!(%error, "no new server can take over from this one"))
        .ok()
}
