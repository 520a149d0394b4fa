//! The contents that a reader may see, at once and after a crash.
//!
//! Every change a guest asks for is remembered for each sector it touches, with when it was asked for
//! and when it was answered. A change is *over* when it was answered, well or not. One change *follows*
//! another if it was asked for when the other was over.
//!
//! - A read sees, per sector, any change asked for before the read ended, but none that was followed by one
//!   that was answered well before the read was asked for.
//! - A power cut leaves, per sector, any change asked for before it, but none that was followed by one that
//!   is *promised*: answered well before a FLUSH was asked for that was answered well before the cut, or
//!   itself forced and answered well.
//!
//! This is the rule "what a reader may see after a crash" of the design, word for word: the last value
//! acknowledged before the last completed FLUSH, or any write acknowledged or in flight since.
//!
//! Of changes that were under way at once nobody has said which is the last, until a read does: one that was over when the
//! read was asked for, and is not what the read saw, came before it. Reads asked for later do not see it
//! again. Neither does a cut leave it, once what the read saw was answered well before a FLUSH. That holds only
//! for disks that [stay](Oracle::reads_settle) what they were read as.

mod sizes;
mod snapshots;

use smallvec::SmallVec;

use crate::content::ZERO;
use sizes::Sizes;
use snapshots::Snapshots;
pub use snapshots::{Found, Words};

/// One value a sector was given.
#[derive(Clone, Copy, Debug)]
struct Change {
    word: u64,
    asked: u64,
    /// The time at which it was answered, and true if it was answered well.
    answered: Option<(u64, bool)>,
    /// It can survive no cut any more.
    gone: bool,
    /// A read has seen another one, which came after it: when that was asked for, or [`ANY`].
    outdone: Option<u64>,
}

/// So many sectors are one block of [`Oracle::is_untouched`].
pub const BLOCK_SECTORS: u64 = 128;

/// One of several changes with the same word, whichever.
const ANY: u64 = u64::MAX;

type Changes = SmallVec<[Change; 2]>;

/// The promises made of a disk.
#[derive(Clone, Debug)]
pub struct Oracle {
    sectors: Vec<Changes>,
    /// Blocks of so many sectors in which no sector was ever asked to be anything but zeros.
    untouched: Vec<bool>,
    time: u64,
    /// Grows with every promise: crash states judged before are judged anew.
    promises: u64,
    reads: usize,
    snapshots: Snapshots,
    sizes: Sizes,
    /// The sectors of which a change was asked for.
    asked: Vec<bool>,
    /// True if durable bitmaps are never in use.
    pub keeps_bitmaps: bool,
    /// True if a write may fail: then it may be on the disk or not after each cut, whatever is synced, until the next one.
    pub writes_waver: bool,
    /// True if a value that was read stays. False for disks whose failed syncs forget what was read already, and for
    /// those whose servers die with changes that were read and not answered.
    pub reads_settle: bool,
}

/// The end of an operation on the whole disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    /// It is done, durably.
    Done,
    /// Nothing of it is done.
    Undone,
    /// The host has failed something: a cut may leave it done, or not.
    Unknown,
}

/// A change, FLUSH or read under way.
#[derive(Clone, Debug)]
pub struct Asked {
    time: u64,
    first: u64,
    count: u64,
}

/// The words that a read may see: for each of its sectors, any of these.
#[derive(Clone, Debug)]
pub struct Expected {
    asked: Asked,
    words: Vec<SmallVec<[u64; 4]>>,
}

impl Oracle {
    /// A disk that holds these words, durably.
    #[must_use]
    pub fn new(words: &[u64]) -> Self {
        let durable = |&word: &u64| {
            Changes::from_slice(&[Change {
                word,
                asked: 0,
                answered: Some((0, true)),
                gone: false,
                outdone: None,
            }])
        };
        Self {
            sectors: words.iter().map(durable).collect(),
            untouched: words
                .chunks(BLOCK_SECTORS as usize)
                .map(|block| block.iter().all(|&word| word == ZERO))
                .collect(),
            time: 1,
            promises: 0,
            reads: 0,
            snapshots: Snapshots::default(),
            sizes: Sizes::default(),
            asked: vec![false; words.len()],
            keeps_bitmaps: false,
            writes_waver: false,
            reads_settle: true,
        }
    }

    /// Returns the number of sectors that the disk has at its largest.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// Returns true if nobody has ever asked for anything but zeros in this block of [`BLOCK_SECTORS`] sectors.
    #[must_use]
    pub fn is_untouched(&self, block: u64) -> bool {
        self.untouched.get(block as usize).copied().unwrap_or(true)
    }

    /// Returns true if a change of the sector was ever asked for.
    #[must_use]
    pub fn is_asked(&self, sector: u64) -> bool {
        self.asked.get(sector as usize).copied().unwrap_or(false)
    }

    /// Returns the number of promises made so far.
    #[must_use]
    pub fn promises(&self) -> u64 {
        self.promises
    }

    fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// A change of sectors from `first` on to these words is asked for.
    pub fn ask_change(&mut self, first: u64, words: impl Iterator<Item = u64>) -> Asked {
        let time = self.tick();
        let mut count = 0;
        for word in words {
            if let Some(place) = self.untouched.get_mut(((first + count) / BLOCK_SECTORS) as usize) {
                *place = false;
            }
            if let Some(asked) = self.asked.get_mut((first + count) as usize) {
                *asked = true;
            }
            if let Some(changes) = self.sectors.get_mut((first + count) as usize) {
                changes.push(Change {
                    word,
                    asked: time,
                    answered: None,
                    gone: false,
                    outdone: None,
                });
            }
            count += 1;
        }
        Asked { time, first, count }
    }

    /// A change was answered; with `forced`, durably.
    pub fn answer_change(&mut self, asked: &Asked, well: bool, forced: bool) {
        let time = self.tick();
        for sector in asked.first..asked.first + asked.count {
            let Some(changes) = self.sectors.get_mut(sector as usize) else {
                continue;
            };
            // An application of a snapshot may have several, of which one is right.
            for own in changes.iter_mut().filter(|change| change.asked == asked.time) {
                own.answered = Some((time, well));
            }
            if forced && well {
                promise(changes, asked.time, self.reads == 0);
            }
        }
        self.promises += u64::from(forced && well);
    }

    /// A change was refused: nothing of it was done.
    pub fn withdraw_change(&mut self, asked: &Asked) {
        for changes in &mut self.sectors {
            changes.retain(|change| change.asked != asked.time);
        }
        self.promises += 1;
    }

    /// Has states that were judged before judged anew: a cut may leave less now, though no promise was made.
    pub(crate) fn renew(&mut self) {
        self.promises += 1;
    }

    /// A FLUSH is asked for.
    pub fn ask_flush(&mut self) -> Asked {
        Asked {
            time: self.tick(),
            first: 0,
            count: 0,
        }
    }

    /// A FLUSH was answered well.
    pub fn answer_flush(&mut self, asked: &Asked) {
        let forget = self.reads == 0;
        for changes in &mut self.sectors {
            if changes.len() == 1 {
                continue;
            }
            let promised = changes
                .iter()
                .filter(|change| is_before(change, asked.time))
                .map(|change| change.asked)
                .max();
            // What was read is promised as well, if it was answered.
            for index in 0..changes.len() {
                changes[index].gone |= is_replaced(changes, &changes[index], asked.time, self.writes_waver);
            }
            if let Some(promised) = promised {
                promise(changes, promised, forget);
            }
        }
        self.promises += 1;
    }

    /// A read is asked for.
    pub fn ask_read(&mut self, first: u64, count: u64) -> Expected {
        self.expect(first, count, false)
    }

    /// Expects of sectors what a read may see that is asked for now; or, `durably`, what may be on the disk when all that has ended is
    /// synced.
    fn expect(&mut self, first: u64, count: u64, durably: bool) -> Expected {
        self.reads += 1;
        let time = self.tick();
        let words = (first..first + count).map(|sector| self.seen_at(sector, time, durably));
        let words = words.collect();
        Expected {
            asked: Asked { time, first, count },
            words,
        }
    }

    /// Returns the words of a sector that [`Oracle::expect`] lists, of what was asked for until now.
    fn seen_at(&self, sector: u64, time: u64, durably: bool) -> SmallVec<[u64; 4]> {
        let Some(changes) = self.sectors.get(sector as usize) else {
            return SmallVec::from_slice(&[ZERO]);
        };
        let last = changes
            .iter()
            .filter(|change| is_before(change, time))
            .map(|change| change.asked)
            .max()
            .unwrap_or(0);
        let is_outdone = |change: &Change| match durably {
            true => is_replaced(changes, change, time, self.writes_waver),
            false => change.outdone.is_some(),
        };
        let visible = changes
            .iter()
            .filter(|change| !is_over_before(change, last) && !is_outdone(change));
        visible.map(|change| change.word).collect()
    }

    /// A read was answered well with these words (`None` for a sector that is none of ours).
    ///
    /// # Errors
    ///
    /// Says what is wrong with it.
    pub fn answer_read(&mut self, expected: &Expected, found: &[Option<u64>]) -> Result<(), String> {
        let Asked { time, first, count } = expected.asked;
        let mut result = Ok(());
        for (at, sector) in (first..first + count).enumerate() {
            let found = found.get(at).copied().flatten();
            let known = found.is_some_and(|word| {
                let changes = self.sectors.get(sector as usize);
                let mut changes = changes.iter().flat_map(|changes| changes.iter());
                let newer = changes.any(|change| change.asked > time && change.word == word);
                newer || expected.words[at].contains(&word) && !self.is_outdone(sector, time, word)
            });
            if known && self.reads_settle {
                self.settle(sector, time, found);
            }
            if !known && result.is_ok() {
                result = Err(format!(
                    "a read sees {} in sector {sector}, expected {}",
                    self.describe(found),
                    self.list(sector, &expected.words[at]),
                ));
            }
        }
        self.end_read();
        result
    }

    /// Returns true if a read asked for at `time` cannot see `word`, because another read has seen what came after it and was over by
    /// then.
    fn is_outdone(&self, sector: u64, time: u64, word: u64) -> bool {
        let Some(changes) = self.sectors.get(sector as usize) else {
            return false;
        };
        let by_other = |change: &Change| {
            let other = changes.iter().find(|other| Some(other.asked) == change.outdone);
            other.is_some_and(|other| is_over_before(other, time))
        };
        let mut own = changes.iter().filter(|change| change.word == word).peekable();
        own.peek().is_some() && own.all(by_other)
    }

    /// A read asked for at `time` saw `word`: what was over by then, and is not that word, came before it.
    fn settle(&mut self, sector: u64, time: u64, word: Option<u64>) {
        let Some(changes) = self.sectors.get_mut(sector as usize) else {
            return;
        };
        if changes.len() == 1 {
            return;
        }
        let mut seen = changes.iter().filter(|change| Some(change.word) == word);
        let by = match (seen.next(), seen.next()) {
            (Some(one), None) => one.asked,
            _ => ANY,
        };
        for change in changes.iter_mut() {
            if is_over_before(change, time) && Some(change.word) != word {
                change.outdone = Some(change.outdone.unwrap_or(ANY).min(by));
            }
        }
    }

    /// A read was answered, however.
    pub fn end_read(&mut self) {
        self.reads -= 1;
    }

    /// Returns true if a cut may now leave a disk with this word in `sector`.
    #[must_use]
    pub fn survives(&self, sector: u64, word: u64) -> bool {
        self.sectors
            .get(sector as usize)
            .is_some_and(|changes| changes.iter().any(|change| !change.gone && change.word == word))
    }

    /// Checks the words of a whole disk after a cut.
    ///
    /// # Errors
    ///
    /// Says which sector holds what it must not.
    pub fn judge(&self, words: impl Iterator<Item = Option<u64>>) -> Result<(), String> {
        for (sector, word) in (0..).zip(words) {
            if !word.is_some_and(|word| self.survives(sector, word)) {
                let changes = &self.sectors[sector as usize];
                let may: Vec<u64> = changes.iter().filter(|c| !c.gone).map(|c| c.word).collect();
                return Err(format!(
                    "after the cut sector {sector} holds {}, expected {}",
                    self.describe(word),
                    self.list(sector, &may),
                ));
            }
        }
        Ok(())
    }

    /// Everything answered well is durable now: a disk that was closed cleanly.
    pub fn close(&mut self) {
        let asked = self.ask_flush();
        self.answer_flush(&asked);
    }

    /// The one word each sector holds, if there is no doubt.
    #[must_use]
    pub fn settled(&self) -> Option<Vec<u64>> {
        let one = |changes: &Changes| {
            let mut left = changes.iter().filter(|change| !change.gone);
            let word = left.next()?.word;
            left.next().is_none().then_some(word)
        };
        self.sectors.iter().map(one).collect()
    }

    fn list(&self, sector: u64, words: &[u64]) -> String {
        let mut text: Vec<String> = words
            .iter()
            .map(|&word| {
                self.describe_in(sector, word)
                    .unwrap_or_else(|| format!("{word:#x}"))
            })
            .collect();
        text.dedup();
        text.join(" or ")
    }

    fn describe_in(&self, sector: u64, word: u64) -> Option<String> {
        if word == ZERO {
            return Some("zeros".to_owned());
        }
        let changes = self.sectors.get(sector as usize)?;
        let change = changes.iter().find(|change| change.word == word)?;
        Some(match change.asked {
            0 => "its first value".to_owned(),
            asked => format!("the value asked for at {asked}"),
        })
    }

    fn describe(&self, word: Option<u64>) -> String {
        let Some(word) = word else {
            return "bytes that no guest wrote".to_owned();
        };
        let known =
            (0..self.sectors.len() as u64).find_map(|sector| Some((sector, self.describe_in(sector, word)?)));
        match known {
            Some((_, text)) if word == ZERO => text,
            Some((sector, text)) => format!("{text} (of sector {sector})"),
            None => format!("{word:#x}, which is no value of any sector"),
        }
    }
}

/// Returns true if the change had succeeded before `time`.
fn is_before(change: &Change, time: u64) -> bool {
    matches!(change.answered, Some((answered, true)) if answered < time)
}

/// Returns true if a read has seen that another change came after this one, and the other had succeeded before `time`. Of a change that
/// failed, readers may see what no cut leaves. Where writes waver, so may they of the words that one application of a snapshot may have
/// given the sector: none of these replaces another.
fn is_replaced(changes: &Changes, change: &Change, time: u64, waver: bool) -> bool {
    changes.iter().any(|other| {
        let is_sibling = other.asked == change.asked;
        Some(other.asked) == change.outdone && is_before(other, time) && !(waver && is_sibling)
    })
}

/// Returns true if the change was over when the request of `time` was made.
fn is_over_before(change: &Change, time: u64) -> bool {
    matches!(change.answered, Some((answered, _)) if answered < time)
}

/// The change asked for at `promised` is durable: what it follows is gone.
fn promise(changes: &mut Changes, promised: u64, forget: bool) {
    for change in changes.iter_mut() {
        change.gone |= is_over_before(change, promised);
    }
    if forget {
        changes.retain(|change| !change.gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(oracle: &mut Oracle, word: u64) -> Asked {
        oracle.ask_change(0, [word].into_iter())
    }

    fn survivors(oracle: &Oracle) -> Vec<u64> {
        (0..10).filter(|&word| oracle.survives(0, word)).collect()
    }

    #[test]
    fn flush_promises_only_earlier_answers() {
        let mut oracle = Oracle::new(&[1]);
        let second = change(&mut oracle, 2);
        oracle.answer_change(&second, true, false);
        assert_eq!(survivors(&oracle), [1, 2]);
        let flush = oracle.ask_flush();
        let third = change(&mut oracle, 3);
        oracle.answer_change(&third, true, false);
        oracle.answer_flush(&flush);
        assert_eq!(survivors(&oracle), [2, 3]);
        oracle.judge([Some(1)].into_iter()).expect_err("it is gone");
        oracle.judge([Some(2)].into_iter()).expect("promised");
        oracle.judge([None].into_iter()).expect_err("never written");
    }

    #[test]
    fn change_in_flight_may_win_over_a_flushed_one() {
        let mut oracle = Oracle::new(&[1]);
        let late = change(&mut oracle, 2);
        let second = change(&mut oracle, 3);
        oracle.answer_change(&second, true, false);
        let flush = oracle.ask_flush();
        oracle.answer_flush(&flush);
        assert_eq!(survivors(&oracle), [2, 3]);
        oracle.answer_change(&late, true, false);
        let flush = oracle.ask_flush();
        oracle.answer_flush(&flush);
        // Neither follows the other: nobody said which is the last.
        assert_eq!(survivors(&oracle), [2, 3]);
    }

    #[test]
    fn failed_change_may_show_until_another_follows() {
        let mut oracle = Oracle::new(&[1]);
        let failed = change(&mut oracle, 2);
        oracle.answer_change(&failed, false, false);
        oracle.close();
        assert_eq!(survivors(&oracle), [1, 2]);
        let third = change(&mut oracle, 3);
        oracle.answer_change(&third, true, true);
        assert_eq!(survivors(&oracle), [3]);
    }

    #[test]
    fn read_sees_the_last_answer_or_a_change_in_flight() {
        let mut oracle = Oracle::new(&[1]);
        let second = change(&mut oracle, 2);
        oracle.answer_change(&second, true, false);
        let stale = oracle.ask_read(0, 1);
        oracle.answer_read(&stale, &[Some(1)]).expect_err("overwritten");
        let read = oracle.ask_read(0, 1);
        let third = change(&mut oracle, 3);
        let again = oracle.ask_read(0, 1);
        oracle
            .answer_read(&read, &[Some(3)])
            .expect("in flight meanwhile");
        oracle.answer_read(&again, &[Some(2)]).expect("not answered yet");
        oracle.answer_change(&third, true, false);
        let last = oracle.ask_read(0, 1);
        oracle.answer_read(&last, &[Some(2)]).expect_err("overwritten");
    }

    #[test]
    fn reads_do_not_alternate_between_concurrent_changes() {
        let mut oracle = Oracle::new(&[1]);
        let (second, third) = (change(&mut oracle, 2), change(&mut oracle, 3));
        oracle.answer_change(&second, true, false);
        oracle.answer_change(&third, true, false);
        let early = oracle.ask_read(0, 1);
        let read = oracle.ask_read(0, 1);
        oracle.answer_read(&read, &[Some(2)]).expect("either");
        let later = oracle.ask_read(0, 1);
        oracle
            .answer_read(&later, &[Some(3)])
            .expect_err("it was the other");
        oracle
            .answer_read(&early, &[Some(3)])
            .expect_err("both were over when it was asked for");
        // A cut may leave either, until a FLUSH.
        assert_eq!(survivors(&oracle), [1, 2, 3]);
        oracle.close();
        assert_eq!(survivors(&oracle), [2]);
    }

    #[test]
    fn unanswered_change_once_read_binds_readers_only() {
        let mut oracle = Oracle::new(&[1]);
        let second = change(&mut oracle, 2);
        let read = oracle.ask_read(0, 1);
        oracle.answer_read(&read, &[Some(2)]).expect("in flight");
        let flush = oracle.ask_flush();
        oracle.answer_flush(&flush);
        assert_eq!(survivors(&oracle), [1, 2]);
        let again = oracle.ask_read(0, 1);
        oracle
            .answer_read(&again, &[Some(1)])
            .expect_err("it was the other");
        oracle.answer_change(&second, true, false);
    }

    #[test]
    fn unfinished_change_may_show_after_another_was_read() {
        let mut oracle = Oracle::new(&[1]);
        let (second, third) = (change(&mut oracle, 2), change(&mut oracle, 3));
        oracle.answer_change(&third, true, false);
        let read = oracle.ask_read(0, 1);
        oracle.answer_read(&read, &[Some(3)]).expect("answered");
        let again = oracle.ask_read(0, 1);
        oracle.answer_read(&again, &[Some(2)]).expect("in flight");
        oracle.answer_change(&second, true, false);
    }

    /// A promise made while a read is under way does not narrow what the read may see.
    #[test]
    fn read_begun_before_a_flush_may_see_older_data() {
        let mut oracle = Oracle::new(&[1]);
        let read = oracle.ask_read(0, 1);
        let second = change(&mut oracle, 2);
        oracle.answer_change(&second, true, false);
        oracle.close();
        oracle.answer_read(&read, &[Some(1)]).expect("begun before");
        assert_eq!(survivors(&oracle), [2]);
    }
}
