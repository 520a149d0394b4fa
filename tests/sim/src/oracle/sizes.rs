//! The sizes that a disk may have after a cut, for runs in which it becomes smaller.
//!
//! A cut while the size changes leaves the old one or the new one. What lay past the end of a disk that has become smaller is gone: it
//! reads as zeros when the disk grows again.

use super::{Change, End, Oracle};
use crate::content::ZERO;

/// The sizes of a disk, in sectors.
#[derive(Clone, Debug, Default)]
pub(super) struct Sizes {
    /// Those that a cut may leave; none if nobody keeps track.
    may: Vec<u64>,
    /// The size that the disk got when it last became smaller, unless it has grown since.
    shrunk_to: Option<u64>,
    /// The least size that was ever asked for, if one was.
    least: Option<u64>,
}

impl Oracle {
    /// Has the size of the disk judged from now on, which is `sectors`.
    pub fn keep_size(&mut self, sectors: u64) {
        self.sizes.may = vec![sectors];
    }

    /// Another size is asked for.
    pub fn ask_size(&mut self, sectors: u64) {
        let least = self.sizes.least.unwrap_or(sectors).min(sectors);
        self.sizes.least = Some(least);
        if !self.sizes.may.is_empty() {
            self.sizes.may.push(sectors);
            self.promises += 1;
        }
    }

    /// Another size was answered: durably the disk's now, or not.
    pub fn answer_size(&mut self, sectors: u64, end: End) {
        let Some(&old) = self.sizes.may.first() else {
            return;
        };
        self.promises += 1;
        match end {
            End::Done => self.sizes.may = vec![sectors],
            End::Undone => {
                // The first one is its size now. Others with an unknown end stay.
                let asked = self.sizes.may.iter().rposition(|&may| may == sectors);
                if let Some(at) = asked.filter(|&at| at > 0) {
                    self.sizes.may.remove(at);
                }
                return;
            }
            End::Unknown => return,
        }
        self.sizes.shrunk_to = (sectors < old).then_some(sectors);
        for sector in sectors..old {
            self.cut_sector(sector);
        }
    }

    /// A sector lies past the disk's end. What is not answered yet may still be done, if the disk grows before.
    fn cut_sector(&mut self, sector: u64) {
        let asked = self.tick();
        let answered = self.tick();
        if let Some(changes) = self.sectors.get_mut(sector as usize) {
            changes.retain(|change| change.answered.is_none());
            changes.push(Change {
                word: ZERO,
                asked,
                answered: Some((answered, true)),
                gone: false,
                outdone: None,
            });
        }
    }

    /// Has the disk have had the sizes that another one had.
    pub fn keep_least_size(&mut self, of: &Self) {
        self.sizes.least = of.sizes.least;
    }

    /// Returns true if the sector was always the disk's: bits of bitmaps past its end are gone when it grows again.
    #[must_use]
    pub fn was_always_there(&self, sector: u64) -> bool {
        self.sizes.least.is_none_or(|least| sector < least)
    }

    /// Checks the size of a disk after a cut.
    ///
    /// # Errors
    ///
    /// Says which sizes it may have.
    pub fn judge_size(&self, sectors: u64) -> Result<(), String> {
        let may = &self.sizes.may;
        if may.is_empty() || may.contains(&sectors) {
            return Ok(());
        }
        Err(format!(
            "after the cut the disk has {sectors} sectors, expected one of {may:?}"
        ))
    }

    /// Returns true if the disk has become smaller, to so many sectors.
    #[must_use]
    pub fn has_shrunk_to(&self, sectors: u64) -> bool {
        self.sizes.shrunk_to == Some(sectors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaller_disk_has_the_old_size_or_the_new_one_and_zeros_when_it_grows() {
        let mut oracle = Oracle::new(&[1, 2]);
        oracle.judge_size(9).expect("nobody keeps track");
        oracle.keep_size(2);
        oracle.ask_size(1);
        for sectors in [1, 2] {
            oracle.judge_size(sectors).expect("either");
        }
        assert!(oracle.survives(1, 2) && !oracle.survives(1, ZERO));
        oracle.answer_size(1, End::Done);
        oracle.judge_size(2).expect_err("it has another size");
        assert!(oracle.has_shrunk_to(1));
        assert!(oracle.was_always_there(0) && !oracle.was_always_there(1));
        oracle.ask_size(2);
        oracle.answer_size(2, End::Done);
        oracle.judge_size(1).expect_err("it has grown");
        assert!(oracle.survives(1, ZERO) && !oracle.survives(1, 2) && !oracle.has_shrunk_to(1));
    }

    #[test]
    fn disk_keeps_its_size_and_end_when_it_could_not_become_smaller() {
        let mut oracle = Oracle::new(&[1, 2]);
        oracle.keep_size(2);
        oracle.ask_size(1);
        oracle.answer_size(1, End::Undone);
        oracle.judge_size(1).expect_err("it is as it was");
        assert!(oracle.survives(1, 2));
    }

    #[test]
    fn disk_has_either_size_until_the_next_one_if_the_host_failed_something() {
        let mut oracle = Oracle::new(&[1, 2, 3]);
        oracle.keep_size(3);
        oracle.ask_size(1);
        oracle.answer_size(1, End::Unknown);
        oracle.ask_size(2);
        oracle.answer_size(2, End::Undone);
        for sectors in [1, 3] {
            oracle.judge_size(sectors).expect("either");
        }
        oracle.judge_size(2).expect_err("it did not get that");
        assert!(oracle.survives(1, 2) && !oracle.survives(1, ZERO));
        oracle.ask_size(2);
        oracle.answer_size(2, End::Done);
        oracle.judge_size(2).expect("its size");
        oracle.judge_size(1).expect_err("it has another");
        assert!(oracle.survives(1, 2) && oracle.survives(2, ZERO) && !oracle.survives(2, 3));
    }

    #[test]
    fn write_that_waits_for_a_smaller_disk_may_land_when_it_has_grown() {
        let mut oracle = Oracle::new(&[1, 2]);
        oracle.keep_size(2);
        let asked = oracle.ask_change(1, [3].into_iter());
        oracle.ask_size(1);
        oracle.answer_size(1, End::Done);
        assert!(oracle.survives(1, 3) && oracle.survives(1, ZERO) && !oracle.survives(1, 2));
        oracle.answer_change(&asked, false, false);
    }
}
