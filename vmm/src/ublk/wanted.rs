//! The disks that a server is to serve: from the command line, or from the saved state of their devices.
//!
//! It makes decisions only: no device is created and no image opened here. Invariant: every argument is checked, and each image
//! named once, before the first device appears.

use std::path::PathBuf;

use block::worker::WorkerConfig;
use virtio_devices::ublk::abi::DeviceInfo;
use virtio_devices::ublk::{Recovery, Transport, TransportChoice, UblkConfig, block_path, may_administer};

use super::arguments::{AddArguments, ServeArguments};
use super::groups::Groups;
use super::or_recover::{self, Found};
use super::sandbox;
use crate::disk_config::DiskConfig;
use crate::error::CommandFailure;
use crate::saved_devices::state::SavedDevice;
use crate::{once, size};

/// A disk to be served, and how.
pub(super) struct Wanted {
    /// The device to recover; `None` makes a new one.
    pub(super) recover: Option<u32>,
    /// A device that is deleted first, because it never had a server.
    pub(super) half_made: Option<u32>,
    pub(super) text: String,
    pub(super) rate_limit_group: Option<String>,
    /// The `--control` of the server that made, or is to make, the device for a request.
    pub(super) added_by: Option<PathBuf>,
    /// The configuration file that lists the device.
    pub(super) listed_in: Option<PathBuf>,
    pub(super) directory: PathBuf,
    pub(super) disk: DiskConfig,
    pub(super) config: UblkConfig,
    /// True if answered writes must outlive this process.
    pub(super) outlives: bool,
    /// True if the host may read the contents.
    pub(super) partitions: bool,
}

/// The properties of devices that are made.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct NewDevices {
    transport: TransportChoice,
    zero_copy_from: u32,
    recovery: Recovery,
    io_bytes_max: u32,
    partitions: bool,
}

/// Properties of devices as texts: options of `ublk add`, or keys of a `[[device]]`.
pub(super) struct Properties<'a> {
    pub(super) transport: &'a str,
    pub(super) recovery: &'a str,
    pub(super) max_io: &'a str,
    pub(super) zero_copy_from: &'a str,
    pub(super) partitions: bool,
}

/// A property with a value that it does not take.
#[derive(Debug)]
pub(super) struct WrongProperty {
    pub(super) key: &'static str,
    pub(super) found: String,
    pub(super) takes: &'static str,
}

impl Default for NewDevices {
    /// As of `ublk add` without options.
    fn default() -> Self {
        let config = UblkConfig::default();
        Self {
            transport: TransportChoice::Auto,
            zero_copy_from: config.zero_copy_from,
            recovery: permitted(Recovery::Reissue),
            io_bytes_max: config.io_bytes_max,
            partitions: false,
        }
    }
}

/// The way in which I/O waits for the next server: the driver lets none wait for a user.
fn permitted(recovery: Recovery) -> Recovery {
    if may_administer() { recovery } else { Recovery::Off }
}

impl NewDevices {
    /// Those of the options of `ublk add`.
    ///
    /// # Errors
    ///
    /// A failure that names the option.
    pub(super) fn of(arguments: &AddArguments) -> Result<Self, CommandFailure> {
        let properties = Properties {
            transport: &arguments.transport,
            recovery: &arguments.recovery,
            max_io: &arguments.max_io,
            zero_copy_from: &arguments.zero_copy_from,
            partitions: arguments.partitions,
        };
        let parsed = Self::parse(&properties);
        parsed.map_err(|WrongProperty { key, found, takes }| {
            let option = key.replace('_', "-");
            CommandFailure::Usage(format!("--{option} {found}: expected {takes}"))
        })
    }

    /// Those that texts describe.
    ///
    /// # Errors
    ///
    /// The first that is wrong.
    pub(super) fn parse(properties: &Properties<'_>) -> Result<Self, WrongProperty> {
        let wrong = |key, found: &str, takes| WrongProperty {
            key,
            found: found.to_owned(),
            takes,
        };
        let transport = match properties.transport {
            "auto" => TransportChoice::Auto,
            "copy" => TransportChoice::Only(Transport::Copy),
            "user-copy" => TransportChoice::Only(Transport::UserCopy),
            "zero-copy" => TransportChoice::Only(Transport::ZeroCopy),
            found => return Err(wrong("transport", found, "auto, zero-copy, user-copy or copy")),
        };
        let recovery = match properties.recovery {
            "reissue" => Recovery::Reissue,
            "wait" => Recovery::Wait,
            "fail" => Recovery::Fail,
            "off" => Recovery::Off,
            found => return Err(wrong("recovery", found, "reissue, wait, fail or off")),
        };
        let bytes = |text| {
            size::parse_bytes(text)
                .ok()
                .and_then(|bytes| u32::try_from(bytes).ok())
        };
        let (max_io, zero_copy_from) = (properties.max_io, properties.zero_copy_from);
        let fits = |bytes: &u32| bytes.is_power_of_two() && (4096..=1 << 25).contains(bytes);
        let io_bytes_max = bytes(max_io)
            .filter(fits)
            .ok_or_else(|| wrong("max_io", max_io, "a power of two from 4K to 32M"))?;
        let zero_copy_from = bytes(zero_copy_from)
            .ok_or_else(|| wrong("zero_copy_from", zero_copy_from, "a size such as 64K, below 4G"))?;
        Ok(Self {
            transport,
            zero_copy_from,
            recovery: permitted(recovery),
            io_bytes_max,
            partitions: properties.partitions,
        })
    }

    /// True if such a device waits for the next server when its own is gone.
    pub(super) fn outlives(&self) -> bool {
        self.recovery != Recovery::Off
    }

    /// The key of a property that is not as it was `before`, if there is one.
    pub(super) fn changed_key(&self, before: &Self) -> Option<&'static str> {
        let properties = [
            ("transport", self.transport != before.transport),
            ("zero_copy_from", self.zero_copy_from != before.zero_copy_from),
            ("recovery", self.recovery != before.recovery),
            ("max_io", self.io_bytes_max != before.io_bytes_max),
            ("partitions", self.partitions != before.partitions),
        ];
        properties
            .into_iter()
            .find(|(_, differs)| *differs)
            .map(|(key, _)| key)
    }

    /// The key of a property in which a device that there is already differs from these, if there is one.
    pub(super) fn difference(&self, info: &DeviceInfo, partitions: bool) -> Option<&'static str> {
        let is_other = match self.transport {
            TransportChoice::Auto => false,
            TransportChoice::Only(transport) => transport != Transport::of(info.flags()),
        };
        let properties = [
            ("transport", is_other),
            ("recovery", self.recovery != Recovery::of(info.flags())),
            ("max_io", self.io_bytes_max != info.max_io_buf_bytes),
            ("partitions", self.partitions != partitions),
        ];
        properties
            .into_iter()
            .find(|(_, differs)| *differs)
            .map(|(key, _)| key)
    }

    /// A device of this disk that is made anew, with any number. Relative paths of `text` start in `directory`.
    ///
    /// # Errors
    ///
    /// A failure that names the disk and its key.
    pub(super) fn wanted(
        &self,
        (text, disk): (String, DiskConfig),
        rate_limit_group: Option<String>,
        directory: PathBuf,
        serve: &ServeArguments,
    ) -> Result<Wanted, CommandFailure> {
        if self.outlives() {
            disk.may_outlive_process(&format!("--recovery {}", self.recovery))?;
        }
        let config = UblkConfig {
            id: None,
            transport: self.transport,
            zero_copy_from: self.zero_copy_from,
            recovery: self.recovery,
            io_bytes_max: self.io_bytes_max,
            partitions: self.partitions,
            ..config(&disk, serve)?
        };
        Ok(Wanted {
            recover: None,
            half_made: None,
            text,
            rate_limit_group,
            added_by: None,
            listed_in: None,
            directory,
            disk,
            config,
            outlives: self.outlives(),
            partitions: self.partitions,
        })
    }
}

/// Returns the disks of `ringdisk ublk add`.
///
/// # Errors
///
/// A failure that names the argument or the disk.
pub(super) fn added(
    arguments: &AddArguments,
    new: &NewDevices,
    groups: &mut Groups,
) -> Result<Vec<Wanted>, CommandFailure> {
    let directory = here()?;
    if arguments.or_recover && !arguments.disk.is_empty() && arguments.id.is_none() {
        let message = "--or-recover needs --id N: the devices of --disk are found by their numbers";
        return Err(CommandFailure::Usage(message.to_owned()));
    }
    let texts = &arguments.disk;
    let disks = texts
        .iter()
        .map(|text| parse(text))
        .collect::<Result<Vec<_>, _>>()?;
    once::check_images(&disks)?;
    let mut wanted = Vec::new();
    for ((text, mut disk), nth) in texts.iter().zip(disks).zip(0u32..) {
        let group = groups.join(&mut disk, None)?;
        if arguments.or_recover {
            disk.may_outlive_process("--or-recover")?;
        }
        let id = arguments.id.map(|first| first.saturating_add(nth));
        let found = match id {
            Some(id) if arguments.or_recover => or_recover::look(id, text, &directory)?,
            _ => Found::Nothing,
        };
        let mut one = new.wanted((text.clone(), disk), group, directory.clone(), &arguments.serve)?;
        one.config.id = id;
        one.recover = id.filter(|_| found == Found::Waits);
        one.half_made = id.filter(|_| found == Found::HalfMade);
        one.outlives |= one.recover.is_some();
        wanted.push(one);
    }
    if let Some(control) = arguments.serve.control.as_ref().filter(|_| arguments.or_recover) {
        let left = or_recover::added_by(&directory.join(control))?;
        wanted.extend(again(&left, &[], &arguments.serve, groups)?);
    }
    Ok(wanted)
}

/// Devices that there are already, with their disks as they are given or, where none are, remembered.
pub(super) fn again(
    ids: &[u32],
    disks: &[String],
    arguments: &ServeArguments,
    groups: &mut Groups,
) -> Result<Vec<Wanted>, CommandFailure> {
    let each = ids.iter().enumerate().map(|(index, &id)| {
        let remembered = SavedDevice::load(id);
        let (text, directory) = match (disks.get(index), &remembered) {
            (Some(text), _) => (text.clone(), here()?),
            (None, Some(state)) => (state.disk.clone(), state.directory.clone()),
            (None, None) => {
                let message = format!("no saved state for {}; pass --disk", block_path(id));
                return Err(CommandFailure::Failed(message.into()));
            }
        };
        let disk = parse(&text)?;
        one_again(id, remembered, (text, disk), directory, arguments, groups)
    });
    each.collect()
}

/// Device `id`, which there is already, with this disk. Relative paths of it start in `directory`.
///
/// # Errors
///
/// A failure that names the disk and its key.
pub(super) fn one_again(
    id: u32,
    remembered: Option<SavedDevice>,
    (text, mut disk): (String, DiskConfig),
    directory: PathBuf,
    arguments: &ServeArguments,
    groups: &mut Groups,
) -> Result<Wanted, CommandFailure> {
    disk.may_outlive_process("ublk recover")?;
    let each = remembered.as_ref().map(|state| state.queues_per_worker);
    let partitions = remembered.as_ref().is_some_and(|state| state.partitions);
    let group = remembered
        .as_ref()
        .and_then(|state| state.rate_limit_group.as_deref());
    let rate_limit_group = groups.join(&mut disk, group)?;
    disk.start_in(&directory);
    let mut config = config(&disk, arguments)?;
    config.queues_per_worker = arguments.queues_per_worker.or(each).unwrap_or(1);
    let (added_by, listed_in) =
        remembered.map_or_else(Default::default, |state| (state.added_by, state.listed_in));
    Ok(Wanted {
        recover: Some(id),
        half_made: None,
        text,
        rate_limit_group,
        added_by,
        listed_in,
        directory,
        disk,
        config,
        outlives: true,
        partitions,
    })
}

/// The folder in which relative paths of the command line start.
pub(super) fn here() -> Result<PathBuf, CommandFailure> {
    std::env::current_dir().map_err(|error| CommandFailure::about("cannot read the current directory", error))
}

/// A disk as it is given.
pub(super) fn parse(text: &str) -> Result<DiskConfig, CommandFailure> {
    let disk = DiskConfig::parse(text)?;
    disk.is_own()?;
    Ok(disk)
}

/// Returns the device configuration that follows from the disk's.
fn config(disk: &DiskConfig, serve: &ServeArguments) -> Result<UblkConfig, CommandFailure> {
    if disk.queue_size > 4096 {
        let (name, found) = (disk.name(), disk.queue_size);
        let message = format!("disk {name} has queue_size={found}; expected at most 4096 for a ublk device");
        return Err(CommandFailure::Usage(message));
    }
    let worker = WorkerConfig {
        on_start: sandbox::worker_hook(serve.is_confined()),
        ..UblkConfig::default_worker()
    };
    Ok(UblkConfig {
        name: disk.name(),
        num_queues: disk.num_queues,
        queue_depth: disk.queue_size,
        queues_per_worker: serve.queues_per_worker.unwrap_or(1),
        registered_buffers_max: serve.registered_buffers,
        workers: disk.workers(&worker),
        ..UblkConfig::default()
    })
}
