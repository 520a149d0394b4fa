//! Test support of this crate: guest memory with drivers in it, and a disk in memory whose requests can be held.

#![expect(unsafe_code, reason = "a backlog of nothing, and the limit of descriptors")]

use std::cell::RefCell;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::sync::Monitor;
use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, Op, OpenQueueError, Request};
use parking_lot::Mutex;
use ringdisk_driver::{Driver, Rings, blk};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::connect::{Cancel, connect_within};
use crate::virtqueue::RingAddresses;

/// The start of guest memory. There are two regions, the second right behind the first.
pub(crate) const BASE: u64 = 0x1_0000;
/// The length of each region, in bytes.
pub(crate) const REGION_BYTES: u64 = 1 << 20;
/// The first guest address that is not memory.
pub(crate) const END: u64 = BASE + 2 * REGION_BYTES;
/// The address of the tests' indirect tables.
pub(crate) const TABLE: u64 = BASE + 0x2_0000;
/// The address of the tests' headers and status bytes, and the bytes of those of one queue.
const REQUESTS: u64 = BASE + 0x3_0000;
const REQUESTS_BYTES: u64 = 0x2000;
/// The address of the tests' data.
pub(crate) const DATA: u64 = BASE + 0x5_0000;

/// The feature bits that tests negotiate unless they say otherwise.
pub(crate) const RING_FEATURES: u64 = blk::F_INDIRECT_DESC | blk::F_EVENT_IDX | blk::F_VERSION_1;

/// Returns the driver of queue `index` of `size` entries (256 at most) in `memory`.
pub(crate) fn driver(memory: GuestMemoryMmap, index: u64, size: u16) -> Driver {
    let rings = Rings::at(BASE + index * Rings::BYTES);
    Driver::new(memory, rings, size, REQUESTS + index * REQUESTS_BYTES)
}

impl From<Rings> for RingAddresses {
    fn from(rings: Rings) -> Self {
        Self {
            descriptors: rings.descriptors,
            available: rings.available,
            used: rings.used,
        }
    }
}

/// Guest memory of two adjacent regions. With a file, that file, which must be long enough.
pub(crate) fn guest_memory(file: Option<&std::fs::File>) -> GuestMemoryMmap {
    let region = |index: u64| {
        let file =
            file.map(|file| FileOffset::new(file.try_clone().expect("a duplicate"), index * REGION_BYTES));
        let base = GuestAddress(BASE + index * REGION_BYTES);
        GuestRegionMmap::from_range(base, REGION_BYTES as usize, file).expect("a mapping")
    };
    GuestMemoryMmap::from_regions(vec![region(0), region(1)]).expect("adjacent regions")
}

/// Connects to `listener` at `path` until a further connection would have to wait. Returns the clients.
pub(crate) fn fill_backlog(listener: &UnixListener, path: &Path) -> Vec<UnixStream> {
    // SAFETY: numbers only; the backlog becomes the shortest there is.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let connect = || connect_within(path, Duration::from_millis(10), &Cancel::never());
    std::iter::from_fn(|| connect().ok()).collect()
}

/// Lets this process have `needed` descriptors beside those of tests that run meanwhile, as a server does at its start
/// (1024 are usual). Fails the test if the hard limit is lower.
pub(crate) fn allow_descriptors(needed: u64) {
    const OTHERS: u64 = 256;
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one `rlimit`, which is live and exclusive.
    let read = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    assert_eq!(read, 0);
    let wanted = needed + OTHERS;
    assert!(
        limit.rlim_max >= wanted,
        "this test needs {wanted} descriptors, and may have {} (ulimit -Hn)",
        limit.rlim_max
    );
    // Never fewer than before: tests may do this at the same time.
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one `rlimit`, which is live.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(set, 0);
}

#[derive(Debug)]
struct Shared {
    /// All but the size, which is that of `bytes`.
    info: DiskInfo,
    bytes: Mutex<Vec<u8>>,
    log: Mutex<Vec<(Op, u64, u64)>>,
    /// True while requests are held up.
    closed: Monitor<bool>,
    /// Requests from this offset on fail.
    failing: Mutex<Option<(u64, IoError)>>,
    /// The result of its close.
    closing: Mutex<Result<(), IoError>>,
}

/// A disk in memory.
#[derive(Clone, Debug)]
pub(crate) struct MemDisk {
    shared: Arc<Shared>,
}

pub(crate) const DISK_BYTES: u64 = 1 << 20;

impl MemDisk {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut DiskInfo)) -> Self {
        let mut info = DiskInfo {
            size_bytes: DISK_BYTES,
            read_only: false,
            preferred_io_bytes: 65536,
            physical_block_bytes: 4096,
            discard: true,
            discard_granularity_bytes: 65536,
            write_zeroes: true,
        };
        change(&mut info);
        let shared = Shared {
            info,
            bytes: Mutex::new(vec![0; DISK_BYTES as usize]),
            log: Mutex::default(),
            closed: Monitor::default(),
            failing: Mutex::default(),
            closing: Mutex::new(Ok(())),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    pub(crate) fn disk(&self) -> Arc<dyn Disk> {
        Arc::new(self.clone())
    }

    /// Returns the requests so far.
    pub(crate) fn log(&self) -> Vec<(Op, u64, u64)> {
        self.shared.log.lock().clone()
    }

    /// From now on requests wait.
    pub(crate) fn hold(&self) {
        self.shared.closed.with(|closed| *closed = true);
    }

    /// Lets requests through again.
    pub(crate) fn release(&self) {
        self.shared.closed.change(|closed| *closed = false);
    }

    /// Returns the number of requests that wait.
    pub(crate) fn held(&self) -> usize {
        self.shared.closed.waiting()
    }

    /// Makes the disk larger.
    pub(crate) fn grow(&self, bytes: u64) {
        self.shared.bytes.lock().resize(bytes as usize, 0);
    }

    /// From now on requests fail, or not.
    pub(crate) fn fail(&self, error: Option<IoError>) {
        *self.shared.failing.lock() = error.map(|error| (0, error));
    }

    /// From now on it cannot be closed cleanly.
    pub(crate) fn fail_to_close(&self, error: IoError) {
        *self.shared.closing.lock() = Err(error);
    }

    /// From now on requests of what lies at `offset` or behind it fail.
    pub(crate) fn fail_from(&self, offset: u64, error: IoError) {
        *self.shared.failing.lock() = Some((offset, error));
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.shared.bytes.lock()[offset..offset + len].to_vec()
    }

    pub(crate) fn set_bytes(&self, offset: usize, bytes: &[u8]) {
        self.shared.bytes.lock()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

impl Shared {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: self.bytes.lock().len() as u64,
            ..self.info
        }
    }

    fn execute(&self, request: Request) {
        if let Err(error) = request.check(self.info().size_bytes, self.info.read_only) {
            return request.finish(Err(error));
        }
        let failing = *self.failing.lock();
        if let Some((_, error)) = failing.filter(|(from, _)| request.offset >= *from) {
            return request.finish(Err(error));
        }
        let Some(memory) = request.buffer.memory() else {
            return request.finish(Err(IoError::Unsupported));
        };
        let (start, len) = (request.offset as usize, request.len as usize);
        let mut bytes = self.bytes.lock();
        match request.op {
            Op::Read => memory.write(0, &bytes[start..start + len]),
            Op::Write { .. } => memory.read(0, &mut bytes[start..start + len]),
            Op::Flush => {}
            Op::Discard | Op::WriteZeroes { .. } => bytes[start..start + len].fill(0),
        }
        drop(bytes);
        request.finish(Ok(()));
    }
}

impl Disk for MemDisk {
    fn info(&self) -> DiskInfo {
        self.shared.info()
    }

    fn resize(
        self: Arc<Self>,
        _cx: &Context,
        size_bytes: u64,
    ) -> LocalBoxFuture<'static, Result<(), IoError>> {
        self.grow(size_bytes);
        Box::pin(async { Ok(()) })
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Ok(Box::new(MemQueue {
            shared: Arc::clone(&self.shared),
            cx: cx.clone(),
        }))
    }

    fn close(self: Arc<Self>, _cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Box::pin(std::future::ready(*self.shared.closing.lock()))
    }
}

#[derive(Debug)]
struct MemQueue {
    shared: Arc<Shared>,
    cx: Context,
}

impl DiskQueue for MemQueue {
    fn submit(&self, request: Request) {
        let shared = Arc::clone(&self.shared);
        shared.log.lock().push((request.op, request.offset, request.len));
        if !shared.closed.with(|closed| *closed) {
            return shared.execute(request);
        }
        let request = Rc::new(RefCell::new(Some(request)));
        self.cx.spawn(async move {
            shared.closed.wait(|closed| (!*closed).then_some(())).await;
            let request = request.borrow_mut().take();
            if let Some(request) = request {
                shared.execute(request);
            }
        });
    }
}
