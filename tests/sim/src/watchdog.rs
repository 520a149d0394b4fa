//! Ends the process when a run makes no progress: a lock held across an await stops the thread it is on. Names the run
//! in which an assertion fails.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// The longest that one run may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The exit code of a process that was ended.
pub const STUCK: i32 = 3;

type Beats = Mutex<HashMap<ThreadId, (Instant, String)>>;

/// Watches over the runs of a process until it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    beats: Arc<Beats>,
}

impl Watchdog {
    /// Starts to watch.
    #[must_use]
    pub fn start() -> Self {
        let beats: Arc<Beats> = Arc::default();
        let watched = Arc::downgrade(&beats);
        std::thread::spawn(move || watch(&watched));
        name_runs_that_panic(&beats);
        Self { beats }
    }

    /// This thread begins with something.
    pub fn beat(&self, what: impl FnOnce() -> String) {
        let mut beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        beats.insert(std::thread::current().id(), (Instant::now(), what()));
    }

    /// This thread has nothing more to do.
    pub fn done(&self) {
        let mut beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        beats.remove(&std::thread::current().id());
    }
}

/// Has a panic's message followed by the run that this thread was in.
#[expect(clippy::print_stderr, reason = "the last words of a process")]
fn name_runs_that_panic(beats: &Arc<Beats>) {
    let beats = Arc::downgrade(beats);
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        let Some(beats) = beats.upgrade() else { return };
        let Ok(beats) = beats.try_lock() else { return };
        if let Some((_, what)) = beats.get(&std::thread::current().id()) {
            eprintln!("FAILED: {what}: a panic");
        }
    }));
}

#[expect(clippy::print_stderr, reason = "the last words of a process")]
fn watch(beats: &Weak<Beats>) {
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let Some(beats) = beats.upgrade() else { return };
        let beats = beats.lock().unwrap_or_else(PoisonError::into_inner);
        let stuck = beats.values().find(|beat| beat.0.elapsed() > patience());
        if let Some((_, what)) = stuck {
            eprintln!("FAILED: {what} does not end: a thread waits for itself");
            std::process::exit(STUCK);
        }
    }
}

/// `RINGDISK_SIM_PATIENCE`, in seconds, or the default.
fn patience() -> Duration {
    let asked = std::env::var("RINGDISK_SIM_PATIENCE").ok();
    asked
        .and_then(|text| text.parse().ok())
        .map_or(PATIENCE, Duration::from_secs)
}
