//! Entries of the mapping: lookups and changes.
//!
//! Invariant: an entry is set only once the bytes that it exposes are written, and the clusters it referred to before
//! are in `drops` from then on.

use super::{Blocked, Dropped, Metadata, corrupt};
use crate::format::{
    CompressedExtent, EntryError, GuestCluster, GuestOffset, HostOffset, L2Entry, L2EntryWidth, L2Mapping,
    L2Table, L2TableMut, SubclusterKind,
};
use crate::invariant::invariant;

/// The content of a uniform range of the guest's disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Extent {
    /// Host bytes in one piece, from `at` on. `owned`: they may be overwritten in place.
    Data { at: HostOffset, owned: bool },
    /// Zeros.
    Zero,
    /// The backing file's bytes, or zeros without one.
    Unallocated,
    /// One compressed cluster.
    Compressed(CompressedExtent),
}

/// The result of a lookup.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Lookup {
    /// `len` bytes, from the requested guest offset on, are uniform.
    Found { extent: Extent, len: u64 },
    /// This L2 slice must be loaded first.
    Miss(u64),
    /// The mapping is corrupt there.
    Corrupt(EntryError),
    /// The mapping points past the end of the file.
    PastEnd(HostOffset),
    /// The mapping was found to point to a forbidden cluster when it was loaded.
    Refused,
}

impl Metadata {
    /// Returns the content of the guest bytes from `offset` on. It covers at most `len` bytes of one
    /// extent, within one L2 slice or one unallocated L2 table.
    #[inline]
    pub(crate) fn lookup(&self, offset: GuestOffset, len: u64) -> Lookup {
        let geometry = &self.geometry;
        let cluster = geometry.guest_cluster(offset);
        let slice = self.slice_of(cluster);
        let l1_index = geometry.l1_index(offset);
        let table = match self.l1_entry(l1_index) {
            Ok(Some(table)) => table,
            Ok(None) => return unallocated(offset, len, geometry.l2_table_span()),
            Err(error) => return Lookup::Corrupt(error),
        };
        let Some(cached) = self.l2.get_with_state(slice) else {
            // A fresh table's slices are zeros until something is mapped there.
            if self.fresh_tables.contains(&l1_index) {
                return unallocated(offset, len, self.slice_span());
            }
            return Lookup::Miss(slice);
        };
        let entries = L2Table::new(cached.bytes, geometry);
        let first = self.index_in_slice(cluster);
        let within = geometry.offset_in_cluster(offset.bytes());
        let owns = table.copied && cached.checked;
        if let Some((at, copied)) = cached.run.place(first, within, len, geometry)
            && !self.is_past_end(at + len.saturating_sub(1))
        {
            let owned = copied && owns;
            let found = Lookup::Found {
                extent: Extent::Data { at, owned },
                len,
            };
            // Bytes of others would be read or overwritten.
            invariant!(
                self.lookup_entries(entries, first, offset, len, owns) == found,
                "slice {slice} has no run of data at entry {first}"
            );
            return found;
        }
        self.lookup_entries(entries, first, offset, len, owns)
    }

    /// Returns the content of the guest bytes from `offset` on as [`Metadata::lookup`] does. Entry `first` of `entries`
    /// describes the first of them. `owns`: what the entries own may be overwritten in place.
    #[inline]
    fn lookup_entries(
        &self,
        entries: L2Table<'_>,
        first: usize,
        offset: GuestOffset,
        len: u64,
        owns: bool,
    ) -> Lookup {
        let geometry = &self.geometry;
        let within = geometry.offset_in_cluster(offset.bytes());
        if geometry.has_subclusters() {
            let entry = entries.get_as(L2EntryWidth::Extended, first);
            if let Some(extent) = self.data_of_one_cluster(entry, within, len, owns) {
                return Lookup::Found { extent, len };
            }
            let found = self.lookup_subclusters(entries, first, offset, len, owns);
            // Of another type, or the result of every lookup would pass through memory.
            return match found {
                Ok((extent, len)) => Lookup::Found { extent, len },
                Err(lookup) => *lookup,
            };
        }
        let entry = entries.get_as(L2EntryWidth::Standard, first);
        let mapping = match entry.decode_standard(geometry) {
            Ok(mapping) => mapping,
            Err(_) if entry == L2Entry::REFUSED => return Lookup::Refused,
            Err(error) => return Lookup::Corrupt(error),
        };
        let extent = match mapping {
            L2Mapping::Unallocated => Extent::Unallocated,
            L2Mapping::Zero { .. } => Extent::Zero,
            L2Mapping::Data { host, .. } if self.is_past_end(host) => return Lookup::PastEnd(host),
            L2Mapping::Data { host, copied } => Extent::Data {
                at: host + within,
                owned: copied && owns,
            },
            L2Mapping::Compressed(compressed) => Extent::Compressed(compressed),
            // This image has none.
            L2Mapping::Subclusters { .. } => return Lookup::Refused,
        };
        let size = geometry.cluster_size();
        let mut found = size - within;
        if found >= len || matches!(extent, Extent::Compressed(_)) {
            return Lookup::Found {
                extent,
                len: found.min(len),
            };
        }
        for index in first + 1..entries.len() {
            let next = entries.get_as(L2EntryWidth::Standard, index);
            let Ok(next) = next.decode_standard(geometry) else {
                break;
            };
            let alike = match (extent, next) {
                (Extent::Unallocated, L2Mapping::Unallocated) | (Extent::Zero, L2Mapping::Zero { .. }) => {
                    true
                }
                (Extent::Data { at, owned }, L2Mapping::Data { host: next, copied }) => {
                    next == at + found && owned == (copied && owns) && !self.is_past_end(next)
                }
                _ => false,
            };
            if !alike {
                break;
            }
            found += size;
            if found >= len {
                break;
            }
        }
        Lookup::Found {
            extent,
            len: found.min(len),
        }
    }

    /// Returns the content of the `len` bytes from `within` on in the cluster of an extended entry, if all have data and none is beyond
    /// the cluster: most requests are for such, and find them as soon as without subclusters.
    #[inline]
    fn data_of_one_cluster(&self, entry: L2Entry, within: u64, len: u64, owns: bool) -> Option<Extent> {
        let geometry = &self.geometry;
        let last = within.checked_add(len.checked_sub(1)?)?;
        if last >= geometry.cluster_size() {
            return None;
        }
        let [first, last] = [within, last].map(|byte| geometry.subcluster_index(byte));
        let (host, copied) = entry.data_in(first, last, geometry)?;
        (!self.is_past_end(host)).then_some(Extent::Data {
            at: host + within,
            owned: copied && owns,
        })
    }

    /// Returns the content of the guest bytes from `offset` on as [`Metadata::lookup`] does. Entry `first` of `entries`
    /// describes the first of them. `owns`: what the entries own may be overwritten in place.
    #[inline(never)]
    fn lookup_subclusters(
        &self,
        entries: L2Table<'_>,
        first: usize,
        offset: GuestOffset,
        len: u64,
        owns: bool,
    ) -> Result<(Extent, u64), Box<Lookup>> {
        let size = self.geometry.cluster_size();
        let within = self.geometry.offset_in_cluster(offset.bytes());
        let (extent, end) = self
            .run_of_subclusters(entries.get(first), within, owns)
            .map_err(Box::new)?;
        let mut found = end - within;
        let mut index = first + 1;
        // The run reaches the cluster's end, and may go on.
        while found < len && (within + found).is_multiple_of(size) && index < entries.len() {
            let Ok((next, end)) = self.run_of_subclusters(entries.get(index), 0, owns) else {
                break;
            };
            let alike = match (extent, next) {
                (Extent::Unallocated, Extent::Unallocated) | (Extent::Zero, Extent::Zero) => true,
                (Extent::Data { at, owned }, _) => {
                    next == Extent::Data {
                        at: at + found,
                        owned,
                    }
                }
                _ => false,
            };
            if !alike {
                break;
            }
            found += end;
            index += 1;
        }
        Ok((extent, found.min(len)))
    }

    /// Returns the content of the bytes from `within` on in the cluster of an extended entry, and the end in the cluster
    /// of the subclusters with the same content.
    fn run_of_subclusters(&self, entry: L2Entry, within: u64, owns: bool) -> Result<(Extent, u64), Lookup> {
        let geometry = &self.geometry;
        let mapping = match entry.decode(geometry) {
            Ok(mapping) => mapping,
            Err(_) if entry == L2Entry::REFUSED => return Err(Lookup::Refused),
            Err(error) => return Err(Lookup::Corrupt(error)),
        };
        let (bitmap, index) = (mapping.subclusters(), geometry.subcluster_index(within));
        let extent = match (mapping, bitmap.kind(index), mapping.cluster()) {
            (L2Mapping::Compressed(compressed), ..) => Extent::Compressed(compressed),
            (_, SubclusterKind::Zero, _) => Extent::Zero,
            (_, SubclusterKind::Data, Some((host, _))) if self.is_past_end(host) => {
                return Err(Lookup::PastEnd(host));
            }
            (_, SubclusterKind::Data, Some((host, copied))) => Extent::Data {
                at: host + within,
                owned: copied && owns,
            },
            // Data without a host cluster does not decode.
            (_, SubclusterKind::Data, None) | (_, SubclusterKind::Unallocated, _) => Extent::Unallocated,
        };
        let end = u64::from(bitmap.run_end(index)) << geometry.subcluster_bits();
        Ok((extent, end))
    }

    /// Returns true if a host offset lies past the end of the image file that has the data.
    #[inline]
    fn is_past_end(&self, host: HostOffset) -> bool {
        // The data file was found long enough for the disk when it was opened.
        self.geometry.host_cluster(host) >= self.refcounts.end() && !self.geometry.has_data_file()
    }

    /// Returns the host cluster that a guest cluster, mapped to `old`, has for itself: in a data file always its own place.
    pub(super) fn owned(&self, cluster: GuestCluster, old: &L2Mapping) -> Option<HostOffset> {
        if self.geometry.has_data_file() {
            return Some(self.geometry.data_file_offset(cluster));
        }
        old.owned()
    }

    /// Returns the host cluster that a guest cluster is mapped to, if it lies past the end of the file.
    pub(super) fn past_end(&self, mapping: &L2Mapping) -> Option<HostOffset> {
        let (host, _) = mapping.cluster()?;
        self.is_past_end(host).then_some(host)
    }

    /// Returns the mapping of a guest cluster, whose slice is cached.
    pub(crate) fn mapping(&self, slice: u64, cluster: GuestCluster) -> Result<L2Mapping, Blocked> {
        let bytes = self.l2.get(slice).ok_or(Blocked::LoadL2(slice))?;
        let entry = L2Table::new(bytes, &self.geometry).get(self.index_in_slice(cluster));
        entry.decode(&self.geometry).map_err(corrupt)
    }

    /// Changes one mapping. Its old host clusters are dropped, unless the new entry keeps them.
    pub(crate) fn set_mapping(
        &mut self,
        slice: u64,
        cluster: GuestCluster,
        new: L2Entry,
    ) -> Result<(), Blocked> {
        let old = self.mapping(slice, cluster)?;
        let decoded = new.decode(&self.geometry);
        let is_own = |(host, _): (HostOffset, bool)| host == self.geometry.data_file_offset(cluster);
        // Other guest bytes would be read there.
        invariant!(
            !self.geometry.has_data_file()
                || decoded.is_ok_and(|mapping| mapping.cluster().is_none_or(is_own)),
            "{new:?} leads to a place in the data file that is not its own"
        );
        // It will be written: this program must be able to read it.
        invariant!(decoded.is_ok(), "{new:?} is no entry of an L2 table");
        // Snapshots would see the change.
        invariant!(
            matches!(self.l1_entry(self.table_of(slice)), Ok(Some(table)) if table.copied),
            "an entry of a shared L2 table is changed"
        );
        // One that is wrong has no data.
        let decoded = decoded.unwrap_or(L2Mapping::Unallocated);
        let kept = decoded.cluster();
        match old {
            // The place stays the guest cluster's.
            _ if self.geometry.has_data_file() => {}
            L2Mapping::Compressed(extent) => {
                let first = self.geometry.host_cluster(extent.host);
                let last = self.geometry.host_cluster(HostOffset::new(extent.end() - 1));
                let count = last - first + 1;
                self.drop_clusters(Dropped { first, count }, false);
            }
            _ => {
                if let Some((host, is_sole)) = old.cluster()
                    && kept.is_none_or(|(kept, _)| kept != host)
                {
                    let dropped = Dropped::one(self.geometry.host_cluster(host));
                    self.drop_clusters(dropped, is_sole);
                }
            }
        }
        let index = self.index_in_slice(cluster);
        let (bytes, run) = self.l2.change(slice).ok_or(Blocked::LoadL2(slice))?;
        L2TableMut::new(bytes, &self.geometry).set(index, new);
        run.change(index, &decoded, &self.geometry);
        Ok(())
    }
}

/// Returns unallocated bytes from `offset` up to the next multiple of `span`.
fn unallocated(offset: GuestOffset, len: u64, span: u64) -> Lookup {
    let rest = span - (offset.bytes() & (span - 1));
    Lookup::Found {
        extent: Extent::Unallocated,
        len: len.min(rest),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Growth;
    use super::super::plan::Action;
    use super::super::testing::{CLUSTER, metadata, metadata_of};
    use super::*;
    use crate::format::{L1Entry, L2TableRef, SubclusterBitmap};
    use proptest::prelude::*;

    /// The flags of an L2 entry.
    const COPIED: u64 = 1 << 63;
    const COMPRESSED: u64 = 1 << 62;
    const ZERO: u64 = 1;
    /// A cluster in the file, and one past its end.
    const HERE: u64 = 2 * CLUSTER;
    const BEYOND: u64 = 9 * CLUSTER;

    /// An image whose first clusters lie one behind the other, and are the image's alone or not.
    fn mapped(copied: [bool; 4]) -> Metadata {
        let mut metadata = metadata();
        for (cluster, copied) in (0..).zip(copied) {
            let (from, to) = (cluster * CLUSTER, (cluster + 1) * CLUSTER);
            let step = metadata.plan_write(GuestOffset::new(from), GuestOffset::new(to), Growth::Free);
            let Action::Fill(fill) = step.expect("an empty image").action else {
                panic!("nothing is mapped");
            };
            assert_eq!(metadata.publish(&fill.allocation).1, Ok(()));
            let cluster = GuestCluster::new(cluster);
            let now = metadata.mapping(0, cluster).expect("the slice is cached");
            let (host, _) = now.cluster().expect("it is mapped");
            let entry = L2Entry::data(host, copied, metadata.geometry());
            metadata
                .set_mapping(0, cluster, entry)
                .expect("the slice is cached");
        }
        metadata
    }

    /// Returns whether the clusters from the first one on may be overwritten, and how many of them.
    fn found(metadata: &Metadata) -> (bool, u64) {
        match metadata.lookup(GuestOffset::new(0), 4 * CLUSTER) {
            Lookup::Found {
                extent: Extent::Data { owned, .. },
                len,
            } => (owned, len / CLUSTER),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        /// Method: bytes of one cluster are found as those of any number of them.
        #[test]
        fn data_of_one_cluster_is_what_a_lookup_of_many_finds(
            bitmap in prop_oneof![any::<u64>(), any::<u32>().prop_map(u64::from), Just(u64::from(u32::MAX))],
            descriptor in prop_oneof![
                Just(0), Just(HERE), Just(HERE | COPIED), Just(HERE | ZERO), Just(HERE | COMPRESSED), Just(HERE + 512),
                Just(BEYOND | COPIED), any::<u64>(),
            ],
            within in prop_oneof![0..CLUSTER, (0..32u64).prop_map(|index| index * CLUSTER / 32)],
            len in prop_oneof![Just(0), 0..3 * CLUSTER, 0..8192u64],
        ) {
            let mut metadata = metadata_of(L2EntryWidth::Extended);
            metadata.l1[0] = L1Entry::encode(L2TableRef { host: HostOffset::new(CLUSTER), copied: true });
            metadata.l2.insert(0, vec![0; 4096].into(), false);
            let entry = L2Entry::from_raw(descriptor).with_bitmap(SubclusterBitmap::from_raw(bitmap));
            let bytes = metadata.l2.get_mut(0).expect("it was inserted");
            let geometry = metadata.geometry;
            (0..2).for_each(|index| L2TableMut::new(bytes, &geometry).set(index, entry));
            let cached = metadata.l2.get_with_state(0).expect("it was inserted");
            let entries = L2Table::new(cached.bytes, &geometry);
            let slowly = metadata.lookup_subclusters(entries, 0, GuestOffset::new(within), len, cached.checked);
            let slowly = slowly.map_or_else(|lookup| *lookup, |(extent, len)| Lookup::Found { extent, len });
            prop_assert_eq!(metadata.lookup(GuestOffset::new(within), len), slowly);
        }
    }

    #[test]
    fn clusters_that_may_be_overwritten_end_where_shared_ones_begin() {
        for (copied, expected) in [
            ([true; 4], (true, 4)),
            ([true, true, false, true], (true, 2)),
            ([false, false, true, true], (false, 2)),
            ([false; 4], (false, 4)),
        ] {
            let mut metadata = mapped(copied);
            assert_eq!(found(&metadata), expected, "{copied:?}");
            // A snapshot has the whole table.
            metadata.l1[0] = metadata.l1[0].with_copied(false);
            assert_eq!(found(&metadata), (false, 4), "{copied:?}");
        }
    }
}
