//! The cost of a cached mapping lookup, on one thread and on two at once.
//!
//! Lookups are spread over a 4 GiB disk whose tables are all cached. Besides criterion's report it prints
//! `bench_result NAME VALUE UNIT` lines for `make bench`.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use block::file::{FileOptions, ImageFile};
use block::ring::RingKind;
use block::{AlignedBuf, Context, Disk, Op, Request};
use criterion::{Criterion, criterion_group, criterion_main};
use qcow::image::{CreateOptions, Preallocation, create};
use qcow::{OpenOptions, QcowDisk};

const DISK: u64 = 4 << 30;

fn disk() -> (tempfile::TempDir, Arc<QcowDisk>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.qcow2");
    let file = std::fs::File::create(&path).expect("a file");
    drop(file);
    let cx = Context::syscalls();
    let image = ImageFile::open(
        &path,
        FileOptions {
            write: true,
            direct: false,
        },
    )
    .expect("the file");
    let view = image.view(&cx).expect("a view");
    let mut options = CreateOptions::new(DISK);
    options.preallocation = Preallocation::Metadata;
    cx.block_on(create(&view, &options))
        .expect("the ring turns")
        .expect("an image");
    let disk = QcowDisk::open(&path, &OpenOptions::default()).expect("the image opens");
    // One read in each L2 slice brings them all into the cache.
    let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
    let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
    for offset in (0..DISK).step_by(512 * 65536) {
        let (request, answer) = Request::local(Op::Read, offset, 512, AlignedBuf::zeroed(512).into());
        queue.submit(request);
        cx.block_on(answer)
            .expect("the ring turns")
            .result
            .expect("a read");
    }
    drop(queue);
    (folder, disk)
}

/// The next place to look up: a step that visits clusters in no simple order.
fn next(at: u64) -> u64 {
    (at + 0x9E37_79B9_7000) % DISK
}

/// Nanoseconds for one lookup on each of `threads` threads at work at once.
fn measure(disk: &Arc<QcowDisk>, threads: u64) -> f64 {
    const LOOKUPS: u64 = 4_000_000;
    let mut best = f64::MAX;
    for _ in 0..5 {
        let go = Arc::new(AtomicBool::new(false));
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (disk, go) = (Arc::clone(disk), Arc::clone(&go));
                std::thread::spawn(move || {
                    while !go.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                    let begin = Instant::now();
                    let mut at = thread * (DISK / 8);
                    for _ in 0..LOOKUPS {
                        at = next(at);
                        // A reader never finds another reader in its way.
                        assert!(black_box(disk.cached_host_offset(black_box(at))).is_some());
                    }
                    begin.elapsed()
                })
            })
            .collect();
        go.store(true, Ordering::Release);
        let times: Vec<Duration> = workers
            .into_iter()
            .map(|worker| worker.join().expect("a thread"))
            .collect();
        let longest = times.into_iter().max().unwrap_or_default();
        best = best.min(longest.as_nanos() as f64 / LOOKUPS as f64);
    }
    best
}

fn lookups(criterion: &mut Criterion) {
    let (_folder, disk) = disk();
    let mut at = 0;
    criterion.bench_function("lookup hit", |bencher| {
        bencher.iter(|| {
            at = next(at);
            black_box(disk.cached_host_offset(black_box(at)))
        });
    });
    for threads in [1, 2] {
        let name = if threads == 1 {
            "lookup_hit_1_thread"
        } else {
            "lookup_hit_2_threads"
        };
        println!("bench_result {name} {:.1} ns", measure(&disk, threads));
    }
}

criterion_group!(benches, lookups);
criterion_main!(benches);
