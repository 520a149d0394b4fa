//! Growth of a disk while it is served.
//!
//! Invariants:
//!
//! - The header's size changes last, after everything that the larger disk needs is durable.
//! - The new part reads as zeros, whatever lies past the old end: a longer backing file, the rest of the last
//!   cluster, or mappings that a restored snapshot with VM state left there.
//! - One task at a time makes a disk larger, because it clears what lies past the end at its start.

use std::rc::Rc;

use block::IoError;

use super::{Queue, announce, flush, load, space, zero};
use crate::format::{GuestOffset, HostOffset, Version};
use crate::metadata::Extent;
use crate::metadata::refcounts::NO_SPACE;

/// Makes the disk `size_bytes` large, durably.
pub(super) async fn grow(queue: &Rc<Queue>, size_bytes: u64) -> Result<(), IoError> {
    let shared = &queue.shared;
    if shared.policy.read_only {
        return Err(IoError::ReadOnly);
    }
    let _turn = shared.changes.take().await;
    if shared.later.is_stopped() {
        return Err(IoError::Cancelled);
    }
    if shared.is_corrupt() {
        return Err(IoError::Corrupt);
    }
    let old = shared.size_bytes();
    if size_bytes < old || size_bytes > i64::MAX as u64 {
        return Err(IoError::OutOfRange);
    }
    if size_bytes == old {
        return Ok(());
    }
    // Such snapshots do not record the disk's size.
    if shared.geometry.version() == Version::V2 && shared.header.snapshot_count() > 0 {
        let image = shared.file.path().display();
        tracing::error!(%image, "an image of version 2 with snapshots does not grow: they do not record the disk's size");
        return Err(IoError::Unsupported);
    }
    announce::resize(queue, size_bytes).await?;
    space::with_what_is_freed(queue, async || enlarge(queue, old, size_bytes).await).await
}

/// Makes the disk larger, or leaves its size unchanged.
async fn enlarge(queue: &Rc<Queue>, old: u64, size_bytes: u64) -> Result<(), IoError> {
    let shared = &queue.shared;
    let mapped = mapped_end(queue)?;
    loop {
        let grown = shared.write()?.grow_l1(size_bytes);
        match grown {
            Ok(()) => break,
            Err(stuck) => load::unstick(queue, stuck).await?,
        }
    }
    hide(
        queue,
        GuestOffset::new(old),
        mapped.min(GuestOffset::new(size_bytes)),
    )
    .await?;
    extend_data_file(queue, old, size_bytes).await?;
    flush::flush(queue).await?;
    let before;
    {
        let mut metadata = shared.write()?;
        before = std::mem::replace(&mut metadata.size_bytes, size_bytes);
        metadata.header_dirty = true;
    }
    if let Err(error) = flush::flush(queue).await {
        shared.write()?.size_bytes = before;
        return Err(error);
    }
    shared.set_size_bytes(size_bytes);
    Ok(())
}

/// Makes the data file, if there is one, as long as the larger disk, durably. What lies past the disk's old end reads as
/// zeros then: all of it in a raw data file, in others the rest of the last cluster, which is mapped with its beginning.
async fn extend_data_file(queue: &Queue, old: u64, size_bytes: u64) -> Result<(), IoError> {
    let Some(data) = &queue.shared.data_file else {
        return Ok(());
    };
    let file = queue.data.file();
    let len = file.len()?;
    let mapped = if data.is_raw {
        size_bytes
    } else {
        old.next_multiple_of(queue.shared.geometry.cluster_size())
    };
    let stale = old..len.min(mapped).min(size_bytes);
    if !stale.is_empty() {
        queue
            .data
            .zero(HostOffset::new(stale.start), stale.end - stale.start, true)
            .await?;
    }
    if len < size_bytes {
        if data.file.is_block_device() {
            let path = data.file.path().display();
            tracing::error!(data_file = %path, len, size_bytes, "the data file is a block device that is smaller than the disk is to be");
            return Err(NO_SPACE);
        }
        file.set_len(size_bytes).await?;
    }
    file.sync().await
}

/// Returns the end of the guest range that the L1 table or the backing file may cover.
fn mapped_end(queue: &Queue) -> Result<GuestOffset, IoError> {
    let shared = &queue.shared;
    let entries = shared.read()?.l1_entries() as u64;
    let covered = shared.backing.as_ref().map_or(0, |backing| backing.size);
    let mapped = entries.saturating_mul(shared.geometry.l2_table_span());
    Ok(GuestOffset::new(mapped.max(covered)))
}

/// Makes `from..to`, which lies past the disk's end, read as zeros.
async fn hide(queue: &Rc<Queue>, from: GuestOffset, to: GuestOffset) -> Result<(), IoError> {
    // As for a request: the guest may discard a cluster while it is written in place here.
    let _guard = queue.enter();
    let mut here = from;
    while here < to {
        let (extent, len) = load::extent(queue, here, to - here).await?;
        let hidden = match extent {
            Extent::Zero => true,
            Extent::Unallocated => !queue.shared.backing_covers(here),
            Extent::Data { .. } | Extent::Compressed(_) => false,
        };
        if !hidden {
            zero::write_zeroes(queue, here, len, true).await?;
        }
        here += len;
    }
    Ok(())
}
