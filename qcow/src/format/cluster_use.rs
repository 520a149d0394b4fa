//! Uses of host clusters, as check, guards and errors name them.

use std::fmt;

use serde::{Serialize, Serializer};

/// The use of a host cluster.
///
/// The order is that of the guards: where two structures overlap, the later one is reported to lie over the other.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(u8)]
pub enum ClusterUse {
    /// The header, with its extensions and the name of the backing file.
    Header = 1,
    /// The active L1 table.
    L1Table,
    /// An L2 table.
    L2Table,
    /// The table of snapshots.
    SnapshotTable,
    /// The L1 table of a snapshot.
    SnapshotL1Table,
    /// An L2 table of a snapshot, if it is told from those of the disk.
    SnapshotL2Table,
    /// The encryption header.
    EncryptionHeader,
    /// The directory of the bitmaps.
    BitmapDirectory,
    /// The table of a bitmap.
    BitmapTable,
    /// Bits of a bitmap.
    BitmapData,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// A guest's bytes, plain or compressed.
    GuestData,
    /// Any use, or one that is not known.
    Unknown,
}

impl ClusterUse {
    /// All uses, in order.
    pub const ALL: [Self; 14] = [
        Self::Header,
        Self::L1Table,
        Self::L2Table,
        Self::SnapshotTable,
        Self::SnapshotL1Table,
        Self::SnapshotL2Table,
        Self::EncryptionHeader,
        Self::BitmapDirectory,
        Self::BitmapTable,
        Self::BitmapData,
        Self::RefcountTable,
        Self::RefcountBlock,
        Self::GuestData,
        Self::Unknown,
    ];

    /// The number of bits that hold [`Self::number`].
    pub(crate) const BITS: u32 = 4;

    /// Returns the number of the use, from one: for lists that keep millions of them.
    #[inline]
    pub(crate) const fn number(self) -> u64 {
        self as u64
    }

    /// Returns the use with this number.
    #[inline]
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        let index = usize::try_from(number).ok()?.checked_sub(1)?;
        Self::ALL.get(index).copied()
    }

    /// Returns true for refcounts: if their clusters have another use as well, they can be written somewhere else.
    pub(crate) const fn is_refcounts(self) -> bool {
        matches!(self, Self::RefcountTable | Self::RefcountBlock)
    }

    /// Returns true if both may use the same cluster: snapshots share their tables with each other and the disk.
    pub(crate) const fn is_shared_with(self, other: Self) -> bool {
        matches!(
            (self, other),
            (Self::SnapshotL1Table, Self::SnapshotL1Table)
                | (Self::SnapshotL2Table, Self::SnapshotL2Table | Self::L2Table)
        )
    }

    /// Returns the name with its article, as in "an L2 table".
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Header => "the header",
            Self::L1Table => "the L1 table",
            Self::L2Table => "an L2 table",
            Self::SnapshotTable => "the snapshot table",
            Self::SnapshotL1Table => "a snapshot's L1 table",
            Self::SnapshotL2Table => "a snapshot's L2 table",
            Self::EncryptionHeader => "the encryption header",
            Self::BitmapDirectory => "the bitmap directory",
            Self::BitmapTable => "a bitmap table",
            Self::BitmapData => "a bitmap's data",
            Self::RefcountTable => "the refcount table",
            Self::RefcountBlock => "a refcount block",
            Self::GuestData => "the mapping",
            Self::Unknown => "a cluster",
        }
    }

    /// Returns the name, as in "L2 table".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::L1Table => "L1 table",
            Self::L2Table => "L2 table",
            Self::SnapshotTable => "snapshot table",
            Self::SnapshotL1Table => "snapshot's L1 table",
            Self::SnapshotL2Table => "snapshot's L2 table",
            Self::EncryptionHeader => "encryption header",
            Self::BitmapDirectory => "bitmap directory",
            Self::BitmapTable => "bitmap table",
            Self::BitmapData => "bitmap data",
            Self::RefcountTable => "refcount table",
            Self::RefcountBlock => "refcount block",
            Self::GuestData => "guest data",
            Self::Unknown => "cluster",
        }
    }
}

impl fmt::Display for ClusterUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for ClusterUse {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

const _: () = assert!(ClusterUse::ALL.len() < 1 << ClusterUse::BITS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_use_round_trips_through_its_number() {
        for (index, &cluster_use) in ClusterUse::ALL.iter().enumerate() {
            assert_eq!(cluster_use.number(), index as u64 + 1);
            assert_eq!(ClusterUse::from_number(cluster_use.number()), Some(cluster_use));
            assert_eq!(
                ClusterUse::ALL
                    .iter()
                    .filter(|other| other.name() == cluster_use.name())
                    .count(),
                1
            );
        }
        for number in [0, ClusterUse::ALL.len() as u64 + 1, u64::MAX] {
            assert_eq!(ClusterUse::from_number(number), None);
        }
    }
}
