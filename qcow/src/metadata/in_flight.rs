//! Guest clusters that requests are remapping.
//!
//! All queues' requests are here, thousands of them with many queues, and every planned write looks its clusters up.
//!
//! Invariant: a cluster is entered by one request at a time, and only that request changes its mapping until it has
//! left.

use std::collections::BTreeMap;
use std::task::Waker;

use block::canary::{Rule, broken};
use block::sync::WaitList;

use crate::format::GuestCluster;
use crate::invariant::invariant;

/// The clusters that are being remapped, and their waiters. The ranges do not overlap, so that the last one that begins
/// at or before a cluster is the only one that can contain it.
#[derive(Debug, Default)]
pub(crate) struct InFlight(BTreeMap<GuestCluster, Entry>);

#[derive(Debug)]
struct Entry {
    /// The cluster after the last one.
    end: GuestCluster,
    waiters: WaitList,
}

impl InFlight {
    /// Returns true if one of the clusters `first..=last` is being remapped.
    #[inline]
    pub(crate) fn touches(&self, first: GuestCluster, last: GuestCluster) -> bool {
        if self.0.is_empty() || broken(Rule::SecondWriterRuns) {
            return false;
        }
        let before = self.0.range(..=last).next_back();
        before.is_some_and(|(_, entry)| first < entry.end)
    }

    /// Returns true if a cluster is being remapped; `waker` is woken when that has ended.
    pub(crate) fn wait(&mut self, cluster: GuestCluster, waker: &Waker) -> bool {
        let before = self.0.range_mut(..=cluster).next_back();
        let Some((_, entry)) = before.filter(|(_, entry)| cluster < entry.end) else {
            return false;
        };
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
        let entry = Entry {
            end: first + count,
            waiters: WaitList::default(),
        };
        self.0.insert(first, entry);
    }

    /// Removes the clusters that were entered with `first`. Returns the waiters to wake; drop the list without the
    /// metadata's lock.
    pub(crate) fn leave(&mut self, first: GuestCluster) -> WaitList {
        let entry = self.0.remove(&first);
        // Whoever leaves twice lets a second writer in beside another one.
        invariant!(entry.is_some(), "guest cluster {first} is not being remapped");
        entry.map_or_else(WaitList::default, |entry| entry.waiters)
    }

    /// Returns true if exactly these clusters were entered together and have not left.
    pub(crate) fn is_entered(&self, first: GuestCluster, count: u64) -> bool {
        self.0.get(&first).is_some_and(|entry| entry.end == first + count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Method: random ranges come and go; a plain list of clusters answers the same questions.
    #[cfg(not(feature = "canary"))]
    #[test]
    fn in_flight_answers_like_a_list_of_clusters() {
        let mut in_flight = InFlight::default();
        let mut model: Vec<(u64, u64)> = Vec::new();
        let mut random = ringdisk_gen::Random::new(3);
        for _ in 0..20_000 {
            let (first, count) = (random.draw() % 500, 1 + random.draw() % 9);
            let overlaps = |&(start, end): &(u64, u64)| first < end && start < first + count;
            let (from, last) = (GuestCluster::new(first), GuestCluster::new(first + count - 1));
            let touched = model.iter().any(overlaps);
            assert_eq!(in_flight.touches(from, last), touched, "{count} from {first}");
            let inside = model.iter().any(|&(start, end)| start <= first && first < end);
            assert_eq!(in_flight.wait(from, Waker::noop()), inside, "{first}");
            if !touched && model.len() < 40 {
                in_flight.enter(from, count);
                model.push((first, first + count));
                assert!(in_flight.is_entered(from, count) && !in_flight.is_entered(from, count + 1));
            } else if !model.is_empty() {
                let gone = model.swap_remove(random.draw() as usize % model.len());
                drop(in_flight.leave(GuestCluster::new(gone.0)));
            }
        }
    }

    #[test]
    fn in_flight_leave_returns_the_waiters_of_its_range() {
        let mut in_flight = InFlight::default();
        in_flight.enter(GuestCluster::new(3), 4);
        in_flight.enter(GuestCluster::new(7), 1);
        assert!(in_flight.wait(GuestCluster::new(6), Waker::noop()));
        assert!(!in_flight.wait(GuestCluster::new(8), Waker::noop()));
        assert_eq!(in_flight.leave(GuestCluster::new(7)).len(), 0);
        assert_eq!(in_flight.leave(GuestCluster::new(3)).len(), 1);
    }
}

#[cfg(all(test, debug_assertions, not(feature = "canary")))]
mod invariant_tests {
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
