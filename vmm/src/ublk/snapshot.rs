//! `ringdisk ublk snapshot`: asks the server of a device to create, list, apply and delete internal snapshots.

use std::io::Write;

use qcow::image::SnapshotList;
use virtio_devices::ublk::block_path;

use super::arguments::UblkSnapshotCommand;
use super::{command_process, devices, in_use};
use crate::control::Request;
use crate::error::{CommandFailure, EXIT_OK};
use crate::image::text;

/// Carries out one of the commands.
///
/// # Errors
///
/// A failure of the driver or the server.
pub(super) fn run(command: UblkSnapshotCommand) -> Result<u8, CommandFailure> {
    let mut output = std::io::stdout();
    match command {
        UblkSnapshotCommand::Create { device, name } => {
            let id = exists(device)?;
            let answer = devices::ask_server(device, &Request::SnapshotCreate { id, name })?;
            writeln!(output, "{}", answer["snapshot"].as_str().unwrap_or_default())?;
        }
        UblkSnapshotCommand::List { device, json } => {
            let id = exists(device)?;
            let answer = devices::ask_server(device, &Request::SnapshotList { id })?;
            if json {
                writeln!(output, "{}", answer["snapshots"])?;
                return Ok(EXIT_OK);
            }
            let list: SnapshotList = serde_json::from_value(answer)
                .map_err(|error| CommandFailure::about("the server's list of snapshots", error))?;
            let text = text::snapshots(&list.snapshots, list.snapshots_not_listed);
            output.write_all(text.as_bytes())?;
        }
        UblkSnapshotCommand::Apply {
            device,
            snapshot,
            force,
        } => {
            let id = exists(device)?;
            if !force {
                unused(device)?;
            }
            let request = Request::SnapshotApply {
                id,
                snapshot,
                force: true,
            };
            devices::ask_server(device, &request)?;
        }
        UblkSnapshotCommand::Delete { device, snapshot } => {
            let id = exists(device)?;
            devices::ask_server(device, &Request::SnapshotDelete { id, snapshot })?;
        }
    }
    Ok(EXIT_OK)
}

/// Fails if there is no such device. Returns its number as requests have it.
fn exists(device: u32) -> Result<String, CommandFailure> {
    let info = command_process::control()?.info(device);
    info.map_err(|error| CommandFailure::Failed(error.into()))?;
    Ok(device.to_string())
}

/// Fails if somebody uses the device: what they have in memory would be written over the snapshot.
fn unused(device: u32) -> Result<(), CommandFailure> {
    let path = block_path(device);
    match in_use::user_of(&path).map_err(|error| CommandFailure::about(&path, error))? {
        None => Ok(()),
        Some(user) => Err(CommandFailure::Failed(
            format!("{path} is in use ({user}), and its users would write what they have in memory over the snapshot; unmount it \
                 first, or pass --force")
                .into(),
        )),
    }
}
