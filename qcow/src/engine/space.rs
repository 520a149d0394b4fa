//! Handling of a full block device. A change waits for clusters that are being freed. If it is to wait for space at
//! all, it then waits until the device is larger or something has been discarded.
//!
//! A growing file never gets here: [`block::file`] handles its host's space.
//!
//! Invariant: a change that waits here has no operation in flight and holds no epoch guard, or the clusters it waits
//! for could never be freed. It is planned anew from its beginning.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use block::epoch::Watch;
use block::report::Action;
use block::{IoError, Request};

use super::{Queue, background, exclusive, flush, reclaim};

/// The time that a change waits for freed clusters before it fails; requests in flight may delay freeing.
const FREEING_MAX: Duration = Duration::from_secs(2);
/// Runs a change of the disk for `request`, again when clusters have become free.
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
        let task = background::enter(&queue.shared);
        request.guard = None;
        let is_room_made = is_room_made(queue).await?;
        drop(task);
        let again = is_room_made || {
            report(queue, error);
            queue.file.wait_for_space().await
        };
        request.guard = Some(exclusive::admit(queue, queue.enter()).await?);
        if !again {
            return Err(error);
        }
    }
}

/// Runs a change of the disk that is no request, again when clusters have become free. It does not wait for more
/// space: its caller gets the error.
pub(super) async fn with_what_is_freed(
    queue: &Rc<Queue>,
    mut change: impl AsyncFnMut() -> Result<(), IoError>,
) -> Result<(), IoError> {
    loop {
        match change().await {
            Err(error) if error.is_no_space() && queue.file.file().is_block_device() => {
                if !is_room_made(queue).await? {
                    return Err(error);
                }
            }
            result => return result,
        }
    }
}

/// Makes drops durable and frees their clusters. Returns true if any has become free.
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
    let mut watch = shared.epochs.watch();
    let mut timeout = pin!(queue.cx.sleep(FREEING_MAX));
    loop {
        reclaim::reclaim(queue).await?;
        {
            let freeing = shared.freeing.lock();
            if freeing.freed() != before {
                return Ok(true);
            }
            if !freeing.is_pending() {
                return Ok(false);
            }
        }
        // A request that is older than the drop has to end, or another worker's pass.
        if !is_ended_before(&mut watch, timeout.as_mut()).await? {
            return Ok(false);
        }
    }
}

/// Waits for the end of a request. Returns false if `timeout` ends first.
pub(super) async fn is_ended_before(
    watch: &mut Watch,
    mut timeout: Pin<&mut impl Future<Output = std::io::Result<()>>>,
) -> Result<bool, IoError> {
    let mut ended = pin!(watch.ended());
    poll_fn(|cx| {
        if ended.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(true));
        }
        timeout.as_mut().poll(cx).map(|slept| Ok(slept.map(|()| false)?))
    })
    .await
}

fn report(queue: &Queue, error: IoError) {
    let file = queue.file.file();
    let end = queue.file.len().unwrap_or_default();
    let consequence = "every cluster of the block device is in use: make it larger or discard something";
    let now = queue.cx.now();
    file.reports()
        .host_error(file.path(), Action::Allocate, end, error, consequence, now);
}
