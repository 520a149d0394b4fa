//! Guest bytes that requests are remapping: whole clusters, or subclusters of one that keeps its host cluster.
//!
//! All queues' requests are here, thousands of them with many queues, and every planned write looks its bytes up.
//!
//! Invariant: a byte is entered by one request at a time, and only that request changes its mapping until it has left. A
//! cluster leaves its host cluster only if none of its bytes is entered by others.

use std::collections::BTreeMap;
use std::ops::Range;
use std::task::Waker;

use block::canary::{Rule, broken};
use block::sync::WaitList;

use crate::format::GuestOffset;
use crate::invariant::invariant;

/// The bytes that are being remapped, and their waiters. The ranges do not overlap, so that the last one that begins at
/// or before a byte is the only one that can contain it.
#[derive(Debug, Default)]
pub(crate) struct InFlight(BTreeMap<GuestOffset, Entry>);

#[derive(Debug)]
struct Entry {
    /// The byte after the last one.
    end: GuestOffset,
    waiters: WaitList,
}

impl InFlight {
    /// Returns the first byte in `range` that is being remapped.
    #[inline]
    pub(crate) fn find(&self, range: &Range<GuestOffset>) -> Option<GuestOffset> {
        if !self.touches(range) {
            return None;
        }
        let before = self.0.range(..=range.start).next_back();
        if before.is_some_and(|(_, entry)| range.start < entry.end) {
            return Some(range.start);
        }
        self.0.range(range.clone()).next().map(|(&start, _)| start)
    }

    /// Returns true if a byte in `range` is being remapped.
    #[inline]
    pub(crate) fn touches(&self, range: &Range<GuestOffset>) -> bool {
        if self.0.is_empty() || broken(Rule::SecondWriterRuns) {
            return false;
        }
        let before = self.0.range(..range.end).next_back();
        before.is_some_and(|(_, entry)| range.start < entry.end)
    }

    /// Returns true if a byte is being remapped; `waker` is woken when that has ended.
    pub(crate) fn wait(&mut self, offset: GuestOffset, waker: &Waker) -> bool {
        let before = self.0.range_mut(..=offset).next_back();
        let Some((_, entry)) = before.filter(|(_, entry)| offset < entry.end) else {
            return false;
        };
        entry.waiters.register(waker);
        true
    }

    /// Enters bytes, none of which is being remapped.
    pub(crate) fn enter(&mut self, range: &Range<GuestOffset>) {
        // A second remapping would drop what the first one publishes.
        invariant!(
            !self.touches(range),
            "the guest's bytes {range:?} are remapped twice at once"
        );
        let entry = Entry {
            end: range.end,
            waiters: WaitList::default(),
        };
        self.0.insert(range.start, entry);
    }

    /// Removes the bytes that were entered with `start`. Returns the waiters to wake; drop the list without the metadata's
    /// lock.
    pub(crate) fn leave(&mut self, start: GuestOffset) -> WaitList {
        let entry = self.0.remove(&start);
        // Whoever leaves twice lets a second writer in beside another one.
        invariant!(
            entry.is_some(),
            "the guest's bytes from {start} on are not being remapped"
        );
        entry.map_or_else(WaitList::default, |entry| entry.waiters)
    }

    /// Returns true if exactly these bytes were entered together and have not left.
    pub(crate) fn is_entered(&self, range: &Range<GuestOffset>) -> bool {
        self.0
            .get(&range.start)
            .is_some_and(|entry| entry.end == range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> Range<GuestOffset> {
        GuestOffset::new(start)..GuestOffset::new(end)
    }

    /// Method: random ranges come and go; a plain list of them answers the same questions.
    #[cfg(not(feature = "canary"))]
    #[test]
    fn in_flight_answers_like_a_list_of_ranges() {
        let mut in_flight = InFlight::default();
        let mut model: Vec<(u64, u64)> = Vec::new();
        let mut random = ringdisk_gen::Random::new(3);
        for _ in 0..20_000 {
            let (first, count) = (random.draw() % 500, 1 + random.draw() % 9);
            let inside = |at: u64| model.iter().any(|&(start, end)| start <= at && at < end);
            let found = (first..first + count).find(|&at| inside(at));
            let asked = range(first, first + count);
            assert_eq!(
                in_flight.find(&asked),
                found.map(GuestOffset::new),
                "{count} from {first}"
            );
            assert_eq!(in_flight.touches(&asked), found.is_some(), "{count} from {first}");
            assert_eq!(
                in_flight.wait(asked.start, Waker::noop()),
                inside(first),
                "{first}"
            );
            if found.is_none() && model.len() < 40 {
                in_flight.enter(&asked);
                model.push((first, first + count));
                let longer = range(first, first + count + 1);
                assert!(in_flight.is_entered(&asked) && !in_flight.is_entered(&longer));
            } else if !model.is_empty() {
                let gone = model.swap_remove(random.draw() as usize % model.len());
                drop(in_flight.leave(GuestOffset::new(gone.0)));
            }
        }
    }

    #[test]
    fn in_flight_leave_returns_the_waiters_of_its_range() {
        let mut in_flight = InFlight::default();
        in_flight.enter(&range(3, 7));
        in_flight.enter(&range(7, 8));
        assert!(in_flight.wait(GuestOffset::new(6), Waker::noop()));
        assert!(!in_flight.wait(GuestOffset::new(8), Waker::noop()));
        assert_eq!(in_flight.leave(GuestOffset::new(7)).len(), 0);
        assert_eq!(in_flight.leave(GuestOffset::new(3)).len(), 1);
    }
}

#[cfg(all(test, debug_assertions, not(feature = "canary")))]
mod invariant_tests {
    use super::*;

    #[test]
    #[should_panic(expected = "remapped twice at once")]
    fn in_flight_enter_panics_on_a_byte_entered_twice() {
        let mut in_flight = InFlight::default();
        in_flight.enter(&(GuestOffset::new(3)..GuestOffset::new(7)));
        in_flight.enter(&(GuestOffset::new(6)..GuestOffset::new(7)));
    }

    #[test]
    #[should_panic(expected = "are not being remapped")]
    fn in_flight_leave_panics_when_left_twice() {
        let mut in_flight = InFlight::default();
        in_flight.enter(&(GuestOffset::new(3)..GuestOffset::new(7)));
        drop(in_flight.leave(GuestOffset::new(3)));
        drop(in_flight.leave(GuestOffset::new(3)));
    }
}
