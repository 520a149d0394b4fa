//! Writes: in place if the host cluster is owned, to fresh clusters otherwise.
//!
//! An allocating write reserves host clusters under the lock and fills them without it. The guest's data and the
//! bytes of the cluster that must keep their old value are one op. Only then the write maps the clusters. `reclaim`
//! handles the old clusters.
//!
//! Invariants:
//!
//! - A guest cluster, or a subcluster of one that keeps its host cluster, is remapped by one request at a time (the
//!   in-flight table).
//! - A shared cluster is never written.
//! - A request that waits for another holds no reservation. Room for memory is an exception ([`Rooms`](super::room::Rooms)):
//!   whoever has it waits for no reservation.

use std::ops::Range;
use std::rc::Rc;

use block::buffer::Piece;
use block::canary::{Rule, broken};
use block::join_all;
use block::ring::Pieces;
use block::{Buffer, IoError};
use smallvec::{SmallVec, smallvec};

use super::part::Part;
use super::read::{read, start_backing};
use super::{Queue, Shared, background, compressed, flush, load};
use crate::format::{GuestOffset, HostCluster};
use crate::invariant::invariant;
use crate::metadata::plan::{Action, Allocation, Edge, EdgeContent, Fill, OldCluster, WriteStep};
use crate::metadata::{Blocked, Growth};

/// The data to write.
#[derive(Debug)]
pub(super) enum Source {
    /// A request's memory, whose first byte belongs to this guest offset.
    Buffer { buffer: Rc<Buffer>, guest: GuestOffset },
    /// Zeros.
    Zeros,
}

impl Source {
    fn piece(&self, offset: GuestOffset, len: u64) -> Piece {
        match self {
            Self::Buffer { buffer, guest } => Piece::Bytes {
                buffer: Rc::clone(buffer),
                offset: (offset - *guest) as usize,
                len: len as usize,
            },
            Self::Zeros => Piece::Zeros(len as usize),
        }
    }
}

/// The largest number of steps under way at once for one request.
const STEPS_MAX: usize = 64;

/// Writes `len` guest bytes from `offset` on. While growth is held back it fails with `ENOSPC`, and its caller waits for
/// space as `space` does.
pub(super) async fn write(
    queue: &Rc<Queue>,
    source: &Source,
    offset: GuestOffset,
    len: u64,
    growth: Growth,
) -> Result<(), IoError> {
    invariant!(
        queue.is_entered(),
        "what is written in place may be reused meanwhile"
    );
    let end = offset + len;
    let mut here = offset;
    // Through the page cache the host's file system allocates late and in one go by itself.
    let reserves = queue.shared.file.alignment().offset > 1;
    while here < end {
        let mut steps: SmallVec<[WriteStep; 2]> = SmallVec::new();
        let mut blocked = None;
        let pressed;
        let mut ahead = None;
        {
            let mut metadata = queue.shared.write()?;
            while here < end && steps.len() < STEPS_MAX {
                match metadata.plan_write(here, end, growth) {
                    Ok(step) => {
                        // A step that stands still would be planned for ever; one that goes too far, over others' data.
                        invariant!(
                            step.offset == here && step.len > 0 && step.len <= end - here,
                            "{step:?} is no step from {here} to {end}"
                        );
                        here += step.len;
                        steps.push(step);
                    }
                    Err(reason) => {
                        blocked = Some(reason);
                        break;
                    }
                }
            }
            let fresh = |step: &WriteStep| matches!(step.action, Action::Fill(fill) if !fill.allocation.kept);
            if reserves && steps.iter().any(fresh) {
                ahead = metadata.refcounts.reserve_ahead();
            }
            pressed = metadata.l2.is_dirty_past_budget()
                || metadata.refcounts.slices.is_dirty_past_budget()
                || metadata.wants_return();
        }
        if pressed {
            flush::in_background(queue);
        }
        if let Some((from, count)) = ahead {
            background::start(queue, async move |queue: Rc<Queue>| {
                reserve(&queue, from, count).await
            });
        }
        run(queue, source, &steps).await?;
        if let Some(blocked) = blocked {
            load::unblock(queue, blocked).await?;
        }
    }
    Ok(())
}

/// Reserves host space for clusters to come. Direct writes that extend a file wait for each other in the host's file
/// system; inside its length they do not.
async fn reserve(queue: &Queue, from: HostCluster, count: u64) {
    let geometry = queue.shared.geometry;
    let (at, len) = (geometry.host_offset(from), count * geometry.cluster_size());
    let result = queue.data.reserve(at, len).await;
    if let Err(error) = result {
        // Not an error of any request: a write that needs the space gets its own error.
        tracing::debug!(%error, "no space could be reserved ahead");
    }
    if let Ok(mut metadata) = queue.shared.write() {
        metadata
            .refcounts
            .reserved(result.is_ok().then_some(from + count));
    }
}

/// Starts all steps of a plan and waits until they have ended.
async fn run(queue: &Rc<Queue>, source: &Source, steps: &[WriteStep]) -> Result<(), IoError> {
    // The common case, without boxes.
    if let [step] = steps
        && let Action::Fill(fill) = step.action
    {
        return fill_and_map(queue, fill, step.bytes(), source.piece(step.offset, step.len)).await;
    }
    let mut parts = Vec::with_capacity(steps.len());
    for step in steps {
        let piece = source.piece(step.offset, step.len);
        parts.push(match step.action {
            Action::Overwrite(at) => Part::Io(queue.data.start_write(at, smallvec![piece])),
            Action::Fill(fill) => {
                let (queue, bytes) = (Rc::clone(queue), step.bytes());
                Part::Task(Box::pin(
                    async move { fill_and_map(&queue, fill, bytes, piece).await },
                ))
            }
        });
    }
    join_all(parts).await
}

/// Fills reserved clusters and maps them. `piece` has the guest's `bytes`.
async fn fill_and_map(
    queue: &Rc<Queue>,
    fill: Fill,
    bytes: Range<GuestOffset>,
    piece: Piece,
) -> Result<(), IoError> {
    let guard = Reservation {
        shared: &queue.shared,
        allocation: &fill.allocation,
        done: false,
    };
    if broken(Rule::L2BeforeData) {
        guard.publish()?;
        return write_clusters(queue, &fill, bytes, piece).await;
    }
    write_clusters(queue, &fill, bytes, piece).await?;
    guard.publish()
}

/// A reservation that is abandoned unless it is published.
struct Reservation<'a> {
    shared: &'a Shared,
    allocation: &'a Allocation,
    done: bool,
}

impl Reservation<'_> {
    fn publish(mut self) -> Result<(), IoError> {
        let (waiters, result) = self.shared.write()?.publish(self.allocation);
        self.done = true;
        drop(waiters);
        result
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let Ok(mut metadata) = self.shared.write() else {
            return;
        };
        let waiters = metadata.abandon(self.allocation);
        drop(metadata);
        drop(waiters);
    }
}

/// Writes the head, the data and the tail of reserved clusters, as one op.
async fn write_clusters(
    queue: &Rc<Queue>,
    fill: &Fill,
    bytes: Range<GuestOffset>,
    piece: Piece,
) -> Result<(), IoError> {
    let Fill {
        allocation,
        head,
        tail,
    } = fill;
    let geometry = queue.shared.geometry;
    let size = geometry.subcluster_size();
    // Old contents are read in whole subclusters, which suits direct I/O.
    let before = allocation.start..GuestOffset::new(bytes.start.bytes().next_multiple_of(size));
    let after = GuestOffset::new(bytes.end.bytes() / size * size)..allocation.end;
    // One read is better than two, unless most of it is not needed. Edges of one cluster have the same source then.
    let is_one_read = head.content == tail.content
        && allocation.count == 1
        && after.start.bytes() <= before.end.bytes() + head.len + tail.len;
    let copied = |content: EdgeContent, bytes: &Range<GuestOffset>| match content {
        EdgeContent::Old(OldCluster::Compressed(_)) => geometry.cluster_size(),
        EdgeContent::Old(_) => bytes.end - bytes.start,
        EdgeContent::Zeros | EdgeContent::Kept => 0,
    };
    let copied_bytes = if is_one_read {
        copied(head.content, &(before.start..after.end))
    } else {
        copied(head.content, &before) + copied(tail.content, &after)
    };
    let _room = match copied_bytes as usize {
        0 => None,
        bytes => Some(queue.rooms.copies.take(bytes).await),
    };
    let first = match head.content {
        EdgeContent::Old(old) if is_one_read => Some(old_bytes(queue, old, before.start..after.end).await?),
        EdgeContent::Old(old) => Some(old_bytes(queue, old, before).await?),
        EdgeContent::Zeros | EdgeContent::Kept => None,
    };
    let last = match (tail.content, &first) {
        (EdgeContent::Old(_), Some(first)) if first.end >= allocation.end => Some(first.clone()),
        (EdgeContent::Old(old), _) => Some(old_bytes(queue, old, after).await?),
        _ => None,
    };
    let mut pieces = Pieces::new();
    let within = bytes.start - geometry.guest_offset(allocation.guest);
    let mut at = allocation.host + within;
    if let Some(piece) = edge(head, first.as_ref(), bytes.start.bytes() - head.len) {
        at = allocation.host + (within - head.len);
        pieces.push(piece);
    }
    pieces.push(piece);
    pieces.extend(edge(tail, last.as_ref(), bytes.end.bytes()));
    let result = queue.data.start_write(at, pieces).await;
    for old in [first, last].into_iter().flatten() {
        // The cache keeps inflated clusters; those cannot go back to the pool.
        if let Some(bytes) = Rc::try_unwrap(old.buffer).ok().and_then(Buffer::into_owned) {
            queue.cx.pool().put(bytes);
        }
    }
    result
}

/// Old contents of the guest's bytes `start..end`.
#[derive(Clone, Debug)]
struct OldBytes {
    buffer: Rc<Buffer>,
    start: GuestOffset,
    end: GuestOffset,
}

/// Returns the piece to write at an edge, if any, which begins at guest byte `offset`. If old contents are copied, they are
/// part of `old`.
fn edge(edge: &Edge, old: Option<&OldBytes>, offset: u64) -> Option<Piece> {
    invariant!(
        old.is_some() == matches!(edge.content, EdgeContent::Old(_)),
        "{edge:?} has other contents than were read for it"
    );
    match (old, edge.content) {
        (Some(old), _) => Some(Piece::Bytes {
            buffer: Rc::clone(&old.buffer),
            offset: (offset - old.start.bytes()) as usize,
            len: edge.len as usize,
        }),
        (None, EdgeContent::Zeros) => Some(Piece::Zeros(edge.len as usize)),
        (None, EdgeContent::Kept | EdgeContent::Old(_)) => None,
    }
}

/// Reads the old contents of `bytes`, which are parts of one guest cluster.
async fn old_bytes(
    queue: &Rc<Queue>,
    old: OldCluster,
    bytes: Range<GuestOffset>,
) -> Result<OldBytes, IoError> {
    let geometry = queue.shared.geometry;
    let Range { start, end } = bytes;
    let len = end - start;
    let fresh = || Rc::new(Buffer::from(queue.cx.pool().take(len as usize)));
    let within = geometry.offset_in_cluster(start.bytes());
    let buffer = match old {
        OldCluster::Data(at) => {
            let buffer = fresh();
            queue
                .data
                .start_read(at + within, start, Piece::whole(&buffer))
                .await?;
            buffer
        }
        OldCluster::Compressed(extent) => {
            let start = geometry.guest_offset(geometry.guest_cluster(start));
            let buffer = compressed::cluster(queue, extent).await?;
            return Ok(OldBytes { buffer, start, end });
        }
        OldCluster::Backing => {
            let buffer = fresh();
            let mut parts = Vec::new();
            start_backing(queue, &buffer, 0, start, len as usize, &mut parts);
            join_all(parts).await?;
            buffer
        }
        // Nobody else maps the cluster meanwhile.
        OldCluster::Subclusters => {
            let buffer = fresh();
            read(queue, &buffer, 0, start, len).await?;
            buffer
        }
    };
    Ok(OldBytes { buffer, start, end })
}

/// Plans and unblocks as [`write`] does, for one change under the lock at a time.
pub(super) async fn change<T>(
    queue: &Rc<Queue>,
    mut plan: impl FnMut(&mut crate::metadata::Metadata) -> Result<T, Blocked>,
) -> Result<T, IoError> {
    loop {
        let planned = plan(&mut *queue.shared.write()?);
        match planned {
            Ok(value) => return Ok(value),
            Err(blocked) => load::unblock(queue, blocked).await?,
        }
    }
}
