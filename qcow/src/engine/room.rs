//! Room for the memory of one queue's requests: a budget in bytes, which they wait for in order.
//!
//! A guest decides how many requests are under way and how large they are; not how much memory they take.
//!
//! Invariants:
//!
//! - No more is leased than the budget. What is larger than that is leased the whole budget, and is alone then.
//! - Nobody overtakes: while one waits, whoever comes later waits behind it.
//! - A task that has room of one kind waits for room of a later kind only, in the order of [`Rooms`], and for I/O. So the
//!   last kind always comes back, and with it the others.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use crate::invariant::invariant;

/// The most bytes of old clusters that writes copy at a time: two edges of the largest cluster fit.
const COPIES_BYTES: usize = 8 << 20;
/// The most bytes that are being encrypted for writes, or decrypted for reads, each.
const BOUNCES_BYTES: usize = 4 << 20;

/// The rooms of a queue.
#[derive(Clone, Debug)]
pub(super) struct Rooms {
    /// For copies of old clusters, held until the write that takes their bytes has ended.
    pub(super) copies: Room,
    /// For bytes that are encrypted and written. A write that waits for the host's space keeps its room, so reads have
    /// another one.
    pub(super) writes: Room,
    /// For bytes that are read and decrypted.
    pub(super) reads: Room,
}

impl Rooms {
    pub(super) fn new() -> Self {
        Self {
            copies: Room::new(COPIES_BYTES),
            writes: Room::new(BOUNCES_BYTES),
            reads: Room::new(BOUNCES_BYTES),
        }
    }
}

/// A budget in bytes. Its clones are one budget.
#[derive(Clone, Debug)]
pub(super) struct Room(Rc<Budget>);

#[derive(Debug)]
struct Budget {
    whole: usize,
    left: Cell<usize>,
    waiters: RefCell<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    /// The first is the next to get room.
    list: VecDeque<(u64, Waker)>,
    numbers: u64,
}

impl Room {
    fn new(budget: usize) -> Self {
        Self(Rc::new(Budget {
            whole: budget,
            left: Cell::new(budget),
            waiters: RefCell::default(),
        }))
    }

    /// Leases room for `bytes` if there is some and nobody waits for it.
    pub(super) fn try_take(&self, bytes: usize) -> Option<Lease> {
        if !self.0.waiters.borrow().list.is_empty() {
            return None;
        }
        self.lease(bytes.min(self.0.whole))
    }

    /// Leases room for `bytes`, after those who wait already.
    pub(super) async fn take(&self, bytes: usize) -> Lease {
        if let Some(lease) = self.try_take(bytes) {
            return lease;
        }
        let bytes = bytes.min(self.0.whole);
        let mut place = Place {
            room: self,
            number: None,
        };
        poll_fn(|cx| place.poll(bytes, cx.waker())).await
    }

    fn lease(&self, bytes: usize) -> Option<Lease> {
        let left = self.0.left.get().checked_sub(bytes)?;
        self.0.left.set(left);
        Some(Lease {
            room: self.clone(),
            bytes,
        })
    }

    fn wake_first(&self) {
        let first = self
            .0
            .waiters
            .borrow()
            .list
            .front()
            .map(|(_, waker)| waker.clone());
        if let Some(waker) = first {
            waker.wake();
        }
    }
}

/// Room that is returned when this is dropped.
#[derive(Debug)]
#[must_use = "the room is returned when this is dropped"]
pub(super) struct Lease {
    room: Room,
    bytes: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let budget = &self.room.0;
        let left = budget.left.get() + self.bytes;
        invariant!(
            left <= budget.whole,
            "{left} bytes are left of a budget of {}",
            budget.whole
        );
        budget.left.set(left);
        self.room.wake_first();
    }
}

/// A wait's place in the order, which it leaves however it ends.
struct Place<'a> {
    room: &'a Room,
    number: Option<u64>,
}

impl Place<'_> {
    fn poll(&mut self, bytes: usize, waker: &Waker) -> Poll<Lease> {
        let is_next = {
            let waiters = self.room.0.waiters.borrow();
            waiters.list.front().map(|&(first, _)| first) == self.number
        };
        if is_next && let Some(lease) = self.room.lease(bytes) {
            self.leave();
            return Poll::Ready(lease);
        }
        let mut waiters = self.room.0.waiters.borrow_mut();
        match self.number.and_then(|number| waiters.place(number)) {
            Some(place) => waiters.list[place].1.clone_from(waker),
            None => {
                waiters.numbers += 1;
                let number = waiters.numbers;
                waiters.list.push_back((number, waker.clone()));
                self.number = Some(number);
            }
        }
        Poll::Pending
    }

    /// Leaves the order. If it was the first, the next may have room enough.
    fn leave(&mut self) {
        let Some(number) = self.number.take() else { return };
        let place = {
            let mut waiters = self.room.0.waiters.borrow_mut();
            let place = waiters.place(number);
            if let Some(place) = place {
                waiters.list.remove(place);
            }
            place
        };
        if place == Some(0) {
            self.room.wake_first();
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Waiters {
    fn place(&self, number: u64) -> Option<usize> {
        self.list
            .binary_search_by_key(&number, |&(number, _)| number)
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::Context;

    use super::*;

    type Wait<'a> = Pin<Box<dyn Future<Output = Lease> + 'a>>;

    fn poll(wait: &mut Wait<'_>) -> Option<Lease> {
        match wait.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(lease) => Some(lease),
            Poll::Pending => None,
        }
    }

    fn wait(room: &Room, bytes: usize) -> Wait<'_> {
        Box::pin(room.take(bytes))
    }

    #[test]
    fn room_is_leased_in_order_and_never_more_than_the_budget() {
        let room = Room::new(10);
        let first = room.try_take(7).expect("all is left");
        let (mut large, mut small) = (wait(&room, 5), wait(&room, 1));
        assert!(poll(&mut large).is_none());
        assert!(poll(&mut small).is_none(), "it would fit, but is not next");
        assert!(room.try_take(1).is_none(), "nor does a newcomer overtake");
        drop(first);
        assert!(poll(&mut small).is_none());
        let large_lease = poll(&mut large).expect("its turn");
        let small_lease = poll(&mut small).expect("its turn");
        assert_eq!(room.0.left.get(), 4);
        drop((large_lease, small_lease));
        assert_eq!(room.0.left.get(), 10);
    }

    #[test]
    fn more_than_the_budget_is_leased_alone() {
        let room = Room::new(10);
        let one = room.try_take(1).expect("all is left");
        let mut huge = wait(&room, 1000);
        assert!(poll(&mut huge).is_none());
        drop(one);
        let huge = poll(&mut huge).expect("all is left");
        assert_eq!(room.0.left.get(), 0);
        drop(huge);
        assert_eq!(room.0.left.get(), 10);
    }

    #[test]
    fn dropped_wait_lets_the_next_one_have_its_turn() {
        let room = Room::new(10);
        let lease = room.try_take(9).expect("all is left");
        let (mut given_up, mut next) = (wait(&room, 5), wait(&room, 1));
        assert!(poll(&mut given_up).is_none() && poll(&mut next).is_none());
        drop(given_up);
        assert!(poll(&mut next).is_some());
        assert!(room.0.waiters.borrow().list.is_empty());
        drop(lease);
        assert_eq!(room.0.left.get(), 10);
    }

    /// A lease wakes one waiter, which wakes the next if room is left: none sleeps beside room.
    #[test]
    fn every_waiter_is_woken_when_there_is_room_for_it() {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicUsize, Ordering};
        use std::task::Wake;

        #[derive(Default)]
        struct Count(AtomicUsize);
        impl Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }

        let room = Room::new(10);
        let lease = room.try_take(10).expect("all is left");
        let counts = [(); 3].map(|()| Arc::new(Count::default()));
        let woken = || counts.each_ref().map(|count| count.0.load(Ordering::Relaxed));
        let wakers = counts.each_ref().map(|count| Waker::from(Arc::clone(count)));
        let mut waits = [5, 5, 5].map(|bytes| wait(&room, bytes));
        let mut step = |at: usize| match waits[at].as_mut().poll(&mut Context::from_waker(&wakers[at])) {
            Poll::Ready(lease) => Some(lease),
            Poll::Pending => None,
        };
        assert!((0..3).all(|at| step(at).is_none()));
        drop(lease);
        assert_eq!(woken(), [1, 0, 0]);
        let first = step(0).expect("room");
        assert_eq!(woken(), [1, 1, 0]);
        let _second = step(1).expect("room");
        assert_eq!(woken(), [1, 1, 1], "woken to find none, and the next to be woken");
        assert!(step(2).is_none());
        drop(first);
        assert_eq!(woken(), [1, 1, 2]);
        assert!(step(2).is_some());
    }
}
