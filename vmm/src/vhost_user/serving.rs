//! Serving, until a stop or until a new server has taken over.
//!
//! Invariants: after a stop signal no request that was taken is lost; each image is closed cleanly, even if another one fails. If a new
//! server fails, the same clients are served on.

use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use virtio_devices::vhost_user::StopToken;

use super::desk::ServedControl;
use super::hand_over::{
    HandOverFailure, Takeover, give_up_control, hand_over, lost, names, pause_control, reopen,
};
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
        roster.serve_those_who_enter(&orders)
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
    takeover: Option<Takeover>,
    control: &Mutex<Option<ServedControl>>,
    mut ahead: Option<Ahead>,
    begun: Result<(), CommandFailure>,
) -> Result<u8, CommandFailure> {
    let mut not_begun = begun.err();
    if not_begun.is_some() {
        stop.stop();
    }
    let first_failure = loop {
        let failure = match ahead.take() {
            Some(ahead) => joined(ahead).err(),
            None if not_begun.is_none() => roster.serve(orders).err(),
            None => None,
        };
        let failure = not_begun.take().or(failure);
        let Some(wanted) = &takeover else {
            break failure;
        };
        if let Some(taken) = wanted.finished.lock().take() {
            give_up_control(control, taken);
            roster.give_up();
            return Ok(EXIT_OK);
        }
        let successor = wanted.successor.lock().take();
        let Some(successor) = successor else {
            break failure;
        };
        if failure.is_some() || stop.is_stopped() {
            successor.refuse("it is stopping, and its images may need repair");
            break failure;
        }
        let offered = pause_control(control);
        let served = roster.served();
        match hand_over(roster, &served, offered.as_ref(), successor) {
            Ok(taken) => {
                give_up_control(control, taken);
                roster.give_up();
                return Ok(EXIT_OK);
            }
            Err(HandOverFailure::Close(failure)) => break Some(failure),
            Err(HandOverFailure::NotTaken(error)) => {
                let disks = names(&served);
                let error = lost(error);
                tracing::warn!(disks, %error, "the takeover failed; this server continues to serve");
                if let Err(failure) = reopen(&served, &roster.lock_set()) {
                    break Some(failure);
                }
                stop.resume();
                control.lock().iter().for_each(ServedControl::resume);
                roster.resume();
                // The thread that waits for a new server ends with the process only.
                wanted.again.send(()).unwrap_or_default();
            }
        }
    };
    // Whoever waits for the end of a takeover need not.
    roster.resume();
    // The last disk may have moved when the stop came: then all is the new server's, also the files of the sockets.
    drop(roster.moving.lock());
    if let Some(taken) = takeover.as_ref().and_then(|wanted| wanted.finished.lock().take()) {
        give_up_control(control, taken);
        roster.give_up();
        return Ok(EXIT_OK);
    }
    let (served, failed) = roster.end();
    drop(takeover);
    drop(control.lock().take());
    let mut first_failure = first_failure.or(failed);
    for disk in served {
        if let Err(failure) = close(&disk) {
            first_failure.get_or_insert(failure);
        }
    }
    first_failure.map_or(Ok(EXIT_OK), Err)
}
