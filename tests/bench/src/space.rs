//! An image's space on the disk: where it lies, and giving it back without waiting for minutes.
//!
//! Writes in place cost what the file's extents cost, and two files that one tool has filled in the same way need not have the same.
//! So files that are compared are laid out anew, one after the other, in space that was asked for at once.
//!
//! An image that was written in places is thousands of extents, and a file system mounted with `discard`
//! sends one discard for each when the file goes: about a millisecond apiece. Filling the gaps first
//! joins the extents, and a handful of discards remains.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use rustix::fs::{FallocateFlags, SeekFrom};

/// The bytes whose gaps are filled at a time.
const PIECE_BYTES: u64 = 1 << 30;

/// The bytes that are copied at a time.
const COPIED_BYTES: usize = 4 << 20;

/// Fails if the file system of `directory` has fewer than `bytes` bytes free.
///
/// # Errors
///
/// If so, with what it has, or if it cannot be asked.
pub(crate) fn require(directory: &Path, bytes: u64) -> io::Result<()> {
    let facts = rustix::fs::statvfs(directory)?;
    let free = facts.f_bavail.saturating_mul(facts.f_frsize);
    if free >= bytes {
        return Ok(());
    }
    let (shown, gib) = (directory.display(), |bytes: u64| bytes >> 30);
    Err(io::Error::new(
        io::ErrorKind::StorageFull,
        format!(
            "{shown} has {} GiB left, and a row may take {}; set RINGDISK_BENCH_DIR to a directory with more, and go on with --resume",
            gib(free),
            gib(bytes)
        ),
    ))
}

/// Replaces a file without holes by a copy with as few extents as the free space allows. Copied by reading and writing: the kernel's own
/// copy may share the old extents.
///
/// # Errors
///
/// If the disk is full, or a file cannot be read or written.
pub(crate) fn lay_out(path: &Path) -> io::Result<()> {
    let (mut old, new_path) = (File::open(path)?, path.with_extension("laid"));
    let mut new = File::create(&new_path)?;
    rustix::fs::fallocate(&new, FallocateFlags::empty(), 0, old.metadata()?.len())?;
    let mut buffer = vec![0; COPIED_BYTES];
    loop {
        match old.read(&mut buffer)? {
            0 => break,
            len => new.write_all(buffer.get(..len).unwrap_or_default())?,
        }
    }
    new.sync_all()?;
    fs::rename(new_path, path)
}

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
    fn laid_out_file_has_the_same_bytes() -> io::Result<()> {
        let path = std::env::temp_dir().join(format!("ringdisk-bench-laid-{}", std::process::id()));
        let bytes: Vec<u8> = (0..COPIED_BYTES + 4097).map(|at| (at % 251) as u8).collect();
        fs::write(&path, &bytes)?;
        lay_out(&path)?;
        let (found, rest) = (fs::read(&path)?, path.with_extension("laid").exists());
        fs::remove_file(&path)?;
        assert!(found == bytes && !rest);
        Ok(())
    }

    #[test]
    fn too_little_room_is_an_error_that_says_what_is_left() -> io::Result<()> {
        let directory = std::env::temp_dir();
        require(&directory, 1)?;
        let failed = require(&directory, u64::MAX);
        assert!(failed.is_err_and(|error| {
            error.kind() == io::ErrorKind::StorageFull && error.to_string().contains("GiB left")
        }));
        Ok(())
    }

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
