//! Discard and write-zeroes: changes of the mapping, and zeros written where the mapping cannot express them.
//!
//! Invariants:
//!
//! - Neither ever uncovers the backing file's bytes.
//! - A host cluster that stays mapped while it is punched cannot be written until the punch has completed (the
//!   in-flight table).

use std::rc::Rc;

use block::IoError;

use super::write::{Source, change, write};
use super::{Queue, flush, idle};
use crate::format::{GuestCluster, GuestOffset, Version};
use crate::invariant::invariant;
use crate::metadata::clear::{Clear, Cleared};
use crate::metadata::{Extent, Growth, Lookup};

/// The number of drops that may wait for a FLUSH before one is started for them.
const DROPS_MAX: usize = 8192;

/// Discards the whole clusters in the `len` bytes from `offset` on. Partial clusters are left alone.
pub(super) async fn discard(queue: &Rc<Queue>, offset: GuestOffset, len: u64) -> Result<(), IoError> {
    let shared = &queue.shared;
    let policy = shared.policy;
    let uncovers = shared.geometry.version() == Version::V2 && shared.backing.is_some();
    if !policy.sparse || uncovers {
        return Ok(());
    }
    let keep = policy.discard_no_unref;
    clear(queue, offset, offset + len, how(queue, keep, keep)).await?;
    Ok(())
}

/// Makes `len` bytes from `offset` on read as zeros.
pub(super) async fn write_zeroes(
    queue: &Rc<Queue>,
    offset: GuestOffset,
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
    let give_back = unmap && policy.sparse;
    let keep = !give_back || policy.discard_no_unref;
    let punch = give_back && policy.discard_no_unref;
    let size = shared.geometry.cluster_size();
    let head_end = GuestOffset::new(offset.bytes().next_multiple_of(size)).min(end);
    zero_part(queue, offset, head_end).await?;
    let cleared = clear(queue, head_end, end, how(queue, keep, punch)).await?;
    zero_part(queue, cleared.clamp(head_end, end), end).await
}

/// Makes a part of one cluster read as zeros: whole subclusters by their mapping.
async fn zero_part(queue: &Rc<Queue>, offset: GuestOffset, end: GuestOffset) -> Result<(), IoError> {
    let geometry = queue.shared.geometry;
    if !geometry.has_subclusters() || offset >= end {
        return zero_bytes(queue, offset, end).await;
    }
    let size = geometry.subcluster_size();
    let covered = how(queue, true, false).covered;
    let mut pressed = false;
    let cleared = change(queue, |metadata| {
        // Evaluated each time, as for clusters.
        let to = if end.bytes() >= metadata.size_bytes & !511 {
            end.bytes().next_multiple_of(size)
        } else {
            end.bytes() / size * size
        };
        let bytes = GuestOffset::new(offset.bytes().next_multiple_of(size))..GuestOffset::new(to);
        let is_cleared = !bytes.is_empty() && metadata.clear_subclusters(&bytes, covered)?;
        pressed = metadata.l2.is_dirty_past_budget();
        Ok(is_cleared.then_some(bytes))
    })
    .await?;
    if pressed {
        flush::in_background(queue);
    }
    let Some(cleared) = cleared else {
        return zero_bytes(queue, offset, end).await;
    };
    zero_bytes(queue, offset, cleared.start).await?;
    zero_bytes(queue, cleared.end.min(end), end).await
}

fn how(queue: &Queue, keep: bool, punch: bool) -> Clear {
    let shared = &queue.shared;
    let bytes = shared.backing.as_ref().map_or(0, |backing| backing.size);
    Clear {
        keep,
        punch,
        covered: GuestCluster::new(shared.geometry.clusters_for(bytes)),
    }
}

/// Makes the clusters that lie wholly in `offset..end` read as zeros by their mapping. The disk's last cluster counts
/// as whole if the range reaches the disk's end. Returns the end of the last one, which may be past `end`.
async fn clear(
    queue: &Rc<Queue>,
    offset: GuestOffset,
    end: GuestOffset,
    how: Clear,
) -> Result<GuestOffset, IoError> {
    let geometry = queue.shared.geometry;
    let mut here = GuestCluster::new(geometry.clusters_for(offset.bytes()));
    let (mut pressed, mut drops) = (false, false);
    while geometry.guest_offset(here) < end {
        let cleared = change(queue, |metadata| {
            // Evaluated each time: the disk may grow meanwhile, and then the rest of the cluster is the guest's.
            let reaches = end.bytes() >= metadata.size_bytes & !511;
            let last = if reaches {
                GuestCluster::new(geometry.clusters_for(end.bytes()))
            } else {
                geometry.guest_cluster(end)
            };
            if here >= last {
                return Ok(None);
            }
            let cleared = metadata.clear(here, last, how);
            drops = !metadata.drops.is_empty();
            pressed = metadata.drops.len() > DROPS_MAX
                || metadata.l2.is_dirty_past_budget()
                || metadata.wants_return();
            cleared.map(Some)
        })
        .await?;
        if drops {
            idle::return_later(queue);
        }
        if pressed {
            flush::in_background(queue);
        }
        match cleared {
            None => break,
            Some(Cleared::Until(next)) => {
                invariant!(next > here, "nothing was cleared from {here} on");
                here = next;
            }
            Some(Cleared::Punch {
                guest,
                count,
                host,
                slice,
            }) => {
                let punched = queue.data.punch(host, count * geometry.cluster_size()).await;
                let (waiters, result) = queue
                    .shared
                    .write()?
                    .punched(guest, count, slice, punched.is_ok());
                drop(waiters);
                punched?;
                result?;
                here = guest + count;
            }
        }
    }
    Ok(geometry.guest_offset(here))
}

/// Writes zeros to `offset..end` where it does not read as zeros already. The range is less than a cluster or has no
/// cheaper way.
async fn zero_bytes(queue: &Rc<Queue>, offset: GuestOffset, end: GuestOffset) -> Result<(), IoError> {
    let mut here = offset;
    while here < end {
        let found = queue.metadata()?.lookup(here, end - here);
        let len = match found {
            Lookup::Found {
                extent: Extent::Zero,
                len,
            } => len,
            Lookup::Found {
                extent: Extent::Unallocated,
                len,
            } => {
                // Past the backing file's last sector these are zeros.
                let backed = queue.shared.backed(here, len).next_multiple_of(512).min(len);
                if backed > 0 {
                    write(queue, &Source::Zeros, here, backed, Growth::Free).await?;
                    backed
                } else {
                    len
                }
            }
            // The write determines the rest for itself.
            Lookup::Found { len, .. } => {
                write(queue, &Source::Zeros, here, len, Growth::Free).await?;
                len
            }
            _ => {
                let len = (end - here).min(queue.shared.geometry.cluster_size());
                write(queue, &Source::Zeros, here, len, Growth::Free).await?;
                len
            }
        };
        here += len;
    }
    Ok(())
}
