//! Shrinking of disks that are served, as the control socket asks for it.
//!
//! The image becomes smaller first: from then on requests past its end fail, whatever the disk's user does. Then the resize
//! that also makes disks larger tells the user the size. No lock of the machine or the server is held while the engine runs.
//!
//! Nobody here can know that the user needs nothing past the new end, so `force` has to say so.

use crate::open::{OpenedDisk, OpenedImage};

/// A disk that is served and may become smaller.
#[derive(Debug)]
pub(crate) struct ShrinkTarget {
    size_bytes: u64,
    /// `None` if it is raw.
    image: Option<OpenedImage>,
}

impl ShrinkTarget {
    pub(crate) fn of(opened: &OpenedDisk) -> Self {
        Self {
            size_bytes: opened.disk().info().size_bytes,
            image: opened.image(),
        }
    }

    /// Makes the disk smaller if `size` is less than it has.
    ///
    /// # Errors
    ///
    /// The error as one sentence, without the disk, which is as it was unless it says otherwise.
    pub(crate) fn shrink_to(&self, size: u64, force: bool) -> Result<(), String> {
        let now = self.size_bytes;
        if size >= now {
            return Ok(());
        }
        let image = self.image.as_ref();
        let image =
            image.ok_or("its image is raw; only QCOW2 images become smaller while they are served")?;
        if !force {
            let data = image.run(async |disk, cx| disk.data_bytes_from(cx, size).await)?;
            return Err(format!(
                "it has {now} bytes and would become smaller; {data} bytes of data past {size} would be lost; shrink the file \
                 systems and partitions in it first, then use force"
            ));
        }
        image.run(async |disk, cx| disk.shrink(cx, size).await)
    }
}
