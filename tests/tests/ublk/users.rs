//! Devices of users without rights, where the machine lets them: one who asks for a device owns it, and nobody else's.

use super::{CPUS, on_newest, said};
use lab::Error;

const USERS: &str = include_str!("../../guest/ublk/users.sh");

#[test]
fn unprivileged_user_gets_a_device_if_allowed() -> Result<(), Error> {
    on_newest(CPUS, USERS, |_, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        for (key, text) in [
            ("closed ", "1 ringdisk: no permission to open /dev/ublk-control"),
            (
                "transport ",
                "an unprivileged user's device supports --transport copy only, not user-copy",
            ),
            ("made ", r#""transport":"copy""#),
            ("owners ", "0 0 1000 1000"),
            ("theirs ", "/dev/ublkb1 live 67108864 bytes, 2 queues of 128"),
            ("info ", "UNPRIVILEGED_DEV"),
            ("info ", r#""recovery":"off""#),
            ("foreign ", "1 ringdisk: "),
            ("roots ", "1 ringdisk: "),
            ("deleted ", "0 "),
            ("ungiven ", "1 ringdisk: "),
            (
                "ungiven ",
                "cannot open /dev/ublkc1 (run as root, or install the udev rules for users",
            ),
            ("swept ", "0 "),
            ("left ", "0"),
        ] {
            assert!(value(key).contains(text), "{key}: {text}: {all}");
        }
        for line in ["verified 0", "server 0", "same 0", "flawless /tmp/user/a.qcow2"] {
            assert!(outcome.lines().any(|said| said == line), "{line}: {all}");
        }
        let count = |key: &str| outcome.lines().filter(|line| line.starts_with(key)).count();
        assert_eq!((count("theirs "), count("all ")), (1, 2), "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
