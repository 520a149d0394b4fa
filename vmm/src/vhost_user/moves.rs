//! Disks of a roster that move to another server, and come from one, one at a time; [`crate::takeover::Moves`] is their way.
//!
//! ```text
//! give:    pause the client ─▶ close the image ─▶ locks, client ─▶ the other server: open, adopt, serve
//! take in, take back:                             the same, from the other side
//! ```
//!
//! Invariants: the disk is served by whoever has said so last; what is neither taken nor lost is served here as before, with the same
//! client; the locks of its image have an owner all the time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_devices::vhost_user::PausedClient;

use super::hand_over::lost;
use super::roster::{Roster, seat, text};
use super::served::{Options, Place, Served, close, find};
use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, chain};
use crate::socket::Socket;
use crate::takeover::{
    ControlSocket, Given, Moves, MovingDisk, Next, Offer, Successor, Taken, TakeoverError, not_adopted,
};

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
    /// Gives a disk to the other server, where it has this place.
    pub(super) fn give(
        self: &Arc<Self>,
        number: u64,
        disk: &Arc<Served>,
        place: usize,
        moves: &Moves,
    ) -> Result<(), NotMoved> {
        let locks = disk.image.lock_set();
        let stays = |error: std::io::Error| NotMoved::Stays(chain(&error));
        locks.hold_over(&disk.image.files()).map_err(stays)?;
        let moved = self.pause_disk(number, disk);
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

/// Moves all disks to a new server, one at a time. If one cannot move, those that have moved come back. The caller holds
/// [`Roster::moving`].
///
/// # Errors
///
/// The reason, as a sentence. This server serves the disks.
pub(super) fn move_all(
    roster: &Arc<Roster>,
    new: &Successor,
    moves: &Moves,
    control: Option<&ControlSocket>,
) -> Result<Taken, String> {
    let mut disks = roster.entries();
    // As the new one lists them.
    disks.sort_by_key(|(_, disk)| new.place_of(disk.socket.absolute()));
    let not_offered = |error| format!("the new server is not ready: {}", chain(&lost(error)));
    let takeover = roster.takeover_listener().ok_or("it has no socket for that")?;
    let sockets = disks.iter().map(|(_, disk)| &disk.socket);
    new.offer(&takeover, control, sockets).map_err(not_offered)?;
    let mut moved: Vec<(usize, u64, Arc<Served>)> = Vec::new();
    let mut failed = None;
    for (number, disk) in disks {
        let Some(place) = new.place_of(disk.socket.absolute()) else {
            continue;
        };
        match roster.give(number, &disk, place, moves) {
            Ok(()) => moved.push((place, number, disk)),
            Err(why) => {
                failed = Some((disk.name.clone(), why));
                break;
            }
        }
    }
    let error = match failed {
        None => match new.finish() {
            Ok(taken) => return Ok(taken),
            Err(error) => format!(
                "the new server has all disks, and has gone: {}",
                chain(&lost(error))
            ),
        },
        Some((name, NotMoved::Lost)) => format!("disk {name}: the new server has exited; see its own output"),
        // It gives the others back by itself.
        Some((name, NotMoved::Refused(reason))) => format!("disk {name}: {reason}"),
        Some((name, NotMoved::Stays(reason) | NotMoved::Failed(reason))) => {
            moves.go_no_further(&reason).unwrap_or_default();
            format!("disk {name}: {reason}")
        }
    };
    take_all_back(roster, moves, moved);
    Err(error)
}

/// Takes the disks back that a new server has, or serves them again if that has gone.
fn take_all_back(roster: &Roster, moves: &Moves, mut moved: Vec<(usize, u64, Arc<Served>)>) {
    while let Ok(Next::Disk(moving)) = moves.next() {
        let Some(index) = moved.iter().position(|(place, ..)| *place == moving.place) else {
            break;
        };
        let (_, number, disk) = &moved[index];
        match roster.take_back(*number, disk, moving, moves) {
            Ok(()) => drop(moved.swap_remove(index)),
            Err(reason) => {
                tracing::error!(disk = disk.name, reason, "cannot take a disk back");
                moves.refuse(&reason).unwrap_or_default();
            }
        }
    }
    for (_, number, disk) in &moved {
        roster.reclaim(*number, disk);
    }
}

/// Takes in all disks of an old server, `coming` in the order that was asked for. If one cannot come, those that have come go back.
///
/// # Errors
///
/// The failure. Nothing is served here.
pub(super) fn take_in_all(
    roster: &Arc<Roster>,
    offer: &Offer,
    mut coming: Vec<Option<((Place, Socket), DiskConfig)>>,
) -> Result<(), CommandFailure> {
    let failed = |error: TakeoverError| CommandFailure::Failed(error.into());
    let Some(moves) = offer.moves() else {
        return Ok(());
    };
    offer.ready().map_err(failed)?;
    let mut come = Vec::new();
    let failure = loop {
        match moves.next() {
            Ok(Next::End) => return Ok(()),
            Ok(Next::NoFurther(reason)) => break failed(TakeoverError::Refused { reason }),
            Ok(Next::Disk(moving)) => {
                let place = moving.place;
                let wanted = coming.get_mut(place).and_then(Option::take);
                let taken = match wanted {
                    Some((at, config)) => roster.take_in(at, config, moving, moves),
                    None => Err(CommandFailure::about("a disk has come twice", place.to_string())),
                };
                match taken {
                    Ok(number) => come.push((place, number)),
                    Err(failure) => {
                        let reason = failure.line().unwrap_or_default();
                        moves.refuse(&reason).unwrap_or_default();
                        break failure;
                    }
                }
            }
            Err(error) if come.is_empty() => break failed(TakeoverError::BrokenOff(error)),
            Err(error) => {
                let error = chain(&lost(error));
                tracing::error!(
                    error,
                    "the old server has gone in the middle of a takeover; its other disks are opened"
                );
                coming
                    .into_iter()
                    .flatten()
                    .for_each(|(at, config)| roster.open_left(at, config));
                return Ok(());
            }
        }
    };
    give_all_back(roster, moves, come);
    Err(failure)
}

/// Gives disks back to an old server, which continues.
fn give_all_back(roster: &Arc<Roster>, moves: &Moves, come: Vec<(usize, u64)>) {
    let disks = roster.entries();
    for (place, number) in come {
        let Some((_, disk)) = disks.iter().find(|(served, _)| *served == number) else {
            continue;
        };
        match roster.give(number, disk, place, moves) {
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
