//! Operation of devices: names that stay, a command line that goes on where a killed server was, and
//! limits that devices share.

use super::{newest, on_both, on_newest, run_in, said};
use lab::nested::Toolbox;
use lab::{Error, Kernel, Outcome, Scratch};
use std::path::{Path, PathBuf};

const OPERATIONS: &str = include_str!("../../guest/ublk/operations.sh");

#[test]
fn names_persist_one_command_recovers_and_limits_are_shared() -> Result<(), Error> {
    on_newest(1, OPERATIONS, |_, outcome| {
        let all = said(outcome);
        let lines = |key: &str| -> Vec<String> {
            let lines = outcome.lines().filter_map(|line| line.strip_prefix(key));
            lines.map(|line| line.trim().to_owned()).collect()
        };
        let both = [
            r"ringdisk-DATA ../../ublkb0",
            r"ringdisk-x\x20y\x2fz ../../ublkb1",
        ];
        assert_eq!(lines("link all "), both, "{all}");
        assert_eq!(lines("link again "), both, "made again: {all}");
        assert_eq!(
            lines("told "),
            ["ublkb3 has no link ringdisk-DATA: /dev/ublkb0 has the same serial number"],
            "{all}"
        );
        assert_eq!(lines("link fewer "), both[1..], "{all}");
        assert_eq!(lines("link none "), Vec::<String>::new(), "{all}");
        // From Linux 6.15 on: before, whoever waits for a ring with a command in it counts as waiting for I/O.
        let io_wait: u32 = lines("io_wait ")[0].parse().unwrap_or(u32::MAX);
        assert!(io_wait < 40, "an idle server waits for I/O: {all}");
        assert_eq!(lines("link after "), ["ringdisk-DATA ../../ublkb7"], "{all}");

        let said = |key: &str, text: &str| {
            let found = lines(key);
            assert!(
                found.len() == 1 && found[0].contains(text),
                "{key}: {text}: {all}"
            );
        };
        said("served ", "1 ringdisk: /dev/ublkb7 is served by process");
        said(
            "another ",
            "1 ringdisk: /dev/ublkb7 waits for a server of another disk (path=a.qcow2",
        );
        assert_eq!(lines("again "), ["/dev/ublkb7 /dev/ublkb8"; 3], "{all}");
        for key in ["deleted ", "load ", "server ", "gone ", "shared "] {
            said(key, "0");
        }
        said("before ", "/dev/ublkb7 dead");
        said("after ", "/dev/ublkb7 live");

        assert_counted(outcome);
        for (key, text) in [
            ("ctl listed ", "/dev/ublkb0"),
            ("ctl flushed ", "done"),
            ("ctl made ", "snapshot"),
            ("ctl deleted ", "done"),
            ("ctl compacted ", "running"),
            ("ctl again ", "running"),
            ("ctl counted ", "idle"),
            ("ctl stopped ", "stopping"),
        ] {
            said(key, text);
            said(key, "0 ");
        }
        said("ctl refused ", "1 ringdisk: a ublk server cannot do `pause`");
        assert_eq!(lines("ctl left"), [""], "{all}");
        said("flawless ", "c.qcow2");
        said("metrics taken ", "/tmp/metrics");

        said("unknown ", "rate_limit_group=fast");
        for key in ["rate together ", "rate recovered "] {
            let rate: f64 = lines(key)[0].parse().unwrap_or_default();
            // What both have at once, while each alone could have it all.
            assert!((7.03..8.60).contains(&rate), "{key}{rate}: {all}");
        }
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// Asserts that a server and its successor have counted what fio has: the kernel may merge a few requests.
fn assert_counted(outcome: &Outcome) {
    let all = said(outcome);
    for name in ["first", "next"] {
        let key = format!("counted {name} ");
        let line = outcome.value(&key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let numbers: Vec<f64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let &[reads, clusters_read, writes, fio_reads, fio_writes] = &numbers[..] else {
            panic!("{line}: {all}");
        };
        assert!(fio_reads > 1000.0 && fio_writes > 200.0, "{line}: {all}");
        assert!(
            (fio_reads * 0.99..=fio_reads).contains(&reads),
            "{name}: {line}: {all}"
        );
        assert!(
            (fio_writes * 0.99..=fio_writes).contains(&writes),
            "{name}: {line}: {all}"
        );
        assert_eq!(clusters_read, fio_reads, "{name}: bytes read: {line}: {all}");
        assert_eq!(outcome.value(&format!("errors {name} ")), Some("0"), "{all}");
    }
    assert_eq!(outcome.value("counted 0"), Some(""), "{all}");
}

/// udev itself, from this machine: its daemon, its tool, and its rule for names by what is in a disk.
fn udev() -> [PathBuf; 3] {
    let folders: Vec<PathBuf> =
        std::env::var_os("PATH").map_or(Vec::new(), |path| std::env::split_paths(&path).collect());
    let daemons = ["/usr/lib/systemd", "/lib/systemd"].map(PathBuf::from);
    let find = |name: &str| {
        let places = folders.iter().chain(&daemons).map(|folder| folder.join(name));
        let found = places.into_iter().find(|place| place.is_file());
        found.unwrap_or_else(|| panic!("{name} is needed by this test (tests/setup.sh installs udev)"))
    };
    let tool = find("udevadm");
    let rules = tool.with_file_name("../lib/udev/rules.d/60-persistent-storage.rules");
    [find("systemd-udevd"), tool, rules]
}

const UDEV: &str = include_str!("../../guest/ublk/udev.sh");

#[test]
fn udev_names_devices_and_reads_only_allowed_contents() -> Result<(), Error> {
    let [daemon, tool, rules] = udev();
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    let ((_, lab), scratch) = (newest(), Scratch::new()?);
    let tools = |tools: Toolbox| {
        tools
            .program(&daemon, "systemd-udevd")?
            .program(&tool, "udevadm")?
            .file(&rules)?
            .file(&packaging.join("59-ringdisk.rules"))?
            .file(&packaging.join("60-ringdisk.rules"))?
            .file(&packaging.join("60-ringdisk-users.rules"))
    };
    let outcome = run_in(&lab, &scratch, 1, UDEV, tools, |guest| guest)?;
    judge_udev(&outcome);
    Ok(())
}

fn judge_udev(outcome: &Outcome) {
    let all = said(outcome);
    let lines = |key: &str| -> Vec<&str> {
        outcome
            .lines()
            .filter_map(|line| line.strip_prefix(key))
            .collect()
    };
    let both = [
        r"ringdisk-DATA ../../ublkb0",
        r"ringdisk-x\x20y\x2fz ../../ublkb1",
    ];
    for key in ["link all ", "link orphans ", "link again "] {
        assert_eq!(lines(key), both, "{key}: {all}");
    }
    let partition = "ringdisk-DATA-part1 ../../ublkb0p1";
    assert_eq!(lines("link partition "), [both[0], partition], "{all}");
    assert_eq!(lines("owner "), ["/dev/ublkb0 1000", "/dev/ublkc0 1000"], "{all}");
    assert_eq!(lines("user "), ["0"], "{all}");
    // The first shows that the rule is needed.
    assert_eq!(
        lines("contents "),
        ["unprotected read", "protected unread", "allowed read"],
        "{all}"
    );
    for key in ["unprotected", "protected", "allowed"] {
        assert_eq!(lines(&format!("link contents-{key} ")), both[..1], "{key}: {all}");
    }
    for key in ["link none ", "link end "] {
        assert_eq!(lines(key), Vec::<&str>::new(), "{key}: {all}");
    }
}

/// A count of the threads inside the sandbox, and a try of everything that must work there.
const SANDBOX: &str = include_str!("../../guest/ublk/sandbox.sh");

#[test]
fn server_threads_drop_every_unneeded_privilege() -> Result<(), Error> {
    on_both(SANDBOX, |kernel, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let transport = super::own_transport(kernel);
        let key = format!("threads {transport} ");
        let threads = outcome.lines().filter_map(|line| line.strip_prefix(&key));
        let threads: Vec<Vec<u32>> = threads
            .map(|counts| counts.split(' ').filter_map(|count| count.parse().ok()).collect())
            .collect();
        assert_eq!(threads.len(), 2, "{all}");
        for counts in threads {
            // Workers of four queues, who accepts, who waits for signals, and the main thread.
            assert!(counts[0] >= 7 && counts[0] == counts[1], "{transport}: {all}");
        }
        super::zero_copy::assert_in_force(transport, outcome);
        let grown = value(&format!("grown {transport} "));
        assert_eq!(grown.starts_with("0 134217728"), kernel == Kernel::V7, "{all}");
        assert!(value(&format!("deleted {transport} ")).starts_with('0'), "{all}");
        let lines = [
            format!("server {transport} 0"),
            format!("kept {transport}"),
            format!("unnamed {transport}"),
        ];
        for line in lines {
            assert!(outcome.lines().any(|said| said == line), "{line}: {all}");
        }
        let logged: Vec<&str> = outcome
            .lines()
            .filter(|line| line.starts_with("logged "))
            .collect();
        assert_eq!(logged, Vec::<&str>::new(), "nothing was refused: {all}");
        assert_eq!(value("remembered "), "0", "{all}");
        assert!(value("threads off ").ends_with(" 0"), "it can be seen: {all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
