//! Runs of data in L2 slices: clusters of a slice whose bytes lie one behind the other in the file.
//!
//! Images that were converted, or written from the front, consist of such runs. A request in one is found without a look at
//! its entry, which is the part of a lookup that the CPU's cache holds least.
//!
//! Invariant: a lookup in a run finds what a lookup of its entries finds.

use std::ops::Range;

use crate::format::{Geometry, HostOffset, L2Entry, L2Mapping, L2Table};

/// The number of clusters that a run has at least if a search is to find it.
const SAMPLE_STEP: usize = 64;

/// A run of fewer clusters than this gives way to one that begins elsewhere.
const SHORT: usize = 8;

/// Clusters of one L2 slice that all have data, one behind the other, and are owned alike. The default is a run of none.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct DataRun {
    /// The offset in the file of cluster `first`, in bytes.
    host: u64,
    /// The index in the slice of the run's first cluster, and of the one after its last.
    first: u16,
    end: u16,
    /// Each entry has the flag COPIED; otherwise none has.
    copied: bool,
}

impl DataRun {
    /// Searches a slice for its longest run. One that is shorter than a sample's distance to the next may be missed: a slice without
    /// any is left after a few looks.
    pub(crate) fn longest(entries: L2Table<'_>, geometry: &Geometry) -> Self {
        let mut longest = Self::default();
        for sample in (0..entries.len()).step_by(SAMPLE_STEP) {
            if sample >= usize::from(longest.end) {
                let run = Self::around(entries, sample, geometry);
                longest = if run.len() > longest.len() { run } else { longest };
            }
        }
        longest
    }

    /// Returns the run that cluster `index` is part of.
    fn around(entries: L2Table<'_>, index: usize, geometry: &Geometry) -> Self {
        let entry = entries.get(index);
        let Some((host, copied)) = data(entry, geometry) else {
            return Self::default();
        };
        // Compared as they are, without decoding each.
        let follows = |next: L2Entry, entry: L2Entry| {
            next.bitmap() == entry.bitmap() && next.raw() == entry.raw().wrapping_add(geometry.cluster_size())
        };
        let (mut first, mut end, mut before, mut last) = (index, index + 1, entry, entry);
        while end < entries.len() && follows(entries.get(end), last) {
            last = entries.get(end);
            end += 1;
        }
        while first > 0 && follows(before, entries.get(first - 1)) {
            first -= 1;
            before = entries.get(first);
        }
        let back = (index - first) as u64 * geometry.cluster_size();
        let run = Self::new(first..end, host.bytes().checked_sub(back), copied);
        // One of a row of entries may be too large to be valid; then its last one is.
        let are_valid = data(before, geometry).is_some() && data(last, geometry).is_some();
        run.filter(|_| are_valid).unwrap_or_default()
    }

    fn new(clusters: Range<usize>, host: Option<u64>, copied: bool) -> Option<Self> {
        Some(Self {
            host: host?,
            first: u16::try_from(clusters.start).ok()?,
            end: u16::try_from(clusters.end).ok()?,
            copied,
        })
    }

    #[inline]
    fn len(&self) -> usize {
        usize::from(self.end - self.first)
    }

    /// Returns the place of `len` bytes, from `within` on in cluster `index` of the slice, and whether their entries have COPIED; `None`
    /// if the run has not all of them.
    #[inline]
    pub(crate) fn place(
        &self,
        index: usize,
        within: u64,
        len: u64,
        geometry: &Geometry,
    ) -> Option<(HostOffset, bool)> {
        let (after, count) = (index.wrapping_sub(usize::from(self.first)), self.len());
        if after >= count {
            return None;
        }
        let bits = geometry.cluster_bits().get();
        let from = (after as u64).wrapping_shl(bits) + within;
        let end = (count as u64).wrapping_shl(bits);
        (from.saturating_add(len) <= end).then(|| (HostOffset::new(self.host + from), self.copied))
    }

    /// Takes into account that cluster `index` of the slice is mapped to `new` from now on.
    pub(crate) fn change(&mut self, index: usize, new: &L2Mapping, geometry: &Geometry) {
        let bits = geometry.cluster_bits().get();
        let (first, end) = (usize::from(self.first), usize::from(self.end));
        let new = data_of(new);
        let fits = new.is_some_and(|(host, copied)| {
            // The run's first cluster, if this one is part of it: both sides wrap alike. It may be the first of an empty one.
            let start = host
                .bytes()
                .wrapping_sub((index.wrapping_sub(first) as u64) << bits);
            start == self.host && copied == self.copied
        });
        if fits && index == end {
            self.end += 1;
        } else if fits && index + 1 == first {
            self.first -= 1;
            self.host -= 1 << bits;
        } else if (first..end).contains(&index) {
            if fits {
                return;
            }
            // What is left of it before and after the cluster: the longer of both.
            if index - first >= end - index {
                self.end = index as u16;
            } else {
                self.host += ((index + 1 - first) as u64) << bits;
                self.first = index as u16 + 1;
            }
        } else if let Some((host, copied)) = new
            && end - first < SHORT
            && let Some(run) = Self::new(index..index + 1, Some(host.bytes()), copied)
        {
            *self = run;
        }
    }
}

/// Returns the place of a cluster that has data and nothing else, and whether its entry has COPIED.
fn data(entry: L2Entry, geometry: &Geometry) -> Option<(HostOffset, bool)> {
    data_of(&entry.decode(geometry).ok()?)
}

fn data_of(mapping: &L2Mapping) -> Option<(HostOffset, bool)> {
    match *mapping {
        L2Mapping::Data { host, copied } => Some((host, copied)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ClusterBits, L2EntryWidth, L2TableMut, RefcountOrder, SubclusterBitmap, Version};
    use proptest::prelude::*;

    const CLUSTER: u64 = 1 << 16;
    const SLICE_BYTES: usize = 4096;

    fn geometry(width: L2EntryWidth) -> Geometry {
        Geometry::new(Version::V3, ClusterBits::DEFAULT, RefcountOrder::DEFAULT, 1 << 30)
            .with_l2_entry_width(width)
    }

    /// One slice, and the run that is kept for it.
    struct Slice {
        geometry: Geometry,
        bytes: Vec<u8>,
        run: DataRun,
    }

    impl Slice {
        fn new(width: L2EntryWidth) -> Self {
            Self {
                geometry: geometry(width),
                bytes: vec![0; SLICE_BYTES],
                run: DataRun::default(),
            }
        }

        fn entries(&self) -> L2Table<'_> {
            L2Table::new(&self.bytes, &self.geometry)
        }

        fn map(&mut self, index: usize, entry: L2Entry) {
            L2TableMut::new(&mut self.bytes, &self.geometry).set(index, entry);
            let mapping = entry.decode(&self.geometry).unwrap_or(L2Mapping::Unallocated);
            self.run.change(index, &mapping, &self.geometry);
        }

        /// Maps `clusters` to host clusters from `host` on.
        fn map_run(&mut self, clusters: Range<usize>, host: u64) {
            for (index, host) in clusters.zip(host..) {
                self.map(index, entry_of((host * CLUSTER) | COPIED, &self.geometry));
            }
        }

        fn searched(&self) -> DataRun {
            DataRun::longest(self.entries(), &self.geometry)
        }

        /// Returns true if a run says of no cluster what its entry does not.
        fn tells_truth(&self, run: &DataRun) -> bool {
            (0..self.entries().len()).all(|index| {
                let found = run.place(index, 0, CLUSTER, &self.geometry);
                found.is_none() || found == data(self.entries().get(index), &self.geometry)
            })
        }
    }

    const COPIED: u64 = 1 << 63;
    const ZERO: u64 = 1;
    const COMPRESSED: u64 = 1 << 62;

    /// An entry whose subclusters have data, if it has any.
    fn entry_of(descriptor: u64, geometry: &Geometry) -> L2Entry {
        let entry = L2Entry::from_raw(descriptor);
        match geometry.has_subclusters() {
            true => entry.with_bitmap(SubclusterBitmap::DATA),
            false => entry,
        }
    }

    fn width() -> impl Strategy<Value = L2EntryWidth> {
        prop_oneof![Just(L2EntryWidth::Standard), Just(L2EntryWidth::Extended)]
    }

    proptest! {
        /// Method: clusters are mapped one after the other to where they would lie in a row, elsewhere, or to no data.
        #[test]
        fn run_says_what_entries_say_after_every_change(
            width in width(),
            changes in prop::collection::vec(
                (0..24usize, prop_oneof![Just(40u64), Just(60)], prop_oneof![
                    4 => Just(COPIED), 1 => Just(0), 1 => Just(ZERO), 1 => Just(COMPRESSED), 1 => Just(512), 1 => Just(u64::MAX),
                ], prop_oneof![6 => Just(None), 1 => any::<u64>().prop_map(Some)]),
                1..120,
            ),
        ) {
            let mut slice = Slice::new(width);
            for (index, base, flags, bitmap) in changes {
                let mut entry = entry_of(((base + index as u64) * CLUSTER) | flags, &slice.geometry);
                if let (true, Some(bitmap)) = (slice.geometry.has_subclusters(), bitmap) {
                    entry = entry.with_bitmap(SubclusterBitmap::from_raw(bitmap));
                }
                slice.map(index, entry);
                prop_assert!(slice.tells_truth(&slice.run), "{:?}", slice.run);
                prop_assert!(slice.tells_truth(&slice.searched()));
            }
        }

        #[test]
        fn search_finds_longest_of_long_runs(
            width in width(), lengths in prop::collection::vec(0..200usize, 1..6),
        ) {
            let mut slice = Slice::new(width);
            let (mut at, mut most) = (0, 0);
            for (part, &len) in lengths.iter().enumerate() {
                let end = (at + len).min(slice.entries().len());
                slice.map_run(at..end, (part as u64 + 1) << 20);
                most = most.max(end - at);
                at = end;
            }
            let found = slice.searched();
            prop_assert!(slice.tells_truth(&found));
            prop_assert!(found.len() == most || most < 2 * SAMPLE_STEP, "{found:?}, {most}");
        }
    }

    #[test]
    fn clusters_mapped_in_order_or_against_it_are_one_run() {
        for width in [L2EntryWidth::Standard, L2EntryWidth::Extended] {
            let count = Slice::new(width).entries().len();
            let (mut forwards, mut backwards) = (Slice::new(width), Slice::new(width));
            for index in 0..count {
                let back = count - 1 - index;
                forwards.map_run(index..index + 1, 100 + index as u64);
                backwards.map_run(back..back + 1, 100 + back as u64);
            }
            for slice in [forwards, backwards] {
                assert_eq!(slice.run.len(), count);
                assert_eq!(slice.run, slice.searched());
            }
        }
    }

    #[test]
    fn run_that_has_just_begun_gives_way_and_a_longer_one_stays() {
        let mut slice = Slice::new(L2EntryWidth::Standard);
        slice.map_run(100..103, 900);
        slice.map_run(10..40, 50);
        assert_eq!((slice.run.first, slice.run.end), (10, 40));
        slice.map_run(200..300, 500);
        assert_eq!((slice.run.first, slice.run.end), (10, 40));
        // A cluster that moves leaves the longer part.
        slice.map_run(35..36, 7000);
        assert_eq!((slice.run.first, slice.run.end), (10, 35));
        slice.map_run(12..13, 7001);
        assert_eq!((slice.run.first, slice.run.end), (13, 35));
    }

    #[test]
    fn place_covers_bytes_within_run_only() {
        let mut slice = Slice::new(L2EntryWidth::Standard);
        slice.map_run(4..20, 100);
        let place = |index, within, len| slice.run.place(index, within, len, &slice.geometry);
        let at = |byte| Some((HostOffset::new(100 * CLUSTER + byte), true));
        assert_eq!(place(4, 0, 16 * CLUSTER), at(0));
        assert_eq!(place(19, 512, CLUSTER - 512), at(15 * CLUSTER + 512));
        assert_eq!(place(19, 512, CLUSTER), None);
        assert_eq!(place(4, 0, u64::MAX), None);
        // It begins before the run and ends within it.
        assert_eq!(place(3, 512, 2 * CLUSTER), None);
        assert_eq!(place(20, 0, 1), None);
        for len in [0, 1] {
            assert_eq!(DataRun::default().place(0, 0, len, &slice.geometry), None);
        }
    }

    #[test]
    fn entries_that_grow_into_reserved_bits_are_no_run() {
        let mut slice = Slice::new(L2EntryWidth::Standard);
        let last = (1 << 56) - CLUSTER;
        for (index, place) in (0..128).enumerate() {
            let raw = L2Entry::from_raw((last - 60 * CLUSTER + place * CLUSTER) | COPIED);
            L2TableMut::new(&mut slice.bytes, &slice.geometry).set(index, raw);
        }
        assert!(slice.tells_truth(&slice.searched()));
    }
}
