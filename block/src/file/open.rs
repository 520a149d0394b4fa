//! Opening a host file as an image: the checks on its kind, and the errors that name it.
//!
//! Invariant: only regular files and block devices are images, and their descriptors are blocking.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::flags::set_for_io;
use super::inherited::{self, DescriptorRefusal};

/// Options for opening an [`ImageFile`](super::ImageFile).
#[derive(Clone, Copy, Debug, Default)]
pub struct FileOptions {
    /// Open for writing too.
    pub write: bool,
    /// Bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
}

/// Error: a file could not be opened as an image.
#[derive(Debug, thiserror::Error)]
pub enum OpenFileError {
    /// The kernel refused.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The path names a descriptor that was not inherited, or that allows less than is requested.
    #[error("cannot open {}: {refusal}", path.display())]
    Descriptor {
        /// The path, `/dev/fd/N`.
        path: PathBuf,
        /// The reason.
        refusal: DescriptorRefusal,
    },
    /// Neither a regular file nor a block device.
    #[error("{} is neither a regular file nor a block device", path.display())]
    WrongKind {
        /// The file.
        path: PathBuf,
    },
    /// No temporary file could be made.
    #[error("cannot make a temporary file in {}", folder.display())]
    Temporary {
        /// The folder.
        folder: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The file system of the folder has no unnamed files.
    #[error(
        "the file system of {} has no unnamed files (O_TMPFILE); choose a folder on ext4, XFS, Btrfs or tmpfs",
        folder.display()
    )]
    NoUnnamedFiles {
        /// The folder.
        folder: PathBuf,
    },
    /// Direct I/O was requested on a file system without it.
    #[error("{} is on a file system without direct I/O; use direct=off", path.display())]
    NoDirectIo {
        /// The file.
        path: PathBuf,
    },
}

/// Opens the file at `path`. Returns it, and true if it is a block device.
pub(super) fn open(path: &Path, options: FileOptions) -> Result<(File, bool), OpenFileError> {
    inherited::check(path, options.write).map_err(|refusal| OpenFileError::Descriptor {
        path: path.to_owned(),
        refusal,
    })?;
    let open = |source| OpenFileError::Open {
        path: path.to_owned(),
        source,
    };
    let mut flags = libc::O_CLOEXEC;
    if options.direct {
        flags |= libc::O_DIRECT;
    }
    let opened = OpenOptions::new()
        .read(true)
        .write(options.write)
        .custom_flags(flags | libc::O_NONBLOCK)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if options.direct && error.raw_os_error() == Some(libc::EINVAL) => {
            return Err(OpenFileError::NoDirectIo {
                path: path.to_owned(),
            });
        }
        Err(error) => return Err(open(error)),
    };
    let kind = file.metadata().map_err(open)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(OpenFileError::WrongKind {
            path: path.to_owned(),
        });
    }
    // Opened with `O_NONBLOCK` (a FIFO would hang); regular I/O must not fail with EAGAIN because of it.
    set_for_io(&file).map_err(open)?;
    Ok((file, kind.is_block_device()))
}
