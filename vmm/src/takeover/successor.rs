//! The old server's side of a takeover: its takeover socket, and the new server that asks.
//!
//! Invariant: only a process of the same user that names exactly our sockets is a successor.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use virtio_devices::vhost_user::ClientState;

use super::message::{
    ACCEPTED, ACCEPTED_WITH_CONTROL, ControlSocket, GREETING, GREETING_FOR_ALL, NOT_UNDERSTOOD, READY,
    SEND_MAX, Token, receive, send, send_client, send_listener, send_locks, socket_path,
};
use super::moves::Moves;
use crate::socket::{Socket, SocketError, is_same_user};

/// The longest time that a new server may take to send its request.
const REQUEST_MAX: Duration = Duration::from_secs(1);
/// The longest time that the new server may take to open the images, before the old one wants them back.
pub(super) const OPEN_MAX: Duration = Duration::from_secs(20);
/// The longest time that the new server may take to look at all images, while the old one serves.
const READY_MAX: Duration = Duration::from_secs(60);

/// A server's takeover socket. Its file is removed on drop.
#[derive(Debug)]
pub struct TakeoverSocket {
    socket: Socket,
    sockets: Sockets,
}

/// The absolute paths of the sockets that a server has now.
type Sockets = Arc<Mutex<Vec<PathBuf>>>;

impl TakeoverSocket {
    /// Opens the takeover socket of a server of `sockets`, named after one of them or after another one.
    ///
    /// # Errors
    ///
    /// [`SocketError`], if its socket cannot be made.
    pub fn open(named_after: &Path, sockets: &[PathBuf]) -> Result<Self, SocketError> {
        Self::of(Socket::listen(&socket_path(named_after))?, sockets)
    }

    /// Continues with the takeover socket at `path` that was handed over, of a server of `sockets`.
    ///
    /// # Errors
    ///
    /// [`SocketError`], if it is gone.
    pub fn adopt(listener: UnixListener, path: &Path, sockets: &[PathBuf]) -> Result<Self, SocketError> {
        Self::of(Socket::adopt(listener, path, false)?, sockets)
    }

    fn of(socket: Socket, sockets: &[PathBuf]) -> Result<Self, SocketError> {
        let absolute = sockets.iter().map(std::path::absolute).collect::<io::Result<_>>();
        let sockets = absolute.map_err(|source| SocketError::Os {
            action: "name",
            path: socket.path().to_owned(),
            source,
        })?;
        Ok(Self {
            socket,
            sockets: Arc::new(Mutex::new(sockets)),
        })
    }

    /// The server has these sockets from now on, by absolute paths.
    pub fn set_sockets(&self, sockets: Vec<PathBuf>) {
        *self.sockets.lock() = sockets;
    }

    /// Returns true if the socket is named after the one at this path.
    #[must_use]
    pub fn is_named_after(&self, socket: &Path) -> bool {
        socket_path(socket) == self.socket.path()
    }

    /// The socket, to be handed over.
    #[must_use]
    pub fn listener(&self) -> &Arc<UnixListener> {
        self.socket.listener()
    }

    /// Takes ownership of the socket's file.
    ///
    /// # Errors
    ///
    /// [`SocketError`] if it is gone.
    pub fn keep(&self) -> Result<(), SocketError> {
        self.socket.keep()
    }

    /// Leaves the socket's file to the new server.
    pub fn give_up(self) {
        self.socket.give_up();
    }

    /// Returns the listener of the takeover socket, for its own thread.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub fn listener_for_thread(&self) -> io::Result<TakeoverListener> {
        Ok(TakeoverListener {
            listener: self.socket.listener().try_clone()?,
            sockets: Arc::clone(&self.sockets),
        })
    }
}

/// Waits on the takeover socket.
#[derive(Debug)]
pub struct TakeoverListener {
    pub(super) listener: UnixListener,
    sockets: Sockets,
}

/// The answer to a request on the takeover socket.
enum Verdict {
    /// It can have the sockets, which it wants in this order, all at once or one at a time.
    Accepted { is_for_all: bool, wanted: Vec<PathBuf> },
    /// The reason for the refusal.
    Refused(String),
}

impl TakeoverListener {
    /// Waits for a new server that requests exactly our sockets. Other requests are refused with a reason.
    ///
    /// # Errors
    ///
    /// If the takeover socket cannot be waited on.
    pub fn wait(&self) -> io::Result<Successor> {
        loop {
            let (connection, _) = self.listener.accept()?;
            let mut new = Successor::unnamed(connection);
            match self.check(new.moves.connection()) {
                Ok(Verdict::Accepted { is_for_all, wanted }) => {
                    if is_for_all {
                        new.token = Some(Token::new()?);
                    }
                    new.wanted = wanted;
                    return Ok(new);
                }
                Ok(Verdict::Refused(reason)) => {
                    tracing::warn!(reason, "a takeover was refused");
                    new.refuse(&reason);
                }
                Err(error) => tracing::warn!(%error, "cannot read a takeover request"),
            }
        }
    }

    /// Checks a request on the takeover socket.
    fn check(&self, connection: &UnixStream) -> io::Result<Verdict> {
        if !is_same_user(connection) {
            return Ok(Verdict::Refused("it belongs to another user".to_owned()));
        }
        connection.set_read_timeout(Some(REQUEST_MAX))?;
        connection.set_write_timeout(Some(SEND_MAX))?;
        let (asked, _) = receive(connection)?;
        let mut parts = asked.split(|byte| *byte == 0);
        let is_for_all = match parts.next() {
            Some(GREETING) => false,
            Some(GREETING_FOR_ALL) => true,
            _ => return Ok(Verdict::Refused(NOT_UNDERSTOOD.to_owned())),
        };
        let wanted: Vec<PathBuf> = parts.map(|path| OsStr::from_bytes(path).into()).collect();
        Ok(match mismatch(&self.sockets.lock(), &wanted) {
            Some(reason) => Verdict::Refused(reason),
            None => Verdict::Accepted { is_for_all, wanted },
        })
    }
}

/// Says how the sockets that are wanted are not those that are served, in whatever order.
fn mismatch(served: &[PathBuf], wanted: &[PathBuf]) -> Option<String> {
    let sorted = |paths: &[PathBuf]| {
        let mut sorted = paths.to_vec();
        sorted.sort_unstable();
        sorted
    };
    (sorted(served) != sorted(wanted)).then(|| format!("it serves {served:?}, not {wanted:?}"))
}

/// What a new server has taken beside the disks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Taken {
    /// The control socket, whose file is the new server's from now on.
    pub control: bool,
}

/// A new server that waits for the sockets.
#[derive(Debug)]
pub struct Successor {
    pub(super) moves: Moves,
    /// The token that only one server can read. `None`: the new server takes disks one at a time.
    pub(super) token: Option<Token>,
    /// The sockets that it wants, by absolute paths.
    wanted: Vec<PathBuf>,
}

impl Successor {
    /// One that has not said what it wants.
    pub(super) fn unnamed(connection: UnixStream) -> Self {
        Self {
            moves: Moves::new(connection),
            token: None,
            wanted: Vec::new(),
        }
    }

    /// Says how the sockets that it wants are not these, by absolute paths, if they are not.
    #[must_use]
    pub fn mismatch(&self, served: &[PathBuf]) -> Option<String> {
        mismatch(served, &self.wanted)
    }

    /// Returns the connection over which disks move to it, if it takes them one at a time.
    #[must_use]
    pub fn moves(&self) -> Option<&Moves> {
        self.token.is_none().then_some(&self.moves)
    }

    /// Returns the place at which it wants the socket of this absolute path.
    #[must_use]
    pub fn place_of(&self, socket: &Path) -> Option<usize> {
        self.wanted.iter().position(|wanted| wanted == socket)
    }

    /// Offers sockets to one that takes disks one at a time. Returns when it is ready for the first.
    ///
    /// # Errors
    ///
    /// If it has given up, or takes too long.
    pub fn offer<'a>(
        &self,
        takeover_socket: &UnixListener,
        control: Option<&ControlSocket>,
        sockets: impl Iterator<Item = &'a Socket>,
    ) -> io::Result<()> {
        let mut fds = vec![takeover_socket.as_raw_fd()];
        if let Some(control) = control {
            fds.extend([control.listener.as_raw_fd(), control.file.as_raw_fd()]);
        }
        send(self.moves.connection(), b"o", &fds)?;
        for socket in self.in_order(sockets.map(|socket| (socket, ())))? {
            send_listener(self.moves.connection(), socket.0)?;
        }
        match self.moves.answer(READY_MAX)? {
            (READY, _) => Ok(()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Says that all disks have moved. Returns when the new server has taken the rest, for good.
    ///
    /// # Errors
    ///
    /// If it has died.
    pub fn finish(&self) -> io::Result<Taken> {
        self.moves.end()?;
        let (accepted, _) = self.moves.answer(OPEN_MAX)?;
        match [accepted] {
            ACCEPTED => Ok(Taken { control: false }),
            ACCEPTED_WITH_CONTROL => Ok(Taken { control: true }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sorts disks by their sockets, in the order in which they are wanted: the new server tells them apart by nothing else.
    fn in_order<'a, T>(
        &self,
        disks: impl Iterator<Item = (&'a Socket, T)>,
    ) -> io::Result<Vec<(&'a Socket, T)>> {
        let mut ordered = Vec::new();
        for (socket, more) in disks {
            let place = self.place_of(socket.absolute());
            ordered.push((place.ok_or(io::ErrorKind::InvalidData)?, socket, more));
        }
        ordered.sort_by_key(|(place, ..)| *place);
        let ordered = ordered.into_iter().map(|(_, socket, more)| (socket, more));
        Ok(ordered.collect())
    }

    /// Offers the sockets of disks whose images are closed, their clients, the images' locks and the control socket to one that takes all
    /// at once. Returns when it has taken them, for good.
    ///
    /// # Errors
    ///
    /// If the new server has exited, or takes too long. Nothing was handed over then, if [`Successor::take_back`]
    /// confirms it.
    pub fn hand_over<'a>(
        &self,
        takeover_socket: &UnixListener,
        control: Option<&ControlSocket>,
        locks: &[OwnedFd],
        disks: impl Iterator<Item = (&'a Socket, Option<ClientState>)>,
    ) -> io::Result<Taken> {
        let mut connection = self.moves.connection();
        connection.set_read_timeout(Some(OPEN_MAX))?;
        let token = self.token.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        let mut fds = vec![takeover_socket.as_raw_fd(), token.0.as_raw_fd()];
        if let Some(control) = control {
            fds.extend([control.listener.as_raw_fd(), control.file.as_raw_fd()]);
        }
        send(connection, b"o", &fds)?;
        send_locks(connection, locks)?;
        for (socket, client) in self.in_order(disks)? {
            send_listener(connection, socket)?;
            send_client(connection, client.as_ref())?;
        }
        let mut accepted = [0];
        connection.read_exact(&mut accepted)?;
        connection.write_all(b"a")?;
        Ok(Taken {
            control: accepted == ACCEPTED_WITH_CONTROL,
        })
    }

    /// Takes everything back after a hand-over that failed: waits `patience` for the new server to close what it has open.
    /// It opens nothing from now on.
    ///
    /// # Errors
    ///
    /// If it still has the images open then. They are not to be opened.
    pub fn take_back(self, patience: Duration) -> io::Result<()> {
        if self.token.as_ref().is_none_or(Token::take) {
            return Ok(());
        }
        // It waits for an answer, perhaps.
        let mut stream = self.moves.connection();
        stream.shutdown(Shutdown::Write).unwrap_or_default();
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut [0]) {
                // Its end, or that of its process.
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Tells the new server that it gets nothing.
    pub fn refuse(self, reason: &str) {
        // One that has gone need not be told.
        send(self.moves.connection(), format!("n{reason}").as_bytes(), &[]).unwrap_or_default();
    }
}
