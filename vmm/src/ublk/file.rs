//! The configuration file of a server of block devices: it says what the options of `ringdisk ublk add` say.
//!
//! ```toml
//! control = "/run/ringdisk/devices.control"
//!
//! [[device]]
//! path = "/srv/images/a.qcow2"
//! num_queues = 4
//! recovery = "wait"
//! ```
//!
//! A device has the keys of `--disk`, its number, and the properties that are options of `ublk add` for all devices of a command.
//! [`crate::config_file`] has what is common to such files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use virtio_devices::ublk::abi::REGISTERED_BUFFERS_MAX;

use super::arguments::{ServeArguments, ZERO_COPY_FROM_TEXT};
use super::wanted::{NewDevices, Properties};
use crate::config_file::{self, Document, FileError, Kind, Lines, Names, Settings, Shared, Source, Table};
use crate::control::DiskKeys;
use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::error::{CommandFailure, chain};
use crate::{once, socket};

pub(crate) const KIND: Kind = Kind {
    table: "device",
    settings: &[("queues_per_worker", "a number from 1")],
};

/// A configuration file that was read and understood.
#[derive(Clone, Debug)]
pub(crate) struct DevicesFile {
    /// From the root.
    pub(super) path: PathBuf,
    /// The settings as texts, to be compared.
    settings: Settings,
    /// The settings as options of `ringdisk ublk`.
    pub(super) arguments: ServeArguments,
    pub(super) devices: Vec<FileDevice>,
}

/// A `[[device]]`.
#[derive(Clone, Debug)]
pub(super) struct FileDevice {
    /// The `--disk` that it would be.
    pub(super) text: String,
    pub(super) disk: DiskConfig,
    /// N of /dev/ublkbN; any if absent.
    pub(super) number: Option<u32>,
    pub(super) new: NewDevices,
    lines: Lines,
}

impl DevicesFile {
    /// Reads the file at `path`, which is from the root.
    ///
    /// # Errors
    ///
    /// [`FileError`], naming the line.
    pub(crate) fn read(path: &Path) -> Result<Self, FileError> {
        Self::parse(path, &config_file::read(path)?)
    }

    /// Understands the `text` of the file at `path`. Nothing is opened.
    ///
    /// # Errors
    ///
    /// [`FileError::Line`].
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let Document {
            source,
            settings,
            groups: group_tables,
            tables,
        } = Document::parse(path, text, KIND)?;
        let shared = Shared::of(&settings, &source)?;
        let number = |text: &str| text.parse().ok().filter(|&number: &u16| number > 0);
        let queues_per_worker = settings.parsed(&source, "queues_per_worker", number)?;
        let (mut groups, mut group_texts) = (RateLimitGroups::default(), Vec::new());
        for table in group_tables {
            let wrong = |key: Option<&str>, problem: &str| source.wrong_at(table.lines.of(key), problem);
            let added = groups.add(table.pairs());
            added.map_err(|error| wrong(error.key(), &error.to_string()))?;
            group_texts.push(
                DiskKeys::of(table.pairs())
                    .text()
                    .map_err(|problem| wrong(None, &problem))?,
            );
        }
        let mut file = Self {
            path: path.to_owned(),
            arguments: ServeArguments {
                images: shared.images,
                rate_limit_group: group_texts,
                table_cache: shared.table_cache_bytes,
                control: shared.control,
                pidfile: shared.pid_file,
                sandbox: if shared.sandbox { "on" } else { "off" }.to_owned(),
                metrics: shared.metrics,
                queues_per_worker,
                registered_buffers: REGISTERED_BUFFERS_MAX,
                ..ServeArguments::default()
            },
            settings,
            devices: Vec::new(),
        };
        let mut names = Names::default();
        for table in tables {
            let device = device(&source, table, &groups)?;
            names.add(&device.disk, &device.lines, &source)?;
            file.devices.push(device);
        }
        let Some((count, failure)) = config_file::first_wrong(&file.devices, |some| file.check(some)) else {
            return Ok(file);
        };
        let device = count.checked_sub(1).and_then(|index| file.devices.get(index));
        let line = device.map_or_else(|| file.settings.line_of("control"), |device| device.lines.table());
        Err(source.wrong_at(line, &failure.line().unwrap_or_default()))
    }

    /// Checks what no line says alone, of some of the devices.
    fn check(&self, devices: &[FileDevice]) -> Result<(), CommandFailure> {
        once::check_images(devices.iter().map(|device| &device.disk))?;
        let mut numbers = BTreeSet::new();
        let mut given = devices.iter().filter_map(|device| device.number);
        if let Some(number) = given.find(|&number| !numbers.insert(number)) {
            let message = format!("`number` {number} is that of a device before, too; expected another one");
            return Err(CommandFailure::Usage(message));
        }
        if let Some(control) = &self.arguments.control {
            socket::check_path(control).map_err(|error| CommandFailure::Usage(error.to_string()))?;
        }
        Ok(())
    }

    /// Fails if a setting that is fixed differs from what it was when the server started, which had `before`.
    ///
    /// # Errors
    ///
    /// [`FileError::Line`].
    pub(super) fn check_settings(&self, before: &Self) -> Result<(), FileError> {
        self.settings.check_unchanged(&before.settings, &self.path)
    }

    /// Returns what is wrong with `key` of a device, or with the device, as a line.
    pub(super) fn wrong(&self, device: &FileDevice, key: Option<&str>, problem: String) -> String {
        chain(&config_file::wrong_line(
            &self.path,
            device.lines.of(key),
            problem,
        ))
    }

    /// As [`DevicesFile::wrong`], as the failure of a command.
    pub(super) fn failure(&self, device: &FileDevice, key: Option<&str>, problem: String) -> CommandFailure {
        CommandFailure::Failed(self.wrong(device, key, problem).into())
    }

    /// The device whose disk has this name.
    pub(super) fn device(&self, name: &str) -> Option<&FileDevice> {
        self.devices.iter().find(|device| device.disk.name() == name)
    }
}

/// Understands a device.
fn device(source: &Source<'_>, mut table: Table, groups: &RateLimitGroups) -> Result<FileDevice, FileError> {
    let lines = table.lines.clone();
    let wrong = |key: Option<&str>, problem: &str| source.wrong_at(lines.of(key), problem);
    let number = table.take("number").map(|text| {
        let number = text.parse().ok();
        number.ok_or_else(|| wrong(Some("number"), "`number` takes N of /dev/ublkbN"))
    });
    let number = number.transpose()?;
    let mut take = |key: &str, default: &str| table.take(key).unwrap_or_else(|| default.to_owned());
    let (transport, recovery) = (take("transport", "auto"), take("recovery", "reissue"));
    let (max_io, zero_copy_from) = (take("max_io", "1M"), take("zero_copy_from", ZERO_COPY_FROM_TEXT));
    let partitions = match take("partitions", "off").as_str() {
        "on" | "true" => true,
        "off" | "false" => false,
        _ => return Err(wrong(Some("partitions"), "`partitions` takes true or false")),
    };
    let properties = Properties {
        transport: &transport,
        recovery: &recovery,
        max_io: &max_io,
        zero_copy_from: &zero_copy_from,
        partitions,
    };
    let new = NewDevices::parse(&properties).map_err(|error| {
        wrong(
            Some(error.key),
            &format!("`{}` takes {}, not {}", error.key, error.takes, error.found),
        )
    })?;
    let disk = DiskConfig::from_items(table.pairs()).and_then(|mut disk| {
        disk.is_own()?;
        groups.join(&mut disk)?;
        Ok(disk)
    });
    let disk = disk.map_err(|error| wrong(error.key(), &error.to_string()))?;
    if new.outlives() {
        disk.may_outlive_process(&format!("recovery = {recovery}"))
            .map_err(|error| wrong(error.key(), &error.to_string()))?;
    }
    let text = DiskKeys::of(table.pairs()).text();
    Ok(FileDevice {
        text: text.map_err(|problem| wrong(None, &problem))?,
        disk,
        number,
        new,
        lines,
    })
}

#[cfg(test)]
mod tests;
