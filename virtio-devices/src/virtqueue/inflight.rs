//! Inflight records: the chains of a queue that are in flight, in memory that outlives this process.
//!
//! The client keeps a piece of shared memory for us. Each chain is marked there when it is taken and
//! unmarked when its answer is published, so that the server that follows a killed one knows what to do
//! again. Spec: vhost-user, "Inflight I/O tracking", the split virtqueue region:
//!
//! ```text
//!  0 features  8 version  10 entries  12 last_batch_head  14 used_idx     16 + 16 * head, for each head:
//!                                                         0 inflight   6 next   8 counter
//! ```
//!
//! Invariants:
//! - killed between any two stores, the next server finds each chain taken and not published, in the order
//!   they were taken, and none that was published. So the order of stores here is the specification's: a
//!   mark follows its counter; the batch's list is complete before the used index moves, marks are cleared
//!   after it, and `used_idx` follows last.
//! - the client can write all of it at any time. It is read only when a queue starts, each word once and
//!   checked, and what the marks mean meanwhile is known here.

#![expect(
    unsafe_code,
    reason = "the words are shared with the client and reached through raw pointers"
)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use vm_memory::MmapRegion;

/// The layout that is spoken here.
const VERSION: u16 = 1;
/// Offsets of the fields of a region, in bytes.
const FEATURES_AT: usize = 0;
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;
/// The size of what comes before the entries, and of each of them, in bytes.
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Offsets of the fields of an entry, in bytes.
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
/// Regions of queues begin at multiples of this, in bytes.
const REGION_ALIGN: usize = 64;

/// An inconsistency in a region.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum InflightError {
    /// The region is laid out in a way we do not know.
    #[error("the inflight region has version {version} and features {features:#x}; expected {VERSION} and 0")]
    Layout {
        /// The version.
        version: u16,
        /// The feature bits.
        features: u64,
    },
    /// The region was made for another queue.
    #[error("the inflight region has {found} entries; expected {size} to {room}")]
    Entries {
        /// The number that the region states.
        found: u16,
        /// The queue's entries.
        size: u16,
        /// The largest number that fits.
        room: u16,
    },
    /// The used ring is further ahead than one batch can be.
    #[error("the inflight region is at used index {found}, the used ring at {used}, in a queue of {size}")]
    UsedIndex {
        /// The index in the region.
        found: u16,
        /// The index in the used ring.
        used: u16,
        /// The queue's entries.
        size: u16,
    },
    /// The list of the last batch leaves the table.
    #[error("the last batch of the inflight region names descriptor {head} of {size}")]
    BatchHead {
        /// The descriptor.
        head: u16,
        /// The queue's entries.
        size: u16,
    },
}

/// The piece of the client's memory in which one queue's chains are marked.
#[derive(Clone)]
pub struct InflightRegion {
    map: Arc<MmapRegion>,
    offset: usize,
    entries: u16,
    recover: bool,
}

impl fmt::Debug for InflightRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InflightRegion")
            .field("offset", &self.offset)
            .field("entries", &self.entries)
            .field("recover", &self.recover)
            .finish_non_exhaustive()
    }
}

impl InflightRegion {
    /// The size of the region of a queue of `entries`, in bytes.
    #[must_use]
    pub fn bytes(entries: u16) -> usize {
        (HEADER_BYTES + ENTRY_BYTES * usize::from(entries)).next_multiple_of(REGION_ALIGN)
    }

    /// The region of queue `index` in `map`, all of whose queues have `entries`; `None` if the map ends
    /// before it. With `recover`, marks that are there are believed; otherwise nothing is in flight.
    #[must_use]
    pub fn new(map: &Arc<MmapRegion>, index: usize, entries: u16, recover: bool) -> Option<Self> {
        let offset = index.checked_mul(Self::bytes(entries))?;
        let end = offset.checked_add(Self::bytes(entries))?;
        (end <= map.size()).then(|| Self {
            map: Arc::clone(map),
            offset,
            entries,
            recover,
        })
    }
}

/// The chains that a killed server left in flight.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Recovered {
    /// The chains it had taken and not given back, in the order it took them.
    pub(crate) heads: Vec<u16>,
    /// The available index of the first chain it had not taken.
    pub(crate) next_available: u16,
}

/// The marks of a queue that runs.
pub(crate) struct InflightQueue {
    _map: Arc<MmapRegion>,
    /// The region: mapped as long as `_map` lives, aligned to 64 bytes, with room for `size` entries.
    base: NonNull<u8>,
    size: u16,
    counter: u64,
    last_batch_head: u16,
    /// Given back and not published.
    batch: Vec<u16>,
}

impl fmt::Debug for InflightQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InflightQueue")
            .field("counter", &self.counter)
            .field("batch", &self.batch.len())
            .finish_non_exhaustive()
    }
}

/// Returns the offset of the entry of `head`.
fn entry(head: u16) -> usize {
    HEADER_BYTES + ENTRY_BYTES * usize::from(head)
}

impl InflightQueue {
    /// Begins to mark the chains of a queue of `size` whose used ring is at `used`. Also says what a killed
    /// server left, if the region is to be believed and was in use.
    ///
    /// # Errors
    ///
    /// [`InflightError`] if what the region says cannot be.
    pub(crate) fn open(
        region: &InflightRegion,
        size: u16,
        used: u16,
    ) -> Result<(Self, Option<Recovered>), InflightError> {
        let room = region.entries;
        if size > room {
            return Err(InflightError::Entries {
                found: room,
                size,
                room,
            });
        }
        let start = region.map.as_ptr().wrapping_add(region.offset);
        let mut queue = Self {
            _map: Arc::clone(&region.map),
            base: NonNull::new(start).expect("no mapping contains the null address"),
            size,
            counter: 0,
            last_batch_head: 0,
            batch: Vec::with_capacity(usize::from(size)),
        };
        let version = queue.u16_at(VERSION_AT).load(Ordering::Acquire);
        if region.recover && version != 0 {
            let recovered = queue.recover(version, room, used)?;
            return Ok((queue, Some(recovered)));
        }
        for head in 0..size {
            queue.set_mark(head, false);
        }
        store(queue.u64_at(FEATURES_AT), 0);
        store_u16(queue.u16_at(ENTRIES_AT), room);
        store_u16(queue.u16_at(LAST_BATCH_HEAD_AT), 0);
        store_u16(queue.u16_at(USED_IDX_AT), used);
        // Last: until here the region counts as never used.
        store_u16(queue.u16_at(VERSION_AT), VERSION);
        Ok((queue, None))
    }

    /// Puts right what a kill may have left half-done, and collects the marks.
    fn recover(&mut self, version: u16, room: u16, used: u16) -> Result<Recovered, InflightError> {
        let size = self.size;
        let features = self.u64_at(FEATURES_AT).load(Ordering::Relaxed);
        if version != VERSION || features != 0 {
            return Err(InflightError::Layout { version, features });
        }
        let found = self.u16_at(ENTRIES_AT).load(Ordering::Relaxed);
        if found < size || found > room {
            return Err(InflightError::Entries { found, size, room });
        }
        // So many answers were published and perhaps not unmarked.
        let found = self.u16_at(USED_IDX_AT).load(Ordering::Relaxed);
        let batch = used.wrapping_sub(found);
        if batch > size {
            return Err(InflightError::UsedIndex { found, used, size });
        }
        let mut head = self.u16_at(LAST_BATCH_HEAD_AT).load(Ordering::Relaxed);
        for _ in 0..batch {
            if head >= size {
                return Err(InflightError::BatchHead { head, size });
            }
            self.set_mark(head, false);
            head = self.u16_at(entry(head) + NEXT_AT).load(Ordering::Relaxed);
        }
        store_u16(self.u16_at(USED_IDX_AT), used);

        let marked = |head: &u16| self.u8_at(entry(*head)).load(Ordering::Relaxed) != 0;
        let counted = |head: u16| {
            (
                self.u64_at(entry(head) + COUNTER_AT).load(Ordering::Relaxed),
                head,
            )
        };
        let mut list: Vec<(u64, u16)> = (0..size).filter(marked).map(counted).collect();
        list.sort_unstable();
        self.counter = list.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let in_flight = u16::try_from(list.len()).unwrap_or(size);
        Ok(Recovered {
            heads: list.into_iter().map(|(_, head)| head).collect(),
            next_available: used.wrapping_add(in_flight),
        })
    }

    /// Marks a chain that was taken and has a descriptor number below the queue's size.
    #[inline]
    pub(crate) fn take(&mut self, head: u16) {
        store(self.u64_at(entry(head) + COUNTER_AT), self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.set_mark(head, true);
    }

    /// Notes that a chain will be among those published next.
    #[inline]
    pub(crate) fn give_back(&mut self, head: u16) {
        store_u16(self.u16_at(entry(head) + NEXT_AT), self.last_batch_head);
        self.last_batch_head = head;
        store_u16(self.u16_at(LAST_BATCH_HEAD_AT), head);
        self.batch.push(head);
    }

    /// Unmarks what has just been published; the used ring is at `used` now.
    #[inline]
    pub(crate) fn published(&mut self, used: u16) {
        for index in 0..self.batch.len() {
            self.set_mark(self.batch[index], false);
        }
        self.batch.clear();
        store_u16(self.u16_at(USED_IDX_AT), used);
    }

    #[inline]
    fn set_mark(&self, head: u16, marked: bool) {
        let word = self.u8_at(entry(head));
        if may_store() {
            // Release: what was stored before is there when the mark is seen to change.
            word.store(marked.into(), Ordering::Release);
        }
    }

    /// The address of the word of `bytes` at `at`, inside the region.
    #[inline]
    fn place(&self, at: usize, bytes: usize) -> *mut u8 {
        assert!(at + bytes <= HEADER_BYTES + ENTRY_BYTES * usize::from(self.size));
        self.base.as_ptr().wrapping_add(at)
    }

    #[inline]
    fn u8_at(&self, at: usize) -> &AtomicU8 {
        // SAFETY: `place` checked that the byte is inside the region, which `_map` keeps mapped readable
        // and writable while `&self` lives. This process reaches it only as an atomic.
        unsafe { AtomicU8::from_ptr(self.place(at, 1)) }
    }

    #[inline]
    fn u16_at(&self, at: usize) -> &AtomicU16 {
        debug_assert!(at.is_multiple_of(2));
        // SAFETY: as in `u8_at`; the region begins at a multiple of 64 bytes and all offsets used are even.
        unsafe { AtomicU16::from_ptr(self.place(at, 2).cast()) }
    }

    #[inline]
    fn u64_at(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8));
        // SAFETY: as in `u8_at`; the region begins at a multiple of 64 bytes and both offsets used, 0 and 8
        // in an entry of 16, are multiples of 8.
        unsafe { AtomicU64::from_ptr(self.place(at, 8).cast()) }
    }
}

// All are release stores: they cost nothing on x86 and keep the order that the specification asks for.
#[inline]
fn store(word: &AtomicU64, value: u64) {
    if may_store() {
        word.store(value, Ordering::Release);
    }
}

#[inline]
fn store_u16(word: &AtomicU16, value: u16) {
    if may_store() {
        word.store(value, Ordering::Release);
    }
}

#[cfg(not(test))]
use block::canary::may_store;

#[cfg(test)]
use tests::may_store;

#[cfg(test)]
mod tests {
    use super::*;
    use ringdisk_gen::Random;
    use std::cell::Cell;
    use std::collections::VecDeque;

    thread_local! {
        /// So many stores may still be made on this thread.
        static STORES: Cell<u64> = const { Cell::new(u64::MAX) };
    }

    /// Takes one of the stores that may be made.
    pub(super) fn may_store() -> bool {
        STORES.with(|left| match left.get() {
            0 => false,
            u64::MAX => true,
            count => {
                left.set(count - 1);
                true
            }
        })
    }

    const SIZE: u16 = 16;

    fn memory() -> Arc<MmapRegion> {
        Arc::new(MmapRegion::new(2 * InflightRegion::bytes(SIZE)).expect("memory"))
    }

    fn open(
        map: &Arc<MmapRegion>,
        recover: bool,
        used: u16,
    ) -> Result<(InflightQueue, Option<Recovered>), InflightError> {
        let region = InflightRegion::new(map, 1, SIZE, recover).expect("room");
        InflightQueue::open(&region, SIZE, used)
    }

    /// The guest's side: its heads are in turn available, in flight, used.
    #[derive(Clone, Debug, Default)]
    struct Guest {
        free: Vec<u16>,
        available: VecDeque<u16>,
        used_index: u16,
        /// Available index of the first chain that was not taken.
        next: u16,
    }

    /// Serves at random until it has made `stores` stores, and is then killed. Returns what must be in
    /// flight, oldest first. `trace` is what the server did.
    fn serve(
        queue: &mut InflightQueue,
        random: &mut Random,
        guest: &mut Guest,
        mut in_flight: Vec<u16>,
        stores: u64,
    ) -> Vec<u16> {
        STORES.set(stores);
        // What was given back, in the order of the marks, and not published.
        let mut batch: Vec<u16> = Vec::new();
        loop {
            if STORES.get() == 0 {
                break;
            }
            match random.below(4) {
                0 | 1 if !guest.free.is_empty() => {
                    let at = random.below(guest.free.len() as u64) as usize;
                    let head = guest.free.swap_remove(at);
                    queue.take(head);
                    // The mark is the last store of the two, so the budget tells whether it was made.
                    if queue.u8_at(entry(head)).load(Ordering::Relaxed) == 1 {
                        in_flight.push(head);
                        guest.next = guest.next.wrapping_add(1);
                    } else {
                        guest.available.push_back(head);
                    }
                }
                2 if in_flight.len() > batch.len() => {
                    let candidates: Vec<u16> = in_flight
                        .iter()
                        .copied()
                        .filter(|head| !batch.contains(head))
                        .collect();
                    let head = random.pick(&candidates);
                    queue.give_back(head);
                    batch.push(head);
                }
                // The used index is a store too.
                3 if !batch.is_empty() && may_store() => {
                    guest.used_index = guest.used_index.wrapping_add(batch.len() as u16);
                    in_flight.retain(|head| !batch.contains(head));
                    guest.free.append(&mut batch);
                    queue.published(guest.used_index);
                }
                _ => {}
            }
        }
        STORES.set(u64::MAX);
        in_flight
    }

    /// The next server finds exactly the chains in flight, in order. So does the one after it if the recovery is cut short.
    #[test]
    fn recovery_is_exact_after_a_kill_between_any_two_stores() {
        for seed in 1..=400u64 {
            let mut random = Random::new(seed * 0x9e37_79b9 + 1);
            let map = memory();
            let mut guest = Guest {
                free: (0..SIZE).collect(),
                used_index: random.draw() as u16,
                ..Guest::default()
            };
            guest.next = guest.used_index;
            let (mut queue, found) = open(&map, true, guest.used_index).expect("a fresh region");
            assert_eq!(found, None);
            let mut in_flight = Vec::new();
            for life in 0..6 {
                let stores = 1 + random.below(120);
                in_flight = serve(&mut queue, &mut random, &mut guest, in_flight, stores);
                // A chain that was not marked is still available; the guest offers it again by itself.
                guest.free.extend(guest.available.drain(..));
                if random.below(3) == 0 {
                    STORES.set(random.below(6));
                    drop(open(&map, true, guest.used_index));
                    STORES.set(u64::MAX);
                }
                let (next, found) = open(&map, true, guest.used_index).expect("a true region");
                queue = next;
                let expected = Recovered {
                    heads: in_flight.clone(),
                    next_available: guest.next,
                };
                assert_eq!(found, Some(expected), "seed {seed}, life {life}");
            }
        }
    }

    #[test]
    fn open_clears_the_region_unless_recovering() {
        let map = memory();
        let (mut queue, _) = open(&map, false, 7).expect("fresh");
        queue.take(3);
        let (_, found) = open(&map, false, 9).expect("cleared");
        assert_eq!(found, None);
        let (_, found) = open(&map, true, 9).expect("believed");
        let nothing = Recovered {
            heads: Vec::new(),
            next_available: 9,
        };
        assert_eq!(found, Some(nothing));
    }

    #[test]
    fn open_refuses_an_impossible_region() {
        let map = memory();
        let (mut queue, _) = open(&map, false, 100).expect("fresh");
        queue.take(3);
        let put = |at: usize, value: u16| queue.u16_at(at).store(value, Ordering::Relaxed);
        let refused = |used| open(&map, true, used).expect_err("refused");

        put(VERSION_AT, 2);
        assert!(matches!(refused(100), InflightError::Layout { version: 2, .. }));
        put(VERSION_AT, 1);
        put(FEATURES_AT, 1);
        assert!(matches!(refused(100), InflightError::Layout { features: 1, .. }));
        put(FEATURES_AT, 0);
        for entries in [0, SIZE - 1, SIZE + 1, u16::MAX] {
            put(ENTRIES_AT, entries);
            assert!(matches!(refused(100), InflightError::Entries { .. }));
        }
        put(ENTRIES_AT, SIZE);
        assert!(matches!(refused(99), InflightError::UsedIndex { .. }));
        assert!(matches!(refused(100 + SIZE + 1), InflightError::UsedIndex { .. }));
        put(LAST_BATCH_HEAD_AT, SIZE);
        assert!(matches!(
            refused(101),
            InflightError::BatchHead { head: SIZE, .. }
        ));
        put(LAST_BATCH_HEAD_AT, 5);
        put(entry(5) + NEXT_AT, u16::MAX);
        assert!(matches!(refused(102), InflightError::BatchHead { .. }));
        // A list that goes round is followed no further than the batch is long.
        put(entry(5) + NEXT_AT, 5);
        let (_, found) = open(&map, true, 100 + SIZE).expect("possible");
        assert_eq!(found.expect("recovered").heads, [3]);
    }

    #[test]
    fn open_refuses_random_regions_or_names_each_head_once() {
        let map = memory();
        for seed in 1..=3000u64 {
            let mut random = Random::new(seed * 7919);
            let (queue, _) = open(&map, false, 0).expect("fresh");
            for at in (0..HEADER_BYTES + ENTRY_BYTES * usize::from(SIZE)).step_by(2) {
                let value = match random.below(3) {
                    0 => random.draw() as u16,
                    1 => random.below(3) as u16,
                    _ => continue,
                };
                if at != VERSION_AT || random.below(8) == 0 {
                    queue.u16_at(at).store(value, Ordering::Relaxed);
                }
            }
            if random.below(4) != 0 {
                queue.u64_at(FEATURES_AT).store(0, Ordering::Relaxed);
                queue.u16_at(ENTRIES_AT).store(SIZE, Ordering::Relaxed);
            }
            let used = random.below(20) as u16;
            let Ok((
                _,
                Some(Recovered {
                    mut heads,
                    next_available,
                }),
            )) = open(&map, true, used)
            else {
                continue;
            };
            assert_eq!(usize::from(next_available.wrapping_sub(used)), heads.len());
            assert!(heads.iter().all(|head| *head < SIZE));
            let count = heads.len();
            heads.sort_unstable();
            heads.dedup();
            assert_eq!(heads.len(), count, "seed {seed}");
        }
    }

    #[test]
    fn region_is_refused_unless_it_fits_its_mapping() {
        let map = memory();
        assert!(InflightRegion::new(&map, 2, SIZE, true).is_none());
        assert!(InflightRegion::new(&map, usize::MAX, SIZE, true).is_none());
        assert!(InflightRegion::new(&map, 0, 4 * SIZE, true).is_none());
        let region = InflightRegion::new(&map, 0, SIZE, true).expect("room");
        assert!(InflightQueue::open(&region, 2 * SIZE, 0).is_err());
    }
}
