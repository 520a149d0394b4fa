//! Moves of the image's tables.
//!
//! | | counted | written | led to |
//! |---|---|---|---|
//! | an L2 table | by the FLUSH | with it, as a new table is | by its L1 entry, after that |
//! | the L1 table, the refcount table | by the FLUSH | with it, as a table that has grown is | by the header, after that |
//! | a refcount block | by a FLUSH before | by the next one, as a new block is | by the refcount table, after that |
//! | a snapshot's L1 table, the snapshot table ([`snapshots`](super::snapshots)) | by a FLUSH | before it | by the header, after that |
//!
//! Each leaves its old clusters only when a FLUSH has made durable that nothing leads to them.

use std::ops::Range;
use std::rc::Rc;

use block::IoError;
use block::canary::{Rule, broken};

use super::snapshots::move_snapshot_tables;
use super::{CompactError, Compaction, change, settle};
use crate::engine::{Queue, Shared, exclusive, flush};
use crate::format::HostCluster;
use crate::metadata::refcounts::Stuck;
use crate::metadata::{Blocked, Dropped, Metadata};

/// The most refcount blocks, or L2 tables, that move in a step.
pub(super) const TABLES_PER_STEP: u64 = 64;

/// Slices that stay in memory until this is dropped.
pub(super) struct Pinned<'a> {
    shared: &'a Shared,
    of: fn(&mut Metadata) -> &mut crate::metadata::slices::SliceCache,
    slices: Vec<u64>,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        if let Ok(mut metadata) = self.shared.write() {
            for &slice in &self.slices {
                (self.of)(&mut metadata).unpin(slice);
            }
        }
    }
}

impl<'a> Pinned<'a> {
    pub(super) fn none(
        queue: &'a Rc<Queue>,
        of: fn(&mut Metadata) -> &mut crate::metadata::slices::SliceCache,
    ) -> Self {
        Self {
            shared: &queue.shared,
            of,
            slices: Vec::new(),
        }
    }

    /// Drops the slices from the cache: their bytes in the file have changed.
    pub(super) fn discard(mut self) -> Result<(), IoError> {
        let mut metadata = self.shared.write()?;
        for slice in std::mem::take(&mut self.slices) {
            let cache = (self.of)(&mut metadata);
            cache.unpin(slice);
            cache.discard(slice);
        }
        Ok(())
    }

    /// Pins these slices, which `load` loads.
    pub(super) async fn pin(
        &mut self,
        queue: &Rc<Queue>,
        slices: Range<u64>,
        load: impl Fn(u64) -> Blocked,
    ) -> Result<(), IoError> {
        for slice in slices {
            let of = self.of;
            change(queue, |metadata| {
                let cache = of(metadata);
                if !cache.contains(slice) {
                    return Err(load(slice));
                }
                cache.pin(slice);
                Ok(())
            })
            .await?;
            self.slices.push(slice);
        }
        Ok(())
    }
}

impl Compaction<'_> {
    /// Moves the tables that need several clusters side by side.
    pub(super) async fn move_runs(&mut self, bound: HostCluster) -> Result<(), CompactError> {
        let queue = self.queue;
        let clusters = {
            let _turn = exclusive::turn(queue).await?;
            let before = queue.metadata()?.l1_place;
            change(queue, |metadata| metadata.move_l1(bound)).await?;
            let l1 = queue.metadata()?.l1_place;
            let moved_l1 = if l1 == before { 0 } else { l1.clusters };
            let before = queue.metadata()?.refcounts.place;
            change(queue, |metadata| metadata.refcounts.move_table_below(bound)).await?;
            let table = queue.metadata()?.refcounts.place;
            let moved_table = if table == before { 0 } else { table.clusters };
            settle(queue).await?;
            moved_l1 + moved_table
        };
        if clusters > 0 {
            self.end_step(clusters).await?;
        }
        while !self.is_stopped {
            let most = self.step_clusters();
            let moved = {
                let _turn = exclusive::turn(queue).await?;
                let moved = move_snapshot_tables(queue, bound, most).await?;
                settle(queue).await?;
                moved
            };
            if moved == 0 {
                break;
            }
            self.end_step(moved).await?;
        }
        Ok(())
    }

    /// Moves L2 tables of the disk's own that lie from `bound` on.
    pub(super) async fn move_l2_tables(&mut self, bound: HostCluster) -> Result<(), CompactError> {
        let queue = self.queue;
        let most = self.step_clusters().min(TABLES_PER_STEP);
        let mut at = 0;
        while !self.is_stopped {
            let mut moved = 0;
            {
                let _turn = exclusive::turn(queue).await?;
                let l1_entries = queue.metadata()?.l1_entries();
                while at < l1_entries && moved < most {
                    if to_move(queue, at, bound)? {
                        match move_l2_table(queue, at, bound).await? {
                            true => moved += 1,
                            false => at = l1_entries,
                        }
                    }
                    at += 1;
                }
                if moved > 0 {
                    settle(queue).await?;
                }
            }
            if moved == 0 {
                break;
            }
            self.end_step(moved).await?;
        }
        Ok(())
    }

    /// Moves refcount blocks that lie from `bound` on, except for those that count nothing but themselves: the cut
    /// removes them.
    pub(super) async fn move_blocks(&mut self, bound: HostCluster) -> Result<(), CompactError> {
        let queue = self.queue;
        let most = self.step_clusters().min(TABLES_PER_STEP) as usize;
        let mut at = 0;
        while !self.is_stopped {
            let mut moved = 0;
            {
                let _turn = exclusive::turn(queue).await?;
                let mut places = Places {
                    shared: &queue.shared,
                    list: Vec::new(),
                };
                let entries = queue.metadata()?.refcounts.table_entries();
                while at < entries && places.list.len() < most {
                    if is_block_to_move(queue, at, bound).await? {
                        let allocate = |metadata: &mut Metadata| metadata.refcounts.allocate_below(1, bound);
                        match change(queue, allocate).await? {
                            Some(run) => places.list.push((at, run.first)),
                            None => at = entries,
                        }
                    }
                    at += 1;
                }
                if !places.list.is_empty() {
                    // Their counts are durable before the table leads there.
                    if !broken(Rule::BlockBeforeCount) {
                        flush::flush(queue).await?;
                    }
                    while let Some(&(index, to)) = places.list.last() {
                        if !move_block(queue, index, to).await? {
                            break;
                        }
                        places.list.pop();
                        moved += 1;
                    }
                    drop(places);
                    settle(queue).await?;
                }
            }
            if moved == 0 {
                break;
            }
            self.end_step(moved).await?;
        }
        Ok(())
    }
}

/// Clusters that nothing leads to yet, for refcount blocks.
struct Places<'a> {
    shared: &'a Shared,
    list: Vec<(usize, HostCluster)>,
}

impl Drop for Places<'_> {
    fn drop(&mut self) {
        if self.list.is_empty() {
            return;
        }
        if let Ok(mut metadata) = self.shared.write() {
            for &(_, cluster) in &self.list {
                metadata.drop_clusters(Dropped::one(cluster), true);
            }
        }
    }
}

/// Returns true if the L2 table of an L1 entry is the disk's own and lies from `bound` on.
fn to_move(queue: &Queue, l1_index: usize, bound: HostCluster) -> Result<bool, IoError> {
    let table = queue.metadata()?.own_table(l1_index);
    match table {
        Ok(table) => Ok(table.is_some_and(|table| table >= bound)),
        Err(_) => Err(IoError::Corrupt),
    }
}

/// Moves an L2 table. Returns false if there is no room.
async fn move_l2_table(queue: &Rc<Queue>, l1_index: usize, bound: HostCluster) -> Result<bool, CompactError> {
    let (is_fresh, slices) = {
        let metadata = queue.metadata()?;
        (
            metadata.fresh_tables.contains(&l1_index),
            metadata.table_slices(l1_index),
        )
    };
    if is_fresh {
        flush::flush(queue).await?;
    }
    let mut pinned = Pinned::none(queue, |metadata| &mut metadata.l2);
    pinned.pin(queue, slices, Blocked::LoadL2).await?;
    Ok(change(queue, |metadata| metadata.move_table(l1_index, bound)).await?)
}

/// Returns true if a refcount block lies from `bound` on and does not count just itself.
async fn is_block_to_move(queue: &Rc<Queue>, index: usize, bound: HostCluster) -> Result<bool, CompactError> {
    let (slices, block) = {
        let metadata = queue.metadata()?;
        let block = metadata.refcounts.block_offset(index)?;
        (metadata.refcounts.block_slices(index), block)
    };
    let block = block.map(|block| queue.shared.geometry.host_cluster(block));
    let Some(block) = block.filter(|&block| block >= bound) else {
        return Ok(false);
    };
    // One that another block counts has to be moved also if nothing else is left in its range.
    let counted_by = {
        let metadata = queue.metadata()?;
        metadata.refcounts.block_of(metadata.refcounts.slice_of(block))
    };
    if counted_by != index {
        return Ok(true);
    }
    for slice in slices {
        let mut has_others = false;
        change(queue, |metadata| {
            metadata
                .refcounts
                .for_each_used(slice, |cluster| has_others |= cluster != block)
        })
        .await?;
        if has_others {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Moves a refcount block to a cluster whose count is durable. Returns false if the block has changed too much meanwhile.
async fn move_block(queue: &Rc<Queue>, index: usize, to: HostCluster) -> Result<bool, CompactError> {
    let slices = queue.metadata()?.refcounts.block_slices(index);
    let mut pinned = Pinned::none(queue, |metadata| &mut metadata.refcounts.slices);
    pinned.pin(queue, slices, Blocked::LoadRefcounts).await?;
    let moved = change(queue, |metadata| {
        let left = metadata.refcounts.move_block(index, to)?;
        if let Some(left) = left {
            metadata.drop_clusters(Dropped::one(left), true);
        }
        Ok::<_, Stuck>(left.is_some())
    });
    Ok(moved.await?)
}
