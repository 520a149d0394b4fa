//! Cached slices of on-disk tables: L2 tables and refcount blocks, a few KiB at a time.
//!
//! A slice's number determines the range of guest clusters (L2) or host clusters (refcounts) that it describes. A
//! slice holds the bytes as they are on disk. The cache has a budget, and a part of one that it shares with other
//! images' ([`TableBudget`]). Past one of them, unused slices are dropped, least recently used first (the clock algorithm).
//!
//! Invariant: a slice that is dirty, being written back or pinned is never dropped.

use std::sync::Arc;
use std::task::Waker;

use block::sync::atomic::{AtomicBool, Ordering};
use block::sync::{SingleFlight, WaitList};
use rustc_hash::{FxHashMap, FxHashSet};

use super::data_run::DataRun;
use super::table_budget::TableBudget;
use crate::format::Geometry;
use crate::invariant::invariant;

/// The least number of slices that a cache can have, whatever its budgets.
const SLICES_MIN: usize = 16;

/// Of the slices that the cache has room for and that may be dropped, one of so many may come before it is asked for.
const AHEAD_FRACTION: usize = 4;

/// Returns the bytes of a slice of an image's tables.
pub(crate) fn slice_bytes_of(geometry: &Geometry) -> usize {
    geometry.cluster_size().min(4096) as usize
}

/// One cached slice.
#[derive(Debug)]
pub(crate) struct Slice {
    key: u64,
    /// Shared with a write-back set while that is being written; a change copies it then.
    data: Arc<[u8]>,
    dirty: bool,
    /// Part of a write-back that has not ended.
    flushing: bool,
    /// The number of changes to come that need the slice to stay cached.
    pins: u32,
    used: AtomicBool,
    /// True if its entries may be changed and written through; otherwise they must be checked first.
    checked: bool,
    /// Of an L2 table's slice: clusters that can be found without a look at their entries.
    run: DataRun,
}

/// A cached slice as it is to a reader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached<'a> {
    pub(crate) bytes: &'a [u8],
    /// True if it may be written through.
    pub(crate) checked: bool,
    pub(crate) run: DataRun,
}

/// Slices that have changed since [`SliceCache::watch`], as they were then; `None` for those that were not on disk yet.
pub(crate) type Before = FxHashMap<u64, Option<Arc<[u8]>>>;

/// The slices of one kind of table.
#[derive(Debug)]
pub(crate) struct SliceCache {
    index: FxHashMap<u64, u32>,
    slots: Vec<Option<Slice>>,
    free: Vec<u32>,
    hand: usize,
    slice_bytes: usize,
    /// The number of slices that the cache was given room for.
    budget_max: usize,
    /// The number of slices to keep: less, if some of the room is left to others.
    budget: usize,
    /// The number of slices to keep, however much other images' caches hold.
    least: usize,
    together: TableBudget,
    /// Nothing could be dropped when a slice came, and many were dirty.
    crowded: bool,
    dirty: FxHashSet<u64>,
    loading: SingleFlight<u64>,
    /// The slice after those that were loaded last, which a scan asks for next.
    next: Option<u64>,
    before: Option<Before>,
}

impl SliceCache {
    /// Creates an empty cache for slices of `slice_bytes`, which keeps about `budget_bytes` of them.
    pub(crate) fn new(slice_bytes: usize, budget_bytes: u64) -> Self {
        let budget = usize::try_from(budget_bytes).unwrap_or(usize::MAX) / slice_bytes;
        let budget = budget.max(SLICES_MIN);
        Self {
            index: FxHashMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            hand: 0,
            slice_bytes,
            budget_max: budget,
            budget,
            least: SLICES_MIN,
            together: TableBudget::default(),
            crowded: false,
            dirty: FxHashSet::default(),
            loading: SingleFlight::default(),
            next: None,
            before: None,
        }
    }

    /// Returns an empty cache of the same size, with the same share.
    pub(crate) fn emptied(&self) -> Self {
        let mut cache = Self::new(self.slice_bytes, (self.budget_max * self.slice_bytes) as u64);
        cache.least = self.least;
        cache.together = self.together.clone();
        cache
    }

    /// Keeps `bytes` at least, whatever other images' caches hold.
    pub(crate) fn keep_at_least(&mut self, bytes: u64) {
        let least = usize::try_from(bytes).unwrap_or(usize::MAX) / self.slice_bytes;
        self.least = least.clamp(SLICES_MIN, self.budget_max);
    }

    /// Counts what the cache holds to a budget that is shared with other caches.
    pub(crate) fn share(&mut self, together: &TableBudget) {
        let bytes = self.index.len() * self.slice_bytes;
        self.together.give_back(bytes);
        together.take(bytes);
        self.together = together.clone();
    }

    /// Returns the number of slices that the cache was given room for.
    pub(crate) fn budget_max(&self) -> usize {
        self.budget_max
    }

    /// Leaves `bytes` of the room to others, but half of it at most.
    pub(crate) fn leave_room(&mut self, bytes: usize) {
        let left = bytes.div_ceil(self.slice_bytes).min(self.budget_max / 2);
        self.budget = (self.budget_max - left).max(SLICES_MIN);
    }

    pub(crate) fn slice_bytes(&self) -> usize {
        self.slice_bytes
    }

    /// Returns the bytes of a slice, if it is cached.
    #[inline]
    pub(crate) fn get(&self, key: u64) -> Option<&[u8]> {
        Some(self.get_with_state(key)?.bytes)
    }

    /// Returns a slice, if it is cached.
    #[inline]
    pub(crate) fn get_with_state(&self, key: u64) -> Option<Cached<'_>> {
        let slice = self.slot(key)?;
        if !slice.used.load(Ordering::Relaxed) {
            slice.used.store(true, Ordering::Relaxed);
        }
        Some(Cached {
            bytes: &slice.data,
            checked: slice.checked,
            run: slice.run,
        })
    }

    /// Returns the bytes of an unchecked slice and its run, and marks it checked; the caller must check it.
    pub(crate) fn take_unchecked(&mut self, key: u64) -> Option<(&mut [u8], &mut DataRun)> {
        let slice = self.slot_mut(key)?;
        if std::mem::replace(&mut slice.checked, true) {
            return None;
        }
        Some((Arc::make_mut(&mut slice.data), &mut slice.run))
    }

    /// Replaces the run of a cached slice, which must be one of it.
    pub(crate) fn set_run(&mut self, key: u64, run: DataRun) {
        if let Some(slice) = self.slot_mut(key) {
            slice.run = run;
        }
    }

    #[inline]
    fn slot(&self, key: u64) -> Option<&Slice> {
        let slot = *self.index.get(&key)?;
        self.slots.get(slot as usize)?.as_ref()
    }

    fn slot_mut(&mut self, key: u64) -> Option<&mut Slice> {
        let slot = *self.index.get(&key)?;
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// Returns the bytes of a slice, if it is cached, and leaves the order of eviction as it is.
    pub(crate) fn peek(&self, key: u64) -> Option<&[u8]> {
        Some(&self.slot(key)?.data)
    }

    pub(crate) fn contains(&self, key: u64) -> bool {
        self.index.contains_key(&key)
    }

    /// Returns the bytes of a cached slice to change; it becomes dirty, and has no run any more.
    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut [u8]> {
        let (bytes, run) = self.change(key)?;
        *run = DataRun::default();
        Some(bytes)
    }

    /// Returns the bytes of a cached slice to change, and the run that the caller must change with them; it becomes dirty.
    pub(crate) fn change(&mut self, key: u64) -> Option<(&mut [u8], &mut DataRun)> {
        let slot = *self.index.get(&key)?;
        let slice = self.slots.get_mut(slot as usize)?.as_mut()?;
        // Its entries could lead the write to the image's own structures.
        invariant!(slice.checked, "slice {key} is changed before it was checked");
        slice.used.store(true, Ordering::Relaxed);
        if !slice.dirty {
            slice.dirty = true;
            self.dirty.insert(key);
            if let Some(before) = &mut self.before {
                before.entry(key).or_insert_with(|| Some(Arc::clone(&slice.data)));
            }
        }
        Some((Arc::make_mut(&mut slice.data), &mut slice.run))
    }

    /// Keeps slices that change from now on as they are now, until [`SliceCache::end_watch`]. No slice is dirty.
    pub(crate) fn watch(&mut self) {
        invariant!(self.dirty.is_empty(), "dirty slices are not what is on disk");
        self.before = Some(Before::default());
    }

    /// Ends the watch, if there is one, and returns the slices that have changed, as they were.
    pub(crate) fn end_watch(&mut self) -> Before {
        self.before.take().unwrap_or_default()
    }

    /// Puts slices that have changed since the watch began in their places in `bytes`, which were read from the slices `keys`, as
    /// they were then.
    pub(crate) fn restore(&self, keys: std::ops::Range<u64>, bytes: &mut [u8]) {
        let Some(before) = &self.before else { return };
        for (key, bytes) in keys.zip(bytes.chunks_exact_mut(self.slice_bytes)) {
            match before.get(&key) {
                Some(Some(data)) => bytes.copy_from_slice(data),
                Some(None) => bytes.fill(0),
                None => {}
            }
        }
    }

    /// Inserts a slice, clean or dirty, unless it is cached already. Makes room first if possible.
    pub(crate) fn insert(&mut self, key: u64, data: Arc<[u8]>, dirty: bool) {
        self.put(key, data, dirty, true);
    }

    /// Inserts a slice as [`SliceCache::insert`] does, clean and unchecked.
    pub(crate) fn insert_unchecked(&mut self, key: u64, data: Arc<[u8]>) {
        self.put(key, data, false, false);
    }

    fn put(&mut self, key: u64, data: Arc<[u8]>, dirty: bool, checked: bool) {
        invariant!(
            data.len() == self.slice_bytes,
            "slice {key} has {} bytes",
            data.len()
        );
        // One task loads a slice, and nobody makes one that is cached: one of the two would lose its changes.
        invariant!(!self.contains(key), "slice {key} is cached twice");
        if self.contains(key) {
            return;
        }
        while self.is_full() {
            if self.evict_one().is_none() {
                self.crowded = self.dirty.len() > self.least / 2;
                break;
            }
        }
        let slice = Slice {
            key,
            data,
            dirty,
            flushing: false,
            pins: 0,
            used: AtomicBool::new(true),
            checked,
            run: DataRun::default(),
        };
        if dirty {
            self.dirty.insert(key);
            if let Some(before) = &mut self.before {
                before.entry(key).or_insert(None);
            }
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                (self.slots.len() - 1) as u32
            }
        };
        if let Some(place) = self.slots.get_mut(slot as usize) {
            invariant!(place.is_none(), "the slot of slice {key} is in use");
            *place = Some(slice);
            self.index.insert(key, slot);
            self.together.take(self.slice_bytes);
        }
    }

    /// Returns a copy of the bytes of a slice to insert. If another one has to be dropped for it, the copy is in its memory: of
    /// memory that comes and goes with each slice, the heap would lose a part.
    pub(crate) fn copy_of(&mut self, bytes: &[u8]) -> Arc<[u8]> {
        let mut memory = if self.is_full() { self.evict_one() } else { None };
        if let Some(data) = memory.as_mut().and_then(Arc::get_mut)
            && data.len() == bytes.len()
        {
            data.copy_from_slice(bytes);
        } else {
            memory = None;
        }
        memory.unwrap_or_else(|| bytes.into())
    }

    /// Returns true if a slice that comes takes the place of another one, which [`SliceCache::copy_of`] may have dropped already.
    pub(crate) fn is_replacing(&self) -> bool {
        self.index.len() + 1 >= self.budget || self.is_full()
    }

    /// Returns true if a slice has to go before another one comes.
    fn is_full(&self) -> bool {
        let count = self.index.len();
        count >= self.budget || (count >= self.least && self.together.is_full())
    }

    /// Drops one slice that may be dropped, and returns its memory. `None` if there is none.
    fn evict_one(&mut self) -> Option<Arc<[u8]>> {
        (0..self.slots.len() * 2).find_map(|_| self.look_at_next())
    }

    /// Looks at the next `count` slots, as far as there are so many, and drops the slices that may be dropped and have not been used since
    /// they were last looked at; keeps the least number. Returns the number of those dropped.
    pub(crate) fn drop_unused(&mut self, count: usize) -> usize {
        (0..count.min(self.slots.len()))
            .filter(|_| self.index.len() > self.least && self.look_at_next().is_some())
            .count()
    }

    /// Looks at the next slot. Drops its slice, and returns the memory, if that may be dropped and has not been used since the last look.
    fn look_at_next(&mut self) -> Option<Arc<[u8]>> {
        let hand = self.hand;
        self.hand = (hand + 1) % self.slots.len().max(1);
        let place = self.slots.get_mut(hand)?;
        let slice = place.as_mut()?;
        if slice.dirty || slice.flushing || slice.pins > 0 || slice.used.swap(false, Ordering::Relaxed) {
            return None;
        }
        let dropped = place.take()?;
        self.forget(dropped.key);
        self.free.push(hand as u32);
        Some(dropped.data)
    }

    /// Takes a slice out of the index, and returns its slot.
    fn forget(&mut self, key: u64) -> Option<u32> {
        let slot = self.index.remove(&key)?;
        self.together.give_back(self.slice_bytes);
        Some(slot)
    }

    /// Drops a slice whatever its state: its table no longer exists.
    pub(crate) fn discard(&mut self, key: u64) {
        // The slices of a table that is shared are never changed, so no change of one can be lost.
        invariant!(
            self.slot(key)
                .is_none_or(|slice| !slice.dirty && !slice.flushing && slice.pins == 0),
            "slice {key} is discarded while it is changed"
        );
        if let Some(slot) = self.forget(key) {
            if let Some(place) = self.slots.get_mut(slot as usize) {
                *place = None;
            }
            self.free.push(slot);
            self.dirty.remove(&key);
        }
    }

    /// Keeps a cached slice in the cache until [`SliceCache::unpin`].
    pub(crate) fn pin(&mut self, key: u64) {
        // A change to come finds its slice only if that is in the cache now.
        invariant!(self.contains(key), "slice {key} is pinned and not cached");
        if let Some(slice) = self.slot_mut(key) {
            slice.pins += 1;
        }
    }

    /// Undoes one [`SliceCache::pin`].
    pub(crate) fn unpin(&mut self, key: u64) {
        // Dropped or unpinned too early, it could have been evicted before the change that needs it.
        invariant!(
            self.slot(key).is_some_and(|slice| slice.pins > 0),
            "slice {key} is not pinned"
        );
        if let Some(slice) = self.slot_mut(key) {
            slice.pins = slice.pins.saturating_sub(1);
        }
    }

    /// Returns the numbers of the dirty slices, in no order.
    pub(crate) fn dirty_keys(&self) -> impl Iterator<Item = u64> {
        self.dirty.iter().copied()
    }

    pub(crate) fn dirty_count(&self) -> usize {
        self.dirty.len()
    }

    /// Returns true if so many slices are dirty that eviction will soon find nothing to drop.
    pub(crate) fn is_dirty_past_budget(&self) -> bool {
        self.dirty.len() > self.budget / 2 || self.crowded
    }

    /// Takes all dirty slices as they are now, in order of their numbers, and marks them as being written. No byte is
    /// copied: the lock that the caller holds keeps all queues from their requests.
    pub(crate) fn take_dirty(&mut self) -> Vec<(u64, Arc<[u8]>)> {
        self.crowded = false;
        let mut keys: Vec<u64> = self.dirty.drain().collect();
        keys.sort_unstable();
        let mut copies = Vec::with_capacity(keys.len());
        for key in keys {
            // Otherwise its changes are lost.
            invariant!(
                self.slot(key).is_some_and(|slice| slice.dirty),
                "dirty slice {key} is not cached"
            );
            if let Some(slice) = self.slot_mut(key) {
                slice.dirty = false;
                slice.flushing = true;
                copies.push((key, Arc::clone(&slice.data)));
            }
        }
        copies
    }

    /// Ends the write-back of these slices. If it failed they are dirty again.
    pub(crate) fn end_flush(&mut self, keys: impl Iterator<Item = u64>, written: bool) {
        for key in keys {
            // One round at a time; a slice stays until its own has ended.
            invariant!(
                self.slot(key).is_some_and(|slice| slice.flushing),
                "slice {key} is not being written"
            );
            let Some(slice) = self.slot_mut(key) else { continue };
            slice.flushing = false;
            if !written && !slice.dirty {
                slice.dirty = true;
                self.dirty.insert(key);
            }
        }
    }

    /// Returns true if the caller must load the slice. If another task is loading it, `waker` is woken at the end.
    pub(crate) fn begin_load(&mut self, key: u64, waker: &Waker) -> bool {
        // What was read would replace what has been changed since.
        invariant!(!self.contains(key), "slice {key} is loaded and cached");
        self.loading.begin(key, waker)
    }

    /// Begins the loads of the slices after `key`, which the caller is about to load, and before `end`, if `key` follows what was loaded
    /// last: a scan that waited for one slice after the other would take long. Returns the slice after them. There are none of those that
    /// are cached or being loaded, and no more than may be dropped for.
    pub(crate) fn begin_loads_ahead(&mut self, key: u64, end: u64) -> u64 {
        let mut next = key + 1;
        if self.next == Some(key) {
            let room = if self.together.is_full() {
                self.least
            } else {
                self.budget
            };
            let most = room.saturating_sub(self.dirty.len()) / AHEAD_FRACTION;
            let end = end.min(next.saturating_add(most as u64));
            while next < end && !self.contains(next) && self.loading.begin_unless_begun(next) {
                next += 1;
            }
        }
        self.next = Some(next);
        next
    }

    /// Ends a load, successful or not. Returns the waiters to wake; drop the list without the lock.
    pub(crate) fn end_load(&mut self, key: u64) -> WaitList {
        self.loading.end(&key)
    }
}

impl Drop for SliceCache {
    fn drop(&mut self) {
        self.together.give_back(self.index.len() * self.slice_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(byte: u8) -> Arc<[u8]> {
        vec![byte; 512].into()
    }

    #[test]
    fn slice_cache_keeps_budget_by_dropping_clean_slices() {
        let mut cache = SliceCache::new(512, 16 * 512);
        for key in 0..8 {
            cache.insert(key, slice(1), true);
        }
        cache.insert(8, slice(2), false);
        cache.pin(8);
        for key in 100..200 {
            cache.insert(key, slice(3), false);
        }
        assert!(cache.index.len() <= 16);
        assert!(
            (0..=8).all(|key| cache.contains(key)),
            "dirty and pinned slices stay"
        );
        cache.unpin(8);
        let copies = cache.take_dirty();
        assert_eq!(copies.len(), 8);
        for key in 200..300 {
            cache.insert(key, slice(4), false);
        }
        assert!((0..8).all(|key| cache.contains(key)), "slices being written stay");
        cache.end_flush(copies.iter().map(|copy| copy.0), true);
        for key in 300..400 {
            cache.insert(key, slice(5), false);
        }
        assert!((0..=8).all(|key| !cache.contains(key)));
    }

    #[test]
    fn copy_of_takes_memory_of_the_slice_that_is_dropped_for_it() {
        let mut cache = SliceCache::new(512, 16 * 512);
        for key in 0..16 {
            let bytes = cache.copy_of(&[1; 512]);
            cache.insert(key, bytes, false);
        }
        let memory = |cache: &SliceCache| {
            let data = cache.slots.iter().flatten().map(|slice| slice.data.as_ptr());
            data.collect::<std::collections::BTreeSet<_>>()
        };
        let before = memory(&cache);
        for key in 16..100 {
            let bytes = cache.copy_of(&[key as u8; 512]);
            assert_eq!(*bytes, [key as u8; 512]);
            cache.insert(key, bytes, false);
            assert_eq!(memory(&cache), before);
        }
        // A slice that is being written keeps its memory, and its bytes.
        let held: Vec<_> = cache
            .slots
            .iter()
            .flatten()
            .map(|slice| Arc::clone(&slice.data))
            .collect();
        let bytes = cache.copy_of(&[0; 512]);
        assert!(
            held.iter()
                .all(|data| data[0] != 0 && data.as_ptr() != bytes.as_ptr())
        );
    }

    #[test]
    fn slice_cache_leaves_room_to_others_but_half_at_most() {
        let mut cache = SliceCache::new(512, 64 * 512);
        let fill = |cache: &mut SliceCache, from: u64| {
            for key in from..from + 100 {
                cache.insert(key, slice(1), false);
            }
            cache.index.len()
        };
        assert_eq!(fill(&mut cache, 0), 64);
        cache.leave_room(10 * 512 - 1);
        assert_eq!(fill(&mut cache, 100), 54);
        cache.leave_room(1 << 30);
        assert_eq!(fill(&mut cache, 200), 32);
        cache.leave_room(0);
        assert_eq!(fill(&mut cache, 300), 64);
    }

    #[test]
    fn caches_with_a_common_budget_hold_no_more_than_it_together() {
        let together = TableBudget::default();
        together.set_limit_bytes(40 * 512);
        let mut caches = [0; 3].map(|_| {
            let mut cache = SliceCache::new(512, 64 * 512);
            cache.share(&together);
            cache
        });
        let fill = |cache: &mut SliceCache, keys: std::ops::Range<u64>| {
            for key in keys {
                let bytes = cache.copy_of(&[1; 512]);
                cache.insert(key, bytes, false);
            }
            cache.index.len()
        };
        assert_eq!(fill(&mut caches[0], 0..100), 40, "nobody else has any");
        assert_eq!(
            fill(&mut caches[1], 0..100),
            SLICES_MIN,
            "which it has in any case"
        );
        assert_eq!(together.used_bytes(), 56 * 512);
        // What nobody used since the last look goes, but for the least number.
        let [first, second, third] = &mut caches;
        let dropped = first.drop_unused(1000) + first.drop_unused(1000);
        assert_eq!(dropped, 40 - SLICES_MIN);
        assert_eq!(fill(second, 200..300), 24, "as many as the first one has lost");
        second.discard(299);
        assert_eq!(together.used_bytes(), 39 * 512);
        assert_eq!(fill(third, 0..100), SLICES_MIN);
        drop(caches);
        assert_eq!(together.used_bytes(), 0);
    }

    #[test]
    fn drop_unused_keeps_what_was_used_and_what_may_not_be_dropped() {
        let mut cache = SliceCache::new(512, 64 * 512);
        for key in 0..60 {
            cache.insert(key, slice(1), key < 10);
        }
        cache.pin(30);
        let flushed = cache.take_dirty();
        assert_eq!(cache.drop_unused(60), 0, "all were used");
        assert!(cache.get(40).is_some());
        assert_eq!(
            cache.drop_unused(20),
            10,
            "of the next twenty ten are being written"
        );
        assert_eq!(cache.drop_unused(1000), 50 - SLICES_MIN);
        assert!([0, 9, 30, 40].iter().all(|&key| cache.contains(key)));
        cache.end_flush(flushed.iter().map(|copy| copy.0), true);
    }

    #[test]
    fn past_a_common_budget_few_dirty_slices_are_many() {
        let together = TableBudget::default();
        let mut cache = SliceCache::new(512, 1 << 20);
        cache.share(&together);
        for key in 0..20 {
            cache.insert(key, slice(1), true);
        }
        assert!(!cache.is_dirty_past_budget());
        together.set_limit_bytes(19 * 512);
        cache.insert(20, slice(1), true);
        assert!(cache.is_dirty_past_budget());
        cache.take_dirty();
        assert!(!cache.is_dirty_past_budget());
    }

    #[test]
    fn slice_cache_keeps_slices_that_are_used() {
        let mut cache = SliceCache::new(512, 16 * 512);
        for key in 0..=16 {
            cache.insert(key, slice(1), false);
        }
        for key in 100..200 {
            assert!(cache.get(5).is_some(), "dropped before {key}");
            cache.insert(key, slice(1), false);
        }
        assert!((6..=16).all(|key| !cache.contains(key)));
    }

    #[test]
    fn failed_write_back_leaves_every_slice_dirty() {
        let mut cache = SliceCache::new(512, 1 << 20);
        cache.insert(1, slice(1), true);
        cache.insert(2, slice(1), true);
        let copies = cache.take_dirty();
        cache.get_mut(1).expect("cached")[0] = 9;
        cache.end_flush(copies.iter().map(|copy| copy.0), false);
        assert_eq!(cache.take_dirty().len(), 2);
    }

    #[test]
    fn slice_changed_during_write_back_stays_dirty() {
        let mut cache = SliceCache::new(512, 1 << 20);
        cache.insert(1, slice(1), true);
        let copies = cache.take_dirty();
        cache.get_mut(1).expect("cached")[0] = 9;
        cache.end_flush(copies.iter().map(|copy| copy.0), true);
        assert_eq!(copies[0].1[0], 1);
        assert_eq!(cache.take_dirty()[0].1[0], 9);
    }

    #[test]
    fn take_dirty_copies_no_slice_that_stays_as_it_is() {
        let mut cache = SliceCache::new(512, 1 << 20);
        cache.insert(1, slice(1), true);
        cache.insert(2, slice(1), true);
        let place = |cache: &SliceCache, key| cache.peek(key).map(<[u8]>::as_ptr);
        let (first, second) = (place(&cache, 1), place(&cache, 2));
        let taken = cache.take_dirty();
        assert_eq!(Some(taken[0].1.as_ptr()), first);
        cache.get_mut(2).expect("cached")[0] = 9;
        assert_eq!(place(&cache, 1), first);
        assert_ne!(place(&cache, 2), second, "it was changed meanwhile");
        drop(taken);
        cache.get_mut(1).expect("cached")[0] = 9;
        assert_eq!(place(&cache, 1), first, "nobody else has it any more");
    }

    #[test]
    fn begin_load_makes_second_caller_wait_for_first() {
        let mut cache = SliceCache::new(512, 1 << 20);
        assert!(cache.begin_load(1, Waker::noop()));
        assert!(!cache.begin_load(1, Waker::noop()));
        assert_eq!(cache.end_load(1).len(), 1);
        assert!(cache.begin_load(1, Waker::noop()));
    }

    #[test]
    fn loads_go_ahead_of_a_scan_only_and_as_far_as_slices_may_be_dropped() {
        let mut cache = SliceCache::new(512, 64 * 512);
        assert_eq!(cache.begin_loads_ahead(8, 100), 9, "the first");
        assert_eq!(cache.begin_loads_ahead(30, 100), 31, "elsewhere");
        assert_eq!(cache.begin_loads_ahead(31, 36), 36, "to the end of the block");
        assert!(!cache.begin_load(35, Waker::noop()), "begun");
        assert_eq!(cache.begin_loads_ahead(36, 100), 53, "a quarter of the cache");
        assert!(cache.begin_load(56, Waker::noop()));
        assert_eq!(
            cache.begin_loads_ahead(53, 100),
            56,
            "somebody loads the next one"
        );
        cache.insert(58, slice(1), false);
        assert_eq!(cache.begin_loads_ahead(56, 100), 58, "the next one is cached");
        for key in 100..160 {
            cache.insert(key, slice(1), true);
        }
        assert_eq!(cache.begin_loads_ahead(58, 100), 60, "four may be dropped");
    }
}

#[cfg(all(test, debug_assertions, not(feature = "canary")))]
mod invariant_tests {
    use super::*;

    fn cache() -> SliceCache {
        let mut cache = SliceCache::new(512, 1 << 20);
        cache.insert(1, vec![0; 512].into(), true);
        cache
    }

    #[test]
    #[should_panic(expected = "slice 2 is pinned and not cached")]
    fn pin_panics_when_slice_is_not_cached() {
        cache().pin(2);
    }

    #[test]
    #[should_panic(expected = "slice 1 is not pinned")]
    fn unpin_panics_when_slice_is_not_pinned() {
        let mut cache = cache();
        cache.pin(1);
        cache.unpin(1);
        cache.unpin(1);
    }

    #[test]
    #[should_panic(expected = "slice 1 is discarded while it is changed")]
    fn discard_panics_when_slice_is_dirty() {
        cache().discard(1);
    }

    #[test]
    #[should_panic(expected = "slice 1 is not being written")]
    fn end_flush_panics_when_slice_is_not_being_written() {
        cache().end_flush([1].into_iter(), true);
    }

    #[test]
    #[should_panic(expected = "slice 1 is loaded and cached")]
    fn begin_load_panics_when_slice_is_cached() {
        cache().begin_load(1, Waker::noop());
    }

    #[test]
    #[should_panic(expected = "slice 3 is changed before it was checked")]
    fn get_mut_panics_when_slice_is_unchecked() {
        let mut cache = cache();
        cache.insert_unchecked(3, vec![0; 512].into());
        cache.get_mut(3);
    }
}
