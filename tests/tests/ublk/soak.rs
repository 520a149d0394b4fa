//! Devices that come, work, are killed, go on and go, again and again; and a server that works through all of it, and must
//! not grow. `make soak-ublk SECONDS=…` does it for as long as it is told.

use std::time::Duration;

use super::{newest, on_each, run_in, said};
use lab::{Error, Kernel, Lab, Scratch};

/// The seconds that it takes unless it is told, in the newest kernel alone. Servers that are killed have tests of their own in each.
const SHORT: u64 = 10;
/// The growth allowed to the long-lived server's memory, in KiB: its allocator's doing.
const GROWTH_KIB: u64 = 6 << 10;

const SOAK: &str = include_str!("../../guest/ublk/soak.sh");

/// The numbers of a line.
fn numbers(line: &str) -> Vec<u64> {
    line.split(' ').filter_map(|word| word.parse().ok()).collect()
}

#[test]
#[expect(
    clippy::print_stdout,
    reason = "what was counted is what somebody who soaks wants to know"
)]
fn soaked_devices_lose_no_data_and_the_server_does_not_grow() -> Result<(), Error> {
    let seconds = std::env::var("RINGDISK_SOAK_SECONDS").ok();
    let asked: Option<u64> = seconds.and_then(|seconds| seconds.parse().ok());
    let seconds = asked.unwrap_or(SHORT);
    let soak = |kernel: Kernel, lab: &Lab| {
        let scratch = Scratch::new()?;
        let script = format!("seconds={seconds}\n{SOAK}");
        let patience = Duration::from_secs(480 + 2 * seconds);
        let outcome = run_in(lab, &scratch, 2, &script, Ok, |guest| guest.patience(patience))?;
        let all = said(&outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let (before, after) = (numbers(value("grown before ")), numbers(value("grown after ")));
        println!("{kernel:?}: {}; {before:?} to {after:?}", value("soaked "));
        let ([rss, files, threads], [rss_after, files_after, threads_after]) = (&before[..], &after[..])
        else {
            panic!("no numbers: {all}");
        };
        assert!(
            *rss_after <= rss + GROWTH_KIB,
            "memory in KiB: {rss} to {rss_after}: {all}"
        );
        assert_eq!(
            (files, threads),
            (files_after, threads_after),
            "descriptors and threads: {all}"
        );
        for (key, wanted) in [("keeper ", "0"), ("left ", "0"), ("remembered ", "0")] {
            assert_eq!(value(key), wanted, "{key}: {all}");
        }
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
        Ok(())
    };
    if asked.is_some() {
        return on_each(soak);
    }
    let (kernel, lab) = newest();
    soak(kernel, &lab)
}
