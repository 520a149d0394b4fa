//! The space that a file takes after loops of discards and writes, ours beside `qemu-io`'s: the same requests, one after the
//! other, through the page cache.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringdisk_gen::discard_loops::{Loop, loops};

use super::{Bench, Row};
use crate::process;
use crate::report::{Better, Entry};
use crate::server::Program;

/// The disk's size in mebibytes.
const MIB: u64 = 256;
/// The least ratio of QEMU's figure to ours.
const BESIDE_QEMU: f64 = 1.0 / 1.1;
/// The longest time for the requests of a loop.
const TIME_MAX: Duration = Duration::from_secs(120);

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    let names = [
        "space/whole-disk",
        "space/whole-disk-flushed",
        "space/random-half-full",
        "space/scattered-trims",
        "space/zeroes-and-rewrite",
    ];
    let row = |name| Row {
        name,
        promises: vec![("length", BESIDE_QEMU.into()), ("in-use", BESIDE_QEMU.into())],
        run: Box::new(run),
    };
    names.map(row).into()
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ringdisk) = &bench.ours else {
        return Err(io::Error::other("this row has no other side than ringdisk's"));
    };
    let all = loops(MIB);
    let steps = all
        .iter()
        .find(|list| row.name.ends_with(&format!("/{}", list.name)));
    let steps = steps.ok_or_else(|| io::Error::other(format!("there is no loop for {}", row.name)))?;
    let directory = bench.images.directory();
    let ours = {
        let image = directory.join("space-ours.qcow2");
        let mut command = Command::new(ringdisk);
        command
            .args(["io", "--disk"])
            .arg(format!("path={}", image.display()));
        sizes(command, &image, steps)?
    };
    let theirs = {
        let image = directory.join("space-qemu.qcow2");
        let mut command = Command::new("qemu-io");
        command.arg("--image-opts").arg(format!(
            "driver=qcow2,discard=unmap,file.driver=file,file.discard=unmap,file.filename={}",
            image.display()
        ));
        sizes(command, &image, steps)?
    };
    let entry = |what, at: usize| row.entry(what, "MiB", Better::Lower, ours[at], ("qemu-io", theirs[at]));
    Ok(vec![entry("length", 0), entry("in-use", 1)])
}

/// Makes an image, runs the requests on it, checks it and removes it. Returns its length, and what it takes, in MiB.
fn sizes(mut command: Command, image: &Path, list: &Loop) -> io::Result<[f64; 2]> {
    let tool = |arguments: &[&str]| {
        let mut tool = Command::new("qemu-img");
        tool.args(arguments).arg(image);
        tool
    };
    let mut create = tool(&["create", "-q", "-f", "qcow2"]);
    create.arg(format!("{MIB}M"));
    process::output(create, TIME_MAX)?;
    for step in &list.steps {
        command.arg("-c").arg(step.command());
    }
    let said = process::output(command, TIME_MAX)?;
    if said.contains("failed") || said.contains("rror") {
        return Err(io::Error::other(format!("{}: {said}", list.name)));
    }
    process::output(tool(&["check", "-q", "-f", "qcow2"]), TIME_MAX)?;
    let facts = std::fs::metadata(image)?;
    std::fs::remove_file(image)?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    Ok([mib(facts.len()), mib(facts.blocks() * 512)])
}
