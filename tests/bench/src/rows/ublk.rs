//! Block devices of this machine: `ringdisk ublk` beside `rublk` and `qemu-nbd`, in one emulated guest for each kernel,
//! two CPUs, images on a RAM disk with ext4 and direct I/O, fio.
//!
//! `rublk` is a published crate; `make bench` installs it, or `RUBLK` names its binary. The guest is emulated, so
//! absolute figures mean nothing, and ratios only within one run.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::nested::{Nested, Toolbox};
use lab::{Kernel, Lab, Scratch};

use super::said::{self, Entries, Said, failed};
use super::{Bench, Row};
use crate::report::{Better, Entry};
use crate::server::Program;

const DISK_BYTES: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(1500);

/// The script of the guest: devices of all sides take turns, and servers are killed and recovered.
const TURNS: &str = include_str!("../../../guest/bench/ublk.sh");

/// One kernel: what takes part there.
#[derive(Clone, Copy, Debug)]
struct Place {
    row: &'static str,
    kernel: Kernel,
    /// True if the driver has zero copy.
    zero_copy: bool,
}

const PLACES: [Place; 2] = [
    Place {
        row: "ublk-6.12",
        kernel: Kernel::V6_12,
        zero_copy: false,
    },
    Place {
        row: "ublk-7",
        kernel: Kernel::V7,
        zero_copy: true,
    },
];

/// A figure: its name, ours, whose it is beside, the workload, and what the ratio must reach.
type Compared = (&'static str, &'static str, &'static str, &'static str, f64);

/// Two queues against one: the workload, who with two, who with one. At 128 KiB and by user copy most of the work is the server's;
/// at 4 KiB one queue and its client can leave less idle than the target takes, and then there is none.
const TWO_QUEUES: [(&str, &str, &str); 2] = [
    ("two-queues-4k", "ours-two-queues", "ours-auto"),
    ("two-queues-128k", "ours-user-copy-two-queues", "ours-user-copy"),
];

/// The ratio that two queues reach where CPUs allow.
const TWO_QUEUES_MIN: f64 = 1.6;

/// The comparisons with every driver; the only ones where the driver has only copies.
const ALWAYS: [Compared; 8] = [
    ("read-4k/rublk-qcow2", "ours-auto", "rublk-qcow2", "read-4k", 1.7),
    (
        "write-4k/rublk-qcow2",
        "ours-auto",
        "rublk-qcow2",
        "write-4k",
        1.7,
    ),
    ("read-4k/nbd", "ours-auto", "nbd", "read-4k", 6.0),
    ("write-4k/nbd", "ours-auto", "nbd", "write-4k", 6.0),
    ("read-4k/raw", "ours-auto", "ours-raw", "read-4k", 0.92),
    ("write-4k/raw", "ours-auto", "ours-raw", "write-4k", 0.92),
    ("read-128k/raw", "ours-auto", "ours-raw", "read-128k", 0.92),
    ("write-128k/raw", "ours-auto", "ours-raw", "write-128k", 0.92),
];

/// The comparisons besides where the driver has zero copy too.
const ZERO_COPY: [Compared; 8] = [
    (
        "read-128k/rublk-qcow2",
        "ours-auto",
        "rublk-qcow2",
        "read-128k",
        1.9,
    ),
    (
        "write-128k/rublk-qcow2",
        "ours-auto",
        "rublk-qcow2",
        "write-128k",
        1.9,
    ),
    (
        "read-4k/rublk-loop-z",
        "ours-auto",
        "rublk-loop-z",
        "read-4k",
        1.0,
    ),
    (
        "write-4k/rublk-loop-z",
        "ours-auto",
        "rublk-loop-z",
        "write-4k",
        1.0,
    ),
    (
        "read-128k/user-copy",
        "ours-auto",
        "ours-user-copy",
        "read-128k",
        1.5,
    ),
    (
        "write-128k/user-copy",
        "ours-auto",
        "ours-user-copy",
        "write-128k",
        1.5,
    ),
    (
        "read-128k/rublk-loop-z",
        "ours-auto",
        "rublk-loop-z",
        "read-128k",
        1.0,
    ),
    (
        "write-128k/rublk-loop-z",
        "ours-auto",
        "rublk-loop-z",
        "write-128k",
        1.0,
    ),
];

/// The most that a thing may take: figure, what, seconds.
const BOUNDS: [(&str, &str, f64); 3] = [
    ("recovery", "recovery-ms", 1.0),
    ("teardown-32x4", "teardown-32-ms", 5.0),
    ("recovery-32x4", "recovery-32-ms", 5.0),
];

/// Times that must be linear in devices: the figure, the time of 8 devices and that of 32.
const LINEAR: [(&str, &str, &str); 2] = [
    ("teardown-32x4/linear", "teardown-8-ms", "teardown-32-ms"),
    ("recovery-32x4/linear", "recovery-8-ms", "recovery-32-ms"),
];

/// The least ratio of a linear time. One that is linear is at 1, and one that grows with the square of devices at a
/// quarter.
const LINEAR_MIN: f64 = 0.5;

impl Place {
    fn compared(&self) -> impl Iterator<Item = &'static Compared> {
        let more: &[Compared] = if self.zero_copy { &ZERO_COPY } else { &[] };
        ALWAYS.iter().chain(more)
    }

    fn whom(&self) -> String {
        let mut whom = vec![
            "ours-auto",
            "rublk-qcow2",
            "ours-raw",
            "nbd",
            "ours-two-queues",
            "ours-user-copy",
            "ours-user-copy-two-queues",
        ];
        if self.zero_copy {
            whom.push("rublk-loop-z");
        }
        whom.join(" ")
    }
}

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    let row = |place: Place| {
        let mut promises: Vec<_> = place
            .compared()
            .map(|(name, .., ratio)| (*name, *ratio))
            .collect();
        promises.extend(BOUNDS.iter().map(|(name, ..)| (*name, 1.0)));
        promises.extend(LINEAR.iter().map(|(name, ..)| (*name, LINEAR_MIN)));
        Row {
            name: place.row,
            promises,
            run: Box::new(move |row, bench| run(row, bench, place)),
        }
    };
    PLACES.map(row).into()
}

fn run(row: &Row, bench: &mut Bench, place: Place) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ringdisk) = &bench.ours else {
        return Err(io::Error::other("this row has no other side than ringdisk's"));
    };
    let seconds = bench.timing.measure.as_secs_f64().max(1.0);
    let (said, failure) = inside(ringdisk, place, bench.pairs, seconds)?;
    let of = |who, what| said.median(who, what);
    let mut entries = Entries::default();
    for (name, ours, peer, what, _) in place.compared() {
        let entry = || {
            let beside = (*peer, said.turns(peer, what)?);
            Ok(row.compare_figures(name, "IOPS", Better::Higher, said.turns(ours, what)?, beside))
        };
        entries.add(entry());
    }
    for (what, two, one) in TWO_QUEUES {
        // Two queues have no more than what one leaves, and nobody gets the last twentieth of a machine.
        let idle = format!("{what}-idle");
        let room = said
            .median(one, &idle)
            .map(|idle| 100.0 / (100.0 - idle.min(99.0)));
        let entry = |room: f64| {
            let beside = ("one queue", said.turns(one, what)?);
            let allowed = room >= TWO_QUEUES_MIN / 0.95;
            let entry = row.compare_figures(what, "IOPS", Better::Higher, said.turns(two, what)?, beside);
            Ok(entry.target(allowed.then_some(TWO_QUEUES_MIN)))
        };
        if let Ok(room) = room {
            entries.add(entry(room));
        }
        let name = format!("{what}/room");
        entries.add(room.map(|room| row.entry(&name, "×", Better::Higher, room, ("one queue", 1.0))));
    }
    for (name, what, bound) in BOUNDS {
        let took = of("ours-auto", what).map(|took| took / 1000.0);
        entries.add(took.map(|took| row.entry(name, "s", Better::Lower, took, ("bound", bound))));
    }
    let told = of("ours-auto", "told-32-ms").map(|told| told / 1000.0);
    entries.add(told.map(|told| row.entry("recovery-32x4/told", "s", Better::Lower, told, ("bound", 5.0))));
    for (name, few, many) in LINEAR {
        let entry = || {
            let (few, many) = (of("ours-auto", few)? / 8.0, of("ours-auto", many)? / 32.0);
            Ok(row.entry(name, "ms each", Better::Lower, many, ("8 devices", few)))
        };
        entries.add(entry());
    }
    entries.end(failure, &mut bench.problems)
}

fn inside(ringdisk: &Path, place: Place, pairs: u32, seconds: f64) -> io::Result<(Said, Option<String>)> {
    let lab = Lab::prepare().map_err(failed)?;
    let lab = lab.with_kernel(place.kernel).map_err(failed)?;
    let scratch = Scratch::new().map_err(failed)?;
    let rublk = std::env::var_os("RUBLK").filter(|path| !path.is_empty());
    let rublk = rublk.map_or_else(|| PathBuf::from("target/bench/peers/bin/rublk"), PathBuf::from);
    let toolbox = Toolbox::with(&lab, &scratch, ringdisk)
        .and_then(|toolbox| toolbox.program(&rublk, "rublk"))
        .and_then(|toolbox| toolbox.program(Path::new("/usr/bin/qemu-nbd"), "qemu-nbd"))
        .map_err(failed)?;
    let whom = place.whom();
    let rounds = (f64::from(pairs) * seconds).ceil();
    let script = format!("rounds={rounds:.0} pairs={pairs} whom='{whom}'\n{TURNS}");
    let nested = Nested {
        lab: &lab,
        scratch: &scratch,
        toolbox: &toolbox,
        bytes: DISK_BYTES,
        script: &script,
        patience: PATIENCE,
    };
    said::run(place.row, &nested)
}
