//! Random source of a simulated world: a small generator whose whole state is one number.

/// SplitMix64: the same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes a generator that `seed` alone determines.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x5851_F42D_4C95_7F2D)
    }

    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number below `n`, or zero if `n` is zero.
    pub fn below(&mut self, n: u64) -> u64 {
        // The high half of the product: no division, and bias far below what matters here.
        ((u128::from(self.draw()) * u128::from(n)) >> 64) as u64
    }

    /// Returns true in `per_mille` of a thousand cases. Draws nothing for zero, so that a switched-off chance
    /// does not disturb the others.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    /// Returns true once in `n` cases.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns a random element of `of`.
    ///
    /// # Panics
    ///
    /// If `of` is empty.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}
