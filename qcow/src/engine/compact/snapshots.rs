//! Moves of the tables of snapshots: the snapshot table, L1 tables, and the L2 tables that they lead to.
//!
//! A snapshot's tables are written only here. So a table is copied at any time, and what leads to it changes when the copy and
//! its count are durable: the header for a new snapshot table with the L1 tables' new places, and L1 entries for an L2 table,
//! those of the disk among them.

use std::collections::BTreeMap;
use std::rc::Rc;

use block::{AlignedBuf, IoError};

use super::copy::{Copy, copy_all, make_durable};
use super::foreign::{Foreign, SnapshotL1s};
use super::tables::TABLES_PER_STEP;
use super::{CompactError, Compaction, Step, change, clusters_at, settle};
use crate::engine::{Queue, exclusive, flush, header, load, snapshots};
use crate::format::{ClusterUse, Geometry, HostCluster, HostOffset, L1Entry, L2TableRef, SnapshotEntry};
use crate::metadata::Dropped;
use crate::metadata::refcounts::{Run, Stuck};
use crate::metadata::shared_moves::{SharedMoves, StoredBytes};

/// The unit in which L1 tables are written, in bytes.
const PART_BYTES: u64 = 512;
/// L1 entries in such a part.
const PART_ENTRIES: usize = 64;

/// A table of several clusters that moves.
#[derive(Clone, Copy, Debug)]
struct TableMove {
    from: HostCluster,
    to: HostCluster,
    clusters: u64,
    /// The snapshots that use it.
    uses: u64,
}

impl TableMove {
    fn copy(&self, geometry: &Geometry) -> Copy {
        Copy::of_table(
            geometry.host_offset(self.from),
            geometry.host_offset(self.to),
            self.clusters * geometry.cluster_size(),
        )
    }
}

/// Moves L1 tables of snapshots that end after `bound`, at most `most` clusters of them and one table, and the snapshot
/// table if it has to change or ends after it. Returns the number of clusters; 0 if there are none, or no room.
pub(super) async fn move_snapshot_tables(
    queue: &Rc<Queue>,
    bound: HostCluster,
    most: u64,
) -> Result<u64, CompactError> {
    let geometry = queue.shared.geometry;
    let header = queue.shared.header.decode()?;
    if header.snapshot_count == 0 {
        return Ok(0);
    }
    let mut entries = snapshots::read_entries(queue, &header).await?;
    let table = snapshots::encode(&entries).map_err(|_| IoError::OutOfRange)?;
    let clusters = geometry.clusters_for(table.len() as u64);
    let old = geometry.host_cluster(header.snapshot_table_offset);
    let is_table_behind = old + clusters > bound;
    let l1s = plan_l1s(queue, &entries, bound, most).await?;
    if l1s.is_empty() && !is_table_behind {
        return Ok(0);
    }
    let new = allocate(queue, clusters, 1, ClusterUse::SnapshotTable, bound).await?;
    let Some(new) = new else {
        give_back(queue, &l1s, None)?;
        return Ok(0);
    };
    for entry in &mut entries {
        let first = geometry.host_cluster(entry.l1_offset);
        if let Some(l1) = l1s.iter().find(|l1| l1.from == first && entry.l1_entries > 0) {
            entry.l1_offset = geometry.host_offset(l1.to);
        }
    }
    let to = geometry.host_offset(new);
    let table = snapshots::encode(&entries).map_err(|_| IoError::OutOfRange);
    let written = match table {
        Ok(table) => write_tables(queue, &l1s, (to, clusters), table).await,
        Err(error) => Err(error),
    };
    if let Err(error) = written {
        give_back(queue, &l1s, Some((new, clusters)))?;
        return Err(error.into());
    }
    // If this fails the header in the file may lead to either: both stay counted.
    header::change(queue, |fields| fields.set_snapshots(header.snapshot_count, to)).await?;
    queue.file.sync().await?;
    let dropped = Dropped {
        first: old,
        count: clusters,
    };
    let mut metadata = queue.shared.write()?;
    metadata.drop_clusters(dropped, true);
    for l1 in &l1s {
        drop_uses(&mut metadata, l1.from, l1);
    }
    Ok(clusters + l1s.iter().map(|l1| l1.clusters).sum::<u64>())
}

/// Writes the tables to their new places, and makes them and their counts durable.
async fn write_tables(
    queue: &Rc<Queue>,
    l1s: &[TableMove],
    (to, clusters): (HostOffset, u64),
    mut table: Vec<u8>,
) -> Result<(), IoError> {
    let geometry = queue.shared.geometry;
    let copies: Vec<Copy> = l1s.iter().map(|l1| l1.copy(&geometry)).collect();
    copy_all(queue, &copies).await?;
    table.resize((clusters * geometry.cluster_size()) as usize, 0);
    let table = AlignedBuf::from_slice(&table);
    queue.file.write_at(to.bytes(), table).await?;
    flush::flush(queue).await
}

/// Drops new places, to which nothing leads and nothing is written any more.
fn give_back(queue: &Queue, l1s: &[TableMove], table: Option<(HostCluster, u64)>) -> Result<(), IoError> {
    let mut metadata = queue.shared.write()?;
    for l1 in l1s {
        drop_uses(&mut metadata, l1.to, l1);
    }
    if let Some((first, count)) = table {
        metadata.drop_clusters(Dropped { first, count }, true);
    }
    Ok(())
}

fn drop_uses(metadata: &mut crate::metadata::Metadata, first: HostCluster, l1: &TableMove) {
    for index in 0..l1.uses {
        let count = l1.clusters;
        metadata.drop_clusters(Dropped { first, count }, index == 0);
    }
}

/// Takes places for L1 tables that end after `bound`.
async fn plan_l1s(
    queue: &Rc<Queue>,
    entries: &[SnapshotEntry],
    bound: HostCluster,
    most: u64,
) -> Result<Vec<TableMove>, CompactError> {
    let geometry = queue.shared.geometry;
    // Their lengths, in entries, and the number of snapshots that use each.
    let mut tables: BTreeMap<HostOffset, (u32, u64)> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.l1_entries > 0) {
        let (len, uses) = tables.entry(entry.l1_offset).or_default();
        *len = (*len).max(entry.l1_entries);
        *uses += 1;
    }
    let (mut planned, mut left) = (Vec::new(), most);
    for (offset, (len, uses)) in tables {
        let clusters = geometry.clusters_for(u64::from(len) * 8);
        let first = geometry.host_cluster(offset);
        let is_behind = offset.is_aligned_to(geometry.cluster_size()) && first + clusters > bound;
        if !is_behind || clusters > left && !planned.is_empty() {
            continue;
        }
        let mut is_whole = true;
        for cluster in clusters_at(first, clusters) {
            let structures = [ClusterUse::SnapshotL1Table];
            is_whole &= change(queue, |metadata| metadata.is_counted(cluster, uses, &structures)).await?;
        }
        if !is_whole {
            continue;
        }
        let to = allocate(queue, clusters, uses, ClusterUse::SnapshotL1Table, bound).await?;
        let Some(to) = to else { continue };
        left = left.saturating_sub(clusters);
        planned.push(TableMove {
            from: first,
            to,
            clusters,
            uses,
        });
    }
    Ok(planned)
}

/// Takes neighbouring clusters before `bound` for a table. `None` without room.
async fn allocate(
    queue: &Rc<Queue>,
    clusters: u64,
    uses: u64,
    what: ClusterUse,
    bound: HostCluster,
) -> Result<Option<HostCluster>, IoError> {
    change(queue, |metadata| {
        let run = metadata.refcounts.allocate_run_below(clusters, bound)?;
        if let Some(first) = run {
            metadata.refcounts.uses.made(what, first, clusters);
            for cluster in clusters_at(first, clusters) {
                metadata.refcounts.set(cluster, uses)?;
            }
        }
        Ok::<_, Stuck>(run)
    })
    .await
}

/// The foreign L2 tables of a step.
#[derive(Debug, Default)]
struct Plan {
    moves: SharedMoves,
    copies: Vec<Copy>,
    indices: Vec<usize>,
    is_full: bool,
}

impl Plan {
    /// Takes a place for the copy of a table.
    async fn add(
        &mut self,
        queue: &Rc<Queue>,
        (index, table, uses): (usize, HostCluster, u64),
        bound: HostCluster,
    ) -> Result<(), IoError> {
        let geometry = queue.shared.geometry;
        let structures = [ClusterUse::L2Table, ClusterUse::SnapshotL2Table];
        if !change(queue, |metadata| metadata.is_counted(table, uses, &structures)).await? {
            return Ok(());
        }
        let run = change(queue, |metadata| {
            let run = metadata.allocate_shared(1, uses, bound)?;
            if let Some(Run { first, .. }) = run {
                let uses = &mut metadata.refcounts.uses;
                uses.made(ClusterUse::SnapshotL2Table, first, 1);
            }
            Ok::<_, Stuck>(run)
        });
        let Some(run) = run.await? else {
            self.is_full = true;
            return Ok(());
        };
        self.moves.add_run(&geometry, table, &run, uses);
        self.indices.push(index);
        self.copies.push(Copy::of_table(
            geometry.host_offset(table),
            geometry.host_offset(run.first),
            geometry.cluster_size(),
        ));
        Ok(())
    }

    /// Copies the tables, and makes the copies and their counts durable.
    async fn copy(&self, queue: &Rc<Queue>) -> Result<(), IoError> {
        if self.copies.is_empty() {
            return Ok(());
        }
        copy_all(queue, &self.copies).await?;
        make_durable(queue).await
    }

    /// Plans moves of at most `most` tables from an L1 index on. Returns the index to go on with.
    async fn fill(
        &mut self,
        queue: &Rc<Queue>,
        foreign: &Foreign,
        bound: HostCluster,
        most: u64,
    ) -> Result<usize, IoError> {
        for index in foreign.indices.clone() {
            let tables = foreign.at(queue, index)?.into_iter();
            for (table, uses) in tables.filter(|&(table, _)| table >= bound) {
                if self.is_full || self.copies.len() as u64 >= most {
                    return Ok(index);
                }
                self.add(queue, (index, table, uses), bound).await?;
            }
        }
        Ok(foreign.indices.end)
    }
}

impl Compaction<'_> {
    /// Moves L2 tables of snapshots that lie from `bound` on, also those that the disk shares.
    pub(super) async fn move_foreign_tables(&mut self, bound: HostCluster) -> Result<(), CompactError> {
        let mut at = 0;
        while !self.is_stopped {
            let step = self.move_next_tables(&mut at, bound).await?;
            if step.clusters > 0 {
                self.end_step(step.clusters).await?;
            }
            if step.is_last {
                break;
            }
        }
        Ok(())
    }

    /// Moves the next foreign tables, of L1 indices from `at` on; `at` moves on.
    async fn move_next_tables(&self, at: &mut usize, bound: HostCluster) -> Result<Step, CompactError> {
        let queue = self.queue;
        let _turn = exclusive::turn(queue).await?;
        let l1s = SnapshotL1s::read(queue).await?;
        let Some(foreign) = l1s.foreign(queue, *at, l1s.end()).await? else {
            return Ok(Step::NONE_LEFT);
        };
        let mut plan = Plan::default();
        let most = self.step_clusters().min(TABLES_PER_STEP);
        let filled = plan.fill(queue, &foreign, bound, most).await;
        let step = Step {
            clusters: plan.copies.len() as u64,
            is_last: plan.is_full,
        };
        let copied = match filled {
            Ok(next) => {
                *at = next;
                plan.copy(queue).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = copied {
            queue.shared.write()?.abandon_shared(plan.moves);
            return Err(error.into());
        }
        if step.clusters > 0 {
            lead_to_tables(queue, &l1s, &plan.indices, plan.moves).await?;
            settle(queue).await?;
        }
        Ok(step)
    }
}

/// Changes all L1 entries that lead to L2 tables that move, and drops the old places. If it fails, both places stay counted.
async fn lead_to_tables(
    queue: &Rc<Queue>,
    l1s: &SnapshotL1s,
    indices: &[usize],
    mut moves: SharedMoves,
) -> Result<(), CompactError> {
    let mut indices = indices.to_vec();
    indices.dedup();
    let mut kept = Vec::new();
    for &index in &indices {
        kept.push(load::keep_table(queue, index).await?);
    }
    for &index in &indices {
        change(queue, |metadata| metadata.lead_to_table(index, &mut moves)).await?;
    }
    let mut parts: Vec<usize> = indices.iter().map(|index| index / PART_ENTRIES).collect();
    parts.dedup();
    for (l1, uses) in l1s.tables() {
        let mut places = Vec::new();
        for &part in &parts {
            if (part * PART_ENTRIES) as u64 >= l1.entries {
                continue;
            }
            let offset = l1.offset + part as u64 * PART_BYTES;
            let bytes = queue.file.read_at(offset.bytes(), PART_BYTES as usize).await?;
            let entries = (l1.entries as usize - part * PART_ENTRIES).min(PART_ENTRIES);
            if let Some(bytes) = change_part(&queue.shared.geometry, &bytes, entries, uses, &mut moves) {
                places.push((offset, bytes.into()));
            }
        }
        flush::write_places(queue, places).await?;
    }
    drop(kept);
    queue.shared.write()?.end_shared(moves);
    Ok(())
}

/// Returns a part of an L1 table with entries that lead to the copies; `None` if nothing changes.
fn change_part(
    geometry: &Geometry,
    part: &[u8],
    entries: usize,
    uses: u64,
    moves: &mut SharedMoves,
) -> Option<Vec<u8>> {
    let mut bytes = part.to_vec();
    let mut is_changed = false;
    for raw in bytes.as_chunks_mut::<8>().0.iter_mut().take(entries) {
        let entry = L1Entry::from_raw(u64::from_be_bytes(*raw));
        let Ok(Some(table)) = entry.decode(geometry) else {
            continue;
        };
        let from = StoredBytes::of_cluster(geometry.host_cluster(table.host), geometry);
        if let Some(host) = moves.lead(from, uses) {
            let new = L1Entry::encode(L2TableRef { host, ..table });
            *raw = new.raw().to_be_bytes();
            is_changed = true;
        }
    }
    is_changed.then_some(bytes)
}
