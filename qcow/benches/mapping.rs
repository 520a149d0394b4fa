//! The cost of a cached mapping lookup, on one thread and on two at once.
//!
//! Lookups are spread over a 4 GiB disk whose tables are all cached. Two threads on disks of their own share nothing:
//! they show what the machine gives to two threads. Two whose locks are one cache line show what it costs that it
//! moves. Besides criterion's report it prints `bench_result NAME VALUE UNIT` lines for `make bench`.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::hint::black_box;
use std::sync::{Arc, Barrier};
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

/// A thread's way to look a guest offset up.
type LookUp<'a> = Box<dyn Fn(u64) -> Option<u64> + Send + 'a>;

/// Nanoseconds for one lookup on each of the threads at work at once, which look up by these: the median of five rounds of
/// the slowest.
fn measure(threads: Vec<LookUp<'_>>) -> f64 {
    const LOOKUPS: u64 = 4_000_000;
    let begin = &Barrier::new(threads.len());
    let slowest = std::thread::scope(|scope| {
        let work = |(number, look_up): (usize, LookUp<'_>)| {
            let mut at = number as u64 * (DISK / 64);
            begin.wait();
            let mut rounds = [Duration::ZERO; 5];
            for round in &mut rounds {
                let begin = Instant::now();
                for _ in 0..LOOKUPS {
                    at = next(at);
                    // A reader never finds another reader in its way.
                    assert!(black_box(look_up(black_box(at))).is_some());
                }
                *round = begin.elapsed();
            }
            rounds.sort_unstable();
            rounds[2]
        };
        let threads: Vec<_> = (threads.into_iter().enumerate())
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let times = threads.into_iter().map(|thread| thread.join().expect("a thread"));
        times.max().unwrap_or_default()
    });
    slowest.as_nanos() as f64 / LOOKUPS as f64
}

/// Looks up by a reader of its own, as a queue does.
fn apart(disk: &QcowDisk) -> LookUp<'_> {
    let reader = disk.mapping_reader();
    Box::new(move |at| reader.cached_host_offset(at))
}

/// Looks up as everybody does who has no reader of their own.
fn together(disk: &QcowDisk) -> LookUp<'_> {
    Box::new(|at| disk.cached_host_offset(at))
}

fn lookups(criterion: &mut Criterion) {
    let (_folder, disk) = disk();
    let (_other_folder, other) = self::disk();
    let figures = [
        ("lookup_hit_1_thread", measure(vec![apart(&disk)])),
        ("lookup_hit_2_threads", measure(vec![apart(&disk), apart(&disk)])),
        (
            "lookup_hit_2_threads_apart",
            measure(vec![apart(&disk), apart(&other)]),
        ),
        (
            "lookup_hit_2_threads_one_line",
            measure(vec![together(&disk), together(&disk)]),
        ),
    ];
    for (name, figure) in figures {
        println!("bench_result {name} {figure:.1} ns");
    }
    let reader = disk.mapping_reader();
    let mut at = 0;
    criterion.bench_function("lookup hit", |bencher| {
        bencher.iter(|| {
            at = next(at);
            black_box(reader.cached_host_offset(black_box(at)))
        });
    });
}

criterion_group!(benches, lookups);
criterion_main!(benches);
