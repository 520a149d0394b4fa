//! Geometry: the cluster size, the cluster that holds a byte, and the table entry that describes it.
//!
//! Offsets count bytes, and cluster numbers count from zero. Each is its own type, so mixing them does not compile.
//! Nothing here does I/O, and every method is total: results that cannot be represented saturate or are `None`. Spec:
//! "Header", "Host cluster management", "Cluster mapping".

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

const _: () = assert!(usize::BITS >= 64, "table indices are kept in usize");

/// The largest byte offset a file can have on Linux, and so the largest this crate accepts.
pub const FILE_OFFSET_MAX: u64 = i64::MAX as u64;

/// The smallest unit a guest addresses, in bytes.
pub const SECTOR_SIZE: u64 = 512;

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

/// A byte offset on the guest's disk.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct GuestOffset(u64);

/// A byte offset in the image file.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct HostOffset(u64);

/// A cluster of the guest's disk, counted from zero.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct GuestCluster(u64);

/// A cluster of the image file, counted from zero: the header is in cluster 0.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct HostCluster(u64);

/// Sums and differences of positions that are known to lie on a disk or in a file: they cannot overflow, which debug
/// builds check. Positions that an image claims go through `checked_add`.
macro_rules! distances {
    ($type:ident) => {
        #[expect(
            clippy::arithmetic_side_effects,
            reason = "positions on a disk end far below 2^64"
        )]
        impl Add<u64> for $type {
            type Output = Self;

            #[inline]
            fn add(self, more: u64) -> Self {
                Self(self.0 + more)
            }
        }

        #[expect(
            clippy::arithmetic_side_effects,
            reason = "positions on a disk end far below 2^64"
        )]
        impl AddAssign<u64> for $type {
            #[inline]
            fn add_assign(&mut self, more: u64) {
                self.0 += more;
            }
        }

        #[expect(
            clippy::arithmetic_side_effects,
            reason = "callers subtract what lies before"
        )]
        impl Sub for $type {
            type Output = u64;

            #[inline]
            fn sub(self, before: Self) -> u64 {
                self.0 - before.0
            }
        }
    };
}

macro_rules! offset_methods {
    ($type:ident) => {
        impl $type {
            /// Creates the offset of byte number `bytes`.
            #[inline]
            pub const fn new(bytes: u64) -> Self {
                Self(bytes)
            }

            /// Returns the offset, in bytes.
            #[inline]
            pub const fn bytes(self) -> u64 {
                self.0
            }

            /// Returns the offset `bytes` further on, unless it overflows.
            #[inline]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Returns true if the offset is a multiple of `bytes`, a power of two.
            #[inline]
            pub const fn is_aligned_to(self, bytes: u64) -> bool {
                self.0 & bytes.wrapping_sub(1) == 0
            }
        }

        distances!($type);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

macro_rules! cluster_methods {
    ($type:ident) => {
        impl $type {
            /// Creates cluster number `index`.
            #[inline]
            pub const fn new(index: u64) -> Self {
                Self(index)
            }

            /// Returns the cluster's number.
            #[inline]
            pub const fn index(self) -> u64 {
                self.0
            }

            /// Returns the cluster `count` further on, unless its number overflows.
            #[inline]
            pub const fn checked_add(self, count: u64) -> Option<Self> {
                match self.0.checked_add(count) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Returns the clusters from this one up to `end`, without it, in order.
            #[inline]
            pub fn until(self, end: Self) -> impl DoubleEndedIterator<Item = Self> + Clone {
                (self.0..end.0).map(Self)
            }
        }

        distances!($type);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

offset_methods!(GuestOffset);
offset_methods!(HostOffset);
cluster_methods!(GuestCluster);
cluster_methods!(HostCluster);

/// The sizes from which everything else in an image is computed. Small and `Copy`: pass it by value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Geometry {
    version: Version,
    cluster_bits: ClusterBits,
    refcount_order: RefcountOrder,
    l2_entry_width: L2EntryWidth,
    virtual_size_bytes: u64,
}

impl Geometry {
    /// Creates the geometry of an image with 8-byte L2 entries and a disk of `virtual_size_bytes`.
    pub const fn new(
        version: Version,
        cluster_bits: ClusterBits,
        refcount_order: RefcountOrder,
        virtual_size_bytes: u64,
    ) -> Self {
        Self {
            version,
            cluster_bits,
            refcount_order,
            l2_entry_width: L2EntryWidth::Standard,
            virtual_size_bytes,
        }
    }

    /// Returns the geometry of the same image with L2 entries of another width.
    #[must_use]
    pub const fn with_l2_entry_width(self, l2_entry_width: L2EntryWidth) -> Self {
        Self {
            l2_entry_width,
            ..self
        }
    }

    /// Returns the geometry of the same image with a disk of another size.
    #[must_use]
    pub const fn with_virtual_size(self, virtual_size_bytes: u64) -> Self {
        Self {
            virtual_size_bytes,
            ..self
        }
    }

    /// Returns the edition of the format.
    #[inline]
    pub const fn version(&self) -> Version {
        self.version
    }

    /// Returns the cluster size's logarithm.
    #[inline]
    pub const fn cluster_bits(&self) -> ClusterBits {
        self.cluster_bits
    }

    /// Returns the cluster size in bytes.
    #[inline]
    pub const fn cluster_size(&self) -> u64 {
        self.cluster_bits.size()
    }

    /// Returns the guest disk's size in bytes.
    #[inline]
    pub const fn virtual_size(&self) -> u64 {
        self.virtual_size_bytes
    }

    /// Returns the number of guest clusters of the disk, the last one possibly partial.
    #[inline]
    pub const fn guest_clusters(&self) -> u64 {
        self.clusters_for(self.virtual_size_bytes)
    }

    /// Returns the number of clusters that `bytes` bytes need, rounded up.
    #[inline]
    pub const fn clusters_for(&self, bytes: u64) -> u64 {
        let whole = bytes.wrapping_shr(self.cluster_bits.0);
        whole.saturating_add((self.offset_in_cluster(bytes) != 0) as u64)
    }

    /// Returns `bytes` rounded up to whole clusters, unless that overflows.
    #[inline]
    pub const fn align_up(&self, bytes: u64) -> Option<u64> {
        bytes.checked_next_multiple_of(self.cluster_size())
    }

    /// Returns the part of an offset, guest or host, that lies within its cluster, in bytes.
    #[inline]
    pub const fn offset_in_cluster(&self, bytes: u64) -> u64 {
        bytes & self.cluster_size().wrapping_sub(1)
    }

    /// Returns the guest cluster that holds a guest byte.
    #[inline]
    pub const fn guest_cluster(&self, offset: GuestOffset) -> GuestCluster {
        GuestCluster(offset.0.wrapping_shr(self.cluster_bits.0))
    }

    /// Returns the first byte of a guest cluster; saturates for clusters no disk can have.
    #[inline]
    pub const fn guest_offset(&self, cluster: GuestCluster) -> GuestOffset {
        GuestOffset(cluster.0.saturating_mul(self.cluster_size()))
    }

    /// Returns the host cluster that holds a byte of the image file.
    #[inline]
    pub const fn host_cluster(&self, offset: HostOffset) -> HostCluster {
        HostCluster(offset.0.wrapping_shr(self.cluster_bits.0))
    }

    /// Returns the first byte of a host cluster; saturates for clusters no file can have.
    #[inline]
    pub const fn host_offset(&self, cluster: HostCluster) -> HostOffset {
        HostOffset(cluster.0.saturating_mul(self.cluster_size()))
    }

    /// Returns the logarithm of [`Self::l2_entries`].
    #[inline]
    pub const fn l2_bits(&self) -> u32 {
        self.cluster_bits.0.saturating_sub(self.l2_entry_width.bits())
    }

    /// Returns the width of an L2 entry.
    #[inline]
    pub const fn l2_entry_width(&self) -> L2EntryWidth {
        self.l2_entry_width
    }

    /// Returns the number of entries of an L2 table, which fills one cluster.
    #[inline]
    pub const fn l2_entries(&self) -> usize {
        1usize.wrapping_shl(self.l2_bits())
    }

    /// Returns the number of guest bytes that one L2 table, and so one L1 entry, describes.
    #[inline]
    pub const fn l2_table_span(&self) -> u64 {
        1u64.wrapping_shl(self.cluster_bits.0.saturating_add(self.l2_bits()))
    }

    /// Returns the index of the L1 entry that leads to a guest byte.
    #[inline]
    pub const fn l1_index(&self, offset: GuestOffset) -> usize {
        offset
            .0
            .wrapping_shr(self.cluster_bits.0.saturating_add(self.l2_bits())) as usize
    }

    /// Returns the index, within its L2 table, of the entry that describes a guest byte.
    #[inline]
    pub const fn l2_index(&self, offset: GuestOffset) -> usize {
        offset.0.wrapping_shr(self.cluster_bits.0) as usize & self.l2_entries().wrapping_sub(1)
    }

    /// Returns the number of L1 entries that a disk of `virtual_size_bytes` needs.
    #[inline]
    pub const fn l1_entries_needed(&self, virtual_size_bytes: u64) -> u64 {
        virtual_size_bytes.div_ceil(self.l2_table_span())
    }

    /// Returns the refcount width.
    #[inline]
    pub const fn refcount_order(&self) -> RefcountOrder {
        self.refcount_order
    }

    /// Returns the refcount width in bits, 1 to 64.
    #[inline]
    pub const fn refcount_bits(&self) -> u32 {
        self.refcount_order.bits()
    }

    /// Returns the largest reference count a cluster can have.
    #[inline]
    pub const fn refcount_max(&self) -> u64 {
        self.refcount_order.max()
    }

    /// Returns the logarithm of [`Self::refcount_block_entries`].
    #[inline]
    pub const fn refcount_block_bits(&self) -> u32 {
        self.cluster_bits
            .0
            .saturating_add(3)
            .saturating_sub(self.refcount_order.0)
    }

    /// Returns the number of host clusters that one refcount block counts; a block fills one cluster.
    #[inline]
    pub const fn refcount_block_entries(&self) -> usize {
        1usize.wrapping_shl(self.refcount_block_bits())
    }

    /// Returns the number of bytes of the image file that one refcount block counts.
    #[inline]
    pub const fn refcount_block_span(&self) -> u64 {
        1u64.wrapping_shl(self.cluster_bits.0.saturating_add(self.refcount_block_bits()))
    }

    /// Returns the index of the refcount table entry that leads to a host cluster's count.
    #[inline]
    pub const fn refcount_table_index(&self, cluster: HostCluster) -> usize {
        cluster.0.wrapping_shr(self.refcount_block_bits()) as usize
    }

    /// Returns the index, within its refcount block, of the entry that counts a host cluster.
    #[inline]
    pub const fn refcount_block_index(&self, cluster: HostCluster) -> usize {
        cluster.0 as usize & self.refcount_block_entries().wrapping_sub(1)
    }

    /// Returns the number of 8-byte entries in one cluster of a table (L1, refcount table).
    #[inline]
    pub const fn table_entries_per_cluster(&self) -> usize {
        1usize.wrapping_shl(self.cluster_bits.0.saturating_sub(3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry(cluster_bits: u32, refcount_order: u32) -> Geometry {
        Geometry::new(
            Version::V3,
            ClusterBits::parse(cluster_bits).unwrap(),
            RefcountOrder::parse(refcount_order).unwrap(),
            1 << 40,
        )
    }

    #[test]
    fn cluster_bits_outside_the_range_are_refused_with_their_value() {
        for found in [0, 8, 22, 63, u32::MAX] {
            assert_eq!(ClusterBits::parse(found), Err(ClusterBitsOutOfRange { found }));
        }
        assert_eq!(ClusterBits::parse(9).unwrap().size(), 512);
        assert_eq!(ClusterBits::parse(21).unwrap().size(), 2 << 20);
    }

    #[test]
    fn refcount_orders_beyond_64_bits_are_refused() {
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

    #[test]
    fn the_default_geometry_matches_the_specification() {
        let geometry = geometry(16, 4);
        assert_eq!(geometry.l2_entries(), 8192);
        assert_eq!(geometry.l2_table_span(), 512 << 20);
        assert_eq!(geometry.refcount_block_entries(), 32768);
        assert_eq!(geometry.l1_entries_needed(1 << 40), 2048);
        assert_eq!(geometry.l1_entries_needed((1 << 40) + 1), 2049);
        assert_eq!(geometry.l1_entries_needed(0), 0);
    }

    #[test]
    fn extended_entries_halve_what_a_table_maps_and_nothing_else() {
        let standard = geometry(16, 4);
        let extended = standard.with_l2_entry_width(L2EntryWidth::Extended);
        assert_eq!(extended.l2_entries(), 4096);
        assert_eq!(extended.l2_table_span(), 256 << 20);
        assert_eq!(extended.l1_entries_needed(1 << 40), 4096);
        assert_eq!(extended.table_entries_per_cluster(), 8192);
        assert_eq!(
            extended.refcount_block_entries(),
            standard.refcount_block_entries()
        );
    }

    proptest! {
        #[test]
        fn a_guest_byte_is_found_again_from_its_table_indices(
            bits in 9u32..=21, order in 0u32..=6, byte in any::<u64>(), extended in any::<bool>(),
        ) {
            let width = if extended { L2EntryWidth::Extended } else { L2EntryWidth::Standard };
            let geometry = geometry(bits, order).with_l2_entry_width(width);
            let offset = GuestOffset::new(byte);
            let cluster = ((geometry.l1_index(offset) as u128) << geometry.l2_bits())
                + geometry.l2_index(offset) as u128;
            let found = (cluster << bits) + u128::from(geometry.offset_in_cluster(byte));
            prop_assert_eq!(found, u128::from(byte));
            prop_assert_eq!(cluster, u128::from(geometry.guest_cluster(offset).index()));
        }

        #[test]
        fn a_host_cluster_is_found_again_from_its_refcount_indices(
            bits in 9u32..=21, order in 0u32..=6, index in any::<u64>(),
        ) {
            let geometry = geometry(bits, order);
            let cluster = HostCluster::new(index);
            let found = ((geometry.refcount_table_index(cluster) as u128) << geometry.refcount_block_bits())
                + geometry.refcount_block_index(cluster) as u128;
            prop_assert_eq!(found, u128::from(index));
        }

        #[test]
        fn rounding_to_clusters_never_loses_a_byte(bits in 9u32..=21, bytes in any::<u64>()) {
            let geometry = geometry(bits, 4);
            let clusters = geometry.clusters_for(bytes);
            let room = u128::from(clusters) << bits;
            prop_assert!(room >= u128::from(bytes) && room - u128::from(bytes) < 1 << bits);
        }
    }
}
