//! Many disks, whose clients are served by as many threads as have something to say.
//!
//! ```text
//!             ┌── sockets of disks with nothing to do ◀─────────┐
//! epoll: ─────┤                                                 │ nothing came for a while
//!             └── one is readable ──▶ queue ──▶ a thread talks ─┘
//! ```
//!
//! A client that takes its time in the middle of a message keeps its thread, and nobody else's: threads are made for whoever waits,
//! and end when there is nothing to do.
//!
//! Invariants: a session is with one thread or with the reception, never with both; a socket is looked at only while its session is
//! with the reception.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::session::{Pause, Session};
use super::{PausedClient, ServeError, StopToken, VhostUserServer};

/// The time for which a thread waits for the next message of a client: one that sets its device up sends many.
const LINGER: Duration = Duration::from_millis(20);

/// The time after which a thread without anything to do ends.
const REST: Duration = Duration::from_secs(1);

/// The time after which another thread is made for a session that waits for one, past those that a machine has CPUs for.
const WAIT: Duration = Duration::from_millis(5);

const STOP: u64 = u64::MAX;
const BACK: u64 = u64::MAX - 1;

/// A disk that is served among others.
#[derive(Debug)]
pub struct Seat<'a> {
    /// Its server.
    pub server: &'a VhostUserServer,
    /// The socket that its clients connect to.
    pub listener: &'a UnixListener,
    /// The client that it begins with, if there is one.
    pub client: Option<PausedClient>,
}

/// The end of a seat.
type Ended = Result<Option<PausedClient>, ServeError>;

/// Serves the clients of many disks, as [`VhostUserServer::serve_on`] does of one, until `stop` is asked to stop or to pause. A server
/// that fails has `stop` called, so that its failure is seen. Returns the clients that are connected, in the order of the `seats`.
///
/// # Errors
///
/// If the process has no descriptors left. Nobody has been served then.
pub fn serve_all(seats: Vec<Seat<'_>>, stop: &StopToken) -> io::Result<Vec<Ended>> {
    let reception = Reception::new(stop)?;
    let count = seats.len();
    let sessions = seats
        .into_iter()
        .map(|seat| Session::new(seat.server, seat.listener, stop, seat.client));
    let mut ended: Vec<Option<Ended>> = (0..count).map(|_| None).collect();
    let mut idle: Vec<Option<Session<'_>>> = Vec::new();
    for (session, ended) in sessions.zip(&mut ended) {
        idle.push(session.map_err(|error| *ended = Some(Err(error))).ok());
    }
    if ended.iter().any(Option::is_some) {
        stop.stop();
    }
    std::thread::scope(|scope| reception.run(scope, &mut idle, &mut ended));
    Ok(ended.into_iter().map(|ended| ended.unwrap_or(Ok(None))).collect())
}

/// Sessions that a thread is to talk in, and those that come back.
struct Desk<'a> {
    waiting: VecDeque<(usize, Session<'a>)>,
    back: Vec<(usize, Session<'a>, Result<Pause, ServeError>)>,
    threads: usize,
    /// Of the threads, those that talk; the others are about to take a session, or wait for one.
    talking: usize,
    closed: bool,
    /// The panic of a thread.
    panic: Option<Box<dyn Any + Send>>,
}

impl Desk<'_> {
    /// Returns true if more sessions wait than threads are free.
    fn are_too_few(&self) -> bool {
        self.waiting.len() > self.threads - self.talking
    }
}

struct Reception<'a> {
    stop: &'a StopToken,
    epoll: Epoll,
    /// An eventfd: something has come back.
    returned: File,
    desk: Mutex<Desk<'a>>,
    work: Condvar,
    /// As many threads are made at once.
    threads_at_once: usize,
}

impl fmt::Debug for Reception<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reception").finish_non_exhaustive()
    }
}

impl<'a> Reception<'a> {
    fn new(stop: &'a StopToken) -> io::Result<Self> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let reception = Self {
            stop,
            epoll: Epoll::new()?,
            returned: block::task::eventfd()?.into(),
            desk: Mutex::new(Desk {
                waiting: VecDeque::new(),
                back: Vec::new(),
                threads: 0,
                talking: 0,
                closed: false,
                panic: None,
            }),
            work: Condvar::new(),
            threads_at_once: 2 * cpus,
        };
        for (fd, token) in [
            (stop.event().as_raw_fd(), STOP),
            (reception.returned.as_raw_fd(), BACK),
        ] {
            let event = EpollEvent::new(EventSet::IN, token);
            reception.epoll.ctl(ControlOperation::Add, fd, event)?;
        }
        Ok(reception)
    }

    fn desk(&self) -> MutexGuard<'_, Desk<'a>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out sessions until all have ended.
    fn run<'scope, 'env: 'scope>(
        &'env self,
        scope: &'scope Scope<'scope, 'env>,
        idle: &mut [Option<Session<'a>>],
        ended: &mut [Option<Ended>],
    ) where
        'a: 'env,
    {
        let mut is_called = false;
        for seat in 0..idle.len() {
            self.watch_or_pass_on(seat, idle);
        }
        let mut events = vec![EpollEvent::default(); 256];
        let mut waits_since: Option<Instant> = None;
        while ended.iter().any(Option::is_none) {
            let mut timeout = -1;
            if self.spawn(scope) {
                let since = *waits_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= WAIT {
                    self.spawn_one(scope);
                    waits_since = None;
                }
                timeout = i32::try_from(WAIT.as_millis()).unwrap_or(1);
            } else {
                waits_since = None;
            }
            let count = match self.epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => {
                    tracing::error!(%error, "cannot wait for clients; stopping");
                    self.stop.stop();
                    0
                }
            };
            for event in events.iter().take(count) {
                match event.data() {
                    STOP => {}
                    BACK => (&self.returned).read_exact(&mut [0; 8]).unwrap_or_default(),
                    token => self.pass_on(usize::try_from(token / 2).unwrap_or(usize::MAX), idle),
                }
            }
            if !is_called && self.stop.is_called() {
                is_called = true;
                // It stays readable.
                let (event, fd) = (EpollEvent::default(), self.stop.event().as_raw_fd());
                self.epoll
                    .ctl(ControlOperation::Delete, fd, event)
                    .unwrap_or_default();
                for seat in 0..idle.len() {
                    self.pass_on(seat, idle);
                }
            }
            self.take_back(is_called, idle, ended);
            let panic = self.desk().panic.take();
            if let Some(panic) = panic {
                self.stop.stop();
                self.close();
                resume_unwind(panic);
            }
        }
        self.close();
    }

    /// Has threads end that have nothing to do.
    fn close(&self) {
        self.desk().closed = true;
        self.work.notify_all();
    }

    /// Takes back the sessions that threads have let go of.
    fn take_back(&self, is_called: bool, idle: &mut [Option<Session<'a>>], ended: &mut [Option<Ended>]) {
        let back = std::mem::take(&mut self.desk().back);
        for (seat, session, why) in back {
            let (Some(place), Some(ended)) = (idle.get_mut(seat), ended.get_mut(seat)) else {
                continue;
            };
            *ended = Some(match why {
                Ok(Pause::Idle) => {
                    *place = Some(session);
                    if is_called {
                        self.pass_on(seat, idle);
                    } else {
                        self.watch_or_pass_on(seat, idle);
                    }
                    continue;
                }
                Ok(Pause::Stopped) => Ok(None),
                Ok(Pause::Paused(client)) => Ok(client),
                Err(error) => {
                    self.stop.stop();
                    Err(error)
                }
            });
        }
    }

    /// Has a thread talk in the session of `seat`, if it is here.
    fn pass_on(&self, seat: usize, idle: &mut [Option<Session<'a>>]) {
        if let Some(session) = idle.get_mut(seat).and_then(Option::take) {
            self.desk().waiting.push_back((seat, session));
            self.work.notify_one();
        }
    }

    /// Looks at the sockets of `seat`; has a thread do so where that is not possible.
    fn watch_or_pass_on(&self, seat: usize, idle: &mut [Option<Session<'a>>]) {
        let Some(session) = idle.get(seat).and_then(Option::as_ref) else {
            return;
        };
        let awaited = session.awaited().map(AsRawFd::as_raw_fd);
        let connection = session.connection().map(AsRawFd::as_raw_fd);
        for (fd, token) in [(awaited, 0), (connection, 1)] {
            let Some(fd) = fd else { continue };
            if let Err(error) = self.look_at(fd, seat as u64 * 2 + token) {
                tracing::debug!(%error, "cannot look at a socket; a thread waits for it");
                self.pass_on(seat, idle);
                return;
            }
        }
    }

    /// Looks at a socket until it is readable, once.
    fn look_at(&self, fd: RawFd, token: u64) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN | EventSet::ONE_SHOT, token);
        match self.epoll.ctl(ControlOperation::Modify, fd, event) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                self.epoll.ctl(ControlOperation::Add, fd, event)
            }
            done => done,
        }
    }

    /// Makes threads for the sessions that wait for one, as many as the machine has use for. Returns true if some go on waiting.
    fn spawn<'scope, 'env: 'scope>(&'env self, scope: &'scope Scope<'scope, 'env>) -> bool
    where
        'a: 'env,
    {
        loop {
            let desk = self.desk();
            let waits = desk.are_too_few();
            if !waits || desk.threads >= self.threads_at_once {
                return waits;
            }
            drop(desk);
            if !self.spawn_one(scope) {
                return true;
            }
        }
    }

    /// Makes a thread if a session waits for one. Returns false if that was not possible.
    fn spawn_one<'scope, 'env: 'scope>(&'env self, scope: &'scope Scope<'scope, 'env>) -> bool
    where
        'a: 'env,
    {
        let mut desk = self.desk();
        if !desk.are_too_few() {
            return true;
        }
        desk.threads += 1;
        drop(desk);
        let thread = Builder::new().name("client".to_owned());
        let Err(error) = thread.spawn_scoped(scope, || self.talk()) else {
            return true;
        };
        let mut desk = self.desk();
        desk.threads -= 1;
        tracing::warn!(%error, "cannot start a thread for a client");
        if desk.threads > 0 {
            return false;
        }
        // Nobody else does it.
        let next = desk.waiting.pop_front();
        drop(desk);
        if let Some(next) = next {
            self.talk_in(next);
        }
        true
    }

    /// A thread: talks in one session after another.
    fn talk(&self) {
        let mut desk = self.desk();
        loop {
            if let Some(next) = desk.waiting.pop_front() {
                desk.talking += 1;
                drop(desk);
                self.talk_in(next);
                desk = self.desk();
                desk.talking -= 1;
                continue;
            }
            if desk.closed {
                break;
            }
            let (woken, rest) = self
                .work
                .wait_timeout(desk, REST)
                .unwrap_or_else(PoisonError::into_inner);
            desk = woken;
            if rest.timed_out() && desk.waiting.is_empty() {
                break;
            }
        }
        desk.threads -= 1;
    }

    fn talk_in(&self, (seat, mut session): (usize, Session<'a>)) {
        // A session that panics is not used again.
        match catch_unwind(AssertUnwindSafe(|| session.talk(Some(LINGER)))) {
            Ok(why) => self.desk().back.push((seat, session, why)),
            Err(panic) => self.desk().panic = Some(panic),
        }
        if let Err(error) = (&self.returned).write_all(&1_u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot tell that a client has nothing to say");
        }
    }
}
