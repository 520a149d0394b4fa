//! The header as it is in the file: the fields that change while an image exists, and all bytes that this crate does not
//! know. Spec: "Header", "Header extensions".
//!
//! Invariant: the fields that change lie in the first 512 bytes, so that one write of a sector changes any number of them
//! at once. No other byte of the header changes, but for a copy of the backing file's name ([`super::BitmapsLayout`]).

use super::header::at;
use super::{Autoclear, Header, HeaderError, HostOffset, Incompatible, Version};

/// The header cluster of an image: fields, extensions, backing file name, and whatever else is there.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct HeaderFields(pub(super) Vec<u8>);

impl HeaderFields {
    /// The length of the first sector, in bytes.
    pub(crate) const BYTES: usize = 512;

    /// Takes over the first bytes of an image: its first cluster, or less if the file is shorter.
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().max(Self::BYTES), 0);
        Self(bytes)
    }

    /// Returns the bytes to write at the beginning of the file: all that may have changed.
    pub(crate) fn first_sector(&self) -> &[u8] {
        self.0.get(..Self::BYTES).unwrap_or_default()
    }

    /// Decodes the header as it is now.
    ///
    /// # Errors
    ///
    /// [`HeaderError`], as for [`Header::decode`].
    pub(crate) fn decode(&self) -> Result<Header, HeaderError> {
        Header::decode(&self.0)
    }

    fn is_v3(&self) -> bool {
        self.u32_at(at::VERSION) == Version::V3.number()
    }

    pub(super) fn u32_at(&self, at: usize) -> u32 {
        let bytes = self.0.get(at..).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u32::from_be_bytes(*bytes))
    }

    pub(super) fn u64_at(&self, at: usize) -> u64 {
        let bytes = self.0.get(at..).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }

    pub(super) fn put<const N: usize>(&mut self, at: usize, value: [u8; N]) {
        if let Some(place) = self.0.get_mut(at..).and_then(|bytes| bytes.first_chunk_mut()) {
            *place = value;
        }
    }

    /// Clears the autoclear bits that the format does not define, as it demands of every writer. Version 2 has none.
    pub(crate) fn disown_unknown(&mut self) {
        if self.is_v3() {
            let bits = self.autoclear();
            self.set_autoclear(bits.difference(bits.unknown()));
        }
    }

    /// Returns the incompatible features; none in version 2.
    pub(crate) fn incompatible(&self) -> Incompatible {
        if self.is_v3() {
            Incompatible::from_bits_retain(self.u64_at(at::INCOMPATIBLE_FEATURES))
        } else {
            Incompatible::empty()
        }
    }

    /// Replaces the incompatible features. Nothing changes in version 2, which has no such field.
    pub(crate) fn set_incompatible(&mut self, features: Incompatible) {
        if self.is_v3() {
            self.put(at::INCOMPATIBLE_FEATURES, features.bits().to_be_bytes());
        }
    }

    /// Returns the autoclear features; none in version 2.
    pub(crate) fn autoclear(&self) -> Autoclear {
        match self.is_v3() {
            true => Autoclear::from_bits_retain(self.u64_at(at::AUTOCLEAR_FEATURES)),
            false => Autoclear::empty(),
        }
    }

    /// Replaces the autoclear features. Nothing changes in version 2, which has no such field.
    pub(crate) fn set_autoclear(&mut self, features: Autoclear) {
        if self.is_v3() {
            self.put(at::AUTOCLEAR_FEATURES, features.bits().to_be_bytes());
        }
    }

    /// Sets the offset of the refcount table and its number of clusters.
    pub(crate) fn set_refcount_table(&mut self, offset: HostOffset, clusters: u32) {
        self.put(at::REFCOUNT_TABLE_OFFSET, offset.bytes().to_be_bytes());
        self.put(at::REFCOUNT_TABLE_CLUSTERS, clusters.to_be_bytes());
    }

    /// Returns the number of internal snapshots.
    pub(crate) fn snapshot_count(&self) -> u32 {
        self.u32_at(at::NB_SNAPSHOTS)
    }

    /// Sets the number of internal snapshots and the offset of their table.
    pub(crate) fn set_snapshots(&mut self, count: u32, offset: HostOffset) {
        self.put(at::NB_SNAPSHOTS, count.to_be_bytes());
        self.put(at::SNAPSHOTS_OFFSET, offset.bytes().to_be_bytes());
    }

    /// Sets the disk's size in bytes, and the offset of its L1 table and its number of entries.
    pub(crate) fn set_disk(&mut self, size_bytes: u64, l1_offset: HostOffset, l1_entries: u32) {
        self.put(at::SIZE, size_bytes.to_be_bytes());
        self.put(at::L1_SIZE, l1_entries.to_be_bytes());
        self.put(at::L1_TABLE_OFFSET, l1_offset.bytes().to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Extension, Header};

    /// A header as `image create` writes it.
    fn fields(version: u32) -> HeaderFields {
        let mut bytes = [0; 512];
        bytes[..4].copy_from_slice(b"QFI\xfb");
        bytes[at::VERSION..][..4].copy_from_slice(&version.to_be_bytes());
        bytes[at::CLUSTER_BITS..][..4].copy_from_slice(&16_u32.to_be_bytes());
        if version == 3 {
            bytes[at::REFCOUNT_ORDER..][..4].copy_from_slice(&4_u32.to_be_bytes());
            bytes[at::HEADER_LENGTH..][..4].copy_from_slice(&104_u32.to_be_bytes());
        }
        HeaderFields::new(&bytes)
    }

    #[test]
    fn header_fields_decode_as_they_were_set() {
        let mut fields = fields(3);
        fields.set_incompatible(Incompatible::CORRUPT | Incompatible::DIRTY);
        fields.set_autoclear(Autoclear::BITMAPS);
        fields.set_refcount_table(HostOffset::new(0x3_0000), 7);
        fields.set_disk(5 << 30, HostOffset::new(0x5_0000), 10);
        fields.set_snapshots(3, HostOffset::new(0x7_0000));
        let header = fields.decode().expect("a header");
        assert_eq!(header.incompatible, Incompatible::CORRUPT | Incompatible::DIRTY);
        assert_eq!(fields.incompatible(), header.incompatible);
        assert_eq!(header.autoclear, Autoclear::BITMAPS);
        assert_eq!(header.refcount_table_offset, HostOffset::new(0x3_0000));
        assert_eq!(header.refcount_table_clusters, 7);
        assert_eq!((header.virtual_size, header.l1_entries), (5 << 30, 10));
        assert_eq!(header.l1_offset, HostOffset::new(0x5_0000));
        assert_eq!((header.snapshot_count, fields.snapshot_count()), (3, 3));
        assert_eq!(header.snapshot_table_offset, HostOffset::new(0x7_0000));
    }

    /// An unknown extension reaches past the first sector, and the backing file's name lies behind it.
    #[test]
    fn decode_sees_what_lies_past_the_first_sector_after_fields_change() {
        let mut bytes = fields(3).0;
        bytes.resize(1 << 16, 0);
        let unknown: Vec<u8> = (0..1000_u32).map(|at| at as u8 | 1).collect();
        let mut extensions = [0x1234_5678_u32, 1000].map(u32::to_be_bytes).concat();
        extensions.extend_from_slice(&unknown);
        bytes[104..][..extensions.len()].copy_from_slice(&extensions);
        bytes[2000..][..4].copy_from_slice(b"base");
        bytes[at::BACKING_FILE_OFFSET..][..8].copy_from_slice(&2000_u64.to_be_bytes());
        bytes[at::BACKING_FILE_SIZE..][..4].copy_from_slice(&4_u32.to_be_bytes());
        let mut fields = HeaderFields::new(&bytes);
        fields.set_disk(1 << 20, HostOffset::new(0x5_0000), 1);
        let header = fields.decode().expect("a header");
        assert_eq!(header.backing_name.as_deref(), Some(&b"base"[..]));
        let kept = Extension::Unknown {
            kind: 0x1234_5678,
            data: unknown,
        };
        assert_eq!(header.extensions, [kept]);
        bytes[..HeaderFields::BYTES].copy_from_slice(fields.first_sector());
        assert_eq!(fields.0, bytes, "only the first sector changes");
    }

    #[test]
    fn header_fields_of_version_2_set_no_feature_bits() {
        let mut fields = fields(2);
        let before = fields.clone();
        fields.set_incompatible(Incompatible::CORRUPT);
        fields.set_autoclear(Autoclear::BITMAPS);
        fields.disown_unknown();
        assert_eq!(fields, before);
        assert_eq!(fields.incompatible(), Incompatible::empty());
    }

    #[test]
    fn disown_unknown_clears_only_unknown_autoclear_bits() {
        let mut fields = fields(3);
        fields.set_autoclear(Autoclear::from_bits_retain(u64::MAX));
        fields.disown_unknown();
        let known = Autoclear::from_bits_retain(u64::MAX);
        let header = Header::decode(fields.first_sector()).expect("a header");
        assert_eq!(header.autoclear, known.difference(known.unknown()));
    }
}
