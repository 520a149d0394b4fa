//! Writing: in place where the host cluster is the guest's alone, to fresh clusters otherwise.
//!
//! An allocating write reserves host clusters under the lock, fills them without it (the guest's data and
//! whatever else of the cluster must keep its old value, as one op), and only then maps them.
//! What happens to the old clusters is `reclaim`'s business.
//!
//! What must stay true: a guest cluster is remapped by one request at a time (the in-flight table), a
//! shared cluster is never written, and a request that waits for another holds no reservation.

use std::rc::Rc;

use block::buffer::Piece;
use block::canary::{Rule, broken};
use block::ring::Pieces;
use block::{AlignedBuf, Buffer, IoError};
use smallvec::{SmallVec, smallvec};

use super::read::{Part, finish, start_backing};
use super::{Queue, Shared, chores, compressed, flush, load};
use crate::format::L2Mapping;
use crate::metadata::{Allocation, Blocked, WriteStep};

/// What is written.
#[derive(Debug)]
pub(super) enum Source {
    /// A request's memory, whose first byte belongs to this guest offset.
    Buffer { buffer: Rc<Buffer>, guest: u64 },
    /// Zeros.
    Zeros,
}

impl Source {
    fn piece(&self, offset: u64, len: u64) -> Piece {
        match self {
            Self::Buffer { buffer, guest } => Piece::Bytes {
                buffer: Rc::clone(buffer),
                offset: (offset - guest) as usize,
                len: len as usize,
            },
            Self::Zeros => Piece::Zeros(len as usize),
        }
    }
}

/// How many steps are under way at once for one request.
const STEPS_MAX: usize = 64;

/// Writes `len` guest bytes from `offset` on.
pub(super) async fn write(queue: &Rc<Queue>, source: &Source, offset: u64, len: u64) -> Result<(), IoError> {
    debug_assert!(
        queue.is_entered(),
        "what is written in place may be reused meanwhile"
    );
    let end = offset + len;
    let mut here = offset;
    // Through the page cache the host's file system allocates late and in one go by itself.
    let reserves = queue.shared.file.alignment().offset > 1;
    while here < end {
        let mut steps: SmallVec<[(u64, u64, WriteStep); 4]> = SmallVec::new();
        let mut blocked = None;
        let mut pressed = false;
        let mut ahead = None;
        {
            let mut metadata = queue.shared.write()?;
            while here < end && steps.len() < STEPS_MAX {
                match metadata.plan_write(here, end) {
                    Ok(step) => {
                        let len = step_len(&queue.shared, &step, here, end);
                        steps.push((here, len, step));
                        here += len;
                    }
                    Err(reason) => {
                        blocked = Some(reason);
                        break;
                    }
                }
            }
            let fresh = |step: &(u64, u64, WriteStep)| matches!(step.2, WriteStep::Allocated(allocation) if !allocation.kept);
            if reserves && steps.iter().any(fresh) {
                ahead = metadata.refcounts.reserve_ahead();
            }
            if metadata.l2.is_dirty_past_budget() || metadata.refcounts.slices.is_dirty_past_budget() {
                pressed = true;
            }
        }
        if pressed {
            flush::in_background(queue);
        }
        if let Some((from, count)) = ahead {
            chores::start(queue, async move |queue: Rc<Queue>| {
                reserve(&queue, from, count).await
            });
        }
        carry_out(queue, source, steps).await?;
        if let Some(blocked) = blocked {
            load::unblock(queue, blocked).await?;
        }
    }
    Ok(())
}

/// Reserves host space for clusters to come. Direct writes that make a file longer wait for each other in
/// the host's file system; inside its length they do not.
async fn reserve(queue: &Queue, from: u64, count: u64) {
    let size = queue.shared.geometry.cluster_size();
    let result = queue.file.preallocate(from * size, count * size).await;
    if let Err(error) = result {
        // Not an error of any request: whoever needs the space hears it from its own write.
        tracing::debug!(%error, "no space could be reserved ahead");
    }
    if let Ok(mut metadata) = queue.shared.write() {
        metadata
            .refcounts
            .reserved(result.is_ok().then_some(from + count));
    }
}

fn step_len(shared: &Shared, step: &WriteStep, here: u64, end: u64) -> u64 {
    match step {
        WriteStep::InPlace { len, .. } => *len,
        WriteStep::Allocated(allocation) => {
            let size = shared.geometry.cluster_size();
            ((allocation.guest + allocation.count) * size).min(end) - here
        }
    }
}

async fn carry_out(
    queue: &Rc<Queue>,
    source: &Source,
    steps: SmallVec<[(u64, u64, WriteStep); 4]>,
) -> Result<(), IoError> {
    // The common case, without boxes.
    if let [(offset, len, WriteStep::Allocated(allocation))] = steps[..] {
        return allocated(queue, &allocation, source.piece(offset, len), offset, len).await;
    }
    let mut parts = Vec::with_capacity(steps.len());
    for (offset, len, step) in steps {
        let piece = source.piece(offset, len);
        match step {
            WriteStep::InPlace { host, .. } => {
                parts.push(Part::Io(queue.file.start_write(host, smallvec![piece])));
            }
            WriteStep::Allocated(allocation) => {
                let queue = Rc::clone(queue);
                parts.push(Part::Task(Box::pin(async move {
                    allocated(&queue, &allocation, piece, offset, len).await
                })));
            }
        }
    }
    finish(parts).await
}

/// Fills reserved clusters and maps them.
async fn allocated(
    queue: &Rc<Queue>,
    allocation: &Allocation,
    piece: Piece,
    offset: u64,
    len: u64,
) -> Result<(), IoError> {
    let guard = Reservation {
        shared: &queue.shared,
        allocation,
        done: false,
    };
    if broken(Rule::L2BeforeData) {
        guard.publish()?;
        return fill(queue, allocation, piece, offset, len).await;
    }
    fill(queue, allocation, piece, offset, len).await?;
    guard.publish()
}

/// A reservation that is taken back unless it is published.
struct Reservation<'a> {
    shared: &'a Shared,
    allocation: &'a Allocation,
    done: bool,
}

impl Reservation<'_> {
    fn publish(mut self) -> Result<(), IoError> {
        let (waiters, result) = self.shared.write()?.publish(self.allocation);
        self.done = true;
        waiters.into_iter().for_each(std::task::Waker::wake);
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
        waiters.into_iter().for_each(std::task::Waker::wake);
    }
}

/// Writes the data and the edges of an allocation's clusters.
async fn fill(
    queue: &Rc<Queue>,
    allocation: &Allocation,
    piece: Piece,
    offset: u64,
    len: u64,
) -> Result<(), IoError> {
    let size = queue.shared.geometry.cluster_size();
    let start = allocation.guest * size;
    let end = (allocation.guest + allocation.count) * size;
    let (head, tail) = (offset - start, end - (offset + len));
    let old_head = head > 0 && has_bytes(queue, allocation.old_first, start);
    let old_tail = tail > 0 && has_bytes(queue, allocation.old_last, end - size);
    if !old_head && !old_tail {
        let mut pieces = Pieces::new();
        let mut at = allocation.host + head;
        if !allocation.zero && head > 0 {
            pieces.push(Piece::Zeros(head as usize));
            at = allocation.host;
        }
        pieces.push(piece);
        if !allocation.zero && tail > 0 {
            pieces.push(Piece::Zeros(tail as usize));
        }
        return queue.file.start_write(at, pieces).await;
    }
    // Old contents of the first and the last cluster; one read if they are the same.
    let first = if old_head {
        Some(old_cluster(queue, allocation.old_first, start).await?)
    } else {
        None
    };
    let last = match (&first, old_tail) {
        (Some(first), true) if allocation.count == 1 => Some(Rc::clone(first)),
        (_, true) => Some(old_cluster(queue, allocation.old_last, end - size).await?),
        (_, false) => None,
    };
    let mut pieces = Pieces::new();
    if head > 0 {
        pieces.push(edge(first.as_ref(), 0, head));
    }
    pieces.push(piece);
    if tail > 0 {
        pieces.push(edge(last.as_ref(), size - tail, tail));
    }
    let result = queue.file.start_write(allocation.host, pieces).await;
    for buffer in [first, last].into_iter().flatten() {
        // Inflated clusters are kept by the cache, and then not ours to give back.
        if let Some(bytes) = Rc::try_unwrap(buffer).ok().and_then(Buffer::into_owned) {
            queue.cx.pool().put(bytes);
        }
    }
    result
}

fn edge(old: Option<&Rc<Buffer>>, offset: u64, len: u64) -> Piece {
    match old {
        Some(buffer) => Piece::Bytes {
            buffer: Rc::clone(buffer),
            offset: offset as usize,
            len: len as usize,
        },
        None => Piece::Zeros(len as usize),
    }
}

/// Whether a guest cluster that was mapped like this may hold anything but zeros.
fn has_bytes(queue: &Queue, old: L2Mapping, guest: u64) -> bool {
    match old {
        _ if broken(Rule::NeighbourDropped) => false,
        L2Mapping::Zero { .. } => false,
        L2Mapping::Unallocated => queue.shared.backing_covers(guest),
        L2Mapping::Data { .. } | L2Mapping::Compressed(_) => true,
    }
}

/// The contents of a guest cluster as it was mapped.
async fn old_cluster(queue: &Rc<Queue>, old: L2Mapping, guest: u64) -> Result<Rc<Buffer>, IoError> {
    let size = queue.shared.geometry.cluster_size() as usize;
    let fresh = || Rc::new(Buffer::from(queue.cx.pool().take(size)));
    match old {
        L2Mapping::Data { host, .. } => {
            let buffer = fresh();
            queue
                .file
                .start_read(host.bytes(), smallvec![Piece::whole(&buffer)])
                .await?;
            Ok(buffer)
        }
        L2Mapping::Compressed(extent) => compressed::cluster(queue, extent).await,
        L2Mapping::Unallocated => {
            let buffer = fresh();
            let mut parts = Vec::new();
            start_backing(queue, &buffer, 0, guest, size, &mut parts);
            finish(parts).await?;
            Ok(buffer)
        }
        L2Mapping::Zero { .. } => Ok(Rc::new(Buffer::from(AlignedBuf::zeroed(size)))),
    }
}

/// Plans and blocks as [`write`] does, for one change under the lock at a time.
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
