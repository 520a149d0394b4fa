//! Whole machines: `ringdisk run`, QEMU and, where its binary is given (`CLOUD_HYPERVISOR`), Cloud Hypervisor take turns
//! in one emulated guest whose KVM is real, in an order that is turned round each time. Each boots the same Linux from a
//! QCOW2 overlay, does the same I/O on the same QCOW2 disk, past the page cache, and switches itself off.
//!
//! The guest is emulated, so absolute figures mean nothing, and ratios only within one run.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::nested::{Nested, Size, Toolbox};
use lab::{Lab, Scratch};

use super::said::{self, Entries, Said, failed};
use super::{Bench, Row};
use crate::report::{Better, Entry};
use crate::server::Program;
use crate::target::Target;

/// The memory that a machine may hold besides the guest's, in MiB.
const RESIDENT_MIB: f64 = 20.0;
/// The most of a thousand requests that may leave the guest for the machine's program.
const EXITS_PER_THOUSAND: f64 = 1.0;
/// Room for the programs, the images and their kernel, in bytes.
const DISK_BYTES: u64 = 1 << 30;
/// The longest time for all of it.
const PATIENCE: Duration = Duration::from_secs(1500);

/// The files that QEMU reads beside its libraries.
const FIRMWARE: [&str; 3] = [
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
];

/// The workloads: figure, fio's pattern, block size, depth.
const WORKLOADS: [(&str, &str, &str, u32); 4] = [
    ("read-4k-d32", "randread", "4k", 32),
    ("write-4k-d32", "randwrite", "4k", 32),
    ("read-128k-sequential-d16", "read", "128k", 16),
    ("write-128k-sequential-d16", "write", "128k", 16),
];

/// The figures promised besides where Cloud Hypervisor takes turns: not to be slower than it.
const BESIDE_CLOUD_HYPERVISOR: [&str; 5] = [
    "boot-cloud-hypervisor",
    "read-4k-d32-cloud-hypervisor",
    "write-4k-d32-cloud-hypervisor",
    "read-128k-sequential-d16-cloud-hypervisor",
    "write-128k-sequential-d16-cloud-hypervisor",
];

/// The script of the outer guest: machines of all sides take turns.
const TURNS: &str = include_str!("../../../guest/bench/vmm.sh");

/// Returns the script of the inner guest for the figures of I/O.
fn inner_script(seconds: f64) -> String {
    let workloads: String = WORKLOADS
        .iter()
        .map(|(name, pattern, block, depth)| format!("{name} {pattern} {block} {depth}\n"))
        .collect();
    let script = include_str!("../../../guest/bench/vmm.inner.sh");
    format!("seconds={seconds:.0}\nworkloads='{workloads}'\n{script}")
}

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    let mut promises: Vec<(_, Target)> = vec![
        ("boot", (1.0 / 0.8).into()),
        ("resident", 1.0.into()),
        ("exits", 1.0.into()),
    ];
    promises.extend(WORKLOADS.iter().map(|(name, ..)| (*name, 1.0.into())));
    if cloud_hypervisor().is_some() {
        promises.extend(BESIDE_CLOUD_HYPERVISOR.map(|name| (name, 1.0.into())));
    }
    vec![Row {
        name: "vmm",
        promises,
        run: Box::new(run),
    }]
}

/// Cloud Hypervisor's binary, where there is one.
fn cloud_hypervisor() -> Option<PathBuf> {
    let path = std::env::var_os("CLOUD_HYPERVISOR").filter(|path| !path.is_empty());
    path.map(PathBuf::from)
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let cloud_hypervisor = cloud_hypervisor();
    let Program::Ringdisk(ringdisk) = &bench.ours else {
        return Err(io::Error::other("this row has no other side than ringdisk's"));
    };
    let (pairs, seconds) = (bench.pairs, bench.timing.measure.as_secs_f64().max(1.0));
    let (said, failure) = outer(row.name, ringdisk, cloud_hypervisor.as_deref(), pairs, seconds)?;
    let of = |who, what| said.median(who, what);
    let ours = "ringdisk";
    let mut entries = Entries::default();
    let mut peers = vec![("qemu", "")];
    if cloud_hypervisor.is_some() {
        peers.push(("cloud-hypervisor", "-cloud-hypervisor"));
    }
    for (peer, suffix) in peers {
        let mut add = |name: String, unit, better, what, divisor: f64| {
            let turns = |who| -> io::Result<Vec<f64>> {
                let figures = said.turns(who, what)?;
                Ok(figures.iter().map(|figure| figure / divisor).collect())
            };
            let entry = || {
                let (ours, beside) = (turns(ours)?, turns(peer)?);
                Ok(row.compare_figures(&name, unit, better, &ours, (peer, &beside)))
            };
            entries.add(entry());
        };
        add(format!("boot{suffix}"), "s", Better::Lower, "boot-ms", 1000.0);
        for (what, ..) in WORKLOADS {
            add(format!("{what}{suffix}"), "IOPS", Better::Higher, what, 1.0);
        }
        let name = format!("resident-beside{suffix}");
        add(name, "MiB", Better::Lower, "resident-kib", 1024.0);
    }
    let resident = of(ours, "resident-kib").map(|kib| kib / 1024.0);
    let bound = ("bound", RESIDENT_MIB);
    entries.add(resident.map(|mib| row.entry("resident", "MiB", Better::Lower, mib, bound)));
    let exits = || {
        let mut requests = 0.0;
        for (what, ..) in WORKLOADS {
            requests += of(ours, what)? * seconds;
        }
        // None at all is better than any bound, and no ratio.
        let exits = (of(ours, "exits")? * 1000.0 / requests).max(0.001);
        let bound = ("bound", EXITS_PER_THOUSAND);
        Ok(row.entry("exits", "per 1,000 requests", Better::Lower, exits, bound))
    };
    entries.add(exits());
    entries.end(failure, &mut bench.problems)
}

fn outer(
    row: &str,
    ringdisk: &Path,
    cloud_hypervisor: Option<&Path>,
    pairs: u32,
    seconds: f64,
) -> io::Result<(Said, Option<String>)> {
    let lab = Lab::prepare().map_err(failed)?;
    let scratch = Scratch::new().map_err(failed)?;
    let toolbox = toolbox(&lab, &scratch, ringdisk, cloud_hypervisor, seconds).map_err(failed)?;
    let also = if cloud_hypervisor.is_some() {
        " cloud-hypervisor"
    } else {
        ""
    };
    let script = format!("whom='ringdisk qemu{also}' rounds={pairs}\n{TURNS}");
    let nested = Nested {
        lab: &lab,
        scratch: &scratch,
        toolbox: &toolbox,
        bytes: DISK_BYTES,
        script: &script,
        patience: PATIENCE,
        size: Size::of_cpus(2),
    };
    said::run(row, &nested)
}

/// The disk with all programs that take part.
fn toolbox(
    lab: &Lab,
    scratch: &Scratch,
    ringdisk: &Path,
    cloud_hypervisor: Option<&Path>,
    seconds: f64,
) -> Result<Toolbox, lab::Error> {
    let mut toolbox = Toolbox::with(lab, scratch, ringdisk)?
        .script(lab, "boot", "true\n")?
        .script(lab, "work", &inner_script(seconds))?
        .program(Path::new("/usr/bin/qemu-system-x86_64"), "qemu")?;
    for file in FIRMWARE {
        toolbox = toolbox.file(Path::new(file))?;
    }
    if let Some(binary) = cloud_hypervisor {
        toolbox = toolbox.program(binary, "cloud-hypervisor")?;
    }
    Ok(toolbox)
}
