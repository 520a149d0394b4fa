//! Errors of changes of persistent bitmaps.

use block::IoError;

use super::super::exclusive::Refused;
use super::super::switch::Stopped;
use crate::format::bitmap::{
    BITMAP_BITS_MAX, BITMAP_DIRECTORY_MAX_BYTES, BITMAP_NAME_MAX, BITMAPS_MAX, BitmapError,
};
use crate::format::{ClusterUse, HeaderError, NoRoomForBitmaps};
use crate::image::bitmaps::BitmapDirectoryError;
use crate::image::{ReadError, UnsoundError};

/// A change of the persistent bitmaps failed. The bitmaps are as they were.
#[derive(Debug, thiserror::Error)]
pub enum BitmapsError {
    /// The host failed a read, write or sync, or the image does not accept changes.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Requests in flight, or work in the background, did not end.
    #[error(
        "requests in flight, or the freeing of clusters, did not end within 5 seconds, and nothing was changed"
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
    /// The header has no room for the place of the bitmaps.
    #[error(transparent)]
    NoRoom(#[from] NoRoomForBitmaps),
    /// A table could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The directory of the bitmaps is damaged.
    #[error(transparent)]
    Directory(#[from] BitmapDirectoryError),
    /// The image is damaged.
    #[error(transparent)]
    Unsound(#[from] UnsoundError),
    /// The image is of version 2.
    #[error("an image of version 2 cannot have bitmaps; use `qemu-img amend -o compat=1.1` first")]
    Version2,
    /// The name is too short or too long.
    #[error("the bitmap's name has {len} bytes; expected 1 to {BITMAP_NAME_MAX}, without NUL")]
    Name {
        /// The name's length in bytes.
        len: usize,
    },
    /// There is a bitmap of this name.
    #[error("there is a bitmap {0:?} already; choose another name, or remove that one first")]
    Exists(String),
    /// There is no bitmap of this name.
    #[error("there is no bitmap {0:?}")]
    NotFound(String),
    /// Several bitmaps have the name.
    #[error("several bitmaps have the name {0:?}; expected names that are unique")]
    Ambiguous(String),
    /// The bitmap was in use when a program ended, and may lack changes.
    #[error(
        "bitmap {0:?} is in use, or was when a program crashed: it may lack changes, and can only be removed"
    )]
    InUse(String),
    /// The bitmap has data that this crate does not know.
    #[error("bitmap {0:?} has extra data that only another program knows; it can only be removed")]
    ExtraData(String),
    /// The bitmap's entry breaks the format's rules.
    #[error("bitmap {name:?}: {source}")]
    Entry {
        /// The bitmap's name.
        name: String,
        /// The error in its entry.
        #[source]
        source: BitmapError,
    },
    /// The granularity is no power of two, or too small or too large.
    #[error("the granularity is {0} bytes; expected a power of two from 512 to 2147483648")]
    Granularity(u64),
    /// The bitmap would have more bits than QEMU accepts.
    #[error(
        "the bitmap would have {bits} bits; expected at most {BITMAP_BITS_MAX}; choose a larger granularity"
    )]
    TooManyBits {
        /// The number of bits.
        bits: u64,
    },
    /// A disk without bytes has no bitmaps.
    #[error("the disk has 0 bytes, of which there can be no bitmap")]
    EmptyDisk,
    /// There are as many bitmaps as the format's users accept.
    #[error("the image has {BITMAPS_MAX} bitmaps, the most that it can have; remove one first")]
    TooMany,
    /// The directory would be longer than the format's users accept.
    #[error(
        "the bitmap directory would have {bytes} bytes; expected at most {BITMAP_DIRECTORY_MAX_BYTES}; remove bitmaps first"
    )]
    DirectoryTooLong {
        /// The length that it would have, in bytes.
        bytes: u64,
    },
    /// Durable bitmaps would take too much space.
    #[error(
        "clusters for durable bitmaps would take {bytes} bytes; expected at most {memory_bytes}, the memory for bitmaps"
    )]
    TooMuchSpace {
        /// The space in bytes.
        bytes: u64,
        /// The memory for bitmaps in bytes.
        memory_bytes: u64,
    },
    /// The counts to look at are more than an operation keeps in memory.
    #[error("the refcount block that counts the cluster at {offset:#x} is one more than there is memory for")]
    TooManyCounts {
        /// The offset of a cluster that the block counts, in bytes.
        offset: u64,
    },
    /// A table is damaged, or what it leads to is.
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

impl From<Stopped> for BitmapsError {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Failed(error) => Self::Io(error),
            Stopped::TooManyCounts(offset) => Self::TooManyCounts {
                offset: offset.bytes(),
            },
        }
    }
}

impl From<Refused> for BitmapsError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Busy => Self::Busy,
            Refused::Closed => Self::Closed,
            Refused::Failed(error) => Self::Io(error),
        }
    }
}
