//! The image header: the first cluster's fields, extensions and backing file name.
//!
//! Offsets and sizes are in bytes. A field at or past `header_length` is absent. Unknown fields and extensions are
//! kept. Spec: "Header", "Additional fields", "Header padding".

use super::bytes::{array_at, u32_at, u64_at};
use super::extension::{BitmapsExtension, ExtensionError, FeatureKind};
use super::positions::SECTOR_SIZE;
use super::sizes::{ClusterBitsOutOfRange, RefcountOrderOutOfRange};
use super::{
    ClusterBits, Extension, FeatureName, Geometry, HostOffset, L2EntryWidth, RefcountOrder, Version,
};

pub use super::features::{Autoclear, Compatible, CompressionType, CryptMethod, Incompatible, Unsupported};

/// The first four bytes of an image.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Bytes in a version 2 header.
pub const V2_HEADER_LENGTH: u32 = 72;
/// The fewest bytes in a version 3 header.
pub const V3_HEADER_LENGTH_MIN: u32 = 104;
/// Bytes in the header this crate writes for new version 3 images, as QEMU does.
pub const V3_HEADER_LENGTH: u32 = 112;
/// The longest backing file name, in bytes.
pub const BACKING_NAME_MAX: u32 = 1023;

/// The offset of each field, in bytes from the start of the file, for updates in place.
pub mod at {
    #![expect(missing_docs, reason = "named after the specification's fields")]
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 4;
    pub const BACKING_FILE_OFFSET: usize = 8;
    pub const BACKING_FILE_SIZE: usize = 16;
    pub const CLUSTER_BITS: usize = 20;
    pub const SIZE: usize = 24;
    pub const CRYPT_METHOD: usize = 32;
    pub const L1_SIZE: usize = 36;
    pub const L1_TABLE_OFFSET: usize = 40;
    pub const REFCOUNT_TABLE_OFFSET: usize = 48;
    pub const REFCOUNT_TABLE_CLUSTERS: usize = 56;
    pub const NB_SNAPSHOTS: usize = 60;
    pub const SNAPSHOTS_OFFSET: usize = 64;
    pub const INCOMPATIBLE_FEATURES: usize = 72;
    pub const COMPATIBLE_FEATURES: usize = 80;
    pub const AUTOCLEAR_FEATURES: usize = 88;
    pub const REFCOUNT_ORDER: usize = 96;
    pub const HEADER_LENGTH: usize = 100;
    pub const COMPRESSION_TYPE: usize = 104;
}

/// All contents of the first cluster.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Header {
    /// The edition of the format.
    pub version: Version,
    /// The cluster size.
    pub cluster_bits: ClusterBits,
    /// The guest disk's size in bytes, as written; see [`Header::geometry`].
    pub virtual_size: u64,
    /// The encryption of guest data.
    pub crypt_method: CryptMethod,
    /// The number of entries of the active L1 table.
    pub l1_entries: u32,
    /// The offset of the active L1 table.
    pub l1_offset: HostOffset,
    /// The offset of the refcount table.
    pub refcount_table_offset: HostOffset,
    /// The number of clusters that the refcount table fills.
    pub refcount_table_clusters: u32,
    /// The number of internal snapshots.
    pub snapshot_count: u32,
    /// The offset of the snapshot table.
    pub snapshot_table_offset: HostOffset,
    /// Features a reader must understand; none in version 2.
    pub incompatible: Incompatible,
    /// Features any program may ignore; none in version 2.
    pub compatible: Compatible,
    /// Promises a writer must keep or withdraw; none in version 2.
    pub autoclear: Autoclear,
    /// The width of the reference counts.
    pub refcount_order: RefcountOrder,
    /// The length of the fixed fields in bytes: 72 in version 2.
    pub header_length: u32,
    /// The compression of compressed clusters.
    pub compression: CompressionType,
    /// The header's bytes after `compression_type` and up to `header_length`, kept as they are.
    pub unknown_fields: Vec<u8>,
    /// The header extensions, in order.
    pub extensions: Vec<Extension>,
    /// The backing file's name, as written; relative names are relative to the image.
    pub backing_name: Option<Vec<u8>>,
}

/// The first cluster does not hold a header this crate can trust.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum HeaderError {
    /// Not an image of this format at all.
    #[error("not a QCOW2 image: it starts with {found:02x?}; expected \"QFI\\xfb\"")]
    NotQcow2 {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// The file ends before the header does.
    #[error("the image is cut short: {what} needs {needed} bytes, {available} are there")]
    Truncated {
        /// The part that is missing.
        what: &'static str,
        /// The bytes it needs, from the start of the file.
        needed: u64,
        /// The bytes that are available.
        available: u64,
    },
    /// A field has a value the format or QEMU's limits rule out.
    #[error("{field} (header byte {at}) is {found:#x}; expected {expected}")]
    Field {
        /// The specification's name of the field.
        field: &'static str,
        /// The field's offset, in bytes.
        at: usize,
        /// The value found.
        found: u64,
        /// The values allowed.
        expected: String,
    },
    /// The cluster size is out of range.
    #[error("{0} (header byte 20)")]
    ClusterBits(#[from] ClusterBitsOutOfRange),
    /// The refcount width is out of range.
    #[error("{0} (header byte 96)")]
    RefcountOrder(#[from] RefcountOrderOutOfRange),
    /// An extension cannot be read.
    #[error(transparent)]
    Extension(#[from] ExtensionError),
    /// Header, extensions and backing file name together do not fit in the first cluster.
    #[error(
        "the header needs {needed} bytes with its extensions and backing file name; a cluster has {room}"
    )]
    TooLarge {
        /// The bytes needed.
        needed: u64,
        /// The cluster size in bytes.
        room: u64,
    },
}

impl HeaderError {
    pub(super) fn field(field: &'static str, at: usize, found: u64, expected: impl Into<String>) -> Self {
        Self::Field {
            field,
            at,
            found,
            expected: expected.into(),
        }
    }
}

/// Parses the fields of a header's first 24 bytes, which determine how much more to read.
fn prologue(bytes: &[u8]) -> Result<(Version, ClusterBits), HeaderError> {
    let cut = |needed| HeaderError::Truncated {
        what: "the header",
        needed,
        available: bytes.len() as u64,
    };
    let magic = array_at::<4>(bytes, at::MAGIC).ok_or(cut(72))?;
    if magic != MAGIC {
        return Err(HeaderError::NotQcow2 { found: magic });
    }
    let version = match u32_at(bytes, at::VERSION).ok_or(cut(72))? {
        2 => Version::V2,
        3 => Version::V3,
        found => {
            return Err(HeaderError::field(
                "version",
                at::VERSION,
                u64::from(found),
                "2 or 3",
            ));
        }
    };
    let cluster_bits = ClusterBits::parse(u32_at(bytes, at::CLUSTER_BITS).ok_or(cut(72))?)?;
    Ok((version, cluster_bits))
}

impl Header {
    /// Returns the cluster size in bytes, which is the part of the file that [`Self::decode`] needs. The file's first
    /// 24 bytes are enough.
    ///
    /// # Errors
    ///
    /// [`HeaderError`] if this is no image, or one of an unknown version or cluster size.
    pub fn peek_cluster_size(bytes: &[u8]) -> Result<u64, HeaderError> {
        prologue(bytes).map(|(_, cluster_bits)| cluster_bits.size())
    }

    /// Parses and validates the header: [`Self::decode`], then [`Self::validate`].
    ///
    /// # Errors
    ///
    /// The errors of both.
    pub fn parse(first_cluster: &[u8]) -> Result<Self, HeaderError> {
        let header = Self::decode(first_cluster)?;
        header.validate()?;
        Ok(header)
    }

    /// Reads the header from the file's first cluster (less if the file is shorter; more is ignored). Checks only as
    /// much as decoding the fields needs; see [`Self::validate`].
    ///
    /// # Errors
    ///
    /// [`HeaderError`] naming the field, its offset, the value found and the values allowed.
    pub fn decode(first_cluster: &[u8]) -> Result<Self, HeaderError> {
        let (version, cluster_bits) = prologue(first_cluster)?;
        let cluster_size = cluster_bits.size();
        let bytes = first_cluster
            .get(..cluster_size as usize)
            .unwrap_or(first_cluster);
        let cut = |what, needed| HeaderError::Truncated {
            what,
            needed,
            available: bytes.len() as u64,
        };
        let fixed_length = match version {
            Version::V2 => V2_HEADER_LENGTH,
            Version::V3 => V3_HEADER_LENGTH_MIN,
        };
        if bytes.len() < fixed_length as usize {
            return Err(cut("the header", u64::from(fixed_length)));
        }
        // Every read below is inside the length just checked; version 2 reads none past byte 72.
        let u32_field = |at| u32_at(bytes, at).unwrap_or_default();
        let u64_field = |at| u64_at(bytes, at).unwrap_or_default();
        let v3 = version == Version::V3;
        let v3_u64 = |at| if v3 { u64_field(at) } else { 0 };

        let crypt = u32_field(at::CRYPT_METHOD);
        let crypt_method = CryptMethod::parse(crypt).ok_or_else(|| {
            HeaderError::field(
                "crypt_method",
                at::CRYPT_METHOD,
                u64::from(crypt),
                "0 (none), 1 (AES) or 2 (LUKS)",
            )
        })?;
        let refcount_order = if v3 {
            RefcountOrder::parse(u32_field(at::REFCOUNT_ORDER))?
        } else {
            RefcountOrder::DEFAULT
        };
        let header_length = if v3 {
            u32_field(at::HEADER_LENGTH)
        } else {
            V2_HEADER_LENGTH
        };
        if header_length < fixed_length || u64::from(header_length) > cluster_size {
            let expected = format!("{fixed_length} to the cluster size, {cluster_size}");
            let found = u64::from(header_length);
            return Err(HeaderError::field(
                "header_length",
                at::HEADER_LENGTH,
                found,
                expected,
            ));
        }
        if header_length % 8 != 0 {
            let found = u64::from(header_length);
            return Err(HeaderError::field(
                "header_length",
                at::HEADER_LENGTH,
                found,
                "a multiple of 8",
            ));
        }
        let fields = bytes
            .get(..header_length as usize)
            .ok_or_else(|| cut("the header", u64::from(header_length)))?;
        let additional = fields.get(at::COMPRESSION_TYPE..).unwrap_or_default();
        let (compression, unknown_fields) = match additional.split_first() {
            None => (CompressionType::Deflate, Vec::new()),
            Some((&number, rest)) => {
                let compression = CompressionType::parse(number).ok_or_else(|| {
                    let expected = "0 (zlib) or 1 (zstd)";
                    HeaderError::field(
                        "compression_type",
                        at::COMPRESSION_TYPE,
                        u64::from(number),
                        expected,
                    )
                })?;
                (compression, rest.to_vec())
            }
        };

        let backing_offset = u64_field(at::BACKING_FILE_OFFSET);
        let backing_size = u32_field(at::BACKING_FILE_SIZE);
        let backing = backing_range(backing_offset, backing_size, header_length, cluster_size)?;
        let backing_name = match backing.clone() {
            None => None,
            Some(range) => {
                let name = bytes.get(range.clone());
                Some(
                    name.ok_or_else(|| cut("the backing file name", range.end as u64))?
                        .to_vec(),
                )
            }
        };
        let area_end = match backing_offset {
            0 => bytes.len(),
            offset => bytes.len().min(offset as usize),
        };
        let area = bytes.get(header_length as usize..area_end).unwrap_or_default();
        let extensions = Extension::parse_all(area, header_length as usize)?;

        Ok(Self {
            version,
            cluster_bits,
            virtual_size: u64_field(at::SIZE),
            crypt_method,
            l1_entries: u32_field(at::L1_SIZE),
            l1_offset: HostOffset::new(u64_field(at::L1_TABLE_OFFSET)),
            refcount_table_offset: HostOffset::new(u64_field(at::REFCOUNT_TABLE_OFFSET)),
            refcount_table_clusters: u32_field(at::REFCOUNT_TABLE_CLUSTERS),
            snapshot_count: u32_field(at::NB_SNAPSHOTS),
            snapshot_table_offset: HostOffset::new(u64_field(at::SNAPSHOTS_OFFSET)),
            incompatible: Incompatible::from_bits_retain(v3_u64(at::INCOMPATIBLE_FEATURES)),
            compatible: Compatible::from_bits_retain(v3_u64(at::COMPATIBLE_FEATURES)),
            autoclear: Autoclear::from_bits_retain(v3_u64(at::AUTOCLEAR_FEATURES)),
            refcount_order,
            header_length,
            compression,
            unknown_fields,
            extensions,
            backing_name: backing_name.filter(|name| !name.is_empty()),
        })
    }

    /// Encodes the header: fields, extensions, backing file name. The rest of the first cluster must be zeros.
    /// `header_length` is taken from the unknown fields, not from the field.
    ///
    /// # Errors
    ///
    /// [`HeaderError::TooLarge`] if that is more than a cluster, and [`HeaderError::Field`] if a value does not fit
    /// the version or `header_length`, or the backing name is too long.
    pub fn encode(&self) -> Result<Vec<u8>, HeaderError> {
        let mut out = self.encode_fields()?;
        for extension in &self.extensions {
            extension.encode_into(&mut out);
        }
        Extension::encode_end_into(&mut out);
        if let Some(name) = &self.backing_name {
            let size = name.len() as u64;
            if size > u64::from(BACKING_NAME_MAX) {
                return Err(backing_size_error(size));
            }
            let offset = (out.len() as u64).to_be_bytes();
            overwrite(&mut out, at::BACKING_FILE_OFFSET, &offset);
            overwrite(
                &mut out,
                at::BACKING_FILE_SIZE,
                &(name.len() as u32).to_be_bytes(),
            );
            out.extend_from_slice(name);
        }
        let (needed, room) = (out.len() as u64, self.cluster_bits.size());
        if needed > room {
            return Err(HeaderError::TooLarge { needed, room });
        }
        Ok(out)
    }

    fn encode_fields(&self) -> Result<Vec<u8>, HeaderError> {
        let mut out = Vec::with_capacity(512);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version.number().to_be_bytes());
        out.extend_from_slice(&[0; 12]); // backing file: known when the extensions are placed
        out.extend_from_slice(&self.cluster_bits.get().to_be_bytes());
        out.extend_from_slice(&self.virtual_size.to_be_bytes());
        out.extend_from_slice(&self.crypt_method.number().to_be_bytes());
        out.extend_from_slice(&self.l1_entries.to_be_bytes());
        out.extend_from_slice(&self.l1_offset.bytes().to_be_bytes());
        out.extend_from_slice(&self.refcount_table_offset.bytes().to_be_bytes());
        out.extend_from_slice(&self.refcount_table_clusters.to_be_bytes());
        out.extend_from_slice(&self.snapshot_count.to_be_bytes());
        out.extend_from_slice(&self.snapshot_table_offset.bytes().to_be_bytes());
        let order = self.refcount_order;
        if self.version == Version::V2 {
            let features = self.incompatible.bits() | self.compatible.bits() | self.autoclear.bits();
            if features != 0 {
                let (field, at) = ("incompatible_features", at::INCOMPATIBLE_FEATURES);
                return Err(HeaderError::field(
                    field,
                    at,
                    features,
                    "no features in version 2",
                ));
            }
            if order != RefcountOrder::DEFAULT {
                let found = u64::from(order.get());
                return Err(HeaderError::field(
                    "refcount_order",
                    at::REFCOUNT_ORDER,
                    found,
                    "4 in version 2",
                ));
            }
            return Ok(out);
        }
        out.extend_from_slice(&self.incompatible.bits().to_be_bytes());
        out.extend_from_slice(&self.compatible.bits().to_be_bytes());
        out.extend_from_slice(&self.autoclear.bits().to_be_bytes());
        out.extend_from_slice(&order.get().to_be_bytes());
        out.extend_from_slice(&self.header_length.to_be_bytes());
        if self.header_length > V3_HEADER_LENGTH_MIN {
            out.push(self.compression.number());
            out.extend_from_slice(&self.unknown_fields);
        }
        if out.len() as u64 != u64::from(self.header_length) || out.len() % 8 != 0 {
            let expected = format!("{}, a multiple of 8", out.len());
            let found = u64::from(self.header_length);
            return Err(HeaderError::field(
                "header_length",
                at::HEADER_LENGTH,
                found,
                expected,
            ));
        }
        Ok(out)
    }

    /// Returns the sizes from which the tables are computed. A disk size that is not a multiple of 512 bytes is
    /// rounded down to one, as in QEMU.
    pub fn geometry(&self) -> Geometry {
        let size = self.virtual_size.wrapping_sub(self.virtual_size % SECTOR_SIZE);
        let width = if self.incompatible.contains(Incompatible::EXTENDED_L2) {
            L2EntryWidth::Extended
        } else {
            L2EntryWidth::Standard
        };
        Geometry::new(self.version, self.cluster_bits, self.refcount_order, size)
            .with_l2_entry_width(width)
            .with_data_file(self.has_data_file())
    }

    /// Returns the backing file's format, if the image names one.
    pub fn backing_format(&self) -> Option<&[u8]> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::BackingFormat(name) => Some(name.as_slice()),
            _ => None,
        })
    }

    /// Returns true if the guest's bytes are in another file.
    pub const fn has_data_file(&self) -> bool {
        self.incompatible.contains(Incompatible::EXTERNAL_DATA)
    }

    /// Returns true if the guest's bytes are in another file, which is the disk byte by byte.
    pub const fn has_raw_data_file(&self) -> bool {
        self.has_data_file() && self.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA)
    }

    /// Returns the external data file's name, if the image gives one.
    pub fn data_file(&self) -> Option<&[u8]> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::DataFile(name) => Some(name.as_slice()),
            _ => None,
        })
    }

    /// Returns the place of the persistent bitmaps, if there are any.
    pub fn bitmaps(&self) -> Option<BitmapsExtension> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::Bitmaps(bitmaps) => Some(*bitmaps),
            _ => None,
        })
    }

    /// Returns the offset of the encryption header and its length in bytes, if there is one.
    pub fn crypto_header(&self) -> Option<(HostOffset, u64)> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::CryptoHeader { offset, len } => Some((*offset, *len)),
            _ => None,
        })
    }

    /// Returns the image's own name for a feature bit.
    pub fn feature_name(&self, kind: FeatureKind, bit: u8) -> Option<String> {
        let names = self.extensions.iter().find_map(|extension| match extension {
            Extension::FeatureNames(names) => Some(names),
            _ => None,
        })?;
        let matches = |name: &&FeatureName| name.kind == kind && name.bit == bit;
        names
            .iter()
            .find(matches)
            .map(FeatureName::text)
            .filter(|text| !text.is_empty())
    }
}

/// Returns the range of the backing file name, after checking that it lies in the first cluster after the header.
/// `None` without a backing file.
fn backing_range(
    offset: u64,
    size: u32,
    header_length: u32,
    cluster_size: u64,
) -> Result<Option<std::ops::Range<usize>>, HeaderError> {
    if offset == 0 {
        return Ok(None);
    }
    if offset < u64::from(header_length) || offset > cluster_size {
        let expected =
            format!("{header_length} (behind the header) to {cluster_size} (in the first cluster)");
        let (field, at) = ("backing_file_offset", at::BACKING_FILE_OFFSET);
        return Err(HeaderError::field(field, at, offset, expected));
    }
    if size > BACKING_NAME_MAX {
        return Err(backing_size_error(u64::from(size)));
    }
    match offset
        .checked_add(u64::from(size))
        .filter(|&end| end <= cluster_size)
    {
        Some(end) => Ok(Some(offset as usize..end as usize)),
        None => {
            let expected = format!(
                "at most {} (in the first cluster)",
                cluster_size.saturating_sub(offset)
            );
            let (field, at) = ("backing_file_size", at::BACKING_FILE_SIZE);
            Err(HeaderError::field(field, at, u64::from(size), expected))
        }
    }
}

fn backing_size_error(found: u64) -> HeaderError {
    let expected = format!("at most {BACKING_NAME_MAX}");
    HeaderError::field("backing_file_size", at::BACKING_FILE_SIZE, found, expected)
}

fn overwrite(out: &mut [u8], at: usize, bytes: &[u8]) {
    for (to, from) in out.iter_mut().skip(at).zip(bytes) {
        *to = *from;
    }
}

const _: () = {
    assert!(at::SNAPSHOTS_OFFSET as u32 + 8 == V2_HEADER_LENGTH);
    assert!(at::COMPRESSION_TYPE as u32 == V3_HEADER_LENGTH_MIN);
};
