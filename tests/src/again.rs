//! Tests that were begun a second time because their emulator failed.
//!
//! A retry can hide a fault of the program under test. So each one says its reason in a line that
//! `tests/summary.sh` counts, and more than two such tests in a run of the suite are a failure.

use std::thread;

/// The start of the line that says that a test was begun again; `tests/summary.sh` looks for it.
const MARK: &str = "begun again: ";

/// Reports that the current test starts over, because of `reason`; the end of what was said follows as `log`.
#[expect(clippy::print_stderr, reason = "a retry is counted by the line it prints")]
pub fn begun_again(reason: &str, log: &str) {
    eprintln!("{}", line(&test_name(), reason));
    eprintln!("{log}");
}

/// The name of the current test: the test harness names its threads so.
#[must_use]
pub fn test_name() -> String {
    thread::current().name().unwrap_or("a test").to_owned()
}

fn line(test: &str, reason: &str) -> String {
    // One line, whatever the reason contains: it is what gets counted.
    let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("{MARK}{test}, because {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_names_the_test_and_stays_one_line() {
        assert_eq!(
            line(&test_name(), "it\nstood  still"),
            "begun again: again::tests::line_names_the_test_and_stays_one_line, because it stood still"
        );
    }
}
