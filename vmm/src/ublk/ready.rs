//! Telling a service manager that the devices are there: `sd_notify(3)`, without its library.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Says `READY=1` to the service manager, if there is one.
pub(super) fn tell() {
    if let Some(socket) = env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty())
        && let Err(error) = send(&socket)
    {
        tracing::warn!(%error, "cannot tell the service manager at NOTIFY_SOCKET");
    }
}

fn send(socket: &OsStr) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.send_to_addr(b"READY=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_with_a_path_or_an_abstract_name_hears_of_it() {
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
            send(&socket).expect("it listens");
            let mut bytes = [0; 32];
            let count = manager.recv(&mut bytes).expect("a message");
            assert_eq!(&bytes[..count], b"READY=1");
        }
        assert!(send(OsStr::new("/no/such/socket")).is_err());
    }
}
