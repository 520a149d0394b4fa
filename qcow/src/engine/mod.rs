//! Processing of requests: the one QCOW2 engine, straight-line `async` code over the worker's ring.
//!
//! [`QcowDisk`] is the opened image, shared by all workers. Each worker has a queue with its own descriptor. A
//! request whose mapping is cached and in one piece goes straight into the ring, without a task; everything else
//! becomes a task on the worker.
//!
//! Invariants:
//!
//! - The metadata lock is never held across an await or an I/O.
//! - A request holds its epoch guard from before it reads the mapping until it is answered.

mod announce;
mod background;
mod bitmaps;
mod compact;
mod compressed;
mod corrupt;
mod counts;
mod data;
mod encryption;
mod exclusive;
mod flush;
mod grow;
mod header;
mod idle;
mod load;
mod part;
mod queue;
mod read;
mod reader;
mod reclaim;
mod record;
mod room;
mod shrink;
mod snapshots;
mod space;
mod status;
mod switch;
mod table_memory;
mod turn;
mod write;
mod zero;

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use block::delay::HoldOff;
use block::epoch::Epochs;
use block::file::ImageFile;
use block::sync::Mutex;
use block::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use block::sync::{CachePadded, ReadGuard, ShardedLock, WriteGuard};
use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, OpenQueueError};

use crate::format::{CompressionType, Geometry, GuestOffset, HeaderFields, Version};
use crate::metadata::Metadata;
pub(crate) use announce::Announcement;
use background::Background;
pub use bitmaps::{BitmapChange, BitmapStorage, BitmapsError};
pub use compact::{CompactError, CompactOptions, CompactProgress, Compacted, Fixed, FixedClusters};
pub(crate) use compressed::Inflater;
pub use counts::EngineCounts;
pub(crate) use encryption::Encryption;
use flush::Rounds;
pub(crate) use queue::Queue;
pub use reader::MappingReader;
use reclaim::Freeing;
pub use shrink::ShrinkError;
pub use snapshots::{DiskSize, SnapshotError, SnapshotSelector};
pub(crate) use snapshots::{disk_size_max, header_of};
pub use table_memory::TableMemory;

/// The image below this one.
#[derive(Debug)]
pub(crate) struct Backing {
    pub(crate) disk: Arc<dyn Disk>,
    /// Its size in bytes; past it this image reads zeros.
    pub(crate) size: u64,
}

impl Backing {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        let size = disk.info().size_bytes;
        Self { disk, size }
    }
}

/// The file that has the guest's bytes of an image whose tables are in another one.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) file: Arc<ImageFile>,
    /// It is the disk, byte by byte: where the disk reads as zeros it has zeros.
    pub(crate) is_raw: bool,
}

/// The treatment of an image by the engine; fixed while it is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) read_only: bool,
    /// Return space to the host on discard and unmapping write-zeroes.
    pub(crate) sparse: bool,
    /// Keep the host clusters of discarded guest clusters.
    pub(crate) discard_no_unref: bool,
    /// Answer a change only when the mapping that reaches it is in the file.
    pub(crate) persist_mappings: bool,
    pub(crate) bitmaps: BitmapPolicy,
}

/// The treatment of persistent bitmaps that record changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BitmapPolicy {
    pub(crate) storage: BitmapStorage,
    /// Bytes of memory for their bits and their directory.
    pub(crate) memory_bytes: u64,
}

/// State that all queues of an image share.
pub(crate) struct Shared {
    /// The image file: its header and tables, and the guest's bytes unless there is a data file.
    pub(crate) file: Arc<ImageFile>,
    pub(crate) data_file: Option<DataFile>,
    pub(crate) geometry: Geometry,
    pub(crate) policy: Policy,
    pub(crate) compression: CompressionType,
    pub(crate) encryption: Encryption,
    pub(crate) backing: Option<Backing>,
    /// The guest disk's size in bytes; requests are checked against it.
    size_bytes: AtomicU64,
    pub(crate) epochs: Arc<Epochs>,
    metadata: ShardedLock<Metadata>,
    // Apart from each other and from the fields above, which each request reads.
    rounds: CachePadded<Mutex<Rounds>>,
    freeing: CachePadded<Mutex<Freeing>>,
    /// The number of times that a compaction moved compressed data.
    compressed_moves: AtomicU64,
    background: CachePadded<Mutex<Background>>,
    /// A return of dropped clusters is due.
    later: idle::Later,
    header: header::HeaderWriter,
    counters: counts::Counters,
    table_memory: TableMemory,
    /// Announcements to other programs before the image changes.
    announcements: announce::Announcements,
    /// Writes of the bits of durable bitmaps.
    bit_writes: record::BitWrites,
    /// Turns of tasks that change the image as a whole (growth, operations that run alone, the close): one at a time.
    changes: turn::Turns,
    /// Queues are held off for an operation that runs alone.
    hold: exclusive::Hold,
    /// True once metadata was found corrupt: the image is not written any more.
    corrupt: AtomicBool,
    pub(crate) inflater: Inflater,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("path", &self.file.path())
            .finish_non_exhaustive()
    }
}

/// The parts of a [`QcowDisk`], once an image has been opened.
pub(crate) struct Parts {
    pub(crate) file: Arc<ImageFile>,
    pub(crate) data_file: Option<DataFile>,
    pub(crate) policy: Policy,
    pub(crate) compression: CompressionType,
    pub(crate) encryption: Encryption,
    pub(crate) backing: Option<Backing>,
    pub(crate) metadata: Metadata,
    pub(crate) header: HeaderFields,
    pub(crate) announcement: Announcement,
    pub(crate) inflate_threads: usize,
    pub(crate) table_memory: TableMemory,
}

impl Shared {
    /// Locks the metadata to read; for callers without a [`Queue`], which all share one shard of the lock. Never keep the
    /// guard across an await.
    pub(crate) fn read(&self) -> Result<ReadGuard<'_, Metadata>, IoError> {
        // Poisoned: a panic left it half-changed, and nothing in it can be trusted.
        self.metadata.read().map_err(|_| IoError::Corrupt)
    }

    /// Locks the metadata to change it. Never keep the guard across an await.
    pub(crate) fn write(&self) -> Result<WriteGuard<'_, Metadata>, IoError> {
        self.metadata.write().map_err(|_| IoError::Corrupt)
    }

    /// Returns the file that has the guest's bytes.
    pub(crate) fn guest_file(&self) -> &Arc<ImageFile> {
        self.data_file.as_ref().map_or(&self.file, |data| &data.file)
    }

    /// Ends all waits for space of requests, and lets none begin while the returned value lives.
    fn hold_off(&self) -> HoldOff {
        let mut hold_off = self.file.hold_off();
        if let Some(data) = &self.data_file {
            hold_off.join(data.file.hold_off());
        }
        hold_off
    }

    /// Records that the image is corrupt: it is not written any more. Returns `true` the first time.
    fn mark_corrupt(&self) -> bool {
        let first = !self.corrupt.swap(true, Ordering::SeqCst);
        if first {
            let image = self.file.path().display();
            tracing::error!(event = "corrupt", %image, "the image is corrupt; it is not written any more");
        }
        first
    }

    /// Accepts no more writes.
    fn stop_writes(&self) {
        self.corrupt.store(true, Ordering::SeqCst);
    }

    /// Returns the guest disk's size in bytes, whole sectors.
    #[inline]
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Lets the guest have a disk of `size_bytes`, rounded down to whole sectors.
    fn set_size_bytes(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes & !511, Ordering::Release);
    }

    fn is_corrupt(&self) -> bool {
        self.corrupt.load(Ordering::Relaxed)
    }

    /// Returns true if the byte at `offset`, if this image does not map it, may be other than zero.
    fn backing_covers(&self, offset: GuestOffset) -> bool {
        self.backed(offset, 1) > 0
    }

    /// Returns the number of bytes, of `len` unmapped bytes from `offset` on, that may be other than zeros.
    fn backed(&self, offset: GuestOffset, len: u64) -> u64 {
        let size = self.backing.as_ref().map_or(0, |backing| backing.size);
        size.saturating_sub(offset.bytes()).min(len)
    }
}

/// An opened QCOW2 image.
#[derive(Debug)]
pub struct QcowDisk {
    pub(crate) shared: Arc<Shared>,
}

impl QcowDisk {
    pub(crate) fn from_parts(mut parts: Parts) -> Arc<Self> {
        parts.metadata.holes_are_zeros = parts.encryption.is_plain();
        parts.table_memory.enter(&mut parts.metadata);
        let shared = Shared {
            announcements: announce::Announcements::new(&parts.file, parts.announcement),
            geometry: *parts.metadata.geometry(),
            file: parts.file,
            data_file: parts.data_file,
            policy: parts.policy,
            compression: parts.compression,
            encryption: parts.encryption,
            backing: parts.backing,
            size_bytes: AtomicU64::new(parts.metadata.size_bytes & !511),
            epochs: Epochs::new(),
            metadata: ShardedLock::new(parts.metadata),
            rounds: CachePadded::default(),
            freeing: CachePadded::default(),
            compressed_moves: AtomicU64::new(0),
            background: CachePadded::default(),
            later: idle::Later::default(),
            counters: counts::Counters::default(),
            header: header::HeaderWriter::new(parts.header),
            bit_writes: record::BitWrites::default(),
            changes: turn::Turns::default(),
            hold: exclusive::Hold::default(),
            corrupt: AtomicBool::new(false),
            inflater: compressed::inflater(parts.inflate_threads),
            table_memory: parts.table_memory,
        };
        shared.table_memory.join(&shared.metadata);
        Arc::new(Self {
            shared: Arc::new(shared),
        })
    }

    /// Returns the image's geometry.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    /// Returns a reader of the mapping, as each queue has one. Waits while a task changes the mapping.
    #[must_use]
    pub fn mapping_reader(&self) -> MappingReader {
        MappingReader::new(&self.shared.metadata)
    }

    /// As [`MappingReader::cached_host_offset`], for callers without a reader, which all share one shard of the lock.
    #[must_use]
    pub fn cached_host_offset(&self, guest_offset: u64) -> Option<u64> {
        reader::host_offset(&*self.shared.metadata.try_read()?, guest_offset)
    }

    /// Makes the disk larger: `size_bytes` is rounded down to whole sectors. The new part reads as zeros, also where
    /// the backing file is longer than the disk was. The change is durable when the call returns. Frontends notify
    /// their guests; open queues see the new size at once.
    ///
    /// # Errors
    ///
    /// [`IoError::OutOfRange`] for a smaller size or one past the capacity of an L1 table, [`IoError::Unsupported`]
    /// for an image of version 2 with snapshots, [`IoError::ReadOnly`], or the host's error; then the disk has its
    /// old size.
    pub async fn grow(&self, cx: &Context, size_bytes: u64) -> Result<(), IoError> {
        let queue = self.queue(cx).map_err(|error| IoError::from(error.source))?;
        grow::grow(&queue, size_bytes & !511).await
    }

    /// Returns true if nobody holds the metadata's lock. This must be so whenever no worker is in the middle of a
    /// round.
    #[doc(hidden)]
    #[must_use]
    pub fn is_unlocked(&self) -> bool {
        self.shared.metadata.try_write().is_some()
    }

    /// Returns the paths of its own files: of the image, unless that is temporary, and of its data file.
    pub fn own_files(&self) -> impl Iterator<Item = std::path::PathBuf> {
        let data = self.shared.data_file.iter().map(|data| &data.file);
        std::iter::once(&self.shared.file)
            .chain(data)
            .filter(|file| !file.is_temporary())
            .map(|file| file.path().to_owned())
    }

    fn queue(&self, cx: &Context) -> Result<Rc<Queue>, OpenQueueError> {
        Queue::open(&self.shared, cx)
    }
}

impl Disk for QcowDisk {
    fn info(&self) -> DiskInfo {
        let shared = &self.shared;
        let writable = !shared.policy.read_only;
        let cluster = u32::try_from(shared.geometry.cluster_size()).unwrap_or(u32::MAX);
        // Version 2 cannot hide the backing file's bytes but by writing zeros over them.
        let can_hide = shared.geometry.version() == Version::V3 || shared.backing.is_none();
        DiskInfo {
            size_bytes: shared.size_bytes(),
            read_only: !writable,
            preferred_io_bytes: cluster,
            physical_block_bytes: u32::try_from(shared.guest_file().alignment().offset)
                .unwrap_or(512)
                .max(512),
            discard: writable && shared.policy.sparse && can_hide,
            discard_granularity_bytes: cluster,
            write_zeroes: writable,
        }
    }

    fn files(&self) -> Vec<std::path::PathBuf> {
        let below = self
            .shared
            .backing
            .iter()
            .flat_map(|backing| backing.disk.files());
        self.own_files().chain(below).collect()
    }

    fn written_files(&self) -> Vec<std::path::PathBuf> {
        if self.shared.policy.read_only {
            return Vec::new();
        }
        self.own_files().collect()
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Ok(Box::new(queue::QcowQueue(self.queue(cx)?)))
    }

    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        self.shared.hold_off().for_good();
        if self.shared.policy.read_only {
            return Box::pin(async { Ok(()) });
        }
        let queue = Queue::open_last(&self.shared, cx);
        Box::pin(async move {
            let queue = queue.map_err(|error| IoError::from(error.source))?;
            let turn = queue.shared.changes.take().await;
            queue.shared.later.stop();
            // However long it takes: nothing may be lost.
            flush::settle(&queue, None).await?;
            if bitmaps::are_unstored(&queue)? {
                let section = exclusive::last(&queue, &turn).await?;
                bitmaps::store(&queue, &section).await;
                // What they had before is freed.
                flush::settle(&queue, None).await?;
            }
            // Reserved space that was not used is returned.
            let end = queue.metadata()?.refcounts.unused_reserve();
            if let Some(end) = end {
                let end = queue.shared.geometry.host_offset(end);
                queue.file.set_len(end.bytes()).await?;
            }
            Ok(())
        })
    }

    fn resize(
        self: Arc<Self>,
        cx: &Context,
        size_bytes: u64,
    ) -> LocalBoxFuture<'static, Result<(), IoError>> {
        let queue = self.queue(cx);
        Box::pin(async move {
            let queue = queue.map_err(|error| IoError::from(error.source))?;
            grow::grow(&queue, size_bytes & !511).await
        })
    }

    fn hold_off(&self) -> Option<HoldOff> {
        Some(self.shared.hold_off())
    }
}
