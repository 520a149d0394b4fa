//! Errors in one table entry, for all tables.
//!
//! The caller knows the entry's place (table and index) and adds it.

/// A table entry breaks the format's rules. The cluster it describes must not be touched.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum EntryError {
    /// Bits that the format reserves are set.
    #[error("{structure} {entry:#018x} has reserved bits set: {bits:#x}")]
    ReservedBits {
        /// The kind of entry.
        structure: &'static str,
        /// The entry as read.
        entry: u64,
        /// The reserved bits that are set.
        bits: u64,
    },
    /// The offset is not a multiple of the cluster size.
    #[error(
        "{structure} {entry:#018x} points to {offset:#x}, which is not a multiple of {cluster_size} bytes"
    )]
    Unaligned {
        /// The kind of entry.
        structure: &'static str,
        /// The entry as read.
        entry: u64,
        /// The offset it holds, in bytes.
        offset: u64,
        /// The image's cluster size, in bytes.
        cluster_size: u64,
    },
    /// An L2 entry of a version 2 image has the all-zeros flag, which came with version 3.
    #[error("L2 entry {entry:#018x} has the all-zeros flag, which a version 2 image cannot have")]
    ZeroFlagInVersion2 {
        /// The entry as read.
        entry: u64,
    },
    /// A compressed cluster claims to be the only user of its bytes.
    #[error("L2 entry {entry:#018x} is compressed and has the COPIED flag, which excludes it")]
    CompressedCopied {
        /// The entry as read.
        entry: u64,
    },
    /// A compressed cluster in an image whose data is in another file.
    #[error("L2 entry {entry:#018x} is compressed, which an image with a data file cannot have")]
    CompressedInDataFile {
        /// The entry as read.
        entry: u64,
    },
    /// The entry claims a refcount of one without an offset.
    #[error("{structure} {entry:#018x} has the COPIED flag but no offset")]
    CopiedWithoutOffset {
        /// The kind of entry.
        structure: &'static str,
        /// The entry as read.
        entry: u64,
    },
    /// An extended L2 entry maps a subcluster to data and to zeros.
    #[error(
        "L2 entry {entry:#018x} marks subclusters {both:#x} both allocated and zero: bitmap {bitmap:#018x}"
    )]
    SubclustersOfTwoKinds {
        /// The entry's descriptor as read.
        entry: u64,
        /// The entry's bitmap as read.
        bitmap: u64,
        /// The subclusters, a bit for each.
        both: u32,
    },
    /// An extended L2 entry maps a subcluster to data and has no host cluster.
    #[error("L2 entry {entry:#018x} has allocated subclusters but no offset: bitmap {bitmap:#018x}")]
    SubclustersWithoutCluster {
        /// The entry's descriptor as read.
        entry: u64,
        /// The entry's bitmap as read.
        bitmap: u64,
    },
}
