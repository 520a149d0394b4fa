//! The kernel's table of unix sockets: who listens, and whose connections are still open. To ask a server by connecting would use up
//! its connection.

use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// The longest time for a server to close the connection of a client that is gone.
const CLOSE: Duration = Duration::from_secs(5);
/// The time between two looks.
const GLANCE: Duration = Duration::from_millis(5);

/// The flag of a socket that listens (`SO_ACCEPTCON`); one that is bound only is without it.
const ACCEPTCON: &str = "00010000";

/// Returns the flags of the sockets that are bound to `path`, as `/proc/net/unix` has them. A connection that a server has accepted is
/// among them until the server closes it.
fn flags_of_bound(path: &Path) -> io::Result<Vec<String>> {
    let absolute = std::path::absolute(path)?;
    let table = std::fs::read_to_string("/proc/net/unix")?;
    let (absolute, given) = (absolute.to_string_lossy(), path.to_string_lossy());
    let flags = table.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let flags = fields.nth(3)?;
        let bound = fields.nth(3)?;
        (bound == absolute || bound == given).then(|| flags.to_owned())
    });
    Ok(flags.collect())
}

/// Returns true if somebody listens at `path`.
///
/// # Errors
///
/// If the kernel's table of sockets cannot be read.
pub fn listens(path: &Path) -> io::Result<bool> {
    Ok(flags_of_bound(path)?.iter().any(|flags| flags == ACCEPTCON))
}

/// Returns true if there is a connection to `path` that the server has not closed, or not accepted.
///
/// # Errors
///
/// As [`listens`].
pub fn has_connection(path: &Path) -> io::Result<bool> {
    Ok(flags_of_bound(path)?.iter().any(|flags| flags != ACCEPTCON))
}

/// Waits until the server at `path` has closed its connections, at most for five seconds. `qemu-storage-daemon` crashes now and then if
/// it is told to end while it does that: its main thread shuts the connection down that its I/O thread takes apart.
///
/// # Errors
///
/// As [`listens`].
pub fn wait_until_closed(path: &Path) -> io::Result<()> {
    let since = Instant::now();
    while has_connection(path)? && since.elapsed() < CLOSE {
        thread::sleep(GLANCE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn connection_is_there_until_the_server_closes_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        assert!(!listens(&path).unwrap());
        let listener = UnixListener::bind(&path).unwrap();
        assert!(listens(&path).unwrap());
        assert!(!has_connection(&path).unwrap());

        let client = UnixStream::connect(&path).unwrap();
        assert!(has_connection(&path).unwrap(), "it waits to be accepted");
        let (accepted, _) = listener.accept().unwrap();
        drop(client);
        assert!(
            has_connection(&path).unwrap(),
            "the server does not know that it is gone"
        );
        drop(accepted);
        assert!(!has_connection(&path).unwrap());

        drop(listener);
        assert!(
            !listens(&path).unwrap(),
            "the file is still there, nobody listens"
        );
    }
}
