//! The old server's part of an upgrade: it hands over all of its devices and exits.
//!
//! Invariants: a request is refused while nothing has changed, or completed, which ends this process. Devices and their
//! rings are left as they are, because only the exit of the process makes the driver release them; the images stay locked
//! until then.

use std::path::Path;

use serde_json::{Value, json};
use virtio_devices::ublk::{Control, HandOverError, Recovery, UblkDevice, block_path};

use crate::error::{EXIT_OK, chain};

/// The version of the hand-over protocol.
pub(super) const VERSION: u32 = 1;

/// Returns the numbers of devices.
fn ids(devices: &[&UblkDevice]) -> Vec<u32> {
    devices.iter().map(|device| device.id()).collect()
}

/// Refuses a hand-over that cannot be done.
///
/// # Errors
///
/// The reason.
pub(super) fn check(devices: &[&UblkDevice], version: u32, asked: &[u32]) -> Result<(), String> {
    if version != VERSION {
        return Err(format!("it supports hand-over version {VERSION}, not {version}"));
    }
    let ids = ids(devices);
    if ids != asked {
        return Err(format!("it serves {}", names(&ids)));
    }
    for device in devices {
        if let Some(why) = Recovery::obstacle(device.info().flags()) {
            return Err(format!("{} {why}", block_path(device.id())));
        }
    }
    Ok(())
}

/// Leaves all devices: nothing more reaches their images when this returns, which are closed. The process must end then.
///
/// # Errors
///
/// The reason; nothing has changed.
pub(super) fn leave(control: &mut Control, devices: &[&UblkDevice]) -> Result<Value, String> {
    let ids = ids(devices);
    tracing::info!(event = "handing-over", ?ids, "handing over");
    let mut failures = Vec::new();
    let mut note = |error: HandOverError| {
        let message = chain(&error);
        tracing::error!(error = %message, "not handed over cleanly");
        failures.push(message);
    };
    for (index, device) in devices.iter().enumerate() {
        match device.retire(control) {
            Err(error) if index == 0 => return Err(chain(&error)),
            // There is no way back for those before it. This one goes as if this process were killed.
            Err(error) => note(error),
            Ok(()) => {}
        }
    }
    for device in devices {
        if let Err(error) = device.drain_and_close() {
            note(error);
        }
    }
    Ok(json!({ "devices": ids, "failures": failures }))
}

/// Devices, for people.
pub(super) fn names(ids: &[u32]) -> String {
    let paths: Vec<String> = ids.iter().map(|&id| block_path(id)).collect();
    paths.join(" and ")
}

/// Ends the process, which has left its devices.
pub(super) fn end(socket: &Path) {
    // It would go with the server, which is not taken down.
    std::fs::remove_file(socket).unwrap_or_default();
    tracing::info!(event = "handed-over", "handed over");
    std::process::exit(EXIT_OK.into());
}
