//! COPIED flags, made to agree with the references that were counted; and compressed clusters' bitmaps, which must be empty.
//!
//! A flag only ever changes to its right value, one sector at a time. None is cleared while its cluster's count on
//! disk is too low: the next writer would copy the cluster and free data that others refer to.

use block::file::FileView;

use super::writer::write;
use super::{RepairError, RepairScope};
use crate::format::{ClusterUse, L1Entry, L2Entry, L2TableMut, SubclusterBitmap};
use crate::image::check::{Subject, Walk};
use crate::image::counts::CountMap;
use crate::image::read::read;

/// Sets each COPIED flag that is reached through the active L1 table to agree with the counts. All counts that were
/// too low have been raised, unless only leaks are mended: then their clusters' flags stay as they are.
pub(super) async fn fix_copied_flags(walk: &mut Walk<'_>, scope: RepairScope) -> Result<(), RepairError> {
    let Subject {
        file,
        header,
        geometry,
        ..
    } = *walk.subject;
    walk.stop_reporting();
    let window = walk.window.clone();
    // Lent, as a copy would take as much again. Listing tables does not need them.
    let none = || CountMap::new(window.clone());
    let expected = std::mem::replace(&mut walk.expected, none());
    let found = std::mem::replace(&mut walk.on_disk, none());
    let on_disk = (scope == RepairScope::Leaks).then_some(&found);
    // `Some(true)` if the cluster has one reference; `None` if this pass does not know.
    let is_single = |host: u64| {
        let cluster = host / geometry.cluster_size();
        let right = expected.get(cluster);
        let is_low = on_disk.is_some_and(|on_disk| on_disk.get(cluster) < right);
        (window.contains(&cluster) && !is_low).then_some(right == 1)
    };
    let fix_l1 = |bytes: &mut [u8]| {
        let mut changed = false;
        for raw in bytes.as_chunks_mut::<8>().0 {
            let old = L1Entry::from_raw(u64::from_be_bytes(*raw));
            let known = old.decode(&geometry).ok().flatten();
            let single = known.and_then(|table| is_single(table.host.bytes()));
            let new = single.map_or(old, |single| old.with_copied(single));
            changed |= new != old;
            *raw = new.raw().to_be_bytes();
        }
        changed
    };
    // Other tables' flags mean nothing, except for those that compressed clusters must not have.
    let compressed = |entry: L2Entry| {
        if entry.is_compressed() {
            entry
                .with_copied(false)
                .with_bitmap(SubclusterBitmap::UNALLOCATED)
        } else {
            entry
        }
    };
    let fix_compressed = |bytes: &mut [u8]| L2TableMut::new(bytes, &geometry).update(compressed);
    let fix_l2 = |bytes: &mut [u8]| {
        L2TableMut::new(bytes, &geometry).update(|entry| {
            let mapping = entry.decode(&geometry).ok();
            match mapping.and_then(|mapping| mapping.cluster()) {
                // A place in a data file has no other user.
                Some(_) if geometry.has_data_file() => entry.with_copied(true),
                Some((host, _)) => {
                    let single = is_single(host.bytes());
                    single.map_or(entry, |single| entry.with_copied(single))
                }
                None => compressed(entry),
            }
        })
    };
    const PART: u64 = 256 << 10;
    let (l1_at, l1_bytes) = (header.l1_offset.bytes(), header.l1_bytes());
    let mut done = 0;
    while done < l1_bytes {
        let len = (l1_bytes - done).min(PART);
        fix_entries(file, ClusterUse::L1Table, l1_at + done, len, fix_l1).await?;
        done += len;
    }
    let mut after = None;
    loop {
        let tables = walk.tables_behind(after).await;
        for (&table_at, references) in &tables {
            let (what, len) = (ClusterUse::L2Table, geometry.cluster_size());
            if walk.is_in_hole(table_at, len) {
                continue;
            }
            if references.active > 0 {
                fix_entries(file, what, table_at, len, fix_l2).await?;
            } else {
                fix_entries(file, what, table_at, len, fix_compressed).await?;
            }
        }
        after = tables.last_key_value().map(|(&last, _)| last);
        if after.is_none() {
            break;
        }
    }
    (walk.expected, walk.on_disk) = (expected, found);
    Ok(())
}

/// Lets `fix` change the entries of a table, and writes the table if `fix` returns true.
async fn fix_entries(
    file: &FileView,
    what: ClusterUse,
    offset: u64,
    len: u64,
    fix: impl Fn(&mut [u8]) -> bool,
) -> Result<(), RepairError> {
    let mut table = read(file, what, offset, len as usize).await?;
    if fix(&mut table) {
        write(file, what, offset, &table).await?;
    }
    Ok(())
}
