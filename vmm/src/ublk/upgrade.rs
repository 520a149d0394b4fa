//! The new server's part of an upgrade: finds the servers of the devices, asks them to hand over, and then continues as
//! after a kill.
//!
//! Invariants: everything that can be checked beforehand is, so that served devices stay served. No image is opened before
//! its server's process has exited, nor while I/O of that server may still complete. A server that has handed over cleanly
//! reports that it has no I/O left, and passes its locks, because the kernel closes its ring at an arbitrary time. After
//! any other exit the new server waits for the lock, which the kernel releases after the last I/O.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use block::lock::LockSet;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;
use virtio_devices::connect::{Cancel, connect_within};
use virtio_devices::ublk::abi::{DeviceState, Flags};
use virtio_devices::ublk::{Recovery, block_path};

use super::hand_over::{names, places};
use super::io_timeout::ShortTimeouts;
use super::{command_process, devices};
use crate::control::{AskError, HAND_OVER, Request, ask_for_disks, ask_within};
use crate::error::CommandFailure;
use crate::parallel;
use crate::saved_devices::process;
use crate::saved_devices::state::SavedDevice;

/// The longest time that a server may take to list its devices.
const PROMPT: Duration = Duration::from_secs(10);
/// The time that its answer may take beyond that of the hand-over.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// The longest time that its process may take to exit after that.
const END: Duration = Duration::from_secs(30);

fn failed(message: String) -> CommandFailure {
    CommandFailure::Failed(message.into())
}

/// A server that is to leave its devices.
#[derive(Debug)]
pub(super) struct Predecessor {
    pid: u32,
    socket: PathBuf,
    /// In order, with the driver's flags.
    devices: BTreeMap<u32, Flags>,
}

impl Predecessor {
    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// The devices, in order.
    pub(super) fn devices(&self) -> Vec<u32> {
        self.devices.keys().copied().collect()
    }
}

/// Finds the servers of these devices, or of all, and everything that would keep them from leaving.
///
/// # Errors
///
/// A failure that names the device or its server, which continues.
pub(super) fn find(ids: &[u32], everything: bool) -> Result<Vec<Predecessor>, CommandFailure> {
    let mut control = command_process::control()?;
    let mut servers: BTreeMap<u32, Predecessor> = BTreeMap::new();
    let ids = if everything { devices::all() } else { ids.to_vec() };
    for id in ids {
        let path = block_path(id);
        let info = control
            .info(id)
            .map_err(|error| CommandFailure::Failed(error.into()))?;
        let is_served = info.state() == DeviceState::Live && process::is_alive(&info);
        let remembered = SavedDevice::load(id);
        if everything && (!is_served || remembered.is_none()) {
            continue;
        }
        if !is_served {
            return Err(failed(format!(
                "{path} has no server to take over from; run `ringdisk ublk recover {id}`"
            )));
        }
        let pid = u32::try_from(info.ublksrv_pid).unwrap_or_default();
        let Some(remembered) = remembered.filter(|state| state.pid == pid) else {
            return Err(failed(format!(
                "{path} is served by process {pid}, but there is no saved state with its control socket"
            )));
        };
        if let Some(why) = Recovery::obstacle(info.flags()) {
            return Err(failed(format!(
                "{path} {why}; process {pid} continues to serve it"
            )));
        }
        let server = servers.entry(pid).or_insert_with(|| Predecessor {
            pid,
            socket: remembered.control,
            devices: BTreeMap::new(),
        });
        server.devices.insert(id, info.flags());
    }
    let mut servers: Vec<Predecessor> = servers.into_values().collect();
    servers.iter_mut().try_for_each(look)?;
    Ok(servers)
}

/// Finds the server whose control socket is at `control`, with all of its devices, of which it may have none.
///
/// # Errors
///
/// If no server of block devices answers there, or it cannot leave.
pub(super) fn find_at(control: &Path) -> Result<Predecessor, CommandFailure> {
    let about = control.display();
    let answer = match ask_within(control, &Request::Info {}, Some(PROMPT)) {
        Ok(answer) => answer,
        Err(AskError::Refused(why)) => return Err(failed(format!("the server at {about} refuses: {why}"))),
        Err(AskError::Unanswered(error)) => {
            return Err(failed(format!(
                "no server to take over from answers at {about}: {error}"
            )));
        }
    };
    let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
    let pid = number(&answer["process"]).filter(|_| answer["devices"].is_array());
    let pid = pid.ok_or_else(|| {
        failed(format!(
            "{about} is the socket of no server of block devices that can be taken over; expected one of `ringdisk serve` or `ublk`"
        ))
    })?;
    let devices = answer["devices"].as_array().into_iter().flatten();
    let ids: Vec<u32> = devices.filter_map(|device| number(&device["id"])).collect();
    let mut found = find(&ids, false)?;
    match (found.pop(), found.is_empty()) {
        (Some(server), true) if server.pid == pid => Ok(server),
        // A server without devices has been looked at already.
        (None, _) if answer["hand_over"] == HAND_OVER => Ok(Predecessor {
            pid,
            socket: control.to_owned(),
            devices: BTreeMap::new(),
        }),
        _ => Err(failed(format!(
            "process {pid}, which answers at {about}, has another version of the hand-over protocol, or devices of others"
        ))),
    }
}

/// Finds out whether a server can be asked, and has these devices and no others.
fn look(server: &mut Predecessor) -> Result<(), CommandFailure> {
    let (pid, ids) = (server.pid, server.devices());
    let about = format!("process {pid}, which serves {},", names(&ids));
    let answer = match ask_within(&server.socket, &Request::Info {}, Some(PROMPT)) {
        Ok(answer) => answer,
        Err(AskError::Unanswered(error)) => {
            let socket = server.socket.display();
            return Err(failed(format!("{about} does not answer at {socket}: {error}")));
        }
        Err(AskError::Refused(why)) => return Err(failed(format!("{about} refuses: {why}"))),
    };
    if answer["hand_over"] != HAND_OVER {
        return Err(failed(format!(
            "{about} has another version of the hand-over protocol; use `kill -9 {pid}`, then `ringdisk ublk recover`"
        )));
    }
    let others: Vec<u32> = answer["devices"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|device| u32::try_from(device["id"].as_u64()?).ok())
        .filter(|id| !server.devices.contains_key(id))
        .collect();
    if !others.is_empty() {
        let others = names(&others);
        return Err(failed(format!(
            "{about} serves {others} too, and hands over all of its devices or none: name them too, or pass --all"
        )));
    }
    Ok(())
}

/// The result of asking the old servers.
#[derive(Debug)]
pub(super) struct Taken {
    began: Instant,
    ours: Vec<u32>,
    refused: Vec<u32>,
    timeouts: Vec<ShortTimeouts>,
    /// Has the locks of those that have left cleanly.
    pub(super) lock_set: LockSet,
    /// The first refusal, if others have left.
    failure: Option<CommandFailure>,
}

/// Has servers leave within some time, all at once, and waits for their ends.
///
/// # Errors
///
/// If none of them leaves.
pub(super) fn take(servers: Vec<Predecessor>, within: Duration) -> Result<Taken, CommandFailure> {
    let mut taken = Taken {
        began: Instant::now(),
        ours: Vec::new(),
        refused: Vec::new(),
        timeouts: Vec::new(),
        lock_set: LockSet::default(),
        failure: None,
    };
    let mut locks = Vec::new();
    let Ok(replaced) = parallel::each(servers, |server| Ok::<_, Infallible>(replace(server, within)));
    for (server, (replaced, timeouts)) in replaced {
        let ids = server.devices();
        taken.timeouts.extend(timeouts);
        match replaced {
            Ok(passed) => {
                taken.ours.extend(ids);
                locks.extend(passed);
            }
            Err(failure) => {
                log_failure(&failure);
                taken.refused.extend(ids);
                taken.failure.get_or_insert(failure);
            }
        }
    }
    if !locks.is_empty() {
        taken.lock_set = LockSet::inherit(locks);
    }
    match taken.failure.take() {
        Some(failure) if taken.ours.is_empty() => Err(failure),
        failure => Ok(Taken { failure, ..taken }),
    }
}

fn log_failure(failure: &CommandFailure) {
    tracing::error!(
        failure = failure.line().unwrap_or_default(),
        "the upgrade continues without this server"
    );
}

impl Taken {
    /// Returns true if this device's server continues.
    pub(super) fn was_refused(&self, id: u32) -> bool {
        self.refused.contains(&id)
    }

    /// A failure to serve what others have left, with what is to be done about it.
    pub(super) fn orphaned(&self, failure: CommandFailure) -> CommandFailure {
        if self.ours.is_empty() {
            return failure;
        }
        let message = failure.line().unwrap_or_default();
        let names = names(&self.ours);
        failed(format!(
            "{message}; {names} may have no server now: run `ringdisk ublk recover`"
        ))
    }

    /// All that can be served is. Answers the first refusal, if others have left.
    pub(super) fn end(self) -> Option<CommandFailure> {
        if !self.ours.is_empty() {
            let ms = self.began.elapsed().as_millis();
            tracing::info!(devices = ?self.ours, ms, "took over");
        }
        self.failure
    }
}

/// Has one server leave, and waits for its end. Returns the locks of its images, if they can be opened at once; and the timeouts of its
/// devices, which are short meanwhile.
fn replace(
    server: &Predecessor,
    within: Duration,
) -> (Result<Vec<OwnedFd>, CommandFailure>, Option<ShortTimeouts>) {
    let mut timeouts = None;
    let replaced = replace_with(server, within, &mut timeouts);
    (replaced, timeouts)
}

/// As [`replace`].
fn replace_with(
    server: &Predecessor,
    within: Duration,
    timeouts: &mut Option<ShortTimeouts>,
) -> Result<Vec<OwnedFd>, CommandFailure> {
    let (pid, ids) = (server.pid, server.devices());
    let about = format!("process {pid}, which serves {},", names(&ids));
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let gone = || failed(format!("{about} has exited; run `ringdisk ublk recover`"));
    let process = pidfd_open(number.ok_or_else(gone)?, PidfdFlags::empty()).map_err(|_| gone())?;
    // The number is not another's meanwhile.
    let mut control = command_process::control()?;
    for &id in &ids {
        let info = control
            .info(id)
            .map_err(|error| CommandFailure::Failed(error.into()))?;
        if u32::try_from(info.ublksrv_pid) != Ok(pid) || info.state() != DeviceState::Live {
            return Err(gone());
        }
    }
    let hurried = server
        .devices
        .iter()
        .filter(|(_, flags)| !flags.contains(Flags::QUIESCE));
    let hurried: Vec<u32> = hurried.map(|(&id, _)| id).collect();
    *timeouts = Some(ShortTimeouts::of(&hurried));
    let request = Request::HandOver {
        version: HAND_OVER,
        disks: places(&ids),
        seconds: within.as_secs(),
        partly: false,
    };
    let connected = connect_within(&server.socket, PROMPT, &Cancel::never());
    let answer = match connected {
        Ok(connection) => ask_for_disks(&connection, &request, within + ANSWER_MAX),
        Err(error) => Err(AskError::Unanswered(error)),
    };
    let mut locks = Vec::new();
    match answer {
        Ok(handed) => {
            locks = handed.locks;
            for failure in handed.answer["failures"].as_array().into_iter().flatten() {
                let failure = failure.as_str().unwrap_or_default();
                tracing::warn!(pid, failure, "the old server did not close an image cleanly");
                // Its I/O may be under way.
                locks.clear();
            }
        }
        Err(AskError::Refused(why)) => {
            return Err(failed(format!(
                "{about} refuses to hand over and continues to serve: {why}"
            )));
        }
        Err(AskError::Unanswered(error)) if error.kind() == io::ErrorKind::TimedOut => {
            let seconds = within.as_secs();
            return Err(failed(format!(
                "{about} has not handed over within {seconds} s; after it has exited, run `ringdisk ublk recover`"
            )));
        }
        // It ends without a word: that is a kill.
        Err(AskError::Unanswered(error)) => {
            tracing::warn!(pid, %error, "the old server says nothing");
        }
    }
    if process::has_ended_within(&process, END) {
        return Ok(locks);
    }
    Err(failed(format!(
        "{about} has released its devices but does not exit; after it has, run `ringdisk ublk recover`"
    )))
}
