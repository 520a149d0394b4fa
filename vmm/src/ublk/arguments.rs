//! The command line of `ringdisk ublk`.

use std::time::Duration;

use clap::{Args, Subcommand};
use virtio_devices::ublk::abi::REGISTERED_BUFFERS_MAX;

use crate::disk_config::keys_help;
use crate::metrics::Address;
use crate::takeover::{WITHIN, WITHIN_MAX};

/// A subcommand of `ringdisk ublk`.
#[derive(Debug, Subcommand)]
pub enum UblkCommand {
    /// Create block devices from disks and serve them
    ///
    /// Prints the path of each device, /dev/ublkbN, when it is ready. SIGTERM, SIGINT, SIGHUP and `ublk del` drain the
    /// requests in flight, remove the devices, close the images cleanly and exit with 0; a second signal does not wait
    /// for requests in flight.
    #[command(after_help = keys_help())]
    Add(AddArguments),
    /// Serve devices whose server was killed
    ///
    /// Requests that waited are completed. Each device gets the disk it was created with, unless you pass --disk.
    Recover(RecoverArguments),
    /// Take over devices from their running server
    ///
    /// I/O on the devices pauses and then continues; none of it fails. The old server completes the requests in flight,
    /// closes the images and exits with 0. Everything that could fail is checked first, while the old server still serves.
    Upgrade(UpgradeArguments),
    /// List the devices
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a device and its counters
    Info {
        /// Device: its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the features of this kernel's driver
    Features {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Enlarge a device and its image, or make both smaller with --force
    SetSize {
        /// Device: its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// New size, such as 20G
        size: String,
        /// Let the device become smaller; what lies past its new end is lost, and its users get I/O errors there
        #[arg(long)]
        force: bool,
    },
    /// Create, list, apply and delete internal snapshots of a device's image while it is served
    #[command(subcommand, disable_help_subcommand = true)]
    Snapshot(UblkSnapshotCommand),
    /// Print a device's properties for the udev rules
    #[command(hide = true)]
    Udev {
        /// Device: its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// Print its owner instead of its name
        #[arg(long, conflicts_with = "contents")]
        owner: bool,
        /// Print RINGDISK_CONTENTS=1 if the host may read its contents, instead of its name
        #[arg(long)]
        contents: bool,
    },
    /// Delete devices; their servers then close the images
    Del {
        /// Devices: numbers, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device, required_unless_present = "all", conflicts_with = "all")]
        devices: Vec<u32>,
        /// Delete all devices
        #[arg(long)]
        all: bool,
        /// Delete devices that are in use, too; their users get I/O errors
        #[arg(long)]
        force: bool,
    },
    /// Execute driver commands for another ringdisk process
    #[command(hide = true)]
    Commands {
        /// Only sync the host's page cache
        #[arg(long)]
        sync: bool,
    },
}

/// A subcommand of `ringdisk ublk snapshot`.
#[derive(Debug, Subcommand)]
pub enum UblkSnapshotCommand {
    /// Create a snapshot; print its ID
    ///
    /// The snapshot has every write that the device has answered, durably. What a mounted file system has in memory only is
    /// not in it: run `sync` or `fsfreeze` first. Requests to the device wait until the snapshot is made.
    Create {
        /// Device: its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// Name of the snapshot, up to 255 bytes; no other may have it
        name: String,
    },
    /// List the snapshots
    List {
        /// Device: its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Make the device what it was when a snapshot was created; what it has now is lost
    ///
    /// The snapshot stays. Its disk must have the size of the device, which nobody may use.
    Apply {
        /// Device: its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// Snapshot: id=ID, name=NAME, or an ID or a name that means one snapshot only
        snapshot: String,
        /// Apply it to a device that is in use, too; its users may write what they have in memory over it
        #[arg(long)]
        force: bool,
    },
    /// Delete a snapshot
    Delete {
        /// Device: its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// Snapshot: id=ID, name=NAME, or an ID or a name that means one snapshot only
        snapshot: String,
    },
}

/// [`ZERO_COPY_FROM`](virtio_devices::ublk::ZERO_COPY_FROM) as text.
pub(super) const ZERO_COPY_FROM_TEXT: &str = "0";

/// The options common to `add`, `recover` and `upgrade`.
#[derive(Args, Clone, Debug, Default)]
pub struct ServeArguments {
    /// Folder whose images `ringdisk ctl disk-add` may add as further devices; the server then goes on also without any
    ///
    /// Images are opened by a thread that can open all files there, at any depth, and no others. Without the sandbox any image can be
    /// added.
    #[arg(long, num_args = 1.., value_name = "FOLDER")]
    pub images: Vec<std::path::PathBuf>,
    /// Rate limits that several disks share: id=NAME with the bw_... and ops_... keys of --disk. A disk joins with
    /// rate_limit_group=NAME
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    pub rate_limit_group: Vec<String>,
    /// Memory for the tables of all images together, such as 2G: those of idle devices make room for those of busy ones
    #[arg(long, value_name = "SIZE", value_parser = crate::disk_config::table_cache_bytes)]
    pub table_cache: Option<u64>,
    /// Control socket to create, for `ringdisk ctl`, besides the one that `ringdisk ublk` finds by itself
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<std::path::PathBuf>,
    /// Write the process id to this file when the devices are ready; it is removed at the end
    #[arg(long, value_name = "FILE")]
    pub pidfile: Option<std::path::PathBuf>,
    /// Drop every privilege that serving does not need: in workers before the first request, in the other threads when
    /// the devices are ready
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = ["on", "off"])]
    pub sandbox: String,
    /// Serve statistics for Prometheus at this address: unix:PATH, or 127.0.0.1:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<Address>,
    /// Number of queues per worker thread [default: 1; for recover and upgrade, as before]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub queues_per_worker: Option<u16>,
    /// Maximum number of requests per worker thread with registered pages; the others are copied
    #[arg(long, value_name = "N", hide = true, default_value_t = REGISTERED_BUFFERS_MAX)]
    pub registered_buffers: u16,
    /// Continue in the background when the devices are ready; the log still goes to this standard error
    #[arg(long)]
    pub daemonize: bool,
    /// Print a line of JSON for each device
    #[arg(long)]
    pub json: bool,
    /// Given once to the intermediate process of --daemonize, twice to the process that stays.
    #[arg(long, hide = true, action = clap::ArgAction::Count)]
    pub detached: u8,
}

impl UpgradeArguments {
    /// Returns the time that servers have to leave their devices.
    #[must_use]
    pub fn within(&self) -> Duration {
        self.within.map_or(WITHIN, Duration::from_secs)
    }
}

impl UblkCommand {
    /// Returns the serving options if this command serves devices.
    #[must_use]
    pub fn serves(&self) -> Option<&ServeArguments> {
        match self {
            Self::Add(arguments) => Some(&arguments.serve),
            Self::Recover(arguments) => Some(&arguments.serve),
            Self::Upgrade(arguments) => Some(&arguments.serve),
            _ => None,
        }
    }
}

impl ServeArguments {
    /// Returns true if the sandbox is on.
    #[must_use]
    pub fn is_confined(&self) -> bool {
        self.sandbox == "on"
    }
}

/// The options of `ublk add`.
#[derive(Args, Debug)]
pub struct AddArguments {
    /// Disk: path=FILE and other key=value pairs; can be repeated
    #[arg(long, required_unless_present = "images", num_args = 1.., value_name = "KEY=VALUE,...")]
    pub disk: Vec<String>,
    /// Number of the first device; the others follow [default: any]
    #[arg(long, value_name = "N")]
    pub id: Option<u32>,
    /// Recover the devices from --id on, as `ublk recover` does, if they exist, have these disks and wait for a server;
    /// otherwise create them. For service managers, which restart a killed server with the same command
    ///
    /// Devices that `ringdisk ctl disk-add` added to the server with the same --control are recovered, too.
    #[arg(long)]
    pub or_recover: bool,
    /// Transfer of request data: auto, zero-copy, user-copy or copy
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = ["auto", "zero-copy", "user-copy", "copy"])]
    pub transport: String,
    /// Smallest request that --transport auto serves without a copy, where the kernel supports zero copy
    #[arg(long, value_name = "SIZE", default_value = ZERO_COPY_FROM_TEXT)]
    pub zero_copy_from: String,
    /// I/O after the server was killed: requests in flight and new ones wait for `ublk recover` (reissue); those in flight
    /// fail, new ones wait (wait); all fail (fail); the device is deleted (off)
    #[arg(long, value_name = "HOW", default_value = "reissue", value_parser = ["reissue", "wait", "fail", "off"])]
    pub recovery: String,
    /// Maximum size of one request, 4K to 32M
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    pub max_io: String,
    /// Let the host read the contents: the kernel scans for partitions, udev reads file system labels
    ///
    /// Without it the kernel scans no partitions, and udev, with packaging/59-ringdisk.rules, reads no superblocks. Leave it
    /// out if a guest may have written the contents.
    #[arg(long)]
    pub partitions: bool,
    /// Serving options
    #[command(flatten)]
    pub serve: ServeArguments,
}

/// The options of `ublk recover`.
#[derive(Args, Debug)]
pub struct RecoverArguments {
    /// Devices: numbers, or /dev/ublkbN
    #[arg(value_name = "DEVICE", value_parser = device, required_unless_present = "all", conflicts_with = "all")]
    pub devices: Vec<u32>,
    /// Recover all devices that wait for a server and have a saved state
    #[arg(long, conflicts_with = "disk")]
    pub all: bool,
    /// Disk of each device, in the same order [default: the saved state]
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    pub disk: Vec<String>,
    /// Serving options
    #[command(flatten)]
    pub serve: ServeArguments,
}

/// The options of `ublk upgrade`.
#[derive(Args, Debug)]
pub struct UpgradeArguments {
    /// Devices: numbers, or /dev/ublkbN. Name all devices of a server
    #[arg(value_name = "DEVICE", value_parser = device, required_unless_present_any = ["all", "server"])]
    pub devices: Vec<u32>,
    /// Take over all devices that have a server and a saved state
    #[arg(long, conflicts_with_all = ["devices", "server"])]
    pub all: bool,
    /// Longest time in seconds in which a server may leave its devices; it ends then anyway, as if it were killed [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=WITHIN_MAX.as_secs()))]
    within: Option<u64>,
    /// Take over the devices of the server with this process ID (systemd: $MAINPID)
    #[arg(long, value_name = "PID", conflicts_with = "devices", value_parser = clap::value_parser!(u32).range(1..))]
    pub server: Option<u32>,
    /// Serving options
    #[command(flatten)]
    pub serve: ServeArguments,
}

/// Parses a device's number or path.
fn device(text: &str) -> Result<u32, String> {
    let number = ["/dev/ublkb", "/dev/ublkc", "ublkb", "ublkc"]
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix))
        .unwrap_or(text);
    number
        .parse()
        .map_err(|_| "expected a number, or /dev/ublkb and a number".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_copy_from_default_is_the_librarys() {
        let bytes = crate::size::parse_bytes(ZERO_COPY_FROM_TEXT).expect("a size");
        assert_eq!(bytes, u64::from(virtio_devices::ublk::ZERO_COPY_FROM));
    }

    #[test]
    fn device_takes_a_number_or_a_path() {
        for text in ["7", "/dev/ublkb7", "/dev/ublkc7", "ublkb7", "ublkc7"] {
            assert_eq!(device(text), Ok(7), "{text}");
        }
        for text in ["", "/dev/sda7", "-1", "ublkb"] {
            assert!(device(text).is_err(), "{text}");
        }
    }
}
