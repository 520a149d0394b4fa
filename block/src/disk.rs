//! Interface between frontends and formats: an opened image, and one queue's view of it.
//!
//! Frontends do not depend on formats, nor formats on frontends; this module is all they share.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::delay::HoldOff;
use crate::error::IoError;
use crate::file::FileView;
use crate::request::{Op, Request};
use crate::status::{Content, StatusRange, StatusRanges};
use crate::task::{Context, LocalBoxFuture};

/// Properties of a disk, in the units in which a frontend describes it to a guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DiskInfo {
    /// The size of the guest's disk in bytes; a multiple of 512.
    pub size_bytes: u64,
    /// True if writes are refused.
    pub read_only: bool,
    /// The size of the unit the image is managed in (the cluster size; for raw, the host's block size),
    /// in bytes. A guest that aligns to it avoids copy-on-write.
    pub preferred_io_bytes: u32,
    /// The smallest write that needs no read-modify-write on the host, in bytes (a power of two, ≥ 512).
    pub physical_block_bytes: u32,
    /// True if discard is supported.
    pub discard: bool,
    /// The unit in which a discard frees space, in bytes.
    pub discard_granularity_bytes: u32,
    /// True if write-zeroes is supported.
    pub write_zeroes: bool,
}

/// Error: a queue of a disk could not be opened on a worker.
#[derive(Debug, thiserror::Error)]
#[error("cannot open a queue on {disk}")]
pub struct OpenQueueError {
    /// The image.
    pub disk: String,
    /// The reason.
    #[source]
    pub source: std::io::Error,
}

/// An opened image. Shared by all workers that serve it.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Returns the disk's current properties.
    fn info(&self) -> DiskInfo;

    /// Returns the files the disk is made of, its own first and then those below it. A temporary overlay has no path, and is
    /// left out.
    fn files(&self) -> Vec<std::path::PathBuf> {
        Vec::new()
    }

    /// Returns those of its files that the disk writes.
    fn written_files(&self) -> Vec<std::path::PathBuf> {
        let own = usize::from(!self.info().read_only);
        self.files().into_iter().take(own).collect()
    }

    /// Opens one queue's view of the disk, on the worker that `cx` belongs to.
    ///
    /// # Errors
    ///
    /// If the worker's ring cannot take the disk's files.
    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError>;

    /// Makes everything durable and leaves the image as a clean shutdown should. The queues must have
    /// drained and been dropped. A disk dropped without it is as safe as after a power cut.
    ///
    /// From this call on, no request waits for the host's space or a rate limit.
    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>>;

    /// Makes the disk larger; `size_bytes` is rounded down to whole sectors. The new size is durable when the future
    /// completes. New bytes read as zeros. The caller must notify the guest.
    ///
    /// Fails with [`IoError::Unsupported`] for a disk that does not grow, [`IoError::OutOfRange`] for a size that is
    /// smaller or too large, [`IoError::ReadOnly`], or the host's error; the disk then keeps its old size.
    fn resize(
        self: Arc<Self>,
        cx: &Context,
        size_bytes: u64,
    ) -> LocalBoxFuture<'static, Result<(), IoError>> {
        let _unused = (cx, size_bytes);
        Box::pin(async { Err(IoError::Unsupported) })
    }

    /// Ends every wait for the host's space and for a rate limit, and lets none begin while the returned value lives.
    /// A caller that drains a queue must hold one, as a waiting request may wait for ever. Returns `None` if the disk
    /// never waits.
    fn hold_off(&self) -> Option<HoldOff> {
        None
    }
}

/// One queue's view of a disk, on one worker.
pub trait DiskQueue: fmt::Debug {
    /// Takes a request. It is answered exactly once, perhaps before this returns.
    fn submit(&self, request: Request);

    /// Ends requests that have not begun, because they wait for a rate limit, with [`IoError::Cancelled`],
    /// before this returns.
    fn cancel_waiting(&self) {}

    /// Returns the queue of the image below, if bytes that this image does not have are those at the same offset there: the
    /// image that a [`StatusRange`] of depth 1 means. A long chain has no index ([`crate::chain`]) past an image without it.
    fn below(&self) -> Option<Rc<dyn DiskQueue>> {
        None
    }

    /// Returns the file that holds what this image's status calls [`Content::Data`], if reads of it may bypass this queue:
    /// nothing changes the image while it is open, and the file has these bytes at the offsets that the status gives.
    fn data_file(&self) -> Option<FileView> {
        None
    }

    /// Returns the origin of the bytes `offset..offset + len`: ranges without gaps that begin at `offset`. They may end
    /// sooner than asked, because one call returns at most [`STATUS_RANGES_MAX`] of them, but there is at least one unless
    /// `len` is 0. A disk that cannot tell is all data. No descriptor is opened.
    ///
    /// Fails with [`IoError::OutOfRange`] past the end of the disk, or with the error of reading a table.
    ///
    /// [`STATUS_RANGES_MAX`]: crate::status::STATUS_RANGES_MAX
    fn status(&self, offset: u64, len: u64) -> LocalBoxFuture<'_, Result<Vec<StatusRange>, IoError>> {
        // Only `submit` knows the disk's size: an empty read at the end of the range, rounded up to a sector, checks it.
        let end = offset
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(512));
        let inside = end.map(|end| {
            let (request, answer) = Request::local(Op::Read, end, 0, Buffer::default());
            self.submit(request);
            answer
        });
        Box::pin(async move {
            inside.ok_or(IoError::OutOfRange)?.await.result?;
            let mut ranges = StatusRanges::default();
            ranges.push(StatusRange {
                offset,
                len,
                content: Content::Data { at: None },
                depth: 0,
            });
            Ok(ranges.into_vec())
        })
    }
}

/// Has a queue execute one request, and returns the buffer: with what was read, or for reuse. For tools and tests; a
/// frontend hands over requests without a future for each.
///
/// # Errors
///
/// The request's error; the buffer is lost then.
pub async fn ask(
    queue: &dyn DiskQueue,
    op: Op,
    offset: u64,
    len: u64,
    buffer: Buffer,
) -> Result<Buffer, IoError> {
    let (request, answer) = Request::local(op, offset, len, buffer);
    queue.submit(request);
    let done = answer.await;
    done.result.map(|()| done.buffer)
}
