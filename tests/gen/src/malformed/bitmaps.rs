//! Persistent bitmaps that are malformed: their header extension, their directory, and their tables.
//!
//! A reader does not need them, and a writer may only leave them as they are, mark them as out of date, or refuse: any answer will do
//! that takes no more than its time and memory and writes over nothing else.

use super::{Case, Cases, Fate, base_with};
use crate::image::{Image, Structure, u64_in};

/// The offset of the extension's payload in the header.
const EXTENSION: u64 = 120;

/// The sound image with a bitmap that records changes.
#[must_use]
pub fn bitmap_base() -> Image {
    base_with(|spec| spec.bitmap = true)
}

/// Ways in which bitmaps are wrong. `image` is [`bitmap_base`].
#[must_use]
pub fn bitmap_cases(image: &Image) -> Vec<Case> {
    let mut cases = Cases::default();
    let places = [
        ("nothing", 0),
        ("past the end", image.bytes.len() as u64 + (1 << 20)),
        ("far past the end", 1 << 60),
        ("no place at all", u64::MAX),
        ("between clusters", image.first(Structure::BitmapData) + 512),
        ("the L1 table", image.first(Structure::L1Table)),
        ("an L2 table", image.first(Structure::L2Table)),
        ("the refcount table", image.first(Structure::RefcountTable)),
        ("a refcount block", image.first(Structure::RefcountBlock)),
        ("the snapshot table", image.first(Structure::SnapshotTable)),
        ("the directory", image.first(Structure::BitmapDirectory)),
        ("its table", image.first(Structure::BitmapTable)),
        ("a guest's data", image.first(Structure::Data)),
    ];
    extension(&mut cases, image, &places);
    directory(&mut cases, image, &places);
    table(&mut cases, image, &places);
    cases.0
}

fn extension(cases: &mut Cases, image: &Image, places: &[(&str, u64)]) {
    assert_eq!(
        u64_in(&image.bytes, EXTENSION + 16),
        image.first(Structure::BitmapDirectory),
        "the extension is elsewhere"
    );
    let class = "bitmaps extension";
    for (name, count) in [
        ("no bitmap", 0_u32),
        ("a second bitmap", 2),
        ("most bitmaps", 65_535),
        ("too many bitmaps", 65_536),
        ("bitmaps without end", u32::MAX),
    ] {
        let patches = vec![(EXTENSION, count.to_be_bytes().to_vec())];
        cases.push(class, name, patches, Fate::Survives);
    }
    let patches = vec![(EXTENSION + 4, 1_u32.to_be_bytes().to_vec())];
    cases.push(class, "a reserved bit", patches, Fate::Survives);
    for size in [0, 1, 8, 24, 31, 33, 40, 1 << 20, 64 << 20, 1 << 40, u64::MAX] {
        let name = format!("a directory of {size:#x} bytes");
        cases.word(class, name, EXTENSION + 8, size, Fate::Survives);
    }
    for (name, place) in places {
        let name = format!("a directory at {name}");
        cases.word(class, name, EXTENSION + 16, *place, Fate::Survives);
    }
}

fn directory(cases: &mut Cases, image: &Image, places: &[(&str, u64)]) {
    let class = "bitmap directory";
    let entry = image.first(Structure::BitmapDirectory);
    for (name, place) in places {
        cases.word(class, format!("a table at {name}"), entry, *place, Fate::Survives);
    }
    let field = |cases: &mut Cases, name: &str, at: u64, values: &[&[u8]]| {
        for value in values {
            let patches = vec![(entry + at, value.to_vec())];
            cases.push(class, format!("{name} {value:02x?}"), patches, Fate::Survives);
        }
    };
    let words = |value: u32| value.to_be_bytes();
    let (none, two, most) = (words(0), words(2), words(u32::MAX));
    field(cases, "a table's size", 8, &[&none, &two, &words(1 << 24), &most]);
    field(
        cases,
        "flags",
        12,
        &[&none, &words(1), &words(3), &words(4), &words(8), &most],
    );
    field(cases, "type", 16, &[&[0], &[2], &[255]]);
    field(
        cases,
        "granularity",
        17,
        &[&[0], &[8], &[9], &[31], &[32], &[63], &[64], &[255]],
    );
    field(
        cases,
        "a name's size",
        18,
        &[&[0, 0], &[0, 1], &[3, 255], &[4, 0], &[255, 255]],
    );
    field(
        cases,
        "extra data's size",
        20,
        &[&words(1), &words(8), &words(1 << 20), &most],
    );
    field(cases, "name", 24, &[&[0xff; 7], &[0; 7], b"\xc3(night"]);
}

fn table(cases: &mut Cases, image: &Image, places: &[(&str, u64)]) {
    let class = "bitmap table";
    let entry = image.first(Structure::BitmapTable);
    for (name, place) in places {
        cases.word(class, format!("bits at {name}"), entry, *place, Fate::Survives);
    }
    let data = image.first(Structure::BitmapData);
    for (name, value) in [
        ("all bits set", 1),
        ("a reserved bit", 2),
        ("a place and all bits set", data | 1),
        ("a high reserved bit", data | 1 << 56),
        ("every reserved bit", data | 0x1fe | 0xff << 56),
    ] {
        cases.word(class, name, entry, value, Fate::Survives);
    }
}
