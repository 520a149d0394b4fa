//! The length of files after loops of discards and writes, beside those that QEMU makes of the same requests.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use crate::common::{Folder, Lane, close, create, open};
use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Context, Done, IoError, Op};
use qcow::image::CreateOptions;
use qcow::{OpenOptions, SnapshotSelector};
use ringdisk_gen::discard_loops::{Step, loops};

/// The disk's size in mebibytes.
const MIB: u64 = 32;

/// Bytes of a file: its length, and those that take space.
#[derive(Clone, Copy, Debug)]
struct Size {
    length: u64,
    in_use: u64,
}

impl Size {
    fn of(path: &Path) -> Self {
        let facts = std::fs::metadata(path).expect("an image");
        Self {
            length: facts.len(),
            in_use: facts.blocks() * 512,
        }
    }

    /// At most a tenth longer than QEMU's.
    #[track_caller]
    fn assert_like(self, qemu: Self, what: &str) {
        assert!(
            self.length * 10 <= qemu.length * 11,
            "{what}: {self:?} beside {qemu:?}"
        );
        assert!(
            self.in_use * 10 <= qemu.in_use * 11,
            "{what}: {self:?} beside {qemu:?}"
        );
    }
}

fn image(folder: &Folder, name: &str) {
    create(&folder.path(name), &CreateOptions::new(MIB << 20));
}

/// Runs requests in `qemu-io`, which gives discarded space back to the host.
fn qemu(folder: &Folder, name: &str, steps: &[Step]) {
    let image =
        format!("driver=qcow2,discard=unmap,file.driver=file,file.discard=unmap,file.filename={name}");
    let commands: Vec<String> = steps.iter().map(Step::command).collect();
    let mut args = vec!["--image-opts", &image];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    let said = folder.run("qemu-io", &args);
    assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
}

fn submit(lane: &Lane, step: &Step) {
    let write = Op::Write { fua: false };
    let zeroes = Op::WriteZeroes {
        unmap: true,
        fua: false,
    };
    match *step {
        Step::Write { offset, len, value } => {
            let bytes = AlignedBuf::from_slice(&vec![value; len as usize]);
            lane.submit(write, offset, len, bytes.into(), 0);
        }
        Step::Discard { offset, len } => lane.submit(Op::Discard, offset, len, Buffer::default(), 0),
        Step::Zeroes { offset, len } => lane.submit(zeroes, offset, len, Buffer::default(), 0),
        Step::Flush => lane.submit(Op::Flush, 0, 0, Buffer::default(), 0),
    }
}

fn end(lane: &Lane, in_flight: &mut usize) {
    let mut done: Vec<Done> = Vec::new();
    lane.turn(&mut done);
    *in_flight -= done.len();
    assert!(done.iter().all(|done| done.result == Ok::<(), IoError>(())));
}

/// Runs requests, `depth` of one kind at once. Returns the file's size before the disk is closed.
fn ours(folder: &Folder, name: &str, steps: &[Step], ring: RingKind, direct: bool, depth: usize) -> Size {
    let options = OpenOptions {
        direct,
        ..OpenOptions::default()
    };
    let disk = open(&folder.path(name), &options);
    let lane = Lane::new(&disk, ring);
    let (mut in_flight, mut last) = (0, None);
    for step in steps {
        let kind = std::mem::discriminant(step);
        let most = if last == Some(kind) { depth } else { 1 };
        last = Some(kind);
        while in_flight >= most {
            end(&lane, &mut in_flight);
        }
        submit(&lane, step);
        in_flight += 1;
    }
    while in_flight > 0 {
        end(&lane, &mut in_flight);
    }
    lane.settle();
    let size = Size::of(&folder.path(name));
    drop(lane);
    close(disk);
    size
}

fn assert_file_stays_short(ring: RingKind, direct: bool, depth: usize) {
    let folder = Folder::new();
    for list in loops(MIB) {
        for name in ["qemu.qcow2", "ours.qcow2"] {
            image(&folder, name);
        }
        qemu(&folder, "qemu.qcow2", &list.steps);
        let open = ours(&folder, "ours.qcow2", &list.steps, ring, direct, depth);
        folder.assert_flawless("ours.qcow2", false);
        let what = format!("{}, {ring:?}, direct {direct}, depth {depth}", list.name);
        let theirs = Size::of(&folder.path("qemu.qcow2"));
        // Past the page cache space is reserved ahead, and returned by the close.
        if !direct {
            open.assert_like(theirs, &what);
        }
        Size::of(&folder.path("ours.qcow2")).assert_like(theirs, &what);
        if depth == 1 {
            folder.qemu_img(&[
                "compare",
                "-q",
                "-f",
                "qcow2",
                "-F",
                "qcow2",
                "qemu.qcow2",
                "ours.qcow2",
            ]);
        }
    }
}

#[test]
fn file_stays_as_short_as_qemus_through_the_page_cache() {
    assert_file_stays_short(RingKind::IoUring, false, 1);
}

#[test]
fn file_stays_as_short_as_qemus_past_the_page_cache() {
    assert_file_stays_short(RingKind::IoUring, true, 1);
}

#[test]
fn file_stays_as_short_as_qemus_with_plain_system_calls() {
    assert_file_stays_short(RingKind::Syscalls, false, 1);
}

#[test]
fn file_stays_as_short_as_qemus_with_many_requests_at_once() {
    assert_file_stays_short(RingKind::IoUring, false, 16);
}

/// A quarter of the disk is copied because of a snapshot. When that is deleted, what it held is used before the file grows.
#[test]
fn file_stays_as_short_as_qemus_after_a_snapshot_is_deleted() {
    let folder = Folder::new();
    let write = |from: u64, to: u64, value: u8| Step::Write {
        offset: from << 20,
        len: (to - from) << 20,
        value,
    };
    let before = [write(0, MIB / 2, 1), Step::Flush];
    let copied = [write(0, MIB / 4, 2), Step::Flush];
    let after = [write(MIB / 2, MIB, 3), write(0, MIB / 4, 4), Step::Flush];
    image(&folder, "qemu.qcow2");
    qemu(&folder, "qemu.qcow2", &before);
    folder.qemu_img(&["snapshot", "-c", "one", "qemu.qcow2"]);
    qemu(&folder, "qemu.qcow2", &copied);
    folder.qemu_img(&["snapshot", "-d", "one", "qemu.qcow2"]);
    qemu(&folder, "qemu.qcow2", &after);

    image(&folder, "ours.qcow2");
    let disk = open(&folder.path("ours.qcow2"), &OpenOptions::default());
    let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
    let run = |steps: &[Step]| {
        let lane = Lane::new(&disk, RingKind::IoUring);
        for step in steps {
            submit(&lane, step);
            let mut in_flight = 1;
            while in_flight > 0 {
                end(&lane, &mut in_flight);
            }
        }
        lane.settle();
    };
    run(&before);
    let made = cx.block_on(disk.create_snapshot(&cx, "one", UNIX_EPOCH));
    let id = made.expect("the ring turns").expect("a snapshot");
    run(&copied);
    let deleted = cx.block_on(disk.delete_snapshot(&cx, &SnapshotSelector::Id(id)));
    deleted.expect("the ring turns").expect("no snapshot");
    run(&after);
    let theirs = Size::of(&folder.path("qemu.qcow2"));
    Size::of(&folder.path("ours.qcow2")).assert_like(theirs, "a deleted snapshot");
    close(disk);
    folder.assert_flawless("ours.qcow2", false);
}
