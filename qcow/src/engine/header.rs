//! The header while the image is open: the whole header cluster, and changes of it by one write of its first sector,
//! which holds every field that ever changes.
//!
//! Invariant: one such write at a time, from one copy of the header, so that none undoes another.

use block::sync::Mutex;
use block::{AlignedBuf, IoError};

use super::Queue;
use super::turn::Turns;
use crate::format::{BitmapsExtension, BitmapsLayout, Header, HeaderError, HeaderFields, NoRoomForBitmaps};

/// The header, and the turns to write it.
#[derive(Debug)]
pub(super) struct HeaderWriter {
    /// The header cluster as it is on disk or is being written.
    fields: Mutex<HeaderFields>,
    turns: Turns,
}

impl HeaderWriter {
    /// Takes over the header cluster as it is on disk.
    pub(super) fn new(fields: HeaderFields) -> Self {
        Self {
            fields: Mutex::new(fields),
            turns: Turns::default(),
        }
    }

    /// Decodes the header.
    ///
    /// # Errors
    ///
    /// [`HeaderError`], if another program has damaged it before the image was opened.
    pub(super) fn decode(&self) -> Result<Header, HeaderError> {
        self.fields.lock().decode()
    }

    /// Plans the header's extensions with the place of the bitmaps, or without bitmaps.
    ///
    /// # Errors
    ///
    /// [`NoRoomForBitmaps`].
    pub(super) fn plan_bitmaps(
        &self,
        bitmaps: Option<BitmapsExtension>,
    ) -> Result<BitmapsLayout, NoRoomForBitmaps> {
        BitmapsLayout::plan(&self.fields.lock(), bitmaps)
    }

    /// Returns the number of internal snapshots.
    pub(super) fn snapshot_count(&self) -> u32 {
        self.fields.lock().snapshot_count()
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
        AlignedBuf::from_slice(fields.first_sector())
    };
    queue.file.write_at(0, bytes).await
}
