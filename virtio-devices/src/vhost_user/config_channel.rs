//! The channel on which a client learns that the device's configuration has changed: that the disk has grown.
//!
//! A client that accepts `VHOST_USER_PROTOCOL_F_BACKEND_REQ` passes a socket with `SET_BACKEND_REQ_FD`. The `vhost` crate keeps it in an
//! object that cannot say the one thing that a disk has to say, so this module looks at each message before the crate takes it, and
//! duplicates that socket.
//!
//! Invariant: nobody waits for the client. A client that does not read, or that is gone, is not told.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};
use vhost::vhost_user::message::{BackendReq, FrontendReq};

use super::handover::{HEADER_BYTES, header};

/// The channel of the client that is connected, if it has one. Clones are of the same.
#[derive(Clone, Debug, Default)]
pub struct ConfigChannel(Arc<Mutex<Option<OwnedFd>>>);

impl ConfigChannel {
    fn lock(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the client that the configuration has changed, so that it reads it and tells its guest. Returns false if there is no client,
    /// or one that cannot be told: its guest sees the change when it starts again.
    ///
    /// # Errors
    ///
    /// The socket's error: the client does not read its messages, or is going.
    pub fn notify(&self) -> io::Result<bool> {
        let channel = self.lock();
        let Some(channel) = &*channel else {
            return Ok(false);
        };
        let message = header(BackendReq::CONFIG_CHANGE_MSG as u32, 0);
        // So few bytes are sent whole or not at all.
        send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        Ok(true)
    }

    /// Takes over the channel that the next message brings, if it brings one.
    ///
    /// # Errors
    ///
    /// The connection's error.
    pub(super) fn watch(&self, connection: impl AsFd) -> io::Result<()> {
        let mut bytes = [0; HEADER_BYTES];
        let (len, _) = recv(&connection, &mut bytes[..], RecvFlags::PEEK)?;
        let code = bytes.first_chunk().map(|code| u32::from_ne_bytes(*code));
        if len < 4 || code != Some(FrontendReq::SET_BACKEND_REQ_FD as u32) {
            return Ok(());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
        recvmsg(
            &connection,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            flags,
        )?;
        let mut fds = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        // Without one, the message is refused.
        if let Some(fd) = fds.next() {
            *self.lock() = Some(fd);
        }
        Ok(())
    }

    /// Forgets the channel of a client that goes.
    pub(super) fn forget(&self) {
        *self.lock() = None;
    }

    /// Returns the channel's socket once more, for a server that takes over.
    pub(super) fn socket(&self) -> io::Result<Option<OwnedFd>> {
        self.lock().as_ref().map(OwnedFd::try_clone).transpose()
    }
}
