//! The state that the queues of one device share: the disk, the features and the configuration space.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use block::Disk;
use block::report::LogLimit;
use parking_lot::RwLock;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
    VIRTIO_BLK_ID_BYTES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::config::{self, CONFIG_BYTES, WRITEBACK_OFFSET};
use crate::stats::DiskStats;

/// The longest serial number, in bytes.
pub const SERIAL_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// A serial number of more than [`SERIAL_BYTES`] bytes.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("serial `{serial}` has {} bytes; at most {SERIAL_BYTES} fit", serial.len())]
pub struct SerialTooLong {
    /// The serial number.
    pub serial: String,
}

/// A driver wrote to the configuration space where it may not.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ConfigWriteError {
    /// Only one byte can be written, and only if its feature was negotiated.
    #[error("{len} bytes at {offset} of the configuration space are read-only")]
    ReadOnly {
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        len: usize,
    },
    /// The cache mode is 0 or 1.
    #[error("writeback is {value}; expected 0 or 1")]
    Writeback {
        /// The value written.
        value: u8,
    },
}

/// The cache mode that a driver assumes. A `u8`, to be stored.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(u8)]
pub(crate) enum CacheMode {
    /// The driver may have learned it from a server that is gone. Served as writethrough, which no driver
    /// loses data by.
    #[default]
    Unknown = 0,
    /// A write is durable when it is answered.
    Writethrough = 1,
    /// A write is durable after the next flush.
    Writeback = 2,
}

impl CacheMode {
    /// The mode with this number.
    pub(crate) fn from_number(number: u8) -> Self {
        match number {
            1 => Self::Writethrough,
            2 => Self::Writeback,
            _ => Self::Unknown,
        }
    }

    /// The word by which one server tells the next: a mark, and the mode in the lowest byte.
    pub(crate) fn to_word(self) -> u64 {
        MODE_MARK | self as u64
    }

    /// The mode of such a word; `None` if it is none.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        (word & !0xff == MODE_MARK).then(|| Self::from_number(word.to_le_bytes()[0]))
    }
}

/// The upper seven bytes of a word with a cache mode.
const MODE_MARK: u64 = u64::from_be_bytes(*b"rdcache\0");

/// The properties with which a device presents a disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BlockDeviceConfig<'a> {
    /// The number of queues that it offers.
    pub num_queues: u16,
    /// The entries a queue is expected to have; says how many segments a request may have.
    pub queue_size: u16,
    /// The serial number that the guest reads: at most [`SERIAL_BYTES`] bytes.
    pub serial: &'a str,
}

/// One virtio-blk device.
pub struct BlockDevice {
    /// Exchanged only while no queue runs.
    disk: RwLock<Arc<dyn Disk>>,
    num_queues: u16,
    queue_size: u16,
    serial: [u8; SERIAL_BYTES],
    /// The number of a [`CacheMode`].
    cache_mode: AtomicU8,
    log_limit: Arc<LogLimit>,
    stats: Arc<DiskStats>,
}

impl fmt::Debug for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockDevice")
            .field("disk", &self.disk())
            .field("num_queues", &self.num_queues)
            .finish_non_exhaustive()
    }
}

/// Returns true if `features` has bit number `bit`.
pub(super) fn has(features: u64, bit: u32) -> bool {
    features & 1 << bit != 0
}

impl BlockDevice {
    /// A device that shows `disk`.
    ///
    /// # Errors
    ///
    /// [`SerialTooLong`].
    pub fn new(disk: Arc<dyn Disk>, config: &BlockDeviceConfig<'_>) -> Result<Self, SerialTooLong> {
        let mut serial = [0; SERIAL_BYTES];
        let bytes = config.serial.as_bytes();
        let place = serial.get_mut(..bytes.len()).ok_or_else(|| SerialTooLong {
            serial: config.serial.to_owned(),
        })?;
        place.copy_from_slice(bytes);
        Ok(Self {
            disk: RwLock::new(disk),
            num_queues: config.num_queues,
            queue_size: config.queue_size,
            serial,
            cache_mode: AtomicU8::new(CacheMode::Writeback as u8),
            log_limit: Arc::default(),
            stats: Arc::default(),
        })
    }

    /// Shows another disk from now on: the same one, opened anew. No queue may run.
    pub(crate) fn set_disk(&self, disk: Arc<dyn Disk>) {
        // The old one may be dropped here, and closes files then.
        let old = std::mem::replace(&mut *self.disk.write(), disk);
        drop(old);
    }

    /// The same device, whose queues go on with the statistics of an earlier device of the same disk.
    #[must_use]
    pub fn with_stats(self, stats: Arc<DiskStats>) -> Self {
        Self { stats, ..self }
    }

    /// Returns the statistics of its queues. A queue writes them if its configuration
    /// ([`BlockQueueConfig::stats`](super::BlockQueueConfig::stats)) says so.
    #[must_use]
    pub fn stats(&self) -> &Arc<DiskStats> {
        &self.stats
    }

    /// The cache mode that the driver chose or was shown.
    pub(crate) fn cache_mode(&self) -> CacheMode {
        CacheMode::from_number(self.cache_mode.load(Ordering::SeqCst))
    }

    /// Changes the cache mode, as a driver's choice that is known from elsewhere. Returns the mode before.
    pub(crate) fn set_cache_mode(&self, mode: CacheMode) -> CacheMode {
        CacheMode::from_number(self.cache_mode.swap(mode as u8, Ordering::SeqCst))
    }

    /// Returns the rate limiter of log messages about the client's and the guest's mistakes.
    pub(crate) fn log_limit(&self) -> &Arc<LogLimit> {
        &self.log_limit
    }

    /// The disk that it shows now.
    #[must_use]
    pub fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.disk.read())
    }

    pub(super) fn serial(&self) -> &[u8; SERIAL_BYTES] {
        &self.serial
    }

    /// The feature bits offered.
    #[must_use]
    pub fn features(&self) -> u64 {
        let info = self.disk().info();
        let always = [
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_CONFIG_WCE,
        ];
        let sometimes = [
            (VIRTIO_BLK_F_MQ, self.num_queues > 1),
            (VIRTIO_BLK_F_RO, info.read_only),
            (VIRTIO_BLK_F_DISCARD, info.discard && !info.read_only),
            (VIRTIO_BLK_F_WRITE_ZEROES, info.write_zeroes && !info.read_only),
        ];
        let offered = sometimes
            .into_iter()
            .filter_map(|(bit, offered)| offered.then_some(bit));
        always
            .into_iter()
            .chain(offered)
            .fold(0, |set, bit| set | 1 << bit)
    }

    /// The configuration space from `offset` on, as a driver that negotiated `features` finds it; zeros past its end. A
    /// driver that is shown the cache mode knows it from then on: an unknown one becomes writeback. One that may choose
    /// the mode and cannot flush is shown writethrough (virtio 1.2, 5.2.5.2); none may look before it has negotiated.
    #[must_use]
    pub fn read_config(&self, offset: u64, len: usize, features: u64) -> Vec<u8> {
        let shown = WRITEBACK_OFFSET_U64
            .checked_sub(offset)
            .is_some_and(|before| before < len as u64);
        if shown {
            let (unknown, writeback) = (CacheMode::Unknown as u8, CacheMode::Writeback as u8);
            // Fails if the mode is known, which then stays.
            self.cache_mode
                .compare_exchange(unknown, writeback, Ordering::SeqCst, Ordering::SeqCst)
                .ok();
        }
        let cannot_flush = has(features, VIRTIO_BLK_F_CONFIG_WCE) && !has(features, VIRTIO_BLK_F_FLUSH);
        let writeback = self.cache_mode() == CacheMode::Writeback && !cannot_flush;
        let bytes = config::layout(&self.disk().info(), self.num_queues, self.queue_size, writeback);
        let offset = usize::try_from(offset).unwrap_or(CONFIG_BYTES).min(CONFIG_BYTES);
        let mut out: Vec<u8> = bytes[offset..].iter().copied().take(len).collect();
        out.resize(len, 0);
        out
    }

    /// Writes to the configuration space. Returns whether the cache mode went from writeback to
    /// writethrough, so that what was written before has yet to be flushed.
    ///
    /// # Errors
    ///
    /// [`ConfigWriteError`] for anything but the cache mode, or if `features` (the negotiated ones) do
    /// not let the driver choose it.
    pub fn write_config(&self, offset: u64, bytes: &[u8], features: u64) -> Result<bool, ConfigWriteError> {
        let (WRITEBACK_OFFSET_U64, [value]) = (offset, bytes) else {
            return Err(ConfigWriteError::ReadOnly {
                offset,
                len: bytes.len(),
            });
        };
        if !has(features, VIRTIO_BLK_F_CONFIG_WCE) {
            return Err(ConfigWriteError::ReadOnly { offset, len: 1 });
        }
        let value = *value;
        if value > 1 {
            return Err(ConfigWriteError::Writeback { value });
        }
        let chosen = match value {
            0 => CacheMode::Writethrough,
            _ => CacheMode::Writeback,
        };
        let before = self.set_cache_mode(chosen);
        Ok(before == CacheMode::Writeback && chosen == CacheMode::Writethrough)
    }

    /// Resets the device to what a new driver expects, one that reads the configuration from this device.
    pub fn reset(&self) {
        self.set_cache_mode(CacheMode::Writeback);
    }

    /// Returns true if writes are made durable one by one only because the mode of a driver that negotiated
    /// `features` is not known.
    pub(crate) fn is_slowed_by_unknown_mode(&self, features: u64) -> bool {
        let chooses = has(features, VIRTIO_BLK_F_CONFIG_WCE) && has(features, VIRTIO_BLK_F_FLUSH);
        chooses && self.cache_mode() == CacheMode::Unknown && !self.disk().info().read_only
    }

    /// Returns true if a driver that negotiated `features` takes a write that was answered for durable. A driver
    /// that cannot flush does, whatever mode it chose (virtio 1.2, 5.2.5.2).
    #[inline]
    pub(crate) fn is_writethrough(&self, features: u64) -> bool {
        let writeback = CacheMode::Writeback as u8;
        let chosen =
            has(features, VIRTIO_BLK_F_CONFIG_WCE) && self.cache_mode.load(Ordering::Relaxed) != writeback;
        chosen || !has(features, VIRTIO_BLK_F_FLUSH)
    }
}

const WRITEBACK_OFFSET_U64: u64 = WRITEBACK_OFFSET as u64;
