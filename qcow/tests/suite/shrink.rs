//! Shrinking of disks beside QEMU's tools: the disk and its snapshots before and after, what is freed, and what shows when
//! the disk grows again.

use std::path::Path;
use std::sync::Arc;

use crate::common::{
    Folder, LUKS_OPTIONS, Lane, OFFSET_MASK, assert_same, close, drain, open, patch, qemu_secret, secret,
    u64_at,
};
use crate::snapshot_shapes::{IMAGE, change, create_on, delete, name, options, qemu_reads, shapes, whole};
use block::ring::RingKind;
use block::{Context, Disk, IoError};
use qcow::{OpenOptions, QcowDisk, ShrinkError, SnapshotError};
use ringdisk_gen::Random;

/// Shrinks on the context of the queues that are open.
fn shrink_on(cx: &Context, disk: &QcowDisk, bytes: u64) -> Result<(), ShrinkError> {
    cx.block_on(disk.shrink(cx, bytes)).expect("the ring turns")
}

/// As [`shrink_on`], beside no queue.
fn shrink(disk: &QcowDisk, bytes: u64) -> Result<(), ShrinkError> {
    let cx = Context::syscalls();
    let shrunk = shrink_on(&cx, disk, bytes);
    drain(&cx);
    shrunk
}

/// As [`crate::snapshot_shapes::look`], for snapshots of disks of other sizes: QEMU reads as much of them as the disk has.
#[track_caller]
fn look(folder: &Folder, active: &[u8], snapshots: &[(&str, &[u8])], what: &str) {
    crate::snapshot_shapes::look(folder, active, &[], what);
    for (snapshot, bytes) in snapshots {
        let what = format!("{what}: {snapshot}");
        let shown = OpenOptions {
            read_only: true,
            snapshot: Some(name(snapshot)),
            ..options()
        };
        let disk = open(&folder.path(IMAGE), &shown);
        assert_same(&whole(&disk), bytes, &what);
        close(disk);
        let len = active.len().min(bytes.len());
        assert_same(&qemu_reads(folder, snapshot)[..len], &bytes[..len], &what);
    }
}

/// Opens the image, shrinks its disk and closes it.
#[track_caller]
fn shrink_closed(path: &Path, options: &OpenOptions, bytes: u64) {
    let disk = open(path, options);
    shrink(&disk, bytes).unwrap_or_else(|error| panic!("to {bytes}: {error}"));
    close(disk);
}

fn grow(disk: &Arc<QcowDisk>, bytes: u64) {
    let cx = Context::syscalls();
    let grown = cx.block_on(disk.grow(&cx, bytes)).expect("the ring turns");
    grown.expect("growth");
    drain(&cx);
}

/// Has QEMU resize an image's disk.
fn qemu_resize(folder: &Folder, bytes: u64) {
    let named = folder.named("qcow2", IMAGE);
    let mut args = vec!["resize", "-q", "--shrink"];
    args.extend(named.iter().map(String::as_str));
    let bytes = bytes.to_string();
    args.push(&bytes);
    folder.qemu_img(&args);
}

/// Sizes within and between clusters of each kind, in the order in which a disk gets them.
fn sizes(cluster: u64, disk: u64) -> Vec<u64> {
    let within = |clusters: u64| clusters * cluster + (cluster / 2).max(512).min(cluster - 512);
    let mut sizes = vec![
        disk - 512,
        // What the disk and no snapshot has, what both have, zeros, and compressed bytes.
        within(14),
        12 * cluster,
        within(10),
        within(6),
        5 * cluster,
        within(1),
        512,
    ];
    sizes.dedup();
    sizes
}

#[test]
fn shrink_keeps_the_start_and_frees_the_rest_of_every_shape() {
    for shape in shapes() {
        let what = shape.to_string();
        let folder = Folder::new();
        shape.make(&folder);
        let path = folder.path(IMAGE);
        let disk = open(&path, &options());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        change(&lane, &shape, 0x41);
        let taken = lane.read(0, shape.disk());
        // Snapshots of version 2 keep a disk's size.
        let is_taken = shape.compat != "0.10";
        if is_taken {
            create_on(&lane.cx, &disk, "one").unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        let snapshots: &[(&str, &[u8])] = if is_taken { &[("one", &taken)] } else { &[] };
        change(&lane, &shape, 0x42);
        let mut model = lane.read(0, shape.disk());
        for size in sizes(shape.cluster, shape.disk()) {
            let what = format!("{what} to {size}");
            shrink_on(&lane.cx, &disk, size).unwrap_or_else(|error| panic!("{what}: {error}"));
            model.truncate(size as usize);
            assert_eq!(disk.info().size_bytes, size, "{what}");
            // The queue that saw what the disk was sees what it has become.
            assert_same(&lane.read(0, size), &model, &what);
            assert_eq!(lane.try_read(size, 512), Err(IoError::OutOfRange), "{what}");
            if size > 512 {
                lane.write(size - 1024, &[0x43; 1024]);
                model[size as usize - 1024..].fill(0x43);
            }
        }
        lane.settle();
        lane.settle();
        drop(lane);
        close(disk);
        look(&folder, &model, snapshots, &what);
        // As large again, by QEMU and by us.
        model.resize(shape.disk() as usize, 0);
        // QEMU cannot hide a backing file in version 2.
        if is_taken {
            qemu_resize(&folder, shape.disk());
            look(&folder, &model, snapshots, &format!("{what}, grown by QEMU"));
        }
        let disk = open(&path, &options());
        shrink(&disk, 512).unwrap_or_else(|error| panic!("{what}: {error}"));
        grow(&disk, shape.disk());
        model[512..].fill(0);
        if is_taken {
            delete(&disk, &name("one")).unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        close(disk);
        look(&folder, &model, &[], &format!("{what}, grown by us"));
    }
}

/// Random images of QEMU's, with and without a snapshot, to random sizes, of which arrays know the result. What is longer
/// again reads as zeros, whoever has made it so.
#[test]
fn shrink_and_growth_match_an_array() {
    for seed in 0..48 {
        let random = &mut Random::new(seed);
        let format = random.pick(&[
            "cluster_size=512",
            "cluster_size=512,refcount_bits=64",
            "cluster_size=4k",
            "cluster_size=64k",
            "cluster_size=16k,extended_l2=on",
            "cluster_size=32k,extended_l2=on",
            "cluster_size=4k,compat=0.10",
        ]);
        let what = format!("seed {seed}, {format}");
        let folder = Folder::new();
        let mut size = (1 + random.below(1200)) * 512;
        folder.qemu_create(IMAGE, format, &size.to_string());
        folder.scribble_by_qemu(IMAGE, size, random, 30);
        let mut model = folder.qemu_reads(IMAGE);
        let taken = model.clone();
        let mut snapshots: Vec<(&str, &[u8])> = Vec::new();
        if !format.contains("compat") && random.one_in(2) {
            folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
            snapshots.push(("s", &taken));
            folder.scribble_by_qemu(IMAGE, size, random, 10);
            model = folder.qemu_reads(IMAGE);
        }
        for _ in 0..3 {
            size = (1 + random.below(size / 512)) * 512;
            shrink_closed(&folder.path(IMAGE), &options(), size);
            model.truncate(size as usize);
            look(&folder, &model, &snapshots, &format!("{what}, to {size}"));
            size += random.below(300) * 512;
            model.resize(size as usize, 0);
            if random.one_in(2) {
                let disk = open(&folder.path(IMAGE), &options());
                grow(&disk, size);
                close(disk);
            } else {
                qemu_resize(&folder, size);
            }
            look(&folder, &model, &snapshots, &format!("{what}, grown to {size}"));
            folder.scribble_by_qemu(IMAGE, size, random, 10);
            model = folder.qemu_reads(IMAGE);
        }
    }
}

/// Every size within a cluster of subclusters of all kinds.
#[test]
fn shrink_cuts_subclusters_wherever_the_end_lies() {
    const CLUSTER: u64 = 32 << 10;
    let folder = Folder::new();
    std::fs::write(folder.path("base.raw"), vec![0xBB; 2 * CLUSTER as usize]).expect("a base");
    let format = "cluster_size=32k,extended_l2=on,backing_file=base.raw,backing_fmt=raw";
    folder.qemu_create("first.qcow2", format, &(2 * CLUSTER).to_string());
    let base = CLUSTER;
    let commands = [
        format!("write -P 1 {base} 2k"),
        format!("write -z {} 3k", base + (2 << 10)),
        // Subclusters of the base in between.
        format!("write -P 2 {} 5k", base + (8 << 10)),
        format!("write -z {} 4k", base + (20 << 10)),
        format!("write -P 3 {} 4k", base + (28 << 10)),
    ];
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    folder.qemu_io("qcow2", "first.qcow2", &commands);
    let model = folder.qemu_reads("first.qcow2");
    for sectors in 1..CLUSTER / 512 {
        let size = CLUSTER + sectors * 512;
        std::fs::copy(folder.path("first.qcow2"), folder.path(IMAGE)).expect("a copy");
        shrink_closed(&folder.path(IMAGE), &options(), size);
        let mut cut = model[..size as usize].to_vec();
        look(&folder, &cut, &[], &format!("to {size}"));
        qemu_resize(&folder, 2 * CLUSTER);
        cut.resize(2 * CLUSTER as usize, 0);
        assert_same(&folder.qemu_reads(IMAGE), &cut, &format!("{size}, grown"));
    }
}

#[test]
fn shrink_of_an_encrypted_disk_leaves_encrypted_zeros() {
    for format in [
        "",
        ",cluster_size=512",
        ",cluster_size=16k,extended_l2=on",
        ",compat=0.10",
    ] {
        let folder = Folder::new();
        let (format, key) = (format!("{LUKS_OPTIONS}{format}"), qemu_secret());
        folder.qemu_img(&[
            "create", "-q", "--object", &key, "-f", "qcow2", "-o", &format, IMAGE, "1M",
        ]);
        folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 1M", "write -P 34 100k 3k"]);
        let mut model = folder.qemu_reads(IMAGE);
        let with_secret = OpenOptions {
            secret: secret(),
            ..options()
        };
        for size in [900_608_u64, 512_512, 102_912, 101_888] {
            shrink_closed(&folder.path(IMAGE), &with_secret, size);
            model.truncate(size as usize);
            folder.assert_flawless(IMAGE, false);
            assert_same(&folder.qemu_reads(IMAGE), &model, &format!("{format}, to {size}"));
        }
        qemu_resize(&folder, 1 << 20);
        model.resize(1 << 20, 0);
        assert_same(&folder.qemu_reads(IMAGE), &model, &format!("{format}, grown"));
        folder.assert_flawless(IMAGE, false);
    }
}

#[test]
fn shrink_cuts_the_data_file_off_at_the_end_of_the_disk() {
    let allowed = OpenOptions {
        data_files: true,
        ..options()
    };
    for format in [
        "data_file=data.raw",
        "data_file=data.raw,data_file_raw=on",
        "data_file=data.raw,cluster_size=16k,extended_l2=on",
        "data_file=data.raw,cluster_size=512",
    ] {
        let folder = Folder::new();
        folder.qemu_create(IMAGE, format, "1M");
        folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 1M", "write -P 34 100k 3k"]);
        let mut model = folder.qemu_reads(IMAGE);
        let len = || folder.path("data.raw").metadata().expect("a data file").len();
        for size in [900_608_u64, 524_288, 102_912] {
            let disk = open(&folder.path(IMAGE), &allowed);
            let lane = Lane::new(&disk, RingKind::Syscalls);
            shrink_on(&lane.cx, &disk, size).expect("a smaller disk");
            assert_eq!(len(), size, "{format}");
            model.truncate(size as usize);
            assert_same(&lane.read(0, size), &model, format);
            lane.write(size - 512, &[0x43; 512]);
            model[size as usize - 512..].fill(0x43);
            lane.settle();
            lane.settle();
            drop(lane);
            close(disk);
            assert_eq!(len(), size, "{format}");
            folder.assert_flawless(IMAGE, false);
            assert_same(&folder.qemu_reads(IMAGE), &model, format);
        }
        // A cut behind the header's write leaves it longer: the same size again cuts it off.
        let size = model.len() as u64;
        patch(&folder.path("data.raw"), size, &[0xEE; 8192]);
        shrink_closed(&folder.path(IMAGE), &allowed, size);
        assert_eq!(len(), size, "{format}");
        qemu_resize(&folder, 1 << 20);
        model.resize(1 << 20, 0);
        assert_same(&folder.qemu_reads(IMAGE), &model, format);
        if format.contains("raw=on") {
            assert_same(
                &std::fs::read(folder.path("data.raw")).expect("a data file"),
                &model,
                format,
            );
        }
        folder.assert_flawless(IMAGE, false);
    }
}

#[test]
fn shrink_refuses_other_sizes_and_changes_nothing() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "compat=0.10", "1M");
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 1M"]);
    let path = folder.path(IMAGE);
    let refused = |bytes: u64, options: &OpenOptions| {
        let before = std::fs::read(&path).expect("an image");
        let disk = open(&path, options);
        let error = shrink(&disk, bytes).expect_err("refused");
        assert_eq!(disk.info().size_bytes, 1 << 20);
        close(disk);
        assert!(std::fs::read(&path).expect("an image") == before, "{error}");
        error
    };
    for bytes in [0, 511, 513, (1 << 20) + 512, u64::MAX - 511] {
        assert!(
            matches!(refused(bytes, &options()), ShrinkError::Size { .. }),
            "{bytes}"
        );
    }
    let expected = "the new size is 0 bytes; expected a multiple of 512, more than 0 and at most 1048576, the disk's size";
    assert_eq!(refused(0, &options()).to_string(), expected);
    let read_only = OpenOptions {
        read_only: true,
        ..options()
    };
    let error = refused(512, &read_only);
    assert!(
        matches!(error, ShrinkError::Metadata(SnapshotError::Io(IoError::ReadOnly))),
        "{error}"
    );
    folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
    let error = refused(512, &options());
    assert!(error.to_string().contains("compat=1.1"), "{error}");
    folder.qemu_img(&["snapshot", "-d", "s", IMAGE]);
    shrink_closed(&path, &options(), 512);
    look(&folder, &[17; 512], &[], "without the snapshot");
}

/// Two entries lead to one cluster, which counts one: to free it for one of them would lose the other's data.
#[test]
fn shrink_gives_up_nothing_that_the_disk_keeps() {
    // In the table that the end lies in, and in one past it.
    for (keeps, loses, size) in [(0, 5, 2048), (1, 64, 32 << 10), (1, 70, (32 << 10) + 512)] {
        let folder = Folder::new();
        folder.qemu_create(IMAGE, "cluster_size=512", "64k");
        folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 64k"]);
        let path = folder.path(IMAGE);
        let place = |cluster: u64| {
            let l1 = u64_at(&path, 40);
            (u64_at(&path, l1 + cluster / 64 * 8) & OFFSET_MASK) + cluster % 64 * 8
        };
        // Not COPIED, or the entry would be refused when it is loaded.
        let kept = u64_at(&path, place(keeps)) & OFFSET_MASK;
        patch(&path, place(loses), &kept.to_be_bytes());
        let before = std::fs::read(&path).expect("an image");
        let disk = open(&path, &options());
        let error = shrink(&disk, size).expect_err("refused");
        assert!(
            matches!(&error, ShrinkError::Metadata(SnapshotError::Undercounted { offset }) if *offset == kept),
            "{error}"
        );
        assert_eq!(whole(&disk), [17; 64 << 10]);
        close(disk);
        assert!(
            std::fs::read(&path).expect("an image") == before,
            "it has changed"
        );
    }
}

/// As above, for what the newest snapshot has.
#[test]
fn shrink_gives_up_nothing_that_a_snapshot_keeps() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=64k", "1M");
    folder.qemu_io("qcow2", IMAGE, &["write -P 17 0 1M"]);
    folder.qemu_img(&["snapshot", "-c", "s", IMAGE]);
    let path = folder.path(IMAGE);
    let data = u64_at(&path, folder.first_table(IMAGE) + 9 * 8) & OFFSET_MASK;
    let block = u64_at(&path, u64_at(&path, 48));
    patch(&path, block + (data >> 16) * 2, &1_u16.to_be_bytes());
    let before = std::fs::read(&path).expect("an image");
    let disk = open(&path, &options());
    let error = shrink(&disk, 512 << 10).expect_err("refused");
    assert!(
        matches!(&error, ShrinkError::Metadata(SnapshotError::Undercounted { offset }) if *offset == data),
        "{error}"
    );
    close(disk);
    assert!(
        std::fs::read(&path).expect("an image") == before,
        "it has changed"
    );
}

#[test]
fn data_bytes_from_counts_what_the_image_itself_has() {
    let folder = Folder::new();
    std::fs::write(folder.path("base.raw"), vec![0xBB; 1 << 20]).expect("a base");
    folder.qemu_create(
        IMAGE,
        "cluster_size=4k,backing_file=base.raw,backing_fmt=raw",
        "4M",
    );
    let commands = [
        "write -P 1 0 8k",
        "write -z 64k 64k",
        "write -c -P 2 2M 4k",
        "write -P 3 4092k 4k",
    ];
    folder.qemu_io("qcow2", IMAGE, &commands);
    let disk = open(&folder.path(IMAGE), &options());
    let cx = Context::syscalls();
    let count = |from| {
        cx.block_on(disk.data_bytes_from(&cx, from))
            .expect("the ring turns")
    };
    for (from, bytes) in [
        (0, 16 << 10),
        (512, (16 << 10) - 512),
        (8192, 8192),
        (3 << 20, 4096),
        (4 << 20, 0),
    ] {
        assert_eq!(count(from), Ok(bytes), "from {from}");
    }
    close(disk);
}
