//! The known use of each host cluster, so that no damaged count or entry leads to a write over the wrong cluster.
//!
//! Two things are kept. The *structures* are the header, the tables, and the clusters of snapshots and bitmaps. They
//! are gathered when an image is opened for writing, and updated as tables are made and freed. The others are a few
//! bits for each host cluster that was *seen in the mapping* or *handed out* since. Each place a write can go is
//! checked once, when it becomes known:
//!
//! | a write | is checked |
//! |---|---|
//! | over a guest's own cluster | when its slice is loaded first, and before the first write through it later ([`UseMap::admit`]) |
//! | to a fresh cluster | when the allocator takes it ([`UseMap::check_free`]) |
//! | of a table, at FLUSH | when it is copied for writing ([`UseMap::find`]) |
//!
//! So the hot path pays nothing, a load pays one lookup for each 64 neighbouring clusters, an allocation one lookup.
//!
//! Invariant: a bit of a cluster is cleared when its count becomes zero and no sooner, or a sound image would be
//! called corrupt. It is cleared before the cluster can be handed out again, for the same reason. Only
//! [`Refcounts::set`](super::refcounts::Refcounts::set) clears it.

mod known;
mod paged_bits;
#[cfg(test)]
mod tests;

use std::fmt;

use known::Known;
use paged_bits::{PAGE_BYTES, PagedBits};

use crate::format::references::{Reference, references};
use crate::format::{
    ClusterUse, Geometry, GuestCluster, Header, HostCluster, HostOffset, L1Entry, L2Table, RefcountTableEntry,
};

/// Two structures overlap, or one is not counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StructureError {
    /// Two structures share a host cluster.
    #[error("{} at {offset:#x} lies over {}", .structure.phrase(), .other.phrase())]
    Overlap {
        /// The structure that an entry points to.
        structure: ClusterUse,
        /// Its offset, in bytes.
        offset: u64,
        /// The structure that is there already.
        other: ClusterUse,
    },
    /// The refcount block that counts a structure is missing.
    #[error("{} at {offset:#x} is not counted: refcount table entry {index} is empty", .structure.phrase())]
    Uncounted {
        /// The structure.
        structure: ClusterUse,
        /// Its offset, in bytes.
        offset: u64,
        /// The refcount table entry that should point to its count.
        index: usize,
    },
}

/// A cluster that counts zero and is in use all the same.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct InUse {
    /// The cluster's number.
    pub(crate) cluster: HostCluster,
    /// Its use.
    pub(crate) by: ClusterUse,
}

/// An exposed entry: it points to a cluster that no L2 entry, or not this one, may use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Exposed {
    /// Its index in the bytes that were checked.
    pub(crate) index: usize,
    /// The host offset that it points to.
    pub(crate) host: HostOffset,
    /// The reason that it may not use that cluster.
    pub(crate) reason: Exposure,
}

/// The reason that an entry may not use the cluster that it points to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Exposure {
    /// The cluster is a structure of the image.
    Structure(ClusterUse),
    /// The cluster counted zero, and has been handed out since.
    HandedOut,
    /// The entry claims the cluster for itself, and another entry points to it as well.
    Shared,
    /// The cluster is not the guest cluster's own in the data file.
    Elsewhere,
}

impl Exposure {
    /// Returns true if the entry may be read through all the same.
    pub(crate) fn is_readable(self) -> bool {
        self == Self::Shared
    }
}

impl fmt::Display for Exposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Structure(structure) => structure.phrase(),
            Self::HandedOut => "a cluster that counted zero and is somebody else's now",
            Self::Shared => "a cluster that another entry leads to as well",
            Self::Elsewhere => "a place in the data file that is not the guest cluster's own",
        })
    }
}

/// The known use of 64 neighbouring host clusters besides structures, a bit for each.
#[derive(Clone, Copy, Debug)]
struct Word {
    /// The first cluster's number / 64.
    key: u64,
    /// An entry that was loaded refers to it.
    mapped: u64,
    /// The allocator handed it out since the image was opened.
    given: u64,
    /// It is a structure.
    structures: u64,
}

/// The share of the table cache that pages of known uses may take: one part in this many.
pub(crate) const CACHE_PARTS: u64 = 4;
/// The number of pages of known uses that is always allowed: a quarter of a MiB of them.
const PAGES_MIN: usize = 448;
/// The largest number of pages of slices that were seen.
const SEEN_PAGES_MAX: usize = 7 << 10;

/// The known use of the host clusters of an image that is written.
#[derive(Clone, Debug, Default)]
pub(crate) struct UseMap {
    /// True if the image is written at all; otherwise nothing is kept and everything is admitted.
    watching: bool,
    clusters: Known,
    /// The clusters that an entry that was loaded refers to.
    mapped: PagedBits,
    /// The clusters that the allocator handed out since the image was opened.
    given: PagedBits,
    /// Past this number of pages, clusters of the mapping are no longer recorded; structures always are.
    pages_max: usize,
    /// L2 slices that were loaded or made since the image was opened.
    seen: PagedBits,
}

/// Returns the number of pages of known uses beside a table cache.
fn pages_max(cache_bytes: u64) -> usize {
    let bytes = usize::try_from(cache_bytes / CACHE_PARTS).unwrap_or(usize::MAX);
    (bytes / PAGE_BYTES).max(PAGES_MIN)
}

fn place(index: u64) -> (u64, u64) {
    (index / 64, 1 << (index % 64))
}

impl UseMap {
    /// Gathers the structures of an image as it is on disk. Entries that do not decode are skipped. Records of the
    /// mapping take their share of a table cache of `cache_bytes` at most.
    ///
    /// # Errors
    ///
    /// [`StructureError`], if two overlap or one has no refcount block.
    pub(crate) fn gather(
        header: &Header,
        l1: &[L1Entry],
        table: &[RefcountTableEntry],
        guarded: &[Reference],
        cache_bytes: u64,
    ) -> Result<Self, StructureError> {
        let geometry = header.geometry();
        let mut uses = Self {
            watching: true,
            pages_max: pages_max(cache_bytes),
            ..Self::default()
        };
        let blocks = || references(table.iter().copied(), &geometry).map(|(_, _, block)| block);
        let own = geometry.clusters_for(header.refcount_table_bytes()) + blocks().count() as u64;
        uses.add_all(header, l1, guarded, own);
        uses.add(
            &geometry,
            Reference {
                target: ClusterUse::RefcountTable,
                host: header.refcount_table_offset,
                len: header.refcount_table_bytes(),
            },
        );
        for block in blocks() {
            uses.add(&geometry, block);
        }
        uses.sort(&geometry)?;
        for (cluster, structure) in uses.clusters.iter() {
            let index = geometry.refcount_table_index(cluster);
            let missing = table
                .get(index)
                .is_none_or(|entry| matches!(entry.decode(&geometry), Ok(None)));
            if missing {
                return Err(StructureError::Uncounted {
                    structure,
                    offset: geometry.host_offset(cluster).bytes(),
                    index,
                });
            }
        }
        Ok(uses)
    }

    /// Returns a map without structures, for an image whose table cache has `cache_bytes`.
    #[cfg(test)]
    pub(crate) fn without_structures(cache_bytes: u64) -> Self {
        Self {
            watching: true,
            pages_max: pages_max(cache_bytes),
            ..Self::default()
        }
    }

    /// Looks for overlapping structures before the refcounts are rebuilt: the refcount structures are left out.
    ///
    /// # Errors
    ///
    /// [`StructureError::Overlap`].
    pub(crate) fn compare(
        header: &Header,
        l1: &[L1Entry],
        guarded: &[Reference],
    ) -> Result<(), StructureError> {
        let mut uses = Self::default();
        uses.add_all(header, l1, guarded, 0);
        uses.sort(&header.geometry())
    }

    /// Adds all structures but the refcount structures, for which there is room for `more` clusters.
    fn add_all(&mut self, header: &Header, l1: &[L1Entry], guarded: &[Reference], more: u64) {
        let geometry = header.geometry();
        let tables = || references(l1.iter().copied(), &geometry).map(|(_, _, table)| table);
        let guarded_clusters = guarded.iter().map(|table| geometry.clusters_for(table.len));
        let known = 1 + geometry.clusters_for(header.l1_bytes()) + tables().count() as u64;
        self.clusters = Known::with_capacity(known + guarded_clusters.sum::<u64>() + more);
        let own = [
            (ClusterUse::Header, HostOffset::new(0), 1),
            (ClusterUse::L1Table, header.l1_offset, header.l1_bytes()),
        ];
        for (target, host, len) in own {
            self.add(&geometry, Reference { target, host, len });
        }
        for table in tables().chain(guarded.iter().copied()) {
            self.add(&geometry, table);
        }
    }

    fn add(&mut self, geometry: &Geometry, structure: Reference) {
        let first = geometry.host_cluster(structure.host);
        for cluster in first.until(first + geometry.clusters_for(structure.len)) {
            self.clusters.push(structure.target, cluster);
        }
    }

    /// Sorts the added clusters.
    fn sort(&mut self, geometry: &Geometry) -> Result<(), StructureError> {
        let sorted = self.clusters.sort();
        sorted.map_err(|(cluster, structure, other)| StructureError::Overlap {
            structure,
            offset: geometry.host_offset(cluster).bytes(),
            other,
        })
    }

    /// Records a structure that is made in clusters that were handed out for it.
    pub(crate) fn made(&mut self, structure: ClusterUse, first: HostCluster, count: u64) {
        if !self.watching {
            return;
        }
        for cluster in first.until(first + count) {
            self.clusters.insert(cluster, structure);
        }
    }

    /// Records that a cluster counts zero now: it has no use any more.
    pub(crate) fn freed(&mut self, cluster: HostCluster) {
        self.clusters.remove(cluster);
        self.mapped.remove(cluster.index());
        self.given.remove(cluster.index());
    }

    /// Returns the memory that all of this takes, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let pages = self.mapped.pages() + self.given.pages() + self.seen.pages();
        pages * PAGE_BYTES + self.clusters.memory_bytes()
    }

    /// Returns the structure that a cluster is part of.
    pub(crate) fn find(&self, cluster: HostCluster) -> Option<ClusterUse> {
        self.clusters.find(cluster)
    }

    /// Checks the entries of an L2 slice that has been read, in an image with a data file. They refer to no cluster of the
    /// image. Returns those that lead to another place in the data file than the guest cluster's own; `first` is the
    /// slice's first.
    pub(crate) fn admit_places(
        &mut self,
        geometry: &Geometry,
        slice: u64,
        first: GuestCluster,
        bytes: &[u8],
    ) -> Vec<Exposed> {
        self.saw_slice(slice);
        let entries = L2Table::new(bytes, geometry).iter().enumerate();
        let misplaced = entries.filter_map(|(index, entry)| {
            let (host, _) = entry.decode(geometry).ok()?.cluster()?;
            let own = geometry.data_file_offset(first + index as u64);
            (host != own).then_some(Exposed {
                index,
                host,
                reason: Exposure::Elsewhere,
            })
        });
        misplaced.collect()
    }

    /// Returns true if a table that is about to be written lies in a known place of its kind.
    pub(crate) fn is_place_of(&self, structure: ClusterUse, cluster: HostCluster) -> bool {
        !self.watching || self.find(cluster) == Some(structure)
    }

    /// Checks that a cluster whose count is zero is free.
    ///
    /// # Errors
    ///
    /// [`InUse`]: the count is wrong, and the cluster must not be handed out.
    pub(crate) fn check_free(&self, cluster: HostCluster) -> Result<(), InUse> {
        if let Some(structure) = self.find(cluster) {
            return Err(InUse {
                cluster,
                by: structure,
            });
        }
        if self.mapped.contains(cluster.index()) || self.given.contains(cluster.index()) {
            return Err(InUse {
                cluster,
                by: ClusterUse::GuestData,
            });
        }
        Ok(())
    }

    /// Returns the last cluster that is known to be in use.
    pub(crate) fn last(&self) -> Option<InUse> {
        let guest = self.mapped.last().max(self.given.last()).map(HostCluster::new);
        let cluster = guest.max(self.clusters.last())?;
        let by = self.find(cluster).unwrap_or(ClusterUse::GuestData);
        Some(InUse { cluster, by })
    }

    /// Records that the allocator has handed out a cluster.
    pub(crate) fn given(&mut self, cluster: HostCluster) {
        if self.watching {
            let (key, bit) = place(cluster.index());
            let grows = self.may_grow();
            self.given.add(key, bit, grows);
        }
    }

    /// Returns true if another page of known uses is allowed.
    fn may_grow(&self) -> bool {
        self.mapped.pages() + self.given.pages() < self.pages_max
    }

    /// Returns true if an L2 slice was in memory before and its entries were checked then.
    pub(crate) fn has_seen(&self, slice: u64) -> bool {
        self.seen.contains(slice)
    }

    /// Records that an L2 slice is in memory. Returns true if it was before. When very many have been, all the others
    /// count as seen too: a sound slice must not be called corrupt for entries added since.
    pub(crate) fn saw_slice(&mut self, slice: u64) -> bool {
        if !self.watching {
            return true;
        }
        let (key, bit) = place(slice);
        let grows = self.seen.pages() < SEEN_PAGES_MAX;
        let before = self.seen.add(key, bit, grows);
        before.is_none_or(|before| before & bit != 0)
    }

    /// Checks the entries of an L2 slice that has been read, before anything uses them. Returns those that point to
    /// one of the image's structures. If the slice was not in memory since the image was opened, also returns those
    /// that point to a cluster that was handed out meanwhile, and COPIED ones whose cluster another entry refers to.
    /// The clusters of all other entries are in use from now on.
    pub(crate) fn admit(&mut self, geometry: &Geometry, slice: u64, bytes: &[u8]) -> Vec<Exposed> {
        let mut exposed = Vec::new();
        if !self.watching {
            return exposed;
        }
        // Only entries of slices in memory refer to clusters handed out since, so an older entry cannot mean one.
        let is_old = !self.saw_slice(slice);
        let mut current: Option<Word> = None;
        let entries = L2Table::new(bytes, geometry).iter();
        for (index, entry, data) in references(entries, geometry) {
            for cluster in data.clusters(geometry) {
                let (key, bit) = place(cluster.index());
                let word = match &mut current {
                    Some(word) if word.key == key => word,
                    _ => {
                        self.put_mapped(current);
                        current.insert(self.word(key))
                    }
                };
                let is_structure = word.structures & bit != 0;
                let structure = is_structure.then(|| self.find(cluster)).flatten();
                let reason = if let Some(structure) = structure {
                    Exposure::Structure(structure)
                } else if is_old && word.given & bit != 0 {
                    Exposure::HandedOut
                } else if is_old && word.mapped & bit != 0 && entry.is_copied() {
                    Exposure::Shared
                } else {
                    word.mapped |= bit;
                    continue;
                };
                exposed.push(Exposed {
                    index,
                    host: data.host,
                    reason,
                });
                break;
            }
        }
        self.put_mapped(current);
        exposed
    }

    fn word(&self, key: u64) -> Word {
        Word {
            key,
            mapped: self.mapped.word(key),
            given: self.given.word(key),
            structures: self.clusters.bits(key),
        }
    }

    fn put_mapped(&mut self, word: Option<Word>) {
        if let Some(word) = word.filter(|word| word.mapped != 0) {
            let grows = self.may_grow();
            self.mapped.add(word.key, word.mapped, grows);
        }
    }
}
