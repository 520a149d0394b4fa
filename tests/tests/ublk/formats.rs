//! Encrypted disks, disks with a data file, raw or not, and disks with subclusters, on block devices: written while their server is
//! killed, recovered and replaced, made smaller and larger, and read by QEMU.

use lab::{Error, Kernel};

use super::{on_newest, own_transport, said};

const FORMATS: &str = include_str!("../../guest/ublk/formats.sh");

#[test]
fn disks_of_every_kind_outlive_their_servers_and_change_their_size() -> Result<(), Error> {
    on_newest(1, FORMATS, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let transport = format!(r#""transport":"{}""#, own_transport(kernel));
        let made = outcome.lines().filter(|line| line.starts_with("made "));
        assert_eq!(made.filter(|line| line.contains(&transport)).count(), 4, "{all}");
        let devices = "/dev/ublkb0 /dev/ublkb1 /dev/ublkb2 /dev/ublkb3";
        for key in ["recovered ", "replaced "] {
            assert_eq!(count(key), 2, "{all}");
            assert!(value(key).contains(devices), "{key}: {all}");
        }
        for device in 0..4 {
            assert_eq!(count(&format!("worked {device}")), 1, "{all}");
            // The driver has no call for it before Linux 6.16.
            if kernel == Kernel::V6_12 {
                continue;
            }
            let refused = value(&format!("refused {device} "));
            assert!(
                refused.starts_with("1 ") && refused.contains("--force"),
                "{refused}"
            );
            for change in ["smaller", "larger"] {
                assert!(value(&format!("{change} {device} ")).starts_with("0 "), "{all}");
            }
            assert_eq!(count(&format!("zeros {device}")), 1, "{all}");
        }
        for line in [
            "server 0",
            "same locked",
            "same raw",
            "same outside",
            "same apart",
            "same parts",
        ] {
            assert_eq!(count(line), 1, "{line}: {all}");
        }
        assert_eq!(count("sound "), 3, "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
