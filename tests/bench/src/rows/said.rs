//! The measurements that a guest's script reports: lines `@ WHO FIGURE NUMBER`, one for each turn, and `@missing WHO REASON` for a
//! peer that takes no turns, or no more.
#![expect(clippy::print_stderr, reason = "a run that is begun again says so")]

use std::collections::BTreeMap;
use std::fs;
use std::io;

use lab::nested::Nested;

use crate::report::{Entry, median};

/// Figures by who and what: one for each turn; and who is missing, with the reason.
#[derive(Debug, Default)]
pub(crate) struct Said {
    figures: BTreeMap<(String, String), Vec<f64>>,
    missing: BTreeMap<String, String>,
}

impl Said {
    /// Adds the figures among these lines.
    fn add<'a>(&mut self, lines: impl Iterator<Item = &'a str>) {
        for line in lines {
            if let Some((who, reason)) = line
                .strip_prefix("@missing ")
                .and_then(|line| line.split_once(' '))
            {
                self.missing.insert(who.to_owned(), reason.trim().to_owned());
            }
            let Some(line) = line.strip_prefix("@ ") else {
                continue;
            };
            let mut words = line.split(' ').map(str::to_owned);
            if let (Some(who), Some(what), Some(Ok(figure))) =
                (words.next(), words.next(), words.next().map(|word| word.parse()))
            {
                self.figures.entry((who, what)).or_default().push(figure);
            }
        }
    }

    /// The figures of a test.
    #[cfg(test)]
    pub(crate) fn of_lines<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let mut said = Self::default();
        said.add(lines);
        said
    }

    /// The reason why somebody takes no turns any more, with their name.
    pub(crate) fn missing(&self, who: &str) -> Option<String> {
        self.missing.get(who).map(|reason| format!("{who}: {reason}"))
    }

    /// The median of a figure.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub(crate) fn median(&self, who: &str, what: &str) -> io::Result<f64> {
        Ok(median(self.turns(who, what)?.iter().copied()))
    }

    /// A figure of each turn.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub(crate) fn turns(&self, who: &str, what: &str) -> io::Result<&[f64]> {
        let figures = self.figures.get(&(who.to_owned(), what.to_owned()));
        figures
            .map(Vec::as_slice)
            .ok_or_else(|| io::Error::other(format!("{who} has told no {what}")))
    }
}

/// An error of the lab as one of the benchmark.
pub(crate) fn failed(error: lab::Error) -> io::Error {
    io::Error::other(format!("{error:?}"))
}

/// Runs the guest of a row, and returns the figures it reported, with the reason if these are not all.
///
/// An emulated guest with real KVM panics now and then. Then it is run once more, and if it fails again, what both
/// runs reported is kept.
///
/// # Errors
///
/// If anything else fails.
pub(crate) fn run(row: &str, nested: &Nested<'_>) -> io::Result<(Said, Option<String>)> {
    let mut said = Said::default();
    let mut last = None;
    for attempt in 1..=2 {
        match nested.run() {
            Ok((outcome, _)) => {
                let mut said = Said::default();
                said.add(outcome.lines());
                return Ok((said, None));
            }
            Err(error) if error.is_of_whole_guest() => {
                eprintln!("{row}: its guest has failed, attempt {attempt} of 2: {error:?}");
                let results = fs::read_to_string(nested.results()).unwrap_or_default();
                said.add(results.lines());
                last = Some(error.to_string().lines().next().unwrap_or_default().to_owned());
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok((said, last))
}

/// The entries of a row. One whose figures were not reported is left out, and named.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    kept: Vec<Entry>,
    missing: Vec<String>,
}

impl Entries {
    /// Adds an entry.
    pub(crate) fn add(&mut self, entry: io::Result<Entry>) {
        match entry {
            Ok(entry) => self.kept.push(entry),
            Err(error) => self.missing.push(error.to_string()),
        }
    }

    /// Returns the entry of a figure.
    pub(crate) fn named(&self, what: &str) -> Option<&Entry> {
        self.kept
            .iter()
            .find(|entry| entry.row.ends_with(&format!("/{what}")))
    }

    /// Returns the entries; what is missing, and why, goes to `problems`.
    ///
    /// # Errors
    ///
    /// If there are none, or some are missing though the guest did not fail.
    pub(crate) fn end(self, failure: Option<String>, problems: &mut Vec<String>) -> io::Result<Vec<Entry>> {
        let missing = self.missing.join("; ");
        match failure {
            None if self.missing.is_empty() => {}
            Some(failure) if !self.kept.is_empty() => {
                problems.push(format!("its guest failed twice ({failure}): {missing}"));
            }
            failure => {
                return Err(io::Error::other(format!(
                    "{missing} ({})",
                    failure.unwrap_or_default()
                )));
            }
        }
        Ok(self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Better;

    #[test]
    fn peer_that_the_guest_leaves_out_is_named_with_its_reason() {
        let mut said = Said::default();
        said.add("@ nbd read-4k 900\n@missing nbd reads wrong bytes\n@missing\n".lines());
        assert_eq!(said.missing("nbd"), Some("nbd: reads wrong bytes".to_owned()));
        assert_eq!(said.missing("rublk-qcow2"), None);
    }

    #[test]
    fn figures_of_a_failed_guest_are_kept_and_missing_ones_named() {
        let mut said = Said::default();
        said.add("@ ours boot-ms 900\nnoise\n@ ours boot-ms 1100\n@ ours boot-ms 1000\n@ ours read".lines());
        let entry = |what| {
            let figure = said.median("ours", what)?;
            Ok(Entry::new(
                what.to_owned(),
                "ms",
                Better::Lower,
                figure,
                ("peer", 1.0),
            ))
        };
        let entries = || {
            let mut entries = Entries::default();
            entries.add(entry("boot-ms"));
            entries.add(entry("read"));
            entries
        };
        let mut problems = Vec::new();
        let kept = entries()
            .end(Some("the guest panicked".to_owned()), &mut problems)
            .unwrap();
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].ours, 1000.0);
        assert_eq!(
            problems,
            ["its guest failed twice (the guest panicked): ours has told no read"]
        );
        assert!(
            entries().end(None, &mut problems).is_err(),
            "a script that forgets a figure is a fault"
        );
        assert!(
            Entries::default()
                .end(Some("the guest panicked".to_owned()), &mut problems)
                .is_err()
        );
    }
}
