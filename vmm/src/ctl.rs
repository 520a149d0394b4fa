//! `ringdisk ctl`: its command line, the request that carries it out, and what is printed.

use std::io::Write;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};

use crate::control::{self, DiskKeys, LogLevel, Request, Statistics};
use crate::disk_config::machine_keys_help;
use crate::error::{CommandFailure, EXIT_OK};
use crate::{image, size};

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The `--control` socket of the machine or server
    #[arg(long, value_name = "SOCKET")]
    socket: std::path::PathBuf,
    /// Print the answer as JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the state and disks of a machine or server
    Info,
    /// List the disks, also with their compactions
    DiskList,
    /// Show rates, errors and latencies of one disk or of all, by kind of request, for a second
    ///
    /// With --json it prints what the queues have counted since the process began.
    Stats {
        /// The disk's id or, without one, its path; a block device's number [default: all]
        id: Option<String>,
        /// Print a table for each interval of so many seconds, until the machine or server ends
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
        watch: Option<u64>,
    },
    /// Make all writes of a disk that were answered durable
    Flush {
        /// The disk's id or, without one, its path; a block device's number
        id: String,
    },
    /// Print what happens from now on: disks that grow, clients that come and go, errors of the host, and others
    ///
    /// One line for each event, with the seconds since it began to watch, until the machine or server ends. With --json as it is sent.
    Events,
    /// Print the log from now on, whatever --log says
    Log {
        /// The least grave messages to print
        #[arg(long, value_enum, default_value_t)]
        level: LogLevel,
    },
    /// End the machine or server in order, as SIGTERM does
    Stop,
    /// Make the file of a disk's image shorter, in the background, while the disk is used
    ///
    /// Requests to the disk go on. A compaction may be stopped at any time; the next one continues.
    Compact {
        /// The disk's id or, without one, its path; a block device's number
        id: String,
        /// Most bytes to move in a second, such as 50M [default: no limit]
        #[arg(long, value_name = "SIZE", value_parser = image::compact::parse_rate)]
        rate: Option<u64>,
    },
    /// Show the progress or the result of the compaction of a disk's image
    CompactStatus {
        /// The disk's id or, without one, its path; a block device's number
        id: String,
    },
    /// Stop the compaction of a disk's image; what has moved stays moved
    CompactStop {
        /// The disk's id or, without one, its path; a block device's number
        id: String,
    },
    /// Pause the guest and flush; the images can be copied until `resume`
    Pause,
    /// Resume the guest
    Resume,
    /// Press the power button: ask the guest to shut down
    PowerButton,
    /// Restart the guest at once, as a reset button does; writes that it has not flushed may be lost
    ///
    /// With --no-reboot the machine ends.
    Reset,
    /// Make a disk larger, or smaller with --force
    DiskResize {
        /// The disk's id or, without one, its path
        id: String,
        /// New size, such as 20G
        size: String,
        /// Let the disk become smaller; what lies past its new end is lost, and the guest gets I/O errors there
        #[arg(long)]
        force: bool,
    },
    /// Set the rate limits of a disk while it is used, or print those that it has
    DiskLimits {
        /// The disk's id or, without one, its path
        id: String,
        /// All limits that it has from then on: the keys bw_... and ops_... of --disk, as in ops_size=500,ops_refill_time=1000; or
        /// none
        #[arg(value_name = "KEY=VALUE,...|none")]
        limits: Option<String>,
    },
    /// Set the rate limits that the disks of a group share while they are used, or print them
    GroupLimits {
        /// The id of the group's --rate-limit-group
        group: String,
        /// All limits that it has from then on, as of disk-limits
        #[arg(value_name = "KEY=VALUE,...|none")]
        limits: Option<String>,
    },
    /// Add a disk to a machine, or to a server
    ///
    /// A server adds those whose images, and sockets, are in the folders of its --images. One of block devices makes a device of the
    /// disk, and prints its number and path.
    #[command(after_help = machine_keys_help())]
    DiskAdd {
        /// Disk: path=FILE and other key=value pairs; a relative path starts at the working directory of the machine or server
        #[arg(long, value_name = "KEY=VALUE,...")]
        disk: String,
        /// Socket to create for the disk's clients, of a vhost-user server
        #[arg(long, value_name = "SOCKET")]
        listen: Option<std::path::PathBuf>,
    },
    /// Remove a disk: ask the guest to release it, disconnect its client, or delete its block device, then close its image
    ///
    /// A block device that is in use stays; see `ringdisk ublk del --force`.
    DiskRemove {
        /// The disk's id or, without one, its path; a block device's number
        id: String,
    },
    /// Have a server read its configuration file again (`ringdisk serve`): add, remove and change disks
    ///
    /// As SIGHUP does, and prints what came of it. A file with a wrong line changes nothing.
    Reload,
    /// Create an internal snapshot of a disk, while the guest uses it
    ///
    /// The snapshot has every write that was answered before, durably. The guest's requests to this disk wait for moments
    /// meanwhile. For snapshots of several disks of one moment, pause the guest first.
    SnapshotCreate {
        /// The disk's id or, without one, its path
        id: String,
        /// Name of the snapshot, up to 255 bytes; no other may have it
        name: String,
    },
    /// List the internal snapshots of a disk
    SnapshotList {
        /// The disk's id or, without one, its path
        id: String,
    },
    /// Make a disk what it was when a snapshot was created; what it has now is lost
    ///
    /// Only with --force: a guest, paused or not, that has the disk mounted would write what it has in memory over it.
    /// Remove a disk in use instead, apply the snapshot with `ringdisk image snapshot apply`, and add the disk again.
    SnapshotApply {
        /// The disk's id or, without one, its path
        id: String,
        /// Snapshot: id=ID, name=NAME, or an ID or a name that means one snapshot only
        snapshot: String,
        /// Apply it: the guest has not mounted or opened the disk
        #[arg(long)]
        force: bool,
    },
    /// Delete an internal snapshot of a disk, while the guest uses the disk
    SnapshotDelete {
        /// The disk's id or, without one, its path
        id: String,
        /// Snapshot: id=ID, name=NAME, or an ID or a name that means one snapshot only
        snapshot: String,
    },
    /// List, add, remove, clear, enable, disable or merge persistent dirty bitmaps of a disk, while the guest uses it
    #[command(subcommand)]
    Bitmap(BitmapCommand),
}

/// A subcommand of `ringdisk ctl bitmap`. Requests to the disk wait while a bitmap changes.
#[derive(Debug, Subcommand)]
enum BitmapCommand {
    /// List the bitmaps; one that records changes is `in-use` meanwhile, unless the disk has bitmaps=durable
    List {
        /// The disk's id or, without one, its path; a block device's number
        id: String,
    },
    /// Add a bitmap, which records changes unless it is disabled
    Add {
        /// Bytes of the disk that one bit covers, a power of two from 512 to 2G [default: the cluster size, within 4K and 64K]
        #[arg(long, value_name = "SIZE", value_parser = size::parse_bytes)]
        granularity: Option<u64>,
        /// Do not record changes until `enable`
        #[arg(long)]
        disabled: bool,
        #[command(flatten)]
        which: BitmapName,
    },
    /// Remove a bitmap
    Remove(BitmapName),
    /// Clear all bits of a bitmap
    Clear(BitmapName),
    /// Let a bitmap record changes
    Enable(BitmapName),
    /// Let a bitmap stay as it is
    Disable(BitmapName),
    /// Set in a bitmap all that is set in another one, also of another granularity
    Merge {
        #[command(flatten)]
        which: BitmapName,
        /// Name of the bitmap to take the bits from; it stays as it is
        source: String,
    },
}

/// The bitmap of a command.
#[derive(Args, Debug)]
struct BitmapName {
    /// The disk's id or, without one, its path; a block device's number
    id: String,
    /// Name of the bitmap, 1 to 1023 bytes
    name: String,
}

/// Returns the request that carries a command on bitmaps out.
fn bitmap_request(command: BitmapCommand) -> Request {
    match command {
        BitmapCommand::List { id } => Request::BitmapList { id },
        BitmapCommand::Add {
            granularity,
            disabled,
            which: BitmapName { id, name },
        } => Request::BitmapAdd {
            id,
            name,
            granularity,
            disabled,
        },
        BitmapCommand::Remove(BitmapName { id, name }) => Request::BitmapRemove { id, name },
        BitmapCommand::Clear(BitmapName { id, name }) => Request::BitmapClear { id, name },
        BitmapCommand::Enable(BitmapName { id, name }) => Request::BitmapEnable { id, name },
        BitmapCommand::Disable(BitmapName { id, name }) => Request::BitmapDisable { id, name },
        BitmapCommand::Merge {
            which: BitmapName { id, name },
            source,
        } => Request::BitmapMerge { id, name, source },
    }
}

/// Sends the request, and prints its answer.
///
/// # Errors
///
/// If nobody answers, or the request is refused.
pub(crate) fn run(arguments: Arguments) -> Result<u8, CommandFailure> {
    let Arguments {
        socket,
        json,
        command,
    } = arguments;
    let watch = match &command {
        Command::Stats { watch, .. } if !json || watch.is_some() => Some(*watch),
        _ => None,
    };
    let first = match &command {
        Command::Events => Some("event"),
        Command::Log { .. } => Some("message"),
        _ => None,
    };
    let request = request(command)?;
    if let Some(first) = first {
        follow(&socket, &request, first, json)?;
        return Ok(EXIT_OK);
    }
    if let Some(watch) = watch {
        return show_rates(&socket, &request, watch, json);
    }
    let answer = control::ask(&socket, &request)?;
    match json {
        true => writeln!(std::io::stdout(), "{answer}")?,
        false => std::io::stdout().write_all(control::table(&answer).as_bytes())?,
    }
    Ok(EXIT_OK)
}

/// Checks the command line.
///
/// # Errors
///
/// A usage failure.
pub(crate) fn check(arguments: Arguments) -> Result<(), CommandFailure> {
    request(arguments.command).map(drop)
}

/// Prints each line that a request is answered with: as it is, with `json`; else with the field `first` first.
fn follow(
    socket: &std::path::Path,
    request: &Request,
    first: &str,
    json: bool,
) -> Result<(), CommandFailure> {
    let began = Instant::now();
    control::follow(socket, request, |line| {
        let mut output = std::io::stdout();
        match json {
            true => writeln!(output, "{line}")?,
            false => {
                let seconds = began.elapsed().as_secs_f64();
                writeln!(output, "{seconds:10.3} {}", control::line(&line, first))?;
            }
        }
        Ok(output.flush()?)
    })
}

/// Prints what was answered in a second, or in each interval of `watch` seconds until nobody answers any more; as counted, with `json`.
fn show_rates(
    socket: &std::path::Path,
    request: &Request,
    watch: Option<u64>,
    json: bool,
) -> Result<u8, CommandFailure> {
    let ask = || -> Result<(Statistics, serde_json::Value, Instant), CommandFailure> {
        let answer = control::ask(socket, request)?;
        let statistics = serde_json::from_value(answer.clone()).map_err(|error| {
            CommandFailure::about(
                "the statistics cannot be read; is the server of another version?",
                error,
            )
        })?;
        Ok((statistics, answer, Instant::now()))
    };
    let interval = Duration::from_secs(watch.unwrap_or(1));
    let (mut before, _, mut since) = ask()?;
    loop {
        std::thread::sleep(interval);
        let (now, answer, at) = match ask() {
            Ok(asked) => asked,
            // It has ended.
            Err(_) if watch.is_some() => return Ok(EXIT_OK),
            Err(failure) => return Err(failure),
        };
        let mut output = std::io::stdout();
        match json {
            true => writeln!(output, "{answer}")?,
            false => output.write_all(now.table_since(&before, at - since).as_bytes())?,
        }
        if watch.is_none() {
            return Ok(EXIT_OK);
        }
        if !json {
            writeln!(output)?;
        }
        output.flush()?;
        (before, since) = (now, at);
    }
}

/// Returns the request that carries a command out.
fn request(command: Command) -> Result<Request, CommandFailure> {
    Ok(match command {
        Command::Info => Request::Info {},
        Command::DiskList => Request::DiskList {},
        Command::Stats { id, .. } => Request::Stats { id },
        Command::Flush { id } => Request::Flush { id },
        Command::Events => Request::Events {},
        Command::Log { level } => Request::Log { level },
        Command::Stop => Request::Stop {},
        Command::Compact { id, rate } => Request::Compact { id, rate },
        Command::CompactStatus { id } => Request::CompactStatus { id },
        Command::CompactStop { id } => Request::CompactStop { id },
        Command::Pause => Request::Pause {},
        Command::PowerButton => Request::PowerButton {},
        Command::Reset => Request::Reset {},
        Command::Resume => Request::Resume {},
        Command::DiskResize { id, size, force } => {
            let bytes = size::parse_bytes(&size);
            let size = bytes.map_err(|error| CommandFailure::Usage(error.to_string()))?;
            Request::DiskResize { id, size, force }
        }
        Command::DiskLimits { id, limits } => Request::DiskLimits {
            id,
            limits: limits.as_deref().map(DiskKeys::parse_limits).transpose()?,
        },
        Command::GroupLimits { group, limits } => Request::GroupLimits {
            group,
            limits: limits.as_deref().map(DiskKeys::parse_limits).transpose()?,
        },
        Command::DiskAdd { disk, listen } => Request::DiskAdd {
            disk: DiskKeys::parse(&disk)?,
            socket: listen,
        },
        Command::DiskRemove { id } => Request::DiskRemove { id },
        Command::Reload => Request::Reload {},
        Command::SnapshotCreate { id, name } => Request::SnapshotCreate { id, name },
        Command::SnapshotList { id } => Request::SnapshotList { id },
        Command::SnapshotApply { id, snapshot, force } => Request::SnapshotApply { id, snapshot, force },
        Command::SnapshotDelete { id, snapshot } => Request::SnapshotDelete { id, snapshot },
        Command::Bitmap(command) => bitmap_request(command),
    })
}
