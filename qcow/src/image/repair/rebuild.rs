//! A new refcount structure, for images whose own is missing, out of place, or invalid.
//!
//! The new structure goes past everything in use. It is durable before the one write of the header's first sector
//! that switches to it. A cut before that write leaves the image as it was. COPIED flags follow: a flag that is
//! cleared while a count is too low leads a writer to free data that others refer to. Until they are repaired too,
//! the header says that the image is dirty (version 2 has no bit for that), as before it may have been too damaged to
//! be written to. Its warnings are withdrawn last. The clusters of the old structure and leaked ones are free
//! afterwards.

use std::collections::BTreeSet;

use block::file::FileView;

use super::flags::fix_copied_flags;
use super::writer::{begin, switch_header, sync, write};
use super::{RepairError, RepairScope};
use crate::format::refcount::REFCOUNT_TABLE_MAX_BYTES;
use crate::format::{ClusterUse, Header, HostCluster, Incompatible, RefcountTableEntry, Version};
use crate::image::check::{Subject, Survey, Walk};
use crate::image::layout::RefcountLayout;
use crate::image::read::{ReadError, for_each_entry, read_header};

/// The size of one write of the refcount table, in bytes.
const TABLE_PART: usize = 256 << 10;

/// Rebuilds all refcounts, and withdraws header warnings. Returns the new header.
pub(super) async fn rebuild(
    file: &FileView,
    withdraw: Incompatible,
    memory_max_bytes: usize,
) -> Result<Header, RepairError> {
    let located = read_header(file).await?;
    let subject = Subject::new(file, &located)?;
    let geometry = subject.geometry;

    let mut survey = Survey::new(&subject, false, memory_max_bytes);
    let mut blocks = BTreeSet::new();
    let mut used_end = 1;
    let mut whole = None;
    while let Some(walk) = survey.next().await {
        for (cluster, _) in walk.expected.nonzero() {
            let index = geometry.refcount_table_index(HostCluster::new(cluster)) as u64;
            if index >= REFCOUNT_TABLE_MAX_BYTES / 8 {
                return Err(RepairError::TableTooLarge);
            }
            blocks.insert(index);
            used_end = cluster + 1;
        }
        if let Some(blocker) = walk.findings.blocker() {
            return Err(RepairError::Damaged(blocker.clone()));
        }
        if walk.is_whole() {
            whole = Some(walk);
            break;
        }
        survey.done(walk);
    }

    let start = HostCluster::new(used_end.max(old_structure_end(&subject).await?));
    let layout = RefcountLayout::plan(blocks, start, &geometry).ok_or(RepairError::TableTooLarge)?;
    begin(file, &located.header).await?;
    if let Some(walk) = &mut whole {
        write_counts(walk, &layout).await?;
    } else {
        let mut survey = Survey::new(&subject, false, memory_max_bytes);
        while let Some(mut walk) = survey.next().await {
            write_counts(&mut walk, &layout).await?;
            survey.done(walk);
        }
    }
    let table_at = layout.table_at(&geometry);
    let table_bytes = layout.table_bytes(&geometry);
    for from in (0..table_bytes).step_by(TABLE_PART) {
        let part = layout.table_part(from..table_bytes.min(from + TABLE_PART as u64), &geometry);
        write(file, ClusterUse::RefcountTable, table_at.bytes() + from, &part).await?;
    }
    sync(file).await?;

    let mut header = located.header.clone();
    header.refcount_table_offset = table_at;
    header.refcount_table_clusters = layout.table_clusters as u32;
    if header.version == Version::V3 {
        header.incompatible.insert(Incompatible::DIRTY);
    }
    header.validate()?;
    switch_header(file, &header).await?;

    if let Some(walk) = &mut whole {
        fix_copied_flags(walk, RepairScope::All).await?;
    } else {
        let mut survey = Survey::new(&subject, false, memory_max_bytes);
        while let Some(mut walk) = survey.next().await {
            fix_copied_flags(&mut walk, RepairScope::All).await?;
            survey.done(walk);
        }
    }
    sync(file).await?;
    header.incompatible.remove(withdraw | Incompatible::DIRTY);
    if header.version == Version::V3 {
        switch_header(file, &header).await?;
    }
    Ok(header)
}

/// Writes the counts of one pass.
async fn write_counts(walk: &mut Walk<'_>, layout: &RefcountLayout) -> Result<(), RepairError> {
    let Subject { file, geometry, .. } = *walk.subject;
    for cluster in layout.clusters() {
        walk.expected.set(cluster, 1);
    }
    for i in 0..layout.blocks.len() {
        if let Some((skip, part)) = layout.block_part(i, &walk.expected, &walk.window, &geometry) {
            let offset = layout.block_at(i as u64, &geometry).bytes() + skip;
            write(file, ClusterUse::RefcountBlock, offset, &part).await?;
        }
    }
    Ok(())
}

/// Returns the cluster after the refcount structure on disk, as far as that lies in the file. The new structure goes
/// past it, so that the old one is whole until the header switches.
async fn old_structure_end(subject: &Subject<'_>) -> Result<u64, ReadError> {
    let geometry = subject.geometry;
    let table_at = subject.header.refcount_table_offset;
    let table_bytes = subject.header.refcount_table_bytes();
    let file_clusters = subject.file_clusters();
    let mut end = geometry
        .clusters_for(table_at.bytes().saturating_add(table_bytes))
        .min(file_clusters);
    for_each_entry(
        subject.file,
        ClusterUse::RefcountTable,
        table_at,
        table_bytes / 8,
        |_, raw| {
            if let Ok(Some(block)) = RefcountTableEntry::from_raw(raw).decode(&geometry) {
                let block_end = geometry.host_cluster(block).index() + 1;
                end = end.max(if block_end <= file_clusters { block_end } else { 0 });
            }
        },
    )
    .await?;
    Ok(end)
}
