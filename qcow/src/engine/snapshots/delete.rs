//! Deletion of a snapshot: its references are given up, and what becomes the disk's alone is the disk's own again.

use std::rc::Rc;

use super::error::SnapshotError;
use super::{Operation, SnapshotSelector, encode, read_entries};
use crate::engine::switch::Switch;
use crate::engine::{Queue, exclusive};
use crate::format::l1::L1_ENTRY_SIZE;
use crate::format::{ClusterUse, L1Entry, L2Entry, L2Table, L2TableMut, L2TableRef, SnapshotEntry};

pub(super) async fn delete(queue: &Rc<Queue>, selector: &SnapshotSelector) -> Result<(), SnapshotError> {
    let section = exclusive::begin(queue).await?;
    let header = queue.shared.header.decode()?;
    let mut entries = read_entries(queue, &header).await?;
    let old_table_bytes = encode(&entries)?.len() as u64;
    let index = selector.find(&entries)?;
    let snapshot = entries.remove(index);
    let mut operation = Operation {
        queue,
        switch: Switch::new(queue, &section)?,
        geometry: queue.shared.geometry,
    };
    let tables = operation.tables()?;
    let own = tables.len();
    let followed = own + operation.release(&snapshot, &entries, own).await?;
    // What a snapshot shares with another it shares with one that was created just before it or after it.
    let nearest = [index.checked_sub(1), Some(index)].into_iter().flatten();
    operation.check_others(&entries, nearest, followed).await?;
    operation.take_back(tables).await?;
    operation.commit(&header, &entries, old_table_bytes).await
}

impl Operation<'_> {
    /// Gives up all references of a snapshot. `others` stay, and so do the disk's `own` L2 tables, which are read later.
    /// Returns the number of the snapshot's L2 tables.
    async fn release(
        &mut self,
        snapshot: &SnapshotEntry,
        others: &[SnapshotEntry],
        own: usize,
    ) -> Result<usize, SnapshotError> {
        let tables = self.tables_of(snapshot).await?;
        self.bound(tables.len() + own)?;
        self.lower_tables(&tables).await?;
        let geometry = self.geometry;
        let first = geometry.host_cluster(snapshot.l1_offset);
        let end = first + geometry.clusters_for(u64::from(snapshot.l1_entries) * L1_ENTRY_SIZE);
        self.lower((first, end), |found| found == ClusterUse::SnapshotL1Table)
            .await?;
        let ranges = others.iter().map(|other| {
            let from = geometry.host_cluster(other.l1_offset);
            let clusters = geometry.clusters_for(u64::from(other.l1_entries) * L1_ENTRY_SIZE);
            (from, (from + clusters).min(end))
        });
        let mut ranges: Vec<_> = ranges.filter(|&(_, end)| end > first).collect();
        ranges.sort_unstable();
        let mut here = first;
        for (from, end) in ranges {
            self.check_kept(from.max(here).until(end))?;
            here = here.max(end);
        }
        Ok(tables.len())
    }

    /// Sets COPIED wherever the disk has become the only user, in copies of its tables.
    async fn take_back(&mut self, tables: Vec<(usize, L2TableRef)>) -> Result<(), SnapshotError> {
        let mut changed = Vec::new();
        for some in tables.chunks(self.switch.tables_at_once()) {
            for (&(index, table), bytes) in some.iter().zip(self.read(some).await?) {
                self.check_kept_table(table.host, &bytes)?;
                let old = self.geometry.host_cluster(table.host);
                if self.count(old).await? == 1
                    && (!table.copied || self.claim_data(&mut bytes.to_vec()).await?)
                {
                    changed.push((index, table));
                }
            }
        }
        let mut l1 = self.switch.next.l1().to_vec();
        for some in changed.chunks(self.switch.tables_at_once()) {
            let mut copies = Vec::new();
            for (&(index, table), bytes) in some.iter().zip(self.read(some).await?) {
                let mut bytes = bytes.to_vec();
                self.claim_data(&mut bytes).await?;
                let host = self.switch.new_l2_table().await?;
                copies.push((host, bytes));
                self.switch.leave(self.geometry.host_cluster(table.host), 1);
                if let Some(place) = l1.get_mut(index) {
                    *place = L1Entry::encode(L2TableRef { host, copied: true });
                }
            }
            self.switch.write(copies).await?;
        }
        if !changed.is_empty() {
            let old = self.switch.replace_l1(&l1).await?;
            self.switch
                .leave(self.geometry.host_cluster(old.offset), old.clusters);
        }
        Ok(())
    }

    /// Sets COPIED in the entries of an L2 table whose cluster counts one. Returns true if any entry has changed.
    async fn claim_data(&mut self, table: &mut [u8]) -> Result<bool, SnapshotError> {
        let mut is_changed = false;
        for index in 0..L2Table::new(table, &self.geometry).len() {
            let entry: L2Entry = L2Table::new(table, &self.geometry).get(index);
            let mapping = entry.decode(&self.geometry).ok();
            let Some((host, false)) = mapping.and_then(|mapping| mapping.cluster()) else {
                continue;
            };
            if self.count(self.geometry.host_cluster(host)).await? == 1 {
                L2TableMut::new(table, &self.geometry).set(index, entry.with_copied(true));
                is_changed = true;
            }
        }
        Ok(is_changed)
    }
}
