//! The ciphers of guest data, and their names in a LUKS header.

use std::fmt;

use aes::{Aes128, Aes128Enc, Aes256, Aes256Enc};
use zeroize::Zeroize;

use super::Secret;
use super::cbc::Cbc;
use super::xts::Xts;

/// The unit of encryption in bytes: each has a tweak or an IV of its own.
pub const SECTOR: usize = 512;

/// The cipher of guest data, in whole sectors of 512 bytes. Its keys are wiped when it is dropped.
pub struct SectorCipher(Mode);

// The keys' schedules are wiped by the `aes` crate (feature `zeroize`).
enum Mode {
    Xts128(Box<Xts<Aes128, Aes128Enc>>),
    Xts256(Box<Xts<Aes256, Aes256Enc>>),
    Cbc(Box<Cbc>),
}

impl SectorCipher {
    /// Encrypts whole sectors in place.
    ///
    /// `sector` is the number of the first: the host offset / 512 with LUKS, the guest offset / 512 with crypt method 1.
    ///
    /// # Panics
    ///
    /// If the length is no multiple of [`SECTOR`].
    pub fn encrypt(&self, sector: u64, bytes: &mut [u8]) {
        assert_whole(bytes);
        match &self.0 {
            Mode::Xts128(xts) => xts.encrypt(sector, bytes),
            Mode::Xts256(xts) => xts.encrypt(sector, bytes),
            Mode::Cbc(cbc) => cbc.encrypt(sector, bytes),
        }
    }

    /// Decrypts whole sectors in place; `sector` as for [`Self::encrypt`].
    ///
    /// # Panics
    ///
    /// If the length is no multiple of [`SECTOR`].
    pub fn decrypt(&self, sector: u64, bytes: &mut [u8]) {
        assert_whole(bytes);
        match &self.0 {
            Mode::Xts128(xts) => xts.decrypt(sector, bytes),
            Mode::Xts256(xts) => xts.decrypt(sector, bytes),
            Mode::Cbc(cbc) => cbc.decrypt(sector, bytes),
        }
    }
}

impl fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Mode::Xts128(_) => "SectorCipher(aes-128 xts-plain64)",
            Mode::Xts256(_) => "SectorCipher(aes-256 xts-plain64)",
            Mode::Cbc(_) => "SectorCipher(aes-128 cbc-plain64)",
        })
    }
}

fn assert_whole(bytes: &[u8]) {
    assert!(
        bytes.len().is_multiple_of(SECTOR),
        "{} bytes are no whole sectors of {SECTOR}",
        bytes.len()
    );
}

/// Returns the cipher of crypt method 1: AES-128-CBC, whose key is the first 16 bytes of the passphrase, padded with NULs.
#[must_use]
pub fn aes_cbc(secret: &Secret) -> SectorCipher {
    let mut key = [0; 16];
    for (to, from) in key.iter_mut().zip(secret.bytes()) {
        *to = *from;
    }
    let cipher = Cbc::new(&key);
    key.zeroize();
    SectorCipher(Mode::Cbc(Box::new(cipher)))
}

/// A cipher that a LUKS header may name.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum CipherKind {
    /// AES-128 in the mode XTS with the IVs plain64.
    Aes128Xts,
    /// AES-256 in the mode XTS with the IVs plain64.
    #[default]
    Aes256Xts,
}

impl CipherKind {
    /// The name of the cipher in a header.
    pub const NAME: &'static str = "aes";
    /// The name of the mode and its IVs in a header.
    pub const MODE: &'static str = "xts-plain64";

    /// Returns the cipher with a key of `bytes`; a header tells them apart by that alone.
    pub(super) fn from_key_bytes(bytes: u32) -> Option<Self> {
        match bytes {
            32 => Some(Self::Aes128Xts),
            64 => Some(Self::Aes256Xts),
            _ => None,
        }
    }

    /// Returns QEMU's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Aes128Xts => "aes-128",
            Self::Aes256Xts => "aes-256",
        }
    }

    /// Returns the cipher with QEMU's name `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Aes128Xts, Self::Aes256Xts]
            .into_iter()
            .find(|kind| kind.name() == name)
    }

    /// Returns the length of a key in bytes: that of the data, and that of the tweaks.
    #[must_use]
    pub fn key_bytes(self) -> usize {
        match self {
            Self::Aes128Xts => 32,
            Self::Aes256Xts => 64,
        }
    }

    /// Makes the cipher of a key. `None` if the key has another length.
    pub(super) fn with_key(self, key: &[u8]) -> Option<SectorCipher> {
        let mode = match self {
            Self::Aes128Xts => Mode::Xts128(Box::new(Xts::new(key)?)),
            Self::Aes256Xts => Mode::Xts256(Box::new(Xts::new(key)?)),
        };
        Some(SectorCipher(mode))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_method_1_is_the_start_of_the_passphrase_padded_with_nuls() {
        let encrypted = |secret: &[u8]| {
            let mut data = [1; SECTOR];
            aes_cbc(&Secret::new(secret.to_vec())).encrypt(5, &mut data);
            data
        };
        assert_eq!(
            encrypted(b"0123456789abcdef"),
            encrypted(b"0123456789abcdef, and more")
        );
        assert_eq!(encrypted(b"short"), encrypted(b"short\0\0\0"));
        assert_ne!(encrypted(b"short"), encrypted(b"shorter"));
    }

    #[test]
    #[should_panic(expected = "no whole sectors")]
    fn part_of_a_sector_is_refused() {
        aes_cbc(&Secret::new(Vec::new())).decrypt(0, &mut [0; SECTOR + 16]);
    }

    #[test]
    fn ciphers_can_be_shared_among_threads() {
        fn check<T: Send + Sync>() {}
        check::<SectorCipher>();
    }
}
