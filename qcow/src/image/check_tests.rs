//! Verdicts on damaged images, compared with `qemu-img check`'s.

use std::fmt::Write as _;

use super::testing::World;
use super::*;
use crate::format::header::at;
use crate::format::l1::OFFSET_MASK;
use crate::format::{ClusterUse, Header, L2Table, Version};
use ringdisk_gen::Random;

/// A kind of image to damage.
#[derive(Clone, Copy, Debug)]
struct Kind {
    version: Version,
    cluster_bits: u32,
    refcount_bits: u32,
    extended: bool,
}

const KINDS: [Kind; 6] = [
    Kind {
        version: Version::V3,
        cluster_bits: 16,
        refcount_bits: 16,
        extended: false,
    },
    Kind {
        version: Version::V3,
        cluster_bits: 12,
        refcount_bits: 8,
        extended: false,
    },
    Kind {
        version: Version::V3,
        cluster_bits: 9,
        refcount_bits: 64,
        extended: false,
    },
    Kind {
        version: Version::V3,
        cluster_bits: 12,
        refcount_bits: 2,
        extended: false,
    },
    Kind {
        version: Version::V2,
        cluster_bits: 12,
        refcount_bits: 16,
        extended: false,
    },
    Kind {
        version: Version::V3,
        cluster_bits: 14,
        refcount_bits: 16,
        extended: true,
    },
];

/// An image with data, zeros, a hole, compressed clusters, two snapshots and (version 3) bitmaps.
fn build(world: &World, kind: Kind) {
    let Kind {
        version,
        cluster_bits,
        refcount_bits,
        extended,
    } = kind;
    let cluster = 1u64 << cluster_bits;
    let options = format!(
        "compat={},cluster_size={cluster},refcount_bits={refcount_bits}{}",
        version.compat(),
        if extended { ",extended_l2=on" } else { "" },
    );
    let size = (cluster * 200).max(1 << 20).to_string();
    world.qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, "good.qcow2", &size]);
    let at =
        |command: &str, first: u64, count: u64| format!("{command} {} {}", first * cluster, count * cluster);
    let io = |commands: &[String]| {
        world.qemu_io(
            "good.qcow2",
            &commands.iter().map(String::as_str).collect::<Vec<_>>(),
        );
    };
    io(&[
        at("write -P 1", 0, 12),
        at("write -P 2", 40, 3),
        at("write -P 9", 100, 2),
    ]);
    if extended {
        // Clusters with every kind of subcluster.
        let part = |command: &str, first: u64, sectors: u64| {
            let subcluster = (cluster / 32).max(512);
            format!(
                "{command} {} {}",
                first * cluster + 3 * subcluster,
                sectors * subcluster
            )
        };
        io(&[
            part("write -P 1", 30, 2),
            part("write -z", 30, 1),
            part("write -z", 2, 4),
        ]);
    }
    io(&[at("write -c -P 3", 20, 1)]);
    if refcount_bits > 2 {
        io(&[at("write -c -P 4", 21, 1), at("write -c -P 5", 22, 1)]);
    }
    world.qemu_img(&["snapshot", "-c", "first", "good.qcow2"]);
    io(&[at("write -P 6", 2, 2), at("write -z", 5, 1), at("discard", 41, 1)]);
    if refcount_bits > 2 {
        world.qemu_img(&["snapshot", "-c", "second", "good.qcow2"]);
        io(&[at("write -P 7", 0, 1)]);
    }
    if version == Version::V3 {
        world.qemu_img(&["bitmap", "--add", "-g", "64k", "good.qcow2", "nightly"]);
        io(&[at("write -P 8", 7, 1)]);
    }
    world.assert_flawless("good.qcow2");
}

fn header_of(world: &World, name: &str) -> Header {
    world.on(name, async |file| read_header(&file).await.unwrap().header)
}

/// The places of 8-byte words worth damaging: refcount table, L1, the L2 tables, a snapshot's L1.
fn entries(world: &World, name: &str) -> Vec<(&'static str, u64)> {
    let header = header_of(world, name);
    let mut places = Vec::new();
    let table = header.refcount_table_offset.bytes();
    places.extend([("refcount table", table), ("refcount table", table + 8)]);
    let block = world.u64_at(name, table);
    places.extend((0..8).map(|i| ("refcount block", block + i * 8)));
    let l1 = header.l1_offset.bytes();
    let snapshot_l1 = world.u64_at(name, header.snapshot_table_offset.bytes());
    for (what, l1) in [("L1", l1), ("snapshot L1", snapshot_l1)] {
        for i in 0..u64::from(header.l1_entries).min(3) {
            places.push((what, l1 + i * 8));
            let l2 = world.u64_at(name, l1 + i * 8) & OFFSET_MASK;
            let entries = [0, 1, 2, 5, 20, 21, 22, 30, 40, 41];
            let inside = entries
                .iter()
                .filter(|&&entry| l2 != 0 && entry < header.geometry().l2_entries());
            for &entry in inside {
                let at = l2 + L2Table::offset_of(&header.geometry(), entry);
                places.push(("L2", at));
                if header.geometry().has_subclusters() {
                    places.push(("L2 bitmap", at + 8));
                }
            }
        }
    }
    let snapshots = header.snapshot_table_offset.bytes();
    places.extend([
        ("snapshot offset", snapshots),
        ("snapshot L1 size", snapshots + 8),
    ]);
    if let Some(bitmaps) = header.bitmaps() {
        let directory = bitmaps.directory_offset.bytes();
        places.extend([
            ("bitmap table offset", directory),
            ("bitmap table size", directory + 8),
        ]);
        places.extend([("bitmap type", directory + 16)]);
        places.extend([("bitmap table", world.u64_at(name, directory))]);
    }
    places
}

/// The number of random images of each kind that a test makes.
const SEEDS: u64 = 40;

fn verdict(world: &World, name: &str) -> (Option<Verdict>, String) {
    match world.on(name, async |file| check(&file).await) {
        Ok(report) => (Some(report.verdict()), format!("{:#?}", report.findings)),
        Err(error) => (None, error.to_string()),
    }
}

/// Compares the verdicts on `name`. QEMU's "could not check" is anything but clean to us, and what
/// we refuse to look into must not be clean to QEMU.
fn disagreement(world: &World, name: &str) -> Option<String> {
    let (ours, our_text) = verdict(world, name);
    let (theirs, their_text) = world.qemu_check(name);
    let agree = match (ours, theirs) {
        (Some(verdict), 0 | 2 | 3) => i32::from(verdict.exit_code()) == theirs,
        (Some(verdict), _) => verdict != Verdict::Clean || sound_but_refused(&their_text),
        (None, code) => code != 0 && code != 3,
    };
    let text = || format!("ours {ours:?}: {our_text}\ntheirs {theirs}: {their_text}");
    (!agree).then(text)
}

/// Returns true if QEMU refuses an image for a feature, not for damage.
fn sound_but_refused(text: &str) -> bool {
    ["extra data is not supported", "key-secret"]
        .iter()
        .any(|reason| text.contains(reason))
}

#[test]
fn check_of_sound_image_is_clean_with_qemus_numbers() {
    for kind in KINDS {
        let world = World::new();
        build(&world, kind);
        let ours = world.on("good.qcow2", async |file| check(&file).await.unwrap());
        assert_eq!(ours.verdict(), Verdict::Clean, "{kind:?}: {:?}", ours.findings);
        let theirs = world.qemu_img(&["check", "--output=json", "good.qcow2"]);
        let theirs: serde_json::Value = serde_json::from_str(&theirs).unwrap();
        let numbers = [
            ("image-end-offset", ours.image_end_offset),
            ("total-clusters", ours.total_clusters),
            ("allocated-clusters", ours.allocated_clusters),
            ("compressed-clusters", ours.compressed_clusters),
            ("fragmented-clusters", ours.fragmented_clusters),
        ];
        for (name, ours) in numbers {
            assert_eq!(ours, theirs[name].as_u64().unwrap_or(0), "{kind:?}: {name}");
        }
    }
}

/// Method: change one entry of a sound image to each of a list of bad values, and compare.
#[test]
fn check_agrees_with_qemu_on_each_table_damage() {
    let mut failures = String::new();
    for kind in KINDS {
        let world = World::new();
        build(&world, kind);
        let file_len = std::fs::metadata(world.path("good.qcow2")).unwrap().len();
        let header = header_of(&world, "good.qcow2");
        let cluster = header.cluster_bits.size();
        for (what, place) in entries(&world, "good.qcow2") {
            let value = world.u64_at("good.qcow2", place);
            let bad = [
                0,
                value ^ 1 << 63,
                value | 1 << 56,
                value | 1 << 3,
                value ^ 1 << 62,
                value ^ 512,
                1 << 63 | header.l1_offset.bytes(),
                header.refcount_table_offset.bytes(),
                (file_len.next_multiple_of(cluster) + cluster) & OFFSET_MASK,
                1 << 63 | (OFFSET_MASK & !(cluster - 1)),
                u64::MAX,
            ];
            for (i, bad) in bad.into_iter().enumerate() {
                std::fs::copy(world.path("good.qcow2"), world.path("bad.qcow2")).unwrap();
                world.patch("bad.qcow2", place, &bad.to_be_bytes());
                if let Some(text) = disagreement(&world, "bad.qcow2") {
                    writeln!(
                        failures,
                        "{kind:?} {what} at {place:#x}: {value:#x} -> {bad:#x} ({i})\n{text}"
                    )
                    .unwrap();
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// Method: several random changes to a sound image's metadata at once; every failure names its seed.
#[test]
fn check_agrees_with_qemu_on_random_damage() {
    let mut failures = String::new();
    for kind in KINDS {
        let world = World::new();
        build(&world, kind);
        let places = entries(&world, "good.qcow2");
        for seed in 1..=SEEDS {
            let mut random = Random::new(seed * 0x9e37_79b9);
            std::fs::copy(world.path("good.qcow2"), world.path("bad.qcow2")).unwrap();
            for _ in 0..=random.below(3) {
                let (_, place) = places[random.below(places.len() as u64) as usize];
                let (_, other) = places[random.below(places.len() as u64) as usize];
                let value = world.u64_at("good.qcow2", place);
                let bad = match random.below(4) {
                    0 => world.u64_at("good.qcow2", other),
                    1 => random.draw(),
                    _ => value ^ 1 << random.below(64),
                };
                // The one flag we are stricter about, see below.
                let bad = if kind.version == Version::V2 {
                    bad & !1
                } else {
                    bad
                };
                world.patch("bad.qcow2", place, &bad.to_be_bytes());
            }
            if let Some(text) = disagreement(&world, "bad.qcow2") {
                writeln!(failures, "{kind:?} seed {seed}:\n{text}").unwrap();
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// Method: random damage again. After a repair QEMU finds nothing; a repair that fails says why and leaves every byte as
/// it was.
#[test]
fn repair_mends_random_damage_or_writes_nothing() {
    for kind in KINDS {
        let world = World::new();
        build(&world, kind);
        let places = entries(&world, "good.qcow2");
        let mut repaired = 0;
        for seed in 1..=SEEDS {
            let mut random = Random::new(seed * 0x51ed_270b);
            std::fs::copy(world.path("good.qcow2"), world.path("bad.qcow2")).unwrap();
            for _ in 0..=random.below(2) {
                let (_, place) = places[random.below(places.len() as u64) as usize];
                let value = world.u64_at("good.qcow2", place);
                let bad = if random.below(2) == 0 { 0 } else { value ^ 1 << 63 };
                world.patch("bad.qcow2", place, &bad.to_be_bytes());
            }
            let before = std::fs::read(world.path("bad.qcow2")).unwrap();
            match world.on("bad.qcow2", async |file| repair(&file, RepairScope::All).await) {
                Ok(report) => {
                    assert_eq!(
                        report.after.verdict(),
                        Verdict::Clean,
                        "{kind:?} seed {seed}: {report:?}"
                    );
                    let (code, text) = world.qemu_check("bad.qcow2");
                    assert!(
                        code == 0 || sound_but_refused(&text),
                        "{kind:?} seed {seed}: {text}"
                    );
                    repaired += 1;
                }
                Err(error) => {
                    let after = std::fs::read(world.path("bad.qcow2")).unwrap();
                    assert!(before == after, "{kind:?} seed {seed}: changed, although {error}");
                }
            }
        }
        assert!(
            repaired > SEEDS / 4,
            "{kind:?}: only {repaired} were worth testing"
        );
    }
}

/// Method: one random change to a field of a sound image's header; every failure names its seed.
#[test]
fn check_agrees_with_qemu_on_random_header_damage() {
    let mut failures = String::new();
    for kind in KINDS {
        let world = World::new();
        build(&world, kind);
        let fields = [
            8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 80, 88, 96, 100, 104, 112, 116,
        ];
        for seed in 1..=SEEDS {
            let mut random = Random::new(seed * 0x9e37_79b9);
            std::fs::copy(world.path("good.qcow2"), world.path("bad.qcow2")).unwrap();
            let place = fields[random.below(fields.len() as u64) as usize];
            let value = (world.u64_at("good.qcow2", place) >> 32) as u32;
            let bad = match random.below(4) {
                0 => random.draw() as u32,
                1 => value.wrapping_add(1),
                2 => 0,
                _ => value ^ 1 << random.below(32),
            };
            world.patch("bad.qcow2", place, &bad.to_be_bytes());
            if let Some(text) = disagreement(&world, "bad.qcow2") {
                writeln!(
                    failures,
                    "{kind:?} seed {seed}: byte {place}: {value:#x} -> {bad:#x}\n{text}"
                )
                .unwrap();
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// QEMU reads such an entry as zeros and finds nothing wrong; the format has no such flag.
#[test]
fn check_calls_zero_flag_in_version_2_corrupt() {
    let world = World::new();
    world.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "compat=0.10",
        "bad.qcow2",
        "1M",
    ]);
    world.qemu_io("bad.qcow2", &["write 0 64k"]);
    let l2 = world.u64_at("bad.qcow2", header_of(&world, "bad.qcow2").l1_offset.bytes()) & OFFSET_MASK;
    world.patch("bad.qcow2", l2 + 8, &1_u64.to_be_bytes());
    assert_eq!(verdict(&world, "bad.qcow2").0, Some(Verdict::Corrupt));
}

#[test]
fn check_agrees_with_qemu_on_truncated_images() {
    let mut failures = String::new();
    for kind in KINDS {
        let world = World::new();
        build(&world, kind);
        let file_len = std::fs::metadata(world.path("good.qcow2")).unwrap().len();
        let lengths = (0..24)
            .map(|i| file_len * i / 24)
            .chain([1, 71, 72, 104, 512, file_len - 1]);
        for len in lengths {
            std::fs::copy(world.path("good.qcow2"), world.path("bad.qcow2")).unwrap();
            let file = std::fs::OpenOptions::new()
                .write(true)
                .open(world.path("bad.qcow2"))
                .unwrap();
            file.set_len(len).unwrap();
            if let Some(text) = disagreement(&world, "bad.qcow2") {
                writeln!(failures, "{kind:?} cut at {len:#x} of {file_len:#x}\n{text}").unwrap();
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn check_calls_missing_refcount_table_corrupt_like_qemu() {
    let world = World::new();
    build(&world, KINDS[0]);
    std::fs::copy(world.path("good.qcow2"), world.path("bad.qcow2")).unwrap();
    world.patch("bad.qcow2", at::REFCOUNT_TABLE_CLUSTERS as u64, &[0; 4]);
    assert_eq!(disagreement(&world, "bad.qcow2"), None);
    assert_eq!(verdict(&world, "bad.qcow2").0, Some(Verdict::Corrupt));
}

/// Two guest clusters may share a host cluster if its refcount says so; guest data may never lie in metadata.
#[test]
fn check_finds_guest_data_in_metadata_despite_refcounts() {
    let world = World::new();
    world.qemu_img(&["create", "-q", "-f", "qcow2", "bad.qcow2", "1M"]);
    world.qemu_io("bad.qcow2", &["write 0 64k"]);
    let header = header_of(&world, "bad.qcow2");
    let l1 = header.l1_offset.bytes();
    let l2 = world.u64_at("bad.qcow2", l1) & OFFSET_MASK;
    world.patch("bad.qcow2", l2 + 8, &l1.to_be_bytes());
    let block = world.u64_at("bad.qcow2", header.refcount_table_offset.bytes());
    world.patch("bad.qcow2", block + l1 / 65536 * 2, &2u16.to_be_bytes());
    world.assert_flawless("bad.qcow2");
    let report = world.on("bad.qcow2", async |file| check(&file).await.unwrap());
    assert_eq!(report.verdict(), Verdict::Corrupt);
    assert_eq!(report.findings[0].structure, ClusterUse::L1Table);
    assert!(report.findings[0].message.contains("guest data"));
}

#[test]
fn check_findings_name_structure_and_place() {
    let world = World::new();
    world.qemu_img(&["create", "-q", "-f", "qcow2", "bad.qcow2", "1M"]);
    world.qemu_io("bad.qcow2", &["write 0 128k"]);
    let l2 = world.u64_at("bad.qcow2", header_of(&world, "bad.qcow2").l1_offset.bytes()) & OFFSET_MASK;
    world.patch("bad.qcow2", l2 + 8, &0x7fff_0000_0000_u64.to_be_bytes());
    let report = world.on("bad.qcow2", async |file| check(&file).await.unwrap());
    let found = &report.findings[0];
    assert_eq!(
        (found.severity, found.structure, found.offset),
        (Severity::Corruption, ClusterUse::L2Table, l2 + 8)
    );
    assert!(found.message.contains("0x7fff00000000"), "{}", found.message);
    assert_eq!(report.leaks, 1);
}

#[test]
fn check_reads_a_table_once_however_often_referenced() {
    let world = World::new();
    world.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=2M",
        "bad.qcow2",
        "1E",
    ]);
    world.qemu_io("bad.qcow2", &["write 0 2M"]);
    let header = header_of(&world, "bad.qcow2");
    let entry = world.u64_at("bad.qcow2", header.l1_offset.bytes());
    let table = entry.to_be_bytes().repeat(header.l1_entries as usize);
    world.patch("bad.qcow2", header.l1_offset.bytes(), &table);
    // A million references to one table of 262,144 entries: hours, if each were followed.
    let report = world.on("bad.qcow2", async |file| check(&file).await.unwrap());
    assert_eq!(report.verdict(), Verdict::Corrupt);
    assert!(report.findings.len() <= 1000);
}

/// Method: check damaged images in one pass, and in the many passes that very little memory requires.
#[test]
fn check_with_little_memory_changes_only_findings_order() {
    for kind in KINDS {
        let world = World::new();
        build(&world, kind);
        let places = entries(&world, "good.qcow2");
        // Clusters far away, so that there is more than one window.
        let file_len = std::fs::metadata(world.path("good.qcow2")).unwrap().len();
        let cluster = 1_u64 << kind.cluster_bits;
        for seed in 0..12 {
            let mut random = Random::new(seed * 0x9e37_79b9 + 1);
            std::fs::copy(world.path("good.qcow2"), world.path("bad.qcow2")).unwrap();
            let file = std::fs::OpenOptions::new()
                .write(true)
                .open(world.path("bad.qcow2"))
                .unwrap();
            file.set_len(file_len.next_multiple_of(cluster) + 20_000 * cluster)
                .unwrap();
            for i in 0..random.below(6) {
                let (_, place) = places[random.below(places.len() as u64) as usize];
                let far = file_len.next_multiple_of(cluster) + random.below(20_000) * cluster;
                let bad = if i % 2 == 0 { far | 1 << 63 } else { random.draw() };
                world.patch("bad.qcow2", place, &bad.to_be_bytes());
            }
            let [mut one, mut many] = [usize::MAX, 8 << 10].map(|memory| {
                world.on("bad.qcow2", async |file| {
                    check_within(&file, memory).await.unwrap()
                })
            });
            if one.findings.len() < 1000 {
                for report in [&mut one, &mut many] {
                    report
                        .findings
                        .sort_by(|a, b| (a.offset, &a.message).cmp(&(b.offset, &b.message)));
                }
            } else {
                one.findings.clear();
                many.findings.clear();
            }
            assert_eq!(one, many, "{kind:?} seed {seed}");
        }
    }
}

/// Method: a sparse file with as many clusters as may be, and references all over it: a few hundred KiB on the host. The
/// process may not need a tenth of what a byte per cluster would take.
#[test]
fn check_takes_little_memory_for_two_billion_clusters() {
    let world = World::new();
    world.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=512,refcount_bits=1",
        "bad.qcow2",
        "1G",
    ]);
    let header = header_of(&world, "bad.qcow2");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(world.path("bad.qcow2"))
        .unwrap();
    let clusters = (1_u64 << 31) - 8;
    file.set_len(clusters * 512).unwrap();
    // L2 tables next to each other, whose entries have a few thousand clusters between them.
    let (l1, first_table) = (header.l1_offset.bytes(), 1 << 20);
    let tables = u64::from(header.l1_entries);
    let mut entry = 0;
    for table in 0..tables {
        world.patch(
            "bad.qcow2",
            l1 + table * 8,
            &(1 << 63 | (first_table + table * 512)).to_be_bytes(),
        );
        let mut bytes = Vec::new();
        for _ in 0..64 {
            entry += 1;
            let host = (entry * 1009 + (1 << 14)) % clusters * 512;
            bytes.extend((1_u64 << 63 | host).to_be_bytes());
        }
        world.patch("bad.qcow2", first_table + table * 512, &bytes);
    }
    let report = world.on("bad.qcow2", async |file| {
        check_within(&file, 16 << 20).await.unwrap()
    });
    assert_eq!(report.verdict(), Verdict::Corrupt);
    assert_eq!(report.allocated_clusters, tables * 64);
    // One pass would take more than it was allowed.
    let passes = world.passes_within("bad.qcow2", 16 << 20);
    assert!(passes > 1);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let peak: u64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(peak < 400 << 10, "{peak} KiB");
}
