//! External data files beside QEMU's tools: the same bytes, the same verdicts, and files that are refused.

use std::os::unix::fs::symlink;

use crate::common::{Folder, Lane, assert_same, chain, close, open, patch, u64_at};
use block::file::{FileOptions, ImageFile};
use block::ring::RingKind;
use block::{Context, Disk, IoError};
use qcow::image::{CreateOptions, NewDataFile, RepairScope, Verdict, check, create_with_data_file, repair};
use qcow::{OpenOptions, QcowDisk, SnapshotError};
use ringdisk_gen::Random;

/// Not a multiple of any cluster size.
const DISK: u64 = (3 << 20) + 7 * 512;

fn options(read_only: bool) -> OpenOptions {
    OpenOptions {
        read_only,
        backing_files: true,
        data_files: true,
        ..OpenOptions::default()
    }
}

/// An image of QEMU's with a data file. Returns true if that is raw.
fn made(random: &mut Random) -> (Folder, bool) {
    let folder = Folder::new();
    let raw = random.one_in(2);
    let cluster = random.pick(&["512", "4k", "64k", "64k", "2M"]);
    let extended = random.one_in(3) && !["512", "4k"].contains(&cluster);
    let on = |on| if on { "on" } else { "off" };
    let options = format!(
        "data_file=data.raw,data_file_raw={},cluster_size={cluster},extended_l2={}",
        on(raw),
        on(extended)
    );
    let size = DISK.to_string();
    let mut args = vec!["create", "-q", "-f", "qcow2", "-o", &options];
    if !raw && random.one_in(2) {
        let bytes: Vec<u8> = (0..DISK - 512 * 9)
            .map(|at| 201 + (at / 512 % 50) as u8)
            .collect();
        std::fs::write(folder.path("base.raw"), bytes).expect("a base");
        args.extend(["-b", "base.raw", "-F", "raw"]);
    }
    args.extend(["disk.qcow2", &size]);
    folder.qemu_img(&args);
    (folder, raw)
}

#[test]
fn reads_agree_with_qemu() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let (folder, _) = made(&mut random);
        folder.scribble_by_qemu("disk.qcow2", DISK, &mut random, 14);
        let expected = folder.qemu_reads("disk.qcow2");
        let disk = open(&folder.path("disk.qcow2"), &options(true));
        let lane = Lane::new(&disk, RingKind::IoUring);
        assert_same(&lane.read(0, DISK), &expected, &format!("seed {seed}"));
        lane.settle();
        drop(lane);
        close(disk);
    }
}

/// QEMU reads what we wrote; its check finds nothing; a raw data file is the disk; and none is longer than that.
#[test]
fn writes_agree_with_qemu() {
    for seed in 0..32 {
        let mut random = Random::new(seed);
        let (folder, raw) = made(&mut random);
        let what = format!("seed {seed}");
        if !raw {
            // QEMU leaves stale bytes under zeros in raw ones, too.
            folder.scribble_by_qemu("disk.qcow2", DISK, &mut random, 6);
        }
        let longest = DISK.max(std::fs::metadata(folder.path("data.raw")).expect("a file").len());
        let mut expected = folder.qemu_reads("disk.qcow2");
        let mut how = options(false);
        how.discard_no_unref = random.one_in(3);
        let disk = open(&folder.path("disk.qcow2"), &how);
        let lane = Lane::new(&disk, RingKind::IoUring);
        for _ in 0..40 {
            let first = random.below(DISK / 512);
            let most = random.pick(&[1, 4, 40, 400, 4000]);
            let count = 1 + random.below(most).min(DISK / 512 - first - 1);
            let (at, len) = (first * 512, count * 512);
            let place = &mut expected[at as usize..(at + len) as usize];
            match random.below(8) {
                0..=4 => {
                    let byte = 1 + random.below(200) as u8;
                    place.fill(byte);
                    lane.write(at, place);
                }
                5 => {
                    place.fill(0);
                    lane.write_zeroes(at, len, random.one_in(2));
                }
                6 => {
                    lane.discard(at, len);
                    // Whole clusters read as zeros, others as before.
                    let found = lane.read(at, len);
                    let is_kept = |(found, old): (&u8, &u8)| *found == 0 || found == old;
                    assert!(found.iter().zip(place.iter()).all(is_kept), "{what}");
                    place.copy_from_slice(&found);
                }
                _ => lane.flush(),
            }
        }
        assert_same(&lane.read(0, DISK), &expected, &what);
        lane.flush();
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert_same(&folder.qemu_reads("disk.qcow2"), &expected, &what);
        let data = std::fs::read(folder.path("data.raw")).expect("a data file");
        assert!(data.len() as u64 <= longest, "{what}: it has become longer");
        if raw {
            assert_same(
                &data[..DISK as usize],
                &expected,
                &format!("{what}: the data file"),
            );
        }
        assert_eq!(checked(&folder).verdict(), Verdict::Clean, "{what}");
    }
}

fn checked(folder: &Folder) -> qcow::image::CheckReport {
    let cx = Context::syscalls();
    let file = ImageFile::open(&folder.path("disk.qcow2"), FileOptions::default()).expect("an image");
    let view = file.view(&cx).expect("a descriptor");
    cx.block_on(check(&view)).expect("it turns").expect("a check")
}

#[track_caller]
fn assert_refused(folder: &Folder, how: &OpenOptions, says: &[&str]) {
    let path = folder.path("disk.qcow2");
    let before = std::fs::read(&path).expect("the image");
    let error = QcowDisk::open(&path, how).expect_err("refused");
    let text = chain(&error);
    for part in says {
        assert!(text.contains(part), "{text:?} says no {part:?}");
    }
    assert!(!text.contains('\n'), "{text:?}");
    assert!(std::fs::read(&path).expect("the image") == before);
}

#[test]
fn open_refuses_data_files_that_cannot_be_it() {
    for raw in ["off", "on"] {
        let folder = Folder::new();
        let made = format!("data_file=data.raw,data_file_raw={raw}");
        folder.qemu_create("disk.qcow2", &made, "1M");
        let data = folder.path("data.raw");
        assert_refused(
            &folder,
            &OpenOptions::default(),
            &["\"data.raw\"", "data_file=on"],
        );
        for read_only in [true, false] {
            let how = options(read_only);
            let file = std::fs::File::options().write(true).open(&data).expect("it");
            file.set_len((1 << 20) - 512).expect("it is shorter");
            assert_refused(&folder, &how, &["data.raw has 1048064 bytes", "at least 1048576"]);
            std::fs::remove_file(&data).expect("it is gone");
            assert_refused(&folder, &how, &["data file of", "cannot open", "data.raw"]);
            symlink("disk.qcow2", &data).expect("a link");
            assert_refused(&folder, &how, &["its data file", "an image of its own chain"]);
            std::fs::remove_file(&data).expect("it is gone");
            std::fs::create_dir(&data).expect("a folder");
            assert_refused(&folder, &how, &["data file of"]);
            std::fs::remove_dir(&data).expect("it is gone");
            std::fs::write(&data, vec![0; 1 << 20]).expect("it is back");
            close(open(&folder.path("disk.qcow2"), &how));
        }
    }
}

#[test]
fn open_refuses_backing_file_as_data_file() {
    let folder = Folder::new();
    std::fs::write(folder.path("base.raw"), vec![1; 1 << 20]).expect("a base");
    let made = "data_file=data.raw,backing_file=base.raw,backing_fmt=raw";
    folder.qemu_create("disk.qcow2", made, "1M");
    std::fs::remove_file(folder.path("data.raw")).expect("it is gone");
    std::fs::hard_link(folder.path("base.raw"), folder.path("data.raw")).expect("a link");
    assert_refused(
        &folder,
        &options(false),
        &["its data file", "an image of its own chain"],
    );
}

/// A second writer of the data file alone, and of another image with the same data file.
#[test]
fn data_file_is_locked_with_its_image() {
    let folder = Folder::new();
    folder.qemu_create("disk.qcow2", "data_file=data.raw", "1M");
    std::fs::copy(folder.path("disk.qcow2"), folder.path("other.qcow2")).expect("a copy");
    let disk = open(&folder.path("other.qcow2"), &options(false));
    assert_refused(&folder, &options(false), &["data.raw", "is locked"]);
    assert_refused(&folder, &options(true), &["data.raw", "is locked"]);
    let args = ["-f", "raw", "-c", "write 0 512", "data.raw"];
    let said = std::process::Command::new("qemu-io")
        .args(args)
        .current_dir(folder.path(""))
        .output()
        .expect("qemu-io");
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("lock"), "{said}");
    let both = ["other.qcow2", "data.raw"].map(|name| folder.path(name));
    assert_eq!(disk.files(), both);
    // A sandbox lets them be opened again for writing.
    assert_eq!(disk.written_files(), both);
    close(disk);
    let read_only = open(&folder.path("other.qcow2"), &options(true));
    assert_eq!(read_only.files(), both);
    assert!(read_only.written_files().is_empty());
    close(read_only);
    close(open(&folder.path("disk.qcow2"), &options(false)));
}

/// The offset in the header of the name of the data file.
fn name_at(folder: &Folder) -> u64 {
    let bytes = std::fs::read(folder.path("disk.qcow2")).expect("the image");
    let at = bytes.windows(8).position(|window| window == b"data.raw");
    at.expect("the name") as u64
}

#[test]
fn malformed_names_are_refused_and_nothing_else_is_opened() {
    let folder = Folder::new();
    folder.qemu_create("disk.qcow2", "data_file=data.raw", "1M");
    let (path, at) = (folder.path("disk.qcow2"), name_at(&folder));
    for (name, says) in [
        (*b"dat\0.raw", "a NUL byte"),
        (*b"dat\xff.raw", "not UTF-8"),
        (*b"json:{} ", "not a path of a local file"),
        (*b"nbd://ab", "not a path of a local file"),
    ] {
        patch(&path, at, &name);
        assert_refused(&folder, &options(false), &[says]);
        assert_refused(&folder, &options(true), &[says]);
    }
    patch(&path, at, b"data.raw");
    close(open(&path, &options(false)));
    // The type: without a name at all.
    patch(&path, at - 8, &0x1234_5678_u32.to_be_bytes());
    assert_refused(&folder, &options(false), &["0x44415441 is missing"]);
    patch(&path, at - 8, &0x4441_5441_u32.to_be_bytes());
    // Snapshots, and a raw data file over a backing file: by the header alone.
    patch(&path, 60, &1_u32.to_be_bytes());
    patch(&path, 64, &(1_u64 << 16).to_be_bytes());
    assert_refused(&folder, &options(false), &["nb_snapshots (header byte 60)"]);
}

/// Entries that lead elsewhere, or are compressed, are errors for their cluster; the image is marked corrupt. A check
/// reports them, and that no repair helps.
#[test]
fn entries_that_lead_elsewhere_are_corrupt() {
    for (entry, says) in [
        (
            1 << 63 | 3 << 16,
            "leads to 0x30000 in the data file; expected 0x10000",
        ),
        (
            1 << 62 | 1 << 16,
            "is compressed, which an image with a data file cannot have",
        ),
        (1 << 63 | 1 << 16 | 4, "reserved bits"),
        // The first cluster's place, for the second one.
        (1 << 63, "leads to 0x0 in the data file"),
    ] {
        let folder = Folder::new();
        folder.qemu_create("disk.qcow2", "data_file=data.raw", "1M");
        folder.qemu_io("qcow2", "disk.qcow2", &["write -q -P 1 0 256k"]);
        let path = folder.path("disk.qcow2");
        let table = folder.first_table("disk.qcow2");
        assert_eq!(
            u64_at(&path, table),
            1 << 63,
            "COPIED at offset 0 is the first cluster"
        );
        patch(&path, table + 8, &u64::to_be_bytes(entry));
        let report = checked(&folder);
        assert_eq!(report.corruptions, 1, "{:?}", report.findings);
        assert!(report.findings[0].message.contains(says), "{:?}", report.findings);
        for read_only in [true, false] {
            let disk = open(&path, &options(read_only));
            let lane = Lane::new(&disk, RingKind::Syscalls);
            assert_eq!(lane.try_read(64 << 10, 512), Err(IoError::Corrupt), "{entry:#x}");
            assert_eq!(lane.read(0, 512), [1; 512], "{entry:#x}");
            assert_eq!(lane.read(128 << 10, 512), [1; 512], "{entry:#x}");
            lane.settle();
            drop(lane);
            if read_only {
                close(disk);
            }
        }
        let marked = u64_at(&path, 72);
        assert_eq!(marked & 2, 2, "{entry:#x} is not marked: {marked:#x}");
    }
}

#[test]
fn repair_sets_missing_copied_flags() {
    let folder = Folder::new();
    folder.qemu_create("disk.qcow2", "data_file=data.raw", "1M");
    folder.qemu_io("qcow2", "disk.qcow2", &["write -q -P 1 0 256k"]);
    let (path, table) = (folder.path("disk.qcow2"), folder.first_table("disk.qcow2"));
    patch(&path, table + 16, &(2_u64 << 16).to_be_bytes());
    assert_eq!(checked(&folder).corruptions, 1);
    let cx = Context::syscalls();
    let write = FileOptions {
        write: true,
        direct: false,
    };
    let view = ImageFile::open(&path, write)
        .expect("an image")
        .view(&cx)
        .expect("a view");
    let report = cx.block_on(repair(&view, RepairScope::All)).expect("it turns");
    let report = report.expect("a repair");
    assert_eq!(
        report.after.verdict(),
        Verdict::Clean,
        "{:?}",
        report.after.findings
    );
    assert_eq!(u64_at(&path, table + 16), 1 << 63 | 2 << 16);
    folder.assert_flawless("disk.qcow2", false);
}

/// The names of files are resolved against the image, whatever the working directory; and one opt-in holds for a chain.
#[test]
fn data_file_of_backing_image_is_read() {
    let folder = Folder::new();
    folder.qemu_create("base.qcow2", "data_file=data.raw", "1M");
    folder.qemu_io("qcow2", "base.qcow2", &["write -q -P 5 0 128k"]);
    folder.qemu_create("disk.qcow2", "backing_file=base.qcow2,backing_fmt=qcow2", "1M");
    let no_data = OpenOptions {
        data_files: false,
        ..options(false)
    };
    assert_refused(&folder, &no_data, &["backing file of", "data_file=on"]);
    let before = std::fs::read(folder.path("data.raw")).expect("it");
    let disk = open(&folder.path("disk.qcow2"), &options(false));
    let lane = Lane::new(&disk, RingKind::IoUring);
    lane.write(512, &[7; 512]);
    assert_eq!(lane.read(512, 1024), [[7; 512], [5; 512]].concat());
    lane.flush();
    lane.settle();
    drop(lane);
    close(disk);
    assert!(std::fs::read(folder.path("data.raw")).expect("it") == before);
    folder.assert_flawless("disk.qcow2", false);
}

fn create(folder: &Folder, options: &CreateOptions) -> Result<(), String> {
    let cx = Context::syscalls();
    let write = FileOptions {
        write: true,
        direct: false,
    };
    let view = |name: &str| {
        let path = folder.path(name);
        let touched = std::fs::File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        drop(touched.expect("a file"));
        let file = ImageFile::open(&path, write).expect("a file");
        file.view(&cx).expect("a descriptor")
    };
    let (image, data) = (view("disk.qcow2"), view("data.raw"));
    let made = cx.block_on(create_with_data_file(&image, &data, options));
    made.expect("it turns").map(drop).map_err(|error| chain(&error))
}

fn new(size: u64, raw: bool, keep: bool) -> CreateOptions {
    let mut options = CreateOptions::new(size);
    options.data_file = Some(NewDataFile {
        name: "data.raw".to_owned(),
        raw,
        keep,
    });
    options
}

/// QEMU reads an adopted file's bytes, and finds nothing wrong with the image.
#[test]
fn create_adopts_a_file_that_is_there() {
    for raw in [false, true] {
        let folder = Folder::new();
        let bytes: Vec<u8> = (0..DISK).map(|at| (at / 512 % 251) as u8).collect();
        std::fs::write(folder.path("data.raw"), &bytes).expect("a disk");
        let refused = create(&folder, &new(DISK, raw, false)).expect_err("it is not empty");
        assert!(refused.contains("data_file_keep=on"), "{refused}");
        let refused = create(&folder, &new(DISK - 512, raw, true)).expect_err("it is longer");
        assert!(refused.contains("at least 3149312"), "{refused}");
        assert!(std::fs::read(folder.path("data.raw")).expect("it") == bytes);
        create(&folder, &new(DISK + 512, raw, true)).expect("an image");
        let expected = [&bytes[..], &[0; 512]].concat();
        assert_same(&folder.qemu_reads("disk.qcow2"), &expected, "adopted");
        folder.assert_flawless("disk.qcow2", false);
        let disk = open(&folder.path("disk.qcow2"), &options(false));
        let lane = Lane::new(&disk, RingKind::IoUring);
        assert_same(&lane.read(0, DISK + 512), &expected, "ours");
        lane.settle();
        drop(lane);
        close(disk);
    }
}

/// Growth makes the data file longer; what lay in it past the disk's end does not show.
#[test]
fn growth_extends_the_data_file() {
    for raw in [false, true] {
        let folder = Folder::new();
        create(&folder, &new(DISK, raw, false)).expect("an image");
        let data = folder.path("data.raw");
        patch(&data, DISK, &[0xEE; 8192]);
        let disk = open(&folder.path("disk.qcow2"), &options(false));
        let lane = Lane::new(&disk, RingKind::IoUring);
        lane.write(DISK - 512, &[1; 512]);
        let size = DISK + (1 << 20);
        lane.cx
            .block_on(disk.grow(&lane.cx, size))
            .expect("it turns")
            .expect("a growth");
        let mut expected = vec![0; size as usize];
        expected[DISK as usize - 512..DISK as usize].fill(1);
        assert_same(&lane.read(0, size), &expected, "grown");
        lane.write(size - 512, &[2; 512]);
        expected[size as usize - 512..].fill(2);
        lane.flush();
        lane.settle();
        drop(lane);
        close(disk);
        assert_same(&folder.qemu_reads("disk.qcow2"), &expected, "QEMU's");
        let found = std::fs::read(&data).expect("it");
        assert_eq!(found.len() as u64, size);
        if raw {
            assert_same(&found, &expected, "the raw file");
        }
        let autoclear = u64_at(&folder.path("disk.qcow2"), 88);
        assert_eq!(autoclear == 2, raw, "{autoclear:#x}: what is raw stays raw");
        folder.assert_flawless("disk.qcow2", false);
    }
}

/// The old L1 table's clusters are punched in the image, not in the data file.
#[test]
fn growth_that_moves_the_l1_table_leaves_the_data_alone() {
    let folder = Folder::new();
    let bytes: Vec<u8> = (0..1 << 20).map(|at| 1 + (at / 512 % 251) as u8).collect();
    std::fs::write(folder.path("data.raw"), &bytes).expect("a disk");
    let mut how = new(1 << 20, false, true);
    how.cluster_size = 512;
    create(&folder, &how).expect("an image");
    let disk = open(&folder.path("disk.qcow2"), &options(false));
    let lane = Lane::new(&disk, RingKind::IoUring);
    let l1_before = u64_at(&folder.path("disk.qcow2"), 40);
    let grown = lane.cx.block_on(disk.grow(&lane.cx, 64 << 20));
    grown.expect("it turns").expect("a growth");
    assert_ne!(u64_at(&folder.path("disk.qcow2"), 40), l1_before);
    lane.flush();
    lane.settle();
    drop(lane);
    close(disk);
    let found = std::fs::read(folder.path("data.raw")).expect("it");
    assert_same(&found[..1 << 20], &bytes, "the data file");
    folder.assert_flawless("disk.qcow2", false);
}

#[test]
fn snapshots_of_a_data_file_are_refused() {
    let folder = Folder::new();
    create(&folder, &new(DISK, false, false)).expect("an image");
    let disk = open(&folder.path("disk.qcow2"), &options(false));
    let cx = Context::syscalls();
    let asked = disk.create_snapshot(&cx, "a", std::time::UNIX_EPOCH);
    let refused = cx.block_on(asked).expect("it turns").expect_err("refused");
    assert!(matches!(refused, SnapshotError::DataFile), "{refused}");
    close(disk);
}
