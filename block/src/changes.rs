//! Changes of one file: how many have ended, over all its views, and how many of them a sync has covered. A FLUSH of a
//! file to which nothing was written since needs no sync.
//!
//! Each view counts for itself, in a cache line of its own: every op that may have changed the file, whatever its result,
//! when its completion is reaped and before it is answered. So whoever asks for a FLUSH of a write counts that write. A
//! sync notes the sum before it begins and, if it succeeds, that it covers so many. Counts only grow. So a sum that has not
//! changed means that no count has, and what ended before the FLUSH had ended before that sync began.
//!
//! This holds only as long as nobody else writes the file. Bytes of others, and those written before it was opened, are
//! counted by nobody. So nothing is covered before the first sync, and never without [`Changes::assume_alone`].
//!
//! Invariants: a change is counted before its answer can be seen; the count of a view outlives the view.

use std::cell::Cell;
use std::sync::Arc;

use crate::canary::{Rule, strikes};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{CachePadded, Mutex};

/// The changes of one file.
#[derive(Debug, Default)]
pub(crate) struct Changes(Mutex<Sums>);

#[derive(Debug, Default)]
struct Sums {
    /// Nobody else writes the file.
    alone: bool,
    /// The counts of the views there are, and the sum of those that are gone.
    counts: Vec<Arc<Count>>,
    gone: u64,
    /// The sum that the last successful sync has covered.
    covered: Option<u64>,
}

/// The number of changes through one view. Only its own thread adds to it.
type Count = CachePadded<AtomicU64>;

impl Sums {
    /// Returns the number of changes that have ended, unless others may change the file too.
    fn ended(&self) -> Option<u64> {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Acquire));
        self.alone
            .then(|| counts.fold(self.gone, |sum, count| sum.wrapping_add(count)))
    }
}

impl Changes {
    /// Declares that nobody else writes the file from now on, until it is closed.
    pub(crate) fn assume_alone(&self) {
        self.0.lock().alone = true;
    }

    /// Returns the number of changes that have ended; `None` if others may change the file too.
    pub(crate) fn ended(&self) -> Option<u64> {
        self.0.lock().ended()
    }

    /// Returns true if a successful sync has covered every change that has ended.
    pub(crate) fn are_covered(&self) -> bool {
        let sums = self.0.lock();
        let ended = sums.ended();
        ended.is_some() && ended == sums.covered
    }

    /// Records that a sync has succeeded that began after so many changes had [ended](Changes::ended).
    pub(crate) fn cover(&self, ended: Option<u64>) {
        self.0.lock().covered = ended;
    }

    /// Makes the counter of a new view.
    pub(crate) fn counter(self: &Arc<Self>) -> ChangeCounter {
        let count = Arc::new(Count::new(AtomicU64::new(0)));
        self.0.lock().counts.push(Arc::clone(&count));
        ChangeCounter {
            last: Cell::new(0),
            count,
            file: Arc::clone(self),
        }
    }
}

/// The counter of one view's changes, used by one thread.
#[derive(Debug)]
pub(crate) struct ChangeCounter {
    last: Cell<u64>,
    count: Arc<Count>,
    file: Arc<Changes>,
}

impl ChangeCounter {
    /// Counts a change that has ended and that nobody has been told of.
    #[inline]
    pub(crate) fn add(&self) {
        if strikes(Rule::ChangeNotCounted, 20) {
            return;
        }
        let count = self.last.get().wrapping_add(1);
        self.last.set(count);
        self.count.store(count, Ordering::Release);
    }
}

impl Drop for ChangeCounter {
    fn drop(&mut self) {
        let mut sums = self.file.0.lock();
        sums.counts.retain(|count| !Arc::ptr_eq(count, &self.count));
        sums.gone = sums.gone.wrapping_add(self.last.get());
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    fn alone() -> Arc<Changes> {
        let changes = Arc::new(Changes::default());
        changes.assume_alone();
        changes
    }

    /// A sync in which nothing else happens.
    fn sync(changes: &Changes) {
        changes.cover(changes.ended());
    }

    #[test]
    fn nothing_is_covered_before_the_first_sync() {
        let changes = alone();
        assert!(!changes.are_covered());
        sync(&changes);
        assert!(changes.are_covered());
    }

    #[test]
    fn change_on_any_view_is_not_covered_before_the_next_sync() {
        let changes = alone();
        let views = [changes.counter(), changes.counter()];
        sync(&changes);
        for view in views {
            view.add();
            assert!(!changes.are_covered());
            sync(&changes);
            assert!(changes.are_covered());
        }
    }

    #[test]
    fn change_that_ends_during_a_sync_is_not_covered() {
        let changes = alone();
        let view = changes.counter();
        let began = changes.ended();
        view.add();
        changes.cover(began);
        assert!(!changes.are_covered());
    }

    #[test]
    fn changes_of_a_view_that_is_gone_still_count() {
        let changes = alone();
        let (view, other) = (changes.counter(), changes.counter());
        sync(&changes);
        view.add();
        drop(view);
        assert!(!changes.are_covered());
        sync(&changes);
        drop(other);
        let _another = changes.counter();
        assert!(changes.are_covered(), "views come and go without a change");
        assert_eq!(changes.0.lock().counts.len(), 1);
    }

    #[test]
    fn nothing_is_covered_while_others_may_write() {
        let changes = Arc::new(Changes::default());
        sync(&changes);
        assert!(!changes.are_covered());
        // The sync before may have been of bytes that others wrote before and after it.
        changes.assume_alone();
        assert!(!changes.are_covered());
    }
}
