//! The few lines that know what a plain QCOW2 file holds: an observer that owes nothing to the engine.
//!
//! 16-bit reference counts, no backing file, no snapshots, no extended L2.

#![allow(dead_code, unreachable_pub, reason = "each test uses its part of this module")]

use std::collections::HashMap;
use std::path::Path;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// The bytes of an image file.
pub struct OnDisk {
    bytes: Vec<u8>,
    bits: u32,
}

impl OnDisk {
    pub fn read(path: &Path) -> Self {
        Self::new(std::fs::read(path).expect("an image"))
    }

    pub fn new(bytes: Vec<u8>) -> Self {
        let bits = u32::from_be_bytes(bytes[20..24].try_into().expect("four bytes"));
        Self { bytes, bits }
    }

    fn u64_at(&self, at: u64) -> u64 {
        let bytes = self.bytes.get(at as usize..at as usize + 8);
        bytes.map_or(0, |bytes| {
            u64::from_be_bytes(bytes.try_into().expect("eight bytes"))
        })
    }

    fn u32_at(&self, at: u64) -> u64 {
        self.u64_at(at) >> 32
    }

    /// The L2 entry of a guest cluster.
    fn entry(&self, cluster: u64) -> u64 {
        let l2_bits = self.bits - 3;
        let table = self.u64_at(self.u64_at(40) + (cluster >> l2_bits) * 8) & OFFSET;
        if table == 0 {
            return 0;
        }
        self.u64_at(table + (cluster & ((1 << l2_bits) - 1)) * 8)
    }

    /// The 512 bytes of a guest sector.
    pub fn sector(&self, sector: u64) -> Vec<u8> {
        let within = (sector * 512 & ((1 << self.bits) - 1)) as usize;
        let entry = self.entry(sector * 512 >> self.bits);
        let mut bytes = vec![0; 512];
        if entry & COMPRESSED != 0 {
            let width = 62 - (self.bits - 8);
            let at = (entry & ((1 << width) - 1)) as usize;
            let mut cluster = vec![0; 1 << self.bits];
            let mut inflate = flate2::Decompress::new(false);
            let ended = inflate.decompress(&self.bytes[at..], &mut cluster, flate2::FlushDecompress::Finish);
            ended.expect("a deflate stream");
            bytes.copy_from_slice(&cluster[within..within + 512]);
        } else if entry & OFFSET != 0 && entry & 1 == 0 {
            let at = (entry & OFFSET) as usize + within;
            let end = self.bytes.len().min(at + 512);
            if at < end {
                bytes[..end - at].copy_from_slice(&self.bytes[at..end]);
            }
        }
        bytes
    }

    /// Every cluster's count is the number of its uses: no leak, nothing used uncounted.
    pub fn assert_exact(&self) {
        let cluster = |at: u64| at >> self.bits;
        let size = 1u64 << self.bits;
        let mut uses: HashMap<u64, u64> = HashMap::from([(0, 1)]);
        let mut used =
            |first: u64, count: u64| (first..first + count).for_each(|at| *uses.entry(at).or_default() += 1);
        let (l1, l1_entries) = (self.u64_at(40), self.u32_at(36));
        used(cluster(l1), (l1_entries * 8).div_ceil(size).max(1));
        let (refcounts, refcount_clusters) = (self.u64_at(48), self.u32_at(56));
        used(cluster(refcounts), refcount_clusters);
        for index in 0..refcount_clusters * size / 8 {
            let block = self.u64_at(refcounts + index * 8) & OFFSET;
            if block != 0 {
                used(cluster(block), 1);
            }
        }
        for index in 0..l1_entries {
            let table = self.u64_at(l1 + index * 8) & OFFSET;
            if table == 0 {
                continue;
            }
            used(cluster(table), 1);
            for entry in (0..size / 8).map(|index| self.u64_at(table + index * 8)) {
                if entry & COMPRESSED != 0 {
                    let width = 62 - (self.bits - 8);
                    let at = entry & ((1 << width) - 1);
                    let sectors = (entry >> width & ((1 << (62 - width)) - 1)) + 1;
                    let last = (at & !511) + sectors * 512 - 1;
                    used(cluster(at), cluster(last) - cluster(at) + 1);
                } else if entry & OFFSET != 0 {
                    assert!(entry & COPIED != 0, "an entry without COPIED: {entry:#x}");
                    used(cluster(entry & OFFSET), 1);
                }
            }
        }
        for index in 0..refcount_clusters * size / 8 {
            let block = self.u64_at(refcounts + index * 8) & OFFSET;
            for within in 0..size / 2 {
                let at = index * (size / 2) + within;
                let count = if block == 0 {
                    0
                } else {
                    self.u64_at(block + within * 2) >> 48
                };
                let expected = uses.remove(&at).unwrap_or(0);
                assert_eq!(count, expected, "cluster {at}: counted {count}, used {expected}");
            }
        }
        assert!(uses.is_empty(), "clusters without a count: {uses:?}");
    }
}
