//! Reads of the directory of persistent bitmaps.

use block::file::FileView;

use super::read::{PART, Parts, ReadError};
use crate::format::bitmap::{
    BITMAP_DIRECTORY_MAX_BYTES, BITMAP_EXTRA_MAX, BITMAP_FIXED_SIZE, BITMAPS_MAX, BitmapError,
};
use crate::format::{Autoclear, BitmapDirectoryEntry, BitmapsExtension, ClusterUse, Header, Version};

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
pub(crate) fn consistent_bitmaps(header: &Header) -> Option<BitmapsExtension> {
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
