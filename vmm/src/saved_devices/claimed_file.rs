//! Files of a device's disk, as its state remembers them.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Device and inode of a file; for a block device, whatever node it is reached by, its number.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Identity {
    device: u64,
    /// `None`: it is that block device.
    inode: Option<u64>,
}

impl Identity {
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let found = fs::metadata(path)?;
        Ok(if found.file_type().is_block_device() {
            Self {
                device: found.rdev(),
                inode: None,
            }
        } else {
            Self {
                device: found.dev(),
                inode: Some(found.ino()),
            }
        })
    }
}

/// A file of a device's disk, as its server had it open.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct ClaimedFile {
    pub(crate) path: PathBuf,
    identity: Identity,
}

impl ClaimedFile {
    /// Returns the identity of the file at `path`; `None` if it cannot be read.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        // A path such as /dev/fd/3 means another file in another process.
        let path = path.canonicalize().ok()?;
        let identity = Identity::of(&path).ok()?;
        Some(Self { path, identity })
    }

    /// Returns true if this is the file that `ublk recover` would open, or the one that was moved from its path.
    pub(crate) fn is(&self, identity: Identity) -> bool {
        Identity::of(&self.path).unwrap_or(self.identity) == identity
    }
}
