//! The choices of whoever opens an image.

use block::chain::ChainIndexes;
use block::lock::{LockGranularity, LockSet};
use block::open::ChainOptions;

use crate::engine::{BitmapStorage, SnapshotSelector, TableMemory};
use crate::luks::Secret;

/// The largest default table cache: it maps 256 GiB at 64 KiB clusters.
pub const L2_CACHE_DEFAULT_MAX_BYTES: u64 = 32 << 20;

/// The default memory for persistent bitmaps: the bits of 8 TiB at 64 KiB each, twice.
pub const BITMAPS_MEMORY_DEFAULT_BYTES: u64 = 32 << 20;

/// The options for opening an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Refuse writes, and lock the image as a reader.
    pub read_only: bool,
    /// Open this internal snapshot in place of the disk; only to be read. Images below are opened as they are.
    pub snapshot: Option<SnapshotSelector>,
    /// The secret that opens the image, which is encrypted; images below it are not.
    pub secret: Option<Secret>,
    /// Bypass the host's page cache.
    pub direct: bool,
    /// Open the backing file the image names. Without it such an image is refused.
    pub backing_files: bool,
    /// Open the data file an image of the chain names. Without it such an image is refused.
    pub data_files: bool,
    /// Return space to the host on discard; otherwise clusters stay allocated.
    pub sparse: bool,
    /// Keep a discarded cluster's place in the file, and return only its space.
    pub discard_no_unref: bool,
    /// Answer a change only when the mapping that reaches it is in the file, so that every answered change outlives
    /// this process, flushed or not. Costs a flush for each round of changes that allocate. Without it, a killed
    /// process loses what was not flushed, as a power cut does.
    pub persist_mappings: bool,
    /// The time at which the bits of persistent bitmaps that record changes are stored.
    pub bitmaps: BitmapStorage,
    /// The memory for those bitmaps in bytes. What does not fit is marked as in use before the first change, and then can only be removed.
    pub bitmaps_memory_bytes: u64,
    /// The budget of the L2 table cache in bytes; by default enough to map the whole disk, at most
    /// [`L2_CACHE_DEFAULT_MAX_BYTES`]. What is known of the use of clusters is part of it, unless the cache holds all
    /// tables. The refcount cache gets a quarter of it on top. Each image of a chain has as much; one between two others
    /// gives a quarter of it to the chain's index.
    pub l2_cache_bytes: Option<u64>,
    /// The bound for the table caches of all images that are opened with it, each of which has its own besides; by default none.
    pub table_memory: TableMemory,
    /// The number of threads that inflate compressed clusters; with none the queues' workers inflate them.
    pub inflate_threads: usize,
    /// Hold a write that the host has no space for until there is some, instead of failing it.
    pub wait_for_space: bool,
    /// Lock images as QEMU does; `None` locks nothing.
    pub lock: Option<LockGranularity>,
    /// The lock set for the locks of the whole chain; by default a set of their own.
    pub lock_set: LockSet,
    /// The indexes of long chains, which disks on the same images share if these are locked; by default a list of their own.
    /// With `None` a read asks the images of a chain one after the other.
    pub indexes: Option<ChainIndexes>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            snapshot: None,
            secret: None,
            direct: false,
            backing_files: false,
            data_files: false,
            sparse: true,
            discard_no_unref: false,
            persist_mappings: false,
            bitmaps: BitmapStorage::default(),
            bitmaps_memory_bytes: BITMAPS_MEMORY_DEFAULT_BYTES,
            l2_cache_bytes: None,
            table_memory: TableMemory::default(),
            inflate_threads: 2,
            wait_for_space: false,
            lock: Some(LockGranularity::ByteRange),
            lock_set: LockSet::default(),
            indexes: Some(ChainIndexes::default()),
        }
    }
}

impl OpenOptions {
    /// Returns the options that hold for all images of the chain.
    #[must_use]
    pub fn of_chain(&self) -> ChainOptions {
        ChainOptions {
            direct: self.direct,
            backing_files: self.backing_files,
            data_files: self.data_files,
            lock: self.lock,
            lock_set: self.lock_set.clone(),
            indexes: self.indexes.clone(),
        }
    }
}
