//! The look for the place where the file could end.
//!
//! With as many clusters in use as there are, the file could end after that many. But something that cannot move may lie
//! after that place: then what lies before it need not move either. So the clusters in use near the end of the file are
//! noted in a window, a bit for each, and those that can move are taken out of it, one table after the other. The last one
//! that remains is the place.
//!
//! Invariant: memory is bounded by the window, whatever an image claims. A longer file is compacted in several passes.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::error::Fixed;
use super::foreign::{SnapshotL1s, for_each_table};
use super::{CompactError, Compaction, FixedClusters, clusters_at, look, settle};
use crate::engine::{BitmapsError, Queue, bitmaps, exclusive};
use crate::format::{ClusterUse, Geometry, HostCluster, HostOffset, L2Mapping, L2Table};
use crate::metadata::Blocked;

/// The most clusters that a survey looks at: 8 MiB of bits, twice; 4 TiB of 64 KiB clusters.
const WINDOW_CLUSTERS: u64 = 1 << 26;

/// The result of a survey.
#[derive(Debug)]
pub(super) struct Survey {
    /// The cluster after the last one in use.
    pub(super) end: HostCluster,
    /// What lies from here on can move, and there is room for it before.
    pub(super) bound: HostCluster,
    /// The number of clusters in use from the bound on.
    pub(super) to_move: u64,
    /// Compressed data lies from the bound on.
    pub(super) has_compressed: bool,
    /// Clusters before the bound that cannot move, although there is room.
    pub(super) fixed: Vec<FixedClusters>,
}

/// A bit for each cluster of the window.
#[derive(Debug)]
struct Bits {
    first: HostCluster,
    words: Vec<u64>,
}

impl Bits {
    fn new(first: HostCluster, end: HostCluster) -> Self {
        let clusters = end.index().saturating_sub(first.index());
        Self {
            first,
            words: vec![0; clusters.div_ceil(64) as usize],
        }
    }

    /// Returns the word of a cluster in the window, and its bit there.
    fn place(&mut self, cluster: HostCluster) -> Option<(&mut u64, u64)> {
        let index = cluster.index().checked_sub(self.first.index())?;
        let word = self.words.get_mut((index / 64) as usize)?;
        Some((word, 1 << (index % 64)))
    }

    fn set(&mut self, cluster: HostCluster) {
        if let Some((word, bit)) = self.place(cluster) {
            *word |= bit;
        }
    }

    fn clear(&mut self, cluster: HostCluster) {
        if let Some((word, bit)) = self.place(cluster) {
            *word &= !bit;
        }
    }

    fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Returns the clusters in the set, in order.
    fn clusters(&self) -> impl Iterator<Item = HostCluster> {
        let words = (0..).zip(&self.words);
        words.flat_map(|(index, &word)| {
            let first = self.first + index * 64;
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| first + bit)
        })
    }
}

impl Compaction<'_> {
    /// Looks for the place where the file could end. `None` if the caller stops the compaction.
    pub(super) async fn survey(&mut self) -> Result<Option<Survey>, CompactError> {
        let queue = self.queue;
        {
            let _turn = exclusive::turn(queue).await?;
            settle(queue).await?;
        }
        let (mut used, mut end) = (0, HostCluster::new(0));
        for_each_used(queue, HostCluster::new(0), |cluster| {
            used += 1;
            end = cluster + 1;
        })
        .await?;
        let window = end.index().saturating_sub(WINDOW_CLUSTERS).max(used);
        let first = HostCluster::new(window);
        let mut fixed = Bits::new(first, end);
        for_each_used(queue, first, |cluster| fixed.set(cluster)).await?;
        let all = fixed.count();
        // The cluster after the last one with compressed data.
        let mut compressed = HostCluster::new(0);
        if all > 0 {
            self.clear_tables(&mut fixed)?;
            self.clear_bitmaps(&mut fixed).await?;
            let is_whole = self.clear_mapped(&mut fixed, &mut compressed).await?
                && self.clear_foreign(&mut fixed, &mut compressed).await?;
            if !is_whole {
                return Ok(None);
            }
        }
        let (bound, fixed) = self.reasons(&fixed)?;
        let bound = bound.max(first);
        let mut to_move = 0;
        for_each_used(queue, bound, |cluster| to_move += u64::from(cluster < end)).await?;
        Ok(Some(Survey {
            end,
            bound,
            to_move,
            has_compressed: compressed > bound,
            fixed,
        }))
    }

    /// Takes out of `fixed` the tables of the image that can move.
    fn clear_tables(&self, fixed: &mut Bits) -> Result<(), CompactError> {
        let geometry = self.queue.shared.geometry;
        let header = self.queue.shared.header.decode()?;
        let metadata = self.queue.metadata()?;
        for place in [metadata.l1_place, metadata.refcounts.place] {
            let first = geometry.host_cluster(place.offset);
            clusters_at(first, place.clusters).for_each(|cluster| fixed.clear(cluster));
        }
        for index in 0..metadata.refcounts.table_entries() {
            if let Some(block) = metadata.refcounts.block_offset(index)? {
                fixed.clear(geometry.host_cluster(block));
            }
        }
        // Its length is known only when it is read; it is no other's.
        let snapshots = header.snapshot_table_offset;
        if header.snapshot_count > 0 {
            let first = geometry.host_cluster(snapshots);
            let is_table = |&cluster: &HostCluster| {
                metadata.refcounts.uses.find(cluster) == Some(ClusterUse::SnapshotTable)
            };
            let clusters = first.until(metadata.refcounts.end()).take_while(is_table);
            clusters.for_each(|cluster| fixed.clear(cluster));
        }
        Ok(())
    }

    /// Takes out of `fixed` the clusters of bitmaps that may move.
    async fn clear_bitmaps(&self, fixed: &mut Bits) -> Result<(), CompactError> {
        let queue = self.queue;
        let _turn = exclusive::turn(queue).await?;
        match bitmaps::for_each_at_rest(queue, |cluster| fixed.clear(cluster)).await {
            Err(BitmapsError::Io(error)) => Err(error.into()),
            Err(error) => {
                // They stay where they are, and so do those that were found before it, if they are of the same directory.
                tracing::warn!(image = %queue.shared.file.path().display(), %error, "bitmaps stay where they are");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Takes out of `fixed` what the disk's own tables map, and moves `compressed` behind compressed data. Returns false if the
    /// caller stops the compaction.
    async fn clear_mapped(
        &mut self,
        fixed: &mut Bits,
        compressed: &mut HostCluster,
    ) -> Result<bool, CompactError> {
        let queue = self.queue;
        let geometry = queue.shared.geometry;
        let l1_entries = queue.metadata()?.l1_entries();
        for l1_index in 0..l1_entries {
            let (table, slices) = look(queue, |metadata| {
                let table = metadata.own_table(l1_index)?;
                Ok::<_, Blocked>((table, metadata.table_slices(l1_index)))
            })
            .await?;
            let Some(table) = table else { continue };
            fixed.clear(table);
            for slice in slices.filter(|_| !geometry.has_data_file()) {
                let mut each = |_, mapping| clear(&geometry, mapping, fixed, compressed);
                look(queue, |metadata| metadata.for_each_mapped(slice, &mut each)).await?;
            }
            self.look();
            if self.is_stopped {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes out of `fixed` the tables of snapshots and what they map, and moves `compressed` behind compressed data. Returns
    /// false if the caller stops the compaction.
    async fn clear_foreign(
        &mut self,
        fixed: &mut Bits,
        compressed: &mut HostCluster,
    ) -> Result<bool, CompactError> {
        let queue = self.queue;
        let geometry = queue.shared.geometry;
        let mut at = 0;
        loop {
            {
                // No snapshot is deleted meanwhile.
                let _turn = exclusive::turn(queue).await?;
                let l1s = SnapshotL1s::read(queue).await?;
                for (l1, _) in l1s.tables().filter(|_| at == 0) {
                    let first = geometry.host_cluster(l1.offset);
                    let clusters = clusters_at(first, geometry.clusters_for(l1.bytes()));
                    clusters.for_each(|cluster| fixed.clear(cluster));
                }
                let Some(foreign) = l1s.foreign(queue, at, l1s.end()).await? else {
                    return Ok(true);
                };
                for index in foreign.indices.clone() {
                    let tables = foreign.at(queue, index)?;
                    for_each_table(queue, &tables, |(table, _), bytes| {
                        fixed.clear(table);
                        let mappings = L2Table::new(bytes, &geometry).iter();
                        let mappings = mappings.filter_map(|entry| entry.decode(&geometry).ok());
                        mappings.for_each(|mapping| clear(&geometry, mapping, fixed, compressed));
                    })
                    .await?;
                }
                at = foreign.indices.end;
            }
            self.look();
            if self.is_stopped {
                return Ok(false);
            }
        }
    }

    /// Returns the cluster after the last one that is fixed, and the reasons. What nothing leads to fixes no other: beside
    /// requests it is mostly what they have dropped, or are writing.
    fn reasons(&self, fixed: &Bits) -> Result<(HostCluster, Vec<FixedClusters>), CompactError> {
        let metadata = self.queue.metadata()?;
        let mut counts: BTreeMap<Fixed, u64> = BTreeMap::new();
        let mut bound = HostCluster::new(0);
        for cluster in fixed.clusters() {
            let reason = match metadata.refcounts.uses.find(cluster) {
                Some(ClusterUse::BitmapDirectory | ClusterUse::BitmapTable | ClusterUse::BitmapData) => {
                    Fixed::Bitmaps
                }
                Some(ClusterUse::Header | ClusterUse::EncryptionHeader) => Fixed::Header,
                _ => Fixed::Unknown,
            };
            *counts.entry(reason).or_default() += 1;
            if reason != Fixed::Unknown {
                bound = cluster + 1;
            }
        }
        let counts = counts.into_iter();
        let counts = counts.map(|(reason, count)| FixedClusters { reason, count });
        Ok((bound, counts.collect()))
    }
}

/// Takes what a mapping leads to out of `fixed`, and moves `compressed` behind compressed data.
fn clear(geometry: &Geometry, mapping: L2Mapping, fixed: &mut Bits, compressed: &mut HostCluster) {
    if let L2Mapping::Compressed(extent) = mapping {
        let last = geometry.host_cluster(HostOffset::new(extent.end() - 1));
        let clusters = geometry.host_cluster(extent.host).until(last + 1);
        clusters.for_each(|cluster| fixed.clear(cluster));
        *compressed = (*compressed).max(last + 1);
    } else if let Some((host, _)) = mapping.cluster() {
        fixed.clear(geometry.host_cluster(host));
    }
}

/// Calls `each` for the clusters in use from `first` on, in order.
async fn for_each_used(
    queue: &Rc<Queue>,
    first: HostCluster,
    mut each: impl FnMut(HostCluster),
) -> Result<(), CompactError> {
    let (from, entries) = {
        let metadata = queue.metadata()?;
        (
            metadata.refcounts.slice_of(first),
            metadata.refcounts.table_entries(),
        )
    };
    for index in 0..entries {
        let slices = {
            let metadata = queue.metadata()?;
            let has_block = metadata.refcounts.block_offset(index)?.is_some();
            let slices = metadata.refcounts.block_slices(index);
            if has_block { slices } else { 0..0 }
        };
        for slice in slices.filter(|&slice| slice >= from) {
            look(queue, |metadata| {
                metadata.refcounts.for_each_used(slice, |cluster| {
                    if cluster >= first {
                        each(cluster);
                    }
                })
            })
            .await?;
        }
    }
    Ok(())
}
