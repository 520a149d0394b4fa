//! Geometry: the cluster that holds a byte, and the table entry that describes it.
//!
//! Every method is total: results that cannot be represented saturate or are `None`. Spec: "Header", "Host cluster
//! management", "Cluster mapping".

use super::subclusters::SUBCLUSTER_BITS;
use super::{
    ClusterBits, GuestCluster, GuestOffset, HostCluster, HostOffset, L2EntryWidth, RefcountOrder, Version,
};

const _: () = assert!(usize::BITS >= 64, "table indices are kept in usize");

/// The sizes from which everything else in an image is computed. Small and `Copy`: pass it by value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Geometry {
    version: Version,
    cluster_bits: ClusterBits,
    refcount_order: RefcountOrder,
    l2_entry_width: L2EntryWidth,
    has_data_file: bool,
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
            has_data_file: false,
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

    /// Returns the geometry of the same image with the guest's bytes in a file of their own, or not.
    #[must_use]
    pub const fn with_data_file(self, has_data_file: bool) -> Self {
        Self {
            has_data_file,
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
        let whole = bytes.wrapping_shr(self.cluster_bits.get());
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
        GuestCluster::new(offset.bytes().wrapping_shr(self.cluster_bits.get()))
    }

    /// Returns the first byte of a guest cluster; saturates for clusters no disk can have.
    #[inline]
    pub const fn guest_offset(&self, cluster: GuestCluster) -> GuestOffset {
        GuestOffset::new(cluster.index().saturating_mul(self.cluster_size()))
    }

    /// Returns the host cluster that holds a byte of the image file.
    #[inline]
    pub const fn host_cluster(&self, offset: HostOffset) -> HostCluster {
        HostCluster::new(offset.bytes().wrapping_shr(self.cluster_bits.get()))
    }

    /// Returns the first byte of a host cluster; saturates for clusters no file can have.
    #[inline]
    pub const fn host_offset(&self, cluster: HostCluster) -> HostOffset {
        HostOffset::new(cluster.index().saturating_mul(self.cluster_size()))
    }

    /// Returns the logarithm of [`Self::l2_entries`].
    #[inline]
    pub const fn l2_bits(&self) -> u32 {
        self.cluster_bits.get().saturating_sub(self.l2_entry_width.bits())
    }

    /// Returns the width of an L2 entry.
    #[inline]
    pub const fn l2_entry_width(&self) -> L2EntryWidth {
        self.l2_entry_width
    }

    /// Returns true if L2 entries have a bitmap of subclusters.
    #[inline]
    pub const fn has_subclusters(&self) -> bool {
        matches!(self.l2_entry_width, L2EntryWidth::Extended)
    }

    /// Returns true if the guest's bytes are in a file of their own. Then each guest cluster has its place there, at its
    /// own offset, and no other.
    #[inline]
    pub const fn has_data_file(&self) -> bool {
        self.has_data_file
    }

    /// Returns the place of a guest cluster in the data file.
    #[inline]
    pub const fn data_file_offset(&self, cluster: GuestCluster) -> HostOffset {
        HostOffset::new(self.guest_offset(cluster).bytes())
    }

    /// Returns the logarithm of [`Self::subcluster_size`].
    #[inline]
    pub const fn subcluster_bits(&self) -> u32 {
        match self.l2_entry_width {
            L2EntryWidth::Standard => self.cluster_bits.get(),
            L2EntryWidth::Extended => self.cluster_bits.get().saturating_sub(SUBCLUSTER_BITS),
        }
    }

    /// Returns the size in bytes of the least part of the disk with a mapping of its own: of a subcluster, or of a
    /// cluster that has none.
    #[inline]
    pub const fn subcluster_size(&self) -> u64 {
        1u64.wrapping_shl(self.subcluster_bits())
    }

    /// Returns the index within its cluster of the subcluster that holds a byte; 0 if clusters have none.
    #[inline]
    pub const fn subcluster_index(&self, bytes: u64) -> u32 {
        self.offset_in_cluster(bytes).wrapping_shr(self.subcluster_bits()) as u32
    }

    /// Returns the number of entries of an L2 table, which fills one cluster.
    #[inline]
    pub const fn l2_entries(&self) -> usize {
        1usize.wrapping_shl(self.l2_bits())
    }

    /// Returns the number of guest bytes that one L2 table, and so one L1 entry, describes.
    #[inline]
    pub const fn l2_table_span(&self) -> u64 {
        1u64.wrapping_shl(self.cluster_bits.get().saturating_add(self.l2_bits()))
    }

    /// Returns the index of the L1 entry that leads to a guest byte.
    #[inline]
    pub const fn l1_index(&self, offset: GuestOffset) -> usize {
        offset
            .bytes()
            .wrapping_shr(self.cluster_bits.get().saturating_add(self.l2_bits())) as usize
    }

    /// Returns the index, within its L2 table, of the entry that describes a guest byte.
    #[inline]
    pub const fn l2_index(&self, offset: GuestOffset) -> usize {
        offset.bytes().wrapping_shr(self.cluster_bits.get()) as usize & self.l2_entries().wrapping_sub(1)
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
            .get()
            .saturating_add(3)
            .saturating_sub(self.refcount_order.get())
    }

    /// Returns the number of host clusters that one refcount block counts; a block fills one cluster.
    #[inline]
    pub const fn refcount_block_entries(&self) -> usize {
        1usize.wrapping_shl(self.refcount_block_bits())
    }

    /// Returns the index of the refcount table entry that leads to a host cluster's count.
    #[inline]
    pub const fn refcount_table_index(&self, cluster: HostCluster) -> usize {
        cluster.index().wrapping_shr(self.refcount_block_bits()) as usize
    }

    /// Returns the index, within its refcount block, of the entry that counts a host cluster.
    #[inline]
    pub const fn refcount_block_index(&self, cluster: HostCluster) -> usize {
        cluster.index() as usize & self.refcount_block_entries().wrapping_sub(1)
    }

    /// Returns the number of 8-byte entries in one cluster of a table (L1, refcount table).
    #[inline]
    pub const fn table_entries_per_cluster(&self) -> usize {
        1usize.wrapping_shl(self.cluster_bits.get().saturating_sub(3))
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
    fn default_geometry_matches_the_specification() {
        let geometry = geometry(16, 4);
        assert_eq!(geometry.l2_entries(), 8192);
        assert_eq!(geometry.l2_table_span(), 512 << 20);
        assert_eq!(geometry.refcount_block_entries(), 32768);
        assert_eq!(geometry.l1_entries_needed(1 << 40), 2048);
        assert_eq!(geometry.l1_entries_needed((1 << 40) + 1), 2049);
        assert_eq!(geometry.l1_entries_needed(0), 0);
    }

    #[test]
    fn extended_l2_entries_halve_only_what_a_table_maps() {
        let standard = geometry(16, 4);
        let extended = standard.with_l2_entry_width(L2EntryWidth::Extended);
        assert_eq!(extended.l2_entries(), 4096);
        assert_eq!(extended.l2_table_span(), 256 << 20);
        assert_eq!(extended.l1_entries_needed(1 << 40), 4096);
        assert_eq!(extended.table_entries_per_cluster(), 8192);
        assert_eq!(
            (standard.subcluster_size(), extended.subcluster_size()),
            (65536, 2048)
        );
        assert_eq!(extended.subcluster_index(3 * 65536 + 5 * 2048 + 1), 5);
        assert_eq!(standard.subcluster_index(3 * 65536 + 5 * 2048 + 1), 0);
        assert_eq!(
            extended.refcount_block_entries(),
            standard.refcount_block_entries()
        );
    }

    proptest! {
        #[test]
        fn guest_offset_round_trips_through_table_indices(
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
        fn host_cluster_round_trips_through_refcount_indices(
            bits in 9u32..=21, order in 0u32..=6, index in any::<u64>(),
        ) {
            let geometry = geometry(bits, order);
            let cluster = HostCluster::new(index);
            let found = ((geometry.refcount_table_index(cluster) as u128) << geometry.refcount_block_bits())
                + geometry.refcount_block_index(cluster) as u128;
            prop_assert_eq!(found, u128::from(index));
        }

        #[test]
        fn clusters_for_rounds_up_to_whole_clusters(bits in 9u32..=21, bytes in any::<u64>()) {
            let geometry = geometry(bits, 4);
            let clusters = geometry.clusters_for(bytes);
            let room = u128::from(clusters) << bits;
            prop_assert!(room >= u128::from(bytes) && room - u128::from(bytes) < 1 << bits);
        }
    }
}
