//! Ctrl-C and SIGTERM: the first is remembered, so that servers are stopped and images removed on the way out. A guest is not ended on
//! the way; the second signal kills this process, and the kernel then kills the processes that it has started. Images stay behind.
#![expect(unsafe_code, reason = "installs signal handlers")]

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn remember(signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
    // SAFETY: `signal` is async-signal-safe, and the default action runs no code of ours.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// From now on, signals that ask us to end are remembered.
pub(crate) fn install() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler stores to an atomic and resets itself, which is async-signal-safe.
        unsafe { libc::signal(signal, remember as *const () as libc::sighandler_t) };
    }
}

/// Returns true if we have been asked to end.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
