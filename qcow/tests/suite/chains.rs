//! Long chains: what is read through the index of a chain is what is read without one, and what QEMU reads.

use std::path::Path;
use std::sync::Arc;

use crate::common::{Folder, Lane, assert_same, close, open, patch, u64_at};
use block::IoError;
use block::chain::ChainIndexes;
use block::ring::RingKind;
use block::status::StatusRange;
use qcow::{OpenOptions, QcowDisk};
use ringdisk_gen::Random;

fn options(indexes: Option<&ChainIndexes>) -> OpenOptions {
    OpenOptions {
        backing_files: true,
        indexes: indexes.cloned(),
        ..OpenOptions::default()
    }
}

/// A lane's reads, with the tasks that they leave behind.
fn read(lane: &Lane, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
    let read = lane.try_read(offset, len);
    lane.settle();
    read
}

/// One image of a chain: its file, its format, the size of its disk.
#[derive(Clone, Debug)]
struct Layer {
    name: String,
    format: &'static str,
    bytes: u64,
}

/// Makes `count` images, each but the lowest above the one before, with other sizes, other clusters and random content.
fn chain(folder: &Folder, random: &mut Random, count: u64) -> Vec<Layer> {
    let mut layers: Vec<Layer> = Vec::new();
    for number in 0..count {
        let format = if number == 0 {
            random.pick(&["raw", "qcow2"])
        } else {
            "qcow2"
        };
        let whole = (2 << 20) + random.below(20) * 65536;
        let bytes = whole + random.pick(&[0, 0, 512, 7 * 512, 40 << 10]);
        let (name, size) = (format!("{number}.{format}"), bytes.to_string());
        let cluster: u64 = random.pick(&[512, 4096, 16 << 10, 64 << 10, 64 << 10]);
        let v2 = random.one_in(4);
        let compat = if v2 { "0.10" } else { "1.1" };
        let made = format!("cluster_size={cluster},compat={compat}");
        let mut args = vec!["create", "-q", "-f", format];
        if format == "qcow2" {
            args.extend(["-o", &made]);
        }
        if let Some(below) = layers.last() {
            args.extend(["-F", below.format, "-b", &below.name]);
        }
        args.extend([name.as_str(), &size]);
        folder.qemu_img(&args);
        let mut commands = Vec::new();
        if format == "qcow2" {
            // QEMU compresses only whole clusters that are not there yet.
            for at in 0..random.below(3) {
                commands.push(format!(
                    "write -q -c -P {} {} 65536",
                    100 + number,
                    (at * 9 + random.below(9)) * 65536
                ));
            }
        }
        for _ in 0..random.below(24) {
            let unit = random.pick(&[512, 4096, 65536]);
            let at = random.below(bytes / unit) * unit;
            let len = ((1 + random.below(12)) * unit).min(bytes - at);
            commands.push(match random.below(if format == "raw" { 3 } else { 6 }) {
                0..=2 => format!("write -q -P {} {at} {len}", 1 + number * 7 + random.below(7)),
                3 => format!("write -q -z {at} {len}"),
                4 => format!("write -q -z -u {at} {len}"),
                _ => format!("discard -q {at} {len}"),
            });
        }
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        if !commands.is_empty() {
            folder.qemu_io(format, &name, &commands);
        }
        layers.push(Layer { name, format, bytes });
    }
    layers
}

fn whole_status(lane: &Lane, bytes: u64, step: u64) -> Vec<StatusRange> {
    let mut all: Vec<StatusRange> = Vec::new();
    let mut here = 0;
    while here < bytes {
        let status = lane.queue.status(here, step.min(bytes - here));
        for range in lane
            .cx
            .block_on(status)
            .expect("the ring turns")
            .expect("a status")
        {
            assert_eq!(range.offset, here, "a gap");
            here = range.end();
            all.push(range);
        }
    }
    // Answers end where they end: cut at sectors, they are comparable.
    let sectors = |range: StatusRange| {
        (0..range.len / 512).map(move |at| {
            let content = match range.content {
                block::status::Content::Data { at: Some(place) } => block::status::Content::Data {
                    at: Some(place + at * 512),
                },
                other => other,
            };
            StatusRange {
                offset: range.offset + at * 512,
                len: 512,
                content,
                ..range
            }
        })
    };
    all.into_iter().flat_map(sectors).collect()
}

/// Reads, writes, zeroes and discards on an overlay by a plan that follows from the seed; compares each read with `model`,
/// which is changed with the disk.
fn exercise(disk: &Arc<QcowDisk>, mut random: Random, model: &mut [u8]) {
    let kinds = [RingKind::IoUring, RingKind::Syscalls];
    let lanes = kinds.map(|kind| Lane::new(disk, kind));
    let size = model.len() as u64;
    for step in 0..160 {
        let lane = &lanes[random.below(2) as usize];
        let most = random.pick(&[1, 8, 8, 300, 2500]);
        let first = random.below(size / 512);
        let count = 1 + random.below(most).min(size / 512 - first - 1);
        let (from, to) = ((first * 512) as usize, ((first + count) * 512) as usize);
        let part = &mut model[from..to];
        match random.below(10) {
            0..=6 => {
                let found = read(lane, first * 512, count * 512).expect("a read");
                assert_same(&found, part, &format!("step {step}, at {from:#x}"));
            }
            7 | 8 => {
                part.fill(200 + (step % 50) as u8);
                lane.write(first * 512, part);
            }
            _ => {
                part.fill(0);
                lane.write_zeroes(first * 512, count * 512, random.one_in(2));
            }
        }
    }
    lanes[0].flush();
    lanes.iter().for_each(Lane::settle);
    assert_same(&lanes[1].read(0, size), model, "the whole disk");
    lanes.iter().for_each(Lane::settle);
}

#[test]
fn chains_read_the_same_with_and_without_an_index() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|value| value.parse::<u64>().ok())
    };
    let seeds = match number("CHAINS_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("CHAINS_SEEDS").unwrap_or(24),
    };
    let mut indexed = 0;
    for seed in seeds {
        let folder = Folder::new();
        let mut random = Random::new(seed);
        let count = 2 + random.below(7);
        let layers = chain(&folder, &mut random, count);
        let top = layers.last().expect("a layer");
        let bytes = top.bytes;
        let expected = folder.qemu_reads(&top.name);
        let overlay = |name: &str| {
            let size = (bytes + 512 * 9).to_string();
            let args = ["create", "-q", "-f", "qcow2", "-F", top.format, "-b", &top.name];
            folder.qemu_img(&[&args[..], &[name, &size]].concat());
        };
        let mut results = Vec::new();
        let plan = random.draw();
        for (name, with) in [("with.qcow2", true), ("without.qcow2", false)] {
            overlay(name);
            let indexes = ChainIndexes::default();
            let options = options(with.then_some(&indexes));
            let disk = open(&folder.path(name), &options);
            assert_eq!(indexes.count(), usize::from(with), "seed {seed}");
            let mut model = expected.clone();
            model.resize(bytes as usize + 512 * 9, 0);
            {
                let lane = Lane::new(&disk, RingKind::Syscalls);
                let size = model.len() as u64;
                let before = whole_status(&lane, size, size);
                let passes = (0..2).map(|_| lane.read(0, size));
                passes.for_each(|found| assert_same(&found, &model, &format!("seed {seed}, {name}")));
                lane.settle();
                assert_eq!(
                    whole_status(&lane, size, 100 << 10),
                    before,
                    "seed {seed}: the status has changed"
                );
                results.push(before);
            }
            exercise(&disk, Random::new(plan), &mut model);
            indexed += usize::from(indexes.bytes() > 0);
            close(disk);
            folder.assert_flawless(name, false);
            assert_same(
                &folder.qemu_reads(name),
                &model,
                &format!("seed {seed}: QEMU, {name}"),
            );
        }
        assert!(
            results[0] == results[1],
            "seed {seed}: another status without an index"
        );
    }
    assert!(indexed > 0, "the index was used");
}

/// Creates an empty image above another.
fn create_above(folder: &Folder, below: &str, name: &str) {
    folder.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", below, name]);
}

/// Three images: the lowest has all its clusters, the middle one every other one.
fn three(folder: &Folder) {
    folder.qemu_img(&["create", "-q", "-f", "qcow2", "low.qcow2", "4m"]);
    folder.qemu_io("qcow2", "low.qcow2", &["write -q -P 1 0 4m"]);
    create_above(folder, "low.qcow2", "middle.qcow2");
    let writes: Vec<String> = (0..32)
        .map(|at| format!("write -q -P 2 {}k 64k", at * 128))
        .collect();
    let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
    folder.qemu_io("qcow2", "middle.qcow2", &writes);
    for name in ["a.qcow2", "b.qcow2"] {
        create_above(folder, "middle.qcow2", name);
    }
}

/// The place in the file of the L2 entry of a guest cluster below 512 MiB.
fn l2_entry(path: &Path, cluster: u64) -> u64 {
    let l1 = u64_at(path, 40);
    (u64_at(path, l1) & 0x00ff_ffff_ffff_fe00) + cluster * 8
}

#[test]
fn corrupt_layer_fails_the_same_reads_with_and_without_an_index() {
    // An entry that is no entry, and one that leads past the end of the file; in the middle and at the bottom.
    for (name, cluster) in [("middle.qcow2", 6), ("low.qcow2", 7)] {
        for entry in [0x8000_0000_0000_0200, 0x8000_00ff_ffff_0000_u64] {
            let mut answers = Vec::new();
            for with in [true, false] {
                let folder = Folder::new();
                three(&folder);
                let path = folder.path(name);
                patch(&path, l2_entry(&path, cluster), &entry.to_be_bytes());
                let indexes = ChainIndexes::default();
                let disk = open(&folder.path("a.qcow2"), &options(with.then_some(&indexes)));
                let lane = Lane::new(&disk, RingKind::IoUring);
                let mut found = Vec::new();
                for _ in 0..2 {
                    for at in 0..64 {
                        found.push(read(&lane, at * 65536, 4096).map(|bytes| bytes[0]));
                    }
                    found.push(read(&lane, 0, 4 << 20).map(|bytes| bytes[0]));
                }
                drop(lane);
                close(disk);
                answers.push(found);
            }
            assert_eq!(answers[0], answers[1], "{name} {entry:#x}");
            let failed = answers[0]
                .iter()
                .filter(|answer| **answer == Err(IoError::Corrupt))
                .count();
            assert_eq!(
                failed, 4,
                "the cluster, and the read of all, twice: {name} {entry:#x}"
            );
        }
    }
}

#[test]
fn disks_of_a_process_on_one_chain_share_its_index() {
    let folder = Folder::new();
    three(&folder);
    let indexes = ChainIndexes::default();
    let with = |name: &str, options: OpenOptions| open(&folder.path(name), &options);
    let first = with("a.qcow2", options(Some(&indexes)));
    let second = with("b.qcow2", options(Some(&indexes)));
    assert_eq!((indexes.count(), indexes.bytes()), (1, 0));
    let lane = Lane::new(&first, RingKind::Syscalls);
    assert_eq!(read(&lane, 0, 512).map(|bytes| bytes[0]), Ok(2));
    let bytes = indexes.bytes();
    assert!(bytes > 0, "the first disk has built it");
    let other = Lane::new(&second, RingKind::Syscalls);
    assert_eq!(read(&other, 65536, 512).map(|bytes| bytes[0]), Ok(1));
    assert_eq!(indexes.bytes(), bytes, "the second disk has it");
    drop(lane);
    close(first);
    assert_eq!(indexes.count(), 1, "one disk is left");
    // Without locks nothing says that the images are still what they were.
    let unlocked = OpenOptions {
        lock: None,
        ..options(Some(&indexes))
    };
    let third = with("a.qcow2", unlocked);
    assert_eq!(indexes.count(), 2);
    drop((third, other));
    close(second);
    assert_eq!(indexes.count(), 0);
    // The images may change now, and a disk that is opened then sees the change.
    folder.qemu_io("qcow2", "middle.qcow2", &["write -q -P 9 64k 64k"]);
    let again = with("a.qcow2", options(Some(&indexes)));
    let lane = Lane::new(&again, RingKind::Syscalls);
    for _ in 0..2 {
        assert_eq!(read(&lane, 65536, 512).map(|bytes| bytes[0]), Ok(9));
    }
    drop(lane);
    close(again);
}

#[test]
fn image_on_one_other_has_no_index() {
    let folder = Folder::new();
    three(&folder);
    let indexes = ChainIndexes::default();
    let disk = open(&folder.path("middle.qcow2"), &options(Some(&indexes)));
    let lane = Lane::new(&disk, RingKind::Syscalls);
    assert_eq!(read(&lane, 65536, 512).map(|bytes| bytes[0]), Ok(1));
    assert_eq!(indexes.count(), 0);
    drop(lane);
    close(disk);
}

/// Workers that look up and build the same spans at once, in an index without room for half of them.
#[test]
fn workers_share_an_index_while_spans_come_and_go() {
    let folder = Folder::new();
    // 64 spans of 1 MiB, each with 2048 units.
    for (name, below) in [
        ("low.qcow2", None),
        ("middle.qcow2", Some("low.qcow2")),
        ("a.qcow2", Some("middle.qcow2")),
    ] {
        let mut args = vec!["create", "-q", "-f", "qcow2", "-o", "cluster_size=512"];
        args.extend(below.iter().flat_map(|below| ["-F", "qcow2", "-b", *below]));
        folder.qemu_img(&[&args[..], &[name, "64m"]].concat());
    }
    let scattered = |folder: &Folder, name: &str, of: u64| {
        let disk = open(&folder.path(name), &options(None));
        let lane = Lane::new(&disk, RingKind::Syscalls);
        for at in (of..64 * 2048).step_by(6) {
            lane.write(at * 512, &[of as u8 + 1; 512]);
        }
        lane.flush();
        lane.settle();
        drop(lane);
        close(disk);
    };
    scattered(&folder, "low.qcow2", 0);
    scattered(&folder, "middle.qcow2", 1);
    let expected = |sector: u64| match sector % 6 {
        kind @ (0 | 1) => kind as u8 + 1,
        _ => 0,
    };
    let indexes = ChainIndexes::default();
    let small = OpenOptions {
        l2_cache_bytes: Some(64 << 10),
        ..options(Some(&indexes))
    };
    let disk = open(&folder.path("a.qcow2"), &small);
    std::thread::scope(|scope| {
        for worker in 0..3 {
            let (disk, indexes) = (&disk, &indexes);
            scope.spawn(move || {
                let lane = Lane::new(disk, RingKind::Syscalls);
                let mut random = Random::new(worker);
                for _ in 0..3000 {
                    let first = random.below(64 * 2048 - 8);
                    let found = lane.read(first * 512, 8 * 512);
                    for (sector, bytes) in (first..).zip(found.chunks_exact(512)) {
                        assert!(
                            bytes.iter().all(|byte| *byte == expected(sector)),
                            "sector {sector}"
                        );
                    }
                    assert!(indexes.bytes() <= 64 << 10, "{} bytes", indexes.bytes());
                }
                lane.settle();
            });
        }
    });
    assert!(indexes.bytes() > 32 << 10, "the room is used");
    close(disk);
}
