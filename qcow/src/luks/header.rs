//! The LUKS header, version 1: bytes to fields, every one checked, and back.
//!
//! Numbers are big-endian. Offsets count from the header's start, in sectors of 512 bytes. Behind the 592 bytes of the
//! header lies the material of eight key slots: each holds the volume's key, spread over stripes and encrypted with
//! a key that is derived from one passphrase.

use super::LuksError;
use super::cipher::{CipherKind, SECTOR};
use super::hash::HashKind;
use crate::format::bytes::{array_at, u16_at, u32_at};

/// The number of key slots.
pub const SLOTS: usize = 8;
/// The stripes that a key is spread over.
pub(super) const STRIPES: u32 = 4000;
/// The most iterations that an image may ask for: at most a minute for each slot on a slow processor.
pub const ITERATIONS_MAX: u32 = 1 << 26;
/// The most rounds of its hash that all slots which a secret is tried on may cost: a round is an iteration for each digest
/// that the key is made of. They take one to three minutes on a processor of 2020; what we and QEMU make, 2 s for each slot.
pub const UNLOCK_ROUNDS_MAX: u64 = 1 << 28;
/// The most bytes of a header with its key material: more than any cipher needs.
pub const HEADER_BYTES_MAX: u64 = 4 << 20;
/// The length of the header's fields in bytes.
pub(super) const FIELDS_BYTES: usize = at::SLOTS + SLOTS * SLOT_BYTES;
/// The first sector of key material in headers that we make. Others may have it at any sector behind the fields.
const MATERIAL_START: u32 = 8;
/// Key material starts at multiples of so many sectors in headers that we make.
const MATERIAL_ALIGNMENT: u32 = 8;

const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const VERSION: u16 = 1;
const NAME_BYTES: usize = 32;
const SLOT_BYTES: usize = 48;
const SLOT_ON: u32 = 0x00ac_71f3;
const SLOT_OFF: u32 = 0x0000_dead;

/// The header bytes where fields start.
mod at {
    pub(super) const VERSION: usize = 6;
    pub(super) const CIPHER: usize = 8;
    pub(super) const MODE: usize = 40;
    pub(super) const HASH: usize = 72;
    pub(super) const PAYLOAD: usize = 104;
    pub(super) const KEY_BYTES: usize = 108;
    pub(super) const DIGEST: usize = 112;
    pub(super) const DIGEST_SALT: usize = 132;
    pub(super) const DIGEST_ITERATIONS: usize = 164;
    pub(super) const UUID: usize = 168;
    pub(super) const SLOTS: usize = 208;

    /// The bytes of a slot where its fields start.
    pub(super) mod slot {
        pub(in super::super) const ITERATIONS: usize = 4;
        pub(in super::super) const SALT: usize = 8;
        pub(in super::super) const MATERIAL: usize = 40;
        pub(in super::super) const STRIPES: usize = 44;
    }
}

/// The fields of a header.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct LuksHeader {
    pub(super) cipher: CipherKind,
    pub(super) hash: HashKind,
    /// The sector where the volume starts on a disk of its own; in an image, the end of the header.
    pub(super) payload_sector: u32,
    /// The digest of the volume's key, by PBKDF2, which tells the right key from others.
    pub(super) digest: [u8; 20],
    pub(super) digest_salt: [u8; 32],
    pub(super) digest_iterations: u32,
    /// Text, padded with NULs.
    pub(super) uuid: [u8; 40],
    pub(super) slots: [Slot; SLOTS],
}

/// The fields of a key slot.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Slot {
    pub(super) active: bool,
    pub(super) iterations: u32,
    pub(super) salt: [u8; 32],
    /// The first sector of its material.
    pub(super) material_sector: u32,
}

impl Slot {
    pub(super) fn material_start(&self) -> usize {
        self.material_sector as usize * SECTOR
    }

    /// Returns the slot's bytes in the header.
    pub(super) fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        put(&mut bytes, 0, &Self::state(self.active));
        put(&mut bytes, at::slot::ITERATIONS, &self.iterations.to_be_bytes());
        put(&mut bytes, at::slot::SALT, &self.salt);
        put(
            &mut bytes,
            at::slot::MATERIAL,
            &self.material_sector.to_be_bytes(),
        );
        put(&mut bytes, at::slot::STRIPES, &STRIPES.to_be_bytes());
        bytes
    }

    /// Returns the bytes at a slot's start that alone say if it is in use.
    pub(super) fn state(active: bool) -> [u8; 4] {
        if active { SLOT_ON } else { SLOT_OFF }.to_be_bytes()
    }

    /// Returns the header byte where slot `index` starts.
    pub(super) fn start(index: usize) -> usize {
        at::SLOTS + index * SLOT_BYTES
    }

    fn parse(bytes: &[u8], index: usize) -> Result<Self, LuksError> {
        let start = Self::start(index);
        let field = |name: &str| format!("{name} of key slot {index}");
        let state = u32_field(bytes, start)?;
        if ![SLOT_ON, SLOT_OFF].contains(&state) {
            let expected = format!("{SLOT_ON:#x} (in use) or {SLOT_OFF:#x} (not in use)");
            return Err(LuksError::field(
                field("state"),
                start,
                format!("{state:#x}"),
                expected,
            ));
        }
        let active = state == SLOT_ON;
        let at = start + at::slot::ITERATIONS;
        let iterations = u32_field(bytes, at)?;
        if active {
            check_iterations(field("iterations"), at, iterations)?;
        }
        let at = start + at::slot::STRIPES;
        let stripes = u32_field(bytes, at)?;
        if stripes != STRIPES {
            return Err(LuksError::field(field("stripes"), at, stripes, STRIPES));
        }
        Ok(Self {
            active,
            iterations,
            salt: array_field(bytes, start + at::slot::SALT)?,
            material_sector: u32_field(bytes, start + at::slot::MATERIAL)?,
        })
    }
}

impl LuksHeader {
    /// Returns a header with no slot in use, whose material lies as QEMU lays it out.
    pub(super) fn new(cipher: CipherKind, hash: HashKind) -> Self {
        let sectors = (material_bytes(cipher).div_ceil(SECTOR) as u32).next_multiple_of(MATERIAL_ALIGNMENT);
        let mut slots = [Slot::default(); SLOTS];
        let mut sector = MATERIAL_START;
        for slot in &mut slots {
            slot.material_sector = sector;
            sector += sectors;
        }
        Self {
            cipher,
            hash,
            payload_sector: sector,
            digest: [0; 20],
            digest_salt: [0; 32],
            digest_iterations: 0,
            uuid: [0; 40],
            slots,
        }
    }

    /// Returns the length in bytes of the header with all key material.
    pub(super) fn total_bytes(&self) -> usize {
        self.payload_sector as usize * SECTOR
    }

    /// Returns the bytes of a slot's material.
    pub(super) fn material_range(&self, slot: &Slot) -> std::ops::Range<usize> {
        let start = slot.material_start();
        start..start + material_bytes(self.cipher)
    }

    /// Returns the rounds of the hash that it costs to try a secret on a slot: those of the slot's key, and of the digest of
    /// the volume's key that the slot yields.
    pub(super) fn rounds(&self, slot: &Slot) -> u64 {
        let rounds = |iterations: u32, bytes: usize| {
            u64::from(iterations) * bytes.div_ceil(self.hash.digest_bytes()) as u64
        };
        rounds(slot.iterations, self.cipher.key_bytes()) + rounds(self.digest_iterations, self.digest.len())
    }

    /// Parses and checks the header at the start of `bytes`, which also hold all key material.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, LuksError> {
        let magic: [u8; 6] = array_field(bytes, 0)?;
        if magic != MAGIC {
            let expected = format!("{MAGIC:x?}, the magic of LUKS");
            return Err(LuksError::field("magic", 0, format!("{magic:x?}"), expected));
        }
        let version = u16_at(bytes, at::VERSION).ok_or_else(|| short(bytes))?;
        if version != VERSION {
            return Err(LuksError::field("version", at::VERSION, version, VERSION));
        }
        supported("cipher", name(bytes, at::CIPHER)?, &[CipherKind::NAME])?;
        supported("mode", name(bytes, at::MODE)?, &[CipherKind::MODE])?;
        let hash_name = name(bytes, at::HASH)?;
        supported("hash", hash_name, &["sha1", "sha256", "sha512"])?;
        let hash = HashKind::from_name(hash_name).unwrap_or_default();
        let key_bytes = u32_field(bytes, at::KEY_BYTES)?;
        let cipher = CipherKind::from_key_bytes(key_bytes).ok_or_else(|| {
            let expected = "64 (aes-256) or 32 (aes-128) with xts-plain64";
            LuksError::field("key bytes", at::KEY_BYTES, key_bytes, expected)
        })?;
        let digest_iterations = u32_field(bytes, at::DIGEST_ITERATIONS)?;
        check_iterations(
            "iterations of the key's digest",
            at::DIGEST_ITERATIONS,
            digest_iterations,
        )?;
        let mut slots = [Slot::default(); SLOTS];
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = Slot::parse(bytes, index)?;
        }
        let header = Self {
            cipher,
            hash,
            payload_sector: u32_field(bytes, at::PAYLOAD)?,
            digest: array_field(bytes, at::DIGEST)?,
            digest_salt: array_field(bytes, at::DIGEST_SALT)?,
            digest_iterations,
            uuid: array_field(bytes, at::UUID)?,
            slots,
        };
        header.check_places(bytes.len())?;
        Ok(header)
    }

    /// Checks that the material of every slot lies behind the fields, before the payload, apart from the others' and in
    /// the `len` bytes of the header.
    fn check_places(&self, len: usize) -> Result<(), LuksError> {
        let payload = u64::from(self.payload_sector) * SECTOR as u64;
        if payload < FIELDS_BYTES as u64 || payload > len as u64 {
            let first = FIELDS_BYTES.div_ceil(SECTOR);
            let expected = format!("{first} to {}, as the header has {len} bytes", len / SECTOR);
            return Err(LuksError::field(
                "payload sector",
                at::PAYLOAD,
                self.payload_sector,
                expected,
            ));
        }
        let bytes = material_bytes(self.cipher) as u64;
        let start = |slot: &Slot| u64::from(slot.material_sector) * SECTOR as u64;
        for (index, slot) in self.slots.iter().enumerate() {
            let wrong = |expected: String| {
                let (name, at) = (
                    format!("material sector of key slot {index}"),
                    Slot::start(index) + at::slot::MATERIAL,
                );
                LuksError::field(name, at, slot.material_sector, expected)
            };
            if start(slot) < FIELDS_BYTES as u64 || start(slot) + bytes > payload {
                return Err(wrong(format!(
                    "{bytes} bytes of material behind the header's {FIELDS_BYTES} and before the payload at {payload}"
                )));
            }
            let earlier = self.slots.iter().take(index).enumerate();
            for (other, earlier) in earlier {
                if start(slot) < start(earlier) + bytes && start(earlier) < start(slot) + bytes {
                    return Err(wrong(format!("a place apart from that of key slot {other}")));
                }
            }
        }
        Ok(())
    }

    /// Returns the bytes of the fields.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; FIELDS_BYTES];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, at::VERSION, &VERSION.to_be_bytes());
        put(&mut bytes, at::CIPHER, CipherKind::NAME.as_bytes());
        put(&mut bytes, at::MODE, CipherKind::MODE.as_bytes());
        put(&mut bytes, at::HASH, self.hash.name().as_bytes());
        put(&mut bytes, at::PAYLOAD, &self.payload_sector.to_be_bytes());
        put(
            &mut bytes,
            at::KEY_BYTES,
            &(self.cipher.key_bytes() as u32).to_be_bytes(),
        );
        put(&mut bytes, at::DIGEST, &self.digest);
        put(&mut bytes, at::DIGEST_SALT, &self.digest_salt);
        put(
            &mut bytes,
            at::DIGEST_ITERATIONS,
            &self.digest_iterations.to_be_bytes(),
        );
        put(&mut bytes, at::UUID, &self.uuid);
        for (index, slot) in self.slots.iter().enumerate() {
            put(&mut bytes, Slot::start(index), &slot.encode());
        }
        bytes
    }

    /// Returns the UUID's text.
    pub(super) fn uuid_text(&self) -> String {
        let text = self.uuid.split(|&byte| byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }
}

/// Returns the length of a slot's material in bytes: whole sectors, as [`STRIPES`] keys are.
pub(super) fn material_bytes(cipher: CipherKind) -> usize {
    cipher.key_bytes() * STRIPES as usize
}

fn check_iterations(field: impl ToString, at: usize, found: u32) -> Result<(), LuksError> {
    match found {
        1..=ITERATIONS_MAX => Ok(()),
        _ => Err(LuksError::field(
            field,
            at,
            found,
            format!("1 to {ITERATIONS_MAX}"),
        )),
    }
}

fn supported(what: &'static str, name: &str, names: &[&str]) -> Result<(), LuksError> {
    if names.contains(&name) {
        return Ok(());
    }
    Err(LuksError::Unsupported {
        what,
        name: name.escape_debug().to_string(),
        expected: names.join(", "),
    })
}

/// Returns the text of a name field, which ends at a NUL.
fn name(bytes: &[u8], at: usize) -> Result<&str, LuksError> {
    let field = bytes.get(at..at + NAME_BYTES).ok_or_else(|| short(bytes))?;
    let end = field.iter().position(|&byte| byte == 0);
    let text = end.and_then(|end| std::str::from_utf8(field.get(..end)?).ok());
    text.ok_or_else(|| {
        LuksError::field(
            "name",
            at,
            String::from_utf8_lossy(field).escape_debug(),
            "text that a NUL ends",
        )
    })
}

fn u32_field(bytes: &[u8], at: usize) -> Result<u32, LuksError> {
    u32_at(bytes, at).ok_or_else(|| short(bytes))
}

fn array_field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], LuksError> {
    array_at(bytes, at).ok_or_else(|| short(bytes))
}

fn short(bytes: &[u8]) -> LuksError {
    LuksError::Truncated {
        found: bytes.len(),
        needed: FIELDS_BYTES,
    }
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    for (to, from) in bytes.iter_mut().skip(at).zip(field) {
        *to = *from;
    }
}

const _: () = {
    assert!(FIELDS_BYTES == 592);
    assert!(MATERIAL_START as usize * SECTOR >= FIELDS_BYTES);
    // Material is whole sectors.
    assert!((STRIPES as usize * 32).is_multiple_of(SECTOR));
};
