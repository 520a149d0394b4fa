//! FLUSH: two syncs if metadata is dirty, one otherwise.
//!
//! A round takes a write-back set of the dirty metadata. Then, without the lock, it writes refcounts and new L2
//! tables and syncs (A), and writes the slices of reachable L2 tables and the L1 entries and syncs (B). An L2 entry
//! enters memory only after its data completed, and B writes only the contents of the write-back set. So no entry
//! becomes durable before its data and refcount. New refcount blocks go before A with a sync of their own. So does a
//! refcount table that has moved, with the counts of its clusters: once per gigabytes.
//!
//! The bits of durable bitmaps for changes that the L2 entries expose are written before A, too.
//!
//! With a data file, sync A is one of each file: first the data file's, which has the data that the entries expose.
//!
//! One round runs at a time; all callers that arrive while it runs share the next one ([`block::rounds`]).
//!
//! Invariant: after a failed sync no round succeeds any more, because the kernel does not report the data it lost.
//! The file remembers the failure ([`ImageFile::check_syncs`](block::file::ImageFile::check_syncs)).

use std::rc::Rc;
use std::time::Duration;

use block::canary::{Rule, broken};
use block::join_all;
pub(super) use block::rounds::Rounds;
use block::{AlignedBuf, IoError};

use super::counts::count;
use super::{Queue, Shared, background, corrupt, header, reclaim, record};
use crate::format::HostOffset;
use crate::metadata::Drops;
use crate::metadata::write_back::{Place, WriteBackSet};

/// Makes every write answered before this call, on any queue, durable.
pub(super) async fn flush(queue: &Rc<Queue>) -> Result<(), IoError> {
    let shared = &queue.shared;
    if shared.policy.read_only {
        return Ok(());
    }
    // A running round may have taken its write-back set already; only the next one covers this call.
    Rounds::share(&shared.rounds, || round(queue)).await
}

/// Waits until the round that is running has ended, if one is. Its drops are then past being durable, or dropped again.
pub(super) async fn end_of_running(shared: &Shared) {
    Rounds::end_of_running(&shared.rounds).await;
}

/// Starts a round that nobody waits for, unless one is running. This bounds dirty metadata and pending frees.
pub(super) fn in_background(queue: &Rc<Queue>) {
    if queue.shared.rounds.lock().is_running() {
        return;
    }
    background::start(queue, async |queue: Rc<Queue>| {
        if let Err(error) = flush(&queue).await {
            let image = queue.shared.file.path().display();
            tracing::warn!(%image, %error, "metadata could not be written back; it stays in memory");
        }
    });
}

/// Writes everything back and frees every dropped cluster. No request is in flight and nobody else starts background
/// work, so nothing is under way afterwards. Returns false if background work has not ended within `limit`.
pub(super) async fn settle(queue: &Rc<Queue>, limit: Option<Duration>) -> Result<bool, IoError> {
    let flushed = flush(queue).await;
    // Above all a pass that frees clusters: its lowered counts are yet to be written.
    let is_ended = background::is_ended_within(queue, limit).await?;
    flushed?;
    if !is_ended {
        return Ok(false);
    }
    // Every drop is past grace; the lowered counts are written.
    reclaim::reclaim(queue).await?;
    flush(queue).await?;
    background::is_ended_within(queue, limit).await
}

async fn round(queue: &Rc<Queue>) -> Result<(), IoError> {
    let shared = &queue.shared;
    shared.file.check_syncs()?;
    count(&shared.counters.flush_rounds);
    let set = shared.write()?.take_write_back_set();
    let freeing = !set.drops.is_empty();
    let mut set = WriteBackGuard {
        shared,
        set: Some(set),
    };
    let result = match set.get().misplaced {
        None => write_back(queue, set.get()).await,
        Some(found) => Err(corrupt::misplaced(queue, found)),
    };
    let drops = set.end(result.is_ok())?;
    result?;
    if !drops.is_empty() {
        shared.freeing.lock().push(shared.epochs.now(), drops);
    }
    if freeing || !shared.freeing.lock().is_empty() {
        reclaim::in_background(queue);
    }
    Ok(())
}

/// A write-back set that is settled as not written unless it is settled otherwise.
struct WriteBackGuard<'a> {
    shared: &'a Shared,
    set: Option<WriteBackSet>,
}

impl WriteBackGuard<'_> {
    fn get(&mut self) -> &mut WriteBackSet {
        self.set.get_or_insert_default()
    }

    fn end(&mut self, written: bool) -> Result<Drops, IoError> {
        let Some(set) = self.set.take() else {
            return Ok(Drops::default());
        };
        Ok(self.shared.write()?.end_write_back(set, written))
    }
}

impl Drop for WriteBackGuard<'_> {
    fn drop(&mut self) {
        // Only a task that was dropped half-way gets here with a write-back set; a poisoned lock needs none.
        self.end(false).unwrap_or_default();
    }
}

async fn write_back(queue: &Rc<Queue>, set: &mut WriteBackSet) -> Result<(), IoError> {
    if set.is_empty() {
        if queue.shared.data_file.is_some() {
            queue.data.file().sync().await?;
        }
        // With a data file only the first time: entries that a process before this one wrote and did not sync.
        return queue.file.sync().await;
    }
    if !set.new_blocks.is_empty() || set.moved_table.is_some() {
        write_places(queue, std::mem::take(&mut set.new_blocks)).await?;
        queue.file.sync().await?;
        set.blocks_complete = true;
        if let Some((place, bytes)) = set.moved_table.take() {
            // Not with the blocks: a round that failed may have pointed the header here already. Older blocks may
            // count the table's own clusters; those counts are written before the header points to the table.
            let mut places = std::mem::take(&mut set.refcounts);
            places.push((place.offset, bytes));
            write_places(queue, places).await?;
            queue.file.sync().await?;
            write_table_place(queue, place.offset, place.clusters).await?;
            queue.file.sync().await?;
        }
    }
    let mut first = std::mem::take(&mut set.refcounts);
    first.append(&mut set.new_tables);
    let mut second = std::mem::take(&mut set.l2);
    second.append(&mut set.l1);
    if broken(Rule::L2BeforeRefcount) {
        std::mem::swap(&mut first, &mut second);
    } else if broken(Rule::L1BeforeTable) {
        first.append(&mut second);
    }
    write_places(queue, first).await?;
    let bits = match broken(Rule::BitsAfterEntries) {
        true => None,
        false => record::write_for_entries(queue).await?,
    };
    let has_data_file = queue.shared.data_file.is_some();
    if has_data_file && !broken(Rule::DataFileSyncedLate) {
        queue.data.file().sync().await?;
    }
    queue.file.sync().await?;
    if let Some(bits) = bits {
        bits.end();
    }
    set.tables_complete = true;
    if !second.is_empty() {
        write_places(queue, second).await?;
        queue.file.sync().await?;
    }
    if has_data_file && broken(Rule::DataFileSyncedLate) {
        queue.data.file().sync().await?;
    }
    if broken(Rule::BitsAfterEntries)
        && let Some(bits) = record::write_for_entries(queue).await?
    {
        queue.file.sync().await?;
        bits.end();
    }
    if let Some(change) = set.header {
        header::change(queue, |fields| {
            fields.set_disk(change.size_bytes, change.l1_offset, change.l1_entries);
        })
        .await?;
        queue.file.sync().await?;
    }
    Ok(())
}

/// The largest write that neighbours are joined into, in bytes.
const JOINED_BYTES_MAX: usize = 1 << 20;
/// The largest number of writes under way at once.
const WRITES_MAX: usize = 128;

pub(super) async fn write_places(queue: &Rc<Queue>, mut places: Vec<Place>) -> Result<(), IoError> {
    places.sort_unstable_by_key(|place| place.0);
    let mut joined: Vec<(HostOffset, Vec<u8>)> = Vec::new();
    for (offset, bytes) in places {
        match joined.last_mut() {
            Some((at, list))
                if *at + list.len() as u64 == offset && list.len() + bytes.len() <= JOINED_BYTES_MAX =>
            {
                list.extend_from_slice(&bytes);
            }
            _ => joined.push((offset, bytes.to_vec())),
        }
    }
    let joined = joined.iter();
    write_buffers(
        queue,
        joined.map(|(offset, bytes)| (*offset, AlignedBuf::from_slice(bytes))),
    )
    .await
}

/// Writes buffers to their places, many at once.
pub(super) async fn write_buffers(
    queue: &Rc<Queue>,
    buffers: impl Iterator<Item = (HostOffset, AlignedBuf)>,
) -> Result<(), IoError> {
    let mut parts = Vec::new();
    for (offset, buffer) in buffers {
        let buffer = Rc::new(buffer.into());
        let piece = block::buffer::Piece::whole(&buffer);
        parts.push(queue.file.start_write(offset.bytes(), smallvec::smallvec![piece]));
        if parts.len() == WRITES_MAX {
            join_all(std::mem::take(&mut parts)).await?;
        }
    }
    join_all(parts).await
}

/// Points the header at the refcount table's new place.
async fn write_table_place(queue: &Queue, offset: HostOffset, clusters: u64) -> Result<(), IoError> {
    let clusters = u32::try_from(clusters).map_err(|_| IoError::OutOfRange)?;
    header::change(queue, |fields| fields.set_refcount_table(offset, clusters)).await
}
