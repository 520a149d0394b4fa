//! The language of a control socket: the requests, and the form of a line.
//!
//! Invariant: a request with a field that it does not have is refused, so that a client's mistake never looks like success.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use block::throttle::RateLimits;

use crate::disk_config::{DiskConfig, DiskConfigError, rate};
use crate::key_value;

/// The version of [`Request::HandOver`] and of what follows its answer. Two servers have to have the same one.
pub const HAND_OVER: u32 = 2;

/// A request to a control socket.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Returns the state and the disks.
    Info {},
    /// Returns all disks.
    DiskList {},
    /// Returns what the queues of one disk, or of all, have counted.
    Stats {
        /// The disk, by its id or, without one, its path; the number of a block device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<String>,
    },
    /// Makes all writes of a disk that were answered before durable.
    Flush {
        /// The disk, by its id or, without one, its path; the number of a block device.
        id: String,
    },
    /// Sends a line for each event from now on, until the client goes.
    Events {},
    /// Sends each record of the log from now on, until the client goes.
    Log {
        /// The least grave records to send.
        #[serde(default)]
        level: LogLevel,
    },
    /// Ends the server in order, as SIGTERM does.
    Stop {},
    /// Stop the guest; when it is answered, its images hold every write that the guest believes done.
    Pause {},
    /// Resumes the guest.
    Resume {},
    /// Presses the power button: the guest is asked to shut down.
    PowerButton {},
    /// Restarts the guest at once.
    Reset {},
    /// Make a disk larger or smaller.
    DiskResize {
        /// The disk, by its id or, without one, its path; the number of a block device.
        id: String,
        /// Its new size in bytes.
        size: u64,
        /// True if it may become smaller: the caller knows that nobody uses what lies past its new end.
        #[serde(default)]
        force: bool,
    },
    /// Set the rate limits of a disk, or tell which it has.
    DiskLimits {
        /// The disk, by its id or, without one, its path; the number of a block device.
        id: String,
        /// The keys bw_… and ops_… of `--disk`: all limits that it has from then on. Absent: it keeps those that it has.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limits: Option<DiskKeys>,
    },
    /// Set the rate limits that the disks of a group share, or tell which they are.
    GroupLimits {
        /// The group, by the id of its `--rate-limit-group`.
        group: String,
        /// As of a disk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limits: Option<DiskKeys>,
    },
    /// Add a disk.
    DiskAdd {
        /// The keys of `--disk`.
        disk: DiskKeys,
        /// The path of the socket to serve it on, of a vhost-user server; a machine and a block device have none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        socket: Option<PathBuf>,
    },
    /// Ask the guest to let a disk go, and close it when it has; delete a block device that nobody uses.
    DiskRemove {
        /// The disk, by its id or, without one, its path; the number of a block device.
        id: String,
    },
    /// Follow the configuration file as it is now.
    Reload {},
    /// Create an internal snapshot of a disk.
    SnapshotCreate {
        /// The disk: its id or, without one, its path; the number of a block device.
        id: String,
        /// The snapshot's name.
        name: String,
    },
    /// List the internal snapshots of a disk.
    SnapshotList {
        /// The disk, as above.
        id: String,
    },
    /// Make a disk what it was when a snapshot was created.
    SnapshotApply {
        /// The disk, as above.
        id: String,
        /// The snapshot, as [`SnapshotSelector::parse`](qcow::SnapshotSelector::parse) reads it.
        snapshot: String,
        /// True if the caller knows that nobody uses the disk.
        #[serde(default)]
        force: bool,
    },
    /// Delete a snapshot of a disk.
    SnapshotDelete {
        /// The disk, as above.
        id: String,
        /// The snapshot, as above.
        snapshot: String,
    },
    /// List the persistent bitmaps of a disk.
    BitmapList {
        /// The disk, as above.
        id: String,
    },
    /// Add a persistent bitmap without bits to a disk.
    BitmapAdd {
        /// The disk, as above.
        id: String,
        /// The bitmap's name.
        name: String,
        /// The number of the disk's bytes that one bit covers; as QEMU chooses it if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        granularity: Option<u64>,
        /// True if it does not record changes yet.
        #[serde(default)]
        disabled: bool,
    },
    /// Remove a bitmap of a disk.
    BitmapRemove {
        /// The disk, as above.
        id: String,
        /// The bitmap.
        name: String,
    },
    /// Clear all bits of a bitmap.
    BitmapClear {
        /// The disk, as above.
        id: String,
        /// The bitmap.
        name: String,
    },
    /// Let a bitmap record changes.
    BitmapEnable {
        /// The disk, as above.
        id: String,
        /// The bitmap.
        name: String,
    },
    /// Let a bitmap stay as it is.
    BitmapDisable {
        /// The disk, as above.
        id: String,
        /// The bitmap.
        name: String,
    },
    /// Set in a bitmap what is set in another one.
    BitmapMerge {
        /// The disk, as above.
        id: String,
        /// The bitmap that changes.
        name: String,
        /// The other one.
        source: String,
    },
    /// Starts to compact a disk's image in the background.
    Compact {
        /// The disk, as above.
        id: String,
        /// The most bytes to move in a second; as many as possible if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rate: Option<u64>,
    },
    /// Returns the state of the compaction of a disk's image.
    CompactStatus {
        /// The disk, as above.
        id: String,
    },
    /// Stops the compaction of a disk's image. What has moved stays moved.
    CompactStop {
        /// The disk, as above.
        id: String,
    },
    /// Hands disks over to the caller, a new server, on this connection; see [`ask_for_disks`](super::ask_for_disks).
    HandOver {
        /// The version of what follows the answer: [`HAND_OVER`].
        version: u32,
        /// The disks, by their places in `disk-list`: absolute paths of sockets, or of block devices.
        disks: Vec<PathBuf>,
        /// The longest time that it may take, in seconds.
        seconds: u64,
        /// True if the server may have others, too, with which it goes on.
        #[serde(default)]
        partly: bool,
    },
}

impl Request {
    /// Returns the request's `command`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Info {} => "info",
            Self::DiskList {} => "disk-list",
            Self::Stats { .. } => "stats",
            Self::Flush { .. } => "flush",
            Self::Events {} => "events",
            Self::Log { .. } => "log",
            Self::Stop {} => "stop",
            Self::Pause {} => "pause",
            Self::Resume {} => "resume",
            Self::PowerButton {} => "power-button",
            Self::Reset {} => "reset",
            Self::DiskResize { .. } => "disk-resize",
            Self::DiskLimits { .. } => "disk-limits",
            Self::GroupLimits { .. } => "group-limits",
            Self::DiskAdd { .. } => "disk-add",
            Self::DiskRemove { .. } => "disk-remove",
            Self::Reload {} => "reload",
            Self::SnapshotCreate { .. } => "snapshot-create",
            Self::SnapshotList { .. } => "snapshot-list",
            Self::SnapshotApply { .. } => "snapshot-apply",
            Self::SnapshotDelete { .. } => "snapshot-delete",
            Self::BitmapList { .. } => "bitmap-list",
            Self::BitmapAdd { .. } => "bitmap-add",
            Self::BitmapRemove { .. } => "bitmap-remove",
            Self::BitmapClear { .. } => "bitmap-clear",
            Self::BitmapEnable { .. } => "bitmap-enable",
            Self::BitmapDisable { .. } => "bitmap-disable",
            Self::BitmapMerge { .. } => "bitmap-merge",
            Self::Compact { .. } => "compact",
            Self::CompactStatus { .. } => "compact-status",
            Self::CompactStop { .. } => "compact-stop",
            Self::HandOver { .. } => "hand-over",
        }
    }
}

/// The gravity of records of a log.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    /// Something failed.
    Error,
    /// Something may be wrong.
    #[default]
    Warn,
    /// All that an operator may want to know.
    Info,
}

/// The keys of `--disk` with their values.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct DiskKeys(BTreeMap<String, Setting>);

/// The value of a key: as text, or in the form that JSON has for it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(untagged)]
enum Setting {
    /// `on` or `off`.
    Switch(bool),
    Number(u64),
    Text(String),
}

impl DiskKeys {
    /// The keys of a `--disk` text.
    ///
    /// # Errors
    ///
    /// As [`DiskConfig::parse`].
    pub fn parse(text: &str) -> Result<Self, DiskConfigError> {
        DiskConfig::parse(text)?;
        Ok(Self::of(key_value::items(text).map_err(DiskConfigError::Syntax)?))
    }

    /// These keys with their values.
    pub(crate) fn of<'a>(items: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let items = items.into_iter();
        Self(
            items
                .map(|(key, value)| (key.to_owned(), Setting::Text(value.to_owned())))
                .collect(),
        )
    }

    /// The keys of a text with rate limits alone; `none` is no limit.
    ///
    /// # Errors
    ///
    /// [`DiskConfigError`], naming the key and what it takes.
    pub fn parse_limits(text: &str) -> Result<Self, DiskConfigError> {
        let text = if text == "none" { "" } else { text };
        let items = match text {
            "" => Vec::new(),
            text => key_value::items(text).map_err(DiskConfigError::Syntax)?,
        };
        rate::parse(items.iter().copied())?;
        Ok(Self::of(items))
    }

    /// The rate limits that they describe, which are all that they describe.
    ///
    /// # Errors
    ///
    /// [`DiskConfigError`], naming the key and what it takes.
    pub(crate) fn limits(&self) -> Result<RateLimits, DiskConfigError> {
        let items = self.items();
        rate::parse(items.iter().map(|(key, value)| (*key, value.as_str())))
    }

    /// The disk that they describe.
    ///
    /// # Errors
    ///
    /// As [`DiskConfig::parse`].
    pub fn config(&self) -> Result<DiskConfig, DiskConfigError> {
        let items = self.items();
        DiskConfig::from_items(items.iter().map(|(key, value)| (*key, value.as_str())))
    }

    /// The `--disk` text of the same keys and values.
    ///
    /// # Errors
    ///
    /// The key whose value no such text can have.
    pub(crate) fn text(&self) -> Result<String, String> {
        let mut texts = Vec::new();
        for (key, value) in self.items() {
            let plain = format!("{key}={value}");
            let forms = [&plain, &format!("{key}=\"{value}\"")];
            let read_back = |text: &&&String| key_value::items(text) == Ok(vec![(key, value.as_str())]);
            let form = forms.iter().find(read_back).ok_or_else(|| {
                format!("{key} has a comma and a quote in its value, {value}; expected one of them at most")
            })?;
            texts.push((*form).clone());
        }
        Ok(texts.join(","))
    }

    /// The keys, with their values as texts.
    fn items(&self) -> Vec<(&str, String)> {
        let text = |setting: &Setting| match setting {
            Setting::Switch(true) => "on".to_owned(),
            Setting::Switch(false) => "off".to_owned(),
            Setting::Number(number) => number.to_string(),
            Setting::Text(text) => text.clone(),
        };
        let items = self.0.iter();
        items
            .map(|(key, setting)| (key.as_str(), text(setting)))
            .collect()
    }
}

/// Sends one JSON object as a line.
pub(super) fn send_line(mut stream: &UnixStream, object: &Value) -> io::Result<()> {
    stream.write_all(format!("{object}\n").as_bytes())
}
