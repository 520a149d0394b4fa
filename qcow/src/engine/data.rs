//! The guest's bytes, in the image file or in a data file of their own ([why](../../../docs/decisions/data-files.md)).
//!
//! Invariant: no other module reads, writes, punches or reserves guest bytes. The header and tables go to the file
//! from the modules that own them. Only the index of a chain also reads them, from an image that nothing changes
//! (`data_file`).

use block::buffer::Piece;
use block::file::{FileView, IoFuture};
use block::ring::Pieces;
use block::{Context, IoError, Request};
use smallvec::smallvec;

use super::encryption::{EncryptedData, Encryption};
use super::room::Rooms;
use crate::format::{GuestOffset, HostOffset};

/// One queue's access to the guest's bytes.
#[derive(Clone, Debug)]
pub(crate) struct GuestData {
    /// The file that has them.
    file: FileView,
    /// The way to them, if the file has them encrypted.
    encrypted: Option<Box<EncryptedData>>,
}

impl GuestData {
    pub(super) fn new(file: FileView, encryption: &Encryption, cx: &Context, rooms: &Rooms) -> Self {
        let encrypted = (!encryption.is_plain()).then(|| {
            Box::new(EncryptedData {
                file: file.clone(),
                cx: cx.clone(),
                encryption: encryption.clone(),
                rooms: rooms.clone(),
            })
        });
        Self { file, encrypted }
    }

    /// Returns the file.
    pub(super) fn file(&self) -> &FileView {
        &self.file
    }

    /// Submits a whole read or write whose bytes are contiguous from `at` on. The file answers it without a task or a
    /// copy. Returns the request if that is not possible.
    #[inline]
    pub(super) fn submit(&self, at: HostOffset, request: Request) -> Result<(), Request> {
        if self.encrypted.is_some() {
            return Err(request);
        }
        self.file.submit(at.bytes(), request)
    }

    /// Starts a read of the bytes from `at` on into `piece`; `guest` is the guest offset of the first.
    pub(super) fn start_read(&self, at: HostOffset, guest: GuestOffset, piece: Piece) -> IoFuture {
        match self.encrypted.as_deref() {
            None => self.start_read_as_stored(at, piece),
            Some(encrypted) => IoFuture::Task(Box::pin(encrypted.clone().read(at, guest, piece))),
        }
    }

    /// As [`Self::start_read`], of bytes that are never encrypted: those of compressed clusters.
    pub(super) fn start_read_as_stored(&self, at: HostOffset, piece: Piece) -> IoFuture {
        self.file.start_read(at.bytes(), smallvec![piece])
    }

    /// Starts a write of `pieces`, one after the other, from `at` on.
    pub(super) fn start_write(&self, at: HostOffset, pieces: Pieces) -> IoFuture {
        match self.encrypted.as_deref() {
            None => self.file.start_write(at.bytes(), pieces),
            Some(encrypted) => IoFuture::Task(Box::pin(encrypted.clone().write(at, pieces))),
        }
    }

    /// Returns the space of `len` bytes from `at` on to the host. Returns true if they read as zeros now.
    ///
    /// # Errors
    ///
    /// The host's error; then the bytes are zeros or unchanged.
    pub(super) async fn punch(&self, at: HostOffset, len: u64) -> Result<bool, IoError> {
        self.file.punch(at.bytes(), len).await
    }

    /// Makes `len` bytes from `at` on zeros in the file, which is never one with encrypted bytes; `sparse`:
    /// their space is returned to the host if it can be.
    ///
    /// # Errors
    ///
    /// The host's error; then the bytes are zeros or unchanged, each.
    pub(super) async fn zero(&self, at: HostOffset, len: u64, sparse: bool) -> Result<(), IoError> {
        if sparse && self.file.punch(at.bytes(), len).await? {
            return Ok(());
        }
        self.file.zero(at.bytes(), len).await
    }

    /// Makes the host reserve space for `len` bytes from `at` on, which read as zeros.
    ///
    /// # Errors
    ///
    /// The host's error.
    pub(super) async fn reserve(&self, at: HostOffset, len: u64) -> Result<(), IoError> {
        self.file.preallocate(at.bytes(), len).await
    }
}
