//! Files that hold images: one opened file shared by all workers, and each worker's view of it.
//!
//! An [`ImageFile`] is opened once. Every worker makes a [`FileView`] with a descriptor of its own,
//! registered with its ring. A view hides the demands of direct I/O: offset, length and address alignment
//! are three separate conditions, found with `statx(2)` (`STATX_DIOALIGN`). Only transfers that break one of
//! them go through a bounce buffer.
//!
//! Invariants:
//!
//! - All I/O is positional (duplicates share an offset).
//! - A read-modify-write of a block excludes every other write, punch and zeroing in that block until it has ended.
//! - Once a sync has failed, on any view, none succeeds any more (`durable`).
//!
//! A forced write through the page cache is a write and then a sync, to tell which of the two failed: a write
//! that failed for lack of space has lost nothing, a sync may have.

#![expect(unsafe_code, reason = "statx and open flags")]

mod bounce;
mod inherited;
mod ranges;
mod transfer;

use std::fs::{File, OpenOptions};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use smallvec::smallvec;

use crate::buffer::{AlignedBuf, BUFFER_ALIGN, Buffer, Piece};
use crate::disk::LocalBoxFuture;
use crate::durable::Syncs;
use crate::error::IoError;
use crate::handle::{FileHandle, Kind, Observer};
use crate::hold::{HoldOff, Holds, WAIT_MAX, WAIT_MIN};
use crate::lock::{ImageLock, LockError, LockGranularity, LockMode, LockSet};
use crate::report::{Action, Reports};
use crate::request::{Op, Request};
use crate::ring::{OpFuture, Pieces};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::task::Context;
use crate::timer::Timers;

pub use inherited::DescriptorRefusal;
use ranges::RangeLocks;
use transfer::{Transfer, is_one_op};

/// Options for opening an [`ImageFile`].
#[derive(Clone, Copy, Debug, Default)]
pub struct FileOptions {
    /// Open for writing too.
    pub write: bool,
    /// Bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
}

/// Error: a file could not be opened as an image.
#[derive(Debug, thiserror::Error)]
pub enum OpenFileError {
    /// The kernel refused.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The path names a descriptor that was not inherited, or that allows less than is requested.
    #[error("cannot open {}: {refusal}", path.display())]
    Descriptor {
        /// The path, `/dev/fd/N`.
        path: PathBuf,
        /// The reason.
        refusal: DescriptorRefusal,
    },
    /// Neither a regular file nor a block device.
    #[error("{} is neither a regular file nor a block device", path.display())]
    WrongKind {
        /// The file.
        path: PathBuf,
    },
    /// Direct I/O was requested on a file system without it.
    #[error("{} is on a file system without direct I/O; use direct=off", path.display())]
    NoDirectIo {
        /// The file.
        path: PathBuf,
    },
}

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

/// Alignment that I/O on a file requires, in bytes (powers of two).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Alignment {
    /// Addresses of memory.
    pub memory: usize,
    /// Offsets and lengths, of the whole op and of each stretch of memory.
    pub offset: u64,
}

impl Alignment {
    /// No condition: I/O through the page cache.
    pub const NONE: Self = Self { memory: 1, offset: 1 };
}

/// The largest part that is bounced at a time, in bytes: a power of two. It bounds the bounce memory of a request,
/// however large a guest makes it.
const BOUNCE_BYTES_MAX: u64 = 256 << 10;

/// An opened file that holds an image or a part of one. Shared by all workers.
#[derive(Debug)]
pub struct ImageFile {
    path: PathBuf,
    fd: OwnedFd,
    /// A duplicate for the last view of a file that is written, so that closing it needs no further descriptor.
    spare: Mutex<Option<OwnedFd>>,
    writable: bool,
    alignment: Alignment,
    block_device: bool,
    ranges: RangeLocks,
    no_punch: AtomicBool,
    no_zero_range: AtomicBool,
    syncs: Syncs,
    holds: Arc<Holds>,
    /// The lock on the image; it ends with the last user of this file.
    lock: OnceLock<ImageLock>,
    /// The log says that writes wait for space, and not yet that they continue.
    short: AtomicBool,
    reports: Reports,
}

impl ImageFile {
    /// Opens the file at `path`. `/dev/fd/N` is the file of a descriptor that this process inherited, reopened
    /// with no more access than that descriptor allows.
    ///
    /// # Errors
    ///
    /// [`OpenFileError`], naming the path.
    pub fn open(path: &Path, options: FileOptions) -> Result<Arc<Self>, OpenFileError> {
        inherited::check(path, options.write).map_err(|refusal| OpenFileError::Descriptor {
            path: path.to_owned(),
            refusal,
        })?;
        let open = |source| OpenFileError::Open {
            path: path.to_owned(),
            source,
        };
        let mut flags = libc::O_CLOEXEC;
        if options.direct {
            flags |= libc::O_DIRECT;
        }
        let opened = OpenOptions::new()
            .read(true)
            .write(options.write)
            .custom_flags(flags | libc::O_NONBLOCK)
            .open(path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if options.direct && error.raw_os_error() == Some(libc::EINVAL) => {
                return Err(OpenFileError::NoDirectIo {
                    path: path.to_owned(),
                });
            }
            Err(error) => return Err(open(error)),
        };
        let kind = file.metadata().map_err(open)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(OpenFileError::WrongKind {
                path: path.to_owned(),
            });
        }
        // Opened with `O_NONBLOCK` (a FIFO would hang); regular I/O must not fail with EAGAIN because of it.
        clear_nonblocking(&file).map_err(open)?;
        Ok(Arc::new(Self::from_file(
            path.to_owned(),
            file,
            options,
            kind.is_block_device(),
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

    fn from_file(path: PathBuf, file: File, options: FileOptions, block_device: bool) -> Self {
        let alignment = if options.direct {
            direct_alignment(&file)
        } else {
            Alignment::NONE
        };
        Self::with_alignment(path, file, options.write, block_device, alignment)
    }

    /// Wraps a file whose I/O must have this alignment, whatever the kernel reports for its descriptor.
    pub(crate) fn with_alignment(
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
            alignment,
            block_device,
            ranges: RangeLocks::default(),
            no_punch: AtomicBool::new(false),
            no_zero_range: AtomicBool::new(false),
            syncs: Syncs::default(),
            holds: Arc::default(),
            lock: OnceLock::new(),
            short: AtomicBool::new(false),
            reports: Reports::default(),
        }
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
        }
        Ok(())
    }

    /// Lets writes wait for the host's space from now on: see [`crate::hold`].
    pub fn wait_for_space(&self) {
        self.holds.want();
    }

    /// Ends all waits for space, and lets none begin while the returned value lives.
    pub fn hold_off(self: &Arc<Self>) -> HoldOff {
        HoldOff::new(Arc::clone(&self.holds))
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
    fn is_refusal(&self, error: IoError) -> bool {
        let errno = error.errno();
        [libc::EOPNOTSUPP, libc::ENOSYS, libc::ENODEV].contains(&errno)
            // A block device refuses ranges finer than its blocks.
            || errno == libc::EINVAL && self.block_device
    }

    /// Makes a worker's view, with a descriptor of its own.
    ///
    /// # Errors
    ///
    /// If the process or the ring has no room for another descriptor.
    pub fn view(self: &Arc<Self>, cx: &Context) -> io::Result<FileView> {
        self.view_by(self.fd.try_clone()?, cx)
    }

    /// Makes the view that closes a file. As [`ImageFile::view`], but for a writable file the first call succeeds
    /// even when the process has no descriptor left.
    ///
    /// # Errors
    ///
    /// As [`ImageFile::view`].
    pub fn last_view(self: &Arc<Self>, cx: &Context) -> io::Result<FileView> {
        let spare = self.spare.lock().take();
        self.view_by(spare.map_or_else(|| self.fd.try_clone(), Ok)?, cx)
    }

    fn view_by(self: &Arc<Self>, fd: OwnedFd, cx: &Context) -> io::Result<FileView> {
        let observer = ViewObserver {
            file: Arc::clone(self),
            timers: Rc::clone(cx.timers()),
        };
        let handle = cx.ring().register_observed(fd, Some(Rc::new(observer)))?;
        Ok(FileView {
            cx: cx.clone(),
            handle,
            file: Arc::clone(self),
        })
    }
}

impl AsFd for ImageFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Observer that records and logs one worker's failed ops.
struct ViewObserver {
    file: Arc<ImageFile>,
    timers: Rc<Timers>,
}

impl Observer for ViewObserver {
    fn failed(&self, kind: Kind, offset: u64, error: IoError) {
        let file = &*self.file;
        let action = match kind {
            Kind::Read => Action::Read,
            Kind::Write { .. } => Action::Write,
            Kind::DataSync => Action::Sync,
            Kind::Allocate { .. } => Action::Allocate,
            Kind::Truncate => Action::SetLength,
            Kind::Watch | Kind::Command { .. } => return,
        };
        if error == IoError::Cancelled || action == Action::Allocate && file.is_refusal(error) {
            return;
        }
        let forced = matches!(kind, Kind::Write { dsync: true }) && !error.is_no_space();
        let synced = kind == Kind::DataSync || forced;
        let waits = !synced && error.is_no_space() && file.holds.is_wanted();
        let consequence = if synced {
            file.syncs.fail(error.errno());
            "no FLUSH succeeds until the image is reopened"
        } else if waits {
            "writes wait until there is space"
        } else if error.is_no_space() {
            "writes that need space fail"
        } else {
            "what needed it fails"
        };
        let now = self.timers.now();
        let logged = file
            .reports
            .host_error(&file.path, action, offset, error, consequence, now);
        if logged && waits {
            file.short.store(true, Ordering::Relaxed);
        }
    }
}

/// Calls `fcntl(2)` for descriptor flags; `argument` is for commands that set some.
fn fcntl_flags(fd: RawFd, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    assert!([libc::F_GETFD, libc::F_GETFL, libc::F_SETFL].contains(&command));
    // SAFETY: these commands are passed no memory, and close and make no descriptor.
    let result = unsafe { libc::fcntl(fd, command, argument) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn clear_nonblocking(file: &File) -> io::Result<()> {
    let fd = file.as_raw_fd();
    let flags = fcntl_flags(fd, libc::F_GETFL, 0)?;
    fcntl_flags(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK)?;
    Ok(())
}

/// Returns the alignment that direct I/O on `file` requires; 4096 if the kernel does not report one.
fn direct_alignment(file: &File) -> Alignment {
    let careful = Alignment {
        memory: BUFFER_ALIGN,
        offset: BUFFER_ALIGN as u64,
    };
    // SAFETY: an all-zero `statx` is a valid value of that plain C struct.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string and `stat` lives across the call.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    if result != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return careful;
    }
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    if !memory.is_power_of_two() || !offset.is_power_of_two() || memory as usize > BUFFER_ALIGN {
        return careful;
    }
    Alignment {
        memory: memory as usize,
        offset: u64::from(offset),
    }
}

/// One worker's view of an [`ImageFile`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct FileView {
    cx: Context,
    handle: FileHandle,
    file: Arc<ImageFile>,
}

impl FileView {
    /// Returns the shared file.
    #[must_use]
    pub fn file(&self) -> &Arc<ImageFile> {
        &self.file
    }

    /// Returns the worker's context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.cx
    }

    /// Returns the current length in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel does not report it.
    pub fn len(&self) -> Result<u64, IoError> {
        Ok(self.cx.ring().file_len(&self.handle)?)
    }

    /// Returns the first byte offset at or after `offset` where the file may hold data; bytes before it read as
    /// zeros. Returns `None` if all the rest does. A file that cannot tell counts as all data.
    #[must_use]
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        self.cx.ring().next_data(&self.handle, offset)
    }

    /// Returns the first byte offset at or after `offset` where the file has a hole. Returns `None` if there is none
    /// before its end, or if the file cannot tell.
    #[must_use]
    pub fn next_hole(&self, offset: u64) -> Option<u64> {
        self.cx.ring().next_hole(&self.handle, offset)
    }

    /// Returns true if the file is empty.
    ///
    /// # Errors
    ///
    /// As for [`FileView::len`].
    pub fn is_empty(&self) -> Result<bool, IoError> {
        Ok(self.len()? == 0)
    }

    /// Starts a read, write or flush request at `host_offset`, if it needs no bouncing. Reads and writes are one
    /// op; a request that may have to wait for its turn or for space becomes a task.
    ///
    /// # Errors
    ///
    /// Returns the request if the ring is full or the alignment is wrong; the caller must then use
    /// [`FileView::read`] or [`FileView::write`] from a task.
    #[inline]
    pub fn submit(&self, host_offset: u64, request: Request) -> Result<(), Request> {
        let align = self.file.alignment;
        match request.op {
            Op::Read => {}
            Op::Write { fua: false } if !self.file.holds.is_wanted() => {}
            Op::Write { .. } | Op::Flush => {
                self.cx.spawn(carry_out(self.clone(), host_offset, request));
                return Ok(());
            }
            _ => return Err(request),
        }
        if align.offset > 1 {
            // Blocks larger than a sector: writes are tracked, see `RangeLocks`.
            let tracked = align.offset > 512 && request.op != Op::Read;
            let misaligned = (host_offset | request.len) & (align.offset - 1) != 0;
            let len_align = usize::try_from(align.offset).unwrap_or(usize::MAX);
            if tracked || misaligned || !request.buffer.is_aligned(align.memory, len_align) {
                return Err(request);
            }
        }
        self.cx.ring().submit_request(&self.handle, host_offset, request)
    }

    /// Like [`FileView::read`], but starts the op at once if possible.
    ///
    /// # Panics
    ///
    /// If a piece is [`Piece::Zeros`].
    pub fn start_read(&self, offset: u64, pieces: Pieces) -> IoFuture {
        if is_one_op(&pieces) && self.is_aligned(offset, &pieces) {
            return IoFuture::Op(self.cx.ring().read(&self.handle, offset, pieces));
        }
        let view = self.clone();
        IoFuture::Task(Box::pin(async move { view.read(offset, pieces).await }))
    }

    /// Like [`FileView::write`], but starts the op at once if possible.
    pub fn start_write(&self, offset: u64, pieces: Pieces) -> IoFuture {
        let waits = self.file.holds.is_wanted();
        let at_once = !waits && self.file.alignment.offset <= 512 && is_one_op(&pieces);
        if at_once && self.is_aligned(offset, &pieces) {
            return IoFuture::Op(self.cx.ring().write(&self.handle, offset, pieces, false));
        }
        let view = self.clone();
        IoFuture::Task(Box::pin(async move { view.write(offset, pieces, false).await }))
    }

    /// Reads into the pieces from `offset` on. Bytes past the end of the file read as zeros.
    ///
    /// # Errors
    ///
    /// The host's error.
    ///
    /// # Panics
    ///
    /// If a piece is [`Piece::Zeros`].
    pub async fn read(&self, offset: u64, pieces: Pieces) -> Result<(), IoError> {
        if self.is_aligned(offset, &pieces) {
            return self.transfer(offset, pieces, Transfer::Read).await;
        }
        for (offset, part) in self.bounced_parts(offset, &pieces) {
            let (start, end) = self.widen(offset, total(&part))?;
            let bounce = self.take_buffer(end - start)?;
            let result = self.read_bounced(offset, start, &part, &bounce).await;
            self.put_buffer(bounce);
            result?;
        }
        Ok(())
    }

    /// Writes the pieces from `offset` on; with `dsync`, durably.
    ///
    /// # Errors
    ///
    /// The host's error. After an error any part of the range may have been written.
    pub async fn write(&self, offset: u64, pieces: Pieces, dsync: bool) -> Result<(), IoError> {
        let forced = dsync && self.file.alignment.offset > 1;
        if dsync {
            self.file.check_syncs()?;
        }
        if self.file.holds.is_wanted() {
            self.with_space(async || self.write_once(offset, pieces.clone(), forced).await)
                .await?;
        } else {
            self.write_once(offset, pieces, forced).await?;
        }
        match (dsync, forced) {
            (false, _) => Ok(()),
            (true, true) => self.file.check_syncs(),
            (true, false) => self.sync().await,
        }
    }

    /// Retries `work` until there is space for it, or until waits are ended.
    async fn with_space(&self, mut work: impl AsyncFnMut() -> Result<(), IoError>) -> Result<(), IoError> {
        let (mut time, mut waited) = (WAIT_MIN, false);
        loop {
            match work().await {
                Err(error) if error.is_no_space() => {
                    waited = true;
                    if !self.file.holds.wait(&self.cx, time).await {
                        return Err(error);
                    }
                    time = (time * 2).min(WAIT_MAX);
                }
                Ok(()) if waited && self.file.short.swap(false, Ordering::Relaxed) => {
                    let image = self.file.path.display();
                    tracing::warn!(%image, "the host has space again; writes go on");
                    return Ok(());
                }
                result => return result,
            }
        }
    }

    async fn write_once(&self, offset: u64, pieces: Pieces, dsync: bool) -> Result<(), IoError> {
        let align = self.file.alignment.offset;
        if align <= 512 && self.is_aligned(offset, &pieces) {
            return self.transfer(offset, pieces, Transfer::Write { dsync }).await;
        }
        if self.is_aligned(offset, &pieces) {
            let (start, end) = self.widen(offset, total(&pieces))?;
            let _lock = self.file.ranges.lock(start, end).await;
            return self.transfer(offset, pieces, Transfer::Write { dsync }).await;
        }
        for (offset, part) in self.bounced_parts(offset, &pieces) {
            let len = total(&part);
            let (start, end) = self.widen(offset, len)?;
            let _lock = self.file.ranges.lock(start, end).await;
            let bounce = self.take_buffer(end - start)?;
            let result = self
                .write_bounced(offset, len, start, end, &part, &bounce, dsync)
                .await;
            self.put_buffer(bounce);
            result?;
        }
        Ok(())
    }

    /// Reads `len` bytes into a new buffer.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub async fn read_at(&self, offset: u64, len: usize) -> Result<AlignedBuf, IoError> {
        let buffer = Rc::new(Buffer::from(AlignedBuf::zeroed(len)));
        self.read(offset, smallvec![Piece::whole(&buffer)]).await?;
        // The op has ended and dropped its clone.
        Rc::try_unwrap(buffer)
            .ok()
            .and_then(Buffer::into_owned)
            .ok_or(IoError::Dropped)
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub async fn write_at(&self, offset: u64, bytes: AlignedBuf) -> Result<(), IoError> {
        let buffer = Rc::new(Buffer::from(bytes));
        self.write(offset, smallvec![Piece::whole(&buffer)], false).await
    }

    /// Makes every completed write, on any view, durable (`fdatasync(2)`).
    ///
    /// # Errors
    ///
    /// The host's error, of this or any earlier sync of the file. After an error it is not known which writes
    /// are durable.
    pub async fn sync(&self) -> Result<(), IoError> {
        let sync = || self.cx.ring().sync(&self.handle);
        self.file.syncs.run(sync).await
    }

    /// Waits a moment for the host's space, if such waits are enabled. Returns true if the caller should retry.
    pub async fn wait_for_space(&self) -> bool {
        self.file.holds.wait(&self.cx, WAIT_MAX / 4).await
    }

    /// Sets the file's length.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub async fn set_len(&self, len: u64) -> Result<(), IoError> {
        self.cx.ring().truncate(&self.handle, len).await
    }

    /// Reserves space for a range and makes the file at least that long; new bytes read as zeros.
    ///
    /// # Errors
    ///
    /// The host's error; [`IoError::is_no_space`] if there is no space.
    pub async fn preallocate(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.cx.ring().allocate(&self.handle, 0, offset, len).await
    }

    /// Gives the space of a range back to the host (`FALLOC_FL_PUNCH_HOLE`); the range reads as zeros. Returns
    /// `Ok(false)` if the host does not support it, and leaves the range unchanged.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub async fn punch(&self, offset: u64, len: u64) -> Result<bool, IoError> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        self.optional_allocate(&self.file.no_punch, mode, offset, len)
            .await
    }

    /// Makes a range read as zeros, by `FALLOC_FL_ZERO_RANGE` if the host supports it, else by writing zeros.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub async fn zero(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.with_space(async || self.zero_once(offset, len).await).await
    }

    async fn zero_once(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        if self
            .optional_allocate(&self.file.no_zero_range, mode, offset, len)
            .await?
        {
            return Ok(());
        }
        const PART: u64 = 1 << 20;
        let mut done = 0;
        while done < len {
            let part = PART.min(len - done);
            self.write_once(offset + done, smallvec![Piece::Zeros(to_usize(part)?)], false)
                .await?;
            done += part;
        }
        Ok(())
    }

    async fn optional_allocate(
        &self,
        unsupported: &AtomicBool,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Result<bool, IoError> {
        if len == 0 {
            return Ok(true);
        }
        if unsupported.load(Ordering::Relaxed) {
            return Ok(false);
        }
        // A concurrent read-modify-write of a block at the range's edge would restore the old bytes.
        let _lock = if self.file.alignment.offset > 512 {
            let (start, end) = self.widen(offset, len)?;
            Some(self.file.ranges.lock(start, end).await)
        } else {
            None
        };
        match self.cx.ring().allocate(&self.handle, mode, offset, len).await {
            Ok(()) => Ok(true),
            Err(error) if self.file.is_refusal(error) => {
                if error.errno() != libc::EINVAL {
                    unsupported.store(true, Ordering::Relaxed);
                }
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn is_aligned(&self, offset: u64, pieces: &Pieces) -> bool {
        let align = self.file.alignment;
        if align.offset <= 1 && align.memory <= 1 {
            return true;
        }
        let len_align = usize::try_from(align.offset).unwrap_or(usize::MAX);
        let fits = |piece: &Piece| match piece {
            Piece::Bytes { buffer, offset, len } => {
                buffer.is_range_aligned(*offset, *len, align.memory, len_align)
            }
            // The zero block itself is aligned to `BUFFER_ALIGN`.
            Piece::Zeros(len) => align.memory <= BUFFER_ALIGN && len & (len_align - 1) == 0,
        };
        offset & (align.offset - 1) == 0 && pieces.iter().all(fits)
    }

    /// Returns the aligned range around `offset..offset + len`.
    fn widen(&self, offset: u64, len: u64) -> Result<(u64, u64), IoError> {
        let align = self.file.alignment.offset;
        let end = offset.checked_add(len).ok_or(IoError::OutOfRange)?;
        let end = end.checked_next_multiple_of(align).ok_or(IoError::OutOfRange)?;
        Ok((offset & !(align - 1), end))
    }

    fn take_buffer(&self, len: u64) -> Result<Rc<Buffer>, IoError> {
        Ok(Rc::new(Buffer::from(self.cx.pool().take(to_usize(len)?))))
    }

    fn put_buffer(&self, buffer: Rc<Buffer>) {
        if let Some(buf) = Rc::try_unwrap(buffer).ok().and_then(Buffer::into_owned) {
            self.cx.pool().put(buf);
        }
    }
}

/// Answers a write or flush request from a task.
async fn carry_out(view: FileView, offset: u64, mut request: Request) {
    let Op::Write { fua } = request.op else {
        let result = view.sync().await;
        return request.finish(result);
    };
    let buffer = Rc::new(request.take_buffer());
    let result = view.write(offset, smallvec![Piece::whole(&buffer)], fua).await;
    request.finish_with(Rc::try_unwrap(buffer).unwrap_or_default(), result);
}

/// A read or write in progress.
#[must_use = "the result of an op says whether it happened"]
pub enum IoFuture {
    /// One op on the ring.
    Op(OpFuture),
    /// A task: the transfer is bounced, takes several ops, or may have to wait.
    Task(LocalBoxFuture<'static, Result<(), IoError>>),
}

impl std::fmt::Debug for IoFuture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Op(_) => "IoFuture::Op",
            Self::Task(_) => "IoFuture::Task",
        })
    }
}

impl Future for IoFuture {
    type Output = Result<(), IoError>;

    fn poll(self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Op(op) => Pin::new(op).poll(cx),
            Self::Task(task) => task.as_mut().poll(cx),
        }
    }
}

fn to_usize(value: u64) -> Result<usize, IoError> {
    usize::try_from(value).map_err(|_| IoError::OutOfRange)
}

fn total(pieces: &Pieces) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

#[cfg(all(test, shuttle))]
mod model;

#[cfg(test)]
mod registered_tests;
#[cfg(test)]
mod tests;
