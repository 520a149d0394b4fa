//! References: the host bytes that table entries refer to.
//!
//! Everyone who follows references finds them here: checks, repairs, and the guards of an open image. So all of them
//! agree on the bytes that an entry means. Spec: "Cluster mapping", "Refcount table", "Bitmap table".

use super::l1::OFFSET_MASK;
use super::{
    BitmapCluster, BitmapTableEntry, ClusterUse, EntryError, Geometry, HostCluster, HostOffset, L1Entry,
    L2Entry, RefcountTableEntry,
};

/// Host bytes with a use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Reference {
    /// The use.
    pub(crate) target: ClusterUse,
    /// The offset of the first byte: that of a cluster, except for compressed data.
    pub(crate) host: HostOffset,
    /// The number of bytes, at least 1.
    pub(crate) len: u64,
}

impl Reference {
    /// Returns the clusters that hold the bytes, in order.
    #[inline]
    pub(crate) fn clusters(
        &self,
        geometry: &Geometry,
    ) -> impl DoubleEndedIterator<Item = HostCluster> + Clone + use<> {
        let last = self.host.bytes().saturating_add(self.len.saturating_sub(1));
        let last = geometry.host_cluster(HostOffset::new(last)).index();
        geometry
            .host_cluster(self.host)
            .until(HostCluster::new(last.saturating_add(1)))
    }
}

/// The bytes that an entry refers to, and its fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Referred {
    /// The bytes. A damaged entry has some if it is clear which: if nobody counted them, they would look leaked.
    pub(crate) reference: Option<Reference>,
    /// The fault of a damaged entry.
    pub(crate) fault: Option<EntryError>,
}

impl Referred {
    /// Returns the bytes that a sound entry refers to; `None` for a damaged one.
    #[inline]
    pub(crate) fn sound(self) -> Option<Reference> {
        self.reference.filter(|_| self.fault.is_none())
    }
}

/// An entry of a table that refers to host bytes.
pub(crate) trait Entry: Copy {
    /// Creates an entry from the 64 bits that hold its reference. Zero refers to nothing.
    fn from_raw(raw: u64) -> Self;

    /// Returns the host bytes that the entry refers to.
    fn referred(self, geometry: &Geometry) -> Referred;
}

/// Returns the reference of each sound entry that has one, after the entry's index in the table and the entry.
#[inline]
pub(crate) fn references<E: Entry>(
    entries: impl Iterator<Item = E>,
    geometry: &Geometry,
) -> impl Iterator<Item = (usize, E, Reference)> {
    entries
        .enumerate()
        .filter_map(move |(index, entry)| Some((index, entry, entry.referred(geometry).sound()?)))
}

/// Returns the reference of an entry that decodes to the offset of a whole cluster, if to any. `named` finds the one
/// that a damaged entry names.
#[inline]
fn cluster(
    target: ClusterUse,
    decoded: Result<Option<HostOffset>, EntryError>,
    named: impl FnOnce(EntryError) -> Option<HostOffset>,
    geometry: &Geometry,
) -> Referred {
    let (host, fault) = match decoded {
        Ok(host) => (host, None),
        Err(fault) => (named(fault), Some(fault)),
    };
    let reference = host.map(|host| Reference {
        target,
        host,
        len: geometry.cluster_size(),
    });
    Referred { reference, fault }
}

/// Returns the offset in an L1 or L2 entry whose fault is in other bits.
fn named(raw: u64, fault: EntryError, geometry: &Geometry) -> Option<HostOffset> {
    let host = HostOffset::new(raw & OFFSET_MASK);
    let is_elsewhere = matches!(
        fault,
        EntryError::ReservedBits { .. }
            | EntryError::ZeroFlagInVersion2 { .. }
            | EntryError::SubclustersOfTwoKinds { .. }
    );
    (is_elsewhere && host.bytes() != 0 && host.is_aligned_to(geometry.cluster_size())).then_some(host)
}

impl Entry for L1Entry {
    fn from_raw(raw: u64) -> Self {
        Self::from_raw(raw)
    }

    fn referred(self, geometry: &Geometry) -> Referred {
        let table = self.decode(geometry).map(|table| table.map(|table| table.host));
        let named = |fault| named(self.raw(), fault, geometry);
        cluster(ClusterUse::L2Table, table, named, geometry)
    }
}

impl Entry for L2Entry {
    fn from_raw(raw: u64) -> Self {
        Self::from_raw(raw)
    }

    #[inline]
    fn referred(self, geometry: &Geometry) -> Referred {
        let decoded = self.decode(geometry);
        if geometry.has_data_file() {
            // The offset of an entry is one in the data file.
            return Referred {
                reference: None,
                fault: decoded.err(),
            };
        }
        if self.is_compressed() {
            let reference = self.compressed_extent(geometry).map(|extent| Reference {
                target: ClusterUse::GuestData,
                host: extent.host,
                len: u64::from(extent.len_max),
            });
            return Referred {
                reference,
                fault: decoded.err(),
            };
        }
        let host = decoded.map(|mapping| mapping.cluster().map(|(host, _)| host));
        let named = |fault| named(self.raw(), fault, geometry);
        cluster(ClusterUse::GuestData, host, named, geometry)
    }
}

/// A damaged entry refers to nothing: no count in such a block could be believed.
impl Entry for RefcountTableEntry {
    fn from_raw(raw: u64) -> Self {
        Self::from_raw(raw)
    }

    fn referred(self, geometry: &Geometry) -> Referred {
        cluster(
            ClusterUse::RefcountBlock,
            self.decode(geometry),
            |_| None,
            geometry,
        )
    }
}

/// A damaged entry refers to nothing, as in QEMU.
impl Entry for BitmapTableEntry {
    fn from_raw(raw: u64) -> Self {
        Self::from_raw(raw)
    }

    fn referred(self, geometry: &Geometry) -> Referred {
        let data = self.decode(geometry).map(|content| match content {
            BitmapCluster::Data(host) => Some(host),
            BitmapCluster::Zeros | BitmapCluster::Ones => None,
        });
        cluster(ClusterUse::BitmapData, data, |_| None, geometry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ClusterBits, RefcountOrder, Version};

    const CLUSTER: u64 = 1 << 16;
    /// A host cluster.
    const AT: u64 = 5 * CLUSTER;
    const COPIED: u64 = 1 << 63;
    const COMPRESSED: u64 = 1 << 62;

    const fn geometry(version: Version) -> Geometry {
        Geometry::new(version, ClusterBits::DEFAULT, RefcountOrder::DEFAULT, 1 << 30)
    }

    fn of<E: Entry>(raw: u64) -> (Option<(u64, u64)>, bool) {
        let referred = E::from_raw(raw).referred(&geometry(Version::V3));
        let bytes = referred.reference.map(|bytes| (bytes.host.bytes(), bytes.len));
        (bytes, referred.fault.is_some())
    }

    #[test]
    fn zero_entry_refers_to_nothing_in_any_table() {
        assert_eq!(of::<L1Entry>(0), (None, false));
        assert_eq!(of::<L2Entry>(0), (None, false));
        assert_eq!(of::<RefcountTableEntry>(0), (None, false));
        assert_eq!(of::<BitmapTableEntry>(0), (None, false));
    }

    #[test]
    fn sound_entry_refers_to_its_cluster() {
        let whole = (Some((AT, CLUSTER)), false);
        assert_eq!(of::<L1Entry>(COPIED | AT), whole);
        assert_eq!(of::<L2Entry>(AT), whole);
        assert_eq!(of::<L2Entry>(AT | 1), whole, "zeros that keep a cluster");
        assert_eq!(of::<L2Entry>(1), (None, false), "zeros that keep none");
        assert_eq!(of::<RefcountTableEntry>(AT), whole);
        assert_eq!(of::<BitmapTableEntry>(AT), whole);
        assert_eq!(of::<BitmapTableEntry>(1), (None, false), "ones");
    }

    /// QEMU's check counts these references too, or a repair would free clusters that the damaged entry means.
    #[test]
    fn damaged_entry_refers_to_the_cluster_it_names() {
        let named = (Some((AT, CLUSTER)), true);
        assert_eq!(of::<L1Entry>(AT | 1), named);
        assert_eq!(of::<L2Entry>(AT | 2), named);
        assert_eq!(of::<L1Entry>(AT | 512 | 1), (None, true), "in no cluster");
        assert_eq!(of::<L2Entry>(AT | 512), (None, true));
        assert_eq!(of::<RefcountTableEntry>(AT | 1), (None, true));
        assert_eq!(of::<BitmapTableEntry>(AT | 2), (None, true));
        let zero = L2Entry::from_raw(AT | 1).referred(&geometry(Version::V2));
        assert_eq!(zero.reference.map(|bytes| bytes.host.bytes()), Some(AT));
        assert!(zero.fault.is_some() && zero.sound().is_none());
    }

    #[test]
    fn compressed_entry_refers_to_every_cluster_it_touches() {
        let host = HostOffset::new(6 * CLUSTER - 100);
        let entry = L2Entry::compressed(host, 200, &geometry(Version::V3)).unwrap();
        let copied = L2Entry::from_raw(entry.raw() | COPIED);
        for (entry, is_sound) in [(entry, true), (copied, false)] {
            let referred = entry.referred(&geometry(Version::V3));
            let bytes = referred.reference.unwrap();
            let clusters: Vec<_> = bytes.clusters(&geometry(Version::V3)).collect();
            assert_eq!(clusters, [5, 6].map(HostCluster::new), "{bytes:?}");
            assert_eq!(referred.sound().is_some(), is_sound);
        }
        let small = ClusterBits::parse(9).unwrap();
        let small = Geometry::new(Version::V3, small, RefcountOrder::DEFAULT, 1 << 30);
        let far = L2Entry::from_raw(COMPRESSED | 1 << 57).referred(&small);
        assert!(
            far.reference.is_none() && far.fault.is_some(),
            "no file is as long"
        );
    }

    #[test]
    fn references_yields_only_sound_entries() {
        let entries = [0, 3 * CLUSTER, AT | 2, 4 * CLUSTER].map(L2Entry::from_raw);
        let geometry = geometry(Version::V3);
        let found: Vec<_> = references(entries.into_iter(), &geometry)
            .map(|(index, _, bytes)| (index, bytes.host.bytes() / CLUSTER))
            .collect();
        assert_eq!(found, [(1, 3), (3, 4)]);
    }
}
