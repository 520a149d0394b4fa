//! Limit of a log line to one in the life of the process. It needs no time, so that a ring can use it too.

use std::sync::atomic::{AtomicBool, Ordering};

/// Allows one line in the life of the process.
#[derive(Debug, Default)]
pub struct LoggedOnce(AtomicBool);

impl LoggedOnce {
    /// Creates the limit, for a static.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Returns true the first time.
    pub fn admit(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }
}
