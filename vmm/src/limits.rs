//! Resource limits of this process: raises the number of descriptors so that every client fits, and turns `SIGXFSZ`
//! into an error.
//!
//! Clients hand us descriptors for their memory and events, and the process has one table for those of all. If it can
//! be full, a client that fills it keeps others from connecting.
#![expect(unsafe_code, reason = "resource limits have no safe wrapper at hand")]

use std::io;

/// Raises this process's own limit of descriptors as far as it may. Returns how many there can be.
///
/// # Errors
///
/// The error of the system call.
pub fn raise_descriptors() -> io::Result<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one `rlimit`, which is live and exclusive.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one `rlimit`, which is live.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limit.rlim_max)
}

/// Raises the limit of descriptors, and says so if `needed` are more than it allows.
pub fn prepare_descriptors(needed: u64) {
    match raise_descriptors() {
        Ok(limit) if limit >= needed => {}
        Ok(limit) => tracing::warn!(
            limit,
            needed,
            "the file descriptor limit is low: one client can use up the descriptors that others need to connect; \
             raise it (LimitNOFILE= of systemd, ulimit -n)"
        ),
        Err(error) => tracing::warn!(%error, "cannot read the file descriptor limit"),
    }
}

/// Makes a write past `RLIMIT_FSIZE` fail with an error, instead of a signal that ends the process and all its
/// guests.
pub fn survive_file_size_limits() {
    // SAFETY: no handler is installed, and nothing but this process's own disposition is changed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}
