//! The memory of a server of a one-tebibyte image: when a client has just come, and after random reads all over the
//! disk have been through every L2 table.

use std::io;
use std::time::Duration;

use super::{Bench, Row, before, explained, workload};
use crate::client::Connection;
use crate::client::drive::{self, Timing, Wait};
use crate::images::Source;
use crate::peer as peers;
use crate::report::{Better, Entry};
use crate::server::{Program, Serve, Server};
use crate::workload::Pattern;

/// The memory that a server with one client may hold, in MiB.
const IDLE_MIB: f64 = 6.0;
/// The memory that a server may hold besides its table cache after reads everywhere, in MiB.
const BESIDE_CACHE_MIB: f64 = 12.0;
/// The table cache that both are given, in MiB; the tables of the image are four times that.
const CACHE_MIB: u32 = 32;

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    vec![Row {
        name: "vhost/memory-1tib",
        promises: vec![("idle", 1.0.into()), ("after-reads", 1.0.into())],
        run: Box::new(run),
    }]
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let (ours, peer) = (bench.ours.clone(), bench.peer.clone());
    let (our_idle, our_busy) = resident(bench, &ours)?;
    let full = BESIDE_CACHE_MIB + f64::from(CACHE_MIB);
    let bound = |what, ours, bound| row.entry(what, "MiB", Better::Lower, ours, ("bound", bound));
    let mut entries = vec![
        bound("idle", our_idle, IDLE_MIB),
        bound("after-reads", our_busy, full),
    ];
    let measured = match resident(bench, &peer) {
        Ok(measured) => Ok(measured),
        Err(error) => Err(peers::failure(peers::failed(peer.name(), &error))?),
    };
    bench.peers_failed.extend(measured.as_ref().err().cloned());
    let beside = [("idle-beside", our_idle), ("after-reads-beside", our_busy)];
    match measured {
        Ok((idle, busy)) => entries.extend(beside.into_iter().zip([idle, busy]).map(
            |((what, ours), theirs)| row.entry(what, "MiB", Better::Lower, ours, (peer.name(), theirs)),
        )),
        Err(reason) => {
            entries.extend(
                beside.map(|(what, ours)| row.not_measured(what, "MiB", &[ours], peer.name(), &reason)),
            );
        }
    }
    Ok(entries)
}

/// The same, beside an older build.
#[must_use]
pub(super) fn beside_older() -> Row {
    Row {
        name: "before/vhost/memory-1tib",
        promises: vec![
            ("idle", before::KEPT.into()),
            ("after-reads", before::KEPT.into()),
        ],
        run: Box::new(|row, bench| {
            let (ours, older) = (bench.ours.clone(), before::server(&before::older(bench)?));
            let (ours, older) = (resident(bench, &ours)?, resident(bench, &older)?);
            let entry =
                |what, ours, older| row.entry(what, "MiB", Better::Lower, ours, (before::OLDER, older));
            Ok(vec![
                entry("idle", ours.0, older.0),
                entry("after-reads", ours.1, older.1),
            ])
        }),
    }
}

/// Resident memory idle and after reads, in MiB.
fn resident(bench: &mut Bench, program: &Program) -> io::Result<(f64, f64)> {
    let image = bench.images.image(Source::Huge)?;
    let serve = Serve {
        image: &image,
        direct: false,
        queues: 1,
        l2_cache_kib: Some(CACHE_MIB << 10),
        control: false,
    };
    let server = Server::start(program, &serve, bench.images.directory())?;
    let measured = (|| {
        let connection = Connection::open(server.socket(), 1, 4 << 10)?;
        std::thread::sleep(Duration::from_millis(300));
        let idle = server.resident_mib()?;
        let reads = workload(Source::Huge, Pattern::RandomRead, 4 << 10, 64);
        // Enough reads to meet each of the 2,048 tables' slices.
        let timing = Timing {
            measure: bench.timing.measure.max(Duration::from_secs(2)),
            ..bench.timing
        };
        drive::run(connection, &reads, Wait::Poll, timing, &|| server.cpu_seconds())?;
        Ok((idle, server.resident_mib()?))
    })();
    let measured =
        measured.map_err(|error: io::Error| explained(program.name(), &error, &server.last_words()))?;
    server.stop()?;
    Ok(measured)
}
