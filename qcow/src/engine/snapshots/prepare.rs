//! The part of a new snapshot that is made while requests go on.
//!
//! A snapshot copies all L2 tables of the disk, and counts another reference to everything that they lead to: with 64 KiB clusters,
//! 128 MiB of tables and 32 MiB of counts for each TiB that is mapped. Requests would wait for longer than a guest bears. So
//! they are held off twice, for a moment each: first to begin, with everything durable, and then to switch. In between, the
//! disk's tables and counts are followed as they were at the beginning: a slice of them that requests change is kept as it was
//! ([`SliceCache::watch`](crate::metadata::slices::SliceCache::watch)). When requests are held off for the second time, only what has
//! changed is done again ([`Operation::catch_up`]).
//!
//! The copies, and the new places of refcount blocks, are clusters that the state in use counts, so that no request gets them. If the
//! operation fails they are given back; a cut leaves them as leaks.
//!
//! Invariant: the state in use is changed by requests alone meanwhile, as the operation has the turn. So its L2 tables stay where they are,
//! but for those that were shared with a snapshot and are copied for a write.

use std::rc::Rc;

use block::IoError;
use block::canary::{Rule, broken};

use super::error::SnapshotError;
use super::{Operation, without_copied};
use crate::engine::switch::{Switch, Taken};
use crate::engine::{Queue, exclusive};
use crate::format::{HostCluster, HostOffset, L1Entry, L2TableRef};
use crate::metadata::slices::Before;

/// The most slices that are written at once.
const SLICES_AT_ONCE: usize = 128;

/// A slice of an L2 table that was copied, and that has changed since.
struct Changed<'a> {
    number: u64,
    /// Its place in the table.
    from: HostOffset,
    /// Its place in the copy.
    to: HostOffset,
    /// Its bytes when they were copied.
    before: &'a [u8],
}

/// The part of a snapshot that is made before requests are held off for the second time.
pub(super) struct Prepared {
    /// The disk's L1 table as it was.
    old: Vec<L1Entry>,
    /// The same, with the copies of its own tables.
    new: Vec<L1Entry>,
    /// Refcount blocks, by index, that count another reference to everything, and their new places.
    blocks: Vec<(usize, HostOffset)>,
    /// All of these clusters.
    taken: Option<Taken>,
}

impl Prepared {
    /// Keeps all clusters that were taken: the snapshot is in force.
    pub(super) fn keep(self) {
        if let Some(taken) = self.taken {
            taken.keep();
        }
    }
}

/// Prepares a snapshot, for a caller that has the turn.
pub(super) async fn prepare(queue: &Rc<Queue>) -> Result<Prepared, SnapshotError> {
    let section = exclusive::alone(queue, ()).await?;
    let mut operation = Operation {
        queue,
        switch: Switch::beside(queue, &section)?,
        geometry: queue.shared.geometry,
    };
    drop(section);
    let old = operation.switch.next.l1().to_vec();
    let mut new = old.clone();
    let mut tables = operation.tables()?;
    operation.bound(tables.len())?;
    operation.raise_own(&tables).await?;
    tables.retain(|(_, table)| table.copied);
    operation.copy_shared(&tables, &mut new).await?;
    let (blocks, taken) = operation.switch.into_taken().await?;
    // Requests wait for less, and for no space that only this waits for.
    queue.file.sync().await?;
    Ok(Prepared {
        old,
        new,
        blocks,
        taken,
    })
}

impl Operation<'_> {
    /// Takes over what was prepared, and does again what has changed since. Returns the disk's L1 table with the copies, and the L2 tables
    /// that are yet to be counted and copied.
    pub(super) async fn catch_up(
        &mut self,
        prepared: &Prepared,
    ) -> Result<(Vec<L1Entry>, Vec<(usize, L2TableRef)>), SnapshotError> {
        let (tables, counts) = self.queue.shared.write()?.end_watch();
        self.switch.place_blocks(&prepared.blocks)?;
        let mut l1 = self.switch.next.l1().to_vec();
        let (mut left, mut copied) = (Vec::new(), Vec::new());
        for (index, entry) in l1.iter_mut().enumerate() {
            let old = prepared.old.get(index).copied().unwrap_or_default();
            let tables = (old.decode(&self.geometry), entry.decode(&self.geometry));
            let (Ok(then), Ok(now)) = tables else {
                return Err(IoError::Corrupt.into());
            };
            match (then, now) {
                (then, now) if then == now => *entry = prepared.new.get(index).copied().unwrap_or_default(),
                (None, Some(now)) => left.push((index, now)),
                (Some(then), Some(now)) if !then.copied => {
                    copied.push((index, then));
                    left.push((index, now));
                }
                _ => return Err(IoError::Corrupt.into()),
            }
        }
        let mut changed = self.changed_slices(prepared, &tables);
        changed.sort_unstable_by_key(|slice| slice.number);
        // First what was counted, in counts that are higher by that than those in use; then what requests have added to these and
        // taken away; and last what is in use now.
        for slice in &changed {
            self.undo(slice.from, slice.before).await?;
        }
        for some in copied.chunks(self.switch.tables_at_once()) {
            for (&(_, table), bytes) in some.iter().zip(self.read(some).await?) {
                self.undo(table.host, &bytes).await?;
                self.undo_range(self.cluster_at(table.host)).await?;
            }
        }
        if !broken(Rule::CountsNotRedone) {
            self.switch.add_changes(&counts).await?;
        }
        for some in changed.chunks(SLICES_AT_ONCE) {
            let mut writes = Vec::new();
            for slice in some {
                let mut bytes = self.switch.l2_slice(slice.number).await?;
                for range in self.data_of(slice.from, &bytes)? {
                    self.raise(range).await?;
                }
                without_copied(&mut bytes, &self.geometry);
                writes.push((slice.to, bytes));
            }
            if !broken(Rule::CopiedSliceNotRedone) {
                self.switch.write(writes).await?;
            }
        }
        Ok((l1, left))
    }

    /// Returns the slices of tables that were copied and have changed since.
    fn changed_slices<'b>(&self, prepared: &Prepared, before: &'b Before) -> Vec<Changed<'b>> {
        let next = &self.switch.next;
        let changed = before.iter().filter_map(|(&number, before)| {
            let index = next.table_of(number);
            let table = |l1: &[L1Entry]| l1.get(index)?.decode(&self.geometry).ok().flatten();
            let (then, now, copy) = (table(&prepared.old)?, table(next.l1())?, table(&prepared.new)?);
            let within = (number - next.table_slices(index).start) * next.l2.slice_bytes() as u64;
            (then == now && then.copied).then_some(Changed {
                number,
                from: now.host + within,
                to: copy.host + within,
                before: before.as_deref()?,
            })
        });
        changed.collect()
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
