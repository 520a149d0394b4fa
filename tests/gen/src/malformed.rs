//! Malformed images of every class an opener must survive: one sound image, and what is broken in it.
//!
//! A case is a list of patches, so that two of them can be put into one image. What a case has to lead to is told by
//! its [`Fate`]; the text an error must contain names the field, and `at` the byte of the header it is in.

mod bitmaps;

pub use bitmaps::{bitmap_base, bitmap_cases};

use crate::image::{
    COMPRESSED, COPIED, Content, Image, ImageSpec, Snapshot, Structure, extension, put, u64_in,
};

/// The size of the base image's clusters.
pub const CLUSTER: u64 = 4096;
/// The size of its disk.
pub const DISK: u64 = 4 << 20;
/// A guest cluster with data.
pub const DATA: u64 = 8;
/// A compressed guest cluster.
pub const COMPRESSED_CLUSTER: u64 = 20;

/// The required outcome of a case.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fate {
    /// Refused to readers and writers; the error says this.
    Refused(&'static str),
    /// Refused to writers, with this; readers may look.
    NotWritable(&'static str),
    /// Opened by both, and every read is answered.
    Opens,
    /// Opened by readers, and reading all of it hits an error somewhere; so do writers, if not refused.
    Eio,
    /// Any answer will do.
    Survives,
}

/// One way to break the base image.
#[derive(Clone, Debug)]
pub struct Case {
    /// The class it belongs to, as `docs/trust.md` lists them.
    pub class: &'static str,
    /// The name of what is broken.
    pub name: String,
    /// Bytes to replace; a patch behind the end makes the file longer.
    pub patches: Vec<(u64, Vec<u8>)>,
    /// The length to cut the file to, before the patches.
    pub cut: Option<u64>,
    /// The required outcome.
    pub fate: Fate,
}

impl Case {
    /// The broken image.
    #[must_use]
    pub fn apply(&self, base: &[u8]) -> Vec<u8> {
        let mut bytes = base.to_vec();
        if let Some(cut) = self.cut {
            bytes.truncate(cut as usize);
        }
        for (at, patch) in &self.patches {
            if self.cut.is_some_and(|cut| at + patch.len() as u64 > cut) {
                continue;
            }
            bytes.resize(bytes.len().max(*at as usize + patch.len()), 0);
            put(&mut bytes, *at, patch);
        }
        bytes
    }

    /// Both cases in one image. It must be refused if either must be, and survived otherwise.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let fate = match (self.fate, other.fate) {
            // Which of two errors is told is nobody's promise.
            (Fate::Refused(_), _) | (_, Fate::Refused(_)) => Fate::Refused(""),
            _ => Fate::Survives,
        };
        Self {
            class: "pairs",
            name: format!("{}; {}", self.name, other.name),
            patches: [&self.patches[..], &other.patches[..]].concat(),
            cut: self.cut.into_iter().chain(other.cut).min(),
            fate,
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        let range = |(at, bytes): &(u64, Vec<u8>)| *at..*at + bytes.len() as u64;
        self.patches.iter().map(range).any(|a| {
            let mut others = other.patches.iter().map(range);
            others.any(|b| a.start < b.end && b.start < a.end)
        })
    }
}

/// The sound image: data, zeros, compressed clusters, a snapshot, and two L2 tables.
#[must_use]
pub fn base() -> Image {
    base_with(|_| {})
}

/// The sound image with something else about it.
#[must_use]
pub fn base_with(change: impl FnOnce(&mut ImageSpec)) -> Image {
    let mut spec = ImageSpec::new(12, DISK);
    spec.clusters = (0..16).map(|guest| (guest, Content::Data(2))).collect();
    spec.clusters
        .extend([(16, Content::Zero), (17, Content::ZeroAllocated)]);
    spec.clusters
        .extend([(20, Content::Compressed(4)), (21, Content::Compressed(5))]);
    spec.clusters
        .extend((512..516).map(|guest| (guest, Content::Data(3))));
    let own = [(1, Content::Data(1)), (17, Content::Compressed(6))].into();
    spec.snapshots = vec![Snapshot { own }];
    change(&mut spec);
    Image::new(spec)
}

/// A sound image with extended L2 entries: subclusters of every kind, compressed clusters, and a snapshot.
#[must_use]
pub fn subcluster_base() -> Image {
    let mut spec = ImageSpec::new(14, DISK);
    spec.extended = true;
    let mixed = |bitmap| Content::Subclusters(7, bitmap);
    spec.clusters = [
        (0, Content::Data(1)),
        (1, mixed(0x0000_ff00_ff00_00ff)),
        (2, mixed(0)),
        (3, mixed(1 << 63 | 1)),
        (4, Content::Zero),
        (5, Content::ZeroAllocated),
        (DATA, Content::Data(2)),
        (COMPRESSED_CLUSTER, Content::Compressed(4)),
        (COMPRESSED_CLUSTER + 1, Content::Compressed(5)),
    ]
    .into();
    let own = [(1, mixed(0xff << 32 | 0xff00)), (4, Content::Data(3))].into();
    spec.snapshots = vec![Snapshot { own }];
    Image::new(spec)
}

/// Ways in which an extended L2 entry is wrong. `image` is [`subcluster_base`].
#[must_use]
pub fn subcluster_cases(image: &Image) -> Vec<Case> {
    let places = Places::of(image);
    let mut cases = Cases::default();
    let at = |guest: u64| places.l2 + guest * image.spec.l2_entry_bytes();
    let bytes = |words: [u64; 2]| words.map(u64::to_be_bytes).concat();
    let (data, all) = (u64_in(&places.bytes, at(DATA)), crate::image::DATA);
    let past = places.end.next_multiple_of(image.cluster()) + (1 << 20);
    for (name, entry, fate) in [
        ("data and zeros", [data, all | 1 << 32], Fate::Eio),
        ("all bits", [data, u64::MAX], Fate::Eio),
        (
            "the last subcluster of both kinds",
            [data, 1 << 63 | 1 << 31],
            Fate::Eio,
        ),
        ("data without a host cluster", [0, 1], Fate::Eio),
        ("data of COPIED alone", [COPIED, all], Fate::Eio),
        ("every kind without a host cluster", [0, u64::MAX], Fate::Eio),
        ("zeros without a host cluster", [0, 1 << 40], Fate::Opens),
        ("a host cluster without data", [data, 0], Fate::Opens),
        ("a host cluster of zeros", [data, all << 32], Fate::Opens),
        ("the all-zeros flag", [data | 1, all], Fate::Opens),
        ("a reserved bit", [data | 2, all], Fate::Eio),
        ("a reserved bit beside no data", [data | 1 << 60, 0], Fate::Eio),
        ("no multiple of the cluster size", [data | 512, all], Fate::Eio),
        ("data past the end", [COPIED | past, all], Fate::Eio),
        ("one subcluster past the end", [COPIED | past, 1 << 7], Fate::Eio),
        ("zeros past the end", [COPIED | past, all << 32], Fate::Survives),
        ("itself", [COPIED | places.l2, 1], Fate::Survives),
        ("the header", [COPIED, 1], Fate::Eio),
        ("the refcount table", [COPIED | places.table, all], Fate::Survives),
        (
            "another's cluster",
            [u64_in(&places.bytes, at(0)), 1],
            Fate::Survives,
        ),
        ("compressed past the end", [COMPRESSED | past, 1], Fate::Eio),
        ("compressed and COPIED", [COMPRESSED | data, all], Fate::Eio),
    ] {
        let patches = vec![(at(DATA), bytes(entry))];
        cases.push("extended L2 entry", name, patches, fate);
    }
    let compressed = u64_in(&places.bytes, at(COMPRESSED_CLUSTER));
    for bitmap in [1, all, 1 << 32, u64::MAX] {
        let patches = vec![(at(COMPRESSED_CLUSTER), bytes([compressed, bitmap]))];
        let name = format!("bitmap {bitmap:#x} of a compressed cluster");
        cases.push("bitmap of a compressed cluster", name, patches, Fate::Opens);
    }
    cases.word("extended L2", "read as standard entries", 72, 0, Fate::Survives);
    cases.0
}

/// The offsets of structures in the base image, in bytes.
struct Places {
    bytes: Vec<u8>,
    l1: u64,
    l2: u64,
    table: u64,
    block: u64,
    snapshots: u64,
    end: u64,
}

impl Places {
    fn of(image: &Image) -> Self {
        let l1 = image.first(Structure::L1Table);
        Self {
            l1,
            l2: u64_in(&image.bytes, l1) & !COPIED,
            table: image.first(Structure::RefcountTable),
            block: image.first(Structure::RefcountBlock),
            snapshots: image.first(Structure::SnapshotTable),
            end: image.bytes.len() as u64,
            bytes: image.bytes.clone(),
        }
    }

    fn entry(&self, guest: u64) -> u64 {
        u64_in(&self.bytes, self.l2 + guest * 8)
    }

    /// Returns the patches that give the image these extensions and no others, and the backing name after them.
    fn extensions(&self, extensions: &[u8], backing: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let first = 112;
        let mut area = vec![0; (CLUSTER - first) as usize];
        put(&mut area, 0, extensions);
        let mut patches = Vec::new();
        if !backing.is_empty() {
            let at = extensions.len().next_multiple_of(8) as u64 + 16;
            put(&mut area, at, backing);
            patches.push((8, (first + at).to_be_bytes().to_vec()));
            patches.push((16, (backing.len() as u32).to_be_bytes().to_vec()));
        }
        patches.insert(0, (first, area));
        patches
    }
}

/// Cases while they are gathered.
#[derive(Default)]
struct Cases(Vec<Case>);

impl Cases {
    fn push(
        &mut self,
        class: &'static str,
        name: impl Into<String>,
        patches: Vec<(u64, Vec<u8>)>,
        fate: Fate,
    ) {
        self.0.push(Case {
            class,
            name: name.into(),
            patches,
            cut: None,
            fate,
        });
    }

    fn field32(&mut self, name: &'static str, at: u64, values: &[u32], fate: Fate) {
        for value in values {
            let patch = vec![(at, value.to_be_bytes().to_vec())];
            self.push(name, format!("{name} {value:#x}"), patch, fate);
        }
    }

    fn field64(&mut self, name: &'static str, at: u64, values: &[u64], fate: Fate) {
        for value in values {
            self.word(name, format!("{name} {value:#x}"), at, *value, fate);
        }
    }

    fn word(&mut self, class: &'static str, name: impl Into<String>, at: u64, value: u64, fate: Fate) {
        self.push(class, name, vec![(at, value.to_be_bytes().to_vec())], fate);
    }
}

/// Every class, with the values that are interesting. `image` is [`base`].
#[must_use]
pub fn cases(image: &Image) -> Vec<Case> {
    let places = Places::of(image);
    let mut cases = Cases::default();
    header(&mut cases, &places);
    features(&mut cases);
    extensions(&mut cases, &places);
    backing(&mut cases, &places);
    entries(&mut cases, &places);
    own_structures(&mut cases, &places);
    compressed(&mut cases, &places);
    refcounts(&mut cases, &places);
    snapshots(&mut cases, &places);
    cuts(&mut cases, &places);
    cases.0
}

/// Pairs: the first and the last case of each class with those of every other class, where they do not touch the
/// same bytes.
#[must_use]
pub fn pairs(cases: &[Case]) -> Vec<Case> {
    let mut chosen: Vec<&Case> = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let first = !cases[..index].iter().any(|other| other.class == case.class);
        let last = !cases[index + 1..].iter().any(|other| other.class == case.class);
        if first || last {
            chosen.push(case);
        }
    }
    let mut pairs = Vec::new();
    for (index, case) in chosen.iter().enumerate() {
        for other in &chosen[index + 1..] {
            if case.class != other.class && !case.overlaps(other) {
                pairs.push(case.and(other));
            }
        }
    }
    pairs
}

fn header(cases: &mut Cases, places: &Places) {
    use Fate::Refused;
    cases.field32("magic", 0, &[0, 0x5146_4900, u32::MAX], Refused("QFI"));
    cases.field32("version", 4, &[0, 1, 4, u32::MAX], Refused("header byte 4)"));
    let bits = [0, 8, 22, 63, u32::MAX];
    cases.field32("cluster_bits", 20, &bits, Refused("cluster_bits"));
    cases.field32("crypt_method", 32, &[3, u32::MAX], Refused("header byte 32)"));
    cases.field32("encryption", 32, &[1, 2], Refused("encrypt"));
    cases.field32(
        "l1_size",
        36,
        &[0, 1, u32::MAX],
        Refused("l1_size (header byte 36)"),
    );
    let says = Refused("refcount_table_clusters (header byte 56)");
    cases.field32("refcount_table_clusters", 56, &[0, u32::MAX], says);
    let says = Refused("nb_snapshots (header byte 60)");
    cases.field32("nb_snapshots", 60, &[65_537, u32::MAX], says);
    cases.field32(
        "refcount_order",
        96,
        &[7, 64, u32::MAX],
        Refused("refcount_order"),
    );
    let lengths = [0, 8, 72, 103, 105, 4104, 1 << 16, u32::MAX];
    cases.field32("header_length", 100, &lengths, Refused("header_length"));
    let says = Refused("size (header byte 24)");
    cases.field64("size", 24, &[1 << 63, u64::MAX], says);
    let larger = [DISK + 1, 1 << 40, i64::MAX as u64];
    cases.field64(
        "size larger than the L1 table",
        24,
        &larger,
        Refused("l1_size (header byte 36)"),
    );
    let wrong = [0, 1, 512, places.l1 + 8, !4095, 1 << 63, u64::MAX];
    let far = [places.end, 1 << 40, 1 << 62];
    let says = Refused("l1_table_offset (header byte 40)");
    cases.field64("l1_table_offset", 40, &wrong, says);
    cases.field64("L1 table past the end", 40, &far, Refused("L1 table"));
    let says = Refused("refcount_table_offset (header byte 48)");
    cases.field64("refcount_table_offset", 48, &wrong, says);
    cases.field64("refcount table past the end", 48, &far, Refused("refcount table"));
    let wrong = [0, 8, places.snapshots + 1, 1 << 63, u64::MAX];
    cases.field64(
        "snapshots_offset",
        64,
        &wrong,
        Refused("snapshots_offset (header byte 64)"),
    );
    cases.field64(
        "unknown incompatible features",
        72,
        &[1 << 5, 1 << 63],
        Refused("header byte 72"),
    );
    cases.field64(
        "data file without a name",
        72,
        &[1 << 2],
        Refused("external file"),
    );
    let patches = vec![
        (72, (1_u64 << 4).to_be_bytes().to_vec()),
        (36, 4_u32.to_be_bytes().to_vec()),
    ];
    cases.push(
        "extended L2 with small clusters",
        "extended L2 in clusters of 4 KiB",
        patches,
        Refused("cluster_bits"),
    );
    for size in [DISK - 100, 0] {
        cases.word(
            "odd size",
            format!("a disk of {size:#x} bytes"),
            24,
            size,
            Fate::Opens,
        );
    }
    cases.word("odd size", "a disk of one byte", 24, 1, Fate::Survives);
}

fn features(cases: &mut Cases) {
    let type_and_bit = |kind: u8, bit: u64| vec![(104, vec![kind]), (72, bit.to_be_bytes().to_vec())];
    for (name, kind, bit) in [
        ("a type without its bit", 1, 0),
        ("a bit without its type", 0, 8),
        ("an unknown type", 2, 8),
        ("the last type", 255, 8),
    ] {
        let fate = Fate::Refused("compression_type (header byte 104)");
        cases.push("compression type", name, type_and_bit(kind, bit), fate);
    }
    cases.word(
        "corrupt bit",
        "marked corrupt",
        72,
        2,
        Fate::NotWritable("corrupt"),
    );
    cases.word("dirty bit", "marked dirty", 72, 1, Fate::Opens);
    cases.word("autoclear", "bitmaps without a directory", 88, 1, Fate::Opens);
    cases.word(
        "autoclear",
        "unknown autoclear bits",
        88,
        u64::MAX - 3,
        Fate::Opens,
    );
    cases.word("autoclear", "raw data without a data file", 88, 2, Fate::Survives);
    cases.word("compatible", "unknown compatible bits", 80, u64::MAX, Fate::Opens);
}

const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const CRYPTO: u32 = 0x0537_be77;
const DATA_FILE: u32 = 0x4441_5441;

fn extensions(cases: &mut Cases, places: &Places) {
    let raw = |kind: u32, len: u32| [kind.to_be_bytes(), len.to_be_bytes()].concat();
    for kind in [BACKING_FORMAT, FEATURE_NAMES, BITMAPS, CRYPTO, DATA_FILE, 0x1234] {
        for len in [1 << 31, u32::MAX, u32::MAX - 7, CLUSTER as u32] {
            let patches = places.extensions(&raw(kind, len), b"");
            let name = format!("extension {kind:#x} of {len:#x} bytes");
            cases.push("extension length", name, patches, Fate::Refused("extension"));
        }
    }
    let features = |bits: u64| (72, bits.to_be_bytes().to_vec());
    let mut name = [&[0, 7][..], b"time travel"].concat();
    name.resize(48, 0);
    let mut patches = places.extensions(&extension(FEATURE_NAMES, &name), b"");
    patches.push(features(1 << 7));
    cases.push(
        "named feature",
        "a feature called time travel",
        patches,
        Fate::Refused("time travel"),
    );
    for name in [
        &br#"json:{"driver":"file","filename":"sentinel"}"#[..],
        b"sentinel",
        b"",
    ] {
        let mut patches = places.extensions(&extension(DATA_FILE, name), b"");
        patches.push(features(1 << 2));
        let what = format!("the data file {:?}", String::from_utf8_lossy(name));
        cases.push("data file", what, patches, Fate::Refused("external file"));
    }
    let patches = places.extensions(&extension(CRYPTO, &[0xff; 16]), b"");
    cases.push(
        "encryption header",
        "one without encryption",
        patches,
        Fate::Survives,
    );
    for (what, payload) in [("short", vec![0; 8]), ("wild", vec![0xff; 24])] {
        let mut patches = places.extensions(&extension(BITMAPS, &payload), b"");
        patches.push((88, 1_u64.to_be_bytes().to_vec()));
        cases.push(
            "bitmaps extension",
            format!("a {what} bitmaps extension"),
            patches,
            Fate::Survives,
        );
    }
}

fn backing(cases: &mut Cases, places: &Places) {
    let format = extension(BACKING_FORMAT, b"raw");
    for name in [
        "sentinel",
        "./sentinel",
        "file:sentinel",
        "/etc/shadow",
        "case.qcow2",
        "nbd://localhost/",
    ] {
        let patches = places.extensions(&format, name.as_bytes());
        let says = Fate::Refused("backing files are not allowed");
        cases.push("backing name", format!("backed by {name}"), patches, says);
    }
    let json = br#"json:{"driver":"file","filename":"sentinel"}"#;
    let says = Fate::Refused("backing files are not allowed");
    cases.push(
        "backing name",
        "backed by JSON",
        places.extensions(&format, json),
        says,
    );
    for (what, offset, len) in [
        ("inside the header", 8_u64, 20_u32),
        ("at the header's end", 103, 8),
        ("too long", 600, 1024),
        ("far too long", 600, u32::MAX),
        ("past the cluster", 4090, 20),
        ("in another cluster", 4096, 20),
        ("nowhere", u64::MAX - 4, 20),
    ] {
        let patches = vec![
            (8, offset.to_be_bytes().to_vec()),
            (16, len.to_be_bytes().to_vec()),
        ];
        let name = format!("a backing name {what}");
        cases.push("backing name place", name, patches, Fate::Refused("backing_file"));
    }
}

fn entries(cases: &mut Cases, places: &Places) {
    let data = places.l2 + DATA * 8;
    for (name, place) in [
        ("unaligned", 512),
        ("to unaligned data", (places.entry(DATA) & !COPIED) + 2048),
        ("just past the end", places.end + 4096),
        ("far past the end", 1 << 40),
        ("as far as it goes", (1 << 56) - 4096),
        ("with a reserved bit", 1 << 57 | places.end),
    ] {
        for (flags, what) in [(0, ""), (COPIED, ", copied")] {
            let entry = place | flags;
            cases.word(
                "L1 entry",
                format!("an L1 entry {name}{what}"),
                places.l1,
                entry,
                Fate::Eio,
            );
            cases.word(
                "L2 entry",
                format!("an L2 entry {name}{what}"),
                data,
                entry,
                Fate::Eio,
            );
        }
        let entry = place | COPIED | 1;
        cases.word(
            "zero cluster's place",
            format!("a zero cluster {name}"),
            data,
            entry,
            Fate::Survives,
        );
    }
    for bit in [1, 2, 8, 56, 60, 61] {
        let entry = places.entry(DATA) | 1 << bit;
        cases.word(
            "reserved bits",
            format!("L2 entry bit {bit}"),
            data,
            entry,
            Fate::Eio,
        );
    }
    for bit in [0, 1, 8, 56, 62] {
        let entry = u64_in(&places.bytes, places.l1) | 1 << bit;
        cases.word(
            "reserved bits",
            format!("L1 entry bit {bit}"),
            places.l1,
            entry,
            Fate::Eio,
        );
    }
    for (name, at) in [("L1", places.l1), ("L2", data)] {
        cases.word(
            "COPIED alone",
            format!("in an {name} entry"),
            at,
            COPIED,
            Fate::Survives,
        );
        cases.word(
            "ones",
            format!("an {name} entry of ones"),
            at,
            u64::MAX,
            Fate::Eio,
        );
    }
}

/// Entries whose target exists, aligned and inside the file, but is a structure of the image.
fn own_structures(cases: &mut Cases, places: &Places) {
    let data = places.l2 + DATA * 8;
    for (name, place) in [
        ("the L1 table", places.l1),
        ("its own table", places.l2),
        ("the refcount table", places.table),
        ("a refcount block", places.block),
        ("the snapshot table", places.snapshots),
    ] {
        let entry = place | COPIED;
        let class = "entry to a structure";
        cases.word(
            class,
            format!("an L2 entry to {name}"),
            data,
            entry,
            Fate::Survives,
        );
        cases.word(
            class,
            format!("a zero cluster in {name}"),
            data,
            entry | 1,
            Fate::Survives,
        );
        cases.word(
            class,
            format!("a shared cluster in {name}"),
            data,
            place,
            Fate::Survives,
        );
        let over = Fate::NotWritable("lies over");
        cases.word(
            "L1 entry to a structure",
            format!("an L1 entry to {name}"),
            places.l1 + 8,
            entry,
            over,
        );
    }
    cases.word(
        "L1 entry to the header",
        "an L1 entry of COPIED and nothing",
        places.l1 + 8,
        COPIED,
        Fate::Survives,
    );
    let twice = places.entry(DATA);
    cases.word(
        "the same twice",
        "the same cluster twice",
        data + 8,
        twice,
        Fate::Opens,
    );
    let table = u64_in(&places.bytes, places.l1);
    cases.word(
        "the same twice",
        "the same table twice",
        places.l1 + 8,
        table,
        Fate::Survives,
    );
}

fn compressed(cases: &mut Cases, places: &Places) {
    let at = places.l2 + COMPRESSED_CLUSTER * 8;
    let entry = places.entry(COMPRESSED_CLUSTER);
    // Cluster bits 12: the sector count begins at bit 58.
    let place = |host: u64, sectors: u64| COMPRESSED | sectors << 58 | host;
    let class = "compressed";
    for (name, entry, fate) in [
        ("past the end", place(places.end + 8192, 7), Fate::Eio),
        ("far past the end", place((1 << 55) - 512, 15), Fate::Eio),
        ("with COPIED", entry | COPIED, Fate::Eio),
        ("over the header", place(0, 7), Fate::Eio),
        ("over the L1 table", place(places.l1, 7), Fate::Eio),
        ("over its own table", place(places.l2, 7), Fate::Survives),
        (
            "running over the end",
            place(places.end - 512, 15),
            Fate::Survives,
        ),
        ("with a reserved bit", entry | 1 << 57, Fate::Eio),
    ] {
        cases.word(class, format!("compressed {name}"), at, entry, fate);
    }
    let host = entry & ((1 << 58) - 1);
    let garbage: Vec<u8> = crate::bytes_of_seed(3, 64)
        .into_iter()
        .map(|byte| byte | 6)
        .collect();
    cases.push("compressed garbage", "garbage", vec![(host, garbage)], Fate::Eio);
    // Two deflate streams that go on for ever, one of stored blocks, one of a single run.
    let bomb = crate::image::compress(&vec![0; 64 << 10], false);
    cases.push("compressed garbage", "a bomb", vec![(host, bomb)], Fate::Survives);
}

fn refcounts(cases: &mut Cases, places: &Places) {
    let start = cases.0.len();
    for (name, entry) in [
        ("unaligned", places.block + 512),
        ("past the end", places.end + 4096),
        ("far past the end", 1 << 50),
        ("at the table itself", places.table),
        ("at the L1 table", places.l1),
        ("with reserved bits", places.block | 0x1ff),
        ("missing", 0),
    ] {
        let name = format!("a refcount block {name}");
        cases.word("refcount block", name, places.table, entry, Fate::Survives);
    }
    for (name, byte) in [("zeroed", 0), ("saturated", 0xff)] {
        let patch = vec![(places.block, vec![byte; CLUSTER as usize])];
        cases.push("refcounts", format!("a {name} block"), patch, Fate::Survives);
    }
    for (name, at) in [
        ("the header", 0),
        ("the L1 table", places.l1),
        ("the refcount table", places.table),
        ("the block itself", places.block),
        ("an L2 table", places.l2),
        ("a data cluster", places.entry(DATA) & !COPIED),
    ] {
        let count = places.block + at / CLUSTER * 2;
        for value in [0_u16, 2, u16::MAX] {
            let patch = vec![(count, value.to_be_bytes().to_vec())];
            cases.push(
                "refcounts",
                format!("{name} counts {value}"),
                patch,
                Fate::Survives,
            );
        }
    }
    // And the same images if they were not closed cleanly: the counts are rebuilt, and right.
    let clean = cases.0.split_off(start);
    cases.0.extend(clean.iter().cloned());
    for mut case in clean {
        case.class = "refcounts of a dirty image";
        case.name = format!("dirty, {}", case.name);
        case.patches.push((79, vec![1]));
        cases.0.push(case);
    }
}

fn snapshots(cases: &mut Cases, places: &Places) {
    let class = "snapshot table";
    for (name, at, bytes) in [
        (
            "an L1 table past the end",
            0,
            (1_u64 << 40).to_be_bytes().to_vec(),
        ),
        ("an unaligned L1 table", 0, (places.l1 + 8).to_be_bytes().to_vec()),
        ("the disk's own L1 table", 0, places.l1.to_be_bytes().to_vec()),
        (
            "an L1 table over the refcount table",
            0,
            places.table.to_be_bytes().to_vec(),
        ),
        ("a huge L1 table", 8, u32::MAX.to_be_bytes().to_vec()),
        ("an L1 table of nothing", 8, vec![0; 4]),
        ("a long identifier", 12, u16::MAX.to_be_bytes().to_vec()),
        ("a long name", 14, u16::MAX.to_be_bytes().to_vec()),
        ("much extra data", 36, 1025_u32.to_be_bytes().to_vec()),
        ("all the extra data", 36, u32::MAX.to_be_bytes().to_vec()),
        ("no extra data", 36, vec![0; 4]),
    ] {
        let patch = vec![(places.snapshots + at, bytes)];
        cases.push(class, format!("a snapshot with {name}"), patch, Fate::Survives);
    }
    cases.push(
        "snapshot count",
        "more snapshots than there are",
        vec![(60, 9_u32.to_be_bytes().to_vec())],
        Fate::Survives,
    );
}

fn cuts(cases: &mut Cases, places: &Places) {
    let mut cuts: Vec<u64> = (0..places.end).step_by(CLUSTER as usize / 2).collect();
    cuts.extend([1, 3, 4, 23, 24, 71, 72, 103, 104, 111, 112, 200, 511, 513]);
    for at in [places.l1, places.l2, places.table, places.block, places.snapshots] {
        cuts.extend([at + 1, at + 8, at + 15, at + 16, at + 512, at + CLUSTER - 1]);
    }
    cuts.sort_unstable();
    cuts.dedup();
    for cut in cuts {
        let fate = if cut < 72 {
            Fate::Refused("cut short")
        } else {
            Fate::Survives
        };
        cases.0.push(Case {
            class: "cut",
            name: format!("cut at {cut:#x}"),
            patches: Vec::new(),
            cut: Some(cut),
            fate,
        });
    }
}
