//! The new server's side of a takeover: it asks, and is offered sockets, locks and clients.
//!
//! Invariant: until the offer is accepted the old server can continue; an offer that is dropped gives everything back.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::lock::LockSet;
use virtio_devices::connect::{Cancel, connect_within};
use virtio_devices::vhost_user::ClientState;

use super::error::TakeoverError;
use super::message::{
    ACCEPTED, ACCEPTED_WITH_CONTROL, ControlSocket, GREETING, GREETING_FOR_ALL, NOT_UNDERSTOOD, READY,
    SEND_MAX, Token, receive, receive_client, receive_listener, receive_locks, request, send, socket_path,
};
use super::moves::Moves;
use crate::socket::{is_same_user, peer_pid};

/// The longest time that the old server may take to drain and close. If it is asked and the new one has given up, it
/// continues.
const DRAIN_MAX: Duration = Duration::from_secs(60);

/// The part of a handover that concerns one disk.
#[derive(Debug)]
pub struct Handed {
    /// The socket that clients connect to.
    pub listener: UnixListener,
    /// A service manager created it.
    pub is_managers: bool,
    /// The client that is connected, if one is and all disks are offered at once.
    pub client: Option<ClientState>,
}

/// The offer of an old server. Unless it is accepted, the old server continues.
#[derive(Debug)]
pub struct Offer {
    moves: Moves,
    /// The token to read before an image is opened, if all are offered at once.
    pub(super) token: Option<Token>,
    /// The images' locks, to open them with, if all are offered at once.
    pub lock_set: LockSet,
    /// The takeover socket, which stays open all the time.
    pub takeover_socket: UnixListener,
    /// Its path.
    pub takeover_path: PathBuf,
    /// The old server's control socket.
    pub control: Option<ControlSocket>,
    /// By disk, in the order that was asked for.
    pub disks: Vec<Handed>,
}

/// Asks the server that serves exactly the sockets at `sockets`, and may have this `control` socket, for them. An old server of the
/// version before has closed all its images when this returns; any other serves its disks until they move ([`Offer::moves`]).
///
/// # Errors
///
/// [`TakeoverError`]. The old server then continues as before.
pub fn take_over(sockets: &[PathBuf], control: Option<&Path>) -> Result<Offer, TakeoverError> {
    match ask(sockets, control, GREETING) {
        Err(TakeoverError::Refused { reason }) if reason == NOT_UNDERSTOOD => {
            ask(sockets, control, GREETING_FOR_ALL)
        }
        answer => answer,
    }
}

/// Asks with one version's greeting.
pub(super) fn ask(
    sockets: &[PathBuf],
    control: Option<&Path>,
    greeting: &[u8],
) -> Result<Offer, TakeoverError> {
    let (path, connection) = connect(sockets, control)?;
    if !is_same_user(&connection) {
        return Err(TakeoverError::Stranger { path });
    }
    let broken = TakeoverError::BrokenOff;
    connection.set_read_timeout(Some(DRAIN_MAX)).map_err(broken)?;
    connection.set_write_timeout(Some(SEND_MAX)).map_err(broken)?;
    let asked = request(greeting, sockets).map_err(broken)?;
    send(&connection, &asked, &[]).map_err(|error| TakeoverError::unanswered(error, SEND_MAX))?;

    let unanswered = |error| TakeoverError::unanswered(error, DRAIN_MAX);
    let (verdict, fds) = receive(&connection).map_err(unanswered)?;
    if verdict != b"o" {
        let reason = verdict.strip_prefix(b"n").unwrap_or(&verdict);
        let reason = String::from_utf8_lossy(reason).into_owned();
        return Err(TakeoverError::Refused { reason });
    }
    let is_for_all = greeting == GREETING_FOR_ALL;
    let mut fds = fds.into_iter();
    let takeover_socket = fds.next().ok_or(io::ErrorKind::InvalidData.into());
    let takeover_socket = takeover_socket.map_err(broken)?;
    let token = if is_for_all { fds.next().map(Token) } else { None };
    let control = fds.next().zip(fds.next()).map(|(listener, file)| ControlSocket {
        listener: listener.into(),
        file,
    });
    let lock_set = match &token {
        Some(_) => LockSet::inherit(receive_locks(&connection).map_err(unanswered)?),
        None => LockSet::default(),
    };
    let disk = |_| {
        let (listener, is_managers) = receive_listener(&connection)?;
        let client = if is_for_all {
            receive_client(&connection)?
        } else {
            None
        };
        Ok(Handed {
            listener,
            is_managers,
            client,
        })
    };
    let disks = sockets.iter().map(disk);
    let disks = disks.collect::<io::Result<_>>().map_err(unanswered)?;
    Ok(Offer {
        moves: Moves::new(connection),
        token,
        lock_set,
        takeover_socket: takeover_socket.into(),
        takeover_path: path,
        control,
        disks,
    })
}

/// Connects to the takeover socket, which has the name of the old server's first disk, whatever order the disks have now, or of its
/// control socket.
fn connect(sockets: &[PathBuf], control: Option<&Path>) -> Result<(PathBuf, UnixStream), TakeoverError> {
    let mut first = None;
    for socket in sockets.iter().map(PathBuf::as_path).chain(control) {
        let path = socket_path(socket);
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

impl Offer {
    /// Returns the process of the old server, if it can be known.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        peer_pid(self.moves.connection())
    }

    /// Returns the connection over which the disks come, if they come one at a time.
    #[must_use]
    pub fn moves(&self) -> Option<&Moves> {
        self.token.is_none().then_some(&self.moves)
    }

    /// Says that disks may come.
    ///
    /// # Errors
    ///
    /// If the old server has given up.
    pub fn ready(&self) -> Result<(), TakeoverError> {
        self.moves.say_byte(READY).map_err(TakeoverError::BrokenOff)
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

    /// Begins to open the images, which the old server does not open again before this value is dropped. Drop it after
    /// them.
    ///
    /// # Errors
    ///
    /// [`TakeoverError::TooLate`] if the old server has them open again.
    pub fn begin(&self) -> Result<(), TakeoverError> {
        match &self.token {
            // Whoever reads it has it.
            Some(token) if !token.take() => Err(TakeoverError::TooLate),
            _ => Ok(()),
        }
    }

    /// Takes what was offered, for good: the old server ends. Call it when nothing can fail any more. With `control`, its control
    /// socket is taken, too; otherwise the old server removes that.
    ///
    /// # Errors
    ///
    /// If the old server does not receive that in time; it then continues, or has died.
    pub fn accept(&self, control: bool) -> Result<(), TakeoverError> {
        let broken = TakeoverError::BrokenOff;
        let accepted = if control { ACCEPTED_WITH_CONTROL } else { ACCEPTED };
        let mut connection = self.moves.connection();
        connection.write_all(&accepted).map_err(broken)?;
        let read = connection.read_exact(&mut [0]);
        read.map_err(|error| TakeoverError::unanswered(error, DRAIN_MAX))?;
        self.lock_set.keep();
        Ok(())
    }
}
