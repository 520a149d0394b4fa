//! Malformed images: whatever is wrong with one, opening it names what, or the ranges it concerns answer
//! with an error.
//!
//! Each case is a sound image with something broken in it. It is opened read-only and for writing, and if
//! that succeeds everything a guest can ask is asked of it. What must hold each time: no panic, no hang, bounded
//! memory, no byte changed by a failed open or a reader, and no guest byte over the image's own structures.

mod common;

use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::Duration;

use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Context, Disk, Op};
use common::{Folder, Lane, Random, chain};
use qcow::{OpenOptions, QcowDisk};

const CLUSTER: usize = 4096;
const DISK: u64 = 4 << 20;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// What guests write here, and nothing else in an image looks like.
const GUEST: u8 = 0x5A;

/// The sound image: data, zeros, compressed clusters, a snapshot, and two L2 tables.
struct Base {
    bytes: Vec<u8>,
    l1: usize,
    /// The first L2 table.
    l2: usize,
    refcount_table: usize,
    refcount_block: usize,
    snapshots: usize,
    /// Guest clusters of the first table by what they are.
    data: usize,
    compressed: usize,
}

impl Base {
    fn get() -> &'static Self {
        static BASE: OnceLock<Base> = OnceLock::new();
        BASE.get_or_init(Self::make)
    }

    fn make() -> Self {
        let folder = Folder::new();
        let size = DISK.to_string();
        let options = "cluster_size=4096,compat=1.1";
        folder.qemu_img(&["create", "-f", "qcow2", "-o", options, "base.qcow2", &size]);
        folder.qemu_io("qcow2", "base.qcow2", &["write -P 1 0 8k"]);
        folder.qemu_img(&["snapshot", "-c", "before", "base.qcow2"]);
        let commands = [
            "write -P 2 4k 60k",
            "write -P 3 2M 16k",
            "write -z 64k 8k",
            "write -c -P 4 80k 4k",
            "write -c -P 5 84k 4k",
        ];
        folder.qemu_io("qcow2", "base.qcow2", &commands);
        folder.assert_flawless("base.qcow2", false);
        let bytes = std::fs::read(folder.path("base.qcow2")).expect("the image");
        let l1 = u64_in(&bytes, 40) as usize;
        let refcount_table = u64_in(&bytes, 48) as usize;
        let base = Self {
            l1,
            l2: (u64_in(&bytes, l1) & !COPIED) as usize,
            refcount_table,
            refcount_block: u64_in(&bytes, refcount_table) as usize,
            snapshots: u64_in(&bytes, 64) as usize,
            data: 8,
            compressed: 20,
            bytes,
        };
        assert_ne!(base.l2_entry(base.data) & COPIED, 0);
        assert_ne!(base.l2_entry(base.compressed) & COMPRESSED, 0);
        base
    }

    fn l2_entry(&self, cluster: usize) -> u64 {
        u64_in(&self.bytes, self.l2 + cluster * 8)
    }

    /// The image with bytes replaced.
    fn with(&self, patches: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        for (at, patch) in patches {
            bytes.resize(bytes.len().max(at + patch.len()), 0);
            bytes[*at..at + patch.len()].copy_from_slice(patch);
        }
        bytes
    }

    fn with_u32(&self, at: usize, value: u32) -> Vec<u8> {
        self.with(&[(at, &value.to_be_bytes())])
    }

    fn with_u64(&self, at: usize, value: u64) -> Vec<u8> {
        self.with(&[(at, &value.to_be_bytes())])
    }

    /// The image with these header extensions and no others, and the backing name after them.
    fn with_extensions(&self, extensions: &[u8], backing: &[u8]) -> Vec<u8> {
        let first = u32_in(&self.bytes, 100) as usize;
        let mut bytes = self.bytes.clone();
        bytes[first..CLUSTER].fill(0);
        bytes[first..first + extensions.len()].copy_from_slice(extensions);
        if !backing.is_empty() {
            let at = first + extensions.len().next_multiple_of(8) + 16;
            bytes[at..at + backing.len()].copy_from_slice(backing);
            bytes[8..16].copy_from_slice(&(at as u64).to_be_bytes());
            bytes[16..20].copy_from_slice(&(backing.len() as u32).to_be_bytes());
        }
        bytes
    }
}

fn u64_in(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_in(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn extension(kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = kind.to_be_bytes().to_vec();
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

/// What must become of a case.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// Refused to readers and writers; the error says this.
    Refused(&'static str),
    /// Refused to writers, with this; readers may look.
    NotWritable(&'static str),
    /// Opened by both.
    Opens,
    /// Opened by readers, and reading all of it hits an error somewhere; so do writers, if not refused.
    Eio,
    /// Any answer will do.
    Survives,
}

/// How one opening of a case went.
#[derive(Debug)]
struct Outcome {
    refused: Option<String>,
    read_failed: bool,
}

/// The most memory the whole process may ever use, in KiB: every case is far under a MiB.
const MEMORY_MAX_KIB: u64 = 384 << 10;

fn peak_memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.expect("VmHWM").parse().expect("a number")
}

/// Opens and works an image as a guest and its administrator might, in a thread that is given up on if it hangs.
fn subject(name: &str, path: &Path, options: &OpenOptions) -> Outcome {
    let (send, receive) = channel();
    let (path, options) = (path.to_owned(), options.clone());
    let thread = std::thread::spawn(move || {
        send.send(work(&path, &options)).expect("the test waits");
    });
    match receive.recv_timeout(Duration::from_secs(30)) {
        Ok(outcome) => {
            thread.join().expect("it has answered");
            outcome
        }
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{name}: it hangs"),
        Err(_) => panic!(
            "{name}: it panics: {:?}",
            thread.join().map_err(|cause| reason(&*cause))
        ),
    }
}

fn reason(cause: &(dyn std::any::Any + Send)) -> String {
    let text = cause.downcast_ref::<String>().cloned();
    text.or_else(|| cause.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_default()
}

fn work(path: &Path, options: &OpenOptions) -> Outcome {
    let disk = match QcowDisk::open(path, options) {
        Ok(disk) => disk,
        Err(error) => {
            return Outcome {
                refused: Some(chain(&error)),
                read_failed: false,
            };
        }
    };
    let ring = if options.read_only {
        RingKind::Syscalls
    } else {
        RingKind::IoUring
    };
    let lane = Lane::new(&disk, ring);
    let size = disk.info().size_bytes.min(2 * DISK);
    let mut read_failed = false;
    let read_all = |failed: &mut bool| {
        for at in (0..size).step_by(CLUSTER) {
            *failed |= lane.try_read(at, (CLUSTER as u64).min(size - at)).is_err();
        }
        *failed |= size > 0 && lane.try_read(0, size).is_err();
    };
    read_all(&mut read_failed);
    let ask = |op, offset: u64, len: u64| {
        if offset + len <= size {
            let buffer = match op {
                Op::Write { .. } => AlignedBuf::from_slice(&vec![GUEST; len as usize]).into(),
                _ => Buffer::default(),
            };
            let written = lane.ask(op, offset, len, buffer).result;
            assert!(!(options.read_only && op.is_write() && written.is_ok()));
        }
    };
    for cluster in 0..24 {
        ask(
            Op::Write { fua: cluster == 3 },
            cluster * CLUSTER as u64 + 512,
            1024,
        );
    }
    ask(Op::Write { fua: false }, 1 << 20, 64 << 10);
    ask(Op::Write { fua: false }, (2 << 20) + 512, 8 << 10);
    ask(Op::Discard, 16 << 10, 16 << 10);
    ask(Op::Flush, 0, 0);
    for unmap in [true, false] {
        ask(Op::WriteZeroes { unmap, fua: false }, 36 << 10, 9 << 10);
    }
    ask(Op::Discard, 0, size / 512 * 512);
    ask(Op::Flush, 0, 0);
    ask(Op::Write { fua: false }, 0, 256 << 10);
    ask(Op::Flush, 0, 0);
    read_all(&mut false);
    lane.settle();
    drop(lane);
    // It may fail: a corrupt image is not written any more.
    let cx = Context::syscalls();
    let _result = cx.block_on(disk.close(&cx)).expect("the ring turns");
    Outcome {
        refused: None,
        read_failed,
    }
}

/// Opens a case both ways and checks what must hold, and its fate.
fn face(folder: &Folder, name: &str, bytes: &[u8], options: &OpenOptions, fate: Fate) {
    let path = folder.path("case.qcow2");
    for read_only in [true, false] {
        std::fs::write(&path, bytes).expect("the case");
        let options = OpenOptions {
            read_only,
            ..options.clone()
        };
        let outcome = subject(name, &path, &options);
        let what = format!("{name}, read_only={read_only}: {outcome:?}");
        let after = std::fs::read(&path).expect("the case");
        if outcome.refused.is_some() || read_only {
            assert!(after == bytes, "{what}: bytes of the image have changed");
        } else {
            assert_structures_stand(&what, bytes, &after);
        }
        match (fate, &outcome.refused) {
            (Fate::Refused(says), Some(error)) => assert!(error.contains(says), "{what} says no {says:?}"),
            (Fate::NotWritable(says), Some(error)) if !read_only => {
                assert!(error.contains(says), "{what} says no {says:?}");
            }
            (Fate::NotWritable(_), None) if read_only => {}
            (Fate::Refused(_) | Fate::NotWritable(_), _) => panic!("{what}: expected {fate:?}"),
            (Fate::Eio, Some(_)) if !read_only => {}
            (Fate::Opens | Fate::Eio, Some(_)) => panic!("{what}: expected {fate:?}"),
            (Fate::Eio, None) => assert!(outcome.read_failed, "{what}: expected {fate:?}"),
            (Fate::Opens, None) => assert!(!outcome.read_failed, "{what}: expected {fate:?}"),
            (Fate::Survives, _) => {}
        }
        let peak = peak_memory_kib();
        assert!(peak < MEMORY_MAX_KIB, "{what}: {peak} KiB of memory were used");
    }
}

/// A guest's bytes never lie over the header, the L1 table, or the refcount table.
fn assert_structures_stand(what: &str, before: &[u8], after: &[u8]) {
    if before.len() < CLUSTER || after.len() < 104 {
        return;
    }
    let fixed = [0..8, 20..36, 60..64, 96..104];
    for range in fixed {
        assert_eq!(
            after[range.clone()],
            before[range.clone()],
            "{what}: header bytes {range:?}"
        );
    }
    let (l1, table) = (u64_in(after, 40) as usize, u64_in(after, 48) as usize);
    for (structure, at, len) in [("L1", l1, 16), ("refcount table", table, CLUSTER)] {
        let bytes = after.get(at..at + len).unwrap_or_default();
        let guest = bytes.chunks_exact(8).any(|entry| entry == [GUEST; 8]);
        assert!(!guest, "{what}: a guest's bytes are in the {structure}");
    }
}

fn face_all(cases: Vec<(String, Vec<u8>, Fate)>) {
    let folder = Folder::new();
    for (name, bytes, fate) in cases {
        face(&folder, &name, &bytes, &OpenOptions::default(), fate);
    }
}

/// The generator's control: unbroken, every step of the work must do its work.
#[test]
fn the_unbroken_image_opens_and_is_flawless_after_all_that_is_asked_of_it() {
    let base = Base::get();
    let folder = Folder::new();
    let options = OpenOptions::default();
    face(&folder, "unbroken", &base.bytes, &options, Fate::Opens);
    folder.assert_flawless("case.qcow2", false);
    let lost = OpenOptions {
        backing_files: true,
        ..OpenOptions::default()
    };
    face(
        &folder,
        "unbroken, backing allowed",
        &base.bytes,
        &lost,
        Fate::Opens,
    );
}

#[test]
fn every_malformed_header_field_is_refused_by_its_name() {
    let base = Base::get();
    let mut cases = Vec::new();
    let mut field32 = |name: &str, at: usize, values: &[u32], says: &'static str| {
        for value in values {
            let fate = Fate::Refused(says);
            cases.push((format!("{name} {value:#x}"), base.with_u32(at, *value), fate));
        }
    };
    field32("magic", 0, &[0, 0x5146_4900, u32::MAX], "QFI");
    field32("version", 4, &[0, 1, 4, u32::MAX], "version");
    field32("cluster_bits", 20, &[0, 8, 22, 63, u32::MAX], "cluster_bits");
    field32("crypt_method", 32, &[3, u32::MAX], "crypt_method");
    field32("encryption", 32, &[1, 2], "encrypt");
    field32("l1_size", 36, &[0, 1, u32::MAX], "l1_size");
    let says = "refcount_table_clusters";
    field32("refcount_table_clusters", 56, &[0, u32::MAX], says);
    field32("nb_snapshots", 60, &[65_537, u32::MAX], "nb_snapshots");
    field32("refcount_order", 96, &[7, 64, u32::MAX], "refcount_order");
    let lengths = [0, 8, 72, 103, 105, 4104, 1 << 16, u32::MAX];
    field32("header_length", 100, &lengths, "header_length");
    let end = base.bytes.len().next_multiple_of(CLUSTER) as u64;
    let mut field64 = |name: &str, at: usize, values: &[u64], says: &'static str| {
        for value in values {
            let fate = Fate::Refused(says);
            cases.push((format!("{name} {value:#x}"), base.with_u64(at, *value), fate));
        }
    };
    field64("size", 24, &[1 << 63, u64::MAX], "size");
    field64("size", 24, &[DISK + 1, 1 << 40, i64::MAX as u64], "l1_size");
    let wrong = [0, 1, 512, base.l1 as u64 + 8, !4095, 1 << 63, u64::MAX];
    field64("l1_table_offset", 40, &wrong, "l1_table_offset");
    field64("l1_table_offset", 40, &[end, 1 << 40, 1 << 62], "L1 table");
    field64("refcount_table_offset", 48, &wrong, "refcount_table_offset");
    let far = [end, 1 << 40, 1 << 62];
    field64("refcount_table_offset", 48, &far, "refcount table");
    let wrong = [0, 8, base.snapshots as u64 + 1, 1 << 63, u64::MAX];
    field64("snapshots_offset", 64, &wrong, "snapshots_offset");
    field64("incompatible bit 5", 72, &[1 << 5, 1 << 63], "bit");
    field64("data file without a name", 72, &[1 << 2], "external file");
    let extended = base.with(&[(72, &(1u64 << 4).to_be_bytes()), (36, &4u32.to_be_bytes())]);
    let says = Fate::Refused("cluster_bits");
    cases.push(("extended L2 with small clusters".into(), extended, says));
    face_all(cases);
}

#[test]
fn features_that_contradict_each_other_are_refused_by_name() {
    let base = Base::get();
    let type_and_bit = |kind: u8, bit: u64| base.with(&[(104, &[kind]), (72, &bit.to_be_bytes())]);
    let says = Fate::Refused("compression_type");
    let corrupt = Fate::NotWritable("corrupt");
    face_all(vec![
        (
            "compression type without its bit".into(),
            type_and_bit(1, 0),
            says,
        ),
        (
            "a compression bit without its type".into(),
            type_and_bit(0, 8),
            says,
        ),
        ("an unknown compression type".into(), type_and_bit(2, 8), says),
        ("the last compression type".into(), type_and_bit(255, 8), says),
        ("marked corrupt".into(), base.with_u64(72, 2), corrupt),
        ("marked dirty".into(), base.with_u64(72, 1), Fate::Opens),
        (
            "bitmaps without a directory".into(),
            base.with_u64(88, 1),
            Fate::Opens,
        ),
        (
            "unknown autoclear bits".into(),
            base.with_u64(88, u64::MAX - 3),
            Fate::Opens,
        ),
        (
            "raw data without a data file".into(),
            base.with_u64(88, 2),
            Fate::Survives,
        ),
        (
            "unknown compatible bits".into(),
            base.with_u64(80, u64::MAX),
            Fate::Opens,
        ),
        // QEMU rounds such a disk up to sectors too; the last bytes are nobody's.
        (
            "a disk of no whole sectors".into(),
            base.with_u64(24, DISK - 100),
            Fate::Opens,
        ),
        ("a disk of one byte".into(), base.with_u64(24, 1), Fate::Survives),
        ("a disk of nothing".into(), base.with_u64(24, 0), Fate::Opens),
    ]);
}

#[test]
fn malformed_extensions_are_refused_and_an_unknown_feature_is_called_by_its_name() {
    let base = Base::get();
    let raw = |kind: u32, len: u32| [kind.to_be_bytes(), len.to_be_bytes()].concat();
    let mut cases = Vec::new();
    for kind in [
        0xe279_2aca_u32,
        0x6803_f857,
        0x2385_2875,
        0x0537_be77,
        0x4441_5441,
        0x1234,
    ] {
        for len in [1 << 31, u32::MAX, u32::MAX - 7, CLUSTER as u32] {
            cases.push((
                format!("extension {kind:#x} of {len:#x} bytes"),
                base.with_extensions(&raw(kind, len), b""),
                Fate::Refused("extension"),
            ));
        }
    }
    let mut name = vec![0, 7];
    name.extend(b"time travel");
    name.resize(48, 0);
    let mut bytes = base.with_extensions(&extension(0x6803_f857, &name), b"");
    bytes[72..80].copy_from_slice(&(1u64 << 7).to_be_bytes());
    cases.push(("a named feature".into(), bytes, Fate::Refused("time travel")));
    let json = br#"json:{"driver":"file","filename":"/etc/shadow"}"#;
    let mut bytes = base.with_extensions(&extension(0x4441_5441, json), b"");
    bytes[72..80].copy_from_slice(&(1u64 << 2).to_be_bytes());
    cases.push((
        "a data file in JSON".into(),
        bytes,
        Fate::Refused("external file"),
    ));
    let bytes = base.with_extensions(&extension(0x0537_be77, &[0xff; 16]), b"");
    cases.push(("a crypto header and no encryption".into(), bytes, Fate::Survives));
    for (what, payload) in [("short", vec![0; 8]), ("wild", vec![0xff; 24])] {
        let mut bytes = base.with_extensions(&extension(0x2385_2875, &payload), b"");
        bytes[88..96].copy_from_slice(&1u64.to_be_bytes());
        cases.push((format!("a {what} bitmaps extension"), bytes, Fate::Survives));
    }
    face_all(cases);
}

/// Method: the file that must not be opened is a pipe without a writer; whoever opens it hangs.
#[test]
fn a_backing_file_that_is_not_allowed_is_not_opened() {
    let base = Base::get();
    let folder = Folder::new();
    folder.run("mkfifo", &["pipe"]);
    let format = extension(0xe279_2aca, b"raw");
    let pipe = folder.path("pipe");
    let pipe = pipe.to_str().expect("a plain path");
    for name in ["/etc/shadow", pipe, "pipe", "file:/etc/shadow"] {
        let bytes = base.with_extensions(&format, name.as_bytes());
        let says = Fate::Refused("backing files are not allowed");
        face(&folder, name, &bytes, &OpenOptions::default(), says);
    }
}

#[test]
fn backing_names_that_lead_nowhere_or_back_are_refused() {
    let base = Base::get();
    let folder = Folder::new();
    let allowed = OpenOptions {
        backing_files: true,
        ..OpenOptions::default()
    };
    let qcow2 = extension(0xe279_2aca, b"qcow2");
    let named = |name: &str| base.with_extensions(&qcow2, name.as_bytes());
    let own = folder.path("case.qcow2");
    let own = own.to_str().expect("a plain path");
    for (name, says) in [
        ("case.qcow2", "comes back"),
        ("./case.qcow2", "comes back"),
        (own, "comes back"),
        ("file:case.qcow2", "comes back"),
        ("loop.qcow2", "comes back"),
        ("missing.qcow2", "missing.qcow2"),
        ("json:{\"driver\":\"null-co\"}", "not a path"),
        ("nbd://localhost/", "not a path"),
        (".", "backing file of"),
    ] {
        std::fs::write(folder.path("loop.qcow2"), named("case.qcow2")).expect("the other image");
        face(&folder, name, &named(name), &allowed, Fate::Refused(says));
    }
    let formatless = base.with_extensions(b"", b"base.raw");
    let says = Fate::Refused("does not record the format");
    face(&folder, "no backing format", &formatless, &allowed, says);
    let odd = base.with_extensions(&extension(0xe279_2aca, b"vmdk"), b"base.raw");
    face(&folder, "vmdk", &odd, &allowed, Fate::Refused("vmdk"));
    for (what, offset, len) in [
        ("inside the header", 8u64, 20u32),
        ("at the header's end", 103, 8),
        ("too long", 600, 1024),
        ("far too long", 600, u32::MAX),
        ("past the cluster", 4090, 20),
        ("in another cluster", 4096, 20),
        ("nowhere", u64::MAX - 4, 20),
    ] {
        let bytes = base.with(&[(8, &offset.to_be_bytes()), (16, &len.to_be_bytes())]);
        face(&folder, what, &bytes, &allowed, Fate::Refused("backing_file"));
    }
}

#[test]
fn a_chain_that_never_ends_is_cut_off() {
    let base = Base::get();
    let folder = Folder::new();
    let qcow2 = extension(0xe279_2aca, b"qcow2");
    for index in 0..100 {
        let name = format!("link-{}.qcow2", index + 1);
        let bytes = base.with_extensions(&qcow2, name.as_bytes());
        std::fs::write(folder.path(&format!("link-{index}.qcow2")), bytes).expect("a link");
    }
    let allowed = OpenOptions {
        backing_files: true,
        ..OpenOptions::default()
    };
    let first = base.with_extensions(&qcow2, b"link-0.qcow2");
    face(
        &folder,
        "an endless chain",
        &first,
        &allowed,
        Fate::Refused("more than"),
    );
}

/// Places in the file that are no place for what an entry points at.
fn bad_places(base: &Base) -> Vec<(&'static str, u64)> {
    let end = base.bytes.len().next_multiple_of(CLUSTER) as u64;
    vec![
        ("unaligned", 512),
        ("unaligned data", (base.l2_entry(base.data) & !COPIED) + 2048),
        ("just past the end", end + 4096),
        ("far past the end", 1 << 40),
        ("as far as it goes", (1 << 56) - 4096),
        ("with a reserved bit", (1 << 57) | end),
    ]
}

#[test]
fn l1_and_l2_entries_that_lead_outside_answer_with_an_error() {
    let base = Base::get();
    let mut cases = Vec::new();
    for (name, place) in bad_places(base) {
        for flags in [0, COPIED] {
            let what = if flags == 0 { "" } else { ", copied" };
            cases.push((
                format!("an L1 entry {name}{what}"),
                base.with_u64(base.l1, place | flags),
                Fate::Eio,
            ));
            cases.push((
                format!("an L2 entry {name}{what}"),
                base.with_u64(base.l2 + base.data * 8, place | flags),
                Fate::Eio,
            ));
        }
        cases.push((
            format!("a zero cluster's place {name}"),
            base.with_u64(base.l2 + base.data * 8, place | COPIED | 1),
            Fate::Survives,
        ));
    }
    for bit in [1, 2, 8, 56, 60, 61] {
        let entry = base.l2_entry(base.data) | (1 << bit);
        let bytes = base.with_u64(base.l2 + base.data * 8, entry);
        cases.push((format!("reserved bit {bit} of an L2 entry"), bytes, Fate::Eio));
    }
    for bit in [0, 1, 8, 56, 62] {
        let entry = u64_in(&base.bytes, base.l1) | (1 << bit);
        let bytes = base.with_u64(base.l1, entry);
        cases.push((format!("reserved bit {bit} of an L1 entry"), bytes, Fate::Eio));
    }
    for (name, at) in [("L1", base.l1), ("L2", base.l2 + base.data * 8)] {
        let bytes = base.with_u64(at, COPIED);
        cases.push((format!("an {name} entry of COPIED alone"), bytes, Fate::Survives));
        let bytes = base.with_u64(at, u64::MAX);
        cases.push((format!("an {name} entry of ones"), bytes, Fate::Eio));
    }
    face_all(cases);
}

/// Method: entries whose target exists, aligned and inside the file, but is a structure of the image. What
/// is written through them must not reach it.
#[test]
fn entries_that_lead_to_the_images_own_structures_do_not_let_a_guest_write_there() {
    let base = Base::get();
    let mut cases = Vec::new();
    for (name, place) in [
        ("the L1 table", base.l1),
        ("its own table", base.l2),
        ("the refcount table", base.refcount_table),
        ("a refcount block", base.refcount_block),
        ("the snapshot table", base.snapshots),
    ] {
        let entry = place as u64 | COPIED;
        let over = Fate::NotWritable("lies over");
        for (what, at, value, fate) in [
            ("an L2 entry", base.l2 + base.data * 8, entry, Fate::Survives),
            (
                "a zero cluster",
                base.l2 + base.data * 8,
                entry | 1,
                Fate::Survives,
            ),
            (
                "a shared cluster",
                base.l2 + base.data * 8,
                place as u64,
                Fate::Survives,
            ),
            ("the second L1 entry", base.l1 + 8, entry, over),
        ] {
            cases.push((format!("{what} to {name}"), base.with_u64(at, value), fate));
        }
    }
    let twice = base.l2_entry(base.data);
    let bytes = base.with_u64(base.l2 + (base.data + 1) * 8, twice);
    cases.push(("the same cluster twice".into(), bytes, Fate::Opens));
    let bytes = base.with_u64(base.l1 + 8, u64_in(&base.bytes, base.l1));
    cases.push(("the same table twice".into(), bytes, Fate::Survives));
    face_all(cases);
}

#[test]
fn compressed_clusters_that_are_none_answer_with_an_error() {
    let base = Base::get();
    let at = base.l2 + base.compressed * 8;
    let entry = base.l2_entry(base.compressed);
    // Cluster bits 12: the sector count begins at bit 58.
    let place = |host: u64, sectors: u64| COMPRESSED | sectors << 58 | host;
    let end = base.bytes.len() as u64;
    let host = (entry & ((1 << 58) - 1)) as usize;
    let mut noise = Random::new(3);
    let garbage: Vec<u8> = (0..64).map(|_| noise.next() as u8 | 6).collect();
    face_all(vec![
        (
            "past the end".into(),
            base.with_u64(at, place(end.next_multiple_of(4096) + 8192, 7)),
            Fate::Eio,
        ),
        (
            "far past the end".into(),
            base.with_u64(at, place((1 << 55) - 512, 15)),
            Fate::Eio,
        ),
        ("with COPIED".into(), base.with_u64(at, entry | COPIED), Fate::Eio),
        (
            "over the header".into(),
            base.with_u64(at, place(0, 7)),
            Fate::Eio,
        ),
        (
            "over the L1 table".into(),
            base.with_u64(at, place(base.l1 as u64, 7)),
            Fate::Eio,
        ),
        (
            "over its own table".into(),
            base.with_u64(at, place(base.l2 as u64, 7)),
            Fate::Survives,
        ),
        ("garbage".into(), base.with(&[(host, &garbage)]), Fate::Eio),
        (
            "running over the end".into(),
            base.with_u64(at, place(end - 512, 15)),
            Fate::Survives,
        ),
        (
            "with a reserved bit".into(),
            base.with_u64(at, entry | 1 << 57),
            Fate::Eio,
        ),
    ]);
}

#[test]
fn refcounts_that_lie_do_not_let_a_guest_write_over_what_is_in_use() {
    let base = Base::get();
    let end = base.bytes.len().next_multiple_of(CLUSTER) as u64;
    let mut cases = Vec::new();
    for (name, entry) in [
        ("unaligned", base.refcount_block as u64 + 512),
        ("past the end", end + 4096),
        ("far past the end", 1 << 50),
        ("at the table itself", base.refcount_table as u64),
        ("at the L1 table", base.l1 as u64),
        ("with reserved bits", base.refcount_block as u64 | 0x1ff),
        ("missing", 0),
    ] {
        let bytes = base.with_u64(base.refcount_table, entry);
        cases.push((format!("a refcount block {name}"), bytes, Fate::Survives));
    }
    let zeros = vec![0; CLUSTER];
    let ones = vec![0xff; CLUSTER];
    let block = base.refcount_block;
    cases.push((
        "a zeroed block".into(),
        base.with(&[(block, &zeros)]),
        Fate::Survives,
    ));
    cases.push((
        "a saturated block".into(),
        base.with(&[(block, &ones)]),
        Fate::Survives,
    ));
    cases.push((
        "a header that counts zero".into(),
        base.with(&[(block, &[0, 0])]),
        Fate::Survives,
    ));
    for (name, at) in [
        ("the L1 table", base.l1),
        ("the refcount table", base.refcount_table),
        ("the block itself", base.refcount_block),
        ("an L2 table", base.l2),
        ("a data cluster", (base.l2_entry(base.data) & !COPIED) as usize),
    ] {
        let count = block + at / CLUSTER * 2;
        let zero = base.with(&[(count, &[0, 0])]);
        cases.push((format!("{name} counts zero"), zero, Fate::Survives));
        let most = base.with(&[(count, &[0xff, 0xff])]);
        cases.push((format!("{name} counts 65,535"), most, Fate::Survives));
    }
    // And the same images if they were not closed cleanly: the counts are rebuilt, and right.
    for (name, mut bytes, fate) in cases.clone() {
        bytes[79] |= 1;
        cases.push((format!("dirty, {name}"), bytes, fate));
    }
    face_all(cases);
}

#[test]
fn a_file_cut_anywhere_is_refused_or_answers_with_errors() {
    let base = Base::get();
    let folder = Folder::new();
    let mut cuts: Vec<usize> = (0..base.bytes.len()).step_by(CLUSTER / 2).collect();
    cuts.extend([1, 3, 4, 23, 24, 71, 72, 103, 104, 111, 112, 200, 511, 513]);
    for at in [
        base.l1,
        base.l2,
        base.refcount_table,
        base.refcount_block,
        base.snapshots,
    ] {
        cuts.extend([at + 1, at + 8, at + 15, at + 16, at + 512, at + CLUSTER - 1]);
    }
    for cut in cuts {
        let name = format!("cut at {cut}");
        let bytes = &base.bytes[..cut.min(base.bytes.len())];
        let fate = match cut {
            0..72 => Fate::Refused("cut short"),
            _ => Fate::Survives,
        };
        face(&folder, &name, bytes, &OpenOptions::default(), fate);
    }
}

/// Method: random bytes, biased to what entries are made of, over random metadata; the seed is in the name.
#[test]
fn random_damage_to_the_metadata_is_survived() {
    let base = Base::get();
    let folder = Folder::new();
    let places = [0, base.l1, base.l2, base.refcount_table, base.refcount_block];
    for seed in 0..150 {
        let mut random = Random::new(seed);
        let mut bytes = base.bytes.clone();
        for _ in 0..=random.below(3) {
            let at = random.pick(&places) + random.below(24) as usize * 8;
            let value = match random.below(5) {
                0 => random.next(),
                1 => (random.below(40) * CLUSTER as u64) | COPIED,
                2 => COMPRESSED | random.below(1 << 17) | random.below(16) << 58,
                3 => u64_in(&bytes, at) ^ (1 << random.below(64)),
                _ => (random.below(40) * CLUSTER as u64) | random.below(2),
            };
            bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
        }
        let name = format!("seed {seed}");
        face(&folder, &name, &bytes, &OpenOptions::default(), Fate::Survives);
    }
}
