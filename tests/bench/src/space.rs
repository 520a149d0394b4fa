//! Giving an image's space back without waiting for minutes.
//!
//! An image that was written in places is thousands of extents, and a file system mounted with `discard`
//! sends one discard for each when the file goes: about a millisecond apiece. Filling the gaps first
//! joins the extents, and a handful of discards remains.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use rustix::fs::{FallocateFlags, SeekFrom};

/// The bytes whose gaps are filled at a time.
const PIECE_BYTES: u64 = 1 << 30;

/// Removes the file at `path`, if there is one.
///
/// # Errors
///
/// If it cannot be removed.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let len = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        facts => facts?.len(),
    };
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut at = 0;
    // A sparse tebibyte has no room to be filled: piece by piece.
    while let Ok(data) = rustix::fs::seek(&file, SeekFrom::Data(at)) {
        at = data / PIECE_BYTES * PIECE_BYTES;
        let piece = PIECE_BYTES.min(len - at);
        let (fill, free) = (FallocateFlags::ZERO_RANGE, FallocateFlags::PUNCH_HOLE);
        // Where it is not supported, or the disk is full, removing takes as long as it takes.
        let _filled = rustix::fs::fallocate(&file, fill | FallocateFlags::KEEP_SIZE, at, piece);
        if rustix::fs::fallocate(&file, free | FallocateFlags::KEEP_SIZE, at, piece).is_err() {
            break;
        }
        at += piece;
    }
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn remove_takes_sparse_and_missing_files() -> io::Result<()> {
        let path = std::env::temp_dir().join(format!("ringdisk-bench-space-{}", std::process::id()));
        let file = fs::File::create(&path)?;
        file.write_at(b"x", 1 << 20)?;
        remove(&path)?;
        assert!(!path.exists());
        remove(&path)
    }
}
