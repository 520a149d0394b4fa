//! The contents of the measured images: bytes that anybody can compute from their offset.
//!
//! Half of each block is noise and half is one byte repeated, so that compressed images shrink to about
//! a half, as real ones do.

use std::io;

use ringdisk_gen::Random;

use crate::workload::{Offsets, Pattern, Workload};

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

/// Returns the offsets of `blocks` blocks of a disk, in bytes, to be looked at by [`check`].
pub(crate) fn samples(disk_bytes: u64, block_bytes: u32, blocks: u32) -> impl Iterator<Item = u64> {
    let workload = Workload {
        pattern: Pattern::RandomRead,
        block_bytes,
        depth: 1,
        disk_bytes,
    };
    let mut offsets = Offsets::new(&workload, 99);
    (0..blocks).map_while(move |_| offsets.next_offset())
}

/// Compares the first block of what was read at `offset`, in bytes, with its content.
///
/// # Errors
///
/// If they differ; the message names the offset.
pub(crate) fn check(offset: u64, found: &[u8]) -> io::Result<()> {
    let mut expected = vec![0; BLOCK_BYTES];
    fill(offset / BLOCK_BYTES as u64, &mut expected);
    if found.get(..BLOCK_BYTES) == Some(&expected) {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "wrong bytes were read at offset {offset:#x}"
    )))
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

    #[test]
    fn check_names_the_offset_of_wrong_bytes() {
        let mut block = vec![0; BLOCK_BYTES];
        fill(3, &mut block);
        assert!(check(3 * BLOCK_BYTES as u64, &block).is_ok());
        block[17] ^= 1;
        let wrong = check(3 * BLOCK_BYTES as u64, &block).map_err(|error| error.to_string());
        assert!(wrong.is_err_and(|text| text.contains("0x3000")));
        assert!(check(0, &[]).is_err(), "too short");
    }
}
