//! Test support of this crate: a driver for a queue, and a disk in memory whose requests can be held.

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
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

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
/// The address of the tests' headers, 16 bytes for each descriptor.
pub(crate) const HEADERS: u64 = BASE + 0x3_0000;
/// The address of the tests' status bytes, one for each descriptor.
pub(crate) const STATUSES: u64 = BASE + 0x4_0000;
/// The address of the tests' data.
pub(crate) const DATA: u64 = BASE + 0x5_0000;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// The feature bits that tests negotiate unless they say otherwise.
pub(crate) const RING_FEATURES: u64 = 1 << 28 | 1 << 29 | 1 << 32;

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

/// A descriptor as a driver writes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Desc(pub(crate) u64, pub(crate) u32, pub(crate) u16, pub(crate) u16);

/// The driver's side of one queue.
pub(crate) struct Driver {
    pub(crate) memory: GuestMemoryMmap,
    pub(crate) addresses: RingAddresses,
    pub(crate) size: u16,
    pub(crate) available: u16,
    pub(crate) used: u16,
    next_descriptor: u16,
}

impl Driver {
    /// Queue number `index` of `size` entries (256 at most) in `memory`.
    pub(crate) fn new(memory: GuestMemoryMmap, index: u64, size: u16) -> Self {
        let base = BASE + index * 0x4000;
        let addresses = RingAddresses {
            descriptors: base,
            available: base + 0x1000,
            used: base + 0x2000,
        };
        Self {
            memory,
            addresses,
            size,
            available: 0,
            used: 0,
            next_descriptor: 0,
        }
    }

    /// The same driver on a copy of its memory.
    pub(crate) fn in_memory(&self, memory: &GuestMemoryMmap) -> Self {
        Self {
            memory: memory.clone(),
            ..*self
        }
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .expect("inside guest memory");
    }

    pub(crate) fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .expect("inside guest memory");
        bytes
    }

    fn read_u16(&self, address: u64) -> u16 {
        let bytes = self.read(address, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    fn read_u32(&self, address: u64) -> u32 {
        let bytes = self.read(address, 4);
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    /// Writes descriptor `index` of the table at `table`.
    pub(crate) fn descriptor_in(&self, table: u64, index: u16, desc: Desc) {
        let Desc(address, len, flags, next) = desc;
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.write(table + 16 * u64::from(index), &bytes);
    }

    pub(crate) fn descriptor(&self, index: u16, desc: Desc) {
        self.descriptor_in(self.addresses.descriptors, index, desc);
    }

    /// Puts `head` into the available ring without moving its index.
    pub(crate) fn stage(&mut self, head: u16) {
        let position = u64::from(self.available % self.size);
        self.write(self.addresses.available + 4 + 2 * position, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
    }

    /// Shows the device what was staged.
    pub(crate) fn publish(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.write(self.addresses.available + 2, &self.available.to_le_bytes());
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    pub(crate) fn make_available(&mut self, head: u16) {
        self.stage(head);
        self.publish();
    }

    pub(crate) fn set_used_event(&self, event: u16) {
        let offset = 4 + 2 * u64::from(self.size);
        self.write(self.addresses.available + offset, &event.to_le_bytes());
    }

    pub(crate) fn avail_event(&self) -> u16 {
        self.read_u16(self.addresses.used + 4 + 8 * u64::from(self.size))
    }

    pub(crate) fn used_flags(&self) -> u16 {
        self.read_u16(self.addresses.used)
    }

    pub(crate) fn used_index(&self) -> u16 {
        self.read_u16(self.addresses.used + 2)
    }

    /// Takes the next used entry: head and length.
    pub(crate) fn take_used(&mut self) -> Option<(u32, u32)> {
        if self.used == self.used_index() {
            return None;
        }
        let entry = self.addresses.used + 4 + 8 * u64::from(self.used % self.size);
        self.used = self.used.wrapping_add(1);
        Some((self.read_u32(entry), self.read_u32(entry + 4)))
    }

    /// Lays out a chain of these buffers (address, length, writable) in free descriptors and returns
    /// its head. Descriptors are taken in turn; a test has no more in flight than the queue holds.
    pub(crate) fn chain(&mut self, buffers: &[(u64, u32, bool)]) -> u16 {
        let head = self.next_descriptor;
        for (at, &(address, len, writable)) in buffers.iter().enumerate() {
            let index = self.next_descriptor;
            let next = (index + 1) % self.size;
            let last = at + 1 == buffers.len();
            let flags = if last { 0 } else { NEXT } | if writable { WRITE } else { 0 };
            self.descriptor(index, Desc(address, len, flags, next));
            self.next_descriptor = next;
        }
        head
    }

    /// Returns the address of the status of the request with this head. It is 0xff until it is written.
    fn status_address(&self, head: u16) -> u64 {
        STATUSES + (self.addresses.descriptors - BASE) / 0x4000 * 0x100 + u64::from(head)
    }

    pub(crate) fn status(&self, head: u16) -> u8 {
        self.read(self.status_address(head), 1)[0]
    }

    /// Lays out a request of header, `data` buffers and status; stages it; returns its head.
    pub(crate) fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> u16 {
        let head = self.next_descriptor;
        let queue = (self.addresses.descriptors - BASE) / 0x4000;
        let header = HEADERS + queue * 0x1000 + 16 * u64::from(head);
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        self.write(header, &bytes);
        let status = self.status_address(head);
        self.write(status, &[0xff]);
        let mut buffers = vec![(header, 16, false)];
        buffers.extend(data);
        buffers.push((status, 1, true));
        self.chain(&buffers);
        self.stage(head);
        head
    }
}

#[derive(Debug)]
struct Shared {
    info: DiskInfo,
    bytes: Mutex<Vec<u8>>,
    log: Mutex<Vec<(Op, u64, u64)>>,
    /// Whether requests are held up.
    closed: Monitor<bool>,
    failing: Mutex<Option<IoError>>,
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

    /// From now on requests fail, or not.
    pub(crate) fn fail(&self, error: Option<IoError>) {
        *self.shared.failing.lock() = error;
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.shared.bytes.lock()[offset..offset + len].to_vec()
    }

    pub(crate) fn set_bytes(&self, offset: usize, bytes: &[u8]) {
        self.shared.bytes.lock()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

impl Shared {
    fn carry_out(&self, request: Request) {
        if let Err(error) = request.check(self.info.size_bytes, self.info.read_only) {
            return request.finish(Err(error));
        }
        if let Some(error) = *self.failing.lock() {
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
        self.shared.info
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Ok(Box::new(MemQueue {
            shared: Arc::clone(&self.shared),
            cx: cx.clone(),
        }))
    }

    fn close(self: Arc<Self>, _cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
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
            return shared.carry_out(request);
        }
        let request = Rc::new(RefCell::new(Some(request)));
        self.cx.spawn(async move {
            shared.closed.wait(|closed| (!*closed).then_some(())).await;
            let request = request.borrow_mut().take();
            if let Some(request) = request {
                shared.carry_out(request);
            }
        });
    }
}
