//! The longest time that a request of a served disk waits while a snapshot is created.

use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::features::promises;
use super::{Bench, Row, in_turns};
use crate::client::Connection;
use crate::client::drive::{self, Wait};
use crate::images::{self, HUGE_BYTES, Image, Source};
use crate::report::{Better, Entry};
use crate::server::{Program, Serve, Server};
use crate::workload::{Pattern, Sample, Workload};
use crate::{cache, process};

/// The longest stall for each 100 GiB that are mapped, in milliseconds.
const STALL_MS: f64 = 20.0;
/// The bytes that are written again and again while all of the disk is mapped.
const WORKING_SET_BYTES: u64 = 64 << 20;
const NAME: &str = "stall";
/// The longest time of one operation on snapshots.
const LIMIT: Duration = Duration::from_secs(60);

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    vec![Row {
        name: "vhost/disk/snapshot-stall-1tib",
        promises: promises(&[("longest", 1.0)]),
        run: Box::new(run),
    }]
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ringdisk) = bench.ours.clone() else {
        return Err(io::Error::other("only our own server is measured"));
    };
    let bound = STALL_MS * HUGE_BYTES as f64 / f64::from(100) / f64::from(1 << 30);
    let measure = |bench: &mut Bench, with_snapshot| measure(bench, &ringdisk, with_snapshot);
    let longest = |sample: &Sample| sample.longest_us / 1000.0;
    let entries = in_turns(bench, &[true, false], measure, |turns| match turns {
        [with, without] => {
            let (bound, without) = (("bound", bound), without.median(longest));
            vec![
                row.entry("longest", "ms", Better::Lower, with.median(longest), bound),
                row.alone("longest-without", "ms", Better::Lower, without),
            ]
        }
        _ => Vec::new(),
    })?;
    images::check(&bench.images.image(Source::Mapped)?)?;
    Ok(entries)
}

/// Writes to a served disk whose clusters are all mapped, and has a snapshot created meanwhile, which is deleted after it.
fn measure(bench: &mut Bench, ringdisk: &Path, with_snapshot: bool) -> io::Result<Sample> {
    let image = bench.images.image(Source::Mapped)?;
    cache::prepare(&image, false)?;
    let serve = Serve {
        image: &image,
        direct: true,
        queues: 1,
        l2_cache_kib: None,
        control: true,
    };
    let workload = Workload {
        pattern: Pattern::RandomWrite,
        block_bytes: 4 << 10,
        depth: 16,
        disk_bytes: WORKING_SET_BYTES,
    };
    let server = Server::start(&bench.ours, &serve, bench.images.directory())?;
    let connection = Connection::open(server.socket(), 1, workload.block_bytes)?;
    let sample = std::thread::scope(|scope| {
        let (image, control, timing) = (&image, server.control(), bench.timing);
        let creator = with_snapshot.then(|| {
            scope.spawn(move || {
                std::thread::sleep(timing.warm_up + timing.measure / 3);
                create(ringdisk, control, image)
            })
        });
        let cpu = || server.cpu_seconds();
        let sample = drive::run(connection, &workload, Wait::Sleep, timing, &cpu);
        let created = creator.map_or(Ok(Ok(())), |creator| creator.join());
        created.map_err(|_| io::Error::other("the thread that creates the snapshot has panicked"))??;
        sample
    })?;
    server.stop()?;
    if with_snapshot {
        let mut delete = Command::new(ringdisk);
        delete
            .args(["image", "snapshot", "delete"])
            .arg(&image.path)
            .arg(NAME);
        process::output(delete, LIMIT)?;
    }
    Ok(sample)
}

fn create(ringdisk: &Path, control: &Path, image: &Image) -> io::Result<()> {
    let mut command = Command::new(ringdisk);
    command.args(["ctl", "--socket"]).arg(control);
    command.arg("snapshot-create").arg(&image.path).arg(NAME);
    process::output(command, LIMIT).map(drop)
}
