//! The cost of an allocating 4 KiB write: reserve, fill, map, on system calls and a file in memory.
//!
//! Besides criterion's report it prints `bench_result NAME VALUE UNIT` lines for `make bench`.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use block::file::{FileOptions, ImageFile};
use block::ring::RingKind;
use block::{AlignedBuf, CompletionSink, Context, Disk, Op, Request};
use criterion::{Criterion, criterion_group, criterion_main};
use qcow::image::{CreateOptions, create};
use qcow::{OpenOptions, QcowDisk};

/// One write in each of so many clusters.
const CLUSTERS: u64 = 4096;

/// Fills a fresh image, and returns how long the writes took without the flush at the end.
fn fill() -> Duration {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let path = folder.path().join("disk.qcow2");
    drop(std::fs::File::create(&path).expect("a file"));
    let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
    let image = ImageFile::open(
        &path,
        FileOptions {
            write: true,
            direct: false,
        },
    )
    .expect("the file");
    let view = image.view(&cx).expect("a view");
    let options = CreateOptions::new(CLUSTERS << 16);
    cx.block_on(create(&view, &options))
        .expect("the ring turns")
        .expect("an image");
    let disk = QcowDisk::open(&path, &OpenOptions::default()).expect("the image opens");
    let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
    let sink = CompletionSink::new();
    let mut done = Vec::new();
    let mut buffers: Vec<_> = (0..64).map(|_| AlignedBuf::zeroed(4096)).collect();
    let begin = Instant::now();
    for first in (0..CLUSTERS).step_by(64) {
        for (index, buffer) in buffers.drain(..).enumerate() {
            let offset = (first + index as u64) << 16;
            queue.submit(Request::new(
                Op::Write { fua: false },
                offset,
                4096,
                buffer.into(),
                &sink,
                0,
            ));
        }
        while done.len() < 64 {
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            cx.run_ready();
            sink.drain_into(&mut done);
        }
        buffers.extend(done.drain(..).filter_map(|done| done.buffer.into_owned()));
    }
    begin.elapsed()
}

fn allocating(criterion: &mut Criterion) {
    criterion.bench_function("allocating write", |bencher| {
        bencher.iter_custom(|rounds| {
            let total: Duration = (0..rounds.div_ceil(CLUSTERS)).map(|_| fill()).sum();
            total.mul_f64(rounds as f64 / (rounds.div_ceil(CLUSTERS) * CLUSTERS) as f64)
        });
    });
    let best = (0..5).map(|_| fill()).min().unwrap_or_default();
    println!(
        "bench_result allocating_write {:.0} ns",
        best.as_nanos() as f64 / CLUSTERS as f64
    );
}

criterion_group!(benches, allocating);
criterion_main!(benches);
