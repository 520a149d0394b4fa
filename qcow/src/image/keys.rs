//! The LUKS header of an image: reading it, and changes of the secrets that open the image.
//!
//! Invariant: writes go only into the header's own clusters, in the order of [`SlotChange`], each step durable before the
//! next, and only if nothing else uses them (`require_sound`). So a cut leaves the image openable by every secret that stays.

use std::time::Duration;

use block::file::FileView;
use block::{AlignedBuf, IoError};

use super::read::{ReadError, read, read_header};
use super::sound::{UnsoundError, require_sound};
use crate::format::{ClusterUse, CryptMethod, Header, Incompatible};
use crate::luks::{self, HEADER_BYTES_MAX, LuksError, LuksInfo, Removal, Secret, SlotChange};

/// The keys of an image could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The image could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The image has no LUKS header.
    #[error("the image has no key slots: its encryption (header byte 32) is `{method}`; expected luks")]
    NotLuks {
        /// The encryption that it has.
        method: &'static str,
    },
    /// The header extension leads to no place for a LUKS header.
    #[error(
        "the header extension puts the LUKS header at {offset:#x}, with {len} bytes; expected {expected}"
    )]
    Place {
        /// The offset, in bytes.
        offset: u64,
        /// The length, in bytes.
        len: u64,
        /// The places allowed.
        expected: String,
    },
    /// The image is marked as corrupt: another structure may lie over the LUKS header.
    #[error("the image is marked as corrupt; repair it before its keys are changed")]
    Corrupt,
    /// The image is damaged: something else may lie where the LUKS header does.
    #[error(transparent)]
    Unsound(#[from] UnsoundError),
    /// The LUKS header is malformed, or does not allow the change.
    #[error(transparent)]
    Luks(#[from] LuksError),
    /// The host failed a write. The secrets that were to stay still open the image.
    #[error("cannot write the LUKS header at {offset:#x}; secrets that were to stay still open the image")]
    Write {
        /// The offset, in bytes.
        offset: u64,
        /// The host's error.
        #[source]
        source: IoError,
    },
}

/// Describes the LUKS header of the image in `file`.
///
/// # Errors
///
/// [`KeysError`]; nothing is written.
pub async fn list_keys(file: &FileView) -> Result<LuksInfo, KeysError> {
    let located = read_header(file).await?;
    let (_, bytes) = read_luks(file, &located.header, located.file_len).await?;
    Ok(luks::describe(&bytes)?)
}

/// Lets a new secret open the image, whose cost is `iter_time`, and returns its slot: `slot`, or the first free one.
/// `secret` is one that opens it now. Takes seconds of CPU.
///
/// # Errors
///
/// [`KeysError`]; with the image as it was unless it is about a write.
pub async fn add_key(
    file: &FileView,
    secret: &Secret,
    new: &Secret,
    slot: Option<usize>,
    iter_time: Duration,
) -> Result<usize, KeysError> {
    change(file, |header| luks::add_key(header, secret, new, slot, iter_time)).await
}

/// Makes a secret open the image no longer, overwrites its key material, and returns its slot. Takes seconds of CPU.
///
/// # Errors
///
/// [`KeysError`]; with the image as it was unless it is about a write.
pub async fn remove_key(file: &FileView, removal: &Removal<'_>) -> Result<usize, KeysError> {
    change(file, |header| luks::remove_key(header, removal)).await
}

async fn change(
    file: &FileView,
    change: impl FnOnce(&[u8]) -> Result<SlotChange, LuksError>,
) -> Result<usize, KeysError> {
    let located = read_header(file).await?;
    let header = &located.header;
    header.validate().map_err(ReadError::from)?;
    if header.incompatible.contains(Incompatible::CORRUPT) {
        return Err(KeysError::Corrupt);
    }
    let (start, bytes) = read_luks(file, header, located.file_len).await?;
    require_sound(file).await?;
    let change = change(&bytes)?;
    for step in change.steps {
        for write in step {
            let offset = start + write.at as u64;
            let written = file.write_at(offset, AlignedBuf::from_slice(&write.bytes)).await;
            written.map_err(|source| KeysError::Write { offset, source })?;
        }
        let synced = file.sync().await;
        synced.map_err(|source| KeysError::Write {
            offset: start,
            source,
        })?;
    }
    Ok(change.slot)
}

/// Reads the LUKS header with all key material, and returns its offset as well.
pub(crate) async fn read_luks(
    file: &FileView,
    header: &Header,
    file_len: u64,
) -> Result<(u64, AlignedBuf), KeysError> {
    if header.crypt_method != CryptMethod::Luks {
        return Err(KeysError::NotLuks {
            method: header.crypt_method.name(),
        });
    }
    let (offset, len) = luks_place(header, file_len)?;
    let bytes = read(file, ClusterUse::EncryptionHeader, offset, len as usize).await?;
    Ok((offset, bytes))
}

/// Returns the offset and the length of the LUKS header.
pub(super) fn luks_place(header: &Header, file_len: u64) -> Result<(u64, u64), KeysError> {
    let Some((offset, len)) = header.crypto_header() else {
        return Err(KeysError::Place {
            offset: 0,
            len: 0,
            expected: "the extension 0x537be77, which is missing".to_owned(),
        });
    };
    let offset = offset.bytes();
    let wrong = |expected: String| {
        Err(KeysError::Place {
            offset,
            len,
            expected,
        })
    };
    let cluster_size = header.cluster_bits.size();
    if offset == 0 || !offset.is_multiple_of(cluster_size) {
        return wrong(format!(
            "a multiple of {cluster_size:#x} behind the image's header"
        ));
    }
    if len > HEADER_BYTES_MAX {
        return wrong(format!("at most {HEADER_BYTES_MAX} bytes"));
    }
    if offset.checked_add(len).is_none_or(|end| end > file_len) {
        return wrong(format!("an end in the file, which has {file_len:#x} bytes"));
    }
    Ok((offset, len))
}
