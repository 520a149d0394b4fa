//! Compaction on one thread, again and again, while others write, zero, discard and read.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{Folder, Lane, assert_same, close, open};
use block::Context;
use block::ring::RingKind;
use qcow::{CompactError, CompactOptions, OpenOptions, QcowDisk};
use ringdisk_gen::Random;
use ringdisk_gen::patience::SetOnDrop;

const IMAGE: &str = "disk.qcow2";
const CLUSTER: u64 = 4096;
/// The clusters of each writer.
const CLUSTERS: u64 = 400;
const WRITERS: u64 = 3;
/// The most compactions in search of one that has something to move, and of one that has something to cut.
const COMPACTIONS_MAX: u32 = 20_000;

/// Changes a part of the disk, and reads what it has written. Returns the part's content.
fn write_and_read(disk: &Arc<QcowDisk>, writer: u64, is_over: &AtomicBool, ring: RingKind) -> Vec<u8> {
    let lane = Lane::new(disk, ring);
    let random = &mut Random::new(writer);
    let start = writer * CLUSTERS * CLUSTER;
    let mut known = vec![0_u8; (CLUSTERS * CLUSTER) as usize];
    let mut rounds = 0;
    while !is_over.load(Ordering::Relaxed) || rounds < 1000 {
        rounds += 1;
        let sectors = CLUSTERS * CLUSTER / 512;
        let first = random.below(sectors);
        let count = (1 + random.below(40)).min(sectors - first);
        let (at, len) = (first * 512, count * 512);
        let place = at as usize..(at + len) as usize;
        match random.below(12) {
            0..=4 => {
                let bytes = vec![random.draw() as u8; len as usize];
                lane.write(start + at, &bytes);
                known[place].copy_from_slice(&bytes);
            }
            5..=6 => {
                lane.write_zeroes(start + at, len, true);
                known[place].fill(0);
            }
            7 => {
                // Many clusters become free, so that there is something to move.
                let first = random.below(CLUSTERS / 2) * CLUSTER;
                let len = CLUSTERS / 2 * CLUSTER;
                lane.write_zeroes(start + first, len, true);
                known[first as usize..(first + len) as usize].fill(0);
            }
            8 => lane.flush(),
            _ => assert_same(&lane.read(start + at, len), &known[place], "beside a compaction"),
        }
    }
    lane.settle();
    known
}

fn run(ring: RingKind) {
    let folder = Folder::new();
    folder.qemu_create(
        IMAGE,
        &format!("cluster_size={CLUSTER}"),
        &(WRITERS * CLUSTERS * CLUSTER).to_string(),
    );
    let disk = open(&folder.path(IMAGE), &OpenOptions::default());
    let is_over = AtomicBool::new(false);
    let (mut moved, mut shorter) = (0, 0);
    let content = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (disk, is_over) = (&disk, &is_over);
                scope.spawn(move || write_and_read(disk, writer, is_over, ring))
            })
            .collect();
        let written = SetOnDrop(&is_over);
        let cx = Context::syscalls();
        // The writers may only begin to write when the first ones have ended.
        let mut compactions = 0;
        while compactions < 20 || compactions < COMPACTIONS_MAX && (moved == 0 || shorter == 0) {
            compactions += 1;
            let go_on = |_: &_| ControlFlow::Continue(());
            let options = CompactOptions::default();
            match cx.block_on(disk.compact(&cx, &options, go_on)).expect("it turns") {
                Ok(compacted) => {
                    moved += compacted.moved_bytes;
                    shorter += u64::from(compacted.after_bytes < compacted.before_bytes);
                }
                // On a slow host.
                Err(CompactError::Busy) => {}
                Err(error) => panic!("{error}"),
            }
        }
        drop(written);
        let parts = writers.into_iter().map(|writer| writer.join().expect("a writer"));
        let content: Vec<Vec<u8>> = parts.collect();
        crate::common::drain(&cx);
        content
    });
    close(disk);
    folder.assert_flawless(IMAGE, false);
    assert_same(&folder.qemu_reads(IMAGE), &content.concat(), "the disk");
    assert!(
        moved > 0 && shorter > 0,
        "{moved} bytes moved, {shorter} times shorter"
    );
}

#[test]
fn compaction_beside_writers_loses_nothing() {
    run(RingKind::IoUring);
    run(RingKind::Syscalls);
}
