//! A comparison of what we read from a mutated image with what `qemu-img convert` reads: where both read all of it, it
//! is the same. Where only one does, the image is damaged, by the verdict of `qemu-img check`.
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
        (None, Some(_)) => {
            demand_damage(folder.path(), "we");
            return "only QEMU reads all";
        }
        (Some(_), None) => {
            demand_damage(folder.path(), "QEMU");
            return "only we read all";
        }
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
    let arguments = ["convert", "-f", "qcow2", "-O", "raw", "case", "out"];
    let (code, _) = qemu_img(folder, &arguments);
    (code == Some(0)).then(|| std::fs::read(folder.join("out")).expect("what qemu-img wrote"))
}

/// Checks that one side has a reason not to read all of the image.
///
/// # Panics
///
/// If it has none.
fn demand_damage(folder: &Path, who: &str) {
    let (code, said) = qemu_img(folder, &["check", "-f", "qcow2", "case"]);
    assert!(
        code != Some(0) && code != Some(3),
        "{who} cannot read all of an image in which `qemu-img check` finds no error ({code:?}): {said}"
    );
}

/// Runs `qemu-img` within its limits; its exit status, and what it printed.
fn qemu_img(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new("sh")
        .args(["-c", LIMITS, "qemu-img"])
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    let code = output.status.code();
    assert_ne!(
        code,
        Some(127),
        "qemu-img and timeout are needed: packages qemu-utils, coreutils"
    );
    let said = [output.stdout, output.stderr].concat();
    (code, String::from_utf8_lossy(&said).into_owned())
}

#[cfg(test)]
mod tests {
    use ringdisk_gen::{Content, ImageSpec, Structure};

    use super::*;

    /// A side that fails on a sound image is a finding; on a damaged image it is not.
    #[test]
    fn demand_damage_accepts_only_a_damaged_image() {
        let mut spec = ImageSpec::new(16, 1 << 20);
        spec.clusters.insert(0, Content::Data(1));
        let image = Image::new(spec);
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let demand = |bytes: &[u8]| {
            std::fs::write(folder.path().join("case"), bytes).expect("the image");
            std::panic::catch_unwind(|| demand_damage(folder.path(), "we")).is_ok()
        };
        assert!(!demand(&image.bytes));
        let mut damaged = image.bytes.clone();
        let table = image.all(Structure::L2Table).next().expect("an L2 table");
        // The first cluster lies behind the end of the file, in the middle of a cluster.
        damaged[table.offset as usize..][..8].copy_from_slice(&0x8000_0001_0000_0200_u64.to_be_bytes());
        assert!(demand(&damaged));
    }
}
