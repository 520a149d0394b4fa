//! The part of an operation on snapshots that is done while requests go on.
//!
//! To create a snapshot copies all L2 tables of the disk, and counts another reference to everything that they lead to; to delete one
//! reads its tables and the disk's, and takes as many references back. With 64 KiB clusters these are 128 MiB of tables and 32 MiB of
//! counts for each TiB that is mapped. Requests would wait for longer than a guest bears. So they are held off twice, for a moment
//! each: first to begin, with everything durable, and then to switch. In between, the disk's tables and counts are followed as they
//! were at the beginning: a slice of them that requests change is kept as it was
//! ([`SliceCache::watch`](crate::metadata::slices::SliceCache::watch)). When requests are held off for the second time, only what has
//! changed is done again ([`Operation::catch_up`]).
//!
//! The copies, and the new places of refcount blocks, are clusters that the state in use counts, so that no request gets them. If the
//! operation fails they are given back; a cut leaves them as leaks.
//!
//! Invariant: the state in use is changed by requests alone meanwhile, as the operation has the turn. So its L2 tables stay where they are,
//! but for those that were shared with a snapshot and are copied for a write; and the tables of snapshots do not change.

use std::rc::Rc;
use std::sync::Arc;

use block::IoError;

use super::Operation;
use super::error::SnapshotError;
use crate::engine::switch::{Switch, Taken};
use crate::engine::{Queue, exclusive, flush};
use crate::format::{Geometry, HostOffset, L1Entry, L2TableRef};
use crate::metadata::Released;
use crate::metadata::slices::Before;

/// The most slices that are written at once.
pub(super) const SLICES_AT_ONCE: usize = 128;

/// The part of the next state that is made before requests are held off for the second time.
pub(super) struct Prepared {
    /// The disk's L1 table as it was.
    old: Vec<L1Entry>,
    /// The same, with copies of tables.
    new: Vec<L1Entry>,
    /// Refcount blocks, by index, whose counts are those of the next state, and their new places.
    blocks: Vec<(usize, HostOffset)>,
    /// Clusters that lose their last reference.
    released: Released,
    /// All clusters that were taken.
    taken: Option<Taken>,
}

impl Prepared {
    /// Keeps all clusters that were taken: the next state is in force.
    pub(super) fn keep(self) {
        if let Some(taken) = self.taken {
            taken.keep();
        }
    }

    /// Returns the L2 tables of the disk as it was, with their indices, and the copies that are in their places, if any.
    pub(super) fn tables(
        &self,
        geometry: Geometry,
    ) -> impl Iterator<Item = (usize, L2TableRef, Option<L2TableRef>)> {
        let decoded = move |entry: &L1Entry| entry.decode(&geometry).ok().flatten();
        let both = self.old.iter().zip(&self.new).enumerate();
        both.filter_map(move |(index, (old, new))| {
            let copy = decoded(new).filter(|_| old != new);
            Some((index, decoded(old)?, copy))
        })
    }
}

/// Changes that requests have made since a part of the next state was prepared.
pub(super) struct Changes {
    /// The disk's L1 table, with the copies that were prepared of the tables that it still has.
    pub(super) l1: Vec<L1Entry>,
    /// The tables that it has got since.
    pub(super) tables: Vec<NewTable>,
    /// The slices that have changed of tables that it still has, in their order.
    pub(super) slices: Vec<ChangedSlice>,
    /// Slices of counts that have changed, as they were.
    pub(super) counts: Before,
}

/// An L2 table that the disk has got.
pub(super) struct NewTable {
    pub(super) index: usize,
    pub(super) table: L2TableRef,
    /// The table in whose place it is, which was shared with a snapshot.
    pub(super) replaced: Option<L2TableRef>,
}

/// A slice of an L2 table that has changed.
pub(super) struct ChangedSlice {
    pub(super) number: u64,
    /// Its place in the table.
    pub(super) from: HostOffset,
    /// Its place in the table's copy, if there is one.
    pub(super) to: Option<HostOffset>,
    /// Its bytes when the part was prepared.
    pub(super) before: Arc<[u8]>,
}

/// Prepares a part of the next state, for a caller that has the turn. `part` gets the state in use as the next one, and the disk's L1
/// table to put copies into.
pub(super) async fn prepare(
    queue: &Rc<Queue>,
    part: impl AsyncFnOnce(&mut Operation<'_>, &mut [L1Entry]) -> Result<(), SnapshotError>,
) -> Result<Prepared, SnapshotError> {
    // Requests wait for less.
    flush::flush(queue).await?;
    let section = exclusive::alone(queue, ()).await?;
    let mut operation = Operation {
        queue,
        switch: Switch::beside(queue, &section)?,
        geometry: queue.shared.geometry,
    };
    drop(section);
    let old = operation.switch.next.l1().to_vec();
    let mut new = old.clone();
    part(&mut operation, &mut new).await?;
    let released = std::mem::take(&mut operation.switch.released);
    let (blocks, taken) = operation.switch.into_taken().await?;
    // Requests wait for less, and for no space that only this waits for.
    queue.file.sync().await?;
    Ok(Prepared {
        old,
        new,
        blocks,
        released,
        taken,
    })
}

impl Operation<'_> {
    /// Takes over what was prepared. Returns what has changed since.
    pub(super) fn catch_up(&mut self, prepared: &mut Prepared) -> Result<Changes, SnapshotError> {
        let (before, counts) = self.queue.shared.write()?.end_watch();
        self.switch.place_blocks(&prepared.blocks)?;
        self.switch.released = std::mem::take(&mut prepared.released);
        let mut l1 = self.switch.next.l1().to_vec();
        let mut tables = Vec::new();
        for (index, entry) in l1.iter_mut().enumerate() {
            let old = prepared.old.get(index).copied().unwrap_or_default();
            let (Ok(then), Ok(now)) = (old.decode(&self.geometry), entry.decode(&self.geometry)) else {
                return Err(IoError::Corrupt.into());
            };
            match (then, now) {
                (then, now) if then == now => *entry = prepared.new.get(index).copied().unwrap_or_default(),
                (replaced, Some(table)) if replaced.is_none_or(|then| !then.copied) => {
                    tables.push(NewTable {
                        index,
                        table,
                        replaced,
                    })
                }
                _ => return Err(IoError::Corrupt.into()),
            }
        }
        let mut slices = self.changed_slices(prepared, before);
        slices.sort_unstable_by_key(|slice| slice.number);
        Ok(Changes {
            l1,
            tables,
            slices,
            counts,
        })
    }

    /// Returns the slices that have changed of tables that the disk still has. `before` is what they were.
    fn changed_slices(&self, prepared: &Prepared, before: Before) -> Vec<ChangedSlice> {
        let next = &self.switch.next;
        let changed = before.into_iter().filter_map(|(number, before)| {
            let index = next.table_of(number);
            let table = |l1: &[L1Entry]| l1.get(index)?.decode(&self.geometry).ok().flatten();
            let (then, now, copy) = (table(&prepared.old)?, table(next.l1())?, table(&prepared.new)?);
            let within = (number - next.table_slices(index).start) * next.l2.slice_bytes() as u64;
            (then == now).then_some(ChangedSlice {
                number,
                from: now.host + within,
                to: (copy.host != then.host).then_some(copy.host + within),
                before: before?,
            })
        });
        changed.collect()
    }
}
