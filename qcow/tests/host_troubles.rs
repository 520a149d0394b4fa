//! The fate of requests, and of acknowledged data, when the host runs out of space or a sync fails.
//!
//! Method: real ones. A test runs itself again in a mount namespace of its own, where a small tmpfs can be filled
//! to the last page and emptied again, or where a file system lies on a loop device whose own file is in that tmpfs:
//! its writes are taken, and fail when they are to be made durable.

#![expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]

mod common;

use std::cell::RefCell;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::file::{FileOptions, ImageFile};
use block::raw::RawDisk;
use block::ring::RingKind;
use block::worker::{WorkerConfig, WorkerHandle};
use block::{AlignedBuf, Buffer, CompletionSink, Context, Disk, DiskQueue, Done, IoError, Op, Request};
use common::create;
use qcow::image::CreateOptions;
use qcow::offline::compact_image;
use qcow::{CompactOptions, OpenOptions, QcowDisk};
use ringdisk_gen::space::removed_bytes;
use simulator::pages::Tags;

const CLUSTER: u64 = 65536;
const DISK: u64 = 32 << 20;
const NO_SPACE: Result<(), IoError> = Err(IoError::Host { errno: libc_enospc() });

const fn libc_enospc() -> i32 {
    28
}

/// The variable that names a test's folder while it runs in its own namespace.
const PLACE: &str = "RINGDISK_TEST_PLACE";
/// The line that is printed before the test runs itself. A failure after it is the test's, one before it the machine's.
const MOUNTED: &str = "the folder is mounted";

/// Returns the mounted folder if this is the test in its namespace. Otherwise runs it there, after `mounts`.
fn place(test: &str, mounts: &str) -> Option<PathBuf> {
    if let Some(place) = std::env::var_os(PLACE) {
        return Some(place.into());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let script = format!("{{ {mounts} ; }} || exit 77; echo '{MOUNTED}'; exec \"$0\" \"$@\"");
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--propagation", "private", "bash", "-c", &script]);
    match run_again(&mut unshare, test, folder.path()) {
        (Some(0), said) => assert!(said.contains("1 passed"), "{test} did not run: {said}"),
        (Some(77 | 1), said) if !said.contains(MOUNTED) => {
            println!("cannot run here: {test}, because nothing can be mounted: {said}");
        }
        (_, said) => panic!("{test}: {said}"),
    }
    None
}

/// Runs a test of this program once more, by way of `command`; its exit code, and what it said.
fn run_again(command: &mut Command, test: &str, place: &Path) -> (Option<i32>, String) {
    let output = command
        .arg(std::env::current_exe().expect("this test"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(PLACE, place)
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

/// Returns a folder if this is the test in a process of its own, whose descriptors it may use up. Otherwise runs it
/// there.
fn with_few_descriptors(test: &str) -> Option<PathBuf> {
    if let Some(place) = std::env::var_os(PLACE) {
        return Some(place.into());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut shell = Command::new("bash");
    shell.args(["-c", "ulimit -n 100; exec \"$0\" \"$@\""]);
    let (code, said) = run_again(&mut shell, test, folder.path());
    assert!(code == Some(0) && said.contains("1 passed"), "{test}: {said}");
    None
}

const SMALL: &str = "mount -t tmpfs -o size=8m,huge=never none \"$RINGDISK_TEST_PLACE\"";

/// A file system without a journal, so that a failed write leaves it as it is, on a file in a tmpfs.
const FAULTY: &str = "mount -t tmpfs -o size=16m,huge=never none \"$RINGDISK_TEST_PLACE\" && cd \"$RINGDISK_TEST_PLACE\" && \
    truncate -s 64M backing && mkfs.ext4 -q -O ^has_journal -E lazy_itable_init=0 backing && mkdir fs && \
    mount -o loop backing fs";

/// Takes all the space there is in a folder, and what comes free a moment later.
fn fill(folder: &Path) {
    await_removed(folder);
    let mut file = std::fs::File::create(folder.join("filler")).expect("a file");
    let mut quiet = 0;
    while quiet < 5 {
        let mut taken = false;
        for size in [4096, 1] {
            while file.write_all(&vec![1; size]).is_ok() {
                taken = true;
            }
        }
        quiet = if taken { 0 } else { quiet + 1 };
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until files that were removed take no space of a tmpfs any more. A ring that has been dropped lets go of its files
/// in the background, and what it frees after the file system was filled is room that nothing had to wait for.
fn await_removed(folder: &Path) {
    let begin = Instant::now();
    // The faulty file system is no tmpfs, and nothing was removed from it.
    while removed_bytes(folder).is_ok_and(|bytes| bytes > 0) {
        let waited = begin.elapsed();
        assert!(
            waited < Duration::from_secs(60),
            "a removed file still takes space"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn empty(folder: &Path) {
    std::fs::remove_file(folder.join("filler")).expect("the filler");
}

/// A queue of any disk, turned by hand.
struct Lane {
    cx: Context,
    queue: Box<dyn DiskQueue>,
    sink: std::rc::Rc<CompletionSink>,
    /// Answers that came together with one that was waited for.
    more: RefCell<Vec<Done>>,
    /// Pages that only the kernel reaches, which requests with data then have.
    tags: Option<Tags>,
}

/// The number of requests with registered pages that may be in flight, and their size in bytes.
const PLACES: u16 = 4;
const PLACE_BYTES: usize = 3 * CLUSTER as usize;

impl Lane {
    fn new(disk: &Arc<dyn Disk>, ring: RingKind) -> Self {
        let cx = Context::new(ring, 64).expect("these tests need io_uring");
        let queue = Arc::clone(disk).open_queue(&cx).expect("a queue");
        Self {
            cx,
            queue,
            sink: CompletionSink::new(),
            more: RefCell::default(),
            tags: None,
        }
    }

    /// As [`Lane::new`], but requests with data have registered pages.
    fn registered(disk: &Arc<dyn Disk>, ring: RingKind) -> Self {
        let made = Tags::on_ring(ring, 64, PLACES, PLACE_BYTES, None);
        let (cx, tags) = made.expect("these tests need io_uring");
        let queue = Arc::clone(disk).open_queue(&cx).expect("a queue");
        Self {
            cx,
            queue,
            sink: CompletionSink::new(),
            more: RefCell::default(),
            tags: Some(tags),
        }
    }

    fn submit(&self, op: Op, offset: u64, len: u64, byte: u8) {
        let bytes = vec![byte; len as usize];
        let mut tag = 0;
        let buffer: Buffer = match (op, &self.tags) {
            (Op::Read | Op::Write { .. }, Some(tags)) => {
                let free = |at| Some((at, tags.buffer(at, 0, bytes.len(), 4096).ok()?));
                let (at, buffer) = (0..PLACES).find_map(free).expect("a free place");
                tags.write(at, 0, &bytes);
                tag = at;
                buffer
            }
            (Op::Read | Op::Write { .. }, None) => AlignedBuf::from_slice(&bytes).into(),
            _ => Buffer::default(),
        };
        self.queue
            .submit(Request::new(op, offset, len, buffer, &self.sink, tag.into()));
    }

    fn turn(&self, done: &mut Vec<Done>) {
        self.cx.run_ready();
        self.cx.ring().turn(false).expect("the ring turns");
        self.cx.run_ready();
        self.sink.drain_into(done);
    }

    fn answer(&self) -> Done {
        let mut done = self.more.borrow_mut();
        let begin = Instant::now();
        while done.is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(30), "no answer");
            self.turn(&mut done);
        }
        done.remove(0)
    }

    /// Turns for a while in which no answer may come.
    fn assert_waits(&self) {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(300) {
            let mut done = Vec::new();
            self.turn(&mut done);
            assert!(done.is_empty(), "it did not wait: {done:?}");
        }
    }

    fn ask(&self, op: Op, offset: u64, len: u64, byte: u8) -> Result<(), IoError> {
        self.submit(op, offset, len, byte);
        self.answer().result
    }

    fn write(&self, offset: u64, len: u64, byte: u8) -> Result<(), IoError> {
        self.ask(Op::Write { fua: false }, offset, len, byte)
    }

    fn flush(&self) -> Result<(), IoError> {
        self.ask(Op::Flush, 0, 0, 0)
    }

    #[track_caller]
    fn assert_reads(&self, offset: u64, len: u64, byte: u8) {
        self.submit(Op::Read, offset, len, 0xCC);
        let done = self.answer();
        assert_eq!(done.result, Ok(()));
        let mut bytes = vec![0; len as usize];
        match (&self.tags, done.buffer.memory()) {
            (Some(tags), None) => tags.read(done.tag as u16, 0, &mut bytes),
            (_, memory) => memory.expect("our own buffer").read(0, &mut bytes),
        }
        assert!(bytes.iter().all(|&found| found == byte), "at {offset:#x}");
    }

    fn settle(&self) {
        let mut done = Vec::new();
        while self.cx.tasks() > 0 {
            self.turn(&mut done);
        }
        assert!(done.is_empty());
    }
}

fn close(disk: Arc<dyn Disk>) -> Result<(), IoError> {
    let cx = Context::syscalls();
    cx.block_on(disk.close(&cx)).expect("the ring turns")
}

fn qcow(folder: &Path, wait: bool) -> Arc<dyn Disk> {
    let path = folder.join("disk.qcow2");
    create(&path, &CreateOptions::new(DISK));
    reopen(folder, wait)
}

fn reopen(folder: &Path, wait: bool) -> Arc<dyn Disk> {
    let options = OpenOptions {
        wait_for_space: wait,
        backing_files: true,
        ..OpenOptions::default()
    };
    QcowDisk::open(&folder.join("disk.qcow2"), &options).expect("the image opens")
}

fn raw(folder: &Path, wait: bool, direct: bool) -> Arc<dyn Disk> {
    let path = folder.join("disk.raw");
    if !path.exists() {
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(DISK).expect("its length");
    }
    let file = ImageFile::open(&path, FileOptions { write: true, direct }).expect("the file");
    if wait {
        file.wait_for_space();
    }
    RawDisk::new(file, DISK, true)
}

#[track_caller]
fn assert_flawless(folder: &Path) {
    let output = Command::new("qemu-img")
        .args(["check", "-f", "qcow2"])
        .arg(folder.join("disk.qcow2"))
        .output()
        .expect("qemu-img, of the package qemu-utils");
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
}

const RINGS: [RingKind; 2] = [RingKind::IoUring, RingKind::Syscalls];

#[test]
fn write_fails_without_space_and_loses_nothing_acknowledged() {
    let test = "write_fails_without_space_and_loses_nothing_acknowledged";
    let Some(folder) = place(test, SMALL) else { return };
    for ring in RINGS {
        let disk = qcow(&folder, false);
        let lane = Lane::new(&disk, ring);
        assert_eq!(lane.write(0, CLUSTER, 1), Ok(()));
        fill(&folder);
        // New clusters; a FLUSH, whose tables have no place; and again with space.
        assert_eq!(lane.write(CLUSTER, 3 * CLUSTER, 2), NO_SPACE);
        assert_eq!(lane.flush(), NO_SPACE);
        assert_eq!(lane.write(0, CLUSTER, 3), Ok(()), "an overwrite needs no space");
        empty(&folder);
        assert_eq!(
            lane.flush(),
            Ok(()),
            "a write that found no space has lost nothing"
        );
        assert_eq!(lane.write(CLUSTER, 3 * CLUSTER, 4), Ok(()));
        assert_eq!(lane.flush(), Ok(()));
        lane.assert_reads(0, CLUSTER, 3);
        lane.assert_reads(CLUSTER, 3 * CLUSTER, 4);
        lane.settle();
        drop(lane);
        assert_eq!(close(disk), Ok(()));
        assert_flawless(&folder);

        let disk = raw(&folder, false, false);
        let lane = Lane::new(&disk, ring);
        fill(&folder);
        assert_eq!(lane.write(0, CLUSTER, 1), NO_SPACE);
        assert_eq!(lane.ask(Op::Write { fua: true }, 0, CLUSTER, 1), NO_SPACE);
        empty(&folder);
        assert_eq!(lane.ask(Op::Write { fua: true }, 0, CLUSTER, 1), Ok(()));
        assert_eq!(lane.flush(), Ok(()));
        drop(lane);
        assert_eq!(close(disk), Ok(()));
        std::fs::remove_file(folder.join("disk.raw")).expect("the disk");
    }
}

/// The host is full, and there is room in what was discarded and not flushed, however little.
#[test]
fn write_on_a_full_host_uses_discarded_space() {
    let test = "write_on_a_full_host_uses_discarded_space";
    let Some(folder) = place(test, SMALL) else { return };
    for ring in RINGS {
        for clusters in [1, 8, 40] {
            let disk = qcow(&folder, false);
            let lane = Lane::new(&disk, ring);
            assert_eq!(lane.write(0, 48 * CLUSTER, 1), Ok(()));
            assert_eq!(lane.flush(), Ok(()));
            fill(&folder);
            assert_eq!(lane.write(64 * CLUSTER, CLUSTER, 2), NO_SPACE);
            assert_eq!(lane.ask(Op::Discard, 0, clusters * CLUSTER, 0), Ok(()));
            for cluster in 64..64 + clusters {
                let written = lane.write(cluster * CLUSTER, CLUSTER, 3);
                assert_eq!(
                    written,
                    Ok(()),
                    "{ring:?}: {cluster} after {clusters} were discarded"
                );
            }
            assert_eq!(lane.write(0, CLUSTER, 4), NO_SPACE, "all is used");
            empty(&folder);
            assert_eq!(lane.flush(), Ok(()));
            lane.assert_reads(64 * CLUSTER, clusters * CLUSTER, 3);
            lane.assert_reads(0, clusters * CLUSTER, 0);
            lane.settle();
            drop(lane);
            assert_eq!(close(disk), Ok(()));
            assert_flawless(&folder);
            std::fs::remove_file(folder.join("disk.qcow2")).expect("the disk");
        }
    }
}

#[test]
fn write_waiting_for_space_is_answered_when_space_returns() {
    let test = "write_waiting_for_space_is_answered_when_space_returns";
    let Some(folder) = place(test, SMALL) else { return };
    for ring in RINGS {
        for fua in [false, true] {
            for make in [Lane::new, Lane::registered] {
                let disk = qcow(&folder, true);
                wait_for_space(&folder, disk, make, ring, fua);
                assert_flawless(&folder);
                wait_for_space(&folder, raw(&folder, true, false), make, ring, fua);
                std::fs::remove_file(folder.join("disk.raw")).expect("the disk");
            }
        }
    }
}

fn wait_for_space(
    folder: &Path,
    disk: Arc<dyn Disk>,
    make: fn(&Arc<dyn Disk>, RingKind) -> Lane,
    ring: RingKind,
    fua: bool,
) {
    let lane = make(&disk, ring);
    fill(folder);
    lane.submit(Op::Write { fua }, CLUSTER, 3 * CLUSTER, 7);
    lane.submit(Op::Write { fua }, 8 * CLUSTER + 4096, 8192, 8);
    lane.assert_waits();
    lane.submit(Op::Read, 0, 4096, 0xCC);
    assert_eq!(lane.answer().result, Ok(()), "reads do not wait");
    empty(folder);
    assert_eq!(lane.answer().result, Ok(()));
    assert_eq!(lane.answer().result, Ok(()));
    assert_eq!(lane.flush(), Ok(()));
    lane.assert_reads(CLUSTER, 3 * CLUSTER, 7);
    lane.assert_reads(8 * CLUSTER, 4096, 0);
    lane.assert_reads(8 * CLUSTER + 4096, 8192, 8);
    lane.settle();
    drop(lane);
    assert_eq!(close(disk), Ok(()));
}

#[test]
fn flush_waiting_for_space_loses_nothing() {
    let test = "flush_waiting_for_space_loses_nothing";
    let Some(folder) = place(test, SMALL) else { return };
    for ring in RINGS {
        let disk = qcow(&folder, true);
        let (lane, other) = (Lane::new(&disk, ring), Lane::new(&disk, ring));
        assert_eq!(lane.write(5 * CLUSTER, 2 * CLUSTER, 5), Ok(()));
        fill(&folder);
        // The L2 table is new: its place in the file has no space yet.
        lane.submit(Op::Flush, 0, 0, 0);
        lane.assert_waits();
        other.submit(Op::Flush, 0, 0, 0);
        other.assert_waits();
        lane.assert_waits();
        empty(&folder);
        assert_eq!(lane.answer().result, Ok(()));
        assert_eq!(other.answer().result, Ok(()));
        // A cut now: what was flushed is there.
        let copy = folder.join("copy.qcow2");
        std::fs::copy(folder.join("disk.qcow2"), &copy).expect("a copy");
        let read_only = OpenOptions {
            read_only: true,
            ..OpenOptions::default()
        };
        let after: Arc<dyn Disk> = QcowDisk::open(&copy, &read_only).expect("the copy opens");
        Lane::new(&after, ring).assert_reads(5 * CLUSTER, 2 * CLUSTER, 5);
        std::fs::remove_file(&copy).expect("the copy");
        for lane in [lane, other] {
            lane.settle();
        }
        assert_eq!(close(disk), Ok(()));
        assert_flawless(&folder);
    }
}

#[test]
fn drain_ends_space_waits_and_starts_none_meanwhile() {
    let test = "drain_ends_space_waits_and_starts_none_meanwhile";
    let Some(folder) = place(test, SMALL) else { return };
    for ring in RINGS {
        for disk in [qcow(&folder, true), raw(&folder, true, false)] {
            let (lane, other) = (Lane::new(&disk, ring), Lane::new(&disk, ring));
            assert_eq!(lane.write(0, CLUSTER, 1), Ok(()));
            fill(&folder);
            lane.submit(Op::Write { fua: false }, CLUSTER, CLUSTER, 2);
            other.submit(Op::Write { fua: false }, 2 * CLUSTER, CLUSTER, 2);
            lane.assert_waits();
            other.assert_waits();
            let off = disk.hold_off().expect("a disk that waits");
            assert_eq!(lane.answer().result, NO_SPACE);
            assert_eq!(other.answer().result, NO_SPACE);
            assert_eq!(lane.write(3 * CLUSTER, CLUSTER, 2), NO_SPACE, "it began to wait");
            drop(off);
            lane.submit(Op::Write { fua: false }, 4 * CLUSTER, CLUSTER, 2);
            lane.assert_waits();
            empty(&folder);
            assert_eq!(lane.answer().result, Ok(()));
            fill(&folder);
            lane.submit(Op::Write { fua: false }, 5 * CLUSTER, CLUSTER, 2);
            lane.assert_waits();
            // A close ends waits for good, also where it cannot write what it should.
            let begin = Instant::now();
            let _closed = close(Arc::clone(&disk));
            assert!(
                begin.elapsed() < Duration::from_secs(5),
                "the close waits for space"
            );
            assert_eq!(lane.answer().result, NO_SPACE);
            empty(&folder);
            lane.settle();
        }
        std::fs::remove_file(folder.join("disk.raw")).expect("the disk");
    }
}

/// The host's own sync would succeed the second time: the kernel reports a failure once.
#[test]
fn failed_sync_fails_later_syncs_until_reopen() {
    let test = "failed_sync_fails_later_syncs_until_reopen";
    let Some(folder) = place(test, FAULTY) else { return };
    let images = folder.join("fs");
    let fua = Op::Write { fua: true };
    for ring in RINGS {
        let base = images.join("base.qcow2");
        create(&base, &CreateOptions::new(DISK));
        for kind in ["qcow2", "overlay", "raw"] {
            let open = |first: bool| match kind {
                "raw" => raw(&images, false, false),
                "overlay" if first => {
                    let output = Command::new("qemu-img")
                        .args([
                            "create",
                            "-q",
                            "-f",
                            "qcow2",
                            "-b",
                            "base.qcow2",
                            "-F",
                            "qcow2",
                            "disk.qcow2",
                        ])
                        .current_dir(&images)
                        .output();
                    assert!(
                        output
                            .expect("qemu-img, of the package qemu-utils")
                            .status
                            .success()
                    );
                    reopen(&images, false)
                }
                _ if first => qcow(&images, false),
                _ => reopen(&images, false),
            };
            let disk = open(true);
            let lane = Lane::new(&disk, ring);
            let other = Lane::new(&disk, ring);
            assert_eq!(lane.write(0, CLUSTER, 1), Ok(()), "{kind}");
            assert_eq!(lane.flush(), Ok(()), "{kind}");
            fill(&folder);
            assert_eq!(
                lane.write(CLUSTER, 128 * CLUSTER, 2),
                Ok(()),
                "{kind}: it is only cached"
            );
            let lost = lane.flush();
            assert!(
                matches!(lost, Err(IoError::Host { .. })),
                "{kind}: the sync did not fail: {lost:?}"
            );
            empty(&folder);
            for lane in [&lane, &other] {
                for _ in 0..2 {
                    assert_eq!(lane.flush(), lost, "{kind}: a FLUSH succeeds");
                }
                assert_eq!(lane.ask(fua, 0, 4096, 3), lost, "{kind}: a forced write succeeds");
                assert_eq!(
                    lane.write(0, 4096, 3),
                    Ok(()),
                    "{kind}: what promises nothing goes on"
                );
                lane.assert_reads(0, 4096, 3);
            }
            lane.settle();
            other.settle();
            drop((lane, other));
            assert_eq!(close(disk), lost, "{kind}: a close succeeds");
            // Opened anew: what was flushed before is there, and all goes on.
            let disk = open(false);
            let lane = Lane::new(&disk, ring);
            assert_eq!(lane.write(0, CLUSTER, 9), Ok(()));
            assert_eq!(lane.flush(), Ok(()), "{kind}: after reopening");
            lane.assert_reads(0, CLUSTER, 9);
            lane.settle();
            drop(lane);
            assert_eq!(close(disk), Ok(()), "{kind}: after reopening");
            for name in ["disk.qcow2", "disk.raw"] {
                let _gone = std::fs::remove_file(images.join(name));
            }
        }
    }
}

/// An FUA write is its own sync: its failure fails the FLUSHes of all queues.
#[test]
fn failed_fua_write_counts_as_failed_sync() {
    let test = "failed_fua_write_counts_as_failed_sync";
    let Some(folder) = place(test, FAULTY) else { return };
    let images = folder.join("fs");
    for ring in RINGS {
        let disk = raw(&images, false, false);
        let (lane, other) = (Lane::new(&disk, ring), Lane::new(&disk, ring));
        assert_eq!(lane.write(0, CLUSTER, 1), Ok(()));
        assert_eq!(lane.flush(), Ok(()));
        fill(&folder);
        assert_eq!(
            other.write(CLUSTER, 128 * CLUSTER, 2),
            Ok(()),
            "it is only cached"
        );
        let lost = lane.ask(Op::Write { fua: true }, 0, 4096, 3);
        assert!(lost.is_err(), "the forced write did not fail");
        empty(&folder);
        assert_eq!(other.flush(), lost);
        assert_eq!(lane.flush(), lost);
        drop((lane, other));
        assert_eq!(close(disk), lost);
        std::fs::remove_file(images.join("disk.raw")).expect("the disk");
    }
}

/// A disk writes its mappings back when it is closed: that must not fail for want of a descriptor.
#[test]
fn close_without_a_descriptor_left_loses_nothing() {
    let Some(folder) = with_few_descriptors("close_without_a_descriptor_left_loses_nothing") else {
        return;
    };
    for ring in [RingKind::IoUring, RingKind::Syscalls] {
        for (name, disk) in [("raw", raw(&folder, false, false)), ("qcow2", overlay(&folder))] {
            let lane = Lane::new(&disk, ring);
            for cluster in 0..20 {
                assert_eq!(lane.write(cluster * CLUSTER, CLUSTER, 7), Ok(()));
            }
            drop(lane);
            let config = WorkerConfig {
                ring,
                ..WorkerConfig::default()
            };
            let worker = WorkerHandle::spawn(config).expect("a worker");
            let hogs: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
            let closed = worker.block_on(move |cx| disk.close(cx)).expect("a worker");
            assert_eq!(closed, Ok(()), "{name} on {ring:?}");
            drop(hogs);
        }
        let written = Lane::new(&reopen(&folder, false), RingKind::Syscalls);
        written.assert_reads(0, 20 * CLUSTER, 7);
        written.assert_reads(20 * CLUSTER, CLUSTER, 0);
        drop(written);
        assert_flawless(&folder);
    }
}

/// A disk whose backing file is the one of [`raw`].
fn overlay(folder: &Path) -> Arc<dyn Disk> {
    let mut options = CreateOptions::new(DISK);
    options.backing_file = Some("disk.raw".to_owned());
    options.backing_format = Some("raw".to_owned());
    std::fs::remove_file(folder.join("disk.qcow2")).unwrap_or_default();
    create(&folder.join("disk.qcow2"), &options);
    reopen(folder, false)
}

/// A file system whose files have no direct I/O.
const INDIRECT: &str = "mount -t ramfs none \"$RINGDISK_TEST_PLACE\"";

#[test]
fn image_is_compacted_where_files_have_no_direct_io() {
    let Some(folder) = place("image_is_compacted_where_files_have_no_direct_io", INDIRECT) else {
        return;
    };
    let path = folder.join("disk");
    create(&path, &CreateOptions::new(DISK));
    let direct = OpenOptions {
        direct: true,
        ..OpenOptions::default()
    };
    let refused = QcowDisk::open(&path, &direct).expect_err("no direct I/O");
    assert!(refused.lacks_direct_io(), "{refused}");
    let compacted = compact_image(&path, None, &CompactOptions::default(), |_| {
        ControlFlow::Continue(())
    });
    assert_eq!(compacted.expect("a compacted image").moved_bytes, 0);
}
