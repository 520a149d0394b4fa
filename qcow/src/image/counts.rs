//! A reference count for every cluster of a window of a file, in little memory.
//!
//! Counts come in chunks that exist only if something was counted in them. Each has the smallest of four shapes: all
//! the same, a few, a byte each, or eight bytes each. A full image and a nearly empty one both take next to nothing.
//! The memory of a map is known at any time ([`CountMap::memory_bytes`]), so that its user can stop.

use std::ops::Range;

/// The number of clusters of one chunk; windows begin at a multiple of it.
pub(crate) const CHUNK: u64 = 4096;
const CHUNK_LEN: usize = CHUNK as usize;
/// The largest number of counts in a chunk of few. Tables that are scattered on purpose lie this thin.
const FEW_MAX: usize = 256;
/// The approximate overhead of an allocation, in bytes.
const ALLOCATION_BYTES: usize = 16;

/// The counts of a few clusters, sorted by cluster; the others have none.
#[derive(Clone, Debug, Default)]
struct Few {
    at: Vec<u16>,
    counts: Vec<u8>,
}

impl Few {
    fn get(&self, at: u16) -> u8 {
        let place = self.at.binary_search(&at).ok();
        place
            .and_then(|place| self.counts.get(place).copied())
            .unwrap_or(0)
    }

    /// Sets a count. Returns `false`, with nothing set, if there is no room.
    fn set(&mut self, at: u16, count: u8) -> bool {
        let place = match self.at.last() {
            Some(&last) if last >= at => self.at.binary_search(&at),
            _ => Err(self.at.len()),
        };
        match place {
            Ok(place) => self.counts[place] = count,
            Err(_) if self.at.len() == FEW_MAX => return false,
            Err(place) => {
                if self.at.len() == self.at.capacity() {
                    let more = self.at.len().max(8);
                    self.at.reserve_exact(more);
                    self.counts.reserve_exact(more);
                }
                self.at.insert(place, at);
                self.counts.insert(place, count);
            }
        }
        true
    }

    fn heap_bytes(&self) -> usize {
        self.at.capacity() * size_of::<u16>() + self.counts.capacity() + 2 * ALLOCATION_BYTES
    }
}

/// A byte for each cluster.
#[derive(Clone, Debug)]
struct Bytes {
    counts: [u8; CHUNK_LEN],
    /// The number of counts that are 1: when all are, the chunk shrinks.
    ones: usize,
}

/// One chunk's counts.
#[derive(Clone, Debug, Default)]
enum Chunk {
    #[default]
    None,
    All(u8),
    Few(Box<Few>),
    Bytes(Box<Bytes>),
    Wide(Box<[u64; CHUNK_LEN]>),
}

impl Chunk {
    fn get(&self, at: usize) -> u64 {
        match self {
            Self::None => 0,
            Self::All(count) => u64::from(*count),
            Self::Few(few) => u64::from(few.get(at as u16)),
            Self::Bytes(bytes) => u64::from(bytes.counts[at]),
            Self::Wide(counts) => counts[at],
        }
    }

    fn set(&mut self, at: usize, count: u64) {
        if self.get(at) == count {
            return;
        }
        let Ok(small) = u8::try_from(count) else {
            self.widen();
            if let Self::Wide(counts) = self {
                counts[at] = count;
            }
            return;
        };
        if matches!(self, Self::None) {
            *self = Self::Few(Box::default());
        }
        if let Self::Few(few) = self
            && few.set(at as u16, small)
        {
            return;
        }
        if matches!(self, Self::All(_) | Self::Few(_)) {
            self.spread();
        }
        match self {
            Self::Bytes(bytes) => {
                bytes.ones -= usize::from(bytes.counts[at] == 1);
                bytes.ones += usize::from(small == 1);
                bytes.counts[at] = small;
                if bytes.ones == CHUNK_LEN {
                    *self = Self::All(1);
                }
            }
            Self::Wide(counts) => counts[at] = count,
            Self::None | Self::All(_) | Self::Few(_) => {}
        }
    }

    /// Turns a chunk of none, all or few into one with a byte for each cluster.
    fn spread(&mut self) {
        let mut counts = [0; CHUNK_LEN];
        match self {
            Self::All(count) => counts = [*count; CHUNK_LEN],
            Self::Few(few) => {
                for (&at, &count) in few.at.iter().zip(&few.counts) {
                    counts[usize::from(at)] = count;
                }
            }
            Self::None | Self::Bytes(_) | Self::Wide(_) => {}
        }
        let ones = counts.iter().filter(|&&count| count == 1).count();
        *self = Self::Bytes(Box::new(Bytes { counts, ones }));
    }

    fn widen(&mut self) {
        if matches!(self, Self::Wide(_)) {
            return;
        }
        let mut counts = Box::new([0; CHUNK_LEN]);
        for (at, count) in counts.iter_mut().enumerate() {
            *count = self.get(at);
        }
        *self = Self::Wide(counts);
    }

    /// Returns the size of its heap memory in bytes.
    fn heap_bytes(&self) -> usize {
        match self {
            Self::None | Self::All(_) => 0,
            Self::Few(few) => size_of::<Few>() + ALLOCATION_BYTES + few.heap_bytes(),
            Self::Bytes(_) => size_of::<Bytes>() + ALLOCATION_BYTES,
            Self::Wide(_) => size_of::<[u64; CHUNK_LEN]>() + ALLOCATION_BYTES,
        }
    }

    /// Returns the counts of clusters `from..to` that are not 0, in order.
    fn nonzero(&self, from: usize, to: usize) -> impl DoubleEndedIterator<Item = (usize, u64)> + '_ {
        let (few, dense) = match self {
            Self::None => (None, 0..0),
            Self::Few(few) => (Some(few), 0..0),
            Self::All(_) | Self::Bytes(_) | Self::Wide(_) => (None, from..to),
        };
        let few = few.into_iter().flat_map(move |few| {
            let skip = few.at.partition_point(|&at| usize::from(at) < from);
            let end = few.at.partition_point(|&at| usize::from(at) < to);
            few.at[skip..end].iter().zip(&few.counts[skip..end])
        });
        let few = few.map(|(&at, &count)| (usize::from(at), u64::from(count)));
        let dense = dense.map(|at| (at, self.get(at)));
        few.chain(dense).filter(|&(_, count)| count != 0)
    }

    fn is_same(&self, other: &Self) -> bool {
        matches!((self, other), (Self::None, Self::None))
            || matches!((self, other), (Self::All(a), Self::All(b)) if a == b)
    }
}

/// Reference counts by cluster number, of the clusters of a window. Others have no count, and get none.
#[derive(Clone, Debug)]
pub(crate) struct CountMap {
    window: Range<u64>,
    chunks: Vec<Chunk>,
    heap_bytes: usize,
}

impl CountMap {
    /// Creates a map without counts, of the clusters in `window`, which begins at a multiple of [`CHUNK`].
    pub(crate) fn new(window: Range<u64>) -> Self {
        Self {
            window,
            chunks: Vec::new(),
            heap_bytes: 0,
        }
    }

    /// Returns the memory of the map in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.heap_bytes + self.chunks.capacity() * size_of::<Chunk>()
    }

    fn place(&self, cluster: u64) -> Option<(usize, usize)> {
        let index = cluster.checked_sub(self.window.start)?;
        let inside = self.window.contains(&cluster);
        inside.then_some(((index / CHUNK) as usize, (index % CHUNK) as usize))
    }

    /// Returns the count of a cluster; 0 unless something was counted.
    pub(crate) fn get(&self, cluster: u64) -> u64 {
        let place = self.place(cluster);
        place.map_or(0, |(chunk, at)| {
            self.chunks.get(chunk).map_or(0, |chunk| chunk.get(at))
        })
    }

    /// Sets the count of a cluster, if it is in the window.
    pub(crate) fn set(&mut self, cluster: u64, count: u64) {
        let Some((index, at)) = self.place(cluster) else {
            return;
        };
        if index >= self.chunks.len() {
            if count == 0 {
                return;
            }
            self.chunks.resize_with(index + 1, Chunk::default);
        }
        let chunk = &mut self.chunks[index];
        let before = chunk.heap_bytes();
        chunk.set(at, count);
        self.heap_bytes = self.heap_bytes + chunk.heap_bytes() - before;
    }

    /// Adds `more` to a cluster's count. Returns `false`, and the count stays at `max`, if that would take it beyond.
    /// Clusters outside the window are ignored.
    #[must_use]
    pub(crate) fn add(&mut self, cluster: u64, more: u64, max: u64) -> bool {
        if self.place(cluster).is_none() {
            return true;
        }
        let sum = self.get(cluster).saturating_add(more);
        self.set(cluster, sum.min(max));
        sum <= max
    }

    /// Returns the clusters with a count, in order.
    pub(crate) fn nonzero(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.nonzero_in(self.window.clone())
    }

    /// Returns the chunks that hold some of `clusters`: the first cluster of each, and the first and last place that
    /// counts.
    fn chunks_in(
        &self,
        clusters: Range<u64>,
        len: usize,
    ) -> impl Iterator<Item = (usize, u64, usize, usize)> {
        let start = self.window.start;
        let from = clusters.start.max(start) - start;
        let to = clusters.end.min(self.window.end).saturating_sub(start);
        let chunks = (from / CHUNK) as usize..(to.div_ceil(CHUNK) as usize).min(len);
        chunks.map(move |index| {
            let first = index as u64 * CHUNK;
            let place = |cluster: u64| cluster.saturating_sub(first).min(CHUNK) as usize;
            (index, start + first, place(from), place(to))
        })
    }

    /// Returns those of `clusters` with a count, in order.
    pub(crate) fn nonzero_in(&self, clusters: Range<u64>) -> impl Iterator<Item = (u64, u64)> + '_ {
        let chunks = self.chunks_in(clusters, self.chunks.len());
        chunks.flat_map(|(index, first, from, to)| {
            let counts = self.chunks[index].nonzero(from, to);
            counts.map(move |(at, count)| (first + at as u64, count))
        })
    }

    /// Returns the last cluster with a count.
    pub(crate) fn last(&self) -> Option<u64> {
        let mut chunks = self.chunks.iter().enumerate().rev();
        chunks.find_map(|(index, chunk)| {
            let (at, _) = chunk.nonzero(0, CHUNK_LEN).next_back()?;
            Some(self.window.start + index as u64 * CHUNK + at as u64)
        })
    }

    /// Calls `each(cluster, ours, theirs)` wherever two maps of one window differ, in order.
    pub(crate) fn for_each_difference(&self, other: &Self, each: impl FnMut(u64, u64, u64)) {
        self.for_each_difference_in(self.window.clone(), other, each);
    }

    /// Calls `each` as [`Self::for_each_difference`] does, for some clusters.
    pub(crate) fn for_each_difference_in(
        &self,
        clusters: Range<u64>,
        other: &Self,
        mut each: impl FnMut(u64, u64, u64),
    ) {
        const NONE: Chunk = Chunk::None;
        let len = self.chunks.len().max(other.chunks.len());
        for (index, first, from, to) in self.chunks_in(clusters, len) {
            let ours = self.chunks.get(index).unwrap_or(&NONE);
            let theirs = other.chunks.get(index).unwrap_or(&NONE);
            if ours.is_same(theirs) {
                continue;
            }
            let (mut ours, mut theirs) = (
                ours.nonzero(from, to).peekable(),
                theirs.nonzero(from, to).peekable(),
            );
            loop {
                let next = [ours.peek(), theirs.peek()].into_iter().flatten();
                let Some(at) = next.map(|&(at, _)| at).min() else {
                    break;
                };
                let count = |(_, count)| count;
                let a = ours.next_if(|&(next, _)| next == at).map_or(0, count);
                let b = theirs.next_if(|&(next, _)| next == at).map_or(0, count);
                if a != b {
                    each(first + at as u64, a, b);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn count_map_counts_like_a_plain_map(
            ops in prop::collection::vec((0u64..20_000, 0u64..400, any::<bool>()), 0..2000),
            runs in prop::collection::vec((0u64..5, 0u64..3), 0..4),
            max in 1u64..1000,
            window in 0u64..3,
            part in 0u64..2 * CHUNK,
        ) {
            let window = window * CHUNK..20_000 - window;
            let mut map = CountMap::new(window.clone());
            let mut model = BTreeMap::new();
            for (chunk, count) in runs {
                for cluster in chunk * CHUNK..(chunk + 1) * CHUNK {
                    map.set(cluster, count.min(max));
                    if window.contains(&cluster) {
                        model.insert(cluster, count.min(max));
                    }
                }
            }
            for (cluster, count, add) in ops {
                if !window.contains(&cluster) {
                    map.set(cluster, count);
                    prop_assert!(map.add(cluster, count, max));
                    prop_assert_eq!(map.get(cluster), 0);
                    continue;
                }
                let entry = model.entry(cluster).or_insert(0u64);
                if add {
                    prop_assert_eq!(map.add(cluster, count, max), *entry + count <= max);
                    *entry = (*entry + count).min(max);
                } else {
                    map.set(cluster, count.min(max));
                    *entry = count.min(max);
                }
                prop_assert_eq!(map.get(cluster), *entry);
            }
            model.retain(|_, count| *count != 0);
            prop_assert_eq!(map.last(), model.last_key_value().map(|(&cluster, _)| cluster));
            let part = CHUNK + 700..4 * CHUNK - part;
            let counted: Vec<_> = model.range(part.clone()).map(|(&cluster, &count)| (cluster, count)).collect();
            prop_assert_eq!(map.nonzero_in(part.clone()).collect::<Vec<_>>(), counted.clone());
            let mut differences = Vec::new();
            let empty = CountMap::new(window.clone());
            empty.for_each_difference_in(part, &map, |cluster, none, count| {
                differences.push((cluster, none + count));
            });
            prop_assert_eq!(differences, counted);
            prop_assert_eq!(map.nonzero().collect::<Vec<_>>(), model.into_iter().collect::<Vec<_>>());
            let heap: usize = map.chunks.iter().map(Chunk::heap_bytes).sum();
            prop_assert_eq!(map.heap_bytes, heap);
        }
    }

    #[test]
    fn count_map_yields_differences_of_both_in_order() {
        let (mut ours, mut theirs) = (CountMap::new(0..u64::MAX), CountMap::new(0..u64::MAX));
        ours.set(5, 1);
        ours.set(6, 1);
        ours.set(9000, 300);
        theirs.set(5, 2);
        theirs.set(6, 1);
        theirs.set(70_000, 1);
        let mut pairs = Vec::new();
        ours.for_each_difference(&theirs, |cluster, a, b| pairs.push((cluster, a, b)));
        assert_eq!(pairs, [(5, 1, 2), (9000, 300, 0), (70_000, 0, 1)]);
    }

    /// A full terabyte at 64 KiB is sixteen million clusters.
    #[test]
    fn count_map_takes_little_memory_full_or_sparse() {
        let mut full = CountMap::new(0..u64::MAX);
        (0..1 << 24).for_each(|cluster| full.set(cluster, 1));
        assert!(full.memory_bytes() < 256 << 10, "{}", full.memory_bytes());
        let mut sparse = CountMap::new(0..u64::MAX);
        (0..1 << 10).for_each(|i| sparse.set(i << 20, 1));
        assert!(sparse.memory_bytes() < 8 << 20, "{}", sparse.memory_bytes());
        assert_eq!((full.get(77), sparse.get(3 << 20), sparse.get(77)), (1, 1, 0));
    }
}
