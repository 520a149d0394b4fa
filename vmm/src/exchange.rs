//! Requests to a control socket, answered alike by `ringdisk run`, `vhost-user` and `ublk`.
//!
//! ```text
//!  control socket ──Request──▶ answer() ──┬─▶ ServedDisk   what every frontend can do with one disk
//!                                         └─▶ Desk         what differs: finding disks, notifying their users, stopping
//! ```
//!
//! Each command implements [`Desk`]. A request that a command cannot carry out is refused with one line that says which
//! command can. Invariant: [`answer`] holds no lock of a server while the engine works on a disk, so that other requests are
//! answered meanwhile.

mod compaction;
mod served_disk;

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use block::throttle::RateLimits;
use qcow::BitmapChange;
use serde_json::{Value, json};

use crate::control::{DiskKeys, DiskStatistics, Request, Server, Statistics};
use crate::disk_config::rate;
pub(crate) use served_disk::ServedDisk;

/// The version of the protocol, which `info` tells. It becomes higher when a request or an answer changes its meaning; new
/// requests and fields leave it.
pub(crate) const PROTOCOL: u32 = 1;

/// A command that serves disks and has a control socket.
pub(crate) trait Desk: Send + Sync + 'static {
    /// The server in words, as the subject of a sentence.
    const SERVER: &'static str;

    /// Returns the fields of `info`, without the protocol version.
    ///
    /// # Errors
    ///
    /// The reason as a sentence, as for every method here.
    fn info(&self) -> Result<Value, String>;

    /// Returns all disks in their order: what requests call each, where it is attached, and the disk.
    fn disks(&self) -> Result<Vec<Listed>, String>;

    /// Returns the disk that requests call `id`.
    fn disk(&self, id: &str) -> Result<Arc<ServedDisk>, String>;

    /// Changes the size of a disk, and notifies its user.
    fn resize(&self, id: &str, size: u64, force: bool) -> Result<Value, String>;

    /// Ends the server in order, as SIGTERM does. Called when the request has been answered; does not wait for the end.
    fn stop(&self);

    /// Hands disks over, as [`Server::hand_over`](crate::control::Server::hand_over) does.
    fn hand_over(&self, _: &UnixStream, request: Request) -> Result<(), String> {
        Err(refusal(Self::SERVER, &request))
    }

    /// Carries out a request that not every command has.
    fn special(&self, request: Request) -> Result<Value, String> {
        Err(refusal(Self::SERVER, &request))
    }
}

/// A disk, as a list shows it.
pub(crate) struct Listed {
    /// Its name in requests.
    pub(crate) id: String,
    /// Its PCI address, socket or block device.
    pub(crate) place: String,
    /// The name of the I/O driver.
    pub(crate) io: String,
    pub(crate) disk: Arc<ServedDisk>,
}

/// Carries out a request. Returns the fields of the answer.
///
/// # Errors
///
/// The reason as one line.
pub(crate) fn answer<D: Desk>(desk: &D, request: Request) -> Result<Value, String> {
    match request {
        Request::Info {} => {
            let mut info = desk.info()?;
            info["protocol"] = PROTOCOL.into();
            Ok(info)
        }
        Request::DiskList {} => Ok(list(&desk.disks()?)),
        Request::Stats { id } => statistics(desk, id.as_deref()),
        Request::Flush { id } => desk.disk(&id)?.flush(),
        Request::DiskResize { id, size, force } => {
            let answer = desk.resize(&id, size, force)?;
            tracing::info!(
                event = "resized",
                disk = id,
                size = answer["size"].as_u64(),
                "a disk has another size"
            );
            Ok(answer)
        }
        Request::DiskLimits { id, limits } => {
            let limits = parsed(limits.as_ref())?;
            let answer = desk.disk(&id)?.limits(limits.as_ref())?;
            if limits.is_some() {
                tell_limits(&id, &answer["limits"]);
            }
            Ok(answer)
        }
        Request::GroupLimits { group, limits } => {
            limits_of_group(&desk.disks()?, &group, parsed(limits.as_ref())?.as_ref())
        }
        Request::SnapshotCreate { id, name } => desk.disk(&id)?.create_snapshot(&name),
        Request::SnapshotList { id } => desk.disk(&id)?.list_snapshots(),
        Request::SnapshotApply { id, snapshot, force } => desk.disk(&id)?.apply_snapshot(&snapshot, force),
        Request::SnapshotDelete { id, snapshot } => desk.disk(&id)?.delete_snapshot(&snapshot),
        Request::BitmapList { id } => desk.disk(&id)?.list_bitmaps(),
        Request::BitmapAdd {
            id,
            name,
            granularity,
            disabled,
        } => {
            let enabled = !disabled;
            let add = BitmapChange::Add { granularity, enabled };
            desk.disk(&id)?.change_bitmap(&name, &add)
        }
        Request::BitmapRemove { id, name } => desk.disk(&id)?.change_bitmap(&name, &BitmapChange::Remove),
        Request::BitmapClear { id, name } => desk.disk(&id)?.change_bitmap(&name, &BitmapChange::Clear),
        Request::BitmapEnable { id, name } => desk.disk(&id)?.change_bitmap(&name, &BitmapChange::Enable),
        Request::BitmapDisable { id, name } => desk.disk(&id)?.change_bitmap(&name, &BitmapChange::Disable),
        Request::BitmapMerge { id, name, source } => desk
            .disk(&id)?
            .change_bitmap(&name, &BitmapChange::Merge { source }),
        Request::Compact { id, rate } => ServedDisk::compact(&desk.disk(&id)?, rate),
        Request::CompactStatus { id } => desk.disk(&id)?.compact_status(),
        Request::CompactStop { id } => desk.disk(&id)?.compact_stop(),
        Request::Stop {} => Ok(json!({"state": "stopping"})),
        other => desk.special(other),
    }
}

/// Reads the limits of a request that has some.
fn parsed(limits: Option<&DiskKeys>) -> Result<Option<RateLimits>, String> {
    let limits = limits.map(DiskKeys::limits).transpose();
    limits.map_err(|error| error.to_string())
}

/// Tells those who follow the log that a disk has other limits.
fn tell_limits(id: &str, limits: &Value) {
    tracing::info!(
        event = "limits-changed",
        disk = id,
        limits = limits.to_string(),
        "a disk has other rate limits"
    );
}

/// Sets the limits of the group to which some of the disks belong, if `limits` says which. Answers those that it has then, and
/// the disks.
fn limits_of_group(disks: &[Listed], group: &str, limits: Option<&RateLimits>) -> Result<Value, String> {
    let of_disk = |listed: &Listed| Some((listed.id.clone(), listed.disk.limits_of_group(group, limits)?));
    let (members, now): (Vec<String>, Vec<RateLimits>) = disks.iter().filter_map(of_disk).unzip();
    let Some(now) = now.first().map(rate::to_json) else {
        let groups: BTreeSet<String> = disks.iter().filter_map(|listed| listed.disk.group()).collect();
        let groups: Vec<String> = groups.into_iter().collect();
        let known = match groups.is_empty() {
            true => "no disk is in one".to_owned(),
            false => format!("the groups with disks are: {}", groups.join(", ")),
        };
        return Err(format!("no disk is in the rate limit group {group}; {known}"));
    };
    if limits.is_some() {
        members.iter().for_each(|id| tell_limits(id, &now));
    }
    Ok(json!({ "group": group, "limits": now, "disks": members }))
}

/// Returns the server of a control socket whose requests `desk` answers.
pub(crate) fn server<D: Desk>(desk: &Arc<D>) -> Server {
    let (asked, stopped, left) = (Arc::clone(desk), Arc::clone(desk), Arc::clone(desk));
    Server {
        stop: Arc::new(move || stopped.stop()),
        hand_over: Arc::new(move |connection, request| left.hand_over(connection, request)),
        ..Server::new(Arc::new(move |request| answer(&*asked, request)))
    }
}

/// Returns disks as answers list them.
pub(crate) fn list(disks: &[Listed]) -> Value {
    let disks = disks.iter().map(|listed| {
        let mut shown = listed.disk.describe();
        shown["id"] = listed.id.as_str().into();
        shown["place"] = listed.place.as_str().into();
        shown["io"] = listed.io.as_str().into();
        shown
    });
    json!({ "disks": disks.collect::<Vec<_>>() })
}

/// Returns the statistics of the disk `id`, or of all that this process serves.
fn statistics<D: Desk>(desk: &D, id: Option<&str>) -> Result<Value, String> {
    let disks = match id {
        Some(id) => vec![(id.to_owned(), desk.disk(id)?)],
        None => desk
            .disks()?
            .into_iter()
            .map(|listed| (listed.id, listed.disk))
            .collect(),
    };
    let counted = disks.into_iter().filter_map(|(id, disk)| {
        let engine = disk.engine_counts();
        let disk = disk.statistics()?;
        Some(DiskStatistics { id, disk, engine })
    });
    let statistics = Statistics {
        disks: counted.collect(),
    };
    if statistics.disks.is_empty()
        && let Some(id) = id
    {
        return Err(format!(
            "disk {id} is served by another program (vhost_user=on), which has its statistics"
        ));
    }
    serde_json::to_value(statistics).map_err(|error| error.to_string())
}

/// Returns the line that refuses a request which `server` cannot carry out, and names who can.
pub(crate) fn refusal(server: &str, request: &Request) -> String {
    let why = match request {
        Request::Pause {} | Request::Resume {} => "it has no guest; only `ringdisk run` pauses one",
        Request::PowerButton {} | Request::Reset {} => "it has no guest; only `ringdisk run` has buttons",
        Request::Reload {} => "only `ringdisk serve` has a configuration file",
        Request::HandOver { .. } => "a machine ends with its process",
        _ => "it does not have this request",
    };
    format!("{server} cannot do `{}`: {why}", request.name())
}
