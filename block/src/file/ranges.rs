//! Locks on ranges of a file against concurrent read-modify-writes.
//!
//! If the host's block is larger than a guest's sector, two writes to different sectors may share a block. Then every
//! write, punch and zeroing, on any worker, locks its blocks first.

use crate::sync::{ChangeOnDrop, Monitor};

type Ranges = Vec<(u64, u64)>;

/// The ranges that are locked, in bytes.
#[derive(Debug, Default)]
pub(super) struct RangeLocks(Monitor<Ranges>);

impl RangeLocks {
    /// Waits until no part of `start..end` is locked, and locks it until the returned value is dropped.
    pub(super) async fn lock(
        &self,
        start: u64,
        end: u64,
    ) -> ChangeOnDrop<'_, Ranges, impl FnOnce(&mut Ranges)> {
        self.0
            .wait(|held| {
                let is_free = held.iter().all(|&(from, to)| end <= from || to <= start);
                is_free.then(|| held.push((start, end)))
            })
            .await;
        self.0.change_on_drop(move |held| {
            if let Some(index) = held.iter().position(|range| *range == (start, end)) {
                held.swap_remove(index);
            }
        })
    }

    #[cfg(all(test, shuttle))]
    pub(super) fn is_empty(&self) -> bool {
        self.0.with(|held| held.is_empty()) && self.0.waiting() == 0
    }
}
