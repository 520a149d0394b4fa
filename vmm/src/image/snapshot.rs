//! `ringdisk image snapshot`: creates, lists, applies and deletes internal snapshots of an image that is not served.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use block::Context;
use clap::{Args, Subcommand};
use qcow::SnapshotSelector;
use qcow::image as tools;
use qcow::offline::ChangeSnapshotsError;

use super::{InfoArguments, failure, on_image, open_to_read, text, unclaimed, write_json};
use crate::error::{CommandFailure, EXIT_OK};

/// A subcommand of `ringdisk image snapshot`.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Create a snapshot of the disk; print its ID
    ///
    /// A power cut leaves the image with the whole snapshot or without it.
    Create(CreateArguments),
    /// List the snapshots
    List(InfoArguments),
    /// Make the disk what it was when a snapshot was created; what it has now is lost
    ///
    /// The snapshot stays. The disk also gets the snapshot's size. A power cut leaves the disk as it was or as it becomes,
    /// and at most leaked clusters. Persistent bitmaps that record changes are marked as out of date.
    Apply(SelectArguments),
    /// Delete a snapshot
    ///
    /// A power cut leaves the image with the whole snapshot or without it, and at most leaked clusters.
    Delete(SelectArguments),
}

/// The command line of `image snapshot create`.
#[derive(Args, Debug)]
pub struct CreateArguments {
    /// Image file; no program may have it open for writing
    path: PathBuf,
    /// Name of the snapshot, up to 255 bytes; no other may have it
    name: String,
}

/// The command line of `image snapshot apply` and `image snapshot delete`.
#[derive(Args, Debug)]
pub struct SelectArguments {
    /// Image file; no program may have it open for writing
    path: PathBuf,
    /// Snapshot: id=ID, name=NAME, or an ID or a name that means one snapshot only
    #[arg(value_name = "SNAPSHOT")]
    selector: String,
}

/// Runs one snapshot command and returns its exit code.
pub(super) fn run(command: &SnapshotCommand, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    match command {
        SnapshotCommand::Create(arguments) => {
            unclaimed(&arguments.path)?;
            let created = qcow::offline::create_snapshot(&arguments.path, &arguments.name, SystemTime::now());
            writeln!(
                out,
                "{}",
                created.map_err(|error| failure(&arguments.path, error))?
            )?;
        }
        SnapshotCommand::List(arguments) => list(arguments, out)?,
        SnapshotCommand::Apply(arguments) => change(arguments, qcow::offline::apply_snapshot)?,
        SnapshotCommand::Delete(arguments) => change(arguments, qcow::offline::delete_snapshot)?,
    }
    Ok(EXIT_OK)
}

/// Changes something of the selected snapshot's image.
fn change(
    arguments: &SelectArguments,
    change: impl FnOnce(&Path, &SnapshotSelector) -> Result<(), ChangeSnapshotsError>,
) -> Result<(), CommandFailure> {
    unclaimed(&arguments.path)?;
    change(&arguments.path, &SnapshotSelector::parse(&arguments.selector))
        .map_err(|error| failure(&arguments.path, error))
}

fn list(arguments: &InfoArguments, out: &mut dyn Write) -> Result<(), CommandFailure> {
    let file = open_to_read(&arguments.path, arguments.force_share).map_err(CommandFailure::Failed)?;
    let info = on_image(&file, &Context::syscalls(), async |view| tools::info(&view).await)?
        .map_err(|error| CommandFailure::about(arguments.path.display(), error))?;
    if arguments.json {
        return write_json(out, &info.snapshots);
    }
    Ok(out.write_all(text::snapshots(&info.snapshots, info.snapshots_not_listed).as_bytes())?)
}
