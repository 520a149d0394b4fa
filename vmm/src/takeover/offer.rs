//! The new server's side of a takeover: it asks, and is offered sockets, locks and clients.
//!
//! Invariant: an offer that is dropped before it is finished gives everything back, and the old server continues.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_devices::connect::{Cancel, connect_within};

use super::error::TakeoverError;
use super::message::{
    ACCEPTED, ACCEPTED_WITH_CONTROL, ControlSocket, READY, SEND_MAX, receive_control, receive_listener, send,
    socket_path,
};
use super::moves::Moves;
use crate::control::{AskError, HAND_OVER, Request, ask_for_disks};
use crate::socket::{is_same_user, peer_pid};

/// The time that the old server may take for its answers beyond that of the disks.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// The disks that a new server wants.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// A control socket of the old server, which then may have more disks than these. Without it, one that has its name from these.
    pub from: Option<&'a Path>,
    /// The sockets of the disks.
    pub sockets: &'a [PathBuf],
    /// The control socket that the new server is to have, which the old one may have.
    pub control: Option<&'a Path>,
    /// The longest time that it may take to move the disks.
    pub within: Duration,
}

/// The part of a handover that concerns one disk.
#[derive(Debug)]
pub struct Handed {
    /// The socket that clients connect to.
    pub listener: UnixListener,
    /// A service manager created it.
    pub is_managers: bool,
}

/// The offer of an old server, which serves its disks until they move.
#[derive(Debug)]
pub struct Offer {
    moves: Moves,
    /// The takeover socket, if it goes with the disks.
    pub takeover_socket: Option<ControlSocket>,
    /// The control socket, if the old server has one that goes with the disks.
    pub control: Option<ControlSocket>,
    /// By disk, in the order that was asked for.
    pub disks: Vec<Handed>,
}

impl Wish<'_> {
    /// Asks the server that has these disks for them.
    ///
    /// # Errors
    ///
    /// [`TakeoverError`]. The old server then continues as before.
    pub fn ask(&self) -> Result<Offer, TakeoverError> {
        let (path, connection) = self.connect()?;
        if !is_same_user(&connection) {
            return Err(TakeoverError::Stranger { path });
        }
        let broken = TakeoverError::BrokenOff;
        let disks = self.sockets.iter().map(std::path::absolute);
        let request = Request::HandOver {
            version: HAND_OVER,
            disks: disks.collect::<io::Result<_>>().map_err(broken)?,
            seconds: self.within.as_secs(),
            partly: self.from.is_some(),
        };
        let waited = self.within + ANSWER_MAX;
        let answer = ask_for_disks(&connection, &request, waited);
        answer.map_err(|error| match error {
            AskError::Refused(reason) => TakeoverError::Refused { reason },
            AskError::Unanswered(error) => TakeoverError::unanswered(error, waited),
        })?;
        let unanswered = |error| TakeoverError::unanswered(error, waited);
        connection.set_write_timeout(Some(SEND_MAX)).map_err(broken)?;
        let takeover_socket = receive_control(&connection).map_err(unanswered)?;
        let control = receive_control(&connection).map_err(unanswered)?;
        let disk = |_| {
            let (listener, is_managers) = receive_listener(&connection)?;
            Ok(Handed {
                listener,
                is_managers,
            })
        };
        let disks = self.sockets.iter().map(disk);
        let disks = disks.collect::<io::Result<_>>().map_err(unanswered)?;
        Ok(Offer {
            moves: Moves::new(connection),
            takeover_socket,
            control,
            disks,
        })
    }

    /// Connects to the takeover socket, which has the name of the old server's first disk, whatever order the disks have now, or of its
    /// control socket.
    fn connect(&self) -> Result<(PathBuf, UnixStream), TakeoverError> {
        let named = self.sockets.iter().map(PathBuf::as_path).chain(self.control);
        let paths: Vec<PathBuf> = match self.from {
            Some(path) => vec![path.to_owned()],
            None => named.map(socket_path).collect(),
        };
        let mut first = None;
        for path in paths {
            match connect_within(&path, SEND_MAX, &Cancel::never()) {
                Ok(connection) => return Ok((path, connection)),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    return Err(TakeoverError::Silent { waited: SEND_MAX });
                }
                Err(source) => {
                    first.get_or_insert(TakeoverError::Nobody { path, source });
                }
            }
        }
        Err(first.unwrap_or_else(|| TakeoverError::Nobody {
            path: socket_path(Path::new("")),
            source: io::ErrorKind::NotFound.into(),
        }))
    }
}

impl Offer {
    /// Returns the process of the old server, if it can be known.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        peer_pid(self.moves.connection())
    }

    /// Returns the connection over which disks are given back.
    #[must_use]
    pub fn moves(&self) -> &Moves {
        &self.moves
    }

    /// Says that disks may come, on lanes with these other ends ([`Moves::lane`]).
    ///
    /// # Errors
    ///
    /// If the old server has given up.
    pub fn ready(&self, lanes: Vec<OwnedFd>) -> Result<(), TakeoverError> {
        let fds: Vec<_> = lanes.iter().map(AsRawFd::as_raw_fd).collect();
        send(self.moves.connection(), &[READY], &fds).map_err(TakeoverError::BrokenOff)
    }

    /// Takes the rest, for good, when all disks have come: the takeover socket and, with `control`, the control socket.
    ///
    /// # Errors
    ///
    /// If the old server has died.
    pub fn finish(&self, control: bool) -> Result<(), TakeoverError> {
        let [accepted] = if control { ACCEPTED_WITH_CONTROL } else { ACCEPTED };
        self.moves.say_byte(accepted).map_err(TakeoverError::BrokenOff)
    }
}
