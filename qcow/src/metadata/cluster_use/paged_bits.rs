//! Sets of numbers as bitmaps, in pages that exist only where a number is in the set.
//!
//! The clusters of a file lie close together, so that a page is well filled: two bits for each host cluster of one
//! tebibyte are 4 MiB. An image may refer to clusters scattered at will, so the caller bounds the number of pages.

use rustc_hash::FxHashMap;

use super::place;

/// The words of a page, of 64 bits each.
const PAGE_WORDS: usize = 64;

/// The memory of a page in bytes: its words, the allocator's header, and its place in the table of pages, of which up
/// to half are free.
pub(super) const PAGE_BYTES: usize = PAGE_WORDS * 8 + 16 + 32;

/// A set of numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct PagedBits {
    /// By number / 4096.
    pages: FxHashMap<u64, Box<[u64; PAGE_WORDS]>>,
}

/// Returns the page of a word, and the word's index in it.
fn page_of(word: u64) -> (u64, usize) {
    (word / PAGE_WORDS as u64, (word % PAGE_WORDS as u64) as usize)
}

impl PagedBits {
    /// Returns the number of pages.
    pub(super) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Returns word `word`: a bit for each of the numbers `64 * word..64 * word + 64`.
    pub(super) fn word(&self, word: u64) -> u64 {
        let (page, index) = page_of(word);
        self.pages.get(&page).map_or(0, |page| page[index])
    }

    /// Returns true if a number is in the set.
    pub(super) fn contains(&self, number: u64) -> bool {
        let (word, bit) = place(number);
        self.word(word) & bit != 0
    }

    /// Adds the numbers of `bits` in word `word`, if their page exists or `grows`. Returns the bits of that word that
    /// were set before; `None` if there is no page for it.
    pub(super) fn add(&mut self, word: u64, bits: u64, grows: bool) -> Option<u64> {
        let (page, index) = page_of(word);
        let words = if grows {
            self.pages
                .entry(page)
                .or_insert_with(|| Box::new([0; PAGE_WORDS]))
        } else {
            self.pages.get_mut(&page)?
        };
        let before = words[index];
        words[index] |= bits;
        Some(before)
    }

    /// Returns the largest number in the set.
    pub(super) fn last(&self) -> Option<u64> {
        let (&page, words) = self.pages.iter().max_by_key(|(page, _)| **page)?;
        let (index, word) = words.iter().enumerate().rfind(|(_, word)| **word != 0)?;
        Some((page * PAGE_WORDS as u64 + index as u64) * 64 + u64::from(word.ilog2()))
    }

    /// Removes a number.
    pub(super) fn remove(&mut self, number: u64) {
        let (word, bit) = place(number);
        let (page, index) = page_of(word);
        let Some(words) = self.pages.get_mut(&page) else {
            return;
        };
        words[index] &= !bit;
        if words[index] == 0 && words.iter().all(|&word| word == 0) {
            self.pages.remove(&page);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Method: the same changes in a plain set, with numbers in few pages so that pages come and go.
    #[test]
    fn paged_bits_change_like_a_plain_set() {
        let mut bits = PagedBits::default();
        let mut model = BTreeSet::new();
        let mut random = ringdisk_gen::Random::new(7);
        for round in 0..60_000u64 {
            let number = random.draw() % 6 * (1 << 40) + random.draw() % 9000;
            // Phases that mostly add, and phases that mostly remove.
            if random.draw() % 8 < 1 + 6 * (round / 10_000 % 2) {
                bits.remove(number);
                model.remove(&number);
            } else {
                let (word, bit) = place(number);
                let before = bits.add(word, bit, true).expect("it may grow");
                assert_eq!(before & bit != 0, !model.insert(number));
            }
            assert_eq!(bits.contains(number), model.contains(&number));
            assert_eq!(bits.last(), model.last().copied());
        }
        let pages: BTreeSet<u64> = model.iter().map(|number| number / 4096).collect();
        assert_eq!(bits.pages(), pages.len(), "an empty page is dropped");
        for &number in &model {
            assert!(bits.contains(number));
        }
        while let Some(number) = model.pop_first() {
            bits.remove(number);
        }
        assert_eq!(bits.pages(), 0);
    }

    #[test]
    fn paged_bits_get_no_page_when_they_may_not_grow() {
        let mut bits = PagedBits::default();
        assert_eq!(bits.add(3, 1, false), None);
        assert_eq!(bits.add(3, 1, true), Some(0));
        assert_eq!(bits.add(63, 6, false), Some(0), "the same page");
        assert_eq!(bits.add(64, 6, false), None, "the next page");
        assert_eq!((bits.word(3), bits.word(63), bits.word(64)), (1, 6, 0));
    }
}
