//! Internal snapshots beside QEMU's tools: each lists, reads, checks and deletes what the other has made.

mod common;
#[path = "common/snapshot_shapes.rs"]
mod snapshot_shapes;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use block::ring::RingKind;
use block::{Context, IoError};
use common::{Folder, Lane, assert_same, close, open};
use qcow::{DiskSize, OpenOptions, QcowDisk, SnapshotError, SnapshotSelector};
use ringdisk_gen::patience::SetOnDrop;
use snapshot_shapes::{
    IMAGE, SECOND, change, create, create_on, delete, listed, name, names, options, qemu_reads, shapes,
};

#[test]
fn snapshots_of_every_shape_are_those_of_qemu() {
    for shape in shapes() {
        let what = shape.to_string();
        let folder = Folder::new();
        shape.make(&folder);
        let disk = open(&folder.path(IMAGE), &options());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        let mut expected = Vec::new();
        for (byte, snapshot) in [(0x41, "one"), (0x42, "two")] {
            change(&lane, &shape, byte);
            expected.push((snapshot, lane.read(0, shape.disk())));
            create_on(&lane.cx, &disk, snapshot).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_same(
                &lane.read(0, shape.disk()),
                &expected[expected.len() - 1].1,
                &what,
            );
        }
        assert_eq!(names(&disk), listed(&[("1", "one"), ("2", "two")]));
        change(&lane, &shape, 0x43);
        let active = lane.read(0, shape.disk());
        lane.settle();
        drop(lane);
        close(disk);
        let look = |expected: &[(&str, Vec<u8>)]| {
            folder.assert_flawless(IMAGE, false);
            let list = folder.qemu_img(&["snapshot", "-l", IMAGE]);
            assert_eq!(
                list.lines().count().saturating_sub(2),
                expected.len(),
                "{what}: {list}"
            );
            for (snapshot, bytes) in expected {
                assert!(list.contains(snapshot), "{what}: {list}");
                assert_same(
                    &qemu_reads(&folder, snapshot),
                    bytes,
                    &format!("{what}: {snapshot}"),
                );
            }
            assert_same(&folder.qemu_reads(IMAGE), &active, &what);
        };
        look(&expected);

        // Ours deletes the older one, QEMU the other; then the other way round.
        let disk = open(&folder.path(IMAGE), &options());
        delete(&disk, &name("one")).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(names(&disk), listed(&[("2", "two")]));
        close(disk);
        expected.remove(0);
        look(&expected);
        folder.qemu_img(&["snapshot", "-d", "two", IMAGE]);
        look(&[]);
        folder.qemu_img(&["snapshot", "-c", "theirs", IMAGE]);
        let disk = open(&folder.path(IMAGE), &options());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        assert_same(&lane.read(0, shape.disk()), &active, &what);
        create_on(&lane.cx, &disk, "ours").unwrap_or_else(|error| panic!("{what}: {error}"));
        lane.settle();
        drop(lane);
        close(disk);
        look(&[("theirs", active.clone()), ("ours", active.clone())]);
        let disk = open(&folder.path(IMAGE), &options());
        delete(&disk, &name("theirs")).unwrap_or_else(|error| panic!("{what}: {error}"));
        delete(&disk, &SnapshotSelector::Id("2".to_owned()))
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        // The disk's tables and data are its own again.
        let lane = Lane::new(&disk, RingKind::Syscalls);
        lane.read(512, 512);
        let place = disk.cached_host_offset(512).expect("it is mapped");
        lane.write(512, &[0x43; 512]);
        assert_eq!(
            disk.cached_host_offset(512),
            Some(place),
            "{what}: written in place"
        );
        lane.settle();
        drop(lane);
        close(disk);
        look(&[]);
    }
}

#[test]
fn create_fails_before_anything_changes_where_a_count_would_overflow() {
    for (bits, most) in [(1, 0), (2, 2), (4, 14)] {
        let folder = Folder::new();
        let format = format!("refcount_bits={bits},cluster_size=4096");
        folder.qemu_create(IMAGE, &format, "1M");
        folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 256k"]);
        let disk = open(&folder.path(IMAGE), &options());
        for at in 0..most {
            create(&disk, &at.to_string()).expect("a snapshot");
        }
        let failed = create(&disk, "one more").expect_err("an overflow");
        let text = failed.to_string();
        assert!(
            matches!(failed, SnapshotError::RefcountFull { bits: found, .. } if found == bits),
            "{text}"
        );
        assert!(text.contains(&format!("refcount_bits={bits}")), "{text}");
        assert_eq!(names(&disk).len(), most);
        let lane = Lane::new(&disk, RingKind::Syscalls);
        lane.write(0, &[0x22; 4096]);
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless(IMAGE, false);
    }
}

#[test]
fn bad_names_and_selectors_are_errors_that_name_them() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "", "1M");
    for snapshot in ["twice", "twice", "2"] {
        folder.qemu_img(&["snapshot", "-c", snapshot, IMAGE]);
    }
    let disk = open(&folder.path(IMAGE), &options());
    let say = |result: Result<(), SnapshotError>| result.expect_err("an error").to_string();
    for long in ["", &"x".repeat(256)] {
        let error = say(create(&disk, long).map(drop));
        assert_eq!(
            error,
            format!("the snapshot's name has {} bytes; expected 1 to 255", long.len())
        );
    }
    // QEMU would end it there, and list the same name twice.
    let nul = say(create(&disk, "twice\0").map(drop));
    assert_eq!(nul, "the snapshot's name has a NUL; expected a name without");
    let exists = say(create(&disk, "twice").map(drop));
    assert!(exists.contains("\"twice\" already, with id=1"), "{exists}");
    let ambiguous = say(delete(&disk, &name("twice")));
    assert_eq!(
        ambiguous,
        "name=twice may mean 2 snapshots; select one by id=, such as id=1"
    );
    let either = say(delete(&disk, &SnapshotSelector::Any("2".to_owned())));
    assert!(either.contains("may mean 2 snapshots"), "{either}");
    assert_eq!(
        say(delete(&disk, &name("none"))),
        "there is no snapshot name=none"
    );
    delete(&disk, &name("2")).expect("the third");
    delete(&disk, &SnapshotSelector::Any("2".to_owned())).expect("the second");
    assert_eq!(names(&disk), listed(&[("1", "twice")]));
    assert_eq!(create(&disk, &"x".repeat(255)).expect("a snapshot"), "2");
    close(disk);
    folder.assert_flawless(IMAGE, false);
    let read_only = OpenOptions {
        read_only: true,
        ..options()
    };
    let disk = open(&folder.path(IMAGE), &read_only);
    assert_eq!(names(&disk).len(), 2);
    assert!(matches!(
        create(&disk, "new"),
        Err(SnapshotError::Io(IoError::ReadOnly))
    ));
}

/// The next server has the image then: what was asked for before the close and comes after it must not write.
#[test]
fn closed_image_is_not_changed() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "", "1M");
    let disk = open(&folder.path(IMAGE), &options());
    create(&disk, "one").expect("a snapshot");
    close(Arc::clone(&disk));
    let before = std::fs::read(folder.path(IMAGE)).expect("the image");
    assert!(matches!(create(&disk, "two"), Err(SnapshotError::Closed)));
    assert!(matches!(delete(&disk, &name("one")), Err(SnapshotError::Closed)));
    let cx = Context::syscalls();
    let applied = cx.block_on(disk.apply_snapshot(&cx, &name("one"), DiskSize::Fixed));
    assert!(matches!(
        applied.expect("the ring turns"),
        Err(SnapshotError::Closed)
    ));
    let grown = cx.block_on(disk.grow(&cx, 2 << 20));
    assert_eq!(grown.expect("the ring turns"), Err(IoError::Cancelled));
    let after = std::fs::read(folder.path(IMAGE)).expect("the image");
    assert!(before == after, "a closed image was written");
}

/// Version 2 does not record the size of the disk that a snapshot is of.
#[test]
fn a_disk_of_version_2_does_not_grow_while_it_has_snapshots() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "compat=0.10", "1M");
    let disk = open(&folder.path(IMAGE), &options());
    let cx = Context::syscalls();
    let grow = |size| cx.block_on(disk.grow(&cx, size)).expect("the ring turns");
    grow(2 << 20).expect("growth");
    create(&disk, "one").expect("a snapshot");
    assert_eq!(grow(3 << 20), Err(IoError::Unsupported));
    delete(&disk, &name("one")).expect("a deletion");
    grow(3 << 20).expect("growth");
    close(disk);
    folder.assert_flawless(IMAGE, false);
}

/// An enabled bitmap stays as it is: the disk has not changed.
#[test]
fn create_and_delete_leave_bitmaps_alone() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "", "1M");
    folder.qemu_img(&["bitmap", "--add", IMAGE, "b"]);
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 64k 64k"]);
    let before = folder.qemu_img(&["info", "--output=json", IMAGE]);
    let bitmaps = |info: &str| {
        let value: serde_json::Value = serde_json::from_str(info).expect("JSON");
        value["format-specific"]["data"]["bitmaps"].clone()
    };
    let disk = open(&folder.path(IMAGE), &options());
    create(&disk, "one").expect("a snapshot");
    create(&disk, "two").expect("a snapshot");
    delete(&disk, &name("one")).expect("a deletion");
    close(disk);
    folder.assert_flawless(IMAGE, false);
    let after = folder.qemu_img(&["info", "--output=json", IMAGE]);
    assert_eq!(bitmaps(&after), bitmaps(&before));
    assert_eq!(bitmaps(&after)[0]["flags"], serde_json::json!(["auto"]));
}

const WRITERS: u64 = 3;
/// The sectors that a writer goes round, four in each cluster of 2 KiB.
const ROUND: u64 = 96;

/// A writer's sector, so that all writers share each cluster.
fn sector(writer: u64, version: u64) -> u64 {
    (version % ROUND) * WRITERS + writer
}

/// Each writer writes a version after the other, and waits for each. So what a snapshot has of it is whole up to one
/// version and nothing of the next, or that one alone.
#[test]
fn a_snapshot_under_load_has_what_every_queue_had_written_at_one_instant() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=2048", "1M");
    let disk = open(&folder.path(IMAGE), &options());
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let snapshots = 12;
    let low: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let marks: Vec<_> = (0..WRITERS)
            .map(|_| Arc::new(std::sync::atomic::AtomicU64::new(0)))
            .collect();
        for (writer, mark) in (0..WRITERS).zip(&marks) {
            let (disk, stop, mark) = (Arc::clone(&disk), Arc::clone(&stop), Arc::clone(mark));
            scope.spawn(move || {
                let lane = Lane::new(&disk, RingKind::IoUring);
                let mut version = 1;
                while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                    lane.write(sector(writer, version) * 512, &version.to_le_bytes().repeat(64));
                    mark.store(version, std::sync::atomic::Ordering::SeqCst);
                    if version % 50 == 0 {
                        lane.flush();
                    }
                    version += 1;
                }
                lane.settle();
            });
        }
        let _written = SetOnDrop(&stop);
        (0..snapshots)
            .map(|at| {
                std::thread::sleep(Duration::from_millis(15));
                let before = marks
                    .iter()
                    .map(|mark| mark.load(std::sync::atomic::Ordering::SeqCst))
                    .collect();
                create(&disk, &format!("s{at}")).expect("a snapshot");
                if at % 3 == 2 {
                    delete(&disk, &name(&format!("s{}", at - 1))).expect("a deletion");
                }
                before
            })
            .collect()
    });
    close(disk);
    folder.assert_flawless(IMAGE, false);
    for (at, before) in low
        .iter()
        .enumerate()
        .filter(|(at, _)| at % 3 != 1 || *at == snapshots - 1)
    {
        let bytes = qemu_reads(&folder, &format!("s{at}"));
        for (writer, &answered) in (0..WRITERS).zip(before) {
            let versions: Vec<u64> = (0..ROUND)
                .map(|version| {
                    let place = (sector(writer, version) * 512) as usize;
                    u64::from_le_bytes(bytes[place..place + 8].try_into().expect("eight bytes"))
                })
                .collect();
            let last = *versions.iter().max().expect("some");
            assert!(
                last >= answered,
                "s{at}: version {answered} was answered, {last} is there"
            );
            for (place, &version) in (0..).zip(&versions) {
                let behind = (last + ROUND - place) % ROUND;
                assert_eq!(
                    version,
                    last.saturating_sub(behind),
                    "s{at}: writer {writer}, place {place} of {last}"
                );
            }
        }
    }
}

#[test]
fn the_entry_of_a_snapshot_is_as_qemu_writes_it() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "", "1M");
    let disk = open(&folder.path(IMAGE), &options());
    create(&disk, "one").expect("a snapshot");
    close(disk);
    let info = folder.qemu_img(&["info", "--output=json", IMAGE]);
    let value: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let entry = &value["snapshots"][0];
    assert_eq!(entry["id"], "1");
    assert_eq!(entry["name"], "one");
    assert_eq!(entry["date-sec"], SECOND);
    assert_eq!(
        (&entry["vm-state-size"], &entry["vm-clock-sec"]),
        (&0.into(), &0.into())
    );
    assert!(entry.get("icount").is_none(), "{entry}");
    let disk = QcowDisk::open(Path::new(&folder.path(IMAGE)), &options()).expect("a disk");
    let cx = Context::syscalls();
    let entries = cx
        .block_on(disk.snapshots(&cx))
        .expect("it turns")
        .expect("a list");
    assert_eq!(
        (entries[0].extra.len(), entries[0].disk_size()),
        (24, Some(1 << 20))
    );
    assert!(SystemTime::now() > UNIX_EPOCH + Duration::from_secs(u64::from(entries[0].date_seconds)));
}
