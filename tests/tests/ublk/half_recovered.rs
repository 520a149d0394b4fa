//! Recoveries that stop half way: some queues of a device have a server that has died at once, others have none. Drivers
//! before 6.15 do not bear it that another server begins then: Linux 6.12 follows a null pointer, and the device hangs until
//! the machine is restarted.

use lab::Error;

use super::{on_both, own_transports, said};

/// A server that may open only so many files comes to an end at another step with each number: in the end, none has been
/// spared.
const HALVES: &str = include_str!("../../guest/ublk/half_recovered.sh");

#[test]
fn interrupted_recovery_is_completed_by_the_next() -> Result<(), Error> {
    on_both(HALVES, |kernel, outcome| {
        let all = said(outcome);
        for transport in own_transports(kernel) {
            let files = outcome.value(&format!("files {transport} "));
            let files = files.and_then(|files| files.parse::<u32>().ok());
            assert!(files.is_some_and(|files| files < 60), "{transport}: {all}");
            // Between the queues, too.
            let half = outcome.value(&format!("half {transport} "));
            let half = half.and_then(|half| half.parse::<u32>().ok());
            assert!(half.is_some_and(|half| half > 0), "{transport}: {all}");
            assert!(
                outcome.value(&format!("recovered {transport}")).is_some(),
                "{transport}: {all}"
            );
        }
        let removed = outcome.lines().filter(|line| line.starts_with("removed 0 "));
        assert_eq!(removed.count(), own_transports(kernel).len(), "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
