//! COPIED flags, made to agree with the references that were counted.
//!
//! Flags only become truer here, one sector at a time. None is cleared while its cluster's count on disk is too low:
//! whoever writes next would copy the cluster and free what others refer to.

use block::file::FileView;

use super::pen::write;
use super::{Extent, RepairError};
use crate::format::{L1Entry, L2Entry, L2Mapping};
use crate::image::check::{Subject, Walk};
use crate::image::counts::CountMap;
use crate::image::read::read;

/// Sets each COPIED flag that is reached through the active L1 table to agree with the counts. All counts that were
/// too low have been raised, unless only leaks are mended: then their clusters' flags stay as they are.
pub(super) async fn fix_copied_flags(walk: &mut Walk<'_>, extent: Extent) -> Result<(), RepairError> {
    let Subject {
        file,
        header,
        geometry,
        ..
    } = *walk.subject;
    walk.hush();
    let window = walk.window.clone();
    // Lent, as a copy would take as much again. Listing tables does not need them.
    let none = || CountMap::new(window.clone());
    let expected = std::mem::replace(&mut walk.expected, none());
    let found = std::mem::replace(&mut walk.on_disk, none());
    let on_disk = (extent == Extent::Leaks).then_some(&found);
    // Whether the cluster has one reference, if this pass knows.
    let is_single = |host: u64| {
        let cluster = host / geometry.cluster_size();
        let right = expected.get(cluster);
        let is_low = on_disk.is_some_and(|on_disk| on_disk.get(cluster) < right);
        (window.contains(&cluster) && !is_low).then_some(right == 1)
    };
    let fix_l1 = |raw: u64| {
        let entry = L1Entry::from_raw(raw);
        let known = entry.decode(&geometry).ok().flatten();
        let single = known.and_then(|table| is_single(table.host.bytes()));
        single.map_or(raw, |single| entry.with_copied(single).raw())
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
            let single = is_single(host.bytes());
            single.map_or(raw, |single| L2Entry::from_raw(raw).with_copied(single).raw())
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
    let mut after = None;
    loop {
        let tables = walk.tables_behind(after).await;
        for (&table_at, references) in &tables {
            let (what, len) = ("an L2 table", geometry.cluster_size());
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

/// Replaces each entry of a table by `fix` of it, and writes the table if that changed any.
async fn fix_entries(
    file: &FileView,
    what: &'static str,
    offset: u64,
    len: u64,
    fix: impl Fn(u64) -> u64,
) -> Result<(), RepairError> {
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
