//! Reads of an open: the image's header, its tables, and the bitmaps to be announced before the first write.

use block::IoError;
use block::file::FileView;

use super::ImageError;
use super::options::L2_CACHE_DEFAULT_MAX_BYTES;
use crate::engine::Announcement;
use crate::format::{
    Autoclear, ClusterUse, Geometry, Header, HeaderFields, HostCluster, HostOffset, Incompatible, L1Entry,
    RefcountTableEntry, Version,
};
use crate::image::guarded_tables::guarded_tables;
use crate::image::read::{for_each_entry, read_header_fields};
use crate::image::rebuild_refcounts;
use crate::metadata::Metadata;
use crate::metadata::cluster_use::UseMap;
use crate::metadata::refcounts::{NO_LIMIT, Refcounts, TablePlace};

/// Reads the header, which is good then, and what the engine writes back of it.
pub(super) async fn check_header(view: &FileView, write: bool) -> Result<(Header, HeaderFields), ImageError> {
    let (located, fields) = read_header_fields(view).await?;
    let header = located.header;
    header.validate()?;
    header.validate_within(located.file_len)?;
    header.require_supported()?;
    if write && header.incompatible.contains(Incompatible::CORRUPT) {
        return Err(ImageError::MarkedCorrupt);
    }
    Ok((header, fields))
}

/// Rebuilds the refcounts of an image that was not closed cleanly. Returns false if it was, and nothing has changed.
pub(super) async fn prepare(view: &FileView, header: &Header, write: bool) -> Result<bool, ImageError> {
    let is_dirty = header.incompatible.contains(Incompatible::DIRTY);
    if write && is_dirty {
        tracing::warn!(
            image = %view.file().path().display(),
            "the image was not closed cleanly; rebuilding its refcounts"
        );
        // Uses of clusters that would be refused afterwards are refused before the first write.
        let file_len = view.len().map_err(io_length)?;
        {
            let l1 = read_l1(view, header).await?;
            UseMap::compare(header, &l1, &guarded_tables(view, header, file_len).await)?;
        }
        rebuild_refcounts(view).await?;
    }
    Ok(write && is_dirty)
}

/// Returns the announcements to make before the first write: structures that this crate does not keep up to date.
pub(super) async fn announcement(view: &FileView, header: &Header) -> Announcement {
    if header.version == Version::V2 || header.autoclear.is_empty() {
        return Announcement::default();
    }
    // The engine keeps the promise of a raw data file.
    let mut keep = header.autoclear.intersection(Autoclear::RAW_EXTERNAL_DATA);
    let mut announcement = Announcement::default();
    if header.autoclear.contains(Autoclear::BITMAPS) {
        // Bitmaps that are marked as out of date are consistent with the image.
        match Announcement::read(view, header).await {
            Ok(found) => {
                keep |= Autoclear::BITMAPS;
                announcement = found;
            }
            Err(error) => {
                let image = view.file().path().display();
                tracing::warn!(%image, %error, "the image's bitmaps are malformed; the first write disowns them");
            }
        }
    }
    announcement.keep = (keep != header.autoclear).then_some(keep);
    announcement
}

/// Reads the L1 and refcount tables.
pub(super) async fn load(
    view: &FileView,
    header: &Header,
    cache: u64,
    covered_bytes: u64,
    write: bool,
) -> Result<Metadata, ImageError> {
    let geometry = header.geometry();
    let file_len = view.len().map_err(io_length)?;
    let block_device = view.file().is_block_device();

    let l1 = read_l1(view, header).await?;
    let entries = header.refcount_table_bytes() / 8;
    let mut table = vec![RefcountTableEntry::UNALLOCATED; entries as usize];
    for_each_entry(
        view,
        ClusterUse::RefcountTable,
        header.refcount_table_offset,
        entries,
        |index, raw| {
            if let Some(place) = table.get_mut(index as usize) {
                *place = RefcountTableEntry::from_raw(raw);
            }
        },
    )
    .await?;

    let uses = if write {
        let guarded = guarded_tables(view, header, file_len).await;
        UseMap::gather(header, &l1, &table, &guarded, cache)?
    } else {
        UseMap::default()
    };
    let place = TablePlace {
        offset: header.refcount_table_offset,
        clusters: u64::from(header.refcount_table_clusters),
    };
    let end = HostCluster::new(geometry.clusters_for(file_len));
    let limit = if block_device {
        geometry.host_cluster(HostOffset::new(file_len))
    } else {
        NO_LIMIT
    };
    let mut refcounts = Refcounts::new(geometry, table, place, end, limit, (cache / 4).max(256 << 10));
    refcounts.uses = uses;
    Ok(Metadata::new(
        geometry,
        l1,
        header.l1_offset,
        refcounts,
        cache,
        covered_bytes,
    ))
}

pub(super) fn io_length(source: IoError) -> ImageError {
    let what = "find the length of the file";
    ImageError::Io { what, source }
}

async fn read_l1(view: &FileView, header: &Header) -> Result<Vec<L1Entry>, ImageError> {
    let mut l1 = vec![L1Entry::default(); header.l1_entries as usize];
    let entries = u64::from(header.l1_entries);
    for_each_entry(
        view,
        ClusterUse::L1Table,
        header.l1_offset,
        entries,
        |index, raw| {
            if let Some(place) = l1.get_mut(index as usize) {
                *place = L1Entry::from_raw(raw);
            }
        },
    )
    .await?;
    Ok(l1)
}

pub(super) fn default_cache(geometry: &Geometry) -> u64 {
    let entry_bytes = geometry.l2_entry_width().bytes() as u64;
    let whole = geometry.guest_clusters().saturating_mul(entry_bytes);
    whole.clamp(1 << 20, L2_CACHE_DEFAULT_MAX_BYTES)
}
