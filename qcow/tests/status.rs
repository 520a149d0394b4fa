//! Block status beside `qemu-img map`: the same content, image and place for every sector of random chains.

mod common;

use std::sync::Arc;

use block::ring::RingKind;
use block::status::{Content, STATUS_RANGES_MAX, StatusRange};
use block::{Context, Disk, IoError};
use common::Folder;
use qcow::{OpenOptions, QcowDisk};
use ringdisk_gen::Random;

/// Status of one sector: the image that decides, whether any has it, its content, and where it lies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Sector {
    depth: u64,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    at: Option<u64>,
}

fn qemu_map(folder: &Folder, name: &str) -> Vec<Sector> {
    let json = folder.qemu_img(&["map", "--output=json", "-f", "qcow2", name]);
    let ranges: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let mut sectors = Vec::new();
    for range in ranges.as_array().expect("an array") {
        let number = |key: &str| range[key].as_u64().expect(key);
        let flag = |key: &str| range[key].as_bool().unwrap_or(false);
        assert_eq!(sectors.len() as u64 * 512, number("start"));
        for sector in 0..number("length") / 512 {
            sectors.push(Sector {
                depth: number("depth"),
                present: flag("present"),
                // In an image that looks preallocated QEMU also looks for holes below its data.
                zero: flag("zero") && !flag("data"),
                data: flag("data"),
                compressed: flag("compressed"),
                at: flag("data")
                    .then(|| range["offset"].as_u64())
                    .flatten()
                    .map(|at| at + sector * 512),
            });
        }
    }
    sectors
}

/// The whole disk's status, asked for in pieces of `step` bytes at most.
fn our_ranges(disk: &Arc<QcowDisk>, step: u64) -> Vec<StatusRange> {
    let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
    let queue = Arc::clone(disk).open_queue(&cx).expect("a queue");
    let size = disk.info().size_bytes;
    let (mut here, mut all) = (0, Vec::new());
    while here < size {
        let status = queue.status(here, step.min(size - here));
        let ranges = cx.block_on(status).expect("the ring turns").expect("a status");
        assert!(!ranges.is_empty() && ranges.len() <= STATUS_RANGES_MAX);
        for range in ranges {
            assert_eq!(range.offset, here, "a gap");
            here = range.end();
            all.push(range);
        }
        assert!(here <= size);
    }
    all
}

fn our_map(disk: &Arc<QcowDisk>, step: u64) -> Vec<Sector> {
    let mut sectors = Vec::new();
    for range in our_ranges(disk, step) {
        for sector in 0..range.len / 512 {
            let at = match range.content {
                Content::Data { at } => at.map(|at| at + sector * 512),
                _ => None,
            };
            sectors.push(Sector {
                depth: range.depth.into(),
                present: range.content != Content::Absent,
                zero: !range.may_hold_data(),
                data: range.may_hold_data(),
                compressed: range.content == Content::Compressed,
                at,
            });
        }
    }
    sectors
}

/// A raw image with holes below two QCOW2 images, each larger than the one below; all with random content.
fn chain(folder: &Folder, random: &mut Random, cluster: &str) {
    folder.qemu_img(&["create", "-q", "-f", "raw", "base.raw", "768k"]);
    let below = |format| ["-F", format, "-b"];
    let cluster = format!("cluster_size={cluster}");
    let mut last = ("base.raw", "raw");
    for (name, size) in [("middle.qcow2", "1m"), ("top.qcow2", "1280k")] {
        let mut args = vec!["create", "-q", "-f", "qcow2", "-o", &cluster];
        args.extend(below(last.1));
        args.extend([last.0, name, size]);
        folder.qemu_img(&args);
        last = (name, "qcow2");
    }
    for (name, format, size) in [
        ("base.raw", "raw", 768 << 10),
        ("middle.qcow2", "qcow2", 1 << 20),
        ("top.qcow2", "qcow2", 1280 << 10),
    ] {
        let mut commands = Vec::new();
        if format == "qcow2" {
            // QEMU compresses only into clusters that are not there yet.
            commands.push(format!("write -q -c -P 5 {} 65536", random.below(8) * 65536));
        }
        for _ in 0..12 {
            let at = random.below(size / 4096) * 4096;
            let len = (1 + random.below(12)) * 4096;
            let len = len.min(size - at);
            commands.push(match random.below(if format == "raw" { 2 } else { 5 }) {
                0 | 1 => format!("write -q -P 7 {at} {len}"),
                2 => format!("write -q -z {at} {len}"),
                3 => format!("write -q -z -u {at} {len}"),
                _ => format!("discard -q {at} {len}"),
            });
        }
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        folder.qemu_io(format, name, &commands);
    }
}

#[test]
fn status_agrees_with_qemu_img_map_on_random_chains() {
    for seed in 0..20 {
        let folder = Folder::new();
        let mut random = Random::new(seed);
        let clusters = ["64k", "4k", "512", "64k,extended_l2=on", "16k,extended_l2=on"];
        let cluster = clusters[seed as usize % 5];
        chain(&folder, &mut random, cluster);
        let expected = qemu_map(&folder, "top.qcow2");
        let options = OpenOptions {
            read_only: true,
            backing_files: true,
            ..OpenOptions::default()
        };
        let disk = QcowDisk::open(&folder.path("top.qcow2"), &options).expect("the chain");
        for step in [u64::MAX, 100 << 10] {
            let step = step & !511;
            let found = our_map(&disk, step);
            assert_eq!(found.len(), expected.len());
            for (index, (ours, theirs)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(ours, theirs, "seed {seed}, sector {index}, in steps of {step}");
            }
        }
    }
}

#[test]
fn status_is_bounded_for_a_scattered_mapping() {
    let folder = Folder::new();
    // Every other cluster holds data.
    let raw: Vec<u8> = (0..2 << 20).map(|at| u8::from(at & 512 == 0)).collect();
    std::fs::write(folder.path("a.raw"), raw).expect("a file");
    let scattered = [
        "-S",
        "512",
        "-O",
        "qcow2",
        "-o",
        "cluster_size=512",
        "a.raw",
        "a.qcow2",
    ];
    folder.qemu_img(&[&["convert", "-f", "raw"], &scattered[..]].concat());
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let disk = QcowDisk::open(&folder.path("a.qcow2"), &options).expect("the image");
    assert_eq!(our_ranges(&disk, !511).len(), 4096);
    let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
    let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
    assert_eq!(
        cx.block_on(queue.status(2 << 20, 512)).expect("the ring turns"),
        Err(IoError::OutOfRange)
    );
}

/// Each table of 512 bytes is a lookup of its own, and all of them make one range.
#[test]
fn status_examines_a_bounded_part_of_a_uniform_mapping() {
    let folder = Folder::new();
    folder.qemu_create("a.qcow2", "cluster_size=512", "256m");
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let disk = QcowDisk::open(&folder.path("a.qcow2"), &options).expect("the image");
    let ranges = our_ranges(&disk, !511);
    assert_eq!(ranges.len(), 2, "each call ends half-way: {ranges:?}");
    assert!(ranges.iter().all(|range| range.content == Content::Absent));
}
