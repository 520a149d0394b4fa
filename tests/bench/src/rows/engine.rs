//! In-process, one thread, no guest: our engine beside `imago`, `qcow2-rs`, our own raw disk, and fio.

use std::io;

use super::{Bench, Row, Turns, in_turns, workload};
use crate::engines::{self, Engine};
use crate::images::{self, Source};
use crate::report::{Better, Entry};
use crate::workload::{Pattern, Sample, Workload};
use crate::{cache, fio, peer};

/// One row: a workload, and who runs it besides ours.
#[derive(Clone, Copy, Debug)]
struct Plan {
    source: Source,
    direct: bool,
    workload: Workload,
}

const K4: u32 = 4 << 10;
const K128: u32 = 128 << 10;
/// The share of our raw disk's rate that QCOW2 must keep.
const RAW: f64 = 0.95;

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    use Pattern::{OncePerCluster, RandomRead, RandomWrite, SequentialRead, WriteFlush};
    use Source::{Data, Deflate, Fresh, Overlay, Scratch, Zstd};
    const BETTER: &str = "better-of-both";
    let raw = ("raw", RAW);
    let limit = [raw, ("limit", 0.97), ("cpu", 1.0)];
    let imago = ("imago", 1.0);
    // Name, image, past the page cache?, pattern, bytes, depth, what must reach which ratio.
    #[rustfmt::skip]
    let rows: [(_, _, _, _, _, _, &[(_, f64)]); 11] = [
        ("engine/cached/read-4k-d64", Data, false, RandomRead, K4, 64, &[(BETTER, 1.1), raw]),
        ("engine/cached/read-128k-sequential-d16", Data, false, SequentialRead, K128, 16, &[raw]),
        ("engine/cached/read-4k-backing-d64", Overlay, false, RandomRead, K4, 64, &[(BETTER, 1.1)]),
        ("engine/cached/read-4k-zstd-d16", Zstd, false, RandomRead, K4, 16, &[]),
        ("engine/cached/read-4k-zlib-d16", Deflate, false, RandomRead, K4, 16, &[]),
        ("engine/cached/allocate-4k-d64", Fresh, false, OncePerCluster, K4, 64, &[imago]),
        ("engine/disk/read-4k-d64", Data, true, RandomRead, K4, 64, &limit),
        ("engine/disk/write-4k-d64", Scratch, true, RandomWrite, K4, 64, &limit),
        ("engine/disk/write-flush-4k-d1", Scratch, true, WriteFlush, K4, 1, &[raw]),
        ("engine/disk/allocate-4k-d64", Fresh, true, OncePerCluster, K4, 64, &[imago, ("qemu", 8.0)]),
        ("engine/disk/copy-on-write-4k-d64", Overlay, true, OncePerCluster, K4, 64, &[(BETTER, 2.0)]),
    ];
    rows.into_iter()
        .map(|(name, source, direct, pattern, block, depth, promises)| {
            let plan = Plan {
                source,
                direct,
                workload: workload(source, pattern, block, depth),
            };
            let run = Box::new(move |row: &Row, bench: &mut Bench| run(row, bench, &plan));
            Row {
                name,
                promises: promises
                    .iter()
                    .map(|&(what, ratio)| (what, ratio.into()))
                    .collect(),
                run,
            }
        })
        .collect()
}

/// A side that can be measured in a row.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Side {
    Ours,
    Raw,
    Fio,
    Peer(Engine),
}

impl Plan {
    fn sides(&self) -> Vec<Side> {
        let mut sides = vec![Side::Ours, Side::Peer(Engine::Imago), Side::Peer(Engine::Qcow2Rs)];
        if self.source == Source::Zstd {
            // Neither of the two reads zstd.
            sides.truncate(1);
        }
        match self.source {
            // Where every cluster is allocated, our raw disk and fio do the same.
            Source::Data | Source::Scratch => sides.extend([Side::Raw, Side::Fio]),
            Source::Fresh => sides.push(Side::Peer(Engine::QemuImg)),
            _ => {}
        }
        if self.source == Source::Fresh && self.direct {
            sides.push(Side::Fio);
        }
        sides
    }

    fn measure(&self, bench: &mut Bench, side: Side) -> io::Result<Sample> {
        let writes = self.workload.pattern.writes();
        let source = match side {
            Side::Fio if self.source == Source::Fresh => Source::RawFresh,
            Side::Raw | Side::Fio if writes => Source::RawScratch,
            Side::Raw | Side::Fio => Source::Raw,
            Side::Ours | Side::Peer(_) => self.source,
        };
        let image = bench.images.image(source)?;
        cache::prepare(&image, !self.direct)?;
        let engine = match side {
            Side::Fio => {
                return fio::run(&image.path, self.direct, &self.workload, bench.timing)
                    .map_err(|error| peer::failed("fio", &error));
            }
            Side::Ours | Side::Raw => Engine::Ringdisk,
            Side::Peer(engine) => engine,
        };
        let measured = engines::measure(engine, &image, self.direct, &self.workload, bench.timing);
        if !matches!(side, Side::Peer(_)) {
            let sample = measured?;
            if writes {
                images::check(&image)?;
            }
            return Ok(sample);
        }
        if measured.is_err() && writes {
            bench.images.forget(source)?;
        }
        measured.map_err(|error| peer::failed(engine.name(), &error))
    }
}

fn run(row: &Row, bench: &mut Bench, plan: &Plan) -> io::Result<Vec<Entry>> {
    let sides = plan.sides();
    let measure = |bench: &mut Bench, side| plan.measure(bench, side);
    in_turns(bench, &sides, measure, |turns| {
        let found: Vec<_> = sides.iter().copied().zip(turns).collect();
        entries(row, &found)
    })
}

fn entries(row: &Row, found: &[(Side, &Turns)]) -> Vec<Entry> {
    use Better::{Higher, Lower};
    let of = |wanted: Side| {
        let mut found = found.iter();
        found.find(|(side, _)| *side == wanted).map(|(_, turns)| *turns)
    };
    let Some(ours) = of(Side::Ours) else {
        return Vec::new();
    };
    let iops = |what: &str, name: &str, peer: &Turns| {
        row.compare(what, "IOPS", Higher, ours, (name, peer), Sample::iops)
    };
    let cpu = |what: &str, name: &str, peer: &Turns| {
        row.compare(
            what,
            "CPU s/M",
            Lower,
            ours,
            (name, peer),
            Sample::cpu_per_million,
        )
    };
    let mut entries = Vec::new();
    let (imago, qcow2_rs) = (of(Side::Peer(Engine::Imago)), of(Side::Peer(Engine::Qcow2Rs)));
    match (imago, qcow2_rs) {
        (Some(imago), Some(qcow2_rs)) => {
            let names = (Engine::Imago.name(), Engine::Qcow2Rs.name());
            let (one, other) = (imago.median(Sample::iops), qcow2_rs.median(Sample::iops));
            // Where one has failed, the better of both is not known: the entry names the failure.
            let better = if imago.failure.is_some() || (qcow2_rs.failure.is_none() && one >= other) {
                (names.0, imago)
            } else {
                (names.1, qcow2_rs)
            };
            entries.push(iops("better-of-both", better.0, better.1));
            entries.push(iops("imago", names.0, imago));
            entries.push(iops("qcow2-rs", names.1, qcow2_rs));
            entries.push(cpu("cpu", names.1, qcow2_rs));
        }
        _ => {
            entries.push(row.alone("iops", "IOPS", Higher, ours.median(Sample::iops)));
        }
    }
    if let Some(qemu) = of(Side::Peer(Engine::QemuImg)) {
        entries.push(iops("qemu", Engine::QemuImg.name(), qemu));
    }
    if let Some(raw) = of(Side::Raw) {
        entries.push(iops("raw", "our raw disk", raw));
        entries.push(cpu("raw-cpu", "our raw disk", raw));
    }
    if let Some(fio) = of(Side::Fio) {
        entries.push(iops("limit", "fio raw", fio));
    }
    entries
}
