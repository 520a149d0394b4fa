//! New headers: a random volume key, and the cost of a passphrase measured on this machine.

use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use super::cipher::{CipherKind, SectorCipher};
use super::hash::HashKind;
use super::header::{ITERATIONS_MAX, LuksHeader, Slot, UNLOCK_ROUNDS_MAX};
use super::{Key, LuksError, Secret, digest, turns};

/// The time that opening a key slot takes if nothing else is asked for; QEMU's.
pub const ITER_TIME_DEFAULT: Duration = Duration::from_secs(2);
/// The fewest iterations; QEMU's.
const ITERATIONS_MIN: u32 = 1000;
/// The longest time that a measurement of the machine's speed takes on purpose.
const MEASURED: Duration = Duration::from_millis(40);

/// The properties of a new header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LuksOptions {
    /// The cipher of the guest's data.
    pub cipher: CipherKind,
    /// The hash that derives keys.
    pub hash: HashKind,
    /// The time that opening a key slot shall take on this machine.
    pub iter_time: Duration,
}

impl Default for LuksOptions {
    fn default() -> Self {
        Self {
            cipher: CipherKind::default(),
            hash: HashKind::default(),
            iter_time: ITER_TIME_DEFAULT,
        }
    }
}

/// Makes a header with all key material, whose first key slot `secret` opens, and the cipher of its new volume key.
/// Takes about as long as opening a key slot will.
///
/// # Errors
///
/// [`LuksError::Secret`] for a secret that no tool would take; [`LuksError::NewCost`] for so long a time that opening would be
/// refused; [`LuksError::Random`] if the host has no random bytes.
pub fn create(secret: &Secret, options: &LuksOptions) -> Result<(Vec<u8>, SectorCipher), LuksError> {
    check_new_secret(secret)?;
    turns::in_turn(|| create_now(secret, options))
}

fn create_now(secret: &Secret, options: &LuksOptions) -> Result<(Vec<u8>, SectorCipher), LuksError> {
    let mut header = LuksHeader::new(options.cipher, options.hash);
    let mut key = Zeroizing::new(vec![0; options.cipher.key_bytes()]);
    random(&mut key)?;
    random(&mut header.digest_salt)?;
    // The key is random and cannot be guessed: as cryptsetup, spend an eighth on it.
    header.digest_iterations = iterations(options.hash, header.digest.len(), options.iter_time / 8);
    header.digest = digest(&header, &key);
    let mut number = [0; 16];
    random(&mut number)?;
    for (to, from) in header.uuid.iter_mut().zip(uuid_text(number).bytes()) {
        *to = from;
    }
    let (slot, material) = fill_slot(&header, 0, &key, secret, options.iter_time)?;
    header.slots[0] = Slot { active: true, ..slot };
    let mut bytes = header.encode();
    bytes.resize(header.total_bytes(), 0);
    bytes[header.material_range(&slot)].copy_from_slice(&material);
    let cipher = options.cipher.with_key(&key).ok_or(LuksError::WrongSecret)?;
    Ok((bytes, cipher))
}

/// Returns the fields and the material of slot `index`, not yet in use, which is to open with `secret`.
pub(super) fn fill_slot(
    header: &LuksHeader,
    index: usize,
    key: &Key,
    secret: &Secret,
    iter_time: Duration,
) -> Result<(Slot, Vec<u8>), LuksError> {
    let mut slot = Slot {
        active: false,
        iterations: iterations(header.hash, key.len(), iter_time),
        ..header.slots[index]
    };
    check_cost(header, index, &slot)?;
    random(&mut slot.salt)?;
    let mut material = vec![0; header.material_range(&slot).len()];
    random(&mut material)?;
    header.hash.split(key, &mut material);
    let slot_key = header
        .hash
        .derive(secret.bytes(), &slot.salt, slot.iterations, key.len());
    let cipher = header.cipher.with_key(&slot_key).ok_or(LuksError::WrongSecret)?;
    cipher.encrypt(0, &mut material);
    Ok((slot, material))
}

/// Checks that a secret can be tried on all slots once `slot` is in use as number `index`.
fn check_cost(header: &LuksHeader, index: usize, slot: &Slot) -> Result<(), LuksError> {
    let used = header.slots.iter().filter(|slot| slot.active);
    let rounds = used.map(|slot| header.rounds(slot)).sum::<u64>() + header.rounds(slot);
    if rounds > UNLOCK_ROUNDS_MAX {
        return Err(LuksError::NewCost {
            slot: index,
            iterations: slot.iterations,
            rounds,
        });
    }
    Ok(())
}

/// Checks a secret that is to open an image from now on.
pub(super) fn check_new_secret(secret: &Secret) -> Result<(), LuksError> {
    if secret.bytes().is_empty() {
        return Err(LuksError::Secret { reason: "is empty" });
    }
    if std::str::from_utf8(secret.bytes()).is_err() {
        let reason = "is not UTF-8 text, which is all that QEMU takes (base64 makes text of any bytes)";
        return Err(LuksError::Secret { reason });
    }
    Ok(())
}

/// Fills in random bytes.
pub(super) fn random(bytes: &mut [u8]) -> Result<(), LuksError> {
    getrandom::fill(bytes).map_err(LuksError::Random)
}

/// Returns the number of iterations that take `time` to derive `len` bytes here.
fn iterations(hash: HashKind, len: usize, time: Duration) -> u32 {
    // No longer than the time that is asked for. What else runs makes a measurement slow, never fast: the fastest of three counts.
    let measured = MEASURED.min(time);
    let rate = (0..3)
        .map(|_| iterations_per_second(hash, len, measured))
        .fold(0.0, f64::max);
    iterations_for(rate, time)
}

fn iterations_for(rate: f64, time: Duration) -> u32 {
    let iterations = rate * time.as_secs_f64();
    // The cast saturates.
    (iterations as u32).clamp(ITERATIONS_MIN, ITERATIONS_MAX)
}

/// Measures for so long, and for the fewest iterations at least.
fn iterations_per_second(hash: HashKind, len: usize, measured: Duration) -> f64 {
    let mut iterations = ITERATIONS_MIN;
    loop {
        let start = Instant::now();
        hash.derive(b"as long a passphrase as any", &[7; 32], iterations, len);
        let took = start.elapsed();
        if took >= measured || iterations >= ITERATIONS_MAX {
            return f64::from(iterations) / took.as_secs_f64().max(f64::MIN_POSITIVE);
        }
        iterations *= 2;
    }
}

/// Returns the text of a random UUID (version 4).
fn uuid_text(mut number: [u8; 16]) -> String {
    number[6] = number[6] & 0x0f | 0x40;
    number[8] = number[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (index, byte) in number.iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iterations_follow_the_rate_and_stay_in_bounds() {
        let ms = Duration::from_millis;
        assert_eq!(iterations_for(1e6, ms(2000)), 2_000_000);
        assert_eq!(iterations_for(1e6, ms(10)), 10_000);
        assert_eq!(iterations_for(1e6, ms(0)), ITERATIONS_MIN);
        assert_eq!(iterations_for(1e12, ms(2000)), ITERATIONS_MAX);
    }

    /// With a clock of 40 ms for each of six measurements it would be a quarter of a second at least.
    #[test]
    fn header_with_a_cheap_slot_is_made_at_once() {
        let options = LuksOptions {
            iter_time: Duration::from_millis(1),
            ..LuksOptions::default()
        };
        let fastest = (0..5).map(|_| {
            let start = Instant::now();
            create_now(&Secret::new(b"open sesame".to_vec()), &options).expect("a header");
            start.elapsed()
        });
        assert!(fastest.min() < Some(6 * MEASURED));
    }

    #[test]
    fn uuid_text_names_version_and_variant() {
        assert_eq!(uuid_text([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }
}
