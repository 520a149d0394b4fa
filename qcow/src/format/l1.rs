//! L1 table entries: the places of L2 tables. Spec: "Cluster mapping", "L1 table entry".

use super::{EntryError, Geometry, HostOffset};

/// Bytes in an L1 entry.
pub const L1_ENTRY_SIZE: u64 = 8;

/// QEMU's limit on the size of an L1 table, in bytes, and ours.
pub const L1_TABLE_MAX_BYTES: u64 = 32 << 20;

pub(crate) const COPIED: u64 = 1 << 63;
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const RESERVED: u64 = !(COPIED | OFFSET_MASK);

/// An L1 entry as it is on disk, in native byte order.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(transparent)]
pub struct L1Entry(u64);

/// A reference to an L2 table, as an L1 entry holds it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct L2TableRef {
    /// The offset of the table; a multiple of the cluster size, never 0.
    pub host: HostOffset,
    /// The table's refcount is exactly one: it may be changed in place. This is reliable only in the active L1 table.
    pub copied: bool,
}

impl L1Entry {
    /// No L2 table: everything it would describe is unallocated.
    pub const UNALLOCATED: Self = Self(0);

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

    /// Returns the entry that points to `table`.
    #[inline]
    pub const fn encode(table: L2TableRef) -> Self {
        Self((table.host.bytes() & OFFSET_MASK) | if table.copied { COPIED } else { 0 })
    }

    /// Returns the same entry with the COPIED flag set or cleared.
    #[inline]
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        Self(if copied { self.0 | COPIED } else { self.0 & !COPIED })
    }

    /// Decodes the entry: an L2 table, or none.
    ///
    /// # Errors
    ///
    /// [`EntryError`] if reserved bits are set, the offset is not cluster-aligned, or there is a COPIED flag without
    /// an offset (which QEMU takes for a table in the header).
    #[inline]
    pub const fn decode(self, geometry: &Geometry) -> Result<Option<L2TableRef>, EntryError> {
        if self.0 & RESERVED != 0 {
            let bits = self.0 & RESERVED;
            return Err(EntryError::ReservedBits {
                structure: "L1 entry",
                entry: self.0,
                bits,
            });
        }
        let offset = self.0 & OFFSET_MASK;
        if geometry.offset_in_cluster(offset) != 0 {
            let cluster_size = geometry.cluster_size();
            return Err(EntryError::Unaligned {
                structure: "L1 entry",
                entry: self.0,
                offset,
                cluster_size,
            });
        }
        match (offset, self.0 & COPIED != 0) {
            (0, false) => Ok(None),
            (0, true) => Err(EntryError::CopiedWithoutOffset {
                structure: "L1 entry",
                entry: self.0,
            }),
            (_, copied) => Ok(Some(L2TableRef {
                host: HostOffset::new(offset),
                copied,
            })),
        }
    }
}

const _: () = assert!(size_of::<L1Entry>() as u64 == L1_ENTRY_SIZE);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ClusterBits, RefcountOrder, Version};
    use proptest::prelude::*;

    fn geometry(bits: u32) -> Geometry {
        Geometry::new(
            Version::V3,
            ClusterBits::parse(bits).unwrap(),
            RefcountOrder::DEFAULT,
            1 << 30,
        )
    }

    #[test]
    fn l1_entry_without_offset_decodes_as_none_unless_copied() {
        assert_eq!(L1Entry::UNALLOCATED.decode(&geometry(16)), Ok(None));
        let entry = 1 << 63;
        let expected = EntryError::CopiedWithoutOffset {
            structure: "L1 entry",
            entry,
        };
        assert_eq!(L1Entry::from_raw(entry).decode(&geometry(16)), Err(expected));
    }

    #[test]
    fn l1_entry_with_reserved_bit_names_it() {
        for bit in (0..9).chain(56..63) {
            let entry = 0x10_0000 | 1 << bit;
            let expected = EntryError::ReservedBits {
                structure: "L1 entry",
                entry,
                bits: 1 << bit,
            };
            assert_eq!(L1Entry::from_raw(entry).decode(&geometry(16)), Err(expected));
        }
    }

    #[test]
    fn l1_entry_refuses_unaligned_table() {
        assert!(matches!(
            L1Entry::from_raw(0x10_0200).decode(&geometry(16)),
            Err(EntryError::Unaligned {
                offset: 0x10_0200,
                cluster_size: 0x1_0000,
                ..
            })
        ));
        assert!(L1Entry::from_raw(0x10_0200).decode(&geometry(9)).is_ok());
    }

    proptest! {
        #[test]
        fn l1_entry_survives_decoding_and_encoding(raw in any::<u64>(), bits in 9u32..=21) {
            if let Ok(Some(table)) = L1Entry::from_raw(raw).decode(&geometry(bits)) {
                prop_assert_eq!(L1Entry::encode(table).raw(), raw);
            }
        }

        #[test]
        fn l2_table_ref_survives_encoding_and_decoding(
            cluster in 1u64..(1 << 35), copied: bool, bits in 9u32..=21,
        ) {
            let table = L2TableRef { host: HostOffset::new(cluster << bits & OFFSET_MASK), copied };
            if table.host.bytes() != 0 {
                prop_assert_eq!(L1Entry::encode(table).decode(&geometry(bits)), Ok(Some(table)));
            }
        }
    }
}
