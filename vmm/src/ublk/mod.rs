//! `ringdisk ublk`: disks as local block devices.
//!
//! One process serves any number of devices, until a stop signal or until they are deleted. Invariants: an image is open and
//! locked before its device appears, and the device is gone before the image is closed.

pub mod arguments;
mod bring_up;
pub mod claim;
mod claimed_file;
mod devices;
mod fence;
mod groups;
mod hand_over;
mod helper;
mod links;
mod page_cache;
mod parallel;
mod process;
mod requests;
mod resume;
mod serve;
mod served;
mod sooner;
mod state;
mod upgrade;
mod usage;
mod wanted;

use arguments::UblkCommand;

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
        UblkCommand::SetSize { device, size } => devices::set_size(device, &size),
        UblkCommand::Udev {
            device,
            owner,
            contents,
        } => {
            if contents {
                links::print_contents(device)
            } else {
                links::print(device, owner)
            }
        }
        UblkCommand::Commands { sync } => helper::serve(sync),
        UblkCommand::Del { devices, all, force } => devices::delete(devices, all, force),
    }
}
