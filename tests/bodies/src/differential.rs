//! What we read from a mutated image, and what `qemu-img convert` reads: where both read all of it, it is the same.
//!
//! QEMU is asked only about images that we can open, so that it is known which files they name; and it runs with
//! little memory and time, as it can abort or go on for ever.

use std::path::Path;
use std::process::{Command, Stdio};

use ringdisk_gen::Image;

use crate::cursor::Cursor;
use crate::guest::{Guest, options};
use crate::host::Files;
use crate::mutate::{BACKING, mutate, spec};

/// Larger disks are not compared, in bytes.
const DISK_MAX: u64 = 4 << 20;
const BACKING_BYTES: usize = 40 << 10;
/// QEMU's limits: address space in KiB, file size in blocks of 512 bytes, seconds.
const LIMITS: &str =
    "ulimit -v 4194304 && ulimit -f 65536 && ulimit -c 0 && exec timeout -k 1 20 \"$0\" \"$@\"";

/// Builds, mutates and compares.
///
/// # Panics
///
/// If a byte differs, or `qemu-img` cannot be run.
pub fn body(data: &[u8]) -> &'static str {
    let mut cursor = Cursor::new(data);
    let image = Image::new(spec(&mut cursor));
    let bytes = mutate(&mut cursor, &image);
    let backing: Vec<u8> = (0..BACKING_BYTES).map(|at| (at / 512) as u8 ^ 0x33).collect();
    let mut files = Files::with("case", &bytes);
    files.add(BACKING, &backing);
    let Ok(guest) = Guest::open(&files, "case", &options(true, true)) else {
        return "we refuse";
    };
    let size = guest.size();
    if size > DISK_MAX {
        return "too large";
    }
    let ours = read_all(&guest);
    let _closed = guest.close();

    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    std::fs::write(folder.path().join("case"), &bytes).expect("the image");
    std::fs::write(folder.path().join(BACKING), &backing).expect("its backing file");
    let theirs = convert(folder.path());
    let (ours, theirs) = match (ours, theirs) {
        (Some(ours), Some(theirs)) => (ours, theirs),
        (None, Some(_)) => return "only QEMU reads all",
        (Some(_), None) => return "only we read all",
        (None, None) => return "neither reads all",
    };
    // Sizes are told in sectors by one, in bytes by the other.
    let len = ours.len().min(theirs.len());
    assert!(
        ours.len().abs_diff(theirs.len()) < 512,
        "{} and {} bytes",
        ours.len(),
        theirs.len()
    );
    if let Some(at) = (0..len).find(|&at| ours[at] != theirs[at]) {
        let (ours, theirs) = (ours[at], theirs[at]);
        panic!("byte {at:#x} of the disk is {ours:#04x} to us and {theirs:#04x} to QEMU");
    }
    "equal"
}

fn read_all(guest: &Guest) -> Option<Vec<u8>> {
    let size = guest.size();
    let mut disk = Vec::new();
    for offset in (0..size).step_by(64 << 10) {
        disk.extend(guest.read(offset, (64 << 10).min(size - offset)).ok()?);
    }
    Some(disk)
}

/// The disk as QEMU reads it, if it does.
fn convert(folder: &Path) -> Option<Vec<u8>> {
    let status = Command::new("sh")
        .args([
            "-c", LIMITS, "qemu-img", "convert", "-f", "qcow2", "-O", "raw", "case", "out",
        ])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("a shell");
    assert_ne!(
        status.code(),
        Some(127),
        "qemu-img and timeout are needed: packages qemu-utils, coreutils"
    );
    status
        .success()
        .then(|| std::fs::read(folder.join("out")).expect("what qemu-img wrote"))
}
