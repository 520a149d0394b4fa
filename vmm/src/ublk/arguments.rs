//! The command line of `ringdisk ublk`.

use clap::{Args, Subcommand};
use virtio_devices::ublk::abi::REGISTERED_BUFFERS_MAX;

use crate::disk_config::keys_help;

/// What can be done with block devices of this machine.
#[derive(Debug, Subcommand)]
pub enum UblkCommand {
    /// Create block devices from disks and serve them
    ///
    /// Prints /dev/ublkbN for each when it is there. SIGTERM, SIGINT and SIGHUP finish what is under way, remove the
    /// devices, close the images cleanly and exit with 0; a second one gives up waiting. So does `ublk del`.
    #[command(after_help = keys_help())]
    Add(AddArguments),
    /// Serve devices whose server was killed
    ///
    /// Waiting requests are carried out. The disks are those that the devices were made with, unless --disk names others.
    Recover(RecoverArguments),
    /// Take over devices from the server that serves them now
    ///
    /// Users of the devices notice a pause and nothing else. The old server answers what is under way, closes the images and
    /// exits with 0. Whatever would prevent that is checked before it is asked, and leaves everything as it was.
    Upgrade(UpgradeArguments),
    /// List the devices
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a device and what it has done
    Info {
        /// Its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// List the features of this kernel's driver
    Features {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Enlarge a device and its image
    SetSize {
        /// Its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// Its new size, such as 20G
        size: String,
    },
    /// What udev's rule asks of a device
    #[command(hide = true)]
    Udev {
        /// Its number, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: u32,
        /// Print its owner instead of its name
        #[arg(long, conflicts_with = "contents")]
        owner: bool,
        /// Print RINGDISK_CONTENTS=1 if the host may read what is in it, instead of its name
        #[arg(long)]
        contents: bool,
    },
    /// Delete devices; their servers close the images
    Del {
        /// Their numbers, or /dev/ublkbN
        #[arg(value_name = "DEVICE", value_parser = device, required_unless_present = "all", conflicts_with = "all")]
        devices: Vec<u32>,
        /// All there are
        #[arg(long)]
        all: bool,
        /// Even if they are in use: whoever uses them sees errors
        #[arg(long)]
        force: bool,
    },
    /// Carries out commands to the driver for another process of this program
    #[command(hide = true)]
    Commands {
        /// Have the host write what it keeps in memory, and nothing else
        #[arg(long)]
        sync: bool,
    },
}

/// [`ZERO_COPY_FROM`](virtio_devices::ublk::ZERO_COPY_FROM), as people say it.
const ZERO_COPY_FROM_TEXT: &str = "0";

/// How devices are served.
#[derive(Args, Debug)]
pub struct ServeArguments {
    /// Rate limits that several disks share: id=NAME with the keys bw_... and ops_... of --disk; disks name it with
    /// rate_limit_group=NAME
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    pub rate_limit_group: Vec<String>,
    /// Whether to give up every right that serving does not take: those of workers before they see a byte, the others' when
    /// the devices are there
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = ["on", "off"])]
    pub sandbox: String,
    /// How many queues share a worker thread [default: 1, or as before]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub queues_per_worker: Option<u16>,
    /// The most requests of a worker thread that have their pages registered; the others are copied
    #[arg(long, value_name = "N", hide = true, default_value_t = REGISTERED_BUFFERS_MAX)]
    pub registered_buffers: u16,
    /// Go to the background when the devices are there; the log still goes to this standard error
    #[arg(long)]
    pub daemonize: bool,
    /// Print a line of JSON for each device
    #[arg(long)]
    pub json: bool,
    /// This is on the way to the background: once for the process that starts the one that stays there.
    #[arg(long, hide = true, action = clap::ArgAction::Count)]
    pub detached: u8,
}

impl UblkCommand {
    /// How it serves devices, if it does.
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
    /// Whether rights are given up.
    #[must_use]
    pub fn is_confined(&self) -> bool {
        self.sandbox == "on"
    }
}

/// What `ublk add` takes.
#[derive(Args, Debug)]
pub struct AddArguments {
    /// A disk: path=FILE and other key=value pairs; can be repeated
    #[arg(long, required = true, num_args = 1.., value_name = "KEY=VALUE,...")]
    pub disk: Vec<String>,
    /// The number of the first device; the others follow [default: any]
    #[arg(long, value_name = "N")]
    pub id: Option<u32>,
    /// Go on with the devices of these numbers if they are there and wait for a server of these disks, as `ublk recover`
    /// does; else make them. For service managers, which start again what was killed
    #[arg(long, requires = "id")]
    pub or_recover: bool,
    /// How data travels: auto, zero-copy, user-copy or copy
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = ["auto", "zero-copy", "user-copy", "copy"])]
    pub transport: String,
    /// The size from which on --transport auto reads and writes without copies, where the kernel can; shorter ones are copied
    #[arg(long, value_name = "SIZE", default_value = ZERO_COPY_FROM_TEXT)]
    pub zero_copy_from: String,
    /// What becomes of I/O if the server is killed: it waits for `ublk recover` and is done again (reissue), or
    /// waits while what was under way fails (wait), or fails (fail), or the device goes (off)
    #[arg(long, value_name = "HOW", default_value = "reissue", value_parser = ["reissue", "wait", "fail", "off"])]
    pub recovery: String,
    /// The most bytes of one request, 4K to 32M
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    pub max_io: String,
    /// Let the host read what is in them: partitions and, by udev, file systems' names
    ///
    /// Without it the kernel looks for no partitions and udev, with packaging/59-ringdisk.rules, reads no superblocks:
    /// the contents may be a guest's.
    #[arg(long)]
    pub partitions: bool,
    /// How they are served
    #[command(flatten)]
    pub serve: ServeArguments,
}

/// What `ublk recover` takes.
#[derive(Args, Debug)]
pub struct RecoverArguments {
    /// Their numbers, or /dev/ublkbN
    #[arg(value_name = "DEVICE", value_parser = device, required_unless_present = "all", conflicts_with = "all")]
    pub devices: Vec<u32>,
    /// All that wait for a server and are remembered
    #[arg(long, conflicts_with = "disk")]
    pub all: bool,
    /// The disk of each, in order [default: what is remembered]
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    pub disk: Vec<String>,
    /// How they are served
    #[command(flatten)]
    pub serve: ServeArguments,
}

/// What `ublk upgrade` takes.
#[derive(Args, Debug)]
pub struct UpgradeArguments {
    /// Their numbers, or /dev/ublkbN; a server hands over all it has
    #[arg(value_name = "DEVICE", value_parser = device, required_unless_present_any = ["all", "server"])]
    pub devices: Vec<u32>,
    /// All that are served and remembered
    #[arg(long, conflicts_with_all = ["devices", "server"])]
    pub all: bool,
    /// Those of the server with this process number, as service managers know it
    #[arg(long, value_name = "PID", conflicts_with = "devices", value_parser = clap::value_parser!(u32).range(1..))]
    pub server: Option<u32>,
    /// How they are served
    #[command(flatten)]
    pub serve: ServeArguments,
}

/// A device's number, however it is given.
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
    fn the_default_size_for_zero_copy_is_that_of_the_library() {
        let bytes = crate::size::parse_bytes(ZERO_COPY_FROM_TEXT).expect("a size");
        assert_eq!(bytes, u64::from(virtio_devices::ublk::ZERO_COPY_FROM));
    }

    #[test]
    fn a_device_is_a_number_or_a_path() {
        for text in ["7", "/dev/ublkb7", "/dev/ublkc7", "ublkb7", "ublkc7"] {
            assert_eq!(device(text), Ok(7), "{text}");
        }
        for text in ["", "/dev/sda7", "-1", "ublkb"] {
            assert!(device(text).is_err(), "{text}");
        }
    }
}
