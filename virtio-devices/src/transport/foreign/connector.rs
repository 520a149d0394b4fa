//! Connects to a vhost-user backend, and reconnects to a lost one that records requests in flight, on a thread of its
//! own. The thread of a CPU, which resets a device, may be confined so that it can create neither sockets nor threads
//! with more privileges.
//!
//! Invariants: there is one connection at a time, because a backend serves one client; a caller that waits for this thread
//! does not hold the state's lock.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use block::worker::StartHook;
use parking_lot::Mutex;

use super::agreement::{agree, thread};
use super::link::{Ask, BackendError};
use super::state::BackendState;
use crate::connect::Cancel;

/// The interval between two attempts to reconnect to a lost backend.
const AGAIN: Duration = Duration::from_millis(100);

/// The thread. Dropping it ends it, and what it is waiting for.
#[derive(Debug)]
pub(super) struct Connector {
    ended: Arc<AtomicBool>,
    asked: Sender<Ask>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Connector {
    /// Starts the thread, which can do what the caller can and `on_start` leaves it.
    pub(super) fn start(
        state: &Arc<Mutex<BackendState>>,
        socket: &Path,
        patience: Duration,
        on_start: Option<StartHook>,
    ) -> Result<Self, BackendError> {
        let (asked, asks) = mpsc::channel();
        let (state, place) = (Arc::downgrade(state), socket.to_owned());
        let ended = Arc::new(AtomicBool::new(false));
        let asks_end = Arc::clone(&ended);
        let cancel = Cancel::when(move || asks_end.load(Ordering::SeqCst));
        let (begun, begins) = mpsc::channel();
        let serve = move || {
            let ready = on_start.map_or(Ok(()), |hook| hook.run());
            let is_ready = ready.is_ok();
            begun.send(ready).unwrap_or_default();
            if is_ready {
                see_to(&state, &asks, &place, patience, &cancel);
            }
        };
        let connector = Self {
            ended,
            asked,
            socket: socket.to_owned(),
            thread: Some(thread(serve).map_err(BackendError::Host)?),
        };
        let died = |_| io::Error::other("the thread that connects has died");
        let ready = begins.recv().map_err(died).and_then(|ready| ready);
        ready.map_err(BackendError::Host)?;
        Ok(connector)
    }

    /// Returns the channel that reports the loss of a backend.
    pub(super) fn asked(&self) -> &Sender<Ask> {
        &self.asked
    }

    /// Tries whether a backend that was lost is back.
    pub(super) fn connect(&self) -> Result<(), BackendError> {
        let gone = || BackendError::Gone {
            socket: self.socket.clone(),
        };
        let (answer, answered) = mpsc::channel();
        self.asked.send(Ask::Now(answer)).map_err(|_| gone())?;
        answered.recv().map_err(|_| gone())?
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // It has ended if nobody hears.
        self.asked.send(Ask::End).unwrap_or_default();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that connects to a vhost-user backend panicked");
        }
    }
}

fn see_to(
    state: &Weak<Mutex<BackendState>>,
    asks: &Receiver<Ask>,
    socket: &Path,
    patience: Duration,
    cancel: &Cancel,
) {
    let mut waits = false;
    loop {
        let asked = if waits {
            asks.recv_timeout(AGAIN)
        } else {
            asks.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match asked {
            Ok(Ask::Lost) => waits = true,
            Ok(Ask::Now(answer)) => {
                let result = come_back(state, socket, patience, cancel);
                waits = result.is_err() && state.upgrade().is_some_and(|state| state.lock().is_awaited());
                // Who has asked waits for it.
                answer.send(result).unwrap_or_default();
                continue;
            }
            Ok(Ask::End) | Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
        }
        match come_back(state, socket, patience, cancel) {
            Ok(()) => waits = false,
            Err(error @ BackendError::Lacks { .. }) => {
                let admitted = state.upgrade().and_then(|state| state.lock().admit());
                if let Some(held_back) = admitted {
                    tracing::error!(%error, held_back, "a disk needs a reset by its guest");
                }
                waits = false;
            }
            Err(error) => tracing::debug!(%error, "cannot reconnect to a vhost-user backend yet"),
        }
    }
}

/// Connects, if there is no connection, and continues where the last one was.
fn come_back(
    state: &Weak<Mutex<BackendState>>,
    socket: &Path,
    patience: Duration,
    cancel: &Cancel,
) -> Result<(), BackendError> {
    let Some(state) = state.upgrade() else {
        return Ok(());
    };
    let queues = {
        let state = state.lock();
        if !state.link().is_gone() {
            return Ok(());
        }
        state.queues()
    };
    let agreed = agree(socket, queues, patience, cancel)?;
    state.lock().go_on(agreed)
}
