//! States that a power cut may leave on a device whose writes were logged.
//!
//! All that a FLUSH covers is there, and each FUA write that had ended. Of what came after the last FLUSH a disk with a
//! volatile cache keeps any part, in sectors.

use ringdisk_gen::Random;

use super::log::Entry;

/// The length that a disk writes as a whole or not at all, in bytes.
const SECTOR: usize = 512;

/// The part of the writes that no FLUSH covers and that is on the disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kept {
    /// All, so that the state is a prefix of the log.
    All,
    /// None.
    Nothing,
    /// Each with even odds.
    Half,
    /// All but one.
    AllButOne,
    /// One.
    One,
    /// Each sector of each with even odds.
    Torn,
}

/// All kinds, in the order in which [`draw`] goes through them.
const KINDS: [Kept; 6] = [
    Kept::All,
    Kept::Half,
    Kept::Nothing,
    Kept::Torn,
    Kept::AllButOne,
    Kept::One,
];

/// A power cut: after so many entries of the log, and what it kept.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// The number of entries there were.
    pub end: usize,
    /// The part that is there of those that no FLUSH covers.
    pub kept: Kept,
    /// Decides what chance decides.
    pub seed: u64,
}

/// Cuts of a log: each place once if there are no more than `count`, else `count` by chance. Half of those come right after
/// a mark, where what a FLUSH has failed to make durable is lost for certain.
#[must_use]
pub fn draw(entries: &[Entry], count: usize, seed: u64) -> Vec<Cut> {
    let mut random = Random::new(seed);
    let marks: Vec<usize> = (0..entries.len())
        .filter(|&index| matches!(entries[index], Entry::Mark(_)))
        .collect();
    let all = entries.len() < count;
    (0..count.min(entries.len() + 1))
        .map(|index| {
            let place = random.draw() as usize;
            let end = match marks.len() {
                _ if all => index,
                marked if index % 2 == 0 && marked > 0 => marks[place % marked] + 1,
                _ => place % (entries.len() + 1),
            };
            Cut {
                end,
                kept: KINDS[index / 2 % KINDS.len()],
                seed: random.draw(),
            }
        })
        .collect()
}

/// The number in the last mark before a cut; `None` if there is no mark, or it is no number.
#[must_use]
pub fn last_mark(entries: &[Entry], end: usize) -> Option<u32> {
    let mut before = entries[..end].iter().rev();
    before.find_map(|entry| match entry {
        Entry::Mark(text) => Some(text.parse().ok()),
        _ => None,
    })?
}

/// The device after a cut, which was `initial` before the log began.
///
/// # Panics
///
/// If an entry lies outside the device.
#[must_use]
pub fn device(initial: &[u8], entries: &[Entry], cut: Cut) -> Vec<u8> {
    let entries = &entries[..cut.end];
    let flushed = entries.iter().rposition(|entry| *entry == Entry::Flush);
    let flushed = flushed.map_or(0, |flush| flush + 1);
    let loose: Vec<usize> = (flushed..entries.len())
        .filter(|&index| {
            matches!(
                entries[index],
                Entry::Write { fua: false, .. } | Entry::Discard { .. }
            )
        })
        .collect();
    let mut random = Random::new(cut.seed);
    let one = loose
        .get(random.below(loose.len().max(1) as u64) as usize)
        .copied();
    let mut device = initial.to_vec();
    for (index, entry) in entries.iter().enumerate() {
        let covered = loose.binary_search(&index).is_err();
        let keep = match cut.kept {
            _ if covered => true,
            Kept::All | Kept::Torn => true,
            Kept::Nothing => false,
            Kept::Half => random.below(2) == 0,
            Kept::AllButOne => Some(index) != one,
            Kept::One => Some(index) == one,
        };
        let torn = !covered && cut.kept == Kept::Torn;
        if keep {
            apply(&mut device, entry, index, |_| !torn || random.below(2) == 0);
        }
    }
    device
}

/// The device after all of `entries` but the one at `lost`: what a disk that lies leaves.
///
/// # Panics
///
/// As [`device`].
#[must_use]
pub fn without(initial: &[u8], entries: &[Entry], lost: usize) -> Vec<u8> {
    let mut device = initial.to_vec();
    for (index, entry) in entries.iter().enumerate().filter(|(index, _)| *index != lost) {
        apply(&mut device, entry, index, |_| true);
    }
    device
}

/// The first byte where a device differs from what its whole log says; what was discarded last may be anything.
#[must_use]
pub fn difference(initial: &[u8], entries: &[Entry], device: &[u8]) -> Option<usize> {
    let mut known = vec![true; device.len() / SECTOR];
    for entry in entries {
        let (at, len, written) = match entry {
            Entry::Write { at, data, .. } => (*at as usize, data.len(), true),
            Entry::Discard { at, len } => (*at as usize, *len as usize, false),
            Entry::Flush | Entry::Mark(_) => continue,
        };
        known[at / SECTOR..(at + len) / SECTOR].fill(written);
    }
    let replayed = without(initial, entries, usize::MAX);
    let differs = |sector: &usize| {
        let range = sector * SECTOR..(sector + 1) * SECTOR;
        known[*sector] && replayed[range.clone()] != device[range]
    };
    (0..known.len()).find(differs).map(|sector| sector * SECTOR)
}

/// Applies the sectors of an entry for which `keep` holds. Discarded ranges become zeros, other bytes, or stay: no
/// device promises more, and which it is depends on the entry alone.
fn apply(device: &mut [u8], entry: &Entry, index: usize, mut keep: impl FnMut(usize) -> bool) {
    match entry {
        Entry::Write { at, data, .. } => {
            let range = *at as usize..*at as usize + data.len();
            let sectors = device[range].chunks_mut(SECTOR).zip(data.chunks(SECTOR));
            for (number, (to, from)) in sectors.enumerate() {
                if keep(number) {
                    to.copy_from_slice(from);
                }
            }
        }
        Entry::Discard { at, len } => {
            let range = *at as usize..(*at + *len) as usize;
            for (number, sector) in device[range].chunks_mut(SECTOR).enumerate() {
                match (keep(number), index % 3) {
                    (true, 0) => sector.fill(0),
                    (true, 1) => sector.fill(0x5A),
                    _ => {}
                }
            }
        }
        Entry::Flush | Entry::Mark(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(sector: u64, byte: u8, fua: bool) -> Entry {
        Entry::Write {
            at: sector * 512,
            data: vec![byte; 1024],
            fua,
        }
    }

    /// One byte of each sector.
    fn sectors(device: &[u8]) -> Vec<u8> {
        device.iter().step_by(SECTOR).copied().collect()
    }

    fn log() -> Vec<Entry> {
        vec![
            write(0, 1, false),
            Entry::Flush,
            Entry::Mark("0".to_owned()),
            write(2, 2, false),
            write(4, 3, true),
            Entry::Mark("1".to_owned()),
            write(1, 4, false),
            Entry::Flush,
        ]
    }

    #[test]
    fn flushed_and_fua_writes_are_in_every_crash_state() {
        let (log, initial) = (log(), vec![9; 4096]);
        let mut seen = std::collections::HashSet::new();
        for kept in KINDS {
            for seed in 0..200 {
                let found = device(&initial, &log, Cut { end: 7, kept, seed });
                let found = sectors(&found);
                assert!(matches!(found[0], 1) && found[4..] == [3, 3, 9, 9], "{found:?}");
                assert!(
                    matches!(found[1], 1 | 4) && matches!(found[2], 9 | 2 | 4) && matches!(found[3], 9 | 2)
                );
                let whole = match kept {
                    Kept::All => found[..4] == [1, 4, 4, 2],
                    Kept::Nothing => found[..4] == [1, 1, 9, 9],
                    _ => true,
                };
                assert!(whole, "{kept:?}: {found:?}");
                seen.insert(found);
            }
        }
        // Sectors 1, 2 and 3: two, three and two values; 1 and 2 tear apart.
        assert_eq!(seen.len(), 12);
        let covered = device(
            &initial,
            &log,
            Cut {
                end: 8,
                kept: Kept::Nothing,
                seed: 0,
            },
        );
        assert_eq!(sectors(&covered), [1, 4, 4, 2, 3, 3, 9, 9]);
        assert_eq!(
            [2, 3, 5, 6].map(|end| last_mark(&log, end)),
            [None, Some(0), Some(0), Some(1)]
        );
    }

    #[test]
    fn difference_sees_lost_entries_but_not_discarded_sectors() {
        let (mut log, initial) = (log(), vec![9; 4096]);
        let whole = without(&initial, &log, usize::MAX);
        assert_eq!(difference(&initial, &log, &whole), None);
        assert_eq!(
            difference(&initial, &log, &without(&initial, &log, 3)),
            Some(3 * 512)
        );
        log.push(Entry::Discard {
            at: 3 * 512,
            len: 512,
        });
        assert_eq!(difference(&initial, &log, &without(&initial, &log, 3)), None);
    }

    /// A short log is cut at every place. In a long one at least half of the cuts follow marks.
    #[test]
    fn draw_cuts_everywhere_or_half_after_marks() {
        let log = log();
        let ends: Vec<usize> = draw(&log, 9, 1).iter().map(|cut| cut.end).collect();
        assert_eq!(ends, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let many: Vec<Entry> = log.iter().cycle().take(800).cloned().collect();
        let cuts = draw(&many, 60, 1);
        assert_eq!(cuts.len(), 60);
        let marked = |cut: &&Cut| cut.end > 0 && matches!(many[cut.end - 1], Entry::Mark(_));
        assert!(cuts.iter().filter(marked).count() >= 30);
    }
}
