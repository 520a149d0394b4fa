//! The state of a file on its file system, for tests that a program has not touched one.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Files up to this length are compared byte by byte; of a longer one, the times and allocated blocks stand for its bytes.
const COMPARED_BYTES_MAX: u64 = 16 << 20;

/// The length, allocated blocks, modification and change time of a file, and the bytes of a short one.
///
/// A write that leaves every byte as it was still changes the times, and so does `fallocate`.
#[derive(Clone, Eq, PartialEq)]
pub struct Fingerprint {
    len: u64,
    blocks: u64,
    times: [i64; 4],
    bytes: Vec<u8>,
}

impl Fingerprint {
    /// Takes the fingerprint of the file `path`.
    ///
    /// # Errors
    ///
    /// The error of the host.
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        let short = metadata.len() < COMPARED_BYTES_MAX;
        Ok(Self {
            len: metadata.len(),
            blocks: metadata.blocks(),
            times: [
                metadata.mtime(),
                metadata.mtime_nsec(),
                metadata.ctime(),
                metadata.ctime_nsec(),
            ],
            bytes: if short { std::fs::read(path)? } else { Vec::new() },
        })
    }
}

impl std::fmt::Debug for Fingerprint {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Fingerprint")
            .field("len", &self.len)
            .field("blocks", &self.blocks)
            .field("times", &self.times)
            .finish_non_exhaustive()
    }
}
