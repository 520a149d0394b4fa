//! Giving an image's space back without waiting for minutes.
//!
//! An image that was written in places is thousands of extents, and a file system mounted with `discard`
//! sends one discard for each when the file goes: about a millisecond apiece. Filling the gaps first
//! joins the extents, and a handful of discards remains.
#![expect(unsafe_code, reason = "fallocate has no safe wrapper in the standard library")]

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Removes the file at `path`, if there is one.
///
/// # Errors
///
/// If it cannot be removed.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        // A sparse tebibyte has no room to be filled.
        Ok(facts) if facts.len() < 64 << 30 => fill(path, facts.len())?,
        Ok(_) => {}
    }
    fs::remove_file(path)
}

fn fill(path: &Path, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    let file = OpenOptions::new().write(true).open(path)?;
    let (mode, len) = (libc::FALLOC_FL_ZERO_RANGE, len as libc::off_t);
    // SAFETY: changes an open file of ours; touches no memory. Where it is not supported, or the disk is
    // full, removing takes as long as it takes.
    let _filled = unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, len) };
    Ok(())
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
