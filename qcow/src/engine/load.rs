//! Loading of table slices: once for all callers, with no lock held during the read.

use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use block::buffer::Piece;
#[cfg(feature = "canary")]
use block::canary::{Rule, broken};
use block::sync::WaitList;
use block::{AlignedBuf, Buffer, IoError};
use smallvec::{SmallVec, smallvec};

use super::counts::count_many;
use super::encryption::owned;
use super::{Queue, Shared, corrupt, record};
use crate::format::{GuestOffset, HostOffset};
use crate::metadata::cluster_use::Exposed;
use crate::metadata::refcounts::{NO_SPACE, Stuck};
use crate::metadata::slices::slice_bytes_of;
use crate::metadata::{Blocked, Extent, Lookup, Metadata};

#[derive(Clone, Copy, Debug)]
enum Kind {
    L2,
    Refcounts,
}

/// The slices that a task loads, which are neighbours in one table. Ends their loads when the task ends, however it ends, and wakes their
/// waiters.
struct Loads {
    shared: Arc<Shared>,
    kind: Kind,
    slices: Range<u64>,
}

impl Loads {
    /// Ends the loads of some of the slices, under a lock that is held anyway. Returns their waiters; drop the lists without the lock.
    fn end(&mut self, metadata: &mut Metadata, slices: Range<u64>) -> SmallVec<[WaitList; 1]> {
        self.slices.end = slices.start;
        let loads = slices.map(|slice| match self.kind {
            Kind::L2 => metadata.l2.end_load(slice),
            Kind::Refcounts => metadata.refcounts.slices.end_load(slice),
        });
        loads.collect()
    }

    /// Ends the loads of all slices but the first one, which is the one that was asked for. Returns true if there were any.
    fn leave_first(&mut self) -> Result<bool, IoError> {
        let others = self.slices.start + 1..self.slices.end;
        if others.is_empty() {
            return Ok(false);
        }
        let shared = Arc::clone(&self.shared);
        let mut metadata = shared.write()?;
        let waiters = self.end(&mut metadata, others);
        drop(metadata);
        drop(waiters);
        Ok(true)
    }
}

impl Drop for Loads {
    fn drop(&mut self) {
        if self.slices.is_empty() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let Ok(mut metadata) = shared.write() else {
            return;
        };
        let waiters = self.end(&mut metadata, self.slices.clone());
        drop(metadata);
        drop(waiters);
    }
}

/// Loads an L2 slice into the cache.
pub(super) async fn load_l2(queue: &Rc<Queue>, slice: u64) -> Result<(), IoError> {
    load(queue, Kind::L2, slice).await.map(drop)
}

/// Returns the extent at `offset`, and how many of `len` bytes it covers; loads its table first if it must.
pub(super) async fn extent(
    queue: &Rc<Queue>,
    offset: GuestOffset,
    len: u64,
) -> Result<(Extent, u64), IoError> {
    loop {
        let found = queue.metadata()?.lookup(offset, len);
        match found {
            Lookup::Found { extent, len } => return Ok((extent, len)),
            Lookup::Miss(slice) => load_l2(queue, slice).await?,
            broken => return Err(corrupt::found(queue, broken, offset)),
        }
    }
}

/// Checks a slice that came back to the cache, before anything is written through it.
fn check_l2(queue: &Rc<Queue>, slice: u64) -> Result<(), IoError> {
    let (offset, exposed) = {
        let mut metadata = queue.shared.write()?;
        let offset = metadata.slice_offset(slice).map_err(|_| IoError::Corrupt)?;
        (offset.unwrap_or_default(), metadata.check_slice(slice))
    };
    if exposed.is_empty() {
        return Ok(());
    }
    Err(corrupt::exposed(queue, offset, &exposed))
}

/// Loads a refcount slice into the cache. Returns the number of bytes that were read: none if another task has loaded it, and more than the
/// slice if a scan for free clusters goes on.
pub(super) async fn load_refcounts(queue: &Rc<Queue>, slice: u64) -> Result<u64, IoError> {
    load(queue, Kind::Refcounts, slice).await
}

/// Returns the error that ends a change; corruption marks the image.
fn failed(queue: &Rc<Queue>, error: IoError) -> IoError {
    if error == IoError::Corrupt {
        corrupt::mark(queue);
    }
    error
}

/// Ends a failed change. Without space, returns `Ok` to plan it anew if the block device has been made larger.
fn give_up(queue: &Rc<Queue>, error: IoError) -> Result<(), IoError> {
    if !error.is_no_space() {
        return Err(failed(queue, error));
    }
    let end = HostOffset::new(queue.file.len()?);
    let limit = queue.shared.geometry.host_cluster(end);
    if queue.shared.write()?.refcounts.extend(limit) {
        return Ok(());
    }
    Err(error)
}

/// Removes the obstacle of a stuck allocation.
pub(super) async fn unstick(queue: &Rc<Queue>, stuck: Stuck) -> Result<(), IoError> {
    match stuck {
        Stuck::Load(slice) => load_refcounts(queue, slice).await.map(drop),
        Stuck::InUse(cluster) => Err(corrupt::in_use(queue, cluster)),
        Stuck::Failed(error) => give_up(queue, error),
    }
}

/// Loads a slice into the cache. Returns the number of bytes that were read.
async fn load(queue: &Rc<Queue>, kind: Kind, slice: u64) -> Result<u64, IoError> {
    let shared = &queue.shared;
    // `None`: it is cached. Otherwise this task loads it.
    let place = poll_fn(|cx| {
        let mut metadata = match shared.write() {
            Ok(metadata) => metadata,
            Err(error) => return Poll::Ready(Err(error)),
        };
        let (cached, offset) = match kind {
            Kind::L2 => match metadata.slice_offset(slice) {
                Ok(offset) => (metadata.l2.contains(slice), offset),
                Err(error) => {
                    tracing::error!(%error, "the mapping is corrupt");
                    return Poll::Ready(Err(IoError::Corrupt));
                }
            },
            Kind::Refcounts => match metadata.refcounts.slice_offset(slice) {
                Ok(offset) => (metadata.refcounts.slices.contains(slice), offset),
                Err(error) => return Poll::Ready(Err(error)),
            },
        };
        // Without an offset the table is gone; the caller finds out when it looks up again.
        let (false, Some(offset)) = (cached, offset) else {
            return Poll::Ready(Ok(None));
        };
        if shared.geometry.host_cluster(offset) >= metadata.refcounts.end() {
            let image = shared.file.path().display();
            let offset = offset.bytes();
            tracing::error!(%image, ?kind, offset, "a table lies past the end of the file");
            return Poll::Ready(Err(IoError::Corrupt));
        }
        let mine = match kind {
            Kind::L2 => metadata.l2.begin_load(slice, cx.waker()),
            Kind::Refcounts => metadata.refcounts.slices.begin_load(slice, cx.waker()),
        };
        if !mine {
            return Poll::Pending;
        }
        let end = match kind {
            Kind::L2 => slice + 1,
            Kind::Refcounts => metadata.refcounts.begin_loads_ahead(slice),
        };
        let loads = Loads {
            shared: Arc::clone(shared),
            kind,
            slices: slice..end,
        };
        Poll::Ready(Ok(Some((offset, loads))))
    })
    .await
    .map_err(|error| failed(queue, error))?;
    let Some((offset, mut loads)) = place else {
        return Ok(0);
    };
    let bytes = loop {
        match read(queue, offset, &loads).await {
            Ok(bytes) => break bytes,
            // It may be one of the others that cannot be read.
            Err(error) if !loads.leave_first()? => return Err(error),
            Err(_) => {}
        }
    };
    shared.table_memory.make_room(shared);
    let (exposed, waiters) = {
        let mut metadata = shared.write()?;
        let exposed = adopt(&mut metadata, &loads, offset, &bytes);
        (exposed, loads.end(&mut metadata, loads.slices.clone()))
    };
    drop(waiters);
    let read = bytes.len() as u64;
    queue.cx.pool().put(bytes);
    if !exposed.is_empty() {
        // The caller may need another entry of the slice, which is still valid.
        corrupt::exposed(queue, offset, &exposed);
    }
    Ok(read)
}

/// Reads slices, the first of which is at `offset`, with one operation.
async fn read(queue: &Rc<Queue>, offset: HostOffset, loads: &Loads) -> Result<AlignedBuf, IoError> {
    let shared = &queue.shared;
    #[cfg(feature = "canary")]
    let _held = broken(Rule::LockAcrossAwait).then(|| queue.metadata());
    let slices = loads.slices.end - loads.slices.start;
    let len = slices as usize * slice_bytes_of(&shared.geometry);
    // Memory of the pool: what comes and goes with each slice would leave gaps in the heap.
    let buffer = Rc::new(Buffer::from(queue.cx.pool().take(len)));
    let pieces = smallvec![Piece::whole(&buffer)];
    queue.file.start_read(offset.bytes(), pieces).await?;
    let counter = match loads.kind {
        Kind::L2 => &shared.counters.l2_slices_read,
        Kind::Refcounts => &shared.counters.refcount_slices_read,
    };
    count_many(counter, slices);
    owned(buffer)
}

/// Puts slices into the cache, the one that was asked for last: where nearly all are dirty, each that comes may take the place of the one
/// before. Returns the entries that expose the image's own structures.
fn adopt(metadata: &mut Metadata, loads: &Loads, offset: HostOffset, bytes: &[u8]) -> Vec<Exposed> {
    let asked_for = loads.slices.start;
    match loads.kind {
        // The table may have been replaced meanwhile; then these bytes belong to another structure.
        Kind::L2 if metadata.slice_offset(asked_for) == Ok(Some(offset)) => {
            let copy = metadata.l2.copy_of(bytes);
            metadata.adopt_slice(asked_for, copy)
        }
        Kind::Refcounts if metadata.refcounts.slice_offset(asked_for) == Ok(Some(offset)) => {
            let slices = &mut metadata.refcounts.slices;
            let parts = bytes.chunks_exact(slices.slice_bytes());
            for (slice, bytes) in loads.slices.clone().rev().zip(parts.rev()) {
                let copy = slices.copy_of(bytes);
                slices.insert(slice, copy, false);
            }
            Vec::new()
        }
        _ => Vec::new(),
    }
}

/// The turn to copy the L2 table of an L1 entry. Ends when it is dropped.
pub(super) struct CopyGuard(Arc<Shared>, usize);

impl Drop for CopyGuard {
    fn drop(&mut self) {
        let Ok(mut metadata) = self.0.write() else { return };
        let waiters = metadata.end_copy(self.1);
        drop(metadata);
        drop(waiters);
    }
}

/// Keeps the L2 table of an L1 entry from being copied, if it is shared with a snapshot, until the guard is dropped.
/// Changes that need the copy wait.
pub(super) async fn keep_table(queue: &Rc<Queue>, l1_index: usize) -> Result<CopyGuard, IoError> {
    let shared = &queue.shared;
    poll_fn(|cx| match shared.write() {
        Ok(mut metadata) => match metadata.begin_copy(l1_index, cx.waker()) {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        },
        Err(error) => Poll::Ready(Err(error)),
    })
    .await?;
    Ok(CopyGuard(Arc::clone(shared), l1_index))
}

/// Replaces an L2 table that is shared with a snapshot by an owned copy.
async fn copy_table(queue: &Rc<Queue>, l1_index: usize) -> Result<(), IoError> {
    let shared = &queue.shared;
    let mut waited = false;
    let mine = poll_fn(|cx| {
        if waited {
            return Poll::Ready(Ok(false));
        }
        match shared.write() {
            Ok(mut metadata) => {
                if metadata.begin_copy(l1_index, cx.waker()) {
                    return Poll::Ready(Ok(true));
                }
                waited = true;
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    })
    .await?;
    if !mine {
        return Ok(());
    }
    let guard = CopyGuard(Arc::clone(shared), l1_index);
    let from = queue
        .metadata()?
        .table_offset(l1_index)
        .map_err(|_| IoError::Corrupt)?;
    if let Some(from) = from {
        let len = usize::try_from(shared.geometry.cluster_size()).map_err(|_| IoError::OutOfRange)?;
        let table = queue.file.read_at(from.bytes(), len).await?;
        let exposed = shared.write()?.inspect_table(l1_index, &table);
        if let Some(exposed) = exposed {
            return Err(corrupt::exposed(queue, from, &[exposed]));
        }
        loop {
            let adopted = shared.write()?.adopt_table(l1_index, from, &table);
            match adopted {
                Ok(_) => break,
                Err(Blocked::LoadRefcounts(slice)) => drop(load_refcounts(queue, slice).await?),
                Err(Blocked::InUse(cluster)) => return Err(corrupt::in_use(queue, cluster)),
                Err(Blocked::Failed(error)) => give_up(queue, error)?,
                Err(_) => return Err(IoError::Corrupt),
            }
        }
    }
    drop(guard);
    Ok(())
}

/// Waits for, or removes, the obstacle of a change of the mapping. Then the caller plans the change anew.
pub(super) async fn unblock(queue: &Rc<Queue>, blocked: Blocked) -> Result<(), IoError> {
    match blocked {
        Blocked::LoadL2(slice) => load_l2(queue, slice).await,
        Blocked::CheckL2(slice) => check_l2(queue, slice),
        Blocked::LoadRefcounts(slice) => load_refcounts(queue, slice).await.map(drop),
        Blocked::CopyTable(l1_index) => Box::pin(copy_table(queue, l1_index)).await,
        Blocked::InFlight(offset) => {
            poll_fn(|cx| match queue.shared.write() {
                Ok(mut metadata) => {
                    if metadata.in_flight.wait(offset, cx.waker()) {
                        Poll::Pending
                    } else {
                        Poll::Ready(Ok(()))
                    }
                }
                Err(error) => Poll::Ready(Err(error)),
            })
            .await
        }
        Blocked::Unstored(bytes) => Box::pin(record::store(queue, std::iter::once(bytes))).await,
        // `space` catches it: the change is planned anew without its epoch guard.
        Blocked::Growth => Err(NO_SPACE),
        Blocked::InUse(cluster) => Err(corrupt::in_use(queue, cluster)),
        Blocked::Failed(error) => give_up(queue, error),
    }
}
