//! Snapshots that are opened as disks, to be read: through the library, beside what QEMU reads of them.

use std::sync::Arc;

use crate::common::{Folder, Lane, assert_same, chain, close, open, patch, u64_at};
use crate::snapshot_shapes::{IMAGE, change, create_on, name, options, qemu_reads, shapes};
use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Disk, IoError, Op};
use qcow::{OpenOptions, QcowDisk, SnapshotSelector};

fn exported(which: SnapshotSelector) -> OpenOptions {
    OpenOptions {
        read_only: true,
        snapshot: Some(which),
        ..options()
    }
}

fn whole(disk: &Arc<QcowDisk>, ring: RingKind) -> Vec<u8> {
    let lane = Lane::new(disk, ring);
    lane.read(0, disk.info().size_bytes)
}

#[track_caller]
fn refused(folder: &Folder, options: &OpenOptions) -> String {
    let error = QcowDisk::open(&folder.path(IMAGE), options).expect_err("it cannot be opened");
    chain(&error)
}

#[test]
fn snapshot_of_every_shape_is_read_as_qemu_reads_it_and_not_written() {
    for shape in shapes() {
        let what = shape.to_string();
        let folder = Folder::new();
        shape.make(&folder);
        let mut snapshots = Vec::new();
        // As QEMU left it: compressed and zero clusters, and what lies below. Two compressed clusters share one whose count
        // has two bits.
        if shape.bits > 2 {
            folder.qemu_img(&["snapshot", "-c", "zero", IMAGE]);
            snapshots.push("zero");
        }
        let disk = open(&folder.path(IMAGE), &options());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        change(&lane, &shape, 0x41);
        create_on(&lane.cx, &disk, "one").unwrap_or_else(|error| panic!("{what}: {error}"));
        snapshots.push("one");
        change(&lane, &shape, 0x42);
        let active = lane.read(0, shape.disk());
        lane.settle();
        drop(lane);
        close(disk);
        let path = folder.path(IMAGE);
        let before = std::fs::read(&path).expect("an image");
        for (index, snapshot) in snapshots.iter().enumerate() {
            let expected = qemu_reads(&folder, snapshot);
            assert!(expected != active, "{what}: the disk has changed");
            for (which, ring) in [
                (name(snapshot), RingKind::IoUring),
                (SnapshotSelector::Id((index + 1).to_string()), RingKind::Syscalls),
            ] {
                let disk = open(&path, &exported(which));
                let info = disk.info();
                assert!(info.read_only && !info.discard && !info.write_zeroes);
                assert_same(&whole(&disk, ring), &expected, &format!("{what}: {snapshot}"));
                let lane = Lane::new(&disk, ring);
                let bytes = AlignedBuf::from_slice(&[0x77; 512]).into();
                let write = Op::Write { fua: false };
                assert_eq!(lane.ask(write, 0, 512, bytes).result, Err(IoError::ReadOnly));
                let discarded = lane.ask(Op::Discard, 0, 512, Buffer::default()).result;
                assert_eq!(discarded, Err(IoError::ReadOnly));
                lane.flush();
                lane.settle();
                drop(lane);
                close(disk);
            }
        }
        assert!(
            std::fs::read(&path).expect("an image") == before,
            "{what}: it has changed"
        );
    }
}

/// The disk may be larger or smaller now, and below it may lie an image that has such a snapshot, too.
#[test]
fn snapshot_has_its_own_size_and_is_that_of_the_uppermost_image() {
    let folder = Folder::new();
    folder.qemu_create("base.qcow2", "cluster_size=4096", "256k");
    folder.qemu_io("qcow2", "base.qcow2", &["write -P 17 0 256k"]);
    folder.qemu_img(&["snapshot", "-c", "s", "base.qcow2"]);
    folder.qemu_io("qcow2", "base.qcow2", &["write -P 18 0 64k"]);
    let options = "cluster_size=512,backing_file=base.qcow2,backing_fmt=qcow2";
    folder.qemu_create(IMAGE, options, "192k");
    folder.qemu_io("qcow2", IMAGE, &["write -P 34 128k 1k"]);
    folder.qemu_img(&["snapshot", "-c", "small", IMAGE]);
    folder.qemu_img(&["resize", "-q", IMAGE, "512k"]);
    folder.qemu_io("qcow2", IMAGE, &["write -P 35 128k 2k", "write -P 36 500k 12k"]);
    folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
    folder.qemu_img(&["resize", "-q", "--shrink", "-f", "qcow2", IMAGE, "64k"]);
    folder.qemu_io("qcow2", IMAGE, &["write -P 37 0 64k"]);
    let mut small = vec![17; 192 << 10];
    small[..64 << 10].fill(18);
    small[128 << 10..129 << 10].fill(34);
    let mut large = vec![17; 512 << 10];
    large[..64 << 10].fill(18);
    large[128 << 10..130 << 10].fill(35);
    // What the disk grew by reads as zeros, whatever lies below.
    large[192 << 10..].fill(0);
    large[500 << 10..].fill(36);
    for (snapshot, expected) in [("small", &small), ("s", &large)] {
        let disk = open(&folder.path(IMAGE), &exported(name(snapshot)));
        assert_eq!(disk.info().size_bytes, expected.len() as u64);
        assert_same(&whole(&disk, RingKind::Syscalls), expected, snapshot);
        let lane = Lane::new(&disk, RingKind::Syscalls);
        assert_eq!(
            lane.try_read(expected.len() as u64, 512),
            Err(IoError::OutOfRange)
        );
        lane.settle();
        drop(lane);
        close(disk);
    }
    // The image below has it, and the one above does not.
    folder.qemu_img(&["snapshot", "-d", "s", IMAGE]);
    let error = refused(&folder, &exported(name("s")));
    assert!(
        error.ends_with("disk.qcow2: there is no snapshot name=s"),
        "{error}"
    );
}

#[test]
fn snapshot_that_cannot_be_shown_is_refused_by_name() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "", "1M");
    let error = refused(&folder, &exported(name("twice")));
    assert!(error.ends_with("there is no snapshot name=twice"), "{error}");
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 64k"]);
    for snapshot in ["twice", "twice"] {
        folder.qemu_img(&["snapshot", "-c", snapshot, IMAGE]);
    }
    let error = refused(&folder, &exported(name("twice")));
    assert!(
        error.contains("may mean 2 snapshots; select one by id=, such as id=1"),
        "{error}"
    );
    let writing = OpenOptions {
        read_only: false,
        ..exported(SnapshotSelector::Id("1".to_owned()))
    };
    let error = refused(&folder, &writing);
    assert!(
        error.contains("its snapshot id=1 can only be read; open it read-only"),
        "{error}"
    );
    let path = folder.path(IMAGE);
    let (entry, len) = (
        u64_at(&path, 64),
        std::fs::metadata(&path).expect("an image").len(),
    );
    let past = (len.div_ceil(64 << 10) + 1) << 16;
    for (at, value, said) in [
        (entry, past, "is damaged: it has 1 entries, and the file"),
        (entry, 0x123, "L1 table at 0x123 is damaged"),
        (
            entry + 48,
            1 << 62,
            "its disk has 4611686018427387904 bytes; expected at most",
        ),
    ] {
        let before = u64_at(&path, at);
        patch(&path, at, &u64::to_be_bytes(value));
        let error = refused(&folder, &exported(SnapshotSelector::Id("1".to_owned())));
        assert!(error.contains(said), "{error}");
        patch(&path, at, &before.to_be_bytes());
    }
    patch(&path, entry + 36, &u32::MAX.to_be_bytes());
    let error = refused(&folder, &exported(SnapshotSelector::Id("1".to_owned())));
    assert!(error.contains("extra_data_size"), "{error}");
}

/// Others may read the image meanwhile, or show another of its snapshots; nobody may write it.
#[test]
fn snapshot_locks_the_image_as_a_reader() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "", "1M");
    folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
    let disk = open(&folder.path(IMAGE), &exported(name("s")));
    let other = open(&folder.path(IMAGE), &exported(name("s")));
    let error = refused(&folder, &options());
    assert!(error.contains("locked"), "{error}");
    let denied = std::process::Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", "write 0 64k", IMAGE])
        .current_dir(folder.path(""))
        .output()
        .expect("qemu-io");
    assert!(!denied.status.success(), "{denied:?}");
    folder.assert_flawless(IMAGE, false);
    close(other);
    close(disk);
}
