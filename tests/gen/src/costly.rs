//! Images of almost no blocks whose snapshots would cost very much to create or delete.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The size of their clusters: the largest.
const CLUSTER: u64 = 2 << 20;
const COPIED: u64 = 1 << 63;
/// The number of clusters that a refcount block counts, with 16 bits each.
const COUNTED: u64 = CLUSTER / 2;

/// A way to be costly.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Costly {
    /// Each cluster of data is counted in a refcount block of its own, and there are so many.
    Counts(u64),
    /// There are so many L2 tables, of the disk or, if true, of a snapshot `s`.
    Tables(u64, bool),
    /// No cluster is free in the first refcount block and in so many behind it.
    Full(u64),
}

impl Costly {
    /// Writes the image, a sparse file, and syncs it: a file system may count its blocks otherwise before.
    ///
    /// # Errors
    ///
    /// The error of the host.
    ///
    /// # Panics
    ///
    /// If there are more of what is costly than one refcount block or one cluster of an L1 table has room for.
    pub fn write(self, path: &Path) -> io::Result<()> {
        let (blocks, tables) = match self {
            Self::Counts(blocks) | Self::Full(blocks) => (1 + blocks, 1),
            Self::Tables(tables, _) => (1, tables),
        };
        let is_snapshot = matches!(self, Self::Tables(_, true));
        let l1_bytes = tables * 8;
        // Header, refcount table, L1 table, snapshot table, L1 table of the snapshot; refcount blocks; L2 tables.
        let [table, l1, snapshots, snapshot_l1, first_block] =
            [1, 2, 3, 4, 5].map(|cluster| cluster * CLUSTER);
        let first_l2 = first_block + blocks * CLUSTER;
        let end = first_l2 + tables * CLUSTER;
        let file = std::fs::File::create(path)?;
        file.set_len(end)?;
        let put = |at: u64, values: &mut dyn Iterator<Item = u64>| {
            let bytes: Vec<u8> = values.flat_map(u64::to_be_bytes).collect();
            file.write_all_at(&bytes, at)
        };
        let mut header = [
            &b"QFI\xfb\0\0\0\x03"[..],
            &[0; 12],
            &21_u32.to_be_bytes(),
            &(tables * (CLUSTER / 8) * CLUSTER).to_be_bytes(),
            &[0; 4],
            &(tables as u32).to_be_bytes(),
            &l1.to_be_bytes(),
            &table.to_be_bytes(),
            &1_u32.to_be_bytes(),
            &u32::from(is_snapshot).to_be_bytes(),
            &if is_snapshot { snapshots } else { 0 }.to_be_bytes(),
            &[0; 24],
            &4_u32.to_be_bytes(),
            &104_u32.to_be_bytes(),
        ]
        .concat();
        header.resize(512, 0);
        file.write_all_at(&header, 0)?;
        put(table, &mut (0..blocks).map(|index| first_block + index * CLUSTER))?;
        let places = (0..tables).map(|index| first_l2 + index * CLUSTER);
        if is_snapshot {
            put(snapshot_l1, &mut places.clone())?;
            let mut entry = [
                &snapshot_l1.to_be_bytes()[..],
                &(tables as u32).to_be_bytes(),
                &[0, 1, 0, 1],
                &[0; 20],
                &16_u32.to_be_bytes(),
                &[0; 8],
                &(tables * (CLUSTER / 8) * CLUSTER).to_be_bytes(),
                b"1s",
            ]
            .concat();
            entry.resize(entry.len().next_multiple_of(8), 0);
            file.write_all_at(&entry, snapshots)?;
        } else {
            put(l1, &mut places.clone().map(|place| COPIED | place))?;
        }
        assert!(
            l1_bytes <= CLUSTER && end / CLUSTER <= COUNTED,
            "one cluster has room"
        );
        // Every cluster of the file counts one, but the tables of a snapshot that there is not.
        let counts = (0..end / CLUSTER).map(|at| u16::from(is_snapshot || !(3..5).contains(&at)));
        let counts: Vec<u8> = counts.flat_map(u16::to_be_bytes).collect();
        file.write_all_at(&counts, first_block)?;
        if matches!(self, Self::Full(_)) {
            let counts = [0, 1].repeat(COUNTED as usize);
            for index in 0..blocks {
                file.write_all_at(&counts, first_block + index * CLUSTER)?;
            }
            return file.sync_all();
        }
        for index in 1..blocks {
            file.write_all_at(&[0, 1], first_block + index * CLUSTER)?;
        }
        put(
            first_l2,
            &mut (1..blocks).map(|index| COPIED | (index * COUNTED * CLUSTER)),
        )?;
        file.sync_all()
    }
}
