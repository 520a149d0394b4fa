//! Application of internal snapshots beside QEMU's tools: the disk, all snapshots and the image's checks before and after.

use std::path::Path;

use crate::common::{Folder, Lane, assert_same, close, open, patch, u32_at, u64_at};
use crate::snapshot_shapes::{
    IMAGE, apply, apply_on, change, create, create_on, delete, look, name, options, shapes, whole,
};
use block::ring::RingKind;
use block::{Context, Disk, IoError};
use qcow::format::SnapshotEntry;
use qcow::{DiskSize, OpenOptions, SnapshotError, SnapshotSelector};

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

fn id(text: &str) -> SnapshotSelector {
    SnapshotSelector::Id(text.to_owned())
}

#[test]
fn apply_restores_the_disk_of_every_shape_as_qemu_does() {
    for shape in shapes() {
        let what = shape.to_string();
        let folder = Folder::new();
        shape.make(&folder);
        let disk = open(&folder.path(IMAGE), &options());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        let mut taken = Vec::new();
        for (byte, snapshot) in [(0x41, "one"), (0x42, "two")] {
            change(&lane, &shape, byte);
            taken.push((snapshot, lane.read(0, shape.disk())));
            create_on(&lane.cx, &disk, snapshot).unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        let taken: Vec<(&str, &[u8])> = taken
            .iter()
            .map(|(snapshot, bytes)| (*snapshot, &**bytes))
            .collect();
        let [(_, one), (_, two)] = taken[..] else {
            panic!("two snapshots")
        };
        change(&lane, &shape, 0x43);
        // The queue that saw what the disk was sees what it has become.
        apply_on(&lane.cx, &disk, &name("one")).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_same(&lane.read(0, shape.disk()), one, &what);
        // Of what is there now.
        apply_on(&lane.cx, &disk, &name("one")).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_same(&lane.read(0, shape.disk()), one, &what);
        lane.settle();
        drop(lane);
        close(disk);
        look(&folder, one, &taken, &what);

        // The disk's changes do not reach the snapshots.
        let disk = open(&folder.path(IMAGE), &options());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        change(&lane, &shape, 0x44);
        let active = lane.read(0, shape.disk());
        lane.settle();
        drop(lane);
        close(disk);
        look(&folder, &active, &taken, &what);

        if shape.bits == 2 {
            // QEMU counts the new references before it gives up the old ones, of which there are three.
            continue;
        }
        // Ours after QEMU's, and QEMU's after ours.
        folder.qemu_img(&["snapshot", "-a", "two", IMAGE]);
        look(&folder, two, &taken, &what);
        let disk = open(&folder.path(IMAGE), &options());
        apply(&disk, &id("1")).unwrap_or_else(|error| panic!("{what}: {error}"));
        close(disk);
        look(&folder, one, &taken, &what);
        folder.qemu_img(&["snapshot", "-a", "two", IMAGE]);
        folder.qemu_img(&["snapshot", "-c", "three", IMAGE]);
        folder.qemu_img(&["snapshot", "-a", "one", IMAGE]);
        let disk = open(&folder.path(IMAGE), &options());
        apply(&disk, &name("three")).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_same(&whole(&disk), two, &what);
        for snapshot in ["one", "two", "three"] {
            delete(&disk, &name(snapshot)).unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        // The disk's tables and data are its own again.
        let lane = Lane::new(&disk, RingKind::Syscalls);
        lane.read(512, 512);
        let place = disk.cached_host_offset(512).expect("it is mapped");
        lane.write(512, &[0x43; 512]);
        assert_eq!(disk.cached_host_offset(512), Some(place), "{what}: in place");
        lane.write(512, &two[512..1024]);
        lane.settle();
        drop(lane);
        close(disk);
        look(&folder, two, &[], &what);
    }
}

/// QEMU shares the tables themselves until the disk changes.
#[test]
fn apply_copies_no_table_that_disk_and_snapshot_share() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=512", &(2 * SPAN).to_string());
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 64k"]);
    folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
    folder.qemu_io("qcow2", IMAGE, &["write -P 18 0 512"]);
    let path = folder.path(IMAGE);
    let disk = open(&path, &options());
    apply(&disk, &name("s")).expect("an application");
    close(disk);
    let theirs = entry_of(&path).1.l1_offset.bytes();
    let tables = |l1: u64| [0, 8].map(|at| u64_at(&path, l1 + at) & OFFSET);
    let [own, theirs] = [u64_at(&path, 40), theirs].map(tables);
    assert!(own[0] != theirs[0] && own[1] == theirs[1], "{own:x?} {theirs:x?}");
    let bytes = [17; 2 * SPAN as usize];
    look(&folder, &bytes, &[("s", &bytes)], "applied");
}

/// One span of an L2 table of 512-byte clusters.
const SPAN: u64 = 32 << 10;

/// A disk that was larger and smaller: a snapshot of each size, made by QEMU and ours.
#[test]
fn apply_gives_the_disk_the_size_of_the_snapshot() {
    for (first, then) in [(3 * SPAN, 7 * SPAN + 512), (7 * SPAN + 512, SPAN - 512)] {
        let folder = Folder::new();
        folder.qemu_create(IMAGE, "cluster_size=512", &first.to_string());
        let at_end = |size: u64, byte: u8| format!("write -P {byte} {} 1024", size - 1024);
        folder.qemu_io("qcow2", IMAGE, &["write -P 17 512 2048", &at_end(first, 18)]);
        folder.qemu_img(&["snapshot", "-c", "first", IMAGE]);
        let size = then.to_string();
        folder.qemu_img(&["resize", "-q", "--shrink", "-f", "qcow2", IMAGE, &size]);
        folder.qemu_io("qcow2", IMAGE, &["write -P 33 1024 512", &at_end(then, 34)]);
        let disk = open(&folder.path(IMAGE), &options());
        create(&disk, "then").expect("a snapshot");
        let now = whole(&disk);
        let mut before = vec![0; first as usize];
        before[512..2560].fill(17);
        before[first as usize - 1024..].fill(18);
        let lane = Lane::new(&disk, RingKind::Syscalls);
        lane.write(0, &[0x77; 512]);

        let cx = Context::syscalls();
        let fixed = lane
            .cx
            .block_on(disk.apply_snapshot(&lane.cx, &name("first"), DiskSize::Fixed));
        let error = fixed.expect("the ring turns").expect_err("another size");
        assert_eq!(
            error.to_string(),
            format!(
                "the snapshot is of a disk of {first} bytes, and the disk has {then} bytes: a disk that is served keeps its size; \
                 apply the snapshot to the closed image"
            )
        );
        assert_eq!(
            (lane.read(0, 512), disk.info().size_bytes),
            (vec![0x77; 512], then)
        );

        apply_on(&lane.cx, &disk, &name("first")).expect("an application");
        assert_eq!(disk.info().size_bytes, first);
        assert_same(&lane.read(0, first), &before, "before");
        assert_eq!(lane.try_read(first, 512), Err(IoError::OutOfRange));
        // Where the disk has been longer it reads as zeros when it is as long again.
        if first < then {
            let grown = lane
                .cx
                .block_on(disk.grow(&lane.cx, then))
                .expect("the ring turns");
            grown.expect("growth");
            assert!(lane.read(first, then - first).iter().all(|&byte| byte == 0));
            apply_on(&lane.cx, &disk, &name("first")).expect("an application");
        }
        lane.write(first - 512, &[0x78; 512]);
        lane.settle();
        lane.settle();
        drop(lane);
        close(disk);
        let mut active = before;
        active[first as usize - 512..].fill(0x78);
        look(&folder, &active, &[], "first");
        let disk = open(&folder.path(IMAGE), &options());
        let fixed = cx.block_on(disk.apply_snapshot(&cx, &id("2"), DiskSize::MayChange));
        fixed.expect("the ring turns").expect("an application");
        close(disk);
        look(&folder, &now, &[("then", &now)], "then");
        folder.qemu_img(&["snapshot", "-a", "first", IMAGE]);
        folder.assert_flawless(IMAGE, false);
    }
}

/// The place of the snapshot's entry, and the entry.
fn entry_of(path: &Path) -> (u64, SnapshotEntry) {
    let at = u64_at(path, 64);
    let bytes = std::fs::read(path).expect("an image");
    let entry = SnapshotEntry::parse(&bytes[at as usize..]).expect("an entry");
    (at, entry)
}

fn put_entry(path: &Path, at: u64, entry: &SnapshotEntry) {
    let mut bytes = Vec::new();
    entry.encode_into(&mut bytes).expect("it fits");
    patch(path, at, &bytes);
}

#[test]
fn apply_of_a_snapshot_without_a_size_keeps_the_size_of_the_disk() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=512", &SPAN.to_string());
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 1024"]);
    folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
    folder.qemu_io("qcow2", IMAGE, &["write -P 18 512 1024"]);
    folder.qemu_img(&["resize", "-q", IMAGE, &(2 * SPAN).to_string()]);
    let path = folder.path(IMAGE);
    let (at, mut entry) = entry_of(&path);
    entry.extra.clear();
    put_entry(&path, at, &entry);
    let disk = open(&path, &options());
    apply(&disk, &name("s")).expect("an application");
    let mut expected = vec![0; 2 * SPAN as usize];
    expected[..1024].fill(17);
    assert_same(&whole(&disk), &expected, "the disk");
    close(disk);
    assert_same(&folder.qemu_reads(IMAGE), &expected, "for QEMU");
}

/// It lies past the snapshot's disk, behind entries of its L1 table that are not the disk's.
#[test]
fn apply_leaves_vm_state_to_the_snapshot() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=512", &(3 * SPAN).to_string());
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 96k"]);
    folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
    folder.qemu_io("qcow2", IMAGE, &["write -P 18 1k 64k"]);
    let path = folder.path(IMAGE);
    let (at, mut entry) = entry_of(&path);
    // The last two spans are state: 64 KiB of a disk of one span.
    entry.extra = [2 * SPAN, SPAN, 0].map(u64::to_be_bytes).concat();
    entry.vm_state_size_32 = 2 * SPAN as u32;
    put_entry(&path, at, &entry);
    let table = u64_at(&path, entry.l1_offset.bytes() + 2 * 8) & OFFSET;
    let before = std::fs::read(&path).expect("an image");
    let disk = open(&path, &options());
    for _ in 0..2 {
        apply(&disk, &name("s")).expect("an application");
        assert_same(&whole(&disk), &[17; SPAN as usize], "the disk");
    }
    let lane = Lane::new(&disk, RingKind::Syscalls);
    lane.write(0, &[0x44; SPAN as usize]);
    lane.settle();
    lane.settle();
    drop(lane);
    close(disk);
    folder.assert_flawless(IMAGE, false);
    assert_eq!((u64_at(&path, 24), u32_at(&path, 36)), (SPAN, 1));
    let after = entry_of(&path).1;
    assert_eq!(after, entry, "the snapshot's entry");
    // Also what the state's last table leads to.
    let after = std::fs::read(&path).expect("an image");
    for index in 0..64 {
        let data = (u64_at(&path, table + index * 8) & OFFSET) as usize;
        assert!(data > 0 && after[data..][..512] == before[data..][..512] && after[data] == 17);
    }
    // QEMU copies state to the disk's table as well; ours gives it up again.
    folder.qemu_img(&["snapshot", "-a", "s", IMAGE]);
    assert!(u32_at(&path, 36) >= 3, "QEMU's L1 table has the state");
    let disk = open(&path, &options());
    apply(&disk, &name("s")).expect("an application");
    close(disk);
    look(
        &folder,
        &[17; SPAN as usize],
        &[("s", &[17; SPAN as usize])],
        "after QEMU",
    );
    let disk = open(&path, &options());
    delete(&disk, &name("s")).expect("a deletion");
    close(disk);
    look(&folder, &[17; SPAN as usize], &[], "without the snapshot");
}

/// Whatever has a snapshot had room for one more user when it was created: it has room for the disk again.
#[test]
fn apply_overflows_no_count_that_the_disk_is_among() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "refcount_bits=2,cluster_size=4096", "1M");
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 256k"]);
    let disk = open(&folder.path(IMAGE), &options());
    create(&disk, "one").expect("a snapshot");
    create(&disk, "two").expect("a snapshot");
    let full = create(&disk, "three").expect_err("an overflow");
    assert!(
        matches!(full, SnapshotError::RefcountFull { bits: 2, .. }),
        "{full}"
    );
    apply(&disk, &name("one")).expect("no count changes");
    let lane = Lane::new(&disk, RingKind::Syscalls);
    lane.write(4096, &[0x22; 128 << 10]);
    apply_on(&lane.cx, &disk, &name("two")).expect("three at most");
    lane.write(0, &[0x23; 512]);
    lane.settle();
    lane.settle();
    drop(lane);
    close(disk);
    let mut taken = vec![0; 1 << 20];
    taken[..256 << 10].fill(17);
    let mut active = taken.clone();
    active[..512].fill(0x23);
    look(
        &folder,
        &active,
        &[("one", &taken), ("two", &taken)],
        "in the end",
    );
}

#[test]
fn apply_refuses_bad_selectors_sizes_and_images() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "", "1M");
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 64k"]);
    for snapshot in ["twice", "twice", "2"] {
        folder.qemu_img(&["snapshot", "-c", snapshot, IMAGE]);
    }
    let path = folder.path(IMAGE);
    let disk = open(&path, &options());
    let before = std::fs::read(&path).expect("an image");
    let say = |which| apply(&disk, &which).expect_err("an error").to_string();
    assert_eq!(
        say(name("twice")),
        "name=twice may mean 2 snapshots; select one by id=, such as id=1"
    );
    let either = say(SnapshotSelector::Any("2".to_owned()));
    assert!(either.contains("may mean 2 snapshots"), "{either}");
    assert_eq!(say(id("4")), "there is no snapshot id=4");
    assert!(
        std::fs::read(&path).expect("an image") == before,
        "it has changed"
    );
    close(disk);
    let read_only = OpenOptions {
        read_only: true,
        ..options()
    };
    let disk = open(&path, &read_only);
    let refused = apply(&disk, &id("1"));
    assert!(matches!(refused, Err(SnapshotError::Io(IoError::ReadOnly))));
    close(disk);

    let (at, entry) = entry_of(&path);
    let with = |change: &dyn Fn(&mut SnapshotEntry)| {
        let mut entry = entry.clone();
        change(&mut entry);
        put_entry(&path, at, &entry);
        let disk = open(&path, &options());
        let before = std::fs::read(&path).expect("an image");
        let error = apply(&disk, &id("1")).expect_err("an error").to_string();
        close(disk);
        let after = std::fs::read(&path).expect("an image");
        assert!(after == before, "it has changed: {error}");
        error
    };
    let sized = |size: u64| [0, size, u64::MAX].map(u64::to_be_bytes).concat();
    let error = with(&|entry| entry.extra = sized(1 << 62));
    let most = (4_u64 << 20) * (512 << 20);
    let expected = format!(
        "the snapshot says that its disk has {} bytes; expected at most {most}, which is what an L1 table can map",
        1_u64 << 62
    );
    assert_eq!(error, expected);
    let len = before.len() as u64;
    let past = (len - 1).next_multiple_of(64 << 10) + (64 << 10);
    for (offset, entries) in [(past, 1), (0x123, 1), (entry.l1_offset.bytes(), u32::MAX)] {
        let error = with(&|entry| {
            entry.l1_offset = qcow::format::HostOffset::new(offset);
            entry.l1_entries = entries;
        });
        let expected = format!(
            "a snapshot's L1 table at {offset:#x} is damaged: it has {entries} entries, and the file {len:#x} bytes"
        );
        assert!(error.contains(&expected), "{error}");
    }
}

/// Such an image does not say how large other snapshots' disks are.
#[test]
fn apply_refuses_another_size_in_an_image_of_version_2() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "compat=0.10", "1M");
    folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
    let path = folder.path(IMAGE);
    let (at, mut entry) = entry_of(&path);
    entry.extra = [0, 512 << 10, u64::MAX].map(u64::to_be_bytes).concat();
    put_entry(&path, at, &entry);
    let disk = open(&path, &options());
    let error = apply(&disk, &name("s")).expect_err("another size").to_string();
    assert!(
        error.contains("a disk of 524288 bytes, and the disk has 1048576 bytes")
            && error.contains("compat=1.1"),
        "{error}"
    );
    close(disk);
    folder.assert_flawless(IMAGE, false);
}
