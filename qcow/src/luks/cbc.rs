//! CBC with AES-128, and the sector's number as the IV ("plain64"): the cipher of crypt method 1.

use aes::cipher::consts::U16;
use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Block};
use zeroize::Zeroize;

use super::cipher::SECTOR;

const BLOCK: usize = 16;

/// AES-128 in the mode CBC.
#[derive(Debug)]
pub(super) struct Cbc(Aes128);

impl Cbc {
    pub(super) fn new(key: &[u8; BLOCK]) -> Self {
        Self(Aes128::new(&Array::from(*key)))
    }

    pub(super) fn encrypt(&self, first: u64, bytes: &mut [u8]) {
        for (index, sector) in (0..).zip(bytes.chunks_exact_mut(SECTOR)) {
            let mut before = iv(first.wrapping_add(index));
            for block in blocks(sector) {
                xor(block, &before);
                self.0.encrypt_block(block);
                before = *block;
            }
        }
    }

    pub(super) fn decrypt(&self, first: u64, bytes: &mut [u8]) {
        let mut cipher_text = [0; SECTOR];
        for (index, sector) in (0..).zip(bytes.chunks_exact_mut(SECTOR)) {
            cipher_text.copy_from_slice(sector);
            let sector = blocks(sector);
            self.0.decrypt_blocks(sector);
            let iv = iv(first.wrapping_add(index));
            let before = std::iter::once(&iv).chain(Array::<u8, U16>::slice_as_chunks(&cipher_text).0);
            for (block, before) in sector.iter_mut().zip(before) {
                xor(block, before);
            }
        }
        cipher_text.zeroize();
    }
}

fn iv(sector: u64) -> Block {
    Block::from(u128::from(sector).to_le_bytes())
}

fn blocks(sector: &mut [u8]) -> &mut [Block] {
    Block::slice_as_chunks_mut(sector).0
}

fn xor(block: &mut Block, with: &Block) {
    for (to, from) in block.iter_mut().zip(with) {
        *to ^= from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 197's AES-128 in CBC with the IV zero: the first block is plain AES (appendix C.1).
    #[test]
    fn first_block_of_sector_zero_is_aes_alone() {
        let key = std::array::from_fn(|index| index as u8);
        let mut data = [0; SECTOR];
        let plain: [u8; 16] = std::array::from_fn(|index| (index * 0x11) as u8);
        data[..16].copy_from_slice(&plain);
        Cbc::new(&key).encrypt(0, &mut data);
        let expected = 0x69c4_e0d8_6a7b_0430_d8cd_b780_70b4_c55a_u128.to_be_bytes();
        assert_eq!(data[..16], expected);
    }

    #[test]
    fn decryption_undoes_encryption_of_several_sectors() {
        let cipher = Cbc::new(b"0123456789abcdef");
        let plain: Vec<u8> = (0..4 * SECTOR).map(|index| (index / 3) as u8).collect();
        let mut data = plain.clone();
        cipher.encrypt(77, &mut data);
        let mut third = data[2 * SECTOR..3 * SECTOR].to_vec();
        cipher.decrypt(79, &mut third);
        assert_eq!(third, plain[2 * SECTOR..3 * SECTOR]);
        cipher.decrypt(77, &mut data);
        assert_eq!(data, plain);
    }
}
