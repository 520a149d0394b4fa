//! Latencies, counted in buckets whose width grows with the value.
//!
//! Recording is a few instructions and never allocates, so that it can sit in the client's loop.
//! Each power of two is cut into 64 buckets: a percentile is right within 1.6 %.
//! Values are nanoseconds; what is longer than about 18 minutes counts as that.

/// Buckets per power of two, as a power of two.
const SUB_BITS: u32 = 6;
/// Buckets per power of two.
const SUB: usize = 1 << SUB_BITS;
/// Powers of two covered: up to 2^40 ns.
const RANGES: usize = 40 - SUB_BITS as usize + 1;

/// The number of times that each latency was seen.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: vec![0; SUB * RANGES],
            count: 0,
            sum_ns: 0,
        }
    }
}

/// The bucket a value falls into.
#[inline]
fn bucket_of(ns: u64) -> usize {
    let ns = ns.min((1 << 40) - 1);
    if ns < SUB as u64 {
        return ns as usize;
    }
    let shift = (63 - ns.leading_zeros()) - SUB_BITS;
    (shift as usize + 1) * SUB + ((ns >> shift) as usize - SUB)
}

/// The middle of a bucket, in nanoseconds.
fn middle_of(bucket: usize) -> f64 {
    if bucket < SUB {
        return bucket as f64;
    }
    let shift = bucket / SUB - 1;
    let low = ((bucket % SUB + SUB) as u64) << shift;
    low as f64 + (1_u64 << shift) as f64 / 2.0
}

impl Histogram {
    /// Counts one latency, in nanoseconds.
    #[inline]
    pub(crate) fn record(&mut self, ns: u64) {
        self.buckets[bucket_of(ns)] += 1;
        self.count += 1;
        self.sum_ns += ns;
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.buckets.fill(0);
        self.count = 0;
        self.sum_ns = 0;
    }

    /// Adds what another histogram counted.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
        self.sum_ns += other.sum_ns;
    }

    /// The mean in microseconds; 0 if nothing was counted.
    #[must_use]
    pub(crate) fn mean_us(&self) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        self.sum_ns as f64 / self.count as f64 / 1000.0
    }

    /// The latency in microseconds that `fraction` (0 to 1) of all stay below; 0 if nothing was counted.
    #[must_use]
    pub(crate) fn percentile_us(&self, fraction: f64) -> f64 {
        let wanted = (self.count as f64 * fraction).ceil() as u64;
        let mut seen = 0;
        for (bucket, &n) in self.buckets.iter().enumerate() {
            seen += n;
            if n > 0 && seen >= wanted {
                return middle_of(bucket) / 1000.0;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_middle_is_close_to_its_values() {
        for ns in [
            0,
            1,
            63,
            64,
            65,
            127,
            128,
            1_000,
            54_321,
            1_000_000,
            5_000_000_000,
        ] {
            let middle = middle_of(bucket_of(ns));
            let error = (middle - ns as f64).abs() / (ns as f64).max(1.0);
            assert!(error <= 0.016, "{ns} ns lands in a bucket around {middle}");
        }
        assert_eq!(bucket_of(u64::MAX), SUB * RANGES - 1);
    }

    #[test]
    fn percentile_99_ignores_the_slowest_hundredth() {
        let mut histogram = Histogram::default();
        for _ in 0..990 {
            histogram.record(10_000);
        }
        for _ in 0..10 {
            histogram.record(9_000_000);
        }
        assert!((histogram.percentile_us(0.99) - 10.0).abs() < 0.2);
        assert!((histogram.percentile_us(1.0) - 9000.0).abs() < 150.0);
        assert!((histogram.mean_us() - 99.9).abs() < 0.1);
    }

    #[test]
    fn merge_counts_both_histograms() {
        let mut one = Histogram::default();
        one.record(1_000);
        let mut two = Histogram::default();
        two.record(3_000);
        one.merge(&two);
        assert!((one.mean_us() - 2.0).abs() < 0.001);
    }
}
