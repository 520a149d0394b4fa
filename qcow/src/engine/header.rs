//! Changes of the header while the image is open: one write of its first sector, which holds every field that
//! ever changes.
//!
//! What must stay true: one such write at a time, from one copy of the sector, so that none undoes another.

use block::sync::Mutex;
use block::{AlignedBuf, IoError};

use super::Queue;
use super::turn::Turns;
use crate::format::header::clear_unknown_autoclear;

/// The header's first sector.
#[derive(Debug)]
pub(super) struct Sector {
    /// As it is on disk or is being written.
    bytes: Mutex<Vec<u8>>,
    turns: Turns,
}

impl Sector {
    /// The first 512 bytes of the file, as they are on disk.
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes: Mutex::new(bytes),
            turns: Turns::default(),
        }
    }
}

/// Changes the header and writes it. Whoever needs it durable syncs. Autoclear bits of features that are not known here are
/// cleared with it, as the format demands of whoever writes.
pub(super) async fn change(queue: &Queue, change: impl FnOnce(&mut [u8; 512])) -> Result<(), IoError> {
    let sector = &queue.shared.header;
    let _turn = sector.turns.take().await;
    let bytes = {
        let mut bytes = sector.bytes.lock();
        let bytes = bytes.first_chunk_mut().ok_or(IoError::Corrupt)?;
        clear_unknown_autoclear(bytes);
        change(bytes);
        AlignedBuf::from_slice(bytes)
    };
    queue.file.write_at(0, bytes).await
}
