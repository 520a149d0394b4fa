//! Disks in the simulated world, a byte for each sector: each sector is full of one byte.

#![allow(dead_code, reason = "each test uses its part of this module")]

use std::path::Path;

use block::{AlignedBuf, Context, Disk, Op, ask};
use qcow::{OpenOptions, QcowDisk};
use simulator::SimWorld;

/// The contents that each sector may have.
pub(crate) type Sectors = Vec<Vec<u8>>;

/// Reads the whole disk in the file `name`.
pub(crate) fn content(
    world: &SimWorld,
    cx: &Context,
    name: &str,
    options: &OpenOptions,
    what: &str,
) -> Vec<u8> {
    let bytes = cx.block_on(async {
        let disk = QcowDisk::open_on(cx, world, Path::new(name), options).await;
        let disk = disk.unwrap_or_else(|error| panic!("{what}: {error:?}"));
        let size = disk.info().size_bytes;
        let queue = disk.open_queue(cx).expect("a queue");
        let buffer = AlignedBuf::zeroed(size as usize).into();
        let read = ask(&*queue, Op::Read, 0, size, buffer).await;
        let read = read.unwrap_or_else(|error| panic!("{what}: {error}"));
        read.into_owned().expect("our own buffer").to_vec()
    });
    sectors(&bytes.expect("nothing waits for ever"), what)
}

/// The byte of each sector.
pub(crate) fn sectors(bytes: &[u8], what: &str) -> Vec<u8> {
    let each = bytes.chunks_exact(512).enumerate();
    each.map(|(at, sector)| {
        assert!(
            sector.iter().all(|&byte| byte == sector[0]),
            "{what}: sector {at} is torn"
        );
        sector[0]
    })
    .collect()
}

pub(crate) fn assert_values(found: &[u8], durable: &[Vec<u8>], what: &str) {
    for (sector, (byte, values)) in found.iter().zip(durable).enumerate() {
        assert!(
            values.contains(byte),
            "{what}: sector {sector} has {byte:#x}, expected one of {values:x?}"
        );
    }
}

/// The contents of sectors that have one each.
pub(crate) fn certain(known: &[u8]) -> Sectors {
    known.iter().map(|&byte| vec![byte]).collect()
}
