//! Creation of an image: header, refcounts, L1, and as much of the disk as preallocation asks for.
//!
//! The image is laid out without gaps: header, refcount table, refcount blocks, L1, L2 tables, data. The header is
//! written last, after a sync, so a cut leaves no image or a whole one. The refcount table has room for the disk's
//! full size, so that it need not grow under a guest.

use block::file::FileView;
use block::{AlignedBuf, IoError};

use crate::format::data_file::DATA_FILE_NAME_MAX;
use crate::format::header::{BACKING_NAME_MAX, V2_HEADER_LENGTH, V3_HEADER_LENGTH, V3_HEADER_LENGTH_MIN};
use crate::format::l1::L1_TABLE_MAX_BYTES;
use crate::format::positions::{FILE_OFFSET_MAX, SECTOR_SIZE};
use crate::format::refcount::REFCOUNT_TABLE_MAX_BYTES;
use crate::format::validate::EXTENDED_L2_CLUSTER_BITS_MIN;
use crate::format::{
    Autoclear, ClusterBits, Compatible, CompressionType, CryptMethod, Extension, FeatureKind, FeatureName,
    Geometry, GuestCluster, Header, HeaderError, HostCluster, HostOffset, Incompatible, L1Entry, L2Entry,
    L2EntryWidth, L2TableMut, L2TableRef, RefcountOrder, RefcountTableEntry, Version,
};
use crate::luks;

/// The size of one write, in bytes.
const PART: u64 = 1 << 20;

/// The part of the disk whose clusters are allocated at creation.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Preallocation {
    /// No cluster.
    #[default]
    Off,
    /// Every cluster is mapped; the host has reserved no space for it.
    Metadata,
    /// As [`Self::Metadata`], and the host has reserved the space.
    Falloc,
    /// As [`Self::Metadata`], and the host has written zeros.
    Full,
}

impl Preallocation {
    /// Returns the mode with QEMU's name `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "off" => Some(Self::Off),
            "metadata" => Some(Self::Metadata),
            "falloc" => Some(Self::Falloc),
            "full" => Some(Self::Full),
            _ => None,
        }
    }

    /// Returns QEMU's name.
    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Metadata => "metadata",
            Self::Falloc => "falloc",
            Self::Full => "full",
        }
    }
}

/// The properties of a new image.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// The guest disk's size in bytes; rounded up to whole sectors. For a backing file's size, the caller passes the
    /// size of the backing disk.
    pub size: u64,
    /// The cluster size in bytes.
    pub cluster_size: u64,
    /// The edition of the format.
    pub version: Version,
    /// The refcount width in bits.
    pub refcount_bits: u32,
    /// The backing file's name, as it is to be written.
    pub backing_file: Option<String>,
    /// The backing file's format; needed with a backing file, as nothing is ever probed.
    pub backing_format: Option<String>,
    /// Map each thirty-second part of a cluster by itself (extended L2 entries). Version 3 and clusters of 16 KiB or more.
    pub extended_l2: bool,
    /// Allow refcount updates to be postponed.
    pub lazy_refcounts: bool,
    /// The compression of compressed clusters.
    pub compression: CompressionType,
    /// The part of the disk whose clusters are allocated at creation.
    pub preallocation: Preallocation,
    /// The file of its own for the guest's bytes; see [`create_with_data_file`].
    pub data_file: Option<NewDataFile>,
    /// A LUKS header with all key material, from [`luks::create`]: the guest's data is to be encrypted
    /// with its key. It is made beforehand, as that takes seconds of CPU.
    pub luks_header: Option<Vec<u8>>,
}

/// The external data file of a new image. Version 3 only.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NewDataFile {
    /// The name, as it is to be written.
    pub name: String,
    /// The file is the disk byte by byte (raw). Every cluster is mapped then.
    pub raw: bool,
    /// The file's bytes become the disk's. Every cluster is mapped then. Otherwise the file must be empty, unless it is a
    /// block device.
    pub keep: bool,
}

impl NewDataFile {
    fn maps_all(&self) -> bool {
        self.raw || self.keep
    }
}

impl CreateOptions {
    /// Returns the defaults of `qemu-img create`: version 3, 64 KiB clusters, 16-bit refcounts.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            size: size_bytes,
            cluster_size: ClusterBits::DEFAULT.size(),
            version: Version::V3,
            refcount_bits: RefcountOrder::DEFAULT.bits(),
            backing_file: None,
            backing_format: None,
            extended_l2: false,
            lazy_refcounts: false,
            compression: CompressionType::Deflate,
            preallocation: Preallocation::Off,
            data_file: None,
            luks_header: None,
        }
    }
}

/// An image could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// An option has an invalid value.
    #[error("{option}={value}: expected {expected}")]
    Option {
        /// The option's name, as on the command line.
        option: &'static str,
        /// The value found.
        value: String,
        /// The values allowed.
        expected: String,
    },
    /// Names and tables do not fit in the header.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The host failed.
    #[error("cannot write {what} at {offset:#x}")]
    Io {
        /// The structure.
        what: &'static str,
        /// The offset, in bytes.
        offset: u64,
        /// The host's error.
        #[source]
        source: IoError,
    },
}

impl CreateError {
    fn option(option: &'static str, value: impl ToString, expected: impl Into<String>) -> Self {
        Self::Option {
            option,
            value: value.to_string(),
            expected: expected.into(),
        }
    }

    fn io(what: &'static str, offset: u64) -> impl FnOnce(IoError) -> Self {
        move |source| Self::Io { what, offset, source }
    }
}

/// The layout of the image. Counts and positions in clusters.
#[derive(Clone, Copy, Debug)]
struct Plan {
    geometry: Geometry,
    table_clusters: u64,
    blocks: u64,
    luks_clusters: u64,
    l1_entries: u64,
    l1_clusters: u64,
    l2_tables: u64,
    /// The guest clusters that are mapped.
    mapped: u64,
    /// The clusters of this file for them; none with a data file.
    data_clusters: u64,
}

impl Plan {
    fn new(options: &CreateOptions) -> Result<Self, CreateError> {
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

    fn blocks_start(&self) -> u64 {
        1 + self.table_clusters
    }

    fn luks_start(&self) -> u64 {
        self.blocks_start() + self.blocks
    }

    fn l1_start(&self) -> u64 {
        self.luks_start() + self.luks_clusters
    }

    fn l2_start(&self) -> u64 {
        self.l1_start() + self.l1_clusters
    }

    fn data_start(&self) -> u64 {
        self.l2_start() + self.l2_tables
    }

    fn total(&self) -> u64 {
        self.data_start() + self.data_clusters
    }

    fn offset(&self, cluster: u64) -> HostOffset {
        self.geometry.host_offset(HostCluster::new(cluster))
    }
}

/// Creates an image in `file`, in place of its contents. Durable when it returns.
///
/// # Errors
///
/// [`CreateError`]; nothing was written if it is about an option.
pub async fn create(file: &FileView, options: &CreateOptions) -> Result<Header, CreateError> {
    if let Some(data) = &options.data_file {
        let expected = "none, as no such file was opened";
        return Err(CreateError::option("data_file", &data.name, expected));
    }
    create_in(file, None, options).await
}

/// Creates an image as [`create`] does, whose guest's bytes are in `data`: the file that `options.data_file` names. The
/// disk's bytes are those of the file if they are kept, or else zeros.
///
/// # Errors
///
/// [`CreateError`]; nothing was written if it is about an option.
pub async fn create_with_data_file(
    file: &FileView,
    data: &FileView,
    options: &CreateOptions,
) -> Result<Header, CreateError> {
    let Some(new) = &options.data_file else {
        let path = data.file().path().display();
        return Err(CreateError::option("data_file", path, "a name to record for it"));
    };
    create_in(file, Some((data, new)), options).await
}

async fn create_in(
    file: &FileView,
    data: Option<(&FileView, &NewDataFile)>,
    options: &CreateOptions,
) -> Result<Header, CreateError> {
    let plan = Plan::new(options)?;
    let header = header(options, &plan)?;
    let header_bytes = header.encode()?;
    header.validate()?;

    if let Some((data, new)) = data {
        prepare_data_file(data, new, options, &plan).await?;
    }
    let end = plan.offset(plan.total()).bytes();
    make_room(file, end).await?;
    write_refcounts(file, &plan).await?;
    if let Some(luks) = &options.luks_header {
        let offset = plan.offset(plan.luks_start()).bytes();
        write(file, "the LUKS header", offset, luks.clone()).await?;
    }
    write_mapping(file, &plan).await?;
    if data.is_none() {
        let start = plan.offset(plan.data_start()).bytes();
        let len = plan.offset(plan.total()).bytes() - start;
        fill_data(file, options, start, len).await?;
    }
    file.sync()
        .await
        .map_err(CreateError::io("everything (sync)", 0))?;
    write(file, "the header", 0, header_bytes).await?;
    file.sync()
        .await
        .map_err(CreateError::io("the header (sync)", 0))?;
    Ok(header)
}

/// Makes the file `end` bytes long and all zeros, as far as metadata goes.
async fn make_room(file: &FileView, end: u64) -> Result<(), CreateError> {
    let io = || CreateError::io("the file's length", 0);
    if !file.file().is_block_device() {
        file.set_len(0).await.map_err(io())?;
        return file.set_len(end).await.map_err(io());
    }
    let len = file.len().map_err(io())?;
    if len < end {
        let expected = format!("less: the image takes {end} bytes, the device has {len}");
        return Err(CreateError::option("size", end, expected));
    }
    file.zero(0, end).await.map_err(io())
}

async fn write_refcounts(file: &FileView, plan: &Plan) -> Result<(), CreateError> {
    let geometry = plan.geometry;
    let table = (0..plan.blocks).flat_map(|i| {
        RefcountTableEntry::encode(plan.offset(plan.blocks_start() + i))
            .raw()
            .to_be_bytes()
    });
    write(
        file,
        "the refcount table",
        plan.offset(1).bytes(),
        table.collect(),
    )
    .await?;
    let per_block = geometry.refcount_block_entries() as u64;
    let full = refcount_block(&geometry, per_block);
    let whole_blocks = plan.total() / per_block;
    let mut index = 0;
    while index < plan.blocks {
        let mut bytes = Vec::new();
        let offset = plan.offset(plan.blocks_start() + index).bytes();
        while index < plan.blocks && (bytes.len() as u64) < PART {
            if index < whole_blocks {
                bytes.extend_from_slice(&full);
            } else {
                bytes.extend_from_slice(&refcount_block(&geometry, plan.total() % per_block));
            }
            index += 1;
        }
        write(file, "the refcount blocks", offset, bytes).await?;
    }
    Ok(())
}

/// Returns a block whose first `used` clusters have one reference each.
fn refcount_block(geometry: &Geometry, used: u64) -> Vec<u8> {
    let mut block = vec![0; geometry.cluster_size() as usize];
    for index in 0..used as usize {
        let written = geometry.refcount_order().write(&mut block, index, 1);
        assert_eq!(written, Ok(()), "1 fits every refcount width");
    }
    block
}

/// Writes L1 and L2 tables, if anything is preallocated.
async fn write_mapping(file: &FileView, plan: &Plan) -> Result<(), CreateError> {
    if plan.l2_tables == 0 {
        return Ok(());
    }
    let l1 = (0..plan.l2_tables).flat_map(|i| {
        let host = plan.offset(plan.l2_start() + i);
        L1Entry::encode(L2TableRef { host, copied: true })
            .raw()
            .to_be_bytes()
    });
    write(
        file,
        "the L1 table",
        plan.offset(plan.l1_start()).bytes(),
        l1.collect(),
    )
    .await?;
    // The L2 tables are one run of entries: table `i` ends where table `i + 1` starts.
    let mut done = 0;
    while done < plan.mapped {
        let width = plan.geometry.l2_entry_width().bytes();
        let count = (plan.mapped - done).min(PART / width as u64);
        let mut bytes = vec![0; count as usize * width];
        let mut table = L2TableMut::new(&mut bytes, &plan.geometry);
        for index in 0..count {
            let data = if plan.geometry.has_data_file() {
                plan.geometry.data_file_offset(GuestCluster::new(done + index))
            } else {
                plan.offset(plan.data_start() + done + index)
            };
            table.set(index as usize, L2Entry::data(data, true, &plan.geometry));
        }
        let offset = plan.offset(plan.l2_start()).bytes() + done * width as u64;
        write(file, "the L2 tables", offset, bytes).await?;
        done += count;
    }
    Ok(())
}

/// Gives the data file the disk's length and, unless its bytes are kept, makes those that are mapped read as zeros. Durable
/// when it returns.
async fn prepare_data_file(
    data: &FileView,
    new: &NewDataFile,
    options: &CreateOptions,
    plan: &Plan,
) -> Result<(), CreateError> {
    let io = || CreateError::io("the data file", 0);
    let (size, name) = (plan.geometry.virtual_size(), &new.name);
    let len = data.len().map_err(io())?;
    let is_device = data.file().is_block_device();
    if is_device && len < size {
        let expected = format!("a block device of at least {size} bytes; it has {len}");
        return Err(CreateError::option("data_file", name, expected));
    }
    if !is_device && !new.keep && len > 0 {
        let expected =
            "a new or empty file; data_file_keep=on makes the bytes of one that is there the disk's";
        return Err(CreateError::option("data_file", name, expected));
    }
    if !is_device && len > size {
        let expected = format!("at least {len}, the data file's length");
        return Err(CreateError::option("size", size, expected));
    }
    if !is_device && len < size {
        data.set_len(size).await.map_err(io())?;
    }
    if !new.keep {
        if is_device && plan.mapped > 0 {
            data.zero(0, size).await.map_err(io())?;
        }
        fill_data(data, options, 0, size).await?;
    }
    data.sync().await.map_err(io())
}

/// Allocates `len` bytes from `start` on, as preallocation asks for.
async fn fill_data(
    file: &FileView,
    options: &CreateOptions,
    start: u64,
    len: u64,
) -> Result<(), CreateError> {
    match options.preallocation {
        _ if len == 0 => Ok(()),
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc if file.file().is_block_device() => Ok(()),
        Preallocation::Falloc => file
            .preallocate(start, len)
            .await
            .map_err(CreateError::io("the data's space", start)),
        Preallocation::Full => {
            let mut done = 0;
            while done < len {
                let part = (len - done).min(PART);
                write(file, "the data", start + done, vec![0; part as usize]).await?;
                done += part;
            }
            Ok(())
        }
    }
}

async fn write(file: &FileView, what: &'static str, offset: u64, bytes: Vec<u8>) -> Result<(), CreateError> {
    let written = file.write_at(offset, AlignedBuf::from_slice(&bytes)).await;
    written.map_err(CreateError::io(what, offset))
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

/// Returns the length of the LUKS header in bytes; zero without encryption.
fn luks_bytes(options: &CreateOptions) -> u64 {
    options.luks_header.as_ref().map_or(0, Vec::len) as u64
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

/// Checks the options about names, and makes the header.
fn header(options: &CreateOptions, plan: &Plan) -> Result<Header, CreateError> {
    let mut extensions = Vec::new();
    match (&options.backing_file, &options.backing_format) {
        (None, None) => {}
        (None, Some(format)) => {
            return Err(CreateError::option(
                "backing_fmt",
                format,
                "none without backing_file",
            ));
        }
        (Some(name), _) if name.is_empty() || name.len() > BACKING_NAME_MAX as usize => {
            let expected = format!("a name of 1 to {BACKING_NAME_MAX} bytes");
            return Err(CreateError::option("backing_file", name, expected));
        }
        (Some(name), None) => {
            let expected = "backing_fmt=raw or backing_fmt=qcow2 with it; formats are never guessed";
            return Err(CreateError::option("backing_file", name, expected));
        }
        (Some(_), Some(format)) if !matches!(format.as_str(), "raw" | "qcow2") => {
            return Err(CreateError::option("backing_fmt", format, "raw or qcow2"));
        }
        (Some(name), Some(_)) if options.preallocation != Preallocation::Off => {
            return Err(CreateError::option(
                "backing_file",
                name,
                "no backing file with preallocation",
            ));
        }
        (Some(_), Some(format)) => extensions.push(Extension::BackingFormat(format.as_bytes().to_vec())),
    }
    let geometry = plan.geometry;
    let v3 = options.version == Version::V3;
    let mut incompatible = Incompatible::empty();
    incompatible.set(
        Incompatible::COMPRESSION_TYPE,
        options.compression != CompressionType::Deflate,
    );
    incompatible.set(Incompatible::EXTENDED_L2, options.extended_l2);
    incompatible.set(Incompatible::EXTERNAL_DATA, options.data_file.is_some());
    let mut autoclear = Autoclear::empty();
    if let Some(data) = &options.data_file {
        autoclear.set(Autoclear::RAW_EXTERNAL_DATA, data.raw);
        extensions.push(Extension::DataFile(data.name.as_bytes().to_vec()));
    }
    if options.luks_header.is_some() {
        extensions.push(Extension::CryptoHeader {
            offset: plan.offset(plan.luks_start()),
            len: luks_bytes(options),
        });
    }
    let mut header = Header {
        version: options.version,
        cluster_bits: geometry.cluster_bits(),
        virtual_size: geometry.virtual_size(),
        crypt_method: match options.luks_header {
            Some(_) => CryptMethod::Luks,
            None => CryptMethod::None,
        },
        l1_entries: plan.l1_entries as u32,
        l1_offset: if plan.l1_entries == 0 {
            HostOffset::new(0)
        } else {
            plan.offset(plan.l1_start())
        },
        refcount_table_offset: plan.offset(1),
        refcount_table_clusters: plan.table_clusters as u32,
        snapshot_count: 0,
        snapshot_table_offset: HostOffset::new(0),
        incompatible,
        compatible: if options.lazy_refcounts {
            Compatible::LAZY_REFCOUNTS
        } else {
            Compatible::empty()
        },
        autoclear,
        refcount_order: geometry.refcount_order(),
        header_length: if v3 { V3_HEADER_LENGTH } else { V2_HEADER_LENGTH },
        compression: options.compression,
        unknown_fields: vec![
            0;
            if v3 {
                (V3_HEADER_LENGTH - V3_HEADER_LENGTH_MIN - 1) as usize
            } else {
                0
            }
        ],
        extensions,
        backing_name: options.backing_file.as_ref().map(|name| name.as_bytes().to_vec()),
    };
    if v3 {
        header.extensions.push(Extension::FeatureNames(feature_names()));
        if header.encode().is_err() {
            // Small clusters have no room for names, which are only a courtesy.
            header.extensions.pop();
        }
    }
    Ok(header)
}

/// Returns the names of all features that this edition of the format defines.
fn feature_names() -> Vec<FeatureName> {
    let name = FeatureName::new;
    vec![
        name(FeatureKind::Incompatible, 0, "dirty bit"),
        name(FeatureKind::Incompatible, 1, "corrupt bit"),
        name(FeatureKind::Incompatible, 2, "external data file"),
        name(FeatureKind::Incompatible, 3, "compression type"),
        name(FeatureKind::Incompatible, 4, "extended L2 entries"),
        name(FeatureKind::Compatible, 0, "lazy refcounts"),
        name(FeatureKind::Autoclear, 0, "bitmaps"),
        name(FeatureKind::Autoclear, 1, "raw external data"),
    ]
}
