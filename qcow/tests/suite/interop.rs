//! Interop both ways: what QEMU writes our engine reads, what our engine writes QEMU reads, and after
//! every writing `qemu-img check` finds neither an error nor a leak.
//!
//! The matrix of cluster size, refcount width, version, backing and compression is covered pairwise:
//! every two values that can meet in one image do meet in one of the tests' images.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::{Folder, Lane, assert_same, close, create, open};
use block::Disk;
use block::ring::RingKind;
use qcow::format::Version;
use qcow::image::{CreateOptions, Preallocation};
use qcow::{OpenOptions, QcowDisk};

/// The guest's disk: more than one large cluster, and no whole number of any but the smallest.
const DISK: usize = (4 << 20) + 3 * 512;

#[derive(Clone, Copy, Debug)]
struct Shape {
    cluster: usize,
    /// Extended L2 entries.
    extended: bool,
    refcount_bits: u32,
    v2: bool,
    /// Format and length of the backing file.
    backing: Option<(&'static str, usize)>,
    compression: Option<&'static str>,
}

const CLUSTERS: [usize; 4] = [512, 4096, 65536, 2 << 20];
/// Cluster sizes, and those that have subclusters.
const KINDS: [(usize, bool); 7] = [
    (512, false),
    (4096, false),
    (65536, false),
    (2 << 20, false),
    (16384, true),
    (65536, true),
    (2 << 20, true),
];
const WIDTHS: [u32; 5] = [1, 2, 8, 16, 64];
const BACKINGS: [Option<(&str, usize)>; 5] = [
    None,
    Some(("raw", DISK / 2 + 5 * 512 - DISK / 2 % 512)),
    Some(("raw", DISK + (1 << 20))),
    Some(("qcow2", DISK / 3 - DISK / 3 % 512)),
    Some(("qcow2", DISK + 65536)),
];
const COMPRESSIONS: [Option<&str>; 3] = [None, Some("zlib"), Some("zstd")];

/// Every image the format allows, as indices into the lists above.
fn every_shape() -> Vec<[usize; 5]> {
    let mut all = vec![[0; 5]];
    for (field, values) in [KINDS.len(), WIDTHS.len(), 2, BACKINGS.len(), COMPRESSIONS.len()]
        .into_iter()
        .enumerate()
    {
        let more = |of: [usize; 5]| {
            (0..values).map(move |value| {
                let mut next = of;
                next[field] = value;
                next
            })
        };
        all = all.into_iter().flat_map(more).collect();
    }
    // Version 2 has 16-bit refcounts and deflate only, and no subclusters.
    all.retain(|&[kind, width, version, _, compression]| {
        let is_old = WIDTHS[width] == 16 && COMPRESSIONS[compression] != Some("zstd") && !KINDS[kind].1;
        version == 0 || is_old
    });
    all
}

fn pairs(of: &[usize; 5]) -> impl Iterator<Item = (usize, usize, usize, usize)> + '_ {
    (0..5).flat_map(move |a| (a + 1..5).map(move |b| (a, of[a], b, of[b])))
}

/// So few images that each pair of values that can meet does.
fn shapes() -> Vec<Shape> {
    let all = every_shape();
    let mut missing: BTreeSet<_> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let new = |of: &[usize; 5]| pairs(of).filter(|pair| missing.contains(pair)).count();
        let best = all
            .iter()
            .max_by_key(|of| new(of))
            .expect("some image is allowed");
        pairs(best).for_each(|pair| {
            missing.remove(&pair);
        });
        let [kind, width, version, backing, compression] = *best;
        let (cluster, extended) = KINDS[kind];
        chosen.push(Shape {
            cluster,
            extended,
            refcount_bits: WIDTHS[width],
            v2: version == 1,
            backing: BACKINGS[backing],
            compression: COMPRESSIONS[compression],
        });
    }
    chosen
}

/// Bytes that compress, and of which no two sectors are alike.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| ((at / 512 * 31 + seed * 7) as u8) ^ ((at / (512 << 8)) as u8))
        .collect()
}

/// An image under test, what the guest should see in it, and how both are told apart in a failure.
struct World {
    folder: Folder,
    shape: Shape,
    model: Vec<u8>,
}

impl World {
    fn new(shape: Shape) -> Self {
        let folder = Folder::new();
        let mut model = vec![0; DISK];
        let mut options = format!(
            "cluster_size={},compat={}",
            shape.cluster,
            if shape.v2 { "0.10" } else { "1.1" }
        );
        if !shape.v2 {
            options += &format!(",refcount_bits={}", shape.refcount_bits);
            if shape.extended {
                options += ",extended_l2=on";
            }
            if let Some(kind) = shape.compression {
                options += &format!(",compression_type={kind}");
            }
        }
        let size = DISK.to_string();
        let mut args = vec!["create", "-f", "qcow2", "-o", &options];
        if let Some((format, len)) = shape.backing {
            let bytes = pattern(99, len);
            std::fs::write(folder.path("base.raw"), &bytes).expect("a base");
            let common = len.min(DISK);
            model[..common].copy_from_slice(&bytes[..common]);
            let mut name = "base.raw";
            if format == "qcow2" {
                name = "base.qcow2";
                folder.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "base.raw", name]);
            }
            args.extend(["-b", name, "-F", format]);
        }
        args.extend(["disk.qcow2", &size]);
        folder.qemu_img(&args);
        Self { folder, shape, model }
    }

    fn fill(&mut self, offset: usize, len: usize, byte: u8) {
        self.model[offset..offset + len].fill(byte);
    }

    /// QEMU writes: patterns over cluster borders, zeros, discards; into a new image, which it cannot
    /// do over data, also compressed clusters.
    fn qemu_writes(&mut self, byte: u8, new: bool) {
        let size = self.shape.cluster.max(4096);
        let mut commands = Vec::new();
        let mut write = |world: &mut Self, flags: &str, offset: usize, len: usize, byte: u8| {
            commands.push(format!("write {flags} {offset} {len}"));
            world.fill(offset, len, byte);
        };
        if new && self.shape.compression.is_some() {
            // Whole clusters, but for the one that the disk's end cuts short.
            let first = DISK / 4 / size * size;
            let count = (128 * 1024 / size).max(1);
            for index in 0..count {
                let (at, byte) = (first + index * size, byte.wrapping_add(index as u8));
                write(self, &format!("-c -P {byte}"), at, size, byte);
            }
            let last = (DISK - 1) / size * size;
            write(
                self,
                &format!("-c -P {}", byte ^ 0x55),
                last,
                DISK - last,
                byte ^ 0x55,
            );
        }
        let wide = (3 * size).min(DISK / 5);
        write(self, &format!("-P {byte}"), 512 * 3, 512, byte);
        write(self, &format!("-P {}", byte + 1), size - 512, 1024, byte + 1);
        write(self, &format!("-P {}", byte + 2), DISK / 2 - 1024, wide, byte + 2);
        write(self, "-z", DISK / 2 + 512, 2048, 0);
        write(self, "-z -u", DISK / 8 / size * size, size.min(DISK / 4), 0);
        if !(self.shape.v2 && self.shape.backing.is_some()) {
            let first = (DISK / 2).next_multiple_of(size);
            let len = size.min(DISK - first);
            commands.push(format!("discard {first} {len}"));
            self.fill(first, len, 0);
        }
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        self.folder.qemu_io("qcow2", "disk.qcow2", &commands);
    }

    fn options(&self) -> OpenOptions {
        OpenOptions {
            backing_files: self.shape.backing.is_some(),
            ..OpenOptions::default()
        }
    }

    fn opened(&self, options: &OpenOptions, work: impl FnOnce(&Arc<QcowDisk>, &Lane)) {
        let disk = open(&self.folder.path("disk.qcow2"), options);
        let lane = Lane::new(&disk, RingKind::IoUring);
        work(&disk, &lane);
        lane.settle();
        drop(lane);
        close(disk);
    }

    /// Our engine reads the disk whole, and in pieces that respect no border.
    #[track_caller]
    fn we_read(&self, when: &str) {
        let what = format!("we read {when}, {:?}", self.shape);
        let options = OpenOptions {
            read_only: true,
            ..self.options()
        };
        self.opened(&options, |disk, lane| {
            assert_eq!(disk.info().size_bytes, DISK as u64);
            assert_same(&lane.read(0, DISK as u64), &self.model, &what);
            let mut at = 0;
            for len in [512, 1536, 65536 - 512, 4096, 200 * 512, 2 << 20]
                .into_iter()
                .cycle()
            {
                let len = len.min(DISK - at);
                assert_same(
                    &lane.read(at as u64, len as u64),
                    &self.model[at..at + len],
                    &what,
                );
                at += len;
                if at == DISK {
                    break;
                }
            }
        });
    }

    /// QEMU reads the disk and finds nothing to complain about.
    #[track_caller]
    fn qemu_reads(&self, when: &str) {
        let what = format!("QEMU reads {when}, {:?}", self.shape);
        self.folder.assert_flawless("disk.qcow2", false);
        assert_same(&self.folder.qemu_reads("disk.qcow2"), &self.model, &what);
        std::fs::write(self.folder.path("model.raw"), &self.model).expect("the model");
        let images = ["model.raw", "disk.qcow2"];
        self.folder
            .qemu_img(&["compare", "-f", "raw", "-F", "qcow2", images[0], images[1]]);
    }

    /// Our engine writes over everything QEMU did, in every way it can.
    fn we_write(&mut self, seed: usize) {
        let (size, shape) = (self.shape.cluster, self.shape);
        let mut model = std::mem::take(&mut self.model);
        self.opened(&self.options(), |_, lane| {
            let mut write = |offset: usize, len: usize| {
                let offset = offset / 512 * 512;
                let len = len.min(DISK - offset);
                let bytes = pattern(seed + offset, len);
                lane.write(offset as u64, &bytes);
                model[offset..offset + len].copy_from_slice(&bytes);
            };
            // Part of a cluster, across a border, whole clusters, into what was compressed, the last bytes.
            write(1024, 512);
            write(size.max(1024) - 512, 1024);
            write(DISK / 4 / size * size, size);
            write(DISK / 4 + 4 * size.min(65536), 5 * 1024);
            write(DISK / 2, 3 * size);
            write(DISK - 512, 512);
            write(DISK / 3, 96 << 10);
            for (offset, len, unmap) in [
                (512, 512, false),
                (DISK / 5 / 512 * 512, 70 << 10, false),
                (DISK / 2 + 512, 3 * 4096, true),
                (DISK / 8 * 5 / size * size, 2 * size, true),
                (DISK / 4 / size * size, size, false),
                (DISK - 1024, 1024, true),
            ] {
                let (offset, len) = (offset / 512 * 512, len.min(DISK - offset));
                lane.write_zeroes(offset as u64, len as u64, unmap);
                model[offset..offset + len].fill(0);
            }
            lane.flush();
            // A discard clears the whole clusters in it, unless that uncovered the backing file.
            let (from, to) = (
                DISK / 3 / 512 * 512 + 512,
                (DISK / 3 * 2).next_multiple_of(size).min(DISK),
            );
            let to = to / 512 * 512;
            lane.discard(from as u64, (to - from) as u64);
            if !(shape.v2 && shape.backing.is_some()) {
                let end = if to == DISK { DISK } else { to / size * size };
                let first = from.next_multiple_of(size).min(end);
                model[first..end].fill(0);
            }
            // Freed clusters are used again.
            lane.flush();
            lane.settle();
            let bytes = pattern(seed + 1, 128 << 10);
            lane.write((DISK / 2 / 512 * 512) as u64, &bytes);
            model[DISK / 2 / 512 * 512..][..bytes.len()].copy_from_slice(&bytes);
            assert_same(
                &lane.read(0, DISK as u64),
                &model,
                &format!("just written, {shape:?}"),
            );
            lane.flush();
        });
        self.model = model;
    }
}

/// Method: QEMU writes, we read; we write over it, QEMU reads and checks; QEMU writes over that, we read.
#[test]
fn qemu_and_engine_read_each_others_writes() {
    let shapes = shapes();
    assert!((20..60).contains(&shapes.len()), "{} images", shapes.len());
    for shape in shapes {
        let mut world = World::new(shape);
        world.qemu_writes(0x41, true);
        assert_same(
            &world.folder.qemu_reads("disk.qcow2"),
            &world.model,
            &format!("the test itself, {shape:?}"),
        );
        world.we_read("after QEMU");
        world.we_write(5);
        world.qemu_reads("after us");
        world.qemu_writes(0x81, false);
        world.we_read("after QEMU again");
        world.folder.assert_flawless("disk.qcow2", false);
    }
}

/// Method: `qemu-img convert -c` packs many small compressed clusters into shared host clusters and lets
/// them run over host cluster borders; read all, overwrite some of each neighbourhood, check.
#[test]
fn images_compressed_by_qemu_are_read_and_overwritten() {
    for (kind, cluster) in [
        ("zlib", 512),
        ("zlib", 4096),
        ("zlib", 2 << 20),
        ("zstd", 512),
        ("zstd", 65536),
        ("zstd", 2 << 20),
    ] {
        let folder = Folder::new();
        // Half of it noise: clusters that do not compress stay as they are.
        let mut random = ringdisk_gen::Random::new(7);
        let mut model = pattern(3, DISK);
        for sector in model.chunks_mut(512).skip(DISK / 1024) {
            let noise = (random.draw() % 512) as usize;
            sector[noise..].fill_with(|| random.draw() as u8);
        }
        std::fs::write(folder.path("plain.raw"), &model).expect("a plain image");
        let options = format!("cluster_size={cluster},compression_type={kind}");
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
        let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::IoUring);
        let what = format!("{kind} {cluster}");
        assert_same(&lane.read(0, DISK as u64), &model, &what);
        for step in 0..40 {
            let at = (step * 97_000) % (DISK - 4096) / 512 * 512;
            let bytes = pattern(step, 1536);
            lane.write(at as u64, &bytes);
            model[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        lane.flush();
        assert_same(&lane.read(0, DISK as u64), &model, &what);
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert_same(&folder.qemu_reads("disk.qcow2"), &model, &what);
    }
}

/// Method: our `create` makes the image; QEMU reads zeros and writes, we read and write, QEMU reads.
#[test]
fn created_images_serve_both_in_every_preallocation() {
    let modes = [
        Preallocation::Off,
        Preallocation::Metadata,
        Preallocation::Falloc,
        Preallocation::Full,
    ];
    let mut shapes: Vec<(Preallocation, u64, bool, u32, Version)> = Vec::new();
    for (index, &mode) in modes.iter().enumerate() {
        for (other, &cluster) in CLUSTERS.iter().enumerate() {
            let width = WIDTHS[(index + other) % WIDTHS.len()];
            shapes.push((mode, cluster as u64, false, width, Version::V3));
        }
        shapes.push((mode, 65536, false, 16, Version::V2));
        shapes.push((mode, 16384 << index, true, 16, Version::V3));
    }
    for (preallocation, cluster_size, extended_l2, refcount_bits, version) in shapes {
        let folder = Folder::new();
        let what = format!("{preallocation:?} {cluster_size} {extended_l2} {refcount_bits} {version:?}");
        let path = folder.path("disk.qcow2");
        let options = CreateOptions {
            cluster_size,
            extended_l2,
            refcount_bits,
            version,
            preallocation,
            ..CreateOptions::new(DISK as u64)
        };
        create(&path, &options);
        folder.assert_flawless("disk.qcow2", false);
        folder.qemu_io(
            "qcow2",
            "disk.qcow2",
            &["read -P 0 0 4M", "write -P 7 1000k 300k", "discard 2M 64k"],
        );
        let mut model = vec![0; DISK];
        model[1000 << 10..1300 << 10].fill(7);
        let disk = open(&path, &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::IoUring);
        assert_same(&lane.read(0, DISK as u64), &model, &what);
        let bytes = pattern(1, 90 << 10);
        lane.write(1250 << 10, &bytes);
        model[1250 << 10..1340 << 10].copy_from_slice(&bytes);
        lane.write(DISK as u64 - 512, &bytes[..512]);
        model[DISK - 512..].copy_from_slice(&bytes[..512]);
        lane.write_zeroes(1100 << 10, 30 << 10, false);
        model[1100 << 10..1130 << 10].fill(0);
        lane.flush();
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert_same(&folder.qemu_reads("disk.qcow2"), &model, &what);
    }
}

/// Method: three images deep, each link of another size and cluster size, written only on top.
#[test]
fn overlay_reads_through_chain_and_never_writes_it() {
    let folder = Folder::new();
    let below = pattern(11, 3 << 20);
    std::fs::write(folder.path("base.raw"), &below).expect("a base");
    let name = ["-b", "base.raw", "-F", "raw", "middle.qcow2", "2M"];
    folder.qemu_img(&[&["create", "-f", "qcow2", "-o", "cluster_size=4096"], &name[..]].concat());
    folder.qemu_io(
        "qcow2",
        "middle.qcow2",
        &["write -P 3 100k 90k", "write -z 1M 64k"],
    );
    let mut model = vec![0; DISK];
    model[..2 << 20].copy_from_slice(&below[..2 << 20]);
    model[100 << 10..190 << 10].fill(3);
    model[1 << 20..(1 << 20) + (64 << 10)].fill(0);
    let path = folder.path("disk.qcow2");
    create(
        &path,
        &CreateOptions {
            backing_file: Some("middle.qcow2".to_owned()),
            backing_format: Some("qcow2".to_owned()),
            ..CreateOptions::new(DISK as u64)
        },
    );
    let files = ["base.raw", "middle.qcow2"];
    let before = files.map(|name| std::fs::read(folder.path(name)).expect("an image"));
    let options = OpenOptions {
        backing_files: true,
        ..OpenOptions::default()
    };
    let disk = open(&path, &options);
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert_same(&lane.read(0, DISK as u64), &model, "through the chain");
    for at in [50 << 10, 150 << 10, (1 << 20) + 512, (2 << 20) - 512, 3 << 20] {
        let bytes = pattern(at, 1024);
        lane.write(at as u64, &bytes);
        model[at..at + 1024].copy_from_slice(&bytes);
    }
    lane.discard(256 << 10, 128 << 10);
    model[256 << 10..384 << 10].fill(0);
    lane.flush();
    assert_same(&lane.read(0, DISK as u64), &model, "after writing");
    lane.settle();
    drop(lane);
    close(disk);
    folder.assert_flawless("disk.qcow2", false);
    assert_same(&folder.qemu_reads("disk.qcow2"), &model, "QEMU");
    let after = files.map(|name| std::fs::read(folder.path(name)).expect("an image"));
    assert!(before == after, "an image below was written");
}
