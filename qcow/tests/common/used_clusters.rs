//! The clusters that an image counts, by the few lines that know its refcounts.

#![allow(dead_code, reason = "each test uses its part of this module")]

use qcow::format::Header;

/// The number of clusters that an image counts, and the length that it could have, in bytes.
pub(crate) fn used(image: &[u8]) -> (u64, u64) {
    let header = Header::parse(image).expect("a header");
    let size = header.cluster_bits.size();
    let at = |offset: u64, len: u64| image.get(offset as usize..(offset + len) as usize);
    let table = at(
        header.refcount_table_offset.bytes(),
        header.refcount_table_bytes(),
    );
    let (table, _) = table.expect("a refcount table").as_chunks::<8>();
    let bits = u64::from(header.refcount_order.bits());
    let mut count = 0;
    for entry in table {
        let block = u64::from_be_bytes(*entry);
        let Some(block) = at(block, size).filter(|_| block != 0) else {
            continue;
        };
        // Of single bits up to whole words: it is enough to look if any is set.
        count += (0..size * 8 / bits)
            .filter(|index| {
                let first = index * bits;
                (first..first + bits).any(|bit| {
                    let in_byte = if bits < 8 { bit % 8 } else { 7 - bit % 8 };
                    block_bit(block, bit, in_byte)
                })
            })
            .count() as u64;
    }
    (count, count * size)
}

fn block_bit(block: &[u8], bit: u64, in_byte: u64) -> bool {
    block[(bit / 8) as usize] >> in_byte & 1 == 1
}
