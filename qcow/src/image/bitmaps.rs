//! Persistent bitmaps: reading their directory, finding those that a write makes out of date, and changes of those of an
//! image that is not served.
//!
//! The engine keeps those of a disk that is served. Before the guest first writes it marks each one that records changes as in use, as
//! QEMU does, unless it is durable. So every program knows that what is stored is out of date, and its clusters stay accounted for.

use std::path::Path;

use block::file::FileView;

use super::change::{ChangeError, change_image};
use super::read::{PART, Parts, ReadError};
use super::sound::{UnsoundError, require_sound};
use crate::engine::Announcement;
use crate::format::bitmap::{
    BITMAP_DIRECTORY_MAX_BYTES, BITMAP_EXTRA_MAX, BITMAP_FIXED_SIZE, BITMAP_FLAGS_AT, BITMAPS_MAX,
    BitmapError,
};
use crate::format::{
    Autoclear, BitmapDirectoryEntry, BitmapFlags, BitmapsExtension, ClusterUse, Header, Version,
};
use crate::{BitmapChange, BitmapsError};

/// A change of an image's bitmaps failed.
pub type ChangeBitmapsError = ChangeError<BitmapsError>;

/// Changes a bitmap of the image at `path`, which is checked first. If that finds errors, only a removal is made, and nothing is
/// freed: what the bitmap had becomes leaked clusters.
///
/// # Errors
///
/// [`ChangeBitmapsError`]; with the bitmaps as they were unless it says otherwise.
pub fn change_bitmap(path: &Path, name: &str, change: &BitmapChange) -> Result<(), ChangeBitmapsError> {
    change_image(path, async |disk, cx| {
        let view = disk.shared.file.view(cx);
        let view = view.map_err(BitmapsError::Queue)?;
        let frees = match require_sound(&view).await {
            Ok(()) => true,
            Err(UnsoundError::Errors { .. }) if *change == BitmapChange::Remove => false,
            Err(error) => return Err(error.into()),
        };
        disk.change_bitmap_freeing(cx, name, change, frees).await
    })
}

/// The bitmap directory cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BitmapDirectoryError {
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The header extension that points to it has a value the format or QEMU's limits rule out.
    #[error("the bitmaps extension's {field} is {found:#x}; expected {expected}")]
    Extension {
        /// The specification's name of the field.
        field: &'static str,
        /// The value found.
        found: u64,
        /// The values allowed.
        expected: &'static str,
    },
    /// One of its entries is malformed.
    #[error("bitmap {index}: {source}")]
    Entry {
        /// The entry's number, from zero.
        index: u32,
        /// The error in the entry.
        #[source]
        source: BitmapError,
    },
}

/// Returns the place of the bitmaps, if the image has some that are consistent with its metadata.
pub fn consistent_bitmaps(header: &Header) -> Option<BitmapsExtension> {
    let valid = header.version == Version::V3 && header.autoclear.contains(Autoclear::BITMAPS);
    header.bitmaps().filter(|_| valid)
}

fn check_extension(
    header: &Header,
    extension: &BitmapsExtension,
    file_len: u64,
) -> Result<(), BitmapDirectoryError> {
    let wrong = |field, found, expected| {
        Err(BitmapDirectoryError::Extension {
            field,
            found,
            expected,
        })
    };
    let (offset, size) = (extension.directory_offset, extension.directory_size);
    if extension.count == 0 || extension.count > BITMAPS_MAX {
        return wrong("nb_bitmaps", u64::from(extension.count), "1 to 65535");
    }
    if extension.reserved != 0 {
        return wrong("reserved field", u64::from(extension.reserved), "0");
    }
    if offset.bytes() == 0 || !offset.is_aligned_to(header.cluster_bits.size()) {
        return wrong(
            "bitmap_directory_offset",
            offset.bytes(),
            "a multiple of the cluster size, not 0",
        );
    }
    if size > BITMAP_DIRECTORY_MAX_BYTES {
        return wrong(
            "bitmap_directory_size",
            size,
            "at most 65535 entries of 1048 bytes",
        );
    }
    // The file's last cluster may be there only in part; the rest of it reads as zeros.
    let end = offset.bytes().saturating_add(size);
    if end.saturating_sub(file_len) >= header.cluster_bits.size() {
        return wrong("bitmap_directory_size", size, "a directory that ends in the file");
    }
    Ok(())
}

/// Reads the bitmap directory that `extension` describes and calls `each(place in bytes, entry)`. Calls made before
/// an error prove nothing.
///
/// # Errors
///
/// [`BitmapDirectoryError`] if it cannot be read or is malformed.
pub(crate) async fn for_each_bitmap(
    file: &FileView,
    header: &Header,
    extension: &BitmapsExtension,
    file_len: u64,
    mut each: impl FnMut(u64, BitmapDirectoryEntry),
) -> Result<(), BitmapDirectoryError> {
    // One part holds at least one entry of the largest kind.
    const ENTRY_MAX: usize = BITMAP_FIXED_SIZE + BITMAP_EXTRA_MAX + u16::MAX as usize + 8;
    const _: () = assert!(PART as usize >= ENTRY_MAX);
    check_extension(header, extension, file_len)?;
    let start = extension.directory_offset.bytes();
    let end = start.saturating_add(extension.directory_size);
    let mut parts = Parts::new(file, ClusterUse::BitmapDirectory, end);
    let mut at = start;
    for index in 0..extension.count {
        let malformed = |source| BitmapDirectoryError::Entry { index, source };
        let rest = parts
            .at(at, |rest| BitmapDirectoryEntry::peek_len(rest).ok())
            .await?;
        let len = BitmapDirectoryEntry::peek_len(rest).map_err(malformed)?;
        let entry = BitmapDirectoryEntry::parse(rest).map_err(malformed)?;
        each(at, entry);
        at = at.saturating_add(len as u64);
    }
    if at != end {
        let (field, found) = ("bitmap_directory_size", extension.directory_size);
        return Err(BitmapDirectoryError::Extension {
            field,
            found,
            expected: "the sum of the entries' sizes",
        });
    }
    Ok(())
}

/// The place and value of a bitmap's flags.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Mark {
    /// The offset in bytes.
    pub(crate) offset: u64,
    /// The flags as they are on disk.
    pub(crate) flags: BitmapFlags,
}

/// Returns the announcement of the bitmaps that nobody has marked as in use yet.
///
/// # Errors
///
/// [`BitmapDirectoryError`]; the caller may then clear [`Autoclear::BITMAPS`] instead, which
/// leaves the bitmaps' clusters as leaks.
pub(crate) async fn marks(file: &FileView, header: &Header) -> Result<Announcement, BitmapDirectoryError> {
    let mut found = Announcement::default();
    let Some(extension) = consistent_bitmaps(header) else {
        return Ok(found);
    };
    let file_len = file.len().map_err(ReadError::Length)?;
    let each = |at: u64, entry: BitmapDirectoryEntry| {
        found.add(Mark {
            offset: at + BITMAP_FLAGS_AT as u64,
            flags: entry.flags,
        });
    };
    for_each_bitmap(file, header, &extension, file_len, each).await?;
    Ok(found)
}
