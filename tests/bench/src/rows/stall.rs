//! The longest time that a request of a served disk waits while a snapshot is created, and while one is deleted.

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
/// Requests to the server's control socket.
const CREATE: &str = "snapshot-create";
const DELETE: &str = "snapshot-delete";
/// Nothing that changes a disk, which has a snapshot: its clusters are copied when they are written.
const NOTHING: &str = "snapshot-list";
/// The longest time of one operation on snapshots.
const LIMIT: Duration = Duration::from_secs(60);

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    vec![Row {
        name: "vhost/disk/snapshot-stall-1tib",
        promises: promises(&[("longest", 1.0), ("longest-delete", 1.0)]),
        run: Box::new(run),
    }]
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ringdisk) = bench.ours.clone() else {
        return Err(io::Error::other("only our own server is measured"));
    };
    let bound = STALL_MS * HUGE_BYTES as f64 / f64::from(100) / f64::from(1 << 30);
    let measure = |bench: &mut Bench, meanwhile| measure(bench, &ringdisk, meanwhile);
    let longest = |sample: &Sample| sample.longest_us / 1000.0;
    let operations = [Some(CREATE), Some(DELETE), Some(NOTHING), None];
    let entries = in_turns(bench, &operations, measure, |turns| match turns {
        [create, delete, copying, without] => {
            let (without, copying) = (without.median(longest), copying.median(longest));
            // The clusters that the guest writes are the snapshot's until it is gone, and to copy them has its own stalls.
            let more = ("bound, more than copying", bound + copying);
            let bound = ("bound", bound);
            vec![
                row.entry("longest", "ms", Better::Lower, create.median(longest), bound),
                row.entry(
                    "longest-delete",
                    "ms",
                    Better::Lower,
                    delete.median(longest),
                    more,
                ),
                row.alone("longest-copying", "ms", Better::Lower, copying),
                row.alone("longest-without", "ms", Better::Lower, without),
            ]
        }
        _ => Vec::new(),
    })?;
    images::check(&bench.images.image(Source::Mapped)?)?;
    Ok(entries)
}

/// Writes to a served disk whose clusters are all mapped, with a request to its control socket meanwhile. The image has no snapshot
/// before nor after.
fn measure(bench: &mut Bench, ringdisk: &Path, meanwhile: Option<&'static str>) -> io::Result<Sample> {
    let image = bench.images.image(Source::Mapped)?;
    if [Some(DELETE), Some(NOTHING)].contains(&meanwhile) {
        on_image(ringdisk, "create", &image)?;
    }
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
        let operator = meanwhile.map(|request| {
            scope.spawn(move || {
                std::thread::sleep(timing.warm_up + timing.measure / 3);
                ask(ringdisk, control, request, image)
            })
        });
        let cpu = || server.cpu_seconds();
        let sample = drive::run(connection, &workload, Wait::Sleep, timing, &cpu);
        let done = operator.map_or(Ok(Ok(())), |operator| operator.join());
        done.map_err(|_| io::Error::other("the thread that asks for the operation has panicked"))??;
        sample
    })?;
    server.stop()?;
    if [Some(CREATE), Some(NOTHING)].contains(&meanwhile) {
        on_image(ringdisk, "delete", &image)?;
    }
    Ok(sample)
}

/// Has an operation done on the snapshot of an image that nobody serves.
fn on_image(ringdisk: &Path, operation: &str, image: &Image) -> io::Result<()> {
    let mut command = Command::new(ringdisk);
    command
        .args(["image", "snapshot", operation])
        .arg(&image.path)
        .arg(NAME);
    process::output(command, LIMIT).map(drop)
}

/// Asks a server for an operation on the snapshot of its disk.
fn ask(ringdisk: &Path, control: &Path, request: &str, image: &Image) -> io::Result<()> {
    let mut command = Command::new(ringdisk);
    command.args(["ctl", "--socket"]).arg(control);
    command.arg(request).arg(&image.path);
    if request != NOTHING {
        command.arg(NAME);
    }
    process::output(command, LIMIT).map(drop)
}
