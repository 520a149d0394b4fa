//! The configuration file of `ringdisk serve`: TOML that says what the options of `ringdisk vhost-user` say.
//!
//! ```toml
//! control = "/run/ringdisk/disks.control"
//! images = ["/srv/images"]
//!
//! [[disk]]
//! socket = "/srv/images/a.sock"
//! path = "/srv/images/a.qcow2"
//! num_queues = 4
//! ```
//!
//! A setting has the name of its option, a disk the keys of `--disk`; both take the same values. A relative path starts at the file's
//! folder. docs/howto-serve.md is the reference.
//!
//! Invariant: a file with anything wrong in it is refused as a whole, and the first wrong line named.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::served::{Options, Place};
use super::wanted::{Disks, Places, Wanted, check_disks};
use super::workers::SharedWorkers;
use crate::disk_config::{DiskConfig, RateLimitGroups, table_cache_bytes};
use crate::error::{CommandFailure, chain};
use crate::metrics::Address;
use crate::socket::{Access, AccessError};

/// The most bytes that a file can have.
const BYTES_MAX: u64 = 16 << 20;

/// The settings, with their values as an error says them.
const SETTINGS: [(&str, &str); 11] = [
    ("control", "the path of a socket"),
    ("images", "the path of a folder, or several in an array"),
    ("metrics", "unix:PATH or 127.0.0.1:PORT"),
    ("pidfile", "the path of a file"),
    ("restartable", "true or false"),
    ("sandbox", "true or false"),
    ("socket_group", "the name or number of a group"),
    ("socket_mode", "an octal mode as text, such as \"660\""),
    (TABLE_CACHE, "a size of 1M or more"),
    ("watchdog", "seconds from 1 to 86400"),
    ("workers", "a number, NUMBER@CPUS as text, or several in an array"),
];

/// The setting that can change while the server runs.
const TABLE_CACHE: &str = "table_cache";

/// Keys of a disk and of a group whose value is a path.
const PATHS: [&str; 4] = ["path", "overlay_dir", "secret_file", "socket"];

/// A file that is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// It is too large.
    #[error("{} is larger than {BYTES_MAX} bytes; expected a configuration file", path.display())]
    Large {
        /// The file.
        path: PathBuf,
    },
    /// A line is wrong.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from one.
        line: usize,
        /// The problem, and what would be right.
        problem: String,
    },
}

/// A configuration file that was read and understood.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    /// The settings as texts, to be compared.
    settings: BTreeMap<String, Setting>,
    places: Places,
    workers: Vec<SharedWorkers>,
    options: Options,
    pub(super) groups: RateLimitGroups,
    pub(super) disks: Vec<FileDisk>,
}

/// A value of the file.
#[derive(Clone, Debug)]
struct Setting {
    values: Vec<String>,
    line: usize,
}

/// A `[[disk]]`.
#[derive(Clone, Debug)]
pub(super) struct FileDisk {
    pub(super) place: Place,
    pub(super) config: DiskConfig,
    lines: Lines,
}

/// The lines of a table's keys, and its own.
#[derive(Clone, Debug)]
struct Lines {
    table: usize,
    keys: BTreeMap<String, usize>,
}

impl Lines {
    /// The line of `key`, or else of the table.
    fn of(&self, key: Option<&str>) -> usize {
        let line = key.and_then(|key| self.keys.get(key));
        line.copied().unwrap_or(self.table)
    }
}

/// The options of one start of a server, which its file does not have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Start {
    /// As [`Options::takeover`].
    pub takeover: bool,
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
        let read = |source| FileError::Read {
            path: path.to_owned(),
            source,
        };
        let mut text = String::new();
        let file = File::open(path).map_err(read)?;
        file.take(BYTES_MAX + 1).read_to_string(&mut text).map_err(read)?;
        if text.len() as u64 > BYTES_MAX {
            let path = path.to_owned();
            return Err(FileError::Large { path });
        }
        Self::parse(path, &text)
    }

    /// Understands the `text` of the file at `path`. Nothing is opened.
    ///
    /// # Errors
    ///
    /// [`FileError::Line`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let newlines = text.bytes().enumerate().filter(|&(_, byte)| byte == b'\n');
        let source = Source {
            path,
            newlines: newlines.map(|(at, _)| at).collect(),
        };
        let table = DeTable::parse(text).map_err(|error| {
            let at = error.span().unwrap_or_default();
            source.wrong(at, error.message().trim_end().replace('\n', "; "))
        })?;
        let mut file = Self {
            path: path.to_owned(),
            settings: BTreeMap::new(),
            places: Places::default(),
            workers: Vec::new(),
            options: Options {
                sandbox: true,
                ..Options::default()
            },
            groups: RateLimitGroups::default(),
            disks: Vec::new(),
        };
        let (mut groups, mut disks) = (Vec::new(), Vec::new());
        for (key, value) in table.get_ref() {
            match key.get_ref().as_ref() {
                "disk" => disks = source.tables("disk", value)?,
                "rate_limit_group" => groups = source.tables("rate_limit_group", value)?,
                name => {
                    let Some((_, takes)) = SETTINGS.iter().find(|(known, _)| *known == name) else {
                        return Err(source.wrong(key.span(), unknown(name)));
                    };
                    let values = source.texts(name, takes, value)?;
                    let line = source.line(key.span());
                    file.settings.insert(name.to_owned(), Setting { values, line });
                }
            }
        }
        file.set(&source)?;
        for (items, lines) in groups {
            let added = file.groups.add(pairs(&items));
            added.map_err(|error| source.wrong_at(lines.of(error.key()), &error.to_string()))?;
        }
        let mut names = HashMap::new();
        for (items, lines) in disks {
            let disk = file.disk(&source, items, lines)?;
            let (name, line) = (disk.config.name(), disk.lines.table);
            if let Some(other) = names.insert(name, line) {
                let name = disk.config.name();
                let problem =
                    format!("the disk of line {other} is called {name}, too; expected another `id`");
                return Err(source.wrong_at(disk.lines.of(Some("id")), &problem));
            }
            file.disks.push(disk);
        }
        file.check(&source)?;
        Ok(file)
    }

    /// Gives the settings their meaning.
    fn set(&mut self, source: &Source<'_>) -> Result<(), FileError> {
        let settings = std::mem::take(&mut self.settings);
        for (name, setting) in &settings {
            let wrong = |problem: &str| source.wrong_at(setting.line, problem);
            let takes = || {
                let takes = SETTINGS.iter().find(|(known, _)| known == name);
                let takes = takes.map_or("", |(_, takes)| takes);
                wrong(&format!("`{name}` takes {takes}"))
            };
            let one = || match &setting.values[..] {
                [value] if !value.is_empty() => Ok(value.as_str()),
                _ => Err(takes()),
            };
            let switch = || match one()? {
                "on" | "true" => Ok(true),
                "off" | "false" => Ok(false),
                _ => Err(takes()),
            };
            match name.as_str() {
                "control" => self.places.control = Some(source.resolve(one()?).into()),
                "pidfile" => self.places.pid_file = Some(source.resolve(one()?).into()),
                "images" => {
                    if setting.values.iter().any(String::is_empty) {
                        return Err(takes());
                    }
                    let folders = setting.values.iter().map(|folder| source.resolve(folder).into());
                    self.places.images = folders.collect();
                }
                "metrics" => {
                    let text = one()?;
                    let text = match text.strip_prefix("unix:") {
                        Some(path) if !path.is_empty() => format!("unix:{}", source.resolve(path)),
                        _ => text.to_owned(),
                    };
                    let address = text.parse::<Address>();
                    self.places.metrics = Some(address.map_err(|error| wrong(&chain(&error)))?);
                }
                "restartable" => self.options.restartable = switch()?,
                "sandbox" => self.options.sandbox = switch()?,
                TABLE_CACHE => {
                    let bytes = table_cache_bytes(one()?).map_err(|problem| wrong(&problem))?;
                    self.options.table_cache_bytes = Some(bytes);
                }
                "watchdog" => {
                    let seconds = one()?
                        .parse()
                        .ok()
                        .filter(|seconds| (1..=86_400).contains(seconds));
                    self.options.watchdog = Some(Duration::from_secs(seconds.ok_or_else(takes)?));
                }
                "workers" => {
                    let workers = setting.values.iter().map(|text| text.parse::<SharedWorkers>());
                    let workers = workers.collect::<Result<_, _>>();
                    self.workers = workers.map_err(|error| wrong(&chain(&error)))?;
                }
                // Both together, below.
                _ => _ = one()?,
            }
        }
        self.settings = settings;
        let value = |name: &str| Some(self.settings.get(name)?.values.first()?.as_str());
        let access = Access::parse(value("socket_mode"), value("socket_group"));
        self.options.access = access.map_err(|error| {
            let name = match error {
                AccessError::Mode { .. } => "socket_mode",
                AccessError::Group { .. } => "socket_group",
            };
            source.wrong_at(self.line_of(name), &error.to_string())
        })?;
        Ok(())
    }

    /// Understands a disk.
    fn disk(&self, source: &Source<'_>, mut items: Items, lines: Lines) -> Result<FileDisk, FileError> {
        let wrong = |key: Option<&str>, problem: &str| source.wrong_at(lines.of(key), problem);
        for (key, value) in &mut items {
            if PATHS.contains(&key.as_str()) && !value.is_empty() {
                *value = source.resolve(value);
            }
        }
        let mut take = |wanted: &str| {
            let index = items.iter().position(|(key, _)| key == wanted)?;
            Some(items.swap_remove(index).1)
        };
        let place = match (take("socket"), take("fd")) {
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
        let config = DiskConfig::from_items(pairs(&items)).and_then(|mut config| {
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
        let check = |count: usize| {
            let disks = disks.get(..count).unwrap_or(&disks);
            check_disks(disks, self.places.control.as_deref(), &self.workers, self.options)
        };
        let Err(failure) = check(disks.len()) else {
            return Ok(());
        };
        // The first disk that does not go with those before it.
        let (mut good, mut bad) = (0, disks.len());
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            match check(middle) {
                Ok(()) => good = middle,
                Err(_) => bad = middle,
            }
        }
        let failure = check(bad).err().unwrap_or(failure);
        let disk = bad.checked_sub(1).and_then(|index| self.disks.get(index));
        let line = disk.map_or_else(|| self.line_of("control"), |disk| disk.lines.table);
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
            places: self.places.clone(),
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
        for (name, _) in SETTINGS.into_iter().filter(|&(name, _)| name != TABLE_CACHE) {
            let values = |file: &Self| file.settings.get(name).map(|setting| setting.values.clone());
            let (was, is) = (values(before), values(self));
            if was != is {
                let was = was.map_or_else(|| "its default".to_owned(), |values| values.join(", "));
                return Err(self.wrong(
                    self.line_of(name),
                    format!(
                        "`{name}` cannot change while the server runs; expected {was}, as before, or a new server (--takeover)"
                    ),
                ));
            }
        }
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The folders that have to be readable for the file to be read again: its own and, if it is a link, that of its target.
    pub(super) fn folders(&self) -> Vec<PathBuf> {
        let target = std::fs::canonicalize(&self.path).ok();
        let paths = target.iter().chain([&self.path]);
        paths
            .filter_map(|path| path.parent())
            .map(Path::to_owned)
            .collect()
    }

    /// Returns the line of a setting, or the first.
    fn line_of(&self, name: &str) -> usize {
        self.settings.get(name).map_or(1, |setting| setting.line)
    }

    /// Returns what is wrong with `key` of a disk, or with the disk.
    pub(super) fn wrong_disk(&self, disk: &FileDisk, key: Option<&str>, problem: String) -> FileError {
        self.wrong(disk.lines.of(key), problem)
    }

    fn wrong(&self, line: usize, problem: String) -> FileError {
        FileError::Line {
            path: self.path.clone(),
            line,
            problem,
        }
    }
}

/// Keys with their values as texts.
type Items = Vec<(String, String)>;

fn pairs(items: &Items) -> impl Iterator<Item = (&str, &str)> {
    items.iter().map(|(key, value)| (key.as_str(), value.as_str()))
}

fn unknown(name: &str) -> String {
    let settings = SETTINGS.map(|(name, _)| name).join(", ");
    format!("unknown setting `{name}`; expected one of {settings}, or [[disk]] or [[rate_limit_group]]")
}

/// The text that is understood, to find the lines of what is wrong.
struct Source<'a> {
    path: &'a Path,
    /// The places of the line ends.
    newlines: Vec<usize>,
}

impl Source<'_> {
    fn line(&self, at: Range<usize>) -> usize {
        1 + self.newlines.partition_point(|&newline| newline < at.start)
    }

    fn wrong(&self, at: Range<usize>, problem: String) -> FileError {
        self.wrong_at(self.line(at), &problem)
    }

    fn wrong_at(&self, line: usize, problem: &str) -> FileError {
        // The errors of values begin with the option that a command line would have.
        let options = ["--disk: ", "--rate-limit-group: ", "--"];
        let bare = options.iter().find_map(|option| problem.strip_prefix(option));
        FileError::Line {
            path: self.path.to_owned(),
            line,
            problem: bare.unwrap_or(problem).replace("--disk ", "disk "),
        }
    }

    /// Returns a path that starts at the file's folder, if it is relative.
    fn resolve(&self, path: &str) -> String {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let resolved = folder.join(path);
        resolved.to_str().unwrap_or(path).to_owned()
    }

    /// Returns the values of a setting: one, or those of an array.
    fn texts(&self, name: &str, takes: &str, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, FileError> {
        let values = match value.get_ref() {
            DeValue::Array(array) => array.iter().map(|value| scalar(value.get_ref())).collect(),
            one => scalar(one).map(|text| vec![text]),
        };
        values.ok_or_else(|| self.wrong(value.span(), format!("`{name}` takes {takes}")))
    }

    /// Returns the tables of an array, each with its lines.
    fn tables(&self, name: &str, value: &Spanned<DeValue<'_>>) -> Result<Vec<(Items, Lines)>, FileError> {
        let wrong = || {
            self.wrong(
                value.span(),
                format!("`{name}` is no array of tables; expected [[{name}]]"),
            )
        };
        let array = value.get_ref().as_array().ok_or_else(wrong)?;
        let table = |table: &Spanned<DeValue<'_>>| {
            let keys = table.get_ref().as_table().ok_or_else(wrong)?;
            let mut items = Vec::new();
            let mut lines = Lines {
                table: self.line(table.span()),
                keys: BTreeMap::new(),
            };
            for (key, value) in keys {
                let name = key.get_ref().to_string();
                lines.keys.insert(name.clone(), self.line(key.span()));
                let text = scalar(value.get_ref()).ok_or_else(|| {
                    let problem = format!(
                        "the value of `{name}` is neither text, nor a whole number, nor true or false"
                    );
                    self.wrong(value.span(), problem)
                })?;
                items.push((name, text));
            }
            Ok((items, lines))
        };
        array.iter().map(table).collect()
    }
}

/// Returns a value as a command line has it.
fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Boolean(true) => Some("on".to_owned()),
        DeValue::Boolean(false) => Some("off".to_owned()),
        DeValue::Integer(number) if number.radix() == 10 => Some(number.as_str().to_owned()),
        DeValue::Integer(number) => {
            let number = i64::from_str_radix(number.as_str(), number.radix());
            number.ok().map(|number| number.to_string())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
