//! A server that replaces another while guests go on: `--takeover`.
//!
//! A running server has, beside its first socket, a *door*: a socket of the same name with `.takeover` behind
//! it, mode 0600, that listens to processes of the same user only. A new server comes to the door and says which
//! sockets it wants to serve. The old one disconnects its clients after their last answer, closes its images
//! cleanly, gives their locks back, and hands the listening sockets over. So a client that connects again, as it does
//! when a server goes, finds its socket at any moment, and nothing in flight was lost.
//!
//! ```text
//! new ── greeting, paths, end ──▶ old:  drain, flush, close
//! new ◀── 'o', and a byte with a descriptor for each path, in order ── old: ends
//!     ◀── 'n', and why not ──────────────────────────────────────── old: goes on
//! ```
//!
//! What must stay true: the old server refuses before it has stopped anything, or hands over all; and it keeps
//! no image open once it has handed over.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::socket::{Socket, SocketError, is_same_user};

/// What a new server says first.
const GREETING: &[u8] = b"ringdisk takeover 1";
/// The longest request that is listened to, in bytes.
const REQUEST_BYTES_MAX: u64 = 1 << 16;
/// How long a visitor may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the old server may take to drain and close. It goes on if it is asked and the new one has given up.
const DRAIN_MAX: Duration = Duration::from_secs(60);

/// Why a takeover did not happen.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// There is no server to take over from.
    #[error("no server to take over from listens at {}; start without --takeover", path.display())]
    Nobody {
        /// The door.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Whoever listens at the door is somebody else's.
    #[error("the server at {} belongs to another user", path.display())]
    Stranger {
        /// The door.
        path: PathBuf,
    },
    /// The old server goes on.
    #[error("the running server refuses: {reason}")]
    Refused {
        /// Why, in its words.
        reason: String,
    },
    /// The conversation broke off.
    #[error("the running server broke off while it handed over")]
    BrokenOff(#[source] io::Error),
}

/// Where the door of a server is whose first socket is at `socket`.
fn door_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".takeover");
    path.into()
}

/// A request: the greeting and the absolute paths, with zero bytes between.
fn request(sockets: &[PathBuf]) -> io::Result<Vec<u8>> {
    let mut bytes = GREETING.to_vec();
    for path in sockets {
        bytes.push(0);
        bytes.extend(std::path::absolute(path)?.as_os_str().as_bytes());
    }
    Ok(bytes)
}

/// Takes the sockets at `sockets` over from the server that serves exactly these. Returns when it has closed its
/// images.
///
/// # Errors
///
/// [`TakeoverError`]. Unless it broke off, the old server goes on as if nothing had been asked.
pub fn take_over(sockets: &[PathBuf]) -> Result<Vec<UnixListener>, TakeoverError> {
    let path = door_path(sockets.first().map_or(Path::new(""), PathBuf::as_path));
    let nobody = |source| TakeoverError::Nobody {
        path: path.clone(),
        source,
    };
    let mut door = UnixStream::connect(&path).map_err(nobody)?;
    if !is_same_user(&door) {
        return Err(TakeoverError::Stranger { path });
    }
    let broken = TakeoverError::BrokenOff;
    door.set_read_timeout(Some(DRAIN_MAX)).map_err(broken)?;
    let asked = request(sockets).map_err(broken)?;
    door.write_all(&asked).map_err(broken)?;
    door.shutdown(Shutdown::Write).map_err(broken)?;

    let mut verdict = [0];
    door.read_exact(&mut verdict).map_err(broken)?;
    if verdict != *b"o" {
        let mut reason = String::new();
        door.take(REQUEST_BYTES_MAX)
            .read_to_string(&mut reason)
            .map_err(broken)?;
        return Err(TakeoverError::Refused { reason });
    }
    sockets
        .iter()
        .map(|_| match door.recv_with_fd(&mut [0]) {
            Ok((1, Some(file))) => Ok(UnixListener::from(std::os::fd::OwnedFd::from(file))),
            Ok(_) => Err(broken(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(broken(error.into())),
        })
        .collect()
}

/// A server's door. Dropping it removes the socket.
#[derive(Debug)]
pub struct Door {
    socket: Socket,
    request: Vec<u8>,
}

/// A new server that waits for the sockets.
#[derive(Debug)]
pub struct Successor {
    connection: UnixStream,
}

impl Door {
    /// Opens the door of a server of `sockets`.
    ///
    /// # Errors
    ///
    /// [`SocketError`], if its socket cannot be made.
    pub fn open(sockets: &[PathBuf]) -> Result<Self, SocketError> {
        let path = door_path(sockets.first().map_or(Path::new(""), PathBuf::as_path));
        let request = request(sockets).map_err(|source| SocketError::Os {
            action: "name",
            path: path.clone(),
            source,
        })?;
        Ok(Self {
            socket: Socket::listen(&path)?,
            request,
        })
    }

    /// What waits at the door, for a thread of its own.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub fn keeper(&self) -> io::Result<Keeper> {
        Ok(Keeper {
            listener: self.socket.listener().try_clone()?,
            request: self.request.clone(),
        })
    }
}

/// Waits at a door.
#[derive(Debug)]
pub struct Keeper {
    listener: UnixListener,
    request: Vec<u8>,
}

impl Keeper {
    /// Waits for a new server that wants exactly our sockets. Others are told why not.
    ///
    /// # Errors
    ///
    /// If the door cannot be waited at.
    pub fn wait(&self) -> io::Result<Successor> {
        loop {
            let (connection, _) = self.listener.accept()?;
            match self.hear(&connection) {
                Ok(None) => return Ok(Successor { connection }),
                Ok(Some(reason)) => {
                    tracing::warn!(reason, "a takeover was refused");
                    // Whoever does not listen to the reason goes without.
                    (&connection)
                        .write_all(format!("n{reason}").as_bytes())
                        .unwrap_or_default();
                }
                Err(error) => tracing::warn!(%error, "a takeover was not understood"),
            }
        }
    }

    /// Why a visitor cannot have our sockets; `None` if it can.
    fn hear(&self, connection: &UnixStream) -> io::Result<Option<String>> {
        if !is_same_user(connection) {
            return Ok(Some("it is another user's".to_owned()));
        }
        connection.set_read_timeout(Some(PATIENCE))?;
        let mut asked = Vec::new();
        connection.take(REQUEST_BYTES_MAX).read_to_end(&mut asked)?;
        if asked == self.request {
            return Ok(None);
        }
        let list = |bytes: &[u8]| {
            let paths = bytes.split(|byte| *byte == 0).skip(1).map(OsStr::from_bytes);
            let paths: Vec<OsString> = paths.map(OsStr::to_owned).collect();
            format!("{paths:?}")
        };
        Ok(Some(if asked.starts_with(GREETING) {
            format!(
                "it serves {}, and {} was asked for",
                list(&self.request),
                list(&asked)
            )
        } else {
            "it does not understand what was asked".to_owned()
        }))
    }
}

impl Successor {
    /// Hands the sockets over, whose images are closed.
    ///
    /// # Errors
    ///
    /// If the new server has gone.
    pub fn hand_over(self, listeners: &[UnixListener]) -> io::Result<()> {
        (&self.connection).write_all(b"o")?;
        for listener in listeners {
            self.connection
                .send_with_fd(&b"l"[..], listener.as_raw_fd())
                .map_err(io::Error::from)?;
        }
        Ok(())
    }

    /// Tells the new server that it gets nothing.
    pub fn refuse(self, reason: &str) {
        // One that has gone need not be told.
        (&self.connection)
            .write_all(format!("n{reason}").as_bytes())
            .unwrap_or_default();
    }
}
