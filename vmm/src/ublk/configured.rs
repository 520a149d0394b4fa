//! The devices that a server of a configuration file begins with: those that are there already, and those that are missing.
//!
//! ```text
//!  devices that wait, or are another server's ──┐   the same image: served on, as the file says now
//!                                               ├──▶ listed before, and not any more: served on, then removed if nobody uses it
//!  [[device]] of the file ──────────────────────┘   no device: made
//! ```
//!
//! Invariants: a device is served on with its own image only, and its users notice nothing of what else has changed; a device that the
//! file lists is never made twice.

use std::path::Path;

use virtio_devices::ublk::abi::DeviceInfo;
use virtio_devices::ublk::block_path;

use super::file::{DevicesFile, FileDevice};
use super::groups::Groups;
use super::or_recover::{self, Found};
use super::upgrade::{self, Predecessor};
use super::wanted::{self, Wanted};
use super::{command_process, devices};
use crate::disk_config::{DiskConfig, LIMIT_KEYS, OPENING_KEYS};
use crate::error::CommandFailure;
use crate::open;
use crate::saved_devices::state::SavedDevice;
use crate::takeover::TakeoverArguments;

/// Keys besides those of limits and of the opening that a device's users do not notice either, while it has no server.
const UNNOTICED: [&str; 5] = [
    "id",
    "lock_granularity",
    "poll_us",
    "queue_affinity",
    "rate_limit_group",
];

/// Returns what is to be served, and the server that serves some of it now, if it is to be taken over. Nothing is changed.
///
/// # Errors
///
/// A failure that names the line, or the device and its server, which continues.
pub(super) fn begin(
    file: &DevicesFile,
    takeover: &TakeoverArguments,
    groups: &mut Groups,
) -> Result<(Vec<Wanted>, Vec<Predecessor>), CommandFailure> {
    let predecessors = match takeover.is_wanted() {
        true => predecessors(file, takeover.from())?,
        false => Vec::new(),
    };
    let mut present = devices::waiting()?;
    present.extend(predecessors.iter().flat_map(Predecessor::devices));
    let (mut wanted, mut found) = (Vec::new(), Vec::new());
    for id in present {
        let Some(saved) = SavedDevice::load(id) else {
            continue;
        };
        let is_taken = predecessors.iter().any(|server| server.devices().contains(&id));
        match file.devices.iter().find(|device| is_of(&saved, device)) {
            Some(device) => {
                found.push(device.disk.name());
                wanted.push(again(file, device, saved, groups)?);
            }
            None if is_taken || belongs(&saved, file) => {
                wanted.extend(wanted::again(&[id], &[], &file.arguments, groups)?);
            }
            None => {}
        }
    }
    let missing = file.devices.iter();
    for device in missing.filter(|device| !found.contains(&device.disk.name())) {
        wanted.push(new(file, device, groups)?);
    }
    if takeover.is_wanted() {
        for wanted in &wanted {
            open::rehearse(&wanted.disk).map_err(|error| CommandFailure::Failed(error.into()))?;
        }
    }
    Ok((wanted, predecessors))
}

/// The server that has the control socket `from`, or the file's or, without one, devices of the file.
fn predecessors(file: &DevicesFile, from: Option<&Path>) -> Result<Vec<Predecessor>, CommandFailure> {
    if let Some(control) = from.or(file.arguments.control.as_deref()) {
        return Ok(vec![upgrade::find_at(control)?]);
    }
    let is_served = |id: &u32| {
        let saved = SavedDevice::load(*id);
        saved.is_some_and(|saved| file.devices.iter().any(|device| is_of(&saved, device)))
    };
    let waiting = devices::waiting()?;
    let ids: Vec<u32> = devices::all()
        .into_iter()
        .filter(|id| !waiting.contains(id) && is_served(id))
        .collect();
    if ids.is_empty() {
        let message = format!(
            "no server has devices of {}; start one without --takeover, or give the file the `control` of the server",
            file.path.display()
        );
        return Err(CommandFailure::Failed(message.into()));
    }
    upgrade::find(&ids, false)
}

/// True if a device that was saved is that of this one of the file: it has the same image.
fn is_of(saved: &SavedDevice, device: &FileDevice) -> bool {
    or_recover::file(&saved.disk, &saved.directory).as_deref() == Some(device.disk.path.as_path())
}

/// True if the file listed the device, or if the file's server made it for a request.
fn belongs(saved: &SavedDevice, file: &DevicesFile) -> bool {
    let is_added = saved.added_by.is_some() && saved.added_by == file.arguments.control;
    saved.listed_in.as_deref() == Some(file.path.as_path()) || is_added
}

/// A device of the file that is there already.
fn again(
    file: &DevicesFile,
    device: &FileDevice,
    saved: SavedDevice,
    groups: &mut Groups,
) -> Result<Wanted, CommandFailure> {
    let id = saved.id;
    let info = command_process::control()?.info(id);
    let info = info.map_err(|error| CommandFailure::Failed(error.into()))?;
    if let Some(key) = noticed(device, &saved, &info) {
        let (name, path) = (device.disk.name(), block_path(id));
        let problem = format!(
            "`{key}` of disk {name} cannot change, as it has a device already, {path}; expected what it was (--disk {}), or remove the \
             device first with `ringdisk ublk del {id}`",
            saved.disk
        );
        return Err(file.failure(device, Some(key), problem));
    }
    let disk = (device.text.clone(), device.disk.clone());
    let directory = saved.directory.clone();
    let wanted = wanted::one_again(id, Some(saved), disk, directory, &file.arguments, groups)?;
    Ok(Wanted {
        added_by: None,
        listed_in: Some(file.path.clone()),
        ..wanted
    })
}

/// The key of the file by which users of a device would notice that it is served on as the file says.
fn noticed(device: &FileDevice, saved: &SavedDevice, info: &DeviceInfo) -> Option<&'static str> {
    if device.number.is_some_and(|number| number != saved.id) {
        return Some("number");
    }
    // What cannot be parsed any more is of another version.
    let before = DiskConfig::parse(&saved.disk).ok()?;
    let unnoticed = |key: &&str| {
        *key == "path" || LIMIT_KEYS.contains(key) || OPENING_KEYS.contains(key) || UNNOTICED.contains(key)
    };
    let keys = before.differences(&device.disk).into_iter();
    keys.into_iter()
        .find(|key| !unnoticed(key))
        .or_else(|| device.new.difference(info, saved.partitions))
}

/// A device of the file that is made.
fn new(file: &DevicesFile, device: &FileDevice, groups: &mut Groups) -> Result<Wanted, CommandFailure> {
    let found = match device.number {
        Some(number) => or_recover::look(number, &device.text, Path::new("/"))?,
        None => Found::Nothing,
    };
    let half_made = device.number.filter(|_| found == Found::HalfMade);
    let wanted = device.wanted(file, groups)?;
    Ok(Wanted { half_made, ..wanted })
}

impl FileDevice {
    /// The device that is to be made of it.
    ///
    /// # Errors
    ///
    /// A failure that names the disk and its key.
    pub(super) fn wanted(&self, file: &DevicesFile, groups: &mut Groups) -> Result<Wanted, CommandFailure> {
        let mut disk = self.disk.clone();
        let group = groups.join(&mut disk, None)?;
        let disk = (self.text.clone(), disk);
        let mut wanted = self.new.wanted(disk, group, "/".into(), &file.arguments)?;
        wanted.config.id = self.number;
        wanted.listed_in = Some(file.path.clone());
        Ok(wanted)
    }
}
