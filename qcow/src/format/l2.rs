//! L2 tables and their entries: the places of guest clusters' bytes. Spec: "Cluster mapping", "L2 table entry",
//! "Standard Cluster Descriptor", "Compressed Clusters Descriptor".
//!
//! Only [`L2Table`] and [`L2TableMut`] know the offset of an entry in a table's bytes, and its width.
//! An [`L2Entry`] is the cluster descriptor, the first eight bytes of an entry of either width. Images with extended
//! entries are refused before any is decoded.

use super::l1::{COPIED, OFFSET_MASK};
use super::{EntryError, Geometry, HostOffset, L2EntryWidth, Version};

const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Bits a standard descriptor must not have.
const RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET_MASK | ZERO);
/// Host offsets end below this bit.
const OFFSET_BITS: u32 = 56;
const SECTOR: u64 = 512;

/// An L2 entry as it is on disk, in native byte order.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(transparent)]
pub struct L2Entry(u64);

/// The source of one guest cluster's bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum L2Mapping {
    /// Not in this image: the backing file's bytes, or zeros.
    Unallocated,
    /// Zeros, whatever the host cluster or the backing file hold.
    Zero {
        /// The host cluster kept for it, if any; a multiple of the cluster size, never 0.
        host: Option<HostOffset>,
        /// The kept host cluster's refcount is exactly one.
        copied: bool,
    },
    /// An uncompressed host cluster.
    Data {
        /// The offset of the cluster; a multiple of the cluster size, never 0.
        host: HostOffset,
        /// Its refcount is exactly one: it may be overwritten in place. This is reliable only in tables reached
        /// through the active L1.
        copied: bool,
    },
    /// Compressed bytes somewhere in the file; never to be overwritten in place.
    Compressed(CompressedExtent),
}

/// The bytes of one compressed cluster. They may run into the next host cluster, and past the end of the file, where
/// there are none: the decompressor stops after one cluster of output.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CompressedExtent {
    /// The first byte, of any alignment.
    pub host: HostOffset,
    /// The largest length of the compressed data, in bytes: up to the end of its last 512-byte sector.
    pub len_max: u32,
}

impl CompressedExtent {
    /// Returns the offset after the last byte that may belong to the data.
    #[inline]
    pub const fn end(&self) -> u64 {
        self.host.bytes().saturating_add(self.len_max as u64)
    }
}

impl L2Entry {
    /// The guest cluster is not in this image.
    pub const UNALLOCATED: Self = Self(0);
    /// The guest cluster reads as zeros and keeps no host cluster. Version 3 only.
    pub const ZERO_PLAIN: Self = Self(ZERO);
    /// A refused entry: it replaces an exposed one in memory, and never on disk. It decodes to an error, as every
    /// reserved bit is set.
    pub const REFUSED: Self = Self(RESERVED);

    /// Creates an entry from its 64 bits.
    #[inline]
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// Returns the entry's 64 bits.
    #[inline]
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Returns the entry of a data cluster at `host`, a non-zero multiple of the cluster size.
    #[inline]
    pub const fn data(host: HostOffset, copied: bool) -> Self {
        Self((host.bytes() & OFFSET_MASK) | if copied { COPIED } else { 0 })
    }

    /// Returns the entry of a cluster that reads as zeros and keeps the host cluster at `host`. Version 3 only.
    #[inline]
    pub const fn zero_allocated(host: HostOffset, copied: bool) -> Self {
        Self(Self::data(host, copied).0 | ZERO)
    }

    /// Returns the entry of a compressed cluster whose data is the `len` bytes at `host`. `None` if the descriptor
    /// cannot express that: no bytes, more sectors than a cluster's worth and one, or too far into the file.
    pub const fn compressed(host: HostOffset, len: u32, geometry: &Geometry) -> Option<Self> {
        let shift = compressed_shift(geometry);
        let Some(last) = host.bytes().checked_add((len as u64).wrapping_sub(1)) else {
            return None;
        };
        if len == 0 || host.bytes().wrapping_shr(offset_bits(shift)) != 0 {
            return None;
        }
        let sectors_more = (last / SECTOR).wrapping_sub(host.bytes() / SECTOR);
        if sectors_more.wrapping_shr(62u32.wrapping_sub(shift)) != 0 {
            return None;
        }
        Some(Self(COMPRESSED | sectors_more.wrapping_shl(shift) | host.bytes()))
    }

    /// Returns the entry for a mapping; `None` only for a compressed extent that cannot be expressed.
    pub const fn encode(mapping: L2Mapping, geometry: &Geometry) -> Option<Self> {
        match mapping {
            L2Mapping::Unallocated => Some(Self::UNALLOCATED),
            L2Mapping::Zero { host: None, .. } => Some(Self::ZERO_PLAIN),
            L2Mapping::Zero {
                host: Some(host),
                copied,
            } => Some(Self::zero_allocated(host, copied)),
            L2Mapping::Data { host, copied } => Some(Self::data(host, copied)),
            L2Mapping::Compressed(extent) => Self::compressed(extent.host, extent.len_max, geometry),
        }
    }

    /// Returns the same entry with the COPIED flag set or cleared.
    #[inline]
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        Self(if copied { self.0 | COPIED } else { self.0 & !COPIED })
    }

    /// Returns true if the COPIED flag is set.
    #[inline]
    pub const fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// Returns true if the entry describes a compressed cluster.
    #[inline]
    pub const fn is_compressed(self) -> bool {
        self.0 & COMPRESSED != 0
    }

    /// Decodes the entry. COPIED without an offset is unallocated (or plain zero), as in QEMU.
    ///
    /// # Errors
    ///
    /// [`EntryError`] if reserved bits are set, the offset is not cluster-aligned, a compressed
    /// cluster has COPIED, or a version 2 image has the all-zeros flag.
    #[inline]
    pub const fn decode(self, geometry: &Geometry) -> Result<L2Mapping, EntryError> {
        if self.0 & COMPRESSED != 0 {
            return self.decode_compressed(geometry);
        }
        let entry = self.0;
        if entry & RESERVED != 0 {
            let bits = entry & RESERVED;
            return Err(EntryError::ReservedBits {
                structure: "L2 entry",
                entry,
                bits,
            });
        }
        let offset = entry & OFFSET_MASK;
        if geometry.offset_in_cluster(offset) != 0 {
            let cluster_size = geometry.cluster_size();
            return Err(EntryError::Unaligned {
                structure: "L2 entry",
                entry,
                offset,
                cluster_size,
            });
        }
        let copied = entry & COPIED != 0;
        let host = HostOffset::new(offset);
        if entry & ZERO != 0 {
            if matches!(geometry.version(), Version::V2) {
                return Err(EntryError::ZeroFlagInVersion2 { entry });
            }
            return Ok(if offset == 0 {
                L2Mapping::Zero {
                    host: None,
                    copied: false,
                }
            } else {
                L2Mapping::Zero {
                    host: Some(host),
                    copied,
                }
            });
        }
        Ok(if offset == 0 {
            L2Mapping::Unallocated
        } else {
            L2Mapping::Data { host, copied }
        })
    }

    /// Returns the place of a compressed entry's bytes, whatever its COPIED flag; `None` if the entry is not
    /// compressed or its offset has reserved bits. For tools that check and repair.
    pub const fn compressed_extent(self, geometry: &Geometry) -> Option<CompressedExtent> {
        if self.0 & COMPRESSED == 0 {
            return None;
        }
        match Self(self.0 & !COPIED).decode_compressed(geometry) {
            Ok(L2Mapping::Compressed(extent)) => Some(extent),
            _ => None,
        }
    }

    const fn decode_compressed(self, geometry: &Geometry) -> Result<L2Mapping, EntryError> {
        let entry = self.0;
        let shift = compressed_shift(geometry);
        let descriptor = entry & !(COMPRESSED | COPIED);
        let offset = descriptor & 1u64.wrapping_shl(shift).wrapping_sub(1);
        if offset.wrapping_shr(OFFSET_BITS) != 0 {
            let bits = offset & u64::MAX.wrapping_shl(OFFSET_BITS);
            return Err(EntryError::ReservedBits {
                structure: "L2 entry",
                entry,
                bits,
            });
        }
        if entry & COPIED != 0 {
            return Err(EntryError::CompressedCopied { entry });
        }
        let sectors = descriptor.wrapping_shr(shift).saturating_add(1);
        // At most (2^13 sectors of 512 bytes): fits 32 bits with room.
        let len_max = sectors.saturating_mul(SECTOR).saturating_sub(offset % SECTOR) as u32;
        Ok(L2Mapping::Compressed(CompressedExtent {
            host: HostOffset::new(offset),
            len_max,
        }))
    }
}

/// The entries of an L2 table, or of a slice of one, as they are on disk.
#[derive(Clone, Copy, Debug)]
pub struct L2Table<'a> {
    bytes: &'a [u8],
    entry_bits: u32,
}

impl<'a> L2Table<'a> {
    /// Creates a view of a table's bytes, whose entries are as wide as those of `geometry`.
    #[inline]
    pub const fn new(bytes: &'a [u8], geometry: &Geometry) -> Self {
        Self {
            bytes,
            entry_bits: geometry.l2_entry_width().bits(),
        }
    }

    /// Returns the number of entries.
    #[inline]
    pub const fn len(&self) -> usize {
        self.bytes.len().wrapping_shr(self.entry_bits)
    }

    /// Returns true if there is no entry.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns entry `index`; past the last one [`L2Entry::REFUSED`], which decodes to an error.
    #[inline]
    pub fn get(&self, index: usize) -> L2Entry {
        let at = index.wrapping_shl(self.entry_bits);
        let descriptor = self.bytes.get(at..).and_then(|bytes| bytes.first_chunk::<8>());
        descriptor.map_or(L2Entry::REFUSED, |raw| L2Entry(u64::from_be_bytes(*raw)))
    }

    /// Returns the entries in order.
    pub fn iter(&self) -> impl Iterator<Item = L2Entry> + use<'a> {
        let entries = self.bytes.chunks_exact(1usize.wrapping_shl(self.entry_bits));
        entries.map(|entry| {
            let descriptor = entry.first_chunk::<8>();
            descriptor.map_or(L2Entry::REFUSED, |raw| L2Entry(u64::from_be_bytes(*raw)))
        })
    }

    /// Returns the offset of entry `index` of a table, in bytes from the table's start.
    #[inline]
    pub const fn offset_of(geometry: &Geometry, index: usize) -> u64 {
        (index as u64).wrapping_shl(geometry.l2_entry_width().bits())
    }
}

/// The entries of an L2 table, or of a slice of one, to change.
#[derive(Debug)]
pub struct L2TableMut<'a> {
    bytes: &'a mut [u8],
    entry_bits: u32,
}

impl<'a> L2TableMut<'a> {
    /// Creates a view of a table's bytes, whose entries are as wide as those of `geometry`.
    #[inline]
    pub const fn new(bytes: &'a mut [u8], geometry: &Geometry) -> Self {
        Self {
            bytes,
            entry_bits: geometry.l2_entry_width().bits(),
        }
    }

    /// Replaces the descriptor of entry `index`.
    ///
    /// # Panics
    ///
    /// In debug builds, if there is no such entry; in others, nothing changes then.
    #[inline]
    pub fn set(&mut self, index: usize, entry: L2Entry) {
        let at = index.wrapping_shl(self.entry_bits);
        let descriptor = self
            .bytes
            .get_mut(at..)
            .and_then(|bytes| bytes.first_chunk_mut::<8>());
        debug_assert!(descriptor.is_some(), "the table has no entry {index}");
        if let Some(raw) = descriptor {
            *raw = entry.0.to_be_bytes();
        }
    }

    /// Replaces each entry by the result of `change`. Returns true if that changed any.
    pub fn update(&mut self, change: impl Fn(L2Entry) -> L2Entry) -> bool {
        let mut changed = false;
        for bytes in self.bytes.chunks_exact_mut(1usize.wrapping_shl(self.entry_bits)) {
            if let Some(raw) = bytes.first_chunk_mut::<8>() {
                let old = L2Entry(u64::from_be_bytes(*raw));
                let new = change(old);
                changed |= new != old;
                *raw = new.0.to_be_bytes();
            }
        }
        changed
    }
}

/// Returns `x` of the specification: the bit where the sector count starts in a compressed descriptor.
const fn compressed_shift(geometry: &Geometry) -> u32 {
    62u32.wrapping_sub(geometry.cluster_bits().get().wrapping_sub(8))
}

/// Returns the number of bits of a compressed descriptor's offset field that may be used.
const fn offset_bits(shift: u32) -> u32 {
    if shift < OFFSET_BITS { shift } else { OFFSET_BITS }
}

const _: () = assert!(size_of::<L2Entry>() == L2EntryWidth::Standard.bytes());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ClusterBits, RefcountOrder};
    use proptest::prelude::*;

    fn geometry(version: Version, bits: u32) -> Geometry {
        Geometry::new(
            version,
            ClusterBits::parse(bits).unwrap(),
            RefcountOrder::DEFAULT,
            1 << 30,
        )
    }

    fn decode(raw: u64) -> Result<L2Mapping, EntryError> {
        L2Entry::from_raw(raw).decode(&geometry(Version::V3, 16))
    }

    #[test]
    fn l2_entry_decodes_plain_kinds_per_specification() {
        let host = HostOffset::new(0x5_0000);
        assert_eq!(decode(0), Ok(L2Mapping::Unallocated));
        assert_eq!(decode(1 << 63), Ok(L2Mapping::Unallocated));
        assert_eq!(
            decode(1),
            Ok(L2Mapping::Zero {
                host: None,
                copied: false
            })
        );
        assert_eq!(
            decode(1 << 63 | 1),
            Ok(L2Mapping::Zero {
                host: None,
                copied: false
            })
        );
        assert_eq!(
            decode(0x5_0001),
            Ok(L2Mapping::Zero {
                host: Some(host),
                copied: false
            })
        );
        assert_eq!(decode(0x5_0000), Ok(L2Mapping::Data { host, copied: false }));
        assert_eq!(
            decode(1 << 63 | 0x5_0000),
            Ok(L2Mapping::Data { host, copied: true })
        );
    }

    #[test]
    fn compressed_extent_ends_at_its_last_sector() {
        // 64 KiB clusters: x = 54. Two more sectors after the one that holds byte 0x50123.
        let raw = 1 << 62 | 2 << 54 | 0x5_0123;
        let host = HostOffset::new(0x5_0123);
        let extent = CompressedExtent {
            host,
            len_max: 3 * 512 - 0x123,
        };
        assert_eq!(decode(raw), Ok(L2Mapping::Compressed(extent)));
        assert_eq!(extent.end() % 512, 0);
    }

    #[test]
    fn compressed_entry_with_copied_is_refused_but_located() {
        let entry = 3 << 62 | 0x5_0123;
        assert_eq!(decode(entry), Err(EntryError::CompressedCopied { entry }));
        let extent = L2Entry::from_raw(entry)
            .compressed_extent(&geometry(Version::V3, 16))
            .unwrap();
        assert_eq!(extent.host, HostOffset::new(0x5_0123));
    }

    #[test]
    fn compressed_entry_reports_reserved_bits_before_copied() {
        let entry = 3 << 62 | 1 << 56;
        let entry = L2Entry::from_raw(entry);
        let geometry = geometry(Version::V3, 9);
        assert!(matches!(
            entry.decode(&geometry),
            Err(EntryError::ReservedBits { .. })
        ));
        assert_eq!(entry.compressed_extent(&geometry), None);
    }

    #[test]
    fn small_clusters_reserve_compressed_offset_bits_past_55() {
        let entry = 1 << 62 | 1 << 56;
        let found = L2Entry::from_raw(entry).decode(&geometry(Version::V3, 9));
        assert_eq!(
            found,
            Err(EntryError::ReservedBits {
                structure: "L2 entry",
                entry,
                bits: 1 << 56
            })
        );
    }

    #[test]
    fn l2_entry_with_reserved_bit_names_it() {
        for bit in (1..9).chain(56..62) {
            let entry = 0x5_0000 | 1 << bit;
            let expected = EntryError::ReservedBits {
                structure: "L2 entry",
                entry,
                bits: 1 << bit,
            };
            assert_eq!(decode(entry), Err(expected));
        }
    }

    #[test]
    fn l2_entry_refuses_zero_flag_in_version_2() {
        let found = L2Entry::ZERO_PLAIN.decode(&geometry(Version::V2, 16));
        assert_eq!(found, Err(EntryError::ZeroFlagInVersion2 { entry: 1 }));
    }

    #[test]
    fn l2_entry_refuses_unaligned_data_cluster() {
        assert!(matches!(
            decode(0x5_0200),
            Err(EntryError::Unaligned { offset: 0x5_0200, .. })
        ));
    }

    #[test]
    fn compressed_refuses_extent_that_does_not_fit() {
        let geometry = geometry(Version::V3, 16);
        let at = HostOffset::new;
        assert!(L2Entry::compressed(at(0), 0, &geometry).is_none());
        assert!(L2Entry::compressed(at(1 << 54), 1, &geometry).is_none());
        assert!(L2Entry::compressed(at(0), 256 * 512, &geometry).is_some());
        assert!(L2Entry::compressed(at(0), 256 * 512 + 1, &geometry).is_none());
        assert!(L2Entry::compressed(at(u64::MAX), u32::MAX, &geometry).is_none());
    }

    #[test]
    fn l2_table_reads_and_writes_either_entry_width() {
        for width in [L2EntryWidth::Standard, L2EntryWidth::Extended] {
            let geometry = geometry(Version::V3, 16).with_l2_entry_width(width);
            let mut bytes = vec![0xFF; 4 * width.bytes()];
            let entries = [1, 0x5_0000, 1 << 63 | 0x6_0000, 0].map(L2Entry::from_raw);
            let mut table = L2TableMut::new(&mut bytes, &geometry);
            for (index, &entry) in entries.iter().enumerate() {
                table.set(index, entry);
            }
            assert!(!table.update(|entry| entry));
            assert!(table.update(|entry| if entry == entries[2] { entries[0] } else { entry }));
            let table = L2Table::new(&bytes, &geometry);
            let expected = [entries[0], entries[1], entries[0], entries[3]];
            assert_eq!(table.len(), 4);
            assert!(table.iter().eq(expected));
            assert!((0..4).map(|index| table.get(index)).eq(expected));
            assert_eq!(table.get(4), L2Entry::REFUSED);
            let rest = &bytes[L2Table::offset_of(&geometry, 3) as usize + 8..];
            assert!(rest.iter().all(|&byte| byte == 0xFF), "bitmaps stay as they are");
        }
    }

    proptest! {
        #[test]
        fn l2_entry_keeps_its_meaning_through_decode_and_encode(raw in any::<u64>(), bits in 9u32..=21) {
            let geometry = geometry(Version::V3, bits);
            if let Ok(mapping) = L2Entry::from_raw(raw).decode(&geometry) {
                let again = L2Entry::encode(mapping, &geometry).unwrap();
                prop_assert_eq!(again.decode(&geometry), Ok(mapping));
            }
        }

        #[test]
        fn compressed_extents_survive_encoding(
            host in 0u64..(1 << 49), len in 1u32..(2 << 20), bits in 9u32..=21,
        ) {
            let geometry = geometry(Version::V3, bits);
            if let Some(entry) = L2Entry::compressed(HostOffset::new(host), len, &geometry) {
                let Ok(L2Mapping::Compressed(extent)) = entry.decode(&geometry) else {
                    panic!("{entry:?} is not compressed");
                };
                prop_assert_eq!(extent.host.bytes(), host);
                prop_assert!(extent.len_max >= len && extent.len_max - len < 512);
            } else {
                prop_assert!(u64::from(len) + 511 > 1 << bits);
            }
        }
    }
}
