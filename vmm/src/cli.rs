//! The command line: what there is, and which command gets it.

use std::ffi::OsString;
use std::io::Write;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};

use crate::disk_config::{DiskConfig, keys_help};
use crate::error::{CommandFailure, EXIT_OK};
use crate::{image, io, logging, vhost_user};

/// Fast and safe QCOW2 disks for virtual machines and the host.
#[derive(Debug, Parser)]
#[command(name = "ringdisk", version, about, disable_help_subcommand = true)]
struct Arguments {
    /// Which log messages to show on standard error: a level, or module=level pairs [default: warn]
    ///
    /// The environment variable RINGDISK_LOG does the same.
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve disks to virtual machines of QEMU, Cloud Hypervisor, Firecracker and others
    ///
    /// Each --disk gets the --socket at the same place. One client after another is served on a
    /// socket. SIGTERM, SIGINT and SIGHUP finish what is under way, flush, close the images cleanly
    /// and exit with 0; a second one gives up waiting.
    #[command(after_help = keys_help())]
    VhostUser(VhostUserArguments),
    /// Send requests to a disk from the command line, in the language of qemu-io
    ///
    /// Commands are read from standard input if there is no -c. Exits with 1 if any failed.
    #[command(after_help = keys_help())]
    Io(IoArguments),
    /// Make images and look after them
    #[command(subcommand, disable_help_subcommand = true)]
    Image(image::ImageCommand),
}

#[derive(Args, Debug)]
struct VhostUserArguments {
    /// Where clients connect; once per --disk, in the same order
    #[arg(long, required = true, num_args = 1.., value_name = "PATH")]
    socket: Vec<std::path::PathBuf>,
    /// A disk: path=FILE and other key=value pairs
    #[arg(long, required = true, num_args = 1.., value_name = "KEY=VALUE,...")]
    disk: Vec<String>,
    /// Let guests go on with a new server if this one is killed
    ///
    /// Clients that can reconnect keep track of what is in flight, and a change is answered only when the
    /// mapping that reaches it is in the image. Costs a flush where writes allocate; overwrites and reads
    /// cost nothing.
    #[arg(long)]
    restartable: bool,
    /// Take over from the server that serves exactly these sockets: it closes its images and ends, and its
    /// clients find this one when they connect again
    #[arg(long)]
    takeover: bool,
    /// Whether to give up every right that serving does not take, before the first client is looked at
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = ["on", "off"])]
    sandbox: String,
}

#[derive(Args, Debug)]
struct IoArguments {
    /// The disk: path=FILE and other key=value pairs
    #[arg(long, required = true, value_name = "KEY=VALUE,...")]
    disk: String,
    /// How many queues to spread aio_read and aio_write over [default: the disk's num_queues]
    #[arg(long, value_name = "N")]
    queues: Option<u16>,
    /// A command; can be repeated. `help` lists the commands
    #[arg(short = 'c', value_name = "COMMAND")]
    commands: Vec<String>,
}

/// Runs the program: parses `arguments` (the program's name first), does the work, and returns the
/// exit code. A failure has been told on standard error when this returns.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let result = match Arguments::try_parse_from(arguments) {
        Ok(parsed) => dispatch(parsed),
        Err(error) => explain(&error),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            if let Some(line) = failure.line() {
                // If standard error is gone too, the exit code still tells.
                writeln!(std::io::stderr(), "ringdisk: {line}").unwrap_or_default();
            }
            failure.exit_code()
        }
    }
}

fn dispatch(arguments: Arguments) -> Result<u8, CommandFailure> {
    logging::start(arguments.log.as_deref())?;
    match arguments.command {
        Command::VhostUser(VhostUserArguments {
            socket,
            disk,
            restartable,
            takeover,
            sandbox,
        }) => {
            let disks = disk
                .iter()
                .map(|text| DiskConfig::parse(text))
                .collect::<Result<Vec<_>, _>>()?;
            if socket.len() != disks.len() {
                return Err(CommandFailure::Usage(format!(
                    "{} --socket for {} --disk; each disk needs a socket of its own",
                    socket.len(),
                    disks.len()
                )));
            }
            vhost_user::run(
                socket.into_iter().zip(disks).collect(),
                vhost_user::Options {
                    restartable,
                    takeover,
                    sandbox: sandbox == "on",
                },
            )
        }
        Command::Io(IoArguments {
            disk,
            queues,
            commands,
        }) => io::run(DiskConfig::parse(&disk)?, queues, &commands),
        Command::Image(command) => image::run(command),
    }
}

/// Help and version go out as they are; a mistake becomes one line.
fn explain(error: &clap::Error) -> Result<u8, CommandFailure> {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            std::io::stdout().write_all(text.as_bytes())?;
            Ok(EXIT_OK)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Err(CommandFailure::Usage(
            "a command is missing; see `ringdisk --help`".to_owned(),
        )),
        _ => {
            // What is wrong, and perhaps a tip, come before the usage.
            let told = text.split("Usage:").next().unwrap_or(&text);
            let told = told.split("For more information").next().unwrap_or(told).trim();
            let told = told.strip_prefix("error: ").unwrap_or(told);
            let told: Vec<&str> = told
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty())
                .collect();
            Err(CommandFailure::Usage(format!("{}; see --help", told.join(" "))))
        }
    }
}
