//! Deletion of a snapshot: its references are given up, and what becomes the disk's alone is the disk's own again.
//!
//! Both are [prepared](super::prepare) while requests go on. The snapshot's tables do not change, so that its references are given up
//! once; what requests have added to the counts and taken away meanwhile follows, and slices of the disk's tables that they have
//! changed are looked at again.

use std::rc::Rc;

use block::canary::{Rule, broken};

use super::error::SnapshotError;
use super::kept::Kept;
use super::prepare::{Changes, Prepared, SLICES_AT_ONCE, prepare};
use super::{Operation, SnapshotSelector, encode, read_entries};
use crate::engine::{Queue, exclusive};
use crate::format::l1::L1_ENTRY_SIZE;
use crate::format::{ClusterUse, L1Entry, L2Entry, L2Table, L2TableMut, L2TableRef, SnapshotEntry};
use crate::metadata::Released;

pub(super) async fn delete(queue: &Rc<Queue>, selector: &SnapshotSelector) -> Result<(), SnapshotError> {
    let turn = exclusive::turn(queue).await?;
    let header = queue.shared.header.decode()?;
    let mut entries = read_entries(queue, &header).await?;
    let old_table_bytes = encode(&entries)?.len() as u64;
    let index = selector.find(&entries)?;
    let snapshot = entries.remove(index);
    // What a snapshot shares with another it shares with one that was created just before it or after it.
    let nearest = [index.checked_sub(1), Some(index)].into_iter().flatten();
    let mut prepared = prepare(queue, async |operation, l1| {
        let tables = operation.tables()?;
        let own = tables.len();
        let followed = own + operation.release(&snapshot, &entries, own).await?;
        let sole = match entries.is_empty() {
            true => Released::default(),
            false => operation.sole(&tables).await?,
        };
        let kept = Kept {
            sole: Some(&sole),
            ..operation.kept()
        };
        kept.check_others(&entries, nearest, followed).await?;
        operation.take_back(&tables, l1).await
    })
    .await?;
    let section = exclusive::alone(queue, turn).await?;
    let mut operation = Operation::new(queue, &section)?;
    operation.give_back(&mut prepared).await?;
    operation.commit(&header, &entries, old_table_bytes).await?;
    prepared.keep();
    Ok(())
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
            self.kept().check(from.max(here).until(end))?;
            here = here.max(end);
        }
        Ok(tables.len())
    }

    /// Sets COPIED wherever the disk has become the only user, in copies of its tables, which its L1 table gets.
    async fn take_back(
        &mut self,
        tables: &[(usize, L2TableRef)],
        l1: &mut [L1Entry],
    ) -> Result<(), SnapshotError> {
        let mut changed = Vec::new();
        for some in tables.chunks(self.switch.tables_at_once()) {
            for (&(index, table), bytes) in some.iter().zip(self.read(some).await?) {
                self.kept().check_table(table.host, &bytes)?;
                let old = self.geometry.host_cluster(table.host);
                if self.count(old).await? == 1
                    && (!table.copied || self.claim_data(&mut bytes.to_vec()).await?)
                {
                    changed.push((index, table));
                }
            }
        }
        for some in changed.chunks(self.switch.tables_at_once()) {
            let mut copies = Vec::new();
            for (&(index, _), bytes) in some.iter().zip(self.read(some).await?) {
                let mut bytes = bytes.to_vec();
                self.claim_data(&mut bytes).await?;
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

    /// Returns the clusters of which the disk has become the only user, if all counts are right; of too many runs, the first.
    async fn sole(&mut self, tables: &[(usize, L2TableRef)]) -> Result<Released, SnapshotError> {
        let mut sole = Released::default();
        for some in tables.chunks(self.switch.tables_at_once()) {
            for (&(_, table), bytes) in some.iter().zip(self.read(some).await?) {
                let mut ranges = self.data_of(table.host, &bytes)?;
                if !table.copied {
                    ranges.push(self.cluster_at(table.host));
                }
                for cluster in ranges.into_iter().flat_map(|(first, end)| first.until(end)) {
                    if sole.is_full() {
                        return Ok(sole);
                    }
                    if self.count(cluster).await? == 1 {
                        sole.insert(cluster);
                    }
                }
            }
        }
        Ok(sole)
    }

    /// Gives up the references of a snapshot as was prepared, and takes back what has become the disk's alone, also where requests have
    /// changed its mapping since.
    async fn give_back(&mut self, prepared: &mut Prepared) -> Result<(), SnapshotError> {
        let Changes {
            mut l1,
            tables,
            slices,
            counts,
        } = self.catch_up(prepared)?;
        if !broken(Rule::CountsNotRedone) {
            self.switch.add_changes(&counts).await?;
        }
        for some in slices.chunks(SLICES_AT_ONCE) {
            let mut writes = Vec::new();
            for slice in some {
                let mut bytes = self.switch.l2_slice(slice.number).await?;
                self.kept().check_data(&bytes)?;
                if let Some(to) = slice.to {
                    self.claim_data(&mut bytes).await?;
                    writes.push((to, bytes));
                }
            }
            if !broken(Rule::CopiedSliceNotRedone) {
                self.switch.write(writes).await?;
            }
        }
        let new: Vec<_> = tables.iter().map(|new| (new.index, new.table)).collect();
        self.take_back(&new, &mut l1).await?;
        for (index, table, copy) in prepared.tables(self.geometry) {
            let Some(copy) = copy else { continue };
            // A copy whose original has been replaced is of no use.
            let is_in_use = l1.get(index) == Some(&L1Entry::encode(copy));
            let needless = if is_in_use { table } else { copy };
            self.switch.leave(self.geometry.host_cluster(needless.host), 1);
        }
        for (index, table) in new {
            let is_copied = l1.get(index) != Some(&L1Entry::encode(table));
            if is_copied {
                self.switch.leave(self.geometry.host_cluster(table.host), 1);
            }
        }
        if l1 != self.switch.next.l1() {
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
