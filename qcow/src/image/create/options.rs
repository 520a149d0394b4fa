//! The properties of a new image, and why it cannot be created.

use block::IoError;

use crate::format::{ClusterBits, CompressionType, HeaderError, RefcountOrder, Version};
#[cfg(doc)]
use crate::luks;

/// The part of the disk whose clusters are allocated at creation.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Preallocation {
    /// No cluster.
    #[default]
    Off,
    /// Every cluster is mapped; the host has reserved no space for it.
    Metadata,
    /// As [`Self::Metadata`], and the host has reserved the space.
    Falloc,
    /// As [`Self::Metadata`], and the host has written zeros.
    Full,
}

impl Preallocation {
    /// Returns the mode with QEMU's name `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "off" => Some(Self::Off),
            "metadata" => Some(Self::Metadata),
            "falloc" => Some(Self::Falloc),
            "full" => Some(Self::Full),
            _ => None,
        }
    }

    /// Returns QEMU's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Metadata => "metadata",
            Self::Falloc => "falloc",
            Self::Full => "full",
        }
    }
}

/// The properties of a new image.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// The guest disk's size in bytes; rounded up to whole sectors. For a backing file's size, the caller passes the
    /// size of the backing disk.
    pub size: u64,
    /// The cluster size in bytes.
    pub cluster_size: u64,
    /// The edition of the format.
    pub version: Version,
    /// The refcount width in bits.
    pub refcount_bits: u32,
    /// The backing file's name, as it is to be written.
    pub backing_file: Option<String>,
    /// The backing file's format; needed with a backing file, as nothing is ever probed.
    pub backing_format: Option<String>,
    /// Map each thirty-second part of a cluster by itself (extended L2 entries). Version 3 and clusters of 16 KiB or more.
    pub extended_l2: bool,
    /// Allow refcount updates to be postponed.
    pub lazy_refcounts: bool,
    /// The compression of compressed clusters.
    pub compression: CompressionType,
    /// The part of the disk whose clusters are allocated at creation.
    pub preallocation: Preallocation,
    /// The file of its own for the guest's bytes; see [`create_with_data_file`](super::create_with_data_file).
    pub data_file: Option<NewDataFile>,
    /// A LUKS header with all key material, from [`luks::create`]: the guest's data is to be encrypted
    /// with its key. It is made beforehand, as that takes seconds of CPU.
    pub luks_header: Option<Vec<u8>>,
}

/// The external data file of a new image. Version 3 only.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NewDataFile {
    /// The name, as it is to be written.
    pub name: String,
    /// The file is the disk byte by byte (raw). Every cluster is mapped then.
    pub raw: bool,
    /// The file's bytes become the disk's. Every cluster is mapped then. Otherwise the file must be empty, unless it is a
    /// block device.
    pub keep: bool,
}

impl NewDataFile {
    pub(super) fn maps_all(&self) -> bool {
        self.raw || self.keep
    }
}

impl CreateOptions {
    /// Returns the defaults of `qemu-img create`: version 3, 64 KiB clusters, 16-bit refcounts.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            size: size_bytes,
            cluster_size: ClusterBits::DEFAULT.size(),
            version: Version::V3,
            refcount_bits: RefcountOrder::DEFAULT.bits(),
            backing_file: None,
            backing_format: None,
            extended_l2: false,
            lazy_refcounts: false,
            compression: CompressionType::Deflate,
            preallocation: Preallocation::Off,
            data_file: None,
            luks_header: None,
        }
    }
}

/// An image could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// An option has an invalid value.
    #[error("{option}={value}: expected {expected}")]
    Option {
        /// The option's name, as on the command line.
        option: &'static str,
        /// The value found.
        value: String,
        /// The values allowed.
        expected: String,
    },
    /// Names and tables do not fit in the header.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The host failed.
    #[error("cannot write {what} at {offset:#x}")]
    Io {
        /// The structure.
        what: &'static str,
        /// The offset, in bytes.
        offset: u64,
        /// The host's error.
        #[source]
        source: IoError,
    },
}

impl CreateError {
    pub(super) fn option(option: &'static str, value: impl ToString, expected: impl Into<String>) -> Self {
        Self::Option {
            option,
            value: value.to_string(),
            expected: expected.into(),
        }
    }

    pub(super) fn io(what: &'static str, offset: u64) -> impl FnOnce(IoError) -> Self {
        move |source| Self::Io { what, offset, source }
    }
}
