//! A token to stop or pause a server from another thread.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::sync::Mutex;

#[derive(Debug)]
struct Inner {
    /// An eventfd. Used in place: a stop must need no further descriptor.
    event: File,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    paused: bool,
    /// The number of pause requests.
    pauses: u64,
    next_id: u64,
    connections: Vec<Watched>,
    /// Disks that are to be served no longer, while others are.
    leaving: Vec<u64>,
    /// Those that are to pause alone.
    pausing: Vec<u64>,
}

/// A connection that is served.
#[derive(Debug)]
struct Watched {
    id: u64,
    /// The disk that it is about.
    disk: u64,
    connection: UnixStream,
    /// True if its thread waits for the rest of a message.
    reading: bool,
}

impl Watched {
    fn shut_down(&self) {
        // A connection that is gone already needs no shutdown.
        self.connection.shutdown(Shutdown::Both).unwrap_or_default();
    }
}

/// Stops the servers it was given to. Clones are the same token; several servers may share one.
#[derive(Clone, Debug)]
pub struct StopToken {
    inner: Arc<Inner>,
}

impl StopToken {
    /// Returns an unused token.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let inner = Inner {
            event: block::event::eventfd()?.into(),
            state: Mutex::default(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Asks to stop: clients are disconnected, what they asked for is finished and published, and
    /// [`serve`](super::VhostUserServer::serve) returns. Does not wait for that.
    pub fn stop(&self) {
        let mut state = self.inner.state.lock();
        state.stopped = true;
        state.connections.iter().for_each(Watched::shut_down);
        self.signal();
    }

    /// Makes the event readable.
    fn signal(&self) {
        let mut event = &self.inner.event;
        if let Err(error) = event.write_all(&1u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot wake a server that should stop");
        }
    }

    /// Asks to pause: servers drain their queues, and [`serve_on`](super::VhostUserServer::serve_on) returns with
    /// the connected clients, who notice nothing. One that is in the middle of a message may end it within `patience`,
    /// and is disconnected otherwise. Returns when no connection is served any more, or the pause is over.
    pub fn pause(&self, patience: Duration) {
        let mut state = self.inner.state.lock();
        state.paused = true;
        state.pauses += 1;
        let this = state.pauses;
        self.signal();
        drop(state);
        let deadline = Instant::now() + patience;
        loop {
            let state = self.inner.state.lock();
            // On a busy machine this may be looked at when the connections are served again.
            if !state.paused || state.pauses != this || state.connections.is_empty() {
                return;
            }
            // Whoever is not in a message sees the pause as soon as its thread runs.
            if deadline <= Instant::now() {
                let reading = state.connections.iter().filter(|watched| watched.reading);
                reading.for_each(Watched::shut_down);
            }
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends a pause, when all servers have returned and before they serve again. A stop that came meanwhile
    /// stays.
    pub fn resume(&self) {
        let mut state = self.inner.state.lock();
        if std::mem::take(&mut state.paused) && !state.stopped {
            // The pause has made it readable, or will at once.
            (&self.inner.event).read_exact(&mut [0; 8]).ok();
        }
    }

    /// Returns true if it was asked to pause, and not to stop.
    pub(super) fn is_paused(&self) -> bool {
        let state = self.inner.state.lock();
        state.paused && !state.stopped
    }

    /// Asks one disk alone to pause, as [`StopToken::pause`] asks all, and does not wait for that. What it is to be seen by has to be
    /// woken by the caller.
    pub(super) fn pause_disk(&self, disk: u64) {
        self.inner.state.lock().pausing.push(disk);
    }

    /// Disconnects the client of this disk if it is in the middle of a message.
    pub(super) fn interrupt(&self, disk: u64) {
        let state = self.inner.state.lock();
        let reading = |watched: &&Watched| watched.disk == disk && watched.reading;
        state
            .connections
            .iter()
            .filter(reading)
            .for_each(Watched::shut_down);
    }

    /// Returns true if this disk was asked to pause, alone or with all others, and not to stop.
    pub(super) fn pauses(&self, disk: u64) -> bool {
        let state = self.inner.state.lock();
        let ends = state.stopped || state.leaving.contains(&disk);
        !ends && (state.paused || state.pausing.contains(&disk))
    }

    /// Returns true if it was asked to stop or to pause.
    pub(super) fn is_called(&self) -> bool {
        let state = self.inner.state.lock();
        state.paused || state.stopped
    }

    /// Asks one disk alone to stop, as [`StopToken::stop`] asks all. What it is to be seen by has to be woken by the caller.
    pub(super) fn leave(&self, disk: u64) {
        let mut state = self.inner.state.lock();
        state.leaving.push(disk);
        let connections = state.connections.iter().filter(|watched| watched.disk == disk);
        connections.for_each(Watched::shut_down);
    }

    /// The disk is served no longer; another one may have its number.
    pub(super) fn has_left(&self, disk: u64) {
        let mut state = self.inner.state.lock();
        state.leaving.retain(|leaving| *leaving != disk);
        state.pausing.retain(|pausing| *pausing != disk);
    }

    /// Returns true if this disk was asked to stop, alone or with all others.
    pub(super) fn ends(&self, disk: u64) -> bool {
        let state = self.inner.state.lock();
        state.stopped || state.leaving.contains(&disk)
    }

    /// Returns true if it was asked to stop.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.inner.state.lock().stopped
    }

    /// Readable once it was asked to stop.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.inner.event.as_fd()
    }

    /// Shuts the `connection` of `disk` down when asked to stop, until the guard is dropped.
    pub(super) fn watch(&self, disk: u64, connection: UnixStream) -> ConnectionGuard {
        let mut state = self.inner.state.lock();
        if state.stopped || state.leaving.contains(&disk) {
            connection.shutdown(Shutdown::Both).unwrap_or_default();
        }
        let id = state.next_id;
        state.next_id += 1;
        state.connections.push(Watched {
            id,
            disk,
            connection,
            reading: false,
        });
        drop(state);
        let token = self.clone();
        ConnectionGuard { token, id }
    }
}

/// A connection that a token would shut down.
pub(super) struct ConnectionGuard {
    token: StopToken,
    id: u64,
}

impl ConnectionGuard {
    /// Says whether the connection's thread reads a message, and so may not see a pause for a while.
    pub(super) fn reading(&self, reading: bool) {
        let mut state = self.token.inner.state.lock();
        if let Some(watched) = state.connections.iter_mut().find(|watched| watched.id == self.id) {
            watched.reading = reading;
        }
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut state = self.token.inner.state.lock();
        state.connections.retain(|watched| watched.id != self.id);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    fn is_shut_down(mut other: &UnixStream) -> bool {
        other.set_nonblocking(true).expect("a socket");
        matches!(other.read(&mut [0]), Ok(0))
    }

    fn wait_for_a_pause(token: &StopToken) {
        while !token.is_paused() {
            std::thread::yield_now();
        }
    }

    /// On a busy machine the pause may notice late that it is over; the connection is served again by then.
    #[test]
    fn pause_disconnects_nobody_after_resume() {
        let token = StopToken::new().expect("a token");
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let guard = token.watch(0, ours.try_clone().expect("a duplicate"));
        std::thread::scope(|scope| {
            let pause = scope.spawn(|| token.pause(Duration::from_millis(20)));
            wait_for_a_pause(&token);
            drop(guard);
            token.resume();
            let again = token.watch(0, ours.try_clone().expect("a duplicate"));
            again.reading(true);
            pause.join().expect("no panic");
            assert!(!is_shut_down(&theirs));
        });
    }

    /// A thread that is not scheduled yet will see the pause when it runs.
    #[test]
    fn pause_disconnects_only_connections_in_a_message() {
        let token = StopToken::new().expect("a token");
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (slow, slows) = UnixStream::pair().expect("a pair");
        let idle = token.watch(0, ours);
        let reading = token.watch(0, slow);
        reading.reading(true);
        std::thread::scope(|scope| {
            let pause = scope.spawn(|| token.pause(Duration::from_millis(20)));
            let deadline = Instant::now() + Duration::from_secs(10);
            while !is_shut_down(&slows) {
                assert!(Instant::now() < deadline, "who is in a message goes on for ever");
                std::thread::yield_now();
            }
            drop(reading);
            std::thread::sleep(Duration::from_millis(50));
            assert!(!pause.is_finished(), "a connection is still served");
            assert!(!is_shut_down(&theirs));
            drop(idle);
            pause.join().expect("no panic");
        });
    }
}

#[cfg(all(test, shuttle))]
mod model {
    use super::*;
    use block::sync::thread;
    use std::io::Read;

    /// Fails if neither side looks at a connection of disk 1 that comes while `ask` asks it to end.
    fn connection_made_meanwhile_is_shut_down(ask: fn(&StopToken)) {
        let run = move || {
            let token = StopToken::new().unwrap();
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.set_nonblocking(true).unwrap();
            let server = token.clone();
            let serving = thread::spawn(move || {
                let watched = server.watch(1, ours.try_clone().unwrap());
                // The connection is served until it is shut down.
                while !server.ends(1) {
                    thread::yield_now();
                }
                drop(watched);
                ours
            });
            ask(&token);
            let ours = serving.join().unwrap();
            assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "the client sees the end");
            assert_eq!(token.ends(0), token.is_stopped(), "other disks end with all only");
            drop(ours);
        };
        shuttle::check_random(run, 1000);
        shuttle::check_pct(run, 1000, 3);
    }

    #[test]
    fn stop_shuts_down_a_connection_made_meanwhile() {
        connection_made_meanwhile_is_shut_down(StopToken::stop);
    }

    #[test]
    fn leaving_disk_has_a_connection_shut_down_that_comes_meanwhile() {
        connection_made_meanwhile_is_shut_down(|token| token.leave(1));
    }
}
