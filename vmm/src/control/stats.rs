//! Statistics of disks as `ringdisk ctl stats` prints them: what was answered in an interval, by disk and kind of request.

use std::fmt::Write as _;
use std::time::Duration;

use qcow::EngineCounts;
use serde::{Deserialize, Serialize};
use virtio_devices::stats::{DiskSnapshot, KindSnapshot, QueueSnapshot, RequestKind};

/// One disk in the answer to [`Request::Stats`](super::Request::Stats).
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct DiskStatistics {
    /// Its name in requests.
    pub id: String,
    /// Its queues.
    #[serde(flatten)]
    pub disk: DiskSnapshot,
    /// The work of its QCOW2 image's engine since that was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineCounts>,
}

/// The fields of the answer to [`Request::Stats`](super::Request::Stats).
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Statistics {
    /// The disks that this process serves; those of other programs have theirs.
    pub disks: Vec<DiskStatistics>,
}

/// The columns, and how wide they are.
const COLUMNS: [(&str, usize); 8] = [
    ("KIND", 12),
    ("REQ/S", 10),
    ("MIB/S", 9),
    ("ERRORS", 7),
    ("MEAN", 8),
    ("P50", 8),
    ("P99", 8),
    ("P99.9", 8),
];

impl Statistics {
    /// Returns a table of what was answered since `earlier`, `time` before: a line for each disk and kind that had requests.
    #[must_use]
    pub fn table_since(&self, earlier: &Self, time: Duration) -> String {
        let ids = self.disks.iter().map(|disk| disk.id.chars().count());
        let width = ids.max().unwrap_or(0).max("DISK".len());
        let mut text = format!("{:width$} ", "DISK");
        for (name, width) in COLUMNS {
            let _infallible = if name == "KIND" {
                write!(text, " {name:width$}")
            } else {
                write!(text, " {name:>width$}")
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
        for disk in &self.disks {
            let before = earlier.disks.iter().find(|before| before.id == disk.id);
            let before = before.map_or_else(QueueSnapshot::default, |before| before.disk.sum());
            let since = disk.disk.sum().since(&before);
            let active = RequestKind::ALL
                .into_iter()
                .filter(|&kind| since.kind(kind).requests > 0);
            let mut lines: Vec<String> = active.map(|kind| line(kind, since.kind(kind), time)).collect();
            if lines.is_empty() {
                lines.push(" idle".to_owned());
            }
            for line in lines {
                let id: String = disk
                    .id
                    .chars()
                    .map(|c| if c.is_control() { '\u{fffd}' } else { c })
                    .collect();
                text += &format!("{id:width$} {line}\n");
            }
        }
        text
    }
}

/// One kind of requests that were answered in `time`.
fn line(kind: RequestKind, answered: &KindSnapshot, time: Duration) -> String {
    let seconds = time.as_secs_f64().max(1e-9);
    let latency = &answered.latency;
    let cells = [
        kind.name().to_owned(),
        format!("{:.0}", answered.requests as f64 / seconds),
        format!("{:.1}", answered.bytes as f64 / seconds / f64::from(1 << 20)),
        answered.errors.to_string(),
        duration(latency.mean_ns()),
        duration(latency.quantile_ns(0.5)),
        duration(latency.quantile_ns(0.99)),
        duration(latency.quantile_ns(0.999)),
    ];
    let mut text = String::new();
    for (cell, (name, width)) in cells.iter().zip(COLUMNS) {
        text += &match name {
            "KIND" => format!(" {cell:width$}"),
            _ => format!(" {cell:>width$}"),
        };
    }
    text
}

/// Returns a time with three digits and its unit.
fn duration(ns: Option<u64>) -> String {
    match ns {
        None => "-".to_owned(),
        Some(ns @ 0..1_000) => format!("{ns}ns"),
        Some(ns @ 1_000..1_000_000) => format!("{:.1}us", ns as f64 / 1e3),
        Some(ns @ 1_000_000..1_000_000_000) => format!("{:.1}ms", ns as f64 / 1e6),
        Some(ns) => format!("{:.2}s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use virtio_devices::stats::{Latency, LatencyBucket};

    use super::*;

    fn statistics(requests: u64, errors: u64) -> Statistics {
        let read = KindSnapshot {
            requests,
            bytes: requests << 20,
            errors,
            latency: Latency {
                buckets: vec![LatencyBucket {
                    below_ns: 2048,
                    count: requests,
                }],
                sum_ns: 2000 * requests,
            },
        };
        let queue = QueueSnapshot {
            read,
            ..QueueSnapshot::default()
        };
        Statistics {
            disks: vec![
                DiskStatistics {
                    id: "a".to_owned(),
                    disk: DiskSnapshot {
                        queues: vec![queue.clone(), queue],
                    },
                    engine: None,
                },
                DiskStatistics {
                    id: "b\u{1b}[31m".to_owned(),
                    disk: DiskSnapshot::default(),
                    engine: None,
                },
            ],
        }
    }

    #[test]
    fn table_has_rates_of_the_interval_and_sums_of_queues() {
        let table = statistics(300, 3).table_since(&statistics(100, 1), Duration::from_secs(4));
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            lines[1][..6],
            ["a", "read", "100", "100.0", "4", "2.0us"],
            "{table}"
        );
        assert_eq!(lines[1].len(), COLUMNS.len() + 1, "{table}");
        assert_eq!(lines[2], ["b\u{fffd}[31m", "idle"], "{table}");
        let json = serde_json::to_value(statistics(1, 0)).expect("JSON");
        assert_eq!(json["disks"][0]["queues"][1]["read"]["requests"], 1);
        assert_eq!(
            serde_json::from_value::<Statistics>(json).expect("the same"),
            statistics(1, 0)
        );
    }

    #[test]
    fn duration_has_the_unit_that_fits() {
        let all = [None, Some(64), Some(1_500), Some(2_000_000), Some(3_210_000_000)].map(duration);
        assert_eq!(all, ["-", "64ns", "1.5us", "2.0ms", "3.21s"]);
    }
}
