//! The requests to a disk: their offsets, their order, how many at a time.
//!
//! The same stream of offsets drives every engine, over vhost-user and in-process, so that a ratio
//! compares engines and not orders. All offsets and lengths are bytes.

use clap::ValueEnum;
use ringdisk_gen::Random;
use serde::{Deserialize, Serialize};

/// The cluster size of every image measured, in bytes.
pub(crate) const CLUSTER_BYTES: u64 = 64 * 1024;

/// The order of requests, and what they do.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Pattern {
    /// Reads of whole blocks anywhere on the disk.
    RandomRead,
    /// Writes of whole blocks anywhere on the disk.
    RandomWrite,
    /// Reads from the start of the disk to its end, then again.
    SequentialRead,
    /// Writes from the start of the disk to its end, then again.
    SequentialWrite,
    /// Writes of one block in every cluster, each cluster once, in a scattered order; then one flush,
    /// which counts into the time.
    OncePerCluster,
    /// A write anywhere, then a flush: the pair counts as one operation.
    WriteFlush,
}

impl Pattern {
    /// Returns true if the pattern writes.
    #[must_use]
    pub(crate) fn writes(self) -> bool {
        !matches!(self, Self::RandomRead | Self::SequentialRead)
    }
}

/// One thing to measure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Workload {
    /// The order of requests, and what they do.
    pub(crate) pattern: Pattern,
    /// The bytes that each request moves.
    pub(crate) block_bytes: u32,
    /// The number of requests kept in flight.
    pub(crate) depth: u16,
    /// The size of the disk in bytes.
    pub(crate) disk_bytes: u64,
}

/// The offsets of a workload, one after another.
#[derive(Clone, Debug)]
pub(crate) struct Offsets {
    pattern: Pattern,
    block_bytes: u64,
    blocks: u64,
    random: Random,
    next: u64,
}

impl Offsets {
    /// The stream for `workload`; clients that run beside each other take different seeds.
    #[must_use]
    pub(crate) fn new(workload: &Workload, seed: u64) -> Self {
        let unit = match workload.pattern {
            Pattern::OncePerCluster => CLUSTER_BYTES,
            _ => u64::from(workload.block_bytes),
        };
        Self {
            pattern: workload.pattern,
            block_bytes: u64::from(workload.block_bytes),
            blocks: workload.disk_bytes / unit,
            random: Random::new(seed),
            next: 0,
        }
    }

    /// The next offset, in bytes; `None` when every cluster has had its write.
    #[inline]
    pub(crate) fn next_offset(&mut self) -> Option<u64> {
        match self.pattern {
            Pattern::RandomRead | Pattern::RandomWrite | Pattern::WriteFlush => {
                let high = (u128::from(self.random.draw()) * u128::from(self.blocks)) >> 64;
                Some(high as u64 * self.block_bytes)
            }
            Pattern::SequentialRead | Pattern::SequentialWrite => {
                let block = self.next;
                self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
                Some(block * self.block_bytes)
            }
            Pattern::OncePerCluster => {
                if self.next == self.blocks {
                    return None;
                }
                let cluster = scatter(self.next, self.blocks);
                self.next += 1;
                let inside = (self.random.draw() % (CLUSTER_BYTES / self.block_bytes)) * self.block_bytes;
                Some(cluster * CLUSTER_BYTES + inside)
            }
        }
    }
}

/// A permutation of `0..len`: scatters neighbours. Walks the cycle of a permutation of the next power
/// of two until it is back inside.
fn scatter(index: u64, len: u64) -> u64 {
    let size = len.next_power_of_two();
    let mask = size - 1;
    let half = (size.trailing_zeros() / 2).max(1);
    let mut x = index;
    loop {
        x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15) & mask;
        x ^= x >> half;
        x = x.wrapping_mul(0xc2b2_ae3d_27d4_eb4f) & mask;
        if x < len {
            return x;
        }
    }
}

/// The result of one measurement.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct Sample {
    /// Operations that completed.
    pub(crate) ops: u64,
    /// The time that they took, in seconds.
    pub(crate) seconds: f64,
    /// The mean latency, in microseconds.
    pub(crate) mean_us: f64,
    /// The latency that 99 of 100 stay below, in microseconds.
    pub(crate) p99_us: f64,
    /// The latency that 999 of 1,000 stay below, in microseconds.
    #[serde(default)]
    pub(crate) p999_us: f64,
    /// The longest latency, in microseconds.
    #[serde(default)]
    pub(crate) longest_us: f64,
    /// The CPU time of the engine meanwhile, user and system, in seconds; of the server alone if there is one.
    pub(crate) cpu_seconds: f64,
    /// The engine's own resident memory at the end, in MiB: without memory shared with the client.
    pub(crate) resident_mib: f64,
}

impl Sample {
    /// Operations per second.
    #[must_use]
    pub(crate) fn iops(&self) -> f64 {
        self.ops as f64 / self.seconds.max(1e-9)
    }

    /// Bytes per second, in GB, of operations of so many bytes.
    #[must_use]
    pub(crate) fn gb_per_second(&self, block_bytes: u32) -> f64 {
        self.iops() * f64::from(block_bytes) / 1e9
    }

    /// CPU seconds per million operations.
    #[must_use]
    pub(crate) fn cpu_per_million(&self) -> f64 {
        self.cpu_seconds / (self.ops.max(1) as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn workload(pattern: Pattern, disk_bytes: u64) -> Workload {
        Workload {
            pattern,
            block_bytes: 4096,
            depth: 64,
            disk_bytes,
        }
    }

    #[test]
    fn once_per_cluster_visits_every_cluster_exactly_once() {
        for clusters in [1, 2, 3, 100, 1024, 5000] {
            let mut offsets = Offsets::new(&workload(Pattern::OncePerCluster, clusters * CLUSTER_BYTES), 1);
            let mut seen = HashSet::new();
            while let Some(offset) = offsets.next_offset() {
                assert_eq!(offset % 4096, 0);
                assert!(
                    seen.insert(offset / CLUSTER_BYTES),
                    "{clusters}: cluster visited twice"
                );
            }
            assert_eq!(seen.len() as u64, clusters);
            assert!(seen.iter().all(|&cluster| cluster < clusters));
        }
    }

    #[test]
    fn random_offsets_are_whole_blocks_and_reach_the_whole_disk() {
        let mut offsets = Offsets::new(&workload(Pattern::RandomRead, 64 * 4096), 7);
        let mut seen = HashSet::new();
        for _ in 0..2000 {
            let offset = offsets.next_offset().unwrap_or(u64::MAX);
            assert_eq!(offset % 4096, 0);
            assert!(offset < 64 * 4096);
            seen.insert(offset);
        }
        assert_eq!(seen.len(), 64);
    }

    #[test]
    fn sequential_offsets_wrap_at_the_end() {
        let mut offsets = Offsets::new(&workload(Pattern::SequentialRead, 3 * 4096), 1);
        let first: Vec<_> = (0..4).filter_map(|_| offsets.next_offset()).collect();
        assert_eq!(first, [0, 4096, 8192, 0]);
    }

    #[test]
    fn sample_divides_by_its_own_time_and_operations() {
        let sample = Sample {
            ops: 2_000_000,
            seconds: 4.0,
            cpu_seconds: 3.0,
            ..Sample::default()
        };
        assert!((sample.iops() - 500_000.0).abs() < 0.1);
        assert!((sample.cpu_per_million() - 1.5).abs() < 1e-9);
    }
}
