//! A folder of a test's own, for its images, sockets and logs.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::Error;

/// A temporary folder, removed when dropped. With `RINGDISK_LAB_KEEP` set it stays, to look inside.
///
/// It lies in `$TMPDIR` (`/tmp`): short enough a path for sockets, whose limit is 107 bytes.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
}

impl Scratch {
    /// Makes a fresh folder.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the temporary folder is not writable.
    pub fn new() -> Result<Self, Error> {
        let mut folder = tempfile::Builder::new()
            .prefix("ringdisk-lab-")
            .tempdir()
            .map_err(|source| Error::File {
                action: "make a folder in",
                path: std::env::temp_dir(),
                source,
            })?;
        folder.disable_cleanup(std::env::var_os("RINGDISK_LAB_KEEP").is_some());
        Ok(Self { folder })
    }

    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The path of a file called `name` in the folder; nothing is created.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}
