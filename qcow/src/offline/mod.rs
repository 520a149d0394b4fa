//! Changes of an image that is not served: the engine makes them, and opens and closes the image for that.
//!
//! Invariant: `resize`, `compact_image` and `change_bitmap` check the whole image first, and leave one with errors as it is
//! ([`UnsoundError`](crate::image::UnsoundError)), except that a bitmap of it may be removed, which then frees nothing. Operations on
//! snapshots check the counts of what they share or give up, before they write.

mod bitmaps;
mod compact;
mod resize;
mod snapshots;

use std::path::Path;
use std::sync::Arc;

use block::file::HostFiles;
use block::open::OpenError;
use block::ring::RingKind;
use block::{Context, Disk, IoError};

pub use bitmaps::{ChangeBitmapsError, change_bitmap};
pub use compact::{CompactImageError, compact_image};
pub use resize::{NewSize, ResizeError, ResizeOptions, resize};
pub use snapshots::{ChangeSnapshotsError, apply_snapshot, create_snapshot, delete_snapshot};

use crate::engine::QcowDisk;
use crate::open::{OpenOptions, open_without_backing};

/// A change of an image failed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError<E: std::error::Error + 'static> {
    /// The image could not be opened.
    #[error(transparent)]
    Open(OpenError),
    /// The change failed.
    #[error(transparent)]
    Change(E),
    /// The change is made, and the image could not be closed: some clusters may be leaked.
    #[error(
        "the change is made, but the image could not be closed; `ringdisk image check` shows if clusters are leaked"
    )]
    Close(#[source] IoError),
    /// The host failed a wait.
    #[error("cannot wait for I/O")]
    Wait(#[source] std::io::Error),
}

/// Opens the image at `path` without its backing file, carries out `work`, and closes the image.
fn change_image<T, E: std::error::Error + 'static>(
    path: &Path,
    work: impl AsyncFnOnce(&QcowDisk, &Context) -> Result<T, E>,
) -> Result<T, ChangeError<E>> {
    let options = OpenOptions::default();
    let open = async |cx: &Context| open_without_backing(cx, path, &options).await;
    open_change_close(open, work)
}

/// As [`change_image`], with these options, and past the host's page cache if the file system allows that: a work that reads and writes
/// much data once would fill the cache with bytes that nobody asks for again.
fn change_image_directly<T, E: std::error::Error + 'static>(
    path: &Path,
    options: &OpenOptions,
    work: impl AsyncFnOnce(&QcowDisk, &Context) -> Result<T, E>,
) -> Result<T, ChangeError<E>> {
    let direct = OpenOptions {
        direct: true,
        ..options.clone()
    };
    let open = async |cx: &Context| match open_without_backing(cx, path, &direct).await {
        Err(error) if error.lacks_direct_io() => open_without_backing(cx, path, options).await,
        opened => opened,
    };
    open_change_close(open, work)
}

/// As [`change_image`], with the files that the image names, as far as the options allow them.
fn change_chain<T, E: std::error::Error + 'static>(
    path: &Path,
    options: &OpenOptions,
    work: impl AsyncFnOnce(&QcowDisk, &Context) -> Result<T, E>,
) -> Result<T, ChangeError<E>> {
    let open = async |cx: &Context| QcowDisk::open_on(cx, &HostFiles, path, options).await;
    open_change_close(open, work)
}

fn open_change_close<T, E: std::error::Error + 'static>(
    open: impl AsyncFnOnce(&Context) -> Result<Arc<QcowDisk>, OpenError>,
    work: impl AsyncFnOnce(&QcowDisk, &Context) -> Result<T, E>,
) -> Result<T, ChangeError<E>> {
    let cx = Context::new(RingKind::Syscalls, 64).map_err(|error| ChangeError::Wait(error.into()))?;
    let run = async {
        let disk = open(&cx).await.map_err(ChangeError::Open)?;
        let result = work(&disk, &cx).await;
        let closed = Arc::clone(&disk).close(&cx).await;
        let value = result.map_err(ChangeError::Change)?;
        closed.map_err(ChangeError::Close)?;
        Ok(value)
    };
    match cx.block_on(run) {
        Ok(result) => result,
        Err(error) => Err(ChangeError::Wait(error)),
    }
}
