//! The image behind a server's disk, which another server has while the guest is there.
//!
//! A guest migrates from a client of one server to a client of another, and both servers have the same image on shared storage. Only one
//! may have it open, and its lock says which:
//!
//! ```text
//! server at the source                            server at the destination
//!   queues run, pages are logged                    the image is away: shows what it looks like
//!   GET_VRING_BASE of the last queue
//!     close and release the image  ──lock──▶        a queue is to run: a thread opens the image, and messages are answered
//!   the image is away                               the image is here: the queue runs
//! ```
//!
//! If the migration fails, the queues are started again at the source, and the same happens there.
//!
//! Invariants: an image is released only when no queue runs, and before the client learns that its last queue has stopped, so that
//! nothing runs elsewhere before. No queue runs while the image is away. One that was not closed cleanly is not released: what the
//! guest wrote last may be lost, and a FLUSH elsewhere would succeed nevertheless.

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

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

    /// Opens and locks the image, on a thread of its own.
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
    opening: Mutex<Option<Opening>>,
}

/// The result of opening an image.
pub(super) type Opened = Result<Arc<dyn Disk>, Box<dyn Error + Send + Sync>>;

/// An eventfd that can be read from when an image has been opened, or could not be.
pub(super) type OpenEnd = Arc<File>;

/// Signals it, whatever the end is.
struct EndGuard(OpenEnd);

impl Drop for EndGuard {
    fn drop(&mut self) {
        // It is as far from full as can be.
        (&*self.0).write_all(&1_u64.to_ne_bytes()).unwrap_or_default();
    }
}

/// A thread that opens the image. A client has as many servers as it has disks and starts them one after the other, and the guest stands
/// still meanwhile.
#[derive(Debug)]
struct Opening {
    thread: JoinHandle<Opened>,
    end: OpenEnd,
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
            opening: Mutex::new(None),
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

    /// Has a thread open the image, unless one does so. It is here when the disk is shown, and [`Image::set_place`] says so.
    ///
    /// # Errors
    ///
    /// If the image was not closed cleanly, or there can be no thread.
    pub(super) fn begin_to_open(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        if *self.place.lock() == Place::Unclean {
            return Err(
                "the image was not closed cleanly when its guest migrated, so that what was written last may be lost".into(),
            );
        }
        let mut opening = self.opening.lock();
        if opening.is_none() {
            let end: OpenEnd = Arc::new(block::event::eventfd()?.into());
            let owner = Arc::clone(&self.owner);
            let guard = EndGuard(Arc::clone(&end));
            let open = move || {
                let _guard = guard;
                owner.open()
            };
            let thread = thread::Builder::new().name("opening".to_owned()).spawn(open)?;
            *opening = Some(Opening { thread, end });
        }
        Ok(())
    }

    /// Returns the end of the thread that opens the image, if one does.
    pub(super) fn opens(&self) -> Option<OpenEnd> {
        self.opening
            .lock()
            .as_ref()
            .map(|opening| Arc::clone(&opening.end))
    }

    /// Waits until the image has been opened, or could not be. `None` if nobody opens it.
    pub(super) fn end_opening(&self) -> Option<Opened> {
        let opening = self.opening.lock().take()?;
        let opened = opening.thread.join();
        Some(opened.unwrap_or_else(|_| Err("the thread that opens the image has panicked".into())))
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
