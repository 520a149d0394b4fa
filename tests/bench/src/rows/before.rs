//! This build beside an older one of the same: what a change costs. Only with `--before`.
//!
//! The older build's own programs run its side, so that each is measured by the code that it shipped with.

use std::io;
use std::path::{Path, PathBuf};

use super::{Bench, Row, Served, in_turns, measure_served, memory, workload};
use crate::cache;
use crate::client::drive::Wait;
use crate::engines::{self, Engine};
use crate::images::{self, Source};
use crate::report::{Better, Entry};
use crate::server::Program;
use crate::workload::{Pattern, Sample, Workload};

/// The ratio to the older build that a change must keep.
pub(super) const KEPT: f64 = 0.97;
/// The name of the older build.
pub(super) const OLDER: &str = "the older build";
const K4: u32 = 4 << 10;
/// A budget of the L2 table cache that holds a quarter of the image's tables: three reads of four load a slice.
const CACHE_KIB: u32 = 64;

/// The way a row runs.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// In a process, without a guest.
    Engine { direct: bool },
    /// Over vhost-user, with the L2 table cache of so many KiB.
    Served { direct: bool, cache_kib: Option<u32> },
}

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    use Pattern::{OncePerCluster, RandomRead, RandomWrite, WriteFlush};
    use Source::{Data, Fresh, Overlay, Scratch};
    let engine = |direct| Way::Engine { direct };
    let served = |direct, cache_kib| Way::Served { direct, cache_kib };
    #[rustfmt::skip]
    let rows = [
        ("before/engine/cached/read-4k-d64", Data, engine(false), RandomRead, 64),
        ("before/engine/cached/write-4k-d64", Scratch, engine(false), RandomWrite, 64),
        ("before/engine/cached/allocate-4k-d64", Fresh, engine(false), OncePerCluster, 64),
        ("before/engine/disk/read-4k-d64", Data, engine(true), RandomRead, 64),
        ("before/engine/disk/write-4k-d64", Scratch, engine(true), RandomWrite, 64),
        ("before/engine/disk/write-flush-4k-d1", Scratch, engine(true), WriteFlush, 1),
        ("before/engine/disk/copy-on-write-4k-d64", Overlay, engine(true), OncePerCluster, 64),
        ("before/vhost/cached/read-4k-d64", Data, served(false, None), RandomRead, 64),
        ("before/vhost/cached/write-4k-d64", Scratch, served(false, None), RandomWrite, 64),
        ("before/vhost/cached/allocate-4k-d64", Fresh, served(false, None), OncePerCluster, 64),
        ("before/vhost/disk/write-flush-4k-d1", Scratch, served(true, None), WriteFlush, 1),
        ("before/vhost/cached/load-slices-4k-d64", Data, served(false, Some(CACHE_KIB)), RandomRead, 64),
    ];
    let rows = rows.into_iter().map(|(name, source, way, pattern, depth)| {
        let workload = workload(source, pattern, K4, depth);
        Row {
            name,
            promises: vec![("iops", KEPT.into()), ("cpu", KEPT.into())],
            run: Box::new(move |row, bench| run(row, bench, source, way, &workload)),
        }
    });
    rows.chain([memory::beside_older()]).collect()
}

/// The directory of the older build.
pub(super) fn older(bench: &Bench) -> io::Result<PathBuf> {
    let none = || io::Error::other("name the directory of the older build with --before");
    bench.before.clone().ok_or_else(none)
}

/// The older build's server.
pub(super) fn server(older: &Path) -> Program {
    Program::Ringdisk(older.join("ringdisk"))
}

fn run(
    row: &Row,
    bench: &mut Bench,
    source: Source,
    way: Way,
    workload: &Workload,
) -> io::Result<Vec<Entry>> {
    let older = older(bench)?;
    let here = std::env::current_exe()?;
    let sides = [
        (here, bench.ours.clone()),
        (older.join("ringdisk-bench"), server(&older)),
    ];
    let measure = |bench: &mut Bench, side: usize| {
        let (engines, server) = &sides[side];
        match way {
            Way::Engine { direct } => run_engine(bench, engines, source, direct, workload),
            Way::Served { direct, cache_kib } => {
                let served = Served {
                    source,
                    direct,
                    queues: 1,
                    workload: *workload,
                    wait: Wait::Poll,
                    cache_kib,
                };
                measure_served(bench, server, &served)
            }
        }
    };
    in_turns(bench, &[0, 1], measure, |turns| match turns {
        [ours, older] => {
            let older = (OLDER, older);
            vec![
                row.compare("iops", "IOPS", Better::Higher, ours, older, Sample::iops),
                row.compare(
                    "cpu",
                    "CPU s/M",
                    Better::Lower,
                    ours,
                    older,
                    Sample::cpu_per_million,
                ),
            ]
        }
        _ => Vec::new(),
    })
}

fn run_engine(
    bench: &mut Bench,
    program: &Path,
    source: Source,
    direct: bool,
    workload: &Workload,
) -> io::Result<Sample> {
    let image = bench.images.image(source)?;
    cache::prepare(&image, !direct)?;
    let sample = engines::measure_with(program, Engine::Ringdisk, &image, direct, workload, bench.timing)?;
    if workload.pattern.writes() {
        images::check(&image)?;
    }
    Ok(sample)
}
