//! The Unix socket of a vhost-user server: created private, and never taken from a live server.
//!
//! A process that can connect to the socket can read and write the disk, so the socket has mode 0600 from its creation on. A
//! socket file that a dead server left behind is replaced; one with a listening server, or a file that is not a socket, is
//! refused and left unchanged.
#![expect(
    unsafe_code,
    reason = "binding with a mode, and connecting without waiting, need raw socket calls"
)]

use std::fs::{self, File, Permissions};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Connections that may wait to be accepted. One is served at a time.
const BACKLOG: libc::c_int = 16;
/// The longest wait for the folder's lock, which is held for the moment of creating a socket.
const FOLDER_LOCK_MAX: Duration = Duration::from_secs(2);

/// An error of creating a listening socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A live server listens there.
    #[error(
        "socket {} is in use by {}; stop it or choose another path",
        path.display(),
        holder.as_deref().unwrap_or("another process")
    )]
    InUse {
        /// The socket.
        path: PathBuf,
        /// The server, by name and process id, if it can be known.
        holder: Option<String>,
    },
    /// Something that is no socket has the name.
    #[error("{} exists and is not a socket; choose another path", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The path does not fit into a socket address.
    #[error("socket path {} is longer than {max} bytes; choose a shorter one", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// The most that fits.
        max: usize,
    },
    /// A system call failed.
    #[error("cannot {action} socket {}", path.display())]
    Os {
        /// The attempted action.
        action: &'static str,
        /// The socket.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

/// Refuses a path that no socket can have.
///
/// # Errors
///
/// [`SocketError`], naming the path.
pub fn check_path(path: &Path) -> Result<(), SocketError> {
    Address::new(path).map(drop)
}

/// A listening socket; dropping it removes the file, if it is still ours.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file as it was made, unless it is another process's now.
    identity: Option<(u64, u64)>,
}

impl Socket {
    /// Listens at `path` with mode 0600, replacing the leftover of a server that is gone.
    ///
    /// # Errors
    ///
    /// [`SocketError`], naming the path and, if a server lives there, the server.
    pub fn listen(path: &Path) -> Result<Self, SocketError> {
        let os = |action| {
            move |source| SocketError::Os {
                action,
                path: path.to_owned(),
                source,
            }
        };
        let address = Address::new(path)?;
        // Whoever starts at the same time must not take a new socket for one that was left behind.
        let _folder = lock_folder(path);
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(SocketError::NotASocket {
                    path: path.to_owned(),
                });
            }
            Ok(_) => remove_stale(path, &address)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(os("inspect")(error)),
        }

        // The file gets the mode that the unbound socket has.
        let unbound = File::from(stream_socket(0).map_err(os("create"))?);
        unbound
            .set_permissions(Permissions::from_mode(0o600))
            .map_err(os("restrict"))?;
        address.bind(&unbound).map_err(os("bind"))?;
        let made = fs::symlink_metadata(path).map_err(os("inspect"))?;
        let listener = UnixListener::from(OwnedFd::from(unbound));
        let socket = Self {
            listener,
            path: path.to_owned(),
            identity: Some((made.dev(), made.ino())),
        };
        // SAFETY: `listen` takes a descriptor and a number and touches no memory of ours.
        if unsafe { libc::listen(socket.listener.as_raw_fd(), BACKLOG) } == -1 {
            return Err(os("listen on")(io::Error::last_os_error()));
        }
        Ok(socket)
    }

    /// Continues to listen on a socket that another process made at `path` and handed over. Its file stays that one's
    /// until [`Socket::keep`].
    ///
    /// # Errors
    ///
    /// [`SocketError`] if there is nothing at `path` any more.
    pub fn adopt(listener: UnixListener, path: &Path) -> Result<Self, SocketError> {
        let socket = Self {
            listener,
            path: path.to_owned(),
            identity: None,
        };
        socket.found()?;
        Ok(socket)
    }

    /// The file is this process's from now on.
    ///
    /// # Errors
    ///
    /// [`SocketError`] if there is nothing at its path any more.
    pub fn keep(&mut self) -> Result<(), SocketError> {
        self.identity = Some(self.found()?);
        Ok(())
    }

    fn found(&self) -> Result<(u64, u64), SocketError> {
        let made = fs::symlink_metadata(&self.path).map_err(|source| SocketError::Os {
            action: "inspect",
            path: self.path.clone(),
            source,
        })?;
        Ok((made.dev(), made.ino()))
    }

    /// Gives the socket up to the server that it was handed over to: its file stays.
    pub fn give_up(mut self) {
        self.identity = None;
    }

    /// The listening socket itself.
    #[must_use]
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let still_ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| Some((found.dev(), found.ino())) == self.identity);
        if still_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

/// Locks the folder of `path` until the file is dropped. Returns `None` if that is not possible: the folder may be of
/// a kind that cannot be locked, unreadable, or locked for longer by another process. Then only the protection is
/// missing.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or(Path::new("."))).ok()?;
    let deadline = Instant::now() + FOLDER_LOCK_MAX;
    loop {
        // SAFETY: `flock` takes a descriptor and a number and touches no memory of ours.
        if unsafe { libc::flock(folder.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
            return Some(folder);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::WouldBlock || Instant::now() >= deadline {
            tracing::debug!(path = %path.display(), %error, "the socket's folder cannot be locked");
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Removes a socket file without a listener. Fails if there is one.
fn remove_stale(path: &Path, address: &Address) -> Result<(), SocketError> {
    let os = |action| {
        move |source| SocketError::Os {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let probe = stream_socket(libc::SOCK_NONBLOCK).map_err(os("create"))?;
    match address.connect(&probe) {
        Ok(()) => Err(SocketError::InUse {
            path: path.to_owned(),
            holder: peer(&probe),
        }),
        Err(error) => match error.raw_os_error() {
            Some(libc::ECONNREFUSED) => {
                tracing::info!(path = %path.display(), "replacing a socket whose server is gone");
                fs::remove_file(path).map_err(os("replace"))
            }
            Some(libc::ENOENT) => Ok(()),
            // The server's queue of connections is full: it is alive.
            Some(libc::EAGAIN) => Err(SocketError::InUse {
                path: path.to_owned(),
                holder: None,
            }),
            _ => Err(os("connect to")(error)),
        },
    }
}

/// A new Unix stream socket.
fn stream_socket(flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: `socket` takes numbers and touches no memory of ours.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags, 0) };
    if fd == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made, is open, and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns true if the process at the other end of a connection runs as the same user as this one.
#[must_use]
pub fn is_same_user(connection: &impl AsRawFd) -> bool {
    // SAFETY: takes nothing and cannot fail.
    let ours = unsafe { libc::geteuid() };
    credentials(connection).is_some_and(|peer| peer.uid == ours)
}

/// The process at the other end of a connection, by name and number.
fn peer(connection: &OwnedFd) -> Option<String> {
    let pid = credentials(connection)?.pid;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_else(|_| "a process".to_owned());
    Some(format!("{} (process {pid})", name.trim_end()))
}

/// Returns the credentials of the process at the other end of a connection.
fn credentials(connection: &impl AsRawFd) -> Option<libc::ucred> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = libc::socklen_t::try_from(mem::size_of::<libc::ucred>()).ok()?;
    // SAFETY: the kernel writes at most `len` bytes through the first pointer and one number through
    // the second. Both are live, exclusive locals; `len` is the size of the first.
    let result = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    (result == 0 && credentials.pid > 0).then_some(credentials)
}

/// A socket address made from a path, and how much of it counts.
struct Address {
    raw: libc::sockaddr_un,
    len: libc::socklen_t,
}

impl Address {
    fn new(path: &Path) -> Result<Self, SocketError> {
        let mut raw = libc::sockaddr_un {
            sun_family: libc::AF_UNIX as libc::sa_family_t,
            sun_path: [0; 108],
        };
        let bytes = path.as_os_str().as_bytes();
        // The name ends with a zero byte, so one byte stays free; an empty or abstract name is no file.
        let max = raw.sun_path.len() - 1;
        if bytes.len() > max {
            return Err(SocketError::TooLong {
                path: path.to_owned(),
                max,
            });
        }
        if bytes.is_empty() || bytes.contains(&0) {
            let source = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(SocketError::Os {
                action: "bind",
                path: path.to_owned(),
                source,
            });
        }
        for (to, from) in raw.sun_path.iter_mut().zip(bytes) {
            *to = libc::c_char::from_ne_bytes([*from]);
        }
        let used = mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
        let len = libc::socklen_t::try_from(used).map_err(|_| SocketError::TooLong {
            path: path.to_owned(),
            max,
        })?;
        Ok(Self { raw, len })
    }

    fn bind(&self, socket: &impl AsRawFd) -> io::Result<()> {
        // SAFETY: the kernel reads `len` bytes of the address, which is a live value at least that
        // long (`new` bounds the path by the field's length).
        let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const self.raw).cast(), self.len) };
        if result == -1 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    fn connect(&self, socket: &impl AsRawFd) -> io::Result<()> {
        // SAFETY: as in `bind`.
        let result = unsafe { libc::connect(socket.as_raw_fd(), (&raw const self.raw).cast(), self.len) };
        if result == -1 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().expect("a temporary directory")
    }

    #[test]
    fn listen_makes_a_private_socket_removed_on_drop() {
        let directory = directory();
        let path = directory.path().join("s");
        let socket = Socket::listen(&path).expect("listen");
        assert_eq!(
            fs::metadata(&path).expect("stat").permissions().mode() & 0o777,
            0o600
        );
        let _client = UnixStream::connect(&path).expect("connect");
        socket.listener().accept().expect("accept");
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn listen_names_a_live_server_and_leaves_it_alone() {
        let directory = directory();
        let path = directory.path().join("s");
        let _server = UnixListener::bind(&path).expect("bind");
        let refused = Socket::listen(&path).expect_err("in use").to_string();
        assert!(
            refused.contains(&format!("{} is in use by ", path.display())),
            "{refused}"
        );
        assert!(
            refused.contains(&format!("(process {})", std::process::id())),
            "{refused}"
        );
        UnixStream::connect(&path).expect("the live server still answers");
    }

    #[test]
    fn listen_refuses_a_server_with_a_full_backlog_at_once() {
        let directory = directory();
        let path = directory.path().join("s");
        let _server = Socket::listen(&path).expect("listen");
        let address = Address::new(&path).expect("an address");
        let mut clients = Vec::new();
        loop {
            let client = stream_socket(libc::SOCK_NONBLOCK).expect("socket");
            if address.connect(&client).is_err() {
                break;
            }
            clients.push(client);
            assert!(clients.len() < 10_000, "the backlog never fills");
        }
        let refused = Socket::listen(&path).expect_err("in use");
        assert!(matches!(refused, SocketError::InUse { .. }), "{refused}");
    }

    #[test]
    fn listen_replaces_a_stale_socket() {
        let directory = directory();
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).expect("bind"));
        assert!(path.exists(), "the standard library leaves the file");
        let socket = Socket::listen(&path).expect("replace");
        UnixStream::connect(socket.path()).expect("connect");
    }

    /// Each start probes the stale socket, removes it and makes its own. Without a lock it may remove a new one.
    #[test]
    fn listen_succeeds_once_among_concurrent_starts() {
        for round in 0..200 {
            let directory = directory();
            let path = directory.path().join("s");
            drop(UnixListener::bind(&path).expect("bind"));
            let barrier = std::sync::Barrier::new(4);
            let made: Vec<Socket> = std::thread::scope(|scope| {
                let starts: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            barrier.wait();
                            Socket::listen(&path)
                        })
                    })
                    .collect();
                let ended = starts.into_iter().map(|start| start.join().expect("no panic"));
                ended.filter_map(Result::ok).collect()
            });
            assert_eq!(made.len(), 1, "round {round}");
            let client = UnixStream::connect(&path).expect("connect");
            made[0].listener().accept().expect("it is at its path");
            drop(client);
        }
    }

    /// Another start may be replacing the stale socket while it holds the folder's lock.
    #[test]
    fn listen_waits_for_the_folder_lock_but_not_forever() {
        let directory = directory();
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).expect("bind"));
        let inode = || fs::symlink_metadata(&path).expect("stat").ino();
        let leftover = inode();
        let other = lock_folder(&path).expect("a lock");
        std::thread::scope(|scope| {
            let start = scope.spawn(|| Socket::listen(&path));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!start.is_finished());
            assert_eq!(inode(), leftover);
            drop(other);
            start.join().expect("no panic").expect("replace");
        });
        // Whoever keeps the lock for longer holds nobody up for good.
        drop(UnixListener::bind(&path).expect("bind"));
        let _other = lock_folder(&path).expect("a lock");
        Socket::listen(&path).expect("replace");
    }

    #[test]
    fn listen_refuses_and_keeps_a_file_that_is_no_socket() {
        let directory = directory();
        let path = directory.path().join("s");
        fs::write(&path, "precious").expect("write");
        let refused = Socket::listen(&path).expect_err("not a socket").to_string();
        assert!(refused.contains("exists and is not a socket"), "{refused}");
        assert_eq!(fs::read(&path).expect("read"), b"precious");
    }

    #[test]
    fn drop_keeps_a_successors_socket() {
        let directory = directory();
        let path = directory.path().join("s");
        let old = Socket::listen(&path).expect("listen");
        fs::remove_file(&path).expect("remove");
        let _new = Socket::listen(&path).expect("listen again");
        drop(old);
        assert!(path.exists());
    }

    #[test]
    fn listen_names_a_path_it_cannot_bind() {
        let long = Path::new("/tmp").join("x".repeat(200));
        let refused = Socket::listen(&long).expect_err("too long").to_string();
        assert!(refused.contains("longer than 107 bytes"), "{refused}");
        let refused = Socket::listen(Path::new("/nonexistent/s"))
            .expect_err("no directory")
            .to_string();
        assert_eq!(refused, "cannot bind socket /nonexistent/s");
        Socket::listen(Path::new("")).expect_err("empty");
    }
}
