//! Merges of bitmaps: a destination gets all bits of a source, also of another granularity.
//!
//! One cluster of the destination and one of the source are in memory at a time. Clusters that are all zeros or all ones
//! stay table entries.

use block::AlignedBuf;

use super::{BitmapsError, Operation};
use crate::format::{BitmapCluster, BitmapDirectoryEntry, ClusterUse};

/// The bits of a source, a cluster at a time.
struct Source {
    table: Vec<BitmapCluster>,
    granularity: u64,
    bits: u64,
    loaded: Option<(u64, AlignedBuf)>,
}

impl Operation<'_> {
    /// Gives the bitmap `to` the bits of `from`. Returns the content of the clusters of its new table. Data clusters that do not change
    /// stay, and the others are given up.
    pub(super) async fn merge(
        &mut self,
        from: &BitmapDirectoryEntry,
        to: &BitmapDirectoryEntry,
    ) -> Result<Vec<BitmapCluster>, BitmapsError> {
        let mut source = Source {
            table: self.tables.table_of(from).await?,
            granularity: from.granularity(),
            bits: from.bits(&self.geometry),
            loaded: None,
        };
        let mut table = self.tables.table_of(to).await?;
        let per_cluster = self.geometry.cluster_size() * 8;
        let (size, granularity, bits) = (
            self.geometry.virtual_size(),
            to.granularity(),
            to.bits(&self.geometry),
        );
        for (index, entry) in (0..).zip(&mut table) {
            let first = index * per_cluster;
            let count = per_cluster.min(bits.saturating_sub(first));
            let start = first.saturating_mul(granularity);
            let end = (first + count).saturating_mul(granularity).min(size);
            if *entry == BitmapCluster::Ones || start >= end {
                continue;
            }
            let wanted = start / source.granularity..end.div_ceil(source.granularity).min(source.bits);
            let clusters = wanted.start / per_cluster..wanted.end.div_ceil(per_cluster);
            let is_zero = |at: u64| source.table.get(at as usize) == Some(&BitmapCluster::Zeros);
            if clusters.clone().all(is_zero) {
                continue;
            }
            let mut merged = match *entry {
                BitmapCluster::Data(host) => self.tables.read_bits(host).await?.to_vec(),
                _ => vec![0; self.geometry.cluster_size() as usize],
            };
            // Bits past the disk's end mean nothing, and are stored as zeros.
            clear_from(&mut merged, count);
            let before = merged.clone();
            for at in clusters {
                let from = wanted.start.max(at * per_cluster);
                let until = wanted.end.min((at + 1) * per_cluster);
                let mut set = |first: u64, end: u64| {
                    let low = (first * source.granularity).max(start) - start;
                    let high = end
                        .saturating_mul(source.granularity)
                        .min(size.min(start + count * granularity))
                        - start;
                    set_bits(&mut merged, low / granularity, high.div_ceil(granularity));
                };
                match source.table.get(at as usize) {
                    Some(BitmapCluster::Ones) => set(from, until),
                    Some(&BitmapCluster::Data(host)) => {
                        if source.loaded.as_ref().is_none_or(|(loaded, _)| *loaded != at) {
                            source.loaded = Some((at, self.tables.read_bits(host).await?));
                        }
                        let base = at * per_cluster;
                        if let Some((_, bytes)) = &source.loaded {
                            for_each_run(bytes, from - base, until - base, |first, end| {
                                set(base + first, base + end);
                            });
                        }
                    }
                    _ => {}
                }
            }
            if merged == before {
                continue;
            }
            if let BitmapCluster::Data(host) = *entry {
                self.release_data(vec![host]).await?;
            }
            *entry = match merged.iter().all(|&byte| byte == 0xFF) {
                true => BitmapCluster::Ones,
                false => BitmapCluster::Data(self.switch.new_table(ClusterUse::BitmapData, merged).await?),
            };
        }
        Ok(table)
    }
}

/// Clears all bits from number `first` on.
pub(super) fn clear_from(bytes: &mut [u8], first: u64) {
    let (whole, rest) = ((first / 8) as usize, first % 8);
    if let Some(byte) = bytes.get_mut(whole) {
        *byte &= (1 << rest) - 1;
    }
    if let Some(tail) = bytes.get_mut(whole + 1..) {
        tail.fill(0);
    }
}

/// Sets the bits from `first` up to `end`; the lowest bit of a byte is its first.
fn set_bits(bytes: &mut [u8], mut first: u64, end: u64) {
    while first < end {
        let byte = (first / 8) as usize;
        if first.is_multiple_of(8) && end - first >= 8 {
            let last = (end / 8) as usize;
            if let Some(whole) = bytes.get_mut(byte..last) {
                whole.fill(0xFF);
            }
            first = end & !7;
        } else {
            if let Some(byte) = bytes.get_mut(byte) {
                *byte |= 1 << (first % 8);
            }
            first += 1;
        }
    }
}

/// Calls `each(first, end)` for runs of set bits among those from `first` up to `end`.
fn for_each_run(bytes: &[u8], first: u64, end: u64, mut each: impl FnMut(u64, u64)) {
    let mut at = first;
    let mut run = None;
    while at < end {
        let byte = bytes.get((at / 8) as usize).copied().unwrap_or_default();
        let is_whole = at.is_multiple_of(8) && end - at >= 8;
        let (is_set, len) = match byte {
            0 | 0xFF if is_whole => (byte != 0, 8),
            _ => (byte >> (at % 8) & 1 == 1, 1),
        };
        if is_set {
            run.get_or_insert(at);
        } else if let Some(first) = run.take() {
            each(first, at);
        }
        at += len;
    }
    if let Some(first) = run {
        each(first, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Method: each range of a small set, set and found again, against bits one by one.
    #[test]
    fn runs_are_those_that_were_set() {
        for first in 0..40 {
            for end in first..=40 {
                let mut bytes = [0; 5];
                set_bits(&mut bytes, first, end);
                for bit in 0..40 {
                    let is_set = bytes[bit as usize / 8] >> (bit % 8) & 1 == 1;
                    assert_eq!(is_set, (first..end).contains(&bit));
                }
                for (from, until) in [(0, 40), (3, 29), (8, 33)] {
                    let mut found = Vec::new();
                    for_each_run(&bytes, from, until, |first, end| found.extend(first..end));
                    let expected: Vec<u64> = (first.max(from)..end.min(until)).collect();
                    assert_eq!(found, expected);
                }
                clear_from(&mut bytes, first);
                assert_eq!(bytes, [0; 5]);
            }
        }
    }
}
