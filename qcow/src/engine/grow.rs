//! Making a disk larger while it is served.
//!
//! What must stay true: the header's size changes last, when everything the larger disk needs is durable;
//! bytes of a backing file that is longer than the disk was never show; and of two that grow it at once, the
//! one that asks for less never makes it smaller again.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use block::IoError;

use super::{Queue, flush, load, zero};

/// Makes the disk `size_bytes` large, durably.
pub(super) async fn grow(queue: &Rc<Queue>, size_bytes: u64) -> Result<(), IoError> {
    let shared = &queue.shared;
    let old = shared.size_bytes();
    if shared.policy.read_only {
        return Err(IoError::ReadOnly);
    }
    if shared.is_corrupt() {
        return Err(IoError::Corrupt);
    }
    if size_bytes < old || size_bytes > i64::MAX as u64 {
        return Err(IoError::OutOfRange);
    }
    if size_bytes == old {
        return Ok(());
    }
    loop {
        let grown = shared.write()?.grow_l1(size_bytes);
        match grown {
            Ok(()) => break,
            Err(stuck) => load::unstick(queue, stuck).await?,
        }
    }
    let covered = shared
        .backing
        .as_ref()
        .map_or(0, |backing| backing.size.min(size_bytes));
    if covered > old {
        zero::write_zeroes(queue, old, covered - old, true).await?;
    }
    flush::flush(queue).await?;
    let before;
    {
        let mut metadata = shared.write()?;
        if size_bytes <= metadata.size_bytes && metadata.size_bytes > old.next_multiple_of(512) {
            // Somebody else has made the disk larger meanwhile, or is about to.
            return Err(IoError::OutOfRange);
        }
        before = std::mem::replace(&mut metadata.size_bytes, size_bytes);
        metadata.header_dirty = true;
    }
    if let Err(error) = flush::flush(queue).await {
        let mut metadata = shared.write()?;
        if metadata.size_bytes == size_bytes {
            metadata.size_bytes = before;
        }
        return Err(error);
    }
    shared.size_bytes.fetch_max(size_bytes, Ordering::AcqRel);
    Ok(())
}
