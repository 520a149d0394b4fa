//! Many devices of one server, killed and recovered with I/O under way; a server that fails to recover; what I/O sees in each
//! mode of recovery; and commands that hang in the kernel.

use super::said;
use lab::{Error, Kernel, Outcome};

/// Functions with which the scripts measure.
const CLOCK: &str = include_str!("../../guest/ublk/clock.sh");

/// Sixteen devices with four queues each, all of them busy when the server is killed. The driver makes no more queues than the guest
/// has CPUs.
const MANY: &str = include_str!("../../guest/ublk/many.sh");

/// Reads in the modes of recovery that do nothing again.
const MODES: &str = include_str!("../../guest/ublk/modes.sh");

/// A command that the kernel holds, because a server does not answer.
const HANG: &str = include_str!("../../guest/ublk/hang.sh");

/// The milliseconds of a line that begins with `key`.
fn ms(outcome: &Outcome, key: &str) -> u64 {
    let value = outcome.value(key).and_then(|value| value.split(' ').next());
    value
        .and_then(|value| value.parse().ok())
        .unwrap_or_else(|| panic!("no {key:?}: {}", said(outcome)))
}

/// The bounds are for machines that do other things too; `make bench` measures.
#[test]
fn many_busy_devices_recover_together_and_soon() -> Result<(), Error> {
    super::on_newest(4, &format!("{CLOCK}{MANY}"), |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        assert!(
            outcome
                .value("info ")
                .is_some_and(|info| info.contains(r#""queues":4"#)),
            "{all}"
        );
        let how = super::own_transport(kernel);
        for (what, most) in [
            ("added", 20_000),
            ("quiesced", 30_000),
            ("recovered", 20_000),
            ("closed", 20_000),
        ] {
            let took = ms(outcome, &format!("{what} {how} "));
            assert!(took < most, "{what} {how}: {took} ms: {all}");
        }
        assert_eq!(count(&format!("loads {how} 16")), 1, "{all}");
        assert_eq!(count(&format!("same {how}")), 1, "{all}");
        assert_eq!(outcome.value("left "), Some("0"), "{all}");
        let other = outcome.value("other ").unwrap_or_default();
        assert!(
            other.starts_with("1 ringdisk: ") && other.contains("is it the right image?"),
            "{all}"
        );
        assert_eq!(
            (count("still waiting"), count("answered"), count("server 0")),
            (1, 1, 1),
            "{all}"
        );
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

#[test]
fn io_without_a_server_waits_or_fails_by_mode() -> Result<(), Error> {
    super::on_both(&format!("{CLOCK}{MODES}"), |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        let modes: &[&str] = if kernel == Kernel::V7 {
            &["wait", "fail"]
        } else {
            &["wait"]
        };
        assert_eq!(outcome.value("modes "), Some(modes.join(" ").as_str()), "{all}");
        for mode in modes {
            assert!(
                ms(outcome, &format!("failed {mode} ")) > 0,
                "what was under way fails: {all}"
            );
            assert_eq!(
                (count(&format!("good {mode}")), count(&format!("server {mode}"))),
                (1, 1),
                "{all}"
            );
        }
        assert_eq!((count("waits wait"), count("then wait")), (1, 1), "{all}");
        if kernel == Kernel::V7 {
            let refused = outcome.value("refused fail ").unwrap_or_default();
            assert!(
                refused.starts_with("1 ") && refused.contains("I/O error"),
                "{all}"
            );
        }
        assert_eq!(count("flawless"), modes.len(), "{all}");
        // Whoever was failed is told so; nothing else went wrong.
        let told = |line: &&&str| !(line.contains("I/O error") && line.contains("dev ublkb"));
        let complaints = outcome.complaints();
        let others: Vec<_> = complaints.iter().filter(told).collect();
        assert!(others.is_empty(), "{others:?}");
    })
}

/// A removal waits in the kernel for a server that does not answer, and other commands wait for the removal.
#[test]
fn hung_kernel_command_is_reported_and_the_program_ends() -> Result<(), Error> {
    // It waits for the kernel all the time, and leaves the machine's other CPUs to other guests.
    super::on_newest(1, &format!("{CLOCK}{HANG}"), |_, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        for (who, command, seconds) in [("del", "STOP_DEV", 60), ("list", "GET_PARAMS", 20)] {
            let told = outcome.value(&format!("{who} ")).unwrap_or_default();
            let line = format!("1 ringdisk: {command} of /dev/ublkb0 failed (the kernel hangs: see its log");
            assert!(told.starts_with(&line), "{who}: {all}");
            assert!(
                told.contains(&format!("no answer in {seconds} s")),
                "{who}: {all}"
            );
        }
        assert!(ms(outcome, "ended after ") < 90_000, "{all}");
        assert_eq!(
            (count("server 0"), count("left 0"), count("after 0")),
            (1, 1, 1),
            "{all}"
        );
        assert_eq!(count("flawless"), 1, "{all}");
    })
}
