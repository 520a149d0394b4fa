//! Reads and writes of an image: whole requests as one op, pieces, and what alignment demands of both.
//!
//! Only transfers that break one of the file's alignment conditions go through a bounce buffer.
//!
//! A forced write through the page cache is a write and then a sync, to tell which of the two failed: a write
//! that failed for lack of space has lost nothing, a sync may have.
//!
//! Invariant: a read-modify-write of a block excludes every other write, punch and zeroing in that block until it has
//! ended.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use smallvec::smallvec;

use super::transfer::{Transfer, is_one_op};
use super::view::{FileView, total};
use crate::buffer::{AlignedBuf, Buffer, Piece};
use crate::error::IoError;
use crate::request::{Op, Request};
use crate::ring::{OpFuture, Pieces};
use crate::task::LocalBoxFuture;

impl FileView {
    /// Starts a read, write or flush request at `host_offset`, if it needs no bouncing. Reads and writes are one
    /// op; a request that may have to wait for its turn or for space becomes a task.
    ///
    /// # Errors
    ///
    /// Returns the request if the ring is full or the alignment is wrong; the caller must then use
    /// [`FileView::read`] or [`FileView::write`] from a task.
    #[inline]
    pub fn submit(&self, host_offset: u64, request: Request) -> Result<(), Request> {
        // The request itself is moved once, when its way is known.
        if !self.is_one_op(host_offset, &request) {
            return self.submit_otherwise(host_offset, request);
        }
        self.cx.ring().submit_request(&self.handle, host_offset, request)
    }

    /// Returns true if a request is a read or write that one op can do now.
    #[inline]
    fn is_one_op(&self, host_offset: u64, request: &Request) -> bool {
        let reads = match request.op {
            Op::Read => true,
            Op::Write { fua: false } if !self.file.delays.is_wanted() => false,
            _ => return false,
        };
        let align = self.file.alignment;
        if align.offset <= 1 {
            return true;
        }
        // Blocks larger than a sector: writes are tracked, see `RangeLocks`.
        let tracked = align.offset > 512 && !reads;
        let misaligned = (host_offset | request.len) & (align.offset - 1) != 0;
        let len_align = usize::try_from(align.offset).unwrap_or(usize::MAX);
        !tracked && !misaligned && request.buffer.is_aligned(align.memory, len_align)
    }

    /// Starts a request that is not one op: from a task, or returns it. Kept out of the way of those that are.
    #[inline(never)]
    fn submit_otherwise(&self, host_offset: u64, request: Request) -> Result<(), Request> {
        match request.op {
            Op::Write { fua: false } if !self.file.delays.is_wanted() => Err(request),
            Op::Write { .. } | Op::Flush => {
                self.cx.spawn(write_or_sync(self.clone(), host_offset, request));
                Ok(())
            }
            _ => Err(request),
        }
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
        let waits = self.file.delays.is_wanted();
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
            // Boxed, as is a write: the futures of all requests would have room for it otherwise.
            let result = Box::pin(self.read_bounced(offset, start, &part, &bounce)).await;
            self.put_buffer(bounce);
            result?;
        }
        Ok(())
    }

    /// Writes the pieces from `offset` on; with `dsync`, durably, as far as [`FileView::sync`] does.
    ///
    /// # Errors
    ///
    /// The host's error. After an error any part of the range may have been written.
    pub async fn write(&self, offset: u64, pieces: Pieces, dsync: bool) -> Result<(), IoError> {
        let forced = dsync && self.file.alignment.offset > 1 && !self.file.temporary;
        if dsync {
            self.file.check_syncs()?;
        }
        if self.file.delays.is_wanted() {
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

    /// As [`FileView::write`], but does not wait for space.
    ///
    /// # Errors
    ///
    /// The host's error. After an error any part of the range may have been written.
    pub async fn write_once(&self, offset: u64, pieces: Pieces, dsync: bool) -> Result<(), IoError> {
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
            let write = self.write_bounced(offset, len, start, end, &part, &bounce, dsync);
            let result = Box::pin(write).await;
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
}

/// Answers a write or flush request from a task.
async fn write_or_sync(view: FileView, offset: u64, mut request: Request) {
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
