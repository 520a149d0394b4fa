//! Internal snapshots of disks that are served, as the control socket asks for them.
//!
//! The work is done on the thread of whoever asks, with plain system calls: the workers of the disk go on, and their
//! requests wait only while the engine runs the operation alone. No lock of the machine or the server is held meanwhile, so
//! other requests to the control socket are answered.
//!
//! Invariant: a request that fails leaves the image as it was, and the disk is served on.

use std::time::SystemTime;

use block::Context;
use qcow::image::SnapshotList;
use qcow::{DiskSize, QcowDisk, SnapshotError, SnapshotSelector};
use serde_json::{Value, json};

use crate::open::OpenedImage;

/// The reason that a snapshot is not applied to a disk that may be in use, and what to do instead.
const APPLY_UNFORCED: &str = "the disk may be in use, and what its user has in memory would be written over the snapshot; remove \
     the disk, apply the snapshot to the closed image with `ringdisk image snapshot apply`, and add it again; or, if nobody \
     has the disk mounted or open, use force";

/// The snapshots of a disk that is served.
#[derive(Debug)]
pub(crate) struct ServedSnapshots<'a> {
    /// The disk, for people.
    disk: &'a str,
    image: &'a OpenedImage,
}

impl<'a> ServedSnapshots<'a> {
    /// Returns the snapshots of `image`, which errors call `disk`.
    pub(crate) fn new(disk: &'a str, image: &'a OpenedImage) -> Self {
        Self { disk, image }
    }

    /// Creates a snapshot of the disk as it is. Answers its ID.
    ///
    /// # Errors
    ///
    /// The error as one sentence, with the disk.
    pub(crate) fn create(&self, name: &str) -> Result<Value, String> {
        let created = self.ask("cannot create a snapshot of", async |disk, cx| {
            disk.create_snapshot(cx, name, SystemTime::now()).await
        })?;
        tracing::info!(event = "snapshot-created", disk = %self.disk, name, id = %created, "created a snapshot");
        Ok(json!({ "snapshot": created }))
    }

    /// Lists the snapshots.
    ///
    /// # Errors
    ///
    /// As for [`ServedSnapshots::create`].
    pub(crate) fn list(&self) -> Result<Value, String> {
        let entries = self.ask("cannot list the snapshots of", async |disk, cx| {
            disk.snapshots(cx).await
        })?;
        serde_json::to_value(SnapshotList::new(&entries))
            .map_err(|error| format!("cannot list the snapshots of {}: {error}", self.disk))
    }

    /// Makes the disk what it was when a snapshot was created. With `force`, because only the caller can know that nobody
    /// uses the disk.
    ///
    /// # Errors
    ///
    /// As for [`ServedSnapshots::create`].
    pub(crate) fn apply(&self, snapshot: &str, force: bool) -> Result<Value, String> {
        const ACTION: &str = "cannot apply a snapshot to";
        if !force {
            return Err(format!("{ACTION} {}: {APPLY_UNFORCED}", self.disk));
        }
        let selector = SnapshotSelector::parse(snapshot);
        self.ask(ACTION, async |disk, cx| {
            disk.apply_snapshot(cx, &selector, DiskSize::Fixed).await
        })?;
        tracing::info!(event = "snapshot-applied", disk = %self.disk, snapshot, "applied a snapshot");
        Ok(json!({}))
    }

    /// Deletes a snapshot.
    ///
    /// # Errors
    ///
    /// As for [`ServedSnapshots::create`].
    pub(crate) fn delete(&self, snapshot: &str) -> Result<Value, String> {
        let selector = SnapshotSelector::parse(snapshot);
        self.ask("cannot delete a snapshot of", async |disk, cx| {
            disk.delete_snapshot(cx, &selector).await
        })?;
        tracing::info!(event = "snapshot-deleted", disk = %self.disk, snapshot, "deleted a snapshot");
        Ok(json!({}))
    }

    /// Has the engine do something, on a context of this thread.
    fn ask<T>(
        &self,
        action: &str,
        work: impl AsyncFnOnce(&QcowDisk, &Context) -> Result<T, SnapshotError>,
    ) -> Result<T, String> {
        let done = self.image.run(work);
        done.map_err(|why| format!("{action} {}: {why}", self.disk))
    }
}
