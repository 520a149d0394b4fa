//! The command line: its commands and options, and the dispatch to each command.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::disk_config::{DiskConfig, RateLimitGroups, keys_help, machine_keys_help};
use crate::error::{CommandFailure, EXIT_OK};
use crate::machine::{ConsoleConfig, MachineConfig, MemoryConfig, Payload};
use crate::net_config::NetConfig;
use crate::serve::ServeArguments;
use crate::ublk::arguments::UblkCommand;
use crate::vhost_user::arguments::VhostUserArguments;
use crate::{ctl, disks, image, io, limits, logging, metrics, run as machine_run, size, socket, ublk};

/// Fast and safe QCOW2 disks for virtual machines and the host.
#[derive(Debug, Parser)]
#[command(
    name = "ringdisk",
    version,
    propagate_version = true,
    about,
    disable_help_subcommand = true
)]
struct Arguments {
    /// Log messages to show on standard error: a level (error, warn, info, debug, trace, off), or module=level pairs
    /// [default: warn]
    ///
    /// The environment variable RINGDISK_LOG has the same effect.
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve disks to virtual machines of QEMU, Cloud Hypervisor, Firecracker and others (vhost-user-blk)
    ///
    /// The first --disk is served on the first --socket, the second on the second, and so on. A socket serves one client
    /// at a time. SIGTERM, SIGINT and SIGHUP drain the requests in flight, flush, close the images cleanly and exit
    /// with 0; a second signal does not wait for requests in flight.
    #[command(after_help = keys_help())]
    VhostUser(VhostUserArguments),
    /// Serve disks to virtual machines, or block devices to this host, as a configuration file says, and follow its changes
    ///
    /// The file (TOML) has the options of `ringdisk vhost-user` and its disks, or those of `ringdisk ublk` and its devices. SIGHUP has it
    /// read again: disks are added, removed and changed while the others are served. SIGTERM and SIGINT end the server as they end those.
    #[command(after_help = keys_help())]
    Serve(ServeArguments),
    /// Run a virtual machine on KVM with disks served in the same process
    ///
    /// On a terminal every key goes to the guest; press ^A x to end the machine. The guest's power-off, SIGTERM, SIGINT,
    /// SIGHUP and ^A x drain the requests in flight, flush, close the images cleanly and exit with 0; a second
    /// signal does not wait for requests in flight. When the guest restarts, so does the machine.
    #[command(after_help = machine_keys_help())]
    Run(RunArguments),
    /// Query or change a running machine or server through its control socket (--control)
    Ctl(ctl::Arguments),
    /// Expose disks as local block devices (ublk) and manage them
    #[command(subcommand, disable_help_subcommand = true)]
    Ublk(UblkCommand),
    /// Send requests to a disk from the command line, in the language of qemu-io
    ///
    /// Without -c, commands are read from standard input. Exits with 1 if any command failed.
    #[command(after_help = keys_help())]
    Io(IoArguments),
    /// Create, describe, check and repair images
    #[command(subcommand, disable_help_subcommand = true)]
    Image(image::ImageCommand),
}

#[derive(Args, Debug)]
struct RunArguments {
    /// Kernel: a bzImage, or an ELF file with a PVH note
    #[arg(long, value_name = "FILE", required_unless_present = "firmware")]
    kernel: Option<std::path::PathBuf>,
    /// Firmware that boots from the disks, instead of a kernel: an ELF file with a PVH note, such as EDK II's CLOUDHV.fd
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kernel", "initramfs", "cmdline"])]
    firmware: Option<std::path::PathBuf>,
    /// Initial RAM file system
    #[arg(long, value_name = "FILE")]
    initramfs: Option<std::path::PathBuf>,
    /// Command line of the kernel
    #[arg(long, value_name = "TEXT", default_value = "console=ttyS0")]
    cmdline: String,
    /// Number of CPUs, 1 to 32
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u16,
    /// End the machine when the guest restarts, instead of starting it again
    #[arg(long)]
    no_reboot: bool,
    /// Memory: SIZE, or size=SIZE with hugepages=on|off, hugepage_size=SIZE and host_numa_node=N
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    memory: String,
    /// Disk: path=FILE and other key=value pairs; can be repeated
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    disk: Vec<String>,
    /// Network interface: tap=NAME or fd=NUMBER, and mac=ADDRESS and queue_size=N; can be repeated
    ///
    /// What the guest sends comes out of the host's tap interface, and back; the host's kernel does that (vhost-net).
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    net: Vec<String>,
    /// Tell cloud-init in the guest what to do, by a further disk (NoCloud): a file with user data, or a folder with user-data, meta-data
    /// and network-config
    #[arg(long, value_name = "PATH")]
    cloud_init: Option<std::path::PathBuf>,
    /// Give the guest random bytes of the host (virtio-rng)
    #[arg(long)]
    rng: bool,
    /// Rate limits that several disks share: id=NAME with the bw_... and ops_... keys of --disk. A disk joins with
    /// rate_limit_group=NAME
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    rate_limit_group: Vec<String>,
    /// Serial console: tty, off, file=PATH or socket=PATH
    #[arg(long, value_name = "PLACE", default_value = "tty")]
    serial: String,
    /// Control socket to create, for `ringdisk ctl`
    #[arg(long, value_name = "SOCKET")]
    control: Option<std::path::PathBuf>,
    /// Serve statistics for Prometheus at this address: unix:PATH, or 127.0.0.1:PORT
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<metrics::Address>,
    /// Drop every privilege that the CPU and queue threads do not need, before the guest runs
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = ["on", "off"])]
    sandbox: String,
}

#[derive(Args, Debug)]
struct IoArguments {
    /// Disk: path=FILE and other key=value pairs
    #[arg(long, required = true, value_name = "KEY=VALUE,...")]
    disk: String,
    /// Rate limits that several disks share: id=NAME with the bw_... and ops_... keys of --disk. A disk joins with
    /// rate_limit_group=NAME
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    rate_limit_group: Vec<String>,
    /// Number of queues over which aio_read and aio_write are spread [default: the disk's num_queues]
    #[arg(long, value_name = "N")]
    queues: Option<u16>,
    /// Command to run; can be repeated. `help` lists the commands
    #[arg(short = 'c', value_name = "COMMAND")]
    commands: Vec<String>,
}

/// Runs the program: parses `arguments` (the program's name first), does the work, and returns the
/// exit code. A failure has been reported on standard error when this returns.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let result = match Arguments::try_parse_from(arguments) {
        Ok(parsed) => dispatch(parsed),
        Err(error) => explain(&error),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            if let Some(line) = failure.line() {
                // If standard error is closed too, the exit code still reports the failure.
                writeln!(std::io::stderr(), "ringdisk: {line}").unwrap_or_default();
            }
            failure.exit_code()
        }
    }
}

/// Returns the definition of the command line, from which man pages and shell completions are made.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}

fn dispatch(arguments: Arguments) -> Result<u8, CommandFailure> {
    logging::start(arguments.log.as_deref())?;
    limits::survive_file_size_limits();
    match arguments.command {
        Command::VhostUser(arguments) => arguments.run(),
        Command::Serve(arguments) => arguments.run(),
        Command::Ctl(arguments) => ctl::run(arguments),
        Command::Run(arguments) => machine_run::run(&run_config(arguments)?),
        Command::Io(arguments) => io::run(io_disk(&arguments)?, arguments.queues, &arguments.commands),
        Command::Ublk(command) => ublk::run(command),
        Command::Image(command) => image::run(command),
    }
}

/// Parses a command line (the program's name first) as [`run`] does, without running it or opening any file. The tests
/// of the documentation use it.
///
/// # Errors
///
/// The failure that [`run`] would print and exit with 2 for.
pub fn check(arguments: impl IntoIterator<Item = OsString>) -> Result<(), CommandFailure> {
    let parsed = match Arguments::try_parse_from(arguments) {
        Ok(parsed) => parsed,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Ok(());
        }
        Err(error) => return Err(usage(&error)),
    };
    match parsed.command {
        Command::VhostUser(arguments) => arguments.wanted(&[]).map(drop),
        // The file may be elsewhere.
        Command::Serve(_) => Ok(()),
        Command::Ctl(arguments) => ctl::check(arguments),
        Command::Run(arguments) => run_config(arguments).map(drop),
        Command::Io(arguments) => io_disk(&arguments).map(drop),
        Command::Ublk(UblkCommand::Add(arguments)) => {
            let groups = RateLimitGroups::parse(&arguments.serve.rate_limit_group)?;
            disks::parse_own(&arguments.disk, &groups).map(drop)
        }
        Command::Ublk(_) | Command::Image(_) => Ok(()),
    }
}

fn io_disk(arguments: &IoArguments) -> Result<DiskConfig, CommandFailure> {
    let mut disk = DiskConfig::parse(&arguments.disk)?;
    disk.is_own()?;
    let groups = RateLimitGroups::parse(&arguments.rate_limit_group)?;
    groups.join(&mut disk)?;
    groups.check_joined()?;
    Ok(disk)
}

fn run_config(arguments: RunArguments) -> Result<machine_run::RunConfig, CommandFailure> {
    let rate_limit_groups = RateLimitGroups::parse(&arguments.rate_limit_group)?;
    let disks = disks::parse(&arguments.disk, &rate_limit_groups)?;
    for disk in &disks {
        machine_run::check_queues(disk, arguments.cpus).map_err(CommandFailure::Usage)?;
    }
    let nets = NetConfig::parse_all(&arguments.net);
    let nets = nets.map_err(|error| CommandFailure::Usage(error.to_string()))?;
    let console = match arguments.serial.split_once('=') {
        None if arguments.serial == "tty" => ConsoleConfig::Terminal,
        None if arguments.serial == "off" => ConsoleConfig::Off,
        Some(("file", path)) if !path.is_empty() => ConsoleConfig::File(path.into()),
        Some(("socket", path)) if !path.is_empty() => ConsoleConfig::Socket(path.into()),
        _ => {
            let found = &arguments.serial;
            return Err(CommandFailure::Usage(format!(
                "--serial {found}: expected tty, off, file=PATH or socket=PATH"
            )));
        }
    };
    for path in console.socket().into_iter().chain(arguments.control.as_deref()) {
        check_socket(path)?;
    }
    let payload = match (arguments.firmware, arguments.kernel) {
        (Some(firmware), _) => Payload::Firmware(firmware),
        (None, kernel) => Payload::Kernel {
            // The command line has one of the two.
            kernel: kernel.unwrap_or_default(),
            initramfs: arguments.initramfs,
            command_line: arguments.cmdline,
        },
    };
    Ok(machine_run::RunConfig {
        machine: MachineConfig {
            payload,
            cpus: arguments.cpus,
            memory: memory_config(&arguments.memory)?,
            sandbox: arguments.sandbox == "on",
        },
        disks,
        nets,
        cloud_init: arguments.cloud_init,
        rng: arguments.rng,
        rate_limit_groups,
        console,
        control: arguments.control,
        metrics: arguments.metrics,
        no_reboot: arguments.no_reboot,
    })
}

/// Fails if `path` cannot be the path of a socket.
fn check_socket(path: &Path) -> Result<(), CommandFailure> {
    socket::check_path(path).map_err(|error| CommandFailure::Usage(error.to_string()))
}

/// Parses the value of `--memory`.
fn memory_config(text: &str) -> Result<MemoryConfig, CommandFailure> {
    let wrong = |what: String| CommandFailure::Usage(format!("--memory {text}: {what}"));
    let mut config = MemoryConfig {
        bytes: 0,
        hugepage_bytes: None,
        host_node: None,
    };
    let (mut huge, mut page) = (false, None);
    for item in text.split(',') {
        let (key, value) = item.split_once('=').unwrap_or(("size", item));
        let bytes = || size::parse_bytes(value).map_err(|error| wrong(error.to_string()));
        match (key, value) {
            ("size", _) => config.bytes = bytes()?,
            ("hugepages", "on") => huge = true,
            ("hugepages", "off") => huge = false,
            ("hugepage_size", _) => page = Some(bytes()?),
            ("host_numa_node", _) => {
                let node = value
                    .parse()
                    .map_err(|_| wrong(format!("`{value}` is not the number of a NUMA node")))?;
                config.host_node = Some(node);
            }
            _ => {
                return Err(wrong(format!(
                    "`{item}`: expected SIZE, or size=SIZE, hugepages=on|off, hugepage_size=SIZE, host_numa_node=N"
                )));
            }
        }
    }
    match page {
        Some(_) if !huge => return Err(wrong("hugepage_size needs hugepages=on".to_owned())),
        Some(bytes) if !bytes.is_power_of_two() => {
            return Err(wrong(format!(
                "hugepage_size is {bytes} bytes; expected a power of two"
            )));
        }
        _ => config.hugepage_bytes = huge.then(|| page.unwrap_or(2 << 20)),
    }
    Ok(config)
}

/// Prints help and version texts unchanged; turns a parse error into one line.
fn explain(error: &clap::Error) -> Result<u8, CommandFailure> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            std::io::stdout().write_all(error.to_string().as_bytes())?;
            Ok(EXIT_OK)
        }
        _ => Err(usage(error)),
    }
}

/// Returns a parse error as a usage failure of one line.
fn usage(error: &clap::Error) -> CommandFailure {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return CommandFailure::Usage("a command is missing; see `ringdisk --help`".to_owned());
    }
    let text = error.to_string();
    // clap puts the error, and perhaps a tip, before the usage.
    let message = text.split("Usage:").next().unwrap_or(&text);
    let message = message
        .split("For more information")
        .next()
        .unwrap_or(message)
        .trim();
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let lines: Vec<&str> = message
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    CommandFailure::Usage(format!("{}; see --help", lines.join(" ")))
}
