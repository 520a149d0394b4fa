//! Images of many shapes to take snapshots of, operations on snapshots, and QEMU's view of them.

#![allow(dead_code, reason = "each test uses its part of this module")]

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use block::ring::RingKind;
use block::{Context, Disk};
use qcow::{DiskSize, OpenOptions, QcowDisk, SnapshotError, SnapshotSelector};

use crate::common::{Folder, Lane, assert_same, close, open};

pub(crate) const IMAGE: &str = "disk.qcow2";
/// The second of a snapshot, to find it in QEMU's list.
pub(crate) const SECOND: u64 = 1_700_000_000;

pub(crate) fn options() -> OpenOptions {
    OpenOptions {
        backing_files: true,
        ..OpenOptions::default()
    }
}

pub(crate) fn name(text: &str) -> SnapshotSelector {
    SnapshotSelector::Name(text.to_owned())
}

/// Creates a snapshot on the context of the queues that are open: what they left to do in the background is waited for.
pub(crate) fn create_on(cx: &Context, disk: &QcowDisk, text: &str) -> Result<String, SnapshotError> {
    let date = UNIX_EPOCH + Duration::from_secs(SECOND);
    let created = cx.block_on(disk.create_snapshot(cx, text, date));
    created.expect("the ring turns")
}

/// As [`create_on`], beside no queue.
pub(crate) fn create(disk: &QcowDisk, text: &str) -> Result<String, SnapshotError> {
    create_on(&Context::syscalls(), disk, text)
}

pub(crate) fn delete(disk: &QcowDisk, which: &SnapshotSelector) -> Result<(), SnapshotError> {
    let cx = Context::syscalls();
    cx.block_on(disk.delete_snapshot(&cx, which))
        .expect("the ring turns")
}

/// Applies a snapshot on a context, as [`create_on`] creates one.
pub(crate) fn apply_on(cx: &Context, disk: &QcowDisk, which: &SnapshotSelector) -> Result<(), SnapshotError> {
    cx.block_on(disk.apply_snapshot(cx, which, DiskSize::MayChange))
        .expect("the ring turns")
}

/// As [`apply_on`], beside no queue.
pub(crate) fn apply(disk: &QcowDisk, which: &SnapshotSelector) -> Result<(), SnapshotError> {
    apply_on(&Context::syscalls(), disk, which)
}

pub(crate) fn names(disk: &QcowDisk) -> Vec<(String, String)> {
    let cx = Context::syscalls();
    let listed = cx.block_on(disk.snapshots(&cx)).expect("the ring turns");
    let text = |bytes| String::from_utf8(bytes).expect("plain text");
    listed
        .expect("a list")
        .into_iter()
        .map(|entry| (text(entry.id), text(entry.name)))
        .collect()
}

pub(crate) fn listed(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = pairs.iter().map(|(id, name)| (id.to_string(), name.to_string()));
    owned.collect()
}

/// The content of a snapshot, as QEMU reads it.
pub(crate) fn qemu_reads(folder: &Folder, snapshot: &str) -> Vec<u8> {
    let which = format!("snapshot.name={snapshot}");
    folder.qemu_img(&[
        "convert",
        "-l",
        &which,
        "-f",
        "qcow2",
        "-O",
        "raw",
        IMAGE,
        "snapshot.raw",
    ]);
    std::fs::read(folder.path("snapshot.raw")).expect("what qemu-img wrote")
}

/// The whole disk.
pub(crate) fn whole(disk: &Arc<QcowDisk>) -> Vec<u8> {
    let lane = Lane::new(disk, RingKind::Syscalls);
    let bytes = lane.read(0, disk.info().size_bytes);
    lane.settle();
    bytes
}

/// The disk and the snapshots of `IMAGE` are these, for QEMU too, and nothing is wrong or leaked.
#[track_caller]
pub(crate) fn look(folder: &Folder, active: &[u8], snapshots: &[(&str, &[u8])], what: &str) {
    folder.assert_flawless(IMAGE, false);
    assert_same(&folder.qemu_reads(IMAGE), active, what);
    for (snapshot, bytes) in snapshots {
        let what = format!("{what}: {snapshot}");
        assert_same(&qemu_reads(folder, snapshot), bytes, &what);
    }
    let disk = open(&folder.path(IMAGE), &options());
    assert_same(&whole(&disk), active, what);
    close(disk);
}

/// An image of some shape, with data, compressed and zero clusters.
pub(crate) struct Shape {
    pub(crate) cluster: u64,
    pub(crate) bits: u32,
    backing: bool,
    pub(crate) compat: &'static str,
}

impl Shape {
    pub(crate) fn disk(&self) -> u64 {
        (self.cluster * 24).max(64 << 10) + 512
    }

    pub(crate) fn make(&self, folder: &Folder) {
        let (cluster, size) = (self.cluster, self.disk().to_string());
        let mut format = format!(
            "cluster_size={cluster},refcount_bits={},compat={}",
            self.bits, self.compat
        );
        if self.backing {
            std::fs::write(
                folder.path("base.raw"),
                vec![0xBA; self.disk() as usize / 1024 * 512],
            )
            .expect("a base");
            format += ",backing_file=base.raw,backing_fmt=raw";
        }
        folder.qemu_create(IMAGE, &format, &size);
        let mut commands = vec![
            format!("write -P 17 0 {}", cluster * 3),
            format!("write -c -P 34 {} {cluster}", cluster * 5),
            format!("write -c -P 35 {} {cluster}", cluster * 6),
            format!("write -P 51 {} {cluster}", cluster * 8),
        ];
        if self.compat != "0.10" {
            commands.push(format!("write -z {} {cluster}", cluster * 8));
            commands.push(format!("write -z -u {} {cluster}", cluster * 10));
        }
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        folder.qemu_io("qcow2", IMAGE, &commands);
    }
}

pub(crate) fn shapes() -> Vec<Shape> {
    let bits = [2, 4, 8, 16, 32, 64];
    let clusters = (9..=21).map(|bits| 1_u64 << bits);
    let mut shapes: Vec<Shape> = clusters
        .zip(bits.iter().cycle())
        .enumerate()
        .map(|(index, (cluster, &bits))| Shape {
            cluster,
            bits,
            backing: index % 2 == 0,
            compat: "1.1",
        })
        .collect();
    let more = [(512, 64), (512, 16), (4096, 2), (65536, 16)];
    shapes.extend(more.map(|(cluster, bits)| Shape {
        cluster,
        bits,
        backing: true,
        compat: "1.1",
    }));
    shapes.push(Shape {
        cluster: 4096,
        bits: 16,
        backing: true,
        compat: "0.10",
    });
    let subclusters = [(1 << 14, true), (1 << 16, false), (1 << 17, true)];
    shapes.extend(subclusters.map(|(cluster, backing)| Shape {
        cluster,
        bits: 16,
        backing,
        compat: "1.1,extended_l2=on",
    }));
    shapes
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            cluster,
            bits,
            backing,
            compat,
        } = self;
        write!(
            f,
            "cluster {cluster} bits {bits} backing {backing} compat {compat}"
        )
    }
}

/// Changes that copy shared clusters, and some that go to others.
pub(crate) fn change(lane: &Lane, shape: &Shape, byte: u8) {
    let cluster = shape.cluster;
    lane.write(512, &vec![byte; cluster as usize]);
    lane.write(cluster * 5 + 512 * (byte as u64 % 2), &vec![byte; 512]);
    lane.write(cluster * (12 + byte as u64 % 4), &vec![byte; 1024]);
    lane.write_zeroes(cluster * 2, cluster, byte == 0x42);
    lane.discard(cluster * 8, cluster * 3);
    lane.write(shape.disk() - 512, &vec![byte; 512]);
}
