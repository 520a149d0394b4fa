//! The old server's side of a takeover: the new server that asks.
//!
//! Invariant: only a process of the same user that names sockets of ours is a successor.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;

use super::message::{
    ACCEPTED, ACCEPTED_WITH_CONTROL, ControlSocket, READY, SEND_MAX, receive, send_control, send_listener,
    socket_path,
};
use super::moves::Moves;
use crate::control::{HAND_OVER, Request, answer_with};
use crate::socket::{Socket, is_same_user};

/// The longest time that the new server may take to look at all images, while this one serves.
const READY_MAX: Duration = Duration::from_secs(60);
/// The longest time that the new server may take to confirm that it has everything.
const CONFIRM_MAX: Duration = Duration::from_secs(20);

/// Returns the path of the takeover socket that is named after the socket at `path`.
#[must_use]
pub fn takeover_path(path: &Path) -> PathBuf {
    socket_path(path)
}

/// A request for disks.
#[derive(Debug)]
pub struct Asked {
    /// The places of the disks, as they were given.
    pub disks: Vec<PathBuf>,
    /// The end of the time that it may take.
    pub until: Instant,
    /// True if there may be others, which stay.
    pub partly: bool,
}

impl Asked {
    /// Understands a [`Request::HandOver`] that has come on `connection`.
    ///
    /// # Errors
    ///
    /// The reason why it is refused, as the end of a sentence.
    pub fn understand(connection: &UnixStream, request: Request) -> Result<Self, String> {
        let Request::HandOver {
            version,
            disks,
            seconds,
            partly,
        } = request
        else {
            return Err(format!("`{}` is another request", request.name()));
        };
        if version != HAND_OVER {
            return Err(format!(
                "it supports hand-over version {HAND_OVER}, not {version}"
            ));
        }
        if !is_same_user(connection) {
            return Err("it belongs to another user".to_owned());
        }
        // Nobody waits for longer.
        let within = Duration::from_secs(seconds.min(super::WITHIN_MAX.as_secs()));
        Ok(Self {
            disks,
            until: Instant::now() + within,
            partly,
        })
    }

    /// Returns the time that is left of it.
    #[must_use]
    pub fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// The sockets taken by a new server beside those of the disks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Taken {
    /// The control socket, whose file is the new server's from now on.
    pub control: bool,
}

/// A new server that waits for disks.
#[derive(Debug)]
pub struct Successor {
    moves: Moves,
    /// The disks that it has asked for, and the time.
    pub asked: Asked,
}

impl Successor {
    /// The one that has asked on this connection.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub fn new(connection: &UnixStream, asked: Asked) -> io::Result<Self> {
        let connection = connection.try_clone()?;
        connection.set_write_timeout(Some(SEND_MAX))?;
        Ok(Self {
            moves: Moves::new(connection),
            asked,
        })
    }

    /// Returns the connection over which disks are given back.
    #[must_use]
    pub fn moves(&self) -> &Moves {
        &self.moves
    }

    /// Offers the sockets of disks, by their places, and the control sockets that go with them. Returns the lanes on which it waits for the
    /// disks when it is ready.
    ///
    /// # Errors
    ///
    /// If it has given up, or takes too long.
    pub fn offer(
        &self,
        takeover_socket: Option<&ControlSocket>,
        control: Option<&ControlSocket>,
        sockets: &[&Socket],
    ) -> io::Result<Vec<Moves>> {
        let connection = self.moves.connection();
        answer_with(connection, &json!({ "ok": true }), &[])?;
        send_control(connection, takeover_socket)?;
        send_control(connection, control)?;
        for socket in sockets {
            send_listener(connection, socket)?;
        }
        let patience = self.asked.left().clamp(Duration::from_millis(1), READY_MAX);
        connection.set_read_timeout(Some(patience))?;
        let (message, lanes) = receive(connection)?;
        if message != [READY] || lanes.is_empty() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        lanes.into_iter().map(Moves::other_end).collect()
    }

    /// Waits until the new server, to which all disks have moved, has taken the rest, for good.
    ///
    /// # Errors
    ///
    /// If it has died.
    pub fn finish(&self) -> io::Result<Taken> {
        let (accepted, _) = self.moves.answer(CONFIRM_MAX)?;
        match [accepted] {
            ACCEPTED => Ok(Taken { control: false }),
            ACCEPTED_WITH_CONTROL => Ok(Taken { control: true }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}
