//! The Unix socket of a vhost-user server: created private, and never taken from a live server.
//!
//! A process that can connect to the socket can read and write the disk, so the socket has mode 0600 from its creation on;
//! [`Access`] lets others in before the first can connect. A socket file that a dead server left behind is replaced; one with a
//! listening server, or a file that is not a socket, is refused and left unchanged. A service manager may have created the
//! socket instead ([`inherited`]): its file is never removed here.
#![expect(
    unsafe_code,
    reason = "binding with a mode, and connecting without waiting, need raw socket calls; an inherited descriptor has no owner yet"
)]

mod access;
pub mod inherited;

use std::fs::{self, File, Permissions};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use access::{Access, AccessError};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

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
    /// An inherited descriptor cannot be served on.
    #[error("descriptor {descriptor} {problem}; expected a listening Unix stream socket with a path")]
    Inherited {
        /// The descriptor.
        descriptor: RawFd,
        /// The reason, as the end of a sentence about the descriptor.
        problem: &'static str,
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

/// Returns the folder in which a socket's file is.
#[must_use]
pub fn folder_of(socket: &Path) -> PathBuf {
    let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new(".")).to_owned()
}

/// Returns true if `file`, of [`Socket::file`], is at `path`.
#[must_use]
pub fn is_file_of(file: &OwnedFd, path: &Path) -> bool {
    let (Ok(file), Ok(found)) = (rustix::fs::fstat(file), fs::symlink_metadata(path)) else {
        return false;
    };
    (file.st_dev, file.st_ino) == (found.dev(), found.ino())
}

/// A listening socket; dropping it removes the file, if it is still ours.
#[derive(Debug)]
pub struct Socket {
    listener: Arc<UnixListener>,
    path: PathBuf,
    /// The same, from the root. The working directory cannot be asked for in the sandbox.
    absolute: PathBuf,
    owner: Mutex<Owner>,
}

/// The process that removes the file of a socket.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Owner {
    /// This one, if the file still has this device and inode.
    This(u64, u64),
    /// The old server or the new one, in a takeover.
    Other,
    /// The service manager, which goes on listening.
    Manager,
}

impl Socket {
    fn new(listener: UnixListener, path: &Path, owner: Owner) -> Self {
        Self {
            listener: Arc::new(listener),
            path: path.to_owned(),
            absolute: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            owner: Mutex::new(owner),
        }
    }

    /// Listens at `path` with mode 0600, replacing the leftover of a server that is gone.
    ///
    /// # Errors
    ///
    /// [`SocketError`], naming the path and, if a server lives there, the server.
    pub fn listen(path: &Path) -> Result<Self, SocketError> {
        Self::listen_for(path, Access::default())
    }

    /// As [`Socket::listen`], for those whom `access` lets connect.
    ///
    /// # Errors
    ///
    /// As [`Socket::listen`]; also if the file cannot be given to the group.
    pub fn listen_for(path: &Path, access: Access) -> Result<Self, SocketError> {
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
        let socket = Self::new(listener, path, Owner::This(made.dev(), made.ino()));
        access.apply(path).map_err(os("restrict"))?;
        // SAFETY: `listen` takes a descriptor and a number and touches no memory of ours.
        if unsafe { libc::listen(socket.listener.as_raw_fd(), BACKLOG) } == -1 {
            return Err(os("listen on")(io::Error::last_os_error()));
        }
        Ok(socket)
    }

    /// Continues to listen on a socket that another process made at `path` and handed over. Its file stays that one's
    /// until [`Socket::keep`], and a service manager's for good.
    ///
    /// # Errors
    ///
    /// [`SocketError`] if there is nothing at `path` any more.
    pub fn adopt(listener: UnixListener, path: &Path, is_managers: bool) -> Result<Self, SocketError> {
        let owner = if is_managers { Owner::Manager } else { Owner::Other };
        let socket = Self::new(listener, path, owner);
        socket.found()?;
        Ok(socket)
    }

    /// The file is this process's from now on, unless it is a service manager's.
    ///
    /// # Errors
    ///
    /// [`SocketError`] if there is nothing at its path any more.
    pub fn keep(&self) -> Result<(), SocketError> {
        let (device, inode) = self.found()?;
        let mut owner = self.owner.lock();
        if *owner != Owner::Manager {
            *owner = Owner::This(device, inode);
        }
        Ok(())
    }

    /// Returns true if a service manager created the socket.
    #[must_use]
    pub fn is_managers(&self) -> bool {
        *self.owner.lock() == Owner::Manager
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
    pub fn give_up(&self) {
        *self.owner.lock() = Owner::Other;
    }

    /// Removes the file, if it is this process's. Nobody finds the socket any more.
    pub fn remove(&self) {
        let owner = std::mem::replace(&mut *self.owner.lock(), Owner::Other);
        let still_ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| Owner::This(found.dev(), found.ino()) == owner);
        if still_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }

    /// Opens the file of the socket by its name alone (`O_PATH`): for [`is_file_of`].
    ///
    /// # Errors
    ///
    /// [`SocketError`] if there is nothing at its path any more.
    pub fn file(&self) -> Result<OwnedFd, SocketError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&self.path, flags, Mode::empty());
        opened.map_err(|error| SocketError::Os {
            action: "inspect",
            path: self.path.clone(),
            source: error.into(),
        })
    }

    /// The listening socket itself.
    #[must_use]
    pub fn listener(&self) -> &Arc<UnixListener> {
        &self.listener
    }

    /// Returns its path, as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns its path from the root.
    #[must_use]
    pub fn absolute(&self) -> &Path {
        &self.absolute
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Locks the folder of `path` until the file is dropped. Returns `None` if that is not possible: the folder may be of
/// a kind that cannot be locked, unreadable, or locked for longer by another process. Then only the protection is
/// missing.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = File::open(folder_of(path)).ok()?;
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

/// Takes ownership of a descriptor that nobody in this process has: one without the close-on-exec flag, which everything that
/// is opened here has.
pub(crate) fn claim(descriptor: RawFd) -> io::Result<OwnedFd> {
    if descriptor < inherited::FIRST {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: `descriptor` is not -1, and is only looked at: if it is not open, the call fails.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    if fcntl_getfd(borrowed)?.contains(FdFlags::CLOEXEC) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    // A copy of our own: whatever becomes of the first one, this one is ours alone.
    let owned = borrowed.try_clone_to_owned()?;
    // Children do not get it any more.
    fcntl_setfd(borrowed, FdFlags::CLOEXEC)?;
    Ok(owned)
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

/// Returns the process at the other end of a connection, if it can be known.
#[must_use]
pub fn peer_pid(connection: &impl AsRawFd) -> Option<u32> {
    u32::try_from(credentials(connection)?.pid).ok()
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
mod tests;
