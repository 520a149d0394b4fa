//! A block device that is full: a change waits for what is being freed, and if it is to wait for space at all, until
//! the device is larger or something has been discarded.
//!
//! A file that grows never gets here: its host's space is [`block::file`]'s business.
//!
//! What must stay true: a change that waits here has no operation in flight and holds no guard of an epoch, or what
//! it waits for could never be freed; it is planned anew from its beginning.

use std::rc::Rc;
use std::time::Duration;

use block::report::Action;
use block::{IoError, Request};

use super::{Queue, flush, reclaim};

/// How long the freeing of clusters is waited for before a change fails: requests in flight may delay it.
const FREEING_MAX: Duration = Duration::from_secs(2);
const STEP_MIN: Duration = Duration::from_millis(1);
/// How often it is looked for after a short read instead, before the waits in time begin: as a rule the requests that
/// delay it end within a few operations.
const LOOKS_MAX: u32 = 1000;

/// Carries out a change of the disk for `request`, again when clusters have become free.
pub(super) async fn with_space(
    queue: &Rc<Queue>,
    request: &mut Request,
    mut change: impl AsyncFnMut() -> Result<(), IoError>,
) -> Result<(), IoError> {
    loop {
        let error = match change().await {
            Err(error) if error.is_no_space() && queue.file.file().is_block_device() => error,
            result => return result,
        };
        request.guard = None;
        let again = is_room_made(queue).await? || {
            report(queue, error);
            queue.file.wait_for_space().await
        };
        request.guard = Some(queue.enter());
        if !again {
            return Err(error);
        }
    }
}

/// Makes durable what was dropped, and frees it. Returns true if anything has become free.
async fn is_room_made(queue: &Rc<Queue>) -> Result<bool, IoError> {
    let shared = &queue.shared;
    let before = shared.freeing.lock().freed();
    let is_dropping = {
        let metadata = shared.read()?;
        metadata.flushing || !metadata.drops.is_empty()
    };
    if !is_dropping && !shared.freeing.lock().is_pending() {
        return Ok(false);
    }
    flush::flush(queue).await?;
    let mut step = STEP_MIN;
    let mut looks = 0;
    loop {
        reclaim::reclaim(queue).await?;
        let is_pending = shared.freeing.lock().is_pending();
        if shared.freeing.lock().freed() != before {
            return Ok(true);
        }
        if !is_pending || step > FREEING_MAX / 2 {
            return Ok(false);
        }
        // A request that is older than the drop has to end, or another worker's pass.
        if looks < LOOKS_MAX {
            looks += 1;
            // Takes as long as the host takes for anything; what it says does not matter.
            drop(queue.file.read_at(0, 512).await);
        } else {
            queue.cx.sleep(step).await?;
            step *= 2;
        }
    }
}

fn report(queue: &Queue, error: IoError) {
    let file = queue.file.file();
    let end = queue.file.len().unwrap_or_default();
    let consequence = "every cluster of the block device is in use: make it larger or discard something";
    let now = queue.cx.now();
    file.reports()
        .host_error(file.path(), Action::Allocate, end, error, consequence, now);
}
