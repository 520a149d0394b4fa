//! Errors of operations on snapshots, and the choice of the snapshot that one is meant for.

use block::IoError;

use super::super::exclusive::Refused;
use super::super::switch::{SEARCH_BYTES_MAX, Stopped};
use crate::format::validate::{SNAPSHOT_TABLE_MAX_BYTES, SNAPSHOTS_MAX};
use crate::format::{ClusterUse, HeaderError, SnapshotEntry};
use crate::image::ReadError;
use crate::image::read::SnapshotTableError;
use crate::metadata::COUNTS_BYTES_MAX;

/// The longest name of a new snapshot, in bytes: QEMU cuts longer ones.
pub(super) const SNAPSHOT_NAME_MAX: usize = 255;

/// The most bytes of L2 tables that an operation reads. With 64 KiB clusters they map 64 TiB.
pub(super) const L2_TABLES_BYTES_MAX: u64 = 8 << 30;

/// An operation on snapshots failed. Unless it says otherwise, the image is as it was.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The host failed a read, write or sync, or the image does not accept changes.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Requests in flight, or work in the background, did not end.
    #[error(
        "requests in flight, or the freeing of clusters, did not end within 5 seconds, and nothing was changed; try again when \
         the host has answered them"
    )]
    Busy,
    /// The image is closed: it may be another program's already.
    #[error("the image is closed, and nothing was changed")]
    Closed,
    /// No worker could be used.
    #[error("cannot open a queue")]
    Queue(#[source] std::io::Error),
    /// The header is damaged.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The snapshot table is damaged.
    #[error(transparent)]
    Table(#[from] SnapshotTableError),
    /// A table could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The guest's bytes are not counted.
    #[error(
        "an image with an external data file cannot have snapshots: the data in that file has one version only"
    )]
    DataFile,
    /// The name is too short or too long.
    #[error("the snapshot's name has {len} bytes; expected 1 to {SNAPSHOT_NAME_MAX}")]
    Name {
        /// The name's length in bytes.
        len: usize,
    },
    /// The name has a NUL, at which QEMU's tools end it.
    #[error("the snapshot's name has a NUL; expected a name without")]
    NulInName,
    /// There is a snapshot of this name.
    #[error(
        "there is a snapshot {name:?} already, with id={id}; choose another name, or delete that one first"
    )]
    Exists {
        /// The name.
        name: String,
        /// The ID of the snapshot that has it.
        id: String,
    },
    /// There are as many snapshots as the format's users accept.
    #[error("the image has {SNAPSHOTS_MAX} snapshots, the most that it can have; delete one first")]
    TooMany,
    /// The table would be longer than the format's users accept.
    #[error(
        "the snapshot table would have {bytes} bytes; expected at most {SNAPSHOT_TABLE_MAX_BYTES}; delete snapshots first"
    )]
    TableTooLong {
        /// The length that it would have, in bytes.
        bytes: u64,
    },
    /// No snapshot is selected.
    #[error("there is no snapshot {0}")]
    NotFound(SnapshotSelector),
    /// Several snapshots are selected.
    #[error("{selector} may mean {count} snapshots; select one by id=, such as id={first}")]
    Ambiguous {
        /// The selector.
        selector: SnapshotSelector,
        /// The number of snapshots that it may mean.
        count: usize,
        /// The ID of the first of them.
        first: String,
    },
    /// The snapshot is of a disk of another size, which this disk cannot get.
    #[error("the snapshot is of a disk of {then} bytes, and the disk has {now} bytes: {reason}")]
    OtherSize {
        /// The size of the snapshot's disk, in bytes.
        then: u64,
        /// The disk's size, in bytes.
        now: u64,
        /// The reason that it cannot change, and what helps.
        reason: &'static str,
    },
    /// The snapshot's disk is larger than the image can map.
    #[error(
        "the snapshot says that its disk has {bytes} bytes; expected at most {most}, which is what an L1 table can map"
    )]
    DiskTooLarge {
        /// The size of the snapshot's disk, in bytes.
        bytes: u64,
        /// The largest size, in bytes.
        most: u64,
    },
    /// A cluster cannot have another reference.
    #[error(
        "the cluster at {offset:#x} has as many references as refcount_bits={bits} can count; delete a snapshot, or convert \
         the image to one of wider refcounts"
    )]
    RefcountFull {
        /// The cluster's offset, in bytes.
        offset: u64,
        /// The width of the image's reference counts.
        bits: u32,
    },
    /// A cluster in use counts no reference.
    #[error(
        "the cluster at {offset:#x} is in use and its refcount is 0; `ringdisk image check --repair all` mends that"
    )]
    Uncounted {
        /// The cluster's offset, in bytes.
        offset: u64,
    },
    /// A cluster has more references than it counts.
    #[error(
        "the cluster at {offset:#x} has more references than its refcount, and what else uses it would be lost; nothing was \
         changed; `ringdisk image check --repair all` mends that"
    )]
    Undercounted {
        /// The cluster's offset, in bytes.
        offset: u64,
    },
    /// The tables to follow are more than an operation reads.
    #[error(
        "the L2 tables to read have {bytes} bytes; expected at most {L2_TABLES_BYTES_MAX}; use QEMU's \
         tools on the closed image"
    )]
    TooManyTables {
        /// Their length, in bytes.
        bytes: u64,
    },
    /// The counts to look at are more than an operation keeps in memory.
    #[error(
        "the refcount block that counts the cluster at {offset:#x} is one more than an operation has memory for, which is \
         {COUNTS_BYTES_MAX} bytes of them for what entries lead to and {SEARCH_BYTES_MAX} to find free clusters; use QEMU's \
         tools on the closed image"
    )]
    TooManyCounts {
        /// The offset of a cluster that the block counts, in bytes.
        offset: u64,
    },
    /// The clusters to free lie in more places than an operation keeps in memory.
    #[error(
        "the clusters to free up to {offset:#x} lie in more places than an operation has memory for; use QEMU's tools on \
         the closed image"
    )]
    TooScattered {
        /// The offset of the last of them, in bytes.
        offset: u64,
    },
    /// An entry of a table is damaged, or leads to a wrong place.
    #[error("{} at {offset:#x} is damaged: {reason}; see `ringdisk image check`", .what.phrase())]
    Damaged {
        /// The table, or the structure that an entry leads to.
        what: ClusterUse,
        /// Its offset, in bytes.
        offset: u64,
        /// The damage.
        reason: String,
    },
}

impl From<Stopped> for SnapshotError {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Failed(error) => Self::Io(error),
            Stopped::TooManyCounts(offset) => Self::TooManyCounts {
                offset: offset.bytes(),
            },
        }
    }
}

impl From<Refused> for SnapshotError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Busy => Self::Busy,
            Refused::Closed => Self::Closed,
            Refused::Failed(error) => Self::Io(error),
        }
    }
}

/// The snapshot that an operation is meant for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum SnapshotSelector {
    /// The one with this ID.
    Id(String),
    /// The one with this name.
    Name(String),
    /// The one with this ID or name.
    Any(String),
}

impl std::fmt::Display for SnapshotSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Id(id) => write!(f, "id={id}"),
            Self::Name(name) => write!(f, "name={name}"),
            Self::Any(text) => write!(f, "with the ID or name {text:?}"),
        }
    }
}

impl SnapshotSelector {
    /// Reads `id=ID`, `name=NAME`, or what may be either.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match (text.strip_prefix("id="), text.strip_prefix("name=")) {
            (Some(id), _) => Self::Id(id.to_owned()),
            (_, Some(name)) => Self::Name(name.to_owned()),
            _ => Self::Any(text.to_owned()),
        }
    }

    fn matches(&self, entry: &SnapshotEntry) -> bool {
        match self {
            Self::Id(id) => entry.id == id.as_bytes(),
            Self::Name(name) => entry.name == name.as_bytes(),
            Self::Any(text) => entry.id == text.as_bytes() || entry.name == text.as_bytes(),
        }
    }

    /// Returns the index of the one snapshot that is meant.
    pub(crate) fn find(&self, entries: &[SnapshotEntry]) -> Result<usize, SnapshotError> {
        let found: Vec<usize> = (0..entries.len())
            .filter(|&index| entries.get(index).is_some_and(|entry| self.matches(entry)))
            .collect();
        match *found {
            [index] => Ok(index),
            [] => Err(SnapshotError::NotFound(self.clone())),
            [first, ..] => Err(SnapshotError::Ambiguous {
                selector: self.clone(),
                count: found.len(),
                first: entries
                    .get(first)
                    .map(|entry| text(&entry.id))
                    .unwrap_or_default(),
            }),
        }
    }
}

/// Returns text, with a mark for what is none.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
