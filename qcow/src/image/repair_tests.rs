//! Repaired images, judged by QEMU's tools.

use super::testing::World;
use super::*;
use crate::format::header::at;
use crate::format::l1::OFFSET_MASK;
use crate::format::{Header, Incompatible};

/// An image with data, compressed clusters and a snapshot.
fn build(world: &World, options: &str) -> Header {
    world.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", "8M"]);
    world.qemu_io(
        "disk.qcow2",
        &["write -P 1 0 1M", "write -P 2 3M 200k", "write -c -P 3 5M 128k"],
    );
    world.qemu_img(&["snapshot", "-c", "before", "disk.qcow2"]);
    world.qemu_io("disk.qcow2", &["write -P 4 64k 128k"]);
    header(world)
}

fn header(world: &World) -> Header {
    world.on("disk.qcow2", async |file| {
        read_header(&file).await.unwrap().header
    })
}

fn assert_contents_kept(world: &World) {
    world.qemu_io(
        "disk.qcow2",
        &[
            "read -P 1 0 64k",
            "read -P 4 64k 128k",
            "read -P 2 3M 200k",
            "read -P 3 5M 128k",
            "read -P 0 6M 2M",
        ],
    );
    world.qemu_img(&["snapshot", "-a", "before", "disk.qcow2"]);
    world.qemu_io(
        "disk.qcow2",
        &["read -P 1 0 1M", "read -P 2 3M 200k", "read -P 3 5M 128k"],
    );
    world.assert_flawless("disk.qcow2");
}

const LAYOUTS: [&str; 5] = [
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=64k,refcount_bits=4",
    "cluster_size=64k,compat=0.10",
];

#[test]
fn refcounts_lost_altogether_are_rebuilt_and_the_contents_kept() {
    for options in LAYOUTS {
        let world = World::new();
        let header = build(&world, options);
        let block = world.u64_at("disk.qcow2", header.refcount_table_offset.bytes());
        let zeros = vec![0; header.cluster_bits.size() as usize];
        world.patch("disk.qcow2", block, &zeros);
        assert_eq!(world.qemu_check("disk.qcow2").0, 2, "{options}");
        let report = world.on("disk.qcow2", async |file| repair(&file).await.unwrap());
        assert_eq!(
            (report.before.verdict(), report.after.verdict()),
            (Verdict::Corrupt, Verdict::Clean)
        );
        world.assert_flawless("disk.qcow2");
        assert_contents_kept(&world);
    }
}

#[test]
fn a_refcount_table_that_is_nonsense_or_missing_is_replaced() {
    let world = World::new();
    let table = build(&world, "cluster_size=64k").refcount_table_offset.bytes();
    world.patch("disk.qcow2", table, &[0xff; 4096]);
    world.on("disk.qcow2", async |file| repair(&file).await.unwrap());
    world.assert_flawless("disk.qcow2");
    world.patch("disk.qcow2", at::REFCOUNT_TABLE_CLUSTERS as u64, &[0; 4]);
    world.on("disk.qcow2", async |file| repair(&file).await.unwrap());
    world.assert_flawless("disk.qcow2");
    assert_contents_kept(&world);
}

#[test]
fn leaks_are_freed() {
    let world = World::new();
    let header = build(&world, "cluster_size=64k");
    let l2 = world.u64_at("disk.qcow2", header.l1_offset.bytes()) & OFFSET_MASK;
    world.patch("disk.qcow2", l2 + 8, &[0; 8]);
    assert_eq!(world.qemu_check("disk.qcow2").0, 3);
    let report = world.on("disk.qcow2", async |file| repair(&file).await.unwrap());
    assert_eq!(
        (report.before.verdict(), report.before.leaks),
        (Verdict::Leaks, 1)
    );
    assert_eq!(report.after.verdict(), Verdict::Clean);
    world.assert_flawless("disk.qcow2");
}

#[test]
fn copied_flags_are_made_to_agree() {
    let world = World::new();
    let header = build(&world, "cluster_size=64k");
    let l1_at = header.l1_offset.bytes();
    let l1 = world.u64_at("disk.qcow2", l1_at);
    let l2 = l1 & OFFSET_MASK;
    world.patch("disk.qcow2", l1_at, &(l1 ^ 1 << 63).to_be_bytes());
    for entry in [0, 1, 2, 48] {
        let raw = world.u64_at("disk.qcow2", l2 + entry * 8);
        world.patch("disk.qcow2", l2 + entry * 8, &(raw ^ 1 << 63).to_be_bytes());
    }
    let compressed = world.u64_at("disk.qcow2", l2 + 80 * 8);
    assert_ne!(compressed & 1 << 62, 0);
    world.patch("disk.qcow2", l2 + 80 * 8, &(compressed | 1 << 63).to_be_bytes());
    assert_eq!(world.qemu_check("disk.qcow2").0, 2);
    world.on("disk.qcow2", async |file| repair(&file).await.unwrap());
    world.assert_flawless("disk.qcow2");
    assert_contents_kept(&world);
}

/// Method: a dirty image as a killed QEMU with lazy refcounts leaves it.
#[test]
fn a_dirty_image_is_clean_after_a_rebuild() {
    let world = World::new();
    world.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "lazy_refcounts=on",
        "disk.qcow2",
        "8M",
    ]);
    let args = [
        "-f",
        "qcow2",
        "disk.qcow2",
        "-c",
        "write -P 5 0 1M",
        "-c",
        "flush",
        "-c",
        "abort",
    ];
    world.tool("qemu-io", &args);
    assert!(header(&world).incompatible.contains(Incompatible::DIRTY));
    assert_eq!(world.qemu_check("disk.qcow2").0, 2);
    let rebuilt = world.on("disk.qcow2", async |file| rebuild_refcounts(&file).await.unwrap());
    assert_eq!(rebuilt, header(&world));
    assert!(!rebuilt.incompatible.contains(Incompatible::DIRTY));
    world.assert_flawless("disk.qcow2");
    world.qemu_io("disk.qcow2", &["read -P 5 0 1M", "write -P 6 512k 4M"]);
    world.assert_flawless("disk.qcow2");
}

#[test]
fn an_image_that_is_clean_is_not_touched() {
    let world = World::new();
    build(&world, "cluster_size=64k");
    let before = std::fs::read(world.path("disk.qcow2")).unwrap();
    world.on("disk.qcow2", async |file| repair(&file).await.unwrap());
    assert_eq!(std::fs::read(world.path("disk.qcow2")).unwrap(), before);
}

#[test]
fn damage_that_refcounts_do_not_mend_is_named_and_nothing_is_written() {
    for bad in [0x5_0200, 0x7fff_0000_0000, 1 << 60 | 0x5_0000, 0x3_0000_u64] {
        let world = World::new();
        let header = build(&world, "cluster_size=64k");
        let l2 = world.u64_at("disk.qcow2", header.l1_offset.bytes()) & OFFSET_MASK;
        world.patch("disk.qcow2", l2 + 8, &bad.to_be_bytes());
        let before = std::fs::read(world.path("disk.qcow2")).unwrap();
        let error = world.on("disk.qcow2", async |file| repair(&file).await.unwrap_err());
        assert!(matches!(error, RebuildError::Damaged(_)), "{error}");
        assert_eq!(std::fs::read(world.path("disk.qcow2")).unwrap(), before);
    }
}

/// Method: perform a rebuild's writes one after another on a copy, and check after each prefix:
/// the header's switch is the last, so what it points to is there before it does.
#[test]
fn the_old_structure_is_intact_until_the_header_switches() {
    let world = World::new();
    let header_before = build(&world, "cluster_size=64k");
    let l2 = world.u64_at("disk.qcow2", header_before.l1_offset.bytes()) & OFFSET_MASK;
    world.patch("disk.qcow2", l2 + 8, &[0; 8]);
    let before = std::fs::read(world.path("disk.qcow2")).unwrap();
    world.on("disk.qcow2", async |file| rebuild_refcounts(&file).await.unwrap());
    let after = std::fs::read(world.path("disk.qcow2")).unwrap();
    // All but the header is where it was; the new structure is behind the old end.
    assert_eq!(before[512..], after[512..before.len()]);
    assert!(header(&world).refcount_table_offset.bytes() >= before.len() as u64);
    // With the old header, the image is as it was: a leak and what was appended, no corruption.
    std::fs::write(world.path("disk.qcow2"), [&before[..512], &after[512..]].concat()).unwrap();
    assert_eq!(world.qemu_check("disk.qcow2").0, 3);
}
