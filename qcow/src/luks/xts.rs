//! XTS: the mode of IEEE 1619, with 512-byte sectors whose number is the tweak ("plain64").
//!
//! Each 16-byte block is xored with a tweak before and after AES. A sector's tweaks follow from its number: AES of the
//! number, then one doubling in GF(2^128) for each block. A doubling waits for the one before it, and so do the rounds of
//! AES. So several sectors' tweaks are made at once, and as many blocks go to AES as the processor works on in parallel;
//! `aes` finds its instructions at run time.

use aes::cipher::consts::U16;
use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, KeyInit, KeySizeUser};
use zeroize::Zeroize;

use super::cipher::SECTOR;

const BLOCK: usize = 16;
const BLOCKS: usize = SECTOR / BLOCK;
/// The most sectors whose tweaks are made at once.
const BATCH: usize = 8;

type Block = Array<u8, U16>;
/// A tweak as two numbers, the lower one first, of which the compiler xors several at once.
type Tweak = [u64; 2];

/// AES in the mode XTS: one key for the data, one for the tweaks.
#[derive(Debug)]
pub(super) struct Xts<Aes, Enc> {
    data: Aes,
    tweak: Enc,
}

impl<Aes, Enc> Xts<Aes, Enc>
where
    Aes: KeyInit + BlockCipherEncrypt + BlockCipherDecrypt + BlockSizeUser<BlockSize = U16>,
    Enc: KeyInit + KeySizeUser<KeySize = Aes::KeySize> + BlockCipherEncrypt + BlockSizeUser<BlockSize = U16>,
{
    /// Makes the cipher of a key: the data's key, then the tweaks'. `None` if the key does not have the length of both.
    pub(super) fn new(key: &[u8]) -> Option<Self> {
        let (data, tweak) = key.split_at_checked(key.len() / 2)?;
        Some(Self {
            data: Aes::new_from_slice(data).ok()?,
            tweak: Enc::new_from_slice(tweak).ok()?,
        })
    }

    pub(super) fn encrypt(&self, sector: u64, bytes: &mut [u8]) {
        self.each_batch(sector, bytes, |blocks| self.data.encrypt_blocks(blocks));
    }

    pub(super) fn decrypt(&self, sector: u64, bytes: &mut [u8]) {
        self.each_batch(sector, bytes, |blocks| self.data.decrypt_blocks(blocks));
    }

    /// Calls `aes` for each few sectors, between the two xors with the tweaks.
    fn each_batch(&self, first: u64, bytes: &mut [u8], aes: impl Fn(&mut [Block])) {
        let mut tweaks = [[Tweak::default(); BLOCKS]; BATCH];
        let mut sector = first;
        for batch in bytes.chunks_mut(BATCH * SECTOR) {
            let sectors = batch.len() / SECTOR;
            let tweaks = &mut tweaks[..sectors];
            self.tweaks(sector, tweaks);
            let tweaks = tweaks.as_flattened().as_flattened();
            xor(batch, tweaks);
            aes(Block::slice_as_chunks_mut(batch).0);
            xor(batch, tweaks);
            sector = sector.wrapping_add(sectors as u64);
        }
        let used = tweaks.iter_mut().take(bytes.len() / SECTOR);
        used.for_each(|sector| sector.as_flattened_mut().zeroize());
    }

    /// Fills in the tweaks of the blocks of at most [`BATCH`] sectors, from sector `first` on.
    fn tweaks(&self, first: u64, tweaks: &mut [[Tweak; BLOCKS]]) {
        let mut starts = [Block::default(); BATCH];
        for (index, start) in (0..).zip(&mut starts) {
            *start = Block::from(u128::from(first.wrapping_add(index)).to_le_bytes());
        }
        self.tweak.encrypt_blocks(&mut starts[..tweaks.len()]);
        let mut chains = starts.map(|start| u128::from_le_bytes(start.0));
        for block in 0..BLOCKS {
            for (chain, sector) in chains.iter_mut().zip(tweaks.iter_mut()) {
                sector[block] = [*chain as u64, (*chain >> 64) as u64];
                *chain = double(*chain);
            }
        }
    }
}

/// Multiplies by x in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1.
fn double(value: u128) -> u128 {
    let carry = (value >> 127).wrapping_neg() & 0x87;
    value.wrapping_shl(1) ^ carry
}

fn xor(bytes: &mut [u8], tweaks: &[u64]) {
    let (words, _) = bytes.as_chunks_mut::<8>();
    for (word, tweak) in words.iter_mut().zip(tweaks) {
        *word = (u64::from_le_bytes(*word) ^ tweak).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aes::{Aes128, Aes128Enc, Aes256, Aes256Enc};

    fn bytes(hex: &str) -> Vec<u8> {
        let pairs = hex.as_bytes().as_chunks::<2>().0;
        let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        pairs.iter().map(byte).collect()
    }

    /// The 512 bytes 00, 01, … ff, 00, … of the vectors.
    fn counting() -> Vec<u8> {
        (0..512_u32).map(|index| index as u8).collect()
    }

    const E: [u8; 16] = [
        0x27, 0x18, 0x28, 0x18, 0x28, 0x45, 0x90, 0x45, 0x23, 0x53, 0x60, 0x28, 0x74, 0x71, 0x35, 0x26,
    ];

    /// IEEE 1619-2007, annex B, vector 4: XTS-AES-128, a whole sector.
    #[test]
    fn aes_128_agrees_with_vector_4_of_ieee_1619() {
        let key = bytes("2718281828459045235360287471352631415926535897932384626433832795");
        assert_eq!(key[..16], E);
        let cipher = Xts::<Aes128, Aes128Enc>::new(&key).unwrap();
        let mut data = counting();
        cipher.encrypt(0, &mut data);
        assert_eq!(
            data[..64],
            bytes(
                "27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c\
                 c78cf7f5e543445f8333d8fa7f56000005279fa5d8b5e4ad40e736ddb4d35412"
            )
        );
        cipher.decrypt(0, &mut data);
        assert_eq!(data, counting());
    }

    /// IEEE 1619-2007, annex B, vector 10: XTS-AES-256, sector 0xff.
    #[test]
    fn aes_256_agrees_with_vector_10_of_ieee_1619() {
        let key = bytes(
            "2718281828459045235360287471352662497757247093699959574966967627\
             3141592653589793238462643383279502884197169399375105820974944592",
        );
        let cipher = Xts::<Aes256, Aes256Enc>::new(&key).unwrap();
        let mut data = counting();
        cipher.encrypt(0xff, &mut data);
        assert_eq!(
            data[..64],
            bytes(
                "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b\
                 5d31e276f8fe4a8d66b317f9ac683f44680a86ac35adfc3345befecb4bb188fd"
            )
        );
        cipher.decrypt(0xff, &mut data);
        assert_eq!(data, counting());
    }

    /// The sectors of one call are those of calls of their own, in every number of whole and started batches, and each has
    /// its own tweaks.
    #[test]
    fn sectors_are_numbered_from_the_first_on() {
        let cipher = Xts::<Aes256, Aes256Enc>::new(&(0..64).collect::<Vec<u8>>()).unwrap();
        for sectors in 0..=2 * BATCH + 1 {
            let mut together = vec![7; sectors * SECTOR];
            cipher.encrypt(u64::from(u32::MAX), &mut together);
            for (index, sector) in (0..).zip(together.chunks_exact(SECTOR)) {
                let mut alone = [7; SECTOR];
                cipher.encrypt(u64::from(u32::MAX) + index, &mut alone);
                assert_eq!(sector, alone, "sector {index} of {sectors}");
            }
            let mut different: Vec<_> = together.chunks_exact(SECTOR).collect();
            different.dedup();
            assert_eq!(different.len(), sectors);
            cipher.decrypt(u64::from(u32::MAX), &mut together);
            assert_eq!(together, vec![7; sectors * SECTOR]);
        }
    }

    /// The definition, a block at a time, is what the batches compute.
    #[test]
    fn batches_agree_with_the_definition() {
        let key: Vec<u8> = (0..64).map(|byte| byte * 3).collect();
        let cipher = Xts::<Aes256, Aes256Enc>::new(&key).unwrap();
        let plain: Vec<u8> = (0..11 * SECTOR).map(|at| (at * 7 / 5) as u8).collect();
        let mut batched = plain.clone();
        cipher.encrypt(1000, &mut batched);
        let mut defined = plain.clone();
        for (index, sector) in (1000_u64..).zip(defined.chunks_exact_mut(SECTOR)) {
            let mut tweak = Block::from(u128::from(index).to_le_bytes());
            cipher.tweak.encrypt_block(&mut tweak);
            let mut tweak = u128::from_le_bytes(tweak.0);
            for block in Block::slice_as_chunks_mut(sector).0 {
                block.0 = (u128::from_le_bytes(block.0) ^ tweak).to_le_bytes();
                cipher.data.encrypt_block(block);
                block.0 = (u128::from_le_bytes(block.0) ^ tweak).to_le_bytes();
                tweak = double(tweak);
            }
        }
        assert_eq!(batched, defined);
    }

    #[test]
    fn key_of_another_length_is_refused() {
        for len in [0, 31, 32, 63, 65, 128] {
            assert!(Xts::<Aes256, Aes256Enc>::new(&vec![1; len]).is_none(), "{len}");
        }
    }
}
