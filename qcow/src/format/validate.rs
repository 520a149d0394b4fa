//! Checks of a header's values against the format's rules and QEMU's limits, and of this crate's support for the
//! image.
//!
//! The header alone decides everything here, plus the file's length where a table must lie inside it; nothing is
//! allocated. After [`Header::validate`], table sizes are bounded by the constants below, and table ends do not
//! overflow.

use super::extension::FeatureKind;
use super::header::{CompressionType, CryptMethod, HeaderError, Incompatible, Unsupported, at};
use super::l1::{L1_ENTRY_SIZE, L1_TABLE_MAX_BYTES};
use super::positions::FILE_OFFSET_MAX;
use super::refcount::REFCOUNT_TABLE_MAX_BYTES;
use super::{Header, HostOffset};

/// QEMU's limit on the number of snapshots, and ours.
pub const SNAPSHOTS_MAX: u32 = 65_536;
/// QEMU's limit on the size of the snapshot table, in bytes, and ours.
pub const SNAPSHOT_TABLE_MAX_BYTES: u64 = 64 << 20;
/// The fewest cluster bits an image with extended L2 entries may have.
pub(crate) const EXTENDED_L2_CLUSTER_BITS_MIN: u32 = 14;

impl Header {
    /// Checks every field against the format's rules and QEMU's limits.
    ///
    /// # Errors
    ///
    /// [`HeaderError::Field`] for the first field that breaks one.
    pub fn validate(&self) -> Result<(), HeaderError> {
        self.validate_size()?;
        self.validate_l1()?;
        self.validate_refcount_table()?;
        self.validate_snapshot_table()?;
        self.validate_features()?;
        self.validate_data_file()
    }

    /// Checks as [`Self::validate`] does, but the refcount table may be missing, so that tools can rebuild it.
    ///
    /// # Errors
    ///
    /// As [`Self::validate`].
    pub fn validate_except_missing_refcount_table(&self) -> Result<(), HeaderError> {
        match self.refcount_table_clusters {
            0 => Self {
                refcount_table_clusters: 1,
                refcount_table_offset: self.any_aligned_offset(),
                ..self.clone()
            }
            .validate(),
            _ => self.validate(),
        }
    }

    /// Returns some valid place for a table.
    fn any_aligned_offset(&self) -> HostOffset {
        HostOffset::new(self.cluster_bits.size())
    }

    /// Checks that the tables lie inside a file of `file_len` bytes. QEMU writes a table's last cluster whole, but
    /// only the entries that the header counts must be there.
    ///
    /// # Errors
    ///
    /// [`HeaderError::Truncated`] for the first table that does not.
    pub fn validate_within(&self, file_len: u64) -> Result<(), HeaderError> {
        let tables = [
            (
                "the refcount table",
                self.refcount_table_offset,
                self.refcount_table_bytes(),
            ),
            ("the L1 table", self.l1_offset, self.l1_bytes()),
        ];
        for (what, offset, bytes) in tables {
            let needed = offset.bytes().saturating_add(bytes);
            if bytes != 0 && needed > file_len {
                return Err(HeaderError::Truncated {
                    what,
                    needed,
                    available: file_len,
                });
            }
        }
        Ok(())
    }

    /// Returns the active L1 table's size in bytes.
    pub fn l1_bytes(&self) -> u64 {
        u64::from(self.l1_entries).saturating_mul(L1_ENTRY_SIZE)
    }

    /// Returns the refcount table's size in bytes.
    pub fn refcount_table_bytes(&self) -> u64 {
        u64::from(self.refcount_table_clusters).saturating_mul(self.cluster_bits.size())
    }

    fn validate_size(&self) -> Result<(), HeaderError> {
        if self.virtual_size > FILE_OFFSET_MAX {
            let expected = format!("at most {FILE_OFFSET_MAX:#x}");
            return Err(HeaderError::field("size", at::SIZE, self.virtual_size, expected));
        }
        Ok(())
    }

    fn validate_l1(&self) -> Result<(), HeaderError> {
        let found = u64::from(self.l1_entries);
        let field = |expected: String| HeaderError::field("l1_size", at::L1_SIZE, found, expected);
        let bytes = self.l1_bytes();
        if bytes > L1_TABLE_MAX_BYTES {
            return Err(field(format!(
                "at most {} entries, 32 MiB",
                L1_TABLE_MAX_BYTES / L1_ENTRY_SIZE
            )));
        }
        let needed = self.virtual_size.div_ceil(self.geometry().l2_table_span());
        if found < needed {
            return Err(field(format!(
                "at least {needed}, for a disk of {:#x} bytes",
                self.virtual_size
            )));
        }
        self.validate_table("l1_table_offset", at::L1_TABLE_OFFSET, self.l1_offset, bytes)
    }

    fn validate_refcount_table(&self) -> Result<(), HeaderError> {
        let clusters_max = REFCOUNT_TABLE_MAX_BYTES.wrapping_shr(self.cluster_bits.get());
        let found = u64::from(self.refcount_table_clusters);
        if found == 0 || found > clusters_max {
            let (field, at) = ("refcount_table_clusters", at::REFCOUNT_TABLE_CLUSTERS);
            return Err(HeaderError::field(
                field,
                at,
                found,
                format!("1 to {clusters_max}, 8 MiB"),
            ));
        }
        let (offset, bytes) = (self.refcount_table_offset, self.refcount_table_bytes());
        self.validate_table("refcount_table_offset", at::REFCOUNT_TABLE_OFFSET, offset, bytes)
    }

    fn validate_snapshot_table(&self) -> Result<(), HeaderError> {
        if self.snapshot_count > SNAPSHOTS_MAX {
            let found = u64::from(self.snapshot_count);
            let expected = format!("at most {SNAPSHOTS_MAX}");
            return Err(HeaderError::field(
                "nb_snapshots",
                at::NB_SNAPSHOTS,
                found,
                expected,
            ));
        }
        // An entry has at least 40 bytes; more is known when the entries are read.
        let bytes = u64::from(self.snapshot_count).saturating_mul(40);
        self.validate_table(
            "snapshots_offset",
            at::SNAPSHOTS_OFFSET,
            self.snapshot_table_offset,
            bytes,
        )
    }

    /// Checks that a table starts on a cluster boundary, not in the header's cluster, and ends within the largest
    /// file. An empty table may be anywhere aligned.
    fn validate_table(
        &self,
        field: &'static str,
        at: usize,
        offset: HostOffset,
        bytes: u64,
    ) -> Result<(), HeaderError> {
        let cluster_size = self.cluster_bits.size();
        let found = offset.bytes();
        if !offset.is_aligned_to(cluster_size) {
            return Err(HeaderError::field(
                field,
                at,
                found,
                format!("a multiple of {cluster_size:#x}"),
            ));
        }
        if bytes != 0 && found == 0 {
            return Err(HeaderError::field(
                field,
                at,
                found,
                "a place outside the header's cluster",
            ));
        }
        if found.checked_add(bytes).is_none_or(|end| end > FILE_OFFSET_MAX) {
            let expected = format!("at most {:#x}", FILE_OFFSET_MAX.saturating_sub(bytes));
            return Err(HeaderError::field(field, at, found, expected));
        }
        Ok(())
    }

    fn validate_features(&self) -> Result<(), HeaderError> {
        let bit = self.incompatible.contains(Incompatible::COMPRESSION_TYPE);
        let number = u64::from(self.compression.number());
        let (field, at) = ("compression_type", at::COMPRESSION_TYPE);
        if bit && self.compression == CompressionType::Deflate {
            return Err(HeaderError::field(
                field,
                at,
                number,
                "not 0: the compression type bit is set",
            ));
        }
        if !bit && self.compression != CompressionType::Deflate {
            return Err(HeaderError::field(
                field,
                at,
                number,
                "0: the compression type bit is not set",
            ));
        }
        let bits = self.cluster_bits.get();
        if self.incompatible.contains(Incompatible::EXTENDED_L2) && bits < EXTENDED_L2_CLUSTER_BITS_MIN {
            let expected = "at least 14, for extended L2 entries";
            return Err(HeaderError::field(
                "cluster_bits",
                at::CLUSTER_BITS,
                u64::from(bits),
                expected,
            ));
        }
        Ok(())
    }

    /// Checks that this crate can serve the image: no unknown incompatible feature, no encrypted data file.
    ///
    /// # Errors
    ///
    /// [`Unsupported`], naming the feature.
    pub fn require_supported(&self) -> Result<(), Unsupported> {
        let unknown = self.incompatible.unknown().bits();
        if unknown != 0 {
            return Err(Unsupported::UnknownFeatures {
                bits: unknown,
                names: self.incompatible_names(unknown),
            });
        }
        if self.crypt_method != CryptMethod::None && self.has_data_file() {
            return Err(Unsupported::EncryptedDataFile {
                method: self.crypt_method,
            });
        }
        Ok(())
    }

    /// Returns names for incompatible feature bits, from the image's table if it has them.
    fn incompatible_names(&self, bits: u64) -> String {
        let set = (0u8..64).filter(|&bit| bits & 1u64.wrapping_shl(u32::from(bit)) != 0);
        let names = set.map(|bit| match self.feature_name(FeatureKind::Incompatible, bit) {
            Some(name) => name,
            None => format!("bit {bit}"),
        });
        names.collect::<Vec<_>>().join(", ")
    }
}
