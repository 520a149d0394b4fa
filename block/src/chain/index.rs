//! The index of a chain: spans of guest addresses, built one by one, dropped when they take too much memory.
//!
//! Lookups share a sharded lock, so that two workers that look up do not write the same cache line. Spans enter and leave
//! under its exclusive side. A span that is looked up is marked, by a write only where the mark is missing; the sweep that
//! makes room takes marks away, and drops spans that have none (the clock algorithm). Places in files have what room is
//! left: a span is entered without them if others would have to go, and loses them before a span is dropped.
//!
//! Invariants: a span never changes, as no layer does; the memory counted never exceeds the bound, but for the directory's
//! own pointers; a lookup takes no lock by waiting for it.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use super::places::Places;
use super::span::Span;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, ShardedLock, ShardedReader};

/// The most memory of one index, in bytes.
pub(super) const INDEX_BYTES_MAX: u64 = 64 << 20;
/// The least bound of an index, in bytes: a page of spans and some of what they hold.
const INDEX_BYTES_MIN: u64 = 64 << 10;
/// The number of clusters of a span: as many as a slice of an L2 table has, so that building a span loads no table that the
/// read before it did not need.
const SPAN_CLUSTERS: u64 = 512;
/// The bounds of a span in bytes.
const SPAN_BYTES_MIN: u64 = 1 << 20;
/// The most spans of an index: the directory's pointers take 128 KiB then.
const SPANS_MAX: u64 = 1 << 22;
/// The number of spans of a page of the directory.
const PAGE_SPANS: usize = 256;

/// A span in the directory.
#[derive(Debug)]
struct Slot {
    span: Span,
    /// The places of its bytes, if they are known.
    places: Option<Places>,
    /// Looked up since the sweep came by.
    used: AtomicBool,
}

type Page = Box<[Option<Slot>]>;

/// The spans that are there, by number.
#[derive(Debug)]
struct Directory {
    pages: Vec<Option<Page>>,
    /// The memory of pages and spans, in bytes.
    bytes: usize,
    /// The part of it that places take.
    places_bytes: usize,
    bound: usize,
    /// The span that the sweep examines next.
    hand: usize,
    /// The span that loses its places next.
    places_hand: usize,
}

/// The answer of a lookup.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Found {
    /// The layer that decides the bytes. The uppermost one also stands for bytes that the index does not know, as it asks
    /// the layers below it by itself.
    pub(super) layer: u8,
    /// The number of bytes it decides, at most as many as were asked for.
    pub(super) len: u64,
    /// The offset of these bytes in the layer's file, if that is known and they lie there in one piece.
    pub(super) place: Option<u64>,
    /// A span that is not there, among those that hold the bytes.
    pub(super) missing: Option<u64>,
}

/// The index of one chain, shared by all disks on it.
#[derive(Debug)]
pub(super) struct ChainIndex {
    span_bits: u32,
    directory: ShardedLock<Directory>,
    /// The spans that are being built.
    building: Mutex<HashSet<u64>>,
}

impl ChainIndex {
    /// Makes an empty index of `size_bytes` bytes, for layers whose smallest cluster has `cluster_bytes` bytes.
    pub(super) fn new(size_bytes: u64, cluster_bytes: u64, bound: u64) -> Arc<Self> {
        let wanted = cluster_bytes.saturating_mul(SPAN_CLUSTERS);
        let span_bytes = wanted.max(size_bytes / SPANS_MAX).max(SPAN_BYTES_MIN);
        let span_bits = span_bytes.checked_next_power_of_two().unwrap_or(1 << 63).ilog2();
        let spans = (size_bytes >> span_bits) + 1;
        let pages = spans.div_ceil(PAGE_SPANS as u64) as usize;
        let directory = Directory {
            pages: (0..pages).map(|_| None).collect(),
            bytes: 0,
            places_bytes: 0,
            bound: 0,
            hand: 0,
            places_hand: 0,
        };
        let index = Arc::new(Self {
            span_bits,
            directory: ShardedLock::new(directory),
            building: Mutex::default(),
        });
        index.raise_bound(bound);
        index
    }

    /// Lets the index have `bound` bytes of memory, if that is more than before, within the limits of an index.
    pub(super) fn raise_bound(&self, bound: u64) {
        let bound = bound.clamp(INDEX_BYTES_MIN, INDEX_BYTES_MAX) as usize;
        if let Ok(mut directory) = self.directory.write() {
            directory.bound = directory.bound.max(bound);
        }
    }

    /// Returns the size of a span in bytes, a power of two.
    pub(super) fn span_bytes(&self) -> u64 {
        1 << self.span_bits
    }

    /// Returns a reader. Waits while a span enters or leaves.
    pub(super) fn reader(self: &Arc<Self>) -> IndexReader {
        IndexReader {
            directory: self.directory.reader(),
            index: Arc::clone(self),
        }
    }

    /// Begins to build a span. Returns `None` if it is there, or others build it.
    pub(super) fn begin(self: &Arc<Self>, span: u64) -> Option<Building> {
        // Entered first: who has just built it leaves the list after it is there.
        if !self.building.lock().insert(span) {
            return None;
        }
        let building = Building {
            index: Arc::downgrade(self),
            span,
        };
        let there = self
            .directory
            .read()
            .map_or(true, |directory| directory.slot(span).is_some());
        (!there).then_some(building)
    }

    /// Returns the memory of spans and pages, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.directory.read().map_or(0, |directory| directory.bytes)
    }
}

/// One queue's way to an index: lookups of two readers write no cache line of one another.
#[derive(Debug)]
pub(super) struct IndexReader {
    index: Arc<ChainIndex>,
    /// Of `index`.
    directory: ShardedReader<Directory>,
}

impl std::ops::Deref for IndexReader {
    type Target = Arc<ChainIndex>;

    #[inline]
    fn deref(&self) -> &Arc<ChainIndex> {
        &self.index
    }
}

impl IndexReader {
    /// Returns the layer that decides the bytes from `offset` on, and how many of `len` bytes (more than none) it does.
    #[inline]
    pub(super) fn find(&self, offset: u64, len: u64) -> Found {
        let mut found = Found {
            layer: 0,
            len,
            place: None,
            missing: None,
        };
        // A span enters or leaves right now: the layers are asked.
        let Some(directory) = self.directory.try_read() else {
            return found;
        };
        let end = offset + len;
        let mut here = offset;
        let mut first = None;
        while here < end {
            let number = here >> self.span_bits;
            let span_start = number << self.span_bits;
            let span_end = span_start.saturating_add(self.span_bytes());
            let slot = directory.slot(number);
            let (layer, run_end) = match slot {
                Some(slot) => {
                    if !slot.used.load(Ordering::Relaxed) {
                        slot.used.store(true, Ordering::Relaxed);
                    }
                    let (layer, run_end) = slot.span.find(here - span_start, end - span_start);
                    (layer, span_start.saturating_add(run_end))
                }
                None => {
                    found.missing = found.missing.or(Some(number));
                    (0, span_end)
                }
            };
            if here == offset {
                found.layer = layer;
                first = slot.map(|slot| (slot, offset - span_start));
            } else if layer != found.layer {
                break;
            }
            here = run_end.min(span_end);
        }
        found.len = here.min(end) - offset;
        // Bytes of two spans have none: their layer is asked, as for bytes in two pieces.
        if let Some((slot, start)) = first
            && let Some(places) = &slot.places
        {
            found.place = places.find(start, found.len);
        }
        found
    }
}

impl Directory {
    #[inline]
    fn slot(&self, number: u64) -> Option<&Slot> {
        let number = number as usize;
        let page = self.pages.get(number / PAGE_SPANS)?.as_ref()?;
        page.get(number % PAGE_SPANS)?.as_ref()
    }

    fn insert(&mut self, number: u64, span: Span, places: Option<Places>) {
        let number = number as usize;
        let Some(place) = self.pages.get_mut(number / PAGE_SPANS) else {
            return;
        };
        if place.is_none() {
            self.bytes += PAGE_BYTES;
        }
        let page = place.get_or_insert_with(|| (0..PAGE_SPANS).map(|_| None).collect());
        let Some(slot) = page.get_mut(number % PAGE_SPANS) else {
            return;
        };
        if let Some(before) = slot.take() {
            self.bytes -= before.heap_bytes();
            self.places_bytes -= before.places_bytes();
        }
        self.bytes += span.heap_bytes();
        let places = places.filter(|places| self.bytes + places.heap_bytes() <= self.bound);
        let used = AtomicBool::new(false);
        let entered = slot.insert(Slot { span, places, used });
        self.bytes += entered.places_bytes();
        self.places_bytes += entered.places_bytes();
        self.drop_places();
        self.drop_spans();
    }

    /// Drops places, those of one span after another, until the memory is within the bound or there are none.
    fn drop_places(&mut self) {
        let slots = self.pages.len() * PAGE_SPANS;
        let mut left = slots;
        while self.bytes > self.bound && self.places_bytes > 0 && left > 0 {
            self.places_hand %= slots;
            let (at, within) = (self.places_hand / PAGE_SPANS, self.places_hand % PAGE_SPANS);
            let mut step = PAGE_SPANS - within;
            if let Some(page) = self.pages.get_mut(at).and_then(Option::as_mut) {
                let slot = page.get_mut(within).and_then(Option::as_mut);
                let bytes = slot.map_or(0, |slot| {
                    slot.places.take().map_or(0, |places| places.heap_bytes())
                });
                self.bytes -= bytes;
                self.places_bytes -= bytes;
                step = 1;
            }
            self.places_hand += step;
            left = left.saturating_sub(step);
        }
    }

    /// Drops spans that were not looked up lately, until the memory is within the bound. All places are gone by then.
    fn drop_spans(&mut self) {
        // The first round takes all marks, the second finds none.
        let slots = self.pages.len() * PAGE_SPANS;
        let mut left = 2 * slots;
        while self.bytes > self.bound && left > 0 {
            self.hand %= slots;
            let at = self.hand / PAGE_SPANS;
            let step = match self.pages.get_mut(at).and_then(Option::as_mut) {
                Some(page) => {
                    self.bytes -= sweep(page, self.hand % PAGE_SPANS);
                    1
                }
                None => PAGE_SPANS - self.hand % PAGE_SPANS,
            };
            self.hand += step;
            left = left.saturating_sub(step);
            // Past the page's last span.
            if self.hand.is_multiple_of(PAGE_SPANS)
                && let Some(page) = self.pages.get_mut(at)
                && page.as_ref().is_some_and(|page| page.iter().all(Option::is_none))
            {
                *page = None;
                self.bytes -= PAGE_BYTES;
            }
        }
    }
}

/// The memory of a page, in bytes.
const PAGE_BYTES: usize = PAGE_SPANS * size_of::<Option<Slot>>();

impl Slot {
    /// Returns the bytes of memory that it has beside itself.
    fn heap_bytes(&self) -> usize {
        self.span.heap_bytes() + self.places_bytes()
    }

    fn places_bytes(&self) -> usize {
        self.places.as_ref().map_or(0, Places::heap_bytes)
    }
}

/// Takes the mark of a span, or drops a span without a mark. Returns the bytes that are free now.
fn sweep(page: &mut Page, index: usize) -> usize {
    let Some(place) = page.get_mut(index) else {
        return 0;
    };
    match place {
        Some(slot) if !slot.used.swap(false, Ordering::Relaxed) => {
            let bytes = slot.heap_bytes();
            *place = None;
            bytes
        }
        _ => 0,
    }
}

/// One span under construction. Others may build it once this is dropped.
#[derive(Debug)]
pub(super) struct Building {
    /// Not held: an index must not outlive the images it describes.
    index: Weak<ChainIndex>,
    pub(super) span: u64,
}

impl Building {
    /// Enters the span, with the places of its bytes if there is room.
    pub(super) fn end(self, span: Span, places: Option<Places>) {
        if let Some(index) = self.index.upgrade()
            && let Ok(mut directory) = index.directory.write()
        {
            directory.insert(self.span, span, places);
        }
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        if let Some(index) = self.index.upgrade() {
            index.building.lock().remove(&self.span);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::places::PlaceRuns;
    use super::super::span::Run;
    use super::*;

    const K64: u64 = 64 << 10;

    /// A span of `units` units, each of another layer than the one before.
    fn scattered(bytes: u64, units: u64) -> Span {
        let unit = bytes / units;
        let runs: Vec<Run> = (0..units)
            .map(|at| Run {
                start: at * unit,
                layer: 1 + (at % 2) as u8,
            })
            .collect();
        Span::encode(&runs, bytes).expect("few runs")
    }

    /// The places of a span, each cluster apart from its neighbours.
    fn places(bytes: u64) -> Option<Places> {
        let cluster = bytes / SPAN_CLUSTERS;
        let mut runs = PlaceRuns::default();
        (0..SPAN_CLUSTERS)
            .for_each(|at| runs.push(at * cluster, Some((at * 5039 % SPAN_CLUSTERS) * cluster)));
        runs.encode(bytes)
    }

    /// Returns true if the place of a span's second cluster is known.
    fn has_places(index: &Arc<ChainIndex>, span: u64) -> bool {
        let cluster = index.span_bytes() / SPAN_CLUSTERS;
        let found = index.reader().find(span * index.span_bytes() + cluster, 512);
        assert!(
            found
                .place
                .is_none_or(|place| place == 5039 % SPAN_CLUSTERS * cluster)
        );
        found.place.is_some()
    }

    fn build(index: &Arc<ChainIndex>, span: u64) {
        let building = index.begin(span).expect("not there");
        building.end(
            scattered(index.span_bytes(), SPAN_CLUSTERS),
            places(index.span_bytes()),
        );
    }

    /// Looks a span up, which keeps it.
    fn is_found(index: &Arc<ChainIndex>, span: u64) -> bool {
        index
            .reader()
            .find(span * index.span_bytes(), 512)
            .missing
            .is_none()
    }

    fn is_there(index: &ChainIndex, span: u64) -> bool {
        index.directory.read().expect("no panic").slot(span).is_some()
    }

    #[test]
    fn index_of_100_gib_fits_in_64_mib() {
        // The worst case: each cluster of another layer than its neighbours.
        for (cluster, bound, places_all) in [(K64, 12 << 20, true), (4096, 64 << 20, false)] {
            let index = ChainIndex::new(100 << 30, cluster, INDEX_BYTES_MAX);
            let spans = (100 << 30) / index.span_bytes();
            (0..spans).for_each(|span| build(&index, span));
            assert!(index.bytes() <= bound, "{} bytes", index.bytes());
            assert!((0..spans).all(|span| is_found(&index, span)), "no span had to go");
            let with_places = (0..spans).filter(|span| has_places(&index, *span)).count() as u64;
            let expected = if places_all {
                spans..=spans
            } else {
                spans / 5..=spans / 2
            };
            assert!(
                expected.contains(&with_places),
                "places of {with_places} of {spans} spans"
            );
        }
    }

    #[test]
    fn index_keeps_its_bound_and_what_is_looked_up() {
        let bound = 256 << 10;
        let index = ChainIndex::new(1 << 40, K64, bound);
        let hot = [5, 300, 7000];
        hot.iter().for_each(|span| build(&index, *span));
        assert!(hot.iter().all(|span| has_places(&index, *span)), "there is room");
        (7001..7100).for_each(|span| build(&index, span));
        assert!(
            !has_places(&index, 5) && has_places(&index, 7050),
            "the oldest places go"
        );
        assert!(hot.iter().all(|span| is_found(&index, *span)), "before any span");
        for span in 10_000..20_000 {
            build(&index, span);
            assert!(index.bytes() <= bound as usize, "{} bytes", index.bytes());
            assert!(is_there(&index, span), "a new span stays for a while");
            assert!(
                hot.iter().all(|span| is_found(&index, *span)),
                "what is used stays"
            );
        }
        assert!(!is_there(&index, 10_000));
        assert!(index.bytes() > bound as usize / 2, "the room is used");
        // What was dropped can be built again.
        build(&index, 10_000);
        assert!(is_there(&index, 10_000));
    }

    #[test]
    fn index_frees_pages_without_spans() {
        let index = ChainIndex::new(1 << 40, K64, 0);
        assert_eq!(index.bytes(), 0);
        for page in 0..100 {
            build(&index, page * PAGE_SPANS as u64);
            assert!(index.bytes() <= INDEX_BYTES_MIN as usize);
        }
        let directory = index.directory.read().expect("no panic");
        let pages = directory.pages.iter().flatten();
        let bytes: usize = pages
            .map(|page| PAGE_BYTES + page.iter().flatten().map(Slot::heap_bytes).sum::<usize>())
            .sum();
        assert_eq!(directory.bytes, bytes, "the memory is counted");
        let slots = directory.pages.iter().flatten().flatten().flatten();
        assert_eq!(
            directory.places_bytes,
            slots.map(Slot::places_bytes).sum::<usize>()
        );
    }

    #[test]
    fn lookup_crosses_spans_of_one_layer_and_names_a_missing_one() {
        let index = ChainIndex::new(1 << 40, K64, 1 << 20);
        let bytes = index.span_bytes();
        let put = |span, layer| {
            index
                .begin(span)
                .expect("not there")
                .end(Span::Whole(layer), None)
        };
        for (span, layer) in [(0, 3), (1, 3), (2, 4), (4, 0)] {
            put(span, layer);
        }
        let found = |layer, len, missing| Found {
            layer,
            len,
            place: None,
            missing,
        };
        let reader = index.reader();
        assert_eq!(reader.find(0, 3 * bytes), found(3, 2 * bytes, None));
        assert_eq!(reader.find(bytes - 512, 1024), found(3, 1024, None));
        assert_eq!(reader.find(2 * bytes, bytes + 512), found(4, bytes, Some(3)));
        assert_eq!(reader.find(3 * bytes, 512), found(0, 512, Some(3)));
        assert_eq!(
            reader.find(3 * bytes + 512, 2 * bytes),
            found(0, 2 * bytes, Some(3))
        );
    }

    #[test]
    fn places_end_with_their_span_and_with_a_piece() {
        let index = ChainIndex::new(1 << 40, K64, 1 << 20);
        let bytes = index.span_bytes();
        // Two spans of one layer, which lie one behind the other, up to a cluster that lies elsewhere.
        for span in [0, 1] {
            let mut runs = PlaceRuns::default();
            runs.push(0, Some((4 << 30) + span * bytes));
            runs.push(bytes - K64, Some(8 << 30));
            index
                .begin(span)
                .expect("not there")
                .end(Span::Whole(1), runs.encode(bytes));
        }
        for (offset, len, place) in [
            (0, 512, Some(4 << 30)),
            (512, bytes - K64 - 512, Some((4 << 30) + 512)),
            (512, bytes - K64, None),
            (bytes - K64, K64, Some(8 << 30)),
            (bytes - 512, 1024, None),
            (bytes, 512, Some((4 << 30) + bytes)),
        ] {
            let found = index.reader().find(offset, len);
            assert_eq!(
                (found.layer, found.len, found.place),
                (1, len, place),
                "{len} at {offset}"
            );
        }
    }

    #[test]
    fn span_is_built_by_one_at_a_time() {
        let index = ChainIndex::new(1 << 40, K64, 1 << 20);
        let first = index.begin(7).expect("not there");
        assert!(index.begin(7).is_none(), "another builds it");
        assert!(index.begin(8).is_some());
        drop(first);
        let second = index.begin(7).expect("the first gave up");
        second.end(Span::Whole(1), None);
        assert!(index.begin(7).is_none(), "it is there");
        assert!(index.building.lock().is_empty());
    }

    #[test]
    fn huge_disks_have_few_spans() {
        for (size, cluster) in [(u64::MAX >> 1, 512), (u64::MAX, u64::MAX), (0, 512)] {
            let index = ChainIndex::new(size, cluster, 0);
            let directory = index.directory.read().expect("no panic");
            assert!(directory.pages.len() as u64 <= SPANS_MAX / PAGE_SPANS as u64 + 1);
        }
    }

    #[test]
    fn lookup_does_not_wait_for_a_writer() {
        let index = ChainIndex::new(1 << 40, K64, 1 << 20);
        index.begin(0).expect("not there").end(Span::Whole(2), None);
        let reader = index.reader();
        let held = index.directory.write().expect("no panic");
        let unknown = Found {
            layer: 0,
            len: 4096,
            place: None,
            missing: None,
        };
        assert_eq!(reader.find(0, 4096), unknown);
        drop(held);
        assert_eq!(reader.find(0, 4096).layer, 2);
    }
}
