//! A virtqueue in memory that a hostile guest writes: the device neither panics nor leaves guest memory, each of its
//! rounds ends, and everything it took it gives back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use block::worker::Frontend;
use block::{Context, Disk};
use virtio_devices::blk::{
    BlockDevice, BlockDeviceConfig, BlockQueue, BlockQueueConfig, Notify, QueueReport,
};
use virtio_devices::virtqueue::{DirtyLog, QueueLog, RingAddresses};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, MmapRegion};

use crate::cursor::Cursor;
use crate::device::{AVAILABLE, DESCRIPTORS, MemoryDisk, USED, lay_out};
use crate::memory::GuardedMemory;

/// The most steps of a case.
const STEPS_MAX: u32 = 300;
const RING_FEATURES: u64 = 1 << 28 | 1 << 29 | 1 << 32;

thread_local! {
    static MEMORY: GuardedMemory = GuardedMemory::new();
}

/// Counts of the notifications to the guest.
#[derive(Clone, Debug, Default)]
struct Told {
    used: Arc<AtomicU64>,
    broken: Arc<AtomicU64>,
}

impl Notify for Told {
    fn used(&self) {
        self.used.fetch_add(1, Relaxed);
    }

    fn broken(&self) {
        self.broken.fetch_add(1, Relaxed);
    }
}

/// A log of all pages of `memory`, as a guest has that migrates.
fn log_of(memory: &GuestMemoryMmap, used_ring: u64) -> QueueLog {
    let pages = memory.last_addr().0 / 4096 + 1;
    let bytes = usize::try_from(pages.div_ceil(8)).expect("a small guest");
    QueueLog {
        log: Arc::new(DirtyLog::new(MmapRegion::new(bytes).expect("a mapping"))),
        used_ring,
    }
}

/// Lays out memory and lets the device work, in turn.
///
/// # Panics
///
/// If that does not hold.
pub fn body(data: &[u8]) -> &'static str {
    let mut cursor = Cursor::new(data);
    let memory = MEMORY.with(|memory| memory.zeroed());
    let disk = MemoryDisk::new();
    let shown = BlockDeviceConfig {
        num_queues: 1,
        queue_size: 256,
        serial: "serial",
    };
    let device = BlockDevice::new(Arc::clone(&disk) as Arc<dyn Disk>, &shown).expect("a device");
    let device = Arc::new(device);
    let size = cursor.pick(&[16, 16, 16, 16, 64, 64, 256, 1, 2, 3, 0, 32768]);
    let elsewhere = cursor.one_in(16);
    let mut place = |usual: u64| {
        if elsewhere {
            cursor.u64() >> cursor.below(64)
        } else {
            usual
        }
    };
    let addresses = RingAddresses {
        descriptors: place(DESCRIPTORS),
        available: place(AVAILABLE),
        used: place(USED),
    };
    let told = Told::default();
    let report = Arc::new(QueueReport::default());
    let offered = device.features() | RING_FEATURES;
    let config = BlockQueueConfig {
        memory: memory.clone(),
        size,
        addresses,
        next_available: if cursor.one_in(8) { cursor.u32() as u16 } else { 0 },
        inflight: None,
        features: if cursor.one_in(4) {
            offered & cursor.u64()
        } else {
            offered
        },
        notify: Box::new(told.clone()),
        polled: cursor.one_in(8),
        report: Arc::clone(&report),
        stats: Arc::default(),
        log: cursor.one_in(4).then(|| log_of(&memory, addresses.used)),
    };
    let cx = Context::syscalls();
    let Ok(mut queue) = BlockQueue::start(device, &cx, config) else {
        return "refused";
    };
    for _ in 0..STEPS_MAX {
        if cursor.is_empty() {
            break;
        }
        step(&mut cursor, &mut queue, &disk, &memory, size);
    }
    // What was laid out last is looked at, too.
    queue.poll();
    disk.release();
    // What was taken is given back; what still waits may go on for ever, as the guest may write its own indices
    // with what it reads.
    queue.publish();
    assert_eq!(queue.in_flight(), 0, "{queue:?}");
    queue.removed();
    assert!(told.broken.load(Relaxed) <= 1);
    assert_eq!(told.broken.load(Relaxed) == 1, report.is_broken());
    match (report.is_broken(), told.used.load(Relaxed)) {
        (true, _) => "broken",
        (false, 0) => "silent",
        (false, _) => "served",
    }
}

fn step(
    cursor: &mut Cursor<'_>,
    queue: &mut BlockQueue,
    disk: &MemoryDisk,
    memory: &GuestMemoryMmap,
    size: u16,
) {
    match cursor.below(8) {
        0 => {
            queue.poll();
            assert!(queue.in_flight() <= 2 * usize::from(size), "{queue:?}");
        }
        1 => {
            queue.publish();
        }
        2 => {
            if queue.prepare_sleep() {
                queue.end_sleep();
            }
        }
        3 if cursor.one_in(2) => MemoryDisk::hold(),
        3 => disk.release(),
        _ => lay_out(cursor, size, &mut |address, bytes| {
            // A guest has no other memory.
            let _any = memory.write(bytes, GuestAddress(address));
        }),
    }
}
