//! Records of a server's log, for clients of its control socket that watch it.
//!
//! The library crates log with `tracing` and know no socket. A record with a field `event` is an event of that name, and its other
//! fields are the event's: docs/control.md lists them.
//!
//! Invariant: whoever logs never waits for a client. What does not fit a client's queue is left out and counted, and a client that does
//! not read is disconnected.

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::request::{LogLevel, send_line};

/// The most lines that wait for a client.
const LINES_MAX: usize = 1024;
/// The time between two looks whether a client is still there.
const LOOK_AFTER: Duration = Duration::from_millis(250);
/// The longest time in which a client that watches has to read.
const READ_MAX: Duration = Duration::from_secs(5);

/// The records that a client watches.
#[derive(Clone, Copy, Debug)]
pub(super) enum Watched {
    Events,
    /// Records of this level and graver ones.
    Log(LogLevel),
}

struct Watcher {
    number: u64,
    what: Watched,
    lines: SyncSender<Value>,
    missed: u64,
}

static WATCHERS: Mutex<Vec<Watcher>> = Mutex::new(Vec::new());

/// The lines of one client. Nothing is kept for it when this is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    number: u64,
    lines: Receiver<Value>,
}

impl Watch {
    pub(super) fn begin(what: Watched) -> Self {
        let (sender, lines) = sync_channel(LINES_MAX);
        let mut watchers = WATCHERS.lock();
        let number = watchers.iter().map(|watcher| watcher.number).max().unwrap_or(0) + 1;
        watchers.push(Watcher {
            number,
            what,
            lines: sender,
            missed: 0,
        });
        Self { number, lines }
    }

    /// Sends each line to a client until that goes.
    ///
    /// # Errors
    ///
    /// The connection's error; `TimedOut` if the client does not read.
    pub(super) fn send_to(&self, stream: &UnixStream) -> io::Result<()> {
        loop {
            match self.lines.recv_timeout(LOOK_AFTER) {
                Ok(line) => {
                    if !wait(stream, PollFlags::OUT, READ_MAX)? {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    send_line(stream, &line)?;
                }
                Err(_) if wait(stream, PollFlags::RDHUP, Duration::ZERO)? => return Ok(()),
                Err(_) => {}
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHERS.lock().retain(|watcher| watcher.number != self.number);
    }
}

/// Waits until a socket is ready. Returns false if it is not within the time.
fn wait(stream: &UnixStream, flags: PollFlags, time: Duration) -> io::Result<bool> {
    let until = Instant::now() + time;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(stream, flags)], left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The layer of a log that hands records to who watches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WatchLayer;

impl<S: Subscriber> Layer<S> for WatchLayer {
    fn on_event(&self, record: &Event<'_>, _: Context<'_, S>) {
        let mut watchers = WATCHERS.lock();
        if watchers.is_empty() {
            return;
        }
        let mut fields = Fields::default();
        record.record(&mut fields);
        let level = *record.metadata().level();
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        fields.0.insert("time".to_owned(), json!(time.as_secs_f64()));
        for watcher in watchers.iter_mut() {
            let mut line = fields.0.clone();
            match watcher.what {
                Watched::Events if line.contains_key("event") => drop(line.remove("message")),
                Watched::Log(most) if level <= most.level() => {
                    line.insert("level".to_owned(), level.as_str().to_ascii_lowercase().into());
                    line.insert("target".to_owned(), record.metadata().target().into());
                }
                _ => continue,
            }
            if watcher.missed > 0 {
                line.insert("missed".to_owned(), watcher.missed.into());
            }
            match watcher.lines.try_send(line.into()) {
                Ok(()) => watcher.missed = 0,
                Err(_) => watcher.missed += 1,
            }
        }
    }
}

impl LogLevel {
    fn level(self) -> Level {
        match self {
            Self::Error => Level::ERROR,
            Self::Warn => Level::WARN,
            Self::Info => Level::INFO,
        }
    }
}

/// The fields of a record.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        self.0.insert(field.name().to_owned(), value);
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn records_reach_who_watches_and_wait_for_nobody() {
        let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(WatchLayer));
        let (events, log) = (
            Watch::begin(Watched::Events),
            Watch::begin(Watched::Log(LogLevel::Warn)),
        );
        tracing::info!(event = "test-grown", disk = "data", size = 512_u64, "larger");
        tracing::warn!(held = true, "only a record of watch");
        tracing::info!("one that nobody watches");
        let ours = |watch: &Watch, key: &str, value: &str| {
            // Other tests of this process log as well.
            let mut lines = watch.lines.try_iter();
            lines.find(|line| line[key] == value).expect("a line")
        };
        let event = ours(&events, "event", "test-grown");
        assert_eq!((&event["disk"], &event["size"]), (&"data".into(), &512.into()));
        assert!(event["time"].is_f64() && event["message"].is_null(), "{event}");
        let record = ours(&log, "message", "only a record of watch");
        assert_eq!(
            (&record["level"], &record["held"]),
            (&"warn".into(), &true.into())
        );
        for number in 0..2 * LINES_MAX as u64 {
            tracing::info!(event = "test-many", number);
        }
        assert_eq!(events.lines.try_iter().count(), LINES_MAX);
        tracing::info!(event = "test-last");
        let last = ours(&events, "event", "test-last");
        assert!(last["missed"].as_u64() >= Some(LINES_MAX as u64), "{last}");
    }
}
