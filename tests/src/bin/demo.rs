//! `make demo`: a stock Linux guest runs on a QCOW2 overlay, and QEMU's tools find the image flawless afterwards.
//!
//! The guest is a machine of `ringdisk run` where KVM really works; elsewhere QEMU emulates one, whose disk is served
//! by `ringdisk vhost-user`. A probe that runs what a stock kernel runs finds out if KVM works.
//!
//! Exits with 0 and the words "It worked" only if every step did.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use lab::{Guest, Lab, Machine, Outcome, Scratch, Server, image};
use ringdisk_gen::kvm;

/// The longest time for the guest in all, emulated and on a busy machine.
const GUEST_MAX: Duration = Duration::from_secs(600);
/// The longest time of a guest on KVM to its first word.
const KVM_BOOT_MAX: Duration = Duration::from_secs(60);

/// The script of the guest. Lines that begin with `* ` are shown.
const SCRIPT: &str = include_str!("../../guest/demo.sh");

fn main() -> ExitCode {
    let mut out = io::stdout().lock();
    match demo(&mut out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // The exit code still tells if standard output is gone.
            writeln!(out, "\nIt did NOT work: {failure}").ok();
            ExitCode::FAILURE
        }
    }
}

fn demo(out: &mut impl io::Write) -> Result<(), Box<dyn std::error::Error>> {
    let started = Instant::now();
    let lab = Lab::prepare()?;
    let scratch = Scratch::new()?;
    let root = scratch.file("guest.qcow2");

    image::overlay(&root, lab.base())?;
    step(
        out,
        "an overlay, guest.qcow2, over the lab's read-only Debian image: qemu-img create",
    )?;
    let (outcome, frontend) = match on_kvm(out, &lab, &scratch, &root)? {
        Some(outcome) => (outcome, "attached by `ringdisk run`"),
        None => (emulated(out, &lab, &scratch, &root)?, "served by Ringdisk"),
    };
    for line in outcome.lines().filter_map(|line| line.strip_prefix("* ")) {
        writeln!(out, "       guest: {line}")?;
    }
    if let Some(complaint) = outcome.complaints().first() {
        return Err(format!("the guest's kernel complained: {complaint}").into());
    }
    step(
        out,
        "the guest powered off, and its kernel had no complaint; ringdisk drained, flushed and exited with 0",
    )?;

    image::check_flawless(&root)?;
    step(out, "qemu-img check: no errors, no leaks")?;
    image::ringdisk(&["image", "check", &root.to_string_lossy()])?;
    step(out, "ringdisk image check: clean")?;
    let raw = scratch.file("guest.raw");
    image::convert(&root, &raw, "raw")?;
    image::fsck(&raw)?;
    step(out, "e2fsck of what QEMU reads from the image: clean")?;

    let allocated = fs::metadata(&root)?.blocks() * 512 / (1 << 20);
    let seconds = started.elapsed().as_secs();
    writeln!(
        out,
        "\nIt worked: a guest ran on a QCOW2 overlay {frontend}, in {seconds} s;"
    )?;
    writeln!(out, "the image takes {allocated} MiB and is flawless.")?;
    Ok(())
}

/// The guest as a machine of our own, and nothing if KVM runs no guest here, which a probe finds out that has nothing of
/// ours. The overlay is untouched then.
fn on_kvm(
    out: &mut impl io::Write,
    lab: &Lab,
    scratch: &Scratch,
    root: &Path,
) -> Result<Option<Outcome>, Box<dyn std::error::Error>> {
    if let Err(why) = kvm::runs_stock_kernels() {
        let told = format!("ringdisk run: KVM runs no guest here ({why}); falling back to QEMU's emulation");
        step(out, &told)?;
        return Ok(None);
    }
    let disk = format!("path={},num_queues=2,backing_files=on", root.display());
    let machine = Machine::new(lab, &format!("echo alive\n{SCRIPT}"), GUEST_MAX).disk("root", &disk);
    let mut guest = machine.start(scratch, "machine")?;
    if let Err(error) = guest.wait_for_within(|line| line == "alive", KVM_BOOT_MAX) {
        return Err(format!("{error}; its last words: {}", guest.last_words()).into());
    }
    step(
        out,
        "ringdisk run --disk path=guest.qcow2,num_queues=2,backing_files=on: a stock Debian guest boots from it on KVM",
    )?;
    Ok(Some(guest.finish()?))
}

/// The guest in QEMU, its disk served over vhost-user.
fn emulated(
    out: &mut impl io::Write,
    lab: &Lab,
    scratch: &Scratch,
    root: &Path,
) -> Result<Outcome, Box<dyn std::error::Error>> {
    let socket = scratch.file("guest.sock");
    let disk = format!("path={},num_queues=2,backing_files=on", root.display());
    let server = Server::ringdisk(&socket, &disk)?;
    step(
        out,
        "ringdisk vhost-user --socket guest.sock --disk path=guest.qcow2,num_queues=2,backing_files=on",
    )?;
    step(
        out,
        "a stock Debian guest boots from it in QEMU (emulated: a few seconds, and no benchmark)",
    )?;
    let guest = Guest::new(lab).cpus(2).disk("root", &socket, 2).script(SCRIPT);
    let outcome = guest.patience(GUEST_MAX).run(scratch, "guest")?;
    server.stop()?;
    Ok(outcome)
}

/// Tells that a step is done, at once: the next one may take a while.
fn step(out: &mut impl io::Write, text: &str) -> io::Result<()> {
    writeln!(out, "[demo] {text}")?;
    out.flush()
}
