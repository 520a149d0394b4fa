//! The bits of an image's bitmaps, found by the few lines that know their tables.

use std::collections::BTreeMap;

use qcow::format::{Autoclear, BitmapDirectoryEntry, BitmapFlags, Header};

/// A bitmap as it is on disk.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Bits {
    pub(crate) flags: BitmapFlags,
    pub(crate) granularity: u64,
    pub(crate) bits: Vec<bool>,
}

/// The directory entries of an image, with their offsets.
pub(crate) fn entries(image: &[u8]) -> Vec<(usize, BitmapDirectoryEntry)> {
    let header = Header::parse(image).expect("a header");
    let Some(extension) = header
        .bitmaps()
        .filter(|_| header.autoclear.contains(Autoclear::BITMAPS))
    else {
        return Vec::new();
    };
    let mut at = extension.directory_offset.bytes() as usize;
    let entry = |_| {
        let entry = BitmapDirectoryEntry::parse(&image[at..]).expect("an entry");
        let found = (at, entry);
        at += BitmapDirectoryEntry::peek_len(&image[at..]).expect("its length");
        found
    };
    (0..extension.count).map(entry).collect()
}

/// All bitmaps of an image, by name.
pub(crate) fn bitmaps(image: &[u8]) -> BTreeMap<String, Bits> {
    let header = Header::parse(image).expect("a header");
    let cluster = header.cluster_bits.size() as usize;
    let bits_of = |entry: &BitmapDirectoryEntry| -> Vec<bool> {
        let count = header.virtual_size.div_ceil(entry.granularity()) as usize;
        let bit_at = |bit| {
            let at = entry.table_offset.bytes() as usize + bit / (cluster * 8) * 8;
            let raw = u64::from_be_bytes(image[at..at + 8].try_into().expect("eight bytes"));
            match raw {
                0 | 1 => raw == 1,
                host => image[host as usize + bit / 8 % cluster] >> (bit % 8) & 1 == 1,
            }
        };
        (0..count).map(bit_at).collect()
    };
    entries(image)
        .iter()
        .map(|(_, entry)| {
            let name = String::from_utf8(entry.name.clone()).expect("UTF-8");
            let bits = Bits {
                flags: entry.flags,
                granularity: entry.granularity(),
                bits: bits_of(entry),
            };
            (name, bits)
        })
        .collect()
}
