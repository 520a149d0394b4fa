//! The configuration file of a server of vhost-user disks: it says what the options of `ringdisk vhost-user` say.
//!
//! ```toml
//! workers = 4
//!
//! [[disk]]
//! socket = "/srv/images/a.sock"
//! path = "/srv/images/a.qcow2"
//! num_queues = 4
//! ```
//!
//! A disk has the keys of `--disk`, and its socket. [`crate::config_file`] has what is common to such files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::served::{Options, Place};
use super::wanted::{Disks, Places, Wanted, check_disks};
use super::workers::{SharedWorkers, WorkersError};
use crate::config_file::{self, Document, FileError, Kind, Lines, Names, Settings, Shared, Source, Table};
use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::error::{CommandFailure, chain};
use crate::socket::{Access, AccessError};

pub(crate) const KIND: Kind = Kind {
    table: "disk",
    settings: &[
        ("restartable", "true or false"),
        ("socket_group", "the name or number of a group"),
        ("socket_mode", "an octal mode as text, such as \"660\""),
        ("watchdog", "seconds from 1 to 86400"),
        ("workers", "a number, NUMBER@CPUS as text, or several in an array"),
    ],
};

/// A configuration file that was read and understood.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    /// The settings as texts, to be compared.
    settings: Settings,
    places: Places,
    workers: Vec<SharedWorkers>,
    options: Options,
    pub(super) groups: RateLimitGroups,
    pub(super) disks: Vec<FileDisk>,
}

/// A `[[disk]]`.
#[derive(Clone, Debug)]
pub(super) struct FileDisk {
    pub(super) place: Place,
    pub(super) config: DiskConfig,
    lines: Lines,
}

/// The options of one start of a server, which its file does not have.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// As [`Options::takeover`].
    pub takeover: bool,
    /// As [`Places::takeover_from`].
    pub takeover_from: Option<PathBuf>,
    /// As [`Options::takeover_within`].
    pub takeover_within: Duration,
    /// As [`Options::incoming`].
    pub incoming: bool,
    /// As [`Options::detached`].
    pub detached: bool,
}

impl ConfigFile {
    /// Reads the file at `path`.
    ///
    /// # Errors
    ///
    /// [`FileError`], naming the line.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        Self::parse(path, &config_file::read(path)?)
    }

    /// Understands the `text` of the file at `path`. Nothing is opened.
    ///
    /// # Errors
    ///
    /// [`FileError::Line`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let Document {
            source,
            settings,
            groups,
            tables,
        } = Document::parse(path, text, KIND)?;
        let shared = Shared::of(&settings, &source)?;
        let mut file = Self {
            path: path.to_owned(),
            workers: workers(&settings, &source)?,
            options: options(&settings, &shared, &source)?,
            places: Places {
                control: shared.control,
                metrics: shared.metrics,
                pid_file: shared.pid_file,
                images: shared.images,
                takeover_from: None,
            },
            settings,
            groups: RateLimitGroups::default(),
            disks: Vec::new(),
        };
        for table in groups {
            let added = file.groups.add(table.pairs());
            added.map_err(|error| source.wrong_at(table.lines.of(error.key()), &error.to_string()))?;
        }
        let mut names = Names::default();
        for table in tables {
            let disk = file.disk(&source, table)?;
            names.add(&disk.config, &disk.lines, &source)?;
            file.disks.push(disk);
        }
        file.check(&source)?;
        Ok(file)
    }

    /// Understands a disk.
    fn disk(&self, source: &Source<'_>, mut table: Table) -> Result<FileDisk, FileError> {
        let lines = table.lines.clone();
        let wrong = |key: Option<&str>, problem: &str| source.wrong_at(lines.of(key), problem);
        let place = match (table.take("socket"), table.take("fd")) {
            (Some(path), None) if !path.is_empty() => Place::Path(path.into()),
            (None, Some(number)) => {
                let number = number.parse().ok().filter(|&number| number >= 0);
                let number =
                    number.ok_or_else(|| wrong(Some("fd"), "`fd` takes the number of a descriptor"))?;
                Place::Descriptor(number)
            }
            (Some(_), Some(_)) => {
                return Err(wrong(
                    Some("fd"),
                    "`fd` contradicts `socket`; expected one of them",
                ));
            }
            (Some(_), None) => return Err(wrong(Some("socket"), "`socket` takes the path of a socket")),
            (None, None) => {
                return Err(wrong(
                    None,
                    "`socket` is missing; expected the path of a socket for the disk's clients",
                ));
            }
        };
        let config = DiskConfig::from_items(table.pairs()).and_then(|mut config| {
            config.is_own()?;
            self.groups.join(&mut config)?;
            Ok(config)
        });
        let config = config.map_err(|error| wrong(error.key(), &error.to_string()))?;
        Ok(FileDisk { place, config, lines })
    }

    /// Checks what no line says alone.
    fn check(&self, source: &Source<'_>) -> Result<(), FileError> {
        let disks = self.disks.iter();
        let disks: Vec<_> = disks
            .map(|disk| (disk.place.clone(), disk.config.clone()))
            .collect();
        let check =
            |some: &[_]| check_disks(some, self.places.control.as_deref(), &self.workers, self.options);
        let Some((count, failure)) = config_file::first_wrong(&disks, check) else {
            return Ok(());
        };
        let disk = count.checked_sub(1).and_then(|index| self.disks.get(index));
        let line = disk.map_or_else(|| self.settings.line_of("control"), |disk| disk.lines.table());
        Err(source.wrong_at(line, &failure.line().unwrap_or_default()))
    }

    /// Returns what a server of this file is to do.
    ///
    /// # Errors
    ///
    /// [`CommandFailure::Usage`]: something does not go with how it is started.
    pub fn wanted(self, start: Start) -> Result<Wanted, CommandFailure> {
        let options = Options {
            takeover: start.takeover,
            takeover_within: start.takeover_within,
            incoming: start.incoming,
            detached: start.detached,
            ..self.options
        };
        let disks = self.disks.iter();
        let disks: Vec<_> = disks
            .map(|disk| (disk.place.clone(), disk.config.clone()))
            .collect();
        check_disks(&disks, self.places.control.as_deref(), &self.workers, options)?;
        Ok(Wanted {
            disks: Disks {
                served: disks,
                groups: self.groups.clone(),
            },
            places: Places {
                takeover_from: start.takeover_from,
                ..self.places.clone()
            },
            workers: self.workers.clone(),
            options,
            file: Some(self),
        })
    }

    /// The bytes that the tables of all images may take in memory together, if they are bounded.
    pub(super) fn table_cache_bytes(&self) -> Option<u64> {
        self.options.table_cache_bytes
    }

    /// Fails if a setting that is fixed differs from what it was when the server started, which had `before`.
    ///
    /// # Errors
    ///
    /// [`FileError::Line`].
    pub(super) fn check_settings(&self, before: &Self) -> Result<(), FileError> {
        self.settings.check_unchanged(&before.settings, &self.path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns what is wrong with `key` of a disk, or with the disk.
    pub(super) fn wrong_disk(&self, disk: &FileDisk, key: Option<&str>, problem: String) -> FileError {
        config_file::wrong_line(&self.path, disk.lines.of(key), problem)
    }
}

fn workers(settings: &Settings, source: &Source<'_>) -> Result<Vec<SharedWorkers>, FileError> {
    let workers = settings.all("workers").iter().map(|text| text.parse());
    let workers = workers.collect::<Result<_, _>>();
    workers.map_err(|error: WorkersError| source.wrong_at(settings.line_of("workers"), &chain(&error)))
}

fn options(settings: &Settings, shared: &Shared, source: &Source<'_>) -> Result<Options, FileError> {
    let seconds = |text: &str| {
        let seconds = text.parse().ok();
        seconds.filter(|seconds| (1..=86_400).contains(seconds))
    };
    let (mode, group) = (
        settings.one(source, "socket_mode")?,
        settings.one(source, "socket_group")?,
    );
    let access = Access::parse(mode, group).map_err(|error| {
        let name = match error {
            AccessError::Mode { .. } => "socket_mode",
            AccessError::Group { .. } => "socket_group",
        };
        source.wrong_at(settings.line_of(name), &error.to_string())
    })?;
    Ok(Options {
        restartable: settings.switch(source, "restartable")?.unwrap_or_default(),
        sandbox: shared.sandbox,
        table_cache_bytes: shared.table_cache_bytes,
        watchdog: settings
            .parsed(source, "watchdog", seconds)?
            .map(Duration::from_secs),
        access,
        ..Options::default()
    })
}

#[cfg(test)]
mod tests;
