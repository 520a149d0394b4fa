//! One worker's view of an image file: a descriptor of its own, registered with the worker's ring.
//!
//! Invariant: all I/O of a view is positional, because duplicated descriptors share an offset.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use super::failures::ViewObserver;
use super::image_file::ImageFile;
use crate::buffer::{BUFFER_ALIGN, Buffer, Piece};
use crate::error::IoError;
use crate::handle::FileHandle;
use crate::ring::Pieces;
use crate::task::Context;

impl ImageFile {
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
        let changes = self.syncs.changes().counter();
        let handle = cx.ring().register_view(fd, Rc::new(observer), changes)?;
        Ok(FileView {
            cx: cx.clone(),
            handle,
            file: Arc::clone(self),
        })
    }
}

/// One worker's view of an [`ImageFile`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct FileView {
    pub(super) cx: Context,
    pub(super) handle: FileHandle,
    pub(super) file: Arc<ImageFile>,
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

    /// Makes every completed write, on any view, durable (`fdatasync(2)`); of a temporary file, as durable as it is itself,
    /// without asking the kernel. Where this file is the only writer's, a call after which nothing was written needs no
    /// other: see [`ImageFile::assume_sole_writer`].
    ///
    /// # Errors
    ///
    /// The host's error, of this or any earlier sync of the file. After an error it is not known which writes
    /// are durable.
    pub async fn sync(&self) -> Result<(), IoError> {
        if self.file.temporary {
            return self.file.check_syncs();
        }
        self.file.syncs.run(|| self.sync_once()).await
    }

    /// Syncs in place if the worker may block, and on the ring otherwise.
    async fn sync_once(&self) -> Result<(), IoError> {
        let (ring, history) = (self.cx.ring(), self.cx.sync_history());
        let begun = history.begin(ring.in_flight() == 0, self.cx.now());
        let done = begun.may_block.then(|| ring.sync_now(&self.handle)).flatten();
        let result = match done {
            Some(result) => result,
            None => ring.sync(&self.handle).await,
        };
        history.end(begun, self.cx.now(), done.is_some());
        result
    }

    /// Sets the file's length.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub async fn set_len(&self, len: u64) -> Result<(), IoError> {
        self.cx.ring().truncate(&self.handle, len).await
    }

    pub(super) fn is_aligned(&self, offset: u64, pieces: &Pieces) -> bool {
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
    pub(super) fn widen(&self, offset: u64, len: u64) -> Result<(u64, u64), IoError> {
        let align = self.file.alignment.offset;
        let end = offset.checked_add(len).ok_or(IoError::OutOfRange)?;
        let end = end.checked_next_multiple_of(align).ok_or(IoError::OutOfRange)?;
        Ok((offset & !(align - 1), end))
    }

    pub(super) fn take_buffer(&self, len: u64) -> Result<Rc<Buffer>, IoError> {
        Ok(Rc::new(Buffer::from(self.cx.pool().take(to_usize(len)?))))
    }

    pub(super) fn put_buffer(&self, buffer: Rc<Buffer>) {
        if let Some(buf) = Rc::try_unwrap(buffer).ok().and_then(Buffer::into_owned) {
            self.cx.pool().put(buf);
        }
    }
}

/// Converts a length for this process's memory.
pub(super) fn to_usize(value: u64) -> Result<usize, IoError> {
    usize::try_from(value).map_err(|_| IoError::OutOfRange)
}

/// Returns the length of all pieces in bytes.
pub(super) fn total(pieces: &Pieces) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}
