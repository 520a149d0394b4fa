//! Allocation of a file's space: reserving, punching and zeroing ranges, with a fallback where the host cannot.
//!
//! Invariant: a range is changed while no read-modify-write of its edge blocks is in progress.

use smallvec::smallvec;

use super::view::{FileView, to_usize};
use crate::buffer::Piece;
use crate::error::IoError;
use crate::sync::atomic::{AtomicBool, Ordering};

impl FileView {
    /// Reserves space for a range and makes the file at least that long; new bytes read as zeros.
    ///
    /// # Errors
    ///
    /// The host's error; [`IoError::is_no_space`] if there is no space.
    pub async fn preallocate(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.cx.ring().allocate(&self.handle, 0, offset, len).await
    }

    /// Gives the space of a range back to the host (`FALLOC_FL_PUNCH_HOLE`); the range reads as zeros. Returns
    /// `Ok(false)` if the host does not support it, and leaves the range unchanged.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub async fn punch(&self, offset: u64, len: u64) -> Result<bool, IoError> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        self.optional_allocate(&self.file.no_punch, mode, offset, len)
            .await
    }

    /// Makes a range read as zeros, by `FALLOC_FL_ZERO_RANGE` if the host supports it, else by writing zeros.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub async fn zero(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.with_space(async || self.zero_once(offset, len).await).await
    }

    async fn zero_once(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        if self
            .optional_allocate(&self.file.no_zero_range, mode, offset, len)
            .await?
        {
            return Ok(());
        }
        const PART: u64 = 1 << 20;
        let mut done = 0;
        while done < len {
            let part = PART.min(len - done);
            self.write_once(offset + done, smallvec![Piece::Zeros(to_usize(part)?)], false)
                .await?;
            done += part;
        }
        Ok(())
    }

    async fn optional_allocate(
        &self,
        unsupported: &AtomicBool,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Result<bool, IoError> {
        if len == 0 {
            return Ok(true);
        }
        if unsupported.load(Ordering::Relaxed) {
            return Ok(false);
        }
        // A concurrent read-modify-write of a block at the range's edge would restore the old bytes.
        let _lock = if self.file.alignment.offset > 512 {
            let (start, end) = self.widen(offset, len)?;
            Some(self.file.ranges.lock(start, end).await)
        } else {
            None
        };
        match self.cx.ring().allocate(&self.handle, mode, offset, len).await {
            Ok(()) => Ok(true),
            Err(error) if self.file.is_refusal(error) => {
                if error.errno() != libc::EINVAL {
                    unsupported.store(true, Ordering::Relaxed);
                }
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
