//! The space of a tmpfs that removed files still take, for tests that fill one.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns how many bytes of the tmpfs mounted at `folder` belong to no file in it: to files that were removed while
/// something, such as a ring that is being torn down, still holds them.
///
/// # Errors
///
/// The error of the host; or [`io::ErrorKind::Unsupported`] if `folder` is not a tmpfs.
pub fn removed_bytes(folder: &Path) -> io::Result<u64> {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    if rustix::fs::statfs(folder)?.f_type != TMPFS_MAGIC {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let total = rustix::fs::statvfs(folder)?;
    let used = (total.f_blocks - total.f_bfree) * total.f_frsize;
    let mut seen = 0;
    for file in std::fs::read_dir(folder)? {
        seen += file?.metadata()?.blocks() * 512;
    }
    Ok(used.saturating_sub(seen))
}
