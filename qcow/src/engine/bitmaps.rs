//! Changes of an image's persistent bitmaps: add, remove, clear, enable, disable, merge; and their storage ([`keep`]).
//!
//! Each change runs alone ([`exclusive`]) and switches by one header write ([`Switch`]): a new directory, and new tables and
//! data of what changes, lie in clusters that were free. A cut leaves the old bitmaps or the new ones, and at most leaks.
//!
//! A count is believed as for snapshots: what another bitmap or a structure of the image uses is not freed.
//! Memory is bounded by a bitmap's table and a few clusters of data, whatever the disk's size.

mod error;
mod keep;
mod merge;
mod relocate;
mod tables;

use std::rc::Rc;
use std::sync::Arc;

use block::{AlignedBuf, Context, IoError};

pub use error::BitmapsError;
pub use keep::BitmapStorage;
pub(super) use keep::{are_durable, are_unstored, load, mark_all, prepare, store};
pub(super) use relocate::{for_each_at_rest, move_below};
use tables::{Tables, place_of};

use super::announce::{Announcement, Mark};
use super::switch::{Stopped, Switch};
use super::{QcowDisk, Queue, exclusive, flush};
use crate::format::bitmap::{
    BITMAP_BITS_MAX, BITMAP_DIRECTORY_MAX_BYTES, BITMAP_FLAGS_AT, BITMAP_GRANULARITY_BITS, BITMAP_NAME_MAX,
    BITMAPS_MAX, DIRTY_TRACKING,
};
use crate::format::{
    BitmapCluster, BitmapDirectoryEntry, BitmapFlags, BitmapTableEntry, BitmapsExtension, BitmapsLayout,
    ClusterUse, Geometry, HostCluster, HostOffset, Version,
};
use crate::image::bitmaps::{consistent_bitmaps, for_each_bitmap};
use crate::image::references::{GUARDED_CLUSTERS_MAX, GUARDED_ENTRIES_MAX, for_each_reference};
use crate::image::{BitmapList, ReadError};
use crate::metadata::Counted;
use crate::metadata::dirty_bits::DirtyBitmaps;

/// A change of one persistent bitmap.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum BitmapChange {
    /// A new bitmap without bits.
    Add {
        /// The number of guest bytes that one bit covers; as in QEMU without.
        granularity: Option<u64>,
        /// It records changes.
        enabled: bool,
    },
    /// It is removed, also if it is in use.
    Remove,
    /// All bits are cleared.
    Clear,
    /// It records changes from now on.
    Enable,
    /// It does not record changes any more.
    Disable,
    /// It gets all bits of another bitmap.
    Merge {
        /// The name of the other one.
        source: String,
    },
}

impl QcowDisk {
    /// Returns the image's persistent bitmaps, in the order of their directory. Those that record changes, and are not durable, are
    /// in use once something has changed.
    ///
    /// # Errors
    ///
    /// [`BitmapsError`].
    pub async fn bitmaps(&self, cx: &Context) -> Result<BitmapList, BitmapsError> {
        let queue = self
            .queue(cx)
            .map_err(|error| BitmapsError::Queue(error.source))?;
        // A change may be replacing the directory.
        let _turn = queue.shared.changes.take().await;
        let file_len = queue.file.len().map_err(ReadError::Length)?;
        Ok(BitmapList::read(&queue.file, &queue.shared.header.decode()?, file_len).await?)
    }

    /// Changes a persistent bitmap, durably. Requests of all queues wait meanwhile. The counts are believed, as for all that
    /// a served disk does; [`offline::change_bitmap`](crate::offline::change_bitmap) checks them first.
    ///
    /// # Errors
    ///
    /// [`BitmapsError`]; then the bitmaps are as they were, unless the header's write or sync failed, after which the image
    /// is not written any more.
    pub async fn change_bitmap(
        &self,
        cx: &Context,
        name: &str,
        change: &BitmapChange,
    ) -> Result<(), BitmapsError> {
        self.change_bitmap_freeing(cx, name, change, true).await
    }

    /// As [`Self::change_bitmap`]; unless it `frees`, what the change gives up is leaked.
    pub(crate) async fn change_bitmap_freeing(
        &self,
        cx: &Context,
        name: &str,
        change: &BitmapChange,
        frees: bool,
    ) -> Result<(), BitmapsError> {
        let queue = self
            .queue(cx)
            .map_err(|error| BitmapsError::Queue(error.source))?;
        carry_out(&queue, name, change, frees).await
    }
}

async fn carry_out(
    queue: &Rc<Queue>,
    name: &str,
    change: &BitmapChange,
    frees: bool,
) -> Result<(), BitmapsError> {
    if name.is_empty() || name.len() > BITMAP_NAME_MAX || name.contains('\0') {
        return Err(BitmapsError::Name { len: name.len() });
    }
    let section = exclusive::begin(queue).await?;
    let mut operation = Operation::begin(queue, Switch::new(queue, &section)?, frees).await?;
    let bitmaps = queue.metadata()?.bitmaps.clone();
    if let Some(bitmaps) = bitmaps {
        operation.store(&bitmaps, false).await?;
    }
    operation.change(name, change).await?;
    operation.commit().await
}

/// A change that runs alone, and the next state of the metadata.
struct Operation<'a> {
    queue: &'a Rc<Queue>,
    switch: Switch<'a>,
    /// With the disk's size as it will be.
    geometry: Geometry,
    tables: Tables<'a>,
    /// The place of the bitmaps as they are, if there are any.
    old: Option<BitmapsExtension>,
    /// The bitmaps of the next state.
    entries: Vec<BitmapDirectoryEntry>,
    /// The offsets of their flags, as they are.
    flags_at: Vec<u64>,
    /// True if clusters that are given up become free; otherwise they are leaked.
    frees: bool,
}

impl<'a> Operation<'a> {
    async fn begin(queue: &'a Rc<Queue>, switch: Switch<'a>, frees: bool) -> Result<Self, BitmapsError> {
        let header = queue.shared.header.decode()?;
        if header.version == Version::V2 {
            return Err(BitmapsError::Version2);
        }
        let old = consistent_bitmaps(&header);
        let (mut entries, mut flags_at) = (Vec::new(), Vec::new());
        if let Some(extension) = &old {
            let file_len = queue.file.len().map_err(ReadError::Length)?;
            let each = |at: u64, entry| {
                entries.push(entry);
                flags_at.push(at + BITMAP_FLAGS_AT as u64);
            };
            for_each_bitmap(&queue.file, &header, extension, file_len, each).await?;
        }
        // There is room for any place if there is for one.
        let anywhere = BitmapsExtension {
            count: 1,
            reserved: 0,
            directory_size: 0,
            directory_offset: HostOffset::default(),
        };
        queue.shared.header.plan_bitmaps(Some(anywhere))?;
        let size_bytes = switch.next.size_bytes & !511;
        let geometry = queue.shared.geometry.with_virtual_size(size_bytes);
        Ok(Self {
            queue,
            switch,
            geometry,
            tables: Tables { queue, geometry },
            old,
            entries,
            flags_at,
            frees,
        })
    }

    async fn change(&mut self, name: &str, change: &BitmapChange) -> Result<(), BitmapsError> {
        match change {
            BitmapChange::Add { granularity, enabled } => {
                let entry = self.new_bitmap(name, *granularity, *enabled).await?;
                self.entries.push(entry);
            }
            BitmapChange::Remove => {
                let index = self.find(name)?;
                let entry = self.entries.remove(index);
                // A damaged table leads nowhere: what it led to becomes a leak.
                if let Ok(table) = self.tables.table_of(&entry).await {
                    self.release(&entry, &table).await?;
                }
            }
            BitmapChange::Clear => {
                let (index, mut entry) = self.usable(name)?;
                let table = self.tables.table_of(&entry).await?;
                self.release(&entry, &table).await?;
                let clear = vec![BitmapCluster::Zeros; table.len()];
                entry.table_offset = self.new_table(&clear).await?;
                self.put(index, entry);
            }
            BitmapChange::Enable | BitmapChange::Disable => {
                let (index, mut entry) = self.usable(name)?;
                entry
                    .flags
                    .set(BitmapFlags::AUTO, *change == BitmapChange::Enable);
                self.put(index, entry);
            }
            BitmapChange::Merge { source } => {
                let (index, mut entry) = self.usable(name)?;
                let (_, from) = self.usable(source)?;
                let merged = self.merge(&from, &entry).await?;
                self.release(&entry, &[]).await?;
                entry.table_offset = self.new_table(&merged).await?;
                self.put(index, entry);
            }
        }
        Ok(())
    }

    fn put(&mut self, index: usize, entry: BitmapDirectoryEntry) {
        if let Some(place) = self.entries.get_mut(index) {
            *place = entry;
        }
    }

    /// Returns the index of the bitmap of this name.
    fn find(&self, name: &str) -> Result<usize, BitmapsError> {
        let mut found = (0..)
            .zip(&self.entries)
            .filter(|(_, entry)| entry.name == name.as_bytes());
        match (found.next(), found.next()) {
            (Some((index, _)), None) => Ok(index),
            (None, _) => Err(BitmapsError::NotFound(name.to_owned())),
            (Some(_), Some(_)) => Err(BitmapsError::Ambiguous(name.to_owned())),
        }
    }

    /// Returns the bitmap of this name, if its bits may be used and changed.
    fn usable(&self, name: &str) -> Result<(usize, BitmapDirectoryEntry), BitmapsError> {
        let index = self.find(name)?;
        let entry = self.entries.get(index).cloned().unwrap_or_default();
        if entry.flags.contains(BitmapFlags::IN_USE) {
            return Err(BitmapsError::InUse(name.to_owned()));
        }
        if !entry.extra.is_empty() && !entry.flags.contains(BitmapFlags::EXTRA_DATA_COMPATIBLE) {
            return Err(BitmapsError::ExtraData(name.to_owned()));
        }
        self.tables.validate(&entry)?;
        Ok((index, entry))
    }

    async fn new_bitmap(
        &mut self,
        name: &str,
        granularity: Option<u64>,
        enabled: bool,
    ) -> Result<BitmapDirectoryEntry, BitmapsError> {
        // As in QEMU.
        let bytes = granularity.unwrap_or_else(|| self.geometry.cluster_size().clamp(4 << 10, 64 << 10));
        let granularity_bits = bytes.trailing_zeros() as u8;
        if !bytes.is_power_of_two() || !BITMAP_GRANULARITY_BITS.contains(&granularity_bits) {
            return Err(BitmapsError::Granularity(bytes));
        }
        if self.entries.iter().any(|entry| entry.name == name.as_bytes()) {
            return Err(BitmapsError::Exists(name.to_owned()));
        }
        if self.entries.len() as u64 >= u64::from(BITMAPS_MAX) {
            return Err(BitmapsError::TooMany);
        }
        let mut entry = BitmapDirectoryEntry {
            kind: DIRTY_TRACKING,
            granularity_bits,
            name: name.as_bytes().to_vec(),
            ..Default::default()
        };
        entry.flags.set(BitmapFlags::AUTO, enabled);
        let bits = entry.bits(&self.geometry);
        match bits {
            0 => return Err(BitmapsError::EmptyDisk),
            1..=BITMAP_BITS_MAX => {}
            _ => return Err(BitmapsError::TooManyBits { bits }),
        }
        entry.table_entries = self.geometry.clusters_for(bits.div_ceil(8)) as u32;
        let zeros = vec![BitmapCluster::Zeros; entry.table_entries as usize];
        entry.table_offset = self.new_table(&zeros).await?;
        Ok(entry)
    }

    async fn new_table(&mut self, table: &[BitmapCluster]) -> Result<HostOffset, BitmapsError> {
        let raw = |&cluster| BitmapTableEntry::encode(cluster).raw().to_be_bytes();
        let bytes = table.iter().flat_map(raw).collect();
        Ok(self.switch.new_table(ClusterUse::BitmapTable, bytes).await?)
    }

    /// Gives up a bitmap's table, and the data that `table` leads to.
    async fn release(
        &mut self,
        entry: &BitmapDirectoryEntry,
        table: &[BitmapCluster],
    ) -> Result<(), BitmapsError> {
        let data = table.iter().filter_map(|cluster| match cluster {
            BitmapCluster::Data(host) => Some(*host),
            _ => None,
        });
        self.release_data(data.collect()).await?;
        let place = place_of(entry);
        self.lower(place.kind, place.offset, place.bytes()).await
    }

    /// Gives up clusters of a bitmap's data.
    async fn release_data(&mut self, mut data: Vec<HostOffset>) -> Result<(), BitmapsError> {
        data.sort_unstable();
        let size = self.geometry.cluster_size();
        for host in data {
            self.lower(ClusterUse::BitmapData, host, size).await?;
        }
        Ok(())
    }

    /// Gives up one reference to each cluster of a structure.
    async fn lower(&mut self, what: ClusterUse, offset: HostOffset, bytes: u64) -> Result<(), BitmapsError> {
        if !self.frees {
            return Ok(());
        }
        let mut here = self.geometry.host_cluster(offset);
        let end = here + self.geometry.clusters_for(bytes);
        while here < end {
            let lower = self.switch.follow(|next, released| {
                let refcounts = &mut next.refcounts;
                refcounts.release_references(here, end, |found| found == what, released)
            });
            let (cluster, reason) = match lower.await? {
                Counted::Until(cluster) => {
                    here = cluster;
                    continue;
                }
                Counted::Uncounted(cluster) => (cluster, "its refcount is 0".to_owned()),
                Counted::Structure(cluster, other) => (cluster, format!("it lies over {}", other.phrase())),
                Counted::Undercounted(cluster) | Counted::Full(cluster) | Counted::Scattered(cluster) => {
                    (cluster, "it has more references than its refcount".to_owned())
                }
            };
            return Err(self.damaged(what, cluster, reason));
        }
        Ok(())
    }

    fn damaged(&self, what: ClusterUse, cluster: HostCluster, reason: String) -> BitmapsError {
        let offset = self.geometry.host_offset(cluster).bytes();
        BitmapsError::Damaged { what, offset, reason }
    }

    /// Fails if something that a bitmap of the next state uses is given up: its count is too low. The tables are read as
    /// far as bounds go.
    async fn check_kept(&self) -> Result<(), BitmapsError> {
        if self.switch.released.is_empty() {
            return Ok(());
        }
        let (mut clusters, mut entries) = (0, 0);
        for entry in &self.entries {
            if entry.validate(&self.geometry).is_err() {
                continue;
            }
            let table = place_of(entry);
            clusters += self.geometry.clusters_for(table.bytes());
            entries += table.entries;
            if clusters > GUARDED_CLUSTERS_MAX || entries > GUARDED_ENTRIES_MAX {
                break;
            }
            let first = self.geometry.host_cluster(table.offset);
            let mut used: Vec<(ClusterUse, HostCluster)> = first
                .until(first + self.geometry.clusters_for(table.bytes()))
                .map(|cluster| (table.kind, cluster))
                .collect();
            let each = |_, raw: BitmapTableEntry| {
                if let Ok(BitmapCluster::Data(host)) = raw.decode(&self.geometry) {
                    used.push((ClusterUse::BitmapData, self.geometry.host_cluster(host)));
                }
            };
            for_each_reference(&self.queue.file, table, each).await?;
            let shared = used
                .into_iter()
                .find(|&(_, cluster)| self.switch.released.contains(cluster));
            if let Some((what, cluster)) = shared {
                let reason = "it has more references than its refcount".to_owned();
                return Err(self.damaged(what, cluster, reason));
            }
        }
        Ok(())
    }

    /// Puts the next bitmaps in force.
    async fn commit(self) -> Result<(), BitmapsError> {
        Ok(self.finish().await?.commit(None).await?)
    }

    /// Builds the next directory.
    async fn finish(mut self) -> Result<Finished<'a>, BitmapsError> {
        if let Some(old) = self.old {
            self.lower(
                ClusterUse::BitmapDirectory,
                old.directory_offset,
                old.directory_size,
            )
            .await?;
        }
        self.check_kept().await?;
        let mut directory = Vec::new();
        let mut marks = Vec::new();
        for entry in &self.entries {
            let at = (directory.len() + BITMAP_FLAGS_AT) as u64;
            marks.push((at, entry.flags));
            entry.encode_into(&mut directory).ok_or(IoError::OutOfRange)?;
        }
        let bytes = directory.len() as u64;
        if bytes > BITMAP_DIRECTORY_MAX_BYTES {
            return Err(BitmapsError::DirectoryTooLong { bytes });
        }
        let extension = match directory.is_empty() {
            true => None,
            false => Some(BitmapsExtension {
                count: self.entries.len() as u32,
                reserved: 0,
                directory_size: bytes,
                directory_offset: self
                    .switch
                    .new_table(ClusterUse::BitmapDirectory, directory)
                    .await?,
            }),
        };
        let layout = self.queue.shared.header.plan_bitmaps(extension)?;
        if let Some((at, name)) = layout.copy() {
            // Durable with the tables, before the header leads to it.
            let name = AlignedBuf::from_slice(name);
            self.queue.file.write_at(at, name).await?;
        }
        let mut next = Announcement::default();
        let start = extension.map_or(0, |extension| extension.directory_offset.bytes());
        let marks = marks.into_iter().map(|(at, flags)| Mark {
            offset: start + at,
            flags,
        });
        let marks: Vec<Mark> = marks.collect();
        let flags_at = marks.iter().map(|mark| mark.offset).collect();
        marks.into_iter().for_each(|mark| next.add(mark));
        Ok(Finished {
            queue: self.queue,
            switch: self.switch,
            layout,
            next,
            flags_at,
        })
    }
}

/// Bitmaps that are complete and not in force.
pub(super) struct Finished<'a> {
    queue: &'a Rc<Queue>,
    switch: Switch<'a>,
    layout: BitmapsLayout,
    next: Announcement,
    /// The offsets of the flags of all bitmaps.
    flags_at: Vec<u64>,
}

impl Finished<'_> {
    /// Puts them in force. The `durable` ones record changes already; the bits of others are read before the next change.
    pub(super) async fn commit(mut self, durable: Option<DirtyBitmaps>) -> Result<(), Stopped> {
        let records = durable.is_some();
        self.switch.next.bitmaps = durable.map(Arc::new);
        self.switch
            .commit(|fields| fields.set_bitmaps(&self.layout))
            .await?;
        self.queue.shared.announcements.replace(self.next, records);
        // Still alone, so that the next operation waits for it.
        flush::in_background(self.queue);
        Ok(())
    }
}
