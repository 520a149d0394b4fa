//! Compaction of the image of a disk that is served, in the background, beside the disk's requests.
//!
//! A thread of its own has the engine compact the image; the engine says where it is after each step, and is told there to end.
//!
//! Invariant: a disk has at most one compaction, and its image is not closed before that has ended.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use qcow::{CompactOptions, CompactProgress, Compacted};
use serde_json::{Value, json};

use super::ServedDisk;
use crate::image::compact;

/// The compactions of one disk: the one under way, or the last one.
#[derive(Debug, Default)]
pub(crate) struct Compactions {
    latest: Mutex<Latest>,
    /// Read-locked while the image as a whole is changed: no compaction begins then.
    changes: RwLock<()>,
}

#[derive(Debug, Default)]
struct Latest {
    state: State,
    is_stop_asked: bool,
    /// The image is about to be closed, or is.
    is_closed: bool,
    rate: Option<u64>,
    progress: CompactProgress,
}

#[derive(Debug, Default)]
enum State {
    /// There was none yet.
    #[default]
    None,
    Running,
    Ended(Result<Compacted, String>),
}

impl Compactions {
    /// Keeps compactions from beginning, until the guard is dropped, for a change of the image as a whole. Returns `None` while
    /// one is under way.
    pub(super) fn keep_off(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let guard = self.changes.read();
        (!matches!(self.latest.lock().state, State::Running)).then_some(guard)
    }

    /// Asks the one under way to end, and returns true if there is one.
    fn stop(&self) -> bool {
        let mut latest = self.latest.lock();
        latest.is_stop_asked = true;
        matches!(latest.state, State::Running)
    }

    /// Asks the one under way to end, and lets none begin until [`Compactions::open`].
    pub(super) fn close(&self) {
        let mut latest = self.latest.lock();
        (latest.is_stop_asked, latest.is_closed) = (true, true);
    }

    /// Lets compactions begin.
    pub(super) fn open(&self) {
        self.latest.lock().is_closed = false;
    }

    /// Begins one.
    ///
    /// # Errors
    ///
    /// The reason why none can be under way now.
    fn begin(&self, rate: Option<u64>) -> Result<(), &'static str> {
        let Some(_alone) = self.changes.try_write() else {
            return Err("its image is being changed; try again when that has ended");
        };
        let mut latest = self.latest.lock();
        match latest.state {
            _ if latest.is_closed => return Err("its image is being closed"),
            State::Running => return Err("it is being compacted already"),
            _ => {}
        }
        *latest = Latest {
            state: State::Running,
            rate,
            ..Latest::default()
        };
        Ok(())
    }

    /// Notes the progress. Returns whether to go on.
    fn note(&self, progress: &CompactProgress) -> ControlFlow<()> {
        let mut latest = self.latest.lock();
        latest.progress = *progress;
        match latest.is_stop_asked {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn end(&self, result: Result<Compacted, String>) {
        self.latest.lock().state = State::Ended(result);
    }

    /// Returns the latest one as answers show it; `None` if there was none.
    pub(super) fn describe(&self) -> Option<Value> {
        let latest = self.latest.lock();
        let CompactProgress {
            moved_bytes,
            left_bytes,
        } = latest.progress;
        let mut shown = json!({"moved": moved_bytes});
        let state = match &latest.state {
            State::None => return None,
            State::Running => {
                shown["left"] = left_bytes.into();
                if latest.is_stop_asked {
                    "stopping"
                } else {
                    "running"
                }
            }
            State::Ended(Ok(compacted)) => {
                shown["before"] = compacted.before_bytes.into();
                shown["after"] = compacted.after_bytes.into();
                let fixed = compacted.fixed.iter();
                let fixed =
                    fixed.map(|fixed| json!({"clusters": fixed.count, "reason": fixed.reason.to_string()}));
                shown["fixed"] = fixed.collect::<Vec<_>>().into();
                if compacted.is_stopped { "stopped" } else { "done" }
            }
            State::Ended(Err(error)) => {
                shown["error"] = error.as_str().into();
                "failed"
            }
        };
        shown["state"] = state.into();
        if let Some(rate) = latest.rate {
            shown["rate"] = rate.into();
        }
        Some(shown)
    }
}

impl ServedDisk {
    /// Starts a compaction of the image in the background.
    ///
    /// # Errors
    ///
    /// If the image is not one that can be compacted, or is being compacted.
    pub(crate) fn compact(disk: &Arc<Self>, rate: Option<u64>) -> Result<Value, String> {
        let failed = |error: &str| -> String { format!("cannot compact {}: {error}", disk.label()) };
        if rate == Some(0) {
            return Err(failed("rate is 0; expected at least one byte in a second"));
        }
        // What keeps it from beginning is the answer; whatever happens later is in its state.
        disk.with_image("can be compacted", |image| {
            let refused = image.with(|image| image.compact_refusal());
            match refused {
                Some(None) => Ok(()),
                Some(Some(error)) => Err(failed(&crate::error::chain(&error))),
                None => Err(failed("the image is closed")),
            }
        })?;
        disk.compactions.begin(rate).map_err(failed)?;
        let compacting = Arc::clone(disk);
        let thread = std::thread::Builder::new().name("compact".to_owned());
        let started = thread.spawn(move || compacting.run_compaction(rate));
        if let Err(error) = started {
            let error = failed(&error.to_string());
            disk.compactions.end(Err(error.clone()));
            return Err(error);
        }
        Ok(json!({"state": "running"}))
    }

    /// Compacts the image on this thread.
    fn run_compaction(&self, rate: Option<u64>) {
        let options = CompactOptions { rate };
        let compact = || {
            self.with_image("can be compacted", |image| {
                image.run(async |disk, cx| {
                    disk.compact(cx, &options, |progress| self.compactions.note(progress))
                        .await
                })
            })
        };
        // A fault of ours must not leave the disk as one that is being compacted for ever.
        let compacted = catch_unwind(AssertUnwindSafe(compact))
            .unwrap_or_else(|_| Err("the compaction has panicked; the log says where".to_owned()));
        match &compacted {
            Ok(done) => {
                let result = compact::describe(done);
                tracing::info!(event = "compacted", disk = self.label(), result, "compacted");
            }
            Err(error) => tracing::warn!(
                event = "compaction-failed",
                disk = self.label(),
                error,
                "the compaction failed"
            ),
        }
        self.compactions.end(compacted);
    }

    /// Returns the state of the latest compaction.
    pub(crate) fn compact_status(&self) -> Result<Value, String> {
        Ok(self
            .compactions
            .describe()
            .unwrap_or_else(|| json!({"state": "none"})))
    }

    /// Asks the compaction under way to end after its step.
    ///
    /// # Errors
    ///
    /// If none is under way.
    pub(crate) fn compact_stop(&self) -> Result<Value, String> {
        match self.compactions.stop() {
            true => Ok(json!({"state": "stopping"})),
            false => Err(format!("{} is not being compacted", self.label())),
        }
    }
}
