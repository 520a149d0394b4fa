//! Snapshots of an image that is not served: opens it with the engine, changes its snapshots, and closes it.
//!
//! The backing file is not opened: snapshots refer to the image's own clusters only.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use block::ring::RingKind;
use block::{Context, Disk, IoError};

use super::open::open_without_backing;
use super::{OpenError, OpenOptions};
use crate::{DiskSize, QcowDisk, SnapshotError, SnapshotSelector};

/// A change of an image's snapshots failed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeSnapshotsError {
    /// The image could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The change failed.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The change is made, and the image could not be closed: some clusters may be leaked.
    #[error(
        "the change is made, but the image could not be closed; `ringdisk image check` shows if clusters are leaked"
    )]
    Close(#[source] IoError),
    /// The host failed a wait.
    #[error("cannot wait for I/O")]
    Wait(#[source] std::io::Error),
}

/// Creates a snapshot of the disk in the image at `path`. Returns its ID.
///
/// # Errors
///
/// [`ChangeSnapshotsError`]; without a new snapshot unless it says otherwise.
pub fn create_snapshot(path: &Path, name: &str, date: SystemTime) -> Result<String, ChangeSnapshotsError> {
    change(path, async |disk, cx| disk.create_snapshot(cx, name, date).await)
}

/// Deletes a snapshot of the image at `path`.
///
/// # Errors
///
/// [`ChangeSnapshotsError`]; with the snapshots as they were unless it says otherwise.
pub fn delete_snapshot(path: &Path, selector: &SnapshotSelector) -> Result<(), ChangeSnapshotsError> {
    change(path, async |disk, cx| disk.delete_snapshot(cx, selector).await)
}

/// Makes the disk in the image at `path` what it was when a snapshot was created, also in size. The snapshot stays.
///
/// # Errors
///
/// [`ChangeSnapshotsError`]; with the disk as it was unless it says otherwise.
pub fn apply_snapshot(path: &Path, selector: &SnapshotSelector) -> Result<(), ChangeSnapshotsError> {
    change(path, async |disk, cx| {
        disk.apply_snapshot(cx, selector, DiskSize::MayChange).await
    })
}

fn change<T>(
    path: &Path,
    work: impl AsyncFnOnce(&QcowDisk, &Context) -> Result<T, SnapshotError>,
) -> Result<T, ChangeSnapshotsError> {
    let cx =
        Context::new(RingKind::Syscalls, 64).map_err(|error| ChangeSnapshotsError::Wait(error.into()))?;
    let run = async {
        let disk = open_without_backing(&cx, path, &OpenOptions::default()).await?;
        let result = work(&disk, &cx).await;
        let closed = Arc::clone(&disk).close(&cx).await;
        let value = result?;
        closed.map_err(ChangeSnapshotsError::Close)?;
        Ok(value)
    };
    match cx.block_on(run) {
        Ok(result) => result,
        Err(error) => Err(ChangeSnapshotsError::Wait(error)),
    }
}
