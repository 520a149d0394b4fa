//! Bugs that others shipped, each one a test here.
//!
//! Every test names the report it stands for. Where the bug was a race, the queues are turned by hand
//! through many interleavings instead of hoping for one.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Folder, Lane, assert_same, chain, close, open, patch, u64_at};
use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Disk, Done, Op};
use qcow::{OpenOptions, QcowDisk};

/// Bytes of which no two sectors are alike.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| ((at / 512 + seed) as u8) ^ ((at / (512 << 8)) as u8))
        .collect()
}

/// Bytes no two of whose neighbourhoods are alike, so that a wrong offset cannot look right.
fn numbered(len: usize) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(u64::to_le_bytes).collect()
}

fn create(folder: &Folder, options: &str, size: &str) {
    folder.qemu_img(&["create", "-f", "qcow2", "-o", options, "disk.qcow2", size]);
}

fn overlay(folder: &Folder, options: &str, base: &[u8]) {
    std::fs::write(folder.path("base.raw"), base).expect("a base");
    let args = ["-b", "base.raw", "-F", "raw", "disk.qcow2"];
    folder.qemu_img(&[&["create", "-f", "qcow2", "-o", options], &args[..]].concat());
}

fn backed() -> OpenOptions {
    OpenOptions {
        backing_files: true,
        ..OpenOptions::default()
    }
}

fn file_len(folder: &Folder) -> u64 {
    let file = std::fs::metadata(folder.path("disk.qcow2"));
    file.expect("the image").len()
}

/// Closes the disk, has QEMU check it, and compares what QEMU reads.
#[track_caller]
fn finish(folder: &Folder, disk: Arc<QcowDisk>, lanes: Vec<Lane>, model: &[u8]) {
    settle(&lanes);
    assert_same(&lanes[0].read(0, model.len() as u64), model, "before closing");
    settle(&lanes);
    drop(lanes);
    close(disk);
    folder.assert_flawless("disk.qcow2", false);
    assert_same(&folder.qemu_reads("disk.qcow2"), model, "QEMU, afterwards");
}

/// Turns all queues until none has anything left to do.
fn settle(lanes: &[Lane]) {
    let mut done = Vec::new();
    while lanes
        .iter()
        .any(|lane| lane.cx.tasks() > 0 || lane.cx.ring().in_flight() > 0)
    {
        lanes.iter().for_each(|lane| lane.turn(&mut done));
    }
    assert!(done.is_empty(), "an answer nobody expected");
}

/// Turns all queues until so many requests are answered, all of them well.
fn answers(lanes: &[Lane], count: usize) -> Vec<Done> {
    let mut done = Vec::new();
    while done.len() < count {
        lanes.iter().for_each(|lane| lane.turn(&mut done));
    }
    for done in &done {
        assert_eq!(done.result, Ok(()), "request {}", done.tag);
    }
    done
}

/// Cloud Hypervisor #8624: queue A discards, queue B's FLUSH publishes the cluster as free, it becomes an L2
/// table, and A's late hole punch erases the table.
///
/// Method: A is suspended after 0, 1, 2, ... turns of its discard while B flushes and fills the disk, so that
/// the rest of A's discard comes last.
#[test]
fn discard_never_punches_cluster_reused_as_table() {
    for no_unref in [false, true] {
        for turns in 0..14 {
            let folder = Folder::new();
            // Tables of 64 entries: almost every cluster that is freed becomes a table soon.
            create(&folder, "cluster_size=512", "4M");
            let mut model = vec![0; 4 << 20];
            let options = OpenOptions {
                discard_no_unref: no_unref,
                ..OpenOptions::default()
            };
            let disk = open(&folder.path("disk.qcow2"), &options);
            let lanes: Vec<Lane> = (0..2).map(|_| Lane::new(&disk, RingKind::IoUring)).collect();
            let [a, b] = &lanes[..] else {
                unreachable!("two lanes")
            };
            let old = pattern(1, 128 << 10);
            b.write(0, &old);
            model[..old.len()].copy_from_slice(&old);
            b.flush();
            let mut done = Vec::new();
            a.submit(Op::Discard, 4096, 64 << 10, Buffer::default(), 1);
            model[4096..68 << 10].fill(0);
            for _ in 0..turns {
                a.turn(&mut done);
            }
            // It need not wait for the discard, unless that has begun a round on its worker.
            b.submit(Op::Flush, 0, 0, Buffer::default(), 4);
            let begun = Instant::now();
            while !done.iter().any(|done| done.tag == 4) {
                b.turn(&mut done);
                if begun.elapsed() > Duration::from_millis(50) {
                    a.turn(&mut done);
                }
            }
            for step in 1..40 {
                // A new table and a data cluster each; the freed clusters are wanted now.
                let at = (128 << 10) + step * (32 << 10);
                let bytes = pattern(step, 1024);
                b.submit(
                    Op::Write { fua: step % 7 == 0 },
                    at as u64,
                    1024,
                    AlignedBuf::from_slice(&bytes).into(),
                    2,
                );
                model[at..at + 1024].copy_from_slice(&bytes);
                for _ in 0..3 {
                    b.turn(&mut done);
                }
                if step == 10 {
                    b.submit(Op::Flush, 0, 0, Buffer::default(), 3);
                }
            }
            while done.len() < 42 {
                lanes.iter().for_each(|lane| lane.turn(&mut done));
            }
            assert!(done.iter().all(|done| done.result == Ok(())), "{done:?}");
            finish(&folder, disk, lanes, &model);
        }
    }
}

/// Cloud Hypervisor #8621: several queues that write over a backing file corrupt each other's clusters.
///
/// Method: four queues write neighbouring sectors of the same clusters, all at once, so that each cluster's first
/// writers race to copy it; the rest of the cluster must stay the backing file's.
#[test]
fn concurrent_copies_from_backing_keep_every_sector() {
    for (cluster, ring) in [
        (65536, RingKind::IoUring),
        (4096, RingKind::Syscalls),
        (2 << 20, RingKind::IoUring),
    ] {
        let folder = Folder::new();
        let mut model = numbered(4 << 20);
        overlay(&folder, &format!("cluster_size={cluster}"), &model);
        let disk = open(&folder.path("disk.qcow2"), &backed());
        let lanes: Vec<Lane> = (0..4).map(|_| Lane::new(&disk, ring)).collect();
        for round in 0..16 {
            for (index, lane) in lanes.iter().enumerate() {
                for part in 0..4 {
                    let at = round * (256 << 10) + part * 4096 + index * 1024;
                    let bytes = pattern(round * 64 + part * 4 + index, 512);
                    let buffer = AlignedBuf::from_slice(&bytes).into();
                    lane.submit(Op::Write { fua: false }, at as u64, 512, buffer, 0);
                    model[at..at + 512].copy_from_slice(&bytes);
                }
            }
            answers(&lanes, 16);
        }
        finish(&folder, disk, lanes, &model);
        assert!(std::fs::read(folder.path("base.raw")).expect("the base") == numbered(4 << 20));
    }
}

/// Cloud Hypervisor #8245: WRITE_ZEROES dropped the mapping and so uncovered the backing file's data.
#[test]
fn write_zeroes_never_uncovers_the_backing_file() {
    for compat in ["0.10", "1.1"] {
        for unmap in [false, true] {
            for no_unref in [false, true] {
                let folder = Folder::new();
                let mut model = numbered(1 << 20);
                overlay(&folder, &format!("compat={compat},cluster_size=4096"), &model);
                let options = OpenOptions {
                    discard_no_unref: no_unref,
                    ..backed()
                };
                let disk = open(&folder.path("disk.qcow2"), &options);
                let lane = Lane::new(&disk, RingKind::IoUring);
                lane.write(64 << 10, &pattern(1, 32 << 10));
                model[64 << 10..96 << 10].copy_from_slice(&pattern(1, 32 << 10));
                // Never written, partly written, written; whole and part clusters; twice; up to the end.
                let ranges = [
                    (0, 8192),
                    (10 << 10, 3584),
                    (60 << 10, 16 << 10),
                    (72 << 10, 512),
                    (60 << 10, 16 << 10),
                    ((1 << 20) - 6144, 6144),
                ];
                for (offset, len) in ranges {
                    lane.write_zeroes(offset as u64, len as u64, unmap);
                    model[offset..offset + len].fill(0);
                    assert_same(&lane.read(0, 1 << 20), &model, "after zeroing");
                    lane.flush();
                }
                // A discard of what reads as zeros must not bring it back either.
                lane.discard(0, 8192);
                lane.flush();
                finish(&folder, disk, vec![lane], &model);
            }
        }
    }
}

/// Cloud Hypervisor #8597: each fsync stranded a cluster; the file doubled while `check` stayed clean.
#[test]
fn repeated_write_and_flush_does_not_grow_the_file() {
    let folder = Folder::new();
    create(&folder, "cluster_size=4096", "16M");
    let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::IoUring);
    let mut model = vec![0; 16 << 20];
    let size = 256 << 10;
    lane.write(0, &pattern(0, size));
    lane.flush();
    let before = file_len(&folder);
    for round in 1..=100 {
        let at = round * 512 % size;
        lane.write(at as u64, &pattern(round, 512));
        lane.flush();
    }
    assert_eq!(file_len(&folder), before, "overwriting allocates nothing");
    for round in 0..100 {
        match round % 3 {
            0 => lane.discard(0, size as u64),
            1 => lane.write_zeroes(0, size as u64, true),
            _ => {}
        }
        lane.flush();
        lane.write(0, &pattern(round, size));
        lane.flush();
        lane.settle();
    }
    model[..size].copy_from_slice(&pattern(99, size));
    // What was freed a round ago is used again: a few generations at most are in the file at once.
    let grown = file_len(&folder) - before;
    assert!(grown <= 4 * size as u64, "the file has grown by {grown} bytes");
    finish(&folder, disk, vec![lane], &model);
}

/// Cloud Hypervisor #8606: live L2 tables were handed out again; 1.2 million check errors.
///
/// Method: so many tables that most are not cached, freed and allocated clusters mixed, and the image opened
/// again and again, so that the allocator starts over from what is on disk.
#[test]
fn clusters_of_live_tables_are_never_handed_out_again() {
    let folder = Folder::new();
    create(&folder, "cluster_size=512", "24M");
    let mut model = vec![0; 24 << 20];
    let options = OpenOptions {
        l2_cache_bytes: Some(4096),
        ..OpenOptions::default()
    };
    for round in 0..4 {
        let disk = open(&folder.path("disk.qcow2"), &options);
        let lanes = vec![Lane::new(&disk, RingKind::IoUring)];
        for step in 0..120 {
            let at = (step * 201 + round * 67) * 1024 % (24 << 20);
            let bytes = pattern(step + round, 2048.min((24 << 20) - at));
            lanes[0].write(at as u64, &bytes);
            model[at..at + bytes.len()].copy_from_slice(&bytes);
            if step % 11 == 0 {
                let at = (step * 87 + round) * 2048 % (23 << 20);
                lanes[0].discard(at as u64, 40 << 10);
                model[at..at + (40 << 10)].fill(0);
            }
            if step % 17 == 0 {
                lanes[0].flush();
            }
        }
        finish(&folder, disk, lanes, &model);
    }
}

/// Cloud Hypervisor #7660 and #7665: queues shared one file offset, and mutable state that went with it.
///
/// Method: requests of all queues, at offsets all over the disk, are in flight at once, on both drivers.
#[test]
fn concurrent_queues_do_not_move_each_others_offsets() {
    for ring in [RingKind::IoUring, RingKind::Syscalls] {
        for direct in [false, true] {
            let folder = Folder::new();
            create(&folder, "cluster_size=65536", "8M");
            let model = numbered(8 << 20);
            let options = OpenOptions {
                direct,
                ..OpenOptions::default()
            };
            let disk = open(&folder.path("disk.qcow2"), &options);
            let lanes: Vec<Lane> = (0..4).map(|_| Lane::new(&disk, ring)).collect();
            let piece = 32 << 10;
            for (index, bytes) in model.chunks(piece).enumerate() {
                let lane = &lanes[index % 4];
                let buffer = AlignedBuf::from_slice(bytes).into();
                let at = (index * piece) as u64;
                lane.submit(Op::Write { fua: false }, at, piece as u64, buffer, 0);
            }
            answers(&lanes, (8 << 20) / piece);
            for index in 0..256 {
                let at = index * 7919 * 512 % ((8 << 20) - 8192) / 512 * 512;
                let buffer = AlignedBuf::zeroed(8192).into();
                lanes[index % 4].submit(Op::Read, at as u64, 8192, buffer, at as u64);
            }
            for done in answers(&lanes, 256) {
                let at = done.tag as usize;
                let bytes = done.buffer.into_owned().expect("our own buffer");
                assert_same(&bytes, &model[at..at + 8192], "one of many reads");
            }
            finish(&folder, disk, lanes, &model);
        }
    }
}

/// Part of a larger buffer, so that its address is what a guest's may be.
fn at_address(bytes: &[u8], shift: usize) -> (Rc<Buffer>, Buffer) {
    let mut whole = AlignedBuf::zeroed(bytes.len() + 4096);
    whole[shift..shift + bytes.len()].copy_from_slice(bytes);
    let whole = Rc::new(Buffer::from(whole));
    let part = Buffer::part(&whole, shift, bytes.len());
    (whole, part)
}

/// Cloud Hypervisor #5722, #7720, #8007, #8051, #8335: with direct I/O, offset, length and pointer each have to be
/// aligned, and firmware and Windows guests break each rule by itself.
#[test]
fn direct_io_takes_any_offset_length_and_address() {
    let folder = Folder::new();
    create(&folder, "cluster_size=4096", "1M");
    let mut model = vec![0; 1 << 20];
    let options = OpenOptions {
        direct: true,
        ..OpenOptions::default()
    };
    let disk = open(&folder.path("disk.qcow2"), &options);
    let lane = Lane::new(&disk, RingKind::IoUring);
    let mut round = 0;
    // Into fresh clusters first, into allocated ones then.
    for _ in 0..2 {
        for (offset, len, shift) in [
            (8192, 4096, 0),
            (20480 + 512, 4096, 0),
            (32768, 512, 0),
            (40960, 4096, 512),
            (49152, 4096, 1),
            (57344, 4096, 4095),
            (65536 + 1536, 9 * 512, 3),
        ] {
            round += 1;
            let bytes = pattern(round, len);
            let (_whole, part) = at_address(&bytes, shift);
            let op = Op::Write { fua: false };
            let done = lane.ask(op, offset as u64, len as u64, part);
            assert_eq!(done.result, Ok(()), "write {offset} {len} {shift}");
            model[offset..offset + len].copy_from_slice(&bytes);
            let (whole, part) = at_address(&vec![0xCC; len], shift);
            let done = lane.ask(Op::Read, offset as u64, len as u64, part);
            assert_eq!(done.result, Ok(()), "read {offset} {len} {shift}");
            drop(done);
            let whole = Rc::try_unwrap(whole).expect("nobody else has it");
            let whole = whole.into_owned().expect("our own buffer");
            let what = format!("{offset} {len} {shift}");
            assert_same(&whole[shift..shift + len], &bytes, &what);
            let untouched = whole[..shift].iter().chain(&whole[shift + len..]);
            assert!(
                untouched.into_iter().all(|&byte| byte == 0),
                "{what}: past the buffer"
            );
        }
    }
    finish(&folder, disk, vec![lane], &model);
}

/// Found in the code of two implementations: an encrypted image was opened as if it were plain.
#[test]
fn open_refuses_encrypted_image_and_changes_nothing() {
    let folder = Folder::new();
    folder.qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "--object",
        "secret,id=key,data=hunter2",
        "-o",
        "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10",
        "disk.qcow2",
        "1M",
    ]);
    let path = folder.path("disk.qcow2");
    // LUKS as QEMU makes it, and the older AES by its number.
    for method in [2u32, 1] {
        patch(&path, 32, &method.to_be_bytes());
        let before = std::fs::read(&path).expect("the image");
        for read_only in [false, true] {
            let options = OpenOptions {
                read_only,
                ..OpenOptions::default()
            };
            let error = QcowDisk::open(&path, &options).expect_err("it is encrypted");
            assert!(chain(&error).contains("encrypt"), "{}", chain(&error));
        }
        assert!(std::fs::read(&path).expect("the image") == before);
    }
}

/// A data file that was not allowed, in images that QEMU makes: CVE-2024-32498, CVE-2024-4467.
#[test]
fn open_refuses_data_files_that_are_not_allowed() {
    let folder = Folder::new();
    for (options, says) in [
        ("data_file=data.raw", "external file \"data.raw\""),
        (
            "data_file=data.raw,data_file_raw=on",
            "external file \"data.raw\"",
        ),
    ] {
        create(&folder, options, "1M");
        let path = folder.path("disk.qcow2");
        let before = std::fs::read(&path).expect("the image");
        let error = QcowDisk::open(&path, &OpenOptions::default()).expect_err(options);
        assert!(chain(&error).contains(says), "{}", chain(&error));
        assert!(std::fs::read(&path).expect("the image") == before);
    }
}

/// Found in the code of two implementations: clusters that a snapshot shares were overwritten in place.
#[test]
fn snapshot_clusters_and_tables_are_not_written_in_place() {
    for (options, refcounts) in [("compat=0.10", 16), ("compat=1.1,refcount_bits=2", 2)] {
        let folder = Folder::new();
        create(&folder, &format!("cluster_size=4096,{options}"), "4M");
        let old = numbered(4 << 20);
        let (first, second) = (&old[..2 << 20], pattern(3, 64 << 10));
        std::fs::write(folder.path("first"), first).expect("a piece");
        folder.qemu_io("qcow2", "disk.qcow2", &["write -s first 0 2M"]);
        folder.qemu_img(&["snapshot", "-c", "one", "disk.qcow2"]);
        let mut before_two = vec![0; 4 << 20];
        before_two[..2 << 20].copy_from_slice(first);
        let before_one = before_two.clone();
        if refcounts > 2 {
            std::fs::write(folder.path("second"), &second).expect("a piece");
            folder.qemu_io("qcow2", "disk.qcow2", &["write -s second 1M 64k"]);
            before_two[1 << 20..(1 << 20) + second.len()].copy_from_slice(&second);
            folder.qemu_img(&["snapshot", "-c", "two", "disk.qcow2"]);
        }
        let mut model = before_two.clone();
        let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
        let lanes: Vec<Lane> = (0..2).map(|_| Lane::new(&disk, RingKind::IoUring)).collect();
        for step in 0..24 {
            let at = step * 40 * 2048 + step * 512;
            let bytes = pattern(step, 2560);
            lanes[step % 2].write(at as u64, &bytes);
            model[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        lanes[0].discard(512 << 10, 128 << 10);
        model[512 << 10..640 << 10].fill(0);
        lanes[1].write_zeroes(768 << 10, 100 << 10, true);
        model[768 << 10..868 << 10].fill(0);
        lanes[0].flush();
        // What was freed here is still the snapshot's, and must not be used for this.
        lanes[1].write(3 << 20, &pattern(9, 512 << 10));
        model[3 << 20..(3 << 20) + (512 << 10)].copy_from_slice(&pattern(9, 512 << 10));
        finish(&folder, disk, lanes, &model);
        for (name, content) in [("one", &before_one), ("two", &before_two)] {
            if name == "two" && refcounts == 2 {
                continue;
            }
            let args = [
                "convert",
                "-l",
                name,
                "-f",
                "qcow2",
                "-O",
                "raw",
                "disk.qcow2",
                "old.raw",
            ];
            folder.qemu_img(&args);
            let found = std::fs::read(folder.path("old.raw")).expect("what QEMU wrote");
            assert_same(&found, content, name);
        }
    }
}

/// QEMU gitlab #1621: discards scatter what is written later all over the file, which grows past its virtual size;
/// `discard-no-unref` keeps each cluster's place.
#[test]
fn discard_no_unref_keeps_cluster_places_and_file_size() {
    let folder = Folder::new();
    create(&folder, "cluster_size=65536", "16M");
    let options = OpenOptions {
        discard_no_unref: true,
        ..OpenOptions::default()
    };
    let disk = open(&folder.path("disk.qcow2"), &options);
    let lane = Lane::new(&disk, RingKind::IoUring);
    let mut model = numbered(16 << 20);
    lane.write(0, &model);
    lane.flush();
    let before = file_len(&folder);
    for round in 0..64 {
        // Scattered discards, filled again in another order.
        let at = round * 37 % 256 * 65536;
        lane.discard(at as u64, 65536);
        lane.write_zeroes((round * 91 % 256 * 65536) as u64, 65536, true);
        model[at..at + 65536].fill(0);
        model[round * 91 % 256 * 65536..][..65536].fill(0);
    }
    lane.flush();
    lane.settle();
    let allocated = || {
        use std::os::unix::fs::MetadataExt;
        let file = std::fs::metadata(folder.path("disk.qcow2"));
        file.expect("the image").blocks() * 512
    };
    assert!(allocated() < before - (2 << 20), "the space is not given back");
    for round in (0..256).rev() {
        let at = round * 65536;
        let bytes = pattern(round, 4096);
        lane.write(at as u64, &bytes);
        model[at..at + 4096].copy_from_slice(&bytes);
    }
    finish(&folder, disk, vec![lane], &model);
    assert_eq!(file_len(&folder), before, "the file has grown");
    let map = folder.qemu_img(&["map", "--output=json", "disk.qcow2"]);
    let extents: serde_json::Value = serde_json::from_str(&map).expect("JSON");
    let extents = extents.as_array().expect("a list");
    // Every guest byte as far from its host byte as the first.
    let shift = |extent: &serde_json::Value| {
        let number = |key: &str| extent[key].as_u64().expect("a number");
        number("offset") - number("start")
    };
    let whole: u64 = extents
        .iter()
        .filter_map(|extent| extent["length"].as_u64())
        .sum();
    assert_eq!(whole, 16 << 20);
    assert!(
        extents.iter().all(|extent| shift(extent) == shift(&extents[0])),
        "{map}"
    );
}

/// Cloud Hypervisor #8607: a paused VM's image lacked writes that had been acknowledged.
///
/// Method: with the disk still open, another process reads the file after one queue's FLUSH; it must see what was
/// acknowledged before on every queue.
#[test]
fn flush_covers_acknowledged_writes_of_every_queue() {
    let folder = Folder::new();
    create(&folder, "cluster_size=4096", "2M");
    let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
    let lanes: Vec<Lane> = (0..3).map(|_| Lane::new(&disk, RingKind::IoUring)).collect();
    let mut model = vec![0; 2 << 20];
    for round in 0..6 {
        for (index, lane) in lanes.iter().enumerate() {
            let at = (round * 3 + index) * (96 << 10);
            let bytes = pattern(round + index, 5 << 10);
            lane.write(at as u64, &bytes);
            model[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        lanes[round % 3].flush();
        let args = [
            "convert",
            "-U",
            "-f",
            "qcow2",
            "-O",
            "raw",
            "disk.qcow2",
            "seen.raw",
        ];
        folder.qemu_img(&args);
        let seen = std::fs::read(folder.path("seen.raw")).expect("what QEMU wrote");
        assert_same(&seen, &model, "seen from outside");
    }
    finish(&folder, disk, lanes, &model);
}

/// Cloud Hypervisor #8358: an upgrade took a disk for another format and overwrote its first 64 KiB.
#[test]
fn open_refuses_another_format_and_changes_no_byte() {
    let folder = Folder::new();
    let path = folder.path("disk.qcow2");
    let mut raw = numbered(1 << 20);
    // A raw disk whose guest has put the magic where a header would be, and nothing else that fits.
    let mut nearly = raw.clone();
    nearly[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    raw[510..512].copy_from_slice(&[0x55, 0xaa]);
    for bytes in [raw, nearly, Vec::new(), vec![0; 512]] {
        std::fs::write(&path, &bytes).expect("the disk");
        for read_only in [false, true] {
            let options = OpenOptions {
                read_only,
                ..OpenOptions::default()
            };
            let error = QcowDisk::open(&path, &options).expect_err("it is no QCOW2 image");
            assert!(!chain(&error).is_empty());
            assert!(std::fs::read(&path).expect("the disk") == bytes);
        }
    }
}

/// The root of several reports: an offset that wraps around, or lies past the disk's end, must reach neither data nor
/// header.
#[test]
fn requests_past_disk_end_fail_and_change_nothing() {
    let folder = Folder::new();
    create(&folder, "cluster_size=65536", "1M");
    let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
    let lane = Lane::new(&disk, RingKind::IoUring);
    let end = disk.info().size_bytes;
    let before = u64_at(&folder.path("disk.qcow2"), 24);
    for (offset, len) in [(end, 512), (end - 512, 1024), (u64::MAX - 511, 512), (!511, 1024)] {
        for op in [
            Op::Read,
            Op::Write { fua: false },
            Op::Discard,
            Op::WriteZeroes {
                unmap: true,
                fua: false,
            },
        ] {
            let buffer = match op {
                Op::Read | Op::Write { .. } => AlignedBuf::zeroed(len as usize).into(),
                _ => Buffer::default(),
            };
            assert!(
                lane.ask(op, offset, len, buffer).result.is_err(),
                "{op:?} {offset}"
            );
        }
    }
    finish(&folder, disk, vec![lane], &vec![0; 1 << 20]);
    assert_eq!(u64_at(&folder.path("disk.qcow2"), 24), before);
}
