//! Values of an entry of the snapshot table: the place of the snapshot's L1 table, and the size of its disk.

use block::file::FileView;

use super::error::{SnapshotError, SnapshotSelector};
use crate::format::l1::{L1_ENTRY_SIZE, L1_TABLE_MAX_BYTES};
use crate::format::positions::FILE_OFFSET_MAX;
use crate::format::{ClusterUse, Geometry, Header, SnapshotEntry};
use crate::image::read::for_each_snapshot;
use crate::image::references::Table;

/// Returns the place of a snapshot's L1 table in a file of `file_len` bytes.
///
/// # Errors
///
/// [`SnapshotError::Damaged`] if it can lie nowhere there.
pub(in crate::engine) fn l1_table(
    snapshot: &SnapshotEntry,
    geometry: &Geometry,
    file_len: u64,
) -> Result<Table, SnapshotError> {
    let table = Table {
        kind: ClusterUse::SnapshotL1Table,
        offset: snapshot.l1_offset,
        entries: u64::from(snapshot.l1_entries),
    };
    let is_sound = table.offset.is_aligned_to(geometry.cluster_size())
        && table.bytes() <= L1_TABLE_MAX_BYTES
        && table.end() <= file_len;
    is_sound.then_some(table).ok_or_else(|| SnapshotError::Damaged {
        what: table.kind,
        offset: table.offset.bytes(),
        reason: format!(
            "it has {} entries, and the file {file_len:#x} bytes",
            table.entries
        ),
    })
}

/// Returns the size of a snapshot's disk in bytes: `now`, the disk's, if the snapshot does not record one.
///
/// # Errors
///
/// [`SnapshotError::DiskTooLarge`] if no L1 table maps as much.
pub(in crate::engine) fn disk_size(
    snapshot: &SnapshotEntry,
    now: u64,
    geometry: &Geometry,
) -> Result<u64, SnapshotError> {
    let bytes = snapshot.disk_size().unwrap_or(now);
    let most = disk_size_max(geometry);
    match bytes <= most {
        true => Ok(bytes),
        false => Err(SnapshotError::DiskTooLarge { bytes, most }),
    }
}

/// Returns the size in bytes of the largest disk that an L1 table maps.
pub(crate) fn disk_size_max(geometry: &Geometry) -> u64 {
    let most = (L1_TABLE_MAX_BYTES / L1_ENTRY_SIZE).saturating_mul(geometry.l2_table_span());
    most.min(FILE_OFFSET_MAX)
}

/// Finds a snapshot and returns the header with the snapshot's L1 table and size in place of the disk's. The L1 table may
/// be shorter than the disk: the rest is unallocated.
pub(crate) async fn header_of(
    file: &FileView,
    header: &Header,
    selector: &SnapshotSelector,
) -> Result<Header, SnapshotError> {
    let file_len = file.len()?;
    let mut entries = Vec::new();
    for_each_snapshot(file, header, file_len, |_, entry| entries.push(entry)).await?;
    let snapshot = entries.swap_remove(selector.find(&entries)?);
    let geometry = header.geometry();
    let table = l1_table(&snapshot, &geometry, file_len)?;
    Ok(Header {
        virtual_size: disk_size(&snapshot, header.virtual_size, &geometry)?,
        l1_offset: table.offset,
        l1_entries: snapshot.l1_entries,
        ..header.clone()
    })
}
