//! `ctl disk-add` and `disk-remove`: devices come to a running server, and go, while others are worked on.
#![expect(clippy::print_stdout, reason = "a time that was measured is worth a line")]

use super::{on_both, said, told};
use lab::{Error, Kernel, Outcome};

const ADDITIONS: &str = include_str!("../../guest/ublk/additions.sh");
const ATTACH: &str = include_str!("../../guest/ublk/attach.pl");

#[test]
fn devices_come_and_go_while_their_server_runs() -> Result<(), Error> {
    let script = format!("cat >attach.pl <<'END'\n{ATTACH}END\n{ADDITIONS}");
    on_both(&script, judge)
}

fn judge(kernel: Kernel, outcome: &Outcome) {
    let all = said(outcome);
    let told = |key: &str, text: &str| told(outcome, key, text);
    let within = "expected one in a folder of --images: /tmp/work/images";
    told("outside", within);
    // Its name is in the folder, and what it leads to is not.
    assert!(
        told("link", "images/link.qcow2").contains("Permission denied"),
        "{all}"
    );
    told("missing", "images/none.qcow2");
    told("socket", "a block device has no socket");
    told("twice", "are the same file");
    told("used", "/dev/ublkb0 is in use");
    told("unknown", "this server has no device 7");
    for key in [
        "outside", "link", "missing", "socket", "twice", "used", "unknown", "refused", "kept",
    ] {
        told(key, "1 ringdisk: ");
    }
    for key in ["refused", "kept"] {
        told(key, "start it with --images FOLDER, or with --sandbox off");
    }
    for (key, path) in [
        ("first", "/dev/ublkb0"),
        ("second", "/dev/ublkb1"),
        ("again", "/dev/ublkb1"),
        ("third", "/dev/ublkb2"),
        ("any", "/dev/ublkb1"),
    ] {
        assert!(told(key, path).starts_with("0 "), "{key}: {all}");
    }
    let fine = [
        "removed",
        "free",
        "left 2",
        "left 1",
        "left 0",
        "empty",
        "bare",
        "anew",
        "withdrawn",
        "last 0",
        "last 1",
    ];
    for key in fine.iter().chain(&["load", "server", "ended"]) {
        assert!(told(key, "").starts_with('0'), "{key}: {all}");
    }
    let mut took: Vec<u64> = told("attached", "")
        .split_whitespace()
        .map(|us| us.parse().expect("microseconds"))
        .collect();
    took.sort_unstable();
    assert_eq!(took.len(), 10, "{all}");
    println!(
        "{kernel:?}: a device answers {} µs after its request, {} to {} in ten rounds",
        took[5], took[0], took[9]
    );
    told("node", "gone");
    told("nowhere", "/dev/ublkb0");
    told("by-id", "gone");
    assert_eq!(told("unconfined", "").trim(), "disks", "{all}");
    assert_eq!(told("recovered", "").trim(), "/dev/ublkb0 /dev/ublkb1", "{all}");
    assert_eq!(
        told("upgraded", "").trim(),
        "/dev/ublkb0 /dev/ublkb1 /dev/ublkb2",
        "{all}"
    );
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
}
