//! What a guest's script has told of its measurements: lines `@ WHO FIGURE NUMBER`, one for each turn.

use std::collections::BTreeMap;
use std::io;

use lab::Outcome;

use crate::report::median;

/// By who and figure: what each turn has found.
#[derive(Debug)]
pub(crate) struct Said(BTreeMap<(String, String), Vec<f64>>);

impl Said {
    /// All that a script has told.
    #[must_use]
    pub(crate) fn of(outcome: &Outcome) -> Self {
        let mut said = BTreeMap::<_, Vec<f64>>::new();
        for line in outcome.lines().filter_map(|line| line.strip_prefix("@ ")) {
            let mut words = line.split(' ').map(str::to_owned);
            if let (Some(who), Some(what), Some(Ok(figure))) =
                (words.next(), words.next(), words.next().map(|word| word.parse()))
            {
                said.entry((who, what)).or_default().push(figure);
            }
        }
        Self(said)
    }

    /// The middle of what was found.
    ///
    /// # Errors
    ///
    /// If nothing was.
    pub(crate) fn median(&self, who: &str, what: &str) -> io::Result<f64> {
        let figures = self.0.get(&(who.to_owned(), what.to_owned()));
        figures
            .map(|figures| median(figures.iter().copied()))
            .ok_or_else(|| io::Error::other(format!("{who} has told no {what}")))
    }
}
