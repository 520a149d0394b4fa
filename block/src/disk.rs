//! What a disk is to those who use it: an opened image, and one queue's view of it.
//!
//! Frontends know nothing of formats and formats nothing of frontends; this is all they share.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::error::IoError;
use crate::hold::HoldOff;
use crate::request::Request;
use crate::task::Context;

/// What a disk is like, in the units a frontend needs to describe it to a guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DiskInfo {
    /// The size of the guest's disk in bytes; a multiple of 512.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The size of the unit the image is managed in (the cluster size; for raw, the host's block size),
    /// in bytes. A guest that aligns to it avoids copy-on-write.
    pub preferred_io_bytes: u32,
    /// The smallest write that needs no read-modify-write on the host, in bytes (a power of two, ≥ 512).
    pub physical_block_bytes: u32,
    /// Whether discard is offered.
    pub discard: bool,
    /// The unit in which a discard frees space, in bytes.
    pub discard_granularity_bytes: u32,
    /// Whether write-zeroes is offered.
    pub write_zeroes: bool,
}

/// A future that stays on the worker that made it.
pub type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Why a queue of a disk could not be opened on a worker.
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
    /// What the disk is like now.
    fn info(&self) -> DiskInfo;

    /// The files the disk is made of, its own first and then those below it.
    fn files(&self) -> Vec<std::path::PathBuf> {
        Vec::new()
    }

    /// One queue's view of the disk, on the worker that `cx` belongs to.
    ///
    /// # Errors
    ///
    /// If the worker's ring cannot take the disk's files.
    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError>;

    /// Makes everything durable and leaves the image as a clean shutdown should. Call it when the queues
    /// have drained and are dropped; a disk dropped without it is as safe as after a power cut.
    ///
    /// Nothing waits for the host's space or a rate limit any more from here on.
    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>>;

    /// Makes the disk larger; `size_bytes` is rounded down to whole sectors. Durable when it is answered. What is new
    /// reads as zeros. Whoever serves the disk tells its guest.
    ///
    /// Answers [`IoError::Unsupported`] for a disk that does not grow, [`IoError::OutOfRange`] for a size that is
    /// smaller or too large, [`IoError::ReadOnly`], or what the host answers; then the disk has its old size.
    fn resize(
        self: Arc<Self>,
        cx: &Context,
        size_bytes: u64,
    ) -> LocalBoxFuture<'static, Result<(), IoError>> {
        let _unused = (cx, size_bytes);
        Box::pin(async { Err(IoError::Unsupported) })
    }

    /// Ends every wait for the host's space and for a rate limit, and lets none begin while the answer lives: whoever
    /// drains a queue holds one meanwhile, as a request that waits may wait for ever. `None` from a disk that never
    /// waits.
    fn hold_off(&self) -> Option<HoldOff> {
        None
    }
}

/// One queue's view of a disk, on one worker.
pub trait DiskQueue: fmt::Debug {
    /// Takes a request. It is answered exactly once, perhaps before this returns.
    fn submit(&self, request: Request);
}
