//! Replacing a running vhost-user server while its guests continue: `--takeover`.
//!
//! A running server has, beside its first socket, a *takeover socket* (in the code: door): the same name with `.takeover`
//! appended, mode 0600, for processes of the same user only. A new server connects to it and names the sockets that it
//! wants to serve. The old server drains its clients' queues, closes its images cleanly, and hands over the image locks, its
//! listening sockets, and its clients' connections with the state of each client. Clients notice only a pause; no request is
//! lost, because none is in flight.
//!
//! ```text
//! new ── greeting, paths ──▶ old: drains, flushes, closes
//! new ◀── 'o', the door, the token; the locks; for each disk its socket, its client and the client's state ── old
//! new: takes the token, opens the images under their locks, adopts the clients
//! new ── 'c': nothing can fail any more ──▶ old
//! new ◀── 'a' ── old: exits
//! new: serves
//! ```
//!
//! The locks are open file descriptions that both servers hold until one of them exits. They keep other programs out all the
//! time, but not one of the two servers. The *token* does that: an eventfd whose 1 only one of them can read. The new server
//! reads it before it opens an image. To get its images back, the old server reads it, or else waits for the end of
//! the connection, which the new one closes after its images.
//!
//! Invariants: the old server never serves after 'a', the new one never before. After any earlier failure the old server
//! reopens its images and continues with the same clients. An image is locked all the time, and open in at most one of the
//! two. A server of the previous version, old or new, gets no locks: then the old server releases them, and the one that
//! opens the image takes them.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use block::lock::LockSet;
use rustix::event::{EventfdFlags, eventfd};
use virtio_devices::connect::{Cancel, connect_within};
use virtio_devices::vhost_user::{ClientState, HandOverError, Message};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::error::CommandFailure;
use crate::socket::{Socket, SocketError, is_same_user};

/// The greeting of a new server.
const GREETING: &[u8] = b"ringdisk takeover 3";
/// The greeting of a new server of the version before, which takes no locks.
const GREETING_WITHOUT_LOCKS: &[u8] = b"ringdisk takeover 2";
/// The answer to a greeting of an unknown version.
const NOT_UNDERSTOOD: &str = "it does not understand what was asked";
/// The longest request or message that is listened to, in bytes.
const BYTES_MAX: u32 = 1 << 16;
/// The longest time that a new server may take to send its request.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest time that either may take to read what the other has sent.
const SEND_MAX: Duration = Duration::from_secs(5);
/// The longest time that the old server may take to drain and close. If it is asked and the new one has given up, it
/// continues.
const DRAIN_MAX: Duration = Duration::from_secs(60);
/// The longest time that the new server may take to open the images, before the old one wants them back.
const OPEN_MAX: Duration = Duration::from_secs(20);

/// An error of a takeover.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// There is no server to take over from.
    #[error("no server to take over from listens at {}; start without --takeover", path.display())]
    Nobody {
        /// The takeover socket.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The listening server belongs to another user.
    #[error("the server at {} belongs to another user", path.display())]
    Stranger {
        /// The takeover socket.
        path: PathBuf,
    },
    /// The old server refuses and continues.
    #[error("the running server refuses: {reason}")]
    Refused {
        /// The reason, as the server states it.
        reason: String,
    },
    /// The conversation broke off.
    #[error("the running server closed the connection during the takeover")]
    BrokenOff(#[source] io::Error),
    /// The old server, or its disks, hang.
    #[error("the running server did not answer within {} s; it continues to serve its clients", waited.as_secs())]
    Silent {
        /// The time that was waited.
        waited: Duration,
    },
    /// The old server has given this one up.
    #[error("the running server continues to serve: this one did not take over in time")]
    TooLate,
}

impl TakeoverError {
    /// Returns the error for an answer that did not arrive within this time.
    fn heard(error: io::Error, waited: Duration) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent { waited },
            _ => Self::BrokenOff(error),
        }
    }
}

/// Returns the path of the takeover socket of the server whose first socket is at `socket`.
fn door_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".takeover");
    path.into()
}

/// A request: the greeting and the absolute paths, with zero bytes between.
fn request(greeting: &[u8], sockets: &[PathBuf]) -> io::Result<Vec<u8>> {
    let mut bytes = greeting.to_vec();
    for path in sockets {
        bytes.push(0);
        bytes.extend(std::path::absolute(path)?.as_os_str().as_bytes());
    }
    Ok(bytes)
}

/// Sends bytes of a known length, with descriptors: the length, how many descriptors, each with a byte of its own, the
/// bytes.
fn send(mut stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let len = u32::try_from(bytes.len()).ok().filter(|len| *len <= BYTES_MAX);
    let count = u8::try_from(fds.len()).map_err(|_| invalid())?;
    stream.write_all(&len.ok_or_else(invalid)?.to_ne_bytes())?;
    stream.write_all(&[count])?;
    for fd in fds {
        stream.send_with_fd(&b"d"[..], *fd).map_err(io::Error::from)?;
    }
    stream.write_all(bytes)
}

/// Receives what [`send`] sent.
fn receive(mut stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let (mut len, mut count) = ([0; 4], [0]);
    stream.read_exact(&mut len)?;
    stream.read_exact(&mut count)?;
    let len = u32::from_ne_bytes(len);
    if len > BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let fds = (0..count[0]).map(|_| match stream.recv_with_fd(&mut [0]) {
        Ok((1, Some(file))) => Ok(OwnedFd::from(file)),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) => Err(error.into()),
    });
    let fds = fds.collect::<io::Result<_>>()?;
    let mut bytes = vec![0; len as usize];
    stream.read_exact(&mut bytes)?;
    Ok((bytes, fds))
}

/// Receives a message that has exactly one descriptor.
fn receive_one(stream: &UnixStream) -> io::Result<OwnedFd> {
    let (_, fds) = receive(stream)?;
    let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(fd)
}

/// The failure to take the client of disk `name` in, with what would be right where that is known.
#[must_use]
pub fn not_adopted(name: &str, error: HandOverError) -> CommandFailure {
    let HandOverError::Refused { code, reason } = &error else {
        return CommandFailure::about(name, error);
    };
    // "… bits 0x1000 were not offered": bit 12 is several queues among a device's features, and memory for what is in flight among
    // the protocol's.
    let bits = reason
        .split("bits 0x")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let bits = bits.and_then(|bits| u64::from_str_radix(bits, 16).ok());
    let has_bit_12 = bits.is_some_and(|bits| bits & 1 << 12 != 0);
    let told = match code {
        2 if has_bit_12 => "its client uses several queues; this server needs the old one's num_queues=",
        16 if has_bit_12 => "its client is served with --restartable; this server needs --restartable too",
        _ => return CommandFailure::about(name, error),
    };
    CommandFailure::Failed(format!("{name}: {told}").into())
}

/// Decides which of two servers may open the images: an eventfd that holds a 1, until one of them has read it.
#[derive(Debug)]
struct Token(OwnedFd);

impl Token {
    fn new() -> io::Result<Self> {
        Ok(Self(eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes it; returns false if it was taken.
    fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]) == Ok(8)
    }
}

/// The part of a handover that concerns one disk.
#[derive(Debug)]
pub struct Handed {
    /// The socket that clients connect to.
    pub listener: UnixListener,
    /// The client that is connected, if one is.
    pub client: Option<ClientState>,
}

/// The offer of an old server. Unless it is accepted, the old server continues.
#[derive(Debug)]
pub struct Offer {
    connection: UnixStream,
    /// The token to read before an image is opened; a server of the version before has none.
    token: Option<Token>,
    /// The images' locks, to open them with.
    pub lock_set: LockSet,
    /// The takeover socket, which stays open all the time.
    pub door: UnixListener,
    /// By disk, in the order that was asked for.
    pub disks: Vec<Handed>,
}

/// Asks the server that serves exactly the sockets at `sockets` for them. When this returns it has closed its
/// images.
///
/// # Errors
///
/// [`TakeoverError`]. The old server then continues as before.
pub fn take_over(sockets: &[PathBuf]) -> Result<Offer, TakeoverError> {
    match ask(sockets, GREETING) {
        Err(TakeoverError::Refused { reason }) if reason == NOT_UNDERSTOOD => {
            ask(sockets, GREETING_WITHOUT_LOCKS)
        }
        answer => answer,
    }
}

fn ask(sockets: &[PathBuf], greeting: &[u8]) -> Result<Offer, TakeoverError> {
    let path = door_path(sockets.first().map_or(Path::new(""), PathBuf::as_path));
    let nobody = |source| TakeoverError::Nobody {
        path: path.clone(),
        source,
    };
    let connected = connect_within(&path, SEND_MAX, &Cancel::never());
    let connection = connected.map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => TakeoverError::Silent { waited: SEND_MAX },
        _ => nobody(error),
    })?;
    if !is_same_user(&connection) {
        return Err(TakeoverError::Stranger { path });
    }
    let broken = TakeoverError::BrokenOff;
    connection.set_read_timeout(Some(DRAIN_MAX)).map_err(broken)?;
    connection.set_write_timeout(Some(SEND_MAX)).map_err(broken)?;
    let asked = request(greeting, sockets).map_err(broken)?;
    send(&connection, &asked, &[]).map_err(|error| TakeoverError::heard(error, SEND_MAX))?;

    let heard = |error| TakeoverError::heard(error, DRAIN_MAX);
    let (verdict, fds) = receive(&connection).map_err(heard)?;
    if verdict != b"o" {
        let reason = verdict.strip_prefix(b"n").unwrap_or(&verdict);
        let reason = String::from_utf8_lossy(reason).into_owned();
        return Err(TakeoverError::Refused { reason });
    }
    let mut fds = fds.into_iter();
    let door = fds.next().ok_or(io::ErrorKind::InvalidData.into());
    let door = door.map_err(broken)?;
    let token = fds.next().map(Token);
    let lock_set = match &token {
        Some(_) => LockSet::inherit(receive_locks(&connection).map_err(heard)?),
        None => LockSet::default(),
    };
    let disks = sockets.iter().map(|_| receive_disk(&connection));
    let disks = disks.collect::<io::Result<_>>().map_err(heard)?;
    Ok(Offer {
        connection,
        token,
        lock_set,
        door: door.into(),
        disks,
    })
}

/// Receives the descriptors of locks: how many, and a message for each.
fn receive_locks(connection: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let (count, _) = receive(connection)?;
    let count: [u8; 4] = count[..].try_into().map_err(|_| io::ErrorKind::InvalidData)?;
    let locks = (0..u32::from_ne_bytes(count)).map(|_| receive_one(connection));
    locks.collect()
}

fn receive_disk(connection: &UnixStream) -> io::Result<Handed> {
    let listener = UnixListener::from(receive_one(connection)?);
    let (count, mut fds) = receive(connection)?;
    let client = match fds.pop() {
        None => None,
        Some(client) => {
            let count: [u8; 4] = count[..].try_into().map_err(|_| io::ErrorKind::InvalidData)?;
            let messages = (0..u32::from_ne_bytes(count)).map(|_| {
                let (bytes, fds) = receive(connection)?;
                Ok(Message { bytes, fds })
            });
            Some(ClientState {
                connection: client.into(),
                messages: messages.collect::<io::Result<_>>()?,
            })
        }
    };
    Ok(Handed { listener, client })
}

impl Offer {
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

    /// Takes what was offered, for good: the old server ends. Call it when nothing can fail any more.
    ///
    /// # Errors
    ///
    /// If the old server does not receive that in time; it then continues, or has died.
    pub fn accept(&self) -> Result<(), TakeoverError> {
        let broken = TakeoverError::BrokenOff;
        (&self.connection).write_all(b"c").map_err(broken)?;
        let read = (&self.connection).read_exact(&mut [0]);
        read.map_err(|error| TakeoverError::heard(error, DRAIN_MAX))?;
        self.lock_set.keep();
        Ok(())
    }
}

/// A server's takeover socket. Its file is removed on drop.
#[derive(Debug)]
pub struct Door {
    socket: Socket,
    requests: Requests,
}

/// The requests that a takeover socket accepts.
#[derive(Clone, Debug)]
struct Requests {
    now: Vec<u8>,
    without_locks: Vec<u8>,
}

impl Door {
    /// Opens the takeover socket of a server of `sockets`.
    ///
    /// # Errors
    ///
    /// [`SocketError`], if its socket cannot be made.
    pub fn open(sockets: &[PathBuf]) -> Result<Self, SocketError> {
        Self::at(sockets, Socket::listen)
    }

    /// Opens like [`Door::open`], with a takeover socket that was handed over.
    ///
    /// # Errors
    ///
    /// [`SocketError`], if it is gone.
    pub fn adopt(listener: UnixListener, sockets: &[PathBuf]) -> Result<Self, SocketError> {
        Self::at(sockets, |path| Socket::adopt(listener, path))
    }

    fn at(
        sockets: &[PathBuf],
        make: impl FnOnce(&Path) -> Result<Socket, SocketError>,
    ) -> Result<Self, SocketError> {
        let path = door_path(sockets.first().map_or(Path::new(""), PathBuf::as_path));
        let request = |greeting| {
            request(greeting, sockets).map_err(|source| SocketError::Os {
                action: "name",
                path: path.clone(),
                source,
            })
        };
        let requests = Requests {
            now: request(GREETING)?,
            without_locks: request(GREETING_WITHOUT_LOCKS)?,
        };
        Ok(Self {
            socket: make(&path)?,
            requests,
        })
    }

    /// The socket, to be handed over.
    #[must_use]
    pub fn listener(&self) -> &UnixListener {
        self.socket.listener()
    }

    /// Takes ownership of the socket's file.
    ///
    /// # Errors
    ///
    /// [`SocketError`] if it is gone.
    pub fn keep(&mut self) -> Result<(), SocketError> {
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
    pub fn keeper(&self) -> io::Result<Keeper> {
        Ok(Keeper {
            listener: self.socket.listener().try_clone()?,
            requests: self.requests.clone(),
        })
    }
}

/// Waits on the takeover socket.
#[derive(Debug)]
pub struct Keeper {
    listener: UnixListener,
    requests: Requests,
}

/// The answer to a request on the takeover socket.
enum Heard {
    /// It can have the sockets, and the locks if it knows how to take them.
    Fine { passes_locks: bool },
    /// The reason for the refusal.
    Refused(String),
}

impl Keeper {
    /// Waits for a new server that requests exactly our sockets. Other requests are refused with a reason.
    ///
    /// # Errors
    ///
    /// If the takeover socket cannot be waited on.
    pub fn wait(&self) -> io::Result<Successor> {
        loop {
            let (connection, _) = self.listener.accept()?;
            let mut new = Successor {
                connection,
                token: None,
            };
            match self.hear(&new.connection) {
                Ok(Heard::Fine { passes_locks }) => {
                    if passes_locks {
                        new.token = Some(Token::new()?);
                    }
                    return Ok(new);
                }
                Ok(Heard::Refused(reason)) => {
                    tracing::warn!(reason, "a takeover was refused");
                    new.refuse(&reason);
                }
                Err(error) => tracing::warn!(%error, "cannot read a takeover request"),
            }
        }
    }

    /// Checks a request on the takeover socket.
    fn hear(&self, connection: &UnixStream) -> io::Result<Heard> {
        if !is_same_user(connection) {
            return Ok(Heard::Refused("it belongs to another user".to_owned()));
        }
        connection.set_read_timeout(Some(PATIENCE))?;
        connection.set_write_timeout(Some(SEND_MAX))?;
        let (asked, _) = receive(connection)?;
        let passes_locks = asked == self.requests.now;
        if passes_locks || asked == self.requests.without_locks {
            return Ok(Heard::Fine { passes_locks });
        }
        let list = |bytes: &[u8]| {
            let paths = bytes.split(|byte| *byte == 0).skip(1).map(OsStr::from_bytes);
            let paths: Vec<OsString> = paths.map(OsStr::to_owned).collect();
            format!("{paths:?}")
        };
        let is_known = [GREETING, GREETING_WITHOUT_LOCKS]
            .iter()
            .any(|greeting| asked.starts_with(greeting));
        Ok(Heard::Refused(if is_known {
            format!("it serves {}, not {}", list(&self.requests.now), list(&asked))
        } else {
            NOT_UNDERSTOOD.to_owned()
        }))
    }
}

/// A new server that waits for the sockets.
#[derive(Debug)]
pub struct Successor {
    connection: UnixStream,
    /// The token that only one server can read. `None`: the new server knows nothing of locks.
    token: Option<Token>,
}

impl Successor {
    /// Returns true if it takes the images' locks; else they are to be given back before anything is offered.
    #[must_use]
    pub fn takes_locks(&self) -> bool {
        self.token.is_some()
    }

    /// Offers the sockets of disks whose images are closed, their clients, and the images' locks if it takes them. Returns
    /// when the new server has taken them, for good.
    ///
    /// # Errors
    ///
    /// If the new server has exited, or takes too long. Nothing was handed over then, if [`Successor::take_back`]
    /// confirms it.
    pub fn hand_over<'a>(
        &self,
        door: &UnixListener,
        locks: &[OwnedFd],
        disks: impl Iterator<Item = (&'a UnixListener, Option<ClientState>)>,
    ) -> io::Result<()> {
        let connection = &self.connection;
        connection.set_read_timeout(Some(OPEN_MAX))?;
        match &self.token {
            None => send(connection, b"o", &[door.as_raw_fd()])?,
            Some(token) => {
                send(connection, b"o", &[door.as_raw_fd(), token.0.as_raw_fd()])?;
                let count = u32::try_from(locks.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
                send(connection, &count.to_ne_bytes(), &[])?;
                for lock in locks {
                    send(connection, b"k", &[lock.as_raw_fd()])?;
                }
            }
        }
        for (listener, client) in disks {
            send(connection, b"l", &[listener.as_raw_fd()])?;
            let Some(ClientState {
                connection: client,
                messages,
            }) = client
            else {
                send(connection, b"", &[])?;
                continue;
            };
            let count = u32::try_from(messages.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
            send(connection, &count.to_ne_bytes(), &[client.as_raw_fd()])?;
            for Message { bytes, fds } in &messages {
                let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
                send(connection, bytes, &raw)?;
            }
        }
        let mut stream = connection;
        stream.read_exact(&mut [0])?;
        stream.write_all(b"a")
    }

    /// Takes everything back after a hand-over that failed: waits `patience` for the new server to close what it has open.
    /// It opens nothing from now on.
    ///
    /// # Errors
    ///
    /// If it still has the images open then. They are not to be opened.
    pub fn take_back(self, patience: Duration) -> io::Result<()> {
        let Some(token) = &self.token else {
            // Their locks say whether it has them.
            return Ok(());
        };
        if token.take() {
            return Ok(());
        }
        // It waits for an answer, perhaps.
        self.connection.shutdown(Shutdown::Write).unwrap_or_default();
        let until = Instant::now() + patience;
        let mut stream = &self.connection;
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
        send(&self.connection, format!("n{reason}").as_bytes(), &[]).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests;
