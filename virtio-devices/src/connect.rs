//! Connecting to a Unix socket with a timeout.
//!
//! `connect` sleeps while the listener's backlog is full. The backlog of a listener that accepts nobody fills up soon: a
//! connection that was given up stays in it until it is accepted.

#![expect(unsafe_code, reason = "a socket before it is connected has no safe wrapper")]

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest wait in the kernel between two checks of the caller's cancellation.
const SLICE: Duration = Duration::from_millis(50);

/// A wish to cancel an operation that waits, readable from any thread.
#[derive(Clone)]
pub struct Cancel(Arc<dyn Fn() -> bool + Send + Sync>);

impl Cancel {
    /// Cancelled as soon as `is_cancelled` returns true.
    pub fn when(is_cancelled: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(is_cancelled))
    }

    /// Never cancelled.
    #[must_use]
    pub fn never() -> Self {
        Self::when(|| false)
    }

    /// Returns true once the operation is to be given up.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cancel").field(&self.is_cancelled()).finish()
    }
}

/// Connects to the Unix socket at `path`, for at most `timeout`.
///
/// # Errors
///
/// The error of the system call; `TimedOut` if the backlog stays full, `ConnectionAborted` if `cancel` is set first,
/// `InvalidInput` for a path that fits no socket address.
pub fn connect_within(path: &Path, timeout: Duration, cancel: &Cancel) -> io::Result<UnixStream> {
    let until = Instant::now().checked_add(timeout);
    let (address, len) = address_of(path)?;
    // SAFETY: numbers only.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and nobody else owns it.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    loop {
        let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
        // A timeout of zero would be none. The kernel's for writing is that for connecting, too.
        stream.set_write_timeout(Some(left.clamp(Duration::from_millis(1), SLICE)))?;
        // SAFETY: the address lives across the call, and `len` bytes of it are initialised.
        if unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), len) } == 0 {
            stream.set_write_timeout(None)?;
            return Ok(stream);
        }
        let error = io::Error::last_os_error();
        if !matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
        ) {
            return Err(error);
        }
        if cancel.is_cancelled() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

fn address_of(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: an all-zero address is a valid value of that plain C struct.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    let room = address.sun_path.len() - 1;
    if bytes.is_empty() || bytes.len() > room || bytes.contains(&0) {
        let why = format!("a socket's path has 1 to {room} bytes and no zero byte");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    for (place, byte) in address.sun_path.iter_mut().zip(bytes) {
        *place = byte.cast_signed();
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
    Ok((address, len as libc::socklen_t))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn connect_within_waits_for_room_until_deadline_or_cancel() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let missing = connect_within(&path, SLICE, &Cancel::never()).expect_err("nobody listens");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let listener = UnixListener::bind(&path).expect("a socket");
        let waiting = crate::testing::fill_backlog(&listener, &path);
        let begun = Instant::now();
        let late = connect_within(&path, Duration::from_millis(120), &Cancel::never()).expect_err("no room");
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= Duration::from_millis(120));

        let cancelled = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&cancelled);
        let cancel = Cancel::when(move || asked.load(Ordering::SeqCst));
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connect_within(&path, Duration::from_secs(3600), &cancel));
            std::thread::sleep(Duration::from_millis(20));
            cancelled.store(true, Ordering::SeqCst);
            let error = connecting
                .join()
                .expect("no panic")
                .expect_err("it was cancelled");
            assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        });

        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connect_within(&path, Duration::from_secs(60), &Cancel::never()));
            std::thread::sleep(Duration::from_millis(20));
            listener.accept().expect("a client");
            let stream = connecting.join().expect("no panic").expect("there is room");
            assert_eq!(stream.write_timeout().expect("a socket"), None);
        });
        drop(waiting);
    }

    #[test]
    fn connect_within_refuses_a_path_that_fits_no_address() {
        for path in [String::new(), "x".repeat(108), "a\0b".to_owned()] {
            let error = connect_within(Path::new(&path), SLICE, &Cancel::never()).expect_err("no address");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path:?}");
        }
    }
}
