//! The content of snapshots in the simulated world, found by the few lines that know their table.

#![allow(dead_code, reason = "each test uses its part of this module")]

use std::path::Path;
use std::sync::Arc;

use block::{AlignedBuf, Context, Disk, Op};
use qcow::format::{Header, SnapshotEntry};
use qcow::{OpenOptions, QcowDisk};
use simulator::{SimImage, SimWorld};

const DISK: &str = "disk";

/// The snapshots of an image, by the header's own words.
pub(crate) fn entries(image: &[u8]) -> Vec<SnapshotEntry> {
    let header = Header::parse(image).expect("a header");
    let mut rest = &image[header.snapshot_table_offset.bytes() as usize..];
    (0..header.snapshot_count)
        .map(|_| {
            let entry = SnapshotEntry::parse(rest).expect("an entry");
            rest = &rest[SnapshotEntry::peek_len(rest).expect("its length").min(rest.len())..];
            entry
        })
        .collect()
}

/// The image with a snapshot's mapping in place of the disk's, to be read.
pub(crate) fn as_disk(image: &[u8], entry: &SnapshotEntry) -> Vec<u8> {
    use qcow::format::header::at;
    let mut image = image.to_vec();
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(at::L1_TABLE_OFFSET, &entry.l1_offset.bytes().to_be_bytes());
    put(at::L1_SIZE, &entry.l1_entries.to_be_bytes());
    put(at::SIZE, &entry.disk_size().expect("a size").to_be_bytes());
    put(at::NB_SNAPSHOTS, &[0; 4]);
    image
}

/// The first byte of each sector of an image's disk. The image is put into a world that has its backing file.
pub(crate) fn content(world: &SimWorld, cx: &Context, image: &[u8]) -> Vec<u8> {
    world.set_contents(DISK, SimImage::from_bytes(&world.store(), image));
    let read_only = OpenOptions {
        read_only: true,
        backing_files: true,
        lock: None,
        ..OpenOptions::default()
    };
    let read = cx.block_on(async {
        let disk = QcowDisk::open_on(cx, world, Path::new(DISK), &read_only).await;
        let disk = disk.expect("a disk");
        let queue = Arc::clone(&disk).open_queue(cx).expect("a queue");
        let bytes = disk.info().size_bytes;
        let buffer = AlignedBuf::zeroed(bytes as usize).into();
        let read = block::ask(&*queue, Op::Read, 0, bytes, buffer).await;
        read.expect("a read").into_owned().expect("our own buffer")
    });
    let bytes = read.expect("nothing waits for ever");
    bytes.chunks(512).map(|sector| sector[0]).collect()
}
