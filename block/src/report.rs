//! Log rate limiters: one fault hits thousands of requests, and a log line for each would be a second failure.
//!
//! - [`LogLimit`] allows a number of lines a minute. Each client and each guest has one.
//! - [`Reports`] allows one line a minute of each kind of error of an image. The number of kinds is small, whatever a
//!   guest or an image does.
//! - [`LoggedOnce`] allows one line. It is for facts about the machine, which every thread finds out again.
//!
//! The line that follows suppressed ones states their number.

use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::IoError;
pub use crate::logged_once::LoggedOnce;
use crate::timer::{Clock, HostClock};

/// The period in which a number of lines is allowed. It begins with a line.
pub const PERIOD: Duration = Duration::from_secs(60);

/// The number of lines about one client, or one guest, in each [`PERIOD`].
pub const CLIENT_LINES_MAX: u32 = 50;

/// Limits the lines about one subject to a number in each [`PERIOD`].
#[derive(Debug)]
pub struct LogLimit {
    lines_max: u32,
    state: Mutex<Lines>,
}

/// The lines of the present period.
#[derive(Debug, Default)]
struct Lines {
    begun: Option<Duration>,
    count: u32,
    suppressed: u64,
}

impl Lines {
    /// Returns `Some` if a line may be logged at time `now`, with the number of suppressed lines before it, if any.
    fn admit(&mut self, lines_max: u32, now: Duration) -> Option<Option<u64>> {
        if self.begun.is_none_or(|begun| now.saturating_sub(begun) >= PERIOD) {
            self.begun = Some(now);
            self.count = 0;
        }
        if self.count >= lines_max {
            self.suppressed += 1;
            return None;
        }
        self.count += 1;
        let suppressed = std::mem::take(&mut self.suppressed);
        Some((suppressed > 0).then_some(suppressed))
    }
}

impl Default for LogLimit {
    /// Returns the limit for a client or a guest.
    fn default() -> Self {
        Self::new(CLIENT_LINES_MAX)
    }
}

impl LogLimit {
    /// Creates a limit of `lines_max` lines in each [`PERIOD`].
    #[must_use]
    pub fn new(lines_max: u32) -> Self {
        Self {
            lines_max,
            state: Mutex::default(),
        }
    }

    /// Returns `Some` if a line may be logged now, with the number of suppressed lines before it, if any.
    pub fn admit(&self) -> Option<Option<u64>> {
        self.admit_at(HostClock::default().now())
    }

    /// Returns as [`Self::admit`] does, for a clock that is not the host's. It must be the same one each time.
    pub fn admit_at(&self, now: Duration) -> Option<Option<u64>> {
        self.state.lock().admit(self.lines_max, now)
    }
}

/// Operation that the host was asked to do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Action {
    /// Read bytes.
    Read,
    /// Write bytes.
    Write,
    /// Make written data durable.
    Sync,
    /// Reserve, zero or give back space.
    Allocate,
    /// Set the file's length.
    SetLength,
}

impl Action {
    /// Returns the action's name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Sync => "sync",
            Self::Allocate => "allocation",
            Self::SetLength => "change of length",
        }
    }
}

/// Class of messages that share a limit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// The host failed this action with this errno.
    Host(Action, i32),
    /// The image is corrupt, in this way.
    Corrupt(&'static str),
}

/// The messages about one image.
#[derive(Debug, Default)]
pub struct Reports {
    kinds: Mutex<Vec<(Kind, Lines)>>,
}

impl Reports {
    /// Returns `Some` if a message of this kind is to be written at time `now`, with the number suppressed since the
    /// last one, if any were.
    pub fn admit(&self, kind: Kind, now: Duration) -> Option<Option<u64>> {
        let mut kinds = self.kinds.lock();
        if let Some((_, lines)) = kinds.iter_mut().find(|(known, _)| *known == kind) {
            return lines.admit(1, now);
        }
        let mut lines = Lines::default();
        let admitted = lines.admit(1, now);
        kinds.push((kind, lines));
        admitted
    }

    /// Logs that the host failed an operation on the image at `path`, at byte `offset` of the file.
    /// `consequence` states the effect. Returns true if a line was written.
    pub fn host_error(
        &self,
        path: &Path,
        action: Action,
        offset: u64,
        error: IoError,
        consequence: &str,
        now: Duration,
    ) -> bool {
        let Some(held_back) = self.admit(Kind::Host(action, error.errno()), now) else {
            return false;
        };
        let (image, action) = (path.display(), action.name());
        let event = if error.is_no_space() {
            "no-space"
        } else {
            "host-error"
        };
        tracing::error!(event, %image, offset, %error, held_back, "a {action} failed on the host; {consequence}");
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_admit_first_then_one_a_minute_per_kind() {
        let reports = Reports::default();
        let full = Kind::Host(Action::Write, libc::ENOSPC);
        let second = Duration::from_secs(1);
        assert_eq!(reports.admit(full, 5 * second), Some(None));
        for at in 5..65 {
            assert_eq!(reports.admit(full, at * second), None);
        }
        assert_eq!(reports.admit(full, 65 * second), Some(Some(60)));
        assert_eq!(reports.admit(full, 66 * second), None);
        for other in [
            Kind::Host(Action::Write, libc::EIO),
            Kind::Host(Action::Read, libc::ENOSPC),
            Kind::Corrupt("an entry"),
            Kind::Corrupt("a count"),
        ] {
            assert_eq!(reports.admit(other, 66 * second), Some(None), "{other:?}");
        }
    }
    #[test]
    fn log_limit_admits_lines_per_minute_and_counts_rest() {
        let limit = LogLimit::default();
        let start = Duration::from_secs(7);
        for _ in 0..CLIENT_LINES_MAX {
            assert_eq!(limit.admit_at(start), Some(None));
        }
        for second in 0..60 {
            assert_eq!(limit.admit_at(start + Duration::from_secs(second)), None);
        }
        assert_eq!(limit.admit_at(start + PERIOD), Some(Some(60)));
        assert_eq!(limit.admit_at(start + PERIOD), Some(None));
    }

    #[test]
    fn logged_once_admits_once() {
        static LIMIT: LoggedOnce = LoggedOnce::new();
        assert!(LIMIT.admit());
        assert!(!LIMIT.admit());
    }
}
