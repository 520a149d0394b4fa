//! The address at which statistics are served: a Unix socket, or a TCP port of this machine.
//!
//! There is no authentication: who can connect may read. A Unix socket has mode 0600, and TCP is for the loopback interface only.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use super::MetricsError;
use super::http::Connection;
use crate::socket::{Socket, SocketError, check_path};

/// An address.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Address {
    /// A Unix socket to create.
    Unix(PathBuf),
    /// A port of the loopback interface.
    Tcp(SocketAddr),
}

/// Text that is no address.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// It has another form.
    #[error("`{text}` is no address; expected unix:PATH or 127.0.0.1:PORT")]
    Form {
        /// The text.
        text: String,
    },
    /// It is an address that other machines reach.
    #[error(
        "{address} is not an address of the loopback interface; expected 127.0.0.1:PORT, as anybody who connects may read"
    )]
    NotLocal {
        /// The address.
        address: IpAddr,
    },
    /// No socket can have this path.
    #[error(transparent)]
    Path(#[from] SocketError),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

impl std::str::FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            check_path(&path)?;
            return Ok(Self::Unix(path));
        }
        let address = text
            .parse()
            .ok()
            .filter(|address: &SocketAddr| address.port() != 0);
        let address = address.ok_or_else(|| AddressError::Form {
            text: text.to_owned(),
        })?;
        if !address.ip().is_loopback() {
            return Err(AddressError::NotLocal {
                address: address.ip(),
            });
        }
        Ok(Self::Tcp(address))
    }
}

/// A socket that listens. Dropping it removes the file of a Unix socket.
#[derive(Debug)]
pub(super) enum Listener {
    Unix(Socket),
    Tcp(TcpListener),
}

/// The end of a listening socket that takes clients.
pub(super) enum Acceptor {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Address {
    /// Returns the folder of a Unix socket, from which its file is removed in the end.
    #[must_use]
    pub fn folder(&self) -> Option<PathBuf> {
        let Self::Unix(path) = self else { return None };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        Some(folder.unwrap_or(Path::new(".")).to_owned())
    }

    /// Listens there.
    pub(super) fn listen(&self) -> Result<Listener, MetricsError> {
        let address = self.clone();
        match self {
            Self::Unix(path) => match Socket::listen(path) {
                Ok(socket) => Ok(Listener::Unix(socket)),
                Err(SocketError::InUse { .. }) => Err(MetricsError::InUse { address }),
                Err(source) => Err(MetricsError::Socket { address, source }),
            },
            Self::Tcp(at) => match TcpListener::bind(at) {
                Ok(listener) => Ok(Listener::Tcp(listener)),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    Err(MetricsError::InUse { address })
                }
                Err(source) => Err(MetricsError::Os { address, source }),
            },
        }
    }
}

impl Listener {
    pub(super) fn acceptor(&self) -> io::Result<Acceptor> {
        Ok(match self {
            Self::Unix(socket) => Acceptor::Unix(socket.listener().try_clone()?),
            Self::Tcp(listener) => Acceptor::Tcp(listener.try_clone()?),
        })
    }
}

impl Acceptor {
    /// Waits for a client.
    pub(super) fn accept(&self) -> io::Result<Connection> {
        Ok(match self {
            Self::Unix(listener) => Connection::Unix(listener.accept()?.0),
            Self::Tcp(listener) => Connection::Tcp(listener.accept()?.0),
        })
    }
}
