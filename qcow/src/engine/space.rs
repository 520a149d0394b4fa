//! Writes that need space while clusters wait to be freed: they wait for those.
//!
//! On a block device, or on a host, that is full a change waits for clusters that are being freed. If it is to wait for
//! space at all, it then waits until the device is larger or something has been discarded. (In a growing file
//! [`block::file`] handles its host's space.)
//!
//! In a file that grows a write waits, too, if the file would become longer while much space waits to be freed. That
//! wait is bounded, and what fails it does not fail the write: then the file grows.
//!
//! Invariant: a change that waits here has no operation in flight and holds no epoch guard, or the clusters it waits
//! for could never be freed. It is planned anew from its beginning.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use block::report::Action;
use block::request::check_range;
use block::{IoError, Request};

use super::{Queue, background, exclusive, flush, reclaim};
use crate::metadata::Growth;

/// The time that a change waits for freed clusters before it fails; requests in flight may delay freeing.
const FREEING_MAX: Duration = Duration::from_secs(2);
/// The time that a write waits for freed clusters before the file grows.
const GROWTH_MAX: Duration = Duration::from_millis(500);
/// The number of waits of one write before the file grows: others may have taken what was freed.
const GROWTH_WAITS_MAX: u32 = 8;

/// Runs a change of the disk for `request`, again when clusters have become free.
pub(super) async fn with_space(
    queue: &Rc<Queue>,
    request: &mut Request,
    mut change: impl AsyncFnMut(Growth) -> Result<(), IoError>,
) -> Result<(), IoError> {
    let is_device = queue.file.file().is_block_device();
    let mut waits = 0;
    loop {
        let growth = if is_device || waits >= GROWTH_WAITS_MAX {
            Growth::Free
        } else {
            Growth::Held
        };
        let error = match change(growth).await {
            Err(error) if error.is_no_space() => error,
            result => return result,
        };
        let task = background::enter(&queue.shared);
        request.guard = None;
        let time_max = if growth == Growth::Held {
            GROWTH_MAX
        } else {
            FREEING_MAX
        };
        let is_room_made = match is_room_made(queue, time_max).await {
            Err(error) if is_device => return Err(error),
            made => made.unwrap_or(false),
        };
        drop(task);
        let again = is_room_made || growth == Growth::Held || {
            is_device && {
                report(queue, error);
                queue.file.wait_for_space().await
            }
        };
        if growth == Growth::Held {
            waits += 1;
            if !is_room_made {
                waits = GROWTH_WAITS_MAX;
                queue.shared.write()?.returning.give_up();
            }
        }
        request.guard = Some(exclusive::admit(queue, queue.enter()).await?);
        // What ran alone meanwhile may have made the disk smaller.
        check_range(request.offset, request.len, queue.shared.size_bytes())?;
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
            Err(error) if error.is_no_space() => {
                if !is_room_made(queue, FREEING_MAX).await? {
                    return Err(error);
                }
            }
            result => return result,
        }
    }
}

/// Makes drops durable and frees their clusters. Returns true if any has become free.
async fn is_room_made(queue: &Rc<Queue>, time_max: Duration) -> Result<bool, IoError> {
    let shared = &queue.shared;
    let before = shared.freeing.lock().freed();
    let (is_dropping, is_mostly_dropped) = {
        let metadata = queue.metadata()?;
        (!metadata.drops.is_empty(), metadata.is_mostly_dropped())
    };
    if is_dropping && (is_mostly_dropped || !shared.freeing.lock().is_pending()) {
        flush::flush(queue).await?;
    } else {
        // Its drops are as good as those that another round would take.
        flush::end_of_running(shared).await;
    }
    let mut watch = shared.epochs.watch();
    let mut timeout = pin!(queue.cx.sleep(time_max));
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
        if !is_ended_before(watch.ended(), timeout.as_mut()).await? {
            return Ok(false);
        }
    }
}

/// Waits for the end of a request, or of other work. Returns false if `timeout` ends first.
pub(super) async fn is_ended_before(
    ended: impl Future<Output = ()>,
    mut timeout: Pin<&mut impl Future<Output = std::io::Result<()>>>,
) -> Result<bool, IoError> {
    let mut ended = pin!(ended);
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
