//! Sockets that were listening before this process began: those of a service manager (`sd_listen_fds(3)`) and of `--fd`.
//!
//! Their files are the manager's: it goes on listening when this process has ended, so clients wait instead of being refused.

use std::env;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::net::{AddressFamily, SocketType, sockopt};

use super::{Owner, Socket, SocketError, claim};

/// The first descriptor that a service manager passes.
pub(super) const FIRST: RawFd = 3;
/// The most descriptors that are looked for.
const COUNT_MAX: RawFd = 1 << 16;

/// Returns the descriptors that the service manager passed to this process: `LISTEN_FDS` of them, if `LISTEN_PID` is this
/// process. Values that are no numbers mean none.
#[must_use]
pub fn descriptors() -> Vec<RawFd> {
    let value = |name| env::var(name).ok();
    passed(
        value("LISTEN_PID").as_deref(),
        value("LISTEN_FDS").as_deref(),
        std::process::id(),
    )
}

fn passed(pid: Option<&str>, count: Option<&str>, own_pid: u32) -> Vec<RawFd> {
    let for_us = pid.and_then(|pid| pid.parse().ok()) == Some(own_pid);
    let count: RawFd = count.and_then(|count| count.parse().ok()).unwrap_or(0);
    if !for_us || !(1..=COUNT_MAX).contains(&count) {
        return Vec::new();
    }
    (FIRST..FIRST + count).collect()
}

impl Socket {
    /// Listens on a socket that this process was started with. Its file stays when this value is dropped.
    ///
    /// # Errors
    ///
    /// [`SocketError::Inherited`], with the descriptor and what it is instead of a socket to serve on.
    pub fn inherit(descriptor: RawFd) -> Result<Self, SocketError> {
        let wrong = |problem| SocketError::Inherited { descriptor, problem };
        let listener = claim(descriptor).map_err(|_| wrong("is not open, or is in use here"))?;
        let is = |value: io::Result<bool>| value.unwrap_or(false);
        if !is(sockopt::socket_domain(&listener)
            .map(|it| it == AddressFamily::UNIX)
            .map_err(Into::into))
        {
            return Err(wrong("is no Unix socket"));
        }
        if !is(sockopt::socket_type(&listener)
            .map(|it| it == SocketType::STREAM)
            .map_err(Into::into))
        {
            return Err(wrong("is no stream socket"));
        }
        if !is(sockopt::socket_acceptconn(&listener).map_err(Into::into)) {
            return Err(wrong("does not listen"));
        }
        let listener = UnixListener::from(listener);
        // As those that are made here.
        listener
            .set_nonblocking(false)
            .map_err(|_| wrong("cannot be waited on"))?;
        let address = listener.local_addr().ok();
        let path = address
            .as_ref()
            .and_then(|address| address.as_pathname())
            .map(Path::to_owned);
        let path = path.ok_or_else(|| wrong("has no path"))?;
        Ok(Self::new(listener, &path, Owner::Manager))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use rustix::io::{FdFlags, fcntl_setfd};

    use super::*;

    /// Leaks a descriptor without the flag, as a process that starts this one would.
    fn passed_on(socket: impl Into<OwnedFd>) -> RawFd {
        let socket: OwnedFd = socket.into();
        fcntl_setfd(&socket, FdFlags::empty()).expect("fcntl");
        std::os::fd::IntoRawFd::into_raw_fd(socket)
    }

    #[test]
    fn descriptors_are_those_for_this_process_only() {
        assert_eq!(passed(Some("7"), Some("2"), 7), [3, 4]);
        for (pid, count) in [
            (Some("8"), Some("2")),
            (None, Some("2")),
            (Some("7"), None),
            (Some("7"), Some("0")),
            (Some("7"), Some("-1")),
            (Some("7"), Some("many")),
            (Some("seven"), Some("2")),
            (Some("7"), Some("4000000000")),
        ] {
            assert_eq!(passed(pid, count, 7), Vec::<RawFd>::new(), "{pid:?} {count:?}");
        }
    }

    #[test]
    fn inherit_serves_on_the_socket_and_leaves_its_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let descriptor = passed_on(UnixListener::bind(&path).expect("bind"));
        let socket = Socket::inherit(descriptor).expect("inherit");
        assert_eq!(socket.path(), path);
        assert!(socket.is_managers());
        let _client = UnixStream::connect(&path).expect("connect");
        socket.listener().accept().expect("accept");
        socket.keep().expect("it is there");
        drop(socket);
        assert!(path.exists(), "it is the manager's");
        let twice = Socket::inherit(descriptor).expect_err("it is taken").to_string();
        assert!(
            twice.starts_with(&format!("descriptor {descriptor} is not open, or is in use")),
            "{twice}"
        );
    }

    #[test]
    fn inherit_refuses_what_cannot_be_served_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let (here, _there) = UnixStream::pair().expect("a pair");
        let unnamed = UnixListener::bind_addr(
            &<std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(
                folder.path().as_os_str().as_encoded_bytes(),
            )
            .expect("a name"),
        );
        for (descriptor, problem) in [
            (
                passed_on(TcpListener::bind("127.0.0.1:0").expect("bind")),
                "is no Unix socket",
            ),
            (
                passed_on(UnixDatagram::unbound().expect("a socket")),
                "is no stream socket",
            ),
            (passed_on(here), "does not listen"),
            (passed_on(unnamed.expect("bind")), "has no path"),
            (
                passed_on(std::fs::File::open("/dev/null").expect("open")),
                "is no Unix socket",
            ),
            (-1, "is not open, or is in use here"),
            (0, "is not open, or is in use here"),
            (1 << 20, "is not open, or is in use here"),
        ] {
            let error = Socket::inherit(descriptor).expect_err(problem).to_string();
            let wanted = format!(
                "descriptor {descriptor} {problem}; expected a listening Unix stream socket with a path"
            );
            assert_eq!(error, wanted);
        }
    }
}
