//! In-process, one thread, no guest: our engine beside `imago`, `qcow2-rs`, our own raw disk, and fio.

use std::io;

use super::{Bench, Figures, Row, medians, workload};
use crate::engines::{self, Engine};
use crate::images::{self, Source};
use crate::report::{Better, Entry};
use crate::workload::{Pattern, Sample, Workload};
use crate::{cache, fio};

/// One row: a workload, and what it must reach beside whom.
#[derive(Clone, Copy, Debug)]
struct Plan {
    source: Source,
    direct: bool,
    workload: Workload,
    /// Times the better of imago and qcow2-rs.
    better_of_both: Option<f64>,
    /// Times imago.
    imago: Option<f64>,
    /// Times `qemu-img bench`, which runs if this is set.
    qemu: Option<f64>,
    /// Times our own raw disk, which runs if this is set.
    raw: Option<f64>,
    /// Times fio on the raw file, and the CPU time per request of qcow2-rs; fio runs with our raw disk.
    limit: Option<(f64, f64)>,
}

const K4: u32 = 4 << 10;
const K128: u32 = 128 << 10;
/// What QCOW2 must keep of our raw disk's rate.
const RAW: Option<f64> = Some(0.92);

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    use Pattern::{OncePerCluster, RandomRead, RandomWrite, SequentialRead, WriteFlush};
    use Source::{Data, Deflate, Fresh, Overlay, Scratch, Zstd};
    let plan = |source, direct, pattern, block, depth| Plan {
        source,
        direct,
        workload: workload(source, pattern, block, depth),
        better_of_both: None,
        imago: None,
        qemu: None,
        raw: None,
        limit: None,
    };
    let better = |times, plan: Plan| Plan {
        better_of_both: Some(times),
        ..plan
    };
    let raw = |plan: Plan| Plan { raw: RAW, ..plan };
    let limit = |plan: Plan| Plan {
        limit: Some((0.97, 1.0)),
        ..plan
    };
    let allocating = |plan: Plan| Plan {
        imago: Some(1.0),
        qemu: Some(10.0),
        ..plan
    };
    #[rustfmt::skip]
    let rows = [
        ("engine/cached/read-4k-d64", raw(better(1.1, plan(Data, false, RandomRead, K4, 64)))),
        ("engine/cached/read-128k-sequential-d16", raw(plan(Data, false, SequentialRead, K128, 16))),
        ("engine/cached/read-4k-backing-d64", better(1.1, plan(Overlay, false, RandomRead, K4, 64))),
        ("engine/cached/read-4k-zstd-d16", plan(Zstd, false, RandomRead, K4, 16)),
        ("engine/cached/read-4k-zlib-d16", plan(Deflate, false, RandomRead, K4, 16)),
        ("engine/cached/allocate-4k-d64", allocating(plan(Fresh, false, OncePerCluster, K4, 64))),
        ("engine/disk/read-4k-d64", limit(raw(plan(Data, true, RandomRead, K4, 64)))),
        ("engine/disk/write-4k-d64", limit(raw(plan(Scratch, true, RandomWrite, K4, 64)))),
        ("engine/disk/write-flush-4k-d1", raw(plan(Scratch, true, WriteFlush, K4, 1))),
        ("engine/disk/allocate-4k-d64", allocating(plan(Fresh, true, OncePerCluster, K4, 64))),
        ("engine/disk/copy-on-write-4k-d64", better(2.0, plan(Overlay, true, OncePerCluster, K4, 64))),
    ];
    rows.into_iter()
        .map(|(name, plan)| Row {
            name,
            run: Box::new(move |row, bench| run(row, bench, &plan)),
        })
        .collect()
}

/// What can be measured in a row.
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
        if self.raw.is_some() {
            sides.extend([Side::Raw, Side::Fio]);
        }
        if self.qemu.is_some() {
            sides.push(Side::Peer(Engine::QemuImg));
        }
        sides
    }

    fn measure(&self, bench: &mut Bench, side: Side) -> io::Result<Sample> {
        let writes = self.workload.pattern.writes();
        let source = match side {
            Side::Raw | Side::Fio if writes => Source::RawScratch,
            Side::Raw | Side::Fio => Source::Raw,
            Side::Ours | Side::Peer(_) => self.source,
        };
        let image = bench.images.image(source)?;
        cache::prepare(&image, !self.direct)?;
        let engine = match side {
            Side::Fio => return fio::run(&image.path, self.direct, &self.workload, bench.timing),
            Side::Ours | Side::Raw => Engine::Ringdisk,
            Side::Peer(engine) => engine,
        };
        let sample = engines::measure(engine, &image, self.direct, &self.workload, bench.timing)?;
        if writes && side == Side::Ours {
            images::check(&image)?;
        }
        Ok(sample)
    }
}

fn run(row: &Row, bench: &mut Bench, plan: &Plan) -> io::Result<Vec<Entry>> {
    let sides = plan.sides();
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); sides.len()];
    for _ in 0..bench.pairs {
        for (side, samples) in sides.iter().zip(&mut samples) {
            samples.push(plan.measure(bench, *side)?);
        }
    }
    let found: Vec<(Side, Figures)> = sides
        .into_iter()
        .zip(samples.iter().map(|samples| medians(samples)))
        .collect();
    Ok(entries(row, plan, &found))
}

fn entries(row: &Row, plan: &Plan, found: &[(Side, Figures)]) -> Vec<Entry> {
    use Better::{Higher, Lower};
    let of = |wanted: Side| {
        found
            .iter()
            .find(|(side, _)| *side == wanted)
            .map(|(_, figures)| *figures)
    };
    let Some(ours) = of(Side::Ours) else {
        return Vec::new();
    };
    let mut entries = Vec::new();
    let mut iops = |what: &str, name: &str, peer: f64, target: Option<f64>| {
        entries.push(
            row.entry(what, "IOPS", Higher, ours.iops, (name, peer))
                .target(target),
        );
    };
    let (imago, qcow2_rs) = (of(Side::Peer(Engine::Imago)), of(Side::Peer(Engine::Qcow2Rs)));
    if let (Some(imago), Some(qcow2_rs)) = (imago, qcow2_rs) {
        if plan.better_of_both.is_some() {
            let (name, peer) = match imago.iops >= qcow2_rs.iops {
                true => (Engine::Imago.name(), imago.iops),
                false => (Engine::Qcow2Rs.name(), qcow2_rs.iops),
            };
            iops("better-of-both", name, peer, plan.better_of_both);
        }
        iops("imago", Engine::Imago.name(), imago.iops, plan.imago);
        iops("qcow2-rs", Engine::Qcow2Rs.name(), qcow2_rs.iops, None);
    }
    if let Some(qemu) = of(Side::Peer(Engine::QemuImg)) {
        iops("qemu", Engine::QemuImg.name(), qemu.iops, plan.qemu);
    }
    if let Some(raw) = of(Side::Raw) {
        iops("raw", "our raw disk", raw.iops, plan.raw);
    }
    if let Some(fio) = of(Side::Fio) {
        iops("limit", "fio raw", fio.iops, plan.limit.map(|(share, _)| share));
    }
    if imago.is_none() {
        // Nobody to compare with: the figure stands for itself.
        let alone = row.entry("alone", "IOPS", Higher, ours.iops, ("", 0.0));
        entries.push(Entry {
            peer: None,
            peer_name: None,
            ..alone
        });
    }
    if let Some(peer) = qcow2_rs {
        let target = plan.limit.map(|(_, cpu)| cpu);
        entries.push(
            row.entry("cpu", "CPU s/M", Lower, ours.cpu, ("qcow2-rs", peer.cpu))
                .target(target),
        );
    }
    entries
}
