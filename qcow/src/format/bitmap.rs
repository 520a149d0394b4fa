//! Persistent bitmaps: the directory that lists them and the tables that point to their data. Spec: "Bitmaps".

use super::bytes::{pad_to_8, u16_at, u32_at, u64_at};
use super::l1::OFFSET_MASK;
use super::{EntryError, Geometry, HostOffset};

/// Bytes in a directory entry before its extra data.
pub const BITMAP_FIXED_SIZE: usize = 24;
/// QEMU's limit on the number of bitmaps, and ours.
pub const BITMAPS_MAX: u32 = 65_535;
/// QEMU's limit on the size of the directory, in bytes, and ours.
pub const BITMAP_DIRECTORY_MAX_BYTES: u64 = BITMAPS_MAX as u64 * 1048;
/// QEMU's limit on the entries of one bitmap's table, and ours.
pub const BITMAP_TABLE_ENTRIES_MAX: u32 = 0x0800_0000;
/// QEMU's limit on one bitmap's data, in bytes, and ours.
pub const BITMAP_DATA_MAX_BYTES: u64 = 0x2000_0000;
/// QEMU's limit on the bits of a new bitmap, and ours.
pub const BITMAP_BITS_MAX: u64 = 0x2000_0000;
/// The granularities of bitmaps, as logarithms of bytes.
pub const BITMAP_GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// The longest name, in bytes, as in QEMU.
pub const BITMAP_NAME_MAX: usize = 1023;
/// The most extra data of an entry, in bytes. QEMU has no bitmaps with extra data, and refuses them.
pub const BITMAP_EXTRA_MAX: usize = 64 << 10;
/// The offset of an entry's flags, in bytes from its start.
pub const BITMAP_FLAGS_AT: usize = 12;
/// The one type of bitmap that the format defines.
pub const DIRTY_TRACKING: u8 = 1;

bitflags::bitflags! {
    /// A directory entry's flags.
    #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
    pub struct BitmapFlags: u32 {
        /// The bitmap was not saved; its contents may be out of date.
        const IN_USE = 1 << 0;
        /// The bitmap must record every change of the disk.
        const AUTO = 1 << 1;
        /// The bitmap may be used by programs that do not know its extra data.
        const EXTRA_DATA_COMPATIBLE = 1 << 2;
        const _ = !0;
    }
}

/// One persistent bitmap.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct BitmapDirectoryEntry {
    /// The offset of the bitmap's table.
    pub table_offset: HostOffset,
    /// The number of entries of the table.
    pub table_entries: u32,
    /// The state of the bitmap.
    pub flags: BitmapFlags,
    /// The type of the bitmap: 1 tracks dirty data, the rest is reserved.
    pub kind: u8,
    /// The logarithm of the guest bytes that one bit covers.
    pub granularity_bits: u8,
    /// Extra data of the bitmap's type, kept as it is.
    pub extra: Vec<u8>,
    /// The bitmap's name.
    pub name: Vec<u8>,
}

/// A bitmap directory entry cannot be read, or breaks the format's rules.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BitmapError {
    /// The directory ends before the entry does.
    #[error("the bitmap directory entry needs {needed} bytes; {available} are there")]
    Truncated {
        /// The entry's length in bytes, as far as it is known.
        needed: usize,
        /// The bytes that are available.
        available: usize,
    },
    /// A field has a value the format or QEMU's limits rule out.
    #[error("the bitmap directory entry's {field} is {found:#x}; expected {expected}")]
    Field {
        /// The specification's name of the field.
        field: &'static str,
        /// The value found.
        found: u64,
        /// The values allowed.
        expected: &'static str,
    },
}

impl BitmapDirectoryEntry {
    /// Returns the length in bytes of the entry that starts with `bytes`, padding included. Its first
    /// [`BITMAP_FIXED_SIZE`] bytes are enough.
    ///
    /// # Errors
    ///
    /// [`BitmapError::Truncated`] if those are missing, [`BitmapError::Field`] for more than [`BITMAP_EXTRA_MAX`]
    /// bytes of extra data.
    pub fn peek_len(bytes: &[u8]) -> Result<usize, BitmapError> {
        let (name, extra) = lengths(bytes)?;
        // The last multiple of eight cannot be passed: the sum has at most 33 bits.
        Ok(BITMAP_FIXED_SIZE
            .saturating_add(extra)
            .saturating_add(name)
            .next_multiple_of(8))
    }

    /// Parses the entry that `bytes` starts with; [`Self::peek_len`] returns the distance to the next one.
    ///
    /// # Errors
    ///
    /// [`BitmapError::Truncated`] if it is cut short; as for [`Self::peek_len`].
    pub fn parse(bytes: &[u8]) -> Result<Self, BitmapError> {
        let (name_len, extra_len) = lengths(bytes)?;
        let needed = BITMAP_FIXED_SIZE
            .saturating_add(extra_len)
            .saturating_add(name_len);
        let cut = BitmapError::Truncated {
            needed,
            available: bytes.len(),
        };
        let rest = bytes.get(BITMAP_FIXED_SIZE..).ok_or(cut)?;
        let (extra, rest) = rest.split_at_checked(extra_len).ok_or(cut)?;
        let name = rest.get(..name_len).ok_or(cut)?;
        Ok(Self {
            table_offset: HostOffset::new(u64_at(bytes, 0).ok_or(cut)?),
            table_entries: u32_at(bytes, 8).ok_or(cut)?,
            flags: BitmapFlags::from_bits_retain(u32_at(bytes, BITMAP_FLAGS_AT).ok_or(cut)?),
            kind: bytes.get(16).copied().ok_or(cut)?,
            granularity_bits: bytes.get(17).copied().ok_or(cut)?,
            extra: extra.to_vec(),
            name: name.to_vec(),
        })
    }

    /// Appends the entry, padded to eight bytes. Returns `None`, with nothing appended, if the name or the extra data
    /// is longer than its length field allows.
    pub fn encode_into(&self, out: &mut Vec<u8>) -> Option<()> {
        let name_len = u16::try_from(self.name.len()).ok()?;
        let extra_len = u32::try_from(self.extra.len()).ok()?;
        out.extend_from_slice(&self.table_offset.bytes().to_be_bytes());
        out.extend_from_slice(&self.table_entries.to_be_bytes());
        out.extend_from_slice(&self.flags.bits().to_be_bytes());
        out.extend_from_slice(&[self.kind, self.granularity_bits]);
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&extra_len.to_be_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.name);
        pad_to_8(out);
        Some(())
    }

    /// Checks the entry against the format's rules and QEMU's limits.
    ///
    /// # Errors
    ///
    /// [`BitmapError::Field`] for the first field that breaks one.
    pub fn validate(&self, geometry: &Geometry) -> Result<(), BitmapError> {
        let wrong = |field, found, expected| {
            Err(BitmapError::Field {
                field,
                found,
                expected,
            })
        };
        let offset = self.table_offset.bytes();
        if offset == 0 || geometry.offset_in_cluster(offset) != 0 {
            return wrong(
                "bitmap_table_offset",
                offset,
                "a multiple of the cluster size, not 0",
            );
        }
        let entries = u64::from(self.table_entries);
        if self.table_entries == 0 || self.table_entries > BITMAP_TABLE_ENTRIES_MAX {
            return wrong("bitmap_table_size", entries, "1 to 0x8000000");
        }
        let data_bytes = entries.saturating_mul(geometry.cluster_size());
        if data_bytes > BITMAP_DATA_MAX_BYTES {
            return wrong("bitmap_table_size", entries, "at most 512 MiB of data");
        }
        let reserved = self.flags.bits() & !0b111;
        if reserved != 0 {
            return wrong("flags", u64::from(self.flags.bits()), "bits 3 to 31 clear");
        }
        if self.kind != DIRTY_TRACKING {
            return wrong("type", u64::from(self.kind), "1");
        }
        if !BITMAP_GRANULARITY_BITS.contains(&self.granularity_bits) {
            return wrong("granularity_bits", u64::from(self.granularity_bits), "9 to 31");
        }
        if self.name.is_empty() || self.name.len() > BITMAP_NAME_MAX {
            return wrong("name_size", self.name.len() as u64, "1 to 1023");
        }
        // One bit per granule, eight to a byte, in whole clusters.
        let needed = geometry.clusters_for(self.bits(geometry).div_ceil(8));
        if !self.flags.contains(BitmapFlags::IN_USE) && entries != needed {
            return wrong("bitmap_table_size", entries, "as many as the disk's size needs");
        }
        Ok(())
    }

    /// Returns the number of bits that cover the disk.
    pub fn bits(&self, geometry: &Geometry) -> u64 {
        geometry.virtual_size().div_ceil(self.granularity().max(1))
    }

    /// Returns the number of guest bytes that one bit covers.
    pub fn granularity(&self) -> u64 {
        1u64.checked_shl(u32::from(self.granularity_bits))
            .unwrap_or_default()
    }
}

fn lengths(bytes: &[u8]) -> Result<(usize, usize), BitmapError> {
    let cut = BitmapError::Truncated {
        needed: BITMAP_FIXED_SIZE,
        available: bytes.len(),
    };
    let name = u16_at(bytes, 18).ok_or(cut)?;
    let extra = u32_at(bytes, 20).ok_or(cut)? as usize;
    if extra > BITMAP_EXTRA_MAX {
        return Err(BitmapError::Field {
            field: "extra_data_size",
            found: extra as u64,
            expected: "at most 64 KiB",
        });
    }
    Ok((usize::from(name), extra))
}

/// A bitmap table entry as it is on disk, in native byte order.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(transparent)]
pub struct BitmapTableEntry(u64);

/// The content of one cluster of a bitmap's data.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BitmapCluster {
    /// All bits are clear.
    Zeros,
    /// All bits are set.
    Ones,
    /// The bits are in a host cluster of their own.
    Data(HostOffset),
}

impl BitmapTableEntry {
    /// Creates an entry from its 64 bits.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// Encodes the content of a cluster; the inverse of [`Self::decode`].
    pub const fn encode(cluster: BitmapCluster) -> Self {
        Self(match cluster {
            BitmapCluster::Zeros => 0,
            BitmapCluster::Ones => 1,
            BitmapCluster::Data(host) => host.bytes(),
        })
    }

    /// Returns the entry's 64 bits.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Decodes the entry.
    ///
    /// # Errors
    ///
    /// [`EntryError`] if reserved bits are set or the offset is not cluster-aligned.
    pub const fn decode(self, geometry: &Geometry) -> Result<BitmapCluster, EntryError> {
        let structure = "bitmap table entry";
        let entry = self.0;
        let offset = entry & OFFSET_MASK;
        let reserved = if offset == 0 {
            !(OFFSET_MASK | 1)
        } else {
            !OFFSET_MASK
        };
        if entry & reserved != 0 {
            return Err(EntryError::ReservedBits {
                structure,
                entry,
                bits: entry & reserved,
            });
        }
        if geometry.offset_in_cluster(offset) != 0 {
            let cluster_size = geometry.cluster_size();
            return Err(EntryError::Unaligned {
                structure,
                entry,
                offset,
                cluster_size,
            });
        }
        Ok(match (offset, entry & 1) {
            (0, 0) => BitmapCluster::Zeros,
            (0, _) => BitmapCluster::Ones,
            (offset, _) => BitmapCluster::Data(HostOffset::new(offset)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ClusterBits, RefcountOrder, Version};
    use proptest::prelude::*;

    const GEOMETRY: Geometry =
        Geometry::new(Version::V3, ClusterBits::DEFAULT, RefcountOrder::DEFAULT, 1 << 30);

    fn valid() -> BitmapDirectoryEntry {
        BitmapDirectoryEntry {
            table_offset: HostOffset::new(0x5_0000),
            table_entries: 1,
            kind: 1,
            granularity_bits: 16,
            name: b"nightly".to_vec(),
            ..Default::default()
        }
    }

    /// Method: break one field at a time of an entry that is otherwise valid.
    #[test]
    fn directory_entry_validate_names_each_bad_field() {
        assert_eq!(valid().validate(&GEOMETRY), Ok(()));
        let field_of = |entry: BitmapDirectoryEntry| match entry.validate(&GEOMETRY) {
            Err(BitmapError::Field { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        let offset = |bytes| BitmapDirectoryEntry {
            table_offset: HostOffset::new(bytes),
            ..valid()
        };
        assert_eq!(field_of(offset(0)), "bitmap_table_offset");
        assert_eq!(field_of(offset(0x5_0200)), "bitmap_table_offset");
        let entries = |table_entries| BitmapDirectoryEntry {
            table_entries,
            ..valid()
        };
        assert_eq!(field_of(entries(0)), "bitmap_table_size");
        assert_eq!(field_of(entries(u32::MAX)), "bitmap_table_size");
        assert_eq!(field_of(entries(8193)), "bitmap_table_size");
        let flags = BitmapFlags::from_bits_retain(8);
        assert_eq!(field_of(BitmapDirectoryEntry { flags, ..valid() }), "flags");
        assert_eq!(field_of(BitmapDirectoryEntry { kind: 0, ..valid() }), "type");
        for granularity_bits in [0, 8, 32, 255] {
            assert_eq!(
                field_of(BitmapDirectoryEntry {
                    granularity_bits,
                    ..valid()
                }),
                "granularity_bits"
            );
        }
        assert_eq!(
            field_of(BitmapDirectoryEntry {
                name: vec![],
                ..valid()
            }),
            "name_size"
        );
        assert_eq!(
            field_of(BitmapDirectoryEntry {
                name: vec![b'n'; 1024],
                ..valid()
            }),
            "name_size"
        );
    }

    #[test]
    fn bitmap_in_use_need_not_fit_the_disk() {
        let big = GEOMETRY.with_virtual_size(1 << 50);
        assert!(valid().validate(&big).is_err());
        assert_eq!(
            BitmapDirectoryEntry {
                flags: BitmapFlags::IN_USE,
                ..valid()
            }
            .validate(&big),
            Ok(())
        );
    }

    #[test]
    fn bitmap_table_entry_decodes_per_specification() {
        let decode = |raw| BitmapTableEntry::from_raw(raw).decode(&GEOMETRY);
        assert_eq!(decode(0), Ok(BitmapCluster::Zeros));
        assert_eq!(decode(1), Ok(BitmapCluster::Ones));
        for raw in [0, 1, 0x5_0000] {
            let decoded = decode(raw).expect("a sound entry");
            assert_eq!(BitmapTableEntry::encode(decoded).raw(), raw);
        }
        assert_eq!(
            decode(0x5_0000),
            Ok(BitmapCluster::Data(HostOffset::new(0x5_0000)))
        );
        assert!(matches!(
            decode(0x5_0001),
            Err(EntryError::ReservedBits { bits: 1, .. })
        ));
        assert!(matches!(decode(2), Err(EntryError::ReservedBits { bits: 2, .. })));
        assert!(matches!(decode(1 << 63), Err(EntryError::ReservedBits { .. })));
        assert!(matches!(decode(0x5_0200), Err(EntryError::Unaligned { .. })));
    }

    proptest! {
        #[test]
        fn directory_entry_survives_encoding(
            fixed in any::<(u64, u32, u32, u8, u8)>(),
            extra in prop::collection::vec(any::<u8>(), 0..40),
            name in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let (table_offset, table_entries, flags, kind, granularity_bits) = fixed;
            let table_offset = HostOffset::new(table_offset);
            let flags = BitmapFlags::from_bits_retain(flags);
            let entry = BitmapDirectoryEntry {
                table_offset, table_entries, flags, kind, granularity_bits, extra, name,
            };
            let mut bytes = Vec::new();
            entry.encode_into(&mut bytes).unwrap();
            prop_assert_eq!(BitmapDirectoryEntry::peek_len(&bytes).unwrap(), bytes.len());
            prop_assert_eq!(BitmapDirectoryEntry::parse(&bytes).unwrap(), entry);
        }

        #[test]
        fn directory_entry_parse_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _outcome = BitmapDirectoryEntry::parse(&bytes).map(|entry| entry.validate(&GEOMETRY));
        }
    }
}
