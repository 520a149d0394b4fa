//! Images on block devices, which do not grow with them: every table grows, the device fills to its last cluster,
//! and what was discarded is usable again.
//!
//! Method: loop devices, filled with bytes that no guest wrote, as logical volumes are. QEMU's tools judge what is on
//! the device.

#![expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Folder, Lane, assert_same, close, open};
use block::file::{FileOptions, ImageFile};
use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Context, IoError, Op};
use qcow::image::CreateOptions;
use qcow::{OpenOptions, QcowDisk};
use ringdisk_gen::Random;

const NO_SPACE: IoError = IoError::Host { errno: 28 };
/// The byte that fills a device before there is an image.
const GARBAGE: u8 = 0xA5;

/// A loop device, gone with the test.
struct Device {
    path: PathBuf,
    behind: PathBuf,
}

impl Device {
    /// A device of `bytes` with sectors of `sector` bytes; `None`, and a message, where there can be none.
    fn new(test: &str, folder: &Folder, bytes: u64, sector: u32) -> Option<Self> {
        let behind = folder.path("device.img");
        std::fs::write(&behind, vec![GARBAGE; bytes as usize]).expect("a file");
        let output = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector.to_string()])
            .arg(&behind)
            .output()
            .expect("losetup, of the package mount");
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            println!("cannot run here: {test}, because there is no loop device: {said}");
            return None;
        }
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        Some(Self { path, behind })
    }

    fn name(&self) -> &str {
        self.path.to_str().expect("a device's name")
    }

    fn grow(&self, bytes: u64) {
        let file = std::fs::OpenOptions::new().write(true).open(&self.behind);
        file.and_then(|file| file.set_len(bytes)).expect("a longer file");
        let status = Command::new("losetup")
            .arg("--set-capacity")
            .arg(&self.path)
            .status();
        assert!(status.expect("losetup").success());
    }

    /// Makes an image on it, with QEMU's tools or our own: they leave different room for the refcount table.
    fn create(&self, folder: &Folder, ours: bool, cluster: u64, bytes: u64) {
        if !ours {
            let options = format!("cluster_size={cluster}");
            folder.qemu_create(self.name(), &options, &bytes.to_string());
            return;
        }
        let mut options = CreateOptions::new(bytes);
        options.cluster_size = cluster;
        let cx = Context::syscalls();
        let write = FileOptions {
            write: true,
            direct: false,
        };
        let file = ImageFile::open(&self.path, write).expect("the device");
        let view = file.view(&cx).expect("a descriptor");
        let made = cx.block_on(qcow::image::create(&view, &options));
        made.expect("the ring turns").expect("an image");
    }

    fn open(&self, direct: bool) -> Arc<QcowDisk> {
        let options = OpenOptions {
            direct,
            ..OpenOptions::default()
        };
        open(&self.path, &options)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.path).status();
        if !detached.is_ok_and(|status| status.success()) {
            println!("{} is left behind", self.path.display());
        }
    }
}

/// The two rings, through the page cache and past it.
const WAYS: [(RingKind, bool); 2] = [(RingKind::IoUring, true), (RingKind::Syscalls, false)];

fn grow(disk: &Arc<QcowDisk>, bytes: u64) -> Result<(), IoError> {
    let cx = Context::syscalls();
    let grown = cx.block_on(disk.grow(&cx, bytes)).expect("the ring turns");
    crate::common::drain(&cx);
    grown
}

fn try_write(lane: &Lane, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
    let buffer = AlignedBuf::from_slice(bytes).into();
    lane.ask(Op::Write { fua: false }, offset, bytes.len() as u64, buffer)
        .result
}

/// Bytes that differ from sector to sector.
fn pattern(offset: u64, len: usize, round: u64) -> Vec<u8> {
    let word = |at: u64| (at / 512).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ round;
    let bytes = (offset..).step_by(8).flat_map(|at| word(at).to_le_bytes());
    bytes.take(len).collect()
}

/// With 512-byte clusters the L1 table outgrows its cluster at 2 MiB, and QEMU's refcount table its own at 8 MiB of
/// the device.
#[test]
fn tables_grow_on_a_device_with_room() {
    for ((ring, direct), ours) in WAYS.into_iter().zip([false, true]) {
        let folder = Folder::new();
        let Some(device) = Device::new("tables on devices", &folder, 40 << 20, 512) else {
            return;
        };
        device.create(&folder, ours, 512, 1 << 20);
        let disk = device.open(direct);
        let lane = Lane::new(&disk, ring);
        let mut model = vec![0; 1 << 20];
        for (round, size) in [3 << 20, (7 << 20) + 512, 24 << 20].into_iter().enumerate() {
            grow(&disk, size as u64).expect("growth");
            model.resize(size, 0);
            for at in (0..size).step_by(1 << 20).filter(|at| at >> 20 & 1 == round & 1) {
                let len = (size - at).min(1 << 20);
                let bytes = pattern(at as u64, len, round as u64);
                lane.write(at as u64, &bytes);
                model[at..at + len].copy_from_slice(&bytes);
            }
            lane.flush();
            assert_same(&lane.read(0, size as u64), &model, "after growth");
        }
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless(device.name(), false);
        assert_same(&folder.qemu_reads(device.name()), &model, "what QEMU reads");
    }
}

/// The engine uses the device to its last cluster: one more write fails, and nothing else does. Discarded space is then
/// reused without a FLUSH of the guest's.
#[test]
fn full_device_keeps_working_and_reuses_discarded_space() {
    for (ring, direct) in WAYS {
        for (cluster, ours, sector) in [
            (512, false, 512),
            (4096, true, 4096),
            (65536, false, 512),
            (512, true, 4096),
        ] {
            let what = format!("{cluster}-byte clusters, direct {direct}, sectors of {sector}");
            let folder = Folder::new();
            let size = (10 << 20) + cluster / 2 / 512 * 512;
            let size = size / u64::from(sector) * u64::from(sector);
            let Some(device) = Device::new("full devices", &folder, size, sector) else {
                return;
            };
            device.create(&folder, ours, cluster, 32 << 20);
            let disk = device.open(direct);
            let lane = Lane::new(&disk, ring);
            let mut model = vec![0; 32 << 20];
            let chunk = 65536.max(cluster) as usize;
            let mut at = 0;
            let failed = loop {
                let bytes = pattern(at as u64, chunk, 1);
                match try_write(&lane, at as u64, &bytes) {
                    Ok(()) => model[at..at + chunk].copy_from_slice(&bytes),
                    Err(error) => break error,
                }
                at += chunk;
            };
            assert_eq!(failed, NO_SPACE, "{what}");
            // Some clusters of the chunk were written before it failed.
            let tail = lane.read(at as u64, chunk as u64);
            model[at..at + chunk].copy_from_slice(&tail);
            let of_it = pattern(at as u64, chunk, 1);
            assert!(
                tail.chunks(512)
                    .zip(of_it.chunks(512))
                    .all(|(a, b)| a == b || a.iter().all(|&x| x == 0)),
                "{what}"
            );
            while try_write(&lane, at as u64, &of_it[..512]).is_ok() {
                model[at..at + 512].copy_from_slice(&of_it[..512]);
                at += cluster as usize;
            }
            let used = clusters_reached(&disk, &lane, cluster);
            assert!(
                used >= size / cluster - 1,
                "{what}: {used} clusters of {}",
                size / cluster
            );

            // Reads, overwrites and FLUSH go on.
            lane.flush();
            let again = pattern(4096, 65536, 2);
            lane.write(4096, &again);
            model[4096..4096 + 65536].copy_from_slice(&again);
            // One cluster of L1 entries maps so much; forty do not fit any more.
            let mapped = (cluster / 8).pow(2) * cluster;
            assert_eq!(grow(&disk, 40 * mapped), Err(NO_SPACE), "{what}");
            lane.flush();
            assert_same(&lane.read(0, 32 << 20), &model, &what);

            // Four times: each time what was discarded is written elsewhere, in parts of clusters too.
            for round in 0..4 {
                let from = (1 << 20) * round;
                lane.discard(from as u64, 1 << 20);
                model[from..from + (1 << 20)].fill(0);
                let to = (16 << 20) + from + 512;
                let bytes = pattern(to as u64, (1 << 20) - (128 << 10), 3);
                lane.write(to as u64, &bytes);
                model[to..to + bytes.len()].copy_from_slice(&bytes);
            }
            assert_same(&lane.read(0, 32 << 20), &model, &what);
            lane.settle();
            drop(lane);
            close(disk);
            folder.assert_flawless(device.name(), false);
            assert_same(&folder.qemu_reads(device.name()), &model, &what);
        }
    }
}

/// Returns the end of the last cluster written, in clusters from the image's start.
fn clusters_reached(disk: &Arc<QcowDisk>, lane: &Lane, cluster: u64) -> u64 {
    let mut end = 0;
    lane.read(0, 32 << 20);
    for at in (0..32 << 20).step_by(cluster as usize) {
        end = end.max(disk.cached_host_offset(at).map_or(0, |host| host / cluster + 1));
    }
    end
}

/// A write that waits for space delays no discard, and the discarded space ends the wait.
#[test]
fn write_waiting_for_space_goes_on_after_a_discard() {
    for (ring, direct) in WAYS {
        let folder = Folder::new();
        let Some(device) = Device::new("writes that wait", &folder, 4 << 20, 512) else {
            return;
        };
        device.create(&folder, true, 4096, 8 << 20);
        let options = OpenOptions {
            direct,
            wait_for_space: true,
            ..OpenOptions::default()
        };
        let disk = open(&device.path, &options);
        let lane = Lane::new(&disk, ring);
        let bytes = vec![7; 64 << 10];
        let begin = Instant::now();
        let mut done = Vec::new();
        let mut at = 0;
        // The write that finds no room is not answered.
        loop {
            let buffer = AlignedBuf::from_slice(&bytes).into();
            lane.submit(Op::Write { fua: false }, at, 64 << 10, buffer, at);
            let asked = Instant::now();
            while done.is_empty() && asked.elapsed() < Duration::from_secs(2) {
                lane.turn(&mut done);
            }
            let Some(answer) = done.pop() else { break };
            assert_eq!(answer.result, Ok(()));
            at += 64 << 10;
        }
        assert!(at > 3 << 20 && at < 4 << 20, "{at}");
        lane.submit(Op::Discard, 0, 1 << 20, Buffer::default(), 1);
        while done.len() < 2 {
            assert!(
                begin.elapsed() < Duration::from_secs(120),
                "it waits for ever: {done:?}"
            );
            lane.turn(&mut done);
        }
        assert!(done.iter().all(|done| done.result == Ok(())), "{done:?}");
        let mut model = vec![7; at as usize + bytes.len()];
        model[..1 << 20].fill(0);
        model.resize(8 << 20, 0);
        assert_same(&lane.read(0, 8 << 20), &model, "after the wait");
        lane.settle();
        drop(lane);
        close(disk);
        folder.assert_flawless(device.name(), false);
    }
}

/// The device is enlarged while its disk is served; then the disk is.
#[test]
fn grown_device_is_used_at_once() {
    for (ring, direct) in WAYS {
        let folder = Folder::new();
        let Some(device) = Device::new("devices that grow", &folder, 4 << 20, 512) else {
            return;
        };
        device.create(&folder, false, 4096, 16 << 20);
        let disk = device.open(direct);
        let lane = Lane::new(&disk, ring);
        let mut model = vec![0; 16 << 20];
        let mut failures = 0;
        for at in (0..16usize << 20).step_by(1 << 18) {
            let bytes = pattern(at as u64, 1 << 18, 1);
            while let Err(error) = try_write(&lane, at as u64, &bytes) {
                assert_eq!(error, NO_SPACE);
                failures += 1;
                assert!(failures < 8, "more room did not help");
                device.grow((4 << 20) * (1 + failures));
            }
            model[at..at + (1 << 18)].copy_from_slice(&bytes);
        }
        assert!(failures > 2);
        grow(&disk, 20 << 20).expect("a larger disk");
        model.resize(20 << 20, 0);
        device.grow(32 << 20);
        let bytes = pattern(16 << 20, 4 << 20, 1);
        lane.write(16 << 20, &bytes);
        model[16 << 20..].copy_from_slice(&bytes);
        lane.flush();
        assert_same(&lane.read(0, 20 << 20), &model, "after growth");
        drop(lane);
        close(disk);
        folder.assert_flawless(device.name(), false);
        assert_same(&folder.qemu_reads(device.name()), &model, "what QEMU reads");
    }
}

/// A device with hardly more room than the disk needs, and a guest that writes, discards and zeroes at random without
/// FLUSHes: no request fails for want of space.
#[test]
fn discarding_guest_never_fills_a_tight_device() {
    const DISK: u64 = 4 << 20;
    for (seed, (ring, direct)) in WAYS.into_iter().enumerate() {
        for cluster in [512, 4096, 65536] {
            let folder = Folder::new();
            // All data, an L2 table for each range and the refcounts, twice where a table has moved.
            let device = DISK + DISK / (cluster / 8) + DISK / (cluster / 2) + 10 * cluster;
            let device = device.next_multiple_of(cluster);
            let Some(device) = Device::new("tight devices", &folder, device, 512) else {
                return;
            };
            device.create(&folder, seed == 1, cluster, DISK);
            let disk = device.open(direct);
            let lane = Lane::new(&disk, ring);
            let mut model = vec![0; DISK as usize];
            let mut random = Random::new(seed as u64 ^ cluster);
            for round in 0..400 {
                let sectors = DISK / 512;
                let first = random.below(sectors);
                let count = (1 + random.below(1024)).min(sectors - first);
                let (at, len) = (first * 512, count * 512);
                let range = at as usize..(at + len) as usize;
                match random.below(8) {
                    0..=3 => {
                        let bytes = pattern(at, len as usize, round);
                        lane.write(at, &bytes);
                        model[range].copy_from_slice(&bytes);
                    }
                    4 | 5 => {
                        // Clusters that it covers in part stay as they are.
                        lane.discard(at, len);
                        let first = at.next_multiple_of(cluster);
                        let end = (at + len) / cluster * cluster;
                        if first < end {
                            model[first as usize..end as usize].fill(0);
                        }
                    }
                    6 => {
                        lane.write_zeroes(at, len, random.one_in(2));
                        model[range].fill(0);
                    }
                    _ => assert_same(&lane.read(at, len), &model[range], "a read"),
                }
            }
            lane.flush();
            lane.settle();
            assert_same(&lane.read(0, DISK), &model, "at the end");
            drop(lane);
            close(disk);
            folder.assert_flawless(device.name(), false);
            assert_same(&folder.qemu_reads(device.name()), &model, "what QEMU reads");
        }
    }
}

/// An image that QEMU made and filled, whose refcount table has no room to grow: FLUSHes and overwrites do not depend on
/// it.
#[test]
fn refcount_table_without_room_fails_nothing_else() {
    for (ring, direct) in WAYS {
        let folder = Folder::new();
        // 64 entries count 8 MiB; one cluster is left, and a longer table needs three.
        let Some(device) = Device::new("full refcount tables", &folder, (8 << 20) + 512, 512) else {
            return;
        };
        device.create(&folder, false, 512, 16 << 20);
        let disk = device.open(direct);
        let lane = Lane::new(&disk, ring);
        let mut at = 7 << 20;
        lane.write(0, &pattern(0, at as usize, 1));
        while try_write(&lane, at, &pattern(at, 512, 1)) == Ok(()) {
            at += 512;
        }
        for _ in 0..3 {
            assert_eq!(try_write(&lane, at, &[1; 512]), Err(NO_SPACE));
            lane.flush();
            lane.write(0, &pattern(0, 4096, 2));
        }
        let mut model = pattern(0, at as usize, 1);
        model[..4096].copy_from_slice(&pattern(0, 4096, 2));
        model.resize(16 << 20, 0);
        drop(lane);
        close(disk);
        folder.assert_flawless(device.name(), false);
        assert_same(&folder.qemu_reads(device.name()), &model, "what QEMU reads");
    }
}

/// No read of the guest's returns bytes that were on the device before the image was created.
#[test]
fn old_device_contents_never_show() {
    for (ring, direct) in WAYS {
        for (cluster, sector) in [(4096, 512), (65536, 4096), (512, 4096)] {
            let folder = Folder::new();
            let Some(device) = Device::new("old bytes", &folder, 8 << 20, sector) else {
                return;
            };
            device.create(&folder, true, cluster, 4 << 20);
            let disk = device.open(direct);
            let lane = Lane::new(&disk, ring);
            let mut random = Random::new(cluster);
            for _ in 0..60 {
                let at = random.below((4 << 20) / 512 - 8) * 512;
                match random.below(4) {
                    0 => lane.discard(at & !65535, 65536),
                    1 => lane.write_zeroes(at, 4096, true),
                    _ => lane.write(at, &vec![1; 512 * (1 + random.below(8) as usize)]),
                }
                assert!(lane.read(0, 4 << 20).iter().all(|&byte| byte < 2));
            }
            drop(lane);
            close(disk);
            folder.assert_flawless(device.name(), false);
            assert!(folder.qemu_reads(device.name()).iter().all(|&byte| byte < 2));
        }
    }
}
