//! Tables of an image that its own tables do not lead to and no guest may write over: those of snapshots and bitmaps, and
//! the LUKS header.
//!
//! Malformed structures are skipped, with a warning: they are not needed to serve the disk, and `check` says more.
//! The number of clusters gathered is bounded ([`GUARDED_CLUSTERS_MAX`]), whatever the image claims.

use block::file::FileView;

use super::bitmaps::{consistent_bitmaps, for_each_bitmap};
use super::keys::luks_place;
use super::references::{
    GUARDED_CLUSTERS_MAX, GUARDED_ENTRIES_MAX, Table, for_each_reference, snapshot_tables,
};
use crate::format::references::{Entry, Reference};
use crate::format::{BitmapDirectoryEntry, ClusterUse, CryptMethod, Header, HostOffset, L1Entry};

/// Returns the places of the tables of snapshots and bitmaps.
pub(crate) async fn guarded_tables(file: &FileView, header: &Header, file_len: u64) -> Vec<Reference> {
    let mut found = Found {
        file,
        header,
        file_len,
        tables: Vec::new(),
        clusters: 0,
        entries: 0,
        left_out: false,
    };
    if header.snapshot_count > 0 {
        found.snapshots().await;
    }
    found.bitmaps().await;
    // A malformed place leads to no key: then no guest's data is written.
    if header.crypt_method == CryptMethod::Luks
        && let Ok((offset, len)) = luks_place(header, file_len)
    {
        found.add(ClusterUse::EncryptionHeader, HostOffset::new(offset), len);
    }
    if found.left_out {
        let image = file.file().path().display();
        tracing::warn!(%image, "it has so many snapshots' tables that not all of them are guarded against damage");
    }
    found.tables
}

struct Found<'a> {
    file: &'a FileView,
    header: &'a Header,
    file_len: u64,
    tables: Vec<Reference>,
    clusters: u64,
    entries: u64,
    left_out: bool,
}

impl Found<'_> {
    fn add(&mut self, target: ClusterUse, host: HostOffset, len: u64) {
        let clusters = self.header.geometry().clusters_for(len);
        if self.clusters + clusters > GUARDED_CLUSTERS_MAX {
            self.left_out = true;
            return;
        }
        self.clusters += clusters;
        self.tables.push(Reference { target, host, len });
    }

    async fn snapshots(&mut self) {
        let Self {
            file,
            header,
            file_len,
            ..
        } = *self;
        let image = file.file().path().display();
        let snapshot_table = header.snapshot_table_offset;
        let found = match snapshot_tables(file, header, file_len, |_| ()).await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(%image, %error, "the snapshot table is malformed; what it leads to is not guarded");
                self.add(ClusterUse::SnapshotTable, snapshot_table, 1);
                return;
            }
        };
        self.add(ClusterUse::SnapshotTable, snapshot_table, found.bytes);
        for &(offset, entries) in found.l1.keys() {
            if offset == 0 || offset >= file_len {
                continue;
            }
            let l1 = Table {
                kind: ClusterUse::SnapshotL1Table,
                offset: HostOffset::new(offset),
                entries,
            };
            self.add(l1.kind, l1.offset, l1.bytes());
            if self.entries + entries > GUARDED_ENTRIES_MAX {
                self.left_out = true;
                continue;
            }
            self.entries += entries;
            let geometry = header.geometry();
            let each = |_, entry: L1Entry| {
                if let Some(table) = entry.referred(&geometry).sound()
                    && table.host.bytes() < file_len
                {
                    self.add(ClusterUse::SnapshotL2Table, table.host, table.len);
                }
            };
            if let Err(error) = for_each_reference(file, l1, each).await {
                tracing::warn!(%image, %error, "a snapshot's tables are not guarded");
            }
        }
    }

    async fn bitmaps(&mut self) {
        let Self {
            file,
            header,
            file_len,
            ..
        } = *self;
        let Some(extension) = consistent_bitmaps(header) else {
            return;
        };
        let cluster = header.cluster_bits.size();
        let mut tables = Vec::new();
        let each = |_, bitmap: BitmapDirectoryEntry| {
            if bitmap.table_offset.is_aligned_to(cluster) && bitmap.table_offset.bytes() < file_len {
                tables.push((bitmap.table_offset, u64::from(bitmap.table_entries) * 8));
            }
        };
        // A malformed directory is disowned before the first write.
        let read = for_each_bitmap(file, header, &extension, file_len, each).await;
        if read.is_err() {
            return;
        }
        let (directory, len) = (extension.directory_offset, extension.directory_size);
        self.add(ClusterUse::BitmapDirectory, directory, len);
        for (offset, len) in tables {
            self.add(ClusterUse::BitmapTable, offset, len);
        }
    }
}
