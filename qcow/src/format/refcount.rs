//! Refcount table entries, and the counts inside a refcount block.
//!
//! A block is one cluster of counts, 1 to 64 bits each. Counts narrower than a byte fill each byte
//! from its least significant bit. Spec: "Host cluster management".

use super::bytes::array_at;
use super::{EntryError, Geometry, HostOffset, RefcountOrder};

/// Bytes in a refcount table entry.
pub const REFCOUNT_TABLE_ENTRY_SIZE: u64 = 8;

/// QEMU's limit on the size of the refcount table, in bytes, and ours.
pub const REFCOUNT_TABLE_MAX_BYTES: u64 = 8 << 20;

const RESERVED: u64 = 0x1ff;

/// A refcount table entry as it is on disk, in native byte order.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(transparent)]
pub struct RefcountTableEntry(u64);

impl RefcountTableEntry {
    /// No block: every cluster it would count is free.
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

    /// Returns the entry for the block at `host`, a non-zero multiple of the cluster size.
    #[inline]
    pub const fn encode(host: HostOffset) -> Self {
        Self(host.bytes() & !RESERVED)
    }

    /// Returns the offset of the block, if there is one.
    ///
    /// # Errors
    ///
    /// [`EntryError`] if reserved bits are set or the offset is not cluster-aligned.
    #[inline]
    pub const fn decode(self, geometry: &Geometry) -> Result<Option<HostOffset>, EntryError> {
        let structure = "refcount table entry";
        let entry = self.0;
        if entry & RESERVED != 0 {
            return Err(EntryError::ReservedBits {
                structure,
                entry,
                bits: entry & RESERVED,
            });
        }
        if geometry.offset_in_cluster(entry) != 0 {
            let cluster_size = geometry.cluster_size();
            return Err(EntryError::Unaligned {
                structure,
                entry,
                offset: entry,
                cluster_size,
            });
        }
        Ok(if entry == 0 {
            None
        } else {
            Some(HostOffset::new(entry))
        })
    }
}

/// A count that does not fit the image's refcount width, or an index outside the block.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SetRefcountError {
    /// The count needs more bits than the image's refcount width.
    #[error("refcount {value} does not fit in {bits} bits")]
    TooLarge {
        /// The requested count.
        value: u64,
        /// The image's refcount width in bits.
        bits: u32,
    },
    /// The block has no such entry.
    #[error("refcount block entry {index} is outside a block of {block_bytes} bytes")]
    OutsideBlock {
        /// The requested entry.
        index: usize,
        /// The block's length in bytes.
        block_bytes: usize,
    },
}

impl RefcountOrder {
    /// Returns count number `index` of a refcount block, or `None` outside the block.
    #[inline]
    pub fn read(self, block: &[u8], index: usize) -> Option<u64> {
        match self.get() {
            order @ 0..=2 => {
                let (at, shift) = place_in_byte(order, index);
                let byte = u64::from(*block.get(at)?);
                Some(byte.wrapping_shr(shift) & self.max())
            }
            3 => block.get(index).map(|&count| u64::from(count)),
            4 => Some(u64::from(u16::from_be_bytes(array_at(
                block,
                index.checked_mul(2)?,
            )?))),
            5 => Some(u64::from(u32::from_be_bytes(array_at(
                block,
                index.checked_mul(4)?,
            )?))),
            _ => Some(u64::from_be_bytes(array_at(block, index.checked_mul(8)?)?)),
        }
    }

    /// Sets count number `index` of a refcount block, leaving its neighbours as they are.
    ///
    /// # Errors
    ///
    /// [`SetRefcountError`] if the value is wider than the entry or the entry is outside the
    /// block; the block is then unchanged.
    #[inline]
    pub fn write(self, block: &mut [u8], index: usize, value: u64) -> Result<(), SetRefcountError> {
        if value > self.max() {
            return Err(SetRefcountError::TooLarge {
                value,
                bits: self.bits(),
            });
        }
        let outside = SetRefcountError::OutsideBlock {
            index,
            block_bytes: block.len(),
        };
        let order = self.get();
        if order < 3 {
            let (at, shift) = place_in_byte(order, index);
            let byte = block.get_mut(at).ok_or(outside)?;
            let mask = self.max().wrapping_shl(shift) as u8;
            *byte = (*byte & !mask) | (value.wrapping_shl(shift) as u8);
            return Ok(());
        }
        let bytes = 1usize.wrapping_shl(order.wrapping_sub(3));
        let big_endian = value.to_be_bytes();
        let source = big_endian.get(8usize.saturating_sub(bytes)..).unwrap_or_default();
        index
            .checked_mul(bytes)
            .and_then(|start| block.get_mut(start..start.checked_add(bytes)?))
            .ok_or(outside)?
            .copy_from_slice(source);
        Ok(())
    }
}

/// Returns the byte that holds a count narrower than a byte, and the bit in it where the count starts.
#[inline]
const fn place_in_byte(order: u32, index: usize) -> (usize, u32) {
    let per_byte_log = 3u32.wrapping_sub(order);
    let in_byte = (index & 1usize.wrapping_shl(per_byte_log).wrapping_sub(1)) as u32;
    (index.wrapping_shr(per_byte_log), in_byte.wrapping_shl(order))
}

const _: () = assert!(size_of::<RefcountTableEntry>() as u64 == REFCOUNT_TABLE_ENTRY_SIZE);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ClusterBits, Version};
    use proptest::prelude::*;

    fn order(order: u32) -> RefcountOrder {
        RefcountOrder::parse(order).unwrap()
    }

    #[test]
    fn narrow_refcounts_start_at_least_significant_bit() {
        let block = [0b1000_0001, 0b0000_0010];
        let bits: Vec<_> = (0..16).map(|i| order(0).read(&block, i).unwrap()).collect();
        assert_eq!(bits, [1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(order(1).read(&block, 3), Some(2));
        assert_eq!(order(2).read(&block, 1), Some(8));
        assert_eq!(order(2).read(&block, 4), None);
    }

    #[test]
    fn wide_refcounts_are_big_endian() {
        let block = [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0];
        assert_eq!(order(3).read(&block, 7), Some(0xf0));
        assert_eq!(order(4).read(&block, 1), Some(0x5678));
        assert_eq!(order(5).read(&block, 1), Some(0x9abc_def0));
        assert_eq!(order(6).read(&block, 0), Some(0x1234_5678_9abc_def0));
        for wide in 3..=6 {
            assert_eq!(order(wide).read(&block, 8 >> (wide - 3)), None);
            assert_eq!(order(wide).read(&block, usize::MAX), None);
        }
    }

    #[test]
    fn refcount_write_refuses_count_too_large_or_outside() {
        for o in 0..=6 {
            let mut block = [0x5a; 16];
            let entries = 128 >> o;
            assert!(matches!(
                order(o).write(&mut block, entries, 0),
                Err(SetRefcountError::OutsideBlock { .. })
            ));
            assert!(order(o).write(&mut block, usize::MAX, 0).is_err());
            if o < 6 {
                let value = order(o).max() + 1;
                let bits = 1 << o;
                let found = order(o).write(&mut block, 0, value);
                assert_eq!(found, Err(SetRefcountError::TooLarge { value, bits }));
            }
            assert_eq!(block, [0x5a; 16]);
        }
    }

    #[test]
    fn refcount_table_entry_refuses_reserved_or_unaligned_bits() {
        let geometry = Geometry::new(Version::V3, ClusterBits::DEFAULT, RefcountOrder::DEFAULT, 0);
        let decode = |raw| RefcountTableEntry::from_raw(raw).decode(&geometry);
        assert_eq!(decode(0), Ok(None));
        assert_eq!(decode(0x2_0000), Ok(Some(HostOffset::new(0x2_0000))));
        assert!(matches!(
            decode(0x2_0001),
            Err(EntryError::ReservedBits { bits: 1, .. })
        ));
        assert!(matches!(
            decode(0x2_0200),
            Err(EntryError::Unaligned { offset: 0x2_0200, .. })
        ));
    }

    proptest! {
        #[test]
        fn refcount_block_behaves_like_a_list(
            o in 0u32..=6, writes in prop::collection::vec((any::<usize>(), any::<u64>()), 0..64),
        ) {
            let mut block = [0; 64];
            let entries = 512 >> o;
            let mut model = vec![0; entries];
            for (index, value) in writes {
                let (index, value) = (index % entries, value & order(o).max());
                order(o).write(&mut block, index, value).unwrap();
                model[index] = value;
                let found: Vec<_> = (0..entries).map(|i| order(o).read(&block, i).unwrap()).collect();
                prop_assert_eq!(&found, &model);
            }
        }
    }
}
