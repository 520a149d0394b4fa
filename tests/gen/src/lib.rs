//! Input generators for tests: QCOW2 images, sound and malformed, and kernels for the KVM machine.
//!
//! ```text
//!  ImageSpec ──▶ Image ──▶ bytes of a sound image ──▶ malformed: one defect, and what must come of it
//!  kernel    ──▶ a bootable ELF file of a few bytes
//! ```
//!
//! Images are written from the specification alone, without Ringdisk's crates, so that an error in our encoder is not
//! repeated in its test. Only [`costly`], [`watch`], [`fingerprint`], [`space`], [`kvm`],
//! [`sockets`] and [`patience`] do I/O or look at the clock.
//!
//! ```
//! use ringdisk_gen::Random;
//!
//! let (mut a, mut b) = (Random::new(7), Random::new(7));
//! assert_eq!(a.draw(), b.draw(), "a seed determines the run");
//! ```
//!
//! Invariant: the same seed gives the same input.

pub mod array;
pub mod costly;
pub mod discard_loops;
pub mod fingerprint;
pub mod image;
pub mod kernel;
pub mod kvm;
pub mod malformed;
pub mod patience;
pub mod sockets;
pub mod space;
pub mod watch;

pub use image::{Content, Image, ImageSpec, Place, Snapshot, Structure};

/// xorshift64*: the same seed gives the same run.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator of its own for each seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.draw() >> 11) % limit
    }

    /// True once in `n` cases.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `from`, which is not empty.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// Random bytes, always the same for a seed: what a fuzzer would have thought of.
#[must_use]
pub fn bytes_of_seed(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes: Vec<u8> = (0..len.div_ceil(8))
        .flat_map(|_| random.draw().to_le_bytes())
        .collect();
    bytes.truncate(len);
    bytes
}
