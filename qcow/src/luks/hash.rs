//! The hashes that a LUKS header may name, the key of a passphrase (PBKDF2), and the spreading of a key over stripes.

use pbkdf2::pbkdf2_hmac;
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};
use zeroize::{Zeroize, Zeroizing};

/// A hash.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum HashKind {
    /// SHA-1.
    Sha1,
    /// SHA-256.
    #[default]
    Sha256,
    /// SHA-512.
    Sha512,
}

impl HashKind {
    const ALL: [Self; 3] = [Self::Sha1, Self::Sha256, Self::Sha512];

    /// Returns its name in a header, which is also QEMU's.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    /// Returns the hash with the name `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| hash.name() == name)
    }

    /// Returns the length of a digest in bytes.
    pub(super) fn digest_bytes(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    /// Derives `len` bytes from a secret. Takes time in proportion to `iterations`.
    pub(super) fn derive(
        self,
        secret: &[u8],
        salt: &[u8],
        iterations: u32,
        len: usize,
    ) -> Zeroizing<Vec<u8>> {
        let mut key = Zeroizing::new(vec![0; len]);
        match self {
            Self::Sha1 => pbkdf2_hmac::<Sha1>(secret, salt, iterations, &mut key),
            Self::Sha256 => pbkdf2_hmac::<Sha256>(secret, salt, iterations, &mut key),
            Self::Sha512 => pbkdf2_hmac::<Sha512>(secret, salt, iterations, &mut key),
        }
        key
    }

    /// Replaces each piece of `block` as long as a digest by the start of the hash of its number and itself.
    fn diffuse(self, block: &mut [u8]) {
        for (index, piece) in (0_u32..).zip(block.chunks_mut(self.digest_bytes())) {
            let number = index.to_be_bytes();
            match self {
                Self::Sha1 => replace(
                    piece,
                    &mut Sha1::new().chain_update(number).chain_update(&*piece).finalize(),
                ),
                Self::Sha256 => {
                    replace(
                        piece,
                        &mut Sha256::new()
                            .chain_update(number)
                            .chain_update(&*piece)
                            .finalize(),
                    );
                }
                Self::Sha512 => {
                    replace(
                        piece,
                        &mut Sha512::new()
                            .chain_update(number)
                            .chain_update(&*piece)
                            .finalize(),
                    );
                }
            }
        }
    }

    /// Puts together the key that is spread over stripes of `len` bytes.
    pub(super) fn merge(self, stripes: &[u8], len: usize) -> Zeroizing<Vec<u8>> {
        let mut key = Zeroizing::new(vec![0; len]);
        let mut stripes = stripes.chunks_exact(len).peekable();
        while let Some(stripe) = stripes.next() {
            xor(&mut key, stripe);
            if stripes.peek().is_some() {
                self.diffuse(&mut key);
            }
        }
        key
    }

    /// Spreads a key over `stripes`: random bytes, of which all but the last `key.len()` stay as they are.
    pub(super) fn split(self, key: &[u8], stripes: &mut [u8]) {
        let mut block = Zeroizing::new(vec![0; key.len()]);
        let last = stripes.len().saturating_sub(key.len());
        let (before, last) = stripes.split_at_mut(last);
        for stripe in before.chunks_exact(key.len()) {
            xor(&mut block, stripe);
            self.diffuse(&mut block);
        }
        last.copy_from_slice(key);
        xor(last, &block);
    }
}

fn replace(piece: &mut [u8], digest: &mut [u8]) {
    for (to, from) in piece.iter_mut().zip(&*digest) {
        *to = *from;
    }
    digest.zeroize();
}

fn xor(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to ^= from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 6070 (SHA-1) and RFC 7914, section 11 (SHA-256).
    #[test]
    fn derived_keys_agree_with_the_vectors_of_the_rfcs() {
        let key = HashKind::Sha1.derive(b"password", b"salt", 4096, 20);
        let expected = [
            0x4b, 0x00, 0x79, 0x01, 0xb7, 0x65, 0x48, 0x9a, 0xbe, 0xad, 0x49, 0xd9, 0x26, 0xf7, 0x21, 0xd0,
            0x65, 0xa4, 0x29, 0xc1,
        ];
        assert_eq!(key[..], expected);
        let key = HashKind::Sha256.derive(b"passwd", b"salt", 1, 64);
        let start = 0x55ac_046e_56e3_089f_ec16_91c2_2544_b605_u128.to_be_bytes();
        assert_eq!(key[..16], start);
    }

    #[test]
    fn merge_undoes_split_for_every_hash_and_key_length() {
        for hash in HashKind::ALL {
            for len in [16, 32, 50, 64] {
                let key: Vec<u8> = (1..=len).collect();
                let random: Vec<u8> = (0..usize::from(len) * 40)
                    .map(|index| (index * 7 + 3) as u8)
                    .collect();
                let mut stripes = random.clone();
                hash.split(&key, &mut stripes);
                let last = usize::from(len) * 39;
                assert_eq!(stripes[..last], random[..last]);
                assert_eq!(hash.merge(&stripes, usize::from(len))[..], key, "{hash:?} {len}");
                // One bit anywhere changes the key everywhere.
                stripes[1] ^= 1;
                assert_ne!(hash.merge(&stripes, usize::from(len))[..4], key[..4]);
            }
        }
    }

    #[test]
    fn names_lead_back_to_their_hashes() {
        for hash in HashKind::ALL {
            assert_eq!(HashKind::from_name(hash.name()), Some(hash));
        }
        assert_eq!(HashKind::from_name("whirlpool"), None);
    }
}
