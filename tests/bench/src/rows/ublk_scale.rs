//! Many block devices of one server, with many queues and deep ones: how long it takes to make, kill, recover and close them, and
//! what 128 devices of 24 queues and depth 4096 would take.
//!
//! The guest has two CPUs, and its kernel provides for 24: the driver makes no more queues than that. The largest shapes do not fit
//! into this machine, so times are taken apart into those of a device, a queue and a tag by four shapes that differ in one thing each,
//! and a fifth shows how well the sum of these holds.

use std::io;
use std::time::Duration;

use lab::nested::{Nested, Size, Toolbox};
use lab::{Kernel, Lab, Scratch};

use super::said::{self, Entries, Said, failed};
use super::{Bench, Row};
use crate::report::{Better, Entry};
use crate::server::Program;

/// The name of the row.
const ROW: &str = "ublk-scale-7";

/// Room for the programs, in bytes.
const DISK_BYTES: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(1500);
const SIZE: Size = Size {
    possible_cpus: 24,
    memory_mib: 6144,
    ..Size::of_cpus(2)
};

/// The script of the guest.
const SCRIPT: &str = include_str!("../../../guest/bench/ublk_scale.sh");

/// The number of devices, queues of each and tags of each queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Shape(u32, u32, u32);

/// The shape that the others differ from.
const BASE: Shape = Shape(32, 4, 128);
/// More devices, more queues of each, more tags of each queue.
const MORE: [Shape; 3] = [Shape(128, 4, 128), Shape(32, 24, 128), Shape(32, 4, 1024)];
/// The shapes that show whether times are linear in devices.
const LINEAR: [Shape; 2] = [Shape(8, 4, 128), Shape(64, 4, 128)];
/// All three at once, to hold the sum against.
const CHECK: Shape = Shape(64, 8, 512);
/// The shape of the yardstick: 2.44 s to tear it down (Uday Shankar, 2025, on a server's CPUs).
const YARDSTICK: Shape = Shape(128, 24, 4096);
const YARDSTICK_SECONDS: f64 = 2.44;

/// Figures of each shape, in milliseconds.
const FIGURES: [&str; 5] = ["create-ms", "exit-ms", "quiesce-ms", "recover-ms", "close-ms"];

impl Shape {
    fn name(self) -> String {
        format!("{}x{}x{}", self.0, self.1, self.2)
    }

    fn devices(self) -> f64 {
        f64::from(self.0)
    }

    fn queues(self) -> f64 {
        self.devices() * f64::from(self.1)
    }

    fn tags(self) -> f64 {
        self.queues() * f64::from(self.2)
    }
}

/// A time taken apart: what does not depend on the shape, and what each device, queue and tag takes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fit {
    fixed: f64,
    device: f64,
    queue: f64,
    tag: f64,
}

impl Fit {
    /// The fit through the times of [`BASE`] and [`MORE`].
    fn through(base: f64, [devices, queues, tags]: [f64; 3]) -> Self {
        let [more_devices, more_queues, more_tags] = MORE;
        let tag = (tags - base) / (more_tags.tags() - BASE.tags());
        let queue = (queues - base - tag * (more_queues.tags() - BASE.tags()))
            / (more_queues.queues() - BASE.queues());
        let device = (devices
            - base
            - tag * (more_devices.tags() - BASE.tags())
            - queue * (more_devices.queues() - BASE.queues()))
            / (more_devices.devices() - BASE.devices());
        let fixed = base - device * BASE.devices() - queue * BASE.queues() - tag * BASE.tags();
        Self {
            fixed,
            device,
            queue,
            tag,
        }
    }

    fn of(self, shape: Shape) -> f64 {
        self.fixed + self.device * shape.devices() + self.queue * shape.queues() + self.tag * shape.tags()
    }
}

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    vec![Row {
        name: ROW,
        promises: Vec::new(),
        run: Box::new(run),
    }]
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ringdisk) = &bench.ours else {
        return Err(io::Error::other("this row has no other side than ringdisk's"));
    };
    let lab = Lab::prepare().map_err(failed)?;
    let lab = lab.with_kernel(Kernel::V7).map_err(failed)?;
    let scratch = Scratch::new().map_err(failed)?;
    let toolbox = Toolbox::with(&lab, &scratch, ringdisk).map_err(failed)?;
    let shapes: Vec<String> = [LINEAR[0], BASE, LINEAR[1]]
        .into_iter()
        .chain(MORE)
        .chain([CHECK])
        .map(Shape::name)
        .collect();
    let script = format!("shapes='{}'\n{SCRIPT}", shapes.join(" "));
    let nested = Nested {
        lab: &lab,
        scratch: &scratch,
        toolbox: &toolbox,
        bytes: DISK_BYTES,
        script: &script,
        patience: PATIENCE,
        size: SIZE,
    };
    let (said, failure) = said::run(ROW, &nested)?;
    entries(row, &said).end(failure, &mut bench.problems)
}

/// The entries of what the guest said: the times of each shape, their parts, and the yardstick's shape by these.
fn entries(row: &Row, said: &Said) -> Entries {
    let mut entries = Entries::default();
    let of = |shape: Shape, what| said.median(&shape.name(), what);
    for what in FIGURES {
        let figure = what.trim_end_matches("-ms");
        for shape in [LINEAR[0], BASE, LINEAR[1]].into_iter().chain(MORE) {
            let name = format!("{figure}/{}", shape.name());
            entries.add(
                of(shape, what).map(|took| row.entry(&name, "ms", Better::Lower, took, ("itself", took))),
            );
        }
        let fit = || -> io::Result<Fit> {
            let [devices, queues, tags] = MORE.map(|shape| of(shape, what));
            Ok(Fit::through(of(BASE, what)?, [devices?, queues?, tags?]))
        };
        let fit = match fit() {
            Ok(fit) => fit,
            Err(error) => {
                entries.add(Err(error));
                continue;
            }
        };
        for (part, unit, took) in [
            ("device", "ms", fit.device),
            ("queue", "ms", fit.queue),
            ("tag", "µs", fit.tag * 1000.0),
        ] {
            let name = format!("{figure}/each-{part}");
            entries.add(Ok(row.entry(&name, unit, Better::Lower, took, ("itself", took))));
        }
        let name = format!("{figure}/{}", CHECK.name());
        entries.add(of(CHECK, what).map(|took| {
            row.entry(
                &name,
                "ms",
                Better::Lower,
                took,
                ("sum of its parts", fit.of(CHECK)),
            )
        }));
        let name = format!("{figure}/{}/extrapolated", YARDSTICK.name());
        let took = fit.of(YARDSTICK) / 1000.0;
        let beside = ("teardown of the yardstick", YARDSTICK_SECONDS);
        entries.add(Ok(row.entry(&name, "s", Better::Lower, took, beside)));
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fit_finds_the_parts_of_a_linear_time() {
        let linear =
            |shape: Shape| 50.0 + 7.0 * shape.devices() + 0.5 * shape.queues() + 0.002 * shape.tags();
        let fit = Fit::through(linear(BASE), MORE.map(linear));
        let close = |one: f64, other: f64| (one - other).abs() < 1e-6;
        assert!(close(fit.fixed, 50.0) && close(fit.device, 7.0), "{fit:?}");
        assert!(close(fit.queue, 0.5) && close(fit.tag, 0.002), "{fit:?}");
        for shape in [CHECK, YARDSTICK, LINEAR[0]] {
            assert!(close(fit.of(shape), linear(shape)), "{shape:?}");
        }
    }

    #[test]
    fn shape_that_does_not_fit_into_memory_is_named() {
        let row = rows().remove(0);
        let line =
            |shape: Shape| FIGURES.map(|figure| format!("@ {} {figure} {}", shape.name(), shape.tags()));
        let all = [LINEAR[0], BASE, LINEAR[1]]
            .into_iter()
            .chain(MORE)
            .chain([CHECK]);
        let lines: Vec<String> = all.clone().flat_map(line).collect();
        let said = Said::of_lines(lines.iter().map(String::as_str));
        let mut problems = Vec::new();
        let whole = entries(&row, &said).end(None, &mut problems).unwrap();
        let named = |what: &str| whole.iter().find(|entry| entry.row.ends_with(what)).expect(what);
        let found = named("close/128x24x4096/extrapolated").ours;
        assert!((found - YARDSTICK.tags() / 1000.0).abs() < 1e-3, "{found}");
        let without = all.filter(|&shape| shape != CHECK).flat_map(line);
        let lines: Vec<String> = without.collect();
        let said = Said::of_lines(lines.iter().map(String::as_str));
        let failure = entries(&row, &said).end(None, &mut problems).unwrap_err();
        assert!(
            failure.to_string().contains("64x8x512 has told no create-ms"),
            "{failure}"
        );
    }
}
