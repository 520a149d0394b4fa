//! Snapshots of an image. The backing file is not opened: they refer to the image's own clusters only.

use std::path::Path;
use std::time::SystemTime;

use super::{ChangeError, change_image};
use crate::engine::{DiskSize, SnapshotError, SnapshotSelector};

/// A change of an image's snapshots failed.
pub type ChangeSnapshotsError = ChangeError<SnapshotError>;

/// Creates a snapshot of the disk in the image at `path`. Returns its ID.
///
/// # Errors
///
/// [`ChangeSnapshotsError`]; without a new snapshot unless it says otherwise.
pub fn create_snapshot(path: &Path, name: &str, date: SystemTime) -> Result<String, ChangeSnapshotsError> {
    change_image(path, async |disk, cx| disk.create_snapshot(cx, name, date).await)
}

/// Deletes a snapshot of the image at `path`.
///
/// # Errors
///
/// [`ChangeSnapshotsError`]; with the snapshots as they were unless it says otherwise.
pub fn delete_snapshot(path: &Path, selector: &SnapshotSelector) -> Result<(), ChangeSnapshotsError> {
    change_image(path, async |disk, cx| disk.delete_snapshot(cx, selector).await)
}

/// Makes the disk in the image at `path` what it was when a snapshot was created, also in size. The snapshot stays.
///
/// # Errors
///
/// [`ChangeSnapshotsError`]; with the disk as it was unless it says otherwise.
pub fn apply_snapshot(path: &Path, selector: &SnapshotSelector) -> Result<(), ChangeSnapshotsError> {
    change_image(path, async |disk, cx| {
        disk.apply_snapshot(cx, selector, DiskSize::MayChange).await
    })
}
