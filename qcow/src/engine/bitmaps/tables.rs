//! Reads of the tables and the data of bitmaps.

use std::rc::Rc;

use block::AlignedBuf;

use super::super::Queue;
use super::BitmapsError;
use crate::format::{
    BitmapCluster, BitmapDirectoryEntry, BitmapTableEntry, ClusterUse, Geometry, HostOffset,
};
use crate::image::references::{Table, for_each_reference};

/// The tables of an image's bitmaps.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    pub(super) queue: &'a Rc<Queue>,
    /// With the size of the disk that the bitmaps cover.
    pub(super) geometry: Geometry,
}

impl Tables<'_> {
    pub(super) fn validate(&self, entry: &BitmapDirectoryEntry) -> Result<(), BitmapsError> {
        entry
            .validate(&self.geometry)
            .map_err(|source| BitmapsError::Entry {
                name: String::from_utf8_lossy(&entry.name).into_owned(),
                source,
            })
    }

    /// Reads a bitmap's table.
    pub(super) async fn table_of(
        &self,
        entry: &BitmapDirectoryEntry,
    ) -> Result<Vec<BitmapCluster>, BitmapsError> {
        self.validate(entry)?;
        let place = place_of(entry);
        let mut table = vec![BitmapCluster::Zeros; entry.table_entries as usize];
        let mut fault = None;
        let each = |at: u64, raw: BitmapTableEntry| match raw.decode(&self.geometry) {
            Ok(cluster) => {
                let index = (at - place.offset.bytes()) / 8;
                if let Some(place) = table.get_mut(index as usize) {
                    *place = cluster;
                }
            }
            Err(error) => {
                fault.get_or_insert((at, error));
            }
        };
        for_each_reference(&self.queue.file, place, each).await?;
        match fault {
            None => Ok(table),
            Some((offset, error)) => Err(BitmapsError::Damaged {
                what: place.kind,
                offset,
                reason: error.to_string(),
            }),
        }
    }

    /// Reads a cluster of a bitmap's data.
    pub(super) async fn read_bits(&self, host: HostOffset) -> Result<AlignedBuf, BitmapsError> {
        let size = self.geometry.cluster_size() as usize;
        Ok(self.queue.file.read_at(host.bytes(), size).await?)
    }
}

/// Returns the place of a bitmap's table.
pub(super) fn place_of(entry: &BitmapDirectoryEntry) -> Table {
    Table {
        kind: ClusterUse::BitmapTable,
        offset: entry.table_offset,
        entries: u64::from(entry.table_entries),
    }
}
