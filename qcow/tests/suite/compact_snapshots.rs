//! Compaction of images with snapshots: what they share with the disk, and what they alone have, moves with their tables. The
//! disk and all snapshots stay as they are, QEMU finds no flaw, and the file has no cluster that is not in use.

use std::time::UNIX_EPOCH;

use crate::common::{Folder, Lane, SECRET, assert_same, secret};
use crate::compact::{IMAGE, change, compact_wholly, options};
use qcow::offline::{apply_snapshot, create_snapshot, delete_snapshot};
use qcow::{OpenOptions, SnapshotSelector};
use ringdisk_gen::Random;

/// Returns the bytes of a snapshot as QEMU reads them.
fn snapshot(folder: &Folder, name: &str) -> Vec<u8> {
    folder.qemu_converts(&["-l", &format!("snapshot.name={name}")], IMAGE, "snapshot.raw");
    std::fs::read(folder.path("snapshot.raw")).expect("what QEMU wrote")
}

/// Compacts an image, whose disk and snapshots stay as they are.
#[track_caller]
fn compact_with(folder: &Folder, names: &[&str], what: &str) {
    let before: Vec<Vec<u8>> = names.iter().map(|name| snapshot(folder, name)).collect();
    compact_wholly(folder, what);
    for (name, before) in names.iter().zip(&before) {
        assert_same(&snapshot(folder, name), before, &format!("{what}: {name}"));
    }
}

fn take(folder: &Folder, name: &str) {
    create_snapshot(&folder.path(IMAGE), name, UNIX_EPOCH).expect("a snapshot");
}

fn forget(folder: &Folder, name: &str) {
    let which = SnapshotSelector::Name(name.to_owned());
    delete_snapshot(&folder.path(IMAGE), &which).expect("a deletion");
}

fn write_all(lane: &Lane, clusters: u64, size: u64, seed: u64) {
    let mut random = Random::new(seed);
    for at in 0..clusters {
        let byte = random.draw();
        let bytes: Vec<u8> = (0..size).map(|at| (byte ^ (at / 512)) as u8).collect();
        lane.write(at * size, &bytes);
    }
    lane.flush();
}

/// Snapshots share most, some or nothing with the disk and with each other, and their tables lie behind all else.
#[test]
fn compaction_moves_what_snapshots_use_in_images_of_many_shapes() {
    let shapes = [
        ("cluster_size=512", 512, 1500),
        ("cluster_size=512,refcount_bits=2", 512, 600),
        ("cluster_size=4k", 4096, 600),
        ("cluster_size=4k,compat=0.10", 4096, 300),
        ("cluster_size=64k", 65536, 100),
        ("cluster_size=2M", 2 << 20, 8),
        ("cluster_size=16k,extended_l2=on", 16384, 200),
    ];
    for (format, size, clusters) in shapes {
        let folder = Folder::new();
        folder.qemu_create(IMAGE, format, &(size * clusters).to_string());
        change(&folder, &options(), |lane| write_all(lane, clusters, size, 1));
        take(&folder, "gone");
        change(&folder, &options(), |lane| write_all(lane, clusters, size, 2));
        take(&folder, "first");
        change(&folder, &options(), |lane| {
            lane.discard(clusters / 3 * size, clusters / 3 * size);
            lane.write(0, &vec![7; (clusters / 4 * size) as usize]);
            lane.flush();
        });
        take(&folder, "second");
        change(&folder, &options(), |lane| {
            lane.discard(clusters / 2 * size, clusters / 4 * size);
            lane.write(0, &vec![8; (clusters / 8 * size) as usize]);
            lane.flush();
        });
        forget(&folder, "gone");
        let before = std::fs::metadata(folder.path(IMAGE)).expect("an image").len();
        compact_with(&folder, &["first", "second"], format);
        let after = std::fs::metadata(folder.path(IMAGE)).expect("an image").len();
        assert!(after < before * 4 / 5, "{format}: {after} of {before} bytes");
        // It is as good as any other image: what is shared is written and freed as before.
        change(&folder, &options(), |lane| write_all(lane, clusters, size, 3));
        folder.assert_flawless(IMAGE, false);
        forget(&folder, "first");
        folder.assert_flawless(IMAGE, false);
        compact_with(&folder, &["second"], format);
    }
}

/// QEMU's snapshots share L2 tables with the disk until it writes there.
#[test]
fn compaction_moves_tables_that_snapshots_of_qemu_share_with_the_disk() {
    for seed in 0..16 {
        let random = &mut Random::new(seed);
        let folder = Folder::new();
        let cluster = random.pick(&[512, 1024, 4096, 65536]);
        let mut format = format!("cluster_size={cluster}");
        if random.below(2) == 0 {
            std::fs::write(folder.path("base.raw"), vec![0xBA; 600 << 10]).expect("a base");
            format += ",backing_file=base.raw,backing_fmt=raw";
        }
        folder.qemu_create(IMAGE, &format, "1M");
        let names = ["a", "b", "c", "d"];
        for name in names {
            folder.scribble_by_qemu(IMAGE, 1 << 20, random, 60);
            folder.qemu_img(&["snapshot", "-c", name, IMAGE]);
        }
        let changes = random.pick(&[0, 0, 3, 40]);
        folder.scribble_by_qemu(IMAGE, 1 << 20, random, changes);
        folder.qemu_img(&["snapshot", "-d", "a", IMAGE]);
        if seed % 3 == 0 {
            folder.qemu_img(&["snapshot", "-a", "c", IMAGE]);
        }
        let what = format!("seed {seed}: {format}");
        compact_with(&folder, &names[1..], &what);
        // QEMU goes on with it.
        folder.scribble_by_qemu(IMAGE, 1 << 20, random, 30);
        folder.qemu_img(&["snapshot", "-d", "b", IMAGE]);
        folder.assert_flawless(IMAGE, false);
    }
}

#[test]
fn compaction_encrypts_what_snapshots_use_for_its_new_place() {
    let folder = Folder::new();
    folder.create_encrypted(IMAGE, "cluster_size=4k", "2M");
    let open = OpenOptions {
        secret: secret(),
        ..options()
    };
    change(&folder, &open, |lane| write_all(lane, 256, 4096, 1));
    change(&folder, &open, |lane| write_all(lane, 256, 4096, 2));
    take(&folder, "one");
    change(&folder, &open, |lane| {
        lane.discard(0, 1 << 20);
        lane.write(1 << 20, &[9; 256 << 10]);
    });
    take(&folder, "two");
    forget(&folder, "one");
    // The snapshot is read by making the disk what it was.
    let content = |folder: &Folder| {
        std::fs::copy(folder.path(IMAGE), folder.path("copy.qcow2")).expect("a copy");
        let which = SnapshotSelector::Name("two".to_owned());
        apply_snapshot(&folder.path("copy.qcow2"), &which).expect("an application");
        folder.qemu_reads("copy.qcow2")
    };
    let before = content(&folder);
    compact_wholly(&folder, SECRET);
    assert_same(&content(&folder), &before, "the snapshot");
}
