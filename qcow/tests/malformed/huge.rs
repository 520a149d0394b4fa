//! Images whose headers ask for as much as the format allows, in files of almost no blocks.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use ringdisk_gen::image::u64_in;
use ringdisk_gen::{Image, ImageSpec};

use super::common::{self, Folder};
use super::{Trial, WAYS, Worker};

/// The longest time for a repair of the worst image on a busy host: it is some ten seconds of computing.
const REPAIR_TIME_MAX: Duration = Duration::from_secs(300);

/// Method: valid headers, and tables far away in a file of almost no blocks. A byte of memory for each cluster, or a table
/// read whole, would cost far more memory than the child has.
#[test]
fn sparse_huge_file_takes_no_memory() {
    let folder = Folder::new();
    let mut trial = Trial::new(&folder);
    for (name, bits, order) in [
        ("512-byte clusters", 9, 6),
        ("one-bit counts", 12, 0),
        ("2 MiB clusters", 21, 4),
    ] {
        let mut spec = ImageSpec::new(bits, 1 << 20);
        spec.refcount_order = order;
        let image = Image::new(spec);
        let cluster = image.cluster();
        let len = image.bytes.len() as u64;
        // Large tables, whose entries lead to as many tables that are holes.
        let end = ((1_u64 << 31) - 8) * cluster;
        let l1_entries = (4_u64 << 20) / 8;
        let table_clusters = (8_u64 << 20) / cluster;
        let table_at = len.next_multiple_of(cluster) + (64 << 20);
        let l1_at = table_at + (16 << 20);
        let mut bytes = image.bytes.clone();
        let block = u64_in(&bytes, u64_in(&bytes, 48));
        for (at, value) in [(40, l1_at), (48, table_at)] {
            bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
        }
        bytes[36..40].copy_from_slice(&(l1_entries as u32).to_be_bytes());
        bytes[56..60].copy_from_slice(&(table_clusters as u32).to_be_bytes());
        for way in WAYS {
            let file = format!("case.{way}");
            let path = folder.path(&file);
            std::fs::write(&path, &bytes).expect("the case");
            let sparse = std::fs::OpenOptions::new()
                .write(true)
                .open(&path)
                .expect("the case");
            let long = sparse.set_len(end.min(8 << 40));
            long.expect("a file system with large files");
            // Every table entry leads to the one block; every L1 entry to a cluster of its own.
            let count = table_clusters * cluster / 8;
            common::patch(&path, table_at, &block.to_be_bytes().repeat(count as usize));
            let tables: Vec<u8> = (0..l1_entries)
                .flat_map(|i| (1 << 63 | ((1_u64 << 30) + i * cluster)).to_be_bytes())
                .collect();
            common::patch(&path, l1_at, &tables);
            trial.worker.ask(name, &file, false);
        }
    }
}

/// An image with as many tables as the format allows, each in 64 clusters of its own, so that whoever notes them by their
/// neighbours notes nothing but gaps. All of it is counted, so that the image is opened and written.
#[derive(Clone, Copy, Default)]
struct Scattered {
    bits: u32,
    order: u32,
    /// Of the active L1 table.
    tables: u64,
    /// L1 tables of snapshots.
    snapshot_tables: u64,
    /// The other snapshots have the beginnings of those, not none.
    overlapping: bool,
    bitmaps: u64,
    dirty: bool,
}

/// Refcount blocks: as many as the table may lead to.
const BLOCKS: u64 = 1 << 20;
/// Snapshots, if there are any.
const SNAPSHOTS: u64 = 65_536;
/// L2 tables of each snapshot that has some.
const SNAPSHOT_TABLES: u64 = 1024;
/// Clusters of data of every other bitmap.
const BITMAP_CLUSTERS: u64 = 31;

impl Scattered {
    fn write(&self, path: &Path) {
        let mut spec = ImageSpec::new(self.bits, 1 << 20);
        spec.refcount_order = self.order;
        let image = Image::new(spec);
        let cluster = image.cluster();
        let step = 64 * cluster;
        // What lies in the first part of the file is read; behind it are holes.
        let mut near = 1 << 20;
        let mut far = (1 << 20) * cluster;
        let mut place = |bytes: u64| {
            let at = near;
            near = (near + bytes).next_multiple_of(cluster);
            assert!(near < (1 << 20) * cluster, "what is read has room");
            at
        };
        let mut scatter = |count: u64| {
            let first = far;
            far += count * step;
            (0..count).map(move |i| first + i * step)
        };
        let table_of = |places: &mut dyn Iterator<Item = u64>, flags: u64| -> Vec<u8> {
            places.flat_map(|at| (flags | at).to_be_bytes()).collect()
        };

        let mut bytes = image.bytes.clone();
        let own_block = u64_in(&bytes, u64_in(&bytes, 48));
        let header_bytes = usize::from(bytes[103]);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let mut parts = Vec::new();
        let l1_at = place(self.tables * 8);
        put(36, &(self.tables as u32).to_be_bytes());
        put(40, &l1_at.to_be_bytes());
        parts.push((l1_at, table_of(&mut scatter(self.tables), 1 << 63)));
        let table_at = place(BLOCKS * 8);
        put(48, &table_at.to_be_bytes());
        put(56, &((BLOCKS * 8 / cluster) as u32).to_be_bytes());
        let mut blocks = std::iter::once(own_block).chain(scatter(BLOCKS - 1));
        parts.push((table_at, table_of(&mut blocks, 0)));
        if self.dirty {
            put(72, &1_u64.to_be_bytes());
        }
        if self.snapshot_tables > 0 {
            let mut table = Vec::new();
            let mut places = Vec::new();
            for index in 0..SNAPSHOTS {
                let (mut l1_at, mut entries) = (0, 0);
                if index < self.snapshot_tables {
                    entries = SNAPSHOT_TABLES;
                    l1_at = place(entries * 8);
                    parts.push((l1_at, table_of(&mut scatter(entries), 0)));
                    places.push(l1_at);
                } else if self.overlapping {
                    // The same tables again, each time one entry less of them: no two snapshots have the same.
                    let (again, which) = (index / self.snapshot_tables, index % self.snapshot_tables);
                    (l1_at, entries) = (places[which as usize], SNAPSHOT_TABLES - again);
                }
                table.extend(l1_at.to_be_bytes());
                table.extend((entries as u32).to_be_bytes());
                // An ID of 255 bytes and a name of 600, no text, with 16 bytes of extra data between.
                table.extend([0, 255, 600_u16.to_be_bytes()[0], 600_u16.to_be_bytes()[1]]);
                table.extend([0; 20]);
                table.extend(16_u32.to_be_bytes());
                table.extend([0_u64.to_be_bytes(), (1_u64 << 20).to_be_bytes()].concat());
                table.extend([0xFF; 255 + 600]);
                table.resize(table.len().next_multiple_of(8), 0);
            }
            let at = place(table.len() as u64);
            put(60, &(SNAPSHOTS as u32).to_be_bytes());
            put(64, &at.to_be_bytes());
            parts.push((at, table));
        }
        if self.bitmaps > 0 {
            let mut directory = Vec::new();
            for index in 0..self.bitmaps {
                // Half of them are in use, and may be of any size. The others are to be told of the first write.
                let (entries, flags) = [(BITMAP_CLUSTERS, 1_u32), (1, 2)][index as usize % 2];
                let table_at = place(entries * 8);
                parts.push((table_at, table_of(&mut scatter(entries), 0)));
                directory.extend(table_at.to_be_bytes());
                directory.extend((entries as u32).to_be_bytes());
                directory.extend(flags.to_be_bytes());
                directory.extend([1, 16]);
                directory.extend(1023_u16.to_be_bytes());
                directory.extend(0_u32.to_be_bytes());
                directory.extend([0xFF; 1023 + 1]);
            }
            let at = place(directory.len() as u64);
            let extension = [
                &0x2385_2875_u32.to_be_bytes()[..],
                &24_u32.to_be_bytes(),
                &(self.bitmaps as u32).to_be_bytes(),
                &0_u32.to_be_bytes(),
                &(directory.len() as u64).to_be_bytes(),
                &at.to_be_bytes(),
                &0_u64.to_be_bytes(),
            ];
            put(header_bytes, &extension.concat());
            put(88, &1_u64.to_be_bytes());
            parts.push((at, directory));
        }
        let counted = ((cluster * 8) >> self.order) * BLOCKS * cluster;
        assert!(far <= counted, "all is counted");
        let _missing = std::fs::remove_file(path);
        std::fs::write(path, &bytes).expect("the case");
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .expect("the case");
        file.set_len(far).expect("a file system with large files");
        for (at, part) in parts {
            file.write_all_at(&part, at).expect("the case");
        }
    }

    /// Uses it in each of `ways`, in a child of its own: what one leaves behind is not the next one's.
    fn face(&self, name: &str, ways: &[&str]) {
        let folder = Folder::new();
        for way in ways {
            let file = format!("case.{way}");
            self.write(&folder.path(&file));
            let mut worker = Worker::start(&folder);
            worker.time_max = REPAIR_TIME_MAX;
            let outcome = worker.ask(name, &file, false);
            assert_eq!(outcome.refused, None, "{name}, {way}");
            drop(worker);
            std::fs::remove_file(folder.path(&file)).expect("the case");
        }
    }
}

#[test]
fn tables_scattered_over_huge_file_take_no_memory() {
    let worst = Scattered {
        bits: 9,
        tables: 4 << 20,
        ..Scattered::default()
    };
    worst.face("512-byte clusters", WAYS);
    let dirty = Scattered { dirty: true, ..worst };
    dirty.face("512-byte clusters, dirty", &["writer"]);
    let larger = Scattered {
        bits: 12,
        order: 4,
        ..worst
    };
    larger.face("4 KiB clusters", &["reader", "writer"]);
}

#[test]
fn scattered_snapshots_and_bitmaps_take_no_memory() {
    let worst = Scattered {
        bits: 9,
        tables: 4 << 20,
        snapshot_tables: 1100,
        bitmaps: 65_535,
        ..Scattered::default()
    };
    worst.face("beside as many tables of the disk", &["writer"]);
    let most = Scattered {
        overlapping: true,
        ..worst
    };
    most.face("of all snapshots", &["writer"]);
    let few = Scattered { tables: 64, ..worst };
    few.face("beside few tables of the disk", &["look"]);
    let dirty = Scattered { dirty: true, ..few };
    dirty.face("of a dirty image", &["writer"]);
}
