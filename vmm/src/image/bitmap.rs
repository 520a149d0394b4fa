//! `ringdisk image bitmap`: adds, lists, clears, enables, disables, merges and removes persistent dirty bitmaps of an image that
//! is not served.

use std::io::Write;
use std::path::{Path, PathBuf};

use block::Context;
use clap::{Args, Subcommand};
use qcow::BitmapChange;
use qcow::image as tools;

use super::{InfoArguments, failure, on_image, open_to_read, text, unclaimed, write_json};
use crate::error::{CommandFailure, EXIT_OK};
use crate::size::parse_bytes;

/// A subcommand of `ringdisk image bitmap`.
///
/// A power cut leaves the bitmaps as they were or as they become, and at most leaked clusters.
#[derive(Debug, Subcommand)]
pub enum BitmapCommand {
    /// Add a bitmap; writers record changes in it unless it is disabled
    Add(AddArguments),
    /// Remove a bitmap, also one that is in use since a crash
    Remove(NameArguments),
    /// Clear all bits of a bitmap
    Clear(NameArguments),
    /// Let writers record changes in a bitmap
    Enable(NameArguments),
    /// Let a bitmap stay as it is
    Disable(NameArguments),
    /// Set in a bitmap all that is set in another one, also of another granularity
    Merge(MergeArguments),
    /// List the bitmaps
    ///
    /// One that is `in-use` may lack changes, since a program that wrote the image crashed or keeps no bitmaps.
    List(InfoArguments),
}

/// The command line of `image bitmap add`.
#[derive(Args, Debug)]
pub struct AddArguments {
    /// Bytes of the disk that one bit covers, a power of two from 512 to 2G [default: the cluster size, within 4K and 64K]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    granularity: Option<u64>,
    /// Do not record changes until `enable`
    #[arg(long)]
    disabled: bool,
    #[command(flatten)]
    which: NameArguments,
}

/// The command line of `image bitmap merge`.
#[derive(Args, Debug)]
pub struct MergeArguments {
    #[command(flatten)]
    which: NameArguments,
    /// Name of the bitmap to take the bits from; it stays as it is
    source: String,
}

/// The image and the bitmap of a command.
#[derive(Args, Debug)]
pub struct NameArguments {
    /// Image file; no program may have it open for writing
    path: PathBuf,
    /// Name of the bitmap, 1 to 1023 bytes
    name: String,
}

/// Runs one bitmap command and returns its exit code.
pub(super) fn run(command: &BitmapCommand, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    let (which, change) = match command {
        BitmapCommand::Add(arguments) => {
            let add = BitmapChange::Add {
                granularity: arguments.granularity,
                enabled: !arguments.disabled,
            };
            (&arguments.which, add)
        }
        BitmapCommand::Remove(which) => (which, BitmapChange::Remove),
        BitmapCommand::Clear(which) => (which, BitmapChange::Clear),
        BitmapCommand::Enable(which) => (which, BitmapChange::Enable),
        BitmapCommand::Disable(which) => (which, BitmapChange::Disable),
        BitmapCommand::Merge(arguments) => {
            let source = arguments.source.clone();
            (&arguments.which, BitmapChange::Merge { source })
        }
        BitmapCommand::List(arguments) => {
            list(arguments, out)?;
            return Ok(EXIT_OK);
        }
    };
    let path: &Path = &which.path;
    unclaimed(path)?;
    qcow::offline::change_bitmap(path, &which.name, &change).map_err(|error| failure(path, error))?;
    Ok(EXIT_OK)
}

fn list(arguments: &InfoArguments, out: &mut dyn Write) -> Result<(), CommandFailure> {
    let file = open_to_read(&arguments.path, arguments.force_share).map_err(CommandFailure::Failed)?;
    let info = on_image(&file, &Context::syscalls(), async |view| tools::info(&view).await)?
        .map_err(|error| CommandFailure::about(arguments.path.display(), error))?;
    let data = &info.format_specific.data;
    if arguments.json {
        return write_json(out, &data.bitmaps);
    }
    Ok(out.write_all(text::bitmaps(&data.bitmaps, data.bitmaps_not_listed).as_bytes())?)
}
