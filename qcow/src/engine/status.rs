//! Block status: the mapping as tools see it, down the whole chain ([`block::status`]).
//!
//! Nothing but tables is read. A cluster that is being remapped has its old status; only an operation that runs alone
//! ([`exclusive`](super::exclusive)) is waited for.

use std::rc::Rc;

use block::IoError;
use block::request::check_range;
use block::status::{Content, StatusRange, StatusRanges};

use super::{Queue, exclusive, load};
use crate::format::GuestOffset;
use crate::metadata::Extent;

/// The most extents that one answer looks at. Neighbours of the same content become one range, so the number of ranges does
/// not bound the tables that an image makes it read.
const LOOKUPS_MAX: usize = 4096;

/// Returns the origin of `len` bytes from `offset` on, as far as one answer goes.
pub(super) async fn status(queue: &Rc<Queue>, offset: u64, len: u64) -> Result<Vec<StatusRange>, IoError> {
    check_range(offset, len, queue.shared.size_bytes())?;
    let _guard = exclusive::admit(queue, queue.enter()).await?;
    let mut ranges = StatusRanges::default();
    let mut here = GuestOffset::new(offset);
    let to = here + len;
    for _ in 0..LOOKUPS_MAX {
        if here >= to || ranges.is_full() {
            break;
        }
        let (extent, len) = load::extent(queue, here, to - here).await?;
        let content = match extent {
            Extent::Data { at, .. } => Content::Data { at: Some(at.bytes()) },
            Extent::Zero => Content::Zero,
            Extent::Compressed(_) => Content::Compressed,
            Extent::Unallocated => {
                here += unallocated(queue, here, len, &mut ranges).await?;
                continue;
            }
        };
        ranges.push(StatusRange {
            offset: here.bytes(),
            len,
            content,
            depth: 0,
        });
        here += len;
    }
    Ok(ranges.into_vec())
}

/// Appends the status of bytes that this image does not have: that of the image below, as far as it reaches. Returns the
/// number of bytes it covers.
async fn unallocated(
    queue: &Queue,
    offset: GuestOffset,
    len: u64,
    ranges: &mut StatusRanges,
) -> Result<u64, IoError> {
    let backed = queue.shared.backed(offset, len);
    let Some((backing, _)) = queue.backing.as_ref().filter(|_| backed > 0) else {
        ranges.push(StatusRange {
            offset: offset.bytes(),
            len,
            content: Content::Absent,
            depth: 0,
        });
        return Ok(len);
    };
    let mut covered = 0;
    for range in backing.status(offset.bytes(), backed).await? {
        if ranges.is_full() {
            break;
        }
        covered += range.len;
        ranges.push(StatusRange {
            depth: range.depth.saturating_add(1),
            ..range
        });
    }
    // A disk that covers nothing would be asked for ever.
    if covered == 0 {
        Err(IoError::Unsupported)
    } else {
        Ok(covered)
    }
}
