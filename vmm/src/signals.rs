//! SIGTERM, SIGINT and SIGHUP as values to wait for, instead of handlers that interrupt.
//!
//! The signals are blocked before the first thread starts, so every thread inherits the block and
//! only [`StopSignals::wait`] ever sees one.
#![expect(unsafe_code, reason = "waiting for a blocked signal has no safe wrapper")]

use std::io;
use std::mem::MaybeUninit;

/// The signals that ask us to stop.
const STOP: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The stop signals, blocked in the thread that made this and all it starts later.
#[derive(Clone, Copy, Debug)]
pub struct StopSignals(());

impl StopSignals {
    /// Blocks the stop signals. Call it before any thread is started.
    ///
    /// # Errors
    ///
    /// What the system said; it has no reason to refuse.
    pub fn block() -> io::Result<Self> {
        let set = stop_set();
        // SAFETY: the set is a live, initialised value that is only read; a null old set is allowed.
        let errno = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if errno == 0 {
            Ok(Self(()))
        } else {
            Err(io::Error::from_raw_os_error(errno))
        }
    }

    /// Waits for the next stop signal and returns its name.
    ///
    /// # Errors
    ///
    /// What the system said; it has no reason to refuse.
    pub fn wait(self) -> io::Result<&'static str> {
        let set = stop_set();
        let mut signal = 0;
        // SAFETY: the set is live and initialised and only read; the number is an exclusive local.
        let errno = unsafe { libc::sigwait(&raw const set, &raw mut signal) };
        if errno != 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
        Ok(match signal {
            libc::SIGTERM => "SIGTERM",
            libc::SIGINT => "SIGINT",
            _ => "SIGHUP",
        })
    }
}

fn stop_set() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the whole set it is given a valid pointer to, and
    // `sigaddset` changes an initialised set; all numbers are valid signals. So the set is
    // initialised when it is taken out.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in STOP {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_signal_is_waited_for_and_named() {
        // In a thread of its own: the block must not leak into the other tests' threads.
        std::thread::spawn(|| {
            let signals = StopSignals::block().expect("block");
            for (number, name) in [
                (libc::SIGTERM, "SIGTERM"),
                (libc::SIGINT, "SIGINT"),
                (libc::SIGHUP, "SIGHUP"),
            ] {
                // SAFETY: sends a signal to this very thread, in which it is blocked.
                assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), number) }, 0);
                assert_eq!(signals.wait().expect("wait"), name);
            }
        })
        .join()
        .expect("the thread");
    }
}
