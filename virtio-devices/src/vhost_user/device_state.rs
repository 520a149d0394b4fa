//! The state that a client carries to the next server when its guest migrates, beside the guest's memory: the cache mode.
//!
//! It is as many bytes as the word that inflight memory keeps for the same purpose ([`CacheMode::to_word`]). A state of no bytes is that of
//! another implementation, and says nothing. Spec: vhost-user, `VHOST_USER_SET_DEVICE_STATE_FD`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use super::event::{is_writable, wait_readable_for};
use crate::blk::CacheMode;

/// The longest wait for bytes that the client has said to have written.
const READ_MAX: Duration = Duration::from_secs(1);

/// A state that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceStateError {
    #[error("the state of the device does not end, or cannot be read")]
    Read(#[from] io::Error),
    #[error("the state of the device is not one of ours: expected 8 bytes, or none")]
    Foreign,
}

/// Writes the state to what the client passed. A pipe without room is an error: nobody waits for the client.
pub(super) fn save(mode: CacheMode, mut to: &File) -> io::Result<()> {
    if !is_writable(to.as_fd()) {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    to.write_all(&mode.to_word().to_le_bytes())
}

/// Reads what the client has written to the other end of `from`, which it has closed.
pub(super) fn load(mut from: File) -> Result<CacheMode, DeviceStateError> {
    let (mut bytes, mut len) = ([0; 9], 0);
    loop {
        if !wait_readable_for(from.as_fd(), READ_MAX)? {
            return Err(DeviceStateError::Read(io::ErrorKind::TimedOut.into()));
        }
        match from.read(bytes.get_mut(len..).unwrap_or_default())? {
            0 => break,
            more => len += more,
        }
    }
    match bytes.first_chunk() {
        _ if len == 0 => Ok(CacheMode::Unknown),
        Some(word) if len == 8 => {
            CacheMode::from_word(u64::from_le_bytes(*word)).ok_or(DeviceStateError::Foreign)
        }
        _ => Err(DeviceStateError::Foreign),
    }
}
