//! LUKS headers whose fields are changed in any way: none may panic, one that is malformed costs nothing, and a change of a
//! key slot stays in that slot.

use std::ops::Range;
use std::sync::LazyLock;
use std::time::Duration;

use qcow::luks::{
    CipherKind, LuksError, LuksInfo, LuksOptions, Removal, SLOTS, Secret, SlotChange, add_key, create,
    describe, remove_key, unlock,
};

/// The most iterations, of all slots and digests, that a case may take: deriving keys is slow on purpose.
const ITERATIONS_MAX: u64 = 12_000;
/// The bytes of a header's fields, and of each slot's at their end.
const FIELDS: usize = 592;
const SLOT: usize = 48;

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

/// A sound header with key material, which `one` (slot 0) and `two` (slot 3) open. Its keys and salts are random, which no
/// outcome depends on.
static SOUND: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let fast = Duration::ZERO;
    let options = LuksOptions {
        cipher: CipherKind::Aes128Xts,
        iter_time: fast,
        ..LuksOptions::default()
    };
    let (mut header, _) = create(&secret("one"), &options).expect("a header");
    let added = add_key(&header, &secret("one"), &secret("two"), Some(3), fast);
    apply(&mut header, &added.expect("a free slot"));
    header
});

fn apply(header: &mut [u8], change: &SlotChange) {
    for write in change.steps.iter().flatten() {
        header[write.at..write.at + write.bytes.len()].copy_from_slice(&write.bytes);
    }
}

/// A sound header, xored with the bytes from its start on.
///
/// # Panics
///
/// If that does not hold.
pub fn body(bytes: &[u8]) -> &'static str {
    let mut header = SOUND.clone();
    for (byte, change) in header.iter_mut().zip(bytes) {
        *byte ^= change;
    }
    let info = match describe(&header) {
        Ok(info) => info,
        Err(error) => {
            // The same words, and at once.
            assert_eq!(unlock(&header, &secret("one")).err(), Some(error));
            return "refused";
        }
    };
    assert_eq!(info.slots.len(), SLOTS);
    assert!(info.payload_offset <= header.len() as u64);
    let iterations: Vec<u64> = info
        .slots
        .iter()
        .filter_map(|slot| slot.iters)
        .map(u64::from)
        .collect();
    let digests = iterations.len() as u64 * u64::from(info.master_key_iters);
    if iterations.iter().sum::<u64>() + digests > ITERATIONS_MAX {
        return "costly";
    }
    if let Err(error) = unlock(&header, &secret("one")) {
        match error {
            LuksError::NoSlot => assert!(iterations.is_empty()),
            LuksError::WrongSecret => assert!(!iterations.is_empty()),
            error => panic!("described, but not tried: {error}"),
        }
        return "not opened";
    }
    match remove_key(&header, &Removal::Slot(3, &secret("one"))) {
        Ok(change) => {
            assert_stays_in_slot(&info, &change);
            apply(&mut header, &change);
            let after = describe(&header).expect("a change leaves a sound header");
            for (slot, (before, after)) in info.slots.iter().zip(&after.slots).enumerate() {
                assert!(slot == change.slot || before == after, "slot {slot} has changed");
            }
            assert!(!after.slots[change.slot].active);
            assert!(
                unlock(&header, &secret("one")).is_ok(),
                "whoever removed a slot is locked out"
            );
            assert_eq!(
                unlock(&header, &secret("two")).err(),
                Some(LuksError::WrongSecret)
            );
            "removed"
        }
        Err(LuksError::SlotNotInUse { slot: 3 }) => {
            assert!(!info.slots[3].active);
            "opened"
        }
        Err(error) => panic!("slot 0 opens, but slot 3 is not removed: {error}"),
    }
}

/// Checks that a change writes to its slot's fields and material alone.
fn assert_stays_in_slot(info: &LuksInfo, change: &SlotChange) {
    let start = FIELDS - SLOT * (SLOTS - change.slot);
    let fields = start..start + SLOT;
    let own = info.slots[change.slot].key_offset;
    let behind = info
        .slots
        .iter()
        .map(|slot| slot.key_offset)
        .filter(|&other| other > own);
    let end = behind.min().unwrap_or(info.payload_offset);
    let material = own as usize..end as usize;
    for write in change.steps.iter().flatten() {
        let (first, last) = (write.at, write.at + write.bytes.len());
        let inside = |outer: &Range<usize>| outer.start <= first && last <= outer.end;
        assert!(
            inside(&fields) || inside(&material),
            "bytes {first} to {last} change"
        );
    }
}
