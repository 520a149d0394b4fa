//! Repair of refcounts in place, for images whose refcount structure itself is intact.
//!
//! The order is: counts that are too low are raised. Durably after that, COPIED flags are made to agree and counts
//! that are too high are lowered. After these are durable too, the header's warnings are withdrawn. If a flag were
//! cleared before its count is raised, the next writer would copy the cluster and free data that others refer to. A
//! count or flag never changes but to the right value, each in one sector. So a cut anywhere leaves an image with
//! fewer errors of the same kinds, and no cluster in use becomes free.

use block::file::FileView;

use super::flags::fix_copied_flags;
use super::writer::{begin, switch_header, sync, write};
use super::{RepairError, RepairScope};
use crate::format::positions::SECTOR_SIZE;
use crate::format::{ClusterUse, HostCluster, Incompatible};
use crate::image::check::{Subject, Survey, Walk};
use crate::image::read::{read, read_header};

/// The action of one pass over the image.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    Raise,
    Flags,
    Lower,
}

/// Repairs counts in place. Returns `false`, with nothing written, if the refcount structure itself is damaged.
pub(super) async fn mend(
    file: &FileView,
    scope: RepairScope,
    memory_max_bytes: usize,
) -> Result<bool, RepairError> {
    let located = read_header(file).await?;
    let subject = Subject::new(file, &located)?;
    let mut survey = Survey::new(&subject, true, memory_max_bytes);
    let mut whole = None;
    let mut in_place = true;
    while let Some(walk) = survey.next().await {
        in_place &= !walk.refcounts_damaged && misplaced(&walk).is_none();
        if let Some(blocker) = walk.findings.blocker() {
            return Err(RepairError::Damaged(blocker.clone()));
        }
        if walk.is_whole() {
            whole = Some(walk);
            break;
        }
        survey.done(walk);
    }
    if !in_place {
        return Ok(false);
    }

    begin(file, &located.header).await?;
    let phases: &[Phase] = match scope {
        RepairScope::Leaks => &[Phase::Flags, Phase::Lower],
        RepairScope::All => &[Phase::Raise, Phase::Flags, Phase::Lower],
    };
    for &phase in phases {
        if let Some(walk) = &mut whole {
            run_phase(walk, phase, scope).await?;
        } else {
            let mut survey = Survey::new(&subject, true, memory_max_bytes);
            while let Some(mut walk) = survey.next().await {
                run_phase(&mut walk, phase, scope).await?;
                survey.done(walk);
            }
        }
        // Flags and counts that are too high may land in any order: neither alone makes a writer free too much.
        if phase != Phase::Flags {
            sync(file).await?;
        }
    }

    let mut header = located.header.clone();
    let warnings = Incompatible::DIRTY | Incompatible::CORRUPT;
    if scope == RepairScope::All && header.incompatible.intersects(warnings) {
        header.incompatible.remove(warnings);
        switch_header(file, &header).await?;
    }
    Ok(true)
}

/// Returns a cluster that is used and that no refcount block counts.
fn misplaced(walk: &Walk<'_>) -> Option<u64> {
    let geometry = walk.subject.geometry;
    let mut found = None;
    walk.expected
        .for_each_difference(&walk.on_disk, |cluster, expected, _| {
            let index = geometry.refcount_table_index(HostCluster::new(cluster)) as u64;
            let counted = || {
                let block = walk.blocks.binary_search_by_key(&index, |&(index, _)| index);
                block.is_ok()
            };
            if expected > 0 && found.is_none() && !counted() {
                found = Some(cluster);
            }
        });
    found
}

async fn run_phase(walk: &mut Walk<'_>, phase: Phase, scope: RepairScope) -> Result<(), RepairError> {
    match phase {
        Phase::Raise => write_counts(walk, |expected, found| expected > found).await,
        Phase::Flags => fix_copied_flags(walk, scope).await,
        Phase::Lower => write_counts(walk, |expected, found| expected < found).await,
    }
}

/// Writes the right count of each cluster for which `wanted(right, found)` is true.
async fn write_counts(walk: &Walk<'_>, wanted: impl Fn(u64, u64) -> bool) -> Result<(), RepairError> {
    let Subject { file, geometry, .. } = *walk.subject;
    // By table entry, in order.
    let mut indices: Vec<u64> = Vec::new();
    walk.expected
        .for_each_difference(&walk.on_disk, |cluster, expected, found| {
            if wanted(expected, found) {
                let index = geometry.refcount_table_index(HostCluster::new(cluster)) as u64;
                if indices.last() != Some(&index) {
                    indices.push(index);
                }
            }
        });
    let order = geometry.refcount_order();
    for &(index, block_at) in walk.blocks.iter() {
        if indices.binary_search(&index).is_err() {
            continue;
        }
        let len = geometry.cluster_size() as usize;
        let mut block = read(file, ClusterUse::RefcountBlock, block_at.bytes(), len).await?;
        let first = index << geometry.refcount_block_bits();
        let end = first + geometry.refcount_block_entries() as u64;
        let mut changed: Option<(u64, u64)> = None;
        let each = |cluster, expected, found| {
            if !wanted(expected, found) {
                return;
            }
            let at = cluster - first;
            let written = order.write(&mut block, at as usize, expected);
            assert_eq!(written, Ok(()), "counts are kept within the refcount width");
            let sector = at * u64::from(order.bits()) / 8 / SECTOR_SIZE;
            changed = Some(changed.map_or((sector, sector), |(first, _)| (first, sector)));
        };
        let (expected, on_disk) = (&walk.expected, &walk.on_disk);
        expected.for_each_difference_in(first..end, on_disk, each);
        if let Some((first, last)) = changed {
            let bytes = &block[(first * SECTOR_SIZE) as usize..((last + 1) * SECTOR_SIZE) as usize];
            let offset = block_at.bytes() + first * SECTOR_SIZE;
            write(file, ClusterUse::RefcountBlock, offset, bytes).await?;
        }
    }
    Ok(())
}
