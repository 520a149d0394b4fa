//! The options of a new image, checked, and the place of each structure that they ask for: header, refcount table, refcount blocks,
//! LUKS header, L1 table, L2 tables, data.

use super::options::{CreateError, CreateOptions, NewDataFile, Preallocation};
use crate::format::data_file::DATA_FILE_NAME_MAX;
use crate::format::l1::L1_TABLE_MAX_BYTES;
use crate::format::positions::{FILE_OFFSET_MAX, SECTOR_SIZE};
use crate::format::refcount::REFCOUNT_TABLE_MAX_BYTES;
use crate::format::validate::EXTENDED_L2_CLUSTER_BITS_MIN;
use crate::format::{
    ClusterBits, CompressionType, Geometry, HostCluster, HostOffset, L2EntryWidth, RefcountOrder, Version,
};
use crate::luks;

/// The layout of the image. Counts and positions in clusters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) geometry: Geometry,
    pub(super) table_clusters: u64,
    pub(super) blocks: u64,
    pub(super) luks_clusters: u64,
    pub(super) l1_entries: u64,
    pub(super) l1_clusters: u64,
    pub(super) l2_tables: u64,
    /// The guest clusters that are mapped.
    pub(super) mapped: u64,
    /// The clusters of this file for them; none with a data file.
    pub(super) data_clusters: u64,
}

impl Plan {
    pub(super) fn new(options: &CreateOptions) -> Result<Self, CreateError> {
        let geometry = geometry(options)?;
        let l1_entries = geometry.l1_entries_needed(geometry.virtual_size());
        if l1_entries * 8 > L1_TABLE_MAX_BYTES {
            let size_max = L1_TABLE_MAX_BYTES / 8 * geometry.l2_table_span();
            let expected = format!(
                "at most {size_max} bytes with clusters of {}",
                options.cluster_size
            );
            return Err(CreateError::option("size", options.size, expected));
        }
        let maps_all = options.data_file.as_ref().is_some_and(NewDataFile::maps_all);
        let preallocated = options.preallocation != Preallocation::Off || maps_all;
        let mapped = if preallocated {
            geometry.guest_clusters()
        } else {
            0
        };
        let mut plan = Self {
            geometry,
            table_clusters: 1,
            blocks: 1,
            luks_clusters: geometry.clusters_for(luks_bytes(options)),
            l1_entries,
            l1_clusters: geometry.clusters_for(l1_entries * 8),
            l2_tables: if preallocated { l1_entries } else { 0 },
            mapped,
            data_clusters: if geometry.has_data_file() { 0 } else { mapped },
        };
        // The refcount table, with room for the whole disk; at most what QEMU accepts.
        let full = plan.total()
            + match (preallocated, geometry.has_data_file()) {
                (true, _) => 0,
                (false, true) => l1_entries,
                (false, false) => l1_entries + geometry.guest_clusters(),
            };
        let blocks_full = full.div_ceil(geometry.refcount_block_entries() as u64);
        // The blocks and the table are counted too: an eighth more covers any width.
        let entries = blocks_full + blocks_full.div_ceil(8) + 1;
        let table_max = REFCOUNT_TABLE_MAX_BYTES / geometry.cluster_size();
        plan.table_clusters = geometry.clusters_for(entries * 8).min(table_max);
        loop {
            let blocks = plan.total().div_ceil(geometry.refcount_block_entries() as u64);
            if blocks == plan.blocks {
                break;
            }
            plan.blocks = blocks;
        }
        if plan.blocks * 8 > plan.table_clusters * geometry.cluster_size() {
            let expected = "less: the refcount table would be larger than 8 MiB";
            return Err(CreateError::option("size", options.size, expected));
        }
        Ok(plan)
    }

    pub(super) fn blocks_start(&self) -> u64 {
        1 + self.table_clusters
    }

    pub(super) fn luks_start(&self) -> u64 {
        self.blocks_start() + self.blocks
    }

    pub(super) fn l1_start(&self) -> u64 {
        self.luks_start() + self.luks_clusters
    }

    pub(super) fn l2_start(&self) -> u64 {
        self.l1_start() + self.l1_clusters
    }

    pub(super) fn data_start(&self) -> u64 {
        self.l2_start() + self.l2_tables
    }

    pub(super) fn total(&self) -> u64 {
        self.data_start() + self.data_clusters
    }

    pub(super) fn offset(&self, cluster: u64) -> HostOffset {
        self.geometry.host_offset(HostCluster::new(cluster))
    }
}

/// Checks the options about sizes and widths.
fn geometry(options: &CreateOptions) -> Result<Geometry, CreateError> {
    let cluster_size = options.cluster_size;
    let cluster_bits = ClusterBits::parse(cluster_size.trailing_zeros());
    let cluster_bits = cluster_bits
        .ok()
        .filter(|bits| bits.size() == cluster_size)
        .ok_or_else(|| {
            CreateError::option(
                "cluster_size",
                cluster_size,
                "a power of two from 512 to 2097152 (2M)",
            )
        })?;
    let width = options.refcount_bits;
    let refcount_order = RefcountOrder::from_bits(width)
        .ok_or_else(|| CreateError::option("refcount_bits", width, "1, 2, 4, 8, 16, 32 or 64"))?;
    let size = options
        .size
        .checked_next_multiple_of(SECTOR_SIZE)
        .filter(|&size| size <= FILE_OFFSET_MAX);
    let size = size.ok_or_else(|| {
        CreateError::option(
            "size",
            options.size,
            format!("at most {}", FILE_OFFSET_MAX / SECTOR_SIZE * SECTOR_SIZE),
        )
    })?;
    if let Some(data) = &options.data_file {
        check_data_file(options, data)?;
    }
    if let Some(luks) = &options.luks_header {
        check_encryption(options, luks)?;
    }
    if options.version == Version::V2 {
        if refcount_order != RefcountOrder::DEFAULT {
            return Err(CreateError::option("refcount_bits", width, "16 with compat=0.10"));
        }
        if options.extended_l2 {
            return Err(CreateError::option("extended_l2", "on", "off with compat=0.10"));
        }
        if options.lazy_refcounts {
            return Err(CreateError::option(
                "lazy_refcounts",
                "on",
                "off with compat=0.10",
            ));
        }
        if options.compression != CompressionType::Deflate {
            let name = options.compression.name();
            return Err(CreateError::option(
                "compression_type",
                name,
                "zlib with compat=0.10",
            ));
        }
    }
    let geometry = Geometry::new(options.version, cluster_bits, refcount_order, size)
        .with_data_file(options.data_file.is_some());
    if !options.extended_l2 {
        return Ok(geometry);
    }
    if cluster_bits.get() < EXTENDED_L2_CLUSTER_BITS_MIN {
        let expected = "16384 (16k) or more with extended_l2=on";
        return Err(CreateError::option("cluster_size", cluster_size, expected));
    }
    Ok(geometry.with_l2_entry_width(L2EntryWidth::Extended))
}

/// Returns the length of the LUKS header in bytes; zero without encryption.
pub(super) fn luks_bytes(options: &CreateOptions) -> u64 {
    options.luks_header.as_ref().map_or(0, Vec::len) as u64
}

/// Checks what goes together with a data file.
fn check_data_file(options: &CreateOptions, data: &NewDataFile) -> Result<(), CreateError> {
    let name = &data.name;
    if name.is_empty() || name.len() > DATA_FILE_NAME_MAX || name.contains('\0') {
        let expected = format!("a name of 1 to {DATA_FILE_NAME_MAX} bytes, without NUL");
        return Err(CreateError::option("data_file", name, expected));
    }
    if options.version == Version::V2 {
        return Err(CreateError::option("data_file", name, "none with compat=0.10"));
    }
    for (option, on) in [("data_file_raw", data.raw), ("data_file_keep", data.keep)] {
        if on && options.backing_file.is_some() {
            let expected = "off with a backing file: the whole disk is in the data file";
            return Err(CreateError::option(option, "on", expected));
        }
    }
    if data.keep && matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full) {
        let expected = "off with preallocation, which writes the data file";
        return Err(CreateError::option("data_file_keep", "on", expected));
    }
    Ok(())
}

/// Checks what goes together with encryption.
fn check_encryption(options: &CreateOptions, luks: &[u8]) -> Result<(), CreateError> {
    if let Err(error) = luks::describe(luks) {
        return Err(CreateError::option(
            "encrypt.format",
            "luks",
            format!("a sound header: {error}"),
        ));
    }
    if options.preallocation != Preallocation::Off {
        let expected = "off with encryption: clusters that are mapped and not written would read as noise";
        return Err(CreateError::option(
            "preallocation",
            options.preallocation.name(),
            expected,
        ));
    }
    if let Some(data) = &options.data_file {
        return Err(CreateError::option(
            "data_file",
            &data.name,
            "none with encryption",
        ));
    }
    Ok(())
}
