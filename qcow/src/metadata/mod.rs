//! What is in memory of an image's metadata, and the questions a request asks of it.
//!
//! One [`Metadata`] is shared by all queues behind a lock. Nothing here does I/O or waits: what needs a
//! table that is not cached says which, and the engine loads it with the lock released.
//!
//! What must stay true:
//! - an L2 entry is set only once the data it exposes is written;
//! - a guest cluster in the in-flight table is changed only by who entered it;
//! - a cluster that left the mapping is in `drops` until a FLUSH has made that durable;
//! - once the metadata was found corrupt no change of the mapping is planned any more, and a slice with an entry
//!   that nobody may go by ([`L2Entry::REFUSED`]) is never written.

pub(crate) mod clear;
pub(crate) mod extents;
pub(crate) mod refcounts;
pub(crate) mod slices;
pub(crate) mod snapshot;
pub(crate) mod structures;

use std::task::Waker;

use block::IoError;
use block::canary::{Rule, broken};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::format::l1::L1_TABLE_MAX_BYTES;
use crate::format::{
    CompressedExtent, EntryError, Geometry, HostCluster, HostOffset, L1Entry, L2Entry, L2Mapping, L2Table,
    L2TableMut, L2TableRef,
};
use refcounts::{Refcounts, Stuck, TablePlace};
use slices::SliceCache;
use structures::{Exposed, InUse, Structure};

/// What a stretch of the guest's disk is backed by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Extent {
    /// Host bytes in one piece, from `host` on. `owned`: they may be overwritten in place.
    Data { host: u64, owned: bool },
    /// Zeros.
    Zero,
    /// The backing file's bytes, or zeros without one.
    Unallocated,
    /// One compressed cluster.
    Compressed(CompressedExtent),
}

/// What a lookup finds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Lookup {
    /// So many bytes, from the guest offset asked for, are alike.
    Found { extent: Extent, len: u64 },
    /// This L2 slice must be loaded first.
    Miss(u64),
    /// The mapping is corrupt there.
    Corrupt(EntryError),
    /// The mapping leads to this host offset, past the end of the file.
    PastEnd(u64),
    /// The mapping was found to lead where none may when it was loaded.
    Refused,
}

/// Guest clusters some request is about to remap.
#[derive(Debug)]
struct InFlight {
    first: u64,
    count: u64,
    waiters: Vec<Waker>,
}

/// Why a change cannot be planned under the lock.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Blocked {
    /// This L2 slice must be loaded.
    LoadL2(u64),
    /// This cached L2 slice must be looked at before anything is written through it.
    CheckL2(u64),
    /// This refcount slice must be loaded.
    LoadRefcounts(u64),
    /// The L2 table of this L1 entry is shared with a snapshot and must be copied.
    CopyTable(usize),
    /// Another request is remapping this guest cluster.
    InFlight(u64),
    /// A count is wrong: the image is corrupt.
    InUse(InUse),
    /// It cannot be done.
    Failed(IoError),
}

impl From<Stuck> for Blocked {
    fn from(stuck: Stuck) -> Self {
        match stuck {
            Stuck::Load(slice) => Self::LoadRefcounts(slice),
            Stuck::InUse(cluster) => Self::InUse(cluster),
            Stuck::Failed(error) => Self::Failed(error),
        }
    }
}

/// One step of a write.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum WriteStep {
    /// Overwrite `len` bytes at `host`.
    InPlace { host: u64, len: u64 },
    /// Fill fresh clusters and then map them.
    Allocated(Allocation),
}

/// Host clusters reserved for guest clusters, which are in the in-flight table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Allocation {
    /// The first guest cluster.
    pub(crate) guest: u64,
    /// How many clusters.
    pub(crate) count: u64,
    /// Where the first begins on the host, in bytes.
    pub(crate) host: u64,
    /// The host clusters are known to read as zeros.
    pub(crate) zero: bool,
    /// The host cluster was kept for this guest cluster while it read as zeros: nothing was allocated.
    pub(crate) kept: bool,
    /// The L2 slice that maps them, pinned.
    slice: u64,
    /// What the first and the last cluster were mapped to.
    pub(crate) old_first: L2Mapping,
    pub(crate) old_last: L2Mapping,
}

/// References to host clusters that left the mapping: first cluster and how many.
pub(crate) type Drop = (u64, u64);

/// The metadata of one open image.
#[derive(Debug)]
pub(crate) struct Metadata {
    geometry: Geometry,
    l1: Vec<L1Entry>,
    pub(crate) l1_place: TablePlace,
    /// The L1 table has moved and the header does not know it yet; what was left behind.
    pub(crate) l1_moved_from: Vec<TablePlace>,
    /// The header's size and L1 fields are to be written.
    pub(crate) header_dirty: bool,
    /// The disk's size as the header has it, or is to have it, in bytes.
    pub(crate) size_bytes: u64,
    pub(crate) l1_dirty_parts: FxHashSet<usize>,
    /// L1 entries whose tables are not reachable on disk yet: written whole at the next FLUSH.
    pub(crate) fresh_tables: FxHashSet<usize>,
    pub(crate) l2: SliceCache,
    pub(crate) refcounts: Refcounts,
    /// Something is corrupt: no change is planned any more.
    pub(crate) corrupt: bool,
    /// Logarithm of the entries per L2 slice.
    slice_bits: u32,
    in_flight: Vec<InFlight>,
    copying: FxHashMap<usize, Vec<Waker>>,
    pub(crate) drops: Vec<Drop>,
    /// A FLUSH is writing what was dirty when it began.
    pub(crate) flushing: bool,
}

/// L1 entries in a 512-byte part.
const PART_ENTRIES: usize = 64;

impl Metadata {
    pub(crate) fn new(
        geometry: Geometry,
        l1: Vec<L1Entry>,
        l1_offset: HostOffset,
        refcounts: Refcounts,
        l2_cache_bytes: u64,
    ) -> Self {
        let slice_bytes = geometry.cluster_size().min(4096) as usize;
        let clusters = geometry.clusters_for(l1.len() as u64 * 8);
        Self {
            geometry,
            l1,
            l1_place: TablePlace {
                offset: l1_offset.bytes(),
                clusters,
            },
            l1_moved_from: Vec::new(),
            header_dirty: false,
            size_bytes: geometry.virtual_size(),
            l1_dirty_parts: FxHashSet::default(),
            fresh_tables: FxHashSet::default(),
            l2: SliceCache::new(slice_bytes, l2_cache_bytes),
            refcounts,
            corrupt: false,
            slice_bits: slice_bytes.trailing_zeros() - geometry.l2_entry_width().bits(),
            in_flight: Vec::new(),
            copying: FxHashMap::default(),
            drops: Vec::new(),
            flushing: false,
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn l1_entry(&self, index: usize) -> Result<Option<L2TableRef>, EntryError> {
        self.l1
            .get(index)
            .copied()
            .unwrap_or_default()
            .decode(&self.geometry)
    }

    /// The L1 entry that the slice's table hangs on.
    pub(crate) fn table_of(&self, slice: u64) -> usize {
        (slice >> (self.geometry.l2_bits() - self.slice_bits)) as usize
    }

    /// The slices of the table that hangs on an L1 entry.
    pub(crate) fn table_slices(&self, l1_index: usize) -> std::ops::Range<u64> {
        let bits = self.geometry.l2_bits() - self.slice_bits;
        ((l1_index as u64) << bits)..((l1_index as u64 + 1) << bits)
    }

    /// Where a table is on disk, in bytes.
    pub(crate) fn table_offset(&self, l1_index: usize) -> Result<Option<u64>, EntryError> {
        Ok(self.l1_entry(l1_index)?.map(|table| table.host.bytes()))
    }

    /// Where a slice is on disk, in bytes.
    pub(crate) fn slice_offset(&self, slice: u64) -> Result<Option<u64>, EntryError> {
        let table = self.table_of(slice);
        let within = slice - self.table_slices(table).start;
        Ok(self
            .table_offset(table)?
            .map(|host| host + within * self.l2.slice_bytes() as u64))
    }

    /// The L1 entries of 512-byte part `part`, as they are on disk.
    pub(crate) fn l1_part(&self, part: usize) -> Vec<u8> {
        let entries = self.l1.iter().skip(part * PART_ENTRIES).take(PART_ENTRIES);
        let mut bytes: Vec<u8> = entries.flat_map(|entry| entry.raw().to_be_bytes()).collect();
        bytes.resize(PART_ENTRIES * 8, 0);
        bytes
    }

    /// How many entries the L1 table has.
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
        if needed > L1_TABLE_MAX_BYTES / 8 {
            return Err(Stuck::Failed(IoError::OutOfRange));
        }
        let clusters = self.geometry.clusters_for(needed * 8);
        if clusters > self.l1_place.clusters {
            let first = self.refcounts.allocate_run(clusters)?;
            let offset = self.geometry.host_offset(HostCluster::new(first)).bytes();
            self.refcounts
                .structures
                .made(Structure::L1Table, first, clusters);
            self.l1_moved_from.push(self.l1_place);
            self.l1_place = TablePlace { offset, clusters };
        }
        let old = self.l1.len();
        self.l1.resize(needed as usize, L1Entry::UNALLOCATED);
        // What lies behind the old end on disk was never part of the table.
        self.l1_dirty_parts
            .extend(old / PART_ENTRIES..self.l1.len().div_ceil(PART_ENTRIES));
        self.header_dirty = true;
        Ok(())
    }

    /// What the guest bytes from `offset` on are backed by: as far as `len` bytes, the L2 slice, and
    /// likeness go.
    #[inline]
    pub(crate) fn lookup(&self, offset: u64, len: u64) -> Lookup {
        let bits = self.geometry.cluster_bits().get();
        let cluster = offset >> bits;
        let slice = cluster >> self.slice_bits;
        let l1_index = (cluster >> self.geometry.l2_bits()) as usize;
        let table = match self.l1_entry(l1_index) {
            Ok(Some(table)) => table,
            Ok(None) => {
                let end = (l1_index as u64 + 1) << (bits + self.geometry.l2_bits());
                return Lookup::Found {
                    extent: Extent::Unallocated,
                    len: len.min(end - offset),
                };
            }
            Err(error) => return Lookup::Corrupt(error),
        };
        let Some((bytes, checked)) = self.l2.get_with_state(slice) else {
            // A fresh table's slices are zeros until something is mapped there.
            if self.fresh_tables.contains(&l1_index) {
                let end = (slice + 1) << (self.slice_bits + bits);
                return Lookup::Found {
                    extent: Extent::Unallocated,
                    len: len.min(end - offset),
                };
            }
            return Lookup::Miss(slice);
        };
        let mask = (1u64 << self.slice_bits) - 1;
        let size = self.geometry.cluster_size();
        let within = offset & (size - 1);
        let first = (cluster & mask) as usize;
        let entries = L2Table::new(bytes, &self.geometry);
        let entry = entries.get(first);
        let mapping = match entry.decode(&self.geometry) {
            Ok(mapping) => mapping,
            Err(_) if entry == L2Entry::REFUSED => return Lookup::Refused,
            Err(error) => return Lookup::Corrupt(error),
        };
        let extent = match mapping {
            L2Mapping::Unallocated => Extent::Unallocated,
            L2Mapping::Zero { .. } => Extent::Zero,
            L2Mapping::Data { host, copied } => {
                if host.bytes() >> bits >= self.refcounts.end() {
                    return Lookup::PastEnd(host.bytes());
                }
                Extent::Data {
                    host: host.bytes() + within,
                    owned: copied && table.copied && checked,
                }
            }
            L2Mapping::Compressed(compressed) => Extent::Compressed(compressed),
        };
        let mut found = size - within;
        if found >= len || matches!(extent, Extent::Compressed(_)) {
            return Lookup::Found {
                extent,
                len: found.min(len),
            };
        }
        for index in first + 1..=mask as usize {
            let Ok(next) = entries.get(index).decode(&self.geometry) else {
                break;
            };
            let alike = match (extent, next) {
                (Extent::Unallocated, L2Mapping::Unallocated) | (Extent::Zero, L2Mapping::Zero { .. }) => {
                    true
                }
                (Extent::Data { host, owned }, L2Mapping::Data { host: next, copied }) => {
                    next.bytes() == host + found
                        && owned == (copied && table.copied && checked)
                        && next.bytes() >> bits < self.refcounts.end()
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

    /// Whether a request is remapping a guest cluster that the bytes touch.
    #[inline]
    pub(crate) fn is_in_flight(&self, offset: u64, len: u64) -> bool {
        if self.in_flight.is_empty() || broken(Rule::SecondWriterRuns) {
            return false;
        }
        let bits = self.geometry.cluster_bits().get();
        let (first, last) = (offset >> bits, (offset + len - 1) >> bits);
        self.in_flight
            .iter()
            .any(|entry| first < entry.first + entry.count && entry.first <= last)
    }

    /// Wakes `waker` when guest cluster `cluster` is no longer being remapped; `false` if it is not.
    pub(crate) fn wait_in_flight(&mut self, cluster: u64, waker: &Waker) -> bool {
        let found = self
            .in_flight
            .iter_mut()
            .find(|entry| (entry.first..entry.first + entry.count).contains(&cluster));
        match found {
            Some(entry) => {
                entry.waiters.push(waker.clone());
                true
            }
            None => false,
        }
    }

    /// Enters guest clusters in the in-flight table. The caller has checked that they are not in it.
    pub(crate) fn enter_in_flight(&mut self, first: u64, count: u64) {
        self.in_flight.push(InFlight {
            first,
            count,
            waiters: Vec::new(),
        });
    }

    /// Takes guest clusters out of the in-flight table. Returns whom to wake, without the lock.
    #[must_use]
    pub(crate) fn leave_in_flight(&mut self, first: u64) -> Vec<Waker> {
        match self.in_flight.iter().position(|entry| entry.first == first) {
            Some(index) => self.in_flight.swap_remove(index).waiters,
            None => Vec::new(),
        }
    }

    /// Whether this caller is to copy the table of `l1_index`; otherwise `waker` is woken when somebody has.
    pub(crate) fn begin_copy(&mut self, l1_index: usize, waker: &Waker) -> bool {
        if let Some(waiters) = self.copying.get_mut(&l1_index) {
            waiters.push(waker.clone());
            return false;
        }
        self.copying.insert(l1_index, Vec::new());
        true
    }

    /// A table copy has ended, well or not. Returns whom to wake.
    #[must_use]
    pub(crate) fn end_copy(&mut self, l1_index: usize) -> Vec<Waker> {
        self.copying.remove(&l1_index).unwrap_or_default()
    }

    /// Makes sure that the L2 slice of a guest cluster is cached and may be changed.
    pub(crate) fn own_slice(&mut self, cluster: u64) -> Result<u64, Blocked> {
        let slice = cluster >> self.slice_bits;
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
            Some((_, true)) => return Ok(slice),
            Some((_, false)) => return Err(Blocked::CheckL2(slice)),
            None => {}
        }
        if !self.fresh_tables.contains(&l1_index) {
            return Err(Blocked::LoadL2(slice));
        }
        self.l2.insert(slice, vec![0; self.l2.slice_bytes()].into(), true);
        self.refcounts.structures.saw_slice(slice);
        Ok(slice)
    }

    fn new_table(&mut self, l1_index: usize) -> Result<(), Blocked> {
        if l1_index >= self.l1.len() {
            return Err(Blocked::Failed(IoError::OutOfRange));
        }
        let run = self.refcounts.allocate(1)?;
        self.set_table(l1_index, run.first);
        Ok(())
    }

    /// Hangs a table that is not on disk yet, in host cluster `cluster`, on an L1 entry.
    fn set_table(&mut self, l1_index: usize, cluster: u64) {
        self.refcounts.structures.made(Structure::L2Table, cluster, 1);
        let entry = L1Entry::encode(L2TableRef {
            host: self.geometry.host_offset(HostCluster::new(cluster)),
            copied: true,
        });
        if let Some(place) = self.l1.get_mut(l1_index) {
            *place = entry;
            self.l1_dirty_parts.insert(l1_index / PART_ENTRIES);
            self.fresh_tables.insert(l1_index);
        }
    }

    /// Replaces a table shared with a snapshot by a copy whose contents are `table`, read from `from`.
    ///
    /// # Errors
    ///
    /// [`Blocked`], with nothing changed. `Ok(false)` if the entry is no longer what it was.
    pub(crate) fn adopt_table(&mut self, l1_index: usize, from: u64, table: &[u8]) -> Result<bool, Blocked> {
        if self.corrupt {
            return Err(Blocked::Failed(IoError::Corrupt));
        }
        match self.l1_entry(l1_index) {
            Ok(Some(old)) if !old.copied && old.host.bytes() == from => {}
            Ok(_) => return Ok(false),
            Err(error) => return Err(corrupt(error)),
        }
        let run = self.refcounts.allocate(1)?;
        self.set_table(l1_index, run.first);
        for (slice, bytes) in self
            .table_slices(l1_index)
            .zip(table.chunks_exact(self.l2.slice_bytes()))
        {
            self.l2.discard(slice);
            self.l2.insert(slice, bytes.into(), true);
        }
        self.drops
            .push((self.geometry.host_cluster(HostOffset::new(from)).index(), 1));
        Ok(true)
    }

    /// Puts a slice that was read in the cache. Entries that lead where none may answer with an error from then
    /// on, the others are as usable as before, and nothing is changed any more.
    ///
    /// A slice that comes back, in an image that is sound so far, is what it was when it was looked at: reading goes
    /// by it at once, and [`Metadata::check_slice`] looks at it again before anything is written through it.
    pub(crate) fn adopt_slice(&mut self, slice: u64, mut bytes: Box<[u8]>) -> Vec<Exposed> {
        if !self.corrupt && self.refcounts.structures.has_seen(slice) {
            self.l2.insert_unchecked(slice, bytes);
            return Vec::new();
        }
        let exposed = self.refcounts.structures.admit(&self.geometry, slice, &bytes);
        self.corrupt |= refuse(&self.geometry, &mut bytes, &exposed);
        self.l2.insert(slice, bytes, false);
        exposed
    }

    /// Looks at a cached slice, if that has yet to be done, as [`Metadata::adopt_slice`] does.
    pub(crate) fn check_slice(&mut self, slice: u64) -> Vec<Exposed> {
        let Some(bytes) = self.l2.take_unchecked(slice) else {
            return Vec::new();
        };
        let exposed = self.refcounts.structures.admit(&self.geometry, slice, bytes);
        self.corrupt |= refuse(&self.geometry, bytes, &exposed);
        exposed
    }

    /// Looks at all entries of a table that is to be adopted. Returns the first one that leads where none may,
    /// its index counted from the table's start.
    pub(crate) fn inspect_table(&mut self, l1_index: usize, table: &[u8]) -> Option<Exposed> {
        let slices = self.table_slices(l1_index);
        let parts = table.chunks_exact(self.l2.slice_bytes());
        for (slice, (at, part)) in slices.zip(parts.enumerate()) {
            let exposed = self.refcounts.structures.admit(&self.geometry, slice, part);
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

    fn entry(&self, slice: u64, cluster: u64) -> Result<L2Entry, Blocked> {
        let bytes = self.l2.get(slice).ok_or(Blocked::LoadL2(slice))?;
        Ok(L2Table::new(bytes, &self.geometry).get(self.index_in_slice(cluster)))
    }

    /// The entry, within its slice, that describes a guest cluster.
    fn index_in_slice(&self, cluster: u64) -> usize {
        (cluster & ((1 << self.slice_bits) - 1)) as usize
    }

    /// What a guest cluster is mapped to; its slice is cached.
    pub(crate) fn mapping(&self, slice: u64, cluster: u64) -> Result<L2Mapping, Blocked> {
        self.entry(slice, cluster)?
            .decode(&self.geometry)
            .map_err(corrupt)
    }

    /// The host cluster that a guest cluster is mapped to, if it lies past the end of the file.
    fn past_end(&self, mapping: &L2Mapping) -> Option<HostOffset> {
        let bits = self.geometry.cluster_bits().get();
        host_of(mapping).filter(|host| host.bytes() >> bits >= self.refcounts.end())
    }

    /// Plans the next step of a write to guest bytes `offset..end`.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if something must happen first.
    pub(crate) fn plan_write(&mut self, offset: u64, end: u64) -> Result<WriteStep, Blocked> {
        let bits = self.geometry.cluster_bits().get();
        let size = self.geometry.cluster_size();
        let cluster = offset >> bits;
        if self.is_in_flight(offset, 1) {
            return Err(Blocked::InFlight(cluster));
        }
        let slice = self.own_slice(cluster)?;
        let first = self.mapping(slice, cluster)?;
        if let Some(host) = self.past_end(&first) {
            tracing::error!(guest = offset, %host, "the mapping leads past the end of the file");
            return Err(Blocked::Failed(IoError::Corrupt));
        }
        if let L2Mapping::Data { host, copied } = first
            && (copied || broken(Rule::InPlaceShared))
        {
            let host = host.bytes() + (offset & (size - 1));
            let mut len = (size - (offset & (size - 1))).min(end - offset);
            while offset + len < end && (offset + len) >> (bits + self.slice_bits) == slice {
                let next = (offset + len) >> bits;
                let alike = matches!(self.mapping(slice, next),
                    Ok(L2Mapping::Data { host: at, copied: true }) if at.bytes() == host + len);
                if !alike || self.is_in_flight(offset + len, 1) {
                    break;
                }
                len += size.min(end - offset - len);
            }
            return Ok(WriteStep::InPlace { host, len });
        }
        if let L2Mapping::Zero {
            host: Some(host),
            copied: true,
        } = first
        {
            self.enter_in_flight(cluster, 1);
            self.l2.pin(slice);
            return Ok(WriteStep::Allocated(Allocation {
                guest: cluster,
                count: 1,
                host: host.bytes(),
                zero: false,
                kept: true,
                slice,
                old_first: first,
                old_last: first,
            }));
        }
        let last = (end - 1) >> bits;
        let mut count = 1;
        while cluster + count <= last
            && (cluster + count) >> self.slice_bits == slice
            && !self.is_in_flight((cluster + count) << bits, 1)
        {
            match self.mapping(slice, cluster + count) {
                Ok(L2Mapping::Data { copied: true, .. } | L2Mapping::Zero { copied: true, .. }) | Err(_) => {
                    break;
                }
                // It fails when the write gets there: what it would be a copy of cannot be read.
                Ok(old) if self.past_end(&old).is_some() => break,
                Ok(_) => count += 1,
            }
        }
        let run = self.refcounts.allocate(count)?;
        let old_last = self.mapping(slice, cluster + run.count - 1)?;
        self.enter_in_flight(cluster, run.count);
        self.l2.pin(slice);
        Ok(WriteStep::Allocated(Allocation {
            guest: cluster,
            count: run.count,
            host: self.geometry.host_offset(HostCluster::new(run.first)).bytes(),
            zero: run.zero,
            kept: false,
            slice,
            old_first: first,
            old_last,
        }))
    }

    /// Maps an allocation whose data is written. Returns whom to wake, however it ended.
    ///
    /// # Errors
    ///
    /// If the metadata is not as planned, which is a corruption.
    pub(crate) fn publish(&mut self, allocation: &Allocation) -> (Vec<Waker>, Result<(), IoError>) {
        let size = self.geometry.cluster_size();
        self.l2.unpin(allocation.slice);
        let result = (0..allocation.count).try_for_each(|index| {
            let host = HostOffset::new(allocation.host + index * size);
            self.set_mapping(
                allocation.slice,
                allocation.guest + index,
                L2Entry::data(host, true),
            )
            .map_err(|_| IoError::Corrupt)
        });
        (self.leave_in_flight(allocation.guest), result)
    }

    /// Undoes an allocation whose data could not be written. Returns whom to wake.
    #[must_use]
    pub(crate) fn abandon(&mut self, allocation: &Allocation) -> Vec<Waker> {
        self.l2.unpin(allocation.slice);
        if !allocation.kept {
            let first = self
                .geometry
                .host_cluster(HostOffset::new(allocation.host))
                .index();
            for cluster in first..first + allocation.count {
                if self.refcounts.give_back(cluster).is_err() {
                    // Its slice was evicted meanwhile; it is freed like a mapped one.
                    self.drops.push((cluster, 1));
                }
            }
        }
        self.leave_in_flight(allocation.guest)
    }

    /// Changes one mapping; what it referred to before is dropped, unless the new entry keeps it.
    pub(crate) fn set_mapping(&mut self, slice: u64, cluster: u64, new: L2Entry) -> Result<(), Blocked> {
        let old = self.mapping(slice, cluster)?;
        let kept = new
            .decode(&self.geometry)
            .ok()
            .and_then(|mapping| host_of(&mapping));
        match old {
            L2Mapping::Compressed(extent) => {
                let first = self.geometry.host_cluster(extent.host).index();
                let last = self
                    .geometry
                    .host_cluster(HostOffset::new(extent.end() - 1))
                    .index();
                self.drops.push((first, last - first + 1));
            }
            _ => {
                if let Some(host) = host_of(&old)
                    && kept != Some(host)
                {
                    self.drops.push((self.geometry.host_cluster(host).index(), 1));
                }
            }
        }
        let index = self.index_in_slice(cluster);
        let bytes = self.l2.get_mut(slice).ok_or(Blocked::LoadL2(slice))?;
        L2TableMut::new(bytes, &self.geometry).set(index, new);
        Ok(())
    }

    /// Whether the mapping in memory is the durable one, and nothing waits to be freed.
    pub(crate) fn is_clean(&self) -> bool {
        !self.flushing
            && self.l2.dirty_count() == 0
            && self.refcounts.slices.dirty_count() == 0
            && self.refcounts.dirty_parts.is_empty()
            && self.refcounts.moved_from.is_empty()
            && self.l1_dirty_parts.is_empty()
            && self.fresh_tables.is_empty()
            && !self.header_dirty
            && self.refcounts.fresh.is_empty()
            && self.drops.is_empty()
    }
}

/// Makes entries that lead where none may answer with an error. Whether there are any.
fn refuse(geometry: &Geometry, bytes: &mut [u8], exposed: &[Exposed]) -> bool {
    let mut entries = L2TableMut::new(bytes, geometry);
    for entry in exposed.iter().filter(|entry| !entry.readable) {
        entries.set(entry.index, L2Entry::REFUSED);
    }
    !exposed.is_empty()
}

fn host_of(mapping: &L2Mapping) -> Option<HostOffset> {
    match mapping {
        L2Mapping::Data { host, .. } => Some(*host),
        L2Mapping::Zero { host, .. } => *host,
        L2Mapping::Unallocated | L2Mapping::Compressed(_) => None,
    }
}

fn corrupt(error: EntryError) -> Blocked {
    tracing::error!(%error, "the mapping is corrupt");
    Blocked::Failed(IoError::Corrupt)
}
