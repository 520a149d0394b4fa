//! Buffers of one worker that are used again and again: bounce buffers and tables.
//!
//! Invariant: the pool keeps a bounded number of buffers of a bounded size, so a burst of large requests leaves no
//! memory behind.

use std::cell::RefCell;

use super::aligned::{AlignedBuf, BUFFER_ALIGN};

/// Pool of one worker's buffers for reuse.
///
/// A buffer taken from it has arbitrary contents.
#[derive(Debug, Default)]
pub struct BufferPool {
    free: RefCell<Vec<AlignedBuf>>,
}

/// The largest number of buffers in a pool, none larger than [`POOLED_BYTES_MAX`].
const POOLED_BUFFERS_MAX: usize = 32;
/// The largest buffer a pool keeps.
const POOLED_BYTES_MAX: usize = 256 * 1024;

impl BufferPool {
    /// Returns a buffer of `len` bytes with arbitrary contents.
    #[must_use]
    pub fn take(&self, len: usize) -> AlignedBuf {
        let mut free = self.free.borrow_mut();
        let fits = |buf: &AlignedBuf| buf.capacity() >= len && buf.capacity() / 4 <= len.max(BUFFER_ALIGN);
        if let Some(index) = free.iter().rposition(fits) {
            let mut buf = free.swap_remove(index);
            buf.set_len(len);
            return buf;
        }
        drop(free);
        AlignedBuf::zeroed(len)
    }

    /// Returns a buffer to the pool.
    pub fn put(&self, buf: AlignedBuf) {
        let mut free = self.free.borrow_mut();
        if buf.capacity() <= POOLED_BYTES_MAX && free.len() < POOLED_BUFFERS_MAX {
            free.push(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_pool_reuses_a_buffer_that_fits() {
        let pool = BufferPool::default();
        let mut buf = pool.take(4096);
        buf[0] = 9;
        pool.put(buf);
        assert_eq!(pool.take(100)[0], 9);
        assert_eq!(pool.take(65536).len(), 65536);
    }
}
