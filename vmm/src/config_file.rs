//! The common parts of configuration files of `ringdisk serve`: TOML with settings, which have the names of options, and tables.
//!
//! ```toml
//! control = "/run/ringdisk/disks.control"
//! images = ["/srv/images"]
//!
//! [[rate_limit_group]]
//! id = "slow"
//! ops_size = 500
//! ops_refill_time = 1000
//!
//! [[disk]]                      # or [[device]]: what is served
//! path = "/srv/images/a.qcow2"
//! ```
//!
//! A value is text, a whole number, true or false. A relative path starts at the file's folder. `vhost_user::file` and `ublk::file` say
//! what the settings and tables mean; docs/howto-serve.md is the reference.
//!
//! Invariant: a file with anything wrong in it is refused as a whole, and the first wrong line named.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::disk_config::{DiskConfig, table_cache_bytes};
use crate::error::chain;
use crate::metrics::Address;

mod follow;

pub(crate) use follow::{NO_FILE, first_wrong, folders, follow, followed};

/// The most bytes that a file can have.
pub(crate) const BYTES_MAX: u64 = 16 << 20;

/// Names of settings, with their values as an error says them.
pub(crate) type Known = &'static [(&'static str, &'static str)];

/// The settings that files of every kind can have.
const SHARED: Known = &[
    ("control", "the path of a socket"),
    ("images", "the path of a folder, or several in an array"),
    ("metrics", "unix:PATH or 127.0.0.1:PORT"),
    ("pidfile", "the path of a file"),
    ("sandbox", "true or false"),
    (TABLE_CACHE, "a size of 1M or more"),
];

/// The setting that can change while the server runs.
const TABLE_CACHE: &str = "table_cache";

/// Keys of tables whose value is a path.
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

/// Returns the text of the file at `path`.
///
/// # Errors
///
/// [`FileError`], which names it.
pub(crate) fn read(path: &Path) -> Result<String, FileError> {
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
    Ok(text)
}

/// Returns true if the `text` of the file at `path` has tables of `kind`, or an empty array of them.
///
/// # Errors
///
/// If it also has those of the `other` kind.
pub(crate) fn is_of(kind: Kind, other: Kind, path: &Path, text: &str) -> Result<bool, FileError> {
    // What is no TOML is told by whoever parses it.
    let Ok(table) = DeTable::parse(text) else {
        return Ok(false);
    };
    let key = |kind: Kind| table.get_ref().keys().find(|key| key.get_ref() == kind.table);
    let (Some(one), Some(two)) = (key(kind), key(other)) else {
        return Ok(key(kind).is_some());
    };
    let later = one.span().start.max(two.span().start);
    let line = 1 + text.bytes().take(later).filter(|&byte| byte == b'\n').count();
    let (kind, other) = (kind.table, other.table);
    let problem = format!(
        "a file has either [[{other}]] or [[{kind}]]; expected a file for each, as each has its own server"
    );
    Err(wrong_line(path, line, problem))
}

/// A kind of configuration file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// The name of the tables of what is served.
    pub(crate) table: &'static str,
    /// The settings that only this kind has.
    pub(crate) settings: Known,
}

impl Kind {
    fn known(self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        SHARED.iter().chain(self.settings)
    }

    fn unknown(self, name: &str) -> String {
        let mut settings: Vec<&str> = self.known().map(|(name, _)| *name).collect();
        settings.sort_unstable();
        let (settings, table) = (settings.join(", "), self.table);
        format!(
            "unknown setting `{name}`; expected one of {settings}, or [[{table}]] or [[rate_limit_group]]"
        )
    }
}

/// A file whose settings and tables are told apart, but not understood.
pub(crate) struct Document<'a> {
    pub(crate) source: Source<'a>,
    pub(crate) settings: Settings,
    pub(crate) groups: Vec<Table>,
    /// The tables of what is served.
    pub(crate) tables: Vec<Table>,
}

impl<'a> Document<'a> {
    /// Tells the parts of `text` apart, that of the file at `path`.
    ///
    /// # Errors
    ///
    /// [`FileError::Line`].
    pub(crate) fn parse(path: &'a Path, text: &str, kind: Kind) -> Result<Self, FileError> {
        let newlines = text.bytes().enumerate().filter(|&(_, byte)| byte == b'\n');
        let source = Source {
            path,
            newlines: newlines.map(|(at, _)| at).collect(),
        };
        let table = DeTable::parse(text).map_err(|error| {
            let at = error.span().unwrap_or_default();
            source.wrong(at, error.message().trim_end().replace('\n', "; "))
        })?;
        let mut document = Self {
            source,
            settings: Settings {
                kind,
                values: BTreeMap::new(),
            },
            groups: Vec::new(),
            tables: Vec::new(),
        };
        let source = &document.source;
        for (key, value) in table.get_ref() {
            match key.get_ref().as_ref() {
                name if name == kind.table => document.tables = source.tables(name, value)?,
                name @ "rate_limit_group" => document.groups = source.tables(name, value)?,
                name => {
                    let Some((_, takes)) = kind.known().find(|(known, _)| *known == name) else {
                        return Err(source.wrong(key.span(), kind.unknown(name)));
                    };
                    let values = source.texts(name, takes, value)?;
                    let line = source.line(key.span());
                    let settings = &mut document.settings.values;
                    settings.insert(name.to_owned(), Setting { values, line });
                }
            }
        }
        Ok(document)
    }
}

/// A value of the file.
#[derive(Clone, Debug)]
struct Setting {
    values: Vec<String>,
    line: usize,
}

/// The settings of a file, as texts.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    kind: Kind,
    values: BTreeMap<String, Setting>,
}

impl Settings {
    /// The line of a setting, or the first.
    pub(crate) fn line_of(&self, name: &str) -> usize {
        self.values.get(name).map_or(1, |setting| setting.line)
    }

    /// The error of a setting with a value that it does not take.
    pub(crate) fn takes(&self, source: &Source<'_>, name: &str) -> FileError {
        let takes = self.kind.known().find(|(known, _)| *known == name);
        let takes = takes.map_or("", |(_, takes)| takes);
        source.wrong_at(self.line_of(name), &format!("`{name}` takes {takes}"))
    }

    /// All values of a setting.
    pub(crate) fn all(&self, name: &str) -> &[String] {
        self.values.get(name).map_or(&[], |setting| &setting.values)
    }

    /// The value of a setting that has one.
    ///
    /// # Errors
    ///
    /// If it has several, or an empty one.
    pub(crate) fn one(&self, source: &Source<'_>, name: &str) -> Result<Option<&str>, FileError> {
        match self.values.get(name).map(|setting| &setting.values[..]) {
            None => Ok(None),
            Some([value]) if !value.is_empty() => Ok(Some(value)),
            Some(_) => Err(self.takes(source, name)),
        }
    }

    /// The value of a setting that is on or off.
    ///
    /// # Errors
    ///
    /// If it is neither.
    pub(crate) fn switch(&self, source: &Source<'_>, name: &str) -> Result<Option<bool>, FileError> {
        match self.one(source, name)? {
            None => Ok(None),
            Some("on" | "true") => Ok(Some(true)),
            Some("off" | "false") => Ok(Some(false)),
            Some(_) => Err(self.takes(source, name)),
        }
    }

    /// The value of a setting that `parse` understands.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub(crate) fn parsed<T>(
        &self,
        source: &Source<'_>,
        name: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, FileError> {
        let text = self.one(source, name)?;
        text.map(|text| parse(text).ok_or_else(|| self.takes(source, name)))
            .transpose()
    }

    /// Fails if a setting that is fixed differs from what it was when the server started, which had `before`. The file is at `path`.
    ///
    /// # Errors
    ///
    /// [`FileError::Line`].
    pub(crate) fn check_unchanged(&self, before: &Self, path: &Path) -> Result<(), FileError> {
        let fixed = self.kind.known().filter(|&&(name, _)| name != TABLE_CACHE);
        for (name, _) in fixed {
            let (was, is) = (before.all(name), self.all(name));
            if was != is {
                let was = if was.is_empty() {
                    "its default".to_owned()
                } else {
                    was.join(", ")
                };
                let problem = format!(
                    "`{name}` cannot change while the server runs; expected {was}, as before, or a new server (--takeover)"
                );
                return Err(wrong_line(path, self.line_of(name), problem));
            }
        }
        Ok(())
    }
}

/// The meaning of the settings that every kind of file has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shared {
    pub(crate) control: Option<PathBuf>,
    pub(crate) images: Vec<PathBuf>,
    pub(crate) metrics: Option<Address>,
    pub(crate) pid_file: Option<PathBuf>,
    pub(crate) sandbox: bool,
    /// The bytes that the tables of all images may take in memory together, if they are bounded.
    pub(crate) table_cache_bytes: Option<u64>,
}

impl Shared {
    /// Gives the settings their meaning.
    ///
    /// # Errors
    ///
    /// [`FileError::Line`].
    pub(crate) fn of(settings: &Settings, source: &Source<'_>) -> Result<Self, FileError> {
        let wrong = |name: &str, problem: &str| source.wrong_at(settings.line_of(name), problem);
        let path = |name| {
            Ok(settings
                .one(source, name)?
                .map(|text| source.resolve(text).into()))
        };
        let images = settings.all("images");
        if images.iter().any(String::is_empty) {
            return Err(settings.takes(source, "images"));
        }
        let metrics = settings.one(source, "metrics")?.map(|text| {
            let text = match text.strip_prefix("unix:") {
                Some(path) if !path.is_empty() => format!("unix:{}", source.resolve(path)),
                _ => text.to_owned(),
            };
            let address = text.parse::<Address>();
            address.map_err(|error| wrong("metrics", &chain(&error)))
        });
        let cache = settings
            .one(source, TABLE_CACHE)?
            .map(table_cache_bytes)
            .transpose();
        Ok(Self {
            control: path("control")?,
            images: images
                .iter()
                .map(|folder| source.resolve(folder).into())
                .collect(),
            metrics: metrics.transpose()?,
            pid_file: path("pidfile")?,
            sandbox: settings.switch(source, "sandbox")?.unwrap_or(true),
            table_cache_bytes: cache.map_err(|problem| wrong(TABLE_CACHE, &problem))?,
        })
    }
}

/// A table of the file, such as a `[[disk]]`.
pub(crate) struct Table {
    /// Its keys with their values, in the file's order. Paths are from the root.
    items: Vec<(String, String)>,
    pub(crate) lines: Lines,
}

impl Table {
    /// Its keys with their values.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.items
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Removes a key, and returns its value.
    pub(crate) fn take(&mut self, wanted: &str) -> Option<String> {
        let index = self.items.iter().position(|(key, _)| key == wanted)?;
        Some(self.items.remove(index).1)
    }
}

/// The lines of a table's keys, and its own.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    table: usize,
    keys: BTreeMap<String, usize>,
}

impl Lines {
    /// The line of the table.
    pub(crate) fn table(&self) -> usize {
        self.table
    }

    /// The line of `key`, or else of the table.
    pub(crate) fn of(&self, key: Option<&str>) -> usize {
        let line = key.and_then(|key| self.keys.get(key));
        line.copied().unwrap_or(self.table)
    }
}

/// Names of disks that no other disk of the file may have.
#[derive(Default)]
pub(crate) struct Names(HashMap<String, usize>);

impl Names {
    /// Adds the name of a disk.
    ///
    /// # Errors
    ///
    /// If another has it.
    pub(crate) fn add(
        &mut self,
        disk: &DiskConfig,
        lines: &Lines,
        source: &Source<'_>,
    ) -> Result<(), FileError> {
        let name = disk.name();
        match self.0.insert(name.clone(), lines.table) {
            None => Ok(()),
            Some(other) => Err(source.wrong_at(
                lines.of(Some("id")),
                &format!("the disk of line {other} is called {name}, too; expected another `id`"),
            )),
        }
    }
}

/// The error of a line of the file at `path`.
pub(crate) fn wrong_line(path: &Path, line: usize, problem: String) -> FileError {
    FileError::Line {
        path: path.to_owned(),
        line,
        problem,
    }
}

/// The text that is understood, to find the lines of what is wrong.
pub(crate) struct Source<'a> {
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

    /// The error of a line.
    pub(crate) fn wrong_at(&self, line: usize, problem: &str) -> FileError {
        // The errors of values begin with the option that a command line would have.
        let options = ["--disk: ", "--rate-limit-group: ", "--"];
        let bare = options.iter().find_map(|option| problem.strip_prefix(option));
        wrong_line(
            self.path,
            line,
            bare.unwrap_or(problem).replace("--disk ", "disk "),
        )
    }

    /// Returns a path that starts at the file's folder, if it is relative.
    pub(crate) fn resolve(&self, path: &str) -> String {
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
    fn tables(&self, name: &str, value: &Spanned<DeValue<'_>>) -> Result<Vec<Table>, FileError> {
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
                let mut text = scalar(value.get_ref()).ok_or_else(|| {
                    let problem = format!(
                        "the value of `{name}` is neither text, nor a whole number, nor true or false"
                    );
                    self.wrong(value.span(), problem)
                })?;
                if PATHS.contains(&name.as_str()) && !text.is_empty() {
                    text = self.resolve(&text);
                }
                items.push((name, text));
            }
            Ok(Table { items, lines })
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
mod tests {
    use super::*;

    const DISKS: Kind = Kind {
        table: "disk",
        settings: &[],
    };
    const DEVICES: Kind = Kind {
        table: "device",
        settings: &[],
    };

    #[test]
    fn is_of_tells_kinds_apart_and_refuses_a_file_of_both() {
        let is_of = |text: &str| is_of(DEVICES, DISKS, Path::new("x.toml"), text);
        for (text, expected) in [
            ("", false),
            ("[[disk]]", false),
            ("[[device]]", true),
            ("device = []", true),
            // Whoever parses it says what is wrong.
            ("[[device", false),
        ] {
            assert_eq!(is_of(text).expect("one kind"), expected, "{text}");
        }
        let both = is_of("[[device]]\n\n[[disk]]\n").expect_err("two kinds");
        assert_eq!(
            both.to_string(),
            "x.toml:3: a file has either [[disk]] or [[device]]; expected a file for each, as each has its own server"
        );
    }
}
