//! Creation of a snapshot: it takes over the disk's L1 and L2 tables, and the disk gets copies.
//!
//! The copies, and another reference to everything that they lead to, are [prepared](super::prepare) while requests go on. When these
//! are held off, what they have changed is counted and copied again.

use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use block::IoError;
use block::canary::{Rule, broken};

use super::error::{SNAPSHOT_NAME_MAX, SnapshotError, text};
use super::prepare::{Changes, Prepared, SLICES_AT_ONCE, prepare};
use super::{Operation, encode, read_entries, without_copied};
use crate::engine::{Queue, exclusive};
use crate::format::validate::SNAPSHOTS_MAX;
use crate::format::{ClusterUse, HostCluster, HostOffset, L2TableRef, SnapshotEntry};

/// Returns the ID of the next snapshot, as QEMU chooses it: one more than the largest number that an ID begins with.
fn next_id(entries: &[SnapshotEntry]) -> String {
    let number = |entry: &SnapshotEntry| {
        let digits = entry.id.iter().take_while(|byte| byte.is_ascii_digit());
        digits.fold(0_u64, |number, digit| {
            number.saturating_mul(10).saturating_add(u64::from(digit - b'0'))
        })
    };
    let largest = entries.iter().map(number).max().unwrap_or(0);
    largest.saturating_add(1).to_string()
}

pub(super) async fn create(queue: &Rc<Queue>, name: &str, date: SystemTime) -> Result<String, SnapshotError> {
    if name.is_empty() || name.len() > SNAPSHOT_NAME_MAX {
        return Err(SnapshotError::Name { len: name.len() });
    }
    if name.contains('\0') {
        return Err(SnapshotError::NulInName);
    }
    if queue.shared.data_file.is_some() {
        return Err(SnapshotError::DataFile);
    }
    let turn = exclusive::turn(queue).await?;
    let header = queue.shared.header.decode()?;
    let mut entries = read_entries(queue, &header).await?;
    let old_table_bytes = encode(&entries)?.len() as u64;
    if entries.len() as u32 >= SNAPSHOTS_MAX {
        return Err(SnapshotError::TooMany);
    }
    if let Some(other) = entries.iter().find(|entry| entry.name == name.as_bytes()) {
        return Err(SnapshotError::Exists {
            name: name.to_owned(),
            id: text(&other.id),
        });
    }
    let id = next_id(&entries);
    let since = date.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut prepared = prepare(queue, async |operation, l1| {
        let mut tables = operation.tables()?;
        operation.bound(tables.len())?;
        operation.raise_own(&tables).await?;
        tables.retain(|(_, table)| table.copied);
        operation.copy_shared(&tables, l1).await
    })
    .await?;
    let section = exclusive::alone(queue, turn).await?;
    let mut operation = Operation::new(queue, &section)?;
    let old_l1 = operation.share_all(&mut prepared).await?;
    let extra = [0, operation.switch.next.size_bytes, u64::MAX];
    entries.push(SnapshotEntry {
        l1_offset: old_l1,
        l1_entries: operation.switch.next.l1_entries() as u32,
        id: id.clone().into_bytes(),
        name: name.as_bytes().to_vec(),
        date_seconds: u32::try_from(since.as_secs()).unwrap_or(u32::MAX),
        date_nanoseconds: since.subsec_nanos(),
        guest_clock_ns: 0,
        vm_state_size_32: 0,
        extra: extra.map(u64::to_be_bytes).concat(),
    });
    operation.commit(&header, &entries, old_table_bytes).await?;
    prepared.keep();
    Ok(id)
}

impl Operation<'_> {
    /// Counts another reference to what these L2 tables of the disk lead to, and to those that are shared already.
    async fn raise_own(&mut self, tables: &[(usize, L2TableRef)]) -> Result<(), SnapshotError> {
        for some in tables.chunks(self.switch.tables_at_once()) {
            for (&(_, table), bytes) in some.iter().zip(self.read(some).await?) {
                for range in self.data_of(table.host, &bytes)? {
                    self.raise(range).await?;
                }
                if !table.copied {
                    self.raise(self.cluster_at(table.host)).await?;
                }
            }
        }
        Ok(())
    }

    /// Gives the disk's tables to a snapshot, and the disk copies that share all data with them, as they were prepared. Returns the
    /// snapshot's L1 table.
    async fn share_all(&mut self, prepared: &mut Prepared) -> Result<HostOffset, SnapshotError> {
        let tables = self.tables()?;
        self.bound(tables.len())?;
        let changes = self.catch_up(prepared)?;
        self.count_again(&changes).await?;
        let mut l1 = changes.l1;
        let left: Vec<_> = changes.tables.iter().map(|new| (new.index, new.table)).collect();
        self.raise_own(&left).await?;
        self.copy_shared(&left, &mut l1).await?;
        let uses = &mut self.switch.next.refcounts.uses;
        for (_, table) in tables.iter().filter(|(_, table)| table.copied) {
            let old = self.geometry.host_cluster(table.host);
            uses.made(ClusterUse::SnapshotL2Table, old, 1);
        }
        if l1.is_empty() {
            return Ok(HostOffset::default());
        }
        let old = self.switch.replace_l1(&l1).await?;
        let first = self.geometry.host_cluster(old.offset);
        let uses = &mut self.switch.next.refcounts.uses;
        uses.made(ClusterUse::SnapshotL1Table, first, old.clusters);
        Ok(old.offset)
    }

    /// Counts and copies again what has changed in tables that were copied. First what was counted is taken back, in counts that are
    /// higher by that than those in use; then what requests have added to these and taken away follows; and last what is in use now.
    async fn count_again(&mut self, changes: &Changes) -> Result<(), SnapshotError> {
        for slice in &changes.slices {
            self.undo(slice.from, &slice.before).await?;
        }
        let replaced = changes
            .tables
            .iter()
            .filter_map(|new| Some((new.index, new.replaced?)));
        let replaced: Vec<_> = replaced.collect();
        for some in replaced.chunks(self.switch.tables_at_once()) {
            for (&(_, table), bytes) in some.iter().zip(self.read(some).await?) {
                self.undo(table.host, &bytes).await?;
                self.undo_range(self.cluster_at(table.host)).await?;
            }
        }
        if !broken(Rule::CountsNotRedone) {
            self.switch.add_changes(&changes.counts).await?;
            if !self.switch.released.is_empty() {
                // Everything that the disk has is counted once more.
                return Err(IoError::Corrupt.into());
            }
        }
        for some in changes.slices.chunks(SLICES_AT_ONCE) {
            let mut writes = Vec::new();
            for slice in some {
                let mut bytes = self.switch.l2_slice(slice.number).await?;
                for range in self.data_of(slice.from, &bytes)? {
                    self.raise(range).await?;
                }
                without_copied(&mut bytes, &self.geometry);
                writes.extend(slice.to.map(|to| (to, bytes)));
            }
            if !broken(Rule::CopiedSliceNotRedone) {
                self.switch.write(writes).await?;
            }
        }
        Ok(())
    }

    /// Takes back the references that entries of an L2 table were counted with.
    async fn undo(&mut self, at: HostOffset, entries: &[u8]) -> Result<(), SnapshotError> {
        for range in self.data_of(at, entries)? {
            self.undo_range(range).await?;
        }
        Ok(())
    }

    async fn undo_range(&mut self, (first, end): (HostCluster, HostCluster)) -> Result<(), SnapshotError> {
        let mut here = first;
        while here < end {
            let undone = self
                .switch
                .follow(|next, _| next.refcounts.undo_raise(here, end))
                .await;
            here = self.went(undone?)?;
        }
        Ok(())
    }
}
