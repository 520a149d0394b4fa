//! Persistent bitmaps of an image.

use std::path::Path;

use super::{ChangeError, change_image};
use crate::engine::{BitmapChange, BitmapsError};
use crate::image::{UnsoundError, require_sound};

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
