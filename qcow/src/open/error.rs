//! The errors of an image that could not be opened.

use std::path::PathBuf;

use block::IoError;

use crate::engine::{SnapshotError, SnapshotSelector};
use crate::format::data_file::DataFileNameError;
use crate::format::{CryptMethod, HeaderError, Unsupported};
use crate::image::{KeysError, ReadError, RepairError};
use crate::metadata::cluster_use::StructureError;

/// An error in an image; the source of [`OpenError::Image`](crate::OpenError::Image) for a QCOW2 image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A header field is malformed, or asks for an unsupported feature.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// It uses an unsupported feature.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// Its structures contradict each other, and it may only be read.
    #[error(
        "its structures contradict each other and it may only be opened read-only; `ringdisk image check --repair \
         all` mends wrong counts, but where two structures share a cluster only what it reads as can be copied"
    )]
    Structures(#[from] StructureError),
    /// The host failed an operation.
    #[error("cannot {what}")]
    Io {
        /// The operation.
        what: &'static str,
        /// The host's error.
        #[source]
        source: IoError,
    },
    /// It has no such snapshot, or none that can be read.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// Its snapshot was to be opened for writing.
    #[error("its snapshot {0} can only be read; open it read-only, or apply it to the disk")]
    SnapshotForWriting(SnapshotSelector),
    /// It names a backing file and none is allowed.
    #[error("it has the backing file {name:?}, and backing files are not allowed; use backing_files=on")]
    BackingNotAllowed {
        /// The name, as recorded.
        name: String,
    },
    /// It does not record the format of its backing file.
    #[error(
        "it does not record the format of its backing file {name:?}, and formats are not guessed; record it \
         with `qemu-img rebase -u -b {name} -F FORMAT`"
    )]
    BackingFormatMissing {
        /// The name, as recorded.
        name: String,
    },
    /// Its backing file is not a path.
    #[error("its backing file {name:?} is not a path of a local file")]
    BackingName {
        /// The name, as recorded.
        name: String,
    },
    /// It keeps its data in another file, and none is allowed.
    #[error(
        "it keeps its data in the external file {name:?}, and data files are not allowed; use data_file=on"
    )]
    DataFileNotAllowed {
        /// The name, as recorded.
        name: String,
    },
    /// It does not say properly which file has its data.
    #[error(transparent)]
    DataFileName(#[from] DataFileNameError),
    /// Its data file is not a path.
    #[error("its external file {name:?} is not a path of a local file")]
    DataFilePath {
        /// The name, as recorded.
        name: String,
    },
    /// Its data file ends before the disk does.
    #[error("its data file {} has {len} bytes; expected at least {size}, the disk's", path.display())]
    DataFileTooShort {
        /// The data file.
        path: PathBuf,
        /// Its length, in bytes.
        len: u64,
        /// The disk's size, in bytes.
        size: u64,
    },
    /// Its LUKS header does not give the key of its data.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// It is encrypted, and no secret was given.
    #[error("it is encrypted ({method}), and no secret was given; use secret_file=PATH")]
    SecretMissing {
        /// The method.
        method: CryptMethod,
    },
    /// It is not encrypted, and a secret was given.
    #[error("it is not encrypted, and a secret was given; leave secret_file out")]
    SecretUnused,
    /// It is encrypted, and another image lies above it.
    #[error("it is encrypted ({method}), which is not supported for an image below another")]
    EncryptedBelow {
        /// The method.
        method: CryptMethod,
    },
    /// Its encryption is only for reading.
    #[error(
        "it is encrypted with aes (header byte 32), which is not safe and is only read; open it read-only, or convert it to \
         luks"
    )]
    AesForWriting,
    /// It is marked corrupt and may only be read.
    #[error(
        "it is marked corrupt and may only be opened read-only; repair it with `ringdisk image check --repair all`"
    )]
    MarkedCorrupt,
    /// Its refcounts had to be rebuilt and could not.
    #[error("it was not closed cleanly and its refcounts cannot be rebuilt")]
    Rebuild(#[from] RepairError),
}
