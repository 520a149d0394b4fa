//! The contents of the measured images: bytes that anybody can compute from their offset.
//!
//! Half of each block is noise and half is one byte repeated, so that compressed images shrink to about
//! a half, as real ones do.

use ringdisk_gen::Random;

/// The unit the content is made in, in bytes.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// Writes the content of block `index` (offset `index * BLOCK_BYTES`) to `out`.
pub(crate) fn fill(index: u64, out: &mut [u8]) {
    let half = out.len() / 2;
    let (noise, flat) = out.split_at_mut(half);
    let mut random = Random::new(index);
    for word in noise.chunks_mut(8) {
        word.copy_from_slice(&random.draw().to_le_bytes()[..word.len()]);
    }
    flat.fill((index % 255) as u8 + 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fill_differs_per_block_and_is_never_all_zeros() {
        let (mut one, mut two) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
        fill(0, &mut one);
        fill(255, &mut two);
        assert_ne!(one, two);
        assert!(one[..2048].iter().any(|&byte| byte != 0));
        assert!(one[2048..].iter().all(|&byte| byte == 1));
    }
}
