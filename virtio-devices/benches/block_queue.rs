//! Time and instructions of a request from the guest's ring to the disk and back: as many at a time as a round takes, on a
//! disk that answers at once and does nothing.
//!
//! With `--features virtio-queue` the rings are those of the crate `virtio-queue`, and all else is the same. Besides
//! criterion's report it prints `bench_result NAME VALUE UNIT` lines for `make bench`.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use block::ring::RingKind;
use block::worker::Frontend;
use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, OpenQueueError, Request};
use criterion::{Criterion, Throughput, criterion_group};
use virtio_devices::blk::{BlockDevice, BlockDeviceConfig, BlockQueue, BlockQueueConfig, Notify};
use virtio_devices::virtqueue::RingAddresses;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The requests of a round: no round takes more.
const BATCH: u16 = 32;
/// Kinds of chains: name, and whether they are in indirect tables.
const KINDS: [(&str, bool); 2] = [("direct", false), ("indirect", true)];
/// The environment variable that has only rounds run, for valgrind to count: a kind's name and a number.
const COUNTED: &str = "BLOCK_QUEUE_ROUNDS";
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

/// One queue on the disk that does nothing, and its driver.
struct Guest {
    memory: GuestMemoryMmap,
    queue: BlockQueue,
    available: u16,
    _cx: Context,
}

impl Guest {
    fn new(indirect: bool) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).expect("memory");
        lay_out(&memory, indirect);
        let cx = Context::new(RingKind::Null, 16).expect("a ring");
        let shown = BlockDeviceConfig {
            num_queues: 1,
            queue_size: 256,
            serial: "",
        };
        let device = Arc::new(BlockDevice::new(Arc::new(NullDisk), &shown).expect("a device"));
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
            _cx: cx,
        }
    }

    /// One round of a worker.
    fn round(&mut self) {
        self.available = self.available.wrapping_add(BATCH);
        self.memory
            .write_obj(self.available, INDEX)
            .expect("inside memory");
        assert!(self.queue.poll());
        assert!(self.queue.publish());
    }
}

/// The instructions of one request: those of valgrind's count that more rounds add. `None` if there is no valgrind.
fn instructions(name: &str) -> Option<f64> {
    let count = |rounds: u32| -> Option<f64> {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
        command.arg(std::env::current_exe().ok()?);
        let output = command.env(COUNTED, format!("{name} {rounds}")).output().ok()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let collected = said.lines().find_map(|line| line.split("Collected : ").nth(1));
        collected?.trim().parse().ok()
    };
    Some((count(2000)? - count(1000)?) / (1000.0 * f64::from(BATCH)))
}

fn round_trips(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("block_queue");
    group.throughput(Throughput::Elements(BATCH.into()));
    for (name, indirect) in KINDS {
        let mut guest = Guest::new(indirect);
        group.bench_function(name, |bencher| bencher.iter(|| guest.round()));
        let mut timed = |rounds: u32| {
            let begin = Instant::now();
            (0..rounds).for_each(|_| guest.round());
            begin.elapsed()
        };
        let best = (0..9).map(|_| timed(20_000)).min().unwrap_or_default();
        println!(
            "bench_result {name} {:.1} ns",
            best.as_nanos() as f64 / (20_000.0 * f64::from(BATCH))
        );
        match instructions(name) {
            Some(count) => println!("bench_result {name}_instructions {count:.0} instructions"),
            None => println!("{name}: instructions are not counted, because valgrind cannot be run"),
        }
    }
    group.finish();
}

criterion_group!(benches, round_trips);

fn main() {
    if let Ok(counted) = std::env::var(COUNTED) {
        let (name, rounds) = counted.split_once(' ').expect("a name and a number of rounds");
        let (_, indirect) = KINDS.into_iter().find(|kind| kind.0 == name).expect("a kind");
        let mut guest = Guest::new(indirect);
        (0..rounds.parse().expect("a number")).for_each(|_: u32| guest.round());
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
