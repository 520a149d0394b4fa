//! A temporarily raised thread priority (`nice`).
//!
//! With many devices under I/O there are more threads than CPUs after a recovery, while the rest of the bring-up is left to
//! one thread: with 32 busy devices it took 4 of 6 seconds.

use rustix::process::{getpriority_process, setpriority_process};

/// The calling thread goes before others until this is dropped, if it may. Threads it starts meanwhile would too.
pub(super) struct RaisedPriority {
    before: i32,
}

impl RaisedPriority {
    /// From now on; `None` without the right to it.
    pub(super) fn begin() -> Option<Self> {
        let before = getpriority_process(None).ok()?;
        setpriority_process(None, -20).ok()?;
        Some(Self { before })
    }
}

impl Drop for RaisedPriority {
    fn drop(&mut self) {
        if let Err(error) = setpriority_process(None, self.before) {
            tracing::warn!(%error, "cannot restore the priority of this thread");
        }
    }
}
