//! The index of a chain: spans of guest addresses, built one by one, dropped when they take too much memory.
//!
//! Lookups share a sharded lock, so that two workers that look up do not write the same cache line. Spans enter and leave
//! under its exclusive side. A span that is looked up is marked, by a write only where the mark is missing; the sweep that
//! makes room takes marks away, and drops spans that have none (the clock algorithm).
//!
//! Invariants: a span never changes, as no layer does; the memory counted never exceeds the bound, but for the directory's
//! own pointers; a lookup takes no lock by waiting for it.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use super::span::Span;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, ShardedLock};

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
    bound: usize,
    /// The span that the sweep examines next.
    hand: usize,
}

/// The answer of a lookup.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Found {
    /// The layer that decides the bytes. The uppermost one also stands for bytes that the index does not know, as it asks
    /// the layers below it by itself.
    pub(super) layer: u8,
    /// The number of bytes it decides, at most as many as were asked for.
    pub(super) len: u64,
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
            bound: 0,
            hand: 0,
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

    /// Returns the layer that decides the bytes from `offset` on, and how many of `len` bytes (more than none) it does.
    #[inline]
    pub(super) fn find(&self, offset: u64, len: u64) -> Found {
        let mut found = Found {
            layer: 0,
            len,
            missing: None,
        };
        // A span enters or leaves right now: the layers are asked.
        let Ok(directory) = self.directory.try_read() else {
            return found;
        };
        let end = offset + len;
        let mut here = offset;
        while here < end {
            let number = here >> self.span_bits;
            let span_start = number << self.span_bits;
            let span_end = span_start.saturating_add(self.span_bytes());
            let (layer, run_end) = match directory.slot(number) {
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
            } else if layer != found.layer {
                break;
            }
            here = run_end.min(span_end);
        }
        found.len = here.min(end) - offset;
        found
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

impl Directory {
    #[inline]
    fn slot(&self, number: u64) -> Option<&Slot> {
        let number = number as usize;
        let page = self.pages.get(number / PAGE_SPANS)?.as_ref()?;
        page.get(number % PAGE_SPANS)?.as_ref()
    }

    fn insert(&mut self, number: u64, span: Span) {
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
        self.bytes += span.heap_bytes();
        let used = AtomicBool::new(false);
        let before = slot.replace(Slot { span, used });
        self.bytes -= before.map_or(0, |slot| slot.span.heap_bytes());
        self.make_room();
    }

    /// Drops spans that were not looked up lately, until the memory is within the bound.
    fn make_room(&mut self) {
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

/// Takes the mark of a span, or drops a span without a mark. Returns the bytes that are free now.
fn sweep(page: &mut Page, index: usize) -> usize {
    let Some(place) = page.get_mut(index) else {
        return 0;
    };
    match place {
        Some(slot) if !slot.used.swap(false, Ordering::Relaxed) => {
            let bytes = slot.span.heap_bytes();
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
    /// Enters the span.
    pub(super) fn end(self, span: Span) {
        if let Some(index) = self.index.upgrade()
            && let Ok(mut directory) = index.directory.write()
        {
            directory.insert(self.span, span);
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

    fn build(index: &Arc<ChainIndex>, span: u64) {
        let building = index.begin(span).expect("not there");
        building.end(scattered(index.span_bytes(), SPAN_CLUSTERS));
    }

    /// Looks a span up, which keeps it.
    fn is_found(index: &ChainIndex, span: u64) -> bool {
        index.find(span * index.span_bytes(), 512).missing.is_none()
    }

    fn is_there(index: &ChainIndex, span: u64) -> bool {
        index.directory.read().expect("no panic").slot(span).is_some()
    }

    #[test]
    fn index_of_100_gib_fits_in_64_mib() {
        // The worst case: each cluster of another layer than its neighbours.
        for (cluster, bound) in [(K64, 3 << 20), (4096, 64 << 20)] {
            let index = ChainIndex::new(100 << 30, cluster, INDEX_BYTES_MAX);
            let spans = (100 << 30) / index.span_bytes();
            (0..spans).for_each(|span| build(&index, span));
            assert!(index.bytes() <= bound, "{} bytes", index.bytes());
            assert!((0..spans).all(|span| is_found(&index, span)), "nothing had to go");
        }
    }

    #[test]
    fn index_keeps_its_bound_and_what_is_looked_up() {
        let bound = 256 << 10;
        let index = ChainIndex::new(1 << 40, K64, bound);
        let hot = [5, 300, 7000];
        hot.iter().for_each(|span| build(&index, *span));
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
            .map(|page| {
                PAGE_BYTES
                    + page
                        .iter()
                        .flatten()
                        .map(|slot| slot.span.heap_bytes())
                        .sum::<usize>()
            })
            .sum();
        assert_eq!(directory.bytes, bytes, "the memory is counted");
    }

    #[test]
    fn lookup_crosses_spans_of_one_layer_and_names_a_missing_one() {
        let index = ChainIndex::new(1 << 40, K64, 1 << 20);
        let bytes = index.span_bytes();
        let put = |span, layer| index.begin(span).expect("not there").end(Span::Whole(layer));
        for (span, layer) in [(0, 3), (1, 3), (2, 4), (4, 0)] {
            put(span, layer);
        }
        let found = |layer, len, missing| Found { layer, len, missing };
        assert_eq!(index.find(0, 3 * bytes), found(3, 2 * bytes, None));
        assert_eq!(index.find(bytes - 512, 1024), found(3, 1024, None));
        assert_eq!(index.find(2 * bytes, bytes + 512), found(4, bytes, Some(3)));
        assert_eq!(index.find(3 * bytes, 512), found(0, 512, Some(3)));
        assert_eq!(
            index.find(3 * bytes + 512, 2 * bytes),
            found(0, 2 * bytes, Some(3))
        );
    }

    #[test]
    fn span_is_built_by_one_at_a_time() {
        let index = ChainIndex::new(1 << 40, K64, 1 << 20);
        let first = index.begin(7).expect("not there");
        assert!(index.begin(7).is_none(), "another builds it");
        assert!(index.begin(8).is_some());
        drop(first);
        let second = index.begin(7).expect("the first gave up");
        second.end(Span::Whole(1));
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
        index.begin(0).expect("not there").end(Span::Whole(2));
        let held = index.directory.write().expect("no panic");
        let unknown = Found {
            layer: 0,
            len: 4096,
            missing: None,
        };
        assert_eq!(index.find(0, 4096), unknown);
        drop(held);
        assert_eq!(index.find(0, 4096).layer, 2);
    }
}
