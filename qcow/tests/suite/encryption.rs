//! Encrypted images: the engine and QEMU read what the other wrote, and no byte of the guest's is in the file.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::common::{
    Folder, LUKS_OPTIONS, Lane, SECRET, assert_same, chain, close, create, open, patch, qemu_secret, secret,
    u64_at,
};
use block::ring::RingKind;
use block::{AlignedBuf, Context, Disk, Op};
use qcow::image::CreateOptions;
use qcow::luks::{self, LuksOptions, Secret};
use qcow::offline::{apply_snapshot, create_snapshot};
use qcow::{OpenOptions, QcowDisk, SnapshotSelector};
use ringdisk_gen::Random;

const DISK: u64 = 3 << 20;
fn options() -> OpenOptions {
    OpenOptions {
        secret: secret(),
        ..OpenOptions::default()
    }
}

/// Makes an encrypted image by `qemu-img create`, with more options and arguments.
fn qemu_create(folder: &Folder, name: &str, options: &str, more: &[&str]) {
    let (options, secret) = (format!("{LUKS_OPTIONS}{options}"), qemu_secret());
    let mut args = vec!["create", "-q", "--object", &secret, "-f", "qcow2", "-o", &options];
    args.extend(more);
    let size = DISK.to_string();
    args.extend([name, &size]);
    folder.qemu_img(&args);
}

fn qemu_snapshot(folder: &Folder, what: &str, snapshot: &str, name: &str) {
    let named = folder.named("qcow2", name);
    let mut args = vec!["snapshot", what, snapshot];
    args.extend(named.iter().map(String::as_str));
    folder.qemu_img(&args);
}

/// Returns the snapshot `snapshot` of a disk as QEMU reads it.
fn qemu_reads_snapshot(folder: &Folder, name: &str, snapshot: &str) -> Vec<u8> {
    folder.qemu_converts(&["-l", &format!("snapshot.name={snapshot}")], name, "as-raw.img");
    std::fs::read(folder.path("as-raw.img")).expect("what qemu-img wrote")
}

/// The kinds of images, as options of `qemu-img create`.
const KINDS: [&str; 7] = [
    "",
    ",cluster_size=512",
    ",cluster_size=4k,encrypt.cipher-alg=aes-128",
    ",cluster_size=2M",
    ",extended_l2=on",
    ",extended_l2=on,cluster_size=16k",
    ",compat=0.10",
];

/// Random requests by us and by QEMU in turns, of which a plain array knows the result.
fn take_turns(
    folder: &Folder,
    name: &str,
    options: &OpenOptions,
    model: &mut [u8],
    random: &mut Random,
    ring: RingKind,
) {
    for turn in 0..3 {
        let disk = open(&folder.path(name), options);
        let lane = match turn {
            // Pages that only the kernel reaches.
            1 => Lane::registered(&disk, ring, Some(7)),
            _ => Lane::new(&disk, ring),
        };
        assert_same(
            &lane.read(0, DISK),
            model,
            &format!("{name}, turn {turn}: what QEMU wrote"),
        );
        for step in 0..40u64 {
            let most = random.pick(&[1, 4, 40, 600]);
            let first = random.below(DISK / 512);
            let count = 1 + random.below(most).min(DISK / 512 - first - 1);
            let (at, len) = (first * 512, count * 512);
            let range = at as usize..(at + len) as usize;
            match random.below(8) {
                0..=3 => {
                    let bytes = vec![1 + random.below(200) as u8; len as usize];
                    let (buffer, placed) = lane.place(0, &bytes);
                    let fua = random.one_in(4);
                    let done = lane.ask(Op::Write { fua }, at, len, buffer);
                    assert_eq!(done.result, Ok(()), "{name}");
                    lane.placed(&placed, done.buffer, false);
                    model[range].copy_from_slice(&bytes);
                }
                4 => {
                    lane.write_zeroes(at, len, step % 2 == 0);
                    model[range].fill(0);
                }
                5 => {
                    lane.discard(at, len);
                    let found = lane.read(at, len);
                    for (found, known) in found.iter().zip(&mut model[range]) {
                        assert!(
                            *found == 0 || found == known,
                            "{name}: a discard shows other bytes"
                        );
                        *known = *found;
                    }
                }
                _ => {
                    let (buffer, placed) = lane.place(0, &vec![0xCC; len as usize]);
                    let done = lane.ask(Op::Read, at, len, buffer);
                    assert_eq!(done.result, Ok(()), "{name}");
                    let found = lane.placed(&placed, done.buffer, true);
                    assert_same(&found, &model[range], name);
                }
            }
        }
        assert_same(
            &lane.read(0, DISK),
            model,
            &format!("{name}, turn {turn}: our own"),
        );
        lane.flush();
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless(name, false);
        assert_same(
            &folder.qemu_reads(name),
            model,
            &format!("{name}, turn {turn}: by QEMU"),
        );
        let commands: Vec<String> = (0..8)
            .map(|_| {
                let at = random.below(DISK / 512 - 100) * 512;
                let len = 512 * (1 + random.below(99));
                let byte = 1 + random.below(200);
                model[at as usize..(at + len) as usize].fill(byte as u8);
                format!("write -P {byte} {at} {len}")
            })
            .collect();
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        folder.qemu_io("qcow2", name, &commands);
    }
}

#[test]
fn engine_and_qemu_read_what_the_other_encrypted() {
    for (seed, kind) in (0..).zip(KINDS) {
        // QEMU measures this machine for seconds before it makes one.
        let folder = Folder::new();
        qemu_create(&folder, "made.qcow2", kind, &[]);
        for (name, ring) in [
            ("ring.qcow2", RingKind::IoUring),
            ("calls.qcow2", RingKind::Syscalls),
        ] {
            let random = &mut Random::new(seed);
            std::fs::copy(folder.path("made.qcow2"), folder.path(name)).expect("a copy");
            let options = OpenOptions {
                direct: seed % 2 == 0,
                discard_no_unref: seed % 3 == 0,
                l2_cache_bytes: Some(64 << 10),
                ..options()
            };
            take_turns(&folder, name, &options, &mut vec![0; DISK as usize], random, ring);
        }
    }
}

#[test]
fn plain_backing_files_compressed_clusters_and_snapshots_lie_beside_encrypted_clusters() {
    let folder = Folder::new();
    let random = &mut Random::new(5);
    let base: Vec<u8> = (0..DISK).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(folder.path("base.raw"), &base).expect("a base");
    folder.qemu_img(&[
        "convert",
        "-c",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "base.raw",
        "base.qcow2",
    ]);
    let options = OpenOptions {
        backing_files: true,
        ..options()
    };
    for (name, kind) in [("over.qcow2", ""), ("over-ext.qcow2", ",extended_l2=on")] {
        qemu_create(&folder, name, kind, &["-b", "base.qcow2", "-F", "qcow2"]);
        // Compressed clusters of the encrypted image itself, which QEMU stores as they are.
        folder.qemu_io("qcow2", name, &["write -c -P 9 128k 128k"]);
        let mut model = base.clone();
        model[128 << 10..256 << 10].fill(9);
        folder.qemu_io("qcow2", name, &["write -P 3 1M 300k"]);
        model[1 << 20..(1 << 20) + (300 << 10)].fill(3);
        qemu_snapshot(&folder, "-c", "before", name);
        let before = model.clone();
        take_turns(&folder, name, &options, &mut model, random, RingKind::IoUring);
        assert_same(
            &qemu_reads_snapshot(&folder, name, "before"),
            &before,
            "the snapshot",
        );
        let disk = open(
            &folder.path(name),
            &OpenOptions {
                read_only: true,
                snapshot: Some(SnapshotSelector::parse("before")),
                ..options.clone()
            },
        );
        let lane = Lane::new(&disk, RingKind::IoUring);
        assert_same(&lane.read(0, DISK), &before, "the snapshot, by us");
    }
}

/// An image of our own, and its disk.
fn own(folder: &Folder, cluster_size: u64) -> Arc<QcowDisk> {
    let how = LuksOptions {
        iter_time: Duration::from_millis(1),
        ..LuksOptions::default()
    };
    let (header, _) = luks::create(&Secret::new(SECRET.into()), &how).expect("a header");
    let made = CreateOptions {
        luks_header: Some(header),
        cluster_size,
        ..CreateOptions::new(DISK)
    };
    create(&folder.path("own.qcow2"), &made);
    open(&folder.path("own.qcow2"), &options())
}

fn count(file: &Path, byte: u8) -> usize {
    let bytes = std::fs::read(file).expect("an image");
    bytes
        .windows(32)
        .filter(|run| run.iter().all(|&found| found == byte))
        .count()
}

#[test]
fn nothing_of_what_a_guest_writes_is_in_the_file_as_it_is() {
    for cluster_size in [512, 64 << 10, 1 << 20] {
        let folder = Folder::new();
        let disk = own(&folder, cluster_size);
        let lane = Lane::new(&disk, RingKind::IoUring);
        // In fresh clusters and in place; small, and in several pieces.
        for _ in 0..2 {
            lane.write(4096, &[0xA5; 512]);
            lane.write(100 << 10, &vec![0xA5; 700 << 10]);
            lane.write((1 << 20) + 512, &[0xA5; 1024]);
        }
        lane.flush();
        assert_eq!(count(&folder.path("own.qcow2"), 0xA5), 0);
        assert_eq!(lane.read(100 << 10, 512), [0xA5; 512]);
        drop(lane);
        close(disk);
    }
}

#[test]
fn same_bytes_differ_at_different_places() {
    let folder = Folder::new();
    let disk = own(&folder, 64 << 10);
    let lane = Lane::new(&disk, RingKind::IoUring);
    lane.write(0, &vec![7; 128 << 10]);
    lane.flush();
    let at = |guest| disk.cached_host_offset(guest).expect("mapped") as usize;
    let bytes = std::fs::read(folder.path("own.qcow2")).expect("an image");
    let sectors: std::collections::BTreeSet<&[u8]> = (0..256)
        .map(|sector| &bytes[at(sector / 128 * (64 << 10)) + sector as usize % 128 * 512..][..512])
        .collect();
    assert_eq!(sectors.len(), 256);
    drop(lane);
    close(disk);
}

#[test]
fn part_of_a_fresh_cluster_that_the_guest_did_not_write_reads_as_zeros() {
    let folder = Folder::new();
    // The end of the file is a hole, from which the allocator takes clusters.
    let disk = own(&folder, 64 << 10);
    let lane = Lane::new(&disk, RingKind::IoUring);
    lane.write(64 << 10, &[1; 512]);
    lane.write((192 << 10) + 4096, &[2; 4096]);
    let mut expected = vec![0; 256 << 10];
    expected[64 << 10..(64 << 10) + 512].fill(1);
    expected[(192 << 10) + 4096..][..4096].fill(2);
    assert_same(&lane.read(0, 256 << 10), &expected, "fresh clusters");
    drop(lane);
    close(disk);
}

#[test]
fn larger_disk_reads_as_zeros_where_it_grew() {
    let folder = Folder::new();
    let disk = own(&folder, 1 << 20);
    let lane = Lane::new(&disk, RingKind::IoUring);
    lane.write(DISK - 512, &[1; 512]);
    lane.cx
        .block_on(disk.grow(&lane.cx, DISK + (700 << 10)))
        .expect("it turns")
        .expect("a larger disk");
    assert_same(&lane.read(DISK, 700 << 10), &vec![0; 700 << 10], "the new part");
    lane.write(DISK, &[2; 512]);
    assert_eq!(lane.read(DISK - 512, 512), [1; 512]);
    drop(lane);
    close(disk);
}

#[test]
fn raw_bytes_of_an_encrypted_image_are_lent_to_nobody() {
    let folder = Folder::new();
    close(own(&folder, 64 << 10));
    let disk = open(
        &folder.path("own.qcow2"),
        &OpenOptions {
            read_only: true,
            ..options()
        },
    );
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert!(lane.queue.data_file().is_none());
}

#[test]
fn wrong_missing_and_needless_secrets_are_refused_by_name() {
    let folder = Folder::new();
    close(own(&folder, 64 << 10));
    let before = std::fs::read(folder.path("own.qcow2")).expect("an image");
    let refused = |name: &str, options: &OpenOptions, words: &[&str]| {
        let error = QcowDisk::open(&folder.path(name), options).expect_err("refused");
        let text = chain(&error);
        for word in words.iter().chain(&[name]) {
            assert!(text.contains(word), "{text}: {word}");
        }
    };
    let with = |secret: Option<&str>| OpenOptions {
        secret: secret.map(|secret| Secret::new(secret.as_bytes().to_vec())),
        backing_files: true,
        ..OpenOptions::default()
    };
    refused("own.qcow2", &with(None), &["encrypted", "secret_file"]);
    refused(
        "own.qcow2",
        &with(Some("hunter2\n")),
        &["opens none of the key slots"],
    );
    folder.qemu_create("plain.qcow2", "", "1M");
    refused("plain.qcow2", &with(Some(SECRET)), &["not encrypted"]);
    folder.qemu_img(&[
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-b",
        "own.qcow2",
        "-F",
        "qcow2",
        "over.qcow2",
        "3M",
    ]);
    refused(
        "over.qcow2",
        &with(None),
        &["own.qcow2", "encrypted", "below another"],
    );
    assert!(std::fs::read(folder.path("own.qcow2")).expect("an image") == before);
}

#[test]
fn snapshots_are_made_and_applied_without_a_secret() {
    let folder = Folder::new();
    let disk = own(&folder, 64 << 10);
    let lane = Lane::new(&disk, RingKind::IoUring);
    lane.write(0, &vec![1; 200 << 10]);
    drop(lane);
    close(disk);
    let path = folder.path("own.qcow2");
    create_snapshot(&path, "one", SystemTime::now()).unwrap_or_else(|error| panic!("{}", chain(&error)));
    let disk = open(&path, &options());
    let lane = Lane::new(&disk, RingKind::IoUring);
    lane.write(512, &vec![2; 100 << 10]);
    drop(lane);
    close(disk);
    assert_eq!(
        qemu_reads_snapshot(&folder, "own.qcow2", "one")[..200 << 10],
        [1; 200 << 10]
    );
    let one = SnapshotSelector::parse("one");
    apply_snapshot(&path, &one).unwrap_or_else(|error| panic!("{}", chain(&error)));
    let disk = open(&path, &options());
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert_same(
        &lane.read(0, 200 << 10),
        &vec![1; 200 << 10],
        "the applied snapshot",
    );
    assert_eq!(disk.info().size_bytes, DISK);
    drop(lane);
    close(disk);
}

/// Crypt method 1: only to be read.
#[test]
fn aes_images_are_read_as_by_qemu_and_not_written() {
    let folder = Folder::new();
    let (secret, size) = (qemu_secret(), DISK.to_string());
    let encrypted = "encrypt.format=aes,encrypt.key-secret=key";
    let args = [
        "create", "-q", "--object", &secret, "-f", "qcow2", "-o", encrypted,
    ];
    folder.qemu_img(&[&args[..], &["disk.qcow2", &size]].concat());
    folder.scribble_by_qemu("disk.qcow2", DISK, &mut Random::new(1), 20);
    let expected = folder.qemu_reads("disk.qcow2");
    let read_only = OpenOptions {
        read_only: true,
        ..options()
    };
    let disk = open(&folder.path("disk.qcow2"), &read_only);
    let lane = Lane::new(&disk, RingKind::IoUring);
    assert_same(&lane.read(0, DISK), &expected, "aes");
    // From the middle of a cluster, across the pieces that are decrypted at a time.
    assert_same(&lane.read(1536, 1 << 20), &expected[1536..][..1 << 20], "a part");
    lane.settle();
    drop(lane);
    close(disk);
    let before = std::fs::read(folder.path("disk.qcow2")).expect("an image");
    let error = QcowDisk::open(&folder.path("disk.qcow2"), &options()).expect_err("to be written");
    let text = chain(&error);
    assert!(text.contains("with aes") && text.contains("read-only"), "{text}");
    assert!(std::fs::read(folder.path("disk.qcow2")).expect("an image") == before);
}

/// Method: the counts say that the LUKS header is free.
#[test]
fn luks_header_is_never_given_to_the_guest() {
    let folder = Folder::new();
    qemu_create(&folder, "disk.qcow2", "", &[]);
    let path = folder.path("disk.qcow2");
    let image = std::fs::read(&path).expect("the image");
    let start = image
        .chunks(64 << 10)
        .position(|cluster| cluster.starts_with(b"LUKS\xBA\xBE"));
    let start = start.expect("a LUKS header");
    let block = u64_at(&path, u64_at(&path, 48));
    let header = start << 16..(start << 16) + (64 << 10);
    for cluster in start as u64..start as u64 + 8 {
        patch(&path, block + cluster * 2, &[0, 0]);
    }
    if let Ok(disk) = QcowDisk::open(&path, &options()) {
        let lane = Lane::new(&disk, RingKind::IoUring);
        for at in 0..16 {
            let buffer = AlignedBuf::from_slice(&[at as u8; 4096]).into();
            let _may_fail = lane.ask(Op::Write { fua: false }, at << 17, 4096, buffer);
        }
        lane.settle();
        drop(lane);
        let cx = Context::syscalls();
        let _may_fail = cx.block_on(disk.close(&cx));
    }
    let after = std::fs::read(&path).expect("the image");
    assert!(
        image[header.clone()] == after[header],
        "the guest has written over the LUKS header"
    );
}
