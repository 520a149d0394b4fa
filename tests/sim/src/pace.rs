//! Keeps two queues in step: in each round the first one asks for a few reads, and only then the second one begins to
//! change what they read. Without it the reads, many at a time, are over long before the changes are.

/// The progress of the two queues.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Rounds whose reads the first queue has begun to ask for.
    asked: u64,
    /// Rounds that the second queue has begun, or waits to begin.
    reached: u64,
    /// Rounds that the second queue has begun.
    begun: u64,
    /// Neither queue waits for one that is full, or has nothing more to ask for.
    free: [bool; 2],
}

impl Pace {
    /// The pace of so many queues; one that is alone waits for nobody.
    #[must_use]
    pub fn new(queues: usize) -> Self {
        Self {
            asked: 0,
            reached: 0,
            begun: 0,
            free: [queues < 1, queues < 2],
        }
    }

    /// Returns true if the first queue may ask for the reads of its next round, and then counts that it does.
    pub fn ask(&mut self) -> bool {
        let may = self.asked < self.reached || self.free[1];
        self.asked += u64::from(may);
        may
    }

    /// Returns true if the second queue, all of whose requests are answered, may begin its next round, and then counts
    /// that it does.
    pub fn begin(&mut self) -> bool {
        self.reached = self.begun + 1;
        let may = self.asked >= self.reached || self.free[0];
        self.begun += u64::from(may);
        may
    }

    /// Notes whether a queue is to be waited for.
    pub fn set_free(&mut self, queue: usize, free: bool) {
        if let Some(place) = self.free.get_mut(queue) {
            *place = free;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_begins_a_round_after_its_reads() {
        let mut pace = Pace::new(2);
        assert!(!pace.ask(), "the second queue is not there yet");
        assert!(!pace.begin(), "no reads yet");
        assert!(pace.ask());
        assert!(!pace.ask(), "one round at a time");
        assert!(pace.begin());
        assert!(!pace.begin());
        assert!(pace.ask());
        assert!(pace.begin());
    }

    #[test]
    fn pace_waits_for_no_ended_or_lone_queue() {
        let mut pace = Pace::new(2);
        pace.set_free(0, true);
        assert!(pace.begin());
        pace.set_free(1, true);
        assert!(pace.ask());
        assert!(Pace::new(1).ask());
    }
}
