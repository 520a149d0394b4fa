//! The disks of a server, which come and go while others are served.
//!
//! ```text
//!  control socket ──disk-add, disk-remove──▶ Orders ──┬─▶ Roster: what requests, statistics and takeovers see
//!  SIGHUP ──the configuration file─────────▶          └─▶ Reception: whose clients are served
//!  reception ──a disk has failed───────────▶
//! ```
//!
//! A disk that fails is closed, and the others are served on. If it was the last one, the server ends.
//!
//! Invariants: disks change one at a time, and not while they are handed over to a new server; the lock of a disk's image is released
//! before the disk is forgotten.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::Duration;

use block::lock::LockSet;
use block::worker::WorkerPool;
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::{Value, json};
use virtio_devices::vhost_user::{PausedClient, Reception, Seat, ServeError, StopToken};

use super::file::ConfigFile;
use super::hand_over::sockets;
use super::image::Found;
use super::orders::Orders;
use super::served::{Options, Place, Served, Workers, close, failure_hook, find, listen, serve};
use super::workers;
use crate::control::DiskKeys;
use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::error::{CommandFailure, chain};
use crate::image_folders;
use crate::sd_notify::Manager;
use crate::socket::{Socket, check_path};
use crate::takeover::Taken;

/// The longest time that a request to remove a disk waits for the requests of its client in flight.
pub(super) const LEAVE_MAX: Duration = Duration::from_secs(10);

/// The disks that are served, and what others need to be served like them.
pub(super) struct Roster {
    pub(super) reception: Arc<Reception>,
    stop: StopToken,
    pub(super) state: Mutex<State>,
    changes: Mutex<Changes>,
    handed_over: Condvar,
    /// Held by the request of a new server.
    pub(super) handing_over: Mutex<()>,
    /// Held while disks move to another server.
    pub(super) moving: Mutex<()>,
    /// The sockets taken by a new server that has all disks.
    pub(super) taken: Mutex<Option<Taken>>,
    pub(super) setup: Setup,
}

/// The options, workers and folders that disks are served with.
pub(super) struct Setup {
    pub(super) options: Options,
    /// Workers that the queues of all disks share.
    pub(super) shared: Option<Arc<WorkerPool>>,
    /// The folders of the images and sockets of disks that are added.
    pub(super) images: Vec<PathBuf>,
    /// Paths that no disk's socket can have.
    pub(super) taken: Vec<PathBuf>,
    /// The configuration file as it was at the start, which is read again.
    pub(super) file: Option<ConfigFile>,
    /// Told that the server reloads.
    pub(super) manager: Arc<Manager>,
}

pub(super) struct State {
    next: u64,
    /// In the order in which they came.
    served: Vec<(u64, Arc<Served>)>,
    /// The locks of all images.
    lock_set: LockSet,
    /// The failure that ended a disk, for the exit code of the process.
    failure: Option<CommandFailure>,
    /// The rate limit groups that disks may join.
    pub(super) groups: RateLimitGroups,
    /// The disks that the configuration file had when it was last followed.
    pub(super) listed: Vec<String>,
}

impl Setup {
    /// Returns true if disks can be added.
    pub(super) fn takes_disks(&self) -> bool {
        !self.images.is_empty() || !self.options.sandbox
    }

    /// Returns true if some order takes a thread of its own.
    pub(super) fn takes_orders(&self) -> bool {
        self.takes_disks() || self.file.is_some()
    }
}

/// The reasons that keep disks from coming and going.
#[derive(Default)]
pub(super) struct Changes {
    are_handed_over: bool,
    pub(super) has_ended: bool,
}

impl Roster {
    /// A roster of these disks, whose images are opened with `lock_set`. Their clients are served when [`Roster::serve`] is called.
    pub(super) fn new(
        served: Vec<Served>,
        reception: Arc<Reception>,
        stop: &StopToken,
        lock_set: LockSet,
        groups: RateLimitGroups,
        setup: Setup,
    ) -> Arc<Self> {
        let served: Vec<_> = (0..).zip(served.into_iter().map(Arc::new)).collect();
        for (number, disk) in &served {
            reception.enter(*number, seat(disk, None));
        }
        let file = setup.file.iter().flat_map(|file| &file.disks);
        let listed = file.map(|disk| disk.config.name()).collect();
        Arc::new(Self {
            reception,
            stop: stop.clone(),
            state: Mutex::new(State {
                next: served.len() as u64,
                served,
                lock_set,
                failure: None,
                groups,
                listed,
            }),
            changes: Mutex::default(),
            handed_over: Condvar::new(),
            handing_over: Mutex::default(),
            moving: Mutex::default(),
            taken: Mutex::default(),
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

    /// As [`Roster::find`], with its number.
    pub(super) fn entry(&self, id: &str) -> Result<(u64, Arc<Served>), String> {
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

    pub(super) fn lock_set(&self) -> LockSet {
        self.state.lock().lock_set.clone()
    }

    /// Serves disks, also those that [enter](Roster::enter) meanwhile, until a stop or a pause. Each keeps the client that is
    /// connected then.
    ///
    /// # Errors
    ///
    /// If clients cannot be waited for.
    pub(super) fn serve(&self, orders: &Orders) -> Result<(), CommandFailure> {
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

    /// Returns the disks that are served now, with their numbers.
    pub(super) fn entries(&self) -> Vec<(u64, Arc<Served>)> {
        self.state.lock().served.clone()
    }

    /// Lets no disk come or go any more, and returns all, with the failure of one that was served no longer.
    pub(super) fn end(&self) -> (Vec<Arc<Served>>, Option<CommandFailure>) {
        // A change under way ends first, and so do disks that move.
        let _moving = self.moving.lock();
        self.changes.lock().has_ended = true;
        let mut state = self.state.lock();
        let served = std::mem::take(&mut state.served);
        let served = served.into_iter().map(|(_, disk)| disk).collect();
        (served, state.failure.take())
    }

    /// Leaves everything to the new server that has taken it.
    pub(super) fn give_up(&self) {
        let mut state = self.state.lock();
        state.served.drain(..).for_each(|(_, disk)| disk.socket.give_up());
    }

    /// Asks the server to stop.
    pub(super) fn stop(&self) {
        self.stop.stop();
    }

    /// Waits until disks may come and go.
    pub(super) fn alone(&self) -> MutexGuard<'_, Changes> {
        let mut changes = self.changes.lock();
        self.handed_over
            .wait_while(&mut changes, |changes| changes.are_handed_over);
        changes
    }

    /// Serves one more disk. If that fails all is as it was.
    pub(super) fn add(&self, keys: &DiskKeys, socket: Option<PathBuf>) -> Result<Value, String> {
        if !self.setup.takes_disks() {
            return Err(image_folders::NO_FOLDER.to_owned());
        }
        let mut config = keys.config().map_err(|error| error.to_string())?;
        config.is_own().map_err(|error| error.to_string())?;
        let joined = self.state.lock().groups.join(&mut config);
        joined.map_err(|error| error.to_string())?;
        if let (Some(_), Some(obstacle)) = (&self.setup.shared, workers::obstacle(&config)) {
            return Err(obstacle);
        }
        for (given, option) in self.setup.options.outliving() {
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
        self.add_disk(Place::Path(socket), config)
    }

    /// Serves one more disk, whose configuration goes with the options of the server.
    pub(super) fn add_disk(&self, place: Place, config: DiskConfig) -> Result<Value, String> {
        let name = config.name();
        let refused = |error: String| format!("cannot add disk {name}: {error}");
        let changes = self.alone();
        if changes.has_ended || self.stop.is_stopped() {
            return Err(refused("the server is stopping".to_owned()));
        }
        self.check(&config, &place, &[]).map_err(refused)?;
        let disk = self.open(place, config).map_err(refused)?;
        let (driver, socket) = (disk.server.driver_name(), disk.socket.path().to_owned());
        self.enter(disk, None);
        tracing::info!(event = "disk-added", disk = %name, socket = %socket.display(), driver, "serving one more disk");
        Ok(json!({ "id": name, "socket": socket }))
    }

    /// Has a disk served from now on, beginning with `client`. Returns its number.
    pub(super) fn enter(&self, disk: Arc<Served>, client: Option<PausedClient>) -> u64 {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        self.reception.enter(number, seat(&disk, client));
        state.served.push((number, disk));
        number
    }

    /// Forgets a disk that another server has.
    pub(super) fn forget(&self, number: u64) {
        let mut state = self.state.lock();
        state.served.retain(|(served, _)| *served != number);
    }

    /// Has disks that came in any order listed by their places.
    pub(super) fn put_in_order(&self, come: &[(usize, u64)]) {
        let place_of = |number: u64| come.iter().position(|(_, come)| *come == number);
        let mut state = self.state.lock();
        state.served.sort_by_cached_key(|(number, _)| place_of(*number));
    }

    /// Starts the server of a disk, on workers as those of all.
    pub(super) fn serve_here(
        &self,
        at: (Place, Socket),
        config: DiskConfig,
        found: Found,
        options: Options,
    ) -> Result<Served, CommandFailure> {
        let on_failure = failure_hook(&self.reception);
        let workers = Workers {
            shared: self.setup.shared.as_ref(),
            on_failure: &on_failure,
        };
        serve(at, config, found, options, workers)
    }

    /// Refuses a disk whose name, image or socket another one has, but for those that are `going`.
    pub(super) fn check(&self, config: &DiskConfig, place: &Place, going: &[String]) -> Result<(), String> {
        let name = config.name();
        let mut served = self.served();
        served.retain(|disk| !going.contains(&disk.name));
        if served.iter().any(|disk| disk.name == name) {
            return Err("there is a disk of this name; expected another id".to_owned());
        }
        let socket = match place {
            Place::Path(path) => {
                check_path(path).map_err(|error| chain(&error))?;
                Some(path.as_path())
            }
            Place::Descriptor(_) => None,
        };
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let places = [("image", Some(config.path.as_path())), ("socket", socket)];
        let places = places.iter().filter_map(|(what, path)| Some((what, (*path)?)));
        for (what, path) in places.filter(|_| self.setup.options.sandbox) {
            image_folders::check_within(&self.setup.images, what, path)?;
        }
        let taken = self.setup.taken.iter().map(|path| absolute(path));
        let mut taken = sockets(&served).into_iter().chain(taken);
        if let Some(socket) = socket
            && taken.any(|other| other == absolute(socket))
        {
            let path = socket.display();
            return Err(format!(
                "socket {path} is in use by this server; expected another path"
            ));
        }
        let others: Vec<_> = served.iter().map(|disk| disk.image.config()).collect();
        crate::once::check_images(others.iter().map(Arc::as_ref).chain([config])).map_err(text)
    }

    /// Opens the image and makes the socket of one more disk.
    fn open(&self, place: Place, config: DiskConfig) -> Result<Arc<Served>, String> {
        let setup = &self.setup;
        let here = Options {
            incoming: false,
            ..setup.options
        };
        let socket = listen(&place, setup.options.access).map_err(|error| chain(&error))?;
        let found = find(&config, here, &self.lock_set()).map_err(|error| chain(&error))?;
        let served = self.serve_here((place, socket), config, found, here);
        Ok(Arc::new(served.map_err(text)?))
    }

    /// Serves a disk no longer: its client is disconnected, what it asked for is finished, and its image is closed.
    pub(super) fn remove(self: &Arc<Self>, id: &str) -> Result<Value, String> {
        let changes = self.alone();
        if changes.has_ended {
            return Err("the server is stopping".to_owned());
        }
        let (number, disk) = self.entry(id)?;
        // So that nobody finds it any more.
        disk.socket.remove();
        let left = self.reception.leave(number);
        if matches!(left.recv_timeout(LEAVE_MAX), Err(RecvTimeoutError::Timeout)) {
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
        }
        closed
    }

    /// Closes a disk that cannot be served any more.
    pub(super) fn fail(&self, number: u64, error: ServeError) {
        let changes = self.alone();
        if changes.has_ended {
            return;
        }
        let find = |state: &State| state.served.iter().find(|(served, _)| *served == number).cloned();
        let found = find(&self.state.lock());
        if let Some((_, disk)) = found {
            let name = disk.name.clone();
            drop(disk);
            self.give_up_disk(number, &name, error.into());
        }
    }

    /// Closes and forgets a disk for this reason, which is that of the process's end if it was the last one. Changes are locked.
    pub(super) fn give_up_disk(&self, number: u64, name: &str, reason: Box<dyn Error + Send + Sync>) {
        tracing::error!(
            event = "disk-failed",
            disk = name,
            error = chain(&*reason),
            "a disk cannot be served any more; others are served on"
        );
        if let Err(failure) = self.close(number) {
            tracing::error!(
                disk = name,
                error = failure.line(),
                "the image was not closed cleanly"
            );
        }
        let mut state = self.state.lock();
        state
            .failure
            .get_or_insert_with(|| CommandFailure::about(name, reason));
        // Who starts it again then has all disks.
        if state.served.is_empty() {
            self.stop.stop();
        }
    }
}

/// Returns the text of a failure, as the end of a sentence.
pub(super) fn text(failure: CommandFailure) -> String {
    failure.line().unwrap_or_default()
}

pub(super) fn seat(disk: &Served, client: Option<PausedClient>) -> Seat {
    Seat {
        server: Arc::clone(&disk.server),
        listener: Arc::clone(disk.socket.listener()),
        client,
    }
}

#[cfg(test)]
pub(super) mod tests;
