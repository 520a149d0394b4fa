//! `ublk add --or-recover`: the same command line creates a device, and recovers it after its server was killed; and with it the devices
//! that were added to that server.
//!
//! Invariants: a device is recovered only with the disk with which it was created, and only if it has no server.

use std::path::{Path, PathBuf};

use virtio_devices::ublk::abi::DeviceState;
use virtio_devices::ublk::{CommandError, block_path};

use super::{command_process, devices};
use crate::disk_config::DiskConfig;
use crate::error::CommandFailure;
use crate::saved_devices::process::is_alive;
use crate::saved_devices::state::SavedDevice;

/// The state of the device with a given number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Found {
    /// Nothing.
    Nothing,
    /// A device that waits for a server of this disk.
    Waits,
    /// A server was killed while it created or deleted the device.
    HalfMade,
}

/// Looks for device `id`, which is to be that of the disk `text` with paths from `directory`.
///
/// # Errors
///
/// If it is served, or waits for another disk; what the driver refuses.
pub(super) fn look(id: u32, text: &str, directory: &Path) -> Result<Found, CommandFailure> {
    let failed = |error: CommandError| CommandFailure::Failed(error.into());
    let mut control = command_process::control()?;
    let info = match control.info(id) {
        Err(error) if error.errno() == Some(libc::ENODEV) => return Ok(Found::Nothing),
        info => info.map_err(failed)?,
    };
    let path = block_path(id);
    let fail = |message: String| Err(CommandFailure::Failed(message.into()));
    if info.state() == DeviceState::Dead {
        return Ok(Found::HalfMade);
    }
    if info.state() == DeviceState::Live && is_alive(&info) {
        return fail(format!("{path} is served by process {}", info.ublksrv_pid));
    }
    match SavedDevice::load(id) {
        Some(state) if is_same(&state, text, directory) => Ok(Found::Waits),
        Some(state) if file(&state.disk, &state.directory) == file(text, directory) => fail(format!(
            "{path} waits for a server of this disk with other keys: it was created with --disk {}. Pass the same keys, or run \
             `ringdisk ublk recover {id} --disk {text}`",
            state.disk
        )),
        Some(state) => fail(format!(
            "{path} waits for a server of another disk ({}): run `ringdisk ublk recover`, or `ringdisk ublk del`",
            state.disk
        )),
        None => fail(format!(
            "{path} waits for a server and has no saved state: run `ringdisk ublk recover --disk`"
        )),
    }
}

/// The devices without a server that `disk-add` made, in a server whose control socket was at `control`.
///
/// # Errors
///
/// The driver's error.
pub(super) fn added_by(control: &Path) -> Result<Vec<u32>, CommandFailure> {
    let is_ours = |state: SavedDevice| state.added_by.as_deref() == Some(control);
    let waiting = devices::waiting()?.into_iter();
    Ok(waiting
        .filter(|&id| SavedDevice::load(id).is_some_and(is_ours))
        .collect())
}

/// Returns true if a device was created with the same text, which means the same file.
fn is_same(state: &SavedDevice, text: &str, directory: &Path) -> bool {
    state.disk == text && file(text, &state.directory) == file(text, directory)
}

/// The path that a disk's text means in a folder.
pub(super) fn file(text: &str, directory: &Path) -> Option<PathBuf> {
    Some(directory.join(DiskConfig::parse(text).ok()?.path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_same_compares_text_and_resolved_file() {
        let state = |disk: &str, directory: &str| SavedDevice {
            id: 1,
            pid: 2,
            disk: disk.to_owned(),
            directory: directory.into(),
            queues_per_worker: 1,
            rate_limit_group: None,
            control: "/run/x".into(),
            added_by: None,
            listed_in: None,
            sequence: None,
            outlives: true,
            partitions: false,
            files: Vec::new(),
        };
        let srv = state("path=a.qcow2,serial=A", "/srv");
        assert!(is_same(&srv, "path=a.qcow2,serial=A", Path::new("/srv")));
        assert!(!is_same(&srv, "path=a.qcow2,serial=A", Path::new("/root")));
        let other = "path=a.qcow2,serial=B";
        assert!(!is_same(&srv, other, Path::new("/srv")));
        assert_eq!(file(other, Path::new("/srv")), file(&srv.disk, &srv.directory));
        assert_ne!(
            file("path=b.qcow2", Path::new("/srv")),
            file(&srv.disk, &srv.directory)
        );
        let absolute = state("path=/srv/a.qcow2", "/srv");
        assert!(is_same(&absolute, "path=/srv/a.qcow2", Path::new("/")));
    }
}
