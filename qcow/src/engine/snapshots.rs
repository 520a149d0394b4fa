//! Internal snapshots of an open image: create, list, delete, and apply.
//!
//! Each operation runs alone ([`exclusive`](super::exclusive)) and switches the metadata by one header write ([`Switch`]). What takes
//! long of a creation and of a deletion is [prepared](prepare) before, while requests go on.
//! A new snapshot takes over the L1 table and the L2 tables as they are. The disk gets copies in which nothing is COPIED,
//! as all data is shared now. An L2 table that is shared already stays shared.
//! A deletion gives up one reference for each reference of the snapshot, and copies those tables of the disk that become,
//! or whose data become, the disk's alone.
//! [`apply`](mod@apply) gives the disk the mapping of a snapshot, which stays.
//!
//! All references are followed before anything is written, in bounded memory and time; a count that is full or wrong shows
//! then. Tables are read a second time to be copied.
//!
//! To create and to delete leave persistent bitmaps as they are: the guest's data does not change.

mod apply;
mod create;
mod delete;
mod entry;
pub(super) mod error;
mod kept;
mod prepare;

use std::rc::Rc;
use std::time::SystemTime;

use block::{AlignedBuf, Context, IoError};

pub use apply::DiskSize;
use entry::l1_table;
pub(crate) use entry::{disk_size_max, header_of};
use error::L2_TABLES_BYTES_MAX;
pub use error::{SnapshotError, SnapshotSelector};

use super::exclusive::Exclusive;
use super::switch::Switch;
use super::{QcowDisk, Queue, corrupt, flush};
use crate::format::l1::L1_ENTRY_SIZE;
use crate::format::references::Entry;
use crate::format::validate::SNAPSHOT_TABLE_MAX_BYTES;
use crate::format::{
    ClusterUse, Geometry, Header, HostCluster, HostOffset, L1Entry, L2Table, L2TableMut, L2TableRef,
    SnapshotEntry,
};
use crate::image::ReadError;
use crate::image::read::{SnapshotTableError, for_each_snapshot};
use crate::image::references::for_each_reference;
use crate::metadata::Counted;

impl QcowDisk {
    /// Returns the image's internal snapshots, in the order of their table.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`].
    pub async fn snapshots(&self, cx: &Context) -> Result<Vec<SnapshotEntry>, SnapshotError> {
        let queue = self
            .queue(cx)
            .map_err(|error| SnapshotError::Queue(error.source))?;
        // An operation may be replacing the table.
        let _turn = queue.shared.changes.take().await;
        Ok(read_entries(&queue, &queue.shared.header.decode()?).await?)
    }

    /// Creates an internal snapshot of the disk as it is, with everything that was answered before. It is durable when
    /// the call returns. Requests of all queues wait for a moment when it begins, and when it ends. Returns its ID.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`]; then there is no new snapshot, unless the header's write or sync failed, after which the image
    /// is not written any more.
    pub async fn create_snapshot(
        &self,
        cx: &Context,
        name: &str,
        date: SystemTime,
    ) -> Result<String, SnapshotError> {
        let queue = self
            .queue(cx)
            .map_err(|error| SnapshotError::Queue(error.source))?;
        create::create(&queue, name, date).await
    }

    /// Deletes an internal snapshot, durably. Requests of all queues wait for a moment when it begins, and when it ends. Clusters that
    /// nothing uses any more are freed in the background.
    ///
    /// # Errors
    ///
    /// As for [`QcowDisk::create_snapshot`].
    pub async fn delete_snapshot(
        &self,
        cx: &Context,
        selector: &SnapshotSelector,
    ) -> Result<(), SnapshotError> {
        let queue = self
            .queue(cx)
            .map_err(|error| SnapshotError::Queue(error.source))?;
        delete::delete(&queue, selector).await
    }

    /// Makes the disk what it was when an internal snapshot was created, durably. The snapshot stays. What the disk has
    /// now is lost, and clusters that nothing uses any more are freed in the background. The disk gets the snapshot's size,
    /// or keeps its own if the snapshot does not record one. Requests of all queues wait meanwhile; those past the end of a
    /// disk that has become smaller fail. Bitmaps that record changes are marked as out of date.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`]; then the disk is as it was, unless the header's write or sync failed, after which the image is
    /// not written any more.
    pub async fn apply_snapshot(
        &self,
        cx: &Context,
        selector: &SnapshotSelector,
        size: DiskSize,
    ) -> Result<(), SnapshotError> {
        let queue = self
            .queue(cx)
            .map_err(|error| SnapshotError::Queue(error.source))?;
        apply::apply(&queue, selector, size).await
    }
}

pub(super) async fn read_entries(
    queue: &Queue,
    header: &Header,
) -> Result<Vec<SnapshotEntry>, SnapshotTableError> {
    let mut entries = Vec::new();
    let file_len = queue.file.len().map_err(ReadError::Length)?;
    for_each_snapshot(&queue.file, header, file_len, |_, entry| entries.push(entry)).await?;
    Ok(entries)
}

/// Encodes the table. An entry that was read fits its length fields.
pub(super) fn encode(entries: &[SnapshotEntry]) -> Result<Vec<u8>, SnapshotError> {
    let mut table = Vec::new();
    for entry in entries {
        entry.encode_into(&mut table).ok_or(IoError::OutOfRange)?;
    }
    let bytes = table.len() as u64;
    if bytes > SNAPSHOT_TABLE_MAX_BYTES {
        return Err(SnapshotError::TableTooLong { bytes });
    }
    Ok(table)
}

fn undercounted(geometry: &Geometry, cluster: HostCluster) -> SnapshotError {
    let offset = geometry.host_offset(cluster).bytes();
    SnapshotError::Undercounted { offset }
}

/// Clears COPIED in the entries of an L2 table, or of a part of one.
fn without_copied(entries: &mut [u8], geometry: &Geometry) {
    L2TableMut::new(entries, geometry).update(|entry| match entry.is_compressed() {
        true => entry,
        false => entry.with_copied(false),
    });
}

/// An operation that runs alone, and the next state of the metadata.
pub(super) struct Operation<'a> {
    pub(super) queue: &'a Rc<Queue>,
    pub(super) switch: Switch<'a>,
    pub(super) geometry: Geometry,
}

impl<'a> Operation<'a> {
    /// Begins with the state in use, which does not change in an exclusive section.
    fn new<Turn>(queue: &'a Rc<Queue>, section: &Exclusive<'_, Turn>) -> Result<Self, IoError> {
        Ok(Self {
            queue,
            switch: Switch::new(queue, section)?,
            geometry: queue.shared.geometry,
        })
    }
}

impl Operation<'_> {
    /// Returns the L2 tables of the disk, with their indices.
    pub(super) fn tables(&self) -> Result<Vec<(usize, L2TableRef)>, SnapshotError> {
        let metadata = &self.switch.next;
        let mut tables = Vec::new();
        for index in 0..metadata.l1_entries() {
            match metadata.l1_entry(index) {
                Ok(table) => tables.extend(table.map(|table| (index, table))),
                Err(error) => {
                    let at = metadata.l1_place.offset + index as u64 * L1_ENTRY_SIZE;
                    return Err(self.damaged(ClusterUse::L1Table, at, &error));
                }
            }
        }
        Ok(tables)
    }

    /// Fails if so many L2 tables are more than an operation reads.
    pub(super) fn bound(&self, tables: usize) -> Result<(), SnapshotError> {
        let bytes = tables as u64 * self.geometry.cluster_size();
        if bytes > L2_TABLES_BYTES_MAX {
            return Err(SnapshotError::TooManyTables { bytes });
        }
        Ok(())
    }

    /// Marks the image corrupt and returns the error.
    pub(super) fn damaged(
        &self,
        what: ClusterUse,
        offset: HostOffset,
        reason: &dyn ToString,
    ) -> SnapshotError {
        corrupt::mark(self.queue);
        SnapshotError::Damaged {
            what,
            offset: offset.bytes(),
            reason: reason.to_string(),
        }
    }

    /// Returns the host clusters that the entries of an L2 table refer to, once for each reference, as ranges.
    pub(super) fn data_of(
        &self,
        at: HostOffset,
        table: &[u8],
    ) -> Result<Vec<(HostCluster, HostCluster)>, SnapshotError> {
        let mut ranges: Vec<(HostCluster, HostCluster)> = Vec::new();
        for (index, entry) in L2Table::new(table, &self.geometry).iter().enumerate() {
            let referred = entry.referred(&self.geometry);
            if let Some(fault) = referred.fault {
                let at = at + L2Table::offset_of(&self.geometry, index);
                return Err(self.damaged(ClusterUse::L2Table, at, &fault));
            }
            let Some(data) = referred.reference else { continue };
            for cluster in data.clusters(&self.geometry) {
                match ranges.last_mut() {
                    Some((_, end)) if *end == cluster => *end = cluster + 1,
                    _ => ranges.push((cluster, cluster + 1)),
                }
            }
        }
        Ok(ranges)
    }

    /// Returns where a change of counts goes on, or the error that ends the operation.
    fn went(&self, counted: Counted) -> Result<HostCluster, SnapshotError> {
        let offset = |cluster| self.geometry.host_offset(cluster);
        match counted {
            Counted::Until(cluster) => Ok(cluster),
            Counted::Full(cluster) => Err(SnapshotError::RefcountFull {
                offset: offset(cluster).bytes(),
                bits: self.geometry.refcount_bits(),
            }),
            Counted::Uncounted(cluster) => {
                corrupt::mark(self.queue);
                let offset = offset(cluster).bytes();
                Err(SnapshotError::Uncounted { offset })
            }
            Counted::Undercounted(cluster) => Err(undercounted(&self.geometry, cluster)),
            Counted::Scattered(cluster) => Err(SnapshotError::TooScattered {
                offset: offset(cluster).bytes(),
            }),
            Counted::Structure(cluster, structure) => {
                let reason = "an L1 or L2 entry leads to it, as if it were something else";
                Err(self.damaged(structure, offset(cluster), &reason))
            }
        }
    }

    async fn raise(&mut self, (first, end): (HostCluster, HostCluster)) -> Result<(), SnapshotError> {
        let mut here = first;
        while here < end {
            let counted = self
                .switch
                .follow(|next, _| next.refcounts.raise(here, end))
                .await;
            here = self.went(counted?)?;
        }
        Ok(())
    }

    pub(super) async fn lower(
        &mut self,
        (first, end): (HostCluster, HostCluster),
        known: impl Fn(ClusterUse) -> bool,
    ) -> Result<(), SnapshotError> {
        let mut here = first;
        while here < end {
            let lower = self.switch.follow(|next, released| {
                let refcounts = &mut next.refcounts;
                refcounts.release_references(here, end, &known, released)
            });
            let counted = lower.await?;
            here = self.went(counted)?;
        }
        Ok(())
    }

    /// Returns the contents of L2 tables. The indices are those in the disk's L1 table, if these are tables of the disk and it is
    /// followed while requests change it.
    pub(super) async fn read(
        &self,
        tables: &[(usize, L2TableRef)],
    ) -> Result<Vec<AlignedBuf>, SnapshotError> {
        let places: Vec<HostOffset> = tables.iter().map(|(_, table)| table.host).collect();
        let mut read = self.switch.read_clusters(&places).await?;
        // One that is shared does not change; for a write it is copied, and another table has its index.
        let own = tables
            .iter()
            .zip(&mut read)
            .filter(|((_, table), _)| table.copied);
        self.switch
            .restore(own.map(|(&(index, _), bytes)| (index, bytes)))?;
        Ok(read)
    }

    pub(super) fn cluster_at(&self, offset: HostOffset) -> (HostCluster, HostCluster) {
        let cluster = self.geometry.host_cluster(offset);
        (cluster, cluster + 1)
    }

    /// Points L1 entries at copies of L2 tables whose data is all shared.
    async fn copy_shared(
        &mut self,
        tables: &[(usize, L2TableRef)],
        l1: &mut [L1Entry],
    ) -> Result<(), SnapshotError> {
        for some in tables.chunks(self.switch.tables_at_once()) {
            let mut copies = Vec::new();
            for (&(index, _), bytes) in some.iter().zip(self.read(some).await?) {
                let mut bytes = bytes.to_vec();
                without_copied(&mut bytes, &self.geometry);
                let host = self.switch.new_l2_table().await?;
                copies.push((host, bytes));
                if let Some(place) = l1.get_mut(index) {
                    *place = L1Entry::encode(L2TableRef { host, copied: true });
                }
            }
            self.switch.write(copies).await?;
        }
        Ok(())
    }

    /// Returns the L2 tables of a snapshot, with their indices, in the order of their places.
    async fn tables_of(&self, snapshot: &SnapshotEntry) -> Result<Vec<(usize, L2TableRef)>, SnapshotError> {
        if snapshot.l1_entries == 0 {
            return Ok(Vec::new());
        }
        // The guest goes on if it is nowhere: the guest does not use it.
        let table = l1_table(snapshot, &self.geometry, self.queue.file.len()?)?;
        let at = table.offset;
        let geometry = self.geometry;
        let (mut tables, mut fault) = (Vec::new(), None);
        let each = |place: u64, entry: L1Entry| match entry.decode(&geometry) {
            Ok(table) => {
                let index = ((place - at.bytes()) / L1_ENTRY_SIZE) as usize;
                tables.extend(table.map(|table| (index, table)));
            }
            Err(error) => {
                fault.get_or_insert((place, error));
            }
        };
        for_each_reference(&self.queue.file, table, each).await?;
        if let Some((at, error)) = fault {
            return Err(self.damaged(ClusterUse::SnapshotL1Table, HostOffset::new(at), &error));
        }
        tables.sort_unstable_by_key(|(_, table)| table.host);
        // Two entries that lead to one table would multiply what it leads to.
        let twice = tables.windows(2).find_map(|pair| match pair {
            [(_, one), (_, other)] if one.host == other.host => Some(one.host),
            _ => None,
        });
        if let Some(twice) = twice {
            return Err(SnapshotError::Damaged {
                what: ClusterUse::SnapshotL1Table,
                offset: at.bytes(),
                reason: format!("two of its entries lead to the L2 table at {twice}; expected one at most"),
            });
        }
        Ok(tables)
    }

    /// Gives up one reference to each of these L2 tables and to what they lead to. Nothing changes them meanwhile.
    pub(super) async fn lower_tables(&mut self, tables: &[(usize, L2TableRef)]) -> Result<(), SnapshotError> {
        for some in tables.chunks(self.switch.tables_at_once()) {
            let places: Vec<HostOffset> = some.iter().map(|(_, table)| table.host).collect();
            for (&(_, table), bytes) in some.iter().zip(self.switch.read_clusters(&places).await?) {
                for range in self.data_of(table.host, &bytes)? {
                    self.lower(range, |_| false).await?;
                }
                self.lower_table(table).await?;
            }
        }
        Ok(())
    }

    /// Gives up one reference to an L2 table.
    pub(super) async fn lower_table(&mut self, table: L2TableRef) -> Result<(), SnapshotError> {
        let is_table = |found| matches!(found, ClusterUse::L2Table | ClusterUse::SnapshotL2Table);
        self.lower(self.cluster_at(table.host), is_table).await
    }

    async fn count(&mut self, cluster: HostCluster) -> Result<u64, SnapshotError> {
        if let Some(count) = self.switch.next.refcounts.peek(cluster) {
            return Ok(count);
        }
        let count = self.switch.follow(|next, _| next.refcounts.get(cluster)).await;
        Ok(count?)
    }

    /// Puts the next state in force, with these snapshots.
    async fn commit(
        mut self,
        header: &Header,
        entries: &[SnapshotEntry],
        old_table_bytes: u64,
    ) -> Result<(), SnapshotError> {
        let table = encode(entries)?;
        let place = match table.is_empty() {
            true => HostOffset::default(),
            false => self.switch.new_table(ClusterUse::SnapshotTable, table).await?,
        };
        let old = self.geometry.host_cluster(header.snapshot_table_offset);
        self.switch
            .leave(old, self.geometry.clusters_for(old_table_bytes));
        let count = entries.len() as u32;
        self.switch
            .commit(|fields| fields.set_snapshots(count, place))
            .await?;
        // Still alone, so that the next operation waits for it.
        flush::in_background(self.queue);
        Ok(())
    }
}
