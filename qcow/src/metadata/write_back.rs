//! The write-back set of a FLUSH: everything dirty, as it was at one instant.
//!
//! It is taken under the lock and written without it. A slice is shared with the cache until it is changed again;
//! changes made meanwhile are dirty for the next FLUSH.

use std::sync::Arc;

use super::cluster_use::UseMap;
use super::refcounts::{Refcounts, TablePlace};
use super::tables::L1_PART_BYTES;
use super::{Dropped, Drops, Metadata};
use crate::format::l1::L1_ENTRY_SIZE;
use crate::format::{ClusterUse, Geometry, HostOffset};
use crate::invariant::invariant;

/// Bytes and their offset in the file.
pub(crate) type Place = (HostOffset, Arc<[u8]>);

/// A write-back set: everything that was dirty.
#[derive(Debug, Default)]
pub(crate) struct WriteBackSet {
    /// Refcount blocks that the table on disk does not point at, whole.
    pub(crate) new_blocks: Vec<Place>,
    /// The whole refcount table, if it has moved, and its new place.
    pub(crate) moved_table: Option<(TablePlace, Arc<[u8]>)>,
    /// Slices of refcount blocks, and parts of the refcount table.
    pub(crate) refcounts: Vec<Place>,
    /// L2 tables that the L1 table on disk does not point at, whole.
    pub(crate) new_tables: Vec<Place>,
    /// Slices of L2 tables.
    pub(crate) l2: Vec<Place>,
    /// Parts of the L1 table.
    pub(crate) l1: Vec<Place>,
    /// The header's new fields, if they change, written once all else is durable.
    pub(crate) header: Option<HeaderChange>,
    /// References that left the mapping.
    pub(crate) drops: Drops,
    /// The first write that would go where no table of its kind is known to be: nothing may be written then.
    pub(crate) misplaced: Option<Misplaced>,
    /// The new blocks are durable as a whole. A later failure may have made them reachable.
    pub(crate) blocks_complete: bool,
    /// The new tables are durable as a whole. A later failure may have made them reachable.
    pub(crate) tables_complete: bool,
    keys: Keys,
}

/// Metadata that was about to be written to a wrong place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Misplaced {
    /// The offset of the write.
    pub(crate) offset: HostOffset,
    /// The structure to be written.
    pub(crate) what: ClusterUse,
    /// The structure that is known to be there.
    pub(crate) there: Option<ClusterUse>,
}

/// The header fields that change when a disk grows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct HeaderChange {
    /// The disk's size in bytes.
    pub(crate) size_bytes: u64,
    /// The number of entries of the L1 table.
    pub(crate) l1_entries: u32,
    /// The offset of the L1 table.
    pub(crate) l1_offset: HostOffset,
}

/// The sources of the copies, to record afterwards whether they were written.
#[derive(Debug, Default)]
struct Keys {
    l2_slices: Vec<u64>,
    refcount_slices: Vec<u64>,
    fresh_tables: Vec<usize>,
    fresh_blocks: Vec<usize>,
    l1_parts: Vec<usize>,
    table_parts: Vec<usize>,
    places_left: usize,
    l1_places_left: usize,
}

impl WriteBackSet {
    /// Records the first table that is not in a place of its kind.
    fn expect(&mut self, uses: &UseMap, geometry: &Geometry, structure: ClusterUse, offset: HostOffset) {
        let cluster = geometry.host_cluster(offset);
        if !uses.is_place_of(structure, cluster) {
            self.misplaced.get_or_insert(Misplaced {
                offset,
                what: structure,
                there: uses.find(cluster),
            });
        }
    }

    /// Returns true if there is nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.new_blocks.is_empty()
            && self.moved_table.is_none()
            && self.refcounts.is_empty()
            && self.new_tables.is_empty()
            && self.l2.is_empty()
            && self.l1.is_empty()
            && self.header.is_none()
            && self.drops.is_empty()
    }
}

fn sorted<T: Ord + Copy>(set: impl Iterator<Item = T>) -> Vec<T> {
    let mut list: Vec<T> = set.collect();
    list.sort_unstable();
    list
}

/// Gathers the slices of one table into the whole table; missing slices are zeros.
fn whole(cluster_size: usize, first: u64, slices: &[(u64, Arc<[u8]>)]) -> Arc<[u8]> {
    let mut shared: Arc<[u8]> = std::iter::repeat_n(0, cluster_size).collect();
    let bytes = Arc::make_mut(&mut shared);
    for (key, slice) in slices {
        let at = (key - first) as usize * slice.len();
        if let Some(place) = bytes.get_mut(at..at + slice.len()) {
            place.copy_from_slice(slice);
        }
    }
    shared
}

/// Returns the part of sorted `copies` whose keys lie in `range`.
fn within(copies: &[(u64, Arc<[u8]>)], range: std::ops::Range<u64>) -> &[(u64, Arc<[u8]>)] {
    let start = copies.partition_point(|copy| copy.0 < range.start);
    let end = copies.partition_point(|copy| copy.0 < range.end);
    copies.get(start..end).unwrap_or_default()
}

impl Metadata {
    /// Takes everything dirty. It counts as clean from here on; `end_write_back` records the result of the writes.
    pub(crate) fn take_write_back_set(&mut self) -> WriteBackSet {
        let geometry = *self.geometry();
        let cluster_size = geometry.cluster_size() as usize;
        let mut set = WriteBackSet {
            drops: std::mem::take(&mut self.drops),
            ..WriteBackSet::default()
        };
        // A second round could end what the first one has not written.
        invariant!(!self.flushing, "two write-back sets at once");
        self.flushing = true;

        let copies = self.l2.take_dirty();
        // Snapshots would see the change; and a slice without a table has no place.
        invariant!(
            copies
                .iter()
                .all(|(slice, _)| self.is_owned(self.table_of(*slice))),
            "a changed slice belongs to no L2 table of this disk's own"
        );
        invariant!(
            self.fresh_tables.iter().all(|&l1_index| self.is_owned(l1_index)),
            "a new L2 table has no L1 entry of its own"
        );
        let fresh = sorted(self.fresh_tables.iter().copied());
        for &l1_index in &fresh {
            // A fresh table was just given its place: the entry decodes.
            let Ok(Some(offset)) = self.table_offset(l1_index) else {
                continue;
            };
            set.expect(&self.refcounts.uses, &geometry, ClusterUse::L2Table, offset);
            let range = self.table_slices(l1_index);
            let bytes = whole(cluster_size, range.start, within(&copies, range));
            set.new_tables.push((offset, bytes));
        }
        set.keys.l2_slices = copies.iter().map(|copy| copy.0).collect();
        for (slice, bytes) in copies {
            if self.fresh_tables.contains(&self.table_of(slice)) {
                continue;
            }
            if let Ok(Some(offset)) = self.slice_offset(slice) {
                set.expect(&self.refcounts.uses, &geometry, ClusterUse::L2Table, offset);
                set.l2.push((offset, bytes));
            }
        }
        set.keys.fresh_tables = fresh;
        set.keys.l1_parts = sorted(self.l1_dirty_parts.drain());
        set.keys.l1_places_left = self.l1_moved_from.len();
        let parts = if self.l1_moved_from.is_empty() {
            set.keys.l1_parts.clone()
        } else {
            // No part of the table is in its new place yet.
            (0..self.l1_parts()).collect()
        };
        for part in parts {
            let offset = self.l1_place.offset + part as u64 * L1_PART_BYTES;
            set.expect(&self.refcounts.uses, &geometry, ClusterUse::L1Table, offset);
            set.l1.push((offset, self.l1_part(part).into()));
        }
        // A header with too few entries makes the image one that no program opens.
        invariant!(
            !self.header_dirty
                || self.l1_entries() as u64 >= self.geometry.l1_entries_needed(self.size_bytes),
            "the L1 table has {} entries, too few for {} bytes",
            self.l1_entries(),
            self.size_bytes
        );
        invariant!(
            self.l1_entries() as u64 * L1_ENTRY_SIZE <= self.l1_place.clusters * self.geometry.cluster_size(),
            "the L1 table is longer than its place"
        );
        if std::mem::take(&mut self.header_dirty) {
            set.header = Some(HeaderChange {
                size_bytes: self.size_bytes,
                l1_entries: self.l1_entries() as u32,
                l1_offset: self.l1_place.offset,
            });
        }
        self.refcounts.add_dirty(&mut set, cluster_size);
        set
    }

    /// Returns true if the L2 table of an L1 entry is the disk's alone.
    fn is_owned(&self, l1_index: usize) -> bool {
        matches!(self.l1_entry(l1_index), Ok(Some(table)) if table.copied)
    }

    /// Ends the round of a write-back set that is durable, or that could not be written; then everything in it is dirty again.
    /// Returns the references that left the mapping for good.
    pub(crate) fn end_write_back(&mut self, set: WriteBackSet, written: bool) -> Drops {
        invariant!(self.flushing, "no write-back set was taken");
        self.flushing = false;
        let WriteBackSet {
            keys,
            mut drops,
            header,
            blocks_complete,
            tables_complete,
            ..
        } = set;
        self.l2.end_flush(keys.l2_slices.into_iter(), written);
        self.refcounts
            .slices
            .end_flush(keys.refcount_slices.into_iter(), written);
        // A write that failed may have taken effect. A table or block that an L1 or table entry may point at is not
        // fresh any more, or the next round would write it before the counts it needs.
        if written || tables_complete {
            for l1_index in keys.fresh_tables {
                self.fresh_tables.remove(&l1_index);
            }
        }
        if written || blocks_complete {
            for index in keys.fresh_blocks {
                self.refcounts.fresh.remove(&index);
            }
        }
        if !written {
            self.l1_dirty_parts.extend(keys.l1_parts);
            self.refcounts.dirty_parts.extend(keys.table_parts);
            self.header_dirty |= header.is_some();
            drops.append(&mut self.drops);
            self.drops = drops;
            return Drops::default();
        }
        let geometry = *self.geometry();
        let left = self.refcounts.moved_from.drain(..keys.places_left);
        for place in left.chain(self.l1_moved_from.drain(..keys.l1_places_left)) {
            let first = geometry.host_cluster(place.offset);
            let count = place.clusters;
            self.returning.begin(count);
            drops.push(Dropped { first, count }, true);
        }
        drops
    }
}

impl Refcounts {
    fn add_dirty(&mut self, set: &mut WriteBackSet, cluster_size: usize) {
        let copies = self.slices.take_dirty();
        invariant!(
            copies
                .iter()
                .all(|(slice, _)| matches!(self.slice_offset(*slice), Ok(Some(_)))),
            "a changed slice belongs to no refcount block"
        );
        invariant!(
            self.table_parts() as u64 * 512 <= self.place.clusters * self.geometry.cluster_size(),
            "the refcount table is longer than its place"
        );
        let fresh = sorted(self.fresh.iter().copied());
        for &index in &fresh {
            let Ok(Some(offset)) = self.block_offset(index) else {
                continue;
            };
            set.expect(&self.uses, &self.geometry, ClusterUse::RefcountBlock, offset);
            let range = self.block_slices(index);
            set.new_blocks
                .push((offset, whole(cluster_size, range.start, within(&copies, range))));
        }
        set.keys.refcount_slices = copies.iter().map(|copy| copy.0).collect();
        for (slice, bytes) in copies {
            if self.is_fresh(slice) {
                continue;
            }
            if let Ok(Some(offset)) = self.slice_offset(slice) {
                set.expect(&self.uses, &self.geometry, ClusterUse::RefcountBlock, offset);
                set.refcounts.push((offset, bytes));
            }
        }
        set.keys.fresh_blocks = fresh;
        set.keys.table_parts = sorted(self.dirty_parts.drain());
        set.keys.places_left = self.moved_from.len();
        if self.moved_from.is_empty() {
            for part in set.keys.table_parts.clone() {
                let offset = self.place.offset + part as u64 * 512;
                set.expect(&self.uses, &self.geometry, ClusterUse::RefcountTable, offset);
                set.refcounts.push((offset, self.table_part(part).into()));
            }
        } else {
            let mut bytes: Vec<u8> = (0..self.table_parts())
                .flat_map(|part| self.table_part(part))
                .collect();
            bytes.resize(self.place.clusters as usize * cluster_size, 0);
            for cluster in 0..self.place.clusters {
                let offset = self.place.offset + cluster * cluster_size as u64;
                set.expect(&self.uses, &self.geometry, ClusterUse::RefcountTable, offset);
            }
            set.moved_table = Some((self.place, bytes.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use block::ring::RingKind;
    use block::{AlignedBuf, Context, Disk, Op, Request};

    use crate::image::testing::World;
    use crate::{OpenOptions, QcowDisk};

    /// A round failed while it wrote L1 entries, and one of them may be on disk. Its table is then reachable, and must not be
    /// written together with the counts that its new entries need.
    #[test]
    fn table_is_not_fresh_after_round_failed_writing_l1() {
        for complete in [false, true] {
            let world = World::new();
            world.qemu_img(&["create", "-f", "qcow2", "a.qcow2", "1M"]);
            let disk = QcowDisk::open(&world.path("a.qcow2"), &OpenOptions::default()).unwrap();
            let cx = Context::new(RingKind::Syscalls, 64).unwrap();
            let queue = std::sync::Arc::clone(&disk).open_queue(&cx).unwrap();
            let data = AlignedBuf::from_slice(&[7; 4096]).into();
            let (request, answer) = Request::local(Op::Write { fua: false }, 0, 4096, data);
            queue.submit(request);
            assert_eq!(cx.block_on(answer).unwrap().result, Ok(()));

            let mut metadata = disk.shared.write().unwrap();
            let mut first = metadata.take_write_back_set();
            assert_eq!((first.new_tables.len(), first.l1.len()), (1, 1));
            first.tables_complete = complete;
            metadata.end_write_back(first, false);
            let second = metadata.take_write_back_set();
            assert_eq!(second.new_tables.is_empty(), complete);
            assert_eq!(second.l2.is_empty(), !complete);
            assert_eq!(second.l1.len(), 1);
            metadata.end_write_back(second, false);
        }
    }
}
