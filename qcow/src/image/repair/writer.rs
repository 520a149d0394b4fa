//! The writes and syncs of a repair, in one place: tests cut a repair after each of them.

use block::AlignedBuf;
use block::file::FileView;

use super::RepairError;
use crate::format::{ClusterUse, Header, HeaderFields, Version};
use crate::image::read::read;

pub(super) async fn write(
    file: &FileView,
    what: ClusterUse,
    offset: u64,
    bytes: &[u8],
) -> Result<(), RepairError> {
    #[cfg(test)]
    record::push(record::Step::Write(offset, bytes.to_vec()));
    let written = file.write_at(offset, AlignedBuf::from_slice(bytes)).await;
    written.map_err(|source| RepairError::Write { what, offset, source })
}

pub(super) async fn sync(file: &FileView) -> Result<(), RepairError> {
    file.sync().await.map_err(RepairError::Sync)?;
    #[cfg(test)]
    record::push(record::Step::Sync);
    Ok(())
}

/// Begins to write. What the repair has read is durable then: a program that was killed may have freed clusters, and a power cut would
/// bring back what refers to them.
///
/// Clears the unknown autoclear bits, durably, as the format demands of every writer. The clusters of such a feature
/// look leaked, and a bit that stays set would vouch for them.
pub(super) async fn begin(file: &FileView, header: &Header) -> Result<(), RepairError> {
    sync(file).await?;
    if header.version == Version::V2 || header.autoclear.unknown().is_empty() {
        return Ok(());
    }
    switch_header(file, header).await
}

/// Writes the header fields that a repair changes, in one sector, durably.
pub(super) async fn switch_header(file: &FileView, header: &Header) -> Result<(), RepairError> {
    let sector = read(file, ClusterUse::Header, 0, HeaderFields::BYTES).await?;
    let mut fields = HeaderFields::new(&sector);
    fields.disown_unknown();
    fields.set_refcount_table(header.refcount_table_offset, header.refcount_table_clusters);
    fields.set_incompatible(header.incompatible);
    write(file, ClusterUse::Header, 0, fields.first_sector()).await?;
    sync(file).await
}

/// The writes and syncs of a repair, in order.
#[cfg(test)]
pub(crate) mod record {
    use std::cell::RefCell;

    /// One step of a repair.
    #[derive(Clone, Debug)]
    pub(crate) enum Step {
        Write(u64, Vec<u8>),
        Sync,
    }

    thread_local! {
        static STEPS: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn push(step: Step) {
        STEPS.with_borrow_mut(|steps| steps.push(step));
    }

    /// Returns the steps that this thread's repairs made since the last call.
    pub(crate) fn take() -> Vec<Step> {
        STEPS.take()
    }
}
