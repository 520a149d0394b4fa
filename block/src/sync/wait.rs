//! Lists of tasks, on any worker, that wait for a change, and their wake-up.
//!
//! A [`WaitList`] lies under the lock that guards the state its tasks wait for. A [`Monitor`] is such a lock with its
//! list, for most uses. A [`SingleFlight`] is a table of lists for work that one task does for all.
//!
//! Invariants: a task checks the state and joins the list under one hold of the lock, and a change is made under the
//! lock before the list is taken. So no wake-up is lost. Wakers are called without the lock: they queue a task, and
//! may signal its worker.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::future::poll_fn;
use std::hash::Hash;
use std::task::{Poll, Waker};

use super::Mutex;

/// The wakers of waiting tasks. Dropping a list wakes them.
#[derive(Debug, Default)]
#[must_use = "dropped at once, a list wakes its tasks with the lock held"]
pub struct WaitList {
    /// In ascending order of number.
    waiters: Vec<(u64, Waker)>,
    numbers: u64,
}

impl WaitList {
    /// Adds a task, unless it was the last one to be added. A task that no longer waits stays on the list and is woken
    /// to no effect.
    pub fn register(&mut self, waker: &Waker) {
        if !self.waiters.last().is_some_and(|(_, last)| last.will_wake(waker)) {
            self.push(waker);
        }
    }

    fn push(&mut self, waker: &Waker) -> u64 {
        self.numbers += 1;
        self.waiters.push((self.numbers, waker.clone()));
        self.numbers
    }

    /// Takes all tasks off the list. The caller must drop the returned list without the lock, which wakes them.
    pub fn take(&mut self) -> Self {
        Self {
            waiters: std::mem::take(&mut self.waiters),
            numbers: 0,
        }
    }

    /// Wakes all tasks and keeps the list's memory: for a list that only one thread reaches.
    pub fn wake_all(&mut self) {
        self.waiters.drain(..).for_each(|(_, waker)| waker.wake());
    }

    /// Returns the number of waiters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Returns true if no task waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Adds a task under a new number, or updates its waker if it is on the list under `number`.
    fn enter(&mut self, number: Option<u64>, waker: &Waker) -> u64 {
        let place = number.and_then(|number| self.place(number));
        match (number, place) {
            (Some(number), Some(place)) => {
                self.waiters[place].1.clone_from(waker);
                number
            }
            _ => self.push(waker),
        }
    }

    /// Removes one task from the list, if it is still there.
    fn leave(&mut self, number: u64) {
        if let Some(place) = self.place(number) {
            self.waiters.remove(place);
        }
    }

    fn place(&self, number: u64) -> Option<usize> {
        self.waiters
            .binary_search_by_key(&number, |(number, _)| *number)
            .ok()
    }
}

impl Drop for WaitList {
    fn drop(&mut self) {
        self.wake_all();
    }
}

/// A value behind a lock, and the tasks that wait for it to change.
#[derive(Debug, Default)]
pub struct Monitor<T> {
    state: Mutex<State<T>>,
}

#[derive(Debug, Default)]
struct State<T> {
    value: T,
    waiters: WaitList,
}

impl<T> Monitor<T> {
    /// Makes a monitor of `value` without waiters.
    pub fn new(value: T) -> Self {
        let waiters = WaitList::default();
        Self {
            state: Mutex::new(State { value, waiters }),
        }
    }

    /// Calls `look` with the value and the lock held. Wakes no task: state that a task may wait for must be changed by
    /// [`Monitor::change`].
    pub fn with<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        look(&mut self.state.lock().value)
    }

    /// Calls `change` with the value and the lock held, then wakes all waiters.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut state = self.state.lock();
        let result = change(&mut state.value);
        let woken = state.waiters.take();
        drop(state);
        drop(woken);
        result
    }

    /// Returns a guard that makes `change` when it is dropped, and then wakes all waiters.
    pub fn change_on_drop<F: FnOnce(&mut T)>(&self, change: F) -> ChangeOnDrop<'_, T, F> {
        ChangeOnDrop {
            monitor: self,
            change: Some(change),
        }
    }

    /// Waits until `ready`, which is called with the lock held at first and after each change, returns `Some`.
    pub async fn wait<R>(&self, mut ready: impl FnMut(&mut T) -> Option<R>) -> R {
        let mut place = Place {
            monitor: self,
            number: None,
        };
        poll_fn(|cx| {
            let mut state = self.state.lock();
            match ready(&mut state.value) {
                Some(found) => {
                    if let Some(number) = place.number.take() {
                        state.waiters.leave(number);
                    }
                    Poll::Ready(found)
                }
                None => {
                    place.number = Some(state.waiters.enter(place.number, cx.waker()));
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Returns the number of tasks that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state.lock().waiters.len()
    }
}

/// One wait's entry on the list of a monitor, removed on drop: a cancelled wait leaves no waker behind.
struct Place<'a, T> {
    monitor: &'a Monitor<T>,
    number: Option<u64>,
}

impl<T> Drop for Place<'_, T> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.monitor.state.lock().waiters.leave(number);
        }
    }
}

/// Guard that changes a [`Monitor`]'s value on drop, however its task ends.
#[must_use = "the change is made when this is dropped"]
pub struct ChangeOnDrop<'a, T, F: FnOnce(&mut T)> {
    monitor: &'a Monitor<T>,
    change: Option<F>,
}

impl<T, F: FnOnce(&mut T)> fmt::Debug for ChangeOnDrop<'_, T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChangeOnDrop")
    }
}

impl<T, F: FnOnce(&mut T)> Drop for ChangeOnDrop<'_, T, F> {
    fn drop(&mut self) {
        if let Some(change) = self.change.take() {
            self.monitor.change(change);
        }
    }
}

/// Work, by key, that one task does while all others that need it wait. Lies under a lock, like a [`WaitList`].
#[derive(Debug)]
pub struct SingleFlight<K> {
    under_way: HashMap<K, WaitList>,
}

impl<K> Default for SingleFlight<K> {
    fn default() -> Self {
        Self {
            under_way: HashMap::new(),
        }
    }
}

impl<K: Eq + Hash> SingleFlight<K> {
    /// Returns true if the caller must do the work for `key`, and then call [`SingleFlight::end`] however that ends. If
    /// another task does it, `waker` is woken at its end.
    pub fn begin(&mut self, key: K, waker: &Waker) -> bool {
        if let Some(waiters) = self.under_way.get_mut(&key) {
            waiters.register(waker);
            return false;
        }
        self.under_way.insert(key, WaitList::default());
        true
    }

    /// Returns true if the caller must do the work for `key`, as [`SingleFlight::begin`] does; nobody waits if another task does it.
    pub fn begin_unless_begun(&mut self, key: K) -> bool {
        match self.under_way.entry(key) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert(WaitList::default());
                true
            }
        }
    }

    /// Ends the work for `key`, done or not. Returns its waiters; the caller must drop the list without the lock.
    pub fn end(&mut self, key: &K) -> WaitList {
        self.under_way.remove(key).unwrap_or_default()
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Count {
        fn new() -> (Arc<Self>, Waker) {
            let count = Arc::new(Self::default());
            (Arc::clone(&count), Waker::from(count))
        }

        fn get(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn is_pending(wait: &mut (impl Future + Unpin), waker: &Waker) -> bool {
        Pin::new(wait).poll(&mut Context::from_waker(waker)).is_pending()
    }

    #[test]
    fn wait_list_wakes_each_waiter_once_on_drop() {
        let ((first, first_waker), (second, second_waker)) = (Count::new(), Count::new());
        let mut list = WaitList::default();
        list.register(&first_waker);
        list.register(&second_waker);
        list.register(&second_waker);
        let taken = list.take();
        assert!(list.is_empty());
        assert_eq!((taken.len(), first.get(), second.get()), (2, 0, 0));
        drop(taken);
        assert_eq!((first.get(), second.get()), (1, 1));
        list.register(&first_waker);
        list.wake_all();
        assert_eq!(first.get(), 2);
        list.register(&first_waker);
        drop(list);
        assert_eq!((first.get(), second.get()), (3, 1));
    }

    #[test]
    fn monitor_wait_ends_after_the_change_it_waits_for() {
        let (count, waker) = Count::new();
        let monitor = Monitor::new(0);
        let mut wait = Box::pin(monitor.wait(|value| (*value >= 2).then_some(*value)));
        assert!(is_pending(&mut wait, &waker));
        monitor.with(|value| *value += 1);
        assert_eq!(count.get(), 0, "a look wakes nobody");
        monitor.change(|value| *value = 1);
        assert_eq!(count.get(), 1);
        assert!(is_pending(&mut wait, &waker));
        drop(monitor.change_on_drop(|value| *value += 1));
        assert_eq!(count.get(), 2);
        let mut cx = Context::from_waker(&waker);
        assert_eq!(wait.as_mut().poll(&mut cx), Poll::Ready(2));
        assert_eq!(monitor.waiting(), 0);
    }

    #[test]
    fn dropped_wait_removes_only_itself_from_the_list() {
        let ((stays, stays_waker), (given_up, given_up_waker)) = (Count::new(), Count::new());
        let monitor = Monitor::new(false);
        let ready = |value: &mut bool| value.then_some(());
        let mut first = Box::pin(monitor.wait(ready));
        let mut second = Box::pin(monitor.wait(ready));
        for _ in 0..3 {
            assert!(is_pending(&mut first, &stays_waker));
            // The same task, or another one that took it over.
            assert!(is_pending(&mut second, Waker::noop()));
            assert!(is_pending(&mut second, &given_up_waker));
            assert_eq!(monitor.waiting(), 2, "a wait has one place");
        }
        drop(second);
        assert_eq!(monitor.waiting(), 1);
        monitor.change(|_| ());
        assert_eq!((stays.get(), given_up.get()), (1, 0));
        // The first was taken off the list already, and another is on it.
        let mut third = Box::pin(monitor.wait(ready));
        assert!(is_pending(&mut third, &given_up_waker));
        drop(first);
        monitor.change(|_| ());
        assert_eq!((stays.get(), given_up.get()), (1, 1));
        drop(third);
    }

    #[test]
    fn single_flight_admits_one_and_wakes_others_after() {
        let (count, waker) = Count::new();
        let mut flights = SingleFlight::default();
        assert!(flights.begin(1, Waker::noop()));
        assert!(flights.begin(2, Waker::noop()), "another key is other work");
        assert!(!flights.begin(1, &waker));
        drop(flights.end(&2));
        assert_eq!(count.get(), 0);
        drop(flights.end(&1));
        assert_eq!(count.get(), 1);
        assert!(flights.begin(1, &waker), "it can be done again");
    }
}
