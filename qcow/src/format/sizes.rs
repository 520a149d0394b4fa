//! Sizes that an image's header declares: the edition, the cluster size, the widths of counts and entries.
//!
//! Each is kept as a logarithm where the header has one. Spec: "Header".

/// The edition of the format that an image is written in.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Version {
    /// `compat=0.10`: no feature bits, no zero clusters, 16-bit refcounts.
    V2,
    /// `compat=1.1`.
    V3,
}

impl Version {
    /// Returns the header field `version`.
    pub const fn number(self) -> u32 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }

    /// Returns QEMU's name for it, as in `qemu-img create -o compat=…`.
    pub const fn compat(self) -> &'static str {
        match self {
            Self::V2 => "0.10",
            Self::V3 => "1.1",
        }
    }
}

/// The cluster size, kept as its base-two logarithm: 9 (512 B) to 21 (2 MiB).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ClusterBits(u32);

/// The header asked for a cluster size outside 512 B to 2 MiB.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("cluster_bits is {found}; expected 9 to 21")]
pub struct ClusterBitsOutOfRange {
    /// The header field, as read.
    pub found: u32,
}

impl ClusterBits {
    /// 64 KiB clusters, the default for images.
    pub const DEFAULT: Self = Self(16);

    /// Parses the header field `cluster_bits`. The floor is the format's, the ceiling QEMU's.
    ///
    /// # Errors
    ///
    /// [`ClusterBitsOutOfRange`], carrying the field, if it is not in 9..=21.
    pub const fn parse(field: u32) -> Result<Self, ClusterBitsOutOfRange> {
        match field {
            9..=21 => Ok(Self(field)),
            found => Err(ClusterBitsOutOfRange { found }),
        }
    }

    /// Returns the logarithm, 9 to 21.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the cluster size in bytes.
    #[inline]
    pub const fn size(self) -> u64 {
        1u64.wrapping_shl(self.0)
    }
}

/// The width of a reference count, kept as its base-two logarithm: 0 (one bit) to 6 (64 bits).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct RefcountOrder(u32);

/// The header asked for reference counts wider than 64 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("refcount_order is {found}; expected 0 to 6")]
pub struct RefcountOrderOutOfRange {
    /// The header field, as read.
    pub found: u32,
}

impl RefcountOrder {
    /// 16 bits: the default, and the only width of version 2.
    pub const DEFAULT: Self = Self(4);

    /// Parses the header field `refcount_order`.
    ///
    /// # Errors
    ///
    /// [`RefcountOrderOutOfRange`], carrying the field, if it exceeds 6.
    pub const fn parse(field: u32) -> Result<Self, RefcountOrderOutOfRange> {
        match field {
            0..=6 => Ok(Self(field)),
            found => Err(RefcountOrderOutOfRange { found }),
        }
    }

    /// Returns the order for a width in bits, if it is one of 1, 2, 4, 8, 16, 32, 64.
    pub const fn from_bits(bits: u32) -> Option<Self> {
        match bits {
            1 | 2 | 4 | 8 | 16 | 32 | 64 => Some(Self(bits.trailing_zeros())),
            _ => None,
        }
    }

    /// Returns the logarithm, 0 to 6.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the width of one count, in bits.
    #[inline]
    pub const fn bits(self) -> u32 {
        1u32.wrapping_shl(self.0)
    }

    /// Returns the largest count the width can hold.
    #[inline]
    pub const fn max(self) -> u64 {
        u64::MAX.wrapping_shr(64u32.saturating_sub(self.bits()))
    }
}

/// The width of the entries of an image's L2 tables.
///
/// Spec: "Header", incompatible feature bit 4, and "Extended L2 Entries".
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum L2EntryWidth {
    /// Eight bytes: a cluster descriptor.
    #[default]
    Standard = 3,
    /// Sixteen bytes: a cluster descriptor, and a bitmap of the cluster's 32 subclusters.
    Extended = 4,
}

impl L2EntryWidth {
    /// Returns the width in bytes, as its base-two logarithm.
    #[inline]
    pub const fn bits(self) -> u32 {
        self as u32
    }

    /// Returns the width in bytes.
    #[inline]
    pub const fn bytes(self) -> usize {
        1usize.wrapping_shl(self.bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_bits_parse_refuses_values_out_of_range() {
        for found in [0, 8, 22, 63, u32::MAX] {
            assert_eq!(ClusterBits::parse(found), Err(ClusterBitsOutOfRange { found }));
        }
        assert_eq!(ClusterBits::parse(9).unwrap().size(), 512);
        assert_eq!(ClusterBits::parse(21).unwrap().size(), 2 << 20);
    }

    #[test]
    fn refcount_order_parse_refuses_more_than_64_bits() {
        for found in [7, u32::MAX] {
            assert_eq!(
                RefcountOrder::parse(found),
                Err(RefcountOrderOutOfRange { found })
            );
        }
        assert_eq!(RefcountOrder::parse(0).unwrap().max(), 1);
        assert_eq!(RefcountOrder::parse(4).unwrap().max(), 0xffff);
        assert_eq!(RefcountOrder::parse(6).unwrap().max(), u64::MAX);
        assert_eq!(RefcountOrder::from_bits(8), RefcountOrder::parse(3).ok());
        assert_eq!(RefcountOrder::from_bits(12), None);
    }
}
