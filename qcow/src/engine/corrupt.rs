//! What happens when the metadata turns out to be corrupt.
//!
//! As QEMU does: the image is marked corrupt in its header, so that nobody writes it before it has been
//! repaired, and this process writes it no more. Reads of what is still sound go on.

use std::rc::Rc;

use block::{AlignedBuf, IoError};

use super::Queue;
use crate::format::{Incompatible, Version, header};
use crate::metadata::Lookup;

/// Logs what a lookup at a guest offset found wrong and marks the image; the answer to give.
pub(super) fn found(queue: &Rc<Queue>, lookup: Lookup, offset: u64) -> IoError {
    let image = queue.shared.file.path().display();
    match lookup {
        Lookup::Corrupt(error) => {
            tracing::error!(%image, guest_offset = offset, %error, "the mapping is corrupt");
        }
        Lookup::PastEnd(host) => {
            tracing::error!(%image, guest_offset = offset, host, "the mapping leads past the end of the file");
        }
        Lookup::Found { .. } | Lookup::Miss(_) => {}
    }
    mark(queue);
    IoError::Corrupt
}

/// Marks the image corrupt, once.
pub(super) fn mark(queue: &Rc<Queue>) {
    let shared = &queue.shared;
    if !shared.mark_corrupt() || shared.policy.read_only || shared.geometry.version() == Version::V2 {
        return;
    }
    let bytes = {
        let mut bytes = shared.header.lock();
        let at = header::at::INCOMPATIBLE_FEATURES;
        let Some(field) = bytes.get_mut(at..at + 8) else {
            return;
        };
        let mut features = [0; 8];
        features.copy_from_slice(field);
        let features = u64::from_be_bytes(features) | Incompatible::CORRUPT.bits();
        field.copy_from_slice(&features.to_be_bytes());
        AlignedBuf::from_slice(&bytes)
    };
    let queue = Rc::clone(queue);
    queue.cx.clone().spawn(async move {
        if let Err(error) = queue.file.write_at(0, bytes).await {
            let image = queue.shared.file.path().display();
            tracing::error!(%image, %error, "the image cannot be marked corrupt");
        }
    });
}
