//! SIGTERM, SIGINT and SIGHUP as values to wait for, instead of handlers that interrupt.
//!
//! The signals are blocked before the first thread starts, so every thread inherits the block and
//! only [`StopSignals::wait`] ever sees one. A signal that we were started to ignore, as `nohup` has it,
//! stays ignored: a blocked one would not be.
#![expect(unsafe_code, reason = "waiting for a blocked signal has no safe wrapper")]

use std::fmt;
use std::io;
use std::mem::MaybeUninit;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The signals that ask us to stop.
const STOP: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The stop signals, blocked in the thread that made this and all it starts later.
#[derive(Clone, Copy)]
pub struct StopSignals {
    set: libc::sigset_t,
}

impl fmt::Debug for StopSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StopSignals").finish_non_exhaustive()
    }
}

impl StopSignals {
    /// Blocks the stop signals that are not ignored. Call it before any thread is started.
    ///
    /// # Errors
    ///
    /// The error of the system call, which has no reason to fail.
    pub fn block() -> io::Result<Self> {
        Self::block_all(&[])
    }

    /// As [`StopSignals::block`], for one to whom SIGHUP means something else than a stop: it is waited for even if it was ignored.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn block_with_reload() -> io::Result<Self> {
        Self::block_all(&[libc::SIGHUP])
    }

    /// Blocks those that are not ignored, and those that are `wanted` nevertheless: a signal that is ignored reaches who waits for it
    /// if it is blocked.
    fn block_all(wanted: &[libc::c_int]) -> io::Result<Self> {
        let mut signals = Vec::new();
        for signal in STOP {
            if wanted.contains(&signal) || !is_ignored(signal)? {
                signals.push(signal);
            }
        }
        let set = set_of(&signals);
        // SAFETY: the set is a live, initialised value that is only read; a null old set is allowed.
        let errno = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if errno == 0 {
            Ok(Self { set })
        } else {
            Err(io::Error::from_raw_os_error(errno))
        }
    }

    /// Waits for the next stop signal and returns its name.
    ///
    /// # Errors
    ///
    /// The error of the system call, which has no reason to fail.
    pub fn wait(self) -> io::Result<&'static str> {
        let mut signal = 0;
        // SAFETY: the set is live and initialised and only read; the number is an exclusive local.
        let errno = unsafe { libc::sigwait(&raw const self.set, &raw mut signal) };
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

/// Returns true if standard error takes a line without blocking. A thread that blocks on its log hears no further
/// signal.
#[must_use]
pub fn is_log_read() -> bool {
    let stderr = rustix::stdio::stderr();
    let mut ready = [PollFd::new(&stderr, PollFlags::OUT)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut ready, Some(&now)), Ok(1))
}

/// Returns true if a signal is ignored, as inherited from the parent process.
fn is_ignored(signal: libc::c_int) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: a null new action only asks; the old one is written to a live local of its type.
    if unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the action is written.
    Ok(unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN)
}

fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the whole set it is given a valid pointer to, and
    // `sigaddset` changes an initialised set; all numbers are valid signals. So the set is
    // initialised when it is taken out.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &signal in signals {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_names_a_blocked_signal() {
        // In a thread of its own: the block must not leak into the other tests' threads.
        std::thread::spawn(|| {
            let signals = StopSignals::block().expect("block");
            for (number, name) in [
                (libc::SIGTERM, "SIGTERM"),
                (libc::SIGINT, "SIGINT"),
                (libc::SIGHUP, "SIGHUP"),
            ] {
                // Started under `nohup`, or in the background of a script: then it is left alone, as it must be.
                if is_ignored(number).expect("a valid signal") {
                    assert_ne!(number, libc::SIGTERM, "nothing ignores SIGTERM");
                    continue;
                }
                // SAFETY: sends a signal to this very thread, in which it is blocked.
                assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), number) }, 0);
                assert_eq!(signals.wait().expect("wait"), name);
            }
        })
        .join()
        .expect("the thread");
    }
}
