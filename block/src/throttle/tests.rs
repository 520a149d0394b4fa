//! Throttled disks in a time that stands still until it is told, and in real time on real workers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Poll, Waker};
use std::time::Instant;

use super::*;
use crate::buffer::{AlignedBuf, Buffer};
use crate::file::{FileOptions, ImageFile};
use crate::raw::RawDisk;
use crate::request::{CompletionSink, Done, check_range};
use crate::ring::{Ring, RingKind};
use crate::status::Content;
use crate::timer::Clock;
use crate::timer::tests::Still;

/// A disk that answers at once.
#[derive(Debug)]
struct Instantly;

impl Disk for Instantly {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: 1 << 40,
            read_only: false,
            preferred_io_bytes: 4096,
            physical_block_bytes: 512,
            discard: true,
            discard_granularity_bytes: 4096,
            write_zeroes: true,
        }
    }

    fn open_queue(self: Arc<Self>, _: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Ok(Box::new(Self))
    }

    fn close(self: Arc<Self>, _: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }
}

impl DiskQueue for Instantly {
    fn submit(&self, request: Request) {
        let inside = check_range(request.offset, request.len, 1 << 40);
        request.finish(inside);
    }
}

fn rate(size: u64, refill_ms: u64) -> Option<Rate> {
    Some(Rate {
        size,
        refill: Duration::from_millis(refill_ms),
        one_time_burst: 0,
    })
}

/// One worker with one queue, and all that was answered on it.
struct Bench {
    clock: Rc<Still>,
    cx: Context,
    disk: Arc<ThrottledDisk>,
    queue: Box<dyn DiskQueue>,
    sink: Rc<CompletionSink>,
    answered: Vec<u64>,
}

impl Bench {
    fn new(limits: RateLimits) -> Self {
        Self::sharing(&Limiter::new(&limits))
    }

    fn sharing(limiter: &Arc<Limiter>) -> Self {
        let clock = Rc::new(Still::default());
        let ring = Ring::new(RingKind::Syscalls, 16).expect("no kernel support is needed");
        let cx = Context::with_clock(ring, Rc::clone(&clock) as Rc<dyn Clock>);
        let disk = ThrottledDisk::new(Arc::new(Instantly), Arc::clone(limiter));
        Self {
            queue: (Arc::clone(&disk) as Arc<dyn Disk>)
                .open_queue(&cx)
                .expect("a queue"),
            clock,
            cx,
            disk,
            sink: CompletionSink::new(),
            answered: Vec::new(),
        }
    }

    fn submit(&self, op: Op, len: u64, tag: u64) {
        self.queue
            .submit(Request::new(op, 0, len, Buffer::default(), &self.sink, tag));
    }

    /// Goes on to `millis` and answers what has been answered since the last time.
    fn at(&mut self, millis: u64) -> Vec<u64> {
        self.clock.0.set(Duration::from_millis(millis));
        self.cx.run_ready();
        let mut done: Vec<Done> = Vec::new();
        self.sink.drain_into(&mut done);
        let tags: Vec<u64> = done
            .iter()
            .map(|done| {
                assert_eq!(done.result, Ok(()));
                done.tag
            })
            .collect();
        self.answered.extend(&tags);
        tags
    }
}

impl Drop for Bench {
    /// A context whose tasks have not ended goes with nobody.
    fn drop(&mut self) {
        while !std::thread::panicking() && self.cx.tasks() > 0 {
            let now = self.clock.now().as_millis() as u64;
            self.at(now + 1000);
        }
    }
}

#[test]
fn throttle_delays_requests_to_the_millisecond_in_order() {
    // 4096 bytes in 4 ms; the slack lets it hold more, but only while nobody asks.
    let mut bench = Bench::new(RateLimits {
        bandwidth: rate(8192, 8),
        ops: None,
    });
    bench.submit(Op::Read, 51_200, 0);
    assert_eq!(
        bench.at(0),
        [0],
        "a bucket begins full, and what is larger passes"
    );
    // The debt is paid after 42 ms.
    let begin = 42 + 8;
    assert_eq!(bench.at(begin), [0; 0]);
    for tag in 1..=6 {
        bench.submit(Op::Write { fua: false }, 4096, tag);
    }
    bench.submit(Op::Flush, 0, 7);
    assert_eq!(bench.at(begin), [1, 2], "eight milliseconds have filled it");
    for (millis, expected) in [
        (3, &[][..]),
        (4, &[3]),
        (7, &[]),
        (8, &[4]),
        (15, &[5]),
        (16, &[6, 7]),
    ] {
        assert_eq!(bench.at(begin + millis), expected, "{millis} ms later");
    }
    assert_eq!(bench.cx.tasks(), 0, "nobody waits, so no task does");
}

#[test]
fn throttle_charges_bytes_for_reads_and_writes_ops_for_all() {
    let ops = [
        (Op::Read, true),
        (Op::Write { fua: true }, true),
        (Op::Flush, false),
        (Op::Discard, false),
        (
            Op::WriteZeroes {
                unmap: false,
                fua: false,
            },
            false,
        ),
    ];
    for (op, costs) in ops {
        let mut bytes = Bench::new(RateLimits {
            bandwidth: rate(1 << 20, 1000),
            ops: None,
        });
        let len = if op == Op::Flush { 0 } else { 1 << 20 };
        (0..3).for_each(|tag| bytes.submit(op, len, tag));
        assert_eq!(bytes.at(0).len(), if costs { 1 } else { 3 }, "{op:?}");
        let mut requests = Bench::new(RateLimits {
            bandwidth: None,
            ops: rate(2, 1000),
        });
        (0..3).for_each(|tag| requests.submit(op, len, tag));
        assert_eq!(requests.at(0).len(), 2, "{op:?}");
    }
}

#[test]
fn throttle_applies_both_limits_together() {
    let mut bench = Bench::new(RateLimits {
        bandwidth: rate(1 << 20, 1000),
        ops: rate(10, 1000),
    });
    // Small ones meet the limit of requests, large ones that of bytes.
    (0..20).for_each(|tag| bench.submit(Op::Read, 512, tag));
    assert_eq!(bench.at(0).len(), 10);
    assert_eq!(bench.at(1000).len(), 10);
    assert_eq!(bench.at(10_000).len(), 0);
    (0..8).for_each(|tag| bench.submit(Op::Read, 512 << 10, tag));
    assert_eq!(bench.at(10_000).len(), 2);
    assert_eq!(bench.at(11_000).len(), 2);
}

#[test]
fn throttled_queues_take_turns_at_any_depth() {
    let limiter = Limiter::new(&RateLimits {
        bandwidth: None,
        ops: rate(100, 1000),
    });
    let mut deep = Bench::sharing(&limiter);
    let mut shallow = Bench::sharing(&limiter);
    (0..2000).for_each(|tag| deep.submit(Op::Read, 512, tag));
    let mut had = 0;
    shallow.submit(Op::Read, 512, 0);
    for millis in (0..=4000).step_by(5) {
        deep.at(millis);
        for _ in shallow.at(millis) {
            had += 1;
            shallow.submit(Op::Read, 512, had);
        }
    }
    let deep = deep.answered.len() as u64 - 100;
    assert!(
        deep.abs_diff(had) <= 8 && deep + had >= 395,
        "{deep} and {had} of 400 in four seconds"
    );
}

#[test]
fn drained_requests_skip_the_wait_but_are_charged() {
    let mut bench = Bench::new(RateLimits {
        bandwidth: None,
        ops: rate(1, 3_600_000),
    });
    (0..100).for_each(|tag| bench.submit(Op::Read, 512, tag));
    assert_eq!(bench.at(0), [0]);
    let off = bench.disk.hold_off().expect("a disk that waits");
    assert_eq!(
        bench.at(0),
        (1..100).collect::<Vec<_>>(),
        "in order, and all of them"
    );
    bench.submit(Op::Flush, 0, 100);
    assert_eq!(bench.at(0), [100], "also what comes while it is held off");
    drop(off);
    bench.submit(Op::Flush, 0, 101);
    // 100 hours for 100 that passed, and one for its own.
    assert_eq!(bench.at(100 * 3_600_000), [0; 0], "the debt is forgotten");
    assert_eq!(bench.at(101 * 3_600_000), [101]);
    bench.submit(Op::Flush, 0, 102);
    assert_eq!(bench.at(101 * 3_600_000), [0; 0]);
    let closed = bench.cx.block_on(Arc::clone(&bench.disk).close(&bench.cx));
    closed.expect("the ring turns").expect("a clean close");
    assert_eq!(
        bench.at(101 * 3_600_000),
        [102],
        "a closed disk waits for nothing"
    );
}

/// A set-up to measure: so many disks, so many queues on each, and their limit.
struct Measured {
    disks: usize,
    queues: usize,
    limits: RateLimits,
    len: u64,
    /// Bytes or requests in a second.
    asked: u64,
    by_bytes: bool,
}

/// A raw disk of a few MiB with its limits.
fn raw_disk(limiter: &Arc<Limiter>) -> Arc<dyn Disk> {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(4 << 20).expect("its length");
    let options = FileOptions {
        write: true,
        direct: false,
    };
    let disk = RawDisk::new(ImageFile::from_fd("test".as_ref(), file, options), 4 << 20, true);
    ThrottledDisk::new(disk, Arc::clone(limiter))
}

/// Keeps eight requests of `len` bytes under way until `until`, and counts those that end from `from` on.
fn work(disk: Arc<dyn Disk>, len: u64, from: Instant, until: Instant, count: &AtomicU64) {
    let cx = Context::new(RingKind::Auto, 64).expect("a ring");
    let queue = disk.open_queue(&cx).expect("a queue");
    let queue = &*queue;
    let one = async |slot: u64| {
        while Instant::now() < until {
            let buffer = AlignedBuf::zeroed(len as usize).into();
            let (request, answer) = Request::local(Op::Read, slot * len % (2 << 20), len, buffer);
            queue.submit(request);
            assert_eq!(answer.await.result, Ok(()));
            let now = Instant::now();
            if now >= from && now < until {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    let all = async {
        let mut slots: Vec<_> = (0..8).map(|slot| Box::pin(one(slot))).collect();
        std::future::poll_fn(|task| {
            slots.retain_mut(|slot| slot.as_mut().poll(task).is_pending());
            if slots.is_empty() {
                std::task::Poll::Ready(())
            } else {
                std::task::Poll::Pending
            }
        })
        .await;
    };
    cx.block_on(all).expect("the ring turns");
}

#[test]
fn measured_rate_matches_limit_within_two_percent() {
    let mut all = Vec::new();
    for (disks, queues) in [(1, 1), (1, 4), (2, 2)] {
        all.push(Measured {
            disks,
            queues,
            limits: RateLimits {
                bandwidth: rate(4 << 20, 200),
                ops: None,
            },
            len: 64 << 10,
            asked: 20 << 20,
            by_bytes: true,
        });
        all.push(Measured {
            disks,
            queues,
            limits: RateLimits {
                bandwidth: None,
                ops: rate(300, 200),
            },
            len: 4096,
            asked: 1500,
            by_bytes: false,
        });
    }
    let threads: usize = all.iter().map(|one| one.disks * one.queues).sum();
    let ready = Barrier::new(threads);
    std::thread::scope(|scope| {
        let measured: Vec<_> = all
            .iter()
            .map(|one| {
                let count = Arc::new(AtomicU64::new(0));
                let limiter = Limiter::new(&one.limits);
                for _ in 0..one.disks {
                    let disk = raw_disk(&limiter);
                    for _ in 0..one.queues {
                        let (disk, count, ready) = (Arc::clone(&disk), Arc::clone(&count), &ready);
                        scope.spawn(move || {
                            ready.wait();
                            // The bucket begins full; it is empty by then.
                            let from = Instant::now() + Duration::from_millis(400);
                            work(disk, one.len, from, from + Duration::from_secs(2), &count);
                        });
                    }
                }
                (one, count)
            })
            .collect();
        measured
    })
    .into_iter()
    .for_each(|(one, count)| {
        let count = count.load(Ordering::Relaxed);
        let unit = if one.by_bytes { one.len } else { 1 };
        let found = (count * unit) as f64 / 2.0;
        let off = found / one.asked as f64 - 1.0;
        assert!(
            off.abs() < 0.02,
            "{} disks, {} queues: {found} for {} asked for, {:.1} % off",
            one.disks,
            one.queues,
            one.asked,
            off * 100.0
        );
    });
}

#[test]
fn status_costs_no_tokens_and_is_all_data_unless_the_disk_can_tell() {
    let mut bench = Bench::new(RateLimits {
        bandwidth: None,
        ops: rate(1, 8),
    });
    let status = |offset, len| {
        let mut status = bench.queue.status(offset, len);
        match status
            .as_mut()
            .poll(&mut std::task::Context::from_waker(Waker::noop()))
        {
            Poll::Ready(status) => status,
            Poll::Pending => panic!("it waits for tokens"),
        }
    };
    let all = |offset, len| StatusRange {
        offset,
        len,
        content: Content::Data { at: None },
        depth: 0,
    };
    for _ in 0..4 {
        assert_eq!(status(512, 8192), Ok(vec![all(512, 8192)]));
    }
    assert_eq!(status((1 << 40) - 100, 100), Ok(vec![all((1 << 40) - 100, 100)]));
    assert_eq!(status(1 << 40, 0), Ok(vec![]));
    for (offset, len) in [
        (1 << 40, 1),
        ((1 << 40) - 512, 1024),
        (512, u64::MAX),
        (u64::MAX - 1, 1),
    ] {
        assert_eq!(status(offset, len), Err(IoError::OutOfRange));
    }
    bench.submit(Op::Flush, 0, 1);
    assert_eq!(bench.at(0), [1], "its tokens are left");
}

#[test]
fn limits_change_while_requests_wait() {
    let mut bench = Bench::new(RateLimits::default());
    let ops = |refill_ms| RateLimits {
        ops: rate(1, refill_ms),
        ..RateLimits::default()
    };
    const HOUR: u64 = 3_600_000;
    let flush = |bench: &Bench, tags: std::ops::Range<u64>| {
        tags.for_each(|tag| bench.submit(Op::Flush, 0, tag));
    };
    assert!(bench.disk.limits().is_empty());
    flush(&bench, 0..100);
    assert_eq!(bench.at(0).len(), 100, "nothing is limited");
    // One an hour: the first has its token, the others wait.
    bench.disk.set_limits(&ops(HOUR));
    assert_eq!(bench.disk.limits(), ops(HOUR));
    flush(&bench, 100..110);
    assert_eq!(bench.at(1), [100]);
    // Ten a second from now on: nobody waits for an hour any more, and all keep their order.
    bench.disk.set_limits(&ops(100));
    let passed = bench.at(2);
    assert!((1..4).contains(&passed.len()), "{passed:?}");
    for millis in (100..2000).step_by(50) {
        bench.at(millis);
    }
    assert_eq!(bench.answered, (0..110).collect::<Vec<u64>>());
    // None: what waits passes at once.
    bench.disk.set_limits(&ops(HOUR));
    flush(&bench, 110..120);
    assert_eq!(bench.at(2001), [110]);
    bench.disk.set_limits(&RateLimits::default());
    flush(&bench, 120..130);
    assert_eq!(bench.at(2002), (111..130).collect::<Vec<u64>>());
    // What has its time by the old limits, and does not wait yet.
    bench.disk.set_limits(&ops(HOUR));
    flush(&bench, 130..140);
    bench.disk.set_limits(&RateLimits::default());
    assert_eq!(bench.at(2003), (130..140).collect::<Vec<u64>>());
}
