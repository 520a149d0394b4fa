//! Discard and write-zeroes: changes of the mapping, and zeros written where that does not do.
//!
//! What must stay true: neither ever uncovers the backing file's bytes, and a host cluster that keeps its
//! place while it is punched cannot be written until the punch has completed (the in-flight table).

use std::rc::Rc;

use block::IoError;

use super::write::{Source, change, write};
use super::{Queue, flush};
use crate::format::Version;
use crate::metadata::clear::{Clear, Cleared};
use crate::metadata::{Extent, Lookup};

/// How many drops may wait for a FLUSH before one is started for them.
const DROPS_MAX: usize = 8192;

/// Discards `len` bytes from `offset` on: whole clusters of it, the rest is left alone.
pub(super) async fn discard(queue: &Rc<Queue>, offset: u64, len: u64) -> Result<(), IoError> {
    let shared = &queue.shared;
    let policy = shared.policy;
    let uncovers = shared.geometry.version() == Version::V2 && shared.backing.is_some();
    if !policy.sparse || uncovers {
        return Ok(());
    }
    let (first, end) = whole_clusters(queue, offset, len);
    clear(
        queue,
        first,
        end,
        how(queue, policy.discard_no_unref, policy.discard_no_unref),
    )
    .await
}

/// Makes `len` bytes from `offset` on read as zeros.
pub(super) async fn write_zeroes(
    queue: &Rc<Queue>,
    offset: u64,
    len: u64,
    unmap: bool,
) -> Result<(), IoError> {
    let shared = &queue.shared;
    let policy = shared.policy;
    let end = offset + len;
    // Version 2 has no zero clusters: where there is a backing file, zeros are data.
    if shared.geometry.version() == Version::V2 && shared.backing.is_some() {
        return zero_bytes(queue, offset, end).await;
    }
    let (first, last) = whole_clusters(queue, offset, len);
    if first >= last {
        return zero_bytes(queue, offset, end).await;
    }
    let size = shared.geometry.cluster_size();
    let give_back = unmap && policy.sparse;
    let keep = !give_back || policy.discard_no_unref;
    let punch = give_back && policy.discard_no_unref;
    zero_bytes(queue, offset, first * size).await?;
    clear(queue, first, last, how(queue, keep, punch)).await?;
    zero_bytes(queue, (last * size).min(end), end).await
}

/// The clusters wholly inside the range: first, and the one after the last. The disk's last cluster counts
/// as whole if the range reaches the disk's end.
fn whole_clusters(queue: &Queue, offset: u64, len: u64) -> (u64, u64) {
    let geometry = &queue.shared.geometry;
    let size = geometry.cluster_size();
    let end = offset + len;
    let first = offset.div_ceil(size);
    let last = if end >= queue.shared.size_bytes() {
        end.div_ceil(size)
    } else {
        end / size
    };
    (first, last)
}

fn how(queue: &Queue, keep: bool, punch: bool) -> Clear {
    let size = queue.shared.geometry.cluster_size();
    let covered = queue
        .shared
        .backing
        .as_ref()
        .map_or(0, |backing| backing.size.div_ceil(size));
    Clear { keep, punch, covered }
}

/// Makes the clusters `first..end` read as zeros by their mapping.
async fn clear(queue: &Rc<Queue>, first: u64, end: u64, how: Clear) -> Result<(), IoError> {
    let mut here = first;
    let mut pressed = false;
    while here < end {
        let cleared = change(queue, |metadata| {
            let cleared = metadata.clear(here, end, how);
            pressed = metadata.drops.len() > DROPS_MAX || metadata.l2.is_dirty_past_budget();
            cleared
        })
        .await?;
        if pressed {
            flush::in_background(queue);
        }
        match cleared {
            Cleared::Until(next) => here = next,
            Cleared::Punch {
                guest,
                count,
                host,
                slice,
            } => {
                let len = count * queue.shared.geometry.cluster_size();
                let punched = queue.file.punch(host, len).await;
                let (waiters, result) = queue
                    .shared
                    .write()?
                    .punched(guest, count, slice, punched.is_ok());
                waiters.into_iter().for_each(std::task::Waker::wake);
                punched?;
                result?;
                here = guest + count;
            }
        }
    }
    Ok(())
}

/// Writes zeros to `offset..end`, which is less than a cluster or has no better way, where it does not
/// read as zeros already.
async fn zero_bytes(queue: &Rc<Queue>, offset: u64, end: u64) -> Result<(), IoError> {
    let mut here = offset;
    while here < end {
        let found = queue.shared.read()?.lookup(here, end - here);
        let len = match found {
            Lookup::Found {
                extent: Extent::Zero,
                len,
            } => len,
            Lookup::Found {
                extent: Extent::Unallocated,
                len,
            } if !queue.shared.backing_covers(here) => len,
            // The write finds out the rest for itself.
            Lookup::Found { len, .. } => {
                write(queue, &Source::Zeros, here, len).await?;
                len
            }
            _ => {
                let len = (end - here).min(queue.shared.geometry.cluster_size());
                write(queue, &Source::Zeros, here, len).await?;
                len
            }
        };
        here += len;
    }
    Ok(())
}
