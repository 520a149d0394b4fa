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
use super::{Bench, Row, in_turns};
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

/// The tool of a turn.
#[derive(Clone, Copy, Debug)]
enum Tool {
    Ours,
    Qemu,
}

/// The cost of making an image shorter.
struct Compacted {
    seconds: f64,
    /// The most space that the file took beyond what it did.
    extra_mib: f64,
}

/// A snapshot of a disk of one tebibyte whose clusters are all mapped, created and deleted by tools.
fn run_snapshots(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ours) = bench.ours.clone() else {
        return Err(io::Error::other("only our own tool is compared"));
    };
    let image = bench.images.image(Source::Mapped)?;
    let (create, delete) = (["image", "snapshot", "create"], ["image", "snapshot", "delete"]);
    let turn = |tool: &OsStr, create: &[&str], delete: &[&str], rest: [&OsStr; 2]| -> io::Result<[f64; 2]> {
        let time = |words: &[&str]| {
            let words: Vec<&OsStr> = words.iter().map(OsStr::new).chain(rest).collect();
            seconds(tool, &words)
        };
        cache::prepare(&image, false)?;
        Ok([time(create)?, time(delete)?])
    };
    let (path, name) = (image.path.as_os_str(), OsStr::new("bench"));
    let measure = |_: &mut Bench, tool| match tool {
        Tool::Ours => turn(ours.as_os_str(), &create, &delete, [path, name]),
        Tool::Qemu => turn(
            OsStr::new("qemu-img"),
            &["snapshot", "-c"],
            &["snapshot", "-d"],
            [name, path],
        )
        .map_err(|error| peer::failed("qemu-img", &error)),
    };
    let entries = in_turns(bench, &[Tool::Ours, Tool::Qemu], measure, |turns| match turns {
        [ours, qemu] => {
            let lower = |what, of| row.compare(what, "s", Better::Lower, ours, ("qemu-img", qemu), of);
            vec![
                lower("create", |[create, _]| *create),
                lower("delete", |[_, delete]| *delete),
            ]
        }
        _ => Vec::new(),
    })?;
    images::check(&image)?;
    Ok(entries)
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
    let mut is_compared = false;
    let mut compacted = |image: &Image| -> io::Result<Compacted> {
        space::remove(&image.path)?;
        let mut copy = Command::new("cp");
        copy.arg("--sparse=always").arg(&template.path).arg(&image.path);
        process::output(copy, LIMIT)?;
        File::open(&image.path)?.sync_all()?;
        cache::prepare(image, false)?;
        let (seconds, extra_mib) = compact(&ringdisk, image)?;
        if !is_compared {
            compare(&template, image)?;
            is_compared = true;
        }
        Ok(Compacted { seconds, extra_mib })
    };
    let measure = |_: &mut Bench, tool| match tool {
        Tool::Ours => compacted(&image),
        Tool::Qemu => {
            cache::prepare(&template, false)?;
            let time = convert(&template.path, &converted);
            space::remove(&converted)?;
            Ok(Compacted {
                seconds: time?,
                extra_mib: 0.0,
            })
        }
    };
    let entries = in_turns(bench, &[Tool::Ours, Tool::Qemu], measure, |turns| match turns {
        [ours, qemu] => {
            let most = ours
                .samples
                .iter()
                .fold(0.1, |most, turn| turn.extra_mib.max(most));
            let (lower, peer) = (Better::Lower, ("qemu-img convert", qemu));
            vec![
                row.compare("time", "s", lower, ours, peer, |turn| turn.seconds),
                row.entry("extra-space", "MiB", lower, most, ("bound", EXTRA_MIB)),
            ]
        }
        _ => Vec::new(),
    })?;
    space::remove(&image.path)?;
    bench.images.forget(Source::HalfFree)?;
    Ok(entries)
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
