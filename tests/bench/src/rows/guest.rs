//! Over vhost-user, one queue: ours beside `qemu-storage-daemon` on the same image, driven by the same
//! client; fio on a raw file of the same content as the limit.

use std::io;

use super::{Bench, Row, Served, Turns, in_turns, measure_served, measure_served_peer, workload};
use crate::client::drive::Wait;
use crate::images::Source;
use crate::report::{Better, Entry};
use crate::target::{Either, Target};
use crate::workload::{Pattern, Sample};
use crate::{cache, fio, peer};

const K4: u32 = 4 << 10;
const K128: u32 = 128 << 10;

/// The targets of a row.
#[derive(Clone, Copy, Debug)]
enum Goal {
    /// Nothing is promised.
    Shown,
    /// So many times the peer's rate.
    Rate(f64),
    /// So many times the peer's rate, with so much of its CPU time per request at most.
    RateAndCpu(f64, f64),
    /// The disk's limit or so much better than the peer; fio takes turns.
    Reach(Either),
}

/// The target of a row whose limit may be the disk.
const DISK: Goal = Goal::Reach(Either {
    of_limit: 0.97,
    of_peer: 1.25,
    cpu_max: Some(0.6),
    floor: 1.0,
});

/// The target of a row whose time is the disk's time to sync, with the same syncs by fio.
const SYNCED: Goal = Goal::Reach(Either {
    of_limit: 0.97,
    of_peer: 1.3,
    cpu_max: None,
    floor: 0.0,
});

impl Goal {
    fn promises(self) -> Vec<(&'static str, Target)> {
        match self {
            Self::Shown => Vec::new(),
            Self::Rate(rate) => vec![("iops", rate.into())],
            Self::RateAndCpu(rate, cpu) => vec![("iops", rate.into()), ("server-cpu", (1.0 / cpu).into())],
            Self::Reach(either) => vec![("reach", either.into())],
        }
    }
}

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    use Goal::{Rate, RateAndCpu, Shown};
    use Pattern::{OncePerCluster, RandomRead, RandomWrite, SequentialRead, SequentialWrite, WriteFlush};
    use Source::{Data, Deflate, Fresh, Overlay, Scratch, Zstd};
    // Name, image, past the page cache?, pattern, bytes, depth, target.
    #[rustfmt::skip]
    let rows: [(_, _, _, _, _, _, _); 20] = [
        ("vhost/cached/read-4k-d64", Data, false, RandomRead, K4, 64, RateAndCpu(3.0, 0.4)),
        ("vhost/cached/read-4k-d1", Data, false, RandomRead, K4, 1, Rate(1.5)),
        ("vhost/cached/read-128k-sequential-d16", Data, false, SequentialRead, K128, 16, Rate(1.3)),
        ("vhost/cached/read-4k-backing-d64", Overlay, false, RandomRead, K4, 64, Rate(3.0)),
        ("vhost/cached/read-4k-zstd-d16", Zstd, false, RandomRead, K4, 16, Rate(2.0)),
        ("vhost/cached/read-4k-zlib-d16", Deflate, false, RandomRead, K4, 16, Rate(2.0)),
        ("vhost/cached/write-4k-d64", Scratch, false, RandomWrite, K4, 64, RateAndCpu(1.2, 0.9)),
        ("vhost/cached/write-4k-d1", Scratch, false, RandomWrite, K4, 1, RateAndCpu(1.2, 0.9)),
        ("vhost/cached/allocate-4k-d64", Fresh, false, OncePerCluster, K4, 64, Shown),
        ("vhost/disk/read-4k-d64", Data, true, RandomRead, K4, 64, DISK),
        ("vhost/disk/read-4k-d1", Data, true, RandomRead, K4, 1, DISK),
        ("vhost/disk/read-128k-sequential-d16", Data, true, SequentialRead, K128, 16, DISK),
        ("vhost/disk/read-128k-sequential-d1", Data, true, SequentialRead, K128, 1, DISK),
        ("vhost/disk/write-4k-d64", Scratch, true, RandomWrite, K4, 64, DISK),
        ("vhost/disk/write-4k-d1", Scratch, true, RandomWrite, K4, 1, DISK),
        ("vhost/disk/write-128k-sequential-d16", Scratch, true, SequentialWrite, K128, 16, DISK),
        ("vhost/disk/write-128k-sequential-d1", Scratch, true, SequentialWrite, K128, 1, DISK),
        ("vhost/disk/write-flush-4k-d1", Scratch, true, WriteFlush, K4, 1, SYNCED),
        ("vhost/disk/allocate-4k-d64", Fresh, true, OncePerCluster, K4, 64, Rate(4.0)),
        ("vhost/disk/copy-on-write-4k-d64", Overlay, true, OncePerCluster, K4, 64, Shown),
    ];
    rows.into_iter()
        .map(|(name, source, direct, pattern, block, depth, goal)| {
            // Whoever inflates with two threads needs the CPU that a polling client would take.
            let wait = if matches!(source, Zstd | Deflate) {
                Wait::Sleep
            } else {
                Wait::Poll
            };
            let served = Served {
                source,
                direct,
                queues: 1,
                workload: workload(source, pattern, block, depth),
                wait,
                cache_kib: None,
            };
            let with_fio = matches!(goal, Goal::Reach(_)) || name == "vhost/cached/read-4k-d64";
            Row {
                name,
                promises: goal.promises(),
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
        Side::Peer => measure_served_peer(bench, &peer_program, served),
        Side::Fio => {
            let writes = served.workload.pattern.writes();
            let source = if writes { Source::RawScratch } else { Source::Raw };
            let raw = bench.images.image(source)?;
            cache::prepare(&raw, !served.direct)?;
            fio::run(&raw.path, served.direct, &served.workload, bench.timing)
                .map_err(|error| peer::failed("fio", &error))
        }
    };
    in_turns(bench, &sides, measure, |turns| match turns {
        [ours, peer, limits @ ..] => {
            let depth = served.workload.depth;
            let mut entries = compare(row, depth, ours, (peer_program.name(), peer));
            if let Some(limit) = limits.first() {
                let limit = ("fio raw", limit);
                let limit = row.compare("limit", "IOPS", Better::Higher, ours, limit, Sample::iops);
                let of = |what: &str| entries.iter().find(|entry| entry.row.ends_with(what));
                let reach = of("/iops").and_then(|iops| row.either("reach", &limit, iops, of("/server-cpu")));
                entries.splice(0..0, reach);
                entries.push(limit);
            }
            entries
        }
        _ => Vec::new(),
    })
}

/// The figures of two servers side by side. Percentiles far out are those of the server at depth 1 alone.
fn compare(row: &Row, depth: u16, ours: &Turns, peer: (&str, &Turns)) -> Vec<Entry> {
    use Better::{Higher, Lower};
    let latency = |what, figure| row.compare(what, "µs", Lower, ours, peer, figure);
    let mut entries = vec![
        row.compare("iops", "IOPS", Higher, ours, peer, Sample::iops),
        latency("latency-mean", |sample| sample.mean_us),
        latency("latency-p99", |sample| sample.p99_us),
    ];
    if depth == 1 {
        entries.push(latency("latency-p99.9", |sample| sample.p999_us));
    }
    let cpu = row.compare(
        "server-cpu",
        "CPU s/M",
        Lower,
        ours,
        peer,
        Sample::cpu_per_million,
    );
    let resident = row.compare("resident", "MiB", Lower, ours, peer, |sample| sample.resident_mib);
    entries.extend([cpu, resident]);
    entries
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::images::TEST_BYTES;
    use crate::server::Program;
    use crate::workload::Workload;

    /// Writes a program that stands for a peer.
    fn script(directory: &Path, text: &str) -> io::Result<PathBuf> {
        let path = directory.join("peer");
        fs::write(&path, format!("#!/bin/sh\n{text}\n"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// Measures a row of two figures on a small image beside the peer that `peer` makes in a directory.
    fn beside(peer: impl Fn(&Path) -> io::Result<PathBuf>) -> io::Result<(Vec<Entry>, Vec<String>)> {
        let scratch = lab::Scratch::new().map_err(io::Error::other)?;
        let file = scratch.file("images");
        fs::create_dir(&file)?;
        let mut bench = Bench::of_test(&file, Program::StorageDaemon(peer(&file)?))?;
        let served = Served {
            source: Source::Data,
            direct: false,
            queues: 1,
            workload: Workload {
                pattern: Pattern::RandomRead,
                block_bytes: K4,
                depth: 1,
                disk_bytes: TEST_BYTES,
            },
            wait: Wait::Sleep,
            cache_kib: None,
        };
        let promises = vec![("iops", 0.01.into()), ("server-cpu", 0.001.into())];
        let row = Row::new("test", promises, move |row, bench| {
            run(row, bench, &served, false)
        });
        let entries = row.measure(&mut bench)?;
        Ok((entries, bench.peers_failed))
    }

    fn named<'a>(entries: &'a [Entry], what: &str) -> &'a Entry {
        let mut entries = entries.iter();
        entries
            .find(|entry| entry.row == format!("test/{what}"))
            .expect(what)
    }

    #[test]
    fn peer_that_serves_is_measured_with_percentiles_at_depth_one() {
        let (entries, failed) = beside(|_| Ok("qemu-storage-daemon".into())).unwrap();
        assert_eq!(failed, [""; 0]);
        for what in ["iops", "latency-mean", "latency-p99", "latency-p99.9"] {
            let entry = named(&entries, what);
            assert!(entry.ratio.is_some_and(|ratio| ratio > 0.0), "{entry:?}");
        }
        assert_eq!(named(&entries, "iops").met, Some(true));
    }

    #[test]
    fn peer_that_is_missing_crashes_or_reads_wrong_bytes_is_named_and_not_measured() {
        let crashes = |at: &Path| script(at, "echo no such luck >&2; exit 3");
        let missing = |at: &Path| Ok(at.join("nowhere"));
        // The same server, on an image of zeros.
        let wrong = |at: &Path| {
            let zeros = at.join("zeros.qcow2");
            let made = std::process::Command::new("qemu-img")
                .args(["create", "-q", "-f", "qcow2"])
                .arg(&zeros)
                .arg(TEST_BYTES.to_string())
                .status()?;
            assert!(made.success());
            let replaced = format!("arg=${{arg%%filename=*}}filename={}", zeros.display());
            let each = format!("shift; case $arg in *filename=*) {replaced} ;; esac; set -- \"$@\" \"$arg\"");
            script(
                at,
                &format!("for arg; do {each}; done; exec qemu-storage-daemon \"$@\""),
            )
        };
        type Make = dyn Fn(&Path) -> io::Result<PathBuf>;
        let peers: [(&str, &Make); 3] = [
            ("no such luck", &crashes),
            ("cannot start", &missing),
            ("wrong bytes were read at offset", &wrong),
        ];
        for (reason, peer) in peers {
            let (entries, failed) = beside(peer).unwrap();
            assert_eq!(failed.len(), 1, "{failed:?}");
            assert!(failed[0].contains(reason), "{failed:?}");
            for what in ["iops", "server-cpu"] {
                let entry = named(&entries, what);
                assert_eq!(
                    (entry.met, entry.peer, entry.lacks_measurement()),
                    (None, None, true)
                );
                assert_eq!(entry.not_measured.as_ref(), Some(&failed[0]));
            }
            assert!(named(&entries, "iops").ours > 0.0, "our own figure stays");
        }
    }

    #[test]
    fn failure_of_our_own_side_fails_the_row() {
        let scratch = lab::Scratch::new().unwrap();
        let mut bench = Bench::of_test(scratch.file("").as_path(), Program::storage_daemon()).unwrap();
        bench.ours = Program::StorageDaemon("/nowhere/server".into());
        let rows = rows();
        let row = rows
            .iter()
            .find(|row| row.name == "vhost/cached/read-4k-d1")
            .unwrap();
        assert!(row.measure(&mut bench).is_err());
    }

    #[test]
    fn every_target_has_its_row() {
        let rows = rows();
        let of = |name: &str, what: &str| {
            let row = rows.iter().find(|row| row.name == name).expect(name);
            row.promised(what)
        };
        for (name, rate) in [
            ("cached/read-4k-d64", 3.0),
            ("cached/read-4k-backing-d64", 3.0),
            ("cached/read-128k-sequential-d16", 1.3),
            ("cached/write-4k-d1", 1.2),
            ("cached/write-4k-d64", 1.2),
            ("disk/allocate-4k-d64", 4.0),
        ] {
            assert_eq!(
                of(&format!("vhost/{name}"), "iops"),
                Some(Target::Ratio(rate)),
                "{name}"
            );
        }
        assert_eq!(
            of("vhost/cached/read-4k-d64", "server-cpu"),
            Some(Target::Ratio(2.5))
        );
        for direction in ["read", "write"] {
            for shape in ["4k-d1", "4k-d64", "128k-sequential-d1", "128k-sequential-d16"] {
                let promised = of(&format!("vhost/disk/{direction}-{shape}"), "reach");
                assert!(
                    matches!(promised, Some(Target::Either(Either { floor: 1.0, .. }))),
                    "{direction} {shape}"
                );
            }
        }
        assert!(matches!(
            of("vhost/disk/write-flush-4k-d1", "reach"),
            Some(Target::Either(Either {
                of_peer: 1.3,
                cpu_max: None,
                ..
            }))
        ));
    }
}
