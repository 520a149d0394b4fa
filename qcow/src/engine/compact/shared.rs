//! Moves of guest clusters that snapshots use, perhaps together with the disk.
//!
//! 1. The clusters of a step, and the references to them, are looked for in the L2 tables of some L1 indices: [`foreign`]
//!    ones and the disk's own. What is counted as often as it is found gets a copy before the bound, which counts as much.
//! 2. The bytes are copied. A FLUSH makes the copies and their counts durable.
//! 3. The entries change: the disk's own in its cache, those of foreign tables in the file.
//! 4. The old places are dropped. A FLUSH makes the entries durable, and frees what was dropped.
//!
//! No queue is held off: nobody writes a shared cluster in place. A request that writes to it gives it up, whether its entry
//! leads to the old place or to the copy.
//!
//! Invariants:
//!
//! - the turn to change the image as a whole is kept from 1 to 4: no snapshot is made or deleted;
//! - in 3, no foreign table is copied for the disk: it would be read before its entries change, or after.
//!
//! [`foreign`]: super::foreign

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

use block::IoError;
use block::canary::{Rule, broken};

use super::copy::{Copy, PIECE_BYTES_MAX, copy_durably};
use super::foreign::{Foreign, SnapshotL1s, for_each_table, shown};
use super::tables::Pinned;
use super::{CompactError, CompactProgress, Compaction, STEP_BYTES_MAX, Step, change, settle};
use crate::engine::{Queue, exclusive, flush, load};
use crate::format::{GuestOffset, HostCluster, L2Entry, L2Mapping, L2Table, L2TableMut};
use crate::metadata::Blocked;
use crate::metadata::moves::moved;
use crate::metadata::shared_moves::SharedMoves;
use crate::metadata::write_back::Place;

/// The steps of other moves that one step here is as large as: the tables that are read for it are the same.
const STEPS_AT_ONCE: u64 = 4;
/// The most references of a step: each is dropped in a list.
const REFERENCES_MAX: u64 = 1 << 18;

/// The shared clusters that were found from a bound on.
struct Found {
    bound: HostCluster,
    most: u64,
    clusters: BTreeMap<HostCluster, References>,
    /// The foreign tables that lead to any of them, with their L1 index.
    tables: Vec<(usize, HostCluster)>,
    references: u64,
    /// There are more.
    is_full: bool,
}

/// The references to a cluster that were found.
#[derive(Clone, Copy, Debug, Default)]
struct References {
    all: u64,
    /// Those of the disk's own tables.
    by_disk: u64,
}

impl Found {
    /// Looks at a mapping that stands for so many references. Returns true if it leads to one of the clusters.
    fn look(&mut self, mapping: &L2Mapping, cluster: HostCluster, references: u64) -> bool {
        if cluster < self.bound || matches!(mapping, L2Mapping::Compressed(_)) {
            return false;
        }
        let is_new = !self.clusters.contains_key(&cluster);
        let is_full = self.clusters.len() as u64 >= self.most || self.references >= REFERENCES_MAX;
        if is_new && is_full && !self.clusters.is_empty() {
            self.is_full = true;
            return false;
        }
        self.clusters.entry(cluster).or_default().all += references;
        self.references += references;
        true
    }

    /// Looks at all tables of an L1 index.
    async fn look_at(
        &mut self,
        queue: &Rc<Queue>,
        foreign: &Foreign,
        index: usize,
    ) -> Result<(), CompactError> {
        let geometry = queue.shared.geometry;
        let tables = foreign.at(queue, index)?;
        for_each_table(queue, &tables, |(table, uses), bytes| {
            let mut is_leading = false;
            for entry in L2Table::new(bytes, &geometry).iter() {
                // What a damaged entry leads to is counted once more than it is found, and stays.
                if let Ok(mapping) = entry.decode(&geometry)
                    && let Some((host, _)) = mapping.cluster()
                {
                    is_leading |= self.look(&mapping, geometry.host_cluster(host), uses);
                }
            }
            if is_leading {
                self.tables.push((index, table));
            }
        })
        .await?;
        if self.clusters.is_empty() || queue.metadata()?.own_table(index).ok().flatten().is_none() {
            return Ok(());
        }
        let slices = queue.metadata()?.table_slices(index);
        for slice in slices {
            change(queue, |metadata| {
                metadata.for_each_mapped(slice, |_, mapping| {
                    if let Some((host, false)) = mapping.cluster()
                        && let Some(found) = self.clusters.get_mut(&geometry.host_cluster(host))
                    {
                        found.all += 1;
                        found.by_disk += 1;
                    }
                })
            })
            .await?;
        }
        Ok(())
    }

    /// Returns the clusters whose references were all found, as runs of neighbours with as many references each.
    async fn runs(&self, queue: &Rc<Queue>) -> Result<Vec<(HostCluster, u64, u64)>, IoError> {
        let most = PIECE_BYTES_MAX / queue.shared.geometry.cluster_size();
        let mut runs: Vec<(HostCluster, u64, u64)> = Vec::new();
        for (&cluster, found) in &self.clusters {
            let is_whole = change(queue, |metadata| metadata.is_counted(cluster, found.all, &[])).await?;
            // The disk's own reference moves with one entry.
            if !is_whole || found.by_disk > 1 {
                continue;
            }
            match runs.last_mut() {
                Some((first, count, references))
                    if *first + *count == cluster && *references == found.all && *count < most =>
                {
                    *count += 1;
                }
                _ => runs.push((cluster, 1, found.all)),
            }
        }
        Ok(runs)
    }
}

/// The clusters of a step and the copies to make.
#[derive(Debug, Default)]
struct Plan {
    moves: SharedMoves,
    copies: Vec<Copy>,
    /// There is no room for others.
    is_full: bool,
}

impl Plan {
    /// Takes places for the copies.
    async fn fill(
        &mut self,
        queue: &Rc<Queue>,
        runs: Vec<(HostCluster, u64, u64)>,
        bound: HostCluster,
    ) -> Result<(), IoError> {
        let geometry = queue.shared.geometry;
        for (mut first, mut count, references) in runs {
            while count > 0 {
                let allocate = change(queue, |metadata| {
                    metadata.allocate_shared(count, references, bound)
                });
                let Some(run) = allocate.await? else {
                    self.is_full = true;
                    return Ok(());
                };
                self.moves.add(first, &run, references);
                self.copies.push(Copy {
                    // It matters only to a cipher whose images are not written.
                    guest: GuestOffset::default(),
                    from: geometry.host_offset(first),
                    to: geometry.host_offset(run.first),
                    len: run.count * geometry.cluster_size(),
                    is_zero: run.zero && queue.metadata()?.holes_are_zeros,
                    is_table: false,
                });
                first += run.count;
                count -= run.count;
            }
        }
        Ok(())
    }
}

impl<P: FnMut(&CompactProgress) -> ControlFlow<()>> Compaction<'_, P> {
    /// Moves guest clusters that snapshots use and that lie from `bound` on, while there is room before it.
    pub(super) async fn move_shared_clusters(&mut self, bound: HostCluster) -> Result<(), CompactError> {
        let mut at = 0;
        while !self.is_stopped {
            let step = self.move_next_shared(&mut at, bound).await?;
            if step.clusters > 0 {
                self.end_step(step.clusters).await?;
            }
            if step.is_last {
                break;
            }
        }
        Ok(())
    }

    /// Moves the next shared clusters, of L1 indices from `at` on; `at` moves on.
    async fn move_next_shared(&self, at: &mut usize, bound: HostCluster) -> Result<Step, CompactError> {
        let queue = self.queue;
        let _turn = exclusive::turn(queue).await?;
        let l1s = SnapshotL1s::read(queue).await?;
        let Some(foreign) = l1s.foreign(queue, *at).await? else {
            return Ok(Step::NONE_LEFT);
        };
        let most = match self.options.rate {
            Some(_) => self.step_clusters(),
            None => STEPS_AT_ONCE * STEP_BYTES_MAX / queue.shared.geometry.cluster_size(),
        };
        let mut found = Found {
            bound,
            most: most.max(1),
            clusters: BTreeMap::new(),
            tables: Vec::new(),
            references: 0,
            is_full: false,
        };
        let first = *at;
        for index in foreign.indices.clone() {
            found.look_at(queue, &foreign, index).await?;
            if found.is_full {
                break;
            }
            *at = index + 1;
        }
        let mut plan = Plan::default();
        let filled = match found.runs(queue).await {
            Ok(runs) => plan.fill(queue, runs, bound).await,
            Err(error) => Err(error),
        };
        let step = Step {
            clusters: plan.moves.len(),
            is_last: plan.is_full,
        };
        if let Err(error) = filled {
            queue.shared.write()?.abandon_shared(plan.moves);
            return Err(error.into());
        }
        if plan.moves.is_empty() {
            // None of so many can move: the next index may have others.
            *at += usize::from(found.is_full);
            return Ok(step);
        }
        if let Err(error) = copy_durably(queue, &plan.copies).await {
            queue.shared.write()?.abandon_shared(plan.moves);
            return Err(error.into());
        }
        let indices = first..*at + usize::from(found.is_full);
        lead_to_copies(queue, &foreign, indices, &found.tables, plan.moves).await?;
        settle(queue).await?;
        Ok(step)
    }
}

/// Changes all entries of some L1 indices that lead to clusters that move, and drops the old places. If it fails, both
/// places stay counted.
async fn lead_to_copies(
    queue: &Rc<Queue>,
    foreign: &Foreign,
    indices: std::ops::Range<usize>,
    tables: &[(usize, HostCluster)],
    mut moves: SharedMoves,
) -> Result<(), CompactError> {
    let mut kept = Vec::new();
    let with_tables: BTreeSet<usize> = tables.iter().map(|&(index, _)| index).collect();
    for &index in &with_tables {
        kept.push(load::keep_table(queue, index).await?);
    }
    for &index in with_tables.iter().filter(|index| indices.contains(index)) {
        if queue.metadata()?.own_table(index).ok().flatten().is_none() {
            continue;
        }
        let slices = queue.metadata()?.table_slices(index);
        for slice in slices {
            change(queue, |metadata| metadata.lead_to_copies(slice, &mut moves)).await?;
        }
    }
    let mut late = Vec::new();
    for &(index, table) in tables {
        let uses = foreign.at(queue, index)?.into_iter();
        if let Some((_, uses)) = uses.into_iter().find(|&(found, _)| found == table) {
            change_table(queue, index, table, uses, &mut moves, &mut late).await?;
        }
    }
    drop(kept);
    queue.shared.write()?.end_shared(moves);
    if !late.is_empty() {
        settle(queue).await?;
        flush::write_places(queue, late).await?;
    }
    Ok(())
}

/// Changes the entries of a foreign table, to which so many L1 entries lead, in the file. The canary's places are written
/// `late`.
async fn change_table(
    queue: &Rc<Queue>,
    index: usize,
    table: HostCluster,
    uses: u64,
    moves: &mut SharedMoves,
    late: &mut Vec<Place>,
) -> Result<(), CompactError> {
    if queue.shared.is_corrupt() {
        return Err(IoError::Corrupt.into());
    }
    let geometry = queue.shared.geometry;
    let is_shown = shown(queue, index)? == Some(table);
    let (slices, slice_bytes) = {
        let metadata = queue.metadata()?;
        (metadata.table_slices(index), metadata.l2.slice_bytes())
    };
    // No load that has read the old entries is under way, then.
    let mut pinned = Pinned::none(queue, |metadata| &mut metadata.l2);
    if is_shown {
        pinned.pin(queue, slices.clone(), Blocked::LoadL2).await?;
    }
    let place = geometry.host_offset(table);
    let size = geometry.cluster_size() as usize;
    let mut bytes = queue.file.read_at(place.bytes(), size).await?;
    let mut changed = Vec::new();
    for (entry, new) in changes(queue, &bytes, uses, moves) {
        L2TableMut::new(&mut bytes, &geometry).set(entry, new);
        let slice = L2Table::offset_of(&geometry, entry) as usize / slice_bytes;
        if changed.last() != Some(&slice) {
            changed.push(slice);
        }
    }
    let places = changed.iter().filter_map(|&slice| {
        let at = slice * slice_bytes;
        let bytes: Arc<[u8]> = bytes.get(at..at + slice_bytes)?.into();
        Some((place + at as u64, bytes))
    });
    let places: Vec<Place> = places.collect();
    let written = match broken(Rule::OldPlaceFreedEarly) {
        true => {
            late.extend(places);
            Ok(())
        }
        false => flush::write_places(queue, places).await,
    };
    // Whatever is in the file now.
    pinned.discard()?;
    written?;
    let mut metadata = queue.shared.write()?;
    for slice in changed {
        // If the disk comes to use this table, its entries lead to clusters that were handed out since it was opened.
        metadata.refcounts.uses.saw_slice(slices.start + slice as u64);
    }
    Ok(())
}

/// Returns the entries of a table that lead to clusters that move, with their numbers, as they are to be.
fn changes(queue: &Queue, table: &[u8], uses: u64, moves: &mut SharedMoves) -> Vec<(usize, L2Entry)> {
    let geometry = queue.shared.geometry;
    let entries = L2Table::new(table, &geometry).iter().enumerate();
    let changes = entries.filter_map(|(index, entry)| {
        let mapping = entry.decode(&geometry).ok()?;
        let (host, _) = mapping.cluster()?;
        let from = geometry.host_cluster(host);
        if !moves.contains(from) {
            return None;
        }
        let to = moves.lead(from, uses)?;
        let new = L2Entry::encode(moved(mapping, geometry.host_offset(to)), &geometry)?;
        Some((index, new))
    });
    changes.collect()
}
