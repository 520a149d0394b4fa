//! Moves of guest data that nobody writes in place: clusters that snapshots use, perhaps together with the disk, and compressed
//! data.
//!
//! 1. The data of a step, and the references to it, are looked for in the L2 tables of some L1 indices: [`foreign`] ones
//!    and the disk's own. A cluster that is counted as often as it is found gets a copy before the bound, which counts as
//!    much; compressed data, which shares its clusters, is packed anew ([`pack`]).
//! 2. The bytes are copied. A FLUSH makes the copies and their counts durable.
//! 3. The entries change: the disk's own in its cache, those of foreign tables in the file.
//! 4. The old places are dropped. A FLUSH makes the entries durable, and frees what was dropped.
//!
//! No queue is held off. A request that writes to shared or compressed data gives it up, whether its entry leads to the old
//! place or to the copy.
//!
//! Invariants:
//!
//! - the turn to change the image as a whole is kept from 1 to 4: no snapshot is made or deleted;
//! - in 3, no foreign table is copied for the disk: it would be read before its entries change, or after.
//!
//! [`foreign`]: super::foreign
//! [`pack`]: super::pack

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::IoError;
use block::canary::{Rule, broken};

use super::copy::{Copy, PIECE_BYTES_MAX, copy_all, make_durable};
use super::foreign::{Foreign, SnapshotL1s, for_each_table, shown};
use super::pack::Packed;
use super::survey::Survey;
use super::tables::Pinned;
use super::{CompactError, Compaction, STEP_BYTES_MAX, Step, change, settle};
use crate::engine::{Queue, exclusive, flush, load};
use crate::format::{GuestOffset, HostCluster, L2Entry, L2Mapping, L2Table, L2TableMut};
use crate::metadata::Blocked;
use crate::metadata::moves::moved;
use crate::metadata::shared_moves::{SharedMoves, StoredBytes};
use crate::metadata::write_back::Place;

/// The steps of other moves that one step here is as large as: the tables that are read for it are the same.
const STEPS_AT_ONCE: u64 = 4;
/// The most references of a step: each is dropped in a list.
const REFERENCES_MAX: u64 = 1 << 18;

/// The data that was found from a bound on.
struct Found {
    bound: HostCluster,
    /// There is compressed data from the bound on, which the disk alone may lead to.
    has_compressed: bool,
    bytes_max: u64,
    data: BTreeMap<StoredBytes, References>,
    bytes: u64,
    references: u64,
    /// The foreign tables that lead to any of it, with their L1 index.
    tables: Vec<(usize, HostCluster)>,
    /// The L1 indices at which any was found.
    indices: BTreeSet<usize>,
    /// There is more.
    is_full: bool,
}

/// The references that were found to some data.
#[derive(Clone, Copy, Debug, Default)]
struct References {
    all: u64,
    /// Those of the disk's own tables.
    by_disk: u64,
    is_compressed: bool,
}

impl Found {
    /// Looks at a mapping that stands for so many references, of the disk's own or of others. Returns true if it leads to data
    /// that was found.
    fn look(&mut self, queue: &Queue, mapping: &L2Mapping, references: u64, is_disk: bool) -> bool {
        let geometry = &queue.shared.geometry;
        let Some(data) = StoredBytes::of(mapping, geometry) else {
            return false;
        };
        let (first, count) = data.clusters(geometry);
        let is_compressed = matches!(mapping, L2Mapping::Compressed(_));
        if first + count <= self.bound {
            return false;
        }
        if !self.data.contains_key(&data) {
            // What the disk alone leads to and does not own is of no sound image.
            if is_disk && !is_compressed {
                return false;
            }
            let is_full = self.bytes >= self.bytes_max || self.references >= REFERENCES_MAX;
            if is_full && !self.data.is_empty() {
                self.is_full = true;
                return false;
            }
            self.bytes += data.len;
        }
        let found = self.data.entry(data).or_default();
        found.all += references;
        found.by_disk += if is_disk { references } else { 0 };
        found.is_compressed |= is_compressed;
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
                if let Ok(mapping) = entry.decode(&geometry) {
                    is_leading |= self.look(queue, &mapping, uses, false);
                }
            }
            if is_leading {
                self.tables.push((index, table));
                self.indices.insert(index);
            }
        })
        .await?;
        if !self.has_compressed && !self.indices.contains(&index) {
            return Ok(());
        }
        if queue.metadata()?.own_table(index).ok().flatten().is_none() {
            return Ok(());
        }
        let slices = queue.metadata()?.table_slices(index);
        for slice in slices {
            let mut is_leading = false;
            change(queue, |metadata| {
                metadata.for_each_mapped(slice, |_, mapping| {
                    if mapping.owned().is_none() {
                        is_leading |= self.look(queue, &mapping, 1, true);
                    }
                })
            })
            .await?;
            if is_leading {
                self.indices.insert(index);
            }
        }
        Ok(())
    }

    /// Returns the clusters whose references were all found, as runs of neighbours with as many references each.
    async fn runs(&self, queue: &Rc<Queue>) -> Result<Vec<(HostCluster, u64, u64)>, IoError> {
        let geometry = queue.shared.geometry;
        let most = PIECE_BYTES_MAX / geometry.cluster_size();
        let mut runs: Vec<(HostCluster, u64, u64)> = Vec::new();
        for (&data, found) in self.data.iter().filter(|(_, found)| !found.is_compressed) {
            let cluster = geometry.host_cluster(data.host);
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

    /// Returns the compressed data, in order, with the references to each.
    fn compressed(&self, queue: &Queue) -> Result<Vec<(StoredBytes, u64)>, IoError> {
        let metadata = queue.metadata()?;
        let compressed = self.data.iter().filter(|&(data, found)| {
            let (first, count) = data.clusters(&queue.shared.geometry);
            let mut clusters = first.until(first + count);
            found.is_compressed && clusters.all(|cluster| metadata.refcounts.uses.find(cluster).is_none())
        });
        Ok(compressed.map(|(&data, found)| (data, found.all)).collect())
    }
}

/// The data of a step and the copies to make.
#[derive(Debug, Default)]
struct Plan {
    moves: SharedMoves,
    copies: Vec<Copy>,
    packed: Packed,
    /// The number of clusters that the copies take.
    clusters: u64,
    /// There is no room for others.
    is_full: bool,
}

impl Plan {
    /// Takes places for the copies of what was found.
    async fn fill(&mut self, queue: &Rc<Queue>, found: &Found) -> Result<(), IoError> {
        for (first, count, references) in found.runs(queue).await? {
            if !self
                .add_run(queue, (first, count, references), found.bound)
                .await?
            {
                self.is_full = true;
                break;
            }
        }
        let compressed = found.compressed(queue)?;
        if !compressed.is_empty() {
            self.packed = Packed::plan(queue, &compressed, found.bound).await?;
            self.is_full |= self.packed.is_full;
            self.clusters += self.packed.count(queue, &mut self.moves).await?;
        }
        Ok(())
    }

    /// Takes places for neighbouring clusters. Returns false without room for all.
    async fn add_run(
        &mut self,
        queue: &Rc<Queue>,
        (mut first, mut count, references): (HostCluster, u64, u64),
        bound: HostCluster,
    ) -> Result<bool, IoError> {
        let geometry = queue.shared.geometry;
        while count > 0 {
            let allocate = change(queue, |metadata| {
                metadata.allocate_shared(count, references, bound)
            });
            let Some(run) = allocate.await? else {
                return Ok(false);
            };
            self.moves.add_run(&geometry, first, &run, references);
            self.clusters += run.count;
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
        Ok(true)
    }

    /// Copies the bytes, and makes the copies and their counts durable.
    async fn copy(&self, queue: &Rc<Queue>) -> Result<(), IoError> {
        copy_all(queue, &self.copies).await?;
        self.packed.copy(queue).await?;
        make_durable(queue).await
    }
}

impl Compaction<'_> {
    /// Moves shared clusters and compressed data that lie from the bound on, while there is room before it.
    pub(super) async fn move_shared_data(&mut self, survey: &Survey) -> Result<(), CompactError> {
        let mut at = 0;
        while !self.is_stopped {
            let step = self.move_next_shared(&mut at, survey).await?;
            if step.clusters > 0 {
                self.end_step(step.clusters).await?;
            }
            if step.is_last {
                break;
            }
        }
        Ok(())
    }

    /// Moves the next data, of L1 indices from `at` on; `at` moves on.
    async fn move_next_shared(&self, at: &mut usize, survey: &Survey) -> Result<Step, CompactError> {
        let queue = self.queue;
        let _turn = exclusive::turn(queue).await?;
        let l1s = SnapshotL1s::read(queue).await?;
        let end = match survey.has_compressed {
            true => l1s.end().max(queue.metadata()?.l1_entries()),
            false => l1s.end(),
        };
        let Some(foreign) = l1s.foreign(queue, *at, end).await? else {
            return Ok(Step::NONE_LEFT);
        };
        let size = queue.shared.geometry.cluster_size();
        let mut found = Found {
            bound: survey.bound,
            has_compressed: survey.has_compressed,
            bytes_max: match self.options.rate {
                Some(_) => self.step_clusters() * size,
                None => STEPS_AT_ONCE * STEP_BYTES_MAX,
            },
            data: BTreeMap::new(),
            bytes: 0,
            references: 0,
            tables: Vec::new(),
            indices: BTreeSet::new(),
            is_full: false,
        };
        for index in foreign.indices.clone() {
            found.look_at(queue, &foreign, index).await?;
            if found.is_full {
                break;
            }
            *at = index + 1;
        }
        let mut plan = Plan::default();
        let mut filled = plan.fill(queue, &found).await;
        if filled.is_ok() && !plan.moves.is_empty() {
            filled = plan.copy(queue).await;
        }
        if let Err(error) = filled {
            queue.shared.write()?.abandon_shared(plan.moves);
            return Err(error.into());
        }
        let step = Step {
            clusters: plan.clusters,
            is_last: plan.is_full,
        };
        if plan.moves.is_empty() {
            // None of so much can move: the next index may have other data.
            *at += usize::from(found.is_full);
            return Ok(step);
        }
        lead_to_copies(queue, &foreign, &found, plan.moves).await?;
        settle(queue).await?;
        Ok(step)
    }
}

/// Changes all entries of some L1 indices that lead to clusters that move, and drops the old places. If it fails, both
/// places stay counted.
async fn lead_to_copies(
    queue: &Rc<Queue>,
    foreign: &Foreign,
    found: &Found,
    mut moves: SharedMoves,
) -> Result<(), CompactError> {
    // Where such data lay before, other data may be cached.
    queue.shared.compressed_moves.fetch_add(1, Ordering::AcqRel);
    let mut kept = Vec::new();
    for &index in &found.indices {
        kept.push(load::keep_table(queue, index).await?);
    }
    for &index in &found.indices {
        if queue.metadata()?.own_table(index).ok().flatten().is_none() {
            continue;
        }
        let slices = queue.metadata()?.table_slices(index);
        for slice in slices {
            change(queue, |metadata| metadata.lead_to_copies(slice, &mut moves)).await?;
        }
    }
    let mut late = Vec::new();
    for &(index, table) in &found.tables {
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
        let from = StoredBytes::of(&mapping, &geometry)?;
        // All entries that there can be are encoded: otherwise the reference would be counted at the copy.
        let to = moves.lead(from, uses)?;
        Some((index, L2Entry::encode(moved(mapping, to), &geometry)?))
    });
    changes.collect()
}
