//! The state that the lanes of an engine share: one stream of offsets, one count, one clock.
//!
//! A lane is one request after another; as many lanes as the workload is deep keep the depth. All on
//! one thread.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use super::Task;
use crate::histogram::Histogram;
use crate::process;
use crate::workload::{Offsets, Pattern, Sample, Workload};

/// Shared by all lanes of one engine.
#[derive(Debug)]
pub(crate) struct Lanes {
    state: RefCell<State>,
    /// The work of the lanes.
    pub(crate) workload: Workload,
}

#[derive(Debug)]
struct State {
    offsets: Offsets,
    latencies: Histogram,
    ops: u64,
    start: Instant,
    counting_from: Duration,
    stop_at: Duration,
    counting: bool,
    cpu_before: f64,
    result: Option<Sample>,
}

impl Lanes {
    /// For a task whose clock starts now.
    #[must_use]
    pub(crate) fn new(task: &Task) -> Self {
        let workload = task.workload();
        let once = workload.pattern == Pattern::OncePerCluster;
        let warm_up = Duration::from_millis(if once { 0 } else { task.warm_up_ms });
        let state = State {
            offsets: Offsets::new(&workload, 1),
            latencies: Histogram::default(),
            ops: 0,
            start: Instant::now(),
            counting_from: warm_up,
            stop_at: warm_up + Duration::from_millis(task.measure_ms),
            counting: once,
            cpu_before: process::own_cpu_seconds(),
            result: None,
        };
        Self {
            state: RefCell::new(state),
            workload,
        }
    }

    /// The time since the start, in nanoseconds.
    #[must_use]
    pub(crate) fn now_ns(&self) -> u64 {
        self.state.borrow().start.elapsed().as_nanos() as u64
    }

    /// The next offset; `None` when a lane should end.
    #[must_use]
    pub(crate) fn next_offset(&self) -> Option<u64> {
        let mut state = self.state.borrow_mut();
        if state.result.is_some() {
            return None;
        }
        state.offsets.next_offset()
    }

    /// Counts an operation that began at `started_ns` and has ended now. Answers the time.
    pub(crate) fn ended(&self, started_ns: u64) -> u64 {
        let mut state = self.state.borrow_mut();
        let now = state.start.elapsed();
        let now_ns = now.as_nanos() as u64;
        if !state.counting {
            if now >= state.counting_from && state.result.is_none() {
                state.counting = true;
                state.counting_from = now;
                state.cpu_before = process::own_cpu_seconds();
            }
            return now_ns;
        }
        state.ops += 1;
        state.latencies.record(now_ns.saturating_sub(started_ns));
        if now >= state.stop_at {
            if self.workload.pattern == Pattern::OncePerCluster {
                // What was written counts when it has been flushed: only stop starting.
                if state.result.is_none() {
                    state.result = Some(Sample::default());
                }
            } else {
                state.stop(now);
            }
        }
        now_ns
    }

    /// The result, once every lane has ended and, for [`Pattern::OncePerCluster`], the flush too.
    #[must_use]
    pub(crate) fn finish(&self) -> Sample {
        let mut state = self.state.borrow_mut();
        if state.counting {
            let now = state.start.elapsed();
            state.stop(now);
        }
        state.result.unwrap_or_default()
    }
}

impl State {
    fn stop(&mut self, now: Duration) {
        self.counting = false;
        self.result = Some(Sample {
            ops: self.ops,
            seconds: (now - self.counting_from).as_secs_f64(),
            mean_us: self.latencies.mean_us(),
            p99_us: self.latencies.percentile_us(0.99),
            p999_us: self.latencies.percentile_us(0.999),
            longest_us: self.latencies.percentile_us(1.0),
            cpu_seconds: process::own_cpu_seconds() - self.cpu_before,
            resident_mib: process::resident_mib(std::process::id()).unwrap_or_default(),
        });
    }
}
