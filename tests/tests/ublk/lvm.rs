//! QCOW2 on a logical volume, as Proxmox, oVirt and Incus keep it: filled to its last cluster, made larger under a server
//! that goes on, and filled again with what was discarded.

use std::os::unix::fs::MetadataExt as _;

use super::{newest, run_in, said};
use lab::{Error, Kernel, Scratch};

/// The size of the physical volume, in bytes.
const VOLUME: usize = 104 << 20;
/// The bytes discarded last, on both rings.
const DISCARDED: u64 = 8 << 20;
/// The clusters of the image, of 64 KiB, that hold no data: the header, the tables and the blocks of refcounts, L1 and L2, with
/// one more where a table was made anew.
const TABLES: u64 = 8;

const LVM: &str = include_str!("../../guest/ublk/lvm.sh");

#[test]
fn image_fills_a_logical_volume_and_goes_on_when_it_grows() -> Result<(), Error> {
    let ((kernel, lab), scratch) = (newest(), Scratch::new()?);
    let outcome = run_in(&lab, &scratch, 1, LVM, Ok, |guest| {
        // What others left there.
        let volume = scratch.file("volume");
        std::fs::write(&volume, vec![0xA5; VOLUME]).expect("a volume");
        guest.raw_disk("pv", &volume)
    })?;
    let left = scratch.file("volume").metadata().expect("the volume").blocks() * 512;
    let all = said(&outcome);
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    let filled = |which: &str| -> u64 {
        let (clusters, why) = value(&format!("filled {which} "))
            .split_once(' ')
            .unwrap_or_default();
        assert_eq!(why, "No space left on device", "{which}: {all}");
        clusters.parse().unwrap_or(0)
    };
    // In clusters; what was discarded, 8 MiB, is written elsewhere.
    let (first, second, third) = (filled("first"), filled("second"), filled("third"));
    for (which, filled, volume) in [("first", first, 24), ("second", second, 40), ("third", third, 48)] {
        let most = volume * 16;
        assert!(
            (most - TABLES..most).contains(&filled),
            "{which}: {filled} of {most}: {all}"
        );
    }
    // With what the file system itself takes for a file with holes.
    let most = VOLUME as u64 - DISCARDED + (64 << 10);
    assert!(left <= most, "{left} bytes of the volume are in use: {all}");
    for key in ["overwritten ", "full ", "kept ", "server "] {
        assert_eq!(value(key), "0", "{key}: {all}");
    }
    // Linux 6.12 has no resize; there the disk ends where it did.
    let grown = value("grown ").starts_with("0 ");
    assert_eq!(grown, kernel == Kernel::V7, "{all}");
    let size = if grown { 72 } else { 64_u64 } << 20;
    assert_eq!(value("size "), size.to_string(), "{all}");
    let lines = |key: &str| outcome.lines().filter(|line| line.starts_with(key)).count();
    assert_eq!(lines("flawless /dev/vg/disk"), 2, "{all}");
    assert_eq!(lines("Images are identical."), 1, "{all}");
    let io: Vec<&str> = outcome
        .lines()
        .filter_map(|line| line.strip_prefix("io "))
        .collect();
    assert!(
        io.len() == 3 && io[0].contains("No space left on device") && io[1..] == ["0", "0"],
        "{all}"
    );
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    Ok(())
}
