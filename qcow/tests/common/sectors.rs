//! Disks in the simulated world, a byte for each sector: each sector is full of one byte.

#![allow(dead_code, reason = "each test uses its part of this module")]

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, Op, ask};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Random, SimWorld};

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

/// A guest with one queue, which asks for one thing at a time.
pub(crate) struct Guest {
    pub(crate) cx: Context,
    pub(crate) disk: Arc<QcowDisk>,
    pub(crate) queue: Box<dyn DiskQueue>,
    pub(crate) cluster_sectors: u64,
    /// The content as the guest knows it, a byte for each sector.
    pub(crate) known: RefCell<Vec<u8>>,
    /// The contents that a cut may leave.
    pub(crate) durable: RefCell<Sectors>,
}

impl Guest {
    /// A guest of a disk that has this content, durably.
    pub(crate) fn new(cx: &Context, disk: Arc<QcowDisk>, cluster_sectors: u64, known: Vec<u8>) -> Self {
        let queue = Arc::clone(&disk).open_queue(cx).expect("a queue");
        Self {
            cx: cx.clone(),
            disk,
            queue,
            cluster_sectors,
            durable: RefCell::new(certain(&known)),
            known: RefCell::new(known),
        }
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.known.borrow().len() as u64
    }

    /// Records that all that the guest knows is durable now.
    pub(crate) fn flushed(&self) {
        *self.durable.borrow_mut() = certain(&self.known.borrow());
    }

    pub(crate) async fn flush(&self) {
        let flushed = ask(&*self.queue, Op::Flush, 0, 0, Buffer::default()).await;
        flushed.expect("a FLUSH");
        self.flushed();
    }

    /// Asks for one change, which is answered.
    pub(crate) async fn change(&self, random: &mut Random) {
        let sectors = self.sectors();
        let mut count = 1 + random.below(sectors.min(12));
        let mut first = random.below(sectors - count + 1);
        let (op, byte) = match random.below(7) {
            unmap @ 0..=1 => {
                let unmap = unmap == 1;
                (Op::WriteZeroes { unmap, fua: false }, 0)
            }
            2 => {
                // Whole clusters, which a discard makes zeros.
                first -= first % self.cluster_sectors;
                count = count.next_multiple_of(self.cluster_sectors).min(sectors - first);
                (Op::Discard, 0)
            }
            kind => (Op::Write { fua: kind == 3 }, 1 + random.below(0x70) as u8),
        };
        let range = first as usize..(first + count) as usize;
        for values in &mut self.durable.borrow_mut()[range.clone()] {
            values.push(byte);
        }
        let buffer = match op {
            Op::Write { .. } => AlignedBuf::from_slice(&vec![byte; count as usize * 512]).into(),
            _ => Buffer::default(),
        };
        let changed = ask(&*self.queue, op, first * 512, count * 512, buffer).await;
        changed.expect("a change");
        self.known.borrow_mut()[range.clone()].fill(byte);
        if op == (Op::Write { fua: true }) {
            self.durable.borrow_mut()[range].fill(vec![byte]);
        }
    }

    /// Makes the disk larger by so many sectors, durably.
    pub(crate) async fn grow(&self, sectors: u64) {
        let size = self.sectors() + sectors;
        self.durable.borrow_mut().resize(size as usize, vec![0]);
        self.disk.grow(&self.cx, size * 512).await.expect("a growth");
        self.known.borrow_mut().resize(size as usize, 0);
        if sectors > 0 {
            self.flushed();
        }
    }

    /// Closes the disk in the file `name`, which reads with `options` as the guest knows it then. Returns its content.
    pub(crate) fn close(self, world: &SimWorld, name: &str, options: &OpenOptions, what: &str) -> Vec<u8> {
        drop(self.queue);
        crate::closing::close(world, &self.cx, &self.disk, name, what);
        let known = self.known.into_inner();
        assert_eq!(content(world, &self.cx, name, options, what), known, "{what}");
        known
    }
}
