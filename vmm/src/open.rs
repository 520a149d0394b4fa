//! From a [`DiskConfig`] to an opened, locked disk.
//!
//! Nothing is written before the image, and every image below it, is open, locked and found sound. A format
//! is never guessed beyond one question: a file that starts with QCOW2's magic is QCOW2 unless it is said
//! to be raw. Whatever else it may look like, it must be said to be raw, because a guest can write any
//! magic into a raw disk.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::file::{FileOptions, ImageFile, OpenFileError};
use block::lock::{ImageLock, LockError, LockMode, LockSet};
use block::raw::RawDisk;
use block::ring::RingKind;
use block::throttle::{Limiter, ThrottledDisk};
use block::worker::WorkerConfig;
use block::{Context, Disk, IoError, OpenQueueError};
use qcow::{OpenOptions, QcowDisk};

use crate::disk_config::{DiskConfig, ImageType, WriteErrors};
use crate::ublk::claim::{ClaimError, refuse_claimed};

/// The first bytes of every QCOW2 image.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// An error of opening a disk. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file could not be opened.
    #[error(transparent)]
    File(#[from] OpenFileError),
    /// Another program has the image.
    #[error(transparent)]
    Lock(#[from] LockError),
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
    /// The raw disk refused.
    #[error(transparent)]
    Raw(#[from] OpenQueueError),
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
    /// The QCOW2 image, or one below it, cannot be used.
    #[error(transparent)]
    Qcow(#[from] qcow::OpenError),
}

impl OpenError {
    /// Returns true if another program has an image that is needed.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        let mut error = match self {
            Self::Lock(error) => return matches!(error, LockError::Held { .. }),
            Self::Qcow(error) => error,
            _ => return false,
        };
        while let qcow::OpenError::Backing { source, .. } = error {
            error = source;
        }
        matches!(error, qcow::OpenError::Lock(LockError::Held { .. }))
    }
}

/// An opened disk, locked until this and all its sharers are dropped.
#[derive(Debug)]
pub struct OpenedDisk {
    // Dropped in this order: nobody is let in while the disk still lives here.
    disk: Arc<dyn Disk>,
    /// The lock of a raw disk; a QCOW2 disk holds those of its whole chain itself.
    _lock: Option<ImageLock>,
}

impl OpenedDisk {
    /// The disk, to share with those who serve it.
    #[must_use]
    pub fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.disk)
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
    if !config.readonly {
        refuse_claimed(&config.path, how.device)?;
    }
    let mut opened = open_unlimited(config, how)?;
    if let Some(limiter) = limiter {
        opened.disk = ThrottledDisk::new(opened.disk, limiter);
    }
    Ok(opened)
}

/// Returns the limiter of the disk's requests, if it has limits.
fn limiter(config: &DiskConfig) -> Result<Option<Arc<Limiter>>, OpenError> {
    match &config.rate_limit_group {
        Some(member) => {
            let limiter = member.limiter().ok_or_else(|| OpenError::RateLimitGroup {
                path: config.path.clone(),
                id: member.id().to_owned(),
            })?;
            Ok(Some(Arc::clone(limiter)))
        }
        None if config.rate_limits.is_empty() => Ok(None),
        None => Ok(Some(Limiter::new(&config.rate_limits))),
    }
}

/// Returns a context for a few reads, which do not justify a ring.
fn context(config: &DiskConfig) -> Result<Context, OpenError> {
    Context::new(RingKind::Syscalls, 64).map_err(|error| OpenError::Read {
        path: config.path.clone(),
        source: std::io::Error::from(error).into(),
    })
}

fn open_unlimited(config: &DiskConfig, how: &Opening) -> Result<OpenedDisk, OpenError> {
    let cx = context(config)?;
    match image_type(config, &cx)? {
        ImageType::Raw => {
            let options = FileOptions {
                write: !config.readonly,
                direct: config.direct,
            };
            let file = ImageFile::open(&config.path, options)?;
            let mode = if config.readonly {
                LockMode::Read
            } else {
                LockMode::Write
            };
            let lock = ImageLock::acquire_in(
                &how.lock_set,
                file.as_fd(),
                &config.path,
                mode,
                config.lock_granularity,
            )?;
            if config.werror == WriteErrors::Wait {
                file.wait_for_space();
            }
            Ok(OpenedDisk {
                disk: RawDisk::open(file, config.sparse, &cx)?,
                _lock: Some(lock),
            })
        }
        ImageType::Qcow2 => {
            let options = OpenOptions {
                read_only: config.readonly,
                direct: config.direct,
                backing_files: config.backing_files,
                sparse: config.sparse,
                discard_no_unref: config.discard_no_unref,
                persist_mappings: how.persist_mappings,
                l2_cache_bytes: config.l2_cache_bytes,
                wait_for_space: config.werror == WriteErrors::Wait,
                lock: Some(config.lock_granularity),
                lock_set: how.lock_set.clone(),
                ..OpenOptions::default()
            };
            Ok(OpenedDisk {
                disk: QcowDisk::open(&config.path, &options)?,
                _lock: None,
            })
        }
    }
}

/// Finds out what would keep a disk from being opened, but for others who have it open: nothing is locked,
/// and nothing written.
///
/// # Errors
///
/// [`OpenError`], naming the file.
pub fn rehearse(config: &DiskConfig) -> Result<(), OpenError> {
    let cx = context(config)?;
    let options = FileOptions {
        write: !config.readonly,
        direct: config.direct,
    };
    ImageFile::open(&config.path, options)?;
    if image_type(config, &cx)? == ImageType::Qcow2 {
        let options = OpenOptions {
            read_only: true,
            direct: config.direct,
            backing_files: config.backing_files,
            lock: None,
            ..OpenOptions::default()
        };
        QcowDisk::open(&config.path, &options)?;
    }
    Ok(())
}

/// The format that was given, or QCOW2 if the file says so itself.
fn image_type(config: &DiskConfig, cx: &Context) -> Result<ImageType, OpenError> {
    if let Some(given) = config.image_type {
        return Ok(given);
    }
    let file = ImageFile::open(&config.path, FileOptions::default())?;
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

/// Returns the worker configuration of one queue.
#[must_use]
pub fn worker_config(config: &DiskConfig, queue: u16) -> WorkerConfig {
    let mut worker = WorkerConfig {
        // The kernel keeps 15 bytes of a thread's name.
        name: format!("disk-q{queue}"),
        cpus: config.cpus_of(queue).map(<[usize]>::to_vec).unwrap_or_default(),
        ..WorkerConfig::default()
    };
    if let Some(poll_us) = config.poll_us {
        worker.poll_max = Duration::from_micros(poll_us.into());
    }
    worker
}
