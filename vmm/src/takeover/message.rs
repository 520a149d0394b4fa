//! Messages of a takeover: bytes with descriptors.
//!
//! Invariant: a message that is too long is refused before memory is taken for it.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_devices::vhost_user::{ClientState, Message};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::socket::Socket;

/// The bytes that come with a listening socket whose file is the server's.
pub(super) const LISTENER: &[u8] = b"l";
/// The bytes that come with one that a service manager created.
pub(super) const MANAGERS_LISTENER: &[u8] = b"m";
/// The byte with which a new server says that disks may come.
pub(super) const READY: u8 = b'r';
/// The byte with which a new server takes what it was offered.
pub(super) const ACCEPTED: [u8; 1] = *b"c";
/// As [`ACCEPTED`], of a new server that goes on with the control socket.
pub(super) const ACCEPTED_WITH_CONTROL: [u8; 1] = *b"k";
/// The longest time that either may take to read what the other has sent.
pub(super) const SEND_MAX: Duration = Duration::from_secs(5);
/// The longest request or message that is listened to, in bytes.
const BYTES_MAX: u32 = 1 << 16;

/// Returns the path of the takeover socket of the server whose first socket is at `socket`.
pub(super) fn socket_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".takeover");
    path.into()
}

/// Sends bytes of a known length, with descriptors: the length, how many descriptors, each with a byte of its own, the
/// bytes.
pub(super) fn send(mut stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
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
pub(super) fn receive(mut stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
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

/// Sends the descriptors of locks: how many, and a message for each.
pub(super) fn send_locks(connection: &UnixStream, locks: &[OwnedFd]) -> io::Result<()> {
    let count = u32::try_from(locks.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    send(connection, &count.to_ne_bytes(), &[])?;
    locks
        .iter()
        .try_for_each(|lock| send(connection, b"k", &[lock.as_raw_fd()]))
}

/// Receives what [`send_locks`] sent.
pub(super) fn receive_locks(connection: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let (count, _) = receive(connection)?;
    let locks = (0..count_of(&count)?).map(|_| receive_one(connection));
    locks.collect()
}

/// Sends a client with its state, or that there is none.
pub(super) fn send_client(connection: &UnixStream, client: Option<&ClientState>) -> io::Result<()> {
    let Some(ClientState {
        connection: client,
        messages,
    }) = client
    else {
        return send(connection, b"", &[]);
    };
    let count = u32::try_from(messages.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    send(connection, &count.to_ne_bytes(), &[client.as_raw_fd()])?;
    messages.iter().try_for_each(|Message { bytes, fds }| {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        send(connection, bytes, &raw)
    })
}

/// Receives what [`send_client`] sent.
pub(super) fn receive_client(connection: &UnixStream) -> io::Result<Option<ClientState>> {
    let (count, mut fds) = receive(connection)?;
    let Some(client) = fds.pop() else {
        return Ok(None);
    };
    let messages = (0..count_of(&count)?).map(|_| {
        let (bytes, fds) = receive(connection)?;
        Ok(Message { bytes, fds })
    });
    Ok(Some(ClientState {
        connection: client.into(),
        messages: messages.collect::<io::Result<_>>()?,
    }))
}

fn count_of(bytes: &[u8]) -> io::Result<u32> {
    let bytes = bytes.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Sends the socket of a disk.
pub(super) fn send_listener(connection: &UnixStream, socket: &Socket) -> io::Result<()> {
    let kind = if socket.is_managers() {
        MANAGERS_LISTENER
    } else {
        LISTENER
    };
    send(connection, kind, &[socket.listener().as_raw_fd()])
}

/// Receives what [`send_listener`] sent, and whether a service manager created it.
pub(super) fn receive_listener(connection: &UnixStream) -> io::Result<(UnixListener, bool)> {
    let (kind, fds) = receive(connection)?;
    let [listener] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok((listener.into(), kind == MANAGERS_LISTENER))
}

/// Sends a control socket, or that there is none.
pub(super) fn send_control(connection: &UnixStream, control: Option<&ControlSocket>) -> io::Result<()> {
    match control {
        Some(ControlSocket { path, listener, file }) => {
            let path = path.as_os_str().as_bytes();
            send(connection, path, &[listener.as_raw_fd(), file.as_raw_fd()])
        }
        None => send(connection, b"", &[]),
    }
}

/// Receives what [`send_control`] sent.
pub(super) fn receive_control(connection: &UnixStream) -> io::Result<Option<ControlSocket>> {
    let (path, fds) = receive(connection)?;
    if fds.is_empty() {
        return Ok(None);
    }
    let [listener, file] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(Some(ControlSocket {
        path: OsString::from_vec(path).into(),
        listener: listener.into(),
        file,
    }))
}

/// A control socket that is handed over.
#[derive(Debug)]
pub struct ControlSocket {
    /// Its absolute path.
    pub path: PathBuf,
    /// The socket.
    pub listener: UnixListener,
    /// Its file, opened by name alone: it tells the new server whether this is the socket that it wants.
    pub file: OwnedFd,
}
