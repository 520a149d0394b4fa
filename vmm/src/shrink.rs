//! Shrinking of disks that are served, as the control socket asks for it.
//!
//! The image becomes smaller first: from then on requests past its end fail, whatever the disk's user does. Then the resize
//! that also makes disks larger tells the user the size. No lock of the machine or the server is held while the engine runs.
//!
//! Nobody here can know that the user needs nothing past the new end, so `force` has to say so.

use crate::open::OpenedImage;

/// Makes a disk of `now` bytes smaller if `size` is less than that; `image` is `None` if it is raw.
///
/// # Errors
///
/// The error as one sentence, without the disk, which is as it was unless it says otherwise.
pub(crate) fn shrink_to(now: u64, image: Option<&OpenedImage>, size: u64, force: bool) -> Result<(), String> {
    if size >= now {
        return Ok(());
    }
    let image = image.ok_or("its image is raw; only QCOW2 images become smaller while they are served")?;
    if !force {
        let data = image.run(async |disk, cx| disk.data_bytes_from(cx, size).await)?;
        return Err(format!(
            "it has {now} bytes and would become smaller; {data} bytes of data past {size} would be lost; shrink the file \
             systems and partitions in it first, then use force"
        ));
    }
    image.run(async |disk, cx| disk.shrink(cx, size).await)
}
