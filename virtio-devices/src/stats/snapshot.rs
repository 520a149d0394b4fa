//! Statistics at one moment: values that add up, give quantiles and the difference to an earlier moment, and go through JSON.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use super::RequestKind;

/// The number of latencies in one bucket of a histogram.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct LatencyBucket {
    /// They are all less than this, and not less than the bound of the bucket before, in nanoseconds.
    pub below_ns: u64,
    /// Their number. It is an estimate: a request that was measured stands for those that were not.
    pub count: u64,
}

/// A distribution of latencies, from the taking of a request out of its queue to its answer.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Latency {
    /// The buckets that are not empty, ascending.
    pub buckets: Vec<LatencyBucket>,
    /// The sum of all latencies in nanoseconds, an estimate as their number is.
    pub sum_ns: u64,
}

impl Latency {
    /// Returns the number of latencies: about that of requests.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.count).sum()
    }

    /// Returns the mean in nanoseconds; `None` if there is no latency.
    #[must_use]
    pub fn mean_ns(&self) -> Option<u64> {
        self.sum_ns.checked_div(self.count())
    }

    /// Returns the latency in nanoseconds that a share `q` of all does not exceed (0.999: p99.9), at most 6.25 % or 32 ns off;
    /// `None` if there is none. From 64 s on it is 64 s.
    #[must_use]
    pub fn quantile_ns(&self, q: f64) -> Option<u64> {
        let count = self.count();
        // The rank of the latency, from 1 on.
        let rank = ((q * count as f64).ceil() as u64).clamp(1, count.max(1));
        let mut below = 0;
        let found = self.buckets.iter().find(|bucket| {
            below += bucket.count;
            below >= rank
        })?;
        Some(middle_ns(found.below_ns))
    }

    /// Returns the number of latencies below `bound_ns`, as far as buckets tell: those of a bucket that reaches over it are
    /// left out.
    #[must_use]
    pub fn count_below(&self, bound_ns: u64) -> u64 {
        let below = self
            .buckets
            .iter()
            .take_while(|bucket| bucket.below_ns <= bound_ns);
        below.map(|bucket| bucket.count).sum()
    }

    fn since(&self, earlier: &Self) -> Self {
        let before = |bound| {
            let found = earlier.buckets.iter().find(|bucket| bucket.below_ns == bound);
            found.map_or(0, |bucket| bucket.count)
        };
        let left = self.buckets.iter().map(|bucket| LatencyBucket {
            count: bucket.count.saturating_sub(before(bucket.below_ns)),
            ..*bucket
        });
        Self {
            buckets: left.filter(|bucket| bucket.count > 0).collect(),
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
        }
    }
}

/// Returns the middle of the bucket that ends at `below_ns`.
fn middle_ns(below_ns: u64) -> u64 {
    let bucket = super::histogram::bucket(below_ns.saturating_sub(1));
    let begin = bucket.checked_sub(1).map_or(0, super::histogram::end_ns);
    begin + below_ns.saturating_sub(begin) / 2
}

impl AddAssign<&Latency> for Latency {
    fn add_assign(&mut self, other: &Latency) {
        for bucket in &other.buckets {
            let place = self
                .buckets
                .binary_search_by_key(&bucket.below_ns, |bucket| bucket.below_ns);
            match place {
                Ok(index) => self.buckets[index].count += bucket.count,
                Err(index) => self.buckets.insert(index, *bucket),
            }
        }
        self.sum_ns += other.sum_ns;
    }
}

/// The requests of one kind that were answered.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct KindSnapshot {
    /// Their number.
    pub requests: u64,
    /// The bytes that those which succeeded have read, written, discarded or zeroed.
    pub bytes: u64,
    /// The number of those that failed.
    pub errors: u64,
    /// Their latencies.
    pub latency: Latency,
}

impl KindSnapshot {
    fn since(&self, earlier: &Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(earlier.requests),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            errors: self.errors.saturating_sub(earlier.errors),
            latency: self.latency.since(&earlier.latency),
        }
    }
}

impl AddAssign<&KindSnapshot> for KindSnapshot {
    fn add_assign(&mut self, other: &KindSnapshot) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.latency += &other.latency;
    }
}

/// The requests of one queue, or of several.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct QueueSnapshot {
    /// Requests that were taken and are not answered.
    pub in_flight: u64,
    /// Reads.
    pub read: KindSnapshot,
    /// Writes.
    pub write: KindSnapshot,
    /// Flushes.
    pub flush: KindSnapshot,
    /// Discards.
    pub discard: KindSnapshot,
    /// Writes of zeros without data.
    pub write_zeroes: KindSnapshot,
    /// [`RequestKind::Other`].
    pub other: KindSnapshot,
}

impl QueueSnapshot {
    /// Returns the requests of one kind.
    #[must_use]
    pub fn kind(&self, kind: RequestKind) -> &KindSnapshot {
        match kind {
            RequestKind::Read => &self.read,
            RequestKind::Write => &self.write,
            RequestKind::Flush => &self.flush,
            RequestKind::Discard => &self.discard,
            RequestKind::WriteZeroes => &self.write_zeroes,
            RequestKind::Other => &self.other,
        }
    }

    pub(super) fn kind_mut(&mut self, kind: RequestKind) -> &mut KindSnapshot {
        match kind {
            RequestKind::Read => &mut self.read,
            RequestKind::Write => &mut self.write,
            RequestKind::Flush => &mut self.flush,
            RequestKind::Discard => &mut self.discard,
            RequestKind::WriteZeroes => &mut self.write_zeroes,
            RequestKind::Other => &mut self.other,
        }
    }

    /// Returns what was answered since `earlier`, a snapshot of the same queues; those in flight are the present ones. If
    /// counts have begun anew, because another process serves the disk, they are zero.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = Self {
            in_flight: self.in_flight,
            ..Self::default()
        };
        for kind in RequestKind::ALL {
            *difference.kind_mut(kind) = self.kind(kind).since(earlier.kind(kind));
        }
        difference
    }
}

impl AddAssign<&QueueSnapshot> for QueueSnapshot {
    fn add_assign(&mut self, other: &QueueSnapshot) {
        self.in_flight += other.in_flight;
        for kind in RequestKind::ALL {
            *self.kind_mut(kind) += other.kind(kind);
        }
    }
}

/// The statistics of a disk.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct DiskSnapshot {
    /// By number.
    pub queues: Vec<QueueSnapshot>,
}

impl DiskSnapshot {
    /// Returns the sum of all queues.
    #[must_use]
    pub fn sum(&self) -> QueueSnapshot {
        let mut sum = QueueSnapshot::default();
        for queue in &self.queues {
            sum += queue;
        }
        sum
    }
}
