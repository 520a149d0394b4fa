//! Temporary overlays: a new image over a disk that is open, in a file that nobody else can open.
//!
//! Invariant: the disk below is only read. What the overlay's header says of it (nothing) is read by nobody.

use std::sync::Arc;

use block::Disk;
use block::file::ImageFile;
use block::open::{Access, OpenError, Opening};

use super::{Below, Qcow2};
use crate::engine::QcowDisk;
use crate::image::{CreateOptions, create};

/// The cluster size of an overlay in bytes. Its subclusters are pages of 4 KiB: a guest that writes whole pages has nothing
/// copied from below.
const CLUSTER_SIZE: u64 = 128 << 10;

impl Qcow2 {
    /// Creates an overlay in `file`, a temporary file, and opens it over `below`, whose size it gets. The options are the
    /// overlay's, but for the snapshot, which was for the image below.
    ///
    /// # Errors
    ///
    /// [`OpenError::Image`], naming the overlay, with a [`CreateError`](crate::image::CreateError) if it could not be written.
    pub async fn open_over(
        &self,
        opening: &Opening<'_>,
        file: Arc<ImageFile>,
        below: Arc<dyn Disk>,
    ) -> Result<Arc<QcowDisk>, OpenError> {
        opening.add_temporary(&file)?;
        let view = file
            .view(opening.context())
            .map_err(|error| OpenError::image(file.path(), error))?;
        let options = CreateOptions {
            cluster_size: CLUSTER_SIZE,
            extended_l2: true,
            ..CreateOptions::new(below.info().size_bytes)
        };
        let created = create(&view, &options).await;
        created.map_err(|error| OpenError::image(file.path(), error))?;
        self.open_in(opening, file, Access::Write, None, Below::Given(below))
            .await
    }
}
