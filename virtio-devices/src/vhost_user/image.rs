//! The image behind a server's disk, which another server has while the guest is there.
//!
//! A guest migrates from a client of one server to a client of another, and both servers have the same image on shared storage. Only one
//! may have it open, and its lock says which:
//!
//! ```text
//! server at the source                            server at the destination
//!   queues run, pages are logged                    the image is away: shows what it looks like
//!   GET_VRING_BASE of the last queue
//!     close and release the image  ──lock──▶        a queue is to run: opens the image, then runs the queue
//!   the image is away
//! ```
//!
//! If the migration fails, the queues are started again at the source, and the same happens there.
//!
//! Invariants: an image is released only when no queue runs, and before the client learns that its last queue has stopped, so that
//! nothing runs elsewhere before. No queue runs while the image is away.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, OpenQueueError};

/// The owner of the image behind a disk: it can release the image, and open it again.
pub trait ImageOwner: Send + Sync + fmt::Debug {
    /// Ends what else uses the disk. It is closed next.
    fn detach(&self);

    /// Releases the image, with its lock: the disk was closed, and nobody uses it any more.
    fn release(&self);

    /// Opens and locks the image.
    ///
    /// # Errors
    ///
    /// If it cannot be opened now, above all because another process has it. It is tried again then.
    fn open(&self) -> Result<Arc<dyn Disk>, Box<dyn Error + Send + Sync>>;

    /// Returns what the disk would look like, if the image were opened now. Another process may have it.
    fn look(&self) -> Option<DiskInfo>;
}

/// The image of one server.
#[derive(Debug)]
pub(super) struct Image {
    /// The name of the disk, for logs.
    name: String,
    owner: Arc<dyn ImageOwner>,
    is_away: AtomicBool,
}

impl Image {
    pub(super) fn new(name: String, owner: Arc<dyn ImageOwner>, is_away: bool) -> Self {
        Self {
            name,
            owner,
            is_away: is_away.into(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn owner(&self) -> &dyn ImageOwner {
        &*self.owner
    }

    /// Returns true if the disk is a [`DetachedDisk`] because the image was released, or not opened yet.
    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::SeqCst)
    }

    pub(super) fn set_away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::SeqCst);
    }
}

/// A disk whose image another process has. It shows what the image looked like, and every request fails.
#[derive(Debug)]
pub struct DetachedDisk {
    info: DiskInfo,
}

impl DetachedDisk {
    /// A disk that shows `info`.
    #[must_use]
    pub fn new(info: DiskInfo) -> Self {
        Self { info }
    }
}

impl Disk for DetachedDisk {
    fn info(&self) -> DiskInfo {
        self.info
    }

    fn open_queue(self: Arc<Self>, _cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Err(OpenQueueError {
            disk: "a closed disk".to_owned(),
            source: io::ErrorKind::NotConnected.into(),
        })
    }

    fn close(self: Arc<Self>, _cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }
}
