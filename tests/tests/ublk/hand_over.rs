//! Hand-overs that do not go as they should: a successor that dies when the old server has left already, one of several
//! servers that dies meanwhile, I/O of the old server that takes long, servers that hand over in another way. Devices wait,
//! nobody sees an error, and nothing of an old server comes after the new one.

use lab::{Error, Kernel, Outcome};

use super::{on_each_own, said};

/// Three servers with three devices each. The images of the second and the third one are on a file system that can be frozen: what is
/// written to them is under way then, in the kernel, until it thaws.
const SERVERS: &str = include_str!("../../guest/ublk/servers.sh");

const FROZEN: &str = include_str!("../../guest/ublk/frozen.sh");
const DEATHS: &str = include_str!("../../guest/ublk/deaths.sh");
const VERSIONS: &str = include_str!("../../guest/ublk/versions.sh");
const END: &str = include_str!("../../guest/ublk/servers_end.sh");

/// Writes that are under way when the next server comes are waited for by our programs, and so do versions and managers meet them:
/// each of these on one kernel. Which moments a successor dies in is the driver's affair.
fn script(kernel: Kernel) -> String {
    let own = match kernel {
        Kernel::V6_12 => format!("{FROZEN}{DEATHS}"),
        Kernel::V7 => format!("{DEATHS}{VERSIONS}"),
    };
    format!("{SERVERS}{own}{END}")
}

fn count(outcome: &Outcome, wanted: &str) -> usize {
    outcome.lines().filter(|line| line.starts_with(wanted)).count()
}

/// Writes that the old server has begun, and that take long.
fn judge_frozen(outcome: &Outcome) {
    let all = said(outcome);
    let once = |line: &str| assert_eq!(count(outcome, line), 1, "{line}: {all}");
    // Nothing of the new server came before the end of the old one, nor of the old one after.
    once("early 0");
    assert_eq!(count(outcome, "slow left"), 2, "{all}");
    for line in [
        "slow waits",
        "slow written",
        "holds A slow",
        "holds B slow",
        "lost ",
    ] {
        once(line);
    }
    for line in ["killed waits", "killed written", "holds C killed"] {
        once(line);
    }
    for line in ["late waits", "late written", "holds D late", "late told"] {
        once(line);
    }
    for name in ["all", "killed", "late"] {
        once(&format!("served {name} 9"));
    }
}

/// Servers and successors of other versions, and what a service manager hears.
fn judge_versions(outcome: &Outcome) {
    let all = said(outcome);
    let once = |line: &str| assert_eq!(count(outcome, line), 1, "{line}: {all}");
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    for key in ["other ", "older "] {
        let told = value(key);
        assert!(told.starts_with("1 ringdisk: process "), "{key}: {told}");
        assert!(
            told.contains("has another version of the hand-over protocol"),
            "{key}: {told}"
        );
    }
    let refused = r#""ok":false"#;
    assert!(
        value("version ").contains("supports hand-over version 2, not 1"),
        "{all}"
    );
    assert!(
        value("version ").contains(refused)
            && value("part ").contains(refused)
            && value("part ").contains("hands over all of its devices or none"),
        "{all}"
    );

    assert!(
        value("busy ").starts_with("1 ") && value("busy ").contains("not now"),
        "{all}"
    );
    once("served kept 9");
    assert!(
        value("reload ").starts_with("0 /dev/ublkb0 /dev/ublkb1 "),
        "{all}"
    );
    once("gone reload");
    // Whoever fails with devices that were left to it is the service that has failed.
    let heard = value("heard ").trim();
    assert_eq!(heard, "MAINPID=OTHER MAINPID=OLD MAINPID=NEW READY", "{all}");
    assert_eq!(value("parent "), "1", "a manager hears of its end: {all}");
    once("served reloaded 9");
    assert!(
        value("nobody ").starts_with("1 ringdisk: process ") && value("nobody ").contains("serves no device"),
        "{all}"
    );
    once("served on 9");
}

#[test]
fn devices_outlive_any_failed_successor_without_late_writes() -> Result<(), Error> {
    on_each_own(script, |kernel, outcome| {
        let all = said(outcome);
        let once = |line: &str| assert_eq!(count(outcome, line), 1, "{line}: {all}");
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        // After how many ms a successor dies, and how many recoveries do.
        let (moments, dead): (&[_], _) = match kernel {
            Kernel::V6_12 => (&["000", "060", "300"], 2),
            Kernel::V7 => (&["020", "150"], 1),
        };
        assert_eq!(count(outcome, "left"), 3 + moments.len(), "{all}");
        for (name, devices) in [("several", 9), ("a", 3), ("b", 3), ("c", 3)] {
            once(&format!("served {name} {devices}"));
        }
        for ms in moments {
            once(&format!("served {ms} 9"));
        }
        once("orphaned by ");
        assert_eq!(value("unserved ").trim(), "9 quiesced", "{all}");
        let told = value("upgraded ");
        assert!(
            told.starts_with("1 ringdisk: /dev/ublkb0 has no server to take over from"),
            "{told}"
        );

        match kernel {
            Kernel::V6_12 => judge_frozen(outcome),
            Kernel::V7 => judge_versions(outcome),
        }

        once("load 0");
        once("server 0");
        assert_eq!(
            (count(outcome, "same "), count(outcome, "sound ")),
            (9, 10),
            "{all}"
        );
        // Drivers before 6.15 are not told of the alignment of memory.
        let align = if kernel == Kernel::V6_12 { 3 } else { 511 };
        let limits = format!(
            "logical_block_size 512 max_hw_sectors_kb 1024 dma_alignment {align} optimal_io_size 16384 \
             discard_granularity 16384 fua 1 chunk_sectors 0 write_cache write back"
        );
        assert_eq!(value("limits ").trim(), limits, "{all}");
        assert_eq!(value("timeouts ").trim(), "9 30000", "{all}");
        let workers = value("workers ").trim();
        let all_are = workers
            .strip_suffix(" flusher")
            .and_then(|count| count.parse::<usize>().ok());
        assert!(all_are.is_some_and(|count| count >= 9), "{workers}: {all}");
        assert_eq!(
            (count(outcome, "removed 0"), count(outcome, "remaining 0")),
            (dead, 1),
            "{all}"
        );
        assert_eq!(count(outcome, "resumed 0 "), dead, "{all}");
        once("errors 0");
        let failed = value("failed ")
            .strip_suffix(" s")
            .and_then(|told| told.split_once(" in "));
        let (failed, seconds) = failed.unwrap_or_else(|| panic!("{all}"));
        assert!(["2", "3"].contains(&failed), "one may have been answered: {all}");
        assert!(seconds.parse::<u64>().is_ok_and(|seconds| seconds < 15), "{all}");
        // Those three were told.
        let told = |line: &&&str| !(line.contains("I/O error") && line.contains("dev ublkb0"));
        let complaints = outcome.complaints();
        let others: Vec<_> = complaints.iter().filter(told).collect();
        assert!(others.is_empty(), "{others:?}: {}", outcome.console());
    })
}
