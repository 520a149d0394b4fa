//! Descriptions of images, also of those that cannot be served: encrypted, or with unknown
//! features. Names follow `qemu-img info --output=json`. Nothing is written, and no other file is opened.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use block::file::FileView;
use serde::{Deserialize, Serialize};

use super::backing::full_backing_name;
use super::bitmaps::{BitmapDirectoryError, consistent_bitmaps, for_each_bitmap};
use super::keys::read_luks;
use super::read::{ReadError, for_each_snapshot, read_header};
use crate::format::{
    Autoclear, BitmapDirectoryEntry, BitmapFlags, Compatible, CryptMethod, Header, Incompatible,
    SnapshotEntry, Version,
};
use crate::luks::{self, LuksInfo};

/// The description of an image.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImageInfo {
    /// The image's path.
    pub filename: String,
    /// Always `qcow2`.
    pub format: &'static str,
    /// The guest disk's size in bytes.
    pub virtual_size: u64,
    /// The cluster size in bytes.
    pub cluster_size: u64,
    /// The number of bytes that the file takes on the host, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_size: Option<u64>,
    /// The image was not closed properly.
    pub dirty_flag: bool,
    /// Guest data is encrypted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
    /// The backing file's name, as written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    /// The backing file's path, relative names resolved against the image's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_backing_filename: Option<String>,
    /// The backing file's format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename_format: Option<String>,
    /// The internal snapshots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// The number of further snapshots, which are not listed as their names would take too much memory.
    #[serde(skip_serializing_if = "is_none")]
    pub snapshots_not_listed: u64,
    /// The facts that only this format has.
    pub format_specific: FormatSpecific,
    /// The reason that this crate would not serve the image, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unsupported: Option<String>,
}

/// The part of [`ImageInfo`] that only this format has.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct FormatSpecific {
    /// Always `qcow2`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The facts.
    pub data: QcowInfo,
}

/// Facts about a QCOW2 image.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct QcowInfo {
    /// The edition of the format: `0.10` or `1.1`.
    pub compat: &'static str,
    /// The compression of compressed clusters.
    pub compression_type: &'static str,
    /// Refcount updates may be postponed. Version 3 only, as are the fields below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy_refcounts: Option<bool>,
    /// The refcount width.
    pub refcount_bits: u32,
    /// The image is marked as corrupt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub corrupt: Option<bool>,
    /// L2 entries describe sub-clusters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_l2: Option<bool>,
    /// The external data file's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_file: Option<String>,
    /// The external data file reads as a raw image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_file_raw: Option<bool>,
    /// The encryption of guest data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypt: Option<EncryptInfo>,
    /// The persistent bitmaps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapInfo>,
    /// The number of further bitmaps, which are not listed as their names would take too much memory.
    #[serde(skip_serializing_if = "is_none")]
    pub bitmaps_not_listed: u64,
}

/// The encryption of guest data.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct EncryptInfo {
    /// `aes` or `luks`.
    pub format: &'static str,
    /// The LUKS header; none if it cannot be read.
    #[serde(flatten)]
    pub luks: Option<LuksInfo>,
}

/// The internal snapshots of an image.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotList {
    /// As many as are listed.
    pub snapshots: Vec<SnapshotInfo>,
    /// The number of further snapshots, which are not listed as their names would take too much memory.
    #[serde(default, skip_serializing_if = "is_none")]
    pub snapshots_not_listed: u64,
}

impl SnapshotList {
    /// Describes the snapshots of a table.
    #[must_use]
    pub fn new(entries: &[SnapshotEntry]) -> Self {
        let mut listed = Listed::default();
        for entry in entries {
            listed.push_snapshot(entry);
        }
        Self {
            snapshots: listed.list,
            snapshots_not_listed: listed.left_out,
        }
    }
}

/// The persistent bitmaps of an image.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapList {
    /// As many as are listed.
    pub bitmaps: Vec<BitmapInfo>,
    /// The number of further bitmaps, which are not listed as their names would take too much memory.
    #[serde(skip_serializing_if = "is_none")]
    pub bitmaps_not_listed: u64,
}

impl BitmapList {
    /// Describes the bitmaps of an image that are consistent with its metadata.
    pub(crate) async fn read(
        file: &FileView,
        header: &Header,
        file_len: u64,
    ) -> Result<Self, BitmapDirectoryError> {
        let Some(extension) = consistent_bitmaps(header) else {
            return Ok(Self::default());
        };
        let mut listed = Listed::default();
        let each = |_, entry: BitmapDirectoryEntry| listed.push(entry.name.len(), || BitmapInfo::new(&entry));
        for_each_bitmap(file, header, &extension, file_len, each).await?;
        Ok(Self {
            bitmaps: listed.list,
            bitmaps_not_listed: listed.left_out,
        })
    }
}

impl BitmapInfo {
    fn new(entry: &BitmapDirectoryEntry) -> Self {
        let names = [(BitmapFlags::IN_USE, "in-use"), (BitmapFlags::AUTO, "auto")];
        let set = names.into_iter().filter(|(flag, _)| entry.flags.contains(*flag));
        Self {
            name: lossy(&entry.name),
            granularity: entry.granularity(),
            flags: set.map(|(_, name)| name).collect(),
        }
    }
}

/// An internal snapshot.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotInfo {
    /// The unique ID.
    pub id: String,
    /// The name.
    pub name: String,
    /// The VM state's size in bytes.
    pub vm_state_size: u64,
    /// The time of the snapshot, in seconds since the epoch.
    pub date_sec: u32,
    /// The part of a second beyond that, in nanoseconds.
    pub date_nsec: u32,
    /// The guest's running time, in seconds.
    pub vm_clock_sec: u64,
    /// The part of a second beyond that, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// The number of instructions that the guest had executed, if they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
}

/// A persistent bitmap.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct BitmapInfo {
    /// The name.
    pub name: String,
    /// The number of guest bytes that one bit covers.
    pub granularity: u64,
    /// `in-use`, `auto`.
    pub flags: Vec<&'static str>,
}

/// Describes the image in `file`.
///
/// # Errors
///
/// [`ReadError`] if the file cannot be read or holds no image. Snapshots, bitmaps and a LUKS header that cannot
/// be read are left out.
pub async fn info(file: &FileView) -> Result<ImageInfo, ReadError> {
    let located = read_header(file).await?;
    let (header, file_len) = (&located.header, located.file_len);
    header.validate_except_missing_refcount_table()?;
    let backing = header.backing_name.as_deref().map(lossy);
    let mut snapshots = Listed::default();
    let read = for_each_snapshot(file, header, file_len, |_, entry| snapshots.push_snapshot(&entry));
    if read.await.is_err() {
        snapshots = Listed::default();
    }
    let mut data = QcowInfo::new(header);
    if let Some(encrypt) = &mut data.encrypt
        && let Ok((_, bytes)) = read_luks(file, header, file_len).await
    {
        encrypt.luks = luks::describe(&bytes).ok();
    }
    let bitmaps = BitmapList::read(file, header, file_len).await.unwrap_or_default();
    (data.bitmaps, data.bitmaps_not_listed) = (bitmaps.bitmaps, bitmaps.bitmaps_not_listed);
    Ok(ImageInfo {
        filename: file.file().path().display().to_string(),
        format: "qcow2",
        virtual_size: header.geometry().virtual_size(),
        cluster_size: header.cluster_bits.size(),
        actual_size: actual_size(file),
        dirty_flag: header.incompatible.contains(Incompatible::DIRTY),
        encrypted: header.crypt_method != CryptMethod::None,
        full_backing_filename: backing.as_deref().map(|name| full_backing_name(file, name)),
        backing_filename: backing,
        backing_filename_format: header.backing_format().map(lossy),
        snapshots: snapshots.list,
        snapshots_not_listed: snapshots.left_out,
        format_specific: FormatSpecific { kind: "qcow2", data },
        unsupported: header.require_supported().err().map(|error| error.to_string()),
    })
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn actual_size(file: &FileView) -> Option<u64> {
    let fd = file.file().as_fd().try_clone_to_owned().ok()?;
    let metadata = File::from(fd).metadata().ok()?;
    Some(metadata.blocks().saturating_mul(512))
}

/// The most bytes of names that a list may hold. Names that are not UTF-8 take three times as much, and are written
/// out once more as JSON.
const NAMES_MAX_BYTES: usize = 8 << 20;

/// The first entries of one of the image's lists, as many as fit in memory.
#[derive(Debug)]
struct Listed<T> {
    list: Vec<T>,
    names_bytes: usize,
    left_out: u64,
}

impl<T> Default for Listed<T> {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            names_bytes: 0,
            left_out: 0,
        }
    }
}

impl<T> Listed<T> {
    /// Adds the result of `describe`, whose names have `names_bytes` in the image.
    fn push(&mut self, names_bytes: usize, describe: impl FnOnce() -> T) {
        self.names_bytes = self.names_bytes.saturating_add(names_bytes);
        if self.names_bytes > NAMES_MAX_BYTES {
            self.left_out += 1;
        } else {
            self.list.push(describe());
        }
    }
}

impl Listed<SnapshotInfo> {
    fn push_snapshot(&mut self, entry: &SnapshotEntry) {
        let names_bytes = start(&entry.id).len() + start(&entry.name).len();
        self.push(names_bytes, || SnapshotInfo::new(entry));
    }
}

fn is_none(count: &u64) -> bool {
    *count == 0
}

impl QcowInfo {
    fn new(header: &Header) -> Self {
        let v3 = header.version == Version::V3;
        let external = header.incompatible.contains(Incompatible::EXTERNAL_DATA);
        let has = |feature| v3.then(|| header.incompatible.contains(feature));
        Self {
            compat: header.version.compat(),
            compression_type: header.compression.name(),
            lazy_refcounts: v3.then(|| header.compatible.contains(Compatible::LAZY_REFCOUNTS)),
            refcount_bits: header.refcount_order.bits(),
            corrupt: has(Incompatible::CORRUPT),
            extended_l2: has(Incompatible::EXTENDED_L2),
            data_file: header.data_file().map(lossy),
            data_file_raw: external.then(|| header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA)),
            encrypt: match header.crypt_method {
                CryptMethod::None => None,
                method => Some(EncryptInfo {
                    format: method.name(),
                    luks: None,
                }),
            },
            bitmaps: Vec::new(),
            bitmaps_not_listed: 0,
        }
    }
}

/// Returns the part of a snapshot's name that QEMU keeps. A longer one is no name, and there may be thousands.
fn start(name: &[u8]) -> &[u8] {
    const NAME_MAX: usize = 255;
    name.get(..NAME_MAX).unwrap_or(name)
}

impl SnapshotInfo {
    fn new(entry: &SnapshotEntry) -> Self {
        const NANOSECONDS: u64 = 1_000_000_000;
        Self {
            id: lossy(start(&entry.id)),
            name: lossy(start(&entry.name)),
            vm_state_size: entry.vm_state_size(),
            date_sec: entry.date_seconds,
            date_nsec: entry.date_nanoseconds,
            vm_clock_sec: entry.guest_clock_ns / NANOSECONDS,
            vm_clock_nsec: entry.guest_clock_ns % NANOSECONDS,
            icount: entry.icount(),
        }
    }
}
