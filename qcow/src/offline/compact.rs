//! Compaction of an image that is not served: by the engine, which opens and closes it for that. The backing file is not
//! opened, as nothing of it changes or moves.

use std::ops::ControlFlow;
use std::path::Path;

use super::{ChangeError, change_image_directly};
use crate::engine::{CompactError, CompactOptions, CompactProgress, Compacted};
use crate::image::require_sound;
use crate::luks::Secret;
use crate::open::OpenOptions;

/// A compaction of an image failed.
pub type CompactImageError = ChangeError<CompactError>;

/// Moves clusters from the end of the image at `path` into free ones nearer its start, and cuts the file. The image is
/// checked first. `secret` opens an encrypted one. `progress` is called after each step; with [`ControlFlow::Break`] the
/// compaction ends there, and another call goes on.
///
/// # Errors
///
/// [`CompactImageError`]; with the image as sound as it was, and perhaps less long.
pub fn compact_image(
    path: &Path,
    secret: Option<Secret>,
    options: &CompactOptions,
    progress: impl FnMut(&CompactProgress) -> ControlFlow<()>,
) -> Result<Compacted, CompactImageError> {
    let open = OpenOptions {
        secret,
        // Its tables can move.
        data_files: true,
        ..OpenOptions::default()
    };
    change_image_directly(path, &open, async |disk, cx| {
        let view = disk.shared.file.view(cx).map_err(CompactError::Queue)?;
        // An entry that counts zero would be overwritten or cut off.
        require_sound(&view).await?;
        disk.compact(cx, options, progress).await
    })
}
