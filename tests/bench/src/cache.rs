//! The page cache: what a cached measurement needs in it, and what one past it must not find there.
#![expect(
    unsafe_code,
    reason = "posix_fadvise has no safe wrapper in the standard library"
)]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::images::Image;

/// Brings an image and what lies below it into the page cache, or puts it out.
///
/// # Errors
///
/// If a file cannot be read or synced.
pub(crate) fn prepare(image: &Image, cached: bool) -> io::Result<()> {
    if let Some(base) = &image.backing {
        prepare(base, cached)?;
    }
    let files = [Some(&image.path), image.data_file.as_ref()];
    files
        .into_iter()
        .flatten()
        .try_for_each(|path| prepare_file(path, cached))
}

fn prepare_file(path: &Path, cached: bool) -> io::Result<()> {
    let mut file = File::open(path)?;
    if cached {
        // A sparse tebibyte has nothing worth reading in its holes.
        if file.metadata()?.len() > 64 << 30 {
            return Ok(());
        }
        let mut buffer = vec![0; 1 << 20];
        while file.read(&mut buffer)? > 0 {}
        return Ok(());
    }
    evict(&file)
}

/// Writes a file back and drops its pages from the cache.
///
/// # Errors
///
/// If the file cannot be synced.
pub(crate) fn evict(file: &File) -> io::Result<()> {
    file.sync_all()?;
    // SAFETY: advice on an open descriptor; touches none of our memory.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
