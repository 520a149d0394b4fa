//! The structures that a hostile guest lays out in its memory, and the disk it reaches with them.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::Mutex;

use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, Op, OpenQueueError, Request};
use ringdisk_driver::{Desc, INDIRECT, NEXT, Rings, WRITE, blk};
use virtio_devices::virtqueue::QueueSetup;

use crate::cursor::Cursor;
use crate::memory::{BASE, EDGE, END};

/// The disk's size in bytes.
pub const DISK_BYTES: u64 = 1 << 20;
/// The addresses of descriptors, the available and the used ring, unless a guest wants them elsewhere.
pub const DESCRIPTORS: u64 = BASE;
/// See [`DESCRIPTORS`].
pub const AVAILABLE: u64 = BASE + 0x2000;
/// See [`DESCRIPTORS`].
pub const USED: u64 = BASE + 0x3000;
const RINGS: Rings = Rings {
    descriptors: DESCRIPTORS,
    available: AVAILABLE,
    used: USED,
};
/// The guest address of the first indirect table.
pub const TABLE: u64 = BASE + 0x4000;
const HEADERS: u64 = BASE + 0x5000;
const DATA: u64 = BASE + 0x8000;

/// A disk in memory. Requests are answered at once, or held until their thread lets them go.
#[derive(Debug)]
pub struct MemoryDisk {
    bytes: Mutex<Vec<u8>>,
}

thread_local! {
    static HOLDS: RefCell<Option<Vec<Request>>> = const { RefCell::new(None) };
}

impl MemoryDisk {
    /// A disk of zeros.
    #[must_use]
    pub fn new() -> Arc<Self> {
        let bytes = Mutex::new(vec![0; DISK_BYTES as usize]);
        Arc::new(Self { bytes })
    }

    /// From now on requests of this thread wait.
    pub fn hold() {
        HOLDS.with_borrow_mut(|held| {
            held.get_or_insert_default();
        });
    }

    /// Answers those that wait, and from now on all at once.
    pub fn release(&self) {
        let held = HOLDS.take().unwrap_or_default();
        held.into_iter().for_each(|request| self.carry_out(request));
    }

    fn carry_out(&self, request: Request) {
        if let Err(error) = request.check(DISK_BYTES, false) {
            return request.finish(Err(error));
        }
        let Some(memory) = request.buffer.memory() else {
            return request.finish(Err(IoError::Unsupported));
        };
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let mut bytes = self.bytes.lock().expect("nobody panics");
        match request.op {
            Op::Read => memory.write(0, &bytes[range]),
            Op::Write { .. } => memory.read(0, &mut bytes[range]),
            Op::Flush => {}
            Op::Discard | Op::WriteZeroes { .. } => bytes[range].fill(0),
        }
        drop(bytes);
        request.finish(Ok(()));
    }
}

impl Disk for MemoryDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: DISK_BYTES,
            read_only: false,
            preferred_io_bytes: 4096,
            physical_block_bytes: 512,
            discard: true,
            discard_granularity_bytes: 4096,
            write_zeroes: true,
        }
    }

    fn open_queue(self: Arc<Self>, _cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Ok(Box::new(MemoryQueue(self)))
    }

    fn close(self: Arc<Self>, _cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }
}

#[derive(Debug)]
struct MemoryQueue(Arc<MemoryDisk>);

impl DiskQueue for MemoryQueue {
    fn submit(&self, request: Request) {
        let mut request = Some(request);
        HOLDS.with_borrow_mut(|held| {
            if let Some(held) = held {
                held.extend(request.take());
            }
        });
        if let Some(request) = request {
            self.0.carry_out(request);
        }
    }
}

/// A guest address: often one that is right.
fn address(cursor: &mut Cursor<'_>) -> u64 {
    match cursor.below(8) {
        0 => cursor.u64(),
        1 => cursor.pick(&[0, BASE - 1, BASE, EDGE - 3, EDGE, END - 1, END, u64::MAX]),
        2 => TABLE + 16 * cursor.below(8),
        3 => HEADERS + 16 * cursor.below(8),
        4 => cursor.pick(&[DESCRIPTORS, AVAILABLE, USED]) + cursor.below(64),
        _ => DATA + cursor.below(0x8000),
    }
}

/// Lays out one thing in guest memory: a descriptor, a header, an entry of the available ring, or bytes anywhere.
pub fn lay_out(cursor: &mut Cursor<'_>, size: u16, write: &mut dyn FnMut(u64, &[u8])) {
    match cursor.below(10) {
        0..=2 => {
            let table = cursor.pick(&[DESCRIPTORS, DESCRIPTORS, TABLE]);
            let index = cursor.below(u64::from(size.clamp(1, 16)));
            let len = match cursor.below(6) {
                0 => cursor.u32(),
                1 => cursor.pick(&[0, 1, 15, 17, u32::MAX]),
                2 => 16 * cursor.below(8) as u32,
                3 => 512 * cursor.below(64) as u32,
                _ => cursor.pick(&[16, 1, 512, 4096]),
            };
            let flags = match cursor.below(8) {
                0 => cursor.u32() as u16,
                1 => 4,
                _ => cursor.pick(&[0, 1, 1, 2, 3]),
            };
            let next = match cursor.below(8) {
                0 => cursor.u32() as u16,
                _ => cursor.below(u64::from(size.clamp(1, 16))) as u16,
            };
            let desc = Desc(address(cursor), len, flags, next);
            write(table + 16 * index, &desc.to_bytes());
        }
        7..=9 => whole_request(cursor, size, write),
        3 => {
            let kind = cursor.pick(&[0_u32, 1, 4, 8, 11, 13, 99]);
            let sector = cursor.pick(&[0, 1, 2047, 2048, u64::MAX]);
            write(HEADERS + 16 * cursor.below(8), &blk::header(kind, sector));
        }
        4 => {
            let place = cursor.below(u64::from(size.max(1)));
            let head = cursor.below(u64::from(size) + 2) as u16;
            write(AVAILABLE + 4 + 2 * place, &head.to_le_bytes());
        }
        5 => {
            let at = address(cursor);
            let len = 1 + cursor.below(32) as usize;
            write(at, cursor.bytes(len));
        }
        // Flags, the index, or the event the guest waits for.
        _ => {
            let at = cursor.pick(&[0, 2, 2, 4 + 2 * u64::from(size)]);
            let value = if cursor.one_in(4) {
                cursor.u32() as u16
            } else {
                cursor.below(8) as u16
            };
            write(AVAILABLE + at, &value.to_le_bytes());
        }
    }
}

/// A request as it should be, or nearly: header, data, status in three descriptors of a table.
fn whole_request(cursor: &mut Cursor<'_>, size: u16, write: &mut dyn FnMut(u64, &[u8])) {
    let kind = cursor.pick(&[0_u32, 1, 4, 8, 11, 13]);
    let slot = cursor.below(u64::from(size.clamp(3, 18) / 3));
    let header = HEADERS + 16 * slot;
    write(header, &blk::header(kind, cursor.below(2100)));
    let range = [
        cursor.below(2100).to_le_bytes(),
        cursor.below(1 << 33).to_le_bytes(),
    ]
    .concat();
    let data = DATA + 4096 * slot;
    write(data, &range);
    let writes = if matches!(kind, blk::IN | blk::GET_ID) {
        WRITE
    } else {
        0
    };
    let len = if kind > 8 {
        16
    } else {
        512 * (1 + cursor.below(8) as u32)
    };
    let parts = [
        (header, 16, NEXT),
        (data, len, NEXT | writes),
        (data + 0x7000, 1, WRITE),
    ];
    for (index, (address, len, flags)) in (3 * slot..).zip(parts) {
        let desc = Desc(address, len, flags, index as u16 + 1);
        write(RINGS.descriptor(index as u16), &desc.to_bytes());
    }
    // Mostly in the first places of the ring, and then one more is there.
    let place = cursor.below(u64::from(size.clamp(1, 8)));
    let entry = RINGS.available_entry(place as u16, size.max(1));
    write(entry, &(3 * slot as u16).to_le_bytes());
    if !cursor.one_in(4) {
        write(RINGS.available_index(), &(place as u16 + 1).to_le_bytes());
    }
}

/// A descriptor before it is written.
#[derive(Clone, Copy)]
struct Draft {
    /// The guest address it is written at.
    at: u64,
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// Lays out a chain of any length in the queue's table or an indirect one, with at most one mistake. Returns its head.
pub fn lay_out_chain(cursor: &mut Cursor<'_>, setup: &QueueSetup, write: &mut dyn FnMut(u64, &[u8])) -> u16 {
    let size = setup.size;
    let head = cursor.below(size.into()) as u16;
    let wanted = match cursor.below(32) {
        0 => 1000 + cursor.below(100),
        1 => 1 + cursor.below(24),
        _ => 1 + cursor.below(5),
    };
    let direct = |ahead: u16, address, len, flags| {
        let index = head.wrapping_add(ahead) % size;
        Draft {
            at: setup.addresses.descriptors + 16 * u64::from(index),
            address,
            len,
            flags,
            next: (index + 1) % size,
        }
    };
    let mut drafts = Vec::new();
    let is_indirect = cursor.one_in(3) && (setup.indirect || cursor.one_in(8));
    let count = if is_indirect {
        wanted.min(64) as u16
    } else {
        wanted.min(size.into()) as u16
    };
    if is_indirect {
        let table = TABLE + 1024 * cursor.below(4);
        if size > 1 && cursor.one_in(4) {
            drafts.push(direct(0, DATA, 32, NEXT));
        }
        let link = direct(drafts.len() as u16, table, 16 * u32::from(count), INDIRECT);
        drafts.push(link);
        drafts.extend((0..count).map(|index| Draft {
            at: table + 16 * u64::from(index),
            address: 0,
            len: 0,
            flags: NEXT,
            next: index + 1,
        }));
    } else {
        drafts.extend((0..count).map(|index| direct(index, 0, 0, NEXT)));
    }
    let readable = cursor.below(u64::from(count) + 1) as usize;
    let buffers = drafts.len() - usize::from(count);
    for (index, draft) in drafts[buffers..].iter_mut().enumerate() {
        draft.len = cursor.pick(&[1, 16, 512, 4096]);
        // Some lie over the edge between the regions, which is allowed.
        draft.address = cursor.pick(&[DATA, EDGE - 2048, EDGE - 8]) + cursor.below(64);
        draft.flags |= if index >= readable { WRITE } else { 0 };
    }
    if let Some(last) = drafts.last_mut() {
        last.flags &= !NEXT;
    }
    if cursor.one_in(12) {
        let which = cursor.below(drafts.len() as u64) as usize;
        spoil(cursor, &mut drafts[which], size);
    }
    for draft in drafts {
        let mut bytes = draft.address.to_le_bytes().to_vec();
        bytes.extend(draft.len.to_le_bytes());
        bytes.extend(draft.flags.to_le_bytes());
        bytes.extend(draft.next.to_le_bytes());
        write(draft.at, &bytes);
    }
    head
}

/// Makes one mistake in a descriptor.
fn spoil(cursor: &mut Cursor<'_>, draft: &mut Draft, size: u16) {
    match cursor.below(8) {
        0 => draft.len = cursor.pick(&[0, 8, 24, u32::MAX, 0x2_0000]),
        1 => draft.flags ^= WRITE,
        2 => draft.flags ^= NEXT,
        3 => draft.flags |= INDIRECT,
        4 => (draft.flags, draft.next) = (draft.flags | NEXT, cursor.u32() as u16),
        5 => (draft.flags, draft.next) = (draft.flags | NEXT, cursor.below(size.into()) as u16),
        6 => draft.address = cursor.pick(&[0, BASE - 1, EDGE - 16, EDGE - 32, END - 1, END, u64::MAX]),
        _ => (draft.flags, draft.next) = (draft.flags | NEXT, 0),
    }
}
