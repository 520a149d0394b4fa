//! Over vhost-user, one queue: ours beside `qemu-storage-daemon` on the same image, driven by the same
//! client; fio on a raw file of the same content as the limit.

use std::io;

use super::{Bench, Row, Served, in_turns, measure_served, workload};
use crate::client::drive::Wait;
use crate::images::Source;
use crate::report::{Better, Entry};
use crate::workload::{Pattern, Sample};
use crate::{cache, fio};

/// The use of fio beside a row, with the share of its IOPS that must be reached.
#[derive(Clone, Copy, Debug)]
enum Limit {
    None,
    Shown,
    Target(f64),
}

const K4: u32 = 4 << 10;
const K128: u32 = 128 << 10;

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    use Limit::{None as NoLimit, Shown, Target};
    use Pattern::{OncePerCluster, RandomRead, RandomWrite, SequentialRead, WriteFlush};
    use Source::{Data, Deflate, Fresh, Overlay, Scratch, Zstd};
    // Name, image, past the page cache?, pattern, bytes, depth, times the peer's IOPS, fio beside it.
    #[rustfmt::skip]
    let rows: [(_, _, _, _, _, _, _, _); 17] = [
        ("vhost/cached/read-4k-d64", Data, false, RandomRead, K4, 64, Some(3.0), Shown),
        ("vhost/cached/read-4k-d1", Data, false, RandomRead, K4, 1, Some(1.5), NoLimit),
        ("vhost/cached/read-128k-sequential-d16", Data, false, SequentialRead, K128, 16, Some(1.3), NoLimit),
        ("vhost/cached/read-4k-backing-d64", Overlay, false, RandomRead, K4, 64, Some(3.0), NoLimit),
        ("vhost/cached/read-4k-zstd-d16", Zstd, false, RandomRead, K4, 16, Some(2.0), NoLimit),
        ("vhost/cached/read-4k-zlib-d16", Deflate, false, RandomRead, K4, 16, Some(2.0), NoLimit),
        ("vhost/cached/write-4k-d64", Scratch, false, RandomWrite, K4, 64, None, NoLimit),
        ("vhost/cached/write-4k-d1", Scratch, false, RandomWrite, K4, 1, None, NoLimit),
        ("vhost/cached/allocate-4k-d64", Fresh, false, OncePerCluster, K4, 64, None, NoLimit),
        ("vhost/disk/read-4k-d64", Data, true, RandomRead, K4, 64, Some(1.25), Target(0.95)),
        ("vhost/disk/read-4k-d1", Data, true, RandomRead, K4, 1, None, NoLimit),
        ("vhost/disk/read-128k-sequential-d16", Data, true, SequentialRead, K128, 16, None, NoLimit),
        ("vhost/disk/write-4k-d64", Scratch, true, RandomWrite, K4, 64, Some(1.25), Shown),
        ("vhost/disk/write-4k-d1", Scratch, true, RandomWrite, K4, 1, None, NoLimit),
        ("vhost/disk/write-flush-4k-d1", Scratch, true, WriteFlush, K4, 1, Some(1.3), Shown),
        ("vhost/disk/allocate-4k-d64", Fresh, true, OncePerCluster, K4, 64, Some(3.0), NoLimit),
        ("vhost/disk/copy-on-write-4k-d64", Overlay, true, OncePerCluster, K4, 64, None, NoLimit),
    ];
    rows.into_iter()
        .map(|(name, source, direct, pattern, block, depth, target, limit)| {
            // Whoever inflates with two threads needs the CPU that a polling client would take.
            let wait = if matches!(source, Zstd | Deflate) {
                Wait::Sleep
            } else {
                Wait::Poll
            };
            let workload = workload(source, pattern, block, depth);
            let served = Served {
                source,
                direct,
                queues: 1,
                workload,
                wait,
                cache_kib: None,
            };
            let mut promises: Vec<_> = target.map(|target| ("iops", target)).into_iter().collect();
            if let Target(share) = limit {
                promises.push(("limit", share));
            }
            let with_fio = !matches!(limit, NoLimit);
            Row {
                name,
                promises,
                run: Box::new(move |row, bench| run(row, bench, &served, with_fio)),
            }
        })
        .collect()
}

/// The side whose turn it is.
#[derive(Clone, Copy, Debug)]
enum Side {
    Ours,
    Peer,
    Fio,
}

fn run(row: &Row, bench: &mut Bench, served: &Served, with_fio: bool) -> io::Result<Vec<Entry>> {
    let (our_program, peer_program) = (bench.ours.clone(), bench.peer.clone());
    let mut sides = vec![Side::Ours, Side::Peer];
    sides.extend(with_fio.then_some(Side::Fio));
    let measure = |bench: &mut Bench, side| match side {
        Side::Ours => measure_served(bench, &our_program, served),
        Side::Peer => measure_served(bench, &peer_program, served),
        Side::Fio => {
            let writes = served.workload.pattern.writes();
            let source = if writes { Source::RawScratch } else { Source::Raw };
            let raw = bench.images.image(source)?;
            cache::prepare(&raw, !served.direct)?;
            fio::run(&raw.path, served.direct, &served.workload, bench.timing)
        }
    };
    in_turns(bench, &sides, measure, |samples| match samples {
        [ours, peer, limits @ ..] => {
            let mut entries = compare(row, ours, (peer_program.name(), peer));
            let fio = |limit: &Vec<Sample>| {
                let limit = ("fio raw", &limit[..]);
                row.compare("limit", "IOPS", Better::Higher, ours, limit, Sample::iops)
            };
            entries.extend(limits.first().map(fio));
            entries
        }
        _ => Vec::new(),
    })
}

/// The figures of two servers side by side.
fn compare(row: &Row, ours: &[Sample], peer: (&str, &[Sample])) -> Vec<Entry> {
    use Better::{Higher, Lower};
    vec![
        row.compare("iops", "IOPS", Higher, ours, peer, Sample::iops),
        row.compare("latency-mean", "µs", Lower, ours, peer, |sample| sample.mean_us),
        row.compare("latency-p99", "µs", Lower, ours, peer, |sample| sample.p99_us),
        row.compare(
            "server-cpu",
            "CPU s/M",
            Lower,
            ours,
            peer,
            Sample::cpu_per_million,
        ),
        row.compare("resident", "MiB", Lower, ours, peer, |sample| sample.resident_mib),
    ]
}
