//! The text format of Prometheus, version 0.0.4.
//!
//! A family is its help, its type, and all its samples; each name occurs in one family. What is needed of the format is small,
//! and the tests check the text against its grammar, so no crate writes it.

use std::fmt::Write;

use qcow::EngineCounts;
use virtio_devices::stats::{QueueSnapshot, RequestKind};

use super::DiskReport;
use super::process::Usage;

/// The content type of the text.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The exponents of the smallest and the largest bound of latencies in nanoseconds, as powers of two: about 1 µs and 17 s.
const BOUND_BITS: [u32; 2] = [10, 34];

/// Returns the bounds of latencies that are reported, in nanoseconds: two to each power of two, all of which are bounds of
/// the histograms' buckets.
pub(super) fn bounds_ns() -> impl Iterator<Item = u64> {
    let [first, last] = BOUND_BITS;
    (first..last)
        .flat_map(|bits| [1 << bits, 3 << (bits - 1)])
        .chain([1 << last])
}

/// The text in the making.
struct Text(String);

/// The labels of a sample: names and values.
type Labels<'a> = &'a [(&'static str, &'a str)];

impl Text {
    /// Begins a family.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.put(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    /// Writes a sample.
    fn sample(&mut self, name: &str, labels: Labels<'_>, value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (index, (label, value)) in labels.iter().enumerate() {
            self.put(format_args!("{}{label}=\"", if index == 0 { '{' } else { ',' }));
            for character in value.chars() {
                match character {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    other => self.0.push(other),
                }
            }
            self.0.push('"');
        }
        self.0.push_str(if labels.is_empty() { "" } else { "}" });
        self.put(format_args!(" {value}\n"));
    }

    fn put(&mut self, arguments: std::fmt::Arguments<'_>) {
        // A string takes everything.
        self.0.write_fmt(arguments).unwrap_or_default();
    }
}

/// Nanoseconds as seconds.
struct Seconds(u64);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SECOND: u64 = 1_000_000_000;
        write!(f, "{}.{:09}", self.0 / SECOND, self.0 % SECOND)
    }
}

/// A counter of one kind of requests.
type Counter = (&'static str, &'static str, fn(&QueueSnapshot, RequestKind) -> u64);

const COUNTERS: [Counter; 3] = [
    ("ringdisk_requests_total", "Requests answered.", |queue, kind| {
        queue.kind(kind).requests
    }),
    (
        "ringdisk_request_bytes_total",
        "Bytes that requests have read, written, discarded or zeroed.",
        |queue, kind| queue.kind(kind).bytes,
    ),
    (
        "ringdisk_request_errors_total",
        "Requests answered with an error.",
        |queue, kind| queue.kind(kind).errors,
    ),
];

/// A counter of a disk's engine.
type EngineCounter = (&'static str, &'static str, fn(&EngineCounts) -> u64);

const ENGINE: [EngineCounter; 6] = [
    (
        "ringdisk_l2_slices_read_total",
        "Slices of L2 tables that were not in the cache.",
        |counts| counts.l2_slices_read,
    ),
    (
        "ringdisk_refcount_slices_read_total",
        "Slices of refcount blocks that were not in the cache.",
        |counts| counts.refcount_slices_read,
    ),
    (
        "ringdisk_clusters_allocated_total",
        "Host clusters allocated, for data and tables.",
        |counts| counts.clusters_allocated,
    ),
    (
        "ringdisk_clusters_freed_total",
        "Host clusters freed.",
        |counts| counts.clusters_freed,
    ),
    (
        "ringdisk_flush_rounds_total",
        "Rounds that made changes durable.",
        |counts| counts.flush_rounds,
    ),
    (
        "ringdisk_clusters_inflated_total",
        "Compressed clusters read.",
        |counts| counts.clusters_inflated,
    ),
];

/// Returns the labels of a disk.
fn labels(disk: &DiskReport) -> Vec<(&'static str, &str)> {
    let labels = disk.labels.iter();
    labels.map(|(name, value)| (*name, value.as_str())).collect()
}

/// Returns the statistics of disks and of the process as text.
pub(super) fn render(disks: &[DiskReport], process: &Usage) -> String {
    let mut text = Text(String::with_capacity(1024 + disks.len() * 32_768));
    text.family("ringdisk_build_info", "gauge", "The version of Ringdisk.");
    text.sample(
        "ringdisk_build_info",
        &[("version", env!("CARGO_PKG_VERSION"))],
        1,
    );
    let gauges = [
        (
            "process_resident_memory_bytes",
            "Memory of the process in RAM.",
            process.resident_bytes,
        ),
        (
            "process_open_fds",
            "Open file descriptors of the process.",
            process.descriptors,
        ),
        (
            "ringdisk_table_cache_bytes",
            "Tables of all images in memory.",
            Some(process.table_bytes),
        ),
        (
            "ringdisk_table_cache_limit_bytes",
            "The most memory for the tables of all images (--table-cache).",
            process.table_bytes_max,
        ),
    ];
    for (name, help, value) in gauges {
        if let Some(value) = value {
            text.family(name, "gauge", help);
            text.sample(name, &[], value);
        }
    }
    for (name, help, value) in COUNTERS {
        text.family(name, "counter", help);
        each_queue(disks, |queue, labels| {
            for kind in RequestKind::ALL {
                let labels = [labels, &[("kind", kind.name())]].concat();
                text.sample(name, &labels, value(queue, kind));
            }
        });
    }
    let name = "ringdisk_requests_in_flight";
    text.family(name, "gauge", "Requests taken from the queue and not answered.");
    each_queue(disks, |queue, labels| text.sample(name, labels, queue.in_flight));
    for (name, help, value) in ENGINE {
        text.family(name, "counter", help);
        for disk in disks {
            if let Some(counts) = &disk.engine {
                text.sample(name, &labels(disk), value(counts));
            }
        }
    }
    latencies(&mut text, disks);
    text.0
}

/// Calls `each` with each queue of each disk and its labels.
fn each_queue(disks: &[DiskReport], mut each: impl FnMut(&QueueSnapshot, Labels<'_>)) {
    for disk in disks {
        for (index, queue) in disk.requests.queues.iter().enumerate() {
            let index = index.to_string();
            let mut labels = labels(disk);
            labels.push(("queue", &index));
            each(queue, &labels);
        }
    }
}

/// Writes the latencies of each disk, of all its queues together.
fn latencies(text: &mut Text, disks: &[DiskReport]) {
    let name = "ringdisk_request_latency_seconds";
    let help = "Time from the taking of a request from its queue to its answer, estimated from samples.";
    text.family(name, "histogram", help);
    let [bucket, sum, count] = ["bucket", "sum", "count"].map(|part| format!("{name}_{part}"));
    for disk in disks {
        let requests = disk.requests.sum();
        for kind in RequestKind::ALL {
            if kind == RequestKind::Other {
                continue;
            }
            let latency = &requests.kind(kind).latency;
            let labels = [&labels(disk)[..], &[("kind", kind.name())]].concat();
            for bound in bounds_ns() {
                let le = Seconds(bound).to_string();
                let labels = [&labels[..], &[("le", &le)]].concat();
                text.sample(&bucket, &labels, latency.count_below(bound));
            }
            let all = [&labels[..], &[("le", "+Inf")]].concat();
            text.sample(&bucket, &all, latency.count());
            text.sample(&sum, &labels, Seconds(latency.sum_ns));
            text.sample(&count, &labels, latency.count());
        }
    }
}
