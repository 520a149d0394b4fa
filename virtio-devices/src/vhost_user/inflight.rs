//! The memory in which a client keeps the inflight records for the next server.
//!
//! It is created here at the client's request, kept by the client, and passed by it to each server that it connects to.
//! `virtqueue` defines the records. Spec: vhost-user,
//! `VHOST_USER_GET_INFLIGHT_FD` and `VHOST_USER_SET_INFLIGHT_FD`.
//!
//! Behind the regions of the queues is one word of our own, the guest's cache mode, because a client does not send it again
//! to a new server.
//!
//! ```text
//! regions of the queues (virtqueue::inflight) ... | "rdcache" and the mode, 8 bytes; zeros: no mode is known
//! ```
//!
//! Invariants: memory that could shrink, and then raise SIGBUS, is refused: it must be a memfd sealed against shrinking, as
//! ours are and those that QEMU creates.

#![expect(
    unsafe_code,
    reason = "memfd_create(2) and file seals have no safe wrapper at hand"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::blk::CacheMode;
use crate::virtqueue::InflightRegion;

/// The most entries a split queue has.
const ENTRIES_MAX: u16 = 1 << 15;
/// The size in bytes of the data behind the queues' regions: one word, in a cache line of its own.
const TAIL_BYTES: u64 = 64;

/// Inflight memory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum InflightMemoryError {
    #[error(
        "the client requested inflight memory for {queues} queues of {entries}; expected 1 to {queues_max} queues of 1 to \
         {ENTRIES_MAX}"
    )]
    Shape {
        queues: u16,
        entries: u16,
        queues_max: usize,
    },
    #[error(
        "inflight memory of {bytes} bytes at {offset} is not inside its file of {len}, or smaller than {needed}"
    )]
    Size {
        bytes: u64,
        offset: u64,
        len: u64,
        needed: u64,
    },
    #[error("inflight memory is not a memfd sealed against shrinking")]
    NotSealed,
    #[error("cannot {action} inflight memory")]
    Os {
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot map inflight memory: {0}")]
    Map(MmapRegionError),
}

/// Mapped inflight memory.
#[derive(Debug)]
pub(super) struct InflightMemory {
    map: Arc<MmapRegion>,
    /// The size of the client's file in bytes: at least what is mapped.
    bytes: u64,
    queues: u16,
    entries: u16,
    /// The offset of the word with the cache mode, if the client's memory has room for it.
    mode_at: Option<usize>,
}

fn needed(queues: u16, entries: u16, queues_max: usize) -> Result<u64, InflightMemoryError> {
    let fits = (1..=queues_max).contains(&usize::from(queues)) && (1..=ENTRIES_MAX).contains(&entries);
    if !fits {
        return Err(InflightMemoryError::Shape {
            queues,
            entries,
            queues_max,
        });
    }
    Ok(u64::from(queues) * InflightRegion::bytes(entries) as u64)
}

/// Makes inflight memory for what `asked` names, all zeros: no queue has used it. At most `queues_max`
/// queues.
pub(super) fn make(
    asked: &VhostUserInflight,
    queues_max: usize,
) -> Result<(VhostUserInflight, File), InflightMemoryError> {
    let (queues, entries) = (asked.num_queues, asked.queue_size);
    let bytes = needed(queues, entries, queues_max)? + TAIL_BYTES;
    let os = |action| move |source| InflightMemoryError::Os { action, source };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string that lives across the call.
    let fd = unsafe { libc::memfd_create(c"ringdisk-inflight".as_ptr(), flags) };
    if fd < 0 {
        return Err(os("make")(io::Error::last_os_error()));
    }
    // SAFETY: `fd` was just made and nobody else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes).map_err(os("size"))?;
    let seals = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: no memory is passed.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(os("seal")(io::Error::last_os_error()));
    }
    Ok((VhostUserInflight::new(bytes, 0, queues, entries), file))
}

impl InflightMemory {
    /// Maps what a client gave back: at most `queues_max` queues.
    pub(super) fn map(
        shape: &VhostUserInflight,
        file: File,
        queues_max: usize,
    ) -> Result<Self, InflightMemoryError> {
        let needed = needed(shape.num_queues, shape.queue_size, queues_max)?;
        // SAFETY: no memory is passed.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(InflightMemoryError::NotSealed);
        }
        let stat = file.metadata().map_err(|source| InflightMemoryError::Os {
            action: "inspect",
            source,
        })?;
        let (bytes, offset, len) = (shape.mmap_size, shape.mmap_offset, stat.len());
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= len);
        let size = || InflightMemoryError::Size {
            bytes,
            offset,
            len,
            needed,
        };
        if !inside || bytes < needed {
            return Err(size());
        }
        // Memory that another server made may end behind the queues.
        let has_tail = bytes >= needed + TAIL_BYTES;
        let mapped = if has_tail { needed + TAIL_BYTES } else { needed };
        let length = usize::try_from(mapped).map_err(|_| size())?;
        let map =
            MmapRegion::from_file(FileOffset::new(file, offset), length).map_err(InflightMemoryError::Map)?;
        Ok(Self {
            map: Arc::new(map),
            bytes,
            queues: shape.num_queues,
            entries: shape.queue_size,
            mode_at: has_tail.then(|| length - TAIL_BYTES as usize),
        })
    }

    /// The cache mode that a server noted. The client can write it too: a lie costs its own disk.
    pub(super) fn cache_mode(&self) -> CacheMode {
        let load = |at| {
            let slice = self.map.get_slice(at, size_of::<u64>()).ok()?;
            slice.load::<u64>(0, Ordering::Acquire).ok()
        };
        let word = self.mode_at.and_then(load);
        word.and_then(CacheMode::from_word).unwrap_or_default()
    }

    /// Notes the cache mode for the next server, where there is room.
    pub(super) fn note_cache_mode(&self, mode: CacheMode) {
        let Some(at) = self.mode_at else {
            return;
        };
        let slice = self.map.get_slice(at, size_of::<u64>());
        // The word was inside the mapping when the mapping was made.
        let stored = slice.and_then(|slice| slice.store(mode.to_word(), 0, Ordering::Release));
        debug_assert!(stored.is_ok(), "{stored:?}");
    }

    /// Its shape and its file, for another server.
    pub(super) fn describe(&self) -> io::Result<(VhostUserInflight, OwnedFd)> {
        let offset = self.map.file_offset().ok_or(io::ErrorKind::NotFound)?;
        let shape = VhostUserInflight::new(self.bytes, offset.start(), self.queues, self.entries);
        Ok((shape, offset.file().try_clone()?.into()))
    }

    /// The region of queue `index`, if there is one. With `recover`, what is marked there is believed.
    pub(super) fn region(&self, index: usize, recover: bool) -> Option<InflightRegion> {
        if index >= usize::from(self.queues) {
            return None;
        }
        InflightRegion::new(&self.map, index, self.entries, recover)
    }
}
