//! Instructions of a program, counted by valgrind: they do not depend on what else the machine does.

use std::io;
use std::process::Command;

/// The environment variable that has the program run only so many rounds of something, to be counted: its name and the number.
const COUNTED: &str = "RINGDISK_COUNTED";

/// Returns what this process is to run rounds of, and how many, if it is the one whose instructions are counted.
pub(crate) fn counted() -> Option<(String, u32)> {
    let counted = std::env::var(COUNTED).ok()?;
    let (name, rounds) = counted.split_once(' ')?;
    Some((name.to_owned(), rounds.parse().ok()?))
}

/// Returns the instructions of one round of `name`: those that the second number of rounds takes more than the first, divided by
/// the difference. This program is run for both, and finds what to run in [`counted`].
///
/// # Errors
///
/// If there is no valgrind, or the program fails under it; with what it printed.
pub(crate) fn per_round(name: &str, [few, many]: [u32; 2]) -> io::Result<f64> {
    let count = |rounds| instructions(name, rounds);
    Ok((count(many)? - count(few)?) / f64::from(many - few))
}

fn instructions(name: &str, rounds: u32) -> io::Result<f64> {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    command.arg(std::env::current_exe()?);
    command.env(COUNTED, format!("{name} {rounds}"));
    let output = command.output().map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot start valgrind: {error}; install it"),
        )
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    let found = collected(&said).filter(|_| output.status.success());
    found.ok_or_else(|| {
        io::Error::other(format!(
            "valgrind counts nothing of {name} ({}): {said}",
            output.status
        ))
    })
}

/// Reads `==7== Collected : 12345`.
fn collected(said: &str) -> Option<f64> {
    let collected = said.lines().find_map(|line| line.split("Collected : ").nth(1));
    collected?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    // Not `use super::*`: a benchmark without a harness has no tests, and would not use it.
    #[test]
    fn collected_is_read_from_among_notes() {
        assert_eq!(
            super::collected("==7== Events    : Ir\n==7== Collected : 12345\n"),
            Some(12345.0)
        );
        assert_eq!(super::collected("valgrind: no such program"), None);
    }
}
