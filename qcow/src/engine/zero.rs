//! Discard and write-zeroes: changes of the mapping, and zeros written where the mapping cannot express them.
//!
//! Invariants:
//!
//! - Neither ever uncovers the backing file's bytes.
//! - A host cluster that stays mapped while it is punched cannot be written until the punch has completed (the
//!   in-flight table).

use std::ops::Range;
use std::rc::Rc;

use block::IoError;

use super::write::{Source, change, write};
use super::{Queue, flush, idle};
use crate::format::{GuestCluster, GuestOffset, HostOffset, Version};
use crate::invariant::invariant;
use crate::metadata::clear::{Clear, Cleared, HostBytes};
use crate::metadata::{Extent, Growth, Lookup};

/// The number of drops that may wait for a FLUSH before one is started for them.
const DROPS_MAX: usize = 8192;

/// Discards the whole clusters in the `len` bytes from `offset` on. Partial clusters are left alone.
pub(super) async fn discard(queue: &Rc<Queue>, offset: GuestOffset, len: u64) -> Result<(), IoError> {
    if discards(queue) {
        clear(queue, offset, offset + len, giving_back(queue)).await?;
    }
    Ok(())
}

/// Returns true if a discard changes anything.
fn discards(queue: &Queue) -> bool {
    let shared = &queue.shared;
    let uncovers = shared.geometry.version() == Version::V2 && shared.backing.is_some();
    shared.policy.sparse && !uncovers
}

/// Returns the bytes of the clusters that a discard of `offset..end` may change; the disk may grow before it does.
pub(super) fn discarded(queue: &Queue, offset: GuestOffset, end: GuestOffset) -> Range<GuestOffset> {
    let size = queue.shared.geometry.cluster_size();
    let start = GuestOffset::new(offset.bytes().next_multiple_of(size));
    let end = match end.bytes() >= queue.shared.size_bytes() {
        true => end,
        false => GuestOffset::new(end.bytes() / size * size),
    };
    match discards(queue) {
        true => start..end.max(start),
        false => offset..offset,
    }
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
    let how = if unmap && policy.sparse {
        giving_back(queue)
    } else {
        keeping(queue)
    };
    let size = shared.geometry.cluster_size();
    let head_end = GuestOffset::new(offset.bytes().next_multiple_of(size)).min(end);
    zero_part(queue, offset, head_end).await?;
    let cleared = clear(queue, head_end, end, how).await?;
    zero_part(queue, cleared.clamp(head_end, end), end).await
}

/// Makes a part of one cluster read as zeros: whole subclusters by their mapping.
async fn zero_part(queue: &Rc<Queue>, offset: GuestOffset, end: GuestOffset) -> Result<(), IoError> {
    let geometry = queue.shared.geometry;
    // The bits of subclusters change nothing in a raw data file, which must have the zeros too.
    if !geometry.has_subclusters() || is_raw(queue) || offset >= end {
        return zero_bytes(queue, offset, end).await;
    }
    let size = geometry.subcluster_size();
    let covered = keeping(queue).covered;
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

/// Returns true if the data file has to read as the disk does.
fn is_raw(queue: &Queue) -> bool {
    let data = &queue.shared.data_file;
    data.as_ref().is_some_and(|data| data.is_raw)
}

/// Returns how to clear clusters whose space the host may have back.
fn giving_back(queue: &Queue) -> Clear {
    // In a data file each guest cluster keeps its place.
    let keep = queue.shared.policy.discard_no_unref || queue.shared.data_file.is_some();
    // Punched before the entry says so, encrypted clusters would read as garbage after a cut: their space stays.
    let bytes = if is_raw(queue) {
        HostBytes::Zeroed { sparse: true }
    } else if keep && queue.shared.encryption.is_plain() {
        HostBytes::Punched
    } else {
        HostBytes::Kept
    };
    how(queue, keep, bytes)
}

/// Returns how to clear clusters whose space stays reserved.
fn keeping(queue: &Queue) -> Clear {
    let bytes = if is_raw(queue) {
        HostBytes::Zeroed { sparse: false }
    } else {
        HostBytes::Kept
    };
    how(queue, true, bytes)
}

fn how(queue: &Queue, keep: bool, host_bytes: HostBytes) -> Clear {
    let shared = &queue.shared;
    let bytes = shared.backing.as_ref().map_or(0, |backing| backing.size);
    Clear {
        keep,
        bytes: host_bytes,
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
                let punched = punch(queue, how.bytes, host, count).await;
                let (waiters, result) =
                    queue
                        .shared
                        .write()?
                        .punched(guest, count, slice, how.bytes, punched.is_ok());
                drop(waiters);
                punched?;
                result?;
                here = guest + count;
            }
        }
    }
    Ok(geometry.guest_offset(here))
}

/// Returns the space of `count` clusters from `host` on to the host, or makes them zeros.
async fn punch(queue: &Queue, how: HostBytes, host: HostOffset, count: u64) -> Result<(), IoError> {
    let shared = &queue.shared;
    let mut len = count * shared.geometry.cluster_size();
    if shared.data_file.is_some() {
        // It ends with the disk, which is as long as the guest can know.
        len = len.min(shared.size_bytes().saturating_sub(host.bytes()));
    }
    match how {
        HostBytes::Zeroed { sparse } => queue.data.zero(host, len, sparse).await,
        HostBytes::Punched | HostBytes::Kept => queue.data.punch(host, len).await.map(drop),
    }
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
