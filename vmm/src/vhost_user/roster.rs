//! The disks of a server, which come and go while others are served.
//!
//! ```text
//!  control socket ──disk-add, disk-remove──▶ Orders ──┬─▶ Roster: what requests, statistics and takeovers see
//!  reception ──a disk has failed───────────▶          └─▶ Reception: whose clients are served
//! ```
//!
//! A disk that fails is closed, and the others are served on. If it was the last one, the server ends.
//!
//! Invariants: disks change one at a time, and not while they are handed over to a new server; the lock of a disk's image is released
//! before the disk is forgotten.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use block::lock::LockSet;
use block::worker::WorkerPool;
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::{Value, json};
use virtio_devices::vhost_user::{PausedClient, Reception, Seat, ServeError, StopToken};

use super::hand_over::sockets;
use super::served::{Options, Served, Workers, close, failure_hook, find, serve};
use super::workers;
use crate::control::DiskKeys;
use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::error::{CommandFailure, chain};
use crate::socket::{Socket, check_path};
use crate::takeover::TakeoverSocket;

/// The longest time that a request to remove a disk waits for the requests of its client in flight.
const LEAVE_MAX: Duration = Duration::from_secs(10);

/// The disks that are served, and what others need to be served like them.
pub(super) struct Roster {
    reception: Arc<Reception>,
    stop: StopToken,
    state: Mutex<State>,
    changes: Mutex<Changes>,
    handed_over: Condvar,
    pub(super) setup: Setup,
}

/// The options, workers and folders that disks are served with.
pub(super) struct Setup {
    pub(super) options: Options,
    pub(super) groups: RateLimitGroups,
    /// Workers that the queues of all disks share.
    pub(super) shared: Option<Arc<WorkerPool>>,
    /// The folders of the images and sockets of disks that are added.
    pub(super) images: Vec<PathBuf>,
    /// Paths that no disk's socket can have.
    pub(super) taken: Vec<PathBuf>,
}

struct State {
    next: u64,
    /// In the order in which they came.
    served: Vec<(u64, Arc<Served>)>,
    /// The locks of all images.
    lock_set: LockSet,
    takeover_socket: Option<TakeoverSocket>,
    /// The failure that ended a disk, for the exit code of the process.
    failure: Option<CommandFailure>,
}

impl Setup {
    /// Returns true if disks can be added.
    pub(super) fn takes_disks(&self) -> bool {
        !self.images.is_empty() || !self.options.sandbox
    }
}

/// The reasons that keep disks from coming and going.
#[derive(Default)]
struct Changes {
    are_handed_over: bool,
    has_ended: bool,
}

/// A change of the roster.
pub(super) enum Order {
    Add(DiskKeys, Option<PathBuf>, Answer),
    Remove(String, Answer),
    Failed(u64, ServeError),
}

/// The place for what came of an order.
pub(super) type Answer = mpsc::Sender<Result<Value, String>>;

/// Whoever carries out orders.
#[derive(Clone)]
pub(super) enum Orders {
    /// A thread that may open files and make sockets and workers.
    Thread(mpsc::Sender<Order>),
    /// Any: no disk can be added.
    Anybody(Arc<Roster>),
}

impl Orders {
    /// Carries out an order, and waits for what came of it.
    ///
    /// # Errors
    ///
    /// The reason as a sentence.
    pub(super) fn ask(&self, order: impl FnOnce(Answer) -> Order) -> Result<Value, String> {
        let (answer, answered) = mpsc::channel();
        let order = order(answer);
        match self {
            // An order that cannot be sent drops its answer.
            Self::Thread(thread) => thread.send(order).unwrap_or_default(),
            Self::Anybody(roster) => roster.carry_out(order),
        }
        answered.recv().map_err(|_| "the server is stopping")?
    }

    /// Has a disk closed that failed, and does not wait for that.
    fn failed(&self, number: u64, error: ServeError) {
        let order = Order::Failed(number, error);
        match self {
            Self::Thread(thread) => thread.send(order).unwrap_or_default(),
            Self::Anybody(roster) => {
                let (closing, stop) = (Arc::clone(roster), &roster.stop);
                let thread = thread::Builder::new().name("failed".to_owned());
                if let Err(error) = thread.spawn(move || closing.carry_out(order)) {
                    tracing::error!(%error, "cannot close a disk that failed; stopping");
                    stop.stop();
                }
            }
        }
    }
}

impl Roster {
    /// A roster of these disks, whose images are opened with `lock_set`.
    pub(super) fn new(
        served: Vec<Served>,
        reception: Arc<Reception>,
        stop: &StopToken,
        lock_set: LockSet,
        setup: Setup,
    ) -> Arc<Self> {
        let served: Vec<_> = (0..).zip(served.into_iter().map(Arc::new)).collect();
        Arc::new(Self {
            reception,
            stop: stop.clone(),
            state: Mutex::new(State {
                next: served.len() as u64,
                served,
                lock_set,
                takeover_socket: None,
                failure: None,
            }),
            changes: Mutex::default(),
            handed_over: Condvar::new(),
            setup,
        })
    }

    /// Returns the disks that are served now.
    pub(super) fn served(&self) -> Vec<Arc<Served>> {
        let state = self.state.lock();
        state
            .served
            .iter()
            .map(|(_, served)| Arc::clone(served))
            .collect()
    }

    /// Returns the disk that requests call `id`.
    ///
    /// # Errors
    ///
    /// The names that there are.
    pub(super) fn find(&self, id: &str) -> Result<Arc<Served>, String> {
        self.entry(id).map(|(_, served)| served)
    }

    fn entry(&self, id: &str) -> Result<(u64, Arc<Served>), String> {
        let state = self.state.lock();
        let found = state.served.iter().find(|(_, disk)| disk.name == id);
        found.cloned().ok_or_else(|| {
            let ids: Vec<&str> = state.served.iter().map(|(_, disk)| disk.name.as_str()).collect();
            if ids.is_empty() {
                return format!("there is no disk `{id}`; there is none at all");
            }
            format!("there is no disk `{id}`; there are: {}", ids.join(", "))
        })
    }

    /// Sets the socket on which a new server asks for the disks, and which has to know which they are.
    pub(super) fn set_takeover_socket(&self, socket: TakeoverSocket) {
        self.state.lock().takeover_socket = Some(socket);
    }

    /// Returns that socket, to be handed over.
    pub(super) fn takeover_listener(&self) -> Option<Arc<UnixListener>> {
        let state = self.state.lock();
        let takeover = state.takeover_socket.as_ref();
        takeover.map(|takeover| Arc::clone(takeover.listener()))
    }

    pub(super) fn lock_set(&self) -> LockSet {
        self.state.lock().lock_set.clone()
    }

    pub(super) fn set_lock_set(&self, lock_set: LockSet) {
        self.state.lock().lock_set = lock_set;
    }

    /// Serves until a stop or a pause. Each disk keeps the client that is connected then. `orders` are of [`Roster::start`].
    ///
    /// # Errors
    ///
    /// If clients cannot be waited for.
    pub(super) fn serve(&self, orders: &Orders) -> Result<(), CommandFailure> {
        for (number, disk) in self.state.lock().served.iter() {
            self.reception
                .enter(*number, seat(disk, disk.client.lock().take()));
        }
        let ended = self
            .reception
            .serve(&mut |number, error| orders.failed(number, error));
        let ended = ended.map_err(|error| CommandFailure::about("cannot wait for clients", error))?;
        let state = self.state.lock();
        for (number, client) in ended {
            if let Some((_, disk)) = state.served.iter().find(|(served, _)| *served == number) {
                *disk.client.lock() = client;
            }
        }
        Ok(())
    }

    /// Keeps disks from coming and going, for a new server, until [`Roster::resume`]. A change under way ends first.
    pub(super) fn pause(&self) {
        self.changes.lock().are_handed_over = true;
    }

    /// The new server has not taken the disks.
    pub(super) fn resume(&self) {
        self.changes.lock().are_handed_over = false;
        self.handed_over.notify_all();
    }

    /// Lets no disk come or go any more, and returns all, with the failure of one that was served no longer.
    pub(super) fn end(&self) -> (Vec<Arc<Served>>, Option<CommandFailure>) {
        // A change under way ends first.
        self.changes.lock().has_ended = true;
        let mut state = self.state.lock();
        drop(state.takeover_socket.take());
        let served = std::mem::take(&mut state.served);
        let served = served.into_iter().map(|(_, disk)| disk).collect();
        (served, state.failure.take())
    }

    /// Leaves everything to the new server that has taken it.
    pub(super) fn give_up(&self) {
        let mut state = self.state.lock();
        state.served.drain(..).for_each(|(_, disk)| disk.socket.give_up());
        if let Some(socket) = state.takeover_socket.take() {
            socket.give_up();
        }
    }

    /// Starts the thread that carries out orders, where disks can be added. It is as confined as the calling one.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub(super) fn start(self: &Arc<Self>) -> std::io::Result<Orders> {
        if !self.setup.takes_disks() {
            return Ok(Orders::Anybody(Arc::clone(self)));
        }
        let (sender, orders) = mpsc::channel();
        let roster = Arc::clone(self);
        let carry_out = move || orders.into_iter().for_each(|order| roster.carry_out(order));
        thread::Builder::new().name("disks".to_owned()).spawn(carry_out)?;
        Ok(Orders::Thread(sender))
    }

    fn carry_out(self: &Arc<Self>, order: Order) {
        // Whoever asked may have gone.
        match order {
            Order::Add(keys, socket, answer) => answer.send(self.add(&keys, socket)).unwrap_or_default(),
            Order::Remove(id, answer) => answer.send(self.remove(&id)).unwrap_or_default(),
            Order::Failed(number, error) => self.fail(number, error),
        }
    }

    /// Waits until disks may come and go.
    fn alone(&self) -> MutexGuard<'_, Changes> {
        let mut changes = self.changes.lock();
        self.handed_over
            .wait_while(&mut changes, |changes| changes.are_handed_over);
        changes
    }

    /// Serves one more disk. If that fails all is as it was.
    fn add(&self, keys: &DiskKeys, socket: Option<PathBuf>) -> Result<Value, String> {
        let setup = &self.setup;
        if !setup.takes_disks() {
            return Err(
                "its sandbox lets no further image be opened; start it with --images FOLDER, or with --sandbox off".to_owned(),
            );
        }
        let mut config = keys.config().map_err(|error| error.to_string())?;
        config.is_own().map_err(|error| error.to_string())?;
        let joined = setup.groups.join(&mut config);
        joined.map_err(|error| error.to_string())?;
        if setup.shared.is_some()
            && let Some(obstacle) = workers::obstacle(&config)
        {
            return Err(obstacle);
        }
        for (given, option) in [
            (setup.options.restartable, "--restartable"),
            (setup.options.takeover, "--takeover"),
            (setup.options.incoming, "--incoming"),
        ] {
            if given {
                config
                    .may_outlive_process(option)
                    .map_err(|error| error.to_string())?;
            }
        }
        let name = config.name();
        let socket = socket.ok_or_else(|| {
            format!(
                "cannot add disk {name}: `socket` is missing; expected the path of a socket for its clients"
            )
        })?;
        let refused = |error: String| format!("cannot add disk {name}: {error}");
        let changes = self.alone();
        if changes.has_ended || self.stop.is_stopped() {
            return Err(refused("the server is stopping".to_owned()));
        }
        self.check(&config, &socket).map_err(refused)?;
        let disk = self.open(&socket, config).map_err(refused)?;
        let driver = disk.server.driver_name();
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        self.reception.enter(number, seat(&disk, None));
        state.served.push((number, disk));
        tell(&state);
        drop(state);
        tracing::info!(event = "disk-added", disk = %name, socket = %socket.display(), driver, "serving one more disk");
        Ok(json!({ "id": name, "socket": socket }))
    }

    /// Refuses a disk whose name, image or socket another one has.
    fn check(&self, config: &DiskConfig, socket: &Path) -> Result<(), String> {
        let name = config.name();
        let served = self.served();
        if served.iter().any(|disk| disk.name == name) {
            return Err("there is a disk of this name; expected another id".to_owned());
        }
        check_path(socket).map_err(|error| chain(&error))?;
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let folders = &self.setup.images;
        for (what, path) in [("image", config.path.as_path()), ("socket", socket)] {
            let mut within = folders
                .iter()
                .map(|folder| absolute(path).starts_with(absolute(folder)));
            if self.setup.options.sandbox && !within.any(|is_within| is_within) {
                return Err(format!(
                    "its sandbox allows no {what} at {}; expected one in a folder of --images: {}",
                    path.display(),
                    folders
                        .iter()
                        .map(|folder| folder.display().to_string())
                        .collect::<Vec<_>>()
                        .join(", ")
                ));
            }
        }
        let taken = self.setup.taken.iter().map(|path| absolute(path));
        if sockets(&served)
            .into_iter()
            .chain(taken)
            .any(|other| other == absolute(socket))
        {
            let path = socket.display();
            return Err(format!(
                "socket {path} is in use by this server; expected another path"
            ));
        }
        let all = served.iter().map(|disk| &disk.config).chain([config]);
        crate::once::check_images(&all.cloned().collect::<Vec<_>>()).map_err(text)
    }

    /// Opens the image and makes the socket of one more disk.
    fn open(&self, socket: &Path, config: DiskConfig) -> Result<Arc<Served>, String> {
        let setup = &self.setup;
        let lock_set = self.lock_set();
        let here = Options {
            incoming: false,
            ..setup.options
        };
        let socket = Socket::listen_for(socket, setup.options.access).map_err(|error| chain(&error))?;
        let found = find(&config, here, &lock_set).map_err(|error| chain(&error))?;
        let on_failure = failure_hook(&self.reception);
        let workers = Workers {
            shared: setup.shared.as_ref(),
            on_failure: &on_failure,
        };
        let served = serve(socket, config, found, here, &lock_set, workers);
        Ok(Arc::new(served.map_err(text)?))
    }

    /// Serves a disk no longer: its client is disconnected, what it asked for is finished, and its image is closed.
    fn remove(self: &Arc<Self>, id: &str) -> Result<Value, String> {
        let changes = self.alone();
        if changes.has_ended {
            return Err("the server is stopping".to_owned());
        }
        let (number, disk) = self.entry(id)?;
        // So that nobody finds it any more.
        disk.socket.remove();
        let left = self.reception.leave(number);
        if left.recv_timeout(LEAVE_MAX) == Err(mpsc::RecvTimeoutError::Timeout) {
            let roster = Arc::clone(self);
            let finish = move || {
                // The end of the sender is one, too.
                let _ended = left.recv();
                let changes = roster.alone();
                if !changes.has_ended {
                    // A takeover that failed meanwhile has had it served again.
                    let _ended = roster.reception.leave(number).recv_timeout(LEAVE_MAX);
                    roster.close(number).err().iter().for_each(|failure| {
                        tracing::error!(
                            error = failure.line(),
                            "a disk that was removed was not closed cleanly"
                        );
                    });
                }
            };
            let waiting = thread::Builder::new().name("leaving".to_owned()).spawn(finish);
            return Err(match waiting {
                Ok(_) => format!(
                    "the host has not answered requests of disk {id} for {} s; it is removed when it has",
                    LEAVE_MAX.as_secs()
                ),
                Err(error) => format!("disk {id} has requests in flight, and is served no longer: {error}"),
            });
        }
        self.close(number).map_err(text)?;
        tracing::info!(event = "disk-removed", disk = id, "a disk was removed");
        Ok(json!({ "id": id }))
    }

    /// Closes a disk that is served no longer, and forgets it.
    fn close(&self, number: u64) -> Result<(), CommandFailure> {
        let find = |state: &State| state.served.iter().position(|(served, _)| *served == number);
        let disk = {
            let state = self.state.lock();
            find(&state).and_then(|place| state.served.get(place)).cloned()
        };
        let Some((_, disk)) = disk else {
            return Ok(());
        };
        let closed = close(&disk);
        let mut state = self.state.lock();
        if let Some(place) = find(&state) {
            state.served.remove(place);
            tell(&state);
        }
        let socket = disk.socket.path();
        let is_named = |takeover: &TakeoverSocket| takeover.is_named_after(socket);
        if state.takeover_socket.as_ref().is_some_and(is_named) && !state.served.is_empty() {
            tracing::warn!(
                socket = %socket.display(),
                "no new server can take over from this one: its socket for that is named after a disk that has gone; \
                 start a server whose disks change with --images"
            );
        }
        closed
    }

    /// Closes a disk that cannot be served any more.
    fn fail(&self, number: u64, error: ServeError) {
        let changes = self.alone();
        if changes.has_ended {
            return;
        }
        let disk = self
            .state
            .lock()
            .served
            .iter()
            .find(|(served, _)| *served == number)
            .cloned();
        let Some((_, disk)) = disk else { return };
        tracing::error!(event = "disk-failed", disk = %disk.name, %error, "a disk cannot be served any more; others are served on");
        let failure = CommandFailure::about(&disk.name, error);
        let name = disk.name.clone();
        drop(disk);
        let closed = self.close(number);
        if let Err(failure) = closed {
            tracing::error!(
                disk = name,
                error = failure.line(),
                "the image was not closed cleanly"
            );
        }
        let mut state = self.state.lock();
        state.failure.get_or_insert(failure);
        // Who starts it again then has all disks.
        if state.served.is_empty() {
            self.stop.stop();
        }
    }
}

/// Has the socket for new servers know which disks there are.
fn tell(state: &State) {
    if let Some(takeover) = &state.takeover_socket {
        takeover.set_sockets(sockets(state.served.iter().map(|(_, disk)| disk)));
    }
}

/// Returns the text of a failure, as the end of a sentence.
fn text(failure: CommandFailure) -> String {
    failure.line().unwrap_or_default()
}

fn seat(disk: &Served, client: Option<PausedClient>) -> Seat {
    Seat {
        server: Arc::clone(&disk.server),
        listener: Arc::clone(disk.socket.listener()),
        client,
    }
}

#[cfg(test)]
mod tests {
    use block::worker::WorkerConfig;
    use virtio_devices::connect::{Cancel, connect_within};

    use super::*;

    /// Of two disks, each on a worker of a pool, the one goes whose worker has failed, and then the other, with which the server
    /// ends.
    #[test]
    fn disk_whose_worker_fails_goes_alone_and_the_last_one_ends_the_server() {
        let folder = tempfile::tempdir().expect("a folder");
        let stop = StopToken::new().expect("a token");
        let reception = Arc::new(Reception::new(stop.clone()).expect("descriptors"));
        let on_failure = failure_hook(&reception);
        let worker = WorkerConfig {
            on_failure: Some(on_failure.clone()),
            ..WorkerConfig::default()
        };
        let shared = Arc::new(WorkerPool::start(vec![worker; 2]).expect("workers"));
        let (options, lock_set) = (Options::default(), LockSet::default());
        let path = |name: &str| folder.path().join(name);
        let served = ["a", "b"].map(|name| {
            let image = path(name);
            std::fs::write(&image, [0; 4096]).expect("an image");
            let text = format!("path={},image_type=raw,id={name}", image.display());
            let config = DiskConfig::parse(&text).expect("a disk");
            let socket = Socket::listen(&path(&format!("{name}.sock"))).expect("a socket");
            let found = find(&config, options, &lock_set).expect("an image");
            let workers = Workers {
                shared: Some(&shared),
                on_failure: &on_failure,
            };
            serve(socket, config, found, options, &lock_set, workers).expect("a server")
        });
        let setup = Setup {
            options,
            groups: RateLimitGroups::parse([]).expect("none"),
            shared: Some(Arc::clone(&shared)),
            images: Vec::new(),
            taken: Vec::new(),
        };
        let roster = Roster::new(served.into(), reception, &stop, lock_set, setup);
        let orders = roster.start().expect("a thread");
        let serving = {
            let roster = Arc::clone(&roster);
            thread::spawn(move || roster.serve(&orders).map_err(text))
        };
        let fail = |worker: usize| {
            let failed = shared.workers()[worker].run(|_| panic!("as after a failure of its ring"));
            assert!(failed.is_err());
        };
        let names = || {
            roster
                .served()
                .iter()
                .map(|disk| disk.name.clone())
                .collect::<Vec<_>>()
        };
        let connects = |name: &str| {
            connect_within(
                &path(&format!("{name}.sock")),
                Duration::from_secs(5),
                &Cancel::never(),
            )
            .is_ok()
        };
        assert!(connects("a") && connects("b"));
        fail(0);
        while names() != ["b"] {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!connects("a") && connects("b") && !stop.is_stopped());
        fail(1);
        serving.join().expect("no panic").expect("no failure");
        assert!(stop.is_stopped());
        let (left, failure) = roster.end();
        assert!(left.is_empty());
        let failure = text(failure.expect("a reason to start again"));
        assert!(failure.contains("a: a worker has ended"), "{failure}");
    }
}
