//! From a [`DiskConfig`] to an opened, locked disk.
//!
//! Nothing is written before the image, and every image below it, is open, locked and found sound. A format
//! is never guessed beyond one question: a file that starts with QCOW2's magic is QCOW2 unless it is said
//! to be raw. Whatever else it may look like, it must be said to be raw, because a guest can write any
//! magic into a raw disk.
//!
//! With a temporary overlay the image is opened, locked and found sound as one that is only read, before the overlay is
//! made.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use block::chain::ChainIndexes;
use block::file::{FileOptions, HostFiles, ImageFile};
use block::lock::{LockGranularity, LockSet};
use block::open::{Access, ChainOptions, Format};
use block::raw::Raw;
use block::ring::RingKind;
use block::throttle::{Limiter, RateLimits, ThrottledDisk};
use block::{Context, Disk, IoError};
use qcow::{OpenOptions, Qcow2, QcowDisk, SnapshotError, TableMemory};

use crate::disk_config::{DiskConfig, ImageType, WriteErrors};
use crate::error::chain;
use crate::saved_devices::claim::{ClaimError, refuse_claimed};
use crate::secret_file::{SecretFile, SecretFileError};

/// The first bytes of every QCOW2 image.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// The indexes of the long chains that this process has open.
static INDEXES: LazyLock<ChainIndexes> = LazyLock::new(ChainIndexes::default);

/// The bound for the tables of all images that this process has open.
static TABLE_MEMORY: LazyLock<TableMemory> = LazyLock::new(TableMemory::default);

/// Returns the bound for the tables of all images that this process has open. There is none at first.
pub fn table_memory() -> &'static TableMemory {
    &TABLE_MEMORY
}

/// An error of opening a disk. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The disk, or an image below it, could not be opened.
    #[error(transparent)]
    Disk(#[from] block::open::OpenError),
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: IoError,
    },
    /// Neither the file nor the user says what it is.
    #[error(
        "{} does not start with the QCOW2 magic; if it is a raw image, pass image_type=raw (raw is never guessed)",
        path.display()
    )]
    FormatNotGiven {
        /// The file.
        path: PathBuf,
    },
    /// Its secret cannot be read.
    #[error("{}: it has no secret", path.display())]
    Secret {
        /// The image.
        path: PathBuf,
        /// The reason.
        #[source]
        source: SecretFileError,
    },
    /// It belongs to a block device of the host.
    #[error(transparent)]
    Claimed(#[from] ClaimError),
    /// It is another program's disk.
    #[error("{} is the socket of a vhost-user backend, not an image", path.display())]
    Foreign {
        /// The socket.
        path: PathBuf,
    },
    /// The disk's group was not made.
    #[error("{}: no --rate-limit-group has the id `{id}`", path.display())]
    RateLimitGroup {
        /// The file.
        path: PathBuf,
        /// The group.
        id: String,
    },
}

impl OpenError {
    /// Returns true if another program has an image that is needed.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        matches!(self, Self::Disk(error) if error.is_locked())
    }
}

/// An opened disk, locked until this and all its sharers are dropped.
#[derive(Debug)]
pub struct OpenedDisk {
    disk: Arc<dyn Disk>,
    /// The disk below its rate limits, which requests of this program's operator do not wait for.
    unlimited: Weak<dyn Disk>,
    /// The same disk, as the one whose limits can change.
    throttled: Weak<ThrottledDisk>,
    /// The QCOW2 image behind it.
    qcow: Option<Weak<QcowDisk>>,
}

/// The QCOW2 image of a disk, while that is open.
#[derive(Clone, Debug)]
pub struct OpenedImage {
    disk: Weak<dyn Disk>,
    qcow: Weak<QcowDisk>,
}

impl OpenedImage {
    /// Calls `work` with the image, which stays open and locked meanwhile. Returns `None` if the disk was released.
    pub fn with<T>(&self, work: impl FnOnce(&QcowDisk) -> T) -> Option<T> {
        // What waits for the release of the disk counts its owners.
        let _disk = self.disk.upgrade()?;
        let qcow = self.qcow.upgrade()?;
        Some(work(&qcow))
    }

    /// Has the image's engine do something on the calling thread, with plain system calls: the workers of the disk go on.
    ///
    /// # Errors
    ///
    /// The error as one sentence.
    pub(crate) fn run<T, E: std::error::Error + 'static>(
        &self,
        work: impl AsyncFnOnce(&QcowDisk, &Context) -> Result<T, E>,
    ) -> Result<T, String> {
        let done = self.with(|disk| -> Result<T, String> {
            let cx = Context::new(RingKind::Syscalls, 64).map_err(|error| chain(&error))?;
            let done = cx.block_on(work(disk, &cx));
            done.map_err(|error| format!("cannot wait for I/O: {error}"))?
                .map_err(|error| chain(&error))
        });
        done.unwrap_or_else(|| Err(chain(&SnapshotError::Closed)))
    }
}

/// An opened disk, for requests of this program's operator. It does not keep the disk open or locked.
#[derive(Clone, Debug)]
pub(crate) struct DiskHandle {
    disk: Weak<dyn Disk>,
    unlimited: Weak<dyn Disk>,
    throttled: Weak<ThrottledDisk>,
    image: Option<OpenedImage>,
}

impl DiskHandle {
    /// Returns the QCOW2 image behind the disk; `None` if the disk is raw.
    pub(crate) fn image(&self) -> Option<&OpenedImage> {
        self.image.as_ref()
    }

    /// Sets the disk's rate limits, if `limits` says which, and returns those that it has then. `None` if the disk was released.
    pub(crate) fn limits(&self, limits: Option<&RateLimits>) -> Option<RateLimits> {
        let disk = self.throttled.upgrade()?;
        if let Some(limits) = limits {
            disk.set_limits(limits);
        }
        Some(disk.limits())
    }

    /// Calls `work` with the disk below its rate limits, which stays open and locked meanwhile. Returns `None` if the disk
    /// was released.
    pub(crate) fn with<T>(&self, work: impl FnOnce(Arc<dyn Disk>) -> T) -> Option<T> {
        let _disk = self.disk.upgrade()?;
        Some(work(self.unlimited.upgrade()?))
    }
}

impl OpenedDisk {
    fn of(image: Arc<QcowDisk>) -> Self {
        let qcow = Some(Arc::downgrade(&image));
        Self {
            qcow,
            ..Self::raw(image)
        }
    }

    fn raw(disk: Arc<dyn Disk>) -> Self {
        Self {
            unlimited: Arc::downgrade(&disk),
            throttled: Weak::new(),
            disk,
            qcow: None,
        }
    }

    /// Returns a handle that does not keep the disk open.
    pub(crate) fn handle(&self) -> DiskHandle {
        DiskHandle {
            disk: Arc::downgrade(&self.disk),
            unlimited: Weak::clone(&self.unlimited),
            throttled: Weak::clone(&self.throttled),
            image: self.image(),
        }
    }

    /// The disk, to share with those who serve it.
    #[must_use]
    pub fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.disk)
    }

    /// Returns the paths of the disk's own files, without those below it.
    pub(crate) fn own_files(&self) -> Vec<PathBuf> {
        let image = self
            .image()
            .and_then(|image| image.with(|disk| disk.own_files().collect()));
        image.unwrap_or_else(|| self.disk.files().into_iter().take(1).collect())
    }

    /// The QCOW2 image behind the disk; `None` if the disk is raw.
    #[must_use]
    pub fn image(&self) -> Option<OpenedImage> {
        Some(OpenedImage {
            disk: Arc::downgrade(&self.disk),
            qcow: self.qcow.clone()?,
        })
    }

    /// Releases the disk and its lock when the other owners have released theirs, and waits for them for `patience`.
    /// Returns `false` if one still has the disk; the image then stays locked until it is released.
    #[must_use]
    pub fn release(self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while Arc::strong_count(&self.disk) > 1 {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

/// Opens and locks the disk that `config` describes.
///
/// # Errors
///
/// [`OpenError`], naming the file. Nothing has been written to it then.
pub fn open(config: &DiskConfig) -> Result<OpenedDisk, OpenError> {
    open_as(config, &Opening::default())
}

/// The purpose for which a disk is opened, beside its configuration.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// Answered writes outlive this process, flushed or not.
    pub persist_mappings: bool,
    /// The block device of the host that it is opened for, which may have been waiting for that.
    pub device: Option<u32>,
    /// The lock set of its images: that of the previous server, if it handed one over.
    pub lock_set: LockSet,
}

/// As [`open`], for a purpose.
///
/// # Errors
///
/// As [`open`].
pub fn open_as(config: &DiskConfig, how: &Opening) -> Result<OpenedDisk, OpenError> {
    if config.vhost_user {
        let path = config.path.clone();
        return Err(OpenError::Foreign { path });
    }
    let limiter = limiter(config)?;
    let access = if config.writes_image() {
        refuse_claimed(&config.path, how.device)?;
        Access::Write
    } else {
        Access::Read
    };
    let mut opened = open_chain(config, how, access, Some(config.lock_granularity))?;
    // Also without limits, which it may be given later.
    let throttled = ThrottledDisk::new(opened.disk, limiter);
    opened.throttled = Arc::downgrade(&throttled);
    opened.disk = throttled;
    Ok(opened)
}

/// Returns the limiter of the disk's requests.
fn limiter(config: &DiskConfig) -> Result<Arc<Limiter>, OpenError> {
    match &config.rate_limit_group {
        Some(member) => {
            let limiter = member.limiter().ok_or_else(|| OpenError::RateLimitGroup {
                path: config.path.clone(),
                id: member.id().to_owned(),
            })?;
            Ok(Arc::clone(limiter))
        }
        None => Ok(Limiter::new(&config.rate_limits)),
    }
}

/// Returns a context for a few reads, which do not justify a ring.
fn context(config: &DiskConfig) -> Result<Context, OpenError> {
    Context::new(RingKind::Syscalls, 64).map_err(|error| read_error(config, error.into()))
}

fn read_error(config: &DiskConfig, error: std::io::Error) -> OpenError {
    OpenError::Read {
        path: config.path.clone(),
        source: error.into(),
    }
}

/// Opens the disk's chain of images. This is the place that knows which formats there are.
fn open_chain(
    config: &DiskConfig,
    how: &Opening,
    access: Access,
    lock: Option<LockGranularity>,
) -> Result<OpenedDisk, OpenError> {
    let cx = context(config)?;
    let secret = config.secret_file.as_ref().map(SecretFile::secret).transpose();
    let secret = secret.map_err(|source| OpenError::Secret {
        path: config.path.clone(),
        source,
    })?;
    let wait_for_space = config.werror == WriteErrors::Wait;
    let raw = Raw {
        discard: config.sparse,
        wait_for_space,
    };
    let qcow2 = Qcow2(OpenOptions {
        snapshot: config.snapshot.clone(),
        secret,
        sparse: config.sparse,
        discard_no_unref: config.discard_no_unref,
        persist_mappings: how.persist_mappings,
        l2_cache_bytes: config.l2_cache_bytes,
        table_memory: TABLE_MEMORY.clone(),
        wait_for_space,
        bitmaps: config.bitmaps,
        ..OpenOptions::default()
    });
    let formats: [&dyn Format; 2] = [&qcow2, &raw];
    let options = ChainOptions {
        direct: config.direct,
        backing_files: config.backing_files,
        data_files: config.data_file,
        lock,
        lock_set: how.lock_set.clone(),
        indexes: Some(INDEXES.clone()),
    };
    let image_type = image_type(config, &cx)?;
    let opening = block::open::Opening::new(&cx, &HostFiles, &formats, options);
    let opened = cx.block_on(async {
        let opened = match image_type {
            ImageType::Raw => OpenedDisk::raw(raw.open(&opening, &config.path, access).await?),
            ImageType::Qcow2 => OpenedDisk::of(qcow2.open_qcow(&opening, &config.path, access).await?),
        };
        let Some(overlay) = &config.overlay else {
            return Ok(opened);
        };
        let directory = overlay.directory();
        let name = format!(
            "temporary overlay of {} in {}",
            config.path.display(),
            directory.display()
        );
        let file = ImageFile::temporary(&directory, name.into(), config.direct)?;
        Ok(OpenedDisk::of(
            qcow2.open_over(&opening, file, opened.disk).await?,
        ))
    });
    let opened: Result<_, block::open::OpenError> = opened.map_err(|error| read_error(config, error))?;
    Ok(opened?)
}

/// Opens a disk to be looked at, while others may have it open: nothing is locked, and nothing written. It is not to be served.
///
/// # Errors
///
/// [`OpenError`], naming the file.
pub(crate) fn look(config: &DiskConfig) -> Result<OpenedDisk, OpenError> {
    open_chain(config, &Opening::default(), Access::Read, None)
}

/// Finds out what would keep a disk from being opened, but for others who have it open: nothing is locked,
/// and nothing written.
///
/// # Errors
///
/// [`OpenError`], naming the file.
pub fn rehearse(config: &DiskConfig) -> Result<(), OpenError> {
    look(config)?;
    if config.writes_image() {
        let options = FileOptions {
            write: true,
            direct: config.direct,
        };
        ImageFile::open(&config.path, options).map_err(block::open::OpenError::from)?;
    }
    Ok(())
}

/// The format that was given, or QCOW2 if the file says so itself.
fn image_type(config: &DiskConfig, cx: &Context) -> Result<ImageType, OpenError> {
    if let Some(given) = config.image_type {
        return Ok(given);
    }
    let file = ImageFile::open(&config.path, FileOptions::default()).map_err(block::open::OpenError::from)?;
    let read = |source| OpenError::Read {
        path: config.path.clone(),
        source,
    };
    let view = file.view(cx).map_err(|error| read(error.into()))?;
    let start = cx
        .block_on(view.read_at(0, QCOW2_MAGIC.len()))
        .map_err(|error| read(error.into()))?
        .map_err(read)?;
    if start[..] == QCOW2_MAGIC {
        Ok(ImageType::Qcow2)
    } else {
        Err(OpenError::FormatNotGiven {
            path: config.path.clone(),
        })
    }
}
