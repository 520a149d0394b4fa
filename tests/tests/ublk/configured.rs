//! `ringdisk serve` of block devices: they are what a file says, whatever becomes of their server.

use super::{CPUS, on_newest, said, told};
use lab::{Error, Outcome};

const CONFIGURED: &str = include_str!("../../guest/ublk/configured.sh");

#[test]
fn devices_follow_a_file_through_reloads_kills_and_takeovers() -> Result<(), Error> {
    on_newest(CPUS, CONFIGURED, |_, outcome| judge(outcome))
}

fn judge(outcome: &Outcome) {
    let all = said(outcome);
    let told = |key: &str, text: &str| told(outcome, key, text);
    let is = |key: &str, text: &str| assert_eq!(told(key, "").trim(), text, "{key}: {all}");
    for key in ["checked", "asked", "load", "server", "old"] {
        assert!(told(key, "").starts_with('0'), "{key}: {all}");
    }
    is("first", "/dev/ublkb0 /dev/ublkb3");
    told(
        "reload",
        r#""added":["c"],"changed":["a"],"ok":true,"removed":[]"#,
    );
    is("then", "0 1 3");
    told("limits", r#""bw_size":1000000000"#);
    told("group", r#""bw_size":2147483648"#);
    for (key, problem) in [
        (
            "recovery",
            "devices.toml:17: `recovery` of disk b cannot change while it is served",
        ),
        (
            "direct",
            "devices.toml:13: `direct` of disk a cannot change while it is served",
        ),
        (
            "outside",
            "devices.toml:18: its sandbox allows no image at /tmp/work/images/../outside.qcow2; expected one in a folder of --images",
        ),
        (
            "link",
            "link.qcow2: Permission denied (os error 13); the rest of the file is in effect",
        ),
        ("used", "cannot remove disk b: /dev/ublkb0 is in use"),
        (
            "queues",
            "`num_queues` of disk a cannot change, as it has a device already, /dev/ublkb3",
        ),
        (
            "nobody",
            "no server to take over from answers at /tmp/work/control",
        ),
    ] {
        assert!(told(key, problem).starts_with("1 "), "{key}: {all}");
    }
    is("still", "0 3");
    is("gone", "1 3");
    // d was asked for, and c is not in the file any more.
    is("again", "0 2 3");
    is("next", "0 1 2 3");
    let disk = "id=a,num_queues=2,path=/tmp/work/images/a.qcow2,serial=DATA";
    is("opened", &format!("direct=on,{disk}"));
    is("disk", disk);
    told("emptied", "0 ");
    told("withdrawn", "0 ");
    is("empty", "[]");
    is("last", "/dev/ublkb0");
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
}
