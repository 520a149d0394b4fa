//! One queue's view of an image, and the path of a request that needs no task.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use block::epoch::{EpochGuard, EpochQueue};
use block::file::{FileView, ImageFile};
use block::status::StatusRange;
use block::sync::ReadGuard;
use block::{Context, DiskQueue, IoError, LocalBoxFuture, Op, OpenQueueError, Request};

use super::compressed::InflatedClusters;
use super::data::GuestData;
use super::room::Rooms;
use super::{MappingReader, Shared, exclusive, flush, read, record, space, status, write, zero};
use crate::format::{GuestOffset, HostOffset};
use crate::metadata::{Extent, Lookup, Metadata};

/// Per-worker state of an open image: file view, backing queue, epoch, shard of the metadata lock.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) shared: Arc<Shared>,
    metadata: MappingReader,
    pub(crate) cx: Context,
    /// The image file, for its header and tables.
    pub(crate) file: FileView,
    pub(crate) data: GuestData,
    /// For the memory of its requests.
    pub(super) rooms: Rooms,
    /// The backing image's queue on this worker, and its size in bytes.
    pub(crate) backing: Option<(Rc<dyn DiskQueue>, u64)>,
    epoch: EpochQueue,
    /// Clusters inflated a moment ago.
    pub(crate) inflated: RefCell<InflatedClusters>,
    /// Writes in place whose bits are to be stored first.
    pub(super) unstored: RefCell<Vec<Request>>,
}

impl Queue {
    pub(super) fn open(shared: &Arc<Shared>, cx: &Context) -> Result<Rc<Self>, OpenQueueError> {
        let backing = match &shared.backing {
            Some(backing) => Some((Arc::clone(&backing.disk).open_queue(cx)?.into(), backing.size)),
            None => None,
        };
        Self::on(shared, cx, |file| file.view(cx), backing)
    }

    /// Opens the queue that closes an image. It flushes and frees, which reaches no backing file. It needs no
    /// descriptor except the one that the file keeps for it.
    pub(super) fn open_last(shared: &Arc<Shared>, cx: &Context) -> Result<Rc<Self>, OpenQueueError> {
        Self::on(shared, cx, |file| file.last_view(cx), None)
    }

    fn on(
        shared: &Arc<Shared>,
        cx: &Context,
        view: impl Fn(&Arc<ImageFile>) -> std::io::Result<FileView>,
        backing: Option<(Rc<dyn DiskQueue>, u64)>,
    ) -> Result<Rc<Self>, OpenQueueError> {
        let view = |file: &Arc<ImageFile>| {
            view(file).map_err(|source| OpenQueueError {
                disk: file.path().display().to_string(),
                source,
            })
        };
        let file = view(&shared.file)?;
        let data = match &shared.data_file {
            Some(data) => view(&data.file)?,
            None => file.clone(),
        };
        let rooms = Rooms::new();
        Ok(Rc::new(Self {
            shared: Arc::clone(shared),
            metadata: MappingReader::new(&shared.metadata),
            cx: cx.clone(),
            data: GuestData::new(data, &shared.encryption, cx, &rooms),
            rooms,
            file,
            backing,
            epoch: shared.epochs.register(),
            inflated: RefCell::default(),
            unstored: RefCell::default(),
        }))
    }
}

/// The queue as frontends see it.
#[derive(Debug)]
pub(super) struct QcowQueue(pub(super) Rc<Queue>);

impl DiskQueue for QcowQueue {
    #[inline]
    fn submit(&self, mut request: Request) {
        let queue = &*self.0;
        let policy = queue.shared.policy;
        // A read-only image frees nothing, and keeps the guard of an image above it.
        if !policy.read_only {
            request.guard = Some(queue.epoch.enter());
        }
        // After the guard: an operation that makes the disk smaller waits for requests that have seen the old size.
        if let Err(error) = request.check(queue.shared.size_bytes(), policy.read_only) {
            return request.finish(Err(error));
        }
        if request.len == 0 && request.op != Op::Flush {
            return request.finish(Ok(()));
        }
        // The request itself is moved once, when its way is known.
        let way = match request.op {
            Op::Read => queue.way_of_read(&request),
            Op::Write { fua } => queue.way_of_write(&request, fua),
            _ => Way::Task,
        };
        let refused = match (way, &queue.backing) {
            (Way::Data(at), _) => queue.data.submit(at, request),
            (Way::Zeros, _) => queue.cx.ring().answer_with_zeros(request),
            (Way::Backing, Some((backing, _))) => return backing.submit(request),
            (Way::Backing | Way::Task, _) => Err(request),
        };
        if let Err(request) = refused {
            wait(&self.0, request);
        }
    }

    fn below(&self) -> Option<Rc<dyn DiskQueue>> {
        self.0.backing.as_ref().map(|(backing, _)| Rc::clone(backing))
    }

    fn status(&self, offset: u64, len: u64) -> LocalBoxFuture<'_, Result<Vec<StatusRange>, IoError>> {
        Box::pin(status::status(&self.0, offset, len))
    }

    fn data_file(&self) -> Option<FileView> {
        let shared = &self.0.shared;
        (shared.policy.read_only && shared.encryption.is_plain()).then(|| self.0.data.file().clone())
    }
}

/// The way on which a request is executed.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// One op on the image file's bytes from here on.
    Data(HostOffset),
    /// Its bytes are zeros.
    Zeros,
    /// The backing image's queue.
    Backing,
    /// A task, which may wait.
    Task,
}

/// Executes a request that may wait. Kept out of the way of those that do not.
#[inline(never)]
fn wait(queue: &Rc<Queue>, request: Request) {
    match record::lacks_only_bits(queue, &request) {
        true => record::submit_once_stored(queue, request),
        false => spawn(queue, request),
    }
}

/// Executes a request from a task.
fn spawn(queue: &Rc<Queue>, request: Request) {
    queue.cx.spawn(execute(Rc::clone(queue), request));
}

/// Submits a write that has waited, as one op if it may be one.
pub(super) fn submit_recorded(queue: &Rc<Queue>, request: Request) {
    let refused = match queue.overwritten(&request) {
        Some(at) => queue.data.submit(at, request),
        None => Err(request),
    };
    if let Err(request) = refused {
        spawn(queue, request);
    }
}

impl Queue {
    /// Marks a request as in flight: clusters that it may see in the mapping are not reused while the guard lives.
    pub(super) fn enter(&self) -> EpochGuard {
        self.epoch.enter()
    }

    /// Locks the metadata to read. Never keep the guard across an await.
    pub(super) fn metadata(&self) -> Result<ReadGuard<'_, Metadata>, IoError> {
        self.metadata.read()
    }

    /// Locks the metadata to read, unless a task is changing it or queues are held off.
    pub(super) fn try_metadata(&self) -> Option<ReadGuard<'_, Metadata>> {
        self.metadata.try_read()
    }

    /// Returns true if a guard of this queue holds clusters back from reuse.
    pub(super) fn is_entered(&self) -> bool {
        self.epoch.is_entered()
    }

    /// Returns the way of a read. It needs no task if its mapping is cached and in one piece.
    #[inline]
    fn way_of_read(&self, request: &Request) -> Way {
        let found = match self.metadata.try_read() {
            Some(metadata) => metadata.lookup(GuestOffset::new(request.offset), request.len),
            None => return Way::Task,
        };
        let Lookup::Found { extent, len } = found else {
            return Way::Task;
        };
        if len != request.len {
            return Way::Task;
        }
        match extent {
            Extent::Data { at, .. } => Way::Data(at),
            Extent::Zero => Way::Zeros,
            Extent::Unallocated => match &self.backing {
                Some((_, size)) if request.offset + request.len <= *size => Way::Backing,
                Some((_, size)) if request.offset < *size => Way::Task,
                _ => Way::Zeros,
            },
            Extent::Compressed(_) => Way::Task,
        }
    }

    /// Returns the way of a write. It needs no task if it overwrites owned host bytes.
    #[inline]
    fn way_of_write(&self, request: &Request, fua: bool) -> Way {
        if !self.shared.announcements.are_none() && !record::is_recorded(self, request) {
            return Way::Task;
        }
        let Some(metadata) = self.metadata.try_read() else {
            return Way::Task;
        };
        // A forced write must find the mapping durable already; then its own sync is enough. So must a write that
        // has to outlive this process, which needs no sync then.
        if (fua || self.shared.policy.persist_mappings) && !metadata.is_clean() {
            return Way::Task;
        }
        self.owned_place(&metadata, request).map_or(Way::Task, Way::Data)
    }

    /// Returns the place of the host bytes that a write overwrites, if that is all there is to do beside its record.
    pub(super) fn overwritten(&self, request: &Request) -> Option<HostOffset> {
        let is_plain = request.op == Op::Write { fua: false } && !self.shared.policy.persist_mappings;
        if !is_plain {
            return None;
        }
        self.owned_place(&*self.try_metadata()?, request)
    }

    /// Returns the place of the host bytes that a request may overwrite: owned, in one piece, and nothing in flight there.
    #[inline]
    fn owned_place(&self, metadata: &Metadata, request: &Request) -> Option<HostOffset> {
        let offset = GuestOffset::new(request.offset);
        if metadata.is_in_flight(offset, request.len) {
            return None;
        }
        match metadata.lookup(offset, request.len) {
            Lookup::Found {
                extent: Extent::Data { at, owned: true },
                len,
            } if len == request.len && !self.shared.is_corrupt() => Some(at),
            _ => None,
        }
    }
}

/// Makes the metadata that a change needs durable before the change is answered.
async fn make_durable(queue: &Rc<Queue>, fua: bool) -> Result<(), IoError> {
    let persists = queue.shared.policy.persist_mappings;
    if fua || persists && !queue.metadata()?.is_clean() {
        return flush::flush(queue).await;
    }
    Ok(())
}

/// Executes and answers a request from a task.
async fn execute(queue: Rc<Queue>, mut request: Request) {
    let (offset, len) = (GuestOffset::new(request.offset), request.len);
    if !queue.shared.policy.read_only
        && let Some(guard) = request.guard.take()
    {
        match exclusive::admit(&queue, guard).await {
            Ok(guard) => request.guard = Some(guard),
            Err(error) => return request.finish(Err(error)),
        }
        // The operation that held it off may have made the disk smaller.
        if let Err(error) = request.check(queue.shared.size_bytes(), false) {
            return request.finish(Err(error));
        }
    }
    if request.op.is_write() && queue.shared.is_corrupt() {
        return request.finish(Err(IoError::Corrupt));
    }
    // Boxed: every task would have room for it otherwise, which is copied when the task begins.
    if request.op.is_write()
        && !queue.shared.announcements.are_none()
        && let Err(error) = Box::pin(record::change(&queue, &mut request)).await
    {
        return request.finish(Err(error));
    }
    match request.op {
        Op::Read => {
            let buffer = Rc::new(request.take_buffer());
            let result = read::read(&queue, &buffer, 0, offset, len).await;
            request.finish_with(Rc::try_unwrap(buffer).unwrap_or_default(), result);
        }
        Op::Write { fua } => {
            let buffer = Rc::new(request.take_buffer());
            let source = write::Source::Buffer {
                buffer: Rc::clone(&buffer),
                guest: offset,
            };
            let write = async |growth| write::write(&queue, &source, offset, len, growth).await;
            let mut result = space::with_space(&queue, &mut request, write).await;
            if result.is_ok() {
                result = make_durable(&queue, fua).await;
            }
            drop(source);
            request.finish_with(Rc::try_unwrap(buffer).unwrap_or_default(), result);
        }
        Op::Flush => {
            let result = flush::flush(&queue).await;
            request.finish(result);
        }
        Op::Discard => {
            let discard = async |_| zero::discard(&queue, offset, len).await;
            let mut result = space::with_space(&queue, &mut request, discard).await;
            if result.is_ok() {
                result = make_durable(&queue, false).await;
            }
            request.finish(result);
        }
        Op::WriteZeroes { unmap, fua } => {
            let zero = async |_| zero::write_zeroes(&queue, offset, len, unmap).await;
            let mut result = space::with_space(&queue, &mut request, zero).await;
            if result.is_ok() {
                result = make_durable(&queue, fua).await;
            }
            request.finish(result);
        }
    }
}
