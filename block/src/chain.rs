//! Long chains: an index of the images below a disk, so that a read asks one of them and not each in turn.
//!
//! ```text
//!  overlay ─▶ IndexedQueue ─▶ ChainIndex: which layer decides these bytes?      index, span
//!  (written)      ├──▶ layer 0, the image below the overlay   answers what the index does not know yet, as without it
//!                 ├──▶ layer 1
//!                 └──▶ layer n   the layer's own queue reads: its tables, its compression, its format
//! ```
//!
//! The images below a disk do not change while it is open, because their locks keep writers away. So what decides a byte
//! never changes either, and an index may be kept, and shared by all disks of a process on the same images. The index maps
//! guest ranges to layers, not to places in files. It is made of block status ([`DiskQueue::status`]), so any format has one
//! that tells the status and gives the queue below ([`DiskQueue::below`]).
//!
//! A span is built when a read has missed it. That read, and all until the span is there, go through the layers one by one.
//! So do reads of a span whose status cannot be told: they find the error, if it is theirs.
//!
//! Invariants:
//!
//! - With and without an index each request has the same result.
//! - An index lives only as long as some disk has its layers open, and so locked.
//! - Nothing waits for an index, and no failure to build one is an error.

mod index;
#[cfg(all(test, shuttle))]
mod model;
mod places;
mod span;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::poll_fn;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Weak as SharedWeak};
use std::task::Poll;

use crate::buffer::Buffer;
use crate::delay::HoldOff;
use crate::disk::{Disk, DiskInfo, DiskQueue, OpenQueueError};
use crate::error::IoError;
use crate::file::FileView;
use crate::join::join_all;
use crate::request::{Op, Request, check_range};
use crate::status::{Content, StatusRange, StatusRanges};
use crate::sync::Mutex;
use crate::task::{Context, LocalBoxFuture};
use index::{Building, ChainIndex, Found, IndexReader};
use places::PlaceRuns;
use span::{RUNS_MAX, Run, Span};

/// The most parts of one read under way at once.
const PARTS_MAX: usize = 64;
/// The most parts of a range that one status answer examines.
const STATUS_PARTS_MAX: usize = 4096;
/// The most spans of one of these parts.
const STATUS_SPANS_MAX: u64 = 64;
/// The number of steps in which a span is built. Other tasks run between them.
const BUILD_STEPS: u64 = 64;

/// One image below a disk, as far as an index depends on it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct LayerIdentity {
    /// Device and inode, if they are known.
    pub(crate) file: Option<(u64, u64)>,
    /// The format that it is opened with.
    pub(crate) format: &'static str,
    /// The disk's size in bytes. A block device may have grown since another disk was opened on it.
    pub(crate) size_bytes: u64,
}

/// An index in use, and the layers that disks must have to share it; none share one without layers.
#[derive(Debug)]
struct Listed {
    layers: Vec<LayerIdentity>,
    index: SharedWeak<ChainIndex>,
}

/// The indexes of the chains that a process has open: disks on the same images share one. A clone is the same list.
#[derive(Clone, Debug, Default)]
pub struct ChainIndexes {
    list: Arc<Mutex<Vec<Listed>>>,
}

impl ChainIndexes {
    /// Returns the number of indexes in use.
    #[must_use]
    pub fn count(&self) -> usize {
        self.living().len()
    }

    /// Returns the memory of all indexes in use, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.living().iter().map(|index| index.bytes()).sum()
    }

    fn living(&self) -> Vec<Arc<ChainIndex>> {
        let list = self.list.lock();
        list.iter().filter_map(|listed| listed.index.upgrade()).collect()
    }

    /// Returns the disk of the uppermost of `layers`, with their index. `shared`: the layers are locked, and every disk on
    /// them may have the same index. The index may have `bound` bytes of memory, within limits.
    pub(crate) fn indexed(
        &self,
        disk: Arc<dyn Disk>,
        layers: &[LayerIdentity],
        cluster_bytes: u64,
        bound: u64,
        shared: bool,
    ) -> Arc<dyn Disk> {
        let shared = shared && layers.iter().all(|layer| layer.file.is_some());
        let mut list = self.list.lock();
        list.retain(|listed| listed.index.strong_count() > 0);
        let mut same = list.iter().filter(|listed| shared && listed.layers == layers);
        let found = same.find_map(|listed| listed.index.upgrade());
        let index = found.unwrap_or_else(|| {
            let index = ChainIndex::new(disk.info().size_bytes, cluster_bytes, bound);
            list.push(Listed {
                layers: if shared { layers.to_vec() } else { Vec::new() },
                index: Arc::downgrade(&index),
            });
            index
        });
        index.raise_bound(bound);
        Arc::new(IndexedDisk { disk, index })
    }
}

/// The image below a disk, with the index of the chain that it begins.
#[derive(Debug)]
struct IndexedDisk {
    disk: Arc<dyn Disk>,
    index: Arc<ChainIndex>,
}

impl Disk for IndexedDisk {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.disk.files()
    }

    fn written_files(&self) -> Vec<PathBuf> {
        self.disk.written_files()
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        let top: Rc<dyn DiskQueue> = Arc::clone(&self.disk).open_queue(cx)?.into();
        let mut below = Vec::new();
        let mut next = top.below();
        while let Some(queue) = next {
            next = queue.below();
            below.push(queue);
        }
        let files = std::iter::once(&top).chain(&below);
        Ok(Box::new(IndexedQueue(Rc::new(Layers {
            files: files.map(|queue| queue.data_file()).collect(),
            top,
            below,
            size_bytes: self.disk.info().size_bytes,
            index: self.index.reader(),
            cx: cx.clone(),
        }))))
    }

    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Arc::clone(&self.disk).close(cx)
    }

    fn hold_off(&self) -> Option<HoldOff> {
        self.disk.hold_off()
    }
}

/// One worker's queues of the layers, and their files.
struct Layers {
    /// The uppermost: layer 0.
    top: Rc<dyn DiskQueue>,
    /// The layers from 1 on. Each is also reached through the one above it.
    below: Vec<Rc<dyn DiskQueue>>,
    /// The file of each layer, for reads of bytes whose place is known. The layers that tell no file have none.
    files: Vec<Option<FileView>>,
    size_bytes: u64,
    index: IndexReader,
    cx: Context,
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layers")
            .field("top", &self.top)
            .field("below", &self.below.len())
            .finish_non_exhaustive()
    }
}

/// A queue of the image below a disk, which hands each read to the layer that decides it.
#[derive(Debug)]
struct IndexedQueue(Rc<Layers>);

impl DiskQueue for IndexedQueue {
    #[inline]
    fn submit(&self, request: Request) {
        let layers = &self.0;
        let reads = request.op == Op::Read && request.len > 0;
        // Layer 0 says what is wrong with a request.
        if !reads || request.check(layers.size_bytes, true).is_err() {
            return layers.top.submit(request);
        }
        let found = layers.find(request.offset, request.len);
        if found.len == request.len {
            layers.submit(&found, request);
        } else {
            layers.cx.spawn(read_parts(Rc::clone(layers), request));
        }
    }

    fn status(&self, offset: u64, len: u64) -> LocalBoxFuture<'_, Result<Vec<StatusRange>, IoError>> {
        if check_range(offset, len, self.0.size_bytes).is_err() {
            return self.0.top.status(offset, len);
        }
        Box::pin(self.0.status(offset, len))
    }

    fn below(&self) -> Option<Rc<dyn DiskQueue>> {
        self.0.below.first().cloned()
    }
}

impl Layers {
    #[inline]
    fn queue(&self, layer: u8) -> &dyn DiskQueue {
        let below = usize::from(layer).checked_sub(1);
        &**below.and_then(|at| self.below.get(at)).unwrap_or(&self.top)
    }

    /// Hands over a read that one layer decides: to its file, if the bytes lie there in one piece, or to its queue.
    #[inline]
    fn submit(&self, found: &Found, request: Request) {
        let file = self.files.get(usize::from(found.layer)).and_then(Option::as_ref);
        let refused = match found.place.zip(file) {
            Some((place, file)) => file.submit(place, request),
            None => Err(request),
        };
        // The file refuses what takes more than one op.
        if let Err(request) = refused {
            self.queue(found.layer).submit(request);
        }
    }

    /// Returns the layer to ask for the bytes from `offset` on, and how many of `len` it answers. Begins to build what the
    /// index lacks there.
    #[inline]
    fn find(self: &Rc<Self>, offset: u64, len: u64) -> Found {
        let found = self.index.find(offset, len);
        if let Some(span) = found.missing {
            self.build(span);
        }
        found
    }

    /// Builds a span in the background, unless others do.
    #[cold]
    fn build(self: &Rc<Self>, span: u64) {
        if let Some(building) = self.index.begin(span) {
            self.cx.spawn_background(build(Rc::downgrade(self), building));
        }
    }

    async fn status(&self, offset: u64, len: u64) -> Result<Vec<StatusRange>, IoError> {
        let mut ranges = StatusRanges::default();
        let (mut here, end) = (offset, offset + len);
        for _ in 0..STATUS_PARTS_MAX {
            if here >= end || ranges.is_full() {
                break;
            }
            // A tool that looks at all of a disk once needs no index.
            let most = self.index.span_bytes().saturating_mul(STATUS_SPANS_MAX);
            let found = self.index.find(here, most.min(end - here));
            let mut covered = 0;
            for range in self.queue(found.layer).status(here, found.len).await? {
                if ranges.is_full() {
                    break;
                }
                covered += range.len;
                ranges.push(StatusRange {
                    depth: range.depth.saturating_add(found.layer.into()),
                    ..range
                });
            }
            if covered == 0 {
                // A layer that covers nothing would be asked for ever.
                return Err(IoError::Unsupported);
            }
            here += covered;
            // As far as one answer of a layer goes.
            if covered < found.len {
                break;
            }
        }
        Ok(ranges.into_vec())
    }
}

/// Answers a read that several layers decide.
async fn read_parts(layers: Rc<Layers>, mut request: Request) {
    let (offset, len) = (request.offset, request.len);
    let buffer = Rc::new(request.take_buffer());
    let mut parts = Vec::new();
    let mut result = Ok(());
    let mut done = 0;
    while done < len && result.is_ok() {
        let found = layers.find(offset + done, len - done);
        let count = found.len;
        let part = Buffer::part(&buffer, done as usize, count as usize);
        let (read, answer) = Request::local(Op::Read, offset + done, count, part);
        layers.submit(&found, read);
        parts.push(Box::pin(async move { answer.await.result }));
        done += count;
        if parts.len() >= PARTS_MAX {
            result = join_all(std::mem::take(&mut parts)).await;
        }
    }
    let ended = join_all(parts).await;
    request.finish_with(Rc::try_unwrap(buffer).unwrap_or_default(), result.and(ended));
}

/// Builds one span and enters it. A span whose status cannot be told is entered as one that layer 0 decides, which asks the
/// layers below it as it does without an index.
async fn build(layers: Weak<Layers>, building: Building) {
    match runs_of(&layers, building.span).await {
        Ok((runs, places, bytes)) => match Span::encode(&runs, bytes) {
            Some(span) => building.end(span, places.encode(bytes)),
            None => building.end(Span::Whole(0), None),
        },
        Err(Unknown::NoStatus) => building.end(Span::Whole(0), None),
        Err(Unknown::Closed) => {}
    }
}

/// The reason that a span was not built.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Unknown {
    /// A layer cannot tell its status, or is not reached.
    NoStatus,
    /// The queue is gone.
    Closed,
}

/// Returns the layers and places of a span's bytes, from the status of the uppermost layer, and the span's size in bytes.
async fn runs_of(layers: &Weak<Layers>, span: u64) -> Result<(Vec<Run>, PlaceRuns, u64), Unknown> {
    let mut runs: Vec<Run> = Vec::new();
    let mut places = PlaceRuns::default();
    let mut done = 0;
    loop {
        // Held for one step only: who drops the queue waits for no more than that.
        let layers = layers.upgrade().ok_or(Unknown::Closed)?;
        let bytes = layers.index.span_bytes();
        let start = span.saturating_mul(bytes);
        let len = bytes.min(layers.size_bytes.saturating_sub(start));
        if done >= len {
            return Ok((runs, places, bytes));
        }
        let step = (bytes / BUILD_STEPS).min(len - done);
        let status = layers.top.status(start + done, step).await;
        let before = done;
        for range in status.map_err(|_| Unknown::NoStatus)? {
            let layer = u8::try_from(range.depth).map_err(|_| Unknown::NoStatus)?;
            let known = usize::from(layer) <= layers.below.len();
            if !known || range.offset != start + done || runs.len() > RUNS_MAX {
                return Err(Unknown::NoStatus);
            }
            if runs.last().is_none_or(|run| run.layer != layer) {
                runs.push(Run { start: done, layer });
            }
            let place = match range.content {
                Content::Data { at } => at,
                _ => None,
            };
            places.push(done, place);
            done += range.len;
        }
        if done == before || done > len {
            return Err(Unknown::NoStatus);
        }
        drop(layers);
        let_others_run().await;
    }
}

/// Lets the worker's other tasks run.
async fn let_others_run() {
    let mut waited = false;
    poll_fn(|cx| {
        if waited {
            return Poll::Ready(());
        }
        waited = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
