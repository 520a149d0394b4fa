//! Disks of a roster that move to another server, and come from one, a few at a time; [`crate::takeover::Moves`] is their way.
//!
//! ```text
//! give:    pause the client ─▶ close the image ─▶ locks, client ─▶ the other server: open, adopt, serve
//! take in, take back:                             the same, from the other side
//! ```
//!
//! Invariants: the disk is served by whoever has said so last; what is neither taken nor lost is served here as before, with the same
//! client; the locks of its image have an owner all the time.

use std::io;
use std::iter::Enumerate;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};
use std::vec::IntoIter;

use parking_lot::Mutex;
use virtio_devices::vhost_user::PausedClient;

use super::begin::Coming;
use super::hand_over::{Entry, lost};
use super::roster::{LEAVE_MAX, Roster, seat, text};
use super::served::{Options, Place, Served, close, find};
use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, chain};
use crate::socket::Socket;
use crate::takeover::{
    ControlSocket, Given, Moves, MovingDisk, Next, Offer, Successor, Taken, TakeoverError, WITHIN,
    not_adopted,
};

/// The most disks that move at the same time. They take CPUs and wait for the host's storage.
const LANES_MAX: usize = 8;

/// The longest wait for the lock of an image whose server has died: its I/O may still be under way.
const LOCK_MAX: Duration = Duration::from_secs(20);

/// A disk has not moved.
#[derive(Debug)]
pub(super) enum NotMoved {
    /// For this reason it is served here as before.
    Stays(String),
    /// The other server has not taken it, for this reason, and it is served here as before.
    Refused(String),
    /// The other server has gone; it is served here as before.
    Lost,
    /// It is served nowhere, as was logged.
    Failed(String),
}

impl Roster {
    /// Gives a disk to the other server, where it has this place. Its requests in flight end until then, or it stays.
    pub(super) fn give(
        self: &Arc<Self>,
        number: u64,
        disk: &Arc<Served>,
        place: usize,
        moves: &Moves,
        until: Instant,
    ) -> Result<(), NotMoved> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let reason = "the time of the takeover is over (--within)";
            return Err(NotMoved::Stays(reason.to_owned()));
        }
        let locks = disk.image.lock_set();
        let stays = |error: io::Error| NotMoved::Stays(chain(&error));
        locks.hold_over(&disk.image.files()).map_err(stays)?;
        let moved = self.pause_disk(number, disk, left.min(LEAVE_MAX));
        let moved = moved.map_err(NotMoved::Stays).and_then(|client| {
            disk.disk.detach();
            let closed = disk.server.close_disk();
            disk.image.close();
            if let Err(error) = closed {
                let reason = chain(&error);
                self.give_up_disk(number, &disk.name, error.into());
                return Err(NotMoved::Failed(reason));
            }
            let moving = locks.held_over().and_then(|locks| {
                let client = client.as_ref().map(PausedClient::state).transpose()?;
                Ok(MovingDisk { place, locks, client })
            });
            let why = match moving.map(|moving| moves.give(moving)) {
                Ok(Ok(Given::Taken)) => {
                    client.into_iter().for_each(PausedClient::forget);
                    return Ok(());
                }
                Ok(Ok(Given::Refused(reason))) => NotMoved::Refused(reason),
                Ok(Ok(Given::Lost)) => NotMoved::Lost,
                // The other one may have the image.
                Ok(Err(error)) => {
                    let reason = chain(&error);
                    self.give_up_disk(number, &disk.name, error.into());
                    return Err(NotMoved::Failed(reason));
                }
                Err(error) => stays(error),
            };
            match disk.image.open_again() {
                Ok(opened) => {
                    disk.server.reopen(opened);
                    self.reception.enter(number, seat(disk, client));
                    Err(why)
                }
                Err(error) => {
                    let reason = chain(&error);
                    self.give_up_disk(number, &disk.name, error.into());
                    Err(NotMoved::Failed(reason))
                }
            }
        });
        locks.keep();
        moved
    }

    /// Takes a disk back that the other server had taken.
    pub(super) fn take_back(
        &self,
        number: u64,
        disk: &Arc<Served>,
        moving: MovingDisk,
        moves: &Moves,
    ) -> Result<(), String> {
        let locks = self.lock_set().part_inheriting(moving.locks);
        let opened = disk.image.reopen(&locks).map_err(|error| chain(&error))?;
        disk.server.reopen(opened);
        let client = moving.client.map(|client| disk.server.adopt(client)).transpose();
        let client = client.map_err(|error| {
            // Clean, or the one that has it then will tell.
            disk.disk.detach();
            disk.server.close_disk().unwrap_or_default();
            disk.image.close();
            chain(&error)
        })?;
        // If that one has died meanwhile, it is served here all the more.
        moves.take().unwrap_or_default();
        locks.keep();
        self.reception.enter(number, seat(disk, client));
        Ok(())
    }

    /// Serves a disk again whose server has died: its clients have to connect again.
    pub(super) fn reclaim(&self, number: u64, disk: &Arc<Served>) {
        match disk
            .image
            .reopen_until(&self.lock_set(), Instant::now() + LOCK_MAX)
        {
            Ok(opened) => {
                tracing::warn!(
                    disk = disk.name,
                    "the server that had taken this disk is gone; clients can connect here again"
                );
                disk.server.reopen(opened);
                self.reception.enter(number, seat(disk, None));
            }
            Err(error) => self.give_up_disk(number, &disk.name, error.into()),
        }
    }

    /// Takes a disk in that another server has given. Returns its number.
    ///
    /// # Errors
    ///
    /// Its image is not open then.
    pub(super) fn take_in(
        &self,
        at: (Place, Socket),
        config: DiskConfig,
        moving: MovingDisk,
        moves: &Moves,
    ) -> Result<u64, CommandFailure> {
        let locks = self.lock_set().part_inheriting(moving.locks);
        let options = Options {
            incoming: false,
            ..self.setup.options
        };
        let found = find(&config, options, &locks);
        let found = found.map_err(|error| CommandFailure::Failed(error.into()))?;
        let served = self.serve_here(at, config, found, options)?;
        let client = moving
            .client
            .map(|client| served.server.adopt(client))
            .transpose();
        let client = client.map_err(|error| {
            close(&served).unwrap_or_default();
            not_adopted(&served.name, error)
        })?;
        // If the other one has died meanwhile, it is served here all the more.
        moves.take().unwrap_or_default();
        locks.keep();
        Ok(self.enter(Arc::new(served), client))
    }

    /// Opens a disk whose server has died before it could give it.
    pub(super) fn open_left(&self, at: (Place, Socket), config: DiskConfig) {
        let name = config.name();
        let options = self.setup.options;
        let opened = find(&config, options, &self.lock_set());
        let opened = opened.map_err(|error| CommandFailure::Failed(error.into()));
        match opened.and_then(|found| self.serve_here(at, config, found, options)) {
            Ok(served) => _ = self.enter(Arc::new(served), None),
            Err(failure) => {
                let error = text(failure);
                tracing::error!(
                    event = "disk-failed",
                    disk = name,
                    error,
                    "the old server has died, and the disk cannot be served here"
                );
            }
        }
    }
}

/// Disks that move to a new server, and what has become of them so far. Each lane takes the next one.
struct Leaving<'a> {
    roster: &'a Arc<Roster>,
    until: Instant,
    left: Mutex<Enumerate<IntoIter<Entry>>>,
    moved: Mutex<Vec<(usize, Entry)>>,
    /// The first disk that has not moved, after which none does.
    failed: Mutex<Option<(String, NotMoved)>>,
}

impl Leaving<'_> {
    /// Moves disks on a lane until there is none left, or one has not moved.
    fn use_lane(&self, lane: &Moves) {
        while let Some((place, (number, disk))) = self.next() {
            match self.roster.give(number, &disk, place, lane, self.until) {
                Ok(()) => self.moved.lock().push((place, (number, disk))),
                Err(why) => {
                    if let NotMoved::Stays(reason) | NotMoved::Failed(reason) = &why {
                        let reason = format!("disk {}: {reason}", disk.name);
                        lane.go_no_further(&reason).unwrap_or_default();
                    }
                    self.failed.lock().get_or_insert((disk.name.clone(), why));
                    return;
                }
            }
        }
        let said = match &*self.failed.lock() {
            Some((name, _)) => lane.go_no_further(&format!("disk {name} does not move")),
            None => lane.end(),
        };
        // If it has gone, that shows elsewhere.
        said.unwrap_or_default();
    }

    fn next(&self) -> Option<(usize, Entry)> {
        if self.failed.lock().is_some() {
            return None;
        }
        self.left.lock().next()
    }
}

/// Moves disks to a new server, which lists them in this order, on as many lanes as it has. If one cannot move, those that have moved come
/// back. The caller holds [`Roster::moving`].
///
/// # Errors
///
/// The reason, as a sentence. This server serves the disks.
pub(super) fn move_all(
    roster: &Arc<Roster>,
    new: &Successor,
    going: Vec<Entry>,
    own: Option<&ControlSocket>,
    chosen: Option<&ControlSocket>,
) -> Result<Taken, String> {
    let not_offered = |error| format!("the new server is not ready: {}", chain(&lost(error)));
    let sockets: Vec<&Socket> = going.iter().map(|(_, disk)| &disk.socket).collect();
    let lanes = new.offer(own, chosen, &sockets).map_err(not_offered)?;
    let leaving = Leaving {
        roster,
        until: new.asked.until,
        left: Mutex::new(going.into_iter().enumerate()),
        moved: Mutex::default(),
        failed: Mutex::default(),
    };
    thread::scope(|scope| {
        for lane in &lanes[1..] {
            let thread = thread::Builder::new().name("moving".to_owned());
            if thread.spawn_scoped(scope, || leaving.use_lane(lane)).is_err() {
                // The others take longer, and that is all.
                lane.end().unwrap_or_default();
            }
        }
        leaving.use_lane(&lanes[0]);
    });
    let error = match leaving.failed.into_inner() {
        None => match new.finish() {
            Ok(taken) => return Ok(taken),
            Err(error) => format!(
                "the new server has all disks, and has gone: {}",
                chain(&lost(error))
            ),
        },
        Some((name, NotMoved::Lost)) => format!("disk {name}: the new server has exited; see its own output"),
        Some((name, NotMoved::Refused(reason) | NotMoved::Stays(reason) | NotMoved::Failed(reason))) => {
            format!("disk {name}: {reason}")
        }
    };
    // The lanes end with them, for a new server that waits on one.
    drop(lanes);
    take_all_back(roster, new.moves(), leaving.moved.into_inner());
    Err(error)
}

/// Takes the disks back that a new server has, or serves them again if that has gone.
fn take_all_back(roster: &Roster, moves: &Moves, mut moved: Vec<(usize, Entry)>) {
    while let Ok(Next::Disk(moving)) = moves.next() {
        let Some(index) = moved.iter().position(|(place, _)| *place == moving.place) else {
            break;
        };
        let (_, (number, disk)) = &moved[index];
        match roster.take_back(*number, disk, moving, moves) {
            Ok(()) => drop(moved.swap_remove(index)),
            Err(reason) => {
                tracing::error!(disk = disk.name, reason, "cannot take a disk back");
                moves.refuse(&reason).unwrap_or_default();
            }
        }
    }
    for (_, (number, disk)) in &moved {
        roster.reclaim(*number, disk);
    }
}

/// Disks that come from an old server, which has them until then.
struct Arriving<'a> {
    roster: &'a Arc<Roster>,
    /// By their places.
    coming: Mutex<Coming>,
    /// The places and the numbers of those that have come.
    come: Mutex<Vec<(usize, u64)>>,
}

/// The end of a lane.
enum LaneEnd {
    /// Nothing more comes on it.
    Empty,
    /// A disk has not come, and none does any more.
    Failed(CommandFailure),
    /// The old server has gone.
    Gone(io::Error),
}

impl Arriving<'_> {
    /// Takes in what comes on a lane.
    fn use_lane(&self, lane: &Moves) -> LaneEnd {
        loop {
            let moving = match lane.next() {
                Ok(Next::Disk(moving)) => moving,
                Ok(Next::End) => return LaneEnd::Empty,
                Ok(Next::NoFurther(reason)) => {
                    return LaneEnd::Failed(failed(TakeoverError::Refused { reason }));
                }
                Err(error) => return LaneEnd::Gone(error),
            };
            let place = moving.place;
            let wanted = self.coming.lock().get_mut(place).and_then(Option::take);
            let taken = match wanted {
                Some((at, config)) => self.roster.take_in(at, config, moving, lane),
                None => Err(CommandFailure::about("a disk has come twice", place.to_string())),
            };
            match taken {
                Ok(number) => self.come.lock().push((place, number)),
                Err(failure) => {
                    let reason = failure.line().unwrap_or_default();
                    lane.refuse(&reason).unwrap_or_default();
                    return LaneEnd::Failed(failure);
                }
            }
        }
    }

    /// Takes in what comes on a few lanes, each with a thread of its own.
    fn use_lanes(&self, offer: &Offer) -> Result<Vec<LaneEnd>, TakeoverError> {
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        let count = self.coming.lock().len().clamp(1, cpus.min(LANES_MAX));
        thread::scope(|scope| {
            let (mut theirs, mut threads) = (Vec::new(), Vec::new());
            for _ in 0..count {
                let (ours, their) = Moves::lane().map_err(TakeoverError::BrokenOff)?;
                let thread = thread::Builder::new().name("arriving".to_owned());
                match thread.spawn_scoped(scope, move || self.use_lane(&ours)) {
                    Ok(thread) => threads.push(thread),
                    Err(error) if threads.is_empty() => return Err(TakeoverError::BrokenOff(error)),
                    // The others take longer, and that is all.
                    Err(_) => break,
                }
                theirs.push(their);
            }
            offer.ready(theirs)?;
            let joined = threads.into_iter().map(ScopedJoinHandle::join);
            Ok(joined
                .map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect())
        })
    }
}

fn failed(error: TakeoverError) -> CommandFailure {
    CommandFailure::Failed(error.into())
}

/// Takes in the disks of an old server, `coming` in the order that was asked for. If one cannot come, those that have come go back.
///
/// # Errors
///
/// The failure. Nothing is served here.
pub(super) fn take_in_all(roster: &Arc<Roster>, offer: &Offer, coming: Coming) -> Result<(), CommandFailure> {
    let arriving = Arriving {
        roster,
        coming: Mutex::new(coming),
        come: Mutex::default(),
    };
    let ends = arriving.use_lanes(offer).map_err(failed)?;
    let (mut failure, mut gone) = (None, None);
    for end in ends {
        match end {
            LaneEnd::Empty => {}
            LaneEnd::Failed(why) => _ = failure.get_or_insert(why),
            LaneEnd::Gone(error) => gone = Some(error),
        }
    }
    let mut come = arriving.come.into_inner();
    come.sort_unstable();
    if let Some(error) = gone.take_if(|_| failure.is_none() && !come.is_empty()) {
        tracing::error!(
            error = chain(&lost(error)),
            "the old server has gone in the middle of a takeover; its other disks are opened"
        );
        let left = arriving.coming.into_inner().into_iter().flatten();
        left.for_each(|(at, config)| roster.open_left(at, config));
    }
    match failure.or(gone.map(|error| failed(TakeoverError::BrokenOff(error)))) {
        Some(failure) => {
            give_all_back(roster, offer.moves(), come);
            Err(failure)
        }
        None => {
            roster.put_in_order(&come);
            Ok(())
        }
    }
}

/// Gives disks back to an old server, which continues.
fn give_all_back(roster: &Arc<Roster>, moves: &Moves, come: Vec<(usize, u64)>) {
    let disks = roster.entries();
    for (place, number) in come {
        let Some((_, disk)) = disks.iter().find(|(served, _)| *served == number) else {
            continue;
        };
        match roster.give(number, disk, place, moves, Instant::now() + WITHIN) {
            Ok(()) => roster.forget(number),
            Err(NotMoved::Stays(reason) | NotMoved::Refused(reason)) => {
                tracing::error!(
                    disk = disk.name,
                    reason,
                    "cannot give a disk back, and disconnects its client"
                );
            }
            Err(NotMoved::Lost | NotMoved::Failed(_)) => {}
        }
    }
    moves.end().unwrap_or_default();
}
