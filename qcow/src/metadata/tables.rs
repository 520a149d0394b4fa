//! L1 and L2 tables in memory: their places, slices of them in the cache, and tables that are made or replaced.
//!
//! Invariant: a table that is shared with a snapshot is never changed, and a slice with a refused entry
//! ([`L2Entry::REFUSED`]) is never written.

use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

use block::IoError;
use block::sync::WaitList;

use super::cluster_use::{Exposed, UseMap};
use super::data_run::DataRun;
use super::refcounts::{Stuck, TablePlace};
use super::{Blocked, Dropped, Metadata, corrupt};
use crate::format::l1::{L1_ENTRY_SIZE, L1_TABLE_MAX_BYTES};
use crate::format::{
    ClusterUse, EntryError, Geometry, GuestCluster, HostCluster, HostOffset, L1Entry, L2Entry, L2Table,
    L2TableMut, L2TableRef,
};
use crate::invariant::invariant;

/// The unit in which the L1 table is written, in bytes: a sector.
pub(super) const L1_PART_BYTES: u64 = 512;
/// L1 entries in such a part.
const PART_ENTRIES: usize = (L1_PART_BYTES / L1_ENTRY_SIZE) as usize;

impl Metadata {
    pub(crate) fn l1_entry(&self, index: usize) -> Result<Option<L2TableRef>, EntryError> {
        self.l1
            .get(index)
            .copied()
            .unwrap_or_default()
            .decode(&self.geometry)
    }

    /// Returns the index of the L1 entry that points to the slice's table.
    pub(crate) fn table_of(&self, slice: u64) -> usize {
        (slice >> (self.geometry.l2_bits() - self.slice_bits)) as usize
    }

    /// Returns the slices of the table that an L1 entry points to.
    pub(crate) fn table_slices(&self, l1_index: usize) -> Range<u64> {
        let bits = self.geometry.l2_bits() - self.slice_bits;
        ((l1_index as u64) << bits)..((l1_index as u64 + 1) << bits)
    }

    /// Returns the slice that describes a guest cluster.
    #[inline]
    pub(super) fn slice_of(&self, cluster: GuestCluster) -> u64 {
        cluster.index() >> self.slice_bits
    }

    /// Returns the index, within its slice, of the entry that describes a guest cluster.
    #[inline]
    pub(super) fn index_in_slice(&self, cluster: GuestCluster) -> usize {
        (cluster.index() & ((1 << self.slice_bits) - 1)) as usize
    }

    /// Returns the first guest cluster that a slice describes.
    fn slice_start(&self, slice: u64) -> GuestCluster {
        GuestCluster::new(slice << self.slice_bits)
    }

    /// Returns the guest cluster after the last one that a slice describes.
    pub(super) fn slice_end(&self, slice: u64) -> GuestCluster {
        GuestCluster::new((slice + 1) << self.slice_bits)
    }

    /// Returns the number of guest bytes that a slice describes.
    pub(super) fn slice_span(&self) -> u64 {
        self.geometry.cluster_size() << self.slice_bits
    }

    /// Returns the offset of a table on disk.
    pub(crate) fn table_offset(&self, l1_index: usize) -> Result<Option<HostOffset>, EntryError> {
        Ok(self.l1_entry(l1_index)?.map(|table| table.host))
    }

    /// Returns the offset of a slice on disk.
    pub(crate) fn slice_offset(&self, slice: u64) -> Result<Option<HostOffset>, EntryError> {
        let table = self.table_of(slice);
        let within = slice - self.table_slices(table).start;
        Ok(self
            .table_offset(table)?
            .map(|host| host + within * self.l2.slice_bytes() as u64))
    }

    /// Returns the L1 entries of 512-byte part `part`, as they are on disk.
    pub(crate) fn l1_part(&self, part: usize) -> Vec<u8> {
        let entries = self.l1.iter().skip(part * PART_ENTRIES).take(PART_ENTRIES);
        let mut bytes: Vec<u8> = entries.flat_map(|entry| entry.raw().to_be_bytes()).collect();
        bytes.resize(L1_PART_BYTES as usize, 0);
        bytes
    }

    /// Returns the number of entries of the L1 table.
    pub(crate) fn l1_entries(&self) -> usize {
        self.l1.len()
    }

    /// Makes room in the L1 table for a disk of `size_bytes`; in a new place if it has outgrown its own.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn grow_l1(&mut self, size_bytes: u64) -> Result<(), Stuck> {
        let needed = self.geometry.l1_entries_needed(size_bytes);
        if needed <= self.l1.len() as u64 {
            return Ok(());
        }
        if needed > L1_TABLE_MAX_BYTES / L1_ENTRY_SIZE {
            return Err(Stuck::Failed(IoError::OutOfRange));
        }
        let clusters = self.geometry.clusters_for(needed * L1_ENTRY_SIZE);
        if clusters > self.l1_place.clusters {
            let first = self.refcounts.allocate_run(clusters)?;
            let offset = self.geometry.host_offset(first);
            self.refcounts.uses.made(ClusterUse::L1Table, first, clusters);
            self.l1_moved_from.push(self.l1_place);
            self.l1_place = TablePlace { offset, clusters };
        }
        let old = self.l1.len();
        self.l1.resize(needed as usize, L1Entry::UNALLOCATED);
        // The bytes past the old end on disk were never part of the table.
        self.l1_dirty_parts
            .extend(old / PART_ENTRIES..self.l1.len().div_ceil(PART_ENTRIES));
        self.header_dirty = true;
        Ok(())
    }

    /// Returns true if the caller must copy the table of `l1_index`; otherwise `waker` is woken when the copy has
    /// ended.
    pub(crate) fn begin_copy(&mut self, l1_index: usize, waker: &Waker) -> bool {
        self.copying.begin(l1_index, waker)
    }

    /// Ends a table copy, successful or not. Returns the waiters to wake; drop the list without the lock.
    pub(crate) fn end_copy(&mut self, l1_index: usize) -> WaitList {
        self.copying.end(&l1_index)
    }

    /// Returns the number of 512-byte parts of the L1 table.
    pub(super) fn l1_parts(&self) -> usize {
        self.l1.len().div_ceil(PART_ENTRIES)
    }

    /// Makes sure that the L2 slice of a guest cluster is cached and may be changed.
    pub(crate) fn own_slice(&mut self, cluster: GuestCluster) -> Result<u64, Blocked> {
        let slice = self.slice_of(cluster);
        let l1_index = self.table_of(slice);
        if self.corrupt {
            return Err(Blocked::Failed(IoError::Corrupt));
        }
        match self.l1_entry(l1_index) {
            Ok(Some(table)) if !table.copied => return Err(Blocked::CopyTable(l1_index)),
            Ok(Some(_)) => {}
            Ok(None) => self.new_table(l1_index)?,
            Err(error) => return Err(corrupt(error)),
        }
        match self.l2.get_with_state(slice) {
            Some(cached) if cached.checked => return Ok(slice),
            Some(_) => return Err(Blocked::CheckL2(slice)),
            None => {}
        }
        if !self.fresh_tables.contains(&l1_index) {
            return Err(Blocked::LoadL2(slice));
        }
        self.refcounts.uses.saw_slice(slice);
        self.share_cache();
        self.l2.insert(slice, vec![0; self.l2.slice_bytes()].into(), true);
        Ok(slice)
    }

    /// Leaves the memory of the known uses of clusters out of the table cache, unless there is room for every slice of
    /// the image anyway.
    fn share_cache(&mut self) {
        let slices = self.table_slices(self.l1.len()).start;
        let holds_all = slices <= self.l2.budget_max() as u64;
        let taken = if holds_all {
            0
        } else {
            self.refcounts.uses.memory_bytes()
        };
        self.l2.leave_room(taken);
    }

    fn new_table(&mut self, l1_index: usize) -> Result<(), Blocked> {
        if l1_index >= self.l1.len() {
            return Err(Blocked::Failed(IoError::OutOfRange));
        }
        let run = self.refcounts.allocate(1)?;
        self.set_table(l1_index, run.first);
        Ok(())
    }

    /// Points an L1 entry at a table in host cluster `cluster` that is not on disk yet.
    fn set_table(&mut self, l1_index: usize, cluster: HostCluster) {
        // Its entries would be lost.
        invariant!(
            !matches!(self.l1_entry(l1_index), Ok(Some(table)) if table.copied),
            "the L2 table of L1 entry {l1_index} is replaced and not shared"
        );
        self.point_at_table(l1_index, cluster);
    }

    /// Changes an L1 entry in memory.
    pub(super) fn set_l1_entry(&mut self, l1_index: usize, entry: L1Entry) {
        if let Some(place) = self.l1.get_mut(l1_index) {
            *place = entry;
            self.l1_dirty_parts.insert(l1_index / PART_ENTRIES);
        }
    }

    /// Replaces a table shared with a snapshot by a copy whose contents are `table`, read from `from`.
    ///
    /// # Errors
    ///
    /// [`Blocked`], with nothing changed. `Ok(false)` if the entry has changed meanwhile.
    pub(crate) fn adopt_table(
        &mut self,
        l1_index: usize,
        from: HostOffset,
        table: &[u8],
    ) -> Result<bool, Blocked> {
        if self.corrupt {
            return Err(Blocked::Failed(IoError::Corrupt));
        }
        match self.l1_entry(l1_index) {
            Ok(Some(old)) if !old.copied && old.host == from => {}
            Ok(_) => return Ok(false),
            Err(error) => return Err(corrupt(error)),
        }
        invariant!(
            table.len() as u64 == self.geometry.cluster_size(),
            "{} bytes are no L2 table",
            table.len()
        );
        let run = self.refcounts.allocate(1)?;
        self.set_table(l1_index, run.first);
        self.share_cache();
        for (slice, bytes) in self
            .table_slices(l1_index)
            .zip(table.chunks_exact(self.l2.slice_bytes()))
        {
            self.l2.discard(slice);
            let run = self.run_of(bytes);
            self.l2.insert(slice, bytes.into(), true);
            self.l2.set_run(slice, run);
        }
        self.drop_clusters(Dropped::one(self.geometry.host_cluster(from)), false);
        Ok(true)
    }

    /// Inserts a slice that was read into the cache. If entries are exposed, those that are not readable answer with
    /// an error from then on, the others stay usable, and nothing is changed any more.
    ///
    /// In an image that is sound so far, a slice that comes back is as it was when it was checked. Reads use it at
    /// once, and [`Metadata::check_slice`] checks it again before anything is written through it.
    pub(crate) fn adopt_slice(&mut self, slice: u64, mut bytes: Arc<[u8]>) -> Vec<Exposed> {
        let is_as_checked = !self.corrupt && self.refcounts.uses.has_seen(slice);
        let mut exposed = Vec::new();
        if !is_as_checked {
            let first = self.slice_start(slice);
            exposed = admit(&mut self.refcounts.uses, &self.geometry, slice, first, &bytes);
            self.corrupt |= refuse(&self.geometry, Arc::make_mut(&mut bytes), &exposed);
        }
        self.share_cache();
        // Where slices come and go, one is dropped before a search has paid.
        let run = if self.l2.is_replacing() {
            DataRun::default()
        } else {
            self.run_of(&bytes)
        };
        if is_as_checked {
            self.l2.insert_unchecked(slice, bytes);
        } else {
            self.l2.insert(slice, bytes, false);
        }
        self.l2.set_run(slice, run);
        exposed
    }

    fn run_of(&self, slice: &[u8]) -> DataRun {
        DataRun::longest(L2Table::new(slice, &self.geometry), &self.geometry)
    }

    /// Checks a cached slice, if it is unchecked, as [`Metadata::adopt_slice`] does.
    pub(crate) fn check_slice(&mut self, slice: u64) -> Vec<Exposed> {
        let first = self.slice_start(slice);
        let Some((bytes, run)) = self.l2.take_unchecked(slice) else {
            return Vec::new();
        };
        let exposed = admit(&mut self.refcounts.uses, &self.geometry, slice, first, bytes);
        if refuse(&self.geometry, bytes, &exposed) {
            self.corrupt = true;
            *run = DataRun::default();
        }
        exposed
    }

    /// Checks all entries of a table that is to be adopted. Returns the first exposed one, its index counted from the
    /// table's start.
    pub(crate) fn inspect_table(&mut self, l1_index: usize, table: &[u8]) -> Option<Exposed> {
        let slices = self.table_slices(l1_index);
        let parts = table.chunks_exact(self.l2.slice_bytes());
        for (slice, (at, part)) in slices.zip(parts.enumerate()) {
            let first = self.slice_start(slice);
            let exposed = admit(&mut self.refcounts.uses, &self.geometry, slice, first, part);
            if let Some(first) = exposed.first() {
                self.corrupt = true;
                return Some(Exposed {
                    index: (at << self.slice_bits) + first.index,
                    ..*first
                });
            }
        }
        None
    }
}

/// Checks the entries of an L2 slice whose first guest cluster is `first`, before anything uses them.
fn admit(
    uses: &mut UseMap,
    geometry: &Geometry,
    slice: u64,
    first: GuestCluster,
    bytes: &[u8],
) -> Vec<Exposed> {
    if geometry.has_data_file() {
        uses.admit_places(geometry, slice, first, bytes)
    } else {
        uses.admit(geometry, slice, bytes)
    }
}

/// Makes exposed entries that are not readable answer with an error. Returns true if any entry is exposed.
fn refuse(geometry: &Geometry, bytes: &mut [u8], exposed: &[Exposed]) -> bool {
    let mut entries = L2TableMut::new(bytes, geometry);
    for entry in exposed.iter().filter(|entry| !entry.reason.is_readable()) {
        entries.set(entry.index, L2Entry::REFUSED);
    }
    !exposed.is_empty()
}

#[cfg(test)]
mod tests {
    use super::super::plan::Action;
    use super::super::testing::{CLUSTER, metadata};
    use super::super::{Extent, Growth, Lookup};
    use super::*;
    use crate::format::GuestOffset;

    #[test]
    fn exposed_entry_is_named_by_its_index_in_the_table() {
        let mut metadata = metadata();
        metadata.refcounts.uses = UseMap::without_structures(1 << 20);
        metadata
            .refcounts
            .uses
            .made(ClusterUse::RefcountBlock, HostCluster::new(2), 1);
        let block = HostOffset::new(2 * CLUSTER);
        let geometry = *metadata.geometry();
        // In the second slice.
        let index = (1 << metadata.slice_bits) + 5;
        let mut table = vec![0; CLUSTER as usize];
        L2TableMut::new(&mut table, &geometry).set(index, L2Entry::data(block, true, &geometry));
        let exposed = metadata
            .inspect_table(0, &table)
            .expect("it points to a refcount block");
        assert_eq!((exposed.index, exposed.host), (index, block));
    }

    #[test]
    fn nothing_is_mapped_up_to_the_end_of_a_slice_of_a_fresh_table() {
        let mut metadata = metadata();
        let step = metadata.plan_write(GuestOffset::new(0), GuestOffset::new(CLUSTER), Growth::Free);
        let Action::Fill(fill) = step.expect("an empty image").action else {
            panic!("nothing is mapped");
        };
        assert_eq!(metadata.publish(&fill.allocation).1, Ok(()));
        let span = CLUSTER << metadata.slice_bits;
        let at = |offset| metadata.lookup(GuestOffset::new(offset), 4 * span);
        let found = |len| Lookup::Found {
            extent: Extent::Unallocated,
            len,
        };
        assert_eq!(at(CLUSTER), found(span - CLUSTER), "a cached slice");
        assert_eq!(
            at(span + 5 * CLUSTER + 512),
            found(span - 5 * CLUSTER - 512),
            "one that is not"
        );
    }
}
