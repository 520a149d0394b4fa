//! Subclusters: the 32 equal parts of a cluster, which the bitmap of an extended L2 entry maps one by one. Spec:
//! "Extended L2 Entries".
//!
//! Two bits describe a subcluster. They may not both be set.

use std::ops::Range;

use super::EntryError;

/// The number of subclusters of a cluster, as its base-two logarithm.
pub const SUBCLUSTER_BITS: u32 = 5;
/// The number of subclusters of a cluster.
pub const SUBCLUSTERS: u32 = 1 << SUBCLUSTER_BITS;

/// The source of one subcluster's bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SubclusterKind {
    /// Not in this image: the backing file's bytes, or zeros.
    Unallocated,
    /// Zeros, whatever the host cluster or the backing file hold.
    Zero,
    /// The same part of the host cluster.
    Data,
}

/// The bitmap of an extended L2 entry: allocation bits 0 to 31 and zero bits 32 to 63, the first subcluster's lowest.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SubclusterBitmap(u64);

impl SubclusterBitmap {
    /// No subcluster is in this image.
    pub const UNALLOCATED: Self = Self(0);
    /// Every subcluster has data in the host cluster.
    pub const DATA: Self = Self(0xFFFF_FFFF);
    /// Every subcluster reads as zeros.
    pub const ZERO: Self = Self(0xFFFF_FFFF << 32);

    /// Creates a bitmap from its 64 bits.
    #[inline]
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// Returns the bitmap's 64 bits.
    #[inline]
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Returns the allocation bits.
    #[inline]
    pub const fn data(self) -> u32 {
        self.0 as u32
    }

    /// Returns the zero bits.
    #[inline]
    pub const fn zeros(self) -> u32 {
        self.0.wrapping_shr(32) as u32
    }

    /// Checks the bitmap of an entry with the descriptor `entry`, which has a host cluster if `has_host`.
    ///
    /// # Errors
    ///
    /// [`EntryError`], if a subcluster is marked both allocated and zero, or allocated without a host cluster.
    #[inline]
    pub const fn validate(self, entry: u64, has_host: bool) -> Result<Self, EntryError> {
        let (bitmap, both) = (self.0, self.data() & self.zeros());
        if both != 0 {
            return Err(EntryError::SubclustersOfTwoKinds { entry, bitmap, both });
        }
        if self.data() != 0 && !has_host {
            return Err(EntryError::SubclustersWithoutCluster { entry, bitmap });
        }
        Ok(self)
    }

    /// Returns the kind of subcluster `index`, below [`SUBCLUSTERS`].
    #[inline]
    pub const fn kind(self, index: u32) -> SubclusterKind {
        if self.data().wrapping_shr(index) & 1 != 0 {
            SubclusterKind::Data
        } else if self.zeros().wrapping_shr(index) & 1 != 0 {
            SubclusterKind::Zero
        } else {
            SubclusterKind::Unallocated
        }
    }

    /// Returns the index after the last of the neighbours, from `index` (below [`SUBCLUSTERS`]) on, that are of its kind.
    #[inline]
    pub const fn run_end(self, index: u32) -> u32 {
        let alike = match self.kind(index) {
            SubclusterKind::Unallocated => !(self.data() | self.zeros()),
            SubclusterKind::Zero => self.zeros(),
            SubclusterKind::Data => self.data(),
        };
        let others = !alike.wrapping_shr(index);
        let end = index.saturating_add(others.trailing_zeros());
        if end < SUBCLUSTERS { end } else { SUBCLUSTERS }
    }

    /// Returns true if the subclusters from `first` to `last`, both below [`SUBCLUSTERS`], have data, and no subcluster is marked both
    /// allocated and zero.
    #[inline]
    pub const fn is_data(self, first: u32, last: u32) -> bool {
        let bits = u32::MAX.wrapping_shl(first)
            & u32::MAX.wrapping_shr(SUBCLUSTERS.wrapping_sub(1).wrapping_sub(last));
        self.data() & bits == bits && self.data() & self.zeros() == 0
    }

    /// Returns the first to the last subcluster with data, as a range that may have others between them.
    #[inline]
    pub fn data_range(self) -> Range<u32> {
        match self.data() {
            0 => 0..0,
            data => data.trailing_zeros()..SUBCLUSTERS.saturating_sub(data.leading_zeros()),
        }
    }

    /// Returns the bitmap with the subclusters of `range` changed to `kind`.
    #[inline]
    #[must_use]
    pub fn with(self, range: Range<u32>, kind: SubclusterKind) -> Self {
        let below = |end: u32| match end {
            SUBCLUSTERS.. => u32::MAX,
            end => 1u32.wrapping_shl(end).wrapping_sub(1),
        };
        let bits = below(range.end) & !below(range.start);
        let (data, zeros) = (self.data() & !bits, self.zeros() & !bits);
        let (data, zeros) = match kind {
            SubclusterKind::Unallocated => (data, zeros),
            SubclusterKind::Zero => (data, zeros | bits),
            SubclusterKind::Data => (data | bits, zeros),
        };
        Self((zeros as u64).wrapping_shl(32) | data as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn subcluster_bits_are_numbered_from_the_lowest() {
        let bitmap = SubclusterBitmap::from_raw(1 | 1 << 33 | 1 << 31 | 1 << 62);
        let kinds = [0, 1, 2, 30, 31].map(|index| bitmap.kind(index));
        use SubclusterKind::{Data, Unallocated, Zero};
        assert_eq!(kinds, [Data, Zero, Unallocated, Zero, Data]);
        assert_eq!((bitmap.data(), bitmap.zeros()), (1 | 1 << 31, 2 | 1 << 30));
        assert_eq!(bitmap.data_range(), 0..32);
        assert_eq!(SubclusterBitmap::ZERO.data_range(), 0..0);
    }

    #[test]
    fn bitmap_validate_refuses_contradictions() {
        let both = SubclusterBitmap::from_raw(0b110 | 0b011 << 32);
        let error = both.validate(0x5_0000, true);
        let expected = EntryError::SubclustersOfTwoKinds {
            entry: 0x5_0000,
            bitmap: both.raw(),
            both: 0b010,
        };
        assert_eq!(error, Err(expected));
        let homeless = SubclusterBitmap::from_raw(0b100);
        let expected = EntryError::SubclustersWithoutCluster { entry: 0, bitmap: 4 };
        assert_eq!(homeless.validate(0, false), Err(expected));
        assert_eq!(homeless.validate(0x5_0000, true), Ok(homeless));
        assert_eq!(
            SubclusterBitmap::ZERO.validate(0, false),
            Ok(SubclusterBitmap::ZERO)
        );
    }

    proptest! {
        /// Method: a list of kinds, changed and searched one subcluster at a time.
        #[test]
        fn bitmap_changes_and_runs_like_a_list_of_kinds(
            raw in any::<u64>(), start in 0u32..=32, len in 0u32..=32, kind in 0usize..3, index in 0u32..32,
        ) {
            let kind = [SubclusterKind::Unallocated, SubclusterKind::Zero, SubclusterKind::Data][kind];
            let before = SubclusterBitmap::from_raw(raw & !((raw & 0xFFFF_FFFF) << 32));
            let end = (start + len).min(SUBCLUSTERS);
            let after = before.with(start..end, kind);
            let kinds: Vec<_> = (0..SUBCLUSTERS)
                .map(|at| if (start..end).contains(&at) { kind } else { before.kind(at) })
                .collect();
            prop_assert!((0..SUBCLUSTERS).map(|at| after.kind(at)).eq(kinds.iter().copied()));
            prop_assert!(after.validate(0x1_0000, true).is_ok());
            let run = kinds[index as usize..].iter().take_while(|&&at| at == kinds[index as usize]);
            prop_assert_eq!(after.run_end(index), index + run.count() as u32);
            let first = kinds.iter().position(|&at| at == SubclusterKind::Data);
            let last = kinds.iter().rposition(|&at| at == SubclusterKind::Data);
            let range = first.map_or(0..0, |first| first as u32..last.unwrap() as u32 + 1);
            prop_assert_eq!(after.data_range(), range);
        }
    }
}
