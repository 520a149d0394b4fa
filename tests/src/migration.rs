//! A guest that migrates: another QEMU on this machine, with servers of its own, continues it while it runs.
//!
//! Memory and devices go through a socket, as QEMU sends them between hosts. What the guest prints goes on in the same files.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::guest::{Guest, RunningGuest};
use crate::process::GLANCE;
use crate::{Error, Scratch};

/// The longest time of one migration, and of each step of it.
const MIGRATION_MAX: Duration = Duration::from_secs(120);

/// The time that QEMU may let a guest stand still to copy the rest of its memory: long enough for a busy machine, where memory changes
/// faster than it is copied.
const DOWNTIME_MAX: Duration = Duration::from_secs(2);

/// The same where the disks' part of it is to be seen.
const DOWNTIME_SHORT: Duration = Duration::from_millis(10);

/// The time between two looks at what a guest prints, while the time without a line is measured.
const LOOK: Duration = Duration::from_micros(500);

/// The time that it is measured for after a migration.
const AFTER: Duration = Duration::from_millis(300);

/// QEMU's monitor, in its machine protocol (QMP).
struct Monitor {
    path: PathBuf,
    reader: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects to the monitor at `path`, which may have yet to listen.
    fn connect(path: &Path) -> Result<Self, Error> {
        let until = Instant::now() + MIGRATION_MAX;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < until => thread::sleep(GLANCE),
                Err(source) => return Err(failed(path, source)),
            }
        };
        let timeout = stream.set_read_timeout(Some(MIGRATION_MAX));
        timeout.map_err(|source| failed(path, source))?;
        let mut monitor = Self {
            path: path.to_owned(),
            reader: BufReader::new(stream),
        };
        monitor.line()?;
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn line(&mut self) -> Result<Value, Error> {
        let mut line = String::new();
        let read = self.reader.read_line(&mut line);
        read.map_err(|source| failed(&self.path, source))?;
        serde_json::from_str(&line).map_err(|source| failed(&self.path, source.into()))
    }

    /// Has QEMU execute a command, and returns its answer.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        let written = self.reader.get_mut().write_all(line.as_bytes());
        written.map_err(|source| failed(&self.path, source))?;
        loop {
            // Events may come before the answer.
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                let message = format!("{command}: {error}");
                return Err(failed(&self.path, std::io::Error::other(message)));
            }
            if let Some(answer) = answer.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }

    /// Asks until the answer's `field` is `wanted`, and returns that answer.
    fn ask_until(&mut self, command: &str, field: &str, wanted: &str) -> Result<Value, Error> {
        let until = Instant::now() + MIGRATION_MAX;
        loop {
            let answer = self.ask(command, json!({}))?;
            let found = answer.get(field).and_then(Value::as_str).unwrap_or_default();
            if found == wanted {
                return Ok(answer);
            }
            if found == "failed" || Instant::now() >= until {
                let message = format!("{command}: expected {wanted}: {answer}");
                return Err(failed(&self.path, std::io::Error::other(message)));
            }
            thread::sleep(GLANCE);
        }
    }
}

fn failed(path: &Path, source: std::io::Error) -> Error {
    Error::File {
        action: "talk to the monitor of QEMU at",
        path: path.to_owned(),
        source,
    }
}

/// Returns the longest time for which the file at `path` did not grow, from now until it has grown, and for [`AFTER`], after the end; but
/// no more than [`MIGRATION_MAX`].
fn longest_silence(path: &Path, ended: &AtomicBool) -> Duration {
    let length = || std::fs::metadata(path).map_or(0, |facts| facts.len());
    let (mut seen, mut since) = (length(), Instant::now());
    let (mut longest, mut until) = (Duration::ZERO, None);
    while until.is_none_or(|until| Instant::now() < until) {
        thread::sleep(LOOK);
        let now = length();
        longest = longest.max(since.elapsed());
        let has_grown = now != seen;
        if has_grown {
            (seen, since) = (now, Instant::now());
        }
        let is_over = (has_grown && ended.load(Ordering::Relaxed)) || longest > MIGRATION_MAX;
        if until.is_none() && is_over {
            until = Some(Instant::now() + AFTER);
        }
    }
    longest
}

impl RunningGuest {
    /// Has another QEMU continue the guest: one like `to`, which differs from the guest that was started by its servers alone. The QEMU
    /// of before ends. Returns the time for which the guest stood still, as QEMU tells it.
    ///
    /// # Errors
    ///
    /// [`Error`], if the migration fails; the guest is lost then.
    ///
    /// # Panics
    ///
    /// If the guest was started without [`Guest::migrates`].
    pub fn migrate(&mut self, to: &Guest<'_>, scratch: &Scratch, name: &str) -> Result<Duration, Error> {
        self.migrate_in(DOWNTIME_MAX, to, scratch, name)
    }

    /// As [`migrate`](Self::migrate), with this limit of the time to copy the rest of the memory.
    fn migrate_in(
        &mut self,
        downtime: Duration,
        to: &Guest<'_>,
        scratch: &Scratch,
        name: &str,
    ) -> Result<Duration, Error> {
        let from = self.monitor().expect("a guest that migrates");
        let mut source = Monitor::connect(from)?;
        let mut target = self.continued(to, scratch, name)?;
        let mut incoming = Monitor::connect(target.monitor().expect("a guest that migrates"))?;
        let uri = format!("unix:{}", scratch.file(&format!("{name}.migration")).display());
        incoming.ask("migrate-incoming", json!({ "uri": uri }))?;
        let limits = json!({ "max-bandwidth": 1_u64 << 33, "downtime-limit": downtime.as_millis() as u64 });
        source.ask("migrate-set-parameters", limits)?;
        source.ask("migrate", json!({ "uri": uri }))?;
        let done = source.ask_until("query-migrate", "status", "completed")?;
        incoming.ask_until("query-status", "status", "running")?;
        source.ask("quit", json!({}))?;
        std::mem::swap(self, &mut target);
        target.ended_well()?;
        let still = done.get("downtime").and_then(Value::as_u64).unwrap_or_default();
        Ok(Duration::from_millis(still))
    }

    /// As [`migrate`](Self::migrate), of a guest whose script prints all the time, and with little memory that is left to be copied while
    /// it stands still. Returns also the longest time without a word of it.
    ///
    /// # Errors
    ///
    /// As [`migrate`](Self::migrate).
    ///
    /// # Panics
    ///
    /// As [`migrate`](Self::migrate).
    pub fn migrate_watched(
        &mut self,
        to: &Guest<'_>,
        scratch: &Scratch,
        name: &str,
    ) -> Result<(Duration, Duration), Error> {
        let results = self.results().to_owned();
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| longest_silence(&results, &ended));
            let still = self.migrate_in(DOWNTIME_SHORT, to, scratch, name);
            ended.store(true, Ordering::Relaxed);
            let silence = watch.join().expect("it looks at a file only");
            Ok((still?, silence))
        })
    }
}
