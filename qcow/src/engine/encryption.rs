//! Guest bytes that the file has encrypted: what [`GuestData`](super::data::GuestData) does with them.
//!
//! Bytes are encrypted and decrypted in memory of our own. The guest's memory may change while it is written from, and may
//! be read while it is read into; registered pages are reached by the ring's copies alone.
//!
//! Invariant: every sector that is written is encrypted for the place in the file where it lies. So whatever moves bytes to
//! another place decrypts them first, and a hole of the file is no sector of zeros.
//!
//! Invariant: all of that memory is leased from the queue's room ([`Rooms`]), so that many large requests take no more.

use std::rc::Rc;
use std::sync::Arc;

use block::buffer::Piece;
use block::canary::{Rule, broken};
use block::file::FileView;
use block::ring::Pieces;
use block::{AlignedBuf, Buffer, Context, IoError};

use super::room::Rooms;
use crate::format::{GuestOffset, HostOffset};
use crate::luks::{SECTOR, SectorCipher};

/// The encryption of an image's guest data.
#[derive(Clone, Debug)]
pub(crate) enum Encryption {
    /// None: the file has the guest's bytes as they are.
    Plain,
    /// LUKS (crypt method 2): the number of a sector is its host offset / 512, so that clusters keep their bytes when guest
    /// clusters, of the disk or of snapshots, come to share them.
    Luks(Arc<SectorCipher>),
    /// AES-CBC (crypt method 1), only to be read: the number of a sector is its guest offset / 512.
    Aes(Arc<SectorCipher>),
    /// The key is not known. Only tables can be changed.
    Locked,
}

impl Encryption {
    /// Returns true if the file has the guest's bytes as they are.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self, Self::Plain)
    }
}

/// The most bytes that are encrypted or decrypted at once.
const BOUNCE_BYTES: usize = 256 << 10;

/// A queue's access to encrypted bytes.
#[derive(Clone, Debug)]
pub(super) struct EncryptedData {
    pub(super) file: FileView,
    pub(super) cx: Context,
    /// Not [`Encryption::Plain`].
    pub(super) encryption: Encryption,
    pub(super) rooms: Rooms,
}

impl EncryptedData {
    /// Reads the bytes from `at` on into `piece`; `guest` is the guest offset of the first.
    pub(super) async fn read(self, at: HostOffset, guest: GuestOffset, piece: Piece) -> Result<(), IoError> {
        let (cipher, tweak) = match &self.encryption {
            Encryption::Luks(cipher) => (cipher, at.bytes()),
            Encryption::Aes(cipher) => (cipher, guest.bytes()),
            Encryption::Plain | Encryption::Locked => return Err(IoError::Unsupported),
        };
        let mut sector = whole_sectors(tweak, piece.len())?;
        let (mut at, mut rest) = (at, piece);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(BOUNCE_BYTES);
            let Piece::Bytes { buffer, offset, len } = now else {
                return Err(IoError::Unsupported);
            };
            let _room = self.rooms.reads.take(len).await;
            let bounce = Rc::new(Buffer::from(self.cx.pool().take(len)));
            let read = self
                .file
                .start_read(at.bytes(), [Piece::whole(&bounce)].into_iter().collect());
            read.await?;
            let mut bytes = owned(bounce)?;
            cipher.decrypt(sector, &mut bytes);
            let bounce = Rc::new(Buffer::from(bytes));
            if let Some(copy) = self.cx.ring().copy(&bounce, 0, &buffer, offset, len) {
                copy.await?;
            }
            self.cx.pool().put(owned(bounce)?);
            sector += (len / SECTOR) as u64;
            (at, rest) = (at + len as u64, later);
        }
        Ok(())
    }

    /// Writes `pieces`, one after the other, from `at` on.
    pub(super) async fn write(self, at: HostOffset, pieces: Pieces) -> Result<(), IoError> {
        let len = pieces.iter().map(Piece::len).sum();
        let Encryption::Luks(cipher) = &self.encryption else {
            return Err(IoError::Unsupported);
        };
        let mut sector = whole_sectors(at.bytes(), len)?;
        if broken(Rule::EncryptedForElsewhere) && pieces.len() > 1 {
            // Bytes of the guest's and of its old cluster go to a new one.
            sector = 0;
        }
        let mut pieces = pieces.into_iter();
        let mut next = pieces.next();
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let len = left.min(BOUNCE_BYTES);
            let _room = self.rooms.writes.take(len).await;
            let bounce = self.cx.pool().take(len);
            let mut bytes = self.gather(bounce, &mut next, &mut pieces).await?;
            cipher.encrypt(sector, &mut bytes);
            let bounce = Rc::new(Buffer::from(bytes));
            let write = self
                .file
                .start_write(at.bytes(), [Piece::whole(&bounce)].into_iter().collect());
            write.await?;
            self.cx.pool().put(owned(bounce)?);
            sector += (len / SECTOR) as u64;
            (at, left) = (at + len as u64, left - len);
        }
        Ok(())
    }

    /// Fills a buffer with the next bytes: first those of `next`, whose rest is left there.
    async fn gather(
        &self,
        bounce: AlignedBuf,
        next: &mut Option<Piece>,
        more: &mut impl Iterator<Item = Piece>,
    ) -> Result<AlignedBuf, IoError> {
        let len = bounce.len();
        let bounce = Rc::new(Buffer::from(bounce));
        let mut filled = 0;
        while filled < len {
            let piece = next.take().ok_or(IoError::BufferLength)?;
            let (now, later) = piece.split_at(len - filled);
            let copied = now.len();
            let op = match now {
                Piece::Bytes { buffer, offset, len } => {
                    self.cx.ring().copy(&buffer, offset, &bounce, filled, len)
                }
                Piece::Zeros(len) => self.cx.ring().fill_zeros(&bounce, filled, len),
            };
            if let Some(op) = op {
                op.await?;
            }
            filled += copied;
            *next = if later.is_empty() {
                more.next()
            } else {
                Some(later)
            };
        }
        owned(bounce)
    }
}

/// Returns the number of the sector at `offset`, if it begins there and `len` bytes are whole sectors.
fn whole_sectors(offset: u64, len: usize) -> Result<u64, IoError> {
    if !(offset | len as u64).is_multiple_of(SECTOR as u64) {
        return Err(IoError::Misaligned);
    }
    Ok(offset / SECTOR as u64)
}

/// Returns the memory of a buffer that its op has released.
pub(super) fn owned(buffer: Rc<Buffer>) -> Result<AlignedBuf, IoError> {
    Rc::try_unwrap(buffer)
        .ok()
        .and_then(Buffer::into_owned)
        .ok_or(IoError::Dropped)
}
