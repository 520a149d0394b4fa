//! Snapshots of images that are damaged, or made to cost very much: an operation on one fails before it writes anything,
//! says what is wrong and where, and the guest goes on.

use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use crate::common::{Folder, Lane, close, open, patch, u32_at, u64_at};
use block::ring::RingKind;
use block::{Context, Disk};
use qcow::{DiskSize, OpenOptions, QcowDisk, SnapshotError, SnapshotSelector};
use ringdisk_gen::costly::Costly;
use ringdisk_gen::fingerprint::Fingerprint;
use simulator::{Profile, SimImage, SimWorld};

const IMAGE: &str = "disk.qcow2";
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const CLUSTER: u64 = 512;

fn create(disk: &QcowDisk) -> Result<String, SnapshotError> {
    let cx = Context::syscalls();
    cx.block_on(disk.create_snapshot(&cx, "new", UNIX_EPOCH))
        .expect("the ring turns")
}

fn delete(disk: &QcowDisk, name: &str) -> Result<(), SnapshotError> {
    let cx = Context::syscalls();
    let which = SnapshotSelector::Name(name.to_owned());
    cx.block_on(disk.delete_snapshot(&cx, &which))
        .expect("the ring turns")
}

fn apply(disk: &QcowDisk, name: &str) -> Result<(), SnapshotError> {
    let cx = Context::syscalls();
    let which = SnapshotSelector::Name(name.to_owned());
    cx.block_on(disk.apply_snapshot(&cx, &which, DiskSize::MayChange))
        .expect("the ring turns")
}

/// An operation on a snapshot of this name.
type Operation = fn(&QcowDisk, &str) -> Result<(), SnapshotError>;

/// Does `change`, which fails and leaves the file as it is. Returns the error in words.
#[track_caller]
fn refused<T: std::fmt::Debug>(
    path: &Path,
    change: impl FnOnce(&QcowDisk) -> Result<T, SnapshotError>,
) -> SnapshotError {
    let disk = open(path, &OpenOptions::default());
    let before = Fingerprint::of(path).expect("an image");
    let error = change(&disk).expect_err("it cannot be done");
    assert!(
        Fingerprint::of(path).expect("an image") == before,
        "the image has changed: {error}"
    );
    close(disk);
    error
}

#[test]
fn counts_in_very_many_refcount_blocks_are_refused() {
    let folder = Folder::new();
    let path = folder.path(IMAGE);
    Costly::Counts(8).write(&path).expect("an image");
    let disk = open(&path, &OpenOptions::default());
    assert_eq!(create(&disk).expect("a snapshot"), "1");
    close(disk);
    Costly::Counts(257).write(&path).expect("an image");
    let error = refused(&path, create);
    let text = error.to_string();
    assert!(
        matches!(error, SnapshotError::TooManyCounts { offset } if offset == 257 << 41),
        "{text}"
    );
    assert!(
        text.contains("536870912 bytes") && text.contains("QEMU's tools"),
        "{text}"
    );
}

/// Its blocks have 512 slices each.
#[test]
fn create_reads_a_refcount_block_in_one_go() {
    let folder = Folder::new();
    let path = folder.path(IMAGE);
    Costly::Counts(8).write(&path).expect("an image");
    let world = SimWorld::new(1, Profile::IMMEDIATE);
    let bytes = std::fs::read(&path).expect("the image");
    world.set_contents(IMAGE, SimImage::from_bytes(&world.store(), &bytes));
    let options = OpenOptions {
        lock: None,
        ..OpenOptions::default()
    };
    let cx = world.context(64);
    let disk = cx.block_on(QcowDisk::open_on(&cx, &world, Path::new(IMAGE), &options));
    let disk = disk.expect("nothing waits for ever").expect("a disk");
    let before = world.time();
    let created = cx.block_on(disk.create_snapshot(&cx, "new", UNIX_EPOCH));
    assert_eq!(created.expect("the ring turns").expect("a snapshot"), "1");
    let steps = world.time() - before;
    assert!(steps < 200, "{steps} steps");
    let closed = cx.block_on(Arc::clone(&disk).close(&cx));
    closed.expect("nothing waits for ever").expect("a clean close");
}

/// The search for free clusters would have to pass them all.
#[test]
fn very_many_refcount_blocks_without_a_free_cluster_are_refused() {
    let folder = Folder::new();
    let path = folder.path(IMAGE);
    Costly::Full(70).write(&path).expect("an image");
    let disk = open(&path, &OpenOptions::default());
    let error = create(&disk).expect_err("there is no free cluster");
    close(disk);
    let text = error.to_string();
    assert!(
        matches!(error, SnapshotError::TooManyCounts { offset } if offset == 64 << 41),
        "{text}"
    );
    assert!(text.contains("134217728 to find free clusters"), "{text}");
}

#[test]
fn tables_of_many_gigabytes_are_refused_unread() {
    let folder = Folder::new();
    let path = folder.path(IMAGE);
    for is_snapshot in [false, true] {
        Costly::Tables(4097, is_snapshot).write(&path).expect("an image");
        let errors = match is_snapshot {
            false => vec![refused(&path, create)],
            true => vec![
                refused(&path, |disk| delete(disk, "s")),
                refused(&path, |disk| apply(disk, "s")),
            ],
        };
        for error in errors {
            let text = error.to_string();
            assert!(
                matches!(error, SnapshotError::TooManyTables { bytes } if bytes == 4097 << 21),
                "{text}"
            );
            assert!(text.contains("at most 8589934592"), "{text}");
        }
    }
}

/// An image of two L2 tables and a snapshot `a`, after which `then` has changed it; and snapshot `b` if there are two.
struct Damaged {
    folder: Folder,
    /// The offsets of the snapshots' entries.
    entries: Vec<u64>,
}

impl Damaged {
    fn new(then: &[&str], names: &[&str]) -> Self {
        let folder = Folder::new();
        folder.qemu_create(IMAGE, "cluster_size=512", "64k");
        folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 64k"]);
        for name in names {
            folder.qemu_img(&["snapshot", "-c", name, IMAGE]);
        }
        if !then.is_empty() {
            folder.qemu_io("qcow2", IMAGE, then);
        }
        Self::of(folder)
    }

    /// Finds the snapshots of an image.
    fn of(folder: Folder) -> Self {
        let path = folder.path(IMAGE);
        let mut at = u64_at(&path, 64);
        let mut entries = Vec::new();
        for _ in 0..u32_at(&path, 60) {
            entries.push(at);
            let strings = u32_at(&path, at + 12);
            let len = 40 + u64::from(u32_at(&path, at + 36) + (strings >> 16) + (strings & 0xFFFF));
            at += len.next_multiple_of(8);
        }
        Self { folder, entries }
    }

    fn u64(&self, at: u64) -> u64 {
        u64_at(&self.folder.path(IMAGE), at)
    }

    fn put(&self, at: u64, value: u64) {
        patch(&self.folder.path(IMAGE), at, &value.to_be_bytes());
    }

    /// The place of an entry of a snapshot's L1 table.
    fn l1(&self, snapshot: usize, index: u64) -> u64 {
        self.u64(self.entries[snapshot]) + index * 8
    }

    /// The place of an entry of a snapshot's first L2 table.
    fn l2(&self, snapshot: usize, index: u64) -> u64 {
        (self.u64(self.l1(snapshot, 0)) & OFFSET) + index * 8
    }

    /// The place of a cluster's count.
    fn count(&self, offset: u64) -> u64 {
        let (block, index) = (offset / CLUSTER / 256, offset / CLUSTER % 256);
        (self.u64(self.u64(48) + block * 8) & OFFSET) + index * 2
    }

    /// The operation on `a` fails because of the cluster at `offset`, and changes nothing; the guest goes on; and when the
    /// image is repaired the operation succeeds.
    #[track_caller]
    fn assert_refused(self, operation: Operation, offset: u64) {
        let path = self.folder.path(IMAGE);
        let guest = self.folder.qemu_reads(IMAGE);
        let error = refused(&path, |disk| operation(disk, "a"));
        assert!(
            matches!(error, SnapshotError::Undercounted { offset: found } if found == offset),
            "{offset:#x}: {error}"
        );
        assert!(
            error.to_string().contains("ringdisk image check --repair all"),
            "{error}"
        );
        let disk = open(&path, &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        operation(&disk, "a").expect_err("it is as it was");
        assert!(
            lane.read(0, guest.len() as u64) == guest,
            "the guest has lost data"
        );
        lane.write(60 << 10, &[0x77; 512]);
        lane.flush();
        lane.settle();
        drop(lane);
        close(disk);
        let cx = Context::syscalls();
        let write = block::file::FileOptions {
            write: true,
            direct: false,
        };
        let file = block::file::ImageFile::open(&path, write).expect("the image");
        let view = file.view(&cx).expect("a view");
        let repaired = cx.block_on(qcow::image::repair(&view, qcow::image::RepairScope::All));
        repaired.expect("the ring turns").expect("a repair");
        drop((view, file));
        let disk = open(&path, &OpenOptions::default());
        operation(&disk, "a").expect("a change");
        close(disk);
        self.folder.assert_flawless(IMAGE, false);
    }
}

/// Given up twice and counted once, it would be freed although something else may use it.
#[test]
fn delete_refuses_a_cluster_that_the_snapshot_names_twice_and_that_counts_one() {
    let image = Damaged::new(&["write -P 34 0 64k"], &["a"]);
    let host = image.u64(image.l2(0, 3));
    image.put(image.l2(0, 4), host);
    image.assert_refused(delete, host & OFFSET);
}

#[test]
fn delete_refuses_to_free_a_cluster_of_the_disk() {
    let image = Damaged::new(&[], &["a"]);
    let host = image.u64(image.l2(0, 3)) & OFFSET;
    let path = image.folder.path(IMAGE);
    patch(&path, image.count(host), &1_u16.to_be_bytes());
    image.assert_refused(delete, host);
}

#[test]
fn delete_refuses_to_free_an_l2_table_of_the_disk() {
    let image = Damaged::new(&[], &["a"]);
    let table = image.u64(image.l1(0, 1)) & OFFSET;
    let path = image.folder.path(IMAGE);
    patch(&path, image.count(table), &1_u16.to_be_bytes());
    image.assert_refused(delete, table);
}

#[test]
fn delete_refuses_to_free_an_l1_table_of_another_snapshot() {
    let image = Damaged::new(&[], &["a", "b"]);
    let l1 = image.l1(0, 0);
    image.put(image.entries[1], l1);
    image.assert_refused(delete, l1);
}

/// The disk does not use it any more, and its count says that only one of two snapshots does.
#[test]
fn delete_refuses_to_free_a_cluster_of_the_snapshot_before_or_after() {
    for names in [["a", "b"], ["b", "a"]] {
        let image = Damaged::new(&["write -P 34 0 64k"], &names);
        let of_a = usize::from(names[1] == "a");
        let host = image.u64(image.l2(of_a, 3)) & OFFSET;
        let path = image.folder.path(IMAGE);
        patch(&path, image.count(host), &1_u16.to_be_bytes());
        image.assert_refused(delete, host);
    }
}

/// Three use it and it counts two, as if the disk were its only user once `a` is gone: the next write would change `b`, or free it.
#[test]
fn delete_refuses_to_leave_to_the_disk_what_the_snapshot_before_or_after_uses() {
    for names in [["a", "b"], ["b", "a"]] {
        let image = Damaged::new(&[], &names);
        let host = image.u64(image.l2(0, 3)) & OFFSET;
        let path = image.folder.path(IMAGE);
        patch(&path, image.count(host), &2_u16.to_be_bytes());
        image.assert_refused(delete, host);
    }
}

#[test]
fn delete_refuses_to_free_an_l2_table_of_a_snapshot_far_away() {
    let image = Damaged::new(&["write -P 34 0 64k"], &["b", "x", "y", "a"]);
    let path = image.folder.path(IMAGE);
    let table = image.u64(image.l1(0, 1)) & OFFSET;
    // Those between do not use it.
    for between in [1, 2] {
        image.put(image.l1(between, 1), 0);
    }
    patch(&path, image.count(table), &1_u16.to_be_bytes());
    image.assert_refused(delete, table);
}

/// Another snapshot's damage is not the operation's: what is sound in it is kept.
#[test]
fn delete_goes_on_beside_a_snapshot_that_is_damaged() {
    let image = Damaged::new(&["write -P 34 0 64k"], &["a", "b"]);
    let path = image.folder.path(IMAGE);
    image.put(image.l1(1, 1), 0x123);
    let disk = open(&path, &OpenOptions::default());
    delete(&disk, "a").expect("a deletion");
    let lane = Lane::new(&disk, RingKind::Syscalls);
    lane.write(0, &[0x77; 512]);
    lane.settle();
    drop(lane);
    close(disk);
}

/// All entries name one table: what that refers to would be given up again and again.
#[test]
fn delete_refuses_an_l1_table_that_names_an_l2_table_twice() {
    let image = Damaged::new(&["write -P 34 0 64k"], &["a"]);
    let table = image.u64(image.l1(0, 0));
    image.put(image.l1(0, 1), table);
    let error = refused(&image.folder.path(IMAGE), |disk| delete(disk, "a"));
    let text = error.to_string();
    assert!(matches!(error, SnapshotError::Damaged { .. }), "{text}");
    let expected = format!("two of its entries lead to the L2 table at {:#x}", table & OFFSET);
    assert!(text.contains(&expected), "{text}");
}

/// The disk gives up its only counted user, and would get it back as data that is free.
#[test]
fn apply_refuses_to_free_a_cluster_of_the_snapshot() {
    let image = Damaged::new(&["write -P 34 0 16k"], &["a"]);
    // The disk has its own table, and shares this cluster.
    let host = image.u64(image.l2(0, 40)) & OFFSET;
    let path = image.folder.path(IMAGE);
    patch(&path, image.count(host), &1_u16.to_be_bytes());
    image.assert_refused(apply, host);
}

#[test]
fn apply_refuses_to_free_an_l2_table_of_the_snapshot() {
    let image = Damaged::new(&[], &["a"]);
    let path = image.folder.path(IMAGE);
    // The disk takes the shared table to be its own.
    let table = image.u64(image.l1(0, 1)) & OFFSET;
    image.put(u64_at(&path, 40) + 8, table | 1 << 63);
    patch(&path, image.count(table), &1_u16.to_be_bytes());
    image.assert_refused(apply, table);
}

#[test]
fn apply_refuses_an_l1_table_that_names_an_l2_table_twice() {
    let image = Damaged::new(&["write -P 34 0 64k"], &["a"]);
    let table = image.u64(image.l1(0, 0));
    image.put(image.l1(0, 1), table);
    let error = refused(&image.folder.path(IMAGE), |disk| apply(disk, "a"));
    assert!(
        error
            .to_string()
            .contains("two of its entries lead to the L2 table"),
        "{error}"
    );
}

/// It is the disk's no more, and the count says that the other snapshot does not have it.
#[test]
fn apply_refuses_to_free_a_cluster_of_the_newest_snapshot() {
    let image = Damaged::new(&["write -P 34 0 16k"], &["a"]);
    image.folder.qemu_img(&["snapshot", "-c", "b", IMAGE]);
    let image = Damaged::of(image.folder);
    let host = image.u64(image.l2(1, 3)) & OFFSET;
    assert!(
        host != image.u64(image.l2(0, 3)) & OFFSET,
        "it is not in the older one"
    );
    let path = image.folder.path(IMAGE);
    patch(&path, image.count(host), &1_u16.to_be_bytes());
    image.assert_refused(apply, host);
}

/// A count that is wrong: none of a sound image has no room for the disk.
#[test]
fn apply_refuses_a_cluster_whose_count_is_full() {
    let image = Damaged::new(&["write -P 34 0 64k"], &["a"]);
    let host = image.u64(image.l2(0, 3)) & OFFSET;
    let path = image.folder.path(IMAGE);
    patch(&path, image.count(host), &u16::MAX.to_be_bytes());
    let error = refused(&path, |disk| apply(disk, "a"));
    assert!(
        matches!(error, SnapshotError::RefcountFull { offset, bits: 16 } if offset == host),
        "{error}"
    );
}

/// The image's tables would be the guest's to write to.
#[test]
fn apply_refuses_an_entry_that_leads_to_a_structure_or_to_nothing_counted() {
    type Place = fn(&Damaged) -> u64;
    let places: [(Place, &str); 3] = [
        (
            |image| u64_at(&image.folder.path(IMAGE), 48),
            "the refcount table at",
        ),
        (|image| image.u64(image.l1(0, 1)) & OFFSET, "L2 table at"),
        (|_| 40 << 20, "is in use and its refcount is 0"),
    ];
    for (place, expected) in places {
        let image = Damaged::new(&["write -P 34 0 64k"], &["a"]);
        let path = image.folder.path(IMAGE);
        let wrong = place(&image);
        let entry = image.l2(0, 3);
        image.put(entry, wrong);
        let guest = image.folder.qemu_reads(IMAGE);
        let disk = open(&path, &OpenOptions::default());
        let error = apply(&disk, "a").expect_err("it is damaged").to_string();
        assert!(error.contains(expected), "{error}");
        let lane = Lane::new(&disk, RingKind::Syscalls);
        assert!(
            lane.read(0, guest.len() as u64) == guest,
            "the guest has lost data"
        );
        drop(lane);
        close(disk);
        assert!(image.folder.qemu_reads(IMAGE) == guest, "the disk has changed");
    }
}

#[test]
fn apply_refuses_a_snapshot_whose_l2_table_is_not_counted() {
    let image = Damaged::new(&["write -P 34 0 64k"], &["a"]);
    let path = image.folder.path(IMAGE);
    let past = 64 << 20;
    image.put(image.l1(0, 1), past);
    let disk = open(&path, &OpenOptions::default());
    let error = apply(&disk, "a").expect_err("it is damaged");
    assert!(
        matches!(error, SnapshotError::Uncounted { offset } if offset == past),
        "{error}"
    );
    close(disk);
}
