//! Guards against damaged metadata while an image is written: no write reaches a structure of the image, or a
//! cluster that is somebody else's, whatever counts and entries say.
//!
//! Each case is a sound image with one lie in it: a count of zero for something that is in use, or an entry that
//! leads where none may. What must hold each time: the write that would do harm is refused, the image is marked
//! corrupt on disk, the structure is as it was, other data can still be read, nothing else can be written, and
//! `qemu-img check` says what it said before.

use std::path::Path;
use std::sync::Arc;

use crate::common::{Folder, Lane, close, open, patch, u32_at, u64_at};
use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Context, IoError, Op};
use qcow::{OpenOptions, QcowDisk};

const CLUSTER: u64 = 4096;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The byte that guests write here, and that nothing else in an image looks like.
const GUEST: u8 = 0x5A;

/// Guest bytes that hold data (2), and that hold none.
const DATA: u64 = 4 << 12;
const FREE: u64 = 100 << 12;

/// A sound image with everything the format has: `base.qcow2` in the folder.
struct Base {
    folder: Folder,
}

impl Base {
    fn new() -> Self {
        let folder = Folder::new();
        folder.qemu_img(&[
            "create",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4096",
            "base.qcow2",
            "8M",
        ]);
        folder.qemu_io("qcow2", "base.qcow2", &["write -P 1 0 8k"]);
        folder.qemu_img(&["snapshot", "-c", "before", "base.qcow2"]);
        folder.qemu_io("qcow2", "base.qcow2", &["write -P 2 4k 60k", "write -P 3 2M 16k"]);
        folder.qemu_img(&["bitmap", "--add", "base.qcow2", "bitmap"]);
        folder.assert_flawless("base.qcow2", false);
        let base = Self { folder };
        // As a program leaves it that has crashed: the first write need not say any more that it is out of date.
        let flags = bitmap_directory(&base.path("base.qcow2")) + 12;
        patch(&base.path("base.qcow2"), flags, &3_u32.to_be_bytes());
        base
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path(name)
    }

    /// A fresh copy to break.
    fn case(&self) -> std::path::PathBuf {
        let path = self.path("case.qcow2");
        std::fs::copy(self.path("base.qcow2"), &path).expect("a copy");
        path
    }

    /// Every structure by name, and where it is.
    fn structures(&self) -> Vec<(&'static str, u64)> {
        let path = self.path("base.qcow2");
        let (l1, refcount_table, snapshots) = (u64_at(&path, 40), u64_at(&path, 48), u64_at(&path, 64));
        let snapshot_l1 = u64_at(&path, snapshots);
        let bitmaps = bitmap_directory(&path);
        let list = vec![
            ("the header", 0),
            ("the L1 table", l1),
            ("an L2 table", u64_at(&path, l1) & OFFSET),
            ("the refcount table", refcount_table),
            ("a refcount block", u64_at(&path, refcount_table)),
            ("the snapshot table", snapshots),
            ("a snapshot's L1 table", snapshot_l1),
            ("a snapshot's L2 table", u64_at(&path, snapshot_l1) & OFFSET),
            ("the bitmap directory", bitmaps),
            ("a bitmap table", u64_at(&path, bitmaps)),
        ];
        for (index, (name, place)) in list.iter().enumerate() {
            assert!(
                list[..index].iter().all(|other| other.1 != *place),
                "{name} at {place:#x}"
            );
        }
        list
    }

    /// Returns the exit code of `qemu-img check`, and the lines that count the errors and leaks it finds.
    fn verdict(&self) -> (Option<i32>, Vec<String>) {
        let output = std::process::Command::new("qemu-img")
            .args(["check", "--output=json", "-f", "qcow2"])
            .arg(self.path("case.qcow2"))
            .output()
            .expect("qemu-img was found before");
        let text = String::from_utf8_lossy(&output.stdout);
        let counts = text
            .lines()
            .filter(|line| line.contains("corruptions") || line.contains("leaks\""));
        (output.status.code(), counts.map(str::to_owned).collect())
    }
}

/// Returns the offset of the directory that the header's bitmaps extension leads to.
fn bitmap_directory(path: &Path) -> u64 {
    let mut at = u64::from(u32_at(path, 100));
    loop {
        let (kind, len) = (u32_at(path, at), u64::from(u32_at(path, at + 4)));
        if kind == 0x2385_2875 {
            return u64_at(path, at + 8 + 16);
        }
        assert_ne!(kind, 0, "the image has no bitmaps");
        at += 8 + len.next_multiple_of(8);
    }
}

fn cluster_of(path: &Path, at: u64) -> Vec<u8> {
    let bytes = std::fs::read(path).expect("the image");
    let at = at as usize;
    bytes
        .get(at..bytes.len().min(at + CLUSTER as usize))
        .unwrap_or_default()
        .to_vec()
}

fn is_marked(path: &Path) -> bool {
    u64_at(path, 72) & 2 != 0
}

/// Sets the count of the cluster at `at` to zero.
fn uncount(path: &Path, at: u64) {
    let block = u64_at(path, u64_at(path, 48));
    patch(path, block + at / CLUSTER * 2, &[0, 0]);
}

fn set_entry(path: &Path, guest: u64, entry: u64) {
    let table = u64_at(path, u64_at(path, 40) + guest / (2 << 20) * 8) & OFFSET;
    patch(
        path,
        table + guest % (2 << 20) / CLUSTER * 8,
        &entry.to_be_bytes(),
    );
}

fn try_write(lane: &Lane, offset: u64, len: u64) -> Result<(), IoError> {
    let bytes = AlignedBuf::from_slice(&vec![GUEST; len as usize]);
    lane.ask(Op::Write { fua: false }, offset, len, bytes.into())
        .result
}

/// Every kind of change is refused; what was read before can still be read.
#[track_caller]
fn assert_only_readable(lane: &Lane, what: &str) {
    for offset in [DATA, FREE, 3 << 20] {
        assert_eq!(
            try_write(lane, offset, CLUSTER),
            Err(IoError::Corrupt),
            "{what}: a write"
        );
        for op in [
            Op::Discard,
            Op::WriteZeroes {
                unmap: true,
                fua: false,
            },
            Op::WriteZeroes {
                unmap: false,
                fua: true,
            },
        ] {
            let done = lane.ask(op, offset, CLUSTER, Buffer::default());
            assert_eq!(done.result, Err(IoError::Corrupt), "{what}: {op:?}");
        }
    }
    assert_eq!(lane.read(2 << 20, CLUSTER), vec![3; CLUSTER as usize], "{what}");
}

/// Closes a disk that was found corrupt; what was acknowledged is flushed.
fn finish(disk: Arc<QcowDisk>, lane: Lane) {
    lane.flush();
    lane.settle();
    drop(lane);
    close(disk);
}

#[test]
fn structure_with_refcount_zero_is_not_allocated() {
    let base = Base::new();
    for (name, place) in base.structures() {
        let path = base.case();
        uncount(&path, place);
        let (before, verdict) = (std::fs::read(&path).expect("the case"), base.verdict());
        let disk = open(&path, &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::IoUring);
        assert_eq!(lane.read(DATA, CLUSTER), vec![2; CLUSTER as usize], "{name}");
        assert_eq!(try_write(&lane, FREE, CLUSTER), Err(IoError::Corrupt), "{name}");
        lane.settle();
        assert!(is_marked(&path), "{name}");
        assert_only_readable(&lane, name);
        assert_eq!(lane.read(DATA, CLUSTER), vec![2; CLUSTER as usize], "{name}");
        finish(disk, lane);
        let mut after = std::fs::read(&path).expect("the case");
        after[79] &= !2;
        assert!(after == before, "{name}: more than the mark has changed");
        assert_eq!(base.verdict(), verdict, "{name}");
    }
}

/// The guards forget a freed cluster, whether the guest had it before the image was opened or got it since: it is handed
/// out again, and the image is not marked corrupt for it.
#[test]
fn freed_cluster_is_reused_without_corrupt_mark() {
    const CLUSTERS: u64 = 8;
    let base = Base::new();
    let path = base.case();
    let hosts = |guest: u64| -> Vec<u64> {
        let table = u64_at(&path, u64_at(&path, 40)) & OFFSET;
        let entries = (0..CLUSTERS).map(|index| table + (guest / CLUSTER + index) * 8);
        entries.map(|at| u64_at(&path, at) & OFFSET).collect()
    };
    let disk = open(&path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::IoUring);
    let mut from = DATA;
    for to in [FREE, 200 << 12, 300 << 12] {
        let freed = hosts(from);
        assert!(freed.iter().all(|&host| host != 0), "{from:#x} holds no data");
        lane.discard(from, CLUSTERS * CLUSTER);
        lane.flush();
        lane.settle();
        assert_eq!(try_write(&lane, to, CLUSTERS * CLUSTER), Ok(()), "{to:#x}");
        lane.flush();
        lane.settle();
        let again = hosts(to);
        assert!(
            again.iter().any(|host| freed.contains(host)),
            "{freed:x?}, then {again:x?}"
        );
        from = to;
    }
    finish(disk, lane);
    assert!(!is_marked(&path));
    base.folder.assert_flawless("case.qcow2", false);
}

#[test]
fn guest_cluster_with_refcount_zero_is_not_allocated() {
    let base = Base::new();
    let path = base.case();
    let table = u64_at(&path, u64_at(&path, 40)) & OFFSET;
    let host = u64_at(&path, table + DATA / CLUSTER * 8) & OFFSET;
    uncount(&path, host);
    let (before, verdict) = (std::fs::read(&path).expect("the case"), base.verdict());
    let disk = open(&path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::IoUring);
    // In the same slice: the entry is in memory when the allocator finds its cluster.
    assert_eq!(try_write(&lane, FREE, CLUSTER), Err(IoError::Corrupt));
    lane.settle();
    assert!(is_marked(&path));
    assert_only_readable(&lane, "a guest's cluster");
    assert_eq!(lane.read(DATA, CLUSTER), vec![2; CLUSTER as usize]);
    finish(disk, lane);
    let mut after = std::fs::read(&path).expect("the case");
    after[79] &= !2;
    assert!(after == before, "more than the mark has changed");
    assert_eq!(base.verdict(), verdict);
}

/// A cluster's count is zero though an entry that is not in memory points to it, and it is handed out. A request through
/// that entry must not read, let alone write, the other guest cluster's data.
#[test]
fn unseen_entry_to_a_reallocated_cluster_is_refused() {
    let base = Base::new();
    let path = base.case();
    let table = u64_at(&path, u64_at(&path, 40) + 8) & OFFSET;
    let host = u64_at(&path, table) & OFFSET;
    uncount(&path, host);
    let disk = open(&path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert_eq!(try_write(&lane, FREE, CLUSTER), Ok(()));
    assert_eq!(
        cluster_of(&path, host),
        vec![GUEST; CLUSTER as usize],
        "the lie was not believed"
    );
    assert_eq!(lane.try_read(2 << 20, CLUSTER), Err(IoError::Corrupt));
    assert_eq!(
        lane.read((2 << 20) + CLUSTER, CLUSTER),
        vec![3; CLUSTER as usize],
        "its neighbour"
    );
    lane.settle();
    assert!(is_marked(&path));
    assert_eq!(try_write(&lane, 2 << 20, CLUSTER), Err(IoError::Corrupt));
    assert_eq!(lane.read(FREE, CLUSTER), vec![GUEST; CLUSTER as usize]);
    finish(disk, lane);
}

#[test]
fn exposed_entry_fails_its_range_and_all_writes() {
    let base = Base::new();
    let target = DATA + CLUSTER;
    for (name, place) in base.structures().into_iter().skip(1) {
        for (kind, entry) in [
            ("data", place | COPIED),
            ("shared data", place),
            ("zeros", place | COPIED | 1),
            ("compressed", COMPRESSED | 7 << 58 | place),
        ] {
            let what = format!("{kind} at {name}");
            let path = base.case();
            set_entry(&path, target, entry);
            let (structure, verdict) = (cluster_of(&path, place), base.verdict());
            let disk = open(&path, &OpenOptions::default());
            let lane = Lane::new(&disk, RingKind::IoUring);
            assert_eq!(try_write(&lane, target, CLUSTER), Err(IoError::Corrupt), "{what}");
            lane.settle();
            assert!(is_marked(&path), "{what}");
            for neighbour in [target - CLUSTER, target + CLUSTER] {
                let found = lane.read(neighbour, CLUSTER);
                assert_eq!(found, vec![2; CLUSTER as usize], "{what}: a neighbour");
            }
            assert_eq!(lane.try_read(target, CLUSTER), Err(IoError::Corrupt), "{what}");
            let across = lane.try_read(target - CLUSTER, 3 * CLUSTER);
            assert_eq!(across, Err(IoError::Corrupt), "{what}");
            assert_only_readable(&lane, &what);
            finish(disk, lane);
            assert_eq!(cluster_of(&path, place), structure, "{what}");
            assert_eq!(base.verdict(), verdict, "{what}");
        }
    }
}

/// A read detects the bad entry as well, and other requests of the same slice are served.
#[test]
fn read_that_loads_exposed_entry_marks_image_corrupt() {
    let base = Base::new();
    let path = base.case();
    set_entry(&path, DATA, u64_at(&path, 40) | COPIED);
    let disk = open(&path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::Syscalls);
    assert_eq!(lane.read(DATA + CLUSTER, CLUSTER), vec![2; CLUSTER as usize]);
    lane.settle();
    assert!(is_marked(&path));
    assert_only_readable(&lane, "a read");
    finish(disk, lane);
    let error = QcowDisk::open(&path, &OpenOptions::default()).expect_err("it is marked");
    assert!(crate::common::chain(&error).contains("marked corrupt"), "{error}");
    let read_only = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let disk = open(&path, &read_only);
    let lane = Lane::new(&disk, RingKind::Syscalls);
    assert_eq!(lane.read(DATA + CLUSTER, CLUSTER), vec![2; CLUSTER as usize]);
}

#[test]
fn cluster_claimed_by_two_entries_is_read_not_written() {
    let base = Base::new();
    for other in [DATA + CLUSTER, 3 << 20] {
        let path = base.case();
        let table = u64_at(&path, u64_at(&path, 40)) & OFFSET;
        let entry = u64_at(&path, table + DATA / CLUSTER * 8);
        set_entry(&path, other, entry);
        let disk = open(&path, &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::IoUring);
        assert_eq!(lane.read(DATA, CLUSTER), vec![2; CLUSTER as usize]);
        assert_eq!(lane.read(other, CLUSTER), vec![2; CLUSTER as usize]);
        lane.settle();
        assert!(is_marked(&path), "{other:#x}");
        assert_only_readable(&lane, "twice");
        finish(disk, lane);
    }
}

#[test]
fn acknowledged_writes_are_flushed_after_damage_is_found() {
    let base = Base::new();
    let path = base.case();
    set_entry(&path, 3 << 20, u64_at(&path, 40) | COPIED);
    let disk = open(&path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert_eq!(try_write(&lane, FREE, 3 * CLUSTER), Ok(()));
    assert_eq!(try_write(&lane, 4 << 20, 3 * CLUSTER), Ok(()));
    assert_eq!(lane.try_read(3 << 20, CLUSTER), Err(IoError::Corrupt));
    finish(disk, lane);
    assert!(is_marked(&path));
    let read_only = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let disk = open(&path, &read_only);
    let lane = Lane::new(&disk, RingKind::Syscalls);
    for at in [FREE, 4 << 20] {
        assert_eq!(lane.read(at, 3 * CLUSTER), vec![GUEST; 3 * CLUSTER as usize]);
    }
}

/// Runs `work` on an image without the lie, to learn where `place` then is.
fn rehearse(path: &Path, work: impl FnOnce(&Arc<QcowDisk>, &Lane), place: impl FnOnce(&Path) -> u64) -> u64 {
    let rehearsal = path.with_extension("rehearsal");
    std::fs::copy(path, &rehearsal).expect("a copy");
    let disk = open(&rehearsal, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::Syscalls);
    work(&disk, &lane);
    lane.flush();
    // A task that is dropped with its ring keeps the ring.
    lane.settle();
    drop(lane);
    close(disk);
    place(&rehearsal)
}

/// A structure is made in a cluster that an entry, which nobody has looked at yet, leads to. The entry's slice
/// is loaded after that.
fn made_while_open(
    name: &str,
    path: &Path,
    liar: u64,
    set: impl Fn(&Path, u64),
    work: impl Fn(&Arc<QcowDisk>, &Lane) + Copy,
    place: impl Fn(&Path) -> u64 + Copy,
) {
    let at = rehearse(path, work, place);
    assert_ne!(at, 0, "{name}: nothing was made");
    set(path, at | COPIED);
    let disk = open(path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::Syscalls);
    work(&disk, &lane);
    assert_eq!(try_write(&lane, liar, 512), Err(IoError::Corrupt), "{name}");
    lane.settle();
    assert!(is_marked(path), "{name}");
    assert_eq!(try_write(&lane, 0, 512), Err(IoError::Corrupt), "{name}");
    finish(disk, lane);
    assert_eq!(place(path), at, "{name}: it was made elsewhere");
    let bytes = std::fs::read(path).expect("the case");
    let end = bytes.len().min(at as usize + 512);
    assert!(
        !bytes[at as usize..end]
            .windows(16)
            .any(|some| some == [GUEST; 16]),
        "{name}"
    );
}

#[test]
fn tables_made_since_open_are_guarded_too() {
    let folder = Folder::new();
    // 512-byte clusters: an L2 table maps 32 KiB, a refcount block counts 128 KiB, a cluster of the refcount
    // table 8 MiB.
    let make = |name: &str| {
        folder.qemu_img(&["create", "-f", "qcow2", "-o", "cluster_size=512", name, "24M"]);
        folder.qemu_io("qcow2", name, &["write -P 2 16M 512"]);
        folder.path(name)
    };
    let liar = (16 << 20) + 512;
    let set = |path: &Path, entry: u64| {
        let table = u64_at(path, u64_at(path, 40) + (16 << 20) / (32 << 10) * 8) & OFFSET;
        patch(path, table + 8, &entry.to_be_bytes());
    };
    let fill = |lane: &Lane, bytes: u64| {
        for at in (0..bytes).step_by(32 << 10) {
            lane.write(at, &[1; 32 << 10]);
        }
    };

    let path = make("l2.qcow2");
    let first_l2 = |path: &Path| u64_at(path, u64_at(path, 40)) & OFFSET;
    made_while_open(
        "an L2 table",
        &path,
        liar,
        set,
        |_, lane| lane.write(0, &[1; 512]),
        first_l2,
    );

    let path = make("block.qcow2");
    let second_block = |path: &Path| u64_at(path, u64_at(path, 48) + 8);
    made_while_open(
        "a refcount block",
        &path,
        liar,
        set,
        |_, lane| fill(lane, 160 << 10),
        second_block,
    );

    let path = make("table.qcow2");
    let table = |path: &Path| {
        assert!(u32_at(path, 56) > 1, "it has not moved");
        u64_at(path, 48)
    };
    made_while_open(
        "the refcount table",
        &path,
        liar,
        set,
        |_, lane| fill(lane, 9 << 20),
        table,
    );

    let path = make("l1.qcow2");
    let grow = |disk: &Arc<QcowDisk>, _: &Lane| {
        let cx = Context::syscalls();
        let grown = cx.block_on(disk.grow(&cx, 64 << 20));
        grown.expect("the ring turns").expect("a larger disk");
        crate::common::drain(&cx);
    };
    let l1 = u64_at(&path, 40);
    let moved_l1 = |path: &Path| {
        if u64_at(path, 40) == l1 {
            0
        } else {
            u64_at(path, 40)
        }
    };
    made_while_open("the L1 table", &path, liar, set, grow, moved_l1);
}

/// The cluster of an entry past the end of the file must not get a second owner as the file grows.
#[test]
fn entry_past_end_is_not_reached_by_growth() {
    let base = Base::new();
    let path = base.case();
    let end = std::fs::metadata(&path)
        .expect("the case")
        .len()
        .next_multiple_of(CLUSTER);
    let beyond = end + 4 * CLUSTER;
    set_entry(&path, DATA, beyond | COPIED);
    let disk = open(&path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::IoUring);
    let mut refused = false;
    for cluster in 0..16 {
        refused |= try_write(&lane, FREE + cluster * CLUSTER, CLUSTER) == Err(IoError::Corrupt);
    }
    assert!(refused, "the cluster was handed out to a second owner");
    lane.settle();
    assert!(is_marked(&path));
    assert_eq!(lane.try_read(DATA, CLUSTER), Err(IoError::Corrupt));
    finish(disk, lane);
}

/// A write over two clusters, of which the second is shared with a snapshot and lies past the end of the file. The bytes
/// to copy cannot be read, and do not become zeros.
#[test]
fn copy_from_past_end_fails_without_zeros() {
    let base = Base::new();
    let path = base.case();
    let second = FREE + CLUSTER;
    set_entry(&path, second, 1 << 30);
    let disk = open(&path, &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert!(lane.try_read(second, CLUSTER).is_err());
    assert_eq!(try_write(&lane, FREE, CLUSTER + 512), Err(IoError::Corrupt));
    assert!(
        lane.try_read(second, CLUSTER).is_err(),
        "the cluster became zeros"
    );
    lane.settle();
    assert!(is_marked(&path));
    finish(disk, lane);
}

/// A slice that was validated and then evicted is loaded again. If it has changed on disk meanwhile, no write goes
/// through an entry that points to a structure.
#[test]
fn write_refuses_entry_changed_while_slice_was_uncached() {
    let folder = Folder::new();
    folder.qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=4096",
        "case.qcow2",
        "64M",
    ]);
    let slices: Vec<u64> = (0..32).map(|slice| slice << 21).collect();
    let writes: Vec<String> = slices.iter().map(|at| format!("write -P 7 {at} 8k")).collect();
    folder.qemu_io(
        "qcow2",
        "case.qcow2",
        &writes.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    let path = folder.path("case.qcow2");
    let options = OpenOptions {
        l2_cache_bytes: Some(CLUSTER),
        ..OpenOptions::default()
    };
    let disk = open(&path, &options);
    let lane = Lane::new(&disk, RingKind::IoUring);
    // More slices than the smallest cache holds, twice: none of the first is there any more.
    for at in slices.iter().chain(&slices[1..]) {
        assert_eq!(lane.read(*at, CLUSTER), vec![7; CLUSTER as usize]);
    }
    let l1 = u64_at(&path, 40);
    let before = cluster_of(&path, l1);
    set_entry(&path, 0, l1 | COPIED);
    // Reading brings the slice back; what lies beside may be read until somebody looks.
    assert_eq!(lane.read(CLUSTER, CLUSTER), vec![7; CLUSTER as usize]);
    assert_eq!(try_write(&lane, 0, CLUSTER), Err(IoError::Corrupt));
    lane.settle();
    assert_eq!(cluster_of(&path, l1), before, "the L1 table was written over");
    assert!(is_marked(&path));
    assert_eq!(lane.try_read(0, CLUSTER), Err(IoError::Corrupt));
    assert_eq!(
        lane.read(CLUSTER, CLUSTER),
        vec![7; CLUSTER as usize],
        "its neighbour"
    );
    finish(disk, lane);
}
