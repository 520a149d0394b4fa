//! A guest's side of a block queue that costs next to nothing: its ring is laid out once, and a round only makes entries available.

use std::sync::Arc;

use block::worker::Frontend;
use block::{Context, Disk};
use virtio_devices::blk::{BlockDevice, BlockDeviceConfig, BlockQueue, BlockQueueConfig, Notify};
use virtio_devices::virtqueue::RingAddresses;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The requests of a round: no round of a queue takes more.
pub(crate) const BATCH: u16 = 32;
/// The driver's index of the available ring, the device's of the used ring, and the status byte of the first entry's request.
const INDEX: GuestAddress = GuestAddress(0x2002);
const USED: GuestAddress = GuestAddress(0x4002);
const STATUS: GuestAddress = GuestAddress(0x1_0010);

struct Silent;

impl Notify for Silent {
    fn used(&self) {}
    fn broken(&self) {}
}

/// Lays out one read of 4 KiB per ring entry, each of another cluster, in direct descriptors or an indirect table each.
fn lay_out(memory: &GuestMemoryMmap, indirect: bool) {
    let put = |address: u64, (target, len, flags, next): (u64, u32, u16, u16)| {
        let write = |offset, bytes: &[u8]| {
            memory
                .write_slice(bytes, GuestAddress(address + offset))
                .expect("inside memory");
        };
        write(0, &target.to_le_bytes());
        write(8, &len.to_le_bytes());
        write(12, &flags.to_le_bytes());
        write(14, &next.to_le_bytes());
    };
    for request in 0..256u64 {
        let head = request % 64 * if indirect { 1 } else { 3 };
        let request_buf = 0x1_0000 + request % 64 * 64;
        let data = 0x10_0000 + request % 64 * 4096;
        let table = if indirect { 0x2_0000 + request % 64 * 64 } else { 0 };
        let (at, first) = if indirect {
            put(head * 16, (table, 48, 4, 0));
            (table, 0)
        } else {
            (head * 16, head as u16)
        };
        let sector = request % 64 * 128;
        memory
            .write_obj(sector, GuestAddress(request_buf + 8))
            .expect("inside memory");
        put(at, (request_buf, 16, 1, first + 1));
        put(at + 16, (data, 4096, 3, first + 2));
        put(at + 32, (request_buf + 16, 1, 2, 0));
        memory
            .write_obj(head as u16, GuestAddress(0x2004 + 2 * request))
            .expect("inside memory");
    }
}

/// One queue of a disk, and its driver.
pub(crate) struct Guest {
    memory: GuestMemoryMmap,
    queue: BlockQueue,
    available: u16,
    cx: Context,
}

impl Guest {
    /// Starts a queue of `disk` in `cx`.
    pub(crate) fn new(disk: Arc<dyn Disk>, cx: Context, indirect: bool) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).expect("memory");
        lay_out(&memory, indirect);
        let shown = BlockDeviceConfig {
            num_queues: 1,
            queue_size: 256,
            serial: "",
        };
        let device = Arc::new(BlockDevice::new(disk, &shown).expect("a device"));
        let rings = RingAddresses {
            descriptors: 0,
            available: 0x2000,
            used: 0x4000,
        };
        let features = device.features();
        let config = BlockQueueConfig::new(memory.clone(), 256, rings, features, Box::new(Silent));
        let queue = BlockQueue::start(device, &cx, config).expect("a queue");
        Self {
            memory,
            queue,
            available: 0,
            cx,
        }
    }

    /// One round of a worker: requests are taken, `turn` does what a worker's ring does, answers are given. Fails if a request was not
    /// answered, or not well.
    pub(crate) fn round(&mut self, turn: impl FnOnce(&Context)) {
        self.available = self.available.wrapping_add(BATCH);
        self.memory
            .write_obj(self.available, INDEX)
            .expect("inside memory");
        assert!(self.queue.poll());
        turn(&self.cx);
        assert!(self.queue.publish());
        let used: u16 = self.memory.read_obj(USED).expect("inside memory");
        assert_eq!(used, self.available, "every request is answered");
        let status: u8 = self.memory.read_obj(STATUS).expect("inside memory");
        assert_eq!(status, 0, "the first entry's last answer");
    }
}
