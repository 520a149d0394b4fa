//! Rate limits in bytes and requests per time, for one disk or for several together.
//!
//! A [`Limiter`] holds the tokens; a [`ThrottledDisk`] is a disk whose requests wait for them. Requests of one queue
//! keep their order, and only the first of them takes tokens. So queues take turns, request by request, and one with
//! many requests does not starve one with few.
//!
//! ```text
//! submit ──tokens there, nobody before it──▶ the disk's queue
//!    └──▶ first in, first out ──the first one's time has come──▶ the disk's queue
//! ```
//!
//! A read or write costs its bytes and one op; a flush, discard or write-zeroes carries no bytes and costs one op.
//! Waiting delays only the submission, so a FLUSH still covers what was answered before it.
//!
//! Invariants:
//!
//! - No request waits for tokens while a [`HoldOff`] of the disk exists (see [`crate::delay`]). Requests that pass
//!   then leave a debt, so that no guest gets more by resetting its device.
//! - No request passes before an earlier one of its queue.
//! - Limits can change at any time, also between none and some. A disk that is not limited costs its requests one look at a flag.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::delay::{Beginning, Delays, HoldOff};
use crate::disk::{Disk, DiskInfo, DiskQueue, OpenQueueError};
use crate::error::IoError;
use crate::request::{Op, Request};
use crate::status::StatusRange;
use crate::sync::Mutex;
use crate::task::{Context, LocalBoxFuture};

mod bucket;
#[cfg(test)]
mod tests;

use bucket::Bucket;
pub use bucket::Rate;

/// The longest single sleep of a waiting request; a longer wait takes several.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Rate limits of a disk, or of a group of disks.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RateLimits {
    /// Bytes read and written.
    pub bandwidth: Option<Rate>,
    /// Requests of any kind.
    pub ops: Option<Rate>,
}

impl RateLimits {
    /// Returns true if nothing is limited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bandwidth.is_none() && self.ops.is_none()
    }
}

/// The tokens of one disk or of a group, shared by all queues that draw on them.
#[derive(Debug)]
pub struct Limiter {
    /// False while nothing is limited.
    is_limiting: AtomicBool,
    buckets: Mutex<Buckets>,
}

#[derive(Debug)]
struct Buckets {
    limits: RateLimits,
    bandwidth: Option<Bucket>,
    ops: Option<Bucket>,
}

impl Buckets {
    fn full(limits: &RateLimits) -> Self {
        Self {
            limits: *limits,
            bandwidth: limits.bandwidth.as_ref().map(Bucket::new),
            ops: limits.ops.as_ref().map(Bucket::new),
        }
    }
}

impl Limiter {
    /// Makes a limiter with full buckets.
    #[must_use]
    pub fn new(limits: &RateLimits) -> Arc<Self> {
        Arc::new(Self {
            is_limiting: AtomicBool::new(!limits.is_empty()),
            buckets: Mutex::new(Buckets::full(limits)),
        })
    }

    /// Returns the limits.
    #[must_use]
    pub fn limits(&self) -> RateLimits {
        self.buckets.lock().limits
    }

    /// Sets other limits, with full buckets: what was owed is forgotten. Requests that wait pass at the time that they were given; see
    /// [`ThrottledDisk::set_limits`].
    pub fn set(&self, limits: &RateLimits) {
        let mut buckets = self.buckets.lock();
        *buckets = Buckets::full(limits);
        self.is_limiting.store(!limits.is_empty(), Ordering::Release);
    }

    /// Returns true if something is limited.
    #[inline]
    fn is_limiting(&self) -> bool {
        self.is_limiting.load(Ordering::Relaxed)
    }

    /// Takes the tokens that `request` costs. Returns the time at which it may pass.
    fn take(&self, request: &Request, now: Duration) -> Duration {
        let bytes = match request.op {
            Op::Read | Op::Write { .. } => request.len,
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } => 0,
        };
        let mut buckets = self.buckets.lock();
        let mut due = now;
        if let Some(bucket) = &mut buckets.bandwidth {
            due = due.max(bucket.take(bytes, now));
        }
        if let Some(bucket) = &mut buckets.ops {
            due = due.max(bucket.take(1, now));
        }
        due
    }
}

/// A disk whose requests wait for tokens.
#[derive(Debug)]
pub struct ThrottledDisk {
    disk: Arc<dyn Disk>,
    limiter: Arc<Limiter>,
    delays: Arc<Delays>,
}

impl ThrottledDisk {
    /// Wraps `disk`, within the limits of `limiter`.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, limiter: Arc<Limiter>) -> Arc<Self> {
        let delays = Arc::new(Delays::default());
        delays.want();
        Arc::new(Self {
            disk,
            limiter,
            delays,
        })
    }

    /// Returns the limits of the disk, or of its group.
    #[must_use]
    pub fn limits(&self) -> RateLimits {
        self.limiter.limits()
    }

    /// Sets other limits, of all disks that share them. Requests of this disk that wait go by the new ones at once.
    pub fn set_limits(&self, limits: &RateLimits) {
        self.limiter.set(limits);
        // Whoever waits has its time by the old ones. It passes now, and what follows it asks the new ones.
        drop(HoldOff::new(Arc::clone(&self.delays)));
    }
}

impl Disk for ThrottledDisk {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn files(&self) -> Vec<std::path::PathBuf> {
        self.disk.files()
    }

    fn written_files(&self) -> Vec<std::path::PathBuf> {
        self.disk.written_files()
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        let lane = Lane {
            queue: Arc::clone(&self.disk).open_queue(cx)?,
            disk: self,
            cx: cx.clone(),
            waiting: RefCell::default(),
            is_watched: Cell::new(false),
        };
        Ok(Box::new(ThrottledQueue(Rc::new(lane))))
    }

    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        HoldOff::new(Arc::clone(&self.delays)).for_good();
        Arc::clone(&self.disk).close(cx)
    }

    fn resize(
        self: Arc<Self>,
        cx: &Context,
        size_bytes: u64,
    ) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Arc::clone(&self.disk).resize(cx, size_bytes)
    }

    fn hold_off(&self) -> Option<HoldOff> {
        let mut off = HoldOff::new(Arc::clone(&self.delays));
        if let Some(below) = self.disk.hold_off() {
            off.join(below);
        }
        Some(off)
    }
}

/// One queue of a throttled disk.
struct ThrottledQueue(Rc<Lane>);

impl fmt::Debug for ThrottledQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottledQueue")
            .field("queue", &self.0.queue)
            .field("waiting", &self.0.waiting.borrow().len())
            .finish_non_exhaustive()
    }
}

struct Lane {
    queue: Box<dyn DiskQueue>,
    disk: Arc<ThrottledDisk>,
    cx: Context,
    /// Waiting requests in order; only the first has taken its tokens.
    waiting: RefCell<VecDeque<Request>>,
    /// True while a task serves the waiting requests. It runs until none waits.
    is_watched: Cell<bool>,
}

impl DiskQueue for ThrottledQueue {
    #[inline]
    fn submit(&self, request: Request) {
        if self.0.is_open() {
            self.0.queue.submit(request);
        } else {
            self.0.admit(request);
        }
    }

    fn cancel_waiting(&self) {
        let waiting = std::mem::take(&mut *self.0.waiting.borrow_mut());
        for request in waiting {
            request.finish(Err(IoError::Cancelled));
        }
    }

    fn status(&self, offset: u64, len: u64) -> LocalBoxFuture<'_, Result<Vec<StatusRange>, IoError>> {
        self.0.queue.status(offset, len)
    }
}

impl Lane {
    /// Returns true if a request passes at once, whatever it costs.
    #[inline]
    fn is_open(&self) -> bool {
        !self.disk.limiter.is_limiting() && !self.is_watched.get()
    }

    /// Submits a request when its turn has come and its tokens are there.
    #[cold]
    fn admit(self: &Rc<Self>, request: Request) {
        if self.is_watched.get() {
            return self.waiting.borrow_mut().push_back(request);
        }
        // Before the limits are asked: others may be set before the task waits.
        let began = self.disk.delays.begin();
        let now = self.cx.now();
        let due = self.disk.limiter.take(&request, now);
        if due <= now {
            return self.queue.submit(request);
        }
        self.waiting.borrow_mut().push_back(request);
        self.is_watched.set(true);
        self.cx.spawn(Rc::clone(self).watch(began, due));
    }

    /// Submits the waiting requests, each in its turn; the first, whose wait has `began`, at `due`.
    async fn watch(self: Rc<Self>, mut began: Beginning, mut due: Duration) {
        loop {
            self.wait_until(began, due).await;
            let first = self.waiting.borrow_mut().pop_front();
            if let Some(first) = first {
                self.queue.submit(first);
            }
            began = self.disk.delays.begin();
            match self.waiting.borrow().front() {
                Some(next) => due = self.disk.limiter.take(next, self.cx.now()),
                None => return self.is_watched.set(false),
            }
        }
    }

    /// Waits until `due`, or until waits are ended that have `began` before.
    async fn wait_until(&self, began: Beginning, due: Duration) {
        loop {
            let left = due.saturating_sub(self.cx.now()).min(SLEEP_MAX);
            if left.is_zero() || !self.disk.delays.wait_from(began, &self.cx, left).await {
                return;
            }
        }
    }
}
