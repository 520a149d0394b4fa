//! The cost of a request with 1 to 64 queues at work on one image, each on a thread of its own.
//!
//! No kernel takes part: ops succeed at once and touch nothing, so all that is left is the engine and what its queues
//! share. Threads outnumber the CPUs, so not the time that passes is measured but the CPU time of a request. It stays
//! the same if the queues do not disturb each other. `docs/many-queues.md` has the model and the figures.
//!
//! Besides criterion's report it prints `bench_result NAME VALUE UNIT` lines for `make bench`. With `QUEUES_COUNTED=KIND
//! QUEUES REQUESTS` it only runs that, for `perf stat` or valgrind to count.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use block::ring::RingKind;
use block::{AlignedBuf, Buffer, CompletionSink, Context, Disk, Op, Request};
use criterion::{Criterion, criterion_group, criterion_main};
use qcow::image::{CreateOptions, Preallocation, create};
use qcow::{OpenOptions, QcowDisk};
use rustix::time::{ClockId, clock_gettime};

/// The image's clusters, each written by one request at most.
const CLUSTERS: u64 = 1 << 16;
const CLUSTER: u64 = 1 << 16;
/// Requests that a queue submits at once.
const DEPTH: usize = 32;
const QUEUES: [u64; 5] = [1, 2, 4, 16, 64];

/// A kind of request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// Reads whose mapping is cached.
    Read,
    /// Writes over clusters that the guest has.
    Overwrite,
    /// Writes that allocate a cluster each.
    Allocate,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Read, Self::Overwrite, Self::Allocate];

    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Overwrite => "overwrite",
            Self::Allocate => "allocate",
        }
    }

    /// Returns the number of requests of a measurement.
    fn requests(self) -> u64 {
        match self {
            Self::Read | Self::Overwrite => 4 << 20,
            Self::Allocate => CLUSTERS,
        }
    }
}

/// An image whose tables are all cached.
fn disk(kind: Kind) -> (tempfile::TempDir, Arc<QcowDisk>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.qcow2");
    drop(std::fs::File::create(&path).expect("a file"));
    let cx = Context::syscalls();
    let write = block::file::FileOptions {
        write: true,
        direct: false,
    };
    let file = block::file::ImageFile::open(&path, write).expect("the file");
    let view = file.view(&cx).expect("a view");
    let mut options = CreateOptions::new(CLUSTERS * CLUSTER);
    if kind != Kind::Allocate {
        options.preallocation = Preallocation::Metadata;
    }
    let created = cx.block_on(create(&view, &options)).expect("the ring turns");
    created.expect("an image");
    let disk = QcowDisk::open(&path, &OpenOptions::default()).expect("the image opens");
    let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
    let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
    let ask = |op, offset| {
        let (request, answer) = Request::local(op, offset, 512, AlignedBuf::zeroed(512).into());
        queue.submit(request);
        let answer = cx.block_on(answer).expect("the ring turns");
        answer.result.expect("an answer");
    };
    for offset in (0..CLUSTERS * CLUSTER).step_by(512 * CLUSTER as usize) {
        ask(Op::Read, offset);
    }
    // The counts of the first clusters are in the file; all others are zero, as the null ring reads them.
    ask(Op::Write { fua: false }, 0);
    drop(queue);
    (folder, disk)
}

/// The begin of a measurement: all queues wait for it.
struct Begin {
    waiting: AtomicU64,
    barrier: Barrier,
}

/// Runs this queue's part of `requests`, and returns when all have been answered.
fn work(disk: &Arc<QcowDisk>, kind: Kind, queue: u64, queues: u64, requests: u64, begin: &Begin) {
    let cx = Context::new(RingKind::Null, DEPTH as u32).expect("a ring");
    let handle = Arc::clone(disk).open_queue(&cx).expect("a queue");
    let sink = CompletionSink::new();
    let mut buffers: Vec<Buffer> = (0..DEPTH).map(|_| AlignedBuf::zeroed(4096).into()).collect();
    let mut done = Vec::with_capacity(DEPTH);
    let op = match kind {
        Kind::Read => Op::Read,
        Kind::Overwrite | Kind::Allocate => Op::Write { fua: false },
    };
    // Each queue has clusters of its own, in no simple order.
    let own = CLUSTERS / queues;
    let mut at = 0;
    begin.waiting.fetch_add(1, Ordering::SeqCst);
    begin.barrier.wait();
    let mut left = requests / queues;
    while left > 0 {
        let batch = left.min(DEPTH as u64) as usize;
        left -= batch as u64;
        for buffer in buffers.drain(..batch) {
            at = (at + 0x9E37) % own;
            let offset = (queue * own + at) * CLUSTER;
            handle.submit(Request::new(op, offset, 4096, buffer, &sink, 0));
        }
        while done.len() < batch {
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            cx.run_ready();
            sink.drain_into(&mut done);
        }
        for answer in done.drain(..) {
            black_box(answer.result).expect("an answer");
            buffers.push(answer.buffer);
        }
    }
}

fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Returns the CPU time and the time of `requests` requests on `queues` queues, without the start of the threads.
fn measure(disk: &Arc<QcowDisk>, kind: Kind, queues: u64, requests: u64) -> (Duration, Duration) {
    let begin = &Begin {
        waiting: AtomicU64::new(0),
        barrier: Barrier::new(queues as usize + 1),
    };
    let mut began = (Duration::ZERO, Instant::now());
    std::thread::scope(|scope| {
        for queue in 0..queues {
            scope.spawn(move || work(disk, kind, queue, queues, requests, begin));
        }
        while begin.waiting.load(Ordering::SeqCst) < queues {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The queues sleep until this thread has come, too.
        began = (cpu_time(), Instant::now());
        begin.barrier.wait();
    });
    (cpu_time() - began.0, began.1.elapsed())
}

/// Runs one kind on one number of queues, as the variable says.
fn counted(what: &str) {
    let mut words = what.split_ascii_whitespace();
    let name = words.next().unwrap_or_default();
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == name);
    let kind = kind.expect("QUEUES_COUNTED=KIND QUEUES REQUESTS");
    let mut number = || words.next().and_then(|word| word.parse().ok());
    let (queues, requests) = (number().expect("QUEUES"), number().expect("REQUESTS"));
    let (_folder, disk) = disk(kind);
    measure(&disk, kind, queues, requests);
}

fn queues(criterion: &mut Criterion) {
    if let Ok(what) = std::env::var("QUEUES_COUNTED") {
        return counted(&what);
    }
    for kind in Kind::ALL {
        for queues in QUEUES {
            // The least of a few: whatever else runs on the machine only adds.
            let runs = (0..5).map(|_| {
                let (_folder, disk) = disk(kind);
                measure(&disk, kind, queues, kind.requests())
            });
            let (cpu, _) = runs.min().unwrap_or_default();
            let cpu = cpu.as_nanos() as f64 / kind.requests() as f64;
            let name = format!("{}_{queues}_queues", kind.name());
            println!("bench_result {name} {cpu:.1} ns");
        }
    }
    let (_folder, disk) = disk(Kind::Read);
    criterion.bench_function("cached read, a batch of 32 on one queue", |bencher| {
        bencher.iter_custom(|rounds| measure(&disk, Kind::Read, 1, rounds * DEPTH as u64).0);
    });
}

criterion_group!(benches, queues);
criterion_main!(benches);
