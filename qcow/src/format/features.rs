//! Feature bits and the header's choices of compression and encryption. Spec: "Header", bytes 32..36, 72..96 and 104;
//! "Feature name table".
//!
//! Unknown bits are kept as they are, so that a rewrite loses nothing.

use std::fmt;

bitflags::bitflags! {
    /// Bits a reader must understand before it may touch the image (header bytes 72..80).
    #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
    pub struct Incompatible: u64 {
        /// Refcounts may be too low; rebuild them before writing.
        const DIRTY = 1 << 0;
        /// Any structure may be wrong; do not write.
        const CORRUPT = 1 << 1;
        /// Guest data is in another file.
        const EXTERNAL_DATA = 1 << 2;
        /// Compressed clusters are not deflate; see [`CompressionType`].
        const COMPRESSION_TYPE = 1 << 3;
        /// L2 entries are 16 bytes and describe 32 subclusters each.
        const EXTENDED_L2 = 1 << 4;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// Bits that any program may ignore (header bytes 80..88).
    #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
    pub struct Compatible: u64 {
        /// Refcount updates may be postponed while [`Incompatible::DIRTY`] is set.
        const LAZY_REFCOUNTS = 1 << 0;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// Bits a writer must clear unless it keeps their promise (header bytes 88..96).
    #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
    pub struct Autoclear: u64 {
        /// The bitmaps extension agrees with the image.
        const BITMAPS = 1 << 0;
        /// The external data file reads as a raw image.
        const RAW_EXTERNAL_DATA = 1 << 1;
        const _ = !0;
    }
}

impl Autoclear {
    /// Every bit this edition of the format defines.
    pub const DEFINED: Self = Self::BITMAPS.union(Self::RAW_EXTERNAL_DATA);

    /// Returns the bits that the format does not define.
    pub const fn unknown(self) -> Self {
        self.difference(Self::DEFINED)
    }
}

impl Incompatible {
    /// Every bit this edition of the format defines.
    pub const DEFINED: Self = Self::DIRTY
        .union(Self::CORRUPT)
        .union(Self::EXTERNAL_DATA)
        .union(Self::COMPRESSION_TYPE)
        .union(Self::EXTENDED_L2);

    /// Returns the bits that the format does not define.
    pub const fn unknown(self) -> Self {
        self.difference(Self::DEFINED)
    }
}

/// The compression of compressed clusters; one choice for the whole image.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum CompressionType {
    /// Raw deflate, QEMU's `zlib`.
    #[default]
    Deflate,
    /// Zstandard frames.
    Zstd,
}

impl CompressionType {
    /// Parses the header field `compression_type`.
    pub const fn parse(field: u8) -> Option<Self> {
        match field {
            0 => Some(Self::Deflate),
            1 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Returns the header field.
    pub const fn number(self) -> u8 {
        match self {
            Self::Deflate => 0,
            Self::Zstd => 1,
        }
    }

    /// Returns QEMU's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Deflate => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

impl fmt::Display for CompressionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The encryption of guest data.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum CryptMethod {
    /// No encryption.
    #[default]
    None,
    /// AES-CBC, long deprecated.
    Aes,
    /// LUKS.
    Luks,
}

impl CryptMethod {
    /// Parses the header field `crypt_method`.
    pub const fn parse(field: u32) -> Option<Self> {
        match field {
            0 => Some(Self::None),
            1 => Some(Self::Aes),
            2 => Some(Self::Luks),
            _ => None,
        }
    }

    /// Returns the header field.
    pub const fn number(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Aes => 1,
            Self::Luks => 2,
        }
    }

    /// Returns QEMU's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Aes => "aes",
            Self::Luks => "luks",
        }
    }
}

impl fmt::Display for CryptMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A well-formed image that this crate cannot serve; none of it may be read as guest data.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Unsupported {
    /// Incompatible feature bits the format does not define.
    #[error("the image needs unknown features: {names} (header byte 72, bits {bits:#x})")]
    UnknownFeatures {
        /// The unknown bits.
        bits: u64,
        /// Their names, from the image's own feature name table if it has them.
        names: String,
    },
    /// Encrypted guest data in an external data file.
    #[error(
        "the image is encrypted with {method} (header byte 32) and has an external data file, which is not supported together"
    )]
    EncryptedDataFile {
        /// The method.
        method: CryptMethod,
    },
}
