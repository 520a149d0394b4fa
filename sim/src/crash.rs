//! The crash states of a file: everything that a power cut can leave of it.
//!
//! Each sector with open versions, and the length, may have any one of them or the durable one. Sectors
//! whose versions are all alike count once. The choices are enumerated like the digits of a number, or
//! drawn at random.

use super::file::Contents;
use super::image::{SectorId, SimImage};
use super::random::Random;

/// Every state in which a power cut at one instant can leave a file.
#[derive(Clone, Debug)]
pub struct CrashSpace {
    base: SimImage,
    sectors: Vec<(u64, Vec<SectorId>)>,
    lens: Vec<u64>,
}

impl CrashSpace {
    pub(super) fn new(contents: &Contents) -> Self {
        let mut sectors = Vec::new();
        for (&sector, versions) in &contents.sectors {
            let mut ids = vec![contents.durable.get(sector)];
            for version in versions {
                if !ids.contains(&version.value) {
                    ids.push(version.value);
                }
            }
            if ids.len() > 1 {
                sectors.push((sector, ids));
            }
        }
        let mut lens = vec![contents.durable.len()];
        for version in &contents.lens {
            if !lens.contains(&version.value) {
                lens.push(version.value);
            }
        }
        Self {
            base: contents.durable.clone(),
            sectors,
            lens,
        }
    }

    /// Returns the number of combinations. Some may be the same image: a sector past the length is not visible.
    #[must_use]
    pub fn count(&self) -> u128 {
        self.sectors
            .iter()
            .fold(self.lens.len() as u128, |count, choice| {
                count.saturating_mul(choice.1.len() as u128)
            })
    }

    /// Returns the number of sectors with open versions.
    #[must_use]
    pub fn open_sectors(&self) -> usize {
        self.sectors.len()
    }

    /// Returns a hash that distinguishes spaces of one store.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let choices = self
            .sectors
            .iter()
            .flat_map(|(sector, ids)| std::iter::once(!*sector).chain(ids.iter().map(|&id| u64::from(id))));
        choices
            .chain(self.lens.iter().copied())
            .fold(self.base.fingerprint(), |hash, word| {
                (hash.rotate_left(17) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            })
    }

    fn build(&self, mut choose: impl FnMut(usize) -> usize) -> SimImage {
        let mut image = self.base.clone();
        image.set_len(self.lens[choose(self.lens.len())]);
        for (sector, ids) in &self.sectors {
            image.set(*sector, ids[choose(ids.len())]);
        }
        image.cut();
        image
    }

    /// Returns combination `number`, below [`CrashSpace::count`].
    #[must_use]
    pub fn nth(&self, mut number: u128) -> SimImage {
        self.build(|count| {
            let digit = number % count as u128;
            number /= count as u128;
            digit as usize
        })
    }

    /// Draws a random combination. Extremes come up often: most sectors new, most old, or one sector
    /// different from the rest.
    pub fn draw(&self, random: &mut Random) -> SimImage {
        let old = [500, 500, 30, 970, 0, 1000][random.below(6) as usize];
        let odd = random.below(self.sectors.len() as u64 + 1) as usize;
        let mut index = 0;
        self.build(|count| {
            let flip = index == odd;
            index += 1;
            if random.chance(old) != flip {
                0
            } else if random.one_in(3) {
                random.below(count as u64) as usize
            } else {
                count - 1
            }
        })
    }
}
