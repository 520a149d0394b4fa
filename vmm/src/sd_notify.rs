//! Notifications of a service manager: readiness, the main process, and a watchdog. `sd_notify(3)` without its library.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager that `NOTIFY_SOCKET` names, if there is one.
#[derive(Debug)]
pub(crate) struct Manager(Option<UnixDatagram>);

impl Manager {
    /// Connects to it. A server that is confined cannot do so any more.
    pub(crate) fn find() -> Self {
        let socket = env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty());
        Self(socket.and_then(|socket| connect(&socket).inspect_err(warn).ok()))
    }

    /// Says that the server is ready: `READY=1`.
    pub(crate) fn ready(&self) {
        self.notify("READY=1");
    }

    /// Says that the server follows another configuration, until [`Manager::ready`]: `RELOADING=1`, with the time that systemd wants.
    pub(crate) fn reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let microseconds = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.notify(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}"));
    }

    /// Says which process the service is: `MAINPID=`. The manager goes by how that one ends.
    pub(crate) fn main(&self, pid: u32) {
        self.notify(&format!("MAINPID={pid}"));
    }

    /// Says that the service works: `WATCHDOG=1`. The manager ends one that has not said so for too long.
    pub(crate) fn works(&self) {
        self.notify("WATCHDOG=1");
    }

    fn notify(&self, message: &str) {
        if let Some(manager) = &self.0
            && let Err(error) = manager.send(message.as_bytes())
        {
            warn(&error);
        }
    }
}

/// Returns the time within which the manager wants to hear that the service works, if it does: `WATCHDOG_USEC`, for this process.
pub(crate) fn watchdog() -> Option<Duration> {
    let number = |name| env::var(name).ok()?.parse::<u64>().ok();
    let is_ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    let time = number("WATCHDOG_USEC").filter(|&time| is_ours && time > 0)?;
    Some(Duration::from_micros(time))
}

fn warn(error: &io::Error) {
    tracing::warn!(%error, "cannot notify the service manager at NOTIFY_SOCKET");
}

fn connect(socket: &OsStr) -> io::Result<UnixDatagram> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.connect_addr(&address)?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_reaches_a_path_or_abstract_socket() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("notify");
        let name = format!("ringdisk-test-{}", std::process::id());
        let by_name = SocketAddr::from_abstract_name(&name).expect("a name");
        let managers = [
            (path.clone().into_os_string(), UnixDatagram::bind(&path)),
            (format!("@{name}").into(), UnixDatagram::bind_addr(&by_name)),
        ];
        for (socket, manager) in managers {
            let manager = manager.expect("a socket");
            let found = connect(&socket).expect("it listens");
            let teller = Manager(Some(found));
            teller.main(4711);
            teller.ready();
            teller.works();
            teller.reloading();
            let receive = || {
                let mut bytes = [0; 64];
                let count = manager.recv(&mut bytes).expect("a message");
                String::from_utf8_lossy(&bytes[..count]).into_owned()
            };
            for message in ["MAINPID=4711", "READY=1", "WATCHDOG=1"] {
                assert_eq!(receive(), message);
            }
            let reloading = receive();
            let time = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=");
            assert!(
                time.is_some_and(|time| time.parse::<u64>().is_ok()),
                "{reloading}"
            );
        }
        assert!(connect(OsStr::new("/no/such/socket")).is_err());
    }
}
