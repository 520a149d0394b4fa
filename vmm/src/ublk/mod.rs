//! `ringdisk ublk`: disks as local block devices.
//!
//! One process serves any number of devices, until a stop signal or until they are deleted. Invariants: an image is open and
//! locked before its device appears, and the device is gone before the image is closed.

mod additions;
pub mod arguments;
mod bring_up;
mod by_id;
mod command_process;
mod configured;
mod devices;
pub(crate) mod file;
mod groups;
mod hand_over;
mod in_use;
mod io_timeout;
mod or_recover;
mod page_cache;
mod priority;
mod reload;
mod requests;
mod sandbox;
mod serve;
mod served;
mod snapshot;
mod upgrade;
mod wanted;

use arguments::UblkCommand;
pub(crate) use serve::{Start, follow};

use crate::background;
use crate::error::CommandFailure;

/// Carries out one of the commands.
///
/// # Errors
///
/// A failure that names the device or the disk.
pub fn run(command: UblkCommand) -> Result<u8, CommandFailure> {
    if command.serves().is_some_and(|arguments| arguments.detached == 1) {
        return background::pass_on();
    }
    match command {
        UblkCommand::Add(arguments) => serve::add(&arguments),
        UblkCommand::Recover(arguments) => serve::recover(&arguments),
        UblkCommand::Upgrade(arguments) => serve::upgrade(&arguments),
        UblkCommand::List { json } => devices::list(json),
        UblkCommand::Info { device, json } => devices::info(device, json),
        UblkCommand::Features { json } => devices::features(json),
        UblkCommand::SetSize { device, size, force } => devices::set_size(device, &size, force),
        UblkCommand::Snapshot(command) => snapshot::run(command),
        UblkCommand::Udev {
            device,
            owner,
            contents,
        } => {
            if contents {
                by_id::print_contents(device)
            } else {
                by_id::print(device, owner)
            }
        }
        UblkCommand::Commands { sync } => command_process::serve(sync),
        UblkCommand::Del { devices, all, force } => devices::delete(devices, all, force),
    }
}
