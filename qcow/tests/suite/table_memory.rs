//! One bound for the table caches of several images: who uses tables has them in memory, whichever image they are of.

use std::sync::Arc;

use block::ring::RingKind;
use qcow::{OpenOptions, QcowDisk, TableMemory};

use crate::common::{Folder, Lane, close, open};

/// The bytes that a slice of 4 KiB maps, with clusters of 4 KiB.
const MAPPED: u64 = 2 << 20;
const SLICE: u64 = 4096;
/// The slices of an image's L2 tables.
const SLICES: u64 = 128;

struct Image {
    disk: Arc<QcowDisk>,
    lane: Lane,
}

impl Image {
    /// Opens a new image whose tables are all there.
    fn new(folder: &Folder, name: &str, memory: &TableMemory) -> Self {
        let size = (SLICES * MAPPED).to_string();
        folder.qemu_create(name, "cluster_size=4k,preallocation=metadata", &size);
        let options = OpenOptions {
            table_memory: memory.clone(),
            ..OpenOptions::default()
        };
        let disk = open(&folder.path(name), &options);
        let lane = Lane::new(&disk, RingKind::IoUring);
        Self { disk, lane }
    }

    /// Reads through the first `slices` slices, so many times, and returns how many of them had to be read for the last time.
    fn read_through(&self, slices: u64, times: usize) -> u64 {
        let mut last = 0;
        for _ in 0..times {
            let before = self.disk.counts().l2_slices_read;
            for slice in 0..slices {
                self.lane.read(slice * MAPPED, 512);
            }
            last = self.disk.counts().l2_slices_read - before;
        }
        last
    }

    fn close(self) {
        drop(self.lane);
        close(self.disk);
    }
}

#[test]
fn tables_of_an_idle_disk_make_room_for_those_of_a_busy_one() {
    let folder = Folder::new();
    let memory = TableMemory::new(64 * SLICE);
    let [first, second, third] = ["first", "second", "third"].map(|name| Image::new(&folder, name, &memory));
    assert_eq!(first.read_through(60, 2), 0, "alone it has all of the bound");
    assert_eq!(memory.used_bytes(), 60 * SLICE);
    assert_eq!(second.read_through(40, 6), 0, "the first one is idle");
    assert!(memory.used_bytes() <= 64 * SLICE, "{memory:?}");
    assert_eq!(first.read_through(40, 6), 0, "it is busy again");
    // Two busy ones that fit in have all they need, however many tables a third one goes through.
    for _ in 0..8 {
        first.read_through(20, 1);
        second.read_through(20, 1);
    }
    let reread: u64 = (0..4)
        .map(|round| {
            third.read_through(SLICES, round);
            first.read_through(20, 1) + second.read_through(20, 1)
        })
        .sum();
    assert!(memory.used_bytes() <= 64 * SLICE, "{memory:?}");
    assert!(reread <= 4 * 40, "{reread}");
    // An image that is gone leaves all to the others, a bound that is gone lets each have what it wants.
    second.close();
    third.close();
    assert_eq!(first.read_through(60, 3), 0);
    memory.set_limit_bytes(None);
    assert_eq!(first.read_through(SLICES, 2), 0);
    assert_eq!(memory.used_bytes(), SLICES * SLICE);
    memory.set_limit_bytes(Some(32 * SLICE));
    assert!(memory.used_bytes() <= 32 * SLICE, "{memory:?}");
    assert_eq!(first.read_through(30, 3), 0);
    first.close();
    assert_eq!(memory.used_bytes(), 0);
}
