//! A histogram of latencies with buckets of equal relative width.
//!
//! Up to 512 ns a bucket is 64 ns wide. From there on each power of two has eight, so that a bucket is at most an eighth wider
//! than its lower bound; its middle is at most a sixteenth, 6.25 %, from any latency in it. The last one also has everything
//! from 64 s on.

use std::sync::atomic::{AtomicU64, Ordering};

use super::snapshot::{Latency, LatencyBucket};

/// The unit of the bounds is 64 ns.
const UNIT_BITS: u32 = 6;
/// Eight buckets to each power of two.
const STEP_BITS: u32 = 3;
const STEPS: u64 = 1 << STEP_BITS;
/// Latencies from two to the power of this on, in units, are counted with those just below: 2^36 ns.
const END_BITS: u32 = 30;
/// The number of buckets.
pub(super) const BUCKETS: usize = ((END_BITS - STEP_BITS + 1) << STEP_BITS) as usize;

/// A histogram that one thread writes.
#[derive(Debug)]
pub(super) struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            sum_ns: AtomicU64::new(0),
        }
    }
}

/// Returns the number of the bucket that has a latency.
pub(super) fn bucket(ns: u64) -> usize {
    let units = (ns >> UNIT_BITS).min((1 << END_BITS) - 1);
    if units < STEPS {
        return units as usize;
    }
    let shift = units.ilog2() - STEP_BITS;
    // The highest four bits: 8 to 15.
    let top = units >> shift;
    (u64::from(shift) * STEPS + top) as usize
}

/// Returns the first latency past a bucket, in nanoseconds.
pub(super) fn end_ns(bucket: usize) -> u64 {
    let next = bucket as u64 + 1;
    let units = match (next / STEPS).checked_sub(1) {
        None => next,
        Some(shift) => (STEPS + next % STEPS) << shift,
    };
    units << UNIT_BITS
}

impl Histogram {
    /// Counts a latency that stands for so many of its kind.
    pub(super) fn count(&self, ns: u64, weight: u64) {
        super::add(&self.buckets[bucket(ns)], weight);
        super::add(&self.sum_ns, ns.saturating_mul(weight));
    }

    /// Returns what it has now.
    pub(super) fn snapshot(&self) -> Latency {
        let counts = self.buckets.iter().map(|count| count.load(Ordering::Relaxed));
        let used = counts.enumerate().filter(|&(_, count)| count > 0);
        Latency {
            buckets: used
                .map(|(index, count)| LatencyBucket {
                    below_ns: end_ns(index),
                    count,
                })
                .collect(),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
        }
    }
}
