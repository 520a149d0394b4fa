//! The cost of a cached mapping lookup, on one thread and on two at once.
//!
//! Lookups are spread over a 4 GiB disk whose tables are all cached. Two threads on disks of their own share nothing:
//! they show what the machine gives to two threads. Two whose locks are one cache line show what it costs that it
//! moves. Besides criterion's report it prints `bench_result NAME VALUE UNIT` lines for `make bench`.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
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

/// Two threads whose numbers differ by so many read-lock the same cache line.
const LOCK_SHARDS: usize = 8;

/// Nanoseconds for one lookup on each of the threads at work at once, one for each of `disks`: the median of five rounds
/// of the slowest. `idle` other threads have looked something up before them, and as many between two of them.
fn measure(disks: &[Arc<QcowDisk>], idle: usize) -> f64 {
    const LOOKUPS: u64 = 4_000_000;
    let go = AtomicBool::new(false);
    let slowest = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        // Working ones are the last of each group.
        for number in 0..disks.len() * (idle + 1) {
            let works = number % (idle + 1) == idle;
            let disk = &disks[number / (idle + 1)];
            let (go, (known, is_known)) = (&go, mpsc::channel());
            threads.push(scope.spawn(move || {
                let mut at = number as u64 * (DISK / 64);
                // The first lookup of a thread gives it its number.
                assert!(disk.cached_host_offset(at).is_some());
                known.send(()).expect("somebody waits");
                while !go.load(Ordering::Acquire) {
                    if works {
                        std::hint::spin_loop();
                    } else {
                        std::thread::park_timeout(Duration::from_millis(1));
                    }
                }
                let mut rounds = [Duration::ZERO; 5];
                for round in rounds.iter_mut().filter(|_| works) {
                    let begin = Instant::now();
                    for _ in 0..LOOKUPS {
                        at = next(at);
                        // A reader never finds another reader in its way.
                        assert!(black_box(disk.cached_host_offset(black_box(at))).is_some());
                    }
                    *round = begin.elapsed();
                }
                rounds.sort_unstable();
                rounds[2]
            }));
            is_known.recv().expect("it looks something up");
        }
        go.store(true, Ordering::Release);
        let times = threads.into_iter().map(|thread| thread.join().expect("a thread"));
        times.max().unwrap_or_default()
    });
    slowest.as_nanos() as f64 / LOOKUPS as f64
}

fn lookups(criterion: &mut Criterion) {
    let (_folder, disk) = disk();
    let (_other_folder, other) = self::disk();
    let both = [Arc::clone(&disk), Arc::clone(&disk)];
    // The numbers of threads that have ended are used again, so idle threads take those first. After more than two threads
    // the numbers of two are anything.
    for (name, disks, idle) in [
        ("lookup_hit_1_thread", &both[..1], 0),
        ("lookup_hit_2_threads", &both[..], 0),
        ("lookup_hit_2_threads_apart", &[Arc::clone(&disk), other][..], 0),
        ("lookup_hit_2_threads_one_line", &both[..], LOCK_SHARDS - 1),
    ] {
        println!("bench_result {name} {:.1} ns", measure(disks, idle));
    }
    let mut at = 0;
    criterion.bench_function("lookup hit", |bencher| {
        bencher.iter(|| {
            at = next(at);
            black_box(disk.cached_host_offset(black_box(at)))
        });
    });
}

criterion_group!(benches, lookups);
criterion_main!(benches);
