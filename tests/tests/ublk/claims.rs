//! The image of a device that waits for a server is nobody else's to write.

use super::{on_newest, said};
use lab::{Error, Outcome};

const CLAIMS: &str = include_str!("../../guest/ublk/claims.sh");

#[test]
fn claimed_image_cannot_be_written_by_others() -> Result<(), Error> {
    on_newest(1, CLAIMS, |_, outcome| judge(outcome))
}

fn judge(outcome: &Outcome) {
    let all = said(outcome);
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    let way_out = "which waits for a server: `ringdisk ublk recover 0`, or `ringdisk ublk del 0`";
    for key in ["link ", "vhost-user ", "later ", "io ", "repair ", "waits "] {
        let told = value(key);
        assert!(
            told.starts_with("1 ringdisk: ")
                && told.contains("is the disk of /dev/ublkb0")
                && told.contains(way_out),
            "{key}: {told}: {all}"
        );
    }
    // The server may still be ending.
    let again = value("again ");
    assert!(
        again.starts_with("1 ringdisk: data.qcow2 is") && again.contains("the disk of /dev/ublkb0"),
        "{all}"
    );
    let base = value("base ");
    assert!(
        base.starts_with("1 ringdisk: ") && base.contains("a backing file of the disk of /dev/ublkb0"),
        "{all}"
    );
    assert!(value("served ").contains("locked"), "{all}");
    for key in [
        "read ", "gone ", "taken ", "deleted ", "free ", "fsck ", "server ",
    ] {
        assert!(value(key).starts_with('0'), "{key}: {all}");
    }
    assert_eq!(value("devices "), "1", "{all}");
    let late = value("late ");
    assert!(
        late.starts_with("1 1 ") && late.contains("stopped before"),
        "{late}: {all}"
    );
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
}
