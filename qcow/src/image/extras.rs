//! Clusters of an image besides the disk's own tables that no guest may reach: those of its snapshots and its
//! bitmaps.
//!
//! Malformed structures are skipped, with a warning: they are not needed to serve the disk, and `check` says more.
//! The number of clusters gathered is bounded, whatever the image claims.

use block::file::FileView;

use super::bitmaps::for_each_bitmap;
use super::read::{for_each_entry, for_each_snapshot};
use crate::format::l1::L1_TABLE_MAX_BYTES;
use crate::format::{BitmapDirectoryEntry, ClusterUse, Header, L1Entry};
use crate::metadata::structures::Extra;

/// The most entries of snapshots' L1 tables that are read: 8 MiB of them.
const ENTRIES_MAX: u64 = 1 << 20;
/// The most clusters that are gathered besides.
const CLUSTERS_MAX: u64 = 1 << 20;

/// Returns the places of snapshots' tables and bitmaps' tables.
pub(super) async fn extras(file: &FileView, header: &Header, file_len: u64) -> Vec<Extra> {
    let mut found = Found {
        file,
        header,
        extras: Vec::new(),
        clusters: 0,
        entries: 0,
        left_out: false,
    };
    if header.snapshot_count > 0 {
        found.snapshots(file_len).await;
    }
    found.bitmaps(file_len).await;
    if found.left_out {
        let image = file.file().path().display();
        tracing::warn!(%image, "it has so many snapshots' tables that not all of them are guarded against damage");
    }
    found.extras
}

struct Found<'a> {
    file: &'a FileView,
    header: &'a Header,
    extras: Vec<Extra>,
    clusters: u64,
    entries: u64,
    left_out: bool,
}

impl Found<'_> {
    fn add(&mut self, extra: Extra) {
        let clusters = self.header.geometry().clusters_for(extra.bytes);
        if self.clusters + clusters > CLUSTERS_MAX {
            self.left_out = true;
            return;
        }
        self.clusters += clusters;
        self.extras.push(extra);
    }

    async fn snapshots(&mut self, file_len: u64) {
        let image = self.file.file().path().display();
        let offset = self.header.snapshot_table_offset;
        let mut listed = Vec::new();
        let each = |_, snapshot: crate::format::SnapshotEntry| {
            listed.push((snapshot.l1_offset, u64::from(snapshot.l1_entries)));
        };
        let bytes = match for_each_snapshot(self.file, self.header, file_len, each).await {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::warn!(%image, %error, "the snapshot table is malformed; what it leads to is not guarded");
                self.add(Extra {
                    structure: ClusterUse::SnapshotTable,
                    offset,
                    bytes: 1,
                });
                return;
            }
        };
        self.add(Extra {
            structure: ClusterUse::SnapshotTable,
            offset,
            bytes,
        });
        let geometry = self.header.geometry();
        let mut tables: Vec<_> = listed
            .into_iter()
            .filter(|(offset, entries)| {
                offset.bytes() != 0
                    && offset.is_aligned_to(geometry.cluster_size())
                    && *entries > 0
                    && entries * 8 <= L1_TABLE_MAX_BYTES
                    && offset.bytes() < file_len
            })
            .collect();
        tables.sort_unstable();
        tables.dedup();
        for (offset, entries) in tables {
            self.add(Extra {
                structure: ClusterUse::SnapshotL1Table,
                offset,
                bytes: entries * 8,
            });
            if self.entries + entries > ENTRIES_MAX {
                self.left_out = true;
                continue;
            }
            self.entries += entries;
            let mut hosts = Vec::new();
            let read = for_each_entry(
                self.file,
                ClusterUse::SnapshotL1Table,
                offset,
                entries,
                |_, raw| {
                    if let Ok(Some(table)) = L1Entry::from_raw(raw).decode(&geometry)
                        && table.host.bytes() < file_len
                    {
                        hosts.push(table.host);
                    }
                },
            );
            if let Err(error) = read.await {
                tracing::warn!(%image, %error, "a snapshot's tables are not guarded");
            }
            for offset in hosts {
                self.add(Extra {
                    structure: ClusterUse::SnapshotL2Table,
                    offset,
                    bytes: 1,
                });
            }
        }
    }

    async fn bitmaps(&mut self, file_len: u64) {
        let Some(extension) = super::bitmaps::consistent_bitmaps(self.header) else {
            return;
        };
        let cluster = self.header.cluster_bits.size();
        let mut tables = Vec::new();
        let each = |_, bitmap: BitmapDirectoryEntry| {
            if bitmap.table_offset.is_aligned_to(cluster) && bitmap.table_offset.bytes() < file_len {
                tables.push((bitmap.table_offset, u64::from(bitmap.table_entries) * 8));
            }
        };
        // A malformed directory is disowned before the first write.
        let read = for_each_bitmap(self.file, self.header, &extension, file_len, each).await;
        if read.is_err() {
            return;
        }
        self.add(Extra {
            structure: ClusterUse::BitmapDirectory,
            offset: extension.directory_offset,
            bytes: extension.directory_size,
        });
        for (offset, bytes) in tables {
            self.add(Extra {
                structure: ClusterUse::BitmapTable,
                offset,
                bytes,
            });
        }
    }
}
