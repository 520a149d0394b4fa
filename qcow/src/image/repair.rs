//! Repair: count every reference anew, write the counts, and set each COPIED flag to agree.
//!
//! The new refcount structure goes behind all that is in use and is durable before the one write
//! of the header's first sector that switches to it and clears the dirty bit. A cut before that
//! write leaves the image as it was (COPIED flags only become truer), a cut after it leaves it
//! repaired. What the old structure and leaks occupied is free afterwards.
//!
//! References that lead nowhere sensible are not repaired, as that would be to invent data.

use block::file::FileView;
use block::{AlignedBuf, IoError};
use serde::Serialize;

use super::check::{CheckError, CheckReport, Finding, Subject, Verdict, Walk, check};
use super::layout::RefcountLayout;
use super::read::{ReadError, for_each_entry, read, read_header};
use crate::format::header::at;
use crate::format::{
    Header, HeaderError, HostCluster, Incompatible, L1Entry, L2Entry, L2Mapping, RefcountTableEntry, Version,
};

/// An image's refcounts could not be rebuilt. Until the header is switched, it is as it was.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// The image cannot be looked into.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// Something cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Something is wrong that new refcounts do not mend.
    #[error("the image is damaged: {} at {:#x}: {}", .0.structure, .0.offset, .0.message)]
    Damaged(Finding),
    /// The refcount table would be larger than QEMU accepts.
    #[error("the refcount table would be larger than 8 MiB")]
    TableTooLarge,
    /// The host failed a write.
    #[error("cannot write {what} at {offset:#x}")]
    Write {
        /// The structure.
        what: &'static str,
        /// Where, in bytes.
        offset: u64,
        /// Why.
        #[source]
        source: IoError,
    },
}

impl From<HeaderError> for RebuildError {
    fn from(error: HeaderError) -> Self {
        Self::Check(error.into())
    }
}

/// What a repair did.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RepairReport {
    /// The image as it was.
    pub before: CheckReport,
    /// The image as it is.
    pub after: CheckReport,
}

/// Checks the image, and if refcounts or COPIED flags are wrong, or the header says that they may
/// be, rebuilds them and withdraws the header's warnings.
///
/// # Errors
///
/// [`RebuildError`], also if damage was found that new refcounts do not mend.
pub async fn repair(file: &FileView) -> Result<RepairReport, RebuildError> {
    let before = check(file).await?;
    if before.verdict() == Verdict::Clean && !before.dirty && !before.marked_corrupt {
        return Ok(RepairReport {
            after: before.clone(),
            before,
        });
    }
    rebuild(file, Incompatible::DIRTY | Incompatible::CORRUPT).await?;
    Ok(RepairReport {
        before,
        after: check(file).await?,
    })
}

/// Rebuilds the refcounts of an image whose dirty bit is set, before anything is written to it,
/// and clears the bit. Returns the header as it is now.
///
/// # Errors
///
/// [`RebuildError`].
pub async fn rebuild_refcounts(file: &FileView) -> Result<Header, RebuildError> {
    rebuild(file, Incompatible::DIRTY).await
}

async fn rebuild(file: &FileView, withdraw: Incompatible) -> Result<Header, RebuildError> {
    let located = read_header(file).await?;
    let subject = Subject::new(file, &located)?;
    let mut walk = Walk::new(&subject);
    walk.run(None).await?;
    if let Some(blocker) = walk.findings.blocker() {
        return Err(RebuildError::Damaged(blocker.clone()));
    }
    fix_copied_flags(&walk).await?;

    let geometry = subject.geometry;
    let counts = &mut walk.expected;
    let used_end = counts.last().map_or(1, |last| last + 1);
    let start = HostCluster::new(used_end.max(old_structure_end(&subject).await?));
    let layout = RefcountLayout::plan(counts, start, &geometry).ok_or(RebuildError::TableTooLarge)?;
    for cluster in layout.clusters() {
        counts.set(cluster, 1);
    }
    for i in 0..layout.blocks.len() {
        let offset = layout.block_at(i as u64, &geometry).bytes();
        write(
            file,
            "a refcount block",
            offset,
            &layout.block_bytes(i, counts, &geometry),
        )
        .await?;
    }
    let table_at = layout.table_at(&geometry);
    write(
        file,
        "the refcount table",
        table_at.bytes(),
        &layout.table_bytes(&geometry),
    )
    .await?;
    sync(file).await?;

    let mut header = located.header.clone();
    header.refcount_table_offset = table_at;
    header.refcount_table_clusters = layout.table_clusters as u32;
    header.incompatible.remove(withdraw);
    header.validate()?;
    switch_header(file, &header).await?;
    Ok(header)
}

/// The cluster behind the refcount structure as it is on disk, as far as that lies in the file.
/// The new structure goes behind it, so that the old one is whole until the header switches.
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
        "the refcount table",
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

/// Writes the header fields that a rebuild changes, in one sector, durably.
async fn switch_header(file: &FileView, header: &Header) -> Result<(), RebuildError> {
    let mut sector = read(file, "the header", 0, 512).await?;
    let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
    put(
        at::REFCOUNT_TABLE_OFFSET,
        &header.refcount_table_offset.bytes().to_be_bytes(),
    );
    put(
        at::REFCOUNT_TABLE_CLUSTERS,
        &header.refcount_table_clusters.to_be_bytes(),
    );
    if header.version == Version::V3 {
        put(
            at::INCOMPATIBLE_FEATURES,
            &header.incompatible.bits().to_be_bytes(),
        );
    }
    write(file, "the header", 0, &sector).await?;
    sync(file).await
}

/// Sets each COPIED flag that is reached through the active L1 table to agree with the counts.
async fn fix_copied_flags(walk: &Walk<'_>) -> Result<(), RebuildError> {
    let Subject {
        file,
        header,
        geometry,
        ..
    } = *walk.subject;
    let is_single = |host: u64| walk.expected.get(host / geometry.cluster_size()) == 1;
    let fix_l1 = |raw: u64| match L1Entry::from_raw(raw).decode(&geometry) {
        Ok(Some(table)) => L1Entry::from_raw(raw)
            .with_copied(is_single(table.host.bytes()))
            .raw(),
        _ => raw,
    };
    // Other tables' flags mean nothing, but for the one that compressed clusters must not have.
    let fix_compressed = |raw: u64| {
        let entry = L2Entry::from_raw(raw);
        if entry.is_compressed() {
            entry.with_copied(false).raw()
        } else {
            raw
        }
    };
    let fix_l2 = |raw: u64| match L2Entry::from_raw(raw).decode(&geometry) {
        Ok(L2Mapping::Data { host, .. } | L2Mapping::Zero { host: Some(host), .. }) => {
            L2Entry::from_raw(raw).with_copied(is_single(host.bytes())).raw()
        }
        _ => fix_compressed(raw),
    };
    const PART: u64 = 256 << 10;
    let (l1_at, l1_bytes) = (header.l1_offset.bytes(), header.l1_bytes());
    let mut done = 0;
    while done < l1_bytes {
        let len = (l1_bytes - done).min(PART);
        fix_entries(file, "the L1 table", l1_at + done, len, fix_l1).await?;
        done += len;
    }
    for (&table_at, references) in &walk.l2_tables {
        let (what, len) = ("an L2 table", geometry.cluster_size());
        if references.active > 0 {
            fix_entries(file, what, table_at, len, fix_l2).await?;
        } else {
            fix_entries(file, what, table_at, len, fix_compressed).await?;
        }
    }
    Ok(())
}

/// Replaces each entry of a table by `fix` of it, and writes the table if that changed any.
async fn fix_entries(
    file: &FileView,
    what: &'static str,
    offset: u64,
    len: u64,
    fix: impl Fn(u64) -> u64,
) -> Result<(), RebuildError> {
    let mut table = read(file, what, offset, len as usize).await?;
    let mut changed = false;
    for entry in table.as_chunks_mut::<8>().0 {
        let raw = u64::from_be_bytes(*entry);
        let fixed = fix(raw);
        if fixed != raw {
            *entry = fixed.to_be_bytes();
            changed = true;
        }
    }
    if changed {
        write(file, what, offset, &table).await?;
    }
    Ok(())
}

async fn write(file: &FileView, what: &'static str, offset: u64, bytes: &[u8]) -> Result<(), RebuildError> {
    let written = file.write_at(offset, AlignedBuf::from_slice(bytes)).await;
    written.map_err(|source| RebuildError::Write { what, offset, source })
}

async fn sync(file: &FileView) -> Result<(), RebuildError> {
    let synced = file.sync().await;
    synced.map_err(|source| RebuildError::Write {
        what: "everything (sync)",
        offset: 0,
        source,
    })
}
