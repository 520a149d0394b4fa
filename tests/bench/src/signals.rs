//! Ctrl-C and SIGTERM: remembered, so that servers are stopped and images removed on the way out.
#![expect(unsafe_code, reason = "installs signal handlers")]

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn remember(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on, signals that ask us to end are remembered.
pub(crate) fn install() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { libc::signal(signal, remember as *const () as libc::sighandler_t) };
    }
}

/// Returns true if we have been asked to end.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
