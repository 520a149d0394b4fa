//! A token bucket, which limits the rate of requests.
//!
//! A bucket holds up to `size` tokens and refills continuously, `size` tokens in every `refill`. A request takes its
//! tokens and may leave a debt, so that one larger than the bucket passes too, from a full one. The next request
//! waits until the debt is paid.
//!
//! Amounts are kept in units of one `1/refill` token, so that a nanosecond refills exactly `size` of them. Nothing is
//! rounded, so frequent calls do not lower the rate. Overflow saturates.

use std::time::Duration;

/// A rate: tokens per time, and the size of a burst.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rate {
    /// The number of tokens that refill in one `refill`, and the most that are held. Zero counts as one.
    pub size: u64,
    /// The time in which an empty bucket becomes full. Less than a nanosecond counts as one.
    pub refill: Duration,
    /// Initial tokens beside `size`; they do not refill.
    pub one_time_burst: u64,
}

/// A bucket holds the tokens of this time even if its size is less, so that a timer that is late by as much
/// does not lower a fast rate.
const SLACK_NS: u64 = 50_000_000;

/// The tokens of one [`Rate`].
#[derive(Debug)]
pub(super) struct Bucket {
    size: u64,
    refill_ns: u64,
    /// The balance, in `1/refill_ns` tokens; negative for a debt.
    level: i128,
    /// The time of `level`.
    at_ns: u64,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns `a × b`, saturated at `i128::MAX`.
fn times(a: u64, b: u64) -> i128 {
    i128::try_from(u128::from(a) * u128::from(b)).unwrap_or(i128::MAX)
}

impl Bucket {
    /// Makes a bucket that is full, with its burst, at time zero, and so at its first use.
    pub(super) fn new(rate: &Rate) -> Self {
        let (size, refill_ns) = (rate.size.max(1), nanos(rate.refill).max(1));
        Self {
            size,
            refill_ns,
            level: times(size, refill_ns).saturating_add(times(rate.one_time_burst, refill_ns)),
            at_ns: 0,
        }
    }

    /// Takes `tokens`. Returns the time at which their request may pass: `now`, if the tokens were available. Later
    /// requests pass later, whatever their size, so order is kept.
    pub(super) fn take(&mut self, tokens: u64, now: Duration) -> Duration {
        self.refill(nanos(now));
        if tokens == 0 {
            return now;
        }
        let wanted = times(tokens.min(self.size), self.refill_ns);
        let missing = wanted.saturating_sub(self.level).max(0);
        self.level = self.level.saturating_sub(times(tokens, self.refill_ns));
        let size = i128::from(self.size);
        let wait = missing / size + i128::from(missing % size != 0);
        now.saturating_add(Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX)))
    }

    /// Adds the tokens since the last call. Calls may come slightly out of order, from several threads.
    fn refill(&mut self, now_ns: u64) {
        let passed = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        let most = times(self.size, self.refill_ns.max(SLACK_NS));
        // Only the burst exceeds this, and it does not refill.
        if self.level < most {
            self.level = self.level.saturating_add(times(self.size, passed)).min(most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// 1000 tokens a second, ten at once.
    const RATE: Rate = Rate {
        size: 1000,
        refill: ms(1000),
        one_time_burst: 0,
    };

    fn bucket(rate: Rate) -> Bucket {
        Bucket::new(&rate)
    }

    #[test]
    fn bucket_passes_its_size_at_once_then_its_rate() {
        let mut bucket = bucket(RATE);
        for _ in 0..10 {
            assert_eq!(bucket.take(100, Duration::ZERO), Duration::ZERO);
        }
        for count in 1..=50 {
            assert_eq!(bucket.take(10, Duration::ZERO), ms(10 * count));
        }
    }

    #[test]
    fn bucket_refill_is_continuous_and_not_lost_to_rounding() {
        // Three tokens in seven nanoseconds, looked at each nanosecond.
        let mut bucket = bucket(Rate {
            size: 3,
            refill: Duration::from_nanos(7),
            one_time_burst: 0,
        });
        // Takes out what the slack lets it hold.
        let slack = u64::try_from(times(3, SLACK_NS) / 7).expect("small");
        let mut now = Duration::from_nanos(SLACK_NS);
        assert_eq!(bucket.take(slack, now), now);
        let begin = now;
        let mut passed = 0;
        while passed < 3000 {
            let due = bucket.take(1, now);
            assert!(due >= now);
            now = due;
            passed += 1;
        }
        let took = (now - begin).as_nanos();
        assert!((6990..=7000).contains(&took), "3000 tokens in {took} ns");
    }

    #[test]
    fn idle_bucket_holds_no_more_than_its_size() {
        for idle in [ms(1000), ms(5000), Duration::from_secs(1 << 40), Duration::MAX] {
            let mut bucket = bucket(RATE);
            bucket.take(1000, Duration::ZERO);
            assert_eq!(bucket.take(1000, idle), idle);
            assert_eq!(bucket.take(1, idle), idle.saturating_add(ms(1)), "{idle:?}");
        }
    }

    #[test]
    fn bucket_grants_one_time_burst_once() {
        let mut bucket = bucket(Rate {
            one_time_burst: 500,
            ..RATE
        });
        // It waits for whoever comes, and is not made more by waiting.
        let now = ms(5_000);
        assert_eq!(bucket.take(300, now), now);
        let now = ms(10_000);
        for tokens in [200, 1000] {
            assert_eq!(bucket.take(tokens, now), now);
        }
        assert_eq!(bucket.take(1, now), now + ms(1));
        let later = ms(100_000);
        assert_eq!(bucket.take(1000, later), later);
        assert_eq!(bucket.take(1, later), later + ms(1), "the burst has come again");
    }

    #[test]
    fn full_bucket_passes_oversized_request_and_next_one_pays() {
        let mut bucket = bucket(RATE);
        assert_eq!(bucket.take(5000, Duration::ZERO), Duration::ZERO);
        assert_eq!(bucket.take(10, Duration::ZERO), ms(4010));
        // The next large one has its turn when the bucket would be full but for those before.
        assert_eq!(bucket.take(5000, Duration::ZERO), ms(5010));
        assert_eq!(bucket.take(1, ms(60_000)), ms(60_000));
    }

    #[test]
    fn bucket_keeps_order_for_requests_of_any_size() {
        let mut bucket = bucket(RATE);
        let mut last = Duration::ZERO;
        for round in 0..10_000_u64 {
            let due = bucket.take(round * 7919 % 3000, ms(round));
            assert!(due >= last || due == ms(round), "round {round}");
            last = due.max(last);
        }
    }

    #[test]
    fn bucket_keeps_its_rate_when_timers_fire_late() {
        // One token a millisecond, and none to spare.
        let mut bucket = bucket(Rate {
            size: 1,
            refill: ms(1),
            one_time_burst: 0,
        });
        let mut now = Duration::ZERO;
        let mut passed = 0_u64;
        while now < ms(10_000) {
            let due = bucket.take(1, now);
            passed += 1;
            if due > now {
                // Up to 17 ms late.
                now = due + ms(passed % 18);
            }
        }
        assert!((9950..=10_070).contains(&passed), "{passed} in ten seconds");
    }

    #[test]
    fn bucket_at_numeric_limits_never_panics_or_passes_early() {
        let values = [1, 2, 1 << 32, 1 << 63, u64::MAX];
        for size in values {
            for refill in [0, 1, 1 << 40, u64::MAX] {
                for one_time_burst in [0, 1, u64::MAX] {
                    let rate = Rate {
                        size,
                        refill: Duration::from_nanos(refill),
                        one_time_burst,
                    };
                    let mut bucket = bucket(rate);
                    let mut last = Duration::ZERO;
                    for tokens in values {
                        for now in [Duration::ZERO, Duration::from_nanos(u64::MAX), Duration::MAX] {
                            let due = bucket.take(tokens, now);
                            assert!(due >= now, "{rate:?}: {tokens} at {now:?} pass before");
                            last = last.max(due);
                        }
                    }
                }
            }
        }
        let mut bucket = bucket(Rate {
            size: 0,
            refill: Duration::MAX,
            one_time_burst: 0,
        });
        bucket.take(u64::MAX, Duration::ZERO);
        assert!(bucket.take(1, Duration::ZERO) > Duration::from_secs(1 << 30));
    }

    #[test]
    fn bucket_grants_nothing_twice_when_time_goes_back() {
        let mut bucket = bucket(RATE);
        bucket.take(1000, ms(0));
        assert_eq!(bucket.take(10, ms(10)), ms(10));
        // Another thread read its clock before and came later.
        assert_eq!(bucket.take(10, ms(5)), ms(15));
        assert_eq!(bucket.take(10, ms(30)), ms(30));
        assert_eq!(bucket.take(1, ms(30)), ms(31));
    }
}
