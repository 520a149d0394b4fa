//! Guest clusters that requests are remapping.
//!
//! Invariant: a cluster is entered by one request at a time, and only that request changes its mapping until it has
//! left.

use std::ops::Range;
use std::task::Waker;

use block::canary::{Rule, broken};
use block::sync::WaitList;

use crate::format::GuestCluster;
use crate::invariant::invariant;

/// The clusters that are being remapped, and their waiters.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    clusters: Range<GuestCluster>,
    waiters: WaitList,
}

impl InFlight {
    /// Returns true if one of the clusters `first..=last` is being remapped.
    #[inline]
    pub(crate) fn touches(&self, first: GuestCluster, last: GuestCluster) -> bool {
        if self.0.is_empty() || broken(Rule::SecondWriterRuns) {
            return false;
        }
        self.0
            .iter()
            .any(|entry| first < entry.clusters.end && entry.clusters.start <= last)
    }

    /// Returns true if a cluster is being remapped; `waker` is woken when that has ended.
    pub(crate) fn wait(&mut self, cluster: GuestCluster, waker: &Waker) -> bool {
        let found = self.0.iter_mut().find(|entry| entry.clusters.contains(&cluster));
        let Some(entry) = found else { return false };
        entry.waiters.register(waker);
        true
    }

    /// Enters `count` clusters from `first` on, none of which is being remapped.
    pub(crate) fn enter(&mut self, first: GuestCluster, count: u64) {
        // A second remapping would drop what the first one publishes.
        invariant!(
            !self.touches(first, first + (count - 1)),
            "guest cluster {first} is remapped twice at once"
        );
        self.0.push(Entry {
            clusters: first..first + count,
            waiters: WaitList::default(),
        });
    }

    /// Removes the clusters that were entered with `first`. Returns the waiters to wake; drop the list without the
    /// metadata's lock.
    pub(crate) fn leave(&mut self, first: GuestCluster) -> WaitList {
        let index = self.0.iter().position(|entry| entry.clusters.start == first);
        // Whoever leaves twice lets a second writer in beside another one.
        invariant!(index.is_some(), "guest cluster {first} is not being remapped");
        index.map_or_else(WaitList::default, |index| self.0.swap_remove(index).waiters)
    }

    /// Returns true if exactly these clusters were entered together and have not left.
    pub(crate) fn is_entered(&self, first: GuestCluster, count: u64) -> bool {
        let clusters = first..first + count;
        self.0.iter().any(|entry| entry.clusters == clusters)
    }
}

#[cfg(all(test, debug_assertions, not(feature = "canary")))]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "remapped twice at once")]
    fn in_flight_enter_panics_on_a_cluster_entered_twice() {
        let mut in_flight = InFlight::default();
        in_flight.enter(GuestCluster::new(3), 4);
        in_flight.enter(GuestCluster::new(6), 1);
    }

    #[test]
    #[should_panic(expected = "is not being remapped")]
    fn in_flight_leave_panics_when_left_twice() {
        let mut in_flight = InFlight::default();
        in_flight.enter(GuestCluster::new(3), 4);
        drop(in_flight.leave(GuestCluster::new(3)));
        drop(in_flight.leave(GuestCluster::new(3)));
    }
}
