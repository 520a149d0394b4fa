//! Shrinking of a disk, which gives up what lies past its new end.
//!
//! It runs alone ([`exclusive`]) and switches by one header write ([`Switch`](super::switch::Switch)), as the application
//! of a snapshot does. The next state has a shorter L1 table, and a copy, without the entries past the end, of the L2 table
//! that the end lies in.
//!
//! The last cluster may be the disk's in part. Its other bytes would show when a program that does not clear them makes the
//! disk larger again. So it is copied with zeros in their place, and subclusters past the end become zeros. A data file has
//! one version of each cluster: there these bytes go when the file is cut off.
//!
//! Invariants:
//!
//! - bitmaps are marked as in use, durably, before the disk's size changes;
//! - no cluster that the disk keeps, or that a near snapshot uses, is given up;
//! - a data file is cut off when the header is durable and no request is in flight that has seen the old size.

use std::rc::Rc;

use block::buffer::Piece;
use block::canary::{Rule, broken};
use block::{AlignedBuf, Buffer, Context, IoError};
use smallvec::smallvec;

use super::snapshots::error::SnapshotError;
use super::snapshots::{Operation, read_entries};
use super::switch::Switch;
use super::{QcowDisk, Queue, announce, exclusive, flush, read, status};
use crate::format::subclusters::SUBCLUSTERS;
use crate::format::{
    ClusterUse, GuestOffset, HostOffset, L1Entry, L2Entry, L2Mapping, L2Table, L2TableMut, L2TableRef,
    SnapshotEntry, SubclusterBitmap, SubclusterKind, Version,
};

/// A disk was not made smaller. Unless it says otherwise, it is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ShrinkError {
    /// The disk cannot get this size.
    #[error(
        "the new size is {bytes} bytes; expected a multiple of 512, more than 0 and at most {now}, the disk's size"
    )]
    Size {
        /// The size asked for, in bytes.
        bytes: u64,
        /// The disk's size, in bytes.
        now: u64,
    },
    /// The snapshots do not record the size of their disks.
    #[error(
        "an image of version 2 keeps its size while it has snapshots, as they do not record it; delete them, or use \
         `qemu-img amend -o compat=1.1`"
    )]
    Version2,
    /// The image does not accept the change, or an entry or a count that it needs is damaged.
    #[error(transparent)]
    Metadata(#[from] SnapshotError),
    /// The data file is longer than the disk.
    #[error(
        "the disk has its new size, but its data file could not be cut off there; shrink the disk to the same size to try again"
    )]
    DataFile(#[source] IoError),
}

impl QcowDisk {
    /// Makes the disk smaller, durably: what lies past its new end is lost, and clusters that nothing uses any more are
    /// freed in the background. When the disk grows again, the new part reads as zeros. `size_bytes` is a multiple of 512.
    /// Requests of all queues wait meanwhile; those past the new end fail. Bitmaps are stored for the new size when the
    /// image is closed. The caller must notify the guest.
    ///
    /// # Errors
    ///
    /// [`ShrinkError`]; then the disk is as it was unless it says otherwise, or the header's write or sync failed, after
    /// which the image is not written any more.
    pub async fn shrink(&self, cx: &Context, size_bytes: u64) -> Result<(), ShrinkError> {
        let queue = self.queue(cx);
        let queue = queue.map_err(|error| SnapshotError::Queue(error.source))?;
        shrink(&queue, size_bytes).await
    }

    /// Returns true if the image has internal snapshots.
    pub(crate) fn has_snapshots(&self) -> bool {
        self.shared.header.snapshot_count() > 0
    }

    /// Returns the number of bytes, from the guest's byte `offset` on, that the image or its data file has as data: what a
    /// shrink to that size gives up. Reads all L2 tables from there on.
    ///
    /// # Errors
    ///
    /// The error of reading a table, or [`IoError::OutOfRange`] past the disk's end.
    pub async fn data_bytes_from(&self, cx: &Context, offset: u64) -> Result<u64, IoError> {
        let queue = self.queue(cx).map_err(|error| IoError::from(error.source))?;
        let (mut here, mut bytes) = (offset, 0);
        let end = self.shared.size_bytes();
        while here < end {
            let ranges = status::status(&queue, here, end - here).await?;
            let data = ranges
                .iter()
                .filter(|range| range.depth == 0 && range.may_hold_data());
            bytes += data.map(|range| range.len).sum::<u64>();
            match ranges.iter().map(|range| range.len).sum::<u64>() {
                0 => return Err(IoError::Unsupported),
                covered => here += covered,
            }
        }
        Ok(bytes)
    }
}

async fn shrink(queue: &Rc<Queue>, size_bytes: u64) -> Result<(), ShrinkError> {
    let shared = &queue.shared;
    let section = exclusive::begin(queue).await.map_err(SnapshotError::from)?;
    let now = shared.size_bytes();
    if size_bytes == 0 || !size_bytes.is_multiple_of(512) || size_bytes > now {
        return Err(ShrinkError::Size {
            bytes: size_bytes,
            now,
        });
    }
    if size_bytes < now {
        replace_metadata(queue, &section, size_bytes).await?;
    }
    // Requests that have seen the old size. They are held off, or have yet to be: none goes on with it.
    let is_drained = exclusive::drain(queue).await.is_ok();
    cut_data_file(queue, size_bytes, is_drained)
        .await
        .map_err(ShrinkError::DataFile)
}

/// Puts the metadata of the smaller disk in force.
async fn replace_metadata<Turn>(
    queue: &Rc<Queue>,
    section: &exclusive::Exclusive<'_, Turn>,
    size_bytes: u64,
) -> Result<(), ShrinkError> {
    let shared = &queue.shared;
    if shared.geometry.version() == Version::V2 && shared.header.snapshot_count() > 0 {
        return Err(ShrinkError::Version2);
    }
    let header = shared.header.decode().map_err(SnapshotError::from)?;
    let others = read_entries(queue, &header).await.map_err(SnapshotError::from)?;
    let mut operation = Operation {
        queue,
        switch: Switch::new(queue, section).map_err(SnapshotError::from)?,
        geometry: queue.shared.geometry,
    };
    operation.give_up_from(size_bytes, &others).await?;
    announce::resize(queue, size_bytes)
        .await
        .map_err(SnapshotError::from)?;
    // Their bits are stored at the new size when the image is closed, or before the next change.
    operation.switch.next.bitmaps = queue.metadata().map_err(SnapshotError::from)?.bitmaps.clone();
    operation
        .switch
        .commit(|_| ())
        .await
        .map_err(SnapshotError::from)?;
    // Still alone, so that the next operation waits for it.
    flush::in_background(queue);
    Ok(())
}

/// Cuts the data file, if there is one, off at the disk's end, durably. A block device keeps its length, and the disk's last
/// cluster gets zeros there.
async fn cut_data_file(queue: &Queue, size_bytes: u64, is_drained: bool) -> Result<(), IoError> {
    let Some(data) = &queue.shared.data_file else {
        return Ok(());
    };
    let file = queue.data.file();
    let len = file.len()?;
    if len <= size_bytes {
        return Ok(());
    }
    if !is_drained {
        return Err(IoError::Cancelled);
    }
    if data.file.is_block_device() {
        let end = size_bytes
            .next_multiple_of(queue.shared.geometry.cluster_size())
            .min(len);
        queue
            .data
            .zero(HostOffset::new(size_bytes), end - size_bytes, true)
            .await?;
    } else {
        file.set_len(size_bytes).await?;
    }
    file.sync().await
}

/// The last L2 table of the smaller disk, which replaces the one in its place.
struct LastTable {
    index: usize,
    bytes: Vec<u8>,
    /// The last cluster, if it is to be copied: the index of its entry, and the subclusters of the copy.
    copied: Option<(usize, SubclusterBitmap)>,
}

/// The change of a last cluster.
enum LastCluster {
    Kept,
    /// Its entry says that what is past the disk's end is zeros.
    Marked(L2Entry),
    /// The bytes before the disk's end are to be copied; these are the subclusters of the copy.
    Copied(SubclusterBitmap),
}

impl Operation<'_> {
    /// Gives the disk the size `size_bytes`, which is smaller. `others` are the snapshots, which stay.
    async fn give_up_from(&mut self, size_bytes: u64, others: &[SnapshotEntry]) -> Result<(), SnapshotError> {
        let entries = self.geometry.l1_entries_needed(size_bytes) as usize;
        let tables = self.tables()?;
        self.bound(tables.len())?;
        let (mut kept, gone): (Vec<_>, Vec<_>) = tables.into_iter().partition(|&(index, _)| index < entries);
        let followed = kept.len() + gone.len();
        self.lower_tables(&gone).await?;
        // The end may lie in the last table's span, or be that span's end.
        let ends_within = !size_bytes.is_multiple_of(self.geometry.l2_table_span());
        let mut last = None;
        if let Some(&(index, table)) = kept.last()
            && index + 1 == entries
            && ends_within
        {
            last = self.cut_table(index, table, size_bytes).await?;
        }
        if last.is_some() {
            kept.pop();
        }
        if !self.switch.released.is_empty() {
            for some in kept.chunks(self.switch.tables_at_once()) {
                for (&(_, table), bytes) in some.iter().zip(self.read(some).await?) {
                    self.kept().check_table(table.host, &bytes)?;
                }
            }
            if let Some(last) = &last {
                self.kept().check_data(&last.bytes)?;
            }
        }
        // The newest is the likeliest to share what the disk gives up.
        let newest = others.len().checked_sub(1).into_iter();
        self.kept().check_others(others, newest, followed).await?;
        let mut l1 = self.switch.next.l1().to_vec();
        l1.resize(entries, L1Entry::UNALLOCATED);
        if let Some(last) = last {
            let index = last.index;
            let host = self.write_last_table(last, size_bytes).await?;
            if let Some(place) = l1.get_mut(index) {
                *place = L1Entry::encode(L2TableRef { host, copied: true });
            }
        }
        let old = self.switch.replace_l1(&l1).await?;
        self.switch
            .leave(self.geometry.host_cluster(old.offset), old.clusters);
        self.switch.next.size_bytes = size_bytes;
        Ok(())
    }

    /// Gives up the L2 table that the end of the smaller disk lies in, and what entries past the end lead to. Returns what
    /// replaces it, or `None` if there is nothing past the end: then it stays.
    async fn cut_table(
        &mut self,
        index: usize,
        table: L2TableRef,
        size_bytes: u64,
    ) -> Result<Option<LastTable>, SnapshotError> {
        let geometry = self.geometry;
        let old = self.read(&[(index, table)]).await?.pop();
        let old = old.ok_or(IoError::Dropped)?;
        // Entries of a table that was not loaded yet must not seem to lead to a cluster that is handed out here.
        if let Some(exposed) = self.switch.next.inspect_table(index, &old) {
            let at = table.host + L2Table::offset_of(&geometry, exposed.index);
            let reason = format!("its entry leads to {}, which is {}", exposed.host, exposed.reason);
            return Err(self.damaged(ClusterUse::L2Table, at, &reason));
        }
        let clusters = (size_bytes % geometry.l2_table_span()).div_ceil(geometry.cluster_size()) as usize;
        let (mut kept, mut gone) = (old.to_vec(), old.to_vec());
        for at in 0..L2Table::new(&old, &geometry).len() {
            let other = if at < clusters { &mut gone } else { &mut kept };
            L2TableMut::new(other, &geometry).set(at, L2Entry::UNALLOCATED);
        }
        let last = clusters.saturating_sub(1);
        let entry = L2Table::new(&old, &geometry).get(last);
        let mut copied = None;
        match self.cut_cluster(entry, size_bytes) {
            LastCluster::Kept => {}
            LastCluster::Marked(new) => L2TableMut::new(&mut kept, &geometry).set(last, new),
            LastCluster::Copied(subclusters) => {
                L2TableMut::new(&mut kept, &geometry).set(last, L2Entry::UNALLOCATED);
                L2TableMut::new(&mut gone, &geometry).set(last, entry);
                copied = Some((last, subclusters));
            }
        }
        if kept[..] == old[..] {
            return Ok(None);
        }
        for range in self.data_of(table.host, &gone)? {
            self.lower(range, |_| false).await?;
        }
        self.lower_table(table).await?;
        Ok(Some(LastTable {
            index,
            bytes: kept,
            copied,
        }))
    }

    /// Returns what makes the bytes past the end of the smaller disk in its last cluster read as zeros.
    fn cut_cluster(&self, entry: L2Entry, size_bytes: u64) -> LastCluster {
        let geometry = self.geometry;
        let within = geometry.offset_in_cluster(size_bytes);
        // A damaged entry stays as it is for whoever reads it.
        let Ok(mapping) = entry.decode(&geometry) else {
            return LastCluster::Kept;
        };
        let subclusters = mapping.subclusters();
        if within == 0 || geometry.has_data_file() || subclusters.data() == 0 || broken(Rule::ShrunkKeepsTail)
        {
            return LastCluster::Kept;
        }
        if !geometry.has_subclusters() {
            return LastCluster::Copied(subclusters);
        }
        let size = geometry.subcluster_size();
        let first_gone = within.div_ceil(size) as u32;
        let cut = subclusters.with(first_gone..SUBCLUSTERS, SubclusterKind::Zero);
        let is_compressed = matches!(mapping, L2Mapping::Compressed(_));
        let ends_within = !within.is_multiple_of(size);
        let across = geometry.subcluster_index(within);
        if is_compressed || ends_within && subclusters.kind(across) == SubclusterKind::Data {
            return LastCluster::Copied(cut);
        }
        LastCluster::Marked(entry.with_bitmap(cut))
    }

    /// Writes the last L2 table of the smaller disk, and the last cluster if it is to be copied. Returns the table's place.
    async fn write_last_table(
        &mut self,
        last: LastTable,
        size_bytes: u64,
    ) -> Result<HostOffset, SnapshotError> {
        let geometry = self.geometry;
        let mut bytes = last.bytes;
        if let Some((at, subclusters)) = last.copied {
            let within = geometry.offset_in_cluster(size_bytes);
            let start = GuestOffset::new(size_bytes - within);
            let host = self.copy_start(start, within).await?;
            let entry = match geometry.has_subclusters() {
                true => L2Entry::subclusters(Some(host), true, subclusters),
                false => L2Entry::data(host, true, &geometry),
            };
            L2TableMut::new(&mut bytes, &geometry).set(at, entry);
        }
        let host = self.switch.new_l2_table().await?;
        self.switch.write(vec![(host, bytes)]).await?;
        Ok(host)
    }

    /// Copies the `len` bytes from `start` on, where a cluster begins, to a new host cluster, with zeros behind. Returns its
    /// place.
    async fn copy_start(&mut self, start: GuestOffset, len: u64) -> Result<HostOffset, SnapshotError> {
        let buffer = Rc::new(Buffer::from(AlignedBuf::zeroed(
            self.geometry.cluster_size() as usize
        )));
        // The state in use has not changed.
        read::read(self.queue, &buffer, 0, start, len).await?;
        let host = self.switch.new_data_cluster().await?;
        // Durable with the tables, before the header leads to it.
        let pieces = smallvec![Piece::whole(&buffer)];
        self.queue.data.start_write(host, pieces).await?;
        Ok(host)
    }
}
