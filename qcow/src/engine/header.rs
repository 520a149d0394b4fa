//! Changes of the header while the image is open: one write of its first sector, which holds every field that ever
//! changes.
//!
//! Invariant: one such write at a time, from one copy of the sector, so that none undoes another.

use block::sync::Mutex;
use block::{AlignedBuf, IoError};

use super::Queue;
use super::turn::Turns;
use crate::format::HeaderFields;

/// The header fields that change, and the turns to write them.
#[derive(Debug)]
pub(super) struct HeaderWriter {
    /// The fields as they are on disk or are being written.
    fields: Mutex<HeaderFields>,
    turns: Turns,
}

impl HeaderWriter {
    /// Takes over the fields as they are on disk.
    pub(super) fn new(fields: HeaderFields) -> Self {
        Self {
            fields: Mutex::new(fields),
            turns: Turns::default(),
        }
    }
}

/// Changes the header and writes it. A caller that needs it durable must sync. Unknown autoclear bits are cleared
/// with it, as the format demands of every writer.
pub(super) async fn change(queue: &Queue, change: impl FnOnce(&mut HeaderFields)) -> Result<(), IoError> {
    let header = &queue.shared.header;
    let _turn = header.turns.take().await;
    let bytes = {
        let mut fields = header.fields.lock();
        fields.disown_unknown();
        change(&mut fields);
        AlignedBuf::from_slice(fields.bytes())
    };
    queue.file.write_at(0, bytes).await
}
