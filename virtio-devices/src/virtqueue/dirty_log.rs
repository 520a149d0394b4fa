//! The log of the guest pages that this process has written, for a client that migrates its guest.
//!
//! The client copies the guest's memory to another host while the guest runs, and again what was written meanwhile. It sees its own
//! writes; of ours it knows by this log, which it shares with us: one bit for each 4 KiB of guest addresses, that of page `n` in bit
//! `n % 8` of byte `n / 8`. It clears a bit and then copies the page. Spec: vhost-user, "Migration".
//!
//! Invariant: a page is marked after it was written. Marked before, it could be copied between the mark and the write, and the
//! guest would continue without what was written.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use vm_memory::{MmapRegion, VolatileMemory};

/// The bytes of a page of the log, whatever the host's pages have.
const PAGE_BYTES: u64 = 4096;

/// A shared log of written guest pages.
pub struct DirtyLog {
    map: MmapRegion,
}

impl fmt::Debug for DirtyLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DirtyLog(up to {:#x})", self.end())
    }
}

impl DirtyLog {
    /// A log in shared memory.
    #[must_use]
    pub fn new(map: MmapRegion) -> Self {
        Self { map }
    }

    /// Returns the first guest address that it has no bit for.
    #[must_use]
    pub fn end(&self) -> u64 {
        (self.map.len() as u64).saturating_mul(8 * PAGE_BYTES)
    }

    /// The memory that it is in.
    pub(crate) fn map(&self) -> &MmapRegion {
        &self.map
    }

    /// Marks the pages of `len` bytes from guest address `address` on, which were written. Pages past the [`end`](Self::end) have no
    /// bit, and are passed over: whoever starts a queue makes sure that there are none.
    pub fn mark(&self, address: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|len| address.saturating_add(len)) else {
            return;
        };
        let (mut page, last) = (address / PAGE_BYTES, last / PAGE_BYTES);
        while page <= last {
            // All pages of one byte at once.
            let (byte, to) = (page / 8, last.min(page | 7));
            let bits = (0xff_u8 << (page % 8)) & (0xff >> (7 - to % 8));
            let index = usize::try_from(byte).unwrap_or(usize::MAX);
            let Ok(word) = self.map.get_atomic_ref::<AtomicU8>(index) else {
                debug_assert!(false, "page {page} is not in {self:?}");
                return;
            };
            word.fetch_or(bits, Ordering::SeqCst);
            page = to + 1;
        }
    }
}

/// The log, as one queue uses it.
#[derive(Clone, Debug)]
pub struct QueueLog {
    /// The log of the guest's memory.
    pub log: Arc<DirtyLog>,
    /// The guest address by which the log knows the used ring.
    pub used_ring: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    fn marked(pages: u64, marks: &[(u64, u64)]) -> Vec<u64> {
        let log = DirtyLog::new(MmapRegion::new(usize::try_from(pages / 8).unwrap()).unwrap());
        assert_eq!(log.end(), pages * PAGE_BYTES);
        for &(address, len) in marks {
            log.mark(address, len);
        }
        let mut bytes = vec![0_u8; usize::try_from(pages / 8).unwrap()];
        let slice = log.map.as_volatile_slice();
        slice.read_slice(&mut bytes, 0).unwrap();
        let is_marked = |page: &u64| bytes[(page / 8) as usize] & 1 << (page % 8) != 0;
        (0..pages).filter(is_marked).collect()
    }

    #[test]
    fn mark_marks_each_touched_page_and_no_other() {
        assert!(marked(64, &[]).is_empty());
        assert!(marked(64, &[(0, 0), (8192, 0)]).is_empty());
        assert_eq!(marked(64, &[(0, 1)]), [0]);
        assert_eq!(marked(64, &[(4095, 1), (3 * 4096 - 1, 2)]), [0, 2, 3]);
        assert_eq!(marked(64, &[(63 * 4096, 4096)]), [63]);
        let all: Vec<u64> = (0..64).collect();
        assert_eq!(marked(64, &[(0, 64 * 4096)]), all);
        for first in 0..24 {
            for count in 1..=24 {
                let pages: Vec<u64> = (first..first + count).collect();
                let range = (first * 4096 + 511, count * 4096 - 511);
                assert_eq!(marked(64, &[range]), pages, "{first} {count}");
            }
        }
    }
}
