//! Random operations against a plain array of bytes, several queues at once, reopened and checked.
//!
//! Requests that are in flight together never share a sector but often share a cluster, which is where
//! an engine goes wrong. Each failure names its seed; `MODEL_SEED=n` runs that seed alone, and
//! `MODEL_SEEDS=n` so many.

#![expect(clippy::print_stderr, reason = "a hang must name its seed too")]

mod common;

use block::ring::RingKind;
use block::{Buffer, Done, Op};
use common::{Folder, LUKS_OPTIONS, Lane, Placed, close, open, qemu_secret, secret};
use qcow::OpenOptions;
use ringdisk_gen::Random;
use ringdisk_gen::array::{Array, Ask};

const DISK: u64 = 3 << 20;
/// The most requests in flight.
const TAGS: u64 = 12;

/// The properties of the image under test.
#[derive(Clone, Debug)]
struct Shape {
    cluster_bits: u64,
    refcount_bits: u64,
    v2: bool,
    backing: Option<&'static str>,
    backing_bytes: u64,
    compressed: Option<&'static str>,
    snapshot: bool,
    sparse: bool,
    no_unref: bool,
    direct: bool,
    ring: RingKind,
    lanes: u64,
    /// Extended L2 entries: clusters have subclusters.
    extended: bool,
    /// Some requests have registered pages, and ops of theirs end short.
    registered: bool,
    /// The guest's data is encrypted.
    encrypted: bool,
}

impl Shape {
    fn draw(random: &mut Random) -> Self {
        let v2 = random.one_in(5);
        Self {
            cluster_bits: random.pick(&[9, 10, 12, 14, 16, 16, 16, 18, 21]),
            refcount_bits: if v2 {
                16
            } else {
                random.pick(&[1, 2, 4, 8, 16, 16, 32, 64])
            },
            v2,
            backing: random.pick(&[None, Some("raw"), Some("qcow2")]),
            backing_bytes: random.pick(&[DISK, DISK / 2 + 512 * 7, DISK + (1 << 20), 512]),
            compressed: random.pick(&[None, None, Some("zlib"), if v2 { None } else { Some("zstd") }]),
            snapshot: random.one_in(3),
            sparse: !random.one_in(4),
            no_unref: random.one_in(4),
            direct: random.one_in(3),
            ring: random.pick(&[RingKind::IoUring, RingKind::IoUring, RingKind::Syscalls]),
            lanes: 1 + random.below(4),
            extended: false,
            registered: false,
            encrypted: false,
        }
    }

    /// Snapshots raise refcounts to 2, compressed clusters share host clusters.
    fn sane(mut self) -> Self {
        if self.refcount_bits < 16 && self.compressed.is_some() {
            self.compressed = None;
        }
        if self.refcount_bits == 1 {
            self.snapshot = false;
        }
        if self.compressed.is_some() {
            // `qemu-img convert -c` makes an image without a backing file.
            self.backing = None;
        }
        self
    }
}

fn pattern(random: &mut Random, bytes: u64) -> Vec<u8> {
    // Compressible, but no two sectors alike.
    let base = random.draw();
    (0..bytes)
        .map(|i| ((base >> (8 * (i / 512 % 8))) as u8).wrapping_add((i / 512) as u8))
        .collect()
}

/// Makes the image and returns what the guest should see in it.
fn make(folder: &Folder, shape: &Shape, random: &mut Random) -> Vec<u8> {
    let mut model = vec![0u8; DISK as usize];
    let options = format!(
        "cluster_size={},compat={}{}{}{}{}{}",
        1 << shape.cluster_bits,
        if shape.v2 { "0.10" } else { "1.1" },
        if shape.v2 {
            String::new()
        } else {
            format!(",refcount_bits={}", shape.refcount_bits)
        },
        shape
            .compressed
            .filter(|_| !shape.v2)
            .map_or(String::new(), |kind| format!(",compression_type={kind}")),
        if shape.extended { ",extended_l2=on" } else { "" },
        if shape.encrypted { "," } else { "" },
        if shape.encrypted { LUKS_OPTIONS } else { "" },
    );
    let size = DISK.to_string();
    if let Some(format) = shape.backing {
        let bytes = pattern(random, shape.backing_bytes);
        std::fs::write(folder.path("base.raw"), &bytes).expect("a base image");
        let base = if format == "raw" { "base.raw" } else { "base.qcow2" };
        if format == "qcow2" {
            folder.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "base.raw", "base.qcow2"]);
        }
        let common = DISK.min(shape.backing_bytes) as usize;
        model[..common].copy_from_slice(&bytes[..common]);
        folder.qemu_img(&[
            "create",
            "--object",
            &qemu_secret(),
            "-f",
            "qcow2",
            "-o",
            &options,
            "-b",
            base,
            "-F",
            format,
            "disk.qcow2",
            &size,
        ]);
    } else if shape.compressed.is_some() {
        model = pattern(random, DISK);
        std::fs::write(folder.path("plain.raw"), &model).expect("a plain image");
        folder.qemu_img(&[
            "convert",
            "-c",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "-o",
            &options,
            "plain.raw",
            "disk.qcow2",
        ]);
    } else {
        let secret = qemu_secret();
        let args = ["create", "--object", &secret, "-f", "qcow2", "-o", &options];
        folder.qemu_img(&[&args[..], &["disk.qcow2", &size]].concat());
    }
    // Some clusters written by QEMU, so that there is something to share with a snapshot.
    let first = pattern(random, 200 << 10);
    std::fs::write(folder.path("piece"), &first).expect("a piece");
    let command = format!("write -s piece 300k {}", first.len());
    folder.qemu_io("qcow2", "disk.qcow2", &[&command]);
    model[300 << 10..(300 << 10) + first.len()].copy_from_slice(&first);
    if shape.snapshot {
        folder.qemu_img(&["snapshot", "-c", "before", "disk.qcow2"]);
    }
    model
}

struct Run<'a> {
    lanes: Vec<Lane>,
    array: &'a mut Array,
    /// By tag: the lane, and where the request's bytes are.
    placed: Vec<Option<(usize, Placed)>>,
    seed: u64,
    shape: &'a Shape,
}

impl Run<'_> {
    fn step(&mut self, random: &mut Random, tag: usize) {
        let lane = random.below(self.lanes.len() as u64) as usize;
        let sectors = DISK / 512;
        let most = random.pick(&[1, 8, 8, 128, 700]);
        let first = random.below(sectors);
        // Stay in a small part now and then, to meet others.
        let first = if random.one_in(2) { first % 512 } else { first };
        let count = 1 + random.below(most).min(sectors - first - 1);
        let (first, end) = (first * 512, (first + count) * 512);
        let len = end - first;
        let (op, bytes, ask) = match random.below(20) {
            0..=6 => (Op::Read, vec![0xCC; len as usize], Ask::Read),
            7..=14 => {
                let fill = pattern(random, len);
                let op = Op::Write {
                    fua: random.one_in(10),
                };
                (op, fill.clone(), Ask::Write(fill))
            }
            15..=16 => {
                let op = Op::WriteZeroes {
                    unmap: random.one_in(2),
                    fua: random.one_in(10),
                };
                (op, Vec::new(), Ask::Zeroes)
            }
            17..=18 => (Op::Discard, Vec::new(), Ask::Discard),
            _ => {
                assert!(self.array.begin(tag, 0..0, Ask::Flush));
                return self.lanes[lane].submit(Op::Flush, 0, 0, Buffer::default(), tag as u64);
            }
        };
        if !self.array.begin(tag, first..end, ask) {
            return;
        }
        let mut buffer = Buffer::default();
        if !bytes.is_empty() {
            // By the request's own numbers, so that runs without such pages are what they were.
            let skip = [0, 512, 4096, 100, 4, 0, 1536, 0][(first / 512 + count) as usize % 8];
            let placed;
            (buffer, placed) = self.lanes[lane].place(skip, &bytes);
            self.placed[tag] = Some((lane, placed));
        }
        self.lanes[lane].submit(op, first, len, buffer, tag as u64);
    }

    fn take(&mut self, done: Done) {
        let tag = done.tag as usize;
        let (seed, shape) = (self.seed, self.shape);
        let range = self.array.range(tag);
        assert_eq!(done.result, Ok(()), "seed {seed}: {range:?} {shape:?}");
        let read = self.array.is_read(tag);
        let bytes = match self.placed[tag].take() {
            Some((lane, placed)) => self.lanes[lane].placed(&placed, done.buffer, read),
            None => Vec::new(),
        };
        if let Err(difference) = self.array.end(tag, &bytes) {
            panic!("seed {seed}: {difference} {shape:?}");
        }
    }
}

fn run(seed: u64) {
    eprintln!("seed {seed}");
    let mut random = Random::new(seed);
    let mut shape = Shape::draw(&mut random).sane();
    // Not drawn, so that the others stay as they were.
    shape.registered = seed % 2 == 1;
    shape.extended = seed % 3 == 1 && !shape.v2;
    if shape.extended {
        shape.cluster_bits = shape.cluster_bits.max(14);
    }
    shape.encrypted = seed % 5 == 2 && !shape.v2 && shape.compressed.is_none();
    let folder = Folder::new();
    let contents = make(&folder, &shape, &mut random);
    let mut array = Array::new(contents, 1 << shape.cluster_bits, TAGS as usize);
    // Version 2 has no zero clusters to hide a backing file's with.
    array.discards = shape.sparse && !(shape.v2 && shape.backing.is_some());
    let before = shape.snapshot.then(|| snapshot(&folder));
    let options = OpenOptions {
        direct: shape.direct,
        backing_files: shape.backing.is_some(),
        secret: shape.encrypted.then(secret).flatten(),
        sparse: shape.sparse,
        discard_no_unref: shape.no_unref,
        // So small that slices are evicted all the time.
        l2_cache_bytes: Some(random.pick(&[4096, 64 << 10, 8 << 20])),
        ..OpenOptions::default()
    };
    for _ in 0..2 {
        let disk = open(&folder.path("disk.qcow2"), &options);
        let lanes: Vec<Lane> = (0..shape.lanes)
            .map(|lane| match shape.registered {
                true => Lane::registered(&disk, shape.ring, (lane > 0).then_some(seed + lane)),
                false => Lane::new(&disk, shape.ring),
            })
            .collect();
        let mut run = Run {
            lanes,
            array: &mut array,
            placed: (0..TAGS).map(|_| None).collect(),
            seed,
            shape: &shape,
        };
        let mut done = Vec::new();
        for _ in 0..600 {
            let tag = random.below(TAGS) as usize;
            if !run.array.is_in_flight(tag) {
                run.step(&mut random, tag);
            }
            let lane = random.below(run.lanes.len() as u64) as usize;
            run.lanes[lane].turn(&mut done);
            done.drain(..).for_each(|done| run.take(done));
        }
        while !run.array.is_idle() {
            for lane in &run.lanes {
                lane.turn(&mut done);
            }
            done.drain(..).for_each(|done| run.take(done));
        }
        let all = run.lanes[0].read(0, DISK);
        // After the read, in which a timer may begin to free what was discarded: the close would wait for a task that is leaked.
        while run.lanes.iter().any(|lane| lane.cx.tasks() > 0) {
            run.lanes.iter().for_each(|lane| lane.turn(&mut done));
        }
        assert!(
            all == run.array.bytes(),
            "seed {seed}: the whole disk differs {shape:?}"
        );
        drop(run);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        let qemu = folder.qemu_reads("disk.qcow2");
        assert!(
            qemu == array.bytes(),
            "seed {seed}: QEMU reads something else {shape:?}"
        );
    }
    if let Some(before) = before {
        assert!(
            snapshot(&folder) == before,
            "seed {seed}: the snapshot has changed {shape:?}"
        );
    }
}

fn snapshot(folder: &Folder) -> Vec<u8> {
    folder.qemu_converts(&["-l", "before"], "disk.qcow2", "snapshot.img");
    std::fs::read(folder.path("snapshot.img")).expect("what qemu-img wrote")
}

/// Method: draw an image and a run from each seed; compare every read, the whole disk after, QEMU's reading
/// of the closed image, its check of it, and the snapshot.
#[test]
fn random_operations_on_queues_agree_with_an_array() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|value| value.parse::<u64>().ok())
    };
    if let Some(seed) = number("MODEL_SEED") {
        return run(seed);
    }
    for seed in 0..number("MODEL_SEEDS").unwrap_or(60) {
        run(seed);
    }
}
