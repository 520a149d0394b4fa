//! Compaction of images with compressed data, which shares host clusters: it is packed anew, the disk and its snapshots stay as
//! they are, QEMU finds no flaw, and the file has no cluster that is not in use.

use std::time::UNIX_EPOCH;

use crate::common::{Folder, Lane, assert_same, close, open};
use crate::compact::{IMAGE, change, compact_wholly, options};
use block::ring::RingKind;
use qcow::offline::create_snapshot;
use qcow::{CompactOptions, Compacted};
use ringdisk_gen::Random;

/// Bytes of which about every other cluster is compressed to less than a half.
fn content(clusters: u64, size: u64, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Vec::new();
    for _ in 0..clusters {
        let most = random.pick(&[size / 16, size / 4, size / 2, size]);
        let noise = 1 + random.below(most);
        bytes.extend((0..noise).map(|_| random.draw() as u8));
        bytes.resize(bytes.len() + (size - noise) as usize, 7);
    }
    bytes
}

/// Makes an image of compressed data.
fn compressed(folder: &Folder, options: &str, clusters: u64, size: u64) {
    std::fs::write(folder.path("raw"), content(clusters, size, clusters)).expect("content");
    let args = [
        "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, "raw", IMAGE,
    ];
    folder.qemu_img(&args);
}

const SHAPES: [(&str, u64, u64); 6] = [
    ("cluster_size=64k", 65536, 150),
    ("cluster_size=64k,compression_type=zstd", 65536, 150),
    ("cluster_size=4k", 4096, 600),
    ("cluster_size=4k,compat=0.10", 4096, 400),
    ("cluster_size=2M", 2 << 20, 10),
    ("cluster_size=16k,extended_l2=on", 16384, 200),
];

#[test]
fn compaction_packs_compressed_data_anew() {
    for (options_of, size, clusters) in SHAPES {
        let folder = Folder::new();
        compressed(&folder, options_of, clusters, size);
        change(&folder, &options(), |lane| {
            lane.discard(0, clusters * 2 / 3 * size);
            // Some of it shares its clusters with what is discarded.
            lane.discard(clusters * 5 / 6 * size, size);
        });
        let before = std::fs::metadata(folder.path(IMAGE)).expect("an image").len();
        let compacted = compact_wholly(&folder, options_of);
        assert!(
            compacted.after_bytes < before * 4 / 5,
            "{options_of}: {compacted:?} of {before}"
        );
        // QEMU goes on with it.
        let write = format!("write -c -P 34 0 {size}");
        folder.qemu_io("qcow2", IMAGE, &[&write, "write -P 35 128k 64k"]);
        folder.assert_flawless(IMAGE, false);
    }
}

/// Snapshots of both programs share compressed data with the disk, whose tables are shared or not.
#[test]
fn compaction_packs_compressed_data_that_snapshots_share() {
    for (index, (options_of, size, clusters)) in SHAPES.into_iter().enumerate() {
        for by_qemu in [false, true] {
            let folder = Folder::new();
            compressed(&folder, options_of, clusters, size);
            change(&folder, &options(), |lane| {
                lane.discard(0, clusters / 4 * size);
                lane.write(clusters / 3 * size, &vec![index as u8; size as usize]);
            });
            match by_qemu {
                true => drop(folder.qemu_img(&["snapshot", "-c", "one", IMAGE])),
                false => drop(create_snapshot(&folder.path(IMAGE), "one", UNIX_EPOCH).expect("a snapshot")),
            }
            change(&folder, &options(), |lane| {
                if index % 2 == 0 {
                    lane.write(clusters / 2 * size, &vec![index as u8; 3 * size as usize]);
                    lane.discard(clusters * 2 / 3 * size, clusters / 5 * size);
                }
            });
            let snapshot = |folder: &Folder| {
                folder.qemu_converts(&["-l", "snapshot.name=one"], IMAGE, "one.raw");
                std::fs::read(folder.path("one.raw")).expect("what QEMU wrote")
            };
            let before = snapshot(&folder);
            let what = format!("{options_of}, by QEMU {by_qemu}");
            compact_wholly(&folder, &what);
            assert_same(&snapshot(&folder), &before, &format!("{what}: the snapshot"));
            folder.qemu_img(&["snapshot", "-d", "one", IMAGE]);
            folder.assert_flawless(IMAGE, false);
        }
    }
}

/// A queue keeps inflated clusters by their place. Other compressed data comes to these places while the disk is served.
///
/// Method: each process of QEMU begins a host cluster with its first compressed data, and so does a compaction.
#[test]
fn reads_of_a_served_disk_see_compressed_data_that_has_moved() {
    const SIZE: u64 = 4096;
    const CLUSTERS: u64 = 24;
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=4k", &(SIZE * CLUSTERS).to_string());
    for at in 0..CLUSTERS {
        let write = format!("write -c -P {} {} {SIZE}", at + 1, at * SIZE);
        folder.qemu_io("qcow2", IMAGE, &[write.as_str()]);
    }
    let mut expected = folder.qemu_reads(IMAGE);
    let disk = open(&folder.path(IMAGE), &options());
    let lane = Lane::new(&disk, RingKind::Syscalls);
    let cx = block::Context::new(RingKind::Syscalls, 64).expect("a ring");
    assert_same(&lane.read(0, CLUSTERS * SIZE), &expected, "before");
    let half = CLUSTERS / 2 * SIZE;
    lane.discard(0, half);
    expected[..half as usize].fill(0);
    lane.flush();
    lane.settle();
    let (unlimited, go_on) = (CompactOptions::default(), |_: &_| {
        std::ops::ControlFlow::Continue(())
    });
    let compacting = disk.compact(&cx, &unlimited, go_on);
    let compacted: Compacted = cx.block_on(compacting).expect("it turns").expect("a compaction");
    assert!(compacted.moved_bytes > 0, "{compacted:?}");
    assert_same(&lane.read(0, CLUSTERS * SIZE), &expected, "after");
    drop(lane);
    close(disk);
    folder.assert_flawless(IMAGE, false);
}
