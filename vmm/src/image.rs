//! `ringdisk image`: makes images and looks after them.
//!
//! The work is done by [`qcow::image`], on plain system calls; here are the command line, the image locks and
//! the words. Looking never writes: `info`, and `check` unless told to repair, open the image read-only.

use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::Context;
use block::file::{FileOptions, FileView, ImageFile};
use block::lock::{ImageLock, LockGranularity, LockMode};
use clap::{Args, Subcommand};
use qcow::image as tools;
use serde::Serialize;

use crate::error::{CommandFailure, EXIT_OK};

mod check;
mod create;
pub mod create_options;
pub mod text;

/// What to do with an image.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Make an image; the previous contents of the file are lost
    #[command(after_help = create_options::options_help())]
    Create(CreateArguments),
    /// Show an image's format, size, features, snapshots and backing file
    Info(InfoArguments),
    /// Look for errors, and repair them with --repair
    ///
    /// Exits with 0 if the image has no errors, or none any more; with 2 if it is corrupt, with 3 if clusters are
    /// leaked and nothing else is wrong, with 1 if it could not be checked.
    Check(CheckArguments),
}

/// The command line of `image create`.
#[derive(Args, Debug)]
pub struct CreateArguments {
    /// Options of the format; can be repeated
    #[arg(short = 'o', value_name = "OPT=VAL,...")]
    options: Vec<String>,
    /// Describe the new image in JSON, as `info --json` does
    #[arg(long)]
    json: bool,
    /// The image
    path: PathBuf,
    /// The size of the disk, such as 20G; that of the backing file's disk if left out
    size: Option<String>,
}

/// The command line of `image info`.
#[derive(Args, Debug)]
pub struct InfoArguments {
    /// Answer in JSON, with the names of `qemu-img info`
    #[arg(long)]
    json: bool,
    /// Look even if the image is being written; the answer may be out of date
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image
    path: PathBuf,
}

/// The command line of `image check`.
#[derive(Args, Debug)]
pub struct CheckArguments {
    /// Answer in JSON, with the names of `qemu-img check`
    #[arg(long)]
    json: bool,
    /// Check even if the image is being written; what is under way then looks like an error
    #[arg(short = 'U', long, conflicts_with = "repair")]
    force_share: bool,
    /// Repair leaked clusters, or everything that follows from the mapping tables
    ///
    /// Nothing is written to an image whose mapping tables are damaged: clusters that a damaged entry should refer to
    /// would look leaked, and be freed.
    #[arg(short = 'r', long, value_name = "WHAT")]
    repair: Option<check::Repair>,
    /// The image
    path: PathBuf,
}

/// Carries out one image command and returns its exit code.
///
/// # Errors
///
/// A usage failure for options that make no image; a failure if the image cannot be opened, locked, read or
/// written. What `check` finds is not a failure but an exit code.
pub fn run(command: ImageCommand) -> Result<u8, CommandFailure> {
    let mut out = std::io::stdout().lock();
    let code = match command {
        ImageCommand::Create(arguments) => create::run(&arguments, &mut out)?,
        ImageCommand::Info(arguments) => info(&arguments, &mut out)?,
        ImageCommand::Check(arguments) => check::run(&arguments, &mut out)?,
    };
    out.flush()?;
    Ok(code)
}

fn info(arguments: &InfoArguments, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    let (file, _lock) =
        open_to_read(&arguments.path, arguments.force_share).map_err(CommandFailure::Failed)?;
    let found = on_image(&file, &Context::syscalls(), async |view| tools::info(&view).await)?
        .map_err(|error| CommandFailure::about(arguments.path.display(), error))?;
    if arguments.json {
        write_json(out, &found)?;
    } else {
        out.write_all(text::info(&found).as_bytes())?;
    }
    Ok(EXIT_OK)
}

/// Opens an image read-only and, unless `force_share`, locks it against writers.
fn open_to_read(
    path: &Path,
    force_share: bool,
) -> Result<(Arc<ImageFile>, Option<ImageLock>), Box<dyn std::error::Error + Send + Sync>> {
    let file = ImageFile::open(
        path,
        FileOptions {
            write: false,
            direct: false,
        },
    )?;
    if force_share {
        return Ok((file, None));
    }
    let lock = ImageLock::acquire(file.as_fd(), path, LockMode::Read, LockGranularity::ByteRange)?;
    Ok((file, Some(lock)))
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
