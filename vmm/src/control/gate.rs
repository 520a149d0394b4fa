//! The gate of a control socket: when its thread accepts clients, and when not.
//!
//! Invariant: after a pause has begun no client is accepted, so that each who connects is the next server's.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// The longest wait for the thread to see a pause: it may be letting a client in.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// The state that the thread is to be in.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Wanted {
    Open,
    Paused,
    Ended,
}

#[derive(Debug)]
struct State {
    wanted: Wanted,
    /// The thread has seen the pause.
    is_paused: bool,
}

/// The gate.
#[derive(Debug)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the thread.
    event: OwnedFd,
}

impl Gate {
    /// Returns an open gate.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            state: Mutex::new(State {
                wanted: Wanted::Open,
                is_paused: false,
            }),
            changed: Condvar::new(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Waits until a client may be accepted. Returns false when none is accepted any more.
    pub(super) fn wait(&self, listener: &UnixListener) -> bool {
        loop {
            let mut state = self.state.lock();
            while state.wanted == Wanted::Paused {
                state.is_paused = true;
                self.changed.notify_all();
                self.changed.wait(&mut state);
            }
            state.is_paused = false;
            if state.wanted == Wanted::Ended {
                return false;
            }
            drop(state);
            let mut watched = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(&self.event, PollFlags::IN),
            ];
            // Interrupted is nothing; whatever else it is, the listener shows when a client is accepted.
            if poll(&mut watched, None).is_err() {
                continue;
            }
            if watched[1].revents().is_empty() {
                return true;
            }
            // It only wakes; what is wanted is in the state.
            rustix::io::read(&self.event, &mut [0; 8]).ok();
        }
    }

    /// Changes what the thread is to do, and does not wait for it.
    pub(super) fn change(&self, wanted: Wanted) {
        let mut state = self.state.lock();
        if state.wanted != Wanted::Ended {
            state.wanted = wanted;
        }
        self.changed.notify_all();
        // Full only if it is readable anyway.
        rustix::io::write(&self.event, &1u64.to_ne_bytes()).ok();
    }

    /// Begins a pause, and waits until the thread has seen it.
    pub(super) fn pause(&self) {
        self.change(Wanted::Paused);
        let mut state = self.state.lock();
        self.changed.wait_while_for(
            &mut state,
            |state| !state.is_paused && state.wanted == Wanted::Paused,
            PAUSE_MAX,
        );
    }
}
