//! `--workers`: threads that the queues of all disks share, and the CPUs they run on.
//!
//! ```text
//! --workers 4                 four, on any CPU
//! --workers 2@node0 2@node1   two on the CPUs of each NUMA node
//! --workers 3@0-2,8           three on these CPUs
//! ```

use std::fs;
use std::io;
use std::str::FromStr;

use block::worker::{FailureHook, StartHook, StartWorkerError, WorkerConfig, WorkerPool};

use crate::disk_config::{DiskConfig, cpu_list};

/// The most workers of one place.
const WORKERS_MAX: u16 = 1024;

/// The least and the most ops that a shared worker has room for. Beyond them requests wait for a free slot.
const DEPTHS: (usize, usize) = (256, 8192);

/// The room for ops that a queue brings along: it also decides for how many files a ring has places.
const DEPTH_OF_QUEUE: usize = 8;

/// Workers that share a set of CPUs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SharedWorkers {
    count: u16,
    /// Empty for all.
    cpus: Vec<usize>,
}

/// A value of `--workers` that is none.
#[derive(Debug, thiserror::Error)]
pub enum WorkersError {
    /// The number is none, or out of range.
    #[error("`{0}` is no number of workers; expected 1 to {WORKERS_MAX}")]
    Count(String),
    /// The CPUs are none.
    #[error("`{0}` names no CPUs; expected a list such as 0-3,8, or a NUMA node such as node0")]
    Cpus(String),
    /// The machine does not say which CPUs the node has.
    #[error("cannot find the CPUs of NUMA node `{node}`")]
    Node {
        /// The node's name.
        node: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl FromStr for SharedWorkers {
    type Err = WorkersError;

    fn from_str(text: &str) -> Result<Self, WorkersError> {
        let (count, place) = text
            .split_once('@')
            .map_or((text, None), |(count, place)| (count, Some(place)));
        let is_plain = !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
        let number = count.parse().ok();
        let number = number.filter(|number| is_plain && (1..=WORKERS_MAX).contains(number));
        Ok(Self {
            count: number.ok_or_else(|| WorkersError::Count(count.to_owned()))?,
            cpus: place.map(cpus_of).transpose()?.unwrap_or_default(),
        })
    }
}

/// The CPUs of a list or of a NUMA node.
fn cpus_of(place: &str) -> Result<Vec<usize>, WorkersError> {
    let is_node = |number: &str| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let list = if place.strip_prefix("node").is_some_and(is_node) {
        let path = format!("/sys/devices/system/node/{place}/cpulist");
        fs::read_to_string(path).map_err(|source| WorkersError::Node {
            node: place.to_owned(),
            source,
        })?
    } else {
        place.to_owned()
    };
    cpu_list(&format!("[{}]", list.trim())).ok_or_else(|| WorkersError::Cpus(place.to_owned()))
}

/// Returns the reason why this disk cannot have its queues on shared workers, if there is one.
pub(crate) fn obstacle(disk: &DiskConfig) -> Option<String> {
    let key = if !disk.queue_affinity.is_empty() {
        "queue_affinity"
    } else if disk.poll_us.is_some() {
        "poll_us"
    } else {
        return None;
    };
    let name = disk.name();
    Some(format!(
        "--workers with {key} of disk {name}: it is a setting of a worker that serves one queue; expected one of the two"
    ))
}

/// Starts the workers, which are to serve so many queues together; each calls `hook` first, and `on_failure` if it fails.
///
/// # Errors
///
/// If one of them cannot be started.
pub(super) fn start(
    wanted: &[SharedWorkers],
    queues: usize,
    hook: &StartHook,
    on_failure: &FailureHook,
) -> Result<WorkerPool, StartWorkerError> {
    let all: usize = wanted.iter().map(|workers| usize::from(workers.count)).sum();
    let (least, most) = DEPTHS;
    let depth = (queues.div_ceil(all.max(1)) * DEPTH_OF_QUEUE).clamp(least, most);
    let each = wanted
        .iter()
        .flat_map(|workers| std::iter::repeat_n(workers, workers.count.into()));
    WorkerPool::start(each.enumerate().map(|(index, workers)| WorkerConfig {
        name: format!("worker {index}"),
        depth: u32::try_from(depth).unwrap_or(u32::MAX),
        cpus: workers.cpus.clone(),
        on_start: Some(hook.clone()),
        on_failure: Some(on_failure.clone()),
        ..WorkerConfig::default()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_a_number_and_perhaps_cpus() {
        let parse = |text: &str| {
            text.parse::<SharedWorkers>()
                .map(|found| (found.count, found.cpus))
        };
        assert_eq!(parse("4").expect("a number"), (4, vec![]));
        assert_eq!(parse("3@0-2,8").expect("CPUs"), (3, vec![0, 1, 2, 8]));
        for (wrong, reason) in [
            ("", "`` is no number of workers; expected 1 to 1024"),
            ("0", "`0` is no number of workers; expected 1 to 1024"),
            ("+1", "`+1` is no number of workers; expected 1 to 1024"),
            ("1025", "`1025` is no number of workers; expected 1 to 1024"),
            (
                "2@",
                "`` names no CPUs; expected a list such as 0-3,8, or a NUMA node such as node0",
            ),
            (
                "2@3-1",
                "`3-1` names no CPUs; expected a list such as 0-3,8, or a NUMA node such as node0",
            ),
            (
                "2@nodes",
                "`nodes` names no CPUs; expected a list such as 0-3,8, or a NUMA node such as node0",
            ),
            ("2@node99999", "cannot find the CPUs of NUMA node `node99999`"),
        ] {
            assert_eq!(
                parse(wrong).expect_err("no workers").to_string(),
                reason,
                "{wrong}"
            );
        }
    }
}
