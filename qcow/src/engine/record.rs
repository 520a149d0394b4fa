//! Records of the guest's changes in persistent bitmaps, before each change, by every queue.
//!
//! A write whose clusters are mapped goes on without a task if its bits are set, and stored where required; if only that is lacking,
//! it waits with others of its queue, in one task. Every other change gets here from its own.
//!
//! The stored bits of durable bitmaps have each change before a cut can expose it. A change in place may be on disk at any time after
//! it began: its bits are stored first, by a round that requests share: the writes of chunks, and one sync. A write to fresh clusters
//! shows only with its L2 entries: its bits are stored with the FLUSH round that writes these, before its first sync.
//!
//! Invariants:
//! - a request that has recorded its change holds an epoch guard, so that an operation that replaces the bitmaps waits for it;
//! - chunks are written by one task at a time, until they are durable.

use std::iter;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use block::canary::{Rule, broken};
use block::sync::{ChangeOnDrop, Mutex};
use block::{IoError, Op, Request};

use super::announce::Duty;
use super::flush::{Rounds, write_buffers};
use super::queue::submit_recorded;
use super::turn::Turns;
use super::{Queue, announce, bitmaps, exclusive, zero};
use crate::format::GuestOffset;
use crate::metadata::dirty_bits::{ChunksWrite, DirtyBitmaps};

/// The writes of durable bitmaps' bits.
#[derive(Debug, Default)]
pub(super) struct BitWrites {
    rounds: Mutex<Rounds>,
    turns: Turns,
}

/// Returns true if a write is recorded and may go on without a task.
#[inline(never)]
pub(super) fn is_recorded(queue: &Queue, request: &Request) -> bool {
    if queue.shared.announcements.duty() != Duty::Record {
        return false;
    }
    let bytes = request.offset..request.offset + request.len;
    queue.try_metadata().is_some_and(|metadata| {
        let bitmaps = metadata.bitmaps.as_ref();
        bitmaps.is_some_and(|bitmaps| bitmaps.mark(&bytes))
    })
}

/// Returns true if a write in place waits only for its bits to be stored. They are set.
pub(super) fn lacks_only_bits(queue: &Queue, request: &Request) -> bool {
    if !request.op.is_write()
        || queue.shared.announcements.duty() != Duty::Record
        || broken(Rule::BitsAfterData)
    {
        return false;
    }
    let bytes = request.offset..request.offset + request.len;
    let lacks = queue.try_metadata().is_some_and(|metadata| {
        let bitmaps = metadata.bitmaps.as_ref();
        bitmaps.is_some_and(|bitmaps| bitmaps.lack(&bytes))
    });
    lacks && queue.overwritten(request).is_some()
}

/// Submits a write in place once its bits, which are set, are stored.
#[inline(never)]
pub(super) fn submit_once_stored(queue: &Rc<Queue>, request: Request) {
    let waiting = {
        let mut unstored = queue.unstored.borrow_mut();
        unstored.push(request);
        unstored.len()
    };
    // One task has all that arrive until it runs: a plan and a wake-up for each of them would cost more than the writes.
    if waiting == 1 {
        queue.cx.spawn(submit_all_once_stored(Rc::clone(queue)));
    }
}

async fn submit_all_once_stored(queue: Rc<Queue>) {
    let waiting = std::mem::take(&mut *queue.unstored.borrow_mut());
    let bytes = waiting
        .iter()
        .map(|request| request.offset..request.offset + request.len);
    let result = store(&queue, bytes).await;
    for request in waiting {
        match result {
            Ok(()) => submit_recorded(&queue, request),
            Err(error) => request.finish(Err(error)),
        }
    }
}

/// Announces and records the change that a request makes. May take its guard, and then gives it another.
pub(super) async fn change(queue: &Rc<Queue>, request: &mut Request) -> Result<(), IoError> {
    let announcements = &queue.shared.announcements;
    let bytes = changed_bytes(queue, request);
    loop {
        match announcements.duty() {
            Duty::Nothing => return Ok(()),
            Duty::Announce if bitmaps::are_durable(queue) && announcements.have_recording() => {
                // What runs alone would wait for the guard.
                drop(request.guard.take());
                let prepared = bitmaps::prepare(queue).await;
                request.guard = Some(exclusive::admit(queue, queue.enter()).await?);
                prepared?;
                request.check(queue.shared.size_bytes(), false)?;
            }
            Duty::Announce => announce::writes(queue).await?,
            Duty::Record => break,
        }
    }
    if bytes.is_empty() {
        return Ok(());
    }
    loop {
        let bitmaps = queue.metadata()?.bitmaps.clone();
        let Some(bitmaps) = bitmaps else { return Ok(()) };
        if bitmaps.mark(&bytes) {
            return Ok(());
        }
        // In a data file they may show without an entry.
        if matches!(request.op, Op::Write { .. }) && queue.shared.data_file.is_none() {
            bitmaps.store_with_entries(&bytes);
            return Ok(());
        }
        store(queue, iter::once(bytes.clone())).await?;
    }
}

/// Returns the guest bytes that a request may change.
fn changed_bytes(queue: &Queue, request: &Request) -> Range<u64> {
    let bytes = request.offset..request.offset + request.len;
    if request.op == Op::Discard {
        let whole = zero::discarded(queue, GuestOffset::new(bytes.start), GuestOffset::new(bytes.end));
        return whole.start.bytes()..whole.end.bytes();
    }
    bytes
}

/// Stores the bits of recorded changes in durable bitmaps, with those of other tasks.
pub(super) async fn store(
    queue: &Rc<Queue>,
    changes: impl Iterator<Item = Range<u64>>,
) -> Result<(), IoError> {
    let bitmaps = queue.metadata()?.bitmaps.clone();
    let Some(bitmaps) = bitmaps else { return Ok(()) };
    bitmaps.want(changes);
    let round = async || {
        let Some(written) = write(queue).await? else {
            return Ok(());
        };
        queue.file.sync().await?;
        written.end();
        Ok(())
    };
    Rounds::share(&queue.shared.bit_writes.rounds, round).await
}

/// Chunks that are written, until a sync has made them durable or their task has failed.
#[must_use = "bits are stored once a sync has succeeded"]
pub(super) struct Written<'a, Turn: FnOnce(&mut bool)> {
    bitmaps: Arc<DirtyBitmaps>,
    chunks: Vec<ChunksWrite>,
    _turn: ChangeOnDrop<'a, bool, Turn>,
}

impl<Turn: FnOnce(&mut bool)> Written<'_, Turn> {
    /// Records that a sync has succeeded since they were written.
    pub(super) fn end(mut self) {
        let chunks = std::mem::take(&mut self.chunks);
        self.bitmaps.end_round(&chunks);
    }
}

impl<Turn: FnOnce(&mut bool)> Drop for Written<'_, Turn> {
    fn drop(&mut self) {
        self.bitmaps.fail_round(&self.chunks);
    }
}

/// As [`write`], for L2 entries that are about to be written, if there are any such bits.
pub(super) async fn write_for_entries(
    queue: &Rc<Queue>,
) -> Result<Option<Written<'_, impl FnOnce(&mut bool) + use<'_>>>, IoError> {
    let is_needed = |bitmaps: &Arc<DirtyBitmaps>| bitmaps.need_round();
    if !queue.metadata()?.bitmaps.as_ref().is_some_and(is_needed) {
        return Ok(None);
    }
    Box::pin(write(queue)).await
}

/// Writes the bits of durable bitmaps that have to be stored. Returns nothing without bitmaps.
async fn write(queue: &Rc<Queue>) -> Result<Option<Written<'_, impl FnOnce(&mut bool) + use<'_>>>, IoError> {
    let turn = queue.shared.bit_writes.turns.take().await;
    let bitmaps = queue.metadata()?.bitmaps.clone();
    let Some(bitmaps) = bitmaps else { return Ok(None) };
    let mut written = Written {
        chunks: bitmaps.take_round(queue.shared.geometry.cluster_size()),
        bitmaps,
        _turn: turn,
    };
    let chunks = written.chunks.iter_mut();
    let buffers = chunks.filter_map(|chunks| Some((chunks.offset, chunks.take_buffer()?)));
    write_buffers(queue, buffers).await?;
    Ok(Some(written))
}
