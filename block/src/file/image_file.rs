//! The opened file of an image, which all workers share.
//!
//! It holds what views on several workers have in common: the descriptor to duplicate, locks on blocks, the syncs, their
//! first failure and the changes that they cover, the waits for space, and the log limits.
//!
//! Invariant: once a sync has failed, on any view, none succeeds any more.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::alignment::{Alignment, direct_alignment};
use super::open::{self, FileOptions, OpenFileError};
use super::ranges::RangeLocks;
use crate::delay::{Delays, HoldOff};
use crate::error::IoError;
use crate::lock::{ImageLock, LockError, LockGranularity, LockMode, LockSet};
use crate::report::Reports;
use crate::sync::Mutex;
use crate::sync::atomic::AtomicBool;
use crate::sync_rounds::Syncs;

/// Source of image files: the host's file system, or a simulated one.
pub trait OpenFiles {
    /// Opens the file at `path`.
    ///
    /// # Errors
    ///
    /// [`OpenFileError`], naming the path.
    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<ImageFile>, OpenFileError>;
}

/// The host's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostFiles;

impl OpenFiles for HostFiles {
    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<ImageFile>, OpenFileError> {
        ImageFile::open(path, options)
    }
}

/// An opened file that holds an image or a part of one. Shared by all workers.
#[derive(Debug)]
pub struct ImageFile {
    pub(super) path: PathBuf,
    pub(super) fd: OwnedFd,
    /// A duplicate for the last view of a file that is written, so that closing it needs no further descriptor.
    pub(super) spare: Mutex<Option<OwnedFd>>,
    writable: bool,
    /// It has no name, and ends with the last descriptor.
    pub(super) temporary: bool,
    pub(super) alignment: Alignment,
    block_device: bool,
    pub(super) ranges: RangeLocks,
    pub(super) no_punch: AtomicBool,
    pub(super) no_zero_range: AtomicBool,
    pub(super) syncs: Syncs,
    pub(super) delays: Arc<Delays>,
    /// The lock on the image; it ends with the last user of this file.
    lock: OnceLock<ImageLock>,
    /// The log says that writes wait for space, and not yet that they continue.
    pub(super) short: AtomicBool,
    pub(super) reports: Reports,
}

impl ImageFile {
    /// Opens the file at `path`. `/dev/fd/N` is the file of a descriptor that this process inherited, reopened
    /// with no more access than that descriptor allows.
    ///
    /// # Errors
    ///
    /// [`OpenFileError`], naming the path.
    pub fn open(path: &Path, options: FileOptions) -> Result<Arc<Self>, OpenFileError> {
        let (file, block_device) = open::open(path, options)?;
        Ok(Arc::new(Self::from_file(
            path.to_owned(),
            file,
            options,
            block_device,
        )))
    }

    /// Wraps a file that is already open. `path` is for messages; `options` are those it was opened with.
    #[must_use]
    pub fn from_fd(path: &Path, file: File, options: FileOptions) -> Arc<Self> {
        let block_device = file
            .metadata()
            .is_ok_and(|meta| meta.file_type().is_block_device());
        Arc::new(Self::from_file(path.to_owned(), file, options, block_device))
    }

    pub(super) fn from_file(path: PathBuf, file: File, options: FileOptions, block_device: bool) -> Self {
        let alignment = if options.direct {
            direct_alignment(&file)
        } else {
            Alignment::NONE
        };
        Self::with_alignment(path, file, options.write, block_device, alignment)
    }

    /// Wraps a file whose I/O must have this alignment, whatever the kernel reports for its descriptor. `path` is for
    /// messages.
    #[must_use]
    pub fn with_alignment(
        path: PathBuf,
        file: File,
        writable: bool,
        block_device: bool,
        alignment: Alignment,
    ) -> Self {
        let fd = OwnedFd::from(file);
        Self {
            path,
            // Without one the last view needs a new descriptor, like any other.
            spare: Mutex::new(writable.then(|| fd.try_clone().ok()).flatten()),
            fd,
            writable,
            temporary: false,
            alignment,
            block_device,
            ranges: RangeLocks::default(),
            no_punch: AtomicBool::new(false),
            no_zero_range: AtomicBool::new(false),
            syncs: Syncs::default(),
            delays: Arc::default(),
            lock: OnceLock::new(),
            short: AtomicBool::new(false),
            reports: Reports::default(),
        }
    }

    /// Lets writes wait for the host's space from now on: see [`crate::delay`].
    pub fn wait_for_space(&self) {
        self.delays.want();
    }

    /// Ends all waits for space, and lets none begin while the returned value lives.
    pub fn hold_off(self: &Arc<Self>) -> HoldOff {
        HoldOff::new(Arc::clone(&self.delays))
    }

    /// Locks the image, as a part of `set`, for as long as anybody uses this file. A file that is locked stays locked
    /// as it is.
    ///
    /// # Errors
    ///
    /// As [`ImageLock::acquire`].
    pub fn lock(&self, set: &LockSet, mode: LockMode, granularity: LockGranularity) -> Result<(), LockError> {
        if self.lock.get().is_none() {
            let lock = ImageLock::acquire(set, self.fd.as_fd(), &self.path, mode, granularity)?;
            let _kept = self.lock.set(lock);
            if mode == LockMode::Write {
                self.assume_sole_writer();
            }
        }
        Ok(())
    }

    /// Declares that nobody else writes to the file as long as this is open. From then on a sync is answered without one
    /// if nothing was written since the last that succeeded. The first one after this is made in any case. A file that
    /// is [locked](ImageFile::lock) for writing needs no such declaration.
    pub fn assume_sole_writer(&self) {
        self.syncs.changes().assume_alone();
    }

    /// Returns the log rate limiter of this image.
    #[must_use]
    pub fn reports(&self) -> &Reports {
        &self.reports
    }

    /// Fails if any sync so far has failed.
    ///
    /// # Errors
    ///
    /// The error of the first failed sync. Data written before it may be lost, and no sync succeeds until the
    /// file is opened again.
    pub fn check_syncs(&self) -> Result<(), IoError> {
        self.syncs.check()
    }

    /// Returns true if all that was in the file when it was opened is durable: a sync has succeeded since. A process before
    /// this one may have written it and ended before its sync. A temporary file had nothing.
    #[must_use]
    #[inline]
    pub fn has_synced(&self) -> bool {
        self.temporary || self.syncs.have_succeeded()
    }

    /// Returns true if it is a temporary file: it has no path, only a name for messages, and a sync of it has nothing to do.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        self.temporary
    }

    /// Returns the path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if it is open for writing.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns true for a block device, which does not grow.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// Returns the alignment that I/O on it requires.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Returns true if an allocation failed only because the host does not support its mode.
    pub(super) fn is_refusal(&self, error: IoError) -> bool {
        let errno = error.errno();
        [libc::EOPNOTSUPP, libc::ENOSYS, libc::ENODEV].contains(&errno)
            // A block device refuses ranges finer than its blocks.
            || errno == libc::EINVAL && self.block_device
    }
}

impl AsFd for ImageFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
