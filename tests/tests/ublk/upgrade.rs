//! Devices that go from server to server while they are used: no request fails, nothing is lost, and the kernel has nothing to
//! complain of.

use lab::{Error, Kernel, Outcome};

use super::{on_both, on_each_own, said, zero_copy};

/// Servers that follow each other under load, one device with every tag of its queues taken all the time.
const RELAY: &str = include_str!("../../guest/ublk/relay.sh");

#[test]
fn upgrades_under_load_go_unnoticed() -> Result<(), Error> {
    on_both(RELAY, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        // The pairs with servers that are killed have [`super::soak`].
        let relays: &[(&str, usize)] = match kernel {
            Kernel::V6_12 => &[("copy", 2), ("user-copy", 5)],
            Kernel::V7 => &[("zero-copy", 8)],
        };
        for &(transport, rounds) in relays {
            assert_eq!(count(&format!("upgraded {transport} ")), rounds, "{all}");
            for line in [
                "load {} 0",
                "server {} 0",
                "same {} 0",
                "same {} 1",
                "timeout {} 30000",
            ] {
                assert_eq!(count(&line.replace("{}", transport)), 1, "{line}: {all}");
            }
            zero_copy::assert_in_force(transport, outcome);
        }
        let devices = relays.len();
        assert_eq!(count(r#"made {"#), 2 * devices, "{all}");
        assert_eq!(count("flawless q.qcow2"), devices, "{all}");
        assert_eq!(count("remembered 0"), 1, "{all}");
        // On a machine that emulates a slow one; a driver's own timeout would be 30 s.
        let paused = outcome
            .lines()
            .filter_map(|line| line.strip_prefix("paused ")?.strip_suffix(" ms"));
        let slow: Vec<&str> = paused
            .filter(|ms| ms.parse().map_or(true, |ms: u64| ms > 20_000))
            .collect();
        assert!(slow.is_empty(), "{slow:?}: {all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// A device can have another server or not, by what becomes of its I/O without one.
const RECOVERIES: &str = include_str!("../../guest/ublk/recoveries.sh");

/// Conditions that keep a server from being replaced, found before it is asked; and others that do not. No driver has a say in them.
const REFUSALS: &str = include_str!("../../guest/ublk/refusals.sh");

#[test]
fn refused_upgrade_says_why_and_the_server_goes_on() -> Result<(), Error> {
    let script = |kernel| match kernel {
        Kernel::V6_12 => RECOVERIES.to_owned(),
        Kernel::V7 => format!("{RECOVERIES}{REFUSALS}"),
    };
    on_each_own(script, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        let mut refusals = vec![("off ", "/dev/ublkb3 was made with --recovery off")];
        match kernel {
            Kernel::V6_12 => refusals.push(("wait ", "/dev/ublkb3 was made with --recovery wait")),
            Kernel::V7 => {
                refusals.push(("fail ", "/dev/ublkb3 was made with --recovery fail"));
                assert_eq!((count("wait upgraded"), count("wait load 0")), (3, 1), "{all}");
                judge_refusals(outcome);
            }
        }
        assert_refused(outcome, &refusals);
        for line in ["four 0", "flawless c.qcow2"] {
            assert_eq!(count(line), 1, "{line}: {all}");
        }
        assert_eq!(count("works 3"), 2, "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// Each of these is the only line of its name, and names its reason.
fn assert_refused(outcome: &Outcome, refusals: &[(&str, &str)]) {
    let all = said(outcome);
    for (key, text) in refusals {
        let told = outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        assert!(
            told.starts_with("1 ringdisk: ") && told.contains(text),
            "{key}: {told}: {all}"
        );
    }
}

fn judge_refusals(outcome: &Outcome) {
    let all = said(outcome);
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
    let part = "serves /dev/ublkb1 too, and hands over all of its devices or none";
    assert_refused(
        outcome,
        &[
            ("nothing ", "there is no such device"),
            ("part ", part),
            ("missing ", "b.qcow2"),
            ("broken ", "b.qcow2"),
            ("silent ", "does not answer at"),
            ("forgotten ", "there is no saved state with its control socket"),
            ("unserved ", "/dev/ublkb0 has no server to take over from"),
        ],
    );
    assert!(value("none ").starts_with('0'), "{all}");
    assert_eq!(value("threads "), r#""workers":1"#, "{all}");
    assert_eq!(value("background "), "/dev/ublkb0 /dev/ublkb1 ", "{all}");
    for line in ["one 0", "three 0", "flawless a.qcow2", "flawless b.qcow2"] {
        assert_eq!(count(line), 1, "{line}: {all}");
    }
    assert_eq!((count("works 0"), count("works 1")), (4, 4), "{all}");
}
