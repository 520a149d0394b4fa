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
//! nothing runs elsewhere before. No queue runs while the image is away. One that was not closed cleanly is not released: what the
//! guest wrote last may be lost, and a FLUSH elsewhere would succeed nevertheless.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, OpenQueueError};
use parking_lot::Mutex;

/// The owner of the image behind a disk: it can release the image, and open it again.
pub trait ImageOwner: Send + Sync + fmt::Debug {
    /// Ends what else uses the disk. It is closed next.
    fn detach(&self);

    /// Releases the image, with its lock: the disk was closed cleanly, and nobody uses it any more.
    fn release(&self);

    /// Learns that the disk was not closed cleanly: the image stays locked until this server ends, and nobody opens it before.
    fn keep(&self);

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
    place: Mutex<Place>,
}

/// The place of an image.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    /// Open here.
    Here,
    /// Another server has it, or may have it.
    Away,
    /// It was not closed cleanly. It stays locked here, and is not used any more.
    Unclean,
}

impl Image {
    pub(super) fn new(name: String, owner: Arc<dyn ImageOwner>, is_away: bool) -> Self {
        Self {
            name,
            owner,
            place: Mutex::new(if is_away { Place::Away } else { Place::Here }),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn owner(&self) -> &dyn ImageOwner {
        &*self.owner
    }

    /// Returns true if the disk is a [`DetachedDisk`], because the image was closed, or not opened yet.
    pub(super) fn is_away(&self) -> bool {
        *self.place.lock() != Place::Here
    }

    /// Returns true if another server has the image, or may have it.
    pub(super) fn is_elsewhere(&self) -> bool {
        *self.place.lock() == Place::Away
    }

    pub(super) fn set_place(&self, place: Place) {
        *self.place.lock() = place;
    }

    /// Opens the image, unless it was not closed cleanly. It is here when the disk is shown, and [`Image::set_place`] says so.
    ///
    /// # Errors
    ///
    /// As of [`ImageOwner::open`].
    pub(super) fn open(&self) -> Result<Arc<dyn Disk>, Box<dyn Error + Send + Sync>> {
        if *self.place.lock() == Place::Unclean {
            return Err(
                "the image was not closed cleanly when its guest migrated, so that what was written last may be lost".into(),
            );
        }
        self.owner.open()
    }

    /// Returns what the disk would look like, if another server may have the image.
    pub(super) fn look(&self) -> Option<DiskInfo> {
        self.is_elsewhere().then(|| self.owner.look()).flatten()
    }
}

/// A disk whose image another process has. It shows what the image looked like, and every request fails.
#[derive(Debug)]
pub struct DetachedDisk {
    info: DiskInfo,
    /// The result of a close: that of the image, which was closed before.
    closed: Result<(), IoError>,
}

impl DetachedDisk {
    /// A disk that shows `info`.
    #[must_use]
    pub fn new(info: DiskInfo) -> Self {
        Self { info, closed: Ok(()) }
    }

    /// The same, of an image that was not closed cleanly: whoever closes the disk is told so, too.
    pub(super) fn unclean(info: DiskInfo, error: IoError) -> Self {
        let closed = Err(error);
        Self { info, closed }
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
        Box::pin(std::future::ready(self.closed))
    }
}
