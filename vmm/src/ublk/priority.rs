//! Raised priority (`nice` -20) of threads for whose few steps the I/O of whole devices, or the host, waits.
//!
//! A recovery starts the I/O of all devices at once, and their backlog takes every CPU of a small host. Mounts and the service
//! manager still wait for the names in `/dev/disk/by-id` and for `READY=1`, and a server that is killed now needs the saved state:
//! all of them the work of one thread, which would take turns with the I/O. With 32 busy devices on two CPUs that was 4 of
//! 6 seconds. A command to the driver (pause, resume, recover) is worse to delay: its devices have no I/O until it ends.
//!
//! Invariants: only threads that wait most of the time are raised, never one that serves requests. Without the right to it
//! (`CAP_SYS_NICE`) everything works, only later.

use rustix::process::{getpriority_process, setpriority_process};

/// The highest priority that is not real-time.
const HIGHEST: i32 = -20;

/// Raises the priority of the calling thread for good, if it may.
pub(super) fn raise() {
    if let Err(error) = setpriority_process(None, HIGHEST) {
        tracing::debug!(%error, "cannot raise the priority of this thread");
    }
}

/// A raised priority of the calling thread, until this is dropped. Threads that it starts meanwhile inherit it.
pub(super) struct RaisedPriority {
    before: i32,
}

impl RaisedPriority {
    /// Raises the priority; `None` without the right to it.
    pub(super) fn begin() -> Option<Self> {
        let before = getpriority_process(None).ok()?;
        setpriority_process(None, HIGHEST).ok()?;
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
