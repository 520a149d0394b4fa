//! Opening of images: lock, header, tables, backing chain, and the preparations for the first write.
//!
//! Invariants:
//! - nothing is probed (a format is given or recorded);
//! - backing files are opened only when allowed;
//! - a chain is finite (no image twice, a bounded depth);
//! - a failed open leaves every byte as it was.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::chain::ChainIndexes;
use block::file::{FileView, HostFiles, ImageFile, OpenFiles};
use block::lock::{LockGranularity, LockSet};
pub use block::open::OpenError;
use block::open::{Access, ChainOptions, Format, Opening};
use block::raw::Raw;
use block::ring::RingKind;
use block::{Context, Disk, IoError, LocalBoxFuture};

use super::guarded_tables::guarded_tables;
use super::keys::{KeysError, read_luks};
use super::read::{ReadError, for_each_entry, read, read_header};
use super::snapshots::header_of;
use super::{RepairError, bitmaps, rebuild_refcounts};
use crate::engine::{
    Announcement, Backing, BitmapPolicy, BitmapStorage, DataFile, Encryption, Parts, Policy, QcowDisk,
    TableMemory,
};
use crate::format::data_file::DataFileNameError;
use crate::format::{
    Autoclear, ClusterUse, CryptMethod, Geometry, Header, HeaderError, HeaderFields, HostCluster, HostOffset,
    Incompatible, L1Entry, RefcountTableEntry, Unsupported, Version,
};
use crate::luks::{self, Secret};
use crate::metadata::Metadata;
pub use crate::metadata::cluster_use::StructureError;
use crate::metadata::cluster_use::UseMap;
use crate::metadata::refcounts::{NO_LIMIT, Refcounts, TablePlace};
use crate::{SnapshotError, SnapshotSelector};

/// The largest default table cache: it maps 256 GiB at 64 KiB clusters.
pub const L2_CACHE_DEFAULT_MAX_BYTES: u64 = 32 << 20;

/// The default memory for persistent bitmaps: the bits of 8 TiB at 64 KiB each, twice.
pub const BITMAPS_MEMORY_DEFAULT_BYTES: u64 = 32 << 20;

/// The options for opening an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Refuse writes, and lock the image as a reader.
    pub read_only: bool,
    /// Open this internal snapshot in place of the disk; only to be read. Images below are opened as they are.
    pub snapshot: Option<SnapshotSelector>,
    /// The secret that opens the image, which is encrypted; images below it are not.
    pub secret: Option<Secret>,
    /// Bypass the host's page cache.
    pub direct: bool,
    /// Open the backing file the image names. Without it such an image is refused.
    pub backing_files: bool,
    /// Open the data file an image of the chain names. Without it such an image is refused.
    pub data_files: bool,
    /// Return space to the host on discard; otherwise clusters stay allocated.
    pub sparse: bool,
    /// Keep a discarded cluster's place in the file, and return only its space.
    pub discard_no_unref: bool,
    /// Answer a change only when the mapping that reaches it is in the file, so that every answered change outlives
    /// this process, flushed or not. Costs a flush for each round of changes that allocate. Without it, a killed
    /// process loses what was not flushed, as a power cut does.
    pub persist_mappings: bool,
    /// The time at which the bits of persistent bitmaps that record changes are stored.
    pub bitmaps: BitmapStorage,
    /// The memory for those bitmaps in bytes. What does not fit is marked as in use before the first change, and then can only be removed.
    pub bitmaps_memory_bytes: u64,
    /// The budget of the L2 table cache in bytes; by default enough to map the whole disk, at most
    /// [`L2_CACHE_DEFAULT_MAX_BYTES`]. What is known of the use of clusters is part of it, unless the cache holds all
    /// tables. The refcount cache gets a quarter of it on top. Each image of a chain has as much; one between two others
    /// gives a quarter of it to the chain's index.
    pub l2_cache_bytes: Option<u64>,
    /// The bound for the table caches of all images that are opened with it, each of which has its own besides; by default none.
    pub table_memory: TableMemory,
    /// The number of threads that inflate compressed clusters; with none the queues' workers inflate them.
    pub inflate_threads: usize,
    /// Hold a write that the host has no space for until there is some, instead of failing it.
    pub wait_for_space: bool,
    /// Lock images as QEMU does; `None` locks nothing.
    pub lock: Option<LockGranularity>,
    /// The lock set for the locks of the whole chain; by default a set of their own.
    pub lock_set: LockSet,
    /// The indexes of long chains, which disks on the same images share if these are locked; by default a list of their own.
    /// With `None` a read asks the images of a chain one after the other.
    pub indexes: Option<ChainIndexes>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            snapshot: None,
            secret: None,
            direct: false,
            backing_files: false,
            data_files: false,
            sparse: true,
            discard_no_unref: false,
            persist_mappings: false,
            bitmaps: BitmapStorage::default(),
            bitmaps_memory_bytes: BITMAPS_MEMORY_DEFAULT_BYTES,
            l2_cache_bytes: None,
            table_memory: TableMemory::default(),
            inflate_threads: 2,
            wait_for_space: false,
            lock: Some(LockGranularity::ByteRange),
            lock_set: LockSet::default(),
            indexes: Some(ChainIndexes::default()),
        }
    }
}

impl OpenOptions {
    /// Returns the options that hold for all images of the chain.
    #[must_use]
    pub fn of_chain(&self) -> ChainOptions {
        ChainOptions {
            direct: self.direct,
            backing_files: self.backing_files,
            data_files: self.data_files,
            lock: self.lock,
            lock_set: self.lock_set.clone(),
            indexes: self.indexes.clone(),
        }
    }
}

/// An error in an image; the source of [`OpenError::Image`] for a QCOW2 image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A header field is malformed, or asks for an unsupported feature.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// It uses an unsupported feature.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// Its structures contradict each other, and it may only be read.
    #[error(
        "its structures contradict each other and it may only be opened read-only; `ringdisk image check --repair \
         all` mends wrong counts, but where two structures share a cluster only what it reads as can be copied"
    )]
    Structures(#[from] StructureError),
    /// The host failed an operation.
    #[error("cannot {what}")]
    Io {
        /// The operation.
        what: &'static str,
        /// The host's error.
        #[source]
        source: IoError,
    },
    /// It has no such snapshot, or none that can be read.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// Its snapshot was to be opened for writing.
    #[error("its snapshot {0} can only be read; open it read-only, or apply it to the disk")]
    SnapshotForWriting(SnapshotSelector),
    /// It names a backing file and none is allowed.
    #[error("it has the backing file {name:?}, and backing files are not allowed; use backing_files=on")]
    BackingNotAllowed {
        /// The name, as recorded.
        name: String,
    },
    /// It does not record the format of its backing file.
    #[error(
        "it does not record the format of its backing file {name:?}, and formats are not guessed; record it \
         with `qemu-img rebase -u -b {name} -F FORMAT`"
    )]
    BackingFormatMissing {
        /// The name, as recorded.
        name: String,
    },
    /// Its backing file is not a path.
    #[error("its backing file {name:?} is not a path of a local file")]
    BackingName {
        /// The name, as recorded.
        name: String,
    },
    /// It keeps its data in another file, and none is allowed.
    #[error(
        "it keeps its data in the external file {name:?}, and data files are not allowed; use data_file=on"
    )]
    DataFileNotAllowed {
        /// The name, as recorded.
        name: String,
    },
    /// It does not say properly which file has its data.
    #[error(transparent)]
    DataFileName(#[from] DataFileNameError),
    /// Its data file is not a path.
    #[error("its external file {name:?} is not a path of a local file")]
    DataFilePath {
        /// The name, as recorded.
        name: String,
    },
    /// Its data file ends before the disk does.
    #[error("its data file {} has {len} bytes; expected at least {size}, the disk's", path.display())]
    DataFileTooShort {
        /// The data file.
        path: PathBuf,
        /// Its length, in bytes.
        len: u64,
        /// The disk's size, in bytes.
        size: u64,
    },
    /// Its LUKS header does not give the key of its data.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// It is encrypted, and no secret was given.
    #[error("it is encrypted ({method}), and no secret was given; use secret_file=PATH")]
    SecretMissing {
        /// The method.
        method: CryptMethod,
    },
    /// It is not encrypted, and a secret was given.
    #[error("it is not encrypted, and a secret was given; leave secret_file out")]
    SecretUnused,
    /// It is encrypted, and another image lies above it.
    #[error("it is encrypted ({method}), which is not supported for an image below another")]
    EncryptedBelow {
        /// The method.
        method: CryptMethod,
    },
    /// Its encryption is only for reading.
    #[error(
        "it is encrypted with aes (header byte 32), which is not safe and is only read; open it read-only, or convert it to \
         luks"
    )]
    AesForWriting,
    /// It is marked corrupt and may only be read.
    #[error(
        "it is marked corrupt and may only be opened read-only; repair it with `ringdisk image check --repair all`"
    )]
    MarkedCorrupt,
    /// Its refcounts had to be rebuilt and could not.
    #[error("it was not closed cleanly and its refcounts cannot be rebuilt")]
    Rebuild(#[from] RepairError),
}

/// The QCOW2 format. Images below the first are opened with the same options, read-only.
#[derive(Clone, Debug, Default)]
pub struct Qcow2(pub OpenOptions);

impl Format for Qcow2 {
    fn name(&self) -> &'static str {
        "qcow2"
    }

    fn open<'a>(
        &'a self,
        opening: &'a Opening<'a>,
        path: &'a Path,
        access: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Disk>, OpenError>> {
        Box::pin(
            async move { Ok(self.open_image(opening, path, access, Below::Opened).await? as Arc<dyn Disk>) },
        )
    }
}

impl Qcow2 {
    /// Opens as [`Format::open`] does, for callers that use the disk as what it is.
    ///
    /// # Errors
    ///
    /// As for [`Format::open`].
    pub async fn open_qcow(
        &self,
        opening: &Opening<'_>,
        path: &Path,
        access: Access,
    ) -> Result<Arc<QcowDisk>, OpenError> {
        self.open_image(opening, path, access, Below::Opened).await
    }
}

impl QcowDisk {
    /// Opens the image at `path`, and its backing chain of QCOW2 and raw files if that is allowed.
    ///
    /// # Errors
    ///
    /// [`OpenError`], with an [`ImageError`] for what is wrong in an image. No byte of any image has been changed then,
    /// unless the host failed while the refcounts of an image that was not closed cleanly were being rebuilt.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Arc<Self>, OpenError> {
        // A ring would be wasted on the few reads of an open.
        let io = |error: std::io::Error| {
            let source = error.into();
            OpenError::image(
                path,
                ImageError::Io {
                    what: "wait for I/O",
                    source,
                },
            )
        };
        let cx = Context::new(RingKind::Syscalls, 64).map_err(|error| io(error.into()))?;
        match cx.block_on(Self::open_on(&cx, &HostFiles, path, options)) {
            Ok(result) => result,
            Err(error) => Err(io(error)),
        }
    }

    /// Opens as [`QcowDisk::open`] does, with the images taken from `files` and the I/O done by `cx`.
    ///
    /// # Errors
    ///
    /// As for [`QcowDisk::open`].
    pub async fn open_on(
        cx: &Context,
        files: &dyn OpenFiles,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Arc<Self>, OpenError> {
        let qcow2 = Qcow2(options.clone());
        let formats: [&dyn Format; 2] = [&qcow2, &Raw::default()];
        let opening = Opening::new(cx, files, &formats, options.of_chain());
        let access = if options.read_only {
            Access::Read
        } else {
            Access::Write
        };
        qcow2.open_image(&opening, path, access, Below::Opened).await
    }
}

/// Opens the image at `path` for writing, and no image below it: for operations that no guest's data is needed for. What
/// the image does not map must not be read or written.
pub(crate) async fn open_without_backing(
    cx: &Context,
    path: &Path,
    options: &OpenOptions,
) -> Result<Arc<QcowDisk>, OpenError> {
    let opening = Opening::new(cx, &HostFiles, &[], options.of_chain());
    let qcow2 = Qcow2(options.clone());
    qcow2
        .open_image(&opening, path, Access::Write, Below::LeftOut)
        .await
}

/// The images below an image that is opened.
#[derive(Debug)]
pub(super) enum Below {
    /// Opened with it.
    Opened,
    /// Open already, whatever the header names.
    Given(Arc<dyn Disk>),
    /// Not needed.
    LeftOut,
}

impl Qcow2 {
    async fn open_image(
        &self,
        opening: &Opening<'_>,
        path: &Path,
        access: Access,
        below: Below,
    ) -> Result<Arc<QcowDisk>, OpenError> {
        let (options, write) = (&self.0, access.is_write());
        let image = |source: ImageError| OpenError::image(path, source);
        let snapshot = options.snapshot.as_ref().filter(|_| access != Access::Below);
        if let (Some(snapshot), true) = (snapshot, write) {
            return Err(image(ImageError::SnapshotForWriting(snapshot.clone())));
        }
        let file = opening.open_file(path, access)?;
        self.open_in(opening, file, access, snapshot, below).await
    }

    /// Opens the image in `file`, or a snapshot of it.
    pub(super) async fn open_in(
        &self,
        opening: &Opening<'_>,
        file: Arc<ImageFile>,
        access: Access,
        snapshot: Option<&SnapshotSelector>,
        below: Below,
    ) -> Result<Arc<QcowDisk>, OpenError> {
        let (options, write, path) = (&self.0, access.is_write(), file.path());
        let image = |source: ImageError| OpenError::image(path, source);
        let view = file.view(opening.context()).map_err(|error| {
            image(ImageError::Io {
                what: "duplicate a descriptor",
                source: error.into(),
            })
        })?;
        let header = check_header(&view, write).await.map_err(image)?;
        let lends_no_secret = match &below {
            Below::Opened => false,
            Below::Given(_) => true,
            Below::LeftOut => options.secret.is_none(),
        };
        let backing = match below {
            Below::Opened => open_backing(opening, path, &header).await?,
            Below::Given(disk) => Some(Backing::new(disk)),
            Below::LeftOut if header.has_data_file() && !options.data_files => {
                return Err(image(SnapshotError::DataFile.into()));
            }
            Below::LeftOut => None,
        };
        // After the images below: it may be none of them.
        let data_file = open_data_file(opening, path, &header, access)?;
        let encryption = encryption(&view, &header, access, lends_no_secret, options.secret.as_ref())
            .await
            .map_err(image)?;
        // Nothing has been written so far; from here on only a rebuild writes.
        let header = prepare(&view, header, write).await.map_err(image)?;
        // What the engine writes back is what it was opened from.
        let file_len = view.len().map_err(io_length).map_err(image)?;
        let cluster_len = header.cluster_bits.size().min(file_len) as usize;
        let header_cluster = read(&view, ClusterUse::Header, 0, cluster_len)
            .await
            .map_err(|error| image(error.into()))?;
        let fields = HeaderFields::new(&header_cluster);
        let mut header = fields.decode().map_err(|error| image(error.into()))?;
        if let Some(snapshot) = snapshot {
            let found = header_of(&view, &header, snapshot).await;
            header = found.map_err(|error| image(error.into()))?;
        }
        let covered_bytes = backing.as_ref().map_or(0, |backing| backing.size);
        let mut cache = (options.l2_cache_bytes).unwrap_or_else(|| default_cache(&header.geometry()));
        if access == Access::Below && backing.is_some() {
            cache = opening.share_with_index(cache);
        }
        let metadata = load(&view, &header, cache, covered_bytes, write)
            .await
            .map_err(image)?;
        let announcement = if write {
            announcement(&view, &header).await
        } else {
            Announcement::default()
        };
        // Not sooner: a caller that opens an image needs the error that there is no space.
        if write && options.wait_for_space {
            file.wait_for_space();
            if let Some(data) = &data_file {
                data.file.wait_for_space();
            }
        }
        Ok(QcowDisk::from_parts(Parts {
            file,
            data_file,
            policy: Policy {
                read_only: !write,
                sparse: options.sparse,
                discard_no_unref: options.discard_no_unref,
                persist_mappings: options.persist_mappings,
                bitmaps: BitmapPolicy {
                    storage: options.bitmaps,
                    memory_bytes: options.bitmaps_memory_bytes,
                },
            },
            compression: header.compression,
            encryption,
            backing,
            metadata,
            header: fields,
            announcement,
            inflate_threads: options.inflate_threads,
            table_memory: options.table_memory.clone(),
        }))
    }
}

/// Returns the encryption of an image's data. Takes seconds of CPU if it has one. `without`: the secret, if there is one, is
/// not for this image, and its data is not needed.
async fn encryption(
    view: &FileView,
    header: &Header,
    access: Access,
    without: bool,
    secret: Option<&Secret>,
) -> Result<Encryption, ImageError> {
    let method = header.crypt_method;
    let is_encrypted = method != CryptMethod::None;
    let is_below = access == Access::Below;
    match secret.filter(|_| !is_below && !without) {
        None if !is_encrypted => Ok(Encryption::Plain),
        None if is_below => Err(ImageError::EncryptedBelow { method }),
        None if without => Ok(Encryption::Locked),
        None => Err(ImageError::SecretMissing { method }),
        Some(_) if !is_encrypted => Err(ImageError::SecretUnused),
        Some(_) if method == CryptMethod::Aes && access == Access::Write => Err(ImageError::AesForWriting),
        Some(secret) if method == CryptMethod::Aes => Ok(Encryption::Aes(Arc::new(luks::aes_cbc(secret)))),
        Some(secret) => {
            let file_len = view.len().map_err(io_length)?;
            let (_, luks) = read_luks(view, header, file_len).await?;
            let cipher = luks::unlock(&luks, secret).map_err(KeysError::from)?;
            Ok(Encryption::Luks(Arc::new(cipher)))
        }
    }
}

async fn open_backing(
    opening: &Opening<'_>,
    path: &Path,
    header: &Header,
) -> Result<Option<Backing>, OpenError> {
    let Some(name) = &header.backing_name else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(name).into_owned();
    if !opening.allows_backing_files() {
        return Err(OpenError::image(
            path,
            ImageError::BackingNotAllowed { name: text },
        ));
    }
    let Some(format) = header.backing_format() else {
        return Err(OpenError::image(
            path,
            ImageError::BackingFormatMissing { name: text },
        ));
    };
    let below = backing_path(path, name)
        .ok_or_else(|| OpenError::image(path, ImageError::BackingName { name: text }))?;
    let disk = opening.open_below(path, &below, format).await?;
    Ok(Some(Backing::new(disk)))
}

/// Opens the file that has the image's data, if there is one.
fn open_data_file(
    opening: &Opening<'_>,
    path: &Path,
    header: &Header,
    access: Access,
) -> Result<Option<DataFile>, OpenError> {
    if !header.has_data_file() {
        return Ok(None);
    }
    let image = |source: ImageError| OpenError::image(path, source);
    let name = header.data_file_name().map_err(|error| image(error.into()))?;
    let named = || name.to_owned();
    if !opening.allows_data_files() {
        return Err(image(ImageError::DataFileNotAllowed { name: named() }));
    }
    let data = backing_path(path, name.as_bytes())
        .ok_or_else(|| image(ImageError::DataFilePath { name: named() }))?;
    let file = opening.open_data_file(path, &data, access)?;
    let view = file.view(opening.context()).map_err(|error| {
        image(ImageError::Io {
            what: "duplicate a descriptor",
            source: error.into(),
        })
    })?;
    let len = view.len().map_err(|error| image(io_length(error)))?;
    let size = header.geometry().virtual_size();
    if len < size {
        return Err(image(ImageError::DataFileTooShort {
            path: data,
            len,
            size,
        }));
    }
    Ok(Some(DataFile {
        file,
        is_raw: header.has_raw_data_file(),
    }))
}

/// Returns the path of the backing file that `image` names: relative names count from the image's folder, and `file:`
/// is left out. `None` if the name is not a path: QEMU would take `PROTOCOL:…` for something else.
#[must_use]
pub fn backing_path(image: &Path, name: &[u8]) -> Option<PathBuf> {
    let name = name.strip_prefix(b"file:").unwrap_or(name);
    if name.is_empty() || name.contains(&0) {
        return None;
    }
    let before_slash = name.split(|&byte| byte == b'/').next().unwrap_or_default();
    if before_slash.contains(&b':') {
        return None;
    }
    let path = Path::new(std::ffi::OsStr::from_bytes(name));
    Some(match image.parent() {
        Some(folder) if path.is_relative() => folder.join(path),
        _ => path.to_owned(),
    })
}

async fn check_header(view: &FileView, write: bool) -> Result<Header, ImageError> {
    let located = read_header(view).await?;
    let header = located.header;
    header.validate()?;
    header.validate_within(located.file_len)?;
    header.require_supported()?;
    if write && header.incompatible.contains(Incompatible::CORRUPT) {
        return Err(ImageError::MarkedCorrupt);
    }
    Ok(header)
}

/// Rebuilds the refcounts of an image that was not closed cleanly.
async fn prepare(view: &FileView, header: Header, write: bool) -> Result<Header, ImageError> {
    if write && header.incompatible.contains(Incompatible::DIRTY) {
        tracing::warn!(
            image = %view.file().path().display(),
            "the image was not closed cleanly; rebuilding its refcounts"
        );
        // UseMap that would be refused afterwards are refused before the first write.
        let file_len = view.len().map_err(io_length)?;
        {
            let l1 = read_l1(view, &header).await?;
            UseMap::compare(&header, &l1, &guarded_tables(view, &header, file_len).await)?;
        }
        return Ok(rebuild_refcounts(view).await?);
    }
    Ok(header)
}

/// Returns the announcements to make before the first write: structures that this crate does not keep up to date.
async fn announcement(view: &FileView, header: &Header) -> Announcement {
    if header.version == Version::V2 || header.autoclear.is_empty() {
        return Announcement::default();
    }
    // The engine keeps the promise of a raw data file.
    let mut keep = header.autoclear.intersection(Autoclear::RAW_EXTERNAL_DATA);
    let mut announcement = Announcement::default();
    if header.autoclear.contains(Autoclear::BITMAPS) {
        // Bitmaps that are marked as out of date are consistent with the image.
        match bitmaps::marks(view, header).await {
            Ok(found) => {
                keep |= Autoclear::BITMAPS;
                announcement = found;
            }
            Err(error) => {
                let image = view.file().path().display();
                tracing::warn!(%image, %error, "the image's bitmaps are malformed; the first write disowns them");
            }
        }
    }
    announcement.keep = (keep != header.autoclear).then_some(keep);
    announcement
}

/// Reads the L1 and refcount tables.
async fn load(
    view: &FileView,
    header: &Header,
    cache: u64,
    covered_bytes: u64,
    write: bool,
) -> Result<Metadata, ImageError> {
    let geometry = header.geometry();
    let file_len = view.len().map_err(io_length)?;
    let block_device = view.file().is_block_device();

    let l1 = read_l1(view, header).await?;
    let entries = header.refcount_table_bytes() / 8;
    let mut table = vec![RefcountTableEntry::UNALLOCATED; entries as usize];
    for_each_entry(
        view,
        ClusterUse::RefcountTable,
        header.refcount_table_offset,
        entries,
        |index, raw| {
            if let Some(place) = table.get_mut(index as usize) {
                *place = RefcountTableEntry::from_raw(raw);
            }
        },
    )
    .await?;

    let uses = if write {
        let guarded = guarded_tables(view, header, file_len).await;
        UseMap::gather(header, &l1, &table, &guarded, cache)?
    } else {
        UseMap::default()
    };
    let place = TablePlace {
        offset: header.refcount_table_offset,
        clusters: u64::from(header.refcount_table_clusters),
    };
    let end = HostCluster::new(geometry.clusters_for(file_len));
    let limit = if block_device {
        geometry.host_cluster(HostOffset::new(file_len))
    } else {
        NO_LIMIT
    };
    let mut refcounts = Refcounts::new(geometry, table, place, end, limit, (cache / 4).max(256 << 10));
    refcounts.uses = uses;
    Ok(Metadata::new(
        geometry,
        l1,
        header.l1_offset,
        refcounts,
        cache,
        covered_bytes,
    ))
}

fn io_length(source: IoError) -> ImageError {
    let what = "find the length of the file";
    ImageError::Io { what, source }
}

async fn read_l1(view: &FileView, header: &Header) -> Result<Vec<L1Entry>, ImageError> {
    let mut l1 = vec![L1Entry::default(); header.l1_entries as usize];
    let entries = u64::from(header.l1_entries);
    for_each_entry(
        view,
        ClusterUse::L1Table,
        header.l1_offset,
        entries,
        |index, raw| {
            if let Some(place) = l1.get_mut(index as usize) {
                *place = L1Entry::from_raw(raw);
            }
        },
    )
    .await?;
    Ok(l1)
}

fn default_cache(geometry: &Geometry) -> u64 {
    let entry_bytes = geometry.l2_entry_width().bytes() as u64;
    let whole = geometry.guest_clusters().saturating_mul(entry_bytes);
    whole.clamp(1 << 20, L2_CACHE_DEFAULT_MAX_BYTES)
}
