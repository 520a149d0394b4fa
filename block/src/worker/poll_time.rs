//! Time that a worker polls before it sleeps.
//!
//! A sleep costs a wake-up, and polling costs a CPU. The window grows while polling finds work, and shrinks to zero on an
//! idle disk.
//!
//! Invariant: the window is never longer than the configured time.

use std::time::Duration;

/// Adaptive polling time before a sleep.
#[derive(Debug)]
pub(super) struct PollTime {
    window: Duration,
    max: Duration,
}

impl PollTime {
    /// The first window after a sleep that polling would have avoided.
    const FIRST: Duration = Duration::from_micros(8);

    /// Makes the polling time of a worker that polls for `max` at most, and has not polled yet.
    pub(super) fn up_to(max: Duration) -> Self {
        Self {
            window: Duration::ZERO,
            max,
        }
    }

    /// Returns the time to poll before the next sleep.
    pub(super) fn window(&self) -> Duration {
        self.window
    }

    /// Records that polling found work after `waited`.
    pub(super) fn found(&mut self, waited: Duration) {
        if waited * 2 > self.window {
            self.grow();
        }
    }

    /// Records a sleep: grows the window if polling a little longer would have avoided it, else halves it.
    pub(super) fn slept(&mut self, total: Duration) {
        if total < self.max {
            self.grow();
        } else {
            self.window /= 2;
            if self.window < Duration::from_micros(2) {
                self.window = Duration::ZERO;
            }
        }
    }

    fn grow(&mut self) {
        self.window = (self.window * 2)
            .clamp(Self::FIRST, self.max.max(Self::FIRST))
            .min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_window_grows_while_useful_and_ends_when_idle() {
        let mut poll = PollTime::up_to(Duration::from_micros(50));
        poll.slept(Duration::from_micros(20));
        assert_eq!(poll.window, PollTime::FIRST);
        for _ in 0..5 {
            poll.found(poll.window);
        }
        assert_eq!(poll.window, poll.max);
        for _ in 0..10 {
            poll.slept(Duration::from_millis(5));
        }
        assert_eq!(poll.window, Duration::ZERO);
    }
}
