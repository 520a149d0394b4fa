//! Serving, until a stop or until a new server has taken over.
//!
//! Invariants: after a stop signal no request that was taken is lost; each image is closed cleanly, even if another one fails. If a new
//! server fails, the same clients are served on.

use std::sync::Arc;
use std::thread::JoinHandle;

use virtio_devices::vhost_user::StopToken;

use super::desk::Doors;
use super::hand_over::give_up;
use super::orders::Orders;
use super::roster::Roster;
use super::served::{Options, close, confine};
use crate::error::{CommandFailure, EXIT_OK};
use crate::sandbox::Task;

/// A thread that serves already, while the rest is prepared.
pub(super) type Ahead = JoinHandle<Result<(), CommandFailure>>;

/// Begins to serve what enters the reception.
pub(super) fn serve_ahead(roster: &Arc<Roster>, orders: &Orders, options: Options) -> std::io::Result<Ahead> {
    let (roster, orders) = (Arc::clone(roster), orders.clone());
    let serve = move || {
        confine(Task::Control, options).map_err(|error| CommandFailure::Failed(error.into()))?;
        roster.serve(&orders)
    };
    std::thread::Builder::new()
        .name("serving".to_owned())
        .spawn(serve)
}

/// Waits for the end of serving.
pub(super) fn joined(ahead: Ahead) -> Result<(), CommandFailure> {
    ahead
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Serves until a stop, or until a new server has taken over, and closes what is open then; `ahead` serves already. So it does at once
/// if serving has not `begun`.
pub(super) fn serve_until_stopped(
    roster: &Roster,
    orders: &Orders,
    stop: &StopToken,
    doors: &Doors,
    ahead: Option<Ahead>,
    begun: Result<(), CommandFailure>,
) -> Result<u8, CommandFailure> {
    let not_begun = begun.err();
    if not_begun.is_some() {
        stop.stop();
    }
    let failure = match ahead {
        Some(ahead) => joined(ahead).err(),
        None if not_begun.is_none() => roster.serve(orders).err(),
        None => None,
    };
    let mut first_failure = not_begun.or(failure);
    // Whoever waits for the end of a takeover need not.
    roster.resume();
    // The last disk may have moved when the stop came: then all is the new server's, also the files of the sockets.
    drop(roster.moving.lock());
    if let Some(taken) = roster.taken.lock().take() {
        give_up(doors, taken);
        roster.give_up();
        return Ok(EXIT_OK);
    }
    let (served, failed) = roster.end();
    doors.close();
    first_failure = first_failure.or(failed);
    for disk in served {
        if let Err(failure) = close(&disk) {
            first_failure.get_or_insert(failure);
        }
    }
    first_failure.map_or(Ok(EXIT_OK), Err)
}
