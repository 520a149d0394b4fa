//! Block devices of this machine: `ringdisk ublk` beside `rublk` and `qemu-nbd`, in one emulated guest for each kernel,
//! two CPUs, images on ext4 and direct I/O, fio. The file system is on a RAM disk or, in other rows, on a disk of the guest.
//!
//! `rublk` is a published crate; `make bench` installs it, or `RUBLK` names its binary. The guest is emulated, so
//! absolute figures mean nothing, and ratios only within one run. A peer that is missing, fails or reads wrong bytes is left out.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::nested::{Nested, Size, Toolbox};
use lab::{Kernel, Lab, Scratch};

use super::said::{self, Entries, Said, failed};
use super::{Bench, Row};
use crate::report::{Better, Entry};
use crate::server::Program;
use crate::target::{Either, Target};

/// Room for the programs, in bytes.
const DISK_BYTES: u64 = 256 << 20;
/// Room for images beside them, in bytes.
const IMAGES_BYTES: u64 = 2 << 30;
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
    /// True if images are on a disk of the guest, and not on a RAM disk. There is no recovery to measure then.
    on_disk: bool,
}

const fn place(row: &'static str, kernel: Kernel, zero_copy: bool, on_disk: bool) -> Place {
    Place {
        row,
        kernel,
        zero_copy,
        on_disk,
    }
}

const PLACES: [Place; 4] = [
    place("ublk-6.12", Kernel::V6_12, false, false),
    place("ublk-7", Kernel::V7, true, false),
    place("ublk-6.12-disk", Kernel::V6_12, false, true),
    place("ublk-7-disk", Kernel::V7, true, true),
];

/// A figure: its name, ours, whose it is beside, the workload or what the server takes for a request of it ([`unit_of`]), and what the
/// ratio must reach if it must.
type Compared = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    Option<f64>,
);

/// The name of fio on the device below, without any server.
const DEVICE: &str = "device";

/// A figure whose limit may be the device below: its name, that of the comparison with the device and that with the peer, and the
/// ratio to the peer that is enough.
type Reach = (&'static str, &'static str, &'static str, f64);

/// The share of the rate of the device below that is enough.
const OF_DEVICE: f64 = 0.97;

/// Two queues against one: the workload, who with two, who with one. At 128 KiB and by user copy most of the work is the server's;
/// at 4 KiB one queue and its client can leave less idle than the target takes, and then there is none.
const TWO_QUEUES: [(&str, &str, &str); 2] = [
    ("two-queues-4k", "ours-two-queues", "ours-auto"),
    ("two-queues-128k", "ours-user-copy-two-queues", "ours-user-copy"),
];

/// The ratio that two queues reach where CPUs allow.
const TWO_QUEUES_MIN: f64 = 1.6;

/// The comparisons with every driver; the only ones where the driver has only copies.
#[rustfmt::skip]
const ALWAYS: [Compared; 14] = [
    ("read-4k/rublk-qcow2", "ours-auto", "rublk-qcow2", "read-4k", None),
    ("write-4k/rublk-qcow2", "ours-auto", "rublk-qcow2", "write-4k", None),
    ("read-4k/server-user", "ours-auto", "rublk-qcow2", "read-4k-user-us", None),
    ("read-4k/server-system", "ours-auto", "rublk-qcow2", "read-4k-system-us", None),
    ("write-4k/server-user", "ours-auto", "rublk-qcow2", "write-4k-user-us", None),
    ("write-4k/server-system", "ours-auto", "rublk-qcow2", "write-4k-system-us", None),
    ("read-4k/device", "ours-auto", DEVICE, "read-4k", None),
    ("write-4k/device", "ours-auto", DEVICE, "write-4k", None),
    ("read-4k/nbd", "ours-auto", "nbd", "read-4k", Some(4.0)),
    ("write-4k/nbd", "ours-auto", "nbd", "write-4k", Some(4.0)),
    ("read-4k/raw", "ours-auto", "ours-raw", "read-4k", Some(0.92)),
    ("write-4k/raw", "ours-auto", "ours-raw", "write-4k", Some(0.92)),
    ("read-128k/raw", "ours-auto", "ours-raw", "read-128k", Some(0.92)),
    ("write-128k/raw", "ours-auto", "ours-raw", "write-128k", Some(0.92)),
];

/// The comparisons besides where the driver has zero copy too.
#[rustfmt::skip]
const ZERO_COPY: [Compared; 10] = [
    ("read-128k/rublk-qcow2", "ours-auto", "rublk-qcow2", "read-128k", None),
    ("write-128k/rublk-qcow2", "ours-auto", "rublk-qcow2", "write-128k", None),
    ("read-128k/device", "ours-auto", DEVICE, "read-128k", None),
    ("write-128k/device", "ours-auto", DEVICE, "write-128k", None),
    ("read-4k/rublk-loop-z", "ours-auto", "rublk-loop-z", "read-4k", Some(1.0)),
    ("write-4k/rublk-loop-z", "ours-auto", "rublk-loop-z", "write-4k", Some(1.0)),
    ("read-128k/user-copy", "ours-auto", "ours-user-copy", "read-128k", Some(1.5)),
    ("write-128k/user-copy", "ours-auto", "ours-user-copy", "write-128k", Some(1.5)),
    ("read-128k/rublk-loop-z", "ours-auto", "rublk-loop-z", "read-128k", Some(1.0)),
    ("write-128k/rublk-loop-z", "ours-auto", "rublk-loop-z", "write-128k", Some(1.0)),
];

/// The figures of [`ALWAYS`] and of [`ZERO_COPY`] whose limit may be the device below.
const REACH_ALWAYS: [Reach; 2] = [
    ("read-4k/reach", "read-4k/device", "read-4k/rublk-qcow2", 1.7),
    ("write-4k/reach", "write-4k/device", "write-4k/rublk-qcow2", 1.7),
];
const REACH_ZERO_COPY: [Reach; 2] = [
    (
        "read-128k/reach",
        "read-128k/device",
        "read-128k/rublk-qcow2",
        1.9,
    ),
    (
        "write-128k/reach",
        "write-128k/device",
        "write-128k/rublk-qcow2",
        1.9,
    ),
];

/// The most that a thing may take: figure, what, seconds.
const BOUNDS: [(&str, &str, f64); 3] = [
    ("recovery", "recovery-ms", 1.0),
    ("teardown-32x2", "teardown-32-ms", 5.0),
    ("recovery-32x2", "recovery-32-ms", 5.0),
];

/// Times that must be linear in devices: the figure, the time of 8 devices and that of 32.
const LINEAR: [(&str, &str, &str); 2] = [
    ("teardown-32x2/linear", "teardown-8-ms", "teardown-32-ms"),
    ("recovery-32x2/linear", "recovery-8-ms", "recovery-32-ms"),
];

/// The least ratio of a linear time. One that is linear is at 1, and one that grows with the square of devices at a
/// quarter.
const LINEAR_MIN: f64 = 0.5;

/// The unit of what a guest says, and the better direction.
fn unit_of(what: &str) -> (&'static str, Better) {
    if what.ends_with("-us") {
        ("µs", Better::Lower)
    } else {
        ("IOPS", Better::Higher)
    }
}

impl Place {
    fn compared(&self) -> impl Iterator<Item = &'static Compared> {
        let more: &[Compared] = if self.zero_copy { &ZERO_COPY } else { &[] };
        ALWAYS.iter().chain(more)
    }

    fn reaching(&self) -> impl Iterator<Item = &'static Reach> {
        let more: &[Reach] = if self.zero_copy { &REACH_ZERO_COPY } else { &[] };
        REACH_ALWAYS.iter().chain(more)
    }

    /// Everyone who takes turns, but for those for whom there is a reason not to.
    fn whom(&self, absent: impl Fn(&str) -> bool) -> String {
        let mut whom = vec![
            "ours-auto",
            "rublk-qcow2",
            "ours-raw",
            "nbd",
            "ours-two-queues",
            "ours-user-copy",
            "ours-user-copy-two-queues",
            DEVICE,
        ];
        if self.zero_copy {
            whom.push("rublk-loop-z");
        }
        whom.retain(|who| !absent(who));
        whom.join(" ")
    }
}

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    let row = |place: Place| {
        let mut promises: Vec<(_, Target)> = place
            .compared()
            .filter_map(|(name, .., ratio)| Some((*name, (*ratio)?.into())))
            .collect();
        promises.extend(place.reaching().map(|&(name, _, _, of_peer)| {
            let either = Either {
                of_limit: OF_DEVICE,
                of_peer,
                cpu_max: None,
                floor: 0.0,
            };
            (name, either.into())
        }));
        if !place.on_disk {
            promises.extend(BOUNDS.iter().map(|(name, ..)| (*name, 1.0.into())));
            promises.extend(LINEAR.iter().map(|(name, ..)| (*name, LINEAR_MIN.into())));
        }
        Row {
            name: place.row,
            promises,
            run: Box::new(move |row, bench| run(row, bench, place)),
        }
    };
    PLACES.map(row).into()
}

/// A program of a peer: the beginning of the names of those that it serves, and its path.
type Peer = (&'static str, PathBuf);

fn peers() -> [Peer; 2] {
    let rublk = std::env::var_os("RUBLK").filter(|path| !path.is_empty());
    let rublk = rublk.map_or_else(|| PathBuf::from("target/bench/peers/bin/rublk"), PathBuf::from);
    [("rublk", rublk), ("nbd", PathBuf::from("/usr/bin/qemu-nbd"))]
}

/// Returns the reason why somebody takes no turns, if their program is not there.
fn absent(peers: &[Peer], who: &str) -> Option<String> {
    let (_, program) = peers.iter().find(|(begin, _)| who.starts_with(begin))?;
    (!program.is_file()).then(|| format!("{who}: there is no {}", program.display()))
}

fn run(row: &Row, bench: &mut Bench, place: Place) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ringdisk) = &bench.ours else {
        return Err(io::Error::other("this row has no other side than ringdisk's"));
    };
    let seconds = bench.timing.measure.as_secs_f64().max(1.0);
    let peers = peers();
    let (said, failure) = inside(ringdisk, place, &peers, bench.pairs, seconds)?;
    entries(row, bench, place, &said, failure, |who| absent(&peers, who))
}

/// The entries of a row, from what its guest said.
fn entries(
    row: &Row,
    bench: &mut Bench,
    place: Place,
    said: &Said,
    failure: Option<String>,
    absent: impl Fn(&str) -> Option<String>,
) -> io::Result<Vec<Entry>> {
    let of = |who, what| said.median(who, what);
    let mut entries = Entries::default();
    for (name, ours, peer, what, _) in place.compared() {
        let entry = || {
            let ours = said.turns(ours, what)?;
            let (unit, better) = unit_of(what);
            let reason = absent(peer).or_else(|| said.missing(peer));
            if let Some(reason) = reason {
                return Ok(row.not_measured(name, unit, ours, peer, &reason));
            }
            Ok(row.compare_figures(name, unit, better, ours, (peer, said.turns(peer, what)?)))
        };
        entries.add(entry());
    }
    for (name, limit, peer, _) in place.reaching() {
        let entry = match (entries.named(limit), entries.named(peer)) {
            (Some(limit), Some(peer)) => row.either(name, limit, peer, None),
            _ => None,
        };
        entry.into_iter().for_each(|entry| entries.add(Ok(entry)));
    }
    let whom = place.whom(|_| false);
    let failed = whom
        .split(' ')
        .filter_map(|who| absent(who).or_else(|| said.missing(who)));
    bench.peers_failed.extend(failed);
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
    if place.on_disk {
        return entries.end(failure, &mut bench.problems);
    }
    for (name, what, bound) in BOUNDS {
        let took = of("ours-auto", what).map(|took| took / 1000.0);
        entries.add(took.map(|took| row.entry(name, "s", Better::Lower, took, ("bound", bound))));
    }
    let told = of("ours-auto", "told-32-ms").map(|told| told / 1000.0);
    entries.add(told.map(|told| row.entry("recovery-32x2/told", "s", Better::Lower, told, ("bound", 5.0))));
    for (name, few, many) in LINEAR {
        let entry = || {
            let (few, many) = (of("ours-auto", few)? / 8.0, of("ours-auto", many)? / 32.0);
            Ok(row.entry(name, "ms each", Better::Lower, many, ("8 devices", few)))
        };
        entries.add(entry());
    }
    entries.end(failure, &mut bench.problems)
}

fn inside(
    ringdisk: &Path,
    place: Place,
    peers: &[Peer],
    pairs: u32,
    seconds: f64,
) -> io::Result<(Said, Option<String>)> {
    let lab = Lab::prepare().map_err(failed)?;
    let lab = lab.with_kernel(place.kernel).map_err(failed)?;
    let scratch = Scratch::new().map_err(failed)?;
    let mut toolbox = Toolbox::with(&lab, &scratch, ringdisk).map_err(failed)?;
    for (begin, program) in peers {
        if absent(peers, begin).is_none() {
            let name = if *begin == "nbd" { "qemu-nbd" } else { begin };
            toolbox = toolbox.program(program, name).map_err(failed)?;
        }
    }
    let whom = place.whom(|who| absent(peers, who).is_some());
    let rounds = (f64::from(pairs) * seconds).ceil();
    let on_disk = u8::from(place.on_disk);
    let script = format!("rounds={rounds:.0} pairs={pairs} on_disk={on_disk} whom='{whom}'\n{TURNS}");
    let nested = Nested {
        lab: &lab,
        scratch: &scratch,
        toolbox: &toolbox,
        bytes: DISK_BYTES + if place.on_disk { IMAGES_BYTES } else { 0 },
        script: &script,
        patience: PATIENCE,
        size: Size::of_cpus(2),
    };
    said::run(place.row, &nested)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The entries of a place whose guest says that everyone does `iops`, but for those that it leaves out.
    fn entries_of(place: Place, iops: impl Fn(&str) -> f64, left_out: &str) -> (Vec<Entry>, Vec<String>) {
        let scratch = lab::Scratch::new().unwrap();
        let mut bench = Bench::of_test(&scratch.file(""), Program::storage_daemon()).unwrap();
        let whom = place.whom(|_| false);
        let lines = whom.split(' ').flat_map(|who| {
            let figures = [
                "read-4k",
                "write-4k",
                "read-128k",
                "write-128k",
                "two-queues-4k",
                "two-queues-128k",
                "read-4k-user-us",
                "read-4k-system-us",
                "write-4k-user-us",
                "write-4k-system-us",
            ];
            figures.map(|figure| format!("@ {who} {figure} {}", iops(who)))
        });
        let mut lines: Vec<String> = lines.collect();
        lines.push("@ ours-auto two-queues-4k-idle 20".to_owned());
        lines.push("@ ours-user-copy two-queues-128k-idle 20".to_owned());
        lines.push(format!("@missing {left_out} reads wrong bytes"));
        let said = Said::of_lines(lines.iter().map(String::as_str));
        let row = rows().into_iter().find(|row| row.name == place.row).unwrap();
        let no_rublk =
            |who: &str| (who == "rublk-qcow2").then(|| "rublk-qcow2: there is no rublk".to_owned());
        let entries = entries(&row, &mut bench, place, &said, None, no_rublk);
        (entries.unwrap(), bench.peers_failed)
    }

    fn named<'a>(entries: &'a [Entry], what: &str) -> &'a Entry {
        entries
            .iter()
            .find(|entry| entry.row.ends_with(what))
            .expect(what)
    }

    #[test]
    fn peers_that_take_no_turns_are_named_and_the_rest_is_measured() {
        let iops = |who: &str| if who == DEVICE { 1000.0 } else { 900.0 };
        let place = PLACES
            .into_iter()
            .find(|place| place.row == "ublk-7-disk")
            .unwrap();
        let (entries, failed) = entries_of(place, iops, "nbd");
        assert_eq!(
            failed,
            ["rublk-qcow2: there is no rublk", "nbd: reads wrong bytes"]
        );
        assert!(named(&entries, "/read-4k/nbd").lacks_measurement());
        assert_eq!(named(&entries, "/read-4k/server-user").unit, "µs");
        assert_eq!(named(&entries, "/read-4k/device").unit, "IOPS");
        // 0.9 of the device is not enough, and beside rublk nothing is known.
        assert!(named(&entries, "/read-4k/reach").lacks_measurement());
        assert_eq!(named(&entries, "/write-4k/rublk-loop-z").met, Some(true));
        assert_eq!(named(&entries, "/read-4k/raw").met, Some(true));
    }

    #[test]
    fn rate_of_the_device_is_enough_without_the_peer() {
        for place in PLACES.into_iter().filter(|place| place.on_disk) {
            let (entries, _) = entries_of(place, |_| 1000.0, "nbd");
            let reach = named(&entries, "/read-4k/reach");
            assert_eq!(
                (reach.met, reach.by.as_deref()),
                (Some(true), Some("1.00 of device")),
                "{}",
                place.row
            );
        }
    }

    #[test]
    fn program_that_is_not_there_takes_no_turns() {
        let peers = [
            ("rublk", PathBuf::from("/nowhere/rublk")),
            ("nbd", PathBuf::from("/bin/sh")),
        ];
        let whom = PLACES[1].whom(|who| absent(&peers, who).is_some());
        assert!(
            !whom.contains("rublk") && whom.contains("nbd") && whom.contains(DEVICE),
            "{whom}"
        );
        assert!(absent(&peers, "rublk-loop-z").is_some_and(|reason| reason.contains("/nowhere/rublk")));
    }
}
