//! Persistent bitmaps that are kept while a disk is written, beside QEMU's: the same bits, and each reads what the other stored.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::bitmap_bits::{Bits, bitmaps};
use crate::common::{Folder, Lane, close, open};
use block::Disk;
use block::ring::RingKind;
use qcow::format::BitmapFlags;
use qcow::{BitmapChange, BitmapStorage, DiskSize, OpenOptions, SnapshotSelector};
use ringdisk_gen::Random;

const SIZE: u64 = 24 << 20;

fn stored(storage: BitmapStorage) -> OpenOptions {
    OpenOptions {
        bitmaps: storage,
        ..OpenOptions::default()
    }
}

fn found(path: &Path) -> BTreeMap<String, Bits> {
    bitmaps(&std::fs::read(path).expect("the image"))
}

fn flags_of(path: &Path, name: &str) -> BitmapFlags {
    found(path)[name].flags
}

/// The numbers of the bits that are set.
fn set(path: &Path, name: &str) -> Vec<u64> {
    let found = found(path);
    let bits = (0..).zip(&found[name].bits);
    bits.filter(|(_, is_set)| **is_set).map(|(bit, _)| bit).collect()
}

/// An image with bitmaps of two granularities that record changes, and one that does not.
fn image(folder: &Folder, options: &str, size: &str) -> std::path::PathBuf {
    folder.qemu_create("disk.qcow2", options, size);
    for (name, granularity) in [("fine", "512"), ("coarse", "64k")] {
        folder.qemu_img(&["bitmap", "--add", "-g", granularity, "disk.qcow2", name]);
    }
    folder.qemu_img(&["bitmap", "--add", "--disable", "disk.qcow2", "off"]);
    folder.path("disk.qcow2")
}

/// A change by a queue of ours.
type Change = Box<dyn Fn(&Lane)>;

/// Commands for `qemu-io`, and the same by a queue of ours.
fn changes(random: &mut Random, cluster: u64) -> (Vec<String>, Vec<Change>) {
    let (mut commands, mut ours) = (Vec::new(), Vec::<Change>::new());
    for _ in 0..6 {
        let most = random.pick(&[1, 100, 2000]);
        let len = 512 * (1 + random.below(most));
        let at = 512 * random.below((SIZE - len) / 512 + 1);
        match random.below(6) {
            0 => {
                commands.push(format!("write -q -z {at} {len}"));
                ours.push(Box::new(move |lane| lane.write_zeroes(at, len, false)));
            }
            1 => {
                commands.push(format!("write -q -z -u {at} {len}"));
                ours.push(Box::new(move |lane| lane.write_zeroes(at, len, true)));
            }
            2 => {
                // QEMU marks also the parts of clusters, which it does not discard.
                let (at, len) = (at / cluster * cluster, len.next_multiple_of(cluster));
                let len = len.min(SIZE - at);
                commands.push(format!("discard -q {at} {len}"));
                ours.push(Box::new(move |lane| lane.discard(at, len)));
            }
            _ => {
                let byte = 1 + random.below(200) as u8;
                commands.push(format!("write -q -P {byte} {at} {len}"));
                ours.push(Box::new(move |lane| lane.write(at, &vec![byte; len as usize])));
            }
        }
    }
    (commands, ours)
}

/// Ours on one copy and QEMU's on the other, in turns: also each on the other's. The bits are the same, and no cluster is lost.
#[test]
fn kept_bitmaps_have_the_bits_of_qemus() {
    for seed in 0..12 {
        let random = &mut Random::new(seed);
        let folder = Folder::new();
        let cluster = random.pick(&[512, 4096, 65536]);
        let path = image(&folder, &format!("cluster_size={cluster}"), &SIZE.to_string());
        let storage = random.pick(&[BitmapStorage::Close, BitmapStorage::Durable]);
        for round in 0..4 {
            let what = format!("seed {seed}, {cluster}, {storage:?}, round {round}");
            std::fs::copy(&path, folder.path("theirs.qcow2")).expect("a copy");
            let (commands, ours) = changes(random, cluster);
            let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
            folder.qemu_io("qcow2", "theirs.qcow2", &commands);
            let disk = open(&path, &stored(storage));
            let lane = Lane::new(&disk, random.pick(&[RingKind::IoUring, RingKind::Syscalls]));
            for change in &ours {
                change(&lane);
            }
            let in_use = flags_of(&path, "fine").contains(BitmapFlags::IN_USE);
            assert_eq!(in_use, storage == BitmapStorage::Close, "{what}");
            lane.settle();
            drop(lane);
            close(disk);
            assert!(found(&path) == found(&folder.path("theirs.qcow2")), "{what}");
            folder.assert_flawless("disk.qcow2", false);
            // QEMU loads all of them, and what it finds is what a merge of it has.
            folder.qemu_img(&["bitmap", "--merge", "fine", "disk.qcow2", "off"]);
            assert_eq!(set(&path, "fine"), set_as(&path, "off", "fine"), "{what}");
            folder.qemu_img(&["bitmap", "--clear", "disk.qcow2", "off"]);
            if random.one_in(2) {
                std::fs::copy(folder.path("theirs.qcow2"), &path).expect("a copy");
            }
        }
    }
}

/// The bits of `name` that are set, of those that `like` could have: `name` is coarser.
fn set_as(path: &Path, name: &str, like: &str) -> Vec<u64> {
    let found = found(path);
    let (coarse, fine) = (&found[name], &found[like]);
    let set: Vec<u64> = set(path, like);
    let ratio = coarse.granularity / fine.granularity;
    for (bit, is_set) in (0..).zip(&coarse.bits) {
        assert_eq!(
            *is_set,
            set.iter().any(|fine| fine / ratio == bit),
            "bit {bit} of {name}"
        );
    }
    set
}

/// A killed server: what is stored of durable bitmaps has its changes, and records more after the next open; others are in use.
#[test]
fn killed_server_leaves_durable_bitmaps_with_every_change() {
    for storage in [BitmapStorage::Close, BitmapStorage::Durable] {
        let folder = Folder::new();
        let path = image(&folder, "", "64M");
        folder.qemu_io("qcow2", "disk.qcow2", &["write -P 1 0 1M", "write -P 1 40M 1M"]);
        for name in ["fine", "coarse"] {
            folder.qemu_img(&["bitmap", "--clear", "disk.qcow2", name]);
        }
        let disk = open(&path, &stored(storage));
        let lane = Lane::new(&disk, RingKind::IoUring);
        lane.write(512, &[2; 512]);
        lane.write(20 << 20, &[2; 65536]);
        lane.flush();
        let killed = std::fs::read(&path).expect("the image");
        lane.settle();
        drop(lane);
        close(disk);
        std::fs::write(&path, killed).expect("a file");
        let is_durable = storage == BitmapStorage::Durable;
        for name in ["fine", "coarse"] {
            assert_eq!(flags_of(&path, name).contains(BitmapFlags::IN_USE), !is_durable);
        }
        folder.assert_flawless("disk.qcow2", true);
        if !is_durable {
            continue;
        }
        let (first, second) = (set(&path, "coarse"), set(&path, "fine"));
        assert!(
            first.contains(&0) && first.contains(&320) && second.contains(&1),
            "{first:?}"
        );
        assert!(
            first.iter().all(|bit| *bit < 64 || *bit == 320),
            "one region in place: {first:?}"
        );
        // QEMU goes on with it, and then this engine.
        folder.qemu_io("qcow2", "disk.qcow2", &["write -P 3 60M 512"]);
        assert!(set(&path, "coarse").contains(&960));
        let disk = open(&path, &stored(storage));
        let lane = Lane::new(&disk, RingKind::IoUring);
        lane.write(50 << 20, &[2; 512]);
        lane.settle();
        drop(lane);
        close(disk);
        let now = set(&path, "coarse");
        assert!([0, 320, 800, 960].iter().all(|bit| now.contains(bit)), "{now:?}");
        folder.qemu_img(&["check", "-q", "-r", "leaks", "disk.qcow2"]);
        folder.assert_flawless("disk.qcow2", false);
    }
}

/// The new part has no bits until it is written. Bitmaps that do not record changes fit the disk again.
#[test]
fn grown_disk_keeps_its_bitmaps() {
    for storage in [BitmapStorage::Close, BitmapStorage::Durable] {
        for written_before in [false, true] {
            let folder = Folder::new();
            let path = image(&folder, "cluster_size=4k", "8M");
            let disk = open(&path, &stored(storage));
            let lane = Lane::new(&disk, RingKind::IoUring);
            if written_before {
                lane.write(0, &[1; 512]);
            }
            let grown = lane.cx.block_on(Arc::clone(&disk).resize(&lane.cx, 160 << 20));
            grown.expect("the ring turns").expect("growth");
            assert!(flags_of(&path, "off").contains(BitmapFlags::IN_USE), "as of now");
            lane.write(128 << 10, &[1; 512]);
            lane.write(159 << 20, &[1; 512]);
            let is_durable = storage == BitmapStorage::Durable;
            let in_use = flags_of(&path, "coarse").contains(BitmapFlags::IN_USE);
            assert_eq!(
                in_use, !is_durable,
                "the first change after the growth makes it durable again"
            );
            lane.settle();
            drop(lane);
            close(disk);
            let expected: &[u64] = if written_before { &[0, 2, 2544] } else { &[2, 2544] };
            assert_eq!(set(&path, "coarse"), expected, "{storage:?}");
            assert_eq!(set(&path, "off"), [0_u64; 0]);
            assert!(
                found(&path)
                    .values()
                    .all(|bitmap| !bitmap.flags.contains(BitmapFlags::IN_USE))
            );
            folder.assert_flawless("disk.qcow2", false);
            folder.qemu_img(&["bitmap", "--enable", "disk.qcow2", "off"]);
            folder.qemu_io("qcow2", "disk.qcow2", &["write -P 3 100M 512"]);
            assert!(set(&path, "coarse").contains(&1600));
        }
    }
}

/// The bits of what a disk keeps stay, also those of changes after it became smaller. Bits past its end are gone: they would be of
/// bytes that it gets when it grows.
#[test]
fn shrunk_disk_keeps_the_bits_of_what_is_left() {
    for storage in [BitmapStorage::Close, BitmapStorage::Durable] {
        let folder = Folder::new();
        let path = image(&folder, "", "64M");
        let disk = open(&path, &stored(storage));
        let lane = Lane::new(&disk, RingKind::IoUring);
        for at in [0, 10, 11, 30, 63] {
            lane.write(at << 20, &[1; 512]);
        }
        let shrunk = lane.cx.block_on(disk.shrink(&lane.cx, (10 << 20) + 512));
        shrunk.expect("the ring turns").expect("a smaller disk");
        for name in ["fine", "coarse", "off"] {
            assert!(flags_of(&path, name).contains(BitmapFlags::IN_USE), "{name}");
        }
        lane.write(5 << 20, &[2; 512]);
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert_eq!(set(&path, "fine"), [0, 5 << 11, 10 << 11], "{storage:?}");
        assert_eq!(set(&path, "coarse"), [0, 5 << 4, 10 << 4], "{storage:?}");
        assert_eq!(found(&path)["off"].bits.len(), 161);
        // QEMU refuses bitmaps of another size than the disk's, and shows as clear what is new.
        folder.qemu_img(&["resize", "-q", "disk.qcow2", "64M"]);
        assert_eq!(set(&path, "fine"), [0, 5 << 11, 10 << 11], "{storage:?}");
        let disk = open(&path, &stored(storage));
        let lane = Lane::new(&disk, RingKind::IoUring);
        lane.write(63 << 20, &[3; 512]);
        lane.settle();
        drop(lane);
        close(disk);
        assert_eq!(
            set(&path, "fine"),
            [0, 5 << 11, 10 << 11, 63 << 11],
            "{storage:?}"
        );
        folder.assert_flawless("disk.qcow2", false);
    }
}

/// A change of the bitmaps of a disk that is written: it has the bits so far, and recording goes on.
#[test]
fn changed_bitmaps_of_a_served_disk_keep_their_bits() {
    for storage in [BitmapStorage::Close, BitmapStorage::Durable] {
        let folder = Folder::new();
        let path = image(&folder, "", "64M");
        let disk = open(&path, &stored(storage));
        let lane = Lane::new(&disk, RingKind::IoUring);
        let cx = lane.cx.clone();
        let change = |name: &str, change: BitmapChange| {
            let changed = cx.block_on(disk.change_bitmap(&cx, name, &change));
            changed.expect("the ring turns").expect("a change");
        };
        lane.write(0, &[1; 512]);
        let granularity = Some(65536);
        let add = |enabled| BitmapChange::Add { granularity, enabled };
        change("new", add(true));
        assert_eq!(set(&path, "coarse"), [0]);
        lane.write(1 << 20, &[1; 512]);
        change("coarse", BitmapChange::Disable);
        lane.write(2 << 20, &[1; 512]);
        change(
            "off",
            BitmapChange::Merge {
                source: "coarse".to_owned(),
            },
        );
        change("coarse", BitmapChange::Enable);
        lane.write(3 << 20, &[1; 512]);
        change("new", BitmapChange::Clear);
        lane.write(4 << 20, &[1; 512]);
        lane.settle();
        drop(lane);
        close(disk);
        assert_eq!(set(&path, "coarse"), [0, 16, 48, 64], "{storage:?}");
        assert_eq!(set(&path, "off"), [0, 16], "{storage:?}");
        assert_eq!(set(&path, "new"), [64], "{storage:?}");
        folder.assert_flawless("disk.qcow2", false);
    }
}

/// A snapshot of another size, over bitmaps of all kinds: those that record changes have all bits set, the others fit the disk.
#[test]
fn applied_snapshot_of_another_size_fits_the_bitmaps() {
    for (size, storage) in [("1M", BitmapStorage::Close), ("3M", BitmapStorage::Durable)] {
        let folder = Folder::new();
        folder.qemu_create("disk.qcow2", "cluster_size=512", "2M");
        let path = folder.path("disk.qcow2");
        folder.qemu_img(&["snapshot", "-c", "s", "disk.qcow2"]);
        folder.qemu_img(&["resize", "-q", "--shrink", "disk.qcow2", size]);
        folder.qemu_img(&["bitmap", "--add", "-g", "512", "disk.qcow2", "on"]);
        folder.qemu_img(&["bitmap", "--add", "-g", "512", "disk.qcow2", "off"]);
        folder.qemu_io(
            "qcow2",
            "disk.qcow2",
            &["write -P 1 256k 512", "write -P 1 900k 64k"],
        );
        folder.qemu_img(&["bitmap", "--disable", "disk.qcow2", "off"]);
        let before = set(&path, "off");
        let disk = open(&path, &stored(storage));
        let lane = Lane::new(&disk, RingKind::IoUring);
        lane.write(0, &[1; 512]);
        let cx = lane.cx.clone();
        let which = SnapshotSelector::Name("s".to_owned());
        let applied = cx.block_on(disk.apply_snapshot(&cx, &which, DiskSize::MayChange));
        applied.expect("the ring turns").expect("an application");
        lane.settle();
        drop(lane);
        assert_eq!(set(&path, "on").len(), 4096, "{size}");
        assert_eq!(set(&path, "off"), before);
        close(disk);
        assert_eq!(set(&path, "on").len(), 4096, "{size}");
        folder.assert_flawless("disk.qcow2", false);
        folder.qemu_img(&["bitmap", "--enable", "disk.qcow2", "off"]);
    }
}

/// Bits that do not fit the memory are not loaded: the bitmap is in use from the first change on.
#[test]
fn bitmap_larger_than_the_memory_is_marked_in_use() {
    let folder = Folder::new();
    folder.qemu_create("disk.qcow2", "", "4G");
    let path = folder.path("disk.qcow2");
    folder.qemu_img(&["bitmap", "--add", "-g", "512", "disk.qcow2", "huge"]);
    folder.qemu_img(&["bitmap", "--add", "-g", "64k", "disk.qcow2", "small"]);
    for storage in [BitmapStorage::Close, BitmapStorage::Durable] {
        let options = OpenOptions {
            bitmaps_memory_bytes: 1 << 20,
            ..stored(storage)
        };
        let disk = open(&path, &options);
        let lane = Lane::new(&disk, RingKind::IoUring);
        lane.write(0, &[1; 512]);
        assert!(flags_of(&path, "huge").contains(BitmapFlags::IN_USE));
        lane.settle();
        drop(lane);
        close(disk);
        assert!(flags_of(&path, "huge").contains(BitmapFlags::IN_USE));
        assert_eq!(flags_of(&path, "small"), BitmapFlags::AUTO);
        assert_eq!(set(&path, "small"), [0]);
        folder.assert_flawless("disk.qcow2", false);
    }
}

/// Memory is not chosen by the number of bitmaps: those that do not fit are in use before the guest's change, which is made, and the
/// others are kept.
#[test]
fn many_bitmaps_take_no_more_than_their_memory() {
    const COUNT: usize = 100;
    let folder = Folder::new();
    folder.qemu_create("disk.qcow2", "", "64M");
    let path = folder.path("disk.qcow2");
    for number in 0..COUNT {
        let add = BitmapChange::Add {
            granularity: Some(64 << 10),
            enabled: true,
        };
        qcow::offline::change_bitmap(&path, &format!("b{number}"), &add).expect("a bitmap");
    }
    let before = std::fs::read(&path).expect("the image");
    // Too few for the directory; for some bitmaps; for all.
    for (memory, kept) in [(1 << 10, 0..1), (64 << 10, 1..COUNT), (1 << 20, COUNT..COUNT + 1)] {
        std::fs::write(&path, &before).expect("a file");
        let options = OpenOptions {
            bitmaps_memory_bytes: memory,
            ..OpenOptions::default()
        };
        let disk = open(&path, &options);
        let lane = Lane::new(&disk, RingKind::Syscalls);
        lane.write(0, &[2; 512]);
        assert!(lane.read(0, 512) == [2; 512]);
        lane.settle();
        drop(lane);
        close(disk);
        let found = found(&path);
        assert_eq!(found.len(), COUNT);
        let is_kept = |bitmap: &&Bits| !bitmap.flags.contains(BitmapFlags::IN_USE);
        let all_kept: Vec<&Bits> = found.values().filter(is_kept).collect();
        assert!(kept.contains(&all_kept.len()), "{memory}: {}", all_kept.len());
        assert!(all_kept.iter().all(|bitmap| bitmap.bits[0]), "{memory}");
        folder.assert_flawless("disk.qcow2", false);
    }
}
