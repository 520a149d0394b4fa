//! Images with extended L2 entries, beside QEMU's tools: the same bytes, the same verdicts, and damaged bitmaps.

use crate::common::{Folder, Lane, assert_same, close, open, patch, u64_at};
use block::ring::RingKind;
use block::{AlignedBuf, IoError, Op};
use qcow::OpenOptions;
use ringdisk_gen::Random;

const DISK: u64 = 3 << 20;

/// A disk of QEMU's with subclusters of every kind, compressed clusters, and perhaps a backing file and a snapshot.
fn scribbled(random: &mut Random) -> Folder {
    let folder = Folder::new();
    let cluster = random.pick(&["16k", "64k", "128k", "2M"]);
    let options = format!("extended_l2=on,cluster_size={cluster}");
    let size = DISK.to_string();
    let mut args = vec!["create", "-q", "-f", "qcow2", "-o", &options];
    if random.one_in(2) {
        let bytes: Vec<u8> = (0..DISK - 512 * 7)
            .map(|at| 201 + (at / 512 % 50) as u8)
            .collect();
        std::fs::write(folder.path("base.raw"), bytes).expect("a base");
        args.extend(["-b", "base.raw", "-F", "raw"]);
    }
    args.extend(["disk.qcow2", &size]);
    folder.qemu_img(&args);
    folder.qemu_io("qcow2", "disk.qcow2", &["write -q -c -P 7 0 2M"]);
    folder.scribble_by_qemu("disk.qcow2", DISK, random, 12);
    if random.one_in(2) {
        folder.qemu_img(&["snapshot", "-c", "before", "disk.qcow2"]);
        folder.scribble_by_qemu("disk.qcow2", DISK, random, 6);
    }
    folder
}

#[test]
fn reads_agree_with_qemu_on_random_subclusters() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let folder = scribbled(&mut random);
        let expected = folder.qemu_reads("disk.qcow2");
        let options = OpenOptions {
            read_only: true,
            backing_files: true,
            direct: random.one_in(2),
            ..OpenOptions::default()
        };
        let disk = open(&folder.path("disk.qcow2"), &options);
        let lane = Lane::new(&disk, RingKind::IoUring);
        assert_same(&lane.read(0, DISK), &expected, &format!("seed {seed}"));
        for _ in 0..100 {
            let first = random.below(DISK / 512);
            let most = random.pick(&[1, 8, 300]);
            let count = 1 + random.below(most).min(DISK / 512 - first - 1);
            let (first, end) = (first * 512, (first + count) * 512);
            let found = lane.read(first, end - first);
            let what = format!("seed {seed}, {first:#x}..{end:#x}");
            assert_same(&found, &expected[first as usize..end as usize], &what);
        }
        lane.settle();
        drop(lane);
        close(disk);
    }
}

/// A bad bit is an error for the whole cluster, as in QEMU, also if another subcluster is read.
#[test]
fn read_fails_for_a_cluster_with_contradictory_bitmap() {
    let folder = Folder::new();
    folder.qemu_create("disk.qcow2", "extended_l2=on", "1M");
    folder.qemu_io("qcow2", "disk.qcow2", &["write -q -P 1 0 128k"]);
    let (path, table) = (folder.path("disk.qcow2"), folder.first_table("disk.qcow2"));
    let (entry, bitmap) = (u64_at(&path, table), u64_at(&path, table + 8));
    assert_eq!(bitmap, 0xFFFF_FFFF);
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let cases = [
        ("both kinds", entry, bitmap | 1 << 63),
        ("no host cluster", 0, 1),
        ("reserved bits", entry | 4, bitmap),
    ];
    for (what, entry, bitmap) in cases {
        patch(&path, table, &entry.to_be_bytes());
        patch(&path, table + 8, &bitmap.to_be_bytes());
        let disk = open(&path, &options);
        let lane = Lane::new(&disk, RingKind::Syscalls);
        assert_eq!(lane.try_read(4096, 512), Err(IoError::Corrupt), "{what}");
        assert_eq!(lane.read(64 << 10, 512), [1; 512], "{what}");
        drop(lane);
        close(disk);
    }
}

/// The header is marked, and what is sound goes on being read.
#[test]
fn write_through_contradictory_bitmap_marks_the_image_corrupt() {
    let folder = Folder::new();
    folder.qemu_create("disk.qcow2", "extended_l2=on", "1M");
    folder.qemu_io("qcow2", "disk.qcow2", &["write -q -P 1 0 128k"]);
    let (path, table) = (folder.path("disk.qcow2"), folder.first_table("disk.qcow2"));
    patch(&path, table + 8, &(0xFFFF_FFFF_u64 | 1 << 40).to_be_bytes());
    let disk = open(&path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::Syscalls);
    let bytes = AlignedBuf::from_slice(&[9; 512]).into();
    let written = lane.ask(Op::Write { fua: false }, 4096, 512, bytes);
    assert_eq!(written.result, Err(IoError::Corrupt));
    assert_eq!(lane.read(64 << 10, 512), [1; 512]);
    lane.settle();
    drop(lane);
    close(disk);
    assert_eq!(u64_at(&path, 72), 1 << 4 | 1 << 1, "extended L2 entries, corrupt");
}

/// The disk ends in the middle of a subcluster, before its backing file does.
#[test]
fn growth_hides_a_longer_backing_file_by_subclusters() {
    for written in [false, true] {
        let folder = Folder::new();
        std::fs::write(folder.path("base.raw"), vec![0xBB; 1 << 20]).expect("a base");
        let old = (200 << 10) + 512;
        folder.qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "extended_l2=on",
            "-b",
            "base.raw",
            "-F",
            "raw",
            "disk.qcow2",
            &old.to_string(),
        ]);
        let path = folder.path("disk.qcow2");
        let options = OpenOptions {
            backing_files: true,
            ..OpenOptions::default()
        };
        let disk = open(&path, &options);
        let lane = Lane::new(&disk, RingKind::Syscalls);
        if written {
            lane.write(old - 512, &[0x11; 512]);
        }
        let grown = lane.cx.block_on(disk.grow(&lane.cx, 900 << 10));
        grown.expect("the ring turns").expect("a larger disk");
        let mut expected = vec![0; 900 << 10];
        expected[..old as usize].fill(0xBB);
        if written {
            expected[old as usize - 512..old as usize].fill(0x11);
        }
        assert_same(&lane.read(0, 900 << 10), &expected, "the grown disk");
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert_same(&folder.qemu_reads("disk.qcow2"), &expected, "QEMU's");
    }
}

/// Method: QEMU makes an image, our engine changes it while a snapshot of QEMU's shares its clusters, QEMU changes the
/// result, and so on; each reads what the other wrote, and the snapshot keeps its bytes.
#[test]
fn changes_by_qemu_and_by_us_take_turns() {
    for seed in 100..112 {
        let mut random = Random::new(seed);
        let folder = scribbled(&mut random);
        let mut expected = folder.qemu_reads("disk.qcow2");
        folder.qemu_img(&["snapshot", "-c", "turn", "disk.qcow2"]);
        let before = expected.clone();
        let options = OpenOptions {
            backing_files: true,
            direct: random.one_in(2),
            discard_no_unref: random.one_in(3),
            ..OpenOptions::default()
        };
        for turn in 0..3 {
            let disk = open(&folder.path("disk.qcow2"), &options);
            let lane = Lane::new(&disk, RingKind::IoUring);
            for _ in 0..25 {
                let first = random.below(DISK / 512);
                let most = random.pick(&[1, 4, 40, 400]);
                let count = 1 + random.below(most).min(DISK / 512 - first - 1);
                let (at, len) = (first * 512, count * 512);
                let bytes = &mut expected[at as usize..(at + len) as usize];
                match random.below(3) {
                    0 => {
                        lane.write_zeroes(at, len, random.one_in(2));
                        bytes.fill(0);
                    }
                    _ => {
                        bytes.fill(1 + random.below(200) as u8);
                        lane.write(at, bytes);
                    }
                }
            }
            lane.settle();
            drop(lane);
            close(disk);
            let what = format!("seed {seed}, turn {turn}");
            folder.assert_flawless("disk.qcow2", false);
            assert_same(&folder.qemu_reads("disk.qcow2"), &expected, &what);
            folder.scribble_by_qemu("disk.qcow2", DISK, &mut random, 4);
            expected = folder.qemu_reads("disk.qcow2");
        }
        folder.qemu_img(&["snapshot", "-a", "turn", "disk.qcow2"]);
        assert_same(
            &folder.qemu_reads("disk.qcow2"),
            &before,
            &format!("seed {seed}: the snapshot"),
        );
    }
}
