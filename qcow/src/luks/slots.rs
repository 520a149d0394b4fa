//! Changes of key slots, as writes into a header in an order that a cut at any point survives.
//!
//! A slot counts once its state says so, four bytes in one sector. So a new slot is written whole before its state, and
//! an old slot's state goes before anything else of it. No other slot is touched: each cut leaves the image openable by
//! every secret that stays.

use std::time::Duration;

use super::create::{check_new_secret, fill_slot, random};
use super::header::{LuksHeader, SLOTS, Slot};
use super::{LuksError, Secret, open_any_slot, open_slot_but, turns};

/// One write into a header.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HeaderWrite {
    /// The header byte where it starts.
    pub at: usize,
    /// The bytes to write.
    pub bytes: Vec<u8>,
}

/// A change of one key slot.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SlotChange {
    /// The slot's number.
    pub slot: usize,
    /// The writes. Those of one step may be made in any order; a step must be durable before the next one starts.
    pub steps: [Vec<HeaderWrite>; 2],
}

/// The choice of the slot to remove.
#[derive(Clone, Debug)]
pub enum Removal<'a> {
    /// The slot that this secret opens.
    Of(&'a Secret),
    /// A slot by its number, by the owner of a secret that opens another one.
    Slot(usize, &'a Secret),
}

/// Adds a secret: to the slot `slot`, or to the first free one. `secret` is one that opens the image now.
///
/// # Errors
///
/// [`LuksError`]: also if the slot is in use, or none is free, or if secrets of later slots could not be tried any more.
pub fn add_key(
    header: &[u8],
    secret: &Secret,
    new: &Secret,
    slot: Option<usize>,
    iter_time: Duration,
) -> Result<SlotChange, LuksError> {
    check_new_secret(new)?;
    let fields = LuksHeader::parse(header)?;
    let index = match slot {
        Some(index) if slot_at(&fields, index)?.active => return Err(LuksError::SlotInUse { slot: index }),
        Some(index) => index,
        None => (0..SLOTS)
            .zip(&fields.slots)
            .find_map(|(index, slot)| (!slot.active).then_some(index))
            .ok_or(LuksError::NoFreeSlot)?,
    };
    let (slot, material) = turns::in_turn(|| {
        let (_, key) = open_any_slot(&fields, header, secret)?;
        fill_slot(&fields, index, &key, new, iter_time)
    })?;
    let material = HeaderWrite {
        at: slot.material_start(),
        bytes: material,
    };
    let fields = HeaderWrite {
        at: Slot::start(index),
        bytes: slot.encode().to_vec(),
    };
    Ok(SlotChange {
        slot: index,
        steps: [vec![material, fields], vec![state(index, true)]],
    })
}

/// Removes a secret: its slot is out of use first, and then random bytes overwrite its material.
///
/// # Errors
///
/// [`LuksError`]: also if no other slot is in use, or, for a slot by its number, if the secret opens no other.
pub fn remove_key(header: &[u8], removal: &Removal<'_>) -> Result<SlotChange, LuksError> {
    let fields = LuksHeader::parse(header)?;
    let index = match *removal {
        Removal::Of(secret) => turns::in_turn(|| open_any_slot(&fields, header, secret))?.0,
        Removal::Slot(index, _) => index,
    };
    let slot = *slot_at(&fields, index)?;
    if !slot.active {
        return Err(LuksError::SlotNotInUse { slot: index });
    }
    if fields.slots.iter().filter(|slot| slot.active).count() < 2 {
        return Err(LuksError::LastSlot { slot: index });
    }
    if let Removal::Slot(_, secret) = removal
        && turns::in_turn(|| open_slot_but(&fields, Some(index), header, secret))?.is_none()
    {
        return Err(LuksError::NoOtherSlot { slot: index });
    }
    let mut material = vec![0; fields.material_range(&slot).len()];
    random(&mut material)?;
    let material = HeaderWrite {
        at: slot.material_start(),
        bytes: material,
    };
    let wiped = Slot {
        active: false,
        iterations: 0,
        salt: [0; 32],
        ..slot
    };
    let fields = HeaderWrite {
        at: Slot::start(index),
        bytes: wiped.encode().to_vec(),
    };
    Ok(SlotChange {
        slot: index,
        steps: [vec![state(index, false)], vec![material, fields]],
    })
}

fn slot_at(fields: &LuksHeader, index: usize) -> Result<&Slot, LuksError> {
    fields
        .slots
        .get(index)
        .ok_or(LuksError::NoSuchSlot { slot: index })
}

/// Returns the write that takes a slot into use, or out of it.
fn state(index: usize, active: bool) -> HeaderWrite {
    HeaderWrite {
        at: Slot::start(index),
        bytes: Slot::state(active).to_vec(),
    }
}
