//! Log rate limiter for the errors of an image: one fault hits thousands of requests, and a log line for each
//! would be a second failure.
//!
//! Each image has one [`Reports`]. The first message of a kind passes; of those that follow, one a minute, with the
//! number suppressed. The number of kinds is small, whatever a guest or an image does.

use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::IoError;

/// The time for which further messages of a kind are suppressed after one was logged.
pub const QUIET: Duration = Duration::from_secs(60);

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

#[derive(Debug)]
struct Told {
    kind: Kind,
    at: Duration,
    held_back: u64,
}

/// The messages about one image.
#[derive(Debug, Default)]
pub struct Reports {
    told: Mutex<Vec<Told>>,
}

impl Reports {
    /// Returns `Some` if a message of this kind is to be written at time `now`, with the number suppressed since the
    /// last one, if any were.
    pub fn admit(&self, kind: Kind, now: Duration) -> Option<Option<u64>> {
        let mut told = self.told.lock();
        let Some(before) = told.iter_mut().find(|told| told.kind == kind) else {
            told.push(Told {
                kind,
                at: now,
                held_back: 0,
            });
            return Some(None);
        };
        if now.saturating_sub(before.at) < QUIET {
            before.held_back += 1;
            return None;
        }
        before.at = now;
        let held_back = std::mem::take(&mut before.held_back);
        Some((held_back > 0).then_some(held_back))
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
        tracing::error!(%image, offset, %error, held_back, "a {action} failed on the host; {consequence}");
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_a_kind_is_told_and_then_one_a_minute_with_how_many_there_were() {
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
}
