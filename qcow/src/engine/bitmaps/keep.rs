//! Bitmaps that are kept while an image is written: loaded before the first change, stored when the image is closed, and before each
//! change where they are durable.
//!
//! The bits are in memory meanwhile ([`DirtyBitmaps`]), where `record` sets them. They are stored as any change of bitmaps is: in free
//! clusters, put in force by one header write. The same write ends the *in use* of the directory.
//!
//! Invariants:
//! - a bitmap is stored only if its bits have been in memory since before the first change, or all of them are set;
//! - durable bitmaps are written in place only in clusters that this engine has allocated for them;
//! - what does not fit the memory, or is damaged, stays marked as in use.

use std::rc::Rc;

use block::canary::{Rule, broken};

use super::super::announce;
use super::super::exclusive::{self, Exclusive};
use super::super::switch::Switch;
use super::merge::clear_from;
use super::{BitmapsError, Finished, Operation, Queue, Tables};
use crate::format::bitmap::BITMAP_FLAGS_AT;
use crate::format::{BitmapCluster, BitmapDirectoryEntry, BitmapFlags, ClusterUse};
use crate::image::ReadError;
use crate::image::bitmaps::{consistent_bitmaps, for_each_bitmap};
use crate::metadata::dirty_bits::{DirtyBitmap, DirtyBitmaps};

/// The time at which the bits of persistent bitmaps that record changes are stored.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum BitmapStorage {
    /// When the image is closed. After a crash the bitmaps can only be removed, as QEMU leaves them.
    #[default]
    Close,
    /// Before each change. After a crash the bitmaps have every change, and may have more.
    Durable,
}

/// Memory for an entry of the directory, beside its bytes.
const ENTRY_BYTES: u64 = 128;

/// Returns true if bits are stored before each change.
pub(in super::super) fn are_durable(queue: &Queue) -> bool {
    let shared = &queue.shared;
    shared.policy.bitmaps.storage == BitmapStorage::Durable && !shared.announcements.is_degraded()
}

/// Reads the bitmaps that record changes, as far as they fit the memory. Nothing has changed yet.
///
/// # Errors
///
/// [`BitmapsError`], if no bitmap can be kept.
pub(in super::super) async fn load(queue: &Rc<Queue>) -> Result<DirtyBitmaps, BitmapsError> {
    let header = queue.shared.header.decode()?;
    let Some(extension) = consistent_bitmaps(&header) else {
        return Ok(DirtyBitmaps::default());
    };
    // Without room in the header they could not be stored.
    queue.shared.header.plan_bitmaps(Some(extension))?;
    let size_bytes = queue.metadata()?.size_bytes & !511;
    let geometry = queue.shared.geometry.with_virtual_size(size_bytes);
    let image = queue.shared.file.path().display();
    let directory_bytes =
        u64::from(extension.count) * ENTRY_BYTES + extension.directory_size.saturating_mul(2);
    let memory_bytes = queue.shared.policy.bitmaps.memory_bytes;
    let Some(mut room) = memory_bytes.checked_sub(directory_bytes) else {
        tracing::warn!(%image, directory_bytes, memory_bytes, "the directory of the bitmaps is larger than the memory for them");
        return Ok(DirtyBitmaps::default());
    };
    let mut kept: Vec<(u64, BitmapDirectoryEntry)> = Vec::new();
    let mut left_out = 0_u64;
    let each = |at: u64, entry: BitmapDirectoryEntry| {
        let flags = entry.flags;
        if !flags.contains(BitmapFlags::AUTO) || flags.contains(BitmapFlags::IN_USE) {
            return;
        }
        let is_known = entry.extra.is_empty() || flags.contains(BitmapFlags::EXTRA_DATA_COMPATIBLE);
        let left = room.checked_sub(DirtyBitmap::memory_bytes(entry.bits(&geometry)));
        match left.filter(|_| is_known && entry.validate(&geometry).is_ok()) {
            Some(left) => {
                room = left;
                kept.push((at + BITMAP_FLAGS_AT as u64, entry));
            }
            None => left_out += 1,
        }
    };
    let file_len = queue.file.len().map_err(ReadError::Length)?;
    for_each_bitmap(&queue.file, &header, &extension, file_len, each).await?;
    if left_out > 0 {
        tracing::warn!(%image, left_out, memory_bytes, "some bitmaps do not fit the memory for them, or are malformed");
    }
    let tables = Tables { queue, geometry };
    let mut list = Vec::new();
    for (flags_at, entry) in kept {
        match bits_of(&tables, flags_at, &entry).await {
            Ok(bitmap) => list.push(bitmap),
            Err(BitmapsError::Io(error)) => return Err(error.into()),
            Err(error) => tracing::warn!(%image, %error, "a bitmap is damaged"),
        }
    }
    Ok(DirtyBitmaps::new(list))
}

async fn bits_of(
    tables: &Tables<'_>,
    flags_at: u64,
    entry: &BitmapDirectoryEntry,
) -> Result<DirtyBitmap, BitmapsError> {
    let cluster_size = tables.geometry.cluster_size();
    let bits = entry.bits(&tables.geometry);
    let bitmap = DirtyBitmap::new(flags_at, entry.granularity_bits, bits, cluster_size);
    for (index, cluster) in (0..).zip(tables.table_of(entry).await?) {
        match cluster {
            BitmapCluster::Zeros => {}
            BitmapCluster::Ones => bitmap.load(index, cluster_size, None),
            BitmapCluster::Data(host) => {
                let bytes = tables.read_bits(host).await?;
                bitmap.load(index, cluster_size, Some(&bytes));
            }
        }
    }
    Ok(bitmap)
}

/// Makes the bitmaps that record changes durable, alone: all their bits are stored, with clusters to write more in place. If that
/// fails they are marked as in use, and stored when the image is closed.
pub(in super::super) async fn prepare(queue: &Rc<Queue>) -> Result<(), block::IoError> {
    let shared = &queue.shared;
    let Err(error) = make_durable(queue).await else {
        return Ok(());
    };
    if shared.is_corrupt() {
        return Err(block::IoError::Corrupt);
    }
    if let BitmapsError::Closed = error {
        return Err(block::IoError::Cancelled);
    }
    let image = shared.file.path().display();
    tracing::warn!(%image, %error, "bitmaps cannot be made durable; they are stored when the image is closed");
    shared.announcements.degrade();
    announce::writes(queue).await
}

async fn make_durable(queue: &Rc<Queue>) -> Result<(), BitmapsError> {
    let section = exclusive::begin(queue).await?;
    let announcements = &queue.shared.announcements;
    if announcements.duty() != announce::Duty::Announce {
        // Another request was first.
        return Ok(());
    }
    let present = queue.metadata()?.bitmaps.clone();
    let bitmaps = match present {
        Some(bitmaps) => bitmaps,
        None => load(queue).await?.into(),
    };
    let mut operation = Operation::begin(queue, Switch::new(queue, &section)?, true).await?;
    operation.check_room(&bitmaps)?;
    let stored = operation.store(&bitmaps, true).await?;
    let (recording, _) = announcements.marks();
    for (entry, at) in operation.entries.iter_mut().zip(&operation.flags_at) {
        if recording.binary_search(at).is_ok() && bitmaps.find(*at).is_none() {
            entry.flags.insert(BitmapFlags::IN_USE);
        }
    }
    let finished = operation.finish().await?;
    let mut list = Vec::new();
    for (index, mut bitmap) in stored {
        bitmap.flags_at = finished.flags_at.get(index).copied().unwrap_or_default();
        list.push(bitmap);
    }
    finished.commit(Some(DirtyBitmaps::durable(list))).await?;
    Ok(())
}

/// Returns true if what is stored of bitmaps is not what it should be when the image is closed.
pub(in super::super) fn are_unstored(queue: &Queue) -> Result<bool, block::IoError> {
    let shared = &queue.shared;
    let is_any = queue.metadata()?.bitmaps.is_some() || shared.announcements.are_all_marked();
    Ok(is_any && !shared.is_corrupt())
}

/// Stores the bitmaps of an image that closes. If that fails they stay as they are: marked as in use, or with every change, and more.
pub(in super::super) async fn store<Turn>(queue: &Rc<Queue>, section: &Exclusive<'_, Turn>) {
    let stored = async {
        let switch = Switch::new(queue, section)?;
        let mut operation = Operation::begin(queue, switch, true).await?;
        let bitmaps = queue.metadata()?.bitmaps.clone().unwrap_or_default();
        operation.store(&bitmaps, false).await?;
        operation.commit().await
    };
    if let Err(error) = stored.await {
        let error: BitmapsError = error;
        let image = queue.shared.file.path().display();
        tracing::error!(%image, %error, "the bitmaps could not be stored");
    }
}

/// Adds bitmaps to a next state in which any byte of the disk may be another: those that record changes have all bits set.
///
/// # Errors
///
/// [`BitmapsError`]; then the next state cannot be used any more.
pub(in super::super) async fn mark_all<'a>(
    queue: &'a Rc<Queue>,
    switch: Switch<'a>,
) -> Result<Finished<'a>, BitmapsError> {
    let mut operation = Operation::begin(queue, switch, true).await?;
    let bitmaps = queue.metadata()?.bitmaps.clone().unwrap_or_default();
    let (recording, disabled) = queue.shared.announcements.marks();
    for index in 0..operation.entries.len() {
        let (entry, at) = operation.at(index);
        if disabled.binary_search(&at).is_ok() {
            operation.fit(index).await?;
        }
        let is_kept = !entry.flags.contains(BitmapFlags::IN_USE) || bitmaps.find(at).is_some();
        if recording.binary_search(&at).is_err() || !is_kept || broken(Rule::AppliedUnmarked) {
            continue;
        }
        if let Some(count) = operation.clusters_of(&entry) {
            let ones = vec![BitmapCluster::Ones; count];
            operation.replace(index, &ones).await?;
        } else {
            operation.mark_in_use(index);
        }
    }
    operation.finish().await
}

impl Operation<'_> {
    /// Returns a bitmap of the old state, and the offset of its flags.
    fn at(&self, index: usize) -> (BitmapDirectoryEntry, u64) {
        let entry = self.entries.get(index).cloned().unwrap_or_default();
        (entry, self.flags_at.get(index).copied().unwrap_or_default())
    }

    fn mark_in_use(&mut self, index: usize) {
        if let Some(entry) = self.entries.get_mut(index) {
            entry.flags.insert(BitmapFlags::IN_USE);
        }
    }

    /// Returns the number of clusters that a bitmap of the next state has. `None`: such a bitmap would break the format's rules.
    fn clusters_of(&self, entry: &BitmapDirectoryEntry) -> Option<usize> {
        let bits = entry.bits(&self.geometry);
        let count = u32::try_from(self.geometry.clusters_for(bits.div_ceil(8))).ok()?;
        let mut next = entry.clone();
        next.table_entries = count;
        next.flags.remove(BitmapFlags::IN_USE);
        next.validate(&self.geometry).ok()?;
        Some(count as usize)
    }

    /// Fails if durable bitmaps would take more space than there is memory for bitmaps: space is not chosen by the image.
    fn check_room(&self, bitmaps: &DirtyBitmaps) -> Result<(), BitmapsError> {
        let recorded = self.entries.iter().zip(&self.flags_at);
        let clusters = recorded
            .filter(|(_, at)| bitmaps.find(**at).is_some())
            .filter_map(|(entry, _)| self.clusters_of(entry));
        let bytes = clusters.sum::<usize>() as u64 * self.geometry.cluster_size();
        let memory_bytes = self.queue.shared.policy.bitmaps.memory_bytes;
        match bytes > memory_bytes {
            true => Err(BitmapsError::TooMuchSpace { bytes, memory_bytes }),
            false => Ok(()),
        }
    }

    /// Stores the bits of `bitmaps`, and fits bitmaps that do not record changes to the disk's size. They are not in use in
    /// the next state. With `room` all clusters whose bits are not all set have data, which may be written in place. Returns the
    /// numbers of those that were stored, with what is stored of them.
    pub(super) async fn store(
        &mut self,
        bitmaps: &DirtyBitmaps,
        room: bool,
    ) -> Result<Vec<(usize, DirtyBitmap)>, BitmapsError> {
        let (_, disabled) = self.queue.shared.announcements.marks();
        let mut stored = Vec::new();
        for index in 0..self.entries.len() {
            let (entry, at) = self.at(index);
            let Some(bitmap) = bitmaps.find(at) else {
                if disabled.binary_search(&at).is_ok() {
                    self.fit(index).await?;
                }
                continue;
            };
            let Some(count) = self.clusters_of(&entry) else {
                self.mark_in_use(index);
                continue;
            };
            let (size, bits) = (self.geometry.cluster_size(), entry.bits(&self.geometry));
            let mut table = Vec::with_capacity(count);
            for cluster in 0..count as u64 {
                let (kind, bytes) = bitmap.content(cluster, size, bits);
                table.push(match kind {
                    BitmapCluster::Ones => kind,
                    BitmapCluster::Zeros if !room => kind,
                    _ => BitmapCluster::Data(self.switch.new_table(ClusterUse::BitmapData, bytes).await?),
                });
            }
            self.replace(index, &table).await?;
            stored.push((index, bitmap.stored_as(&table)));
        }
        Ok(stored)
    }

    /// Gives a bitmap another table, and gives up the old one with its data. The bitmap is not in use.
    async fn replace(&mut self, index: usize, table: &[BitmapCluster]) -> Result<(), BitmapsError> {
        let (mut entry, _) = self.at(index);
        let (old, was) = self.old_table(&entry).await?;
        self.release(&old, &was).await?;
        entry.flags.remove(BitmapFlags::IN_USE);
        entry.table_entries = table.len() as u32;
        entry.table_offset = self.new_table(table).await?;
        self.put(index, entry);
        Ok(())
    }

    /// Reads a bitmap's table, which may be for a disk of another size.
    async fn old_table(
        &self,
        entry: &BitmapDirectoryEntry,
    ) -> Result<(BitmapDirectoryEntry, Vec<BitmapCluster>), BitmapsError> {
        let mut entry = entry.clone();
        entry.flags.insert(BitmapFlags::IN_USE);
        let table = self.tables.table_of(&entry).await?;
        Ok((entry, table))
    }

    /// Fits a bitmap that does not record changes to the disk's size; its new bits are clear. It is not in use, unless it would break
    /// the format's rules.
    async fn fit(&mut self, index: usize) -> Result<(), BitmapsError> {
        let (mut entry, _) = self.at(index);
        let Some(count) = self.clusters_of(&entry) else {
            return Ok(());
        };
        if count == entry.table_entries as usize {
            entry.flags.remove(BitmapFlags::IN_USE);
            self.put(index, entry);
            return Ok(());
        }
        let (old, mut table) = self.old_table(&entry).await?;
        let dropped = table.split_off(count.min(table.len()));
        self.release(&old, &dropped).await?;
        let last_bits = entry.bits(&self.geometry) % (self.geometry.cluster_size() * 8);
        if let (false, Some(BitmapCluster::Data(host))) =
            (dropped.is_empty() || last_bits == 0, table.last_mut())
        {
            // Bits past the disk's end would be of bytes that it gets when it grows.
            let at = *host;
            let mut bytes = self.tables.read_bits(at).await?.to_vec();
            clear_from(&mut bytes, last_bits);
            *host = self.switch.new_table(ClusterUse::BitmapData, bytes).await?;
            self.release_data(vec![at]).await?;
        }
        table.resize(count, BitmapCluster::Zeros);
        entry.flags.remove(BitmapFlags::IN_USE);
        entry.table_entries = count as u32;
        entry.table_offset = self.new_table(&table).await?;
        self.put(index, entry);
        Ok(())
    }
}
