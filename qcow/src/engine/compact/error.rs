//! Errors of a compaction, and what it could not move.

use std::fmt;

use block::IoError;

use super::super::exclusive::Refused;
use crate::format::HeaderError;
use crate::image::UnsoundError;
use crate::image::read::SnapshotTableError;

/// A compaction failed. The image is as sound as it was; what has moved stays moved.
#[derive(Debug, thiserror::Error)]
pub enum CompactError {
    /// The host failed a read, write or sync, or the image does not accept changes.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Requests in flight, or work in the background, did not end.
    #[error(
        "requests in flight, or the freeing of clusters, did not end in time; what has moved stays moved; try again when the \
         host has answered them"
    )]
    Busy,
    /// The image is closed: it may be another program's already.
    #[error("the image is closed; what has moved stays moved")]
    Closed,
    /// No worker could be used.
    #[error("cannot open a queue")]
    Queue(#[source] std::io::Error),
    /// A block device has no end to cut.
    #[error("the image is a block device, which cannot become shorter; expected a file")]
    BlockDevice,
    /// The bytes of an encrypted image depend on their place in the file.
    #[error(
        "the image is encrypted, and its clusters are encrypted anew where they move to; give its secret with --secret-file"
    )]
    Locked,
    /// The image is damaged.
    #[error(transparent)]
    Unsound(#[from] UnsoundError),
    /// The header is damaged.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The snapshot table is damaged.
    #[error(transparent)]
    Snapshots(#[from] SnapshotTableError),
}

impl From<Refused> for CompactError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Busy => Self::Busy,
            Refused::Closed => Self::Closed,
            Refused::Failed(error) => Self::Io(error),
        }
    }
}

/// Clusters that cannot move, for one reason.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FixedClusters {
    /// The reason.
    pub reason: Fixed,
    /// The number of clusters.
    pub count: u64,
}

/// The reason that a cluster cannot move.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Fixed {
    /// It belongs to a persistent bitmap.
    Bitmaps,
    /// It belongs to the header, or to the encryption header.
    Header,
    /// No table leads to it: it is leaked, or a request was writing it.
    Unknown,
}

impl fmt::Display for Fixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bitmaps => "used by bitmaps",
            Self::Header => "used by the header",
            Self::Unknown => "leaked, or being written",
        })
    }
}
