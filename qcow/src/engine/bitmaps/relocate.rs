//! The move of bitmaps nearer to the start of the file, for a compaction.
//!
//! It is a change of bitmaps like others: what moves is written to free clusters, with new tables and a new directory, and one
//! header write puts these in force.
//!
//! Invariant: only bitmaps *at rest* move: those of an image whose guest has changed nothing since it was opened. The bits of others
//! are in memory, and what is stored of them is written in place, or is out of date.

use super::super::announce::Duty;
use super::{BitmapsError, Operation, Queue, Rc, Switch, Tables, exclusive, place_of};
use crate::format::{BitmapCluster, BitmapDirectoryEntry, ClusterUse, HostCluster, HostOffset};
use crate::image::ReadError;
use crate::image::bitmaps::{consistent_bitmaps, for_each_bitmap};

/// Returns true if bitmaps may move.
fn are_at_rest(queue: &Queue) -> Result<bool, BitmapsError> {
    let announcements = &queue.shared.announcements;
    let is_loaded = queue.metadata()?.bitmaps.is_some();
    Ok(!is_loaded && announcements.duty() != Duty::Record && !announcements.are_all_marked())
}

/// Calls `each` for the clusters of bitmaps that may move. The caller has the turn to change the image as a whole.
///
/// # Errors
///
/// [`BitmapsError`]; then some may not move.
pub(in super::super) async fn for_each_at_rest(
    queue: &Rc<Queue>,
    mut each: impl FnMut(HostCluster),
) -> Result<(), BitmapsError> {
    let header = queue.shared.header.decode()?;
    let Some(extension) = consistent_bitmaps(&header) else {
        return Ok(());
    };
    if !are_at_rest(queue)? {
        return Ok(());
    }
    let mut entries = Vec::new();
    let file_len = queue.file.len().map_err(ReadError::Length)?;
    for_each_bitmap(&queue.file, &header, &extension, file_len, |_, entry| {
        entries.push(entry)
    })
    .await?;
    let size_bytes = queue.metadata()?.size_bytes & !511;
    let geometry = queue.shared.geometry.with_virtual_size(size_bytes);
    let tables = Tables { queue, geometry };
    let mut run = |offset: HostOffset, bytes: u64| {
        let first = geometry.host_cluster(offset);
        first
            .until(first + geometry.clusters_for(bytes))
            .for_each(&mut each);
    };
    run(extension.directory_offset, extension.directory_size);
    for entry in entries {
        let table = tables.table_of(&entry).await?;
        run(entry.table_offset, place_of(&entry).bytes());
        for host in data_of(&table) {
            run(host, 1);
        }
    }
    Ok(())
}

/// Moves at most about `most` clusters of bitmaps that lie from `bound` on before it, alone. Returns how many have moved; 0 if there are
/// none, or no room, or if they may not move.
///
/// # Errors
///
/// [`BitmapsError`]; with the bitmaps as they were.
pub(in super::super) async fn move_below(
    queue: &Rc<Queue>,
    bound: HostCluster,
    most: u64,
) -> Result<u64, BitmapsError> {
    let section = exclusive::begin(queue).await?;
    if consistent_bitmaps(&queue.shared.header.decode()?).is_none() || !are_at_rest(queue)? {
        return Ok(0);
    }
    let mut switch = Switch::new(queue, &section)?;
    switch.stay_below(bound);
    let mut operation = Operation::begin(queue, switch, true).await?;
    let moved = async {
        let moved = operation.move_below(bound, most).await?;
        if moved > 0 {
            operation.commit().await?;
        }
        Ok(moved)
    };
    match moved.await {
        Err(BitmapsError::Io(error)) if error.is_no_space() => Ok(0),
        moved => moved,
    }
}

fn data_of(table: &[BitmapCluster]) -> impl Iterator<Item = HostOffset> {
    table.iter().filter_map(|cluster| match cluster {
        BitmapCluster::Data(host) => Some(*host),
        _ => None,
    })
}

impl Operation<'_> {
    /// Gives clusters that lie from `bound` on new places in the next state.
    async fn move_below(&mut self, bound: HostCluster, most: u64) -> Result<u64, BitmapsError> {
        let geometry = self.geometry;
        let lies_behind = |offset: HostOffset, bytes: u64| {
            geometry.host_cluster(offset) + geometry.clusters_for(bytes) > bound
        };
        let mut moved = 0;
        if let Some(old) = &self.old
            && lies_behind(old.directory_offset, old.directory_size)
        {
            moved += geometry.clusters_for(old.directory_size);
        }
        for index in 0..self.entries.len() {
            if moved >= most {
                break;
            }
            let entry = self.entries.get(index).cloned().unwrap_or_default();
            let mut table = self.tables.table_of(&entry).await?;
            let mut left = Vec::new();
            for cluster in &mut table {
                if let BitmapCluster::Data(host) = *cluster
                    && lies_behind(host, 1)
                    && moved < most
                {
                    let bytes = self.tables.read_bits(host).await?.to_vec();
                    *cluster =
                        BitmapCluster::Data(self.switch.new_table(ClusterUse::BitmapData, bytes).await?);
                    left.push(host);
                    moved += 1;
                }
            }
            let bytes = place_of(&entry).bytes();
            if left.is_empty() && !lies_behind(entry.table_offset, bytes) {
                continue;
            }
            moved += geometry.clusters_for(bytes);
            self.release_data(left).await?;
            self.release(&entry, &[]).await?;
            let table_offset = self.new_table(&table).await?;
            self.put(
                index,
                BitmapDirectoryEntry {
                    table_offset,
                    ..entry
                },
            );
        }
        Ok(moved)
    }
}
