//! Application of a snapshot: the disk becomes what it was when the snapshot was created.
//!
//! The disk gives up all references of its L1 table, and gets an L1 table with copies of the snapshot's L2 tables, in which
//! nothing is COPIED. So the snapshot keeps its tables, and all data is shared with it. An L2 table that both share already
//! stays shared. VM state, which lies past the snapshot's disk, stays the snapshot's alone.
//!
//! The disk gives up first, so that counts that are full because both use a cluster do not overflow. A cluster that lost its
//! last reference then and that the snapshot uses all the same shows when its tables are read.
//!
//! Invariant: bitmaps that record changes have all bits set as soon as the disk's contents change: the same write of the header
//! puts both in force. Where that cannot be, they are marked as in use before.

use std::rc::Rc;

use super::entry::disk_size;
use super::error::SnapshotError;
use super::{Operation, SnapshotSelector, read_entries};
use crate::engine::switch::Switch;
use crate::engine::{BitmapsError, Queue, announce, bitmaps, exclusive, flush};
use crate::format::l1::L1_ENTRY_SIZE;
use crate::format::{HostCluster, HostOffset, L1Entry, L2TableRef, SnapshotEntry, Version};
use crate::metadata::Counted;

/// The disk's size when a snapshot of another size is applied.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DiskSize {
    /// It becomes the snapshot's.
    MayChange,
    /// It is fixed, because the disk's user cannot learn of another: such a snapshot is refused.
    Fixed,
}

pub(super) async fn apply(
    queue: &Rc<Queue>,
    selector: &SnapshotSelector,
    size: DiskSize,
) -> Result<(), SnapshotError> {
    let section = exclusive::begin(queue).await?;
    let header = queue.shared.header.decode()?;
    let mut entries = read_entries(queue, &header).await?;
    let snapshot = entries.remove(selector.find(&entries)?);
    let old_bytes = queue.metadata()?.size_bytes;
    let restored = async || -> Result<(Switch<'_>, u64), SnapshotError> {
        let mut operation = Operation::new(queue, &section)?;
        let new_bytes = operation.size_of(&snapshot, size)?;
        operation.restore(&snapshot, &entries, new_bytes).await?;
        Ok((operation.switch, new_bytes))
    };
    let (switch, new_bytes) = restored().await?;
    let announcements = &queue.shared.announcements;
    let is_resized = new_bytes != old_bytes;
    let next = if announcements.have_recording() || is_resized && announcements.have_disabled() {
        match bitmaps::mark_all(queue, switch).await {
            Ok(with_bitmaps) => Ok(with_bitmaps),
            Err(BitmapsError::Io(error)) => return Err(error.into()),
            Err(error) => {
                let image = queue.shared.file.path().display();
                tracing::warn!(%image, %error, "bitmaps cannot have all their bits set; they are marked as in use");
                Err(restored().await?.0)
            }
        }
    } else {
        Err(switch)
    };
    match next {
        Ok(with_bitmaps) => with_bitmaps.commit(None).await?,
        Err(mut switch) => {
            if is_resized {
                announce::resize(queue, new_bytes).await?;
            } else {
                announce::give_up(queue).await?;
            }
            switch.next.bitmaps = None;
            switch.commit(|_| ()).await?;
            announcements.forget_recording();
        }
    }
    // Still alone, so that the next operation waits for it.
    flush::in_background(queue);
    if is_resized {
        // Requests that have seen the old size. They are held off, or have yet to be: none goes on with it.
        let _unended = exclusive::drain(queue).await;
    }
    Ok(())
}

impl Operation<'_> {
    /// Returns the size that the disk gets with a snapshot, in bytes.
    fn size_of(&self, snapshot: &SnapshotEntry, size: DiskSize) -> Result<u64, SnapshotError> {
        let now = self.switch.next.size_bytes;
        let Some(then) = snapshot.disk_size().filter(|&then| then != now) else {
            return Ok(now);
        };
        let refused = match (size, self.geometry.version()) {
            (DiskSize::Fixed, _) => {
                Some("a disk that is served keeps its size; apply the snapshot to the closed image")
            }
            // Others may not record their size: they have the disk's.
            (_, Version::V2) => Some(
                "an image of version 2 keeps its size while it has snapshots; use `qemu-img amend -o compat=1.1`",
            ),
            (DiskSize::MayChange, Version::V3) => None,
        };
        if let Some(reason) = refused {
            return Err(SnapshotError::OtherSize { then, now, reason });
        }
        disk_size(snapshot, now, &self.geometry)
    }

    /// Gives the disk the mapping of a snapshot, of `size_bytes` bytes. `others` stay as well.
    async fn restore(
        &mut self,
        snapshot: &SnapshotEntry,
        others: &[SnapshotEntry],
        size_bytes: u64,
    ) -> Result<(), SnapshotError> {
        // A table of no entries would have no place.
        let entries = self.geometry.l1_entries_needed(size_bytes).max(1) as usize;
        let mut left = self.tables()?;
        let tables = self.tables_of(snapshot).await?;
        let followed = left.len() + tables.len();
        self.bound(followed)?;
        let index_in_snapshot = |host| {
            let found = tables.binary_search_by_key(&host, |(_, table)| table.host);
            found.ok().and_then(|at| tables.get(at)).map(|&(index, _)| index)
        };
        let mut l1 = vec![L1Entry::UNALLOCATED; entries];
        left.retain(|&(index, table)| {
            let is_kept = !table.copied && index < entries && index_in_snapshot(table.host) == Some(index);
            if is_kept && let Some(place) = l1.get_mut(index) {
                *place = L1Entry::encode(table);
            }
            !is_kept
        });
        self.lower_tables(&left).await?;
        let is_copied = |index| l1.get(index) == Some(&L1Entry::UNALLOCATED);
        self.raise_tables(snapshot, &tables, is_copied).await?;
        // The newest is the likeliest to share what the disk gives up.
        let newest = others.len().checked_sub(1).into_iter();
        self.kept().check_others(others, newest, followed).await?;
        let copied: Vec<_> = tables
            .iter()
            .copied()
            .filter(|&(index, _)| is_copied(index))
            .collect();
        self.copy_shared(&copied, &mut l1).await?;
        let old = self.switch.replace_l1(&l1).await?;
        self.switch
            .leave(self.geometry.host_cluster(old.offset), old.clusters);
        self.switch.next.size_bytes = size_bytes;
        Ok(())
    }

    /// Checks all that a snapshot's tables lead to, and counts another reference to the data of those that `is_shared`
    /// selects by their index.
    async fn raise_tables(
        &mut self,
        snapshot: &SnapshotEntry,
        tables: &[(usize, L2TableRef)],
        is_shared: impl Fn(usize) -> bool,
    ) -> Result<(), SnapshotError> {
        let l1 = self.geometry.host_cluster(snapshot.l1_offset);
        let l1_bytes = u64::from(snapshot.l1_entries) * L1_ENTRY_SIZE;
        self.kept()
            .check(l1.until(l1 + self.geometry.clusters_for(l1_bytes)))?;
        for some in tables.chunks(self.switch.tables_at_once()) {
            for &(_, table) in some {
                self.check_table(table.host).await?;
            }
            for (&(index, table), bytes) in some.iter().zip(self.read(some).await?) {
                for (first, end) in self.data_of(table.host, &bytes)? {
                    self.kept().check(first.until(end))?;
                    self.check_data(first.until(end))?;
                    if is_shared(index) {
                        self.raise((first, end)).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Fails if an L2 table of a snapshot is not counted or was given up.
    async fn check_table(&mut self, host: HostOffset) -> Result<(), SnapshotError> {
        let (first, end) = self.cluster_at(host);
        self.kept().check(first.until(end))?;
        if self.count(first).await? == 0 {
            self.went(Counted::Uncounted(first))?;
        }
        Ok(())
    }

    /// Fails if an entry leads to a structure of the image, as if that were data.
    fn check_data(&self, mut clusters: impl Iterator<Item = HostCluster>) -> Result<(), SnapshotError> {
        let uses = &self.switch.next.refcounts.uses;
        let found = clusters.find_map(|cluster| Some((cluster, uses.find(cluster)?)));
        if let Some((cluster, structure)) = found {
            self.went(Counted::Structure(cluster, structure))?;
        }
        Ok(())
    }
}
