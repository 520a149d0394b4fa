//! Checks that nothing is freed, or taken for the disk's alone, that another snapshot uses: a cluster whose count is too low would be.
//!
//! The L2 tables of all other snapshots are looked for, and what those of the nearest ones lead to. Snapshots share a cluster
//! that was in use when each of them was created, so those that share it follow one another, unless one was applied
//! meanwhile. To read the tables of all would take as long as `ringdisk image check`.

use std::rc::Rc;

use super::error::SnapshotError;
use super::{L2_TABLES_BYTES_MAX, Operation, undercounted};
use crate::engine::Queue;
use crate::engine::switch::{read_clusters, tables_at_once};
use crate::format::l1::{L1_ENTRY_SIZE, L1_TABLE_MAX_BYTES};
use crate::format::references::{Entry, references};
use crate::format::{ClusterUse, Geometry, HostCluster, HostOffset, L1Entry, L2Table, SnapshotEntry};
use crate::image::references::{GUARDED_ENTRIES_MAX, Table, for_each_reference};
use crate::metadata::Released;

/// Clusters that nothing else may use: those that an operation releases, and those that the disk alone has left.
pub(in crate::engine) struct Kept<'a> {
    pub(super) queue: &'a Rc<Queue>,
    pub(super) released: &'a Released,
    pub(super) sole: Option<&'a Released>,
}

impl Operation<'_> {
    /// Returns the clusters that this operation releases, to check that nothing else uses them.
    pub(in crate::engine) fn kept(&self) -> Kept<'_> {
        Kept {
            queue: self.queue,
            released: &self.switch.released,
            sole: None,
        }
    }
}

impl Kept<'_> {
    /// Fails if a cluster that something else uses is released all the same.
    pub(super) fn check(&self, mut clusters: impl Iterator<Item = HostCluster>) -> Result<(), SnapshotError> {
        let is_released = |&cluster: &HostCluster| {
            self.released.contains(cluster) || self.sole.is_some_and(|sole| sole.contains(cluster))
        };
        match clusters.find(is_released) {
            Some(cluster) => Err(undercounted(self.geometry(), cluster)),
            None => Ok(()),
        }
    }

    fn geometry(&self) -> &Geometry {
        &self.queue.shared.geometry
    }

    /// Fails if an L2 table that stays, or a cluster that its `bytes` lead to, is released all the same.
    pub(in crate::engine) fn check_table(&self, host: HostOffset, bytes: &[u8]) -> Result<(), SnapshotError> {
        let first = self.geometry().host_cluster(host);
        self.check(first.until(first + 1))?;
        self.check_data(bytes)
    }

    /// Fails if a cluster that the entries of an L2 table lead to is released all the same.
    pub(in crate::engine) fn check_data(&self, table: &[u8]) -> Result<(), SnapshotError> {
        for entry in L2Table::new(table, self.geometry()).iter() {
            if let Some(data) = entry.referred(self.geometry()).reference {
                self.check(data.clusters(self.geometry()))?;
            }
        }
        Ok(())
    }

    /// Fails if something that `others` lead to is released: their L2 tables, and, of those at the indices `nearest`, what
    /// these lead to, as far as an operation that reads `followed` tables besides may read them. What is damaged is left out:
    /// the operation is not about it.
    pub(in crate::engine) async fn check_others(
        &self,
        others: &[SnapshotEntry],
        nearest: impl Iterator<Item = usize>,
        followed: usize,
    ) -> Result<(), SnapshotError> {
        if self.released.is_empty() && self.sole.is_none_or(Released::is_empty) {
            return Ok(());
        }
        let mut entries = 0;
        for other in others {
            entries += u64::from(other.l1_entries);
            if entries > GUARDED_ENTRIES_MAX {
                break;
            }
            for host in self.sound_tables_of(other).await? {
                let first = self.geometry().host_cluster(host);
                self.check(first.until(first + 1))?;
            }
        }
        let mut room = (L2_TABLES_BYTES_MAX / self.geometry().cluster_size()).saturating_sub(followed as u64);
        for other in nearest.filter_map(|index| others.get(index)) {
            let tables = self.sound_tables_of(other).await?;
            room = room.saturating_sub(tables.len() as u64);
            if room == 0 {
                break;
            }
            for some in tables.chunks(tables_at_once(self.geometry())) {
                for bytes in read_clusters(self.queue, some).await? {
                    let entries = L2Table::new(&bytes, self.geometry()).iter();
                    for (_, _, data) in references(entries, self.geometry()) {
                        self.check(data.clusters(self.geometry()))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the places of the L2 tables that sound entries of a snapshot lead to, each once.
    async fn sound_tables_of(&self, snapshot: &SnapshotEntry) -> Result<Vec<HostOffset>, SnapshotError> {
        let table = Table {
            kind: ClusterUse::SnapshotL1Table,
            offset: snapshot.l1_offset,
            entries: u64::from(snapshot.l1_entries),
        };
        let mut places = Vec::new();
        if table.bytes() <= L1_TABLE_MAX_BYTES && table.offset.is_aligned_to(L1_ENTRY_SIZE) {
            let each = |_, entry: L1Entry| {
                places.extend(entry.referred(self.geometry()).sound().map(|table| table.host));
            };
            for_each_reference(&self.queue.file, table, each).await?;
        }
        let end = self.queue.metadata()?.refcounts.end();
        places.retain(|&host| self.geometry().host_cluster(host) < end);
        places.sort_unstable();
        places.dedup();
        Ok(places)
    }
}
