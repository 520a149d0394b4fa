//! Copies of the bytes of guest clusters that move.

use std::rc::Rc;

use block::buffer::Piece;
use block::canary::{Rule, broken};
use block::{Buffer, IoError, join_all};
use smallvec::smallvec;

use crate::engine::{Queue, flush};
use crate::format::{GuestOffset, HostOffset};

/// The most bytes that are copied in one piece.
pub(super) const PIECE_BYTES_MAX: u64 = 1 << 20;
/// The most bytes, and pieces, that are copied at once.
const BYTES_AT_ONCE: u64 = 8 << 20;
const PIECES_AT_ONCE: usize = 128;

/// Bytes to copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    /// The guest offset of the first.
    pub(super) guest: GuestOffset,
    pub(super) from: HostOffset,
    pub(super) to: HostOffset,
    pub(super) len: u64,
    /// The new place is known to read as zeros.
    pub(super) is_zero: bool,
    /// The bytes are the image's own, which are never encrypted.
    pub(super) is_table: bool,
}

impl Copy {
    /// Returns the copy of a table.
    pub(super) fn of_table(from: HostOffset, to: HostOffset, len: u64) -> Self {
        Self {
            guest: GuestOffset::default(),
            from,
            to,
            len,
            is_zero: false,
            is_table: true,
        }
    }

    /// Returns the copy in pieces.
    fn pieces(self) -> impl Iterator<Item = Self> {
        let starts = (0..self.len).step_by(PIECE_BYTES_MAX as usize);
        starts.map(move |start| Self {
            guest: self.guest + start,
            from: self.from + start,
            to: self.to + start,
            len: (self.len - start).min(PIECE_BYTES_MAX),
            ..self
        })
    }
}

/// Makes the copies of a step.
pub(super) async fn copy_all(queue: &Rc<Queue>, copies: &[Copy]) -> Result<(), IoError> {
    let mut pieces = copies.iter().flat_map(|copy| copy.pieces()).peekable();
    while pieces.peek().is_some() {
        let (mut some, mut bytes) = (Vec::new(), 0);
        while some.len() < PIECES_AT_ONCE
            && let Some(piece) = pieces.next_if(|piece| some.is_empty() || bytes + piece.len <= BYTES_AT_ONCE)
        {
            bytes += piece.len;
            let queue = Rc::clone(queue);
            some.push(Box::pin(async move { copy(&queue, piece).await }));
        }
        join_all(some).await?;
    }
    Ok(())
}

/// Makes copies that were made, and their counts, durable.
pub(super) async fn make_durable(queue: &Rc<Queue>) -> Result<(), IoError> {
    if broken(Rule::CopyLedToEarly) {
        return Ok(());
    }
    flush::flush(queue).await
}

async fn copy(queue: &Rc<Queue>, piece: Copy) -> Result<(), IoError> {
    let Copy { from, to, len, .. } = piece;
    let buffer = Rc::new(Buffer::from(queue.cx.pool().take(len as usize)));
    let whole = || Piece::whole(&buffer);
    let read = match piece.is_table {
        true => queue.file.start_read(from.bytes(), smallvec![whole()]),
        false => queue.data.start_read(from, piece.guest, whole()),
    };
    read.await?;
    let is_plain = queue.shared.encryption.is_plain() && !piece.is_table;
    let is_zero = is_plain && buffer.as_owned().is_some_and(|bytes| is_zero(bytes));
    // A hole stays one: clusters that were allocated in advance would take space otherwise.
    let is_hole = is_zero && (piece.is_zero || queue.data.punch(to, len).await == Ok(true));
    if !is_hole {
        let write = match piece.is_table {
            true => queue.file.start_write(to.bytes(), smallvec![whole()]),
            false => queue.data.start_write(to, smallvec![whole()]),
        };
        write.await?;
    }
    if let Some(bytes) = Rc::try_unwrap(buffer).ok().and_then(Buffer::into_owned) {
        queue.cx.pool().put(bytes);
    }
    Ok(())
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|&byte| byte == 0)
}
