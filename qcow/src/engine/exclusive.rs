//! Operations that run alone on an image: its queues are held off, nothing of it is under way, and everything is durable.
//!
//! [`begin`] waits until no growth, close or other such operation runs, holds the queues off, waits for the requests in
//! flight, and writes back and frees what they left. Requests that come later wait as tasks, and their workers go on.
//! The queues go on when the section is dropped, however its task ends. [`pause`] only waits for the requests in flight.
//!
//! Invariant: a request enters the epoch before it looks, under the metadata lock, if queues are held off; the hold is set
//! under the same lock. So either the request sees the hold, or the section sees the request and waits for its end. The
//! look is a plain load next to the mapping, under a lock that a request takes anyway.

use std::fmt;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use block::IoError;
use block::canary::{Rule, broken};
use block::delay::HoldOff;
use block::epoch::{EpochGuard, is_past_grace};
use block::sync::Monitor;

use super::{Queue, Shared, background, flush, space};
use crate::invariant::invariant;

/// The time that requests in flight have to end, and then background work. They may wait for space or for an answer of
/// the host, and reads would wait with them.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// The hold on an image's queues, for tasks that wait for its end. [`Metadata`](crate::metadata::Metadata) has the flag
/// that requests look at.
pub(super) type Hold = Monitor<bool>;

/// The reason that an operation cannot run alone.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Refused {
    /// Requests in flight, or background work, do not end.
    Busy,
    /// The image is closed, and may be another program's.
    Closed,
    /// A write or sync failed, or the image does not accept changes.
    Failed(IoError),
}

impl From<IoError> for Refused {
    fn from(error: IoError) -> Self {
        Self::Failed(error)
    }
}

/// A section in which an operation runs alone. The queues go on when it is dropped.
#[must_use = "the queues go on when it is dropped"]
pub(super) struct Exclusive<'a, Turn> {
    shared: &'a Shared,
    /// Held until the queues go on.
    _turn: Turn,
    /// Its writes do not wait for space on the host: reads would wait with them.
    no_waits: Option<HoldOff>,
}

impl<Turn> fmt::Debug for Exclusive<'_, Turn> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exclusive").finish_non_exhaustive()
    }
}

impl<'a, Turn> Exclusive<'a, Turn> {
    /// Holds the queues off.
    fn hold(shared: &'a Shared, turn: Turn) -> Result<Self, IoError> {
        shared.hold.with(|is_held| {
            invariant!(!*is_held, "two operations run alone at once");
            *is_held = true;
        });
        // From here on the drop ends the hold.
        let section = Self {
            shared,
            _turn: turn,
            no_waits: None,
        };
        shared.write()?.held_off = true;
        Ok(section)
    }
}

impl<Turn> Drop for Exclusive<'_, Turn> {
    fn drop(&mut self) {
        // With a poisoned lock, requests fail when they look again.
        if let Ok(mut metadata) = self.shared.write() {
            metadata.held_off = false;
        }
        self.shared.hold.change(|is_held| *is_held = false);
    }
}

/// Returns when the caller runs alone, with all data and metadata durable.
///
/// # Errors
///
/// [`Refused`]; then the queues have gone on.
pub(super) async fn begin<'a>(queue: &'a Rc<Queue>) -> Result<Exclusive<'a, impl Sized + use<'a>>, Refused> {
    let turn = turn(queue).await?;
    alone(queue, turn).await
}

/// As [`begin`], for a caller that has the turn.
pub(super) async fn alone<Turn>(queue: &Rc<Queue>, turn: Turn) -> Result<Exclusive<'_, Turn>, Refused> {
    let shared = &*queue.shared;
    let mut section = Exclusive::hold(shared, turn)?;
    drain(queue).await?;
    // On a block device writes need no space, and requests may be waiting for clusters, which this would end.
    if !shared.file.is_block_device() {
        section.no_waits = Some(shared.file.hold_off());
    }
    // Also tasks that wait for freed clusters, which no request of theirs counts for.
    if !background::is_ended_within(queue, Some(DRAIN_MAX)).await? {
        return Err(Refused::Busy);
    }
    loop {
        if !flush::settle(queue, Some(DRAIN_MAX)).await? {
            return Err(Refused::Busy);
        }
        // A request that looks and waits has a guard for a moment. It may have held clusters back that were freed after
        // the last FLUSH.
        if queue.metadata()?.is_clean() {
            break;
        }
    }
    if shared.is_corrupt() {
        return Err(IoError::Corrupt.into());
    }
    Ok(section)
}

/// Waits for the turn to change the image as a whole, and takes it.
///
/// # Errors
///
/// [`Refused`], for an image that is closed, only read, or not written any more: after an operation that failed at the header either
/// of two states may be in force, and a later write, of the header above all, would mix them.
pub(super) async fn turn<'a>(queue: &'a Rc<Queue>) -> Result<impl Sized + use<'a>, Refused> {
    let shared = &*queue.shared;
    if shared.policy.read_only {
        return Err(IoError::ReadOnly.into());
    }
    let turn = shared.changes.take().await;
    if shared.later.is_stopped() {
        return Err(Refused::Closed);
    }
    if shared.is_corrupt() {
        return Err(IoError::Corrupt.into());
    }
    Ok(turn)
}

/// Holds the queues off until every request that was in flight has ended. Background work goes on, and nothing is written
/// back: it takes no longer than these requests. The caller has the turn, and keeps it.
///
/// # Errors
///
/// [`Refused`], if some do not end within `limit`; then the queues have gone on.
pub(super) async fn pause(queue: &Rc<Queue>, limit: Duration) -> Result<Exclusive<'_, ()>, Refused> {
    let section = Exclusive::hold(&queue.shared, ())?;
    if !broken(Rule::MovedUnderWrite) {
        drain_within(queue, limit).await?;
    }
    Ok(section)
}

/// Begins the section of an image that closes, whose queues have ended and are not held off otherwise. However long it takes: nothing may
/// be lost.
pub(super) async fn last<Turn>(queue: &Rc<Queue>, turn: Turn) -> Result<Exclusive<'_, Turn>, IoError> {
    let section = Exclusive::hold(&queue.shared, turn)?;
    while !queue.metadata()?.is_clean() {
        flush::settle(queue, None).await?;
    }
    Ok(section)
}

/// Waits for the requests that are in flight while the queues are held off.
///
/// # Errors
///
/// [`Refused`], if some do not end.
pub(super) async fn drain(queue: &Rc<Queue>) -> Result<(), Refused> {
    drain_within(queue, DRAIN_MAX).await
}

async fn drain_within(queue: &Rc<Queue>, limit: Duration) -> Result<(), Refused> {
    let epochs = &queue.shared.epochs;
    let mut watch = epochs.watch();
    let began = epochs.now();
    let mut timeout = pin!(queue.cx.sleep(limit));
    while !is_past_grace(began, epochs.advance()) {
        if !space::is_ended_before(watch.ended(), timeout.as_mut()).await? {
            return Err(Refused::Busy);
        }
    }
    Ok(())
}

/// Waits while queues are held off, without the guard. Returns a guard under which the request may go on.
///
/// # Errors
///
/// [`IoError::Corrupt`] if a panic has poisoned the metadata lock.
pub(super) async fn admit(queue: &Queue, mut guard: EpochGuard) -> Result<EpochGuard, IoError> {
    let shared = &queue.shared;
    while queue.metadata()?.held_off {
        drop(guard);
        shared.hold.wait(|is_held| (!*is_held).then_some(())).await;
        guard = queue.enter();
    }
    Ok(guard)
}
