//! The guest's bytes in the image file.
//!
//! What must stay true: no other module reads, writes, punches or reserves guest bytes. The header and tables go to the
//! file from the modules that own them.

use block::buffer::Piece;
use block::file::{FileView, IoFuture};
use block::ring::Pieces;
use block::{IoError, Request};
use smallvec::smallvec;

use crate::format::HostOffset;

/// One queue's way to the guest's bytes.
#[derive(Clone, Debug)]
pub(crate) struct GuestData {
    file: FileView,
}

impl GuestData {
    pub(super) fn new(file: FileView) -> Self {
        Self { file }
    }

    /// Hands over a whole read or write whose bytes begin at `at` in one piece: the file answers it, without a task or a
    /// copy. Gives it back if that cannot be.
    #[inline]
    pub(super) fn submit(&self, at: HostOffset, request: Request) -> Result<(), Request> {
        self.file.submit(at.bytes(), request)
    }

    /// Starts to read the bytes from `at` on into `piece`.
    pub(super) fn start_read(&self, at: HostOffset, piece: Piece) -> IoFuture {
        self.file.start_read(at.bytes(), smallvec![piece])
    }

    /// Starts to write `pieces` one behind the other, from `at` on.
    pub(super) fn start_write(&self, at: HostOffset, pieces: Pieces) -> IoFuture {
        self.file.start_write(at.bytes(), pieces)
    }

    /// Gives the space of `len` bytes from `at` on back to the host. Returns true if they read as zeros now.
    ///
    /// # Errors
    ///
    /// What the host answers; then the bytes are zeros or what they were.
    pub(super) async fn punch(&self, at: HostOffset, len: u64) -> Result<bool, IoError> {
        self.file.punch(at.bytes(), len).await
    }

    /// Has the host reserve space for `len` bytes from `at` on, which read as zeros.
    ///
    /// # Errors
    ///
    /// What the host answers.
    pub(super) async fn reserve(&self, at: HostOffset, len: u64) -> Result<(), IoError> {
        self.file.preallocate(at.bytes(), len).await
    }
}
