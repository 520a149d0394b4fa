//! A guest that migrates to another QEMU on this machine while it reads and writes: the time it stands still with its disks served by
//! `ringdisk vhost-user` beside that with QEMU's own virtio-blk, on the same images.
//!
//! The guest prints a letter for each of its reads, and the longest time without one is measured, from outside. QEMU's own figure ends
//! before the destination has opened a disk. The guest is emulated, so absolute figures mean nothing.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::{Guest, Lab, RunningGuest, Scratch, Server, image};

use super::said::failed;
use super::{Bench, Row, in_turns};
use crate::report::{Better, Entry, median};
use crate::server::Program;

/// The times that a guest migrates in each turn, there and back.
const MIGRATIONS: usize = 20;
/// The size of the disk that is in use, in bytes.
const DATA_BYTES: u64 = 256 << 20;
/// The longest time of a turn.
const PATIENCE: Duration = Duration::from_secs(300);
/// The longest time for a boot.
const BOOT_MAX: Duration = Duration::from_secs(120);

/// The script of the guest.
const SCRIPT: &str = include_str!("../../../guest/bench/migration.sh");

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    vec![Row {
        name: "migration",
        promises: vec![("silence", 1.0.into())],
        run: Box::new(run),
    }]
}

/// The server of the guest's disks.
#[derive(Clone, Copy, Debug)]
enum Side {
    Ours,
    Qemu,
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    if !matches!(bench.ours, Program::Ringdisk(_)) {
        return Err(io::Error::other("this row has no other side than ringdisk's"));
    }
    let lab = Lab::prepare().map_err(failed)?;
    let measure = |_: &mut Bench, side| measure(&lab, side).map_err(failed);
    in_turns(bench, &[Side::Ours, Side::Qemu], measure, |turns| match turns {
        [ours, qemu] => {
            let lower = |what, of| row.compare(what, "ms", Better::Lower, ours, ("qemu", qemu), of);
            vec![
                lower("silence", |[silence, _]| *silence),
                lower("told-by-qemu", |[_, told]| *told),
            ]
        }
        _ => Vec::new(),
    })
}

/// The servers of one host, one for each disk, if QEMU itself is not.
struct Host(Option<[Server; 2]>);

impl Host {
    fn start(
        scratch: &Scratch,
        side: Side,
        name: &str,
        images: &[PathBuf; 2],
        arguments: &[&str],
    ) -> Result<Self, lab::Error> {
        let server = |disk: &str, image: &Path, options: &str| {
            let socket = scratch.file(&format!("{name}-{disk}.sock"));
            let disk = format!("path={}{options}", image.display());
            Server::ringdisk_with(arguments, &socket, &disk)
        };
        Ok(Self(match side {
            Side::Ours => Some([
                server("root", &images[0], ",backing_files=on,direct=on")?,
                server("data", &images[1], ",num_queues=2,direct=on")?,
            ]),
            Side::Qemu => None,
        }))
    }

    fn guest<'lab>(&self, lab: &'lab Lab, images: &[PathBuf; 2]) -> Guest<'lab> {
        let guest = Guest::new(lab).cpus(2).memory_mib(256).migrates();
        let guest = match &self.0 {
            Some([root, data]) => guest
                .disk("root", root.socket(), 1)
                .disk("data", data.socket(), 2),
            None => guest
                .image_disk("root", &images[0], 1)
                .image_disk("data", &images[1], 2),
        };
        guest.script(SCRIPT).patience(PATIENCE)
    }

    fn stop(self) -> Result<(), lab::Error> {
        self.0.into_iter().flatten().try_for_each(Server::stop)
    }
}

/// Has a guest migrate there and back. Returns the medians of the longest silence and of the time that QEMU tells, in milliseconds.
fn measure(lab: &Lab, side: Side) -> Result<[f64; 2], lab::Error> {
    let scratch = Scratch::new()?;
    let images = [scratch.file("root.qcow2"), scratch.file("data.qcow2")];
    image::overlay(&images[0], lab.base())?;
    image::create(&images[1], "qcow2", "cluster_size=64k", DATA_BYTES)?;
    let hosts = [
        Host::start(&scratch, side, "a", &images, &[])?,
        Host::start(&scratch, side, "b", &images, &["--incoming"])?,
    ];
    let mut guest: RunningGuest = hosts[0].guest(lab, &images).boot(&scratch, "guest-0")?;
    guest.wait_for_within(|line| line == "begun", BOOT_MAX)?;
    let (mut silence, mut told) = (Vec::new(), Vec::new());
    for migration in 1..=MIGRATIONS {
        let to = hosts[migration % 2].guest(lab, &images);
        let (still, longest) = guest.migrate_watched(&to, &scratch, &format!("guest-{migration}"))?;
        silence.push(longest.as_secs_f64() * 1000.0);
        told.push(still.as_secs_f64() * 1000.0);
    }
    guest.kill()?;
    hosts.into_iter().try_for_each(Host::stop)?;
    Ok([median(silence), median(told)])
}
