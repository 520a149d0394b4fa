//! Bounced transfers: those that direct I/O refuses go through a bounce buffer, a bounded part at a time.

use std::rc::Rc;

use smallvec::smallvec;

use super::transfer::Ops;
use super::view::{FileView, to_usize, total};
use crate::buffer::{Buffer, Piece};
use crate::error::IoError;
use crate::join::join_all;
use crate::ring::Pieces;

/// The largest part that is bounced at a time, in bytes: a power of two. It bounds the bounce memory of a request,
/// however large a guest makes it.
pub(super) const BOUNCE_BYTES_MAX: u64 = 256 << 10;

impl FileView {
    /// Splits a transfer into parts that are bounced one at a time, each with its offset. This bounds the memory of a
    /// request, as a guest's may be large and many.
    pub(super) fn bounced_parts(&self, offset: u64, pieces: &Pieces) -> Vec<(u64, Pieces)> {
        let part_max = BOUNCE_BYTES_MAX.max(self.file.alignment.offset);
        let mut parts = Vec::new();
        let (mut at, mut rest) = (offset, pieces.clone());
        while !rest.is_empty() {
            // Parts end at block boundaries, so that no block is written twice.
            let room = part_max - (at & (part_max - 1));
            let behind = split_off(&mut rest, usize::try_from(room).unwrap_or(usize::MAX));
            let next = at.saturating_add(total(&rest));
            parts.push((at, std::mem::replace(&mut rest, behind)));
            at = next;
        }
        parts
    }

    /// Reads the blocks from `start` on into `bounce`, and copies the bytes from `offset` on into the pieces.
    pub(super) async fn read_bounced(
        &self,
        offset: u64,
        start: u64,
        pieces: &Pieces,
        bounce: &Rc<Buffer>,
    ) -> Result<(), IoError> {
        let ring = self.cx.ring();
        ring.read(&self.handle, start, smallvec![Piece::whole(bounce)])
            .await?;
        let mut at = to_usize(offset - start)?;
        let mut copies = Ops::new();
        for piece in pieces {
            if let Piece::Bytes { buffer, offset, len } = piece {
                copies.extend(ring.copy(bounce, at, buffer, *offset, *len));
            }
            at += piece.len();
        }
        join_all(copies).await
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one step of `write`, apart only so that the buffer returns"
    )]
    pub(super) async fn write_bounced(
        &self,
        offset: u64,
        len: u64,
        start: u64,
        end: u64,
        pieces: &Pieces,
        bounce: &Rc<Buffer>,
        dsync: bool,
    ) -> Result<(), IoError> {
        let align = self.file.alignment.offset;
        let block = to_usize(align)?;
        let ring = self.cx.ring();
        let edge = |at: u64| -> Result<Pieces, IoError> {
            Ok(smallvec![Piece::Bytes {
                buffer: Rc::clone(bounce),
                offset: to_usize(at - start)?,
                len: block
            }])
        };
        if offset != start {
            ring.read(&self.handle, start, edge(start)?).await?;
        }
        if offset + len != end && (end - align != start || offset == start) {
            ring.read(&self.handle, end - align, edge(end - align)?).await?;
        }
        let mut at = to_usize(offset - start)?;
        let mut copies = Ops::new();
        for piece in pieces {
            copies.extend(match piece {
                Piece::Bytes { buffer, offset, len } => ring.copy(buffer, *offset, bounce, at, *len),
                Piece::Zeros(len) => ring.fill_zeros(bounce, at, *len),
            });
            at += piece.len();
        }
        join_all(copies).await?;
        ring.write(&self.handle, start, smallvec![Piece::whole(bounce)], dsync)
            .await
    }
}

/// Shortens `pieces` to their first `len` bytes, and returns the rest.
fn split_off(pieces: &mut Pieces, len: usize) -> Pieces {
    let mut room = len;
    for index in 0..pieces.len() {
        let bytes = pieces[index].len();
        if bytes > room {
            let mut rest: Pieces = pieces.drain(index..).collect();
            let (first, second) = rest[0].split_at(room);
            rest[0] = second;
            if !first.is_empty() {
                pieces.push(first);
            }
            return rest;
        }
        room -= bytes;
    }
    Pieces::new()
}
