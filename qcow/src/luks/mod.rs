//! LUKS, version 1, as QCOW2 images hold it (crypt method 2), and the cipher of crypt method 1.
//!
//! ```text
//! passphrase ──PBKDF2──▶ slot key ──decrypts──▶ material ──merge──▶ volume key ──▶ SectorCipher
//!                                                                       └──PBKDF2 = digest? the passphrase was right
//! ```
//!
//! Everything here is pure functions over the bytes of a header and its key material; where they lie is the image's
//! matter. Deriving keys takes seconds of CPU: callers keep it off the workers. Spec: "LUKS On-Disk Format
//! Specification" 1.2.3; [why](../../../docs/decisions/encryption.md).

mod cbc;
mod cipher;
mod create;
mod describe;
mod hash;
mod header;
mod secret;
mod slots;
mod turns;
mod xts;

#[cfg(test)]
mod header_tests;
#[cfg(test)]
mod tests;

use zeroize::Zeroizing;

pub use cipher::{CipherKind, SECTOR, SectorCipher, aes_cbc};
pub use create::{ITER_TIME_DEFAULT, LuksOptions, create};
pub use describe::{LuksInfo, SlotInfo, describe};
pub use hash::HashKind;
pub use header::{HEADER_BYTES_MAX, ITERATIONS_MAX, SLOTS, UNLOCK_ROUNDS_MAX};
use header::{LuksHeader, Slot};
pub use secret::Secret;
pub use slots::{HeaderWrite, Removal, SlotChange, add_key, remove_key};

/// A LUKS header could not be used.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum LuksError {
    /// A field has an invalid value.
    #[error("the LUKS header's {field} (byte {at}) is {found}; expected {expected}")]
    Field {
        /// The field.
        field: String,
        /// The header byte where it starts.
        at: usize,
        /// The value found.
        found: String,
        /// The values allowed.
        expected: String,
    },
    /// The header names a cipher, a mode or a hash that we do not have.
    #[error("the LUKS header's {what} is `{name}`, which is not supported; expected {expected}")]
    Unsupported {
        /// The kind of name.
        what: &'static str,
        /// The name found.
        name: String,
        /// The names supported.
        expected: String,
    },
    /// The header ends early.
    #[error("the LUKS header has {found} bytes; expected at least {needed}")]
    Truncated {
        /// Its length in bytes.
        found: usize,
        /// The length of its fields in bytes.
        needed: usize,
    },
    /// No key slot is in use: nothing opens the image any more.
    #[error("the LUKS header has no key slot in use; no secret opens this image")]
    NoSlot,
    /// Trying the secret on this slot, after those before it, would take too long.
    #[error(
        "the LUKS header wants {iterations} iterations for key slot {slot}: trying a secret up to there takes {rounds} \
         rounds of its hash; expected at most {UNLOCK_ROUNDS_MAX}"
    )]
    Cost {
        /// The slot's number.
        slot: usize,
        /// Its iterations.
        iterations: u32,
        /// The rounds that it costs together with the slots before it.
        rounds: u64,
    },
    /// With the new key slot, trying a secret on all slots would take too long.
    #[error(
        "key slot {slot} with {iterations} iterations is too much: trying a secret on all slots would take {rounds} rounds \
         of the hash; expected at most {UNLOCK_ROUNDS_MAX}; ask for a shorter time"
    )]
    NewCost {
        /// The slot's number.
        slot: usize,
        /// The iterations that the time asked for takes here.
        iterations: u32,
        /// The rounds of all slots.
        rounds: u64,
    },
    /// No key slot opens with the secret.
    #[error("the secret opens none of the key slots in use; a newline at the end of a secret file counts")]
    WrongSecret,
    /// A new secret is not one that every tool takes.
    #[error("the new secret {reason}")]
    Secret {
        /// The fault, as the end of a sentence.
        reason: &'static str,
    },
    /// The host has no random bytes.
    #[error("the host gives no random bytes for keys")]
    Random(#[source] getrandom::Error),
    /// There is no slot of that number.
    #[error("there is no key slot {slot}; expected 0 to {}", SLOTS - 1)]
    NoSuchSlot {
        /// The number.
        slot: usize,
    },
    /// A slot for a new secret has one.
    #[error("key slot {slot} is in use; remove it first, or choose another")]
    SlotInUse {
        /// The slot's number.
        slot: usize,
    },
    /// Every slot has a secret.
    #[error("all {SLOTS} key slots are in use; remove one first")]
    NoFreeSlot,
    /// A slot to remove has no secret.
    #[error("key slot {slot} is not in use")]
    SlotNotInUse {
        /// The slot's number.
        slot: usize,
    },
    /// Without this slot, nothing would open the image.
    #[error("key slot {slot} is the only one in use: without it nothing opens the image; add another first")]
    LastSlot {
        /// The slot's number.
        slot: usize,
    },
    /// The secret of whoever removes a slot opens no other.
    #[error(
        "the secret opens no key slot but {slot}, or none at all; pass one that still opens the image afterwards"
    )]
    NoOtherSlot {
        /// The slot's number.
        slot: usize,
    },
}

impl LuksError {
    fn field(field: impl ToString, at: usize, found: impl ToString, expected: impl ToString) -> Self {
        Self::Field {
            field: field.to_string(),
            at,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }
}

/// A volume's key.
type Key = Zeroizing<Vec<u8>>;

/// Returns the cipher of the guest's data.
///
/// `header` is the LUKS header with all key material, as the image's extension locates it. Takes seconds of CPU for each
/// key slot in use, as many as whoever made the image wanted, but at most [`UNLOCK_ROUNDS_MAX`] rounds of the hash in all.
/// Waits for its turn while a few other threads derive keys.
///
/// # Errors
///
/// [`LuksError`]; [`LuksError::WrongSecret`] if the header is sound and no slot opens.
pub fn unlock(header: &[u8], secret: &Secret) -> Result<SectorCipher, LuksError> {
    let fields = LuksHeader::parse(header)?;
    let (_, key) = turns::in_turn(|| open_any_slot(&fields, header, secret))?;
    fields.cipher.with_key(&key).ok_or(LuksError::WrongSecret)
}

/// Returns the first slot in use that the secret opens, and the volume's key.
fn open_any_slot(fields: &LuksHeader, bytes: &[u8], secret: &Secret) -> Result<(usize, Key), LuksError> {
    if !fields.slots.iter().any(|slot| slot.active) {
        return Err(LuksError::NoSlot);
    }
    open_slot_but(fields, None, bytes, secret)?.ok_or(LuksError::WrongSecret)
}

/// As [`open_any_slot`], of the slots other than `but`. `None` if the secret opens none of these.
fn open_slot_but(
    fields: &LuksHeader,
    but: Option<usize>,
    bytes: &[u8],
    secret: &Secret,
) -> Result<Option<(usize, Key)>, LuksError> {
    let mut rounds = 0;
    for (index, slot) in fields.slots.iter().enumerate() {
        if !slot.active || but == Some(index) {
            continue;
        }
        rounds += fields.rounds(slot);
        if rounds > UNLOCK_ROUNDS_MAX {
            return Err(LuksError::Cost {
                slot: index,
                iterations: slot.iterations,
                rounds,
            });
        }
        if let Some(key) = open_slot(fields, slot, bytes, secret) {
            return Ok(Some((index, key)));
        }
    }
    Ok(None)
}

/// Returns the volume's key, if the secret opens the slot.
fn open_slot(fields: &LuksHeader, slot: &Slot, bytes: &[u8], secret: &Secret) -> Option<Key> {
    let len = fields.cipher.key_bytes();
    let slot_key = fields
        .hash
        .derive(secret.bytes(), &slot.salt, slot.iterations, len);
    let mut material = Zeroizing::new(bytes.get(fields.material_range(slot))?.to_vec());
    fields.cipher.with_key(&slot_key)?.decrypt(0, &mut material);
    let key = fields.hash.merge(&material, len);
    (digest(fields, &key) == fields.digest).then_some(key)
}

/// Returns what the header's digest is for the right key. Only a guessed passphrase leads here, and guessing takes
/// seconds: the time of the comparison tells nothing.
fn digest(fields: &LuksHeader, key: &[u8]) -> [u8; 20] {
    let mut digest = [0; 20];
    let derived = fields
        .hash
        .derive(key, &fields.digest_salt, fields.digest_iterations, digest.len());
    digest.copy_from_slice(&derived);
    digest
}
