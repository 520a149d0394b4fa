//! Sound images, written from the specification: any cluster size, refcount width and version, with data, zeros,
//! compressed clusters, snapshots that share some of it, a bitmap, a backing name and extensions.
//!
//! An [`Image`] knows where each of its structures is, so that a mutation can aim, and what the guest must read.

use std::collections::BTreeMap;
use std::io::Write;

/// The contents that the guest must find in one cluster.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Content {
    /// A cluster of its own, filled with a pattern of this tag.
    Data(u8),
    /// The all-zeros flag (version 3), without a cluster.
    Zero,
    /// The all-zeros flag (version 3) over an allocated cluster that holds something else.
    ZeroAllocated,
    /// Compressed, with a pattern of this tag.
    Compressed(u8),
    /// A cluster of its own, filled with a pattern of this tag, of which the guest finds what this bitmap says. With extended
    /// L2 entries only.
    Subclusters(u8, u64),
}

/// An L2 entry: the descriptor, and the bitmap that only an extended one has.
type Entry = (u64, u64);

/// An internal snapshot: what it has that the disk has not. The rest is shared.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Guest clusters that differ from the disk's.
    pub own: BTreeMap<u64, Content>,
}

/// A description of an image to write.
#[derive(Clone, Debug)]
pub struct ImageSpec {
    /// 2 or 3.
    pub version: u32,
    /// 9 to 21; 14 at least with extended L2 entries.
    pub cluster_bits: u32,
    /// True if L2 entries are extended: they map subclusters (version 3).
    pub extended: bool,
    /// 0 to 6; version 2 has 4.
    pub refcount_order: u32,
    /// The guest's disk, in bytes.
    pub size_bytes: u64,
    /// The contents of the disk's clusters; the others are unallocated.
    pub clusters: BTreeMap<u64, Content>,
    /// Snapshots, oldest first. A refcount must be able to count them all.
    pub snapshots: Vec<Snapshot>,
    /// True if compressed clusters are zstd frames (version 3).
    pub zstd: bool,
    /// Backing file name and format.
    pub backing: Option<(Vec<u8>, Vec<u8>)>,
    /// More header extensions, as they are in the file.
    pub extensions: Vec<u8>,
    /// True if there is a persistent bitmap (version 3).
    pub bitmap: bool,
    /// `incompatible_features`, beyond the compression bit.
    pub incompatible: u64,
    /// `compatible_features`.
    pub compatible: u64,
}

impl ImageSpec {
    /// An empty version 3 disk.
    #[must_use]
    pub fn new(cluster_bits: u32, size_bytes: u64) -> Self {
        Self {
            version: 3,
            cluster_bits,
            extended: false,
            refcount_order: 4,
            size_bytes,
            clusters: BTreeMap::new(),
            snapshots: Vec::new(),
            zstd: false,
            backing: None,
            extensions: Vec::new(),
            bitmap: false,
            incompatible: 0,
            compatible: 0,
        }
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The size of an L2 entry in bytes.
    #[must_use]
    pub fn l2_entry_bytes(&self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    fn guest_clusters(&self) -> u64 {
        self.size_bytes.div_ceil(self.cluster())
    }
}

/// A kind of structure in an image.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[expect(missing_docs, reason = "named after the specification's structures")]
pub enum Structure {
    Header,
    RefcountTable,
    RefcountBlock,
    L1Table,
    L2Table,
    SnapshotTable,
    SnapshotL1Table,
    BitmapDirectory,
    BitmapTable,
    BitmapData,
    CompressedData,
    Data,
}

/// The place of a structure, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    /// The kind of structure.
    pub structure: Structure,
    /// The offset at which it starts.
    pub offset: u64,
    /// Its length.
    pub len: u64,
}

/// An image, and what is where in it.
#[derive(Clone, Debug)]
pub struct Image {
    /// The file.
    pub bytes: Vec<u8>,
    /// Its structures, in the order they were written.
    pub places: Vec<Place>,
    /// The description it was made from.
    pub spec: ImageSpec,
}

/// A cluster of data as a guest would write it: no two clusters, and no two places in one, look alike.
fn pattern(tag: u8, guest_cluster: u64, len: u64) -> Vec<u8> {
    let word = |i: u64| (u64::from(tag) << 56 | guest_cluster << 24 | i & 0xff_ffff).to_be_bytes();
    (0..len / 8).flat_map(word).collect()
}

/// The big-endian number at a place.
#[must_use]
pub fn u64_in(bytes: &[u8], at: u64) -> u64 {
    let place = bytes.get(at as usize..).and_then(|rest| rest.first_chunk::<8>());
    place.map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// Replaces bytes, which must be there.
pub fn put(bytes: &mut [u8], at: u64, new: &[u8]) {
    bytes[at as usize..at as usize + new.len()].copy_from_slice(new);
}

/// A header extension with its padding.
#[must_use]
pub fn extension(kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [kind.to_be_bytes(), (payload.len() as u32).to_be_bytes()].concat();
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

/// The L1 and L2 entry flag: the refcount is exactly one.
pub const COPIED: u64 = 1 << 63;
/// The L2 entry flag of compressed clusters.
pub const COMPRESSED: u64 = 1 << 62;
/// The bitmap of an extended L2 entry all of whose subclusters are data.
pub const DATA: u64 = 0xffff_ffff;
/// The bitmap of an extended L2 entry all of whose subclusters are zeros.
const ZEROS: u64 = DATA << 32;

/// An image while it is written.
struct Writer {
    spec: ImageSpec,
    bytes: Vec<u8>,
    places: Vec<Place>,
    refcounts: Vec<u64>,
    /// The offset at which the next compressed cluster may start: they are packed, as QEMU packs them.
    packed: Option<u64>,
}

impl Writer {
    fn allocate(&mut self, structure: Structure, len: u64) -> u64 {
        let cluster = self.spec.cluster();
        let offset = self.bytes.len() as u64;
        let clusters = len.div_ceil(cluster).max(1);
        self.bytes.resize((offset + clusters * cluster) as usize, 0);
        self.refcounts.resize(self.refcounts.len() + clusters as usize, 1);
        self.places.push(Place {
            structure,
            offset,
            len,
        });
        offset
    }

    fn count(&mut self, offset: u64, len: u64) {
        let cluster = self.spec.cluster();
        for at in offset / cluster..=(offset + len - 1) / cluster {
            self.refcounts[at as usize] += 1;
        }
    }

    /// Writes one cluster's content and returns its L2 entry, without COPIED.
    fn content(&mut self, guest: u64, content: Content) -> Entry {
        let cluster = self.spec.cluster();
        let is_extended = self.spec.extended;
        let mut own = |tag| {
            let at = self.allocate(Structure::Data, cluster);
            put(&mut self.bytes, at, &pattern(tag, guest, cluster));
            at
        };
        match content {
            Content::Data(tag) if is_extended => (own(tag), DATA),
            Content::Data(tag) => (own(tag), 0),
            Content::Zero if is_extended => (0, ZEROS),
            Content::Zero => (1, 0),
            Content::ZeroAllocated if is_extended => (own(0xEE), ZEROS),
            Content::ZeroAllocated => (own(0xEE) | 1, 0),
            Content::Subclusters(tag, bitmap) => (own(tag), bitmap),
            Content::Compressed(tag) => {
                let packed = compress(&pattern(tag, guest, cluster), self.spec.zstd);
                (self.compressed(&packed), 0)
            }
        }
    }

    fn compressed(&mut self, packed: &[u8]) -> u64 {
        let cluster = self.spec.cluster();
        let len = packed.len() as u64;
        let room = |at: u64| cluster - at % cluster;
        let at = match self.packed {
            Some(at) if room(at) >= len => {
                self.count(at, len);
                at
            }
            _ => {
                let at = self.allocate(Structure::CompressedData, len.max(cluster));
                // A cluster that does not compress goes into two; the second is counted as the first.
                at
            }
        };
        put(&mut self.bytes, at, packed);
        let end = at + len;
        self.packed = (!end.is_multiple_of(cluster)).then_some(end);
        let shift = 62 - (self.spec.cluster_bits - 8);
        let sectors = (end - 1) / 512 - at / 512;
        COMPRESSED | sectors << shift | at
    }

    fn l2_entries(&self) -> u64 {
        self.spec.cluster() / self.spec.l2_entry_bytes()
    }

    /// Adds one to the refcount of what an L2 entry refers to.
    fn share(&mut self, (entry, _): Entry) {
        let cluster = self.spec.cluster();
        if entry & COMPRESSED != 0 {
            let shift = 62 - (self.spec.cluster_bits - 8);
            let host = entry & ((1 << shift) - 1);
            let sectors = (entry & (COMPRESSED - 1)) >> shift;
            let start = host / 512 * 512;
            self.count(host, start + (sectors + 1) * 512 - host);
        } else if entry & 0x00ff_ffff_ffff_fe00 != 0 {
            self.count(entry & 0x00ff_ffff_ffff_fe00, cluster);
        }
    }

    /// Writes L2 tables for these entries and an L1 table of them.
    fn l2_tables(&mut self, entries: &BTreeMap<u64, Entry>) -> BTreeMap<u64, u64> {
        let per_table = self.l2_entries();
        let mut tables = BTreeMap::new();
        for (&guest, &(descriptor, bitmap)) in entries {
            let index = guest / per_table;
            let table = match tables.get(&index) {
                Some(&table) => table,
                None => {
                    let table = self.allocate(Structure::L2Table, self.spec.cluster());
                    tables.insert(index, table);
                    table
                }
            };
            let bytes = [descriptor, bitmap].map(u64::to_be_bytes).concat();
            let len = self.spec.l2_entry_bytes();
            put(
                &mut self.bytes,
                table + guest % per_table * len,
                &bytes[..len as usize],
            );
        }
        tables
    }
}

/// A cluster as it is compressed in the file.
#[must_use]
pub fn compress(bytes: &[u8], zstd: bool) -> Vec<u8> {
    if zstd {
        return zstd::bulk::compress(bytes, 3).unwrap_or_default();
    }
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.unwrap_or_default()
}

impl Image {
    /// Writes the image that `spec` asks for.
    #[must_use]
    pub fn new(spec: ImageSpec) -> Self {
        let cluster = spec.cluster();
        let mut writer = Writer {
            bytes: Vec::new(),
            places: Vec::new(),
            refcounts: Vec::new(),
            packed: None,
            spec,
        };
        let writer = &mut writer;
        writer.allocate(Structure::Header, cluster);
        let l1_entries = writer.spec.guest_clusters().div_ceil(writer.l2_entries());
        let l1_at = writer.allocate(Structure::L1Table, l1_entries * 8);

        let mut entries = BTreeMap::new();
        for (guest, content) in writer.spec.clusters.clone() {
            entries.insert(guest, writer.content(guest, content));
        }
        let tables = writer.l2_tables(&entries);
        for (&index, &table) in &tables {
            put(&mut writer.bytes, l1_at + index * 8, &table.to_be_bytes());
        }

        let mut snapshots = Vec::new();
        for (number, snapshot) in writer.spec.snapshots.clone().into_iter().enumerate() {
            let l1 = writer.snapshot(&snapshot, &entries, &tables, l1_entries);
            snapshots.extend(snapshot_entry(number, l1, l1_entries, writer.spec.size_bytes));
        }
        let snapshots_at = if snapshots.is_empty() {
            0
        } else {
            let at = writer.allocate(Structure::SnapshotTable, snapshots.len() as u64);
            put(&mut writer.bytes, at, &snapshots);
            at
        };
        let bitmap = (writer.spec.bitmap && writer.spec.version == 3).then(|| writer.bitmap());

        writer.set_copied(l1_at, l1_entries);
        let (table_at, table_clusters) = writer.refcount_structure();
        writer.header(&HeaderFields {
            l1_at,
            l1_entries,
            table_at,
            table_clusters,
            snapshots_at,
            bitmap,
        });
        Self {
            bytes: std::mem::take(&mut writer.bytes),
            places: std::mem::take(&mut writer.places),
            spec: writer.spec.clone(),
        }
    }

    /// The structures of one kind.
    pub fn all(&self, structure: Structure) -> impl Iterator<Item = Place> + '_ {
        self.places
            .iter()
            .copied()
            .filter(move |place| place.structure == structure)
    }

    /// The first structure of a kind.
    ///
    /// # Panics
    ///
    /// If the image has none.
    #[must_use]
    pub fn first(&self, structure: Structure) -> u64 {
        let place = self.all(structure).next();
        place
            .unwrap_or_else(|| panic!("the image has no {structure:?}"))
            .offset
    }

    /// The size of a cluster in bytes.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        self.spec.cluster()
    }

    /// Returns the disk that the guest reads if there is no backing file.
    #[must_use]
    pub fn guest(&self) -> Vec<u8> {
        self.guest_over(&[])
    }

    /// Returns the disk that the guest reads over a backing file that holds `below`.
    #[must_use]
    pub fn guest_over(&self, below: &[u8]) -> Vec<u8> {
        let cluster = self.spec.cluster();
        let mut disk = below.to_vec();
        disk.resize((self.spec.guest_clusters() * cluster) as usize, 0);
        for (&guest, &content) in &self.spec.clusters {
            let at = guest * cluster;
            match content {
                Content::Data(tag) | Content::Compressed(tag) => {
                    put(&mut disk, at, &pattern(tag, guest, cluster));
                }
                Content::Zero | Content::ZeroAllocated => {
                    disk[at as usize..][..cluster as usize].fill(0);
                }
                Content::Subclusters(tag, bitmap) => {
                    let (bytes, len) = (pattern(tag, guest, cluster), cluster as usize / 32);
                    let places = disk[at as usize..].chunks_exact_mut(len);
                    for (index, (place, data)) in places.zip(bytes.chunks_exact(len)).enumerate() {
                        if bitmap >> index & 1 == 1 {
                            place.copy_from_slice(data);
                        } else if bitmap >> (index + 32) & 1 == 1 {
                            place.fill(0);
                        }
                    }
                }
            }
        }
        disk.truncate(self.spec.size_bytes as usize);
        disk
    }
}

/// The header's references to the rest of the image.
struct HeaderFields {
    l1_at: u64,
    l1_entries: u64,
    table_at: u64,
    table_clusters: u64,
    snapshots_at: u64,
    bitmap: Option<(u64, u64)>,
}

fn snapshot_entry(number: usize, l1_at: u64, l1_entries: u64, size_bytes: u64) -> Vec<u8> {
    let (id, name) = ((number + 1).to_string(), format!("snapshot-{number}"));
    let mut entry = l1_at.to_be_bytes().to_vec();
    entry.extend((l1_entries as u32).to_be_bytes());
    entry.extend((id.len() as u16).to_be_bytes());
    entry.extend((name.len() as u16).to_be_bytes());
    // Date, clock and the old VM state size.
    entry.extend([0; 20]);
    let extra = [0, size_bytes, u64::MAX].map(u64::to_be_bytes).concat();
    entry.extend((extra.len() as u32).to_be_bytes());
    entry.extend(extra);
    entry.extend(id.bytes());
    entry.extend(name.bytes());
    entry.resize(entry.len().next_multiple_of(8), 0);
    entry
}

impl Writer {
    /// Writes a snapshot's L1 table; L2 tables in which it has nothing of its own are shared.
    fn snapshot(
        &mut self,
        snapshot: &Snapshot,
        entries: &BTreeMap<u64, Entry>,
        tables: &BTreeMap<u64, u64>,
        l1_entries: u64,
    ) -> u64 {
        let per_table = self.l2_entries();
        let l1_at = self.allocate(Structure::SnapshotL1Table, l1_entries * 8);
        let mut own = BTreeMap::new();
        for (&guest, &content) in &snapshot.own {
            own.insert(guest, self.content(guest, content));
        }
        for index in 0..l1_entries {
            let range = index * per_table..(index + 1) * per_table;
            let shared = entries
                .range(range.clone())
                .map(|(&guest, &entry)| (guest, entry));
            let shared: BTreeMap<u64, Entry> = shared.filter(|(guest, _)| !own.contains_key(guest)).collect();
            for &entry in shared.values() {
                self.share(entry);
            }
            let table = if own.range(range.clone()).next().is_none() {
                let Some(&table) = tables.get(&index) else {
                    continue;
                };
                self.count(table, 1);
                table
            } else {
                let mut all = shared;
                all.extend(own.range(range).map(|(&guest, &entry)| (guest, entry)));
                self.l2_tables(&all)[&index]
            };
            put(&mut self.bytes, l1_at + index * 8, &table.to_be_bytes());
        }
        l1_at
    }

    /// A bitmap of one table with one cluster of data: directory offset and size.
    fn bitmap(&mut self) -> (u64, u64) {
        // Granularity 64 KiB: one bit each.
        let bits = self.spec.size_bytes.div_ceil(1 << 16).max(1);
        let entries = bits.div_ceil(8 * self.spec.cluster()).max(1);
        let data = self.allocate(Structure::BitmapData, self.spec.cluster());
        let table = self.allocate(Structure::BitmapTable, entries * 8);
        put(&mut self.bytes, table, &data.to_be_bytes());
        let mut entry = table.to_be_bytes().to_vec();
        entry.extend((entries as u32).to_be_bytes());
        entry.extend(2_u32.to_be_bytes());
        entry.extend([1, 16]);
        entry.extend(7_u16.to_be_bytes());
        entry.extend(0_u32.to_be_bytes());
        entry.extend(b"nightly");
        entry.resize(entry.len().next_multiple_of(8), 0);
        let directory = self.allocate(Structure::BitmapDirectory, entry.len() as u64);
        put(&mut self.bytes, directory, &entry);
        (directory, entry.len() as u64)
    }

    /// Sets COPIED in the active L1 table and the L2 tables it leads to, where the refcount is one.
    fn set_copied(&mut self, l1_at: u64, l1_entries: u64) {
        let cluster = self.spec.cluster();
        let single = |refcounts: &[u64], at: u64| refcounts[(at / cluster) as usize] == 1;
        for index in 0..l1_entries {
            let at = l1_at + index * 8;
            let table = u64_in(&self.bytes, at);
            if table == 0 {
                continue;
            }
            if single(&self.refcounts, table) {
                put(&mut self.bytes, at, &(table | COPIED).to_be_bytes());
            }
            for entry_at in (table..table + cluster).step_by(self.spec.l2_entry_bytes() as usize) {
                let entry = u64_in(&self.bytes, entry_at);
                let host = entry & 0x00ff_ffff_ffff_fe00;
                // What a snapshot refers to through a table it shares is not counted here again.
                if entry & COMPRESSED == 0 && host != 0 && single(&self.refcounts, host) {
                    put(&mut self.bytes, entry_at, &(entry | COPIED).to_be_bytes());
                }
            }
        }
    }

    /// Writes refcount blocks and table behind everything: the table's place and clusters.
    fn refcount_structure(&mut self) -> (u64, u64) {
        let cluster = self.spec.cluster();
        let bits = 1_u64 << self.spec.refcount_order;
        let per_block = cluster * 8 / bits;
        let used = self.refcounts.len() as u64;
        let (mut blocks, mut table_clusters) = (1, 1);
        loop {
            let total = used + blocks + table_clusters;
            let (new_blocks, new_table) = (
                total.div_ceil(per_block),
                (total.div_ceil(per_block) * 8).div_ceil(cluster),
            );
            if (new_blocks, new_table) == (blocks, table_clusters) {
                break;
            }
            (blocks, table_clusters) = (new_blocks.max(blocks), new_table.max(table_clusters));
        }
        let table = self.allocate(Structure::RefcountTable, table_clusters * cluster);
        for block in 0..blocks {
            let at = self.allocate(Structure::RefcountBlock, cluster);
            put(&mut self.bytes, table + block * 8, &at.to_be_bytes());
        }
        for (index, count) in self.refcounts.clone().into_iter().enumerate() {
            let block = u64_in(&self.bytes, table + index as u64 / per_block * 8);
            let place = index as u64 % per_block;
            if bits >= 8 {
                let bytes = count.to_be_bytes();
                let width = bits / 8;
                put(
                    &mut self.bytes,
                    block + place * width,
                    &bytes[(8 - width) as usize..],
                );
            } else {
                let shift = place * bits % 8;
                self.bytes[(block + place * bits / 8) as usize] |= (count << shift) as u8;
            }
        }
        (table, table_clusters)
    }

    fn header(&mut self, fields: &HeaderFields) {
        let spec = self.spec.clone();
        let bytes = &mut self.bytes;
        put(bytes, 0, b"QFI\xfb");
        put(bytes, 4, &spec.version.to_be_bytes());
        put(bytes, 20, &spec.cluster_bits.to_be_bytes());
        put(bytes, 24, &spec.size_bytes.to_be_bytes());
        put(bytes, 36, &(fields.l1_entries as u32).to_be_bytes());
        put(bytes, 40, &fields.l1_at.to_be_bytes());
        put(bytes, 48, &fields.table_at.to_be_bytes());
        put(bytes, 56, &(fields.table_clusters as u32).to_be_bytes());
        put(bytes, 60, &(spec.snapshots.len() as u32).to_be_bytes());
        put(bytes, 64, &fields.snapshots_at.to_be_bytes());
        let mut at = 72;
        if spec.version == 3 {
            let compression = if spec.zstd { 1 << 3 } else { 0 };
            let extended = if spec.extended { 1 << 4 } else { 0 };
            let incompatible = spec.incompatible | compression | extended;
            put(bytes, 72, &incompatible.to_be_bytes());
            put(bytes, 80, &spec.compatible.to_be_bytes());
            put(bytes, 88, &u64::from(fields.bitmap.is_some()).to_be_bytes());
            put(bytes, 96, &spec.refcount_order.to_be_bytes());
            put(bytes, 100, &112_u32.to_be_bytes());
            bytes[104] = u8::from(spec.zstd);
            at = 112;
        }
        let mut extensions = Vec::new();
        if let Some((_, format)) = &spec.backing {
            extensions.extend(extension(0xe279_2aca, format));
        }
        if let Some((directory, len)) = fields.bitmap {
            let payload = [1_u64 << 32, len, directory].map(u64::to_be_bytes).concat();
            extensions.extend(extension(0x2385_2875, &payload));
        }
        extensions.extend(&spec.extensions);
        put(bytes, at, &extensions);
        at += extensions.len() as u64 + 8;
        if let Some((name, _)) = &spec.backing {
            put(bytes, 8, &at.to_be_bytes());
            put(bytes, 16, &(name.len() as u32).to_be_bytes());
            put(bytes, at, name);
        }
    }
}
