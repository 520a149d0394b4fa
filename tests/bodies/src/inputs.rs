//! Inputs of fixed seeds, for running a body without a fuzzer: a seed input with a few things changed, or random
//! bytes where a body needs no seed.

use ringdisk_gen::{Random, bytes_of_seed};

use crate::{Body, Seed};

/// Numbers that fields are compared with.
const EDGES: [u64; 12] = [
    0,
    1,
    7,
    8,
    511,
    512,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 62,
    1 << 63,
    u64::MAX,
];

/// Inputs of one body.
#[derive(Debug)]
pub struct Inputs {
    seeds: Vec<Seed>,
    bytes_max: usize,
    any: bool,
}

impl Inputs {
    /// Inputs for this body.
    #[must_use]
    pub fn new(body: &Body) -> Self {
        Self {
            seeds: (body.seeds)(),
            bytes_max: body.bytes_max,
            any: body.takes_any,
        }
    }

    /// Input `number`, always the same. The seeds as they are come first.
    #[must_use]
    pub fn get(&self, number: u64) -> Vec<u8> {
        if let Some((_, bytes)) = self.seeds.get(number as usize) {
            return bytes.clone();
        }
        let mut random = Random::new(number);
        if self.any {
            let most = 1 << (6 + random.below(7));
            let len = random.below(most) as usize;
            return bytes_of_seed(number, len.min(self.bytes_max));
        }
        let mut bytes = self.pick(&mut random).clone();
        for _ in 0..=random.below(4) {
            self.change(&mut bytes, &mut random);
        }
        bytes.truncate(self.bytes_max);
        bytes
    }

    fn pick(&self, random: &mut Random) -> &Vec<u8> {
        &self.seeds[random.below(self.seeds.len() as u64) as usize].1
    }

    fn change(&self, bytes: &mut Vec<u8>, random: &mut Random) {
        if bytes.is_empty() {
            return bytes.push(random.draw() as u8);
        }
        // Half of the time near the start, where headers are.
        let near = if random.below(2) == 0 { 256 } else { u64::MAX };
        let at = random.below(near.min(bytes.len() as u64)) as usize;
        match random.below(8) {
            0..=2 => bytes[at] ^= 1 << random.below(8),
            3 => bytes[at] = random.draw() as u8,
            4 | 5 => {
                let width = [2, 4, 8, 8][random.below(4) as usize];
                let value = EDGES[random.below(EDGES.len() as u64) as usize].to_be_bytes();
                for (place, byte) in bytes[at..].iter_mut().zip(&value[8 - width..]) {
                    *place = *byte;
                }
            }
            6 => {
                let other = self.pick(random);
                let from = random.below(other.len().max(1) as u64) as usize;
                let len = (1 + random.below(64) as usize).min(other.len() - from.min(other.len()));
                for (place, byte) in bytes[at..].iter_mut().zip(&other[from..from + len]) {
                    *place = *byte;
                }
            }
            _ => bytes.truncate(at),
        }
    }
}
