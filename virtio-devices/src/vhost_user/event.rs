//! Waiting for descriptors, and eventfds that go to or come from a peer.

#![expect(unsafe_code, reason = "poll(2) and fcntl(2) have no safe wrapper at hand")]

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::time::Duration;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

/// Waits until one of some descriptors can be read from, those that are not there left out, or until `timeout` has
/// passed; says which can. A hang-up counts as readable.
pub(super) fn wait_any<const N: usize>(
    watched: [Option<BorrowedFd<'_>>; N],
    timeout: Option<Duration>,
) -> io::Result<[bool; N]> {
    poll_all(
        watched.map(|fd| (fd.map_or(-1, |fd| fd.as_raw_fd()), Wait::Readable)),
        timeout.map_or(-1, ms_of),
    )
}

/// A timeout as poll(2) takes it: whole milliseconds, never less than was asked for.
fn ms_of(timeout: Duration) -> libc::c_int {
    libc::c_int::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(libc::c_int::MAX)
}

/// The process at the other end of a connection, as it was when it connected.
pub(super) fn peer_process(connection: BorrowedFd<'_>) -> Option<libc::pid_t> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).ok()?;
    // SAFETY: the kernel writes at most `len` bytes through the first pointer and one number through the second. Both
    // are live, exclusive locals; `len` is the size of the first.
    let result = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    (result == 0 && peer.pid > 0).then_some(peer.pid)
}

/// Waits until a descriptor can be read from, or for so long.
pub(super) fn wait_readable_for(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait_any([Some(fd)], Some(timeout)).map(|[readable]| readable)
}

/// The awaited state of a descriptor; a hang-up ends every wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    Readable,
    HangUp,
}

/// Waits until something happens to one of some descriptors, or for so many milliseconds if they are not negative; says
/// to which. Numbers below zero are passed over. Nothing, if a signal came first.
pub(crate) fn poll_all<const N: usize>(
    watched: [(RawFd, Wait); N],
    timeout_ms: libc::c_int,
) -> io::Result<[bool; N]> {
    let mut entries = watched.map(|(fd, wait)| libc::pollfd {
        fd,
        events: match wait {
            Wait::Readable => libc::POLLIN,
            Wait::HangUp => libc::POLLRDHUP,
        },
        revents: 0,
    });
    // SAFETY: the kernel reads and writes as many entries as there are, which are live and exclusive.
    let ready = unsafe { libc::poll(entries.as_mut_ptr(), N as libc::nfds_t, timeout_ms) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::Interrupted {
            return Ok([false; N]);
        }
        return Err(error);
    }
    Ok(entries.map(|entry| entry.revents != 0))
}

/// An eventfd in the form that messages take.
pub(crate) fn event_of(fd: BorrowedFd<'_>) -> io::Result<EventFd> {
    let fd = fd.try_clone_to_owned()?.into_raw_fd();
    // SAFETY: the duplicate was just made, and is given away here.
    Ok(unsafe { EventFd::from_raw_fd(fd) })
}

/// Returns a duplicate of a borrowed descriptor.
pub(crate) fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: numbers only; what `fd` is does not change.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if new < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `new` was just made and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// Replaces `fd` with a duplicate of `by` (`dup2`).
pub(super) fn replace(fd: RawFd, by: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: numbers only. Whoever owns `fd` goes on owning it, and is its only user.
    if unsafe { libc::dup3(by.as_raw_fd(), fd, libc::O_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Returns true if a write to `fd` would not block.
pub(super) fn is_writable(fd: BorrowedFd<'_>) -> bool {
    let mut entry = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: the kernel reads and writes one entry, which is live and exclusive.
    let ready = unsafe { libc::poll(&raw mut entry, 1, 0) };
    ready == 1 && entry.revents & libc::POLLOUT != 0
}

/// Returns true if a write to `fd` returns at once because its description says so.
fn is_nonblocking(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: F_GETFL takes no argument and touches no memory of ours.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

/// An eventfd of the client's to be signalled, which the client may exchange at any time. Signalling never
/// blocks, whatever the client did to it.
#[derive(Debug, Default)]
pub(super) struct ClientEvent {
    target: Mutex<Option<Target>>,
}

#[derive(Debug)]
struct Target {
    file: File,
    nonblocking: bool,
}

impl ClientEvent {
    /// From now on signals go to `file`, or nowhere.
    pub(super) fn set(&self, file: Option<File>) {
        let target = file.map(|file| Target {
            nonblocking: is_nonblocking(file.as_fd()),
            file,
        });
        let old = std::mem::replace(&mut *self.target.lock(), target);
        drop(old);
    }

    /// Returns the signalled descriptor, for another server.
    pub(super) fn file(&self) -> io::Result<Option<OwnedFd>> {
        let target = self.target.lock();
        target
            .as_ref()
            .map(|target| Ok(target.file.try_clone()?.into()))
            .transpose()
    }

    /// Adds one to the client's counter.
    pub(super) fn signal(&self) {
        let target = self.target.lock();
        let Some(Target { file, nonblocking }) = &*target else {
            return;
        };
        if !nonblocking && !is_writable(file.as_fd()) {
            return;
        }
        let mut file: &File = file;
        // A counter that is full says all there is to say; any other error is the client's loss.
        if let Err(error) = file.write(&1u64.to_ne_bytes())
            && error.kind() != io::ErrorKind::WouldBlock
        {
            tracing::debug!(%error, "a client's eventfd cannot be signalled");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn signal_neither_blocks_nor_fails_on_a_full_eventfd() {
        let eventfd = block::event::eventfd().expect("an eventfd");
        let mut client = File::from(eventfd.try_clone().expect("a duplicate"));
        client
            .write_all(&(u64::MAX - 1).to_ne_bytes())
            .expect("fill the counter");
        let event = ClientEvent::default();
        event.set(Some(eventfd.into()));
        event.signal();
        let mut count = [0; 8];
        client.read_exact(&mut count).expect("the counter");
        assert_eq!(u64::from_ne_bytes(count), u64::MAX - 1);
        event.signal();
        client.read_exact(&mut count).expect("the counter");
        assert_eq!(u64::from_ne_bytes(count), 1);
    }

    #[test]
    fn signal_uses_only_the_newest_eventfd() {
        let pair = || {
            let fd = block::event::eventfd().expect("an eventfd");
            (File::from(fd.try_clone().expect("a duplicate")), File::from(fd))
        };
        let ((old_ours, old), (new_ours, mut new)) = (pair(), pair());
        let event = ClientEvent::default();
        event.signal();
        event.set(Some(old_ours));
        event.set(Some(new_ours));
        event.signal();
        let mut count = [0; 8];
        new.read_exact(&mut count).expect("the counter");
        let empty = block::event::eventfd().expect("an eventfd");
        assert!(!wait_ready(old.as_fd(), empty.as_fd()));
    }

    fn wait_ready(fd: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
        // `other` is never ready; make it so, in order not to wait for ever.
        let mut file = File::from(other.try_clone_to_owned().expect("a duplicate"));
        file.write_all(&1u64.to_ne_bytes()).expect("signal");
        let [readable, _] = wait_any([Some(fd), Some(other)], None).expect("poll");
        readable
    }
}
