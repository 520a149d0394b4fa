//! The cut of the file after its last cluster in use.
//!
//! Invariants:
//!
//! - it runs alone, with everything durable: nothing that is counted, or known to be in use, lies past the cut;
//! - a refcount block that counts nothing but itself leaves the refcount table, durably, before its cluster is cut off or
//!   can be handed out. If that fails it is put back.

use std::ops::Range;
use std::rc::Rc;

use block::IoError;
use block::canary::{Rule, broken};

use super::{CompactError, change};
use crate::engine::{Queue, Shared, corrupt, exclusive, flush};
use crate::format::HostCluster;

/// The result of a cut.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Cut {
    /// The cluster after the last one in use, where the file ends now.
    pub(super) end: HostCluster,
    /// The number of refcount blocks that were removed.
    pub(super) removed: usize,
}

/// Cuts the file after the last cluster in use.
pub(super) async fn cut(queue: &Rc<Queue>) -> Result<Cut, CompactError> {
    let shared = &*queue.shared;
    let geometry = shared.geometry;
    let section = exclusive::begin(queue).await?;
    let (end, idle) = find_end(queue).await?;
    let removal = Removal::begin(shared, &idle)?;
    if !idle.is_empty() && !broken(Rule::CutBeforeTable) {
        flush::flush(queue).await?;
    }
    removal.end();
    let last = queue.metadata()?.refcounts.uses.last();
    if let Some(last) = last.filter(|last| last.cluster >= end) {
        return Err(corrupt::in_use(queue, last).into());
    }
    let len = geometry.host_offset(end).bytes();
    if queue.file.len()? > len {
        let mut truncation = Truncation {
            shared,
            is_over: false,
        };
        let result = queue.file.set_len(len).await;
        truncation.is_over = true;
        result?;
    }
    shared.write()?.refcounts.cut(end);
    drop(section);
    Ok(Cut {
        end,
        removed: idle.len(),
    })
}

/// Returns the cluster after the last one that is in use, without those of refcount blocks that count nothing else, and
/// these blocks.
async fn find_end(queue: &Rc<Queue>) -> Result<(HostCluster, Vec<usize>), CompactError> {
    let entries = queue.metadata()?.refcounts.table_entries();
    let mut idle = Vec::new();
    for index in (0..entries).rev() {
        let (slices, block) = {
            let metadata = queue.metadata()?;
            let block = metadata.refcounts.block_offset(index)?;
            (metadata.refcounts.block_slices(index), block)
        };
        let Some(block) = block else { continue };
        let Some((first, last)) = ends_in(queue, slices).await? else {
            continue;
        };
        if first != last || queue.shared.geometry.host_cluster(block) != first {
            return Ok((last + 1, idle));
        }
        idle.push(index);
    }
    // The header's cluster is in use.
    Err(corrupt_counts(queue).into())
}

fn corrupt_counts(queue: &Rc<Queue>) -> IoError {
    tracing::error!(image = %queue.shared.file.path().display(), "no cluster is counted, not even the header's");
    corrupt::mark(queue);
    IoError::Corrupt
}

/// Returns the first and the last cluster in use of those that some slices count.
async fn ends_in(
    queue: &Rc<Queue>,
    slices: Range<u64>,
) -> Result<Option<(HostCluster, HostCluster)>, CompactError> {
    let mut ends = None;
    for slice in slices {
        change(queue, |metadata| {
            metadata.refcounts.for_each_used(slice, |cluster| {
                let (first, _) = ends.unwrap_or((cluster, cluster));
                ends = Some((first, cluster));
            })
        })
        .await?;
    }
    Ok(ends)
}

/// Refcount blocks that are out of the table, and perhaps not durably.
struct Removal<'a> {
    shared: &'a Shared,
    blocks: Vec<(usize, HostCluster)>,
}

impl<'a> Removal<'a> {
    fn begin(shared: &'a Shared, indices: &[usize]) -> Result<Self, IoError> {
        let mut removal = Self {
            shared,
            blocks: Vec::new(),
        };
        let mut metadata = shared.write()?;
        for &index in indices {
            match metadata.refcounts.remove_block(index) {
                Ok(cluster) => removal.blocks.push((index, cluster)),
                Err(error) => {
                    drop(metadata);
                    return Err(error);
                }
            }
        }
        drop(metadata);
        Ok(removal)
    }

    /// Records that the table is durable.
    fn end(mut self) {
        self.blocks.clear();
    }
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        // What is handed out there must not be written while the table in the file may lead to the block.
        if let Ok(mut metadata) = self.shared.write() {
            for &(index, cluster) in &self.blocks {
                metadata.refcounts.restore_block(index, cluster);
            }
        }
    }
}

/// A truncation that is under way. If its task is dropped it may still be carried out: then nothing may be written any
/// more where it cuts.
struct Truncation<'a> {
    shared: &'a Shared,
    is_over: bool,
}

impl Drop for Truncation<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let image = self.shared.file.path().display();
        tracing::error!(%image, "a cut of the file was given up; the image is not written before it is opened anew");
        self.shared.stop_writes();
        if let Ok(mut metadata) = self.shared.write() {
            metadata.corrupt = true;
        }
    }
}
