//! The errors that a request can end with.
//!
//! An [`IoError`] is returned to the guest's frontend with every failed request, so it is small and
//! `Copy`. The details (path, offset, field) are logged where the error arose; a frontend only needs to
//! choose its own error code.

use std::io;

/// Error of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum IoError {
    /// The host's kernel refused or failed the I/O.
    #[error("host I/O failed: {}", io::Error::from_raw_os_error(*errno))]
    Host {
        /// The positive errno.
        errno: i32,
    },
    /// The range is not inside the disk.
    #[error("the range does not lie inside the disk")]
    OutOfRange,
    /// Offset or length is not a multiple of 512 bytes.
    #[error("offset and length must be multiples of 512 bytes")]
    Misaligned,
    /// The buffer's length differs from the request's.
    #[error("the buffer is not as long as the request")]
    BufferLength,
    /// The buffer is registered with another worker's ring.
    #[error("the buffer is registered with another worker's ring")]
    ForeignBuffer,
    /// A write to a disk that is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The disk does not offer this operation.
    #[error("the disk does not support this operation")]
    Unsupported,
    /// The image's metadata is corrupt where the request needed it.
    #[error("the image is corrupt")]
    Corrupt,
    /// The request was cancelled before it took effect.
    #[error("cancelled")]
    Cancelled,
    /// The request's last owner dropped it without an answer.
    #[error("the request was dropped unanswered")]
    Dropped,
}

impl IoError {
    /// Converts the errno of a failed system call. A cancelled op becomes [`IoError::Cancelled`].
    #[must_use]
    pub fn from_errno(errno: i32) -> Self {
        if errno == libc::ECANCELED {
            Self::Cancelled
        } else {
            Self::Host { errno }
        }
    }

    /// Returns the closest errno, positive.
    #[must_use]
    pub fn errno(self) -> i32 {
        match self {
            Self::Host { errno } => errno,
            Self::OutOfRange | Self::Misaligned | Self::BufferLength | Self::ForeignBuffer => libc::EINVAL,
            Self::ReadOnly => libc::EROFS,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::Corrupt | Self::Dropped => libc::EIO,
            Self::Cancelled => libc::ECANCELED,
        }
    }

    /// Returns true if the host ran out of space (`ENOSPC` or `EDQUOT`).
    #[must_use]
    pub fn is_no_space(self) -> bool {
        matches!(self, Self::Host { errno } if errno == libc::ENOSPC || errno == libc::EDQUOT)
    }
}

impl From<io::Error> for IoError {
    fn from(error: io::Error) -> Self {
        Self::from_errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<IoError> for io::Error {
    fn from(error: IoError) -> Self {
        io::Error::from_raw_os_error(error.errno())
    }
}
