//! The contents of guest sectors: one word, repeated, that names the sector and its version.

use simulator::SECTOR;

/// The word of a sector of zeros.
pub const ZERO: u64 = 0;

/// The word of version `version` of guest sector `sector`, in the world of `salt`.
#[must_use]
pub fn word(salt: u64, version: u64, sector: u64) -> u64 {
    let mut z = (salt ^ version << 40 ^ sector).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)) | 1
}

/// The bytes of sectors with these words.
#[must_use]
pub fn bytes_of(words: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(words.len() * SECTOR);
    for word in words {
        for _ in 0..SECTOR / 8 {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    }
    bytes
}

/// The word that a sector's bytes repeat; `None` if they are anything else.
#[must_use]
pub fn word_of(sector: &[u8]) -> Option<u64> {
    let (words, _) = sector.as_chunks::<8>();
    let first = words.first()?;
    words
        .iter()
        .all(|word| word == first)
        .then(|| u64::from_le_bytes(*first))
}
