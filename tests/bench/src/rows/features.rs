//! Costs and gains of features of the format: subclusters, data files, encryption.

use std::io;

use super::{Bench, Row, Served, in_turns, measure_served, measure_served_peer, workload};
use crate::cache;
use crate::client::drive::{Timing, Wait};
use crate::engines::{self, Engine};
use crate::images::{self, Image, Source};
use crate::report::{Better, Entry};
use crate::target::Target;
use crate::workload::{Pattern, Sample, Workload};

const K4: u32 = 4 << 10;
const K128: u32 = 128 << 10;
/// The bytes that one worker is to read from an encrypted image in the page cache in a second, in GB.
const LUKS_GB: f64 = 1.5;

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    use Pattern::{RandomRead, RandomWrite};
    use Source::{DataExtended, DataFile, Raw, RawScratch, ScratchDataFile, ScratchExtended};
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
    // Name, image, the image beside it, past the page cache?, pattern, the figure's name, its target, the other image's name.
    let extended = ("plain-entries", 0.97, "without extended L2");
    let data_file = ("raw", 0.95, "our raw disk");
    // Extended L2 is compared above one data file: writes in place cost what the file's extents cost.
    #[rustfmt::skip]
    let beside = [
        ("engine/cached/read-4k-extended-d64", DataExtended, DataFile, false, RandomRead, extended),
        ("engine/cached/write-4k-extended-d64", ScratchExtended, ScratchDataFile, false, RandomWrite, extended),
        ("engine/disk/write-4k-extended-d64", ScratchExtended, ScratchDataFile, true, RandomWrite, extended),
        ("engine/cached/read-4k-data-file-d64", DataFile, Raw, false, RandomRead, data_file),
        ("engine/disk/read-4k-data-file-d64", DataFile, Raw, true, RandomRead, data_file),
        ("engine/disk/write-4k-data-file-d64", ScratchDataFile, RawScratch, true, RandomWrite, data_file),
    ];
    let beside = beside.map(
        |(name, source, other, direct, pattern, (figure, ratio, other_name))| Row {
            name,
            promises: promises(&[(figure, ratio)]),
            run: Box::new(move |row, bench| {
                let beside = Beside {
                    sides: [source, other],
                    direct,
                    workload: workload(source, pattern, K4, 64),
                    timing: bench.timing,
                };
                beside.run(row, bench, (figure, other_name), |_, _| Ok(()))
            }),
        },
    );
    [subclusters].into_iter().chain(beside).chain([luks]).collect()
}

pub(super) fn promises(ratios: &[(&'static str, f64)]) -> Vec<(&'static str, Target)> {
    ratios.iter().map(|&(what, ratio)| (what, ratio.into())).collect()
}

/// Our engine in-process, one thread, on two images in turns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beside {
    /// The image that has the feature, and the other.
    pub(super) sides: [Source; 2],
    /// Past the page cache, or through it.
    pub(super) direct: bool,
    pub(super) workload: Workload,
    pub(super) timing: Timing,
}

impl Beside {
    /// Measures both, with `before` called before each measurement, and compares them as `figure` with the other by its name.
    pub(super) fn run(
        &self,
        row: &Row,
        bench: &mut Bench,
        (figure, other): (&str, &str),
        before: impl Fn(&Bench, (Source, &Image)) -> io::Result<()>,
    ) -> io::Result<Vec<Entry>> {
        let measure = |bench: &mut Bench, source: Source| {
            let image = bench.images.image(source)?;
            before(bench, (source, &image))?;
            cache::prepare(&image, !self.direct)?;
            let engine = Engine::Ringdisk;
            let sample = engines::measure(engine, &image, self.direct, &self.workload, self.timing)?;
            if self.workload.pattern.writes() {
                images::check(&image)?;
            }
            Ok(sample)
        };
        in_turns(bench, &self.sides, measure, |turns| match turns {
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
