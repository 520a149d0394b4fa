//! Growing a disk: the L1 table moves, the refcount structure grows, nothing shows that was not there.

use crate::common::{Folder, Lane, close, open};
use block::ring::RingKind;
use block::{Context, Disk, IoError};
use qcow::OpenOptions;

/// Method: 512-byte clusters make an L1 table outgrow its cluster at 2 MiB, and a refcount table at 8 MiB of
/// file; the disk is written before, between and after.
#[test]
fn growth_keeps_bytes_and_moves_tables() {
    for version in ["0.10", "1.1"] {
        let folder = Folder::new();
        let options = format!("cluster_size=512,compat={version}");
        folder.qemu_img(&["create", "-f", "qcow2", "-o", &options, "disk.qcow2", "1M"]);
        let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::IoUring);
        let mut model = vec![0u8; 1 << 20];
        for (round, size) in [3u64 << 20, (7 << 20) + 512, 24 << 20].into_iter().enumerate() {
            let byte = round as u8 + 1;
            let fill = vec![byte; model.len() / 1024 * 512];
            lane.write(4096, &fill);
            model[4096..4096 + fill.len()].copy_from_slice(&fill);
            let cx = Context::syscalls();
            cx.block_on(disk.grow(&cx, size))
                .expect("the ring turns")
                .expect("growth");
            assert_eq!(disk.info().size_bytes, size);
            model.resize(size as usize, 0);
            let tail = model.len() - 4096;
            lane.write(tail as u64, &[byte; 4096]);
            model[tail..].fill(byte);
            assert!(lane.read(0, size) == model, "after growing to {size}");
        }
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert!(folder.qemu_reads("disk.qcow2") == model);
    }
}

/// Only disabled bitmaps, which are fitted to the disk's new size, need another state of the metadata when it closes.
#[test]
fn grown_disk_without_bitmaps_closes_as_it_is() {
    let folder = Folder::new();
    let path = folder.path("disk.qcow2");
    folder.qemu_img(&["create", "-f", "qcow2", "disk.qcow2", "1M"]);
    let disk = open(&path, &OpenOptions::default());
    let cx = Context::syscalls();
    cx.block_on(disk.grow(&cx, 2 << 20))
        .expect("the ring turns")
        .expect("growth");
    let before = std::fs::read(&path).expect("the image");
    drop(cx);
    close(disk);
    assert!(
        std::fs::read(&path).expect("the image") == before,
        "the close wrote to the image"
    );
}

#[test]
fn growth_does_not_uncover_a_longer_backing_file() {
    for (version, bits) in [("0.10", 16), ("1.1", 16), ("1.1", 9)] {
        let folder = Folder::new();
        std::fs::write(folder.path("base.raw"), vec![0xBB; 4 << 20]).expect("a base image");
        let options = format!("cluster_size={},compat={version}", 1 << bits);
        let create = [
            "create",
            "-f",
            "qcow2",
            "-o",
            &options,
            "-b",
            "base.raw",
            "-F",
            "raw",
            "disk.qcow2",
            "1049088",
        ];
        folder.qemu_img(&create);
        let options = OpenOptions {
            backing_files: true,
            ..OpenOptions::default()
        };
        let disk = open(&folder.path("disk.qcow2"), &options);
        let cx = Context::syscalls();
        cx.block_on(disk.grow(&cx, 6 << 20))
            .expect("the ring turns")
            .expect("growth");
        let lane = Lane::new(&disk, RingKind::IoUring);
        let mut model = vec![0; 6 << 20];
        model[..1_049_088].fill(0xBB);
        assert!(
            lane.read(0, 6 << 20) == model,
            "compat {version}, clusters of {}",
            1 << bits
        );
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert!(folder.qemu_reads("disk.qcow2") == model);
    }
}

/// Version 2 has no zero clusters: zeros are written where a longer backing file would show, and not over all the space
/// that the disk gains.
#[test]
fn growth_of_version_2_zeroes_only_over_backing_file() {
    let folder = Folder::new();
    std::fs::write(folder.path("base.raw"), vec![0xBB; (1 << 20) + (100 << 10)]).expect("a base image");
    let options = "cluster_size=65536,compat=0.10";
    let backing = ["-b", "base.raw", "-F", "raw", "disk.qcow2", "1M"];
    folder.qemu_img(&[&["create", "-f", "qcow2", "-o", options], &backing[..]].concat());
    let open_options = OpenOptions {
        backing_files: true,
        ..OpenOptions::default()
    };
    let disk = open(&folder.path("disk.qcow2"), &open_options);
    grow(&disk, 256 << 20);
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert!(lane.read(1 << 20, 1 << 20) == vec![0; 1 << 20]);
    lane.write_zeroes(0, 4 << 20, true);
    assert!(lane.read(0, 4 << 20) == vec![0; 4 << 20]);
    drop(lane);
    close(disk);
    folder.assert_flawless("disk.qcow2", false);
    let len = std::fs::metadata(folder.path("disk.qcow2"))
        .expect("the image")
        .len();
    assert!(len < 2 << 20, "{len} bytes to hide 100 KiB and to zero 1 MiB");
}

fn grow(disk: &std::sync::Arc<qcow::QcowDisk>, bytes: u64) {
    let cx = Context::syscalls();
    let grown = cx.block_on(disk.grow(&cx, bytes)).expect("the ring turns");
    grown.expect("growth");
}

/// The L1 table of a small disk leaves most of its cluster to whatever was there before.
#[test]
fn growth_takes_no_bytes_behind_l1_table_for_entries() {
    for entries in [1, 64] {
        let folder = Folder::new();
        let path = folder.path("disk.qcow2");
        // Clusters of 4 KiB: 512 entries to an L1 cluster, each of 2 MiB.
        let size = format!("{}M", 2 * entries);
        folder.qemu_img(&[
            "create",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4k",
            "disk.qcow2",
            &size,
        ]);
        let mut file = std::fs::read(&path).expect("the image");
        let l1 = u64::from_be_bytes(file[40..48].try_into().expect("eight bytes")) as usize;
        file.resize(file.len().max(l1 + 4096), 0);
        file[l1 + entries * 8..l1 + 4096].fill(0xA5);
        std::fs::write(&path, file).expect("the image");
        let disk = open(&path, &OpenOptions::default());
        grow(&disk, 160 << 20);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        let image = folder.qemu_reads("disk.qcow2");
        assert!(image.iter().all(|byte| *byte == 0), "{entries}");
    }
}

/// A disk that QEMU has shrunk ends inside a cluster, whose rest holds what was there before.
#[test]
fn growth_after_shrink_does_not_uncover_rest_of_cluster() {
    for (version, snapshot) in [("0.10", false), ("1.1", false), ("1.1", true)] {
        let folder = Folder::new();
        let options = format!("compat={version}");
        folder.qemu_img(&["create", "-f", "qcow2", "-o", &options, "disk.qcow2", "128k"]);
        folder.qemu_io("qcow2", "disk.qcow2", &["write -P 1 0 128k"]);
        folder.qemu_img(&["resize", "--shrink", "disk.qcow2", "96k"]);
        if snapshot {
            folder.qemu_img(&["snapshot", "-c", "before", "disk.qcow2"]);
        }
        let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
        grow(&disk, 128 << 10);
        let lane = Lane::new(&disk, RingKind::IoUring);
        let mut model = vec![1; 128 << 10];
        model[96 << 10..].fill(0);
        assert!(lane.read(0, 128 << 10) == model, "compat {version}");
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert!(folder.qemu_reads("disk.qcow2") == model, "compat {version}");
    }
}

/// A snapshot with VM state that was restored has left the state in the active L1 table, behind the disk's end.
#[test]
fn growth_does_not_show_vm_state_as_disk_contents() {
    for sparse in [true, false] {
        let folder = Folder::new();
        let options = "cluster_size=4k";
        folder.qemu_img(&["create", "-f", "qcow2", "-o", options, "disk.qcow2", "3M"]);
        folder.qemu_io(
            "qcow2",
            "disk.qcow2",
            &["write -P 1 0 3M", "write -b -P 0xEE 0 300k"],
        );
        folder.qemu_img(&["snapshot", "-c", "with-state", "disk.qcow2"]);
        folder.qemu_img(&["snapshot", "-a", "with-state", "disk.qcow2"]);
        let options = OpenOptions {
            sparse,
            ..OpenOptions::default()
        };
        let disk = open(&folder.path("disk.qcow2"), &options);
        let lane = Lane::new(&disk, RingKind::IoUring);
        let mut model = vec![1; 3 << 20];
        for bytes in [(3 << 20) + 512, 5 << 20, 40 << 20] {
            grow(&disk, bytes);
            model.resize(bytes as usize, 0);
            assert!(lane.read(0, bytes) == model, "{bytes} bytes");
        }
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert!(folder.qemu_reads("disk.qcow2") == model);
        folder.qemu_img(&["snapshot", "-a", "with-state", "disk.qcow2"]);
        folder.assert_flawless("disk.qcow2", false);
    }
}

/// Snapshots of version 2 do not record the disk's size: QEMU would take the new one, and could not restore them.
#[test]
fn growth_refuses_version_2_image_with_snapshots() {
    for (version, snapshot, grows) in [("0.10", true, false), ("0.10", false, true), ("1.1", true, true)] {
        let folder = Folder::new();
        let options = format!("compat={version}");
        folder.qemu_img(&["create", "-f", "qcow2", "-o", &options, "disk.qcow2", "1M"]);
        if snapshot {
            folder.qemu_img(&["snapshot", "-c", "before", "disk.qcow2"]);
        }
        let before = std::fs::read(folder.path("disk.qcow2")).expect("the image");
        let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
        let cx = Context::syscalls();
        let grown = cx.block_on(disk.grow(&cx, 2 << 20)).expect("the ring turns");
        let expected = if grows { Ok(()) } else { Err(IoError::Unsupported) };
        assert_eq!(grown, expected, "compat {version}, snapshot {snapshot}");
        close(disk);
        if !grows {
            assert!(std::fs::read(folder.path("disk.qcow2")).expect("the image") == before);
        }
        if snapshot {
            folder.qemu_img(&["snapshot", "-a", "before", "disk.qcow2"]);
        }
        folder.assert_flawless("disk.qcow2", false);
    }
}

#[test]
fn growth_refuses_to_shrink_or_exceed_the_l1_table() {
    let folder = Folder::new();
    folder.qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=512",
        "disk.qcow2",
        "1M",
    ]);
    let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
    let cx = Context::syscalls();
    for size in [1 << 19, 1 << 50, u64::MAX] {
        let grown = cx.block_on(disk.grow(&cx, size)).expect("the ring turns");
        assert_eq!(grown, Err(IoError::OutOfRange), "{size}");
    }
    assert_eq!(disk.info().size_bytes, 1 << 20);
    close(disk);
    folder.assert_flawless("disk.qcow2", false);
}
