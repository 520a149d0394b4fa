//! Many disks, whose clients are served by as many threads as have something to say.
//!
//! ```text
//!             ┌── sockets of disks with nothing to do ◀─────────┐
//! epoll: ─────┤                                                 │ nothing came for a while
//!             └── one is readable ──▶ queue ──▶ a thread talks ─┘
//! ```
//!
//! A client that takes its time in the middle of a message keeps its thread, and nobody else's: threads are made for whoever waits,
//! and end when there is nothing to do. Disks come and go meanwhile: who brings one, or wants it back, leaves a wish and calls.
//!
//! Invariants: a session is with one thread or with the reception, never with both; a socket is looked at only while its session is
//! with the reception.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use block::worker::WorkerGone;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::session::{self, Pause};
use super::{PausedClient, ServeError, StopToken, VhostUserServer};

/// The time for which a thread waits for the next message of a client: one that sets its device up sends many.
const LINGER: Duration = Duration::from_millis(20);

/// The time after which a thread without anything to do ends.
const REST: Duration = Duration::from_secs(1);

/// The time after which another thread is made for a session that waits for one, past those that a machine has CPUs for.
const WAIT: Duration = Duration::from_millis(5);

const STOP: u64 = u64::MAX;
const CALL: u64 = u64::MAX - 1;

/// A disk that is served among others.
#[derive(Debug)]
pub struct Seat {
    /// Its server.
    pub server: Arc<VhostUserServer>,
    /// The socket that its clients connect to.
    pub listener: Arc<UnixListener>,
    /// The client that it begins with, if there is one.
    pub client: Option<PausedClient>,
}

type Session = session::Session<Arc<VhostUserServer>, Arc<UnixListener>>;

/// A disk that comes, or one that is to go or to pause, and whoever waits for that.
#[derive(Debug)]
enum Wish {
    Enter(u64, Seat),
    Leave(u64, mpsc::Sender<Option<PausedClient>>),
}

/// Sessions that a thread is to talk in, those that come back, and wishes.
#[derive(Default)]
struct Desk {
    waiting: VecDeque<(u64, Session)>,
    back: Vec<(u64, Session, Result<Pause, ServeError>)>,
    wishes: Vec<Wish>,
    threads: usize,
    /// Of the threads, those that talk; the others are about to take a session, or wait for one.
    talking: usize,
    closed: bool,
    /// True if a worker may have failed.
    look: bool,
    /// The panic of a thread.
    panic: Option<Box<dyn Any + Send>>,
}

impl Desk {
    /// Returns true if more sessions wait than threads are free.
    fn are_too_few(&self) -> bool {
        self.waiting.len() > self.threads - self.talking
    }
}

/// Serves the clients of many disks, as [`VhostUserServer::serve_on`] does of one. Disks come and go meanwhile.
///
/// A disk is known by a number of the caller's choice, less than 2^62.
pub struct Reception {
    stop: StopToken,
    epoll: Epoll,
    /// An eventfd: something has come back, or somebody wishes something.
    called: File,
    desk: Mutex<Desk>,
    work: Condvar,
    /// As many threads are made at once.
    threads_at_once: usize,
}

impl fmt::Debug for Reception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reception").finish_non_exhaustive()
    }
}

/// A disk that is served.
struct Place {
    /// Its session, unless a thread has that.
    session: Option<Session>,
    server: Arc<VhostUserServer>,
    /// True if a worker of it has ended.
    has_failed: bool,
}

/// The disks that are served.
#[derive(Default)]
struct Guests<'a> {
    places: BTreeMap<u64, Place>,
    leaving: Vec<(u64, mpsc::Sender<Option<PausedClient>>)>,
    ended: Vec<(u64, Option<PausedClient>)>,
    failed: Option<&'a mut dyn FnMut(u64, ServeError)>,
}

impl Guests<'_> {
    /// The disk is served no longer.
    fn end(&mut self, disk: u64, stop: &StopToken, result: Result<Option<PausedClient>, ServeError>) {
        let has_failed = self.places.remove(&disk).is_some_and(|place| place.has_failed);
        stop.has_left(disk);
        let result = result.and_then(|client| {
            if has_failed {
                Err(WorkerGone.into())
            } else {
                Ok(client)
            }
        });
        let left: Vec<_> = self
            .leaving
            .extract_if(.., |(leaving, _)| *leaving == disk)
            .collect();
        let mut client = match result {
            Ok(client) if left.is_empty() => {
                self.ended.push((disk, client));
                return;
            }
            Ok(client) => client,
            Err(error) => {
                if let Some(failed) = &mut self.failed {
                    failed(disk, error);
                }
                None
            }
        };
        for (_, waiter) in left {
            // Nobody may wait any more; a client is disconnected then.
            waiter.send(client.take()).unwrap_or_default();
        }
    }
}

impl Reception {
    /// One that serves nobody yet, and ends with `stop`.
    ///
    /// # Errors
    ///
    /// If the process has no descriptors left.
    pub fn new(stop: StopToken) -> io::Result<Self> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let reception = Self {
            stop,
            epoll: Epoll::new()?,
            called: block::event::eventfd()?.into(),
            desk: Mutex::default(),
            work: Condvar::new(),
            threads_at_once: 2 * cpus,
        };
        let event = EpollEvent::new(EventSet::IN, CALL);
        let called = reception.called.as_raw_fd();
        reception.epoll.ctl(ControlOperation::Add, called, event)?;
        Ok(reception)
    }

    /// Has a disk served from now on, or as soon as [`Reception::serve`] is called. None of this number is served.
    pub fn enter(&self, disk: u64, seat: Seat) {
        self.desk().wishes.push(Wish::Enter(disk, seat));
        self.call();
    }

    /// Has a disk served no longer: its client is disconnected, what it asked for is finished and published, and its server is
    /// let go of. Returns what receives a message then; or the end of its sender, if nobody serves.
    pub fn leave(&self, disk: u64) -> mpsc::Receiver<Option<PausedClient>> {
        self.wish_to_leave(disk, StopToken::leave)
    }

    /// As [`Reception::leave`], for a disk that is to [come back](Reception::enter) with its client, who notices nothing: its queues
    /// have drained, and it is in the message. One that is in the middle of a message of its own may end that, until
    /// [`Reception::interrupt`].
    pub fn pause(&self, disk: u64) -> mpsc::Receiver<Option<PausedClient>> {
        self.wish_to_leave(disk, StopToken::pause_disk)
    }

    /// Disconnects the client of a disk that is to pause, if it is in the middle of a message.
    pub fn interrupt(&self, disk: u64) {
        self.stop.interrupt(disk);
    }

    fn wish_to_leave(&self, disk: u64, ask: fn(&StopToken, u64)) -> mpsc::Receiver<Option<PausedClient>> {
        let (done, left) = mpsc::channel();
        let mut desk = self.desk();
        if !desk.closed {
            ask(&self.stop, disk);
            desk.wishes.push(Wish::Leave(disk, done));
        }
        drop(desk);
        self.call();
        left
    }

    /// Has disks served no longer whose workers have ended by themselves. Call it from a [`FailureHook`](block::worker::FailureHook):
    /// a client that asks nothing would not notice.
    pub fn look(&self) {
        self.desk().look = true;
        self.call();
    }

    /// Serves until the token is asked to stop or to pause. Returns the disks that were served until then, with the clients that
    /// are connected. One that fails is let go of, and `failed` is told; the others are served on.
    ///
    /// # Errors
    ///
    /// If the stop cannot be waited for. Nobody has been served then.
    pub fn serve(
        &self,
        failed: &mut dyn FnMut(u64, ServeError),
    ) -> io::Result<Vec<(u64, Option<PausedClient>)>> {
        let event = EpollEvent::new(EventSet::IN, STOP);
        let stop = self.stop.event().as_raw_fd();
        self.epoll.ctl(ControlOperation::Add, stop, event)?;
        self.desk().closed = false;
        let mut guests = Guests {
            failed: Some(failed),
            ..Guests::default()
        };
        std::thread::scope(|scope| self.run(scope, &mut guests));
        Ok(guests.ended)
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has whoever serves look at what is there.
    fn call(&self) {
        if let Err(error) = (&self.called).write_all(&1_u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot tell that a client has nothing to say");
        }
    }

    /// Hands out sessions until all have ended.
    fn run<'scope, 'env: 'scope>(&'env self, scope: &'scope Scope<'scope, 'env>, guests: &mut Guests<'_>) {
        let mut is_called = false;
        let mut events = vec![EpollEvent::default(); 256];
        let mut waits_since: Option<Instant> = None;
        loop {
            if !is_called && self.stop.is_called() {
                is_called = true;
                // It stays readable.
                let (event, fd) = (EpollEvent::default(), self.stop.event().as_raw_fd());
                self.epoll
                    .ctl(ControlOperation::Delete, fd, event)
                    .unwrap_or_default();
                let disks: Vec<u64> = guests.places.keys().copied().collect();
                disks.into_iter().for_each(|disk| self.pass_on(disk, guests));
            }
            self.grant(is_called, guests);
            if std::mem::take(&mut self.desk().look) {
                self.let_go_of_failed(guests);
            }
            self.take_back(is_called, guests);
            let panic = self.desk().panic.take();
            if let Some(panic) = panic {
                self.stop.stop();
                self.close();
                resume_unwind(panic);
            }
            if is_called && guests.places.is_empty() {
                break;
            }
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
                    CALL => (&self.called).read_exact(&mut [0; 8]).unwrap_or_default(),
                    token => self.pass_on(token / 2, guests),
                }
            }
        }
        self.close();
    }

    /// Has threads end that have nothing to do. Who wants a disk back need not wait.
    fn close(&self) {
        let mut desk = self.desk();
        desk.closed = true;
        desk.wishes.retain(|wish| match wish {
            Wish::Enter(..) => true,
            Wish::Leave(disk, _) => {
                self.stop.has_left(*disk);
                false
            }
        });
        drop(desk);
        self.work.notify_all();
    }

    /// Lets disks in and out, as it is wished. Whoever comes when all are to go is among those that were served.
    fn grant(&self, is_called: bool, guests: &mut Guests<'_>) {
        let wishes = std::mem::take(&mut self.desk().wishes);
        for wish in wishes {
            match wish {
                Wish::Enter(disk, seat) if is_called => {
                    let client = seat.client.filter(|_| self.stop.is_paused());
                    guests.ended.push((disk, client));
                }
                Wish::Enter(disk, seat) => {
                    let Seat {
                        server,
                        listener,
                        client,
                    } = seat;
                    let served = Arc::clone(&server);
                    match session::Session::new(disk, server, listener, &self.stop, client) {
                        Ok(session) => {
                            let place = Place {
                                session: Some(session),
                                server: served,
                                has_failed: false,
                            };
                            guests.places.insert(disk, place);
                            self.watch_or_pass_on(disk, guests);
                        }
                        Err(error) => guests.end(disk, &self.stop, Err(error)),
                    }
                }
                Wish::Leave(disk, waiter) => {
                    guests.leaving.push((disk, waiter));
                    if guests.places.contains_key(&disk) {
                        self.pass_on(disk, guests);
                    } else {
                        // It has failed, or ended before.
                        guests.end(disk, &self.stop, Ok(None));
                    }
                }
            }
        }
    }

    /// Ends the sessions of disks whose workers have ended.
    fn let_go_of_failed(&self, guests: &mut Guests<'_>) {
        let places = guests.places.iter_mut();
        let failed = places.filter(|(_, place)| !place.has_failed && place.server.has_failed());
        let failed = failed.map(|(disk, place)| {
            place.has_failed = true;
            *disk
        });
        for disk in failed.collect::<Vec<_>>() {
            self.stop.leave(disk);
            self.pass_on(disk, guests);
        }
    }

    /// Takes back the sessions that threads have let go of.
    fn take_back(&self, is_called: bool, guests: &mut Guests<'_>) {
        let back = std::mem::take(&mut self.desk().back);
        for (disk, session, why) in back {
            let result = match why {
                Ok(Pause::Idle) => {
                    if let Some(place) = guests.places.get_mut(&disk) {
                        place.session = Some(session);
                    }
                    if is_called || self.stop.ends(disk) || self.stop.pauses(disk) {
                        self.pass_on(disk, guests);
                    } else {
                        self.watch_or_pass_on(disk, guests);
                    }
                    continue;
                }
                Ok(Pause::Stopped) => Ok(None),
                Ok(Pause::Paused(client)) => Ok(client),
                Err(error) => Err(error),
            };
            // Whoever is told has the server to himself.
            drop(session);
            guests.end(disk, &self.stop, result);
        }
    }

    /// Has a thread talk in the session of `disk`, if it is here.
    fn pass_on(&self, disk: u64, guests: &mut Guests<'_>) {
        if let Some(session) = guests
            .places
            .get_mut(&disk)
            .and_then(|place| place.session.take())
        {
            self.desk().waiting.push_back((disk, session));
            self.work.notify_one();
        }
    }

    /// Looks at the sockets of `disk`; has a thread do so where that is not possible.
    fn watch_or_pass_on(&self, disk: u64, guests: &mut Guests<'_>) {
        let Some(session) = guests.places.get(&disk).and_then(|place| place.session.as_ref()) else {
            return;
        };
        let awaited = session.awaited().map(AsRawFd::as_raw_fd);
        let connection = session.connection().map(AsRawFd::as_raw_fd);
        for (fd, token) in [(awaited, 0), (connection, 1)] {
            let Some(fd) = fd else { continue };
            if let Err(error) = self.look_at(fd, disk * 2 + token) {
                tracing::debug!(%error, "cannot look at a socket; a thread waits for it");
                self.pass_on(disk, guests);
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
    fn spawn<'scope, 'env: 'scope>(&'env self, scope: &'scope Scope<'scope, 'env>) -> bool {
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
    fn spawn_one<'scope, 'env: 'scope>(&'env self, scope: &'scope Scope<'scope, 'env>) -> bool {
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

    fn talk_in(&self, (disk, mut session): (u64, Session)) {
        // A session that panics is not used again.
        match catch_unwind(AssertUnwindSafe(|| session.talk(Some(LINGER)))) {
            Ok(why) => self.desk().back.push((disk, session, why)),
            Err(panic) => self.desk().panic = Some(panic),
        }
        self.call();
    }
}
