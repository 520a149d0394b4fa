//! The memory in which a client wants to know of the guest pages that this server writes, while it migrates its guest.
//!
//! [`DirtyLog`](crate::virtqueue::DirtyLog) says what is marked there. Spec: vhost-user, `VHOST_USER_SET_LOG_BASE`.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vhost::vhost_user::message::VhostUserLog;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{FileOffset, MmapRegion};

use super::memory::page_of;
use super::sigbus::FaultGuard;
use crate::virtqueue::DirtyLog;

/// The largest log, in bytes: that of twice the memory which a client may have at the highest addresses in use.
const BYTES_MAX: u64 = 1 << 32;

/// A log that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum LogMemoryError {
    #[error(
        "a log of {bytes} bytes at {offset} is not inside its file of {len} bytes, is empty, or has more than {BYTES_MAX}"
    )]
    Size { bytes: u64, offset: u64, len: u64 },
    #[error("cannot stat the file of the log")]
    Stat(#[source] io::Error),
    #[error("the log ends at guest address {end:#x}; the guest's memory ends at {needed:#x}")]
    Short { end: u64, needed: u64 },
    #[error("cannot map the log: {0}")]
    Map(MmapRegionError),
}

/// A mapped log.
#[derive(Debug)]
pub(super) struct LogMemory {
    // Dropped before the mapping. Queues, which hold that too, do not run any more then.
    guard: FaultGuard,
    log: Arc<DirtyLog>,
    bytes: u64,
}

impl LogMemory {
    /// Maps what a client shares: a log of guest memory that ends at `needed`.
    pub(super) fn map(shape: &VhostUserLog, file: File, needed: u64) -> Result<Self, LogMemoryError> {
        let (bytes, offset) = (shape.mmap_size, shape.mmap_offset);
        let stat = file.metadata().map_err(LogMemoryError::Stat)?;
        let len = stat.len();
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= len);
        let length = usize::try_from(bytes)
            .ok()
            .filter(|_| inside && (1..=BYTES_MAX).contains(&bytes));
        let length = length.ok_or(LogMemoryError::Size { bytes, offset, len })?;
        let page = page_of(&stat);
        let map =
            MmapRegion::from_file(FileOffset::new(file, offset), length).map_err(LogMemoryError::Map)?;
        let start = map.as_ptr() as usize;
        let log = Arc::new(DirtyLog::new(map));
        let guard = FaultGuard::new(start, length, page);
        let end = log.end();
        if end < needed {
            return Err(LogMemoryError::Short { end, needed });
        }
        Ok(Self { guard, log, bytes })
    }

    pub(super) fn log(&self) -> &Arc<DirtyLog> {
        &self.log
    }

    pub(super) fn guard(&self) -> &FaultGuard {
        &self.guard
    }

    /// Its shape and its file, for another server.
    pub(super) fn describe(&self) -> io::Result<(VhostUserLog, OwnedFd)> {
        let file = self.log.map().file_offset().ok_or(io::ErrorKind::NotFound)?;
        let shape = VhostUserLog::new(self.bytes, file.start());
        Ok((shape, file.file().try_clone()?.into()))
    }
}
