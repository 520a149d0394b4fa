//! Which host clusters the image's own structures lie in, so that no damaged entry leads a guest there.
//!
//! Gathered when an image is opened for writing: the header, the L1 table, its L2 tables, the refcount
//! table and its blocks, the snapshot table. No two of them may lie over each other. Whenever a slice of a table is
//! loaded later, a guest's cluster in it may not be one of them, and none of them may count zero: the
//! allocator would hand it out.
//!
//! What must stay true: a cluster leaves the set before it can be handed out again.

use rustc_hash::FxHashMap;

use crate::format::{
    CompressedExtent, Geometry, Header, HostOffset, L1Entry, L2Entry, L2Mapping, RefcountTableEntry,
};

/// What a host cluster is part of. One byte, as a damaged image may claim millions.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(crate) enum Structure {
    Header,
    RefcountTable,
    RefcountBlock,
    L1Table,
    L2Table,
    SnapshotTable,
}

impl Structure {
    /// How messages call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Header => "the header",
            Self::RefcountTable => "the refcount table",
            Self::RefcountBlock => "a refcount block",
            Self::L1Table => "the L1 table",
            Self::L2Table => "an L2 table",
            Self::SnapshotTable => "the snapshot table",
        }
    }
}

/// Two structures lie over each other, or one is not counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StructureError {
    /// Two structures share a host cluster.
    #[error("{structure} at {offset:#x} lies over {other}")]
    Overlap {
        /// The structure that an entry leads to.
        structure: &'static str,
        /// Where, in bytes.
        offset: u64,
        /// What is there already.
        other: &'static str,
    },
    /// The refcount block that counts a structure is missing.
    #[error("{structure} at {offset:#x} is not counted: refcount table entry {index} is empty")]
    Uncounted {
        /// The structure.
        structure: &'static str,
        /// Where it is, in bytes.
        offset: u64,
        /// The refcount table entry that should lead to its count.
        index: usize,
    },
}

/// The clusters of the image's structures.
#[derive(Debug, Default)]
pub(crate) struct Structures {
    clusters: FxHashMap<u64, Structure>,
}

impl Structures {
    /// Gathers the structures of an image as it is on disk. Entries that do not decode lead nowhere.
    ///
    /// # Errors
    ///
    /// [`StructureError`], if two lie over each other or one has no place for its count.
    pub(crate) fn gather(
        header: &Header,
        l1: &[L1Entry],
        table: &[RefcountTableEntry],
    ) -> Result<Self, StructureError> {
        let geometry = header.geometry();
        let mut structures = Self::default();
        structures.add(&geometry, Structure::Header, HostOffset::new(0), 1)?;
        let at = header.refcount_table_offset;
        structures.add(
            &geometry,
            Structure::RefcountTable,
            at,
            header.refcount_table_bytes(),
        )?;
        structures.add(&geometry, Structure::L1Table, header.l1_offset, header.l1_bytes())?;
        if header.snapshot_count > 0 {
            let at = header.snapshot_table_offset;
            structures.add(&geometry, Structure::SnapshotTable, at, 1)?;
        }
        for block in table.iter().filter_map(|entry| entry.decode(&geometry).ok()?) {
            structures.add(&geometry, Structure::RefcountBlock, block, 1)?;
        }
        for table in l1.iter().filter_map(|entry| entry.decode(&geometry).ok()?) {
            structures.add(&geometry, Structure::L2Table, table.host, 1)?;
        }
        for (&cluster, structure) in &structures.clusters {
            let index = (cluster >> geometry.refcount_block_bits()) as usize;
            let missing = table
                .get(index)
                .is_none_or(|entry| matches!(entry.decode(&geometry), Ok(None)));
            if missing {
                return Err(StructureError::Uncounted {
                    structure: structure.name(),
                    offset: cluster * geometry.cluster_size(),
                    index,
                });
            }
        }
        Ok(structures)
    }

    fn add(
        &mut self,
        geometry: &Geometry,
        structure: Structure,
        offset: HostOffset,
        bytes: u64,
    ) -> Result<(), StructureError> {
        let first = geometry.host_cluster(offset).index();
        for cluster in first..first + geometry.clusters_for(bytes) {
            if let Some(other) = self.clusters.insert(cluster, structure) {
                return Err(StructureError::Overlap {
                    structure: structure.name(),
                    offset: offset.bytes(),
                    other: other.name(),
                });
            }
        }
        Ok(())
    }

    /// A structure has been made in a cluster that was free.
    pub(crate) fn made(&mut self, structure: Structure, cluster: u64) {
        self.clusters.insert(cluster, structure);
    }

    /// A cluster is about to be free.
    pub(crate) fn freed(&mut self, cluster: u64) {
        self.clusters.remove(&cluster);
    }

    /// What a cluster is part of.
    pub(crate) fn find(&self, cluster: u64) -> Option<Structure> {
        self.clusters.get(&cluster).copied()
    }

    /// The first entry of an L2 table's bytes that leads to one of the image's structures, where, and what is there.
    pub(crate) fn exposed(&self, geometry: &Geometry, bytes: &[u8]) -> Option<(usize, u64, Structure)> {
        if self.clusters.is_empty() {
            return None;
        }
        bytes
            .as_chunks::<8>()
            .0
            .iter()
            .enumerate()
            .find_map(|(index, raw)| {
                let (first, last) = match L2Entry::from_raw(u64::from_be_bytes(*raw)).decode(geometry) {
                    Ok(L2Mapping::Data { host, .. } | L2Mapping::Zero { host: Some(host), .. }) => {
                        (host, host)
                    }
                    Ok(L2Mapping::Compressed(extent)) => (extent.host, last_of(extent)),
                    _ => return None,
                };
                let clusters = geometry.host_cluster(first).index()..=geometry.host_cluster(last).index();
                let name = clusters.into_iter().find_map(|cluster| self.find(cluster))?;
                Some((index, first.bytes(), name))
            })
    }
}

fn last_of(extent: CompressedExtent) -> HostOffset {
    HostOffset::new(extent.end() - 1)
}
