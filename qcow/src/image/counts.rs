//! A reference count for every cluster of a file, in little memory.
//!
//! One byte per cluster, in chunks that exist only where something was counted; the few counts
//! that need more are kept aside. So the size follows what is referenced, and is bounded by the
//! file's length.

use std::collections::BTreeMap;

/// How many clusters one chunk counts.
const CHUNK: usize = 4096;
/// The byte that says: look in `large`.
const LARGE: u8 = u8::MAX;

/// Reference counts by cluster number.
#[derive(Debug, Default)]
pub(crate) struct CountMap {
    chunks: BTreeMap<u64, Box<[u8; CHUNK]>>,
    large: BTreeMap<u64, u64>,
}

fn place(cluster: u64) -> (u64, usize) {
    (cluster / CHUNK as u64, (cluster % CHUNK as u64) as usize)
}

impl CountMap {
    /// The count of a cluster; 0 unless something was counted.
    pub(crate) fn get(&self, cluster: u64) -> u64 {
        let (chunk, at) = place(cluster);
        match self.chunks.get(&chunk).map_or(0, |counts| counts[at]) {
            LARGE => self.large.get(&cluster).copied().unwrap_or_default(),
            count => u64::from(count),
        }
    }

    /// Sets the count of a cluster.
    pub(crate) fn set(&mut self, cluster: u64, count: u64) {
        let (chunk, at) = place(cluster);
        if count == 0 && !self.chunks.contains_key(&chunk) {
            return;
        }
        let counts = self.chunks.entry(chunk).or_insert_with(|| Box::new([0; CHUNK]));
        let small = match u8::try_from(count) {
            Ok(small) if small < LARGE => small,
            _ => LARGE,
        };
        if counts[at] == LARGE && small != LARGE {
            self.large.remove(&cluster);
        }
        counts[at] = small;
        if small == LARGE {
            self.large.insert(cluster, count);
        }
    }

    /// Adds `more` to a cluster's count. `false`, and the count stays at `max`, if that would
    /// take it beyond.
    #[must_use]
    pub(crate) fn add(&mut self, cluster: u64, more: u64, max: u64) -> bool {
        let (chunk, at) = place(cluster);
        let counts = self.chunks.entry(chunk).or_insert_with(|| Box::new([0; CHUNK]));
        let small = &mut counts[at];
        // The common case, without a second look-up.
        if let Some(sum) = u8::try_from(more).ok().and_then(|more| small.checked_add(more))
            && sum < LARGE
            && u64::from(sum) <= max
        {
            *small = sum;
            return true;
        }
        let sum = self.get(cluster).saturating_add(more);
        self.set(cluster, sum.min(max));
        sum <= max
    }

    /// The clusters with a count, in order.
    pub(crate) fn nonzero(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.chunks.iter().flat_map(move |(&chunk, counts)| {
            let first = chunk * CHUNK as u64;
            let used = (first..).zip(counts.iter()).filter(|&(_, &count)| count != 0);
            used.map(move |(cluster, &count)| match count {
                LARGE => (cluster, self.large.get(&cluster).copied().unwrap_or_default()),
                count => (cluster, u64::from(count)),
            })
        })
    }

    /// The last cluster with a count.
    pub(crate) fn last(&self) -> Option<u64> {
        self.chunks.iter().rev().find_map(|(&chunk, counts)| {
            let at = counts.iter().rposition(|&count| count != 0)?;
            Some(chunk * CHUNK as u64 + at as u64)
        })
    }

    /// Calls `each(cluster, ours, theirs)` wherever two maps have a count, in order.
    pub(crate) fn for_each_pair(&self, other: &Self, mut each: impl FnMut(u64, u64, u64)) {
        let mut chunks: Vec<u64> = self.chunks.keys().chain(other.chunks.keys()).copied().collect();
        chunks.sort_unstable();
        chunks.dedup();
        for chunk in chunks {
            let first = chunk * CHUNK as u64;
            for cluster in first..first + CHUNK as u64 {
                let (ours, theirs) = (self.get(cluster), other.get(cluster));
                if ours != 0 || theirs != 0 {
                    each(cluster, ours, theirs);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_counts_like_a_plain_map(
            ops in prop::collection::vec((0u64..20_000, 0u64..400, any::<bool>()), 0..300),
            max in 1u64..1000,
        ) {
            let mut map = CountMap::default();
            let mut model = BTreeMap::new();
            for (cluster, count, add) in ops {
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
            prop_assert_eq!(map.nonzero().collect::<Vec<_>>(), model.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn pairs_come_from_either_map_in_order() {
        let (mut ours, mut theirs) = (CountMap::default(), CountMap::default());
        ours.set(5, 1);
        ours.set(9000, 300);
        theirs.set(5, 2);
        theirs.set(70_000, 1);
        let mut pairs = Vec::new();
        ours.for_each_pair(&theirs, |cluster, a, b| pairs.push((cluster, a, b)));
        assert_eq!(pairs, [(5, 1, 2), (9000, 300, 0), (70_000, 0, 1)]);
    }
}
