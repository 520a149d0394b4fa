//! Time and instructions of a request from the guest's ring to the disk and back: as many at a time as a round takes, on a
//! disk that answers at once and does nothing.
//!
//! With `--features virtio-queue` the rings are those of the crate `virtio-queue`, and all else is the same. Besides
//! criterion's report it prints `bench_result NAME VALUE UNIT` lines for `make bench`.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

#[path = "../../tests/counts/src/callgrind.rs"]
mod callgrind;
#[path = "../../tests/counts/src/guest.rs"]
mod guest;

use std::sync::Arc;
use std::time::Instant;

use block::ring::RingKind;
use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, OpenQueueError, Request};
use criterion::{Criterion, Throughput, criterion_group};

use guest::{BATCH, Guest};

/// Kinds of chains: name, and whether they are in indirect tables.
const KINDS: [(&str, bool); 2] = [("direct", false), ("indirect", true)];

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

fn guest(indirect: bool) -> Guest {
    let cx = Context::new(RingKind::Null, 16).expect("a ring");
    Guest::new(Arc::new(NullDisk), cx, indirect)
}

fn round_trips(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("block_queue");
    group.throughput(Throughput::Elements(BATCH.into()));
    for (name, indirect) in KINDS {
        let mut guest = guest(indirect);
        group.bench_function(name, |bencher| bencher.iter(|| guest.round(|_| {})));
        let mut timed = |rounds: u32| {
            let begin = Instant::now();
            (0..rounds).for_each(|_| guest.round(|_| {}));
            begin.elapsed()
        };
        let best = (0..9).map(|_| timed(20_000)).min().unwrap_or_default();
        println!(
            "bench_result {name} {:.1} ns",
            best.as_nanos() as f64 / (20_000.0 * f64::from(BATCH))
        );
        match callgrind::per_round(name, [1000, 2000]) {
            Ok(count) => println!(
                "bench_result {name}_instructions {:.0} instructions",
                count / f64::from(BATCH)
            ),
            Err(error) => println!("{name}: instructions are not counted: {error}"),
        }
    }
    group.finish();
}

criterion_group!(benches, round_trips);

fn main() {
    if let Some((name, rounds)) = callgrind::counted() {
        let (_, indirect) = KINDS.into_iter().find(|kind| kind.0 == name).expect("a kind");
        let mut guest = guest(indirect);
        (0..rounds).for_each(|_| guest.round(|_| {}));
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
