//! Per-client log rate limiter: a misbehaving client must not flood the log.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// So many lines are written in each [`PERIOD`].
pub(crate) const LINES_MAX: u32 = 50;
/// The period in which the limit applies.
const PERIOD: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct State {
    begun: Option<Instant>,
    lines: u32,
    held_back: u64,
}

/// Counts the lines about one client.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    state: Mutex<State>,
}

impl LogLimit {
    /// Returns `Some` if a line may be logged now, with the number of suppressed lines before it, if any.
    pub(crate) fn admit(&self) -> Option<Option<u64>> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<Option<u64>> {
        let mut state = self.state.lock();
        let over = state
            .begun
            .is_none_or(|begun| now.saturating_duration_since(begun) >= PERIOD);
        if over {
            state.begun = Some(now);
            state.lines = 0;
        }
        if state.lines == LINES_MAX {
            state.held_back += 1;
            return None;
        }
        state.lines += 1;
        let held_back = std::mem::take(&mut state.held_back);
        Some((held_back > 0).then_some(held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_lines_are_written_a_minute_and_then_how_many_were_not() {
        let log_limit = LogLimit::default();
        let start = Instant::now();
        for _ in 0..LINES_MAX {
            assert_eq!(log_limit.admit_at(start), Some(None));
        }
        for second in 0..60 {
            assert_eq!(log_limit.admit_at(start + Duration::from_secs(second)), None);
        }
        assert_eq!(log_limit.admit_at(start + PERIOD), Some(Some(60)));
        assert_eq!(log_limit.admit_at(start + PERIOD), Some(None));
    }
}
