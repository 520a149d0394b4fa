//! A process that is killed loses nothing that a FLUSH has acknowledged; and, if it was opened to persist
//! mappings, nothing that was answered at all.
//!
//! The test runs itself as a child that writes, zeroes, discards and flushes on two queues as fast as it can, and
//! notes in a log each change before it asks for it and each FLUSH after it was acknowledged. The child is
//! killed at some moment. Then `qemu-img check` must find no error (leaks are allowed), and each sector must
//! hold its last flushed value or one that was asked for since. The next child goes on with the same image.

#![expect(clippy::print_stderr, reason = "a failure must name its round")]

mod common;

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Done, Op};
use common::{Folder, Lane, open};
use qcow::{OpenError, OpenOptions, QcowDisk};
use ringdisk_gen::Random;

const DISK: u64 = 6 << 20;
const SECTOR: u64 = 512;
const SECTORS: u64 = DISK / SECTOR;
const CLUSTER_SECTORS: u64 = 8;

/// Zeros, as a sector's version.
const ZERO: u64 = 0;
/// The version of every sector of the image under test at first.
const FIRST: u64 = 1;

/// One note: a change asked for (sector, version) or, with version `u64::MAX`, all before it flushed. The
/// queue's number tells whose.
fn note(queue: u64, sector: u64, version: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&(queue as u32).to_le_bytes());
    bytes[4..8].copy_from_slice(&(sector as u32).to_le_bytes());
    bytes[8..].copy_from_slice(&version.to_le_bytes());
    bytes
}

const FLUSHED: u64 = u64::MAX;

fn content(sector: u64, version: u64) -> Vec<u8> {
    if version == ZERO {
        return vec![0; SECTOR as usize];
    }
    let mut bytes = vec![version as u8 ^ sector as u8; SECTOR as usize];
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes[8..16].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// Returns the queue that a sector belongs to: every other one in the first half, every other cluster in the second.
fn owner(sector: u64) -> u64 {
    if sector < SECTORS / 2 {
        sector % 2
    } else {
        sector / CLUSTER_SECTORS % 2
    }
}

/// A way to use the image under test.
#[derive(Clone, Copy, Default)]
struct Mode {
    backing: bool,
    direct: bool,
    /// Mappings are persisted: the child sends no FLUSH, and what was answered counts as flushed.
    persist: bool,
}

fn options(mode: Mode) -> OpenOptions {
    OpenOptions {
        backing_files: true,
        direct: mode.direct,
        persist_mappings: mode.persist,
        l2_cache_bytes: Some(64 << 10),
        ..OpenOptions::default()
    }
}

/// One queue of the child: batches of changes, and a FLUSH after most of them.
fn work(lane: &Lane, queue: u64, mut random: Random, mut version: u64, persist: bool, log: &File) {
    let mut done: Vec<Done> = Vec::new();
    let answer = |count: usize, done: &mut Vec<Done>| {
        while done.len() < count {
            lane.turn(done);
        }
        for done in done.drain(..) {
            assert_eq!(done.result, Ok(()));
        }
    };
    loop {
        let mut notes = Vec::new();
        let mut batch = Vec::new();
        let mut touched = std::collections::HashSet::new();
        for _ in 0..=random.below(12) {
            version += 1;
            let wide = random.one_in(3);
            let (first, count) = if wide {
                let cluster = SECTORS / 2 + random.below(SECTORS / 4 / CLUSTER_SECTORS) * 2 * CLUSTER_SECTORS;
                (cluster + queue * CLUSTER_SECTORS, CLUSTER_SECTORS)
            } else {
                (random.below(SECTORS / 4) * 2 + queue, 1)
            };
            // Two changes of one batch may end in any order, so they never meet.
            if !(first..first + count).all(|sector| touched.insert(sector)) {
                continue;
            }
            let op = match random.below(6) {
                0 if wide => Op::Discard,
                1 => Op::WriteZeroes {
                    unmap: random.one_in(2),
                    fua: false,
                },
                _ => Op::Write { fua: false },
            };
            let written = matches!(op, Op::Write { .. });
            for sector in first..first + count {
                notes.extend(note(queue, sector, if written { version } else { ZERO }));
            }
            batch.push((op, first, count, version));
        }
        // Before the kernel can see any of it; one write, so that notes are whole.
        (&*log).write_all(&notes).expect("the log");
        let asked = batch.len();
        for (op, first, count, version) in batch {
            let buffer = match op {
                Op::Write { .. } => {
                    let bytes: Vec<u8> = (first..first + count)
                        .flat_map(|sector| content(sector, version))
                        .collect();
                    AlignedBuf::from_slice(&bytes).into()
                }
                _ => Buffer::default(),
            };
            lane.submit(op, first * SECTOR, count * SECTOR, buffer, 0);
        }
        answer(asked, &mut done);
        if persist {
            (&*log).write_all(&note(queue, 0, FLUSHED)).expect("the log");
        } else if !random.one_in(3) {
            lane.submit(Op::Flush, 0, 0, Buffer::default(), 0);
            answer(1, &mut done);
            (&*log).write_all(&note(queue, 0, FLUSHED)).expect("the log");
        }
    }
}

/// Runs two queues of changes until the child is killed.
fn child(folder: &Path, round: u64, mode: Mode) {
    let disk = open(&folder.join("disk.qcow2"), &options(mode));
    let log = File::options()
        .append(true)
        .open(folder.join("log"))
        .expect("the log");
    let log = Arc::new(log);
    std::thread::scope(|scope| {
        for queue in 0..2 {
            let (disk, log) = (Arc::clone(&disk), Arc::clone(&log));
            scope.spawn(move || {
                let lane = Lane::new(&disk, RingKind::IoUring);
                let random = Random::new(round * 2 + queue);
                work(&lane, queue, random, round << 32, mode.persist, &log);
            });
        }
    });
}

/// The versions that each sector may hold: its last flushed value first, then those asked for since.
type Candidates = HashMap<u64, Vec<u64>>;

/// Applies the log to what the sectors held before. Returns how many FLUSHes were acknowledged.
fn replay(log: &[u8], candidates: &mut Candidates) -> usize {
    let mut flushes = 0;
    // What the other queue asked for is not known to be answered, and stays a candidate.
    let mut unflushed: [Vec<u64>; 2] = Default::default();
    // A note that the kill cut short was never acted on.
    for note in log.as_chunks::<16>().0 {
        let queue = u32::from_le_bytes(note[..4].try_into().expect("four bytes")) as usize;
        let sector = u64::from(u32::from_le_bytes(note[4..8].try_into().expect("four bytes")));
        let version = u64::from_le_bytes(note[8..].try_into().expect("eight bytes"));
        if version == FLUSHED {
            flushes += 1;
            for sector in unflushed[queue].drain(..) {
                if let Some(values) = candidates.get_mut(&sector) {
                    values.drain(..values.len() - 1);
                }
            }
        } else {
            assert_eq!(owner(sector), queue as u64);
            candidates.entry(sector).or_default().push(version);
            unflushed[queue].push(sector);
        }
    }
    flushes
}

/// Checks every sector and leaves each with the one value that it has.
fn judge(found: &[u8], candidates: &mut Candidates, what: &str) {
    for sector in 0..SECTORS {
        let at = (sector * SECTOR) as usize;
        let bytes = &found[at..at + SECTOR as usize];
        let values = candidates.entry(sector).or_default();
        let held = values.iter().find(|&&version| content(sector, version) == bytes);
        let Some(&held) = held else {
            panic!(
                "{what}: sector {sector} holds {:02x?}..., and none of the versions {values:x?}",
                &bytes[..16]
            );
        };
        *values = vec![held];
    }
}

/// Runs `rounds` children on one image, one after the other; more where a busy machine has them flush seldom.
fn kill_and_look(test: &str, rounds: u64, mode: Mode) {
    if let Ok(folder) = std::env::var("CRASH_FOLDER") {
        let round = std::env::var("CRASH_ROUND").expect("the round");
        return child(folder.as_ref(), round.parse().expect("a number"), mode);
    }
    let folder = Folder::new();
    let size = DISK.to_string();
    let mut args = vec!["create", "-f", "qcow2", "-o", "cluster_size=4096"];
    let first = if mode.backing { FIRST } else { ZERO };
    if mode.backing {
        let bytes: Vec<u8> = (0..SECTORS).flat_map(|sector| content(sector, FIRST)).collect();
        std::fs::write(folder.path("base.raw"), bytes).expect("a base");
        args.extend(["-b", "base.raw", "-F", "raw"]);
    }
    folder.qemu_img(&[&args[..], &["disk.qcow2", &size]].concat());
    let mut candidates: Candidates = (0..SECTORS).map(|sector| (sector, vec![first])).collect();
    let mut random = Random::new(u64::from(std::process::id()));
    let mut flushes = 0;
    for round in 1..=10 * rounds {
        if round > rounds && flushes > rounds as usize {
            break;
        }
        std::fs::write(folder.path("log"), b"").expect("a log");
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env("CRASH_FOLDER", folder.path(""))
            .env("CRASH_ROUND", (round + 1).to_string())
            .stdout(Stdio::null())
            .spawn()
            .expect("a child");
        // Let it begin, and then some more.
        let log_len = || std::fs::metadata(folder.path("log")).expect("the log").len();
        for _ in 0..1000 {
            if log_len() > 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_micros(random.below(200_000)));
        child.kill().expect("a child to kill");
        let status = child.wait().expect("a child");
        assert_eq!(status.code(), None, "round {round}: the child ended by itself");
        wait_for_lock(&folder.path("disk.qcow2"));
        let log = std::fs::read(folder.path("log")).expect("the log");
        let what = format!("{test}, round {round}, after {} notes", log.len() / 16);
        let acknowledged = replay(&log, &mut candidates);
        flushes += acknowledged;
        eprintln!("{what}, {acknowledged} flushes");
        folder.assert_flawless("disk.qcow2", true);
        let reader = OpenOptions {
            read_only: true,
            ..options(Mode::default())
        };
        let disk = open(&folder.path("disk.qcow2"), &reader);
        let found = Lane::new(&disk, RingKind::Syscalls).read(0, DISK);
        drop(disk);
        assert!(
            found == folder.qemu_reads("disk.qcow2"),
            "{what}: QEMU reads something else"
        );
        judge(&found, &mut candidates, &what);
    }
    assert!(
        flushes > rounds as usize,
        "{flushes} flushes in {} rounds",
        10 * rounds
    );
}

/// Waits until the image's lock is free, as an open does: the kernel ends a killed process's ring, its I/O and
/// the files registered with it a moment after the process.
fn wait_for_lock(path: &Path) {
    let reader = OpenOptions {
        read_only: true,
        ..options(Mode::default())
    };
    if let Err(OpenError::Lock(error)) = QcowDisk::open(path, &reader) {
        panic!("the lock of a dead process was not waited for: {error}");
    }
}

#[test]
fn killed_process_loses_nothing_flushed() {
    let name = "killed_process_loses_nothing_flushed";
    kill_and_look(name, 8, Mode::default());
}

#[test]
fn killed_process_over_backing_file_loses_nothing_flushed() {
    let name = "killed_process_over_backing_file_loses_nothing_flushed";
    let mode = Mode {
        backing: true,
        ..Mode::default()
    };
    kill_and_look(name, 8, mode);
}

#[test]
fn killed_process_on_direct_io_loses_nothing_flushed() {
    let name = "killed_process_on_direct_io_loses_nothing_flushed";
    let mode = Mode {
        backing: true,
        direct: true,
        ..Mode::default()
    };
    kill_and_look(name, 6, mode);
}

#[test]
fn killed_process_persisting_mappings_loses_nothing_answered() {
    let name = "killed_process_persisting_mappings_loses_nothing_answered";
    let mode = Mode {
        backing: true,
        persist: true,
        ..Mode::default()
    };
    kill_and_look(name, 10, mode);
}
