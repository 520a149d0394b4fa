//! Log lines about a corrupt image: the corruption, its place, and how much more of it there is. Operators look for the
//! place with them, so each number is checked.

mod common;

use std::fmt::{Debug, Write as _};
use std::path::Path;
use std::sync::{Arc, Mutex};

use block::ring::RingKind;
use common::{Folder, Lane, open, patch, u64_at};
use qcow::OpenOptions;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const CLUSTER: u64 = 4096;
const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The errors that were logged, each as its fields in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").expect("in memory");
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::ERROR
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().expect("no panic").push(line.0);
    }
}

/// An image of which these entries lead to the cluster at `host`; returns what is logged when its first cluster is read
/// twice, where its L2 table is, and where they lead.
fn told(entries: &[usize], host: fn(&Path) -> u64) -> (Vec<String>, u64, u64) {
    let folder = Folder::new();
    let path = folder.path("disk.qcow2");
    folder.qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=4096",
        "disk.qcow2",
        "8M",
    ]);
    folder.qemu_io("qcow2", "disk.qcow2", &["write -P 2 0 64k"]);
    let table = u64_at(&path, u64_at(&path, 40)) & OFFSET;
    let host = host(&path);
    let entry = host | COPIED;
    for index in entries {
        patch(&path, table + *index as u64 * 8, &entry.to_be_bytes());
    }
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), || {
        let disk = open(&path, &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        for _ in 0..2 {
            assert_eq!(lane.read(0, CLUSTER), vec![2; CLUSTER as usize]);
        }
        lane.settle();
        drop(lane);
        common::close(disk);
    });
    let lines = log.0.lock().expect("no panic").clone();
    (lines, table, host)
}

#[test]
fn log_reports_exposed_entries_once() {
    type Place = fn(&Path) -> u64;
    let places: [(&str, Place); 3] = [
        ("the L1 table", |path| u64_at(path, 40)),
        ("the refcount table", |path| u64_at(path, 48)),
        ("an L2 table", |path| u64_at(path, u64_at(path, 40)) & OFFSET),
    ];
    for (name, place) in places {
        let (lines, table, host) = told(&[5, 9], place);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].contains("message=the image is corrupt; it is not written any more "));
        for part in [
            format!("entry={} ", table + 5 * 8),
            format!("host={host} "),
            "others=1 ".to_owned(),
            format!("message=an L2 entry leads to {name} "),
            "disk.qcow2".to_owned(),
        ] {
            assert!(lines[0].contains(&part), "{part:?} in {lines:?}");
        }
    }
}
