//! Requests that a client makes to a disk, and the values that each sector may hold after a cut.
//!
//! A plan follows from its seed alone, so that whoever judges needs no word of the client's. It is a text in the language of
//! `qemu-io`: rounds of requests that do not overlap within a round, are all in flight together, and have ended when the next
//! round begins. After an answered FLUSH comes a line `mark N`.

use ringdisk_gen::Random;

/// The grain of requests and of the judgement, in bytes.
pub const SECTOR: u64 = 512;

/// Requests of one round at most.
const ROUND: u64 = 24;
/// The lengths of requests, in sectors.
const LENGTHS: [u64; 10] = [1, 3, 8, 8, 8, 16, 32, 64, 128, 256];
/// The part of the disk that has half of the requests, in sectors.
const HOT: u64 = 1024;

/// One request's share in a sector.
#[derive(Clone, Copy, Debug)]
struct Change {
    /// The byte it writes; `None` if it discards.
    value: Option<u8>,
    /// The last mark before it was asked for.
    asked: u32,
    /// The first mark whose FLUSH was asked for after it had ended.
    ended: u32,
}

/// A seeded sequence of requests.
#[derive(Debug)]
pub struct Plan {
    lines: Vec<String>,
    sectors: Vec<Vec<Change>>,
    /// The next mark.
    next: u32,
    requests: u64,
}

impl Plan {
    /// A plan of so many rounds for a disk of `bytes`.
    #[must_use]
    pub fn new(seed: u64, bytes: u64, rounds: u32) -> Self {
        let mut random = Random::new(seed);
        let sectors = bytes / SECTOR;
        let mut plan = Self {
            lines: vec!["mark 0".to_owned()],
            sectors: vec![Vec::new(); sectors as usize],
            next: 1,
            requests: 0,
        };
        let hot = random.below(sectors - HOT);
        for round in 1..=rounds {
            let manner = if round == rounds { 2 } else { random.below(4) };
            // A FLUSH beside requests covers none of them for certain.
            let ended = u32::from(manner == 0) + plan.next;
            let mut used = vec![false; sectors as usize];
            // What is freed is written back in the background, which would cover for a FLUSH that did too little.
            let plain = random.below(2) == 0;
            for _ in 0..1 + random.below(ROUND) {
                plan.request(&mut random, hot, &mut used, (plain, ended));
            }
            let end: &[&str] = match manner {
                0 => &["flush", "mark", "aio_flush"],
                1 => &["aio_flush"],
                _ => &["aio_flush", "flush", "mark"],
            };
            for &line in end {
                if line == "mark" {
                    plan.lines.push(format!("mark {}", plan.next));
                    plan.next += 1;
                } else {
                    plan.lines.push(line.to_owned());
                }
            }
        }
        plan
    }

    fn request(&mut self, random: &mut Random, hot: u64, used: &mut [bool], (plain, ended): (bool, u32)) {
        let sectors = used.len() as u64;
        let len = LENGTHS[random.below(LENGTHS.len() as u64) as usize];
        let (base, room) = if random.below(2) == 0 {
            (hot, HOT)
        } else {
            (0, sectors)
        };
        let mut at = base + random.below(room - len);
        // Most requests of file systems are aligned.
        if len >= 8 && random.below(8) > 0 {
            at = at / 8 * 8;
        }
        let range = at as usize..(at + len) as usize;
        if used[range.clone()].iter().any(|&used| used) {
            return;
        }
        used[range.clone()].fill(true);
        let kind = if plain { 15 } else { random.below(16) };
        let value = match kind {
            0 | 1 => None,
            2..=4 => Some(0),
            _ => Some(self.fresh(random, &self.sectors[range.clone()])),
        };
        let (offset, bytes) = (at * SECTOR, len * SECTOR);
        self.lines.push(match (kind, value) {
            (_, None) => format!("discard -q {offset} {bytes}"),
            (2, _) => format!("aio_write -q -z {offset} {bytes}"),
            (3 | 4, _) => format!("aio_write -q -z -u {offset} {bytes}"),
            (5, Some(value)) => format!("aio_write -q -f -P {value} {offset} {bytes}"),
            (_, Some(value)) => format!("aio_write -q -P {value} {offset} {bytes}"),
        });
        self.requests += 1;
        let asked = self.next - 1;
        for changes in &mut self.sectors[range] {
            changes.push(Change { value, asked, ended });
        }
    }

    /// A byte that none of these sectors has held, if there is one.
    fn fresh(&self, random: &mut Random, sectors: &[Vec<Change>]) -> u8 {
        let mut held = [false; 256];
        for change in sectors.iter().flatten() {
            held[usize::from(change.value.unwrap_or(0))] = true;
        }
        held[0] = true;
        let begin = random.below(256);
        let mut bytes = (0..256).map(|step| ((begin + step) % 256) as u8);
        bytes.find(|&byte| !held[usize::from(byte)]).unwrap_or(1)
    }

    /// The commands and marks, each on its line.
    #[must_use]
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns the number of marks.
    #[must_use]
    pub fn marks(&self) -> u32 {
        self.next
    }

    /// Returns true if the FLUSH before this mark made a difference: some sector may hold nothing any more that it could have held
    /// at the mark before.
    #[must_use]
    pub fn is_seen(&self, mark: u32) -> bool {
        // Any other holds at the mark what it could have held before, and perhaps more.
        let covered = |changes: &&Vec<Change>| changes.iter().any(|change| change.ended == mark);
        self.sectors.iter().filter(covered).any(|changes| {
            let earlier: Vec<Change> = changes
                .iter()
                .filter(|change| change.asked + 1 < mark)
                .copied()
                .collect();
            let (was_original, was) = allowed(&earlier, mark.saturating_sub(1));
            let (original, now) = allowed(changes, mark);
            // What it held at first may have been zeros.
            let first = was_original && (original || now[0]);
            !first && (0..256).all(|byte| !(was[byte] && now[byte]))
        })
    }

    /// Returns, as a text, a place where `found`, the whole disk after a cut that came after mark `mark` and before the
    /// next, holds what it may not. The disk held `before` before the first request.
    #[must_use]
    pub fn difference(&self, before: &[u8], found: &[u8], mark: u32) -> Option<String> {
        if found.len() != before.len() {
            return Some(format!(
                "the disk has {} bytes, not {}",
                found.len(),
                before.len()
            ));
        }
        let sectors = before
            .chunks(SECTOR as usize)
            .zip(found.chunks(SECTOR as usize))
            .zip(&self.sectors);
        for (sector, ((before, found), changes)) in sectors.enumerate() {
            let (original, allowed) = allowed(changes, mark);
            let byte = found[0];
            // Each byte as the one before it: sixteen thousand sectors of a cut are compared as slices, not byte by byte.
            let uniform = found[1..] == found[..found.len() - 1];
            if !(original && found == before || uniform && allowed[usize::from(byte)]) {
                let allowed: Vec<usize> = (0..256).filter(|&byte| allowed[byte]).collect();
                return Some(format!(
                    "sector {sector} after mark {mark} holds {:02x?}…, {}; allowed are {allowed:?}{}; its requests: {changes:?}",
                    &found[..8],
                    if uniform { "all alike" } else { "not all alike" },
                    if original {
                        " and what it held at first"
                    } else {
                        ""
                    },
                ));
            }
        }
        None
    }
}

/// Returns true if a sector may hold what it held at first, and the bytes it may be full of.
fn allowed(changes: &[Change], mark: u32) -> (bool, [bool; 256]) {
    let (mut original, mut allowed) = (true, [false; 256]);
    for change in changes.iter().filter(|change| change.asked <= mark) {
        // What is discarded reads as before or as zeros.
        if change.ended <= mark && change.value.is_some() {
            (original, allowed) = (false, [false; 256]);
        }
        allowed[usize::from(change.value.unwrap_or(0))] = true;
    }
    (original, allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(value: Option<u8>, asked: u32, ended: u32) -> Change {
        Change { value, asked, ended }
    }

    #[test]
    fn sector_holds_flushed_or_later_values_only() {
        let changes = [
            change(Some(1), 0, 1),
            change(Some(2), 1, 3),
            change(None, 3, 4),
            change(Some(3), 4, 5),
        ];
        let values = |mark| {
            let (original, allowed) = allowed(&changes, mark);
            let bytes: Vec<usize> = (0..256).filter(|&byte| allowed[byte]).collect();
            (original, bytes)
        };
        assert_eq!(values(0), (true, vec![1]));
        assert_eq!(values(1), (false, vec![1, 2]));
        assert_eq!(
            values(2),
            (false, vec![1, 2]),
            "its FLUSH did not wait for the second"
        );
        assert_eq!(values(3), (false, vec![0, 2]));
        assert_eq!(values(4), (false, vec![0, 2, 3]));
        assert_eq!(values(5), (false, vec![3]));
    }

    #[test]
    fn is_seen_needs_a_sector_that_must_have_changed() {
        let seen = |changes: &[Change], mark| {
            let mut plan = Plan::new(1, 1 << 20, 1);
            plan.sectors = vec![changes.to_vec()];
            plan.is_seen(mark)
        };
        assert!(seen(&[change(Some(1), 0, 1)], 1));
        assert!(!seen(&[change(Some(1), 0, 2)], 1), "not covered yet");
        assert!(
            !seen(&[change(Some(0), 0, 1)], 1),
            "it may have been zeros before"
        );
        assert!(!seen(&[change(None, 0, 1)], 1), "a discard may do nothing");
        assert!(
            !seen(&[change(Some(1), 0, 2)], 2),
            "it may have been there at the mark before"
        );
        assert!(seen(&[change(Some(1), 0, 1), change(Some(2), 1, 2)], 2));
        assert!(!seen(&[change(Some(1), 0, 1), change(Some(1), 1, 2)], 2));
    }

    #[test]
    fn plan_rounds_do_not_overlap_and_marks_follow_flushes() {
        let plan = Plan::new(7, 8 << 20, 60);
        let mut marks = 0;
        let mut last = "flush".to_owned();
        let mut used = vec![false; 16384];
        for line in &plan.lines {
            let words: Vec<&str> = line.split(' ').collect();
            match words[0] {
                "mark" => {
                    assert_eq!((words[1].parse(), last.as_str()), (Ok(marks), "flush"));
                    marks += 1;
                }
                "aio_flush" => used.fill(false),
                "flush" => {}
                _ => {
                    let number = |word: &str| word.parse::<usize>().unwrap() / 512;
                    let (at, len) = (number(words[words.len() - 2]), number(words[words.len() - 1]));
                    assert!(used[at..at + len].iter().all(|&used| !used), "{line}");
                    used[at..at + len].fill(true);
                }
            }
            last.clone_from(line);
        }
        assert_eq!(marks, plan.marks());
        assert!(marks > 20 && plan.requests() > 300, "{marks} {}", plan.requests());
        assert_eq!(plan.text(), Plan::new(7, 8 << 20, 60).text());
        assert_ne!(plan.text(), Plan::new(8, 8 << 20, 60).text());
    }

    #[test]
    fn difference_finds_a_byte_that_may_not_be_there() {
        let plan = Plan::new(1, 1 << 20, 4);
        let last = plan.marks() - 1;
        let before: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7) as u8).collect();
        let mut after = before.clone();
        for (sector, changes) in after.chunks_mut(512).zip(&plan.sectors) {
            if let Some(change) = changes.last() {
                sector.fill(change.value.unwrap_or(0));
            }
        }
        assert_eq!(plan.difference(&before, &after, last), None);
        assert!(plan.difference(&before, &before, last).is_some());
        for sector in [0, 1000, 2047] {
            let mut wrong = after.clone();
            wrong[sector * 512 + 511] ^= 0x80;
            let told = plan.difference(&before, &wrong, last).unwrap();
            assert!(
                told.contains(&format!("sector {sector} after mark {last}")),
                "{told}"
            );
        }
    }
}
