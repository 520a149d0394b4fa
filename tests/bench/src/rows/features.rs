//! What features of the format cost and gain: subclusters, data files, encryption, snapshots.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::{Bench, Row, Served, in_turns, measure_served, measure_served_peer, workload};
use crate::client::drive::Wait;
use crate::engines::{self, Engine};
use crate::images::{self, Source};
use crate::report::{Better, Entry};
use crate::server::Program;
use crate::target::Target;
use crate::workload::{Pattern, Sample};
use crate::{cache, peer, process};

const K4: u32 = 4 << 10;
const K128: u32 = 128 << 10;
/// The bytes that one worker is to read from an encrypted image in the page cache in a second, in GB.
const LUKS_GB: f64 = 1.5;
/// The longest time of one operation on snapshots.
const SNAPSHOT_LIMIT: Duration = Duration::from_secs(300);

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    use Pattern::{RandomRead, RandomWrite};
    use Source::{Data, DataExtended, DataFile, Raw, RawScratch, Scratch, ScratchDataFile, ScratchExtended};
    let subclusters = Row {
        name: "vhost/disk/subclusters-4k-d64",
        promises: promises(&[("whole-clusters", 4.0), ("qemu", 1.5)]),
        run: Box::new(run_subclusters),
    };
    let luks = Row {
        name: "vhost/cached/luks-read-128k-d16",
        promises: promises(&[("bytes-per-cpu", 1.5), ("bytes", 1.0)]),
        run: Box::new(run_luks),
    };
    let snapshots = Row {
        name: "tools/snapshots-1tib",
        promises: promises(&[("create", 3.0), ("delete", 3.0)]),
        run: Box::new(run_snapshots),
    };
    // Name, image, the image beside it, past the page cache?, pattern, the figure's name, its target, the other image's name.
    let extended = ("plain-entries", 0.97, "without extended L2");
    let data_file = ("raw", 0.95, "our raw disk");
    #[rustfmt::skip]
    let beside = [
        ("engine/cached/read-4k-extended-d64", DataExtended, Data, false, RandomRead, extended),
        ("engine/cached/write-4k-extended-d64", ScratchExtended, Scratch, false, RandomWrite, extended),
        ("engine/disk/write-4k-extended-d64", ScratchExtended, Scratch, true, RandomWrite, extended),
        ("engine/cached/read-4k-data-file-d64", DataFile, Raw, false, RandomRead, data_file),
        ("engine/disk/read-4k-data-file-d64", DataFile, Raw, true, RandomRead, data_file),
        ("engine/disk/write-4k-data-file-d64", ScratchDataFile, RawScratch, true, RandomWrite, data_file),
    ];
    let beside = beside.map(
        |(name, source, other, direct, pattern, (figure, ratio, other_name))| Row {
            name,
            promises: promises(&[(figure, ratio)]),
            run: Box::new(move |row, bench| {
                let sides = [source, other];
                run_beside(row, bench, sides, direct, pattern, (figure, other_name))
            }),
        },
    );
    [subclusters]
        .into_iter()
        .chain(beside)
        .chain([luks, snapshots])
        .collect()
}

fn promises(ratios: &[(&'static str, f64)]) -> Vec<(&'static str, Target)> {
    ratios.iter().map(|&(what, ratio)| (what, ratio.into())).collect()
}

/// Our engine in-process, one thread, on two images in turns.
fn run_beside(
    row: &Row,
    bench: &mut Bench,
    sides: [Source; 2],
    direct: bool,
    pattern: Pattern,
    (figure, other): (&str, &str),
) -> io::Result<Vec<Entry>> {
    let measure = |bench: &mut Bench, source: Source| {
        let image = bench.images.image(source)?;
        cache::prepare(&image, !direct)?;
        let workload = workload(source, pattern, K4, 64);
        let sample = engines::measure(Engine::Ringdisk, &image, direct, &workload, bench.timing)?;
        if pattern.writes() {
            images::check(&image)?;
        }
        Ok(sample)
    };
    in_turns(bench, &sides, measure, |turns| match turns {
        [ours, plain] => {
            let (plain, cpu) = ((other, plain), Sample::cpu_per_million);
            vec![
                row.compare(figure, "IOPS", Better::Higher, ours, plain, Sample::iops),
                row.compare("cpu", "CPU s/M", Better::Lower, ours, plain, cpu),
            ]
        }
        _ => Vec::new(),
    })
}

/// A 4 KiB write to each cluster of a full image's overlay, in scattered order: with subclusters nothing is copied.
fn run_subclusters(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let (ours, qemu) = (bench.ours.clone(), bench.peer.clone());
    let served = |source| Served {
        source,
        direct: true,
        queues: 1,
        workload: workload(source, Pattern::OncePerCluster, K4, 64),
        wait: Wait::Poll,
        cache_kib: None,
    };
    let sides = [
        (Source::OverlayExtended, false),
        (Source::Overlay, false),
        (Source::OverlayExtended, true),
    ];
    let measure = |bench: &mut Bench, (source, is_peer)| match is_peer {
        true => measure_served_peer(bench, &qemu, &served(source)),
        false => measure_served(bench, &ours, &served(source)),
    };
    in_turns(bench, &sides, measure, |turns| match turns {
        [ours, whole, peer] => {
            let higher = |what, other| row.compare(what, "IOPS", Better::Higher, ours, other, Sample::iops);
            vec![
                higher("whole-clusters", ("64 KiB clusters", whole)),
                higher("qemu", (qemu.name(), peer)),
            ]
        }
        _ => Vec::new(),
    })
}

/// Reads of an encrypted image in the page cache by one worker.
fn run_luks(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let (ours, qemu) = (bench.ours.clone(), bench.peer.clone());
    let served = Served {
        source: Source::Luks,
        direct: false,
        queues: 1,
        workload: workload(Source::Luks, Pattern::SequentialRead, K128, 16),
        wait: Wait::Sleep,
        cache_kib: None,
    };
    let measure = |bench: &mut Bench, is_peer| match is_peer {
        true => measure_served_peer(bench, &qemu, &served),
        false => measure_served(bench, &ours, &served),
    };
    let per_cpu = |sample: &Sample| sample.ops as f64 * f64::from(K128) / 1e9 / sample.cpu_seconds.max(1e-9);
    let rate = |sample: &Sample| sample.gb_per_second(K128);
    in_turns(bench, &[false, true], measure, |turns| match turns {
        [ours, peer] => {
            let (name, higher) = (qemu.name(), Better::Higher);
            vec![
                row.compare("bytes-per-cpu", "GB/CPU s", higher, ours, (name, peer), per_cpu),
                row.entry("bytes", "GB/s", higher, ours.median(rate), ("bound", LUKS_GB)),
                row.compare("bytes-beside", "GB/s", higher, ours, (name, peer), rate),
            ]
        }
        _ => Vec::new(),
    })
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
    process::output(command, SNAPSHOT_LIMIT)?;
    Ok(start.elapsed().as_secs_f64())
}
