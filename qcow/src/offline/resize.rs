//! Resizing of the disk in an image that is not served, by the engine, which opens and closes it for that.
//!
//! Invariant: an image with errors is not changed (`require_sound`), and a disk becomes smaller
//! only if the caller says so.

use std::fmt;
use std::path::Path;

use block::{Context, IoError};

use super::{ChangeError, change_chain};
use crate::engine::{QcowDisk, ShrinkError, disk_size_max};
use crate::format::Version;
use crate::image::{UnsoundError, require_sound};
use crate::luks::Secret;
use crate::open::OpenOptions;

/// The size that a disk is to get, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NewSize {
    /// This size.
    To(u64),
    /// So many bytes more than it has.
    LargerBy(u64),
    /// So many bytes less than it has.
    SmallerBy(u64),
}

impl NewSize {
    /// Returns the size for a disk that has `now` bytes; `None` if a disk cannot have it.
    fn of(self, now: u64) -> Option<u64> {
        let bytes = match self {
            Self::To(bytes) => Some(bytes),
            Self::LargerBy(bytes) => now.checked_add(bytes),
            Self::SmallerBy(bytes) => now.checked_sub(bytes),
        };
        bytes.filter(|&bytes| bytes > 0 && bytes.is_multiple_of(512))
    }
}

impl fmt::Display for NewSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::To(bytes) => write!(f, "{bytes}"),
            Self::LargerBy(bytes) => write!(f, "+{bytes}"),
            Self::SmallerBy(bytes) => write!(f, "-{bytes}"),
        }
    }
}

/// The permissions for a resize.
#[derive(Clone, Debug, Default)]
pub struct ResizeOptions {
    /// The disk may become smaller; what lies past its new end is lost.
    pub shrink: bool,
    /// Open the data file that the image names, and make it as long as the disk.
    pub data_file: bool,
    /// The secret that opens the image, if it is encrypted.
    pub secret: Option<Secret>,
}

/// A disk was not resized. Unless it says otherwise, it is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// No disk has this size.
    #[error(
        "the disk has {now} bytes, and the new size is {size}; expected more than 0 bytes and a multiple of 512"
    )]
    Size {
        /// The size asked for.
        size: NewSize,
        /// The disk's size, in bytes.
        now: u64,
    },
    /// The image cannot map as much.
    #[error("the new size is {bytes} bytes; expected at most {most}, which is what an L1 table can map")]
    TooLarge {
        /// The size asked for, in bytes.
        bytes: u64,
        /// The largest size, in bytes.
        most: u64,
    },
    /// The snapshots do not record the size of their disks.
    #[error(transparent)]
    Version2(ShrinkError),
    /// The disk would become smaller.
    #[error(
        "the disk has {now} bytes and would become smaller; {data} bytes of data past {bytes} would be lost; shrink the file \
         systems and partitions in it first, then pass --shrink"
    )]
    WouldLose {
        /// The size asked for, in bytes.
        bytes: u64,
        /// The disk's size, in bytes.
        now: u64,
        /// The bytes of data that would be lost.
        data: u64,
    },
    /// The image is damaged: the change could free or overwrite what something else uses.
    #[error(transparent)]
    Unsound(#[from] UnsoundError),
    /// The host failed an operation.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The disk could not be made smaller.
    #[error(transparent)]
    Shrink(ShrinkError),
}

/// Resizes the disk in the image at `path`, which is checked first, and returns its new size in bytes. Its backing files are
/// opened to be read, because a new part must hide theirs.
///
/// # Errors
///
/// [`ChangeError`] with a [`ResizeError`]; with the disk as it was unless it says otherwise.
pub fn resize(path: &Path, size: NewSize, options: &ResizeOptions) -> Result<u64, ChangeError<ResizeError>> {
    let open = OpenOptions {
        secret: options.secret.clone(),
        backing_files: true,
        data_files: options.data_file,
        ..OpenOptions::default()
    };
    change_chain(path, &open, async |disk, cx| {
        let now = block::Disk::info(disk).size_bytes;
        let bytes = size.of(now).ok_or(ResizeError::Size { size, now })?;
        change(disk, cx, now, bytes, options.shrink).await?;
        Ok(bytes)
    })
}

async fn change(
    disk: &QcowDisk,
    cx: &Context,
    now: u64,
    bytes: u64,
    may_shrink: bool,
) -> Result<(), ResizeError> {
    let geometry = disk.geometry();
    let most = disk_size_max(&geometry);
    if bytes > most {
        return Err(ResizeError::TooLarge { bytes, most });
    }
    if bytes < now && !may_shrink {
        let data = disk.data_bytes_from(cx, bytes).await?;
        return Err(ResizeError::WouldLose { bytes, now, data });
    }
    if bytes != now && geometry.version() == Version::V2 && disk.has_snapshots() {
        return Err(ResizeError::Version2(ShrinkError::Version2));
    }
    let view = disk.shared.file.view(cx).map_err(IoError::from)?;
    require_sound(&view).await?;
    match bytes > now {
        true => Ok(disk.grow(cx, bytes).await?),
        // Also to the same size: a cut may have left a data file longer than the disk.
        false => disk.shrink(cx, bytes).await.map_err(ResizeError::Shrink),
    }
}
