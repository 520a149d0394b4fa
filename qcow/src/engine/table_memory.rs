//! One bound for the table caches of all images that a process has open.
//!
//! ```text
//!   image ──▶ image ──▶ image ─┐     A cache that is to grow past the bound takes what another one can spare: the
//!     ▲          hand ──▲      │     images stand in a circle, and the hand goes on with each look. If it comes to the
//!     └────────────────────────┘     cache that wants to grow, that one drops a slice of its own.
//! ```
//!
//! It is the clock algorithm of one cache, over all of them: a slice goes if nobody used it between two looks, whichever image it
//! belongs to. So tables of idle disks make room for those of busy ones, and no disk has to be told its share.
//!
//! Invariants:
//! - the metadata of another image is locked only by somebody who holds no lock of metadata, and never waited for;
//! - an image's files are not kept open by its place in the circle: the handle there is of its metadata alone.

use std::sync::Arc;

use block::sync::{Mutex, ShardedLock, WeakLock};

use super::Shared;
use crate::metadata::Metadata;
use crate::metadata::table_budget::TableBudget;

/// The slices of a cache that one look goes through: few enough for requests of that image not to notice.
const SLICES_A_LOOK: usize = 64;
/// The most images that are looked at for one slice.
const LOOKS_MAX: usize = 4;

/// A bound for the tables that several images have in memory together; see
/// [`OpenOptions::table_memory`](crate::OpenOptions::table_memory). Its copies are the same bound.
///
/// Each image may have 16 slices of its L2 tables and as many of its refcount blocks in any case, of up to 4 KiB; changed tables stay
/// until they are written. So for many images the bound should be at least 256 KiB each.
#[derive(Clone, Debug, Default)]
pub struct TableMemory {
    budget: TableBudget,
    circle: Arc<Mutex<Circle>>,
}

#[derive(Debug, Default)]
struct Circle {
    images: Vec<WeakLock<Metadata>>,
    hand: usize,
    /// Those that are gone are looked for when there are so many.
    tidy_at: usize,
}

impl TableMemory {
    /// A bound of `bytes`; the default is none.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let memory = Self::default();
        memory.set_limit_bytes(Some(bytes));
        memory
    }

    /// Sets the bound in bytes; `None` is none. Past a lower one images drop what they may at once.
    pub fn set_limit_bytes(&self, bytes: Option<u64>) {
        self.budget.set_limit_bytes(bytes.unwrap_or(u64::MAX));
        let images: Vec<_> = self
            .circle
            .lock()
            .images
            .iter()
            .filter_map(WeakLock::upgrade)
            .collect();
        // The first look at a slice may only find that it was used.
        for image in images.iter().chain(&images) {
            if self.budget.is_exceeded()
                && let Ok(mut metadata) = image.write()
            {
                metadata.drop_unused_slices(usize::MAX);
            }
        }
    }

    /// Returns the bound in bytes, if there is one.
    #[must_use]
    pub fn limit_bytes(&self) -> Option<u64> {
        Some(self.budget.limit_bytes()).filter(|&bytes| bytes != u64::MAX)
    }

    /// Returns the bytes of tables that are in memory now.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.budget.used_bytes()
    }

    /// Counts an image's caches from now on.
    pub(super) fn enter(&self, metadata: &mut Metadata) {
        metadata.share_budget(&self.budget);
    }

    /// Lets others take what this image can spare.
    pub(super) fn join(&self, image: &ShardedLock<Metadata>) {
        self.circle.lock().join(image.downgrade());
    }

    /// Has other images drop what they can spare, if all of them hold as much as they may. The caller holds no lock of metadata.
    pub(super) fn make_room(&self, own: &Shared) {
        for _ in 0..LOOKS_MAX {
            if !self.budget.is_full() {
                return;
            }
            // The hand's own lock is not held while another is tried.
            let Some(image) = self.circle.lock().next(&own.metadata) else {
                return;
            };
            if let Some(mut metadata) = image.try_write() {
                metadata.drop_unused_slices(SLICES_A_LOOK);
            }
        }
    }
}

impl Circle {
    fn join(&mut self, image: WeakLock<Metadata>) {
        if self.images.len() >= self.tidy_at {
            self.images.retain(|image| !image.is_gone());
            self.tidy_at = 2 * self.images.len().max(8);
        }
        self.images.push(image);
    }

    /// Moves the hand on, and returns the image there; `None` if it is `own`, or if there is none.
    fn next(&mut self, own: &ShardedLock<Metadata>) -> Option<ShardedLock<Metadata>> {
        while !self.images.is_empty() {
            let hand = self.hand % self.images.len();
            let place = self.images.get(hand)?;
            if let Some(image) = place.upgrade() {
                self.hand = hand + 1;
                return (!place.is_of(own)).then_some(image);
            }
            self.images.swap_remove(hand);
        }
        None
    }
}
