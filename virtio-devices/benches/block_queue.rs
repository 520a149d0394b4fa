//! What a request costs between the guest's ring and the disk, and back: 64 at a time, on a disk that
//! answers at once and does nothing.

use std::sync::Arc;

use block::ring::RingKind;
use block::worker::Frontend;
use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, OpenQueueError, Request};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use virtio_devices::blk::{
    BlockDevice, BlockDeviceConfig, BlockQueue, BlockQueueConfig, Notify, QueueReport,
};
use virtio_devices::virtqueue::RingAddresses;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const BATCH: u16 = 64;
const INDEX: GuestAddress = GuestAddress(0x2002);

#[derive(Debug)]
struct NullDisk;

impl Disk for NullDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: 1 << 40,
            read_only: false,
            preferred_io_bytes: 65536,
            physical_block_bytes: 512,
            discard: true,
            discard_granularity_bytes: 65536,
            write_zeroes: true,
        }
    }

    fn open_queue(self: Arc<Self>, _cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Ok(Box::new(NullQueue))
    }

    fn close(self: Arc<Self>, _cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }
}

#[derive(Debug)]
struct NullQueue;

impl DiskQueue for NullQueue {
    fn submit(&self, request: Request) {
        request.finish(Ok(()));
    }
}

struct Silent;

impl Notify for Silent {
    fn used(&self) {}
    fn broken(&self) {}
}

/// Lays out one read of 4 KiB per ring entry, in direct descriptors or an indirect table each.
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
        put(at, (request_buf, 16, 1, first + 1));
        put(at + 16, (data, 4096, 3, first + 2));
        put(at + 32, (request_buf + 16, 1, 2, 0));
        memory
            .write_obj(head as u16, GuestAddress(0x2004 + 2 * request))
            .expect("inside memory");
    }
}

fn round_trips(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("block_queue");
    group.throughput(Throughput::Elements(BATCH.into()));
    for (name, indirect) in [("direct", false), ("indirect", true)] {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).expect("memory");
        lay_out(&memory, indirect);
        let cx = Context::new(RingKind::Null, 16).expect("a ring");
        let shown = BlockDeviceConfig {
            num_queues: 1,
            queue_size: 256,
            serial: "",
        };
        let device = Arc::new(BlockDevice::new(Arc::new(NullDisk), &shown).expect("a device"));
        let config = BlockQueueConfig {
            memory: memory.clone(),
            size: 256,
            addresses: RingAddresses {
                descriptors: 0,
                available: 0x2000,
                used: 0x4000,
            },
            next_available: 0,
            inflight: None,
            features: device.features(),
            notify: Box::new(Silent),
            polled: false,
            report: Arc::new(QueueReport::default()),
        };
        let mut queue = BlockQueue::start(device, &cx, config).expect("a queue");
        let mut available = 0u16;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                available = available.wrapping_add(BATCH);
                memory.write_obj(available, INDEX).expect("inside memory");
                assert!(queue.poll());
                assert!(queue.publish());
            });
        });
        assert_eq!(queue.in_flight(), 0);
    }
    group.finish();
}

criterion_group!(benches, round_trips);
criterion_main!(benches);
