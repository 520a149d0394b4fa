//! Instructions and time of a cached read of 4 KiB through chains of images: one below the disk, and 32.
//!
//! The clusters are spread over the images evenly. Reads are plain system calls, so that valgrind's count has all that this
//! program does and nothing of the kernel. Besides criterion's report it prints `bench_result NAME VALUE UNIT` lines for
//! `make bench`.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use block::file::{FileOptions, ImageFile};
use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, Op, Request};
use criterion::{Criterion, criterion_group};
use qcow::image::{CreateOptions, create};
use qcow::{OpenOptions, QcowDisk};

const CLUSTER: u64 = 64 << 10;
/// Two spans of the index.
const DISK: u64 = 64 << 20;
/// The numbers of images below the disk.
const CHAINS: [u64; 2] = [1, 32];
/// The environment variable that has only reads run, for valgrind to count: the folder, the images below, the reads.
const COUNTED: &str = "CHAIN_READS";

fn open(path: &Path, read_only: bool, indexed: bool) -> Arc<QcowDisk> {
    let mut options = OpenOptions {
        read_only,
        backing_files: true,
        ..OpenOptions::default()
    };
    if !indexed {
        options.indexes = None;
    }
    QcowDisk::open(path, &options).expect("the image opens")
}

/// Makes `below` images, each with its share of the clusters, and an empty one above.
fn make(folder: &Path, below: u64) {
    let cx = Context::syscalls();
    for number in 0..=below {
        let path = folder.join(number.to_string());
        std::fs::write(&path, b"").expect("a file");
        let write = FileOptions {
            write: true,
            direct: false,
        };
        let view = ImageFile::open(&path, write)
            .expect("the file")
            .view(&cx)
            .expect("a view");
        let mut options = CreateOptions::new(DISK);
        if number > 0 {
            options.backing_file = Some((number - 1).to_string());
            options.backing_format = Some("qcow2".to_owned());
        }
        cx.block_on(create(&view, &options))
            .expect("the ring turns")
            .expect("an image");
        drop(view);
        if number == below {
            return;
        }
        let disk = open(&path, false, false);
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        for cluster in (number..DISK / CLUSTER).step_by(below as usize) {
            let bytes = AlignedBuf::from_slice(&[number as u8 + 1; CLUSTER as usize]).into();
            let write = block::ask(
                &*queue,
                Op::Write { fua: false },
                cluster * CLUSTER,
                CLUSTER,
                bytes,
            );
            cx.block_on(write).expect("the ring turns").expect("a write");
        }
        drop(queue);
        cx.block_on(disk.close(&cx))
            .expect("the ring turns")
            .expect("a clean close");
    }
}

/// A queue whose tables are cached, and whose index is built.
struct Reader {
    cx: Context,
    queue: Box<dyn DiskQueue>,
    buffer: Buffer,
    at: u64,
}

impl Reader {
    fn new(folder: &Path, below: u64, indexed: bool) -> Self {
        let cx = Context::syscalls();
        let queue = open(&folder.join(below.to_string()), true, indexed)
            .open_queue(&cx)
            .expect("a queue");
        let buffer = AlignedBuf::zeroed(4096).into();
        let mut reader = Self {
            cx,
            queue,
            buffer,
            at: 0,
        };
        (0..DISK / CLUSTER).for_each(|_| reader.read());
        reader
    }

    fn read(&mut self) {
        // A step that visits clusters in no simple order.
        self.at = (self.at + 0x9E_3779_B000) % DISK;
        let buffer = std::mem::take(&mut self.buffer);
        let (request, answer) = Request::local(Op::Read, self.at, 4096, buffer);
        self.queue.submit(request);
        let done = self.cx.block_on(answer).expect("the ring turns");
        done.result.expect("a read");
        self.buffer = done.buffer;
    }
}

/// The instructions of one read: those of valgrind's count that more reads add. `None` if there is no valgrind.
fn instructions(folder: &Path, below: u64) -> Option<f64> {
    let count = |reads: u32| -> Option<f64> {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
        command.arg(std::env::current_exe().ok()?);
        command.env(COUNTED, format!("{below} {reads} {}", folder.display()));
        let output = command.output().ok()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let collected = said.lines().find_map(|line| line.split("Collected : ").nth(1));
        collected?.trim().parse().ok()
    };
    Some((count(4000)? - count(2000)?) / 2000.0)
}

fn reads(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut group = criterion.benchmark_group("chain");
    for below in CHAINS {
        let folder = folder.path().join(format!("of-{below}"));
        std::fs::create_dir(&folder).expect("a folder");
        make(&folder, below);
        for (name, indexed) in [("read", true), ("read without an index", false)] {
            let mut reader = Reader::new(&folder, below, indexed);
            group.bench_function(format!("{name}, {below} below"), |bencher| {
                bencher.iter(|| reader.read())
            });
            let mut timed = |reads: u32| {
                let begin = Instant::now();
                (0..reads).for_each(|_| reader.read());
                begin.elapsed()
            };
            let best = (0..9).map(|_| timed(20_000)).min().unwrap_or_default();
            let name = name.replace(' ', "_");
            println!(
                "bench_result {name}_{below}_below {:.1} ns",
                best.as_nanos() as f64 / 20_000.0
            );
        }
        match instructions(&folder, below) {
            Some(count) => println!("bench_result read_{below}_below_instructions {count:.0} instructions"),
            None => println!("{below} below: instructions are not counted, because valgrind cannot be run"),
        }
    }
    group.finish();
}

criterion_group!(benches, reads);

fn main() {
    if let Ok(counted) = std::env::var(COUNTED) {
        let mut parts = counted.splitn(3, ' ');
        let mut number = || parts.next().and_then(|part| part.parse().ok()).expect("a number");
        let (below, reads): (u64, u64) = (number(), number());
        let folder = parts.next().expect("a folder");
        let mut reader = Reader::new(Path::new(folder), below, true);
        (0..reads).for_each(|_| reader.read());
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
