//! Errors of a takeover, as the new server's user reads them.
//!
//! Invariant: each says which of the two servers continues to serve.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use virtio_devices::vhost_user::HandOverError;

use crate::error::CommandFailure;

/// An error of a takeover.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// There is no server to take over from.
    #[error(
        "no server to take over from listens at {}; start without --takeover, or name a control socket of the server \
         (--takeover=SOCKET)",
        path.display()
    )]
    Nobody {
        /// The takeover socket.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The listening server belongs to another user.
    #[error("the server at {} belongs to another user", path.display())]
    Stranger {
        /// The takeover socket.
        path: PathBuf,
    },
    /// The old server refuses and continues.
    #[error("the running server refuses: {reason}")]
    Refused {
        /// The reason, as the server states it.
        reason: String,
    },
    /// The conversation broke off.
    #[error("the running server closed the connection during the takeover, or is of another version")]
    BrokenOff(#[source] io::Error),
    /// The old server, or its disks, hang.
    #[error("the running server did not answer within {} s; it continues to serve its clients", waited.as_secs())]
    Silent {
        /// The time that was waited.
        waited: Duration,
    },
}

impl TakeoverError {
    /// Returns the error for an answer that did not arrive within this time.
    pub(super) fn unanswered(error: io::Error, waited: Duration) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent { waited },
            _ => Self::BrokenOff(error),
        }
    }
}

/// Returns the failure to adopt the client of disk `name`, with the option that is missing where that is known.
#[must_use]
pub fn not_adopted(name: &str, error: HandOverError) -> CommandFailure {
    let message = match error {
        HandOverError::SeveralQueues => {
            "its client uses several queues; this server needs the old one's num_queues="
        }
        HandOverError::InflightTracking => {
            "its client is served with --restartable; this server needs --restartable too"
        }
        error => return CommandFailure::about(name, error),
    };
    CommandFailure::Failed(format!("{name}: {message}").into())
}
