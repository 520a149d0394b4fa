//! Aligned reads and writes of pieces: one op, or several if pieces of registered buffers are among them.
//!
//! The kernel takes memory of a process or a registered buffer, but not both in one op. For example, a copy-on-write
//! whose edges are memory and whose middle is the guest's registered pages is three ops, started together.

use smallvec::{SmallVec, smallvec};

use super::view::{FileView, total};
use crate::buffer::Piece;
use crate::error::IoError;
use crate::join::join_all;
use crate::ring::{OpFuture, Pieces};

/// Direction of a transfer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Transfer {
    /// From the file.
    Read,
    /// To the file; with `dsync`, durably.
    Write { dsync: bool },
}

/// Returns true if one op can name all pieces.
#[inline]
pub(super) fn is_one_op(pieces: &Pieces) -> bool {
    pieces.len() == 1 || !pieces.iter().any(Piece::is_registered)
}

impl FileView {
    /// Reads or writes pieces that need no bouncing.
    pub(super) async fn transfer(&self, offset: u64, pieces: Pieces, way: Transfer) -> Result<(), IoError> {
        if is_one_op(&pieces) {
            return self.start(offset, pieces, way).await;
        }
        let mut ops = Ops::new();
        let mut at = offset;
        for run in runs(pieces) {
            let bytes = total(&run);
            if bytes > 0 {
                ops.push(self.start(at, run, way));
            }
            at = at.saturating_add(bytes);
        }
        // Boxed, so that the future of a single-op transfer stays small.
        Box::pin(join_all(ops)).await
    }

    fn start(&self, offset: u64, pieces: Pieces, way: Transfer) -> OpFuture {
        match way {
            Transfer::Read => self.cx.ring().read(&self.handle, offset, pieces),
            Transfer::Write { dsync } => self.cx.ring().write(&self.handle, offset, pieces, dsync),
        }
    }
}

/// Groups the pieces so that one op can name each group.
fn runs(pieces: Pieces) -> SmallVec<[Pieces; 3]> {
    let mut runs: SmallVec<[Pieces; 3]> = SmallVec::new();
    let mut alone = true;
    for piece in pieces {
        let registered = piece.is_registered();
        match runs.last_mut() {
            Some(run) if !registered && !alone => run.push(piece),
            _ => runs.push(smallvec![piece]),
        }
        alone = registered;
    }
    runs
}

/// The ops in flight for one transfer.
pub(super) type Ops = SmallVec<[OpFuture; 3]>;
