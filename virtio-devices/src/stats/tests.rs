//! Histograms and samples against exact figures.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use block::Context;
use block::ring::{Ring, RingKind};
use block::timer::Clock;
use ringdisk_gen::Random;

use super::histogram::{BUCKETS, Histogram, bucket, end_ns};
use super::*;

#[test]
fn buckets_are_adjacent_and_at_most_an_eighth_wide() {
    let mut begin = 0;
    for index in 0..BUCKETS {
        let end = end_ns(index);
        assert!(end > begin, "{index}");
        assert!(end - begin <= (begin / 8).max(64), "{index}: {begin} to {end}");
        assert_eq!((bucket(begin), bucket(end - 1)), (index, index));
        begin = end;
    }
    assert_eq!(begin, 1 << 36);
    assert_eq!(bucket(u64::MAX), BUCKETS - 1);
}

/// Returns the exact quantile of sorted values.
fn exact(sorted: &[u64], q: f64) -> u64 {
    let rank = ((q * sorted.len() as f64).ceil() as usize).max(1);
    sorted[rank - 1]
}

#[test]
fn quantiles_are_at_most_a_sixteenth_or_32_ns_off() {
    for seed in 1..=50 {
        let mut random = Random::new(seed);
        let histogram = Histogram::default();
        let widest = random.below(36);
        let mut latencies: Vec<u64> = (0..5000)
            .map(|_| {
                let bits = random.below(widest + 1);
                random.below(2 << bits)
            })
            .collect();
        latencies.iter().for_each(|&ns| histogram.count(ns, 1));
        latencies.sort_unstable();
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count(), 5000);
        let mean = latencies.iter().sum::<u64>() / 5000;
        assert_eq!(snapshot.mean_ns(), Some(mean), "seed {seed}");
        for q in [0.0, 0.001, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let (found, exact) = (snapshot.quantile_ns(q), exact(&latencies, q));
            let off = found.expect("there are latencies").abs_diff(exact);
            assert!(
                off <= (exact / 16).max(32),
                "seed {seed}: p{q} is {found:?}, not {exact}"
            );
        }
    }
    assert_eq!(Latency::default().quantile_ns(0.5), None);
}

/// A clock that its test moves.
#[derive(Debug, Default)]
struct Still(Cell<u64>, Cell<u32>);

impl Clock for Still {
    fn now(&self) -> Duration {
        self.1.set(self.1.get() + 1);
        Duration::from_nanos(self.0.get())
    }

    fn wake_at(&self, _: &Ring, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

/// A meter on such a clock, whose requests are taken and answered together.
struct Bench {
    clock: Rc<Still>,
    meter: Meter,
    stats: Arc<QueueStats>,
}

impl Bench {
    fn new() -> Self {
        let (clock, stats) = (Rc::new(Still::default()), Arc::new(QueueStats::default()));
        let ring = Ring::new(RingKind::Syscalls, 16).expect("no kernel support is needed");
        let cx = Context::with_clock(ring, Rc::clone(&clock) as Rc<dyn Clock>);
        let meter = Meter::new(Arc::clone(&stats), cx, 1024);
        Self { clock, meter, stats }
    }

    /// Takes requests of these kinds, and answers them all after a time, as a queue does.
    fn round(&mut self, kinds: &[RequestKind], ns: u64) {
        let picked = self.meter.pick(kinds.len());
        let mut marked = vec![false; kinds.len()];
        for (tag, kind) in kinds.iter().enumerate() {
            if !kind.has_data() {
                self.meter.mark(tag as u16);
                marked[tag] = true;
            } else if picked == Some(tag) {
                self.meter.mark_picked(tag as u16);
                marked[tag] = true;
            }
        }
        self.meter.taken(kinds.len());
        assert_eq!(self.stats.snapshot().in_flight, kinds.len() as u64);
        self.clock.0.set(self.clock.0.get() + ns);
        self.meter.begin_answering();
        for (tag, &kind) in kinds.iter().enumerate() {
            if marked[tag] {
                self.meter.measured(tag as u16, kind);
            }
            self.meter.succeed(kind, 512);
        }
        assert_eq!(self.stats.snapshot().in_flight, 0);
    }
}

/// A guest that flushes after each write has a period that samples could agree with.
#[test]
fn samples_estimate_the_number_of_each_kind() {
    let (read, write, flush) = (RequestKind::Read, RequestKind::Write, RequestKind::Flush);
    let patterns: [&[RequestKind]; 4] = [
        &[read, flush],
        &[read, write, flush],
        &[flush, write, write, read],
        &[read; 64],
    ];
    for (pattern, together) in patterns
        .into_iter()
        .flat_map(|pattern| [1, 2, 7, 32, 500].map(|together| (pattern, together)))
    {
        let mut bench = Bench::new();
        let mut kinds = pattern.iter().copied().cycle();
        for _ in 0..300_000 / together {
            let kinds: Vec<_> = kinds.by_ref().take(together).collect();
            bench.round(&kinds, 1000);
        }
        let snapshot = bench.stats.snapshot();
        for kind in [read, write] {
            let kind = snapshot.kind(kind);
            let share = kind.latency.count() as f64 / (kind.requests as f64).max(1.0);
            let is_right = kind.requests == 0 || (0.9..1.1).contains(&share);
            assert!(
                is_right,
                "{pattern:?} by {together}: {share} of {}",
                kind.requests
            );
        }
        assert_eq!(snapshot.flush.latency.count(), snapshot.flush.requests);
        assert_eq!(snapshot.read.latency.mean_ns(), Some(1000));
        assert_eq!(snapshot.read.bytes, snapshot.read.requests * 512);
    }
}

#[test]
fn clock_is_read_twice_for_few_rounds_and_never_for_others() {
    let mut bench = Bench::new();
    for _ in 0..64_000 {
        bench.round(&[RequestKind::Read], 10);
    }
    let reads = bench.clock.1.get();
    assert!((1800..2200).contains(&reads), "{reads} for 64000 requests");
    bench.clock.1.set(0);
    bench.round(&[RequestKind::Flush; 8], 10);
    assert_eq!(bench.clock.1.get(), 2);
}

#[test]
fn first_request_after_idle_time_is_measured_for_itself() {
    let mut bench = Bench::new();
    for round in 1..=100 {
        bench.meter.idle();
        // Asked again before a request came.
        bench.meter.idle();
        bench.round(&[RequestKind::Read], 5000);
        assert_eq!(bench.stats.snapshot().read.latency.count(), round);
    }
    // Those between are sampled as ever.
    for _ in 0..1000 {
        bench.meter.idle();
        bench.meter.idle();
        bench.round(&[RequestKind::Read], 5000);
        for _ in 0..99 {
            bench.round(&[RequestKind::Write], 5000);
        }
    }
    let snapshot = bench.stats.snapshot();
    assert_eq!(snapshot.read.latency.count(), snapshot.read.requests);
    let share = snapshot.write.latency.count() as f64 / 99_000.0;
    assert!((0.9..1.1).contains(&share), "{share}");
}

#[test]
fn snapshots_add_up_and_differ() {
    let stats = DiskStats::default();
    let (first, third) = (stats.queue(0), stats.queue(2));
    first.begin(3);
    first.succeed(RequestKind::Read, 4096);
    first.latencies[0].count(1000, 1);
    let before = stats.snapshot();
    assert_eq!(before.queues.len(), 3);
    first.succeed(RequestKind::Read, 512);
    first.latencies[0].count(1000, 64);
    first.latencies[0].count(70_000, 1);
    third.begin(1);
    third.fail(RequestKind::Discard);
    let after = stats.snapshot();
    let sum = after.sum();
    assert_eq!((sum.read.requests, sum.read.bytes, sum.in_flight), (2, 4608, 1));
    assert_eq!(
        (sum.discard.requests, sum.discard.errors, sum.discard.bytes),
        (1, 1, 0)
    );
    assert_eq!(sum.read.latency.count(), 66);
    assert_eq!(sum.read.latency.count_below(2048), 65);
    let difference = sum.since(&before.sum());
    assert_eq!((difference.read.requests, difference.read.bytes), (1, 512));
    assert_eq!(difference.read.latency.count(), 65);
    assert_eq!(difference.read.latency.sum_ns, 134_000);
    // Another process: all begins anew.
    assert_eq!(before.sum().since(&sum).read.requests, 0);
    assert_eq!(stats.queue(0).snapshot(), after.queues[0], "the same queue");
}
