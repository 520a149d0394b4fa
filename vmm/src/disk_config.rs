//! The parser of `--disk key=value,…`.
//!
//! The keys and their meaning are the ones users of other virtual machine monitors know, plus a few
//! of ours; [`KEYS`] lists them all, and the help text is made from it. Parsing looks at the text
//! alone and opens nothing.
//!
//! Invariants: whatever is not understood is refused and named. A key that exists but has no meaning for the command
//! at hand is refused too, with where it belongs, because an option that is silently ignored is a promise broken
//! later.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::throttle::RateLimits;
use block::worker::WorkerConfig;
use qcow::{BitmapStorage, SnapshotSelector};

use crate::key_value;
use crate::secret_file::SecretFile;
use crate::size;

mod differences;
mod error;
mod keys;
pub(crate) mod rate;
mod values;

pub(crate) use differences::{LIMIT_KEYS, OPENING_KEYS};
pub use error::DiskConfigError;
pub use keys::{KEYS, Key, Scope, keys_help, machine_keys_help};
pub use rate::{GroupMember, RateLimitGroupError, RateLimitGroups};
pub(crate) use values::cpu_list;
use values::{affinity, non_empty, number, on_off, snapshot};

/// The format of an image.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ImageType {
    /// The file is the disk, byte by byte.
    Raw,
    /// A QCOW2 image.
    Qcow2,
}

impl fmt::Display for ImageType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        })
    }
}

/// The policy for writes when the host is out of space.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum WriteErrors {
    /// It fails.
    #[default]
    Report,
    /// It waits until there is space; every other error still fails it.
    Wait,
}

/// A temporary overlay: it takes all writes, and ends with the process.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct TemporaryOverlay {
    /// The directory whose file system holds it; if absent, the environment's for large temporary files.
    pub directory: Option<PathBuf>,
}

impl TemporaryOverlay {
    /// Returns the directory whose file system holds it: as given, else `$TMPDIR`, else `/var/tmp`.
    #[must_use]
    pub fn directory(&self) -> PathBuf {
        let given = self.directory.clone();
        // `/tmp` may be memory; an overlay may become as large as its disk.
        let of_environment = || std::env::var_os("TMPDIR").filter(|path| !path.is_empty());
        given.unwrap_or_else(|| of_environment().map_or_else(|| "/var/tmp".into(), PathBuf::from))
    }
}

/// The host CPUs one queue's worker may run on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct QueueAffinity {
    /// The queue, counted from zero.
    pub queue: u16,
    /// The CPUs by the kernel's numbers; never empty.
    pub cpus: Vec<usize>,
}

/// One `--disk`, checked. [`DiskConfig::parse`] makes it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DiskConfig {
    /// The image file; or where its backend listens, if it is another program's.
    pub path: PathBuf,
    /// True if another program serves the disk, a vhost-user-blk backend, and this one shows it to a guest.
    pub vhost_user: bool,
    /// The image's format. `None`: QCOW2 if the file starts with its magic, refused otherwise,
    /// because what a guest wrote into a raw disk must not choose its format.
    pub image_type: Option<ImageType>,
    /// True if the guest may only read.
    pub readonly: bool,
    /// The internal snapshot to show in place of the disk; without an overlay the guest may only read.
    pub snapshot: Option<SnapshotSelector>,
    /// The overlay that takes the writes; then the image is only read.
    pub overlay: Option<TemporaryOverlay>,
    /// The file with the secret that opens the image, if it is encrypted.
    pub secret_file: Option<SecretFile>,
    /// True if the page cache is bypassed (`O_DIRECT`).
    pub direct: bool,
    /// The number of queues of the device, 1 to [`MAX_QUEUES`]. Each is served by a worker of its own.
    pub num_queues: u16,
    /// Entries of each queue: a power of two, 4 to 32,768.
    pub queue_size: u16,
    /// The name of the disk in logs and messages; the path if absent.
    pub id: Option<String>,
    /// The serial number that the guest reads: at most 20 bytes of ASCII.
    pub serial: Option<String>,
    /// The CPUs of the queues' workers; queues without an entry run on any CPU. At most one entry per queue.
    pub queue_affinity: Vec<QueueAffinity>,
    /// True if the files an image names as its backing may be opened.
    pub backing_files: bool,
    /// True if the files that images name for their data may be opened.
    pub data_file: bool,
    /// True if discarded space is given back to the host's file system.
    pub sparse: bool,
    /// The range of the image lock.
    pub lock_granularity: block::lock::LockGranularity,
    /// Memory for the cache of mapping tables, in bytes; sized by the disk if absent.
    pub l2_cache_bytes: Option<u64>,
    /// True if discarded clusters stay reserved in the image, so that it does not fragment.
    pub discard_no_unref: bool,
    /// The policy for writes when the host is out of space.
    pub werror: WriteErrors,
    /// The time at which persistent bitmaps are stored.
    pub bitmaps: BitmapStorage,
    /// The longest time that an idle worker polls before it sleeps, in microseconds; adaptive if absent.
    pub poll_us: Option<u32>,
    /// Its place in a machine of `ringdisk run`.
    pub pci: PciAddress,
    /// The disk's own rate limits.
    pub rate_limits: RateLimits,
    /// The group whose rate limits it shares; then it has none of its own.
    pub rate_limit_group: Option<GroupMember>,
}

/// The PCI address of a disk, as far as it was given. A machine has one PCI segment and no IOMMU.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PciAddress {
    /// The slot, 1 to 31; the lowest free one if absent.
    pub device_id: Option<u8>,
    /// True if `pci_segment=0` was given.
    pub segment: bool,
    /// True if an IOMMU was declined.
    pub no_iommu: bool,
}

/// The most queues a disk can have: what a vhost-user message can number.
pub const MAX_QUEUES: u16 = 256;
/// The longest serial number, in bytes, that virtio-blk can carry.
pub const MAX_SERIAL_BYTES: usize = 20;
/// The longest time, in microseconds, for which an idle worker may be configured to poll.
pub const MAX_POLL_US: u32 = 10_000;
/// The smallest table cache that can be asked for, in bytes.
pub const MIN_L2_CACHE_BYTES: u64 = 64 << 10;

/// The smallest bound for the tables of all images together, in bytes.
const MIN_TABLE_CACHE_BYTES: u64 = 1 << 20;

/// Parses a bound for the tables of all images together (`--table-cache`).
///
/// # Errors
///
/// What is wrong with it, and what would be right.
pub fn table_cache_bytes(text: &str) -> Result<u64, String> {
    let bytes = size::parse_bytes(text).ok();
    let bytes = bytes.filter(|&bytes| bytes >= MIN_TABLE_CACHE_BYTES);
    bytes.ok_or_else(|| format!("`{text}` is no size of a table cache; expected 1M or more"))
}
impl DiskConfig {
    /// A disk at `path` with every option at its default.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            vhost_user: false,
            image_type: None,
            readonly: false,
            snapshot: None,
            overlay: None,
            secret_file: None,
            direct: false,
            num_queues: 1,
            queue_size: 128,
            id: None,
            serial: None,
            queue_affinity: Vec::new(),
            backing_files: false,
            data_file: false,
            sparse: true,
            lock_granularity: block::lock::LockGranularity::ByteRange,
            l2_cache_bytes: None,
            discard_no_unref: false,
            werror: WriteErrors::Report,
            bitmaps: BitmapStorage::Close,
            poll_us: None,
            pci: PciAddress::default(),
            rate_limits: RateLimits::default(),
            rate_limit_group: None,
        }
    }

    /// Parses the value of one `--disk`: `key=value` items separated by commas.
    ///
    /// A value in double quotes may contain commas; one that starts with `[` reaches to the matching `]`.
    ///
    /// # Errors
    ///
    /// [`DiskConfigError`], naming the key and what it takes.
    pub fn parse(text: &str) -> Result<Self, DiskConfigError> {
        Self::from_items(key_value::items(text).map_err(DiskConfigError::Syntax)?)
    }

    /// Parses like [`DiskConfig::parse`], from keys and values that are separated already.
    ///
    /// # Errors
    ///
    /// [`DiskConfigError`], naming the key and what it takes.
    pub fn from_items<'a>(
        items: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, DiskConfigError> {
        let mut config = Self::new(PathBuf::new());
        let mut seen: Vec<&'static str> = Vec::new();
        let mut limits = rate::LimitKeys::default();
        let mut socket = None;
        for (name, value) in items {
            let key = keys::find(name)?;
            if let Scope::Elsewhere(place) = key.scope {
                return Err(DiskConfigError::NotHere { key: key.name, place });
            }
            if seen.contains(&key.name) {
                return Err(DiskConfigError::Duplicate { key: key.name });
            }
            seen.push(key.name);
            let taken = match limits.try_set(key.name, value) {
                None if key.name == "socket" => non_empty(value).map(|value| socket = Some(value.into())),
                None => config.try_set(key.name, value),
                Some(taken) => taken,
            };
            taken.ok_or_else(|| DiskConfigError::Value {
                key: key.name,
                value: value.to_owned(),
                takes: key.takes,
            })?;
        }
        config.rate_limits = limits.build().map_err(|(key, missing)| {
            let takes = keys::find(missing).map_or("", |key| key.takes);
            DiskConfigError::Incomplete { key, missing, takes }
        })?;
        if config.vhost_user || socket.is_some() {
            config.path = backend(config.vhost_user, socket, &seen)?;
        } else if !seen.contains(&"path") {
            return Err(DiskConfigError::NoPath {
                takes: keys::find("path")?.takes,
            });
        }
        if config.overlay.is_some() && !seen.contains(&"overlay") {
            return Err(DiskConfigError::Incomplete {
                key: "overlay_dir",
                missing: "overlay",
                takes: keys::find("overlay")?.takes,
            });
        }
        if config.snapshot.is_some() && config.overlay.is_none() {
            if seen.contains(&"readonly") && !config.readonly {
                return Err(DiskConfigError::Contradiction {
                    key: "snapshot",
                    other: "readonly=off".to_owned(),
                    why: "a snapshot can only be read; apply it to the disk with `ringdisk image snapshot apply` to write, or \
                          write to a throw-away copy with overlay=temporary",
                });
            }
            config.readonly = true;
        }
        config.check_contradictions()?;
        Ok(config)
    }

    /// Refuses a disk that another program serves, or that has a place in a machine, where this program is to serve it
    /// to others.
    ///
    /// # Errors
    ///
    /// [`DiskConfigError::NotHere`].
    pub fn is_own(&self) -> Result<(), DiskConfigError> {
        if self.vhost_user {
            return Err(DiskConfigError::NotHere {
                key: "vhost_user",
                place: keys::CLIENT,
            });
        }
        let given = [
            ("pci_device_id", self.pci.device_id.is_some()),
            ("pci_segment", self.pci.segment),
            ("iommu", self.pci.no_iommu),
        ];
        if let Some((key, _)) = given.iter().find(|(_, given)| *given) {
            let place = keys::OUR_VM;
            return Err(DiskConfigError::NotHere { key, place });
        }
        Ok(())
    }

    /// Returns true if the guest's writes go to the image itself.
    #[must_use]
    pub fn writes_image(&self) -> bool {
        !self.readonly && self.overlay.is_none()
    }

    /// Has its relative paths start in `directory`.
    pub(crate) fn start_in(&mut self, directory: &Path) {
        self.path = directory.join(&self.path);
        let secret_file = self.secret_file.take();
        self.secret_file = secret_file.map(|file| file.in_directory(directory));
    }

    /// Refuses a temporary overlay beside an option by which another process would continue with the disk.
    ///
    /// # Errors
    ///
    /// [`DiskConfigError::Contradiction`], naming `option`.
    pub fn may_outlive_process(&self, option: &str) -> Result<(), DiskConfigError> {
        if self.overlay.is_none() {
            return Ok(());
        }
        Err(DiskConfigError::Contradiction {
            key: "overlay=temporary",
            other: option.to_owned(),
            why: "the overlay ends with its process, and no other one can continue with it; leave one of the two out \
                  (`ublk add`: pass --recovery off)",
        })
    }

    /// The name to use in logs: the id, or else the path.
    #[must_use]
    pub fn name(&self) -> String {
        self.id.clone().unwrap_or_else(|| self.path.display().to_string())
    }

    /// The CPUs of `queue`, if its worker is pinned.
    #[must_use]
    pub fn cpus_of(&self, queue: u16) -> Option<&[usize]> {
        let entry = self.queue_affinity.iter().find(|entry| entry.queue == queue)?;
        Some(&entry.cpus)
    }

    /// Returns the settings of the worker that serves `queue`: those of `base`, with the CPUs, the polling and the depth that
    /// this configuration gives.
    #[must_use]
    pub fn worker(&self, queue: u16, base: &WorkerConfig) -> WorkerConfig {
        WorkerConfig {
            // The kernel keeps 15 bytes of a thread's name.
            name: format!("queue {queue}"),
            // Requests beyond this wait for a free slot.
            depth: u32::from(self.queue_size).clamp(128, 1024) * 2,
            cpus: self.cpus_of(queue).unwrap_or_default().to_vec(),
            poll_max: self
                .poll_us
                .map_or(base.poll_max, |us| Duration::from_micros(us.into())),
            ..base.clone()
        }
    }

    /// Returns the settings of the workers of all queues, in order.
    #[must_use]
    pub fn workers(&self, base: &WorkerConfig) -> Vec<WorkerConfig> {
        (0..self.num_queues)
            .map(|queue| self.worker(queue, base))
            .collect()
    }

    /// Stores one value; `None` if the key does not take it.
    fn try_set(&mut self, key: &str, value: &str) -> Option<()> {
        use block::lock::LockGranularity;
        match key {
            "path" => self.path = non_empty(value)?.into(),
            "image_type" => {
                self.image_type = Some(match value {
                    "raw" => ImageType::Raw,
                    "qcow2" => ImageType::Qcow2,
                    _ => return None,
                });
            }
            "vhost_user" => self.vhost_user = on_off(value)?,
            "readonly" => self.readonly = on_off(value)?,
            "snapshot" => self.snapshot = Some(snapshot(value)?),
            "overlay" => {
                (value == "temporary").then_some(())?;
                self.overlay.get_or_insert_default();
            }
            "overlay_dir" => {
                self.overlay.get_or_insert_default().directory = Some(non_empty(value)?.into());
            }
            "secret_file" => self.secret_file = Some(SecretFile::new(non_empty(value)?.into())),
            "direct" => self.direct = on_off(value)?,
            "num_queues" => self.num_queues = number(value, 1, MAX_QUEUES.into())?.try_into().ok()?,
            "queue_size" => {
                let size = number(value, 4, 32_768)?;
                self.queue_size = size.is_power_of_two().then_some(size)?.try_into().ok()?;
            }
            "id" => self.id = Some(non_empty(value)?.to_owned()),
            "serial" => {
                let fits =
                    value.len() <= MAX_SERIAL_BYTES && value.bytes().all(|byte| matches!(byte, 0x20..0x7f));
                self.serial = Some(fits.then_some(value).and_then(non_empty)?.to_owned());
            }
            "queue_affinity" => self.queue_affinity = affinity(value)?,
            "backing_files" => self.backing_files = on_off(value)?,
            "data_file" => self.data_file = on_off(value)?,
            "sparse" => self.sparse = on_off(value)?,
            "lock_granularity" => {
                self.lock_granularity = match value {
                    "byte-range" => LockGranularity::ByteRange,
                    "full" => LockGranularity::Full,
                    _ => return None,
                };
            }
            "l2_cache" => {
                let bytes = crate::size::parse_bytes(value).ok()?;
                self.l2_cache_bytes = Some((bytes >= MIN_L2_CACHE_BYTES).then_some(bytes)?);
            }
            "discard_no_unref" => self.discard_no_unref = on_off(value)?,
            "werror" => {
                self.werror = match value {
                    "report" => WriteErrors::Report,
                    "wait" => WriteErrors::Wait,
                    _ => return None,
                };
            }
            "bitmaps" => {
                self.bitmaps = match value {
                    "close" => BitmapStorage::Close,
                    "durable" => BitmapStorage::Durable,
                    _ => return None,
                };
            }
            "pci_device_id" => self.pci.device_id = Some(number(value, 1, 31)?.try_into().ok()?),
            "pci_segment" => self.pci.segment = number(value, 0, 0).map(|_| true)?,
            "iommu" => self.pci.no_iommu = (!on_off(value)?).then_some(true)?,
            "poll_us" => self.poll_us = Some(number(value, 0, MAX_POLL_US)?),
            "rate_limit_group" => self.rate_limit_group = Some(GroupMember::of(non_empty(value)?)),
            _ => return None,
        }
        Some(())
    }

    fn check_contradictions(&self) -> Result<(), DiskConfigError> {
        let contradiction = |key, other: String, why| Err(DiskConfigError::Contradiction { key, other, why });
        if self.image_type == Some(ImageType::Raw) {
            let raw = || "image_type=raw".to_owned();
            if self.snapshot.is_some() {
                return contradiction("snapshot", raw(), "a raw disk has no snapshots");
            }
            if self.secret_file.is_some() {
                return contradiction("secret_file", raw(), "a raw disk is not encrypted");
            }
            if self.backing_files {
                return contradiction("backing_files=on", raw(), "a raw disk has no backing file");
            }
            if self.data_file {
                return contradiction("data_file=on", raw(), "a raw disk is its own data");
            }
            // What follows is said of the overlay, if there is one.
            let bare = self.overlay.is_none();
            if bare && self.l2_cache_bytes.is_some() {
                return contradiction("l2_cache", raw(), "a raw disk has no tables to cache");
            }
            if bare && self.discard_no_unref {
                return contradiction("discard_no_unref=on", raw(), "a raw disk has no clusters to keep");
            }
            if self.bitmaps == BitmapStorage::Durable {
                return contradiction("bitmaps=durable", raw(), "a raw disk has no bitmaps");
            }
        }
        if let (Some(group), false) = (&self.rate_limit_group, self.rate_limits.is_empty()) {
            let own = if self.rate_limits.bandwidth.is_some() {
                "bw_size"
            } else {
                "ops_size"
            };
            let other = format!("rate_limit_group={}", group.id());
            return contradiction(own, other, "a disk has either its own limits or those of a group");
        }
        if self.secret_file.is_some() && self.overlay.is_some() {
            return contradiction(
                "secret_file",
                "overlay=temporary".to_owned(),
                "the overlay would hold what the guest writes unencrypted",
            );
        }
        if self.readonly && self.overlay.is_some() {
            return contradiction(
                "overlay=temporary",
                "readonly=on".to_owned(),
                "the overlay is there to be written, and the image is only read anyway",
            );
        }
        if self.bitmaps == BitmapStorage::Durable {
            let why = "bitmaps record what is written to their image";
            if self.readonly {
                return contradiction("bitmaps=durable", "readonly=on".to_owned(), why);
            }
            if self.overlay.is_some() {
                return contradiction("bitmaps=durable", "overlay=temporary".to_owned(), why);
            }
        }
        if self.readonly && self.werror == WriteErrors::Wait {
            return contradiction(
                "werror=wait",
                "readonly=on".to_owned(),
                "a read-only disk is never written",
            );
        }
        if self
            .queue_affinity
            .iter()
            .any(|entry| entry.queue >= self.num_queues)
        {
            let other = format!("num_queues={}", self.num_queues);
            return contradiction("queue_affinity", other, "it names a queue the disk does not have");
        }
        Ok(())
    }
}

/// Returns the socket of the backend, for a disk with no keys but those that such a disk may have.
fn backend(
    vhost_user: bool,
    socket: Option<PathBuf>,
    seen: &[&'static str],
) -> Result<PathBuf, DiskConfigError> {
    let without = |key, missing| {
        let takes = keys::find(missing)?.takes;
        Err(DiskConfigError::Incomplete { key, missing, takes })
    };
    if !vhost_user {
        return without("socket", "vhost_user");
    }
    let own = [
        "vhost_user",
        "socket",
        "id",
        "num_queues",
        "queue_size",
        "pci_device_id",
        "pci_segment",
        "iommu",
    ];
    match seen.iter().find(|key| !own.contains(key)) {
        Some(key) => Err(DiskConfigError::Contradiction {
            key,
            other: "vhost_user=on".to_owned(),
            why: "`vhost_user=on` is for `ringdisk run` only: another program serves the disk, so set this key there",
        }),
        None => socket.map_or_else(|| without("vhost_user", "socket"), Ok),
    }
}

#[cfg(test)]
mod tests;
