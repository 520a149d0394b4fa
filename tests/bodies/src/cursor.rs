//! Decisions taken from an input, byte by byte: what is not there any more is zero.

use arbitrary::Unstructured;

/// Takes decisions from bytes.
#[derive(Debug)]
pub struct Cursor<'a>(Unstructured<'a>);

impl<'a> Cursor<'a> {
    /// Starts at the first byte.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(Unstructured::new(bytes))
    }

    /// Returns true if everything was used.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of bytes left.
    #[must_use]
    pub fn left(&self) -> usize {
        self.0.len()
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0.int_in_range(0..=limit - 1).unwrap_or(0)
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        self.0.arbitrary().unwrap_or(0)
    }

    /// A number of 32 bits.
    pub fn u32(&mut self) -> u32 {
        self.0.arbitrary().unwrap_or(0)
    }

    /// A number of 64 bits.
    pub fn u64(&mut self) -> u64 {
        self.0.arbitrary().unwrap_or(0)
    }

    /// True once in `n` times. False when nothing is left.
    pub fn one_in(&mut self, n: u64) -> bool {
        !self.is_empty() && self.below(n) == n - 1
    }

    /// One of some, the first when nothing is left.
    ///
    /// # Panics
    ///
    /// If `of` is empty.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// The next `len` bytes, or as many as are left.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let len = len.min(self.0.len());
        self.0.bytes(len).unwrap_or(&[])
    }

    /// Everything that is left.
    #[must_use]
    pub fn rest(self) -> &'a [u8] {
        self.0.take_rest()
    }
}
