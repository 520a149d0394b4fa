//! Structure-aware mutation: a sound image of any kind, and a few of its fields changed to what hurts most.

use ringdisk_gen::image::{COMPRESSED, COPIED, extension, put, u64_in};
use ringdisk_gen::{Content, Image, ImageSpec, Snapshot, Structure};

use crate::cursor::Cursor;

/// The name of the backing file, if there is one.
pub const BACKING: &str = "base.raw";
/// The most mutations of one image.
const MUTATIONS_MAX: u64 = 4;

/// Draws what image to write. Its disk has at most 512 KiB.
pub fn spec(cursor: &mut Cursor<'_>) -> ImageSpec {
    let bits = cursor.pick(&[9, 9, 9, 10, 12, 16]);
    let clusters = match bits {
        9 => 1 + cursor.below(130),
        10 => 1 + cursor.below(200),
        12 => 1 + cursor.below(64),
        _ => 1 + cursor.below(8),
    };
    // Some disks end within a cluster.
    let size = (clusters << bits) - 512 * cursor.below((1 << bits) / 512);
    let mut spec = ImageSpec::new(bits, size);
    if cursor.one_in(4) {
        spec.version = 2;
    }
    let sharing = cursor.one_in(2);
    spec.refcount_order = match (spec.version, sharing) {
        (2, _) => 4,
        (_, true) => cursor.pick(&[4, 3, 5, 6]),
        (_, false) => cursor.pick(&[4, 0, 1, 2, 3, 5, 6]),
    };
    let v3 = spec.version == 3;
    spec.extended = v3 && bits >= 14 && !clusters.is_multiple_of(3);
    spec.zstd = v3 && cursor.one_in(2);
    spec.bitmap = v3 && cursor.one_in(3);
    spec.incompatible = u64::from(v3 && cursor.one_in(5));
    spec.compatible = u64::from(v3 && cursor.one_in(4));
    for _ in 0..1 + cursor.below(12) {
        let content = content(cursor, &spec, sharing);
        spec.clusters.insert(cursor.below(clusters), content);
    }
    for _ in 0..if sharing { cursor.below(3) } else { 0 } {
        let mut own = std::collections::BTreeMap::new();
        for _ in 0..cursor.below(4) {
            let content = content(cursor, &spec, sharing);
            own.insert(cursor.below(clusters), content);
        }
        spec.snapshots.push(Snapshot { own });
    }
    if cursor.one_in(4) {
        spec.backing = Some((BACKING.as_bytes().to_vec(), b"raw".to_vec()));
    }
    if cursor.one_in(4) {
        let payload = cursor.bytes(16);
        spec.extensions = extension(
            cursor.pick(&[0x1234, 0x6803_f857, 0x0537_be77, 0x4441_5441]),
            payload,
        );
    }
    spec
}

fn content(cursor: &mut Cursor<'_>, spec: &ImageSpec, compressed: bool) -> Content {
    let tag = 1 + cursor.byte() % 100;
    let v3 = spec.version == 3;
    match cursor.below(5) {
        0 if spec.extended => {
            let data = u64::from(cursor.u32());
            Content::Subclusters(tag, u64::from(cursor.u32()) << 32 & !(data << 32) | data)
        }
        1 if v3 => Content::Zero,
        2 if v3 => Content::ZeroAllocated,
        3 | 4 if compressed => Content::Compressed(tag),
        _ => Content::Data(tag),
    }
}

/// The image with a few things changed; sometimes as it is.
pub fn mutate(cursor: &mut Cursor<'_>, image: &Image) -> Vec<u8> {
    let mut bytes = image.bytes.clone();
    for _ in 0..cursor.below(MUTATIONS_MAX + 1) {
        match cursor.below(12) {
            0 | 1 => header_field(cursor, image, &mut bytes),
            2..=6 => table_entry(cursor, image, &mut bytes),
            7 | 8 => bytes_of(cursor, image, &mut bytes),
            9 => extensions(cursor, &mut bytes),
            10 => snapshot(cursor, image, &mut bytes),
            _ => {
                let len = bytes.len() as u64;
                bytes.truncate(cursor.below(len + 1) as usize);
            }
        }
    }
    bytes
}

/// Replaces what is there; what lies behind the end is left out.
fn set(bytes: &mut [u8], at: u64, new: &[u8]) {
    if at as usize + new.len() <= bytes.len() {
        put(bytes, at, new);
    }
}

/// The fields of the header: where and how wide.
const FIELDS: [(u64, usize); 19] = [
    (4, 4),
    (8, 8),
    (16, 4),
    (20, 4),
    (24, 8),
    (32, 4),
    (36, 4),
    (40, 8),
    (48, 8),
    (56, 4),
    (60, 4),
    (64, 8),
    (72, 8),
    (72, 8),
    (80, 8),
    (88, 8),
    (96, 4),
    (100, 4),
    (104, 1),
];

fn header_field(cursor: &mut Cursor<'_>, image: &Image, bytes: &mut [u8]) {
    let (at, width) = cursor.pick(&FIELDS);
    let old = u64_in(bytes, at) >> (64 - 8 * width);
    let new = match cursor.below(7) {
        0 => old.wrapping_add(1),
        1 => old.wrapping_sub(1),
        2 => old ^ 1 << cursor.below(8 * width as u64),
        3 => place(cursor, image),
        4 => old.wrapping_mul(2),
        5 => old / 2,
        _ => cursor.u64() >> cursor.below(64),
    };
    set(bytes, at, &new.to_be_bytes()[8 - width..]);
}

/// The start of a structure, or something near it.
fn place(cursor: &mut Cursor<'_>, image: &Image) -> u64 {
    let place = cursor.pick(&image.places);
    let delta = cursor.pick(&[0, 0, 0, 8, 512]) * cursor.below(4);
    match cursor.below(8) {
        0 => (image.bytes.len() as u64).next_multiple_of(image.cluster()) + image.cluster() * cursor.below(4),
        1 => place.offset.wrapping_sub(delta),
        _ => place.offset + delta,
    }
}

/// An entry of eight bytes in a table.
fn table_entry(cursor: &mut Cursor<'_>, image: &Image, bytes: &mut [u8]) {
    let kinds = [
        Structure::L2Table,
        Structure::L2Table,
        Structure::L1Table,
        Structure::SnapshotL1Table,
        Structure::RefcountTable,
        Structure::BitmapDirectory,
        Structure::BitmapTable,
    ];
    let kind = cursor.pick(&kinds);
    let tables: Vec<_> = image.all(kind).collect();
    if tables.is_empty() {
        return;
    }
    let table = cursor.pick(&tables);
    let words = (table.len / 8).max(1);
    // Often an entry that is in use, as most tables begin with those.
    let index = if cursor.one_in(2) {
        cursor.below(words)
    } else {
        cursor.below(words.min(16))
    };
    let at = table.offset + 8 * index;
    let old = u64_in(bytes, at);
    let new = match cursor.below(9) {
        0 => 0,
        1 => old ^ COPIED,
        2 => old ^ 1 << cursor.below(64),
        3 => place(cursor, image),
        4 => place(cursor, image) | COPIED,
        5 => place(cursor, image) | COMPRESSED | cursor.below(256) << cursor.below(62),
        // What another entry of the table has.
        6 => u64_in(bytes, table.offset + 8 * cursor.below(words)),
        7 => old | 1,
        _ => cursor.u64(),
    };
    set(bytes, at, &new.to_be_bytes());
}

/// A few bytes of what is no table: counts, compressed streams, descriptions.
fn bytes_of(cursor: &mut Cursor<'_>, image: &Image, bytes: &mut [u8]) {
    let kinds = [
        Structure::RefcountBlock,
        Structure::RefcountBlock,
        Structure::CompressedData,
        Structure::SnapshotTable,
        Structure::BitmapDirectory,
        Structure::BitmapData,
        Structure::Header,
    ];
    let kind = cursor.pick(&kinds);
    let places: Vec<_> = image.all(kind).collect();
    if places.is_empty() {
        return;
    }
    let place = cursor.pick(&places);
    let at = place.offset + cursor.below(place.len.clamp(1, 256));
    match cursor.below(3) {
        0 => {
            let old = bytes.get(at as usize).copied().unwrap_or_default();
            set(bytes, at, &[old ^ 1 << cursor.below(8)]);
        }
        1 => {
            let new = [cursor.pick(&[0, 1, 2, 0x7f, 0x80, 0xff]); 4];
            let len = 1 + cursor.below(4) as usize;
            set(bytes, at, &new[..len]);
        }
        _ => {
            let len = 1 + cursor.below(16) as usize;
            set(bytes, at, cursor.bytes(len));
        }
    }
}

/// The header extensions: a kind, a length or a payload.
fn extensions(cursor: &mut Cursor<'_>, bytes: &mut [u8]) {
    let at = 112 + 8 * cursor.below(6);
    let new = match cursor.below(3) {
        0 => cursor.pick(&[0, 0xe279_2aca, 0x2385_2875, 0x4441_5441, 0x0537_be77, 0x6803_f857]),
        1 => cursor.pick(&[0, 1, 24, 4096, 0x7fff_ffff, 0x8000_0000, 0xffff_fff9, u32::MAX]),
        _ => cursor.u32(),
    };
    set(bytes, at + 4 * cursor.below(2), &new.to_be_bytes());
}

/// A field of the first snapshot's entry.
fn snapshot(cursor: &mut Cursor<'_>, image: &Image, bytes: &mut [u8]) {
    let Some(table) = image.all(Structure::SnapshotTable).next() else {
        return;
    };
    let (at, width) = cursor.pick(&[
        (0, 8),
        (8, 4),
        (12, 2),
        (14, 2),
        (32, 4),
        (36, 4),
        (40, 8),
        (48, 8),
    ]);
    let new = match cursor.below(3) {
        0 => place(cursor, image),
        1 => cursor.below(256),
        _ => cursor.u64(),
    };
    set(bytes, table.offset + at, &new.to_be_bytes()[8 - width..]);
}
