//! The cost of a request above the kernel: submitted to a raw disk, ended at once by the null driver, answered.
//!
//! Besides criterion's report it prints `bench_result NAME VALUE UNIT` lines for `make bench`.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::sync::Arc;
use std::time::Instant;

use block::file::{FileOptions, ImageFile};
use block::raw::RawDisk;
use block::ring::RingKind;
use block::{AlignedBuf, CompletionSink, Context, Disk, Op, Request};
use criterion::{Criterion, criterion_group, criterion_main};

const DEPTH: usize = 64;

fn round_trips(criterion: &mut Criterion) {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(1 << 30).expect("its length");
    let image = ImageFile::from_fd(
        "null".as_ref(),
        file,
        FileOptions {
            write: true,
            direct: false,
        },
    );
    let disk = RawDisk::new(image, 1 << 30, true);
    let cx = Context::new(RingKind::Null, 256).expect("a ring");
    let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
    let sink = CompletionSink::new();
    let mut done = Vec::with_capacity(DEPTH);
    let mut buffers: Vec<_> = (0..DEPTH).map(|_| AlignedBuf::zeroed(4096)).collect();
    let mut batch = |times: u64| {
        let begin = Instant::now();
        for _ in 0..times {
            for (tag, buffer) in buffers.drain(..).enumerate() {
                let offset = tag as u64 * 4096;
                queue.submit(Request::new(
                    Op::Read,
                    offset,
                    4096,
                    buffer.into(),
                    &sink,
                    tag as u64,
                ));
            }
            cx.ring().turn(false).expect("the ring turns");
            sink.drain_into(&mut done);
            assert_eq!(done.len(), DEPTH);
            buffers.extend(done.drain(..).filter_map(|done| done.buffer.into_owned()));
        }
        begin.elapsed()
    };
    criterion.bench_function("round trips, 64 at once", |bencher| {
        bencher.iter_custom(&mut batch);
    });
    let best = (0..5).map(|_| batch(20_000)).min().unwrap_or_default();
    println!(
        "bench_result round_trip {:.1} ns",
        best.as_nanos() as f64 / (20_000 * DEPTH) as f64
    );
}

criterion_group!(benches, round_trips);
criterion_main!(benches);
