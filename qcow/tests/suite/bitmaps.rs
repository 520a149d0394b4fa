//! Persistent bitmaps and autoclear bits of an image that is opened for writing: as they were until the guest's first write,
//! in use from before it until they are stored at the close.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use crate::common::{Folder, Lane, close, open, patch};
use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Context, Disk, Op, Request};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimImage, SimWorld};

/// The header's offset of the autoclear bits, and one of them that no edition of the format has.
const AUTOCLEAR: u64 = 88;
const UNKNOWN: u8 = 0x80;

/// An image of 1 MiB whose first 64 KiB are written, with a bitmap that records changes and one that does not.
fn image(folder: &Folder) -> std::path::PathBuf {
    folder.qemu_img(&["create", "-f", "qcow2", "disk.qcow2", "1M"]);
    folder.qemu_io("qcow2", "disk.qcow2", &["write -P 1 0 64k"]);
    folder.qemu_img(&["bitmap", "--add", "disk.qcow2", "recording"]);
    folder.qemu_img(&["bitmap", "--add", "--disable", "disk.qcow2", "disabled"]);
    let path = folder.path("disk.qcow2");
    let autoclear = std::fs::read(&path).expect("the image")[AUTOCLEAR as usize + 7];
    patch(&path, AUTOCLEAR, &[UNKNOWN, 0, 0, 0, 0, 0, 0, autoclear]);
    path
}

/// The flags of both bitmaps as QEMU lists them.
fn flags(folder: &Folder) -> [String; 2] {
    let info = folder.qemu_img(&["info", "-U", "--output=json", "disk.qcow2"]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let bitmaps = &info["format-specific"]["data"]["bitmaps"];
    let of = |name: &str| {
        let list = bitmaps.as_array().expect("bitmaps");
        let found = list.iter().find(|bitmap| bitmap["name"] == name);
        found.expect(name)["flags"].to_string()
    };
    [of("recording"), of("disabled")]
}

fn is_unknown_set(path: &Path) -> bool {
    std::fs::read(path).expect("the image")[AUTOCLEAR as usize] == UNKNOWN
}

const AUTO: &str = r#"["auto"]"#;
const IN_USE: &str = r#"["in-use","auto"]"#;

#[test]
fn writable_open_with_only_reads_changes_no_byte() {
    for ring in [RingKind::IoUring, RingKind::Syscalls] {
        let folder = Folder::new();
        let path = image(&folder);
        let before = std::fs::read(&path).expect("the image");
        let disk = open(&path, &OpenOptions::default());
        let lane = Lane::new(&disk, ring);
        assert!(lane.read(0, 64 << 10) == [1; 64 << 10]);
        lane.flush();
        drop(lane);
        close(disk);
        assert!(std::fs::read(&path).expect("the image") == before);
        assert_eq!(flags(&folder), [AUTO, "[]"]);
    }
}

#[test]
fn first_change_marks_only_recording_bitmaps() {
    type Change = fn(&Lane);
    let changes: [Change; 5] = [
        |lane| lane.write(0, &[2; 512]),
        |lane| lane.write(128 << 10, &[2; 512]),
        |lane| lane.discard(0, 64 << 10),
        |lane| lane.write_zeroes(0, 512, false),
        |lane| lane.write_zeroes(0, 64 << 10, true),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let folder = Folder::new();
        let path = image(&folder);
        let disk = open(&path, &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::IoUring);
        // The map is cached: an overwrite needs no task.
        lane.read(0, 512);
        change(&lane);
        assert!(!is_unknown_set(&path), "change {number}");
        drop(lane);
        assert_eq!(flags(&folder), [IN_USE, "[]"], "change {number}");
        close(disk);
        assert_eq!(flags(&folder), [AUTO, "[]"], "change {number}");
        folder.assert_flawless("disk.qcow2", false);
        // QEMU loads the one that is left alone.
        folder.qemu_img(&["bitmap", "--enable", "disk.qcow2", "disabled"]);
    }
}

/// A bitmap has as many entries as the disk's size needs: QEMU refuses an image with any other that is not in use.
#[test]
fn growth_marks_all_bitmaps_until_the_close() {
    let folder = Folder::new();
    let path = image(&folder);
    let disk = open(&path, &OpenOptions::default());
    let cx = Context::syscalls();
    let too_small = cx.block_on(disk.grow(&cx, 512)).expect("the ring turns");
    too_small.expect_err("a disk does not shrink");
    assert!(is_unknown_set(&path), "nothing was written");
    let grown = cx.block_on(disk.grow(&cx, 64 << 30)).expect("the ring turns");
    grown.expect("growth");
    assert_eq!(flags(&folder), [IN_USE, r#"["in-use"]"#]);
    close(disk);
    assert_eq!(flags(&folder), [AUTO, "[]"]);
    folder.assert_flawless("disk.qcow2", false);
    assert!(!is_unknown_set(&path));
}

/// A bitmap of another size than the disk's is one that QEMU refuses, unless it is in use.
#[test]
fn shrink_marks_all_bitmaps_until_the_close_and_a_refused_one_none() {
    let folder = Folder::new();
    let path = image(&folder);
    let disk = open(&path, &OpenOptions::default());
    let cx = Context::syscalls();
    let refused = cx.block_on(disk.shrink(&cx, 2 << 20)).expect("the ring turns");
    refused.expect_err("it is larger");
    close(disk);
    assert!(is_unknown_set(&path), "nothing was written");
    assert_eq!(flags(&folder), [AUTO, "[]"]);
    let disk = open(&path, &OpenOptions::default());
    let shrunk = cx.block_on(disk.shrink(&cx, 100 << 10)).expect("the ring turns");
    shrunk.expect("a smaller disk");
    assert_eq!(flags(&folder), [IN_USE, r#"["in-use"]"#]);
    close(disk);
    assert_eq!(flags(&folder), [AUTO, "[]"]);
    folder.assert_flawless("disk.qcow2", false);
    assert!(!is_unknown_set(&path));
    folder.qemu_io("qcow2", "disk.qcow2", &["read -P 1 0 64k", "write -P 2 0 64k"]);
    for name in ["recording", "disabled"] {
        folder.qemu_img(&["bitmap", "--remove", "disk.qcow2", name]);
    }
    folder.assert_flawless("disk.qcow2", false);
}

/// After any power cut, a bitmap is marked out of date if a byte of the guest's has changed, and the unknown bit is clear.
#[test]
fn power_cut_leaves_no_change_unknown_to_bitmaps() {
    let folder = Folder::new();
    let before = std::fs::read(image(&folder)).expect("the image");
    let world = SimWorld::new(1, Profile::IMMEDIATE);
    world.set_contents("disk", SimImage::from_bytes(&world.store(), &before));
    let cx = world.context(64);
    let options = OpenOptions {
        lock: None,
        ..OpenOptions::default()
    };
    let disk = cx.block_on(QcowDisk::open_on(&cx, &world, Path::new("disk"), &options));
    let disk = disk.expect("nothing waits for ever").expect("a disk");
    let queue = Rc::new(Arc::clone(&disk).open_queue(&cx).expect("a queue"));
    world.set_profile(Profile {
        reorder: true,
        linger: 500,
        ..Profile::default()
    });
    let sectors = before.chunks_exact(512).enumerate();
    let host: Vec<usize> = sectors
        .filter(|(_, sector)| **sector == [1; 512])
        .map(|(number, _)| number * 512)
        .collect();
    assert_eq!(host.len(), 128, "what the guest wrote before");

    let left = Rc::new(Cell::new(3));
    for op in [Op::Write { fua: false }, Op::Write { fua: true }, Op::Flush] {
        let (queue, left) = (Rc::clone(&queue), Rc::clone(&left));
        cx.spawn(async move {
            let (len, buffer) = match op {
                Op::Flush => (0, Buffer::default()),
                _ => (4096, AlignedBuf::from_slice(&[2; 4096]).into()),
            };
            let (request, answer) = Request::local(op, 0, len, buffer);
            queue.submit(request);
            answer.await.result.expect("an answer");
            left.set(left.get() - 1);
        });
    }
    let mut changed = 0;
    while left.get() > 0 {
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
        world.step();
        let space = world.crash_space("disk");
        assert!(space.count() <= 1 << 16, "all of them are looked at");
        for number in 0..space.count() {
            let image = space.nth(number).to_bytes();
            if host.iter().all(|&at| image[at..at + 512] == [1; 512]) {
                continue;
            }
            changed += 1;
            assert_eq!(image[AUTOCLEAR as usize], 0);
            std::fs::write(folder.path("disk.qcow2"), &image).expect("a file");
            if changed % 64 == 1 {
                assert_eq!(flags(&folder), [IN_USE, "[]"]);
            }
        }
    }
    assert!(changed > 0, "no cut has left a change");
}

/// An application changes the disk without a write of the guest. Bitmaps go on to be valid.
#[test]
fn apply_of_a_snapshot_keeps_bitmaps_valid() {
    for size in ["1M", "2M"] {
        let folder = Folder::new();
        let path = image(&folder);
        folder.qemu_img(&["snapshot", "-c", "s", "disk.qcow2"]);
        folder.qemu_img(&["resize", "-q", "disk.qcow2", size]);
        let cx = Context::syscalls();
        let apply = |name: &str| {
            let disk = open(&path, &OpenOptions::default());
            let which = qcow::SnapshotSelector::Name(name.to_owned());
            let applied = cx.block_on(disk.apply_snapshot(&cx, &which, qcow::DiskSize::MayChange));
            close(disk);
            applied.expect("the ring turns")
        };
        apply("none").expect_err("there is no such snapshot");
        assert_eq!(flags(&folder), [AUTO, "[]"], "nothing has changed");
        apply("s").expect("an application");
        assert_eq!(flags(&folder), [AUTO, "[]"], "{size}");
        folder.assert_flawless("disk.qcow2", false);
        folder.qemu_io("qcow2", "disk.qcow2", &["read -P 1 0 64k", "write -P 2 0 64k"]);
    }
}
