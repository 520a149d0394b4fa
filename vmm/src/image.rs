//! `ringdisk image`: creates, describes, checks, repairs, resizes and compacts images, and has their snapshots, bitmaps and keys.
//!
//! [`qcow::image`] does the work, on plain system calls; this module has the command line, the image locks and
//! the texts. `info`, and `check` without `--repair`, open the image read-only.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::Context;
use block::file::{FileOptions, FileView, ImageFile};
use block::lock::{LockError, LockGranularity, LockMode, LockSet};
use clap::{Args, Subcommand};
use qcow::image as tools;
use qcow::offline::ChangeError;
use serde::Serialize;

use crate::error::{CommandFailure, EXIT_OK};
use crate::saved_devices::claim::refuse_claimed;

mod bitmap;
mod check;
pub(crate) mod compact;
mod create;
pub mod create_options;
mod key;
mod resize;
mod snapshot;
pub mod text;

/// A subcommand of `ringdisk image`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Create an image; an existing file is overwritten
    #[command(after_help = create_options::options_help())]
    Create(CreateArguments),
    /// Show the format, size, features, snapshots and backing file of an image
    Info(InfoArguments),
    /// Check an image for errors and leaked clusters; repair them with --repair
    ///
    /// Exits with 0 if the image is clean, or clean after the repair; with 1 if it could not be checked; with 2 if it is
    /// corrupt; with 3 if it has leaked clusters but no errors.
    Check(CheckArguments),
    /// Make the image file shorter: move clusters from its end into free ones nearer its start
    ///
    /// The disk stays as it is. An interrupted compaction (SIGINT, SIGTERM) ends after the step under way; the next one goes
    /// on. A power cut at any instant leaves the image sound, with at most leaked clusters. Snapshots stay as they are, and
    /// what they use moves as well. Bitmaps do not move, and the file is cut after the last of them.
    Compact(compact::CompactArguments),
    /// Add, list, clear, merge and remove persistent dirty bitmaps of an image
    #[command(subcommand)]
    Bitmap(bitmap::BitmapCommand),
    /// Make the disk in an image larger or smaller
    ///
    /// A new part reads as zeros. A power cut leaves the disk with its old size or its new one, whole, and at most leaked clusters.
    /// Persistent bitmaps are marked as out of date. Internal snapshots keep their sizes.
    Resize(resize::ResizeArguments),
    /// Create, list, apply and delete internal snapshots of an image
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Add, remove and list the secrets that open an encrypted image
    #[command(subcommand)]
    Key(key::KeyCommand),
}

/// The command line of `image create`.
#[derive(Args, Debug)]
pub struct CreateArguments {
    /// Format options; can be repeated
    #[arg(short = 'o', value_name = "OPT=VAL,...")]
    options: Vec<String>,
    /// File with the secret that is to open an encrypted image, or a descriptor such as /dev/fd/3; a newline at its end
    /// counts
    #[arg(long, value_name = "PATH")]
    secret_file: Option<PathBuf>,
    /// Print a description of the new image as JSON, as `info --json` does
    #[arg(long)]
    json: bool,
    /// Image file
    path: PathBuf,
    /// Size of the disk, such as 20G [default: the size of the backing file's disk]
    size: Option<String>,
}

/// The command line of `image info`.
#[derive(Args, Debug)]
pub struct InfoArguments {
    /// Print JSON with the field names of `qemu-img info`
    #[arg(long)]
    json: bool,
    /// Read the image even if another program is writing it; the output may be out of date
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Image file
    path: PathBuf,
}

/// The command line of `image check`.
#[derive(Args, Debug)]
pub struct CheckArguments {
    /// Print JSON with the field names of `qemu-img check`
    #[arg(long)]
    json: bool,
    /// Check the image even if another program is writing it; changes in progress may be reported as errors
    #[arg(short = 'U', long, conflicts_with = "repair")]
    force_share: bool,
    /// Repair leaked clusters only, or all errors that can be repaired from the mapping tables
    ///
    /// An image with damaged mapping tables is not changed: clusters that a damaged entry should refer to would look
    /// leaked, and repair would free them.
    #[arg(short = 'r', long, value_name = "WHAT")]
    repair: Option<check::Repair>,
    /// Image file
    path: PathBuf,
}

/// Runs one image command and returns its exit code.
///
/// # Errors
///
/// A usage failure for options that are invalid together; a failure if the image cannot be opened, locked, read or
/// written. The findings of `check` are not a failure but an exit code.
pub fn run(command: ImageCommand) -> Result<u8, CommandFailure> {
    let mut out = std::io::stdout().lock();
    let code = match command {
        ImageCommand::Create(arguments) => create::run(&arguments, &mut out)?,
        ImageCommand::Info(arguments) => info(&arguments, &mut out)?,
        ImageCommand::Check(arguments) => check::run(&arguments, &mut out)?,
        ImageCommand::Compact(arguments) => compact::run(&arguments, &mut out)?,
        ImageCommand::Bitmap(command) => bitmap::run(&command, &mut out)?,
        ImageCommand::Resize(arguments) => resize::run(&arguments)?,
        ImageCommand::Snapshot(command) => snapshot::run(&command, &mut out)?,
        ImageCommand::Key(command) => key::run(&command, &mut out)?,
    };
    out.flush()?;
    Ok(code)
}

fn info(arguments: &InfoArguments, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    let file = open_to_read(&arguments.path, arguments.force_share).map_err(CommandFailure::Failed)?;
    let found = on_image(&file, &Context::syscalls(), async |view| tools::info(&view).await)?
        .map_err(|error| CommandFailure::about(arguments.path.display(), error))?;
    if arguments.json {
        write_json(out, &found)?;
    } else {
        out.write_all(text::info(&found).as_bytes())?;
    }
    Ok(EXIT_OK)
}

/// Fails if a block device that waits for a server has the image.
fn unclaimed(path: &Path) -> Result<(), CommandFailure> {
    refuse_claimed(path, None).map_err(|error| CommandFailure::Failed(error.into()))
}

/// Returns the failure of a change of an image, which names the image.
fn failure<E: std::error::Error + Send + Sync + 'static>(
    path: &Path,
    error: ChangeError<E>,
) -> CommandFailure {
    match error {
        // It names the path.
        ChangeError::Open(error) => CommandFailure::Failed(error.into()),
        error => CommandFailure::about(path.display(), error),
    }
}

/// Opens an image read-only and, unless `force_share`, locks it against writers.
fn open_to_read(
    path: &Path,
    force_share: bool,
) -> Result<Arc<ImageFile>, Box<dyn std::error::Error + Send + Sync>> {
    let file = ImageFile::open(
        path,
        FileOptions {
            write: false,
            direct: false,
        },
    )?;
    if !force_share {
        lock(&file, LockMode::Read)?;
    }
    Ok(file)
}

/// Opens and locks a file to write an image or its data.
fn open_to_write(path: &Path) -> Result<Arc<ImageFile>, CommandFailure> {
    let options = FileOptions {
        write: true,
        direct: false,
    };
    let file = ImageFile::open(path, options).map_err(|error| CommandFailure::Failed(error.into()))?;
    lock(&file, LockMode::Write).map_err(|error| CommandFailure::Failed(error.into()))?;
    Ok(file)
}

/// Locks an image for a tool.
fn lock(file: &ImageFile, mode: LockMode) -> Result<(), LockError> {
    file.lock(&LockSet::default(), mode, LockGranularity::ByteRange)
}

/// Runs `work` over a view of the file, to its end.
fn on_image<T>(
    file: &Arc<ImageFile>,
    cx: &Context,
    work: impl AsyncFnOnce(FileView) -> T,
) -> Result<T, CommandFailure> {
    let about = |error| CommandFailure::about(file.path().display(), error);
    let view = file.view(cx).map_err(about)?;
    cx.block_on(work(view)).map_err(about)
}

fn write_json(out: &mut dyn Write, value: &impl Serialize) -> Result<(), CommandFailure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| CommandFailure::about("cannot put the answer into JSON", error))?;
    Ok(writeln!(out, "{text}")?)
}
