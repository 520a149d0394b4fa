//! The snapshots that a disk must, may and must not have, and what each of them holds.
//!
//! A snapshot holds the disk as it was at one instant between the time it was asked for and its answer. So each sector
//! holds what a read may see that is asked for and answered at those times, or what came before a change that the host
//! failed, though reads saw that change. Nobody says which instant it was: the first image that has the snapshot shows,
//! and all later ones hold the same.
//!
//! A snapshot that was answered well is there after every cut until its deletion is asked for; one whose deletion was
//! answered well is gone.

use std::cell::RefCell;
use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::{Asked, Change, End, Expected, Oracle};
use crate::content::ZERO;

/// The words of a snapshot's sectors as they were found; `None` for bytes that no guest wrote.
pub type Words = Vec<Option<u64>>;

/// The snapshots found in an image, by name.
pub type Found = BTreeMap<String, Words>;

/// The snapshots of a disk.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshots {
    known: BTreeMap<String, Known>,
}

#[derive(Clone, Debug)]
struct Known {
    /// The words that each sector may hold.
    expected: Expected,
    /// The FLUSH that its creation is; `None` once that was answered.
    creating: Option<Asked>,
    /// Every image has it.
    is_sure: bool,
    /// Nobody knows if the disk has it: its creation or its deletion had an unknown end.
    is_doubtful: bool,
    /// The contents in the first image that had it.
    seen: RefCell<Option<Words>>,
}

impl Oracle {
    /// Adds snapshots that the disk has, durably.
    pub fn keep_snapshots(&mut self, found: Found) {
        for (name, words) in found {
            let expected = Expected {
                asked: Asked {
                    time: 0,
                    first: 0,
                    count: words.len() as u64,
                },
                words: Vec::new(),
            };
            let known = Known {
                expected,
                creating: None,
                is_sure: true,
                is_doubtful: false,
                seen: RefCell::new(Some(words)),
            };
            self.snapshots.known.insert(name, known);
        }
    }

    /// A snapshot is asked for.
    pub fn ask_snapshot(&mut self, name: String) {
        let known = Known {
            expected: self.expect(0, self.sectors(), true),
            creating: Some(self.ask_flush()),
            is_sure: false,
            is_doubtful: false,
            seen: RefCell::default(),
        };
        self.snapshots.known.insert(name, known);
    }

    /// The creation of a snapshot was answered.
    pub fn answer_snapshot(&mut self, name: &str, end: End) {
        self.end_read();
        self.promises += 1;
        let Some(mut known) = self.snapshots.known.remove(name) else {
            return;
        };
        let Some(flush) = known.creating.take().filter(|_| end != End::Undone) else {
            return;
        };
        for (words, changes) in known.expected.words.iter_mut().zip(&self.sectors) {
            let time = known.expected.asked.time;
            let newer = changes.iter().filter(|change| change.asked > time);
            words.extend(newer.map(|change| change.word));
        }
        known.is_sure = end == End::Done;
        known.is_doubtful = end == End::Unknown;
        self.snapshots.known.insert(name.to_owned(), known);
        if end == End::Done {
            self.answer_flush(&flush);
        }
    }

    /// The application of a snapshot is asked for: a change of each sector to what it holds. `None` if there is no such snapshot.
    pub fn ask_application(&mut self, name: &str) -> Option<Asked> {
        let known = self.snapshots.known.get(name)?.clone();
        let time = self.tick();
        for (sector, changes) in self.sectors.iter_mut().enumerate() {
            let seen = known.seen.borrow();
            let mut words: SmallVec<[u64; 4]> = match &*seen {
                // Past its end the disk reads as zeros when it has grown.
                Some(words) => words
                    .get(sector)
                    .copied()
                    .unwrap_or(Some(ZERO))
                    .into_iter()
                    .collect(),
                None => SmallVec::new(),
            };
            if seen.is_none() || self.writes_waver {
                words.extend(known.expected.words.get(sector).into_iter().flatten().copied());
            }
            words.sort_unstable();
            words.dedup();
            changes.extend(words.into_iter().map(|word| Change {
                word,
                asked: time,
                answered: None,
                gone: false,
                outdone: None,
            }));
        }
        self.untouched.fill(false);
        self.asked.fill(true);
        Some(Asked {
            time,
            first: 0,
            count: self.sectors(),
        })
    }

    /// The deletion of a snapshot is asked for. Returns true if there is one.
    pub fn ask_deletion(&mut self, name: &str) -> bool {
        self.promises += 1;
        let known = self.snapshots.known.get_mut(name);
        known.map(|known| known.is_sure = false).is_some()
    }

    /// The deletion of a snapshot was answered.
    pub fn answer_deletion(&mut self, name: &str, end: End) {
        self.promises += 1;
        match (end, self.snapshots.known.get_mut(name)) {
            (End::Done, _) => {
                self.snapshots.known.remove(name);
            }
            (End::Undone, Some(known)) => known.is_sure = !known.is_doubtful,
            (End::Unknown, Some(known)) => known.is_doubtful = true,
            _ => {}
        }
    }

    /// Returns true if a snapshot is, or was until now, among those of the run.
    #[must_use]
    pub fn has_snapshot(&self, name: &str) -> bool {
        let known = self.snapshots.known.get(name);
        known.is_some_and(|known| !known.is_doubtful)
    }

    /// Checks the snapshots found in an image after a cut.
    ///
    /// # Errors
    ///
    /// Says which one is missing, must not be there, or holds what it must not.
    pub fn judge_snapshots(&self, found: &Found) -> Result<(), String> {
        for (name, known) in &self.snapshots.known {
            if known.is_sure && !found.contains_key(name) {
                return Err(format!("after the cut snapshot {name} is gone"));
            }
        }
        for (name, words) in found {
            let known = self.snapshots.known.get(name);
            let known =
                known.ok_or_else(|| format!("after the cut there is snapshot {name}, which must not be"))?;
            self.judge_snapshot(name, known, words)?;
        }
        Ok(())
    }

    fn judge_snapshot(&self, name: &str, known: &Known, words: &Words) -> Result<(), String> {
        let mut seen = known.seen.borrow_mut();
        let Some(seen) = &*seen else {
            for (sector, &word) in words.iter().enumerate() {
                if !word.is_some_and(|word| self.may_hold(known, sector, word)) {
                    let none = SmallVec::new();
                    let may = known.expected.words.get(sector).unwrap_or(&none);
                    return Err(format!(
                        "sector {sector} of snapshot {name} holds {}, expected {}",
                        self.describe(word),
                        self.list(sector as u64, may),
                    ));
                }
            }
            *seen = Some(words.clone());
            return Ok(());
        };
        if seen.len() != words.len() {
            return Err(format!(
                "snapshot {name} has {} sectors, and had {}",
                words.len(),
                seen.len()
            ));
        }
        let is_same = |sector: usize| {
            let may_waver = |word| self.writes_waver && self.may_hold(known, sector, word);
            seen[sector] == words[sector] || words[sector].is_some_and(may_waver)
        };
        match (0..words.len()).find(|&sector| !is_same(sector)) {
            None => Ok(()),
            Some(sector) => Err(format!(
                "sector {sector} of snapshot {name} has changed: it holds {}, and held {}",
                self.describe(words[sector]),
                self.describe(seen[sector]),
            )),
        }
    }

    fn may_hold(&self, known: &Known, sector: usize, word: u64) -> bool {
        let listed = known.expected.words.get(sector);
        if listed.is_some_and(|words| words.contains(&word)) {
            return true;
        }
        // Its answer is yet to come: what is asked for meanwhile may be in it.
        let time = known.expected.asked.time;
        let newer = self.sectors.get(sector).filter(|_| known.creating.is_some());
        newer.is_some_and(|changes| {
            let mut newer = changes.iter().filter(|change| change.asked > time);
            newer.any(|change| change.word == word)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "s";

    fn change(oracle: &mut Oracle, word: u64) {
        let asked = oracle.ask_change(0, [word].into_iter());
        oracle.answer_change(&asked, true, false);
    }

    fn found(word: u64) -> Found {
        Found::from([(NAME.to_owned(), vec![Some(word)])])
    }

    #[test]
    fn snapshot_holds_one_instant_between_question_and_answer() {
        let mut oracle = Oracle::new(&[1]);
        change(&mut oracle, 2);
        oracle.ask_snapshot(NAME.to_owned());
        oracle.judge_snapshots(&Found::new()).expect("not yet");
        change(&mut oracle, 3);
        for wrong in [1, 4] {
            oracle
                .judge_snapshots(&found(wrong))
                .expect_err("never at that time");
        }
        for right in [2, 3] {
            oracle
                .clone()
                .judge_snapshots(&found(right))
                .expect("one of both");
        }
        oracle.answer_snapshot(NAME, End::Done);
        change(&mut oracle, 4);
        oracle.judge_snapshots(&found(4)).expect_err("later");
        oracle.judge_snapshots(&found(3)).expect("one of both");
        oracle.judge_snapshots(&found(2)).expect_err("it was the other");
        oracle.writes_waver = true;
        oracle
            .judge_snapshots(&found(2))
            .expect("a write that failed may be there or not");
        oracle.judge_snapshots(&found(4)).expect_err("later");
        oracle.writes_waver = false;
        oracle.judge_snapshots(&Found::new()).expect_err("answered");
    }

    #[test]
    fn snapshot_makes_durable_what_was_answered_before() {
        let mut oracle = Oracle::new(&[1]);
        change(&mut oracle, 2);
        oracle.ask_snapshot(NAME.to_owned());
        assert!(oracle.survives(0, 1));
        oracle.answer_snapshot(NAME, End::Done);
        assert!(!oracle.survives(0, 1) && oracle.survives(0, 2));
    }

    #[test]
    fn snapshot_need_not_have_a_failed_change_that_a_read_saw() {
        for well in [true, false] {
            let mut oracle = Oracle::new(&[1]);
            let asked = oracle.ask_change(0, [2].into_iter());
            oracle.answer_change(&asked, well, false);
            let read = oracle.ask_read(0, 1);
            oracle.answer_read(&read, &[Some(2)]).expect("it was asked for");
            oracle.ask_snapshot(NAME.to_owned());
            oracle.answer_snapshot(NAME, End::Done);
            oracle.clone().judge_snapshots(&found(2)).expect("what was read");
            assert_eq!(oracle.judge_snapshots(&found(1)).is_ok(), !well);
        }
    }

    #[test]
    fn applied_snapshot_may_lose_a_failed_change_that_a_read_saw() {
        let mut oracle = Oracle::new(&[1]);
        oracle.writes_waver = true;
        let failed = oracle.ask_change(0, [2].into_iter());
        oracle.answer_change(&failed, false, false);
        oracle.ask_snapshot(NAME.to_owned());
        oracle.answer_snapshot(NAME, End::Done);
        change(&mut oracle, 3);
        let applied = oracle.ask_application(NAME).expect("there is one");
        oracle.answer_change(&applied, true, true);
        let read = oracle.ask_read(0, 1);
        oracle.answer_read(&read, &[Some(2)]).expect("one of both");
        oracle.close();
        assert!(oracle.survives(0, 1) && oracle.survives(0, 2) && !oracle.survives(0, 3));
    }

    #[test]
    fn application_gives_the_disk_what_the_snapshot_holds_durably() {
        let mut oracle = Oracle::new(&[1]);
        change(&mut oracle, 2);
        oracle.ask_snapshot(NAME.to_owned());
        change(&mut oracle, 3);
        oracle.answer_snapshot(NAME, End::Done);
        change(&mut oracle, 4);
        assert!(oracle.ask_application("none").is_none());
        let mut sure = oracle.clone();
        sure.judge_snapshots(&found(2)).expect("one of both");
        for (oracle, holds) in [(&mut oracle, &[2, 3][..]), (&mut sure, &[2])] {
            let refused = oracle.ask_application(NAME).expect("there is one");
            assert!(oracle.survives(0, 2) && oracle.survives(0, 4));
            oracle.withdraw_change(&refused);
            assert!(oracle.survives(0, 4));
            let asked = oracle.ask_application(NAME).expect("there is one");
            oracle.answer_change(&asked, true, true);
            for word in 1..=4 {
                assert_eq!(oracle.survives(0, word), holds.contains(&word), "{word}");
            }
            let read = oracle.ask_read(0, 1);
            assert_eq!(&read.words[0][..], holds);
            oracle.end_read();
        }
    }

    #[test]
    fn snapshot_may_be_there_if_the_host_failed_its_creation_or_deletion() {
        let mut oracle = Oracle::new(&[1]);
        oracle.ask_snapshot(NAME.to_owned());
        change(&mut oracle, 2);
        oracle.answer_snapshot(NAME, End::Unknown);
        assert!(!oracle.has_snapshot(NAME));
        change(&mut oracle, 3);
        oracle.judge_snapshots(&Found::new()).expect("or not");
        oracle.clone().judge_snapshots(&found(2)).expect("either");
        oracle.judge_snapshots(&found(3)).expect_err("later");
        oracle.ask_deletion(NAME);
        oracle.answer_deletion(NAME, End::Undone);
        oracle.judge_snapshots(&Found::new()).expect("still nobody knows");
        let mut oracle = Oracle::new(&[1]);
        oracle.keep_snapshots(found(1));
        oracle.ask_deletion(NAME);
        oracle.answer_deletion(NAME, End::Unknown);
        for found in [found(1), Found::new()] {
            oracle.judge_snapshots(&found).expect("either");
        }
    }

    #[test]
    fn deleted_snapshot_may_be_there_until_the_answer() {
        let mut oracle = Oracle::new(&[1]);
        oracle.keep_snapshots(found(1));
        oracle.judge_snapshots(&found(2)).expect_err("it has changed");
        assert!(oracle.ask_deletion(NAME) && !oracle.ask_deletion("t"));
        for found in [found(1), Found::new()] {
            oracle.judge_snapshots(&found).expect("either");
        }
        oracle.answer_deletion(NAME, End::Done);
        oracle.judge_snapshots(&Found::new()).expect("gone");
        oracle.judge_snapshots(&found(1)).expect_err("gone");
    }
}
