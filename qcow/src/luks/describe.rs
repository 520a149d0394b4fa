//! Descriptions of LUKS headers, with the names of `qemu-img info`. They hold nothing secret.

use serde::Serialize;

use super::LuksError;
use super::header::{LuksHeader, STRIPES, Slot};

/// The description of a LUKS header.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LuksInfo {
    /// The cipher of the guest's data, such as `aes-256`.
    pub cipher_alg: &'static str,
    /// The cipher's mode.
    pub cipher_mode: &'static str,
    /// The way to make a sector's IV.
    pub ivgen_alg: &'static str,
    /// The hash that derives keys.
    pub hash_alg: &'static str,
    /// The header lies in a file of its own; never in QCOW2 images.
    pub detached_header: bool,
    /// The volume's UUID.
    pub uuid: String,
    /// The length of header and key material in bytes.
    pub payload_offset: u64,
    /// The iterations for the digest of the volume's key.
    pub master_key_iters: u32,
    /// The key slots.
    pub slots: Vec<SlotInfo>,
}

/// The description of a key slot.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SlotInfo {
    /// A secret opens it.
    pub active: bool,
    /// The iterations that a try takes; only of a slot in use, as the next field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iters: Option<u32>,
    /// The stripes that the key is spread over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stripes: Option<u32>,
    /// The header byte where its key material starts.
    pub key_offset: u64,
}

/// Describes a header with all key material.
///
/// # Errors
///
/// [`LuksError`] if it is malformed or names what we do not have.
pub fn describe(header: &[u8]) -> Result<LuksInfo, LuksError> {
    let fields = LuksHeader::parse(header)?;
    let slot = |slot: &Slot| SlotInfo {
        active: slot.active,
        iters: slot.active.then_some(slot.iterations),
        stripes: slot.active.then_some(STRIPES),
        key_offset: slot.material_start() as u64,
    };
    Ok(LuksInfo {
        cipher_alg: fields.cipher.name(),
        cipher_mode: "xts",
        ivgen_alg: "plain64",
        hash_alg: fields.hash.name(),
        detached_header: false,
        uuid: fields.uuid_text(),
        payload_offset: fields.total_bytes() as u64,
        master_key_iters: fields.digest_iterations,
        slots: fields.slots.iter().map(slot).collect(),
    })
}
