//! `ringdisk image key`: adds, removes and lists the secrets that open an encrypted image that is not served.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::Context;
use clap::{Args, Subcommand};
use qcow::image::{self as tools, KeysError};
use qcow::luks::{ITER_TIME_DEFAULT, Removal};

use super::{InfoArguments, on_image, open_to_read, open_to_write, text, unclaimed, write_json};
use crate::error::{CommandFailure, EXIT_OK};
use crate::secret_file::read_secret;

/// A subcommand of `ringdisk image key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Let a new secret open the image, beside the ones that do; print its key slot
    ///
    /// A power cut leaves the image with the new secret or without it; the others open it in any case.
    Add(AddArguments),
    /// Make a secret open the image no longer; print its key slot
    ///
    /// The last secret stays. The key of the data stays, too: whoever had the secret and a copy of the image can still read
    /// it, and what is written later. A power cut leaves the image with the secret or without it.
    Remove(RemoveArguments),
    /// List the cipher and the key slots in use
    List(InfoArguments),
}

/// The command line of `image key add`.
#[derive(Args, Debug)]
pub struct AddArguments {
    /// File with a secret that opens the image, or a descriptor such as /dev/fd/3; a newline at its end counts
    #[arg(long, value_name = "PATH")]
    secret_file: PathBuf,
    /// File with the new secret
    #[arg(long, value_name = "PATH")]
    new_secret_file: PathBuf,
    /// Key slot, 0 to 7, that is not in use [default: the first]
    #[arg(long, value_name = "N")]
    slot: Option<usize>,
    /// Time that opening the image with the new secret takes on this machine, in milliseconds [default: 2000]
    #[arg(long, value_name = "MS")]
    iter_time: Option<u32>,
    /// Image file; no program may have it open for writing
    path: PathBuf,
}

/// The command line of `image key remove`.
#[derive(Args, Debug)]
pub struct RemoveArguments {
    /// File with the secret to remove; with --slot, with a secret that opens another slot
    #[arg(long, value_name = "PATH")]
    secret_file: PathBuf,
    /// Key slot to remove, 0 to 7, for instance if its secret is lost [default: the slot that the secret opens]
    #[arg(long, value_name = "N")]
    slot: Option<usize>,
    /// Image file; no program may have it open for writing
    path: PathBuf,
}

/// Runs one key command and returns its exit code.
pub(super) fn run(command: &KeyCommand, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    match command {
        KeyCommand::Add(arguments) => {
            let secret = read_secret(&arguments.secret_file)?;
            let new = read_secret(&arguments.new_secret_file)?;
            let time = iter_time(arguments.iter_time);
            let slot = change(&arguments.path, async |view| {
                tools::add_key(&view, &secret, &new, arguments.slot, time).await
            })?;
            writeln!(out, "{slot}")?;
        }
        KeyCommand::Remove(arguments) => {
            let secret = read_secret(&arguments.secret_file)?;
            let removal = match arguments.slot {
                Some(slot) => Removal::Slot(slot, &secret),
                None => Removal::Of(&secret),
            };
            let slot = change(&arguments.path, async |view| {
                tools::remove_key(&view, &removal).await
            })?;
            writeln!(out, "{slot}")?;
        }
        KeyCommand::List(arguments) => list(arguments, out)?,
    }
    Ok(EXIT_OK)
}

/// Returns a time of opening that was given in milliseconds, or the default.
fn iter_time(milliseconds: Option<u32>) -> Duration {
    milliseconds.map_or(ITER_TIME_DEFAULT, |ms| Duration::from_millis(ms.into()))
}

/// Locks the image and changes something of its keys. Returns the key slot.
fn change(
    path: &Path,
    change: impl AsyncFnOnce(block::file::FileView) -> Result<usize, KeysError>,
) -> Result<usize, CommandFailure> {
    unclaimed(path)?;
    let file = open_to_write(path)?;
    on_image(&file, &Context::syscalls(), change)?
        .map_err(|error| CommandFailure::about(path.display(), error))
}

fn list(arguments: &InfoArguments, out: &mut dyn Write) -> Result<(), CommandFailure> {
    let file = open_to_read(&arguments.path, arguments.force_share).map_err(CommandFailure::Failed)?;
    let keys = on_image(&file, &Context::syscalls(), async |view| {
        tools::list_keys(&view).await
    })?
    .map_err(|error| CommandFailure::about(arguments.path.display(), error))?;
    if arguments.json {
        return write_json(out, &keys);
    }
    Ok(out.write_all(text::keys(&keys).as_bytes())?)
}
