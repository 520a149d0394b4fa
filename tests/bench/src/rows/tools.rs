//! Our tool beside QEMU's: snapshots of a large disk, and making a file shorter.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::features::promises;
use super::{Bench, Row};
use crate::images::{self, HALF_FREE_BYTES, Image, Source};
use crate::report::{Better, Entry};
use crate::server::Program;
use crate::{cache, peer, process, space};

/// The longest time of one call of a tool.
const LIMIT: Duration = Duration::from_secs(300);
/// The space that a compaction may take beside the image, in MiB.
const EXTRA_MIB: f64 = 64.0;
/// The time between two looks at the space that a file takes.
const LOOK_AFTER: Duration = Duration::from_millis(5);

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    let snapshots = Row {
        name: "tools/snapshots-1tib",
        promises: promises(&[("create", 3.0), ("delete", 3.0)]),
        run: Box::new(run_snapshots),
    };
    let compact = Row {
        name: "tools/compact-10gib",
        promises: promises(&[("time", 1.0), ("extra-space", 1.0)]),
        run: Box::new(run_compact),
    };
    vec![snapshots, compact]
}

/// A snapshot of a disk of one tebibyte whose clusters are all mapped, created and deleted by tools.
fn run_snapshots(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ours) = bench.ours.clone() else {
        return Err(io::Error::other("only our own tool is compared"));
    };
    let image = bench.images.image(Source::Mapped)?;
    let path: &Path = &image.path;
    let turn = |tool: &OsStr, create: &[&OsStr], delete: &[&OsStr]| -> io::Result<[f64; 2]> {
        cache::prepare(&image, false)?;
        let created = seconds(tool, create)?;
        Ok([created, seconds(tool, delete)?])
    };
    let words = |words: [&'static str; 3]| words.map(OsStr::new);
    let name = OsStr::new("bench");
    let (create, delete) = (
        words(["image", "snapshot", "create"]),
        words(["image", "snapshot", "delete"]),
    );
    let our_create = [&create[..], &[path.as_os_str(), name]].concat();
    let our_delete = [&delete[..], &[path.as_os_str(), name]].concat();
    let peer_create = [OsStr::new("snapshot"), OsStr::new("-c"), name, path.as_os_str()];
    let peer_delete = [OsStr::new("snapshot"), OsStr::new("-d"), name, path.as_os_str()];
    let (mut our_times, mut peer_times): (Vec<_>, Vec<_>) = Default::default();
    let mut failure = None;
    for _ in 0..bench.pairs {
        bench.images.settle()?;
        our_times.push(turn(ours.as_os_str(), &our_create, &our_delete)?);
        bench.images.settle()?;
        if failure.is_none() {
            match turn(OsStr::new("qemu-img"), &peer_create, &peer_delete) {
                Ok(times) => peer_times.push(times),
                Err(error) => failure = Some(peer::failure(peer::failed("qemu-img", &error))?),
            }
        }
    }
    images::check(&image)?;
    bench.peers_failed.extend(failure.clone());
    let entry = |what: &str, at: usize| {
        let of = |times: &[[f64; 2]]| times.iter().map(|times| times[at]).collect::<Vec<_>>();
        match &failure {
            Some(reason) => row.not_measured(what, "s", &of(&our_times), "qemu-img", reason),
            None => {
                let peer = of(&peer_times);
                row.compare_figures(what, "s", Better::Lower, &of(&our_times), ("qemu-img", &peer))
            }
        }
    };
    Ok(vec![entry("create", 0), entry("delete", 1)])
}

/// Runs a tool and returns the time that it took, in seconds.
fn seconds(tool: &OsStr, arguments: &[&OsStr]) -> io::Result<f64> {
    let mut command = Command::new(tool);
    command.args(arguments);
    let start = Instant::now();
    process::output(command, LIMIT)?;
    Ok(start.elapsed().as_secs_f64())
}

/// An image of 10 GiB, half of it free, compacted where it lies, beside one that is converted to a new file, until all is on the disk.
fn run_compact(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ringdisk) = bench.ours.clone() else {
        return Err(io::Error::other("only our own tool is compared"));
    };
    let template = bench.images.image(Source::HalfFree)?;
    let mut image = template.clone();
    image.path.set_file_name("compacted.qcow2");
    let converted = image.path.with_file_name("converted.qcow2");
    let (mut our_times, mut peer_times) = (Vec::new(), Vec::new());
    let mut extra_mib = 0.0_f64;
    for turn in 0..bench.pairs {
        space::remove(&image.path)?;
        let mut copy = Command::new("cp");
        copy.arg("--sparse=always").arg(&template.path).arg(&image.path);
        process::output(copy, LIMIT)?;
        bench.images.settle()?;
        cache::prepare(&image, false)?;
        let (time, extra) = compact(&ringdisk, &image)?;
        our_times.push(time);
        extra_mib = extra_mib.max(extra);
        if turn == 0 {
            compare(&template, &image)?;
        }
        bench.images.settle()?;
        cache::prepare(&template, false)?;
        peer_times.push(convert(&template.path, &converted)?);
        space::remove(&converted)?;
    }
    space::remove(&image.path)?;
    bench.images.forget(Source::HalfFree)?;
    let (ours, peer) = (&our_times[..], ("qemu-img convert", &peer_times[..]));
    let extra = row.entry(
        "extra-space",
        "MiB",
        Better::Lower,
        extra_mib.max(0.1),
        ("bound", EXTRA_MIB),
    );
    Ok(vec![
        row.compare_figures("time", "s", Better::Lower, ours, peer),
        extra,
    ])
}

/// Compacts an image. Returns the time that it took, in seconds, and the most space that the file took beyond what it did, in MiB.
fn compact(ringdisk: &Path, image: &Image) -> io::Result<(f64, f64)> {
    let blocks = || fs::metadata(&image.path).map(|facts| facts.blocks());
    let before = blocks()?;
    let ended = AtomicBool::new(false);
    let (time, most) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = before;
            while !ended.load(Ordering::Relaxed) {
                most = most.max(blocks().unwrap_or(most));
                std::thread::sleep(LOOK_AFTER);
            }
            most
        });
        let words = [OsStr::new("image"), OsStr::new("compact"), image.path.as_os_str()];
        let time = seconds(ringdisk.as_os_str(), &words);
        ended.store(true, Ordering::Relaxed);
        (time, watcher.join().unwrap_or(u64::MAX))
    });
    let facts = fs::metadata(&image.path)?;
    // Half of the disk, and the tables.
    if facts.len() > HALF_FREE_BYTES / 2 + (16 << 20) {
        return Err(io::Error::other(format!(
            "the compacted file still has {} bytes",
            facts.len()
        )));
    }
    let extra = most.saturating_sub(before) as f64 * 512.0 / f64::from(1 << 20);
    Ok((time?, extra))
}

/// Returns the time to convert an image to a new file, and to have it on the disk, in seconds.
fn convert(from: &Path, to: &Path) -> io::Result<f64> {
    let start = Instant::now();
    let words = ["convert", "-W", "-m", "16", "-f", "qcow2", "-O", "qcow2"].map(OsStr::new);
    seconds(
        OsStr::new("qemu-img"),
        &[&words[..], &[from.as_os_str(), to.as_os_str()]].concat(),
    )?;
    File::open(to)?.sync_all()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Has QEMU's tool compare two disks, and check the second image.
fn compare(one: &Image, other: &Image) -> io::Result<()> {
    let words = ["compare", "-q", "-f", "qcow2", "-F", "qcow2"].map(OsStr::new);
    let paths = [one.path.as_os_str(), other.path.as_os_str()];
    seconds(OsStr::new("qemu-img"), &[&words[..], &paths].concat())?;
    images::check(other)
}
